"""Findings of scanners are judged by the policy, and the verdict is kept with the digest of the image."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.core.fields import YamlFile
from imagebuild.oci import image
from imagebuild.project.records import Severity, Vulnerability
from imagebuild.publish.scan import Policy, judge_vulnerabilities
from imagebuild.publish.scan_reports import ScanReport
from tests.conftest import ROOT, data
from tests.unit import image_files as make
from tests.unit.conftest import Call

TODAY = date(2099, 6, 15)
ROWS = data("scan/rows")
DIGEST = f"sha256:{'a' * 64}"
FILES = ROOT / "tests/data/scan"


# The policy


def finding(
    name: str = "CVE-1-1", severity: Severity = "high", fixed: str | None = "2", package: str = "p"
) -> Vulnerability:
    return Vulnerability(id=name, severity=severity, package=package, version="1", fixed_in=fixed)


def judged(
    *found: Vulnerability, worst: Severity = "critical", unstated: bool = False, **rules: Any
) -> tuple[tuple[Vulnerability, ...], list[str]]:
    document = YamlFile(Path("p.yaml"), Policy.model_validate({"fail": {"severity": "high"}, **rules}), {})
    report = ScanReport("a scanner", found, unstated_fixes=found if unstated else (), worst=worst)
    return judge_vulnerabilities(report, document, TODAY)


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
    for name in ("grype", "trivy", "scout", "snyk"):
        report = (FILES / f"{name}.sarif").read_text()
        Path(f"{name}.sarif").write_text(report.replace("a" * 64, made.removeprefix("sha256:")))
    Path("other.sarif").write_text((FILES / "trivy.sarif").read_text())
    clean: dict[str, Any] = {"version": "2.1.0", "runs": [{"tool": {"driver": {"name": "grype"}}, "results": []}]}
    Path("nameless.sarif").write_text(json.dumps(clean))
    clean["runs"][0] |= {"properties": {"repoDigests": [f"registry.test/open@{made}"]}}
    Path("clean.sarif").write_text(json.dumps(clean))
    report = json.loads(Path("trivy.sarif").read_text())
    report["runs"][0]["invocations"] = [{"startTimeUtc": "2399-01-01T00:00:00Z"}]
    Path("future.sarif").write_text(json.dumps(report))
    for rule in report["runs"][0]["tool"]["driver"]["rules"]:
        rule["name"] = "LanguageSpecificPackageVulnerability"
    Path("wheels.sarif").write_text(json.dumps(report))
    Path("nothing.txt").touch()
    Path("debsecan.txt").write_text((FILES / "debsecan.txt").read_text())
    Path("empty.sarif").write_text('{"version": "2.1.0", "runs": []}')
    Path("ours.yaml").write_text((ROOT / "scan-policy.yaml").read_text())
    Path("awful.yaml").write_text("fail: {severity: awful}\n")
    Path("why.yaml").write_text("ignore:\n  - {id: CVE-1, until: 2099-01-01, reason: why}\n")
    return partial(command, "scan")


@pytest.mark.parametrize(("arguments", "status", "message"), ROWS["command"])
def test_exit_status(scan: Call, arguments: str, status: int, message: str) -> None:
    done, out, err = scan(*arguments.split())
    assert done == status, out + err
    assert message.replace("DIGEST", DIGEST) in out + err
