"""The decision whether an image may be published, with the reasons against publishing, and the tags of the image."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from imagebuild.bench.profiles import load_profiles
from imagebuild.bench.verification import SPEED, VerifyResult
from imagebuild.core.fields import Platform, axis_facts, matches
from imagebuild.core.files import shipped_folder
from imagebuild.oci.image import PlatformImage
from imagebuild.project.component import parse_need
from imagebuild.project.load import hash_of_check, script_of
from imagebuild.project.matrix import Publish
from imagebuild.project.plan import REVISION, REVISION_DIGITS, Target, axes_of, components_of
from imagebuild.project.project import Project
from imagebuild.project.records import BuildResult, RenderedHashes, ScanResult
from imagebuild.publish.evidence import UNNAMED, Evidence, EvidenceFile, about, scan_problem, unproven
from imagebuild.render.renderer import Renderer
from imagebuild.report.document import Report
from imagebuild.verify.checks import IMAGE
from imagebuild.verify.rules import IMAGE_CHECKS, UNJUDGED, hash_of_image_checks, hash_of_rules

READABLE = "readable"
"""Name of the check that passes if the files of the image could be read. If this check passed, the image may be
published although another check of the image's files was skipped: the skipped check does not apply to the image."""
DIRTY = "-dirty"
"""Suffix of the commit in a build result if files had uncommitted changes during the build."""

VERIFY = "run `imagebuild each build -- imagebuild verify '{image}' --pull --json '{folder}/verify.json'`"
"""Remedy for images without a result: the command that verifies each pushed image."""


@dataclass(frozen=True)
class PublishRule:
    """A check that applies to a target.

    The image must pass the check before publishing if `always` is true or `publish.require` in the matrix names the
    check."""

    name: str
    """Name of the component and of its check, such as `nccl/all-reduce`."""
    always: bool
    """Whether every image must pass the check. True if the check needs no special hardware such as GPUs. A check that
    needs several nodes needs no special hardware."""
    sha256: str = ""
    """Hash of the check in this checkout. If a check with another hash passed, the result does not count."""
    options: frozenset[str] = frozenset()
    """The options of `verify` that name a profile of this checkout. A verdict on speed only counts with one of them."""


@dataclass(frozen=True)
class ImageChoice:
    """The image to publish for one platform of a target, or the reason why no image can be published."""

    platform: Platform
    digest: str = ""
    builds: tuple[EvidenceFile[BuildResult], ...] = ()
    image: PlatformImage | None = None
    """The image as read from the registry. None if the registry does not contain the image."""
    indexes: frozenset[str] = frozenset()
    """Digests that the builds state for their images, and that list this image in the registry."""
    reason: str = ""


def choose_image(target: Target, platform: Platform, evidence: Evidence, staging: str) -> ImageChoice:
    """Choose the image to publish for a platform from the build results of a target.

    Return the digest of the image, and the builds that made the image. Return a reason instead in these cases: no build
    was pushed; a build was pushed to another repository than `staging`; a step of a build failed; or the build results
    name different digests, because nothing shows which digest is right."""
    builds = [b for b in evidence.of_type(BuildResult) if b.value.target == target.id and platform in b.value.platforms]
    pushed = [build for build in builds if build.value.repository]
    if not builds:
        return ImageChoice(platform, reason="no build result for this platform; run `imagebuild build --push`")
    if not pushed:
        return ImageChoice(platform, reason=f"built, but not pushed ({builds[0].path}); run `imagebuild build --push`")
    for path, build in ((build.path, build.value) for build in pushed):
        if build.repository != staging:
            problem = f"{path}: repository: pushed to {build.repository}, but the plan's staging is {staging}"
            return ImageChoice(platform, reason=f"{problem}; build with the same --registry, or remove the file")
        if failed := next((step for step in build.steps if step.error), None):
            return ImageChoice(platform, reason=f"{path}: steps: {failed.name} failed: {failed.error}; build again")
    by_digest = {build.value.manifests[platform]: build for build in pushed}
    if len(by_digest) > 1:
        listed = ", ".join(f"{digest} ({build.path})" for digest, build in sorted(by_digest.items()))
        several = f"several builds made different images: {listed}; remove the results of all but one build"
        return ImageChoice(platform, reason=several)
    return ImageChoice(platform, digest=next(iter(by_digest)), builds=tuple(pushed))


def rules_of(project: Project, target: Target) -> tuple[PublishRule, ...]:
    """Return the checks that apply to a target: the checks of the image's files, and the checks of each component.
    Raises ConfigError if the script of a check cannot be read."""
    axes = axis_facts(target.axes)
    sha256 = hash_of_image_checks(project, target.image, target.components)
    rules = [PublishRule(f"{IMAGE}/{name}", always=True, sha256=sha256) for name in IMAGE_CHECKS]
    for component in target.components:
        for check in project.components[component].model.checks:
            if matches(check.when, axes):
                sha256 = hash_of_check(check, script_of(project, component, check))
                # A check of several nodes needs no special hardware, because containers can act as nodes.
                anywhere = all(parse_need(need)[0] == "nodes" for need in check.needs)
                rules.append(PublishRule(f"{component}/{check.name}", anywhere, sha256))
                if check.results:
                    options = profile_options(project.roots)
                    rules.append(PublishRule(f"{component}/{check.name}{SPEED}", False, sha256, options))
    return tuple(rules)


@cache
def profile_options(roots: tuple[Path, ...]) -> frozenset[str]:
    """Return the option of `verify` for each profile of a project with these folders, with the hash of the profile.
    Raises ConfigError that lists the mistakes in the profiles."""
    folders = [folder / "profiles" for folder in (shipped_folder(), *(root.parent for root in reversed(roots)))]
    profiles = load_profiles(*(folder for folder in folders if folder.is_dir()))
    return frozenset(f"--profile {profile.model.stamp}" for profile in profiles.values())


def hashes_of(renderer: Renderer, targets: Collection[Target]) -> RenderedHashes:
    """Render targets, and return their hashes. The second hash is of everything that the published image depends on,
    also of the code that checks its files: if it changed after the image was published, the image is not up to date.
    Raises ConfigError if a script or a template cannot be read."""
    hashes = {}
    for target in targets:
        texts = (renderer.dockerfile(target).text, f"{renderer.key(target)} {hash_of_rules()}")
        dockerfile, key = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
        hashes[target.id] = (dockerfile, key)
    return RenderedHashes(targets=hashes)


def objections(
    target: Target, choice: ImageChoice, evidence: Evidence, policy: Publish, rules: Sequence[PublishRule]
) -> list[str]:
    """Return every reason why the chosen image may not be published.

    The list is empty if the image may be published. `evidence` contains only results about this image. `policy` is
    `publish` in the matrix. `rules` are the checks that apply to the target."""
    if choice.image is None:
        return [choice.reason]
    return [
        *_label_objections(target, choice.platform, choice.image),
        *(f"{name} failed ({file.path}): {why}" for file in evidence.files for name, why in failures(file.value)),
        *_check_objections(target, choice, evidence.of_type(VerifyResult), policy, rules),
    ]


def failures(value: BaseModel) -> list[tuple[str, str]]:
    """Return each failed check in a result, with its reason. A failed scan counts as a check."""
    match value:
        case ScanResult():
            return [("scan", problem)] if (problem := scan_problem(value)) else []
        case VerifyResult():
            return [(check.name, check.reason) for check in value.checks if check.outcome == "failed"]
        case Report():
            return [failure for verification in value.verifications for failure in failures(verification)]
    return []


def stray_failures(target: Target, evidence: Evidence, judged: Collection[Path], digests: Set[str]) -> Iterator[str]:
    """Yield a message for each failed result that concerns a target although no image of the target is its subject.

    `judged` are the files about the images of the target. `digests` are the digests of these images and their indexes.
    A failed result without a digest, or for several platforms, concerns the target that it names. Without the name of a
    target, it concerns every target."""
    for file in evidence.files:
        named, platforms = about(file.value)
        results = file.value.verifications if isinstance(file.value, Report) else (file.value,)
        targets = {result.target for result in results if isinstance(result, VerifyResult) and failures(result)}
        vague = (UNNAMED in named or len(platforms) > 1) and targets & {target.id, None}
        if file.path not in judged and (vague or named & digests):
            for name, reason in failures(file.value):
                remedy = "verify the image again as NAME@DIGEST, then remove this file"
                yield f"{name} failed ({file.path}): {reason}; this result does not name one image: {remedy}"


def _label_objections(target: Target, platform: Platform, image: PlatformImage) -> Iterator[str]:
    """Yield each difference between the image and the plan: in platform, target id, components and axes."""
    if image.platform != platform:
        yield f"the image is for {image.platform}, not for {platform}"

    def facts(id_: str, components: Mapping[str, str], axes: Mapping[str, str]) -> dict[str, str]:
        named = [("component", components), ("axis", axes)]
        return {"target id": id_} | {f"{noun} {name}": value for noun, of in named for name, value in of.items()}

    has = facts(image.labels.get("imagebuild.target", "none"), components_of(image.labels), axes_of(image.labels))
    wants = facts(target.id, target.components, target.axes)
    for name in sorted({*has, *wants}):
        if has.get(name) != wants.get(name):
            yield f"{name}: the image has {has.get(name, 'none')}, the plan has {wants.get(name, 'none')}"


def _check_objections(
    target: Target, choice: ImageChoice, verifications: Sequence[EvidenceFile[VerifyResult]], policy: Publish,
    rules: Sequence[PublishRule],
) -> Iterator[str]:  # fmt: skip
    """Yield a message for each check that failed, and for each required check that was skipped or did not run."""
    if not verifications:
        yield f"not verified: no result is about {choice.digest}; {VERIFY}"
        return
    hashes = {rule.name: rule.sha256 for rule in rules}
    judged_by = {rule.name: rule.options for rule in rules if rule.options}
    decided, inapplicable, skipped = set[str](), set[str](), dict[str, str]()
    for verification in verifications:
        checks, doubt = verification.value.checks, unproven(verification.value)
        for check in checks:
            name = check.name
            if check.outcome == "failed":  # `failures` returns the check
                decided.add(name)
            elif doubt and check.component != IMAGE:
                skipped[name] = f"{doubt} ({verification.path})"
            elif check.sha256 != hashes.get(name, check.sha256):
                other = "the result is for another version of the check than the version in this checkout"
                skipped[name] = f"{other} ({verification.path}); run `imagebuild verify` again"
            elif name in judged_by and not judged_by[name] & {*verification.value.options}:
                other = "the speed was judged by a profile that differs from those of this checkout"
                skipped[name] = f"{other} ({verification.path}); run `imagebuild verify` again"
            elif check.outcome == "passed":
                decided.add(name)
            else:
                skipped[name] = check.reason
        image_checks = [c for c in checks if c.component == IMAGE and c.sha256 == hashes.get(c.name)]
        if any(check.check == READABLE and check.outcome == "passed" for check in image_checks):
            skips = [check for check in image_checks if check.outcome == "skipped"]
            inapplicable |= {check.name for check in skips if not check.reason.startswith(UNJUDGED)}

    for name, pattern in required_checks(target, choice.platform, policy, rules).items():
        if name not in decided and (pattern or name not in inapplicable):
            missing = f"was skipped: {skipped[name]}" if name in skipped else "was not run"
            why = f"; the check is required, because publish.require contains {pattern}" if pattern else ""
            yield f"{name} {missing}{why}"
    for pattern in _required_patterns(target, choice.platform, policy):
        if not any(_fits(rule, pattern) for rule in rules):
            yield f"publish.require contains {pattern}, but this target has no such check"


def _required_patterns(target: Target, platform: str, policy: Publish) -> list[str]:
    facts = {**axis_facts(target.axes), "image": target.image, "arch": platform.removeprefix("linux/")}
    asked = (pattern for row in policy.require if matches(row.when, facts) for pattern in row.checks)
    return [pattern if "/" in pattern else f"{pattern}/*" for pattern in asked]


def required_checks(target: Target, platform: str, policy: Publish, rules: Sequence[PublishRule]) -> dict[str, str]:
    """Map each check that an image must pass to the pattern in `publish.require` that names it.
    The pattern is empty if every image must pass the check, unless the check does not apply to the image."""
    patterns = _required_patterns(target, platform, policy)
    named = {rule: next((pattern for pattern in patterns if _fits(rule, pattern)), "") for rule in rules}
    return {rule.name: pattern for rule, pattern in named.items() if pattern or rule.always}


def _fits(rule: PublishRule, pattern: str) -> bool:
    """Return whether a pattern in `publish.require` matches a check.
    A verdict on speed, such as `nccl/all-reduce-speed`, matches only patterns with the suffix `-speed`."""
    return fnmatchcase(rule.name, pattern) and (not rule.name.endswith(SPEED) or pattern.endswith(SPEED))


def fill_tags(templates: Sequence[str], builds: Collection[BuildResult], revision: str) -> tuple[tuple[str, ...], str]:
    """Return the tags with `{revision}` replaced, and the reason why the builds may not be published.

    The reason is empty if the builds may be published. `revision` is the commit of this checkout, or empty if unknown.
    All builds must be from this commit, because a build result can state any commit. `{revision}` becomes this commit,
    followed by the day if `build --rebuild` was used."""
    commits = sorted({build.revision or "" for build in builds})
    days = sorted({f"-{build.rebuilt:%Y%m%d}" if build.rebuilt else "" for build in builds})
    commit, day = next(iter(commits), ""), next(iter(days), "")
    own, is_named, problem = revision.removesuffix(DIRTY), any(REVISION in template for template in templates), ""
    if changed := [commit for commit in commits if commit.endswith(DIRTY)]:
        problem = f"built from files that differ from commit {changed[0][:12]}; commit the files, then build again"
    elif len(commits) > 1:
        listed = ", ".join(commit[:12] or "an unknown one" for commit in commits)
        problem = f"the builds are from different commits: {listed}; build all platforms again from one commit"
    elif not commit and is_named:
        problem = "a build result does not name the git commit; commit the files, and build again"
    elif commit == own != revision:
        problem = f"files of this checkout differ from commit {own[:12]}; commit or stash the changes, and try again"
    elif commit != revision:
        problem = (
            f"built from commit {commit[:12] or 'unknown'}, but this checkout is of commit {own[:12] or 'unknown'}; "
            "check out the commit of the build, or build again"
        )
    elif len(days) > 1:
        listed = ", ".join(day.removeprefix("-") or "without --rebuild" for day in days)
        problem = f"the builds are from different days: {listed}; build all platforms again with the same --rebuild"
    elif day and not is_named:
        problem = "the tag of a rebuild must contain the day; add {revision} to the tags in the matrix"
    tags = tuple(template.replace(REVISION, commit[:REVISION_DIGITS] + day) for template in templates)
    return () if problem else tags, problem
