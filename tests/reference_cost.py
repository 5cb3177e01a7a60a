"""What changes cost for the matrix of coreweave/nccl-tests, ten devel images for two architectures, as a table.

`python -m tests.reference_cost` prints it for docs/benchmarks.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.build import Count, ProjectState, compare_states, project_state
from imagebuild.project import load_project, make_plan, parse_changes, select_targets, versions_with
from tests.conftest import ROOT

CUDA = "13.2.1,13.1.1,13.0.2,12.9.1,12.8.1,12.6.3"
TARGETS = ("hpcx-cuda1[23].[0-29].*-devel", "hpcx-cuda12.[68].*-ubuntu22.04-devel")


@dataclass(frozen=True)
class Change:
    """A change, and the RUN steps that it may execute again."""

    what: str
    settings: tuple[str, ...]
    limit: int
    theirs: int
    """Steps that the one Dockerfile of the reference executes again, counted in its text."""
    cuda: str = CUDA


CHANGES = (
    Change("NCCL", ("nccl=2.31.2",), 30, 160),
    Change("HPC-X", ("hpcx=2.52",), 36, 140),
    Change("nccl-tests", ("nccl-tests=2.20.0",), 24, 60),
    Change("cuDNN", ("cudnn=9.27.0.42",), 20, 380),
    Change("a CUDA patch release", (), 30, 76, CUDA.replace("13.2.1", "13.2.2")),
)
COLD, COLD_COMPILE = Change("everything", (), 110, 380), 28


def side(*settings: str, cuda: str = CUDA) -> ProjectState:
    """The matrix with these settings."""
    project = load_project(ROOT / "matrix.yaml", ROOT / "dockerfiles", ROOT / "imagebuild.lock")
    changes = parse_changes([f"cuda={cuda}", *settings])
    everything = make_plan(project, changes)
    versions = versions_with(project, changes)
    return project_state(project, versions, select_targets(everything, TARGETS), (), "registry")


def executed(change: Change) -> Count:
    """What the change executes again; of `COLD` everything."""
    before = None if change is COLD else side()
    return compare_states(before, side(*change.settings, cuda=change.cuda), ("before", "after")).total


def table() -> str:
    """The table in Markdown."""
    rows = ["| change | RUN steps executed | of these compile | the reference executes |", "|---|---|---|---|"]
    for change in (COLD, *CHANGES):
        count = executed(change)
        rows.append(f"| {change.what} | {count.run} | {count.compile} | {change.theirs} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())  # noqa: T201
