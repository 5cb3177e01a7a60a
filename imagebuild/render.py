"""Templates to Dockerfiles. Pure apart from reading the templates.

A stage sees only its component's own version, source and declared key, so that it cannot come to depend on
anything else, and two targets with the same key get the same text.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from imagebuild import final
from imagebuild.config import Project
from imagebuild.dockerfile import Dockerfile, spaced
from imagebuild.errors import ConfigError
from imagebuild.models import Target
from imagebuild.plan import Pins
from imagebuild.recipe import ARCHS, Recipe
from imagebuild.sources import commit_of, digest_of, hash_of, wheels_of
from imagebuild.versions import satisfies

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
        lock_hash = final.lock_hash(recipe, lock)
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
            packages=final.packages(recipe, lock),
            repositories=[r for name in recipe.keyrings if (r := final.repository(recipe, name, lock))],
            before_install="".join(recipe.of(c).packages.before_install for c in present),
            after_install="".join(recipe.of(c).packages.after_install for c in present),
            libraries=[(c, folder) for c in present for folder in recipe.of(c).libraries],
            copied=copied,
            installs=[self._install(c, target) for c in present if self._has(c, "install.j2")],
            env=final.environment(recipe),
            labels=final.labels(recipe, lock_hash, start),
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
            "signed": final.repository(recipe, name, lock, stage=True),
            "env": recipe.env(name, "devel"),
        }
        if "gpu" in component.key:
            context["gpu"] = self._gpu(values.get("toolkit", context["version"]))
        identity = json.dumps(context, sort_keys=True, default=lambda wheel: wheel.model_dump())
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

    def _install(self, name: str, target: Target) -> str:
        return self._run(
            f"components/{name}/install.j2",
            version=target.components[name],
            variant=target.axes.get("variant", ""),
            file=self._file_reader(name),
        ).strip()

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
