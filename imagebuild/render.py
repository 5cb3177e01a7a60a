"""Templates to Dockerfiles. Pure apart from reading the templates.

A stage sees only its component's own version, source and declared key, so that it cannot come to depend on
anything else, and two targets with the same key get the same text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from imagebuild.config import Project
from imagebuild.dockerfile import Dockerfile, spaced, stage_keys
from imagebuild.errors import ConfigError
from imagebuild.models import Component, Pin, Target, Wheel
from imagebuild.plan import provider
from imagebuild.versions import facts, matches

MACROS = ("apt", "requirements", "rule", "source")
"""What `macros.j2` offers to every template."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Renderer:
    """Renders targets of one project; stages that several targets share are rendered once."""

    def __init__(self, project: Project, versions: Mapping[str, Pin]) -> None:
        self.project = project
        self.versions = versions
        self._texts: dict[str, str] = {}
        self._templates: dict[str, jinja2.Template] = {}
        self._pins: dict[tuple[str, str], str] = {}

    def dockerfile(self, target: Target, *, base: str | None = None, append: str = "") -> Dockerfile:
        """The self-contained Dockerfile of a target.

        `base` replaces the image in FROM; `append` is put at the end of the final stage.
        Raises ConfigError if a template is wrong or the lock lacks a source.
        """
        reference = base or self.base_of(target)
        lock_hash = self.lock_hash(target)
        texts = {name: self._stage(name, target, reference) for name in self._stage_order(target)}
        present = list(target.components)
        text = self._run(
            "Dockerfile.j2",
            target=target,
            description=self.project.matrix.model.images[target.image].description,
            lock_hash=lock_hash,
            base=reference,
            stages=[t.strip() for t in texts.values()],
            packages=self._packages(present, target),
            after_install="".join(self._of(c).packages.after_install for c in present),
            copied=[c for c in present if self._has(c, "build.j2")],
            installs=[self._install(c, target) for c in present if self._has(c, "install.j2")],
            env=self._env(present),
            labels=self._labels(target, present, lock_hash),
            append=append.strip(),
        )
        return Dockerfile(text, stage_keys(text))

    def base_of(self, target: Target) -> str:
        """Official image that the target starts from, with its digest."""
        base = self.project.matrix.model.bases[target.axes["os"]]
        return f"{base.image}@{base.digest}"

    def lock_hash(self, target: Target) -> str:
        """Digest of all pins that the target's Dockerfile contains, 12 hex digits."""
        names = dict.fromkeys((*target.components, *self._stage_order(target)))
        pins = [self.base_of(target), *(self._pin(name, self._version(name, target)) for name in names)]
        return hashlib.sha256("\n".join(pins).encode()).hexdigest()[:12]

    def _pin(self, name: str, version: str) -> str:
        """What of a component is fixed, as text."""
        if (name, version) not in self._pins:
            commit = self.versions[name].commit if name in self.versions else None
            hashes = [digest for wheel in self._wheels(name, version) for digest in wheel.sha256.values()]
            self._pins[name, version] = " ".join([name, version, commit or "", *hashes])
        return self._pins[name, version]

    def _of(self, name: str) -> Component:
        return self.project.components[name].model

    def _folder(self, name: str) -> Path:
        return self.project.root / "components" / name

    def _has(self, name: str, file: str) -> bool:
        return f"components/{name}/{file}" in self._files

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(
            p.relative_to(self.project.root).as_posix() for p in self.project.root.glob("components/*/*.j2")
        )

    def _version(self, name: str, target: Target) -> str:
        axis = self._of(name).version_axis
        if axis:
            return target.axes[axis]
        if name in target.components:
            return target.components[name]
        if name not in self.versions:
            where = self.project.matrix.at("versions")
            raise ConfigError(f"{where}: versions: no version for {name}, which {target.image} is built with")
        return self.versions[name].version

    def _stage_order(self, target: Target) -> list[str]:
        """Components with a build stage that the target needs, each after those it builds on."""
        order: list[str] = []

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                where = self.project.components[name].at("build-requires")
                raise ConfigError(f"{where}: build-requires: goes in a circle: {' → '.join((*path, name))}")
            if name in order or not self._has(name, "build.j2"):
                return
            for wanted in self._of(name).build_requires:
                visit(provider(self.project, wanted, target.components) or wanted, (*path, name))
            order.append(name)

        for component in target.components:
            visit(component, ())
        return order

    def _stage(self, name: str, target: Target, base: str) -> str:
        component, version = self._of(name), self._version(name, target)
        context: dict[str, Any] = {
            "name": name,
            "version": version,
            "base": base,
            "os": target.axes["os"],
            "git": component.git,
            "commit": self.versions[name].commit if name in self.versions else None,
            "wheels": self._wheels(name, version),
            "key": self._key(name, target),
        }
        if "gpu" in component.key:
            context["gpu"] = self._gpu(version)
        identity = json.dumps(context, sort_keys=True, default=lambda wheel: wheel.model_dump())
        if identity not in self._texts:
            about = f"{component.title}: {component.description}. {component.license}, {component.homepage}"
            rule = self._macros["rule"](name, about)
            text = self._run(f"components/{name}/build.j2", file=self._file_reader(name), **context)
            self._texts[identity] = f"{rule}\n{text}"
        return self._texts[identity]

    def _key(self, name: str, target: Target) -> dict[str, str]:
        available = {**facts(target.axes), **target.components}
        component = self._of(name)
        missing = [k for k in component.key if k != "gpu" and k not in available]
        if missing:
            where = self.project.components[name].at("key")
            raise ConfigError(f"{where}: key: {missing[0]!r} is neither an axis nor a component of {target.id}")
        return {k.replace("-", "_"): available[k] for k in component.key if k != "gpu"}

    def _gpu(self, toolkit: str) -> dict[str, tuple[str, ...]]:
        for row in self.project.matrix.model.gpu_architectures:
            if matches(row.when, {"cuda": toolkit}):
                return {"amd64": row.amd64, "arm64": row.arm64}
        where = self.project.matrix.at("gpu-architectures")
        raise ConfigError(f"{where}: gpu-architectures: no row for CUDA {toolkit}")

    def _wheels(self, name: str, version: str) -> tuple[Wheel, ...]:
        owner = self._of(name).wheels_from or name
        if not self._of(owner).wheels:
            return ()
        found = self.project.lock.wheels.get(owner, {}).get(version, ())
        if not found:
            setting = self._of(owner).version_axis or owner
            raise ConfigError(
                f"imagebuild.lock: has no wheels for {owner} {version}; add them with "
                f"`imagebuild lock --set {setting}={version}`"
            )
        return found

    def _packages(self, names: Iterable[str], target: Target) -> list[str]:
        chosen: set[str] = set()
        for name in names:
            packages = self._of(name).packages
            extra = packages.devel if target.axes.get("variant") == "devel" else ()
            chosen |= {
                # The archive keeps one version; what may change is a stable update's or a rebuild's suffix.
                f"'{p.replace('{version}', self._version(name, target))}*'" if "{version}" in p else p
                for p in (*packages.runtime, *extra)
            }
        return sorted(chosen, key=lambda p: p.strip("'"))

    def _env(self, names: Iterable[str]) -> dict[str, str]:
        env: dict[str, str] = {"PATH": SYSTEM_PATH}
        for name in names:
            for variable, value in self._of(name).env.items():
                if variable == "PATH":
                    env["PATH"] = f"{value}:{env['PATH']}"
                elif env.setdefault(variable, value) != value:
                    where = self.project.components[name].at("env", variable)
                    raise ConfigError(
                        f"{where}: env.{variable}: {value!r}, but another component says {env[variable]!r}"
                    )
        return env

    def _labels(self, target: Target, present: Iterable[str], lock_hash: str) -> dict[str, str]:
        labels = {
            "org.opencontainers.image.title": target.image,
            "org.opencontainers.image.description": self.project.matrix.model.images[target.image].description,
            "org.opencontainers.image.version": target.tags[0].rpartition(":")[2],
            "org.opencontainers.image.licenses": " AND ".join(sorted({f"({self._of(c).license})" for c in present})),
            "imagebuild.target": target.id,
            "imagebuild.lock": lock_hash,
        }
        labels |= {f"imagebuild.axis.{axis}": value for axis, value in target.axes.items()}
        return labels | {f"imagebuild.component.{c}": target.components[c] for c in present}

    def _install(self, name: str, target: Target) -> str:
        return self._run(
            f"components/{name}/install.j2",
            version=target.components[name],
            variant=target.axes.get("variant", ""),
            file=self._file_reader(name),
        ).strip()

    def _file_reader(self, name: str) -> Any:
        def read(file: str) -> str:
            path = self._folder(name) / "files" / file
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
