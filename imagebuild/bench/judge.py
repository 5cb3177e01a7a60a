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
from imagebuild.bench.profiles import Measured, Profile
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
    subject = describe_run(run.collective, run.ranks, run.nodes)
    facts = (run.source, subject, "GB/s", measured, size)
    try:
        collective, ranks, nodes = scale = _scale_of(run, profile)
        layout = rank_layout(profile, ranks, nodes)
        if measured is None or size is None:
            raise NotComparable("no bus bandwidth was read")
    except NotComparable as reason:
        return _judged(*facts, problem=str(reason))
    # A class that the collective does not have, such as a ring of alltoall, was not what it used.
    algorithm = context.algorithm if context.algorithm in algorithms_of(collective) else None
    ceiling = hard_ceiling(collective, ranks, layout.domains, layout.hardware, algorithm)
    if algorithm and ceiling is None:
        return _judged(*facts, problem=f"{profile.name} cannot run {subject} with {algorithm}")
    limit = None
    if ceiling:
        what = f"{ceiling.algorithm} {collective} ceiling: {ceiling.formula}"
        limit = Limit(value=round(ceiling.value, 3), unit="GB/s", what=what)
    references = [r for r in profile.references if (r.collective, r.ranks, r.nodes) == scale]
    if algorithm:
        fitting = [r for r in references if r.algorithm in (None, algorithm)]
    else:  # what the library chose itself
        fitting = [r for r in references if not r.forced]
    reference = max(fitting, key=lambda r: r.algorithm == algorithm, default=None)
    suffix = f" with {algorithm}" if algorithm and references else ""
    missing = f"{profile.name} has no reference for {subject}{suffix}"
    if size < _least_size(run):
        reference, missing = None, f"the largest size is {size} bytes; speed is judged at 1 GiB or more"
    others = [r for r in references if r is not reference and r.algorithm and measured >= r.rate * r.tolerance]
    hints = [
        f"{measured / r.rate:.0%} of the reference with {r.algorithm}: was the library made to use it?" for r in others
    ]
    return _judged(
        *facts,
        ceiling=limit,
        reference=reference,
        missing=missing,
        note="" if _names_gpu(run) else f"the output does not name the GPU, so it is taken for {profile.name}",
        hint_if_failed=hints[0] if hints else "",
    )


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
    problem = "" if pairs else "no pair was measured"
    return _judged(
        test.source,
        name,
        "GB/s",
        min(pairs, default=None),
        problem=problem if test.status == "passed" else f"the test's status is {test.status}",
        ceiling=ceilings.copy_ceiling(profile, name) if pairs and test.status == "passed" else None,
        highest=max(pairs, default=None),
        reference=next((copy for copy in profile.copies if copy.is_for(name)), None),
        missing=f"{profile.name} has no reference for this test",
        note="the worst pair" if len(pairs) > 1 else "",
    )


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
    rows = [(row.bw_average, row.size_bytes) for row in table.rows if row.bw_average is not None]
    problems = (
        (table.verdict != "ok", f"its verdict is {table.verdict}: {table.reason}"),
        (not rows, "no bandwidth was measured"),
        (
            table.unit not in ceilings.GBIT_UNITS,
            "the unit was not printed; run with --report_gbits and keep the text",
        ),
    )
    if problem := next((text for holds, text in problems if holds), ""):
        return _judged(table.source, test, "Gb/s", problem=problem)
    value, size = max(rows)
    # The output does not say whether buffers were in GPU memory, so the lower reference counts.
    fitting = [wire for wire in profile.wires if wire.is_for(test)]
    reference = min(fitting, key=lambda wire: wire.rate * wire.tolerance, default=None)
    return _judged(
        table.source,
        test,
        "Gb/s",
        value * ceilings.GBIT_UNITS[table.unit or ""],
        size,
        ceiling=ceilings.wire_ceiling(profile, test),
        reference=reference,
        missing=f"{profile.name} has no reference for this test",
        note=f"the reference is for {reference.memory} memory" if reference else "",
    )


def _judged(
    source: str,
    subject: str,
    unit: str,
    measured: float | None = None,
    size_bytes: int | None = None,
    *,
    problem: str = "",
    ceiling: Limit | None = None,
    highest: float | None = None,
    reference: Measured | None = None,
    missing: str = "",
    note: str = "",
    hint_if_failed: str = "",
) -> SpeedVerdict:
    """Return the verdict, with a `problem` or without a reference (`missing` says why) as not comparable.

    `highest` is what must not be above the ceiling, if it is not the measurement itself.
    """
    outcome: SpeedOutcome = "not-comparable"
    tolerance = limit = None
    highest = highest or measured or 0.0
    if problem or measured is None:
        reason = problem
    elif ceiling and highest > ceiling.value * (1 + MARGIN):
        outcome, measured = "measurement-error", highest
        reason = "more than the hardware can move: wrong profile, scale or measurement"
    elif reference is None:
        reason = missing
    else:
        tolerance = reference.tolerance
        rate = reference.rate * (8 if unit == "Gb/s" else 1)
        limit = Limit(value=rate, unit=unit, what=f"{reference.source}, {reference.date}")
        outcome = "passed" if measured / rate >= tolerance else "failed"
        least = "at least" if outcome == "passed" else "below"
        text = f"{measured / rate:.1%} of the reference, {least} the {tolerance:.0%} that pass"
        reason = "; ".join(filter(None, (text, note, hint_if_failed if outcome == "failed" else "")))
    if ceiling and measured is not None:
        reason += f"; {measured / ceiling.value:.0%} of the ceiling"
    return SpeedVerdict(
        source=source, subject=subject, measured=measured, size_bytes=size_bytes, unit=unit, ceiling=ceiling,
        reference=limit, tolerance=tolerance, outcome=outcome, reason=reason,
    )  # fmt: skip


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
