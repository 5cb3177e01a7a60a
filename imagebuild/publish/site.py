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
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import jinja2
from markupsafe import Markup

from imagebuild.bench.profiles import load_profiles
from imagebuild.core import console, files
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import full_reference
from imagebuild.jobs.slurm import enroot_reference
from imagebuild.oci import registry
from imagebuild.project.records import Catalog, Checks, Curve, PublishedImage, PublishedPlatform, Scan, Severity
from imagebuild.publish import catalog
from imagebuild.publish.catalog import (
    COPIED_BYTES,
    FOLDER,
    EarlierCatalog,
    ImageSources,
    ProjectFacts,
    RegistryReading,
    known,
    read_catalog,
)
from imagebuild.report import document
from imagebuild.report.document import one_line, visible

MARKS = {"passed": "✓", "failed": "✗", "skipped": document.NONE}
NONE = document.NONE
EPOCH = "1970-01-01"


@dataclass(frozen=True)
class Badge:
    """A verdict: its state, for the colour, and what it says, for everybody."""

    state: str
    text: str


def checks(found: Iterable[Checks]) -> Badge:
    """All verifications of a platform together; a check counts where it went best, so numbers are those of the run
    that passed most.
    """
    runs = list(found)
    if not runs:
        return Badge("skipped", "not checked")
    failed = sum(run.failed for run in runs)
    most = max(runs, key=lambda run: run.passed)
    if failed:
        return Badge("failed", f"{failed} failed")
    gpus = max(run.gpus for run in runs)
    where = f", {gpus} GPU{'s' * (gpus != 1)}" if gpus else ""
    return Badge("passed" if most.passed else "skipped", f"{most.passed} passed{where}")


def scan(found: Scan | None) -> Badge:
    """`no findings`, or the gravest of them."""
    if found is None:
        return Badge("skipped", "not scanned")
    grave = [(s, found.counts[s]) for s in reversed(get_args(Severity)) if found.counts.get(s)]
    text = f"{grave[0][1]} {grave[0][0]}" if grave else "no findings"
    return Badge(found.verdict, text)


def together_checks(image: PublishedImage) -> Badge:
    return together(checks(platform.checks) for platform in image.platforms)


def together_scan(image: PublishedImage) -> Badge:
    return together(scan(platform.scan) for platform in image.platforms)


def data(curve: Curve) -> Badge:
    """Whether the data were right."""
    return Badge("passed" if curve.verdict == "ok" else "failed", f"data {curve.verdict}")


def speed(curve: Curve) -> Badge:
    """What is said about the speed."""
    state = {"passed": "passed", "not-comparable": "skipped"}.get(curve.outcome, "failed")
    return Badge(state, f"speed {curve.outcome}")


def together(badges: Iterable[Badge]) -> Badge:
    """Of several platforms, the worst."""
    order = ("failed", "skipped", "passed")
    return min(badges, key=lambda badge: order.index(badge.state))


def size(platform: PublishedPlatform) -> str:
    return console.format_size(platform.size_bytes)


def day(time: str) -> str:
    """The day of a time; a dash for the beginning of Unix time, which means that nobody said it."""
    return NONE if not time or time.startswith((EPOCH, "0001-")) else time[:10]


def minute(time: str) -> str:
    """`2026-11-21 10:45 UTC`."""
    return NONE if day(time) == NONE else f"{time[:10]} {time[11:16]} UTC" if len(time) > 15 else time


def bandwidth(image: PublishedImage) -> str:
    """`475 GB/s, 68%`: the all_reduce of most ranks, else the best curve there is; of the ceiling if one is known."""
    found = [curve for platform in image.platforms for curve in platform.curves if curve.verdict == "ok"]
    if not found:
        return NONE
    best = max(found, key=lambda c: (c.collective == "all_reduce", c.ranks or 0, c.best_gb_s))
    ratio = f", {best.ratio:.0%}" if best.ratio is not None else ""
    return f"{best.best_gb_s:.3g} GB/s{ratio}"


def part(curve: Curve) -> str:
    """`, 94 % of the limit`."""
    return f", {curve.ratio:.0%} of the limit" if curve.ratio is not None else ""


def scale(curve: Curve) -> str:
    """`8 ranks, 1 node, NVIDIA H200`."""
    parts = [f"{curve.ranks} ranks" if curve.ranks else "", f"{curve.nodes} nodes" if (curve.nodes or 1) > 1 else ""]
    return ", ".join(filter(None, (*parts, curve.device or "")))


def title(curve: Curve) -> str:
    best = f"{document.format_number(curve.best_gb_s)} GB/s at {document.format_bytes(curve.best_bytes)}"
    return f"{curve.collective}: {best}"


WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 16, 26
STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Mark:
    """A line of the grid with its label."""

    at: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A limit: a horizontal line."""

    y: float
    label_y: float
    text: str
    kind: str


@dataclass(frozen=True)
class Chart:
    """Where everything is, in the units of the drawing."""

    path: str
    dots: tuple[tuple[float, float], ...]
    across: tuple[Mark, ...]
    up: tuple[Mark, ...]
    bars: tuple[Bar, ...]


def draw(curve: Curve) -> Chart:
    """The drawing of a curve."""
    top = _top(curve)
    sizes = [size for size, _ in curve.points]
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    span = max(high - low, 1.0)

    def x(size: float) -> float:
        return round(LEFT + (math.log2(size) - low) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(rate: float) -> float:
        return round(HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM), 1)

    dots = tuple((x(size), y(min(rate, top))) for size, rate in curve.points)
    step = _step(top)
    return Chart(
        path="M" + "L".join(f"{a:g} {b:g}" for a, b in dots),
        dots=dots,
        across=tuple(Mark(x(size), document.format_bytes(size)) for size in _sizes(sizes[0], sizes[-1])),
        up=tuple(Mark(y(n * step), f"{n * step:g}") for n in range(int(top / step) + 1)),
        bars=_bars(curve, y),
    )


def _top(curve: Curve) -> float:
    limits = [bound.gb_s for bound in (curve.ceiling, curve.reference) if bound]
    return max([*(rate for _, rate in curve.points), *limits, 1e-9]) * 1.08


def _step(top: float) -> float:
    """Between lines of the grid, so that there are about four."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in STEPS if factor * power >= rough)


def _sizes(least: int, largest: int) -> list[int]:
    """Powers of two, four or five of them."""
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(largest))
    step = max(1, math.ceil((last - first) / 4))
    return [1 << power for power in range(first, last + 1, step)]


def _bars(curve: Curve, y: Callable[[float], float]) -> tuple[Bar, ...]:
    found = []
    if curve.ceiling:
        at = y(curve.ceiling.gb_s)
        found.append(Bar(at, at - 4, f"ceiling {document.format_number(curve.ceiling.gb_s)}", "ceiling"))
    if curve.reference:
        at = y(curve.reference.gb_s)
        # Below its own line, where the ceiling's label is not.
        found.append(Bar(at, at + 12, f"reference {document.format_number(curve.reference.gb_s)}", "reference"))
    return tuple(found)


@dataclass(frozen=True)
class PullCommand:
    """A way to get an image."""

    title: str
    text: str


def templates(repository: str) -> tuple[PullCommand, ...]:
    """The commands for a repository, which is named with its registry."""
    apart = enroot_reference(repository)
    name = repository.rpartition("/")[2]
    return (
        PullCommand("Docker", f"docker pull {repository}{{ref}}"),
        PullCommand("enroot", f"enroot import -o {name}.sqsh {apart}{{enroot}}"),
        PullCommand("Apptainer", f"apptainer pull {name}.sif docker://{repository}{{ref}}"),
        PullCommand(
            "Slurm, pyxis", f"srun --mpi=pmix --container-image={apart.removeprefix('docker://')}{{enroot}} bash"
        ),
        PullCommand("Kubernetes", f"kubectl run {name} --rm -it --restart=Never --image={repository}{{ref}} -- bash"),
        PullCommand("Dockerfile", f"FROM {repository}{{ref}}"),
        PullCommand("Benchmark", f"imagebuild job mpijob --profile h100 --image {repository}{{ref}}"),
    )


def filled(text: str, reference: str) -> str:
    """A command for `:tag` or `@sha256:…`. enroot 3 and 4.0 take a digest where a tag stands, and not after an `@`."""
    return text.replace("{ref}", reference).replace("{enroot}", reference.replace("@", ":"))


def pull_commands(repository: str, reference: str) -> tuple[PullCommand, ...]:
    """The commands for one image."""
    return tuple(PullCommand(one.title, filled(one.text, reference)) for one in templates(repository))


TITLES = {"image": "Image", "cuda": "CUDA", "os": "OS", "nccl": "NCCL", "mpi": "MPI", "variant": "Variant"}
"""In this order; other axes come after them, the platform last."""
PLATFORM = "platform"
ABSENT = "none"


@dataclass(frozen=True)
class Facet:
    """One thing to choose by."""

    key: str
    title: str
    values: tuple[str, ...]


def facets_of(images: Iterable[PublishedImage]) -> tuple[Facet, ...]:
    """All there is to choose by; the newest versions first. One platform is a choice too: it says what is there."""
    found: dict[str, dict[str, None]] = {key: {} for key in TITLES}
    platforms: dict[str, None] = {}
    for image in images:
        for key, value in choices(image).items():
            found.setdefault(key, {})[value] = None
        platforms |= dict.fromkeys(platform.platform for platform in image.platforms)
    absent: set[str] = set()
    for image in images:
        absent |= found.keys() - choices(image).keys()
    sorted_ = {key: [*_sorted(key, values), *([ABSENT] if key in absent else [])] for key, values in found.items()}
    facets = [Facet(key, TITLES.get(key, key), tuple(values)) for key, values in sorted_.items() if found[key]]
    return (*facets, *([Facet(PLATFORM, "Platform", tuple(sorted(platforms)))] if platforms else []))


def choices(image: PublishedImage) -> dict[str, str]:
    """What this image is, by facet; platforms are several and not among them."""
    return {"image": image.image, **image.axes, **image.stack}


def _sorted(key: str, values: Iterable[str]) -> list[str]:
    # Images stay in the order of the matrix, versions are numbers, and words are words.
    return list(values) if key == "image" else sorted(values, key=catalog.natural, reverse=key != "variant")


def rows(images: Sequence[PublishedImage], facets: Sequence[Facet]) -> list[list[int]]:
    """What the page's program searches: number of the image, number of its value in each facet, and of its platforms
    one bit each.

    Of images that are the same in all of that, the first one, which is the newest. The best come first: of what fits,
    the first is offered.
    """
    numbers = [{value: number for number, value in enumerate(facet.values)} for facet in facets]
    seen: dict[tuple[int, ...], int] = {}
    for place, image in enumerate(images):
        own = choices(image)
        row = [known[own.get(f.key, ABSENT)] for f, known in zip(facets[:-1], numbers[:-1], strict=True)]
        seen.setdefault((*row, sum(1 << numbers[-1][p.platform] for p in image.platforms)), place)
    found = [[place, *row] for row, place in seen.items()]
    cuda = next((i for i, facet in enumerate(facets) if facet.key == "cuda"), None)
    # Stable, so the order of the catalogue decides between those of one day and one CUDA.
    found.sort(key=lambda row: row[cuda + 1] if cuda is not None else 0)
    found.sort(key=lambda row: images[row[0]].created[:10], reverse=True)
    return found


def picker_data(catalog: Catalog) -> dict[str, object]:
    """What the page's program reads."""
    facets = facets_of(catalog.images)
    repositories = list(dict.fromkeys(image.repository for image in catalog.images))
    return {
        "facets": [[facet.key, facet.title, list(facet.values)] for facet in facets],
        "rows": rows(catalog.images, facets),
        "tags": [image.tag if image.tags or image.aliases else "" for image in catalog.images],
        "repositories": [repositories.index(image.repository) for image in catalog.images],
        "commands": [[[c.title, c.text] for c in templates(name)] for name in repositories],
    }


INDEX = "index.html"
DATA = "images.json"


def pages(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the site; the same catalogue gives the same."""
    environment = _environment()
    yield DATA, catalog.model_dump_json(indent=1) + "\n"
    yield INDEX, index(catalog, environment)
    page = environment.get_template("image.html.j2")
    style, script = _Part("style", "site.css"), _Part("script", "copy.js")
    for image in catalog.images:
        yield path_of(image), page.render(image=image, catalog=catalog, style=style, script=script)


def path_of(image: PublishedImage) -> str:
    """The page of an image, relative to the index."""
    return f"images/{image.image}/{image.tag}.html"


def index(catalog: Catalog, environment: jinja2.Environment | None = None) -> str:
    """The page of all images."""
    environment = environment or _environment()
    facets = facets_of(catalog.images)
    columns = [facet for facet in facets if facet.key not in ("image", PLATFORM)]
    labels = "".join(
        f'tbody td:nth-of-type({number})::before{{content:"{_css(title)}"}}'
        for number, title in enumerate((*(facet.title for facet in columns), *COLUMNS), 1)
    )
    return environment.get_template("index.html.j2").render(
        catalog=catalog,
        facets=facets,
        columns=columns,
        fixed=COLUMNS,
        style=_Part("style", "site.css", f"@media (max-width: 60rem) {{ {labels} }}\n"),
        script=_Part("script", "copy.js", _text("index.js")),
        data=embedded(picker_data(catalog)),
        counts=list(Counter(image.image for image in catalog.images).items()),
    )


COLUMNS = ("Platforms", "Compressed", "Checks", "Scan", "Busbw", "Dated")


def _css(text: str) -> str:
    """Text for a string of a style sheet."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\{ord(c):x} " for c in text)


def embedded(document: Mapping[str, Any]) -> Markup:
    """JSON that cannot end the script element it is in."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))  # noqa: S704 - nothing in it is markup


class _Part:
    """A style sheet or a program of a page, and what the page's policy says to let it in."""

    def __init__(self, kind: str, name: str, more: str = "") -> None:
        self._text = f"\n{_text(name)}{more}"
        self._kind = kind

    def __html__(self) -> str:
        return f"<{self._kind}>{self._text}</{self._kind}>"

    @property
    def policy(self) -> Markup:
        digest = base64.b64encode(hashlib.sha256(self._text.encode()).digest()).decode()
        return Markup(f"'sha256-{digest}'")  # noqa: S704 - a digest


WORDS: tuple[Callable[..., Any], ...] = (
    bandwidth, checks, data, day, minute, part, scale, scan, size,
    speed, title, together_checks, together_scan,
)  # fmt: skip
"""What templates call."""


@cache
def _text(name: str) -> str:
    return resources.files("imagebuild.publish").joinpath("templates", name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text), autoescape=True, undefined=jinja2.StrictUndefined, finalize=_harmless,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals |= {
        "absent": ABSENT,
        "bytes": document.format_bytes,
        "choices": choices,
        "commands": pull_commands,
        "draw": draw,
        "frame": {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT},
        "line": one_line,
        "marks": MARKS,
        "number": document.format_number,
        "path_of": path_of,
        "words": {word.__name__: word for word in WORDS} | {"NONE": NONE},
    }
    return environment


def _harmless(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def load_catalog(path: Path) -> RegistryReading:
    """A catalogue that was written before, with the copies that are there. Raises ConfigError or ResultError."""
    catalog = read_catalog(path)
    copies = {}
    for name in {e.file for image in catalog.images for p in image.platforms for e in p.evidence if e.file}:
        place = path.parent / name
        if _is_copy(name) and place.is_file():
            copies[name] = files.read_text(place)
    return RegistryReading(_without_lost(catalog, set(copies)), copies)


def _is_copy(name: str) -> bool:
    """Whether it is where copies are: a file that somebody else wrote must not name any other."""
    parts = PurePosixPath(name).parts
    return len(parts) == 2 and parts[0] == FOLDER and parts[1] not in (".", "..")


def _without_lost(catalog: Catalog, there: set[str]) -> Catalog:
    def image(one: PublishedImage) -> PublishedImage:
        platforms = tuple(
            p.model_copy(
                update={"evidence": tuple(
                    e if e.file is None or e.file in there else e.model_copy(update={"file": None}) for e in p.evidence
                )}
            )
            for p in one.platforms
        )  # fmt: skip
        return one.model_copy(update={"platforms": platforms})

    return catalog.model_copy(update={"images": tuple(image(one) for one in catalog.images)})


def catalog_from_registry(ours: ProjectFacts, profiles: Path, earlier: Path | None = None) -> RegistryReading:
    """What the registries of the plan have; what an earlier `images.json` tells is not read again.

    Raises ConfigError without a registry, CommandError if one fails.
    """
    for target in ours.plan.targets:
        for tag in target.tags:
            if full_reference(tag) != tag:
                raise ConfigError(f"catalog: {tag} names no registry; say --registry, or `repository:` in the matrix")
    hosts = {reference.host for reference in catalog.repositories(ours.plan)}
    machines = load_profiles(profiles) if profiles.is_dir() else {}
    before = load_catalog(earlier) if earlier else None
    shop = ImageSources(
        {host: registry.connect_registry(host) for host in hosts},
        ours,
        {name: document.model for name, document in machines.items()},
        known(before.catalog, before.copies, COPIED_BYTES) if before else EarlierCatalog(),
    )
    return catalog.read_registry(shop)


def write_site(reading: RegistryReading, folder: Path) -> int:
    """Write the site, and remove pages and copies of images that are gone; how many files it has.

    Raises ConfigError if the folder cannot be written to.
    """
    texts = {**dict(pages(reading.catalog)), **reading.copies}
    for name, text in texts.items():
        files.write_text(folder / name, text)
    for old in (*folder.glob("images/*/*.html"), *folder.glob(f"{FOLDER}/*.json")):
        if str(old.relative_to(folder)) not in texts:
            old.unlink()
    return len(texts)
