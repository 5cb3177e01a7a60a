"""The catalogue of published images (`images.json`), and the table of images for a README."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial

from imagebuild import __version__
from imagebuild.bench.verification import Surroundings, VerifyResult
from imagebuild.core.console import markdown_table
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import full_reference, natural_order
from imagebuild.core.run import for_each
from imagebuild.oci.attestation import CREATED
from imagebuild.oci.image import PlatformImage, image_of, images_of
from imagebuild.oci.layout import REFERRERS_TAG, manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry, Repository, connect_registry
from imagebuild.project import records
from imagebuild.project.plan import REVISION_DIGITS, Plan, axes_of, components_of
from imagebuild.project.project import Project
from imagebuild.publish.evidence import mismatch, passes, read_attached, scan_problem, tag_problem
from imagebuild.publish.freshness import Freshness
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.publish.signatures import Signer
from imagebuild.report.document import NONE

READ_ERRORS = (CommandError, ConfigError, ResultError, LookupError, TypeError, ValueError)
"""Errors that can occur while imagebuild reads an image that another tool made. The catalogue lists these
errors as problems."""
REVISION = "org.opencontainers.image.revision"
"""Annotation of an index. The value is the git commit from which the images in the index were built."""
BEGIN, END = "<!-- images:begin -->", "<!-- images:end -->"
MOST_VALUES = 3
"""Maximum number of values of an axis in a table cell. If an axis with numbers has more values, the cell contains only
the first and the last value."""


@dataclass(frozen=True)
class CatalogReader:
    """Reader of the published images of all targets in a plan.
    If an image cannot be read, the catalogue contains a problem instead of the image."""

    project: Project
    plan: Plan
    trust: Signer | None = None
    """The trusted signer. The catalogue shows which images this signer signed, and only attachments of this signer
    count. None: signatures are not checked."""
    freshness: Freshness | None = None
    """The result of `imagebuild freshness`: available security updates for packages in the published images. None: the
    catalogue shows no updates."""
    connect: Callable[[str], Registry] = connect_registry

    @cached_property
    def _pending(self) -> dict[str, int]:
        """Maps the digest of each image in `freshness` to the number of its packages that have security updates.
        Images whose updates are unknown are left out."""
        judged = self.freshness.images if self.freshness else ()
        return {image.digest: len(image.updates) for image in judged if not image.problem}

    def read(self, now: datetime) -> records.Catalog:
        """Read all published images from the registries, and return the catalogue.

        `now` is the time that the catalogue states. Raises ConfigError if a tag in the plan does not name a registry,
        CommandError if a registry cannot be read at all."""
        problems: list[str] = []
        images: list[records.PublishedImage] = []
        names = {tag.rpartition(":")[0]: t.image for t in self.plan.targets for tag in (*t.tags, *t.aliases)}
        if bare := [name for name in names if full_reference(name) != name]:
            remedy = "add --registry, or add `repository:` to the matrix"
            raise ConfigError(f"catalog: {bare[0]} does not name a registry; {remedy}")
        registries = {host: self.connect(host) for host in {parse_reference(name).host for name in names}}
        for name, image in names.items():
            reference = parse_reference(name)
            place = registries[reference.host].at(reference.repository)
            read = partial(self._image, place, image)
            results = for_each(read, _tags_by_digest(place).items(), place.registry)
            problems += [problem for _, found in results for problem in found]
            images += newest_first(image for image, _ in results if image)
        return records.Catalog(
            repository=self.project.matrix.model.repository, read=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            imagebuild=__version__, images=tuple(images), problems=tuple(problems),
            updates_read=self.freshness.read if self.freshness else "",
            gpu_architectures=self.plan.gpu_architectures,
        )  # fmt: skip

    def _image(
        self, place: Repository, image: str, tagged: tuple[str, Sequence[str]]
    ) -> tuple[records.PublishedImage | None, list[str]]:
        """Return the catalogue entry of one image, or None if it cannot be read, and the problems that occurred.
        `image` is its name in the matrix, and `tagged` contains its digest and the tags that name this digest."""
        digest, tags = tagged
        name, problems = f"{place}@{digest}", list[str]()
        try:
            top = place.manifest(digest)
            images: dict[str, PlatformImage] = {}
            for item in images_of(manifests_of(top.document)):
                image_ = image_of(place, place.manifest(item.digest), platform=item.platform)
                images.setdefault(image_.platform, image_)  # engines run the first one of a platform
            read = images.values() or [image_of(place, top)]
            platforms = tuple(self._platform(place, each, digest, problems) for each in read)
            revision = str((top.document.get("annotations") or {}).get(REVISION, ""))
            unsigned = self.trust.image_problem(parse_reference(name)) if self.trust else ""
            moved = {tag: tag_problem(parse_reference(f"{place}:{tag}"), top) for tag in tags}
            if self.trust and not unsigned:
                tags = [tag for tag in tags if not moved[tag]]
                problems += [f"tag {tag} is left out: {problem}" for tag, problem in moved.items() if problem]
            longest_first = sorted(tags, key=lambda tag: (-len(tag), tag))
            # A tag that contains the commit never moves to another image.
            fixed = tuple(tag for tag in longest_first if revision and revision[:REVISION_DIGITS] in tag)
            labels = platforms[0].labels  # the images of all platforms belong to the same target
            entry, axes, versions = self.project.matrix.model.images[image], axes_of(labels), components_of(labels)
            published = records.PublishedImage(
                repository=str(place), digest=digest, tags=fixed, revision=revision,
                aliases=tuple(tag for tag in longest_first if tag not in fixed),
                created=max(platform.created for platform in platforms), platforms=platforms,
                target=labels.get("imagebuild.target", ""), image=image,
                description=labels.get("org.opencontainers.image.description", entry.description),
                axes={axis: axes[axis] for axis in dict.fromkeys((*entry.axes, *sorted(axes))) if axis in axes},
                versions=versions, stack=stack_of(versions, self.project),
                restricted={name: text for name, text in self.plan.restricted.items() if name in versions},
                verified_by=None if self.trust is None else "" if unsigned else self.trust.name,
            )  # fmt: skip
        except READ_ERRORS as error:
            return None, [f"{name}: {str(error).removeprefix(f'{name}: ')}"]
        return published, [f"{name}: {problem}" for problem in problems]

    def _platform(
        self, place: Repository, image: PlatformImage, index: str, problems: list[str]
    ) -> records.PublishedPlatform:
        labels = {str(name): str(value) for name, value in image.labels.items()}
        packages, scans, checks = None, list[records.Scan](), list[records.Checks]()
        evidence = list[records.AttachedFile]()
        for one in read_attached(place, image.digest, self.trust):
            value, item = one.value, one.item
            file = records.AttachedFile(kind=item.kind, digest=item.digest, size_bytes=item.size, distrust=one.distrust)
            evidence.append(file)
            if problem := one.problem or (value and mismatch(value, image.digest, image.platform, (index,))):
                problems.append(f"the {item.kind} {item.digest} {problem}")
                continue
            match value:
                case SpdxDocument():
                    packages = len(value.contents) if packages is None else packages
                case records.ScanResult():
                    scans.append(scan_summary(value))
                case VerifyResult():
                    checks.append(checks_summary(value))
        return records.PublishedPlatform(
            platform=image.platform, digest=image.digest, size_bytes=sum(layer.size for layer in image.layers),
            created=labels.get(CREATED) or str(image.config.get("created") or ""),
            labels=labels, packages=packages, updates=self._pending.get(image.digest),
            scan=max(scans, key=lambda scan: scan.started, default=None),
            checks=tuple(sorted(checks, key=lambda run: run.started, reverse=True)),
            evidence=tuple(evidence),
        )  # fmt: skip


def newest_first(images: Iterable[records.PublishedImage]) -> list[records.PublishedImage]:
    """Return the images of a repository, the newest first: by creation time, then start of the checks, then tag."""

    def age(image: records.PublishedImage) -> tuple[str, str]:
        # Reproducible images of one commit have the same creation time, so the start of their checks decides.
        return image.created, max((c.started for p in image.platforms for c in p.checks), default="")

    return sorted(images, key=lambda image: (*age(image), natural_order(image.tag), image.digest), reverse=True)


def _tags_by_digest(place: Repository) -> dict[str, list[str]]:
    tags = [tag for tag in place.tags() if not REFERRERS_TAG.fullmatch(tag)]
    by_digest: dict[str, list[str]] = {}
    for tag, digest in zip(tags, for_each(place.digest, tags, place.registry), strict=True):
        if digest:  # the digest is None if the tag was deleted in the meantime
            by_digest.setdefault(digest, []).append(tag)
    return by_digest


def stack_of(versions: Mapping[str, str], project: Project) -> dict[str, str]:
    """Return the versions of NCCL (key `nccl`) and MPI (key `mpi`) in an image.
    Users choose an image by these versions. `versions` maps each component of the image to its version."""
    provides = {name: component.model.provides for name, component in project.components.items()}
    known = {name: version for c, version in versions.items() for name in (c, *provides.get(c, ()))}
    # HPC-X states only the release series of its Open MPI, so the exact version of HPC-X is used instead.
    mpi = f"HPC-X {known['hpcx']}" if "hpcx" in known else f"Open MPI {known['mpi']}" if "mpi" in known else ""
    return {name: text for name, text in (("nccl", known.get("nccl", "")), ("mpi", mpi)) if text}


def scan_summary(result: records.ScanResult) -> records.Scan:
    """Summarise a scan for the catalogue: the verdict, the scanner, and the number of findings of each severity.
    A scan that is too old to count is `skipped`."""
    facts = result.model_dump(include={"verdict", "scanner", "database", "started"})
    facts["reason"] = scan_problem(result)
    if facts["reason"] and result.verdict == "passed":
        facts["verdict"] = "skipped"
    counts = Counter(finding.severity for finding in result.findings)
    waived = sum(finding.waived is not None for finding in result.findings)
    return records.Scan(counts=dict(counts), waived=waived, **facts)


def checks_summary(result: VerifyResult) -> records.Checks:
    """Summarise a verification for the catalogue: the number of checks with each outcome, and the GPU.
    Checks that may have run in another image do not count as passed."""
    counts = Counter(check.outcome for check in result.checks)
    place = result.surroundings or Surroundings(runner="")
    runs = [run for check in result.checks if check.results for run in check.results.runs]
    return records.Checks(
        passed=len(passes(result)), failed=counts["failed"], skipped=counts["skipped"],
        started=result.started, runner=place.runner, gpus=place.gpus, nodes=place.nodes,
        device=next((name for run in runs for name in run.devices), ""),
        failures=tuple(check.name for check in result.checks if check.outcome == "failed"),
    )  # fmt: skip


def replace_table(name: str, text: str, table: str) -> str:
    """Return a text in which the table between the two markers is replaced with a new table.

    `name` is the name of the file. Raises ConfigError unless the text contains each marker once, `BEGIN` before `END`.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        remedy = f"write one line {BEGIN} and, below, one line {END}"
        raise ConfigError(f"{name}: table markers are missing, repeated or swapped; {remedy}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"


def images_table(project: Project, plan: Plan) -> str:
    """Return a Markdown table with one row for each image in the matrix."""
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
    note = " Each size is an upper limit." if any(image.size_limit_mb for image in images.values()) else ""
    total = len(plan.targets)
    return f"{table}\n\n{total} targets. `imagebuild catalog --readme` makes this table from `matrix.yaml`.{note}\n"


def _listed(values: Sequence[str]) -> str:
    if len(values) > MOST_VALUES and values[0][0].isdigit():  # a range is clear only for numbers
        return f"{values[0]} to {values[-1]} ({len(values)})"
    return ", ".join(values) or NONE
