"""The text of a Dockerfile: its layout, and the keys of its stages. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Dockerfile:
    """A rendered target."""

    text: str
    stages: Mapping[str, str]
    """Stage → key: digest of its text and of the stages it builds on, in order of appearance."""


def stage_keys(text: str) -> dict[str, str]:
    """Stage → digest of its instructions and of the stages they name, for each named stage of a Dockerfile."""
    keys: dict[str, str] = {}
    for block in text.split("\nFROM ")[1:]:
        name, used, instructions = _parse_block(block)
        if name:
            parts = [instructions, *(keys[stage] for stage in used if stage in keys)]
            keys[name] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return keys


@lru_cache(maxsize=1024)
def _parse_block(block: str) -> tuple[str, tuple[str, ...], str]:
    """Name of a stage, the stages it names, and its instructions without its name and without comments."""
    named = re.match(r"(?:--platform=\S+ )?(\S+) AS (\S+)", block)
    if not named:
        return "", (), ""
    first, *rest = block.splitlines()
    lines = [first.rpartition(" AS ")[0], *(line for line in rest if line.strip() and not line.startswith("# "))]
    return named[2], (named[1], *re.findall(r"\bfrom=([\w.-]+)", block)), "\n".join(lines)


def spaced(text: str) -> str:
    """One blank line at most in a row, and one after each heredoc: easier on the eye, and hadolint needs it."""
    text = text.replace("\nEOF\n", "\nEOF\n\n")
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip() + "\n"
