"""Output of every tool in tests/data/bench: what is read of it, and what holds however it is changed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.bench import BandwidthTest, PerftestTable, Results, Run, TableRow, read_text
from tests.unit.bench.fuzz import broken
from tests.unit.bench.nccl_tables import Table

DATA = Path(__file__).parents[2] / "data"
TOOLS = ("nvbandwidth", "perftest", "ucx", "dcgm", "tables")
PREFIXES = (
    "[1,0]<stdout>:", "  0: ", "[0] ", "[pod/launcher-x7/mpi] 2026-11-21T07:26:09.12Z ", "Nov 22 10:00:00 node7 bench[8]: ",
    "worker-0  | ", "2026-11-21T07:26:50.1+01:00 stdout F ", "> ",
)  # fmt: skip


def entries() -> list[tuple[str, dict[str, Any]]]:
    files = ((tool, yaml.safe_load((DATA / f"bench/{tool}.yaml").read_text())) for tool in TOOLS)
    return [(tool, entry) for tool, listed in files for entry in listed]


ENTRIES = entries()
FIRST = {tool: entry for tool, entry in reversed(ENTRIES)}
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
    """What an entry names, as YAML has it."""
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
        for item, facts in zip(found, expected.get(kind, ()), strict=True):
            facts = {"verdict": "ok", **facts}
            assert facts.pop("reason", "") in item.reason
            assert {name: fact(item, name) for name in facts} == facts
    assert results.sources[0].unread == expected.get("unread", 0)


def is_part(item: Any, whole: Any) -> bool:
    """Whether a result has only what the other one has: the same matrix, or its first rows."""
    if isinstance(item, BandwidthTest):
        item = item.model_copy(update={"sum": item.sum if item.sum is not None else whole.sum, "name": whole.name})
    if isinstance(item, PerftestTable):
        return bool(item == whole.model_copy(update={"rows": whole.rows[: len(item.rows)], "compared": item.compared}))
    if isinstance(item, Run) and item.tool == "all_reduce_bench":  # which ends its table with nothing
        return bool(item.rows and item.rows == whole.rows[: len(item.rows)])
    return bool(item == whole)


@every_entry
def test_what_is_cut_is_no_pass(entry: dict[str, Any]) -> None:
    """Of the beginning of an output, nothing counts but results that the whole has, too."""
    text = log_of(entry)
    whole = [item.model_copy(update={"verdict": "ok", "reason": ""}) for item in items_of(read(text))]
    for at in sorted({*range(0, len(text), max(1, len(text) // 30)), *range(len(text) - 12, len(text))}):
        for item in items_of(read_text("log", text[: max(0, at)])):
            like = (other for other in whole if type(other) is type(item))
            assert item.verdict != "ok" or any(is_part(item.model_copy(update={"reason": ""}), o) for o in like), text[
                :at
            ]


@every_entry
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_launchers_change_nothing(entry: dict[str, Any], prefix: str) -> None:
    text = log_of(entry)
    prefixed = read_text("log", "".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert items_of(prefixed) == items_of(read(text))
    assert prefixed.sources[0].unread == read(text).sources[0].unread


@every_entry
@pytest.mark.parametrize("other", [*TOOLS, "nccl"])
def test_a_tool_after_another(entry: dict[str, Any], other: str) -> None:
    if other in FIRST and entry in (e for tool, e in ENTRIES if tool == other):
        pytest.skip("the same tool")
    texts = Table().text() if other == "nccl" else log_of(FIRST[other]), log_of(entry)
    both = items_of(read_text("log", "\n\n".join(texts)))
    alone = [item for text in texts for item in items_of(read(text))]
    assert sorted(map(repr, both)) == sorted(map(repr, alone))


@every_entry
def test_spoiled_output_is_no_error(entry: dict[str, Any]) -> None:
    for text in broken(log_of(entry), count=15):
        for item in items_of(read_text("log", text)):
            item.model_dump_json()
    assert items_of(read_text("log", random.Random(1).randbytes(3000).decode("latin-1"))) == []
