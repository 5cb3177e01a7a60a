"""Define the types of sources and of `imagebuild.lock`, and look up pins. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date as Day  # noqa: N812 - the lock has a field `date`
from difflib import get_close_matches
from typing import Annotated, Any, Literal, cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import Field, PrivateAttr

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Arch, Commit, Digest, Form, Model, Name, Platform

Sha256 = Annotated[str, Form("[0-9a-f]{64}", "a sha256 of 64 digits (0-9, a-f)")]
Fingerprint = Annotated[str, Form("[0-9A-F]{40}", "the fingerprint of a key: 40 digits (0-9, A-F)")]
Unresolved = Literal["unresolved"]
UNRESOLVED: Unresolved = "unresolved"
"""A pin that is needed and that upstream could not be asked for yet. It is rendered as it is, and stops a build."""
UNREAD = "its hash is known, what it says of itself is not"
"""What is wrong with an entry without facts where facts are needed; it stops a build, too."""


class Wheel(Model):
    """Describe a wheel of the Python package index, pinned by content for each architecture."""

    name: str
    version: str
    sha256: dict[Arch, Sha256]


class TreeFacts(Model):
    """Describe what an unpacked archive says about itself. Folders and files are relative to its top folder."""

    environment: dict[str, str]
    """All that its own script sets, for a tree that lies where images have it."""
    absent: tuple[str, ...] = ()
    """Paths below the tree that the environment names, but the archive does not have."""
    folders: tuple[str, ...] = ()
    """Its folders, one level deep."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Part → version, of its file VERSION and its pkg-config files."""
    sources: tuple[str, ...] = ()
    """Archives of sources in it."""
    licenses: tuple[str, ...] = ()
    """Files with licences."""
    plugins: tuple[tuple[str, str], ...] = ()
    """Folder and name of each network plug-in of NCCL, in the order in which its LD_LIBRARY_PATH has the folders."""
    unprovided: tuple[str, ...] = ()
    """Libraries that its files need and that it does not contain."""
    built_in: tuple[str, ...] = ()
    """Folders of the machine where it was built, which its text files still name."""


class LockedArchive(Model):
    """Describe a pinned archive that was unpacked to be read."""

    sha256: Sha256
    size: int | None = None
    """Bytes to download."""
    facts: TreeFacts | None = None


class ImageFacts(Model):
    """Describe what the configuration of an image says."""

    environment: dict[str, str] = Field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Packages that it keeps from being upgraded."""
    nccl: str = ""
    """Version of the package of NCCL in it; empty if it has none."""


class LockedImage(Model):
    """Describe a pinned image of a registry."""

    digest: Digest
    """Of the index of all platforms, or of the manifest if there is only one."""
    platforms: dict[Platform, Digest] = Field(default_factory=dict)
    facts: dict[Platform, ImageFacts] | None = None


class LockedRepository(Model):
    """Describe a signed repository of packages, as it was when locked."""

    fingerprint: Fingerprint
    """Of the key that signed it."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Package → exact version, of the packages that are used. A package that is asked for with its version
    (`name=version`) stands here as it is asked for: it was there, and another target may ask for another version."""
    candidates: dict[str, tuple[str, ...]] | None = None
    """Package → all versions that the repository had of it, oldest first."""


class Lock(Model):
    """Describe the file `imagebuild.lock`: sources pinned by content."""

    archives: dict[str, LockedArchive | Sha256 | Unresolved] = Field(default_factory=dict)
    """Address → sha256, with facts if the component asks for them."""
    git: dict[str, dict[str, Commit | Unresolved]] = Field(default_factory=dict)
    """Address → tag → commit."""
    images: dict[str, LockedImage | Unresolved] = Field(default_factory=dict)
    """Image with tag → digests."""
    repositories: dict[str, LockedRepository | Unresolved] = Field(default_factory=dict)
    """Address of a repository of packages → key and versions."""
    wheels: dict[Name, dict[str, tuple[Wheel, ...] | Unresolved]] = Field(default_factory=dict)
    """Component → version → wheels."""
    date: Day | None = None
    """When it was first written, or what `lock --date` says: no file of an image is younger. It moves only when told
    to, because the layers of all images change with it."""
    _place: str = PrivateAttr("imagebuild.lock:1")  # as `load_project` says

    @property
    def place(self) -> str:
        """Return `file:line` for messages about what the lock lacks, or that there is no such file."""
        return self._place


TABLES = ("archives", "git", "images", "repositories", "wheels")
"""Fields of a lock that have entries."""


def layered_lock(own: Lock, base: Lock) -> Lock:
    """Return the entries of a lock and, where it has none or an unresolved one, those of the project it extends."""

    def layered(over: Mapping[str, Any], under: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(under)
        for key, entry in over.items():
            if isinstance(entry, dict):
                result[key] = layered(entry, under.get(key, {}))
            elif entry != UNRESOLVED or key not in under:
                result[key] = entry
        return result

    update: dict[str, Any] = {name: layered(getattr(own, name), getattr(base, name)) for name in TABLES}
    return own.model_copy(update=update | {"date": own.date or base.date})


class ArchiveTree(Model):
    """Say how an unpacked archive is read."""

    prefix: str
    """Where images have it."""
    script: str
    """Shell lines that set its environment, for bash in its top folder."""
    needs: tuple[str, ...] = ()
    """Shell patterns of files and folders without which no image can be built from it."""


@dataclass(frozen=True)
class BaseImage:
    """Describe an image of a registry."""

    reference: str
    """With a tag, as in FROM."""
    facts: bool = field(default=False, compare=False)
    """Whether the lock is to have what its configuration says."""


@dataclass(frozen=True)
class Archive:
    """Describe a file that a component is unpacked from."""

    component: str
    url: str
    tree: ArchiveTree | None = None
    """How to read it, if the lock is to have facts of it."""


@dataclass(frozen=True)
class GitRef:
    """Describe a tag or a commit of a git repository."""

    url: str
    tag: str
    commit: str | None = None
    """Given in the matrix or on the command line; else the lock has it."""


@dataclass(frozen=True)
class WheelSet:
    """Describe wheels of the Python package index."""

    component: str
    version: str
    requirements: tuple[str, ...]
    """As pip takes them."""


@dataclass(frozen=True)
class PackageSource:
    """Describe a signed repository of packages."""

    url: str
    suite: str
    key: str
    """Address of the key, or `package:NAME`."""
    packages: tuple[str, ...]
    """Names, some with `=version`."""


Source = BaseImage | Archive | GitRef | WheelSet | PackageSource


def source_title(source: Source) -> str:
    """Return a source in one line."""
    return describe_key(key_of(source))


def entry_of(lock: Lock, source: Source) -> Any:
    """Return what the lock has for a source. Raises ConfigError if it has nothing; so do the functions below."""
    if isinstance(source, GitRef) and source.commit:
        return source.commit
    table, *keys = key_of(source)
    entry: Any = getattr(lock, table)
    for key in keys:
        entry = entry.get(key) if entry else None
    if entry is None:
        known = getattr(lock, table) if table == "images" else getattr(lock, table).get(keys[0], ())
        cutoff = 0.6 if table == "images" else 0.0
        near = get_close_matches(keys[-1], known if table in ("git", "images", "wheels") else (), n=5, cutoff=cutoff)
        instead = f", but {', '.join(near)}" if near else ""
        raise ConfigError(
            f"{lock.place}: has no {source_title(source)}{instead}; add it with `imagebuild lock` "
            "(and the same --set, --with)"
        )
    return entry


def absent_sources(lock: Lock, sources: Iterable[Source]) -> list[str]:
    """Return a line for each source that the lock does not have at all."""
    lines = []
    for source in sources:
        try:
            entry_of(lock, source)
        except ConfigError as error:
            lines.append(str(error))
    return list(dict.fromkeys(lines))


def locked_image(lock: Lock, reference: str) -> LockedImage | Unresolved:
    """Return what the lock has for an image."""
    return cast(LockedImage | Unresolved, entry_of(lock, BaseImage(reference)))


def digest_of(lock: Lock, reference: str) -> str:
    """Return `image:tag@digest`; an unresolved digest is `sha256:unresolved`, which any builder refuses.

    Only an image of the command line may have no digest.
    """
    image = locked_image(lock, reference)
    digest = image.digest if isinstance(image, LockedImage) else f"sha256:{UNRESOLVED}"
    return f"{reference}@{digest}" if digest else reference


def hash_of(lock: Lock, component: str, url: str) -> str:
    """Return the sha256 of an archive, or `unresolved`, which any builder refuses."""
    entry = entry_of(lock, Archive(component, url))
    return entry.sha256 if isinstance(entry, LockedArchive) else str(entry)


def facts_of(lock: Lock, url: str) -> TreeFacts | None:
    """Return what the lock knows of an archive; None if it knows none or is without facts."""
    entry = lock.archives.get(url)
    return entry.facts if isinstance(entry, LockedArchive) else None


def image_facts_of(lock: Lock, reference: str) -> Mapping[Platform, ImageFacts]:
    """Return platform → what the lock knows of an image; nothing if it is without facts."""
    entry = lock.images.get(reference)
    return (isinstance(entry, LockedImage) and entry.facts) or {}


def commit_of(lock: Lock, git: GitRef) -> str:
    """Return the commit of a source in git, or `unresolved`."""
    return str(entry_of(lock, git))


def wheels_of(lock: Lock, wheels: WheelSet) -> tuple[Wheel, ...]:
    """Return wheels with their hashes; none if they are unresolved, which pip refuses."""
    entry = entry_of(lock, wheels)
    return entry if isinstance(entry, tuple) else ()


def repository_of(lock: Lock, url: str) -> LockedRepository | Unresolved:
    """Return the key and the versions of a repository of packages."""
    return cast(LockedRepository | Unresolved, entry_of(lock, PackageSource(url, "", "", ())))


def pinned_text(lock: Lock, source: Source) -> str:
    """Return a source and its pin as text. Raises ConfigError if the lock lacks the source."""
    pin = entry_of(lock, source)
    if isinstance(source, BaseImage):
        pin = digest_of(lock, source.reference)
    elif isinstance(source, WheelSet):
        pin = [sorted(wheel.sha256.values()) for wheel in wheels_of(lock, source)]
    elif isinstance(pin, LockedArchive):
        pin = (pin.sha256, pin.facts and sorted(pin.facts.environment.items()))
    elif isinstance(pin, LockedRepository):
        pin = (pin.fingerprint, sorted(pin.packages.items()))
    return f"{source_title(source)} {pin}"


def what_entry_lacks(source: Source, entry: Entry | None) -> str:
    """Return what an entry lacks for its source: UNRESOLVED, UNREAD or another phrase; empty if it lacks nothing.

    Raises ConfigError for a requirement of a wheel that cannot be read.
    """
    if entry is None:
        return "not in the lock"
    if entry == UNRESOLVED:
        return UNRESOLVED
    match source, entry:
        case (Archive(tree=ArchiveTree()), str() | LockedArchive(facts=None)) | (
            BaseImage(facts=True),
            LockedImage(facts=None),
        ):
            return UNREAD
        case PackageSource(packages=packages), LockedRepository():
            absent = [package for package in packages if package not in entry.packages]
            problem = UNRESOLVED if UNRESOLVED in map(entry.packages.get, packages) else ""
            return f"the lock has no version of {', '.join(absent)}" if absent else problem
        case WheelSet(requirements=requirements), tuple():
            versions = {canonicalize_name(wheel.name): wheel.version for wheel in entry}
            try:
                wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, requirements)}
            except InvalidRequirement as error:
                raise ConfigError(f"wheels: {error}") from None
            if wanted.keys() != versions.keys() or not all(
                specifier.contains(versions[name], prereleases=True) for name, specifier in wanted.items()
            ):
                return f"the lock has other wheels than {', '.join(requirements)}"
    return ""


def is_unresolved(lock: Lock, source: Source) -> bool:
    """Return whether a source has no pin yet, or a package of it has none, or facts that are needed are missing.

    Raises ConfigError if the lock lacks it.
    """
    return what_entry_lacks(source, entry_of(lock, source)) in (UNRESOLVED, UNREAD)


def with_unresolved(lock: Lock, sources: Iterable[Source]) -> Lock:
    """Return the lock with `unresolved` for every source that it lacks: enough to render, not to build."""
    entries: dict[str, Any] = {
        name: {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in getattr(lock, name).items()}
        for name in TABLES
    }
    for source in sources:
        if isinstance(source, GitRef) and source.commit:
            continue
        *folders, name = key_of(source)
        table = entries
        for folder in folders:
            table = table.setdefault(folder, {})
        table.setdefault(name, UNRESOLVED)
    return lock.model_copy(update=entries)


def check_resolved(lock: Lock, sources: Iterable[Source], command: str = "imagebuild lock") -> None:
    """Raise ConfigError that lists the sources without a pin, which `command` pins: nothing is built from them."""
    needed = list(sources)
    missing = {key_of(source): source for source in needed if is_unresolved(lock, source)}
    if missing:
        archives = sum(isinstance(source, Archive) for source in missing.values())
        number = len({*map(key_of, needed)})
        downloads = f"; it downloads {archives} of them, to hash and read" if archives else ""
        problems = {key: what_entry_lacks(source, entry_of(lock, source)) for key, source in missing.items()}
        listed = "\n".join(
            f"  {describe_key(k)}{f' ({what})' if what == UNREAD else ''}" for k, what in problems.items()
        )
        raise ConfigError(
            f"{lock.place}: {len(missing)} of {number} sources have no pin, so nothing would verify them; run "
            f"`{command}` where they can be reached{downloads}:\n{listed}"
        )


Key = tuple[str, ...]
"""Place of an entry in the lock, for example `("git", address, tag)`."""
Entry = str | LockedArchive | LockedImage | LockedRepository | tuple[Wheel, ...]
"""What the lock has for a source: a hash, a commit, an image, … or `unresolved`."""
Table = dict[Key, Entry]


def key_of(source: Source) -> Key:
    """Return the key of a source's entry in the lock."""
    match source:
        case Archive(url=url):
            return ("archives", url)
        case GitRef(url, tag, _):
            return ("git", url, tag)
        case BaseImage(reference):
            return ("images", reference)
        case WheelSet(component, version, _):
            return ("wheels", component, version)
        case PackageSource(url):
            return ("repositories", url)


def describe_key(key: Key) -> str:
    """Return an entry's key in one line."""
    kind, *names = key
    words = {"archives": "archive", "images": "image", "repositories": "packages"}
    return " ".join((words.get(kind, kind), *names))
