"""Signed package repositories on a server of this machine."""

import gzip
import hashlib

import pytest

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.http import Patience
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import LockedRepository, PackageSource
from tests.unit.conftest import at
from tests.upstream.server import Server


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


def test_a_suite_that_is_not_flat() -> None:
    with pytest.raises(ConfigError, match="the suite 'stable' is not flat"):
        Upstream().index(PackageSource("https://example.org/", "stable", "k", ()))
