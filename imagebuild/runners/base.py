"""What a runner is: anything that can run a command in an image."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Facilities:
    """What the place has where a runner's commands run."""

    gpus: int = 0
    """GPUs that a command in the image can use."""
    rdma: bool = False
    """Whether there is an RDMA device with an active port."""
    nodes: int = 1
    """Containers or hosts that a check may use together."""
    slurm: bool = False
    """Whether ranks can be started with `srun --mpi=pmix`."""


@dataclass(frozen=True)
class Command:
    """What is to run in the image."""

    script: str
    """For `bash -euo pipefail -c`."""
    user: str = "root"
    timeout_s: float = 60
    """After this, the command and its children are killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    """How many nodes it uses: it runs on the first, and finds all names in `IMAGEBUILD_NODES`, separated by blanks;
    the others answer ssh to `user` without a password."""
    ranks: int = 1
    """How many times it is started together, by srun."""


@dataclass(frozen=True)
class Execution:
    """What came of a command."""

    argv: tuple[str, ...]
    """What was started, to be kept as evidence."""
    status: int | None
    """Exit status; `None` if it was killed for its time."""
    output: str
    """Standard output and error together, also of a command that was killed."""
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the command was given, with secrets blanked."""


class Session(Protocol):
    """An image that is ready to run commands."""

    @property
    def facilities(self) -> Facilities: ...

    def run(self, command: Command) -> Execution:
        """Run a command. A non-zero status is a result; raises CommandError if the runner itself fails."""


class Runner(Protocol):
    """A way to run commands in an image."""

    @property
    def name(self) -> str:
        """As `--runner` names it."""

    def session(self, image: str) -> AbstractContextManager[Session]:
        """Make the image ready; what was started for it ends with the context."""
