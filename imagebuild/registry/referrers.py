"""What refers to a manifest: from the registry's API or, where it has none, from an index under an agreed tag.

That index is changed by reading it and writing it back. Two publishers at once could each write what the other has not
seen, so whoever adds to it looks again a while later, and adds again if its entry is gone.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from http import HTTPStatus
from urllib.parse import urljoin

from imagebuild.registry import answers, documents, manifests
from imagebuild.registry.base import Descriptor
from imagebuild.registry.documents import INDEX, as_referrer, referrers_tag
from imagebuild.registry.wire import Again, Wire

SUBJECT = "OCI-Subject"
"""Header of a registry that lists by itself what refers to a manifest."""
SETTLED_S = 0.5
"""How long after writing the index it is looked at again, or twice the time between reading and writing it if that is
more: who read it before we wrote has written by then, unless its requests take far longer than ours."""

_own: defaultdict[tuple[str, str, str], threading.Lock] = defaultdict(threading.Lock)
"""Our own threads take turns."""


def listed(wire: Wire, repository: str, digest: str) -> tuple[Descriptor, ...]:
    """All that refers to a manifest. Raises CommandError."""
    found = _from_api(wire, repository, digest)
    if found is not None:
        return found
    tag = referrers_tag(digest)
    return wire.patiently(f"{repository}: {tag}", lambda: _under_tag(wire, repository, tag))


def add(wire: Wire, repository: str, subject: str, content: bytes) -> None:
    """Store a manifest that refers to another one, and have it listed. Raises MissingBlobs, CommandError."""
    own = as_referrer(content)
    if any(item.digest == own.digest for item in listed(wire, repository, subject)):
        return

    def attempt() -> bool:
        answer = manifests.store(wire, repository, own.digest, content, own.media_type)
        if manifests.digest(wire, repository, own.digest) is None:
            raise Again("the registry took the manifest, but does not have it")
        return SUBJECT in answer.headers

    if wire.patiently(f"{repository}: attachment {own.digest}", attempt):
        return
    with _own[wire.host, repository, subject]:
        _list_under_tag(wire, repository, subject, own)


def _from_api(wire: Wire, repository: str, digest: str) -> tuple[Descriptor, ...] | None:
    """None if the registry has no such API, which it need not be asked twice."""
    if wire.lacks_referrers:
        return None
    found: list[Descriptor] = []
    path: str | None = f"{repository}/referrers/{digest}"
    while path:
        answer = wire.request("GET", path, answers.pull(repository), headers={"Accept": INDEX})
        kind = answer.headers.get("Content-Type", "").partition(";")[0]
        if answer.status_code != HTTPStatus.OK or kind != INDEX:
            answers.expect(
                answer, f"{wire.host}/{repository}: what refers to {digest}", HTTPStatus.OK, HTTPStatus.BAD_REQUEST,
                HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED,
            )  # fmt: skip
            # One that has it lists errors of its own, for example that it does not know the repository.
            wire.lacks_referrers = not answers.codes(answer)
            return None
        found += documents.children(answer.json())
        following = answer.links.get("next", {}).get("url")
        path = urljoin(answer.url, following) if following else None
    return tuple({item.digest: item for item in found}.values())


def _under_tag(wire: Wire, repository: str, tag: str) -> tuple[Descriptor, ...]:
    found = manifests.read(wire, repository, tag)
    return documents.children(json.loads(found.content)) if found else ()


def _list_under_tag(wire: Wire, repository: str, subject: str, own: Descriptor) -> None:
    tag = referrers_tag(subject)
    tried = False

    def is_listed(there: tuple[Descriptor, ...]) -> bool:
        return any(item.digest == own.digest for item in there)

    def attempt() -> None:
        nonlocal tried
        began = time.monotonic()
        there = _under_tag(wire, repository, tag)
        if is_listed(there) and not tried:
            return
        if not is_listed(there):
            tried = True
            # Sorted, so that it does not depend on who came first.
            content = documents.index(sorted((*there, own), key=lambda item: item.digest))
            manifests.store(wire, repository, tag, content, INDEX)
        wire.stopped.wait(max(SETTLED_S, 2 * (time.monotonic() - began)))
        if not is_listed(_under_tag(wire, repository, tag)):
            raise Again("another publisher wrote the list of attachments at the same time")

    wire.patiently(f"{repository}: list of attachments", attempt)
