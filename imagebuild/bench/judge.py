"""Judge results: are the data right, did all ranks and GPUs take part, is the result fast enough? Pure.

Every result gets three claims, by the rules in docs/report.md. A claim passes if the output proves it, fails if the
output contradicts it, and stays open if the output does not say.

If the user passed no numbers of ranks and nodes, there is one rank for each GPU that the nodes have according to the
profile. A result whose parts differ too much (`_uneven`) is not fast enough, however fast its best part is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any, get_args

from imagebuild.bench import ceilings, models
from imagebuild.bench.arithmetic import shape_of
from imagebuild.bench.ceilings import NotComparable, RankLayout, rank_layout
from imagebuild.bench.hints import find_hints
from imagebuild.bench.models import BandwidthTest, Claim, Diagnostic, Judgement, Limit, Openness, Run, SpeedClaim
from imagebuild.bench.profiles import Measured, Profile
from imagebuild.core.errors import ConfigError, plural
from imagebuild.core.patterns import data_of

_LIMITS = data_of(__file__)
MARGIN, COLLAPSE, PAIR, SICK = itemgetter("margin", "collapse", "pair", "sick")(_LIMITS)
STEADY_BYTES, SICK_BYTES, NEVER_COMPARE = itemgetter("steady_bytes", "sick_bytes", "never_compare")(_LIMITS)
GATE_BYTES: int = _LIMITS["gate_bytes"]
WIRE_BYTES: int = _LIMITS["wire_bytes"]
NO_PARTICIPATION = Claim(state="not applicable", reason="the output does not list ranks or GPUs")


@dataclass(frozen=True)
class Expected:
    """Values that the user expects, as in `Launch`. A value that the output does not contain is assumed."""

    ranks: int | None = None
    nodes: int | None = None
    algorithms: tuple[str, ...] = ()
    least: float | None = None
    """Bus bandwidth in GB/s that the best row of 1 GiB or more must reach."""
    gpus: int | None = None
    domains: int | None = None
    collective: str | None = None

    def of(self, result: models.Result) -> Expected:
        """Return the expected values, completed by those of the program that started the benchmark."""
        known = dict(result.launch or models.Launch())
        return replace(self, **{name: getattr(self, name) or known[name] for name in known.keys() & vars(self).keys()})

    def gpus_of(self, profile: Profile | None, nodes: int | None) -> int | None:
        """Return the number of GPUs that should take part. None if it is unknown."""
        each = self.gpus or (profile.node.gpus if profile else None)
        return self.ranks or (each * nodes if each and nodes else None)


def accepted_kinds(kinds: Iterable[str]) -> tuple[Openness, ...]:
    """Return the values of `--allow` once each. Raises ConfigError if one is unknown."""
    known: tuple[Openness, ...] = get_args(Openness)
    _refuse_unknown("--allow", kinds, known, "kind")
    return tuple(kind for kind in known if kind in kinds)


def _refuse_unknown(option: str, words: Iterable[str], known: Sequence[str], what: str) -> None:
    for word in set(words).difference(known):
        raise ConfigError(f"{option} {word}: unknown {what}; use one of {', '.join(known)}")


def judge_results(
    results: models.Results, profile: Profile | None = None, expected: Expected | None = None
) -> tuple[Judgement, ...]:
    """Return a judgement (three claims) for each result in the order of the results, then one for each dcgmi diag.
    Raises ConfigError if an expected algorithm or collective is unknown."""
    expected = expected or Expected()
    _refuse_unknown("--algorithm", expected.algorithms, get_args(models.AlgorithmName), "class of algorithms")
    asked = [] if expected.collective is None else [expected.collective]
    _refuse_unknown("--collective", asked, get_args(models.Collective), "collective")
    diagnoses = groupby(results.diagnostics, key=lambda diagnostic: diagnostic.source)
    judged = [
        *(_judge_run(run, results.runs, profile, expected) for run in results.runs),
        *(_judge_matrix(test, profile, expected) for test in results.tests),
        *(_judge_table(table, profile) for table in results.tables),
    ]
    return (
        *(_with_hints(*pair, profile) for pair in zip(judged, results.measured, strict=True)),
        *(_judge_diagnostics(source, tuple(group), profile, expected) for source, group in diagnoses),
    )


def judge_sources(sources: Iterable[models.Source], profile: Profile | None = None) -> tuple[models.Source, ...]:
    """Return the files, with the fallbacks in those that have no results. Without a profile, earlier hints remain."""
    return tuple(
        source.model_copy(update={"hints": find_hints(source.carried, profile)})
        if source.carried and (profile or not source.hints)
        else source
        for source in sources
    )


def _with_hints(judgement: Judgement, result: models.Measurement, profile: Profile | None) -> Judgement:
    """Return the judgement with the fallbacks and the probable causes of low speed."""
    speed = judgement.speed
    hints = find_hints(
        result.carried, profile, devices=result.devices, measured=speed.measured,
        ceiling=speed.ceiling.value if speed.ceiling else None, speed=speed.state,
        is_host_copy=isinstance(result, BandwidthTest) and "host" in result.subject,
    )  # fmt: skip
    return judgement.model_copy(update={"hints": hints}) if hints else judgement


def data_claim(result: models.Measurement | Diagnostic) -> Claim:
    """Return the claim about the data of a result: `right` if the benchmark validated the data and finished."""
    if result.verdict != "ok":
        otherwise: models.ClaimWord = "wrong" if isinstance(result, Diagnostic) else "unfinished"
        state = _LIMITS["data"].get(result.verdict, otherwise)
        allow: Openness | None = "unvalidated" if state == "not compared" else None
        return Claim(state=state, reason=": ".join(filter(None, (result.verdict, result.reason))), allow=allow)
    match result:
        case BandwidthTest():
            dead = sum(pair <= 0 for pair in result.pairs)
            reason = f"{dead} of {plural(len(result.pairs), 'figure')} are not above 0"
            right = Claim(state="right", reason="the benchmark compared the copied data")
            return Claim(state="unfinished", reason=reason) if dead else right
        case Run(compared=True, partial_rows=0) | models.PerftestTable(compared=True) | Diagnostic():
            return Claim(state="right", reason=result.reason)
        case Run() if result.tool not in NEVER_COMPARE:
            return Claim(state="not compared", reason=result.reason, allow="unvalidated")
    return Claim(state="not compared", reason="this benchmark never compares data")


def _unsound(data: Claim) -> str:
    return "its data failed, so its speed is not judged" if data.standing() == "failed" else ""


def _judge_run(run: Run, runs: Sequence[Run], profile: Profile | None, expected: Expected) -> Judgement:
    """Return the judgement on one run. `runs` are all runs of the report."""
    expected = expected.of(run)
    collective = run.collective or expected.collective or _possible_collective(run, profile, expected)
    run = run.model_copy(update={"collective": collective})
    ranks, nodes = run.ranks or expected.ranks, _nodes_of(run, expected)
    if run.launch and run.launch.one_host and (nodes or 1) > 1:
        reason = "the nodes are containers on one host, whose speed no profile describes"
        participation, speed = NO_PARTICIPATION, SpeedClaim(state="not applicable", reason=reason)
    else:
        participation = _participation(run, runs, profile, expected)
        whole = run.model_copy(update={"ranks": ranks, "nodes": nodes})
        speed = _speed_of_run(whole, profile, expected, _unsound(data_claim(run)))
    subject = models.describe_run(run.collective, ranks, nodes)
    return Judgement(source=run.source, subject=subject, data=data_claim(run), participation=participation, speed=speed)


def _possible_collective(run: Run, profile: Profile | None, expected: Expected) -> str | None:
    """Return the only collective that fits the figures and can be as fast on the hardware. None if several can."""
    ranks, nodes, (measured, _) = run.ranks or expected.ranks, _nodes_of(run, expected), best_row(run)
    if not (profile and ranks and nodes and measured and run.candidates):
        return None
    try:
        layout = rank_layout(profile, ranks, nodes, expected.domains)
    except NotComparable:
        return None
    limits = {name: ceilings.class_ceilings(name, ranks, layout) for name in run.candidates}
    most = {name: max((c.value for c in known), default=0.0) for name, known in limits.items()}
    possible = [name for name, value in most.items() if measured <= value * (1 + MARGIN)]
    return possible[0] if len(possible) == 1 else None


def _nodes_of(run: Run, expected: Expected) -> int | None:
    """Return the number of hosts in the output, or else the expected number, which also counts if ranks seem to share
    GPUs: NCCL does not allow that, so several hosts have the same name."""
    if run.nodes == 1 and run.gpus and expected.nodes and run.gpus * expected.nodes == run.ranks:
        return expected.nodes
    return run.nodes or expected.nodes


def _participation(run: Run, runs: Sequence[Run], profile: Profile | None, expected: Expected) -> Claim:
    """Return the claim about participation: whether the ranks, nodes and GPUs of a run are the expected ones."""
    ranks, nodes = run.ranks or expected.ranks, _nodes_of(run, expected)
    counts = ((ranks, expected.ranks, "rank"), (nodes, expected.nodes, "node"))
    wanted = expected.gpus_of(profile, nodes)
    differing = [(is_, should, noun) for is_, should, noun in counts if should and is_ and is_ != should]
    wrong = [f"{is_} of {plural(should, noun)} took part" for is_, should, noun in differing]
    if expected.collective not in (None, run.collective):
        wrong.append(f"the output is of {run.collective}, not of {expected.collective}")
    wrong += [_not_joined(run, runs, wanted), _foreign_devices(run.devices, profile)]
    wrong.append(_wrong_scale(run, ranks))
    if ranks and run.gpus and run.gpus < ranks and nodes == run.nodes:
        shared = f"{ranks} ranks share {plural(run.gpus, 'GPU')}"
        wrong.append(f"{shared}; if several hosts have this name, pass their number with --nodes")
    if run.groups > 1:
        groups = f"{run.groups} communicators ran at the same time, and the network between them was not used"
        wrong += [groups] if any(wrong) else []
    if any(wrong):
        return Claim(state="incomplete", reason="; ".join(filter(None, wrong)))
    asked: Openness | None = "partial" if profile or expected.ranks or expected.nodes or expected.gpus else None
    unknown = [f"{noun}s" for count, _, noun in counts if count is None]
    if ranks is None or (unknown and asked):
        what = f"the output does not list the {' and '.join(unknown)}"
        if run.devices and run.tool not in NEVER_COMPARE:
            what = "the output's list of devices is incomplete"
        options = " and ".join(f"--{noun}" for noun in unknown)
        return Claim(state="not known", reason=f"{what}; say how many with {options}", allow=asked)
    scale = ", ".join(plural(count, noun) for count, _, noun in counts if count)
    scale += f" each; {groups}" if run.groups > 1 else ""
    if not asked:
        hints = (scale, _not_joined(run, runs, 2), "neither a profile nor --ranks says how many there should be")
        return Claim(state="not known", reason="; ".join(filter(None, hints)))
    # Groups may also consist of one GPU of each node.
    found = wanted if wanted and run.groups > 1 and ranks * run.groups % wanted == 0 else ranks
    return _gpus_claim(found, wanted or ranks, scale, None if expected.ranks else nodes)


def _not_joined(run: Run, runs: Iterable[Run], wanted: int | None) -> str:
    """Return a sentence if the ranks were not joined, else an empty text. Several runs of one rank look like the ranks
    of one job. Runs in different files count only if `wanted`, the expected number of ranks, is above 1."""
    if run.not_joined:
        return run.not_joined
    alike = [other for other in runs if run.ranks == other.ranks == 1 and other.collective == run.collective]
    tables, files = sum(other.source == run.source for other in alike), len({other.source for other in alike})
    if tables <= 1 and (files <= 1 or (wanted or 1) <= 1):
        return ""
    what = f"{tables} tables" if tables > 1 else f"{files} files with a table"
    return f"{what} of one rank each: the ranks were not joined; build nccl-tests with MPI=1"


def _gpus_claim(found: int, wanted: int, scale: str = "", nodes: int | None = None) -> Claim:
    """Return the claim that all wanted GPUs of `nodes` took part. If the numbers are equal, `scale` is the reason."""
    counts = f"{found} of {wanted} GPUs took part"
    if found != wanted:
        if nodes and found < wanted and found % nodes == 0:
            counts += f"; if fewer are meant, pass --gpus {found // nodes}"
        return Claim(state="incomplete", reason=counts, allow="partial" if found < wanted else None)
    return Claim(state="complete", reason=scale or counts)


def _foreign_devices(names: Iterable[str], profile: Profile | None) -> str:
    """Return a sentence about GPUs that the profile does not describe, or an empty text if there are none."""
    unknown = [name for name in names if not models.GENERIC_GPU.fullmatch(name)]
    if not profile or not (others := Counter(name for name in unknown if not profile.has(name))):
        return ""
    own = " or ".join(name.strip("*") for name in profile.gpu.names)
    ran = ", ".join(f"{count} \u00d7 {name}" if count > 1 else name for name, count in others.items())
    return f"the benchmark ran on {ran}, but {profile.name} describes {own}"


def _wrong_scale(run: Run, ranks: int | None) -> str:
    """Return a sentence if the figures are those of another number of ranks, else an empty text."""
    possible = shape_of(run.rows).ranks(run.collective) if run.collective and run.rows else None
    if not ranks or not possible or possible[0] <= ranks <= possible[1]:
        return ""
    (least, most), fewest = possible, plural(possible[0], "rank")
    fitting = fewest if least == most else f"{fewest} or more" if least > ranks else f"at most {most}"
    return f"the figures are those of {fitting}, not of {ranks}"


def _speed_of_run(run: Run, profile: Profile | None, expected: Expected, unsound: str) -> SpeedClaim:
    """Return the claim about the speed of a run. If speed cannot be judged, `unsound` is the reason, else empty."""
    measured, size = best_row(run)
    facts: dict[str, Any] = {"measured": measured, "size_bytes": size}
    if run.ranks == 1:
        return SpeedClaim(state="not applicable", reason="one rank moves nothing between GPUs", **facts)
    uneven = _uneven(_speeds(run, 0), STEADY_BYTES) or _uneven_placements(run)
    claim = None
    if expected.least is not None and not unsound:
        facts["floor"] = limit = Limit(value=expected.least, what="the limit set with --min-bw")
        if not _speeds(run, _least_size(run)):
            small = {"state": "not judged", "reason": _too_small(run), "allow": "unjudged"}
            claim = _sick(run, limit) or SpeedClaim(**small, **facts)
        elif (measured or 0) < expected.least:
            reason = f"less than the {expected.least:g} GB/s of --min-bw"
            claim = SpeedClaim(state="too slow", reason=reason, **facts)
        elif profile is None:
            claim = SpeedClaim(state="fast enough", **facts)
    if claim is None:
        unsound = unsound or _foreign_devices(run.devices, profile)
        problem = ""
        if profile and not unsound:
            try:
                claim = _speed_on_profile(run, profile, expected)
            except NotComparable as reason:
                problem = str(reason)
        claim = claim or _not_judged(profile, unsound, problem, **facts)
    claim = _evened(claim, uneven if not unsound else "")
    if claim.state == "too slow" and run.notes:
        claim = claim.model_copy(update={"reason": "; ".join((claim.reason, *run.notes))})
    return claim


def _speed_on_profile(run: Run, profile: Profile, expected: Expected) -> SpeedClaim:
    """Return the claim about the speed of a run. Raises NotComparable if the run does not fit the hardware."""
    if not (run.collective and run.ranks and run.nodes):
        noun = "nodes" if run.ranks else "ranks"
        what, option = (f"number of {noun}", noun) if run.collective else ("collective", "collective")
        raise NotComparable(f"the output does not say the {what}; pass it with --{option}")
    domains = expected.domains
    if run.clique and not domains and run.ranks % run.clique == 0:
        domains = run.ranks // run.clique
    claim = _speed_in_domains(run, profile, expected, domains)
    if domains or run.nodes == 1 or profile.hosts_per_domain == 1 or claim.state != "too slow":
        return claim
    # The hosts may belong to more domains than necessary.
    if _speed_in_domains(run, profile, expected, run.nodes).state == "too slow":
        return claim
    reason = f"the output does not say how many NVLink domains the {run.nodes} nodes are in; pass it with --domains"
    update = {"state": "not judged", "allow": "unjudged", "reason": f"{reason}; if as few as possible: {claim.reason}"}
    return claim.model_copy(update=update)


def _speed_in_domains(run: Run, profile: Profile, expected: Expected, domains: int | None) -> SpeedClaim:
    """Return the claim about the speed of a run in `domains` NVLink domains. None: as few as possible.
    Raises NotComparable if the run does not fit the hardware."""
    assert run.collective, "checked by the caller"
    collective, ranks, nodes = scale = run.collective, run.ranks or 0, run.nodes or 1
    layout = rank_layout(profile, ranks, nodes, domains)
    measured, size = best_row(run)
    if measured is None or size is None:
        raise NotComparable("no bus bandwidth was read")
    # Leave out classes of algorithms that do not exist for this collective, such as a ring for alltoall.
    own = {algorithm.name for algorithm in ceilings.ALGORITHMS if collective in algorithm.collectives}
    used = own.intersection(expected.algorithms or run.algorithms)
    names = " or ".join(sorted(used))
    possible = ceilings.class_ceilings(collective, ranks, layout)
    known = [ceiling for ceiling in possible if not used or ceiling.algorithm in used]
    if used and not known:
        raise NotComparable(f"{profile.name} cannot run {models.describe_run(*scale)} with {names}")
    hardest = max(known, key=lambda ceiling: ceiling.value, default=None)
    # The hosts of references are in as few domains as possible.
    is_least = layout.domains == ceilings.least_domains(profile, nodes)
    references = profile.references_at(*scale) if is_least else []
    # If the class is unknown, the run is compared with references in which the library chose the algorithm.
    fitting = [r for r in references if (r.algorithm in (None, *used) if used else not r.forced)]
    reference = max(fitting, key=lambda r: r.algorithm in used, default=None)
    missing, floor = "", floor_of(profile, layout, known)
    if size < _least_size(run):
        if sick := _sick(run, floor):
            return sick
        reference, missing, floor = None, _too_small(run), None
    elif reference is None:
        suffix = f" with {names}" if used and references else ""
        missing = f"{profile.name} has no reference for {models.describe_run(*scale)}{suffix}"
    notes = [f"as {names}"] if len(used) == 1 else []
    if not run.devices:
        notes.append(f"the output does not name the GPU; imagebuild assumes that it is the GPU of {profile.name}")
    if not reference or measured < reference.rate * reference.tolerance:
        others = (r for r in references if r is not reference and r.algorithm and measured >= r.rate * r.tolerance)
        if other := next(others, None):
            share, name = measured / other.rate, other.algorithm
            notes.append(f"{share:.0%} of the reference with {name}: was NCCL told to use {name}?")
    what = f"{hardest.algorithm} {collective} ceiling: {hardest.formula}" if hardest else ""
    limit = Limit(value=round(hardest.value, 3), what=what) if hardest else None
    claim = _speed(measured, size, (limit, floor), reference, missing=missing, notes=notes)
    return claim.model_copy(update={"algorithm": names}) if len(used) == 1 else claim


def _sick(run: Run, floor: Limit | None) -> SpeedClaim | None:
    """Return the claim that a run without large messages is too slow, or None if it may be healthy."""
    least = max(STEADY_BYTES, SICK_BYTES * (run.ranks or 1))
    measured, size = max(_speeds(run, least), default=(None, None))
    if not floor or measured is None or measured >= SICK * floor.value:
        return None
    least_text = f"{SICK:.0%} of the floor of {floor.value:.1f} GB/s ({floor.what})"
    reason = f"only {measured:g} GB/s at {size} bytes, less than {least_text}"
    return SpeedClaim(state="too slow", reason=reason, measured=measured, size_bytes=size, floor=floor)


def _too_small(run: Run) -> str:
    largest = max((row.size_bytes for row in run.rows), default=0)
    return f"the largest size is {largest} bytes; speed is judged at 1 GiB or more"


# Parts of a result that differ too much


def _uneven(speeds: Iterable[tuple[float, int]], least: int) -> str:
    """Return a sentence if a bandwidth at `least` bytes or more is far below one at a smaller size, else an empty
    text."""
    best, at = 0.0, 0
    for size, group in groupby(sorted(speeds, key=lambda pair: (pair[1], -pair[0])), key=lambda pair: pair[1]):
        for speed, _ in group:
            if speed > best:
                best, at = speed, size
            elif size >= least and speed < COLLAPSE * best:
                return f"only {speed:g} GB/s at {size} bytes, less than half of the {best:g} GB/s at {at} bytes"
    return ""


def _uneven_placements(run: Run) -> str:
    """Return a sentence if one placement is far below the other in a large row, else an empty text."""
    for row in run.rows:
        speeds = [half.busbw_gb_s for half in row.halves if half.busbw_gb_s is not None]
        if row.size_bytes >= STEADY_BYTES and len(speeds) == 2 and min(speeds) < COLLAPSE * max(speeds):
            names = ("out of place", "in place")
            slow, fast = names if speeds[0] < speeds[1] else names[::-1]
            half = f"less than half of the {max(speeds):g} GB/s {fast}"
            return f"only {min(speeds):g} GB/s {slow} at {row.size_bytes} bytes, {half}"
    return ""


def _evened(claim: SpeedClaim, uneven: str) -> SpeedClaim:
    """Return the claim, or a claim that does not pass if the parts of the result are uneven."""
    if not uneven or claim.state not in ("fast enough", "not judged", "not applicable"):
        return claim
    if claim.state == "fast enough" or claim.allow:
        return claim.model_copy(update={"state": "too slow", "reason": uneven, "allow": None})
    return claim.model_copy(update={"state": "not judged", "reason": f"{claim.reason}; {uneven}"})


def floor_of(profile: Profile, layout: RankLayout, known: Sequence[ceilings.Ceiling]) -> Limit | None:
    """Return the floor: the bandwidth that every healthy run reaches, whichever class of algorithms is used.

    The floor is a fraction of the lowest ceiling. The fraction is the one in the `network` of the profile, or else the
    `floor_fraction` of the ceiling. Return None if no floor is known."""
    own = profile.network.floor if profile.network and layout.domains > 1 else None
    if not known or (own is None and layout.domains > 1 and layout.hosts > 1):
        return None  # between racks, collectives use only a small part of a rack's network bandwidth
    lowest = min(known, key=lambda ceiling: ceiling.least)
    fraction, source = (own.fraction, f"; {own.source}, {own.date}") if own else (lowest.floor_fraction, "")
    what = f"{fraction:.0%} of the lowest ceiling, {lowest.algorithm}: {lowest.least_formula}{source}"
    return Limit(value=round(fraction * lowest.least, 3), what=what) if fraction else None


def _speeds(run: Run, least: int) -> list[tuple[float, int]]:
    """Return the bus bandwidth and the size of each row of at least `least` bytes."""
    rows = (row for row in run.rows if row.size_bytes >= least)
    return [(row.busbw_gb_s, row.size_bytes) for row in rows if row.busbw_gb_s is not None]


def best_row(run: Run) -> tuple[float | None, int | None]:
    """Return the highest bus bandwidth and its message size, among rows of 1 GiB or more if there are any.
    Return None for both if no row has a bandwidth."""
    return max(_speeds(run, _least_size(run)) or _speeds(run, 0), default=(None, None))


def _least_size(run: Run) -> int:
    """Return the size from which a row counts as 1 GiB.
    To divide data evenly, a collective rounds 1 GiB down by up to 16 bytes for each rank."""
    return GATE_BYTES - 16 * (run.ranks or 1)


# Matrices of nvbandwidth, tables of perftest, ucx_perftest, OSU and NVSHMEM


def _judge_matrix(test: BandwidthTest, profile: Profile | None, expected: Expected) -> Judgement:
    """Return the judgement on a matrix. The slowest pair must reach the reference or floor. The fastest pair must not
    exceed the ceiling."""
    expected = expected.of(test)
    name, data, pairs, cells = test.subject, data_claim(test), test.pairs, test.cells
    participation = NO_PARTICIPATION
    listed, gpus = len(test.devices), test.size or len(test.devices)
    wanted = expected.gpus_of(profile, expected.nodes or 1)
    if problem := _foreign_devices(test.devices, profile):
        participation = Claim(state="incomplete", reason=problem)
    elif 0 < gpus < listed and test.verdict != "waived":
        reason = f"the matrix has {plural(gpus, 'GPU')}, but the output lists {listed}"
        participation = Claim(state="incomplete", reason=reason, allow="partial")
    elif len(pairs) < len(cells):
        joined = profile and any(link.gpus >= gpus for link in profile.links)
        state: models.ClaimWord = "incomplete" if joined else "not known"
        reason = f"{len(cells) - len(pairs)} of {plural(len(cells), 'pair')} were not measured (N/A in the output)"
        participation = Claim(state=state, reason=reason, allow="partial" if profile else None)
    elif wanted and gpus and test.verdict != "waived":
        others = f"{gpus} of {wanted} GPUs took part; the output names only {listed} of them"
        scale, nodes = others if 0 < listed < gpus else "", None if expected.ranks else expected.nodes or 1
        participation = _gpus_claim(gpus, wanted, scale, nodes)
    unsound = problem or _unsound(data)
    if test.verdict == "waived":
        speed = SpeedClaim(state="not applicable")
    elif (test.unit or "GB/s") != "GB/s" or "local" in name:
        reason = "times are not judged" if test.unit != "GB/s" else "the test uses no link between devices"
        speed = SpeedClaim(state="not applicable", reason=reason)
    else:
        lowest, highest = min(pairs, default=None), max(pairs, default=None)
        none = "no pair was measured" if test.unit else "the output does not say the unit"
        lowest = lowest if test.unit else None
        speed = _speed_of_path(profile, name, measured=lowest, highest=highest, unsound=unsound, problem=none)
        middle = median(pairs) if pairs else 0.0
        # Between slots, and between GPUs that only some links join, healthy pairs differ.
        if lowest is not None and lowest < PAIR * middle and not (profile and len(profile.links) > 1) and not unsound:
            speed = _evened(speed, f"the worst pair reaches {lowest:g} GB/s, {lowest / middle:.0%} of the median pair")
    return Judgement(source=test.source, subject=name, data=data, participation=participation, speed=speed)


def _judge_table(table: models.PerftestTable, profile: Profile | None) -> Judgement:
    """Return the judgement on a table, by the row with the highest average bandwidth. If the profile has a reference
    for the size of a row, that row counts."""
    test, data = table.subject, data_claim(table)
    best, foreign = table.best, _foreign_devices(table.devices, profile)
    unsound = foreign or _unsound(data)
    unit = ceilings.GB_UNITS.get(table.unit or "")
    scale = unit / table.ports if unit else None  # profiles describe one port
    speeds = {row.size_bytes or 0: row.bw_average * scale for row in table.rows if row.bw_average is not None and scale}
    size = best.size_bytes if best else None
    measured = best.bw_average * scale if best and best.bw_average is not None and scale else None
    unjudged = {
        "times are not judged": any(row.latency_us for row in table.rows),
        "no profile contains measured results of ucx_perftest": table.tool == "ucx_perftest",
        "the output of OSU does not say which link was used": table.tool == "osu",
        "atomic operations of 8 bytes show latency, not bandwidth": "Atomic" in test,
    }
    if reason := next((reason for reason, holds in unjudged.items() if holds), ""):
        speed = SpeedClaim(state="not applicable", reason=reason, measured=measured, size_bytes=size)
    else:
        problem = "no bandwidth was read"
        if best and not scale:
            problem = "the unit was not printed; run with --report_gbits and keep the text"
        speed = _speed_of_path(
            profile, test, measured=measured, size=size, unsound=unsound, problem=problem, sizes=speeds,
            queue_pairs=table.queue_pairs,
        )  # fmt: skip
    if not unsound and "Atomic" not in test:
        # OSU changes its protocol below 1 MiB.
        known = [(row.bw_average, row.size_bytes or 0) for row in table.rows if row.bw_average is not None]
        rows = ((bandwidth * (scale or 1), size) for bandwidth, size in known)
        speed = _evened(speed, _uneven(rows, 2**20 if table.tool == "osu" else WIRE_BYTES))
    participation = Claim(state="incomplete", reason=foreign) if foreign else NO_PARTICIPATION
    return Judgement(source=table.source, subject=test, data=data, participation=participation, speed=speed)


def _speed_of_path(
    profile: Profile | None, test: str, *, measured: float | None, size: int | None = None,
    highest: float | None = None, unsound: str, problem: str, sizes: Mapping[int, float] | None = None,
    queue_pairs: int | None = None,
) -> SpeedClaim:  # fmt: skip
    """Return the claim about the speed of a copy between devices or a test of one NIC.

    `highest` (default: `measured`) is compared with the ceiling. `problem` is the reason if nothing was measured.
    `sizes` maps sizes to bandwidths; a reference for one of these sizes is compared with its bandwidth. The output of
    perftest does not say whether the buffers were in host or GPU memory, so the lower of both references counts."""
    if profile is None or unsound or measured is None:
        return _not_judged(profile, unsound, problem, measured=measured, size_bytes=size)
    sizes = sizes or {}
    named = [rate for rate in (*profile.copies, *profile.wires) if rate.is_for(test)]
    alike = [rate for rate in named if queue_pairs is None or rate.queue_pairs in (None, queue_pairs)]
    fitting = [rate for rate in alike if rate.size_bytes in (None, *sizes)]
    reference = min(fitting, key=lambda rate: rate.rate * rate.tolerance, default=None)
    notes = ["the worst pair"] if highest not in (None, measured) else []
    missing = f"{profile.name} has no reference for this test"
    if named:
        pairs = f" and {plural(queue_pairs, 'queue pair')}" if queue_pairs else ""
        missing += f" with messages of {size} bytes{pairs}"
    ceiling, floor = ceilings.path_limits(profile, test)
    if size is not None and size < WIRE_BYTES:
        reference = floor = None
        missing = f"the largest size is {max(sizes, default=size)} bytes; speed is judged at {WIRE_BYTES} bytes or more"
    if reference and reference.size_bytes:
        highest, measured, size = highest or measured, sizes[reference.size_bytes], reference.size_bytes
    return _speed(measured, size, (ceiling, floor), reference, missing=missing, notes=notes, highest=highest)


def _judge_diagnostics(
    source: str, diagnostics: Sequence[Diagnostic], profile: Profile | None, expected: Expected
) -> Judgement:
    """Return the judgement on one dcgmi diag. The diag passes if a hardware test ran, and no test failed or warned."""
    failed, warned = (
        "; ".join(": ".join(filter(None, (d.subject, d.reason))) for d in diagnostics if d.verdict == verdict)
        for verdict in ("failed", "warned")
    )
    ran = [d for d in diagnostics if d.verdict == "ok" and (d.category or "").casefold() not in _LIMITS["software"]]
    by_verdict = Counter(diagnostic.verdict for diagnostic in diagnostics)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in by_verdict.items())
    if failed:
        data = Claim(state="wrong", reason=failed)
    elif warned or not ran:
        reason = f"a warning is not a pass: {warned}" if warned else f"no test of the hardware was run: {counts}"
        # The quick diagnosis that imagebuild starts only tests software.
        allow: Openness | None = None if diagnostics[0].launch and not warned else "unvalidated"
        data = Claim(state="not compared", reason=reason, allow=allow)
    else:
        data = Claim(state="right", reason=counts)
    speed = SpeedClaim(state="not applicable", reason="dcgmi diag judges speed itself")
    participation = _tested_gpus(diagnostics, profile, expected.of(diagnostics[0]))
    return Judgement(source=source, subject="dcgmi diag", data=data, participation=participation, speed=speed)


def _tested_gpus(diagnostics: Sequence[Diagnostic], profile: Profile | None, expected: Expected) -> Claim:
    """Return the claim about participation in a dcgmi diag: every hardware test that ran also ran on each GPU."""
    named = {d.entity for d in diagnostics if d.entity and d.entity.startswith("GPU")}
    ran = [d for d in diagnostics if d.verdict != "waived" and (d.category or "").casefold() not in _LIMITS["software"]]
    by_test = {d.test: {other.entity for other in ran if other.test == d.test} & named for d in ran}
    missing = {entity: [t for t, tested in by_test.items() if tested and entity not in tested] for entity in named}
    skipped = [f"{', '.join(tests)} did not run on {entity}" for entity, tests in sorted(missing.items()) if tests]
    if not any(by_test.values()):
        # The quick diagnosis that imagebuild starts only tests software.
        asked: Openness | None = "partial" if profile and not diagnostics[0].launch else None
        return Claim(state="not known", reason="no test of the hardware names its GPUs", allow=asked)
    least = expected.gpus_of(profile, expected.nodes or 1)
    wanted = max(least or 0, len(named))
    claim = _gpus_claim(len(named) - len(skipped), wanted, nodes=None if skipped or expected.ranks else 1)
    if least or skipped:
        return claim.model_copy(update={"reason": "; ".join((claim.reason, *skipped))})
    return NO_PARTICIPATION


# Claims about speed


def _not_judged(profile: Profile | None, unsound: str, problem: str = "", **facts: Any) -> SpeedClaim:
    """Return the claim that speed was not judged. The claim is open if there is a profile and `unsound` is empty."""
    reason = unsound or (problem if profile else "no profile says how fast it should be")
    return SpeedClaim(state="not judged", reason=reason, allow="unjudged" if profile and not unsound else None, **facts)


def _speed(
    measured: float, size_bytes: int | None, limits: tuple[Limit | None, Limit | None], reference: Measured | None, *,
    missing: str, notes: Sequence[str] = (), highest: float | None = None,
) -> SpeedClaim:  # fmt: skip
    """Return the claim about the speed of a measurement by its `limits`, the ceiling and the floor. If there is no
    reference, `missing` says why, and `measured` is compared with the floor. `highest` (default: `measured`) is
    compared with the ceiling."""
    ceiling, floor = limits
    facts: dict[str, Any] = {"size_bytes": size_bytes, "ceiling": ceiling, "measured": measured}
    highest = highest or measured
    if ceiling and highest > ceiling.value * (1 + MARGIN):
        facts |= {"state": "impossible", "measured": highest}
        text = "more than the hardware can move; check the profile, the numbers of ranks and nodes, and the measurement"
    elif reference is not None:
        rate, tolerance = reference.rate, reference.tolerance
        is_fast = measured / rate >= tolerance
        least = "at least" if is_fast else "below"
        text = "; ".join((f"{measured / rate:.1%} of the reference, {least} the {tolerance:.0%} that pass", *notes))
        limit = Limit(value=rate, what=f"{reference.source}, {reference.date}")
        facts |= {"reference": limit, "tolerance": tolerance, "state": "fast enough" if is_fast else "too slow"}
    elif floor is not None:
        is_fast = measured >= floor.value
        least = "at least" if is_fast else "below"
        text = "; ".join((f"{least} the floor of {floor.value:.1f} GB/s ({floor.what})", missing, *notes))
        facts |= {"floor": floor, "state": "fast enough" if is_fast else "too slow"}
    else:
        text = missing
        facts |= {"state": "not judged", "allow": "unjudged"}
    share = f"; {facts['measured'] / ceiling.value:.0%} of the ceiling" if ceiling else ""
    return SpeedClaim(reason=text + share, **facts)
