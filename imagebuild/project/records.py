"""The types of the results of building, scanning and publishing. Times are in UTC."""

from datetime import date
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from imagebuild.core import fields

Severity = Literal["unknown", "negligible", "low", "medium", "high", "critical"]
State = Literal["published", "unchanged", "possible", "refused", "failed"]
"""State of a target after `imagebuild publish`. `possible`: `--dry-run` found that the target can be published.
`failed`: a registry failed, or another publisher interfered."""


class Step(fields.Model):
    """A step that BuildKit executed or took from its cache."""

    name: str
    target: str
    stage: str
    component: str | None
    cached: bool
    seconds: float
    error: str | None = None


class BuildResult(fields.Model):
    """The result of building a target: the file `result.json`, or `local.json` if it contains an earlier push."""

    target: fields.TargetId
    digest: fields.Digest | None
    """Digest of the built image: the digest of an index or of a manifest."""
    tags: tuple[fields.ImageName, ...]
    platforms: tuple[fields.Platform, ...]
    size_bytes: int | None
    """Size of the compressed layers of one platform. None unless the result is in the engine's image store."""
    compression: Literal["", "gzip", "zstd", "estargz"] = ""
    """Compression of the layers, which changes their digests. Empty if the result is in the engine's image store."""
    seconds: Annotated[float, Field(ge=0, le=1e7)]
    steps: tuple[Step, ...]
    manifests: dict[fields.Platform, fields.Digest] = Field(default_factory=dict)
    """Maps each platform to the digest of its manifest, if the result was pushed or written as an OCI layout."""
    repository: fields.Repository | None = None
    """Staging repository, with its registry, to which the image was pushed by digest."""
    revision: fields.Revision | None = None
    """Commit of the project, with `-dirty` if files had changed."""
    dockerfile: fields.Sha256 | None = None
    """sha256 of the Dockerfile."""
    builder: fields.Line = ""
    """Name of the builder, or address of the engine, that built the image."""
    started: fields.Time | Literal[""] = ""
    source: fields.Address = ""
    """Address of the project's repository, without credentials."""
    run: fields.Address = ""
    """Address of the CI run that built the image."""
    workflow: fields.Address = ""
    """Address of the workflow of the CI run, with the revision of the workflow."""
    replaced: dict[fields.Line, fields.Digest | Literal["folder"]] = Field(default_factory=dict)
    """Maps each replaced image or build stage of the Dockerfile to the digest of its replacement, or to `folder` if the
    replacement has no digest."""
    rebuilt: date | None = None
    """Day of `build --rebuild`, which installs newer packages than the first build of the commit."""

    @model_validator(mode="after")
    def _names_what_was_pushed(self) -> Self:
        if self.repository and not (self.digest and self.manifests and self.manifests.keys() == {*self.platforms}):
            raise ValueError("repository: a pushed result must contain a digest, and a manifest for each platform")
        if self.started > "9":
            raise ValueError("started: must be a time before the year 9000")
        return self


class RenderedHashes(fields.Model):
    """Hashes of rendered targets: the file of `ci-matrix --rendered`. A job that reads this file renders nothing."""

    targets: dict[fields.TargetId, tuple[fields.Sha256, fields.Sha256]]
    """Maps each target to the sha256 of its Dockerfile and to the hash of everything that its image depends on."""


class Vulnerability(fields.Model):
    """A vulnerability that a scanner found in a package of an image."""

    id: str
    severity: Severity
    package: str
    version: str
    fixed_in: str | None = None
    waived: str | None = None
    """The reason and the last day of the waiver in the policy. None without a waiver."""
    fails: bool = False
    """Whether the vulnerability fails the policy."""


class ScanResult(fields.Model):
    """The result of a scan, as `imagebuild scan --json` writes it."""

    image: str
    digest: fields.Digest
    """Digest of the manifest of one platform."""
    platform: fields.AnyPlatform
    scanner: str
    """Name and version of the scanner."""
    database: str
    """Vulnerability database of the scanner, with its date."""
    started: fields.Time
    findings: tuple[Vulnerability, ...]
    verdict: Literal["passed", "failed"]
    reason: str = ""
    notes: tuple[str, ...] = ()
    """Notes on packages that were not scanned, and on problems with the policy or the database that do not fail the
    scan."""


class Published(fields.Model):
    """The result of publishing a target."""

    target: str
    state: State
    reasons: tuple[str, ...] = ()
    """Reasons for the refusal or the failure."""
    digest: str | None = None
    """Digest of the index."""
    platforms: dict[fields.Platform, str] = Field(default_factory=dict)
    """Maps each platform to the digest of its image."""
    given: tuple[str, ...] = ()
    """Tags that were created."""
    kept: tuple[str, ...] = ()
    """Tags and aliases that already named the image."""
    moved: dict[str, str] = Field(default_factory=dict)
    """Maps each moved alias to the digest that it named before."""
    attached: dict[str, int] = Field(default_factory=dict)
    """Maps each kind of attachment to the number of new attachments."""
    signed: int = 0
    """Number of images and indexes that were signed."""


class PublishResult(fields.Model):
    """The result of publishing several targets."""

    targets: tuple[Published, ...]
    unused: tuple[str, ...] = ()
    """Result files that were ignored because they do not name an image, each with the reason."""
    notes: tuple[str, ...] = ()
    """Verifications with options that choose checks or the required speed, each with the options."""

    @property
    def exit_status(self) -> int:
        """Exit status: 0 if all targets are published, 1 if a target was refused, 4 if a registry failed."""
        states = {target.state for target in self.targets}
        return 4 if "failed" in states else 1 if "refused" in states else 0


class AttachedFile(fields.Model):
    """An attachment of an image."""

    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan` or `signature`. For any other attachment, its media
    type."""
    digest: str
    """Digest of the attachment's manifest. For a signature stored under a tag, the digest that the tag names."""
    size_bytes: int = 0
    distrust: str = ""
    """Why the attachment does not count, such as a missing signature. Empty if it counts, or if no signature was
    requested."""


class Scan(fields.Model):
    """Summary of a scan for vulnerabilities."""

    verdict: Literal["passed", "failed", "skipped"]
    """`skipped`: the scan is too old to count."""
    reason: str = ""
    counts: dict[Severity, int] = Field(default_factory=dict)
    """Maps each severity to the number of findings, including waived ones."""
    waived: int = 0
    scanner: str
    database: str
    """Vulnerability database of the scanner, with its date."""
    started: str


class Checks(fields.Model):
    """Summary of the checks of an image."""

    passed: int
    failed: int
    skipped: int
    started: str = ""
    runner: str = ""
    """Runner: the tool that ran the checks in the image, such as Docker. Empty if no check could run."""
    gpus: int = 0
    nodes: int = 1
    device: str = ""
    """Name of the GPUs, if a benchmark printed it."""
    failures: tuple[str, ...] = ()
    """Checks that failed, as `component/check`."""


class PublishedPlatform(fields.Model):
    """The published image for one platform."""

    platform: fields.AnyPlatform
    digest: fields.Digest
    size_bytes: int
    """Size of the compressed layers."""
    created: str = ""
    """Creation time in the image's configuration. For an image from `build --push`, the date in `imagebuild.lock`."""
    labels: dict[str, str] = Field(default_factory=dict)
    packages: int | None = None
    """Number of packages in the SBOM. None without an SBOM."""
    scan: Scan | None = None
    updates: int | None = None
    """Number of packages with a newer security update. None if `imagebuild freshness` did not examine the image."""
    checks: tuple[Checks, ...] = ()
    """Summaries of all verifications, newest first."""
    evidence: tuple[AttachedFile, ...] = ()


class PublishedImage(fields.Model):
    """A published image, with its tags."""

    target: str
    """Id of the target in the image's labels. Empty for an image that was not built from this matrix."""
    image: fields.Name
    description: str = ""
    axes: dict[fields.Name, fields.VersionText]
    versions: dict[str, str]
    """Maps each component to its version."""
    stack: dict[str, str] = Field(default_factory=dict)
    """Additional values to choose an image by: `nccl`, such as `2.32.3`, and `mpi`, such as `HPC-X 2.51` or `Open MPI
    5.0.10`."""
    repository: fields.Repository
    digest: fields.Digest
    tags: tuple[fields.Tag, ...]
    """Tags that never move."""
    aliases: tuple[fields.Tag, ...]
    """Tags that may move, and that name the image now."""
    revision: str = ""
    """Commit of the project that the image was built from, as the annotations of the index state."""
    created: str = ""
    """Creation time of the image. If the platforms have different times, the newest time."""
    platforms: Annotated[tuple[PublishedPlatform, ...], Field(min_length=1)]
    restricted: dict[str, str] = Field(default_factory=dict)
    """Maps each component with a restricted licence to the terms to accept before the image is redistributed."""
    verified_by: str | None = None
    """Key or identity that signed the index. Empty if the requested key or identity did not sign the index. None if no
    signature was requested."""

    @property
    def reference(self) -> str:
        """`registry/repository@sha256:…`, which always names this image."""
        return f"{self.repository}@{self.digest}"

    @property
    def tag(self) -> str:
        """Tag for tables: a tag that does not move, otherwise an alias, otherwise the start of the digest."""
        return next(iter((*self.tags, *self.aliases)), self.digest.removeprefix("sha256:")[:12])


class Catalog(fields.Model):
    """The catalogue of published images: the file `images.json`."""

    repository: str
    """Repository of all images, with the registry."""
    read: str
    imagebuild: str
    """Version of imagebuild that wrote the file."""
    images: tuple[PublishedImage, ...]
    """Images in the order of the matrix. If an image was published several times, the newest comes first."""
    problems: tuple[str, ...] = ()
    """Problems with images in the registry that could not be read."""
    updates_read: str = ""
    """Time when the archive of security updates was read, in UTC."""
    gpu_architectures: dict[str, str] = Field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it, such as `>=11.8`."""
