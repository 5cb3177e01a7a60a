"""Reports of vulnerability scanners: SARIF, which most scanners write, and the text that debsecan prints."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from packageurl import PackageURL

from imagebuild.core import files
from imagebuild.core.errors import ResultError, plural
from imagebuild.core.fields import in_utc
from imagebuild.core.patterns import DataFile
from imagebuild.project.records import Severity, Vulnerability

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities in ascending order; `unknown` comes first."""
DEBSECAN = "debsecan"
_DATA = DataFile(__file__)
_LABELS: Mapping[str, str] = _DATA["labels"]
_SENTENCES = [_DATA.patterns[name] for name in ("grype", "snyk")]
_RATINGS: Mapping[Severity, float] = _DATA["ratings"]


@dataclass(frozen=True)
class ScanReport:
    """The findings of a vulnerability scanner, and the facts about the scan in the scanner's report."""

    scanner: str
    """The scanner's name and, if the report contains it, its version."""
    findings: tuple[Vulnerability, ...]
    unstated_fixes: tuple[Vulnerability, ...] = ()
    """The findings for which the report does not say whether a fixed version exists."""
    recognised: bool = False
    """Whether a finding is about a package of the distribution, which shows that the scanner recognised the
    distribution. A scanner that did not recognise the distribution finds nothing, too."""
    digests: frozenset[str] = frozenset()
    """Digests by which the report names the image."""
    database: str = ""
    """Description of the scanner's vulnerability database. Empty if the report does not describe it."""
    started: str = ""
    """Start time of the scan. Empty if the report does not contain the time."""
    worst: Severity = "critical"
    """The worst severity that the scanner can report."""
    notes: tuple[str, ...] = ()
    """Notes for the user about facts that the report does not contain and about results that were left out."""


def load_report(file: Path) -> ScanReport:
    """Read the report of a vulnerability scanner: a SARIF 2.1.0 file, or the output of `debsecan --format detail`.

    Raises ConfigError if the file does not exist. Raises ResultError if the file is not such a report, or does not show
    that the scan finished."""
    text = files.read_text(file)
    try:
        if text.lstrip().startswith("{"):
            return _read_sarif(json.loads(text))
        if not text.strip():
            hint = "if debsecan found nothing, begin the report with the line `# debsecan --suite=SUITE: N packages`"
            raise ValueError(f"the file is empty, so nothing shows that a package was scanned ({hint})")
        return _read_debsecan(text)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        remedy = "scan again with `grype -o sarif`, `trivy image --format sarif` or `debsecan --format detail`"
        raise ResultError(f"{file}: cannot be read as a scanner's report: {why}; {remedy}") from None


# SARIF
#
# SARIF has no fields for a package, its versions and a severity in words. Each scanner writes these values into other
# texts:
# - Trivy and Docker Scout write lines `Label: value` into the message of each result.
# - grype writes such lines into the help of the rule. The rule describes one package, but results about other versions
#   of this package refer to the rule, too. The message is a sentence with the severity, the package and its version.
# - Snyk writes a sentence with the severity and the package, and `package@version` as the location.


def _read_sarif(document: Mapping[str, Any]) -> ScanReport:
    """Combine the runs in a SARIF file into one report. The report names an image only if all runs name this image."""
    if document.get("version") != "2.1.0":
        raise ValueError("the file is not SARIF 2.1.0")
    if not document.get("runs"):
        raise ValueError("the file contains no run of a scanner")
    reports = [_read_run(run, f"runs.{i}") for i, run in enumerate(document["runs"])]
    return ScanReport(
        ", ".join(dict.fromkeys(report.scanner for report in reports)),
        tuple(finding for report in reports for finding in report.findings),
        tuple(finding for report in reports for finding in report.unstated_fixes),
        any(report.recognised for report in reports),
        frozenset.intersection(*(report.digests for report in reports)),
        started=min(report.started for report in reports),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


def _read_run(run: Mapping[str, Any], place: str) -> ScanReport:
    driver = (run.get("tool") or {}).get("driver") or {}
    if not driver.get("name"):
        raise ValueError(f"{place} does not name its scanner (tool.driver.name)")
    results, invocations = run.get("results"), run.get("invocations") or []
    if results is None:
        raise ValueError(f"{place} has no list of results, so the scan did not finish")
    if any(invocation.get("executionSuccessful") is False for invocation in invocations):
        raise ValueError(f"{place} says that the scan failed (executionSuccessful)")
    rules: Sequence[Mapping[str, Any]] = driver.get("rules") or []
    by_id = {rule["id"]: rule for rule in rules}
    findings, unstated, others = list[Vulnerability](), list[Vulnerability](), set[str]()
    left_out, recognised = 0, False
    for i, result in enumerate(results):
        rule = by_id.get(result.get("ruleId"))
        if rule is None:
            index = result.get("ruleIndex", -1)
            rule = rules[index] if 0 <= index < len(rules) else {}
        if kinds := {*_DATA["not-vulnerabilities"]}.intersection((rule.get("properties") or {}).get("tags") or ()):
            others |= kinds
            left_out += 1
            continue
        finding, states_fix = _read_result(result, rule, driver["name"], f"{place}.results.{i}")
        findings.append(finding)
        recognised |= _is_of_distribution(result, rule)
        if not states_fix:
            unstated.append(finding)
    scanner = f"{driver['name']} {driver.get('semanticVersion') or driver.get('version') or ''}".strip()
    notes = [
        f"the report does not say which distribution {driver['name']} recognised, how old the vulnerability database "
        "is, or which findings the scanner's settings left out"
    ]
    if left_out:
        listed = ", ".join(sorted(others))
        judged = "because only vulnerabilities are judged"
        notes.append(f"left out {plural(left_out, 'result')}, {judged}; kinds left out: {listed}")
    return ScanReport(
        scanner, tuple(findings), tuple(unstated), recognised, frozenset(_digests(run)),
        started=next((in_utc(str(i["startTimeUtc"])) for i in invocations if "startTimeUtc" in i), ""),
        notes=tuple(notes),
    )  # fmt: skip


def _is_of_distribution(result: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    """Return whether a SARIF result is about a package of the distribution.
    The name of the rule (Trivy), a tag of the rule (Snyk) or the message (other scanners) shows this."""
    tags = (rule.get("properties") or {}).get("tags") or ()
    named = rule.get("name") == "OsPackageVulnerability" or not {"apk", "deb", "rpm"}.isdisjoint(tags)
    return named or bool(_DATA.patterns["distribution"].search(str(result["message"].get("text"))))


def _read_result(
    result: Mapping[str, Any], rule: Mapping[str, Any], scanner: str, place: str
) -> tuple[Vulnerability, bool]:
    """Return the vulnerability in a SARIF result, and whether the report states if a fixed version exists.
    Suppressions by the scanner do not count: only `scan-policy.yaml` can accept a vulnerability."""
    message = str(result["message"].get("text") or "")
    sentence = next((match.groupdict() for pattern in _SENTENCES if (match := pattern.search(message))), {})
    of_rule = _labelled(str((rule.get("help") or {}).get("text") or ""))
    found = {**sentence, **_labelled(message)}
    if found.get("package", "").startswith("pkg:"):
        url = PackageURL.from_string(found["package"])
        # As package managers print it: for Go `golang.org/x/crypto`, for dpkg `libc6`.
        of_distribution = url.type in ("apk", "deb", "rpm") or not url.namespace
        name = url.name if of_distribution else f"{url.namespace}/{url.name}"
        found |= {"package": name, "version": url.version or ""}
    if "version" not in found:
        found |= _version_by_location(result, found.get("package", ""))
    if of_rule.get("version") == found.get("version", of_rule.get("version")):
        found = {**of_rule, **found}  # otherwise, the rule describes another version of the package
    if not found.get("package"):
        raise ValueError(f"{place} does not name a package in a known form")
    rating = _rating((rule.get("properties") or {}).get("security-severity"))
    severity = _severity(found["severity"]) if "severity" in found else rating
    if scanner.lower() == _DATA["low-if-unknown"] and severity == "low" and rating != "low":
        severity = "unknown"
    fixed = found.get("fixed")
    finding = Vulnerability(
        id=found.get("id") or of_rule.get("id") or result["ruleId"], severity=severity, package=found["package"],
        version=found.get("version", ""), fixed_in=None if (fixed or "").lower() in _DATA["no-fix"] else fixed,
    )  # fmt: skip
    return finding, fixed is not None


def _labelled(text: str) -> dict[str, str]:
    """Return a mapping from labels to values, from the lines `Label: value` in a text.
    If a label occurs on several lines, only the first of these lines counts."""
    values: dict[str, str] = {}
    for identifier, label, value in _DATA.patterns["line"].findall(text):
        values.setdefault(_LABELS[(identifier or label).lower()], value)
    return values


def _version_by_location(result: Mapping[str, Any], package: str) -> dict[str, str]:
    logical = [place for location in result.get("locations") or () for place in location.get("logicalLocations") or ()]
    pairs = [str(place.get("fullyQualifiedName", "")).rpartition("@") for place in logical]
    versions = [version for name, at, version in pairs if at and package and name == package]
    return {"version": versions[0]} if versions else {}


def _digests(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield each digest `sha256:…` by which a SARIF run names the image.

    Trivy lists the digests in a property of the run. grype names the image in each message. Snyk names the image in
    each location, with `_` instead of `:`. The field `fullyQualifiedName` is not read, because it contains the digest
    of a layer."""
    texts = [*((run.get("properties") or {}).get("repoDigests") or ())]
    texts += [result["message"].get("text") for result in run["results"]]
    places = [location.get("physicalLocation") or {} for r in run["results"] for location in r.get("locations") or ()]
    texts += [(place.get("artifactLocation") or {}).get("uri") for place in places]
    for text in texts:
        for match in re.finditer(r"@sha256[:_]([0-9a-f]{64})\b", str(text)):
            yield f"sha256:{match[1]}"


def _rating(score: object) -> Severity:
    """Return the severity for a CVSS score. Scanners write 0.0 if they know no score, so 0.0 means unknown."""
    try:
        number = float(str(score))
    except ValueError:
        return "unknown"
    return next((severity for severity, lowest in _RATINGS.items() if number >= lowest), "unknown")


def _severity(word: object) -> Severity:
    return next((severity for severity in SEVERITIES if severity == str(word).lower()), "unknown")


def _read_debsecan(text: str) -> ScanReport:
    """Read the output of debsecan: one paragraph for each finding."""
    findings = []
    scanned = _DATA.patterns["scanned"].match(text)
    for paragraph in filter(None, (part.strip("\n") for part in text[scanned.end() if scanned else 0 :].split("\n\n"))):
        first, _, rest = paragraph.partition("\n")
        head, installed = _DATA.patterns["head"].match(first), _DATA.patterns["installed"].search(rest)
        if not head or not installed:
            raise ValueError(f"{first[:80]!r} is neither SARIF nor a finding of `debsecan --format detail`")
        urgency = _DATA.patterns["urgency"].search(head["notes"] or "")
        findings.append(
            Vulnerability(
                id=head["id"], severity=_severity(urgency[1] if urgency else None), package=installed["package"],
                version=installed["version"], fixed_in="a newer version" if _DATA["available"] in rest else None,
            )
        )  # fmt: skip
    notes = (
        "debsecan does not name the image, so nothing proves that the report is about this image",
        "debsecan knows only Debian packages; wheels, CUDA, HPC-X and software compiled from source were not scanned",
    )
    return ScanReport(DEBSECAN, tuple(findings), recognised=True, worst="high", notes=notes)
