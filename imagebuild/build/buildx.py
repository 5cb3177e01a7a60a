"""Run `docker buildx bake`: read its events, show the progress, and export the images from BuildKit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table

from imagebuild.build import bake
from imagebuild.build.bake import BuildRun
from imagebuild.build.folder import BuildLog, check_layout
from imagebuild.build.nodes import BUILDX, lost_nodes
from imagebuild.core.console import SHOWN_ITEMS, Progress, err, format_duration, format_size, styled
from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, ResultError, plural, suggestion
from imagebuild.core.files import read_text, write_bytes, write_text
from imagebuild.core.run import execute
from imagebuild.oci.engine import Endpoint, connect_engine, engine_flaw
from imagebuild.oci.image import PlatformImage, image_of_client, images_in
from imagebuild.oci.layout import Layout
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Repository, connect_registry, push_image
from imagebuild.project import plan
from imagebuild.project.plan import Target
from imagebuild.project.project import Project

if TYPE_CHECKING:
    from imagebuild.project.records import BuildResult, Step

STEP_NAME = re.compile(
    r"^\[(?:(?P<target>(?!linux/)\S+) )?(?:(?P<platform>linux/\S+) )?"
    rf"(?P<stage>(?!{bake.FETCHED})[\w.-]+) +(?P<n>\d+/\d+)\] "  # does not match bake targets of fetched files
    r"(?P<text>(?!LINK ).*)",  # does not match the second vertex of COPY --link
    re.DOTALL,
)
BLOB = re.compile(r"^(extracting )?sha256:")
"""Matches the id of a progress bar of a layer that is pulled from a registry. Steps that run have no progress bars."""
LOCAL_RESULT = "local.json"
"""Name of the result of a build that was not pushed, if `result.json` contains an earlier push."""
ASK_S = 30.0
"""Time after which the nodes of a builder are asked whether they still answer, in seconds."""
CLOCK_S = 120
"""Difference of two clocks that is reported if a build fails, in seconds."""
ERROR_LINES = 25
"""Number of last lines of each step's output to keep. They are shown if the step fails."""
# Errors of an export that is worth repeating, as all steps are in the cache. Either containerd's garbage collector
# deleted a snapshot before the export (https://github.com/containerd/containerd/issues/10835), or the export of large
# images exceeded a time limit of containerd or of buildx's session.
EXPORT_FAULT = re.compile(r"parent snapshot \S+ does not exist|DeadlineExceeded: .*context deadline exceeded")


@dataclass
class Vertex:
    """A node of BuildKit's graph, with everything that buildx's events have reported about the node so far."""

    digest: str
    name: str = ""
    started: float | None = None
    """Time at which the vertex started, in seconds since 1970."""
    completed: float | None = None
    cached: bool = False
    pulled: bool = False
    """Whether layers of the vertex were pulled from a registry. If so, BuildKit does not report the step as cached."""
    error: str = ""
    inputs: tuple[str, ...] = ()
    """Digests of the vertices that this vertex depends on; empty for a vertex that fetches a source."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=ERROR_LINES))
    partial: str = ""
    """Last line of the output so far, if the end of the line has not arrived yet."""

    @property
    def parts(self) -> dict[str, str]:
        """The parts of a step's name: target, platform, stage, number and text. Empty if the vertex is not a step."""
        match = STEP_NAME.match(self.name)
        return match.groupdict("") if match else {}

    @property
    def stage(self) -> str:
        return self.parts.get("stage", "")

    @property
    def seconds(self) -> float:
        return max(0.0, (self.completed or 0) - (self.started or self.completed or 0))

    @property
    def cancelled(self) -> bool:
        """Whether BuildKit cancelled the vertex because the build, or the target that needed the vertex, ended."""
        return "context canceled" in self.error

    @property
    def title(self) -> str:
        """One line that shows the stage, its platform, and the beginning of the command."""
        if not (parts := self.parts):
            return self.name.partition("\n")[0][:100] or self.digest
        # Targets share all stages except the last one, so the target's name is shown only there.
        target = parts["target"] if self.stage == bake.FINAL_STAGE else ""
        platform = parts["platform"] and f"({parts['platform']})"
        command = re.sub(r"--mount=\S+\s*", "", parts["text"].replace("\\\n", " "))
        where = " ".join(filter(None, (target, self.stage, platform, parts["n"])))
        return f"{where}: {' '.join(command.split())[:80]}"


class EventStream:
    """The parser of buildx's events. New buildx versions write an event as one line, old versions as indented JSON."""

    def __init__(self, builder: str = "") -> None:
        self.vertices: dict[str, Vertex] = {}
        self._builder = builder
        """Name that makes the same vertex of several builders different vertices; empty for a single builder."""
        self.messages: list[str] = []
        """Lines that are not events, such as errors of buildx itself."""
        self._begun = ""
        """Lines so far of an event in indented JSON whose end has not arrived yet."""

    def feed(self, line: str) -> Iterator[tuple[str, Vertex, str]]:
        """Parse the next line. Yield (kind, vertex, line of output); the kind is `started`, `completed` or `log`."""
        if not self._begun and not line.startswith("{"):
            self.messages.append(line)
            return
        self._begun += line
        if line == "{" or line.startswith(" "):
            return
        text, self._begun = self._begun, ""
        try:
            event = json.loads(text)
        except ValueError:  # the event is incomplete, because buildx was killed
            self.messages.append(text)
            return
        for status in event.get("statuses") or ():
            if BLOB.match(status.get("id") or ""):
                self._vertex(status["vertex"]).pulled = True
        for report in event.get("vertexes") or ():
            yield from self._update(self._vertex(report["digest"]), report)
        for log in event.get("logs") or ():
            vertex = self._vertex(log["vertex"])
            output = base64.b64decode(log.get("data") or "").decode("utf-8", "replace")
            *lines, vertex.partial = (vertex.partial + output).split("\n")
            for whole in lines:
                vertex.log.append(whole)
                yield "log", vertex, whole

    def steps(self, components: Container[str]) -> tuple[Step, ...]:
        """Return all steps that ran or were cached, without duplicates, in the order in which the steps started.

        A cancelled step counts as cached: in a successful build, BuildKit cancels a step only if an identical step of
        another target provides the result."""
        from imagebuild.project.records import Step  # noqa: PLC0415 - no build needs it before its end

        return tuple(
            Step(
                name=" ".join(v.name.split())[:200],
                target=v.parts["target"],
                stage=v.stage,
                component=component_of(v.stage, components),
                cached=v.cached or v.cancelled,
                seconds=round(v.seconds, 3),
                error=None if v.cancelled else v.error or None,
            )
            for v in sorted(self.vertices.values(), key=lambda v: v.started or 0)
            # A vertex without inputs only looks up the source of an ADD. Another vertex, the step, copies the files.
            if v.parts and (v.completed or v.cached) and (v.inputs or not v.parts["text"].startswith("ADD "))
        )

    def failed(self) -> list[Vertex]:
        """Return the vertices that failed, without those that were cancelled because another vertex failed."""
        return [v for v in self.vertices.values() if v.error and not v.cancelled]

    def failure_messages(self) -> list[str]:
        """Return the errors of vertices that are not steps, and the lines that are not events."""
        return [v.error for v in self.failed() if not v.parts] + [m for m in self.messages if m.strip()]

    def _vertex(self, digest: str) -> Vertex:
        return self.vertices.setdefault(digest, Vertex(f"{self._builder}{digest}"))

    def _update(self, vertex: Vertex, report: Mapping[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        vertex.name = report.get("name") or vertex.name
        vertex.inputs = tuple(report.get("inputs") or vertex.inputs)
        # A step that two targets share is reported twice. The step was cached only if neither report says that it ran.
        ran_before = vertex.completed is not None and not vertex.cached and not vertex.error
        # BuildKit writes a missing time as a time in the year 1.
        times = (report.get(name) or "0001" for name in ("started", "completed"))
        started, completed = (None if t.startswith("0001") else datetime.fromisoformat(t).timestamp() for t in times)
        if started and vertex.started is None:
            vertex.started = started
            yield "started", vertex, ""
        # BuildKit reports a source as completed when the digest is known. The fetch of the source can still fail later.
        if completed and (not ran_before or report.get("error")):
            # A step that was cancelled for one target may run later for another target.
            vertex.started = started or vertex.started
            vertex.completed, vertex.error = completed, report.get("error") or ""
            vertex.cached = bool(report.get("cached") or vertex.pulled)
            if vertex.partial:
                vertex.log.append(vertex.partial)
                yield "log", vertex, vertex.partial
                vertex.partial = ""
            yield "completed", vertex, ""


@dataclass
class TargetBar:
    """The progress of one target."""

    target: str
    stages: Mapping[str, str]
    """Maps each stage to its key. Targets share the steps of a stage that has the same key."""
    total: int
    """Number of steps that BuildKit runs for the target, for all platforms."""
    done: set[str] = field(default_factory=set)
    """Digests of the steps that ended."""
    running: dict[str, str] = field(default_factory=dict)
    """Maps the digest of each running step to its title."""

    @property
    def ended(self) -> int:
        return min(len(self.done), self.total)


class BuildProgress(Progress):
    """Progress of a build: a terminal shows one bar for each target, with the running step."""

    def __init__(self, bars: Mapping[str, TargetBar] | None = None, *, verbose: bool = False) -> None:
        self._bars = bars or {}
        """Maps the name of each bake target to its bar."""
        super().__init__(live=not verbose)
        self.log: BuildLog | None = None
        self.lock = threading.Lock()  # several builders report their events at the same time
        self._verbose = verbose
        self._cached: dict[str, bool] = {}
        """Maps the digest of each finished step to whether it was cached."""

    def note(self, text: str) -> None:
        super().note(text)
        if self.log:
            self.log.write(text)

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        """Show an event of `EventStream.feed`, and log it. On a terminal, cached steps are not listed."""
        if self.log and kind != "started":
            done = "cached" if vertex.cached else format_duration(vertex.seconds)
            ended = f"{vertex.title}: {'left to another target' if vertex.cancelled else vertex.error or done}"
            self.log.write(line if kind == "log" else ended, vertex.stage or "build")
        if kind == "log":
            if self._verbose:
                self.note(f"{vertex.stage or 'build'} | {line}")
            elif vertex.digest in self.running:
                self.advance(vertex.digest, line)
            return
        if vertex.digest not in self.running:
            self.begin(vertex.digest, vertex.title)
        bars = self._bars_of(vertex)
        for bar in bars:
            bar.running[vertex.digest] = vertex.title
        if kind == "completed":
            for bar in bars:
                bar.running.pop(vertex.digest)
            result = format_duration(vertex.seconds)
            if vertex.error:
                # A step is cancelled because another target runs the same step, or because the build failed.
                result = "" if vertex.cancelled else "failed"
            elif vertex.cached:
                result = "" if self.live else "cached"
            if vertex.parts and not vertex.error:
                self._cached[vertex.digest] = vertex.cached
                cached = sum(self._cached.values())
                self.headline = f"{len(self._cached) - cached} steps run, {cached} cached"
                for bar in bars:
                    bar.done.add(vertex.digest)
                if bars and result and not self.live:
                    ended, total = (sum(numbers) for numbers in zip(*((b.ended, b.total) for b in bars), strict=True))
                    result += f" ({ended} of {total} steps of {bars[0].target if len(bars) == 1 else 'these targets'})"
            self.end(vertex.digest, result if vertex.parts else "", good=not vertex.error)

    def _bars_of(self, vertex: Vertex) -> list[TargetBar]:
        """Return the bars of the targets that need a step. BuildKit reports a shared step for only one target."""
        owner = self._bars.get(vertex.parts.get("target", ""))
        stages = [bar.stages.get(vertex.stage) for bar in self._bars.values()]
        key = owner.stages.get(vertex.stage) if owner else next(filter(None, stages), None)
        return [bar for bar, own in zip(self._bars.values(), stages, strict=True) if own and own == key]

    def _draw(self, hidden: Collection[str] = ()) -> Group:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=12)
        table.add_column(justify="right", min_width=7)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for bar in [*self._bars.values()][:SHOWN_ITEMS]:
            table.add_row(ProgressBar(max(bar.total, 1), bar.ended), f"{bar.ended}/{bar.total}", styled(bar.target))
            for digest in [*bar.running][-1:]:
                title, activity = bar.running[digest], self.running.get(digest)
                detail = f" | {activity.detail}" if activity and activity.detail else ""
                table.add_row("", "", styled((f"{title}{detail}", "dim")))
        steps = {digest for bar in self._bars.values() for digest in [*bar.running]}
        return Group(super()._draw({*hidden, *steps}), *([table] if self._bars else []))


def replaced_sources(project: Project, stages: Container[str], given: Sequence[str]) -> dict[str, str]:
    """Return a mapping of stages to the local folders that replace them. `stages` are all stages of the build.

    `given` are texts such as `ucx=/src/ucx`. The name before `=` is a component, the name of the component's pin in the
    lock, or a requirement that the component provides: `nccl` can mean `nccl-git`. Raises ConfigError if a folder is
    empty or missing, if a name does not stand for exactly one source in git, or if a repository is of this machine."""
    models = {name: component.model for name, component in project.components.items()}
    names = {name: {name, model.pin, *model.provides} for name, model in models.items() if model.git}
    replaced = {}
    for text in given:
        name, _, folder = text.partition("=")
        path = Path(folder).expanduser().resolve()
        if not folder or not path.is_dir() or not any(path.iterdir()):
            raise ConfigError(f"--source {text}: write NAME=FOLDER, with a folder that exists and is not empty")
        found = [component for component, own in names.items() if name in own]
        used = [component for component in found if f"{component}-source" in stages]
        if len(used) != 1:
            near = "" if found else suggestion(name, names)
            problem = (
                f"the name stands for {' and '.join(used)}; select targets that use only one of these components"
                if used
                else f"no selected target has a component of this name with a source in git{near}"
            )
            raise ConfigError(f"--source {text}: {problem}")
        replaced[f"{used[0]}-source"] = str(path)
    for name, model in models.items():
        if str(model.git).startswith("file:") and (stage := f"{name}-source") in stages and stage not in replaced:
            problem = f"BuildKit cannot read a repository of this machine ({model.git})"
            raise ConfigError(f"component {name}: {problem}; add --source {name}=FOLDER, a checkout of this version")
    return replaced


def run_bake(
    run: BuildRun, progress: BuildProgress, stream: EventStream | None = None
) -> tuple[EventStream, dict[str, Any]]:
    """Build all targets in one run of buildx. Return the events of buildx, and the content of its metadata file.
    `stream`: the events of an earlier part of the build.

    Layouts of earlier builds are replaced only when the new layouts are complete. Raises ConfigError if the folder of a
    layout contains other files, CommandError if a step or buildx itself fails, ResultError if buildx's metadata cannot
    be read."""
    layouts = [layout for target in run.request.targets if (layout := run.layout_folder(target))]
    for layout in layouts:
        check_layout(layout)
        for other in (bake.new_layout(layout), bake.old_layout(layout)):  # BuildKit adds files to an existing folder
            shutil.rmtree(other, ignore_errors=True)
    try:
        write_dockerfiles(run)
        if len(run.nodes) > 1:
            built = _build_apart(run, progress, stream or EventStream())
        else:
            built = execute_bake(run, bake.bake_file(run), progress, stream=stream)
        for layout in layouts:
            with suppress(FileNotFoundError):
                layout.rename(bake.old_layout(layout))
            bake.new_layout(layout).rename(layout)
            shutil.rmtree(bake.old_layout(layout), ignore_errors=True)
        return built
    except OSError as error:
        raise ConfigError(f"{run.request.folder}: cannot be written: {error.strerror}") from None
    finally:
        for layout in layouts:
            shutil.rmtree(bake.new_layout(layout), ignore_errors=True)


def write_dockerfiles(run: BuildRun) -> None:
    """Write the Dockerfiles and the build context, to which the bake file refers. Raises ConfigError if the context
    contains files."""
    run.context.mkdir(parents=True, exist_ok=True)
    if any(run.context.iterdir()):  # COPY would find files that no commit, Dockerfile and result names
        raise ConfigError(f"{run.context}: must be empty, as builds copy nothing from it; remove its files")
    for target in run.request.targets:
        write_text(run.request.folder / target.id / "Dockerfile", run.dockerfiles[target.id].text)


def _build_apart(run: BuildRun, progress: BuildProgress, stream: EventStream) -> tuple[EventStream, dict[str, Any]]:
    """Build one platform after the other, each on its own node, and combine the images of each target.

    buildx exports no image that several nodes built. Return what `run_bake` returns, and raise the same errors."""
    request = run.request
    wanted = {target.bake_name: bake.platforms_of(target, request.platforms) for target in request.targets}
    digests: dict[tuple[str, str], str] = {}
    for platform in request.built:
        targets = tuple(target for target in request.targets if platform in target.platforms)
        part = replace(run, request=replace(request, targets=targets, platforms=(platform,)))
        progress.note(f"building for {platform}")
        _, built = execute_bake(part, bake.bake_file(part), progress, stream=stream)
        found = {
            name: about["containerimage.digest"] for name, about in built.items() if "containerimage.digest" in about
        }
        digests |= {(name, platform): digest for name, digest in found.items()}
    metadata = {}
    for target in request.targets:
        if layout := run.layout_folder(target):
            own = [(platform, digests.get((target.bake_name, platform), "")) for platform in wanted[target.bake_name]]
            digest = Layout(bake.new_layout(layout)).join(own) if len(own) > 1 else own[0][1]
            metadata[target.bake_name] = {"containerimage.digest": digest}
    return stream, metadata


def execute_bake(
    run: BuildRun, content: Mapping[str, Any], progress: BuildProgress, name: str = "bake.json",
    stream: EventStream | None = None,
) -> tuple[EventStream, dict[str, Any]]:  # fmt: skip
    """Build the targets in a bake file. `stream`: the events of an earlier part of the build. Return what `run_bake`
    returns, and raise the same errors."""
    file, metadata_file = run.own_file(name), run.own_file("metadata.json")
    write_text(file, json.dumps(content, indent=1) + "\n")
    stream = stream or EventStream()
    try:
        status = _run_buildx(run, file, metadata_file, progress, stream)
        if status and any(EXPORT_FAULT.search(text) for text in stream.failure_messages()):
            progress.note("the engine failed to export the images; trying once more")
            # Keep the events of steps that ran in the first attempt: in the second attempt, these steps are cached.
            stream.vertices = {digest: v for digest, v in stream.vertices.items() if not v.error}
            stream.messages.clear()
            status = _run_buildx(run, file, metadata_file, progress, stream)
        if status:
            failure = explain_failure(run, stream, status)
            for node in run.nodes:
                if abs(node.ahead) > CLOCK_S:
                    failure = f"{node.clock}, which can be the reason; set the clock that is wrong\n{failure}"
            # buildx does not report that the engine has stopped; it reports failed steps.
            if run.request.builder:
                failure = "\n".join([*lost_nodes(run.request.builder, run.engine), failure])
            elif flaw := engine_flaw(run.engine):
                stopped = f"the engine at {run.engine.host} stopped during the build ({flaw}); start the engine again"
                failure = f"{stopped}\n{failure}"
            if re.search("no space left on device", failure, re.IGNORECASE):
                builder = run.request.builder
                prune = f"docker buildx prune --builder {builder}" if builder else "docker buildx prune"
                where = " or ".join(map(str, run.nodes)) or f"the engine at {run.engine.host}"
                failure = f"the disk of {where} is probably full; `{prune}` removes all cached steps\n{failure}"
            raise CommandError(failure)
        return stream, json.loads(metadata_file.read_text()) if metadata_file.exists() else {}
    except ValueError as error:
        raise ResultError(f"{metadata_file}: buildx wrote invalid JSON: {error}") from None
    finally:
        metadata_file.unlink(missing_ok=True)


@dataclass
class NodeWatch:
    """The nodes of a builder during a build. buildx waits for ever if the machine of a node, or its network, hangs."""

    builder: str
    engine: Endpoint
    heard: int = -1
    """Number of lines of buildx at the last question."""
    lost: list[str] = field(default_factory=list)
    """The nodes that did not answer the last question."""

    def ask(self, heard: int) -> None:
        """If buildx printed nothing since the last call, ask all nodes. `heard` is its number of lines so far.
        Raises CommandError if a node does not answer twice in a row. A node with much work answers late."""
        silent, before = heard == self.heard, self.lost
        self.heard, self.lost = heard, lost_nodes(self.builder, self.engine) if silent else []
        if before and self.lost:
            raise CommandError("\n".join(self.lost))


def _run_buildx(run: BuildRun, file: Path, metadata_file: Path, progress: BuildProgress, stream: EventStream) -> int:
    """Run `docker buildx bake` and return its exit status. After an interrupt, wait until buildx has ended."""
    command = ["docker", "buildx", "bake", "--file", str(file)]
    command += ["--progress", "rawjson", "--metadata-file", str(metadata_file)]
    if run.request.builder:
        command += ["--builder", run.request.builder]
    environ = {
        # Unset this variable: buildx would pass it as a build argument, which is part of every step's cache key.
        "SOURCE_DATE_EPOCH": None,
        **run.engine.environment,
        **BUILDX,
        "BUILDX_BAKE_ENTITLEMENTS_FS": "0",  # do not ask whether buildx may read the user's folders
    }

    heard = 0  # number of lines of buildx

    def update(line: str) -> None:
        nonlocal heard
        heard += 1
        with progress.lock:
            for event in stream.feed(line):
                progress.update(*event)

    watch = NodeWatch(run.request.builder, run.engine) if run.request.builder else None
    try:  # with SIGINT, BuildKit cancels the build
        done = execute(
            command, env=environ, each_line=update, polite=signal.SIGINT, pause_s=ASK_S,
            each_pause=(lambda: watch.ask(heard)) if watch else None,
        )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        kept = sum(bool(v.parts and v.completed and not v.error) for v in stream.vertices.values())
        remedy = "run the same command again to go on from there"
        err.print(f"interrupted: the cache keeps the {plural(kept, 'step')} that ended; {remedy}")
        raise
    if progress.log and stream.messages:
        progress.log.write("\n".join(stream.messages), "buildx")
    assert done.status is not None, "buildx runs without a time limit"
    return done.status


def explain_failure(run: BuildRun, stream: EventStream, status: int) -> str:
    """Return an error message: for each failed step, its component, the end of its output, and how to repeat it."""
    failed = [v for v in stream.failed() if v.parts]
    if failed:
        return "\n\n".join(_explain_step(run, v) for v in failed[:3])
    silent = "buildx printed no message, so buildx was probably killed; check the free memory"
    lines = [*dict.fromkeys(stream.failure_messages()[-ERROR_LINES:])] or [silent]
    if any(re.match("ERROR: no builder .* found", line) for line in lines):
        return f"--builder {run.request.builder}: there is no such builder; `docker buildx ls` lists the builders"
    ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    return f"docker buildx bake {ended}:\n" + "\n".join(lines)


def _explain_step(run: BuildRun, vertex: Vertex) -> str:
    users = [t for t in run.request.targets if vertex.stage in run.dockerfiles[t.id].stages]
    target, *_ = [*(t for t in run.request.targets if t.bake_name == vertex.parts["target"]), *users]
    component = component_of(vertex.stage, run.project.components)
    options = shlex.join([*run.request.again, "--stage", vertex.stage])
    return "\n".join(
        [
            f"{target.id}: {'component ' + component if component else 'stage ' + vertex.stage}: a step failed",
            f"  step    {vertex.title}",
            f"  reason  {reason_of(vertex.error)}",
            *(["  the end of the output:", *(f"    {line}" for line in vertex.log)] if vertex.log else []),
            f"  again   imagebuild build {target.id} {options} -v",
        ]
    )


def reason_of(error: str) -> str:
    """Return the line of BuildKit's message that says why a step failed. A program that BuildKit called is named."""
    about, _, said = error.partition("stderr:\n" if "stderr:\n" in error else "stderr:")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    program = match[1] if (match := re.search(r"(\w+)(?: error: .*)?\s*$", about)) else "program"
    if lines:
        return f"{program}: {next((line for line in lines if line.startswith(('fatal:', 'error:'))), lines[-1])}"
    # BuildKit's message contains the whole script.
    return re.sub("process .* did not", "the step did not", about.strip().splitlines()[-1])


def component_of(stage: str, components: Container[str]) -> str | None:
    """Return the name of the component that a stage belongs to; None if the stage belongs to no component.

    The name of the stage is the name of the component, which may be followed by `-key`, `-key-2`, `-source` or
    `-source-<arch>`.
    """
    for name in (stage, re.sub(r"-(key(-\d+)?|source(-(amd64|arm64))?)$", "", stage)):
        if name in components:
            return name
    return None


def staging_repository(project: Project, target: Target) -> Repository:
    """Return the staging repository of a target: images are pushed there and verified before they are published."""
    return repository_at(plan.repository_name(project, target.image))


def repository_at(name: str) -> Repository:
    """Return the repository with a name such as `ghcr.io/acme/cache`."""
    reference = parse_reference(name)
    return connect_registry(reference.host).at(reference.repository)


def export_images(
    run: BuildRun, stream: EventStream, metadata: Mapping[str, Any], seconds: float, progress: BuildProgress
) -> list[BuildResult]:
    """Push the images if requested, write the `result.json` of each target, and return these results.

    Each image is pushed to its target's staging repository, with a tag so that the registry keeps it. `seconds` is the
    duration of the build. Raises CommandError if a registry refuses an image, ResultError if a layout cannot be read.
    """
    from imagebuild.project.records import BuildResult  # noqa: PLC0415 - no build needs it before its end

    exported, steps = [], stream.steps(run.project.components)
    stages_of = {target.bake_name: run.dockerfiles[target.id].stages for target in run.request.targets}
    for target in run.request.targets:
        text, platforms = run.dockerfiles[target.id].text, bake.platforms_of(target, run.request.platforms)
        stages = stages_of[target.bake_name]
        digest = (metadata.get(target.bake_name) or {}).get("containerimage.digest")
        more: dict[str, Any] = {"size_bytes": None, "tags": (target.name,)}
        sboms: dict[str, bytes] = {}
        if layout := run.layout_folder(target):
            with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
                images = images_in(layout, Path(folder))
                sboms = describe_images(run, target, images, progress)
            more["manifests"] = manifests = {image.platform: image.digest for image in images}
            more["compression"] = run.request.compression
            more["size_bytes"] = sum(layer.size for layer in images[0].layers)
            if missing := [platform for platform in platforms if not manifests.get(platform)]:
                raise ResultError(f"{layout}: BuildKit wrote no image for {', '.join(missing)}")
        if layout and run.request.output == "push":
            if not digest:
                raise ResultError(f"{layout}: buildx's metadata does not contain the digest of the image")
            staging = staging_repository(run.project, target)
            progress.begin(target.id, f"push of {target.id} to {staging}")
            tag = plan.staged_tag(digest, datetime.now(UTC))
            moved = push_image(Layout(layout), digest, staging, tag)
            progress.end(target.id, f"{moved['blobs']} blobs, {format_size(moved['bytes'])}")
            more |= {"repository": str(staging), "tags": (f"{staging}:{tag}",)}
            shutil.rmtree(layout)
        elif run.request.output == "load" and run.request.describe and not run.request.stage:
            with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
                found = image_of_client(connect_engine(run.engine), target.id, target.name, Path(folder))
                images = tuple(found.read(p) for p in found.platforms if p in platforms) if found else ()
                sboms = describe_images(run, target, images, progress)
        result = BuildResult(
            target=target.id,
            digest=digest,
            platforms=platforms,
            seconds=round(seconds, 3),
            # If several targets share a step, BuildKit reports the step under the name of only one target.
            steps=tuple(
                step
                for step in steps
                if step.stage in stages and stages_of.get(step.target, stages).get(step.stage) == stages[step.stage]
            ),
            replaced=bake.replaced_contexts(run.inputs.images),
            rebuilt=run.request.rebuilt,
            dockerfile=hashlib.sha256(text.encode()).hexdigest(),
            builder=run.request.builder or run.engine.host,
            **run.about,
            **more,
        )
        file = result_file(run, target, result)
        write_text(file, result.model_dump_json(indent=1) + "\n")
        for platform, content in sboms.items():
            write_bytes(run.sbom_file(target, platform, local=file.name == LOCAL_RESULT), content)
        exported.append(result)
    return exported


def describe_images(
    run: BuildRun, target: Target, images: Iterable[PlatformImage], progress: BuildProgress
) -> dict[str, bytes]:
    """Return the SBOM of each image; maps platforms to documents. A build without an SBOM is still a build, so an image
    that cannot be described is only noted."""
    sboms: dict[str, bytes] = {}
    if not (describe := run.request.describe) or run.request.stage:
        return sboms
    for image in images:
        try:
            sboms[image.platform] = describe(image)
        except (ImagebuildError, OSError) as error:
            progress.note(f"{target.id} {image.platform}: no SBOM: {error}")
    return sboms


def result_file(run: BuildRun, target: Target, result: BuildResult) -> Path:
    """Return the file for a result. The result of a push stays in `result.json` until the next push."""
    from imagebuild.project.records import BuildResult  # noqa: PLC0415 - as above

    pushed, local = (run.request.folder / target.id / name for name in ("result.json", LOCAL_RESULT))
    try:
        earlier = read_text(pushed) if not result.repository and pushed.exists() else ""
        is_pushed = earlier and BuildResult.model_validate_json(earlier).repository
    except ValueError:  # an older or damaged file
        is_pushed = ""
    if is_pushed:
        return local
    local.unlink(missing_ok=True)
    return pushed


def name_lost_caches(name: str, caches: Mapping[str, Sequence[bake.CacheEntry]], progress: BuildProgress) -> None:
    """Print a note if no stage has a cache, or if the repository cannot be read. BuildKit would not say so."""
    entries = [entry for own in caches.values() for entry in own]
    try:
        if not entries:
            progress.note(f"--cache {name}: no stage has a cache; write `compiles: true` into components")
        else:
            repository_at(name).digest(entries[0].tag)
    except CommandError as error:
        progress.note(f"--cache {name}: building without caches: {error}")


def write_caches(run: BuildRun, built: Sequence[BuildResult], progress: BuildProgress) -> None:
    """Write caches of stages to the registry. The content comes from the builder's own cache.
    A cache is written if this build compiled the stage, or if the registry lacks the cache."""
    place = repository_at(run.request.cache or "")
    executed = {(result.target, step.stage) for result in built for step in result.steps if not step.cached}
    owners = {entry: target for target in run.request.targets for entry in run.caches[target.id]}
    chosen = {
        entry: target
        for entry, target in owners.items()
        if (target.id, entry.stage) in executed or place.digest(entry.tag) is None
    }
    if chosen:
        progress.note(f"writing {len(chosen)} of {len(owners)} caches to {place}")
        execute_bake(run, bake.bake_file_of_caches(run, chosen), progress, "bake-caches.json")
    elif owners:
        progress.note(f"no cache was written: {place} has all {len(owners)} caches already")
