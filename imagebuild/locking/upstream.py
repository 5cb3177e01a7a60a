"""Where every question to upstream is asked: the one place that knows of mirrors, certificates and programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from imagebuild import programs
from imagebuild.apt import Run
from imagebuild.lockfile import LockedImage, LockedRepository, Wheel
from imagebuild.locking import git, images, repositories, wheels
from imagebuild.locking.entries import Entry
from imagebuild.locking.web import Advance, Web
from imagebuild.sources import Archive, BaseImage, GitRef, PackageSource, Source, WheelSet


def same(address: str) -> str:
    return address


@dataclass(frozen=True)
class Addresses:
    """Where to ask instead of the public address; by default there."""

    image: Callable[[str], str] = same
    """Image reference → the reference to ask for."""
    download: Callable[[str], str] = same
    """Address of an archive, a key, a repository of packages or of git → the address to ask."""
    python_index: str | None = None
    """Python package index, instead of the one that pip is configured for."""


class Upstream(Protocol):
    """Answers questions about sources; tests have one of their own."""

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        """The source's pin as it is upstream. Raises Unreachable, or another ImagebuildError for a wrong answer.

        `known` is what the lock has: the key of a repository and versions in it that shall stay.
        """

    def has_image(self, reference: str, digest: str) -> bool:
        """Does the registry still have this digest? Raises Unreachable."""

    def index(self, source: PackageSource, names: tuple[str, ...]) -> repositories.Index:
        """Versions of packages in a repository. Raises as `resolve`."""

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        """The newest wheels that fit. Raises as `resolve`."""

    def tags(self, address: str) -> dict[str, str]:
        """Tags of a git repository. Raises Unreachable."""

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        """Versions of a wheel on the package index. Raises as `resolve`."""

    def stop(self) -> None:
        """End what is under way."""


@dataclass(frozen=True)
class Real:
    """The network."""

    addresses: Addresses = Addresses()
    ca: Path | None = None
    netrc: Path | None = None
    """File of passwords for downloads."""
    run: Run = programs.run
    read: images.Read = programs.read
    web: Web = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "web", Web(self.addresses.download, self.ca, self.netrc))

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        match source:
            case Archive(_, url):
                return self.web.sha256(url, advance)
            case GitRef(url, tag, _):
                return git.commit_of(self.run, self.addresses.download(url), tag)
            case BaseImage(reference):
                return self.image(reference)
            case WheelSet():
                return self.wheels(source)
            case PackageSource():
                before = known if isinstance(known, LockedRepository) else None
                return repositories.resolve(self.run, self.web, source, before)

    def image(self, reference: str) -> LockedImage:
        return images.resolve(self.read, self.addresses.image(reference))

    def has_image(self, reference: str, digest: str) -> bool:
        return images.exists(self.read, self.addresses.image(reference), digest)

    def index(self, source: PackageSource, names: tuple[str, ...]) -> repositories.Index:
        return repositories.read(self.run, self.web, source, names)

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        return wheels.resolve(wheels.ask_pip(self.run, self.addresses.python_index), wanted)

    def tags(self, address: str) -> dict[str, str]:
        return git.tags(self.run, self.addresses.download(address))

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        return wheels.versions(self.run, name, self.addresses.python_index)

    def stop(self) -> None:
        self.web.stopped.set()
        programs.end_children()
