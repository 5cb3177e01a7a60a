"""nccl-tests: text of every release, JSON, public logs, what other output does to them, and the verdict."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from imagebuild.bench import Half, NcclRow, Run, read_files, read_text
from tests.unit.bench.fuzz import broken, spoiled
from tests.unit.bench.nccl_tables import RELEASES, Table, broken_lines, noise, same
from tests.unit.bench.strict_reader import package_rows, strict_rows

LOGS = Path(__file__).parents[2] / "data" / "nccl-logs"
INDEX = json.loads((LOGS / "index.json").read_text())["logs"]


def read_runs(text: str) -> tuple[Run, ...]:
    return read_text("log", text).runs


def only(text: str) -> Run:
    (run,) = read_runs(text)
    return run


def wrong(run: Run) -> int:
    return sum(half.wrong or 0 for row in run.rows for half in row.halves)


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_published_logs(entry: dict[str, object]) -> None:
    """The facts of the index are of people; an independent reader reads the same rows."""
    text = (LOGS / str(entry["file"])).read_text()
    (run,) = (results := read_files([LOGS / str(entry["file"])])).runs
    last = run.rows[-1]
    assert last.in_place is not None
    found = {
        "collective": run.collective, "rows": len(run.rows), "first_size": run.rows[0].size_bytes, "last_size": last.size_bytes,
        "busbw_out_of_place": last.out_of_place.busbw_gb_s, "busbw_in_place": last.in_place.busbw_gb_s, "wrong": wrong(run),
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
    assert (run.verdict, run.nodes, run.device) == ("ok", 1, "NVIDIA H100 80GB HBM3")
    named = table.number >= (2, 16, 7)
    certain = collective in ("all_reduce", "reduce_scatter", "broadcast", "reduce")
    old = not table.modern and collective == "alltoall"
    assert run.collective == (collective if named or certain or old else None)


@pytest.mark.parametrize(("release", "collective"), LAYOUTS)
def test_rows_without_header_or_footer_are_read_but_not_trusted(release: str, collective: str) -> None:
    table = Table(release, collective, sizes=tuple(1 << i for i in range(12, 33, 2)))
    run = only("\n".join(table.body()))
    assert (run.verdict, run.ranks, run.partial_rows) == ("truncated", None, 0)
    expected = table.rows()
    assert [row.out_of_place.time_us for row in run.rows] == [row.out_of_place.time_us for row in expected]
    assert [row.in_place for row in run.rows] == [row.in_place for row in expected]


@pytest.mark.parametrize("options", [
    {"timestamps": True}, {"per_iteration": True}, {"per_iteration": True, "timestamps": True}, {"cputime": True},
    {"validate": False}, {"hosts": 4}, {"ranks": 2}, {"ranks": 1}, {"ranks": 1440, "hosts": 20},
])  # fmt: skip
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
    """Only debug output tells where the rest of a row is."""
    first, second = Table(sizes=(1 << 20, 8 << 20)).body()
    for pieces in ([first[:60], "some message", first[60:], second], [first + second, second]):
        table = Table(sizes=(1 << 20, 8 << 20))
        results = read_text("log", "\n".join([*table.head(), *pieces, *table.foot()]))
        assert list(results.runs[0].rows) == table.rows()[1:]
        assert first.split()[0] in results.sources[0].examples[0]


def test_trailing_blanks_colours_and_line_ends() -> None:
    table = Table()
    same(only("".join(f"\x1b[32m{line}\x1b[0m{' ' * 200}\r\n" for line in table.lines())), table)
    same(only("\ufeff" + table.text().replace("\n", "\0\n")), table)


def test_markdown_copies() -> None:
    table = Table()
    text = "\n".join(
        ["```", *(" ".join(line.replace("#wrong", "wrong").lstrip("#").split()) for line in table.lines()), "```"]
    )
    same(only(text), table)


def interleaved(texts: list[list[str]], source: random.Random) -> list[str]:
    queues = [list(text) for text in texts]
    out = []
    while any(queues):
        queue = source.choice([queue for queue in queues if queue])
        out.append(queue.pop(0))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_tables_of_several_processes_by_their_names(seed: int) -> None:
    tables = [Table(ranks=1, seed=rank) for rank in range(4)]
    texts = [[f"[1,{rank}]<stdout>:{line}" for line in table.lines()] for rank, table in enumerate(tables)]
    runs = read_runs("\n".join(interleaved(texts, random.Random(seed))))
    assert sorted(run.rows[0].out_of_place.time_us or 0 for run in runs) == sorted(
        table.rows()[0].out_of_place.time_us or 0 for table in tables
    )
    assert [len(run.rows) for run in runs] == [len(table.sizes) for table in tables]
    assert {(run.verdict, run.ranks, run.avg_busbw_gb_s) for run in runs} == {
        ("ok", 1, table.average) for table in tables
    }


@pytest.mark.parametrize("seed", range(5))
def test_tables_of_several_processes_without_names(seed: int) -> None:
    """A program without MPI under mpirun: each process prints a table of its own, and nothing tells whose a row is."""
    tables = [Table(ranks=1, seed=rank) for rank in range(4)]
    run = only("\n".join(interleaved([table.lines() for table in tables], random.Random(seed))))
    assert (run.verdict, run.ranks, run.rows, run.partial_rows) == ("failed", 1, (), 4 * len(tables[0].sizes))
    assert run.reason.startswith("4 programs printed at the same time")


FIRST, SECOND = Table(seed=1), Table(seed=2)
OLD = [Table("2.10", name, seed=at) for at, name in enumerate(("all_reduce", "reduce_scatter", "broadcast"))]
REPEATED = Table(sizes=(0, 0, 0, *(8 << i for i in range(0, 31, 3))) * 3)


@pytest.mark.parametrize(("lines", "expected"), [
    ([line for table in OLD for line in table.lines()], [("ok", table.rows()) for table in OLD]),
    # A run that died before the next one.
    ([*FIRST.head(), *FIRST.body()[:4], *SECOND.lines()], [("truncated", FIRST.rows()[:4]), ("ok", SECOND.rows())]),
    ([*FIRST.head(), *SECOND.lines()], [("no-data", []), ("ok", SECOND.rows())]),
    # Tables without heads.
    ([*FIRST.body(), *FIRST.foot(), *SECOND.body(), *SECOND.foot()], [("ok", FIRST.rows()), ("ok", SECOND.rows())]),
    # Sizes that repeat are all kept.
    (REPEATED.lines(), [("ok", REPEATED.rows())]),
])  # fmt: skip
def test_runs_that_follow_each_other(lines: list[str], expected: list[tuple[str, list[NcclRow]]]) -> None:
    runs = read_runs("\n".join(lines))
    assert [(run.verdict, list(run.rows)) for run in runs] == expected


@pytest.mark.parametrize("release", ["2.10", "2.19.6"])
def test_truncated_anywhere(release: str) -> None:
    """What was whole before the cut is read, and the run is never `ok` unless its footer is there."""
    table = Table(release)
    text = table.text()
    end = text.index("Out of bounds values : 0 OK") + len("Out of bounds values : 0 OK")
    for at in range(0, end, 37):
        runs = read_runs(text[:at])
        for run in runs:
            assert run.verdict in ("truncated", "no-data")
            count = len(run.rows)
            # The last number may have lost digits, which nobody can see.
            assert list(run.rows[: max(0, count - 1)]) == table.rows()[: max(0, count - 1)]
        whole = text[:at].count("\n") - len(table.head())
        assert sum(len(run.rows) for run in runs) >= min(max(0, whole), len(table.sizes))


def test_the_last_row_is_cut() -> None:
    table = Table()
    text = "\n".join([*table.head(), *table.body()])[:-30]
    run = only(text)
    assert (run.reason, run.partial_rows, len(run.rows)) == ("the last row is cut", 1, len(table.sizes) - 1)


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
    """The lines with one to four cut, lost, glued, swapped or broken in two, some by debug output."""
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


def test_numbers_of_others_are_no_rows() -> None:
    table = Table()
    matrix = "   0   1   2   3   4   5   6   7\n" + "".join(
        f" {at} " + " ".join(f"{at}{gpu}7.21" for gpu in range(8)) + "\n" for at in range(8)
    )
    run = only("\n".join([*table.head(), *table.body()]) + "\n" + matrix)
    assert (list(run.rows), run.partial_rows) == (table.rows(), 0)


def test_elisions() -> None:
    table = Table()
    body = table.body()
    run = only("\n".join([*table.head(), *body[:2], "        ...", body[-1], *table.foot()]))
    assert (run.verdict, len(run.rows)) == ("ok", 3)
    assert "left out" in run.reason


TABLE = Table()
CUT = "\n".join([*TABLE.head(), *TABLE.body()[:4]]) + "\n"
"""A run that ended between two rows."""
TRACE = " .. node1 pid 4711: Test failure common.cu:1103\n .. node1 pid 4711: Test failure all_reduce.cu:99\n"


@pytest.mark.parametrize(("after", "verdict"), [
    ("node1: Test NCCL failure common.cu:958 'unhandled system error (run with NCCL_DEBUG=INFO for details) / '\n" + TRACE, "comm-failure"),
    ("node1: Test NCCL failure common.cu:958 'remote process exited or there was a network error / '\n" + TRACE, "comm-failure"),
    ("node1: Test NCCL failure common.cu:958 'unhandled cuda error / Cuda failure 2 'out of memory''\n", "cuda-failure"),
    ("node1: Test NCCL failure common.cu:958 'invalid usage / Duplicate GPU detected'\n", "comm-failure"),
    ("node1: Test CUDA failure common.cu:894 'system not yet initialized'\n" + TRACE, "cuda-failure"),
    ("node1: Test timeout (600s) common.cu:524\n" + TRACE, "timeout"),
    ("slurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-11-21T07:12:33 DUE TO TIME LIMIT ***\n", "timeout"),
    ("timeout: sending signal TERM to command 'mpirun'\n", "timeout"),
    ("mpirun: The user-provided time limit for job execution has been reached:\n", "timeout"),
    ("srun: error: node1: task 0: Exited with exit code 124\n", "timeout"),
    ("mpirun noticed that process rank 3 with PID 0 on node node1 exited on signal 9 (Killed).\n", "failed"),
    ("Process name: [[4711,1],0]\nExit code:    7\nmpirun detected that one or more processes exited with non-zero status\n", "failed"),
    ("srun: error: node1: task 0: Exited with exit code 7\n", "failed"),
    ("=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n", "failed"),
    ("slurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-11-21T07:12:33 ***\n", "failed"),
    (TRACE, "failed"),
    ("", "truncated"),
    ("0 network timeouts\n", "truncated"),
    ("node1:4711:4711 [0] misc/socket.cc:1 NCCL WARN Call to connect failed\n", "truncated"),
])  # fmt: skip
def test_runs_that_did_not_end_well(after: str, verdict: str) -> None:
    run = only(CUT + after)
    assert run.verdict == verdict
    assert list(run.rows) == TABLE.rows()[:4]
    if "WARN" in after:
        assert "Call to connect failed" in run.reason


def test_a_job_that_found_a_fault_is_no_pass() -> None:
    (run,) = read_runs(TABLE.text() + "imagebuild: node3: did not end in time\nimagebuild: FAILED\n")
    assert (run.verdict, run.reason.partition(": ")[2]) == ("failed", "imagebuild: FAILED")


@pytest.mark.parametrize("after", [
    "0 network timeouts\n", "Rank 0: 0 network timeouts\n", "node1:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 8 - Destroy COMPLETE\n",
    "# error: Call to ibv_create_qp failed with error No space left on device\n", "error obtaining device attributes for mlx5_0\n",
    "WARNING: There was an error initializing an OpenFabrics device.\n", "NCCL version 2.26.6+cuda12.9\n",
    "PMIX ERROR: NOT-FOUND in file gds.c at line 3\n", "exited with code 0\n",
])  # fmt: skip
def test_noise_that_means_nothing(after: str) -> None:
    assert only(TABLE.text() + after).verdict == "ok"
    assert only(after + TABLE.text()).verdict == "ok"


def test_an_error_glued_to_half_a_row() -> None:
    row = TABLE.body()[4]
    run = only(CUT + row[: len(row) // 2] + "node1: Test NCCL failure common.cu:958 'unhandled system error / '\n")
    assert (run.verdict, run.partial_rows, len(run.rows)) == ("comm-failure", 1, 4)


REMOTE = "".join(
    f"[1,{rank}]<stdout>:node1: Test NCCL failure x.cu:9 'remote process exited or there was a network error / '\n"
    for rank in range(1, 4)
)
TAGGED = "".join(f"[1,0]<stdout>:{line}\n" for line in CUT.splitlines()) + REMOTE
LATE = "slurmstepd: error: *** JOB 1 CANCELLED AT 2026-11-21T07:12:33 DUE TO TIME LIMIT ***\n"
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
TWICE = Table(sizes=tuple(sorted((*TABLE.sizes, TABLE.sizes[4]))))
AVERAGE = f"# Avg bus bandwidth    : {TABLE.average:g} "
STEPS = Table(sizes=tuple(range(1024, 10241, 1024))).text().replace("step: 8(factor)", "step: 1024(bytes)")
RACK = "\n".join(line for line in Table(ranks=72, hosts=18).lines() if "Rank" not in line or "Rank 71" in line)
RCCL = TABLE.text().replace("# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007\n", "").replace(
    "# Using devices", "rccl-tests: Version develop:2f7c9ab\n# Using devices").replace(" NVIDIA H100 80GB HBM3", "")  # fmt: skip
WIDE = "  17179869184    4294967296     float     sum      -1  1.6e+07    1.07    2.01  3.55843e+07  123456  139.16  260.9  12"


@pytest.mark.parametrize(("text", "facts"), [
    # What comes first: wrong elements, then the cause of a failure.
    (WRONG.text() + TRACE + "srun: error: node1: task 0: Exited with exit code 7\n",
     {"verdict": "wrong-data"}),
    ("\n".join([*WRONG.head(), *WRONG.body()]), {"verdict": "wrong-data"}),
    (Table("2.10", wrong={1: 5}).text(), {"verdict": "wrong-data"}),
    (f"{WIDE}\n# Out of bounds values : 2 FAILED\n",
     {"verdict": "wrong-data", "collective": "all_reduce"}),
    (TAGGED, {"verdict": "comm-failure"}),
    (TAGGED + "[1,7]<stdout>:node2: Test CUDA failure x.cu:8 'launch failure'\n", {"verdict": "cuda-failure"}),
    (TAGGED + LATE, {"verdict": "timeout"}),
    (TAGGED + "[1,2]<stdout>:node1: Test NCCL failure x.cu:9 'unhandled system error / '\n" + LATE, {"verdict": "comm-failure"}),
    ("\n".join(Table("2.10").head()) + "\nNCCL failure a.cu:120 'unhandled system error'\n", {"verdict": "comm-failure"}),
    # Without rows.
    ("\n".join([*TABLE.head(), *TABLE.foot()]).replace(f"{TABLE.average:g}", "-nan"),
     {"verdict": "no-data", "avg_busbw_gb_s": None}),
    (NOT_LAUNCHED, {"verdict": "failed", "rows": (), "collective": "all_reduce"}),
    ("node1: Test CUDA failure common.cu:894 'no CUDA-capable device'\n", {"verdict": "cuda-failure", "rows": ()}),
    ("# nccl-tests version 2.19.6 x\nInvalid number of GPUs: 8 requested but only 4 were found.\n", {"verdict": "failed"}),
    # Footers.
    (TABLE.text().replace(AVERAGE, f"{AVERAGE}FAILED"), {"verdict": "failed", "avg_busbw_gb_s": TABLE.average}),
    (TABLE.text().replace(AVERAGE, f"{AVERAGE}OK"), {"verdict": "ok"}),
    (TABLE.text().replace(AVERAGE, ""), {"verdict": "truncated", "reason": "its footer has no average bus bandwidth"}),
    (TABLE.text().replace(AVERAGE, "# Avg bus bandwidth    : nan "), {"verdict": "truncated"}),
    (TABLE.text().replace(AVERAGE, "# Avg bus bandwidth    : 482.3 "),
     {"verdict": "damaged", "reason": "the average of its rows is not 482.3 GB/s, as its footer says: a row is missing or wrong"}),
    (TABLE.text().replace(BOUNDS, ""), {"verdict": "truncated", "reason": "its footer has no line `Out of bounds values`"}),
    (Table(validate=False).text().replace(BOUNDS, ""), {"verdict": "truncated"}),
    # Sizes that were asked for.
    (SHORT_TEXT, {"verdict": "truncated", "reason": f"no row of {SHORT.sizes[-1] * 8} bytes, though it was asked for"}),
    (SHORT_TEXT.replace("#   ", REDUCED, 1), {"verdict": "ok"}),
    (TWICE.text(), {"verdict": "damaged", "reason": f"a row of {TABLE.sizes[4]} bytes, where {TABLE.sizes[5]} were asked for"}),
    (Table(sizes=TABLE.sizes * 3).text(), {"verdict": "ok"}),
    (STEPS, {"verdict": "ok"}),
    (STEPS.replace("maxBytes 10240", "maxBytes 12000"), {"verdict": "truncated"}),
    # Who took part.
    (RACK, {"ranks": 72, "nodes": None, "verdict": "ok"}),
    (RCCL, {"tool": "rccl-tests", "tool_version": "develop:2f7c9ab", "device": None, "verdict": "ok"}),
    (TABLE.text().replace("version 2.19.6 ", "version 2.20.0(0a1b2c3) "), {"tool_version": "2.20.0"}),
    # The command names the collective where nothing else does.
    (Table("2.13.10", "alltoall").text(), {"collective": None}),
    ("+ mpirun -np 8 ./build/alltoall_perf -b 8\n" + Table("2.13.10", "alltoall").text(), {"collective": "alltoall"}),
    ("+ mpirun ./build/all_gather_perf -b 8\n" + Table("2.10", "all_reduce").text(), {"collective": "all_reduce"}),
])  # fmt: skip
def test_facts_of_one_run(text: str, facts: dict[str, object]) -> None:
    run = only(text)
    assert {name: getattr(run, name) for name in facts} == facts


@pytest.mark.parametrize(("text", "verdicts"), [
    (TABLE.text() + CUT + TIMEOUT, ["ok", "timeout"]),
    (CUT + TIMEOUT + TABLE.text(), ["timeout", "ok"]),
    (TABLE.text() + NOT_LAUNCHED, ["ok", "failed"]),
    (NO_ZLIB + TABLE.text(), ["ok"]),
    (COMMAND, []),
])  # fmt: skip
def test_a_failure_belongs_to_its_run(text: str, verdicts: list[str]) -> None:
    assert [run.verdict for run in read_runs(text)] == verdicts


# The JSON of `-J`, alone and beside the text

WRITTEN = Table(sizes=tuple(1 << i for i in range(20, 34, 2)), step=4)


def half(values: Half) -> dict[str, Any]:
    return {"time": values.time_us, "alg_bw": values.algbw_gb_s, "bus_bw": values.busbw_gb_s,
            "nwrong": None if values.wrong is None else float(values.wrong)}  # fmt: skip


def document(table: Table = WRITTEN, *, version: int = 3, **changes: Any) -> dict[str, Any]:
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


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_document(version: int, indent: int | None) -> None:
    run = only(json.dumps(document(version=version), indent=indent))
    assert list(run.rows) == WRITTEN.rows()
    assert (run.verdict, run.reason, run.partial_rows) == ("ok", "complete", 0)
    assert (run.collective, run.ranks, run.nodes, len(run.hosts), run.device) == (
        "all_reduce",
        8,
        1,
        1,
        "NVIDIA H100 80GB HBM3",
    )
    assert run.avg_busbw_gb_s == WRITTEN.average


@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "0: ", "2026-11-21T07:26:50.1Z "])
def test_a_document_between_other_output(prefix: str) -> None:
    text = ["# Writing JSON output to stdout", *json.dumps(document(), indent=1).splitlines(), *Table("2.10").lines()]
    results = read_text("log", "\n".join(prefix + line for line in text))
    assert [len(run.rows) for run in results.runs] == [len(WRITTEN.sizes), 11]
    assert [run.verdict for run in results.runs] == ["ok", "ok"]


def test_several_documents() -> None:
    first, second = document(), document(Table(sizes=(1024, 2048), collective="all_gather"))
    for between in ("\n", "", " "):
        results = read_text("log", dump(first) + between + dump(second))
        assert [run.collective for run in results.runs] == ["all_reduce", "all_gather"]


def test_wrong_and_failed() -> None:
    run = only(dump(document(Table(sizes=(1024, 4096), wrong={0: 96, 1: 32}))))
    assert (run.verdict, wrong(run)) == ("wrong-data", 128)
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
    assert [row.out_of_place.time_us for row in run.rows] == [row.out_of_place.time_us for row in WRITTEN.rows()]
    value = WRITTEN.rows()[0].out_of_place.busbw_gb_s
    for bare in ("inf", "-inf", "nan", "-nan"):
        run = only(dump(document()).replace(f'"bus_bw":{value}', f'"bus_bw":{bare}', 1))
        assert run.rows[0].out_of_place.busbw_gb_s is None
        assert list(run.rows[1:]) == WRITTEN.rows()[1:]
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
    expected = WRITTEN.rows()
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
    assert [len(run.rows) for run in results.runs] == [2, len(WRITTEN.sizes), 11]
    assert [run.verdict for run in results.runs] == ["truncated", "ok", "ok"]
    cut = text[: text.index('"size":16777216') + 20]
    results = read_text(
        "log", cut + "node1: Test NCCL failure x.cu:1 'unhandled system error'\n" + Table("2.10").text()
    )
    assert [len(run.rows) for run in results.runs] == [2, 11]


def written(*, faster: float = 1.0) -> str:
    """The document of the run that `WRITTEN` prints, with times that are not rounded."""
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
    (run,) = read_text("log", WRITTEN.text() + written()).runs
    assert (run.tool_version, run.device, run.ranks, run.verdict) == ("2.19.6", "NVIDIA H100 80GB HBM3", 8, "ok")
    assert run.rows[1].out_of_place.time_us == (WRITTEN.rows()[1].out_of_place.time_us or 0) + 0.0012
    assert run.avg_busbw_gb_s != WRITTEN.average
    assert run.avg_busbw_gb_s == pytest.approx(WRITTEN.average, abs=0.01)


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN.text() + written(faster=1.2),
        WRITTEN.text() + written() + WRITTEN.text() + written(),
        WRITTEN.text() + written() + written(),
    ],
    ids=["one-is-faster", "two-of-each", "one-is-only-written"],
)
def test_runs_that_stay_two(text: str) -> None:
    assert [run.verdict for run in read_text("log", text).runs] == ["ok", "ok"]


TEXTS = [
    Table().text(), Table("2.10", "broadcast").text(),
    "\n".join(broken_lines(Table(per_iteration=True).lines(), random.Random(1), 0.5)),
    *(path.read_text() for path in sorted(LOGS.glob("*.txt"))[:4]),
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_broken_text_is_no_error(text: str) -> None:
    for changed in broken(text, count=20):
        for run in read_runs(changed):
            run.model_dump_json()
            assert run.reason


def test_spoiled_documents_are_no_error() -> None:
    for changed in spoiled(document()):
        for run in read_runs(json.dumps(changed)):
            run.model_dump_json()
