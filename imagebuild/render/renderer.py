"""Render the Dockerfile of a target from templates, which are cached in compiled form."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from traceback import extract_tb
from typing import Any, get_args

import jinja2
import jinja2.sandbox

from imagebuild import __version__
from imagebuild.core.errors import ConfigError, Mistakes, nearest
from imagebuild.core.fields import ARCHS, Arch, Condition, Platform, axis_facts, matches, satisfies
from imagebuild.core.files import cache_folder, read_text
from imagebuild.core.yaml import dotted_key
from imagebuild.project.load import hash_of_check, script_of
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Source,
    commit_of,
    digest_of,
    hash_of,
    pinned_text,
    wheels_of,
)
from imagebuild.project.plan import Target
from imagebuild.project.project import Project
from imagebuild.render.recipe import SYSTEM_PATH, Recipe
from imagebuild.render.stages import check_appended, digest, first_mistake, stages_of


@dataclass(frozen=True)
class Dockerfile:
    """Hold a rendered target."""

    text: str

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Return stage → key, a digest of all that the stage depends on, on any platform, in order of appearance."""
        first, *others = (stages_of(self.text, platform) for platform in get_args(Platform))
        return {name: digest(stage.key, *(other[name].key for other in others)) for name, stage in first.items()}


FOLDER_LISTS = ("CPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PATH", "PKG_CONFIG_PATH")
"""Variables that are lists of folders. Components prepend to them instead of setting them."""


def package_arguments(recipe: Recipe) -> list[str]:
    """Return the packages to install, as apt-get takes them."""
    exact, others = set[str](), {*recipe.image.packages.apt}
    for name in recipe.target.components:
        if repository_urls(recipe, name, stage=False):
            exact.update(exact_packages(recipe, name, stage=False))
        else:
            others.update(recipe.packages(name))
    # The distribution's archive keeps one version, whose suffix a stable update or a rebuild may change.
    own = {f"'{package}*'" if "=" in package else package for package in others}
    return sorted(exact | own, key=lambda package: package.strip("'"))


def package_repository(recipe: Recipe, name: str, *, stage: bool) -> dict[str, Any] | None:
    """Return what templates need to know of a component's own repository of packages, or None if it has none."""
    if not recipe.component(name).repository:
        return None
    urls = repository_urls(recipe, name, stage=stage)
    first = recipe.repository(name, next(iter(urls)), stage=stage)
    assert first
    result = {"name": first.name, "suite": first.suite, "key": first.key, "urls": urls, "stage": name}
    if not first.configured:
        locked = recipe.project.lock.repositories
        result["fingerprint"] = next((locked[u].fingerprint for u in urls.values() if u in locked), UNRESOLVED)
        result["packages"] = exact_packages(recipe, name, stage=stage)
    return result


def exact_packages(recipe: Recipe, name: str, *, stage: bool) -> list[str]:
    """Return a component's packages of a signed repository, each with its version, by the lock where it has none.

    An architecture without a pin does not count: nothing is built for it. Raises ConfigError if two others differ,
    as one Dockerfile is for all of them.
    """
    urls, locked = repository_urls(recipe, name, stage=stage).values(), recipe.project.lock.repositories
    result = []
    for package in recipe.packages(name, every=stage):
        known = {locked[u].packages[package] for u in urls if u in locked and package in locked[u].packages}
        if len(known) > 1 and "=" not in package:
            raise ConfigError(
                f"imagebuild.lock: {package} has the versions {', '.join(sorted(known))} in {', '.join(urls)}; "
                f"`imagebuild lock --update {name}` reads them anew"
            )
        result.append(package if "=" in package else f"{package}={known.pop() if known else UNRESOLVED}")
    return result


def repository_urls(recipe: Recipe, name: str, *, stage: bool) -> dict[Arch, str]:
    """Return architecture → address of the repository of a component's packages, for the target's platforms."""
    repositories = {arch: recipe.repository(name, arch, stage=stage) for arch in recipe.archs}
    return {arch: repository.url for arch, repository in repositories.items() if repository}


def image_environment(recipe: Recipe) -> dict[str, str]:
    """Return the environment of the image. Raises ConfigError if two components contradict each other."""
    env, needed = {"PATH": SYSTEM_PATH}, dict[str, str]()
    for name in recipe.target.components:
        for variable, value in recipe.env(name).items():
            if variable in FOLDER_LISTS:
                env[variable] = f"{value}:{env[variable]}" if variable in env else value
            elif env.setdefault(variable, value) != value:
                where = recipe.project.components[name].at("env", variable)
                raise ConfigError(f"{where}: env.{variable}: {value!r}, but another component sets {env[variable]!r}")
            elif recipe.component(name).unpacked:
                needed[variable] = name
    for variable, value in recipe.image.env.items():
        if variable in needed and env[variable] != value:
            where = recipe.project.matrix.at("images", recipe.target.image, "env", variable)
            raise ConfigError(f"{where}: expected {env[variable]!r}, which {needed[variable]} needs, found {value!r}")
        listed = variable in FOLDER_LISTS and variable in env
        env[variable] = f"{value}:{env[variable]}" if listed else value
    return env


def image_labels(recipe: Recipe, digest: str, base: str) -> dict[str, str]:
    """Return the labels of the image; `digest` is the lock's hash, `base` the image that it starts from.

    A base that builds may bootstrap has no label with a digest, as that would be of an image that was not used.
    """
    target = recipe.target
    base_name, _, base_digest = base.partition("@")
    if any(entry.release and entry.image == base_name for entry in recipe.project.matrix.model.bases.values()):
        base_digest = ""
    result = {
        "org.opencontainers.image.title": target.image,
        "org.opencontainers.image.description": recipe.image.description,
        "org.opencontainers.image.version": target.name.rpartition(":")[2],
        "org.opencontainers.image.base.name": base_name,
        "org.opencontainers.image.base.digest": base_digest,
        "org.opencontainers.image.licenses": " AND ".join(
            sorted({f"({recipe.component(c).license})" for c in target.components})
        ),
        "imagebuild.target": target.id,
        "imagebuild.lock": digest,
    }
    result |= {f"imagebuild.axis.{axis}": value for axis, value in target.axes.items()}
    result |= {f"imagebuild.component.{c}": version for c, version in target.components.items()}
    for name in target.components:
        result |= {f"imagebuild.{label}": text for label, text in recipe.labels(name).items()}
    return {label: value for label, value in (result | recipe.image.labels).items() if value}


class Renderer:
    """Render targets of one project. Stages that several targets share are rendered once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._stages: dict[tuple[object, ...], str] = {}
        """`Recipe.stage_key` → text of a component's build stage."""
        self._installs: dict[tuple[str, str, str], str] = {}
        """Component, version, variant → steps of the final stage."""
        self._pins: dict[Source, str] = {}
        """Source → what the lock has for it, as text."""

    def recipe(self, target: Target) -> Recipe:
        with_stage = frozenset(name for name, file in self._component_templates if file == "build.j2")
        return Recipe(self.project, target, with_stage)

    def lock_hash(self, recipe: Recipe) -> str:
        """Return a digest, 12 hex digits, of all versions and pins that the target's Dockerfile contains."""
        names = dict.fromkeys((*recipe.target.components, *recipe.stages))
        parts = [f"{name} {recipe.version(name)}" for name in names]
        for source in dict.fromkeys(recipe.sources()):
            if source not in self._pins:
                self._pins[source] = pinned_text(self.project.lock, source)
            parts.append(self._pins[source])
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def check(self, targets: Iterable[Target]) -> None:
        """Render targets to find what is wrong in templates. Raises ConfigError with the mistakes of all of them."""
        mistakes = Mistakes()
        for target in targets:
            try:
                self.dockerfile(target)
            except ConfigError as error:
                mistakes.texts.append(str(error))
        mistakes.stop_if_any()

    def capabilities(self, target: Target) -> dict[str, tuple[str, ...]]:
        """Return architecture → compute capabilities that programs of the target are compiled for, or must run on."""
        recipe = self.recipe(target)
        for name in recipe.stages:
            if "gpu" in recipe.component(name).key:
                return self._capabilities(recipe.values(name, stage=True).get("toolkit", recipe.version(name)), target)
        return self._capabilities(target.axes.get("cuda", "0"), target)

    def dockerfile(self, target: Target, options: Sequence[str] = ()) -> Dockerfile:
        """Render the self-contained Dockerfile of a target.

        `options` are further options for the command in the header. A source without a pin is rendered as
        `unresolved`, which every builder refuses. Raises ConfigError if a template is wrong.
        """
        recipe = self.recipe(target)
        lock_hash = self.lock_hash(recipe)
        start = digest_of(self.project.lock, recipe.image_base())
        present = list(target.components)
        words = ("imagebuild", "render", target.id, *self.project.changes.options, *options)
        variant = target.axes["variant"]
        installs = [
            self._install(name, version, variant)
            for name, version in target.components.items()
            if (name, "install.j2") in self._component_templates
        ]
        if recipe.image.append:
            place = ("images", target.image, "append")
            check_appended(recipe.image.append, f"{self.project.matrix.at(*place)}: {dotted_key(place)}")
        text = self._render(
            "Dockerfile.j2",
            target=target,
            imagebuild=__version__,
            command=" ".join(shlex.join(words).split()),
            description=recipe.image.description,
            lock_hash=lock_hash,
            base=start,
            stages=[self._stage(recipe, name).strip() for name in recipe.stages],
            packages=package_arguments(recipe),
            repositories=[package_repository(recipe, name, stage=False) for name in recipe.keyrings],
            before_install="".join(recipe.component(c).packages.before_install for c in present),
            after_install="".join(recipe.component(c).packages.after_install for c in present),
            libraries=[(c, folder) for c in present for folder in recipe.libraries(c)],
            copied=[c for c in present if c in recipe.stages and not recipe.component(c).stage_only],
            installs=installs,
            env=image_environment(recipe),
            labels=image_labels(recipe, lock_hash, start),
            user=recipe.image.user,
            cmd=json.dumps(recipe.image.cmd),
            append=recipe.image.append.strip(),
        )
        return Dockerfile(text)

    def key(self, target: Target) -> str:
        """Return the digest of what an image of a target depends on: its Dockerfile, the lock's date, its checks.

        Comments in a Dockerfile do not change it. Raises ConfigError if a script or a template cannot be read.
        """
        image = self.project.matrix.model.images[target.image]
        parts = [*list(self.dockerfile(target).stages.values())[-1:], str(self.project.lock.date)]
        parts.append(repr((image.waivers, image.size_limit_mb)))
        for name in target.components:
            parts.append(repr(self.project.components[name].model.waivers))
            parts += [sha256 for when, sha256 in self._checks[name] if matches(when, axis_facts(target.axes))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @cached_property
    def _checks(self) -> dict[str, list[tuple[Condition, str]]]:
        """Return component → its checks: on what each is made, and the hash of all that decides whether it passes."""
        return {
            name: [(c.when, hash_of_check(c, script_of(self.project, name, c))) for c in file.model.checks]
            for name, file in self.project.components.items()
        }

    @cached_property
    def _component_templates(self) -> frozenset[tuple[str, str]]:
        folders = {name: self.project.folder(name) for name in self.project.components}
        return frozenset((name, path.name) for name, folder in folders.items() for path in folder.glob("*.j2"))

    def _stage(self, recipe: Recipe, name: str) -> str:
        if (stage_key := recipe.stage_key(name)) in self._stages:
            return self._stages[stage_key]
        lock, component = self.project.lock, recipe.component(name)
        git, wheels = recipe.git(name), recipe.wheels(name)
        values = recipe.values(name, stage=True)
        context: dict[str, Any] = {
            "name": name,
            "version": recipe.version(name),
            "base": digest_of(lock, recipe.base(name).image),
            "os": recipe.os(name),
            "git": component.git,
            "commit": commit_of(lock, git) if git else None,
            "archives": {a: {"url": u, "sha256": hash_of(lock, u)} for a, u in recipe.archives(name).items()},
            "images": {label: digest_of(lock, reference) for label, reference in recipe.images(name).items()},
            "wheels": wheels_of(lock, wheels) if wheels else (),
            "key": {k.replace("-", "_"): value for k, value in recipe.key(name).items()},
            "facts": {k.replace("-", "_"): value for k, value in values.items()},
            "stage": {wanted: recipe.provider(wanted) for wanted in component.build_requires},
            "signed": package_repository(recipe, name, stage=True),
        }
        if "gpu" in component.key:
            context["gpu"] = self._capabilities(values.get("toolkit", context["version"]), recipe.target)
        summary = f"{component.title}: {component.description}. {component.license}, {component.homepage}"
        if git and not git.commit:
            summary += f", tag {git.tag}"
        rule: Any = self._environment.globals.get("rule")
        if not callable(rule):
            raise ConfigError(f"{self.project.template('macros.j2')}:1: has no macro rule; copy it from imagebuild's")
        text = self._render(f"components/{name}/build.j2", file=partial(self._file, name), **context)
        path = self.project.template(f"components/{name}/build.j2")
        line, problem = first_mistake(text)
        if problem:
            source = read_text(path)
            number = source.count("\n", 0, max(0, source.rfind(line))) + 1
            raise ConfigError(f"{path}:{number}: {problem}")
        if not re.search(rf"^(?i:FROM) .* (?i:AS) {name}$", text, re.MULTILINE):
            raise ConfigError(f"{path}:1: has no stage {name}; write `FROM … AS {name}`")
        self._stages[stage_key] = f"{rule(name, summary)}\n{text}"
        return self._stages[stage_key]

    def _capabilities(self, toolkit: str, target: Target) -> dict[str, tuple[str, ...]]:
        """Return architecture → compute capabilities that a CUDA toolkit can compile for, of those that are wanted."""
        table, generation = self.project.matrix.model.gpu_architectures, target.axes.get("gpu")
        supported = {n: gpu for n, gpu in table.items() if satisfies(toolkit, gpu.cuda) and generation in (None, n)}
        result = {str(arch): tuple(n for n, gpu in supported.items() if arch in gpu.arch) for arch in ARCHS}
        if lacking := [arch for arch in self.recipe(target).archs if not result[arch]]:
            where = self.project.matrix.at("gpu-architectures")
            what = f"CUDA {toolkit}, {' and '.join(lacking)}" + (f" and gpu {generation}" if generation else "")
            raise ConfigError(f"{where}: gpu-architectures: none for {what}; change one of these")
        return result

    def _install(self, name: str, version: str, variant: str) -> str:
        """Render the steps with which the final stage installs a component."""
        if (name, version, variant) not in self._installs:
            template = f"components/{name}/install.j2"
            text = self._render(template, version=version, variant=variant, file=partial(self._file, name))
            check_appended(text, f"{self.project.template(template)}:1")
            self._installs[name, version, variant] = text.strip()
        return self._installs[name, version, variant]

    def _file(self, component: str, name: str) -> str:
        """Return a file of a component, or `OTHER/file`: what templates call as `file(name)`."""
        owner, _, file = name.rpartition("/")
        path = self.project.folder(owner or component) / "files" / file
        try:
            text = path.read_text(encoding="utf-8").rstrip("\n")
        except OSError as error:
            raise LookupError(f"{path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(text.splitlines(), 1):
            if line == "EOF":
                problem = "a line 'EOF' would end the heredoc that the file is put in; write it otherwise"
                raise ConfigError(f"{path}:{number}: {problem}")
            if "\0" in line:
                raise ConfigError(f"{path}:{number}: a NUL cannot be in a text; remove it")
        return text

    @cached_property
    def _environment(self) -> jinja2.Environment:
        compiled = None
        with suppress(OSError, ConfigError):  # without a folder to write to, templates are compiled each time
            folder = cache_folder("sandboxed-templates")
            folder.mkdir(parents=True, exist_ok=True)
            compiled = jinja2.FileSystemBytecodeCache(str(folder)) if os.access(folder, os.W_OK) else None
        # A job that may sign renders templates of a project, and must run nothing of the project.
        environment = jinja2.sandbox.SandboxedEnvironment(
            bytecode_cache=compiled,
            loader=jinja2.FunctionLoader(self._template),
            undefined=jinja2.StrictUndefined,
            auto_reload=False,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters["quoted"] = lambda text: re.sub(r'([\\"$])', r"\\\1", text)  # for a Dockerfile's "…"
        # Every template may use the macros.
        environment.globals |= vars(environment.get_template("macros.j2").module)
        return environment

    def _template(self, name: str) -> tuple[str, str, None]:
        """Return the text and the path of a template, as jinja2 wants them."""
        path = self.project.template(name)
        if not path.exists():
            raise ConfigError(f"{path}: is missing, and templates need it; write `extends: imagebuild`, which has it")
        return read_text(path), str(path), None

    def _render(self, name: str, /, **context: Any) -> str:
        """Render a template, with at most one blank line in a row, and one after each heredoc, as hadolint needs it.

        Raises ConfigError with file and line for a mistake in the template.
        """
        try:
            text = self._environment.get_template(name).render(**context)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.project.template(error.name or name)}:{error.lineno}: {error.message}; correct it"
            ) from None
        except ConfigError:
            raise
        except Exception as error:  # a template may divide by zero
            lines = [1, *(frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename.endswith(name))]
            problem, remedy = str(error), "correct the template"
            if isinstance(error, jinja2.UndefinedError):
                known = {*context, *(key for value in context.values() if isinstance(value, dict) for key in value)}
                near = nearest(problem.split("'")[-2], known)
                remedy = f"did you mean {near!r}?" if near else "name it in `key` or `build-requires` of component.yaml"
            raise ConfigError(f"{self.project.template(name)}:{lines[-1]}: {problem}; {remedy}") from None
        text = text.replace("\nEOF\n", "\nEOF\n\n")
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        return text.strip() + "\n"
