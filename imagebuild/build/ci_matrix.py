"""The job matrix of a GitHub Actions workflow, for all targets or for those that changed since a revision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

from imagebuild.build import bake
from imagebuild.build.state import NOTHING, ProjectState, read_state
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.project.plan import Target
from imagebuild.project.project import Changes
from imagebuild.project.revision import files_at_revision


def job_matrix(builds: Sequence[tuple[str, Platform]], max_jobs: int) -> dict[str, list[dict[str, Any]]]:
    """Return the `matrix` of a GitHub workflow with at most `max_jobs` jobs. Each job builds for one platform.

    If a job builds several targets, these targets are neighbours in `builds`. The matrix names no runner, because a
    pull request could change it. Raises ConfigError if there are more platforms than jobs."""
    parts: dict[Platform, list[str]] = {}
    for target, platform in builds:
        parts.setdefault(platform, []).append(target)
    if len(parts) > max_jobs:
        raise ConfigError(f"--max-jobs {max_jobs}: each platform needs a job; use at least {len(parts)}")
    size = next(size for size in count(1) if sum(ceil(len(part) / size) for part in parts.values()) <= max_jobs)
    jobs: list[dict[str, Any]] = []
    for platform, targets in parts.items():
        arch = platform.removeprefix("linux/")
        for start in range(0, len(targets), size):
            first, *more = group = targets[start : start + size]
            jobs.append(
                {
                    "name": f"{first} and {len(more)} more {arch}" if more else f"{first} {arch}",
                    "id": f"group{len(jobs) + 1:03}-{arch}" if more else f"{first}-{arch}",
                    "targets": " ".join(group),
                    "platform": platform,
                }
            )
    return {"include": jobs}


def print_matrix(state: ProjectState, targets: Sequence[Target], max_jobs: int) -> None:
    """Print the job matrix of `targets`, which belong to `state`, as one line of JSON.
    Raises ConfigError if no target of `state` is for one of the state's platforms."""
    if not any(bake.platforms_of(target, state.platforms) for target in state.targets):
        wanted = " ".join(state.platforms)
        raise ConfigError(f"--platform {wanted}: no selected target is for this platform; remove the option")
    # Publishing a target needs all its platforms, even if only one of them changed.
    builds = [(t.id, platform) for t in targets for platform in bake.platforms_of(t, state.platforms)]
    matrix = job_matrix(builds, max_jobs)
    if len(matrix["include"]) < len(builds):
        err.print(f"{len(builds)} builds in {len(matrix['include'])} jobs")
    out.print(json.dumps(matrix))


def changed_since(reference: str, folder: Path, after: ProjectState) -> list[Target]:
    """Return the targets that differ from an earlier state, which is a revision, a folder or `nothing`.

    A target differs if an input of its image changed, or if the target has a new platform or tag. This version of
    imagebuild renders both states. If imagebuild cannot read the earlier state, all targets differ. Raises ConfigError
    for a reference that is neither a revision nor a folder."""
    if reference == NOTHING:
        return list(after.targets)
    with files_at_revision(reference, folder) as there:
        try:
            before = read_state(there, Changes(), ())
            known = {target.id: (target, before.renderer.key(target)) for target in before.targets}
        except ConfigError as error:
            # This version may refuse a file that an older version accepted. CI must not fail because of such a file.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}")
            return list(after.targets)

    def differs(target: Target) -> bool:
        if target.id not in known:
            return True
        old, key = known[target.id]
        more_platforms = {*bake.platforms_of(target, after.platforms)} - {*old.platforms}
        more_tags = {*target.tags, *target.aliases} - {*old.tags, *old.aliases}
        return bool(more_platforms or more_tags) or key != after.renderer.key(target)

    return [target for target in after.targets if differs(target)]
