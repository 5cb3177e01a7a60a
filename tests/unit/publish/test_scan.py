"""`imagebuild scan` without scanners: stand-ins print samples; what is asked of them is what they document."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import CommandError, ConfigError, ResultError, YamlFile, packages_of_sbom
from imagebuild.oci import FoundImage
from imagebuild.project import Plan
from imagebuild.publish import (
    SCANNERS_BY_NAME,
    Policy,
    ScanHost,
    ScanInput,
    ScanRequest,
    ScanSubject,
    System,
    choose_scanner,
    print_scan,
    read_sbom_image,
    scan_image,
    scan_subject_of_image,
    scan_subject_of_sbom,
)
from imagebuild.verify import ImageFinder
from tests.conftest import ROOT
from tests.unit import image_files as make
from tests.unit.conftest import Runner
from tests.unit.publish import vulnerability_samples as samples

NOW = datetime(2099, 1, 3, 3, 4, 5, tzinfo=UTC)
RULES = YamlFile(Path("p.yaml"), Policy(), {})
AXES = {"cuda": "13.5", "os": "debian13", "variant": "runtime"}
LABELS = {
    "imagebuild.target": "my-open-cuda13.5-debian13-runtime",
    **{f"imagebuild.axis.{n}": v for n, v in AXES.items()},
}
DEBIAN = {"usr/lib/os-release": samples.OS_RELEASE.encode(), "var/lib/dpkg/status": samples.STATUS.encode()}


def image_of(path: Path, *layers: make.Files, **settings: Any) -> ScanSubject:
    make.layout(path, *(layers or (DEBIAN,)), Labels=LABELS, **settings)
    with ImageFinder().find(f"oci:{path}") as found:
        assert isinstance(found, FoundImage)
        return scan_subject_of_image(found.image(None))


def machine(*programs: str, **answers: str | Callable[[], str]) -> tuple[ScanHost, Runner]:
    """A machine with these programs, stand-ins that print samples."""
    runner = Runner(
        {
            "grype": samples.grype(),
            "trivy version": samples.TRIVY_VERSION,
            "trivy": samples.trivy(),
            "debsecan": samples.DEBSECAN,
            "dpkg-query": "0.4.20.1",
            **answers,
        }
    )
    return ScanHost(runner, lambda name: name if name in programs else None, lambda: NOW), runner


def test_what_the_image_says_of_itself(tmp_path: Path) -> None:
    about = image_of(tmp_path)
    assert about.system == System("debian", "trixie", samples.STATUS)
    assert about.facts == {"arch": "amd64", "image": "my-open", **AXES}
    assert about.digest.startswith("sha256:")
    assert about.platform == "linux/amd64"


def test_grype_reads_a_layout_of_this_platform(tmp_path: Path) -> None:
    here, runner = machine("grype")
    seen: dict[str, Any] = {}

    def run(*argv: str, env: Any = None, timeout: float | None = None) -> str:
        layout = Path(argv[-1].removeprefix("oci-dir:"))
        seen.update(env or {}, index=json.loads((layout / "index.json").read_text()))
        seen["blobs"] = all(
            (layout / "blobs" / "sha256" / p.name).read_bytes() for p in (layout / "blobs/sha256").iterdir()
        )
        seen["settings"] = Path(argv[argv.index("--config") + 1]).read_text()
        return runner(*argv, env=env, timeout=timeout)

    about = image_of(tmp_path)
    made = scan_image(about, RULES, ScanRequest(offline=True, database=tmp_path), replace(here, run=run))
    assert made.digest == about.digest == seen["index"]["manifests"][0]["digest"]
    assert seen["blobs"]
    assert seen["settings"] == ""
    assert seen["GRYPE_DB_AUTO_UPDATE"] == seen["GRYPE_ONLY_FIXED"] == "false"
    assert seen["GRYPE_DB_CACHE_DIR"] == str(tmp_path)
    assert made.scanner == "grype 0.87.0"
    assert made.database == "schema 5, of 2099-01-02T03:04:05+00:00"
    assert made.verdict == "failed"
    assert [f.fails for f in made.findings] == [True, False, False]
    assert made.started == "2099-01-03T03:04:05+00:00"


def test_grype_may_update_its_database_unless_offline(tmp_path: Path) -> None:
    assert "GRYPE_DB_AUTO_UPDATE" not in SCANNERS_BY_NAME["grype"].environment(ScanInput(tmp_path))


def test_trivy(tmp_path: Path) -> None:
    here, runner = machine("trivy", "debsecan")
    made = scan_image(image_of(tmp_path), RULES, ScanRequest(offline=True, database=tmp_path), here)
    (line,) = runner.of("trivy image")
    for option in (
        "--skip-db-update",
        "--offline-scan",
        f"--cache-dir {tmp_path}",
        "--ignorefile",
        "--format json",
        "--ignore-unfixed=false",
        "LOW,",
    ):
        assert option in line
    assert f"--cache-dir {tmp_path}" in runner.of("trivy version")[0]
    assert made.scanner == "trivy 0.58.0"
    assert made.verdict == "passed"
    scan_image(image_of(tmp_path / "other"), RULES, ScanRequest(), here)
    assert "--skip-db-update" not in runner.of("trivy image")[1]


def test_debsecan_with_a_database_on_disk(tmp_path: Path) -> None:
    here, runner = machine("debsecan")
    given = samples.database(tmp_path / "data" / "trixie")
    made = scan_image(image_of(tmp_path / "image"), RULES, ScanRequest(database=given, offline=True), here)
    (line,) = runner.of("debsecan")
    assert "--suite trixie" in line
    assert "--source file:///" in line
    assert "--whitelist " in line
    assert made.scanner == "debsecan 0.4.20.1"
    assert made.database.startswith("trixie, sha256:")
    # It reports nothing worse than high, so the default policy fails by that, and says it.
    assert made.reason == "1 finding that the policy does not allow"
    assert any("reports nothing worse than high" in note for note in made.notes)
    assert any("wheels, CUDA, HPC-X" in note for note in made.notes)


def test_debsecan_that_fetches_its_data(tmp_path: Path) -> None:
    here, runner = machine("debsecan")
    made = scan_image(image_of(tmp_path), RULES, ScanRequest(), here)
    assert "--source" not in runner.of("debsecan")[0]
    assert made.database == "the tracker's data for trixie, of 2099-01-03T03:04:05+00:00"
    with pytest.raises(ConfigError, match="keeps no database on this machine; give one with --database"):
        scan_image(image_of(tmp_path / "again"), RULES, ScanRequest(offline=True), here)


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("absent", None, ConfigError, "does not exist"),
        ("folder", None, ConfigError, "give the tracker's file for trixie, or a folder with it"),
        ("text", b"VERSION 1\n", ResultError, "not a database of debsecan"),
        ("other", "VERSION 2\n", ResultError, "in an unknown format"),
    ],
)
def test_databases_that_are_none(
    tmp_path: Path, name: str, content: bytes | str | None, error: type[Exception], said: str
) -> None:
    here, runner = machine("debsecan")
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif isinstance(content, str):
        samples.database(path, content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=said):
        scan_image(image_of(tmp_path / "image"), RULES, ScanRequest(database=path), here)
    assert not runner.calls


@pytest.mark.parametrize(
    ("programs", "files", "wanted", "error", "said"),
    [
        ((), DEBIAN, "auto", CommandError, "install grype .*; or install trivy .*; or install debsecan"),
        ((), DEBIAN, "trivy", CommandError, "trivy is not installed: install trivy"),
        ((), DEBIAN, "clair", ConfigError, "use auto, grype, trivy, debsecan"),
        (("debsecan",), {"usr/lib/os-release": b"ID=ubuntu\nVERSION_CODENAME=noble\n", "var/lib/dpkg/status": b"x"}, "auto",
         CommandError, r"install grype from \S+; or install trivy from \S+$"),
        (("debsecan",), {"usr/lib/os-release": b"ID=ubuntu\n", "var/lib/dpkg/status": b"x"}, "debsecan", ConfigError, "is ubuntu"),
        (("debsecan",), {"etc/passwd": b""}, "debsecan", ConfigError, "reads dpkg's list"),
    ],
)  # fmt: skip
def test_without_a_scanner_there_is_no_result(
    tmp_path: Path, programs: tuple[str, ...], files: make.Files, wanted: str, error: type[Exception], said: str
) -> None:
    here, runner = machine(*programs)
    with pytest.raises(error, match=said):
        scan_image(image_of(tmp_path, files), RULES, ScanRequest(scanner=wanted), here)
    assert not runner.calls


def test_a_scanner_that_fails_is_no_result(tmp_path: Path) -> None:
    def broken() -> str:
        raise CommandError("`grype` failed (1): no database")

    here, _ = machine("grype", grype=broken)
    with pytest.raises(CommandError, match="no database"):
        scan_image(image_of(tmp_path), RULES, ScanRequest(), here)


def test_auto_takes_the_first_that_is_there(tmp_path: Path) -> None:
    about = image_of(tmp_path)
    for programs, taken in (
        (("grype", "trivy", "debsecan"), "grype"),
        (("debsecan", "trivy"), "trivy"),
        (("debsecan",), "debsecan"),
    ):
        assert choose_scanner("auto", about, machine(*programs)[0]).name == taken


def test_a_scanner_that_does_not_know_the_distribution_says_so(tmp_path: Path) -> None:
    here, _ = machine("grype", grype=samples.grype(distro={}, matches=[]))
    made = scan_image(image_of(tmp_path), RULES, ScanRequest(), here)
    assert "grype recognised no distribution, so it did not scan the packages of one" in made.notes
    assert "p.yaml: does not exist, so critical fails and nothing is waived" in made.notes


def test_an_sbom_instead_of_an_image(tmp_path: Path) -> None:
    path = tmp_path / "sbom.spdx.json"
    path.write_text(json.dumps(samples.sbom()))
    about = scan_subject_of_sbom(path)
    assert (about.name, about.digest, about.platform) == ("example/image", f"sha256:{'d' * 64}", "linux/amd64")
    assert about.system.id == "debian"
    assert about.system.suite == "trixie"
    assert about.facts == {"arch": "amd64"}
    here, runner = machine("trivy")
    assert scan_image(about, RULES, ScanRequest(), here).digest == about.digest
    assert runner.of(f"trivy sbom {path}")
    here, runner = machine("grype")
    scan_image(about, RULES, ScanRequest(), here)
    assert runner.calls[0].endswith(f"sbom:{path}")


def test_the_axes_of_an_sbom_are_those_of_its_target(tmp_path: Path, full_plan: Plan) -> None:
    path = tmp_path / "sbom.spdx.json"
    target = full_plan.targets[0]
    path.write_text(json.dumps(samples.sbom()).replace("example/image", target.id))
    assert scan_subject_of_sbom(path, full_plan).facts == {**target.axes, "image": target.image, "arch": "amd64"}


def test_the_sbom_of_syft() -> None:
    """A real one, which names its image in other places than ours does."""
    document = json.loads((ROOT / "tests/data/sbom/syft.json").read_text())
    about = read_sbom_image(document)
    assert about.digest
    assert (about.distribution, about.suite) == ("debian", "trixie")
    assert "libc6" in {package.name for package in packages_of_sbom(document)}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("x", ResultError, "not an SBOM"),
        ("[]", ResultError, "not an SBOM"),
        ("{}", ResultError, "no spdxVersion"),
        (json.dumps({"spdxVersion": "SPDX-2.3", "packages": []}), ConfigError, "names no digest"),
        (json.dumps(samples.sbom("unknown")), ConfigError, "names no digest"),
    ],
)
def test_files_that_are_no_sbom_of_an_image(tmp_path: Path, text: str, error: type[Exception], said: str) -> None:
    path = tmp_path / "sbom.json"
    path.write_text(text)
    with pytest.raises(error, match=said):
        scan_subject_of_sbom(path)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, _ = machine("debsecan", debsecan=samples.DEBSECAN + samples.DEBSECAN.replace("libssl3t64", "openssl"))
    made = scan_image(image_of(tmp_path), RULES, ScanRequest(), here)
    print_scan(made, every=False)
    said = capsys.readouterr().out
    assert "libssl3t64, openssl" in said
    assert "and 2 more that fail nothing (1 medium, 1 unknown); --all lists them" in said
    assert "libc6" not in said
    print_scan(made, every=True)
    said = capsys.readouterr().out
    lines = [line.split()[0] for line in said.splitlines() if "CVE" in line or "TEMP" in line]
    assert lines == ["high", "medium", "unknown"]
    assert "2 high, 1 medium, 1 unknown" in said


STAND_IN = """\
#!{python}
# A stand-in for grype: looks at what it is given as grype would, and prints a sample.
import json, os, pathlib, sys
layout = pathlib.Path(sys.argv[-1].removeprefix("oci-dir:"))
(about,) = json.loads((layout / "index.json").read_text())["manifests"]
manifest = json.loads((layout / "blobs" / about["digest"].replace(":", "/")).read_text())
for layer in [manifest["config"], *manifest["layers"]]:
    assert (layout / "blobs" / layer["digest"].replace(":", "/")).stat().st_size == layer["size"]
assert os.environ["GRYPE_DB_AUTO_UPDATE"] == "false"
print({sample!r})
"""


@pytest.mark.programs
def test_a_program_is_started_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "grype"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, sample=samples.grype()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    made = scan_image(image_of(tmp_path / "image"), RULES, ScanRequest(offline=True))
    assert made.scanner == "grype 0.87.0"
    assert len(made.findings) == 3
