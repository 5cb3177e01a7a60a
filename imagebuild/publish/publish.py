"""Publish targets whose images were verified: look at everything, then copy, attach, and give tags last."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagebuild.bench.models import Results
from imagebuild.core import console, run
from imagebuild.core.console import err, out
from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, NothingSelected
from imagebuild.core.fields import Platform
from imagebuild.oci import registry
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import (
    KINDS,
    AttachmentFile,
    BlobDescriptor,
    Manifest,
    Registry,
    RepositoryAt,
    Traffic,
    blobs_of,
    copy_image,
    for_each,
    manifests_of,
)
from imagebuild.project import plan
from imagebuild.project.load import Project
from imagebuild.project.matrix import Attachment, Plan, Target
from imagebuild.project.plan import restricted_components, select_targets
from imagebuild.project.records import Published, PublishResult, VerifyResult
from imagebuild.publish import decide, evidence, provenance
from imagebuild.publish.decide import Choice, RegistryImage, Terms
from imagebuild.publish.evidence import Evidence
from imagebuild.render.renderer import Renderer
from imagebuild.verify.rules import IMAGE_CHECKS


def provenance_with(renderer: Renderer, *, allow_dirty: bool) -> Callable[[Target, Choice], bytes]:
    """What makes the provenance of an image from the results of its build, for several threads.

    It raises ResultError if the build was of another Dockerfile than this checkout renders, and ConfigError if
    something in it came from a folder of the builder, unless `allow_dirty`.
    """
    lock = threading.Lock()

    def make(target: Target, choice: Choice) -> bytes:
        # Equal images of several builds have one provenance: that of the first.
        build = min(choice.builds, key=lambda found: (found.value.started, str(found.path))).value
        with lock:
            recipe, text = renderer.recipe(target), renderer.dockerfile(target).text
        document = provenance.provenance_statement(build, choice.platform, recipe, renderer.project.lock, text)
        if (folders := provenance.unpinned(document)) and not allow_dirty:
            listed = ", ".join(folders)
            raise ConfigError(f"{listed} came from a folder that nobody can compare; build without --source")
        return provenance.encode_statement(document)

    return make


def signature_by(signer: provenance.Signer) -> Callable[[Iterable[ImageReference]], None]:
    """What signs images. Raises CommandError if cosign is missing: better now than when images are copied."""
    if not run.which("cosign"):
        raise CommandError(f"--sign: `cosign` is missing, which signs images; install it: {run.INSTALL_COSIGN}")
    return lambda images: provenance.sign_digest(images, signer)


CREATED = "org.opencontainers.image.created"
PRIVATE_FACTS = frozenset({"host"})
"""What a published verification does not tell about the place where it ran."""


@dataclass(frozen=True)
class NewAttachment:
    """Something that refers to an image."""

    kind: Attachment
    content: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def artifact_type(self) -> str:
        return KINDS[self.kind].artifact_type

    @property
    def files(self) -> tuple[AttachmentFile, ...]:
        return (AttachmentFile(KINDS[self.kind].file, KINDS[self.kind].media_type, self.content),)


def attachments(digest: str, platform: str, evidence: Evidence) -> list[NewAttachment]:
    """What the evidence has about an image, each once. The same evidence gives the same bytes, in the same order."""
    found = [*_files(digest, evidence)]
    reports = evidence.reported(digest)
    for report in reports:
        kept = tuple(published(verification, digest, platform) for verification in report.value.verifications)
        content = _json(report.value.model_copy(update={"verifications": kept}))
        found.append(NewAttachment("benchmark", content, {CREATED: report.value.about.created}))
    for verification in evidence.verified(digest):
        result = verification.value
        when = {CREATED: result.started} if result.started else {}
        found.append(NewAttachment("verification", _json(published(result, digest, platform)), when))
        # A report has them too, and says more about them.
        if not reports and (benchmark := _benchmark(result)):
            found.append(NewAttachment("benchmark", _json(benchmark), when))
    unique = {(artefact.kind, artefact.content): artefact for artefact in found}
    return [unique[key] for key in sorted(unique)]


def published(result: VerifyResult, digest: str, platform: str) -> VerifyResult:
    """A verification as everybody may read it: what was found, without what it says about the machine's environment."""
    place = result.surroundings
    if place:
        facts = {name: value for name, value in place.facts.items() if name not in PRIVATE_FACTS}
        place = place.model_copy(update={"environment": {}, "reports": {}, "user": "", "facts": facts})
    own = decide.of_platform(result, platform)
    checks = tuple(check.model_copy(update={"environment": {}, "command": (), "log": None}) for check in own)
    told = {"digest": digest, "platform": platform, "surroundings": place, "checks": checks}
    return result.model_copy(update=told)


def _files(digest: str, evidence: Evidence) -> Iterator[NewAttachment]:
    for sbom in evidence.listed(digest):
        yield NewAttachment("sbom", sbom.content)
    for scan in evidence.scanned(digest):
        yield NewAttachment("scan", scan.content, {CREATED: scan.value.started} if scan.value.started else {})


def _benchmark(result: VerifyResult) -> Results | None:
    parts = [check.results for check in result.checks if check.results]
    if not parts:
        return None
    return Results(**{name: tuple(x for part in parts for x in getattr(part, name)) for name in Results.model_fields})


def _json(model: VerifyResult | Results) -> bytes:
    document = model.model_dump(mode="json", exclude_defaults=True)
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class PublishTools:
    """What publishing a target needs from outside."""

    registry: Callable[[str], Registry]
    """Host → registry, always the same for a host."""
    provenance: Callable[[Target, Choice], bytes] | None = None
    """How the image of a platform was made. Raises ImagebuildError if that does not fit the build."""
    sign: Callable[[Iterable[ImageReference]], None] | None = None
    """Sign images, named by their digests. Raises ImagebuildError."""


@dataclass(frozen=True)
class Draft:
    """What would be done for a target, and why it may not be."""

    target: Target
    reasons: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    index: Manifest | None = None
    tags: tuple[ImageReference, ...] = ()
    aliases: tuple[ImageReference, ...] = ()
    named: Mapping[ImageReference, str | None] = field(default_factory=dict)
    """Tag or alias → digest that it names now."""
    artefacts: Mapping[Platform, Sequence[NewAttachment]] = field(default_factory=dict)

    @property
    def missing(self) -> list[ImageReference]:
        """Tags and aliases that do not name the index yet."""
        assert self.index
        return [name for name in (*self.tags, *self.aliases) if self.named[name] != self.index.digest]

    @property
    def platforms(self) -> dict[Platform, str]:
        return {choice.platform: choice.digest for choice in self.choices if choice.digest}


def draft(
    target: Target, platforms: Sequence[Platform], terms: Terms, tools: PublishTools, *, allow_dirty: bool = False
) -> Draft:
    """Look at the evidence and the registry; nothing is changed. Raises CommandError if the registry fails."""
    choices = tuple(decide.choose(target, platform, terms.evidence) for platform in platforms)
    images = {choice.platform: _look(choice, target, tools) for choice in choices if choice.digest}
    found = {platform: image for platform, image in images.items() if image}
    index = None
    if len(found) == len(platforms):
        index = decide.index({p: i.manifest for p, i in found.items()}, [i.labels for i in found.values()])
        members: dict[tuple[str, str], str] = {
            (index.digest, platform): image.manifest.digest for platform, image in found.items()
        }
        terms = replace(terms, evidence=replace(terms.evidence, indexes=members))
    reasons = [
        f"{choice.platform}: {reason}"
        for choice in choices
        for reason in decide.objections(target, choice, images.get(choice.platform), terms)
    ]
    revisions: dict[str, list[str | None]] = {
        c.platform: [build.value.revision for build in c.builds] for c in choices if c.builds
    }
    tags, why = decide.filled(target.tags, revisions, allow_dirty=allow_dirty)
    made = Draft(target, (*reasons, *([why] if why and revisions else [])), choices, index)
    if made.reasons or index is None:
        return made
    return _with_names(_with_artefacts(made, terms.evidence, tools), tags, tools, partial=set(platforms))


def _look(choice: Choice, target: Target, tools: PublishTools) -> RegistryImage | None:
    """The image of a choice, where it was pushed to or, if that was cleared since, where it was published."""
    for name in (choice.repository, *(tag.rpartition(":")[0] for tag in target.tags)):
        place = _place(parse_reference(name), tools)
        manifest = place.registry.manifest(place.repository, choice.digest)
        if manifest and (config := manifest.document.get("config")):
            return decide.image(manifest, place.registry.blob(place.repository, config["digest"]))
    return None


def _with_artefacts(made: Draft, evidence: Evidence, tools: PublishTools) -> Draft:
    artefacts: dict[Platform, list[NewAttachment]] = {}
    reasons = []
    for choice in made.choices:
        found = attachments(choice.digest, choice.platform, evidence)
        if tools.provenance:
            try:
                found.append(NewAttachment("provenance", tools.provenance(made.target, choice)))
            except ImagebuildError as error:
                reasons.append(f"{choice.platform}: provenance: {error}")
        artefacts[choice.platform] = found
    return replace(made, artefacts=artefacts, reasons=(*made.reasons, *reasons))


def _with_names(made: Draft, tags: Sequence[str], tools: PublishTools, *, partial: set[Platform]) -> Draft:
    assert made.index
    given, aliases = tuple(map(parse_reference, tags)), tuple(map(parse_reference, made.target.aliases))
    named = {name: _place(name, tools).registry.digest(name.repository, name.wanted) for name in (*given, *aliases)}
    own = made.index.digest
    taken = [tag for tag in given if named[tag] not in (None, own)]
    reasons = [*made.reasons, *(f"{tag} names {named[tag]} and never moves; this is {own}" for tag in taken)]
    lost = set(made.target.platforms) - partial
    for alias in aliases if lost else ():
        if named[alias] not in (None, own):
            there = _place(alias, tools).registry.manifest(alias.repository, str(named[alias]))
            has = {child.platform for child in registry.manifests_of(there.document)} if there else set()
            if gone := sorted(lost & has):
                reasons.append(f"{alias} would lose {', '.join(gone)}; publish all platforms")
    return replace(made, reasons=tuple(reasons), tags=given, aliases=aliases, named=named)


def publish_draft(made: Draft, tools: PublishTools, *, dry_run: bool = False) -> Published:
    """Do what a draft says. A registry that fails is a result too: nothing incomplete has a tag then.

    Raises CommandError if the registry fails before anything is done.
    """
    about = Published(
        target=made.target.id, state="refused", reasons=made.reasons, platforms=made.platforms,
        digest=made.index.digest if made.index else None,
    )  # fmt: skip
    if made.reasons or not made.index:
        return about
    places = list({name.name: _place(name, tools) for name in (*made.tags, *made.aliases)}.values())
    todo = [_todo(made, place, tools) for place in places]
    attached = Counter(artefact.kind for there in todo for _, artefact in there.attach)
    signed = sum(len(there.sign) for there in todo)
    kept = tuple(str(name) for name, digest in made.named.items() if digest == made.index.digest)
    about = about.model_copy(update={"kept": kept, "attached": dict(sorted(attached.items())), "signed": signed})
    changes = bool(made.missing or attached or signed)
    if dry_run or not changes:
        told = _told(made, made.missing) if dry_run else {}
        return about.model_copy(update={**told, "state": "possible" if changes else "unchanged"})
    traffic, names, problem = Traffic(), list[ImageReference](), ""
    try:
        for there in todo:
            traffic += _store(made, there, tools)
        for name in made.missing:
            _name(name, made, tools)
            names.append(name)
    except ImagebuildError as error:
        problem = str(error)
    traffic += Traffic(manifests=len(names), bytes=len(names) * len(made.index.content))
    told = {**_told(made, names), "sent_bytes": traffic.bytes, "mounted": traffic.mounted}
    if problem:
        return about.model_copy(update={**told, "state": "failed", "reasons": (problem,), "attached": {}, "signed": 0})
    return about.model_copy(update={**told, "state": "published"})


def _told(made: Draft, names: Iterable[ImageReference]) -> dict[str, object]:
    listed = list(names)
    return {
        "given": tuple(str(name) for name in listed if made.named[name] is None),
        "moved": {str(name): made.named[name] for name in listed if made.named[name] is not None},
    }


@dataclass(frozen=True)
class _Todo:
    """What a repository lacks besides images and tags."""

    place: RepositoryAt
    attach: Sequence[tuple[BlobDescriptor, NewAttachment]]
    sign: Sequence[ImageReference]


def _todo(made: Draft, place: RepositoryAt, tools: PublishTools) -> _Todo:
    assert made.index
    children = registry.manifests_of(made.index.document)
    attach, artefacts = [], []
    for child in children:
        there = place.registry.referrers(place.repository, child.digest)
        own = made.artefacts[_platform(made, child)]
        absent = [(child, artefact) for artefact in own if not _attached(child, artefact, there)]
        attach += absent
        artefacts += [_digest(child, a) for a in own if (child, a) in absent or _digest(child, a) in _digests(there)]
    digests = (*(child.digest for child in children), *artefacts, made.index.digest) if tools.sign else ()
    unsigned = [d for d in digests if made.missing or not place.registry.digest(place.repository, signature_tag(d))]
    return _Todo(place, attach, [ImageReference(place.registry.host, place.repository, digest=d) for d in unsigned])


def _attached(child: BlobDescriptor, artefact: NewAttachment, there: Iterable[BlobDescriptor]) -> bool:
    if artefact.kind == "provenance":
        # The same image built again was made as the first one was; when that was changes nothing.
        return any(item.artifact_type == artefact.artifact_type for item in there)
    return _digest(child, artefact) in _digests(there)


def _digest(child: BlobDescriptor, artefact: NewAttachment) -> str:
    return registry.digest_of(
        registry.attachment_manifest(child, artefact.artifact_type, artefact.files, artefact.annotations)
    )


def _digests(there: Iterable[BlobDescriptor]) -> set[str]:
    return {item.digest for item in there}


def signature_tag(digest: str) -> str:
    """Where cosign keeps the signature of an image."""
    return f"{digest.replace(':', '-')}.sig"


def _platform(made: Draft, child: BlobDescriptor) -> Platform:
    return next(choice.platform for choice in made.choices if choice.digest == child.digest)


def _store(made: Draft, todo: _Todo, tools: PublishTools) -> Traffic:
    """Everything but tags: images, the index, what is attached, signatures; and read back."""
    assert made.index
    registry, repository, traffic = todo.place.registry, todo.place.repository, Traffic()
    if registry.digest(repository, made.index.digest) is None:
        for choice in made.choices:
            traffic += copy_image(choice.digest, _place(parse_reference(choice.repository), tools), todo.place)
        registry.put_manifest(repository, made.index.digest, made.index.content, made.index.media_type)
        traffic += Traffic(manifests=1, bytes=len(made.index.content))
    for child, artefact in todo.attach:
        registry.attach(repository, child, artefact.artifact_type, artefact.files, artefact.annotations)
        traffic += Traffic(manifests=1, bytes=len(artefact.content))
    _complete(todo.place, made.index)
    if tools.sign and todo.sign:
        tools.sign(todo.sign)
    return traffic


def _complete(place: RepositoryAt, index: Manifest) -> None:
    """Raise CommandError unless the registry has the index, its images and their blobs."""
    registry, repository = place.registry, place.repository
    children = manifests_of(index.document)
    manifests = [registry.manifest(repository, digest) for digest in (index.digest, *(c.digest for c in children))]
    if lost := [d for d, m in zip((index.digest, *(c.digest for c in children)), manifests, strict=True) if not m]:
        raise CommandError(f"{place}: took {lost[0]}, but does not have it; no tag was given, so publish again")
    blobs = {blob.digest for manifest in manifests if manifest for blob in blobs_of(manifest.document)}
    there = for_each(lambda digest: registry.has_blob(repository, digest), blobs, registry)
    if lost := [digest for digest, has in zip(blobs, there, strict=True) if not has]:
        raise CommandError(f"{place}: lost blob {lost[0]}; no tag was given; publish again once it is pushed again")


def _name(name: ImageReference, made: Draft, tools: PublishTools) -> None:
    """Let a tag or an alias name the index. Raises CommandError if another publisher's digest is there."""
    assert made.index
    registry = _place(name, tools).registry
    before = registry.digest(name.repository, name.wanted)
    fixed = name in made.tags
    if before not in ((None, made.index.digest) if fixed else (made.named[name], made.index.digest)):
        raise _overtaken(name, made.index.digest, before)
    after = registry.put_manifest(name.repository, name.wanted, made.index.content, made.index.media_type)
    if after != made.index.digest:
        raise _overtaken(name, made.index.digest, after)


def recheck(made: Draft, tools: PublishTools) -> None:
    """Raise CommandError if another publisher moved what was just named."""
    assert made.index
    for name in made.missing:
        now = _place(name, tools).registry.digest(name.repository, name.wanted)
        if now != made.index.digest:
            raise _overtaken(name, made.index.digest, now)


def _overtaken(name: ImageReference, ours: str, theirs: str | None) -> CommandError:
    return CommandError(
        f"{name}: another publisher made it {theirs or 'vanish'} while this one was about to give it to {ours}; "
        "find out which is right, and let one publish at a time"
    )


def _place(name: ImageReference, tools: PublishTools) -> RepositoryAt:
    return RepositoryAt(tools.registry(name.host), name.repository)


JOBS = 4
"""Targets at a time."""
MARKS = {
    "published": "[green]✓ published[/]", "unchanged": "[green]✓ unchanged[/]", "possible": "[yellow]- possible[/]",
    "refused": "[red]✗ refused[/]", "failed": "[red]✗ failed[/]",
}  # fmt: skip


@dataclass(frozen=True)
class PublishRequest:
    """What `publish` was asked for."""

    select: Sequence[str]
    """Targets; without any, those that the folders have a build of."""
    folders: Sequence[Path]
    platforms: Sequence[Platform] = ()
    """Instead of all that a target is for."""
    jobs: int = JOBS
    allow_dirty: bool = False
    dry_run: bool = False


def publish_targets(project: Project, plan: Plan, wish: PublishRequest, tools: PublishTools) -> PublishResult:
    """Publish targets, each whatever becomes of the others.

    Raises ConfigError, NothingSelected or ResultError for what keeps it from beginning.
    """
    found = evidence.gather(wish.folders)
    targets = chosen(plan, wish, found)
    registries = [tools.registry(host) for host in _hosts(targets, found)]

    def one(target: Target) -> tuple[Draft | None, Published]:
        platforms = tuple(p for p in target.platforms if not wish.platforms or p in wish.platforms)
        terms = Terms(
            found, project.matrix.model.publish, decide.rules(project, target, IMAGE_CHECKS),
            made=frozenset({"provenance"}) if tools.provenance else frozenset(),
        )  # fmt: skip
        try:
            made = draft(target, platforms, terms, tools, allow_dirty=wish.allow_dirty)
            return made, publish_draft(made, tools, dry_run=wish.dry_run)
        except ImagebuildError as error:
            return None, Published(target=target.id, state="failed", reasons=(str(error),))

    def checked(made: Draft | None, done: Published) -> Published:
        if made is None or done.state != "published":
            return done
        try:
            recheck(made, tools)
        except CommandError as error:
            return done.model_copy(update={"state": "failed", "reasons": (str(error),)})
        return done

    published = for_each(one, targets, *registries, jobs=wish.jobs)
    return PublishResult(
        targets=tuple(for_each(lambda pair: checked(*pair), published, *registries, jobs=wish.jobs)),
        ignored=len(found.ignored),
        unnamed=tuple(str(v.path) for v in found.verifications if not v.value.digest),
    )


def _hosts(targets: Iterable[Target], found: Evidence) -> list[str]:
    names = [name.replace(plan.REVISION, "0") for target in targets for name in (*target.tags, *target.aliases)]
    staged = [build.value.repository for build in found.builds if build.value.repository]
    return sorted({parse_reference(name).host for name in (*names, *staged)})


def chosen(plan: Plan, wish: PublishRequest, found: Evidence) -> tuple[Target, ...]:
    """The targets to publish. Raises NothingSelected, ConfigError for a platform that one of them is not for."""
    targets = select_targets(plan, wish.select)
    if not wish.select:
        built = {build.value.target for build in found.builds}
        targets = tuple(target for target in targets if target.id in built)
        if not targets:
            where = ", ".join(map(str, wish.folders))
            raise NothingSelected(f"--results {where}: no result.json of a target of the plan is there")
    for target in targets:
        if wanted := [platform for platform in wish.platforms if platform not in target.platforms]:
            raise ConfigError(f"--platform {wanted[0]}: {target.id} is for {', '.join(target.platforms)}")
    return targets


def print_published(result: PublishResult, plan: Plan) -> None:
    """Print what became of each target, how many there are of each, and what who publishes them accepts."""
    for target in result.targets:
        out.print(f"{MARKS[target.state]} {target.target} {target.digest or ''}".rstrip())
        for line in _lines(target):
            out.print(f"    {line}", markup=False)
    states = Counter(target.state for target in result.targets)
    sent = sum(target.sent_bytes for target in result.targets)
    mounted = sum(target.mounted for target in result.targets)
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    out.print(f"{counts}; {console.format_size(sent)} sent, {mounted} blobs taken from staging")
    public = {target.target for target in result.targets if target.state not in ("refused", "failed")}
    for name, text in restricted_components(plan, [t for t in plan.targets if t.id in public]).items():
        err.print(f"restricted: {name}: {text}", markup=False)
    if result.requests:
        asked = ", ".join(f"{number} {method}" for method, number in result.requests.items() if method.isupper())
        moved = " and ".join(f"{console.format_size(result.requests.get(k, 0))} {k}" for k in ("sent", "received"))
        err.print(f"requests: {asked}; bodies: {moved}")
    for path in result.unnamed:
        err.print(f"{path}: counts for nothing, as it names no digest; verify the image as NAME@DIGEST", markup=False)
    if result.ignored:
        err.print(f"{result.ignored} other JSON files were ignored")


def _lines(target: Published) -> Iterable[str]:
    would = target.state == "possible"
    yield from target.reasons
    yield from (f"{'would be given' if would else 'given'}  {name}" for name in target.given)
    yield from (f"kept   {name}" for name in target.kept)
    for name, before in target.moved.items():
        yield f"{'would move' if would else 'moved'}  {name}: {before} → {target.digest}"
    if target.attached:
        listed = ", ".join(f"{number} {kind}" for kind, number in target.attached.items())
        yield f"{'would attach' if would else 'attached'}  {listed}"
