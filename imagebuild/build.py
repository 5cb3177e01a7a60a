"""`imagebuild build`: find the engine, prepare the base, render, run BuildKit, report."""

from __future__ import annotations

import configparser
import os
import platform as machine
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagebuild import bake, base, buildx, console, emulation, engine, programs
from imagebuild.config import Project
from imagebuild.console import out
from imagebuild.dockerfile import Dockerfile
from imagebuild.errors import ConfigError
from imagebuild.files import write_text
from imagebuild.models import BuildResult, Target
from imagebuild.plan import Changes
from imagebuild.render import Renderer
from imagebuild.sources import check_resolved, digest_of

PIP_CONFIGURATIONS = (Path("~/.config/pip/pip.conf"), Path("~/.pip/pip.conf"), Path("/etc/pip.conf"))
ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    targets: tuple[Target, ...]
    platforms: tuple[str, ...] = ()
    output: str = "load"
    builder: str | None = None
    sources: tuple[str, ...] = ()
    base: str = "bootstrap"
    ca: Path | None = None
    no_cache: bool = False
    jobs: int = 0
    stage: str | None = None
    folder: Path = Path("build")
    verbose: bool = False
    changes: Changes = field(default_factory=Changes)

    @property
    def again(self) -> tuple[str, ...]:
        """The options that another command needs to build the same."""
        given = {"--platform": self.platforms, "--source": self.sources, "--set": self.changes.settings}
        given |= {"--with": self.changes.with_, "--without": self.changes.without}
        given |= {"--builder": (self.builder,) if self.builder else ()}
        return tuple(word for option, values in given.items() for value in values for word in (option, value))


def native_platform() -> str:
    """Platform of this machine. Raises ConfigError for a machine that is neither amd64 nor arm64."""
    name = machine.machine().lower()
    if name not in ARCHITECTURES:
        raise ConfigError(f"this machine is {name}; images are for amd64 and arm64")
    return f"linux/{ARCHITECTURES[name]}"


def build(project: Project, renderer: Renderer, wish: Wish) -> list[BuildResult]:
    """Build the targets, show progress, and print what was built.

    Raises ConfigError, CommandError or ResultError; what ran until then stays cached.
    """
    wish = replace(wish, platforms=tuple(native_platform() if p == "local" else p for p in wish.platforms))
    platforms: set[str] = {p for t in wish.targets for p in bake.platforms_of(t, wish.platforms)}
    check_resolved(project.lock, (s for t in wish.targets for s in renderer.recipe(t).sources()))
    dockerfiles = {t.id: renderer.dockerfile(t) for t in wish.targets}
    _check_stage(wish, dockerfiles)
    sources = buildx.sources(project, wish.targets, wish.sources)
    found = engine.find(os.environ)
    if not wish.builder and found.host.startswith("unix://"):
        for name in sorted(platforms - {native_platform()}):
            emulation.ensure_emulation(name.removeprefix("linux/"))
    began = time.monotonic()
    shown = console.progress([t.id for t in wish.targets], verbose=wish.verbose)
    results: list[BuildResult] = []
    with shown, _secrets(wish) as secrets:
        options = bake.Options(
            context=wish.folder.resolve() / "empty",
            output=wish.output,
            platforms=wish.platforms,
            replaced={**_bases(project, wish, platforms, found, shown), **sources},
            secrets=secrets,
            no_cache=wish.no_cache,
        )
        size = wish.jobs or len(wish.targets)
        for start in range(0, len(wish.targets), size):
            request = buildx.Request(
                targets=wish.targets[start : start + size],
                dockerfiles=dockerfiles,
                folder=wish.folder.resolve(),
                options=options,
                engine=found,
                builder=wish.builder,
                stage=wish.stage,
                components=frozenset(project.components),
                again=wish.again,
            )
            results += buildx.run(request, shown)
    if not wish.stage:
        if wish.output == "load":
            results = _with_sizes(results, found, wish.folder)
        _show(results, wish.targets)
    out.print(f"built in {console.duration(time.monotonic() - began)}")
    return results


def _show(results: Sequence[BuildResult], targets: Sequence[Target]) -> None:
    """Print what was built, and what it contains."""
    rows = []
    for result, target in zip(results, targets, strict=True):
        run = [s for s in result.steps if not s.cached]
        steps = f"{len(run)} run, {len(result.steps) - len(run)} cached"
        contains = ", ".join(f"{name} {version}" for name, version in target.components.items())
        rows.append((result.tags[0], console.size(result.size_bytes), steps, (result.digest or "")[:19], contains))
    console.table(("image", "compressed", "steps", "digest", "contains"), rows)


def _check_stage(wish: Wish, dockerfiles: dict[str, Dockerfile]) -> None:
    known = {stage for d in dockerfiles.values() for stage in d.stages}
    if wish.stage and wish.stage not in known:
        raise ConfigError(f"--stage {wish.stage}: no selected target has it; stages: {', '.join(sorted(known))}")


def _bases(
    project: Project, wish: Wish, platforms: set[str], found: engine.Endpoint, shown: console.Progress
) -> dict[str, str]:
    """Official image → its bootstrapped replacement, for every base that the targets start from."""
    if wish.base == "registry":
        return {}
    if wish.base != "bootstrap":
        raise ConfigError(f"--base {wish.base}: 'bootstrap' or 'registry'")
    result = {}
    for name in sorted({t.axes["os"] for t in wish.targets}):
        entry = project.matrix.model.bases[name]
        if not entry.release:
            continue
        shown.note(f"base {name}: bootstrapping {entry.release} where the cache has none")
        made = base.bootstrap(
            sorted(platforms | {native_platform()}), cache_folder(), release=entry.release, log=shown.note
        )
        classic = not wish.builder and not has_containerd_store(found)
        result[digest_of(project.lock, entry.image)] = base.load(made, found.environment) if classic else made.context
    return result


def has_containerd_store(found: engine.Endpoint) -> bool:
    """Does the engine keep images in containerd? The classic store takes no OCI layouts, and one platform at a time."""
    status = programs.run("docker", "info", "--format", "{{.DriverStatus}}", env=found.environment, timeout=20)
    return "io.containerd.snapshotter" in status


def cache_folder() -> Path:
    """Where bootstrapped bases are kept, by the XDG base directory specification."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "imagebuild" / "base"


@contextmanager
def _secrets(wish: Wish) -> Iterator[dict[str, Path]]:
    """Build secrets of this machine: its CA bundle, and the address of its Python package index if it set one."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        result = {}
        if ca := buildx.ca_bundle(wish.ca, os.environ):
            result["ca"] = ca
        if index := _pip_index():
            path = Path(folder) / "pip.conf"
            path.touch(mode=0o600)
            path.write_text(f"[global]\nindex-url = {index}\n")
            result["pip.conf"] = path
        yield result


def _pip_index() -> str | None:
    """Address of the Python package index, if this machine's pip has another than its default."""
    found = os.environ.get("PIP_INDEX_URL", "")
    for path in PIP_CONFIGURATIONS:
        parser = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            parser.read(path.expanduser())
            found = found or parser.get("global", "index-url", fallback="")
    return found if found.startswith("http") else None


def _with_sizes(results: list[BuildResult], found: engine.Endpoint, folder: Path) -> list[BuildResult]:
    from imagebuild import docker  # noqa: PLC0415 - slow to import, and needed only now

    client = docker.connect(found)
    sized = []
    for result in results:
        size = docker.compressed_size(client, result.tags[0])
        sized.append(result.model_copy(update={"size_bytes": size}))
        write_text(folder / result.target / "result.json", sized[-1].model_dump_json(indent=1) + "\n")
    return sized
