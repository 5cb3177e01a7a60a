"""What a check needs of the place where it runs: `gpu`, `gpus>=2`, `rdma`, `nodes>=2`, `slurm`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

PATTERN = r"^(gpu|rdma|slurm|(gpus|nodes)>=[1-9][0-9]*)$"
SINGLE = ("gpu", "rdma", "slurm")
WORDS = {"gpus": "GPUs", "nodes": "nodes"}


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
    why: Mapping[str, str] = field(default_factory=dict)
    """Facility (`gpu`, `rdma`, `nodes`, `slurm`) → why it is absent, where that is known."""


@dataclass(frozen=True)
class Need:
    """One thing that a check needs."""

    what: Literal["gpus", "rdma", "nodes", "slurm"]
    least: int = 1

    def missing(self, have: Facilities) -> str:
        """Why the place does not do; empty if it does: `no gpu here`, `needs 2 GPUs, 1 here`."""
        count = int(getattr(have, self.what))
        if count >= self.least:
            return ""
        name = "gpu" if self.what == "gpus" else self.what
        text = f"no {name} here" if not count else f"needs {self.least} {WORDS[self.what]}, {count} here"
        return f"{text}: {have.why[name]}" if have.why.get(name) else text


def parse(text: str) -> Need:
    """A need as `component.yaml` spells it. Raises ValueError with the known ones if it is none."""
    if text in SINGLE:
        return Need("gpus" if text == "gpu" else cast(Literal["rdma", "slurm"], text))
    if re.match(PATTERN, text):
        what, _, least = text.partition(">=")
        return Need(cast(Literal["gpus", "nodes"], what), int(least))
    raise ValueError(f"{text!r} is no need; known: {', '.join(SINGLE)}, gpus>=N, nodes>=N")


def missing(needs: Iterable[str], have: Facilities) -> str:
    """Why a check with these needs cannot run; empty if it can."""
    return "; ".join(filter(None, (parse(need).missing(have) for need in needs)))


def nodes(needs: Iterable[str]) -> int:
    """How many nodes a check uses."""
    return max((need.least for need in map(parse, needs) if need.what == "nodes"), default=1)
