"""Builders with several nodes, and nodes that cannot build."""

from __future__ import annotations

import json
import os

import pytest

from imagebuild.oci.layout import Layout, manifests_of
from tests.conftest import ran
from tests.docker.conftest import TINY_TARGET, Tiny

pytestmark = pytest.mark.docker


def test_an_image_that_several_nodes_built(tiny: Tiny) -> None:
    builder = os.environ.get("IMAGEBUILD_TEST_BUILDER")
    if not builder:
        pytest.skip("IMAGEBUILD_TEST_BUILDER names no builder with nodes for linux/amd64 and linux/arm64")
    tiny.imagebuild("build", TINY_TARGET, "--builder", builder, "--output", tiny.root / "out")
    layout, result = Layout(tiny.root / "out" / TINY_TARGET), tiny.result()
    index = json.loads(layout.blob(result.digest or ""))
    assert [item.platform for item in manifests_of(index)] == ["linux/amd64", "linux/arm64"]
    assert layout.has(result.digest or "")
    refused = tiny.imagebuild("build", TINY_TARGET, "--builder", builder, expect=2)
    assert "of several platforms, which cannot be loaded; use --output DIR or --push" in refused.err


def test_builders_that_share_a_build_run_each_stage_once(tiny: Tiny, registry: str) -> None:
    names = os.environ.get("IMAGEBUILD_TEST_BUILDERS", "").split()
    if len(names) < 2:
        pytest.skip("IMAGEBUILD_TEST_BUILDERS names no two builders for linux/amd64 that share nothing")
    together = [word for name in names for word in ("--builder", name)]
    tiny.build(*together, "--cache", f"{registry}/cache", "--cache-write", "--output", tiny.root / "out")
    targets = [path.parent.name for path in sorted(tiny.root.glob("build/*/result.json"))]
    results = [tiny.result(target) for target in targets]
    assert {result.builder for result in results} == {*names}
    # All targets share the stage `library`, and those of one CUDA version share `tool`. Devel images also have `plugin`.
    ran = {(r.builder, step.stage, step.name) for r in results for step in r.steps if not step.cached}
    stages = [stage for _, stage, _ in ran]
    assert (stages.count("library"), stages.count("tool"), stages.count("plugin")) == (1, 2, 1), sorted(ran)

    tiny.build("--builder", names[0], "--cache", f"{registry}/cache", "--output", tiny.root / "alone")
    assert [tiny.result(target).digest for target in targets] == [result.digest for result in results]


def test_a_node_that_does_not_answer_is_named_before_the_build(tiny: Tiny) -> None:
    name, environ = f"dead-{tiny.nonce}", {**os.environ, **tiny.environ}
    ran(
        "docker", "buildx", "create", "--name", name, "--driver", "remote", "tcp://127.0.0.1:9", env=environ, check=True
    )
    try:
        done = tiny.build(TINY_TARGET, "--builder", name, expect=2)
    finally:
        ran("docker", "buildx", "rm", name, env=environ, check=True)
    assert f"--builder {name}: node {name}0 (tcp://127.0.0.1:9) does not answer (inactive); start it" in done.err
    missing = tiny.build(TINY_TARGET, "--builder", name, expect=2)
    assert f"--builder {name}: there is no such builder; `docker buildx ls` lists the builders" in missing.err
