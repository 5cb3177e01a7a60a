"""What is built can be pushed, and what is pulled is what was built."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from docker import DockerClient

from imagebuild.records import BuildResult, VerifyResult
from tests.docker.conftest import REPOSITORY, TARGET, Built, Imagebuild, Tiny

pytestmark = pytest.mark.docker


def blob(layout: Path, digest: str) -> bytes:
    content = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
    assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    return content


MANIFESTS = ("oci.image.manifest.v1", "oci.image.index.v1", "docker.distribution.manifest.v2")


def test_push_pull_verify(
    registry: str, quickstart: Built, imagebuild: Imagebuild, client: DockerClient, tmp_path: Path
) -> None:
    out, repository = tmp_path / "build", f"{registry}/{REPOSITORY}"
    imagebuild("build", TARGET, "--platform", "local", "--push", "--repository", repository, "--folder", out)
    result = BuildResult.model_validate_json((out / TARGET / "result.json").read_text())
    assert result.digest == quickstart.result.digest
    name, _, tag = result.tags[0].rpartition(":")
    assert name == f"{repository}/quickstart"

    # What the registry has under the tag is what the result says, and it is all there.
    address = f"http://{registry}/v2/{REPOSITORY}/quickstart"
    accept = {"Accept": ", ".join(f"application/vnd.{kind}+json" for kind in MANIFESTS)}
    with urlopen(Request(f"{address}/manifests/{tag}", headers=accept)) as answer:
        manifest = answer.read()
    assert result.digest == f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    layers = json.loads(manifest)["layers"]
    assert sum(layer["size"] for layer in layers) == pytest.approx(quickstart.result.size_bytes, rel=0.001)
    for layer in layers:
        with urlopen(Request(f"{address}/blobs/{layer['digest']}", method="HEAD")) as answer:
            assert int(answer.headers["Content-Length"]) == layer["size"]

    for _ in client.images.list(name):  # a push also names it here
        client.images.remove(f"{name}:{tag}", force=True)
    assert not client.images.list(name)
    pulled = f"{name}@{result.digest}"
    client.images.pull(pulled)
    imagebuild("verify", pulled, "--json", tmp_path / "verify.json")
    verified = VerifyResult.model_validate_json((tmp_path / "verify.json").read_text())
    assert verified.digest == result.digest
    assert verified.target == TARGET


def test_push_to_a_registry_that_does_not_answer(tiny: Tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    done = tiny.build("tiny-cuda13.0*runtime", "--push", "--repository", f"{address}/x", expect=4)
    assert "connection refused" in done.err
    assert address in done.err


def test_output_is_an_oci_layout(tiny: Tiny) -> None:
    tiny.build("cuda=13.0", "--output", tiny.root / "layouts")
    for target in ("tiny-cuda13.0-debian13-runtime", "tiny-cuda13.0-debian13-devel"):
        layout = tiny.root / "layouts" / target
        assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
        assert entry["digest"] == tiny.result(target).digest
        manifest = json.loads(blob(layout, entry["digest"]))
        for part in [manifest["config"], *manifest["layers"]]:
            assert len(blob(layout, part["digest"])) == part["size"]
        labels = json.loads(blob(layout, manifest["config"]["digest"]))["config"]["Labels"]
        assert labels["imagebuild.target"] == target
