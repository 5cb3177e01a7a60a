"""The cost of changes in RUN steps, for the matrix of coreweave/nccl-tests: ten devel images for two architectures.

`python -m tests.reference_cost` prints the table of docs/evidence.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.build.impact import ProjectState, compare_states, read_state
from imagebuild.core.console import markdown_table
from imagebuild.project.project import parse_changes
from tests.conftest import ROOT

CUDA = "13.2.1,13.1.1,13.0.2,12.9.1,12.8.1,12.6.3"
TARGETS = ("hpcx-cuda1[23].[0-29].*-devel", "hpcx-cuda12.[68].*-ubuntu22.04-devel")


@dataclass(frozen=True)
class Change:
    """A change, and the maximum number of RUN steps that it may execute again."""

    what: str
    settings: tuple[str, ...]
    limit: int
    theirs: int
    """RUN steps that the single Dockerfile of coreweave/nccl-tests executes again, counted in its text."""
    cuda: str = CUDA


CHANGES = (
    Change("NCCL", ("nccl=2.31.2",), 30, 160),
    Change("HPC-X", ("hpcx=2.52",), 36, 140),
    Change("nccl-tests", ("nccl-tests=2.20.0",), 24, 60),
    Change("cuDNN", ("cudnn=9.27.0.42",), 20, 380),
    Change("a CUDA patch release", (), 30, 76, CUDA.replace("13.2.1", "13.2.2")),
)
COLD = Change("everything", (), 110, 380)


def state(*settings: str, cuda: str = CUDA) -> ProjectState:
    """Return the state of the project with these settings."""
    return read_state(ROOT, parse_changes([f"cuda={cuda}", *settings]), TARGETS, base="registry")


def executed(change: Change) -> int:
    """Return the number of RUN steps that the change executes again. For `COLD`: all steps."""
    before = None if change is COLD else state()
    return compare_states(before, state(*change.settings, cuda=change.cuda), ("before", "after")).run


def table() -> str:
    """Return the table in Markdown."""
    rows = ((change.what, str(executed(change)), str(change.theirs)) for change in (COLD, *CHANGES))
    return markdown_table(("change", "RUN steps executed", "the reference executes"), rows)


if __name__ == "__main__":
    print(table())  # noqa: T201
