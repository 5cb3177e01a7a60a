"""How a target is made: its build stages in order, their versions, facts and sources. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Arch, Platform, axis_facts
from imagebuild.core.yaml import suggestion
from imagebuild.project.component import Component, Repository, first_values
from imagebuild.project.load import Project
from imagebuild.project.lockfile import Archive, BaseImage, GitRef, PackageSource, Source, WheelSet
from imagebuild.project.matrix import Base, Pin, Target
from imagebuild.project.plan import pin_of, provider_of

CPUS: Mapping[Arch, str] = {"amd64": "x86_64", "arm64": "aarch64"}
ARCHS: tuple[Arch, ...] = get_args(Arch)


P = ParamSpec("P")
T = TypeVar("T")


def once(method: Callable[Concatenate[Recipe, P], T]) -> Callable[Concatenate[Recipe, P], T]:
    """Remember what a method of a recipe returned for the same arguments: nothing about a target changes."""

    def remembered(recipe: Recipe, /, *args: P.args, **options: P.kwargs) -> T:
        known = recipe.results.setdefault(method.__name__, {})
        arguments = (args, *options.items()) if options else args
        if arguments not in known:
            known[arguments] = method(recipe, *args, **options)
        result: T = known[arguments]
        return result

    update_wrapper(remembered, method)
    return remembered


class Recipe:
    """How one target is made. Raises ConfigError where files contradict each other."""

    def __init__(
        self, project: Project, versions: Mapping[str, tuple[Pin, ...]], target: Target, stages: frozenset[str]
    ) -> None:
        self.project = project
        self.target = target
        self.image = project.matrix.model.images[target.image]
        self._versions = versions
        self._stages = stages
        """Components that have a build stage."""
        self._known = axis_facts(target.axes)
        self.results: dict[str, dict[object, Any]] = {}

    def on(self, platform: Platform) -> Recipe:
        """The recipe of one of the platforms alone."""
        narrow = self.target.model_copy(update={"platforms": (platform,)})
        return Recipe(self.project, self._versions, narrow, self._stages)

    def of(self, name: str) -> Component:
        return self.project.components[name].model

    @once
    def provider(self, wanted: str) -> str:
        """The component whose stage others build with when they ask for `wanted`."""
        chosen = self.image.build_with.get(wanted)
        return chosen or provider_of(self.project, wanted, self.target.components) or wanted

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """Components with a build stage that the target needs, each after those it builds on."""
        order: list[str] = []

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                where = self.project.components[name].at("build-requires")
                raise ConfigError(f"{where}: build-requires: goes in a circle: {' → '.join((*path, name))}")
            if name in order or name not in self._stages:
                return
            for wanted in self.of(name).build_requires:
                visit(self.provider(wanted), (*path, name))
            order.append(name)

        for component in self.target.components:
            if not self.of(component).stage_only or component in self.keyrings:
                visit(component, ())
        return tuple(order)

    @cached_property
    def archs(self) -> tuple[Arch, ...]:
        """CPU architectures of the target's platforms."""
        return tuple(arch for arch in ARCHS if f"linux/{arch}" in self.target.platforms)

    @cached_property
    def keyrings(self) -> tuple[str, ...]:
        """Components of the image whose repository the base image does not trust yet; their stages hold the key."""
        found = ((name, self.of(name).repository) for name in self.target.components)
        return tuple(name for name, repository in found if repository and not repository.configured)

    def pin(self, name: str) -> Pin | None:
        """The pin of a component; None if its version is an axis."""
        return pin_of(self._versions, self.of(name).pin or name, self._known)

    def version(self, name: str) -> str:
        """Version of a component. Raises ConfigError if the matrix has none for this target."""
        if name in self.target.components:
            return self.target.components[name]
        axis = self.of(name).version_axis
        if axis:
            return self._known[axis]
        pin = self.pin(name)
        if pin is None:
            where = self.project.matrix.at("versions")
            raise ConfigError(f"{where}: versions: no version for {name}, which {self.target.id} is built with")
        return pin.version

    def os(self, name: str) -> str:
        """The value of `os` that a component's stage is built on."""
        here = self.target.axes["os"]
        return (self.project.matrix.model.bases[here].build_on or here) if self.of(name).portable else here

    def base(self, name: str) -> Base:
        """The distribution release that a component's stage is built on."""
        return self.project.matrix.model.bases[self.os(name)]

    @once
    def key(self, name: str) -> Mapping[str, str]:
        """What a component's stage may know of the target, besides its own version. Raises ConfigError."""
        wanted = [k for k in self.of(name).key if k != "gpu"]
        present = {k: self.version(k) for k in wanted if k in self.target.components}
        available = {**self._known, **present}
        for i, entry in enumerate(wanted):
            if entry not in available:
                where = self.project.components[name].at("key", i)
                raise ConfigError(f"{where}: key: {entry!r} is neither an axis nor a component of {self.target.id}")
        return {k: available[k] for k in wanted}

    @once
    def values(self, name: str, arch: Arch | None = None, *, stage: bool = False) -> Mapping[str, str]:
        """What templates of a component's sources and packages may use; for each value the first row that fits.

        `stage`: for the build stage, which may be on an older base than the image.
        """
        here = {**self.target.axes, "os": self.os(name)} if stage else self.target.axes
        axes = {**axis_facts(here), "version": self.version(name), "image": self.target.image}
        result = {"version": self.version(name), "os": here["os"], **self.key(name)}
        if arch:
            axes["arch"] = arch
            result |= {"arch": arch, "cpu": CPUS[arch]}
        for fact, text in first_values(self.of(name).facts, axes).items():
            result.setdefault(fact, self.fill(name, text, result, "facts"))
        return result

    def fill(self, name: str, template: str, values: Mapping[str, str], field: str) -> str:
        """The template with values in place of `{names}`. Raises ConfigError for a name without value."""
        try:
            return template.format_map(values)
        except (KeyError, ValueError, IndexError) as error:
            missing = str(error.args[0]) if isinstance(error, KeyError) else str(error)
            where = self.project.components[name].at(field)
            if any(missing in row.values for row in self.of(name).facts):
                rows = self.project.components[name].at("facts")
                raise ConfigError(
                    f"{rows}: facts: no row gives {missing!r} to {self.target.id} with {name} {values['version']}, so "
                    f"there is none that is known; choose another version, or add a row"
                ) from None
            raise ConfigError(
                f"{where}: {field}: {template!r} for {self.target.id}: no value for {missing!r}"
                f"{suggestion(missing, dict(values))}"
            ) from None

    def image_base(self) -> str:
        """Image, with its tag, that the target starts from."""
        if not self.image.base:
            return self.project.matrix.model.bases[self.target.axes["os"]].image
        try:
            return self.image.base.format_map(self.target.axes)
        except (KeyError, ValueError) as error:
            where = self.project.matrix.at("images", self.target.image, "base")
            raise ConfigError(f"{where}: base: no axis {error}{suggestion(str(error), self.target.axes)}") from None

    def images(self, name: str) -> dict[str, str]:
        """Label → image, with its tag, that a component's stage starts from or takes files from."""
        return {
            label: self.fill(name, text, self.values(name, stage=True), "images")
            for label, text in self.of(name).images.items()
        }

    def archives(self, name: str) -> dict[Arch, str]:
        """Architecture → address of a component's archive."""
        template = self.of(name).archive
        if not template:
            return {}
        return {arch: self.fill(name, template, self.values(name, arch, stage=True), "archive") for arch in self.archs}

    @once
    def git(self, name: str) -> GitRef | None:
        """The source of a component in git."""
        component, pin = self.of(name), self.pin(name)
        if not component.git or pin is None:
            return None
        tag = self.fill(name, component.tag, {"version": pin.version.partition("+")[0]}, "tag")
        return GitRef(component.git, tag, pin.commit)

    @once
    def wheels(self, name: str) -> WheelSet | None:
        """The wheels of a component."""
        owner = self.of(name).wheels_from or name
        version = self.version(name)
        if not self.of(owner).wheels:
            return None
        values = {"version": version}
        for fact, text in first_values(self.of(owner).facts, values).items():
            values.setdefault(fact, self.fill(owner, text, values, "facts"))
        wanted = tuple(self.fill(owner, text, values, "wheels") for text in self.of(owner).wheels)
        return WheelSet(owner, version, wanted)

    def packages(self, name: str, *, every: bool = False) -> tuple[str, ...]:
        """Packages that a component brings into the image, with versions where it gives them.

        `every`: those of all variants.
        """
        packages, values = self.of(name).packages, self.values(name)
        extra = packages.devel if every or self.target.axes.get("variant") == "devel" else ()
        return tuple(self.fill(name, text, values, "packages") for text in (*packages.runtime, *extra))

    def env(self, name: str, variant: str | None = None) -> dict[str, str]:
        """Environment that a component gives an image; of another variant than the target's, if one is named."""
        axes = {**self._known, "version": self.version(name)}
        if variant:
            axes["variant"] = variant
        return first_values(self.of(name).env, axes)

    def repository(self, name: str, arch: Arch, *, stage: bool = False) -> Repository | None:
        """The repository of a component's packages for one architecture, filled in."""
        owner = self.of(name).packages_from or name
        found = self.of(owner).repository
        if found is None:
            return None
        values = self.values(owner, arch, stage=stage)
        url, key = (self.fill(owner, text, values, "repository") for text in (found.url, found.key))
        return found.model_copy(update={"url": url, "key": key})

    def sources(self) -> Iterator[Source]:
        """Every source that the target is made from, but the distribution's own archive, whose index is signed."""
        return (source for _, source in self.owned_sources())

    def owned_sources(self) -> Iterator[tuple[str, Source]]:
        """The sources with whose they are: a component's, a base's (a value of `os`), or the image's."""
        yield self.target.image if self.image.base else self.target.axes["os"], BaseImage(self.image_base())
        for name in dict.fromkeys((*self.target.components, *self.stages)):
            if name in self.stages:
                yield self.os(name), BaseImage(self.base(name).image)
                yield from ((name, BaseImage(reference)) for reference in self.images(name).values())
                yield from ((name, Archive(name, url)) for url in self.archives(name).values())
                git = self.git(name)
                wheels = self.wheels(name)
                yield from ((name, source) for source in (git, wheels) if source)
            yield from ((name, source) for source in self._repositories(name))

    def _repositories(self, name: str) -> Iterator[Source]:
        """The repository of a component's packages: of the image's release, and of the one its stage is built on."""
        for arch in self.archs:
            for stage in (False, True):
                found = self.repository(name, arch, stage=stage)
                if found and (name in self.stages if stage else name in self.target.components):
                    wanted = self.packages(name, every=stage)
                    yield PackageSource(found.url, found.suite, found.key, wanted)
