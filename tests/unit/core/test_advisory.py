"""Versions that are known to be bad: each advisory is named for its version, and not for the fixed version."""

import re
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from imagebuild.cli.plan import name_advisories
from imagebuild.core.advisory import Advisory, advisories, known_bad, osv
from imagebuild.core.errors import ConfigError


def named(component: str, version: str, *archs: str) -> set[str]:
    return {advisory.id for advisory in known_bad({component: version}, archs)}


@pytest.mark.parametrize("advisory", advisories(), ids=lambda advisory: advisory.id)
def test_each_advisory_is_named_for_its_version_and_not_for_the_fixed_one(advisory: Advisory) -> None:
    assert advisory.id in named(advisory.component, advisory.seen)
    assert advisory.id not in named(advisory.component, advisory.fixed)
    assert advisory.source.startswith("https://")
    assert date.fromisoformat(advisory.date) < date.fromisoformat("2026-11-28")
    assert osv(advisory)["affected"][0]["ranges"][0]["events"][1] == {"fixed": advisory.fixed}


def test_there_are_many_advisories_and_their_names_differ() -> None:
    names = [advisory.id for advisory in advisories()]
    assert len(names) == len({*names}) >= 40
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)


def test_an_advisory_is_limited_to_its_architecture_and_build() -> None:
    assert "nccl-2.29.3-arm-cas-hang" in named("nccl-wheel", "2.28.9", "amd64", "arm64")
    assert "nccl-2.29.3-arm-cas-hang" not in named("nccl-wheel", "2.28.9", "amd64")
    assert "pmix-5.0.1-cve-2023-41915" in named("pmix", "5.0.0")
    assert "pmix-5.0.1-cve-2023-41915" not in named("pmix", "5.0.0-1ubuntu1")
    assert named("UCX", "1.18.1+ds-2") == named("ucx", "1.18.1")
    assert not named("nccl-tests", "2.17.1")


def test_plan_names_known_faults_and_refuses_the_worst_unless_waived(capsys: Any) -> None:
    target = SimpleNamespace(id="a", components={"pmix": "5.0.0"}, platforms=("linux/amd64",))
    name = "pmix-5.0.1-cve-2023-41915"
    with pytest.raises(ConfigError, match=f"a: {name}.*--waive"):
        name_advisories([target], (), whole=False)  # type: ignore[list-item]
    for wrong in (f"{name}=", "unknown=because"):
        with pytest.raises(ConfigError, match="--waive"):
            name_advisories([target], (wrong,), whole=False)  # type: ignore[list-item]
    name_advisories([target], (f"{name}=nobody runs as root",), whole=False)  # type: ignore[list-item]
    assert name in capsys.readouterr().err
