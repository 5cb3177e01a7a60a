"""Run `docker buildx bake`: read its events, show progress, and take the images out of BuildKit."""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from imagebuild import oci
from imagebuild.build import bake
from imagebuild.core.console import err, format_duration, format_size
from imagebuild.core.errors import CommandError, ConfigError, ResultError, suggestion
from imagebuild.core.files import write_text
from imagebuild.core.run import end_program, start_program
from imagebuild.oci.engine import Endpoint, compressed_size, engine_flaw
from imagebuild.project import plan
from imagebuild.project.load import Project
from imagebuild.project.matrix import Target
from imagebuild.project.records import BuildResult, Step
from imagebuild.render.renderer import Dockerfile

STEP_NAME = re.compile(
    r"^\[(?:(?P<target>(?!linux/)\S+) )?(?:(?P<platform>linux/\S+) )?(?P<stage>[\w.-]+) +(?P<n>\d+/\d+)\] "
    r"(?P<text>(?!LINK ).*)",  # the second half of COPY --link, which is no step of the Dockerfile
    re.DOTALL,
)
FINAL_STAGE = "image"
BLOB = re.compile(r"^(extracting )?sha256:")
"""Name of a progress bar of a layer that comes from a registry. Steps that run have no bars, only output."""
LOOKED_UP_S = 0.001
"""A `RUN` step that took less did not run, as no container starts in that time: BuildKit looked it up, and then took
the result of an equal step of another target, without reporting so. A `COPY` may be nearly as fast: 2 ms were seen."""
LOG_LINES = 400
"""Lines of output kept for each step."""
ERROR_LINES = 25
LAYOUT_ENTRIES = ("blobs", "index.json", "ingest", "oci-layout")
"""What may be in an OCI layout, and in one whose writing was interrupted."""
# Faults of exporting, after which all steps are in the cache: containerd's garbage collector was faster than the export
# (https://github.com/containerd/containerd/issues/10835), or a dozen large images at once took it too long.
EXPORT_FAULT = re.compile(r"parent snapshot \S+ does not exist|DeadlineExceeded: context deadline exceeded")


@dataclass
class Vertex:
    """Hold what the events have reported about a node of BuildKit's graph."""

    digest: str
    name: str = ""
    started: float | None = None
    """Seconds since 1970."""
    completed: float | None = None
    cached: bool = False
    pulled: bool = False
    """Did layers of it come from a registry? BuildKit then reports a step as if it had run."""
    error: str = ""
    inputs: tuple[str, ...] = ()
    """Digests of the vertices that it starts from; a source has none."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    partial: str = ""
    """Start of a line of output whose end has not come yet."""

    @property
    def parts(self) -> re.Match[str] | None:
        """Return the parts of a step's name, or None for what is not a step of a Dockerfile."""
        return STEP_NAME.match(self.name)

    @property
    def target(self) -> str:
        """Return the bake name of the target that the step is reported for, or an empty text."""
        return (self.parts["target"] or "") if self.parts else ""

    @property
    def stage(self) -> str:
        """Return the step's stage, or an empty text."""
        return self.parts["stage"] if self.parts else ""

    @property
    def seconds(self) -> float:
        """Return how long it took; 0 if it has not completed."""
        return max(0.0, (self.completed or 0) - (self.started or 0)) if self.completed and self.started else 0.0

    @property
    def is_source(self) -> bool:
        """Tell the source of an `ADD`, looked up in every build, from the step, which is the vertex that copies it."""
        return not self.inputs and bool(self.parts) and self.name.partition("] ")[2].startswith("ADD ")

    @property
    def looked_up(self) -> bool:
        """Return whether a `RUN` step ended before its program could have started."""
        is_run = bool(self.parts and self.parts["text"].startswith("RUN "))
        return is_run and self.seconds < LOOKED_UP_S and not self.error

    @property
    def cancelled(self) -> bool:
        """Return whether it ended only because the build, or the target that wanted it, ended."""
        return "context canceled" in self.error

    @property
    def title(self) -> str:
        """Return one line: the stage, its platform, and the start of the command."""
        if not self.parts:
            return self.name.splitlines()[0][:100] if self.name else self.digest
        # Targets share all stages but the last, so only there the target's name matters.
        target = self.target if self.stage == FINAL_STAGE else ""
        words = [target, self.stage, f"({self.parts['platform']})" if self.parts["platform"] else ""]
        return f"{' '.join(filter(None, words))} {self.parts['n']}: {shorten_command(self.parts['text'])}"


def shorten_command(command: str) -> str:
    """Shorten a command to one line without its mounts."""
    text = re.sub(r"--mount=\S+\s*", "", command.replace("\\\n", " "))
    return " ".join(text.split())[:80]


class EventStream:
    """Read buildx's events as they come. Newer versions write one JSON object a line, older ones indent them."""

    def __init__(self) -> None:
        self.vertices: dict[str, Vertex] = {}
        self.messages: list[str] = []
        """Lines that are not events, such as buildx's own errors."""
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
        """Take the end of the stream: what has not been read yet is a message."""
        self.messages += [line for line in self._buffer.splitlines() if line.strip()]
        self._buffer = ""

    def steps(self, components: Mapping[str, str]) -> tuple[Step, ...]:
        """Return the steps that ran or were cached, each once, in the order in which they started.

        `components` is stage → component. The time of an `ADD` includes the time in which its source was fetched. A
        step that was cancelled did not run: in a build that succeeds, BuildKit cancels a step while it looks up its
        inputs, and takes what an equal step of another target makes.
        """
        sources = {v.digest: v.seconds for v in self.vertices.values() if v.is_source}
        done = [v for v in self.vertices.values() if v.parts and (v.completed or v.cached) and v.digest not in sources]
        return tuple(
            Step(
                name=" ".join(v.name.split())[:200],
                target=v.target,
                stage=v.stage,
                component=components.get(v.stage),
                cached=v.cached or v.cancelled,
                seconds=round(v.seconds + sum(sources.get(i, 0) for i in v.inputs if not v.cached), 3),
                error=None if v.cancelled else v.error or None,
            )
            for v in sorted(done, key=lambda v: v.started or 0)
        )

    def failed(self) -> list[Vertex]:
        """Return what failed by itself, not because something else did."""
        return [v for v in self.vertices.values() if v.error and not v.cancelled]

    def failure_messages(self) -> list[str]:
        """Return the errors outside steps, and the lines that are not events."""
        return [v.error for v in self.failed() if not v.parts] + [m for m in self.messages if m.strip()]

    def forget_failures(self) -> None:
        """Prepare for the same build's second attempt; what ran stays known as having run."""
        self.vertices = {digest: v for digest, v in self.vertices.items() if not v.error}
        self.messages.clear()

    def _event(self, event: Mapping[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        for status in event.get("statuses") or ():
            if BLOB.match(status.get("id") or ""):
                self._vertex(status["vertex"]).pulled = True
        for report in event.get("vertexes") or ():
            yield from self._update(self._vertex(report["digest"]), report)
        for log in event.get("logs") or ():
            vertex = self._vertex(log["vertex"])
            try:
                text = base64.b64decode(log.get("data") or "").decode("utf-8", "replace")
            except binascii.Error:
                continue
            *lines, vertex.partial = (vertex.partial + text).split("\n")
            for line in lines:
                vertex.log.append(line)
                yield "log", vertex, line

    def _vertex(self, digest: str) -> Vertex:
        return self.vertices.setdefault(digest, Vertex(digest))

    def _update(self, vertex: Vertex, report: Mapping[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        vertex.name = report.get("name") or vertex.name
        vertex.inputs = tuple(report.get("inputs") or vertex.inputs)
        # Two targets that share a step each report it; it was cached only if it never ran.
        ran_before = vertex.completed is not None and not vertex.cached and not vertex.error
        started, completed = _parse_time(report.get("started")), _parse_time(report.get("completed"))
        if started and vertex.started is None:
            vertex.started = started
            yield "started", vertex, ""
        # A source is completed once when it is identified, and may fail when it is fetched.
        if completed and (not ran_before or report.get("error")):
            # A step that was looked up, or cancelled for one target, may then run for another that wants it.
            vertex.started = started or vertex.started
            vertex.completed, vertex.error = completed, report.get("error") or ""
            vertex.cached = bool(report.get("cached") or vertex.pulled or vertex.looked_up)
            if vertex.partial:
                vertex.log.append(vertex.partial)
                vertex.partial = ""
            yield "completed", vertex, ""
        elif completed and started and vertex.is_source and completed - started > vertex.seconds:
            vertex.started, vertex.completed = started, completed  # the second report is of fetching it


def _parse_time(text: str | None) -> float | None:
    """Return seconds since 1970; BuildKit writes nanoseconds, of which Python reads six digits."""
    if not text or text.startswith("0001"):
        return None
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")).timestamp()


class Progress(Protocol):
    """Show a build while it runs."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def note(self, text: str) -> None:
        """Show something that happens before or after BuildKit's steps."""

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        """Show an event of `EventStream.feed`."""


class PlainProgress:
    """Print one line for each step as it ends, for logs; under GitHub Actions, foldable groups with its output."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.groups = os.environ.get("GITHUB_ACTIONS") == "true"
        self.began = time.monotonic()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        err.print(f"{time.monotonic() - self.began:7.1f}  {escape(text)}")

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        """Print a step that has completed; with --verbose, every line of output too."""
        if kind == "log" and self.verbose and not self.groups:
            self.note(f"{vertex.stage or 'build'} | {line}")
        if kind != "completed" or not vertex.parts:
            return
        if vertex.error:
            state = "cancelled" if vertex.cancelled else "failed"
        else:
            state = "cached" if vertex.cached else format_duration(vertex.seconds)
        if self.groups and vertex.log:
            sys.stderr.write("\n".join([f"::group::{vertex.title} ({state})", *vertex.log, "::endgroup::\n"]))
        else:
            self.note(f"{vertex.title} ({state})")


class LiveProgress:
    """Redraw a display: counts, and the steps that run with their last line of output."""

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
        """Show the text until the first step is done."""
        self.phase = text

    def update(self, kind: str, vertex: Vertex, line: str) -> None:  # noqa: ARG002 - part of the protocol
        """Take note of a step that runs or is done; print it once it has run."""
        if kind == "started":
            self.running[vertex.digest] = vertex
        elif kind == "completed":
            self.running.pop(vertex.digest, None)
            if vertex.parts:
                self.done[vertex.digest] = vertex
                if not vertex.cached and not vertex.error:
                    self.live.console.print(_one_line(format_duration(vertex.seconds), vertex.title, "green"))

    def _draw(self) -> Group:
        cached = sum(v.cached for v in self.done.values())
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(f"{format_duration(time.monotonic() - self.began):>10}  ", "bold")
        head.append(f"{len(self.done) - cached} steps run, {cached} cached  ")
        head.append(", ".join(self.targets), "dim")
        lines = [head]
        if self.phase and not self.done:
            lines.append(Text(self.phase, "dim", no_wrap=True, overflow="ellipsis"))
        now = time.time()
        for vertex in [v for v in self.running.values() if v.name][-8:]:
            seconds = max(0.0, now - (vertex.started or now))
            lines.append(_one_line(format_duration(seconds), vertex.title, "cyan"))
            if vertex.log:
                lines.append(_one_line("", vertex.log[-1], "dim"))
        return Group(*lines)


def _one_line(duration: str, text: str, style: str) -> Text:
    return Text(f"{duration:>10}  {text}", style, no_wrap=True, overflow="ellipsis")


def show_progress(targets: Iterable[str], *, verbose: bool) -> Progress:
    """Return a redrawn display on a terminal, plain lines elsewhere or when all output is wanted."""
    return LiveProgress(targets) if err.is_terminal and not verbose else PlainProgress(verbose=verbose)


@dataclass(frozen=True)
class BakeRequest:
    """Say what to build at once and how; paths are on this machine."""

    targets: tuple[Target, ...]
    dockerfiles: Mapping[str, Dockerfile]
    folder: Path
    """Folder for Dockerfiles, the bake file and results."""
    options: bake.BakeOptions
    engine: Endpoint
    builder: str | None = None
    stage: str | None = None
    """Build only this stage, into the cache."""
    components: frozenset[str] = frozenset()
    """Names of all components of the project."""
    repeat_options: tuple[str, ...] = ()
    """Options with which a command repeats a step of this build."""


@dataclass(frozen=True)
class BuildOrigin:
    """Hold what the results of a build say about where they come from, and what exporting them needs."""

    project: Project
    revision: str | None
    """Commit of the project."""
    started: datetime
    progress: Progress
    connect: Callable[[str], oci.Registry] = lambda host: oci.connect_registry(host)  # noqa: PLW0108 - it is imported when it is called
    """Host → registry."""


def replaced_sources(project: Project, targets: Sequence[Target], given: Sequence[str]) -> dict[str, str]:
    """Turn `["ucx=/src/ucx"]` into stage → folder that replaces it. Raises ConfigError for what cannot be replaced."""
    names = {name for name, component in project.components.items() if component.model.git}
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
    """Build all targets at once, and return their results, which `export_images` completes.

    Raises CommandError if a step or buildx itself fails, ResultError if buildx's metadata cannot be read.
    """
    began = time.monotonic()
    write_inputs(request)
    content = bake.bake_file(request.targets, request.folder, request.options)
    if request.stage:
        for entry in content["target"].values():
            entry |= {"target": request.stage, "output": ["type=cacheonly"], "tags": []}
    stream, metadata = execute_bake(request, content, progress)
    seconds = round(time.monotonic() - began, 3)
    keys = {target.bake_name: request.dockerfiles[target.id].stages for target in request.targets}
    results = []
    for target in request.targets:
        stages = keys[target.bake_name]
        owners = {stage: name for stage in stages if (name := component_of(stage, request.components))}
        steps = tuple(
            step
            for step in stream.steps(owners)
            # A step that targets share is reported under the name of one of them.
            if step.stage in stages and keys.get(step.target, stages).get(step.stage) == stages[step.stage]
        )
        results.append(
            BuildResult(
                target=target.id,
                digest=(metadata.get(target.bake_name) or {}).get("containerimage.digest"),
                tags=(target.name,),
                platforms=bake.platforms_of(target, request.options.platforms),
                size_bytes=None,
                seconds=seconds,
                steps=steps,
                replaced=bake.replaced_contexts(request.options),
            )
        )
    return tuple(results)


def execute_bake(
    request: BakeRequest, content: Mapping[str, Any], progress: Progress, name: str = "bake.json"
) -> tuple[EventStream, dict[str, Any]]:
    """Run a bake file; return the events and buildx's metadata. Raises as `run_bake` does."""
    file, metadata_file = request.folder / name, request.folder / "metadata.json"
    write_text(file, json.dumps(content, indent=1) + "\n")
    stream = EventStream()
    try:
        status = _run_buildx(request, file, metadata_file, progress, stream)
        if status and any(EXPORT_FAULT.search(text) for text in stream.failure_messages()):
            progress.note("the engine failed to export what was built; trying once more")
            stream.forget_failures()
            status = _run_buildx(request, file, metadata_file, progress, stream)
        if status:
            raise CommandError(_explain_stopped_engine(request) + explain_failure(request, stream, status))
        return stream, json.loads(metadata_file.read_text()) if metadata_file.exists() else {}
    except ValueError as error:
        raise ResultError(f"{metadata_file}: is not JSON, though buildx wrote it: {error}") from None
    finally:
        metadata_file.unlink(missing_ok=True)


def write_inputs(request: BakeRequest) -> None:
    """Write the Dockerfiles, and remove what earlier builds of these targets left.

    Raises ConfigError if the folder cannot be written, or a layout's folder has something else in it.
    """
    try:
        request.options.context.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{request.folder}: cannot be written: {error.strerror}") from None
    for target in request.targets:
        write_text(request.folder / target.id / "Dockerfile", request.dockerfiles[target.id].text)
        (request.folder / target.id / "result.json").unlink(missing_ok=True)
        layout = bake.layout_folder(target, request.folder, request.options.output)
        if not layout or request.stage or not layout.is_dir():
            continue
        # BuildKit would add to what is there.
        if other := sorted(path.name for path in layout.iterdir() if path.name not in LAYOUT_ENTRIES):
            raise ConfigError(
                f"{layout}: has {other[0]}, so it is no OCI layout; remove the folder, or choose another one"
            )
        shutil.rmtree(layout)


def _run_buildx(request: BakeRequest, file: Path, metadata_file: Path, progress: Progress, stream: EventStream) -> int:
    """Run `docker buildx bake` to its end, also when interrupted; return its exit status."""
    command = ["docker", "buildx", "bake", "--file", str(file)]
    command += ["--progress", "rawjson", "--metadata-file", str(metadata_file)]
    if request.builder:
        command += ["--builder", request.builder]
    environ = {
        # buildx would make it a build argument, and so a part of every step's cache key; see `LayerFormat`.
        **{name: value for name, value in os.environ.items() if name != bake.EPOCH_VARIABLE},
        **request.engine.environment,
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",  # an index of runnable platforms only
        "BUILDX_BAKE_ENTITLEMENTS_FS": "0",  # we wrote the bake file, and the user named the folders in it
    }
    process = start_program(command, environ, output=subprocess.DEVNULL, errors=subprocess.PIPE)
    assert process.stderr
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while chunk := os.read(process.stderr.fileno(), 1 << 16):
            for event in stream.feed(decoder.decode(chunk)):
                progress.update(*event)
        return process.wait()
    finally:
        stream.close()
        end_program(process, signal.SIGINT, patience_s=15)  # so that BuildKit cancels the build


def _explain_stopped_engine(request: BakeRequest) -> str:
    """Return a line if the engine has stopped: buildx does not say so, and its steps look as if they had failed."""
    if request.builder:
        return ""
    flaw = engine_flaw(request.engine.host, flags=() if request.engine.origin == "context" else None)
    return f"the engine at {request.engine.host} stopped during the build ({flaw}); start it again\n" if flaw else ""


def explain_failure(request: BakeRequest, stream: EventStream, status: int) -> str:
    """Say what failed, in which component, with its last lines, and how to see it again."""
    failed = [v for v in stream.failed() if v.parts]
    if failed:
        return "\n\n".join(_explain_step(request, v) for v in failed[:3])
    lines = stream.failure_messages()[-ERROR_LINES:] or ["it printed nothing; was it killed?"]
    ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    return f"docker buildx bake {ended}:\n" + "\n".join(lines)


def _explain_step(request: BakeRequest, vertex: Vertex) -> str:
    target = next((t for t in request.targets if t.bake_name == vertex.target), None)
    target = target or next(t for t in request.targets if vertex.stage in request.dockerfiles[t.id].stages)
    component = component_of(vertex.stage, request.components)
    lines = list(vertex.log)[-ERROR_LINES:]
    options = shlex.join([*request.repeat_options, "--stage", vertex.stage])
    return "\n".join(
        [
            f"{target.id}: {'component ' + component if component else 'stage ' + vertex.stage}: a step failed",
            f"  step    {vertex.title}",
            f"  reason  {vertex.error.strip().splitlines()[-1]}",
            *([f"  its last {len(lines)} lines:", *(f"    {line}" for line in lines)] if lines else []),
            f"  again   imagebuild build {target.id} {options} -v",
        ]
    )


def component_of(stage: str, components: frozenset[str]) -> str | None:
    """Return the component of a stage: the stage's name, or that without `-key`, `-source` or `-source-<arch>`."""
    for name in (stage, re.sub(r"-(key|source(-(amd64|arm64))?)$", "", stage)):
        if name in components:
            return name
    return None


def export_images(request: BakeRequest, results: Sequence[BuildResult], origin: BuildOrigin) -> list[BuildResult]:
    """Complete the results of targets, push what is to be pushed, and write each `result.json`.

    Raises CommandError if a registry refuses, ResultError if a layout cannot be read. Targets that were exported until
    then have their `result.json`.
    """
    exported = []
    output = "cacheonly" if request.stage else request.options.output
    for target, built in zip(request.targets, results, strict=True):
        text = request.dockerfiles[target.id].text
        result = built.model_copy(
            update={
                "revision": origin.revision,
                "dockerfile": hashlib.sha256(text.encode()).hexdigest(),
                "builder": request.builder or request.engine.host,
                "started": f"{origin.started.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
            }
        )
        layout = bake.layout_folder(target, request.folder, output)
        if layout:
            result = _read_layout(result, layout)
        if layout and output == "push":
            result = _push(result, layout, target, origin)
            shutil.rmtree(layout)
        if output == "load":
            size = compressed_size(request.engine, result.tags[0])
            result = result.model_copy(update={"size_bytes": size})
        write_text(request.folder / result.target / "result.json", result.model_dump_json(indent=1) + "\n")
        exported.append(result)
    return exported


def _read_layout(result: BuildResult, layout: Path) -> BuildResult:
    """Add the digests of the platforms' images, and the size of the first one."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        images = oci.images_in(layout, Path(folder))
    manifests = {image.platform: image.digest for image in images}
    if missing := [platform for platform in result.platforms if not manifests.get(platform)]:
        raise ResultError(f"{layout}: BuildKit wrote no image for {', '.join(missing)}")
    size = sum(layer.size for layer in images[0].layers)
    return result.model_copy(update={"manifests": manifests, "size_bytes": size})


def _push(result: BuildResult, layout: Path, target: Target, origin: BuildOrigin) -> BuildResult:
    """Push an image to the staging repository of its target, with one tag that keeps it there."""
    staging = oci.parse_reference(plan.repository_name(origin.project, target.image))
    if not result.digest:
        raise ResultError(f"{layout}: buildx's metadata has no digest of the image")
    origin.progress.note(f"pushing {target.id} to {staging.name}")
    tag = plan.staged_tag(result.digest, datetime.now(UTC))
    moved = oci.push_image(layout, result.digest, origin.connect(staging.host), staging.repository, tag)
    origin.progress.note(f"pushed {target.id}: {moved['blobs']} blobs, {format_size(moved['bytes'])}")
    return result.model_copy(update={"repository": staging.name, "tags": (f"{staging.name}:{tag}",)})
