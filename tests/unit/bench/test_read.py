"""Output of all tools in tests/data/bench: its results, and properties that hold after any change."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.models import BandwidthTest, PerftestTable, Results, Run, TableRow
from imagebuild.bench.read import read_text
from tests.conftest import data
from tests.unit.bench.nccl_tables import Table

DATA = Path(__file__).parents[2] / "data"
ENTRIES: list[tuple[str, dict[str, Any]]] = [
    *(
        (tool, entry)
        for tool in ("nccl", "nvbandwidth", "perftest", "ucx", "dcgm", "tables")
        for entry in data(f"bench/{tool}")
    ),
    *(
        ("text", {"name": table.release, "log": table.text(), "expect": {"runs": [{"rows": 11}]}})
        for table in (Table(), Table("2.10", "broadcast"), Table(per_iteration=True, timestamps=True))
    ),
]
FIRST = dict(reversed(ENTRIES))
every_entry = pytest.mark.parametrize("entry", [e for _, e in ENTRIES], ids=[f"{t}: {e['name']}" for t, e in ENTRIES])


def log_of(entry: dict[str, Any]) -> str:
    return str(entry["log"]) if "log" in entry else (DATA / entry["file"]).read_text()


@cache
def read(text: str) -> Results:
    return read_text("log", text)


def items_of(results: Results) -> list[Any]:
    return [*results.measured, *results.diagnostics]


def main_figure(row: TableRow) -> float | None:
    times = row.latency_us or {}
    return row.bw_average if not times else times.get("typical", times.get("average"))


def fact(item: Any, name: str) -> object:
    """Return the facts that an entry names, in the form of the YAML."""
    value = getattr(item, name, None)
    if isinstance(item, PerftestTable) and name == "rows":
        return [[row.size_bytes, main_figure(row)] for row in item.rows]
    if isinstance(item, Run) and name in ("rows", "busbw"):
        return len(item.rows) if name == "rows" else max(row.busbw_gb_s or 0 for row in item.rows)
    if isinstance(value, tuple):
        return [list(part) if isinstance(part, tuple) else part for part in value]
    return value


@every_entry
def test_what_is_read(entry: dict[str, Any]) -> None:
    results, expected = read(log_of(entry)), entry["expect"]
    for kind in ("runs", "tests", "tables", "diagnostics"):
        found = getattr(results, kind)
        assert len(found) == len(expected.get(kind, ())), found
        for item, named in zip(found, expected.get(kind, ()), strict=True):
            facts = {"verdict": "ok", **named}
            assert facts.pop("reason", "") in item.reason
            assert {name: fact(item, name) for name in facts} == facts
    assert results.sources[0].unread == expected.get("unread", 0)


def is_part(item: Any, whole: Any) -> bool:
    """Return whether a result is a part of the other one: the same matrix, or its first rows."""
    if isinstance(item, BandwidthTest):
        item = item.model_copy(update={"sum": item.sum if item.sum is not None else whole.sum, "name": whole.name})
    if isinstance(item, PerftestTable):
        return bool(item == whole.model_copy(update={"rows": whole.rows[: len(item.rows)], "compared": item.compared}))
    if isinstance(item, Run) and item.tool == "all_reduce_bench":  # which has no end mark
        return bool(item.rows and item.rows == whole.rows[: len(item.rows)])
    if isinstance(item, Run):  # the last digit of the average may be cut
        item = item.model_copy(update={"avg_busbw_gb_s": whole.avg_busbw_gb_s})
    return bool(item == whole)


@every_entry
def test_what_is_cut_is_no_pass(entry: dict[str, Any]) -> None:
    """The beginning of an output has only results that the whole output has, too."""
    text = log_of(entry)
    whole = [item.model_copy(update={"verdict": "ok", "reason": ""}) for item in items_of(read(text))]
    for at in sorted({*range(0, len(text), max(1, len(text) // 30)), *range(len(text) - 12, len(text))}):
        beginning = text[: max(0, at)]
        for item in items_of(read_text("log", beginning)):
            like = (other for other in whole if type(other) is type(item))
            bare = item.model_copy(update={"reason": ""})
            assert item.verdict != "ok" or any(is_part(bare, other) for other in like), beginning


@every_entry
@pytest.mark.parametrize("prefix", data("bench/cases")["prefixes-of-launchers-change-nothing"])
def test_prefixes_of_launchers_change_nothing(entry: dict[str, Any], prefix: str) -> None:
    text = log_of(entry)
    prefixed = read_text("log", "".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert items_of(prefixed) == items_of(read(text))
    assert prefixed.sources[0].unread == read(text).sources[0].unread


@pytest.mark.parametrize(
    ("other", "entry"), [(other, entry) for tool, entry in ENTRIES for other in FIRST if other != tool]
)
def test_a_tool_after_another(entry: dict[str, Any], other: str) -> None:
    texts = log_of(FIRST[other]), log_of(entry)
    both = items_of(read_text("log", "\n\n".join(texts)))
    alone = [item for text in texts for item in items_of(read(text))]
    found, expected = (sorted(re.sub(r"line \d+: ", "", repr(item)) for item in items) for items in (both, alone))
    assert found == expected


ODD = (
    "", "-", "|", "0", "99999999999999999999999999", "-1", "1e999", "nan", "N/A",
    "\N{ARABIC-INDIC DIGIT THREE}", "\x00",
    "x" * 5000, "9" * 5000, "Waived:", "Running a_b.", "Final:", "#bytes #iterations", "-" * 27, "0 1 2", "Error: no",
    "{", "}", "\n\n",
)  # fmt: skip


def broken(text: str) -> Iterator[str]:
    """Cut the text, and drop, double, swap or replace words and lines."""
    chance = random.Random(0)
    for at in range(0, len(text), max(1, len(text) // 20)):
        yield text[at:]
    for _ in range(15):
        rows = text.split("\n")
        for _ in range(chance.randint(1, 8)):
            at, other = chance.randrange(len(rows)), chance.randrange(len(rows))
            words = rows[at].split(" ")
            words[chance.randrange(len(words))] = chance.choice(ODD)
            ways = (
                rows[at][: chance.randint(0, len(rows[at]))],
                rows[at] + rows[other],
                rows[other],
                " ".join(words),
                chance.choice(ODD),
            )
            rows[at] = chance.choice(ways)
        yield "\n".join(rows)


def spoiled(node: Any, chance: random.Random) -> Any:
    """Replace parts of a document by values of other types, or remove them."""
    if chance.random() < 0.08:
        values: tuple[Any, ...] = (None, True, 0, -1, 10**30, float("nan"), "", "x", [], {}, [[]], [None], {"name": 1})
        return chance.choice(values)
    if isinstance(node, dict):
        return {key: spoiled(value, chance) for key, value in node.items() if chance.random() > 0.03}
    return [spoiled(value, chance) for value in node] if isinstance(node, list) else node


@every_entry
def test_spoiled_output_is_no_error(entry: dict[str, Any]) -> None:
    texts, chance = list(broken(log_of(entry))), random.Random(1)
    with suppress(ValueError):
        texts += [json.dumps(spoiled(json.loads(log_of(entry)), chance)) for _ in range(60)]
    for text in texts:
        for item in items_of(read_text("log", text)):
            item.model_dump_json()


@pytest.mark.parametrize(
    "text", [*data("bench/cases")["what-others-print"], "\udc80\ud800 x", "{" * 5000, '{"results":[' * 5000]
)
def test_what_others_print_is_nothing(text: str) -> None:
    results = read_text("log", text)
    assert (items_of(results), results.sources[0].unread, results.sources[0].tools) == ([], 0, ())


@pytest.mark.parametrize("piece", data("bench/cases")["time-grows-with-size-only"])
def test_time_grows_with_size_only(piece: str) -> None:
    """Eight times the input may take about eight times as long, not 64 times. The limit allows for a busy machine."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        begin = time.process_time()
        read_text("log", text)
        return time.process_time() - begin

    seconds(2_000)
    small, large = min(seconds(20_000) for _ in range(2)), seconds(160_000)
    assert large < 24 * small + 0.25
