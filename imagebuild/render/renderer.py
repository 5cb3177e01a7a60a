"""Render the Dockerfile of a target from templates. Pure, but for reading them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import jinja2

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Arch, Platform, satisfies
from imagebuild.project.load import Project
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Lock,
    Source,
    commit_of,
    digest_of,
    hash_of,
    pinned_text,
    repository_of,
    wheels_of,
)
from imagebuild.project.matrix import Target
from imagebuild.project.plan import Pins
from imagebuild.render.recipe import ARCHS, Recipe


@dataclass(frozen=True)
class Dockerfile:
    """A rendered target."""

    text: str

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Stage → key: digest of all that it depends on, in order of appearance."""
        return stage_keys(self.text)


def stage_keys(text: str) -> dict[str, str]:
    """Stage → digest of all that it depends on, on any platform, for each stage of a Dockerfile."""
    from imagebuild.render import stages  # noqa: PLC0415 - rendering needs no keys

    return stages.stage_keys(text, [stages.Setting(platform, "linux/amd64") for platform in get_args(Platform)])


def spaced(text: str) -> str:
    """One blank line at most in a row, and one after each heredoc: easier on the eye, and hadolint needs it."""
    text = text.replace("\nEOF\n", "\nEOF\n\n")
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip() + "\n"


SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LISTS = ("CPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PATH", "PKG_CONFIG_PATH")
"""Variables that are lists of folders: components prepend to them instead of setting them."""


def hash_of_lock(recipe: Recipe, lock: Lock, pins: dict[Source, str] | None = None) -> str:
    """Return the digest of all versions and pins that the target's Dockerfile contains, 12 hex digits.

    `pins` remembers what the lock has for a source, for the next target.
    """
    pins = {} if pins is None else pins
    names = dict.fromkeys((*recipe.target.components, *recipe.stages))
    parts = [f"{name} {recipe.version(name)}" for name in names]
    for source in dict.fromkeys(recipe.sources()):
        if source not in pins:
            pins[source] = pinned_text(lock, source)
        parts.append(pins[source])
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def package_arguments(recipe: Recipe, lock: Lock) -> list[str]:
    """Packages to install, as apt-get takes them. Raises ConfigError if the lock lacks a version."""
    chosen: set[str] = set()
    for name in recipe.target.components:
        own = recipe.of(name).packages_from or recipe.of(name).repository
        for package in recipe.packages(name):
            if "=" not in package:
                chosen.add(f"{package}={_exact(recipe, name, package, lock, stage=False)}" if own else package)
            else:
                # The archive keeps one version; what may change is a stable update's or a rebuild's suffix.
                chosen.add(package if own else f"'{package}*'")
    return sorted(chosen, key=lambda p: p.strip("'"))


def package_repository(recipe: Recipe, name: str, lock: Lock, *, stage: bool = False) -> dict[str, Any] | None:
    """What templates need to know of a component's own repository of packages."""
    urls = _urls(recipe, name, stage=stage)
    if not urls or not recipe.of(name).repository:
        return None
    arch, url = next(iter(urls.items()))
    first = recipe.repository(name, arch, stage=stage)
    assert first
    entry = repository_of(lock, url)
    about = {"name": first.name, "suite": first.suite, "key": first.key, "urls": urls, "stage": name}
    if first.configured:
        return about
    every = [f"{p}={_exact(recipe, name, p, lock, stage=stage)}" for p in recipe.packages(name, every=True)]
    return {**about, "fingerprint": entry if isinstance(entry, str) else entry.fingerprint, "packages": every}


def image_environment(recipe: Recipe) -> dict[str, str]:
    """Variables of the image. Raises ConfigError if two components contradict each other."""
    env: dict[str, str] = {"PATH": SYSTEM_PATH}
    for name in recipe.target.components:
        for variable, value in recipe.env(name).items():
            if variable in LISTS:
                env[variable] = f"{value}:{env[variable]}" if variable in env else value
            elif env.setdefault(variable, value) != value:
                where = recipe.project.components[name].at("env", variable)
                raise ConfigError(f"{where}: env.{variable}: {value!r}, but another component says {env[variable]!r}")
    return env


def image_labels(recipe: Recipe, digest: str, base: str) -> dict[str, str]:
    """Labels of the image; `digest` is the lock's hash, `base` the image it starts from."""
    target = recipe.target
    base_name, _, base_digest = base.partition("@")
    result = {
        "org.opencontainers.image.title": target.image,
        "org.opencontainers.image.description": recipe.image.description,
        "org.opencontainers.image.version": target.name.rpartition(":")[2],
        "org.opencontainers.image.base.name": base_name,
        "org.opencontainers.image.base.digest": base_digest,
        "org.opencontainers.image.licenses": " AND ".join(
            sorted({f"({recipe.of(c).license})" for c in target.components})
        ),
        "imagebuild.target": target.id,
        "imagebuild.lock": digest,
    }
    result |= {f"imagebuild.axis.{axis}": value for axis, value in target.axes.items()}
    result |= {f"imagebuild.component.{c}": version for c, version in target.components.items()}
    for name in target.components:
        values = recipe.values(name)
        result |= {f"imagebuild.{k}": recipe.fill(name, v, values, "labels") for k, v in recipe.of(name).labels.items()}
    return {label: value for label, value in result.items() if value}


def _exact(recipe: Recipe, name: str, package: str, lock: Lock, *, stage: bool) -> str:
    """Version of a package of a repository; all architectures must agree, as one Dockerfile is for all."""
    urls = _urls(recipe, name, stage=stage)
    found = set()
    for url in urls.values():
        entry = repository_of(lock, url)
        found.add(UNRESOLVED if isinstance(entry, str) else entry.packages.get(package, "none"))
    if len(found) > 1 or "none" in found:
        raise ConfigError(
            f"imagebuild.lock: {package} has the versions {', '.join(sorted(found))} in {', '.join(urls.values())}; "
            f"`imagebuild lock --update {name}` reads them anew"
        )
    return str(found.pop())


def _urls(recipe: Recipe, name: str, *, stage: bool) -> dict[Arch, str]:
    """Architecture → address of a component's repository, for the target's platforms."""
    found = {arch: recipe.repository(name, arch, stage=stage) for arch in recipe.archs}
    return {arch: repository.url for arch, repository in found.items() if repository}


MACROS = (
    "apt",
    "apt_mounts",
    "archive",
    "install",
    "key_stage",
    "keyring",
    "repository",
    "requirements",
    "rule",
    "source",
)
"""What `macros.j2` offers to every template."""


class Renderer:
    """Renders targets of one project; stages that several targets share are rendered once."""

    def __init__(self, project: Project, versions: Pins) -> None:
        self.project = project
        self.versions = versions
        self._texts: dict[str, str] = {}
        """What a build stage is rendered from → its text."""
        self._installs: dict[tuple[str, str, str], str] = {}
        """Component, version, variant → steps of the final stage."""
        self._pins: dict[Source, str] = {}
        """Source → what the lock has for it, as text."""
        self._templates: dict[str, jinja2.Template] = {}

    def recipe(self, target: Target) -> Recipe:
        """How the target is made."""
        return Recipe(self.project, self.versions, target, self._staged)

    def capabilities(self, target: Target) -> dict[str, tuple[str, ...]]:
        """Architecture → compute capabilities that programs of the target are compiled for, or must run on."""
        recipe = self.recipe(target)
        for name in recipe.stages:
            if "gpu" in recipe.of(name).key:
                return self._gpu(recipe.values(name, stage=True).get("toolkit", recipe.version(name)))
        return self._gpu(target.axes.get("cuda", "0"))

    def dockerfile(self, target: Target, *, base: str | None = None, append: str = "") -> Dockerfile:
        """The self-contained Dockerfile of a target.

        `base` replaces the image that the final stage starts from; `append` is put at the end of the final stage.
        Raises ConfigError if a template is wrong or the lock lacks a source. What the lock has as unresolved is
        rendered as that word, which every builder refuses.
        """
        recipe, lock = self.recipe(target), self.project.lock
        lock_hash = hash_of_lock(recipe, lock, self._pins)
        start = base or digest_of(lock, recipe.image_base())
        texts = [self._stage(recipe, name, base) for name in recipe.stages]
        present = list(target.components)
        copied = [c for c in present if c in recipe.stages and not recipe.of(c).stage_only]
        text = self._run(
            "Dockerfile.j2",
            target=target,
            description=recipe.image.description,
            lock_hash=lock_hash,
            base=start,
            stages=[t.strip() for t in texts],
            packages=package_arguments(recipe, lock),
            repositories=[r for name in recipe.keyrings if (r := package_repository(recipe, name, lock))],
            before_install="".join(recipe.of(c).packages.before_install for c in present),
            after_install="".join(recipe.of(c).packages.after_install for c in present),
            libraries=[(c, folder) for c in present for folder in recipe.of(c).libraries],
            copied=copied,
            installs=[
                self._install(name, version, target.axes.get("variant", ""))
                for name, version in target.components.items()
                if self._has(name, "install.j2")
            ],
            env=image_environment(recipe),
            labels=image_labels(recipe, lock_hash, start),
            append=append.strip(),
        )
        return Dockerfile(text)

    def _folder(self, name: str) -> Path:
        return self.project.root / "components" / name

    def _has(self, name: str, file: str) -> bool:
        return f"components/{name}/{file}" in self._files

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(
            p.relative_to(self.project.root).as_posix() for p in self.project.root.glob("components/*/*.j2")
        )

    @cached_property
    def _staged(self) -> frozenset[str]:
        return frozenset(name for name in self.project.components if self._has(name, "build.j2"))

    def _stage(self, recipe: Recipe, name: str, base: str | None) -> str:
        lock, component = self.project.lock, recipe.of(name)
        git, wheels = recipe.git(name), recipe.wheels(name)
        values = recipe.values(name, stage=True)
        own_base = None if recipe.image.base else base
        context: dict[str, Any] = {
            "name": name,
            "version": recipe.version(name),
            "base": own_base or digest_of(lock, recipe.base(name).image),
            "os": recipe.os(name),
            "git": component.git,
            "commit": commit_of(lock, git) if git else None,
            "archives": {a: {"url": u, "sha256": hash_of(lock, name, u)} for a, u in recipe.archives(name).items()},
            "images": {label: digest_of(lock, reference) for label, reference in recipe.images(name).items()},
            "wheels": wheels_of(lock, wheels) if wheels else (),
            "key": {k.replace("-", "_"): value for k, value in recipe.key(name).items()},
            "facts": {k.replace("-", "_"): value for k, value in values.items()},
            "stage": {wanted: recipe.provider(wanted) for wanted in component.build_requires},
            "signed": package_repository(recipe, name, lock, stage=True),
            "env": recipe.env(name, "devel"),
        }
        if "gpu" in component.key:
            context["gpu"] = self._gpu(values.get("toolkit", context["version"]))
        identity = repr({**context, "wheels": wheels})
        if identity not in self._texts:
            about = f"{component.title}: {component.description}. {component.license}, {component.homepage}"
            rule = self._macros["rule"](name, about)
            text = self._run(f"components/{name}/build.j2", file=self._file_reader(name), **context)
            self._texts[identity] = f"{rule}\n{text}"
        return self._texts[identity]

    def _gpu(self, toolkit: str) -> dict[str, tuple[str, ...]]:
        """Architecture → compute capabilities that the toolkit can compile for."""
        table = self.project.matrix.model.gpu_architectures
        able = {number: gpu for number, gpu in table.items() if satisfies(toolkit, gpu.cuda)}
        found = {str(arch): tuple(n for n, gpu in able.items() if arch in gpu.arch) for arch in ARCHS}
        if not all(found.values()):
            where = self.project.matrix.at("gpu-architectures")
            raise ConfigError(f"{where}: gpu-architectures: none for CUDA {toolkit}")
        return found

    def _install(self, name: str, version: str, variant: str) -> str:
        if (name, version, variant) not in self._installs:
            text = self._run(
                f"components/{name}/install.j2", version=version, variant=variant, file=self._file_reader(name)
            )
            self._installs[name, version, variant] = text.strip()
        return self._installs[name, version, variant]

    def _file_reader(self, name: str) -> Any:
        def read(file: str) -> str:
            owner, _, own = file.rpartition("/")
            path = self._folder(owner or name) / "files" / own
            try:
                text = path.read_text(encoding="utf-8").rstrip("\n")
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
            if re.search(r"^EOF$", text, re.MULTILINE):
                raise ConfigError(f"{path}: has a line 'EOF', which would end the heredoc it is put in")
            return text

        return read

    @cached_property
    def _environment(self) -> jinja2.Environment:
        return jinja2.Environment(
            loader=jinja2.FileSystemLoader(self.project.root),
            undefined=jinja2.StrictUndefined,
            autoescape=False,  # noqa: S701 - the output is a Dockerfile
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._templates:
            self._templates[name] = self._environment.get_template(name)
        return self._templates[name]

    @cached_property
    def _macros(self) -> dict[str, Any]:
        module = self._environment.get_template("macros.j2").module
        return {name: getattr(module, name) for name in MACROS}

    def _run(self, name: str, /, **context: Any) -> str:
        try:
            text = self._template(name).render(**self._macros, **context)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{self.project.root / (error.name or name)}:{error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"{self._position(name, error)}: {error}; a stage sees only its key") from None
        return spaced(text)

    def _position(self, name: str, error: BaseException) -> str:
        line, trace = 1, error.__traceback__
        while trace:
            if trace.tb_frame.f_code.co_filename.endswith(name):
                line = trace.tb_lineno
            trace = trace.tb_next
        return f"{self.project.root / name}:{line}"
