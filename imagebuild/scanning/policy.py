"""The file `scan-policy.yaml`: which vulnerabilities fail an image, and which are waived until when and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from imagebuild.config import Document, Mistakes, load, suggestion
from imagebuild.fields import Condition, Model
from imagebuild.records import Severity, Vulnerability
from imagebuild.versions import facts, matches

SCALE: tuple[Severity, ...] = get_args(Severity)
"""From the least to the worst; `unknown` is no place on it."""


class Fail(Model):
    """What fails an image."""

    severity: Literal["negligible", "low", "medium", "high", "critical"] = "critical"
    """This severity, and worse ones. A scanner whose scale ends below it fails by its worst."""
    only_fixed: bool = False
    """Only vulnerabilities for which there is a version that has them no more."""
    unknown_severity: bool = False
    """Also those of which nobody says how severe they are."""


class Waiver(Model):
    """A vulnerability that may stay for a while."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:-]+$")]
    """As the scanner prints it: `CVE-2025-1234`, `GHSA-…`."""
    package: str | None = None
    """Name of the package, or a shell pattern of names; by default all that have it."""
    when: Condition = Field(default_factory=dict)
    """Images that it is for: axes, `image`, `arch`."""
    until: date
    """Last day on which it waives, in UTC."""
    reason: Annotated[str, Field(min_length=10)]
    """Why it does no harm here."""


class Policy(Model):
    """The file `scan-policy.yaml`."""

    fail: Fail = Fail()
    maximum_database_age_days: Annotated[int, Field(ge=0)] | None = None
    """A database that is older, or does not say how old it is, proves nothing."""
    old_database: Literal["fail", "warn"] = "fail"
    waivers: tuple[Waiver, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Findings as the policy sees them."""

    findings: tuple[Vulnerability, ...]
    """The worst first."""
    reason: str
    """Why the image fails; empty if it does not."""
    notes: tuple[str, ...]


def read(path: Path, axes: Mapping[str, Iterable[str]] | None = None) -> Document[Policy]:
    """The policy; `axes` has what conditions may name. Raises ConfigError with every mistake, by file and line."""
    mistakes = Mistakes()
    document = load(path, Policy, mistakes)
    mistakes.stop_if_any()
    assert document is not None
    known = {*facts(dict.fromkeys(axes, "")), "image", "arch"} if axes is not None else None
    for i, waiver in enumerate(document.model.waivers):
        for axis, alternatives in waiver.when.items():
            where = document.at("waivers", i, "when", axis)
            if known is not None and axis not in known:
                mistakes.add(where, f"waivers.{i}.when: unknown axis {axis!r}{suggestion(axis, known)}")
            try:
                matches({axis: alternatives}, {axis: "0"})
            except ValueError as error:
                mistakes.add(where, f"waivers.{i}.when.{axis}: {error}")
    mistakes.stop_if_any()
    return document


def judge(
    found: Iterable[Vulnerability],
    policy: Document[Policy],
    image: Mapping[str, str],
    *,
    worst: Severity,
    database: datetime | None,
    now: datetime,
) -> Judged:
    """Say of each finding whether it fails the image or is waived.

    `image` has its axes, name and architecture; `worst` is the end of the scanner's scale; `database` is the time of
    what it compared with, where it is known.
    """
    rules = policy.model
    limit = min(SCALE.index(rules.fail.severity), SCALE.index(worst))
    notes = []
    if SCALE[limit] != rules.fail.severity:
        notes.append(f"this scanner knows nothing worse than {worst!r}, so that fails instead of {rules.fail.severity}")
    known = facts(image)
    active = [(i, w) for i, w in enumerate(rules.waivers) if matches(w.when, known)]
    valid = [(i, w) for i, w in active if now.astimezone(UTC).date() <= w.until]
    used: Counter[int] = Counter()
    judged = []
    for finding in found:
        fits = [(i, w) for i, w in valid if _fits(w, finding)]
        used.update(i for i, _ in fits)
        waived = f"until {fits[0][1].until}: {fits[0][1].reason}" if fits else None
        fails = not waived and _fails(rules.fail, finding, limit)
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    for i, waiver in active:
        what = f"{policy.at('waivers', i)}: the waiver of {waiver.id}"
        if (i, waiver) not in valid:
            notes.append(f"{what} ended on {waiver.until}; remove it, or say anew why it may stay")
        elif not used[i]:
            notes.append(f"{what} matches nothing in this image")
    faults = []
    if count := sum(finding.fails for finding in judged):
        faults.append(f"{count} finding{'s' * (count != 1)} that the policy does not allow")
    if old := _too_old(rules.maximum_database_age_days, database, now):
        (faults if rules.old_database == "fail" else notes).append(old)
    return Judged(tuple(in_order(judged)), "; ".join(faults), tuple(notes))


def in_order(findings: Iterable[Vulnerability]) -> Sequence[Vulnerability]:
    """What fails first, then by severity, worst first."""
    return sorted(findings, key=lambda f: (not f.fails, -SCALE.index(f.severity), f.id, f.package, f.version))


def by_severity(findings: Iterable[Vulnerability]) -> Iterator[tuple[Severity, int]]:
    """How many there are, the worst first."""
    counted = Counter(finding.severity for finding in findings)
    return ((severity, counted[severity]) for severity in reversed(SCALE) if counted[severity])


def _fits(waiver: Waiver, finding: Vulnerability) -> bool:
    return waiver.id == finding.id and (waiver.package is None or fnmatchcase(finding.package, waiver.package))


def _fails(rules: Fail, finding: Vulnerability, limit: int) -> bool:
    if rules.only_fixed and finding.fixed_in is None:
        return False
    if finding.severity == "unknown":
        return rules.unknown_severity
    return SCALE.index(finding.severity) >= limit


def _too_old(limit: int | None, database: datetime | None, now: datetime) -> str:
    if limit is None:
        return ""
    if database is None:
        return f"the database does not say how old it is; at most {limit} days are allowed"
    age = (now - database).total_seconds() / 86400
    return f"the database is {age:.1f} days old; at most {limit} are allowed" if age > limit else ""
