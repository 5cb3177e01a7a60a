"""Uploads of blobs: sent in one piece, and again until the registry has them."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit

import requests

from imagebuild.errors import CommandError, ConfigError
from imagebuild.registry import answers
from imagebuild.registry.base import Streamed
from imagebuild.registry.wire import CHUNK, STORE_TIMEOUT_S, Again, Body, Wire

LOST = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})
"""Answers that mean that the registry does not know the upload any more, or another part of it than we sent."""
GARBLED = frozenset({"DIGEST_INVALID", "BLOB_UPLOAD_INVALID", "SIZE_INVALID"})
GARBLED_ATTEMPTS = 3


def put(wire: Wire, repository: str, content: bytes | Path | Streamed, digest: str) -> bool:
    """Upload a blob, unless the repository has it: whether anything was sent. Raises CommandError."""
    body = _body(wire, content)
    sent = garbled = 0

    def attempt() -> bool:
        nonlocal sent, garbled
        if has(wire, repository, digest):
            return sent > 0
        path = f"{repository}/blobs/uploads/"
        opened = wire.once("POST", path, answers.push(repository))
        answers.expect(opened, f"{wire.host}/{repository}: upload of {digest}", HTTPStatus.ACCEPTED)
        sent += 1
        done = wire.once(
            "PUT", _closing(wire, opened, digest), answers.push(repository), data=body, timeout=STORE_TIMEOUT_S,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        if done.status_code in LOST:
            raise Again(f"the registry lost the upload ({done.status_code})")
        if GARBLED & set(answers.codes(done)) and (garbled := garbled + 1) < GARBLED_ATTEMPTS:
            raise Again("what arrived was not what was sent")
        answers.expect(done, f"{wire.host}/{repository}: upload of {digest}", HTTPStatus.CREATED)
        if not has(wire, repository, digest):
            # Some only take a moment: they are asked once more before it is sent again.
            raise Again("the registry took the upload, but does not have it", wire.backoff_s)
        return True

    return wire.patiently(f"{repository}: upload of {digest}", attempt)


def has(wire: Wire, repository: str, digest: str) -> bool:
    """One question whether the repository has a blob. Raises Again, CommandError."""
    answer = wire.once("HEAD", f"{repository}/blobs/{digest}", answers.pull(repository))
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return False
    answers.expect(answer, f"{wire.host}/{repository}: blob {digest}", HTTPStatus.OK)
    return True


def mount(wire: Wire, repository: str, digest: str, source: str) -> bool:
    """Ask the registry to take a blob from another repository: whether it did. Raises Again, CommandError."""
    path = f"{repository}/blobs/uploads/?{urlencode({'mount': digest, 'from': source})}"
    scopes = (*answers.push(repository), *answers.pull(source))
    answer = wire.once("POST", path, scopes)
    if answer.status_code == HTTPStatus.ACCEPTED and "Location" in answer.headers:
        # It would rather have the bytes; the upload that it opened for them is not used.
        wire.once("DELETE", urljoin(answer.url, answer.headers["Location"]), answers.push(repository))
    return answer.status_code == HTTPStatus.CREATED


def _body(wire: Wire, content: bytes | Path | Streamed) -> bytes | Body:
    if isinstance(content, bytes):
        return content
    if isinstance(content, Streamed):
        return Body(wire, content.size, content.chunks)
    try:
        size = content.stat().st_size
    except OSError as error:
        raise ConfigError(f"{content}: cannot be read: {error.strerror}") from None
    return Body(wire, size, lambda: _pieces(content)) if size else b""


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}") from None


def _closing(wire: Wire, opened: requests.Response, digest: str) -> str:
    """Where the content goes: what the registry said, with the digest added."""
    location = opened.headers.get("Location")
    if not location:
        raise CommandError(f"{wire.host}: does not say where uploads go; it is no registry of images")
    url = urljoin(opened.url, location)
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode({'digest': digest})}"
