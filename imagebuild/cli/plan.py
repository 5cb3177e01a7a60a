"""Run `imagebuild plan` and `imagebuild render`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    DOCKERFILES,
    MATRIX,
    BaseOption,
    DockerfilesOption,
    JsonOption,
    LockOption,
    MarkdownOption,
    MatrixOption,
    OutputOption,
    PlatformsOption,
    SelectArgument,
    SetOption,
    WithOption,
    WithoutOption,
    changes_of,
    example,
    open_workspace,
    parse_platforms,
    print_or_write,
    print_result,
    project_paths,
)
from imagebuild.core.errors import ConfigError


@example(
    "imagebuild plan quickstart cuda=13.5",
    "imagebuild plan --why              # also what is not built, and the reason",
    "imagebuild plan --from v1.2        # what a build executes after that revision",
    "imagebuild plan --json -           # all of the plan, for programs",
)
def plan(
    select: SelectArgument = None,
    why: Annotated[bool, typer.Option("--why", help="Also list what is not built, with the reason.")] = False,
    before: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="REVISION",
            help="Say what a build executes after this git revision or folder was built; `nothing`: all of it.",
        ),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--to", metavar="REVISION", help="With --from: to here, not to the working tree.")
    ] = None,
    markdown: MarkdownOption = False,
    github: Annotated[bool, typer.Option("--github", help="Print the matrix of a GitHub Actions workflow.")] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--changed-since", metavar="REVISION", help="With --github: only targets that differ from this revision."
        ),
    ] = None,
    github_jobs: Annotated[
        int, typer.Option("--github-jobs", min=1, metavar="NUMBER", help="With --github: at most this many jobs.")
    ] = 256,
    platform: PlatformsOption = None,
    base: BaseOption = "bootstrap",
    json_file: JsonOption = None,
    settings: SetOption = None,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """List the targets that a build would build, or what a change makes it execute again."""
    if since is not None and not github:
        raise ConfigError("--changed-since: needs --github; `plan --from` says what a change costs")
    if before is None and (after or markdown):
        raise ConfigError("--to and --markdown: need --from")
    if before is None and platform and not github:
        raise ConfigError("--platform: needs --from or --github")
    if before and (github or why):
        raise ConfigError("--from: is not for --github or --why")
    if sum((markdown, github, why, json_file is not None)) > 1:
        raise ConfigError("--json, --markdown, --github and --why exclude each other")
    platforms = parse_platforms(platform)
    changes = changes_of(settings)
    if before or github:
        from imagebuild.build import change

        request = change.ChangeRequest(
            before or since, project_paths(matrix, dockerfiles, lock), changes, after, select or (), platforms, base
        )
        if github:
            change.print_workflow_jobs(request, github_jobs)
        elif markdown:
            change.show_cost(change.predict_cost(request), markdown=True)
        else:
            cost = change.predict_cost(request)
            print_result(json_file, lambda: cost.model_dump_json(indent=1), lambda: change.show_cost(cost))
        return
    from imagebuild.project.plan import restricted_components, select_excluded, select_targets

    workspace = open_workspace(matrix, dockerfiles, lock, changes)
    targets = select_targets(workspace.plan, select or ())
    excluded = select_excluded(workspace.plan, select or ())
    restricted = restricted_components(workspace.plan, targets)

    def as_json() -> str:
        from imagebuild.project.matrix import Plan

        full = [t.model_copy(update={"stages": workspace.renderer.dockerfile(t).stages}) for t in targets]
        return Plan(targets=tuple(full), excluded=excluded, restricted=restricted).model_dump_json(indent=1)

    def show() -> None:
        from imagebuild.core.console import out, print_table

        rows = [(t.id, ", ".join(p.removeprefix("linux/") for p in t.platforms), t.name) for t in targets]
        print_table(("target", "platforms", "image"), rows)
        if restricted:
            out.print()
            print_table(("restricted", "to publish images with it"), list(restricted.items()))
        if why:
            out.print()
            print_table(("not built", "rule", "reason"), [(e.id, e.rule, e.reason) for e in excluded])

    print_result(json_file, as_json, show)


@example(
    "imagebuild render open-cuda13.5-debian13-devel > Dockerfile",
    "imagebuild render quickstart-cuda13.5-* --set nccl=2.31.2 --append more.Dockerfile -o Dockerfile",
)
def render(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A target's id, or a glob that fits only one.")],
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    base_image: Annotated[
        str | None,
        typer.Option("--base-image", metavar="IMAGE", help="Start from this image instead of the target's own base."),
    ] = None,
    append: Annotated[
        Path | None, typer.Option("--append", metavar="FILE", help="File with instructions to add near the end.")
    ] = None,
    output: OutputOption = None,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Print the self-contained Dockerfile of a target."""
    from imagebuild.core.files import read_text
    from imagebuild.project.plan import select_one

    workspace = open_workspace(matrix, dockerfiles, lock, changes_of(settings, with_, without))
    chosen = select_one(workspace.plan, target)
    more = read_text(append) if append else ""
    print_or_write(workspace.renderer.dockerfile(chosen, base=base_image, append=more).text, output)
