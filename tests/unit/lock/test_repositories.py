"""Signed package repositories on a server of this machine."""

import gzip
import hashlib
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.http import Patience
from imagebuild.core.run import run_program
from imagebuild.lock.repositories import SIGNED, signed_release
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import LockedRepository, PackageSource
from tests.conftest import data
from tests.unit.conftest import at
from tests.upstream.server import Server

CASES = data("cases/lock/repositories")


def resolved(downloads: Server, *packages: str) -> LockedRepository:
    source = PackageSource(at(downloads, "repo/"), "/", at(downloads, "repo/key.asc"), packages)
    entry = Upstream(patience=Patience(0.1, 0.001)).resolve(source, None, lambda *_: None)
    assert isinstance(entry, LockedRepository)
    return entry


@pytest.mark.programs
def test_only_what_is_signed_counts(downloads: Server) -> None:
    text = (downloads.root / "repo" / "InRelease").read_bytes()
    downloads.replaced["/repo/InRelease"] = text.replace(b"Origin: test", b"Origin: evil")
    with pytest.raises(CommandError, match="the release is not signed by the repository's key: gpg says BADSIG"):
        resolved(downloads, "tool")
    other = gzip.compress(b"Package: tool\nVersion: 9\n")
    evil = f"SHA256:\n {hashlib.sha256(other).hexdigest()} 9 Packages.gz\n\n".encode()
    downloads.replaced["/repo/InRelease"] = evil + text
    assert resolved(downloads, "tool").packages == {"tool": "1:1.0"}


def test_a_release_that_is_not_signed_is_read_in_linear_time() -> None:
    head = b"-----BEGIN PGP SIGNED MESSAGE-----\n"
    assert not SIGNED.match(head + b"\n\n" * 500_000)
    assert not SIGNED.match(head + b"Hash: x\n" * 500_000)
    found = SIGNED.match(head + b"Hash: SHA512\r\n\r\nOrigin: a\n\nb\n-----BEGIN PGP SIGNATURE-----\n")
    assert found
    assert found["text"] == b"Origin: a\n\nb\n"


def test_a_suite_that_is_not_flat() -> None:
    with pytest.raises(ConfigError, match="the suite 'stable' is not flat"):
        Upstream().index(PackageSource("https://example.org/", "stable", "k", ()))


@pytest.mark.programs
@pytest.mark.parametrize(("key", "binding", "release", "system", "problem"), CASES["keys-that-apt-refuses"])
def test_keys_that_apt_refuses(tmp_path: Path, key: str, binding: str, release: str, system: str, problem: str) -> None:
    """The verdicts on debian13 are those of its sqv for the same keys."""
    (tmp_path / "home").mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--homedir", str(tmp_path / "home"), "--passphrase", "", "--cert-digest-algo", binding]
    subprocess.run([*gpg, "--quick-gen-key", "x@example.org", key, "sign"], check=True, capture_output=True)
    (tmp_path / "Release").write_text("Origin: test\n")
    sign = [*gpg, "--digest-algo", release, "--clearsign", str(tmp_path / "Release")]
    subprocess.run(sign, check=True, capture_output=True)
    public = subprocess.run([*gpg, "--export"], check=True, capture_output=True).stdout
    signed = (tmp_path / "Release.asc").read_bytes()
    with pytest.raises(CommandError, match=f"{problem}; ask the owner") if problem else nullcontext():
        found, (fingerprint,) = signed_release(run_program, public, signed, releases=[system])
        assert (found["Origin"], len(fingerprint)) == ("test", 40)
    subprocess.run(["gpgconf", "--homedir", str(tmp_path / "home"), "--kill", "all"], check=True)
