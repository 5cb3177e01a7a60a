"""Run bake: events as BuildKit writes them, what people see of them, and what becomes of the images."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from imagebuild import oci
from imagebuild.build import (
    BuildProgress,
    BuildRequest,
    BuildRun,
    CacheEntry,
    EventStream,
    buildx,
    component_of,
    explain_failure,
    export_images,
    layouts_replaced,
    replaced_sources,
    run_bake,
    shorten_command,
    write_caches,
)
from imagebuild.core import CommandError, ConfigError, ResultError, ca_bundle
from imagebuild.oci import Endpoint, Layout, Manifest, images_in
from imagebuild.project import BuildResult, Changes, ImagePackages, Plan, Project, Step, repository_name, staged_tag
from imagebuild.render import Renderer
from tests import layouts
from tests.registry_fake import FakeRegistry

T0, T1, T2 = (f"2026-01-01T00:00:0{n}.123456789Z" for n in range(3))
SOON = T0.replace("456789", "999999")
RUN = "[open-cuda13_0 linux/amd64->arm64 ucx 2/3] RUN make"
OTHER = RUN.replace("13_0", "13_5")
ADD = "[ucx-source 1/1] ADD https://example.org/a.tar /"


def vertex(digest: str, name: str, *, start: str | None = T0, end: str | None = None, **more: Any) -> dict[str, Any]:
    return {"vertexes": [{"digest": digest, "name": name, "started": start, "completed": end, **more}]}


def log(digest: str, text: str) -> dict[str, Any]:
    return {"logs": [{"vertex": digest, "stream": 2, "data": base64.b64encode(text.encode()).decode()}]}


def layer(digest: str, bar: str) -> dict[str, Any]:
    return {"statuses": [{"vertex": digest, "id": f"{bar}sha256:{'0' * 64}", "total": 180}]}


def read(*events: Any, indent: int | None = None, size: int = 7) -> EventStream:
    """Read events in small pieces."""
    text = "\n".join(e if isinstance(e, str) else json.dumps(e, indent=indent) for e in events) + "\n"
    stream = EventStream()
    for start in range(0, len(text), size):
        list(stream.feed(text[start : start + size]))
    stream.close()
    return stream


def test_one_object_a_line_and_indented_objects_are_read_alike() -> None:
    events = [vertex("a", RUN), vertex("a", RUN, end=T2)]
    (step,), again = (read(*events, indent=i).steps({"ucx": "ucx"}) for i in (None, 2))
    assert again == (step,)
    assert (step.target, step.stage, step.component, step.cached, step.seconds) == (
        "open-cuda13_0", "ucx", "ucx", False, 2.0,
    )  # fmt: skip


CANCELLED = "context canceled: context canceled"


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        pytest.param(
            [vertex("a", RUN, end=T1), vertex("a", OTHER, start=T2, end=T2, cached=True)], [(False, 1.0)],
            id="two targets share a step, which ran once",
        ),
        pytest.param(
            [vertex("a", RUN, end=SOON), vertex("b", OTHER, end=T1)], [(True, 0.001), (False, 1.0)],
            id="of two equal steps BuildKit runs one, and lets the other end at once",
        ),
        pytest.param(
            [vertex("a", RUN, end=SOON), vertex("a", RUN, start=T1, end=T2)], [(False, 1.0)],
            id="it was looked up, and then run",
        ),
        pytest.param(
            [vertex("a", RUN, end=T0, cached=True), vertex("a", RUN, end=T2)], [(False, 2.0)],
            id="it was in the cache for one target, and ran for another",
        ),
        pytest.param(
            [vertex("a", RUN, end=T0, error="no such file")], [(False, 0.0)], id="it failed at once",
        ),
        *(
            pytest.param([*pulled, vertex("a", RUN), vertex("a", RUN, end=T2)], [(True, 2.0)], id=f"layers came {i}")
            for i, pulled in enumerate((
                [vertex("a", RUN, end=T0, cached=True), layer("a", "")], [layer("a", "")], [layer("a", "extracting ")],
            ))
        ),
        pytest.param(
            [vertex("a", RUN, end=T0, error=CANCELLED), vertex("a", RUN, start=T1, end=T2)], [(False, 1.0)],
            id="it was cancelled, and then run",
        ),
        pytest.param(
            [vertex("a", RUN, end=T0, error=f"failed to calculate checksum of ref a::b: {CANCELLED}"),
             vertex("b", OTHER, end=T1)], [(True, 0.0), (False, 1.0)],
            id="it was cancelled while its inputs were looked up, for an equal one",
        ),
        pytest.param(
            [vertex("a", "[internal] load build definition", end=T1), vertex("c", "exporting to image", end=T1),
             vertex("b", "[image 3/9] LINK COPY --link --from=a / /", end=T1)], [],
            id="internal steps and halves of COPY --link are none",
        ),
        pytest.param([vertex("a", ADD, end=T0)], [], id="the source of an ADD, which every build identifies"),
        pytest.param(
            [vertex("a", ADD, end=T0), vertex("b", ADD, inputs=["a"], end=T0, cached=True)], [(True, 0.0)],
            id="an ADD that was in the cache",
        ),
        pytest.param(
            [vertex("a", ADD, end=T0), vertex("a", ADD, end=T1), vertex("b", ADD, inputs=["a"], start=T1, end=T2)],
            [(False, 2.0)], id="fetching the source of an ADD counts",
        ),
        pytest.param(
            [vertex("c", "[x 1/2] FROM docker.io/x", start=None, end=T0)], [(False, 0.0)],
            id="what starts from nothing is a step",
        ),
    ],
)  # fmt: skip
def test_which_steps_ran_and_for_how_long(events: list[Any], steps: list[tuple[bool, float]]) -> None:
    assert [(step.cached, step.seconds) for step in read(*events).steps({})] == steps


@pytest.mark.parametrize(
    ("events", "errors"),
    [
        ([vertex("a", RUN, end=T1), vertex("a", RUN, start=T1, end=T2, error="failed to fetch")], ["failed to fetch"]),
        ([vertex("a", RUN, end=T0, error=CANCELLED), vertex("a", RUN, start=T1, end=T2)], []),
        ([vertex("a", RUN, end=T1, error="exit code: 2"), vertex("b", RUN, end=T1, error="context canceled: stopped")],
         ["exit code: 2"]),  # others it took down
    ],
)  # fmt: skip
def test_what_failed_by_itself(events: list[Any], errors: list[str]) -> None:
    assert [v.error for v in read(*events).failed()] == errors


def test_logs_are_joined_to_lines_and_what_is_no_event_is_a_message() -> None:
    stream = read(
        "WARNING: something", vertex("a", RUN), log("a", "first\nsec"), log("a", "ond\nthird"),
        vertex("a", RUN, end=T1), "ERROR: failed to solve", "and why",
    )  # fmt: skip
    assert list(stream.vertices["a"].log) == ["first", "second", "third"]
    assert stream.messages == ["WARNING: something", "ERROR: failed to solve", "and why"]


def test_a_step_is_shown_in_one_short_line() -> None:
    assert shorten_command("RUN --mount=type=bind,from=a,target=/b \\\n   make\n  all") == "RUN make all"
    assert len(shorten_command("RUN " + "x" * 500)) == 80


def run_of(renderer: Renderer, plan: Plan, folder: Path, *names: str, **asked: Any) -> BuildRun:
    targets = tuple(t for t in plan.targets if t.id in names)
    dockerfiles = {t.id: renderer.dockerfile(t) for t in targets}
    request = BuildRequest(targets, folder=folder, **asked)
    project = renderer.project.changed(Changes(repository="registry.test/gpu"))
    return BuildRun(request, project, dockerfiles, Endpoint("unix:///x", "private"), revision="a" * 40, started=NOW)


NOW = datetime(2026, 11, 21, 10, 45, tzinfo=UTC)


@pytest.fixture
def open_run(full_plan: Plan, renderer: Renderer) -> BuildRun:
    names = (f"open-cuda13.5-debian13-{variant}" for variant in ("runtime", "devel"))
    return run_of(renderer, full_plan, Path("/build"), *names)


class Started(Exception):
    """Instead of a started program."""


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (Endpoint("unix:///x", "private"), "unix:///x"),
        (Endpoint("tcp://192.0.2.1:1", "DOCKER_HOST"), "tcp://192.0.2.1:1"),
        (Endpoint("tcp://192.0.2.2:1", "context"), None),
    ],
)
def test_buildx_is_led_to_the_engine_but_not_past_a_context(
    open_run: BuildRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Endpoint, expected: str | None
) -> None:
    environments = []

    def start(command: list[str], *, env: dict[str, str], **_: object) -> None:
        environments.append(env)
        raise Started

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with pytest.raises(Started):
        run_bake(replace(open_run, engine=engine, request=BuildRequest((), folder=tmp_path)), BuildProgress())
    assert [env.get("DOCKER_HOST") for env in environments] == [expected]


def failed(stage: str) -> EventStream:
    name = f"[open-cuda13_5-debian13-devel {stage} 2/3] RUN make"
    return read(
        vertex("a", name),
        log("a", "".join(f"line {n}\n" for n in range(60)) + "cc: error: no such file\n"),
        vertex("a", name, end=T1, error="process did not complete: exit code: 2"),
    )


@pytest.mark.parametrize("stage", ["ucx", "ucx-source"])
def test_a_failed_step_names_target_component_last_lines_and_how_to_see_it_again(
    open_run: BuildRun, stage: str
) -> None:
    text = explain_failure(open_run, failed(stage), 1)
    assert text.startswith("open-cuda13.5-debian13-devel: component ucx: a step failed\n")
    assert "exit code: 2" in text
    assert text.count("line ") == 24
    assert "cc: error: no such file" in text
    assert f"imagebuild build open-cuda13.5-debian13-devel --stage {stage} -v" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "E: Unable to locate package hto",
            "matrix.yaml:{}: images.open.packages.apt: debian13 has no package 'hto'; corr",
        ),
        (
            "E: Couldn't find any package by glob 'hto'",
            "debian13 has no package 'hto'; correct the name, or leave it out",
        ),
        (
            "E: Version '99*' for 'hto' was not found",
            "debian13 has no version 99 of hto; `apt-cache madison hto` in its",
        ),
        (
            "E: Version '9*' for 'openssh-server' was not found",
            "sshd/component.yaml:{}: packages.runtime: debian13 has",
        ),
        (
            "E: Unable to locate package nosuch",
            "open-cuda13.5-debian13-devel: debian13 has no package 'nosuch'; correct",
        ),
    ],
)
def test_a_package_that_is_not_there_is_found_in_the_files(
    open_run: BuildRun, full_plan: Plan, line: str, message: str
) -> None:
    document = open_run.project.matrix
    images = document.model.images
    named = images["open"].model_copy(update={"packages": ImagePackages(apt=("htop", "hto=99"))})
    model = document.model.model_copy(update={"images": {**images, "open": named}})
    project = replace(open_run.project, matrix=replace(document, model=model))
    name = "[open-cuda13_5-debian13-devel image 2/3] RUN apt-get"
    stream = read(vertex("a", name), log("a", f"{line}\n"), vertex("a", name, end=T1, error="exit code: 100"))
    last = explain_failure(replace(open_run, project=project), stream, 1).splitlines()[-1]
    assert re.search(re.escape(message).replace(r"\{\}", r"\d+"), last), last


def test_a_wheel_that_is_not_there_is_found_in_the_files(open_run: BuildRun) -> None:
    name = "[open-cuda13_5-debian13-devel nccl-wheel 2/3] RUN fetch-wheels"
    for printed, words in {
        "ERROR: No matching distribution found for nvidia-nccl-cu13==9": "the package index has no nvidia-nccl-cu13==9",
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If\n    nvidia-nccl-cu13==2.32.3 from x:":
        "nvidia-nccl-cu13 2.32.3 is not the file of the lock; `imagebuild lock --update nccl-wheel`",
    }.items():  # fmt: skip
        stream = read(vertex("a", name), log("a", f"{printed}\n"), vertex("a", name, end=T1, error="exit code: 1"))
        last = explain_failure(open_run, stream, 1).splitlines()[-1]
        assert re.search(rf"nccl-wheel/component.yaml:\d+: wheels: {re.escape(words)}", last), last


def test_without_a_failed_step_buildx_speaks(open_run: BuildRun) -> None:
    text = explain_failure(open_run, read("ERROR: Cannot connect to the Docker daemon"), 1)
    assert text == "docker buildx bake exited with 1:\nERROR: Cannot connect to the Docker daemon"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ucx", "write it as NAME=FOLDER"),
        ("ucy={}", "no component 'ucy' with a source in git; did you mean 'ucx'"),
        ("sshd={}", "no component 'sshd' with a source"),
        ("ucx=/does/not/exist", "is not a folder"),
        ("ucx={}", "is not a folder with something in it"),
    ],
)
def test_wrong_sources(project: Project, tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replaced_sources(project, {"ucx-source"}, [given.format(tmp_path)])


def test_a_source_is_named_by_its_component_its_pin_or_what_it_provides(project: Project, tmp_path: Path) -> None:
    (tmp_path / "configure").touch()
    stages = {f"{name}-source" for name in ("ucx", "nccl-git", "rdma-core-git", "pmix-git", "openmpi-git")}
    for name, component in {
        "ucx": "ucx", "nccl": "nccl-git", "nccl-git": "nccl-git", "rdma-core": "rdma-core-git",
        "pmix": "pmix-git", "openmpi": "openmpi-git", "mpi": "openmpi-git",
    }.items():  # fmt: skip
        assert replaced_sources(project, stages, [f"{name}={tmp_path}"]) == {f"{component}-source": str(tmp_path)}
    with pytest.raises(ConfigError, match="no selected target uses ucx"):
        replaced_sources(project, set(), [f"ucx={tmp_path}"])


def test_the_ca_bundle_is_the_one_given_or_the_one_the_machine_uses(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    assert ca_bundle(bundle, {"PIP_CERT": "/gone"}) == bundle
    assert ca_bundle(None, {"SSL_CERT_FILE": "", "PIP_CERT": str(bundle), "CURL_CA_BUNDLE": "/gone"}) == bundle
    with pytest.raises(ConfigError, match="PIP_CERT: /gone: cannot be read: No such file"):
        ca_bundle(None, {"PIP_CERT": "/gone", "CURL_CA_BUNDLE": str(bundle)})
    bundle.write_text("# A title\n")
    with pytest.raises(ConfigError, match=f"--ca {bundle}: has no certificate; name a file"):
        ca_bundle(bundle, {})


@pytest.mark.parametrize(
    ("stage", "component"),
    [("ucx", "ucx"), ("ucx-source", "ucx"), ("ucx-source-arm64", "ucx"), ("image", None), ("ucx-other", None)],
)
def test_the_component_of_a_stage(stage: str, component: str | None) -> None:
    assert component_of(stage, frozenset({"ucx", "nccl"})) == component


@pytest.mark.parametrize(
    ("github", "verbose", "lines"),
    [
        (False, False, ["ucx 2/3: RUN make → 1.0 s", "image 1/9: COPY a b → cached", "ucx 3/3: RUN false ✗ failed"]),
        (False, True, ["ucx | working", "ucx 2/3: RUN make → 1.0 s", "image 1/9: COPY a b → cached", "ucx 3/3: RUN false ✗ failed"]),
        (True, False, ["::group::ucx 2/3: RUN make (1.0 s)", "working", "::endgroup::", "image 1/9: COPY a b → cached", "ucx 3/3: RUN false ✗ failed"]),
    ],
)  # fmt: skip
def test_a_log_has_a_line_for_each_step_that_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], github: bool, verbose: bool, lines: list[str]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true" if github else "")
    events = [
        vertex("a", "[ucx 2/3] RUN make"),
        log("a", "working\n"),
        vertex("a", "[ucx 2/3] RUN make", end=T1),
        vertex("b", "[image 1/9] COPY a b", end=T0, cached=True),
        log("c", "of nothing that was shown\n"),
        vertex("d", "exporting to image", end=T1),
        vertex("e", "[ucx 3/3] RUN false", end=T1, error="exit code: 1"),
    ]
    stream, progress = EventStream(), BuildProgress(verbose=verbose)
    for event in stream.feed("\n".join(map(json.dumps, events)) + "\n"):
        progress.update(*event)
    shown = [re.sub(r"^ +\d+\.\d  ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert [line for line in shown if "of nothing" not in line] == lines


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    fake = FakeRegistry()
    monkeypatch.setattr(oci, "connect_registry", lambda _host: fake)
    return fake


@pytest.fixture
def run(full_plan: Plan, renderer: Renderer, tmp_path: Path) -> BuildRun:
    return run_of(renderer, full_plan, tmp_path, "quickstart-cuda13.5-debian13-runtime", output="push")


def export(run: BuildRun, digest: str) -> BuildResult:
    """Export what BuildKit left for the only target."""
    (result,) = export_images(run, [built(run, digest)], BuildProgress())
    return result


def layout(run: BuildRun) -> tuple[Path, str]:
    """What BuildKit leaves for two platforms: the folder and the digest of the index."""
    made = layouts.make(run.request.folder / run.request.targets[0].id, b"content")
    return made.layout.folder, made.digest


def built(run: BuildRun, digest: str | None, *steps: Step) -> BuildResult:
    (target,) = run.request.targets
    return BuildResult(
        target=target.id, digest=digest, tags=(target.name,), platforms=target.platforms, size_bytes=None, seconds=1,
        steps=steps,
    )  # fmt: skip


def test_a_push_leaves_the_index_and_one_tag_in_the_staging_repository(run: BuildRun, registry: FakeRegistry) -> None:
    folder, digest = layout(run)
    result = export(run, digest)
    held = registry.repositories["gpu/quickstart-staging"]
    ((tag, named),) = held.tags.items()
    assert named == digest
    assert result.tags == (f"registry.test/gpu/quickstart-staging:{tag}",)
    assert result.repository == "registry.test/gpu/quickstart-staging"
    assert set(result.manifests) == {"linux/amd64", "linux/arm64"}
    assert {*result.manifests.values(), digest} == set(held.manifests)
    assert not folder.exists()
    assert result.revision == "a" * 40
    assert result.dockerfile == hashlib.sha256(run.dockerfiles[result.target].text.encode()).hexdigest()
    assert (result.builder, result.started) == ("unix:///x", "2026-11-21T10:45:00Z")
    written = json.loads((run.request.folder / run.request.targets[0].id / "result.json").read_text())
    assert BuildResult.model_validate(written) == result


def test_a_push_that_was_interrupted_leaves_no_result_and_goes_on(run: BuildRun, registry: FakeRegistry) -> None:
    folder, digest = layout(run)

    def fail(what: str, repository: str, name: str) -> None:
        if what == "manifest":
            raise CommandError(f"{repository}: {what} {name}: connection lost")

    registry.before = fail
    with pytest.raises(CommandError, match="connection lost"):
        export(run, digest)
    assert not (run.request.folder / run.request.targets[0].id / "result.json").exists()
    sent = registry.changed("blob")
    assert len(sent) == 2  # config and layer of the first platform

    registry.before = None
    assert folder.exists()
    export(run, digest)
    assert len(registry.changed("blob")) == 3  # the platforms share the layer
    assert registry.changed("blob")[:2] == sent


def test_a_layout_without_a_platform_is_not_pushed(run: BuildRun, registry: FakeRegistry) -> None:
    folder, _ = layout(run)
    only = Layout(folder).write_index([i.descriptor for i in images_in(folder, folder) if i.platform == "linux/amd64"])
    with pytest.raises(ResultError, match="wrote no image for linux/arm64"):
        export(run, only)
    assert not registry.calls


def test_an_output_keeps_its_layout(run: BuildRun) -> None:
    folder, digest = layout(run)
    run = replace(run, request=replace(run.request, output=str(folder.parent)))
    kept = folder.rename(folder.parent / run.request.targets[0].id)
    result = export(run, digest)
    assert (kept / "index.json").exists()
    assert set(result.manifests) == {"linux/amd64", "linux/arm64"}
    assert result.repository is None
    image = json.loads(Layout(kept).path(result.manifests["linux/amd64"]).read_text())
    assert result.size_bytes == image["layers"][0]["size"]


def test_a_tag_says_when_and_what() -> None:
    assert staged_tag(f"sha256:{'0123456789ab' * 5}0123", NOW) == "staged-20261121T104500Z-0123456789ab"


def test_the_staging_repository_is_the_matrixs(project: Project) -> None:
    model = project.matrix.model
    publish = model.publish.model_copy(update={"staging": "{repository}/wait/{image}"})
    document = replace(project.matrix, model=model.model_copy(update={"publish": publish, "repository": "r.test/x"}))
    assert repository_name(replace(project, matrix=document), "quickstart") == "r.test/x/wait/quickstart"


def test_a_layout_is_replaced_when_the_build_succeeds_and_stays_when_it_fails(run: BuildRun) -> None:
    folder, _ = layout(run)
    (folder / "ingest").mkdir()
    before = (folder / "index.json").read_bytes()

    def fail() -> None:
        with layouts_replaced(run):
            assert not folder.exists()
            (folder / "ingest").mkdir(parents=True)  # BuildKit begins with it
            raise CommandError("a step failed")

    with pytest.raises(CommandError):
        fail()
    assert (folder / "index.json").read_bytes() == before
    with layouts_replaced(run):
        folder.mkdir()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_that_is_no_layout_is_not_touched(run: BuildRun) -> None:
    folder, _ = layout(run)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has thesis.txt, so it is no OCI layout"), layouts_replaced(run):
        raise AssertionError
    with layouts_replaced(replace(run, request=replace(run.request, stage="cuda"))):  # which writes no layout
        assert (folder / "thesis.txt").read_text() == "mine"


def test_caches_are_written_that_are_new_or_missing(
    run: BuildRun, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (CacheEntry(stage, "linux/amd64", "0" * 16) for stage in ("cuda", "nccl-wheel"))
    caches = {run.request.targets[0].id: [first, second]}
    run = replace(run, caches=caches, request=replace(run.request, cache="registry.test/cache"))
    steps = [
        Step(name="RUN x", target="", stage=stage, component=None, cached=cached, seconds=1)
        for stage, cached in (("cuda", False), ("nccl-wheel", True))
    ]
    written: list[list[str]] = []
    monkeypatch.setattr(buildx, "execute_bake", lambda run, content, *_: written.append(list(content["target"])))
    for tag in (first.tag, second.tag):
        registry.at("cache").put_manifest(Manifest(b"{}", "application/vnd.oci.image.manifest.v1+json"), tag)
    write_caches(run, [built(run, None)], BuildProgress())
    assert written == []
    write_caches(run, [built(run, None, *steps)], BuildProgress())
    assert written.pop() == [first.tag]
    registry.repositories["cache"].tags.pop(second.tag)
    write_caches(run, [built(run, None, *steps)], BuildProgress())
    assert written.pop() == [first.tag, second.tag]
