"""How many nodes, of how many racks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.errors import ConfigError
from imagebuild.jobs.inputs import Machine

NODES = 8
"""Without --nodes, where NVLink ends at the node."""


@dataclass(frozen=True)
class Scale:
    """Nodes of a job; `each` of every rack, or all where there are none."""

    nodes: int
    racks: int
    each: int


def scale(machine: Machine, rack_nodes: int, nodes: int | None, racks: int | None) -> Scale:
    """What `--nodes` or `--racks` mean on nodes of which `rack_nodes` share NVLink. Raises ConfigError."""
    if nodes is not None and racks is not None:
        raise ConfigError("--nodes and --racks exclude each other")
    for option, number in (("--nodes", nodes), ("--racks", racks)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number}: at least 1")
    if not machine.mnnvl:
        if racks is not None:
            raise ConfigError(f"--racks {racks}: NVLink of {machine.profile} ends at the node; take --nodes")
        return Scale(nodes or NODES, 1, nodes or NODES)
    if nodes is None:
        return Scale(rack_nodes * (racks or 1), racks or 1, rack_nodes)
    count = -(-nodes // rack_nodes)
    if nodes % count:
        near = sorted({nodes - nodes % count, nodes + count - nodes % count})
        offers = " or ".join(f"{n} ({-(-n // rack_nodes)} * {n // -(-n // rack_nodes)})" for n in near if n > 0)
        raise ConfigError(
            f"--nodes {nodes}: {count} racks of up to {rack_nodes} nodes cannot have as many each; take {offers}"
        )
    return Scale(nodes, count, nodes // count)
