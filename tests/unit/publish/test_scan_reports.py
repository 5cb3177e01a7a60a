"""Reports of scanners are read completely, and whatever a report does not say is not taken for good news."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from imagebuild.core.errors import ResultError
from imagebuild.publish.scan_reports import SEVERITIES, ScanReport, load_report
from tests.conftest import ROOT, data

CASES = data("cases/publish/scan_reports")

FILES = ROOT / "tests/data/scan"
Read = Callable[..., ScanReport]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def load(content: object, name: str = "report") -> ScanReport:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return load_report(tmp_path / name)

    return load


def run_of(scanner: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((FILES / f"{scanner}.sarif").read_text())["runs"][0]
    return run


def sarif(*runs: object) -> dict[str, Any]:
    return {"version": "2.1.0", "runs": runs}


@pytest.mark.parametrize("name", ["grype.sarif", "trivy.sarif", "scout.sarif", "snyk.sarif", "debsecan.txt"])
def test_samples(golden: Callable[[str, str], None], name: str) -> None:
    """Samples written for these tests, in the shape of each scanner's output.

    The shapes come from the public source of grype (its SARIF presenter), Trivy (its SARIF writer) and Snyk's command
    line (its SARIF formatters), and from reports of Docker Scout that others published. In the samples:

    - grype: two versions of pip refer to one rule, which knows only the fix of the first; two findings that grype calls
      low have a score of 0.0 or of another severity.
    - Trivy: a secret among the vulnerabilities; a line of a description that looks like a label.
    - Docker Scout: a rule about two packages, whose fixed version is not that of the message; a suppressed result.
    - Snyk: two runs; no fixed versions, and a score that is not a number.
    """
    found = TypeAdapter(ScanReport).dump_python(load_report(FILES / name), mode="json")
    expected = yaml.safe_dump(found | {"digests": sorted(found["digests"])}, width=120)
    golden(f"tests/golden/scan/{name.partition('.')[0]}.yaml", expected)


def test_nothing_found(read: Read) -> None:
    clean = read(sarif({"tool": {"driver": {"name": "grype", "semanticVersion": "1.2"}}, "results": []}))
    assert (clean.scanner, clean.findings, clean.digests) == ("grype 1.2", (), frozenset())
    assert "does not say which distribution grype recognised" in clean.notes[0]
    assert not clean.recognised, "a scanner that did not recognise the distribution finds nothing, too"


DRIVER = {"driver": {"name": "grype"}}


@pytest.mark.parametrize(("content", "problem"), CASES["refused"])
def test_refused(read: Read, content: object, problem: str) -> None:
    with pytest.raises(ResultError) as error:
        read(content)
    assert f"cannot be read as a scanner's report: {problem}" in str(error.value)
    assert "scan again with `grype -o sarif`, `trivy image --format sarif` or `debsecan" in str(error.value)


@pytest.mark.parametrize("name", ["scan.sarif", "debsecan.txt"])
@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_not_a_report(read: Read, name: str, text: str) -> None:
    """A scanner that fails leaves an empty file behind a redirection; debsecan also for an empty list of packages."""
    with pytest.raises(ResultError, match="nothing shows that a package was scanned .if debsecan found nothing"):
        read(text, name)


def test_a_report_of_debsecan_without_findings_says_what_was_scanned(read: Read) -> None:
    assert read("# debsecan --suite=trixie: 99 packages\n", "debsecan.txt").findings == ()
    for nothing in ("# debsecan --suite=: 99 packages\n", "# debsecan --suite=trixie: 0 packages\n"):
        with pytest.raises(ResultError, match="is neither SARIF nor a finding"):
            read(nothing, "debsecan.txt")


@pytest.mark.parametrize(
    ("name", "kept"), CASES["findings-in-other-software-do-not-show-that-the-distribution-was-recognised"]
)
def test_findings_in_other_software_do_not_show_that_the_distribution_was_recognised(
    read: Read, name: str, kept: str
) -> None:
    runs = json.loads((FILES / f"{name}.sarif").read_text())["runs"]
    assert read(sarif(*runs)).recognised
    for run in runs:
        run["results"] = [result for result in run["results"] if kept in json.dumps(result)]
        for rule in run["tool"]["driver"]["rules"]:
            tags = rule.get("properties", {}).get("tags", [])
            rule["properties"]["tags"] = ["pip" if tag == "deb" else tag for tag in tags]
    assert not read(sarif(*runs)).recognised


@pytest.mark.parametrize(("score", "severity"), CASES["severity-by-score"])
def test_severity_by_score(read: Read, score: object, severity: str) -> None:
    """A report without a word for the severity."""
    rule = {"id": "CVE-1-1", "properties": {"security-severity": score}}
    result = {"ruleId": "CVE-1-1", "message": {"text": "Package: p\nInstalled Version: 1\nFixed Version: 2"}}
    run = {"tool": {"driver": {"name": "another", "rules": [rule]}}, "results": [result]}
    assert [f.severity for f in read(sarif(run)).findings] == [severity]
    assert severity in SEVERITIES


def test_rule_by_index(read: Read) -> None:
    """A result names its rule by the identifier, the index, or not at all."""
    run = run_of("trivy")
    run["tool"]["driver"]["rules"][0]["id"] = "CVE-2099-0001-by-index"
    assert read(sarif(run)) == load_report(FILES / "trivy.sarif")
    del run["tool"]["driver"]["rules"][2:]
    with pytest.raises(ResultError, match="results.2 does not name a package"):
        read(sarif(run))  # a secret that cannot be told from a vulnerability


def test_all_runs_must_name_the_image(read: Read) -> None:
    first, second = run_of("grype"), run_of("trivy")
    both = read(sarif(first, second))
    assert (both.scanner, both.digests) == ("grype 0.92.0, Trivy 0.68.1", frozenset({f"sha256:{'a' * 64}"}))
    assert len(both.findings) == 6 + 2
    second["properties"]["repoDigests"] = [f"registry.test/open@sha256:{'b' * 64}"]
    assert read(sarif(first, second)).digests == frozenset()


def test_start(read: Read) -> None:
    run = {"tool": DRIVER, "results": [], "invocations": [{"startTimeUtc": "2099-01-02T03:04:05Z"}]}
    assert read(sarif(run)).started == "2099-01-02T03:04:05+00:00"
    run = {"tool": DRIVER, "results": [], "invocations": [{"startTimeUtc": "zzzz"}]}
    with pytest.raises(ResultError, match="'zzzz' is not a time in the form of ISO 8601"):
        read(sarif(run))
