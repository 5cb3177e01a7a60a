"""Run `imagebuild publish`, `each` and `prune`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.console import err, out, print_table
from imagebuild.core.errors import ConfigError, NothingSelected, plural, suggestion
from imagebuild.core.run import run_in_foreground

if TYPE_CHECKING:
    from imagebuild.publish.prune import PruneVerdict

RESULT = "result.json"
"""File that a build leaves in the folder of each target."""


@options.example(
    "imagebuild publish --registry ghcr.io/acme --dry-run",
    "imagebuild publish --registry ghcr.io/acme --results build --sign --key cosign.key",
)
def publish(
    project: options.ProjectFiles,
    edits: options.ImageChanges,
    select: options.SelectArgument = None,
    registry: options.RegistryOption = None,
    results: Annotated[
        list[Path] | None,
        option(
            "--results DIR",
            "Folder with results of build, verify, scan and benchmarks; by default build. Repeat for several.",
        ),
    ] = None,
    platform: options.PlatformsOption = None,
    allow_dirty: Annotated[
        bool, option("--allow-dirty", "Publish builds of files that are not committed; their tags say so.")
    ] = False,
    sign: options.SignOption = False,
    key: options.SigningKeyOption = None,
    identity: options.IdentityOption = None,
    issuer: options.IssuerOption = None,
    no_tlog: options.UnloggedOption = False,
    dry_run: Annotated[bool, option("--dry-run", "Say what would be done, and do nothing.")] = False,
    json_file: options.JsonOption = None,
) -> None:
    """Give tags to images whose checks passed, and to nothing else.

    Exit status 0: all is published; 1: something was refused; 4: a registry failed.
    """
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.revision import current_revision, origin_of_build
    from imagebuild.publish.attest import GITHUB_ISSUER, signer_of
    from imagebuild.publish.decide import key_of_target
    from imagebuild.publish.publish import (
        PublishRequest,
        PublishTools,
        print_published,
        provenance_maker,
        publish_targets,
    )

    signer = signer_of(key, sign=sign, log=not no_tlog, identity=identity, issuer=issuer)
    workspace = project.open(edits.parse(registry))
    request = PublishRequest(
        select=select or (), folders=results or (options.BUILDS,), platforms=options.parse_platforms(platform),
        allow_dirty=allow_dirty, dry_run=dry_run,
    )  # fmt: skip
    workflow, origin = "", {}
    if signer and signer.issuer == GITHUB_ISSUER:
        folder = workspace.project.root
        revision = current_revision(folder) or ""
        workflow, origin = str(signer.identity), {**origin_of_build(folder, os.environ), "revision": revision}
    tools = PublishTools(
        registry=cache(connect_registry),
        provenance=provenance_maker(workspace.renderer, allow_dirty=allow_dirty, workflow=workflow, origin=origin),
        key=partial(key_of_target, workspace.renderer),
        signer=None if dry_run else signer,
    )
    result = publish_targets(workspace.project, workspace.plan, request, tools)
    options.print_result(json_file, result, lambda: print_published(result, workspace.plan))
    if result.exit_status:
        raise typer.Exit(result.exit_status)


@options.example("imagebuild each build -- imagebuild verify '{image}' --pull --json '{folder}/verify.json'")
def each(
    project: options.ProjectFiles,
    folder: Annotated[Path, argument("DIR", "Folder below which `imagebuild build --push` left its results.")],
    command: Annotated[
        list[str],
        argument(
            "COMMAND",
            "Program and arguments; {image}, {index}, {target}, {platform}, {arch} and {folder} are filled in.",
        ),
    ],
    platform: options.PlatformsOption = None,
    published: Annotated[
        str | None,
        option("--published HOST/PATH", "Take the images that aliases name there instead; DIR gets a folder for each."),
    ] = None,
) -> None:
    """Run a command for every image that was pushed, by its digest.

    A failure does not stop the others; the worst exit status counts.
    """
    if published is None and not folder.is_dir():
        raise NothingSelected(
            f"{folder}: no such folder; before the command, name the one where builds are: `imagebuild each build -- …`"
        )
    images = None if published is None else list(_published_images(project, published, folder))
    if images == []:
        raise NothingSelected(f"--published {published}: no alias of the project's targets is there")
    if status := run_for_each(folder, options.parse_platforms(platform), command, images=images):
        raise typer.Exit(status)


def _published_images(project: options.ProjectFiles, registry: str, folder: Path) -> Iterator[dict[str, str]]:
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry
    from imagebuild.publish.scan import published_images

    plan = project.open(options.PlanChanges().parse(registry)).plan
    for image in published_images(plan.targets, cache(connect_registry)):
        if image.problem:
            err.print(f"{image.target}: {image.problem}", markup=False)
            continue
        own = folder / f"{image.target}-{image.platform.rpartition('/')[2]}"
        own.mkdir(parents=True, exist_ok=True)
        index = parse_reference(image.name)
        yield _values(image.target, image.platform, index.name, image.digest, index.digest, own)


def pushed_images(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the images that results below a folder name, as the values that a command can use, sorted by path.

    Raises ResultError for a result that cannot be read.
    """
    from imagebuild.core.files import read_text
    from imagebuild.core.yaml import read_written
    from imagebuild.project.records import BuildResult

    for path in sorted(folder.rglob(RESULT)):
        result = read_written(BuildResult, read_text(path), str(path))
        for platform, digest in result.manifests.items():
            if result.repository:
                yield _values(result.target, platform, result.repository, digest, result.digest, path.parent)


def _values(
    target: str, platform: str, repository: str, digest: str, index: str | None, folder: Path
) -> dict[str, str]:
    return {
        "target": target, "platform": platform, "arch": platform.removeprefix("linux/"), "folder": str(folder),
        "image": f"{repository}@{digest}", "index": f"{repository}@{index or digest}",
    }  # fmt: skip


def run_for_each(
    folder: Path,
    platforms: Sequence[str],
    command: Sequence[str],
    call: Callable[[Sequence[str]], int] = run_in_foreground,
    images: Iterable[dict[str, str]] | None = None,
) -> int:
    """Run a command for every image that was pushed; return the worst exit status. A failure does not stop the others.

    Raises NothingSelected if there is no image, CommandError if the program cannot be started.
    """
    pushed = pushed_images(folder) if images is None else images
    chosen = [image for image in pushed if not platforms or image["platform"] in platforms]
    if not chosen:
        for_ = f" for {', '.join(platforms)}" if platforms else ""
        problem = f"no {RESULT} below it names a pushed image{for_}; push one with `imagebuild build --push`"
        raise NothingSelected(f"{folder}: {problem}")
    grouped = os.environ.get("GITHUB_ACTIONS") == "true"
    known = re.compile(rf"{{({'|'.join(chosen[0])})}}")  # other braces stay
    failed: dict[str, int] = {}
    for image in chosen:
        title = f"{image['target']} {image['platform']}"
        err.print(f"::group::{title}" if grouped else f"{title}: {image['image']}", markup=False)
        words = [known.sub(lambda name: image[name[1]], word) for word in command]  # noqa: B023 - called at once
        if status := call(words):
            failed[title] = status
        if grouped:
            err.print("::endgroup::", markup=False)
    for title, status in failed.items():
        err.print(f"{title}: exit status {status}", markup=False)
    err.print(f"{len(chosen) - len(failed)} of {len(chosen)} succeeded", markup=False)
    return max(failed.values(), default=0)


@options.example(
    "imagebuild prune --registry ghcr.io/acme", "imagebuild prune --registry ghcr.io/acme --older-than 4w --yes"
)
def prune(
    project: options.ProjectFiles,
    images: Annotated[list[str] | None, argument("IMAGE", "Globs of images' names; by default all.")] = None,
    registry: options.RegistryOption = None,
    older_than: Annotated[str, option("--older-than AGE", "Keep what was pushed more recently: 36h, 14d, 2w.")] = "14d",
    yes: Annotated[bool, option("--yes", "Delete; without it, only list.")] = False,
    json_file: options.JsonOption = None,
) -> None:
    """List what builds pushed and is not needed any more; delete it with --yes."""
    from imagebuild.oci.registry import connect_registry
    from imagebuild.publish.prune import Pruning, decide_pruning, parse_age, repositories_of

    limit = parse_age(older_than)
    workspace = project.open(options.PlanChanges().parse(registry))
    connect = cache(connect_registry)
    now = datetime.now(UTC)
    surveyed = []
    for image in _matching(list(workspace.project.matrix.model.images), images or ()):
        pruning = Pruning(*repositories_of(workspace.project, workspace.plan, image, connect), limit, now)
        surveyed.append((pruning, decide_pruning(pruning.survey(), now, limit)))
    listed = [{"repository": str(p.staging), **asdict(verdict)} for p, verdicts in surveyed for verdict in verdicts]
    options.print_result(json_file, listed, lambda: _show({str(p.staging): verdicts for p, verdicts in surveyed}))

    console = err if json_file == options.STDOUT else out
    deletable = [(pruning, [v for v in verdicts if not v.kept]) for pruning, verdicts in surveyed]
    if not any(able for _, able in deletable):
        console.print("Nothing to delete.")
    elif not yes:
        console.print(f"{sum(len(able) for _, able in deletable)} would be deleted; add --yes to delete them.")
    for pruning, able in deletable if yes else ():
        if able:
            deleted, spared = pruning.delete(able)
            for verdict in spared:
                err.print(f"kept after all: {verdict.staged.digest} {verdict.kept}", markup=False)
            done = plural(len(able) - len(spared), "image")
            console.print(f"Deleted {done}, {plural(deleted, 'manifest')} of {pruning.staging}.", markup=False)


def _matching(known: Sequence[str], globs: Iterable[str]) -> list[str]:
    """Return the known names that match a glob, or all if there is none. Raises ConfigError if one matches nothing."""
    globs = tuple(globs)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in known):
            raise ConfigError(f"{glob}: no such image{suggestion(glob, list(known))}")
    return [name for name in known if not globs or any(fnmatchcase(name, glob) for glob in globs)]


def _show(surveyed: Mapping[str, Sequence[PruneVerdict]]) -> None:
    from imagebuild.publish.prune import short_digest

    for staging, verdicts in surveyed.items():
        if not verdicts:
            out.print(f"{staging}: nothing was pushed.", markup=False)
            continue
        out.print(f"{staging}: {len(verdicts)} pushed, {sum(not v.kept for v in verdicts)} to delete", markup=False)
        rows = []
        for verdict in verdicts:
            parts = (("platform", verdict.parts), ("attachment", verdict.attachments))
            taken = " and ".join(plural(len(digests), name) for name, digests in parts if digests)
            text = f"kept: {verdict.kept}" if verdict.kept else f"delete, with {taken}" if taken else "delete"
            rows.append((short_digest(verdict.staged.digest), f"{verdict.staged.pushed:%Y-%m-%d %H:%M}", text))
        print_table(("digest", "pushed", "verdict"), rows)
