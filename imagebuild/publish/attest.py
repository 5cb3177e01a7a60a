"""Sign and verify the attachments of an image with cosign; show one, and add one."""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

from pydantic import BaseModel

from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, ResultError, suggestion
from imagebuild.core.fields import Model
from imagebuild.core.http import Downloads
from imagebuild.core.run import INSTALL_COSIGN, for_each, run_program, which
from imagebuild.core.settings import ca_bundle
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import (
    KINDS,
    SIGNATURE,
    Attestation,
    attestation_of,
    kind_of,
    list_attestations,
    read_attestations,
)
from imagebuild.oci.image import image_in_registry
from imagebuild.oci.layout import Descriptor
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, Repository, is_plain
from imagebuild.project.records import Catalog, ScanResult, VerifyResult
from imagebuild.publish.evidence import PREDICATES, attachment_of, read_predicate
from imagebuild.publish.provenance import Provenance
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.report.document import Report

JOBS = 4
"""Images whose signatures are verified at a time."""
INDEX = "index"
DEFAULT_KINDS = ("sbom", "provenance", "verification")
"""Kinds of attachments that `attest verify` requires by default."""


# Signatures


PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - a variable's name
NO_SERVICES = '{"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"}'
"""What cosign signs with where nothing goes to a transparency log."""
NO_ROOTS = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'
"""What cosign trusts besides a key; without it, cosign fetches the roots of the public log, which needs a network."""


PUBLIC_KEY = "COSIGN_PUBLIC_KEY"
REMEDIES = (
    ("decryption failed", f"; {PASSWORD} is not the password of this key"),
    (
        "rekor|fulcio|tuf|oauth2|sigstore.dev",
        "; the public log cannot be used from here: --key with --no-tlog needs none",
    ),
    ("unauthorized|denied", "; log in to the registry with `docker login`"),
)
"""Pattern of what cosign says → what to do."""


@dataclass(frozen=True)
class Cosign:
    """Call cosign, version 2.5 or newer, with the variables of `environ` that begin with COSIGN_."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[..., str] = run_program
    program: str | None = None
    """None: search for it."""

    def __call__(self, *arguments: str | Path) -> str:
        """Return what the program prints. Raises CommandError if it is missing or fails."""
        program = self.program or which("cosign")
        if not program:
            raise CommandError(
                f"`cosign` is missing, which signs images and verifies signatures; install it: {INSTALL_COSIGN}"
            )
        environ = {name: value for name, value in self.environ.items() if name.startswith("COSIGN_")}
        try:
            return self.run(program, *map(str, arguments), env=environ)
        except CommandError as error:
            # Before the last line come terms of use, and the same error once more.
            last = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
            text = last.removeprefix("Error: ").removeprefix("error during command execution: ")
            remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, text, re.IGNORECASE)), "")
            raise CommandError(f"{text}{remedy}") from None

    @cached_property
    def is_before_3(self) -> bool:
        """Return whether it writes bundles only when told to. Distributions leave out the version's number."""
        return "--new-bundle-format" in self("attest-blob", "--help")

    def connection(self, image: ImageReference) -> list[str]:
        """Return the arguments for the registry of an image."""
        return ["--allow-http-registry"] if is_plain(image.host, self.environ) else []


_TRIAL = Lock()
"""Keeps threads from signing the trial at the same time."""


@dataclass(frozen=True)
class Signer:
    """Sign images and attestations."""

    key: str | None = None
    """File, or the address of a key in a form that cosign knows; None signs without a key, as the identity of CI."""
    log: bool = True
    """Whether to write the signature to a public transparency log."""
    cosign: Cosign = field(default_factory=Cosign)
    identity: str | None = None
    issuer: str | None = None
    """Who signs without a key, and who vouches for that."""

    @cached_property
    def trust(self) -> Trust:
        """Return who is to be trusted: the public half of the key, or the identity.

        Raises ConfigError if the identity is not known, CommandError if the key cannot be read.
        """
        if not self.key:
            if not (self.identity and self.issuer):
                raise ConfigError(
                    "--sign: no signer is named; give --key FILE, or --certificate-identity and "
                    "--certificate-oidc-issuer; in a job of GitHub they are known"
                )
            return Trust(None, self.identity, self.issuer, self.log, self.cosign)
        public = self.cosign("public-key", "--key", self.key)
        cosign = replace(self.cosign, environ={**self.cosign.environ, PUBLIC_KEY: public})
        return Trust(f"env://{PUBLIC_KEY}", log=self.log, cosign=cosign)

    @cached_property
    def fault(self) -> str:
        """Return why a trial signature fails or is not trusted; empty if it is. It is tried once.

        The trial uses key, password, identity and log, so the log gets one more entry.
        """
        with _TRIAL:
            try:
                trial = Attestation("scan", "", bundle=self.attest("scan", b"{}", "trial", b"{}"))
                return self.trust.attestation_problem(trial, b"{}") or ""
            except ImagebuildError as error:
                return str(error)

    def check(self) -> None:
        """Raise CommandError if cosign is missing, ConfigError if the key has no password or does not exist."""
        self.cosign("version")
        if self.key is None:
            return
        is_file = "://" not in self.key
        if is_file and not Path(self.key).is_file():
            raise ConfigError(f"--key {self.key}: no such file; `cosign generate-key-pair` makes one")
        # Only a key outside of key management services has a password.
        if (is_file or self.key.startswith("env://")) and PASSWORD not in self.cosign.environ:
            raise ConfigError(f"--key {self.key}: set {PASSWORD} to the key's password, which may be empty")

    def sign(self, images: Iterable[ImageReference]) -> None:
        """Sign images. Raises ConfigError for one that is not named by its digest, CommandError if cosign fails."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            arguments = self._arguments(Path(folder))
            for image in images:
                self.cosign("sign", *arguments, *self.cosign.connection(image), _by_digest(image))

    def attest(self, kind: str, content: bytes, name: str, manifest: bytes) -> bytes:
        """Return the signed statement that the image with this manifest has this predicate, as a sigstore bundle.

        Raises CommandError if cosign fails.
        """
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            subject, predicate, bundle = (Path(folder, file) for file in (name, "predicate.json", "bundle.json"))
            subject.write_bytes(manifest)
            predicate.write_bytes(content)
            new_format = ["--new-bundle-format"] if self.cosign.is_before_3 else []
            what = ("--type", KINDS[kind], "--predicate", predicate, "--bundle", bundle)
            self.cosign("attest-blob", *self._arguments(Path(folder)), *new_format, *what, subject)
            return bundle.read_bytes()

    def _arguments(self, folder: Path) -> list[str]:
        key = ["--key", self.key] if self.key else []
        if self.log:
            return ["--yes", *key]
        if self.cosign.is_before_3:
            return ["--yes", *key, "--tlog-upload=false"]
        config = folder / "signing-config"
        config.write_text(NO_SERVICES)
        return ["--yes", *key, "--signing-config", str(config)]


GITHUB_ISSUER = "https://token.actions.githubusercontent.com"
"""Who vouches for the identity of a job of GitHub."""


def job_workflow(environ: Mapping[str, str]) -> str:
    """Return the workflow file that a job of GitHub is in, with its revision; empty elsewhere.

    In a workflow that others call, variables name the caller, and only the job's token says whose job it is. Fulcio
    certifies that (`job_workflow_ref`). Raises CommandError if GitHub gives no token.
    """
    if not (address := environ.get("ACTIONS_ID_TOKEN_REQUEST_URL")):
        return environ.get("GITHUB_WORKFLOW_REF", "")
    header = {"Authorization": f"bearer {environ.get('ACTIONS_ID_TOKEN_REQUEST_TOKEN', '')}"}
    web = Downloads(ca=ca_bundle(None, environ), headers=header)
    try:
        claims = json.loads(web.read(f"{address}&audience=sigstore"))["value"].split(".")[1]
        return str(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["job_workflow_ref"])
    except (CommandError, LookupError, TypeError, ValueError) as error:
        raise CommandError(f"GitHub does not say who signs: {type(error).__name__}: {error}") from None


def signer_of(
    key: str | None, *, sign: bool, log: bool, identity: str | None = None, issuer: str | None = None
) -> Signer | None:
    """Return who signs by the options of a command, None without --sign; a job of GitHub knows its identity.

    Raises ConfigError or CommandError if that could not sign anything.
    """
    if not sign:
        if key or identity or issuer or not log:
            raise ConfigError("--key, --certificate-identity and --no-tlog: need --sign")
        return None
    if not key and not identity and (workflow := job_workflow(os.environ)):
        identity, issuer = f"{os.environ['GITHUB_SERVER_URL']}/{workflow}", GITHUB_ISSUER
    signer = Signer(key, log, identity=identity, issuer=issuer)
    signer.check()
    return signer


@dataclass(frozen=True)
class Trust:
    """Say whose signature is trusted: either a key's, or that of an identity that an issuer vouches for."""

    key: str | None = None
    identity: str | None = None
    issuer: str | None = None
    log: bool = True
    """Whether the signature has to be in the transparency log."""
    cosign: Cosign = field(default_factory=Cosign)

    @property
    def name(self) -> str:
        """Return the identity, the address of the key, or the name of its file."""
        key = self.key or ""
        return self.identity or (key if "://" in key else Path(key).name)

    def check(self) -> None:
        """Raise ConfigError unless exactly one signer is named and its key exists; CommandError without cosign."""
        if bool(self.key) == bool(self.identity):
            raise ConfigError("whose signature? give --key FILE, or --certificate-identity with its issuer")
        if self.key and "://" not in self.key and not Path(self.key).is_file():
            raise ConfigError(f"--key {self.key}: no such file")
        if self.identity and not self.issuer:
            raise ConfigError("--certificate-identity: needs --certificate-oidc-issuer, or anybody could vouch for it")
        if self.identity and not self.log:
            raise ConfigError(
                "--no-tlog: needs --key; a certificate is valid for minutes, and only the log says when it was used"
            )
        self.cosign("version")

    def image_problem(self, image: ImageReference) -> str | None:
        """Return why an image, named by digest, has no trusted signature, in cosign's words; None if it has one."""
        return self._problem("verify", *self.cosign.connection(image), "--output", "json", _by_digest(image))

    def attestation_problem(self, attestation: Attestation, manifest: bytes) -> str | None:
        """Return why an attestation of the image with this manifest has no trusted signature; None if it has one."""
        if not attestation.bundle:
            return "nobody signed it"
        # cosign 2 does not compare the type with the bundle's; that was done when the attestation was read.
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            subject, bundle, roots = (Path(folder, name) for name in ("manifest.json", "bundle.json", "roots.json"))
            subject.write_bytes(manifest)
            bundle.write_bytes(attestation.bundle)
            roots.write_text(NO_ROOTS)
            new_format = ["--new-bundle-format"] if self.cosign.is_before_3 else []
            offline = () if self.log else ("--trusted-root", roots)
            what = ("--type", KINDS[attestation.kind], "--bundle", bundle, subject)
            return self._problem("verify-blob-attestation", *new_format, *offline, *what)

    def _problem(self, command: str, *arguments: str | Path) -> str | None:
        if self.key:
            signer = ["--key", self.key]
        else:
            signer = ["--certificate-identity", str(self.identity), "--certificate-oidc-issuer", str(self.issuer)]
        log = [] if self.log else ["--insecure-ignore-tlog=true"]
        try:
            self.cosign(command, *signer, *log, *arguments)
        except CommandError as error:
            return str(error)
        return None


def trust_of(key: str | None, identity: str | None, issuer: str | None, *, log: bool) -> Trust | None:
    """Return who is trusted by the options of a command, None if they name nobody."""
    return Trust(key, identity, issuer, log) if key or identity or issuer else None


def _by_digest(image: ImageReference) -> str:
    """Return the name of an image without its tag, which may move meanwhile. Raises ConfigError without a digest."""
    if not image.digest:
        raise ConfigError(f"{image}: only an image named by digest can be signed or verified; write NAME@DIGEST")
    return f"{image.name}@{image.digest}"


# Verify


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
class AttestRequest:
    """Say which attachments an image must have, and who must have signed them."""

    required: Sequence[str] = DEFAULT_KINDS
    trust: Trust | None = None
    """None: ask for no signature, so that nothing but damage and mix-ups is found."""

    def check(self) -> None:
        """Raise ConfigError for an unknown kind, and for required signatures without saying whose."""
        known = (*PREDICATES, SIGNATURE)
        for kind in self.required:
            if kind not in known:
                raise ConfigError(
                    f"--require {kind}: unknown kind{suggestion(kind, list(known))}; one of {', '.join(known)}"
                )
        if self.trust:
            self.trust.check()
        elif SIGNATURE in self.required:
            raise ConfigError("--require signature: whose? give --key FILE, or --certificate-identity with its issuer")


def verify_attachments(reference: ImageReference, registry: Registry, request: AttestRequest) -> AttestResult:
    """Judge every attachment of an image, and name those that are required and missing.

    A tag is looked up once; everything after that is about its digest. Raises ConfigError if there is no such image,
    CommandError if the registry fails, and ResultError if it has something else by this name.
    """
    request.check()
    found = image_in_registry(str(reference), reference, registry, Path())
    place, digest = registry.at(reference.repository), str(found.digest)
    platforms = {platform: str(found.image(platform).digest) for platform in sorted(found.platforms)}
    findings: list[AttestFinding] = []
    for name, manifest in {**({} if digest in platforms.values() else {INDEX: digest}), **platforms}.items():
        members = platforms if name == INDEX else {name: manifest}
        subjects = [ManifestSubject(member, platform, digest) for platform, member in members.items()]
        findings += _verify_manifest(place, name, manifest, subjects, request)
        if request.trust:
            problem = request.trust.image_problem(reference.at(manifest))
            findings.append(
                AttestFinding(
                    subject=name, digest=manifest, kind=SIGNATURE, outcome="failed" if problem else "passed",
                    detail=problem or "by the key or identity that was named", required=True,
                )
            )  # fmt: skip
    return AttestResult(image=str(reference), digest=digest, findings=tuple(findings))


def _verify_manifest(
    place: Repository, name: str, digest: str, subjects: Sequence[ManifestSubject], request: AttestRequest
) -> Iterator[AttestFinding]:
    """Judge the attachments of a manifest: a platform's image, or an index, whose attachments are about its images."""
    manifest = place.manifest(digest).content
    trusted = set()
    for attestation in read_attestations(place, digest):
        kind, required = attestation.kind, attestation.kind in request.required
        if kind not in PREDICATES and not attestation.problem:
            continue
        # Whoever may push can attach, so an attachment without a trusted signature does not count.
        unsigned = None
        if request.trust and not attestation.problem:
            unsigned = request.trust.attestation_problem(attestation, manifest)
        if unsigned:
            verdict, required = Verdict("skipped", f"not believed: {unsigned}"), False
        else:
            trusted.add(kind)
            try:
                predicate = read_predicate(attestation)
                verdicts = [judge_predicate(predicate, subject) for subject in subjects]
                verdict = next((verdict for verdict in verdicts if verdict.outcome != "broken"), verdicts[0])
            except ResultError as error:
                verdict = Verdict("broken", attestation.problem or str(error))
        yield AttestFinding(
            subject=name, digest=digest, kind=kind, outcome=verdict.outcome,
            detail=verdict.detail, attachment=attestation.digest, required=required,
        )  # fmt: skip
    for kind in (k for k in PREDICATES if k not in trusted and name != INDEX):
        required = kind in request.required
        yield AttestFinding(
            subject=name, digest=digest, kind=kind, required=required,
            outcome="missing" if required else "skipped",
            detail="the registry lists none" + (" that is signed" if request.trust else ""),
        )  # fmt: skip


def show_attachment(reference: ImageReference, registry: Registry, kind: str, platform: str | None) -> bytes:
    """Return the predicate of the newest attachment of a kind.

    Raises ConfigError if there is none that is undamaged, and if the image has several platforms and none is named.
    """
    image = image_in_registry(str(reference), reference, registry, Path()).image(platform)
    digest, place = image.digest, registry.at(reference.repository)
    of_kind = read_attestations(place, digest, kind)
    if not of_kind:
        kinds = ", ".join(sorted({kind_of(item) for item in list_attestations(place, digest)}))
        raise ConfigError(f"{reference}: {digest} has no {kind}; it has {kinds or 'nothing attached'}")
    whole = [attachment for attachment in of_kind if not attachment.problem]
    if not whole:
        raise ConfigError(f"{reference}: its {kind} {of_kind[0].digest} cannot be trusted: {of_kind[0].problem}")
    return whole[0].content


def add_attachment(
    reference: ImageReference, registry: Registry, kind: str, content: bytes, *, file: Path,
    platform: str | None = None, signer: Signer | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Attach the content of a file to the images that it is about, and to their index, if that is what was named.

    Return the digests of the attachments; a signer signs them. Unsigned, the same content again changes nothing.
    Raises ConfigError if the image is not named by digest, and for content about another image; ResultError for
    content of another kind.
    """
    place, found = registry.at(reference.repository), image_in_registry(str(reference), reference, registry, Path())
    index = str(found.digest)
    if not reference.digest:
        raise ConfigError(f"{reference}: name the image by digest: the tag may have moved; now it names {index}")
    value, document = read_written(PREDICATES[kind], content, str(file)), json.loads(content)
    added, problem = [], ""
    # A report does not say which platform it is of.
    names = [platform] if platform or kind == "benchmark" else sorted(found.platforms)
    for image in map(found.image, names):
        digest = str(image.digest)
        verdict = judge_predicate(value, ManifestSubject(digest, image.platform, index))
        if verdict.outcome == "broken":
            problem = f"{file}: is no {kind} of {digest}: {verdict.detail}"
            continue
        attached = attachment_of(value, document, digest, image.platform)
        subjects = [manifest.descriptor for manifest in map(place.manifest, dict.fromkeys((digest, index)))]
        added += [
            attach(place, subject, kind, attached.content, created=attached.created, signer=signer)
            for subject in subjects
        ]
    if not added:
        raise ConfigError(problem)
    return tuple(added)


def attach(
    place: Repository, subject: Descriptor, kind: str, content: bytes, *, created: str = "",
    signer: Signer | None = None,
) -> str:  # fmt: skip
    """Attach a predicate to an image, signed if there is a signer, and return the digest of the attachment.

    Raises CommandError if the registry fails or nothing can be signed.
    """
    name = place.name.rpartition("/")[2]
    bundle = signer.attest(kind, content, name, place.manifest(subject.digest).content) if signer else b""
    attachment = attestation_of(kind, content, subject, name, created=created, bundle=bundle)
    return place.attach(subject, attachment)


def with_signers(catalog: Catalog, trust: Trust) -> Catalog:
    """Return a catalogue that says which images have the signature of who is trusted.

    A signature that is not theirs is one of its problems. Raises ConfigError if the signer is not fully named,
    CommandError without cosign.
    """
    trust.check()

    names = [parse_reference(image.reference) for image in catalog.images]
    problems = for_each(trust.image_problem, names, jobs=JOBS)
    judged = list(zip(catalog.images, problems, strict=True))
    wrong = [
        f"{i.reference}: its signature is not that of {trust.name}: {why}" for i, why in judged if i.signed and why
    ]
    images = tuple(image.model_copy(update={"verified_by": "" if why else trust.name}) for image, why in judged)
    return catalog.model_copy(update={"images": images, "problems": (*catalog.problems, *wrong)})


# What an attachment says


MOST_NAMES = 3
"""Names that a message lists."""
LONG_HASH = re.compile(r"([0-9a-f]{12})[0-9a-f]{20,}")
"""A digest or commit; messages show its first 12 digits."""


@dataclass(frozen=True)
class ManifestSubject:
    """Identify the manifest that an attachment has to be about."""

    digest: str
    platform: str
    index: str
    """Digest of the index that names the manifest, or its own."""


class Verdict(NamedTuple):
    """Say whether an attachment speaks for the image."""

    outcome: Outcome
    detail: str


def judge_predicate(predicate: BaseModel | None, subject: ManifestSubject) -> Verdict:
    """Judge whether a predicate is about the image, and what it says. Anybody may have written it."""
    named, known, failure, summary = set[str](), {subject.digest}, "", ""
    platforms = {subject.platform}
    match predicate:
        case SpdxDocument():
            # A document may describe other images, too.
            named = {subject.digest} if subject.digest in predicate.digests else set(predicate.digests) or {"none"}
            summary = f"{len(predicate.contents)} packages and components"
        case Provenance():
            platforms, summary = {predicate.platform or subject.platform}, predicate.sources
            if folders := predicate.folders:
                failure = f"built from folders that nobody can compare: {_listed(folders)}; "
            elif instead := [uri.partition("?")[0] for uri in predicate.replaced]:
                summary += f", of which {len(instead)} stood in for others ({_listed(instead)})"
        case VerifyResult():
            named, known = {predicate.digest or "none"}, {subject.digest, subject.index}
            platforms = {platform.strip() for platform in predicate.platform.split(",")}
            outcomes = Counter(check.outcome for check in predicate.checks)
            summary = f"{outcomes['passed']} checks passed, {outcomes['skipped']} skipped"
            if failed := [f"{c.component}/{c.check}" for c in predicate.checks if c.outcome == "failed"]:
                failure = f"failed: {_listed(failed)}; "
            elif not outcomes["passed"]:
                failure = "nothing passed: "
        case Report():
            named = {v.digest for v in predicate.verifications if v.digest}
            known = {subject.digest, subject.index}
            count = len(predicate.entries) + len(predicate.diagnostics)
            summary = f"{count} results" if count else ""
        case ScanResult():
            named, summary = {predicate.digest}, f"{predicate.scanner}, {len(predicate.findings)} findings"
            summary += f", {predicate.started[:10]}"
            if predicate.verdict == "failed":
                failure = f"{predicate.reason or 'the policy does not allow it'}; "
    if named - known:
        return Verdict("broken", f"is about another image: {_listed(sorted(named - known))}")
    if subject.platform not in platforms:
        return Verdict("broken", f"is about {', '.join(sorted(platforms))}")
    if not summary:
        return Verdict("broken", "has no result")
    return Verdict("failed" if failure else "passed", failure + summary)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (", ".join(LONG_HASH.sub(r"\1…", name) for name in names[:MOST_NAMES]) or "none") + more
