"""The judgement of the findings of a vulnerability scanner, by the policy in `scan-policy.yaml`."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from imagebuild.core import console
from imagebuild.core.console import out
from imagebuild.core.errors import ConfigError, plural
from imagebuild.core.fields import Form, Model, YamlFile, in_utc
from imagebuild.oci.image import PlatformImage
from imagebuild.project.plan import axes_of
from imagebuild.project.records import ScanResult, Vulnerability
from imagebuild.publish.evidence import latest_time
from imagebuild.publish.scan_reports import DEBSECAN, SEVERITIES, ScanReport


def scan_result(image: PlatformImage, report: ScanReport, file: Path, policy: YamlFile[Policy]) -> ScanResult:
    """Judge the findings in a scanner's report about an image by a policy, and return the result.

    `file` is the file that contained the report. Raises ConfigError if the report is about another image or does not
    name an image, or if the scanner does not support the distribution of the image."""
    if report.digests and image.digest not in report.digests:
        named = ", ".join(sorted(report.digests))
        raise ConfigError(f"{file}: is about {named}, not about {image.digest}; scan the image as NAME@{image.digest}")
    if report.scanner == DEBSECAN:
        if not axes_of(image.labels).get("os", "debian").startswith("debian"):
            raise ConfigError(f"{file}: debsecan knows only Debian packages; scan this image with grype or Trivy")
    elif not report.digests:
        raise ConfigError(
            f"{file}: does not name the digest of an image in every run; scan NAME@{image.digest} with "
            f"{report.scanner}, or add this name to runs[].properties.repoDigests"
        )
    if not report.recognised:
        remedy = "scan again without options that leave out findings, such as --severity"
        unproven = f"so nothing shows that {report.scanner} recognised the distribution; {remedy}"
        raise ConfigError(f"{file}: contains no finding about a package of the distribution, {unproven}")
    started = report.started or in_utc(datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat())
    if started > latest_time():
        advice = "set the clock, and scan again"
        raise ConfigError(f"{file}: the scan started at {started}, which is in the future; {advice}")
    findings, notes = judge_vulnerabilities(report, policy, datetime.now(UTC).date())
    if not policy.path.exists():
        consequence = f"{policy.model.fail.severity} findings fail and no finding is ignored"
        notes.append(f"{policy.path}: does not exist, so {consequence}")
    failing = sum(finding.fails for finding in findings)
    return ScanResult(
        image=image.name, digest=image.digest, platform=image.platform, scanner=report.scanner,
        database=report.database or "not named", started=started, findings=findings,
        verdict="failed" if failing else "passed", notes=(*report.notes, *notes),
        reason=f"{plural(failing, 'finding')} that the policy does not allow" if failing else "",
    )  # fmt: skip


class Fail(Model):
    """The conditions under which a vulnerability fails an image."""

    severity: Literal["negligible", "low", "medium", "high", "critical"] = "critical"
    """Lowest severity that fails an image. If the scanner cannot report this severity, the worst severity that the
    scanner can report fails the image."""
    only_fixed: bool = False
    """Whether a vulnerability fails an image only if a fixed version of the package exists. If the report does not
    state whether a fixed version exists, the vulnerability fails the image, too."""
    unknown_severity: bool = False
    """Whether a vulnerability of unknown severity fails an image, too."""


class Ignore(Model):
    """A vulnerability that is accepted until a date."""

    id: Annotated[str, Form(r"[A-Za-z0-9][\w.:-]+", "the id of a vulnerability such as CVE-2026-1234")]
    """The identifier as the scanner prints it: `CVE-2025-1234`, `GHSA-…`."""
    package: str | None = None
    """Name of the package, or a shell pattern for names. Default: all packages that have the vulnerability."""
    until: date
    """Last day, in UTC, on which the vulnerability is accepted."""
    reason: Annotated[str, Field(min_length=10)]
    """Why the vulnerability does no harm in this image."""


class Policy(Model):
    """The content of `scan-policy.yaml`."""

    fail: Fail = Fail()
    ignore: tuple[Ignore, ...] = ()


def judge_vulnerabilities(
    report: ScanReport, policy: YamlFile[Policy], today: date
) -> tuple[tuple[Vulnerability, ...], list[str]]:
    """Judge each finding in a report by a policy. Return the judged findings, and notes about the policy.

    Findings that fail the image come first. After that, findings are sorted by severity, the worst first. A rule in
    `ignore` has no effect after its last day, and a note names the rule."""
    fail = policy.model.fail
    limit = min(SEVERITIES.index(fail.severity), SEVERITIES.index(report.worst))
    unstated = frozenset(report.unstated_fixes)
    notes = []
    if SEVERITIES[limit] != fail.severity:
        consequence = f"{report.worst} findings fail instead of {fail.severity} findings"
        notes.append(f"{report.scanner} reports nothing worse than {report.worst}, so {consequence}")
    if unstated and fail.only_fixed:
        problem = f"does not say for {plural(len(unstated), 'finding')} whether a fixed version exists"
        notes.append(f"{report.scanner} {problem}; these findings are judged as if a fixed version exists")
    rules = [rule for rule in policy.model.ignore if today <= rule.until]
    judged = []
    for finding in dict.fromkeys(
        report.findings
    ):  # scanners report a package twice if the image contains it in two places
        fitting = (rule for rule in rules if rule.id == finding.id)
        valid = next((rule for rule in fitting if fnmatchcase(finding.package, rule.package or "*")), None)
        severe = SEVERITIES.index(finding.severity) >= limit if finding.severity != "unknown" else fail.unknown_severity
        fixable = finding.fixed_in is not None or finding in unstated
        fails = severe and not valid and (fixable or not fail.only_fixed)
        waived = f"until {valid.until}: {valid.reason}" if valid else None
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    notes += [
        f"{policy.at('ignore', i)}: the rule for {rule.id} ended on {rule.until}; remove the rule, or set a later date"
        for i, rule in enumerate(policy.model.ignore)
        if rule not in rules
    ]
    judged.sort(key=lambda f: (not f.fails, -SEVERITIES.index(f.severity), f.id, f.package, f.version))
    return tuple(judged), notes


def print_scan(result: ScanResult) -> None:
    """Print the result of a scan.

    The output is a table of the failing and the ignored findings, the notes, the number of findings of each severity,
    and the verdict."""
    listed = [finding for finding in result.findings if finding.fails or finding.waived]
    rows = [
        (f.severity, f.id, f.package, f.version, f.fixed_in or "", f"ignored {f.waived}" if f.waived else "fails")
        for f in listed
    ]
    if rows:
        columns = ("severity", "vulnerability", "package", "installed", "fixed in", "policy")
        console.print_table(columns, rows)
    for note in result.notes:
        out.print(f"note: {note}")
    out.print(f"{result.scanner}; database: {result.database}")
    found = Counter(finding.severity for finding in result.findings)
    counts = ", ".join(f"{found[severity]} {severity}" for severity in reversed(SEVERITIES) if found[severity])
    reason = f" ({result.reason})" if result.reason else ""
    where = f"{result.image}, {result.platform}: {counts or 'nothing found'}: "
    out.print(console.styled(where, console.MARKS[result.verdict], reason))
