"""The merged tree of an image's layers: whiteouts, links and patterns."""

from __future__ import annotations

import pytest

from imagebuild.verify.files import FileEntry, Layer, Tree
from tests.conftest import data

CASES = data("cases/verify/files")


def entry(text: str) -> FileEntry:
    """Parse `path` for a file, `path/` for a folder, `path -> target` for a symlink, `path = target` for a hard link."""
    if " -> " in text:
        path, _, target = text.partition(" -> ")
        return FileEntry(path, "symlink", 0o777, target=target)
    if " = " in text:
        path, _, target = text.partition(" = ")
        return FileEntry(path, "hardlink", 0o644, target=target)
    return FileEntry(text.rstrip("/"), "folder" if text.endswith("/") else "file", 0o755)


def tree(*layers: str) -> Tree:
    return Tree(Layer(tuple(entry(line.strip()) for line in text.split(",")), 0, "gzip") for text in layers)


@pytest.mark.parametrize(("layers", "seen"), CASES["later-layers-replace-and-remove"])
def test_later_layers_replace_and_remove(layers: list[str], seen: list[str]) -> None:
    assert {e.path for e in tree(*layers) if e.kind != "folder"} == {*seen}


def test_hard_links_are_files() -> None:
    found = tree("a, b = a, c = b")
    assert found.names("") == ["a", "b", "c"]
    assert [found.find(name) for name in "abc"] == [FileEntry(name, "file", 0o644) for name in "abc"]


@pytest.mark.parametrize(("path", "real"), CASES["links-are-followed-inside-the-root"])
def test_links_are_followed_inside_the_root(path: str, real: str | None) -> None:
    found = tree(
        "usr/share/file, etc/, etc/link -> /usr/share/file, etc/up -> ../usr/share, etc/circle -> circle, "
        "etc/dangling -> /absent, etc/out -> ../../../../usr/share/file"
    )
    assert found.resolve(path) == real


def test_globs() -> None:
    found = tree("usr/share/doc/a-1/copyright, usr/share/doc/a-2/copyright, usr/share/doc/b/x, doc -> usr/share/doc")
    assert found.glob("/usr/share/doc/a-*/copyright") == [f"usr/share/doc/a-{i}/copyright" for i in (1, 2)]
    assert found.glob("/doc/a-[1]/copyright") == ["doc/a-1/copyright"]
    assert found.glob("/doc/c*/copyright") == []
    assert found.glob("/usr/share/doc/b/x") == ["usr/share/doc/b/x"]
