"""Compute the keys of a Dockerfile's stages and steps: BuildKit executes once what has the same key. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from string import Template

STEPS = ("RUN", "COPY", "ADD", "WORKDIR")
"""Instructions that are executed. The others change what later steps see, or the image's configuration."""
CONFIGURATION = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "ONBUILD", "STOPSIGNAL", "VOLUME")
"""Instructions that no step sees."""
BLOCK = re.compile(r"\n(?=FROM\s)", re.IGNORECASE)
FROM = re.compile(r"FROM\s+(?:--platform=(\S+)\s+)?(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
SOURCE = re.compile(r"--(?:from=|mount=\S*?\bfrom=)([^\s,]+)")
HEREDOC = re.compile(r"""(?:^|(?<=\s))\d*<<(-?)(["']?)([^\s<"']+)\2(?=\s|$)""")
CONTINUED = re.compile(r"\\[ \t]*$")


@dataclass(frozen=True, eq=False)
class Stage:
    """Describe a stage for one platform. Dockerfiles that have the same stage share the object."""

    key: str
    """Digest of its text and of all that it starts from, mounts or copies."""
    files: str
    """Digest of all that its files depend on."""
    environment: str = ""
    """Digest of the variables, the shell and the user that programs of a stage have that starts from it."""
    steps: tuple[tuple[str, str], ...] = ()
    """`RUN`, `COPY`, `ADD` or `WORKDIR`, and the step's key, in order."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Names of all stages that it is made from."""


def digest(*parts: str) -> str:
    """Return a digest of texts, 16 hex digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def stages_of(text: str, platform: str, bases: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """Return name → stage of a Dockerfile for one platform, in order of appearance.

    `bases` has what replaces an image in `FROM`. A stage without a name is `stage-<index>`, as BuildKit shows it.
    """
    stages: dict[str, Stage] = {}
    arguments = {"TARGETPLATFORM": platform, "TARGETARCH": platform.rpartition("/")[2]}
    blocks: list[str] = []
    for part in BLOCK.split(f"\n{text}"):
        # A line of a heredoc may begin with FROM, too.
        if blocks and not _instructions(blocks[-1])[1]:
            blocks[-1] += f"\n{part}"
        else:
            blocks.append(part)
    for index, block in enumerate(blocks[1:]):
        head, *_ = instructions = _instructions(block)[0]
        found = FROM.match(head)
        chosen, start, name = found.groups("") if found else ("", head, "")
        start = Template(start).safe_substitute(arguments)
        image = digest((bases or {}).get(start, start), "" if start == "scratch" else chosen or platform)
        named = (start, *(name for text in instructions for name in SOURCE.findall(text.partition("\n")[0])))
        earlier = tuple((name, stages[name]) for name in dict.fromkeys(map(str.lower, named)) if name in stages)
        stages[(name or f"stage-{index}").lower()] = _stage(block, platform, start.lower(), image, earlier)
    return stages


def needed_stages(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """Return the last stage and those that it needs: BuildKit executes no other."""
    *_, last = stages
    return {name: stage for name, stage in stages.items() if name == last or name in stages[last].needs}


# Other targets, or the other platform, have most of the same text.
@lru_cache(maxsize=4096)
def _instructions(block: str) -> tuple[tuple[str, ...], bool]:
    """Return instructions with their heredocs and without comments, and whether the last one ends with the text."""
    found, lines, whole = [], iter(block.splitlines()), True
    for line in lines:
        instruction = line.strip()
        if not instruction or instruction.startswith("#"):
            continue
        while CONTINUED.search(instruction):
            following = next((more for more in lines if more.strip() and not more.lstrip().startswith("#")), "")
            instruction = CONTINUED.sub("", instruction) + following
        for dash, _, end in HEREDOC.findall(instruction):
            whole = False
            for more in lines:
                instruction += f"\n{more}"
                if whole := (more.lstrip("\t") if dash else more) == end:
                    break
        found.append(" ".join(instruction.split(maxsplit=1)))
    return tuple(found), whole


@lru_cache(maxsize=4096)
def _stage(block: str, platform: str, start: str, image: str, earlier: tuple[tuple[str, Stage], ...]) -> Stage:
    """Return a stage that starts from the image with this key, or from one of the earlier stages that it names."""
    stages = dict(earlier)
    base = stages.get(start) or Stage(image, image)
    files, environment, steps, configuration = base.files, base.environment, [], [base.key]
    for instruction in _instructions(block)[0][1:]:
        word, head = instruction.split(maxsplit=1)[0].upper(), instruction.partition("\n")[0]
        if word in STEPS:
            used = [stages[name.lower()].files for name in SOURCE.findall(head) if name.lower() in stages]
            # With --link, a step does not depend on those before it; those after it depend on both.
            before = "" if " --link" in head else files
            key = digest(before, environment if word == "RUN" or "$" in instruction else "", instruction, *used)
            steps.append((word, key))
            files = digest(files, key)
        elif word in CONFIGURATION:
            configuration.append(instruction)
        else:
            environment = digest(environment, instruction, platform if word == "ARG" and "TARGET" in head else "")
    needs = frozenset(stages).union(*(stage.needs for stage in stages.values()))
    return Stage(digest(files, environment, *configuration), files, environment, tuple(steps), needs)
