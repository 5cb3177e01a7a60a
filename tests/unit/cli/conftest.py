"""Commands on a small project."""

from __future__ import annotations

import pytest

from tests.conftest import Files
from tests.unit.conftest import Call


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tiny.root)
    return command
