"""Define the types of what benchmarks print, and of the verdicts on it.

Bandwidths are in GB/s of 10^9 bytes, times in µs, sizes in bytes, unless the field says otherwise; `None` is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import isfinite
from statistics import median
from typing import Literal, Self, get_args

from pydantic import Field

from imagebuild.core.errors import plural
from imagebuild.core.fields import Model

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv", "gather", "scatter", "broadcast", "reduce",
    "sendrecv", "hypercube",
]  # fmt: skip
"""A collective for which `ceilings` has a formula."""

AlgorithmName = Literal["ring", "nvls", "hierarchical", "nvls-tree", "sharp", "nvls-sharp", "pairwise"]
"""A class of algorithms in `ceilings`."""

RunVerdict = Literal[
    "ok", "wrong-data", "comm-failure", "cuda-failure", "timeout", "truncated", "damaged", "no-data",
    "failed",
]  # fmt: skip
"""`damaged`: figures that contradict each other, or are no numbers."""
TableVerdict = Literal["ok", "failed", "truncated", "no-data"]
DiagnosticStatus = Literal["pass", "fail", "warn", "skip", "not-run", "unknown"]


class Half(Model):
    """Hold one half of a row of nccl-tests: the figures out of place, or those in place."""

    time_us: float | None
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    wrong: int | None
    """Wrong elements; `None` where the data were not validated, or the column held the largest error (before 2.13)."""


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
        """Return the halves that were printed."""
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


class Run(Model):
    """Hold one run of a program of nccl-tests (or rccl-tests), which prints one table."""

    source: str
    """The file it was read from."""
    tool: str = "nccl-tests"
    tool_version: str | None = None
    collective: str | None = None
    """`all_reduce`, `all_gather`, `reduce_scatter`, `alltoall`, `broadcast`, `sendrecv`, …"""
    ranks: int | None = None
    nodes: int | None = None
    """Number of hosts, if the list of devices was printed."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts in the order of their ranks, if the list of devices was printed."""
    device: str | None = None
    """Name of the GPUs, if it was printed: of most of them, if they differ."""
    gpus: int | None = None
    """Number of different GPUs in the list of devices, if it tells them apart: fewer than ranks if ranks share one."""
    other_devices: tuple[str, ...] = ()
    """Names of GPUs that differ from `device`."""
    algorithms: tuple[AlgorithmName, ...] = ()
    """Classes of algorithms that, by the output, the library was made to use or used."""
    rows: tuple[NcclRow, ...] = ()
    partial_rows: int = 0
    """Number of rows that were cut, or broken by other output beyond repair."""
    avg_busbw_gb_s: float | None = None
    """The printed mean over all rows and both halves. It depends on the sizes, so nothing is judged by it."""
    out_of_bounds: int | None = None
    """Number of failed checks of the data, as the footer says."""
    wrong_total: int | None = None
    """Wrong elements of all rows."""
    compared: bool = True
    """Whether the data were compared: not with `-c 0`."""
    verdict: RunVerdict
    reason: str
    """Why, in one line."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the different names of GPUs that were printed."""
        return tuple(name for name in (self.device, *self.other_devices) if name)

    @property
    def subject(self) -> str:
        """Return what was run, without the file: `all_reduce, 8 ranks, 1 node`."""
        return describe_run(self.collective, self.ranks, self.nodes)


class BandwidthTest(Model):
    """Hold one matrix of nvbandwidth."""

    source: str
    tool: str = "nvbandwidth"
    tool_version: str | None = None
    name: str | None
    """`None` if the output does not say it: the text of nvbandwidth does not name a waived test."""
    unit: str | None
    """`GB/s`, `ns` or `us`, as printed."""
    status: str
    """`passed`, `waived`, `error`, `not-found` or `truncated`."""
    matrix: tuple[tuple[float | None, ...], ...] | None
    """A cell is `None` where N/A was printed: on the diagonal, or for a pair without access. In nvbandwidth's JSON, a
    bidirectional test between devices has three matrices below each other: both directions and their total."""
    sum: float | None
    """As printed; of three matrices, that of the last."""
    reason: str = ""
    """Why the test did not pass, if the output says it."""
    devices: tuple[str, ...] = ()
    """Names of the GPUs, if they were printed."""

    @property
    def subject(self) -> str:
        """Return the test that the matrix is of."""
        return self.name or "unnamed test"


class TableRow(Model):
    """Hold one row of perftest: `bw_*` in the table's unit, `msg_rate` in millions of messages a second."""

    size_bytes: int
    bw_peak: float | None = None
    bw_average: float | None = None
    msg_rate: float | None = None
    latency_us: dict[str, float] | None = None
    """Of a latency test: `min`, `max`, `typical`, `average`, `stdev`, `p99`, `p99.9`."""


class PerftestTable(Model):
    """Hold one table that a program of perftest, of the OSU micro-benchmarks or of NVSHMEM printed."""

    source: str
    tool: str = "perftest"
    """`perftest`, `osu` or `nvshmem`."""
    test: str | None
    """As printed, for example `RDMA_Write BW`."""
    unit: str | None
    """`MB/sec` (older, 2^20 bytes), `MiB/sec`, `Gb/sec` (10^9 bits), `usec`; `None` if not printed, as in JSON. Of
    OSU: `MB/s` of 10^6 bytes. Of NVSHMEM: `GB/s` of 10^9 bytes."""
    rows: tuple[TableRow, ...] = ()
    compared: bool = False
    """Whether the program compared the data, as OSU does with `-c`."""
    verdict: TableVerdict = "ok"
    reason: str = ""

    @property
    def subject(self) -> str:
        """Return the test that the table is of."""
        return self.test or "unknown test"


class UcxResult(Model):
    """Hold one line of results of ucx_perftest."""

    source: str
    title: str | None
    """What was measured, for example `tag match bandwidth`."""
    size_bytes: int | None = None
    """Size of a message, if it was printed."""
    thread: int | None = None
    iterations: int | None = None
    latency_us: dict[str, float | None] = Field(default_factory=dict)
    """`typical` (or the percentile printed), `average`, `overall`."""
    bandwidth_mib_s: dict[str, float | None] = Field(default_factory=dict)
    """`average` and `overall`, in MiB/s, which the program calls MB/s."""
    rate_msg_s: dict[str, float | None] = Field(default_factory=dict)
    final: bool = True
    """False if only progress was printed, or an error."""
    reason: str = ""
    """The error that the program printed instead of a result."""

    @property
    def subject(self) -> str:
        """Return the test and the thread: `ucx_perftest overhead, thread 0`."""
        title = f"ucx_perftest {self.title}" if self.title else "ucx_perftest"
        return title if self.thread is None else f"{title}, thread {self.thread}"


class Diagnostic(Model):
    """Hold one result of `dcgmi diag`."""

    source: str
    category: str | None
    test: str
    entity: str | None = None
    """`GPU 0`, or `None` for the whole test."""
    status: DiagnosticStatus
    messages: tuple[str, ...] = ()


class Source(Model):
    """Hold the name of a file, and what was read from it."""

    path: str
    tools: tuple[str, ...]
    """The tools whose output is in it."""
    lines: int
    unread: int
    """Number of lines that look like results and could not be read."""
    examples: tuple[str, ...] = ()
    """The first few unread lines."""
    damage: str = ""
    """Why the file could not be read to its end."""
    is_lost: bool = False
    """Whether it is empty, or has nothing but messages of errors and of the library: a run that left no output."""


class Results(Model):
    """Hold all that was read from some files: what `imagebuild report --json` writes beside the claims about it."""

    runs: tuple[Run, ...] = ()
    tests: tuple[BandwidthTest, ...] = ()
    tables: tuple[PerftestTable, ...] = ()
    ucx: tuple[UcxResult, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    sources: tuple[Source, ...] = ()

    def without_hosts(self) -> Self:
        """Return the results without names of hosts, for everybody to read."""
        return self.model_copy(update={"runs": tuple(run.model_copy(update={"hosts": ()}) for run in self.runs)})


class Limit(Model):
    """Hold a number that a measurement is compared with, and where it comes from."""

    value: float
    unit: str
    what: str
    """For example `NVLS all_reduce ceiling: link * 2(N-1)/(N+1)`, or the source and date of a reference."""


Standing = Literal["failed", "open", "unasked", "accepted", "passed", "not applicable"]
"""What a claim counts as, the worst first; the first two make a report fail. `open`: it was asked for and is not known;
`unasked`: it is not known, nor asked for; `accepted`: `--allow` names it."""
STANDINGS: tuple[Standing, ...] = get_args(Standing)

Openness = Literal["unvalidated", "partial", "unjudged"]
"""Kinds of claims that `--allow` accepts: data that were not compared, ranks or GPUs that are missing or not known,
speed that was not judged."""

DataState = Literal["right", "not compared", "wrong", "unfinished", "not applicable"]
ParticipationState = Literal["complete", "not known", "incomplete", "not applicable"]
SpeedState = Literal["fast enough", "not judged", "too slow", "impossible", "not applicable"]

_STANDINGS: dict[str, Standing] = {
    **dict.fromkeys(("right", "complete", "fast enough"), "passed"),
    **dict.fromkeys(("not compared", "not known", "not judged"), "open"),
    **dict.fromkeys(("wrong", "unfinished", "incomplete", "too slow", "impossible"), "failed"),
    "not applicable": "not applicable",
}  # fmt: skip


class Claim(Model):
    """Say one thing about a result, and why."""

    state: str
    reason: str = ""
    """In plain words, one line."""
    allow: Openness | None = None
    """What `--allow` names to accept this state. `None` if nothing accepts it, or if it was not asked for."""

    def standing(self, allowed: Collection[str] = ()) -> Standing:
        """Return what the claim counts as, where `--allow` names these kinds."""
        standing = _STANDINGS[self.state]
        if standing in ("open", "failed") and self.allow in allowed:
            return "accepted"
        return "unasked" if standing == "open" and self.allow is None else standing


class DataClaim(Claim):
    """Say whether the data were right: compared by the benchmark, or `unfinished` if it did not come to its end."""

    state: DataState


class ParticipationClaim(Claim):
    """Say whether all ranks, nodes and GPUs took part that should have, and whether they are those of the profile."""

    state: ParticipationState


class SpeedClaim(Claim):
    """Say whether a result is fast enough."""

    state: SpeedState
    measured: float | None = None
    """In `unit`: of a collective the best row of 1 GiB or more, of a matrix the worst pair."""
    size_bytes: int | None = None
    """The size of that row."""
    unit: str = "GB/s"
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
    data: DataClaim
    participation: ParticipationClaim
    speed: SpeedClaim

    @property
    def claims(self) -> tuple[Claim, Claim, Claim]:
        return self.data, self.participation, self.speed

    def worst(self, allowed: Collection[str] = ()) -> Claim:
        """Return the claim that counts worst, the first of equal ones."""
        return min(self.claims, key=lambda claim: STANDINGS.index(claim.standing(allowed)))
