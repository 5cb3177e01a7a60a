"""Write the site of a catalogue: an index with a picker, and a page for each image."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import jinja2
from markupsafe import Markup

from imagebuild.core import files
from imagebuild.core.console import format_size
from imagebuild.jobs.manifest import enroot_reference
from imagebuild.project.records import Catalog, Checks, Curve, PublishedImage, PublishedPlatform, Scan, Severity
from imagebuild.publish.catalog import COPIES_FOLDER, RegistryReading, natural_order
from imagebuild.report.document import NONE, format_bytes, format_number, one_line, visible

INDEX = "index.html"
DATA = "images.json"
COLUMNS = ("Platforms", "Compressed", "Checks", "Scan", "Busbw", "Dated")
"""Columns of the table that every catalogue has, after those of the facets."""


def write_site(reading: RegistryReading, folder: Path) -> int:
    """Write the site, remove pages and copies of images that are gone, and return the number of its files.

    Raises ConfigError if the folder cannot be written to.
    """
    texts = {**dict(site_pages(reading.catalog)), **reading.copies}
    for name, text in texts.items():
        files.write_text(folder / name, text)
    for old in (*folder.glob("images/*/*.html"), *folder.glob(f"{COPIES_FOLDER}/*.json")):
        if str(old.relative_to(folder)) not in texts:
            old.unlink()
    return len(texts)


def site_pages(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield path and text of every file of the site, always the same for the same catalogue."""
    environment = _environment()
    yield DATA, catalog.model_dump_json(indent=1) + "\n"
    yield INDEX, index_page(catalog, environment)
    page = environment.get_template("image.html.j2")
    style, script = _InlinePart("style", "site.css"), _InlinePart("script", "copy.js")
    for image in catalog.images:
        yield page_path(image), page.render(image=image, catalog=catalog, style=style, script=script)


def page_path(image: PublishedImage) -> str:
    """Return the path of an image's page, relative to the index."""
    return f"images/{image.image}/{image.tag}.html"


def index_page(catalog: Catalog, environment: jinja2.Environment | None = None) -> str:
    """Return the page with the picker and the table of all images."""
    environment = environment or _environment()
    facets = facets_of(catalog.images)
    columns = [facet for facet in facets if facet.key not in ("image", PLATFORM)]
    # On narrow screens, the table has no head, and each cell begins with the title of its column.
    labels = "".join(
        f'tbody td:nth-of-type({number})::before{{content:"{_css_string(title)}"}}'
        for number, title in enumerate((*(facet.title for facet in columns), *COLUMNS), 1)
    )
    return environment.get_template("index.html.j2").render(
        catalog=catalog,
        facets=facets,
        columns=columns,
        fixed=COLUMNS,
        style=_InlinePart("style", "site.css", f"@media (max-width: 60rem) {{ {labels} }}\n"),
        script=_InlinePart("script", "copy.js", _template_text("index.js")),
        data=embed_json(picker_data(catalog)),
        counts=list(Counter(image.image for image in catalog.images).items()),
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
    platforms: set[str] = set()
    for image in images:
        for key, value in choices_of(image).items():
            values.setdefault(key, {})[value] = None
        platforms |= {platform.platform for platform in image.platforms}
    facets = []
    for key, distinct in values.items():
        if not distinct:
            continue
        # Images stay in the order of the matrix. Versions count down, words of variants do not.
        ordered = list(distinct)
        if key != "image":
            ordered.sort(key=natural_order, reverse=key != "variant")
        if any(key not in choices_of(image) for image in images):
            ordered.append(ABSENT)
        facets.append(Facet(key, FACET_TITLES.get(key, key), tuple(ordered)))
    if platforms:
        facets.append(Facet(PLATFORM, "Platform", tuple(sorted(platforms))))
    return tuple(facets)


def choices_of(image: PublishedImage) -> dict[str, str]:
    """Return facet → value of an image, for all facets but the platform, of which it may have several."""
    return {"image": image.image, **image.axes, **image.stack}


def picker_rows(images: Sequence[PublishedImage], facets: Sequence[Facet]) -> list[list[int]]:
    """Return the rows that the page's script searches; it offers the first that fits.

    A row is the number of an image, the number of its value of each facet, and a bit for each of its platforms. Of
    images that are equal in all facets, only the first and newest has a row. Rows are sorted by day, then by CUDA.
    """
    numbers = [{value: number for number, value in enumerate(facet.values)} for facet in facets]
    places: dict[tuple[int, ...], int] = {}
    for place, image in enumerate(images):
        choices = choices_of(image)
        row = [known[choices.get(f.key, ABSENT)] for f, known in zip(facets[:-1], numbers[:-1], strict=True)]
        places.setdefault((*row, sum(1 << numbers[-1][p.platform] for p in image.platforms)), place)
    rows = [[place, *row] for row, place in places.items()]
    # Sorting is stable, so images of the same day and CUDA stay in the order of the catalogue.
    cuda = next((i for i, facet in enumerate(facets) if facet.key == "cuda"), None)
    if cuda is not None:
        rows.sort(key=lambda row: row[cuda + 1])
    rows.sort(key=lambda row: images[row[0]].created[:10], reverse=True)
    return rows


def picker_data(catalog: Catalog) -> dict[str, object]:
    """Return the data that the page's script reads."""
    facets = facets_of(catalog.images)
    repositories = list(dict.fromkeys(image.repository for image in catalog.images))
    return {
        "facets": [[facet.key, facet.title, list(facet.values)] for facet in facets],
        "rows": picker_rows(catalog.images, facets),
        "tags": [image.tag if image.tags or image.aliases else "" for image in catalog.images],
        "repositories": [repositories.index(image.repository) for image in catalog.images],
        "commands": [[[c.title, c.text] for c in _command_templates(name)] for name in repositories],
    }


@dataclass(frozen=True)
class PullCommand:
    """Hold a command that gets or runs an image."""

    title: str
    text: str


def pull_commands(repository: str, reference: str) -> tuple[PullCommand, ...]:
    """Return the commands for an image; `reference` is `:tag` or `@sha256:…`."""
    # enroot 3 and 4.0 take a digest where a tag stands, and not after an `@`.
    enroot = reference.replace("@", ":")
    return tuple(
        PullCommand(command.title, command.text.replace("{ref}", reference).replace("{enroot}", enroot))
        for command in _command_templates(repository)
    )


def _command_templates(repository: str) -> tuple[PullCommand, ...]:
    """Return the commands with {ref} or {enroot} in place of a tag; `repository` includes the registry."""
    enroot = enroot_reference(repository)
    name = repository.rpartition("/")[2]
    return (
        PullCommand("Docker", f"docker pull {repository}{{ref}}"),
        PullCommand("enroot", f"enroot import -o {name}.sqsh {enroot}{{enroot}}"),
        PullCommand("Apptainer", f"apptainer pull {name}.sif docker://{repository}{{ref}}"),
        PullCommand(
            "Slurm, pyxis", f"srun --mpi=pmix --container-image={enroot.removeprefix('docker://')}{{enroot}} bash"
        ),
        PullCommand("Kubernetes", f"kubectl run {name} --rm -it --restart=Never --image={repository}{{ref}} -- bash"),
        PullCommand("Dockerfile", f"FROM {repository}{{ref}}"),
        PullCommand("Benchmark", f"imagebuild job mpijob --profile h100 --image {repository}{{ref}}"),
    )


# Verdicts and numbers as text


MARKS = {"passed": "✓", "failed": "✗", "skipped": NONE}


@dataclass(frozen=True)
class Badge:
    """Hold a verdict: its state, which gives the colour, and its text."""

    state: str
    text: str


def checks_badge(runs: Sequence[Checks]) -> Badge:
    """Sum up all verifications of a platform: failures of any run count, the rest is that of the best run."""
    if not runs:
        return Badge("skipped", "not checked")
    if failed := sum(run.failed for run in runs):
        return Badge("failed", f"{failed} failed")
    passed = max(run.passed for run in runs)
    gpus = max(run.gpus for run in runs)
    place = f", {gpus} GPU{'s' * (gpus != 1)}" if gpus else ""
    return Badge("passed" if passed else "skipped", f"{passed} passed{place}")


def scan_badge(scan: Scan | None) -> Badge:
    """Return the verdict of a scan, with the number of its worst findings."""
    if scan is None:
        return Badge("skipped", "not scanned")
    counts = [f"{scan.counts[s]} {s}" for s in reversed(get_args(Severity)) if scan.counts.get(s)]
    return Badge(scan.verdict, counts[0] if counts else "no findings")


def image_checks_badge(image: PublishedImage) -> Badge:
    """Return the worst badge of the checks of all platforms."""
    return _worst(checks_badge(platform.checks) for platform in image.platforms)


def image_scan_badge(image: PublishedImage) -> Badge:
    """Return the worst badge of the scans of all platforms."""
    return _worst(scan_badge(platform.scan) for platform in image.platforms)


def _worst(badges: Iterable[Badge]) -> Badge:
    return min(badges, key=lambda badge: ("failed", "skipped", "passed").index(badge.state))


def data_badge(curve: Curve) -> Badge:
    """Return the verdict on the data of a run."""
    return Badge("passed" if curve.verdict == "ok" else "failed", f"data {curve.verdict}")


def speed_badge(curve: Curve) -> Badge:
    """Return the verdict on the speed of a run."""
    state = {"passed": "passed", "not-comparable": "skipped"}.get(curve.outcome, "failed")
    return Badge(state, f"speed {curve.outcome}")


def compressed_size(platform: PublishedPlatform) -> str:
    """Return the size of the compressed layers: `409.1 MB`."""
    return format_size(platform.size_bytes)


def format_day(time: str) -> str:
    """Return the day of a time; a dash for the beginning of Unix time, which stands for an unknown time."""
    return NONE if not time or time.startswith(("1970-01-01", "0001-")) else time[:10]


def format_minute(time: str) -> str:
    """Return a time as `2026-11-21 10:45 UTC`, or a dash."""
    return NONE if format_day(time) == NONE else f"{time[:10]} {time[11:16]} UTC" if len(time) > 15 else time


def best_bandwidth(image: PublishedImage) -> str:
    """Return `475 GB/s, 68%`: the best bandwidth, and its share of the limit if that is known.

    It is that of all_reduce with most ranks, or of another collective if there is no all_reduce.
    """
    curves = [curve for platform in image.platforms for curve in platform.curves if curve.verdict == "ok"]
    if not curves:
        return NONE
    best = max(curves, key=lambda c: (c.collective == "all_reduce", c.ranks or 0, c.best_gb_s))
    ratio = f", {best.ratio:.0%}" if best.ratio is not None else ""
    return f"{best.best_gb_s:.3g} GB/s{ratio}"


def share_of_limit(curve: Curve) -> str:
    """Return `, 94% of the limit`; empty without a limit."""
    return f", {curve.ratio:.0%} of the limit" if curve.ratio is not None else ""


def curve_scale(curve: Curve) -> str:
    """Return `8 ranks, 2 nodes, NVIDIA H200`."""
    ranks = f"{curve.ranks} ranks" if curve.ranks else ""
    nodes = f"{curve.nodes} nodes" if (curve.nodes or 1) > 1 else ""
    return ", ".join(filter(None, (ranks, nodes, curve.device or "")))


def curve_title(curve: Curve) -> str:
    """Return `all_reduce: 475.2 GB/s at 8 GiB`."""
    return f"{curve.collective}: {format_number(curve.best_gb_s)} GB/s at {format_bytes(curve.best_bytes)}"


# Charts


WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 16, 26
"""Margins."""
STEPS = (1, 2, 2.5, 5, 10)
"""Distances of grid lines, times a power of ten."""


@dataclass(frozen=True)
class Mark:
    """Describe a label of an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class LimitLine:
    """Describe the horizontal line of a limit."""

    y: float
    label_y: float
    text: str
    kind: str
    """`ceiling` or `reference`."""


@dataclass(frozen=True)
class Chart:
    """Hold coordinates of everything in a chart, in the units of the drawing."""

    path: str
    dots: tuple[tuple[float, float], ...]
    x_marks: tuple[Mark, ...]
    y_marks: tuple[Mark, ...]
    limits: tuple[LimitLine, ...]


def draw_chart(curve: Curve) -> Chart:
    """Draw a curve: message size to the right on a logarithmic scale, bandwidth upwards from zero."""
    bounds = [bound.gb_s for bound in (curve.ceiling, curve.reference) if bound]
    top = max([*(rate for _, rate in curve.points), *bounds, 1e-9]) * 1.08
    least, largest = curve.points[0][0], curve.points[-1][0]
    low, high = math.log2(least), math.log2(largest)
    span = max(high - low, 1.0)

    def x(size: float) -> float:
        return round(LEFT + (math.log2(size) - low) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(rate: float) -> float:
        return round(HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM), 1)

    dots = tuple((x(size), y(min(rate, top))) for size, rate in curve.points)
    # About four grid lines upwards, four or five powers of two to the right.
    power = 10.0 ** math.floor(math.log10(top / 4))
    y_step = next(factor * power for factor in STEPS if factor * power >= top / 4)
    first, last = math.ceil(low), math.floor(high)
    x_step = max(1, math.ceil((last - first) / 4))
    limits = []
    if curve.ceiling:
        at = y(curve.ceiling.gb_s)
        limits.append(LimitLine(at, at - 4, f"ceiling {format_number(curve.ceiling.gb_s)}", "ceiling"))
    if curve.reference:
        at = y(curve.reference.gb_s)
        # The label is below the line, where that of the ceiling is not.
        limits.append(LimitLine(at, at + 12, f"reference {format_number(curve.reference.gb_s)}", "reference"))
    return Chart(
        path="M" + "L".join(f"{a:g} {b:g}" for a, b in dots),
        dots=dots,
        x_marks=tuple(Mark(x(1 << n), format_bytes(1 << n)) for n in range(first, last + 1, x_step)),
        y_marks=tuple(Mark(y(n * y_step), f"{n * y_step:g}") for n in range(int(top / y_step) + 1)),
        limits=tuple(limits),
    )


# Templates


def embed_json(document: Mapping[str, Any]) -> Markup:
    """Return JSON that cannot end the script element that it is in."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))  # noqa: S704 - no markup is left in it


def _css_string(text: str) -> str:
    """Escape text for a string of a style sheet."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\{ord(c):x} " for c in text)


class _InlinePart:
    """Hold a style sheet or a script of a page, with the hash by which the page's policy allows it."""

    def __init__(self, element: str, template: str, more: str = "") -> None:
        self._element = element
        self._text = f"\n{_template_text(template)}{more}"

    def __html__(self) -> str:
        return f"<{self._element}>{self._text}</{self._element}>"

    @property
    def policy(self) -> Markup:
        """Return the source for the page's Content-Security-Policy."""
        digest = base64.b64encode(hashlib.sha256(self._text.encode()).digest()).decode()
        return Markup(f"'sha256-{digest}'")  # noqa: S704 - a digest has no markup


@cache
def _template_text(name: str) -> str:
    return resources.files("imagebuild.publish").joinpath("templates", name).read_text(encoding="utf-8")


_TEMPLATE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    best_bandwidth, checks_badge, choices_of, compressed_size, curve_scale, curve_title, data_badge, draw_chart,
    format_bytes, format_day, format_minute, format_number, image_checks_badge, image_scan_badge, one_line, page_path,
    pull_commands, scan_badge, share_of_limit, speed_badge,
)  # fmt: skip


def _environment() -> jinja2.Environment:
    def make_visible(value: Any) -> Any:
        """Show control characters, and those that change the direction of text."""
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template_text), autoescape=True, undefined=jinja2.StrictUndefined,
        finalize=make_visible, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {function.__name__: function for function in _TEMPLATE_FUNCTIONS}
    environment.globals |= {
        "ABSENT": ABSENT, "NONE": NONE, "MARKS": MARKS,
        "WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT,
    }  # fmt: skip
    return environment
