"""Repositories whose configuration, hooks and folders try to run a program."""

from pathlib import Path

import pytest

from imagebuild.build.inputs import copy_commit
from imagebuild.core.errors import ImagebuildError, ResultError
from imagebuild.project.revision import current_revision, files_at_revision, origin_of_build
from tests.conftest import data, git, ran

pytestmark = pytest.mark.programs


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("a.txt", "matrix.yaml"):
        (folder / name).write_text("1\n")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "one")):
        git(folder, *words)
    return folder


def attempted(top: Path, scratch: Path) -> list[str]:
    """Read a repository in all ways of imagebuild. Return the ways that refused it."""
    refused = []
    if current_revision(top) is None:
        refused.append("revision")
    try:
        with files_at_revision("HEAD", top) as files:
            assert (files / "a.txt").read_text() == "1\n"
    except ImagebuildError:
        refused.append("files")
    origin_of_build(top, {})
    commit = ran("git", "-c", "core.fsmonitor=false", "-C", str(top), "rev-parse", "HEAD").stdout.strip()
    try:
        copy_commit(top, commit or "0" * 40, scratch / "made")
        assert (scratch / "made/a.txt").read_bytes() == b"1\n"
    except ResultError:
        refused.append("bundle")
    return refused


@pytest.mark.parametrize(("trick", "script"), data("git-tricks").items())
def test_no_trick_of_a_repository_runs_a_program(tmp_path: Path, trick: str, script: str) -> None:
    top, other, marker = repository(tmp_path / "top"), tmp_path / "other", tmp_path / "ran"
    repository(other / "plain")
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {marker}\n")
    evil.chmod(0o755)
    who = {f"GIT_{part}_{what}": "x" for part in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**who, "EVIL": str(evil), "OTHER": str(other), "PATH": "/usr/bin:/bin", "HOME": "/"}
    ran("bash", "-euc", script, cwd=top, env=env, check=True)
    marker.unlink(missing_ok=True)
    assert ("bundle" in attempted(top, tmp_path)) or not trick.startswith("REFUSED")
    assert not marker.exists(), "imagebuild ran a program of the repository"


def test_only_the_commit_determines_the_files_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, home = repository(tmp_path / "top"), tmp_path / "home"
    files = {".index": "1\n", ".index.lock": "2\n", "a.txt": "1\n", "b.txt": "$Id$\n", "matrix.yaml": "1\n"}
    for name, text in (files | {".gitattributes": "a.txt filter=own\n"}).items():
        (top / name).write_text(text)
    git(top, "add", ".")
    git(top, "commit", "--quiet", "-m", "two")
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/attributes").write_text("* ident eol=crlf text\n")
    (home / ".gitconfig").write_text('[core]\n\tautocrlf = true\n[filter "own"]\n\tsmudge = tr 1 2\n')
    monkeypatch.setenv("HOME", str(home))
    copy_commit(top, ran("git", "-C", str(top), "rev-parse", "HEAD").stdout.strip(), tmp_path / "made")
    assert {name: (tmp_path / "made" / name).read_bytes().decode() for name in files} == files


def test_the_tricks_work_on_git_itself(tmp_path: Path) -> None:
    """A marker that nothing creates would prove nothing."""
    top, marker = repository(tmp_path / "top"), tmp_path / "ran"
    git(top, "config", "core.fsmonitor", f"touch {marker}; false")
    git(top, "status")
    assert marker.exists()


def test_linked_work_trees_and_submodules_are_read(tmp_path: Path) -> None:
    top, linked = repository(tmp_path / "top"), tmp_path / "linked"
    git(
        top, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(repository(tmp_path / "sub")), "sub"
    )
    git(top, "commit", "--quiet", "-m", "sub")
    git(top, "worktree", "add", "--quiet", str(linked), "HEAD")
    git(top, "remote", "add", "origin", "git@git.example:acme/images.git")
    commit = git(top, "rev-parse", "HEAD")
    assert (current_revision(top), current_revision(linked)) == (commit, commit)
    assert origin_of_build(linked, {}) == {"source": "https://git.example/acme/images"}
    with files_at_revision("HEAD", top) as files:
        assert (files / "sub" / "a.txt").exists()
    (top / "sub" / "a.txt").write_text("2")
    assert current_revision(top) == f"{commit}-dirty"


@pytest.mark.parametrize("branch", ["main", "release/1.0", 'ä."b"', "a#b;c"])
@pytest.mark.parametrize("short", ["@{upstream}", "@{u}"])
def test_the_upstream_of_a_branch_is_a_revision(tmp_path: Path, branch: str, short: str) -> None:
    top = repository(tmp_path / "top")
    git(top, "checkout", "--quiet", "-B", branch)
    git(top, "init", "--quiet", "--bare", str(tmp_path / "r.git"))
    git(top, "remote", "add", "my.origin", str(tmp_path / "r.git"))
    git(top, "push", "--quiet", "--set-upstream", "my.origin", branch)
    (top / "a.txt").write_text("2\n")
    git(top, "commit", "--quiet", "--all", "-m", "two")
    for reference in (short, f"{branch}{short}"):
        with files_at_revision(reference, top) as files:
            assert (files / "a.txt").read_text() == "1\n"
