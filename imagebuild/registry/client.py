"""A registry of images, reached by HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urljoin

from imagebuild import settings
from imagebuild.registry import answers, documents, manifests, referrers, uploads
from imagebuild.registry.base import DeletionDisabled, Descriptor, File, Manifest, Streamed
from imagebuild.registry.reference import api_address
from imagebuild.registry.wire import Again, Wire, ca_bundle, patience

LISTED = 1000
"""Tags asked for at once."""


def connect(host: str, *, patience_s: float | None = None, environ: Mapping[str, str] | None = None) -> Client:
    """The registry of a host, which is not asked anything yet. Raises ConfigError for unusable settings."""
    environ = os.environ if environ is None else environ
    seconds = patience(environ) if patience_s is None else patience_s
    return Client(Wire(host, api_address(host, _insecure(environ)), ca_bundle(environ), seconds))


def is_plain(host: str, environ: Mapping[str, str]) -> bool:
    """Whether a registry is asked without TLS. Raises ConfigError for unusable settings."""
    return api_address(host, _insecure(environ)).startswith("http://")


def _insecure(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("IMAGEBUILD_INSECURE_REGISTRIES", "").replace(",", " ").split()
    return (*settings.load(environ).insecure_registries, *named)


@dataclass(eq=False)
class Client:
    """Satisfies `base.Registry`, for several threads."""

    wire: Wire

    @property
    def host(self) -> str:
        return self.wire.host

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """A manifest by tag or digest; None if there is none. Raises CommandError if it has another digest."""
        what = f"{repository}: manifest {reference}"
        return self.wire.patiently(what, lambda: manifests.read(self.wire, repository, reference))

    def digest(self, repository: str, reference: str) -> str | None:
        """The digest of what a tag names now; None if there is none."""
        return self.wire.patiently(
            f"{repository}: {reference}", lambda: manifests.digest(self.wire, repository, reference)
        )

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest, and read back which one the registry has; see `base.Registry`."""
        own = documents.digest_of(content)
        before = self.digest(repository, reference)
        if before == own:
            return own

        def attempt() -> str:
            manifests.store(self.wire, repository, reference, content, media_type)
            found = manifests.digest(self.wire, repository, reference)
            if found in (None, before):
                raise Again("the registry took the manifest, but does not have it")
            return str(found)

        return self.wire.patiently(f"{repository}: manifest {reference}", attempt)

    def tags(self, repository: str) -> tuple[str, ...]:
        """All tags of a repository; none if there is no such repository."""
        found: list[str] = []
        path: str | None = f"{repository}/tags/list?n={LISTED}"
        while path:
            answer = self.wire.request("GET", path, answers.pull(repository))
            if answer.status_code == HTTPStatus.NOT_FOUND:
                break
            answers.expect(answer, f"{self.host}/{repository}: tags", HTTPStatus.OK)
            found += answers.document(answer, f"{self.host}/{repository}: tags").get("tags") or ()
            following = answer.links.get("next", {}).get("url")
            path = urljoin(answer.url, following) if following else None
        return tuple(dict.fromkeys(found))

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository has a blob."""
        return self.wire.patiently(f"{repository}: blob {digest}", lambda: uploads.has(self.wire, repository, digest))

    def blob(self, repository: str, digest: str) -> bytes:
        """A small blob, compared with its digest."""

        def attempt() -> bytes:
            content = b"".join(self.open_blob(repository, digest))
            if documents.digest_of(content) != digest:
                raise Again("the registry sent something else")
            return content

        return self.wire.patiently(f"{repository}: blob {digest}", attempt)

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """A blob piece by piece, not compared with its digest. Raises Again if the connection breaks midway."""
        answer = self.wire.request("GET", f"{repository}/blobs/{digest}", answers.pull(repository), stream=True)
        answers.expect(answer, f"{self.host}/{repository}: blob {digest}", HTTPStatus.OK)
        yield from self.wire.chunks(answer)

    def put_blob(self, repository: str, content: bytes | Path | Streamed, digest: str) -> bool:
        """Upload a blob, unless the repository has it: whether anything was sent."""
        return uploads.put(self.wire, repository, content, digest)

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one: whether the registry could."""
        what = f"{repository}: blob {digest} of {source}"
        return self.wire.patiently(what, lambda: uploads.mount(self.wire, repository, digest, source))

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """What refers to a manifest, from the referrers API or, where there is none, the tag schema."""
        found = referrers.listed(self.wire, repository, digest)
        return tuple(item for item in found if artifact_type in (None, item.artifact_type))

    def attach(
        self,
        repository: str,
        subject: Descriptor,
        artifact_type: str,
        files: tuple[File, ...],
        annotations: Mapping[str, str],
    ) -> str:
        """Store files that refer to a manifest; returns the digest of their manifest."""
        content = documents.attachment(subject, artifact_type, files, annotations)
        for data in {documents.EMPTY, *(file.content for file in files)}:
            self.put_blob(repository, data, documents.digest_of(data))
        referrers.add(self.wire, repository, subject.digest, content)
        return documents.digest_of(content)

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it; one that is not there is deleted already."""
        answer = self.wire.request("DELETE", f"{repository}/manifests/{digest}", answers.delete(repository))
        if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise DeletionDisabled(
                f"{self.host}: does not let images be deleted (405); the distribution's registry does with "
                "`storage: {delete: {enabled: true}}` in its configuration, or REGISTRY_STORAGE_DELETE_ENABLED=true"
            )
        done = (HTTPStatus.ACCEPTED, HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND)
        answers.expect(answer, f"{self.host}/{repository}: deletion of {digest}", *done)

    def stop(self) -> None:
        """Make what other threads are doing with it end with CommandError, for Ctrl-C."""
        self.wire.stop()
