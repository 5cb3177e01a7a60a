"""A run that was printed as text and as JSON is one run."""

from __future__ import annotations

import json

from imagebuild.results.read import read_text

ROWS = ((1 << 20, 20.31, 51.63, 45.2), (1 << 30, 5012.4, 214.2, 187.4))
START = (
    "# nccl-tests version 2.19.6 nccl-headers=23203 nccl-library=23203\n# Collective test starting: all_reduce_perf\n"
)
HEAD = """\
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1073741824 step: 1024(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid     10 on       node device  0 [0000:01:00] NVIDIA H200
#  Rank  1 Group  0 Pid     10 on       node device  1 [0000:02:00] NVIDIA H200
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
FOOT = (
    "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 116.3\n#\n# Collective test concluded: all_reduce_perf\n"
)


def text() -> str:
    rows = "".join(
        f"{size:>12} {size // 4:>13} {'float':>9} {'sum':>7} {-1:>7} "
        + f"{time:>8} {alg:>7} {bus:>7} {0:>7} " * 2
        + "\n"
        for size, time, alg, bus in ROWS
    )
    return START + HEAD + rows + FOOT


def document(*, faster: float = 1.0) -> str:
    def half(time: float, bus: float) -> dict[str, float]:
        return {"time": time + 0.0012, "alg_bw": bus, "bus_bw": bus * faster + 0.0034, "nwrong": 0.0}

    devices = [{"rank": 0, "group": 0, "pid": 10, "hostname": "node", "device": 0}]
    return json.dumps({
        "version": 3, "args": ["all_reduce_perf", "-g", "2"], "nccl_version": 23203,
        "config": {"nthreads": 1, "ngpus": 2, "minimum_bytes": 1 << 20, "maximum_bytes": 1 << 30, "devices": devices},
        "results": [
            {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": half(time, bus), "in_place": half(time, bus)}
            for size, time, _, bus in ROWS
        ],
        "out_of_bounds": {"count": 0, "okay": "true"}, "average_bus_bandwidth": {"bandwidth": 116.3034, "okay": "unchecked"},
        "errors": [""], "end_time": "2026-11-21 08:10:17",
    })  # fmt: skip


def test_one_run_with_the_numbers_of_the_document_and_the_words_of_the_text() -> None:
    (run,) = read_text("log", text() + document() + "\n").runs
    assert run.tool_version == "2.19.6"
    assert (run.device, run.ranks, run.verdict) == ("NVIDIA H200", 2, "ok")
    assert run.rows[1].out_of_place.busbw_gb_s == 187.4034
    assert run.avg_busbw_gb_s == 116.3034


def test_two_runs_of_which_one_is_faster_stay_two() -> None:
    runs = read_text("log", text() + document(faster=1.2) + "\n").runs
    assert [run.verdict for run in runs] == ["ok", "ok"]


def test_each_text_takes_one_document() -> None:
    assert len(read_text("log", text() + document() + "\n" + text() + document() + "\n").runs) == 2
    assert len(read_text("log", text() + document() + "\n" + document() + "\n").runs) == 2
