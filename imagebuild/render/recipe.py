"""The recipe of a target: all that its Dockerfile is made from, as one value. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Arch, Platform, YamlFile
from imagebuild.project.component import Component, Repository
from imagebuild.project.lockfile import GitRef, ImageFacts, PackageSource, Source, TreeFacts, Wheel
from imagebuild.project.matrix import Image, Pin
from imagebuild.project.plan import Target


class OwnedSource(NamedTuple):
    """A source, and the part of the project that it belongs to."""

    owner: str
    """Name of a component, a base (a value of the axis `os`) or an image."""
    source: Source
    arch: Arch | None = None
    """The only architecture that needs the source. None: every architecture needs it."""


@dataclass(frozen=True, eq=False)
class PinnedPackages:
    """The packages that a component takes from a signed repository, for one release of the distribution."""

    repositories: Mapping[Arch, Repository]
    packages: tuple[str, ...]
    """Each as `name` or `name=version`."""
    fingerprint: str
    """Fingerprint of the key that signs the repository, or `unresolved` without a pin."""
    versions: Mapping[str, Collection[str]]
    """Maps each package to its versions in the lock: several if the repositories of two architectures differ."""

    @property
    def urls(self) -> dict[Arch, str]:
        """The address of the repository for each architecture."""
        return {arch: repository.url for arch, repository in self.repositories.items()}


@dataclass(frozen=True, eq=False)
class GpuCode:
    """The compute capabilities that programs are compiled for."""

    toolkit: str
    """Version of the CUDA toolkit."""
    generation: str | None
    """The only wanted compute capability: the value of the axis `gpu`. None: all that the matrix lists."""
    by_arch: Mapping[str, tuple[str, ...]]
    """Maps each architecture to the compute capabilities that the toolkit can compile for."""
    archs: tuple[Arch, ...]
    """Architectures of the target."""
    place: str
    """The `file:line` of the table of compute capabilities."""

    def capabilities(self) -> Mapping[str, tuple[str, ...]]:
        """Return the compute capabilities for each architecture.

        Raises ConfigError if an architecture of the target has none.
        """
        if lacking := [arch for arch in self.archs if not self.by_arch[arch]]:
            what = f"CUDA {self.toolkit}, {' and '.join(lacking)}"
            what += f" and gpu {self.generation}" if self.generation else ""
            remedy = "add an entry, or change the versions of the image"
            raise ConfigError(f"{self.place}: gpu-architectures: no entry fits {what}; {remedy}")
        return self.by_arch


@dataclass(frozen=True, eq=False)
class BuildStage:
    """The build stage of a component. Targets that need the same stage share this object."""

    name: str
    component: Component
    version: str
    os: str
    """The release of the distribution that the stage is built on."""
    base: str
    """The image of that release, with its digest."""
    key: Mapping[str, str]
    """Maps each entry of the component's `key` to its value."""
    facts: Mapping[str, str]
    """The values for templates: the component's facts, version, `os` and key."""
    providers: Mapping[str, str]
    """Maps each entry of `build-requires` to the component whose stage fulfils it."""
    git: GitRef | None
    commit: str | None
    """Commit of the git source, or `unresolved` without a pin. None if the component has no git source."""
    archives: Mapping[Arch, Mapping[str, str]]
    """Maps each architecture to the `url` of the archive and its `sha256`, which is `unresolved` without a pin."""
    archive_facts: Mapping[Arch, TreeFacts]
    """What the lock knows about the content of each archive."""
    images: Mapping[str, str]
    """Maps each label of the component's `images` to the image, with its digest."""
    wheels: tuple[Wheel, ...]
    packages: PinnedPackages | None
    """Packages of all variants. None if they come from the distribution's own archive."""
    gpu: GpuCode | None
    """None if `gpu` is not in the component's key."""
    sources: tuple[OwnedSource, ...]
    """All sources except repositories of packages."""

    @cached_property
    def archive_environment(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """The environment that images take from the unpacked archive, and a line for each difference from the archive.

        Raises ConfigError if the archives of two architectures set a variable differently.
        """
        return self.component.unpacked.environment(self.archive_facts) if self.component.unpacked else ({}, ())


@dataclass(frozen=True, eq=False)
class Part:
    """All that one component contributes to a target."""

    name: str
    file: YamlFile[Component]
    version: str
    pin: Pin | None
    """The row of `versions` in the matrix that holds for the target. None if no row does."""
    stage: BuildStage | None
    """None if the target does not need the component's build stage."""
    packages: tuple[str, ...]
    """Packages that the image gets, with their versions if the component states them."""
    repository: PinnedPackages | None
    """The same packages with their repository. None if they come from the distribution's own archive."""
    versioned: tuple[tuple[PackageSource, str], ...]
    """Packages whose version contains the component's version, each with the template of its version, such as
    `{version}-1`."""
    env: Mapping[str, str]
    """Variables that the component itself sets in the image."""
    labels: Mapping[str, str]
    """Labels of the image, without the prefix `imagebuild.`."""
    sources: tuple[OwnedSource, ...]

    @property
    def component(self) -> Component:
        return self.file.model


@dataclass(frozen=True, eq=False)
class Recipe:
    """All that the Dockerfile of one target is made from."""

    target: Target
    image: Image
    archs: tuple[Arch, ...]
    """CPU architectures of the target's platforms."""
    base: str
    """The image that the target starts from, with its digest."""
    is_bootstrapped: bool
    """Whether builds may bootstrap the base from the distribution's archive instead of the official image."""
    base_facts: Mapping[Platform, ImageFacts]
    """What the lock knows about the base. Empty if it has no facts."""
    parts: Mapping[str, Part]
    """The components of the image, requirements first, then the components that only have a build stage."""
    stages: tuple[BuildStage, ...]
    """Build stages that the target needs, each after the stages that it uses."""
    gpu: GpuCode
    """The GPUs that programs in the image are compiled for, or must run on."""
    sources: tuple[OwnedSource, ...]
    """All sources except the distribution's own archive, whose signed index verifies its packages."""
    lock_hash: str
    """Digest of all versions and pins that the Dockerfile contains: 12 hex digits."""

    @property
    def components(self) -> tuple[Part, ...]:
        """The components of the image, requirements first."""
        return tuple(self.parts[name] for name in self.target.components)

    @property
    def keyrings(self) -> tuple[Part, ...]:
        """Components whose package repository the base does not trust yet. Their build stages contain the key."""
        repositories = ((part, part.component.repository) for part in self.components)
        return tuple(part for part, repository in repositories if repository and not repository.configured)

    def sources_for(self, platforms: Collection[Platform]) -> tuple[OwnedSource, ...]:
        """Return the sources that the target needs for these platforms. Without platforms, return all sources."""
        if not platforms:
            return self.sources
        archs = [arch for arch in self.archs if f"linux/{arch}" in platforms]
        return tuple(owned for owned in self.sources if archs and (owned.arch is None or owned.arch in archs))
