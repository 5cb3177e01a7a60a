import json
import re
from pathlib import Path

import pytest

from imagebuild.build import (
    BakeRequest,
    BuildProgress,
    EventStream,
    component_of,
    explain_failure,
    replaced_sources,
    run_bake,
)
from imagebuild.core import ConfigError, ca_bundle
from imagebuild.oci import Endpoint
from imagebuild.project import Plan, Project
from imagebuild.render import Renderer
from tests.unit.build.test_events import T0, T1, log, read, vertex


@pytest.fixture
def request_(project: Project, full_plan: Plan, renderer: Renderer) -> BakeRequest:
    targets = tuple(t for t in full_plan.targets if t.id.startswith("open-cuda13.5"))
    return BakeRequest(
        targets=targets,
        dockerfiles={t.id: renderer.dockerfile(t) for t in targets},
        folder=Path("/build"),
        engine=Endpoint("unix:///x", "private"),
        components=frozenset(project.components),
    )


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Endpoint, expected: str | None
) -> None:
    environments = []

    def start(command: list[str], *, env: dict[str, str], **_: object) -> None:
        environments.append(env)
        raise Started

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    request = BakeRequest((), {}, tmp_path, engine)
    with pytest.raises(Started):
        run_bake(request, BuildProgress())
    assert [env.get("DOCKER_HOST") for env in environments] == [expected]


def failed(stage: str) -> EventStream:
    name = f"[open-cuda13_5-debian13-devel {stage} 2/3] RUN make"
    return read(
        vertex("a", name, started=T0),
        log("a", "".join(f"line {n}\n" for n in range(60)) + "cc: error: no such file\n"),
        vertex("a", name, started=T0, completed=T1, error="process did not complete: exit code: 2"),
    )


@pytest.mark.parametrize("stage", ["ucx", "ucx-source"])
def test_a_failed_step_names_target_component_last_lines_and_how_to_see_it_again(
    request_: BakeRequest, stage: str
) -> None:
    text = explain_failure(request_, failed(stage), 1)
    assert text.startswith("open-cuda13.5-debian13-devel: component ucx: a step failed\n")
    assert "exit code: 2" in text
    assert text.count("line ") == 24
    assert "cc: error: no such file" in text
    assert f"imagebuild build open-cuda13.5-debian13-devel --stage {stage} -v" in text


def test_without_a_failed_step_buildx_speaks(request_: BakeRequest) -> None:
    text = explain_failure(request_, read("ERROR: Cannot connect to the Docker daemon"), 1)
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
def test_wrong_sources(project: Project, full_plan: Plan, tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replaced_sources(project, full_plan.targets, [given.format(tmp_path)])


def test_a_source_that_no_selected_target_uses(project: Project, full_plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "configure").touch()
    quickstart = [t for t in full_plan.targets if t.image == "quickstart"]
    with pytest.raises(ConfigError, match="no selected target uses ucx"):
        replaced_sources(project, quickstart, [f"ucx={tmp_path}"])
    assert replaced_sources(project, full_plan.targets, [f"ucx={tmp_path}"]) == {"ucx-source": str(tmp_path)}


def test_the_ca_bundle_is_the_one_given_or_the_one_the_machine_uses(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.touch()
    assert ca_bundle(bundle, {}) == bundle
    assert ca_bundle(None, {"PIP_CERT": "/gone", "CURL_CA_BUNDLE": str(bundle)}) == bundle
    with pytest.raises(ConfigError, match="no such file"):
        ca_bundle(tmp_path / "gone", {})


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
        vertex("a", "[ucx 2/3] RUN make", started=T0),
        log("a", "working\n"),
        vertex("a", "[ucx 2/3] RUN make", started=T0, completed=T1),
        vertex("b", "[image 1/9] COPY a b", started=T0, completed=T0, cached=True),
        log("c", "of nothing that was shown\n"),
        vertex("d", "exporting to image", started=T0, completed=T1),
        vertex("e", "[ucx 3/3] RUN false", started=T0, completed=T1, error="exit code: 1"),
    ]
    stream, progress = EventStream(), BuildProgress(verbose=verbose)
    for event in stream.feed("\n".join(map(json.dumps, events)) + "\n"):
        progress.update(*event)
    shown = [re.sub(r"^ +\d+\.\d  ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert [line for line in shown if "of nothing" not in line] == lines
