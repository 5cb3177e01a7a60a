"""Work out how a target is made: its build stages in order, their versions, facts and sources. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import ARCHS, CPUS, Arch, Platform, axis_facts
from imagebuild.project.component import Component, Repository, first_values
from imagebuild.project.lockfile import (
    Archive,
    BaseImage,
    GitRef,
    ImageFacts,
    LockedArchive,
    PackageSource,
    Source,
    TreeFacts,
    WheelSet,
    common_environment,
)
from imagebuild.project.matrix import FIELD, Base, Pin
from imagebuild.project.plan import Target
from imagebuild.project.project import Project

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GLIBC = ("manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(12, 36)))
"""Platform tags of wheels that run with the images' glibc; `fetch-wheels` accepts the same."""


def pip_platforms(arch: Arch) -> tuple[str, ...]:
    """Return the options that make pip choose wheels for an image of an architecture."""
    return ("--only-binary", ":all:", *(word for glibc in GLIBC for word in ("--platform", f"{glibc}_{CPUS[arch]}")))


class Recipe:
    """Describe how one target is made. Methods raise ConfigError where files contradict each other."""

    def __init__(self, project: Project, target: Target, stages: frozenset[str]) -> None:
        self.project = project
        self.target = target
        self.image = project.matrix.model.images[target.image]
        self._stages = stages
        """Components that have a build stage."""
        self._axes = axis_facts(target.axes)
        present = target.components
        provided = {role: name for name in reversed(present) for role in self.component(name).provides}
        self._providers = {**provided, **{name: name for name in present}, **self.image.build_with}

    def stage_key(self, name: str) -> tuple[object, ...]:
        """Return what is equal for targets in which a component has the same stage.

        It has what its `key` and the conditions of its facts name, those of the component that it takes packages from,
        and what every component may know.
        """
        component, pin, owner = self.component(name), self.pin(name), self.component(name).packages_from or name
        conditions = (row.when for user in (name, owner) for row in self.component(user).facts)
        used = sorted({*component.key}.union(*conditions))
        return (
            *(name, self.target.image, self.target.platforms, self.version(name), pin and pin.commit),
            *(self.target.axes["os"], self.version(owner)),
            *map(self.provider, component.build_requires),
            *(self.target.components.get(entry, self._axes.get(entry)) for entry in used),
        )

    def for_platform(self, platform: Platform) -> Recipe:
        """Return the recipe of the target for one of its platforms alone."""
        narrow = self.target.model_copy(update={"platforms": (platform,)})
        return Recipe(self.project, narrow, self._stages)

    def component(self, name: str) -> Component:
        return self.project.components[name].model

    def provider(self, wanted: str) -> str:
        """Return the component whose stage others build with when they require `wanted`."""
        return self._providers.get(wanted, wanted)

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """Return the components with a build stage that the target needs, each after those it builds on."""
        order: list[str] = []

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                where = self.project.components[name].at("build-requires")
                raise ConfigError(f"{where}: build-requires: goes in a circle: {' → '.join((*path, name))}")
            if name in order or name not in self._stages:
                return
            for i, wanted in enumerate(self.component(name).build_requires):
                provider = self.provider(wanted)
                if provider not in self._stages:
                    where = self.project.components[name].at("build-requires", i)
                    folder = self.project.folder(provider)
                    raise ConfigError(f"{where}: build-requires: {provider} has no stage; write {folder / 'build.j2'}")
                visit(provider, (*path, name))
            order.append(name)

        for name in self.target.components:
            if not self.component(name).stage_only or name in self.keyrings:
                visit(name, ())
        return tuple(order)

    @cached_property
    def archs(self) -> tuple[Arch, ...]:
        """Return the CPU architectures of the target's platforms."""
        return tuple(arch for arch in ARCHS if f"linux/{arch}" in self.target.platforms)

    @cached_property
    def keyrings(self) -> tuple[str, ...]:
        """Return the components whose repository the base image does not trust yet; their stages hold its key."""
        repositories = ((name, self.component(name).repository) for name in self.target.components)
        return tuple(name for name, repository in repositories if repository and not repository.configured)

    def pin(self, name: str) -> Pin | None:
        """Return the pin of a component, or None if its version is an axis."""
        return self.project.pin(name, self._axes)

    def version(self, name: str) -> str:
        """Return the version of a component. Raises ConfigError if the matrix has none for this target."""
        if name in self.target.components:
            return self.target.components[name]
        if version := self.project.version(name, self._axes):
            return version
        where = self.project.matrix.at("versions")
        raise ConfigError(f"{where}: versions: no version for {name}, which {self.target.id} is built with")

    def os(self, name: str) -> str:
        """Return the value of `os` that a component's stage is built on."""
        own = self.target.axes["os"]
        oldest = self.image.build_on or self.project.matrix.model.bases[own].build_on
        return (oldest or own) if self.component(name).portable else own

    def base(self, name: str) -> Base:
        """Return the distribution release that a component's stage is built on."""
        return self.project.matrix.model.bases[self.os(name)]

    def key(self, name: str) -> Mapping[str, str]:
        """Return what a component's stage may know of the target, besides its own version.

        Raises ConfigError for an entry that is neither an axis nor a component of the target.
        """
        known = {**self._axes, **self.target.components}
        for i, entry in enumerate(self.component(name).key):
            if entry not in known and entry != "gpu":
                where = self.project.components[name].at("key", i)
                problem = f"{entry!r} is neither an axis nor a component of {self.target.id}"
                raise ConfigError(f"{where}: key: {problem}{suggestion(entry, known)}")
        return {entry: known[entry] for entry in self.component(name).key if entry != "gpu"}

    def values(self, name: str, arch: Arch | None = None, *, stage: bool = False) -> Mapping[str, str]:
        """Return what templates of a component's sources and packages may use; of facts, the first row that fits.

        `stage`: for the build stage, which may be on an older base than the image.
        """
        own_axes = {**self.target.axes, "os": self.os(name)} if stage else self.target.axes
        version = self.version(name)
        result = {"version": version, "os": own_axes["os"], **self.key(name)}
        if arch:
            result |= {"arch": arch, "cpu": CPUS[arch]}
        providers = {wanted: self.provider(wanted) for wanted in self.component(name).build_requires}
        known = {**providers, **axis_facts(own_axes), "version": version, "image": self.target.image}
        return self._with_facts(name, result, known | ({"arch": arch} if arch else {}))

    def _with_facts(self, name: str, values: dict[str, str], known: Mapping[str, str]) -> dict[str, str]:
        """Return values with those of a component's facts whose conditions hold for what is known."""
        for fact, text in first_values(self.component(name).facts, known).items():
            values.setdefault(fact, self.fill(name, text, values, "facts"))
        return values

    def fill(self, name: str, template: str, values: Mapping[str, str], field: str) -> str:
        """Replace `{names}` in a template by values. Raises ConfigError for a name without a value."""
        try:
            return template.format_map(values)
        except (KeyError, ValueError, IndexError) as error:
            missing = str(error.args[0]) if isinstance(error, KeyError) else str(error)
            near = suggestion(missing, dict(values))
            problem = f"{template!r} for {self.target.id}: no value for {missing!r}{near}"
            if any(missing in row.values for row in self.component(name).facts):
                field, remedy = "facts", "choose another version, or add a row"
                problem = f"no row gives {missing!r} to {self.target.id} with {name} {values['version']}; {remedy}"
            raise ConfigError(f"{self.project.components[name].at(field)}: {field}: {problem}") from None

    def image_base(self) -> str:
        """Return the image, with its tag, that the target starts from."""
        if not self.image.base:
            return self.project.matrix.model.bases[self.target.axes["os"]].image
        return FIELD.sub(lambda match: self.target.axes[match[1]], self.image.base)

    def images(self, name: str) -> dict[str, str]:
        """Return label → image, with its tag, that a component's stage starts from or takes files from."""
        return {
            label: self.fill(name, text, self.values(name, stage=True), "images")
            for label, text in self.component(name).images.items()
        }

    def archives(self, name: str) -> dict[Arch, str]:
        """Return architecture → address of a component's archive."""
        template = self.component(name).archive or ""
        archs = self.archs if template else ()
        return {arch: self.fill(name, template, self.values(name, arch, stage=True), "archive") for arch in archs}

    def git(self, name: str) -> GitRef | None:
        """Return the git source of a component, or None if it has none."""
        component, pin = self.component(name), self.pin(name)
        if not component.git or pin is None:
            return None
        tag = self.fill(name, component.tag, {"version": pin.version.partition("+")[0]}, "tag")
        return GitRef(component.git, tag, pin.commit)

    def wheels(self, name: str) -> WheelSet | None:
        """Return the wheels of a component, or None if it has none."""
        owner = self.component(name).wheels_from or name
        if not self.component(owner).wheels:
            return None
        version = self.version(name)
        values = self._with_facts(owner, {"version": version}, {"version": version})
        wanted = tuple(self.fill(owner, text, values, "wheels") for text in self.component(owner).wheels)
        return WheelSet(owner, version, wanted)

    def packages(self, name: str, *, every: bool = False) -> tuple[str, ...]:
        """Return the packages that a component brings into the image, with versions where it has them.

        `every`: the packages of all variants.
        """
        packages, devel = self.component(name).packages, every or self.target.axes["variant"] == "devel"
        wanted = (*packages.runtime, *(packages.devel if devel else ()))
        values = self.values(name) if wanted else {}
        return tuple(self.fill(name, text, values, "packages") for text in wanted)

    def env(self, name: str) -> dict[str, str]:
        """Return the environment that a component gives an image, with what its archive, or the image's base, sets."""
        own = first_values(self.component(name).env, {**self._axes, "version": self.version(name)})
        values = self.values(name) if any("{" in text for text in own.values()) else {}
        filled = {variable: self.fill(name, value, values, "env") for variable, value in own.items()}
        return {**self.base_env(name), **self.unpacked_env(name), **filled}

    @cached_property
    def base_facts(self) -> Mapping[Platform, ImageFacts]:
        """Return platform → what the lock knows of the image's base; nothing if it is without facts."""
        image = self.project.lock.images.get(self.image_base())
        return (image and image.facts) or {}

    def base_env(self, name: str) -> dict[str, str]:
        """Return what a component takes of the environment of the image's base; nothing without facts."""
        by_platform: dict[str, dict[str, str]] = {}
        for platform in sorted(self.target.platforms) if self.base_facts else ():
            env = self.base_facts[platform].environment if platform in self.base_facts else {}
            own = [part for part in env.get("PATH", "").split(":") if part not in SYSTEM_PATH.split(":")]
            known = {**env, "PATH": ":".join(own)}
            by_platform[platform] = {v: known[v] for v in self.component(name).env_of_base if known.get(v)}
        return common_environment(by_platform)[0]

    def adaptations(self) -> Iterator[str]:
        """Yield a line for each thing in which the image differs from its archives and its base."""
        for name in self.stages:
            if unpacked := self.component(name).unpacked:
                yield from (f"{name}: {line}" for line in unpacked.environment(self.archive_facts(name))[1])
        for nccl, held in dict.fromkeys((facts.nccl, facts.held) for facts in self.base_facts.values()):
            if nccl and "nccl" in self.target.components:
                yield f"{self.image_base()}: has NCCL {nccl}, images {self.version('nccl')}"
            if held:
                yield f"{self.image_base()}: holds back {', '.join(held)}"

    def unpacked_env(self, name: str) -> dict[str, str]:
        """Return what the image takes of the environment that a component's archive sets; nothing without facts."""
        unpacked = self.component(name).unpacked
        if unpacked is None:
            return {}
        environment, _ = unpacked.environment(self.archive_facts(name))
        devel = self.target.axes["variant"] == "devel"
        return {variable: value for variable, value in environment.items() if devel or variable not in unpacked.devel}

    def archive_facts(self, name: str) -> dict[Arch, TreeFacts]:
        """Return architecture → what the lock knows of a component's archive; nothing is built for the others."""
        known = {arch: self.project.lock.archives.get(url) for arch, url in self.archives(name).items()}
        return {arch: entry.facts for arch, entry in known.items() if isinstance(entry, LockedArchive) and entry.facts}

    def libraries(self, name: str) -> tuple[str, ...]:
        """Return the folders of a component where the loader shall look, in this order."""
        unpacked = self.component(name).unpacked
        return self.component(name).libraries + (unpacked.libraries(self.unpacked_env(name)) if unpacked else ())

    def labels(self, name: str) -> dict[str, str]:
        templates = self.component(name).labels
        if not templates:
            return {}
        plugin = next((facts.plugins[0][1] for facts in self.archive_facts(name).values() if facts.plugins), "")
        values = {**self.values(name), "plugin": plugin}
        return {label: self.fill(name, text, values, "labels") for label, text in templates.items()}

    def repository(self, name: str, arch: Arch, *, stage: bool = False) -> Repository | None:
        """Return the repository of a component's packages for one architecture, or None if it has none."""
        owner = self.component(name).packages_from or name
        repository = self.component(owner).repository
        if repository is None:
            return None
        values = self.values(owner, arch, stage=stage)
        url, key = (self.fill(owner, text, values, "repository") for text in (repository.url, repository.key))
        return repository.model_copy(update={"url": url, "key": key})

    def sources(self) -> Iterator[Source]:
        """Return every source of the target, except the distribution's own archive, whose index is signed."""
        return (source for _, source in self.owned_sources())

    def owned_sources(self) -> Iterator[tuple[str, Source]]:
        """Yield each source with its owner: a component, a base (a value of `os`), or the image."""
        facts = any(self.component(name).env_of_base for name in self.target.components)
        yield self.target.image if self.image.base else self.target.axes["os"], BaseImage(self.image_base(), facts)
        for name in dict.fromkeys((*self.target.components, *self.stages)):
            component, stage = self.component(name), name in self.stages
            if stage:
                yield self.os(name), BaseImage(self.base(name).image)
                yield from ((name, BaseImage(reference)) for reference in self.images(name).values())
                yield from ((name, Archive(name, url, component.unpacked)) for url in self.archives(name).values())
                yield from ((name, source) for source in (self.git(name), self.wheels(name)) if source)
            # The repository for the image's release, and for that of the build stage.
            if not self.component(component.packages_from or name).repository:
                continue
            wanted = {False: self.packages(name)} if name in self.target.components else {}
            wanted |= {True: self.packages(name, every=True)} if stage else {}
            for arch, (of_stage, packages) in product(self.archs, wanted.items()):
                if repository := self.repository(name, arch, stage=of_stage):
                    yield name, PackageSource(repository.url, repository.suite, repository.key, packages)
