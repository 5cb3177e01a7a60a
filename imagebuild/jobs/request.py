"""The request for a job: the arguments of `imagebuild job`. `job --help` imports no other module of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["mpijob", "jobset", "slurm"]
"""Programs that start jobs. The file in `jobs/schedulers/` and the template of each program have the program's name."""
SlurmContainer = Literal["pyxis", "apptainer", "none"]
"""The values of `--container`: the ways in which ranks can run on Slurm."""


@dataclass(frozen=True)
class JobRequest:
    """The arguments of `imagebuild job`."""

    words: tuple[str, ...]
    """All arguments, as they were typed."""
    scheduler: Scheduler
    profile: str
    fabric: str
    cluster: str = "generic"
    nodes: int | None = None
    racks: int | None = None
    gpus: int | None = None
    """Number of GPUs of each node that the job uses. Default: all."""
    features: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    container: SlurmContainer | None = None
    image: str | None = None
    nccl: str | None = None
    test: str = "all-reduce"
    settings: tuple[str, ...] = ()
    """Values of `--param`: `NAME=VALUE`, `scope:NAME=VALUE` or `NAME:=VALUE`."""
    collect: bool = False
    compare: str | None = None
    """The sides of a comparison: `nccl=VERSION,…`, `env:NAME=VALUE,…` or `image=IMAGE,…`."""
    libraries: str = ""
    """Folder that contains `nccl-VERSION` for each side, as the ranks see it."""
    blocks: int = 12
    seed: int = 1
    allowed_loss: float | None = None
    """By how much a side may be slower than the first one, in per cent. Default: 0."""
    profiles: str | None = None

    @property
    def images(self) -> tuple[str | None, ...]:
        """The images that the request names: those of a comparison, or else `image`, which may be None."""
        kind, _, names = (self.compare or "").partition("=")
        return tuple(names.split(",")) if kind == "image" else (self.image,)
