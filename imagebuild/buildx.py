"""Run `docker buildx bake` on rendered targets, and say what happened."""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild import bake, packing
from imagebuild.config import Project, suggestion
from imagebuild.console import Progress
from imagebuild.dockerfile import Dockerfile
from imagebuild.engine import Endpoint, flaw
from imagebuild.errors import CommandError, ConfigError, ResultError
from imagebuild.events import Stream, Vertex
from imagebuild.files import write_text
from imagebuild.models import Target
from imagebuild.records import BuildResult

CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")
ERROR_LINES = 25
LAYOUT = ("blobs", "index.json", "ingest", "oci-layout")
"""What may be in an OCI layout, and in one that was interrupted."""
# Faults of exporting, after which all steps are in the cache: containerd's garbage collector was faster than the export
# (https://github.com/containerd/containerd/issues/10835), or a dozen large images at once took it too long.
EXPORT_FAULT = re.compile(r"parent snapshot \S+ does not exist|DeadlineExceeded: context deadline exceeded")


@dataclass(frozen=True)
class Request:
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


def sources(project: Project, targets: Sequence[Target], given: Sequence[str]) -> dict[str, str]:
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


def ca_bundle(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The CA bundle that steps which download may use: the one given, else the machine's. Raises ConfigError."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"--ca {given}: no such file")
        return given.resolve()
    found = [Path(environ[name]) for name in CA_VARIABLES if environ.get(name)]
    return next((path for path in (*found, SYSTEM_CA) if path.is_file()), None)


def run(request: Request, progress: Progress) -> tuple[BuildResult, ...]:
    """Build all targets at once; what to do with it is `delivery`'s.

    Raises CommandError if a step or buildx itself fails, ResultError if buildx's answer cannot be read.
    """
    began = time.monotonic()
    write_inputs(request)
    content = bake.bake_file(request.targets, request.folder, request.options)
    if request.stage:
        for entry in content["target"].values():
            entry |= {"target": request.stage, "output": ["type=cacheonly"], "tags": []}
    stream, metadata = execute(request, content, progress)
    seconds = time.monotonic() - began
    return tuple(_result(t, request, stream, metadata, seconds) for t in request.targets)


def execute(
    request: Request, content: Mapping[str, Any], progress: Progress, name: str = "bake.json"
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
            raise CommandError(_engine_gone(request) + explain(request, stream, status))
        return stream, json.loads(metadata_file.read_text()) if metadata_file.exists() else {}
    except ValueError as error:
        raise ResultError(f"{metadata_file}: buildx wrote what is not JSON: {error}") from None
    finally:
        metadata_file.unlink(missing_ok=True)


def write_inputs(request: Request) -> None:
    """Write the Dockerfiles, and remove what builds before left of these targets. Raises ConfigError."""
    try:
        request.options.context.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{request.folder}: cannot be written: {error.strerror}") from None
    for target in request.targets:
        write_text(request.folder / target.id / "Dockerfile", request.dockerfiles[target.id].text)
        (request.folder / target.id / "result.json").unlink(missing_ok=True)
        layout = bake.layout_of(target, request.folder, request.options.output)
        if layout and not request.stage:
            _remove(layout)


def _remove(layout: Path) -> None:
    """Remove the layout of a build before, which BuildKit would add to. Raises ConfigError for another folder."""
    if not layout.is_dir():
        return
    if other := sorted(path.name for path in layout.iterdir() if path.name not in LAYOUT):
        raise ConfigError(f"{layout}: has {other[0]}, so it is no OCI layout; remove it, or choose another folder")
    shutil.rmtree(layout)


def _bake(request: Request, file: Path, metadata_file: Path, progress: Progress, stream: Stream) -> int:
    command = ["docker", "buildx", "bake", "--file", str(file)]
    command += ["--progress", "rawjson", "--metadata-file", str(metadata_file)]
    if request.builder:
        command += ["--builder", request.builder]
    environ = {
        # buildx would make it an argument of the build, and steps would depend on it; see `packing`.
        **{name: value for name, value in os.environ.items() if name != packing.VARIABLE},
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


def _engine_gone(request: Request) -> str:
    """Whether the engine has stopped: what buildx says then does not tell, and steps that it took along look failed."""
    if request.builder:
        return ""
    why = flaw(request.engine.host, flags=() if request.engine.origin == "context" else None)
    return f"the engine at {request.engine.host} stopped during the build ({why}); start it again\n" if why else ""


def explain(request: Request, stream: Stream, status: int) -> str:
    """What failed, in which component, with its last lines, and how to see it again."""
    failed = [v for v in stream.failed() if v.parts]
    if not failed:
        said = stream.said()[-ERROR_LINES:] or ["it said nothing; was it killed?"]
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        return f"docker buildx bake {how}:\n" + "\n".join(said)
    return "\n\n".join(_explain_step(request, v) for v in failed[:3])


def _explain_step(request: Request, vertex: Vertex) -> str:
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
    target: Target, request: Request, stream: Stream, metadata: Mapping[str, Any], seconds: float
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
        replaced=bake.replacements(request.options),
    )
