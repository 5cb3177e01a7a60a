"""Compute a key for each stage of a Dockerfile, and for each step one that models BuildKit's cache. Pure."""

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
        for given, value in reversed(self.flags):
            if given == name:
                return value
        return None


@dataclass(frozen=True, eq=False)
class Stage:
    """From one `FROM` to the next. Equal texts are one object, so that comparing stages costs nothing."""

    name: str
    """Lower-case; `stage-<index>` for one without a name, as BuildKit shows it."""
    base: str
    platform: str
    """Text of `--platform`, or ``."""
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class ParsedDockerfile:
    """A whole Dockerfile."""

    arguments: tuple[Instruction, ...]
    """`ARG` before the first `FROM`."""
    stages: tuple[Stage, ...]
    names: Mapping[str, int] = field(default_factory=dict)
    """Name or index of a stage, as text → index."""


@lru_cache(maxsize=256)
def parse(text: str) -> ParsedDockerfile:
    """Read a Dockerfile. What follows no known form is kept as it is: BuildKit is who refuses it."""
    blocks: list[str] = []
    for part in FROM.split(f"\n{text}"):
        # A line of a heredoc may begin with FROM too.
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


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$X`, `${X}`, `${X:-default}` and `${X:+other}`; an unknown variable is empty."""

    def value(found: re.Match[str]) -> str:
        known = values.get(found[1] or found[2], "")
        if found[3] == "-":
            return known or expand(found[4], values)
        return (expand(found[4], values) if known else "") if found[3] == "+" else known

    return VARIABLE.sub(value, text)


# Most stages come again in the next target's Dockerfile.
@lru_cache(maxsize=4096)
def _read_block(text: str) -> tuple[tuple[Instruction, ...], bool]:
    """Return the instructions of a part of a Dockerfile, and whether the last one ends with it."""
    lines = text.splitlines()
    *instructions, last = _instructions([*lines, "FROM end"])
    whole = last == Instruction("FROM", (), "end")
    return tuple(instructions if whole else _instructions(lines)), whole


@lru_cache(maxsize=4096)
def _stage(block: str, index: int) -> tuple[str, Stage]:
    """Return the name that a stage has, if it has one, and the stage."""
    head, *body = _read_block(block)[0]
    base, name = re.split(r"\s+as\s+", f"{head.text} as ", flags=re.IGNORECASE)[:2]
    name = name.lower()
    return name, Stage(name or f"stage-{index}", base, head.flag("platform") or "", tuple(body))


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


MOST = 20_000
"""Stages that are remembered; then all are forgotten."""
_numbers: dict[Hashable, int] = {}
_next = itertools.count()


@lru_cache(maxsize=256)
def numbers(text: str) -> tuple[int, ...]:
    """A number for each stage of a Dockerfile. Stages with equal numbers make the same of equal arguments."""
    parsed = parse(text)
    found: list[int] = []
    if len(_numbers) > MOST:
        _numbers.clear()
    for index, stage in enumerate(parsed.stages):
        near = tuple((name, found[i]) for name, i in _reached(stage, parsed.names, index))
        key = (parsed.arguments, stage, near)
        if key not in _numbers:
            _numbers[key] = next(_next)
        found.append(_numbers[key])
    return tuple(found)


def _reached(stage: Stage, names: Mapping[str, int], index: int) -> Iterator[tuple[str, int]]:
    """Earlier stages that a stage may name, whatever its variables are."""
    for name in _sources(stage):
        if "*" not in name:
            if names.get(name, index) < index:
                yield name, names[name]
        else:
            yield from ((n, i) for n, i in names.items() if i < index and fnmatchcase(n, name))


@lru_cache(maxsize=4096)
def _sources(stage: Stage) -> tuple[str, ...]:
    """Names of stages and images that a stage takes from, with `*` for variables."""
    names = [stage.base]
    for instruction in stage.instructions:
        for name, value in instruction.flags:
            if name == "from":
                names.append(value)
            elif name == "mount":
                names += [o.removeprefix("from=") for o in value.split(",") if o.startswith("from=") or "$" in o]
    return tuple(dict.fromkeys(VARIABLE.sub("*", name).lower() for name in names))


EXECUTED = ("RUN", "COPY", "ADD", "WORKDIR")
"""Instructions that are steps; the others change what later ones see, or the image's configuration."""
SCRATCH = "scratch"


@dataclass(frozen=True)
class CacheStep:
    """A step of one stage, for one platform."""

    stage: str
    number: int
    """From 1, among the steps of its stage."""
    total: int
    """Steps of its stage as BuildKit counts them: a base image is one too."""
    instruction: Instruction
    runs_on: str
    """Platform whose programs run."""
    last_run: bool
    """Is it the stage's last `RUN`?"""
    key: str

    @property
    def word(self) -> str:
        """`RUN`, `COPY`, `ADD` or `WORKDIR`."""
        return self.instruction.word

    @property
    def title(self) -> str:
        """The start of the command, on one line."""
        return f"{self.word} {title(self.instruction)}"


@dataclass(frozen=True)
class Setting:
    """For whom a Dockerfile is built, and what BuildKit is given with it."""

    platform: str
    build_platform: str
    bases: Mapping[str, str] = field(default_factory=dict)
    """Image in `FROM` → what it is replaced by."""
    ignores: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Stage → stages that its `/out/link` does not depend on, though the stage does."""

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments that BuildKit itself sets."""
        result: dict[str, str] = {}
        for prefix, platform in (("TARGET", self.platform), ("BUILD", self.build_platform)):
            system, arch, variant = [*platform.split("/"), ""][:3]
            values = {"PLATFORM": platform, "OS": system, "ARCH": arch, "VARIANT": variant}
            result |= {prefix + name: value for name, value in values.items()}
        return result

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for settings that are equal."""
        ignores = tuple(sorted((name, tuple(value)) for name, value in self.ignores.items()))
        return self.platform, self.build_platform, tuple(sorted(self.bases.items())), ignores


@dataclass(frozen=True)
class _State:
    """What a stage hands on to a stage that starts from it."""

    key: str
    platform: str
    env: Mapping[str, str] = field(default_factory=dict)
    config: tuple[tuple[str, str], ...] = ()
    """`SHELL`, `USER` and `WORKDIR` in effect, sorted."""
    steps: tuple[CacheStep, ...] = ()
    used: frozenset[int] = frozenset()
    """Stages, by their number in `closures`, that were needed for it."""


def steps_of(text: str, setting: Setting) -> tuple[CacheStep, ...]:
    """Steps that the last stage needs, each stage's in order. Stages that it does not need are not executed."""
    walk = _Walk(text, setting)
    final = walk.stage(len(walk.parsed.stages) - 1)
    needed = [index for index, number in enumerate(walk.numbers) if number in final.used]
    return tuple(step for index in needed for step in walk.stage(index).steps)


def result_key(text: str, setting: Setting) -> str:
    """Digest of all that the image of one platform depends on, its configuration included."""
    walk = _Walk(text, setting)
    index = len(walk.parsed.stages) - 1
    return _digest(*_result(walk.parsed.stages[index], walk.stage(index)))


def stage_keys(text: str, settings: Iterable[Setting]) -> dict[str, str]:
    """Stage → digest of all that it depends on, and of the configuration of an image made of it."""
    walks = [_Walk(text, setting) for setting in settings]
    result = {}
    for index, stage in enumerate(walks[0].parsed.stages):
        result[stage.name] = _digest(*_result(stage, *(walk.stage(index) for walk in walks)))
    return result


def _result(stage: Stage, *states: _State) -> list[str]:
    """What an image made of a stage depends on; the state of each setting."""
    parts = [repr((s.key, sorted(s.env.items()), s.config)) for s in states]
    return [*parts, *(repr(i) for i in stage.instructions if i.word not in EXECUTED)]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


_shared: dict[tuple[object, ...], _State] = {}
"""States of stages that several Dockerfiles have."""


class _Walk:
    """Follows what stages need, for one setting."""

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
        """State after a stage; with `link`, as far as `/out/link` depends on it."""
        if (index, link) not in self.known:
            self.known[index, link] = self._found(index, link)
        return self.known[index, link]

    def _found(self, index: int, link: bool) -> _State:
        # The last stage is one target's own.
        if index == len(self.parsed.stages) - 1:
            return self._walk(index, self.parsed.stages[index], link)
        key = (self.numbers[index], link, self.identity)
        if key not in _shared:
            if len(_shared) > MOST:
                _shared.clear()
            _shared[key] = self._walk(index, self.parsed.stages[index], link)
        return _shared[key]

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
                state = self._configured(state, instruction)
                continue
            key, used = self._key(state, instruction, index, ignored)
            steps.append(CacheStep(stage.name, len(steps) + 1, total, instruction, state.platform, n == last_run, key))
            # With --link, a step does not depend on what is below it; what comes next depends on both.
            below = _digest("merge", state.key, key) if is_linked(instruction) else key
            state = _State(below, state.platform, state.env, state.config, (), state.used | used)
            if instruction.word == "WORKDIR":
                state = _with(state, "WORKDIR", _folder(state, expand(instruction.text, state.env)))
        return replace(state, steps=tuple(steps))

    def _base(self, stage: Stage, index: int) -> _State:
        name = expand(stage.base, self.globals)
        platform = expand(stage.platform, self.globals) or self.setting.platform
        found = self.parsed.names.get(name.lower())
        if found is not None and found < index:
            return self.stage(found)
        if name == SCRATCH:
            return _State(SCRATCH, platform)
        return _State(self._image(name, platform), platform)

    def _image(self, name: str, platform: str) -> str:
        return _digest("image", self.setting.bases.get(name, name), platform)

    def _source(self, name: str, folder: str, index: int, ignored: Collection[str]) -> tuple[str, frozenset[int]]:
        """Key of what is mounted or copied from, and the stages that are needed for it."""
        found = self.parsed.names.get(name.lower())
        if found is None or found >= index:
            return self._image(name, self.setting.platform), frozenset()
        if name in ignored:
            return "ignored", self.stage(found).used
        source = self.stage(found, link=is_link(folder))
        return source.key, source.used

    def _key(
        self, state: _State, step: Instruction, index: int, ignored: Collection[str]
    ) -> tuple[str, frozenset[int]]:
        if step.word == "WORKDIR":
            return _digest("WORKDIR", state.key, _folder(state, expand(step.text, state.env))), frozenset()
        sources = [self._source(*pair, index, ignored) for pair in froms(step, state.env)]
        keys, used = [key for key, _ in sources], frozenset[int]().union(*(u for _, u in sources))
        if step.word == "RUN":
            flags = [f"{name}={without_from(expand(value, state.env))}" for name, value in step.flags]
            settings = [repr(sorted(state.env.items())), repr(state.config), state.platform]
            texts = [h.text for h in step.heredocs]
            return _digest("RUN", state.key, step.text, *flags, *settings, *texts, *keys), used
        flags = [f"{n}={expand(v, state.env)}" for n, v in sorted(step.flags) if n not in ("from", "checksum")]
        texts = [h.text if h.literal else h.text + referenced(h.text, state.env) for h in step.heredocs]
        words = copied(step, expand(step.text, state.env))
        words[-1] = _folder(state, words[-1]) + ("/" if words[-1].endswith("/") else "")
        parent = "" if is_linked(step) else state.key
        return _digest(step.word, parent, *flags, *words, *texts, *keys), used

    def _configured(self, state: _State, instruction: Instruction) -> _State:
        """The state after an instruction that is no step."""
        if instruction.word == "ENV":
            return replace(state, env={**state.env, **dict(pairs(instruction, state.env))})
        if instruction.word == "ARG":
            values = {}
            for name, given in pairs(instruction, {**self.globals, **state.env}):
                # Declared without a value, it is what BuildKit or an `ARG` before the first `FROM` says, if any.
                if given or name in self.globals:
                    values[name] = given or self.globals[name]
            return replace(state, env={**state.env, **values})
        if instruction.word in ("SHELL", "USER"):
            return _with(state, instruction.word, expand(instruction.text, state.env))
        return state


def _folder(state: _State, folder: str) -> str:
    return _below(dict(state.config).get("WORKDIR", "/"), folder)


# Most texts come again in the next target.
@lru_cache(maxsize=4096)
def _below(top: str, folder: str) -> str:
    return str(PurePosixPath(top, folder))


def _with(state: _State, name: str, value: str) -> _State:
    return replace(state, config=tuple(sorted({**dict(state.config), name: value}.items())))
