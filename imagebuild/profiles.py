"""Profiles: what a kind of machine is, how fast its links are, and what others measured on it. `profiles/*.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from imagebuild.ceilings import AlgorithmName, Collective
from imagebuild.config import Document, Mistakes, load, suggestion
from imagebuild.errors import ConfigError
from imagebuild.fields import Arch, Model, Release

UNITS = {"GB/s": 1.0, "Gb/s": 1 / 8}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]+)")


def _quantity(units: Mapping[str, float]) -> Any:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _QUANTITY.fullmatch(value.strip())
        if not match or match[2] not in units:
            raise ValueError(f"needs a number and a unit, one of {', '.join(units)}")
        return float(match[1]) * units[match[2]]

    return read


def _schema(units: Mapping[str, float]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^[0-9]+([.][0-9]+)? ?({'|'.join(units)})$"})


Rate = Annotated[float, BeforeValidator(_quantity(UNITS)), Field(gt=0), _schema(UNITS)]
"""Bytes a second, one way: `450 GB/s`, or bits: `400 Gb/s`. In the model: GB/s of 10^9 bytes."""
Size = Annotated[int, BeforeValidator(_quantity(BINARY)), Field(gt=0), _schema(BINARY)]
"""`16 GiB`. In the model: bytes."""
Date = Annotated[str, Field(pattern=r"^20[0-9]{2}-[0-9]{2}(-[0-9]{2})?$")]
Tolerance = Annotated[float, Field(gt=0, le=1)]


class Sourced(Model):
    """A number that somebody published."""

    source: str
    """Who says so: a document, or a repository with file and commit."""
    date: Date
    """When it was published or measured."""


class Gpu(Sourced):
    """The GPU."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """As the driver prints it; `*` stands for anything."""
    compute_capability: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$")] | None = None
    """Of an NVIDIA GPU."""
    driver: str | None = None
    """Oldest driver that knows the GPU."""


class Node(Sourced):
    """A host: what runs one operating system."""

    cpu: Arch
    gpus: Annotated[int, Field(gt=0)]


class Link(Sourced):
    """What joins GPUs without a network card."""

    kind: str
    """With its generation: `NVLink 4`."""
    gpus: Annotated[int, Field(gt=1)]
    """How many GPUs it joins. More than a host has: those of several hosts, as in a rack."""
    rate: Rate
    """All that one GPU can send to its peers together, one way."""
    pair: Rate | None = None
    """Between two GPUs, where that is less: wires instead of a switch."""
    nvls: bool = False
    """The switch reduces and multicasts (NVLink SHARP: NVSwitch 3 and later)."""


class HostLink(Sourced):
    """Between a GPU and its host's memory and network cards."""

    kind: str
    rate: Rate
    """One way."""


class Network(Sourced):
    """The network cards of a host that GPUs use, or their ports."""

    kind: Literal["infiniband", "roce", "efa", "tcpxo", "slingshot", "ethernet"]
    """Switches of `infiniband` can reduce (SHARP)."""
    count: Annotated[int, Field(gt=0)]
    rate: Rate
    """Of one card or port, one way."""


class Measured(Sourced):
    """A number that others reached."""

    rate: Rate
    tolerance: Tolerance = 0.9
    """The least fraction of it that passes; 1 for what is a threshold already."""


class Reference(Measured):
    """Bus bandwidth of a collective at its best size."""

    collective: Collective
    ranks: Annotated[int, Field(gt=1)]
    nodes: Annotated[int, Field(gt=0)] = 1
    """Hosts."""
    algorithm: AlgorithmName | None = None
    """Class, where it was not the library's own choice or is known."""
    forced: bool = False
    """The library was made to use `algorithm`, so only runs that say the same are compared."""
    size: Size | None = None
    """Where it was measured."""


class Copy(Measured):
    """Rate of a test of nvbandwidth, or of p2pBandwidthLatencyTest, for its worst pair."""

    tests: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names, with `*` for anything."""


class Wire(Measured):
    """Rate of a test of perftest over one card."""

    tests: Annotated[tuple[str, ...], Field(min_length=1)]
    """As printed, with `*` for anything: `RDMA_Write BW`."""
    memory: Literal["host", "gpu"]
    """Where the buffers were. The output does not say, so a measurement is held against the lower one."""


class ProfileFile(Model):
    """A file of `profiles/`."""

    title: str
    extends: Release | None = None
    """A profile that this one is like. What is said here replaces what that one says, key by key; references are added.
    With a `network` of its own, a profile takes over only references within one link, and no `wires`."""
    gpu: Gpu | None = None
    node: Node | None = None
    links: tuple[Link, ...] = ()
    """The one that joins fewest GPUs first."""
    host_link: HostLink | None = None
    network: Network | None = None
    references: tuple[Reference, ...] = ()
    copies: tuple[Copy, ...] = ()
    wires: tuple[Wire, ...] = ()


class Profile(ProfileFile):
    """A profile whose parts are all there."""

    name: str
    gpu: Gpu
    node: Node
    links: Annotated[tuple[Link, ...], Field(min_length=1)]

    def has(self, device: str) -> bool:
        """Whether the driver calls this profile's GPU so."""
        return any(fnmatchcase(device.casefold(), name.casefold()) for name in self.gpu.names)

    @property
    def hosts_per_domain(self) -> int:
        """Hosts whose GPUs are joined by a link."""
        return _hosts(self.links, self.node)


def _hosts(links: tuple[Link, ...], node: Node) -> int:
    return max(1, links[-1].gpus // node.gpus)


Profiles = Mapping[str, Document[Profile]]


def load_profiles(folder: Path) -> Profiles:
    """Read all profiles of a folder. Raises ConfigError with every mistake found, each with its file and line."""
    mistakes = Mistakes()
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(f"{folder}: no profiles (*.yaml) here; give their folder with --profiles")
    read = {file.stem: load(file, ProfileFile, mistakes) for file in files}
    documents = {name: document for name, document in read.items() if document}
    whole = {name: _whole(name, documents, set(read), mistakes) for name in documents}
    mistakes.stop_if_any()
    return {name: document for name, document in whole.items() if document}


def find(profiles: Profiles, name: str) -> Document[Profile]:
    """The profile of that name. Raises ConfigError with the nearest name."""
    if name not in profiles:
        raise ConfigError(f"no profile {name!r}{suggestion(name, set(profiles))}")
    return profiles[name]


def _whole(
    name: str, documents: Mapping[str, Document[ProfileFile]], known: set[str], mistakes: Mistakes
) -> Document[Profile] | None:
    """A profile with what it takes over from the one it extends."""
    document = documents[name]
    own = document.model
    values = _said(own)
    if own.extends:
        if own.extends not in known:
            mistakes.add(document.at("extends"), f"extends: no profile {own.extends!r}{suggestion(own.extends, known)}")
            return None
        if own.extends not in documents:
            return None  # that file's own mistakes are said
        base = documents[own.extends].model
        if base.extends:
            mistakes.add(document.at("extends"), f"extends: {own.extends} itself extends {base.extends}; name that one")
            return None
        values = _merged(base, own)
    absent = [field for field in ("gpu", "node", "links") if field not in values]
    for field in absent:
        mistakes.add(document.at(), f"{field}: is missing")
    if absent:
        return None
    return Document(document.path, Profile(name=name, **values), document.lines)


def _said(model: ProfileFile) -> dict[str, Any]:
    return {field: getattr(model, field) for field in model.model_fields_set}


def _merged(base: ProfileFile, own: ProfileFile) -> dict[str, Any]:
    taken, said = _said(base), _said(own)
    if own.network:
        domain = _hosts(base.links, base.node) if base.links and base.node else 1
        taken["references"] = tuple(r for r in base.references if r.nodes <= domain)
        taken.pop("wires", None)
    replaced = {key(r) for r in own.references}
    kept = tuple(r for r in taken.get("references", ()) if key(r) not in replaced)
    return {**taken, **said, "references": kept + own.references}


def key(reference: Reference) -> tuple[str, int, int, str | None]:
    """What tells references apart: of two with the same, a profile's own replaces the one taken over."""
    return reference.collective, reference.ranks, reference.nodes, reference.algorithm if reference.forced else None
