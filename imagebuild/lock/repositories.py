"""Read signed repositories of packages: which key signs one, and which versions it has."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild.core import debian
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.http import Downloads
from imagebuild.core.run import RunProgram
from imagebuild.project.lockfile import LockedRepository, PackageSource

TIMEOUT_S = 60
WHY = {
    "BADSIG": "the signature is not of this text",
    "EXPSIG": "the signature has expired",
    "EXPKEYSIG": "the key has expired",
    "REVKEYSIG": "the key was revoked",
    "ERRSIG": "the key is not in the file",
}


@dataclass(frozen=True)
class Signed:
    """A text whose signature is good."""

    text: str
    fingerprints: tuple[str, ...]
    """Of the primary keys whose signatures are good, 40 hex digits."""


def verify(run: RunProgram, key: bytes, content: bytes, signature: bytes | None = None) -> Signed:
    """Return the text that is signed: `content` without its signature, or all of it if the signature is separate.

    `key` holds one or more public keys, armoured or not. Raises CommandError that names the keys if none of them
    made a good signature.
    """
    with tempfile.TemporaryDirectory(prefix="imagebuild-gpg-") as folder:
        home = Path(folder)
        (home / "key").write_bytes(key)
        (home / "content").write_bytes(content)
        if signature is not None:
            (home / "signature").write_bytes(signature)
        _gpg(run, home, "--import", str(home / "key"))
        held = _held(run("gpg", *_options(home), "--with-colons", "--list-keys", timeout=TIMEOUT_S))
        if not held:
            raise CommandError("the file of the key holds no OpenPGP key")
        if signature is None:
            status = _gpg(run, home, "--output", str(home / "text"), "--decrypt", str(home / "content"))
        else:
            status = _gpg(run, home, "--verify", str(home / "signature"), str(home / "content"))
        signatures = tuple(_signatures(status))
        good = tuple(dict.fromkeys(s.primary for s in signatures if s.kind == "GOODSIG" and s.primary))
        if any(s.kind == "BADSIG" for s in signatures) or not good:
            keys = ", ".join(f"{fingerprint}{remark}" for fingerprint, remark in held.items())
            problems = [f"signed by {s.key}: {WHY.get(s.kind, 'not good')}" for s in signatures if s.kind != "GOODSIG"]
            problem = "; ".join(problems) if signatures else "there is no signature"
            raise CommandError(f"{problem}; the file of the key holds {keys}")
        text = content if signature is not None else (home / "text").read_bytes()
        return Signed(text.decode(errors="replace"), good)


@dataclass(frozen=True)
class _Signature:
    kind: str
    key: str
    """Id of the key that made it, 16 hex digits, or its fingerprint."""
    primary: str = ""
    """Fingerprint of the primary key, if the signature could be checked."""


def _options(home: Path) -> tuple[str, ...]:
    return ("--homedir", str(home), "--batch", "--no-options", "--no-autostart", "--trust-model", "always")


def _gpg(run: RunProgram, home: Path, *words: str) -> str:
    """Run gpg and return the status lines that it writes for programs.

    Its exit status says less: a second signature by an unknown key counts as a failure. Raises CommandError if gpg
    cannot be run.
    """
    status = home / "status"
    status.unlink(missing_ok=True)
    try:
        run("gpg", *_options(home), "--status-file", str(status), *words, timeout=TIMEOUT_S)
    except CommandError as error:
        if not status.exists():
            raise CommandError(f"signatures are checked by gpg (package gnupg): {error}") from None
    return status.read_text(errors="replace") if status.exists() else ""


def _signatures(status: str) -> Iterator[_Signature]:
    """Yield the signatures that gpg's status lines are about."""
    for part in re.split(r"^\[GNUPG:\] NEWSIG.*$", status, flags=re.MULTILINE)[1:]:
        lines = {words[1]: words[2:] for line in part.splitlines() if len(words := line.split()) > 1}
        kind = next((kind for kind in ("BADSIG", *WHY, "GOODSIG") if kind in lines), None)
        if kind:
            valid = lines.get("VALIDSIG", [])
            yield _Signature(kind, valid[0] if valid else lines[kind][0], valid[-1] if valid else "")


def _held(listing: str) -> dict[str, str]:
    """Return the fingerprints of the primary keys in gpg's listing `--with-colons`, each with a remark or ``."""
    remarks: dict[str, str] = {}
    remark: str | None = None
    for row in (line.split(":") for line in listing.splitlines()):
        if row[0] == "pub":
            remark = {"e": " (expired)", "r": " (revoked)"}.get(row[1], "")
        elif row[0] == "fpr" and remark is not None:
            remarks[row[9]] = remark
            remark = None
    return remarks


SHOWN_VERSIONS = 5


@dataclass(frozen=True)
class PackageIndex:
    """The versions of some packages that a signed repository has."""

    fingerprints: tuple[str, ...]
    """Fingerprints of the keys that signed it."""
    versions: Mapping[str, list[str]]
    """Package → versions, oldest first."""


def read(run: RunProgram, web: Downloads, source: PackageSource, names: Iterable[str]) -> PackageIndex:
    """Return what a repository's signed index has of the named packages.

    Raises Unreachable or Absent if a part of it cannot be fetched, CommandError if a signature or a hash is wrong or
    the release has expired, ConfigError for a suite that is not flat, ResultError for an index that cannot be read.
    """
    base = debian.flat_repository_folder(source.url, source.suite)
    if base is None:
        raise ConfigError(
            f"{source.url}: the suite {source.suite!r} is not flat: only those that end in / can be locked"
        )
    try:
        key = web.read(source.key)
        try:
            signed = verify(run, key, web.read(f"{base}InRelease"))
        except Absent:
            signed = verify(run, key, web.read(f"{base}Release"), web.read(f"{base}Release.gpg"))
        release = debian.parse_paragraph(signed.text)
        if until := debian.expired_since(release, datetime.now(UTC)):
            raise CommandError(f"the release was valid until {until}; is this an old copy?")
        for path, algorithm, digest in debian.package_indexes(release):
            try:
                content = web.read(base + path)
            except Absent:
                continue  # a release may list forms that the server does not keep
            text = debian.verified_index(path, algorithm, digest, content)
            return PackageIndex(signed.fingerprints, debian.versions_in_index(text, names))
    except ImagebuildError as error:
        text = str(error)
        raise error if source.url in text or source.key in text else type(error)(f"{source.url}: {text}") from None
    raise ResultError(f"{source.url}: the signed release lists no index of packages with a sha256 that is there")


def resolve_repository(
    run: RunProgram, web: Downloads, source: PackageSource, known: LockedRepository | None
) -> LockedRepository:
    """Return the key and the versions of the packages that are wanted; versions that are known stay.

    Raises ConfigError if another key than the known one signs the repository, or it lacks a package; and as `read`.
    """
    index = read(run, web, source, (name_of(package) for package in source.packages))
    fingerprint = check_key(source.url, index, known)
    packages = dict(known.packages) if known else {}
    for package in source.packages:
        if package not in packages:
            packages[package] = choose(source.url, index, package)
    return LockedRepository(fingerprint=fingerprint, packages=packages)


def check_key(url: str, index: PackageIndex, known: LockedRepository | None) -> str:
    """Return the fingerprint of the key that signed a repository. Raises ConfigError if it is not the known one."""
    if known is None or known.fingerprint in index.fingerprints:
        return known.fingerprint if known else index.fingerprints[0]
    raise ConfigError(
        f"{url}: is signed by the key {', '.join(index.fingerprints)}, but imagebuild.lock trusts "
        f"{known.fingerprint}; if its owner announced the change, `imagebuild lock --update {url}` takes the new key"
    )


def choose(url: str, index: PackageIndex, package: str) -> str:
    """Return the version of a package: of `name=version` that one, else the newest.

    Raises ConfigError if the repository does not have it.
    """
    name, _, wanted = package.partition("=")
    available = index.versions.get(name, [])
    if not available:
        raise ConfigError(f"{url}: has no package {name}")
    if wanted and wanted not in available:
        shown = ", ".join(reversed(available[-SHOWN_VERSIONS:]))
        raise ConfigError(f"{url}: has no {name} in version {wanted}; the newest: {shown}")
    return wanted or available[-1]


def name_of(package: str) -> str:
    """Return the name of a package that may come as `name=version`."""
    return package.partition("=")[0]
