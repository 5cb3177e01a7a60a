"""Compare two images: components, packages, environment and layers."""

from __future__ import annotations

import platform as machine
from collections.abc import Mapping
from contextlib import ExitStack

from rich.markup import escape

from imagebuild.core.console import format_size, out, print_table
from imagebuild.core.debian import installed_packages, package_versions
from imagebuild.core.fields import Model
from imagebuild.core.run import ARCHITECTURES
from imagebuild.oci.image import PlatformImage
from imagebuild.project.plan import components_of
from imagebuild.publish.evidence import attached_packages
from imagebuild.report.document import NONE
from imagebuild.verify.files import Tree
from imagebuild.verify.layers import scan_all
from imagebuild.verify.subject import ImageFinder

Changes = dict[str, tuple[str | None, str | None]]
"""Name → both values of what differs; None where an image does not have it."""


class ComparedImage(Model):
    """Identify one of the two images."""

    name: str
    origin: str
    """Where it was found."""
    digest: str
    platform: str
    size_bytes: int
    """Of the layers: compressed, unless it is of an engine that keeps them unpacked."""


class Comparison(Model):
    """Hold the content of the file that `imagebuild diff --json` writes."""

    a: ComparedImage
    b: ComparedImage
    differences: dict[str, Changes]
    """`components`, `packages`, `environment` and `layers`, as far as they could be compared."""
    notes: tuple[str, ...] = ()
    """What was not compared, and where facts come from that may be others than those of the layers."""

    @property
    def differs(self) -> bool:
        return any(self.differences.values())


def compare_images(names: tuple[str, str], finder: ImageFinder, platform: str | None = None) -> Comparison:
    """Find two images, read them, and compare them; of several platforms, this machine's unless one is named.

    Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, and ResultError if
    something cannot be read.
    """
    own = f"linux/{ARCHITECTURES.get(machine.machine())}"
    notes, sides, facts = list[str](), list[ComparedImage](), list[dict[str, dict[str, str]]]()
    with ExitStack() as stack:
        for found in [stack.enter_context(finder.find(name)) for name in names]:
            image = found.image(platform or (own if own in found.platforms else None))
            size = sum(layer.size for layer in image.layers)
            sides.append(
                ComparedImage(
                    name=found.name, origin=found.origin, digest=image.digest, platform=image.platform, size_bytes=size
                )
            )
            facts.append({
                "components": components_of(image.labels),
                "packages": _packages(image, notes),
                "environment": image.env,
                "layers": {str(layer.digest): format_size(layer.size) for layer in image.layers},
            })  # fmt: skip
    differences = {title: _differences(*(of_image[title] for of_image in facts)) for title in facts[0]}
    if not all(of_image["packages"] for of_image in facts):
        del differences["packages"]
    return Comparison(a=sides[0], b=sides[1], differences=differences, notes=tuple(notes))


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> Changes:
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)}


DPKG = "var/lib/dpkg/status"
"""The list of installed packages."""


def _packages(image: PlatformImage, notes: list[str]) -> dict[str, str]:
    """Return the distribution's packages; of an image in a registry, by its SBOM if it has one, without its layers."""
    packages = attached_packages(image.repository, image.digest) if image.repository else ()
    if packages:
        notes.append(f"packages of {image.name} are those of its SBOM; no layer was fetched")
    elif entry := Tree(scan_all([image.fetch(layer) for layer in image.layers])).get(DPKG):
        packages = installed_packages((entry.text or b"").decode("utf-8", "replace"))
    if not packages:
        notes.append(f"packages are not compared: {image.name} has none of dpkg")
    if not image.compressed:
        notes.append(f"layers of {image.name} are not compressed, so a registry has other sizes and digests")
    return dict(sorted(package_versions(packages, image.architecture).items()))


def print_comparison(comparison: Comparison) -> None:
    """Print a comparison as tables, with the summary last."""
    a, b = comparison.a, comparison.b
    for letter, side in (("A", a), ("B", b)):
        out.print(f"[bold]{letter}[/] {escape(f'{side.name}, of {side.origin}, {side.platform}, {side.digest}')}")
    for title, changes in comparison.differences.items():
        if changes:
            out.print(f"\n[bold]{title}: {len(changes)} differ[/]")
            rows = [(name, *(NONE if value is None else value for value in both)) for name, both in changes.items()]
            print_table(("", "A", "B"), [map(escape, row) for row in rows])
    for note in comparison.notes:
        out.print(f"[yellow]-[/] {escape(note)}")
    differ = "something differs" if comparison.differs else "nothing that was compared differs"
    out.print(f"{differ}; {format_size(a.size_bytes)} becomes {format_size(b.size_bytes)}")
