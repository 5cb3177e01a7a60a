"""Verify what refers to an image in a registry, show it, and add to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from imagebuild.bench.models import Results
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Model, Platform
from imagebuild.core.yaml import suggestion
from imagebuild.oci import registry
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import KINDS, AttachmentFile, BlobDescriptor, Manifest, Registry, TryAgain, manifests_of
from imagebuild.project.records import ScanResult, VerifyResult
from imagebuild.publish import provenance, sbom
from imagebuild.render.recipe import Recipe
from imagebuild.report.document import Report

Outcome = Literal["passed", "failed", "broken", "missing", "skipped"]
"""`failed`: it is genuine, and says that something is wrong. `broken`: it is damaged, or about something else."""


class AttestFinding(Model):
    """What is said about one thing that refers to an image, or should."""

    subject: str
    """A platform, or `index`."""
    digest: str
    """Of the manifest that it refers to."""
    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan` or `signature`."""
    outcome: Outcome
    detail: str
    attachment: str | None = None
    """Digest of the manifest that refers."""
    required: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the image must not be trusted for it: damage always counts, an absence where it was required."""
        return self.outcome == "broken" or (self.required and self.outcome != "passed")


class AttestResult(Model):
    """The file that `imagebuild attest verify --json` writes."""

    image: str
    """As it was named."""
    digest: str
    """Of the index, or the manifest."""
    findings: tuple[AttestFinding, ...]

    @property
    def verdict(self) -> Literal["passed", "failed"]:
        return "failed" if any(finding.is_wrong for finding in self.findings) else "passed"


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
class AttestedImage:
    """An image of a registry."""

    registry: Registry
    repository: str
    top: Manifest
    platforms: Mapping[str, BlobDescriptor]
    """Platform → its manifest; of a manifest that is in no index, its own."""

    def reference(self, digest: str) -> ImageReference:
        """The name of something in its repository."""
        return ImageReference(self.registry.host, self.repository, digest=digest)


def find(reference: ImageReference, registry: Registry) -> AttestedImage:
    """The image that a name means now. Raises ConfigError if there is none, ResultError for what is no image."""
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{reference}: {reference.host} has no such image")
    try:
        children = manifests_of(top.document)
        if not children and "config" not in top.document:
            raise ResultError(f"{reference}: is neither an image nor an index of images")
        if not children:
            own = BlobDescriptor(top.media_type, top.digest, len(top.content))
            return AttestedImage(registry, reference.repository, top, {_platform_of(registry, reference, top): own})
        runnable = {c.platform: c for c in children if c.platform and not c.platform.startswith("unknown")}
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{reference}: cannot be read as an image: {type(error).__name__}: {error}") from None
    if not runnable:
        raise ResultError(f"{reference}: an index without images")
    return AttestedImage(registry, reference.repository, top, runnable)


def attachments(image: AttestedImage, digest: str) -> tuple[Attachment, ...]:
    """All that the registry lists as referring to a manifest. Raises CommandError if it cannot list that."""
    listed = image.registry.referrers(image.repository, digest)
    return tuple(_read(image, digest, item) for item in sorted(listed, key=lambda item: item.digest))


def _read(image: AttestedImage, subject: str, item: BlobDescriptor) -> Attachment:
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
        layers = registry.read_descriptor(document["layers"][0])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return Attachment(listed_as, item.digest, problem=f"is no attachment: {type(error).__name__}: {error}")
    name = BY_TYPE.get(str(kind), str(kind))
    if named != subject:
        return Attachment(name, item.digest, problem=f"refers to another image: {named}")
    if name not in KINDS:
        return Attachment(name, item.digest)
    content, problem = _content(image, layers)
    return Attachment(name, item.digest, content, document.get("annotations") or {}, problem)


def _content(image: AttestedImage, layer: BlobDescriptor) -> tuple[bytes, str]:
    """The bytes of a file, or why they are not what the manifest says."""
    if layer.size > MOST_BYTES:
        return b"", f"is said to have {layer.size} bytes, which is too much to be true"
    why = ""
    for _ in range(ATTEMPTS):
        try:
            found = _at_most(image.registry.open_blob(image.repository, layer.digest), layer.size)
        except TryAgain as error:
            why = str(error)
        except CommandError as error:
            return b"", str(error)
        else:
            if registry.digest_of(found) == layer.digest:
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


def _platform_of(registry: Registry, reference: ImageReference, manifest: Manifest) -> str:
    config = json.loads(registry.blob(reference.repository, manifest.document["config"]["digest"]))
    return f"{config.get('os', 'unknown')}/{config.get('architecture', 'unknown')}"


SHOWN = 3
"""Differing sources that are named."""
LONG = re.compile(r"([0-9a-f]{12})[0-9a-f]{20,}")
"""Digests and commits; their beginning tells which."""


@dataclass(frozen=True)
class ManifestSubject:
    """The manifest that attachments have to be about."""

    digest: str
    platform: str
    index: str
    """Digest of the index that has it, or its own."""


@dataclass(frozen=True)
class AttachmentVerdict:
    """What an attachment says."""

    outcome: Literal["passed", "failed", "broken"]
    detail: str


@dataclass(frozen=True)
class Checkout:
    """What a provenance is compared with."""

    recipe: Callable[[str], Recipe | None] | None = None
    """The recipe of a target of this checkout; None if it has no such target."""
    why_not: str = "no project is here"
    """Why nothing is compared, if nothing is."""

    def sources(self, target: str, platform: str) -> frozenset[tuple[str, str]]:
        """What the lock has for a target. Raises ConfigError if that cannot be told."""
        if self.recipe is None:
            raise ConfigError(self.why_not)
        recipe = self.recipe(target)
        if recipe is None:
            raise ConfigError(f"this checkout has no target {target}")
        if platform not in recipe.target.platforms:
            raise ConfigError(f"{target} of this checkout is not for {platform}")
        known: Platform = "linux/arm64" if platform == "linux/arm64" else "linux/amd64"
        return provenance.expected_dependencies(recipe, recipe.project.lock, known)


def judge_attachment(kind: str, content: bytes, subject: ManifestSubject, checkout: Checkout) -> AttachmentVerdict:
    """Whether an attachment is about the image, and what it says. Anybody may have written it: nothing is believed."""
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            return AttachmentVerdict("broken", "is no JSON object")
        if kind == "provenance":
            return _provenance(document, subject, checkout)
        return JUDGES[kind](document, subject)
    except ValidationError as error:
        first = error.errors()[0]
        return AttachmentVerdict("broken", f"cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except RecursionError:
        return AttachmentVerdict("broken", "cannot be read: it is nested too deeply")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return AttachmentVerdict("broken", f"cannot be read: {type(error).__name__}: {error}")


def _sbom(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    if not str(document["spdxVersion"]).startswith("SPDX-2"):
        return AttachmentVerdict("broken", f"is {document['spdxVersion']}, not SPDX 2")
    named = sbom.digests(document)
    if subject.digest not in named:
        return AttachmentVerdict("broken", f"is about another image: {_listed(sorted(named))}")
    return AttachmentVerdict("passed", f"{len(document['packages']) - 1} packages and components")


def _verification(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    result = VerifyResult.model_validate(document)
    platforms = {p.strip() for p in result.platform.split(",")}
    if result.digest not in (subject.digest, subject.index):
        return AttachmentVerdict("broken", f"is about another image: {result.digest}")
    if subject.platform not in platforms:
        return AttachmentVerdict("broken", f"is about {result.platform}")
    outcomes = [check.outcome for check in result.checks]
    passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
    counts = f"{passed} checks passed, {skipped} skipped"
    if failed := [f"{c.component}/{c.check}" for c in result.checks if c.outcome == "failed"]:
        return AttachmentVerdict("failed", f"failed: {_listed(failed)}; {counts}")
    return AttachmentVerdict("passed" if passed else "failed", counts)


def _scan(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    result = ScanResult.model_validate(document)
    if result.digest != subject.digest:
        return AttachmentVerdict("broken", f"is about another image: {result.digest}")
    about = f"{result.scanner}, {len(result.findings)} findings, {result.started[:10]}"
    if result.verdict == "failed":
        return AttachmentVerdict("failed", f"{result.reason or 'the policy objects'}; {about}")
    return AttachmentVerdict("passed", about)


def _benchmark(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    if "about" not in document:
        found: Results = Results.model_validate(document)
    else:
        found = report = Report.model_validate(document)
        others = {v.digest for v in report.verifications if v.digest} - {subject.digest, subject.index}
        if others:
            return AttachmentVerdict("broken", f"is about another image too: {_listed(sorted(others))}")
    count = len(found.runs) + len(found.tests) + len(found.tables) + len(found.ucx) + len(found.diagnostics)
    return AttachmentVerdict("passed", f"{count} results") if count else AttachmentVerdict("broken", "has no result")


JUDGES: Mapping[str, Callable[[Mapping[str, Any], ManifestSubject], AttachmentVerdict]] = {
    "sbom": _sbom,
    "verification": _verification,
    "scan": _scan,
    "benchmark": _benchmark,
}


def _provenance(document: Mapping[str, Any], subject: ManifestSubject, checkout: Checkout) -> AttachmentVerdict:
    if misfit := _misfit(document, subject):
        return AttachmentVerdict("broken", misfit)
    definition = document["predicate"]["buildDefinition"]
    found, replaced = provenance.statement_dependencies(document), provenance.replaced_dependencies(document)
    about = f"{len(found) + len(replaced)} sources, {_revision(definition)}"
    if unpinned := provenance.unpinned_dependencies(document):
        return AttachmentVerdict("failed", f"built from folders that nobody can compare: {_listed(unpinned)}")
    if replaced:
        about += (
            f", of which {len(replaced)} stood in for others ({_listed([uri.partition('?')[0] for uri in replaced])})"
        )
    try:
        if definition["buildType"] != provenance.BUILD_TYPE:
            raise ConfigError("it was not built by imagebuild")
        wanted = checkout.sources(str(definition["externalParameters"]["target"]), subject.platform)
    except ConfigError as error:
        return AttachmentVerdict("passed", f"{about}; not compared: {str(error).splitlines()[0]}")
    # What stood in for something is not in the lock, and what it stood in for is not in the statement.
    absent = {(uri, digest) for uri, digest in wanted - found if uri not in replaced}
    if differing := sorted({uri.partition("?")[0] for uri, _ in absent | (found - wanted)}):
        return AttachmentVerdict(
            "failed", f"sources are not those of this checkout's lock: {_listed(differing)}; {about}"
        )
    return AttachmentVerdict("passed", f"{about}, as in this checkout's lock")


def _misfit(document: Mapping[str, Any], subject: ManifestSubject) -> str:
    """Why a statement is not how this image was made; empty if it is."""
    kind = document["_type"], document["predicateType"]
    if kind != (provenance.STATEMENT, provenance.PREDICATE):
        return f"is {' with '.join(map(str, kind))}, not SLSA's provenance v1"
    named = [str(item["digest"].get("sha256")) for item in document["subject"]]
    if named != [subject.digest.removeprefix("sha256:")]:
        return f"is about another image: {_listed(named)}"
    definition = document["predicate"]["buildDefinition"]
    platform = definition["externalParameters"].get("platform", subject.platform)
    return "" if platform == subject.platform else f"is about {platform}"


def _revision(definition: Mapping[str, Any]) -> str:
    for item in definition["resolvedDependencies"]:
        if item.get("name") == "project":
            changed = " and files that differ from it" if item.get("annotations") else ""
            return f"commit {str(item['digest']['gitCommit'])[:12]}{changed}"
    return "an unknown commit"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(LONG.sub(r"\1…", name) for name in names[:SHOWN]) or "none") + more


SIGNATURE = "signature"
INDEX = "index"
DEFAULT = ("sbom", "provenance", "verification")
CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True)
class AttestRequest:
    """What has to be there."""

    required: Sequence[str] = DEFAULT
    signed: Callable[[ImageReference], str | None] | None = None
    """Why an image, named by digest, has no signature that is trusted; None if it has."""
    checkout: Checkout = field(default_factory=Checkout)

    def check(self) -> None:
        """Raise ConfigError for a kind that does not exist, or a signature of nobody."""
        known = (*KINDS, SIGNATURE)
        for kind in self.required:
            if kind not in known:
                raise ConfigError(
                    f"--require {kind}: no such kind{suggestion(kind, list(known))}; one of {', '.join(known)}"
                )
        if SIGNATURE in self.required and self.signed is None:
            raise ConfigError("--require signature: whose? give --key FILE, or --certificate-identity with its issuer")


def verify_attachments(reference: ImageReference, registry: Registry, wish: AttestRequest) -> AttestResult:
    """What is said about an image, and whether it is. A tag is looked up once: all that follows is about its digest.

    Raises ConfigError if there is no such image, CommandError if the registry fails, ResultError for what is no image.
    """
    wish.check()
    image = find(reference, registry)
    findings: list[AttestFinding] = []
    tops = [] if image.top.digest in {d.digest for d in image.platforms.values()} else [(INDEX, image.top.digest)]
    for name, digest in (*tops, *((platform, d.digest) for platform, d in sorted(image.platforms.items()))):
        if name != INDEX:
            findings += _platform(image, name, digest, wish)
        if wish.signed:
            why = wish.signed(reference.at(digest))
            detail = why or "by the key or identity that was named"
            findings.append(
                AttestFinding(
                    subject=name, digest=digest, kind=SIGNATURE, outcome="failed" if why else "passed", detail=detail,
                    required=True,
                )
            )  # fmt: skip
    return AttestResult(image=str(reference), digest=image.top.digest, findings=tuple(findings))


def _platform(image: AttestedImage, platform: str, digest: str, wish: AttestRequest) -> Iterator[AttestFinding]:
    found = attachments(image, digest)
    subject = ManifestSubject(digest, platform, image.top.digest)
    if image.registry.manifest(image.repository, digest) is None:
        yield AttestFinding(
            subject=platform, digest=digest, kind="image", outcome="broken", required=True,
            detail="the index names it, but the registry does not have it",
        )  # fmt: skip
    believed = set()
    for attachment in (a for a in found if a.kind in KINDS or a.problem):
        why = wish.signed(image.reference(attachment.digest)) if wish.signed and not attachment.problem else None
        if why is None:
            believed.add(attachment.kind)
            yield _finding(attachment, subject, wish)
        else:
            # Whoever may push can attach, so what nobody who is trusted has signed counts for nothing.
            yield AttestFinding(
                subject=platform, digest=digest, kind=attachment.kind, outcome="skipped", required=False,
                detail=f"not believed: {why}", attachment=attachment.digest,
            )  # fmt: skip
    for kind in (k for k in KINDS if k not in believed):
        required = kind in wish.required
        yield AttestFinding(
            subject=platform, digest=digest, kind=kind, required=required, outcome="missing" if required else "skipped",
            detail="the registry lists none" + (" that is signed" if wish.signed else ""),
        )  # fmt: skip


def _finding(attachment: Attachment, subject: ManifestSubject, wish: AttestRequest) -> AttestFinding:
    if attachment.problem:
        outcome, detail = "broken", attachment.problem
    else:
        verdict = judge_attachment(attachment.kind, attachment.content, subject, wish.checkout)
        outcome, detail = verdict.outcome, verdict.detail
    return AttestFinding(
        subject=subject.platform, digest=subject.digest, kind=attachment.kind, outcome=outcome, detail=detail,
        attachment=attachment.digest, required=attachment.kind in wish.required,
    )  # fmt: skip


def show_attachment(reference: ImageReference, registry: Registry, kind: str, platform: str | None) -> bytes:
    """The file of a kind that refers to an image; of several, the one that was made last.

    Raises ConfigError if there is none or several platforms could be meant.
    """
    image = find(reference, registry)
    digest = _chosen(image, reference, platform)
    found = [a for a in attachments(image, digest) if a.kind == kind]
    if not found:
        has = sorted({a.kind for a in attachments(image, digest)})
        raise ConfigError(f"{reference}: {digest} has no {kind}; it has {', '.join(has) or 'nothing attached'}")
    whole = [a for a in found if not a.problem]
    if not whole:
        raise ConfigError(f"{reference}: its {kind} {found[0].digest} cannot be trusted: {found[0].problem}")
    return max(whole, key=lambda a: (a.annotations.get(CREATED, ""), a.digest)).content


def add_attachment(
    reference: ImageReference, registry: Registry, kind: str, file: AttachmentFile, platform: str | None
) -> str:
    """Attach a file to an image that is there; its digest. The same file again changes nothing.

    Raises ConfigError for an image that is not named by digest, or a file that is not of the kind or not about it.
    """
    if not reference.digest:
        raise ConfigError(f"{reference}: name the image by digest: a tag may have moved since the file was made")
    image = find(reference, registry)
    digest = _chosen(image, reference, platform)
    named = next(name for name, d in image.platforms.items() if d.digest == digest)
    verdict = judge_attachment(kind, file.content, ManifestSubject(digest, named, image.top.digest), Checkout())
    if verdict.outcome == "broken":
        raise ConfigError(f"{file.name}: is no {kind} of {digest}: {verdict.detail}")
    about = KINDS[kind]
    attached = AttachmentFile(about.file, about.media_type, file.content)
    return registry.attach(image.repository, image.platforms[named], about.artifact_type, (attached,), {})


def _chosen(image: AttestedImage, reference: ImageReference, platform: str | None) -> str:
    has = ", ".join(image.platforms)
    if platform is None and len(image.platforms) > 1:
        raise ConfigError(f"{reference}: is for {has}; choose with --platform")
    chosen = platform or next(iter(image.platforms))
    if chosen not in image.platforms:
        raise ConfigError(f"{reference}: is not for {chosen}, but for {has}")
    return image.platforms[chosen].digest
