"""`imagebuild plan --github`: the jobs of a workflow."""

from __future__ import annotations

import json
from collections.abc import Sequence

from imagebuild import changed, cost, github, preview, steps
from imagebuild.console import err, out
from imagebuild.errors import ConfigError
from imagebuild.models import Target
from imagebuild.revision import Places


def show(
    work: preview.Work,
    targets: Sequence[Target],
    platforms: Sequence[str],
    since: str | None,
    places: Places,
    prepare: preview.Prepare,
    jobs: int,
) -> None:
    """Print one line of JSON; with `since`, of what differs from that state of the project only.

    Raises ConfigError for an unknown revision, or for targets that are for none of the platforms.
    """
    wanted = preview.named_platforms(platforms)
    side = preview.side_of(work.project, work.versions, targets, wanted, "bootstrap")
    if not any(side.settings(target) for target in targets):
        raise ConfigError(f"--platform {' '.join(platforms)}: no selected target is for it")
    if since is not None:
        found = list(changed.changes(changed.state_before(since, places, prepare), changed.state_of(side)))
        err.print(changed.summary(found, len(targets), since), markup=False)
        targets = [change.target for change in found]
    builds = [github.Build(t.id, p) for t in targets for p in t.platforms if p in wanted or not wanted]
    by_id = {target.id: target for target in targets}

    def compiled(build: github.Build) -> github.Compiled:
        text = side.renderer.dockerfile(by_id[build.target]).text
        setting = steps.Setting(build.platform, build.platform)
        return frozenset(s.key for s in steps.steps_of(text, setting) if cost.compiles(s, work.project))

    groups = github.grouped(builds, jobs, compiled)
    if len(groups) < len(builds):
        err.print(f"{len(builds)} builds in {len(groups)} jobs of at most {max(map(len, groups))}", markup=False)
    out.print(json.dumps(github.matrix(groups, work.project.matrix.model.github_runners)), markup=False)
