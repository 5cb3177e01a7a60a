"""A comparison in the terminal and in Markdown. Pure, but for printing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape

from imagebuild import console
from imagebuild.compare.models import Comparison, LayerChange, Section, Side, Sizes, Speed
from imagebuild.console import out
from imagebuild.report.words import NONE, number

TIMES = ("µs", "us", "ns")
"""Units of which less is better."""
WHERE = {"a": "only A", "b": "only B", "both": "both"}
SHOWN = 100
"""Characters of a value in a table; JSON has all of it."""

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Heading, names of columns, rows."""


def show(made: Comparison) -> None:
    """Print it."""
    for letter, side in (("A", made.a), ("B", made.b)):
        out.print(f"[bold]{letter}[/] {escape(_side(side))}")
    for heading, columns, rows in tables(made):
        out.print(f"\n[bold]{escape(heading)}[/]")
        console.table(columns, [[escape(cell) for cell in row] for row in rows])
    for line in remarks(made):
        out.print(f"[yellow]-[/] {escape(line)}")
    out.print(summary(made), markup=False)


def markdown(made: Comparison) -> str:
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
    """`3 components, 12 packages differ; 409.1 MB becomes 696.2 MB (+70.2 %)`."""
    parts = [f"{len(s.changes)} {_noun(s)}" for s in made.sections if s.changes]
    total = sum(len(s.changes) for s in made.sections)
    text = f"{', '.join(parts)} {_differ(total, bare=True)}" if parts else "nothing that was compared differs"
    if made.sizes:
        text += f"; {_growth(made.sizes)}"
    if made.speeds:
        worst = min(made.speeds, key=lambda speed: 1 / speed.ratio if speed.unit in TIMES else speed.ratio)
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
            (s.name, s.sizes, f"{number(s.a)} {s.unit}", f"{number(s.b)} {s.unit}", _ratio(s), str(s.points))
            for s in made.speeds
        ]
        yield "bandwidth: median over the sizes that both have", ("", "sizes", "A", "B", "B/A", "points"), rows


def _layers(sizes: Sizes) -> Table:
    both = [layer for layer in sizes.layers if layer.where == "both"]
    rows = [_layer(layer) for layer in sizes.layers if layer.where != "both"]
    heading = f"layers: {_differ(len(rows))}, {len(both)} shared ({console.size(sizes.shared)})"
    return heading, ("in", "size", "layer", "made by"), rows


def _layer(layer: LayerChange) -> tuple[str, ...]:
    digest = layer.digest.removeprefix("sha256:")[:12]
    return WHERE[layer.where], console.size(layer.size_bytes), digest, _short(layer.made_by)


def _values(a: str | None, b: str | None) -> Sequence[str]:
    """Both values; of long ones, what follows their common beginning."""
    if a and b and max(len(a), len(b)) > SHOWN:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if same > 20:
            a, b = f"…{a[same - 10 :]}", f"…{b[same - 10 :]}"
    return tuple(NONE if value is None else _short(value) for value in (a, b))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _side(side: Side) -> str:
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
    return f"{console.size(sizes.a)} becomes {console.size(sizes.b)}{change}, {console.size(sizes.shared)} shared"


def _ratio(speed: Speed) -> str:
    return f"{speed.ratio:.3f}"


def _cell(text: str) -> str:
    return _html(text).replace("|", "\\|").replace("\n", " ")


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
