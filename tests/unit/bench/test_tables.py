"""OSU micro-benchmarks and all_reduce_bench.py."""

import pytest

from imagebuild.bench import judge_results, read_text
from tests.unit.bench.outputs import facts, read_part
from tests.unit.bench.speed_fakes import shipped

BANDWIDTH = """\
# OSU MPI-CUDA Bandwidth Test v7.4
# Datatype: MPI_CHAR.
# Size      Bandwidth (MB/s)
1                       0.51
4194304             48211.07
"""
ALLREDUCE = """\

# OSU MPI Allreduce Latency Test v7.2
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations        Validation
4                       2.45              2.11              2.80        1000              Pass
1048576               310.20            300.10            330.90         100              Pass
"""
RATE = "# OSU MPI Multiple Bandwidth / Message Rate Test v7.2\n# Size                  MB/s        Messages/s\n1      12.10   12100000.00\n"
BENCH = """\
Environment:
- software: torch=2.8.0, cuda=12.9, nccl=(2, 27, 3)
- hardware: _CudaDeviceProperties(name='NVIDIA H200', major=9, minor=0, total_memory=143156MB)

The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):

| payload |    busbw   |    algbw   |
| ------: | ---------: | ---------: |
|  512MiB | 430.10GBps | 245.77GBps |
|   16GiB | 481.90GBps | 275.37GBps |
"""


def test_osu() -> None:
    tables = read_part("tables", BANDWIDTH + ALLREDUCE + RATE).items
    assert facts(tables, "tool", "test", "unit", "verdict") == [
        ("osu", "OSU MPI-CUDA Bandwidth", "MB/s", "ok"),
        ("osu", "OSU MPI Allreduce Latency", "usec", "ok"),
        ("osu", "OSU MPI Multiple Bandwidth / Message Rate", "MB/s", "ok"),
    ]
    bandwidth, allreduce, rate = tables
    assert facts(bandwidth.rows, "size_bytes", "bw_average") == [(1, 0.51), (4194304, 48211.07)]
    assert allreduce.rows[1].latency_us == {"average": 310.2, "min": 300.1, "max": 330.9}
    assert rate.rows[0].msg_rate == 12.1
    judged = judge_results(read_text("log", BANDWIDTH), shipped("h200"))[0]
    assert judged.speed.measured == pytest.approx(48211.07 * 0.008)
    assert judged.speed.ceiling is None


@pytest.mark.parametrize(
    ("text", "verdict", "unread"),
    [
        (BANDWIDTH.split("1   ", maxsplit=1)[0], "truncated", 0),
        (BANDWIDTH.replace("48211.07", ""), "truncated", 1),
        (BANDWIDTH.replace("48211.07", "nan"), "truncated", 1),
        (BANDWIDTH.splitlines()[0], "no-data", 0),
        (ALLREDUCE.replace("Pass", "Fail", 1), "failed", 0),
    ],
)
def test_osu_that_is_damaged(text: str, verdict: str, unread: int) -> None:
    (table,), examples = read_part("tables", text)
    assert (table.verdict, len(examples)) == (verdict, unread)


def test_all_reduce_bench() -> None:
    (new,) = read_part("runs", BENCH).items
    assert (new.tool, new.ranks, new.device, new.compared) == ("all_reduce_bench", 8, "NVIDIA H200", False)
    assert [(row.size_bytes, row.out_of_place.busbw_gb_s) for row in new.rows] == [(2**29, 430.1), (2**34, 481.9)]


# The second table is of a public log, NVIDIA/nvshmem#76; the first has the layout of the programs' source.
NVSHMEM = """\
Runtime options after parsing command line arguments
#shmem_put_bw_uni
size(B)     scope     BW (GB/sec)
1024        None      0.113400
4194304     None      352.120000
#alltoall_device
size(B)     count     type      scope     latency(us)       algbw(GB/s)   busbw(GB/s)
128         32        32-bit    block     225.921094        0.001         0.001
"""
OURS = "#put_bw_within_node\nsize(B)     scope     BW (GB/sec)\n1048576     block     {}\n# {} words of 4 bytes were wrong\n"


def test_nvshmem() -> None:
    put, alltoall = read_part("tables", NVSHMEM).items
    assert facts((put, alltoall), "tool", "test", "unit", "verdict", "compared") == [
        ("nvshmem", "shmem_put_bw_uni", "GB/s", "ok", False),
        ("nvshmem", "alltoall_device", "usec", "ok", False),
    ]
    assert facts(put.rows, "size_bytes", "bw_average") == [(1024, 0.1134), (4194304, 352.12)]
    assert alltoall.rows[0].latency_us == {"average": 225.921094}


@pytest.mark.parametrize(
    ("text", "verdict", "unread"),
    [
        (OURS.format("350.0", 3), "failed", 0),
        (OURS.format("", 0), "truncated", 1),
        (OURS.format("nan", 0), "truncated", 1),
        ("\n".join(OURS.splitlines()[:2]), "truncated", 0),
    ],
)
def test_nvshmem_that_is_damaged(text: str, verdict: str, unread: int) -> None:
    (table,), examples = read_part("tables", text)
    assert (table.verdict, len(examples)) == (verdict, unread)


@pytest.mark.parametrize(
    ("text", "profile", "state"),
    [
        (OURS.format("500.0", 0), "a100-sxm", "impossible"),
        (OURS.format("100.0", 0), "a100-sxm", "too slow"),
        (OURS.format("200.0", 0), "a100-sxm", "fast enough"),
        (OURS.format("200.0", 0).replace("within_node", "between_nodes"), "a100-sxm", "not judged"),
        (NVSHMEM, "a100-sxm", "impossible"),
        (NVSHMEM, None, "not judged"),
    ],
)
def test_kernels_are_judged_within_a_node(text: str, profile: str | None, state: str) -> None:
    judgement = judge_results(read_text("log", text), shipped(profile) if profile else None)[0]
    assert judgement.speed.state == state
    assert judgement.data.state == ("right" if "words" in text else "not compared")
