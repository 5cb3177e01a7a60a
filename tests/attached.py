"""Attach predicates to images of tests, and what is none."""

from __future__ import annotations

from imagebuild.oci import KINDS, STATEMENT_MEDIA, Attachment, Descriptor, Registry, RepositoryAt, encode_predicate
from imagebuild.publish import attach as attach_predicate


def attach(registry: Registry, repository: str, subject: Descriptor, kind: str, content: object) -> str:
    """Attach a document, nobody's signature on it; bytes are attached in place of a statement."""
    if not isinstance(content, bytes):
        return attach_predicate(RepositoryAt(registry, repository), subject, kind, encode_predicate(content))
    notes = {"in-toto.io/predicate-type": KINDS[kind]}
    return registry.attach(repository, subject, Attachment(f"{kind}.intoto.json", STATEMENT_MEDIA, content, notes))
