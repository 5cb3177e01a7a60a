import json
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.build import BakeOptions, LayerFormat, bake_file, platforms_of
from imagebuild.core import ConfigError
from imagebuild.project import Plan

OPTIONS = BakeOptions(
    context=Path("/build/empty"),
    output="push",
    replaced={"ucx-source": "/src/ucx", "debian:13-slim": "oci-layout:///cache@sha256:0"},
    secrets={"ca": Path("/etc/ca.crt")},
)
PACKED = (
    "compression=zstd,compression-level=19,force-compression=true,rewrite-timestamp=true,source-date-epoch=1763683200"
)


def test_the_bake_file_of_this_project(full_plan: Plan, golden: Callable[[str, str], None]) -> None:
    targets = [t for t in full_plan.targets if t.axes["cuda"] == "13.5"]
    golden("tests/golden/bake.json", json.dumps(bake_file(targets, Path("/build"), OPTIONS), indent=1) + "\n")


def test_bake_names_have_no_dots(full_plan: Plan) -> None:
    assert not any("." in name for name in bake_file(full_plan.targets, Path("/b"), OPTIONS)["target"])


@pytest.mark.parametrize(
    ("output", "written"),
    [
        ("load", "type=docker"),
        ("cacheonly", "type=cacheonly"),
        ("push", f"type=oci,tar=false,dest=/b/{{id}}/layout,{PACKED}"),
        ("/out", f"type=oci,tar=false,dest=/out/{{id}},{PACKED}"),
    ],
)
def test_outputs(full_plan: Plan, output: str, written: str) -> None:
    target = full_plan.targets[0]
    options = BakeOptions(Path("/e"), output=output, layer_format=LayerFormat(1763683200, "zstd", 19))
    entry = bake_file([target], Path("/b"), options)["target"][target.bake_name]
    assert entry["output"] == [written.format(id=target.id)]


def test_a_platform_that_the_target_is_not_for(full_plan: Plan) -> None:
    with pytest.raises(ConfigError, match="it is for linux/amd64, linux/arm64"):
        platforms_of(full_plan.targets[0], ["linux/riscv64"])
