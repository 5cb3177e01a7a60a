"""A bundle contains all downloads of a build, so that the same image can be built from it without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.build.base import bootstrap
from imagebuild.core.files import cache_folder
from imagebuild.core.run import native_platform
from imagebuild.oci.engine import EnginePaths
from tests.conftest import ROOT, ran
from tests.docker.conftest import REPOSITORY, TARGET, TINY_TARGET, Imagebuild, Tiny
from tests.docker.site import Content, served
from tests.docker.test_mirrors import fetch_all

pytestmark = pytest.mark.docker


def push_base(registry: str, folder: Path) -> str:
    """Push a base image to a registry; return its digest."""
    base, tag = bootstrap([native_platform()], cache_folder()), f"{registry}/library/debian:13-slim"
    options = ["--push", "--provenance=false", "--tag", tag, f"--build-context=base={base}"]
    command = ["docker", "buildx", "build", *options, "--metadata-file", f"{folder}/pushed.json", "-"]
    environ = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run(command, input=b"FROM base\nLABEL pushed=1\n", check=True, capture_output=True, env=environ)
    return str(json.loads((folder / "pushed.json").read_text())["containerimage.digest"])


def test_all_kinds_of_sources(tiny: Tiny, registry: str, tmp_path: Path) -> None:
    """The bundle has an image, an archive, a Git repository with a submodule, and packages. The servers are stopped."""
    tiny.build(TINY_TARGET)  # so that the base exists
    content = Content(tiny.root / "site", tiny.nonce)
    bundle = tiny.root / "bundle"
    (tmp_path / "pushing").mkdir()
    with served(content.folder) as site:
        fetch_all(tiny, content, site.url)
        lock = json.loads((tiny.root / "imagebuild.lock").read_text())
        tiny.lock({**lock, "images": {"debian:13-slim": {"digest": push_base(registry, tmp_path / "pushing")}}})
        tiny.write("config.yaml", json.dumps({"mirrors": {"images": {"docker.io": registry}}}))
        environ = {"IMAGEBUILD_CONFIG": str(tiny.root / "config.yaml")}
        tiny.imagebuild(
            "bundle", "create", bundle, TINY_TARGET, "--platform", "local", "--base", "registry", expect=0, **environ
        )
        recorded = len(site.asked)
    shutil.rmtree(content.folder)

    assert TINY_TARGET in tiny.imagebuild("bundle", "verify", bundle).out
    own = {"IMAGEBUILD_CONFIG": str(tiny.root / "own.yaml"), "XDG_CACHE_HOME": str(tiny.root / "cache")}
    tiny.write("own.yaml", "mirrors: {}\n")
    tiny.imagebuild("bundle", "use", bundle, expect=0, **own)
    tiny.build(TINY_TARGET, "--offline", "--no-cache", expect=0, **own)
    assert {"library", "tool", "plugin"} <= {s.stage for s in tiny.result().steps if not s.cached}
    assert len(site.asked) == recorded

    local = ("build", "--platform", "local")
    other = tiny.imagebuild(*local, "tiny-cuda12.9-debian13-devel", "--bundle", bundle, expect=2)
    assert "tiny-cuda12.9-debian13-devel cannot be built from this bundle: the stage " in other.err
    (archive,) = bundle.glob("files/http/*/tool.tar")
    archive.write_bytes(b"X" * archive.stat().st_size)
    assert f"{archive}: has changed" in tiny.imagebuild("bundle", "verify", bundle, expect=5).err
    shutil.rmtree(tiny.root / "cache")
    assert "tool.tar: the sha256 is" in tiny.imagebuild(*local, TINY_TARGET, "--offline", expect=5, **own).err


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder in memory for an engine's data and a bundle."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-test-", dir="/dev/shm") as folder:
        (Path(folder) / "cgroup").mkdir()
        yield Path(folder)


def test_quickstart_is_built_without_a_network(
    imagebuild: Imagebuild, memory: Path, request: pytest.FixtureRequest
) -> None:
    """The engine is empty. Its network namespace has only the loopback interface and the engine's bridge."""
    if not request.config.getoption("--proof"):
        pytest.skip("only in `make bundle-proof`")
    if os.geteuid():
        pytest.skip("a second engine needs root")
    imagebuild("bundle", "create", memory / "bundle", TARGET, "--platform", "local")
    own = {"IMAGEBUILD_STATE": f"{memory}/state", "XDG_CACHE_HOME": f"{memory}/cache", "PYTHON": sys.executable}
    environ = {**imagebuild.environ, **own}
    del environ["DOCKER_HOST"]
    netless = (ROOT / "tests/data/bundle/netless", memory, TARGET, EnginePaths.of(environ).host)
    done = ran("unshare", "--net", "--mount", *netless, cwd=imagebuild.folder, env=environ, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    devices = {line.split()[1] for line in (memory / "addresses").read_text().splitlines()}
    assert len(devices) == 2
    assert "lo" in devices
    assert "default" not in (memory / "routes").read_text()
    result = json.loads((memory / "build" / TARGET / "result.json").read_text())
    assert not [step["name"] for step in result["steps"] if step["cached"]]
    assert result["tags"][0].startswith(REPOSITORY)
    checks = json.loads((memory / "verify.json").read_text())["checks"]
    assert {check["outcome"] for check in checks} == {"passed", "skipped"}
