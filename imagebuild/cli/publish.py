"""The commands `imagebuild publish`, `each` and `prune`."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from imagebuild.cli import options
from imagebuild.core.console import err, out, print_table
from imagebuild.core.errors import ConfigError, NothingSelected, ResultError, nearest, plural
from imagebuild.core.run import run_in_foreground

PLACEHOLDERS = ("target", "platform", "arch", "folder", "image", "index")
"""Names in braces that `each` replaces in the command. Other braces remain unchanged."""


@options.command()
def publish(
    project: options.ProjectFiles, edits: options.ImageChanges, signing: options.SignOptions, select: tuple[str, ...],
    registry: str | None, results: tuple[Path, ...], rendered: Path | None, dry_run: bool, json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.core.files import read_text
    from imagebuild.core.yaml import read_written
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.records import RenderedHashes
    from imagebuild.project.revision import current_revision, origin_of_build
    from imagebuild.publish.publish import PublishRequest, print_published, publish_targets

    signer = signing.signer()
    workspace = project.open(edits.parse(registry))
    folder = workspace.project.root
    origin = {**origin_of_build(folder, os.environ), "revision": current_revision(folder) or ""}
    hashes = read_written(RenderedHashes, read_text(rendered), str(rendered)) if rendered else None
    request = PublishRequest(select, results, dry_run, signer, hashes, origin)
    result = publish_targets(workspace.renderer, workspace.plan, request, cache(connect_registry))
    options.print_result(json_file, result, lambda: print_published(result, workspace.plan), result.exit_status)


@options.command()
def each(
    project: options.ProjectFiles, folder: Path, command: tuple[str, ...], platforms: tuple[str, ...],
    published: str | None,
) -> None:  # fmt: skip
    for name in (name for word in command for name in re.findall(r"(?<!\$){([a-z]+)}", word)):
        if name not in PLACEHOLDERS and (near := nearest(name, PLACEHOLDERS, likeness=0.7)):
            raise ConfigError(f"{{{name}}}: unknown placeholder; did you mean {{{near}}}?")
    images = _pushed_images(folder) if published is None else _published_images(project, published, folder)
    wanted = options.parse_platforms(platforms)
    chosen = [image for image in images if not wanted or image["platform"] in wanted]
    if not chosen:
        fix = "check the aliases in matrix.yaml" if published else "run `imagebuild build --push` first"
        raise NothingSelected(f"{published or folder}: no pushed image matches; {fix}")
    if status := _run_for_each(chosen, command):
        sys.exit(status)


def _published_images(project: options.ProjectFiles, registry: str, folder: Path) -> Iterator[dict[str, str]]:
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry
    from imagebuild.publish.freshness import published_images

    plan = project.open(options.PlanChanges().parse(registry)).plan
    for image in published_images(plan.targets, cache(connect_registry)):
        if image.problem:
            err.print(f"{image.target}: {image.problem}")
            continue
        own = folder / f"{image.target}-{image.platform.rpartition('/')[2]}"
        own.mkdir(parents=True, exist_ok=True)
        index = parse_reference(image.index)
        yield _values(image.target, image.platform, index.name, image.digest, index.digest, own)


def _pushed_images(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the values of the placeholders for every image in the build results below a folder, sorted by path."""
    from imagebuild.core.files import read_text
    from imagebuild.core.yaml import read_written
    from imagebuild.project.records import BuildResult

    for path in sorted(folder.rglob("result.json")):
        result = read_written(BuildResult, read_text(path), str(path))
        for platform, digest in result.manifests.items():
            if result.repository:
                yield _values(result.target, platform, result.repository, digest, result.digest, path.parent)


def _values(
    target: str, platform: str, repository: str, digest: str, index: str | None, folder: Path
) -> dict[str, str]:
    values = {
        "target": target, "platform": platform, "arch": platform.removeprefix("linux/"),
        "folder": str(folder.absolute()),
        "image": f"{repository}@{digest}", "index": f"{repository}@{index or digest}",
    }  # fmt: skip
    for name, value in values.items():
        # A result may come from another machine, and a value must not become an option or a path outside the folder.
        if name != "folder" and not re.fullmatch(r"(?!.*/\.\.(/|$))[A-Za-z0-9][A-Za-z0-9._:/@+\[\]-]*", value):
            raise ResultError(f"{folder}: {name} {value!r} is not a name; build the image again")
    return values


def _run_for_each(images: Sequence[dict[str, str]], command: Sequence[str]) -> int:
    """Run a command for each image, also after a failure, and return the highest exit status."""
    known = re.compile(rf"{{({'|'.join(PLACEHOLDERS)})}}")
    failed: dict[str, int] = {}
    for image in images:
        title = f"{image['target']} {image['platform']}"
        err.print(f"{title}: {image['image']}")
        words = [known.sub(lambda name: image[name[1]], word) for word in command]  # noqa: B023 - is called in this iteration
        if status := run_in_foreground(words, {f"IMAGEBUILD_{name.upper()}": value for name, value in image.items()}):
            failed[title] = status
    for title, status in failed.items():
        err.print(f"{title}: exit status {status}")
    err.print(f"{len(images) - len(failed)} of {len(images)} succeeded")
    return max(failed.values(), default=0)


@options.command()
def prune(
    project: options.ProjectFiles, signers: options.TrustOptions, select: tuple[str, ...], registry: str | None,
    days: int, yes: bool, json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.oci.reference import parse_reference
    from imagebuild.oci.registry import connect_registry
    from imagebuild.project.plan import repository_name
    from imagebuild.project.select import select_targets
    from imagebuild.publish.prune import delete_staged, judge_staged

    workspace, trust = project.open(options.PlanChanges().parse(registry)), signers.trusted()
    targets = select_targets(workspace.plan, select)
    names = dict.fromkeys(repository_name(workspace.project, target.image) for target in targets)
    connect, now = cache(connect_registry), datetime.now(UTC)
    places = [connect(name.host).at(name.repository) for name in map(parse_reference, names)]
    judged = {place: judge_staged(place, now, timedelta(days=days), trust) for place in places}
    listed = [{"repository": str(place), **asdict(v)} for place, verdicts in judged.items() for v in verdicts]

    def show() -> None:
        for place, verdicts in judged.items():
            out.print(f"{place}: {len(verdicts)} pushed")
            rows = [(v.digest[:19], f"{v.pushed:%Y-%m-%d %H:%M}", v.verdict) for v in verdicts]
            print_table(("digest", "pushed", "verdict"), rows)

    options.print_result(json_file, listed, show)
    console = err if json_file == options.STDOUT else out
    number = sum(verdict.verdict == "delete" for verdicts in judged.values() for verdict in verdicts)
    if not number:
        console.print("Nothing to delete.")
    elif not yes:
        console.print(f"{number} would be deleted; add --yes to delete them.")
    else:
        deleted = sum(delete_staged(place, verdicts) for place, verdicts in judged.items())
        console.print(f"Deleted {plural(number, 'image')}, {plural(deleted, 'manifest')}.")
