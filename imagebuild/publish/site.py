"""The HTML page of a catalogue: a table of all images, a picker, and the details of each image."""

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import get_args

from imagebuild.bench.models import State
from imagebuild.core import files
from imagebuild.core.patterns import data_of
from imagebuild.jobs.offer import enroot_reference
from imagebuild.project.records import Catalog, Checks, PublishedImage, Scan, Severity
from imagebuild.report.document import NONE
from imagebuild.report.page import render_page, template_text

Badge = tuple[State, str]
"""A verdict on the page: the state, which sets the colour, and the text."""
TITLES = {"cuda": "CUDA", "os": "OS", "nccl": "NCCL", "mpi": "MPI", "variant": "Variant"}
"""Titles of the first columns of the table of images, in this order. The columns of other axes follow."""


def write_site(catalog: Catalog, folder: Path) -> Path:
    """Write `images.json` and the page that shows it. Return the path of the page.
    Raises ConfigError if the folder cannot be written to."""
    page = catalog_page(catalog)
    files.write_text(folder / "images.json", catalog.model_dump_json(indent=1) + "\n")
    files.write_text(folder / "index.html", page)
    return folder / "index.html"


def catalog_page(catalog: Catalog) -> str:
    """Return the HTML page of a catalogue. Equal catalogues give equal pages."""
    repositories = dict.fromkeys(image.repository for image in catalog.images)
    return render_page(
        "catalog.html.j2", package="imagebuild.publish",
        program=template_text("imagebuild.publish", "picker.js") if catalog.images else "",
        data={repository: pull_commands(repository) for repository in repositories}, catalog=catalog,
        columns=columns_of(catalog.images), checks_badge=checks_badge, day=format_day, scan_badge=scan_badge,
        summary_badges=summary_badges,
    )  # fmt: skip


def columns_of(images: Sequence[PublishedImage]) -> dict[str, str]:
    """Return a mapping from the key of each column in the table of images to the title of the column.
    A key is the name of an axis, `nccl` or `mpi`. A column is left out if no image has a value for the key."""
    found = dict.fromkeys(key for image in images for key in (*image.axes, *image.stack))
    return {key: TITLES.get(key, key) for key in (*TITLES, *found) if key in found}


def pull_commands(repository: str) -> dict[str, str]:
    """Return a mapping from titles, such as `Docker`, to commands that pull or run an image.

    `repository` includes the registry. In the commands, `{ref}` stands for `:tag` or `@sha256:…`, and `{enroot}` stands
    for `:tag` or `:sha256:…`, because enroot 3 and 4.0 accept a digest only after a colon."""
    enroot, name = enroot_reference(repository), repository.rpartition("/")[2]
    words = {"repository": repository, "name": name, "enroot": enroot, "squash": enroot.removeprefix("docker://")}
    return {title: Template(text).substitute(words) for title, text in data_of(__file__).items()}


def checks_badge(runs: Sequence[Checks]) -> Badge:
    """Return the badge for all verifications of one platform's image.

    If a check failed, the badge gives the number of failures in all verifications. Otherwise, the badge gives the
    largest number of passed checks and the largest number of GPUs in one verification."""
    if not runs:
        return "skipped", "not checked"
    if failed := sum(run.failed for run in runs):
        return "failed", f"{failed} failed"
    passed = max(run.passed for run in runs)
    gpus = max(run.gpus for run in runs)
    place = f", {gpus} GPU{'s' * (gpus != 1)}" if gpus else ""
    return "passed" if passed else "skipped", f"{passed} passed{place}"


def scan_badge(scan: Scan | None) -> Badge:
    """Return the badge for a scan: the verdict, and the number of findings of the worst severity."""
    if scan is None:
        return "skipped", "not scanned"
    if scan.verdict == "skipped":
        return "skipped", "scan is too old"
    counts = [f"{scan.counts[s]} {s}" for s in reversed(get_args(Severity)) if scan.counts.get(s)]
    return scan.verdict, counts[0] if counts else "no findings"


def summary_badges(image: PublishedImage) -> tuple[Badge, Badge]:
    """Return two badges for an image: the worst badge for checks of all platforms, and the worst badge for scans."""

    def rank(badge: Badge) -> int:
        return ("failed", "skipped", "passed").index(badge[0])

    checks = min((checks_badge(platform.checks) for platform in image.platforms), key=rank)
    return checks, min((scan_badge(platform.scan) for platform in image.platforms), key=rank)


def format_day(time: str) -> str:
    """Return the day of a time, such as `2026-11-27`, or a dash if the time is unknown.
    The start of Unix time (1970-01-01) also counts as unknown."""
    return NONE if not time or time.startswith(("1970-01-01", "0001-")) else time[:10]
