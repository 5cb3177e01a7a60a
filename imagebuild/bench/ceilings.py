"""Compute ceilings: the highest bandwidth that the hardware allows for a collective or a test. Pure.

The bus bandwidth of a collective is at most min(a * link, b * W) with the symbols of docs/report.md. a and b are the
factors in ceilings.yaml for each class of algorithms and collective. All bandwidths are in GB/s in one direction.
nccl-tests computes bus bandwidth for a ring. A class of algorithms that moves fewer bytes than a ring has factors above
1. Within one domain, only a * link counts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from imagebuild.bench.models import AlgorithmName, Collective, Limit
from imagebuild.bench.profiles import Measured, Profile, profile_key
from imagebuild.core.errors import ConfigError, Mistakes, plural
from imagebuild.core.fields import YamlFile
from imagebuild.core.patterns import data_of


class NotComparable(Exception):
    """A measurement cannot be compared with the hardware of a profile. The message is the reason."""


@dataclass(frozen=True)
class RankLayout:
    """How ranks are spread over NVLink domains, and the bandwidths that limit them, in GB/s."""

    domains: int
    """Number of NVLink domains; k in the formulas."""
    link: float
    """Bandwidth with which one GPU can send to its peers in the domain."""
    network: float | None = None
    """Bandwidth with which the NICs of one domain can send; W in the formulas. `None`: unknown."""
    wire: float | None = None
    """Bandwidth between two GPUs. `None`: the same as `link`, because a switch joins the GPUs."""
    card: float | None = None
    """Bandwidth with which one rank can send to another domain. `None`: the same as `network`."""
    nvls: bool = False
    """Whether the switch between the GPUs can multicast and reduce (NVLink SHARP)."""
    sharp: bool = False
    """Whether the switches of the network can reduce (SHARP, CollNet)."""
    hosts: int = 1
    """Number of hosts in each domain."""


@dataclass(frozen=True)
class Ceiling:
    """The highest bus bandwidth that one class of algorithms can reach, in GB/s."""

    algorithm: str
    value: float
    formula: str
    derivation: str
    """The formula with numbers, such as `min(450 * 1.071, 400 * 1.875)`."""
    floor_fraction: float
    """Fraction of `least` that every healthy machine reaches with this class of algorithms; 0 if unknown."""
    least: float
    """Bandwidth that the class has if it uses as little hardware as it may. Default: `value`."""
    least_formula: str


@dataclass(frozen=True)
class Algorithm:
    """A class of algorithms with which NCCL can run some of the collectives."""

    name: AlgorithmName
    collectives: tuple[Collective, ...]
    link: str
    """Factor a, as an expression of n, k and g. The factor applies if a domain has several ranks."""
    network: str | None
    """Factor b, as an expression of n, k and g. `None`: the class works only within a domain."""
    nvls: bool = False
    """Whether the class needs NVLink SHARP."""
    sharp: bool = False
    """Whether the class needs SHARP in the network."""
    within: bool = True
    """Whether runs within one NVLink domain can use the class."""
    floor_fraction: float = 0.5
    """Fraction of the ceiling that every healthy machine reaches. Default: 0.5."""
    busy: Literal["peer", "root"] | None = None
    """`peer`: each rank sends to only one other rank, so that `wire` and `card` limit the bandwidth. `root`: all data
    pass through one rank: through its link, its NIC, and the NICs of its domain."""


_DATA = data_of(__file__)
ALGORITHMS = tuple(Algorithm(**row) for row in _DATA["algorithms"])
GB_UNITS: Mapping[str, float] = _DATA["units"]
"""Maps the unit of a table to its value in GB/s."""
_PATHS = [(re.compile(row["test"]), row) for row in _DATA["paths"]]


def forced_classes(variables: Mapping[str, str]) -> tuple[AlgorithmName, ...]:
    """Return the classes that NCCL_ALGO and NCCL_NVLS_ENABLE allow, or an empty tuple if both allow all classes."""
    everything: tuple[AlgorithmName, ...] = tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))
    chosen = set(everything)
    setting = variables.get("NCCL_ALGO", "").strip("\"' ").lower()
    words = re.split(r"[,;:@/]", setting.removeprefix("^"))
    named = {name for word in words for name in _DATA["classes"].get(word, ())}
    if named:
        chosen = chosen - named if setting.startswith("^") else named
    if variables.get("NCCL_NVLS_ENABLE") == "0":
        chosen -= {"nvls", "nvls-tree", "nvls-sharp"}
    return tuple(name for name in everything if name in chosen) if len(chosen) < len(everything) else ()


def class_ceilings(collective: str, ranks: int, layout: RankLayout) -> tuple[Ceiling, ...]:
    """Return the ceiling of each class of algorithms that the hardware can run.

    Return an empty tuple for a single rank, which moves nothing between GPUs; for NVLink domains with different numbers
    of ranks; and for several domains if the bandwidth of the network is unknown."""
    domains = layout.domains
    if ranks < 2 or domains < 1 or ranks % domains:
        return ()
    ceilings = []
    gpus = ranks // domains
    for algorithm in ALGORITHMS:
        if collective not in algorithm.collectives or (domains == 1 and not algorithm.within):
            continue
        if (algorithm.nvls and not (layout.nvls and gpus > 1)) or (algorithm.sharp and not layout.sharp):
            continue
        if domains > 1 and (algorithm.network is None or layout.network is None):
            continue
        parts, floors = _parts(algorithm, layout, gpus)
        scale = {"n": ranks, "k": domains, "g": gpus}
        (value, formula, derivation), (least, least_formula, _) = (_lowest(p, scale) for p in (parts, floors or parts))
        fraction = algorithm.floor_fraction * next((share for most, share in _DATA["at_scale"] if domains <= most), 0.0)
        ceilings.append(Ceiling(algorithm.name, value, formula, derivation, fraction, least, least_formula))
    return tuple(ceilings)


_Part = tuple[str, float, str]
"""The name of a rate, its value in GB/s, and its factor."""


def _parts(algorithm: Algorithm, layout: RankLayout, gpus: int) -> tuple[list[_Part], list[_Part]]:
    """Return the rates that limit a class of algorithms. If healthy machines use less, return their rates, too."""
    link: _Part = ("link", layout.link, algorithm.link)
    if algorithm.busy == "peer" and layout.wire:
        link = ("wire", layout.wire, algorithm.link)
    inner = [link] if gpus > 1 else []
    if layout.domains == 1:
        return inner, []
    network, card, factor = layout.network or 0.0, layout.card or layout.network or 0.0, algorithm.network or ""
    if algorithm.busy == "peer":
        return [*inner, ("card" if layout.card else "W", card, factor)], []
    if algorithm.busy == "root":
        root: list[_Part] = [("(link + card)", layout.link + card, "1")] if gpus > 1 else []
        return [*root, ("W", network, factor)], [*inner, ("card", card, factor)]
    return [*inner, ("W", network, factor)], []


def _lowest(parts: Sequence[_Part], scale: Mapping[str, int]) -> tuple[float, str, str]:
    """Return the lowest rate times factor, its formula, and the formula with numbers."""
    rates = [(rate, eval(factor, {}, dict(scale))) for _, rate, factor in parts]  # noqa: S307 - factors are our own
    texts = [f"{name} * {factor.replace('*', '')}".removesuffix(" * 1") for name, _, factor in parts]
    numbers = [f"{rate:.6g} * {factor:.4g}".removesuffix(" * 1") for rate, factor in rates]
    formula, derivation = (t[0] if len(t) == 1 else f"min({', '.join(t)})" for t in (texts, numbers))
    return min(rate * factor for rate, factor in rates), formula, derivation


def least_domains(profile: Profile, nodes: int) -> int:
    """Return the smallest number of NVLink domains that `nodes` hosts can be in."""
    return -(-nodes // profile.hosts_per_domain)


def rank_layout(profile: Profile, ranks: int, nodes: int, domains: int | None = None) -> RankLayout:
    """Return how ranks on `nodes` hosts use the hardware. Raises NotComparable if the ranks do not fit the hardware.

    `domains` is the number of NVLink domains. Default: the smallest possible number, as if hosts filled racks. The
    network bandwidth of a domain is the sum of the NICs of its hosts, but at most the sum of the host links of its
    GPUs."""
    if ranks % nodes or ranks > nodes * profile.node.gpus:
        there = f"{profile.name}, which has {plural(profile.node.gpus, 'GPU')} per node"
        raise NotComparable(f"{plural(ranks, 'rank')} on {plural(nodes, 'node')} do not fit {there}")
    domains, hosts = domains or least_domains(profile, nodes), profile.hosts_per_domain
    if nodes > domains * hosts or nodes % domains:
        raise NotComparable(f"{nodes} nodes do not divide evenly between {domains} domains of up to {hosts} nodes")
    gpus = ranks // domains
    link = next((link for link in profile.links if link.gpus >= gpus), None)
    if link is None:
        raise NotComparable(f"no link of {profile.name} joins the {gpus} GPUs of a node")
    network = card = None
    if profile.network:
        host = profile.network.count * profile.network.rate
        network = nodes // domains * host
        card = max(profile.network.rate, host / profile.node.gpus)
        if profile.host_link:
            network = min(network, gpus * profile.host_link.rate)
            card = min(card, profile.host_link.rate)
    sharp = profile.network is not None and profile.network.kind == "infiniband"
    # Without a switch, a GPU has wires to each peer, and uses only the wires to peers that take part.
    rate = min(link.rate, link.pair * (gpus - 1)) if link.pair and gpus > 1 else link.rate
    return RankLayout(domains, rate, network, link.pair, card, link.nvls, sharp, nodes // domains)


# Copies between devices, and single NICs


def path_limits(profile: Profile, test: str) -> tuple[Limit | None, Limit | None]:
    """Return the ceiling and the floor of a copy between devices, or of a test of one NIC.
    The floor is the smallest acceptable bandwidth. A limit that is not known is None."""
    row: Mapping[str, Any] = next((row for pattern, row in _PATHS if pattern.search(test.casefold())), {"path": None})
    path, times, least = row["path"], row.get("times", 1), row.get("least", 0.5)
    if path in ("pair", "link"):
        # The output does not say which link joins a pair. The fastest link sets the ceiling, the slowest the floor.
        rates = [(link.pair or link.rate if path == "pair" else link.rate, link.kind) for link in profile.links]
        if min(rates)[1].startswith("PCIe"):
            least = 0.0  # between PCIe slots, the bandwidth depends on sockets and switches
    elif path == "host-link" and profile.host_link:
        rates = [(profile.host_link.rate, profile.host_link.kind)]
        # On a superchip, it is not known how much of the link each GPU gets if all GPUs use it.
        least = least if profile.host_link.kind.startswith("PCIe") else 0.25
    elif path == "card" and profile.network:
        rates = [(profile.network.rate, f"one {profile.network.kind} port")]
    else:
        return None, None
    (lowest, slow), (highest, fast) = min(rates), max(rates)
    ways = "both directions" if times > 1 else "one way"
    floor = Limit(value=round(least * times * lowest, 3), what=f"{least:.0%} of {slow}, {ways}")
    return Limit(value=times * highest, what=f"{fast}, {ways}"), floor if least else None


def limit_layout(
    profile: Profile, nodes: int | None = None, gpus: int | None = None, domains: int | None = None
) -> tuple[int, int, RankLayout]:
    """Return the numbers of ranks and nodes, and the layout, for `gpus` GPUs of each of `nodes` hosts in `domains`
    NVLink domains. Default: all GPUs of the hosts of one domain. Raises ConfigError if that is impossible."""
    nodes = nodes or profile.hosts_per_domain
    ranks = nodes * (gpus or profile.node.gpus)
    try:
        return ranks, nodes, rank_layout(profile, ranks, nodes, domains)
    except NotComparable as error:
        raise ConfigError(f"--nodes {nodes}: {error}") from None


def limit_rows(profile: Profile, ranks: int, nodes: int, layout: RankLayout) -> list[dict[str, Any]]:
    """Return the ceilings and references for ranks on `nodes` hosts, in GB/s.

    A row is one of these:

    * a ceiling with one of its references (measured results). A reference whose class of algorithms is unknown is shown
      with the highest ceiling.
    * a ceiling without references.
    * a test of copies or of one NIC.

    `hardest` marks the ceiling that no correct measurement exceeds."""
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any], ceiling: float | None, texts: Sequence[str], reference: Measured | None) -> None:
        row |= {"ceiling": None if ceiling is None else round(ceiling, 1), "formula": texts[0], "derivation": texts[1]}
        rows.append(row | {name: getattr(reference, name, None) for name in Measured.model_fields})

    is_least = layout.domains == least_domains(profile, nodes)
    for collective in get_args(Collective):
        ceilings = class_ceilings(collective, ranks, layout)
        loosest = max(ceilings, key=lambda ceiling: ceiling.value, default=None)
        for ceiling in ceilings:
            names = (ceiling.algorithm, None) if ceiling is loosest else (ceiling.algorithm,)
            row = {"test": collective, "ranks": ranks, "nodes": nodes, "algorithm": ceiling.algorithm}
            row["hardest"] = ceiling is loosest
            references = profile.references_at(collective, ranks, nodes) if is_least else ()
            measured = [reference for reference in references if reference.algorithm in names]
            for reference in measured or (None,):
                add(row, ceiling.value, (ceiling.formula, ceiling.derivation), reference)
    for rate in (*profile.copies, *profile.wires):
        for test in rate.tests:
            limit, _ = path_limits(profile, test)
            name = f"{test}, {rate.memory} memory" if rate.memory else test
            row = {"test": name, "ranks": None, "nodes": None, "algorithm": "", "hardest": limit is not None}
            add(row, limit.value if limit else None, (limit.what if limit else "", ""), rate)
    return rows


def lint_profile(document: YamlFile[Profile], mistakes: Mistakes) -> None:
    """Add to `mistakes`: links in a wrong order, and references that do not fit the hardware or exceed its ceilings."""
    profile = document.model
    if any(link.gpus < 2 for link in profile.links):
        mistakes.add(document.at("links"), "links: a link joins at least two GPUs; set `gpus` to their number")
    if sorted(link.gpus for link in profile.links) != [link.gpus for link in profile.links]:
        order = "links: are in the wrong order; list the link that joins the fewest GPUs first"
        mistakes.add(document.at("links"), order)
    inherited = len(profile.references) - sum(loc[:1] == ("references",) and len(loc) == 2 for loc in document.lines)
    keys = set()
    limited: list[tuple[str, str, float, Limit | None]] = []
    for index, reference in enumerate(profile.references):
        where = document.at("references", index - inherited) if index >= inherited else document.at("extends")
        name = f"{reference.collective} on {plural(reference.ranks, 'rank')}, {plural(reference.nodes, 'node')}"
        if (key := profile_key(reference)) in keys:
            mistakes.add(where, f"{name}: is listed twice; set `forced` in the reference whose algorithm was forced")
        keys.add(key)
        try:
            layout = rank_layout(profile, reference.ranks, reference.nodes)
            if layout.domains > 1 and layout.network is None:
                raise NotComparable(f"{reference.nodes} nodes need a network, and {profile.name} has none")
            possible = class_ceilings(reference.collective, reference.ranks, layout)
            known = [ceiling for ceiling in possible if reference.algorithm in (None, ceiling.algorithm)]
            if not known:
                scale = f"{reference.collective} at this scale on {profile.name}"
                raise NotComparable(f"{reference.algorithm} is not a possible class of algorithms for {scale}")
        except NotComparable as error:
            mistakes.add(where, f"{name}: {error}")
        else:
            ceiling = max(known, key=lambda ceiling: ceiling.value)
            what = f"{ceiling.algorithm}: {ceiling.formula}"
            limited.append((where, name, reference.rate, Limit(value=ceiling.value, what=what)))
    for part, rates in (("copies", profile.copies), ("wires", profile.wires)):
        for index, named in enumerate(rates):
            where = document.at(part, index)
            limited += [(where, test, named.rate, path_limits(profile, test)[0]) for test in named.tests]
    for where, name, value, limit in limited:
        if limit is None:
            problem = "the profile has no rate that limits this test; add links, host-link or network"
            mistakes.add(where, f"{name}: {problem}")
        elif value >= limit.value:
            most = f"the ceiling, {limit.value:.1f} GB/s ({limit.what}); correct the rate, the ranks or the hardware"
            mistakes.add(where, f"{name}: {value:g} GB/s is not below {most}")
