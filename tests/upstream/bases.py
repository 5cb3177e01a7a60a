"""Base images after `evidence/cuda.yaml`, pushed to the stand-in's registry."""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from imagebuild.core import Arch
from tests.upstream.workshop import Workshop

EVIDENCE = Path(__file__).parent / "evidence" / "cuda.yaml"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
VARIANTS = ("runtime", "devel")
TOOLKIT = "13.0"
"""Of most images, and of what is compiled for all."""


@cache
def evidence() -> dict[str, Any]:
    """What people have shown of the images."""
    data: dict[str, Any] = yaml.safe_load(EVIDENCE.read_text())
    return data


@dataclass(frozen=True)
class Cuda:
    """An `nvidia/cuda`: the toolkit that is inside, and what the image says about itself."""

    version: str
    os: str
    toolkit: str
    nccl: str

    @property
    def names(self) -> dict[str, str]:
        """What stands for the words in braces of the evidence."""
        minor = self.version.rpartition(".")[0]
        return {"version": self.version, "minor": minor, "dashed": minor.replace(".", "-"), "nccl": self.nccl,
                "plain": self.nccl.partition("+")[0]}  # fmt: skip

    def environment(self, variant: str) -> dict[str, str]:
        """Variables of its configuration."""
        found: dict[str, str] = {}
        for kind in ("base", "runtime", "devel")[: 3 if variant == "devel" else 2]:
            for group in evidence()["environment"][kind]:
                found |= {name: value.format(**self.names) for name, value in group["values"].items()}
        if self.version.startswith("12."):
            found["LD_LIBRARY_PATH"] = evidence()["older"]["libraries"]
        return found

    def rows(self, kind: str) -> Iterator[str]:
        """Lines `PATH LIBRARY…` of files that are `foreign` or `unmet`."""
        for row in evidence()[kind]:
            yield " ".join([row["path"], row.get("needs", "")]).format(**self.names)

    def held(self, variant: str) -> list[str]:
        """Packages that apt may not change."""
        kinds = VARIANTS if variant == "devel" else VARIANTS[:1]
        return [name.format(**self.names) for kind in kinds for name in evidence()["held"][kind]["packages"]]


Image = tuple[str, str, Cuda | None]
"""Distribution, variant, CUDA."""


def images(systems: Iterable[str]) -> dict[str, Image]:
    """`repository:tag` → what it is, of all images that targets on `systems` need.

    A system is a CUDA and an Ubuntu, `13.2.1-ubuntu24.04`. What is compiled once for all is compiled on the oldest.
    """
    known = {f"{row['version']}-{row['os']}": Cuda(**row) for row in evidence()["images"]}
    chosen = [known[system] for system in systems]
    names = {f"library/ubuntu:{os[6:]}": (os, "ubuntu", None) for os in ("ubuntu22.04", *(c.os for c in chosen))}
    found: dict[str, Image] = dict(names)
    oldest = known["13.0.3-ubuntu22.04"]
    found[f"nvidia/cuda:{oldest.version}-devel-{oldest.os}"] = (oldest.os, "devel", oldest)
    for cuda in chosen:
        found |= {f"nvidia/cuda:{cuda.version}-{variant}-{cuda.os}": (cuda.os, variant, cuda) for variant in VARIANTS}
    return found


def push(workshop: Workshop, registry: str, name: str, what: Image, contexts: Mapping[str, Path]) -> str:
    """Build and push one of `images`; the digest of its index."""
    os, variant, cuda = what
    options, tail = [f"--target={variant}"], ""
    if cuda:
        values = {"TOOLKIT": cuda.toolkit, "CUDA": cuda.version, "OS": os, "NCCL": cuda.nccl,
                  "HELD": " ".join(cuda.held(variant)), "FOREIGN": "\n".join(cuda.rows("foreign")),
                  "UNMET": "\n".join(cuda.rows("unmet"))}  # fmt: skip
        options += [f"--build-arg={key}={value}" for key, value in values.items()]
        tail = "\n".join([
            f"FROM {variant}-files AS {variant}", *(f'ENV {k}="{v}"' for k, v in cuda.environment(variant).items()),
            'LABEL org.opencontainers.image.title="nvidia/cuda" maintainer="nobody: STAND-IN made for tests"',
            'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]\n',
        ])  # fmt: skip
    archs: Sequence[Arch] = ("amd64",) if cuda else workshop.archs
    for arch in archs:
        output = f"--output=type=image,name={registry}/{name}-{arch},push=true,compression-level=1"
        workshop.build("bases", *options, output, arch=arch, tail=tail, **contexts)
    return make_index(registry, name, archs)


def make_index(registry: str, name: str, archs: Sequence[Arch]) -> str:
    """Give `name` an index with an image for both platforms, as the real ones have; its digest.

    Where arm64's was not pushed, it has the files and the environment of amd64's: nothing of it can be run.
    """
    repository, tag = name.split(":")
    base = f"http://{registry}/v2/{repository}"

    def ask(url: str, data: bytes | None = None, method: str = "GET", **headers: str) -> tuple[Message, bytes]:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        with urllib.request.urlopen(urllib.request.Request(url, data, named, method=method)) as answer:
            return answer.headers, answer.read()

    pushed = {arch: ask(f"{base}/manifests/{tag}-{arch}", Accept=", ".join(MANIFESTS)) for arch in archs}
    head, content = pushed["amd64"]
    kind, manifest = head["Content-Type"], json.loads(content)
    config = json.loads(ask(f"{base}/blobs/{manifest['config']['digest']}")[1])
    changed = json.dumps({**config, "architecture": "arm64"}).encode()
    digest = f"sha256:{hashlib.sha256(changed).hexdigest()}"
    place = ask(f"{base}/blobs/uploads/", b"", "POST")[0]["Location"]
    ask(
        f"{place}{'&' if '?' in place else '?'}digest={digest}", changed, "PUT", Content_Type="application/octet-stream"
    )
    other = json.dumps({**manifest, "config": {**manifest["config"], "digest": digest, "size": len(changed)}}).encode()
    manifests = []
    for arch, data in (("amd64", content), ("arm64", pushed["arm64"][1] if "arm64" in pushed else other)):
        stored = ask(f"{base}/manifests/{tag}-{arch}", data, "PUT", Content_Type=kind)[0]["Docker-Content-Digest"]
        platform = {"os": "linux", "architecture": arch}
        manifests.append({"mediaType": kind, "digest": stored, "size": len(data), "platform": platform})
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}).encode()
    return str(ask(f"{base}/manifests/{tag}", index, "PUT", Content_Type=INDEX)[0]["Docker-Content-Digest"])
