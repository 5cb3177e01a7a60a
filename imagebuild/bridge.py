"""The private engine's network: its addresses, its bridge and its firewall rules.

A starting dockerd empties the DOCKER chains of iptables, which takes published ports and isolation from an engine
that already runs. Ours has `iptables: false`; `add_network` adds three rules for its own addresses instead.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from imagebuild.apt import Run
from imagebuild.errors import CommandError

NET = Path("/sys/class/net")


def choose_pool(taken: Iterable[IPv4Network], before: IPv4Network | None = None) -> IPv4Network:
    """Addresses for the private engine's networks that overlap no route; the same ones as `before` if possible.

    Raises CommandError if every candidate is taken.
    """
    # A VPN that routes everything in two halves takes nothing from us.
    routes = [network for network in taken if network.prefixlen >= 8]
    blocks = [IPv4Network("172.30.0.0/16"), IPv4Network("10.213.0.0/16"), IPv4Network("192.168.192.0/18")]
    candidates = [pool for block in blocks for pool in block.subnets(new_prefix=19)]
    for pool in [before, *candidates] if before else candidates:
        if not any(pool.overlaps(route) for route in routes):
            return pool
    tried = ", ".join(map(str, blocks))
    raise CommandError(f"no addresses are left for a bridge: routes use all of {tried} (see `ip route`)")


def firewall_rules(pool: IPv4Network) -> list[tuple[str, str, list[str]]]:
    """(table, chain, rule): what lets containers of the pool reach the world, and its answers reach them."""
    ours = str(pool)
    answers = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
    return [
        ("nat", "POSTROUTING", ["-s", ours, "!", "-d", ours, "-j", "MASQUERADE"]),
        ("filter", "FORWARD", ["-s", ours, "-j", "ACCEPT"]),
        ("filter", "FORWARD", ["-d", ours, *answers, "-j", "ACCEPT"]),
    ]


def exists(bridge: str) -> bool:
    return (NET / bridge).exists()


def routes(run: Run) -> Iterator[tuple[IPv4Network, dict[str, Any]]]:
    for route in json.loads(run("ip", "-4", "-j", "route", "show", "table", "all") or "[]"):
        yield IPv4Network("0.0.0.0/0" if route["dst"] == "default" else route["dst"]), route


def mtu(routes: Iterable[tuple[IPv4Network, dict[str, Any]]]) -> int:
    """A packet must fit through the way out; a tunnel's or a cloud's may be smaller than Ethernet's 1500."""
    devices = [route["dev"] for network, route in routes if network.prefixlen == 0 and "dev" in route]
    return min([1500, *(int((NET / device / "mtu").read_text()) for device in devices)])


def mac(address: IPv4Address) -> str:
    """The hardware address that dockerd would give an interface with this address."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *address.packed))


def add_network(bridge: str, pool: IPv4Network, run: Run) -> None:
    """Make the bridge, with the first half of the pool, and the firewall rules."""
    inside = next(pool.subnets())
    # Without an address of its own a bridge takes that of its lowest port. It would change whenever a container ends,
    # and others would send to the old one until they ask again, half a minute later.
    run("ip", "link", "add", bridge, "address", mac(inside[1]), "type", "bridge")
    run("ip", "address", "add", f"{inside[1]}/{inside.prefixlen}", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    for table, chain, rule in firewall_rules(pool):
        run("iptables", "--wait", "--table", table, "--insert", chain, *rule)


def remove_network(bridge: str, before: IPv4Network | None, run: Run) -> None:
    """Remove the rules and every bridge of the pool: dockerd leaves those of networks that users made.

    `before` is the pool as far as the caller knows it.
    """
    try:
        devices = [(network, route.get("dev")) for network, route in routes(run) if network.prefixlen < 32]
    except CommandError:
        if exists(bridge):
            raise
        return  # no `ip`, so there was never a bridge
    # The bridge knows the pool too, should the caller not.
    pools = {network.supernet() for network, device in devices if device == bridge}
    for pool in pools | ({before} if before else set()):
        for table, chain, rule in firewall_rules(pool):
            with suppress(CommandError):  # it is not there
                while True:
                    run("iptables", "--wait", "--table", table, "--delete", chain, *rule)
        for device in {device for network, device in devices if device and network.subnet_of(pool)}:
            run("ip", "link", "delete", device, "type", "bridge")
    if exists(bridge):  # without an address yet
        run("ip", "link", "delete", bridge)
