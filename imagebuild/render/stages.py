"""Keys (digests) of the stages and steps of a Dockerfile. BuildKit executes steps with equal keys only once. Pure."""

import fnmatch
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from string import Template
from typing import get_args

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import Platform

STEPS = ("RUN", "COPY", "ADD", "WORKDIR")
"""Instructions that BuildKit executes as steps."""
CONFIGURATION = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "ONBUILD", "STOPSIGNAL", "VOLUME")
"""Instructions that change only the image's configuration, not later steps."""
INSTRUCTIONS = (*STEPS, *CONFIGURATION, "ARG", "ENV", "SHELL", "USER", "MAINTAINER")
BLOCK = re.compile(r"\n(?=FROM\s)", re.IGNORECASE)
FROM = re.compile(r"FROM\s+(?:--platform=(\S+)\s+)?(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
SOURCE = re.compile(r"--(?:from=|mount=\S*?\bfrom=)([^\s,]+)")
CONTEXT = re.compile(
    r"(COPY|ADD) (?!.*(--from=|<<|://|git@))|RUN (--\S+ +)*--mount=(?!\S*(from=|type=(?!bind)))", re.IGNORECASE
)
"""Instructions that read the build context."""
UNCLEAR = re.compile(r"""["'\\\x1c-\x1f]|\b(?!from=)(?i:from)=|\bfrom=\S*\bfrom=|\bfrom=\d+(?=[,\s]|$)""")
"""Flags that BuildKit reads differently from `SOURCE`: keys would not cover the stage that they name."""
CONTINUED = re.compile(r"(?:^|(?<=[^\\]))\\[ \t]*$")
"""Matches the end of a line that goes on in the next one, as BuildKit does: two backslashes do not continue a line."""
VARIABLE = re.compile(r"(?:TARGET|BUILD)(?:ARCH|OS|PLATFORM|VARIANT)\b")
"""Matches the names of variables to which BuildKit gives a value for each platform."""
INSTEAD_OF_FROM = "remove it; choose a base with --base-image, and compile in a component (docs/tutorial.md, section 5)"
HEREDOC = re.compile(r"""(?:^|(?<=\s))\d*<<(-?)(["']?)([^\s<"']+)\2(?=\s|$)""")


@dataclass(frozen=True)
class Dockerfile:
    """The rendered Dockerfile of a target."""

    text: str

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """Maps each stage, in order of appearance, to its key: a digest of everything that the stage depends on.
        The key covers all platforms."""
        first, *others = (stages_of(self.text, platform) for platform in get_args(Platform))
        return {name: digest(stage.key, *(other[name].key for other in others)) for name, stage in first.items()}


@dataclass(frozen=True, eq=False)
class Stage:
    """A build stage for one platform. Dockerfiles with the same stage share this object."""

    key: str
    """Digest of the stage's text, and of all stages and images that the stage starts from, mounts or copies from."""
    files: str
    """Digest of all that the stage's files depend on."""
    environment: str = ""
    """Digest of the variables, shell and user that a later stage inherits with `FROM`."""
    steps: tuple[tuple[str, str], ...] = ()
    """Steps in order, each as its instruction (one of `STEPS`) and its key."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Names of all other stages that this stage needs, directly or through other stages."""


@dataclass(frozen=True, eq=False)
class _Block:
    platform: str
    start: str
    """Stage or image that the stage starts from."""
    name: str
    instructions: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Instructions in order. Each entry is the keyword, the text (with heredocs, without comments), and the stages and
    images that the instruction mounts or copies from."""
    sources: tuple[str, ...]
    """All stages and images that the instructions mount or copy from."""
    whole: bool
    """Whether the last instruction is complete. False if a heredoc has no end."""


def digest(*parts: str) -> str:
    """Return a digest of texts: 16 hex digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def stages_of(text: str, platform: str, bases: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """Return the stages of a Dockerfile for one platform, by name and in order of appearance.

    `bases` maps images in `FROM` to their replacements. A stage without a name is called `stage-<index>`, as in
    BuildKit's output."""
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
    """Return the first mistake in a Dockerfile: the text of its line, and the reason. Both are empty if there is no
    mistake."""
    blocks = _blocks(text)
    for word, rest, _ in (instruction for block in blocks for instruction in block.instructions):
        line = rest.partition("\n")[0]
        if word not in INSTRUCTIONS:
            blank = "; begin its line with it, without a blank" if word == "FROM" else ""
            return line, f"unknown instruction {word!r}{blank or suggestion(word, [*INSTRUCTIONS])}"
        if CONTEXT.match(f"{word} {line}"):
            problem = "there is no build context; write the content as a heredoc, or name a stage with from="
            return line, f"{word} {line}: {problem}"
        if word in STEPS and UNCLEAR.search(re.findall(r"(?:--[\S\x1c-\x1f]+\s*)*", line)[0]):
            return line, f"{word} {line}: write options without quotes and backslashes, and one from=NAME"
        # BuildKit sees no heredoc in a quoted text or in CMD. Then, it must refuse the line that would end the heredoc.
        for _, _, end in HEREDOC.findall(line):
            if not re.fullmatch(r"[A-Za-z_][\w.-]*", end) or end.upper() in CONFIGURATION:
                return line, f"the delimiter {end!r} of a heredoc must be a word that is no instruction, such as EOF"
    if blocks and not blocks[-1].whole:
        word, rest, _ = (blocks[-1].instructions or (("FROM", blocks[-1].start, ()),))[-1]
        line = rest.partition("\n")[0]
        heredoc = f"the heredoc of `{word} {line}` has no end; write its delimiter on a line of its own"
        backslash = f"{word} {line}: ends with a backslash, but no line follows; remove the backslash"
        return line, heredoc if "<<" in line else backslash
    return "", ""


def check_stages(text: str, where: str, base: str) -> None:
    """Raise ConfigError for a Dockerfile that uses an image without digest other than `base`, or that BuildKit may read
    otherwise than `stages_of`: the first line is a parser directive, two stages have one name, or a stage uses a later
    one. `where` is its template and line."""
    if re.match(r"\ufeff?\s*(#!|(#|//)\s*\w+\s*=|\{)", text):
        raise ConfigError(f"{where}: the first line is a parser directive, such as syntax=; begin with another comment")
    if re.search(rf"\b{VARIABLE.pattern}\s*=", BLOCK.split(f"\n{text}", maxsplit=1)[0]):
        raise ConfigError(f"{where}: sets a variable of BuildKit before the first FROM; remove it")
    names = [block.name for block in _blocks(text)]
    for number, block in enumerate(_blocks(text)):
        if block.name and block.name in names[:number]:
            raise ConfigError(f"{where}: two stages are named {block.name}; rename one")
        if later := {*names[number:]}.intersection((block.start.lower(), *block.sources)):
            raise ConfigError(f"{where}: {block.name} uses the later stage {min(later)}; add it to `build-requires`")
    known = {"", "scratch", base, *names}
    for number, block in enumerate(_blocks(text)):
        for image in (block.start, *block.sources):
            if image in known or image.lower() in known or "@sha256:" in image:
                continue
            stage = re.sub(rf"\$(?:{VARIABLE.pattern}|\{{{VARIABLE.pattern}\}})", "*", image).lower()
            if not fnmatch.filter(names[:number], stage):
                raise ConfigError(
                    f"{where}: {block.name} uses the image {image}, which is not pinned; add its digest "
                    f"(@sha256:…), or name it in `images` of a component and write {{{{ images.NAME }}}} instead"
                )


def check_appended(text: str, where: str) -> None:
    """Raise ConfigError for instructions that cannot be appended to a Dockerfile. `where` is their file and line."""
    blocks = _blocks(f"FROM scratch\n{text}")
    if len(blocks) > 1 or "FROM" in [word for word, *_ in blocks[0].instructions]:
        raise ConfigError(f"{where}: FROM would begin another image; {INSTEAD_OF_FROM}")
    if problem := first_mistake(f"FROM scratch\n{text}")[1]:
        raise ConfigError(f"{where}: {problem}")


def needed_stages(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """Return the last stage and all stages that the last stage needs. BuildKit executes only these stages."""
    *_, last = stages
    return {name: stage for name, stage in stages.items() if name == last or name in stages[last].needs}


# Each text is parsed for several platforms, and targets share most stages.
@lru_cache(maxsize=16)
def _blocks(text: str) -> tuple[_Block, ...]:
    blocks: list[str] = []
    for part in BLOCK.split(f"\n{text}"):
        # A line of a heredoc may also begin with FROM.
        if blocks and not _block(blocks[-1]).whole:
            blocks[-1] += f"\n{part}"
        else:
            blocks.append(part)
    return tuple(_block(block) for block in blocks[1:])


@lru_cache(maxsize=4096)
def _block(text: str) -> _Block:
    # BuildKit does not end a line at the other characters at which `splitlines` ends it, such as U+2028.
    instructions, lines, whole = [], iter(text.split("\n")), True
    platform, start, name = "", "", ""
    for line in lines:
        head = line.lstrip()
        if not head or head.startswith("#"):
            continue
        while CONTINUED.search(head):
            following = next((more for more in lines if more.strip() and not more.lstrip().startswith("#")), None)
            head, whole = CONTINUED.sub("", head) + (following or ""), following is not None
        instruction = head = head.rstrip()
        if not head:
            continue
        # The regular expression is slow, and few lines have a heredoc.
        for dash, _, end in HEREDOC.findall(head) if "<<" in head else ():
            whole = False
            for more in lines:
                instruction += f"\n{more}"
                if whole := (more.lstrip("\t") if dash else more) == end:
                    break
        if not start and (match := FROM.match(head)):
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
    """Return a stage with its keys.

    The stage starts from `image` (reference and platform), or from the stage `start` if `earlier` contains this stage.
    """
    stages = dict(earlier)
    base = stages.get(start) or Stage(digest(*image), digest(*image))
    files, environment, steps, configuration = base.files, base.environment, [], [base.key]
    for word, text, names in block.instructions:
        if word in STEPS:
            used = [stages[name].files for name in names if name in stages]
            # A step with --link does not depend on the steps before. The steps after depend on all steps before.
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
