"""Signatures of images by digest, with cosign. Starts programs.

cosign keeps a signature beside the image in its repository, under the tag `sha256-<digest>.sig`. Passwords of keys
come from COSIGN_PASSWORD, those of registries from `docker login`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild import programs
from imagebuild.errors import CommandError, ConfigError
from imagebuild.registry.client import is_plain
from imagebuild.registry.reference import Reference

INSTALL = "on Debian 13: `apt-get install cosign`; elsewhere cosign 2.4 or newer from its project's releases"
PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - a variable's name
TAG_SUFFIX = ".sig"

Run = Callable[..., str]


@dataclass(frozen=True)
class Signer:
    """Who signs."""

    key: str | None = None
    """File, or what cosign takes as the address of a key; None is keyless, as CI's own identity."""
    log: bool = True
    """Whether the signature is written to a public transparency log."""


@dataclass(frozen=True)
class Trust:
    """Whose signature is wanted. Either a key, or an identity and who vouches for it."""

    key: str | None = None
    identity: str | None = None
    issuer: str | None = None
    log: bool = True
    """Whether the signature has to be in the transparency log."""

    def check(self) -> None:
        """Raise ConfigError unless it says exactly one signer, whose key is there."""
        if bool(self.key) == bool(self.identity):
            raise ConfigError("whose signature? give --key FILE, or --certificate-identity with its issuer")
        if self.key and "://" not in self.key and not Path(self.key).is_file():
            raise ConfigError(f"--key {self.key}: no such file")
        if self.identity and not self.issuer:
            raise ConfigError("--certificate-identity: anybody could vouch for it; give --certificate-oidc-issuer too")
        if self.identity and not self.log:
            raise ConfigError(
                "--no-tlog: certificates live for minutes, only the log says when one was used; use --key"
            )


@dataclass(frozen=True)
class Cosign:
    """The program, and the machine it runs on."""

    environ: Mapping[str, str]
    run: Run = programs.run
    program: str | None = None

    def __call__(self, *arguments: str) -> str:
        """What it prints. Raises CommandError if it is missing or fails."""
        program = self.program or programs.which("cosign")
        if not program:
            raise CommandError(f"`cosign` is missing, which signs images; install it: {INSTALL}")
        return self.run(program, *arguments, env={k: v for k, v in self.environ.items() if k.startswith("COSIGN_")})


def sign(images: Iterable[Reference], signer: Signer, cosign: Cosign | None = None) -> None:
    """Sign images, each by its digest. One that this key has signed is not signed again.

    Raises ConfigError for an image without digest or a key without password, CommandError if cosign is missing or
    fails.
    """
    cosign = cosign or Cosign(os.environ)
    if signer.key and _is_file(signer.key) and PASSWORD not in cosign.environ:
        raise ConfigError(f"{signer.key}: set {PASSWORD} to the key's password, which may be empty")
    key = ["--key", signer.key] if signer.key else []
    log = [] if signer.log else ["--tlog-upload=false"]
    for image in images:
        cosign("sign", "--yes", *key, *log, *_connection(image, cosign.environ), _by_digest(image))


def verify(image: Reference, trust: Trust, cosign: Cosign | None = None) -> str | None:
    """Why an image has no signature that is trusted; None if it has one.

    Raises ConfigError if it is not said whose signature is wanted, CommandError if cosign is missing.
    """
    cosign = cosign or Cosign(os.environ)
    trust.check()
    if trust.key:
        who = ["--key", trust.key]
    else:
        who = ["--certificate-identity", str(trust.identity), "--certificate-oidc-issuer", str(trust.issuer)]
    # With a key and without a log there is nothing to ask the network.
    log = [] if trust.log else ["--private-infrastructure"]
    if not (cosign.program or programs.which("cosign")):
        raise CommandError(f"`cosign` is missing, which verifies signatures; install it: {INSTALL}")
    try:
        cosign("verify", *who, *log, *_connection(image, cosign.environ), "--output", "json", _by_digest(image))
    except CommandError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1].removeprefix("Error: ").removeprefix("error during command execution: ")
    return None


def is_signature(tag: str) -> bool:
    """Whether a tag of a repository is cosign's, and no image's."""
    return tag.startswith("sha256-") and tag.endswith(TAG_SUFFIX)


def _by_digest(image: Reference) -> str:
    """A tag may move between looking and signing."""
    if not image.digest:
        raise ConfigError(f"{image}: only what has a digest can be signed and verified")
    return f"{image.name}@{image.digest}"


def _connection(image: Reference, environ: Mapping[str, str]) -> list[str]:
    return ["--allow-http-registry"] if is_plain(image.host, environ) else []


def _is_file(key: str) -> bool:
    """Whether a password is needed: not for keys in key management services."""
    return "://" not in key or key.startswith("env://")
