"""How many modules run before a command starts what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docker.conftest import TARGET, copy_of_project
from tests.modules_run import count_modules_run

pytestmark = pytest.mark.docker


def test_a_build_runs_few_modules_before_buildx_starts(tmp_path: Path, environ: dict[str, str]) -> None:
    # A build that begins removes the result of the one before, which other tests read in the shared folder.
    project = copy_of_project(tmp_path / "project")
    ran = count_modules_run(["build", TARGET, "--base", "registry"], "docker buildx bake", environ, cwd=project)
    assert {"build.bake", "render.renderer"} < set(ran.modules) <= set(ran.imported)
    assert len(ran.imported) <= 25, f"{ran}\nnot run: {set(ran.imported) - set(ran.modules)}"
    others = {"build.base", "build.bundle", "build.change", "build.inputs", "oci.registry"}
    assert not others & set(ran.imported), "a build without mirrors, bundle and cache needs none of these"
