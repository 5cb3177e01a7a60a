"""Base images, pushed to the stand-in's registry as indexes with one platform."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.workshop import Workshop

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
UBUNTU = ("22.04", "24.04", "26.04")


@dataclass(frozen=True)
class Cuda:
    """An `nvidia/cuda`: the toolkit that is inside, and what the image says about itself."""

    version: str
    os: str
    toolkit: str
    nccl: str

    @property
    def libraries(self) -> str:
        """Its LD_LIBRARY_PATH, to which newer images add one folder."""
        newer = ":/usr/local/cuda/lib64" if self.version.startswith("13.4.") else ""
        return f"/usr/local/nvidia/lib:/usr/local/nvidia/lib64{newer}"


CUDA = (
    Cuda("12.9.2", "ubuntu22.04", "13.0", "2.29.7-1+cuda12.9"),
    Cuda("13.0.3", "ubuntu22.04", "13.0", "2.30.7-1+cuda13.3"),
    Cuda("13.2.1", "ubuntu24.04", "13.0", "2.30.7-1+cuda13.3"),
    # This one's list of compute capabilities has 107, which older compilers do not know.
    Cuda("13.4.2", "ubuntu26.04", "13.4", "2.30.7-1+cuda13.3"),
)


def names() -> Iterator[str]:
    """`repository:tag` of every image."""
    yield from (f"library/ubuntu:{version}" for version in UBUNTU)
    yield from (f"nvidia/cuda:{c.version}-{variant}-{c.os}" for c in CUDA for variant in ("runtime", "devel"))


def push(workshop: Workshop, registry: str, packages: Path, keys: Path, toolkits: dict[str, Path]) -> dict[str, str]:
    """Build and push all of them; `repository:tag` → digest of the index."""
    made = {}
    folders = {"packages": packages, "keys": keys}
    for version in UBUNTU:
        name = f"library/ubuntu:{version}"
        made[name] = _push(workshop, registry, name, "--target=ubuntu", toolkit=toolkits["13.0"], **folders)
    for cuda in CUDA:
        values = {"TOOLKIT": cuda.toolkit, "CUDA": cuda.version, "OS": cuda.os, "NCCL": cuda.nccl,
                  "LIBRARIES": cuda.libraries}  # fmt: skip
        words = [f"--build-arg={key}={value}" for key, value in values.items()]
        for variant in ("runtime", "devel"):
            name = f"nvidia/cuda:{cuda.version}-{variant}-{cuda.os}"
            options = (f"--target={variant}", *words)
            made[name] = _push(workshop, registry, name, *options, toolkit=toolkits[cuda.toolkit], **folders)
    return made


def _push(workshop: Workshop, registry: str, name: str, *options: str, **contexts: Path) -> str:
    workshop.log(f"building and pushing {name}")
    part = f"{name}-amd64"
    workshop.build(
        "bases", *options, f"--output=type=image,name={registry}/{part},push=true,compression-level=1", **contexts
    )
    return make_index(registry, name, part)


def make_index(registry: str, name: str, part: str) -> str:
    """Give `name` an index with the image `part` in it, as multi-platform images have; its digest."""
    repository, tag = name.split(":")
    address = f"http://{registry}/v2/{repository}/manifests"
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/{part.split(':')[1]}", headers={"Accept": ", ".join(MANIFESTS)})
    ) as answer:
        digest, kind, size = answer.headers["Docker-Content-Digest"], answer.headers["Content-Type"], len(answer.read())
    platform = {"os": "linux", "architecture": "amd64"}
    manifest = {"mediaType": kind, "digest": digest, "size": size, "platform": platform}
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest]}).encode()
    request = urllib.request.Request(f"{address}/{tag}", index, {"Content-Type": INDEX}, method="PUT")
    with urllib.request.urlopen(request) as answer:
        return str(answer.headers["Docker-Content-Digest"])
