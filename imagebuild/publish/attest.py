"""Verify the attachments of an image in a registry, show one of them, and add to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from imagebuild.bench.models import Results
from imagebuild.core.errors import CommandError, ConfigError, ResultError, suggestion
from imagebuild.core.fields import Model, Platform
from imagebuild.oci.layout import KINDS, AttachmentFile, Descriptor, Manifest, digest_of, manifests_of
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Registry, TryAgain
from imagebuild.project.records import ScanResult, VerifyResult
from imagebuild.publish import provenance, sbom
from imagebuild.publish.evidence import CREATED
from imagebuild.render.recipe import Recipe
from imagebuild.report.document import Report

SIGNATURE = "signature"
INDEX = "index"
DEFAULT_KINDS = ("sbom", "provenance", "verification")
"""Kinds of attachments that `attest verify` requires by default."""

Outcome = Literal["passed", "failed", "broken", "missing", "skipped"]
"""`failed`: it is genuine, and says that something is wrong. `broken`: it is damaged, or about something else."""


class AttestFinding(Model):
    """Say whether one attachment of an image is right, or that one is missing."""

    subject: str
    """A platform, or `index`."""
    digest: str
    """Digest of the manifest that the attachment refers to."""
    kind: str
    """`sbom`, `provenance`, `verification`, `benchmark`, `scan` or `signature`."""
    outcome: Outcome
    detail: str
    attachment: str | None = None
    """Digest of the attachment's own manifest."""
    required: bool = False

    @property
    def is_wrong(self) -> bool:
        """Return whether the image must not be trusted: damage always counts, the rest where it was required."""
        return self.outcome == "broken" or (self.required and self.outcome != "passed")


class AttestResult(Model):
    """Hold the content of the file that `imagebuild attest verify --json` writes."""

    image: str
    """Name of the image, as the user gave it."""
    digest: str
    """Digest of the index or, for an image without one, of the manifest."""
    findings: tuple[AttestFinding, ...]

    @property
    def verdict(self) -> Literal["passed", "failed"]:
        """Return `failed` if any finding is wrong."""
        return "failed" if any(finding.is_wrong for finding in self.findings) else "passed"


@dataclass(frozen=True)
class Checkout:
    """Give the sources that a provenance is compared with: those of a checkout of the project."""

    recipe: Callable[[str], Recipe | None] | None = None
    """Return the recipe of a target, None if the checkout has no such target."""
    why_not: str = "no project is here"
    """The reason why `recipe` is None."""

    def sources(self, target: str, platform: str) -> frozenset[tuple[str, str]]:
        """Return URI and digest of each source of a target. Raises ConfigError if the checkout cannot tell them."""
        if self.recipe is None:
            raise ConfigError(self.why_not)
        recipe = self.recipe(target)
        if recipe is None:
            raise ConfigError(f"this checkout has no target {target}")
        if platform not in recipe.target.platforms:
            raise ConfigError(f"{target} of this checkout is not for {platform}")
        known: Platform = "linux/arm64" if platform == "linux/arm64" else "linux/amd64"
        return provenance.expected_dependencies(recipe, recipe.project.lock, known)


@dataclass(frozen=True)
class AttestRequest:
    """Say which attachments an image must have, and who must have signed them."""

    required: Sequence[str] = DEFAULT_KINDS
    signed: Callable[[ImageReference], str | None] | None = None
    """Return why an image, named by digest, has no trusted signature; None if it has. None: do not ask for one."""
    checkout: Checkout = field(default_factory=Checkout)

    def check(self) -> None:
        """Raise ConfigError for an unknown kind, and for required signatures without saying whose."""
        known = (*KINDS, SIGNATURE)
        for kind in self.required:
            if kind not in known:
                raise ConfigError(
                    f"--require {kind}: unknown kind{suggestion(kind, list(known))}; one of {', '.join(known)}"
                )
        if SIGNATURE in self.required and self.signed is None:
            raise ConfigError("--require signature: whose? give --key FILE, or --certificate-identity with its issuer")


def verify_attachments(reference: ImageReference, registry: Registry, request: AttestRequest) -> AttestResult:
    """Judge every attachment of an image, and name those that are required and missing.

    A tag is looked up once; everything after that is about its digest. Raises ConfigError if there is no such image,
    CommandError if the registry fails, and ResultError if it has something else by this name.
    """
    request.check()
    image = find_image(reference, registry)
    subjects = [(platform, child.digest) for platform, child in sorted(image.platforms.items())]
    if image.top.digest not in {digest for _, digest in subjects}:
        subjects.insert(0, (INDEX, image.top.digest))
    findings: list[AttestFinding] = []
    for name, digest in subjects:
        if name != INDEX:
            findings += _verify_platform(image, name, digest, request)
        if request.signed:
            problem = request.signed(reference.at(digest))
            findings.append(
                AttestFinding(
                    subject=name, digest=digest, kind=SIGNATURE, outcome="failed" if problem else "passed",
                    detail=problem or "by the key or identity that was named", required=True,
                )
            )  # fmt: skip
    return AttestResult(image=str(reference), digest=image.top.digest, findings=tuple(findings))


def _verify_platform(
    image: AttestedImage, platform: str, digest: str, request: AttestRequest
) -> Iterator[AttestFinding]:
    listed = attachments(image, digest)
    subject = ManifestSubject(digest, platform, image.top.digest)
    if image.registry.manifest(image.repository, digest) is None:
        yield AttestFinding(
            subject=platform, digest=digest, kind="image", outcome="broken", required=True,
            detail="the index names it, but the registry does not have it",
        )  # fmt: skip
    trusted = set()
    for attachment in (a for a in listed if a.kind in KINDS or a.problem):
        unsigned = None
        if request.signed and not attachment.problem:
            unsigned = request.signed(image.reference(attachment.digest))
        # Whoever may push can attach, so an attachment without a trusted signature does not count.
        if unsigned is not None:
            outcome, detail, required = "skipped", f"not believed: {unsigned}", False
        else:
            trusted.add(attachment.kind)
            required = attachment.kind in request.required
            if attachment.problem:
                outcome, detail = "broken", attachment.problem
            else:
                verdict = judge_attachment(attachment.kind, attachment.content, subject, request.checkout)
                outcome, detail = verdict.outcome, verdict.detail
        yield AttestFinding(
            subject=platform, digest=digest, kind=attachment.kind, outcome=outcome, detail=detail,
            attachment=attachment.digest, required=required,
        )  # fmt: skip
    for kind in (k for k in KINDS if k not in trusted):
        required = kind in request.required
        yield AttestFinding(
            subject=platform, digest=digest, kind=kind, required=required, outcome="missing" if required else "skipped",
            detail="the registry lists none" + (" that is signed" if request.signed else ""),
        )  # fmt: skip


def show_attachment(reference: ImageReference, registry: Registry, kind: str, platform: str | None) -> bytes:
    """Return the newest attachment of a kind.

    Raises ConfigError if there is none that is undamaged, and if the image has several platforms and none is named.
    """
    image = find_image(reference, registry)
    digest = image.platforms[_choose_platform(image, reference, platform)].digest
    listed = attachments(image, digest)
    of_kind = [attachment for attachment in listed if attachment.kind == kind]
    if not of_kind:
        kinds = ", ".join(sorted({attachment.kind for attachment in listed}))
        raise ConfigError(f"{reference}: {digest} has no {kind}; it has {kinds or 'nothing attached'}")
    whole = [attachment for attachment in of_kind if not attachment.problem]
    if not whole:
        raise ConfigError(f"{reference}: its {kind} {of_kind[0].digest} cannot be trusted: {of_kind[0].problem}")
    return max(whole, key=lambda a: (a.annotations.get(CREATED, ""), a.digest)).content


def add_attachment(
    reference: ImageReference, registry: Registry, kind: str, file: AttachmentFile, platform: str | None
) -> str:
    """Attach a file to an image and return the digest of the attachment. The same file again changes nothing.

    Raises ConfigError if the image is not named by digest, and for a file of another kind or about another image.
    """
    if not reference.digest:
        raise ConfigError(f"{reference}: name the image by digest: a tag may have moved since the file was made")
    image = find_image(reference, registry)
    chosen = _choose_platform(image, reference, platform)
    subject = image.platforms[chosen]
    verdict = judge_attachment(
        kind, file.content, ManifestSubject(subject.digest, chosen, image.top.digest), Checkout()
    )
    if verdict.outcome == "broken":
        raise ConfigError(f"{file.name}: is no {kind} of {subject.digest}: {verdict.detail}")
    files = (AttachmentFile(KINDS[kind].file, KINDS[kind].media_type, file.content),)
    return registry.attach(image.repository, subject, KINDS[kind].artifact_type, files, {})


def _choose_platform(image: AttestedImage, reference: ImageReference, platform: str | None) -> str:
    present = ", ".join(image.platforms)
    if platform is None and len(image.platforms) > 1:
        raise ConfigError(f"{reference}: is for {present}; choose with --platform")
    chosen = platform or next(iter(image.platforms))
    if chosen not in image.platforms:
        raise ConfigError(f"{reference}: is not for {chosen}, but for {present}")
    return chosen


# The image and its attachments in the registry


MOST_BYTES = 64 << 20
"""Largest size that is read; a registry could claim any size, and our attachments are far smaller."""
ATTEMPTS = 3
"""Times that an attachment is read before it counts as damaged: it may have been damaged on the way."""
_KIND_BY_TYPE = {kind.artifact_type: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Attachment:
    """Hold what a registry lists as referring to a manifest."""

    kind: str
    """Name in `KINDS`; for another artifact type, the type."""
    digest: str
    content: bytes = b""
    annotations: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why it is not what the registry says; empty if it is."""


@dataclass(frozen=True)
class AttestedImage:
    """Name an image of a registry and its platforms."""

    registry: Registry
    repository: str
    top: Manifest
    """The index or, for an image without one, the manifest."""
    platforms: Mapping[str, Descriptor]
    """Platform → manifest."""

    def reference(self, digest: str) -> ImageReference:
        """Return the name of a manifest in the image's repository."""
        return ImageReference(self.registry.host, self.repository, digest=digest)


def find_image(reference: ImageReference, registry: Registry) -> AttestedImage:
    """Return the image that a reference names now.

    Raises ConfigError if there is none, and ResultError if it is something other than an image.
    """
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{reference}: {reference.host} has no such image")
    try:
        children = manifests_of(top.document)
        if not children:
            if "config" not in top.document:
                raise ResultError(f"{reference}: neither an image nor an index of images")
            config = json.loads(registry.blob(reference.repository, top.document["config"]["digest"]))
            platform = f"{config.get('os', 'unknown')}/{config.get('architecture', 'unknown')}"
            descriptor = Descriptor(top.media_type, top.digest, len(top.content))
            return AttestedImage(registry, reference.repository, top, {platform: descriptor})
        runnable = {c.platform: c for c in children if c.platform and not c.platform.startswith("unknown")}
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{reference}: cannot be read as an image: {type(error).__name__}: {error}") from None
    if not runnable:
        raise ResultError(f"{reference}: an index without images")
    return AttestedImage(registry, reference.repository, top, runnable)


def attachments(image: AttestedImage, digest: str) -> tuple[Attachment, ...]:
    """Read everything that the registry lists as referring to a manifest. Raises CommandError if it cannot list it."""
    listed = image.registry.referrers(image.repository, digest)
    return tuple(_read_attachment(image, digest, item) for item in sorted(listed, key=lambda item: item.digest))


def _read_attachment(image: AttestedImage, subject: str, item: Descriptor) -> Attachment:
    listed_kind = _KIND_BY_TYPE.get(item.artifact_type or "", item.artifact_type or "unknown")
    try:
        manifest = image.registry.manifest(image.repository, item.digest)
    except CommandError as error:
        return Attachment(listed_kind, item.digest, problem=str(error))
    if manifest is None:
        return Attachment(listed_kind, item.digest, problem="is listed, but the registry does not have it")
    try:
        document = manifest.document
        named = (document.get("subject") or {}).get("digest")
        artifact_type = str(document.get("artifactType") or (document.get("config") or {}).get("mediaType"))
        layer = Descriptor.from_json(document["layers"][0])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return Attachment(listed_kind, item.digest, problem=f"is no attachment: {type(error).__name__}: {error}")
    kind = _KIND_BY_TYPE.get(artifact_type, artifact_type)
    if named != subject:
        return Attachment(kind, item.digest, problem=f"refers to another image: {named}")
    if kind not in KINDS:
        return Attachment(kind, item.digest)
    content, problem = _read_layer(image, layer)
    return Attachment(kind, item.digest, content, document.get("annotations") or {}, problem)


def _read_layer(image: AttestedImage, layer: Descriptor) -> tuple[bytes, str]:
    """Return the bytes of a file, or the reason why they cannot be had or are not those of the manifest."""
    if layer.size > MOST_BYTES:
        return b"", f"claims to have {layer.size} bytes; at most {MOST_BYTES} are read"
    problem = ""
    for _ in range(ATTEMPTS):
        content = b""
        try:
            for piece in image.registry.open_blob(image.repository, layer.digest):
                content += piece
                if len(content) > layer.size:
                    break  # enough to see that it is not the file
        except TryAgain as error:
            problem = str(error)
        except CommandError as error:
            return b"", str(error)
        else:
            if digest_of(content) == layer.digest:
                return content, ""
            problem = f"was changed: what the registry sends is not {layer.digest}"
    return b"", problem


# What an attachment says


MOST_NAMES = 3
"""Names that a message lists."""
LONG_HASH = re.compile(r"([0-9a-f]{12})[0-9a-f]{20,}")
"""A digest or commit; messages show its first 12 digits."""


@dataclass(frozen=True)
class ManifestSubject:
    """Name the manifest that an attachment has to be about."""

    digest: str
    platform: str
    index: str
    """Digest of the index that names the manifest, or its own."""


@dataclass(frozen=True)
class AttachmentVerdict:
    """Say whether an attachment speaks for the image."""

    outcome: Literal["passed", "failed", "broken"]
    detail: str


def judge_attachment(kind: str, content: bytes, subject: ManifestSubject, checkout: Checkout) -> AttachmentVerdict:
    """Judge whether an attachment is about the image, and what it says. Anybody may have written the content."""
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            return AttachmentVerdict("broken", "is not a JSON object")
        if kind == "provenance":
            return _judge_provenance(document, subject, checkout)
        return _JUDGES[kind](document, subject)
    except ValidationError as error:
        first = error.errors()[0]
        return AttachmentVerdict("broken", f"cannot be read: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except RecursionError:
        return AttachmentVerdict("broken", "cannot be read: it is nested too deeply")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return AttachmentVerdict("broken", f"cannot be read: {type(error).__name__}: {error}")


def _judge_sbom(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    if not str(document["spdxVersion"]).startswith("SPDX-2"):
        return AttachmentVerdict("broken", f"is {document['spdxVersion']}, not SPDX 2")
    digests = sbom.image_digests(document)
    if subject.digest not in digests:
        return AttachmentVerdict("broken", f"is about another image: {_listed(sorted(digests))}")
    return AttachmentVerdict("passed", f"{len(document['packages']) - 1} packages and components")


def _judge_verification(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    result = VerifyResult.model_validate(document)
    if result.digest not in (subject.digest, subject.index):
        return AttachmentVerdict("broken", f"is about another image: {result.digest}")
    if subject.platform not in {platform.strip() for platform in result.platform.split(",")}:
        return AttachmentVerdict("broken", f"is about {result.platform}")
    outcomes = [check.outcome for check in result.checks]
    passed, skipped = outcomes.count("passed"), outcomes.count("skipped")
    counts = f"{passed} checks passed, {skipped} skipped"
    if failed := [f"{c.component}/{c.check}" for c in result.checks if c.outcome == "failed"]:
        return AttachmentVerdict("failed", f"failed: {_listed(failed)}; {counts}")
    return AttachmentVerdict("passed" if passed else "failed", counts)


def _judge_scan(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    result = ScanResult.model_validate(document)
    if result.digest != subject.digest:
        return AttachmentVerdict("broken", f"is about another image: {result.digest}")
    summary = f"{result.scanner}, {len(result.findings)} findings, {result.started[:10]}"
    if result.verdict == "failed":
        return AttachmentVerdict("failed", f"{result.reason or 'the policy does not allow it'}; {summary}")
    return AttachmentVerdict("passed", summary)


def _judge_benchmark(document: Mapping[str, Any], subject: ManifestSubject) -> AttachmentVerdict:
    if "about" not in document:
        results: Results = Results.model_validate(document)
    else:
        results = report = Report.model_validate(document)
        others = {v.digest for v in report.verifications if v.digest} - {subject.digest, subject.index}
        if others:
            return AttachmentVerdict("broken", f"is about another image too: {_listed(sorted(others))}")
    parts = (results.runs, results.tests, results.tables, results.ucx, results.diagnostics)
    count = sum(map(len, parts))
    return AttachmentVerdict("passed", f"{count} results") if count else AttachmentVerdict("broken", "has no result")


_JUDGES: Mapping[str, Callable[[Mapping[str, Any], ManifestSubject], AttachmentVerdict]] = {
    "sbom": _judge_sbom,
    "verification": _judge_verification,
    "scan": _judge_scan,
    "benchmark": _judge_benchmark,
}


def _judge_provenance(document: Mapping[str, Any], subject: ManifestSubject, checkout: Checkout) -> AttachmentVerdict:
    if mismatch := _statement_mismatch(document, subject):
        return AttachmentVerdict("broken", mismatch)
    definition = document["predicate"]["buildDefinition"]
    stated = provenance.statement_dependencies(document)
    replaced = provenance.replaced_dependencies(document)
    summary = f"{len(stated) + len(replaced)} sources, {_commit(definition)}"
    if unpinned := provenance.unpinned_dependencies(document):
        return AttachmentVerdict("failed", f"built from folders that nobody can compare: {_listed(unpinned)}")
    if replaced:
        listed = _listed([uri.partition("?")[0] for uri in replaced])
        summary += f", of which {len(replaced)} stood in for others ({listed})"
    try:
        if definition["buildType"] != provenance.BUILD_TYPE:
            raise ConfigError("it was not built by imagebuild")
        expected = checkout.sources(str(definition["externalParameters"]["target"]), subject.platform)
    except ConfigError as error:
        return AttachmentVerdict("passed", f"{summary}; not compared: {str(error).splitlines()[0]}")
    # The lock has the original of a replaced source, the statement its replacement: neither is a difference.
    absent = {(uri, digest) for uri, digest in expected - stated if uri not in replaced}
    if differing := sorted({uri.partition("?")[0] for uri, _ in absent | (stated - expected)}):
        problem = f"sources are not those of this checkout's lock: {_listed(differing)}"
        return AttachmentVerdict("failed", f"{problem}; {summary}")
    return AttachmentVerdict("passed", f"{summary}, as in this checkout's lock")


def _statement_mismatch(document: Mapping[str, Any], subject: ManifestSubject) -> str:
    """Return why a statement is not the provenance of this image; empty if it is."""
    types = document["_type"], document["predicateType"]
    if types != (provenance.STATEMENT, provenance.PREDICATE):
        return f"is {' with '.join(map(str, types))}, not SLSA's provenance v1"
    subjects = [str(item["digest"].get("sha256")) for item in document["subject"]]
    if subjects != [subject.digest.removeprefix("sha256:")]:
        return f"is about another image: {_listed(subjects)}"
    definition = document["predicate"]["buildDefinition"]
    platform = definition["externalParameters"].get("platform", subject.platform)
    return "" if platform == subject.platform else f"is about {platform}"


def _commit(definition: Mapping[str, Any]) -> str:
    for item in definition["resolvedDependencies"]:
        if item.get("name") == "project":
            changed = " and files that differ from it" if item.get("annotations") else ""
            return f"commit {str(item['digest']['gitCommit'])[:12]}{changed}"
    return "an unknown commit"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (", ".join(LONG_HASH.sub(r"\1…", name) for name in names[:MOST_NAMES]) or "none") + more
