"""Run `imagebuild publish`, `each` and `prune`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.console import err, out, print_table
from imagebuild.core.errors import NothingSelected, plural
from imagebuild.core.run import run_in_foreground

if TYPE_CHECKING:
    from imagebuild.oci.registry import Repository
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
    signing: options.SignOptions,
    select: options.SelectArgument = None,
    registry: options.RegistryOption = None,
    results: Annotated[
        list[Path] | None,
        option(
            "--results DIR",
            "Folder with results of build, verify, scan and benchmarks; by default build. Repeat for several.",
        ),
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", "Say what would be done, and do nothing.")] = False,
    json_file: options.JsonOption = None,
) -> None:
    """Give tags to images whose checks passed, and to nothing else.

    Exit status 0: all is published; 1: something was refused; 4: a registry failed.
    """
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.revision import current_revision, origin_of_build
    from imagebuild.publish.publish import PublishRequest, print_published, publish_targets
    from imagebuild.publish.signatures import GITHUB_ISSUER

    signer = signing.signer()
    workspace = project.open(edits.parse(registry))
    origin = None
    if signer and signer.issuer == GITHUB_ISSUER:
        folder = workspace.project.root
        origin = {**origin_of_build(folder, os.environ), "revision": current_revision(folder) or ""}
    request = PublishRequest(select or (), results or (options.BUILDS,), dry_run, signer, origin)
    result = publish_targets(workspace.renderer, workspace.plan, request, cache(connect_registry))
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
    images = _pushed_images(folder) if published is None else _published_images(project, published, folder)
    platforms = options.parse_platforms(platform)
    chosen = [image for image in images if not platforms or image["platform"] in platforms]
    if not chosen:
        where = published or folder
        raise NothingSelected(f"{where}: no image for this; `build --push` leaves a {RESULT}, and aliases name images")
    if status := _run_for_each(chosen, command):
        raise typer.Exit(status)


def _published_images(project: options.ProjectFiles, registry: str, folder: Path) -> Iterator[dict[str, str]]:
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry
    from imagebuild.publish.freshness import published_images

    plan = project.open(options.PlanChanges().parse(registry)).plan
    for image in published_images(plan.targets, cache(connect_registry)):
        if image.problem:
            err.print(f"{image.target}: {image.problem}", markup=False)
            continue
        own = folder / f"{image.target}-{image.platform.rpartition('/')[2]}"
        own.mkdir(parents=True, exist_ok=True)
        index = parse_reference(image.index)
        yield _values(image.target, image.platform, index.name, image.digest, index.digest, own)


def _pushed_images(folder: Path) -> Iterator[dict[str, str]]:
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


def _run_for_each(images: Sequence[dict[str, str]], command: Sequence[str]) -> int:
    """Run a command with the values of each image; return the worst exit status. A failure does not stop the others.

    Raises CommandError if the program cannot be started.
    """
    known = re.compile(rf"{{({'|'.join(images[0])})}}")  # other braces stay
    failed: dict[str, int] = {}
    for image in images:
        title = f"{image['target']} {image['platform']}"
        err.print(f"{title}: {image['image']}", markup=False)
        words = [known.sub(lambda name: image[name[1]], word) for word in command]  # noqa: B023 - called at once
        if status := run_in_foreground(words):
            failed[title] = status
    for title, status in failed.items():
        err.print(f"{title}: exit status {status}", markup=False)
    err.print(f"{len(images) - len(failed)} of {len(images)} succeeded", markup=False)
    return max(failed.values(), default=0)


@options.example(
    "imagebuild prune --registry ghcr.io/acme", "imagebuild prune --registry ghcr.io/acme --older-than 28 --yes"
)
def prune(
    project: options.ProjectFiles,
    select: options.SelectArgument = None,
    registry: options.RegistryOption = None,
    days: Annotated[int, option("--older-than DAYS", "Keep what was pushed more recently.", min=0)] = 14,
    yes: Annotated[bool, option("--yes", "Delete; without it, only list.")] = False,
    json_file: options.JsonOption = None,
) -> None:
    """List what builds pushed and is not needed any more; delete it with --yes.

    It looks into the staging repositories of the targets' images.
    """
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.plan import repository_name
    from imagebuild.project.select import select_targets
    from imagebuild.publish.prune import delete_staged, judge_staged

    workspace = project.open(options.PlanChanges().parse(registry))
    targets = select_targets(workspace.plan, select or ())
    names = dict.fromkeys(repository_name(workspace.project, target.image) for target in targets)
    connect, now = cache(connect_registry), datetime.now(UTC)
    places = [connect(name.host).at(name.repository) for name in map(parse_reference, names)]
    judged = {place: judge_staged(place, now, timedelta(days=days)) for place in places}
    listed = [{"repository": str(place), **asdict(v)} for place, verdicts in judged.items() for v in verdicts]
    options.print_result(json_file, listed, lambda: _show(judged))

    console = err if json_file == options.STDOUT else out
    number = sum(verdict.verdict == "delete" for verdicts in judged.values() for verdict in verdicts)
    if not number:
        console.print("Nothing to delete.")
    elif not yes:
        console.print(f"{number} would be deleted; add --yes to delete them.")
    else:
        deleted = sum(delete_staged(place, verdicts) for place, verdicts in judged.items())
        console.print(f"Deleted {plural(number, 'image')}, {plural(deleted, 'manifest')}.")


def _show(judged: Mapping[Repository, Sequence[PruneVerdict]]) -> None:
    for place, verdicts in judged.items():
        out.print(f"{place}: {len(verdicts)} pushed", markup=False)
        rows = [(v.digest[:19], f"{v.pushed:%Y-%m-%d %H:%M}", v.verdict) for v in verdicts]
        print_table(("digest", "pushed", "verdict"), rows)
