"""Events of BuildKit, the progress and errors that are printed for them, and the export of images."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from imagebuild.build import buildx
from imagebuild.build.bake import BuildRequest, BuildRun, CacheEntry
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.run import Finished
from imagebuild.oci.engine import Endpoint
from imagebuild.oci.image import images_in
from imagebuild.oci.layout import Layout
from imagebuild.project.plan import Plan
from imagebuild.project.project import Changes, Project
from imagebuild.project.records import BuildResult
from imagebuild.render.renderer import Renderer
from tests import layouts
from tests.conftest import TOOL, Files, data
from tests.registry_fake import FakeRegistry

CASES = data("cases/build/buildx")

TIMES = {f"T{n}": f"2026-01-01T00:00:0{n}.123456789Z" for n in range(3)}
T0, T1, T2 = TIMES.values()
RUN = "[open-cuda13_0 linux/amd64->arm64 ucx 2/3] RUN make"


def vertex(digest: str = "a", name: str = RUN, *, start: str | None = T0, end: str | None = None, **more: Any) -> Any:
    return {"vertexes": [{"digest": digest, "name": name, "started": start, "completed": end, **more}]}


def log(text: str) -> dict[str, Any]:
    return {"logs": [{"vertex": "a", "stream": 2, "data": base64.b64encode(text.encode()).decode()}]}


def layer(bar: str) -> dict[str, Any]:
    return {"statuses": [{"vertex": "a", "id": f"{bar}sha256:{'0' * 64}", "total": 180}]}


def read(*events: Any, indent: int | None = None) -> buildx.EventStream:
    stream = buildx.EventStream()
    for event in events:
        for line in (event if isinstance(event, str) else json.dumps(event, indent=indent)).splitlines():
            list(stream.feed(line))
    return stream


def test_one_object_a_line_and_indented_objects_are_read_alike() -> None:
    (step,), again = (read(vertex(), vertex(end=T2), indent=i).steps({"ucx"}) for i in (None, 2))
    assert again == (step,)
    assert (step.target, step.stage, step.component, step.cached, step.seconds) == (
        "open-cuda13_0", "ucx", "ucx", False, 2.0,
    )  # fmt: skip


@pytest.mark.parametrize("row", CASES["steps"], ids=lambda row: row["case"])
def test_which_steps_ran_and_for_how_long(row: dict[str, Any]) -> None:
    events = [
        {key: TIMES.get(value, value) if key in ("start", "end") else value for key, value in event.items()}
        for event in row["events"]
    ]
    stream = read(*(layer(event["bar"]) if "bar" in event else vertex(**event) for event in events))
    assert [[step.cached, step.seconds] for step in stream.steps({})] == row["steps"]


@pytest.mark.parametrize(
    ("events", "errors"),
    CASES["what-failed-by-itself"],
    ids=["a source that is identified first", "cancelled for one target", "others that it took down"],
)
def test_what_failed_by_itself(events: list[Any], errors: list[str]) -> None:
    assert [v.error for v in read(*events).failed()] == errors


def test_logs_are_joined_to_lines_and_what_is_no_event_is_a_message() -> None:
    events = [vertex(), log("first\nsec"), log("ond\nthird"), vertex(end=T1)]
    messages = ["WARNING: something", "ERROR: failed to solve", "and why", '{"vertexes": [{"dig']
    stream = read(messages[0], *events, *messages[1:])
    assert list(stream.vertices["a"].log) == ["first", "second", "third"]
    assert stream.messages == messages


def run_of(renderer: Renderer, plan: Plan, folder: Path, *names: str, **asked: Any) -> BuildRun:
    targets = tuple(t for t in plan.targets if t.id in names)
    dockerfiles = {t.id: renderer.dockerfile(t) for t in targets}
    request = BuildRequest(targets, folder=folder, **asked)
    project = renderer.project.changed(Changes(repository="registry.test/gpu"))
    about = {"revision": "a" * 40, "started": "2026-11-21T10:45:00Z"}
    return BuildRun(request, project, dockerfiles, Endpoint("unix:///x", "private"), about=about)


@pytest.mark.parametrize("stage", ["ucx", "ucx-source", "ucx-source-arm64"])
def test_a_failed_step_names_target_component_last_lines_and_how_to_see_it_again(
    full_plan: Plan, renderer: Renderer, stage: str
) -> None:
    names = (f"open-cuda13.5-debian13-{variant}" for variant in ("runtime", "devel"))
    open_run = run_of(renderer, full_plan, Path("/build"), *names)
    step = f"[open-cuda13_5-debian13-devel {stage} 2/3] RUN make"
    output = "".join(f"line {n}\n" for n in range(60)) + "cc: error: no such file\n"
    error = "process did not complete: exit code: 2"
    text = buildx.explain_failure(
        open_run, read(vertex("a", step), log(output), vertex("a", step, end=T1, error=error)), 1
    )
    assert text.startswith("open-cuda13.5-debian13-devel: component ucx: a step failed\n")
    assert "exit code: 2" in text
    assert text.count("line ") == 24
    assert "cc: error: no such file" in text
    assert f"imagebuild build open-cuda13.5-debian13-devel --stage {stage} -v" in text
    # If no step failed, the message is that of buildx.
    text = buildx.explain_failure(open_run, read("ERROR: Cannot connect to the Docker daemon"), 1)
    assert text == "docker buildx bake exited with 1:\nERROR: Cannot connect to the Docker daemon"


@pytest.mark.parametrize(("error", "reason"), CASES["reasons"])
def test_the_reason_names_the_program_and_what_it_said(error: str, reason: str) -> None:
    assert buildx.reason_of(error) == reason


@pytest.mark.parametrize(("entries", "said"), CASES["lost-caches"])
def test_a_cache_that_cannot_help_is_named(entries: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    caches = {"x": [CacheEntry(name, "linux/amd64", "0" * 16) for name in entries]}
    buildx.name_lost_caches("127.0.0.1:1/cache", caches, buildx.BuildProgress())
    assert said in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(("given", "message"), CASES["wrong-sources"])
def test_wrong_sources(project: Project, tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        buildx.replaced_sources(project, {"ucx-source"}, [given.format(tmp_path)])


def test_a_repository_of_this_machine_needs_a_folder(tiny: Files, tmp_path: Path) -> None:
    tiny.component("tool", re.sub("git: .*", "git: file:///src/tool", TOOL))
    (tmp_path / "x").touch()
    assert buildx.replaced_sources(tiny.load(), {"tool-source"}, [f"tool={tmp_path}"])
    assert not buildx.replaced_sources(tiny.load(), {"other"}, [])
    with pytest.raises(ConfigError, match=r"component tool: .*\(file:///src/tool\); add --source tool=FOLDER"):
        buildx.replaced_sources(tiny.load(), {"tool-source"}, [])


def test_a_source_is_named_by_its_component_its_pin_or_what_it_provides(project: Project, tmp_path: Path) -> None:
    (tmp_path / "configure").touch()
    stages = {f"{name}-source" for name in ("ucx", "nccl-git", "rdma-core-git", "pmix-git", "openmpi-git")}
    for name, component in {
        "ucx": "ucx", "nccl": "nccl-git", "nccl-git": "nccl-git", "rdma-core-git": "rdma-core-git",
        "pmix": "pmix-git", "openmpi": "openmpi-git", "mpi": "openmpi-git",
    }.items():  # fmt: skip
        assert buildx.replaced_sources(project, stages, [f"{name}={tmp_path}"]) == {
            f"{component}-source": str(tmp_path)
        }


@pytest.mark.parametrize("verbose", [False, True])
def test_a_log_has_a_line_for_each_step_that_ended(capsys: pytest.CaptureFixture[str], verbose: bool) -> None:
    make = "[ucx 2/3] RUN make"
    events = [
        vertex("a", make), log("working\n"), vertex("a", make, end=T1),
        vertex("b", "[image 1/9] COPY a b", end=T0, cached=True), vertex("d", "exporting to image", end=T1),
        vertex("e", "[ucx 3/3] RUN false", end=T1, error="exit code: 1"),
    ]  # fmt: skip
    stream, progress = buildx.EventStream(), buildx.BuildProgress(verbose=verbose)
    for line in map(json.dumps, events):
        for event in stream.feed(line):
            progress.update(*event)
    shown = [re.sub(r"^ +\d+\.\d  ", "", line) for line in capsys.readouterr().err.splitlines()]
    ended = ["ucx 2/3: RUN make → 1.0 s", "image 1/9: COPY a b → cached", "ucx 3/3: RUN false ✗ failed"]
    assert shown == [*(["ucx | working"] if verbose else []), *ended]


def test_targets_share_steps_and_none_looks_cancelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = {name: buildx.TargetBar(name, {"ucx": "1", "image": name}, 2) for name in ("a", "b")}
    events = [
        vertex("1", "[a ucx 2/2] RUN make"), vertex("2", "[b image 2/2] RUN x", end=T2),
        vertex("1", "[a ucx 2/2] RUN make", end=T1, error="context canceled: Canceled"),
    ]  # fmt: skip
    stream, progress = buildx.EventStream(), buildx.BuildProgress(bars)
    for event in (found for line in map(json.dumps, events) for found in stream.feed(line)):
        progress.update(*event)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("b image 2/2: RUN x → 2.0 s (1 of 2 steps of b)")
    for event in stream.feed(json.dumps(vertex("1", "[a ucx 2/2] RUN make", end=T2))):
        progress.update(*event)
    assert [(bar.ended, bar.running) for bar in bars.values()] == [(1, {}), (2, {})]
    file = io.StringIO()
    Console(file=file, width=40, color_system=None).print(progress._draw())
    assert [line.split()[1:] for line in file.getvalue().splitlines()[1:]] == [["1/2", "a"], ["2/2", "b"]]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    fake = FakeRegistry()
    monkeypatch.setattr(buildx, "connect_registry", lambda _host: fake)
    return fake


@pytest.fixture
def run(full_plan: Plan, renderer: Renderer, tmp_path: Path) -> BuildRun:
    return run_of(renderer, full_plan, tmp_path, "quickstart-cuda13.5-debian13-runtime", output="push")


def export(run: BuildRun, digest: str) -> BuildResult:
    """Export the images that BuildKit made for the only target."""
    metadata = {run.request.targets[0].bake_name: {"containerimage.digest": digest}}
    with buildx.BuildProgress() as progress:
        (result,) = buildx.export_images(run, buildx.EventStream(), metadata, 1, progress)
    return result


def layout(run: BuildRun) -> tuple[Path, str]:
    """An OCI layout for two platforms, as BuildKit writes it: its folder and the digest of the index."""
    made = layouts.make(run.request.folder / run.request.targets[0].id, b"content")
    return made.layout.folder, made.digest


def test_a_push_leaves_the_index_and_one_tag_in_the_staging_repository(run: BuildRun, registry: FakeRegistry) -> None:
    folder, digest = layout(run)
    result = export(run, digest)
    held = registry.repositories["gpu/quickstart-staging"]
    ((tag, named),) = held.tags.items()
    assert named == digest
    assert re.fullmatch(r"staged-\d{8}T\d{6}Z-[0-9a-f]{12}", tag)
    assert result.tags == (f"registry.test/gpu/quickstart-staging:{tag}",)
    assert result.repository == "registry.test/gpu/quickstart-staging"
    assert set(result.manifests) == {"linux/amd64", "linux/arm64"}
    assert {*result.manifests.values(), digest} == set(held.manifests)
    assert not folder.exists()
    assert result.revision == "a" * 40
    assert result.dockerfile == hashlib.sha256(run.dockerfiles[result.target].text.encode()).hexdigest()
    assert (result.builder, result.started) == ("unix:///x", "2026-11-21T10:45:00+00:00")
    written = json.loads((run.request.folder / run.request.targets[0].id / "result.json").read_text())
    assert BuildResult.model_validate(written) == result
    # A later local build keeps the record of the push, and the next push replaces both.
    local = replace(run, request=replace(run.request, output="load"))
    for other in (export(local, digest), export(local, other_digest := f"sha256:{'1' * 64}")):
        assert other.repository is None
    files = {path.name: path for path in (run.request.folder / result.target).glob("*.json")}
    assert {name: json.loads(path.read_text())["digest"] for name, path in files.items()} == {
        "result.json": digest, "local.json": other_digest,
    }  # fmt: skip
    layout(run)
    export(run, digest)
    assert not files["local.json"].exists()


def test_a_push_that_was_interrupted_leaves_no_result(run: BuildRun, registry: FakeRegistry) -> None:
    folder, digest = layout(run)
    registry.before = Mock(side_effect=CommandError("connection lost"))
    with pytest.raises(CommandError, match="connection lost"):
        export(run, digest)
    assert not (run.request.folder / run.request.targets[0].id / "result.json").exists()
    assert folder.exists()


def test_a_layout_without_a_platform_is_not_pushed(run: BuildRun, registry: FakeRegistry) -> None:
    folder, _ = layout(run)
    only = Layout(folder).write_index([i.descriptor for i in images_in(folder, folder) if i.platform == "linux/amd64"])
    with pytest.raises(ResultError, match="wrote no image for linux/arm64"):
        export(run, only)
    assert not registry.calls


@pytest.mark.parametrize("fails", [True, False])
def test_a_layout_is_replaced_when_the_build_succeeds_and_stays_when_it_fails(
    run: BuildRun, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    folder, _ = layout(run)
    before = (folder / "index.json").read_bytes()
    new = folder.with_name("layout.new")
    new.mkdir()
    (new / "left").touch()  # left by a build that was killed

    def build(*_: object, stream: object) -> tuple[buildx.EventStream, dict[str, object]]:
        new.mkdir()
        (new / "oci-layout").write_text("made")
        if fails:
            raise CommandError("a step failed")
        return buildx.EventStream(), {}

    monkeypatch.setattr(buildx, "execute_bake", build)
    with pytest.raises(CommandError) if fails else nullcontext():
        buildx.run_bake(run, buildx.BuildProgress())
    assert not new.exists()
    if fails:
        assert (folder / "index.json").read_bytes() == before
    else:
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("oci-layout", "made")]


def test_buildx_runs_no_git_in_the_project(run: BuildRun, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def execute(_: object, env: dict[str, str], **__: object) -> Finished:
        seen.update(env)
        return Finished(0, "")

    monkeypatch.setattr(buildx, "execute", execute)
    run.request.folder.mkdir(exist_ok=True)
    buildx.execute_bake(run, {}, buildx.BuildProgress())
    assert (seen["BUILDX_GIT_INFO"], seen["BUILDX_GIT_LABELS"]) == ("0", "0")


@pytest.mark.parametrize(("error", "attempts"), CASES["export-faults"])
def test_a_failed_export_is_repeated(run: BuildRun, monkeypatch: pytest.MonkeyPatch, error: str, attempts: int) -> None:
    """In the second attempt, all steps are cached. The result contains those of the first."""
    outputs = [[vertex(end=T1), error], [vertex(end=T1, cached=True)]]

    def execute(*_: object, each_line: Callable[[str], None], **__: object) -> Finished:
        for event in (events := outputs.pop(0)):
            each_line(event if isinstance(event, str) else json.dumps(event))
        return Finished(int(error in events), "")

    monkeypatch.setattr(buildx, "execute", execute)
    run.request.folder.mkdir(exist_ok=True)
    stream = buildx.EventStream()
    with nullcontext() if attempts == 2 else pytest.raises(CommandError, match="context deadline"):
        buildx.execute_bake(run, {}, buildx.BuildProgress(), stream=stream)
    assert (len(outputs), [step.cached for step in stream.steps({})]) == (2 - attempts, [False])


def test_a_folder_that_is_no_layout_is_not_touched(run: BuildRun) -> None:
    folder = run.request.folder / run.request.targets[0].id / "layout"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"layout: exists, but is not an OCI layout; remove it"):
        buildx.run_bake(run, buildx.BuildProgress())
    assert (folder / "thesis.txt").read_text() == "mine"


def test_a_planted_build_context_is_refused(run: BuildRun) -> None:
    run.context.mkdir(parents=True)
    (run.context / "payload").touch()
    with pytest.raises(ConfigError, match="empty: must be empty"):
        buildx.run_bake(run, buildx.BuildProgress())


def test_a_node_that_does_not_answer_twice_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row: lines of buildx so far, and whether the node would answer. Only silence leads to a question."""
    answers: list[list[str]] = []
    monkeypatch.setattr(buildx, "lost_nodes", lambda *_: answers.pop())
    watch = buildx.NodeWatch("farm", Endpoint("unix:///x", "private"))
    for heard, lost in [(3, None), (3, ["node a"]), (4, None), (4, ["node a"]), (4, []), (4, ["node a"])]:
        answers += [lost] if lost is not None else []
        watch.ask(heard)
        assert not answers
    answers.append(["node a"])
    with pytest.raises(CommandError, match="node a"):
        watch.ask(4)
