"""Submodules: which ones a commit has, and where they come from. Also fetching, with git itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.build import GitStore, Submodule, absolute_url, parse_modules
from imagebuild.core import CommandError, ConfigError, ResultError
from tests.conftest import git

A, B = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://other.org/x.git", "https://other.org/x.git"),
        ("../x.git", "https://example.org/team/x.git"),
        ("../../x.git", "https://example.org/x.git"),
        ("./x.git", "https://example.org/team/main.git/x.git"),
    ],
)
def test_addresses_of_submodules(url: str, expected: str) -> None:
    assert absolute_url(url, "https://example.org/team/main.git") == expected


LISTING = (
    "submodule.a.b.path\n3rd/a\0submodule.a.b.url\nhttps://example.org/a.git\0"
    "submodule.no.path\n3rd/no\0submodule.no.update\nnone\0submodule.gone.path\n3rd/gone\0"
)


def test_submodules() -> None:
    found = parse_modules(LISTING, {"3rd/a": A, "3rd/no": B}, "https://example.org/main.git")
    assert list(found) == [Submodule("3rd/a", "https://example.org/a.git", A)]


def test_a_submodule_without_address() -> None:
    with pytest.raises(ConfigError, match="the submodule 3rd/gone has no address"):
        list(parse_modules(LISTING, {"3rd/gone": A}, "https://example.org/main.git"))


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[str, str]:
    """Address and commit of a repository with a submodule."""
    for name in ("sub", "main"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "--quiet")
        (tmp_path / name / name).write_text(name)
        (tmp_path / name / ".dockerignore").write_text("*\n")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "--quiet", "-m", name)
    git(tmp_path / "main", "submodule", "--quiet", "add", f"file://{tmp_path}/sub", "3rd/sub")
    git(tmp_path / "main", "commit", "--quiet", "-m", "submodule")
    return f"file://{tmp_path}/main", git(tmp_path / "main", "rev-parse", "HEAD").strip()


@pytest.mark.programs
def test_a_commit_is_fetched_with_its_submodules(tmp_path: Path, upstream: tuple[str, str]) -> None:
    url, commit = upstream
    store = GitStore(tmp_path / "store")
    store.fetch(url, commit)
    (tmp_path / "out").mkdir()
    store.checkout(url, commit, tmp_path / "out")
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert files == {"main", ".dockerignore", ".gitmodules", "3rd/sub/sub", "3rd/sub/.dockerignore"}
    store.check(url, commit)


@pytest.mark.programs
def test_what_is_damaged_is_found(tmp_path: Path, upstream: tuple[str, str]) -> None:
    url, commit = upstream
    store = GitStore(tmp_path / "store")
    store.fetch(url, commit)
    blob = git(tmp_path / "main", "rev-parse", "HEAD:main").strip()
    packed = next((tmp_path / "store" / "objects").glob(f"{blob[:2]}/{blob[2:]}"), None)
    victims = [packed] if packed else list((tmp_path / "store" / "objects" / "pack").glob("*.pack"))
    for victim in victims:
        victim.chmod(0o644)
        victim.write_bytes(victim.read_bytes()[:-30] + b"0" * 30)
    with pytest.raises(ResultError, match=commit):
        store.check(url, commit)


@pytest.mark.programs
def test_a_commit_that_is_not_there(tmp_path: Path, upstream: tuple[str, str]) -> None:
    with pytest.raises(CommandError, match=f"has no commit {A}"):
        GitStore(tmp_path / "store").fetch(upstream[0], A)
