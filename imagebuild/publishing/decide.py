"""Which images of a target may be published, and every reason why one may not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from imagebuild import checks
from imagebuild.config import Project
from imagebuild.fields import Platform
from imagebuild.measured import SPEED
from imagebuild.models import Target
from imagebuild.publishing.evidence import Evidence, Found
from imagebuild.publishing.models import Attachment, Publish
from imagebuild.records import BuildResult, CheckResult, VerifyResult
from imagebuild.registry.base import Descriptor
from imagebuild.versions import facts, matches

IMAGE = "image"
READABLE = "readable"
"""Where it passed, an image check that was skipped is one that does not apply to the image."""


@dataclass(frozen=True)
class Rule:
    """A check that a target's image may be asked for."""

    name: str
    """`component/check`."""
    always: bool
    """Whether it must have passed: it needs nothing special of the place where it runs."""


@dataclass(frozen=True)
class Choice:
    """The image of a platform that was built, or why there is none to publish."""

    platform: Platform
    digest: str = ""
    builds: tuple[Found[BuildResult], ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        """Where it was pushed to."""
        return self.builds[0].value.repository or ""


@dataclass(frozen=True)
class Image:
    """What a registry has under a digest."""

    manifest: Descriptor
    platform: str
    labels: Mapping[str, str] = field(default_factory=dict)


def choose(target: Target, platform: Platform, evidence: Evidence) -> Choice:
    """The image of a platform that the builds name. Which of several is newer is not guessed."""
    built = evidence.built(target.id, platform)
    pushed = [b for b in built if b.value.repository and b.value.manifests.get(platform)]
    if not built:
        return Choice(platform, reasons=("no build result; `imagebuild build --push` leaves one",))
    if not pushed:
        return Choice(
            platform, reasons=(f"built, but not pushed ({built[0].path}); `imagebuild build --push` does it",)
        )
    digests = {b.value.manifests[platform]: b for b in pushed}
    if len(digests) > 1:
        listed = ", ".join(f"{digest} ({b.path})" for digest, b in sorted(digests.items()))
        return Choice(platform, reasons=(f"several builds: {listed}; leave out those that do not count",))
    return Choice(platform, digest=next(iter(digests)), builds=tuple(pushed))


def rules(project: Project, target: Target, image_checks: Iterable[str]) -> tuple[Rule, ...]:
    """The checks of a target's image; those that are for other targets are left out."""
    known = facts(target.axes)
    found = [Rule(f"{IMAGE}/{name}", always=True) for name in image_checks]
    for name in target.components:
        for check in checks.of_component(project.components[name].model):
            if matches(check.when, known):
                found.append(Rule(f"{name}/{check.name}", always=not check.needs))
                found += [Rule(f"{name}/{check.name}{SPEED}", always=False)] if check.results else []
    return tuple(found)


@dataclass(frozen=True)
class Terms:
    """What the image of a target is asked for, and what there is to answer with."""

    evidence: Evidence
    policy: Publish
    rules: Sequence[Rule]
    made: frozenset[Attachment] = frozenset()
    """What publishing makes by itself to attach."""


def objections(target: Target, choice: Choice, image: Image | None, terms: Terms) -> list[str]:
    """Why a chosen image may not be published; empty if it may.

    `image` is what the staging repository has under its digest.
    """
    if not choice.digest:
        return list(choice.reasons)
    if image is None:
        return [f"{choice.repository} does not have it any more; build it again with --push"]
    scans = [found for found in terms.evidence.scanned(choice.digest) if found.value.verdict != "passed"]
    return [
        *_identity(target, choice, image),
        *_checks(target, choice, terms),
        *(f"scan failed ({found.path}): {found.value.reason}" for found in scans),
        *_attachments(choice, terms),
    ]


def _identity(target: Target, choice: Choice, image: Image) -> Iterator[str]:
    """What the image says of itself beside what the plan says."""
    if image.platform != choice.platform:
        yield f"the image is for {image.platform}"
    said = image.labels.get("imagebuild.target", "")
    if said != target.id:
        yield f"the image says it is {said or 'nothing built here'}"
        return
    for what, planned, labelled in (
        ("component", target.components, checks.components_of(image.labels)),
        ("axis", target.axes, checks.axes_of(image.labels)),
    ):
        for name in sorted({*planned, *labelled}):
            if planned.get(name) != labelled.get(name):
                has, wants = labelled.get(name) or "none", planned.get(name) or "none"
                yield f"{what} {name}: the image has {has}, the plan {wants}"


def _checks(target: Target, choice: Choice, terms: Terms) -> Iterator[str]:
    verified = terms.evidence.verified(choice.digest)
    if not verified:
        yield "not verified: no result names this digest; `imagebuild verify` it"
        return
    results = [(found, check) for found in verified for check in of_platform(found.value, choice.platform)]
    outcomes: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for found, check in results:
        outcomes[check.outcome][_name(check)] = check.reason
        if check.outcome == "failed":
            yield f"{_name(check)} failed ({found.path}): {check.reason}"
    inapplicable = {name for found in verified for name in _inapplicable(found.value, choice.platform)}
    wanted = required(target, choice.platform, terms.policy)
    for rule in terms.rules:
        patterns = [pattern for pattern in wanted if _fits(rule, pattern)]
        told = rule.name in outcomes["passed"] or rule.name in outcomes["failed"]
        if not (rule.always or patterns) or told or (rule.name in inapplicable and not patterns):
            continue
        skipped = outcomes["skipped"].get(rule.name)
        who = f"; publish.require has {patterns[0]}" if patterns else ""
        yield f"{rule.name} was {'not run' if skipped is None else f'skipped: {skipped}'}{who}"
    for pattern in wanted:
        if not any(_fits(rule, pattern) for rule in terms.rules):
            yield f"publish.require has {pattern}, which no check of this target fits"


def _fits(rule: Rule, pattern: str) -> bool:
    """Whether a pattern means a check; judgements of its speed only if it says so."""
    return fnmatchcase(rule.name, pattern) and (not rule.name.endswith(SPEED) or pattern.endswith(SPEED))


def required(target: Target, platform: Platform, policy: Publish) -> list[str]:
    """Patterns `component/check` that the policy has for a platform of a target."""
    names = {**facts(target.axes), "image": target.image, "arch": platform.removeprefix("linux/")}
    rows = [row for row in policy.require if matches(row.when, names)]
    return [pattern if "/" in pattern else f"{pattern}/*" for row in rows for pattern in row.checks]


def of_platform(result: VerifyResult, platform: str) -> Iterator[CheckResult]:
    """The checks of a verification that are about a platform.

    Where it is about several, results have theirs behind their name. One without says nothing good about any of them,
    but when it failed, all of them are in question.
    """
    several = "," in result.platform
    for check in result.checks:
        name, _, suffix = check.check.partition(" ")
        if (not several and (not suffix or suffix == platform)) or (several and suffix == platform):
            yield check.model_copy(update={"check": name})
        elif several and not suffix and check.outcome == "failed":
            yield check


def _inapplicable(result: VerifyResult, platform: str) -> set[str]:
    found = [check for check in of_platform(result, platform) if check.component == IMAGE]
    if not any(check.check == READABLE and check.outcome == "passed" for check in found):
        return set()
    return {_name(check) for check in found if check.outcome == "skipped"}


def _attachments(choice: Choice, terms: Terms) -> Iterator[str]:
    evidence, digest = terms.evidence, choice.digest
    verified = evidence.verified(digest)
    has: Mapping[Attachment, bool] = {
        "sbom": bool(evidence.listed(digest)),
        "scan": bool(evidence.scanned(digest)),
        "verification": bool(verified),
        "benchmark": bool(evidence.reported(digest)) or any(measured(found.value) for found in verified),
    }
    for kind in terms.policy.require_attachments:
        if kind not in terms.made and not has.get(kind):
            yield f"no {kind} of this digest; publish.require-attachments asks for it"


def measured(result: VerifyResult) -> bool:
    """Whether a verification has results of benchmarks."""
    return any(check.results for check in result.checks)


def _name(check: CheckResult) -> str:
    return f"{check.component}/{check.check}"
