"""Findings to results, less what components and the matrix declare to be right."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from imagebuild.inspection.context import Inspection, NotApplicable
from imagebuild.inspection.facts import Finding
from imagebuild.inspection.table import RULES, Rule
from imagebuild.models import Waiver
from imagebuild.records import CheckResult
from imagebuild.versions import facts, matches

COMPONENT = "image"
SHOWN = 100
"""Findings of a rule that are listed."""


@dataclass
class Declared:
    """A waiver, whose it is, and what it was used for."""

    owner: str
    waiver: Waiver
    used: list[str] = field(default_factory=list)


def judge(about: Inspection) -> tuple[CheckResult, ...]:
    """What every rule says about the image, and at last whether all waivers were needed."""
    declared = waivers(about)
    results = [_one(rule, about, [d for d in declared if d.waiver.rule == rule.name]) for rule in RULES]
    skipped = {result.check for result in results if result.outcome == "skipped"}
    needless = [
        f"{d.owner}: {d.waiver.rule} {d.waiver.subject}: nothing to waive; remove it"
        for d in declared
        if not d.used and d.waiver.rule not in skipped
    ]
    return (*results, _result("waivers", needless, needless, 0.0))


def waivers(about: Inspection) -> list[Declared]:
    """What the image's components and its entry in the matrix declare, as far as it is for this image."""
    try:
        owned = [(name, waiver) for name, component in about.known() for waiver in component.waivers]
    except NotApplicable:
        return []
    name = about.image.labels.get("org.opencontainers.image.title", "")
    assert about.project
    if image := about.project.matrix.model.images.get(name):
        owned += [(f"images.{name}", waiver) for waiver in image.waivers]
    known = {**facts(about.axes), "arch": about.arch, "image": name}
    return [Declared(owner, waiver) for owner, waiver in owned if matches(waiver.when, known)]


def _one(rule: Rule, about: Inspection, declared: Sequence[Declared]) -> CheckResult:
    began = time.monotonic()
    try:
        findings = list(dict.fromkeys(rule.find(about)))
    except NotApplicable as reason:
        return CheckResult(component=COMPONENT, check=rule.name, outcome="skipped", reason=str(reason))
    faults, waived = [], []
    for finding in findings:
        if finding.note:
            continue
        if why := _waived(finding, declared):
            waived.append(f"{finding} (waived: {why})")
        else:
            faults.append(str(finding))
    notes = [f"{finding} (no fault)" for finding in findings if finding.note]
    return _result(rule.name, faults, [*faults, *waived, *notes], time.monotonic() - began)


def _waived(finding: Finding, declared: Iterable[Declared]) -> str:
    for one in declared:
        if fnmatchcase(finding.subject, one.waiver.subject):
            one.used.append(finding.subject)
            return f"{one.owner}: {one.waiver.reason}"
    return ""


def _result(name: str, faults: Sequence[str], lines: Sequence[str], seconds: float) -> CheckResult:
    shown = [*lines[:SHOWN], *([f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])]
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return CheckResult(
        component=COMPONENT,
        check=name,
        outcome="failed" if faults else "passed",
        reason=f"{faults[0]}{more}" if faults else "",
        output="\n".join(shown),
        seconds=round(seconds, 3),
    )
