"""Sources (downloads), their pins in `imagebuild.lock`, and the environment variables that archives set. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Day  # noqa: N812 - the lock has a field `date`
from fnmatch import fnmatchcase
from typing import Annotated, cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import Field, model_validator

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import CPUS, Arch, Commit, Digest, Form, Model, Name, Platform, Sha256

Fingerprint = Annotated[str, Form("[0-9A-F]{40}", "the fingerprint of a key: 40 digits (0-9, A-F)")]
UNRESOLVED = "unresolved"
"""Placeholder in a Dockerfile for a hash, commit or digest that the lock does not contain. No builder accepts the
placeholder."""
UNREAD = "the lock contains the hash, but not the facts that `imagebuild lock` reads from the content"
"""Reason why a source is not pinned: the lock contains the hash, but not the facts (what `imagebuild lock` reads from
the content)."""
GLIBC = ("manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(12, 36)))
"""Platform tags of the wheels that run with the glibc of the images. The script `fetch-wheels` of the component `fetch`
accepts the same tags."""
REPLACED_HAS = ("bin", "include", "lib", "lib/pkgconfig")
"""Subfolders that another component contains if it replaces a folder of the archive. Paths of other subfolders of the
replaced folder are left out of the environment variables."""
SHELL_ACTS = re.compile(r"[^\w./:=,+@%~ -]")
"""A character that a shell or Dockerfile may act on, or a control character."""
LOADS_CODE = ("LD_AUDIT", "LD_PRELOAD", "BASH_ENV", "ENV", "PERL*", "PYTHON*")
"""Shell patterns of variables with which a path starts code in every program."""
KINDS: Mapping[str, str] = {
    "archives": "archive", "git": "git", "images": "image", "repositories": "packages", "wheels": "wheels",
}  # fmt: skip
"""Maps each field of the lock that contains entries to the word that messages use for such an entry."""
PATH = re.compile(r"/|\.(zip|whl|tgz|tbz|txz|tlz|tar(\.\w+)?)\s*(\[.*)?$", re.IGNORECASE)
"""Matches a requirement, without its marker, that pip takes for a file or folder below the current folder."""
Key = tuple[str, str]
"""Key of an entry in the lock: the field, and the name in the field, such as `("git", "https://example.org/x.git
v1")`."""


def read_requirement(text: str) -> Requirement:
    """Return a requirement. Raises ValueError unless it names a package of the index: pip runs the code of a folder or
    archive, even to find out its version."""
    found = Requirement(text)
    if found.url or PATH.search(text.partition(";")[0]):
        raise ValueError(f"{text!r} is a file or an address; name a package of the index, such as `name==1.0`")
    return found


class Wheel(Model):
    """A wheel from the Python package index, pinned by its hash for each architecture."""

    name: str
    version: str
    sha256: dict[Arch, Sha256]

    @model_validator(mode="after")
    def _is_of_the_index(self) -> Wheel:
        read_requirement(f"{self.name}=={self.version}")
        return self


class TreeFacts(Model):
    """Facts that `imagebuild lock` reads from an unpacked archive. Paths are relative to the archive's top folder."""

    environment: dict[str, str]
    """Environment variables that a script in the archive sets if the archive is unpacked at `prefix`, its folder in
    images."""
    script_error: str = ""
    """Last lines of the script if it ended with an error, although it set the environment."""
    absent: tuple[str, ...] = ()
    """Paths below `prefix` that `environment` contains, but that do not exist in the archive."""
    folders: tuple[str, ...] = ()
    """Folders at the top of the archive."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Maps each part of the archive to its version, from the file VERSION and the pkg-config files."""
    sources: tuple[str, ...] = ()
    """Files in the archive that are themselves archives, with source code."""
    licenses: tuple[str, ...] = ()
    """Files with licence texts."""
    plugins: tuple[tuple[str, str], ...] = ()
    """Folder and file name of each NCCL network plug-in, in the order of the folders in LD_LIBRARY_PATH."""
    unprovided: tuple[str, ...] = ()
    """Libraries that files of the archive need, but the archive does not contain."""
    built_in: tuple[str, ...] = ()
    """Folders of the build machine that text files in the archive still name."""


class Unpacked(Model):
    """How `imagebuild lock` reads an unpacked archive, and which environment variables of the archive an image gets."""

    prefix: str
    """Folder of the unpacked archive in images."""
    script: str
    """Shell lines that set the environment variables. bash runs these lines in the top folder of the archive."""
    needs: tuple[str, ...] = ()
    """Shell patterns of files and folders that an image needs from the archive."""
    replaced: dict[Name, tuple[str, ...]] = Field(default_factory=dict)
    """Maps the name of a folder that another component provides to the folders of the archive that this folder
    replaces: paths or shell patterns."""
    removed: tuple[str, ...] = ()
    """Shell patterns of folders of the archive that the image does not contain."""
    left_out: tuple[str, ...] = ()
    """Shell patterns of environment variables that no image gets."""
    accepted: tuple[str, ...] = ()
    """Shell patterns of variables that images get although their values are not paths in the archive. Without this
    consent, images get only paths."""
    devel: tuple[str, ...] = ()
    """Environment variables that only the `devel` variant gets."""
    order: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Maps each variable that is a list of folders (such as `PATH`) to the order of its folders in images: shell
    patterns relative to `prefix`. A pattern without wildcards is added as a folder if the script does not list the
    folder."""

    def environment(self, facts: Mapping[Arch, TreeFacts]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the variables that an image takes from the archive, and a note for each difference from the script.

        `facts` describes the archive of each architecture of the image. Raises ConfigError if the archives of two
        architectures set a variable differently."""
        taken: dict[str, dict[str, str]] = {}
        notes: list[str] = []
        depth = len(self.prefix.split("/")) + 1
        for arch, tree in facts.items():
            taken[arch] = {}
            notes += [f"the script set all variables, but it {tree.script_error}"] if tree.script_error else []
            notes += [f"text files contain {folder}, which is {self.prefix} in images" for folder in tree.built_in]
            if plugins := [f"{name} in {folder}" for folder, name in tree.plugins]:
                notes.append(f"NCCL network plug-ins (NCCL loads the first one): {', '.join(plugins)}")
            left_out = [n for n in tree.environment if any(fnmatchcase(n, pattern) for pattern in self.left_out)]
            notes += [f"{', '.join(left_out)}: left out of images"] if left_out else []
            for name, value in {**dict.fromkeys(self.order, ""), **tree.environment}.items():
                if name in left_out:
                    continue
                if not any(fnmatchcase(name, pattern) for pattern in self.accepted) and not self._is_path(name, value):
                    notes.append(f"{name}={value!r} is not a path in the archive: only `unpacked.accepted` can add it")
                    continue
                if found := SHELL_ACTS.search(value):
                    problem = f"the script of the archive sets {value!r}, and a shell could act on {found[0]!r}"
                    remedy = f"add {name} to `unpacked.left-out` in the component's component.yaml"
                    raise ConfigError(f"{name}: {problem}; {remedy}")
                parts = [(part, self._place(part, tree)) for part in value.split(":") if part]
                notes += [f"{name}: {part} is not in the image" for part, place in parts if place is None]
                moved = [(part.split("/"), place.split("/")) for part, place in parts if place and place != part]
                notes += [f"{'/'.join(a[:depth])} is {'/'.join(b[:depth])} in images" for a, b in moved]
                kept = list(dict.fromkeys(place for _, place in parts if place))
                ordered = self._ordered(name, kept)
                if ordered != kept:
                    notes.append(f"{name}: images have the order {', '.join(self.order[name])}, unlike the script")
                if ordered:
                    taken[arch][name] = ":".join(ordered)
        return common_environment(taken, notes)

    def libraries(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """Return the archive's folders in LD_LIBRARY_PATH, in order, except folders that another component replaces."""
        own = [part for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part.startswith(f"{self.prefix}/")]
        return tuple(part for part in own if part.removeprefix(f"{self.prefix}/").split("/")[0] not in self.replaced)

    def replacement(self, path: str) -> tuple[str, str] | None:
        """Return the folder of another component that replaces a path of the archive, and the rest of the path.
        None if no component replaces the path."""
        for folder, others in self.replaced.items():
            for pattern in (folder, *others):
                depth = pattern.count("/") + 1
                if fnmatchcase("/".join(path.split("/")[:depth]), pattern):
                    return folder, "/".join(path.split("/")[depth:])
        return None

    def _is_path(self, name: str, value: str) -> bool:
        """Return whether a variable contains only paths in the archive, and does not load code. Variables that end with
        PATH may also contain folders of the system."""
        if any(fnmatchcase(name, pattern) for pattern in LOADS_CODE):
            return False
        start = "/" if name.endswith("PATH") else self.prefix
        return all(part == start or part.startswith(f"{start.rstrip('/')}/") for part in value.split(":") if part)

    def _ordered(self, name: str, folders: Sequence[str]) -> list[str]:
        """Return the folders of the variable `name` in the order that `order` states for the variable.
        Folders that `order` does not name stay at their positions."""
        wanted: list[str] = []
        for pattern in self.order.get(name, ()):
            matching = [folder for folder in folders if fnmatchcase(folder, f"{self.prefix}/{pattern}")]
            wanted += matching or ([] if "*" in pattern else [f"{self.prefix}/{pattern}"])
        rest = iter(wanted)
        return [next(rest) if folder in wanted else folder for folder in folders] + list(rest)

    def _place(self, part: str, tree: TreeFacts) -> str | None:
        """Return the path in the image for `part`, a path in an environment variable that the script sets.
        Return None if the image does not contain this path."""
        if not part.startswith(f"{self.prefix}/"):
            return part
        path = part.removeprefix(f"{self.prefix}/")
        if found := self.replacement(path):
            folder, rest = found
            return f"{self.prefix}/{folder}/{rest}".rstrip("/") if rest in ("", *REPLACED_HAS) else None
        gone = any(fnmatchcase(path, f"{pattern}{end}") for pattern in self.removed for end in ("", "/*"))
        return None if gone or path in tree.absent else part


def common_environment(
    by_arch: Mapping[str, Mapping[str, str]], notes: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables for all architectures, and `notes` with an added note for each folder that is left out.

    A list of folders keeps the folders that all architectures have. Raises ConfigError if another variable has
    different values for two architectures."""
    result, lines = {}, list(notes)
    for name in dict.fromkeys(name for values in by_arch.values() for name in values):
        values = {arch: values.get(name, "") for arch, values in by_arch.items()}
        if all(values.values()) and len(set(values.values())) > 1 and not name.endswith("PATH"):
            several = ", ".join(f"{value} for {arch}" for arch, value in values.items())
            remedy = f"add {name} to `unpacked.left-out`, or remove {name} from `env-of-base`"
            problem = f"expected one value for all architectures, but it is {several}"
            raise ConfigError(f"{name}: {problem}; in the component's component.yaml, {remedy}")
        first, *others = (value.split(":") for value in values.values())
        everywhere = [part for part in first if all(part in other for other in others)]
        lost = dict.fromkeys(part for parts in (first, *others) for part in parts if part and part not in everywhere)
        lines += [f"{name}: {part} is in the archive of only one architecture" for part in lost]
        if everywhere:
            result[name] = ":".join(everywhere)
    return result, tuple(dict.fromkeys(lines))


class LockedArchive(Model):
    """A pinned archive that was unpacked to read its content."""

    sha256: Sha256
    size: int | None = None
    """Size of the download in bytes."""
    facts: TreeFacts | None = None


class ImageFacts(Model):
    """Facts that `imagebuild lock` reads from the configuration of an image."""

    environment: dict[str, str] = Field(default_factory=dict)
    held: tuple[str, ...] = ()
    """Packages that the image holds back from upgrades."""
    nccl: str = ""
    """Version of the NCCL package in the image. Empty if the image does not contain NCCL."""
    user: str = ""
    """User that containers of the image run as. Empty: root."""
    entrypoint: tuple[str, ...] = ()
    """Program that starts the commands of containers, with its arguments."""


class LockedImage(Model):
    """A pinned image in a registry."""

    digest: Digest
    """Digest of the index of all platforms, or of the manifest if there is only one platform."""
    platforms: dict[Platform, Digest] = Field(default_factory=dict)
    facts: dict[Platform, ImageFacts] | None = None


class LockedRepository(Model):
    """What the lock contains about a signed package repository."""

    fingerprint: Fingerprint
    """Fingerprint of the key that signed the repository."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Maps each used package to its exact version. If a component requests `name=version`, the key is `name=version`
    instead of the name, because another target may request another version."""
    candidates: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Maps each package to all its versions in the repository, oldest first."""
    hashes: dict[str, Sha256] | None = None
    """Maps packages, as `name=version`, to the sha256 that another place states for their files."""


class Lock(Model):
    """The file `imagebuild.lock`: the hashes, commits and digests of all sources (downloads)."""

    archives: dict[str, LockedArchive | Sha256] = Field(default_factory=dict)
    """Maps the address of each archive to its sha256. If the component has the key `unpacked`, the entry also contains
    facts about the content."""
    git: dict[str, Commit] = Field(default_factory=dict)
    """Maps the address and tag of each git source, separated by a blank, to the commit."""
    images: dict[str, LockedImage] = Field(default_factory=dict)
    """Maps each image, with its tag, to its digests."""
    repositories: dict[str, LockedRepository] = Field(default_factory=dict)
    """Maps the address of each package repository to the fingerprint of its key and the versions of its packages."""
    wheels: dict[str, tuple[Wheel, ...]] = Field(default_factory=dict)
    """Maps each component and version, separated by a blank, to the wheels and their hashes."""
    date: Day | None = None
    """Latest modification time of files in images: the day when the lock was first written, or the value of `lock
    --date`. Other changes of the lock leave the date as it is, because the layers of all images depend on the date."""

    def entry(self, key: Key) -> Entry | None:
        """Return the entry with a key. Return None if the lock does not contain the key."""
        return cast("Entry | None", getattr(self, key[0]).get(key[1]))

    def over(self, other: Lock) -> Lock:
        """Return this lock with the entries and the date of another lock that this lock does not have."""
        tables = {kind: {**getattr(other, kind), **getattr(self, kind)} for kind in KINDS}
        return self.model_copy(update={**tables, "date": self.date or other.date})

    def entries(self) -> Iterator[tuple[Key, Entry]]:
        """Yield each key with its entry."""
        for kind in KINDS:
            yield from (((kind, name), entry) for name, entry in getattr(self, kind).items())


@dataclass(frozen=True)
class BaseImage:
    """An image in a registry."""

    reference: str
    """Reference with a tag, as in FROM."""
    facts: bool = field(default=False, compare=False)
    """Whether the lock must contain facts from the configuration of the image."""


@dataclass(frozen=True)
class Archive:
    """An archive that a component is unpacked from."""

    component: str
    url: str
    tree: Unpacked | None = field(default=None, compare=False)
    """How to read the content of the archive. None if the lock needs only the hash of the archive."""


@dataclass(frozen=True)
class GitRef:
    """A tag or a commit of a git repository."""

    url: str
    tag: str
    commit: str | None = None
    """Commit from the matrix or the command line. None: the lock contains the commit of the tag."""


@dataclass(frozen=True)
class WheelSet:
    """Wheels from the Python package index."""

    component: str
    version: str
    requirements: tuple[str, ...]
    """Requirements for pip."""
    python: str = ""
    """Version of Python. If set, the set also contains the packages that the required packages need."""
    without: tuple[str, ...] = ()
    """Packages that are left out of the set, although other packages need them."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a requirement that does not name a package of the index."""
        try:
            for text in self.requirements:
                read_requirement(text)
        except ValueError as error:
            raise ConfigError(f"component {self.component}: wheels: {error}") from None

    @property
    def name(self) -> str:
        """The name in the lock. A set for a version of Python is named by all that its content depends on."""
        without = ("without", *self.without) if self.without else ()
        return " ".join([self.component, self.version, *((*self.requirements, *without) if self.python else ())])


@dataclass(frozen=True)
class PackageSource:
    """A signed package repository."""

    url: str
    suite: str
    key: str
    """Address of the key, or `package:NAME` for a package that contains the key."""
    packages: tuple[str, ...]
    """Packages, each as `name` or `name=version`."""
    archs: tuple[Arch, ...] = field(default=(), compare=False)
    """Architectures for which the packages must exist. If empty, every architecture in the index counts."""
    releases: tuple[str, ...] = field(default=(), compare=False)
    """Values of the axis `os` whose apt must accept the repository."""


Source = BaseImage | Archive | GitRef | WheelSet | PackageSource


Entry = str | LockedArchive | LockedImage | LockedRepository | tuple[Wheel, ...]
"""Entry of the lock for a source: a hash, a commit, an image, …"""


def key_of(source: Source) -> Key:
    """Return the key of a source's entry in the lock."""
    match source:
        case Archive(url=url):
            return ("archives", url)
        case GitRef(url, tag, _):
            return ("git", f"{url} {tag}")
        case BaseImage(reference):
            return ("images", reference)
        case WheelSet():
            return ("wheels", source.name)
        case PackageSource(url):
            return ("repositories", url)


def describe_key(key: Key) -> str:
    return f"{KINDS[key[0]]} {key[1]}"


def source_title(source: Source) -> str:
    return describe_key(key_of(source))


def lacks(lock: Lock, source: Source) -> str:
    """Return what the lock lacks for a source, as text for a message. Empty if the source is pinned."""
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
        case WheelSet(requirements=requirements, python=python), tuple():
            versions = {canonicalize_name(wheel.name): wheel.version for wheel in entry}
            wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, requirements)}
            whole = wanted.keys() <= versions.keys() if python else wanted.keys() == versions.keys()
            if not whole or not all(
                specifier.contains(versions[name], prereleases=True) for name, specifier in wanted.items()
            ):
                return f"the pinned wheels do not fulfil {', '.join(requirements)}"
    return ""


def check_pinned(lock: Lock, sources: Iterable[Source], command: str = "imagebuild lock") -> None:
    """Raise ConfigError with a list of all sources (downloads) without a pin in the lock, if there are any.
    The message tells the user to run `command`."""
    found = [(source_title(source), lacks(lock, source)) for source in sources]
    if lacking := {title: what for title, what in found if what}:
        listed = "\n".join(f"  {title}: {what}" for title, what in lacking.items())
        problem = f"{len(lacking)} of {len(dict(found))} sources have no pin, so they cannot be verified"
        remedy = f"run `{command}` on a machine that can reach them"
        raise ConfigError(f"imagebuild.lock: {problem}; {remedy}:\n{listed}")


def digest_of(lock: Lock, reference: str) -> str:
    """Return `image:tag@digest`. If the lock does not contain the image, the digest is `sha256:unresolved`.
    An image from the option `--base-image` may have no digest. For such an image, return `image:tag`."""
    image = lock.images.get(reference)
    digest = image.digest if image else f"sha256:{UNRESOLVED}"
    return f"{reference}@{digest}" if digest else reference


def hash_of(lock: Lock, url: str) -> str:
    """Return the sha256 of an archive. Return `unresolved` if the lock does not contain the archive."""
    entry = lock.archives.get(url, UNRESOLVED)
    return entry.sha256 if isinstance(entry, LockedArchive) else entry


def commit_of(lock: Lock, git: GitRef) -> str:
    """Return the commit of a git source. Return `unresolved` if neither the matrix nor the lock contains the commit."""
    return git.commit or lock.git.get(key_of(git)[1], UNRESOLVED)


def pip_platforms(arch: Arch, python: str = "") -> tuple[str, ...]:
    """Return the options with which pip chooses wheels for an image of an architecture and a version of Python.
    Without a version, the wheels must fit every version of Python 3."""
    platforms = (word for glibc in GLIBC for word in ("--platform", f"{glibc}_{CPUS[arch]}"))
    # pip would compare the version that a wheel requires with its own Python; uv has compared it with this one.
    versions = ("--python-version", python, "--implementation", "cp", "--ignore-requires-python") if python else ()
    return ("--only-binary", ":all:", *platforms, *versions)


def wheels_of(lock: Lock, wheels: WheelSet) -> tuple[Wheel, ...]:
    """Return the wheels of a component, with their hashes. Empty if the lock does not contain the wheels.
    A build without pinned wheels fails, because pip refuses an empty list of requirements."""
    return lock.wheels.get(key_of(wheels)[1], ())


def pinned_text(lock: Lock, source: Source) -> str:
    """Return a source and its pin (hash, commit or digest) as text, for the hash of all pins of a target."""
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
