"""From what the user calls an image to the image."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild import subject
from imagebuild.checks import components_of
from imagebuild.errors import ConfigError, ResultError
from imagebuild.locating import local, remote
from imagebuild.locating.located import Found
from imagebuild.models import Plan, Target
from imagebuild.registry.base import Registry
from imagebuild.registry.reference import parse

NO_PLAN = Plan(targets=(), excluded=())
ENGINE, REGISTRY = "engine:", "registry:"
"""Say where to look; without, the engine comes before the registry."""


def _connect(host: str) -> Registry:
    from imagebuild.registry import client  # noqa: PLC0415 - only where a registry is read

    return client.connect(host)


@dataclass(frozen=True)
class Places:
    """Where images can be."""

    plan: Plan = NO_PLAN
    folder: Path = Path("build")
    """Where builds leave layouts of targets."""
    offline: bool = False
    """Ask no registry."""
    connect: Callable[[str], Registry] = field(default=_connect)

    def target(self, name: str) -> Target | None:
        return subject.target_of(self.plan, name)

    @contextmanager
    def find(self, name: str) -> Iterator[Found | Target]:
        """The image that is meant, or the target if it is not built; what is unpacked goes with the context.

        Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, ResultError if
        what is found cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            try:
                yield self._found(name, Path(folder))
            except OSError as error:
                why = f"{error.strerror or error}; TMPDIR may name a folder with more room"
                raise ResultError(f"{name}: cannot be unpacked to be read: {why}") from None

    def _found(self, name: str, folder: Path) -> Found | Target:
        if path := subject.saved_at(name):
            return local.in_files(name, path, folder)
        if target := self.target(name):
            return self._built(target, folder) or target
        bare = name.removeprefix(ENGINE).removeprefix(REGISTRY)
        if not name.startswith(REGISTRY) and (client := local.engine_has(bare)):
            return local.in_engine(name, client, bare, folder)
        if name.startswith(ENGINE):
            raise ConfigError(f"{name}: the engine's store has no such image")
        reference = parse(bare)
        if self.offline:
            raise ConfigError(f"{name}: is not in the engine's store, and --offline asks no registry; give a layout")
        return remote.find(name, reference, self.connect(reference.host), folder)

    def _built(self, target: Target, folder: Path) -> Found | None:
        """A target in the engine's store or in the folder of builds, if it has the versions of the plan."""
        if client := local.engine_has(target.name):
            found = local.in_engine(target.id, client, target.name, folder)
            if _is(found, target):
                return found
        path = self.folder / target.id / "layout"
        if path.is_dir():
            found = local.in_files(target.id, path, folder)
            if _is(found, target):
                return found
        return None


def _is(found: Found, target: Target) -> bool:
    return all(components_of(found.choose(platform).labels) == target.components for platform in found.platforms)
