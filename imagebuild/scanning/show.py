"""The result of a scan in the terminal: the worst first, one line for what several packages share."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape

from imagebuild import console
from imagebuild.console import out
from imagebuild.records import ScanResult, Severity, Vulnerability
from imagebuild.scanning.policy import by_severity

COLOURS: dict[Severity, str] = {"critical": "red", "high": "red", "medium": "yellow"}
LISTED = ("critical", "high")
MOST_NAMES = 4


def show(result: ScanResult, *, every: bool) -> None:
    """Print it. Without `every`, what fails nothing and is less than high is only counted."""
    listed = [f for f in result.findings if every or f.fails or f.waived or f.severity in LISTED]
    rows = [_row(group) for group in grouped(listed)]
    if rows:
        console.table(("severity", "vulnerability", "packages", "installed", "fixed in", "policy"), rows)
    rest = [finding for finding in result.findings if finding not in set(listed)]
    if rest:
        out.print(f"and {len(rest)} more that fail nothing ({_counts(rest)}); --all lists them", markup=False)
    for note in result.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    out.print(f"{result.scanner}; database: {result.database}", markup=False)
    found = _counts(result.findings) or "nothing known"
    mark = console.MARKS[result.verdict]
    out.print(f"{escape(result.image)}, {result.platform}: {found}: {mark}" + _because(result))


def grouped(findings: Iterable[Vulnerability]) -> list[list[Vulnerability]]:
    """Findings of one vulnerability that differ in nothing but the package, together; in the order given."""
    groups: dict[tuple[object, ...], list[Vulnerability]] = {}
    for finding in findings:
        key = (finding.id, finding.severity, finding.version, finding.fixed_in, finding.waived, finding.fails)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _row(group: list[Vulnerability]) -> tuple[str, ...]:
    first = group[0]
    colour = COLOURS.get(first.severity)
    severity = f"[{colour}]{first.severity}[/]" if colour else first.severity
    names = sorted({finding.package for finding in group})
    shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    said = "[red]fails[/]" if first.fails else escape(f"waived {first.waived}") if first.waived else ""
    return severity, escape(first.id), escape(shown), escape(first.version), escape(first.fixed_in or ""), said


def _counts(findings: Iterable[Vulnerability]) -> str:
    return ", ".join(f"{number} {severity}" for severity, number in by_severity(findings))


def _because(result: ScanResult) -> str:
    return f" ({escape(result.reason)})" if result.reason else ""
