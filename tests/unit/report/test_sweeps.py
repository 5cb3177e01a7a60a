"""Slow hosts and pairs among runs on many groups of hosts, and how a report shows them."""

from __future__ import annotations

import json
import re
import time
from itertools import combinations
from pathlib import Path

import pytest

from imagebuild.bench import Results, Run
from imagebuild.report import find_sweeps, lay_out, plotly_js, print_report, report_html, report_markdown
from tests.report_samples import GIB, nccl_log, pairs, report, row, run
from tests.unit.conftest import Call


@pytest.mark.parametrize(
    ("slow", "outliers"),
    [
        ({}, []),
        ({("n2",): 13.0}, []),  # 4 % are noise
        ({("n2",): 8.0}, ["n2"]),
        ({("n2",): 8.0, ("n5",): 9.0}, ["n2", "n5"]),
        ({("n1", "n4"): 8.4}, ["n1 ↔ n4"]),
        ({("n2",): 8.0, ("n1", "n4"): 8.4}, ["n2", "n1 ↔ n4"]),
        ({("n1", "n4"): 8.4, ("n1", "n5"): 8.4}, ["n1 ↔ n4", "n1 ↔ n5"]),  # two of five runs are no majority
    ],
)
def test_a_slow_host_is_told_from_a_slow_pair(slow: dict[tuple[str, ...], float], outliers: list[str]) -> None:
    (sweep,) = find_sweeps(pairs(slow))
    assert [outlier.label for outlier in sweep.outliers] == outliers
    assert sweep.is_even is not bool(outliers)
    assert (sweep.scope, sweep.subject) == ("15 runs of 6 hosts", "sendrecv, 2 ranks, 2 nodes")


@pytest.mark.parametrize(
    ("runs", "word", "words"),
    [
        (pairs({}), "even", "no run is below 12.19 GB/s"),
        # A pair that is slow in one of its three runs.
        (
            [*pairs({}) * 2, *pairs({("n1", "n4"): 6.5})],
            "slow",
            "6.5 GB/s in 1 of its 3 runs, 52% below the median of 45",
        ),
        # Of eight hosts, four are slow: their pairs are the most.
        (
            pairs({(f"n{n}",): 8.0 for n in range(1, 5)}, hosts=8),
            "uneven",
            "8 GB/s, 8 to 13.58; no host stands out: many may be slow, or the network between them",
        ),
    ],
)
def test_a_sweep_is_even_only_if_all_runs_are_alike(runs: tuple[Run, ...], word: str, words: str) -> None:
    made = report(runs=runs).model_copy(update={"sweeps": find_sweeps(runs)})
    (found,) = (assertion for assertion in made.assertions if assertion.kind == "sweep")
    assert (found.word, words in found.reason) == (word, True), found.reason
    assert (made.exit_status == 0) == (word == "even")


def test_one_slow_host_of_four_has_half_of_the_runs() -> None:
    (sweep,) = find_sweeps(pairs({("n3",): 6.0}, hosts=4))
    (outlier,) = sweep.outliers
    assert sweep.reason(outlier) == (
        "6 GB/s, 56% below the median of 6 runs of 4 hosts, sendrecv, 2 ranks, 2 nodes; n3 slow in 3 of its 3 runs"
    )


@pytest.mark.parametrize(
    ("slow", "outliers"),
    [
        ({}, []),
        ({("n2",): 13.0}, []),
        ({("n2",): 6.0}, ["n2"]),
        ({("n1", "n3"): 6.0}, ["n1 ↔ n3"]),
        ({("n1", "n2"): 6.0, ("n2", "n3"): 8.0}, ["n2"]),
    ],
)
def test_one_slow_host_of_three_has_two_of_the_runs(slow: dict[tuple[str, ...], float], outliers: list[str]) -> None:
    (sweep,) = find_sweeps(pairs(slow, hosts=3))
    assert [outlier.label for outlier in sweep.outliers] == outliers
    assert all("below the fastest of 3 runs of 3 hosts" in sweep.reason(outlier) for outlier in sweep.outliers)


def test_noise_makes_the_limit_wider() -> None:
    groups = combinations(["n1", "n3", "n4", "n5", "n6"], 2)
    speeds: dict[tuple[str, ...], float] = {pair: 13.0 + 3.0 * (number % 5) for number, pair in enumerate(groups)}
    (sweep,) = find_sweeps(pairs({("n2",): 8.0} | speeds))
    assert (sweep.outliers, sweep.is_even) == ((), False)


@pytest.mark.parametrize("size", [1, 18])
def test_single_hosts_and_racks_are_bars(size: int) -> None:
    def measured(rack: int, speed: float) -> object:
        hosts = tuple(f"r{rack}-{n:02}" for n in range(1, size + 1))
        return run(
            "broadcast", ranks=4 * size, nodes=size, hosts=hosts, rows=(row(8 * GIB, speed),), source=f"{rack}.log"
        )

    made = report(runs=[measured(rack, 700.0 if rack == 3 else 900.0 + rack) for rack in range(1, 9)])
    made = made.model_copy(update={"sweeps": find_sweeps(made.runs)})
    name = "r3-01" if size == 1 else "r3-01 … r3-18 (18 hosts)"
    assert [problem.subject for problem in made.problems] == [name]
    ((_, drawing, members),) = lay_out(made).sweeps
    trace = drawing.figure["data"][0]
    assert (trace["type"], trace["x"][0], len(members)) == ("bar", name, 8)
    assert len(set(trace["marker"]["color"])) == 2


def test_other_runs_are_no_sweep() -> None:
    """Too few groups, the same hosts again, other sizes, unknown hosts, data that are not right."""
    runs = pairs({})
    assert find_sweeps(runs[:3]) == ()
    assert find_sweeps([runs[0]] * 9) == ()
    assert find_sweeps([item.model_copy(update={"ranks": n}) for n, item in enumerate(runs)]) == ()
    assert find_sweeps([item.model_copy(update={"hosts": ()}) for item in runs]) == ()
    assert find_sweeps([item.model_copy(update={"verdict": "wrong-data"}) for item in runs]) == ()
    assert all(item.hosts == () for item in Results(runs=runs).without_hosts().runs)


def test_a_sweep_is_one_picture_and_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    made = report(runs=pairs({("n2",): 8.0}))
    made = made.model_copy(update={"sweeps": find_sweeps(made.runs)})
    page = lay_out(made)
    ((_, drawing, members),) = page.sweeps
    trace = drawing.figure["data"][0]
    assert trace["x"] == trace["y"] == ["n1", "n2", "n3", "n4", "n5", "n6"]
    assert trace["z"][1] == [8.0, None, 8.0, 8.0, 8.0, 8.0]
    assert trace["zmin"] == 8.0
    assert (len(members), page.runs, len(page.charts[0].figure["data"])) == (15, [], 4)
    html = report_html(made)
    assert html.index("n2: slow") < html.index("Sweeps of the cluster")
    assert (
        "| 15 runs of 6 hosts | right | not known | not judged; 1 slow | 13.54 GB/s, 8 to 13.58 |"
        in report_markdown(made)
    )
    print_report(made)
    out = capsys.readouterr().out
    assert re.search("✗ +sendrecv, 2 ranks, 2 nodes: 15 runs of 6 hosts ", out)
    assert "✗ n2: slow: 8 GB/s, 41% below the median of 15 runs of 6 hosts" in out


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
