"""The command `imagebuild build`, without an engine."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from imagebuild.build import build
from imagebuild.build.bake import BuildRequest
from imagebuild.project.project import Project
from imagebuild.project.records import BuildResult
from imagebuild.render.renderer import Renderer
from tests.conftest import LIBRARY, LOCK, Files
from tests.unit.conftest import Call


def test_a_build_says_what_is_adapted_before_it_begins(call: Call, tiny: Files) -> None:
    url = "https://example.org/a.tar"
    unpacked = "unpacked: {prefix: /opt/x, script: ':', left-out: [OLD_*]}"
    tiny.component("library", f"{LIBRARY}archive: {url}\n{unpacked}\n", build="FROM scratch AS library\n")
    facts = {"environment": {"OLD_PATH": "/bin", "PATH": "/opt/x/bin"}, "absent": ["bin"]}
    tiny.lock({**LOCK, "archives": {url: {"sha256": "a" * 64, "facts": facts}}})
    status, out, err = call("build", "tiny-cuda12.9*", "--stage", "gone")
    lines = [line for line in out.splitlines() if line.startswith("adapted: ")]
    assert lines == [
        "adapted: library: OLD_PATH: left out of images",
        "adapted: library: PATH: /opt/x/bin is not in the image",
    ]
    assert (status, "no selected target has this stage" in err) == (2, True)


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
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"RUN mine")))
    assert call("render", arguments[0], "--append", "-")[1].endswith("\nRUN mine\n")
