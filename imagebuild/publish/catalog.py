"""Read what registries have of the matrix's images into `images.json`, and write the README's table of images."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from imagebuild import __version__
from imagebuild.bench.judge import describe_run, judge_run
from imagebuild.bench.models import Judgement, Limit, Results, Run
from imagebuild.bench.profiles import Profile, load_profiles
from imagebuild.core import files
from imagebuild.core.console import format_size, markdown_table
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import full_reference
from imagebuild.core.run import for_each
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import CREATED, kind_of, list_attestations, read_attestation
from imagebuild.oci.image import PlatformImage, image_in_registry
from imagebuild.oci.layout import Descriptor
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, RepositoryAt, connect_registry
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
from imagebuild.publish.sbom import listed_packages
from imagebuild.report.document import NONE, Report, busbw
from imagebuild.verify.checks import axes_of, components_of

WORKERS = 8
"""Images that are read at a time, each with a few requests."""
READ_ERRORS = (CommandError, ConfigError, ResultError, LookupError, TypeError, ValueError)
"""Errors that an image which somebody else made may cause."""
REVISION_LABEL = "org.opencontainers.image.revision"
"""Label of the git revision."""


@dataclass(frozen=True)
class ProjectFacts:
    """Hold what the project says, whatever the registry has."""

    matrix: Matrix
    plan: Plan
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other components that it stands for."""
    profiles: Mapping[str, Profile] = field(default_factory=dict)


def read_catalog(path: Path) -> Catalog:
    """Read an `images.json`. Raises ConfigError without a file, ResultError if it is something else."""
    return read_written(Catalog, files.read_text(path), str(path))


def catalog_from_registry(project: ProjectFacts, profiles: Path) -> Catalog:
    """Read what the registries of the plan have, and compare benchmarks with the profiles of a folder, if there is one.

    Raises ConfigError if a tag names no registry, CommandError if a registry fails.
    """
    for target in project.plan.targets:
        for tag in target.tags:
            if full_reference(tag) != tag:
                raise ConfigError(f"catalog: {tag} names no registry; give --registry, or `repository:` in the matrix")
    hosts = {name.host for name in published_repositories(project.plan)}
    known = {name: file.model for name, file in load_profiles(profiles).items()} if profiles.is_dir() else {}
    return read_registries({host: connect_registry(host) for host in hosts}, replace(project, profiles=known))


def published_repositories(plan: Plan) -> dict[ImageReference, str]:
    """Return the repositories of the plan's tags, each with its image. Raises ConfigError for a wrong name."""
    names = {tag.rpartition(":")[0]: t.image for t in plan.targets for tag in (*t.tags, *t.aliases)}
    return {parse_reference(name): image for name, image in names.items()}


def read_registries(
    registries: Mapping[str, Registry],
    project: ProjectFacts,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Catalog:
    """Read a catalogue; an image that cannot be read is one of its problems. `registries` are named by their hosts.

    Raises CommandError if a registry cannot be read at all.
    """
    problems: list[str] = []
    images: list[PublishedImage] = []
    repositories = published_repositories(project.plan)
    for reference, image in repositories.items():
        registry = registries[reference.host]
        tags = registry.tags(reference.repository)
        repository = ImageRepository(registry.at(reference.repository), image, project, signed_digests(tags))
        results = for_each(repository.read_image, repository.tags_by_digest(tags).items(), registry, jobs=WORKERS)
        problems += [problem for _, found in results for problem in found]
        images += newest_first(image for image, _ in results if image)
    folders = [reference.name.split("/")[:-1] for reference in repositories]
    common = takewhile(lambda column: len(set(column)) == 1, zip(*folders, strict=False))
    return Catalog(
        repository="/".join(column[0] for column in common),
        read=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        imagebuild=__version__,
        images=tuple(images),
        problems=tuple(problems),
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

    place: RepositoryAt
    image: str
    project: ProjectFacts
    signatures: frozenset[str]
    """Digests that a tag says to have a signature."""

    def tags_by_digest(self, tags: Iterable[str]) -> dict[str, list[str]]:
        """Return digest → the tags of images that name it."""
        names, registry = image_tags(tags), self.place.registry
        digests = for_each(lambda tag: registry.digest(self.place.repository, tag), names, registry, jobs=WORKERS)
        by_digest: dict[str, list[str]] = {}
        for tag, digest in zip(names, digests, strict=True):
            if digest:  # a tag may have been deleted meanwhile
                by_digest.setdefault(digest, []).append(tag)
        return by_digest

    def read_image(self, tagged: tuple[str, list[str]]) -> tuple[PublishedImage | None, list[str]]:
        """Return the image of a digest with its tags, None if it cannot be read; and what could not be read of it."""
        digest, tags = tagged
        name = f"{self.place}@{digest}"
        problems: list[str] = []
        image = None
        try:
            with TemporaryDirectory(prefix="imagebuild-") as folder:
                found = image_in_registry(name, parse_reference(name), self.place.registry, Path(folder))
                images = {platform: found.image(platform) for platform in found.platforms}
            platforms = tuple(self._read_platform(platform, one, problems) for platform, one in images.items())
            is_index = digest not in {platform.digest for platform in platforms}
            attached = self._read_attachments(digest, problems) if is_index else []
            image = self._describe(digest, tags, platforms, signed=self._is_signed(digest, attached))
        except READ_ERRORS as error:
            problems = [str(error).removeprefix(f"{name}: ")]
        return image, [f"{name}: {problem}" for problem in problems]

    def _describe(
        self, digest: str, tags: Sequence[str], platforms: tuple[PublishedPlatform, ...], *, signed: bool
    ) -> PublishedImage:
        """Return what labels, tags and the matrix say of an image; all of its platforms are of one target."""
        labels, entry = platforms[0].labels, self.project.matrix.images[self.image]
        axes, versions = axes_of(labels), components_of(labels)
        order = {axis: number for number, axis in enumerate(entry.axes)}
        fixed, aliases, revision = split_tags(tags, entry.tags, axes)
        return PublishedImage(
            target=labels.get("imagebuild.target", ""),
            image=self.image,
            description=labels.get("org.opencontainers.image.description", entry.description),
            axes=dict(sorted(axes.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))),
            versions=versions,
            stack=stack_of(versions, self.project.provides),
            repository=str(self.place),
            digest=digest,
            tags=fixed,
            aliases=aliases,
            revision=labels.get(REVISION_LABEL) or revision,
            created=max(platform.created for platform in platforms),
            platforms=platforms,
            restricted={name: text for name, text in self.project.plan.restricted.items() if name in versions},
            signed=signed,
        )

    def _read_platform(self, platform: str, image: PlatformImage, problems: list[str]) -> PublishedPlatform:
        # BuildKit may leave the base image's time in `created`, so the youngest step counts, too.
        steps = (image.config, *(image.config.get("history") or ()))
        labels = {str(name): str(value) for name, value in image.labels.items()}
        digest = str(image.digest)
        attached = self._read_attachments(digest, problems)
        checks = [attachment.checks for attachment in attached if attachment.checks]
        scans = [attachment.scan for attachment in attached if attachment.scan]
        return PublishedPlatform(
            platform=platform,
            digest=digest,
            size_bytes=sum(layer.size for layer in image.layers),
            layers=len(image.layers),
            created=labels.get(CREATED) or max(str(step.get("created") or "") for step in steps),
            labels=labels,
            sbom=next((attachment.sbom for attachment in attached if attachment.sbom), None),
            scan=max(scans, key=lambda scan: scan.started, default=None),
            checks=tuple(sorted(checks, key=lambda run: run.started, reverse=True)),
            curves=distinct_curves(curve for attachment in attached for curve in attachment.curves),
            evidence=tuple(attachment.entry for attachment in attached),
            signed=self._is_signed(digest, attached),
        )

    def _is_signed(self, digest: str, attached: Iterable[Attachment]) -> bool:
        return digest in self.signatures or any(attachment.entry.kind == "signature" for attachment in attached)

    def _read_attachments(self, subject: str, problems: list[str]) -> list[Attachment]:
        """Read everything that refers to a manifest, the newest first as far as annotations tell."""
        attached = []
        for referrer in list_attestations(self.place.registry, self.place.repository, subject):
            entry = AttachedFile(kind=kind_of(referrer), digest=referrer.digest)
            try:
                attached.append(self._read_attachment(entry, referrer, subject))
            except READ_ERRORS as error:
                problems.append(str(error))
                attached.append(Attachment(entry))
        return attached

    def _read_attachment(self, entry: AttachedFile, referrer: Descriptor, subject: str) -> Attachment:
        read = read_attestation(self.place.registry, self.place.repository, referrer, subject)
        if read.problem:
            raise ResultError(f"the {read.kind} {read.digest} {read.problem}")
        entry = entry.model_copy(update={"size_bytes": read.size})
        if entry.kind not in READ_KINDS:
            return Attachment(entry)
        return read_attachment(entry, read.content, self.project.profiles)


# What labels and tags say


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


READ_KINDS = ("sbom", "scan", "verification", "benchmark")
"""Kinds of attachments that are read; others are only listed."""


@dataclass(frozen=True)
class Attachment:
    """Hold what one file says that refers to an image."""

    entry: AttachedFile
    sbom: Sbom | None = None
    scan: Scan | None = None
    checks: Checks | None = None
    curves: tuple[Curve, ...] = ()


def read_attachment(entry: AttachedFile, content: bytes, profiles: Mapping[str, Profile]) -> Attachment:
    """Read an attachment of a kind in `READ_KINDS`. Raises ResultError if it is something else."""
    name = f"the {entry.kind} {entry.digest}"
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ResultError(f"{name} is not JSON") from None
    if not isinstance(document, dict):
        raise ResultError(f"{name} is not a JSON object")
    if entry.kind == "sbom":
        return Attachment(entry, sbom=Sbom(evidence=entry.digest, packages=_count_packages(document, name)))
    if entry.kind == "scan":
        scan = read_written(ScanResult, document, name)
        facts = scan.model_dump(include={"verdict", "reason", "scanner", "database", "started"})
        counts = Counter(finding.severity for finding in scan.findings)
        waived = sum(finding.waived is not None for finding in scan.findings)
        return Attachment(entry, scan=Scan(evidence=entry.digest, counts=dict(counts), waived=waived, **facts))
    if "checks" not in document:
        report = read_written(Report, document, name) if "about" in document else read_written(Results, document, name)
        verdicts, profile = (report.judgements, report.about.profile) if isinstance(report, Report) else ((), None)
        return Attachment(entry, curves=curves_of(entry.digest, [report], verdicts, profiles, profile))
    result = read_written(VerifyResult, document, name)
    judged = [verdict for check in result.checks for verdict in check.judgements]
    measured = [check.results for check in result.checks if check.results]
    curves = curves_of(entry.digest, measured, judged, profiles)
    checks = _sum_up(entry.digest, result, curves) if entry.kind == "verification" else None
    return Attachment(entry, checks=checks, curves=curves)


def _count_packages(document: Mapping[str, Any], name: str) -> int:
    """Return the number of packages in an SPDX document; the image itself is one of them, and does not count."""
    try:
        return len(listed_packages(document))
    except (LookupError, TypeError, AttributeError):
        raise ResultError(f"{name} has no list of packages; only SPDX as JSON is read") from None


def _sum_up(digest: str, result: VerifyResult, curves: Iterable[Curve]) -> Checks:
    counts = Counter(check.outcome for check in result.checks)
    place = result.surroundings
    return Checks(
        evidence=digest,
        passed=counts["passed"],
        failed=counts["failed"],
        skipped=counts["skipped"],
        started=result.started,
        runner=place.runner if place else "",
        gpus=place.gpus if place else 0,
        nodes=place.nodes if place else 1,
        device=next((curve.device for curve in curves if curve.device), ""),
        failures=tuple(f"{check.component}/{check.check}" for check in result.checks if check.outcome == "failed"),
        version=result.version,
    )


def curves_of(
    digest: str,
    results: Iterable[Results],
    verdicts: Iterable[Judgement],
    profiles: Mapping[str, Profile],
    profile: str | None = None,
) -> tuple[Curve, ...]:
    """Return a curve for each run that has a bandwidth; `digest` is that of the attachment.

    A run without a verdict is judged by `profile` or, if it ran on one host, by the profile of its GPU.
    """
    by_source: dict[str, list[Judgement]] = {}
    for verdict in verdicts:
        by_source.setdefault(verdict.source, []).append(verdict)
    runs = [run for part in results for run in part.runs]
    curves = [_curve(digest, run, by_source.get(run.source, ()), profiles, profile) for run in runs]
    return tuple(curve for curve in curves if curve)


def _curve(
    digest: str, run: Run, verdicts: Sequence[Judgement], profiles: Mapping[str, Profile], profile_name: str | None
) -> Curve | None:
    points = {row.size_bytes: speed for row in run.rows if row.size_bytes > 0 and (speed := busbw(row))}
    if not points:
        return None
    own = describe_run(run.collective, run.ranks, run.nodes)
    verdict = next((v for v in verdicts if v.subject == own), verdicts[0] if len(verdicts) == 1 else None)
    profile = profiles.get(profile_name) if profile_name else _profile_of(run, profiles)
    if verdict is None and profile and run.verdict == "ok":
        verdict = judge_run(run, profile)
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
        outcome=verdict.speed.state if verdict else "",
        reason=verdict.speed.reason if verdict else "",
        profile=profile_name or (profile.name if profile and verdict else None),
        ceiling=_bound(verdict.speed.ceiling) if verdict else None,
        reference=_bound(verdict.speed.reference) if verdict else None,
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
