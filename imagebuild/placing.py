"""Ranks on the hosts of a profile, in the terms of the formulas of `ceilings`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.ceilings import Hardware
from imagebuild.profiles import Link, Profile


@dataclass(frozen=True)
class Place:
    """Where ranks run on a profile's hardware, in the terms of the formulas."""

    domains: int
    """k: NVLink domains."""
    link: Link
    """The one that joins the ranks of a domain."""
    network: float | None
    """W: GB/s of one domain."""
    sharp: bool

    gpus: int
    """g: ranks of a domain."""

    @property
    def hardware(self) -> Hardware:
        rate = self.link.rate
        if self.link.pair and self.gpus > 1:
            # Without a switch, a GPU has a wire to each peer, and uses those whose peers take part.
            rate = min(rate, self.link.pair * (self.gpus - 1))
        return Hardware(rate, self.network, nvls=self.link.nvls, sharp=self.sharp)


def place(profile: Profile, ranks: int, nodes: int) -> Place | str:
    """How `ranks` on `nodes` hosts use the hardware, or why they cannot be on it.

    Hosts of a rack-wide link are taken to fill racks: 32 hosts of 18-host racks are two domains. W counts the cards of
    the hosts in use, but no more than what the GPUs in use can pass over their host links.
    """
    if ranks % nodes or ranks > nodes * profile.node.gpus:
        return f"{ranks} ranks on {nodes} nodes do not fit {profile.name}, which has {profile.node.gpus} GPUs a node"
    domains = -(-nodes // profile.hosts_per_domain)
    if nodes % domains:
        return f"{nodes} nodes do not divide evenly between {domains} domains of {profile.hosts_per_domain} nodes"
    each = ranks // domains
    link = next((link for link in profile.links if link.gpus >= each), None)
    if link is None:
        return f"no link of {profile.name} joins the {each} GPUs of a node"
    network = nodes // domains * profile.network.count * profile.network.rate if profile.network else None
    if network and profile.host_link:
        network = min(network, each * profile.host_link.rate)
    sharp = profile.network is not None and profile.network.kind == "infiniband"
    return Place(domains, link, network, sharp, each)
