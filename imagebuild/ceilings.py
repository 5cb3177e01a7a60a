"""The most bus bandwidth that hardware can show, by collective, algorithm class and topology. Pure.

Bus bandwidth is `size / time * factor(n)`, with the factors of nccl-tests (its PERFORMANCE.md): they are those of a
ring. A class moves a known number of bytes over a GPU's link and over a node's network cards; neither can be passed
faster than its rate, so

    ceiling = min(link * a, W * b)

where `a` and `b` are the factor divided by those bytes, per byte of size. What the table below gives as `a` and `b`
follows from the bytes that it says. Letters: n ranks, k nodes (NVLink domains), g = n/k ranks per node; `link` one
GPU's rate one way and `W` the network cards of one node together one way, both GB/s of 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "gather", "scatter", "broadcast", "reduce", "sendrecv",
    "hypercube",
]  # fmt: skip
AlgorithmName = Literal["ring", "nvls", "hierarchical", "nvls-tree", "sharp", "nvls-sharp", "pairwise"]
Multiplier = Callable[[int, int, int], float]
"""From n, k, g."""

REDUCING: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Hardware:
    """What limits a run."""

    link: float
    """GB/s that one GPU can send to its peers in the node."""
    network: float | None = None
    """GB/s that the network cards of one node can send; `None` is unknown."""
    nvls: bool = False
    """The switch between the GPUs can multicast and reduce (NVLink SHARP)."""
    sharp: bool = False
    """The network's switches can reduce (SHARP, CollNet)."""


@dataclass(frozen=True)
class Ceiling:
    """What one class can reach."""

    collective: str
    algorithm: str
    value: float
    link: float
    """What the links alone would allow; infinite where they carry nothing."""
    network: float
    """What the network alone would allow; infinite within a node."""
    formula: str

    @property
    def bound(self) -> str:
        """`link` or `network`: which of them limits."""
        return "link" if self.link <= self.network else "network"


@dataclass(frozen=True)
class Algorithm:
    """A class of algorithms: how much its bytes let the bus bandwidth exceed, or fall short of, the rates."""

    name: AlgorithmName
    collectives: tuple[Collective, ...]
    link: tuple[str, Multiplier]
    """`a`, as text and as a function."""
    network: tuple[str, Multiplier] | None
    """`b`; `None` for what works within a node only."""
    why: str
    nvls: bool = False
    sharp: bool = False
    within: bool = True
    """Whether it is a class of its own within one node."""


_ONE: tuple[str, Multiplier] = ("1", lambda _n, _k, g: 1.0 if g > 1 else math.inf)
_FLAT: tuple[str, Multiplier] = ("1", lambda _n, _k, _g: 1.0)
_SPLIT: tuple[str, Multiplier] = ("k(n-1)/(n(k-1))", lambda n, k, _g: k * (n - 1) / (n * (k - 1)))
_LOCAL: tuple[str, Multiplier] = ("(n-1)/(k(g-1))", lambda n, k, g: (n - 1) / (k * (g - 1)) if g > 1 else math.inf)
_SWITCH: tuple[str, Multiplier] = ("2g(n-1)/(n(g+1))", lambda n, _k, g: 2 * g * (n - 1) / (n * (g + 1)))
_ONCE: tuple[str, Multiplier] = ("2(n-1)/n", lambda n, _k, _g: 2 * (n - 1) / n)
_PEERS: tuple[str, Multiplier] = ("(n-1)/(g-1)", lambda n, _k, g: (n - 1) / (g - 1) if g > 1 else math.inf)

ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(
        "ring", (*REDUCING, "broadcast", "reduce"), _ONE, _FLAT,
        "every GPU passes factor * size to the next one, and one GPU of each node to the next node",
    ),
    Algorithm(
        "hierarchical", REDUCING, _LOCAL, _SPLIT,
        "the least that must cross without help of switches: (k-1)/k * size a node, twice for all_reduce; trees too, "
        "which move as much on the average of their GPUs and nodes",
        within=False,
    ),
    Algorithm(
        "nvls", ("all_reduce",), ("2(n-1)/(n+1)", lambda n, _k, _g: 2 * (n - 1) / (n + 1)), None,
        "the switch reduces: a GPU sends (n+1)/n * size instead of 2(n-1)/n * size", nvls=True,
    ),
    Algorithm(
        "nvls", ("all_gather", "reduce_scatter"), ("(n-1)/n", lambda n, _k, _g: (n - 1) / n), None,
        "the switch multicasts or reduces, but a GPU still receives, or sends, all of size", nvls=True,
    ),
    Algorithm(
        "nvls-tree", ("all_reduce",), _SWITCH, _SPLIT,
        "NVLS in each node, (g+1)/g * size over a link; a tree between nodes", nvls=True, within=False,
    ),
    Algorithm(
        "sharp", ("all_reduce",), _LOCAL, _ONCE,
        "the network reduces: a node sends size once", sharp=True, within=False,
    ),
    Algorithm(
        "nvls-sharp", ("all_reduce",), _SWITCH, _ONCE,
        "NVLS in each node, the network reduces between nodes", nvls=True, sharp=True, within=False,
    ),
    Algorithm(
        "pairwise", ("alltoall", "hypercube"), _PEERS,
        ("(n-1)/(g(n-g))", lambda n, _k, g: (n - 1) / (g * (n - g))),
        "of the n-1 parts that a rank sends, g-1 stay in the node and n-g leave it",
    ),
    Algorithm(
        "pairwise", ("gather", "scatter"), _PEERS,
        ("(n-1)/(n-g)", lambda n, _k, g: (n - 1) / (n - g)),
        "the root's link carries g-1 parts, its node's network n-g",
    ),
    Algorithm(
        "pairwise", ("sendrecv",), _ONE, _FLAT,
        "every rank sends size to the next one; at best one rank of each node sends to another node",
    ),
)  # fmt: skip


def classes(collective: str) -> set[str]:
    """Names of the classes that the collective has on any hardware."""
    return {a.name for a in ALGORITHMS if collective in a.collectives}


def ceilings(collective: str, ranks: int, nodes: int, hardware: Hardware) -> tuple[Ceiling, ...]:
    """What each class that the hardware can run reaches at best.

    `nodes` are NVLink domains. Empty for one rank, which moves nothing; for a collective without a formula; between
    nodes whose network is unknown; and where the ranks do not divide evenly between the nodes.
    """
    if ranks < 2 or nodes < 1 or ranks % nodes:
        return ()
    found = (_ceiling(a, collective, ranks, nodes, hardware) for a in ALGORITHMS if collective in a.collectives)
    return tuple(c for c in found if c)


def hard_ceiling(
    collective: str, ranks: int, nodes: int, hardware: Hardware, algorithm: str | None = None
) -> Ceiling | None:
    """The loosest class's ceiling, or the one of a known class: what is measured above it is a mistake.

    Of classes that allow the same, the first in `ALGORITHMS`.
    """
    known = [c for c in ceilings(collective, ranks, nodes, hardware) if algorithm in (None, c.algorithm)]
    return max(known, key=lambda c: c.value, default=None)


def _ceiling(a: Algorithm, collective: str, n: int, k: int, hardware: Hardware) -> Ceiling | None:
    g = n // k
    usable = (hardware.nvls or not a.nvls) and (hardware.sharp or not a.sharp) and (g > 1 or not a.nvls)
    if not usable or (k == 1 and not a.within) or (k > 1 and (a.network is None or hardware.network is None)):
        return None
    link = hardware.link * a.link[1](n, k, g)
    network = math.inf
    parts = [] if math.isinf(link) else [_product("link", a.link[0])]
    if k > 1 and a.network and hardware.network is not None:
        network = hardware.network * a.network[1](n, k, g)
        parts.append(_product("W", a.network[0]))
    formula = parts[0] if len(parts) == 1 else f"min({', '.join(parts)})"
    return Ceiling(collective, a.name, min(link, network), link, network, formula)


def _product(rate: str, multiplier: str) -> str:
    return rate if multiplier == "1" else f"{rate} * {multiplier}"
