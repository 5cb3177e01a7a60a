"""Builds with the same lock have the same digest on another engine and at another time."""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imagebuild.build.private import start_engine, stop_engine
from imagebuild.oci.image import images_in
from tests.conftest import LOCK
from tests.docker.conftest import TARGET, TINY_TARGET, Imagebuild, Tiny

pytestmark = pytest.mark.docker

STAGE = """\
FROM {{{{ base }}}} AS {name}
RUN mkdir -p /out/runtime/opt/{name} && echo {name} {nonce} > /out/runtime/opt/{name}/file && cp -r /out/runtime /out/devel
"""


@pytest.fixture
def quiet(tiny: Tiny) -> Tiny:
    """Return a project whose stages write the same contents each time. Only the times of files and folders differ."""
    for name in ("library", "tool"):
        text = STAGE.format(name=name, nonce=tiny.nonce)
        tiny.write(f"dockerfiles/components/{name}/build.j2", text)
    # Packages write such files: a machine id, the loader's cache, a user with the day of the password change.
    after = "cat /proc/sys/kernel/random/uuid > /etc/machine-id; useradd --system packaged"
    text = (tiny.root / "dockerfiles/components/library/component.yaml").read_text()
    tiny.write(
        "dockerfiles/components/library/component.yaml",
        text.replace('after-install: "', f'after-install: "{after} #'),
    )
    return tiny


@contextmanager
def nothing_cached() -> Iterator[dict[str, str]]:
    """Yield environment variables for a new engine and an empty cache."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-proof-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        state = {"IMAGEBUILD_STATE": f"{folder}/engine"}
        try:
            yield {**state, "XDG_CACHE_HOME": f"{folder}/cache", "DOCKER_HOST": start_engine(state).host}
        finally:
            stop_engine(state, purge=True)


def test_quickstart_twice_with_nothing_in_any_cache(
    imagebuild: Imagebuild, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--proof"):
        pytest.skip("only in `make reproducible-proof`")
    for folder in ("first", "second"):
        with nothing_cached() as environ:
            run = Imagebuild(imagebuild.folder, {**imagebuild.environ, **environ})
            run("build", TARGET, "--platform", "local", "--output", tmp_path / folder)
    first, second = (json.loads((tmp_path / name / TARGET / "index.json").read_text()) for name in ("first", "second"))
    assert first["manifests"][0]["digest"] == second["manifests"][0]["digest"]


def diff_ids(layout: Path) -> list[str]:
    (image,) = images_in(layout, layout)
    return list(image.config["rootfs"]["diff_ids"])


def shadow(layout: Path) -> dict[str, str]:
    """Map users to the day of their password change, from the last layer that contains /etc/shadow."""
    (image,) = images_in(layout, layout)
    found = ""
    for layer in image.layers:
        with tarfile.open(layer.file, "r:gz") as archive:
            if "etc/shadow" in archive.getnames():
                member = archive.extractfile("etc/shadow")
                found = member.read().decode() if member else found
    return {line.split(":")[0]: line.split(":")[2] for line in found.splitlines()}


def test_two_engines_make_the_same_digest(quiet: Tiny, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--proof"):
        pytest.skip("only in `make reproducible-proof`")
    quiet.build(*output(quiet, "first"))
    first = quiet.result().digest
    with nothing_cached() as environ:
        run = Imagebuild(quiet.root, {**quiet.environ, **environ})
        run("build", "--platform", "local", *output(quiet, "second"))
    assert not any(step.cached for step in quiet.result().steps if step.stage != "image")
    assert quiet.result().digest == first


def output(project: Tiny, folder: str) -> tuple[str, str, Path]:
    return TINY_TARGET, "--output", project.root / folder


def test_what_changes_a_digest(quiet: Tiny) -> None:
    quiet.build(*output(quiet, "first"))
    first = quiet.result().digest
    days = shadow(quiet.root / "first" / TINY_TARGET)
    assert {"packaged", "mpiuser"} <= days.keys()
    assert str(int(time.time()) // 86400) not in days.values()

    # Another compression changes the digest, but not the files.
    quiet.build(*output(quiet, "zstd"), "--compression", "zstd")
    assert quiet.result().digest != first
    assert diff_ids(quiet.root / "zstd" / TINY_TARGET) == diff_ids(quiet.root / "first" / TINY_TARGET)
    # Another date in the lock changes the digest, but no step depends on it. SOURCE_DATE_EPOCH is ignored.
    quiet.lock({**LOCK, "date": "2025-11-21"})
    quiet.build(*output(quiet, "later"), SOURCE_DATE_EPOCH="12")
    assert quiet.result().digest != first
    assert all(step.cached for step in quiet.result().steps)
