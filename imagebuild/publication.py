"""One target in a registry: look at everything, and only then copy, attach, and give tags last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from imagebuild.errors import CommandError, ImagebuildError
from imagebuild.fields import Platform
from imagebuild.models import Target
from imagebuild.publishing import assemble, attaching, decide
from imagebuild.publishing import tags as tagging
from imagebuild.publishing.attaching import Artefact
from imagebuild.publishing.decide import Choice, Image, Terms
from imagebuild.publishing.evidence import Evidence
from imagebuild.publishing.result import Published
from imagebuild.registry import copy, documents
from imagebuild.registry.base import Descriptor, Manifest, Registry, Traffic
from imagebuild.registry.copy import Place
from imagebuild.registry.parallel import each
from imagebuild.registry.reference import Reference, parse


@dataclass(frozen=True)
class Tools:
    """What publishing a target needs from outside."""

    registry: Callable[[str], Registry]
    """Host → registry, always the same for a host."""
    provenance: Callable[[Target, Choice], bytes] | None = None
    """How the image of a platform was made. Raises ImagebuildError if that does not fit the build."""
    sign: Callable[[Iterable[Reference]], None] | None = None
    """Sign images, named by their digests. Raises ImagebuildError."""


@dataclass(frozen=True)
class Draft:
    """What would be done for a target, and why it may not be."""

    target: Target
    reasons: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    index: Manifest | None = None
    tags: tuple[Reference, ...] = ()
    aliases: tuple[Reference, ...] = ()
    named: Mapping[Reference, str | None] = field(default_factory=dict)
    """Tag or alias → digest that it names now."""
    artefacts: Mapping[Platform, Sequence[Artefact]] = field(default_factory=dict)

    @property
    def missing(self) -> list[Reference]:
        """Tags and aliases that do not name the index yet."""
        assert self.index
        return [name for name in (*self.tags, *self.aliases) if self.named[name] != self.index.digest]

    @property
    def platforms(self) -> dict[Platform, str]:
        return {choice.platform: choice.digest for choice in self.choices if choice.digest}


def draft(
    target: Target, platforms: Sequence[Platform], terms: Terms, tools: Tools, *, allow_dirty: bool = False
) -> Draft:
    """Look at the evidence and the registry; nothing is changed. Raises CommandError if the registry fails."""
    choices = tuple(decide.choose(target, platform, terms.evidence) for platform in platforms)
    images = {choice.platform: _look(choice, target, tools) for choice in choices if choice.digest}
    found = {platform: image for platform, image in images.items() if image}
    index = None
    if len(found) == len(platforms):
        index = assemble.index({p: i.manifest for p, i in found.items()}, [i.labels for i in found.values()])
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
    tags, why = tagging.filled(target.tags, revisions, allow_dirty=allow_dirty)
    made = Draft(target, (*reasons, *([why] if why and revisions else [])), choices, index)
    if made.reasons or index is None:
        return made
    return _with_names(_with_artefacts(made, terms.evidence, tools), tags, tools, partial=set(platforms))


def _look(choice: Choice, target: Target, tools: Tools) -> Image | None:
    """The image of a choice, where it was pushed to or, if that was cleared since, where it was published."""
    for name in (choice.repository, *(tag.rpartition(":")[0] for tag in target.tags)):
        place = _place(parse(name), tools)
        manifest = place.registry.manifest(place.repository, choice.digest)
        if manifest and (config := manifest.document.get("config")):
            return assemble.image(manifest, place.registry.blob(place.repository, config["digest"]))
    return None


def _with_artefacts(made: Draft, evidence: Evidence, tools: Tools) -> Draft:
    artefacts: dict[Platform, list[Artefact]] = {}
    reasons = []
    for choice in made.choices:
        found = attaching.artefacts(choice.digest, choice.platform, evidence)
        if tools.provenance:
            try:
                found.append(Artefact("provenance", tools.provenance(made.target, choice)))
            except ImagebuildError as error:
                reasons.append(f"{choice.platform}: provenance: {error}")
        artefacts[choice.platform] = found
    return replace(made, artefacts=artefacts, reasons=(*made.reasons, *reasons))


def _with_names(made: Draft, tags: Sequence[str], tools: Tools, *, partial: set[Platform]) -> Draft:
    assert made.index
    given, aliases = tuple(map(parse, tags)), tuple(map(parse, made.target.aliases))
    named = {name: _place(name, tools).registry.digest(name.repository, name.wanted) for name in (*given, *aliases)}
    own = made.index.digest
    taken = [tag for tag in given if named[tag] not in (None, own)]
    reasons = [*made.reasons, *(f"{tag} names {named[tag]} and never moves; this is {own}" for tag in taken)]
    lost = set(made.target.platforms) - partial
    for alias in aliases if lost else ():
        if named[alias] not in (None, own):
            there = _place(alias, tools).registry.manifest(alias.repository, str(named[alias]))
            has = {child.platform for child in documents.children(there.document)} if there else set()
            if gone := sorted(lost & has):
                reasons.append(f"{alias} would lose {', '.join(gone)}; publish all platforms")
    return replace(made, reasons=tuple(reasons), tags=given, aliases=aliases, named=named)


def publish(made: Draft, tools: Tools, *, dry_run: bool = False) -> Published:
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
    traffic, names, problem = Traffic(), list[Reference](), ""
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


def _told(made: Draft, names: Iterable[Reference]) -> dict[str, object]:
    listed = list(names)
    return {
        "given": tuple(str(name) for name in listed if made.named[name] is None),
        "moved": {str(name): made.named[name] for name in listed if made.named[name] is not None},
    }


@dataclass(frozen=True)
class _Todo:
    """What a repository lacks besides images and tags."""

    place: Place
    attach: Sequence[tuple[Descriptor, Artefact]]
    sign: Sequence[Reference]


def _todo(made: Draft, place: Place, tools: Tools) -> _Todo:
    assert made.index
    children = documents.children(made.index.document)
    attach, artefacts = [], []
    for child in children:
        there = place.registry.referrers(place.repository, child.digest)
        own = made.artefacts[_platform(made, child)]
        absent = [(child, artefact) for artefact in own if not _attached(child, artefact, there)]
        attach += absent
        artefacts += [_digest(child, a) for a in own if (child, a) in absent or _digest(child, a) in _digests(there)]
    digests = (*(child.digest for child in children), *artefacts, made.index.digest) if tools.sign else ()
    unsigned = [d for d in digests if made.missing or not place.registry.digest(place.repository, signature_tag(d))]
    return _Todo(place, attach, [Reference(place.registry.host, place.repository, digest=d) for d in unsigned])


def _attached(child: Descriptor, artefact: Artefact, there: Iterable[Descriptor]) -> bool:
    if artefact.kind == "provenance":
        # The same image built again was made as the first one was; when that was changes nothing.
        return any(item.artifact_type == artefact.artifact_type for item in there)
    return _digest(child, artefact) in _digests(there)


def _digest(child: Descriptor, artefact: Artefact) -> str:
    return documents.digest_of(
        documents.attachment(child, artefact.artifact_type, artefact.files, artefact.annotations)
    )


def _digests(there: Iterable[Descriptor]) -> set[str]:
    return {item.digest for item in there}


def signature_tag(digest: str) -> str:
    """Where cosign keeps the signature of an image."""
    return f"{digest.replace(':', '-')}.sig"


def _platform(made: Draft, child: Descriptor) -> Platform:
    return next(choice.platform for choice in made.choices if choice.digest == child.digest)


def _store(made: Draft, todo: _Todo, tools: Tools) -> Traffic:
    """Everything but tags: images, the index, what is attached, signatures; and read back."""
    assert made.index
    registry, repository, traffic = todo.place.registry, todo.place.repository, Traffic()
    if registry.digest(repository, made.index.digest) is None:
        for choice in made.choices:
            traffic += copy.copy(choice.digest, _place(parse(choice.repository), tools), todo.place)
        registry.put_manifest(repository, made.index.digest, made.index.content, made.index.media_type)
        traffic += Traffic(manifests=1, bytes=len(made.index.content))
    for child, artefact in todo.attach:
        registry.attach(repository, child, artefact.artifact_type, artefact.files, artefact.annotations)
        traffic += Traffic(manifests=1, bytes=len(artefact.content))
    _complete(todo.place, made.index)
    if tools.sign and todo.sign:
        tools.sign(todo.sign)
    return traffic


def _complete(place: Place, index: Manifest) -> None:
    """Raise CommandError unless the registry has the index, its images and their blobs."""
    registry, repository = place.registry, place.repository
    children = documents.children(index.document)
    manifests = [registry.manifest(repository, digest) for digest in (index.digest, *(c.digest for c in children))]
    if lost := [d for d, m in zip((index.digest, *(c.digest for c in children)), manifests, strict=True) if not m]:
        raise CommandError(f"{place}: took {lost[0]}, but does not have it; no tag was given, so publish again")
    blobs = {blob.digest for manifest in manifests if manifest for blob in documents.blobs(manifest.document)}
    there = each(lambda digest: registry.has_blob(repository, digest), blobs, registry)
    if lost := [digest for digest, has in zip(blobs, there, strict=True) if not has]:
        raise CommandError(f"{place}: lost blob {lost[0]}; no tag was given; publish again once it is pushed again")


def _name(name: Reference, made: Draft, tools: Tools) -> None:
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


def recheck(made: Draft, tools: Tools) -> None:
    """Raise CommandError if another publisher moved what was just named."""
    assert made.index
    for name in made.missing:
        now = _place(name, tools).registry.digest(name.repository, name.wanted)
        if now != made.index.digest:
            raise _overtaken(name, made.index.digest, now)


def _overtaken(name: Reference, ours: str, theirs: str | None) -> CommandError:
    return CommandError(
        f"{name}: another publisher made it {theirs or 'vanish'} while this one was about to give it to {ours}; "
        "find out which is right, and let one publish at a time"
    )


def _place(name: Reference, tools: Tools) -> Place:
    return Place(tools.registry(name.host), name.repository)
