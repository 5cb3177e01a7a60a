"""Signatures of images and attestations, made and verified with cosign."""

import base64
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock

from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError
from imagebuild.core.files import read_bytes
from imagebuild.core.http import Downloads
from imagebuild.core.run import INSTALL_COSIGN, run_program, which
from imagebuild.core.settings import ca_bundle
from imagebuild.oci.attestation import KINDS, Attestation
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import connect_registry

PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - a variable's name
NO_SERVICES = '{"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"}'
"""Signing configuration for cosign 3 without a transparency log."""
NO_ROOTS = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'
"""An empty list of trusted roots, for verification by a key only. Without this file, cosign fetches the roots of the
public log."""

PUBLIC_KEY = "COSIGN_PUBLIC_KEY"
SOURCE_OPTION = "--certificate-github-workflow-repository"
SIGNER_OPTIONS = f"--key FILE, or --certificate-identity with --certificate-oidc-issuer and {SOURCE_OPTION}"
SERVICES = re.compile("rekor|fulcio|tuf|oauth2|sigstore.dev", re.IGNORECASE)
"""Names of sigstore services. An error of cosign that contains such a name means that the public log cannot be
reached."""
LARGEST_KEY = 1 << 20
"""Maximum size in bytes of a key file."""
_TRIAL = Lock()
"""Lock that allows only one thread at a time to make the trial signature."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""A repository as GitHub certifies it: `OWNER/NAME`."""
GITHUB_ISSUER = "https://token.actions.githubusercontent.com"
"""The issuer that certifies the identity of a GitHub job."""


@dataclass(frozen=True)
class Cosign:
    """The program cosign, version 2.5 or newer, and its environment variables."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[..., str] = run_program
    program: str | None = None
    """Path of the program cosign. None: cosign is searched in PATH."""

    def __call__(self, *arguments: str | Path) -> str:
        """Run cosign, and return its output. Raises CommandError if cosign is missing or fails."""
        program = self.program or which("cosign")
        if not program:
            advice = f"it signs images and verifies signatures; install it: {INSTALL_COSIGN}"
            raise CommandError(f"`cosign` is missing; {advice}")
        try:
            return self.run(program, *map(str, arguments), env=self.environ)
        except CommandError as error:
            # The last line is the error. In the lines before, cosign prints terms of use and the same error.
            last = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
            text = last.removeprefix("Error: ").removeprefix("error during command execution: ")
            if SERVICES.search(text):
                text += "; the public log cannot be reached; use --key with --no-tlog, which does not need the log"
            if "decryption failed" in text:
                text = f"{PASSWORD}: is not the password of the key ({text}); set it to the password of --key"
            raise CommandError(text) from None

    @cached_property
    def is_before_3(self) -> bool:
        """Whether cosign is older than version 3. Version 3 and newer write signatures as bundles by default.

        The output of `cosign version` is not used, because the cosign packages of some distributions do not contain the
        version."""
        return "--new-bundle-format" in self("attest-blob", "--help")

    def connection(self, image: ImageReference) -> list[str]:
        """Return the options that cosign needs for the registry of an image."""
        is_plain = connect_registry(image.host, environ=self.environ).base.startswith("http:")
        return ["--allow-http-registry"] if is_plain else []


@dataclass(frozen=True)
class Signer:
    """The key or identity that signs, or whose signatures are trusted.

    An identity, such as the workflow file of a CI job, is certified by an issuer. Without a key and an identity, cosign
    signs as the identity of the CI job, and no signature can be verified."""

    key: str | None = None
    """File or address of the key, as cosign accepts it: the private key if `signs`, otherwise the public key."""
    identities: tuple[str, ...] = ()
    """The identities of which one must have signed. If `signs`: the only identity that signs."""
    issuer: str | None = None
    source: str | None = None
    """The GitHub repository, as `OWNER/NAME`, in which the signing workflow ran. Each repository that calls a reusable
    workflow signs with the identity of this workflow, so the identity does not show whose image was signed."""
    ref: str | None = None
    """The git ref, such as `refs/heads/main`, on which the signing workflow ran. None: any ref."""
    log: bool = True
    """Whether imagebuild writes new signatures to the public transparency log, and trusts only signatures in this
    log."""
    cosign: Cosign = field(default_factory=Cosign)
    signs: bool = False

    @property
    def name(self) -> str:
        """The identities and the source repository, or the file name of the key."""
        if not self.identities:
            return Path(self.key or "").name
        return f"{' or '.join(self.identities)}{f' for {self.source}' if self.source else ''}"

    def check(self) -> None:
        """Raise ConfigError if the signer is ambiguous or the key cannot be used, CommandError if cosign is missing."""
        is_file = self.key is not None and "://" not in self.key
        if is_file and not Path(str(self.key)).is_file():
            raise ConfigError(f"--key {self.key}: no such file; create a key with `cosign generate-key-pair`")
        who = bool(self.identities)
        if not (self.key or who or self.signs):
            raise ConfigError(f"--key: the signer is not named; add {SIGNER_OPTIONS}")
        if (self.key and who) or who != bool(self.issuer) or (not who and (self.source or self.ref)):
            raise ConfigError(f"--key: the signer is ambiguous; use either {SIGNER_OPTIONS}")
        if "" in self.identities or (self.signs and len(self.identities) > 1):
            raise ConfigError("--certificate-identity: is empty or repeated; name the one identity that signs")
        if any("://" in identity for identity in self.identities) and not REPOSITORY.fullmatch(self.source or ""):
            why = "every repository that calls a workflow signs with the identity of the workflow"
            remedy = f"name the repository of the images with {SOURCE_OPTION} OWNER/NAME"
            raise ConfigError(f"{SOURCE_OPTION}: {self.source or 'is missing'}; {why}; {remedy}")
        if who and not self.log:
            why = "without a key, only the log proves that a short-lived certificate was valid"
            raise ConfigError(f"--no-tlog: needs --key; {why}")
        # Keys in key management services have no password.
        if self.signs and (is_file or (self.key or "").startswith("env://")) and PASSWORD not in self.cosign.environ:
            advice = "set it to the key's password, which may be empty"
            raise ConfigError(f"--key {self.key}: {PASSWORD} is not set; {advice}")
        if is_file and b"-----BEGIN " not in read_bytes(Path(str(self.key)), LARGEST_KEY):
            kind = "private key, such as cosign.key" if self.signs else "public key, such as cosign.pub"
            raise ConfigError(f"--key {self.key}: not a key of cosign (a PEM file); name the {kind}")
        self.cosign("version")

    @cached_property
    def trusted(self) -> tuple[Cosign, tuple[str, ...]]:
        """The program cosign, and the options that tell cosign which signer is trusted.
        Raises ConfigError if no signer is named, CommandError if the key cannot be read."""
        cosign, key = self.cosign, self.key
        if not (key or self.identities):
            remedy = f"add {SIGNER_OPTIONS}; imagebuild detects the identity only in a GitHub job"
            raise ConfigError(f"no signer is named; {remedy}")
        if key and self.signs:
            public = cosign("public-key", "--key", key)
            cosign, key = replace(cosign, environ={**cosign.environ, PUBLIC_KEY: public}), f"env://{PUBLIC_KEY}"
        if key:
            return cosign, ("--key", key)
        # cosign accepts one identity or one regular expression.
        pattern = f"^(?:{'|'.join(map(re.escape, self.identities))})$"
        several = len(self.identities) > 1
        who = ("--certificate-identity-regexp", pattern) if several else ("--certificate-identity", *self.identities)
        source = (SOURCE_OPTION, self.source) if self.source else ()
        ref = ("--certificate-github-workflow-ref", self.ref) if self.ref else ()
        return cosign, (*who, "--certificate-oidc-issuer", str(self.issuer), *source, *ref)

    @cached_property
    def fault(self) -> str:
        """The reason why a trial signature fails or is not trusted. Empty if the trial succeeds.

        The trial runs only once. The trial uses the key, password, identity and log of the signer, so the trial adds an
        entry to the log."""
        with _TRIAL:
            try:
                trial = Attestation("scan", "", bundle=self.attest("scan", b"{}", "trial", b"{}"))
                return self.attestation_problem(trial, b"{}")
            except ImagebuildError as error:
                return str(error)

    def sign(self, images: Iterable[ImageReference]) -> None:
        """Sign images, which must be named by digest. Raises CommandError if cosign fails."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            arguments = self._arguments(Path(folder))
            for image in images:
                self.cosign("sign", *arguments, *self.cosign.connection(image), str(image))

    def attest(self, kind: str, content: bytes, name: str, manifest: bytes) -> bytes:
        """Sign the statement that a predicate (the content of an attestation) is about the image with this manifest.
        Return the signed statement as a sigstore bundle. Raises CommandError if cosign fails."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            subject, predicate, bundle = (Path(folder, f) for f in (f"of/{name}", "predicate.json", "bundle.json"))
            subject.parent.mkdir()  # an image may have the name of another file
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
        """Return the reason that cosign gives if an image has no trusted signature. Return an empty string otherwise.
        The image must be named by digest."""
        return self._problem("verify", *self.cosign.connection(image), "--output", "json", str(image))

    def attestation_problem(self, attestation: Attestation, manifest: bytes) -> str:
        """Return the reason why an attestation has no trusted signature.

        Return an empty string if the signature of the attestation is trusted. `manifest` is the manifest of the image
        that the attestation is about."""
        if not attestation.bundle:
            return "the attestation is not signed"
        # cosign 2 does not compare the option --type with the type in the bundle. `read_attestation` compared them.
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


def job_workflow(environ: Mapping[str, str]) -> str:
    """Return the workflow file that defines this GitHub job, with its revision.

    Outside of GitHub, return an empty string. In a reusable workflow, the environment variables name the calling
    workflow. The reusable workflow itself is named only in the token of the job (`job_workflow_ref`), and Fulcio
    certifies this name. Raises CommandError if GitHub does not issue a token."""
    if not (address := environ.get("ACTIONS_ID_TOKEN_REQUEST_URL")):
        return environ.get("GITHUB_WORKFLOW_REF", "")
    header = {"Authorization": f"bearer {environ.get('ACTIONS_ID_TOKEN_REQUEST_TOKEN', '')}"}
    web = Downloads(ca=ca_bundle(None, environ), headers=header)
    try:
        claims = json.loads(web.read(f"{address}&audience=sigstore"))["value"].split(".")[1]
        return str(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["job_workflow_ref"])
    except (CommandError, LookupError, TypeError, ValueError) as error:
        raise CommandError(f"cannot read the identity of this GitHub job: {type(error).__name__}: {error}") from None
