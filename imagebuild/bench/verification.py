"""The result of `imagebuild verify`: the JSON that verify writes, and that report and publish read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from imagebuild.bench.models import Judgement, Results
from imagebuild.core.fields import Model

Outcome = Literal["passed", "failed", "skipped"]
SPEED = "-speed"
"""End of the name of the result about a check's speed."""


class CheckResult(Model):
    """Hold the result of a check of an image."""

    component: str
    check: str
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or failed; of a passed one, what was skipped."""
    output: str = ""
    """The end of what it printed; the evidence folder has all."""
    seconds: float = 0.0
    command: tuple[str, ...] = ()
    """What was started, as someone would start it by hand; secrets are blanked."""
    status: int | None = None
    """Exit status; `None` if nothing was started, or if it was killed."""
    timeout: bool = False
    """Whether it was killed because it did not end in time."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables that were set besides the image's own; secrets are blanked."""
    started: str | None = None
    log: str | None = None
    """Name of the file in the evidence folder that has the whole output."""
    sha256: str = ""
    """Hash of the check as it ran; publishing compares it with the project's."""
    results: Results | None = None
    """What was read from the output of a benchmark."""
    judgements: tuple[Judgement, ...] = ()
    """What is claimed about each result, where a profile was given."""

    @property
    def name(self) -> str:
        """Return `component/check`."""
        return f"{self.component}/{self.check}"


class Surroundings(Model):
    """Describe where the checks ran."""

    runner: str
    gpus: int = 0
    rdma: bool = False
    nodes: int = 1
    slurm: bool = False
    why: dict[str, str] = Field(default_factory=dict)
    """Facility that is absent → why."""
    user: str = ""
    facts: dict[str, str] = Field(default_factory=dict)
    """Host name, kernel, driver, CPUs, memory, distribution, as found where the checks ran."""
    environment: dict[str, str] = Field(default_factory=dict)
    """All variables that a check finds; secrets are blanked."""
    reports: dict[str, str] = Field(default_factory=dict)
    """What was recorded beside the checks, for example `nvidia-smi topo -m` → its file in the evidence folder."""


class VerifyResult(Model):
    """Hold what `imagebuild verify --json` writes, and `verify.json` of the evidence folder."""

    image: str
    digest: str | None
    target: str | None
    platform: str
    checks: tuple[CheckResult, ...]
    labels: dict[str, str] = Field(default_factory=dict)
    started: str = ""
    version: str = ""
    revision: str | None = None
    """Commit of the project whose checks ran; with `-dirty` if files had changed."""
    surroundings: Surroundings | None = None
    """Absent if nothing could be run in the image."""
