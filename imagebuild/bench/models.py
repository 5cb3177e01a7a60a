"""Define the types of what benchmarks print, and of the claims about it.

Bandwidths are in GB/s of 10^9 bytes, times in µs, sizes in bytes, unless the field says otherwise; `None` is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import isfinite
from statistics import median
from typing import Literal, Self, get_args

from imagebuild.core.errors import plural
from imagebuild.core.fields import Model

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv", "gather", "scatter", "broadcast", "reduce",
    "sendrecv", "hypercube",
]  # fmt: skip
"""A collective for which `ceilings` has a formula."""

AlgorithmName = Literal["ring", "nvls", "hierarchical", "nvls-tree", "sharp", "nvls-sharp", "pairwise"]
"""A class of algorithms in `ceilings`."""

Verdict = Literal[
    "ok", "wrong-data", "comm-failure", "cuda-failure", "timeout", "truncated", "damaged", "no-data", "failed",
    "warned", "waived",
]  # fmt: skip
"""What a reader found in the output. `damaged`: figures that contradict each other, or are no numbers; `warned`: a
diagnosis with a warning; `waived`: the tool left the test out."""


class Result(Model):
    source: str
    verdict: Verdict = "ok"
    reason: str = ""

    def spoiled(self, verdict: Verdict, reason: str) -> Self:
        """Return the result with a verdict for what came after it; one that failed by itself keeps its own."""
        if self.verdict in ("wrong-data", "comm-failure", "cuda-failure", "timeout", "failed"):
            return self.model_copy(update={"reason": f"{self.reason}; {reason}"})
        return self.model_copy(update={"verdict": verdict, "reason": reason})


class Half(Model):
    """Hold one half of a row of nccl-tests: the figures out of place, or those in place."""

    time_us: float | None
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    wrong: int | None
    """Wrong elements, before 2.13 the largest error, rounded; `None` where the data were not validated."""


class NcclRow(Model):
    """Hold one row of nccl-tests: the figures for one message size."""

    size_bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    out_of_place: Half
    in_place: Half | None

    @property
    def halves(self) -> tuple[Half, ...]:
        return (self.out_of_place, self.in_place) if self.in_place else (self.out_of_place,)

    @property
    def busbw_gb_s(self) -> float | None:
        """Return the bus bandwidth of the better half, None if none was printed that is a number."""
        speeds = (half.busbw_gb_s for half in self.halves)
        return max((speed for speed in speeds if speed is not None and isfinite(speed)), default=None)


def bus_ratio(rows: Iterable[NcclRow], least: float) -> float | None:
    """Return the median of busbw / algbw where algbw is at least so many GB/s, None without such figures."""
    halves = (half for row in rows for half in row.halves)
    ratios = [h.busbw_gb_s / h.algbw_gb_s for h in halves if h.busbw_gb_s and h.algbw_gb_s and h.algbw_gb_s >= least]
    return median(ratios) if ratios else None


def describe_run(collective: str | None, ranks: int | None, nodes: int | None) -> str:
    """Return `all_reduce, 16 ranks, 2 nodes`, up to the first number that is unknown."""
    scale = [plural(count, noun) for count, noun in ((ranks, "rank"), (nodes, "node")) if count]
    return ", ".join([collective or "unknown collective", *scale[: None if ranks else 0]])


class Run(Result):
    """Hold one run of a program of nccl-tests (or rccl-tests), which prints one table."""

    tool: str = "nccl-tests"
    tool_version: str | None = None
    collective: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    """Number of hosts, if the list of devices was printed."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts in the order of their ranks, if the list of devices was printed."""
    devices: tuple[str, ...] = ()
    """Different names of GPUs that were printed, that of most GPUs first."""
    gpus: int | None = None
    """Number of different GPUs in the list of devices, if it tells them apart: fewer than ranks if ranks share one."""
    algorithms: tuple[AlgorithmName, ...] = ()
    """Classes of algorithms that, by the output, the library was made to use or used."""
    rows: tuple[NcclRow, ...] = ()
    partial_rows: int = 0
    """Number of rows that were cut, or broken by other output beyond repair."""
    avg_busbw_gb_s: float | None = None
    """The printed mean over all rows and both halves. It depends on the sizes, so nothing is judged by it."""
    compared: bool = True
    """Whether the data were compared: not with `-c 0`."""

    @property
    def subject(self) -> str:
        return describe_run(self.collective, self.ranks, self.nodes)


class BandwidthTest(Result):
    """Hold one matrix of nvbandwidth."""

    tool_version: str | None = None
    name: str | None
    """`None` if the output does not say it: the text of nvbandwidth does not name a waived test."""
    unit: str | None
    """`GB/s`, `ns` or `us`, as printed."""
    matrix: tuple[tuple[float | None, ...], ...] | None
    """A cell is `None` where N/A was printed: on the diagonal, or for a pair without access. In nvbandwidth's JSON, a
    bidirectional test between devices has three matrices below each other: both directions and their total."""
    sum: float | None
    """As printed; of three matrices, that of the last."""
    devices: tuple[str, ...] = ()
    """The name of each GPU, if they were printed."""

    @property
    def tool(self) -> str:
        return "nvbandwidth"

    @property
    def subject(self) -> str:
        return self.name or "unnamed test"

    @property
    def cells(self) -> list[float | None]:
        """Return the cells that a test measures: on the diagonal of a matrix between GPUs are copies within one."""
        matrix, name = self.matrix or (), self.name or ""
        width = len(matrix[0]) if matrix else 0
        if "device_to_device_bidirectional" in name and len(matrix) == 3 * width:
            matrix = matrix[2 * width :]  # two directions and, below them, their total
        is_within, is_between = "local" in name and len(matrix) > 1, "device_to_device" in name
        places = [(row == column, cell) for row, cells in enumerate(matrix) for column, cell in enumerate(cells)]
        return [cell for is_own, cell in places if is_own == is_within or not (is_within or is_between)]

    @property
    def pairs(self) -> list[float]:
        return [cell for cell in self.cells if cell is not None]


class TableRow(Model):
    """Hold one row of a table: `bw_*` in the table's unit, `msg_rate` in millions of messages a second."""

    size_bytes: int | None
    bw_peak: float | None = None
    bw_average: float | None = None
    msg_rate: float | None = None
    latency_us: dict[str, float] | None = None
    """Of a latency test: `min`, `max`, `typical`, `average`, `stdev`, `p99`, `p99.9`."""


class PerftestTable(Result):
    """Hold one table that a program of perftest, ucx_perftest, the OSU micro-benchmarks or NVSHMEM printed."""

    tool: str = "perftest"
    """`perftest`, `ucx_perftest`, `osu` or `nvshmem`."""
    test: str | None
    unit: str | None
    """`MB/sec` (older, 2^20 bytes), `MiB/sec`, `Gb/sec` (10^9 bits), `usec`; `None` if not printed, as in JSON. Of
    OSU: `MB/s` of 10^6 bytes. Of NVSHMEM: `GB/s` of 10^9 bytes."""
    rows: tuple[TableRow, ...] = ()
    compared: bool = False
    """Whether the program compared the data, as OSU does with `-c`."""

    @property
    def subject(self) -> str:
        """Return the test that the table is of: `RDMA_Write BW`, `ucx_perftest tag match latency`."""
        return " ".join(filter(None, (self.tool if self.tool == "ucx_perftest" else "", self.test))) or "unknown test"

    @property
    def best(self) -> TableRow | None:
        """Return the row with the highest average bandwidth, of equal ones the largest; None if there is none."""
        rows = [row for row in self.rows if row.bw_average is not None]
        return max(rows, key=lambda row: (row.bw_average or 0, row.size_bytes or 0), default=None)


class Diagnostic(Result):
    """Hold one result of `dcgmi diag`; its messages are the reason."""

    category: str | None
    test: str
    entity: str | None = None
    """`GPU 0`, or `None` for the whole test."""

    @property
    def subject(self) -> str:
        return f"{self.test}, {self.entity}" if self.entity else self.test


class Source(Model):
    """Hold the name of a file, and what was read from it."""

    path: str
    tools: tuple[str, ...]
    lines: int
    unread: int
    """Number of lines that look like results and could not be read."""
    examples: tuple[str, ...] = ()
    is_lost: bool = False
    """Whether it is empty, or has nothing but messages of errors and of the library: a run that left no output."""
    note: str = ""


Measurement = Run | BandwidthTest | PerftestTable


class Results(Model):
    """Hold all that was read from some files: what `imagebuild report --json` writes beside the claims about it."""

    runs: tuple[Run, ...] = ()
    tests: tuple[BandwidthTest, ...] = ()
    tables: tuple[PerftestTable, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def measured(self) -> tuple[Measurement, ...]:
        return (*self.runs, *self.tests, *self.tables)

    def without_hosts(self) -> Self:
        """Return the results without names of hosts, for everybody to read."""
        return self.model_copy(update={"runs": tuple(run.model_copy(update={"hosts": ()}) for run in self.runs)})


class Limit(Model):
    """Hold a rate in GB/s that a measurement is compared with, and where it comes from."""

    value: float
    what: str
    """For example `NVLS all_reduce ceiling: link * 2(N-1)/(N+1)`, or the source and date of a reference."""


State = Literal["failed", "open", "skipped", "passed"]
"""What a claim or a check counts as, the worst first; the first two make a report fail. `open`: it was asked for and is
not known; `skipped`: it is not known, nor asked for, or `--allow` names it."""
STATES: tuple[State, ...] = get_args(State)

Openness = Literal["unvalidated", "partial", "unjudged"]
"""Kinds of claims that `--allow` accepts: data that were not compared, ranks or GPUs that are missing or not known,
speed that was not judged."""

ClaimWord = Literal[
    "right", "complete", "fast enough",
    "not compared", "not known", "not judged",
    "wrong", "unfinished", "incomplete", "too slow", "impossible",
    "not applicable",
]  # fmt: skip
"""What is claimed: of data `right`, `not compared`, `wrong`, `unfinished`; of participation `complete`, `not known`,
`incomplete`; of speed `fast enough`, `not judged`, `too slow`, `impossible`; of any of them `not applicable`."""
PASSED, OPEN = get_args(ClaimWord)[:3], get_args(ClaimWord)[3:6]


class Claim(Model):
    """Say one thing about a result, and why."""

    state: ClaimWord
    reason: str = ""
    allow: Openness | None = None
    """What `--allow` names to accept this state. `None` if nothing accepts it, or if it was not asked for."""

    def standing(self, allowed: Collection[str] = ()) -> State | None:
        """Return what the claim counts as, where `--allow` names these kinds; None if it is not applicable."""
        if self.state in (*PASSED, "not applicable"):
            return "passed" if self.state in PASSED else None
        if self.allow in allowed or (self.state in OPEN and not self.allow):
            return "skipped"
        return "open" if self.state in OPEN else "failed"


class SpeedClaim(Claim):
    """Say whether a result is fast enough."""

    measured: float | None = None
    """In GB/s: of a collective the best row of 1 GiB or more, of a matrix the worst pair."""
    size_bytes: int | None = None
    ceiling: Limit | None = None
    reference: Limit | None = None
    tolerance: float | None = None
    """The least fraction of the reference that passes."""
    floor: Limit | None = None
    """What passes without a reference: a fraction of the lowest ceiling."""
    algorithm: AlgorithmName | None = None
    """The class of algorithms as which it was judged, if the output or the caller names exactly one."""

    @property
    def words(self) -> str:
        """Return the state in words, with the class of algorithms, and `above the floor` if there was no reference."""
        is_above_floor = self.state == "fast enough" and self.ceiling and self.floor and not self.reference
        state = "above the floor" if is_above_floor else self.state
        return f"{state} as {self.algorithm}" if self.algorithm else state


class Judgement(Model):
    """Hold the three claims about one result, or about one comparison with a baseline."""

    source: str
    subject: str
    """For example `all_reduce, 8 ranks, 1 node`, `device_to_device_memcpy_read_ce`."""
    data: Claim
    participation: Claim
    speed: SpeedClaim

    @property
    def claims(self) -> tuple[Claim, Claim, Claim]:
        return self.data, self.participation, self.speed

    def worst(self, allowed: Collection[str] = ()) -> Claim:
        """Return the claim that counts worst, the first of equal ones."""
        order = (*STATES, None)
        return min(self.claims, key=lambda claim: order.index(claim.standing(allowed)))
