"""`plan --from`: revisions, folders, and what is printed."""

import json
import subprocess
from pathlib import Path

import pytest

from imagebuild.core import ConfigError
from imagebuild.project import ProjectPaths, files_at_revision
from tests.conftest import Files
from tests.unit.conftest import Call, Runner


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tiny.root)
    return command


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def repository(tiny: Files) -> Files:
    git(tiny.root, "init", "--quiet")
    git(tiny.root, "add", ".")
    git(tiny.root, "commit", "--quiet", "--message", "first")
    git(tiny.root, "tag", "v1")
    return tiny


@pytest.mark.programs
def test_a_revision(repository: Files, call: Call) -> None:
    assert json.loads(call("plan", "--from", "v1", "--json", "-")[1])["steps"] == []
    repository.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    made = json.loads(call("plan", "--from", "v1", "--json", "-")[1])
    assert [(part["name"], part["run"]) for part in made["components"]] == [("library", 1), ("image", 0)]
    assert (made["before"], made["after"]) == ("v1", "the working tree")
    # Between two revisions the working tree does not count.
    assert json.loads(call("plan", "--from", "v1", "--to", "HEAD", "--json", "-")[1])["steps"] == []
    git(repository.root, "commit", "--quiet", "--all", "--message", "second")
    assert len(json.loads(call("plan", "--from", "HEAD~1", "--to", "HEAD", "--json", "-")[1])["steps"]) == len(
        made["steps"]
    )


@pytest.mark.programs
def test_mistakes_of_a_revision_are_shown_as_its_own(repository: Files, call: Call) -> None:
    repository.write("matrix.yaml", "repositry: x\n")
    git(repository.root, "commit", "--quiet", "--all", "--message", "wrong")
    repository.write("matrix.yaml", git(repository.root, "show", "v1:matrix.yaml"))
    status, _, error = call("plan", "--from", "HEAD")
    assert (status, "HEAD:matrix.yaml:1: repositry: unknown key" in error) == (2, True), error


@pytest.mark.programs
@pytest.mark.parametrize("name", ["v2", "--all", "v1:matrix.yaml"])
def test_an_unknown_revision_is_one_line(repository: Files, call: Call, name: str) -> None:
    status, _, error = call("plan", f"--from={name}")
    assert (status, error.count("\n")) == (2, 1)
    assert f"{name}: neither a folder with matrix.yaml nor a revision of {repository.root}" in error


@pytest.mark.programs
def test_a_matrix_outside_a_repository_or_that_a_revision_lacks(repository: Files, call: Call, tmp_path: Path) -> None:
    (repository.root / "other.yaml").write_text((repository.root / "matrix.yaml").read_text())
    assert "v1: has no other.yaml" in call("plan", "--matrix", "other.yaml", "--from", "v1")[2]
    (repository.root / ".git").rename(repository.root / "gone")
    assert "is in no git repository; name a folder instead" in call("plan", "--from", "v1")[2]


@pytest.mark.programs
def test_a_lock_elsewhere_is_that_of_both_sides(repository: Files, call: Call, tmp_path: Path) -> None:
    lock = tmp_path.parent / "other.lock"
    lock.write_text("wheels: {}\n")
    assert call("plan", "--from", "v1", "--to", "v1", "--lock", str(lock))[0] == 0


def test_git_is_asked_for_what_there_is(tmp_path: Path) -> None:
    places = ProjectPaths(tmp_path / "matrix.yaml", tmp_path / "dockerfiles", tmp_path / "imagebuild.lock")
    run = Runner({})
    with pytest.raises(ConfigError, match="in no git repository"), files_at_revision("main", places, run):
        pass
    assert run.calls == [f"git -C {tmp_path} rev-parse --show-toplevel"]


def test_a_folder_with_a_copy(tiny: Files, call: Call) -> None:
    copy = Files(tiny.root / "copy")
    copy.replace("matrix.yaml", 'library: "1.2"', 'library: "1.1"')
    status, out, error = call("plan", "tiny-cuda13.0*runtime", "--from", "copy", "--platform", "linux/amd64")
    assert status == 0, error
    assert out.splitlines() == [
        "component  RUN steps  compile  other steps  targets  time",
        "library    1 of 1     0        0            1        unknown",
        "image      0 of 1     0        1            1        unknown",
        "",
        "target                          RUN steps  compile  other steps  time",
        "tiny-cuda13.0-debian13-runtime  1 of 3     0        1            unknown",
        "",
        "from copy to the working tree:",
        "RUN steps executed: 1 (of 3); compile steps 0; other steps 1; a step that targets or platforms share counts once",
        "2 of 2 have no past time",
    ]
    markdown = call("plan", "--from", "copy", "--markdown")[1]
    assert "| library | 1 of 1 | 0 | 0 | 3 | unknown |" in markdown.splitlines()
    assert "**from copy to the working tree**" in markdown


def test_past_times_are_shown(tiny: Files, call: Call) -> None:
    step = {"name": "[library 1/2] RUN x", "target": "", "stage": "library", "component": "library", "cached": False}
    result = {"target": "t", "digest": None, "tags": [], "platforms": ["linux/amd64"], "size_bytes": None, "seconds": 1}
    tiny.write("times/t/result.json", json.dumps({**result, "steps": [{**step, "seconds": 125.0}]}))
    _, out, _ = call("plan", "--from", "nothing", "--timings", "times")
    assert "library    1 of 1     0        0            3        2 min 05 s" in out.splitlines()
    assert "in past builds 1 of them took 2 min 05 s, one after the other" in out


def test_from_nothing_and_from_itself(call: Call) -> None:
    assert "RUN steps executed: 3 (of 3)" in call("plan", "--from", "nothing")[1]
    assert "RUN steps executed: 0 (of 3)" in call("plan", "--from", ".")[1]
    set_too = call("plan", "--from", ".", "--set", "library=2")[1]
    assert "from . to the working tree --set library=2:" in set_too


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--to", "x"], 2, "need --from"),
        (["--markdown"], 2, "need --from"),
        (["--from", ".", "--json", "-", "--markdown"], 2, "exclude each other"),
        (["--from", ".", "--why"], 2, "not for --github or --why"),
        (["--from", ".", "--base", "mine"], 2, "use bootstrap or registry"),
        (["--from", ".", "--to", "nothing"], 2, "only --from can be nothing"),
        (["--from", "./dockerfiles"], 2, "has no matrix.yaml"),
        (["--from", ".", "--platform", "linux/arm64"], 2, "is not for linux/arm64"),
        (["--from", ".", "none"], 3, "no target fits none"),
    ],
)
def test_exit_codes(call: Call, arguments: list[str], status: int, message: str) -> None:
    got, _, error = call("plan", *arguments)
    assert (got, message in error) == (status, True), error
