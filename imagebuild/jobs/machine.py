"""A profile as jobs see it. Pure."""

from __future__ import annotations

import re

from imagebuild.errors import ConfigError
from imagebuild.jobs.inputs import Machine
from imagebuild.profiles import Profile

FABRICS = {"infiniband": "ib", "roce": "roce", "efa": "efa", "tcpxo": "tcpxo", "ethernet": "ethernet"}
"""A profile's network → the fabric that jobs use without --fabric."""


def machine(profile: Profile) -> Machine:
    """Raises ConfigError where the GPU's name has no short form."""
    short = next((m[0] for name in profile.gpu.names if (m := re.search(r"[A-Z]{1,3}[0-9]{2,4}", name))), None)
    if short is None:
        raise ConfigError(f"profile {profile.name}: no name such as H100 in {', '.join(profile.gpu.names)}")
    network = profile.network
    return Machine(
        profile=profile.name,
        gpu=short.lower(),
        arch=profile.node.cpu,
        gpus=profile.node.gpus,
        rack_nodes=profile.hosts_per_domain,
        nvls=profile.links[-1].nvls,
        capability=profile.gpu.compute_capability,
        cards=network.count if network else 0,
        network=network.kind if network else None,
        thresholds={(r.collective, r.ranks, r.nodes): r.rate * r.tolerance for r in profile.references if not r.forced},
    )
