"""Publish verified images: look at everything, then copy, attach and sign, and give tags last.

`decide` says whether an image may be published; here it is done. A tag is given only when the registry has everything
that the tag will name.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagebuild.core.console import err, out
from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, NothingSelected
from imagebuild.core.fields import Platform
from imagebuild.core.run import for_each
from imagebuild.oci.attestation import (
    PREDICATE_DIGEST,
    SIGNATURE,
    encode_predicate,
    kind_of,
    list_attestations,
    read_attestation,
)
from imagebuild.oci.image import PlatformImage, image_of
from imagebuild.oci.layout import (
    INDEX,
    Descriptor,
    Manifest,
    blobs_of,
    digest_of,
    encode_json,
    manifests_of,
)
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, Repository, copy_image
from imagebuild.project.matrix import Plan, Target
from imagebuild.project.plan import REVISION, Project, restricted_components, select_targets
from imagebuild.project.records import Published, PublishResult, VerifyResult
from imagebuild.publish.attest import AttestRequest, Signer, attach, verify_attachments
from imagebuild.publish.decide import Choice, Terms, choose_image, fill_tags, key_of_target, objections, rules_of
from imagebuild.publish.evidence import Evidence, NewAttachment, attachments_of, read_evidence
from imagebuild.publish.provenance import Provenance, provenance_of
from imagebuild.render.renderer import Renderer

JOBS = 4
"""Targets that are published at a time."""


@dataclass(frozen=True)
class PublishRequest:
    """Describe what to publish, and from which results."""

    select: Sequence[str]
    """Targets; if empty, those that the folders have a build of."""
    folders: Sequence[Path]
    """Folders with results of builds, verifications, scans and benchmarks."""
    platforms: Sequence[Platform] = ()
    """If empty, all platforms of a target."""
    allow_dirty: bool = False
    """Whether builds of uncommitted files may be published; their tags say so."""
    dry_run: bool = False


@dataclass(frozen=True)
class PublishTools:
    """Give access to registries, and to what makes provenance and signs it."""

    registry: Callable[[str], Registry]
    """Return the registry of a host, always the same one for a host."""
    provenance: Callable[[Target, Choice], bytes] | None = None
    """Return the provenance of an image. Raises ImagebuildError if this checkout does not fit the build."""
    signer: Signer | None = None
    """Sign images and what is attached to them."""
    key: Callable[[Target], str] | None = None
    """Return the key of a target, which later tells whether what is published is up to date."""

    def repository(self, name: ImageReference) -> Repository:
        """Return the repository of an image."""
        return self.registry(name.host).at(name.repository)


@dataclass(frozen=True)
class Draft:
    """Describe what is published for a target without objections."""

    target: Target
    choices: tuple[Choice, ...]
    index: Manifest
    tags: tuple[ImageReference, ...]
    aliases: tuple[ImageReference, ...]
    current: Mapping[ImageReference, str | None]
    """Tag or alias → the digest that it names now; None if it does not exist."""
    attachments: Mapping[Platform, Sequence[NewAttachment]]
    allow_dirty: bool = False
    """Whether its provenance may name folders that nobody can compare."""

    @property
    def missing(self) -> list[ImageReference]:
        """Return the tags and aliases that do not name the index yet."""
        return [name for name in (*self.tags, *self.aliases) if self.current[name] != self.index.digest]


def publish_targets(project: Project, plan: Plan, request: PublishRequest, tools: PublishTools) -> PublishResult:
    """Publish targets; a target that is refused or fails does not stop the others.

    Raises ConfigError, NothingSelected or ResultError before anything is published, if the request or a result is
    wrong, and CommandError if the key that signs cannot be read.
    """
    if tools.signer:
        tools.signer.trust.check()
    evidence = read_evidence(request.folders)
    targets = requested_targets(plan, request, evidence)
    keys = {target.id: tools.key(target) for target in targets} if tools.key else {}
    names = [name.replace(REVISION, "0") for target in targets for name in (*target.tags, *target.aliases)]
    names += [build.value.repository for build in evidence.builds if build.value.repository]
    registries = [tools.registry(host) for host in sorted({parse_reference(name).host for name in names})]

    def publish(target: Target) -> Published:
        platforms = tuple(p for p in target.platforms if not request.platforms or p in request.platforms)
        key = keys.get(target.id, "")
        terms = Terms(evidence, project.matrix.model.publish, rules_of(project, target), key)
        try:
            draft = make_draft(target, platforms, terms, tools, allow_dirty=request.allow_dirty)
            return publish_draft(draft, tools, dry_run=request.dry_run) if isinstance(draft, Draft) else draft
        except ImagebuildError as error:
            return Published(target=target.id, state="failed", reasons=(str(error),))

    def check_again(published: Published) -> Published:
        """See whether another publisher moved a tag that was just given."""
        names = (*published.given, *published.moved) if published.state == "published" else ()
        try:
            for name in map(parse_reference, names):
                now = tools.repository(name).digest(name.wanted)
                if now != published.digest:
                    raise _overtaken(name, str(published.digest), now)
        except CommandError as error:
            return published.model_copy(update={"state": "failed", "reasons": (str(error),)})
        return published

    done = for_each(publish, targets, *registries, jobs=JOBS)
    return PublishResult(
        targets=tuple(for_each(check_again, done, *registries, jobs=JOBS)),
        ignored=len(evidence.ignored),
        unnamed=tuple(str(v.path) for v in evidence.of_type(VerifyResult) if not v.value.digest),
    )


def requested_targets(plan: Plan, request: PublishRequest, evidence: Evidence) -> tuple[Target, ...]:
    """Return the targets to publish.

    Raises NothingSelected if there are none, and ConfigError for a platform that one of them is not for.
    """
    targets = select_targets(plan, request.select)
    if not request.select:
        built = {build.value.target for build in evidence.builds}
        targets = tuple(target for target in targets if target.id in built)
        if not targets:
            folders = ", ".join(map(str, request.folders))
            raise NothingSelected(f"--results {folders}: no result.json of a target of the plan; build one first")
    for target in targets:
        if wrong := [platform for platform in request.platforms if platform not in target.platforms]:
            raise ConfigError(f"--platform {wrong[0]}: {target.id} is for {', '.join(target.platforms)}")
    return targets


# Look, and change nothing


def make_draft(
    target: Target, platforms: Sequence[Platform], terms: Terms, tools: PublishTools, *, allow_dirty: bool = False
) -> Draft | Published:
    """Find the images of a target, judge them, and look up its tags; return a refusal with every reason against them.

    Raises CommandError if a registry fails.
    """
    choices = tuple(choose_image(target, platform, terms.evidence) for platform in platforms)
    images = {choice.platform: _find_image(choice, target, tools) for choice in choices if choice.digest}
    present = {platform: image for platform, image in images.items() if image}
    index = None
    if len(present) == len(platforms):
        index = make_index(present, choices, terms.key)
        members: dict[tuple[str, str], str] = {
            (index.digest, platform): image.descriptor.digest for platform, image in present.items()
        }
        terms = replace(terms, evidence=replace(terms.evidence, indexes=members))

    reasons = [
        f"{choice.platform}: {reason}"
        for choice in choices
        for reason in objections(target, choice, images.get(choice.platform), terms)
    ]
    attachments: dict[Platform, list[NewAttachment]] = {}
    for choice in (choice for choice in choices if choice.platform in present):
        attachments[choice.platform] = attachments_of(choice.digest, choice.platform, terms.evidence)
        kinds = {attachment.kind for attachment in attachments[choice.platform]}
        if tools.provenance:
            kinds.add("provenance")
            try:
                attachments[choice.platform].append(NewAttachment("provenance", tools.provenance(target, choice)))
            except ImagebuildError as error:
                reasons.append(f"{choice.platform}: provenance: {error}")
        reasons += [
            f"{choice.platform}: no {kind} of this digest; publish.require-attachments asks for it"
            for kind in terms.policy.require_attachments
            if kind not in kinds
        ]
    revisions: dict[str, list[str | None]] = {
        choice.platform: [build.value.revision for build in choice.builds] for choice in choices if choice.builds
    }
    days = [build.value.rebuilt for choice in choices for build in choice.builds]
    names, no_tags = fill_tags(target.tags, revisions, days, allow_dirty=allow_dirty)
    reasons += filter(None, [no_tags if revisions else ""])
    refused = Published(
        target=target.id, state="refused", digest=index.digest if index else None,
        platforms={choice.platform: choice.digest for choice in choices if choice.digest},
    )  # fmt: skip
    if reasons or index is None:
        return refused.model_copy(update={"reasons": tuple(reasons)})

    tags, aliases = tuple(map(parse_reference, names)), tuple(map(parse_reference, target.aliases))
    current = {name: tools.repository(name).digest(name.wanted) for name in (*tags, *aliases)}
    others = {name: digest for name, digest in current.items() if digest not in (None, index.digest)}
    reasons += [
        f"{tag} names {others[tag]} and never moves; this is {index.digest}; build from a new commit for a new tag"
        for tag in tags
        if tag in others
    ]
    lost = set(target.platforms) - set(platforms)
    for alias in [alias for alias in aliases if lost and alias in others]:
        moved = tools.repository(alias).find(str(others[alias]))
        if taken := sorted(lost & {child.platform for child in manifests_of(moved.document)} if moved else ()):
            reasons.append(f"{alias} would lose {', '.join(taken)}; publish all platforms together")
    if reasons:
        return refused.model_copy(update={"reasons": tuple(reasons)})
    return Draft(target, choices, index, tags, aliases, current, attachments, allow_dirty)


def _find_image(choice: Choice, target: Target, tools: PublishTools) -> PlatformImage | None:
    """Find a chosen image where it was pushed to or, if it is not there any more, where the target is published."""
    for name in (choice.repository, *(tag.rpartition(":")[0] for tag in target.tags)):
        place = tools.repository(parse_reference(name))
        manifest = place.find(choice.digest)
        if manifest and manifest.document.get("config"):
            return image_of(place, manifest)
    return None


INDEX_LABELS = ("org.opencontainers.image.", "imagebuild.")
"""Beginnings of the labels that an index repeats as annotations."""


def make_index(images: Mapping[Platform, PlatformImage], choices: Sequence[Choice], key: str) -> Manifest:
    """Return the index of the images of all platforms, with the labels that they share and their origin as annotations.

    Equal arguments give equal bytes, whenever and wherever the index is made. Manifests have their own origin where
    they are listed: in them, it would make every image another one with each commit. `key` is the target's.
    """
    of_platform = {choice.platform: _origin([choice], [images[choice.platform]]) for choice in choices}
    manifests = [
        replace(image.descriptor, platform=platform, annotations=of_platform[platform]).to_json()
        for platform, image in sorted(images.items())
    ]
    first, *others = [image.labels for image in images.values()]
    annotations = {
        name: value
        for name, value in sorted(first.items())
        if name.startswith(INDEX_LABELS) and all(labels.get(name) == value for labels in others)
    }
    annotations |= _origin(choices, images.values()) | ({KEY: key} if key else {})
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests, "annotations": annotations}
    return Manifest(encode_json(document), INDEX)


def _origin(choices: Sequence[Choice], images: Iterable[PlatformImage]) -> dict[str, str]:
    """Return source, commit and date of images as annotations; what their builds do not agree on is left out.

    `created` is the date of the files, not of the build, so that the same commit built again has the same index.
    """
    builds = [build.value for choice in choices for build in choice.builds]
    sources, revisions = ({getattr(b, name) for b in builds} for name in ("source", "revision"))
    source = sources.pop() if len(sources) == 1 else ""
    created = max((str(image.config.get("created") or "") for image in images), default="")
    named = {
        "source": source, "url": source, "vendor": source.rstrip("/").split("/")[-2] if source.count("/") > 3 else "",
        "revision": revisions.pop() if len(revisions) == 1 else "", "created": created,
    }  # fmt: skip
    return {f"{INDEX_LABELS[0]}{name}": str(value) for name, value in named.items() if value}


KEY = "imagebuild.key"
"""Annotation of an index with the key of its target when it was published."""


# What is published already


def unpublished_targets(
    renderer: Renderer, targets: Sequence[Target], connect: Callable[[str], Registry]
) -> list[Target]:
    """Return the targets for which no image of their present key and of all platforms is published.

    All aliases of a target have to name it; of a target without one, any of its tags may. Raises CommandError if a
    registry fails, ConfigError if a template or a script cannot be read.
    """
    keys = {target.id: key_of_target(renderer, target) for target in targets}

    def is_published(target: Target) -> bool:
        named = [_is_of(name, target) for name in map(parse_reference, target.aliases)]
        return all(named) if named else any(_is_of(name, target) for name in _given_tags(target, connect))

    def _is_of(name: ImageReference, target: Target) -> bool:
        manifest = connect(name.host).at(name.repository).find(name.wanted)
        if not manifest or (manifest.document.get("annotations") or {}).get(KEY) != keys[target.id]:
            return False
        return {item.platform for item in manifests_of(manifest.document)} >= set(target.platforms)

    registries = [connect(parse_reference(t.replace(REVISION, "0")).host) for target in targets for t in target.tags]
    published = for_each(is_published, targets, *set(registries), jobs=JOBS)
    return [target for target, done in zip(targets, published, strict=True) if not done]


def _given_tags(target: Target, connect: Callable[[str], Registry]) -> Iterator[ImageReference]:
    """Yield the tags in its repositories that a target may have been given, for any commit."""
    for template in target.tags:
        place = parse_reference(template.replace(REVISION, "0"))
        pattern = re.compile(re.escape(template.rpartition(":")[2]).replace(re.escape(REVISION), r"[0-9a-f]+(-\d{8})?"))
        for tag in connect(place.host).at(place.repository).tags():
            if pattern.fullmatch(tag):
                yield replace(place, tag=tag)


# Publish


@dataclass(frozen=True)
class _MissingParts:
    """List the attachments and signatures that a repository lacks."""

    place: Repository
    attach: Sequence[tuple[Descriptor, NewAttachment]]
    """Image, and what to attach to it."""
    sign: Sequence[ImageReference]


def publish_draft(draft: Draft, tools: PublishTools, *, dry_run: bool = False) -> Published:
    """Store images, attachments and signatures in every repository, then give the tags.

    If a registry fails on the way, the state of the result is `failed`, and no tag names anything incomplete. Raises
    CommandError if a registry fails before anything is stored.
    """
    places = {name.name: tools.repository(name) for name in (*draft.tags, *draft.aliases)}.values()
    missing = [_find_missing(draft, place, tools) for place in places]
    attached = Counter(attachment.kind for parts in missing for _, attachment in parts.attach)
    signed = sum(len(parts.sign) for parts in missing)
    kept = tuple(str(name) for name, digest in draft.current.items() if digest == draft.index.digest)
    published = Published(
        target=draft.target.id, state="unchanged", digest=draft.index.digest, kept=kept, signed=signed,
        platforms={choice.platform: choice.digest for choice in draft.choices},
        attached=dict(sorted(attached.items())),
    )  # fmt: skip
    changes = bool(draft.missing or attached or signed)
    if dry_run or not changes:
        names = _given_and_moved(draft, draft.missing) if dry_run else {}
        return published.model_copy(update={**names, "state": "possible" if changes else "unchanged"})

    tagged, failure = list[ImageReference](), ""
    try:
        if tools.signer and (attached or signed) and tools.signer.fault:
            raise CommandError(f"nothing was sent, as it could not be signed: {tools.signer.fault}")
        for parts in missing:
            # A small blob shows whether we may write there, before anything large is sent.
            parts.place.check_writable()
        for parts in missing:
            _store(draft, parts, tools)
            if draft.missing:
                _judge_stored(draft, parts.place, tools)
        for name in draft.missing:
            _tag(name, draft, tools)
            tagged.append(name)
    except ImagebuildError as error:
        failure = str(error)
    failed = {"state": "failed", "reasons": (failure,), "attached": {}, "signed": 0}
    return published.model_copy(
        update=_given_and_moved(draft, tagged) | (failed if failure else {"state": "published"})
    )


def _given_and_moved(draft: Draft, names: Sequence[ImageReference]) -> dict[str, object]:
    """Split names into those that are new, and those that named another digest before."""
    return {
        "given": tuple(str(name) for name in names if draft.current[name] is None),
        "moved": {str(name): draft.current[name] for name in names if draft.current[name] is not None},
    }


def _find_missing(draft: Draft, place: Repository, tools: PublishTools) -> _MissingParts:
    children = manifests_of(draft.index.document)
    platforms = {choice.digest: choice.platform for choice in draft.choices}
    subjects = [(child, draft.attachments[platforms[child.digest]]) for child in children]
    # A tag names the index, so the index gets the same statements as its platforms.
    every = {(a.kind, digest_of(a.content)): a for _, attachments in subjects for a in attachments}
    subjects.append((draft.index.descriptor, list(every.values())))
    missing: list[tuple[Descriptor, NewAttachment]] = []
    for subject, attachments in subjects:
        present = _attached(place, subject.digest, tools.signer)
        for attachment in attachments:
            # The same image built again needs no second provenance: the two differ only in the time.
            same = (attachment.kind, "" if attachment.kind == "provenance" else digest_of(attachment.content))
            if present[same]:
                present[same] -= 1
            else:
                missing.append((subject, attachment))
    name = ImageReference(place.registry.host, place.name)
    images = [name.at(digest) for digest in (*(child.digest for child in children), draft.index.digest)]
    signer = tools.signer
    return _MissingParts(place, missing, [image for image in images if signer and signer.trust.image_problem(image)])


def _attached(place: Repository, digest: str, signer: Signer | None) -> Counter[tuple[str, str]]:
    """Count the attachments of an image by kind and digest; provenance by its kind alone, as any will do.

    With a signer, only attachments that it trusts count: anybody who may push can have attached others.
    """
    listed = list_attestations(place, digest)
    if signer and listed:
        manifest = place.manifest(digest).content
        read = [read_attestation(place, item, digest) for item in listed]
        trusted = [item for item in read if item.bundle and not signer.trust.attestation_problem(item, manifest)]
        present = [(item.kind, digest_of(item.content)) for item in trusted]
    else:
        present = [(kind_of(item), item.annotations.get(PREDICATE_DIGEST, "")) for item in listed]
    return Counter((kind, "" if kind == "provenance" else content) for kind, content in present)


def _store(draft: Draft, missing: _MissingParts, tools: PublishTools) -> None:
    """Store the images, the index and attachments, check that the registry has them, and sign."""
    if not missing.place.has(draft.index.digest):
        for choice in draft.choices:
            copy_image(choice.digest, tools.repository(parse_reference(choice.repository)), missing.place)
        missing.place.put_manifest(draft.index)
    for child, new in missing.attach:
        attach(missing.place, child, new.kind, new.content, created=new.created, signer=tools.signer)
    _check_stored(missing.place, draft.index)
    if tools.signer and missing.sign:
        tools.signer.sign(missing.sign)


def _check_stored(place: Repository, index: Manifest) -> None:
    """Raise CommandError unless the registry has the index, its images and their blobs."""
    digests = (index.digest, *(child.digest for child in manifests_of(index.document)))
    manifests = [place.find(digest) for digest in digests]
    if lost := [digest for digest, manifest in zip(digests, manifests, strict=True) if not manifest]:
        raise CommandError(f"{place}: accepted {lost[0]}, but does not have it; no tag was given; publish again")
    blobs = {blob.digest for manifest in manifests if manifest for blob in blobs_of(manifest.document)}
    present = for_each(place.has_blob, blobs, place.registry)
    if lost := [digest for digest, has in zip(blobs, present, strict=True) if not has]:
        raise CommandError(f"{place}: does not have blob {lost[0]}; no tag was given; push the image again and publish")


def _judge_stored(draft: Draft, place: Repository, tools: PublishTools) -> None:
    """Judge what the registry has as `attest verify` would. Raises CommandError if it would not trust the image."""
    kinds = {attachment.kind for attachments in draft.attachments.values() for attachment in attachments}
    kinds -= {"provenance"} if draft.allow_dirty else set()
    trust = tools.signer.trust if tools.signer else None
    request = AttestRequest((*sorted(kinds), *([SIGNATURE] if trust else [])), trust)
    image = ImageReference(place.registry.host, place.name, digest=draft.index.digest)
    for finding in verify_attachments(image, place.registry, request).findings:
        if finding.is_wrong:
            attachment = f" {finding.attachment}" if finding.attachment else ""
            raise CommandError(
                f"{image}: {finding.subject}: its {finding.kind}{attachment} is {finding.outcome}: {finding.detail}; "
                "no tag was given; see `imagebuild attest verify`"
            )


def _tag(name: ImageReference, draft: Draft, tools: PublishTools) -> None:
    """Make a tag or an alias name the index. Raises CommandError if another publisher's digest is there."""
    place = tools.repository(name)
    before = place.digest(name.wanted)
    expected = None if name in draft.tags else draft.current[name]
    if before not in (expected, draft.index.digest):
        raise _overtaken(name, draft.index.digest, before)
    after = place.put_manifest(draft.index, name.wanted)
    if after != draft.index.digest:
        raise _overtaken(name, draft.index.digest, after)


def _overtaken(name: ImageReference, ours: str, theirs: str | None) -> CommandError:
    happened = f"moved it to {theirs}" if theirs else "removed it"
    return CommandError(
        f"{name}: another publisher {happened} while this one moved it to {ours}; "
        "find out which is right, and let one publish at a time"
    )


# Provenance


ATTEMPT = "/attempts/"


def provenance_maker(
    renderer: Renderer, *, allow_dirty: bool, workflow: str = "", origin: Mapping[str, str] | None = None
) -> Callable[[Target, Choice], bytes]:
    """Return a function, safe for threads, that makes the provenance of an image from the results of its build.

    `workflow` is what signs it without a key, if that is a workflow that also builds; `origin` is then what the build
    has to name: the signer's own run, workflow, source and commit, as anybody may have written a result.
    It raises ResultError if the image was built from another Dockerfile than this checkout renders, and ConfigError if
    it is of another origin or, unless `allow_dirty`, if something in it came from a folder of the builder.
    """
    lock = threading.Lock()

    def make(target: Target, choice: Choice) -> bytes:
        # Equal images of several builds have one provenance: that of the first build.
        build = min(choice.builds, key=lambda build: (build.value.started, str(build.path))).value
        for name, own in (origin or {}).items():
            named = getattr(build, name) or "unknown"
            # The second attempt of a run may publish what the first built.
            if named.partition(ATTEMPT)[0] != (own or "unknown").partition(ATTEMPT)[0]:
                raise ConfigError(
                    f"{name} of its build is {named}, and that of this job {own or 'unknown'}; who signs without a key "
                    "publishes what the same run built"
                )
        with lock:
            recipe, text = renderer.recipe(target), renderer.dockerfile(target).text
        provenance = provenance_of(build, choice.platform, recipe, renderer.project.lock, text, workflow=workflow)
        if (folders := Provenance.model_validate(provenance).folders) and not allow_dirty:
            listed = ", ".join(folders)
            raise ConfigError(f"{listed} came from a folder that nobody can compare; build without --source")
        return encode_predicate(provenance)

    return make


# Print


_MARKS = {
    "published": "[green]✓ published[/]", "unchanged": "[green]✓ unchanged[/]", "possible": "[yellow]- possible[/]",
    "refused": "[red]✗ refused[/]", "failed": "[red]✗ failed[/]",
}  # fmt: skip


def print_published(result: PublishResult, plan: Plan) -> None:
    """Print the outcome of each target, and the licences that whoever publishes the images accepts."""
    for target in result.targets:
        out.print(f"{_MARKS[target.state]} {target.target} {target.digest or ''}".rstrip())
        for line in _details(target):
            out.print(f"    {line}", markup=False)
    states = Counter(target.state for target in result.targets)
    out.print(", ".join(f"{number} {state}" for state, number in states.items()))
    public = {target.target for target in result.targets if target.state not in ("refused", "failed")}
    for name, text in restricted_components(plan, [t for t in plan.targets if t.id in public]).items():
        err.print(f"restricted: {name}: {text}", markup=False)
    for path in result.unnamed:
        err.print(f"{path}: not used, as it names no digest; verify the image as NAME@DIGEST", markup=False)
    if result.ignored:
        err.print(f"{result.ignored} other JSON files were ignored")


def _details(target: Published) -> Iterator[str]:
    would = target.state == "possible"
    yield from target.reasons
    yield from (f"{'would be given' if would else 'given'}  {name}" for name in target.given)
    yield from (f"kept   {name}" for name in target.kept)
    for name, before in target.moved.items():
        yield f"{'would move' if would else 'moved'}  {name}: {before} → {target.digest}"
    if target.attached:
        listed = ", ".join(f"{number} {kind}" for kind, number in target.attached.items())
        yield f"{'would attach' if would else 'attached'}  {listed}"
