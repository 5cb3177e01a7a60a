import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from imagebuild.build import add_network, choose_pool, firewall_rules, mtu, remove_network
from imagebuild.core import CommandError
from tests.unit.conftest import Runner

POOL = IPv4Network("172.30.0.0/19")


def test_the_pool_overlaps_no_route_and_is_kept() -> None:
    everything = [IPv4Network("0.0.0.0/1"), IPv4Network("128.0.0.0/1")]
    first = choose_pool(everything)
    assert first == IPv4Network("172.30.0.0/19")
    assert choose_pool([IPv4Network("172.30.5.0/24")]) == IPv4Network("172.30.32.0/19")
    assert choose_pool([IPv4Network("172.16.0.0/12")]) == IPv4Network("10.213.0.0/19")
    before = IPv4Network("172.30.64.0/19")
    assert choose_pool([], before) == before
    assert choose_pool([before], before) == first


def test_no_pool_is_left() -> None:
    taken = [IPv4Network("172.16.0.0/12"), IPv4Network("10.0.0.0/8"), IPv4Network("192.168.0.0/16")]
    with pytest.raises(CommandError, match="no addresses are left"):
        choose_pool(taken)


def test_the_mtu_is_the_smallest_of_the_ways_out(machine: Path) -> None:
    (machine / "net/tun0").mkdir()
    (machine / "net/tun0/mtu").write_text("1280\n")
    out = [(IPv4Network("0.0.0.0/0"), {"dev": "eth0"}), (IPv4Network("0.0.0.0/0"), {"type": "unreachable"})]
    assert mtu([]) == 1500
    assert mtu([*out, (IPv4Network("172.30.0.0/24"), {"dev": "tun0"})]) == 1400
    assert mtu([*out, (IPv4Network("0.0.0.0/0"), {"dev": "tun0"})]) == 1280


def test_the_bridge_tells_the_pool_whose_rules_are_removed(machine: Path) -> None:
    def no_such_rule() -> str:
        raise CommandError("`iptables` failed (1): Bad rule")

    routes = [{"dst": "172.30.0.0/20", "dev": "ib-test"}, {"dst": "172.31.0.0/24", "dev": "docker0"}]
    run = Runner({"ip -4 -j route": json.dumps(routes), "ip link": "", "iptables": no_such_rule})
    remove_network("ib-test", None, run)
    assert run.of("ip link") == ["ip link delete ib-test type bridge"]
    assert len([call for call in run.of("iptables") if str(POOL) in call]) == len(firewall_rules(POOL))


def test_a_pool_that_another_engine_has_taken_since_is_left_alone(machine: Path) -> None:
    routes = [{"dst": "172.30.0.0/20", "dev": "ib-other"}, {"dst": "172.30.16.0/24", "dev": "br-users"}]
    run = Runner({"ip -4 -j route": json.dumps(routes)})
    remove_network("ib-test", POOL, run)
    assert run.calls == ["ip -4 -j route show table all"]


def test_without_ip_there_is_no_bridge_to_remove(machine: Path) -> None:
    remove_network("ib-test", None, Runner({}))
    (machine / "net/ib-test").mkdir()
    with pytest.raises(CommandError):
        remove_network("ib-test", None, Runner({}))


def test_the_bridge_keeps_one_hardware_address() -> None:
    run = Runner({"ip": "", "iptables": ""})
    add_network("ib-test", POOL, run)
    assert run.of("ip link add") == ["ip link add ib-test address 02:42:ac:1e:00:01 type bridge"]
