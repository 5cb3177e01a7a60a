"""Which judgement is about which result: a judgement names a file and a subject, and of equals their order counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from imagebuild.judgement import Judgement
from imagebuild.results.models import BandwidthTest, Results, Run, Table

Result = Run | BandwidthTest | Table


class _Key(NamedTuple):
    source: str
    what: str
    ranks: str


def by_result(results: Results, judgements: Iterable[Judgement]) -> dict[int, tuple[Judgement, ...]]:
    """The judgements of each result, by the identity (`id`) of the result."""
    items: defaultdict[_Key, list[Result]] = defaultdict(list)
    measured: list[Result] = [*results.runs, *results.tests, *results.tables]
    for item in measured:
        items[_key_of(item)].append(item)
    said: defaultdict[_Key, list[Judgement]] = defaultdict(list)
    for judgement in judgements:
        what, *rest = judgement.subject.split(", ")
        key = _Key(judgement.source, what, next((part for part in rest if "rank" in part), ""))
        # How many ranks there were may have been known to the judge only.
        said[key if key in items else key._replace(ranks="")].append(judgement)
    found: dict[int, tuple[Judgement, ...]] = {}
    for key, equals in items.items():
        found |= {id(item): share for item, share in zip(equals, _shares(said[key], len(equals)), strict=True)}
    return found


def _shares(said: Sequence[Judgement], count: int) -> list[tuple[Judgement, ...]]:
    """Every judge goes through the results in order, so the first, second, … of `count` are about the same result."""
    return [tuple(said[start::count]) for start in range(count)]


def _key_of(item: Result) -> _Key:
    if isinstance(item, Run):
        ranks = "" if not item.ranks else "1 rank" if item.ranks == 1 else f"{item.ranks} ranks"
        return _Key(item.source, item.collective or "unknown collective", ranks)
    if isinstance(item, BandwidthTest):
        return _Key(item.source, item.name or "unnamed test", "")
    return _Key(item.source, item.test or "unknown test", "")
