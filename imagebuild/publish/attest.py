"""Sign and verify the attachments of an image with cosign; show one, and add one."""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Literal

from pydantic import BaseModel

from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, ResultError, suggestion
from imagebuild.core.fields import Model
from imagebuild.core.http import Downloads
from imagebuild.core.run import INSTALL_COSIGN, for_each, run_program, which
from imagebuild.core.settings import ca_bundle
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import (
    KINDS,
    PREDICATE_DIGEST,
    SIGNATURE,
    Attestation,
    attestation_of,
    kind_of,
    list_attestations,
    read_attestation,
    read_attestations,
)
from imagebuild.oci.image import image_in_registry
from imagebuild.oci.layout import Descriptor, digest_of
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, Repository, connect_registry
from imagebuild.project.records import Catalog, ScanResult, VerifyResult
from imagebuild.publish.evidence import (
    PREDICATES,
    NewAttachment,
    about,
    attachment_of,
    mismatch,
    read_predicate,
)
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
SERVICES = re.compile("rekor|fulcio|tuf|oauth2|sigstore.dev", re.IGNORECASE)
"""What cosign names where the services of the public log cannot be used."""


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
            remedy = "; the public log cannot be used from here: --key with --no-tlog needs none"
            raise CommandError(f"{text}{remedy if SERVICES.search(text) else ''}") from None

    @cached_property
    def is_before_3(self) -> bool:
        """Return whether it writes bundles only when told to. Distributions leave out the version's number."""
        return "--new-bundle-format" in self("attest-blob", "--help")

    def connection(self, image: ImageReference) -> list[str]:
        """Return the arguments for the registry of an image."""
        is_plain = connect_registry(image.host, environ=self.environ).login.plain
        return ["--allow-http-registry"] if is_plain else []


_TRIAL = Lock()
"""Keeps threads from signing the trial at the same time."""


@dataclass(frozen=True)
class Signer:
    """Name whose signatures are meant: those of a key, or of an identity that an issuer vouches for. Sign, and verify.

    With neither, cosign signs as the identity of CI, and nothing can be verified.
    """

    key: str | None = None
    """File, or the address of a key in a form that cosign knows: the private key where `signs`, else the public one."""
    identity: str | None = None
    issuer: str | None = None
    log: bool = True
    """Whether signatures are written to the public transparency log, and have to be in it."""
    cosign: Cosign = field(default_factory=Cosign)
    signs: bool = False

    @property
    def name(self) -> str:
        """Return the identity, the address of the key, or the name of its file."""
        key = self.key or ""
        return self.identity or (key if "://" in key else Path(key).name)

    def check(self) -> None:
        """Raise ConfigError if it is not clear who is meant or the key cannot be used, CommandError without cosign."""
        is_file = self.key is not None and "://" not in self.key
        if self.key and self.identity:
            raise ConfigError("whose signature? give --key FILE, or --certificate-identity with its issuer")
        if is_file and not Path(str(self.key)).is_file():
            hint = "; `cosign generate-key-pair` makes one" if self.signs else ""
            raise ConfigError(f"--key {self.key}: no such file{hint}")
        if bool(self.identity) != bool(self.issuer):
            raise ConfigError("--certificate-identity: needs --certificate-oidc-issuer, or anybody could vouch for it")
        if self.identity and not self.log:
            raise ConfigError(
                "--no-tlog: needs --key; a certificate is valid for minutes, and only the log says when it was used"
            )
        # Only a key outside of key management services has a password.
        if self.signs and (is_file or (self.key or "").startswith("env://")) and PASSWORD not in self.cosign.environ:
            raise ConfigError(f"--key {self.key}: set {PASSWORD} to the key's password, which may be empty")
        self.cosign("version")

    @cached_property
    def trusted(self) -> tuple[Cosign, tuple[str, ...]]:
        """Return cosign, and its arguments that name whose signatures are to be trusted.

        Raises ConfigError if nobody is named, CommandError if the key cannot be read.
        """
        cosign, key = self.cosign, self.key
        if not (key or self.identity):
            raise ConfigError(
                "no signer is named; give --key FILE, or --certificate-identity and "
                "--certificate-oidc-issuer; in a job of GitHub they are known"
            )
        if key and self.signs:
            public = cosign("public-key", "--key", key)
            cosign, key = replace(cosign, environ={**cosign.environ, PUBLIC_KEY: public}), f"env://{PUBLIC_KEY}"
        if key:
            return cosign, ("--key", key)
        identity = ("--certificate-identity", str(self.identity), "--certificate-oidc-issuer", str(self.issuer))
        return cosign, identity

    @cached_property
    def fault(self) -> str:
        """Return why a trial signature fails or is not trusted; empty if it is. It is tried once.

        The trial uses key, password, identity and log, so the log gets one more entry.
        """
        with _TRIAL:
            try:
                trial = Attestation("scan", "", bundle=self.attest("scan", b"{}", "trial", b"{}"))
                return self.attestation_problem(trial, b"{}")
            except ImagebuildError as error:
                return str(error)

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

    def image_problem(self, image: ImageReference) -> str:
        """Return why an image, named by digest, has no trusted signature, in cosign's words; empty if it has one."""
        return self._problem("verify", *self.cosign.connection(image), "--output", "json", _by_digest(image))

    def attestation_problem(self, attestation: Attestation, manifest: bytes) -> str:
        """Return why an attestation of the image with this manifest has no trusted signature; empty if it has one."""
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

    def _problem(self, command: str, *arguments: str | Path) -> str:
        cosign, signer = self.trusted
        log = [] if self.log else ["--insecure-ignore-tlog=true"]
        try:
            cosign(command, *signer, *log, *arguments)
        except CommandError as error:
            return str(error)
        return ""


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
    signer = Signer(key, identity, issuer, log, signs=True)
    signer.check()
    return signer


def trust_of(key: str | None, identity: str | None, issuer: str | None, *, log: bool) -> Signer | None:
    """Return who is trusted by the options of a command, None if they name nobody. Raises as `Signer.check` does."""
    trust = Signer(key, identity, issuer, log) if key or identity or issuer else None
    if trust:
        trust.check()
    return trust


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


def check_required(kinds: Iterable[str], trust: Signer | None) -> None:
    """Raise ConfigError for an unknown kind, and for required signatures without saying whose."""
    known = (*PREDICATES, SIGNATURE)
    for kind in kinds:
        if kind not in known:
            raise ConfigError(
                f"--require {kind}: unknown kind{suggestion(kind, list(known))}; one of {', '.join(known)}"
            )
        if kind == SIGNATURE and not trust:
            raise ConfigError("--require signature: whose? give --key FILE, or --certificate-identity with its issuer")


def verify_attachments(
    reference: ImageReference, registry: Registry, required: Collection[str], trust: Signer | None = None
) -> AttestResult:
    """Judge every attachment of an image, and name the required kinds that are missing.

    Without `trust`, no signature is asked for, so that nothing but damage and mix-ups is found. A tag is looked up
    once; everything after that is about its digest. Raises ConfigError if there is no such image or it is unclear what
    is required, CommandError if the registry fails, and ResultError if it has something else by this name.
    """
    check_required(required, trust)
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
            signed = problem or "by the key or identity that was named"
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
    """Yield kind, outcome, detail and digest of what is attached to a manifest; what does not count is skipped.

    It may be about any of the members, platform → digest: those of an index, or the image itself.
    """
    manifest = place.manifest(digest).content
    believed: list[tuple[Attestation, BaseModel]] = []
    for attestation in read_attestations(place, digest):
        # Whoever may push can attach, so an attachment without a trusted signature does not count.
        unsigned = trust.attestation_problem(attestation, manifest) if trust and attestation.content else ""
        if unsigned:
            yield attestation.kind, "skipped", f"not believed: {unsigned}", attestation.digest
            continue
        try:
            if value := read_predicate(attestation):
                believed.append((attestation, value))
        except ResultError as error:
            yield attestation.kind, "broken", attestation.problem or str(error), attestation.digest

    newest: dict[tuple[str, str], str] = {}
    for scan in (value for _, value in believed if isinstance(value, ScanResult)):
        newest[_scanned(scan)] = max(scan.started, newest.get(_scanned(scan), ""))
    for attestation, value in believed:
        verdicts = [judge_predicate(value, member, platform, index) for platform, member in members.items()]
        outcome, detail = next((verdict for verdict in verdicts if verdict[0] != "broken"), verdicts[0])
        if isinstance(value, ScanResult) and outcome != "broken" and value.started < newest[_scanned(value)]:
            outcome, detail = "skipped", f"{detail}; a newer scan counts"
        yield attestation.kind, outcome, detail, attestation.digest


def _scanned(scan: ScanResult) -> tuple[str, str]:
    """Return the scanner without its version, and the image: of scans that are equal in both, the newest counts."""
    return scan.scanner.partition(" ")[0], scan.digest


def judge_predicate(value: BaseModel, digest: str, platform: str, index: str) -> tuple[Outcome, str]:
    """Judge whether a predicate is about the image of a platform, and what it says. Anybody may have written it.

    `index` is the digest of the index that lists the image, or its own.
    """
    if other := mismatch(value, digest, platform, (index,)):
        return "broken", other
    failure, summary = "", ""
    match value:
        case SpdxDocument():
            summary = f"{len(value.contents)} packages and components"
        case Provenance():
            summary = f"{value.sources}, of which {len(value.replaced)} stood in for others"
            if value.folders:
                failure = f"built from folders that nobody can compare: {', '.join(value.folders)}"
        case VerifyResult():
            outcomes = Counter(check.outcome for check in value.checks)
            summary = f"{outcomes['passed']} checks passed, {outcomes['skipped']} skipped"
            failed = [f"{c.component}/{c.check}" for c in value.checks if c.outcome == "failed"]
            failure = f"failed: {', '.join(failed)}" if failed else "" if outcomes["passed"] else "nothing passed"
        case Report():
            count = len(value.entries) + len(value.diagnostics)
            summary, failure = f"{count} results", "" if count else "nothing was measured"
        case ScanResult():
            summary = f"{value.scanner}, {len(value.findings)} findings, {value.started[:10]}"
            failure = value.reason or "the policy does not allow it" if value.verdict == "failed" else ""
    return ("failed", f"{failure}; {summary}") if failure else ("passed", summary)


# Show and add


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

    Return the digests of the attachments that are new; a signer signs them. Raises ConfigError if the image is not
    named by digest, and for content about another image; ResultError for content of another kind.
    """
    place, found = registry.at(reference.repository), image_in_registry(str(reference), reference, registry, Path())
    index = str(found.digest)
    if not reference.digest:
        raise ConfigError(f"{reference}: name the image by digest: the tag may have moved; now it names {index}")
    value, document = read_written(PREDICATES[kind].model, content, str(file)), json.loads(content)
    # What says neither image nor platform is of the platform that is named.
    names = found.platforms if platform is None and any(about(value)) else (platform,)
    wanted: list[tuple[Descriptor, list[NewAttachment]]] = []
    problem = ""
    for image in map(found.image, names):
        if other := mismatch(value, image.digest, image.platform, (index,)):
            problem = f"{file}: is no {kind} of {image.digest}: {other}"
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
    """Return what images lack of the attachments that they shall have.

    With a signer, only attachments that it trusts count: anybody who may push can have attached others.
    """

    def identity(kind: str, content: str) -> tuple[str, str]:
        # The same image built again needs no second provenance: the two differ only in the time.
        return kind, "" if kind == "provenance" else content

    missing: list[tuple[Descriptor, NewAttachment]] = []
    for subject, attachments in wanted:
        listed = list_attestations(place, subject.digest)
        stated = [(identity(kind_of(item), item.annotations.get(PREDICATE_DIGEST, "")), item) for item in listed]
        present = Counter(same for same, _ in stated)
        if signer and listed:
            manifest = place.manifest(subject.digest).content
            # Only what says to be the same is verified: of scans, there is one more each week.
            asked = {identity(new.kind, digest_of(new.content)) for new in attachments}
            alike = [item for same, item in stated if same in asked]
            read = [read_attestation(place, item, subject.digest) for item in alike]
            trusted = [item for item in read if item.bundle and not signer.attestation_problem(item, manifest)]
            present = Counter(identity(item.kind, digest_of(item.content)) for item in trusted)
        for new in attachments:
            same = identity(new.kind, digest_of(new.content))
            if present[same]:
                present[same] -= 1
            else:
                missing.append((subject, new))
    return missing


def attach(place: Repository, subject: Descriptor, new: NewAttachment, signer: Signer | None = None) -> str:
    """Attach a predicate to an image, signed if there is a signer, and return the digest of the attachment.

    Raises CommandError if the registry fails or nothing can be signed.
    """
    name = place.name.rpartition("/")[2]
    bundle = b""
    if signer:
        bundle = signer.attest(new.kind, new.content, name, place.manifest(subject.digest).content)
    attachment = attestation_of(new.kind, new.content, subject, name, created=new.created, bundle=bundle)
    return place.attach(subject, attachment)


def with_signers(catalog: Catalog, trust: Signer) -> Catalog:
    """Return a catalogue that says which images have the signature of who is trusted."""
    names = [parse_reference(image.reference) for image in catalog.images]
    judged = zip(catalog.images, for_each(trust.image_problem, names, jobs=JOBS), strict=True)
    images = tuple(image.model_copy(update={"verified_by": "" if why else trust.name}) for image, why in judged)
    return catalog.model_copy(update={"images": images})
