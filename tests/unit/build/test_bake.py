import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.build import BakeRequest, LayerFormat, bake_file, platforms_of
from imagebuild.core import ConfigError
from imagebuild.oci import Endpoint
from imagebuild.project import Plan

REQUEST = BakeRequest((), {}, Path("/build"), Endpoint("unix:///x", "private"), output="push")
PACKED = (
    "compression=zstd,compression-level=19,force-compression=true,rewrite-timestamp=true,source-date-epoch=1763683200"
)


def test_the_bake_file_of_this_project(full_plan: Plan, golden: Callable[[str, str], None]) -> None:
    targets = tuple(t for t in full_plan.targets if t.axes["cuda"] == "13.5")
    request = replace(
        REQUEST,
        targets=targets,
        replaced={"ucx-source": "/src/ucx", "debian:13-slim": "oci-layout:///cache@sha256:0"},
        secrets={"ca": Path("/etc/ca.crt")},
    )
    golden("tests/golden/bake.json", json.dumps(bake_file(request), indent=1) + "\n")


def test_bake_names_have_no_dots(full_plan: Plan) -> None:
    assert not any("." in name for name in bake_file(replace(REQUEST, targets=full_plan.targets))["target"])


@pytest.mark.parametrize(
    ("output", "written"),
    [
        ("load", "type=docker"),
        ("cacheonly", "type=cacheonly"),
        ("push", f"type=oci,tar=false,dest=/build/{{id}}/layout,{PACKED}"),
        ("/out", f"type=oci,tar=false,dest=/out/{{id}},{PACKED}"),
    ],
)
def test_outputs(full_plan: Plan, output: str, written: str) -> None:
    target = full_plan.targets[0]
    request = replace(REQUEST, targets=(target,), output=output, layer_format=LayerFormat(1763683200, "zstd", 19))
    entry = bake_file(request)["target"][target.bake_name]
    assert entry["output"] == [written.format(id=target.id)]


def test_a_platform_that_the_target_is_not_for(full_plan: Plan) -> None:
    with pytest.raises(ConfigError, match="it is for linux/amd64, linux/arm64"):
        platforms_of(full_plan.targets[0], ["linux/riscv64"])
