"""The types of benchmark results, and of the claims about them.

Unless a field says otherwise, bandwidths are in GB/s (10^9 bytes a second), times in µs, and sizes in bytes. `None`
means unknown."""

from __future__ import annotations

import re
from collections.abc import Collection
from math import isfinite
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
"""A class of algorithms, as in `ceilings.ALGORITHMS`."""

Verdict = Literal[
    "ok", "wrong-data", "comm-failure", "cuda-failure", "timeout", "truncated", "damaged", "no-data", "failed",
    "warned", "waived",
]  # fmt: skip
"""The outcome of a benchmark, according to its output.

`damaged`: figures contradict each other or are not numbers. `warned`: a diagnosis ended with a warning. `waived`: the
tool skipped the test."""


PAIRWISE = re.compile(r"device_to_device(?!_(?:all_(?:to|from)_one|broadcast|one_to_all))")
"""The name of a test of nvbandwidth that measures pairs of GPUs, so that each GPU has a row and a column."""
GENERIC_GPU = re.compile(
    r"(?:(?:NVIDIA|AMD|Intel)(?:\((?:R|TM)\))? ?)?(?:Radeon(?:\((?:R|TM)\))? ?)?"
    r"(?:Graphics(?: Device)?|Device(?: [\da-f]{4})?|GPU)",
    re.IGNORECASE,
)
"""A name that drivers give to a GPU that they do not know."""


class Launch(Model):
    """What the program that started a benchmark knows about it, and the output may not say."""

    ranks: int | None = None
    nodes: int | None = None
    gpus: int | None = None
    """Number of GPUs of each node that should take part. `None`: all GPUs of a node."""
    domains: int | None = None
    """Number of NVLink domains of the nodes. `None`: unknown."""
    algorithms: tuple[AlgorithmName, ...] = ()
    """Classes of algorithms that the library was told to use."""
    one_host: bool = False
    """Whether the nodes are containers on one host. No profile describes the speed between such nodes."""


class Choice(Model):
    """The algorithm and protocol that NCCL chose for a size."""

    collective: str
    bytes: int
    algorithm: str
    protocol: str

    def __str__(self) -> str:
        return f"{self.collective} {self.bytes} B: {self.algorithm} {self.protocol}"


class DataPath(Model):
    """What carried the data, according to the messages of the libraries. `None`: the messages do not say it."""

    version: str | None = None
    """Version of NCCL."""
    network: str | None = None
    """The network between nodes, such as `InfiniBand` or `TCP sockets`."""
    rdma: bool = False
    plugin: str | None = None
    plugin_version: str | None = None
    """Version of the plug-in or, if it prints none, of its interface."""
    ports: tuple[str, ...] = ()
    """The ports of NICs that the library lists."""
    ports_found: int | None = None
    """Number of NICs that libfabric found. Several NICs may be one device of NCCL."""
    ports_used: int | None = None
    gbit: int | None = None
    """Speed of a port in Gb/s."""
    gpudirect: bool | None = None
    """Whether the NICs reached the memory of all GPUs themselves."""
    gpudirect_reason: str | None = None
    carriers: dict[str, int] = Field(default_factory=dict)
    """Maps `P2P/…`, `SHM` and `NET` to the number of connections between ranks."""
    staged: int = 0
    """Number of connections over the network that go through memory of the host."""
    network_in_node: int = 0
    """Number of connections over the network between GPUs of one node."""
    nodes: int | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    nvls: Literal["used", "off", "not available"] | None = None
    """Whether the switch of NVLink reduces. `off`: a variable says so."""
    channels: int | None = None
    nvls_channels: int | None = None
    rings: int | None = None
    trees: int | None = None
    mnnvl: bool | None = None
    """Whether NVLink joins nodes."""
    clique: int | None = None
    collnet: bool = False
    """Whether switches of the network reduce (SHARP)."""
    choices: tuple[Choice, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
    """The variables of NCCL that were set."""
    lanes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Maps `intra-node` and `inter-node` to the transports that UCX used."""
    mtu: int | None = None
    evidence: dict[str, str] = Field(default_factory=dict, exclude=True)
    """Maps a fact to the first line that states it."""


class Result(Model):
    """One result in the output of a tool."""

    source: str
    launch: Launch | None = None
    """`None`: imagebuild read the output, but did not start the benchmark."""
    verdict: Verdict = "ok"
    reason: str = ""
    notes: tuple[str, ...] = ()
    """Facts in the log that may explain the result, such as a warning of NCCL."""
    carried: DataPath | None = None
    """What carried the data. `None`: the output does not say it."""

    def spoiled(self, verdict: Verdict, reason: str) -> Self:
        """Return the result with a verdict about later output. A failed result keeps its verdict, and gets one more
        reason."""
        if self.verdict in ("wrong-data", "comm-failure", "cuda-failure", "timeout", "failed"):
            return self.model_copy(update={"reason": f"{self.reason}; {reason}"})
        return self.model_copy(update={"verdict": verdict, "reason": reason})


class Half(Model):
    """One half of a row of nccl-tests: the figures of the out-of-place or of the in-place operation."""

    time_us: float | None
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    wrong: int | None
    """Number of wrong elements. `None`: the data were not validated, or the program prints `error` instead."""
    error: float | None = None
    """Largest error of an element, as nccl-tests before 2.13 prints it."""


class NcclRow(Model):
    """One row of nccl-tests: the figures for one message size."""

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
        """The bus bandwidth of the faster half. None if neither half has a number."""
        speeds = (half.busbw_gb_s for half in self.halves)
        return max((speed for speed in speeds if speed is not None and isfinite(speed)), default=None)


def describe_run(collective: str | None, ranks: int | None, nodes: int | None) -> str:
    """Return `all_reduce, 16 ranks, 2 nodes`. If the number of ranks is unknown, return only the collective."""
    scale = [plural(count, noun) for count, noun in ((ranks, "rank"), (nodes, "node")) if count]
    return ", ".join([collective or "unknown collective", *scale[: None if ranks else 0]])


class Run(Result):
    """One run of a program of nccl-tests or rccl-tests. It prints one table."""

    tool: str = "nccl-tests"
    tool_version: str | None = None
    collective: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    """Number of hosts; known only from the list of devices."""
    hosts: tuple[str, ...] = ()
    """Host names in the order of their ranks; known only from the list of devices."""
    devices: tuple[str, ...] = ()
    """The GPU models in the list of devices, the most frequent one first."""
    gpus: int | None = None
    """Number of different GPUs in the list of devices. `None`: the list does not tell GPUs apart."""
    candidates: tuple[str, ...] = ()
    """The collectives that fit the figures. Empty if `collective` is known."""
    groups: int = 1
    """Number of communicators that ran at the same time. `ranks`, `nodes` and `gpus` are those of one communicator."""
    not_joined: str = ""
    """Why the processes of one launch were not joined, and how to join them; empty if nothing says so."""
    clique: int | None = None
    """Number of ranks in one NVLink domain that spans hosts, according to NCCL (`cliqueSize`). `None`: unknown."""
    algorithms: tuple[AlgorithmName, ...] = ()
    """Classes of algorithms that the library was restricted to, or used, according to the output."""
    rows: tuple[NcclRow, ...] = ()
    partial_rows: int = 0
    """Number of rows that could not be read, because they were cut or mixed with other output."""
    avg_busbw_gb_s: float | None = None
    """The printed average over all rows and both halves. It depends on the sizes, so it is not used to judge speed."""
    compared: bool = True
    """Whether the program validated the data. Option `-c 0` turns validation off."""

    @property
    def subject(self) -> str:
        return describe_run(self.collective, self.ranks, self.nodes)


class BandwidthTest(Result):
    """One matrix of nvbandwidth."""

    tool_version: str | None = None
    name: str | None
    """`None` for a waived test, which the text output does not name."""
    unit: str | None
    """`GB/s`, `ns` or `us`, as printed."""
    matrix: tuple[tuple[float | None, ...], ...] | None
    """`None` in a cell stands for a printed N/A: the diagonal, or a pair of devices without peer access. In
    nvbandwidth's JSON, the matrix of a bidirectional test between devices consists of three matrices, one below the
    other: one for each direction, then the total."""
    sum: float | None
    """The sum of the matrix, as nvbandwidth prints it. If a test prints three matrices (two directions and the total),
    the sum of the last matrix."""
    devices: tuple[str, ...] = ()
    """The name of each GPU. Empty if the output does not name the GPUs."""

    @property
    def tool(self) -> str:
        return "nvbandwidth"

    @property
    def subject(self) -> str:
        return self.name or "unnamed test"

    @property
    def size(self) -> int:
        """Number of columns of the matrix, one for each GPU. 0 if the matrix does not show the number of GPUs."""
        return 0 if "bisect" in (self.name or "") else max(map(len, self.matrix or ()), default=0)

    @property
    def cells(self) -> list[float | None]:
        """The cells that the test measures. In a test between GPUs, cells of copies within one GPU are left out."""
        matrix, name = self.matrix or (), self.name or ""
        width = len(matrix[0]) if matrix else 0
        if "device_to_device_bidirectional" in name and len(matrix) == 3 * width:
            matrix = matrix[2 * width :]  # keep the total, which follows a matrix for each direction
        is_within, is_between = "local" in name and len(matrix) > 1, PAIRWISE.search(name)
        places = [(row == column, cell) for row, cells in enumerate(matrix) for column, cell in enumerate(cells)]
        return [cell for is_own, cell in places if is_own == is_within or not (is_within or is_between)]

    @property
    def pairs(self) -> list[float]:
        return [cell for cell in self.cells if cell is not None]


class TableRow(Model):
    """One row of a table. `bw_peak` and `bw_average` have the unit of the table, `msg_rate` is in million messages per
    second."""

    size_bytes: int | None
    bw_peak: float | None = None
    bw_average: float | None = None
    msg_rate: float | None = None
    latency_us: dict[str, float] | None = None
    """Maps `min`, `max`, `typical`, `average`, `stdev`, `p99` and `p99.9` to latencies; only in latency tests."""


class PerftestTable(Result):
    """One table of perftest, ucx_perftest, the OSU micro-benchmarks or NVSHMEM."""

    tool: str = "perftest"
    """`perftest`, `ucx_perftest`, `osu` or `nvshmem`."""
    test: str | None
    unit: str | None
    """perftest prints `MB/sec` (old releases, 2^20 bytes), `MiB/sec`, `Gb/sec` (10^9 bits) or `usec`. OSU prints `MB/s`
    of 10^6 bytes, NVSHMEM `GB/s` of 10^9 bytes. `None`: the output has no unit, like the JSON of perftest."""
    rows: tuple[TableRow, ...] = ()
    devices: tuple[str, ...] = ()
    """The names of the GPUs whose memory was used. Empty if the output does not name GPUs."""
    queue_pairs: int | None = None
    """Number of queue pairs of perftest. `None`: unknown."""
    ports: int = 1
    """Number of ports of the NIC that perftest used: 2 with option `--dualport`."""
    compared: bool = False
    """Whether the program validated the data, as OSU does with `-c`."""

    @property
    def subject(self) -> str:
        """The name of the test, such as `RDMA_Write BW` or `ucx_perftest tag match latency`."""
        return " ".join(filter(None, (self.tool if self.tool == "ucx_perftest" else "", self.test))) or "unknown test"

    @property
    def best(self) -> TableRow | None:
        """The row with the highest average bandwidth and, among equal rows, the largest size. None without rows."""
        rows = [row for row in self.rows if row.bw_average is not None]
        return max(rows, key=lambda row: (row.bw_average or 0, row.size_bytes or 0), default=None)


class Diagnostic(Result):
    """One result of `dcgmi diag`. The field `reason` contains the messages of dcgmi."""

    category: str | None
    test: str
    entity: str | None = None
    """The tested part, such as `GPU 0`. `None`: the result is about the whole test."""

    @property
    def subject(self) -> str:
        return f"{self.test}, {self.entity}" if self.entity else self.test


class Hint(Model):
    """A probable cause of low speed."""

    kind: str
    means: str
    evidence: str
    """The lines or figures that show it."""
    next: str
    """The command to run next; empty if other hints of the result come first."""
    is_fallback: bool = False
    """Whether the data took another way than the fastest one."""
    is_wrong: bool = False
    """Whether the profile says that the hardware has the faster way, so that a report fails."""

    def __str__(self) -> str:
        evidence = f" ({self.evidence})" if self.evidence else ""
        return f"{self.means}{evidence}" + (f"; next: {self.next}" if self.next else "")


class Source(Model):
    """A file, and a summary of its contents."""

    path: str
    tools: tuple[str, ...]
    lines: int
    unread: int
    """Number of lines that look like results but could not be read."""
    examples: tuple[str, ...] = ()
    """The first unread lines."""
    is_lost: bool = False
    """Whether the file shows that a run left no results: the file is empty, or contains only error messages and debug
    output of libraries."""
    note: str = ""
    carried: DataPath | None = None
    """What carried the data, if the file has no results."""
    hints: tuple[Hint, ...] = ()
    """What `carried` shows, as for a result."""


Measurement = Run | BandwidthTest | PerftestTable


Change = Literal["slower", "faster", "no difference", "open"]
"""What a comparison claims about the speed of a side."""


class Difference(Model):
    """The difference in speed between a side and the first side, at one size of one collective. Positive is faster."""

    side: str
    collective: str
    size_bytes: int
    percent: float
    low: float
    high: float
    """The limits of the interval, in per cent."""
    blocks: int
    is_headline: bool
    """Whether the size has a verdict: the smallest and the largest size of the collective."""
    verdict: Change
    rate: float
    """Bus bandwidth of the side in GB/s: the median run."""
    first_rate: float = 0
    """Bus bandwidth of the first side in GB/s: the median run."""
    values: tuple[float, ...] = ()
    """The difference in each block, in per cent."""

    @property
    def interval(self) -> str:
        """The difference and its interval, in words."""
        return f"{self.percent:+.2f} % (from {self.low:+.2f} % to {self.high:+.2f} %, {self.blocks} blocks)"

    @property
    def words(self) -> str:
        """The verdict with the numbers that support it."""
        if self.verdict == "no difference":
            return f"no difference above {max(-self.low, self.high):.2f} %: {self.interval}"
        return f"{self.verdict}: {self.interval}"


class PairedComparison(Model):
    """The runs of a log that compare the sides with the first side."""

    source: str
    sides: tuple[str, ...]
    loaded: dict[str, tuple[str, ...]]
    """Maps each side to the versions of NCCL that its runs reported."""
    problems: tuple[str, ...]
    """Reasons why the log proves nothing yet, such as missing runs."""
    faults: tuple[str, ...]
    """Reasons why the log does not compare what it claims to compare, such as another loaded version."""
    is_proven: bool = True
    """Whether each complete run shows that it was a run of its side."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Maps each side with a failed run to the reason why its first failed run failed."""
    blocks: int = 0
    """Number of complete blocks, up to the first block that is not complete."""
    differences: tuple[Difference, ...]


class Results(Model):
    """The results in some files. `imagebuild report --json` writes them, together with the claims about them."""

    runs: tuple[Run, ...] = ()
    tests: tuple[BandwidthTest, ...] = ()
    tables: tuple[PerftestTable, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    paired: tuple[PairedComparison, ...] = ()
    """Comparisons of two or more sides whose runs alternate in a log."""
    sources: tuple[Source, ...] = ()

    @property
    def measured(self) -> tuple[Measurement, ...]:
        return (*self.runs, *self.tests, *self.tables)

    def with_launch(self, launch: Launch) -> Self:
        """Return the results with what is known about the program that started them."""
        kinds = ("runs", "tests", "tables", "diagnostics")
        told = {kind: tuple(r.model_copy(update={"launch": launch}) for r in getattr(self, kind)) for kind in kinds}
        return self.model_copy(update=told)

    def without_hosts(self) -> Self:
        """Return the results without host names, so that they can be published."""
        return self.model_copy(update={"runs": tuple(run.model_copy(update={"hosts": ()}) for run in self.runs)})


class Limit(Model):
    """A bandwidth in GB/s to compare a measurement with."""

    value: float
    what: str
    """The origin: a formula such as `NVLS all_reduce ceiling: link * 2(N-1)/(N+1)`, or the source and date."""


State = Literal["failed", "open", "skipped", "passed"]
"""The outcome of a claim or a check, the worst first. The first two make a report fail.

`open`: the user asked for the claim, but the output does not prove it. `skipped`: the user did not ask for the claim,
or accepted the claim with `--allow`."""
STATES: tuple[State, ...] = get_args(State)

Openness = Literal["unvalidated", "partial", "unjudged"]
"""Claims that the user can accept with `--allow`: data that were not compared; ranks or GPUs that are missing or
unknown; speed that was not judged."""

ClaimWord = Literal[
    "right", "complete", "fast enough", "faster", "no difference",
    "not compared", "not known", "not judged",
    "wrong", "unfinished", "incomplete", "too slow", "slower", "impossible",
    "not applicable",
]  # fmt: skip
"""The content of a claim.

* About data: `right`, `not compared`, `wrong` or `unfinished`.
* About participation: `complete`, `not known` or `incomplete`.
* About speed: `fast enough`, `not judged`, `too slow` or `impossible`.
* About the speed of a side of a paired comparison: `faster`, `no difference`, `not judged` or `slower`.
* About any of these: `not applicable`."""
PASSED, OPEN = get_args(ClaimWord)[:5], get_args(ClaimWord)[5:8]


class Claim(Model):
    """A statement about a result, with its reason."""

    state: ClaimWord
    reason: str = ""
    allow: Openness | None = None
    """The value of `--allow` that accepts this state. `None`: no value accepts this state, or the user did not ask for
    the claim."""

    def text(self, allowed: Collection[str] = ()) -> str:
        """Return the reason, with the value of `--allow` that accepts or would accept the claim."""
        if not self.allow:
            return self.reason
        hint = "accepted by" if self.allow in allowed else "to accept it:"
        return f"{self.reason} ({hint} --allow {self.allow})"

    def standing(self, allowed: Collection[str] = ()) -> State | None:
        """Return the outcome of the claim if `allowed` was passed to `--allow`. None if it is not applicable."""
        if self.state in (*PASSED, "not applicable"):
            return "passed" if self.state in PASSED else None
        if self.allow in allowed or (self.state in OPEN and not self.allow):
            return "skipped"
        return "open" if self.state in OPEN else "failed"


class SpeedClaim(Claim):
    """A statement about the speed of a result."""

    measured: float | None = None
    """The bandwidth that is judged, in GB/s. For a collective, the best row of 1 GiB or more. For a matrix, the slowest
    pair of devices. For a table, the highest average, or the average at the size of the reference."""
    size_bytes: int | None = None
    ceiling: Limit | None = None
    reference: Limit | None = None
    tolerance: float | None = None
    """The smallest fraction of the reference that passes."""
    floor: Limit | None = None
    """The smallest bandwidth that passes without a reference: a fraction of the lowest ceiling."""
    algorithm: AlgorithmName | None = None
    """The class of algorithms that the result was judged as, if the output or the user names exactly one."""

    @property
    def words(self) -> str:
        """The state and the class of algorithms: `fast enough as ring`, or `above the floor` without a reference."""
        is_above_floor = self.state == "fast enough" and self.ceiling and self.floor and not self.reference
        state = "above the floor" if is_above_floor else self.state
        return f"{state} as {self.algorithm}" if self.algorithm else state


class Judgement(Model):
    """The three claims about one result, or about one comparison with a baseline."""

    source: str
    subject: str
    """The result, such as `all_reduce, 8 ranks, 1 node` or `device_to_device_memcpy_read_ce`."""
    data: Claim
    participation: Claim
    speed: SpeedClaim
    hints: tuple[Hint, ...] = ()
    """Fallbacks and other causes of low speed, the best first."""

    @property
    def claims(self) -> tuple[Claim, Claim, Claim]:
        return self.data, self.participation, self.speed

    def worst(self, allowed: Collection[str] = ()) -> Claim:
        """Return the claim with the worst outcome; among equal ones, the first."""
        order = (*STATES, None)
        return min(self.claims, key=lambda claim: order.index(claim.standing(allowed)))
