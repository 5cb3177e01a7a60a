"""A state of a project, such as its files at a git revision, and the stages that BuildKit runs for its targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagebuild.build import bake
from imagebuild.core.fields import Platform
from imagebuild.project import load
from imagebuild.project.lockfile import digest_of
from imagebuild.project.plan import Target, make_plan
from imagebuild.project.project import Changes
from imagebuild.project.select import select_targets
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import Stage, needed_stages, stages_of

NOTHING = "nothing"
"""The name of the state before the first build: an empty cache."""


@dataclass(frozen=True)
class ProjectState:
    """One state of a project, with the targets to build."""

    renderer: Renderer
    targets: Sequence[Target]
    platforms: Sequence[str] = ()
    """The platforms to build for. Empty: all platforms of each target."""
    base: str = "bootstrap"
    """The value of `--base`."""

    def builds(self) -> Iterator[tuple[Target, Platform, dict[str, Stage]]]:
        """Yield each target for each of its platforms, with the stages that BuildKit runs, the final stage last."""
        project = self.renderer.project
        bases = project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        # A bootstrapped base depends only on the release, not on the official image that it replaces.
        replaced = {digest_of(project.lock, b.image): f"bootstrapped {b.release}" for b in bases if b.release}
        for target in self.targets:
            text = self.renderer.dockerfile(target).text
            for platform in bake.platforms_of(target, self.platforms):
                yield target, platform, needed_stages(stages_of(text, platform, replaced))


def read_state(
    folder: Path, changes: Changes, select: Sequence[str], platforms: Sequence[str] = (), base: str = "bootstrap"
) -> ProjectState:
    """Read a project, select targets, and return the state.
    Raises ConfigError that lists every mistake in the project, and NothingSelected if no target is selected."""
    project = load.load_project(folder).changed(changes)
    targets = select_targets(make_plan(project, select if changes.options_of_plan else None), select)
    return ProjectState(Renderer(project), targets, platforms, base)
