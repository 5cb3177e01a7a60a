"""The recipe of a target: one value with everything that its Dockerfile is made from. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from imagebuild.core.fields import Arch, Platform, YamlFile
from imagebuild.project.component import Component, PackageRepository
from imagebuild.project.lockfile import ImageFacts, PackageSource, Source, TreeFacts
from imagebuild.project.matrix import Image, Pin
from imagebuild.project.plan import Target


class OwnedSource(NamedTuple):
    """A source (something to download), and the part of the project that needs the source."""

    owner: str
    """Name of a component, a base (a value of the axis `os`) or an image."""
    source: Source
    arch: Arch | None = None
    """The only architecture that needs the source. None: every architecture needs it."""


@dataclass(frozen=True)
class PinnedPackages:
    """The packages that a component takes from a signed repository, for one release of the distribution."""

    repositories: Mapping[Arch, PackageRepository]
    packages: tuple[str, ...]
    """Packages, each as `name` or `name=version`."""
    keys: Mapping[str, str]
    """Maps the fingerprint of each key that signs the repositories to the address of the key. Without a pin, the
    fingerprint is `unresolved`."""
    versions: Mapping[str, Collection[str]]
    """Maps each package to its versions in the lock: several if the repositories of two architectures differ."""
    release: str = ""
    """Value of the axis `os`."""

    @property
    def urls(self) -> dict[Arch, str]:
        """The address of the repository for each architecture."""
        return {arch: repository.url for arch, repository in self.repositories.items()}

    def source(self, arch: Arch, packages: tuple[str, ...]) -> PackageSource:
        """Return the source of packages for an architecture: the repository, with these packages."""
        found = self.repositories[arch]
        return PackageSource(found.url, found.suite, found.key, packages, (arch,), (self.release,))


@dataclass(frozen=True, eq=False)
class BuildStage:
    """The build stage of a component."""

    name: str
    component: Component
    values: Mapping[str, Any]
    """Variables for the template `build.j2`. The renderer adds the variables `gpu` and `signed`, because computing
    these two may raise errors."""
    tag: str
    """Git tag of the version. Empty without a git source, or if the matrix states the commit."""
    toolkit: str
    """Version of the CUDA toolkit that compiles the component. Empty if `gpu` is not in the component's key."""
    archive_facts: Mapping[Arch, TreeFacts]
    """Maps each architecture to the facts about its archive: what `imagebuild lock` read from the archive."""
    packages: PinnedPackages | None
    """Packages of all variants, with their signed repository. None if the packages come from the distribution's own
    archive."""
    sources: tuple[OwnedSource, ...]
    """All sources (downloads) of the stage, except package repositories."""

    @cached_property
    def archive_environment(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """The variables that images take from the unpacked archive, and a note for each difference from the archive.
        Raises ConfigError if the archives of two architectures set a variable differently."""
        return self.component.unpacked.environment(self.archive_facts) if self.component.unpacked else ({}, ())


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a recipe: everything that one component contributes to a target."""

    name: str
    file: YamlFile[Component]
    version: str
    pin: Pin | None
    """The row of `versions` in the matrix that sets the component's version in the target. None if no row applies."""
    stage: BuildStage | None
    """The build stage of the component. None if the target does not need the build stage."""
    packages: tuple[str, ...]
    """Packages to install in the image, each as `name` or `name=version`."""
    repository: PinnedPackages | None
    """The packages in `packages`, with their signed repository. None if the packages come from the distribution's own
    archive."""
    versioned: tuple[tuple[PackageSource, str], ...]
    """Packages whose version contains the component's version. Each entry is the repository with one package, and the
    template of the package's version, such as `{version}-1`."""
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
    """Everything that the Dockerfile of one target is made from."""

    target: Target
    image: Image
    base: str
    """The image that the target starts from, with its digest."""
    is_bootstrapped: bool
    """Whether builds may create the base from packages of the distribution instead of using the official image."""
    base_facts: Mapping[Platform, ImageFacts]
    """Maps each platform to the facts about the base image: what `imagebuild lock` read from its configuration. Empty
    if the lock contains no facts."""
    parts: Mapping[str, Part]
    """Maps each component to its part of the recipe: first the components of the image, requirements first, then the
    components that only have a build stage."""
    stages: tuple[BuildStage, ...]
    """Build stages that the target needs, each after the stages that it uses."""
    toolkit: str
    """Version of the CUDA toolkit, which limits the compute capabilities that the image can contain code for. `0`
    without a toolkit."""
    sources: tuple[OwnedSource, ...]
    """All sources (downloads), except packages from the distribution's own archive. The signed index of this archive
    verifies these packages."""
    lock_hash: str
    """Digest of all versions and pins that the Dockerfile contains: 12 hex digits."""

    @property
    def components(self) -> tuple[Part, ...]:
        """The parts of the components in the image. Each component comes after the components that it requires."""
        return tuple(self.parts[name] for name in self.target.components)

    @property
    def copied(self) -> tuple[str, ...]:
        """The components whose files are copied from their stages into the image, in the order of these steps.
        Components that change often come last."""
        ordered = sorted(self.components, key=lambda part: part.component.updates)
        return tuple(part.name for part in ordered if part.stage and not part.component.stage_only)

    def sources_for(self, platforms: Collection[Platform]) -> tuple[OwnedSource, ...]:
        """Return the sources that the target needs for these platforms. Without platforms, return all sources."""
        wanted = {platform for platform in self.target.platforms if not platforms or platform in platforms}
        return tuple(owned for owned in self.sources if wanted and (not owned.arch or f"linux/{owned.arch}" in wanted))
