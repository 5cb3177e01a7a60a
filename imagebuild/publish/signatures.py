"""Sign and verify images and attestations with cosign."""

from __future__ import annotations

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
from imagebuild.core.http import Downloads
from imagebuild.core.run import INSTALL_COSIGN, run_program, which
from imagebuild.core.settings import ca_bundle
from imagebuild.oci.attestation import KINDS, Attestation
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import connect_registry

PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - a variable's name
NO_SERVICES = '{"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"}'
"""What cosign signs with where nothing goes to a transparency log."""
NO_ROOTS = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'
"""What cosign trusts besides a key; without it, cosign fetches the roots of the public log, which needs a network."""

PUBLIC_KEY = "COSIGN_PUBLIC_KEY"
WHOSE = "--key FILE, or --certificate-identity with --certificate-oidc-issuer"
SERVICES = re.compile("rekor|fulcio|tuf|oauth2|sigstore.dev", re.IGNORECASE)
"""What cosign names where the services of the public log cannot be used."""


@dataclass(frozen=True)
class Cosign:
    """Call cosign, version 2.5 or newer, with these variables."""

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
        try:
            return self.run(program, *map(str, arguments), env=self.environ)
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
        is_plain = connect_registry(image.host, environ=self.environ).base.startswith("http:")
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
        """Return the identity, or the name of the key."""
        return self.identity or Path(self.key or "").name

    def check(self) -> None:
        """Raise ConfigError if it is not clear who is meant or the key cannot be used, CommandError without cosign."""
        is_file = self.key is not None and "://" not in self.key
        if is_file and not Path(str(self.key)).is_file():
            raise ConfigError(f"--key {self.key}: no such file; `cosign generate-key-pair` makes one")
        if (self.key and self.identity) or bool(self.identity) != bool(self.issuer):
            raise ConfigError(f"whose signature? give {WHOSE}")
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
            raise ConfigError(f"no signer is named; give {WHOSE}; in a job of GitHub they are known")
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
        """Sign images that are named by their digests. Raises CommandError if cosign fails."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            arguments = self._arguments(Path(folder))
            for image in images:
                self.cosign("sign", *arguments, *self.cosign.connection(image), str(image))

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
        return self._problem("verify", *self.cosign.connection(image), "--output", "json", str(image))

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
