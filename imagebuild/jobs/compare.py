"""The sides of a paired comparison, and the order of their runs. Pure."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Sequence
from typing import Any

from imagebuild.bench.alternation import MARK
from imagebuild.bench.paired import FEWEST_BLOCKS
from imagebuild.core.errors import ConfigError

MOST_SIDES = 12
WHEEL = "nvidia-nccl-cu13"
"""Name of the wheel of NCCL on the package index, for CUDA 13."""


def parse_sides(text: str, most: int = MOST_SIDES) -> tuple[str, ...]:
    """Return the sides in a text: `nccl=2.30.7,2.32.3`, `env:NCCL_ALGO=Ring,Tree` or `image=FIRST,SECOND`. An empty
    value leaves the variable unset. Raises ConfigError for anything else."""
    kind, equals, values = text.partition("=")
    found = tuple(f"{kind}={value}" for value in values.split(","))
    if not equals or not (kind in ("nccl", "image") or re.fullmatch("env:[A-Za-z_][A-Za-z0-9_]*", kind)):
        raise ConfigError(f"{text}: write nccl=VERSION,VERSION, env:NAME=VALUE,VALUE or image=IMAGE,IMAGE")
    if kind == "nccl" and (bad := next((v for v in values.split(",") if not re.fullmatch(r"\d+(\.\d+){2}", v)), None)):
        raise ConfigError(f"{text}: {bad!r} is not a version of NCCL; write three numbers, such as 2.30.7")
    if not re.fullmatch(r"[A-Za-z0-9._:/,^+=@-]*", values):
        raise ConfigError(f"{text}: values may contain letters, digits and . _ : / ^ + = @ -")
    if not 2 <= len(found) <= most or len(set(found)) < len(found):
        raise ConfigError(f"{text}: must name 2 to {most} different values, separated by commas")
    return found


def version_of_wheel(file: str, wheel: str) -> str:
    """Return the version in the name of a wheel's file, or "" for the file of another wheel."""
    found = re.match(rf"{wheel.replace('-', '_')}-(\d+(?:\.\d+)+)-", file)
    return found[1] if found else ""


def block_order(sides: int, blocks: int, seed: int) -> list[list[int]]:
    """Return the order of the sides in each block, after one block of warm-up runs.

    The order is random in each odd block and reversed in the next one; `seed` determines it. Fewer blocks with the same
    seed are the first ones of more blocks."""
    draw = random.Random(seed)  # noqa: S311 - the order is written into the log
    order = [list(range(sides))]
    while len(order) <= blocks:
        row = draw.sample(range(sides), sides)
        order += [row, row[::-1]]
    return order[: blocks + 1]


def side_settings(sides: Sequence[str], libraries: str, wheel: str = WHEEL) -> list[dict[str, object]]:
    """Return for each side its name, and the folder of its library, the setting of its variable or its image.
    Raises ConfigError if versions need the folder `libraries` and it is empty."""
    settings: list[dict[str, object]] = []
    for side in sides:
        kind, _, value = side.partition("=")
        if kind == "nccl":
            if not libraries:
                problem = "is missing; name the folder that contains nccl-VERSION for each version"
                raise ConfigError(f"--libraries: {problem}")
            if bad := re.search(r"[:;$\n]", libraries):
                problem = f"LD_LIBRARY_PATH cannot contain a folder with {bad[0]!r} in its name"
                raise ConfigError(f"--libraries {libraries!r}: {problem}; rename it")
            folder = f"{libraries}/nccl-{value}"
            install = f"pip install --no-deps --target {folder} {wheel}=={value}"
            settings.append({"name": side, "folder": folder, "install": install})
        elif kind == "image":
            settings.append({"name": side, "image": value})
        else:
            variable = kind.removeprefix("env:")
            setting = [f"{variable}={value}"] if value else ["-u", variable]
            shell = f"export {variable}={shlex.quote(value)}" if value else f"unset {variable}"
            settings.append({"name": side, "setting": setting, "shell": shell})
    return settings


def comparison_of(
    sides: Sequence[str], *, libraries: str, blocks: int, seed: int, wheel: str = WHEEL, first: int = 1
) -> dict[str, Any]:
    """Return the values for a template: the sides, the order of their runs, and each run with its side and its block,
    from block `first` on, after the warm-up. Raises ConfigError if the blocks are too few for an interval."""
    if blocks < FEWEST_BLOCKS:
        raise ConfigError(f"--blocks {blocks}: an interval needs at least {FEWEST_BLOCKS} blocks")
    order = block_order(len(sides), blocks, seed)
    places = [(side, block) for block, row in enumerate(order) for side in row]
    return {
        "MARK": MARK,
        "sides": side_settings(sides, libraries, wheel),
        "order": " ".join("".join(f"{side:x}" for side in row) for row in order),
        "runs": [(number, *place) for number, place in enumerate(places) if not place[1] or place[1] >= first],
    }
