"""nccl-tests: text of every release, JSON, public logs, mixed output, and verdicts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.judge import judge_results
from imagebuild.bench.models import Results, Run
from imagebuild.bench.read import read_files, read_text
from tests.conftest import data
from tests.unit.bench.nccl_tables import RELEASES, Table, broken_lines, interleaved, noise, same, table_of, text_of

LOGS = Path(__file__).parents[2] / "data" / "nccl-logs"
INDEX = json.loads((LOGS / "index.json").read_text())["logs"]


def read_runs(text: str) -> tuple[Run, ...]:
    return read_text("log", text).runs


def only(text: str) -> Run:
    (run,) = read_runs(text)
    return run


# A reader that shares no code with the package: regular expressions for whole lines of tables

Row = tuple[int | str | float | None, ...]
_NUMBER = r"\s+(\d+(?:\.\d+)?(?:e[+-]\d+)?)"
_ROW = re.compile(
    rf"^(?:\s*\d+:)?\s*(\d+)\s+\d+\s+([a-z]\w+)(?:\s+[a-z]+)?(?:\s+-?\d+)??{_NUMBER * 3}\s+(?:\d\S*|N/A){_NUMBER * 3}\s+(?:\d\S*|N/A)\s*$",
    re.MULTILINE,
)


def strict_rows(text: str) -> list[Row]:
    """Return size, type, and time, algbw and busbw of both halves of each row."""
    # Open MPI tags each piece of a row.
    found = [match.groups() for match in _ROW.finditer(re.sub(r"\[1,0\]<stdout>: ?", " ", text))]
    return [(int(size), dtype, *map(float, figures)) for size, dtype, *figures in found]


def package_rows(results: Results) -> list[Row]:
    """Return the same facts as read by the package."""
    return [
        (row.size_bytes, row.dtype,
         *(value for half in row.halves for value in (half.time_us, half.algbw_gb_s, half.busbw_gb_s)))
        for run in results.runs for row in run.rows if row.in_place
    ]  # fmt: skip


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_published_logs(entry: dict[str, object]) -> None:
    """People wrote the facts in the index. An independent reader returns the same rows."""
    text = (LOGS / str(entry["file"])).read_text()
    (run,) = (results := read_files([LOGS / str(entry["file"])])).runs
    last = run.rows[-1]
    assert last.in_place is not None
    found = {
        "collective": run.collective, "rows": len(run.rows), "first_size": run.rows[0].size_bytes, "last_size": last.size_bytes,
        "busbw_out_of_place": last.out_of_place.busbw_gb_s, "busbw_in_place": last.in_place.busbw_gb_s,
        "wrong": sum(half.wrong or 0 for row in run.rows for half in row.halves),
        "average": run.avg_busbw_gb_s, "ranks": run.ranks, "verdict": run.verdict,
    }  # fmt: skip
    assert {name: entry[name] or 0 for name in found} == {name: value or 0 for name, value in found.items()}
    assert (run.partial_rows, results.sources[0].tools, results.sources[0].unread) == (0, ("nccl-tests",), 0)
    if strict := strict_rows(text):
        assert sorted(strict) == sorted(package_rows(results))


LAYOUTS = [
    (release, collective)
    for release in RELEASES
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall", "sendrecv")
]


@pytest.mark.parametrize(("release", "collective"), LAYOUTS)
def test_every_release_prints_what_is_read(release: str, collective: str) -> None:
    table = Table(release, collective, seed=3)
    run = only(table.text())
    same(run, table)
    assert (run.verdict, run.nodes, run.devices) == ("ok", 1, ("NVIDIA H100 80GB HBM3",))
    assert run.collective == collective  # which releases before 2.16.7 do not name
    # Without header and footer, rows are read, but the run does not pass.
    bare = only("\n".join(table.body()))
    assert (bare.verdict, bare.ranks, bare.partial_rows) == ("truncated", None, 0)
    halves = [(row.out_of_place, row.in_place) for row in table.rows()]
    assert [(row.out_of_place, row.in_place) for row in bare.rows] == halves


@pytest.mark.parametrize("options", data("bench/cases")["options-that-change-columns"])
def test_options_that_change_columns(options: dict[str, object]) -> None:
    table = Table(**options)  # type: ignore[arg-type]
    run = only(table.text())
    same(run, table)
    assert run.verdict == "ok"
    assert run.nodes == table.hosts == len(set(run.hosts))


@pytest.mark.parametrize("often", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(len(RELEASES)))
def test_log_lines_between_and_inside_rows(often: float, seed: int) -> None:
    table = Table(RELEASES[seed % len(RELEASES)], "all_reduce" if seed % 2 else "reduce", seed=seed)
    run = only("\n".join(broken_lines(table.lines(), random.Random(seed), often)))
    same(run, table)
    assert run.verdict == "ok"


def test_a_row_that_others_cut_is_counted() -> None:
    """Only debug output shows where a row goes on."""
    first, second = Table(sizes=(1 << 20, 8 << 20)).body()
    for pieces in ([first[:60], "some message", first[60:], second], [first + second, second]):
        table = Table(sizes=(1 << 20, 8 << 20))
        results = read_text("log", "\n".join([*table.head(), *pieces, *table.foot()]))
        assert list(results.runs[0].rows) == table.rows()[1:]
        assert first.split()[0] in results.sources[0].examples[0]


@pytest.mark.parametrize("seed", range(3))
def test_tables_of_several_processes(seed: int) -> None:
    """Lines have names of processes, or none, as programs without MPI under mpirun print them."""
    tables = [Table(ranks=1, seed=rank) for rank in range(4)]
    named = [[f"[1,{rank}]<stdout>:{line}" for line in table.lines()] for rank, table in enumerate(tables)]
    runs = read_runs(interleaved(named, random.Random(seed)))
    assert sorted(map(repr, (run.rows for run in runs))) == sorted(repr(tuple(table.rows())) for table in tables)
    assert {(run.verdict, run.ranks) for run in runs} == {("ok", 1)}
    assert {run.not_joined[:61] for run in runs} == {
        "4 processes of one launch printed tables of 1 rank each: the r"[:61]
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("often", [0.1, 0.4, 0.9])
def test_tables_that_are_mixed(often: float, seed: int) -> None:
    """Nothing shows which process a row belongs to."""
    source, ranks = random.Random(seed), (1, 2, 8)[seed % 3]
    tables = [
        Table(source.choice(RELEASES[:1] if seed % 2 else RELEASES[4:5]), ranks=ranks, seed=seed + n).lines()
        for n in range(2 + seed % 3)
    ]
    # Each process prints the beginning of its table before any of them prints rows.
    mixed = interleaved([table[: len(table) - 15] for table in tables], source, often) + "\n"
    mixed += interleaved([table[len(table) - 15 :] for table in tables], source, often)
    judgements = judge_results(results := read_text("log", mixed))
    assert {run.verdict for run in results.runs} == {"ok"}
    assert sum(len(run.rows) for run in results.runs) == 11 * len(tables)
    assert f"{len(tables)} processes of one launch printed tables" in judgements[0].participation.reason


TWO = [Table(seed=1, release="2.17.3").lines(), Table(seed=2, release="2.17.3").lines()]


@pytest.mark.parametrize(("labels", "is_one_launch"), data("bench/cases")["labels-of-one-launch"])
@pytest.mark.parametrize("in_order", [True, False])
def test_labels_of_one_launch(labels: tuple[str, str], is_one_launch: bool, in_order: bool) -> None:
    """The processes of one launch print one table together. Pods, hosts and jobs are separate launches."""
    labelled = [[f"{label}{line}" for line in table] for label, table in zip(labels, TWO, strict=True)]
    if in_order or labels[0] == labels[1]:
        text = "\n".join(labelled[0] + labelled[1])
    else:
        text = interleaved(labelled, random.Random(1))
    runs = read_runs(text)
    assert [(run.verdict, len(run.rows)) for run in runs] == [("ok", 11)] * 2
    assert {bool(run.not_joined) for run in runs} == {is_one_launch}


@pytest.mark.parametrize("case", data("bench/runs"), ids=lambda case: str(case["text"])[-60:])
def test_facts_of_runs(case: dict[str, Any]) -> None:
    runs, tables = read_runs(text_of(case["text"])), [piece for piece in case["text"] if isinstance(piece, dict)]
    expected = [{"verdict": "ok", **facts} for facts in case["runs"]]
    found = [run.model_dump(mode="json") | {"rows": len(run.rows)} for run in runs]
    assert [{name: run[name] for name in facts} for run, facts in zip(found, expected, strict=True)] == expected
    if tables and not any({"sub", "document", "file"} & piece.keys() for piece in tables):
        printed = [row for piece in tables for row in table_of(piece).rows()[: piece.get("rows")]]
        assert [row for run in runs for row in run.rows] == printed


def damaged(lines: list[str], source: random.Random) -> str:
    """Cut, drop, join, swap or split one to four lines, some by debug output."""
    lines = list(lines)
    for _ in range(source.randint(1, 4)):
        at, other = source.randrange(len(lines)), source.randrange(len(lines))
        line = lines[at]
        cut = source.randint(0, len(line))
        ways: tuple[list[str], ...] = (
            [line[:cut]], [line[cut:]], [], [line + lines[other]], [lines[other]], [line[:cut], line[cut:]],
            [line[:cut] + noise(source), line[cut:]],
        )  # fmt: skip
        lines[at : at + 1] = source.choice(ways)
    return "\n".join(lines)


@pytest.mark.parametrize(("release", "collective"), [("2.10", "broadcast"), ("2.19.6", "all_reduce")])
def test_damage_shows_no_row_that_was_not_printed(release: str, collective: str) -> None:
    table = Table(release, collective)
    for seed in range(40):
        for run in read_runs(damaged(table.lines(), random.Random(seed))):
            assert [row for row in run.rows if row not in table.rows()] == [], seed


TABLE = Table()
CUT = "\n".join([*TABLE.head(), *TABLE.body()[:4]]) + "\n"
"""The output of a run that ended between two rows."""
ENDINGS = data("bench/endings")


@pytest.mark.parametrize(
    ("verdict", "after"), [(verdict, text) for verdict, texts in ENDINGS.items() for text in texts]
)
def test_what_follows_a_table(verdict: str, after: str) -> None:
    if verdict == "ok":
        assert only(f"{TABLE.text()}{after}\n").verdict == only(f"{after}\n{TABLE.text()}").verdict == "ok"
        return
    run = only(f"{CUT}{after}\n")
    assert (run.verdict, list(run.rows)) == (verdict, TABLE.rows()[:4])
    assert "WARN" not in after or "Call to connect failed" in run.reason


@pytest.mark.parametrize(
    ("path", "collective"), data("bench/cases")["the-name-of-a-file-names-the-collective-that-fits"]
)
def test_the_name_of_a_file_names_the_collective_that_fits(path: str, collective: str | None) -> None:
    (run,) = read_text(path, Table("2.13.10", "alltoall", validate=False).text()).runs
    assert (run.collective, run.candidates) == (collective, () if collective else ("all_gather", "alltoall"))
