"""nccl-tests: text of every release, JSON, public logs, mixed output, and verdicts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.judge import judge_results
from imagebuild.bench.models import Half, NcclRow, Run
from imagebuild.bench.read import read_files, read_text
from tests.conftest import data
from tests.unit.bench.nccl_tables import RELEASES, Table, broken_lines, interleaved, noise, same
from tests.unit.bench.strict_reader import package_rows, strict_rows

LOGS = Path(__file__).parents[2] / "data" / "nccl-logs"
INDEX = json.loads((LOGS / "index.json").read_text())["logs"]


def read_runs(text: str) -> tuple[Run, ...]:
    return read_text("log", text).runs


def only(text: str) -> Run:
    (run,) = read_runs(text)
    return run


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


FIRST, SECOND = Table(seed=1), Table(seed=2)
OLD = [Table("2.10", name, seed=at) for at, name in enumerate(("all_reduce", "reduce_scatter", "broadcast"))]
REPEATED = Table(sizes=(0, 0, 0, *(8 << i for i in range(0, 31, 3))) * 3)


@pytest.mark.parametrize(("lines", "expected"), [
    ([line for table in OLD for line in table.lines()], [("ok", table.rows()) for table in OLD]),
    # A run that ended early, before another one
    ([*FIRST.head(), *FIRST.body()[:4], *SECOND.lines()], [("truncated", FIRST.rows()[:4]), ("ok", SECOND.rows())]),
    ([*FIRST.head(), *SECOND.lines()], [("no-data", []), ("ok", SECOND.rows())]),
    # Tables without headers
    ([*FIRST.body(), *FIRST.foot(), *SECOND.body(), *SECOND.foot()], [("ok", FIRST.rows()), ("ok", SECOND.rows())]),
    # All rows of repeated sizes are kept.
    (REPEATED.lines(), [("ok", REPEATED.rows())]),
])  # fmt: skip
def test_runs_that_follow_each_other(lines: list[str], expected: list[tuple[str, list[NcclRow]]]) -> None:
    runs = read_runs("\n".join(lines))
    assert [(run.verdict, list(run.rows)) for run in runs] == expected


@pytest.mark.parametrize("spoil", [
    lambda row: row.replace("float", "flo?t"), lambda row: "x" + row.strip(), lambda row: row[40:], lambda row: row.replace("  0.", "  0,"),
    lambda row: row[:50], lambda row: row.replace("512", "5", 1),
])  # fmt: skip
def test_a_row_that_cannot_be_read_is_counted(spoil: Callable[[str], str]) -> None:
    table = Table(sizes=(64, 512, 4096, 32768))
    body = table.body()
    run = only("\n".join([*table.head(), body[0], spoil(body[1]), *body[2:], *table.foot()]))
    assert (len(run.rows), run.partial_rows) == (3, 1)
    assert run.verdict == "ok"
    assert "1 row could not be read" in run.reason


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


TIMEOUT = "node1: Test timeout (60s) common.cu:524\n"
COMMAND = "+ mpirun -np 8 ./build/all_reduce_perf -b 8 -e 128M\n"
NO_ZLIB = (
    COMMAND
    + "PMIx was unable to find a usable compression library\non the system. We will therefore be unable to compress\n"
)
NOT_LAUNCHED = COMMAND + "mpirun was unable to launch the specified application\n"
WRONG = Table(wrong={2: 96, 5: 32})
BOUNDS = "# Out of bounds values : 0 OK\n"
SHORT = Table(sizes=TABLE.sizes[:-2])
SHORT_TEXT = SHORT.text().replace(f"maxBytes {SHORT.sizes[-1]}", f"maxBytes {TABLE.sizes[-1]}")
REDUCED = f"#\n# Reducing maxBytes to {SHORT.sizes[-1] + 5} due to memory limitation\n#   "
AVERAGE = f"# Avg bus bandwidth    : {TABLE.average:g} "
STEPS = Table(sizes=tuple(range(1024, 10241, 1024))).text().replace("step: 8(factor)", "step: 1024(bytes)")
RACK = "\n".join(line for line in Table(ranks=72, hosts=18).lines() if "Rank" not in line or "Rank 71" in line)
RCCL = TABLE.text().replace("# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007\n", "").replace(
    "# Using devices", "rccl-tests: Version develop:2f7c9ab\n# Using devices").replace(" NVIDIA H100 80GB HBM3", "")  # fmt: skip
# A single H100 sends nothing for reduce in place: 1.4e7 GB/s is printed with one digit.
ONE_GPU = (LOGS.parent / "bench/one-gpu.txt").read_text()
WIDE = "  17179869184    4294967296     float     sum      -1  1.6e+07    1.07    2.01  3.55843e+07  123456  139.16  260.9  12"


@pytest.mark.parametrize(("text", "facts"), [
    # Order of verdicts: wrong elements, then the cause of a failure
    (WRONG.text() + "srun: error: node1: task 0: Exited with exit code 7\n",
     {"verdict": "wrong-data"}),
    (Table("2.10", wrong={1: 5}).text(), {"verdict": "wrong-data"}),
    (f"{WIDE}\n# Out of bounds values : 2 FAILED\n",
     {"verdict": "wrong-data", "collective": "all_reduce"}),
    # Without rows.
    ("\n".join([*TABLE.head(), *TABLE.foot()]).replace(f"{TABLE.average:g}", "-nan"),
     {"verdict": "no-data", "avg_busbw_gb_s": None}),
    (NOT_LAUNCHED, {"verdict": "failed", "rows": (), "collective": "all_reduce"}),
    ("node1: Test CUDA failure common.cu:894 'no CUDA-capable device'\n", {"verdict": "cuda-failure", "rows": ()}),
    ("# nccl-tests version 2.19.6 x\nInvalid number of GPUs: 8 requested but only 4 were found.\n", {"verdict": "failed"}),
    ("\n".join([*TABLE.head(), *TABLE.body()])[:-30], {"verdict": "truncated", "partial_rows": 1,
     "reason": "the last row is cut"}),
    (CUT + TABLE.body()[4][:40] + "node1: Test NCCL failure x.cu:9 'unhandled system error / '\n",
     {"verdict": "comm-failure", "partial_rows": 1}),
    ("\n".join([*TABLE.head(), *TABLE.body()[:2], "        ...", TABLE.body()[-1], *TABLE.foot()]),
     {"verdict": "ok", "reason": "complete; the output has dots in place of some lines"}),
    (TABLE.text() + "imagebuild: FAILED\n", {"verdict": "failed"}),
    # Footers.
    (TABLE.text().replace(AVERAGE, f"{AVERAGE}FAILED"), {"verdict": "failed", "avg_busbw_gb_s": TABLE.average}),
    (TABLE.text().replace(AVERAGE, ""), {"verdict": "truncated", "reason": "the footer has no average bus bandwidth"}),
    (TABLE.text().replace(AVERAGE, "# Avg bus bandwidth    : 482.3 "),
     {"verdict": "damaged", "reason": "the average of the rows is not 482.3 GB/s, which the footer prints: a row is missing or wrong"}),
    (ONE_GPU, {"verdict": "ok", "ranks": 1}),
    (ONE_GPU.replace("2.54811e+06", "3.54811e+06"), {"verdict": "damaged"}),
    (TABLE.text().replace(BOUNDS, ""), {"verdict": "truncated", "reason": "the footer has no line `Out of bounds values`"}),
    # Requested sizes
    (SHORT_TEXT, {"verdict": "truncated", "reason": f"no row of {SHORT.sizes[-1] * 8} bytes, although this size was requested"}),
    (SHORT_TEXT.replace("#   ", REDUCED, 1), {"verdict": "ok"}),
    (Table(sizes=tuple(sorted((*TABLE.sizes, TABLE.sizes[4])))).text(),
     {"verdict": "damaged", "reason": f"a row of {TABLE.sizes[4]} bytes, where {TABLE.sizes[5]} were requested"}),
    (Table(sizes=TABLE.sizes * 3).text(), {"verdict": "ok"}),
    (STEPS.replace("maxBytes 10240", "maxBytes 12000"), {"verdict": "truncated"}),
    # Participation
    (RACK, {"ranks": 72, "nodes": None, "verdict": "ok"}),
    (RCCL, {"tool": "rccl-tests", "tool_version": "develop:2f7c9ab", "devices": (), "verdict": "ok"}),
    (TABLE.text().replace("version 2.19.6 ", "version 2.20.0(0a1b2c3) "), {"tool_version": "2.20.0"}),
    (re.sub(r"(Rank +[4-7] +Group +)0", r"\g<1>1", Table(ranks=8, hosts=2).text().replace("1.75", "1.5")), {"groups": 2, "ranks": 4, "nodes": 1, "gpus": 4}),
    (re.sub(r"\[0x1(\d)\]", lambda match: f"[0x{int(match[1]) // 2}0]", Table("2.10").text()), {"gpus": 8}),
    (re.sub(r"\[0x..\]", "[0x01]", Table("2.10").text()), {"gpus": 8}),
    (re.sub(r"device +\d \[0x..\]", "device  0 [0x01]", Table("2.10").text()), {"gpus": None}),
    (re.sub(r"device +\d \[0x..\]", "device  0 [0x10]", Table("2.10").text()), {"gpus": 1}),
    (TABLE.text().replace("NVIDIA H100 80GB HBM3", "AMD Radeon Graphics"), {"devices": ()}),
    (TABLE.text().replace("# nccl-tests version 2.19.6 nccl", "# rccl-tests version 2.17.9-develop:4a65e8d rccl"), {"tool": "rccl-tests", "tool_version": "2.17.9-develop:4a65e8d"}),
    (Table("2.13.10").text().replace("# Using devices", "RCCL version : 2.27.7\n# Using devices"), {"tool": "rccl-tests", "tool_version": None}),
    (Table("2.10", wrong={1: 300}).text().replace(" FAILED", " OK"), {"verdict": "wrong-data", "reason": "the largest error is 1, in the row of 64 bytes"}),
    *((table.replace("#  Rank  0", f"n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/{net}/0\nn1:1:2 [0] NCCL INFO MNNVL 1 cliqueId 7 cliqueSize 16\n#  Rank  0"),
       {"clique": 16}) for net, table in (
        ("Socket", Table(ranks=8, hosts=2).text()), ("Fast Fabric", Table(ranks=8, hosts=2).text()), ("IB", TABLE.text()))),
    # Text before the table names the collective if the program does not.
    ("## sendrecv, 8 GPUs\n" + Table("2.13.10", "alltoall", validate=False).text(), {"collective": None}),
    ("## AllToAll, 8 GPUs\n" + Table("2.13.10", "alltoall", validate=False).text(), {"collective": "alltoall"}),
    ("# /opt/nccl-tests/build/alltoall_perf is running\n" + Table("2.13.10", "alltoall", validate=False).text(), {"collective": "alltoall"}),
    ("please do not gather them all here now\n" + Table("2.13.10", "alltoall", validate=False).text(), {"collective": None}),
    # The command names the collective if nothing else does.
    (Table("2.13.10", "alltoall", validate=False).text(), {"collective": None, "candidates": ("all_gather", "alltoall")}),
    ("+ mpirun -np 8 ./build/alltoall_perf -b 8\n" + Table("2.13.10", "alltoall").text(), {"collective": "alltoall"}),
    ("+ mpirun ./build/all_gather_perf -b 8\n" + Table("2.10", "all_reduce").text(), {"collective": "all_reduce"}),
])  # fmt: skip
def test_facts_of_one_run(text: str, facts: dict[str, object]) -> None:
    run = only(text)
    assert {name: getattr(run, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("path", "collective"), data("bench/cases")["the-name-of-a-file-names-the-collective-that-fits"]
)
def test_the_name_of_a_file_names_the_collective_that_fits(path: str, collective: str | None) -> None:
    (run,) = read_text(path, Table("2.13.10", "alltoall", validate=False).text()).runs
    assert (run.collective, run.candidates) == (collective, () if collective else ("all_gather", "alltoall"))


@pytest.mark.parametrize(("text", "verdicts"), [
    (TABLE.text() + CUT + TIMEOUT, ["ok", "timeout"]),
    (CUT + TIMEOUT + TABLE.text(), ["timeout", "ok"]),
    (TABLE.text() + NOT_LAUNCHED, ["ok", "failed"]),
    (NO_ZLIB + TABLE.text(), ["ok"]),
    (COMMAND, []),
])  # fmt: skip
def test_a_failure_belongs_to_its_run(text: str, verdicts: list[str]) -> None:
    assert [run.verdict for run in read_runs(text)] == verdicts


# JSON together with text; tests/data/bench/nccl.yaml has JSON alone

WRITTEN = Table(sizes=tuple(1 << i for i in range(20, 34, 2)), step=4)


def half(values: Half) -> dict[str, Any]:
    return {
        "time": (values.time_us or 0) + 0.0012,
        "alg_bw": values.algbw_gb_s,
        "bus_bw": values.busbw_gb_s,
        "nwrong": 0,
    }


def written(**changes: Any) -> str:
    """Return the document of the run in `WRITTEN`, with times that are not rounded."""
    rows = [
        {"size": row.size_bytes, "count": row.count, "type": row.dtype, "redop": row.redop, "root": f"{row.root:6d}",
         "out_of_place": half(row.out_of_place), "in_place": half(row.in_place or row.out_of_place)}
        for row in WRITTEN.rows()
    ]  # fmt: skip
    document = {
        "version": 3, "args": ["all_reduce_perf"], "nccl_version": 23007,
        "config": {"nthreads": 1, "ngpus": 8, "minimum_bytes": 1 << 20, "maximum_bytes": 1 << 32, "step_factor": 4,
                   "validation": 1,
                   "devices": [{"rank": 0, "hostname": "node1", "device": 0, "device_info": "NVIDIA H100 80GB HBM3"}]},
        "results": rows, "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": WRITTEN.average, "okay": "unchecked"},
    }  # fmt: skip
    return json.dumps(document | changes, separators=(",", ":")) + "\n"


@pytest.mark.parametrize(("text", "verdicts"), [
    (WRITTEN.text() + written().replace('"bus_bw":', '"bus_bw":0.9', 1), ["ok", "damaged"]),
    (written(), ["ok"]),
    # Checks print a run as text and as JSON, which counts as one run.
    (WRITTEN.text() + written() + WRITTEN.text() + written(), ["ok", "ok"]),
    (WRITTEN.text() + written() + written(), ["ok", "ok"]),
    (written().replace('"time":', '"cpu_time":'), ["ok"]),
    (written(average_bus_bandwidth={"bandwidth": WRITTEN.average, "okay": "false"}), ["failed"]),
    (written(out_of_bounds={"count": 3, "okay": "false"}), ["wrong-data"]),
    (written() + "\nsrun: error: n1: task 0: Exited with exit code 1\n", ["failed"]),
    # The line of a document does not show when its program began.
    ("srun: error: n1: task 0: Exited with exit code 1\n" + written(), ["failed"]),
    (written(results=[]), ["no-data"]),
    (written(results=json.loads(written())["results"][:-1]), ["truncated"]),
    (written().replace('"bus_bw":', '"bus_bw":nan,"x":', 1), ["damaged"]),
    # Output after an incomplete document is read.
    (written()[:900] + "\n" + written() + Table("2.10").text(), ["truncated", "ok", "ok"]),
    (written()[:900] + "node1: Test NCCL failure x.cu:1 'x'\n" + Table("2.10").text(), ["comm-failure", "ok"]),
])  # fmt: skip
def test_documents(text: str, verdicts: list[str]) -> None:
    assert [run.verdict for run in read_runs(text)] == verdicts
