"""The same lock gives the same digest: on another engine, at another time, and whatever packs the layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docker.conftest import SecondEngine, Tiny

pytestmark = pytest.mark.docker

TARGET = "tiny-cuda13.0-debian13-runtime"
STAGE = """\
FROM {{{{ base }}}} AS {name}
RUN mkdir -p /out/runtime/opt/{name} && echo {name} {nonce} > /out/runtime/opt/{name}/file && cp -r /out/runtime /out/devel
"""


@pytest.fixture
def quiet(tiny: Tiny) -> Tiny:
    """Its stages say nothing about when they ran; their files and folders do."""
    for name in ("library", "tool"):
        text = STAGE.format(name=name, nonce=tiny.nonce)
        tiny.write(f"dockerfiles/components/{name}/build.j2", text)
    # As packages do: an id, a cache of the loader, a user with the day of a password.
    after = "systemd-machine-id-setup 2>/dev/null || cat /proc/sys/kernel/random/uuid > /etc/machine-id; useradd packaged"
    text = (tiny.root / "dockerfiles/components/library/component.yaml").read_text()
    tiny.write(
        "dockerfiles/components/library/component.yaml",
        text.replace('after-install: "', f'after-install: "{after} #'),
    )
    return tiny


def diff_ids(layout: Path) -> list[str]:
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    blobs = layout / "blobs" / "sha256"
    manifest = json.loads((blobs / entry["digest"][7:]).read_text())
    return list(json.loads((blobs / manifest["config"]["digest"][7:]).read_text())["rootfs"]["diff_ids"])


def test_two_engines_make_the_same_digest(quiet: Tiny, second_engine: SecondEngine) -> None:
    def build(folder: str, *options: str, **environ: str) -> str:
        quiet.build(TARGET, "--output", quiet.root / folder, *options, **environ)
        return str(quiet.result().digest)

    first = build("first")
    assert build("second", DOCKER_HOST=second_engine.host) == first
    assert not any(step.cached for step in quiet.result().steps if step.stage != "image")
    assert build("again", "--no-cache") == first
    # Another compression is another digest, of the same files.
    assert build("zstd", "--compression", "zstd") != first
    assert diff_ids(quiet.root / "zstd" / TARGET) == diff_ids(quiet.root / "first" / TARGET)
    # And so is another time.
    assert build("later", SOURCE_DATE_EPOCH="1763683200") != first
    assert all(step.cached for step in quiet.result().steps)
