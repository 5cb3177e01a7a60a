"""Who hangs: answers of NCCL's RAS socket, alone and in logs."""

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen, check_output
from typing import Any

import pytest

from imagebuild.bench.hang import PREFIX, answers, hung, hung_in_log, read_answer
from imagebuild.bench.read import read_text
from imagebuild.core.scripts import shared_script
from tests.conftest import data

CASES: list[dict[str, Any]] = data("ras")


def answer(counts: list[dict[str, int]], missing: list[int]) -> str:
    """Return an answer in JSON, as NCCL 2.30 writes it."""

    def rank(number: int) -> dict[str, Any]:
        return {
            "rank": number,
            "host": f"host-{number // 2}",
            "pid": 100 + number,
            "cuda_dev": 0,
            "nvml_dev": number % 2,
        }

    present = [{**rank(n), "collective_counts": row} for n, row in enumerate(counts) if n not in missing]
    comm = {
        "hash": "0xabc", "size": len(counts), "ranks_count": len(present), "ranks": present,
        "missing_ranks": [rank(n) for n in missing],
    }  # fmt: skip
    return "SERVER PROTOCOL 2\nOK\nOK\n" + json.dumps({"nccl_version": "2.30.7", "communicators": [comm]}, indent=2)


def text_of(case: dict[str, Any]) -> str:
    if "text" in case:
        return str(case["text"])
    counts = [dict(zip(("AllReduce", "Broadcast"), row, strict=True)) for row in case["counts"]]
    return answer(counts, case.get("missing", []))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_hanging_rank_is_named_and_no_other(case: dict[str, Any]) -> None:
    now = read_answer(text_of(case))
    before = read_answer(text_of({**case, "counts": case["before"]})) if "before" in case else now
    assert now is not None
    assert list(hung(now, before or ())) == case["hung"]


@pytest.mark.parametrize("key", ["async_error", "init_state"])
@pytest.mark.parametrize(
    ("code", "says"), [(0, ""), (2, "an error of the system"), (7, ""), (8, "exceeded a time limit"), (99, "error 99")]
)
def test_an_error_on_a_rank_is_named_though_no_rank_is_behind(code: int, says: str, key: str) -> None:
    text = answer([{"AllReduce": 5}] * 4, []).replace('"rank": 2,', f'"rank": 2, "status": {{"{key}": {code}}},')
    found = list(hung(read_answer(text) or ()))
    line = f"hung: rank 2 on host host-1, GPU 0, process 102 of communicator 0xabc of 4 ranks: NCCL has {says}"
    assert found == ([f"{line}; NCCL's messages say more"] if says else [])


@pytest.mark.parametrize("case", [case for case in CASES if "before" not in case], ids=lambda case: case["name"])
def test_a_report_reads_the_answer_in_a_log(case: dict[str, Any]) -> None:
    lines = [PREFIX + line for line in text_of(case).splitlines()]
    log = "\n".join(["# nThread 1 nGpus 1", *lines, *lines, "timeout: sending signal TERM to command"])
    assert len(answers(log.splitlines())) == 2
    note = read_text("log", log).sources[0].note
    assert not case["hung"] or case["hung"][0][:60] in note


@pytest.mark.parametrize(
    "text",
    [
        answer([{"AllReduce": 1}] * 2, [1])[:-30],
        answer([{"AllReduce": [1]}] * 2, []),  # type: ignore[dict-item]
        'SERVER PROTOCOL 2\n{"communicators": []}',
        '{"communicators": ' + "[" * 100_000,
        "SERVER PROTOCOL 2\n\nJob summary",
        "    0         1         4         8        32        32   RUNNING  INCOMPLETE",
        "  0  1  4  8  32  32  RUNNING  OK\n  1  1  4  8  32  32  RUNNING  INCOMPLETE\nWarnings",
        "  0  1  4  8  32  32  RUNNING  OK\n  1  1  2  4-8  12  11  RUNNING  INCOMPLETE,MISMATCH\nWarnings",
        "  0  1  4  8  32  32  RUNNING  OK\n  1  1  4  8  32  32  RUNN",
        "  0  1  4  8  32  32  RUNNING  OK\n  1  1  4  8  32  32  NOCOMM  ERROR",
        answer([{"AllReduce": 1}] * 2, []).replace('"size": 2', '"size": 0'),
        "SERVER PROTOCOL 2\nRank 1 -- GPU " + "1," * 200_000,
        "SERVER PROTOCOL 2\nRank " + "1" * 400_000,
        'SERVER PROTOCOL 2\n{"communicators": [{"a' + "\n" * 100_000,
        "no answer at localhost:28028",
    ],
)
def test_an_answer_that_cannot_be_read_is_not_a_healthy_job(text: str) -> None:
    assert read_answer(text) is None
    assert answers(PREFIX + line for line in text.splitlines()) == []


def test_ranks_that_are_not_stated_are_counted() -> None:
    found = read_answer(answer([{"AllReduce": 1}] * 3, [1]).replace('"size": 3', '"size": 5'))
    assert [each.silent for each in found or ()] == [2]
    found = read_answer(answer([{"AllReduce": 1}] * 3, []).replace('"rank": 2', '"rank": 1'))
    assert [each.silent for each in found or ()] == [1]  # a rank that is stated twice is one rank


def test_one_answer_accuses_no_rank_that_may_only_be_asked_later() -> None:
    [now] = answers(PREFIX + line for line in answer([{"AllReduce": n} for n in (7, 8, 8, 8)], []).splitlines())
    assert list(hung(now)) == []
    assert list(hung(now, now)) != []


@pytest.mark.programs
def test_stopped_processes_are_named_if_the_socket_does_not_answer(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(bytes(4096))
    code = f"import mmap, os, signal; m = mmap.mmap(os.open({str(library)!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ)\n"
    code += "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    script = shared_script("ras") + "ask_ras"
    port = {**os.environ, "NCCL_RAS_ADDR": "localhost:1"}
    with Popen([sys.executable, "-c", code], env={**port, "RANK": "5"}, stdout=PIPE, text=True) as stopped:
        try:
            assert stopped.stdout
            pid = int(stopped.stdout.readline())
            os.waitid(os.P_PID, pid, os.WSTOPPED)
            said = check_output(["bash", "-c", script], env=port, text=True)
        finally:
            stopped.kill()
    [[job]] = answers(said.splitlines())
    assert [(rank.rank, rank.pid) for rank in job.missing] == [("5", str(pid))]


def test_a_report_names_the_first_rank_that_is_lost_and_no_hang_that_is_over() -> None:
    sound, lost, ended = (read_answer(answer([{"AllReduce": 7}] * 4, missing)) for missing in ([], [2], [0, 2]))
    assert sound
    assert lost
    assert ended
    still = "; no collective started between two answers"
    assert hung_in_log([sound, sound, lost, lost, ended]) == [f"{text}{still}" for text in hung(lost)]
    assert hung_in_log([lost, sound]) == []


def test_a_report_tells_the_last_sign_of_life() -> None:
    """The watcher of a job says when it asked, and for how long nothing was printed."""
    log = []
    for time, quiet, missing in ((1000, 120, []), (1400, 480, [2]), (1403, 483, [2])):
        log.append(f"asked at 2026-11-28 09:00:00 UTC ({time}), {quiet} s after the last line")
        log += answer([{"AllReduce": 7 if time > 1000 else 5}] * 4, missing).splitlines()
    [found] = hung_in_log(answers(PREFIX + line for line in log))
    life = "rank 2 answered 400 s earlier, after 5 collectives; no collective started for at least 3 s; no output for 483 s"
    assert found.endswith(f"the process has ended, is stopped or hangs; {life}")
