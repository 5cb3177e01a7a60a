"""The types of what benchmarks printed. Bandwidths are GB/s of 10^9 bytes, times µs, sizes bytes; `None` is unknown."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from imagebuild.fields import Model

Verdict = Literal["ok", "wrong-data", "comm-failure", "cuda-failure", "timeout", "truncated", "no-data", "failed"]


class Half(Model):
    """One placement of an nccl-tests row: out of place or in place."""

    time_us: float | None
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    wrong: int | None
    """Elements that are not what they should be; `None` where validation was off or the column meant something else."""


class Row(Model):
    """One size of an nccl-tests run."""

    size_bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    out_of_place: Half
    in_place: Half | None


class Run(Model):
    """One table that a program of nccl-tests (or rccl-tests) printed."""

    source: str
    """The file it was read from."""
    tool: str = "nccl-tests"
    tool_version: str | None = None
    collective: str | None = None
    """`all_reduce`, `all_gather`, `reduce_scatter`, `alltoall`, `broadcast`, `sendrecv`, …"""
    ranks: int | None = None
    nodes: int | None = None
    """Hosts of the ranks, where the device list was printed."""
    device: str | None = None
    """Name of the GPUs, where all are the same and it was printed."""
    rows: tuple[Row, ...] = ()
    partial_rows: int = 0
    """Rows that were cut, or broken by other output beyond repair."""
    avg_busbw_gb_s: float | None = None
    """As printed: the mean over all rows and both placements. It depends on the sizes, so nothing is judged by it."""
    out_of_bounds: int | None = None
    wrong_total: int | None = None
    verdict: Verdict
    reason: str
    """Why, in one line."""


class BandwidthTest(Model):
    """One matrix of nvbandwidth or p2pBandwidthLatencyTest."""

    source: str
    tool: Literal["nvbandwidth", "p2pBandwidthLatencyTest"] = "nvbandwidth"
    tool_version: str | None = None
    name: str | None
    """`None` where the output does not say it: text names no test that was waived."""
    unit: str | None
    """`GB/s`, `ns` or `us`, as the output says."""
    status: str
    """`passed`, `waived`, `error`, `not-found` or `truncated`."""
    matrix: tuple[tuple[float | None, ...], ...] | None
    """`None` in a cell is N/A: the diagonal, or a pair without access. In nvbandwidth's JSON, a bidirectional test
    between devices has the matrices of both directions and of their total below each other."""
    sum: float | None
    """As printed; of three matrices, that of the last."""
    reason: str = ""
    """Why the test did not pass, where the output says it."""


class TableRow(Model):
    """One size of a perftest table. `bw_*` in the table's unit, `msg_rate` in millions of messages a second."""

    size_bytes: int
    bw_peak: float | None = None
    bw_average: float | None = None
    msg_rate: float | None = None
    latency_us: dict[str, float] | None = None
    """Of a latency test: `min`, `max`, `typical`, `average`, `stdev`, `p99`, `p99.9`."""


class Table(Model):
    """One table that a program of perftest printed."""

    source: str
    test: str | None
    """As printed, for example `RDMA_Write BW`."""
    unit: str | None
    """`MB/sec` (older, 2^20 bytes), `MiB/sec` or `Gb/sec` (10^9 bits); `None` where it was not printed, as in JSON."""
    rows: tuple[TableRow, ...] = ()
    verdict: Literal["ok", "failed", "truncated", "no-data"] = "ok"
    reason: str = ""


class UcxResult(Model):
    """One result line of ucx_perftest."""

    source: str
    title: str | None
    """What was measured, for example `tag match bandwidth`."""
    size_bytes: int | None = None
    """Of a message, where it was printed."""
    thread: int | None = None
    iterations: int | None = None
    latency_us: dict[str, float | None] = Field(default_factory=dict)
    """`typical` (or the percentile printed), `average`, `overall`."""
    bandwidth_mib_s: dict[str, float | None] = Field(default_factory=dict)
    """`average` and `overall`, in MiB/s, which the program prints as MB/s."""
    rate_msg_s: dict[str, float | None] = Field(default_factory=dict)
    final: bool = True
    """False where only progress lines were printed, or none."""
    reason: str = ""
    """Why there is no result, where the program said it."""


class Diagnostic(Model):
    """One result of `dcgmi diag`."""

    source: str
    category: str | None
    test: str
    entity: str | None = None
    """`GPU 0`, or `None` for the whole test."""
    status: Literal["pass", "fail", "warn", "skip", "not-run", "unknown"]
    messages: tuple[str, ...] = ()


class Source(Model):
    """What became of a file."""

    path: str
    tools: tuple[str, ...]
    """Whose output was found in it."""
    lines: int
    unread: int
    """Lines that look like a result and could not be read."""
    examples: tuple[str, ...] = ()
    """The first few of them."""


class Results(Model):
    """Everything that was read from some files: what `imagebuild report --json` writes, beside the judgements."""

    runs: tuple[Run, ...] = ()
    tests: tuple[BandwidthTest, ...] = ()
    tables: tuple[Table, ...] = ()
    ucx: tuple[UcxResult, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    sources: tuple[Source, ...] = ()
