"""The text of a Dockerfile to stages and instructions, as BuildKit's frontend reads it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

CONTINUED = re.compile(r"\\[ \t]*$")
COMMENT = re.compile(r"^\s*#")
HEREDOC = re.compile(r"""(?:^|(?<=\s))\d*<<(-?)(["']?)([^\s<"']+)\2(?=\s|$)""")
WITH_HEREDOCS = ("RUN", "COPY", "ADD")
VARIABLE = re.compile(r"\$(?:(\w+)|{(\w+)(?::?([-+])([^}]*))?})")
FLAG = re.compile(r"^--([\w.-]+)(?:=(\S*))?(?:\s+|$)")


@dataclass(frozen=True)
class Heredoc:
    """A text that follows its instruction."""

    text: str
    literal: bool
    """Was its delimiter quoted, so that variables in it stay as they are?"""


@dataclass(frozen=True)
class Instruction:
    """One instruction; comments and line breaks outside heredocs are gone."""

    word: str
    """In capitals, for example `RUN`."""
    flags: tuple[tuple[str, str], ...]
    """`--name=value` as pairs; a flag without a value has the value ``."""
    text: str
    """What follows the flags on the joined line."""
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str | None:
        """The last value given for a flag, None if it is not there."""
        return next((value for given, value in reversed(self.flags) if given == name), None)


@dataclass(frozen=True)
class Stage:
    """From one `FROM` to the next."""

    name: str
    """Lower-case; `stage-<index>` for one without a name, as BuildKit shows it."""
    base: str
    platform: str
    """Text of `--platform`, or ``."""
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Parsed:
    """A whole Dockerfile."""

    arguments: tuple[Instruction, ...]
    """`ARG` before the first `FROM`."""
    stages: tuple[Stage, ...]
    names: Mapping[str, int] = field(default_factory=dict)
    """Name or index of a stage, as text → index."""


@lru_cache(maxsize=256)
def parse(text: str) -> Parsed:
    """Read a Dockerfile. What follows no known form is kept as it is: BuildKit is who refuses it."""
    arguments: list[Instruction] = []
    heads: list[tuple[str, str, str]] = []
    bodies: list[list[Instruction]] = []
    names: dict[str, int] = {}
    for instruction in _instructions(text.splitlines()):
        if instruction.word == "FROM":
            base, name = re.split(r"\s+as\s+", f"{instruction.text} as ", flags=re.IGNORECASE)[:2]
            index = len(heads)
            names[str(index)] = index
            if name:
                names[name.lower()] = index
            heads.append((name.lower() or f"stage-{index}", base, instruction.flag("platform") or ""))
            bodies.append([])
        elif bodies:
            bodies[-1].append(instruction)
        else:
            arguments.append(instruction)
    stages = (Stage(*head, tuple(body)) for head, body in zip(heads, bodies, strict=True))
    return Parsed(tuple(arguments), tuple(stages), names)


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$X`, `${X}`, `${X:-default}` and `${X:+other}`; an unknown variable is empty."""

    def value(found: re.Match[str]) -> str:
        known = values.get(found[1] or found[2], "")
        if found[3] == "-":
            return known or expand(found[4], values)
        return (expand(found[4], values) if known else "") if found[3] == "+" else known

    return VARIABLE.sub(value, text)


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    rest = iter(lines)
    for line in rest:
        if not line.strip() or COMMENT.match(line):
            continue
        logical = _joined(line.strip(), rest)
        word, text = [*logical.split(None, 1), ""][:2]
        word, flags = word.upper(), []
        while found := FLAG.match(text):
            flags.append((found[1], found[2] or ""))
            text = text[found.end() :]
        heredocs = tuple(_heredocs(text, rest)) if word in WITH_HEREDOCS else ()
        yield Instruction(word, tuple(flags), text, heredocs)


def _joined(line: str, rest: Iterator[str]) -> str:
    """The line with those that continue it; comments and blank lines between them do not count."""
    parts = []
    while CONTINUED.search(line):
        parts.append(CONTINUED.sub("", line))
        line = next((other for other in rest if other.strip() and not COMMENT.match(other)), "")
    return "".join([*parts, line])


def _heredocs(text: str, rest: Iterator[str]) -> Iterator[Heredoc]:
    for tabs, quote, name in HEREDOC.findall(text):
        content = []
        for line in rest:
            kept = line.lstrip("\t") if tabs else line
            if kept == name:
                break
            content.append(kept)
        yield Heredoc("\n".join(content), bool(quote))
