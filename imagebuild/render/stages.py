"""Compute a key for each stage and each step of a Dockerfile, as BuildKit's cache would. Pure."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath

CONTINUED = re.compile(r"\\[ \t]*$")
FROM = re.compile(r"\n(?=[ \t]*FROM\b)", re.IGNORECASE)
COMMENT = re.compile(r"^\s*#")
HEREDOC = re.compile(r"""(?:^|(?<=\s))\d*<<(-?)(["']?)([^\s<"']+)\2(?=\s|$)""")
VARIABLE = re.compile(r"\$(?:(\w+)|{(\w+)(?::?([-+])([^}]*))?})")
FLAG = re.compile(r"^--([\w.-]+)(?:=(\S*))?(?:\s+|$)")


@dataclass(frozen=True)
class Heredoc:
    """Hold a text that follows its instruction."""

    text: str
    literal: bool
    """Was its delimiter quoted, so that variables in it stay as they are?"""


@dataclass(frozen=True)
class Instruction:
    """Hold one instruction, without comments and line breaks outside heredocs."""

    word: str
    """In capitals, for example `RUN`."""
    flags: tuple[tuple[str, str], ...]
    """`--name=value` as pairs; the value is empty for a flag without one."""
    text: str
    """Rest of the joined line, after the flags."""
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str) -> str | None:
        """Return the last value given for a flag, or None if it is not there."""
        for given, value in reversed(self.flags):
            if given == name:
                return value
        return None


@dataclass(frozen=True, eq=False)
class Stage:
    """Hold what is from one `FROM` to the next. Equal texts are one object, so that stages are compared at no cost."""

    name: str
    """Name in lower case; `stage-<index>` for a stage without one, as BuildKit shows it."""
    base: str
    platform: str
    """Text of `--platform`, or an empty text."""
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class ParsedDockerfile:
    """Hold a whole Dockerfile."""

    arguments: tuple[Instruction, ...]
    """Every `ARG` before the first `FROM`."""
    stages: tuple[Stage, ...]
    names: Mapping[str, int] = field(default_factory=dict)
    """Name of a stage, or its index as text → index."""


@lru_cache(maxsize=256)
def parse(text: str) -> ParsedDockerfile:
    """Read a Dockerfile. What has no known form is kept as it is: refusing it is BuildKit's task."""
    blocks: list[str] = []
    for part in FROM.split(f"\n{text}"):
        # A line of a heredoc may begin with FROM, too.
        if blocks and not _read_block(blocks[-1])[1]:
            blocks[-1] += f"\n{part}"
        else:
            blocks.append(part)
    arguments = _read_block(blocks[0])[0]
    stages = [_stage(block, index) for index, block in enumerate(blocks[1:])]
    names: dict[str, int] = {}
    for index, (name, _) in enumerate(stages):
        names |= {str(index): index, **({name: index} if name else {})}
    return ParsedDockerfile(arguments, tuple(stage for _, stage in stages), names)


# The next target's Dockerfile has most of the same stages.
@lru_cache(maxsize=4096)
def _read_block(text: str) -> tuple[tuple[Instruction, ...], bool]:
    """Return the instructions of a part of a Dockerfile, and whether the last one ends with it."""
    lines = text.splitlines()
    *instructions, last = _instructions([*lines, "FROM end"])
    whole = last == Instruction("FROM", (), "end")
    return tuple(instructions if whole else _instructions(lines)), whole


@lru_cache(maxsize=4096)
def _stage(block: str, index: int) -> tuple[str, Stage]:
    """Return the stage's name, which may be empty, and the stage."""
    head, *body = _read_block(block)[0]
    base, name = re.split(r"\s+as\s+", f"{head.text} as ", flags=re.IGNORECASE)[:2]
    name = name.lower()
    return name, Stage(name or f"stage-{index}", base, head.flag("platform") or "", tuple(body))


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    rest = iter(lines)
    for first in rest:
        if not first.strip() or COMMENT.match(first):
            continue
        line, parts = first.strip(), []
        while CONTINUED.search(line):  # comments and blank lines between continued lines do not count
            parts.append(CONTINUED.sub("", line))
            line = next((other for other in rest if other.strip() and not COMMENT.match(other)), "")
        word, text = [*"".join([*parts, line]).split(None, 1), ""][:2]
        word, flags = word.upper(), []
        while flag := FLAG.match(text):
            flags.append((flag[1], flag[2] or ""))
            text = text[flag.end() :]
        heredocs = tuple(_heredocs(text, rest)) if word in ("RUN", "COPY", "ADD") else ()
        yield Instruction(word, tuple(flags), text, heredocs)


def _heredocs(text: str, rest: Iterator[str]) -> Iterator[Heredoc]:
    for tabs, quote, delimiter in HEREDOC.findall(text):
        content = []
        for line in rest:
            kept = line.lstrip("\t") if tabs else line
            if kept == delimiter:
                break
            content.append(kept)
        yield Heredoc("\n".join(content), bool(quote))


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$X`, `${X}`, `${X:-default}` and `${X:+other}`; an unknown variable is empty."""

    def value(match: re.Match[str]) -> str:
        known = values.get(match[1] or match[2], "")
        if match[3] == "-":
            return known or expand(match[4], values)
        return (expand(match[4], values) if known else "") if match[3] == "+" else known

    return VARIABLE.sub(value, text)


LINK = PurePosixPath("/out/link")
"""Folder for what others are compiled with, if that changes less often than the rest of a stage."""
GIT_COMMIT = re.compile(r"^\S+#[0-9a-f]{40}(?::\S*)?$")


def is_linked(step: Instruction) -> bool:
    """Return whether a step has --link."""
    return step.flag("link") not in (None, "false")


def pairs(instruction: Instruction, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of `A=1 B="two"`, expanded, or of the old form `ENV A one`; values may be empty."""
    words = _words(expand(instruction.text, values))
    if instruction.word == "ENV" and words and "=" not in words[0]:
        yield words[0], " ".join(words[1:])
        return
    for word in words:
        name, _, value = word.partition("=")
        yield name, value


def mounted(step: Instruction, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the stages and images that a step mounts or copies from, each with the folder in it."""
    for name, value in step.flags:
        if name == "from":
            words = _words(expand(step.text, env))
            folder = words[0] if len(words) == 2 else "/"
            yield expand(value, env), folder
        elif name == "mount":
            options = dict(option.partition("=")[::2] for option in expand(value, env).split(","))
            if "from" in options:
                yield options["from"], options.get("source") or options.get("src") or "/"


def copied(step: Instruction, text: str) -> list[str]:
    """Return what identifies the sources of `COPY` and `ADD`, and the destination last.

    A file with a checksum is identified by that and its name, a git repository by its commit, wherever they come from.
    """
    *sources, destination = text.split() or [""]
    if step.word == "ADD":
        checksum = step.flag("checksum")
        for i, address in enumerate(sources):
            if GIT_COMMIT.match(address):
                sources[i] = address.partition("#")[2]
            elif checksum:
                sources[i] = f"{checksum} {PurePosixPath(address).name}"
    return [*sources, destination]


@lru_cache(maxsize=4096)
def in_link_folder(folder: str) -> bool:
    """Return whether a folder is `/out/link` or in it."""
    return PurePosixPath("/", folder).is_relative_to(LINK)


@lru_cache(maxsize=4096)
def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return tuple(text.split())


def title(step: Instruction) -> str:
    """Return the start of a step's command, on one line."""
    first = next((line for h in step.heredocs for line in h.text.splitlines() if not line.startswith("set -")), "")
    text = f"{step.text} ({first.strip()} …)" if step.word == "RUN" and first else step.text
    source = step.flag("from")
    return " ".join([*([f"--from={source}"] if source else []), *text.split()])[:80]


MOST_STAGES = 20_000
"""Stages that are remembered; when there are more, all are forgotten."""
_numbers: dict[Hashable, int] = {}
_next_number = itertools.count()


@lru_cache(maxsize=256)
def numbers(text: str) -> tuple[int, ...]:
    """Return a number for each stage of a Dockerfile. Equal ones make the same of equal arguments."""
    parsed = parse(text)
    result: list[int] = []
    if len(_numbers) > MOST_STAGES:
        _numbers.clear()
    for index, stage in enumerate(parsed.stages):
        named = tuple((name, result[i]) for name, i in _named_stages(stage, parsed.names, index))
        key = (parsed.arguments, stage, named)
        if key not in _numbers:
            _numbers[key] = next(_next_number)
        result.append(_numbers[key])
    return tuple(result)


def _named_stages(stage: Stage, names: Mapping[str, int], index: int) -> Iterator[tuple[str, int]]:
    """Yield the earlier stages that a stage may name, whatever values its variables have."""
    for name in _source_patterns(stage):
        if "*" not in name:
            if names.get(name, index) < index:
                yield name, names[name]
        else:
            yield from ((n, i) for n, i in names.items() if i < index and fnmatchcase(n, name))


@lru_cache(maxsize=4096)
def _source_patterns(stage: Stage) -> tuple[str, ...]:
    """Return the names of stages and images that a stage takes from, with `*` for variables."""
    names = [stage.base]
    for flag, value in (pair for instruction in stage.instructions for pair in instruction.flags):
        if flag == "from":
            names.append(value)
        elif flag == "mount":
            names += [o.removeprefix("from=") for o in value.split(",") if o.startswith("from=") or "$" in o]
    return tuple(dict.fromkeys(VARIABLE.sub("*", name).lower() for name in names))


EXECUTED = ("RUN", "COPY", "ADD", "WORKDIR")
"""Instructions that are steps. The others change what later steps see, or the image's configuration."""
SCRATCH = "scratch"


@dataclass(frozen=True)
class CacheStep:
    """Describe a step of one stage, for one platform."""

    stage: str
    number: int
    """Number among the steps of its stage, from 1."""
    total: int
    """Number of steps of its stage, as BuildKit counts them: a base image is one too."""
    instruction: Instruction
    runs_on: str
    """Platform of the programs that run."""
    last_run: bool
    """Is it the stage's last `RUN`?"""
    key: str

    @property
    def word(self) -> str:
        """Return `RUN`, `COPY`, `ADD` or `WORKDIR`."""
        return self.instruction.word

    @property
    def title(self) -> str:
        """Return the start of the command, on one line."""
        return f"{self.word} {title(self.instruction)}"


@dataclass(frozen=True)
class Setting:
    """Say which platform a Dockerfile is built for, and what BuildKit is given with it."""

    platform: str
    build_platform: str
    bases: Mapping[str, str] = field(default_factory=dict)
    """Image in `FROM` → what replaces it."""
    ignores: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Stage → stages that its `/out/link` does not depend on, although the stage does."""

    @property
    def arguments(self) -> dict[str, str]:
        """Return the arguments that BuildKit itself sets."""
        result: dict[str, str] = {}
        for prefix, platform in (("TARGET", self.platform), ("BUILD", self.build_platform)):
            system, arch, variant = [*platform.split("/"), ""][:3]
            values = {"PLATFORM": platform, "OS": system, "ARCH": arch, "VARIANT": variant}
            result |= {prefix + name: value for name, value in values.items()}
        return result

    @property
    def identity(self) -> tuple[object, ...]:
        """Return a key that is equal for equal settings."""
        ignores = tuple(sorted((name, tuple(value)) for name, value in self.ignores.items()))
        return self.platform, self.build_platform, tuple(sorted(self.bases.items())), ignores


@dataclass(frozen=True)
class _State:
    """Hold what a stage hands on to a stage that starts from it."""

    key: str
    platform: str
    env: Mapping[str, str] = field(default_factory=dict)
    config: tuple[tuple[str, str], ...] = ()
    """`SHELL`, `USER` and `WORKDIR` in effect, sorted."""
    steps: tuple[CacheStep, ...] = ()
    used: frozenset[int] = frozenset()
    """Stages that were needed for it, by their `numbers`."""


def steps_of(text: str, setting: Setting) -> tuple[CacheStep, ...]:
    """Return the steps that the last stage needs, those of each stage in order. Others are not executed."""
    walk = _StageWalk(text, setting)
    final = walk.stage(len(walk.parsed.stages) - 1)
    needed = [index for index, number in enumerate(walk.numbers) if number in final.used]
    return tuple(step for index in needed for step in walk.stage(index).steps)


def result_key(text: str, setting: Setting) -> str:
    """Return a digest of all that the image of one platform depends on, its configuration included."""
    walk = _StageWalk(text, setting)
    index = len(walk.parsed.stages) - 1
    return _digest(*_image_parts(walk.parsed.stages[index], walk.stage(index)))


def stage_keys(text: str, settings: Iterable[Setting]) -> dict[str, str]:
    """Return stage → digest of all that it depends on, and of the configuration of an image made of it."""
    walks = [_StageWalk(text, setting) for setting in settings]
    result = {}
    for index, stage in enumerate(walks[0].parsed.stages):
        result[stage.name] = _digest(*_image_parts(stage, *(walk.stage(index) for walk in walks)))
    return result


def _image_parts(stage: Stage, *states: _State) -> list[str]:
    """Return what an image made of a stage depends on; `states` has the stage's state for each setting."""
    parts = [repr((s.key, sorted(s.env.items()), s.config)) for s in states]
    return [*parts, *(repr(i) for i in stage.instructions if i.word not in EXECUTED)]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


_shared_states: dict[tuple[object, ...], _State] = {}
"""States of stages that several Dockerfiles have."""


class _StageWalk:
    """Follow what stages need, for one setting."""

    def __init__(self, text: str, setting: Setting) -> None:
        self.parsed = parse(text)
        self.numbers = numbers(text)
        self.setting = setting
        self.identity = setting.identity
        self.known: dict[tuple[int, bool], _State] = {}
        self.globals: dict[str, str] = dict(setting.arguments)
        for instruction in self.parsed.arguments:
            self.globals |= dict(pairs(instruction, self.globals))

    def stage(self, index: int, *, link: bool = False) -> _State:
        """Return the state after a stage; with `link`, as far as `/out/link` depends on it."""
        if (index, link) not in self.known:
            stage = self.parsed.stages[index]
            if index == len(self.parsed.stages) - 1:  # it is this target's own
                self.known[index, link] = self._walk(index, stage, link)
            else:
                key = (self.numbers[index], link, self.identity)
                if key not in _shared_states:
                    if len(_shared_states) > MOST_STAGES:
                        _shared_states.clear()
                    _shared_states[key] = self._walk(index, stage, link)
                self.known[index, link] = _shared_states[key]
        return self.known[index, link]

    def _walk(self, index: int, stage: Stage, link: bool) -> _State:
        state = self._base(stage, index)
        external = not state.used and state.key != SCRATCH
        state = replace(state, used=state.used | {self.numbers[index]}, steps=())
        total = sum(i.word in EXECUTED for i in stage.instructions) + external
        last_run = max((n for n, i in enumerate(stage.instructions) if i.word == "RUN"), default=-1)
        ignored = self.setting.ignores.get(stage.name, ()) if link else ()
        steps: list[CacheStep] = []
        for n, instruction in enumerate(stage.instructions):
            if instruction.word not in EXECUTED:
                state = self._configure(state, instruction)
                continue
            key, used = self._key(state, instruction, index, ignored)
            steps.append(CacheStep(stage.name, len(steps) + 1, total, instruction, state.platform, n == last_run, key))
            # With --link, a step does not depend on what is below it; the next step depends on both.
            state_key = _digest("merge", state.key, key) if is_linked(instruction) else key
            state = _State(state_key, state.platform, state.env, state.config, (), state.used | used)
            if instruction.word == "WORKDIR":
                state = _with_config(state, "WORKDIR", _absolute(state, expand(instruction.text, state.env)))
        return replace(state, steps=tuple(steps))

    def _base(self, stage: Stage, index: int) -> _State:
        name = expand(stage.base, self.globals)
        platform = expand(stage.platform, self.globals) or self.setting.platform
        earlier = self.parsed.names.get(name.lower())
        if earlier is not None and earlier < index:
            return self.stage(earlier)
        return _State(SCRATCH if name == SCRATCH else self._image(name, platform), platform)

    def _image(self, name: str, platform: str) -> str:
        return _digest("image", self.setting.bases.get(name, name), platform)

    def _source(self, name: str, folder: str, index: int, ignored: Collection[str]) -> tuple[str, frozenset[int]]:
        """Return the key of what is mounted or copied from, and the stages that are needed for it."""
        earlier = self.parsed.names.get(name.lower())
        if earlier is None or earlier >= index:
            return self._image(name, self.setting.platform), frozenset()
        if name in ignored:
            return "ignored", self.stage(earlier).used
        source = self.stage(earlier, link=in_link_folder(folder))
        return source.key, source.used

    def _key(
        self, state: _State, step: Instruction, index: int, ignored: Collection[str]
    ) -> tuple[str, frozenset[int]]:
        """Return the key of a step, and the stages that are needed for what it mounts or copies from."""
        if step.word == "WORKDIR":
            return _digest("WORKDIR", state.key, _absolute(state, expand(step.text, state.env))), frozenset()
        sources = [self._source(*pair, index, ignored) for pair in mounted(step, state.env)]
        keys, used = [key for key, _ in sources], frozenset[int]().union(*(u for _, u in sources))
        if step.word == "RUN":
            # The name of the stage that is mounted does not matter; its key does.
            flags = [f"{n}={re.sub(r'(^|,)from=[^,]*', '', expand(v, state.env))}" for n, v in step.flags]
            settings = [repr(sorted(state.env.items())), repr(state.config), state.platform]
            texts = [h.text for h in step.heredocs]
            return _digest("RUN", state.key, step.text, *flags, *settings, *texts, *keys), used
        flags = [f"{n}={expand(v, state.env)}" for n, v in sorted(step.flags) if n not in ("from", "checksum")]
        texts = [h.text if h.literal else h.text + _variables_in(h.text, state.env) for h in step.heredocs]
        words = copied(step, expand(step.text, state.env))
        words[-1] = _absolute(state, words[-1]) + ("/" if words[-1].endswith("/") else "")
        parent = "" if is_linked(step) else state.key
        return _digest(step.word, parent, *flags, *words, *texts, *keys), used

    def _configure(self, state: _State, instruction: Instruction) -> _State:
        """Return the state after an instruction that is not a step."""
        if instruction.word == "ENV":
            return replace(state, env={**state.env, **dict(pairs(instruction, state.env))})
        if instruction.word == "ARG":
            values = {}
            for name, given in pairs(instruction, {**self.globals, **state.env}):
                # Without a value here, it has that of BuildKit or of an `ARG` before the first `FROM`, if any.
                if given or name in self.globals:
                    values[name] = given or self.globals[name]
            return replace(state, env={**state.env, **values})
        if instruction.word in ("SHELL", "USER"):
            return _with_config(state, instruction.word, expand(instruction.text, state.env))
        return state


def _variables_in(text: str, env: Mapping[str, str]) -> str:
    """Return the variables that a text refers to, with their values."""
    names = sorted({match[0] or match[1] for match in VARIABLE.findall(text)})
    return repr([(name, env.get(name, "")) for name in names])


def _absolute(state: _State, folder: str) -> str:
    return _below(dict(state.config).get("WORKDIR", "/"), folder)


# The next target has most of the same texts.
@lru_cache(maxsize=4096)
def _below(top: str, folder: str) -> str:
    return str(PurePosixPath(top, folder))


def _with_config(state: _State, name: str, value: str) -> _State:
    return replace(state, config=tuple(sorted({**dict(state.config), name: value}.items())))
