"""Attestations: in-toto statements about a manifest, unsigned or signed (in a DSSE envelope in a sigstore bundle).

`cosign attest` writes such bundles, and `cosign verify-attestation` reads them. This module does not check signatures.
An unsigned statement does not prove anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imagebuild.core.errors import CommandError, ResultError
from imagebuild.oci.layout import EMPTY_TYPE, Attachment, Descriptor, digest_of

if TYPE_CHECKING:
    from imagebuild.oci.registry import Repository


KINDS = {
    "sbom": "https://spdx.dev/Document", "provenance": "https://slsa.dev/provenance/v1",
    "verification": "urn:imagebuild:verification:v1", "benchmark": "urn:imagebuild:benchmark:v1",
    "scan": "urn:imagebuild:scan:v1",
}  # fmt: skip
"""Maps each kind of attestation to the URL of its predicate type (the format of the content)."""
DEFAULT_KINDS = ("sbom", "provenance", "verification")
"""The kinds of attestations that `attest verify` requires without `--require`, if the index states no publication."""
PUBLISHED_KINDS = ("provenance", "verification")
"""The kinds of attestations that `publish` attaches to each image."""
SIGNATURE = "signature"
"""The kind of an attachment that only signs the manifest."""
SIGNATURE_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
SIGNATURES = ("application/vnd.dev.cosign.", "application/vnd.dev.sigstore.", "application/vnd.cncf.notary.")
"""Prefixes of the artifact types of signatures."""

STATEMENT = "https://in-toto.io/Statement/v1"
STATEMENTS = (STATEMENT, "https://in-toto.io/Statement/v0.1")
"""The types of in-toto statements that imagebuild reads. cosign writes the older type."""
STATEMENT_MEDIA = "application/vnd.in-toto+json"
BUNDLE_MEDIA = "application/vnd.dev.sigstore.bundle.v0.3+json"

PREDICATE_TYPE = "in-toto.io/predicate-type"
BUNDLE_PREDICATE_TYPE = "dev.sigstore.bundle.predicateType"
BUNDLE_CONTENT = "dev.sigstore.bundle.content"
PREDICATE_DIGEST = "imagebuild.predicate"
"""Annotation with the digest of the predicate. A publisher reads this annotation to find existing attestations."""
CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True)
class Attestation:
    """An attestation, a signature or another attachment of a manifest in a registry."""

    kind: str
    """A name in `KINDS`, or `signature`. For any other attachment, its predicate type or artifact type."""
    digest: str
    content: bytes = b""
    """The predicate as canonical JSON. Empty if the kind is not in `KINDS`."""
    bundle: bytes = b""
    """The signed bundle with the statement. Empty if the statement is unsigned."""
    size: int = 0
    problem: str = ""
    """Why the attestation cannot be used. Empty if there is no problem."""


def encode_predicate(document: object) -> bytes:
    """Return a predicate as canonical JSON: equal predicates give equal bytes.
    Raises ValueError if the predicate contains NaN or text that is not Unicode."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def attestation_of(
    kind: str, content: bytes, subject: Descriptor, name: str, *, created: str = "", bundle: bytes = b""
) -> Attachment:
    """Return an attestation of an image: the signed `bundle` or, if `bundle` is empty, an unsigned statement.
    `content` is the predicate, and `name` the name of the image. Equal arguments give equal bytes."""
    predicate_type = KINDS[kind]
    annotations = {PREDICATE_DIGEST: digest_of(content)} | ({CREATED: created} if created else {})
    if bundle:
        annotations |= {BUNDLE_PREDICATE_TYPE: predicate_type, BUNDLE_CONTENT: "dsse-envelope"}
        return Attachment(f"{kind}.sigstore.json", BUNDLE_MEDIA, bundle, annotations)
    statement = {
        "_type": STATEMENT, "subject": [{"name": name, "digest": {"sha256": subject.digest.removeprefix("sha256:")}}],
        "predicateType": predicate_type, "predicate": json.loads(content),
    }  # fmt: skip
    annotations[PREDICATE_TYPE] = predicate_type
    return Attachment(f"{kind}.intoto.json", STATEMENT_MEDIA, encode_predicate(statement), annotations)


def kind_of(referrer: Descriptor) -> str:
    """Return the kind of an attachment, as in `Attestation.kind`."""
    artifact_type = referrer.artifact_type or "unknown"
    predicate_type = referrer.annotations.get(BUNDLE_PREDICATE_TYPE) or referrer.annotations.get(PREDICATE_TYPE, "")
    known = next((name for name, known in KINDS.items() if known == predicate_type), None)
    if known and artifact_type in (BUNDLE_MEDIA, STATEMENT_MEDIA):
        return known
    if predicate_type in ("", SIGNATURE_PREDICATE) and artifact_type.startswith(SIGNATURES):
        return SIGNATURE
    return predicate_type or artifact_type


def list_attestations(place: Repository, subject: str) -> tuple[Descriptor, ...]:
    """Return the attachments of a manifest, sorted by the creation date in their annotations, the newest first.

    An unsigned statement is left out if a bundle contains it too. If the list of the registry lacks the type or the
    annotations of an attachment, the manifest of this attachment is read. Raises CommandError if the registry cannot
    list the attachments."""
    listed = []
    for item in place.referrers(subject):
        is_told = item.artifact_type not in (None, EMPTY_TYPE) and item.annotations
        manifest = None if is_told else place.find(item.digest)
        listed.append(manifest.as_referrer if manifest else item)
    signed = {item.annotations.get(PREDICATE_DIGEST) for item in listed if item.artifact_type == BUNDLE_MEDIA} - {None}
    kept = [
        i for i in listed if i.artifact_type != STATEMENT_MEDIA or i.annotations.get(PREDICATE_DIGEST) not in signed
    ]
    return tuple(sorted(kept, key=lambda item: (item.annotations.get(CREATED, ""), item.digest), reverse=True))


def read_attestations(place: Repository, subject: str, kind: str | None = None) -> Iterator[Attestation]:
    """Read the attachments of a manifest, all or of one kind, one at a time because each may be large.
    Raises CommandError or ResultError if the registry cannot list the attachments."""
    listed = [item for item in list_attestations(place, subject) if kind in (None, kind_of(item))]
    return (read_attestation(place, item, subject) for item in listed)


def read_attestation(place: Repository, item: Descriptor, subject: str) -> Attestation:
    """Read one attachment of a manifest. An error is not raised, but stored in the `problem` of the attestation."""
    kind = kind_of(item)
    try:
        manifest = place.find(item.digest)
        if manifest is None:
            raise ResultError("is listed by the registry, but does not exist")
        document = manifest.document
        named = (document.get("subject") or {}).get("digest")
        layers = [Descriptor.from_json(layer) for layer in document["layers"]]
        size = sum(layer.size for layer in layers)
        if named != subject:
            raise ResultError(f"refers to another image: {named}")
        if "application/vnd.amazon.soci." in f"{item.artifact_type} {manifest.as_referrer.artifact_type}":
            raise ResultError("is a table that soci-snapshotter believes instead of the layers; delete it")
        if kind not in KINDS:
            return Attestation(kind, item.digest, size=size)
        stored = place.blob(layers[0].digest)
        is_bundle = layers[0].media_type == BUNDLE_MEDIA
        content = _predicate_of(stored, KINDS[kind], subject, is_bundle=is_bundle)
        return Attestation(kind, item.digest, content, stored if is_bundle else b"", size)
    except (CommandError, ResultError) as error:
        return Attestation(kind, item.digest, problem=str(error))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return Attestation(kind, item.digest, problem=f"cannot be read: {type(error).__name__}: {error}")


def _predicate_of(stored: bytes, predicate_type: str, subject: str, *, is_bundle: bool) -> bytes:
    """Return the predicate in a bundle or a statement. Raises ResultError if it is about another image."""
    statement: dict[str, Any] = json.loads(stored)
    if is_bundle:
        envelope = statement["dsseEnvelope"]
        if envelope["payloadType"] != STATEMENT_MEDIA:
            raise ResultError(f"is a {envelope['payloadType']}, not an in-toto statement")
        statement = json.loads(base64.b64decode(envelope["payload"], validate=True))
    if statement["_type"] not in STATEMENTS or statement["predicateType"] != predicate_type:
        raise ResultError(f"is {statement['_type']} with {statement['predicateType']}, not {predicate_type}")
    digests = [f"sha256:{item['digest'].get('sha256')}" for item in statement["subject"]]
    if digests != [subject]:
        raise ResultError(f"is about another image: {', '.join(digests) or 'none'}")
    return encode_predicate(statement["predicate"])
