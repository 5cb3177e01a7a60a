"""Run `docker buildx bake`, read its events, and show progress."""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from imagebuild.build import bake
from imagebuild.core.console import err, format_duration
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.files import write_text
from imagebuild.core.yaml import suggestion
from imagebuild.oci.engine import Endpoint, engine_flaw
from imagebuild.project.load import Project
from imagebuild.project.matrix import Target
from imagebuild.project.records import BuildResult, Step
from imagebuild.render.renderer import Dockerfile

NAME = re.compile(
    r"^\[(?:(?P<target>(?!linux/)\S+) )?(?:(?P<platform>linux/\S+) )?(?P<stage>[\w.-]+) +(?P<n>\d+/\d+)\] "
    r"(?P<text>(?!LINK ).*)",  # the second half of COPY --link, which is no step of the Dockerfile
    re.DOTALL,
)
FINAL_STAGE = "image"
BLOB = re.compile(r"^(extracting )?sha256:")
"""What is in progress when a layer comes from a registry. Steps that run have no progress, only output."""
LOOKED_UP_S = 0.001
"""A `RUN` that took less did not run, as no container starts in that time: BuildKit looked it up, and then took what an
equal step of another target made. It says nothing of that. A `COPY` may be nearly as fast: 2 ms were seen."""
LOG_LINES = 400
"""Lines of output kept per step."""


@dataclass
class Vertex:
    """A node of BuildKit's graph, as far as the stream has told."""

    digest: str
    name: str = ""
    started: float | None = None
    completed: float | None = None
    cached: bool = False
    pulled: bool = False
    """Did layers of it come from a registry? BuildKit then reports a step as if it had run."""
    error: str = ""
    inputs: tuple[str, ...] = ()
    """Digests of the vertices that it starts from; a source has none."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    partial: str = ""

    @property
    def parts(self) -> re.Match[str] | None:
        return NAME.match(self.name)

    @property
    def target(self) -> str:
        return (self.parts["target"] or "") if self.parts else ""

    @property
    def stage(self) -> str:
        return self.parts["stage"] if self.parts else ""

    @property
    def seconds(self) -> float:
        return max(0.0, (self.completed or 0) - (self.started or 0)) if self.completed and self.started else 0.0

    @property
    def identified(self) -> bool:
        """Is it the source of an `ADD`? It is looked up in every build; the step is the vertex that copies from it."""
        return not self.inputs and bool(self.parts) and self.name.partition("] ")[2].startswith("ADD ")

    @property
    def looked_up(self) -> bool:
        """Did a program end before it could have run?"""
        return (
            bool(self.parts and self.parts["text"].startswith("RUN ")) and self.seconds < LOOKED_UP_S and not self.error
        )

    @property
    def cancelled(self) -> bool:
        """Did it end because the build or the target that wanted it did?"""
        return "context canceled" in self.error

    @property
    def title(self) -> str:
        """One line: the stage, its platform, and the start of the command."""
        if not self.parts:
            return self.name.splitlines()[0][:100] if self.name else self.digest
        # Targets share all stages but the last; only there does it matter whose it is.
        whose = self.target if self.stage == FINAL_STAGE else ""
        words = [whose, self.stage, f"({self.parts['platform']})" if self.parts["platform"] else ""]
        where = " ".join(word for word in words if word)
        return f"{where} {self.parts['n']}: {summarise_steps(self.parts['text'])}"


def summarise_steps(command: str) -> str:
    """The command without its mounts, shortened to one line."""
    text = re.sub(r"--mount=\S+\s*", "", command.replace("\\\n", " "))
    return " ".join(text.split())[:80]


class Stream:
    """Reads the stream as it comes. Newer versions of buildx write one object a line, older ones indent."""

    def __init__(self) -> None:
        self.vertices: dict[str, Vertex] = {}
        self.messages: list[str] = []
        """Lines that are no events, such as buildx's own errors."""
        self._buffer = ""
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> Iterator[tuple[str, Vertex, str]]:
        """Take more text; yield (`started` | `completed` | `log`, vertex, line of log)."""
        self._buffer += text
        while True:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return
            if self._buffer.startswith("{"):
                try:
                    event, end = self._decoder.raw_decode(self._buffer)
                except ValueError:
                    return
                self._buffer = self._buffer[end:]
                yield from self._event(event)
            else:
                line, newline, rest = self._buffer.partition("\n")
                if not newline:
                    return
                self.messages.append(line)
                self._buffer = rest

    def close(self) -> None:
        """The stream has ended; what is left is a message."""
        self.messages += [line for line in self._buffer.splitlines() if line.strip()]
        self._buffer = ""

    def steps(self, component_of: dict[str, str]) -> tuple[Step, ...]:
        """Return the steps of stages that ran or were cached, each once, in the order they started.

        The time of an `ADD` includes the time in which its source was fetched. A step that was cancelled did not run:
        in a build that succeeds, BuildKit cancels a step while it looks up its inputs, and takes what an equal step of
        another target makes.
        """
        sources = {v.digest: v.seconds for v in self.vertices.values() if v.identified}
        done = [v for v in self.vertices.values() if v.parts and (v.completed or v.cached) and v.digest not in sources]
        return tuple(
            Step(
                name=" ".join(v.name.split())[:200],
                target=v.target,
                stage=v.stage,
                component=component_of.get(v.stage),
                cached=v.cached or v.cancelled,
                seconds=round(v.seconds + sum(sources.get(i, 0) for i in v.inputs if not v.cached), 3),
                error=None if v.cancelled else v.error or None,
            )
            for v in sorted(done, key=lambda v: v.started or 0)
        )

    def failed(self) -> list[Vertex]:
        """Steps that failed by themselves, not because others did."""
        return [v for v in self.vertices.values() if v.error and not v.cancelled]

    def said(self) -> list[str]:
        """What failed outside steps, and lines that are no events."""
        return [v.error for v in self.failed() if not v.parts] + [m for m in self.messages if m.strip()]

    def forget_failures(self) -> None:
        """Before the same build is tried again: what ran stays known as having run."""
        self.vertices = {digest: v for digest, v in self.vertices.items() if not v.error}
        self.messages.clear()

    def _event(self, event: dict[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        for raw in event.get("statuses") or ():
            if BLOB.match(raw.get("id") or ""):
                self.vertices.setdefault(raw["vertex"], Vertex(raw["vertex"])).pulled = True
        for raw in event.get("vertexes") or ():
            yield from self._vertex(raw)
        for raw in event.get("logs") or ():
            vertex = self.vertices.setdefault(raw["vertex"], Vertex(raw["vertex"]))
            try:
                text = base64.b64decode(raw.get("data") or "").decode("utf-8", "replace")
            except binascii.Error:
                continue
            *lines, vertex.partial = (vertex.partial + text).split("\n")
            for line in lines:
                vertex.log.append(line)
                yield "log", vertex, line

    def _vertex(self, raw: dict[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        vertex = self.vertices.setdefault(raw["digest"], Vertex(raw["digest"]))
        vertex.name = raw.get("name") or vertex.name
        vertex.inputs = tuple(raw.get("inputs") or vertex.inputs)
        # Two targets that share a step each report it; it was cached only if it never ran.
        ran_before = vertex.completed is not None and not vertex.cached and not vertex.error
        started, completed = _time(raw.get("started")), _time(raw.get("completed"))
        if started and vertex.started is None:
            vertex.started = started
            yield "started", vertex, ""
        # A source is completed once when it is identified, and may fail when it is fetched.
        if completed and (not ran_before or raw.get("error")):
            # A step that was looked up, or cancelled for one target, may then run for another that wants it.
            vertex.started = started or vertex.started
            vertex.completed, vertex.error = completed, raw.get("error") or ""
            vertex.cached = bool(raw.get("cached") or vertex.pulled or vertex.looked_up)
            if vertex.partial:
                vertex.log.append(vertex.partial)
                vertex.partial = ""
            yield "completed", vertex, ""
        elif completed and started and vertex.identified and completed - started > vertex.seconds:
            vertex.started, vertex.completed = started, completed  # now it was fetched


def _time(text: str | None) -> float | None:
    """Seconds since the epoch; BuildKit writes nanoseconds, of which Python reads six digits."""
    if not text or text.startswith("0001"):
        return None
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")).timestamp()


class Progress(Protocol):
    """Shows a build while it runs."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def note(self, text: str) -> None:
        """Something that happens before or after BuildKit's steps."""

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        """An event of `events.Stream.feed`."""


class PlainProgress:
    """One line for each step as it ends, for logs; foldable groups with the output under GitHub Actions."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.groups = os.environ.get("GITHUB_ACTIONS") == "true"
        self.began = time.monotonic()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        self._line(text)

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        if kind == "log" and self.verbose and not self.groups:
            self._line(f"{vertex.stage or 'build'} | {line}")
        if kind != "completed" or not vertex.parts:
            return
        if vertex.error:
            state = "cancelled" if vertex.cancelled else "failed"
        else:
            state = "cached" if vertex.cached else format_duration(vertex.seconds)
        if self.groups and vertex.log:
            sys.stderr.write("\n".join([f"::group::{vertex.title} ({state})", *vertex.log, "::endgroup::\n"]))
        else:
            self._line(f"{vertex.title} ({state})")

    def _line(self, text: str) -> None:
        err.print(f"{time.monotonic() - self.began:7.1f}  {escape(text)}")


def _line(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


class LiveProgress:
    """A display that is redrawn: running steps with their last line, and counts."""

    def __init__(self, targets: Iterable[str]) -> None:
        self.targets = tuple(targets)
        self.began = time.monotonic()
        self.running: dict[str, Vertex] = {}
        self.done: dict[str, Vertex] = {}
        self.phase = ""
        self.live = Live(get_renderable=self._draw, console=err, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveProgress:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        self.phase = text

    def update(self, kind: str, vertex: Vertex, line: str) -> None:  # noqa: ARG002 - part of the protocol
        if kind == "started":
            self.running[vertex.digest] = vertex
        elif kind == "completed":
            self.running.pop(vertex.digest, None)
            if vertex.parts:
                self.done[vertex.digest] = vertex
                if not vertex.cached and not vertex.error:
                    self.live.console.print(_line(f"{format_duration(vertex.seconds):>10}  {vertex.title}", "green"))

    def _draw(self) -> Group:
        cached = sum(v.cached for v in self.done.values())
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(f"{format_duration(time.monotonic() - self.began):>10}  ", "bold")
        head.append(f"{len(self.done) - cached} steps run, {cached} cached  ")
        head.append(", ".join(self.targets), "dim")
        lines = [head]
        if self.phase and not self.done:
            lines.append(_line(self.phase, "dim"))
        now = time.time()
        for vertex in [v for v in self.running.values() if v.name][-8:]:
            lines.append(
                _line(f"{format_duration(max(0.0, now - (vertex.started or now))):>10}  {vertex.title}", "cyan")
            )
            if vertex.log:
                lines.append(_line(f"{'':>10}  {vertex.log[-1]}", "dim"))
        return Group(*lines)


def show_progress(targets: Iterable[str], *, verbose: bool) -> Progress:
    """A redrawn display on a terminal, plain lines elsewhere or when full output is wanted."""
    return LiveProgress(targets) if err.is_terminal and not verbose else PlainProgress(verbose=verbose)


ERROR_LINES = 25
LAYOUT = ("blobs", "index.json", "ingest", "oci-layout")
"""What may be in an OCI layout, and in one that was interrupted."""
# Faults of exporting, after which all steps are in the cache: containerd's garbage collector was faster than the export
# (https://github.com/containerd/containerd/issues/10835), or a dozen large images at once took it too long.
EXPORT_FAULT = re.compile(r"parent snapshot \S+ does not exist|DeadlineExceeded: context deadline exceeded")


@dataclass(frozen=True)
class BakeRequest:
    """What to build and how; paths are on this machine."""

    targets: tuple[Target, ...]
    dockerfiles: Mapping[str, Dockerfile]
    folder: Path
    """Where Dockerfiles, the bake file and results are written."""
    options: bake.Options
    engine: Endpoint
    builder: str | None = None
    stage: str | None = None
    """Build only this stage, to see a failed step again."""
    components: frozenset[str] = field(default_factory=frozenset)
    again: tuple[str, ...] = ()
    """Options that a command needs to repeat a step of this build."""


def replaced_sources(project: Project, targets: Sequence[Target], given: Sequence[str]) -> dict[str, str]:
    """`["ucx=/src/ucx"]` to the stages that the folders replace. Raises ConfigError."""
    names = {n for n, d in project.components.items() if d.model.git}
    replaced = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise ConfigError(f"--source {text}: write it as NAME=FOLDER")
        if name not in names:
            raise ConfigError(f"--source {text}: no component {name!r} with a source in git{suggestion(name, names)}")
        path = Path(folder).expanduser().resolve()
        if not path.is_dir() or not any(path.iterdir()):
            raise ConfigError(f"--source {text}: {path} is not a folder with something in it")
        if not any(name in t.components for t in targets):
            raise ConfigError(f"--source {text}: no selected target uses {name}")
        replaced[f"{name}-source"] = str(path)
    return replaced


def run_bake(request: BakeRequest, progress: Progress) -> tuple[BuildResult, ...]:
    """Build all targets at once; what to do with it is `delivery`'s.

    Raises CommandError if a step or buildx itself fails, ResultError if buildx's answer cannot be read.
    """
    began = time.monotonic()
    write_inputs(request)
    content = bake.bake_file(request.targets, request.folder, request.options)
    if request.stage:
        for entry in content["target"].values():
            entry |= {"target": request.stage, "output": ["type=cacheonly"], "tags": []}
    stream, metadata = execute_bake(request, content, progress)
    seconds = time.monotonic() - began
    return tuple(_result(t, request, stream, metadata, seconds) for t in request.targets)


def execute_bake(
    request: BakeRequest, content: Mapping[str, Any], progress: Progress, name: str = "bake.json"
) -> tuple[Stream, dict[str, Any]]:
    """Run a bake file: what BuildKit said, and buildx's metadata. Raises as `run` does."""
    file, metadata_file = request.folder / name, request.folder / "metadata.json"
    write_text(file, json.dumps(content, indent=1) + "\n")
    stream = Stream()
    try:
        status = _bake(request, file, metadata_file, progress, stream)
        if status and any(EXPORT_FAULT.search(text) for text in stream.said()):
            progress.note("the engine failed to export what was built; trying once more")
            stream.forget_failures()
            status = _bake(request, file, metadata_file, progress, stream)
        if status:
            raise CommandError(_engine_gone(request) + explain_failure(request, stream, status))
        return stream, json.loads(metadata_file.read_text()) if metadata_file.exists() else {}
    except ValueError as error:
        raise ResultError(f"{metadata_file}: buildx wrote what is not JSON: {error}") from None
    finally:
        metadata_file.unlink(missing_ok=True)


def write_inputs(request: BakeRequest) -> None:
    """Write the Dockerfiles, and remove what builds before left of these targets. Raises ConfigError."""
    try:
        request.options.context.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{request.folder}: cannot be written: {error.strerror}") from None
    for target in request.targets:
        write_text(request.folder / target.id / "Dockerfile", request.dockerfiles[target.id].text)
        (request.folder / target.id / "result.json").unlink(missing_ok=True)
        layout = bake.layout_folder(target, request.folder, request.options.output)
        if layout and not request.stage:
            _remove(layout)


def _remove(layout: Path) -> None:
    """Remove the layout of a build before, which BuildKit would add to. Raises ConfigError for another folder."""
    if not layout.is_dir():
        return
    if other := sorted(path.name for path in layout.iterdir() if path.name not in LAYOUT):
        raise ConfigError(f"{layout}: has {other[0]}, so it is no OCI layout; remove it, or choose another folder")
    shutil.rmtree(layout)


def _bake(request: BakeRequest, file: Path, metadata_file: Path, progress: Progress, stream: Stream) -> int:
    command = ["docker", "buildx", "bake", "--file", str(file)]
    command += ["--progress", "rawjson", "--metadata-file", str(metadata_file)]
    if request.builder:
        command += ["--builder", request.builder]
    environ = {
        # buildx would make it an argument of the build, and steps would depend on it; see `packing`.
        **{name: value for name, value in os.environ.items() if name != bake.VARIABLE},
        **request.engine.environment,
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",  # an index of runnable platforms only
        "BUILDX_BAKE_ENTITLEMENTS_FS": "0",  # we wrote the bake file, and the user named the folders in it
    }
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stderr
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while chunk := os.read(process.stderr.fileno(), 1 << 16):
            for event in stream.feed(decoder.decode(chunk)):
                progress.update(*event)
        return process.wait()
    finally:
        stream.close()
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End buildx if it still runs, so that BuildKit cancels the build."""
    for how, patience in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _engine_gone(request: BakeRequest) -> str:
    """Whether the engine has stopped: what buildx says then does not tell, and steps that it took along look failed."""
    if request.builder:
        return ""
    why = engine_flaw(request.engine.host, flags=() if request.engine.origin == "context" else None)
    return f"the engine at {request.engine.host} stopped during the build ({why}); start it again\n" if why else ""


def explain_failure(request: BakeRequest, stream: Stream, status: int) -> str:
    """What failed, in which component, with its last lines, and how to see it again."""
    failed = [v for v in stream.failed() if v.parts]
    if not failed:
        said = stream.said()[-ERROR_LINES:] or ["it said nothing; was it killed?"]
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        return f"docker buildx bake {how}:\n" + "\n".join(said)
    return "\n\n".join(_explain_step(request, v) for v in failed[:3])


def _explain_step(request: BakeRequest, vertex: Vertex) -> str:
    target = next((t for t in request.targets if t.bake_name == vertex.target), None)
    target = target or next(t for t in request.targets if vertex.stage in request.dockerfiles[t.id].stages)
    component = component_of(vertex.stage, request.components)
    lines = list(vertex.log)[-ERROR_LINES:]
    return "\n".join(
        [
            f"{target.id}: {'component ' + component if component else 'stage ' + vertex.stage}: a step failed",
            f"  step    {vertex.title}",
            f"  reason  {vertex.error.strip().splitlines()[-1]}",
            *([f"  its last {len(lines)} lines:", *(f"    {line}" for line in lines)] if lines else []),
            f"  again   imagebuild build {target.id} {shlex.join([*request.again, '--stage', vertex.stage])} -v",
        ]
    )


def component_of(stage: str, components: frozenset[str]) -> str | None:
    """The component that a stage belongs to: its own name, or the name before `-key`, `-source` or `-source-<arch>`."""
    for name in (stage, re.sub(r"-(key|source(-(amd64|arm64))?)$", "", stage)):
        if name in components:
            return name
    return None


def _result(
    target: Target, request: BakeRequest, stream: Stream, metadata: Mapping[str, Any], seconds: float
) -> BuildResult:
    stages = request.dockerfiles[target.id].stages
    keys = {t.bake_name: request.dockerfiles[t.id].stages for t in request.targets}
    owners = {stage: c for stage in stages if (c := component_of(stage, request.components))}
    steps = tuple(
        s
        for s in stream.steps(owners)
        # A shared step is reported under the name of one of its targets.
        if s.stage in stages and keys.get(s.target, stages).get(s.stage) == stages[s.stage]
    )
    built = metadata.get(target.bake_name) or {}
    return BuildResult(
        target=target.id,
        digest=built.get("containerimage.digest"),
        tags=(target.name,),
        platforms=bake.platforms_of(target, request.options.platforms),
        size_bytes=None,
        seconds=round(seconds, 3),
        steps=steps,
        replaced=bake.replaced_contexts(request.options),
    )
