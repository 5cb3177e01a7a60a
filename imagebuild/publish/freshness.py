"""Search for security updates that a distribution has published for packages in published images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

from pydantic import Field

from imagebuild.core import console
from imagebuild.core.console import out
from imagebuild.core.debian import Package, version_key
from imagebuild.core.fields import Model
from imagebuild.core.run import for_each
from imagebuild.oci.image import images_of
from imagebuild.oci.layout import manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry
from imagebuild.project.plan import Target
from imagebuild.project.records import ScanResult
from imagebuild.publish.evidence import PUBLICATION, attached_packages, tag_problem
from imagebuild.publish.signatures import Signer


class NewestImage(Model):
    """The newest published image of a target for one platform, and the available updates for packages in the image."""

    target: str
    platform: str = ""
    digest: str = ""
    index: str = ""
    """Name and digest of the index that lists the image, as `NAME@sha256:…`."""
    updates: dict[str, str] = Field(default_factory=dict)
    """Maps each package that has an update to its installed version and its newest version, as `1.0 → 1.1`."""
    problem: str = ""
    """Why the updates for the image are unknown. Empty if the updates are known."""


class Freshness(Model):
    """The file that `imagebuild freshness --json` writes."""

    read: str
    """Time at which the registry and the distribution's package archive were read, in UTC."""
    images: tuple[NewestImage, ...]
    rebuild: tuple[str, ...] = ()
    """Names of the targets that must be built again, because a package in the image has an update, or because a
    vulnerability in a package fails the image and a fixed version exists."""
    verified_by: str | None = None
    """The key or identity whose SBOMs count. None: signatures were not checked."""


def published_images(
    targets: Sequence[Target], connect: Callable[[str], Registry], trust: Signer | None = None
) -> list[NewestImage]:
    """Return the newest published image of each target for each of its platforms.

    The newest image is the image that the first alias of the target names. An alias is a tag that moves, such as
    `latest`. If no image is found, or if `trust` is set and did not sign it under this alias, the entry of the target
    contains a problem. Raises CommandError if a registry fails."""

    def find(target: Target) -> list[NewestImage]:
        if not target.aliases:
            problem = "the target has no alias (a tag that moves), so its newest image is unknown"
            return [NewestImage(target=target.id, problem=problem)]
        name = parse_reference(target.aliases[0])
        index = connect(name.host).at(name.repository).find(name.wanted)
        if index is None:
            return [NewestImage(target=target.id, problem=f"{name}: is not published")]
        problem = trust.image_problem(name.at(index.digest)) if trust else ""
        if trust or PUBLICATION in str(index.document.get("annotations")):
            problem = problem or tag_problem(name, index)
        if problem:
            return [NewestImage(target=target.id, problem=f"{name}: {problem}")]
        named = {"target": target.id, "index": str(name.at(index.digest))}
        # Engines run the first image of a platform.
        found = {item.platform: item.digest for item in reversed(images_of(manifests_of(index.document)))}
        lacks = {p: "" if p in found else f"{name}: is not published for {p}" for p in target.platforms}
        return [NewestImage(platform=p, digest=found.get(p, ""), problem=lacks[p], **named) for p in lacks]

    registries = {connect(parse_reference(target.aliases[0]).host) for target in targets if target.aliases}
    return [image for found in for_each(find, targets, *registries) for image in found]


def security_updates(
    targets: Sequence[Target], connect: Callable[[str], Registry],
    newest: Callable[[str, Iterable[str]], Mapping[str, list[str]]], scans: Iterable[ScanResult] = (),
    trust: Signer | None = None,
) -> Freshness:  # fmt: skip
    """Compare the packages in the SBOMs of published images with the newest versions of a distribution.

    Return the updates, and the targets that must be built again. `newest` is called once for each architecture, with
    the architecture and the names of packages. `newest` returns the versions of each package in ascending order. A
    finding in `scans` that fails an image and has a fix is also a reason to build again. Only images and SBOMs that
    `trust` signed are read. If `trust` is None, signatures are not checked. Raises CommandError if a registry fails."""

    def read(image: NewestImage) -> tuple[Package, ...]:
        place = parse_reference(image.index)
        return attached_packages(connect(place.host).at(place.repository), image.digest, trust)

    images = published_images(targets, connect, trust)
    known = [image for image in images if not image.problem]
    registries = {connect(parse_reference(image.index).host) for image in known}
    packages = dict(zip((i.digest for i in known), for_each(read, known, *registries), strict=True))
    names: dict[str, set[str]] = {}
    for image in known:
        names.setdefault(image.platform, set()).update(package.name for package in packages[image.digest])
    available = {p: newest(p.removeprefix("linux/"), sorted(found)) for p, found in names.items() if found}
    # A new build installs fixed versions only of the distribution's packages, not of other software.
    failed = {(scan.digest, f.package) for scan in scans for f in scan.findings if f.fails and f.fixed_in}
    judged, stale = list[NewestImage](), set[str]()
    for image in images:
        problem, updates = image.problem, dict[str, str]()
        for package in packages.get(image.digest, ()):
            newer = available[image.platform].get(package.name)
            if newer and version_key(newer[-1]) > version_key(package.version):
                updates[package.name] = f"{package.version} → {newer[-1]}"
            if package.name in updates or (image.digest, package.name) in failed:
                stale.add(image.target)
        if not (problem or packages[image.digest]):
            by = f" of {trust.name}" if trust else ""
            problem = f"the image has no readable SBOM{by} that lists packages of the distribution"
        judged.append(image.model_copy(update={"updates": updates, "problem": problem}))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    rebuild, signer = tuple(t.id for t in targets if t.id in stale), trust.name if trust else None
    return Freshness(read=now, images=tuple(judged), rebuild=rebuild, verified_by=signer)


def print_freshness(result: Freshness) -> None:
    """Print the available updates, the images whose updates are unknown, and the targets that must be built again."""
    rows = [(i.target, i.platform, package, change) for i in result.images for package, change in i.updates.items()]
    if rows:
        console.print_table(("target", "platform", "package", "update"), rows)
    unknown = [image for image in result.images if image.problem]
    for image in unknown:
        out.print(f"updates unknown: {image.target} {image.platform}: {image.problem}")
    stale, judged = sum(bool(image.updates) for image in result.images), len(result.images) - len(unknown)
    out.print(f"{stale} of {judged} images have packages with updates; updates are unknown for {len(unknown)} images")
    if result.verified_by is None:
        out.print(console.styled(*console.UNSIGNED))
    if result.rebuild:
        out.print(f"rebuild: {', '.join(result.rebuild)}")
