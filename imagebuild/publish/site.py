"""Write the page of a catalogue: a picker, a table of all images, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from imagebuild.bench.models import State
from imagebuild.core import files
from imagebuild.core.console import format_size
from imagebuild.core.errors import plural
from imagebuild.jobs.manifest import enroot_reference
from imagebuild.project.records import Catalog, Checks, PublishedImage, Scan, Severity
from imagebuild.publish.catalog import natural_order
from imagebuild.report.document import NONE
from imagebuild.report.page import STATE_MARKS, render_page, template_text

Badge = tuple[State, str]
"""A verdict: its state, which gives the colour, and its text."""


def write_site(catalog: Catalog, folder: Path) -> Path:
    """Write `images.json` and a page that shows it, and return the path of the page.

    Raises ConfigError if the folder cannot be written to.
    """
    page = catalog_page(catalog)
    files.write_text(folder / "images.json", catalog.model_dump_json(indent=1) + "\n")
    files.write_text(folder / "index.html", page)
    return folder / "index.html"


def catalog_page(catalog: Catalog) -> str:
    """Return the page, always the same for the same catalogue."""
    facets = facets_of(catalog.images)
    return render_page(
        "catalog.html.j2",
        package="imagebuild.publish",
        program=template_text("imagebuild.publish", "picker.js") if catalog.images else "",
        data=picker_data(catalog, facets),
        catalog=catalog,
        facets=facets,
        columns=[facet for facet in facets if facet.key not in ("image", PLATFORM)],
        newest=newest_of_kind(catalog.images),
        ABSENT=ABSENT,
        checks_badge=checks_badge,
        day=format_day,
        minute=format_minute,
        scan_badge=scan_badge,
        signature_badge=signature_badge,
        summary_badges=summary_badges,
        updates_text=updates_text,
    )


# The picker


FACET_TITLES = {"image": "Image", "cuda": "CUDA", "os": "OS", "nccl": "NCCL", "mpi": "MPI", "variant": "Variant"}
"""Facets in their order; other axes come after them, the platform last."""
PLATFORM = "platform"
ABSENT = "none"
"""Value of a facet that an image does not have."""


@dataclass(frozen=True)
class Facet:
    """Describe a property that people choose an image by."""

    key: str
    title: str
    values: tuple[str, ...]


def facets_of(images: Sequence[PublishedImage]) -> tuple[Facet, ...]:
    """Return the facets of these images, the newest versions first; the last facet is the platform."""
    values: dict[str, dict[str, None]] = {key: {} for key in FACET_TITLES}
    for image in images:
        for key, value in choices_of(image).items():
            values.setdefault(key, {})[value] = None
    facets = []
    for key, distinct in values.items():
        # Images stay in the order of the matrix. Versions count down, words of variants do not.
        ordered = list(distinct)
        if key != "image":
            ordered.sort(key=natural_order, reverse=key != "variant")
        if any(key not in choices_of(image) for image in images):
            ordered.append(ABSENT)
        if distinct:
            facets.append(Facet(key, FACET_TITLES.get(key, key), tuple(ordered)))
    platforms = sorted({platform.platform for image in images for platform in image.platforms})
    return (*facets, Facet(PLATFORM, "Platform", tuple(platforms)))


def choices_of(image: PublishedImage) -> dict[str, str]:
    """Return facet → value of an image, for all facets but the platform, of which it may have several.

    CUDA is chosen by its minor version, as people ask for it: 13.2 for 13.2.1.
    """
    choices = {"image": image.image, **image.axes, **image.stack}
    if "cuda" in choices:
        choices["cuda"] = ".".join(choices["cuda"].split(".")[:2])
    return choices


def newest_of_kind(images: Sequence[PublishedImage]) -> frozenset[str]:
    """Return the digests of the images that are the newest with their facets."""
    return frozenset({tuple(choices_of(image).items()): image.digest for image in reversed(images)}.values())


def picker_rows(images: Sequence[PublishedImage], facets: Sequence[Facet]) -> list[list[int]]:
    """Return the rows that the page's script searches; it offers the first that fits and has no failure.

    A row is the number of an image, the number of its value of each facet, and a bit for each of its platforms. Rows
    are sorted by day, then by CUDA, and else as the catalogue is.
    """

    def age(place: int) -> tuple[str, list[tuple[int, int, str]]]:
        return images[place].created[:10], natural_order(images[place].axes.get("cuda", ""))

    numbers = [{value: number for number, value in enumerate(facet.values)} for facet in facets]
    rows: list[list[int]] = []
    for place in sorted(range(len(images)), key=age, reverse=True):
        choices = choices_of(images[place])
        row = [known[choices.get(f.key, ABSENT)] for f, known in zip(facets[:-1], numbers[:-1], strict=True)]
        bits = sum(1 << numbers[-1][platform.platform] for platform in images[place].platforms)
        rows.append([place, *row, bits])
    return rows


def picker_data(catalog: Catalog, facets: Sequence[Facet]) -> dict[str, object]:
    """Return the data that the page's script reads."""
    repositories = list(dict.fromkeys(image.repository for image in catalog.images))
    rows = picker_rows(catalog.images, facets)
    return {
        "facets": [[facet.key, facet.title, list(facet.values)] for facet in facets],
        "rows": rows,
        "marks": STATE_MARKS,
        "titles": [title for title, _, _ in facts_of(catalog.images[0])] if rows else [],
        "facts": [[fact[1:] for fact in facts_of(image)] for image in catalog.images],
        "tags": [image.tag for image in catalog.images],
        "repositories": [repositories.index(image.repository) for image in catalog.images],
        "commands": [list(pull_commands(name).items()) for name in repositories],
    }


def pull_commands(repository: str) -> dict[str, str]:
    """Return title → command that gets or runs an image of a repository, which includes the registry.

    `{ref}` stands for `:tag` or `@sha256:…`, `{enroot}` for the same with a colon: enroot 3 and 4.0 take a digest where
    a tag stands, and not after an `@`.
    """
    enroot, name = enroot_reference(repository), repository.rpartition("/")[2]
    return {
        "Docker": f"docker pull {repository}{{ref}}",
        "enroot": f"enroot import -o {name}.sqsh {enroot}{{enroot}}",
        "Apptainer": f"apptainer pull {name}.sif docker://{repository}{{ref}}",
        "Slurm, pyxis": f"srun --mpi=pmix --container-image={enroot.removeprefix('docker://')}{{enroot}} bash",
        "Kubernetes": f"kubectl run {name} --rm -it --restart=Never --image={repository}{{ref}} -- bash",
        "Dockerfile": f"FROM {repository}{{ref}}",
        "Benchmark": f"imagebuild job mpijob --profile h100 --image {repository}{{ref}}",
    }


# Verdicts and numbers as text


def checks_badge(runs: Sequence[Checks]) -> Badge:
    """Sum up all verifications of a platform: failures of any run count, the rest is that of the best run."""
    if not runs:
        return "skipped", "not checked"
    if failed := sum(run.failed for run in runs):
        return "failed", f"{failed} failed"
    passed = max(run.passed for run in runs)
    gpus = max(run.gpus for run in runs)
    place = f", {gpus} GPU{'s' * (gpus != 1)}" if gpus else ""
    return "passed" if passed else "skipped", f"{passed} passed{place}"


def scan_badge(scan: Scan | None) -> Badge:
    """Return the verdict of a scan, with the number of its worst findings."""
    if scan is None:
        return "skipped", "not scanned"
    counts = [f"{scan.counts[s]} {s}" for s in reversed(get_args(Severity)) if scan.counts.get(s)]
    return scan.verdict, counts[0] if counts else "no findings"


def updates_text(image: PublishedImage) -> str:
    """Return `3 security updates pending, as of 2026-11-22`: of the worst platform; empty if nobody looked."""
    known = [platform.updates for platform in image.platforms if platform.updates]
    if not known:
        return ""
    worst = max(known, key=lambda updates: updates.pending)
    number = plural(worst.pending, "security update") if worst.pending else "no security updates"
    return f"{number} pending, as of {format_day(worst.read)}"


def signature_badge(image: PublishedImage) -> Badge:
    """Say who signed an image, as far as it was asked."""
    if image.verified_by is None:
        return "skipped", "not verified"
    return ("passed", f"by {image.verified_by}") if image.verified_by else ("failed", "none that is trusted")


def summary_badges(image: PublishedImage) -> tuple[Badge, Badge]:
    """Return the worst badge of the checks of all platforms, and that of their scans."""

    def rank(badge: Badge) -> int:
        return ("failed", "skipped", "passed").index(badge[0])

    checks = min((checks_badge(platform.checks) for platform in image.platforms), key=rank)
    return checks, min((scan_badge(platform.scan) for platform in image.platforms), key=rank)


def facts_of(image: PublishedImage) -> list[tuple[str, State | Literal[""], str]]:
    """Return what people weigh before they take an image: title, state, and text of each fact.

    The last one is the day, to which the page adds the age.
    """
    checks, scan = summary_badges(image)
    runs = [run for platform in image.platforms for run in platform.checks if run.gpus]
    device = next((run.device for run in runs if run.device), f"{runs[0].gpus} GPUs" if runs else "")
    return [
        ("Checks", *checks),
        ("Scan", scan[0], "; ".join(filter(None, (scan[1], updates_text(image))))),
        ("Signature", *signature_badge(image)),
        ("GPU", "" if device else "skipped", device or "not tried on any"),
        ("CUDA", "", image.axes.get("cuda", NONE)),
        ("Platforms", "", ", ".join(p.platform.removeprefix("linux/") for p in image.platforms)),
        ("Compressed", "", format_size(image.platforms[0].size_bytes)),
        ("Dated", "", format_day(image.created)),
    ]


def format_day(time: str) -> str:
    """Return the day of a time; a dash for the beginning of Unix time, which stands for an unknown time."""
    return NONE if not time or time.startswith(("1970-01-01", "0001-")) else time[:10]


def format_minute(time: str) -> str:
    """Return a time as `2026-11-21 10:45 UTC`, or a dash."""
    return NONE if format_day(time) == NONE else f"{time[:10]} {time[11:16]} UTC" if len(time) > 15 else time
