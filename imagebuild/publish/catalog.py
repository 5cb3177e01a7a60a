"""Read what registries have of the matrix's images into `images.json`, and write the README's table of images."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from imagebuild import __version__
from imagebuild.bench.judge import RunContext, describe_run, judge_run
from imagebuild.bench.models import Limit, Results, Run, SpeedVerdict
from imagebuild.bench.profiles import Profile, load_profiles
from imagebuild.core import files
from imagebuild.core.console import format_size, markdown_table
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import full_reference
from imagebuild.core.run import for_each
from imagebuild.oci.layout import INDEX_TYPES, KINDS, Descriptor, Manifest, blobs_of, manifests_of
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, connect_registry
from imagebuild.project.matrix import Image, Matrix, Plan, Target
from imagebuild.project.records import (
    AttachedFile,
    Bound,
    Catalog,
    Checks,
    Curve,
    PublishedImage,
    PublishedPlatform,
    Sbom,
    Scan,
    ScanResult,
    VerifyResult,
)
from imagebuild.publish.evidence import CREATED
from imagebuild.report.document import NONE, Report, busbw
from imagebuild.verify.checks import axes_of, components_of

COPIED_BYTES = 256 * 1024
"""Largest attachment that is copied into the site: results of checks and benchmarks are smaller, SBOMs are not."""
COPIES_FOLDER = "evidence"
"""Folder of these copies in the site."""


@dataclass(frozen=True)
class ProjectFacts:
    """Hold what the project says, whatever the registry has."""

    matrix: Matrix
    plan: Plan
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other components that it stands for."""


@dataclass
class RegistryReading:
    """Hold a catalogue, and copies of small attachments of its images."""

    catalog: Catalog
    copies: dict[str, str] = field(default_factory=dict)
    """Path in the site → content."""


@dataclass(frozen=True)
class AttachedFacts:
    """Hold what one attachment says."""

    sbom: Sbom | None = None
    scan: Scan | None = None
    checks: Checks | None = None
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True)
class EarlierCatalog:
    """Hold what an earlier catalogue says, which need not be read again."""

    platforms: Mapping[str, PublishedPlatform] = field(default_factory=dict)
    """Digest of a manifest → its platform. What is attached to it may have changed since."""
    attachments: Mapping[str, tuple[AttachedFile, AttachedFacts]] = field(default_factory=dict)
    """Digest of an attachment → what it says."""
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageSources:
    """Name the registries to read, and what is known without them."""

    registries: Mapping[str, Registry]
    """Host → registry."""
    project: ProjectFacts
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    earlier: EarlierCatalog = field(default_factory=EarlierCatalog)


def catalog_from_registry(project: ProjectFacts, profiles: Path, earlier: Path | None = None) -> RegistryReading:
    """Read what the registries of the plan have; what an earlier `images.json` says is not read again.

    Raises ConfigError if a tag names no registry, CommandError if a registry fails.
    """
    for target in project.plan.targets:
        for tag in target.tags:
            if full_reference(tag) != tag:
                raise ConfigError(f"catalog: {tag} names no registry; give --registry, or `repository:` in the matrix")
    before = load_catalog(earlier) if earlier else None
    sources = ImageSources(
        {host: connect_registry(host) for host in {name.host for name in published_repositories(project.plan)}},
        project,
        {name: file.model for name, file in load_profiles(profiles).items()} if profiles.is_dir() else {},
        earlier_catalog(before.catalog, before.copies, COPIED_BYTES) if before else EarlierCatalog(),
    )
    return read_registry(sources)


def published_repositories(plan: Plan) -> dict[ImageReference, str]:
    """Return the repositories of the plan's tags, each with its image. Raises ConfigError for a wrong name."""
    names = {tag.rpartition(":")[0]: t.image for t in plan.targets for tag in (*t.tags, *t.aliases)}
    return {parse_reference(name): image for name, image in names.items()}


# Catalogues in files


def read_catalog(path: Path) -> Catalog:
    """Read an `images.json`. Raises ConfigError without a file, ResultError if it is something else."""
    try:
        return Catalog.model_validate_json(files.read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultError(f"{path}: {where}: {first['msg']}; is it an images.json of this imagebuild?") from None


def load_catalog(path: Path) -> RegistryReading:
    """Read an `images.json` with the copies that are beside it; the others are taken out of it.

    Raises ConfigError without a file, ResultError if it is something else.
    """
    catalog = read_catalog(path)
    copies = {}
    for name in {e.file for image in catalog.images for p in image.platforms for e in p.evidence if e.file}:
        copy, parts = path.parent / name, PurePosixPath(name).parts
        # Somebody else may have written the file, so it must not name anything but a copy.
        if len(parts) == 2 and parts[0] == COPIES_FOLDER and parts[1] not in (".", "..") and copy.is_file():
            copies[name] = files.read_text(copy)

    def with_copies(platform: PublishedPlatform) -> PublishedPlatform:
        evidence = tuple(
            entry if entry.file in copies else entry.model_copy(update={"file": None}) for entry in platform.evidence
        )
        return platform.model_copy(update={"evidence": evidence})

    images = tuple(
        image.model_copy(update={"platforms": tuple(map(with_copies, image.platforms))}) for image in catalog.images
    )
    return RegistryReading(catalog.model_copy(update={"images": images}), copies)


def earlier_catalog(catalog: Catalog, copies: Mapping[str, str], copied_bytes: int) -> EarlierCatalog:
    """Return what a catalogue says completely; attachments up to `copied_bytes` must be among the copies."""
    platforms = [platform for image in catalog.images for platform in image.platforms]
    attachments = {}
    for platform in platforms:
        for entry in platform.evidence:
            facts = AttachedFacts(
                sbom=platform.sbom if platform.sbom and platform.sbom.evidence == entry.digest else None,
                scan=platform.scan if platform.scan and platform.scan.evidence == entry.digest else None,
                checks=next((checks for checks in platform.checks if checks.evidence == entry.digest), None),
                curves=tuple(curve for curve in platform.curves if curve.evidence == entry.digest),
            )
            lost = entry.file not in copies if entry.file else entry.size_bytes <= copied_bytes
            # An attachment without facts may have been superseded by another one; it is read again.
            if entry.kind not in _READERS or (facts != AttachedFacts() and not lost):
                attachments[entry.digest] = (entry, facts)
    return EarlierCatalog({platform.digest: platform for platform in platforms}, attachments, copies)


# Read a registry


WORKERS = 8
"""Images that are read at a time, each with a few requests."""
READ_ERRORS = (CommandError, ResultError, LookupError, TypeError, ValueError)
"""Errors that an image which somebody else made may cause."""


def read_registry(sources: ImageSources, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> RegistryReading:
    """Read a catalogue; an image that cannot be read is one of the catalogue's problems.

    Raises CommandError if a registry cannot be read at all.
    """
    copies: dict[str, str] = {}
    problems: list[str] = []
    images: list[PublishedImage] = []
    repositories = published_repositories(sources.project.plan)
    for reference, image in repositories.items():
        registry = sources.registries[reference.host]
        tags = registry.tags(reference.repository)
        repository = ImageRepository(sources, registry, reference.repository, image, signed_digests(tags), copies)
        results = for_each(repository.read_image, repository.tags_by_digest(tags).items(), registry, jobs=WORKERS)
        problems += [problem for _, found in results for problem in found]
        images += newest_first(image for image, _ in results if image)
    folders = [reference.name.split("/")[:-1] for reference in repositories]
    common = takewhile(lambda column: len(set(column)) == 1, zip(*folders, strict=False))
    return RegistryReading(
        Catalog(
            repository="/".join(column[0] for column in common),
            read=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            imagebuild=__version__,
            images=tuple(images),
            problems=tuple(problems),
        ),
        copies,
    )


def newest_first(images: Iterable[PublishedImage]) -> list[PublishedImage]:
    """Sort the images of one name by time, then by version."""

    def age(image: PublishedImage) -> tuple[str, str]:
        # All reproducible images of a commit have the same time; their checks ran later.
        return image.created, max((c.started for p in image.platforms for c in p.checks), default="")

    return sorted(images, key=lambda image: (*age(image), natural_order(image.tag), image.digest), reverse=True)


@dataclass(frozen=True)
class ImageRepository:
    """Read the images of one repository."""

    sources: ImageSources
    registry: Registry
    repository: str
    """Name without the registry."""
    image: str
    signatures: frozenset[str]
    """Digests that a tag says to have a signature."""
    copies: dict[str, str]
    """Path in the site → content; grows while images are read."""

    def tags_by_digest(self, tags: Iterable[str]) -> dict[str, list[str]]:
        """Return digest → the tags of images that name it."""
        names = image_tags(tags)
        digests = for_each(lambda tag: self.registry.digest(self.repository, tag), names, self.registry, jobs=WORKERS)
        by_digest: dict[str, list[str]] = {}
        for tag, digest in zip(names, digests, strict=True):
            if digest:  # a tag may have been deleted meanwhile
                by_digest.setdefault(digest, []).append(tag)
        return by_digest

    def read_image(self, tagged: tuple[str, list[str]]) -> tuple[PublishedImage | None, list[str]]:
        """Return the image of a digest with its tags, None if it cannot be read; and what could not be read of it."""
        digest, tags = tagged
        problems: list[str] = []
        try:
            manifest = self._manifest(digest)
            is_index = manifest.media_type in INDEX_TYPES
            if is_index:
                children = [child for child in manifests_of(manifest.document) if _is_runnable(child)]
            else:
                children = [Descriptor(manifest.media_type, digest, len(manifest.content))]
            platforms = tuple(self._read_platform(child, problems) for child in children)
            if not platforms:
                raise ResultError("has no image that runs")
            attached = self._read_attachments(digest, problems) if is_index else []
        except READ_ERRORS as error:
            return None, [self._problem(digest, str(error))]
        image = PublishedImage(
            **vars(describe_image(self.image, platforms, tags, self.sources.project)),
            repository=f"{self.registry.host}/{self.repository}",
            digest=digest,
            platforms=platforms,
            signed=digest in self.signatures or any(entry.kind == "signature" for entry, _ in attached),
        )
        return image, [self._problem(digest, problem) for problem in problems]

    def _problem(self, digest: str, problem: str) -> str:
        return f"{self.registry.host}/{self.repository}@{digest}: {problem}"

    def _manifest(self, digest: str) -> Manifest:
        manifest = self.registry.manifest(self.repository, digest)
        if manifest is None:
            raise ResultError(f"{digest} is named, but the registry does not have it")
        return manifest

    def _read_platform(self, child: Descriptor, problems: list[str]) -> PublishedPlatform:
        platform = self.sources.earlier.platforms.get(child.digest)
        if platform is None:
            manifest = self._manifest(child.digest).document
            config = self.registry.blob(self.repository, manifest["config"]["digest"])
            platform = describe_platform(child, manifest, json.loads(config))
        attached = self._read_attachments(child.digest, problems)
        facts = [attachment for _, attachment in attached]
        checks = sorted((f.checks for f in facts if f.checks), key=lambda checks: checks.started, reverse=True)
        signed = child.digest in self.signatures or any(entry.kind == "signature" for entry, _ in attached)
        return platform.model_copy(
            update={
                "sbom": next((f.sbom for f in facts if f.sbom), None),
                "scan": max((f.scan for f in facts if f.scan), key=lambda scan: scan.started, default=None),
                "checks": tuple(checks),
                "curves": distinct_curves(curve for f in facts for curve in f.curves),
                "evidence": tuple(entry for entry, _ in attached),
                "signed": signed,
            }
        )

    def _read_attachments(self, subject: str, problems: list[str]) -> list[tuple[AttachedFile, AttachedFacts]]:
        """Read everything that refers to a manifest, the newest first as far as annotations tell."""
        referrers = sorted(
            self.registry.referrers(self.repository, subject),
            key=lambda referrer: (referrer.annotations.get(CREATED, ""), referrer.digest),
            reverse=True,
        )
        attached = []
        for referrer in referrers:
            kind = kind_of(referrer.artifact_type)
            try:
                attached.append(self._read_attachment(kind, referrer.digest))
            except READ_ERRORS as error:
                problems.append(str(error))
                attached.append((AttachedFile(kind=kind, digest=referrer.digest), AttachedFacts()))
        return attached

    def _read_attachment(self, kind: str, digest: str) -> tuple[AttachedFile, AttachedFacts]:
        if known := self.sources.earlier.attachments.get(digest):
            if known[0].file:
                self.copies[known[0].file] = self.sources.earlier.copies[known[0].file]
            return known
        layers = blobs_of(self._manifest(digest).document)[1:]
        size = sum(layer.size for layer in layers)
        if kind not in _READERS or not layers:
            return AttachedFile(kind=kind, digest=digest, size_bytes=size), AttachedFacts()
        content = self.registry.blob(self.repository, layers[0].digest)
        facts = read_attachment(kind, digest, content, self.sources.profiles)
        copy = None
        if len(content) <= COPIED_BYTES:
            copy = str(PurePosixPath(COPIES_FOLDER, f"{digest.removeprefix('sha256:')[:16]}-{KINDS[kind].file}"))
            self.copies[copy] = content.decode()
        return AttachedFile(kind=kind, digest=digest, size_bytes=size, file=copy), facts


def _is_runnable(child: Descriptor) -> bool:
    return bool(child.platform) and not str(child.platform).startswith("unknown") and not child.artifact_type


# What labels and tags say


REVISION_LABEL = "org.opencontainers.image.revision"


@dataclass(frozen=True)
class DescribedImage:
    """Hold the fields of `PublishedImage` that labels, tags and the matrix tell."""

    target: str
    image: str
    description: str
    axes: dict[str, str]
    versions: dict[str, str]
    stack: dict[str, str]
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    revision: str
    created: str
    restricted: dict[str, str]


def describe_platform(child: Descriptor, manifest: Mapping[str, Any], config: Mapping[str, Any]) -> PublishedPlatform:
    """Describe the image of one platform. Raises LookupError, TypeError or ValueError for something else."""
    layers = manifest["layers"]
    labels = {str(k): str(v) for k, v in ((config.get("config") or {}).get("Labels") or {}).items()}
    # BuildKit may leave the base image's time in `created`, so the youngest step counts, too.
    times = [str(entry.get("created") or "") for entry in (config, *(config.get("history") or ()))]
    return PublishedPlatform(
        platform=child.platform
        or "/".join(filter(None, (config["os"], config["architecture"], config.get("variant")))),
        digest=child.digest,
        size_bytes=sum(layer["size"] for layer in layers),
        layers=len(layers),
        created=labels.get(CREATED) or max(times),
        labels=labels,
    )


def describe_image(
    image: str, platforms: Sequence[PublishedPlatform], tags: Sequence[str], project: ProjectFacts
) -> DescribedImage:
    """Return what labels, tags and the matrix say of an image; all of its platforms are of one target."""
    labels = platforms[0].labels
    entry = project.matrix.images[image]
    axes, versions = axes_of(labels), components_of(labels)
    order = {axis: number for number, axis in enumerate(entry.axes)}
    fixed, aliases, revision = split_tags(tags, entry.tags, axes)
    return DescribedImage(
        target=labels.get("imagebuild.target", ""),
        image=image,
        description=labels.get("org.opencontainers.image.description", entry.description),
        axes=dict(sorted(axes.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))),
        versions=versions,
        stack=stack_of(versions, project.provides),
        tags=fixed,
        aliases=aliases,
        revision=labels.get(REVISION_LABEL) or revision,
        created=max(platform.created for platform in platforms),
        restricted={name: text for name, text in project.plan.restricted.items() if name in versions},
    )


def stack_of(versions: Mapping[str, str], provides: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the versions of NCCL and MPI, by which people choose an image besides its axes."""
    known = {name: version for c, version in versions.items() for name in (c, *provides.get(c, ()))}
    # The version of Open MPI in HPC-X is only a series; that of HPC-X is exact.
    mpi = f"HPC-X {known['hpcx']}" if "hpcx" in known else f"Open MPI {known['mpi']}" if "mpi" in known else ""
    return {name: text for name, text in (("nccl", known.get("nccl", "")), ("mpi", mpi)) if text}


REFERRERS = re.compile(r"sha256-([0-9a-f]{64})(?:\.([a-z]+))?")
"""Tags that name no image: lists of what refers to a digest, and what cosign attaches to one."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
REVISION = r"(?P<revision>[0-9a-f]{7,40}(?:-dirty)?)"
ANY = r"[A-Za-z0-9._-]+"


def signed_digests(tags: Iterable[str]) -> frozenset[str]:
    """Return the digests for which there is a tag of a signature."""
    matches = (REFERRERS.fullmatch(tag) for tag in tags)
    return frozenset(f"sha256:{match[1]}" for match in matches if match and match[2] == "sig")


def image_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return the tags of images. A tag that the specification does not allow is left out, as it would name a page."""
    return tuple(tag for tag in tags if TAG.fullmatch(tag) and not REFERRERS.fullmatch(tag))


def split_tags(
    tags: Sequence[str], templates: Iterable[str], axes: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Split the tags of an image into those that never move, in the order of the templates, and aliases.

    The aliases come sorted, the longest first; the third value is the revision in the tags that never move.
    `templates` are the matrix's templates of these tags; `axes` are the image's own. Other values in a template may
    be anything, as the matrix has other versions now.
    """
    patterns = []
    for template in templates:
        pattern = ""
        for number, part in enumerate(re.split(r"{([^{}]*)}", template.rpartition(":")[2])):
            if number % 2 == 0:
                pattern += re.escape(part)
            elif part == "revision":
                pattern += REVISION if "?P<revision>" not in pattern else REVISION.replace("?P<revision>", "?:")
            else:
                pattern += re.escape(axes[part]) if part in axes else ANY
        patterns.append(re.compile(pattern))

    fixed: dict[str, int] = {}
    revision = ""
    for tag in tags:
        for number, expression in enumerate(patterns):
            if match := expression.fullmatch(tag):
                fixed.setdefault(tag, number)
                revision = revision or match.groupdict().get("revision") or ""
    aliases = sorted((tag for tag in tags if tag not in fixed), key=lambda tag: (-len(tag), tag))
    return tuple(sorted(fixed, key=lambda tag: (fixed[tag], tag))), tuple(aliases), revision


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `12.9` before `12.10`."""
    return [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"(\d+)", text) if p]


# What attachments say


SIGNATURES = ("application/vnd.dev.cosign.", "application/vnd.dev.sigstore.", "application/vnd.cncf.notary.")
"""Beginnings of the artifact types of signatures."""
_KIND_BY_TYPE = {kind.artifact_type: name for name, kind in KINDS.items()}


def kind_of(artifact_type: str | None) -> str:
    """Return the kind of an attachment: a name in `KINDS`, `signature`, or else the type itself."""
    if (artifact_type or "").startswith(SIGNATURES):
        return "signature"
    return _KIND_BY_TYPE.get(artifact_type or "", artifact_type or "unknown")


def read_attachment(kind: str, digest: str, content: bytes, profiles: Mapping[str, Profile]) -> AttachedFacts:
    """Read an attachment of a kind in `_READERS`. Raises ResultError if it is something else."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ResultError(f"the {kind} {digest} is not JSON") from None
    if not isinstance(document, dict):
        raise ResultError(f"the {kind} {digest} is not a JSON object")
    try:
        return _READERS[kind](digest, document, profiles)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"the {kind} {digest}: {where}: {first['msg']}"
        raise ResultError(f"{problem}; was it written by another version of imagebuild?") from None


def _read_sbom(digest: str, document: Mapping[str, Any], _: Mapping[str, Profile]) -> AttachedFacts:
    packages = document.get("packages")
    if not isinstance(packages, list):
        raise ResultError(f"the sbom {digest} has no list of packages; only SPDX as JSON is read")
    # The image itself is one of the packages; it does not count.
    described = set(document.get("documentDescribes") or ()) | {
        relation.get("relatedSpdxElement")
        for relation in document.get("relationships") or ()
        if relation.get("relationshipType") == "DESCRIBES"
    }
    count = sum(package.get("SPDXID") not in described for package in packages)
    return AttachedFacts(sbom=Sbom(evidence=digest, packages=count))


def _read_scan(digest: str, document: Mapping[str, Any], _: Mapping[str, Profile]) -> AttachedFacts:
    scan = ScanResult.model_validate(document)
    return AttachedFacts(
        scan=Scan(
            evidence=digest,
            verdict=scan.verdict,
            reason=scan.reason,
            counts=dict(Counter(finding.severity for finding in scan.findings)),
            waived=sum(finding.waived is not None for finding in scan.findings),
            scanner=scan.scanner,
            database=scan.database,
            started=scan.started,
        )
    )


def _read_verification(digest: str, document: Mapping[str, Any], profiles: Mapping[str, Profile]) -> AttachedFacts:
    result = VerifyResult.model_validate(document)
    counts = Counter(check.outcome for check in result.checks)
    place = result.surroundings
    parts = [check.results for check in result.checks if check.results]
    verdicts = [verdict for check in result.checks for verdict in check.judgements]
    curves = curves_of(digest, parts, verdicts, profiles)
    return AttachedFacts(
        checks=Checks(
            evidence=digest,
            passed=counts["passed"],
            failed=counts["failed"],
            skipped=counts["skipped"],
            started=result.started,
            runner=place.runner if place else "",
            gpus=place.gpus if place else 0,
            nodes=place.nodes if place else 1,
            device=next((curve.device for curve in curves if curve.device), ""),
            failures=tuple(f"{c.component}/{c.check}" for c in result.checks if c.outcome == "failed"),
            version=result.version,
        ),
        curves=curves,
    )


def _read_benchmark(digest: str, document: Mapping[str, Any], profiles: Mapping[str, Profile]) -> AttachedFacts:
    if {"image", "platform", "checks"} <= document.keys():
        return AttachedFacts(curves=_read_verification(digest, document, profiles).curves)
    if "about" not in document:
        return AttachedFacts(curves=curves_of(digest, [Results.model_validate(document)], (), profiles))
    report = Report.model_validate(document)
    return AttachedFacts(curves=curves_of(digest, [report], report.judgements, profiles, report.about.profile))


_READERS: Mapping[str, Callable[[str, Mapping[str, Any], Mapping[str, Profile]], AttachedFacts]] = {
    "sbom": _read_sbom,
    "scan": _read_scan,
    "verification": _read_verification,
    "benchmark": _read_benchmark,
}
"""Kind of an attachment → function that reads it; attachments of other kinds are only listed."""


def curves_of(
    digest: str,
    results: Iterable[Results],
    verdicts: Iterable[SpeedVerdict],
    profiles: Mapping[str, Profile],
    profile: str | None = None,
) -> tuple[Curve, ...]:
    """Return a curve for each run that has a bandwidth; `digest` is that of the attachment.

    A run without a verdict is judged by `profile` or, if it ran on one host, by the profile of its GPU.
    """
    by_source: dict[str, list[SpeedVerdict]] = {}
    for verdict in verdicts:
        by_source.setdefault(verdict.source, []).append(verdict)
    runs = [run for part in results for run in part.runs]
    curves = [_curve(digest, run, by_source.get(run.source, ()), profiles, profile) for run in runs]
    return tuple(curve for curve in curves if curve)


def _curve(
    digest: str, run: Run, verdicts: Sequence[SpeedVerdict], profiles: Mapping[str, Profile], profile_name: str | None
) -> Curve | None:
    points = {row.size_bytes: speed for row in run.rows if row.size_bytes > 0 and (speed := busbw(row))}
    if not points:
        return None
    own = describe_run(run.collective, run.ranks, run.nodes)
    verdict = next((v for v in verdicts if v.subject == own), verdicts[0] if len(verdicts) == 1 else None)
    profile = profiles.get(profile_name) if profile_name else _profile_of(run, profiles)
    if verdict is None and profile and run.verdict == "ok":
        verdict = judge_run(run, profile, RunContext())
    best = max(points, key=lambda size: (points[size], -size))
    return Curve(
        evidence=digest,
        collective=run.collective or "unknown",
        ranks=run.ranks,
        nodes=run.nodes,
        device=run.device,
        points=tuple(sorted(points.items())),
        best_gb_s=points[best],
        best_bytes=best,
        verdict=run.verdict,
        outcome=verdict.outcome if verdict else "",
        reason=verdict.reason if verdict else "",
        profile=profile_name or (profile.name if profile and verdict else None),
        ceiling=_bound(verdict.ceiling) if verdict else None,
        reference=_bound(verdict.reference) if verdict else None,
    )


def _bound(limit: Limit | None) -> Bound | None:
    # Limits of collectives are in GB/s; a limit in another unit cannot be drawn.
    return Bound(gb_s=limit.value, what=limit.what) if limit and limit.unit == "GB/s" else None


def _profile_of(run: Run, profiles: Mapping[str, Profile]) -> Profile | None:
    """Return the plainest profile of the run's GPU; None for several hosts, whose network the output does not name."""
    if run.device is None or (run.nodes or 1) > 1:
        return None
    fitting = [profile for profile in profiles.values() if profile.has(run.device)]
    return min(fitting, key=lambda p: (p.extends is not None, len(p.name), p.name), default=None)


def distinct_curves(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Return each measurement once, preferably with its ceiling; all_reduce comes first."""
    distinct: dict[object, Curve] = {}
    for curve in curves:
        key = (curve.collective, curve.ranks, curve.nodes, curve.device, curve.points)
        if key not in distinct or (distinct[key].ceiling is None and curve.ceiling is not None):
            distinct[key] = curve
    return tuple(sorted(distinct.values(), key=lambda c: (c.collective != "all_reduce", c.collective, c.ranks or 0)))


# The README's table of images


BEGIN, END = "<!-- images:begin -->", "<!-- images:end -->"
MOST_VALUES = 3
"""Values of an axis that are listed; of more, the first and the last are."""


def replace_table(name: str, text: str, table: str) -> str:
    """Return a text with this table between its markers.

    `name` is that of the file. Raises ConfigError unless each marker is there once, in this order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{name}: put one line {BEGIN} and one line {END} where the table of images shall be")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"


def images_table(project: ProjectFacts, catalog: Catalog | None = None) -> str:
    """Return the table of the matrix's images as Markdown, with what a catalogue says of them."""
    axes = list(dict.fromkeys(axis for image in project.matrix.images.values() for axis in image.axes))
    head = ["image", "what it is", *axes, "has", "platforms", "targets", "compressed"]
    if catalog:
        head.append("newest tag")
    rows = [_row(project, name, image, axes, catalog) for name, image in project.matrix.images.items()]
    lines = [markdown_table(head, rows)]
    total = len(project.plan.targets)
    if catalog:
        count = len(catalog.images)
        images = f"{count} image{'s' * (count != 1)} in `{catalog.repository}` on {catalog.read[:10]}"
        lines += ["", f"{total} targets; {images}. By `imagebuild catalog --readme`."]
    else:
        limits = any(image.size_limit_mb for image in project.matrix.images.values())
        note = "; sizes are the limits in it" if limits else ""
        lines += ["", f"{total} targets, by `imagebuild catalog --readme` from [matrix.yaml](matrix.yaml){note}."]
    return "\n".join([*lines, ""])


def _row(project: ProjectFacts, name: str, image: Image, axes: Sequence[str], catalog: Catalog | None) -> list[str]:
    targets = [target for target in project.plan.targets if target.image == name]
    published = [entry for entry in catalog.images if entry.image == name] if catalog else []
    platforms = sorted(platform.removeprefix("linux/") for target in targets[:1] for platform in target.platforms)
    cells = [
        f"`{name}`",
        image.description,
        *(_listed(target.axes[axis] for target in targets if axis in target.axes) for axis in axes),
        _stacks(targets, project.provides),
        ", ".join(platforms) or NONE,
        str(len(targets)),
        _sizes(published) if published else _size_limit(image),
    ]
    if catalog:
        cells.append(f"`{published[0].tag}`" if published else "none yet")
    return cells


def _listed(values: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(values))
    if len(distinct) > MOST_VALUES:
        return f"{distinct[0]} to {distinct[-1]} ({len(distinct)})"
    return ", ".join(distinct) or NONE


def _stacks(targets: Sequence[Target], provides: Mapping[str, tuple[str, ...]]) -> str:
    stacks = [stack_of(target.components, provides) for target in targets]
    nccl = dict.fromkeys(f"NCCL {stack['nccl']}" for stack in stacks if "nccl" in stack)
    mpi = dict.fromkeys(stack["mpi"] for stack in stacks if "mpi" in stack)
    return ", ".join([*nccl, *mpi]) or NONE


def _sizes(images: Sequence[PublishedImage]) -> str:
    sizes = sorted(platform.size_bytes for image in images for platform in image.platforms)
    least, most = format_size(sizes[0]), format_size(sizes[-1])
    return least if least == most else f"{least} to {most}"


def _size_limit(image: Image) -> str:
    limit = image.size_limit_mb
    if limit is None:
        return NONE
    if isinstance(limit, int):
        return f"at most {limit} MB"
    return "at most " + ", ".join(f"{size} MB {variant}" for variant, size in limit.items())


def is_stale(old: str, new: str) -> bool:
    """Return whether two tables differ in more than the day on which the registry was read."""
    day = re.compile(r"(in `[^`]*`) on [0-9-]{10}")
    return day.sub(r"\1", old) != day.sub(r"\1", new)
