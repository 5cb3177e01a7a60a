"""Judgements of speed: every result beside the hardware's ceiling and what others measured. Pure.

Whether data were right is not asked here: a run whose verdict is not `ok` is not judged for speed. The rules:

* A measurement above its ceiling by more than `MARGIN` is a mistake of measuring, however fast it looks.
* A collective is judged by its best row of 1 GiB or more, never by the average over sizes.
* It fails below tolerance * reference. Without a reference for exactly its ranks and nodes it is not comparable.
* What ran on other hardware than the profile's, or at an unknown scale, is not comparable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from imagebuild import transfers
from imagebuild.ceilings import AlgorithmName, Ceiling, classes, hard_ceiling
from imagebuild.errors import ConfigError
from imagebuild.judgement import Judgement, Limit, Outcome
from imagebuild.placing import place
from imagebuild.profiles import Profile, Reference
from imagebuild.results import p2p
from imagebuild.results.models import BandwidthTest, Results, Run, Table

MARGIN = 0.02
"""How far above a ceiling a figure may be before it is called a mistake. Timers start late and figures are rounded: a
loopback on a 200 Gb/s adapter was seen at 201.8 Gb/s."""
GATE_BYTES = 2**30
"""Smaller messages show latency, not bandwidth."""


@dataclass(frozen=True)
class Known:
    """What the caller knows about runs whose output does not say it."""

    ranks: int | None = None
    nodes: int | None = None
    """Hosts."""
    algorithm: str | None = None
    """Class that the library was made to use, such as `ring` with NCCL_NVLS_ENABLE=0."""


def judge(results: Results, profile: Profile, known: Known | None = None) -> tuple[Judgement, ...]:
    """A judgement for each run, matrix of bandwidths and table of bandwidths, in the order of the results.

    Raises ConfigError for an algorithm that is not a class of `ceilings`.
    """
    known = known or Known()
    if known.algorithm and known.algorithm not in get_args(AlgorithmName):
        raise ConfigError(f"algorithm {known.algorithm!r}: not one of {', '.join(get_args(AlgorithmName))}")
    sources = {test.source for test in results.tests}
    idle = {s for s in sources if p2p.enabling_changes_nothing([t for t in results.tests if t.source == s])}
    return (
        *(judge_run(run, profile, known) for run in results.runs),
        *(judge_matrix(test, profile, peers=test.source not in idle) for test in results.tests if test.unit == "GB/s"),
        *(judge_table(table, profile) for table in results.tables if not _of_latency(table)),
    )


def judge_run(run: Run, profile: Profile, known: Known) -> Judgement:  # noqa: PLR0911 - each return is a reason
    """One table of nccl-tests, by its best row of 1 GiB or more."""
    run = run.model_copy(update={"ranks": run.ranks or known.ranks, "nodes": run.nodes or known.nodes})
    measured, size = best_row(run)
    base = _Draft(run.source, subject(run.collective, run.ranks, run.nodes), "GB/s", measured, size)
    scale = _comparable(run, profile)
    if isinstance(scale, str):
        return base.end("not-comparable", scale)
    spot = place(profile, scale[1], scale[2])
    if isinstance(spot, str):
        return base.end("not-comparable", spot)
    if measured is None or size is None:
        return base.end("not-comparable", "no bus bandwidth was read")
    # A class that the collective has not, such as a ring of alltoall, was not what it used.
    algorithm = known.algorithm if known.algorithm in classes(scale[0]) else None
    ceiling = hard_ceiling(scale[0], scale[1], spot.domains, spot.hardware, algorithm)
    if ceiling is None and algorithm:
        return base.end("not-comparable", f"{profile.name} cannot run {base.subject} with {algorithm}")
    base.ceiling = _limit(ceiling) if ceiling else None
    if base.above():
        return base.error()
    if size <= _gate(run):
        return base.end("not-comparable", f"the largest size is {size} bytes; speed is judged at 1 GiB or more")
    candidates = [r for r in profile.references if (r.collective, r.ranks, r.nodes) == scale]
    reference = _chosen(candidates, algorithm)
    if reference is None:
        where = f" with {algorithm}" if algorithm and candidates else ""
        return base.end("not-comparable", f"{profile.name} has no reference for {base.subject}{where}")
    base.reference = transfers.cited(reference, reference.rate, "GB/s")
    base.tolerance = reference.tolerance
    note = "" if _named(run) else f"the output does not name the GPU, so it is taken for {profile.name}"
    return base.compare(measured, _hint(measured, reference, candidates), note)


def best_row(run: Run) -> tuple[float | None, int | None]:
    """Highest bus bandwidth of either placement and its size: of rows that are large enough, else of all."""
    values = [
        (half.busbw_gb_s, row.size_bytes)
        for row in run.rows
        for half in (row.out_of_place, row.in_place)
        if half and half.busbw_gb_s is not None
    ]
    large = [value for value in values if value[1] > _gate(run)]
    return max(large or values, default=(None, None))


def subject(collective: str | None, ranks: int | None, nodes: int | None) -> str:
    """`all_reduce, 16 ranks, 2 nodes`."""
    parts = [collective or "unknown collective"]
    parts += [_count(ranks, "rank")] if ranks else []
    parts += [_count(nodes, "node")] if nodes else []
    return ", ".join(parts)


def judge_matrix(test: BandwidthTest, profile: Profile, *, peers: bool = True) -> Judgement:
    """A matrix of nvbandwidth or p2pBandwidthLatencyTest, in GB/s: its worst pair beside the reference, its best
    beside the ceiling. Without `peers`, the same run was as fast with P2P disabled.
    """
    name = test.name or "unnamed test"
    cells = pairs(test)
    worst = min(cells, default=None)
    base = _Draft(test.source, name, "GB/s", worst, None)
    if test.status != "passed":
        return base.end("not-comparable", f"the test's status is {test.status}")
    if worst is None:
        return base.end("not-comparable", "no pair was measured")
    base.ceiling = transfers.copy_ceiling(profile, name)
    if not peers and "p2p_enabled" in name:
        return base.end("failed", "no pair gains by P2P: it is off, or does not work")
    if base.above(max(cells)):
        base.measured = max(cells)
        return base.error()
    reference = transfers.copy_reference(profile, name)
    if reference is None:
        return base.end("not-comparable", f"{profile.name} has no reference for it")
    base.reference = transfers.cited(reference, reference.rate, "GB/s")
    base.tolerance = reference.tolerance
    return base.compare(worst, "", "the worst pair" if len(cells) > 1 else "")


def pairs(test: BandwidthTest) -> list[float]:
    """The cells that are between two devices: the diagonal of a matrix between GPUs is a copy within one of them."""
    matrix = test.matrix or ()
    width = len(matrix[0]) if matrix else 0
    name = test.name or ""
    if "device_to_device_bidirectional" in name and len(matrix) == 3 * width:
        matrix = matrix[2 * width :]  # two directions and, below them, their total
    between = "device_to_device" in name or "p2p" in name
    cells = ((i, j, cell) for i, row in enumerate(matrix) for j, cell in enumerate(row))
    return [cell for i, j, cell in cells if cell is not None and not (between and i == j)]


def judge_table(table: Table, profile: Profile) -> Judgement:
    """A bandwidth table of perftest, by its best row, in Gb/s."""
    base = _Draft(table.source, table.test or "unknown test", "Gb/s", None, None)
    if table.verdict != "ok":
        return base.end("not-comparable", f"its verdict is {table.verdict}: {table.reason}")
    rows = [(row.bw_average, row.size_bytes) for row in table.rows if row.bw_average is not None]
    if not rows:
        return base.end("not-comparable", "no bandwidth was measured")
    if table.unit not in transfers.GBIT:
        return base.end("not-comparable", "the unit was not printed; run with --report_gbits and keep the text")
    value, base.size_bytes = max(rows)
    base.measured = measured = value * transfers.GBIT[table.unit]
    base.ceiling = transfers.wire_ceiling(profile, table.test or "")
    if base.above():
        return base.error()
    reference = transfers.wire_reference(profile, table.test or "")
    if reference is None:
        return base.end("not-comparable", f"{profile.name} has no reference for it")
    base.reference = transfers.cited(reference, reference.rate * 8, "Gb/s")
    base.tolerance = reference.tolerance
    return base.compare(measured, "", f"the reference is for {reference.memory} memory")


def _of_latency(table: Table) -> bool:
    return any(row.latency_us for row in table.rows)


@dataclass
class _Draft:
    """A judgement while it is made."""

    source: str
    subject: str
    unit: str
    measured: float | None
    size_bytes: int | None
    ceiling: Limit | None = None
    reference: Limit | None = None
    tolerance: float | None = None

    def above(self, value: float | None = None) -> bool:
        value = self.measured if value is None else value
        return self.ceiling is not None and value is not None and value > self.ceiling.value * (1 + MARGIN)

    def error(self) -> Judgement:
        assert self.ceiling
        return self.end("measurement-error", "more than the hardware can move: wrong profile, scale or measurement")

    def compare(self, measured: float, hint: str, note: str) -> Judgement:
        assert self.reference is not None
        assert self.tolerance is not None
        share = measured / self.reference.value
        passed = share >= self.tolerance
        text = f"{share:.1%} of the reference, {'at least' if passed else 'below'} the {self.tolerance:.0%} that pass"
        return self.end("passed" if passed else "failed", "; ".join(filter(None, (text, note, "" if passed else hint))))

    def end(self, outcome: Outcome, reason: str) -> Judgement:
        if self.ceiling and self.measured is not None:
            reason += f"; {self.measured / self.ceiling.value:.0%} of the ceiling"
        return Judgement(outcome=outcome, reason=reason, **vars(self))


def _comparable(run: Run, profile: Profile) -> tuple[str, int, int] | str:
    """Collective, ranks and nodes of a run that can be judged, or why it cannot."""
    elsewhere = _named(run) and not profile.has(run.device or "")
    reasons = (
        (run.verdict != "ok", f"its verdict is {run.verdict} ({run.reason}): speed counts once data are right"),
        (run.ranks == 1, "one rank moves nothing between GPUs: not applicable"),
        (elsewhere, f"it ran on {run.device}, and {profile.name} has {' or '.join(profile.gpu.names)}"),
    )
    if why := next((reason for holds, reason in reasons if holds), ""):
        return why
    if run.collective and run.ranks and run.nodes:
        return run.collective, run.ranks, run.nodes
    unknown = {"which collective it was": run.collective, "its ranks": run.ranks, "its nodes": run.nodes}
    return f"{' and '.join(what for what, value in unknown.items() if not value)}: not known"


def _named(run: Run) -> bool:
    """Whether the output says which GPU it was: a driver calls one that it does not know a graphics device."""
    return run.device is not None and not run.device.endswith("Graphics Device")


def _chosen(candidates: list[Reference], algorithm: str | None) -> Reference | None:
    """The reference for the library's own choice, or for the class that it was made to use."""
    fit = [r for r in candidates if (r.algorithm in (None, algorithm) if algorithm else not r.forced)]
    return max(fit, key=lambda r: r.algorithm == algorithm, default=None)


def _hint(measured: float, reference: Reference, candidates: list[Reference]) -> str:
    """What a failed run may have been instead."""
    for other in candidates:
        if other is not reference and other.algorithm and measured >= other.rate * other.tolerance:
            return (
                f"{measured / other.rate:.0%} of the reference with {other.algorithm}: was the library made to use it?"
            )
    return ""


def _gate(run: Run) -> int:
    """Rounding of divided collectives makes a little less of 1 GiB: by up to 16 bytes for each rank."""
    return GATE_BYTES - 16 * (run.ranks or 1) - 1


def _limit(ceiling: Ceiling) -> Limit:
    what = f"{ceiling.algorithm} {ceiling.collective} ceiling: {ceiling.formula}"
    return Limit(value=round(ceiling.value, 3), unit="GB/s", what=what)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
