"""The attachments of an image in a registry, such as SBOMs: `attest verify` judges them, and `attest add` adds new
ones."""

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
from imagebuild.oci import attestation
from imagebuild.oci.image import image_in_registry
from imagebuild.oci.layout import Descriptor, digest_of
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Registry, Repository
from imagebuild.project.records import ScanResult
from imagebuild.publish import evidence
from imagebuild.publish.provenance import Provenance
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.publish.signatures import SIGNER_OPTIONS, Signer
from imagebuild.report.document import Report
from imagebuild.verify.checks import IMAGE

INDEX, TAG = "index", "tag"


Outcome = Literal["passed", "failed", "broken", "missing", "skipped"]
"""The outcome of judging one attachment.

`passed`: the attachment is intact and reports success. `failed`: the attachment is intact, but reports a failure, or
the signature of the image is not trusted. `broken`: the attachment is damaged or about another image. `missing`: the
image has no attachment of a required kind. `skipped`: the attachment does not count, because it has no trusted
signature, its time is in the future, a newer scan exists, its checks may have run in another image, or the kind is
neither attached nor required."""


class AttestFinding(Model):
    """The outcome for one attachment of an image, or for a kind of attachment that the image does not have."""

    subject: str
    """Platform of the image that the attachment belongs to. `index` if the attachment belongs to the index of all
    platforms."""
    digest: str
    """Digest of the manifest of the image or index that the attachment belongs to."""
    kind: str
    """Kind of the attachment: `sbom`, `provenance`, `verification`, `benchmark`, `scan` or `signature`. `tag`: whether
    the index states the tag that the user named."""
    outcome: Outcome
    detail: str
    attachment: str | None = None
    """Digest of the attachment's own manifest. None if the attachment is missing or is a signature."""
    required: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the image must not be trusted because of this outcome.
        True if the outcome is `broken`, or if the kind is required and the outcome is not `passed`."""
        return self.outcome == "broken" or (self.required and self.outcome != "passed")


class AttestResult(Model):
    """The file that `imagebuild attest verify --json` writes."""

    image: str
    """The name of the image on the command line."""
    digest: str
    """Digest of the index. If the image has no index: digest of the manifest."""
    findings: tuple[AttestFinding, ...]
    verified_by: str | None = None
    """The key or identity whose signatures count. None: signatures were not checked."""

    @property
    def verdict(self) -> Literal["passed", "failed"]:
        return "failed" if any(finding.is_wrong for finding in self.findings) else "passed"


def verify_attachments(
    reference: ImageReference, registry: Registry, required: Collection[str] | None = None, trust: Signer | None = None,
    scan_days: int = evidence.MAX_SCAN_DAYS,
) -> AttestResult:  # fmt: skip
    """Judge every attachment of an image, and return the outcomes. A required kind that is missing is an outcome, too.

    What `publish` required of the image, and states in the index, is also required. If `required` is None, the other
    required kinds are those that `publish` always attaches, or DEFAULT_KINDS if the index does not state this.
    `scan_days` is the maximum age of a scan that passes. `trust` is the signer whose signatures are trusted. If `trust`
    is None, signatures are not checked, so a forged attachment is not detected. A tag is resolved to a digest only
    once, so all outcomes are about the same image.
    Raises ConfigError if the image does not exist or `required` is not valid, CommandError if the registry fails, and
    ResultError if `reference` does not name an image."""
    known = (*evidence.PREDICATES, attestation.SIGNATURE)
    if unknown := [kind for kind in required or () if kind not in known]:
        raise ConfigError(f"--require {unknown[0]}: unknown kind; use one of {', '.join(known)}")
    if attestation.SIGNATURE in (required or ()) and not trust:
        raise ConfigError(f"--require signature: the signer is not named; add {SIGNER_OPTIONS}")
    found = image_in_registry(str(reference), reference, registry, Path())
    place, index = registry.at(reference.repository), str(found.digest)
    platforms = {platform: str(found.image(platform).digest) for platform in sorted(found.platforms)}
    top = place.manifest(index)
    published = evidence.publication_of(top)
    stated = published or evidence.Publication(names=())
    if required is None:
        required = attestation.PUBLISHED_KINDS if published else attestation.DEFAULT_KINDS
    asked = {*required, *stated.attachments, *([attestation.SIGNATURE, TAG] if trust else [])}
    findings = []
    for name, digest in {**({} if index in platforms.values() else {INDEX: index}), **platforms}.items():
        members = platforms if name == INDEX else {name: digest}
        needed = stated.checks.get(name, ())
        judged = list(_judge_attached(place, digest, members, index, trust, scan_days=scan_days, needed=needed))
        if digest == index and not reference.digest:
            moved = evidence.tag_problem(reference, top)
            outcome: Outcome = "passed" if not moved else "failed" if trust else "skipped"
            judged.append((TAG, outcome, moved or "the index states this tag", None))
        if trust:
            problem = trust.image_problem(reference.at(digest))
            signed = problem or "signed by the named key or identity"
            judged.append((attestation.SIGNATURE, "failed" if problem else "passed", signed, None))
        none = f"the registry contains no attachment of this kind{' with a trusted signature' if trust else ''}"
        counted = {kind for kind, outcome, *_ in judged if outcome != "skipped"}
        absent = [kind for kind in evidence.PREDICATES if kind not in counted and name != INDEX]
        judged += [(kind, "missing" if kind in asked else "skipped", none, None) for kind in absent]
        findings += [
            AttestFinding(
                subject=name, digest=digest, kind=kind, outcome=outcome, detail=detail, attachment=attachment,
                required=kind in asked and outcome != "skipped",
            )
            for kind, outcome, detail, attachment in judged
        ]  # fmt: skip
    signer = trust.name if trust else None
    return AttestResult(image=str(reference), digest=index, findings=tuple(findings), verified_by=signer)


def _judge_attached(
    place: Repository, digest: str, members: Mapping[str, str], index: str, trust: Signer | None, *,
    scan_days: int, needed: Iterable[str],
) -> Iterator[tuple[str, Outcome, str, str | None]]:  # fmt: skip
    """Yield the kind, outcome, detail and digest of each attachment of a manifest.

    `digest` is the digest of the manifest. `members` maps platforms to the digests of the images that an attachment may
    be about: all images if the manifest is an index, otherwise only the image itself. `needed` are the checks that
    verifications must have passed."""
    # Only the verdicts are kept, because the attachments together may be larger than the memory.
    judged: list[tuple[str, Outcome, str, str]] = []
    newest: dict[tuple[str, str], str] = {}
    scans: dict[str, tuple[tuple[str, str], str]] = {}
    lacking = dict.fromkeys(needed)
    for attached in evidence.read_attached(place, digest, trust):
        item, value = attached.item, attached.value
        if value:
            verdicts = [judge_predicate(value, m, platform, index, scan_days) for platform, m in members.items()]
            judged.append((item.kind, *next((v for v in verdicts if v[0] != "broken"), verdicts[0]), item.digest))
            if isinstance(value, ScanResult):
                scanned = (value.scanner.partition(" ")[0], value.digest)  # without the version of the scanner
                newest[scanned] = max(value.started, newest.get(scanned, ""))
                scans[item.digest] = scanned, value.started
            if isinstance(value, VerifyResult) and judged[-1][1] != "broken":
                # A rule about the image's files that was skipped does not apply to the image.
                rules = [check for check in value.checks if check.component == IMAGE and check.outcome == "skipped"]
                for check in (*evidence.passes(value), *rules):
                    lacking.pop(check.name, None)
        elif attached.distrust and item.kind in evidence.PREDICATES:
            reasons = filter(None, (attached.distrust, attached.problem))
            yield item.kind, "skipped", f"not trusted: {'; '.join(reasons)}", item.digest
        elif attached.problem:
            yield item.kind, "broken", attached.problem, item.digest

    if lacking:
        why = f"the published image had to pass these checks, but no verification shows it: {', '.join(lacking)}"
        yield "verification", "failed", why, None
    for kind, outcome, detail, attachment in judged:
        scanned, started = scans.get(attachment, (("", ""), ""))
        if outcome != "broken" and started < newest.get(scanned, ""):
            yield kind, "skipped", f"{detail}; this scan does not count, because a newer scan exists", attachment
        else:
            yield kind, outcome, detail, attachment


def judge_predicate(
    value: BaseModel, digest: str, platform: str, index: str, scan_days: int = evidence.MAX_SCAN_DAYS
) -> tuple[Outcome, str]:
    """Return the outcome for a predicate (the content of an attestation), and the details as text.

    The outcome is `broken` if the predicate is not about the image of the platform, `failed` if the predicate reports a
    failure, `skipped` if its checks may have run in another image, otherwise `passed`. Anybody may have written the
    predicate. `index` is the digest of the index that lists the image. If there is no index, `index` is the digest of
    the image."""
    if other := evidence.mismatch(value, digest, platform, (index,)):
        return "broken", other
    failure, summary = "", ""
    match value:
        case SpdxDocument():
            summary = f"{len(value.contents)} packages and components"
            failure = "" if value.contents else "no package is listed"
        case Provenance():
            others = f"{len(value.replaced)} of them not from the lock" if value.replaced else "all from the lock"
            summary = f"{value.sources}, {others}"
            if value.folders:
                failure = f"built from local folders, whose content is unknown: {', '.join(value.folders)}"
        case VerifyResult():
            outcomes = Counter(check.outcome for check in value.checks)
            summary = f"{outcomes['passed']} checks passed, {outcomes['skipped']} skipped"
            failed = [check.name for check in value.checks if check.outcome == "failed"]
            failure = f"failed: {', '.join(failed)}" if failed else "" if outcomes["passed"] else "nothing passed"
            if not failure and not evidence.passes(value):
                return "skipped", f"does not count: {evidence.unproven(value)}; {summary}"
        case Report():
            count = len(value.entries) + len(value.diagnostics)
            summary, failure = f"{count} results", "" if count else "nothing was measured"
        case ScanResult():
            summary = f"{value.scanner}, {len(value.findings)} findings, {value.started[:10]}"
            failure = evidence.scan_problem(value, scan_days)
    return ("failed", f"{failure}; {summary}") if failure else ("passed", summary)


def add_attachment(
    reference: ImageReference, registry: Registry, kind: str, content: bytes, *, file: Path,
    platform: str | None = None, signer: Signer | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Attach a file to each image that the file is about, and return the digests of the new attachments.

    If `reference` names an index, the file is also attached to the index. If `signer` is set, the signer signs the
    attachments. Raises ConfigError if `reference` is not a digest or the file is about another image. Raises
    ResultError if the content of the file is not of the kind `kind`."""
    place, found = registry.at(reference.repository), image_in_registry(str(reference), reference, registry, Path())
    index = str(found.digest)
    if not reference.digest:
        remedy = f"name the image by its digest, which is {index} now"
        raise ConfigError(f"{reference}: is a tag, and a tag may move; {remedy}")
    value, document = read_written(evidence.PREDICATES[kind], content, str(file)), json.loads(content)
    # A file that names neither an image nor a platform is about the platform that the user named.
    names = found.platforms if platform is None and any(evidence.about(value)) else (platform,)
    wanted: list[tuple[Descriptor, list[evidence.NewAttachment]]] = []
    problem = ""
    for image in map(found.image, names):
        if other := evidence.mismatch(value, image.digest, image.platform, (index,)):
            problem = f"{file}: cannot be attached to {image.digest}: the file {other}"
            continue
        new = evidence.attachment_of(value, document, image.digest, image.platform)
        manifests = map(place.manifest, dict.fromkeys((image.digest, index)))
        wanted += [(manifest.descriptor, [new]) for manifest in manifests]
    if not wanted:
        raise ConfigError(problem)
    missing = missing_attachments(place, wanted, signer)
    return tuple(attach(place, subject, new, signer) for subject, new in missing)


def missing_attachments(
    place: Repository, wanted: Iterable[tuple[Descriptor, Sequence[evidence.NewAttachment]]], signer: Signer | None
) -> list[tuple[Descriptor, evidence.NewAttachment]]:
    """Return the wanted attachments that do not exist yet, each with the image or index that lacks the attachment.

    If `signer` is set, an attachment counts as existing only if this signer signed the attachment, because everybody
    who may push can attach files."""

    def identity(kind: str, content: str) -> tuple[str, str]:
        # If the same image is built again, a second provenance is not needed: only the times would differ.
        return kind, "" if kind == "provenance" else content

    missing: list[tuple[Descriptor, evidence.NewAttachment]] = []
    for subject, attachments in wanted:
        listed = [
            (identity(attestation.kind_of(item), item.annotations.get(attestation.PREDICATE_DIGEST, "")), item)
            for item in attestation.list_attestations(place, subject.digest)
        ]
        present = Counter(same for same, _ in listed)
        if signer and listed:
            manifest = place.manifest(subject.digest).content
            # Signatures are verified only for attachments with the wanted content. An image gets a new scan every week,
            # so verifying all attachments would take longer and longer.
            asked = {identity(new.kind, digest_of(new.content)) for new in attachments}
            read = [attestation.read_attestation(place, item, subject.digest) for same, item in listed if same in asked]
            trusted = [item for item in read if not signer.attestation_problem(item, manifest)]
            present = Counter(identity(item.kind, digest_of(item.content)) for item in trusted)
        for new in attachments:
            same = identity(new.kind, digest_of(new.content))
            present[same] -= 1
            if present[same] < 0:
                missing.append((subject, new))
    return missing


def attach(place: Repository, subject: Descriptor, new: evidence.NewAttachment, signer: Signer | None = None) -> str:
    """Attach a predicate (the content of an attestation) to an image or index. Return the digest of the attachment.

    If `signer` is set, the signer signs the predicate first. Raises CommandError if the registry or the signer fails.
    """
    name = place.name.rpartition("/")[2]
    bundle = b""
    if signer:
        bundle = signer.attest(new.kind, new.content, name, place.manifest(subject.digest).content)
    attachment = attestation.attestation_of(new.kind, new.content, subject, name, created=new.created, bundle=bundle)
    return place.attach(subject, attachment)
