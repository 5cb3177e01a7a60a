"""What people write wrong: each is one line with its place, cause and remedy, and never a traceback.

Each row of tests/data/refused/*.yaml is a mistake and what is said of it. The mistake is in the small project of
tests/conftest.py, where `write` adds files: name → text; without it, the command line is what is wrong. `run` is the
command; `says` is a part of the message; `status` is the exit status, by default 2.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, Files
from tests.unit.conftest import Call

ROWS = [
    pytest.param(row, id=f"{file.stem}-{i}: {row['says'][:60]}")
    for file in sorted((ROOT / "tests/data/refused").glob("*.yaml"))
    for i, row in enumerate(yaml.safe_load(file.read_text()))
]
PLACE = re.compile(r"error: (\S+: |--|No such |Option |no target fits )")
"""A file with its line, an option or an argument."""
REMEDY = re.compile("; |, not | must | write |cannot be (read|written)|requires an argument")


@pytest.mark.parametrize("row", ROWS)
def test_a_command_says_it_in_one_line(
    tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    monkeypatch.chdir(tiny.root)
    for name, text in row.get("write", {}).items():
        tiny.write(name, text)
    status, printed, shown = command(*shlex.split(row["run"]))
    assert (status, printed) == (row.get("status", 2), ""), shown
    assert row["says"] in shown
    assert PLACE.match(shown)
    assert REMEDY.search(shown), shown
    assert len(shown.splitlines()) == 1
