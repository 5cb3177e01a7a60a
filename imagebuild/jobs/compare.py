"""The script of a paired comparison: it runs one command with two or more versions, in turn. Pure.

`bench.paired` reads the log that the script prints."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Sequence

from imagebuild.bench.paired import FEWEST_BLOCKS, MARK
from imagebuild.core.errors import ConfigError

MOST_SIDES = 12
WHEEL_FOLDER = "nvidia/nccl/lib"
"""Folder of the library in a folder that `pip install --target` wrote."""
FUNCTION = f"""\
measure() {{ # NUMBER COMMAND...
  printf '\\n# {MARK} begin %s\\n' "$1"
  shift
  status=0
  "$@" 2>&1 || status=$?
  printf '\\n# {MARK} end %s\\n' "$status"
  case "$status" in 126 | 127) exit "$status" ;; esac # there is no such program
}}
"""


def parse_sides(text: str) -> tuple[str, ...]:
    """Return the sides in a text: `nccl=2.30.7,2.32.3` or `env:NCCL_ALGO=Ring,Tree`. An empty value leaves the
    variable unset. Raises ConfigError for anything else."""
    kind, equals, values = text.partition("=")
    found = tuple(f"{kind}={value}" for value in values.split(","))
    if not equals or not (kind == "nccl" or re.fullmatch("env:[A-Za-z_][A-Za-z0-9_]*", kind)):
        raise ConfigError(f"{text}: write nccl=VERSION,VERSION or env:NAME=VALUE,VALUE")
    if kind == "nccl" and (bad := next((v for v in values.split(",") if not re.fullmatch(r"\d+(\.\d+){2}", v)), None)):
        raise ConfigError(f"{text}: {bad!r} is not a version of NCCL; write three numbers, such as 2.30.7")
    if not re.fullmatch(r"[A-Za-z0-9._:/,^+=@-]*", values):
        raise ConfigError(f"{text}: values may contain letters, digits and . _ : / ^ + = @ -")
    if not 2 <= len(found) <= MOST_SIDES or len(set(found)) < len(found):
        raise ConfigError(f"{text}: name 2 to {MOST_SIDES} different values, separated by commas")
    return found


def comparison_script(sides: Sequence[str], command: Sequence[str], *, libraries: str, blocks: int, seed: int) -> str:
    """Return a bash script that runs a command `blocks` times for each side, after one warm-up of each.

    `libraries` is a folder on the nodes with a folder `nccl-VERSION` for each version of NCCL. The order of the sides
    is random in each odd block and reversed in the next one; `seed` determines it. Raises ConfigError if the blocks are
    too few for an interval, or if versions need a folder and there is none."""
    if blocks < FEWEST_BLOCKS:
        raise ConfigError(f"--blocks {blocks}: an interval needs at least {FEWEST_BLOCKS} blocks")
    if not libraries and any(side.startswith("nccl=") for side in sides):
        raise ConfigError("--libraries: is missing; name the folder that contains nccl-VERSION for each version")
    draw = random.Random(seed)  # noqa: S311 - the order is written into the log
    order = [list(range(len(sides)))]
    while len(order) <= blocks:
        row = draw.sample(range(len(sides)), len(sides))
        order += [row, row[::-1]]
    del order[blocks + 1 :]
    lines = ["#!/usr/bin/env bash", "set -u", FUNCTION]
    for side in (side for side in sides if side.startswith("nccl=")):
        folder = f"{libraries}/{side.replace('=', '-')}"
        install = f"pip install --no-deps --target {folder} nvidia-nccl-cu13=={side.partition('=')[2]}"
        lines += [
            f"[ -e {shlex.quote(f'{folder}/{WHEEL_FOLDER}/libnccl.so.2')} ] || {{",
            f"  echo {shlex.quote(f'{folder}: has no {WHEEL_FOLDER}/libnccl.so.2; run `{install}`')} >&2",
            "  exit 2",
            "}",
        ]
    lines.append(f"printf '# {MARK} sides %s\\n' {shlex.quote(' | '.join(sides))}")
    words = " ".join("".join(f"{side:x}" for side in row) for row in order)
    lines.append(f"printf '# {MARK} order %s\\n' '{words}'")
    for number, side in enumerate(sides):
        lines.append(f"side_{number}() {{ env {_settings(side, libraries)} {shlex.join(command)}; }}")
    runs = [side for row in order for side in row]
    lines += [f"measure {number} side_{side}" for number, side in enumerate(runs)]
    return "\n".join(lines) + "\n"


def _settings(side: str, libraries: str) -> str:
    """Return the variables of a side as words of a shell command. NCCL then prints what proves the side."""
    kind, _, value = side.partition("=")
    if kind == "nccl":
        folder = shlex.quote(f"{libraries}/nccl-{value}/{WHEEL_FOLDER}")
        return f'NCCL_DEBUG=VERSION LD_LIBRARY_PATH={folder}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
    variable = kind.removeprefix("env:")
    setting = f"{variable}={shlex.quote(value)}" if value else f"-u {variable}"
    return f"{setting} NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ENV"
