"""Releases, indexes and versions of Debian repositories."""

import gzip
import hashlib
import itertools
import lzma
from datetime import UTC, datetime

import pytest

from imagebuild.core import (
    CommandError,
    ResultError,
    compare_versions,
    expired_since,
    flat_repository_folder,
    package_indexes,
    parse_paragraph,
    run_program,
    verified_index,
    versions_in_index,
    which,
)

ORDER = ["0~~", "0~", "0", "0-0.1", "0-1", "0a", "1~rc1", "1.0~rc1-1", "1.0-1", "1.0-1+b1", "1.0a-1", "1.0+dfsg-1",
         "1.2-1", "1.10-1", "2.32.3-1+cuda12.9", "2.32.3-1+cuda13.4", "2.32.3-2", "1:0.1", "2:0"]  # fmt: skip


def test_versions_sort_as_policy_says() -> None:
    for (i, a), (j, b) in itertools.product(enumerate(ORDER), repeat=2):
        sign = (compare_versions(a, b) > 0) - (compare_versions(a, b) < 0)
        assert sign == (i > j) - (i < j), (a, b)


def test_versions_that_are_equal() -> None:
    assert compare_versions("1.0", "0:1.0") == 0
    assert compare_versions("1.0-0", "1.0") == 0
    assert compare_versions("1.01", "1.1") == 0


@pytest.mark.programs
@pytest.mark.skipif(not which("dpkg"), reason="no dpkg here to compare with")
def test_dpkg_sorts_them_the_same_way() -> None:
    for a, b in itertools.pairwise([*ORDER, "1.0", "1.0.0", "1.0+1", "1.0-1", "1.0~", "9.26.0.51-1", "26.10~rc2"]):
        relation = {1: "gt", 0: "eq", -1: "lt"}[(compare_versions(a, b) > 0) - (compare_versions(a, b) < 0)]
        run_program("dpkg", "--compare-versions", a, relation, b)  # raises if dpkg sees it otherwise


@pytest.mark.parametrize(
    ("url", "suite", "base"),
    [
        ("https://e/r/", "/", "https://e/r/"),
        ("https://e/r", "./", "https://e/r/"),
        ("https://e/r/", "u24/", "https://e/r/u24/"),
        ("https://e/r/", "stable", None),
    ],
)
def test_flat_repositories(url: str, suite: str, base: str | None) -> None:
    assert flat_repository_folder(url, suite) == base


def test_a_release_that_is_over() -> None:
    release = parse_paragraph("Origin: x\nValid-Until: Sat, 21 Nov 2026 00:00:00 UTC\n")
    assert expired_since(release, datetime(2026, 11, 20, tzinfo=UTC)) is None
    assert expired_since(release, datetime(2026, 11, 22, tzinfo=UTC)) == "Sat, 21 Nov 2026 00:00:00 UTC"
    assert expired_since({}, datetime(2026, 11, 22, tzinfo=UTC)) is None
    with pytest.raises(ResultError, match="is not a date"):
        expired_since({"Valid-Until": "soon"}, datetime(2026, 11, 22, tzinfo=UTC))


def test_the_smallest_index_first_and_no_weak_hash() -> None:
    text = f"MD5Sum:\n {'0' * 32} 1 Packages.xz\nSHA256:\n {'1' * 64} 9 Packages\n {'2' * 64} 5 ./Packages.gz\n"
    found = list(package_indexes(parse_paragraph(text)))
    assert [(path, algorithm, digest[:1]) for path, algorithm, digest in found] == [
        ("Packages.gz", "SHA256", "2"), ("Packages", "SHA256", "1"),
    ]  # fmt: skip
    assert list(package_indexes(parse_paragraph(f"SHA1:\n {'1' * 40} 9 Packages\n"))) == []


INDEX = """\
Package: libnccl2
Architecture: amd64
Version: 2.31.2-1+cuda12.9
Description: one
 Package: not-a-package

Package: libnccl2
Version: 2.32.3-1+cuda12.9

Package: libnccl2
Version: 2.9.9-1+cuda12.9
 \t
Package: other
Version: 1
"""


def test_versions_of_the_packages_that_are_asked_for() -> None:
    assert versions_in_index(INDEX, ["libnccl2", "gone"]) == {
        "libnccl2": ["2.9.9-1+cuda12.9", "2.31.2-1+cuda12.9", "2.32.3-1+cuda12.9"], "gone": [],
    }  # fmt: skip


@pytest.mark.parametrize(("path", "pack"), [("Packages.xz", lzma.compress), ("Packages.gz", gzip.compress)])
def test_an_index_is_what_the_release_says(path: str, pack: object) -> None:
    assert callable(pack)
    content = pack(INDEX.encode())
    digest = hashlib.sha256(content).hexdigest()
    assert verified_index(path, "SHA256", digest, content) == INDEX
    with pytest.raises(CommandError, match=f"{path} has the SHA256 .*, but the signed release says {digest}"):
        verified_index(path, "SHA256", digest, content + b"x")
    broken = b"no archive"
    with pytest.raises(ResultError, match="cannot be unpacked"):
        verified_index(path, "SHA256", hashlib.sha256(broken).hexdigest(), broken)
