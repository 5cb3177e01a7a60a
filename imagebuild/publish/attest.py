"""Verification and addition of attachments, such as SBOMs, to images in registries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from imagebuild.bench.verification import VerifyResult
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import (
    PREDICATE_DIGEST,
    SIGNATURE,
    Attestation,
    attestation_of,
    kind_of,
    list_attestations,
    read_attestation,
)
from imagebuild.oci.image import image_in_registry
from imagebuild.oci.layout import Descriptor, digest_of
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Registry, Repository
from imagebuild.project.records import ScanResult
from imagebuild.publish.evidence import PREDICATES, NewAttachment, about, attachment_of, mismatch, read_attached
from imagebuild.publish.provenance import Provenance
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.publish.signatures import WHOSE, Signer
from imagebuild.report.document import Report

INDEX = "index"
DEFAULT_KINDS = ("sbom", "provenance", "verification")
"""The kinds of attachments that `attest verify` requires if no others are named."""


# Verify


Outcome = Literal["passed", "failed", "broken", "missing", "skipped"]
"""The outcome for an attachment.

`failed`: the attachment is intact, but it reports a failure, or its signature is not trusted. `broken`: the attachment
is damaged or about another image. `skipped`: the attachment does not count.
"""


class AttestFinding(Model):
    """The outcome for one attachment of an image, or for one that is missing."""

    subject: str
    """The platform of the image, or `index`."""
    digest: str
    """Digest of the manifest that the attachment refers to."""
    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan` or `signature`."""
    outcome: Outcome
    detail: str
    attachment: str | None = None
    """Digest of the attachment's own manifest. None if the attachment is missing, and for signatures."""
    required: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the image must not be trusted. Damaged attachments always count. Other outcomes count only for
        required kinds.
        """
        return self.outcome == "broken" or (self.required and self.outcome != "passed")


class AttestResult(Model):
    """The file that `imagebuild attest verify --json` writes."""

    image: str
    """The name of the image on the command line."""
    digest: str
    """Digest of the index. If the image has no index: digest of the manifest."""
    findings: tuple[AttestFinding, ...]

    @property
    def verdict(self) -> Literal["passed", "failed"]:
        return "failed" if any(finding.is_wrong for finding in self.findings) else "passed"


def verify_attachments(
    reference: ImageReference, registry: Registry, required: Collection[str], trust: Signer | None = None
) -> AttestResult:
    """Judge every attachment of an image, and report the required kinds that are missing.

    Without `trust`, signatures are not checked, so only damaged attachments and attachments of other images are found.
    A tag is resolved once; after that, only its digest is used. Raises ConfigError if the image does not exist or
    `required` is not valid, CommandError if the registry fails, and ResultError if the name is not the name of an
    image.
    """
    known = (*PREDICATES, SIGNATURE)
    if unknown := [kind for kind in required if kind not in known]:
        raise ConfigError(f"--require {unknown[0]}: unknown kind; use one of {', '.join(known)}")
    if SIGNATURE in required and not trust:
        raise ConfigError(f"--require signature: the signer is not named; add {WHOSE}")
    found = image_in_registry(str(reference), reference, registry, Path())
    place, index = registry.at(reference.repository), str(found.digest)
    platforms = {platform: str(found.image(platform).digest) for platform in sorted(found.platforms)}
    asked = {*required, *([SIGNATURE] if trust else [])}
    findings = []
    for name, digest in {**({} if index in platforms.values() else {INDEX: index}), **platforms}.items():
        members = platforms if name == INDEX else {name: digest}
        judged = list(_judge_attached(place, digest, members, index, trust))
        if trust:
            problem = trust.image_problem(reference.at(digest))
            signed = problem or "by the named key or identity"
            judged.append((SIGNATURE, "failed" if problem else "passed", signed, None))
        none = f"the registry lists none{' that is signed' if trust else ''}"
        counted = {kind for kind, outcome, *_ in judged if outcome != "skipped"}
        absent = [kind for kind in PREDICATES if kind not in counted and name != INDEX]
        judged += [(kind, "missing" if kind in asked else "skipped", none, None) for kind in absent]
        findings += [
            AttestFinding(
                subject=name, digest=digest, kind=kind, outcome=outcome, detail=detail, attachment=attachment,
                required=kind in asked and outcome != "skipped",
            )
            for kind, outcome, detail, attachment in judged
        ]  # fmt: skip
    return AttestResult(image=str(reference), digest=index, findings=tuple(findings))


def _judge_attached(
    place: Repository, digest: str, members: Mapping[str, str], index: str, trust: Signer | None
) -> Iterator[tuple[str, Outcome, str, str | None]]:
    """Yield the kind, outcome, detail and digest of each attachment of a manifest.

    `members` maps platforms to digests: all images of an index, or only the image itself. An attachment may be about
    any of them.
    """
    manifest = place.manifest(digest).content
    believed: list[tuple[Attestation, BaseModel]] = []
    for attestation, value, problem in read_attached(place, digest):
        # Everybody who may push can attach files, so an attachment without a trusted signature does not count.
        unsigned = trust.attestation_problem(attestation, manifest) if trust and attestation.content else ""
        if unsigned:
            yield attestation.kind, "skipped", f"not trusted: {unsigned}", attestation.digest
            continue
        if problem:
            yield attestation.kind, "broken", problem, attestation.digest
        elif value:
            believed.append((attestation, value))

    newest: dict[tuple[str, str], str] = {}
    for scan in (value for _, value in believed if isinstance(value, ScanResult)):
        newest[_scanned(scan)] = max(scan.started, newest.get(_scanned(scan), ""))
    for attestation, value in believed:
        verdicts = [judge_predicate(value, member, platform, index) for platform, member in members.items()]
        outcome, detail = next((verdict for verdict in verdicts if verdict[0] != "broken"), verdicts[0])
        if isinstance(value, ScanResult) and outcome != "broken" and value.started < newest[_scanned(value)]:
            outcome, detail = "skipped", f"{detail}; only the newest scan counts"
        yield attestation.kind, outcome, detail, attestation.digest


def _scanned(scan: ScanResult) -> tuple[str, str]:
    """Return the scanner without its version, and the image. Only the newest scan for such a pair counts."""
    return scan.scanner.partition(" ")[0], scan.digest


def judge_predicate(value: BaseModel, digest: str, platform: str, index: str) -> tuple[Outcome, str]:
    """Judge whether a predicate is about the image of a platform and reports success. Anybody may have written it.

    `index` is the digest of the index that lists the image. If there is no index: the digest of the image.
    """
    if other := mismatch(value, digest, platform, (index,)):
        return "broken", other
    failure, summary = "", ""
    match value:
        case SpdxDocument():
            summary = f"{len(value.contents)} packages and components"
        case Provenance():
            summary = f"{value.sources}, {len(value.replaced)} of them instead of sources in the lock"
            if value.folders:
                failure = f"built from local folders, whose content is unknown: {', '.join(value.folders)}"
        case VerifyResult():
            outcomes = Counter(check.outcome for check in value.checks)
            summary = f"{outcomes['passed']} checks passed, {outcomes['skipped']} skipped"
            failed = [check.name for check in value.checks if check.outcome == "failed"]
            failure = f"failed: {', '.join(failed)}" if failed else "" if outcomes["passed"] else "nothing passed"
        case Report():
            count = len(value.entries) + len(value.diagnostics)
            summary, failure = f"{count} results", "" if count else "nothing was measured"
        case ScanResult():
            summary = f"{value.scanner}, {len(value.findings)} findings, {value.started[:10]}"
            failure = value.reason or "the policy does not allow it" if value.verdict == "failed" else ""
    return ("failed", f"{failure}; {summary}") if failure else ("passed", summary)


# Add


def add_attachment(
    reference: ImageReference, registry: Registry, kind: str, content: bytes, *, file: Path,
    platform: str | None = None, signer: Signer | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Attach a file to the images that the file is about, and to the index if `reference` names one.

    Return the digests of the new attachments. With a signer, they are signed. Raises ConfigError if the image is not
    named by digest or the content is about another image. Raises ResultError if the content is of another kind.
    """
    place, found = registry.at(reference.repository), image_in_registry(str(reference), reference, registry, Path())
    index = str(found.digest)
    if not reference.digest:
        raise ConfigError(f"{reference}: a tag may move; name the image by its digest, which is {index} now")
    value, document = read_written(PREDICATES[kind], content, str(file)), json.loads(content)
    # A file that names neither an image nor a platform is about the platform that the user named.
    names = found.platforms if platform is None and any(about(value)) else (platform,)
    wanted: list[tuple[Descriptor, list[NewAttachment]]] = []
    problem = ""
    for image in map(found.image, names):
        if other := mismatch(value, image.digest, image.platform, (index,)):
            problem = f"{file}: is not a {kind} of {image.digest}: {other}"
            continue
        new = attachment_of(value, document, image.digest, image.platform)
        manifests = map(place.manifest, dict.fromkeys((image.digest, index)))
        wanted += [(manifest.descriptor, [new]) for manifest in manifests]
    if not wanted:
        raise ConfigError(problem)
    missing = missing_attachments(place, wanted, signer)
    return tuple(attach(place, subject, new, signer) for subject, new in missing)


def missing_attachments(
    place: Repository, wanted: Iterable[tuple[Descriptor, Sequence[NewAttachment]]], signer: Signer | None
) -> list[tuple[Descriptor, NewAttachment]]:
    """Return the wanted attachments that the images do not have yet.

    With a signer, only attachments with its signature count, because everybody who may push can attach files.
    """

    def identity(kind: str, content: str) -> tuple[str, str]:
        # A rebuild of the same image needs no second provenance, which would differ only in the time.
        return kind, "" if kind == "provenance" else content

    missing: list[tuple[Descriptor, NewAttachment]] = []
    for subject, attachments in wanted:
        listed = [
            (identity(kind_of(item), item.annotations.get(PREDICATE_DIGEST, "")), item)
            for item in list_attestations(place, subject.digest)
        ]
        present = Counter(same for same, _ in listed)
        if signer and listed:
            manifest = place.manifest(subject.digest).content
            # Only attachments with the wanted content are verified, because an image gets another scan every week.
            asked = {identity(new.kind, digest_of(new.content)) for new in attachments}
            read = [read_attestation(place, item, subject.digest) for same, item in listed if same in asked]
            trusted = [item for item in read if not signer.attestation_problem(item, manifest)]
            present = Counter(identity(item.kind, digest_of(item.content)) for item in trusted)
        for new in attachments:
            same = identity(new.kind, digest_of(new.content))
            present[same] -= 1
            if present[same] < 0:
                missing.append((subject, new))
    return missing


def attach(place: Repository, subject: Descriptor, new: NewAttachment, signer: Signer | None = None) -> str:
    """Attach a predicate to an image, and return the digest of the attachment. A signer signs it first.

    Raises CommandError if the registry or the signer fails.
    """
    name = place.name.rpartition("/")[2]
    bundle = b""
    if signer:
        bundle = signer.attest(new.kind, new.content, name, place.manifest(subject.digest).content)
    attachment = attestation_of(new.kind, new.content, subject, name, created=new.created, bundle=bundle)
    return place.attach(subject, attachment)
