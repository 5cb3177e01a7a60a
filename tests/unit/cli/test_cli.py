"""Exit codes, and what is printed, without an engine."""

import io
import json
import shlex
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from imagebuild import __version__
from imagebuild.build import build
from imagebuild.build.bake import BuildRequest
from imagebuild.project.project import Project
from imagebuild.project.records import BuildResult
from imagebuild.render.renderer import Renderer
from tests.conftest import LIBRARY, LOCK, Files, data
from tests.unit.conftest import Call


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tiny.root)
    return command


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"imagebuild {__version__}\n", "")


def test_plan_says_why_and_how_many_sources_have_no_pin(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'tool: "3.4"', 'tool: "3.44"')
    status, printed, shown = call("plan", "--why")
    assert (status, shown) == (0, "sources without a pin: 1; `imagebuild lock tiny` adds them\n")
    for words in ("tiny-cuda13.0-debian13-runtime", "no-old-devel", "nobody asked for it"):
        assert words in printed


def test_a_build_says_what_is_adapted_before_it_begins(call: Call, tiny: Files) -> None:
    url = "https://example.org/a.tar"
    unpacked = "unpacked: {prefix: /opt/x, script: ':', left-out: [OLD_*]}"
    tiny.component("library", f"{LIBRARY}archive: {url}\n{unpacked}\n", build="FROM x AS library\n")
    facts = {"environment": {"OLD_PATH": "/bin", "PATH": "/opt/x/bin"}, "absent": ["bin"]}
    tiny.lock({**LOCK, "archives": {url: {"sha256": "a" * 64, "facts": facts}}})
    status, out, err = call("build", "tiny-cuda12.9*", "--stage", "gone")
    lines = [line for line in out.splitlines() if line.startswith("adapted: ")]
    assert lines == [
        "adapted: library: OLD_PATH: no image has these",
        "adapted: library: PATH: /opt/x/bin is not in the image",
    ]
    assert (status, "no selected target has this stage" in err) == (2, True)


def test_the_header_has_the_command_that_makes_the_same_file_again(call: Call, tiny: Files) -> None:
    tiny.write("my more", "RUN mine")
    arguments = ["render", "tiny-cuda13.0-debian13-runtime", "--set", "library=1.3", "--append", "my more"]
    _, text, _ = call(*arguments, "--for", "standalone")
    written = next(line for line in text.splitlines() if line.startswith("# Written by"))
    assert written.startswith(f"# Written by imagebuild {__version__}, lock ")
    again = shlex.split(written.partition(":  ")[2])
    assert again == ["imagebuild", *arguments, "--for", "standalone"]
    assert call(*again[1:])[1] == text
    assert ("type=secret" in text, "type=secret" in call(*arguments)[1]) == (False, True)
    assert text.endswith("\nRUN mine\n")


def test_a_build_takes_the_file_that_render_prints(
    call: Call, tiny: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = f"r.test/acme/base@sha256:{'a' * 64}"
    arguments = ["tiny-cuda13.0-debian13-runtime", "--set", "library=1.3", "--base-image", base, "--append", "more"]
    tiny.write("more", 'LABEL x="mine"\nCMD ["mine"]')
    how = ["--project", ".", "--platform", "linux/amd64"]
    built: list[str] = []

    def record(_: Project, renderer: Renderer, request: BuildRequest) -> list[BuildResult]:
        built.append(renderer.dockerfile(request.targets[0]).text)
        assert request.again == (*how, *arguments[1:])
        return []

    monkeypatch.setattr(build, "build_targets", record)
    assert call("build", *arguments, *how, "--json", "-")[0] == 0
    assert call("render", *arguments)[1:] == (built[0], ANY)
    assert f"FROM {base} AS image" in built[0]
    assert built[0].endswith('LABEL x="mine"\nCMD ["mine"]\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("RUN mine"))
    assert call("render", arguments[0], "--append", "-")[1].endswith("\nRUN mine\n")


def test_unresolved_prints_what_the_lock_lacks(call: Call, tiny: Files) -> None:
    tiny.lock({})
    status, _, complaint = call("render", "tiny-cuda13.0-debian13-runtime")
    assert (status, "or print the Dockerfile with --unresolved" in complaint) == (2, True)
    status, text, _ = call("render", "tiny-cuda13.0-debian13-runtime", "--unresolved")
    assert (status, "debian:13-slim@sha256:unresolved" in text) == (0, True)
    assert text.startswith("# This cannot be built yet. imagebuild.lock: 2 of 2 sources have no pin, so nothing would")


def test_without_a_matrix_the_shipped_one_is_named(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    status, text, complaint = call("plan", "quickstart", "--json", "-")
    assert (status, json.loads(text)["targets"][0]["image"]) == (0, "quickstart")
    assert complaint.startswith(f"{tmp_path}/empty has no matrix.yaml, so these are the images that come with")
    assert complaint.count("\n") == 1
    assert call("plan", "--project", tmp_path)[2] == ""


def test_another_base_of_the_same_release(call: Call) -> None:
    _, text, _ = call("render", "tiny-cuda13.0-debian13-runtime", "--base-image", "debian:13.7-slim")
    assert "FROM debian:13.7-slim AS image\n" in text
    status, _, complaint = call("render", "tiny-cuda13.0-debian13-runtime", "--base-image", "x\nRUN y")
    assert (status, "not an image" in complaint) == (2, True)


@pytest.mark.parametrize(("line", "names"), data("completions").items())
def test_a_shell_completes_commands_and_names_of_the_project(
    call: Call, monkeypatch: pytest.MonkeyPatch, line: str, names: list[str]
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # so that the program is called imagebuild
    monkeypatch.setenv("_IMAGEBUILD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"imagebuild {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert call()[1].splitlines()[: len(names)] == names
