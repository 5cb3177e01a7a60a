"""Comparison of two images: components, packages, environment and layers."""

import platform as machine
from contextlib import ExitStack

from imagebuild.core.console import format_size, out, print_table, styled
from imagebuild.core.debian import installed_packages, package_versions
from imagebuild.core.fields import Model
from imagebuild.core.run import ARCHITECTURES
from imagebuild.oci.image import PlatformImage
from imagebuild.project.plan import components_of
from imagebuild.publish.evidence import attached_packages
from imagebuild.publish.sbom import DPKG
from imagebuild.publish.signatures import Signer
from imagebuild.report.document import NONE
from imagebuild.verify.files import Tree
from imagebuild.verify.layers import read_layers
from imagebuild.verify.subject import ImageFinder

Changes = dict[str, tuple[str | None, str | None]]
"""Maps the name of each difference to the value in the first image and the value in the second image. None: the image
has no such value."""


class ComparedImage(Model):
    """One of the two compared images."""

    name: str
    origin: str
    """Where the image was found, such as an engine or a registry."""
    digest: str
    platform: str
    size_bytes: int
    """Total size of the image's layers in bytes: compressed, or unpacked if the engine stores only unpacked layers."""


class Comparison(Model):
    """The file that `imagebuild diff --json` writes."""

    a: ComparedImage
    b: ComparedImage
    differences: dict[str, Changes]
    """Maps `components`, `packages`, `environment` and `layers` to their differences. `packages` is left out if the
    packages could not be compared."""
    notes: tuple[str, ...] = ()
    """Notes for the user: which packages were not compared, which packages were read from an SBOM instead of the
    layers, and which layers are not compressed."""

    @property
    def differs(self) -> bool:
        return any(self.differences.values())


def compare_images(
    names: tuple[str, str], finder: ImageFinder, platform: str | None = None, trust: Signer | None = None
) -> Comparison:
    """Find and read two images, and return their differences.

    If a name refers to images for several platforms, `platform` chooses one platform. Default: the platform of this
    machine. If `trust` is set, only SBOMs that it signed are read. Raises ConfigError if an image does not exist,
    CommandError if the engine or a registry fails, and ResultError if an image cannot be read."""
    own = f"linux/{ARCHITECTURES.get(machine.machine())}"
    notes, sides, facts = list[str](), list[ComparedImage](), list[dict[str, dict[str, str]]]()
    with ExitStack() as stack:
        for found in [stack.enter_context(finder.find(name)) for name in names]:
            image = found.image(platform or (own if own in found.platforms else None))
            size = sum(layer.size for layer in image.layers)
            named = {"name": found.name, "origin": found.origin, "platform": image.platform}
            sides.append(ComparedImage(digest=image.digest, size_bytes=size, **named))
            facts.append({
                "components": components_of(image.labels),
                "packages": _packages(image, notes, trust),
                "environment": image.env,
                "layers": {str(layer.digest): format_size(layer.size) for layer in image.layers},
            })  # fmt: skip
    differences: dict[str, Changes] = {}
    for title, a in facts[0].items():
        b = facts[1][title]
        differences[title] = {n: (a.get(n), b.get(n)) for n in dict.fromkeys((*a, *b)) if a.get(n) != b.get(n)}
    if not all(of_image["packages"] for of_image in facts):
        del differences["packages"]
    return Comparison(a=sides[0], b=sides[1], differences=differences, notes=tuple(notes))


def _packages(image: PlatformImage, notes: list[str], trust: Signer | None) -> dict[str, str]:
    """Return the distribution's packages in an image, with their versions. Append remarks for the user to `notes`.
    If the image is in a registry and has an SBOM, the packages are read from the SBOM, and no layer is fetched."""
    packages = attached_packages(image.repository, image.digest, trust) if image.repository else ()
    if packages:
        signed = (
            f"signed by {trust.name}" if trust else "not verified, so anyone who can push can change it (see --key)"
        )
        notes.append(f"the packages of {image.name} were read from its SBOM, {signed}; no layer was fetched")
    elif entry := Tree(read_layers(image)[0]).get(DPKG):
        packages = installed_packages((entry.text or b"").decode("utf-8", "replace"))
    if not packages:
        notes.append(f"packages are not compared: {image.name} contains no dpkg packages")
    if not image.compressed:
        different = "in a registry, their sizes and digests are different"
        notes.append(f"the layers of {image.name} are not compressed; {different}")
    return dict(sorted(package_versions(packages, image.architecture).items()))


def print_comparison(comparison: Comparison) -> None:
    """Print a comparison as tables, followed by a summary."""
    a, b = comparison.a, comparison.b
    for letter, side in (("A", a), ("B", b)):
        out.print(styled((letter, "bold"), f" {side.name}, from {side.origin}, {side.platform}, {side.digest}"))
    for title, changes in comparison.differences.items():
        if changes:
            out.print(styled((f"\n{title}: {len(changes)} differ", "bold")))
            rows = [(name, *(NONE if value is None else value for value in both)) for name, both in changes.items()]
            print_table(("", "A", "B"), rows)
    for note in comparison.notes:
        out.print(styled(("-", "yellow"), f" {note}"))
    differ = "the images differ" if comparison.differs else "no differences in the compared parts"
    out.print(f"{differ}; size {format_size(a.size_bytes)} in A, {format_size(b.size_bytes)} in B")
