"""Read signed repositories of packages: which key signs one, and which versions it has."""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from debian.arfile import ArError
from debian.deb822 import Deb822, Release
from debian.debfile import DebFile

from imagebuild.core import debian
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.http import Downloads
from imagebuild.core.run import RunProgram
from imagebuild.project.lockfile import LockedRepository, PackageSource

TIMEOUT_S = 60
SIGNED = re.compile(
    rb"\A-----BEGIN PGP SIGNED MESSAGE-----.*?\n\r?\n(?P<text>.*)-----BEGIN PGP SIGNATURE-----.*", re.DOTALL
)
KEYRING = re.compile(r"(^|/)usr/share/keyrings/[^/]+\.(gpg|asc|pgp)$")
SHOWN_VERSIONS = 5
MEND = "give the component's repository the address of its key"
AGAIN = "ask again, or another mirror"
GPG = ("gpg", "--batch", "--no-options", "--no-autostart", "--trust-model", "always", "--homedir")
NOT_GOOD = ("BADSIG", "EXPSIG", "EXPKEYSIG", "REVKEYSIG", "ERRSIG")
"""gpg's status words of a signature that is not good: it is of another text, it or the key has expired, or so."""


def signed_release(
    run: RunProgram, key: bytes, content: bytes, signature: bytes | None = None
) -> tuple[Release, tuple[str, ...]]:
    """Return a release, and the fingerprints of the primary keys whose signatures of it are good.

    It is `content` without its signature, or all of it if the signature is separate. `key` holds one or more public
    keys, armoured or not. Raises CommandError if none of them made a good signature, if one is of another text, or if
    the release is not valid any more.
    """
    with tempfile.TemporaryDirectory(prefix="imagebuild-gpg-") as name:
        folder = Path(name)
        keys, signed, text, status = (folder / name for name in ("keys", "signed", "text", "status"))
        keys.write_bytes(key)
        signed.write_bytes(content if signature is None else signature)
        check: tuple[str, ...] = ("--output", str(text), "--decrypt", str(signed))
        if signature is not None:
            text.write_bytes(content)
            check = ("--verify", str(signed), str(text))
        for words in (("--import", str(keys)), check):
            status.unlink(missing_ok=True)
            try:
                run(*GPG, name, "--status-file", str(status), *words, timeout=TIMEOUT_S)
            except CommandError as error:
                # Its exit status says less than these lines: a second signature by an unknown key counts as a failure.
                if not status.exists():
                    raise CommandError(f"signatures want gpg (package gnupg): {error}") from None
        good, others = _signatures(status.read_text(errors="replace"))
        if not good or any(words.startswith("BADSIG") for words in others):
            found = f"gpg says {', '.join(others)}" if others else "there is none"
            raise CommandError(f"expected a good signature by the repository's key, but {found}; {AGAIN}, or {MEND}")
        # What gpg wrote: text around the signed part does not count.
        release = Release(text.read_bytes().decode(errors="replace"))
    if until := debian.expired_since(release, datetime.now(UTC)):
        raise CommandError(f"the release was valid until {until}, so this is an old copy; {AGAIN}")
    return release, good


def _signatures(status: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the fingerprints of the primary keys with good signatures, and word and key of the other signatures."""
    good, others = [], []
    for part in re.split(r"^\[GNUPG:\] NEWSIG", status, flags=re.MULTILINE)[1:]:
        lines = {words[1]: words[2:] for line in part.splitlines() if len(words := line.split()) > 1}
        bad = [f"{kind} {lines[kind][0]}" for kind in NOT_GOOD if kind in lines]
        others += bad[:1]
        if not bad and "GOODSIG" in lines and "VALIDSIG" in lines:
            good.append(lines["VALIDSIG"][-1])  # the primary key, which may have signed by another key
    return tuple(dict.fromkeys(good)), others


class PackageIndex(NamedTuple):
    """Hold the versions of some packages that a signed repository has."""

    fingerprints: tuple[str, ...]
    """Of the keys that signed it."""
    versions: Mapping[str, list[str]]
    """Package → versions, oldest first."""


class SignedSuite(NamedTuple):
    """Identify a suite of a distribution's archive, with the keys that may sign it."""

    url: str
    name: str
    """Such as `trixie-security`."""
    key: bytes


def read_index(run: RunProgram, web: Downloads, source: PackageSource) -> PackageIndex:
    """Return all versions of the source's packages in a repository's signed index.

    Raises Unreachable or Absent if a part of it cannot be fetched, CommandError if a signature or a hash is wrong or
    the release has expired, ConfigError for a suite that is not flat, ResultError for an index that cannot be read.
    """
    base = debian.flat_repository_folder(source.url, source.suite)
    if base is None:
        raise ConfigError(
            f"{source.url}: the suite {source.suite!r} is not flat; take one that ends in /, only those can be locked"
        )
    try:
        try:
            content, signature = web.read(f"{base}InRelease"), None
        except Absent:
            content, signature = web.read(f"{base}Release"), web.read(f"{base}Release.gpg")
        kind, _, package = source.key.partition(":")
        if kind == "package":
            if signature is None and not SIGNED.match(content):
                raise CommandError("expected a signed InRelease, found no signature; ask without a proxy")
            # Nothing is trusted yet: this finds the key with which all of it is verified below.
            unsigned = SIGNED.sub(rb"\g<text>", content).decode(errors="replace")
            key = _key_in_package(web, base, _index(web, base, Release(unsigned)), package)
        else:
            key = web.read(source.key)
        release, fingerprints = signed_release(run, key, content, signature)
        index = _index(web, base, release)
        return PackageIndex(fingerprints, debian.versions_in_index(index, map(name_of, source.packages)))
    except ImagebuildError as error:
        named = source.url in str(error) or source.key in str(error)
        raise error if named else type(error)(f"{source.url}: {error}") from None


def read_suite(run: RunProgram, web: Downloads, suite: SignedSuite, arch: str, packages: Iterable[str]) -> PackageIndex:
    """Return the versions of packages in `main` of a distribution's signed suite. Raises as `read_index` does."""
    base = f"{suite.url.rstrip('/')}/dists/{suite.name}/"
    try:
        release, fingerprints = signed_release(run, suite.key, web.read(f"{base}InRelease"))
        index = _index(web, base, release, f"main/binary-{arch}/")
    except ImagebuildError as error:
        raise error if suite.url in str(error) else type(error)(f"{base}: {error}") from None
    return PackageIndex(fingerprints, debian.versions_in_index(index, packages))


def _index(web: Downloads, base: str, release: Release, folder: str = "") -> str:
    """Return the index of packages that a release lists."""
    for path, digest in debian.package_indexes(release, folder).items():
        try:
            content = web.read(base + path)
        except Absent:
            continue  # a release may list forms that the server does not keep
        return debian.verified_index(path, digest, content)
    raise ResultError(f"expected in the signed release an index with a SHA256 that the server has, found none; {AGAIN}")


def _key_in_package(web: Downloads, base: str, index: str, package: str) -> bytes:
    """Return the keys in the newest version of a package of a repository."""
    paragraphs = [p for p in Deb822.iter_paragraphs(index, use_apt_pkg=False) if p.get("Package") == package]
    if not paragraphs:
        raise ConfigError(
            f"expected the package {package}, which holds the repository's key, but it has none of that name; {MEND}"
        )
    newest = max(paragraphs, key=lambda paragraph: debian.version_key(paragraph["Version"]))
    content = web.read(base + newest["Filename"].removeprefix("./"))
    if hashlib.sha256(content).hexdigest() != newest.get("SHA256"):
        raise CommandError(f"{newest['Filename']} has another sha256 than the index of packages says; {AGAIN}")
    try:
        with DebFile(fileobj=io.BytesIO(content)) as deb:
            names = [name for name in deb.data.tgz().getnames() if KEYRING.search(name)]
            keys = [bytes(deb.data.get_content(name) or b"") for name in names]
    except (ArError, tarfile.TarError, OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ResultError(f"{newest['Filename']} cannot be unpacked: {error}; {MEND}") from None
    if not keys:
        raise ResultError(f"expected a keyring in /usr/share/keyrings of the package {package}, found none; {MEND}")
    return b"".join(keys)


def locked_repository(source: PackageSource, index: PackageIndex, known: LockedRepository | None) -> LockedRepository:
    """Return the lock's entry of a repository: its key, and the versions of wanted packages; known versions stay.

    A package that it lacks has none. Raises ConfigError if another key than the known one signs the repository.
    """
    fingerprint = check_key(source.url, index, known)
    packages, candidates = (known.packages, known.candidates) if known else ({}, {})
    chosen, _ = choose(index.versions, [package for package in source.packages if package not in packages])
    candidates = candidates | {name: tuple(versions) for name, versions in index.versions.items()}
    there = {name: versions for name, versions in candidates.items() if versions}
    return LockedRepository(fingerprint=fingerprint, packages=packages | chosen, candidates=there)


def check_key(url: str, index: PackageIndex, known: LockedRepository | None) -> str:
    """Return the fingerprint of the key that signed a repository. Raises ConfigError if it is not the known one."""
    if known is None or known.fingerprint in index.fingerprints:
        return known.fingerprint if known else index.fingerprints[0]
    raise ConfigError(
        f"{url}: is signed by the key {', '.join(index.fingerprints)}, but imagebuild.lock trusts "
        f"{known.fingerprint}; if its owner announced the change, `imagebuild lock --update {url}` takes the new key"
    )


def choose(versions: Mapping[str, Sequence[str]], packages: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return package → version, the one of `name=version` or else the newest, and why others are not there."""
    chosen, reasons = {}, []
    for package in packages:
        name, _, wanted = package.partition("=")
        available = versions.get(name, ())
        if available and wanted in ("", *available):
            chosen[package] = wanted or available[-1]
        elif available:
            shown = ", ".join(reversed(available[-SHOWN_VERSIONS:]))
            reasons.append(f"has no {name} in version {wanted}; the newest: {shown}")
        else:
            reasons.append(f"has no package {name}")
    return chosen, reasons


def name_of(package: str) -> str:
    """Return the name of a package that may come as `name=version`."""
    return package.partition("=")[0]
