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
from imagebuild.core import console
from imagebuild.core.console import out
from imagebuild.core.debian import Package, installed_packages, package_versions, packages_of_sbom
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.oci.image import DPKG, FoundImage, LayerPart, PlatformImage, dpkg_status
from imagebuild.project.matrix import Target
from imagebuild.project.records import VerifyResult
from imagebuild.report import document
from imagebuild.report.document import NONE, Gathered, format_number, gather_files
from imagebuild.verify.checks import components_of
from imagebuild.verify.subject import ImageFinder

Title = Literal["components", "packages", "environment", "settings", "licences", "labels", "platforms", "checks"]


class Difference(Model):
    """Something that is not the same in both."""

    name: str
    a: str | None
    """None where A does not have it."""
    b: str | None


class Section(Model):
    """Things of one kind."""

    title: Title
    changes: tuple[Difference, ...]
    same: int
    """How many are the same in both."""


class LayerChange(Model):
    """A layer that only one of them has, or both."""

    digest: str
    size_bytes: int
    where: Literal["a", "b", "both"]
    made_by: str = ""
    """The instruction that made it, as the image's history says."""


class Sizes(Model):
    """Bytes, compressed as a registry keeps them, unless `note` says otherwise."""

    a: int
    b: int
    shared: int
    """Of layers that both have: whoever has A fetches them not again."""
    layers: tuple[LayerChange, ...]
    """Those of B in their order, then those that only A has."""
    note: str = ""


class Speed(Model):
    """One benchmark at sizes of a class, in both."""

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
    """Sizes that both have."""


class ComparedImage(Model):
    """One of the two."""

    name: str
    origin: str
    """Where it was found."""
    digest: str | None
    platform: str | None
    """None for a target that is not built."""


class Comparison(Model):
    """What `imagebuild diff --json` writes."""

    a: ComparedImage
    b: ComparedImage
    sections: tuple[Section, ...]
    sizes: Sizes | None
    speeds: tuple[Speed, ...]
    not_compared: tuple[str, ...]
    """What was not compared, and why."""
    notes: tuple[str, ...] = ()
    """How something was found out."""

    @property
    def differs(self) -> bool:
        """Whether anything is not the same. Speeds differ from run to run, and do not count."""
        layers = self.sizes is not None and any(layer.where != "both" for layer in self.sizes.layers)
        return layers or any(section.changes for section in self.sections)


CLASSES = ((1 << 16, "up to 64 KiB"), (1 << 20, "64 KiB to 1 MiB"), (1 << 30, "1 MiB to 1 GiB"))
LARGEST = "1 GiB and more"
LARGE = (CLASSES[-1][1], LARGEST)
"""Classes of sizes at which it is bandwidth that is measured."""
EVERY_PAIR = "all pairs"


class Key(NamedTuple):
    """What was measured, at sizes of one class."""

    name: str
    sizes: str
    unit: str


Points = dict[object, list[float]]
"""Size, or cell of a matrix → what was measured there."""


def speeds(a: Results, b: Results) -> Iterator[Speed]:
    """Every benchmark that both have, at the sizes that both have."""
    ours, theirs = _series(a), _series(b)
    for key, points in ours.items():
        others = theirs.get(key, {})
        shared = [point for point in points if point in others]
        if not shared:
            continue
        pairs_of = [(median(points[point]), median(others[point])) for point in shared]
        yield Speed(
            name=key.name, sizes=key.sizes, unit=key.unit,
            a=round(median(old for old, _ in pairs_of), 3), b=round(median(new for _, new in pairs_of), 3),
            ratio=round(median(new / old for old, new in pairs_of), 4), points=len(shared),
        )  # fmt: skip


def in_one_only(a: Results, b: Results) -> tuple[str, ...]:
    """Benchmarks that cannot be compared, as only one has them or at other sizes."""
    ours, theirs = ({key.name for key in _series(results)} for results in (a, b))
    return tuple(sorted(ours ^ theirs))


def size_class(size: int) -> str:
    """`1 MiB to 1 GiB`: the least size is in it, the greatest is not."""
    return next((name for limit, name in CLASSES if size < limit), LARGEST)


def _series(results: Results) -> Mapping[Key, Points]:
    found: dict[Key, Points] = {}

    def add(key: Key, point: object, value: float | None) -> None:
        if value is not None and value > 0:
            found.setdefault(key, {}).setdefault(point, []).append(value)

    for run in results.runs:
        # What computed wrong data may be as fast as it likes.
        for row in run.rows if run.verdict == "ok" else ():
            name = ", ".join(filter(None, (document.run_name(run), row.dtype, run.device)))
            add(Key(name, size_class(row.size_bytes), "GB/s"), row.size_bytes, document.busbw(row))
    for test in results.tests:
        for cell, value in enumerate(device_pairs(test) if test.status == "passed" else ()):
            add(Key(test.name or "unnamed test", EVERY_PAIR, test.unit or "?"), cell, value)
    for table in results.tables:
        for line in table.rows if table.verdict == "ok" else ():
            name, group = table.test or "perftest", size_class(line.size_bytes)
            add(Key(name, group, table.unit or "?"), line.size_bytes, line.bw_average)
            add(Key(name, group, "µs"), line.size_bytes, document.latency(line.latency_us))
    return found


SECTIONS: tuple[Title, ...] = get_args(Title)
LICENCES = "org.opencontainers.image.licenses"
COMPONENT = "imagebuild.component."
LONGEST = 120
"""Characters of an instruction that are shown."""


@dataclass(frozen=True)
class LayerFact:
    """A layer."""

    digest: str
    size_bytes: int
    made_by: str = ""


@dataclass(frozen=True)
class ImageFacts:
    """One of two images."""

    side: ComparedImage
    values: Mapping[Title, Mapping[str, str]]
    """Section → name → value. A section that is absent is not known."""
    unknown: Mapping[Title, str] = field(default_factory=dict)
    """Why sections are not known."""
    layers: tuple[LayerFact, ...] | None = None
    compressed: bool = True
    """Whether layers are as a registry keeps them."""
    results: Results = field(default_factory=Results)
    notes: tuple[str, ...] = ()


def compare(a: ImageFacts, b: ImageFacts) -> Comparison:
    """What differs."""
    known = [title for title in SECTIONS if title in a.values and title in b.values]
    sized = a.layers is not None and b.layers is not None
    return Comparison(
        a=a.side,
        b=b.side,
        sections=tuple(_section(title, a.values[title], b.values[title]) for title in known),
        sizes=_sizes(a, b) if sized else None,
        speeds=tuple(speeds(a.results, b.results)),
        not_compared=tuple(_not_compared(a, b)),
        notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
    )


def _not_compared(a: ImageFacts, b: ImageFacts) -> Iterator[str]:
    """What, and why; what has the same reason in one sentence."""
    reasons: dict[str, list[str]] = {}
    for facts in (a, b):
        for title in SECTIONS:
            if title not in facts.values:
                why = f"{facts.side.name} {facts.unknown.get(title, 'does not say')}"
                reasons.setdefault(why, []).append(title)
        if facts.layers is None:
            reasons.setdefault(f"{facts.side.name} {facts.unknown.get('packages', '')}", []).append("size")
        if not _measured(facts.results):
            reasons.setdefault(f"{facts.side.name} has no results of benchmarks", []).append("bandwidth")
    yield from (f"{', '.join(titles)}: {why}" for why, titles in reasons.items())
    if _measured(a.results) and _measured(b.results):
        for name in in_one_only(a.results, b.results):
            yield f"bandwidth of {name}: only one of them has it"


def _measured(results: Results) -> bool:
    return bool(results.runs or results.tests or results.tables)


def _section(title: Title, a: Mapping[str, str], b: Mapping[str, str]) -> Section:
    names = sorted({*a, *b})
    changes = tuple(Difference(name=n, a=a.get(n), b=b.get(n)) for n in names if a.get(n) != b.get(n))
    return Section(title=title, changes=changes, same=len(names) - len(changes))


def _sizes(a: ImageFacts, b: ImageFacts) -> Sizes:
    ours, theirs = a.layers or (), b.layers or ()
    in_a, in_b = {layer.digest for layer in ours}, {layer.digest for layer in theirs}
    changes = [_change(layer, "both" if layer.digest in in_a else "b") for layer in theirs]
    changes += [_change(layer, "a") for layer in ours if layer.digest not in in_b]
    plain = [facts.side.name for facts in (a, b) if not facts.compressed]
    note = (
        f"layers of {' and '.join(plain)} are not compressed, so sizes and digests are no registry's" if plain else ""
    )
    return Sizes(
        a=sum(layer.size_bytes for layer in ours),
        b=sum(layer.size_bytes for layer in theirs),
        shared=sum(layer.size_bytes for layer in theirs if layer.digest in in_a),
        layers=tuple(changes),
        note=note,
    )


def _change(layer: LayerFact, where: str) -> LayerChange:
    return LayerChange.model_validate(
        {"digest": layer.digest, "size_bytes": layer.size_bytes, "where": where, "made_by": layer.made_by}
    )


def labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels, but for those that have sections of their own: components and licences."""
    return {name: value for name, value in labels.items() if not name.startswith(COMPONENT) and name != LICENCES}


def licences(labels: Mapping[str, str]) -> dict[str, str]:
    """The parts that the expression of the licences joins by AND."""
    found, depth, part = [], 0, ""
    for word in re.split(r"([()]|\bAND\b)", labels.get(LICENCES, "")):
        if word == "AND" and depth == 0:
            found.append(part)
            part = ""
            continue
        depth += {"(": 1, ")": -1}.get(word, 0)
        part += word
    return {_bare(text): "yes" for text in (*found, part) if text.strip()}


def _bare(text: str) -> str:
    text = text.strip()
    return text[1:-1] if text.startswith("(") and text.find(")") == len(text) - 1 else text


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """What containers start with, but for environment and labels, which have sections of their own."""
    return {
        name: _text(value)
        for name, value in config.items()
        if name not in ("Env", "Labels") and value not in (None, "")
    }


def environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Variable → value."""
    parted = (str(item).partition("=") for item in config.get("Env") or ())
    return {name: value for name, _, value in parted}


def layers(config: Mapping[str, Any], stored: Sequence[tuple[str | None, int]]) -> tuple[LayerFact, ...]:
    """Layers with the instructions that made them; `stored` has their digests and sizes."""
    history = [step for step in config.get("history") or () if not step.get("empty_layer")]
    made = [_instruction(str(step.get("created_by", ""))) for step in history]
    if len(made) != len(stored):
        made = [""] * len(stored)  # what is not one to one says nothing
    return tuple(
        LayerFact(digest or f"layer {i}", size, text)
        for i, ((digest, size), text) in enumerate(zip(stored, made, strict=True))
    )


def _instruction(text: str) -> str:
    one_line = " ".join(text.removesuffix(" # buildkit").split())
    return one_line if len(one_line) <= LONGEST else one_line[: LONGEST - 1] + "…"


def checks(verifications: Iterable[VerifyResult]) -> dict[str, str]:
    """Check → outcome; of several runs with different ones, all."""
    found: dict[str, set[str]] = {}
    for verification in verifications:
        for check in verification.checks:
            found.setdefault(f"{check.component}/{check.check}", set()).add(check.outcome)
    return {name: ", ".join(sorted(outcomes)) for name, outcomes in found.items()}


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(sorted(map(str, value))) if not any(value.values()) else str(dict(value))
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)


ARCHITECTURES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
NOT_BUILT = "is not built, or has other versions than the plan"


@dataclass(frozen=True)
class DiffRequest:
    """What is compared."""

    a: str
    b: str
    platform: str | None = None
    results: tuple[Path, Path] | None = None
    """Results of A and of B, as files or folders."""


def compare_images(wish: DiffRequest, places: ImageFinder) -> Comparison:
    """Find both, read them, and say what differs.

    Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, ResultError if
    something cannot be read.
    """
    known: dict[str, LayerPart] = {}
    with ExitStack() as stack:
        both = [stack.enter_context(places.find(name)) for name in (wish.a, wish.b)]
        chosen = _platforms(both, wish.platform)
        given = wish.results or (None, None)
        built = all(isinstance(one, FoundImage) for one in both)
        a, b = (
            _of_target(one, path, alone=any(isinstance(other, FoundImage) for other in both))
            if isinstance(one, Target)
            else _of_image(one, one.image(platform), path, known if built else None)
            for one, platform, path in zip(both, chosen, given, strict=True)
        )
        made = compare(a, b)
    others = [] if wish.platform else _others(both, chosen)
    return made.model_copy(update={"not_compared": (*made.not_compared, *others)})


def _platforms(both: list[FoundImage | Target], wanted: str | None) -> list[str | None]:
    """The platform of each: the one that is wanted, this machine's if both have it, else one that both have."""
    if wanted:
        return [wanted, wanted]
    common = [p for p in both[0].platforms if p in both[1].platforms]
    own = ARCHITECTURES.get(machine.machine())
    if common:
        return [own if own in common else common[0]] * 2
    return [one.platforms[0] for one in both]


def _others(both: list[FoundImage | Target], chosen: list[str | None]) -> list[str]:
    if chosen[0] != chosen[1]:
        return [f"no platform is in both: {both[0].platforms[0]} is compared with {both[1].platforms[0]}"]
    common = [p for p in both[0].platforms if p in both[1].platforms and p != chosen[0]]
    built = any(isinstance(one, FoundImage) for one in both)
    return [f"{platform}: compare it with --platform {platform}" for platform in common] if built else []


def _of_target(target: Target, given: Path | None, *, alone: bool) -> ImageFacts:
    """Of a target that is not built; `alone` if the other one is."""
    gathered = _gathered(given)
    values: dict[Title, dict[str, str]] = {"components": dict(target.components)}
    if not alone:  # an image that was built for one platform so far lacks nothing
        values["platforms"] = dict.fromkeys(target.platforms, "yes")
    if gathered and gathered.verifications:
        values["checks"] = checks(gathered.verifications)
    unknown: dict[Title, str] = dict.fromkeys(SECTIONS, NOT_BUILT)
    side = ComparedImage(name=target.id, origin="the plan", digest=None, platform=None)
    results = gathered.results if gathered else Results()
    return ImageFacts(side, values, {**unknown, "checks": "has no results of verify"}, results=results)


def _of_image(
    found: FoundImage, image: PlatformImage, given: Path | None, known: dict[str, LayerPart] | None
) -> ImageFacts:
    """Of an image; without `known`, which holds what was read of layers, layers are not read."""
    notes: list[str] = []
    gathered = _gathered(given) or _attached(image)
    values: dict[Title, dict[str, str]] = {
        "components": components_of(image.labels),
        "environment": environment(image.settings),
        "settings": settings(image.settings),
        "licences": licences(image.labels),
        "labels": labels(image.labels),
        "platforms": dict.fromkeys(found.platforms, "yes"),
    }
    if known is not None:
        packages, how = _packages(image, known)
        notes += [how] if how else []
        if packages is not None:
            values["packages"] = package_versions(packages, image.architecture)
    if gathered and gathered.verifications:
        values["checks"] = checks(gathered.verifications)
        notes += _strangers(gathered.verifications, {image.digest, found.digest}, found.name)
    return ImageFacts(
        side=ComparedImage(name=found.name, origin=found.origin, digest=image.digest, platform=image.platform),
        values=values,
        unknown={
            "packages": "was not read, as the other one is not built" if known is None else "has no packages of dpkg",
            "checks": "has no results of verify",
        },
        layers=layers(image.config, [(layer.digest, layer.size) for layer in image.layers]),
        compressed=image.compressed,
        notes=tuple(notes),
        results=gathered.results if gathered else Results(),
    )


def _packages(image: PlatformImage, known: dict[str, LayerPart]) -> tuple[tuple[Package, ...] | None, str]:
    """Packages of the distribution, and how they were found out where that is worth saying."""
    for content in image.attached("sbom"):
        try:
            listed = packages_of_sbom(json.loads(content))
        except (ValueError, TypeError, AttributeError):
            continue
        if listed:
            return listed, f"packages of {image.name} are those of its SBOM; no layer was fetched"
    before = set(known)
    status = dpkg_status(image.files(DPKG, known))
    how = ""
    if image.remote:
        size = sum(layer.size for layer in image.layers if layer.digest in known and layer.digest not in before)
        how = f"{image.name} has no SBOM with packages, so {size / 1e6:.1f} MB of its layers were fetched"
    return (None if status is None else installed_packages(status)), how


def _gathered(given: Path | None) -> Gathered | None:
    """Results that the user named. Raises ConfigError if there are none."""
    if given is None:
        return None
    found = gather_files([given])
    if found.nothing_in:
        raise ConfigError(f"--results {given}: has no results; give what verify or report wrote, or a log")
    return found


def _attached(image: PlatformImage) -> Gathered | None:
    """Results that refer to the image in its registry."""
    contents = [(kind, content) for kind in ("verification", "benchmark") for content in image.attached(kind)]
    if not contents:
        return None
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        for i, (kind, content) in enumerate(contents):
            (Path(folder) / f"{kind}-{i}.json").write_bytes(content)
        return gather_files([Path(folder)])


def _strangers(verifications: tuple[VerifyResult, ...], own: set[str | None], name: str) -> Iterator[str]:
    for verification in verifications:
        if verification.digest and verification.digest not in own:
            yield f"results that were given for {name} are of {verification.digest}"


TIMES = ("µs", "us", "ns")
"""Units of which less is better."""
WHERE = {"a": "only A", "b": "only B", "both": "both"}
SHOWN = 100
"""Characters of a value in a table; JSON has all of it."""

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Heading, names of columns, rows."""


def print_comparison(made: Comparison) -> None:
    """Print it."""
    for letter, side in (("A", made.a), ("B", made.b)):
        out.print(f"[bold]{letter}[/] {escape(_side(side))}")
    for heading, columns, rows in tables(made):
        out.print(f"\n[bold]{escape(heading)}[/]")
        console.print_table(columns, [[escape(cell) for cell in row] for row in rows])
    for line in remarks(made):
        out.print(f"[yellow]-[/] {escape(line)}")
    out.print(summary(made), markup=False)


def comparison_markdown(made: Comparison) -> str:
    """For a pull request: a summary, and tables that unfold."""
    lines = [
        f"**{_cell(summary(made))}**",
        "",
        *(f"* {n}: {_cell(_side(s))}" for n, s in (("A", made.a), ("B", made.b))),
    ]
    for heading, columns, rows in tables(made):
        lines += ["", f"<details><summary>{_html(heading)}</summary>", ""]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in (columns, ("---",) * len(columns), *rows)]
        lines += ["", "</details>"]
    if found := list(remarks(made)):
        lines += ["", *(f"* {_cell(line)}" for line in found)]
    return "\n".join(lines) + "\n"


def summary(made: Comparison) -> str:
    """`3 components, 12 packages, 9 layers differ; 409.1 MB becomes 696.2 MB (+70.2%), 29.8 MB shared`."""
    counts = [(len(section.changes), _noun(section)) for section in made.sections if section.changes]
    if layers := sum(layer.where != "both" for layer in made.sizes.layers) if made.sizes else 0:
        counts.append((layers, "layer" if layers == 1 else "layers"))
    parts = [f"{count} {noun}" for count, noun in counts]
    verb = _differ(sum(count for count, _ in counts), bare=True)
    text = f"{', '.join(parts)} {verb}" if parts else "nothing that was compared differs"
    if made.sizes:
        text += f"; {_growth(made.sizes)}"
    # Of small messages it is the latency that is measured, and that is a few percent another in every run.
    if large := [speed for speed in made.speeds if speed.sizes in (EVERY_PAIR, *LARGE)]:
        worst = min(large, key=lambda speed: 1 / speed.ratio if speed.unit in TIMES else speed.ratio)
        text += f"; least bandwidth ratio {_ratio(worst)} ({worst.name}, {worst.sizes})"
    return text


def remarks(made: Comparison) -> Iterator[str]:
    """How things were found out, and what was not compared."""
    yield from made.notes
    if made.sizes and made.sizes.note:
        yield made.sizes.note
    yield from (f"not compared: {text}" for text in made.not_compared)


def tables(made: Comparison) -> Iterator[Table]:
    """Everything that differs."""
    for section in made.sections:
        if section.changes:
            rows = [(c.name, *_values(c.a, c.b)) for c in section.changes]
            yield f"{section.title}: {_differ(len(rows))}, {section.same} the same", ("", "A", "B"), rows
    if made.sizes and any(layer.where != "both" for layer in made.sizes.layers):
        yield _layers(made.sizes)
    if made.speeds:
        rows = [
            (
                s.name,
                s.sizes,
                f"{format_number(s.a)} {s.unit}",
                f"{format_number(s.b)} {s.unit}",
                _ratio(s),
                str(s.points),
            )
            for s in made.speeds
        ]
        yield "bandwidth: median over the sizes that both have", ("", "sizes", "A", "B", "B/A", "points"), rows


def _layers(sizes: Sizes) -> Table:
    both = [layer for layer in sizes.layers if layer.where == "both"]
    rows = [_layer(layer) for layer in sizes.layers if layer.where != "both"]
    heading = f"layers: {_differ(len(rows))}, {len(both)} shared ({console.format_size(sizes.shared)})"
    return heading, ("in", "size", "layer", "made by"), rows


def _layer(layer: LayerChange) -> tuple[str, ...]:
    digest = layer.digest.removeprefix("sha256:")[:12]
    return WHERE[layer.where], console.format_size(layer.size_bytes), digest, _short(layer.made_by)


def _values(a: str | None, b: str | None) -> Sequence[str]:
    """Both values; of long ones, what follows their common beginning."""
    if a and b and max(len(a), len(b)) > SHOWN:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if same > 20:
            a, b = f"…{a[same - 10 :]}", f"…{b[same - 10 :]}"
    return tuple(NONE if value is None else _short(value) for value in (a, b))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _side(side: ComparedImage) -> str:
    origin = f" ({side.origin})" if side.origin != side.name else ""
    return ", ".join(filter(None, (side.name + origin, side.platform, side.digest)))


def _noun(section: Section) -> str:
    name = "variables" if section.title == "environment" else section.title
    return name if len(section.changes) != 1 else name.removesuffix("s")


def _differ(count: int, *, bare: bool = False) -> str:
    verb = "differs" if count == 1 else "differ"
    return verb if bare else f"{count} {verb}"


def _growth(sizes: Sizes) -> str:
    change = f" ({(sizes.b - sizes.a) / sizes.a:+.1%})" if sizes.a and sizes.a != sizes.b else ""
    before, after, shared = map(console.format_size, (sizes.a, sizes.b, sizes.shared))
    return f"{before} becomes {after}{change}, {shared} shared"


def _ratio(speed: Speed) -> str:
    return f"{speed.ratio:.3f}"


def _cell(text: str) -> str:
    return _html(text).replace("|", "\\|").replace("\n", " ")


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
