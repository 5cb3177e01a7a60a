"""Manifests, indexes and what refers to them, as the OCI specifications write them down. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from imagebuild import oci
from imagebuild.registry.base import Descriptor, File

INDEX = oci.INDEX
MANIFEST = oci.MANIFEST
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
MANIFEST_TYPES = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)
INDEX_TYPES = (INDEX, DOCKER_INDEX)

EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
"""Annotation of a layer: the name of its file."""


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encode(document: Mapping[str, Any]) -> bytes:
    """The same document gives the same bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def descriptor_json(descriptor: Descriptor) -> dict[str, Any]:
    document: dict[str, Any] = {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
    }
    if descriptor.platform:
        document["platform"] = oci.platform_json(descriptor.platform)
    if descriptor.artifact_type:
        document["artifactType"] = descriptor.artifact_type
    if descriptor.annotations:
        document["annotations"] = dict(sorted(descriptor.annotations.items()))
    return document


def read_descriptor(document: Mapping[str, Any]) -> Descriptor:
    """Raises LookupError or TypeError for something else."""
    platform = document.get("platform") or {}
    return Descriptor(
        media_type=document["mediaType"],
        digest=document["digest"],
        size=document["size"],
        platform="/".join(platform[k] for k in ("os", "architecture", "variant") if platform.get(k)) or None,
        artifact_type=document.get("artifactType"),
        annotations=document.get("annotations") or {},
    )


def blobs(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Config and layers that a manifest names, each once; an index names none."""
    named = [*([document["config"]] if document.get("config") else []), *document.get("layers", ())]
    return tuple({item["digest"]: read_descriptor(item) for item in named}.values())


def children(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Manifests that an index names; a manifest names none."""
    return tuple(read_descriptor(item) for item in document.get("manifests", ()))


def media_type(document: Mapping[str, Any]) -> str:
    """Of a manifest or an index, which need not say what it is."""
    return str(document.get("mediaType") or (INDEX if "manifests" in document else MANIFEST))


def index(manifests: Iterable[Descriptor]) -> bytes:
    """An index of these, in this order."""
    items = [descriptor_json(item) for item in manifests]
    return encode({"schemaVersion": 2, "mediaType": INDEX, "manifests": items})


def attachment(subject: Descriptor, artifact_type: str, files: Iterable[File], annotations: Mapping[str, str]) -> bytes:
    """The manifest of files that refer to another manifest. It holds no time but what annotations say."""
    layers = [
        Descriptor(file.media_type, digest_of(file.content), len(file.content), annotations={TITLE: file.name})
        for file in files
    ]
    empty = Descriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY))
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": artifact_type,
        "config": descriptor_json(empty),
        # The specification wants one layer at least: without files it is the empty one.
        "layers": [descriptor_json(layer) for layer in layers or [empty]],
        "subject": descriptor_json(Descriptor(subject.media_type, subject.digest, subject.size)),
    }
    return encode(document | ({"annotations": dict(annotations)} if annotations else {}))


def as_referrer(content: bytes) -> Descriptor:
    """How an index of referrers lists a manifest that refers to another one."""
    document = json.loads(content)
    return Descriptor(
        media_type=document.get("mediaType", MANIFEST),
        digest=digest_of(content),
        size=len(content),
        artifact_type=document.get("artifactType") or (document.get("config") or {}).get("mediaType"),
        annotations=document.get("annotations") or {},
    )


def referrers_tag(digest: str) -> str:
    """The tag that lists what refers to a manifest, where the registry has no API for it."""
    return digest.replace(":", "-", 1)
