"""The table of images in a README: from the matrix, and from a catalogue where there is one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from imagebuild import console
from imagebuild.catalog.describe import Ours, stack_of
from imagebuild.catalog.models import Catalog, PublishedImage
from imagebuild.errors import ConfigError
from imagebuild.models import Image, Target
from imagebuild.report import words

BEGIN, END = "<!-- images:begin -->", "<!-- images:end -->"
LISTED = 3
"""Values of an axis that are listed; of more, the first and the last are named."""


def replaced(name: str, text: str, table: str) -> str:
    """The text with this between the markers. Raises ConfigError if they are not there once and in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{name}: put one line {BEGIN} and one line {END} where the table of images shall be")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"


def table(ours: Ours, catalog: Catalog | None = None) -> str:
    """The table, and what it is made of."""
    axes = list(dict.fromkeys(axis for image in ours.matrix.images.values() for axis in image.axes))
    head = ["image", "what it is", *axes, "has", "platforms", "targets", "compressed"]
    if catalog:
        head.append("newest tag")
    rows = [_row(ours, name, image, axes, catalog) for name, image in ours.matrix.images.items()]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", _about(ours, catalog), ""])


def _row(ours: Ours, name: str, image: Image, axes: Sequence[str], catalog: Catalog | None) -> list[str]:
    targets = [target for target in ours.plan.targets if target.image == name]
    published = [one for one in catalog.images if one.image == name] if catalog else []
    cells = [
        f"`{name}`",
        image.description,
        *(_values(target.axes[axis] for target in targets if axis in target.axes) for axis in axes),
        _has(targets, ours.provides),
        ", ".join(sorted(p.removeprefix("linux/") for t in targets[:1] for p in t.platforms)) or words.NONE,
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
    return ", ".join(values) or words.NONE


def _has(targets: Sequence[Target], provides: Mapping[str, tuple[str, ...]]) -> str:
    stacks = [stack_of(target.components, provides) for target in targets]
    nccl = list(dict.fromkeys(f"NCCL {stack['nccl']}" for stack in stacks if "nccl" in stack))
    mpi = list(dict.fromkeys(stack["mpi"] for stack in stacks if "mpi" in stack))
    return ", ".join([*nccl, *mpi]) or words.NONE


def _sizes(images: Sequence[PublishedImage]) -> str:
    sizes = sorted(platform.size_bytes for image in images for platform in image.platforms)
    least, most = console.size(sizes[0]), console.size(sizes[-1])
    return least if least == most else f"{least} to {most}"


def _limit(image: Image) -> str:
    limit = image.size_limit_mb
    if limit is None:
        return words.NONE
    if isinstance(limit, int):
        return f"at most {limit} MB"
    return "at most " + ", ".join(f"{size} MB {variant}" for variant, size in limit.items())


def _about(ours: Ours, catalog: Catalog | None) -> str:
    total = len(ours.plan.targets)
    if catalog is None:
        sizes = "; sizes are the limits in it" if any(i.size_limit_mb for i in ours.matrix.images.values()) else ""
        return f"{total} targets, by `imagebuild catalog --readme` from [matrix.yaml](matrix.yaml){sizes}."
    count = len(catalog.images)
    return (
        f"{total} targets; {count} image{'s' * (count != 1)} in `{catalog.repository}` on {catalog.read[:10]}. "
        "By `imagebuild catalog --readme`."
    )


def stale(old: str, new: str) -> bool:
    """Whether the table says something else; the time when the registry was read does not count."""
    day = re.compile(r"(in `[^`]*`) on [0-9-]{10}")
    return day.sub(r"\1", old) != day.sub(r"\1", new)
