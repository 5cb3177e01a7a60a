"""JSON of nccl-tests: as releases write it, cut, several in a file, of forks, and of a run that was printed, too."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest

from imagebuild.bench import Half, Run, read_text
from tests.unit.bench.nccl_tables import Table

TABLE = Table(sizes=tuple(1 << i for i in range(20, 34, 2)), step=4)


def half(values: Half) -> dict[str, Any]:
    return {"time": values.time_us, "alg_bw": values.algbw_gb_s, "bus_bw": values.busbw_gb_s,
            "nwrong": None if values.wrong is None else float(values.wrong)}  # fmt: skip


def document(table: Table = TABLE, *, version: int = 3, **changes: Any) -> dict[str, Any]:
    average, value = ("average_bus_bandwidth", "bandwidth") if version > 1 else ("average_bus_bandwidith", "bandwidith")
    rows = [
        {"size": row.size_bytes, "count": row.count, "type": row.dtype, "redop": row.redop, "root": f"{row.root:6d}",
         "out_of_place": half(row.out_of_place), "in_place": half(row.in_place or row.out_of_place),
         "actual_iterations": 20, "experiment_name": ""}
        for row in table.rows()
    ]  # fmt: skip
    bad = len(table.wrong)
    return {
        "version": version, "start_time": "2026-11-21 07:12:33", "args": [f"./build/{table.collective}_perf", "-J", "o"],
        "env": ['QUOTED=a "b" {[', "NCCL_DEBUG=INFO"], "nccl_version": 23007,
        "config": {
            "nthreads": 1, "ngpus": table.ranks, "minimum_bytes": table.sizes[0], "maximum_bytes": table.sizes[-1], "step_factor": 4,
            "validation": 1, "blocking_collectives": "false",
            "devices": [{"rank": 0, "hostname": "node1", "device": 0, "device_info": "NVIDIA H100 80GB HBM3"}],
        },
        "results": rows,
        "out_of_bounds": {"count": bad, "okay": "false" if bad else "true"}, average: {value: table.average, "okay": "unchecked"},
        "errors": [""], "end_time": "2026-11-21 07:12:44", **changes,
    }  # fmt: skip


def only(text: str) -> Run:
    results = read_text("out.json", text)
    assert len(results.runs) == 1
    assert results.sources[0].tools == ("nccl-tests",)
    return results.runs[0]


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_document(version: int, indent: int | None) -> None:
    run = only(json.dumps(document(version=version), indent=indent))
    assert list(run.rows) == TABLE.rows()
    assert (run.verdict, run.reason, run.partial_rows) == ("ok", "complete", 0)
    assert (run.collective, run.ranks, run.nodes, len(run.hosts), run.device) == (
        "all_reduce",
        8,
        1,
        1,
        "NVIDIA H100 80GB HBM3",
    )
    assert (run.avg_busbw_gb_s, run.out_of_bounds, run.wrong_total) == (TABLE.average, 0, 0)


@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "0: ", "2026-11-21T07:26:50.1Z "])
def test_a_document_between_other_output(prefix: str) -> None:
    text = ["# Writing JSON output to stdout", *json.dumps(document(), indent=1).splitlines(), *Table("2.10").lines()]
    results = read_text("log", "\n".join(prefix + line for line in text))
    assert [len(run.rows) for run in results.runs] == [len(TABLE.sizes), 11]
    assert [run.verdict for run in results.runs] == ["ok", "ok"]


def test_several_documents() -> None:
    first, second = document(), document(Table(sizes=(1024, 2048), collective="all_gather"))
    for between in ("\n", "", " "):
        results = read_text("log", dump(first) + between + dump(second))
        assert [run.collective for run in results.runs] == ["all_reduce", "all_gather"]


def test_wrong_and_failed() -> None:
    run = only(dump(document(Table(sizes=(1024, 4096), wrong={0: 96, 1: 32}))))
    assert (run.verdict, run.wrong_total, run.out_of_bounds) == ("wrong-data", 128, 2)
    below = document(average_bus_bandwidth={"bandwidth": 1.5, "okay": "false"})
    assert only(dump(below)).verdict == "failed"
    short = document()
    short["results"].pop()
    assert only(dump(short)).verdict == "truncated"
    early = {
        key: value
        for key, value in document(errors=["NET/IB : unhandled system error"]).items()
        if "of_bounds" not in key
    }
    early.pop("average_bus_bandwidth")
    assert only(dump(early)).verdict == "comm-failure"
    assert only(dump({**early, "errors": [""]})).verdict == "truncated"
    assert only(dump(document(results=[]))).verdict == "no-data"


def test_numbers_that_are_none() -> None:
    text = dump(document()).replace('"time":', '"cpu_time":')
    run = only(text)
    assert run.verdict == "ok"
    assert [row.out_of_place.time_us for row in run.rows] == [row.out_of_place.time_us for row in TABLE.rows()]
    value = TABLE.rows()[0].out_of_place.busbw_gb_s
    for bare in ("inf", "-inf", "nan", "-nan"):
        run = only(dump(document()).replace(f'"bus_bw":{value}', f'"bus_bw":{bare}', 1))
        assert run.rows[0].out_of_place.busbw_gb_s is None
        assert list(run.rows[1:]) == TABLE.rows()[1:]
        assert run.verdict == "damaged"
    nothing = document()
    nothing["results"][0]["out_of_place"] = None
    nothing["results"][1]["in_place"] = {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": None}
    run = only(dump(nothing))
    assert run.rows[0].out_of_place == Half(time_us=None, algbw_gb_s=None, busbw_gb_s=None, wrong=None)
    assert run.rows[1].in_place == Half(time_us=1.0, algbw_gb_s=1.0, busbw_gb_s=1.0, wrong=None)


def test_cut_anywhere() -> None:
    """Rows before the cut are read; one that is not whole is no row."""
    text = dump(document())
    end = text.index('"okay":"true"')
    expected = TABLE.rows()
    for at in range(text.index('"results":') + 12, end, 7):
        run = only(text[:at])
        assert list(run.rows) == expected[: len(run.rows)]
        assert run.verdict in ("truncated", "no-data")
        whole = text[:at].count('"experiment_name"')
        assert len(run.rows) in (whole, whole + 1)
        assert run.partial_rows <= 1
        assert run.ranks == 8


def test_output_after_a_document_without_end_is_read() -> None:
    text = dump(document())
    cut = text[: text.index('"size":16777216') - 1]
    results = read_text("log", cut + "\n" + text + "\n" + Table("2.10").text())
    assert [len(run.rows) for run in results.runs] == [2, len(TABLE.sizes), 11]
    assert [run.verdict for run in results.runs] == ["truncated", "ok", "ok"]
    cut = text[: text.index('"size":16777216') + 20]
    results = read_text(
        "log", cut + "node1: Test NCCL failure x.cu:1 'unhandled system error'\n" + Table("2.10").text()
    )
    assert [len(run.rows) for run in results.runs] == [2, 11]


def written(*, faster: float = 1.0) -> str:
    """The document of the run that `TABLE` prints, with times that are not rounded."""
    made = document()
    for row in made["results"]:
        for place in ("out_of_place", "in_place"):
            row[place]["time"] += 0.0012
            row[place]["bus_bw"] *= faster
    made["average_bus_bandwidth"]["bandwidth"] = fmean(
        row[place]["bus_bw"] for row in made["results"] for place in ("out_of_place", "in_place")
    )
    return dump(made) + "\n"


def test_one_run_with_the_numbers_of_the_document_and_the_words_of_the_text() -> None:
    (run,) = read_text("log", TABLE.text() + written()).runs
    assert (run.tool_version, run.device, run.ranks, run.verdict) == ("2.19.6", "NVIDIA H100 80GB HBM3", 8, "ok")
    assert run.rows[1].out_of_place.time_us == (TABLE.rows()[1].out_of_place.time_us or 0) + 0.0012
    assert run.avg_busbw_gb_s != TABLE.average
    assert run.avg_busbw_gb_s == pytest.approx(TABLE.average, abs=0.01)


@pytest.mark.parametrize(
    "text",
    [
        TABLE.text() + written(faster=1.2),
        TABLE.text() + written() + TABLE.text() + written(),
        TABLE.text() + written() + written(),
    ],
    ids=["one-is-faster", "two-of-each", "one-is-only-written"],
)
def test_runs_that_stay_two(text: str) -> None:
    assert [run.verdict for run in read_text("log", text).runs] == ["ok", "ok"]
