"""The recipe of a target, computed from the files of the project: stages, versions, facts, sources, packages, pins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import ARCHS, CPUS, Arch, axis_facts, satisfies
from imagebuild.project.component import Component, Repository, first_values
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Archive,
    BaseImage,
    GitRef,
    LockedArchive,
    PackageSource,
    Source,
    WheelSet,
    commit_of,
    digest_of,
    hash_of,
    pinned_text,
    wheels_of,
)
from imagebuild.project.matrix import FIELD, Image, Pin
from imagebuild.project.plan import Target
from imagebuild.project.project import Project
from imagebuild.render.recipe import BuildStage, GpuCode, OwnedSource, Part, PinnedPackages, Recipe

VERSION = "{version}"
"""The placeholder for the component's version in a template."""


@dataclass(frozen=True, eq=False)
class SharedParts:
    """Parts and stages that the recipes of one project share. Each is computed once."""

    project: Project
    parts: dict[tuple[object, ...], Part] = field(default_factory=dict)
    stages: dict[tuple[object, ...], BuildStage] = field(default_factory=dict)
    pins: dict[Source, str] = field(default_factory=dict)
    """Maps each source to its pin as text."""

    @cached_property
    def templates(self) -> frozenset[tuple[str, str]]:
        """Pairs of a component and the file name of one of its templates."""
        folders = {name: self.project.folder(name) for name in self.project.components}
        return frozenset((name, path.name) for name, folder in folders.items() for path in folder.glob("*.j2"))

    @cached_property
    def with_stage(self) -> frozenset[str]:
        """Components that have a build stage."""
        return frozenset(name for name, file in self.templates if file == "build.j2")

    @cached_property
    def roles(self) -> frozenset[str]:
        """All names in the `build-requires` of the components."""
        return frozenset(role for file in self.project.components.values() for role in file.model.build_requires)

    @cached_property
    def conditions(self) -> Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Maps each component to two lists: the axes that its stage depends on, and the axes of its environment."""
        result = {}
        for name, file in self.project.components.items():
            users = [self.project.components[user].model for user in {name, file.model.packages_from or name}]
            used = {entry for user in users for entry in user.key}
            used.update(entry for user in users for row in user.facts for entry in row.when)
            result[name] = (tuple(sorted(used)), tuple(sorted({entry for row in file.model.env for entry in row.when})))
        return result


def resolve_recipe(project: Project, target: Target, shared: SharedParts | None = None) -> Recipe:
    """Return the recipe of a target. Pass the same `shared` for all targets of a project to save time.

    Raises ConfigError if files contradict each other.
    """
    shared = shared or SharedParts(project)
    image = project.matrix.model.images[target.image]
    chosen = _Chosen(project, target, image, shared)
    order = _stage_order(chosen)
    names = dict.fromkeys((*target.components, *order))
    parts = {name: _part(chosen, name, with_stage=name in order) for name in names}
    stages = tuple(stage for name in order if (stage := parts[name].stage))
    reference = _base_reference(chosen)
    locked = project.lock.images.get(reference)
    facts = any(part.component.env_of_base for part in parts.values() if part.name in target.components)
    base = OwnedSource(target.image if image.base else target.axes["os"], BaseImage(reference, facts))
    sources = (base, *chain.from_iterable(part.sources for part in parts.values()))
    return Recipe(
        target=target,
        image=image,
        archs=chosen.archs,
        base=digest_of(project.lock, reference),
        is_bootstrapped=any(
            entry.release and entry.image == reference for entry in project.matrix.model.bases.values()
        ),
        base_facts=(locked and locked.facts) or {},
        parts=parts,
        stages=stages,
        gpu=next((s.gpu for s in stages if s.gpu), None) or _gpu_code(chosen, target.axes.get("cuda", "0")),
        sources=sources,
        lock_hash=_lock_hash(shared, parts, sources),
    )


@dataclass(frozen=True, eq=False)
class _Chosen:
    """A target, with the values that all of its parts depend on."""

    project: Project
    target: Target
    image: Image
    shared: SharedParts

    @cached_property
    def axes(self) -> Mapping[str, str]:
        return axis_facts(self.target.axes)

    @cached_property
    def archs(self) -> tuple[Arch, ...]:
        return tuple(arch for arch in ARCHS if f"linux/{arch}" in self.target.platforms)

    @cached_property
    def providers(self) -> Mapping[str, str]:
        """Maps each name in a `build-requires` to the component whose stage fulfils the requirement."""
        present, preferred = self.target.components, self.image.build_with
        return {role: self.project.provider(role, present, preferred) or role for role in self.shared.roles}

    def component(self, name: str) -> Component:
        return self.project.components[name].model

    def build_providers(self, name: str) -> dict[str, str]:
        """Map each requirement of a component's stage to the component whose stage fulfils it."""
        return {wanted: self.providers[wanted] for wanted in self.component(name).build_requires}

    def pin(self, name: str) -> Pin | None:
        return self.project.pin(name, self.axes)

    def version(self, name: str) -> str:
        """Return the version of a component. Raises ConfigError if the matrix has none for this target."""
        if name in self.target.components:
            return self.target.components[name]
        if version := self.project.version(name, self.axes):
            return version
        where, pin = self.project.matrix.at("versions"), self.component(name).pin or name
        problem = f"no version for {name}, which {self.target.id} is built with"
        raise ConfigError(f"{where}: versions: {problem}; add `{pin}: VERSION`")

    def os(self, name: str) -> str:
        """Return the release (a value of the axis `os`) that a component's stage is built on."""
        own = self.target.axes["os"]
        oldest = self.image.build_on or self.project.matrix.model.bases[own].build_on
        return (oldest or own) if self.component(name).portable else own


def _lock_hash(shared: SharedParts, parts: Mapping[str, Part], sources: tuple[OwnedSource, ...]) -> str:
    lines = [f"{name} {part.version}" for name, part in parts.items()]
    for source in dict.fromkeys(owned.source for owned in sources):
        if source not in shared.pins:
            shared.pins[source] = pinned_text(shared.project.lock, source)
        lines.append(shared.pins[source])
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _stage_order(chosen: _Chosen) -> tuple[str, ...]:
    """Return the components whose build stage the target needs, each after the components that it builds with."""
    project, with_stage = chosen.project, chosen.shared.with_stage
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            where = project.components[name].at("build-requires")
            circle = " → ".join((*path, name))
            raise ConfigError(f"{where}: build-requires: circular dependency: {circle}; remove one entry")
        if name in order or name not in with_stage:
            return
        for i, provider in enumerate(chosen.build_providers(name).values()):
            if provider not in with_stage:
                where = project.components[name].at("build-requires", i)
                template = project.folder(provider) / "build.j2"
                raise ConfigError(f"{where}: build-requires: {provider} has no build stage; write {template}")
            visit(provider, (*path, name))
        order.append(name)

    for name in chosen.target.components:
        repository = chosen.component(name).repository
        if not chosen.component(name).stage_only or (repository and not repository.configured):
            visit(name, ())
    return tuple(order)


def _base_reference(chosen: _Chosen) -> str:
    """Return the image, with its tag, that the target starts from."""
    if not chosen.image.base:
        return chosen.project.matrix.model.bases[chosen.target.axes["os"]].image
    return FIELD.sub(lambda match: chosen.target.axes[match[1]], chosen.image.base)


def _part(chosen: _Chosen, name: str, *, with_stage: bool) -> Part:
    """Return all that a component contributes to the target."""
    component, target, shared = chosen.component(name), chosen.target, chosen.shared
    in_image, devel = name in target.components, target.axes["variant"] == "devel"
    stage_key = _stage_key(chosen, name)
    pin = chosen.pin(name)
    of_env = (chosen.axes.get(entry) for entry in shared.conditions[name][1])
    part_key = (stage_key, id(pin), in_image, with_stage, devel, *of_env)
    if part_key in shared.parts:
        return shared.parts[part_key]
    stage = None
    if with_stage and not (stage := shared.stages.get(stage_key)):
        stage = shared.stages[stage_key] = _stage(chosen, name)
    packages = _packages(chosen, name, every=devel) if in_image else ()
    repository = _pinned_packages(chosen, name, packages, stage=False) if in_image else None
    shared.parts[part_key] = part = Part(
        name=name,
        file=chosen.project.components[name],
        version=chosen.version(name),
        pin=pin,
        stage=stage,
        packages=packages,
        repository=repository,
        versioned=tuple(_versioned(chosen, name, repository, every=bool(stage) or devel)) if repository else (),
        env=_env(chosen, name) if in_image else {},
        labels=_labels(chosen, name, stage) if in_image and component.labels else {},
        sources=(
            *(stage.sources if stage else ()),
            *_package_sources(name, chosen.archs, repository, stage.packages if stage else None),
        ),
    )
    return part


def _stage_key(chosen: _Chosen, name: str) -> tuple[object, ...]:
    """Return a value that is equal for all targets in which a component has the same stage.

    It contains the values of the key and of the conditions of facts, for the component and for the component that it
    takes packages from.
    """
    target, owner, pin = chosen.target, chosen.component(name).packages_from or name, chosen.pin(name)
    return (
        *(name, target.image, target.platforms, chosen.version(name), pin and pin.commit),
        *(target.axes["os"], chosen.version(owner)),
        *(chosen.providers[role] for user in (name, owner) for role in chosen.component(user).build_requires),
        *(target.components.get(entry, chosen.axes.get(entry)) for entry in chosen.shared.conditions[name][0]),
    )


def _stage(chosen: _Chosen, name: str) -> BuildStage:
    """Return the build stage of a component."""
    lock, component = chosen.project.lock, chosen.component(name)
    version, release = chosen.version(name), chosen.os(name)
    base = chosen.project.matrix.model.bases[release].image
    values = _values(chosen, name, stage=True)
    images = {label: _fill(chosen, name, text, values, "images") for label, text in component.images.items()}
    archives = _archives(chosen, name, component.archive) if component.archive else {}
    entries = {arch: lock.archives.get(url) for arch, url in archives.items()}
    git, wheels = _git(chosen, name), _wheels(chosen, name)
    owned = [OwnedSource(release, BaseImage(base))]
    owned += [OwnedSource(name, BaseImage(reference)) for reference in images.values()]
    owned += [OwnedSource(name, Archive(name, url, component.unpacked), arch) for arch, url in archives.items()]
    owned += [OwnedSource(name, source) for source in (git, wheels) if source]
    return BuildStage(
        name=name,
        component=component,
        version=version,
        os=release,
        base=digest_of(lock, base),
        key=_key(chosen, name),
        facts=values,
        providers=chosen.build_providers(name),
        git=git,
        commit=commit_of(lock, git) if git else None,
        archives={arch: {"url": url, "sha256": hash_of(lock, url)} for arch, url in archives.items()},
        archive_facts={a: e.facts for a, e in entries.items() if isinstance(e, LockedArchive) and e.facts},
        images={label: digest_of(lock, reference) for label, reference in images.items()},
        wheels=wheels_of(lock, wheels) if wheels else (),
        packages=_pinned_packages(chosen, name, None, stage=True),
        gpu=_gpu_code(chosen, values.get("toolkit", version)) if "gpu" in component.key else None,
        sources=tuple(owned),
    )


def _archives(chosen: _Chosen, name: str, template: str) -> dict[Arch, str]:
    """Return the address of a component's archive for each architecture."""
    values = {arch: _values(chosen, name, arch, stage=True) for arch in chosen.archs}
    return {arch: _fill(chosen, name, template, known, "archive") for arch, known in values.items()}


def _git(chosen: _Chosen, name: str) -> GitRef | None:
    """Return the git source of a component. Return None if it has none."""
    component, pin = chosen.component(name), chosen.pin(name)
    if not component.git or pin is None:
        return None
    tag = _fill(chosen, name, component.tag, {"version": pin.version.partition("+")[0]}, "tag")
    return GitRef(component.git, tag, pin.commit)


def _wheels(chosen: _Chosen, name: str) -> WheelSet | None:
    """Return the wheels of a component. Return None if it has none."""
    owner, version = chosen.component(name).wheels_from or name, chosen.version(name)
    if not chosen.component(owner).wheels:
        return None
    values = _with_facts(chosen, owner, {"version": version}, {"version": version})
    wanted = tuple(_fill(chosen, owner, text, values, "wheels") for text in chosen.component(owner).wheels)
    return WheelSet(owner, version, wanted)


def _packages(chosen: _Chosen, name: str, *, every: bool) -> tuple[str, ...]:
    """Return a component's packages for the runtime variant, or with `every` for all variants."""
    packages = chosen.component(name).packages
    wanted = (*packages.runtime, *(packages.devel if every else ()))
    values = _values(chosen, name) if wanted else {}
    return tuple(_fill(chosen, name, text, values, "packages") for text in wanted)


def _pinned_packages(
    chosen: _Chosen, name: str, packages: tuple[str, ...] | None, *, stage: bool
) -> PinnedPackages | None:
    """Return packages with their repository. Return None if they come from the distribution's own archive.

    `packages`: None means the packages of all variants. `stage`: use the release that the stage is built on instead of
    the image's release.
    """
    owner = chosen.component(name).packages_from or name
    repository = chosen.component(owner).repository
    if repository is None:
        return None
    packages = _packages(chosen, name, every=True) if packages is None else packages
    by_arch: dict[Arch, Repository] = {}
    for arch in chosen.archs:
        values = _values(chosen, owner, arch, stage=stage)
        url, key = (_fill(chosen, owner, text, values, "repository") for text in (repository.url, repository.key))
        by_arch[arch] = repository.model_copy(update={"url": url, "key": key})
    known = chosen.project.lock.repositories
    locked = [known[entry.url] for entry in by_arch.values() if entry.url in known]
    return PinnedPackages(
        repositories=by_arch,
        packages=packages,
        fingerprint=locked[0].fingerprint if locked else UNRESOLVED,
        versions={p: {entry.packages[p] for entry in locked if p in entry.packages} for p in packages},
    )


def _package_sources(name: str, archs: tuple[Arch, ...], *wanted: PinnedPackages | None) -> Iterator[OwnedSource]:
    """Yield the package repositories of a component, for the image and for the build stage."""
    for arch in archs:
        for pinned in filter(None, wanted):
            found = pinned.repositories[arch]
            yield OwnedSource(name, PackageSource(found.url, found.suite, found.key, pinned.packages), arch)


def _versioned(
    chosen: _Chosen, name: str, repository: PinnedPackages, *, every: bool
) -> Iterator[tuple[PackageSource, str]]:
    """Yield each package whose version contains the component's version, with the template of its version."""
    packages = chosen.component(name).packages
    used = (*packages.runtime, *(packages.devel if every else ()))
    texts = [text for text in used if VERSION in text and "=" in text]
    for arch, found in repository.repositories.items():
        for text in texts:
            values = {**_values(chosen, name, arch), "version": VERSION}
            package, _, template = _fill(chosen, name, text, values, "packages").partition("=")
            yield PackageSource(found.url, found.suite, found.key, (package,)), template


def _env(chosen: _Chosen, name: str) -> dict[str, str]:
    """Return the variables that a component itself sets in the image."""
    own = first_values(chosen.component(name).env, {**chosen.axes, "version": chosen.version(name)})
    values = _values(chosen, name) if any("{" in text for text in own.values()) else {}
    return {variable: _fill(chosen, name, text, values, "env") for variable, text in own.items()}


def _labels(chosen: _Chosen, name: str, stage: BuildStage | None) -> dict[str, str]:
    """Return the labels that a component adds to the image."""
    archives = stage.archive_facts.values() if stage else ()
    plugin = next((facts.plugins[0][1] for facts in archives if facts.plugins), "")
    values = {**_values(chosen, name), "plugin": plugin}
    return {label: _fill(chosen, name, text, values, "labels") for label, text in chosen.component(name).labels.items()}


def _gpu_code(chosen: _Chosen, toolkit: str) -> GpuCode:
    """Return the wanted compute capabilities that a CUDA toolkit can compile for."""
    matrix, generation = chosen.project.matrix, chosen.target.axes.get("gpu")
    wanted = {n: gpu for n, gpu in matrix.model.gpu_architectures.items() if generation in (None, n)}
    supported = {n: gpu for n, gpu in wanted.items() if satisfies(toolkit, gpu.cuda)}
    by_arch = {str(arch): tuple(n for n, gpu in supported.items() if arch in gpu.arch) for arch in ARCHS}
    return GpuCode(toolkit, generation, by_arch, chosen.archs, matrix.at("gpu-architectures"))


# Templates of component.yaml


def _key(chosen: _Chosen, name: str) -> dict[str, str]:
    """Map each entry of a component's `key` to its value.

    Raises ConfigError for an entry that is neither an axis nor a component of the target.
    """
    known = {**chosen.axes, **chosen.target.components}
    for i, entry in enumerate(chosen.component(name).key):
        if entry not in known and entry != "gpu":
            where = chosen.project.components[name].at("key", i)
            problem = f"{entry!r} is neither an axis nor a component of {chosen.target.id}"
            raise ConfigError(f"{where}: key: {problem}{suggestion(entry, known)}")
    return {entry: known[entry] for entry in chosen.component(name).key if entry != "gpu"}


def _values(chosen: _Chosen, name: str, arch: Arch | None = None, *, stage: bool = False) -> dict[str, str]:
    """Return the values that the templates of a component's sources and packages may use.

    `stage`: use the release that the stage is built on, which may be older than the image's release.
    """
    own_axes = {**chosen.target.axes, "os": chosen.os(name)} if stage else chosen.target.axes
    version, of_arch = chosen.version(name), {"arch": arch} if arch else {}
    result = {"version": version, "os": own_axes["os"], **_key(chosen, name), **of_arch}
    if arch:
        result["cpu"] = CPUS[arch]
    known = {**chosen.build_providers(name), **axis_facts(own_axes), "version": version, "image": chosen.target.image}
    return _with_facts(chosen, name, result, {**known, **of_arch})


def _with_facts(chosen: _Chosen, name: str, values: dict[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Add a component's facts to `values`. Each fact is from the first row whose condition holds for `known`."""
    for fact, text in first_values(chosen.component(name).facts, known).items():
        values.setdefault(fact, _fill(chosen, name, text, values, "facts"))
    return values


def _fill(chosen: _Chosen, name: str, template: str, values: Mapping[str, str], field: str) -> str:
    """Replace each `{name}` in a template by its value. Raises ConfigError for a name without a value."""
    try:
        return template.format_map(values)
    except (KeyError, ValueError, IndexError) as error:
        missing = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        near = suggestion(missing, dict(values))
        problem = f"{template!r} for {chosen.target.id}: no value for {missing!r}{near}"
        if any(missing in row.values for row in chosen.component(name).facts):
            field, remedy = "facts", "choose another version, or add a row"
            problem = f"no row sets {missing!r} for {chosen.target.id} with {name} {values['version']}; {remedy}"
        raise ConfigError(f"{chosen.project.components[name].at(field)}: {field}: {problem}") from None
