"""Which stages of Dockerfiles are the same: they, and all that they start from, mount or copy. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from imagebuild.instructions import VARIABLE, Stage, parse

MOST = 20_000
"""Stages that are remembered; then all are forgotten."""
_numbers: dict[Hashable, int] = {}
_next = itertools.count()


@lru_cache(maxsize=256)
def numbers(text: str) -> tuple[int, ...]:
    """A number for each stage of a Dockerfile. Stages with equal numbers make the same of equal arguments."""
    parsed = parse(text)
    found: list[int] = []
    if len(_numbers) > MOST:
        _numbers.clear()
    for index, stage in enumerate(parsed.stages):
        near = tuple((name, found[i]) for name, i in _reached(stage, parsed.names, index))
        key = (parsed.arguments, stage, near)
        if key not in _numbers:
            _numbers[key] = next(_next)
        found.append(_numbers[key])
    return tuple(found)


def _reached(stage: Stage, names: Mapping[str, int], index: int) -> Iterator[tuple[str, int]]:
    """Earlier stages that a stage may name, whatever its variables are."""
    for name in {stage.base, *_sources(stage)}:
        pattern = VARIABLE.sub("*", name).lower()
        if pattern == name.lower():
            if names.get(pattern, index) < index:
                yield pattern, names[pattern]
        else:
            yield from ((n, i) for n, i in names.items() if i < index and fnmatchcase(n, pattern))


def _sources(stage: Stage) -> Iterator[str]:
    for instruction in stage.instructions:
        for name, value in instruction.flags:
            if name == "from":
                yield value
            elif name == "mount":
                yield from (o.removeprefix("from=") for o in value.split(",") if o.startswith("from=") or "$" in o)
