"""What BuildKit would execute for a Dockerfile: a key for each step that models BuildKit's cache. Pure.

Two steps with equal keys are one step: BuildKit executes it once and takes it from its cache afterwards. A key is a
digest of the instruction as it is executed, of its parent's key, and of the keys of all that it mounts or copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePosixPath

from imagebuild import closures, operands
from imagebuild.instructions import Instruction, Stage, expand, parse

EXECUTED = ("RUN", "COPY", "ADD", "WORKDIR")
"""Instructions that are steps; the others change what later ones see, or the image's configuration."""
SCRATCH = "scratch"


@dataclass(frozen=True)
class Step:
    """A step of one stage, for one platform."""

    stage: str
    number: int
    """From 1, among the steps of its stage."""
    total: int
    """Steps of its stage as BuildKit counts them: a base image is one too."""
    word: str
    """`RUN`, `COPY`, `ADD` or `WORKDIR`."""
    title: str
    """The start of the command, on one line."""
    runs_on: str
    """Platform whose programs run."""
    last_run: bool
    """Is it the stage's last `RUN`?"""
    key: str


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
    steps: tuple[Step, ...] = ()
    used: frozenset[int] = frozenset()
    """Stages, by their number in `closures`, that were needed for it."""


def steps_of(text: str, setting: Setting) -> tuple[Step, ...]:
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
        self.numbers = closures.numbers(text)
        self.setting = setting
        self.identity = setting.identity
        self.known: dict[tuple[int, bool], _State] = {}
        self.globals: dict[str, str] = dict(setting.arguments)
        for instruction in self.parsed.arguments:
            self.globals |= dict(operands.pairs(instruction, self.globals))

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
            if len(_shared) > closures.MOST:
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
        for n, instruction in enumerate(stage.instructions):
            if instruction.word not in EXECUTED:
                state = self._configured(state, instruction)
                continue
            key, used = self._key(state, instruction, index, ignored)
            step = Step(
                stage=stage.name,
                number=len(state.steps) + 1,
                total=total,
                word=instruction.word,
                title=f"{instruction.word} {operands.title(instruction)}",
                runs_on=state.platform,
                last_run=n == last_run,
                key=key,
            )
            # With --link, a step does not depend on what is below it; what comes next depends on both.
            below = _digest("merge", state.key, key) if operands.is_linked(instruction) else key
            state = replace(state, key=below, steps=(*state.steps, step), used=state.used | used)
            if instruction.word == "WORKDIR":
                state = _with(state, "WORKDIR", _folder(state, expand(instruction.text, state.env)))
        return state

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
        source = self.stage(found, link=operands.is_link(folder))
        return source.key, source.used

    def _key(
        self, state: _State, step: Instruction, index: int, ignored: Collection[str]
    ) -> tuple[str, frozenset[int]]:
        if step.word == "WORKDIR":
            return _digest("WORKDIR", state.key, _folder(state, expand(step.text, state.env))), frozenset()
        sources = [self._source(*pair, index, ignored) for pair in operands.froms(step, state.env)]
        keys, used = [key for key, _ in sources], frozenset[int]().union(*(u for _, u in sources))
        if step.word == "RUN":
            flags = [f"{name}={operands.without_from(expand(value, state.env))}" for name, value in step.flags]
            settings = [repr(sorted(state.env.items())), repr(state.config), state.platform]
            texts = [h.text for h in step.heredocs]
            return _digest("RUN", state.key, step.text, *flags, *settings, *texts, *keys), used
        flags = [f"{n}={expand(v, state.env)}" for n, v in sorted(step.flags) if n not in ("from", "checksum")]
        texts = [h.text if h.literal else h.text + operands.referenced(h.text, state.env) for h in step.heredocs]
        words = operands.copied(step, expand(step.text, state.env))
        words[-1] = _folder(state, words[-1]) + ("/" if words[-1].endswith("/") else "")
        parent = "" if operands.is_linked(step) else state.key
        return _digest(step.word, parent, *flags, *words, *texts, *keys), used

    def _configured(self, state: _State, instruction: Instruction) -> _State:
        """The state after an instruction that is no step."""
        if instruction.word == "ENV":
            return replace(state, env={**state.env, **dict(operands.pairs(instruction, state.env))})
        if instruction.word == "ARG":
            values = {}
            for name, given in operands.pairs(instruction, {**self.globals, **state.env}):
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
