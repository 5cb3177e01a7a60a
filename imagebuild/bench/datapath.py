"""Read what carried the data of a run from messages of NCCL, UCX, libfabric and perftest. Pure but for
its YAML file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce

from imagebuild.bench.messages import Message
from imagebuild.bench.models import Choice, DataPath
from imagebuild.core.errors import plural
from imagebuild.core.patterns import data_of

_DATA = data_of(__file__)


def data_path(messages: Iterable[Message], hosts: Sequence[str] = ()) -> DataPath | None:
    """Return what carried the data according to messages. None if they do not say it.
    `hosts` are the hosts of the ranks, if they are known."""
    path = _Seen([*messages]).path(hosts)
    return path if any((path.network, path.carriers, path.nvls, path.mnnvl, path.lanes)) else None


class _Seen:
    """The facts in messages."""

    def __init__(self, messages: Sequence[Message]) -> None:
        told = [(message, message.facts) for message in messages]
        every = [facts for _, facts in told]
        self.values: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.quotes: dict[str, str] = {}
        for message, facts in told:
            quote = f"line {message.number}: {message.text}"
            for name, value in facts.items():
                self.values[name][value] += 1
                if message.text:
                    self.quotes.setdefault(name, quote)
                    self.quotes.setdefault(f"{name}={value}", quote)
            if "name" in facts:
                self.quotes.setdefault(facts["name"], quote)
        self.hosts = {int(facts["rank"]): said.host for said, facts in told if "rank" in facts and said.host}
        self.places = {(message.host, message.device) for message in messages if message.host}
        """The hosts and devices that printed messages."""
        self.ports: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for message, facts in told:
            if "ports" in facts:
                self.ports[message.host][facts["ports"]] = None
        self.links: defaultdict[frozenset[tuple[str, str]], int] = defaultdict(int)
        """Maps the facts about a connection to its channels, one bit for each."""
        for facts in (facts for facts in every if "from" in facts):
            link = frozenset((name, value) for name, value in facts.items() if name != "channel")
            self.links[link] |= _channels(facts.get("channel", "0"))
        plugins = [(facts["plugin"], facts["abi"]) for facts in every if "plugin" in facts]
        known = (plugin for plugin in plugins if plugin[0] == "aws-ofi-nccl")
        self.plugin: tuple[str | None, str | None] = next(known, plugins[-1] if plugins else (None, None))
        self.variables = {facts["name"]: facts["value"] for facts in every if "name" in facts}
        rates = [facts for facts in every if "mbit" in facts]
        self.rates = {facts["port"]: int(facts["mbit"]) // 1000 // int(facts.get("members", 1)) for facts in rates}
        chosen = [facts for facts in every if "algo" in facts]
        self.choices = {(f.get("function", ""), int(f["bytes"])): (f["algo"], f["proto"]) for f in chosen}
        self.lanes: defaultdict[str, set[str]] = defaultdict(set)
        for facts in (facts for facts in every if "lanes" in facts):
            self.lanes[facts["scope"]].update(re.findall(r"\b([a-z]\w+)/[\w.:-]+", facts["lanes"]))

    def seen(self, name: str) -> Counter[str]:
        """Return the values of a fact, and how often each was printed."""
        return self.values.get(name, Counter())

    def first(self, name: str) -> str | None:
        return next(iter(self.seen(name)), None)

    def most(self, name: str) -> int | None:
        """Return the largest number. Smaller communicators are parts of the one that is measured."""
        return max(map(int, self.seen(name)), default=None)

    def path(self, hosts: Sequence[str]) -> DataPath:
        nodes, local = self._nodes(hosts), self.most("local") or len(self.seen("device")) or None
        carriers, inner, staged = self._carriers(nodes, local)
        network, is_rdma = self._network()
        lists = [[name for text in texts for name in self._ports(text, network)] for texts in self.ports.values()]
        listed = tuple(dict.fromkeys(sorted(lists, key=len)[-1] if lists else ()))
        if self.seen("link"):  # perftest uses one port
            listed = tuple(self.seen("verbs"))[:1]
        used = {value for link in self.links for name, value in link if name == "nic"}
        connections = carriers["NET"]
        multicast = self.seen("multicast")
        choices = [Choice(collective=name, bytes=size, algorithm=algo, protocol=proto)
                   for (name, size), (algo, proto) in sorted(self.choices.items())]  # fmt: skip
        nvls_channels = self.most("nvls_channels")
        is_reducing = nvls_channels or self.seen("nvls_tree") or self.seen("nvls_heads")
        lacks_multicast = multicast and "available" not in multicast
        # Each channel enters and leaves a node. Fewer connections: the log is incomplete.
        last = max((channels.bit_length() for channels in self.links.values()), default=1)
        is_whole = connections >= 2 * (self.most("channels") or last)
        return DataPath(
            version=self.first("version"), network=network, rdma=is_rdma, plugin=self.plugin[0],
            plugin_version=self.plugin[1], ports=listed,
            ports_used=len(used) if is_whole else None, gbit=max(self.rates.values(), default=None),
            ports_found=self.most("found"), gpudirect=self._gpudirect(connections, staged, is_rdma),
            gpudirect_reason=self._no_gpudirect(), carriers=dict(carriers), network_in_node=inner, staged=staged,
            nodes=nodes, ranks=self.most("ranks"), ranks_per_node=local,
            nvls="used" if is_reducing else "off" if self.variables.get("NCCL_NVLS_ENABLE") == "0"
            else "not available" if lacks_multicast else None,
            channels=self.most("channels"), nvls_channels=nvls_channels, rings=self.most("rings"),
            trees=max((text.count("[") for text in self.seen("trees")), default=None),
            mnnvl=None if (mnnvl := self.most("mnnvl")) is None else bool(mnnvl), clique=self.most("clique"),
            collnet=bool(self.seen("collnet")), choices=tuple(choices), variables=self.variables, evidence=self.quotes,
            lanes={scope: tuple(sorted(lanes)) for scope, lanes in self.lanes.items()},
            mtu=self.most("mtu"),
        )  # fmt: skip

    def _nodes(self, hosts: Sequence[str]) -> int | None:
        """Return the number of nodes, or None if it is unknown."""
        if (nodes := self.most("nodes")) is not None:
            return nodes
        known = {*hosts} or {host for host, _ in self.places}
        ranks = self.most("ranks") or max((len(text.split()) for text in self.seen("order")), default=None)
        is_whole = hosts or (ranks and len(self.places) >= ranks)
        return len(known) if known and (is_whole or len(known) > 1) else None

    def _carriers(self, nodes: int | None, local: int | None) -> tuple[Counter[str], int, int]:
        """Return the number of connections by transport, the number of those over the network within a node, and the
        number of those over the network that go through memory of the host."""
        carriers: Counter[str] = Counter()
        inner = staged = 0
        hosts = self.hosts if len({*self.hosts.values()}) == nodes else {}
        for link, channels in self.links.items():
            facts, count = dict(link), channels.bit_count()
            if "net" not in facts:
                carriers["SHM" if "shm" in facts else f"P2P/{facts['p2p']}"] += count
                continue
            carriers["NET"] += count
            staged += count * ("staged" in facts)
            first, second = int(facts["from"]), int(facts["to"])
            if nodes == 1 or (first in hosts and hosts.get(first) == hosts.get(second)):
                inner += count
            elif not hosts and local and nodes and self.most("ranks") == local * nodes:
                inner += count * (first // local == second // local)
        return carriers, inner, staged

    def _network(self) -> tuple[str | None, bool]:
        """Return the name of the network that carried the data between nodes, and whether it is RDMA."""
        printed = next((name for key in ("net", "network") if (name := self.first(key))), None)
        listers = sorted(filter(None, self.seen("lister")), key=lambda name: bool(re.search(_DATA["reason"], name)))
        printed = printed or next((name for name in listers if name != "Socket"), next(iter(listers), None))
        if link := self.first("link"):
            return "InfiniBand" if link == "IB" else "RoCE", True
        lanes = " ".join(self.lanes.get("inter-node", ()))
        if lanes:
            is_rdma = re.search(rf"\b(?:{_DATA['ucx']['rdma']})", lanes) is not None
            return ("InfiniBand" if is_rdma else "TCP sockets"), is_rdma
        provider = self.first("provider")
        if provider and (not printed or re.search(f"ibfabric|{_DATA['reason']}", printed)):
            known = _DATA["providers"].get(provider)
            return known or f"libfabric {provider}", known is not None
        for row in _DATA["networks"]:
            if printed and re.fullmatch(row["name"], printed):
                kind = row["kind"]
                is_ethernet = any("/RoCE" in ports for ports in self.seen("ports"))
                is_mixed = any(re.search("/IB(?![a-z])", ports) for ports in self.seen("ports"))
                return ("RoCE" if kind == "InfiniBand" and is_ethernet and not is_mixed else kind), row["rdma"]
        return printed, False

    def _ports(self, text: str, network: str | None) -> list[str]:
        """Return the names of listed ports. NCCL uses only one kind of link at a time; the kind with fewer ports leads
        elsewhere."""
        ports = re.findall(r"\[\d+\]([^\s:]+)(\S*)", text)
        is_socket = not any("/" in rest for _, rest in ports)
        if is_socket != (network == "TCP sockets"):
            return []
        kinds = Counter("RoCE" if "/RoCE" in rest else "IB" for _, rest in ports)
        main = kinds.most_common(1)[0][0] if kinds else ""
        return [name for name, rest in ports if is_socket or ("/RoCE" in rest) == (main == "RoCE")]

    def _gpudirect(self, connections: int, staged: int, is_rdma: bool) -> bool | None:
        """Return whether the NICs reached the memory of the GPUs themselves. None if it is unknown."""
        if not is_rdma:
            return None
        if connections:
            return staged == 0
        if (ring := self.most("gdr_ring")) is not None:
            return bool(ring)
        states = {**self.seen("gdr_gpu"), **self.seen("gdr_port")}
        return "Enabled" in states if states else None

    def _no_gpudirect(self) -> str | None:
        """Return why GPUDirect RDMA is off, as far as the messages say it."""
        for name, off in (("NCCL_NET_GDR_LEVEL", "LOC 0"), ("NCCL_NET_GDR_READ", "0"), ("NCCL_IB_CUDA_SUPPORT", "0")):
            if (value := self.variables.get(name)) and value in off.split():
                return f"{name} is {value}"
        if self.seen("gdr_port")["Disabled"] and not self.seen("gdr_port")["Enabled"]:
            return "the driver offers it for no NIC: neither nvidia-peermem nor DMA-BUF works"
        if self.seen("gdr_gpu")["Disabled"] and not self.seen("gdr_gpu")["Enabled"]:
            return "each NIC is too far from the GPU: they are not behind one PCIe switch"
        return None


def _channels(text: str) -> int:
    """Return a number with a bit for each channel in a list such as `00-03,07`."""
    spans = [part.partition("-") for part in text.split(",")]
    return reduce(int.__or__, ((2 << int(last or first)) - (1 << int(first)) for first, _, last in spans))


def describe(path: DataPath) -> str:
    """Return the way of the data in one line: network, plug-in, GPUDirect, transports in the node, channels."""
    parts = []
    if path.network and (path.nodes != 1 or path.carriers.get("NET")):
        count = min(len(path.ports), path.ports_used or len(path.ports)) or path.ports_found
        rate = f"{path.gbit}G " if path.gbit else ""
        ports = f"{count}\u00d7{rate}" if count and path.rdma else rate
        over = f" over {', '.join(path.ports)}" if path.ports and not path.rdma else ""
        plugin = f" by {path.plugin} {path.plugin_version or ''}".rstrip() if path.plugin and path.rdma else ""
        parts.append(f"{ports}{path.network}{over}{plugin}")
        if path.rdma and path.gpudirect is not None:
            why = f" ({path.gpudirect_reason})" if path.gpudirect_reason else ""
            parts.append("GPUDirect" if path.gpudirect else f"no GPUDirect{why}")
    inner = sorted({name.partition("/")[0] for name in path.carriers} - {"NET"})
    words = {"P2P": "peer access", "SHM": "shared memory of the host"}
    ways = [words[name] for name in inner] + ["the network"] * bool(path.network_in_node)
    ways += ["NVLS"] * (path.nvls == "used")
    parts += [f"{' and '.join(ways)} in the node"] if ways else []
    parts += [f"NVLink between nodes ({path.clique or path.ranks} GPUs)"] if path.mnnvl else []
    text = ", ".join(parts)
    return text + (f"; {plural(path.channels, 'channel')}" if path.channels else "")


def rows_of(path: DataPath) -> list[tuple[str, str]]:
    """Return the facts as pairs of a name and a text, for a table."""
    facts = {label: getattr(path, name) for label, name in _DATA["rows"].items()}
    return [(label, _text(value)) for label, value in facts.items() if value or value is False]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
