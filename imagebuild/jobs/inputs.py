"""What a job is made of: the facts, the machine, the request and the image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from imagebuild.config import Document
from imagebuild.fields import Arch
from imagebuild.jobs.models import (
    Cluster,
    Fabric,
    Feature,
    JobTest,
    NodeFacts,
    Parameters,
    Scheduler,
    SchedulerFacts,
    Stack,
)


@dataclass(frozen=True)
class Facts:
    """All of `jobs/`, read."""

    stacks: Mapping[str, Document[Stack]]
    fabrics: Mapping[str, Document[Fabric]]
    features: Mapping[str, Document[Feature]]
    clusters: Mapping[str, Document[Cluster]]
    tests: Mapping[str, Document[JobTest]]
    schedulers: Mapping[str, Document[SchedulerFacts]]
    node: Document[NodeFacts]
    parameters: Parameters


@dataclass(frozen=True)
class Machine:
    """What a job needs to know of a profile."""

    profile: str
    gpu: str
    """Short name, in names of jobs and in clusters' files."""
    arch: Arch
    gpus: int
    """Of a node."""
    rack_nodes: int = 1
    """Nodes whose GPUs are joined by NVLink; 1 where only those of a node are."""
    nvls: bool = False
    capability: str | None = None
    """Compute capability, `9.0`."""
    cards: int = 0
    """Network cards or ports of a node."""
    network: str | None = None
    """What kind the cards are."""
    thresholds: Mapping[tuple[str, int, int], float] = field(default_factory=dict)
    """Collective, ranks and nodes → GB/s that the best size must reach."""

    @property
    def mnnvl(self) -> bool:
        """Whether NVLink goes beyond the node."""
        return self.rack_nodes > 1


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    scheduler: Scheduler
    profile: str
    fabric: str
    cluster: str = "generic"
    nodes: int | None = None
    racks: int | None = None
    features: tuple[str, ...] = ()
    container: str = "pyxis"
    """For Slurm."""
    image: str | None = None
    nccl: str | None = None
    test: str = "all-reduce"
    settings: tuple[str, ...] = ()
    collect: bool = False


@dataclass(frozen=True)
class Image:
    """The image that a job runs, as far as it is known."""

    reference: str
    stack: str
    nccl: str | None
    arches: tuple[Arch, ...] | None
    """None where it is not known."""
    driver: str | None = None
    """Oldest that it runs on, where that is known."""
