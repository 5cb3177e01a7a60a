"""Facts of the stand-in name their sources, and are not copied from this project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.upstream import hpcx

EVIDENCE = sorted(hpcx.EVIDENCE.glob("*.yaml"))


def places(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if "seen" in data:
            yield data["seen"]
        for value in data.values():
            yield from places(value)
    elif isinstance(data, list):
        for value in data:
            yield from places(value)


@pytest.mark.parametrize("file", EVIDENCE, ids=lambda file: file.stem)
def test_each_fact_names_where_it_was_seen(file: Path) -> None:
    data = yaml.safe_load(file.read_text())
    where = data.pop("where")
    assert set(places(data)) == set(where)
    assert all(
        "https://" in text or "public code search" in text or ".yaml" in text or "issue" in text
        for text in where.values()
    )
    untold = [
        name for name, value in data.items() if not list(places(value)) and name not in ("version", "like", "images")
    ]
    assert not untold, "facts without a place"


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file without spaces, quotes, brackets and the prefix, and without comments."""
    lines = (re.sub(r"[\s\"',\[\]{}]|/opt/hpcx/", "", line) for line in path.read_text().splitlines())
    return [line for line in lines if len(line) > 3 and not line.startswith("#")]


def test_no_table_is_ours() -> None:
    """No five consecutive lines of our components or the lock are also in the stand-in."""
    ours = [*ROOT.glob("dockerfiles/**/*.yaml"), *ROOT.glob("dockerfiles/**/*.j2"), ROOT / "imagebuild.lock"]
    runs = {tuple(lines[i : i + 5]) for lines in map(lines_of, ours) for i in range(len(lines) - 4)}
    folder = ROOT / "tests" / "upstream"
    for file in [*EVIDENCE, *folder.glob("recipes/*.Dockerfile"), *folder.glob("recipes/*/*.sh")]:
        lines = lines_of(file)
        copied = [run for i in range(len(lines) - 4) if (run := tuple(lines[i : i + 5])) in runs]
        assert not copied, file
