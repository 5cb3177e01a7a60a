"""What a profile's hardware can do at a scale, and whether the profile's own references are possible. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from imagebuild import transfers
from imagebuild.ceilings import Ceiling, Collective, ceilings, hard_ceiling
from imagebuild.config import Document, Mistakes
from imagebuild.errors import ConfigError
from imagebuild.fields import Model
from imagebuild.judgement import Limit
from imagebuild.placing import place
from imagebuild.profiles import Copy, Profile, Reference, Wire, key


class Row(Model):
    """A line of the table: a class's ceiling, and what was measured with it."""

    collective: str
    algorithm: str
    ceiling_gb_s: float
    bound: str
    """`link` or `network`."""
    hardest: bool
    """Whether no class of the collective allows more: above this, a measurement is wrong."""
    formula: str
    references: tuple[Reference, ...] = ()
    """Of the collective at this scale, beside the class that they were measured with or else the loosest."""


class Table(Model):
    """What `imagebuild limits --json` writes."""

    profile: str
    title: str
    nodes: int
    """Hosts."""
    ranks: int
    domains: int
    """NVLink domains: k of the formulas."""
    link_gb_s: float
    network_gb_s: float | None
    """Of one domain: W of the formulas."""
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...] = ()
    wires: tuple[Wire, ...] = ()


def table(profile: Profile, nodes: int | None = None) -> Table:
    """Every ceiling for all GPUs of so many hosts; by default of one NVLink domain.

    Raises ConfigError where the hosts do not divide evenly between domains.
    """
    nodes = nodes or profile.hosts_per_domain
    ranks = nodes * profile.node.gpus
    spot = place(profile, ranks, nodes)
    if isinstance(spot, str):
        raise ConfigError(f"--nodes {nodes}: {spot}")
    rows = [
        row
        for collective in get_args(Collective)
        for row in _rows(profile, nodes, ranks, ceilings(collective, ranks, spot.domains, spot.hardware))
    ]
    return Table(
        profile=profile.name,
        title=profile.title,
        nodes=nodes,
        ranks=ranks,
        domains=spot.domains,
        link_gb_s=spot.hardware.link,
        network_gb_s=spot.network,
        rows=tuple(rows),
        copies=profile.copies,
        wires=profile.wires,
    )


def _rows(profile: Profile, nodes: int, ranks: int, found: tuple[Ceiling, ...]) -> Iterator[Row]:
    top = max(found, key=lambda c: c.value, default=None)
    for ceiling in found:
        here = (
            r
            for r in profile.references
            if (r.collective, r.ranks, r.nodes) == (ceiling.collective, ranks, nodes)
            and (r.algorithm == ceiling.algorithm or (r.algorithm is None and ceiling is top))
        )
        yield Row(
            collective=ceiling.collective,
            algorithm=ceiling.algorithm,
            ceiling_gb_s=round(ceiling.value, 1),
            bound=ceiling.bound,
            hardest=ceiling is top,
            formula=ceiling.formula,
            references=tuple(here),
        )


def reference_ceiling(profile: Profile, reference: Reference) -> Ceiling | str:
    """The ceiling that a reference must stay below, or why it has none."""
    spot = place(profile, reference.ranks, reference.nodes)
    if isinstance(spot, str):
        return spot
    if spot.domains > 1 and spot.network is None:
        return f"{reference.nodes} nodes need a network, and {profile.name} has none"
    found = hard_ceiling(
        reference.collective, reference.ranks, spot.domains, spot.hardware, algorithm=reference.algorithm
    )
    return found or f"{reference.algorithm} is no class for {reference.collective} at this scale on {profile.name}"


def lint(document: Document[Profile], mistakes: Mistakes) -> None:
    """Add what is impossible in a profile: a reference that reaches its own ceiling, or that fits no scale; the same
    thing said twice; links that are not in order.
    """
    profile = document.model
    if sorted(link.gpus for link in profile.links) != [link.gpus for link in profile.links]:
        mistakes.add(document.at("links"), "links: the one that joins fewest GPUs comes first")
    taken_over = len(profile.references) - sum(loc[:1] == ("references",) and len(loc) == 2 for loc in document.lines)
    seen = set()
    for index, reference in enumerate(profile.references):
        own = index >= taken_over
        where = document.at("references", index - taken_over) if own else document.at("extends")
        if key(reference) in seen:
            mistakes.add(where, f"{_named(reference)}: is there twice; say `forced` where an algorithm was chosen")
        seen.add(key(reference))
        ceiling = reference_ceiling(profile, reference)
        if isinstance(ceiling, str):
            mistakes.add(where, f"{_named(reference)}: {ceiling}")
        elif reference.rate >= ceiling.value:
            limit = Limit(value=ceiling.value, unit="GB/s", what=f"{ceiling.algorithm}: {ceiling.formula}")
            _impossible(mistakes, where, _named(reference), reference.rate, limit)
    for index, copy in enumerate(profile.copies):
        limits = (transfers.copy_ceiling(profile, test) for test in copy.tests)
        _below(mistakes, document.at("copies", index), copy.tests, copy.rate, limits)
    for index, wire in enumerate(profile.wires):
        limits = (transfers.wire_ceiling(profile, test) for test in wire.tests)
        _below(mistakes, document.at("wires", index), wire.tests, wire.rate * 8, limits)


def _below(
    mistakes: Mistakes, where: str, tests: tuple[str, ...], value: float, limits: Iterable[Limit | None]
) -> None:
    for test, limit in zip(tests, limits, strict=True):
        if limit is None:
            mistakes.add(where, f"{test}: the profile says no rate that limits it; add its link, host-link or network")
        elif value >= limit.value:
            _impossible(mistakes, where, test, value, limit)


def _impossible(mistakes: Mistakes, where: str, what: str, value: float, limit: Limit) -> None:
    mistakes.add(
        where,
        f"{what}: {value:g} {limit.unit} is not below the ceiling, {limit.value:.1f} {limit.unit} ({limit.what}); "
        "no machine passes that, so correct the figure, the scale or the rates",
    )


def _named(reference: Reference) -> str:
    return f"{reference.collective} on {reference.ranks} ranks, {reference.nodes} nodes"
