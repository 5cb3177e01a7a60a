"""Read what a registry has of the matrix's images into `images.json`."""

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
from imagebuild.bench.profiles import Profile
from imagebuild.core import console, files
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.oci.layout import INDEX_TYPES, KINDS, Descriptor, Manifest, blobs_of, manifests_of
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, for_each
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
from imagebuild.report import document
from imagebuild.report.document import Report


def read_catalog(path: Path) -> Catalog:
    """A catalogue that was written before. Raises ConfigError without a file, ResultError if it is something else."""
    try:
        return Catalog.model_validate_json(files.read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultError(f"{path}: {where}: {first['msg']}; is it an images.json of this imagebuild?") from None


Judged = Mapping[str, tuple[SpeedVerdict, ...]]
"""Source → what is said about what it printed."""


def of_results(
    digest: str, results: Iterable[Results], judged: Judged, profiles: Mapping[str, Profile], profile: str | None = None
) -> tuple[Curve, ...]:
    """A curve for each run that has a bandwidth; `digest` is of the file they come from.

    A run that nothing is said about is judged by `profile`, or by the profile that fits its GPU if it ran on one host.
    """
    runs = [run for part in results for run in part.runs]
    found = [_curve(digest, run, judged, profiles, profile) for run in runs]
    return tuple(curve for curve in found if curve)


def _curve(digest: str, run: Run, judged: Judged, profiles: Mapping[str, Profile], name: str | None) -> Curve | None:
    points = {row.size_bytes: speed for row in run.rows if row.size_bytes > 0 and (speed := document.busbw(row))}
    if not points:
        return None
    own = describe_run(run.collective, run.ranks, run.nodes)
    said = judged.get(run.source, ())
    judgement = next((one for one in said if one.subject == own), said[0] if len(said) == 1 else None)
    profile = profiles.get(name) if name else _fitting(run, profiles)
    if judgement is None and profile and run.verdict == "ok":
        judgement = judge_run(run, profile, RunContext())
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
        outcome=judgement.outcome if judgement else "",
        reason=judgement.reason if judgement else "",
        profile=name or (profile.name if profile and judgement else None),
        ceiling=_bound(judgement.ceiling) if judgement else None,
        reference=_bound(judgement.reference) if judgement else None,
    )


def _bound(limit: Limit | None) -> Bound | None:
    # Of collectives, all limits are in GB/s; another unit could not be drawn in.
    return Bound(gb_s=limit.value, what=limit.what) if limit and limit.unit == "GB/s" else None


def _fitting(run: Run, profiles: Mapping[str, Profile]) -> Profile | None:
    """The plainest profile of the run's GPU; none for several hosts, whose network the output does not tell."""
    if run.device is None or (run.nodes or 1) > 1:
        return None
    fits = [profile for profile in profiles.values() if profile.has(run.device)]
    return min(fits, key=lambda p: (p.extends is not None, len(p.name), p.name), default=None)


def distinct(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Of the same measurement from several files, the one that most is said about; collectives in their usual order."""
    found: dict[object, Curve] = {}
    for curve in curves:
        key = (curve.collective, curve.ranks, curve.nodes, curve.device, curve.points)
        if key not in found or (found[key].ceiling is None and curve.ceiling is not None):
            found[key] = curve
    return tuple(sorted(found.values(), key=lambda c: (c.collective != "all_reduce", c.collective, c.ranks or 0)))


SIGNATURES = ("application/vnd.dev.cosign.", "application/vnd.dev.sigstore.", "application/vnd.cncf.notary.")
"""Beginnings of the types of signatures."""


@dataclass(frozen=True)
class AttachedFacts:
    """What one file says."""

    sbom: Sbom | None = None
    scan: Scan | None = None
    checks: Checks | None = None
    curves: tuple[Curve, ...] = ()


def kind_of(artifact_type: str | None) -> str:
    """Name of the kind of an attachment, `signature`, or the type itself."""
    known = {kind.artifact_type: name for name, kind in KINDS.items()}
    if (artifact_type or "").startswith(SIGNATURES):
        return "signature"
    return known.get(artifact_type or "", artifact_type or "unknown")


def read_attachment(kind: str, digest: str, content: bytes, profiles: Mapping[str, Profile]) -> AttachedFacts:
    """What a file of that kind says; nothing for kinds that are only listed. Raises ResultError."""
    reader = _READERS.get(kind)
    if reader is None:
        return AttachedFacts()
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ResultError(f"the {kind} {digest} is no JSON") from None
    if not isinstance(document, dict):
        raise ResultError(f"the {kind} {digest} is no JSON object")
    try:
        return reader(digest, document, profiles)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultError(
            f"the {kind} {digest}: {where}: {first['msg']}; was it written by another version of imagebuild?"
        ) from None


def _sbom(digest: str, document: Mapping[str, Any], _: Mapping[str, Profile]) -> AttachedFacts:
    packages = document.get("packages")
    if not isinstance(packages, list):
        raise ResultError(f"the sbom {digest} has no list of packages; only SPDX as JSON is read")
    # The image itself is in the list, as what the document describes.
    described = {r.get("relatedSpdxElement") for r in document.get("relationships") or () if _describes(r)}
    described |= set(document.get("documentDescribes") or ())
    return AttachedFacts(sbom=Sbom(evidence=digest, packages=sum(p.get("SPDXID") not in described for p in packages)))


def _describes(relationship: Mapping[str, Any]) -> bool:
    return relationship.get("relationshipType") == "DESCRIBES"


def _scan(digest: str, document: Mapping[str, Any], _: Mapping[str, Profile]) -> AttachedFacts:
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


def _verification(digest: str, document: Mapping[str, Any], profiles: Mapping[str, Profile]) -> AttachedFacts:
    result = VerifyResult.model_validate(document)
    counts = Counter(check.outcome for check in result.checks)
    place = result.surroundings
    parts = [check.results for check in result.checks if check.results]
    judged = by_source(one for check in result.checks for one in check.judgements)
    drawn = of_results(digest, parts, judged, profiles)
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
            device=next((curve.device for curve in drawn if curve.device), ""),
            failures=tuple(f"{c.component}/{c.check}" for c in result.checks if c.outcome == "failed"),
            version=result.version,
        ),
        curves=drawn,
    )


def _benchmark(digest: str, document: Mapping[str, Any], profiles: Mapping[str, Profile]) -> AttachedFacts:
    if {"image", "platform", "checks"} <= document.keys():
        return AttachedFacts(curves=_verification(digest, document, profiles).curves)
    if "about" not in document:
        return AttachedFacts(curves=of_results(digest, [Results.model_validate(document)], {}, profiles))
    report = Report.model_validate(document)
    judged = by_source(report.judgements)
    return AttachedFacts(curves=of_results(digest, [report], judged, profiles, report.about.profile))


def by_source(judgements: Iterable[SpeedVerdict]) -> Mapping[str, tuple[SpeedVerdict, ...]]:
    """Source → what is said about what it printed."""
    found: dict[str, tuple[SpeedVerdict, ...]] = {}
    for judgement in judgements:
        found[judgement.source] = (*found.get(judgement.source, ()), judgement)
    return found


_READERS: Mapping[str, Callable[[str, Mapping[str, Any], Mapping[str, Profile]], AttachedFacts]] = {
    "sbom": _sbom,
    "scan": _scan,
    "verification": _verification,
    "benchmark": _benchmark,
}

READ = frozenset(_READERS)
"""Kinds whose files are read."""


def file_of(kind: str) -> str:
    """Name of the file of a kind."""
    return KINDS[kind].file


@dataclass(frozen=True)
class EarlierCatalog:
    """What need not be read."""

    platforms: Mapping[str, PublishedPlatform] = field(default_factory=dict)
    """Digest of a manifest → what it is. What refers to it may have changed."""
    evidence: Mapping[str, tuple[AttachedFile, AttachedFacts]] = field(default_factory=dict)
    """Digest of what refers to a manifest → what it says."""
    copies: Mapping[str, str] = field(default_factory=dict)


def known(catalog: Catalog, copies: Mapping[str, str], copied_bytes: int) -> EarlierCatalog:
    """All that an earlier catalogue tells whole; files up to `copied_bytes` must be among the copies."""
    platforms = [platform for image in catalog.images for platform in image.platforms]
    found = {}
    for platform in platforms:
        for entry in platform.evidence:
            said = _said(platform, entry.digest)
            lost = entry.file not in copies if entry.file else entry.size_bytes <= copied_bytes
            # A file may have been outdone by another one; then only the file itself tells what it says.
            if entry.kind not in READ or (said != AttachedFacts() and not lost):
                found[entry.digest] = (entry, said)
    return EarlierCatalog({platform.digest: platform for platform in platforms}, found, copies)


def _said(platform: PublishedPlatform, digest: str) -> AttachedFacts:
    sbom, scan = platform.sbom, platform.scan
    return AttachedFacts(
        sbom=sbom if sbom and sbom.evidence == digest else None,
        scan=scan if scan and scan.evidence == digest else None,
        checks=next((checks for checks in platform.checks if checks.evidence == digest), None),
        curves=tuple(curve for curve in platform.curves if curve.evidence == digest),
    )


REFERRERS = re.compile(r"sha256-([0-9a-f]{64})(?:\.([a-z]+))?")
"""Tags that are no images: lists of what refers to a digest, and what cosign puts beside one."""
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
REVISION = r"(?P<revision>[0-9a-f]{7,40}(?:-dirty)?)"
ANY = r"[A-Za-z0-9._-]+"


def signed(tags: Iterable[str]) -> frozenset[str]:
    """Digests that have a signature by tag."""
    found = (REFERRERS.fullmatch(tag) for tag in tags)
    return frozenset(f"sha256:{match[1]}" for match in found if match and match[2] == "sig")


def of_images(tags: Iterable[str]) -> tuple[str, ...]:
    """Tags that people pull by; what the specification allows as none is left out, as it would name a page."""
    return tuple(tag for tag in tags if TAG.fullmatch(tag) and not REFERRERS.fullmatch(tag))


def split(
    tags: Iterable[str], templates: Iterable[str], axes: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Tags of one image that never move, in the order of the templates; those that do, the most exact first; and the
    revision that the former say.

    `templates` are the matrix's, of tags that never move; `axes` are the image's own. Versions that a template names
    may be any, since the matrix has moved on.
    """
    patterns = [_pattern(template, axes) for template in templates]
    kept: dict[str, int] = {}
    revision = ""
    for tag in tags:
        for number, pattern in enumerate(patterns):
            if match := pattern.fullmatch(tag):
                kept.setdefault(tag, number)
                revision = revision or match.groupdict().get("revision") or ""
    moving = sorted((tag for tag in tags if tag not in kept), key=lambda tag: (-len(tag), tag))
    return tuple(sorted(kept, key=lambda tag: (kept[tag], tag))), tuple(moving), revision


def _pattern(template: str, axes: Mapping[str, str]) -> re.Pattern[str]:
    tag = template.rpartition(":")[2]
    parts = re.split(r"{([^{}]*)}", tag)
    seen = False
    text = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            text += re.escape(part)
        elif part == "revision":
            text += REVISION.replace("?P<revision>", "?:") if seen else REVISION
            seen = True
        else:
            text += re.escape(axes[part]) if part in axes else ANY
    return re.compile(text)


def natural(text: str) -> list[tuple[int, int, str]]:
    """To sort `12.9` before `12.10`."""
    return [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"(\d+)", text) if p]


AXIS, COMPONENT = "imagebuild.axis.", "imagebuild.component."
CREATED, REVISION_LABEL = "org.opencontainers.image.created", "org.opencontainers.image.revision"


@dataclass(frozen=True)
class ProjectFacts:
    """What the project says, whatever the registry has."""

    matrix: Matrix
    plan: Plan
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other names it is known by."""


@dataclass(frozen=True)
class DescribedImage:
    """Fields of `PublishedImage` that labels and the matrix tell."""

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


def _times(about: Mapping[str, Any]) -> list[str]:
    """When an image and its steps were made. BuildKit may leave the base's time in `created`."""
    return [str(entry.get("created") or "") for entry in (about, *(about.get("history") or ()))]


def platform_of(child: Descriptor, manifest: dict[str, Any], config: bytes) -> PublishedPlatform:
    """What one platform is. Raises LookupError, TypeError or ValueError for what is no image."""
    about = json.loads(config)
    layers = manifest["layers"]
    labels = {str(k): str(v) for k, v in ((about.get("config") or {}).get("Labels") or {}).items()}
    parts = (about["os"], about["architecture"], about.get("variant"))
    return PublishedPlatform(
        platform=child.platform or "/".join(filter(None, parts)),
        digest=child.digest,
        size_bytes=sum(layer["size"] for layer in layers),
        layers=len(layers),
        created=labels.get(CREATED) or max(_times(about)),
        labels=labels,
    )


def with_evidence(
    platform: PublishedPlatform, said: Sequence[tuple[AttachedFile, AttachedFacts]], *, signed: bool
) -> PublishedPlatform:
    """The platform with what refers to it now."""
    found = [one for _, one in said]
    return platform.model_copy(
        update={
            "sbom": next((one.sbom for one in found if one.sbom), None),
            "scan": max((one.scan for one in found if one.scan), key=lambda scan: scan.started, default=None),
            "checks": tuple(sorted((o.checks for o in found if o.checks), key=lambda c: c.started, reverse=True)),
            "curves": distinct(curve for one in found for curve in one.curves),
            "evidence": tuple(entry for entry, _ in said),
            "signed": signed or any(entry.kind == "signature" for entry, _ in said),
        }
    )


def described(
    image: str, platforms: Sequence[PublishedPlatform], names: Iterable[str], ours: ProjectFacts
) -> DescribedImage:
    """What labels, tags and the matrix tell; the platforms of an index are of one target."""
    labels = platforms[0].labels
    entry = ours.matrix.images[image]
    axes = {label.removeprefix(AXIS): value for label, value in labels.items() if label.startswith(AXIS)}
    versions = {label.removeprefix(COMPONENT): v for label, v in labels.items() if label.startswith(COMPONENT)}
    fixed, moving, revision = split(tuple(names), entry.tags, axes)
    order = {axis: number for number, axis in enumerate(entry.axes)}
    return DescribedImage(
        target=labels.get("imagebuild.target", ""),
        image=image,
        description=labels.get("org.opencontainers.image.description", entry.description),
        axes=dict(sorted(axes.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))),
        versions=versions,
        stack=stack_of(versions, ours.provides),
        tags=fixed,
        aliases=moving,
        revision=labels.get(REVISION_LABEL) or revision,
        created=max(platform.created for platform in platforms),
        restricted={name: text for name, text in ours.plan.restricted.items() if name in versions},
    )


def stack_of(versions: Mapping[str, str], provides: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """What people choose by besides axes."""
    known = {name: version for c, version in versions.items() for name in (c, *provides.get(c, ()))}
    # HPC-X says by itself which Open MPI is in it; its number of Open MPI is only the series.
    mpi = f"HPC-X {known['hpcx']}" if "hpcx" in known else f"Open MPI {known['mpi']}" if "mpi" in known else ""
    return {name: text for name, text in (("nccl", known.get("nccl", "")), ("mpi", mpi)) if text}


def newest_first(images: Iterable[PublishedImage]) -> list[PublishedImage]:
    """The order of the catalogue within one image; of those built at the same time, that of their versions."""
    return sorted(images, key=lambda one: (*_age(one), natural(one.tag), one.digest), reverse=True)


def _age(image: PublishedImage) -> tuple[str, str]:
    """Reproducible images are all of the time of their commit; the checks ran later."""
    return image.created, max((c.started for p in image.platforms for c in p.checks), default="")


WORKERS = 8
"""Images read at a time, with a few requests each."""
COPIED_BYTES = 256 * 1024
"""Files that are copied into the site: results of checks and benchmarks are smaller, lists of packages are not."""
FOLDER = "evidence"
READ_ERRORS = (CommandError, ResultError, LookupError, TypeError, ValueError)
"""What an image of somebody else's making may lead to."""


@dataclass
class RegistryReading:
    """A catalogue, and copies of small files that refer to its images: path → content."""

    catalog: Catalog
    copies: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageSources:
    """Where images are read from, and what is known without it."""

    registries: Mapping[str, Registry]
    """Host → registry."""
    ours: ProjectFacts
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    known: EarlierCatalog = field(default_factory=EarlierCatalog)


def repositories(plan: Plan) -> dict[ImageReference, str]:
    """Repositories that publishing gives tags in → image, in the order of the plan. Raises ConfigError."""
    names = {tag.rpartition(":")[0]: t.image for t in plan.targets for tag in (*t.tags, *t.aliases)}
    return {parse_reference(name): image for name, image in names.items()}


def read_registry(shop: ImageSources, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> RegistryReading:
    """The catalogue. An image that cannot be read is a problem of the catalogue.

    Raises CommandError if the registry cannot be read at all.
    """
    copies: dict[str, str] = {}
    problems: list[str] = []
    images: list[PublishedImage] = []
    named = repositories(shop.ours.plan)
    for reference, image in named.items():
        registry = shop.registries[reference.host]
        everything = registry.tags(reference.repository)
        shelf = ImageRepository(shop, registry, reference.repository, image, signed(everything), copies)
        digests = _by_digest(shelf, of_images(everything))
        results = for_each(shelf.image_of, digests.items(), registry, jobs=WORKERS)
        problems += [problem for _, found in results for problem in found]
        images += newest_first(one for one, _ in results if one)
    return RegistryReading(
        Catalog(
            repository=_common([reference.name for reference in named]),
            read=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            imagebuild=__version__,
            images=tuple(images),
            problems=tuple(problems),
        ),
        copies,
    )


def _common(names: Sequence[str]) -> str:
    """The folder of all repositories."""
    parts = [name.split("/")[:-1] for name in names]
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return "/".join(column[0] for column in shared)


def _by_digest(shelf: ImageRepository, names: Sequence[str]) -> dict[str, list[str]]:
    """Digest → tags."""
    found: dict[str, list[str]] = {}
    digests = for_each(lambda tag: shelf.registry.digest(shelf.repository, tag), names, shelf.registry, jobs=WORKERS)
    for tag, digest in zip(names, digests, strict=True):
        if digest:  # else it was deleted meanwhile
            found.setdefault(digest, []).append(tag)
    return found


@dataclass(frozen=True)
class ImageRepository:
    """A repository of one image."""

    shop: ImageSources
    registry: Registry
    repository: str
    """Without the registry."""
    image: str
    signatures: frozenset[str]
    """Digests that have a signature by tag."""
    copies: dict[str, str]
    """What is copied into the site; grows while images are read."""

    def image_of(self, named: tuple[str, list[str]]) -> tuple[PublishedImage | None, list[str]]:
        """What a digest with its tags is, and what of it could not be read."""
        digest, names = named
        problems: list[str] = []
        try:
            manifest = self._manifest(digest)
            is_index = manifest.media_type in INDEX_TYPES
            alone = Descriptor(manifest.media_type, digest, len(manifest.content))
            runnable = [c for c in manifests_of(manifest.document) if _runs(c)] if is_index else [alone]
            platforms = tuple(self._platform(child, problems) for child in runnable)
            if not platforms:
                raise ResultError("names nothing that runs")
            own = self._evidence(digest, problems) if is_index else []
        except READ_ERRORS as error:
            return None, [self._told(digest, str(error))]
        made = PublishedImage(
            **vars(described(self.image, platforms, names, self.shop.ours)),
            repository=f"{self.registry.host}/{self.repository}",
            digest=digest,
            platforms=platforms,
            signed=digest in self.signatures or any(entry.kind == "signature" for entry, _ in own),
        )
        return made, [self._told(digest, problem) for problem in problems]

    def _told(self, digest: str, problem: str) -> str:
        return f"{self.registry.host}/{self.repository}@{digest}: {problem}"

    def _platform(self, child: Descriptor, problems: list[str]) -> PublishedPlatform:
        platform = self.shop.known.platforms.get(child.digest)
        if platform is None:
            manifest = self._manifest(child.digest).document
            config = self.registry.blob(self.repository, manifest["config"]["digest"])
            platform = platform_of(child, manifest, config)
        said = self._evidence(child.digest, problems)
        return with_evidence(platform, said, signed=child.digest in self.signatures)

    def _manifest(self, digest: str) -> Manifest:
        found = self.registry.manifest(self.repository, digest)
        if found is None:
            raise ResultError(f"{digest} is named but not there")
        return found

    def _evidence(self, subject: str, problems: list[str]) -> list[tuple[AttachedFile, AttachedFacts]]:
        """Everything that refers to a manifest, with what it says; the newest first, as far as annotations tell."""
        found = sorted(
            self.registry.referrers(self.repository, subject),
            key=lambda one: (one.annotations.get(CREATED, ""), one.digest),
            reverse=True,
        )
        result = []
        for referrer in found:
            kind = kind_of(referrer.artifact_type)
            try:
                result.append(self._one(kind, referrer.digest))
            except READ_ERRORS as error:
                problems.append(str(error))
                result.append((AttachedFile(kind=kind, digest=referrer.digest), AttachedFacts()))
        return result

    def _one(self, kind: str, digest: str) -> tuple[AttachedFile, AttachedFacts]:
        if found := self.shop.known.evidence.get(digest):
            if found[0].file:
                self.copies[found[0].file] = self.shop.known.copies[found[0].file]
            return found
        layers = blobs_of(self._manifest(digest).document)[1:]
        size = sum(layer.size for layer in layers)
        if kind not in READ or not layers:
            return AttachedFile(kind=kind, digest=digest, size_bytes=size), AttachedFacts()
        content = self.registry.blob(self.repository, layers[0].digest)
        said = read_attachment(kind, digest, content, self.shop.profiles)
        copy = None
        if len(content) <= COPIED_BYTES:
            copy = str(PurePosixPath(FOLDER, f"{digest.removeprefix('sha256:')[:16]}-{file_of(kind)}"))
            self.copies[copy] = content.decode()
        return AttachedFile(kind=kind, digest=digest, size_bytes=size, file=copy), said


def _runs(child: Descriptor) -> bool:
    return bool(child.platform) and not str(child.platform).startswith("unknown") and not child.artifact_type


BEGIN, END = "<!-- images:begin -->", "<!-- images:end -->"
LISTED = 3
"""Values of an axis that are listed; of more, the first and the last are named."""


def replace_table(name: str, text: str, table: str) -> str:
    """The text with this between the markers. Raises ConfigError if they are not there once and in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{name}: put one line {BEGIN} and one line {END} where the table of images shall be")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"


def images_table(ours: ProjectFacts, catalog: Catalog | None = None) -> str:
    """The table, and what it is made of."""
    axes = list(dict.fromkeys(axis for image in ours.matrix.images.values() for axis in image.axes))
    head = ["image", "what it is", *axes, "has", "platforms", "targets", "compressed"]
    if catalog:
        head.append("newest tag")
    rows = [_row(ours, name, image, axes, catalog) for name, image in ours.matrix.images.items()]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", _about(ours, catalog), ""])


def _row(ours: ProjectFacts, name: str, image: Image, axes: Sequence[str], catalog: Catalog | None) -> list[str]:
    targets = [target for target in ours.plan.targets if target.image == name]
    published = [one for one in catalog.images if one.image == name] if catalog else []
    cells = [
        f"`{name}`",
        image.description,
        *(_values(target.axes[axis] for target in targets if axis in target.axes) for axis in axes),
        _has(targets, ours.provides),
        ", ".join(sorted(p.removeprefix("linux/") for t in targets[:1] for p in t.platforms)) or document.NONE,
        str(len(targets)),
        _sizes(published) if published else _limit(image),
    ]
    if catalog:
        cells.append(f"`{published[0].tag}`" if published else "none yet")
    return [cell.replace("|", "\\|") for cell in cells]


def _values(found: Iterable[str]) -> str:
    values = list(dict.fromkeys(found))
    if len(values) > LISTED:
        return f"{values[0]} to {values[-1]} ({len(values)})"
    return ", ".join(values) or document.NONE


def _has(targets: Sequence[Target], provides: Mapping[str, tuple[str, ...]]) -> str:
    stacks = [stack_of(target.components, provides) for target in targets]
    nccl = list(dict.fromkeys(f"NCCL {stack['nccl']}" for stack in stacks if "nccl" in stack))
    mpi = list(dict.fromkeys(stack["mpi"] for stack in stacks if "mpi" in stack))
    return ", ".join([*nccl, *mpi]) or document.NONE


def _sizes(images: Sequence[PublishedImage]) -> str:
    sizes = sorted(platform.size_bytes for image in images for platform in image.platforms)
    least, most = console.format_size(sizes[0]), console.format_size(sizes[-1])
    return least if least == most else f"{least} to {most}"


def _limit(image: Image) -> str:
    limit = image.size_limit_mb
    if limit is None:
        return document.NONE
    if isinstance(limit, int):
        return f"at most {limit} MB"
    return "at most " + ", ".join(f"{size} MB {variant}" for variant, size in limit.items())


def _about(ours: ProjectFacts, catalog: Catalog | None) -> str:
    total = len(ours.plan.targets)
    if catalog is None:
        sizes = "; sizes are the limits in it" if any(i.size_limit_mb for i in ours.matrix.images.values()) else ""
        return f"{total} targets, by `imagebuild catalog --readme` from [matrix.yaml](matrix.yaml){sizes}."
    count = len(catalog.images)
    return (
        f"{total} targets; {count} image{'s' * (count != 1)} in `{catalog.repository}` on {catalog.read[:10]}. "
        "By `imagebuild catalog --readme`."
    )


def is_stale(old: str, new: str) -> bool:
    """Whether the table says something else; the time when the registry was read does not count."""
    day = re.compile(r"(in `[^`]*`) on [0-9-]{10}")
    return day.sub(r"\1", old) != day.sub(r"\1", new)
