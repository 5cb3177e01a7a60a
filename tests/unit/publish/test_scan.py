"""What scanners found is read, judged by the policy, and kept with the digest of the image that it is about."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from imagebuild.core.errors import ResultError
from imagebuild.core.fields import YamlFile
from imagebuild.oci import image
from imagebuild.project.records import Severity, Vulnerability
from imagebuild.publish.scan import SEVERITIES, Policy, ScanReport, judge_vulnerabilities, load_report
from tests.conftest import ROOT, data
from tests.unit import image_files as make
from tests.unit.conftest import Call

TODAY = date(2099, 6, 15)
ROWS = data("scan/rows")
DIGEST = f"sha256:{'a' * 64}"


def sample(name: str, **changes: Any) -> str:
    """What a scanner prints, made up by its documented form; of JSON, with other values of some keys."""
    text = (ROOT / "tests/data/scan" / name).read_text()
    return json.dumps(json.loads(text) | changes) if changes else text


# Reports


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], ScanReport]:
    def load(text: str) -> ScanReport:
        (tmp_path / "report").write_text(text)
        return load_report(tmp_path / "report")

    return load


DATABASE = {"name": "grype", "version": "0.92.0", "db": {"status": {"built": "2099-01-02T03:04:05Z"}}}
TARGET = {"type": "image", "target": {"manifestDigest": DIGEST, "repoDigests": [f"open@sha256:{'b' * 64}"]}}
SYSTEM = {"OS": {"Family": "debian", "Name": "13.1"}, "RepoDigests": [f"open@{DIGEST}"]}


@pytest.mark.parametrize(
    ("scanner", "text"),
    [
        ("grype", sample("grype.json", descriptor=DATABASE, source=TARGET)),
        ("trivy", sample("trivy.json", Metadata=SYSTEM, CreatedAt="2099-01-02")),
        ("debsecan", sample("debsecan.txt")),
    ],
)
def test_reports(
    read: Callable[[str], ScanReport], golden: Callable[[str, str], None], scanner: str, text: str
) -> None:
    """Every finding of tests/data/scan, and what the report is about."""
    found = TypeAdapter(ScanReport).dump_python(read(text), mode="json")
    golden(
        f"tests/golden/scan/{scanner}.yaml", yaml.safe_dump(found | {"digests": sorted(found["digests"])}, width=120)
    )


def test_what_reports_leave_out_is_noted(read: Callable[[str], ScanReport]) -> None:
    left_out, unrecognised = read(sample("grype.json", ignoredMatches=[{}, {}], distro={})).notes
    assert "left out 2 matches" in left_out
    assert "recognised no distribution" in unrecognised
    assert "recognised no distribution" in read(sample("trivy.json", Metadata={})).notes[0]
    assert read("").findings == (), "debsecan prints nothing where it finds nothing"


@pytest.mark.parametrize("text", ["no report", "{", "{}", '{"matches": [{}]}'])
def test_what_is_no_report(read: Callable[[str], ScanReport], text: str) -> None:
    with pytest.raises(ResultError, match="cannot be read as a report"):
        read(text)


# The policy


def finding(
    name: str = "CVE-1-1", severity: Severity = "high", fixed: str | None = "2", package: str = "p"
) -> Vulnerability:
    return Vulnerability(id=name, severity=severity, package=package, version="1", fixed_in=fixed)


def judged(
    *found: Vulnerability, worst: Severity = "critical", **rules: Any
) -> tuple[tuple[Vulnerability, ...], list[str]]:
    document = YamlFile(Path("p.yaml"), Policy.model_validate({"fail": {"severity": "high"}, **rules}), {})
    return judge_vulnerabilities(ScanReport("a scanner", found, worst=worst), document, TODAY)


@pytest.mark.parametrize("row", ROWS["policy"], ids=str)
def test_what_fails(row: dict[str, Any]) -> None:
    found, fails, policy = finding(**row.get("found", {})), row["fails"], row["policy"]
    findings, notes = judged(found, found, **policy)
    assert [f.fails for f in findings] == [fails], "of what lies in two places, one is listed"
    assert bool(findings[0].waived) == ("ignore" in policy and not fails)
    assert notes == ([row["note"]] if "note" in row else [])


def test_what_fails_comes_first() -> None:
    findings, _ = judged(
        finding("CVE-1-9", "critical", package="a"), finding("CVE-1-3", "low"), finding(),
        ignore=[ROWS["rule"] | {"id": "CVE-1-9"}],
    )  # fmt: skip
    assert [f.id for f in findings] == ["CVE-1-1", "CVE-1-9", "CVE-1-3"]
    assert SEVERITIES[0] == "unknown"


def test_our_policy(golden: Callable[[str, str], None]) -> None:
    golden("schemas/scan-policy.json", json.dumps(Policy.model_json_schema(by_alias=True), indent=1) + "\n")
    fail = Policy.model_validate(yaml.safe_load((ROOT / "scan-policy.yaml").read_text())).fail
    assert (fail.severity, fail.only_fixed, fail.unknown_severity) == ("high", True, True)


# The command


@pytest.fixture
def scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Call) -> Callable[..., tuple[int, str, str]]:
    """In a folder with an image and reports, and without an engine."""
    monkeypatch.setattr(image, "image_in_engine", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    for name, system in (("image", "debian13"), ("ubuntu", "ubuntu24.04")):
        make.layout(tmp_path / name, {"x": b"1"}, Labels={"imagebuild.axis.os": system})
    made = json.loads(Path("image/index.json").read_text())["manifests"][0]["digest"]
    Path("trivy.json").write_text(
        sample("trivy.json", Metadata={"OS": {"Family": "debian"}, "RepoDigests": [f"x@{made}"]})
    )
    Path("other.json").write_text(sample("trivy.json", Metadata={"RepoDigests": [f"x@{DIGEST}"]}))
    Path("nameless.json").write_text(sample("grype.json"))
    Path("debsecan.txt").write_text(sample("debsecan.txt"))
    Path("awful.yaml").write_text("fail: {severity: awful}\n")
    Path("why.yaml").write_text("ignore:\n  - {id: CVE-1, until: 2099-01-01, reason: why}\n")
    return partial(command, "scan")


@pytest.mark.parametrize(("arguments", "status", "message"), ROWS["command"])
def test_exit_status(scan: Call, arguments: str, status: int, message: str) -> None:
    done, out, err = scan(*arguments.split())
    assert done == status, out + err
    assert message.replace("DIGEST", DIGEST) in out + err
