"""The nodes of builders, as `docker buildx inspect` of buildx 0.24 and later describes them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.build.nodes import check_clocks, check_nodes, connection_flaw, nodes_of, probe, read_nodes
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.oci.engine import Endpoint
from tests.conftest import data

TEXTS: dict[str, str] = data("builders")["texts"]
ENDPOINT = Endpoint("unix:///x", "context")


@pytest.mark.parametrize("case", data("builders")["cases"], ids=lambda case: case["name"])
def test_what_keeps_a_builder_from_building_is_said_before_the_build(case: dict[str, str]) -> None:
    nodes = [*read_nodes(TEXTS[case["builder"]])]
    if case.get("says"):
        with pytest.raises(ConfigError) as refused:
            check_nodes("farm", nodes, case["platforms"].split())
        assert str(refused.value).splitlines() == case["says"].splitlines()
    else:
        check_nodes("farm", nodes, case["platforms"].split())
        assert [node.name for node in nodes] == case["nodes"].split()


def test_a_builder_that_does_not_exist() -> None:
    def run(*_: str, **__: object) -> str:
        raise CommandError('`docker buildx inspect farm` failed: ERROR: no builder "farm" found')

    with pytest.raises(ConfigError, match="--builder farm: there is no such builder; `docker buildx ls` lists"):
        nodes_of("farm", ENDPOINT, run)


@pytest.mark.parametrize(("endpoint", "options", "flaw"), data("cases/build/nodes"))
def test_why_no_connection_to_a_node_is_possible(endpoint: str, options: dict[str, str], flaw: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connection_flaw(endpoint.replace("PORT", str(server.getsockname()[1])), options) == flaw


def test_a_node_that_returns_no_file_or_an_extreme_time_is_described() -> None:
    def run(*words: str, **_: object) -> str:
        folder = Path(words[words.index("--output") + 1].partition("dest=")[2])
        Path(words[words.index("--metadata-file") + 1]).write_text("{}")
        if words[2] == "build" and "arm64" in words[6]:
            folder.mkdir()
            (folder / "clock").symlink_to("/nowhere")
            os.utime(folder / "clock", (0, -(2**40)), follow_symlinks=False)
        return ""

    with pytest.raises(CommandError, match="out/clock: No such file"):
        probe("pair", "linux/amd64", ENDPOINT, run=run)
    assert (
        "UTC" in replace(next(read_nodes(TEXTS["pair"])), ahead=probe("p", "linux/arm64", ENDPOINT, run=run)[1]).clock
    )


@pytest.mark.parametrize("ahead", [-86400, 86400])
def test_the_clock_of_a_node_is_that_of_its_files(ahead: int) -> None:
    def run(*words: str, env: Mapping[str, str], **_: object) -> str:
        assert (env["BUILDX_GIT_INFO"], env["BUILDX_GIT_LABELS"]) == ("0", "0")
        made = Path(words[words.index("--output") + 1].partition("dest=")[2]) / "clock"
        made.mkdir(parents=True)
        os.utime(made, (0, time.time() + ahead))
        Path(words[words.index("--metadata-file") + 1]).write_text(json.dumps({"buildx.build.ref": "pair/arm/0"}))
        return ""

    name, found = probe("pair", "linux/arm64", ENDPOINT, run=run)
    assert (name, abs(found - ahead) < 60) == ("arm", True)


def test_a_node_whose_files_would_keep_their_times_builds_nothing() -> None:
    nodes = [replace(node, ahead=ahead) for node, ahead in zip(read_nodes(TEXTS["pair"]), (0, -7200), strict=True)]
    check_clocks({"farm": nodes}, int(time.time()) - 86400)
    with pytest.raises(
        ConfigError, match=r"^--builder farm: the clock of node arm .* so digests would differ"
    ) as refused:
        check_clocks({"farm": nodes}, int(time.time()) - 3600)
    assert "node amd" not in str(refused.value)
