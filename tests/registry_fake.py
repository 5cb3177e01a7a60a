"""A registry in memory, for tests of what uses one. It refuses what the distribution's registry refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.core import CommandError
from imagebuild.oci import (
    EMPTY,
    INDEX,
    MANIFEST,
    AttachmentFile,
    BlobStream,
    Descriptor,
    Manifest,
    MissingBlobs,
    attachment_manifest,
    blobs_of,
    digest_of,
    encode_json,
    index_document,
    manifests_of,
    referrer_descriptor,
)


@dataclass
class Repository:
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class FakeRegistry:
    """Satisfies `registry.base.Registry`. `calls` has every change that was asked for: (what, repository, name).

    `before` is called with each of those before it is done: to raise, or to do what another publisher does meanwhile.
    """

    host: str = "registry.test"
    mounts: bool = True
    """Whether it can mount blobs of other repositories."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    before: Callable[[str, str, str], None] | None = None
    sent: int = 0
    """Bytes of blobs and manifests that were uploaded."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def _change(self, what: str, repository: str, name: str) -> Repository:
        if self.before:
            self.before(what, repository, name)
        with self.lock:
            self.calls.append((what, repository, name))
            return self.repositories.setdefault(repository, Repository())

    def _look(self, repository: str) -> Repository:
        return self.repositories.get(repository) or Repository()

    def _problem(self, repository: str, why: str) -> CommandError:
        return CommandError(f"{self.host}/{repository}: {why}")

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        held = self._look(repository)
        return held.manifests.get(held.tags.get(reference, reference))

    def digest(self, repository: str, reference: str) -> str | None:
        found = self.manifest(repository, reference)
        return found.digest if found else None

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        document, digest = json.loads(content), digest_of(content)
        if self.digest(repository, reference) == digest:
            return digest
        held = self._change("manifest", repository, reference)
        if ":" in reference and reference != digest:
            raise self._problem(repository, f"{reference} is not the digest of what was sent")
        with self.lock:
            missing = [b.digest for b in blobs_of(document) if b.digest not in held.blobs]
            missing += [m.digest for m in manifests_of(document) if m.digest not in held.manifests]
            if missing:
                raise MissingBlobs(f"{self.host}/{repository}: lacks what the manifest names: {', '.join(missing)}")
            held.manifests[digest] = Manifest(content, media_type, digest)
            if ":" not in reference:
                held.tags[reference] = digest
        self.sent += len(content)
        return digest

    def tags(self, repository: str) -> tuple[str, ...]:
        return tuple(sorted(self._look(repository).tags))

    def has_blob(self, repository: str, digest: str) -> bool:
        return digest in self._look(repository).blobs

    def blob(self, repository: str, digest: str) -> bytes:
        try:
            return self._look(repository).blobs[digest]
        except KeyError:
            raise self._problem(repository, f"has no blob {digest}") from None

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        yield self.blob(repository, digest)

    def put_blob(self, repository: str, content: bytes | Path | BlobStream, digest: str) -> bool:
        if self.has_blob(repository, digest):
            return False
        if isinstance(content, BlobStream):
            data = b"".join(content.chunks())
        else:
            data = content if isinstance(content, bytes) else content.read_bytes()
        if digest_of(data) != digest:
            raise self._problem(repository, f"{digest} is not the digest of what was sent")
        self._change("blob", repository, digest).blobs[digest] = data
        self.sent += len(data)
        return True

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        found = self._look(source).blobs.get(digest)
        if not self.mounts or found is None:
            return False
        self._change("mount", repository, digest).blobs[digest] = found
        return True

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        found = [
            referrer_descriptor(manifest.content)
            for manifest in self._look(repository).manifests.values()
            if (manifest.document.get("subject") or {}).get("digest") == digest
        ]
        return tuple(item for item in found if artifact_type in (None, item.artifact_type))

    def attach(
        self,
        repository: str,
        subject: Descriptor,
        artifact_type: str,
        files: tuple[AttachmentFile, ...],
        annotations: Mapping[str, str],
    ) -> str:
        content = attachment_manifest(subject, artifact_type, files, annotations)
        for data in (EMPTY, *(file.content for file in files)):
            self.put_blob(repository, data, digest_of(data))
        return self.put_manifest(repository, digest_of(content), content, MANIFEST)

    def delete(self, repository: str, digest: str) -> None:
        held = self._change("delete", repository, digest)
        held.manifests.pop(digest, None)
        held.tags = {tag: named for tag, named in held.tags.items() if named != digest}

    def stop(self) -> None:
        """Nothing runs in other threads for long."""

    def changed(self, what: str) -> list[tuple[str, str]]:
        """Repository and name of the changes of a kind: `manifest`, `blob`, `mount` or `delete`."""
        return [(repository, name) for kind, repository, name in self.calls if kind == what]


def image(
    registry: FakeRegistry, repository: str, content: bytes = b"layer", platform: str = "linux/amd64"
) -> Descriptor:
    """Put a small image of one platform there, by digest; what describes it in an index."""
    os, architecture, *_ = platform.split("/")
    config = json.dumps({"os": os, "architecture": architecture, "config": {}, "rootfs": {}}).encode()
    parts = [
        Descriptor(kind, digest_of(data), len(data))
        for kind, data in (
            ("application/vnd.oci.image.config.v1+json", config),
            ("application/vnd.oci.image.layer.v1.tar+gzip", content),
        )
    ]
    for data in (config, content):
        registry.put_blob(repository, data, digest_of(data))
    first, *layers = [part.to_json() for part in parts]
    manifest = encode_json(
        {"schemaVersion": 2, "mediaType": MANIFEST, "config": first, "layers": layers}
    )  # fmt: skip
    digest = registry.put_manifest(repository, digest_of(manifest), manifest, MANIFEST)
    return Descriptor(MANIFEST, digest, len(manifest), platform)


def index(registry: FakeRegistry, repository: str, manifests: Iterable[Descriptor], tag: str | None = None) -> str:
    """Put an index of images there, by digest or by tag; its digest."""
    content = index_document(manifests)
    return registry.put_manifest(repository, tag or digest_of(content), content, INDEX)
