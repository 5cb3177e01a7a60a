"""Compare two images: components, packages, settings, layers, checks and bandwidth."""

from __future__ import annotations

import json
import platform as machine
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from html import escape as escape_html
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from rich.markup import escape

from imagebuild.bench.judge import device_pairs
from imagebuild.bench.models import Results
from imagebuild.core.console import format_size, markdown_table, out, print_table
from imagebuild.core.debian import installed_packages, package_versions
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.core.run import ARCHITECTURES
from imagebuild.oci.image import DPKG, FoundImage, LayerPart, PlatformImage, dpkg_status
from imagebuild.project.matrix import Target
from imagebuild.publish.sbom import debian_packages
from imagebuild.report.document import NONE, Report, busbw, format_number, gather_files, latency, run_name
from imagebuild.verify.checks import components_of
from imagebuild.verify.subject import ImageFinder

Title = Literal[
    "components", "packages", "environment", "settings", "licences", "labels", "platforms", "checks", "layers"
]  # fmt: skip
SECTIONS: tuple[Title, ...] = get_args(Title)


class Difference(Model):
    """Name something that differs, with both values."""

    name: str
    a: str | None
    """None if A does not have it."""
    b: str | None
    made_by: str = ""
    """Of a layer: the instruction that made it, from the image's history."""


class Section(Model):
    """List what differs in one respect, such as packages."""

    title: Title
    changes: tuple[Difference, ...]
    same: int
    """Number of things that are the same in both."""


class Sizes(Model):
    """Compare sizes in bytes, compressed as a registry stores layers, unless `note` says otherwise."""

    a: int
    b: int
    shared: int
    """Size of the layers of B that A has, too: a machine with A does not fetch them again."""
    note: str = ""


class Speed(Model):
    """Compare the results of one benchmark for a class of message sizes."""

    name: str
    sizes: str
    """Class of message sizes: `1 MiB to 1 GiB`."""
    unit: str
    a: float
    """Median over the sizes that both have."""
    b: float
    ratio: float
    """B to A: the median of the ratios of single sizes; above 1, B is faster (of a time, slower)."""
    points: int
    """Number of sizes that both have."""


class ComparedImage(Model):
    """Name one of the two images."""

    name: str
    origin: str
    """Where it was found."""
    digest: str | None
    platform: str | None
    """None for a target that is not built."""


class Comparison(Model):
    """Hold the content of the file that `imagebuild diff --json` writes."""

    a: ComparedImage
    b: ComparedImage
    sections: tuple[Section, ...]
    sizes: Sizes | None
    speeds: tuple[Speed, ...]
    not_compared: tuple[str, ...]
    """What was not compared, and why."""
    notes: tuple[str, ...] = ()
    """Where facts come from, if that is worth saying."""

    @property
    def differs(self) -> bool:
        """Return whether anything differs. Speeds do not count, as they differ from run to run."""
        return any(section.changes for section in self.sections)


@dataclass(frozen=True)
class DiffRequest:
    """Name the two images to compare."""

    a: str
    b: str
    platform: str | None = None
    results: tuple[Path, Path] | None = None
    """Results of verify or benchmarks for A and for B, as files or folders."""


def compare_images(request: DiffRequest, finder: ImageFinder) -> Comparison:
    """Find two images or targets, read them, and compare them.

    Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, and ResultError if
    something cannot be read.
    """
    layer_parts: dict[str, LayerPart] = {}  # what was read of layers, which the images may share
    with ExitStack() as stack:
        both = [stack.enter_context(finder.find(name)) for name in (request.a, request.b)]
        common = [platform for platform in both[0].platforms if platform in both[1].platforms]
        own = f"linux/{ARCHITECTURES.get(machine.machine())}"
        chosen = request.platform or (own if own in common else next(iter(common), None))
        built = [isinstance(image, FoundImage) for image in both]
        a, b = (
            _target_facts(image, results, with_platforms=not any(built))
            if isinstance(image, Target)
            else _image_facts(image, chosen or image.platforms[0], results, layer_parts if all(built) else None)
            for image, results in zip(both, request.results or (None, None), strict=True)
        )
        comparison = compare_facts(a, b)
    others: list[str] = []
    if chosen is None:
        others = [f"no platform is in both: {both[0].platforms[0]} is compared with {both[1].platforms[0]}"]
    elif any(built) and not request.platform:
        others = [f"{platform}: compare it with --platform {platform}" for platform in common if platform != chosen]
    return comparison.model_copy(update={"not_compared": (*comparison.not_compared, *others)})


# Facts of an image


COMPONENT = "imagebuild.component."
LICENCES = "org.opencontainers.image.licenses"
NOT_BUILT = "is not built, or has other versions than the plan"


@dataclass(frozen=True)
class ImageFacts:
    """Hold what is known of one of the two images."""

    side: ComparedImage
    values: Mapping[Title, Mapping[str, str]]
    """Section → name → value, for the sections that are known."""
    unknown: Mapping[Title, str] = field(default_factory=dict)
    """Section → why it is not known."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Digest → bytes."""
    made_by: Mapping[str, str] = field(default_factory=dict)
    """Digest of a layer → the instruction that made it."""
    compressed: bool = True
    """Whether these are the sizes that a registry has."""
    results: Results = field(default_factory=Results)
    notes: tuple[str, ...] = ()


FACTS: Mapping[Title, Callable[[PlatformImage], Mapping[str, str]]] = {
    "components": lambda image: components_of(image.labels),
    "environment": lambda image: image.env,
    "settings": lambda image: settings_of(image.settings),
    "licences": lambda image: dict.fromkeys(licences_of(image.labels), "yes"),
    # Components and licences are labels, too.
    "labels": lambda image: {
        name: value for name, value in image.labels.items() if not name.startswith(COMPONENT) and name != LICENCES
    },
    "layers": lambda image: {str(layer.digest): format_size(layer.size) for layer in image.layers},
}
"""Section → what an image says about it."""


def _target_facts(target: Target, results: Path | None, *, with_platforms: bool) -> ImageFacts:
    """Return what the plan says of a target that is not built."""
    values: dict[Title, Mapping[str, str]] = {"components": target.components}
    if with_platforms:  # the other image may have been built for one platform only, which is not a difference
        values["platforms"] = dict.fromkeys(target.platforms, "yes")
    unknown: dict[Title, str] = dict.fromkeys(SECTIONS, NOT_BUILT)
    side = ComparedImage(name=target.id, origin="the plan", digest=None, platform=None)
    return _with_results(ImageFacts(side, values, unknown), _read_results(results))


def _image_facts(
    found: FoundImage, platform: str, results: Path | None, layer_parts: dict[str, LayerPart] | None
) -> ImageFacts:
    """Return the facts of an image; layers are read only with `layer_parts`, which keeps what was read of them."""
    image = found.image(platform)
    report = _read_results(results) or _read_attached_results(image)
    values = {title: facts(image) for title, facts in FACTS.items()}
    values["platforms"] = dict.fromkeys(found.platforms, "yes")
    unknown: dict[Title, str] = {}
    notes: list[str] = []
    if layer_parts is None:
        unknown["packages"] = "was not read, as the other image is not built"
    else:
        packages, note = _read_packages(image, layer_parts)
        notes += filter(None, [note])
        if packages is None:
            unknown["packages"] = "has no packages of dpkg"
        else:
            values["packages"] = packages
    for verification in report.verifications if report else ():
        if verification.digest and verification.digest not in (image.digest, found.digest):
            notes.append(f"the results for {found.name} are of {verification.digest}")
    facts = ImageFacts(
        ComparedImage(name=found.name, origin=found.origin, digest=image.digest, platform=image.platform),
        values, unknown, {str(layer.digest): layer.size for layer in image.layers}, instructions_of(image),
        image.compressed, notes=tuple(notes),
    )  # fmt: skip
    return _with_results(facts, report)


def _with_results(facts: ImageFacts, report: Report | None) -> ImageFacts:
    """Add outcomes of checks, of several runs with different outcomes all of them: `failed, passed`; and speeds."""
    outcomes: dict[str, set[str]] = {}
    for verification in report.verifications if report else ():
        for check in verification.checks:
            outcomes.setdefault(f"{check.component}/{check.check}", set()).add(check.outcome)
    values = dict(facts.values)
    if outcomes:
        values["checks"] = {name: ", ".join(sorted(found)) for name, found in outcomes.items()}
    return replace(
        facts,
        values=values,
        unknown={**facts.unknown, "checks": "has no results of verify"},
        results=report or Results(),
    )


def _read_results(path: Path | None) -> Report | None:
    """Read the results that the user named. Raises ConfigError if there are none."""
    report = gather_files([path])[0] if path else None
    if report and report.nothing_in:
        raise ConfigError(f"--results {path}: has no results; give what verify or report wrote, or a log")
    return report


def _read_attached_results(image: PlatformImage) -> Report | None:
    """Read the results that are attached to the image in its registry."""
    contents = [*image.attached("verification"), *image.attached("benchmark")]
    if not contents:
        return None
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        for i, content in enumerate(contents):
            (Path(folder) / f"{i}.json").write_bytes(content)
        return gather_files([Path(folder)])[0]


def _read_packages(image: PlatformImage, layer_parts: dict[str, LayerPart]) -> tuple[dict[str, str] | None, str]:
    """Return the distribution's packages, and a note on where they come from if that is worth saying."""
    for content in image.attached("sbom"):
        try:
            packages = debian_packages(json.loads(content))
        except (ValueError, LookupError, TypeError, AttributeError):
            continue
        if packages:
            note = f"packages of {image.name} are those of its SBOM; no layer was fetched"
            return package_versions(packages, image.architecture), note
    before = set(layer_parts)
    status = dpkg_status(image.files(DPKG, layer_parts))
    note = ""
    if image.repository:
        size = sum(layer.size for layer in image.layers if layer.digest in layer_parts.keys() - before)
        note = f"{image.name} has no SBOM with packages, so {size / 1e6:.1f} MB of its layers were fetched"
    return None if status is None else package_versions(installed_packages(status), image.architecture), note


def instructions_of(image: PlatformImage) -> dict[str, str]:
    """Return digest of a layer → the instruction that made it, if the history tells which made which."""
    steps = [step for step in image.config.get("history") or () if not step.get("empty_layer")]
    if len(steps) != len(image.layers):
        return {}
    texts = [" ".join(str(step.get("created_by", "")).removesuffix(" # buildkit").split()) for step in steps]
    return {str(layer.digest): text for layer, text in zip(image.layers, texts, strict=True)}


def licences_of(labels: Mapping[str, str]) -> list[str]:
    """Return the parts of the licence expression that are joined by AND."""
    parts, depth, part = [], 0, ""
    for word in re.split(r"([()]|\bAND\b)", labels.get(LICENCES, "")):
        if word == "AND" and depth == 0:
            parts.append(part)
            part = ""
            continue
        depth += {"(": 1, ")": -1}.get(word, 0)
        part += word
    texts = [text.strip() for text in (*parts, part) if text.strip()]
    return [text[1:-1] if text.startswith("(") and text.find(")") == len(text) - 1 else text for text in texts]


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what containers start with, without environment and labels, which have sections of their own."""

    def as_text(value: object) -> str:
        if isinstance(value, Mapping) and not any(value.values()):
            value = sorted(value)  # ports and volumes are keys without a value
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return {n: as_text(value) for n, value in config.items() if n not in ("Env", "Labels") and value not in (None, "")}


# Compare


def compare_facts(a: ImageFacts, b: ImageFacts) -> Comparison:
    """Compare everything that is known of both images."""
    sections = []
    for title in SECTIONS:
        if title in a.values and title in b.values:
            ours, theirs = a.values[title], b.values[title]
            names = dict.fromkeys((*theirs, *ours)) if title == "layers" else sorted({*ours, *theirs})
            made_by = {**a.made_by, **b.made_by} if title == "layers" else {}
            changes = [
                Difference(name=name, a=ours.get(name), b=theirs.get(name), made_by=made_by.get(name, ""))
                for name in names
                if ours.get(name) != theirs.get(name)
            ]
            sections.append(Section(title=title, changes=tuple(changes), same=len(names) - len(changes)))
    sizes = None
    if "layers" in a.values and "layers" in b.values:
        plain = " and ".join(facts.side.name for facts in (a, b) if not facts.compressed)
        sizes = Sizes(
            a=sum(a.layers.values()), b=sum(b.layers.values()),
            shared=sum(size for digest, size in b.layers.items() if digest in a.layers),
            note=f"layers of {plain} are not compressed, so a registry has other sizes and digests" if plain else "",
        )  # fmt: skip
    return Comparison(
        a=a.side, b=b.side, sections=tuple(sections), sizes=sizes, speeds=tuple(compare_speeds(a.results, b.results)),
        not_compared=tuple(_not_compared(a, b)), notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
    )  # fmt: skip


def _not_compared(a: ImageFacts, b: ImageFacts) -> Iterator[str]:
    """Say what is not compared and why; name everything with the same reason at once."""
    reasons: dict[str, list[str]] = {}
    has_speeds = [bool(r.runs or r.tests or r.tables) for r in (a.results, b.results)]
    for facts, has in zip((a, b), has_speeds, strict=True):
        for title in SECTIONS:
            if title not in facts.values:
                reason = f"{facts.side.name} {facts.unknown.get(title, 'does not say')}"
                reasons.setdefault(reason, []).append(title)
        if not has:
            reason = f"{facts.side.name} has no results of nccl-tests, nvbandwidth or perftest"
            reasons.setdefault(reason, []).append("bandwidth")
    yield from (f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
    if all(has_speeds):
        names_a, names_b = ({series.name for series in _series(facts.results)} for facts in (a, b))
        yield from (f"bandwidth of {name}: only one of them has it" for name in sorted(names_a ^ names_b))


SIZE_CLASSES = ((1 << 16, "up to 64 KiB"), (1 << 20, "64 KiB to 1 MiB"), (1 << 30, "1 MiB to 1 GiB"))
"""Size in bytes below which a message belongs to a class, and the name of the class."""
LARGEST = "1 GiB and more"
LARGE = (SIZE_CLASSES[-1][1], LARGEST)
"""Classes of messages whose speed is limited by bandwidth and not by latency."""
EVERY_PAIR = "all pairs"


class SpeedSeries(NamedTuple):
    """Name what a benchmark measured for one class of message sizes."""

    name: str
    sizes: str
    unit: str


Points = dict[object, list[float]]
"""Message size, or cell of a matrix → values that were measured there."""


def compare_speeds(a: Results, b: Results) -> Iterator[Speed]:
    """Compare every benchmark that both have, at the sizes that both have."""
    series_b = _series(b)
    for series, points_a in _series(a).items():
        points_b = series_b.get(series, {})
        pairs = [(median(points_a[point]), median(points_b[point])) for point in points_a if point in points_b]
        if pairs:
            yield Speed(
                name=series.name, sizes=series.sizes, unit=series.unit,
                a=round(median(old for old, _ in pairs), 3), b=round(median(new for _, new in pairs), 3),
                ratio=round(median(new / old for old, new in pairs), 4), points=len(pairs),
            )  # fmt: skip


def _series(results: Results) -> Mapping[SpeedSeries, Points]:
    """Return the measured values of all results that passed: results with wrong data have no speed."""
    by_series: dict[SpeedSeries, Points] = {}

    def add(series: SpeedSeries, point: object, value: float | None) -> None:
        if value is not None and value > 0:
            by_series.setdefault(series, {}).setdefault(point, []).append(value)

    for run in results.runs:
        for row in run.rows if run.verdict == "ok" else ():
            name = ", ".join(filter(None, (run_name(run), row.dtype, run.device)))
            add(SpeedSeries(name, _size_class(row.size_bytes), "GB/s"), row.size_bytes, busbw(row))
    for test in results.tests:
        for cell, value in enumerate(device_pairs(test) if test.status == "passed" else ()):
            add(SpeedSeries(test.name or "unnamed test", EVERY_PAIR, test.unit or "?"), cell, value)
    for table in results.tables:
        for line in table.rows if table.verdict == "ok" else ():
            name, sizes = table.test or "perftest", _size_class(line.size_bytes)
            add(SpeedSeries(name, sizes, table.unit or "?"), line.size_bytes, line.bw_average)
            add(SpeedSeries(name, sizes, "µs"), line.size_bytes, latency(line.latency_us))
    return by_series


def _size_class(size: int) -> str:
    return next((name for limit, name in SIZE_CLASSES if size < limit), LARGEST)


# Print


TIME_UNITS = ("µs", "us", "ns")
MOST_CHARACTERS = 100
"""Characters of a value in a table; JSON has all of it."""

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Heading, names of columns, rows."""


def print_comparison(comparison: Comparison) -> None:
    """Print a comparison as tables, with the summary last."""
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        out.print(f"[bold]{letter}[/] {escape(_side(side))}")
    for heading, columns, rows in _tables(comparison):
        out.print(f"\n[bold]{escape(heading)}[/]")
        print_table(columns, [[escape(cell) for cell in row] for row in rows])
    for line in _remarks(comparison):
        out.print(f"[yellow]-[/] {escape(line)}")
    out.print(summarise(comparison), markup=False)


def comparison_markdown(comparison: Comparison) -> str:
    """Return a comparison as Markdown for a pull request: the summary, and tables that unfold."""

    def html(text: str) -> str:
        return escape_html(text, quote=False)

    lines = [f"**{html(summarise(comparison))}**", ""]
    lines += [f"* {n}: {html(_side(side))}" for n, side in (("A", comparison.a), ("B", comparison.b))]
    for heading, columns, rows in _tables(comparison):
        table = markdown_table(columns, [tuple(map(html, row)) for row in rows])
        lines += ["", f"<details><summary>{html(heading)}</summary>", "", table, "", "</details>"]
    if remarks := list(_remarks(comparison)):
        lines += ["", *(f"* {html(line)}" for line in remarks)]
    return "\n".join(lines) + "\n"


def summarise(comparison: Comparison) -> str:
    """Return `3 components, 9 layers differ; 409.1 MB becomes 696.2 MB (+70.2%), 29.8 MB shared`."""
    counts = [(len(section.changes), section.title) for section in comparison.sections if section.changes]
    nouns = {"environment": "variables"}
    listed = ", ".join(
        f"{n} {noun if n != 1 else noun.removesuffix('s')}" for n, title in counts for noun in [nouns.get(title, title)]
    )
    text = f"{listed} {_differ(sum(n for n, _ in counts))}" if counts else "nothing that was compared differs"
    if sizes := comparison.sizes:
        change = f" ({(sizes.b - sizes.a) / sizes.a:+.1%})" if sizes.a and sizes.a != sizes.b else ""
        before, after, shared = map(format_size, (sizes.a, sizes.b, sizes.shared))
        text += f"; {before} becomes {after}{change}, {shared} shared"
    # Small messages measure latency, which differs by a few percent in every run.
    if large := [speed for speed in comparison.speeds if speed.sizes in (EVERY_PAIR, *LARGE)]:
        worst = min(large, key=lambda speed: 1 / speed.ratio if speed.unit in TIME_UNITS else speed.ratio)
        text += f"; least bandwidth ratio {worst.ratio:.3f} ({worst.name}, {worst.sizes})"
    return text


def _remarks(comparison: Comparison) -> Iterator[str]:
    yield from comparison.notes
    if comparison.sizes and comparison.sizes.note:
        yield comparison.sizes.note
    yield from (f"not compared: {text}" for text in comparison.not_compared)


def _tables(comparison: Comparison) -> Iterator[Table]:
    for section in comparison.sections:
        if section.changes:
            count = len(section.changes)
            names = [f"{_shorten(change.name)} {_shorten(change.made_by)}".rstrip() for change in section.changes]
            values = [_both_values(change.a, change.b) for change in section.changes]
            rows = [(name, *both) for name, both in zip(names, values, strict=True)]
            yield f"{section.title}: {count} {_differ(count)}, {section.same} the same", ("", "A", "B"), rows
    if comparison.speeds:
        speeds = [
            (
                speed.name, speed.sizes, f"{format_number(speed.a)} {speed.unit}",
                f"{format_number(speed.b)} {speed.unit}", f"{speed.ratio:.3f}", str(speed.points),
            )
            for speed in comparison.speeds
        ]  # fmt: skip
        yield "bandwidth: median over the sizes that both have", ("", "sizes", "A", "B", "B/A", "points"), speeds


def _differ(count: int) -> str:
    return "differs" if count == 1 else "differ"


def _both_values(a: str | None, b: str | None) -> tuple[str, str]:
    """Return both values for a table; of long values, the parts from where they differ."""
    if a and b and max(len(a), len(b)) > MOST_CHARACTERS:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if same > 20:
            a, b = f"…{a[same - 10 :]}", f"…{b[same - 10 :]}"
    return (NONE if a is None else _shorten(a)), (NONE if b is None else _shorten(b))


def _shorten(text: str) -> str:
    text = re.sub(r"^sha256:([0-9a-f]{12})[0-9a-f]{52}", r"\1", text)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _side(side: ComparedImage) -> str:
    origin = f" ({side.origin})" if side.origin != side.name else ""
    return ", ".join(filter(None, (side.name + origin, side.platform, side.digest)))
