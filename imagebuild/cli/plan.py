"""Run `imagebuild init`, `imagebuild plan` and `imagebuild render`."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagebuild.cli.options import Workspace

MOST_JOBS = 256
"""Jobs that a matrix of GitHub may have."""
NEEDS = {
    "--to": ("--from",),
    "--markdown": ("--from",),
    "--changed-since": ("--github",),
    "--github-jobs": ("--github",),
    "--unpublished": ("--github",),
    "--platform": ("--from", "--github"),
    "--base": ("--from", "--github"),
}
"""Option of `plan` → those of which it needs one."""
EXCLUSIVE = (
    ("--json", "--markdown", "--github", "--why"),
    ("--from", "--github", "--why"),
    ("--changed-since", "--unpublished"),
)
"""Options of `plan` of which only one can be given."""


@options.example(
    "imagebuild plan quickstart cuda=13.5",
    "imagebuild plan --why              # also what is not built, and the reason",
    "imagebuild plan --from v1.2        # what a build executes after that revision",
    "imagebuild plan --json -           # all of the plan, for programs",
)
def plan(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    select: options.SelectArgument = None,
    why: bool = option("--why", "Also list what is not built, with the reason.", False),
    before: str | None = option(
        "--from REVISION", "What a build executes after one of this revision or folder; `nothing`: all of it.", None
    ),
    after: str | None = option("--to REVISION", "With --from: the new state, not the working tree.", None),
    markdown: options.MarkdownOption = False,
    github: bool = option("--github", "Print the matrix of a GitHub Actions workflow.", False),
    since: str | None = option("--changed-since REVISION", "With --github: only targets that differ from it.", None),
    unpublished: bool = option("--unpublished", "With --github: only targets not published as they are.", False),
    registry: options.RegistryOption = None,
    github_jobs: int = option("--github-jobs NUMBER", "With --github: at most this many jobs.", MOST_JOBS, min=1),
    platform: options.PlatformsOption = None,
    base: options.BaseOption = "bootstrap",
    json_file: options.JsonOption = None,
) -> None:
    """List the targets of a build, or the steps that a change makes a build execute again."""
    given = {
        "--from": before, "--to": after, "--why": why, "--markdown": markdown, "--json": json_file is not None,
        "--github": github, "--changed-since": since is not None, "--unpublished": unpublished,
        "--github-jobs": github_jobs != MOST_JOBS, "--platform": platform, "--base": base != "bootstrap",
    }  # fmt: skip
    options.check_combination(given, NEEDS, EXCLUSIVE)
    platforms = options.parse_platforms(platform)
    changes = edits.parse(registry)
    if before or github:
        from imagebuild.build import change

        if unpublished and not (select := _unpublished(project.open(changes), select or ())):
            sys.stdout.write('{"include": []}\n')
            return
        if github:
            state = change.read_state(project.folder, edits.parse(), select or (), platforms)
            change.print_workflow_jobs(state, project.folder, since, github_jobs)
            return
        cost = change.predict_cost(
            project.folder, before or "", after, changes=changes, select=select or (), platforms=platforms, base=base
        )
        options.print_result(json_file, cost, lambda: change.show_cost(cost, markdown=markdown))
        return
    from imagebuild.project.plan import Plan
    from imagebuild.project.select import restricted_components, select_excluded, select_targets

    workspace = project.open(changes)
    targets = select_targets(workspace.plan, select or ())
    excluded = select_excluded(workspace.plan, select or ())
    restricted = restricted_components(workspace.plan, targets)
    whole = None
    if json_file is not None:
        full = [t.model_copy(update={"stages": workspace.renderer.dockerfile(t).stages}) for t in targets]
        whole = Plan(targets=tuple(full), excluded=excluded, restricted=restricted)

    def show() -> None:
        from imagebuild.core.console import err, out, print_table
        from imagebuild.project.lockfile import key_of, lacks

        # For JSON, everything was rendered already.
        if not whole:
            workspace.renderer.check(targets)
            sources = {(t.image, owned.source) for t in targets for owned in workspace.renderer.recipe(t).sources}
            unpinned = [(image, source) for image, source in sources if lacks(workspace.project.lock, source)]
            if number := len({key_of(source) for _, source in unpinned}):
                names = sorted({image for image, _ in unpinned})
                err.print(f"sources without a pin: {number}; `{changes.lock_command(*names)}` adds them", markup=False)
        rows = [(t.id, ", ".join(p.removeprefix("linux/") for p in t.platforms), t.name) for t in targets]
        print_table(("target", "platforms", "image"), rows, whole=["image"])
        if restricted:
            out.print()
            print_table(("restricted", "to publish images with it"), list(restricted.items()))
        if why and excluded:
            out.print()
            print_table(("not built", "rule", "reason"), [(e.id, e.rule, e.reason) for e in excluded])

    options.print_result(json_file, whole, show)


def _unpublished(workspace: Workspace, select: Sequence[str]) -> list[str]:
    """Return the targets that are not published as they are now, and print how many."""
    from imagebuild.core.console import err
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.select import select_targets
    from imagebuild.publish.publish import unpublished_targets

    targets = select_targets(workspace.plan, select)
    differing = unpublished_targets(workspace.renderer, targets, cache(connect_registry))
    err.print(f"{len(differing)} of {len(targets)} targets are not published as they are now", markup=False)
    return [target.id for target in differing]


@options.example(
    "imagebuild render open-cuda13.5-debian13-devel > Dockerfile",
    "imagebuild render quickstart-cuda13.5-* --set nccl=2.31.2 --append more.Dockerfile -o Dockerfile",
)
def render(
    project: options.ProjectFiles,
    edits: options.ImageChanges,
    target: str = argument("TARGET", "A target's id, or a glob that fits only one.", "*", completes="targets"),
    unresolved: bool = option("--unresolved", "Print it even if sources have no pin; it cannot be built then.", False),
    purpose: Literal["standalone"] | None = option(
        "--for standalone", "Leave out what only `imagebuild build` fills.", None
    ),
    output: options.OutputOption = None,
) -> None:
    """Print the self-contained Dockerfile of a target."""
    from imagebuild.project.lockfile import check_pinned
    from imagebuild.project.select import select_one

    workspace = project.open(edits.parse())
    chosen = select_one(workspace.plan, target)
    edits.check_base([chosen], pinned=False)
    words = (*project.words, *(("--for", purpose) if purpose else ()))
    warning, sources = "", [owned.source for owned in workspace.renderer.recipe(chosen).sources]
    try:
        check_pinned(workspace.project.lock, sources, workspace.project.changes.lock_command(chosen.id))
    except ConfigError as error:
        if not unresolved:
            raise ConfigError(f"{error}\n  or print the Dockerfile with --unresolved, to read it only") from None
        warning = f"# This cannot be built yet. {str(error).splitlines()[0].rstrip(':')}.\n"
    text = workspace.renderer.dockerfile(chosen, words).text
    options.print_or_write(warning + (STANDALONE.sub("", text) if purpose else text), output)


STANDALONE = re.compile(r"--mount=type=secret,\S+ *(\\\n *)?")
"""Secrets by which `build` hands mirrors and passwords to a step; docker needs none of them."""


@options.example(
    "imagebuild init                              # in an empty folder",
    "imagebuild init images --repository ghcr.io/acme --workflow acme/imagebuild@v0.1.0",
)
def init(
    folder: Path = argument("FOLDER", "Folder to write to; by default the current one.", Path()),
    repository: str = option("--repository HOST/PATH", "Where your images go, such as ghcr.io/acme.", "example"),
    image: str = option("--name NAME", "Name of the first image.", "train"),
    workflow: str | None = option(
        "--workflow OWNER/NAME@REVISION", "Also write a workflow that calls the one in this repository on GitHub.", None
    ),
) -> None:
    """Write a project of your own, on top of what comes with imagebuild."""
    from importlib.resources import files

    from imagebuild.core.console import out
    from imagebuild.core.files import write_text
    from imagebuild.project.changes import check_repository

    check_repository("--repository", repository)
    if not re.fullmatch("[a-z0-9][a-z0-9-]*", image):
        raise ConfigError(f"--name {image}: use lower-case letters, digits and hyphens")
    if workflow and not re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", workflow):
        raise ConfigError(f"--workflow {workflow}: write it as OWNER/NAME@REVISION, such as acme/imagebuild@v0.1.0")
    templates = files("imagebuild.project") / "templates"
    matrix = (templates / "matrix.yaml").read_text(encoding="utf-8")
    texts = {
        "matrix.yaml": matrix.replace("REPOSITORY", repository).replace("NAME", image),
        ".gitignore": "/build/\n",
    }
    if workflow:
        owner, _, revision = workflow.partition("@")
        called = (templates / "images.yml").read_text(encoding="utf-8")
        address = f"{owner}/.github/workflows/project.yml@{revision}"
        texts[".github/workflows/images.yml"] = called.replace("WORKFLOW", address)
    if there := [name for name in texts if (folder / name).exists()]:
        raise ConfigError(f"{folder / there[0]}: is there already; name an empty folder")
    for name, text in texts.items():
        write_text(folder / name, text)
        out.print(f"{folder / name}: written", markup=False)
    out.print("`imagebuild plan` lists the targets, `imagebuild build` builds them.", markup=False)
