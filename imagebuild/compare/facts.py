"""What is known of an image that is compared, and what differs between two. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from imagebuild.compare.models import Change, Comparison, LayerChange, Section, Side, Sizes, Title
from imagebuild.compare.speed import in_one_only, speeds
from imagebuild.records import VerifyResult
from imagebuild.results.models import Results

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
class Facts:
    """One of two images."""

    side: Side
    values: Mapping[Title, Mapping[str, str]]
    """Section → name → value. A section that is absent is not known."""
    unknown: Mapping[Title, str] = field(default_factory=dict)
    """Why sections are not known."""
    layers: tuple[LayerFact, ...] | None = None
    compressed: bool = True
    """Whether layers are as a registry keeps them."""
    results: Results = field(default_factory=Results)
    notes: tuple[str, ...] = ()


def compare(a: Facts, b: Facts) -> Comparison:
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


def _not_compared(a: Facts, b: Facts) -> Iterator[str]:
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
    changes = tuple(Change(name=n, a=a.get(n), b=b.get(n)) for n in names if a.get(n) != b.get(n))
    return Section(title=title, changes=changes, same=len(names) - len(changes))


def _sizes(a: Facts, b: Facts) -> Sizes:
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
