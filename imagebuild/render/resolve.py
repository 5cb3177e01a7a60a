"""The recipe of a target (everything that its Dockerfile is made from), computed from the files of the project."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import ARCHS, CPUS, Arch, axis_facts, satisfies
from imagebuild.project import lockfile
from imagebuild.project.component import Component, PackageRepository, first_values
from imagebuild.project.matrix import FIELD, Image, Pin, package_name
from imagebuild.project.plan import Target
from imagebuild.project.project import Project
from imagebuild.render.recipe import BuildStage, OwnedSource, Part, PinnedPackages, Recipe

ODD_FIELD = re.compile(r"{[^{}]*[.\[!:][^{}]*}")
"""Matches a placeholder of a template with an attribute, an index, a conversion or a format, such as a width."""
LONGEST = 256 << 10
"""Maximum number of characters of a filled template."""
VERSION = "{version}"
"""The placeholder for the component's version in a template."""


@dataclass(frozen=True, eq=False)
class SharedParts:
    """Parts and build stages that several recipes of a project share.

    A part is everything that a component contributes to a target. The keys are the inputs: targets with equal inputs
    share a part or a build stage."""

    project: Project
    parts: dict[tuple[object, ...], Part] = field(default_factory=dict)
    stages: dict[tuple[object, ...], BuildStage] = field(default_factory=dict)

    @cached_property
    def with_stage(self) -> frozenset[str]:
        """Names of the components that have a build stage."""
        folders = {name: self.project.folder(name) for name in self.project.components}
        return frozenset(name for name, folder in folders.items() if (folder / "build.j2").exists())

    @cached_property
    def roles(self) -> frozenset[str]:
        """All names in the `build-requires` of components."""
        return frozenset(role for file in self.project.components.values() for role in file.model.build_requires)

    @cached_property
    def stage_inputs(self) -> dict[str, tuple[str, ...]]:
        """Maps each component to the axes and components that its build stage depends on."""
        result = {}
        for name, file in self.project.components.items():
            users = [file.model, self.project.components[file.model.packages_from or name].model]
            used = {entry for user in users for entry in user.key}
            used.update(entry for user in users for row in user.facts for entry in row.when)
            result[name] = tuple(sorted(used))
        return result


def resolve_recipe(project: Project, target: Target, shared: SharedParts | None = None) -> Recipe:
    """Return the recipe of a target: everything that its Dockerfile is made from.

    To save time, pass the same `shared` for all targets of a project. Raises ConfigError if files contradict each
    other."""
    matrix, lock = project.matrix.model, project.lock
    image = matrix.images[target.image]
    chosen = _Chosen(project, target, image, shared or SharedParts(project))
    order = _stage_order(chosen)
    parts = {name: _part(chosen, name, with_stage=name in order) for name in (*target.components, *order)}
    stages = tuple(stage for name in order if (stage := parts[name].stage))
    of_release = matrix.bases[target.axes["os"]].image
    reference = FIELD.sub(lambda match: target.axes[match[1]], image.base) if image.base else of_release
    locked = lock.images.get(reference)
    facts = any(chosen.component(name).env_of_base for name in target.components)
    base = OwnedSource(target.image if image.base else target.axes["os"], lockfile.BaseImage(reference, facts))
    sources = (base, *chain.from_iterable(part.sources for part in parts.values()))
    versions = (f"{name} {part.version}" for name, part in parts.items())
    pins = (lockfile.pinned_text(lock, source) for source in dict.fromkeys(owned.source for owned in sources))
    return Recipe(
        target=target, image=image, base=lockfile.digest_of(lock, reference),
        is_bootstrapped=any(entry.release and entry.image == reference for entry in matrix.bases.values()),
        base_facts=(locked and locked.facts) or {}, parts=parts, stages=stages,
        toolkit=next((stage.toolkit for stage in stages if stage.toolkit), target.axes.get("cuda", "0")),
        sources=sources, lock_hash=hashlib.sha256("\n".join((*versions, *pins)).encode()).hexdigest()[:12],
    )  # fmt: skip


def gpu_capabilities(project: Project, target: Target, toolkit: str) -> dict[str, tuple[str, ...]]:
    """Map each CPU architecture to the compute capabilities that a CUDA toolkit can compile for.

    `toolkit` is the version of the CUDA toolkit. Only compute capabilities in `gpu-architectures` of the matrix are
    considered; with an axis `gpu`, only its value. Raises ConfigError if no compute capability is left for an
    architecture of the target."""
    generation = target.axes.get("gpu")
    wanted = {n: gpu for n, gpu in project.matrix.model.gpu_architectures.items() if generation in (None, n)}
    supported = {n: gpu for n, gpu in wanted.items() if satisfies(toolkit, gpu.cuda)}
    result = {str(arch): tuple(n for n, gpu in supported.items() if arch in gpu.arch) for arch in ARCHS}
    if lacking := [arch for arch in archs_of(target) if not result[arch]]:
        what = f"CUDA {toolkit}, {' and '.join(lacking)}" + (f" and gpu {generation}" if generation else "")
        where, remedy = project.matrix.at("gpu-architectures"), "add an entry, or change the versions of the image"
        if others := [f"linux/{arch}" for arch in archs_of(target) if arch not in lacking]:
            where = project.matrix.at("images", target.image, "platforms")
            remedy = f"write `platforms: [{', '.join(others)}]` below images.{target.image}, or change its versions"
        raise ConfigError(f"{where}: gpu-architectures: no entry fits {what}; {remedy}")
    return result


def archs_of(target: Target) -> tuple[Arch, ...]:
    """Return the CPU architectures of a target's platforms."""
    return tuple(arch for arch in ARCHS if f"linux/{arch}" in target.platforms)


@dataclass(frozen=True, eq=False)
class _Chosen:
    project: Project
    target: Target
    image: Image
    shared: SharedParts

    @cached_property
    def axes(self) -> Mapping[str, str]:
        return axis_facts(self.target.axes)

    def component(self, name: str) -> Component:
        return self.project.components[name].model

    @cached_property
    def providers(self) -> Mapping[str, str]:
        """Maps each name in the `build-requires` of components to the component whose build stage is used."""
        present, preferred = self.target.components, self.image.build_with
        return {role: self.project.provider(role, present, preferred) or role for role in self.shared.roles}

    def build_providers(self, name: str) -> dict[str, str]:
        """Map each name in the `build-requires` of one component to the component whose build stage is used for it."""
        return {role: self.providers[role] for role in self.component(name).build_requires}

    def pin(self, name: str) -> Pin | None:
        return self.project.pin(name, self.axes)

    def version(self, name: str) -> str:
        """Return the version of a component. Raises ConfigError if the matrix has no version for this target."""
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


def _stage_order(chosen: _Chosen) -> tuple[str, ...]:
    """Return the components whose build stage the target needs, each after the components whose stages it uses."""
    project = chosen.project
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            where = project.components[name].at("build-requires")
            circle = " → ".join((*path, name))
            raise ConfigError(f"{where}: build-requires: circular dependency: {circle}; remove one entry")
        if name in order or name not in chosen.shared.with_stage:
            return
        for i, (wanted, provider) in enumerate(chosen.build_providers(name).items()):
            if provider not in chosen.shared.with_stage:
                where = project.components[name].at("build-requires", i)
                others = [
                    c
                    for c in sorted(chosen.shared.with_stage, key=lambda c: (c != wanted, c))
                    if wanted in (c, *project.components[c].model.provides)
                ]
                remedy = f"write {project.folder(provider) / 'build.j2'}"
                if packages := _packages(chosen, provider, every=True):
                    names = ", ".join(f'"{package.partition("=")[0]}"' for package in packages)
                    remedy = f"remove it here, and write {{{{ apt(os, [{names}]) }}}} in {name}/build.j2"
                    if f"{wanted}-abi" in chosen.shared.with_stage:
                        remedy = f"require {wanted}-abi, the interface for compiling"
                if others and provider in chosen.target.components:
                    replaced = f"replace it: --without {provider} --with {others[0]}"
                    remedy = f"{remedy}; or {replaced}" if packages else replaced
                raise ConfigError(f"{where}: build-requires: {provider} has no build stage; {remedy}")
            visit(provider, (*path, name))
        order.append(name)

    for name in chosen.target.components:
        repository = chosen.component(name).repository
        if not chosen.component(name).stage_only or (repository and not repository.configured):
            visit(name, ())
    return tuple(order)


def _part(chosen: _Chosen, name: str, *, with_stage: bool) -> Part:
    """Return everything that a component contributes to the target. Targets with equal inputs share the result."""
    target, shared = chosen.target, chosen.shared
    owner = chosen.component(name).packages_from or name
    stage_inputs = (
        *(name, target.image, target.platforms, target.axes["os"]),
        *(chosen.version(name), id(chosen.pin(name)), chosen.version(owner)),
        *chosen.build_providers(name).values(),
        *(target.components.get(entry, chosen.axes.get(entry)) for entry in shared.stage_inputs[name]),
        _python_packages(chosen, name) if chosen.component(name).python_environment else None,
    )
    env = (chosen.axes.get(entry) for row in chosen.component(name).env for entry in row.when)
    inputs = (*stage_inputs, with_stage, name in target.components, target.axes["variant"], *env)
    if inputs not in shared.parts:
        if with_stage and stage_inputs not in shared.stages:
            shared.stages[stage_inputs] = _stage(chosen, name)
        shared.parts[inputs] = _new_part(chosen, name, shared.stages[stage_inputs] if with_stage else None)
    return shared.parts[inputs]


def _new_part(chosen: _Chosen, name: str, stage: BuildStage | None) -> Part:
    """Return everything that a component contributes to the target, without looking for a shared result."""
    in_image, devel = name in chosen.target.components, chosen.target.axes["variant"] == "devel"
    repository = _pinned_packages(chosen, name, every=devel, stage=False) if in_image else None
    signed = [packages for packages in (repository, stage and stage.packages) if packages]
    return Part(
        name=name, file=chosen.project.components[name], version=chosen.version(name), pin=chosen.pin(name),
        stage=stage, packages=_packages(chosen, name, every=devel) if in_image else (), repository=repository,
        versioned=tuple(_versioned(chosen, name, repository, every=bool(stage) or devel)) if repository else (),
        env=_env(chosen, name) if in_image else {},
        labels=_labels(chosen, name, stage) if in_image and chosen.component(name).labels else {},
        sources=(
            *(stage.sources if stage else ()),
            *(OwnedSource(name, p.source(arch, p.packages), arch) for arch in archs_of(chosen.target) for p in signed),
        ),
    )  # fmt: skip


def _stage(chosen: _Chosen, name: str) -> BuildStage:
    lock, component = chosen.project.lock, chosen.component(name)
    version, release = chosen.version(name), chosen.os(name)
    base = chosen.project.matrix.model.bases[release].image
    facts = _values(chosen, name, stage=True)
    images = {label: _fill(chosen, name, text, facts, "images") for label, text in component.images.items()}
    archives: dict[Arch, str] = {}
    if component.archive:
        for arch in archs_of(chosen.target):
            known = _values(chosen, name, arch, stage=True)
            archives[arch] = _fill(chosen, name, component.archive, known, "archive")
    entries = {arch: lock.archives.get(url) for arch, url in archives.items()}
    git, wheels = _git(chosen, name), _wheels(chosen, name)
    owned = [OwnedSource(release, lockfile.BaseImage(base))]
    owned += [OwnedSource(name, lockfile.BaseImage(reference)) for reference in images.values()]
    unpacked = component.unpacked
    owned += [OwnedSource(name, lockfile.Archive(name, url, unpacked), arch) for arch, url in archives.items()]
    owned += [OwnedSource(name, source) for source in (git, wheels) if source]
    return BuildStage(
        name=name, component=component,
        values={
            "name": name, "version": version, "os": release, "base": lockfile.digest_of(lock, base),
            "git": component.git, "commit": lockfile.commit_of(lock, git) if git else None,
            "archives": {arch: {"url": url, "sha256": lockfile.hash_of(lock, url)} for arch, url in archives.items()},
            "images": {label: lockfile.digest_of(lock, reference) for label, reference in images.items()},
            "wheels": [wheel.model_dump() for wheel in lockfile.wheels_of(lock, wheels)] if wheels else [],
            "key": {entry.replace("-", "_"): value for entry, value in _key(chosen, name).items()},
            "facts": {fact.replace("-", "_"): value for fact, value in facts.items()},
            "stage": chosen.build_providers(name),
        },
        tag=git.tag if git and not git.commit else "",
        toolkit=facts.get("toolkit", version) if "gpu" in component.key else "",
        archive_facts={a: e.facts for a, e in entries.items() if isinstance(e, lockfile.LockedArchive) and e.facts},
        packages=_stage_packages(chosen, name), sources=tuple(owned),
    )  # fmt: skip


def _git(chosen: _Chosen, name: str) -> lockfile.GitRef | None:
    component, pin = chosen.component(name), chosen.pin(name)
    if not component.git or pin is None:
        return None
    tag = _fill(chosen, name, component.tag, {"version": pin.version.partition("+")[0]}, "tag")
    return lockfile.GitRef(component.git, tag, pin.commit)


def _wheels(chosen: _Chosen, name: str) -> lockfile.WheelSet | None:
    if chosen.component(name).python_environment:
        return _python_packages(chosen, name)
    owner, version = chosen.component(name).wheels_from or name, chosen.version(name)
    if not chosen.component(owner).wheels:
        return None
    values = _with_facts(chosen, owner, {"version": version}, {"version": version})
    wanted = tuple(_fill(chosen, owner, text, values, "wheels") for text in chosen.component(owner).wheels)
    return lockfile.WheelSet(owner, version, wanted)


def _python_packages(chosen: _Chosen, name: str) -> lockfile.WheelSet:
    """Return all Python packages of the image.
    Raises ConfigError if there are none, or if the image states a package whose files one of its components brings."""
    present, own = chosen.target.components, chosen.image.python
    wanted = [f"{package}=={version}" for package, version in own.items()]
    for part in present:
        values = {"version": present[part]}
        wanted += [_fill(chosen, part, text, values, "python") for text in chosen.component(part).python]
    without = {package: part for part in present for package in chosen.component(part).instead_of_python}
    installed = {package_name(t.partition("=")[0]): part for part in present for t in chosen.component(part).python}
    brought = installed | without
    where, image = chosen.project.matrix.at, chosen.target.image
    for package in own:
        if owner := brought.get(package_name(package)):
            problem = f"the component {owner} brings this package; remove the entry, or the component"
            raise ConfigError(
                f"{where('images', image, 'python', package)}: images.{image}.python.{package}: {problem}"
            )
    if not wanted:
        problem = "the image has no Python package; add one, such as `python: {numpy: VERSION}`"
        raise ConfigError(f"{where('images', image)}: images.{image}: {problem}")
    version = chosen.version(name)
    return lockfile.WheelSet(name, version, tuple(sorted(wanted)), version, tuple(sorted(without)))


def _packages(chosen: _Chosen, name: str, *, every: bool) -> tuple[str, ...]:
    """Return the packages of a component that `runtime` images install. With `every`, of all images."""
    packages = chosen.component(name).packages
    wanted = (*packages.runtime, *(packages.devel if every else ()))
    values = _values(chosen, name) if wanted else {}
    return tuple(_fill(chosen, name, text, values, "packages") for text in wanted)


def _stage_packages(chosen: _Chosen, name: str) -> PinnedPackages | None:
    """Return the packages of a component for its build stage. The keys are also those of the image's release, because
    the image gets its keyring from the stage."""
    own, image = (_pinned_packages(chosen, name, every=True, stage=stage) for stage in (True, False))
    if not own or not image or lockfile.UNRESOLVED in {**own.keys, **image.keys}:
        return own
    return replace(own, keys={**own.keys, **{key: url for key, url in image.keys.items() if key not in own.keys}})


def _pinned_packages(chosen: _Chosen, name: str, *, every: bool, stage: bool) -> PinnedPackages | None:
    """Return the packages of a component, with their signed repository.

    Return None if the packages come from the distribution's own archive. `every`: include the packages of all variants.
    `stage`: use the release that the stage is built on instead of the image's release."""
    owner = chosen.component(name).packages_from or name
    repository = chosen.component(owner).repository
    if repository is None:
        return None
    packages = _packages(chosen, name, every=every)
    by_arch: dict[Arch, PackageRepository] = {}
    for arch in archs_of(chosen.target):
        values = _values(chosen, owner, arch, stage=stage)
        url, key = (_fill(chosen, owner, text, values, "repository") for text in (repository.url, repository.key))
        by_arch[arch] = repository.model_copy(update={"url": url, "key": key})
    known = chosen.project.lock.repositories
    locked = [known[entry.url] for entry in by_arch.values() if entry.url in known]
    keys: dict[str, str] = {}
    for entry in by_arch.values():
        if entry.url in known:
            keys.setdefault(known[entry.url].fingerprint, entry.key)
    return PinnedPackages(
        repositories=by_arch, packages=packages, keys=keys or {lockfile.UNRESOLVED: next(iter(by_arch.values())).key},
        versions={p: {entry.packages[p] for entry in locked if p in entry.packages} for p in packages},
        release=chosen.target.axes["os"],
    )  # fmt: skip


def _versioned(
    chosen: _Chosen, name: str, repository: PinnedPackages, *, every: bool
) -> Iterator[tuple[lockfile.PackageSource, str]]:
    """Yield each package whose version contains the component's version: its repository, and a template.
    The template is the version of the package with the placeholder `{version}`, such as `{version}-1`."""
    packages = chosen.component(name).packages
    used = (*packages.runtime, *(packages.devel if every else ()))
    texts = [text for text in used if VERSION in text and "=" in text]
    for arch in repository.repositories:
        for text in texts:
            values = {**_values(chosen, name, arch), "version": VERSION}
            package, _, template = _fill(chosen, name, text, values, "packages").partition("=")
            yield repository.source(arch, (package,)), template


def _env(chosen: _Chosen, name: str) -> dict[str, str]:
    own = first_values(chosen.component(name).env, {**chosen.axes, "version": chosen.version(name)})
    values = _values(chosen, name) if any("{" in text for text in own.values()) else {}
    return {variable: _fill(chosen, name, text, values, "env") for variable, text in own.items()}


def _labels(chosen: _Chosen, name: str, stage: BuildStage | None) -> dict[str, str]:
    archives = stage.archive_facts.values() if stage else ()
    plugin = next((facts.plugins[0][1] for facts in archives if facts.plugins), "")
    values = {**_values(chosen, name), "plugin": plugin}
    return {label: _fill(chosen, name, text, values, "labels") for label, text in chosen.component(name).labels.items()}


def _key(chosen: _Chosen, name: str) -> dict[str, str]:
    """Map each entry of a component's `key`, except `gpu`, to its value.
    Raises ConfigError for an entry that is neither an axis nor a component of the target."""
    known = {**chosen.axes, **chosen.target.components}
    for i, entry in enumerate(chosen.component(name).key):
        if entry not in known and entry != "gpu":
            where = chosen.project.components[name].at("key", i)
            problem = f"{entry!r} is neither an axis nor a component of {chosen.target.id}"
            raise ConfigError(f"{where}: key: {problem}{suggestion(entry, known)}")
    return {entry: known[entry] for entry in chosen.component(name).key if entry != "gpu"}


def _values(chosen: _Chosen, name: str, arch: Arch | None = None, *, stage: bool = False) -> dict[str, str]:
    """Return the values for the templates in a component's sources and packages.
    `stage`: use the OS release of the component's build stage, which may be older than the image's release."""
    own_axes = {**chosen.target.axes, "os": chosen.os(name)} if stage else chosen.target.axes
    version, of_arch = chosen.version(name), {"arch": arch} if arch else {}
    result = {"version": version, "os": own_axes["os"], **_key(chosen, name), **of_arch}
    if arch:
        result["cpu"] = CPUS[arch]
    known = {**chosen.build_providers(name), **axis_facts(own_axes), "version": version, "image": chosen.target.image}
    return _with_facts(chosen, name, result, {**known, **of_arch})


def _with_facts(chosen: _Chosen, name: str, values: dict[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Add the `facts` of a component (values for templates) to `values`, and return `values`.

    For each name, the first row that sets the name and whose condition holds for `known` is used. Existing values are
    kept."""
    for fact, text in first_values(chosen.component(name).facts, known).items():
        values.setdefault(fact, _fill(chosen, name, text, values, "facts"))
    return values


def _fill(chosen: _Chosen, name: str, template: str, values: Mapping[str, str], field: str) -> str:
    """Replace each `{name}` in a template by its value. Raises ConfigError for a name without a value."""
    try:
        if odd := ODD_FIELD.search(re.sub("{{|}}", "", template)):
            raise ConfigError(f"{odd[0]!r:.200} has a format; write only the name in braces")
        if len(template) + template.count("{") * max(map(len, values.values()), default=0) > LONGEST:
            raise ConfigError(f"{template!r:.200} becomes longer than {LONGEST >> 10} kB; shorten its values")
        return template.format_map(values)
    except (ConfigError, KeyError, ValueError, IndexError) as error:
        missing = str(error.args[0])
        problem = missing
        if not isinstance(error, ConfigError):
            near = suggestion(missing, dict(values))
            problem = f"{template!r} for {chosen.target.id}: no value for {missing!r}{near}"
        if any(missing in row.values for row in chosen.component(name).facts):
            field, remedy = "facts", "choose another version, or add a row"
            problem = f"no row sets {missing!r} for {chosen.target.id} with {name} {values['version']}; {remedy}"
        raise ConfigError(f"{chosen.project.components[name].at(field)}: {field}: {problem}") from None
