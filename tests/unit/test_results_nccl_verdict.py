"""What a run amounts to, from what nccl-tests, NCCL and launchers say."""

from __future__ import annotations

import pytest

from imagebuild.results import lines, nccl_text
from imagebuild.results.models import Run
from tests.unit.nccl_tables import Table

TABLE = Table()
CUT = "\n".join([*TABLE.head(), *TABLE.body()[:4]]) + "\n"
"""A run that ended between two rows."""


def runs(text: str) -> tuple[Run, ...]:
    return nccl_text.parse(lines.from_text("log", text)).items


def only(text: str) -> Run:
    found = runs(text)
    assert len(found) == 1
    return found[0]


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


def test_wrong_elements_come_first() -> None:
    table = Table(wrong={2: 96, 5: 32})
    run = only(table.text() + TRACE + "srun: error: node1: task 0: Exited with exit code 7\n")
    assert (run.verdict, run.wrong_total, run.out_of_bounds) == ("wrong-data", 128, 2)
    assert run.reason.startswith("wrong: 128")
    without_footer = only("\n".join([*table.head(), *table.body()]))
    assert (without_footer.verdict, without_footer.wrong_total) == ("wrong-data", 128)


def test_out_of_bounds_of_a_release_that_printed_errors() -> None:
    run = only(Table("2.10", wrong={1: 5}).text())
    assert (run.verdict, run.wrong_total, run.out_of_bounds) == ("wrong-data", None, 1)
    assert only(Table("1.0", wrong={1: 5}).text()).verdict == "wrong-data"


def test_an_average_below_what_was_asked_for() -> None:
    run = only(TABLE.text().replace("123.456 ", "123.456 FAILED"))
    assert (run.verdict, run.avg_busbw_gb_s) == ("failed", 123.456)
    assert only(TABLE.text().replace("123.456 ", "123.456 OK")).verdict == "ok"


def test_no_rows() -> None:
    text = "\n".join([*TABLE.head(), *TABLE.foot()]).replace("123.456", "-nan")
    run = only(text)
    assert (run.verdict, run.avg_busbw_gb_s, run.wrong_total) == ("no-data", None, None)


def test_the_first_release_failed() -> None:
    run = only("\n".join(Table("1.0").head()) + "\nNCCL failure all_reduce.cu:120 'unhandled system error'\n")
    assert run.verdict == "comm-failure"


def test_the_cause_is_not_what_the_others_say() -> None:
    others = "".join(
        f"[1,{rank}]<stdout>:node1: Test NCCL failure common.cu:958 'remote process exited or there was a network error / '\n"
        for rank in range(1, 4)
    )
    head = "".join(f"[1,0]<stdout>:{line}\n" for line in CUT.splitlines())
    run = only(head + others + "[1,7]<stdout>:node2: Test CUDA failure common.cu:894 'unspecified launch failure'\n")
    assert run.verdict == "cuda-failure"
    assert "unspecified launch failure" in run.reason
    assert only(head + others).verdict == "comm-failure"
    late = "slurmstepd: error: *** JOB 1 CANCELLED AT 2026-11-21T07:12:33 DUE TO TIME LIMIT ***\n"
    assert only(head + others + late).verdict == "timeout"
    system = "[1,2]<stdout>:node1: Test NCCL failure common.cu:958 'unhandled system error / '\n"
    assert only(head + system + others + late).verdict == "comm-failure"


def test_a_failure_belongs_to_its_run() -> None:
    found = runs(TABLE.text() + CUT + "node1: Test timeout (60s) common.cu:524\n")
    assert [run.verdict for run in found] == ["ok", "timeout"]
    found = runs(CUT + "node1: Test timeout (60s) common.cu:524\n" + TABLE.text())
    assert [run.verdict for run in found] == ["timeout", "ok"]


def test_a_command_that_could_not_start() -> None:
    text = (
        "+ mpirun -np 8 ./build/all_reduce_perf -b 8 -e 128M\nmpirun was unable to launch the specified application\n"
    )
    run = only(text)
    assert (run.verdict, run.rows, run.collective) == ("failed", (), "all_reduce")
    found = runs(TABLE.text() + text)
    assert [run.verdict for run in found] == ["ok", "failed"]
    assert runs("+ mpirun -np 8 ./build/all_reduce_perf -b 8 -e 128M\n") == ()


def test_only_the_message_of_a_failure() -> None:
    run = only("node1: Test CUDA failure common.cu:894 'no CUDA-capable device is detected'\n")
    assert (run.verdict, run.rows) == ("cuda-failure", ())
    assert (
        only(
            "# nccl-tests version 2.19.6 nccl-headers=1 nccl-library=1\nInvalid number of GPUs: 8 requested but only 4 were found.\n"
        ).verdict
        == "failed"
    )


def test_the_largest_size_was_reduced() -> None:
    sizes = TABLE.sizes[:-2]
    table = Table(sizes=sizes)
    text = table.text().replace(f"maxBytes {sizes[-1]}", f"maxBytes {TABLE.sizes[-1]}")
    short = only(text)
    assert short.verdict == "truncated"
    assert str(sizes[-1] * 8) in short.reason
    reduced = only(text.replace("#   ", f"#\n# Reducing maxBytes to {sizes[-1] + 5} due to memory limitation\n#   ", 1))
    assert reduced.verdict == "ok"
    assert "reduced" in reduced.reason


def test_steps_in_bytes() -> None:
    sizes = tuple(range(1024, 10240 + 1, 1024))
    text = Table(sizes=sizes).text().replace("step: 8(factor)", "step: 1024(bytes)")
    assert only(text).verdict == "ok"
    assert only(text.replace("maxBytes 10240", "maxBytes 12000")).verdict == "truncated"


def test_a_footer_without_bounds() -> None:
    text = TABLE.text().replace("# Out of bounds values : 0 OK\n", "")
    assert only(text).verdict == "ok"
    assert only(Table(validate=False).text().replace("# Out of bounds values : 0 OK\n", "")).verdict == "ok"
    old = only(Table("2.10").text().replace("# Out of bounds values : 0 OK\n", ""))
    assert old.verdict == "truncated"
    assert only(TABLE.text().replace("# Avg bus bandwidth    : 123.456 \n", "")).verdict == "ok"
