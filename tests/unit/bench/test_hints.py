"""Causes of low speed: which fit a way of the data and a speed, in which order, and which contradict the profile."""

from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.hints import MOST, find_hints
from imagebuild.bench.models import DataPath
from imagebuild.bench.profiles import load_profiles
from tests.conftest import ROOT, data

CASES: list[dict[str, Any]] = data("bench/hints")
PROFILES = load_profiles(Path(ROOT, "profiles"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_causes(case: dict[str, Any]) -> None:
    profile = PROFILES[case["profile"]].model if "profile" in case else None
    path = DataPath.model_validate(case["path"]) if "path" in case else None
    hints = find_hints(
        path, profile, devices=case.get("devices", ()), measured=case.get("measured"), ceiling=case.get("ceiling"),
        speed=case.get("speed", ""), is_host_copy=case.get("host", False),
    )  # fmt: skip
    assert [hint.kind for hint in hints] == case["kinds"]
    assert [hint.kind for hint in hints if hint.is_wrong] == case["wrong"]
    assert all(hint.next and "{" not in f"{hint}" for hint in hints[:MOST])
