"""The judgement of a scanner's findings by the policy in `scan-policy.yaml`."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from rich.markup import escape

from imagebuild.core import console
from imagebuild.core.console import out
from imagebuild.core.errors import ConfigError, plural
from imagebuild.core.fields import Form, Model, YamlFile
from imagebuild.oci.image import PlatformImage
from imagebuild.project.plan import axes_of
from imagebuild.project.records import ScanResult, Vulnerability
from imagebuild.publish.scan_reports import DEBSECAN, SEVERITIES, ScanReport


def scan_result(
    image: PlatformImage, report: ScanReport, file: Path, policy: YamlFile[Policy], today: date | None = None
) -> ScanResult:
    """Judge a scanner's report about an image by a policy. `file` is the file that contained the report.

    Raises ConfigError if the report is about another image or names none, or if the scanner does not know the image's
    distribution.
    """
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
    findings, notes = judge_vulnerabilities(report, policy, today or datetime.now(UTC).date())
    if not policy.path.exists():
        notes.append(f"{policy.path}: does not exist, so {policy.model.fail.severity} fails and nothing is ignored")
    failing = sum(finding.fails for finding in findings)
    written = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return ScanResult(
        image=image.name, digest=image.digest, platform=image.platform, scanner=report.scanner,
        database=report.database or "not named", started=report.started or written, findings=findings,
        verdict="failed" if failing else "passed", notes=(*report.notes, *notes),
        reason=f"{plural(failing, 'finding')} that the policy does not allow" if failing else "",
    )  # fmt: skip


# The policy


class Fail(Model):
    """The vulnerabilities that fail an image."""

    severity: Literal["negligible", "low", "medium", "high", "critical"] = "critical"
    """This severity and worse ones fail. If a scanner cannot report this severity, the worst severity that it can
    report fails."""
    only_fixed: bool = False
    """Whether only vulnerabilities with a fixed version of the package fail. If the report does not state whether a
    fixed version exists, the vulnerability fails, too."""
    unknown_severity: bool = False
    """Whether vulnerabilities of unknown severity fail, too."""


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
    """Return the judged findings and notes about the policy. Failing findings come first, then the worst ones.

    Rules whose last day has passed ignore nothing, and a note names each of them.
    """
    fail = policy.model.fail
    limit = min(SEVERITIES.index(fail.severity), SEVERITIES.index(report.worst))
    unstated = frozenset(report.unstated_fixes)
    notes = []
    if SEVERITIES[limit] != fail.severity:
        worst = f"reports nothing worse than {report.worst}, so {report.worst} fails instead of {fail.severity}"
        notes.append(f"{report.scanner} {worst}")
    if unstated and fail.only_fixed:
        notes.append(
            f"{report.scanner} does not say for {plural(len(unstated), 'finding')} whether a fixed version exists; "
            "the policy treats them as if one existed"
        )
    rules = [rule for rule in policy.model.ignore if today <= rule.until]
    judged = []
    for finding in dict.fromkeys(report.findings):  # a package that lies in two places is reported twice
        fitting = (rule for rule in rules if rule.id == finding.id)
        valid = next((rule for rule in fitting if fnmatchcase(finding.package, rule.package or "*")), None)
        severe = SEVERITIES.index(finding.severity) >= limit if finding.severity != "unknown" else fail.unknown_severity
        fixable = finding.fixed_in is not None or finding in unstated
        fails = severe and not valid and (fixable or not fail.only_fixed)
        waived = f"until {valid.until}: {valid.reason}" if valid else None
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    notes += [
        f"{policy.at('ignore', i)}: the rule for {rule.id} ended on {rule.until}; remove it, or set a later date"
        for i, rule in enumerate(policy.model.ignore)
        if rule not in rules
    ]
    judged.sort(key=lambda f: (not f.fails, -SEVERITIES.index(f.severity), f.id, f.package, f.version))
    return tuple(judged), notes


def print_scan(result: ScanResult) -> None:
    """Print the failing and the ignored findings as a table, and the number of the others."""
    listed = [finding for finding in result.findings if finding.fails or finding.waived]
    rows = [
        (f.severity, f.id, f.package, f.version, f.fixed_in or "", f"ignored {f.waived}" if f.waived else "fails")
        for f in listed
    ]
    if rows:
        columns = ("severity", "vulnerability", "package", "installed", "fixed in", "policy")
        console.print_table(columns, [map(escape, row) for row in rows])
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"{result.scanner}; database: {result.database}", markup=False)
    found = Counter(finding.severity for finding in result.findings)
    counts = ", ".join(f"{found[severity]} {severity}" for severity in reversed(SEVERITIES) if found[severity])
    reason = f" ({escape(result.reason)})" if result.reason else ""
    summary = f"{counts or 'nothing found'}: {console.MARKS[result.verdict]}{reason}"
    out.print(f"{escape(result.image)}, {result.platform}: {summary}")
