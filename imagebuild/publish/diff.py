"""Compare two images: components, packages, settings, layers, checks and bandwidth."""

from __future__ import annotations

import json
import platform as machine
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from rich.markup import escape

from imagebuild.bench.judge import device_pairs
from imagebuild.bench.models import Results
from imagebuild.core.console import format_size, markdown_table, out, print_table
from imagebuild.core.debian import Package, installed_packages, package_versions, packages_of_sbom
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.oci.image import DPKG, FoundImage, LayerPart, PlatformImage, dpkg_status
from imagebuild.project.matrix import Target
from imagebuild.project.records import VerifyResult
from imagebuild.report.document import NONE, Gathered, busbw, format_number, gather_files, latency, run_name
from imagebuild.verify.checks import components_of
from imagebuild.verify.subject import ImageFinder

Title = Literal["components", "packages", "environment", "settings", "licences", "labels", "platforms", "checks"]
SECTIONS: tuple[Title, ...] = get_args(Title)
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
"""Machine as `uname -m` prints it → platform."""
NOT_BUILT = "is not built, or has other versions than the plan"


class Difference(Model):
    """Name something that differs, with both values."""

    name: str
    a: str | None
    """None if A does not have it."""
    b: str | None


class Section(Model):
    """List what differs in one respect, such as packages."""

    title: Title
    changes: tuple[Difference, ...]
    same: int
    """Number of things that are the same in both."""


class LayerChange(Model):
    """Describe a layer, and say which image has it."""

    digest: str
    size_bytes: int
    where: Literal["a", "b", "both"]
    made_by: str = ""
    """Instruction that made it, from the image's history."""


class Sizes(Model):
    """Compare sizes in bytes, compressed as a registry stores layers, unless `note` says otherwise."""

    a: int
    b: int
    shared: int
    """Size of the layers of B that A has, too: a machine with A does not fetch them again."""
    layers: tuple[LayerChange, ...]
    """Layers of B in their order, then those that only A has."""
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
        layers = self.sizes is not None and any(layer.where != "both" for layer in self.sizes.layers)
        return layers or any(section.changes for section in self.sections)


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
        platforms = _choose_platforms(both, request.platform)
        both_built = all(isinstance(image, FoundImage) for image in both)
        none_built = not any(isinstance(image, FoundImage) for image in both)
        a, b = (
            _target_facts(image, results, none_built=none_built)
            if isinstance(image, Target)
            else _image_facts(image, image.image(platform), results, layer_parts if both_built else None)
            for image, platform, results in zip(both, platforms, request.results or (None, None), strict=True)
        )
        comparison = compare_facts(a, b)
    others = [] if request.platform else _other_platforms(both, platforms)
    return comparison.model_copy(update={"not_compared": (*comparison.not_compared, *others)})


def _choose_platforms(both: list[FoundImage | Target], requested: str | None) -> list[str | None]:
    """Return a platform for each image: the requested one, else this machine's, else one that both have."""
    if requested:
        return [requested, requested]
    common = [platform for platform in both[0].platforms if platform in both[1].platforms]
    own = PLATFORMS.get(machine.machine())
    if common:
        return [own if own in common else common[0]] * 2
    return [image.platforms[0] for image in both]


def _other_platforms(both: list[FoundImage | Target], chosen: list[str | None]) -> list[str]:
    """Name the platforms that are not compared."""
    if chosen[0] != chosen[1]:
        return [f"no platform is in both: {both[0].platforms[0]} is compared with {both[1].platforms[0]}"]
    if not any(isinstance(image, FoundImage) for image in both):
        return []
    common = [platform for platform in both[0].platforms if platform in both[1].platforms and platform != chosen[0]]
    return [f"{platform}: compare it with --platform {platform}" for platform in common]


# Facts of an image


COMPONENT = "imagebuild.component."
LICENCES = "org.opencontainers.image.licenses"
LONGEST = 120
"""Characters of an instruction that are shown."""


@dataclass(frozen=True)
class LayerFact:
    """Describe a layer."""

    digest: str
    size_bytes: int
    made_by: str = ""


@dataclass(frozen=True)
class ImageFacts:
    """Hold what is known of one of the two images."""

    side: ComparedImage
    values: Mapping[Title, Mapping[str, str]]
    """Section → name → value, for the sections that are known."""
    unknown: Mapping[Title, str] = field(default_factory=dict)
    """Section → why it is not known."""
    layers: tuple[LayerFact, ...] | None = None
    compressed: bool = True
    """Whether the sizes of layers are those of a registry."""
    results: Results = field(default_factory=Results)
    notes: tuple[str, ...] = ()


def _target_facts(target: Target, results: Path | None, *, none_built: bool) -> ImageFacts:
    """Return what the plan says of a target that is not built."""
    gathered = _read_results(results)
    values: dict[Title, dict[str, str]] = {"components": dict(target.components)}
    if none_built:  # the other image may have been built for one platform only, which is not a difference
        values["platforms"] = dict.fromkeys(target.platforms, "yes")
    if gathered and gathered.verifications:
        values["checks"] = outcomes_of(gathered.verifications)
    unknown: dict[Title, str] = dict.fromkeys(SECTIONS, NOT_BUILT)
    return ImageFacts(
        ComparedImage(name=target.id, origin="the plan", digest=None, platform=None),
        values,
        {**unknown, "checks": "has no results of verify"},
        results=gathered.results if gathered else Results(),
    )


def _image_facts(
    found: FoundImage, image: PlatformImage, results: Path | None, layer_parts: dict[str, LayerPart] | None
) -> ImageFacts:
    """Return the facts of an image; layers are read only with `layer_parts`, which keeps what was read of them."""
    notes: list[str] = []
    gathered = _read_results(results) or _read_attached_results(image)
    values: dict[Title, dict[str, str]] = {
        "components": components_of(image.labels),
        "environment": environment_of(image.settings),
        "settings": settings_of(image.settings),
        "licences": licences_of(image.labels),
        "labels": labels_of(image.labels),
        "platforms": dict.fromkeys(found.platforms, "yes"),
    }
    if layer_parts is not None:
        packages, note = _read_packages(image, layer_parts)
        notes += [note] if note else []
        if packages is not None:
            values["packages"] = package_versions(packages, image.architecture)
    if gathered and gathered.verifications:
        values["checks"] = outcomes_of(gathered.verifications)
        for verification in gathered.verifications:
            if verification.digest and verification.digest not in (image.digest, found.digest):
                notes.append(f"the results for {found.name} are of {verification.digest}")
    unread = "was not read, as the other image is not built"
    return ImageFacts(
        side=ComparedImage(name=found.name, origin=found.origin, digest=image.digest, platform=image.platform),
        values=values,
        unknown={
            "packages": unread if layer_parts is None else "has no packages of dpkg",
            "checks": "has no results of verify",
        },
        layers=layers_of(image.config, [(layer.digest, layer.size) for layer in image.layers]),
        compressed=image.compressed,
        notes=tuple(notes),
        results=gathered.results if gathered else Results(),
    )


def _read_results(path: Path | None) -> Gathered | None:
    """Read the results that the user named. Raises ConfigError if there are none."""
    if path is None:
        return None
    gathered = gather_files([path])
    if gathered.nothing_in:
        raise ConfigError(f"--results {path}: has no results; give what verify or report wrote, or a log")
    return gathered


def _read_attached_results(image: PlatformImage) -> Gathered | None:
    """Read the results that are attached to the image in its registry."""
    contents = [(kind, content) for kind in ("verification", "benchmark") for content in image.attached(kind)]
    if not contents:
        return None
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        for i, (kind, content) in enumerate(contents):
            (Path(folder) / f"{kind}-{i}.json").write_bytes(content)
        return gather_files([Path(folder)])


def _read_packages(image: PlatformImage, layer_parts: dict[str, LayerPart]) -> tuple[tuple[Package, ...] | None, str]:
    """Return the distribution's packages, and a note on where they come from if that is worth saying."""
    for content in image.attached("sbom"):
        try:
            packages = packages_of_sbom(json.loads(content))
        except (ValueError, TypeError, AttributeError):
            continue
        if packages:
            return packages, f"packages of {image.name} are those of its SBOM; no layer was fetched"
    before = set(layer_parts)
    status = dpkg_status(image.files(DPKG, layer_parts))
    note = ""
    if image.remote:
        read = layer_parts.keys() - before
        size = sum(layer.size for layer in image.layers if layer.digest in read)
        note = f"{image.name} has no SBOM with packages, so {size / 1e6:.1f} MB of its layers were fetched"
    return (None if status is None else installed_packages(status)), note


def labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels without components and licences, which have sections of their own."""
    return {name: value for name, value in labels.items() if not name.startswith(COMPONENT) and name != LICENCES}


def licences_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of the licence expression that are joined by AND, each with the value `yes`."""
    parts, depth, part = [], 0, ""
    for word in re.split(r"([()]|\bAND\b)", labels.get(LICENCES, "")):
        if word == "AND" and depth == 0:
            parts.append(part)
            part = ""
            continue
        depth += {"(": 1, ")": -1}.get(word, 0)
        part += word
    texts = [text.strip() for text in (*parts, part) if text.strip()]
    return {text[1:-1] if text.startswith("(") and text.find(")") == len(text) - 1 else text: "yes" for text in texts}


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what containers start with, without environment and labels, which have sections of their own."""
    return {
        name: _as_text(value)
        for name, value in config.items()
        if name not in ("Env", "Labels") and value not in (None, "")
    }


def _as_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(sorted(map(str, value))) if not any(value.values()) else str(dict(value))
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


def environment_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return variable → value."""
    pairs = (str(item).partition("=") for item in config.get("Env") or ())
    return {name: value for name, _, value in pairs}


def layers_of(config: Mapping[str, Any], stored: Sequence[tuple[str | None, int]]) -> tuple[LayerFact, ...]:
    """Return the layers with the instructions that made them; `stored` are their digests and sizes."""
    history = [step for step in config.get("history") or () if not step.get("empty_layer")]
    instructions = [_one_line(str(step.get("created_by", ""))) for step in history]
    if len(instructions) != len(stored):
        instructions = [""] * len(stored)  # which instruction made which layer is unknown
    return tuple(
        LayerFact(digest or f"layer {i}", size, instruction)
        for i, ((digest, size), instruction) in enumerate(zip(stored, instructions, strict=True))
    )


def _one_line(instruction: str) -> str:
    text = " ".join(instruction.removesuffix(" # buildkit").split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def outcomes_of(verifications: Iterable[VerifyResult]) -> dict[str, str]:
    """Return check → outcome; if several runs have different outcomes, all of them: `failed, passed`."""
    outcomes: dict[str, set[str]] = {}
    for verification in verifications:
        for check in verification.checks:
            outcomes.setdefault(f"{check.component}/{check.check}", set()).add(check.outcome)
    return {name: ", ".join(sorted(values)) for name, values in outcomes.items()}


# Compare


def compare_facts(a: ImageFacts, b: ImageFacts) -> Comparison:
    """Compare everything that is known of both images."""
    known = [title for title in SECTIONS if title in a.values and title in b.values]
    return Comparison(
        a=a.side,
        b=b.side,
        sections=tuple(_compare_section(title, a.values[title], b.values[title]) for title in known),
        sizes=_compare_sizes(a, b),
        speeds=tuple(compare_speeds(a.results, b.results)),
        not_compared=tuple(_not_compared(a, b)),
        notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
    )


def _not_compared(a: ImageFacts, b: ImageFacts) -> Iterator[str]:
    """Say what is not compared and why; name everything with the same reason at once."""
    reasons: dict[str, list[str]] = {}
    for facts in (a, b):
        for title in SECTIONS:
            if title not in facts.values:
                reason = f"{facts.side.name} {facts.unknown.get(title, 'does not say')}"
                reasons.setdefault(reason, []).append(title)
        if facts.layers is None:
            reasons.setdefault(f"{facts.side.name} {facts.unknown.get('packages', '')}", []).append("size")
        if not _has_speeds(facts.results):
            reasons.setdefault(f"{facts.side.name} has no results of nccl-tests, nvbandwidth or perftest", []).append(
                "bandwidth"
            )
    yield from (f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
    if _has_speeds(a.results) and _has_speeds(b.results):
        names_a, names_b = ({key.name for key in _series(facts.results)} for facts in (a, b))
        for name in sorted(names_a ^ names_b):
            yield f"bandwidth of {name}: only one of them has it"


def _has_speeds(results: Results) -> bool:
    return bool(results.runs or results.tests or results.tables)


def _compare_section(title: Title, a: Mapping[str, str], b: Mapping[str, str]) -> Section:
    names = sorted({*a, *b})
    changes = tuple(Difference(name=n, a=a.get(n), b=b.get(n)) for n in names if a.get(n) != b.get(n))
    return Section(title=title, changes=changes, same=len(names) - len(changes))


def _compare_sizes(a: ImageFacts, b: ImageFacts) -> Sizes | None:
    if a.layers is None or b.layers is None:
        return None
    in_a, in_b = {layer.digest for layer in a.layers}, {layer.digest for layer in b.layers}
    wheres: list[tuple[LayerFact, Literal["a", "b", "both"]]] = [
        (layer, "both" if layer.digest in in_a else "b") for layer in b.layers
    ]
    wheres += [(layer, "a") for layer in a.layers if layer.digest not in in_b]
    plain = " and ".join(facts.side.name for facts in (a, b) if not facts.compressed)
    return Sizes(
        a=sum(layer.size_bytes for layer in a.layers),
        b=sum(layer.size_bytes for layer in b.layers),
        shared=sum(layer.size_bytes for layer in b.layers if layer.digest in in_a),
        layers=tuple(
            LayerChange(digest=layer.digest, size_bytes=layer.size_bytes, where=where, made_by=layer.made_by)
            for layer, where in wheres
        ),
        note=f"layers of {plain} are not compressed, so a registry has other sizes and digests" if plain else "",
    )


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
WHERE = {"a": "only A", "b": "only B", "both": "both"}
MOST_CHARACTERS = 100
"""Characters of a value in a table; JSON has all of it."""

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
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
    lines = [f"**{_html(summarise(comparison))}**", ""]
    lines += [f"* {n}: {_html(_side(side))}" for n, side in (("A", comparison.a), ("B", comparison.b))]
    for heading, columns, rows in _tables(comparison):
        lines += ["", f"<details><summary>{_html(heading)}</summary>", ""]
        lines += [markdown_table(columns, [[_html(cell) for cell in row] for row in rows])]
        lines += ["", "</details>"]
    if remarks := list(_remarks(comparison)):
        lines += ["", *(f"* {_html(line)}" for line in remarks)]
    return "\n".join(lines) + "\n"


def summarise(comparison: Comparison) -> str:
    """Return `3 components, 9 layers differ; 409.1 MB becomes 696.2 MB (+70.2%), 29.8 MB shared`."""
    counts = []
    for section in comparison.sections:
        noun = "variables" if section.title == "environment" else section.title
        if section.changes:
            counts.append((len(section.changes), noun if len(section.changes) != 1 else noun.removesuffix("s")))
    sizes = comparison.sizes
    if sizes and (layers := sum(layer.where != "both" for layer in sizes.layers)):
        counts.append((layers, "layer" if layers == 1 else "layers"))
    verb = "differs" if sum(count for count, _ in counts) == 1 else "differ"
    listed = ", ".join(f"{count} {noun}" for count, noun in counts)
    text = f"{listed} {verb}" if counts else "nothing that was compared differs"
    if sizes:
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
            values = [(change.name, *_both_values(change.a, change.b)) for change in section.changes]
            yield f"{section.title}: {_differ(len(values))}, {section.same} the same", ("", "A", "B"), values
    if comparison.sizes and (changed := [layer for layer in comparison.sizes.layers if layer.where != "both"]):
        rows: list[tuple[str, ...]] = [
            (
                WHERE[layer.where],
                format_size(layer.size_bytes),
                layer.digest.removeprefix("sha256:")[:12],
                _shorten(layer.made_by),
            )
            for layer in changed
        ]
        shared = f"{len(comparison.sizes.layers) - len(changed)} shared ({format_size(comparison.sizes.shared)})"
        yield f"layers: {_differ(len(changed))}, {shared}", ("in", "size", "layer", "made by"), rows
    if comparison.speeds:
        rows = [
            (
                speed.name,
                speed.sizes,
                f"{format_number(speed.a)} {speed.unit}",
                f"{format_number(speed.b)} {speed.unit}",
                f"{speed.ratio:.3f}",
                str(speed.points),
            )
            for speed in comparison.speeds
        ]
        yield "bandwidth: median over the sizes that both have", ("", "sizes", "A", "B", "B/A", "points"), rows


def _differ(count: int) -> str:
    return f"{count} differs" if count == 1 else f"{count} differ"


def _both_values(a: str | None, b: str | None) -> Sequence[str]:
    """Return both values for a table; of long values, the parts from where they differ."""
    if a and b and max(len(a), len(b)) > MOST_CHARACTERS:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if same > 20:
            a, b = f"…{a[same - 10 :]}", f"…{b[same - 10 :]}"
    return tuple(NONE if value is None else _shorten(value) for value in (a, b))


def _shorten(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _side(side: ComparedImage) -> str:
    origin = f" ({side.origin})" if side.origin != side.name else ""
    return ", ".join(filter(None, (side.name + origin, side.platform, side.digest)))


def _html(text: str) -> str:
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").splitlines())
