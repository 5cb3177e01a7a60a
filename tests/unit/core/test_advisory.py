"""Versions that are known to be bad: each advisory is named for its version, and not for the fixed version."""

import re
from datetime import date
from typing import Any

import pytest

from imagebuild.cli.options import name_advisories
from imagebuild.cli.plan import check_advisories
from imagebuild.core.advisory import COMPONENTS, Advisory, Place, advisories, driver_version, known_bad, osv, shortened
from imagebuild.core.errors import ConfigError
from imagebuild.project.plan import Target
from tests.conftest import data

CASES = data("cases/core/advisory")


def named(component: str, version: str, **known: Any) -> set[str]:
    place: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
    return {advisory.name for advisory in known_bad({component: version}, Place(**place))}


def target(component: str, version: str, *, gpu: str = "", arch: str = "amd64") -> Target:
    axes = {"gpu": gpu} if gpu else {}
    own: dict[str, Any] = {"axes": axes, "platforms": (f"linux/{arch}",), "components": {component: version}}
    return Target(id="a", image="a", name="a:a", tags=(), **own)


@pytest.mark.parametrize("advisory", advisories(), ids=lambda advisory: advisory.id)
def test_each_advisory_is_named_for_its_version_and_not_for_the_fixed_one(advisory: Advisory) -> None:
    names = COMPONENTS[advisory.component]
    seen, fixed = (
        {each.id for name in names for each in known_bad({name: v})} for v in (advisory.seen, advisory.fixed)
    )
    assert advisory.id in seen
    assert advisory.id not in fixed
    assert advisory.source.startswith("https://")
    assert date.fromisoformat(advisory.date) < date.fromisoformat("2026-11-28")


@pytest.mark.parametrize("advisory", advisories(), ids=lambda advisory: advisory.id)
def test_the_ranges_of_osv_contain_the_version_and_not_the_fixed_one(advisory: Advisory) -> None:
    (affected,) = osv(advisory)["affected"]

    def number(text: str) -> list[int]:
        return [*map(int, text.split(".")), 0, 0, 0][:5]

    def holds(version: str) -> bool:
        ends = [[number(next(iter(event.values()))) for event in each["events"]] for each in affected["ranges"]]
        return any(first <= number(version) < last for first, last in ends)

    assert holds(advisory.seen)
    assert not holds(advisory.fixed)
    assert all([*event] in (["introduced"], ["fixed"]) for each in affected["ranges"] for event in each["events"])


def test_there_are_many_advisories_and_their_names_differ() -> None:
    names = [advisory.id for advisory in advisories()]
    assert len(names) == len({*names}) >= 80
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)


@pytest.mark.parametrize(("component", "version", "known", "advisory", "state"), CASES["conditions-limit-an-advisory"])
def test_conditions_limit_an_advisory(component: str, version: str, known: Any, advisory: str, state: str) -> None:
    names = named(component, version, **known)
    wanted = f"{advisory} ({state})" if state.startswith("if") else advisory
    assert (wanted in names) == (state != "no"), names
    assert state.startswith("if") or not any(name.startswith(f"{advisory} (") for name in names)


def test_other_names_and_versions_are_not_confused() -> None:
    assert {name.partition(" ")[0] for name in named("UCX", "1.18.1+ds-2")} == {
        name.partition(" ")[0] for name in named("ucx", "1.18.1")
    }
    assert not named("nccl-tests", "2.17.1")
    assert not named("nccl", "master")
    assert shortened(known_bad({"nccl": "2.28.9"})).endswith(" and 1 more")
    assert driver_version("NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build") == "570.86.15"
    assert driver_version("NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023") == "535.54.03"


def test_plan_and_lock_name_known_faults(capsys: Any) -> None:
    name_advisories([target("nccl-git", "2.28.9", gpu="100", arch="arm64"), target("pmix", "5.0.7-1")])
    shown = " ".join(capsys.readouterr().err.split())
    assert "nccl-2.29.2-gb200-gdr-hang, " in shown
    assert "sm80" not in shown
    assert "pmix" not in shown
    name_advisories([target("pmix", "5.0.7-1")], whole=True)
    assert "a: pmix-5.0.10-loopback: PMIx does not work" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("component", "version", "waived", "problem"), CASES["plan-refuses-the-worst-unless-waived"])
def test_plan_refuses_the_worst_unless_waived(component: str, version: str, waived: Any, problem: str) -> None:
    targets = [target(component, version)]
    if not problem:
        check_advisories(targets, waived)
        return
    with pytest.raises(ConfigError, match=problem):
        check_advisories(targets, waived)
