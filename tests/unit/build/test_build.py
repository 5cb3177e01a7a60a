"""Requests that cannot be fulfilled. Builds are tested with an engine, in tests/docker."""

from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagebuild.build import buildx
from imagebuild.build.bake import BuildRequest
from imagebuild.build.build import check_request, name_known_faults
from imagebuild.build.nodes import current_nodes
from imagebuild.core.errors import ConfigError
from imagebuild.oci import engine
from imagebuild.project.project import Project
from tests.conftest import Files
from tests.unit.conftest import Call


def test_a_rebuild_is_of_a_day_from_the_lock_s_date_to_today(project: Project) -> None:
    for day in (date(2020, 1, 1), date(2999, 1, 1)):
        with pytest.raises(ConfigError, match=f"--rebuild {day}: choose a day from the lock's date"):
            check_request(BuildRequest((), rebuilt=day), {}, project.lock.date)
    with pytest.raises(ConfigError, match="--rebuild 2999-01-01: choose a day until today"):
        check_request(BuildRequest((), rebuilt=date(2999, 1, 1)), {}, None)
    assert project.lock.date
    check_request(BuildRequest((), rebuilt=project.lock.date), {}, project.lock.date)


@pytest.mark.parametrize("name", ["", " ", "a,b", "tcp://192.0.2.1:1234", "../x", "-x"])
def test_a_builder_has_a_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--builder '{name}': is not the name of a builder; `docker buildx ls` lists"
    ):
        check_request(BuildRequest((), builders=(name,)), {}, None)


@pytest.mark.parametrize(("version", "named"), [("v0.31.1", True), ("v0.99.0", False), ("v0.0.0+unknown", False)])
def test_known_faults_of_buildkit_are_named(version: str, named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"Name: default\nNodes:\nName: default\nStatus: running\nBuildKit version: {version}\n"
    name_known_faults(current_nodes(engine.Endpoint("unix:///x", "context"), lambda *_, **__: text))
    printed = " ".join(capsys.readouterr().err.split())
    assert (f"known faults of BuildKit {version}: buildkit-0.31.2-concurrent-crash; " in printed) == named
    assert bool(printed) == named


WRITTEN = ["", "bake.json", "metadata.json", "empty", "{id}"]
WRITTEN += [f"{{id}}/{name}" for name in ("Dockerfile", "result.json", "layout", "build.log")]


@pytest.mark.programs
@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_a_cloned_project_changes_no_other_file(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target, outside = "tiny-cuda13.0-debian13-runtime", tiny.root.parent / f"{tiny.root.name}-outside"
    outside.mkdir()
    (outside / "blobs").write_text("mine")
    monkeypatch.chdir(tiny.root)
    monkeypatch.setattr(engine, "find_engine", lambda _: engine.Endpoint("tcp://x", "private"))
    monkeypatch.setattr(buildx, "staging_repository", Mock())
    link = Path("build", name.format(id=target))
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    status, _, shown = command("build", target, "--push", "--base", "registry")
    assert (status, f"{link}: is a link to {outside}; remove the link" in shown) == (2, True), shown
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("blobs", "mine")]
