"""Define the types of the results of building, scanning and publishing. Times are in UTC."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import Field

from imagebuild.core.fields import Digest, Model, Name, Platform, Tag


class Step(Model):
    """Describe a step that BuildKit executed or took from its cache."""

    name: str
    target: str
    stage: str
    component: str | None
    cached: bool
    seconds: float
    error: str | None = None


class BuildResult(Model):
    """Describe the file `result.json` of a target."""

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
    source: str = ""
    """Address of the project's repository, without credentials."""
    run: str = ""
    """Address of the run of CI that built it."""
    workflow: str = ""
    """Address of that run's workflow, with its revision; it vouches for the build."""
    replaced: dict[str, str] = Field(default_factory=dict)
    """Image or stage, as the Dockerfile names it → what the build had instead: the digest of an image, or `folder`."""
    rebuilt: date | None = None
    """Day of `build --rebuild`: packages are newer than those of the first build of its commit."""


Severity = Literal["unknown", "negligible", "low", "medium", "high", "critical"]


class Vulnerability(Model):
    """Describe something that a scanner found in a package of an image."""

    id: str
    severity: Severity
    package: str
    version: str
    fixed_in: str | None = None
    waived: str | None = None
    """Why the policy lets it pass, and until when."""
    fails: bool = False
    """Whether the policy objects to it."""


class ScanResult(Model):
    """Hold what `imagebuild scan --json` writes."""

    image: str
    digest: str
    """Of the manifest of one platform."""
    platform: str
    scanner: str
    """Name and version."""
    database: str
    """Vulnerability database of the scanner, with its date."""
    started: str
    findings: tuple[Vulnerability, ...]
    verdict: Literal["passed", "failed"]
    reason: str = ""
    notes: tuple[str, ...] = ()
    """What was not looked at, and what is wrong with the policy or the database but fails nothing."""


State = Literal["published", "unchanged", "possible", "refused", "failed"]
"""`possible`: `--dry-run` found that it would be published. `failed`: a registry failed, or another publisher
interfered."""


class Published(Model):
    """Hold the outcome of publishing a target."""

    target: str
    state: State
    reasons: tuple[str, ...] = ()
    """Why it was refused, or failed."""
    digest: str | None = None
    """Of the index."""
    platforms: dict[Platform, str] = Field(default_factory=dict)
    """Platform → digest of its image."""
    given: tuple[str, ...] = ()
    """Tags that are new."""
    kept: tuple[str, ...] = ()
    """Tags and aliases that named it already."""
    moved: dict[str, str] = Field(default_factory=dict)
    """Alias → digest that it named before."""
    attached: dict[str, int] = Field(default_factory=dict)
    """Kind of attachment → how many are new."""
    signed: int = 0
    """Images and indexes that were signed."""


class PublishResult(Model):
    """Hold what was published, target by target."""

    targets: tuple[Published, ...]
    unused: tuple[str, ...] = ()
    """Files of results that do not count, as they are of no image in particular, each with the reason."""

    @property
    def exit_status(self) -> int:
        """Return 0 if all is published, 1 if something was refused, 4 if a registry failed."""
        states = {target.state for target in self.targets}
        return 4 if "failed" in states else 1 if "refused" in states else 0


class AttachedFile(Model):
    """Describe an attachment of an image."""

    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan`, `signature`, or the type of what is none of these."""
    digest: str
    """Of its manifest; of a signature by tag, of what the tag names."""
    size_bytes: int = 0


class Scan(Model):
    """Summarise a scan."""

    verdict: Literal["passed", "failed"]
    reason: str = ""
    counts: dict[Severity, int] = Field(default_factory=dict)
    """Severity → findings, waived ones included."""
    waived: int = 0
    scanner: str
    database: str
    """Vulnerability database of the scanner, with its date."""
    started: str


class Checks(Model):
    """Summarise a verification."""

    passed: int
    failed: int
    skipped: int
    started: str = ""
    runner: str = ""
    """What ran the checks; empty if nothing could be run."""
    gpus: int = 0
    nodes: int = 1
    device: str = ""
    """Name of the GPUs, where a benchmark printed it."""
    failures: tuple[str, ...] = ()
    """Checks that failed, as `component/check`."""


class PublishedPlatform(Model):
    """Describe the published image for one platform."""

    platform: str
    digest: Digest
    size_bytes: int
    """Of the compressed layers."""
    created: str = ""
    """As the image says; of one that `build --push` made, the date of its lock."""
    labels: dict[str, str] = Field(default_factory=dict)
    packages: int | None = None
    """In its SBOM; None without one."""
    scan: Scan | None = None
    updates: int | None = None
    """Packages that the distribution has mended since; None if `imagebuild freshness` did not look at this image."""
    checks: tuple[Checks, ...] = ()
    """The newest first."""
    evidence: tuple[AttachedFile, ...] = ()


class PublishedImage(Model):
    """Describe a published image, with the tags that name it."""

    target: str
    """The target's id, as the image says; empty for an image that was not built from this matrix."""
    image: Name
    description: str = ""
    axes: dict[str, str]
    versions: dict[str, str]
    """Component → version."""
    stack: dict[str, str] = Field(default_factory=dict)
    """What people choose by besides axes: `nccl` → its version, `mpi` → `HPC-X 2.51` or `Open MPI 5.0.10`."""
    repository: str
    digest: Digest
    tags: tuple[Tag, ...]
    """Tags that never move."""
    aliases: tuple[Tag, ...]
    """Tags that name it now."""
    revision: str = ""
    """Commit of the project, as the index says it."""
    created: str = ""
    """The latest of its platforms."""
    platforms: Annotated[tuple[PublishedPlatform, ...], Field(min_length=1)]
    restricted: dict[str, str] = Field(default_factory=dict)
    """Component → what whoever passes the image on must accept."""
    verified_by: str | None = None
    """The key or identity that was asked for, if it signed the index; empty if it did not, None if none was."""

    @property
    def reference(self) -> str:
        """Return `registry/repository@sha256:…`, which names this image for ever."""
        return f"{self.repository}@{self.digest}"

    @property
    def tag(self) -> str:
        """Return the tag to call the image by: one that does not move, else an alias, else the start of the digest."""
        return next(iter((*self.tags, *self.aliases)), self.digest.removeprefix("sha256:")[:12])


class Catalog(Model):
    """Describe the file `images.json`."""

    repository: str
    """Where all images are, with the registry."""
    read: str
    imagebuild: str
    """Version that read it."""
    images: tuple[PublishedImage, ...]
    """By image in the order of the matrix; the newest first."""
    problems: tuple[str, ...] = ()
    """What the registry has, but could not be read."""
    updates_read: str = ""
    """When the archive of security updates was read, in UTC."""
