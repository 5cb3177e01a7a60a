"""The commit of a project."""

import os
from pathlib import Path
from subprocess import check_call
from typing import Any

import pytest

from imagebuild.project.revision import current_revision, origin_of_build
from tests.conftest import data, git

CASES = data("cases/project/revision")

pytestmark = pytest.mark.programs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "dockerfiles").mkdir()
    for name in ("matrix.yaml", "dockerfiles/Dockerfile.j2", "other.txt"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_a_commit_and_changes_of_it(project: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")
    assert current_revision(project) == commit
    (project / "verify.json").write_text("a result of CI is no change")
    assert current_revision(project) == commit
    (project / "dockerfiles/new.j2").write_text("but a template is")
    assert current_revision(project) == f"{commit}-dirty"
    (project / "dockerfiles/new.j2").unlink()
    (project / "other.txt").write_text("2")
    assert current_revision(project) == f"{commit}-dirty"
    (project / ".git").rename(project / "gone")
    assert current_revision(project) is None


@pytest.mark.parametrize("case", CASES["hidden-changes"], ids=lambda case: case["name"])
def test_no_file_that_is_built_is_hidden_from_the_commit(case: dict[str, Any], project: Path) -> None:
    programs = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull}
    people = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    check_call(["bash", "-euc", case["run"]], cwd=project, env={**programs, **people})
    commit = git(project, "rev-parse", "HEAD")
    assert current_revision(project) == (commit if case.get("clean") else f"{commit}-dirty")


@pytest.mark.parametrize(("remote", "source"), CASES["the-source-is-where-people-find-it-and-no-secret"])
def test_the_source_is_where_people_find_it_and_no_secret(remote: str, source: str | None) -> None:
    found = origin_of_build(Path(), {}, lambda *_, **__: f"{remote}\n")
    assert found == ({"source": source} if source else {})


def test_a_job_of_github_knows_its_run_and_workflow() -> None:
    workflow = "acme/images/.github/workflows/images.yml@refs/heads/main"
    run = {"GITHUB_RUN_ID": "42", "GITHUB_RUN_ATTEMPT": "2", "GITHUB_WORKFLOW_REF": workflow}
    assert origin_of_build(Path(), {"GITHUB_REPOSITORY": "acme/images", **run}) == {
        "source": "https://github.com/acme/images",
        "run": "https://github.com/acme/images/actions/runs/42/attempts/2",
        "workflow": f"https://github.com/{workflow}",
    }
