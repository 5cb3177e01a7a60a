"""Decide which images of a target may be published, with every reason why one may not. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from imagebuild.core.errors import ResultError
from imagebuild.core.fields import Platform, axis_facts, matches
from imagebuild.oci import registry
from imagebuild.oci.registry import BlobDescriptor, Manifest
from imagebuild.project import component
from imagebuild.project.load import Project
from imagebuild.project.matrix import Attachment, Publish, Target
from imagebuild.project.plan import REVISION, REVISION_DIGITS
from imagebuild.project.records import BuildResult, CheckResult, VerifyResult
from imagebuild.publish.evidence import Evidence, EvidenceFile
from imagebuild.verify import checks
from imagebuild.verify.checks import SPEED

IMAGE = "image"
READABLE = "readable"
"""Where it passed, an image check that was skipped is one that does not apply to the image."""


@dataclass(frozen=True)
class PublishRule:
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
    builds: tuple[EvidenceFile[BuildResult], ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        """Where it was pushed to."""
        return self.builds[0].value.repository or ""


@dataclass(frozen=True)
class RegistryImage:
    """What a registry has under a digest."""

    manifest: BlobDescriptor
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


def rules(project: Project, target: Target, image_checks: Iterable[str]) -> tuple[PublishRule, ...]:
    """The checks of a target's image; those that are for other targets are left out."""
    known = axis_facts(target.axes)
    found = [PublishRule(f"{IMAGE}/{name}", always=True) for name in image_checks]
    for name in target.components:
        for check in component.checks_of(project.components[name].model):
            if matches(check.when, known):
                found.append(PublishRule(f"{name}/{check.name}", always=not check.needs))
                found += [PublishRule(f"{name}/{check.name}{SPEED}", always=False)] if check.results else []
    return tuple(found)


@dataclass(frozen=True)
class Terms:
    """What the image of a target is asked for, and what there is to answer with."""

    evidence: Evidence
    policy: Publish
    rules: Sequence[PublishRule]
    made: frozenset[Attachment] = frozenset()
    """What publishing makes by itself to attach."""


def objections(target: Target, choice: Choice, image: RegistryImage | None, terms: Terms) -> list[str]:
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


def _identity(target: Target, choice: Choice, image: RegistryImage) -> Iterator[str]:
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


def _fits(rule: PublishRule, pattern: str) -> bool:
    """Whether a pattern means a check; judgements of its speed only if it says so."""
    return fnmatchcase(rule.name, pattern) and (not rule.name.endswith(SPEED) or pattern.endswith(SPEED))


def required(target: Target, platform: Platform, policy: Publish) -> list[str]:
    """Patterns `component/check` that the policy has for a platform of a target."""
    names = {**axis_facts(target.axes), "image": target.image, "arch": platform.removeprefix("linux/")}
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


STABLE = ("org.opencontainers.image.", "imagebuild.")
"""Beginnings of labels that the index repeats: they say what is in the image, and come with its digest."""


COMMON = "/v8"
"""What some images say behind arm64, which is always that."""


def index(images: Mapping[str, BlobDescriptor], labels: Iterable[Mapping[str, str]]) -> Manifest:
    """The index of one image for each platform; `labels` are those of the images.

    What all images say of themselves is also said of the index. Nothing in it depends on when or where it is made.
    """
    manifests = [
        registry.descriptor_json(BlobDescriptor(image.media_type, image.digest, image.size, platform))
        for platform, image in sorted(images.items())
    ]
    document = {"schemaVersion": 2, "mediaType": registry.INDEX, "manifests": manifests}
    content = registry.encode_json({**document, "annotations": _shared(labels)})
    return Manifest(content, registry.INDEX, registry.digest_of(content))


def _shared(labels: Iterable[Mapping[str, str]]) -> dict[str, str]:
    first, *others = [dict(found) for found in labels]
    return {
        name: value
        for name, value in sorted(first.items())
        if name.startswith(STABLE) and all(other.get(name) == value for other in others)
    }


def image(manifest: Manifest, config: bytes) -> RegistryImage:
    """What a registry has under a digest, with what its configuration says. Raises ResultError if it is no image."""
    try:
        document = json.loads(config)
        parts = [document[key] for key in ("os", "architecture", "variant") if document.get(key)]
        labels = (document.get("config") or {}).get("Labels") or {}
    except (ValueError, LookupError, TypeError) as error:
        raise ResultError(f"{manifest.digest}: its configuration cannot be read: {error}") from None
    named = BlobDescriptor(manifest.media_type, manifest.digest, len(manifest.content))
    return RegistryImage(named, "/".join(parts).removesuffix(COMMON), labels)


DIRTY = "-dirty"


def revision(revisions: Mapping[str, Iterable[str | None]], *, allow_dirty: bool) -> tuple[str, str]:
    """What `{revision}` stands for, and why it stands for nothing: one of both is empty.

    `revisions` are those of the builds of each platform. With `allow_dirty`, what no commit says gets `-dirty` behind
    the commit, so that the tag admits it.
    """
    every = [found for of_platform in revisions.values() for found in of_platform]
    known = sorted({found.removesuffix(DIRTY) for found in every if found})
    if not known or None in every:
        return "", "a build does not say of which commit it is; build it in a git repository"
    dirty = any(found.endswith(DIRTY) for found in every if found)
    if dirty and not allow_dirty:
        return "", f"built from files that differ from commit {known[0][:12]}; commit them, or say --allow-dirty"
    if len(known) > 1 and not allow_dirty:
        listed = ", ".join(f"{platform} from {_short(found)}" for platform, found in sorted(revisions.items()))
        return "", f"its builds are of different commits: {listed}; build them again, or say --allow-dirty"
    return known[0][:REVISION_DIGITS] + (DIRTY if dirty or len(known) > 1 else ""), ""


def filled(
    templates: Sequence[str], revisions: Mapping[str, Iterable[str | None]], *, allow_dirty: bool
) -> tuple[tuple[str, ...], str]:
    """The tags, and why they cannot be given."""
    if not any(REVISION in template for template in templates):
        return tuple(templates), ""
    found, why = revision(revisions, allow_dirty=allow_dirty)
    return tuple(template.replace(REVISION, found) for template in templates), why


def _short(revisions: Iterable[str | None]) -> str:
    return " and ".join(sorted({found[:12] for found in revisions if found}))
