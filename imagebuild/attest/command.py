"""`imagebuild attest`: verify what refers to an image, show it, and add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from imagebuild.attachments import KINDS
from imagebuild.attest import reading
from imagebuild.attest.judge import Checkout, Subject, judge
from imagebuild.attest.models import AttestResult, Finding
from imagebuild.attest.reading import Attachment, Image
from imagebuild.config import suggestion
from imagebuild.errors import ConfigError
from imagebuild.registry.base import File, Registry
from imagebuild.registry.reference import Reference

SIGNATURE = "signature"
INDEX = "index"
DEFAULT = ("sbom", "provenance", "verification")
CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True)
class Wish:
    """What has to be there."""

    required: Sequence[str] = DEFAULT
    signed: Callable[[Reference], str | None] | None = None
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


def verify(reference: Reference, registry: Registry, wish: Wish) -> AttestResult:
    """What is said about an image, and whether it is. A tag is looked up once: all that follows is about its digest.

    Raises ConfigError if there is no such image, CommandError if the registry fails, ResultError for what is no image.
    """
    wish.check()
    image = reading.find(reference, registry)
    findings: list[Finding] = []
    tops = [] if image.top.digest in {d.digest for d in image.platforms.values()} else [(INDEX, image.top.digest)]
    for name, digest in (*tops, *((platform, d.digest) for platform, d in sorted(image.platforms.items()))):
        if name != INDEX:
            findings += _platform(image, name, digest, wish)
        if wish.signed:
            why = wish.signed(reference.at(digest))
            detail = why or "by the key or identity that was named"
            findings.append(
                Finding(
                    subject=name, digest=digest, kind=SIGNATURE, outcome="failed" if why else "passed", detail=detail,
                    required=True,
                )
            )  # fmt: skip
    return AttestResult(image=str(reference), digest=image.top.digest, findings=tuple(findings))


def _platform(image: Image, platform: str, digest: str, wish: Wish) -> Iterator[Finding]:
    found = reading.attachments(image, digest)
    subject = Subject(digest, platform, image.top.digest)
    if image.registry.manifest(image.repository, digest) is None:
        yield Finding(
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
            yield Finding(
                subject=platform, digest=digest, kind=attachment.kind, outcome="skipped", required=False,
                detail=f"not believed: {why}", attachment=attachment.digest,
            )  # fmt: skip
    for kind in (k for k in KINDS if k not in believed):
        required = kind in wish.required
        yield Finding(
            subject=platform, digest=digest, kind=kind, required=required, outcome="missing" if required else "skipped",
            detail="the registry lists none" + (" that is signed" if wish.signed else ""),
        )  # fmt: skip


def _finding(attachment: Attachment, subject: Subject, wish: Wish) -> Finding:
    if attachment.problem:
        outcome, detail = "broken", attachment.problem
    else:
        verdict = judge(attachment.kind, attachment.content, subject, wish.checkout)
        outcome, detail = verdict.outcome, verdict.detail
    return Finding(
        subject=subject.platform, digest=subject.digest, kind=attachment.kind, outcome=outcome, detail=detail,
        attachment=attachment.digest, required=attachment.kind in wish.required,
    )  # fmt: skip


def show(reference: Reference, registry: Registry, kind: str, platform: str | None) -> bytes:
    """The file of a kind that refers to an image; of several, the one that was made last.

    Raises ConfigError if there is none or several platforms could be meant.
    """
    image = reading.find(reference, registry)
    digest = _chosen(image, reference, platform)
    found = [a for a in reading.attachments(image, digest) if a.kind == kind]
    if not found:
        has = sorted({a.kind for a in reading.attachments(image, digest)})
        raise ConfigError(f"{reference}: {digest} has no {kind}; it has {', '.join(has) or 'nothing attached'}")
    whole = [a for a in found if not a.problem]
    if not whole:
        raise ConfigError(f"{reference}: its {kind} {found[0].digest} cannot be trusted: {found[0].problem}")
    return max(whole, key=lambda a: (a.annotations.get(CREATED, ""), a.digest)).content


def add(reference: Reference, registry: Registry, kind: str, file: File, platform: str | None) -> str:
    """Attach a file to an image that is there; its digest. The same file again changes nothing.

    Raises ConfigError for an image that is not named by digest, or a file that is not of the kind or not about it.
    """
    if not reference.digest:
        raise ConfigError(f"{reference}: name the image by digest: a tag may have moved since the file was made")
    image = reading.find(reference, registry)
    digest = _chosen(image, reference, platform)
    named = next(name for name, d in image.platforms.items() if d.digest == digest)
    verdict = judge(kind, file.content, Subject(digest, named, image.top.digest), Checkout())
    if verdict.outcome == "broken":
        raise ConfigError(f"{file.name}: is no {kind} of {digest}: {verdict.detail}")
    about = KINDS[kind]
    attached = File(about.file, about.media_type, file.content)
    return registry.attach(image.repository, image.platforms[named], about.artifact_type, (attached,), {})


def _chosen(image: Image, reference: Reference, platform: str | None) -> str:
    has = ", ".join(image.platforms)
    if platform is None and len(image.platforms) > 1:
        raise ConfigError(f"{reference}: is for {has}; choose with --platform")
    chosen = platform or next(iter(image.platforms))
    if chosen not in image.platforms:
        raise ConfigError(f"{reference}: is not for {chosen}, but for {has}")
    return image.platforms[chosen].digest
