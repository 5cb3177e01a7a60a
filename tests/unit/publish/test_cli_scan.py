"""`imagebuild scan` and `imagebuild diff` as people call them: options, files that are written, exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from imagebuild.oci import image
from imagebuild.project import ScanResult
from imagebuild.publish import Comparison
from imagebuild.publish import scan as publish_scan
from tests.conftest import Files
from tests.unit import image_files as make
from tests.unit.conftest import Call
from tests.unit.publish import vulnerability_samples as samples
from tests.unit.publish.test_scan import DEBIAN, LABELS, machine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an image, on a machine with stand-ins for debsecan, and without an engine."""
    here, _ = machine("debsecan")
    monkeypatch.setattr(publish_scan, "ScanHost", lambda: here)
    monkeypatch.setattr(image, "engine_with_image", lambda _: None)
    monkeypatch.chdir(tmp_path)
    make.layout(tmp_path / "image", DEBIAN, Labels=LABELS)
    return tmp_path


@pytest.fixture
def scan(folder: Path, command: Call) -> Callable[..., tuple[int, str, str]]:
    return partial(command, "scan")


def policy(folder: Path, text: str) -> None:
    (folder / "scan-policy.yaml").write_text(text)


def test_a_scan_that_fails_and_one_that_is_waived(folder: Path, scan: Call) -> None:
    status, out, _ = scan("./image", "--json", "scan.json")
    assert status == 1
    assert "✗ failed (1 finding that the policy does not allow)" in out
    made = ScanResult.model_validate_json((folder / "scan.json").read_text())
    assert made.verdict == "failed"
    policy(folder, "waivers:\n  - {id: CVE-2099-0001, package: 'libssl*', until: 2099-12-31, reason: nobody listens}\n")
    status, out, _ = scan("./image", "--json", "scan.json")
    assert status == 0
    assert "waived until 2099-12-31: nobody listens" in out
    made = ScanResult.model_validate_json((folder / "scan.json").read_text())
    assert made.verdict == "passed"
    assert made.findings[0].waived


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "name an image, or give --sbom FILE"),
        (("./image", "--sbom", "x"), 2, "name an image, or give --sbom FILE"),
        (("./image", "--scanner", "x"), 2, "use auto, grype, trivy, debsecan"),
        (("./image", "--scanner", "grype"), 4, "grype is not installed: install grype"),
        (
            ("./image", "--offline"),
            2,
            "--offline: debsecan keeps no database on this machine; give one with --database",
        ),
        (("./image", "--policy", "absent.yaml"), 2, "absent.yaml: cannot be read"),
        (("./image", "--platform", "linux/arm64"), 2, "is not for linux/arm64"),
        (("./absent",), 2, "does not exist"),
        (("--sbom", "absent"), 2, "absent: cannot be read"),
        (("ghcr.io/x/y:1", "--offline"), 2, "--offline asks no registry"),
        (("./image", "--matrix", "absent.yaml"), 2, "absent.yaml: cannot be read"),
    ],
)
def test_what_is_refused(folder: Path, scan: Call, arguments: tuple[str, ...], status: int, said: str) -> None:
    got, out, err = scan(*arguments)
    assert (got, out) == (status, "")
    assert said in err


def test_an_sbom(folder: Path, scan: Call) -> None:
    (folder / "sbom.spdx.json").write_text(json.dumps(samples.sbom()))
    status, _, _ = scan("--sbom", "sbom.spdx.json", "--json", "scan.json")
    assert status == 1
    assert ScanResult.model_validate_json((folder / "scan.json").read_text()).digest == f"sha256:{'d' * 64}"


def test_a_target_and_the_axes_of_its_project(tiny: Files, folder: Path, scan: Call) -> None:
    status, _, err = scan("tiny-cuda13.0-debian13-runtime")
    assert status == 2
    assert "is not built, or has other versions than the plan" in err
    policy(folder, "waivers:\n  - {id: CVE-1-1, until: 2099-12-31, reason: nobody listens, when: {cdua: x}}\n")
    status, _, err = scan("tiny-cuda13.0-debian13-runtime")
    assert "scan-policy.yaml:2: waivers.0.when: unknown axis 'cdua'; did you mean 'cuda'?" in err


def test_diff(folder: Path, command: Call) -> None:
    make.layout(
        folder / "other", {"var/lib/dpkg/status": samples.STATUS.replace("2.41-12", "2.41-13").encode()}, Labels=LABELS
    )
    status, out, _ = command("diff", "./image", "./other", "--json", "diff.json")
    assert status == 0
    assert "libc6  2.41-12  2.41-13" in out
    made = Comparison.model_validate_json((folder / "diff.json").read_text())
    assert made.differs
    assert command("diff", "./image", "./other", "--exit-code")[0] == 1
    assert command("diff", "./image", "./image", "--exit-code")[0] == 0
    status, out, _ = command("diff", "./image", "./other", "--markdown")
    assert status == 0
    assert "| libc6 | 2.41-12 | 2.41-13 |" in out
    assert command("diff", "./image")[0] == 2
    status, _, err = command("diff", "./image", "./absent")
    assert status == 2
    assert "does not exist" in err
