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
