"""Read what registries have of the matrix's images into `images.json`, and write the README's table of images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from pydantic import BaseModel

from imagebuild import __version__
from imagebuild.core import files
from imagebuild.core.console import markdown_table
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import TAG, full_reference
from imagebuild.core.run import for_each
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import CREATED, SIGNATURE, Attestation, read_attestations
from imagebuild.oci.image import PlatformImage, image_in_registry
from imagebuild.oci.layout import REFERRERS_TAG
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, RepositoryAt, connect_registry
from imagebuild.project.matrix import Plan, axes_of, components_of
from imagebuild.project.plan import Project
from imagebuild.project.records import (
    AttachedFile,
    Bandwidth,
    Catalog,
    Checks,
    PublishedImage,
    PublishedPlatform,
    Sbom,
    Scan,
    ScanResult,
    Surroundings,
    VerifyResult,
)
from imagebuild.publish.evidence import read_predicate
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.report.document import NONE, Report, judged_checks

WORKERS = 8
"""Images that are read at a time, each with a few requests."""
READ_ERRORS = (CommandError, ConfigError, ResultError, LookupError, TypeError, ValueError)
"""Errors that an image which somebody else made may cause."""
REVISION_LABEL = "org.opencontainers.image.revision"
"""Label of the git revision."""


def read_catalog(path: Path) -> Catalog:
    """Read an `images.json`. Raises ConfigError without a file, ResultError if it is something else."""
    return read_written(Catalog, files.read_text(path), str(path))


def published_repositories(plan: Plan) -> dict[ImageReference, str]:
    """Return the repositories of the tags, each with its image. Raises ConfigError for one without a registry."""
    names = {tag.rpartition(":")[0]: t.image for t in plan.targets for tag in (*t.tags, *t.aliases)}
    if unnamed := [name for name in names if full_reference(name) != name]:
        raise ConfigError(f"catalog: {unnamed[0]} names no registry; give --registry, or `repository:` in the matrix")
    return {parse_reference(name): image for name, image in names.items()}


def catalog_from_registry(
    project: Project,
    plan: Plan,
    connect: Callable[[str], Registry] = connect_registry,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Catalog:
    """Read what the registries of the plan have; an image that cannot be read is one of the catalogue's problems.

    Raises ConfigError if a tag names no registry, CommandError if a registry cannot be read at all.
    """
    problems: list[str] = []
    images: list[PublishedImage] = []
    repositories = published_repositories(plan)
    registries = {host: connect(host) for host in {name.host for name in repositories}}
    for reference, image in repositories.items():
        registry = registries[reference.host]
        tags = registry.tags(reference.repository)
        repository = ImageRepository(registry.at(reference.repository), image, project, plan, signed_digests(tags))
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
    project: Project
    plan: Plan
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
            found = image_in_registry(name, parse_reference(name), self.place.registry, Path())
            platforms = tuple(self._read_platform(found.image(platform), problems) for platform in found.platforms)
            is_index = digest not in {platform.digest for platform in platforms}
            kinds = [item.kind for item, _ in self._read_attached(digest, problems)] if is_index else []
            signed = self._is_signed(digest, kinds) if is_index else platforms[0].signed
            image = self._describe(digest, tags, platforms, signed=signed)
        except READ_ERRORS as error:
            problems = [str(error).removeprefix(f"{name}: ")]
        return image, [f"{name}: {problem}" for problem in problems]

    def _describe(
        self, digest: str, tags: Sequence[str], platforms: tuple[PublishedPlatform, ...], *, signed: bool
    ) -> PublishedImage:
        """Return what labels, tags and the matrix say of an image; all of its platforms are of one target."""
        labels, entry = platforms[0].labels, self.project.matrix.model.images[self.image]
        axes, versions = axes_of(labels), components_of(labels)
        order = {axis: number for number, axis in enumerate(entry.axes)}
        fixed, aliases, revision = split_tags(tags, entry.tags, axes)
        return PublishedImage(
            target=labels.get("imagebuild.target", ""),
            image=self.image,
            description=labels.get("org.opencontainers.image.description", entry.description),
            axes=dict(sorted(axes.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))),
            versions=versions,
            stack=stack_of(versions, self.project),
            repository=str(self.place),
            digest=digest,
            tags=fixed,
            aliases=aliases,
            revision=labels.get(REVISION_LABEL) or revision,
            created=max(platform.created for platform in platforms),
            platforms=platforms,
            restricted={name: text for name, text in self.plan.restricted.items() if name in versions},
            signed=signed,
        )

    def _read_platform(self, image: PlatformImage, problems: list[str]) -> PublishedPlatform:
        # BuildKit may leave the base image's time in `created`, so the youngest step counts, too.
        steps = (image.config, *(image.config.get("history") or ()))
        labels = {str(name): str(value) for name, value in image.labels.items()}
        digest = str(image.digest)
        sbom, scans, checks, bandwidths = None, [], [], list[Bandwidth]()
        attached = self._read_attached(digest, problems)
        for item, predicate in attached:
            match predicate:
                case SpdxDocument():
                    sbom = sbom or Sbom(evidence=item.digest, packages=len(predicate.contents))
                case ScanResult():
                    scans.append(scan_summary(item.digest, predicate))
                case VerifyResult():
                    checks.append(checks_summary(item.digest, predicate))
                    bandwidths += bandwidths_of(item.digest, predicate)
                case Report():
                    bandwidths += bandwidths_of(item.digest, predicate)
        return PublishedPlatform(
            platform=image.platform,
            digest=digest,
            size_bytes=sum(layer.size for layer in image.layers),
            layers=len(image.layers),
            created=labels.get(CREATED) or max(str(step.get("created") or "") for step in steps),
            labels=labels,
            sbom=sbom,
            scan=max(scans, key=lambda scan: scan.started, default=None),
            checks=tuple(sorted(checks, key=lambda run: run.started, reverse=True)),
            bandwidth=best_bandwidth(bandwidths),
            evidence=tuple(
                AttachedFile(kind=item.kind, digest=item.digest, size_bytes=item.size) for item, _ in attached
            ),
            signed=self._is_signed(digest, [item.kind for item, _ in attached]),
        )

    def _is_signed(self, digest: str, kinds: Iterable[str]) -> bool:
        return digest in self.signatures or SIGNATURE in kinds

    def _read_attached(self, subject: str, problems: list[str]) -> list[tuple[Attestation, BaseModel | None]]:
        """Read everything that refers to a manifest, the newest first as far as annotations tell."""
        attached: list[tuple[Attestation, BaseModel | None]] = []
        for item in read_attestations(self.place.registry, self.place.repository, subject):
            predicate = None
            try:
                predicate = read_predicate(item)
            except ResultError as error:
                problems.append(str(error))
            attached.append((item, predicate))
        return attached


# What labels and tags say


def stack_of(versions: Mapping[str, str], project: Project) -> dict[str, str]:
    """Return the versions of NCCL and MPI, by which people choose an image besides its axes."""
    provides = {name: component.model.provides for name, component in project.components.items()}
    known = {name: version for c, version in versions.items() for name in (c, *provides.get(c, ()))}
    # The version of Open MPI in HPC-X is only a series; that of HPC-X is exact.
    mpi = f"HPC-X {known['hpcx']}" if "hpcx" in known else f"Open MPI {known['mpi']}" if "mpi" in known else ""
    return {name: text for name, text in (("nccl", known.get("nccl", "")), ("mpi", mpi)) if text}


REVISION = r"(?P<revision>[0-9a-f]{7,40}(?:-\d{8})?(?:-dirty)?)"
ANY = r"[A-Za-z0-9._-]+"


def signed_digests(tags: Iterable[str]) -> frozenset[str]:
    """Return the digests for which there is a tag of a signature."""
    matches = (REFERRERS_TAG.fullmatch(tag) for tag in tags)
    return frozenset(f"sha256:{match[1]}" for match in matches if match and match[2] == "sig")


def image_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return the tags of images. One that the specification does not allow is left out, as the page has tags as ids."""
    return tuple(tag for tag in tags if re.fullmatch(TAG, tag) and not REFERRERS_TAG.fullmatch(tag))


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


def scan_summary(digest: str, result: ScanResult) -> Scan:
    """Return what the attachment with this digest says of a scan."""
    facts = result.model_dump(include={"verdict", "reason", "scanner", "database", "started"})
    counts = Counter(finding.severity for finding in result.findings)
    waived = sum(finding.waived is not None for finding in result.findings)
    return Scan(evidence=digest, counts=dict(counts), waived=waived, **facts)


def checks_summary(digest: str, result: VerifyResult) -> Checks:
    """Return what the attachment with this digest says of a verification, and of the GPUs that its benchmarks name."""
    counts = Counter(check.outcome for check in result.checks)
    place = result.surroundings or Surroundings(runner="")
    runs = [run for check in result.checks if check.results for run in check.results.runs]
    return Checks(
        evidence=digest,
        passed=counts["passed"],
        failed=counts["failed"],
        skipped=counts["skipped"],
        started=result.started,
        runner=place.runner,
        gpus=place.gpus,
        nodes=place.nodes,
        device=next((name for run in runs for name in run.devices), ""),
        failures=tuple(f"{check.component}/{check.check}" for check in result.checks if check.outcome == "failed"),
        version=result.version,
    )


def bandwidths_of(digest: str, result: VerifyResult | Report) -> Iterator[Bandwidth]:
    """Yield the best bus bandwidth of each run whose data were right; `digest` is that of the attachment."""
    judged = [(result, result.judgements)] if isinstance(result, Report) else judged_checks(result)
    for results, judgements in judged:
        for run, judgement in zip(results.runs, judgements, strict=False):
            ceiling = judgement.speed.ceiling
            rates = [rate for row in run.rows if (rate := row.busbw_gb_s)]
            if run.verdict == "ok" and rates:
                yield Bandwidth(
                    evidence=digest, collective=run.collective or "unknown", ranks=run.ranks, gb_s=max(rates),
                    ceiling_gb_s=ceiling.value if ceiling else None,
                )  # fmt: skip


def best_bandwidth(found: Iterable[Bandwidth]) -> Bandwidth | None:
    """Return the one that stands for all: all_reduce with most ranks; of equal ones, one with a ceiling."""

    def rank(result: Bandwidth) -> tuple[bool, int, float, bool]:
        return result.collective == "all_reduce", result.ranks or 0, result.gb_s, result.ceiling_gb_s is not None

    return max(found, key=rank, default=None)


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


def images_table(project: Project, plan: Plan) -> str:
    """Return the table of the matrix's images as Markdown."""
    images = project.matrix.model.images
    axes = list(dict.fromkeys(axis for image in images.values() for axis in image.axes))
    rows = []
    for name, image in images.items():
        targets = [target for target in plan.targets if target.image == name]
        platforms = sorted(platform.removeprefix("linux/") for target in targets[:1] for platform in target.platforms)
        stacks = [stack_of(target.components, project) for target in targets]
        nccl = dict.fromkeys(f"NCCL {stack['nccl']}" for stack in stacks if "nccl" in stack)
        mpi = dict.fromkeys(stack["mpi"] for stack in stacks if "mpi" in stack)
        limit = image.size_limit_mb
        by_variant = limit if isinstance(limit, dict) else {"": limit} if limit else {}
        sizes = [f"{size} MB {variant}".rstrip() for variant, size in by_variant.items()]
        values = [dict.fromkeys(t.axes[axis] for t in targets if axis in t.axes) for axis in axes]
        rows.append([
            f"`{name}`", image.description, *(_listed(list(distinct)) for distinct in values),
            ", ".join([*nccl, *mpi]) or NONE, ", ".join(platforms) or NONE, str(len(targets)),
            f"at most {', '.join(sizes)}" if sizes else NONE,
        ])  # fmt: skip
    table = markdown_table(["image", "what it is", *axes, "has", "platforms", "targets", "compressed"], rows)
    note = "; sizes are the limits in it" if any(image.size_limit_mb for image in images.values()) else ""
    total = len(plan.targets)
    return f"{table}\n\n{total} targets, by `imagebuild catalog --readme` from [matrix.yaml](matrix.yaml){note}.\n"


def _listed(values: Sequence[str]) -> str:
    if len(values) > MOST_VALUES and values[0][0].isdigit():  # names have no order that everybody knows
        return f"{values[0]} to {values[-1]} ({len(values)})"
    return ", ".join(values) or NONE
