"""Judge the speed of results by the ceilings and the references of a profile. Pure.

Whether data were right is judged before: a run whose verdict is not `ok` is not judged for speed. The rules:

* A measurement above its ceiling by more than `MARGIN` is a mistake of measuring, however fast it looks.
* A collective is judged by its best row of 1 GiB or more, never by the average over sizes.
* It fails below tolerance * reference. Without a reference for exactly its ranks and nodes it is not comparable.
* A result of other hardware than the profile's, or of an unknown scale, is not comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from imagebuild.bench import ceilings
from imagebuild.bench.ceilings import NotComparable, algorithms_of, hard_ceiling, rank_layout
from imagebuild.bench.models import (
    AlgorithmName,
    BandwidthTest,
    Limit,
    PerftestTable,
    Results,
    Run,
    SpeedOutcome,
    SpeedVerdict,
)
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError

MARGIN = 0.02
"""How far above a ceiling a figure may be before it is called a mistake. Timers start late and figures are rounded: a
loopback on a 200 Gb/s adapter was seen at 201.8 Gb/s."""
GATE_BYTES = 2**30
"""Smaller messages show latency, not bandwidth."""


@dataclass(frozen=True)
class RunContext:
    """What the caller knows about runs whose output does not say it."""

    ranks: int | None = None
    nodes: int | None = None
    """Number of hosts."""
    algorithm: str | None = None
    """Class that the library was made to use, such as `ring` with NCCL_NVLS_ENABLE=0."""


def judge_results(results: Results, profile: Profile, context: RunContext | None = None) -> tuple[SpeedVerdict, ...]:
    """Judge each run, each matrix of bandwidths and each table of bandwidths, in the order of the results.

    Raises ConfigError for an algorithm that is not a class of `ceilings`.
    """
    context = context or RunContext()
    if context.algorithm and context.algorithm not in get_args(AlgorithmName):
        known = ", ".join(get_args(AlgorithmName))
        raise ConfigError(f"--algorithm {context.algorithm}: unknown class of algorithms; use one of {known}")
    matrices = [test for test in results.tests if test.unit == "GB/s"]
    tables = [table for table in results.tables if not any(row.latency_us for row in table.rows)]
    return (
        *(judge_run(run, profile, context) for run in results.runs),
        *(judge_matrix(test, profile) for test in matrices),
        *(judge_table(table, profile) for table in tables),
    )


def judge_run(run: Run, profile: Profile, context: RunContext) -> SpeedVerdict:
    """Judge one run of nccl-tests by its best row of 1 GiB or more."""
    run = run.model_copy(update={"ranks": run.ranks or context.ranks, "nodes": run.nodes or context.nodes})
    measured, size = best_row(run)
    draft = _Draft(run.source, describe_run(run.collective, run.ranks, run.nodes), "GB/s", measured, size)
    try:
        collective, ranks, nodes = scale = _scale_of(run, profile)
        layout = rank_layout(profile, ranks, nodes)
        if measured is None or size is None:
            raise NotComparable("no bus bandwidth was read")
        # A class that the collective does not have, such as a ring of alltoall, was not what it used.
        algorithm = context.algorithm if context.algorithm in algorithms_of(collective) else None
        ceiling = hard_ceiling(collective, ranks, layout.domains, layout.hardware, algorithm)
        if ceiling:
            what = f"{ceiling.algorithm} {collective} ceiling: {ceiling.formula}"
            draft.ceiling = Limit(value=round(ceiling.value, 3), unit="GB/s", what=what)
        elif algorithm:
            raise NotComparable(f"{profile.name} cannot run {draft.subject} with {algorithm}")
        if draft.is_above_ceiling(measured):
            return draft.measurement_error()
        if size < _least_size(run):
            raise NotComparable(f"the largest size is {size} bytes; speed is judged at 1 GiB or more")
        references = [r for r in profile.references if (r.collective, r.ranks, r.nodes) == scale]
        if algorithm:
            fitting = [r for r in references if r.algorithm in (None, algorithm)]
        else:  # what the library chose itself
            fitting = [r for r in references if not r.forced]
        reference = max(fitting, key=lambda r: r.algorithm == algorithm, default=None)
        if reference is None:
            suffix = f" with {algorithm}" if algorithm and references else ""
            raise NotComparable(f"{profile.name} has no reference for {draft.subject}{suffix}")
    except NotComparable as reason:
        return draft.end("not-comparable", str(reason))
    draft.reference = ceilings.reference_limit(reference, reference.rate, "GB/s")
    draft.tolerance = reference.tolerance
    others = [r for r in references if r is not reference and r.algorithm and measured >= r.rate * r.tolerance]
    hint = ""
    if others:
        share = measured / others[0].rate
        hint = f"{share:.0%} of the reference with {others[0].algorithm}: was the library made to use it?"
    note = "" if _names_gpu(run) else f"the output does not name the GPU, so it is taken for {profile.name}"
    return draft.compare(measured, note, hint_if_failed=hint)


def best_row(run: Run) -> tuple[float | None, int | None]:
    """Return the highest bus bandwidth of either half and its size: of the rows of 1 GiB or more, else of all."""
    values = [
        (half.busbw_gb_s, row.size_bytes)
        for row in run.rows
        for half in (row.out_of_place, row.in_place)
        if half and half.busbw_gb_s is not None
    ]
    large = [value for value in values if value[1] >= _least_size(run)]
    return max(large or values, default=(None, None))


def describe_run(collective: str | None, ranks: int | None, nodes: int | None) -> str:
    """Return `all_reduce, 16 ranks, 2 nodes`, without the parts that are unknown."""
    scale = [ceilings.plural(count, noun) for count, noun in ((ranks, "rank"), (nodes, "node")) if count]
    return ", ".join([collective or "unknown collective", *scale])


def judge_matrix(test: BandwidthTest, profile: Profile) -> SpeedVerdict:
    """Judge a matrix in GB/s: its worst pair by the reference, its best pair by the ceiling."""
    name = test.name or "unnamed test"
    pairs = device_pairs(test)
    worst = min(pairs, default=None)
    draft = _Draft(test.source, name, "GB/s", worst, None)
    if test.status != "passed":
        return draft.end("not-comparable", f"the test's status is {test.status}")
    if worst is None:
        return draft.end("not-comparable", "no pair was measured")
    draft.ceiling = ceilings.copy_ceiling(profile, name)
    if draft.is_above_ceiling(max(pairs)):
        draft.measured = max(pairs)
        return draft.measurement_error()
    reference = ceilings.copy_reference(profile, name)
    if reference is None:
        return draft.end("not-comparable", f"{profile.name} has no reference for this test")
    draft.reference = ceilings.reference_limit(reference, reference.rate, "GB/s")
    draft.tolerance = reference.tolerance
    return draft.compare(worst, "the worst pair" if len(pairs) > 1 else "")


def device_pairs(test: BandwidthTest) -> list[float]:
    """Return the cells between two devices: the diagonal of a matrix between GPUs is a copy within one of them."""
    matrix = test.matrix or ()
    width = len(matrix[0]) if matrix else 0
    name = test.name or ""
    if "device_to_device_bidirectional" in name and len(matrix) == 3 * width:
        matrix = matrix[2 * width :]  # two directions and, below them, their total
    is_between_gpus = "device_to_device" in name
    return [
        cell
        for row, cells in enumerate(matrix)
        for column, cell in enumerate(cells)
        if cell is not None and not (is_between_gpus and row == column)
    ]


def judge_table(table: PerftestTable, profile: Profile) -> SpeedVerdict:
    """Judge a bandwidth table of perftest by its best row, in Gb/s."""
    test = table.test or "unknown test"
    draft = _Draft(table.source, test, "Gb/s", None, None)
    if table.verdict != "ok":
        return draft.end("not-comparable", f"its verdict is {table.verdict}: {table.reason}")
    rows = [(row.bw_average, row.size_bytes) for row in table.rows if row.bw_average is not None]
    if not rows:
        return draft.end("not-comparable", "no bandwidth was measured")
    if table.unit not in ceilings.GBIT_UNITS:
        return draft.end("not-comparable", "the unit was not printed; run with --report_gbits and keep the text")
    value, draft.size_bytes = max(rows)
    draft.measured = measured = value * ceilings.GBIT_UNITS[table.unit]
    draft.ceiling = ceilings.wire_ceiling(profile, test)
    if draft.is_above_ceiling(measured):
        return draft.measurement_error()
    reference = ceilings.wire_reference(profile, test)
    if reference is None:
        return draft.end("not-comparable", f"{profile.name} has no reference for this test")
    draft.reference = ceilings.reference_limit(reference, reference.rate * 8, "Gb/s")
    draft.tolerance = reference.tolerance
    return draft.compare(measured, f"the reference is for {reference.memory} memory")


@dataclass
class _Draft:
    """A verdict while it is made."""

    source: str
    subject: str
    unit: str
    measured: float | None
    size_bytes: int | None
    ceiling: Limit | None = None
    reference: Limit | None = None
    tolerance: float | None = None

    def is_above_ceiling(self, value: float) -> bool:
        return self.ceiling is not None and value > self.ceiling.value * (1 + MARGIN)

    def measurement_error(self) -> SpeedVerdict:
        return self.end("measurement-error", "more than the hardware can move: wrong profile, scale or measurement")

    def compare(self, measured: float, note: str, *, hint_if_failed: str = "") -> SpeedVerdict:
        """Return the verdict by the reference, which the draft must have."""
        assert self.reference is not None
        assert self.tolerance is not None
        share = measured / self.reference.value
        passed = share >= self.tolerance
        text = f"{share:.1%} of the reference, {'at least' if passed else 'below'} the {self.tolerance:.0%} that pass"
        parts = (text, note, "" if passed else hint_if_failed)
        return self.end("passed" if passed else "failed", "; ".join(filter(None, parts)))

    def end(self, outcome: SpeedOutcome, reason: str) -> SpeedVerdict:
        if self.ceiling and self.measured is not None:
            reason += f"; {self.measured / self.ceiling.value:.0%} of the ceiling"
        return SpeedVerdict(
            source=self.source,
            subject=self.subject,
            measured=self.measured,
            size_bytes=self.size_bytes,
            unit=self.unit,
            ceiling=self.ceiling,
            reference=self.reference,
            tolerance=self.tolerance,
            outcome=outcome,
            reason=reason,
        )


def _scale_of(run: Run, profile: Profile) -> tuple[str, int, int]:
    """Return collective, ranks and nodes of a run. Raises NotComparable if its speed cannot be judged."""
    if run.verdict != "ok":
        raise NotComparable(f"its verdict is {run.verdict} ({run.reason}), so its speed is not judged")
    if run.ranks == 1:
        raise NotComparable("one rank moves nothing between GPUs: not applicable")
    if run.device and _names_gpu(run) and not profile.has(run.device):
        raise NotComparable(f"it ran on {run.device}, and {profile.name} has {' or '.join(profile.gpu.names)}")
    if run.collective and run.ranks and run.nodes:
        return run.collective, run.ranks, run.nodes
    facts = {"the collective": run.collective, "the number of ranks": run.ranks, "the number of nodes": run.nodes}
    missing = [fact for fact, value in facts.items() if not value]
    raise NotComparable(f"the output does not say {' and '.join(missing)}")


def _names_gpu(run: Run) -> bool:
    """Return whether the output says which GPU it was: a driver calls one that it does not know a graphics device."""
    return run.device is not None and not run.device.endswith("Graphics Device")


def _least_size(run: Run) -> int:
    """Return the least size that shows bandwidth.

    Collectives that divide the data round 1 GiB down, by up to 16 bytes for each rank.
    """
    return GATE_BYTES - 16 * (run.ranks or 1)
