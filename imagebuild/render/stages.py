"""Compute the keys of a Dockerfile's stages and steps: BuildKit executes once what has the same key. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from string import Template

from imagebuild.core.errors import ConfigError, suggestion

STEPS = ("RUN", "COPY", "ADD", "WORKDIR")
"""Instructions that are executed. The others change what later steps see, or the image's configuration."""
CONFIGURATION = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "ONBUILD", "STOPSIGNAL", "VOLUME")
"""Instructions that no step sees."""
INSTRUCTIONS = (*STEPS, *CONFIGURATION, "ARG", "ENV", "SHELL", "USER", "MAINTAINER")
BLOCK = re.compile(r"\n(?=FROM\s)", re.IGNORECASE)
FROM = re.compile(r"FROM\s+(?:--platform=(\S+)\s+)?(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
SOURCE = re.compile(r"--(?:from=|mount=\S*?\bfrom=)([^\s,]+)")
HEREDOC = re.compile(r"""(?:^|(?<=\s))\d*<<(-?)(["']?)([^\s<"']+)\2(?=\s|$)""")


@dataclass(frozen=True, eq=False)
class Stage:
    """Describe a stage for one platform. Dockerfiles that have the same stage share the object."""

    key: str
    """Digest of its text and of all that it starts from, mounts or copies."""
    files: str
    """Digest of all that its files depend on."""
    environment: str = ""
    """Digest of the variables, the shell and the user that a stage gets which starts from it."""
    steps: tuple[tuple[str, str], ...] = ()
    """`RUN`, `COPY`, `ADD` or `WORKDIR`, and the step's key, in order."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Names of all stages that it is made from."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Hold the text from one `FROM` to the next."""

    platform: str
    start: str
    """Stage or image that it starts from."""
    name: str
    instructions: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Word, text with heredocs and without comments, and the stages and images that it mounts or copies from."""
    sources: tuple[str, ...]
    """All stages and images that instructions mount or copy from."""
    whole: bool
    """Whether the last instruction is complete: false if a heredoc has no end."""


def digest(*parts: str) -> str:
    """Return a digest of texts, 16 hex digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def stages_of(text: str, platform: str, bases: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """Return name → stage of a Dockerfile for one platform, in order of appearance.

    `bases` has what replaces an image in `FROM`. A stage without a name is `stage-<index>`, as BuildKit shows it.
    """
    stages: dict[str, Stage] = {}
    arguments = {"TARGETPLATFORM": platform, "TARGETARCH": platform.rpartition("/")[2]}
    for index, block in enumerate(_blocks(text)):
        start = Template(block.start).safe_substitute(arguments) if "$" in block.start else block.start
        image = "" if start.lower() in stages else (bases or {}).get(start, start)
        on = "" if image in ("", "scratch") else block.platform or platform
        earlier = tuple((name, stages[name]) for name in (start.lower(), *block.sources) if name in stages)
        stages[block.name or f"stage-{index}"] = _stage(block, platform, start.lower(), (image, on), earlier)
    return stages


def first_mistake(text: str) -> tuple[str, str]:
    """Return what no builder takes in a Dockerfile: a text of the line, and why; or empty."""
    blocks = _blocks(text)
    for word, rest, _ in (instruction for block in blocks for instruction in block.instructions):
        if word not in INSTRUCTIONS:
            return rest.partition("\n")[0], f"unknown instruction {word!r}{suggestion(word, [*INSTRUCTIONS])}"
    if blocks and not blocks[-1].whole:
        word, rest, _ = blocks[-1].instructions[-1]
        line = rest.partition("\n")[0]
        return line, f"the heredoc of `{word} {line}` has no end; write its last word on a line of its own"
    return "", ""


def check_appended(text: str, where: str) -> None:
    """Raise ConfigError for instructions that cannot be at the end of a Dockerfile; `where` is where they come from."""
    blocks = _blocks(f"FROM scratch\n{text}")
    if len(blocks) > 1 or blocks[0].start != "scratch":
        raise ConfigError(f"{where}: FROM would begin another image; leave it out, and choose a base by --base-image")
    if problem := first_mistake(f"FROM scratch\n{text}")[1]:
        raise ConfigError(f"{where}: {problem}")


def needed_stages(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """Return the last stage and those that it needs: BuildKit executes no other."""
    *_, last = stages
    return {name: stage for name, stage in stages.items() if name == last or name in stages[last].needs}


# Texts are asked for once for each platform, and targets have most stages in common.
@lru_cache(maxsize=16)
def _blocks(text: str) -> tuple[_Block, ...]:
    blocks: list[str] = []
    for part in BLOCK.split(f"\n{text}"):
        # A line of a heredoc may begin with FROM, too.
        if blocks and not _block(blocks[-1]).whole:
            blocks[-1] += f"\n{part}"
        else:
            blocks.append(part)
    return tuple(_block(block) for block in blocks[1:])


@lru_cache(maxsize=4096)
def _block(text: str) -> _Block:
    instructions, lines, whole = [], iter(text.splitlines()), True
    platform, start, name = "", "", ""
    for line in lines:
        head = line.strip()
        if not head or head.startswith("#"):
            continue
        while head.rstrip().endswith("\\"):
            following = next((more for more in lines if more.strip() and not more.lstrip().startswith("#")), "")
            head = head.rstrip()[:-1] + following
        instruction = head
        # The expression is slow, and few lines have a heredoc.
        for dash, _, end in HEREDOC.findall(head) if "<<" in head else ():
            whole = False
            for more in lines:
                instruction += f"\n{more}"
                if whole := (more.lstrip("\t") if dash else more) == end:
                    break
        if match := FROM.match(head):
            platform, start, name = match.groups("")
        else:
            word, *rest = instruction.split(maxsplit=1)
            used = tuple(source.lower() for source in SOURCE.findall(head)) if "from=" in head else ()
            instructions.append((word.upper(), " ".join(rest), used))
    sources = tuple(dict.fromkeys(name for *_, names in instructions for name in names))
    return _Block(platform, start, name.lower(), tuple(instructions), sources, whole)


@lru_cache(maxsize=4096)
def _stage(
    block: _Block, platform: str, start: str, image: tuple[str, str], earlier: tuple[tuple[str, Stage], ...]
) -> Stage:
    """Return a stage that starts from an image for a platform, or from one of the earlier stages that it names."""
    stages = dict(earlier)
    base = stages.get(start) or Stage(digest(*image), digest(*image))
    files, environment, steps, configuration = base.files, base.environment, [], [base.key]
    for word, text, names in block.instructions:
        if word in STEPS:
            used = [stages[name].files for name in names if name in stages]
            # With --link, a step does not depend on those before it; those after it depend on both.
            before = "" if "--link " in text.partition("\n")[0] else files
            key = digest(before, environment if word == "RUN" or "$" in text else "", word, text, *used)
            steps.append((word, key))
            files = digest(files, key)
        elif word in CONFIGURATION:
            configuration += [word, text]
        else:
            environment = digest(environment, word, text, platform if word == "ARG" and "TARGET" in text else "")
    needs = frozenset(stages).union(*(stage.needs for stage in stages.values()))
    return Stage(digest(files, environment, *configuration), files, environment, tuple(steps), needs)
