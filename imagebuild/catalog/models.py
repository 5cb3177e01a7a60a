"""The types of `images.json`: every published image, and what is known of it. Rates are GB/s of 10^9 bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from imagebuild.fields import Model, Name

Severity = Literal["critical", "high", "medium", "low", "negligible", "unknown"]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
"""Also the name of a page."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Evidence(Model):
    """Something that refers to an image."""

    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan`, `signature`, or the type of what is none of these."""
    digest: str
    """Of its manifest; of a signature by tag, of what the tag names."""
    size_bytes: int = 0
    """Of its files."""
    file: str | None = None
    """Where a copy is, relative to `images.json`."""


class Sbom(Model):
    """What a list of packages says."""

    evidence: str
    """Digest of what it was read from."""
    packages: int


class Scan(Model):
    """What a scanner found."""

    evidence: str
    verdict: Literal["passed", "failed"]
    reason: str = ""
    counts: dict[Severity, int] = Field(default_factory=dict)
    """Severity → findings, waived ones included."""
    waived: int = 0
    scanner: str
    database: str
    """What the scanner compared with, and of when."""
    started: str


class Checks(Model):
    """What a verification found."""

    evidence: str
    passed: int
    failed: int
    skipped: int
    started: str = ""
    """When, in UTC."""
    runner: str = ""
    """What ran the checks; empty if nothing could be run."""
    gpus: int = 0
    nodes: int = 1
    device: str = ""
    """Name of the GPUs, where a benchmark printed it."""
    failures: tuple[str, ...] = ()
    """Checks that failed, as `component/check`."""
    version: str = ""
    """Of imagebuild."""


class Bound(Model):
    """A number that a curve is compared with."""

    gb_s: float
    what: str
    """Its formula or source."""


class Curve(Model):
    """Bus bandwidth of a collective over message size: the better placement of each size."""

    evidence: str
    collective: str
    ranks: int | None = None
    nodes: int | None = None
    device: str | None = None
    points: tuple[tuple[int, float], ...]
    """Bytes, GB/s; ascending."""
    best_gb_s: float
    best_bytes: int
    verdict: str
    """Whether the data were right: `ok`, or what was wrong."""
    outcome: str = ""
    """What is said about the speed: `passed`, `failed`, `not-comparable`, …"""
    reason: str = ""
    profile: str | None = None
    """Hardware that it is compared with."""
    ceiling: Bound | None = None
    reference: Bound | None = None

    @property
    def ratio(self) -> float | None:
        """The best value as a part of the ceiling."""
        return self.best_gb_s / self.ceiling.gb_s if self.ceiling else None


class PublishedPlatform(Model):
    """What runs on one platform."""

    platform: str
    digest: Digest
    size_bytes: int
    """Of the compressed layers."""
    layers: int
    created: str = ""
    """When its youngest step was made, as the image says; of one that `build --push` made, the date of its lock."""
    labels: dict[str, str] = Field(default_factory=dict)
    sbom: Sbom | None = None
    scan: Scan | None = None
    checks: tuple[Checks, ...] = ()
    """The newest first."""
    curves: tuple[Curve, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    signed: bool = False
    """Whether there is a signature of it. Whose, and whether it is right, `imagebuild attest verify` finds out."""


class PublishedImage(Model):
    """What tags name."""

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
    """With its registry."""
    digest: Digest
    tags: tuple[Tag, ...]
    """Tags that never move."""
    aliases: tuple[Tag, ...]
    """Tags that name it now."""
    revision: str = ""
    """Commit of the project, as far as the image or its tag says it."""
    created: str = ""
    """The latest of its platforms."""
    platforms: Annotated[tuple[PublishedPlatform, ...], Field(min_length=1)]
    restricted: dict[str, str] = Field(default_factory=dict)
    """Component → what whoever passes the image on must accept."""
    signed: bool = False
    """Whether there is a signature of the index."""

    @property
    def reference(self) -> str:
        """`registry/repository@sha256:…`: names this image for ever."""
        return f"{self.repository}@{self.digest}"

    @property
    def tag(self) -> str:
        """The tag to call it by: one that does not move, if there is one; else the beginning of the digest."""
        return next(iter((*self.tags, *self.aliases)), self.digest.removeprefix("sha256:")[:12])


class Catalog(Model):
    """The file `images.json`."""

    repository: str
    """Where all images are, with the registry."""
    read: str
    """When the registry was read, in UTC."""
    imagebuild: str
    """Version that read it."""
    images: tuple[PublishedImage, ...]
    """By image in the order of the matrix; the newest first."""
    problems: tuple[str, ...] = ()
    """What the registry has and could not be read."""
