"""Compare two images: components, packages, settings and layers."""

from __future__ import annotations

import platform as machine
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.markup import escape

from imagebuild.core.console import format_size, out, print_table
from imagebuild.core.debian import installed_packages, package_versions
from imagebuild.core.fields import Model
from imagebuild.core.run import ARCHITECTURES
from imagebuild.oci.image import FoundImage, PlatformImage
from imagebuild.project.matrix import components_of
from imagebuild.publish.evidence import attached_packages
from imagebuild.report.document import NONE
from imagebuild.verify.files import Layer, Tree
from imagebuild.verify.layers import scan
from imagebuild.verify.subject import ImageFinder

LAYERS = "layers"


class Difference(Model):
    """Name something that differs, with both values."""

    name: str
    a: str | None
    """None if A does not have it."""
    b: str | None
    made_by: str = ""
    """Of a layer: the instruction that made it, from the image's history."""


class Section(Model):
    """List what differs in one respect, such as packages."""

    title: str
    changes: tuple[Difference, ...]
    same: int
    """Number of things that are the same in both."""


class Sizes(Model):
    """Compare sizes in bytes, compressed as a registry stores layers, unless `notes` say otherwise."""

    a: int
    b: int
    shared: int
    """Size of the layers of B that A has, too: a machine with A does not fetch them again."""


class ComparedImage(Model):
    """Identify one of the two images."""

    name: str
    origin: str
    """Where it was found."""
    digest: str
    platform: str


class Comparison(Model):
    """Hold the content of the file that `imagebuild diff --json` writes."""

    a: ComparedImage
    b: ComparedImage
    sections: tuple[Section, ...]
    sizes: Sizes
    not_compared: tuple[str, ...]
    """What was not compared, and why."""
    notes: tuple[str, ...] = ()
    """Where facts come from, if that is worth saying."""

    @property
    def differs(self) -> bool:
        """Return whether anything differs."""
        return any(section.changes for section in self.sections)


def compare_images(names: tuple[str, str], finder: ImageFinder, platform: str | None = None) -> Comparison:
    """Find two images, read them, and compare them.

    Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, and ResultError if
    something cannot be read.
    """
    known: dict[str, Layer] = {}  # layers that were read, which the images may share
    with ExitStack() as stack:
        both = [stack.enter_context(finder.find(name)) for name in names]
        common = [platform for platform in both[0].platforms if platform in both[1].platforms]
        own = f"linux/{ARCHITECTURES.get(machine.machine())}"
        chosen = platform or (own if own in common else next(iter(common), None))
        a, b = (_read_facts(found, chosen or found.platforms[0], known) for found in both)
    not_compared = [
        f"packages: {facts.side.name} has no packages of dpkg" for facts in (a, b) if "packages" not in facts.values
    ]
    if chosen is None:
        not_compared.append(f"no platform is in both: {a.side.platform} is compared with {b.side.platform}")
    elif not platform:
        not_compared += [f"{name}: compare it with --platform {name}" for name in common if name != chosen]
    return Comparison(
        a=a.side, b=b.side, sections=tuple(_compare(a, b)),
        sizes=Sizes(
            a=sum(a.layers.values()), b=sum(b.layers.values()),
            shared=sum(size for digest, size in b.layers.items() if digest in a.layers),
        ),
        not_compared=tuple(not_compared), notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
    )  # fmt: skip


def _compare(a: ImageContents, b: ImageContents) -> Iterator[Section]:
    """Compare what is known of both images."""
    made_by = instructions_of(a.image) | instructions_of(b.image)
    for title in (title for title in a.values if title in b.values):
        ours, theirs = a.values[title], b.values[title]
        names = dict.fromkeys((*theirs, *ours)) if title == LAYERS else sorted({*ours, *theirs})
        changes = [
            Difference(name=name, a=ours.get(name), b=theirs.get(name), made_by=made_by.get(name, ""))
            for name in names
            if ours.get(name) != theirs.get(name)
        ]
        yield Section(title=title, changes=tuple(changes), same=len(names) - len(changes))


# Facts of an image


COMPONENT = "imagebuild.component."


@dataclass(frozen=True)
class ImageContents:
    """Hold what is known of one of the two images."""

    side: ComparedImage
    image: PlatformImage
    values: Mapping[str, Mapping[str, str]]
    """Section → name → value, for the sections that are known."""
    notes: Sequence[str]

    @property
    def layers(self) -> dict[str, int]:
        """Return digest → bytes."""
        return {str(layer.digest): layer.size for layer in self.image.layers}


def _read_facts(found: FoundImage, platform: str, known: dict[str, Layer]) -> ImageContents:
    """Read an image; `known` keeps the layers that were read."""
    image, name = found.image(platform), found.name
    labels = {key: value for key, value in image.labels.items() if not key.startswith(COMPONENT)}
    packages, note = _read_packages(image, known)
    values: dict[str, Mapping[str, str]] = {
        "components": components_of(image.labels),
        **({} if packages is None else {"packages": packages}),
        "environment": image.env,
        "settings": settings_of(image.settings),
        "labels": labels,
        "platforms": dict.fromkeys(found.platforms, "yes"),
        LAYERS: {str(layer.digest): format_size(layer.size) for layer in image.layers},
    }
    notes = [note] if note else []
    if not image.compressed:
        notes.append(f"layers of {name} are not compressed, so a registry has other sizes and digests")
    side = ComparedImage(name=name, origin=found.origin, digest=image.digest, platform=image.platform)
    return ImageContents(side, image, values, notes)


def _read_packages(image: PlatformImage, known: dict[str, Layer]) -> tuple[dict[str, str] | None, str]:
    """Return the distribution's packages, and a note on where they come from if that is worth saying."""
    packages, _ = attached_packages(image.repository, image.digest) if image.repository else ((), "")
    if packages:
        note = f"packages of {image.name} are those of its SBOM; no layer was fetched"
        return package_versions(packages, image.architecture), note
    before = set(known)
    status = dpkg_status(image, known)
    note = ""
    if image.repository:
        size = sum(layer.size for layer in image.layers if layer.digest in known.keys() - before)
        note = f"{image.name} has no SBOM with packages, so {size / 1e6:.1f} MB of its layers were fetched"
    return package_versions(installed_packages(status), image.architecture) if status else None, note


DPKG = "var/lib/dpkg/status"
"""The list of installed packages; images without dpkg itself have a file for each package in a folder beside it."""


def dpkg_status(image: PlatformImage, known: dict[str, Layer]) -> str:
    """Return the list of installed packages as a container sees it; empty if there is none.

    Layers are fetched and read from the topmost down, and no more than are needed; `known` keeps them by their digests.
    """
    layers: list[Layer] = []
    for number, blob in reversed(list(enumerate(image.layers))):
        digest = str(blob.digest)
        if digest not in known:
            known[digest] = scan(image.fetch(blob), number)
        layers.insert(0, known[digest])
        if any(entry.path == DPKG for entry in known[digest].entries):
            break
    tree = Tree(layers)
    parts = [DPKG] if tree.get(DPKG) else [f"{DPKG}.d/{name}" for name in tree.names(f"{DPKG}.d")]
    entries = [entry for path in parts if not path.endswith(".md5sums") and (entry := tree.get(path))]
    return "\n\n".join(entry.text.decode("utf-8", "replace").strip() for entry in entries if entry.text)


def instructions_of(image: PlatformImage) -> dict[str, str]:
    """Return digest of a layer → the instruction that made it, if the history tells which made which."""
    steps = [step for step in image.config.get("history") or () if not step.get("empty_layer")]
    if len(steps) != len(image.layers):
        return {}
    texts = [" ".join(str(step.get("created_by", "")).removesuffix(" # buildkit").split()) for step in steps]
    return {str(layer.digest): text for layer, text in zip(image.layers, texts, strict=True)}


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what containers start with, without environment and labels, which have sections of their own."""

    def as_text(value: object) -> str:
        if isinstance(value, Mapping) and not any(value.values()):
            value = sorted(value)  # ports and volumes are keys without a value
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return {n: as_text(value) for n, value in config.items() if n not in ("Env", "Labels") and value not in (None, "")}


# Print


MOST_CHARACTERS = 100
"""Characters of a value in a table; JSON has all of it."""


def print_comparison(comparison: Comparison) -> None:
    """Print a comparison as tables, with the summary last."""
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        origin = f" ({side.origin})" if side.origin != side.name else ""
        out.print(f"[bold]{letter}[/] {escape(f'{side.name}{origin}, {side.platform}, {side.digest}')}")
    for section in comparison.sections:
        if section.changes:
            count = len(section.changes)
            out.print(f"\n[bold]{section.title}: {count} {_differ(count)}, {section.same} the same[/]")
            names = [f"{_shorten(change.name)} {_shorten(change.made_by)}".rstrip() for change in section.changes]
            values = [_both_values(change.a, change.b) for change in section.changes]
            print_table(("", "A", "B"), [map(escape, (n, *both)) for n, both in zip(names, values, strict=True)])
    for line in (*comparison.notes, *(f"not compared: {text}" for text in comparison.not_compared)):
        out.print(f"[yellow]-[/] {escape(line)}")
    out.print(summarise(comparison), markup=False)


def summarise(comparison: Comparison) -> str:
    """Return `3 components, 9 layers differ; 409.1 MB becomes 696.2 MB (+70.2%), 29.8 MB shared`."""
    counts = {section.title: len(section.changes) for section in comparison.sections if section.changes}
    nouns = {"environment": "variables"}
    listed = ", ".join(
        f"{n} {noun if n != 1 else noun.removesuffix('s')}" for title, n in counts.items()
        for noun in [nouns.get(title, title)]
    )  # fmt: skip
    text = f"{listed} {_differ(sum(counts.values()))}" if counts else "nothing that was compared differs"
    sizes = comparison.sizes
    change = f" ({(sizes.b - sizes.a) / sizes.a:+.1%})" if sizes.a and sizes.a != sizes.b else ""
    before, after, shared = map(format_size, (sizes.a, sizes.b, sizes.shared))
    text += f"; {before} becomes {after}{change}, {shared} shared"
    return text


def _differ(count: int) -> str:
    return "differs" if count == 1 else "differ"


def _both_values(a: str | None, b: str | None) -> tuple[str, str]:
    """Return both values for a table; of long values, the parts from where they differ."""
    if a and b and max(len(a), len(b)) > MOST_CHARACTERS:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if same > 20:
            a, b = f"…{a[same - 10 :]}", f"…{b[same - 10 :]}"
    return (NONE if a is None else _shorten(a)), (NONE if b is None else _shorten(b))


def _shorten(text: str) -> str:
    text = re.sub(r"^sha256:([0-9a-f]{12})[0-9a-f]{52}", r"\1", text)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
