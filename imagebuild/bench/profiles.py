"""Read profiles: what a kind of machine is, how fast its links are, what others measured on it (`profiles/*.yaml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from imagebuild.bench.models import AlgorithmName, Collective
from imagebuild.core.errors import ConfigError, Mistakes, suggestion
from imagebuild.core.fields import Arch, Form, Model, Release, YamlFile
from imagebuild.core.yaml import load_yaml

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(GB/s|Gb/s)")


def _rate(value: Any) -> Any:
    """Return a number with its unit as GB/s."""
    if not isinstance(value, str):
        return value
    match = _RATE.fullmatch(value.strip())
    if not match:
        raise ValueError("needs a number and a unit, one of GB/s, Gb/s")
    return float(match[1]) / (8 if match[2] == "Gb/s" else 1)


Rate = Annotated[
    float,
    BeforeValidator(_rate),
    Field(gt=0),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?(GB/s|Gb/s)$"}),
]
"""Bytes a second, one way: `450 GB/s`, or bits: `400 Gb/s`. In the model: GB/s of 10^9 bytes."""
Date = Annotated[str, Form("20[0-9]{2}-[0-9]{2}(-[0-9]{2})?", "a date as YYYY-MM or YYYY-MM-DD")]
Tolerance = Annotated[float, Field(gt=0, le=1)]


class Sourced(Model):
    """Hold a number that somebody published."""

    source: str
    """The document that says it, or a repository with file and commit."""
    date: Date
    """When it was published or measured."""


class Gpu(Sourced):
    """Describe the GPU."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names as the driver prints them; `*` stands for anything."""
    compute_capability: Annotated[str, Form(r"[0-9]+\.[0-9]", "a compute capability such as 9.0")] | None = None
    """Of an NVIDIA GPU."""


class Node(Sourced):
    """Describe a host: one machine with one operating system."""

    cpu: Arch
    gpus: Annotated[int, Field(gt=0)]


class Link(Sourced):
    """Describe a link that joins GPUs without a network card, or a GPU and the memory and cards of its host."""

    kind: str
    """With its generation: `NVLink 4`."""
    gpus: Annotated[int, Field(gt=0)] = 1
    """Number of GPUs that it joins; 1 of a link to the host. If a host has fewer, it joins those of several hosts, as
    in a rack."""
    rate: Rate
    """All that one GPU can send over it, one way."""
    pair: Rate | None = None
    """What one GPU can send to another, if that is less: with wires instead of a switch."""
    nvls: bool = False
    """Whether the switch reduces and multicasts (NVLink SHARP: NVSwitch 3 and later)."""


class Floor(Sourced):
    """Hold the least part of a ceiling that healthy machines reach."""

    fraction: Tolerance


class Network(Sourced):
    """Describe the network cards of a host that GPUs use, or the ports of these cards."""

    kind: Literal["infiniband", "roce", "efa", "tcpxo", "slingshot", "ethernet"]
    """The switches of `infiniband` can reduce (SHARP)."""
    count: Annotated[int, Field(gt=0)]
    rate: Rate
    """Of one card or port, one way."""
    floor: Floor | None = None
    """Of runs over this network, if it is not that of `judge`."""


class Measured(Sourced):
    """Hold a rate that somebody measured."""

    rate: Rate
    tolerance: Tolerance = 0.9
    """The least fraction of the rate that passes; 1 if the rate is a threshold itself."""


class MeasuredSpeed(Measured):
    """Hold the bus bandwidth of a collective at its best size."""

    collective: Collective
    ranks: Annotated[int, Field(gt=1)]
    nodes: Annotated[int, Field(gt=0)] = 1
    """Number of hosts."""
    algorithm: AlgorithmName | None = None
    """Class of algorithms, if it was not the library's own choice or is known."""
    forced: bool = False
    """Whether the library was made to use `algorithm`, so that only runs which say the same are compared."""


class NamedRate(Measured):
    """Hold the rate of tests that are named: of the worst pair of nvbandwidth, of NVSHMEM, of one card of perftest."""

    tests: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of tests as printed, with `*` for anything: `RDMA_Write BW`."""
    memory: Literal["host", "gpu"] | None = None
    """Memory of perftest's buffers. The output does not say it, so a measurement is compared with the lower rate."""

    def is_for(self, test: str) -> bool:
        return any(fnmatchcase(test.casefold(), pattern.casefold()) for pattern in self.tests)


class ProfileFile(Model):
    """Describe a file of `profiles/`."""

    title: str
    extends: Release | None = None
    """A profile that this one is like. Keys of this file replace those of that profile; references are added to them.
    With a `network` of its own, a profile takes over only references within one link, and no `wires`."""
    gpu: Gpu | None = None
    node: Node | None = None
    links: tuple[Link, ...] = ()
    """The link that joins fewest GPUs comes first."""
    host_link: Link | None = None
    network: Network | None = None
    references: tuple[MeasuredSpeed, ...] = ()
    copies: tuple[NamedRate, ...] = ()
    wires: tuple[NamedRate, ...] = ()


class Profile(ProfileFile):
    """Hold a profile with all its parts, those of the profile that it extends too."""

    name: str
    gpu: Gpu
    node: Node
    links: Annotated[tuple[Link, ...], Field(min_length=1)]

    def has(self, device: str) -> bool:
        """Return whether this is the driver's name of the GPU; a slice of a GPU (`… MIG 3g.40gb`) is other hardware."""
        words = device.casefold().split()
        return "mig" not in words and any(fnmatchcase(device.casefold(), name.casefold()) for name in self.gpu.names)

    def references_at(self, collective: str, ranks: int, nodes: int) -> list[MeasuredSpeed]:
        """Return the references of a collective at this scale."""
        return [r for r in self.references if (r.collective, r.ranks, r.nodes) == (collective, ranks, nodes)]

    @property
    def hosts_per_domain(self) -> int:
        """Return the number of hosts whose GPUs one link joins."""
        return _hosts_per_domain(self.links, self.node)


Profiles = Mapping[str, YamlFile[Profile]]
"""Profiles by name."""


def load_profiles(*folders: Path) -> Profiles:
    """Read all profiles of folders; of one name, the last folder's.

    Raises ConfigError with every mistake found, each with its file and line.
    """
    mistakes = Mistakes()
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    if not files:
        raise ConfigError(f"{folders[-1]}: no profiles (*.yaml) here; give their folder with --profiles")
    loaded = {name: load_yaml(file, ProfileFile, mistakes) for name, file in files.items()}
    documents = {name: document for name, document in loaded.items() if document}
    profiles = {name: _complete_profile(name, documents, set(loaded), mistakes) for name in documents}
    mistakes.stop_if_any()
    return {name: profile for name, profile in profiles.items() if profile}


def find_profile(profiles: Profiles, name: str) -> YamlFile[Profile]:
    """Return the profile of that name. Raises ConfigError with the nearest name."""
    if name not in profiles:
        raise ConfigError(f"no profile {name!r}{suggestion(name, set(profiles))}")
    return profiles[name]


def profile_key(reference: MeasuredSpeed) -> tuple[str, int, int, str | None]:
    """Return the key of a reference: a profile's own replaces an inherited one with the same key."""
    return reference.collective, reference.ranks, reference.nodes, reference.algorithm if reference.forced else None


def _complete_profile(
    name: str, documents: Mapping[str, YamlFile[ProfileFile]], known: set[str], mistakes: Mistakes
) -> YamlFile[Profile] | None:
    """Return a profile with what it takes over from the one it extends; None if that cannot be done."""
    document = documents[name]
    own, problem = document.model, ""
    values = dict(own)
    if own.extends:
        base = documents[own.extends].model if own.extends in documents else None
        if own.extends not in known:
            problem = f"no profile {own.extends!r}{suggestion(own.extends, known)}"
        elif base and base.extends:
            problem = f"{own.extends} extends {base.extends}; name {base.extends}"
        if problem:
            mistakes.add(document.at("extends"), f"extends: {problem}")
        if problem or base is None:
            return None  # the mistakes of a base are reported with its file
        domain = _hosts_per_domain(base.links, base.node) if base.links and base.node else 1
        replaced = {profile_key(reference) for reference in own.references}
        kept = (r for r in base.references if profile_key(r) not in replaced and not (own.network and r.nodes > domain))
        values = dict(base) | {field: values[field] for field in own.model_fields_set}
        values |= {"references": (*kept, *own.references), "wires": own.wires if own.network else values["wires"]}
    missing = [field for field in ("gpu", "node", "links") if not values[field]]
    for field in missing:
        mistakes.add(document.at(), f"{field}: is missing")
    return None if missing else YamlFile(document.path, Profile(name=name, **values), document.lines)


def _hosts_per_domain(links: tuple[Link, ...], node: Node) -> int:
    return max(1, links[-1].gpus // node.gpus)
