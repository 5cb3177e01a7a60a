"""Publishing of verified images: check everything, copy the images, attach and sign, and push the tags last.

The module `decide` decides whether an image may be published. A tag is pushed only after the registry contains the
image, its attachments and its signatures."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from imagebuild.bench.verification import VerifyResult
from imagebuild.core.console import err, out, styled
from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, NothingSelected, ResultError
from imagebuild.core.run import for_each
from imagebuild.oci.attestation import SIGNATURE, encode_predicate
from imagebuild.oci.image import PlatformImage, image_of, index_explained, is_image
from imagebuild.oci.layout import INDEX, Descriptor, Manifest, blobs_of, encode_json, manifests_of
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, Repository, copy_image
from imagebuild.project.plan import EXCEPT, REVISION, Plan, Target, repository_name, restricted_components
from imagebuild.project.project import Project
from imagebuild.project.records import BuildResult, Published, PublishResult, RenderedHashes
from imagebuild.project.select import select_targets
from imagebuild.publish import decide
from imagebuild.publish.attest import attach, missing_attachments, verify_attachments
from imagebuild.publish.evidence import (
    PUBLICATION,
    Evidence,
    NewAttachment,
    Publication,
    attachment_of,
    read_evidence,
    tag_problem,
)
from imagebuild.publish.provenance import Provenance, provenance_of
from imagebuild.publish.signatures import Signer
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer

JOBS = 4
"""Maximum number of targets that are published at the same time."""
Connect = Callable[[str], Registry]
"""A function that returns the registry on a host. The function always returns the same object for the same host."""
ATTEMPT = re.compile(r"/attempts/\d+$")
INDEX_LABELS = ("org.opencontainers.image.", "imagebuild.")
"""Prefixes of the image labels that the index repeats as annotations."""
KEY = "imagebuild.key"
"""Annotation of an index. The value is the second hash from `hashes_of` at the time of publishing."""
_MARKS = {
    "published": ("✓ published", "green"), "unchanged": ("✓ unchanged", "green"), "possible": ("- possible", "yellow"),
    "refused": ("✗ refused", "red"), "failed": ("✗ failed", "red"),
}  # fmt: skip


@dataclass(frozen=True)
class PublishRequest:
    """The user's request: the targets to publish, the folders with their results, and the signer."""

    select: Sequence[str]
    """Names of the targets to publish. If empty: all targets for which the folders contain a build result."""
    folders: Sequence[Path]
    """Folders with results of builds, verifications, scans and benchmarks."""
    dry_run: bool = False
    signer: Signer | None = None
    """The signer for images and attachments. None: nothing is signed."""
    rendered: RenderedHashes | None = None
    """Hashes of targets that another job rendered. None: the targets are rendered here."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Maps `revision` and `source`, and in a CI job `run` and `workflow`, to the values of this checkout and this job.
    Tags, annotations and provenance contain these values. A build result is only compared with them, because anybody
    could have written the result."""


class Planned(NamedTuple):
    """The definition of a target in this checkout: sources, checks, and the hash of the Dockerfile."""

    project: Project
    recipe: Recipe
    rules: tuple[decide.PublishRule, ...]
    dockerfile: str
    """sha256 of the Dockerfile."""
    key: str
    """Hash of everything that the image depends on. The hash is published with the image, and shows later whether the
    image is up to date."""


@dataclass(frozen=True)
class Draft:
    """Everything to publish for a target that may be published: images, index, attachments and tags."""

    target: Target
    images: tuple[PlatformImage, ...]
    index: Manifest
    current: Mapping[ImageReference, str | None]
    """Maps each tag and alias (a tag that may move) of the target to the digest that the tag names now. None: the tag
    does not exist."""
    wanted: Sequence[tuple[Descriptor, Sequence[NewAttachment]]]
    """The manifest of each image and of the index, with the attachments that the manifest must have."""

    @property
    def missing(self) -> list[ImageReference]:
        """The tags and aliases that do not name the index yet, so they must be pushed."""
        return [name for name, digest in self.current.items() if digest != self.index.digest]


def repository_of(name: ImageReference, connect: Connect) -> Repository:
    return connect(name.host).at(name.repository)


def digest_at(name: ImageReference, connect: Connect) -> str | None:
    """Return the digest of the manifest that a registry sends for a tag. None if the tag does not exist.
    The digest is computed from the manifest, because a header of the registry does not prove it."""
    manifest = repository_of(name, connect).find(name.wanted)
    return manifest.digest if manifest else None


def publish_targets(renderer: Renderer, plan: Plan, request: PublishRequest, connect: Connect) -> PublishResult:
    """Publish targets, and return the outcome of each target.

    A target that is refused or fails does not stop the other targets. If the request or a result file is wrong, raises
    ConfigError, NothingSelected or ResultError before anything is published. Raises CommandError if the signing key
    cannot be read."""
    if request.signer:
        _ = request.signer.trusted
    evidence = read_evidence(request.folders)
    built = {build.value.target for build in evidence.of_type(BuildResult)}
    named = any(not selector.startswith(EXCEPT) for selector in request.select)
    targets = [target for target in select_targets(plan, request.select) if named or target.id in built]
    if not targets:
        folders = ", ".join(map(str, request.folders))
        remedy = "run `imagebuild build` first"
        raise NothingSelected(f"--results {folders}: contains no result.json of a target in the plan; {remedy}")
    hashes = (request.rendered or decide.hashes_of(renderer, targets)).targets
    if unknown := [target.id for target in targets if target.id not in hashes]:
        raise ConfigError(f"--rendered: contains no hashes of {unknown[0]}, which was not planned; remove its results")
    project = renderer.project
    planned = [Planned(project, renderer.recipe(t), decide.rules_of(project, t), *hashes[t.id]) for t in targets]
    names = [name.replace(REVISION, "0") for target in targets for name in (*target.tags, *target.aliases)]
    names += [repository_name(project, target.image) for target in targets]
    registries = [connect(host) for host in sorted({parse_reference(name).host for name in names})]

    def publish(planned: Planned) -> Published:
        try:
            draft = make_draft(planned, evidence, request, connect)
            return publish_draft(draft, request, connect) if isinstance(draft, Draft) else draft
        except ImagebuildError as error:
            return Published(target=planned.recipe.target.id, state="failed", reasons=(str(error),))

    def check_again(published: Published) -> Published:
        """Return the outcome of a target. The outcome is `failed` if another publisher moved a tag that was just
        pushed."""
        names = (*published.given, *published.moved) if published.state == "published" else ()
        try:
            for name in map(parse_reference, names):
                _check_is_ours(name, (published.digest,), digest_at(name, connect))
        except CommandError as error:
            return published.model_copy(update={"state": "failed", "reasons": (str(error),)})
        return published

    done = for_each(check_again, for_each(publish, planned, *registries, jobs=JOBS), *registries, jobs=JOBS)
    verified = [file for file in evidence.of_type(VerifyResult) if file.value.options]
    notes = (f"{file.path}: verified with {', '.join(file.value.options)}" for file in verified)
    return PublishResult(targets=tuple(done), unused=tuple(evidence.unused), notes=tuple(notes))


def make_draft(planned: Planned, evidence: Evidence, request: PublishRequest, connect: Connect) -> Draft | Published:
    """Check whether a target may be published, without changing anything in a registry.

    If the target may be published, return a Draft: the images, attachments and tags to publish. Otherwise, return a
    Published with the state `refused` and every reason. Raises CommandError if a registry fails."""
    target, policy = planned.recipe.target, planned.project.matrix.model.publish
    staging = repository_name(planned.project, target.image)
    chosen = [decide.choose_image(target, platform, evidence, staging) for platform in target.platforms]
    builds = [build.value for choice in chosen for build in choice.builds]
    names, untaggable = decide.fill_tags(target.tags, builds, request.origin.get("revision", ""))
    choices = [_with_image(choice, staging, (*names, *target.aliases), connect) for choice in chosen]
    images = tuple(choice.image for choice in choices if choice.image)
    stated = Publication(
        names=tuple(str(parse_reference(name)) for name in (*names, *target.aliases)),
        attachments=tuple(sorted({"provenance", "verification", *policy.require_attachments})),
        checks={p: tuple(decide.required_checks(target, p, policy, planned.rules)) for p in target.platforms},
    )
    index = make_index(images, request.origin, planned.key, stated) if len(images) == len(choices) else None
    reasons = [untaggable] if builds and untaggable else []
    judged: set[Path] = set()
    wanted: list[tuple[Descriptor, list[NewAttachment]]] = []
    for choice in choices:
        own = evidence.of_image(choice.digest, choice.platform, choice.indexes | ({index.digest} if index else set()))
        judged |= {file.path for file in own.files}
        against = decide.objections(target, choice, own, policy, planned.rules)
        if choice.image:
            of_image = (choice.digest, choice.platform)
            attachments = sorted({attachment_of(file.value, file.document, *of_image) for file in own.files})
            kinds = {"provenance", *(attachment.kind for attachment in attachments)}
            absent = [kind for kind in policy.require_attachments if kind not in kinds]
            against += [
                f"no result of kind {kind} for this image, but publish.require-attachments contains {kind}"
                for kind in absent
            ]
            try:
                attachments.append(_provenance(choice, planned, request))
            except ImagebuildError as error:
                against.append(f"provenance: {error}")
            wanted.append((choice.image.descriptor, attachments))
        reasons += [f"{choice.platform}: {reason}" for reason in against]
    digests = {choice.digest for choice in choices}.union(*(choice.indexes for choice in choices))
    reasons += decide.stray_failures(target, evidence, judged, digests | ({index.digest} if index else set()))

    current: dict[ImageReference, str | None] = {}
    if index and not reasons:
        for name in map(parse_reference, (*names, *target.aliases)):
            current[name] = digest_at(name, connect)
        reasons += [
            f"{tag} names {current[tag]} and must not move to {index.digest}; build from a new commit to get a new tag"
            for tag in map(parse_reference, names)
            if current[tag] not in (None, index.digest)
        ]
    if index is None or reasons:
        return Published(
            target=target.id, state="refused", digest=index.digest if index else None, reasons=tuple(reasons),
            platforms={choice.platform: choice.digest for choice in choices if choice.digest},
        )  # fmt: skip
    # A tag names the index, so the index gets the attachments of all platforms.
    every = {(new.kind, new.content): new for _, attachments in wanted for new in attachments}
    wanted.append((index.descriptor, list(every.values())))
    return Draft(target, images, index, current, wanted)


def _with_image(
    choice: decide.ImageChoice, staging: str, published: Sequence[str], connect: Connect
) -> decide.ImageChoice:
    """Read the chosen image from the registry, and return the choice with the image, or with a reason.

    The digest that a build states must name, in the staging repository, exactly the manifests that the build states. If
    the build was deleted there, the image is read through one of the tags `published`, whose index must list it."""
    if not choice.digest:
        return choice
    place, found = repository_of(parse_reference(staging), connect), dict[str, Manifest]()
    for build in choice.builds:
        digest, stated = str(build.value.digest), sorted(build.value.manifests.items())
        if top := place.find(digest):
            if (listed := sorted(listed_images(top, choice.platform))) != stated:
                shown = ", ".join(map(" ".join, listed)) or "no image"
                problem = f"{build.path}: manifests: differ from {place}@{digest}, which contains {shown}"
                return replace(choice, digest="", reason=f"{problem}; build again with --push")
            found[digest] = top
    for name in map(parse_reference, () if found else published):
        top = repository_of(name, connect).find(name.wanted)
        if top and (choice.platform, choice.digest) in listed_images(top, choice.platform):
            place, found = repository_of(name, connect), {top.digest: top}
            break
    manifest = found.get(choice.digest) or (place.find(choice.digest) if found else None)
    if not manifest or not manifest.document.get("config"):
        return replace(choice, reason=f"{staging} does not contain the image any more; build again with --push")
    return replace(choice, image=image_of(place, manifest), indexes=frozenset(found))


def listed_images(top: Manifest, platform: str) -> list[tuple[str, str]]:
    """Return the platform and the digest of each entry of an index that an engine could run: all but attestations.

    For the manifest of a single image, return `platform` and its digest. Raises ResultError if the document is neither
    an index nor a manifest, or could be read as both."""
    try:
        document, items = top.document, manifests_of(top.document)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ResultError(f"{top.digest}: is not an index; build the image again with --push") from None
    if ("manifests" in document) == ("config" in document):
        raise ResultError(f"{top.digest}: is not either an index or a manifest; build the image again with --push")
    attestations = [item for item in items if item.platform == "unknown/unknown" and not is_image(item)]
    found = [(item.platform or "no platform", item.digest) for item in items if item not in attestations]
    return found if "manifests" in document else [(platform, top.digest)]


def _provenance(choice: decide.ImageChoice, planned: Planned, request: PublishRequest) -> NewAttachment:
    """Return the provenance of an image as an attachment, made from the build result of the image.

    Raises ResultError if the image was built from another Dockerfile than this checkout renders. Raises ConfigError if
    the image was built by another CI run than the run that signs without a key, or if a source was a folder on the
    build machine."""
    # If several builds made the same image, the provenance describes the first build.
    build = min(choice.builds, key=lambda build: (build.value.started, str(build.path))).value
    own = {name: request.origin.get(name, "") for name in ("source", "run", "workflow")}
    # The second attempt of a CI run may publish an image that the first attempt built.
    others = [n for n, v in own.items() if ATTEMPT.sub("", getattr(build, n)) != ATTEMPT.sub("", v)]
    identity = "".join(request.signer.identities) if request.signer else ""
    if identity and others:
        named = getattr(build, others[0]) or "unknown"
        raise ConfigError(
            f"{others[0]} of the build is {named}, but {others[0]} of this job is {own[others[0]] or 'unknown'}; "
            "without a key, publish in the same run that builds"
        )
    job = {} if {"run", "workflow"} & {*others} else {"run": own["run"], "workflow": own["workflow"]}
    origin = {**request.origin, "run": "", "workflow": "", **job, "builder": identity or job.get("workflow", "")}
    lock = planned.project.lock
    document = provenance_of(build, choice.platform, planned.recipe, lock, planned.dockerfile, origin=origin)
    if folders := Provenance.model_validate(document).folders:
        raise ConfigError(f"{', '.join(folders)} was a local folder with unknown content; build without --source")
    return NewAttachment("provenance", encode_predicate(document))


def make_index(images: Sequence[PlatformImage], origin: Mapping[str, str], key: str, stated: Publication) -> Manifest:
    """Return the index that lists the images of all platforms.

    The index has these annotations: the labels that all images share, the source repository and the commit in `origin`,
    the creation date of the images, the hash of everything that the images depend on, and `stated`. The commit is
    not a label of the images, because each commit would then change the images. The creation date is the date of the
    files in the images, not of the build. Equal arguments give equal bytes."""
    shared = set.intersection(*(set(image.labels.items()) for image in images))
    annotations = {name: value for name, value in shared if name.startswith(INDEX_LABELS)}
    facts = {name: origin.get(name, "") for name in ("source", "revision")}
    facts["created"] = max(str(image.config.get("created") or "") for image in images)
    annotations |= {f"{INDEX_LABELS[0]}{name}": value for name, value in facts.items() if value}
    annotations |= {KEY: key, PUBLICATION: stated.model_dump_json()}
    manifests = [image.descriptor.to_json() for image in sorted(images, key=lambda image: image.platform)]
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests, "annotations": annotations}
    return Manifest(encode_json(document), INDEX)


def unpublished_targets(
    renderer: Renderer, targets: Sequence[Target], connect: Connect, trust: Signer | None = None
) -> list[Target]:
    """Return the targets whose published image is missing or not up to date.

    The image of a target is up to date if every alias of the target names an index with all platforms of the target and
    with the hash that `hashes_of` returns now. A target without an alias is never up to date. If `trust` is set, only
    an index that it signed under the name of the alias counts. Raises CommandError if a registry fails, ConfigError if
    a template or a script cannot be read."""
    hashes = decide.hashes_of(renderer, targets).targets
    judged: dict[str, str] = {}

    def problem(name: ImageReference, index: Manifest) -> str:
        if trust and index.digest not in judged:
            judged[index.digest] = trust.image_problem(name.at(index.digest))
        return (trust and (judged[index.digest] or tag_problem(name, index))) or ""

    def is_published(target: Target) -> bool:
        for name in map(parse_reference, target.aliases):
            manifest = repository_of(name, connect).find(name.wanted)
            document = manifest.document if manifest else {}
            key, platforms = (document.get("annotations") or {}).get(KEY), {i.platform for i in manifests_of(document)}
            if key != hashes[target.id][1] or not platforms >= set(target.platforms):
                return False
            if manifest and (why := problem(name, manifest)):
                err.print(f"{name}: does not count: {why}")
                return False
        return bool(target.aliases)

    registries = {connect(parse_reference(name).host) for target in targets for name in target.aliases}
    published = for_each(is_published, targets, *registries, jobs=JOBS)
    return [target for target, done in zip(targets, published, strict=True) if not done]


def publish_draft(draft: Draft, request: PublishRequest, connect: Connect) -> Published:
    """Store images, attachments and signatures in every repository, then push the tags. Return the outcome.

    Raises CommandError if a registry or the signer fails before the first tag is pushed. If pushing a tag fails, or
    another publisher moves a tag, the outcome is `failed` and lists the tags that were pushed before. No tag ever names
    an incomplete image. If `request.dry_run` is true, nothing is changed."""
    signer = None if request.dry_run else request.signer
    places = {name.name: repository_of(name, connect) for name in draft.current}.values()
    missing = {place: missing_attachments(place, draft.wanted, signer) for place in places}
    unsigned: dict[Repository, list[ImageReference]] = {}
    for place in places:
        images = [ImageReference(place.registry.host, place.name, digest=s.digest) for s, _ in draft.wanted]
        unsigned[place] = [image for image in images if signer and signer.image_problem(image)]
    attached = Counter(attachment.kind for lacking in missing.values() for _, attachment in lacking)
    signed = sum(map(len, unsigned.values()))
    digest, changes = draft.index.digest, bool(draft.missing or attached or signed)
    published = Published(
        target=draft.target.id, digest=digest, attached=dict(sorted(attached.items())), signed=signed,
        state="unchanged" if not changes else "possible" if request.dry_run else "published",
        platforms={image.platform: image.digest for image in draft.images},
        kept=tuple(str(name) for name, before in draft.current.items() if before == digest),
        given=tuple(str(name) for name, before in draft.current.items() if before is None),
        moved={str(name): before for name, before in draft.current.items() if before not in (None, digest)},
    )  # fmt: skip
    if published.state != "published":
        return published
    if signer and (attached or signed) and signer.fault:
        raise CommandError(f"nothing was pushed, because a trial signature failed: {signer.fault}")
    for place in places:
        # A small upload tests whether imagebuild may write to the repository, before large files are sent.
        place.check_writable()
    for place in places:
        if not place.has(digest):
            for image in draft.images:
                copy_image(image.digest, image.place, place)
            place.put_manifest(draft.index)
        for subject, new in missing[place]:
            attach(place, subject, new, signer)
        _check_stored(place, draft.index)
        if signer and unsigned[place]:
            signer.sign(unsigned[place])
        if draft.missing:
            _judge_stored(draft, place, signer)
    for number, name in enumerate(draft.missing):
        try:
            _tag(name, draft, connect)
        except CommandError as error:
            before = {str(given) for given in draft.missing[:number]}
            given = tuple(tag for tag in published.given if tag in before)
            moved = {tag: digest for tag, digest in published.moved.items() if tag in before}
            update = {"state": "failed", "reasons": (str(error),), "given": given, "moved": moved}
            return published.model_copy(update=update)
    return published


def _check_stored(place: Repository, index: Manifest) -> None:
    """Raise CommandError unless the registry contains the index, its images, and the blobs of these images."""
    digests = (index.digest, *(child.digest for child in manifests_of(index.document)))
    manifests = [place.find(digest) for digest in digests]
    if lost := [digest for digest, manifest in zip(digests, manifests, strict=True) if not manifest]:
        advice = "no tag was pushed; publish again"
        raise CommandError(f"{place}: accepted the manifest {lost[0]}, but does not contain this manifest; {advice}")
    blobs = {blob.digest for manifest in manifests if manifest for blob in blobs_of(manifest.document)}
    present = for_each(place.has_blob, blobs, place.registry)
    if lost := [digest for digest, has in zip(blobs, present, strict=True) if not has]:
        remedy = "no tag was pushed; push the image again, then publish"
        raise CommandError(f"{place}: does not contain blob {lost[0]}; {remedy}")


def _judge_stored(draft: Draft, place: Repository, trust: Signer | None) -> None:
    """Raise CommandError if `imagebuild attest verify` would not trust the stored image."""
    kinds = {new.kind for _, attachments in draft.wanted for new in attachments} | ({SIGNATURE} if trust else set())
    image = ImageReference(place.registry.host, place.name, digest=draft.index.digest)
    for finding in verify_attachments(image, place.registry, sorted(kinds), trust).findings:
        if finding.is_wrong:
            attachment = f" {finding.attachment}" if finding.attachment else ""
            problem = f"the outcome for the {finding.kind}{attachment} is {finding.outcome}: {finding.detail}"
            remedy = "no tag was pushed; run `imagebuild attest verify` for details"
            raise CommandError(f"{image}: {finding.subject}: {problem}; {remedy}")


def _tag(name: ImageReference, draft: Draft, connect: Connect) -> None:
    ours = draft.index.digest
    _check_is_ours(name, (ours, draft.current[name]), digest_at(name, connect))
    _check_is_ours(name, (ours,), repository_of(name, connect).put_manifest(draft.index, name.wanted))
    _check_is_ours(name, (ours,), digest_at(name, connect))


def _check_is_ours(name: ImageReference, expected: tuple[str | None, ...], found: str | None) -> None:
    """Raise CommandError unless `found`, what a tag names now, is one of the expected digests, of which the first is
    that of the index that this publisher pushes."""
    if found not in expected:
        happened = f"moved the tag to {found}" if found else "removed the tag"
        problem = f"another publisher {happened} while this publisher moved the tag to {expected[0]}"
        remedy = "decide which digest is right, and let only one publisher run at a time"
        raise CommandError(f"{name}: {problem}; {remedy}")


def print_published(result: PublishResult, plan: Plan) -> None:
    """Print the outcome of each target, the licence terms of the published components, and the results that were not
    used."""
    for target in result.targets:
        out.print(styled(_MARKS[target.state], f" {target.target} {target.digest or ''}".rstrip()))
        attached = ", ".join(f"{number} {kind}" for kind, number in target.attached.items())
        for line in (
            *target.reasons,
            *(f"new tag  {name}" for name in target.given),
            *(f"same tag  {name}" for name in target.kept),
            *(f"moved tag  {name}: {before} → {target.digest}" for name, before in target.moved.items()),
            *([f"attachments  {attached}"] if attached else ()),
            *filter(None, [target.platforms and index_explained(target.digest, target.platforms)]),
        ):
            out.print(f"    {line}")
    states = Counter(target.state for target in result.targets)
    out.print(", ".join(f"{number} {state}" for state, number in states.items()))
    public = {target.target for target in result.targets if target.state not in ("refused", "failed")}
    for name, text in restricted_components(plan, [t for t in plan.targets if t.id in public]).items():
        err.print(f"restricted: {name}: {text}")
    for note in result.notes:
        err.print(f"note: {note}")
    for problem in result.unused:
        err.print(f"not used: {problem}")
