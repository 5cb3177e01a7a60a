"""Builders with several nodes, builders that share a build, and nodes that cannot build.

`make builders-proof BUILDKIT=FOLDER` runs all tests. Without a buildkitd, only the last one runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from hashlib import sha256
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.oci.image import images_in
from imagebuild.oci.layout import Layout, manifests_of
from tests.conftest import LOCK, ran
from tests.docker.conftest import COMPONENT, TINY_TARGET, Tiny, finish, sleeping, until
from tests.docker.farm import Farm
from tests.docker.site import Content, Site, served
from tests.docker.test_mirrors import NOWHERE, configuration, fetch_all
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
    """The node for arm64 emulates this architecture. A folder of this machine reaches both."""
    builder, address = farm.builder(farm.node(), farm.node()), "https://nowhere.invalid/tool.git"
    tiny.component("tool", COMPONENT.format(name="tool") + f"git: {address}\n", build=(
        "{{ source(name, git, commit) }}\nFROM {{ base }} AS tool\n"
        f"RUN --mount=type=bind,from=tool-source,target=/src grep {tiny.nonce} /src/sub/main.c && mkdir -p /out/runtime\n"
    ))  # fmt: skip
    tiny.lock({**LOCK, "git": {f"{address} 2.{tiny.nonce}": "b" * 40}})
    tiny.write("src/sub/main.c", tiny.nonce)
    own = ("--source", f"tool={tiny.root / 'src'}", "--output", tiny.root / "out")
    tiny.imagebuild("build", TINY_TARGET, "--builder", builder, *own)
    assert tiny.result().replaced["tool-source"] == "folder"
    layout, result = Layout(tiny.root / "out" / TINY_TARGET), tiny.result()
    index = json.loads(layout.blob(result.digest or ""))
    assert [item.platform for item in manifests_of(index)] == ["linux/amd64", "linux/arm64"]
    assert layout.has(result.digest or "")
    refused = tiny.imagebuild("build", TINY_TARGET, "--builder", builder, *own[:2], expect=2)
    assert (
        f"--builder {builder}: 2 nodes build an image of several platforms, which cannot be loaded; use --output DIR or --push"
        in refused.err
    )


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


def without_chance(tiny: Tiny) -> None:
    """Let each execution of a step have the same output."""
    for file in tiny.root.glob("dockerfiles/components/*/build.j2"):
        file.write_text(file.read_text().replace("$(cat /proc/sys/kernel/random/uuid)", "same"))


def test_where_an_image_is_built_does_not_change_its_content(farm: Farm, tiny: Tiny) -> None:
    without_chance(tiny)
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


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "Connection refused"), (signal.SIGSTOP, "The handshake operation timed out")]
)
def test_a_node_that_dies_or_hangs_is_named(farm: Farm, tiny: Tiny, number: signal.Signals, why: str) -> None:
    node = farm.node()
    builder = farm.builder(node)
    tiny.step(f"sleep {tiny.forever}")
    running = tiny.imagebuild.start("build", "--platform", "local", TINY_TARGET, "--builder", builder)
    assert until(lambda: sleeping(tiny.forever))
    node.send(number)
    done = finish(running, 600)
    assert done.status == 4
    assert f"node {builder}0 (tcp://{node.address}) no longer answers ({why})" in done.err
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
    node = farm.node(root=small)
    builder = farm.builder(node)
    tiny.step("head -c 400M /dev/zero > /full")
    done = tiny.build(TINY_TARGET, "--builder", builder, expect=4)
    remedy = f"docker buildx prune --builder {builder}"
    assert f"the disk of node {builder}0 (tcp://{node.address}) is probably full; `{remedy}` removes" in done.err
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


@pytest.mark.parametrize("days", [4, -2700])
def test_a_clock_that_contradicts_a_certificate_is_named_before_the_build(farm: Farm, tiny: Tiny, days: int) -> None:
    node = farm.node(days=days)
    done = tiny.build(TINY_TARGET, "--builder", farm.builder(node, wait=False), expect=2)
    assert f"(tcp://{node.address}) does not answer (TLS: sslv3 alert certificate expired); set the clock" in done.err


@pytest.mark.parametrize(("days", "reason"), [(1, "expired"), (-30, "is not valid yet")])
def test_a_node_with_another_clock_is_named_or_builds_the_same(farm: Farm, tiny: Tiny, days: int, reason: str) -> None:
    without_chance(tiny)
    clock = farm.builder(farm.node(days=days))
    now = datetime.now(UTC)
    (tiny.root / "site").mkdir()
    (tiny.root / "site/Packages").touch()
    empty = f"{sha256().hexdigest()} 0 Packages"
    until = format_datetime(now + timedelta(hours=12))
    tiny.write("site/Release", f"Date: {format_datetime(now)}\nValid-Until: {until}\nSHA256:\n {empty}\n")
    with served(tiny.root / "site") as site:
        tiny.step(f"echo 'deb [trusted=yes] {site.url} ./' > /etc/apt/sources.list; apt-get update --error-on=any")
        done = tiny.build(TINY_TARGET, "--builder", clock, expect=4)
    assert re.search(rf"the clock of node {clock}0 \(tcp://.*\) shows .* UTC, and that of this machine", done.err)
    assert reason in done.err

    tiny.step("mkdir -p /out/runtime; echo > /out/runtime/library")
    digests = set()
    for builder in (clock, farm.builder(farm.node("--oci-worker-snapshotter", "native"))):
        tiny.build(TINY_TARGET, "--builder", builder, "--output", tiny.root / "out")
        digests.add(tiny.result().digest)
    assert len(digests) == 1


def test_a_clock_before_the_day_of_the_images_ends_the_build(farm: Farm, tiny: Tiny, registry: str) -> None:
    clock = farm.builder(farm.node(days=-1500))
    done = tiny.build(TINY_TARGET, "--builder", clock, "--push", "--registry", f"{registry}/acme", expect=2)
    assert f"--builder {clock}: the clock of node {clock}0 " in done.err
    assert "but files of the images are of 2025-08-09, so digests would differ; set the clock" in done.err


def test_a_node_that_does_not_reach_a_mirror_is_named_before_the_build(farm: Farm, tiny: Tiny) -> None:
    """The address of the mirror is one of the loopback, which the node with another kernel does not share."""
    content = Content(tiny.root / "site", tiny.nonce)
    fetch_all(tiny, content, NOWHERE)
    near, far = farm.builder(farm.node()), farm.builder(farm.node(days=0))
    with served(content.folder) as site:
        local = Site(site.server, f"127.0.0.1:{site.server.port}")
        environ = configuration(tiny, local, NOWHERE)
        done = tiny.build(TINY_TARGET, "--builder", far, expect=4, **environ)
        assert (
            f"node {far}0 (tcp://{farm.nodes[1].address}) does not reach the mirror {local.url}/: dial tcp" in done.err
        )
        done = tiny.build(TINY_TARGET, "--builder", near, "--output", tiny.root / "out", expect=0, **environ)
    assert "does not reach" not in done.err
    assert "/repo/mirrored_1_all.deb" in site.asked


def test_a_node_that_does_not_answer_is_named_before_the_build(tiny: Tiny) -> None:
    name, environ = f"dead-{tiny.nonce}", {**os.environ, **tiny.environ}
    ran(
        "docker", "buildx", "create", "--name", name, "--driver", "remote", "tcp://127.0.0.1:9", env=environ, check=True
    )
    try:
        done = tiny.build(TINY_TARGET, "--builder", name, expect=2)
    finally:
        ran("docker", "buildx", "rm", name, env=environ, check=True)
    assert (
        f"--builder {name}: node {name}0 (tcp://127.0.0.1:9) does not answer (Connection refused); start it" in done.err
    )
    missing = tiny.build(TINY_TARGET, "--builder", name, expect=2)
    assert f"--builder {name}: there is no such builder; `docker buildx ls` lists the builders" in missing.err
