"""Causes of low speed: which fit a way of the data and a speed, in which order, and which contradict the profile."""

import re
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.hints import DATA as HINTS
from imagebuild.bench.hints import MOST, facts_of, find_hints
from imagebuild.bench.models import DataPath
from imagebuild.bench.profiles import load_profiles
from tests.conftest import ROOT, data
from tests.unit.jobs.job_fakes import text

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


NODE = {
    "echo", "export", "fi_info", "grep", "ib_write_bw", "ibv_devinfo", "ip", "ldconfig", "ls", "lsmod", "nvbandwidth",
    "nvidia-imex-ctl", "nvidia-smi", "sharp_hello", "sleep", "sudo", "systemctl", "unset",
}  # fmt: skip
"""The programs that a person runs on a node."""


@pytest.mark.parametrize("row", [*HINTS["hints"], *({"next": each} for each in HINTS["jobs"].values())], ids=str)
def test_each_next_command_runs_on_a_node_or_is_a_job(row: dict[str, Any]) -> None:
    for command in re.split(r"; |\|\|? ?|& ", row["next"]):
        words = command.split()
        if not command.startswith("{"):
            assert words[0] in NODE, command
            assert "{" not in command


@pytest.mark.parametrize("name", HINTS["jobs"])
def test_each_job_of_a_hint_is_generated(name: str) -> None:
    path = DataPath(network="InfiniBand", rdma=True, nodes=6, ranks=48, ranks_per_node=8)
    facts = facts_of(path, PROFILES["h100"].model, ())
    assert facts[name] == f"imagebuild job slurm --profile h100 --nodes 6 --test {name}"
    assert "--nodes=6" in text(facts[name].removeprefix("imagebuild job "))
    assert facts_of(path, None, ())[name] == HINTS["jobs"][name]
