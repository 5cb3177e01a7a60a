"""Images with real layers in the registry in memory."""

from __future__ import annotations

import gzip
import json
from typing import Any

from imagebuild.oci import MANIFEST, Descriptor, digest_of, encode_json
from tests.registry_fake import FakeRegistry
from tests.unit import image_files as make


def pushed(registry: FakeRegistry, *layers: make.Files, platform: str = "linux/amd64", **settings: Any) -> Descriptor:
    """An image of real layers, by digest in the repository `gpu/open`; its description."""
    os, architecture = platform.split("/")
    packed = [gzip.compress(make.layer(files), 1) for files in layers]
    config = json.dumps({"os": os, "architecture": architecture, "config": settings}).encode()
    about = [
        Descriptor("application/vnd.oci.image.config.v1+json", digest_of(config), len(config)),
        *(Descriptor("application/vnd.oci.image.layer.v1.tar+gzip", digest_of(data), len(data)) for data in packed),
    ]
    for data in (config, *packed):
        registry.put_blob("gpu/open", data, digest_of(data))
    first, *rest = [part.to_json() for part in about]
    content = encode_json(
        {"schemaVersion": 2, "mediaType": MANIFEST, "config": first, "layers": rest}
    )  # fmt: skip
    digest = registry.put_manifest("gpu/open", digest_of(content), content, MANIFEST)
    return Descriptor(MANIFEST, digest, len(content), platform)
