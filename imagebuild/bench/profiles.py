"""Read `profiles/*.yaml`: the GPUs, links and network of a kind of machine, and published measurements on it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from imagebuild.bench.models import AlgorithmName, Collective
from imagebuild.core.advisory import Place
from imagebuild.core.errors import ConfigError, Mistakes, suggestion
from imagebuild.core.fields import Arch, Form, Model, Release, YamlFile
from imagebuild.core.yaml import load_yaml

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(GB/s|Gb/s)")


def _rate(value: Any) -> Any:
    """Convert a text such as `400 Gb/s` to GB/s."""
    if not isinstance(value, str):
        return value
    if not (match := _RATE.fullmatch(value.strip())):
        raise ValueError("needs a number and a unit (GB/s or Gb/s)")
    return float(match[1]) / (8 if match[2] == "Gb/s" else 1)


_RATE_SCHEMA = WithJsonSchema({"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?(GB/s|Gb/s)$"})
Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0), _RATE_SCHEMA]
"""Bandwidth in one direction, in bytes (`450 GB/s`) or bits (`400 Gb/s`). The model contains GB/s (10^9 bytes a
second)."""
Date = Annotated[str, Form("20[0-9]{2}-[0-9]{2}(-[0-9]{2})?", "a date as YYYY-MM or YYYY-MM-DD")]
Tolerance = Annotated[float, Field(gt=0, le=1)]


class Sourced(Model):
    """A published fact."""

    source: str
    """The document with the fact, or the repository with file and commit."""
    date: Date
    """Date of publication or measurement."""


class Gpu(Sourced):
    """The GPU model."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names that the driver prints. `*` matches any text."""
    compute_capability: Annotated[str, Form(r"[0-9]+\.[0-9]", "a compute capability such as 9.0")] | None = None
    """Compute capability of an NVIDIA GPU."""


class Node(Sourced):
    """A host: a machine with its own operating system."""

    cpu: Arch
    gpus: Annotated[int, Field(gt=0)]


class Link(Sourced):
    """A link between GPUs without a NIC, or between a GPU and the memory and NICs of its host."""

    kind: str
    """Name and generation, such as `NVLink 4`."""
    gpus: Annotated[int, Field(gt=0)] = 1
    """Number of GPUs that the link joins. If it is larger than the GPUs of a host, the link joins several hosts, as in
    a rack. Default: 1, for a link between a GPU and its host."""
    rate: Rate
    """Bandwidth with which one GPU can send to all its peers."""
    pair: Rate | None = None
    """Bandwidth between two GPUs, if it is lower: without a switch, each pair of GPUs has its own wires."""
    nvls: bool = False
    """Whether the switch can reduce and multicast (NVLink SHARP: NVSwitch 3 and later)."""


class Floor(Sourced):
    """The smallest fraction of a ceiling that healthy machines reach."""

    fraction: Tolerance


class Network(Sourced):
    """The NICs of a host that GPUs use, or the ports of these NICs."""

    kind: Literal["infiniband", "roce", "efa", "tcpxo", "slingshot", "ethernet"]
    """Network type. Switches of `infiniband` are assumed to support reductions (SHARP)."""
    count: Annotated[int, Field(gt=0)]
    rate: Rate
    """Bandwidth of one NIC or port in one direction."""
    floor: Floor | None = None
    """Smallest fraction of the ceiling that healthy runs over this network reach. Default: 0.5, but 0.25 for alltoallv
    and sendrecv, and no limit between racks."""


class Measured(Sourced):
    """A published measurement of a bandwidth."""

    rate: Rate
    tolerance: Tolerance = 0.9
    """The smallest fraction of the rate that passes. Set 1 if the rate itself is a threshold. Default: 0.9."""


class MeasuredSpeed(Measured):
    """The measured bus bandwidth of a collective at its best size."""

    collective: Collective
    ranks: Annotated[int, Field(gt=1)]
    nodes: Annotated[int, Field(gt=0)] = 1
    """Number of hosts."""
    algorithm: AlgorithmName | None = None
    """Class of algorithms that was used. `None`: unknown; imagebuild assumes that the library chose the algorithm."""
    forced: bool = False
    """Whether the library was told to use `algorithm`. If so, only runs with the same setting are compared."""


class NamedRate(Measured):
    """The measured bandwidth of tests: the slowest pair of devices (nvbandwidth, NVSHMEM), or one NIC (perftest)."""

    tests: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of tests as printed, such as `RDMA_Write BW`. `*` matches any text."""
    memory: Literal["host", "gpu"] | None = None
    """Memory of perftest's buffers. If the output does not name the memory, a test is compared with the lower rate."""
    size_bytes: Annotated[int, Field(gt=0)] | None = None
    """Size of the measured messages. Only rows of this size are compared. Default: rows of any size."""
    queue_pairs: Annotated[int, Field(gt=0)] | None = None
    """Number of queue pairs of perftest. Only tests with this number are compared. Default: any number."""

    def is_for(self, test: str) -> bool:
        """Return whether the rate applies to a test. A rate of writes over a port also applies to reads and sends."""
        names = (test.casefold(), re.sub(r"^(?:rdma_read|send)(?= bw)", "rdma_write", test.casefold()))
        return any(fnmatchcase(name, pattern.casefold()) for name in names for pattern in self.tests)


class ProfileFile(Model):
    """A file in `profiles/`."""

    title: str
    extends: Release | None = None
    """Name of a profile to inherit from. The keys of this file replace inherited keys, but its references are added to
    the inherited ones. If this file has a `network`, it does not inherit `wires`, and inherits only references of runs
    within one link."""
    gpu: Gpu | None = None
    node: Node | None = None
    links: tuple[Link, ...] = ()
    """Links between GPUs. The link that joins the fewest GPUs comes first."""
    host_link: Link | None = None
    network: Network | None = None
    references: tuple[MeasuredSpeed, ...] = ()
    copies: tuple[NamedRate, ...] = ()
    """References for copies between devices (nvbandwidth, NVSHMEM)."""
    wires: tuple[NamedRate, ...] = ()
    """References for one NIC (perftest)."""


class Profile(ProfileFile):
    """A complete profile, including the inherited parts."""

    name: str
    gpu: Gpu
    node: Node
    links: Annotated[tuple[Link, ...], Field(min_length=1)]

    def has(self, device: str) -> bool:
        """Return whether `device` is a driver's name for this GPU. A part of a GPU (`… MIG 3g.40gb`) does not count."""
        words = device.casefold().split()
        return "mig" not in words and any(fnmatchcase(device.casefold(), name.casefold()) for name in self.gpu.names)

    def references_at(self, collective: str, ranks: int, nodes: int) -> list[MeasuredSpeed]:
        """Return the references of a collective for exactly this number of ranks and nodes."""
        return [r for r in self.references if (r.collective, r.ranks, r.nodes) == (collective, ranks, nodes)]

    @property
    def stamp(self) -> str:
        """The name and the hash of the profile, by which results say how they were judged."""
        return f"{self.name} sha256:{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]}"

    @property
    def place(self) -> Place:
        """What is known about the machines, to choose advisories."""
        gpu, network = self.gpu.compute_capability, self.network.kind if self.network else "none"
        nvlink = ("nvlink",) if self.hosts_per_domain > 1 else ()
        return Place(archs=(self.node.cpu,), gpus=(gpu or "none",), fabrics=(network, *nvlink))

    @property
    def hosts_per_domain(self) -> int:
        """The number of hosts whose GPUs the widest link joins."""
        return _hosts_per_domain(self.links, self.node)


Profiles = Mapping[str, YamlFile[Profile]]
"""Maps the name of each profile to its file."""


def load_profiles(*folders: Path) -> Profiles:
    """Read all profiles in folders. A profile in a later folder replaces one with the same name.
    Raises ConfigError with every mistake found, each with its file and line."""
    mistakes = Mistakes()
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    if not files:
        raise ConfigError(f"{folders[-1]}: contains no profiles (*.yaml); name another folder with --profiles")
    loaded = {name: load_yaml(file, ProfileFile, mistakes) for name, file in files.items()}
    documents = {name: document for name, document in loaded.items() if document}
    profiles = {name: _complete_profile(name, documents, set(loaded), mistakes) for name in documents}
    mistakes.stop_if_any()
    complete = {name: profile for name, profile in profiles.items() if profile}
    return {name: _with_shared_references(profile, complete.values()) for name, profile in complete.items()}


def find_profile(profiles: Profiles, name: str) -> YamlFile[Profile]:
    """Return the profile with a name. Raises ConfigError, which suggests the nearest name, if there is none."""
    if name not in profiles:
        raise ConfigError(f"no profile {name!r}{suggestion(name, set(profiles))}")
    return profiles[name]


def profile_key(reference: MeasuredSpeed) -> tuple[str, int, int, str | None]:
    """Return the key of a reference. A reference replaces an inherited one with the same key."""
    return reference.collective, reference.ranks, reference.nodes, reference.algorithm if reference.forced else None


def _complete_profile(
    name: str, documents: Mapping[str, YamlFile[ProfileFile]], known: set[str], mistakes: Mistakes
) -> YamlFile[Profile] | None:
    """Return a profile with its inherited parts. If there are mistakes, note them and return None."""
    document = documents[name]
    own, problem = document.model, ""
    values = dict(own)
    if own.extends:
        base = documents[own.extends].model if own.extends in documents else None
        if own.extends not in known:
            problem = f"no profile {own.extends!r}{suggestion(own.extends, known)}"
        elif base and base.extends:
            problem = f"{own.extends} itself extends {base.extends}; extend {base.extends} instead"
        if problem:
            mistakes.add(document.at("extends"), f"extends: {problem}")
        if problem or base is None:
            return None  # mistakes in the base are reported with its own file
        domain = _hosts_per_domain(base.links, base.node) if base.links and base.node else 1
        replaced = {profile_key(reference) for reference in own.references}
        kept = (r for r in base.references if profile_key(r) not in replaced and not (own.network and r.nodes > domain))
        values = dict(base) | {field: values[field] for field in own.model_fields_set}
        values |= {"references": (*kept, *own.references), "wires": own.wires if own.network else values["wires"]}
    missing = [field for field in ("gpu", "node", "links") if not values[field]]
    for field in missing:
        problem = f"{field}: is missing; add it, or take it from another profile with `extends`"
        pcie = "; without NVLink, a link is `{kind: PCIe 4 x16, gpus: NUMBER, rate: 31 GB/s, source: …, date: …}`"
        mistakes.add(document.at(), problem + pcie * (field == "links"))
    return None if missing else YamlFile(document.path, Profile(name=name, **values), document.lines)


def _with_shared_references(document: YamlFile[Profile], others: Iterable[YamlFile[Profile]]) -> YamlFile[Profile]:
    """Return a profile with the references of profiles with the same links. References between NVLink domains and of
    NICs also need the same NICs. Own references come first. Of other profiles' references with one key, the lowest
    counts."""
    own = document.model
    known = {profile_key(reference) for reference in own.references}
    shared: dict[tuple[str, int, int, str | None], MeasuredSpeed] = {}
    wires = own.wires
    # Name the profile that has a reference, rather than one that inherits it.
    for other in sorted((other.model for other in others), key=lambda other: other.extends is not None):
        if other.name == own.name or _speeds(other.links) != _speeds(own.links) or other.node.gpus != own.node.gpus:
            continue
        same_nics = _speeds([other.network]) == _speeds([own.network])
        for reference in other.references:
            key = profile_key(reference)
            if key not in known and (same_nics or reference.nodes <= own.hosts_per_domain):
                source = f"{reference.source} (profile {other.name}, with the same links{' and NICs' * same_nics})"
                least = min(shared.get(key, reference), reference, key=lambda r: r.rate * r.tolerance)
                shared[key] = least.model_copy(update={"source": source}) if least is reference else least
        wires = wires or (other.wires if same_nics else ())
    profile = own.model_copy(update={"references": (*shared.values(), *own.references), "wires": wires})
    return YamlFile(document.path, profile, document.lines)


def _speeds(links: Iterable[Link | Network | None]) -> list[dict[str, Any]]:
    """Return what is equal for links or NICs of the same speed."""
    return [link.model_dump(exclude={"source", "date", "floor"}) if link else {} for link in links]


def _hosts_per_domain(links: tuple[Link, ...], node: Node) -> int:
    return max(1, links[-1].gpus // node.gpus)
