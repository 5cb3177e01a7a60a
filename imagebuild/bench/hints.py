"""Name fallbacks and other causes of low speed, with the help of `hints.yaml`. Pure but for that file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from imagebuild.bench.models import DataPath, Hint
from imagebuild.bench.profiles import Profile
from imagebuild.core.advisory import Place
from imagebuild.core.patterns import data_of

DATA = data_of(__file__)
MOST: int = DATA["most"]
"""Number of hints with a next command."""
_RDMA = [kind for kind in DATA["kinds"] if kind not in ("ethernet", "tcpxo")]


def find_hints(
    path: DataPath | None,
    profile: Profile | None = None,
    *,
    devices: Sequence[str] = (),
    measured: float | None = None,
    ceiling: float | None = None,
    speed: str = "",
    is_host_copy: bool = False,
) -> tuple[Hint, ...]:
    """Return all fallbacks and the other causes that fit, the best first. Only the first three have a next command.

    `measured` and `ceiling` are bandwidths in GB/s, `speed` is the state of the claim about them. `is_host_copy`: the
    bandwidth is that of copies between a GPU and its host."""
    path = path or DataPath()
    facts = facts_of(path, profile, devices) | {"slow": speed == "too slow", "fast": speed == "fast enough"}
    if measured is not None:
        facts |= _ratios(facts, measured, ceiling, is_host_copy)
    hints: dict[str, Hint] = {}
    for row in DATA["hints"]:
        if row["kind"] not in hints and all(_holds(facts.get(name), value) for name, value in row["when"].items()):
            wrong = row.get("wrong", {})
            quotes = [quote for name in row["evidence"] if (quote := path.evidence.get(name))]
            quotes += [f"{measured:g} GB/s"] if measured is not None and "speed" in row["evidence"] else []
            hints[row["kind"]] = Hint(
                kind=row["kind"], means=row["means"].format_map(facts), next=row["next"].format_map(facts),
                evidence="; ".join(dict.fromkeys(quotes[:2])), is_fallback=row.get("fallback", False),
                is_wrong=bool(wrong) and all(_holds(facts.get(name), value) for name, value in wrong.items()),
            )  # fmt: skip
    found = tuple(hints.values())
    others = (hint.model_copy(update={"next": ""}) for hint in found[MOST:] if hint.is_fallback)
    return (*found[:MOST], *others)


def facts_of(path: DataPath, profile: Profile | None, devices: Sequence[str]) -> dict[str, Any]:
    """Return the facts that conditions can name."""
    network, link = (profile.network, profile.links[0]) if profile else (None, None)
    kinds = DATA["kinds"][network.kind] if network else ()
    listed = len(path.ports)
    used = min(listed, path.ports_used or listed)
    local = path.ranks_per_node or 0
    # NCCL needs no more NICs than the node has ranks.
    wanted = min(network.count, local) if network and local else 0
    plugin = {"NCCL_NET_PLUGIN", "FI_PROVIDER"} & path.variables.keys() or (network and network.kind == "efa")
    # Boards of four of these GPUs have no switch.
    can_reduce = any(re.search(DATA["nvls"], name) for name in devices) and (path.ranks or 0) > 4
    shown = {name.partition("=")[0]: text for name, text in path.evidence.items()}
    own = f"imagebuild job slurm --profile {profile.name} --nodes {path.nodes or 1} --test " if profile else ""
    jobs = {name: f"{own}{name}" if own else command for name, command in DATA["jobs"].items()}
    return {
        **shown, **dict(path), **path.variables, **jobs,
        "sockets": not path.rdma and (path.network or "").startswith(("TCP", "libfabric", "Socket")),
        "staging": path.rdma and (path.staged > path.network_in_node or path.gpudirect is False),
        "why": path.gpudirect_reason or "GPUDirect RDMA is off",
        "shm": path.carriers.get("SHM", 0), "listed": listed, "used": used,
        "unused-ports": min(listed, local) - used if path.rdma and local else 0,
        "missing-ports": wanted - used if path.rdma and used else 0,
        "gpus-per-port": local / used if used and local else None,
        "other-network": bool(path.rdma and kinds and path.network not in kinds),
        "plugin-wanted": bool(plugin),
        "sharp-missing": path.variables.get("NCCL_COLLNET_ENABLE") == "1" and not path.collnet and path.nodes != 1,
        "nvls-expected": path.nodes == 1 and (path.ranks or 0) > 2
        and (link.nvls if link else can_reduce),
        "profile-ports": network.count if network else None,
        "profile-rdma": bool(network and network.kind in _RDMA),
        "profile-rack": bool(profile and profile.hosts_per_domain > 1),
        "profile-nvlink": link is not None and "NVLink" in link.kind and (local or path.ranks or 0) <= link.gpus,
        "profile-host": profile.host_link.rate if profile and profile.host_link else None,
        "port-rate": path.gbit / 8 if path.gbit else network.rate if network else None,
    }  # fmt: skip


def place_of(path: DataPath, gpu: str | None) -> Place:
    """Return what is known about the machines, to choose advisories. `gpu` is a compute capability."""
    crossed = path.nodes != 1
    fabrics = [kind for kind, networks in DATA["kinds"].items() if path.network in networks] if crossed else ["none"]
    fabrics += ["nvlink"] * bool(path.mnnvl)
    return Place(gpus=(gpu,) if gpu else (), fabrics=tuple(fabrics))


def _ratios(facts: Mapping[str, Any], measured: float, ceiling: float | None, is_host_copy: bool) -> dict[str, Any]:
    """Return facts about a bandwidth in GB/s: its share for each NIC, and for the host link."""
    used, is_wire = facts["used"], (facts["nodes"] or 1) > 1 or facts["mtu"]
    return {
        "per-port": measured / used if used and is_wire else None,
        "rails": measured / ceiling if ceiling else None,
        "link-share": measured / facts["port-rate"] if facts["port-rate"] else None,
        "host-rate": measured if is_host_copy else None,
    }


def _holds(value: Any, wanted: Any) -> bool:
    """Return whether a fact fits a condition."""
    match wanted:
        case [int() | float() as least, int() | float() as most]:
            return value is not None and bool(least <= value <= most)
        case list():
            return value in wanted
        case bool():
            return value is wanted
        case "known":
            return value is not None
    sign, number = wanted[0], wanted[1:]
    if sign in "<>":
        return value is not None and bool((float(number) < float(value)) == (sign == ">"))
    return bool(str(value) != number if sign == "!" else str(value) == wanted)
