"""The commit of a project."""

from pathlib import Path

import pytest

from imagebuild.core import run_program
from imagebuild.project import current_revision

pytestmark = pytest.mark.programs


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return run_program("git", "-C", str(folder), *identity, *words).strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "dockerfiles").mkdir()
    for name in ("matrix.yaml", "dockerfiles/Dockerfile.j2", "other.txt"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def current(folder: Path) -> str | None:
    return current_revision(folder / "matrix.yaml", folder / "dockerfiles")


def test_a_commit_and_changes_of_it(project: Path) -> None:
    commit = git(project, "rev-parse", "HEAD")
    assert current(project) == commit
    (project / "verify.json").write_text("a result of CI is no change")
    assert current(project) == commit
    (project / "dockerfiles/new.j2").write_text("but a template is")
    assert current(project) == f"{commit}-dirty"
    (project / "dockerfiles/new.j2").unlink()
    (project / "other.txt").write_text("2")
    assert current(project) == f"{commit}-dirty"


def test_no_repository(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").touch()
    assert current(tmp_path) is None
