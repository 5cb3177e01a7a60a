"""Images with real layers in the registry in memory."""

from __future__ import annotations

import gzip
import json
from typing import Any

from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor
from tests.registry_fake import FakeRegistry
from tests.unit import image_files as make


def pushed(registry: FakeRegistry, *layers: make.Files, platform: str = "linux/amd64", **settings: Any) -> Descriptor:
    """An image of real layers, by digest in the repository `gpu/open`; its description."""
    os, architecture = platform.split("/")
    packed = [gzip.compress(make.layer(files), 1) for files in layers]
    config = json.dumps({"os": os, "architecture": architecture, "config": settings}).encode()
    about = [
        Descriptor("application/vnd.oci.image.config.v1+json", documents.digest_of(config), len(config)),
        *(
            Descriptor("application/vnd.oci.image.layer.v1.tar+gzip", documents.digest_of(data), len(data))
            for data in packed
        ),
    ]
    for data in (config, *packed):
        registry.put_blob("gpu/open", data, documents.digest_of(data))
    first, *rest = [documents.descriptor_json(part) for part in about]
    content = documents.encode(
        {"schemaVersion": 2, "mediaType": documents.MANIFEST, "config": first, "layers": rest}
    )  # fmt: skip
    digest = registry.put_manifest("gpu/open", documents.digest_of(content), content, documents.MANIFEST)
    return Descriptor(documents.MANIFEST, digest, len(content), platform)
