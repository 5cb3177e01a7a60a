"""The types of the JSON that `imagebuild verify` writes, and that report and publish read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from imagebuild.bench.models import Judgement, Openness, Results
from imagebuild.core.advisory import driver_version
from imagebuild.core.fields import AnyPlatforms, Digest, Line, Model, Revision, Sha256, TargetId, Time

Outcome = Literal["passed", "failed", "skipped"]
SPEED = "-speed"
"""Suffix of a check's name. The check with the suffix judges the speed that the check without the suffix measured:
`nccl-tests/all-reduce-speed`."""


class CheckResult(Model):
    """The result of one check of an image."""

    component: str
    check: str
    outcome: Outcome
    reason: str = ""
    """Why the check was skipped or failed. For a passed check, the part that was skipped."""
    output: str = ""
    """The end of the output. The evidence folder has the whole output."""
    seconds: float = 0.0
    command: tuple[str, ...] = ()
    """The command, as a person would type it. Secrets are masked."""
    status: int | None = None
    """Exit status. `None`: nothing was started, or the check was killed."""
    timeout: bool = False
    """Whether the check was killed at its time limit."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables that were set in addition to those of the image. Secrets are masked."""
    started: Time | None = None
    log: str | None = None
    """Name of the file with the whole output, in the evidence folder."""
    sha256: Sha256 | Literal[""] = ""
    """Hash of the check that ran. `publish` compares it with the check in the project."""
    results: Results | None = None
    """The benchmark results in the output."""
    judgements: tuple[Judgement, ...] = ()
    """The claims about each benchmark result; empty without a profile."""

    @property
    def name(self) -> str:
        """The name of the check, as `component/check`."""
        return f"{self.component}/{self.check}"


class Surroundings(Model):
    """The place where the checks ran: the runner (the tool that runs commands in an image), hardware and host."""

    runner: str
    gpus: int = 0
    rdma: bool = False
    nodes: int = 1
    slurm: bool = False
    why: dict[str, str] = Field(default_factory=dict)
    """Maps each absent facility, such as `gpu` or `rdma`, to the reason."""
    user: str = ""
    facts: dict[str, str] = Field(default_factory=dict)
    """Facts about the host, by name: host name, kernel, driver, CPUs, memory and distribution."""
    environment: dict[str, str] = Field(default_factory=dict)
    """The environment variables of a check. Secrets are masked."""
    reports: dict[str, str] = Field(default_factory=dict)
    """Maps each recorded command, such as `nvidia-smi topo -m`, to the file with its output in the evidence folder."""

    @property
    def drivers(self) -> dict[str, str]:
        """The versions of the drivers on the host, as far as they are known."""
        gpu = driver_version(self.facts.get("driver", ""))
        found = {"driver": gpu, "ofed": self.facts.get("ofed", "").replace("-", ".")}
        return {name: version for name, version in found.items() if version}


class VerifyResult(Model):
    """The output of `imagebuild verify --json`, and the file `verify.json` in the evidence folder."""

    image: str
    digest: Digest | None
    target: TargetId | None
    platform: AnyPlatforms
    checks: tuple[CheckResult, ...]
    labels: dict[str, str] = Field(default_factory=dict)
    started: Time | Literal[""] = ""
    version: str = ""
    revision: Revision | None = None
    """Commit of the project whose checks ran, with `-dirty` if files were modified."""
    options: tuple[Line, ...] = ()
    """Options that can change which checks ran, or their outcome: `--env NAME=VALUE`, `--allow`, `--only`, `--profile`,
    `--nodes`, `--gpus`, `--domains`, `--hosts`. Values that may be private are `(redacted)`."""
    surroundings: Surroundings | None = None
    """`None`: nothing could be run in the image."""
    profile: str | None = None
    """The profile with which benchmarks were judged."""
    allowed: tuple[Openness, ...] = ()
