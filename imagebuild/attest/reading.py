"""Read what refers to an image from a registry, and believe none of it before it was compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from imagebuild.attachments import KINDS
from imagebuild.errors import CommandError, ConfigError, ResultError
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest, Registry
from imagebuild.registry.reference import Reference
from imagebuild.registry.wire import Again

BY_TYPE = {kind.artifact_type: name for name, kind in KINDS.items()}
MOST_BYTES = 64 << 20
"""A registry could name any size; no attachment of ours comes near."""

ATTEMPTS = 3
"""What was damaged on its way is whole the next time."""


@dataclass(frozen=True)
class Attachment:
    """Something that a registry lists as referring to a manifest."""

    kind: str
    """Name in `KINDS`, or the artefact's type."""
    digest: str
    content: bytes = b""
    annotations: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why it is not what it is listed as."""


@dataclass(frozen=True)
class Image:
    """An image of a registry."""

    registry: Registry
    repository: str
    top: Manifest
    platforms: Mapping[str, Descriptor]
    """Platform → its manifest; of a manifest that is in no index, its own."""

    def reference(self, digest: str) -> Reference:
        """The name of something in its repository."""
        return Reference(self.registry.host, self.repository, digest=digest)


def find(reference: Reference, registry: Registry) -> Image:
    """The image that a name means now. Raises ConfigError if there is none, ResultError for what is no image."""
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{reference}: {reference.host} has no such image")
    try:
        children = documents.children(top.document)
        if not children and "config" not in top.document:
            raise ResultError(f"{reference}: is neither an image nor an index of images")
        if not children:
            own = Descriptor(top.media_type, top.digest, len(top.content))
            return Image(registry, reference.repository, top, {_platform(registry, reference, top): own})
        runnable = {c.platform: c for c in children if c.platform and not c.platform.startswith("unknown")}
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{reference}: cannot be read as an image: {type(error).__name__}: {error}") from None
    if not runnable:
        raise ResultError(f"{reference}: an index without images")
    return Image(registry, reference.repository, top, runnable)


def attachments(image: Image, digest: str) -> tuple[Attachment, ...]:
    """All that the registry lists as referring to a manifest. Raises CommandError if it cannot list that."""
    listed = image.registry.referrers(image.repository, digest)
    return tuple(_read(image, digest, item) for item in sorted(listed, key=lambda item: item.digest))


def _read(image: Image, subject: str, item: Descriptor) -> Attachment:
    listed_as = BY_TYPE.get(item.artifact_type or "", item.artifact_type or "unknown")
    try:
        found = image.registry.manifest(image.repository, item.digest)
    except CommandError as error:
        return Attachment(listed_as, item.digest, problem=str(error))
    if found is None:
        return Attachment(listed_as, item.digest, problem="is listed, but the registry does not have it")
    try:
        document = found.document
        named = (document.get("subject") or {}).get("digest")
        kind = document.get("artifactType") or (document.get("config") or {}).get("mediaType")
        layers = documents.read_descriptor(document["layers"][0])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return Attachment(listed_as, item.digest, problem=f"is no attachment: {type(error).__name__}: {error}")
    name = BY_TYPE.get(str(kind), str(kind))
    if named != subject:
        return Attachment(name, item.digest, problem=f"refers to another image: {named}")
    if name not in KINDS:
        return Attachment(name, item.digest)
    content, problem = _content(image, layers)
    return Attachment(name, item.digest, content, document.get("annotations") or {}, problem)


def _content(image: Image, layer: Descriptor) -> tuple[bytes, str]:
    """The bytes of a file, or why they are not what the manifest says."""
    if layer.size > MOST_BYTES:
        return b"", f"is said to have {layer.size} bytes, which is too much to be true"
    why = ""
    for _ in range(ATTEMPTS):
        try:
            found = _at_most(image.registry.open_blob(image.repository, layer.digest), layer.size)
        except Again as error:
            why = str(error)
        except CommandError as error:
            return b"", str(error)
        else:
            if documents.digest_of(found) == layer.digest:
                return found, ""
            why = f"was changed: what the registry sends is not {layer.digest}"
    return b"", why


def _at_most(pieces: Iterable[bytes], size: int) -> bytes:
    """No more than so many bytes and one: enough to see that there are more."""
    found = b""
    for piece in pieces:
        found += piece
        if len(found) > size:
            break
    return found


def _platform(registry: Registry, reference: Reference, manifest: Manifest) -> str:
    config = json.loads(registry.blob(reference.repository, manifest.document["config"]["digest"]))
    return f"{config.get('os', 'unknown')}/{config.get('architecture', 'unknown')}"
