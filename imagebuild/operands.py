"""What the instructions of a Dockerfile name: variables, files, stages, images. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

from imagebuild.instructions import VARIABLE, Instruction, expand

LINK = PurePosixPath("/out/link")
"""Where a stage leaves what others are compiled with, if that changes less often than the stage."""
GIT_COMMIT = re.compile(r"^\S+#[0-9a-f]{40}(?::\S*)?$")


def is_linked(step: Instruction) -> bool:
    return step.flag("link") not in (None, "false")


def pairs(instruction: Instruction, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """`A=1 B="two"` as pairs, expanded; the old form `ENV A one` too. A name without a value has the value ``."""
    words = _words(expand(instruction.text, values))
    if instruction.word == "ENV" and words and "=" not in words[0]:
        yield words[0], " ".join(words[1:])
        return
    for word in words:
        name, _, value = word.partition("=")
        yield name, value


def froms(step: Instruction, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What a step mounts or copies from other stages and images: name and folder in it."""
    for name, value in step.flags:
        if name == "from":
            words = _words(expand(step.text, env))
            folder = words[0] if len(words) == 2 else "/"
            yield expand(value, env), folder
        elif name == "mount":
            options = dict(o.partition("=")[::2] for o in expand(value, env).split(","))
            if "from" in options:
                yield options["from"], options.get("source") or options.get("src") or "/"


def without_from(mount: str) -> str:
    """A mount without the name of the stage, which does not matter; its key does."""
    return re.sub(r"(^|,)from=[^,]*", "", mount)


def copied(step: Instruction, text: str) -> list[str]:
    """What identifies the sources of `COPY` and `ADD`, and the destination last.

    A file with a checksum is known by that and its name, a git repository by its commit: where they come from does
    not matter.
    """
    words = text.split()
    checksum = step.flag("checksum")
    names = [_remote(word, checksum) if step.word == "ADD" else word for word in words[:-1]]
    return [*names, words[-1]] if words else [""]


def _remote(address: str, checksum: str | None) -> str:
    if GIT_COMMIT.match(address):
        return address.partition("#")[2]
    return f"{checksum} {PurePosixPath(address).name}" if checksum else address


def referenced(text: str, env: Mapping[str, str]) -> str:
    names = sorted({found[0] or found[1] for found in VARIABLE.findall(text)})
    return repr([(name, env.get(name, "")) for name in names])


@lru_cache(maxsize=4096)
def is_link(folder: str) -> bool:
    return PurePosixPath("/", folder).is_relative_to(LINK)


@lru_cache(maxsize=4096)
def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return tuple(text.split())


def title(step: Instruction) -> str:
    first = next((line for h in step.heredocs for line in h.text.splitlines() if not line.startswith("set -")), "")
    text = f"{step.text} ({first.strip()} …)" if step.word == "RUN" and first else step.text
    source = step.flag("from")
    return " ".join([*([f"--from={source}"] if source else []), *text.split()])[:80]
