"""What the page shows of a verified image: its checks with their evidence, and the place where they ran. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from imagebuild.records import CheckResult, VerifyResult
from imagebuild.report.assertions import STATES

Evidence = tuple[tuple[str, str], ...]
"""Title and text."""


@dataclass(frozen=True)
class ShownCheck:
    """A check with its evidence."""

    check: str
    outcome: str
    reason: str
    evidence: Evidence


@dataclass(frozen=True)
class ShownComponent:
    """The checks of a component, problems first."""

    name: str
    counts: str
    checks: tuple[ShownCheck, ...]


@dataclass(frozen=True)
class ShownImage:
    """An image."""

    name: str
    facts: str
    components: tuple[ShownComponent, ...]
    evidence: Evidence


def shown(verification: VerifyResult) -> ShownImage:
    """The image as it is laid out, components with problems first."""
    groups: dict[str, list[CheckResult]] = {}
    for check in sorted(verification.checks, key=lambda check: check.outcome != "failed"):
        groups.setdefault(check.component, []).append(check)
    said = (verification.platform, verification.target, verification.digest, verification.started)
    place = verification.surroundings
    return ShownImage(
        name=verification.image,
        facts=" · ".join(filter(None, said)),
        components=tuple(
            ShownComponent(name, _counts(checks), tuple(map(_check, checks))) for name, checks in groups.items()
        ),
        evidence=(("All variables where the checks ran", _variables(place.environment)),)
        if place and place.environment
        else (),
    )


def _counts(checks: Sequence[CheckResult]) -> str:
    states = Counter(check.outcome for check in checks)
    return ", ".join(f"{states[state]} {state}" for state in STATES if states[state])


def _check(check: CheckResult) -> ShownCheck:
    return ShownCheck(check.check, check.outcome, check.reason, tuple(_evidence(check)))


def _evidence(check: CheckResult) -> Iterator[tuple[str, str]]:
    if check.command:
        ended = "killed because it took too long" if check.timeout else f"exit status {check.status}"
        yield f"Command, {ended}, {check.seconds:.1f} s", shlex.join(check.command)
    if check.environment:
        yield "Environment", _variables(check.environment)
    if check.output:
        yield "Output" + (f", the end of {check.log}" if check.log else ""), check.output


def _variables(environment: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in sorted(environment.items()))


def facts(verification: VerifyResult) -> Iterator[tuple[str, str]]:
    """What is known about the image and the place: what, and value."""
    digest = verification.digest or "digest unknown"
    yield "image", f"{verification.image}, {verification.platform}, {digest}"
    if verification.version:
        yield "imagebuild", verification.version
    if place := verification.surroundings:
        yield "runner", place.runner
        yield "GPUs", str(place.gpus)
        yield from place.facts.items()
        for facility, why in place.why.items():
            yield f"no {facility}", why
