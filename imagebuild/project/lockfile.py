"""Define the types of sources and of `imagebuild.lock`, look up pins, and say what images take of archives. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Day  # noqa: N812 - the lock has a field `date`
from fnmatch import fnmatchcase
from typing import Annotated, cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import Field

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Arch, Commit, Digest, Form, Model, Name, Platform

Sha256 = Annotated[str, Form("[0-9a-f]{64}", "a sha256 of 64 digits (0-9, a-f)")]
Fingerprint = Annotated[str, Form("[0-9A-F]{40}", "the fingerprint of a key: 40 digits (0-9, A-F)")]
UNRESOLVED = "unresolved"
"""Stands in a Dockerfile for a pin that the lock does not have: every builder refuses it."""
UNREAD = "its hash is known, what it says of itself is not"
"""What the lock lacks of an entry without facts where facts are needed."""


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


REPLACED_HAS = ("bin", "include", "lib", "lib/pkgconfig")
"""What a folder has that replaces one of an archive; nothing else in it gets into the environment."""


class Unpacked(Model):
    """Say how an unpacked archive is read, and which part of its script's environment an image gets."""

    prefix: str
    """Where images have it."""
    script: str
    """Shell lines that set its environment, for bash in its top folder."""
    needs: tuple[str, ...] = ()
    """Shell patterns of files and folders without which no image can be built from it."""
    replaced: dict[Name, tuple[str, ...]] = Field(default_factory=dict)
    """Folder of the image that another component fills → folders of the archive that it takes the place of, or shell
    patterns of them."""
    removed: tuple[str, ...] = ()
    """Shell patterns of folders of the archive that the image does not have."""
    left_out: tuple[str, ...] = ()
    """Shell patterns of variables that no image has."""
    devel: tuple[str, ...] = ()
    """Variables that only the `devel` variant has."""
    order: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """List of folders → shell patterns of folders below `prefix`, which images have in this order. A name that is no
    pattern is added where the script leaves it out."""

    def environment(self, facts: Mapping[Arch, TreeFacts]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return what an image for these architectures takes of the environment, and a line for each difference.

        Raises ConfigError if the archives of two architectures set a variable differently.
        """
        taken: dict[str, dict[str, str]] = {}
        notes: list[str] = []
        depth = len(self.prefix.split("/")) + 1
        for arch, tree in facts.items():
            taken[arch] = {}
            notes += [f"text files name {folder}, which is {self.prefix} in images" for folder in tree.built_in]
            if plugins := [f"{name} in {folder}" for folder, name in tree.plugins]:
                notes.append(f"NCCL's network plug-ins, of which it loads the first: {', '.join(plugins)}")
            left_out = [n for n in tree.environment if any(fnmatchcase(n, pattern) for pattern in self.left_out)]
            notes += [f"{', '.join(left_out)}: no image has these"] if left_out else []
            for name, value in {**dict.fromkeys(self.order, ""), **tree.environment}.items():
                if name in left_out:
                    continue
                parts = [(part, self._place(part, tree)) for part in value.split(":") if part]
                notes += [f"{name}: {part} is not in the image" for part, place in parts if place is None]
                moved = [(part.split("/"), place.split("/")) for part, place in parts if place and place != part]
                notes += [f"{'/'.join(a[:depth])} is {'/'.join(b[:depth])} in images" for a, b in moved]
                kept = list(dict.fromkeys(place for _, place in parts if place))
                ordered = self._ordered(name, kept)
                if ordered != kept:
                    notes.append(f"{name}: images have {', '.join(self.order[name])} in this order, unlike the script")
                if ordered:
                    taken[arch][name] = ":".join(ordered)
        return common_environment(taken, notes)

    def libraries(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Return the archive's own folders among those where the loader shall look, in their order."""
        own = [part for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part.startswith(f"{self.prefix}/")]
        return tuple(part for part in own if part.removeprefix(f"{self.prefix}/").split("/")[0] not in self.replaced)

    def _ordered(self, name: str, folders: Sequence[str]) -> list[str]:
        """Return a list of folders in which those of `order` have its order; all others stay where they are."""
        wanted: list[str] = []
        for pattern in self.order.get(name, ()):
            matching = [folder for folder in folders if fnmatchcase(folder, f"{self.prefix}/{pattern}")]
            wanted += matching or ([] if "*" in pattern else [f"{self.prefix}/{pattern}"])
        rest = iter(wanted)
        return [next(rest) if folder in wanted else folder for folder in folders] + list(rest)

    def _place(self, part: str, tree: TreeFacts) -> str | None:
        """Return where the image has what a value names, None if it does not have it."""
        if not part.startswith(f"{self.prefix}/"):
            return part
        path = part.removeprefix(f"{self.prefix}/")
        top, _, rest = path.partition("/")
        for folder, others in self.replaced.items():
            if top == folder or any(fnmatchcase(top, pattern) for pattern in others):
                return f"{self.prefix}/{folder}/{rest}".rstrip("/") if rest in ("", *REPLACED_HAS) else None
        gone = any(fnmatchcase(path, f"{pattern}{end}") for pattern in self.removed for end in ("", "/*"))
        return None if gone or path in tree.absent else part


def common_environment(
    by_arch: Mapping[str, Mapping[str, str]], notes: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that all architectures have, of lists the common folders; and notes, also on what is lost.

    Raises ConfigError if two architectures have different values.
    """
    result, lines = {}, list(notes)
    for name in dict.fromkeys(name for values in by_arch.values() for name in values):
        values = {arch: values.get(name, "") for arch, values in by_arch.items()}
        if all(values.values()) and len(set(values.values())) > 1 and not name.endswith("PATH"):
            raise ConfigError(
                f"{name}: expected one value for all architectures, but it is "
                f"{', '.join(f'{value} for {arch}' for arch, value in values.items())}; give the "
                "component a value in `env`, or the image only one of the `platforms`"
            )
        first, *others = (value.split(":") for value in values.values())
        everywhere = [part for part in first if all(part in other for other in others)]
        lost = dict.fromkeys(part for parts in (first, *others) for part in parts if part and part not in everywhere)
        lines += [f"{name}: {part} is in the archive of one architecture only" for part in lost]
        if everywhere:
            result[name] = ":".join(everywhere)
    return result, tuple(dict.fromkeys(lines))


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
    candidates: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Package → all versions that the repository had of it, oldest first."""


class Lock(Model):
    """Describe the file `imagebuild.lock`: sources pinned by content."""

    archives: dict[str, LockedArchive | Sha256] = Field(default_factory=dict)
    """Address → sha256, with facts if the component asks for them."""
    git: dict[str, Commit] = Field(default_factory=dict)
    """Address and tag, with a blank between → commit."""
    images: dict[str, LockedImage] = Field(default_factory=dict)
    """Image with tag → digests."""
    repositories: dict[str, LockedRepository] = Field(default_factory=dict)
    """Address of a repository of packages → key and versions."""
    wheels: dict[str, tuple[Wheel, ...]] = Field(default_factory=dict)
    """Component and version, with a blank between → wheels."""
    date: Day | None = None
    """When it was first written, or what `lock --date` says: no file of an image is younger. It moves only when told
    to, because the layers of all images change with it."""

    def entry(self, key: Key) -> Entry | None:
        """Return what is pinned under a key; None if nothing is."""
        return cast("Entry | None", getattr(self, key[0]).get(key[1]))

    def entries(self) -> Iterator[tuple[Key, Entry]]:
        """Yield every key with its entry."""
        for kind in KINDS:
            yield from (((kind, name), entry) for name, entry in getattr(self, kind).items())


KINDS: Mapping[str, str] = {
    "archives": "archive", "git": "git", "images": "image", "repositories": "packages", "wheels": "wheels",
}  # fmt: skip
"""Fields of a lock that have entries → what messages call these."""


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
    tree: Unpacked | None = field(default=None, compare=False)
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


Key = tuple[str, str]
"""Place of an entry in the lock: a field, and the name in it, such as `("git", "https://example.org/x.git v1")`."""
Entry = str | LockedArchive | LockedImage | LockedRepository | tuple[Wheel, ...]
"""What the lock has for a source: a hash, a commit, an image, …"""


def key_of(source: Source) -> Key:
    """Return the key of a source's entry in the lock."""
    match source:
        case Archive(url=url):
            return ("archives", url)
        case GitRef(url, tag, _):
            return ("git", f"{url} {tag}")
        case BaseImage(reference):
            return ("images", reference)
        case WheelSet(component, version, _):
            return ("wheels", f"{component} {version}")
        case PackageSource(url):
            return ("repositories", url)


def describe_key(key: Key) -> str:
    return f"{KINDS[key[0]]} {key[1]}"


def source_title(source: Source) -> str:
    return describe_key(key_of(source))


def lacks(lock: Lock, source: Source) -> str:
    """Return what the lock lacks of a source, as a phrase; empty if it is pinned.

    Raises ConfigError for a requirement of a wheel that cannot be read.
    """
    entry = lock.entry(key_of(source))
    match source, entry:
        case GitRef(commit=str()), _:
            return ""
        case _, None:
            return "not in the lock"
        case (Archive(tree=Unpacked()), str() | LockedArchive(facts=None)) | (
            BaseImage(facts=True),
            LockedImage(facts=None),
        ):
            return UNREAD
        case PackageSource(packages=packages), LockedRepository():
            absent = [package for package in packages if package not in entry.packages]
            return f"no version of {', '.join(absent)}" if absent else ""
        case WheelSet(requirements=requirements), tuple():
            versions = {canonicalize_name(wheel.name): wheel.version for wheel in entry}
            try:
                wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, requirements)}
            except InvalidRequirement as error:
                raise ConfigError(f"wheels: {error}") from None
            if wanted.keys() != versions.keys() or not all(
                specifier.contains(versions[name], prereleases=True) for name, specifier in wanted.items()
            ):
                return f"other wheels than {', '.join(requirements)}"
    return ""


def check_pinned(lock: Lock, sources: Iterable[Source], command: str = "imagebuild lock") -> None:
    """Raise ConfigError that lists the sources without a pin, if there are any: nothing is built from them.

    `command` pins them.
    """
    found = [(source_title(source), lacks(lock, source)) for source in sources]
    if lacking := {title: what for title, what in found if what}:
        listed = "\n".join(f"  {title}: {what}" for title, what in lacking.items())
        raise ConfigError(
            f"imagebuild.lock: {len(lacking)} of {len(dict(found))} sources have no pin, so nothing would verify them; "
            f"run `{command}` where they can be reached:\n{listed}"
        )


def digest_of(lock: Lock, reference: str) -> str:
    """Return `image:tag@digest`; without a pin, `@sha256:unresolved`.

    Only an image of the command line may have no digest.
    """
    image = lock.images.get(reference)
    digest = image.digest if image else f"sha256:{UNRESOLVED}"
    return f"{reference}@{digest}" if digest else reference


def hash_of(lock: Lock, url: str) -> str:
    """Return the sha256 of an archive; without a pin, `unresolved`."""
    entry = lock.archives.get(url, UNRESOLVED)
    return entry.sha256 if isinstance(entry, LockedArchive) else entry


def commit_of(lock: Lock, git: GitRef) -> str:
    """Return the commit of a source in git; without a pin, `unresolved`."""
    return git.commit or lock.git.get(key_of(git)[1], UNRESOLVED)


def wheels_of(lock: Lock, wheels: WheelSet) -> tuple[Wheel, ...]:
    """Return wheels with their hashes; without a pin none, which pip refuses."""
    return lock.wheels.get(key_of(wheels)[1], ())


def pinned_text(lock: Lock, source: Source) -> str:
    """Return a source and its pin as text."""
    pin: object = lock.entry(key_of(source)) or UNRESOLVED
    match source, pin:
        case GitRef(), _:
            pin = commit_of(lock, source)
        case BaseImage(reference), _:
            pin = digest_of(lock, reference)
        case WheelSet(), _:
            pin = [sorted(wheel.sha256.values()) for wheel in wheels_of(lock, source)]
        case _, LockedArchive(sha256=sha256, facts=facts):
            pin = (sha256, facts and sorted(facts.environment.items()))
        case _, LockedRepository(fingerprint=fingerprint, packages=packages):
            pin = (fingerprint, sorted(packages.items()))
    return f"{source_title(source)} {pin}"
