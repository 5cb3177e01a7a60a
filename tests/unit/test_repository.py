"""What this repository ships fits together: components have checks, shell and Dockerfiles are clean, schemas fresh."""

import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from imagebuild.project.component import Component
from imagebuild.project.lockfile import Lock
from imagebuild.project.matrix import Matrix
from imagebuild.project.plan import Plan
from imagebuild.project.project import Project
from imagebuild.render.renderer import Renderer
from tests.conftest import ROOT, ran

PROGRAMS = Path(sysconfig.get_path("scripts"))
SCRIPTS = sorted(p for p in (ROOT / "dockerfiles").glob("components/*/*/*") if p.parent.name in ("checks", "files"))
SCRIPTS += (ROOT / "imagebuild").glob("*/templates/*.sh")


def test_every_installed_component_has_checks(project: Project) -> None:
    for name in {c for image in project.matrix.model.images.values() for c in image.components}:
        assert project.components[name].model.checks, f"{name} has no check"


@pytest.mark.parametrize("model", [Matrix, Component, Lock])
def test_schemas(model: type[Matrix | Component | Lock], golden: Callable[[str, str], None]) -> None:
    text = json.dumps(model.model_json_schema(by_alias=True), indent=1) + "\n"
    golden(f"schemas/{model.__name__.lower()}.json", text)


@pytest.mark.programs
def test_shell_passes_shellcheck(project: Project, tmp_path: Path) -> None:
    files = [p for p in SCRIPTS if p.suffix == ".sh" or p.read_text().startswith("#!/bin/")]
    assert files
    for name, document in project.components.items():
        for check in document.model.checks:
            if check.run is not None:
                file = tmp_path / f"{name}-{check.name}.sh"
                file.write_text(check.run)
                files.append(file)
    # SC2164: checks run under `bash -e`, so a failed cd ends them.
    options = ("--shell=bash", "--severity=warning", "--exclude=SC2164")
    assert not ran(PROGRAMS / "shellcheck", *options, *files).stdout


@pytest.mark.programs
def test_rendered_dockerfiles_pass_hadolint(full_plan: Plan, renderer: Renderer, tmp_path: Path) -> None:
    """hadolint checks each stage separately, so of stages that differ only in numbers, one keeps its steps."""
    seen: set[str] = set()
    for target in full_plan.targets:
        start, *stages = re.split("^(?=FROM )", renderer.dockerfile(target).text, flags=re.MULTILINE)
        kinds = [re.sub("[0-9a-f]{7,}|[0-9]+", "0", stage) for stage in stages]
        shown = [s if kind not in seen else s[: s.index("\n") + 1] for s, kind in zip(stages, kinds, strict=True)]
        if not seen.issuperset(kinds):
            (tmp_path / target.id).write_text("".join([start, *shown]))
        seen.update(kinds)
    assert len(seen) > 50
    done = ran(PROGRAMS / "hadolint", "--config", ROOT / ".hadolint.yaml", "--no-color", *tmp_path.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.programs
def test_each_configure_shows_the_end_of_its_log(tmp_path: Path) -> None:
    texts = {path.parent.name: path.read_text() for path in ROOT.glob("dockerfiles/components/*/build.j2")}
    runs = {name for name, text in texts.items() if re.search(r"(^|\s)\./\S*configure", text, re.MULTILINE)}
    assert (
        runs == {name for name, text in texts.items() if "or_show_log()" in text} >= {"openmpi-hpcx", "perftest", "ucx"}
    )
    macros = jinja2.Environment(trim_blocks=True).from_string((ROOT / "dockerfiles/macros.j2").read_text())
    end = macros.module.or_show_log("no UCX")  # type: ignore[attr-defined]
    (tmp_path / "part").mkdir()
    for name, status in (("config.log", 0), ("part/config.log", 1)):
        log = f"configure:9: error: of {name}\n## ----- ##\n## Cache variables. ##\nx=1\nconfigure: exit {status}\n"
        (tmp_path / name).write_text(log)
    done = ran("bash", "-euo", "pipefail", "-c", f"false {end}\necho no", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the end of ./part/config.log:\nconfigure:9: error: of part/config.log" in done.stderr
    assert done.stderr.endswith("no UCX; the reason is in config.log above\n")
    assert "of config.log" not in done.stderr


def test_no_component_knows_an_image_by_its_name(project: Project) -> None:
    """Conditions of components name what an image has."""
    for name, document in project.components.items():
        for key in ("supports", "excludes", "facts", "env", "checks", "waivers"):
            assert not [entry.when for entry in getattr(document.model, key) if "image" in entry.when], (name, key)
