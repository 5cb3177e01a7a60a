"""Builders with several nodes, builders that share a build, and nodes that cannot build.

`make builders-proof BUILDKIT=FOLDER` runs all tests. Without a buildkitd, only the last one runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.oci.image import images_in
from imagebuild.oci.layout import Layout, manifests_of
from tests.conftest import ran
from tests.docker.conftest import TINY_TARGET, Tiny, finish, sleeping, until
from tests.docker.farm import Farm
from tests.faulty import Faulty

pytestmark = pytest.mark.docker


@pytest.fixture
def farm(request: pytest.FixtureRequest, environ: dict[str, str]) -> Iterator[Farm]:
    if not (buildkit := request.config.getoption("--buildkit")):
        pytest.skip("--buildkit names no folder with a buildkitd; only in `make builders-proof`")
    folder = Path(tempfile.mkdtemp(prefix="imagebuild-test-"))  # pytest's own folder is closed to other users
    made = Farm(Path(buildkit), folder, {**os.environ, **environ})
    yield made
    made.close()
    shutil.rmtree(folder)


def test_an_image_that_several_nodes_built(farm: Farm, tiny: Tiny) -> None:
    """The node for arm64 emulates this architecture."""
    only = [farm.node("--oci-worker-platform", platform) for platform in ("linux/amd64", "linux/arm64")]
    builder = farm.builder(*only)
    tiny.imagebuild("build", TINY_TARGET, "--builder", builder, "--output", tiny.root / "out")
    layout, result = Layout(tiny.root / "out" / TINY_TARGET), tiny.result()
    index = json.loads(layout.blob(result.digest or ""))
    assert [item.platform for item in manifests_of(index)] == ["linux/amd64", "linux/arm64"]
    assert layout.has(result.digest or "")
    refused = tiny.imagebuild("build", TINY_TARGET, "--builder", builder, expect=2)
    assert "of several platforms, which cannot be loaded; use --output DIR or --push" in refused.err


def test_builders_that_share_a_build_run_each_stage_once(
    farm: Farm, tiny: Tiny, registry: str, client: DockerClient
) -> None:
    names = [farm.builder(farm.node()), farm.builder(farm.node())]
    together = [word for name in names for word in ("--builder", name)]
    tiny.build(*together, "--cache", f"{registry}/cache", "--cache-write", "--output", tiny.root / "out")
    targets = [path.parent.name for path in sorted(tiny.root.glob("build/*/result.json"))]
    results = [tiny.result(target) for target in targets]
    assert {result.builder for result in results} == {*names}
    # All targets share the stage `library`, and those of one CUDA version share `tool`. Devel images also have `plugin`.
    ran = {(r.builder, step.stage, step.name) for r in results for step in r.steps if not step.cached}
    stages = [stage for _, stage, _ in ran]
    assert (stages.count("library"), stages.count("tool"), stages.count("plugin")) == (1, 2, 1), sorted(ran)

    tiny.build(*together, "--cache", f"{registry}/cache", "--cache-write")
    loaded = [client.images.get(tag) for target in targets for tag in tiny.result(target).tags]
    assert len(loaded) == len(targets), "all images are in the local engine"


def test_where_an_image_is_built_does_not_change_its_content(farm: Farm, tiny: Tiny) -> None:
    for file in tiny.root.glob("dockerfiles/components/*/build.j2"):
        file.write_text(file.read_text().replace("$(cat /proc/sys/kernel/random/uuid)", "same"))
    builders = {
        "node": farm.builder(farm.node()),
        "rootless": farm.builder(farm.node(user=farm.rootless_user())),
        "local": "",
    }
    digests, layers = {}, {}
    for place, builder in builders.items():
        tiny.build(TINY_TARGET, *(("--builder", builder) if builder else ()), "--output", tiny.root / place)
        digests[place] = tiny.result().digest
        (image,) = images_in(tiny.root / place / TINY_TARGET, tiny.root)
        layers[place] = image.config["rootfs"]["diff_ids"]
    assert digests["node"] == digests["rootless"]
    # The local engine has another version of BuildKit, which compresses and keeps times of the base in another way.
    assert layers["node"][1:] == layers["local"][1:]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_hangs_is_named(farm: Farm, tiny: Tiny, number: signal.Signals) -> None:
    node = farm.node()
    builder = farm.builder(node)
    tiny.step(f"sleep {tiny.forever}")
    running = tiny.imagebuild.start("build", "--platform", "local", TINY_TARGET, "--builder", builder)
    assert until(lambda: sleeping(tiny.forever))
    node.send(number)
    done = finish(running, 600)
    assert done.status == 4
    assert f"node {builder}0 (tcp://127.0.0.1:{node.port}) no longer answers (inactive)" in done.err
    assert "start it, and run the same command again" in done.err
    tiny.step("mkdir -p /out/runtime")
    node.restart()
    tiny.build(TINY_TARGET, "--builder", farm.builder(node), "--output", tiny.root / "out")


def test_ctrl_c_ends_the_steps_on_all_nodes(farm: Farm, tiny: Tiny, registry: str) -> None:
    names = [farm.builder(farm.node()) for _ in range(2)]
    together = [word for name in names for word in ("--builder", name)]
    tiny.step(f"sleep {tiny.forever}")
    shared = ("--cache", f"{registry}/cache", "--cache-write", "--output", tiny.root / "out")
    running = tiny.imagebuild.start("build", "--platform", "local", *together, *shared)
    assert until(lambda: sleeping(tiny.forever))
    running.send_signal(signal.SIGINT)
    done = finish(running)
    assert done.status == 130
    assert "the builders keep the steps that ended; run the same command again" in done.err
    assert until(lambda: not sleeping(tiny.forever), seconds=20)


def test_a_node_with_a_full_disk_is_named(farm: Farm, tiny: Tiny) -> None:
    small = farm.file("small")
    small.mkdir()
    ran("mount", "-t", "tmpfs", "-o", "size=300m,mode=755", "imagebuild-test", small, check=True)
    builder = farm.builder(farm.node(root=small))
    tiny.step("head -c 400M /dev/zero > /full")
    done = tiny.build(TINY_TARGET, "--builder", builder, expect=4)
    remedy = f"docker buildx prune --builder {builder}"
    assert f"the disk of a node of the builder {builder} is probably full; `{remedy}` removes" in done.err
    ran(*remedy.split(), "--force", env=farm.environ, check=True)
    tiny.step("mkdir -p /out/runtime")
    tiny.build(TINY_TARGET, "--builder", builder, "--output", tiny.root / "out")


def test_a_registry_that_is_lost_pushes_nothing(farm: Farm, tiny: Tiny, faulty: Faulty) -> None:
    names = [farm.builder(farm.node()) for _ in range(2)]
    together = [word for name in names for word in ("--builder", name)]
    shared = ("--cache", f"{faulty.address}/cache", "--cache-write", "--push", "--registry", f"{faulty.address}/acme")
    faulty.rule("drop-before", "PUT", "/manifests/", times=10**6)
    done = tiny.build(*together, *shared, expect=4)
    assert faulty.address in done.err
    assert not list(tiny.root.glob("build/*/result.json"))
    faulty.clear()
    tiny.build(*together, *shared)


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
