"""Signed package repositories: the key that signs a repository, and the versions of its packages."""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from debian.arfile import ArError, ArFile
from debian.deb822 import Release

from imagebuild.core import debian
from imagebuild.core.debian import Offers
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.http import Downloads
from imagebuild.core.patterns import DataFile
from imagebuild.core.run import RunProgram
from imagebuild.lock.facts import UNREADABLE, open_tar
from imagebuild.oci.tar import TarError
from imagebuild.project.lockfile import LockedRepository, PackageSource

TIMEOUT_S = 60
SIGNED = re.compile(
    rb"(?s)\A-----BEGIN PGP SIGNED MESSAGE-----[ \t\r]*\n(?:\w[^\n]*\n)*+\r?\n"
    rb"(?P<text>.*)-----BEGIN PGP SIGNATURE-----.*"
)
SHOWN = 5
"""Maximum number of versions or packages in a message."""
KEY_REMEDY = "set `key` of the component's `repository` to the URL of its key"
_DATA = DataFile(__file__)
_RE, _WEAK = _DATA.patterns, _DATA["weak_hashes"]


def signed_release(
    run: RunProgram, key: bytes, content: bytes, signature: bytes | None = None, releases: Iterable[str] = ()
) -> tuple[Release, tuple[str, ...]]:
    """Verify a Release file. Return its content, and the fingerprints of the primary keys that signed the file.

    `content` contains the release and its signature, or only the release if `signature` is separate. `key` contains one
    or more public keys, armoured or binary. `releases` are values of the axis `os` whose apt must accept a signature.
    Raises CommandError if no key has signed the release, if a signature belongs to another text, if the release has
    expired, or if apt refuses all signatures."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-gpg-") as name:
        folder = Path(name)
        keys, signed, text, status = (folder / name for name in ("keys", "signed", "text", "status"))
        gpg, most = (*_DATA["gpg"], name), str(_DATA["most"]["release"])
        keys.write_bytes(key)
        signed.write_bytes(content if signature is None else signature)
        check: tuple[str, ...] = ("--max-output", most, "--output", str(text), "--decrypt", str(signed))
        if signature is not None:
            text.write_bytes(content)
            check = ("--verify", str(signed), str(text))
        for words in (("--import", str(keys)), check):
            status.unlink(missing_ok=True)
            try:
                run(*gpg, "--status-file", str(status), *words, timeout=TIMEOUT_S)
            except CommandError as error:
                # The status lines count, not the exit status: gpg fails if a second signature is by an unknown key.
                if not status.exists():
                    raise CommandError(f"signatures cannot be checked: {error}; install gpg (package gnupg)") from None
        good, others = _signatures(status.read_text(errors="replace"))
        if not good or any(words.startswith("BADSIG") for words in others):
            found = f"gpg says {', '.join(others)}" if others else "there is no signature"
            raise CommandError(
                f"the release is not signed by the repository's key: {found}; {debian.RETRY}, or {KEY_REMEDY}"
            )
        exported = folder / "exported"
        run(*gpg, "--output", str(exported), "--export", timeout=TIMEOUT_S)
        packets = run(*gpg, "--list-packets", str(exported), timeout=TIMEOUT_S)
        problems = {signature: refusal(packets, signature, [*releases]) for signature in good}
        if all(problems.values()):
            listed = "; ".join(dict.fromkeys(problems.values()))
            raise CommandError(f"{listed}; ask the owner of the repository for a stronger key, or {KEY_REMEDY}")
        # Read the output of gpg, which leaves out text around the signed part.
        release = Release(text.read_bytes().decode(errors="replace"))
    if problem := debian.invalid_because(release, datetime.now(UTC)):
        raise CommandError(f"the release {problem}")
    return release, tuple(dict.fromkeys(signature.primary for signature in good if not problems[signature]))


class Signature(NamedTuple):
    """A valid signature: fingerprints of the key or subkey that made it and of its primary key, and hash algorithm."""

    signer: str
    primary: str
    digest: int


DSA = "17"
"""Number of the algorithm DSA in OpenPGP."""


def refusal(packets: str, signature: Signature, releases: Sequence[str]) -> str:
    """Return why the apt of these releases refuses a valid signature; empty if it accepts the signature.
    `packets` describes the keys, as `gpg --list-packets` prints it."""
    if signature.digest in _WEAK:
        return f"the signature of the release uses {_WEAK[signature.digest]}, which apt refuses"
    strict = [release for release in releases if _RE["sqv_releases"].match(release)]
    main, own, keys, bound = "", "", dict[str, re.Match[str]](), dict[str, set[int]]()
    for kind, text in _RE["packet"].findall(packets):
        if kind.startswith("public") and (key := _RE["public_key"].search(text)):
            own = key["id"]
            main = own if kind == "public key" else main
            keys[own] = key
        elif kind == "signature" and (binding := _RE["signature"].search(text)):
            kinds = _DATA["bindings" if own == main else "subkey_bindings"]
            if binding["by"] == main and binding["kind"].upper() in kinds:
                bound.setdefault(own, set()).add(int(binding["hash"]))
    for fingerprint in dict.fromkeys((signature.primary, signature.signer)) if strict else ():
        number = fingerprint[-16:]
        hashes, found = bound.get(number, set()), keys.get(number)
        if hashes and not hashes - {*_WEAK}:
            weak = ", ".join(_WEAK[code] for code in sorted(hashes))
            return f"the key {fingerprint} is bound by {weak}, which the apt of {', '.join(strict)} refuses"
        if found and int(found["bits"]) < _DATA["least_bits"].get(found["algorithm"], 0):
            name = "DSA" if found["algorithm"] == DSA else f"RSA with {found['bits']} bits"
            return f"the key {fingerprint} uses {name}, which the apt of {', '.join(strict)} refuses"
    return ""


def _signatures(status: str) -> tuple[list[Signature], list[str]]:
    """Return the valid signatures, and texts about the invalid signatures."""
    good, others = list[Signature](), list[str]()
    for part in re.split(r"^\[GNUPG:\] NEWSIG", status, flags=re.MULTILINE)[1:]:
        lines = {words[1]: words[2:] for line in part.splitlines() if len(words := line.split()) > 1}
        bad = [f"{kind} {lines[kind][0]}" for kind in _DATA["not_good"] if kind in lines]
        others += bad[:1]
        if not bad and "GOODSIG" in lines and "VALIDSIG" in lines:
            words = lines["VALIDSIG"]
            good.append(Signature(words[0], words[-1], int(words[7])))
    return good, others


def read_index(run: RunProgram, web: Downloads, source: PackageSource) -> Offers:
    """Return the versions of a source's packages in the signed index of its repository.

    Raises Unreachable or Absent if a file cannot be fetched, CommandError if a signature or a hash is wrong or the
    release has expired, ConfigError if the suite is not flat, and ResultError if the index cannot be read."""
    base = debian.flat_repository_folder(source.url, source.suite)
    if base is None:
        raise ConfigError(
            f"{source.url}: the suite {source.suite!r} is not flat, so it cannot be locked; use a suite that ends in /"
        )
    try:
        try:
            content, signature = web.read(f"{base}InRelease"), None
        except Absent:
            content, signature = web.read(f"{base}Release"), web.read(f"{base}Release.gpg")
        kind, _, package = source.key.partition(":")
        if kind == "package":
            if signature is None and not SIGNED.match(content):
                raise CommandError("InRelease has no signature; try again without a proxy")
            # This release is not trusted yet. It only leads to the key that verifies everything below.
            unsigned = SIGNED.sub(rb"\g<text>", content).decode(errors="replace")
            key = key_in_package(
                web, base, read_packages(web, base, debian.package_indexes(Release(unsigned))), package
            )
        else:
            key = web.read(source.key)
        release, fingerprints = signed_release(run, key, content, signature, source.releases)
        index = read_packages(web, base, debian.package_indexes(release))
        return debian.offers_in_index(index, map(name_of, source.packages), source.archs, fingerprints)
    except ImagebuildError as error:
        named = source.url in str(error) or source.key in str(error)
        raise error if named else type(error)(f"{source.url}: {error}") from None


def read_suite(run: RunProgram, web: Downloads, suite: tuple[str, bytes], arch: str, packages: Iterable[str]) -> Offers:
    """Return the versions of packages in `main` of a distribution's suite, given by its URL and the key that signs it.
    Raises the same errors as `read_index`."""
    base, key = suite
    try:
        release, fingerprints = signed_release(run, key, web.read(f"{base}InRelease"))
        index = read_packages(web, base, debian.package_indexes(release, f"main/binary-{arch}/"))
    except ImagebuildError as error:
        raise error if base in str(error) else type(error)(f"{base}: {error}") from None
    return debian.offers_in_index(index, packages, signed_by=fingerprints)


def read_packages(web: Downloads, base: str, listed: Iterable[tuple[str, str, str]]) -> str:
    """Return the text of a package index that a release lists, as `debian.package_indexes` returns it."""
    for path, name, digest in listed:
        try:
            content = web.read(base + path)
        except Absent:
            continue  # a release may list indexes that the server does not have
        return debian.verified_index(path, name, digest, content)
    raise ResultError(
        "the server has no package index that the signed release lists with a SHA256 (one of "
        f"{', '.join(debian.UNPACK)}); try again, use another mirror, or ask the owner of the repository for one"
    )


def key_in_package(web: Downloads, base: str, index: str, package: str) -> bytes:
    """Return the keys in the newest version of a package in a repository."""
    order = debian.offers_in_index(index, [package]).versions[package]
    found = [
        p for p in debian.paragraphs_about(index, [package]) if p.get("Version") in order and p["Package"] == package
    ]
    newest: Mapping[str, str] = max(found, key=lambda paragraph: order.index(paragraph["Version"]), default={})
    if not (path := newest.get("Filename", "").removeprefix("./")):
        raise ConfigError(f"the repository has no package {package}, which should contain its key; {KEY_REMEDY}")
    content = web.read(base + path)
    if hashlib.sha256(content).hexdigest() != newest.get("SHA256"):
        raise CommandError(f"{path} does not have the sha256 in the package index; {debian.RETRY}")
    keys: list[bytes] = []
    try:
        parts = ArFile(fileobj=io.BytesIO(content)).getmembers()
        packed = open_tar(io.BytesIO(next(part.read() for part in parts if part.name.startswith("data.tar"))))
        for member in packed:
            if member.kind == "file" and _RE["keyring"].search(member.name):
                if member.size > (most := _DATA["most"]["key"]):
                    raise TarError(f"{member.name} is larger than {most} bytes")
                keys.append(b"".join(packed.content()))
    except (ArError, StopIteration, *UNREADABLE) as error:
        raise ResultError(f"{path} cannot be unpacked: {error}; {KEY_REMEDY}") from None
    if not keys:
        raise ResultError(f"the package {package} has no keyring in /usr/share/keyrings; {KEY_REMEDY}")
    return b"".join(keys)


def locked_repository(source: PackageSource, index: Offers, known: LockedRepository | None) -> LockedRepository:
    """Return the lock entry of a repository: its key, and the versions of the requested packages.

    `known` is the existing entry, whose versions are kept. A package that the repository does not have gets no version.
    Raises ConfigError if the repository differs from the `known` entry, as `check_known` does."""
    fingerprint = check_known(source.url, index, known)
    packages, candidates = (known.packages, known.candidates) if known else ({}, {})
    chosen, _ = choose(index.versions, [package for package in source.packages if package not in packages])
    candidates = candidates | {name: tuple(versions) for name, versions in index.versions.items()}
    there = {name: versions for name, versions in candidates.items() if versions}
    return LockedRepository(fingerprint=fingerprint, packages=packages | chosen, candidates=there)


def check_known(url: str, index: Offers, known: LockedRepository | None) -> str:
    """Return the fingerprint of the key that signed a repository.
    Raises ConfigError if the lock has another key, or another hash of a package."""
    for package, sha256 in (known.hashes or {}).items() if known else ():
        if sha256 not in index.hashes.get(package, [sha256]):
            listed = ", ".join(index.hashes[package])
            problem = f"{package} has the sha256 {listed}, but imagebuild.lock says {sha256}"
            raise ConfigError(f"{url}: {problem}; {debian.RETRY}")
    if known is None or known.fingerprint in index.signed_by:
        return known.fingerprint if known else index.signed_by[0]
    raise ConfigError(
        f"{url}: is signed by the key {', '.join(index.signed_by)}, but imagebuild.lock trusts "
        f"{known.fingerprint}; if the owner of the repository announced the new key, run "
        f"`imagebuild lock --update {url}`"
    )


def choose(
    versions: Mapping[str, Sequence[str]],
    packages: Iterable[str],
    providers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[dict[str, str], list[str]]:
    """Return the version of each available package, and a message about each missing package or version.
    The version is the one in `name=version`, or else the newest."""
    chosen, reasons = {}, []
    for package in packages:
        name, _, wanted = package.partition("=")
        available = versions.get(name, ())
        if available and wanted in ("", *available):
            chosen[package] = wanted or available[-1]
        else:
            reasons.append(missing(package, available, providers.get(name, ())))
    return chosen, reasons


def missing(package: str, versions: Sequence[str], providers: Iterable[str]) -> str:
    """Return why an archive lacks a package or its version. `versions` contains the versions of the package, oldest
    first, and `providers` the packages that provide it."""
    name, _, wanted = package.partition("=")
    if versions:
        shown = ", ".join(reversed(versions[-SHOWN:]))
        return f"has no {name} in version {wanted}; the newest: {shown}"
    others = ", ".join([*providers][:SHOWN])
    return f"has no package {name}" + (f"; request a package that provides it: {others}" if others else "")


def name_of(package: str) -> str:
    """Return the name of a package without the version, for `name` or `name=version`."""
    return package.partition("=")[0]
