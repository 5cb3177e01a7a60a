"""The types of what a build and a verification leave behind."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from imagebuild.fields import Model, Platform
from imagebuild.judgement import Judgement
from imagebuild.results.models import Results


class Step(Model):
    """A step that BuildKit executed or took from its cache."""

    name: str
    target: str
    stage: str
    component: str | None
    cached: bool
    seconds: float
    error: str | None = None


class BuildResult(Model):
    """The file `result.json` of a target."""

    target: str
    digest: str | None
    """Digest of what was built: an index or a manifest."""
    tags: tuple[str, ...]
    platforms: tuple[Platform, ...]
    size_bytes: int | None
    """Size of the compressed layers of one platform, where the result is in the engine's image store."""
    seconds: float
    steps: tuple[Step, ...]
    manifests: dict[Platform, str] = Field(default_factory=dict)
    """Platform → digest of its manifest, of what was pushed or written as a layout."""
    repository: str | None = None
    """Staging repository, with its registry, that it was pushed to by digest."""
    revision: str | None = None
    """Commit of the project; with `-dirty` if files had changed."""
    dockerfile: str | None = None
    """sha256 of the Dockerfile."""
    builder: str = ""
    """What built it: name of the builder, or address of the engine."""
    started: str = ""
    """When, in UTC."""
    replaced: dict[str, str] = Field(default_factory=dict)
    """Image or stage, as the Dockerfile names it → what the build had instead: the digest of an image, or `folder`."""


Outcome = Literal["passed", "failed", "skipped"]


class CheckResult(Model):
    """What a check said about an image."""

    component: str
    check: str
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or failed, or what of a passed one was not looked at."""
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
    """What it was given besides the image's own environment; secrets are blanked."""
    started: str | None = None
    """When, in UTC."""
    log: str | None = None
    """Name of the file in the evidence folder that has the whole output."""
    results: Results | None = None
    """What was read from the output of a benchmark."""
    judgements: tuple[Judgement, ...] = ()
    """What is said about the speed, where a profile was given."""


class Surroundings(Model):
    """Where the checks ran."""

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
    """What `imagebuild verify --json` writes, and `verify.json` of the evidence folder."""

    image: str
    digest: str | None
    target: str | None
    platform: str
    checks: tuple[CheckResult, ...]
    labels: dict[str, str] = Field(default_factory=dict)
    started: str = ""
    """When, in UTC."""
    version: str = ""
    """Of imagebuild."""
    surroundings: Surroundings | None = None
    """Absent if nothing could be run in the image."""


Severity = Literal["unknown", "negligible", "low", "medium", "high", "critical"]


class Vulnerability(Model):
    """Something that a scanner found in a package of an image."""

    id: str
    """CVE or other identifier."""
    severity: Severity
    package: str
    version: str
    fixed_in: str | None = None
    """Version that has it no more, if there is one."""
    link: str | None = None
    waived: str | None = None
    """Why the policy lets it pass, and until when."""
    fails: bool = False
    """Whether the policy objects to it."""


class ScanResult(Model):
    """What `imagebuild scan --json` writes."""

    image: str
    digest: str
    """Of the manifest of one platform."""
    platform: str
    scanner: str
    """Name and version."""
    database: str
    """What the scanner compared with, and of when."""
    started: str
    findings: tuple[Vulnerability, ...]
    verdict: Literal["passed", "failed"]
    reason: str = ""
    notes: tuple[str, ...] = ()
    """What was not looked at, and what is wrong with the policy or the database but fails nothing."""
