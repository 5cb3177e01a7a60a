"""The commands `imagebuild impact` and `imagebuild ci-matrix`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import click

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError

MAX_JOBS = 256
"""The maximum number of jobs in a matrix, as GitHub allows."""


@options.command(
    "imagebuild impact v1.2             # the working tree against a revision",
    "imagebuild impact HEAD open --set nccl=2.31.2",
    "imagebuild impact v1.2 --to HEAD --json -",
    "imagebuild impact nothing          # all steps: the build of an empty cache",
)
@click.argument(
    "before",
    metavar="REVISION",
    help="Old state of the project, which was built: a git revision or a folder. `nothing` means an empty cache.",
)
@options.select
@click.option(
    "--to",
    "after",
    metavar="REVISION",
    help="New state of the project: a git revision or a folder. Default: the working tree.",
)
@options.markdown
@options.platforms
@options.base
@options.json_file
@options.project
@options.plan_edits
def impact(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    before: str,
    select: tuple[str, ...],
    after: str | None,
    markdown: bool,
    platforms: tuple[str, ...],
    base: str,
    json_file: str | None,
) -> None:
    """List the build steps that a change runs again.

    imagebuild assumes that the cache contains all steps of the old state, and lists the steps of the new state that are
    not in this cache."""
    from imagebuild.build.impact import predict_impact, print_impact

    if markdown and json_file == options.STDOUT:
        raise ConfigError("--markdown: cannot be combined with --json -; write the JSON to a file")
    result = predict_impact(
        project.folder, before, after, changes=edits.parse(), select=select,
        platforms=options.parse_platforms(platforms), base=base,
    )  # fmt: skip
    options.print_result(json_file, result, lambda: print_impact(result, markdown=markdown))


@options.command(
    "imagebuild ci-matrix --changed-since origin/main",
    "imagebuild ci-matrix --unpublished --registry ghcr.io/acme --max-jobs 20",
)
@options.select
@click.option(
    "--changed-since", "since", metavar="REVISION", help="Include only targets that changed since this git revision."
)
@click.option("--unpublished", is_flag=True, help="Include only targets whose current state is not published.")
@options.registry
@click.option(
    "--max-jobs",
    metavar="NUMBER",
    type=options.IntRange(min=1),
    default=MAX_JOBS,
    help="Maximum number of jobs. If there are more builds, a job builds several targets.",
)
@options.platforms
@click.option("--rendered", metavar="FILE", type=options.PATH, help="Write hashes for `publish --rendered` to FILE.")
@options.project
@options.plan_edits
def ci_matrix(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    select: tuple[str, ...],
    since: str | None,
    unpublished: bool,
    registry: str | None,
    max_jobs: int,
    platforms: tuple[str, ...],
    rendered: Path | None,
) -> None:
    """Print the job matrix of a GitHub Actions workflow, as one line of JSON.

    Each target has a job for each of its platforms."""
    from imagebuild.build.ci_matrix import changed_since, print_matrix
    from imagebuild.build.state import read_state
    from imagebuild.core.console import err

    if since is not None and unpublished:
        raise ConfigError("--changed-since: cannot be combined with --unpublished; leave out one of them")
    changes = edits.parse(registry)
    # The old state uses the image names in its matrix, so --registry would make every target differ.
    state = read_state(
        project.folder, changes if unpublished else edits.parse(), select, options.parse_platforms(platforms)
    )
    targets = state.targets
    if since is not None:
        targets = changed_since(since, project.folder, state)
        err.print(f"{len(targets)} of {len(state.targets)} targets differ from {since}")
    if unpublished:
        from imagebuild.oci.registry import connect_registry
        from imagebuild.publish.publish import unpublished_targets

        targets = unpublished_targets(state.renderer, state.targets, cache(connect_registry))
        what = "are not published in their current state"
        err.print(f"{len(targets)} of {len(state.targets)} targets {what}")
    if rendered:
        from imagebuild.core.files import write_text
        from imagebuild.publish.decide import hashes_of

        write_text(rendered, hashes_of(state.renderer, targets).model_dump_json())
    print_matrix(state, targets, max_jobs)
