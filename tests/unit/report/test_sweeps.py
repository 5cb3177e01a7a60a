"""Slow hosts and pairs among runs on many groups of hosts, and how a report shows them."""

from __future__ import annotations

import json
import re
import time
from itertools import combinations
from pathlib import Path

import pytest

from imagebuild.bench.models import Results, Run
from imagebuild.report.page import lay_out, plotly_js, report_html
from imagebuild.report.sweeps import find_sweeps
from tests.conftest import data
from tests.report_samples import GIB, nccl_log, pairs, report, row, run
from tests.unit.conftest import Call

CASES = data("cases/report/sweeps")


@pytest.mark.parametrize(("hosts", "slow", "outliers"), CASES["a-slow-host-is-told-from-a-slow-pair"])
def test_a_slow_host_is_told_from_a_slow_pair(hosts: int, slow: dict[str, float], outliers: list[str]) -> None:
    (sweep,) = find_sweeps(pairs({tuple(names.split()): speed for names, speed in slow.items()}, hosts=hosts))
    assert [outlier.label for outlier in sweep.outliers] == outliers
    assert (sweep.word, sweep.subject) == ("slow" if outliers else "even", "sendrecv, 2 ranks, 2 nodes")
    assert sweep.scope == f"{hosts * (hosts - 1) // 2} runs of {hosts} hosts"


SLOW_ONCE = "6.5 GB/s, 52% below the median of 45 runs of 6 hosts, sendrecv, 2 ranks, 2 nodes; slow in 1 of its 3 runs"


@pytest.mark.parametrize(
    ("runs", "word", "words"),
    [
        (pairs({}), "even", "no run is below 12.22 GB/s"),
        # One of the three runs of a pair is slow.
        ([*pairs({}) * 2, *pairs({("n1", "n4"): 6.5})], "slow", SLOW_ONCE),
        # No run is 10 % below the median, but one is far above it.
        (pairs({("n1", "n2"): 15.5}, speed=12.0), "uneven", "no host stands out: many may be slow, or the network"),
    ],
)
def test_a_sweep_is_even_only_if_all_runs_are_alike(runs: tuple[Run, ...], word: str, words: str) -> None:
    made = report(runs=runs)
    (found,) = (assertion for assertion in made.assertions if assertion.kind == "sweep")
    assert (found.word, words in found.reason) == (word, True), found.reason
    assert (made.exit_status == 0) == (word == "even")


@pytest.mark.parametrize("size", [1, 18])
def test_single_hosts_and_racks_are_bars(size: int) -> None:
    racks = []
    for rack in range(1, 9):
        hosts = tuple(f"r{rack}-{n:02}" for n in range(1, size + 1))
        rows = (row(8 * GIB, 700.0 if rack == 3 else 900.0 + rack),)
        racks.append(run("broadcast", ranks=4 * size, nodes=size, hosts=hosts, rows=rows, source=f"{rack}.log"))
    made = report(runs=racks)
    name = "r3-01" if size == 1 else "r3-01 … r3-18 (18 hosts)"
    assert [problem.subject for problem in made.problems] == [name]
    ((_, drawing, runs),) = lay_out(made).sweeps
    trace = drawing.figure["data"][0]
    assert (trace["type"], trace["x"][0], len(runs.rows)) == ("bar", name, 8)
    assert len(set(trace["marker"]["color"])) == 2


def test_other_runs_are_no_sweep() -> None:
    """Too few groups, the same hosts again, other sizes, unknown hosts, or wrong data."""
    runs = pairs({})
    assert find_sweeps(runs[:3]) == find_sweeps([runs[0]] * 9) == ()
    assert find_sweeps([item.model_copy(update={"ranks": n}) for n, item in enumerate(runs)]) == ()
    for changes in ({"hosts": ()}, {"verdict": "wrong-data"}):
        assert find_sweeps([item.model_copy(update=changes) for item in runs]) == ()
    assert all(item.hosts == () for item in Results(runs=runs).without_hosts().runs)


def test_a_sweep_is_one_picture_and_one_table() -> None:
    made = report(runs=pairs({("n2",): 8.0}))
    page = lay_out(made)
    ((_, drawing, runs),) = page.sweeps
    trace = drawing.figure["data"][0]
    assert trace["x"] == trace["y"] == ["n1", "n2", "n3", "n4", "n5", "n6"]
    assert trace["z"][1] == [8.0, None, 8.0, 8.0, 8.0, 8.0]
    assert trace["zmin"] == 8.0
    assert (len(runs.rows), page.charts) == (15, [])
    html = report_html(made)
    assert html.index("n2: slow") < html.index("Sweeps of the cluster")


def test_three_hundred_pairs(tmp_path: Path, command: Call) -> None:
    hosts = [f"node{number:03}" for number in range(1, 26)]
    for number, pair in enumerate(combinations(hosts, 2)):
        log = nccl_log(8.4 if "node007" in pair else 13.5 + number % 7 / 50, ranks=2, collective="sendrecv")
        log = re.sub("(Rank  1 .*) node1 ", rf"\1 {pair[1]} ", log).replace(" node1 ", f" {pair[0]} ")
        (tmp_path / f"{number}.log").write_text(log)
    begin = time.process_time()
    status, out, _ = command("report", tmp_path, "--json", tmp_path / "o.json", "--html", tmp_path / "o.html")
    assert time.process_time() - begin < 15
    assert (status, len(out.splitlines()) <= 40) == (1, True)
    assert out.splitlines()[-1].startswith("node007: slow (")
    (sweep,) = json.loads((tmp_path / "o.json").read_text())["sweeps"]
    assert (len(sweep["groups"]), sweep["outliers"][0]["hosts"], sweep["outliers"][0]["runs"]) == (300, ["node007"], 24)
    assert len((tmp_path / "o.html").read_bytes()) - len(plotly_js().encode()) <= 3_000_000
