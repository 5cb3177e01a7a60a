"""Run `docker buildx bake`: read its events, show progress, and take the images out of BuildKit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.build import bake
from imagebuild.build.bake import BuildRun
from imagebuild.core.console import Progress, format_duration, format_size
from imagebuild.core.errors import CommandError, ConfigError, ResultError, suggestion
from imagebuild.core.files import write_text
from imagebuild.core.run import execute
from imagebuild.oci.engine import engine_flaw
from imagebuild.oci.image import images_in
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
    rf"(?P<stage>(?!{bake.FETCHED})[\w.-]+) +(?P<n>\d+/\d+)\] "  # what is fetched is in no Dockerfile of a target
    r"(?P<text>(?!LINK ).*)",  # the second half of COPY --link, which is no step of the Dockerfile
    re.DOTALL,
)
BLOB = re.compile(r"^(extracting )?sha256:")
"""Name of a progress bar of a layer that comes from a registry. Steps that run have no bars, only output."""
ERROR_LINES = 25
"""Lines of output that are kept of each step, and shown if it fails."""
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
    """Whether layers of it came from a registry: BuildKit then reports a step as if it had run."""
    error: str = ""
    inputs: tuple[str, ...] = ()
    """Digests of the vertices that it starts from; a source has none."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=ERROR_LINES))
    partial: str = ""
    """Start of a line of output whose end has not come yet."""

    @property
    def parts(self) -> dict[str, str]:
        """Return the parts of a step's name; nothing for what is not a step of a Dockerfile."""
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
        """Return whether it ended only because the build, or the target that wanted it, ended."""
        return "context canceled" in self.error

    @property
    def title(self) -> str:
        """Return one line: the stage, its platform, and the start of the command."""
        if not (parts := self.parts):
            return self.name.partition("\n")[0][:100] or self.digest
        # Targets share all stages but the last, so only there the target's name matters.
        target = parts["target"] if self.stage == bake.FINAL_STAGE else ""
        platform = parts["platform"] and f"({parts['platform']})"
        command = re.sub(r"--mount=\S+\s*", "", parts["text"].replace("\\\n", " "))
        where = " ".join(filter(None, (target, self.stage, platform, parts["n"])))
        return f"{where}: {' '.join(command.split())[:80]}"


class EventStream:
    """Read buildx's events as they come. Newer versions write one JSON object a line, older ones indent them."""

    def __init__(self) -> None:
        self.vertices: dict[str, Vertex] = {}
        self.messages: list[str] = []
        """Lines that are not events, such as buildx's own errors."""
        self._begun = ""
        """An indented event whose end has not come yet."""

    def feed(self, line: str) -> Iterator[tuple[str, Vertex, str]]:
        """Take one more line; yield (`started` | `completed` | `log`, vertex, line of log)."""
        if not self._begun and not line.startswith("{"):
            self.messages.append(line)
            return
        self._begun += line
        if line == "{" or line.startswith(" "):
            return
        text, self._begun = self._begun, ""
        try:
            event = json.loads(text)
        except ValueError:  # the end of what was killed
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
        """Return the steps that ran or were cached, each once, in the order in which they started.

        A step that was cancelled did not run: in a build that succeeds, BuildKit cancels a step while it looks up its
        inputs, and takes what an equal step of another target makes.
        """
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
            # The source of an ADD is looked up in every build; the step that copies it is another vertex.
            if v.parts and (v.completed or v.cached) and (v.inputs or not v.parts["text"].startswith("ADD "))
        )

    def failed(self) -> list[Vertex]:
        """Return what failed by itself, not because something else did."""
        return [v for v in self.vertices.values() if v.error and not v.cancelled]

    def failure_messages(self) -> list[str]:
        """Return the errors outside steps, and the lines that are not events."""
        return [v.error for v in self.failed() if not v.parts] + [m for m in self.messages if m.strip()]

    def _vertex(self, digest: str) -> Vertex:
        return self.vertices.setdefault(digest, Vertex(digest))

    def _update(self, vertex: Vertex, report: Mapping[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        vertex.name = report.get("name") or vertex.name
        vertex.inputs = tuple(report.get("inputs") or vertex.inputs)
        # Two targets that share a step each report it; it was cached only if it never ran.
        ran_before = vertex.completed is not None and not vertex.cached and not vertex.error
        # BuildKit writes a time in the year 1 for none.
        times = (report.get(name) or "0001" for name in ("started", "completed"))
        started, completed = (None if t.startswith("0001") else datetime.fromisoformat(t).timestamp() for t in times)
        if started and vertex.started is None:
            vertex.started = started
            yield "started", vertex, ""
        # A source is completed once when it is identified, and may fail when it is fetched.
        if completed and (not ran_before or report.get("error")):
            # A step that was cancelled for one target may then run for another that wants it.
            vertex.started = started or vertex.started
            vertex.completed, vertex.error = completed, report.get("error") or ""
            vertex.cached = bool(report.get("cached") or vertex.pulled)
            if vertex.partial:
                vertex.log.append(vertex.partial)
                vertex.partial = ""
            yield "completed", vertex, ""


class BuildProgress(Progress):
    def __init__(self, targets: Iterable[str] = (), *, verbose: bool = False) -> None:
        super().__init__(live=not verbose)
        self._targets = ", ".join(targets)
        self._verbose = verbose
        self._cached: dict[str, bool] = {}
        """Step that has ended → whether it was cached."""

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        """Show an event of `EventStream.feed`. Steps that were cached get no line on a terminal."""
        if kind == "log":
            if self._verbose:
                self.note(f"{vertex.stage or 'build'} | {line}")
            elif vertex.digest in self.running:
                self.advance(vertex.digest, line)
            return
        if vertex.digest not in self.running:
            self.begin(vertex.digest, vertex.title)
        if kind == "completed":
            result = format_duration(vertex.seconds)
            if vertex.error:
                result = "cancelled" if vertex.cancelled else "failed"
            elif vertex.cached:
                result = "" if self.live else "cached"
            if vertex.parts:
                self._cached[vertex.digest] = vertex.cached
                cached = sum(self._cached.values())
                self.headline = f"{len(self._cached) - cached} steps run, {cached} cached  {self._targets}"
            self.end(vertex.digest, result if vertex.parts else "", good=not vertex.error)


def replaced_sources(project: Project, stages: Container[str], given: Sequence[str]) -> dict[str, str]:
    """Turn `["ucx=/src/ucx"]` into stage → folder that replaces it, for a build that has these stages.

    A name is that of a component, of its pin, or of what it provides: `nccl` is also `nccl-git`. Raises ConfigError for
    what cannot be replaced.
    """
    models = {name: component.model for name, component in project.components.items()}
    names = {name: {name, model.pin, *model.provides} for name, model in models.items() if model.git}
    replaced = {}
    for text in given:
        name, _, folder = text.partition("=")
        path = Path(folder).expanduser().resolve()
        if not folder or not path.is_dir() or not any(path.iterdir()):
            raise ConfigError(f"--source {text}: write it as NAME=FOLDER, with a folder that has something in it")
        found = [component for component, own in names.items() if name in own]
        used = [component for component in found if f"{component}-source" in stages]
        if len(used) != 1:
            near = "" if found else suggestion(name, names)
            raise ConfigError(
                f"--source {text}: selected targets use {' and '.join(used) or 'no source in git'} of that name{near}"
            )
        replaced[f"{used[0]}-source"] = str(path)
    return replaced


def run_bake(run: BuildRun, progress: BuildProgress) -> tuple[EventStream, dict[str, Any]]:
    """Build all targets at once; return the events and buildx's metadata.

    Layouts of earlier builds stay until the new ones are whole. Raises ConfigError if something else is where a layout
    is to be, CommandError if a step or buildx itself fails, ResultError if buildx's metadata cannot be read.
    """
    layouts = [layout for target in run.request.targets if (layout := run.layout_folder(target))]
    for layout in layouts:
        if layout.exists() and not (layout / "oci-layout").is_file():
            raise ConfigError(f"{layout}: is no OCI layout; remove it, or choose another folder")
        shutil.rmtree(bake.new_layout(layout), ignore_errors=True)  # BuildKit would add to it
    try:
        run.context.mkdir(parents=True, exist_ok=True)
        for target in run.request.targets:
            write_text(run.request.folder / target.id / "Dockerfile", run.dockerfiles[target.id].text)
        built = execute_bake(run, bake.bake_file(run), progress)
        for layout in layouts:
            shutil.rmtree(layout, ignore_errors=True)
            bake.new_layout(layout).rename(layout)
        return built
    except OSError as error:
        raise ConfigError(f"{run.request.folder}: cannot be written: {error.strerror}") from None
    finally:
        for layout in layouts:
            shutil.rmtree(bake.new_layout(layout), ignore_errors=True)


def execute_bake(
    run: BuildRun, content: Mapping[str, Any], progress: BuildProgress, name: str = "bake.json"
) -> tuple[EventStream, dict[str, Any]]:
    """Run a bake file; return the events and buildx's metadata. Raises as `run_bake` does."""
    file, metadata_file = run.request.folder / name, run.request.folder / "metadata.json"
    write_text(file, json.dumps(content, indent=1) + "\n")
    stream = EventStream()
    try:
        status = _run_buildx(run, file, metadata_file, progress, stream)
        if status and any(EXPORT_FAULT.search(text) for text in stream.failure_messages()):
            progress.note("the engine failed to export what was built; trying once more")
            # What ran stays known as having run.
            stream.vertices = {digest: v for digest, v in stream.vertices.items() if not v.error}
            stream.messages.clear()
            status = _run_buildx(run, file, metadata_file, progress, stream)
        if status:
            failure = explain_failure(run, stream, status)
            # buildx does not say that the engine has stopped, and its steps look as if they had failed.
            if not run.request.builder and (flaw := engine_flaw(run.engine)):
                stopped = f"the engine at {run.engine.host} stopped during the build ({flaw}); start it again"
                failure = f"{stopped}\n{failure}"
            raise CommandError(failure)
        return stream, json.loads(metadata_file.read_text()) if metadata_file.exists() else {}
    except ValueError as error:
        raise ResultError(f"{metadata_file}: is not JSON, though buildx wrote it: {error}") from None
    finally:
        metadata_file.unlink(missing_ok=True)


def _run_buildx(run: BuildRun, file: Path, metadata_file: Path, progress: BuildProgress, stream: EventStream) -> int:
    """Run `docker buildx bake` to its end, also when interrupted; return its exit status."""
    command = ["docker", "buildx", "bake", "--file", str(file)]
    command += ["--progress", "rawjson", "--metadata-file", str(metadata_file)]
    if run.request.builder:
        command += ["--builder", run.request.builder]
    environ = {
        # buildx would make it a build argument, and so a part of every step's cache key.
        "SOURCE_DATE_EPOCH": None,
        **run.engine.environment,
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",  # an index of runnable platforms only
        "BUILDX_BAKE_ENTITLEMENTS_FS": "0",  # we wrote the bake file, and the user named the folders in it
    }

    def update(line: str) -> None:
        for event in stream.feed(line):
            progress.update(*event)

    done = execute(command, env=environ, each_line=update, polite=signal.SIGINT)  # so that BuildKit cancels it
    assert done.status is not None, "it has no time limit"
    return done.status


def explain_failure(run: BuildRun, stream: EventStream, status: int) -> str:
    """Say what failed, in which component, with its last lines, and how to see it again."""
    failed = [v for v in stream.failed() if v.parts]
    if failed:
        return "\n\n".join(_explain_step(run, v) for v in failed[:3])
    lines = stream.failure_messages()[-ERROR_LINES:] or ["it printed nothing; was it killed?"]
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
            # BuildKit repeats the whole script.
            f"  reason  {re.sub('process .* did not', 'it did not', vertex.error.strip().splitlines()[-1])}",
            *(["  the end of its output:", *(f"    {line}" for line in vertex.log)] if vertex.log else []),
            f"  again   imagebuild build {target.id} {options} -v",
        ]
    )


def component_of(stage: str, components: Container[str]) -> str | None:
    """Return the component of a stage: the stage's name, or that without `-key`, `-source` or `-source-<arch>`."""
    for name in (stage, re.sub(r"-(key|source(-(amd64|arm64))?)$", "", stage)):
        if name in components:
            return name
    return None


def staging_repository(project: Project, target: Target) -> Repository:
    """Return where a target's image is pushed to, to be verified there."""
    name = parse_reference(plan.repository_name(project, target.image))
    return connect_registry(name.host).at(name.repository)


def export_images(
    run: BuildRun, stream: EventStream, metadata: Mapping[str, Any], seconds: float, progress: BuildProgress
) -> list[BuildResult]:
    """Push what is to be pushed, and write the `result.json` of each target; return these results.

    An image is pushed to the staging repository of its target, with one tag that keeps it there. `seconds` is what
    the build took. Raises CommandError if a registry refuses, ResultError if a layout cannot be read.
    """
    from imagebuild.project.records import BuildResult  # noqa: PLC0415 - no build needs it before its end

    exported, steps = [], stream.steps(run.project.components)
    stages_of = {target.bake_name: run.dockerfiles[target.id].stages for target in run.request.targets}
    for target in run.request.targets:
        text, platforms = run.dockerfiles[target.id].text, bake.platforms_of(target, run.request.platforms)
        stages = stages_of[target.bake_name]
        digest = (metadata.get(target.bake_name) or {}).get("containerimage.digest")
        more: dict[str, Any] = {"size_bytes": None, "tags": (target.name,)}
        if layout := run.layout_folder(target):
            with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
                images = images_in(layout, Path(folder))
            more["manifests"] = manifests = {image.platform: image.digest for image in images}
            more["size_bytes"] = sum(layer.size for layer in images[0].layers)
            if missing := [platform for platform in platforms if not manifests.get(platform)]:
                raise ResultError(f"{layout}: BuildKit wrote no image for {', '.join(missing)}")
        if layout and run.request.output == "push":
            if not digest:
                raise ResultError(f"{layout}: buildx's metadata has no digest of the image")
            staging = staging_repository(run.project, target)
            progress.begin(target.id, f"push of {target.id} to {staging}")
            tag = plan.staged_tag(digest, datetime.now(UTC))
            moved = push_image(Layout(layout), digest, staging, tag)
            progress.end(target.id, f"{moved['blobs']} blobs, {format_size(moved['bytes'])}")
            more |= {"repository": str(staging), "tags": (f"{staging}:{tag}",)}
            shutil.rmtree(layout)
        result = BuildResult(
            target=target.id,
            digest=digest,
            platforms=platforms,
            seconds=round(seconds, 3),
            # A step that targets share is reported under the name of one of them.
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
        write_text(run.request.folder / target.id / "result.json", result.model_dump_json(indent=1) + "\n")
        exported.append(result)
    return exported
