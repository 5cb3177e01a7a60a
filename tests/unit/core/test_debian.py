"""Debian's formats: releases, package indexes, versions, and the sources of apt."""

import gzip
import hashlib
import lzma
from datetime import UTC, datetime
from pathlib import Path

import pytest
import zstandard
from debian.deb822 import Release

from imagebuild.core.debian import (
    AptSource,
    Package,
    apt_sources,
    as_oneline,
    debian_sources,
    flat_repository_folder,
    installed_packages,
    invalid_because,
    offers_in_index,
    package_indexes,
    package_names,
    package_versions,
    parse_deb822,
    parse_oneline,
    sources_for_release,
    upstream_version,
    verified_index,
    version_key,
)
from imagebuild.core.errors import CommandError, ResultError
from tests.conftest import data
from tests.unit.conftest import APT_KEY, DEB822, ONE_LINE, AptMachine

CASES = data("cases/core/debian")

MAIN = "http://archive.example.org/debian"
SECURITY = "http://archive.example.org/debian-security"


def test_versions_sort_as_dpkg_sorts_them() -> None:
    order = ["0~~", "0", "1.0~rc1-1", "1.0-1", "1.0-1+b1", "1.2-1", "1.10-1", "2.32.3-1+cuda13.4", "1:0.1"]
    assert sorted({*order}, key=version_key) == order
    for text, problem in (("a b", "a b"), ("1" * 5000, "is longer than 1000 characters")):
        with pytest.raises(ResultError, match=problem):
            version_key(text)


def test_flat_repositories() -> None:
    assert flat_repository_folder("https://e/r/", "/") == flat_repository_folder("https://e/r", "./") == "https://e/r/"
    assert flat_repository_folder("https://e/r/", "u24/") == "https://e/r/u24/"
    assert flat_repository_folder("https://e/r/", "stable") is None


def test_a_release_that_is_over() -> None:
    release = Release("Origin: x\nValid-Until: Sat, 21 Nov 2026 00:00:00 UTC\n")
    assert invalid_because(release, datetime(2026, 11, 20, tzinfo=UTC)) is None
    assert "until Sat, 21 Nov 2026 00:00:00 UTC" in str(invalid_because(release, datetime(2026, 11, 22, tzinfo=UTC)))
    assert invalid_because(Release(), datetime(2026, 11, 22, tzinfo=UTC)) is None
    for zone in ("UTC", "-0000"):
        release = Release(f"Date: Sat, 21 Nov 2026 00:00:00 {zone}\n")
        assert invalid_because(release, datetime(2026, 11, 21, tzinfo=UTC)) is None
        assert "in the future" in str(invalid_because(release, datetime(2026, 11, 20, 23, 59, tzinfo=UTC)))
    for text in ("soon", "Fri, 31 Dec 9999 23:59:59 -1200", "Fri, 31 Dec 2020 23:59:59 +99999999999999"):
        with pytest.raises(ResultError, match="is not a date"):
            invalid_because(Release({"Valid-Until": text}), datetime(2026, 11, 22, tzinfo=UTC))


def test_the_smallest_index_first_and_no_weak_hash() -> None:
    text = f"MD5Sum:\n {'0' * 32} 1 Packages.xz\nSHA256:\n {'1' * 64} 9 Packages\n {'2' * 64} 5 ./Packages.gz\n"
    found = package_indexes(Release(text))
    assert found == (("Packages.gz", "Packages.gz", "2" * 64), ("Packages", "Packages", "1" * 64))
    assert package_indexes(Release(f"SHA1:\n {'1' * 40} 9 Packages\n")) == ()
    for line in ("SHA256: abc", "SHA256:\n abc", "SHA256:\n abc 5"):
        with pytest.raises(ResultError, match="is not a list of hashes"):
            package_indexes(Release(f"{line}\n"))
    by_hash = package_indexes(Release(f"Acquire-By-Hash: yes\nSHA256:\n {'1' * 64} 9 main/Packages.zst\n"), "main/")
    assert [path for path, _, _ in by_hash] == [f"main/by-hash/SHA256/{'1' * 64}", "main/Packages.zst"]


INDEX: str = CASES["index"]


OTHERS: str = CASES["others"]


def test_versions_of_the_packages_that_are_asked_for() -> None:
    """An invalid version does not count, and neither does a version for only another architecture."""
    versions = ["2.9.9-1+cuda12.9", "2.31.2-1+cuda12.9", "2.32.3-1+cuda12.9"]
    assert offers_in_index(INDEX, ["libnccl2", "gone"])[:2] == ({"libnccl2": versions, "gone": []}, {})
    offers = offers_in_index(f"{INDEX}{OTHERS}".replace("\n", "\r\n"), ["libnccl2", "gone"], ["amd64"])
    assert offers[:2] == ({"libnccl2": versions, "gone": []}, {"libnccl2": ["libnccl2t64"], "gone": ["libnccl2t64"]})
    assert offers_in_index(INDEX, ["libnccl2"], ["amd64", "arm64"]).versions["libnccl2"] == [versions[0], versions[2]]
    assert package_names(INDEX) == {"libnccl2", "other"}


def test_the_upstream_part_of_a_version() -> None:
    texts = ("6.0.0+really5.0.9-3build1", "1:10.0p1-7+deb13u1", "56.1", "2:1.0-rc1-2")
    assert [upstream_version(text) for text in texts] == ["5.0.9", "10.0p1", "56.1", "1.0-rc1"]


@pytest.mark.parametrize(
    ("path", "pack"),
    [("Packages.xz", lzma.compress), ("Packages.gz", gzip.compress), ("Packages.zst", zstandard.compress)],
)
def test_an_index_is_what_the_release_says(path: str, pack: object) -> None:
    assert callable(pack)
    content = pack(INDEX.encode())
    digest = hashlib.sha256(content).hexdigest()
    assert verified_index(path, path, digest, content) == INDEX
    with pytest.raises(CommandError, match=f"{path} has the SHA256 .*, but the signed release says {digest}"):
        verified_index(path, path, digest, content + b"x")
    broken = b"no archive"
    with pytest.raises(ResultError, match="cannot be unpacked"):
        verified_index(path, path, hashlib.sha256(broken).hexdigest(), broken)


def test_installed_packages() -> None:
    status = (
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nSource: glibc (2.41)\nVersion: 2.41-12\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n"
        "Package: libfoo\nArchitecture: i386\nVersion: 1.0\n"  # images without dpkg have no status
    )
    found = installed_packages(status)
    assert found == (Package("libc6", "2.41-12", "amd64", "glibc (2.41)"), Package("libfoo", "1.0", "i386"))
    assert package_versions(found, "amd64") == {"libc6": "2.41-12", "libfoo:i386": "1.0"}


@pytest.mark.parametrize("start", ["", "\r", " "])
def test_a_database_of_an_image_names_no_file_of_this_machine(start: str, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Package: secret\nTypes: deb\nURIs: http://secret\nSuites: x\n")
    assert installed_packages(f"{start}{tmp_path}/status") == ()
    assert parse_deb822(f"{start}{tmp_path}/status") == ()


def test_both_formats_of_sources() -> None:
    found = parse_deb822(DEB822)
    assert [(s.uri, s.suite) for s in found] == [
        (MAIN, "bookworm"), (MAIN, "bookworm-updates"), (MAIN, "bookworm-backports"),
        (f"{SECURITY}/", "bookworm-security"),
    ]  # fmt: skip
    assert (found[0].components, found[0].signed_by) == (("main", "contrib"), APT_KEY)
    assert "abc" in (found[3].signed_by or "")
    plain = (
        AptSource(MAIN, "bookworm", ("main", "contrib"), APT_KEY),
        AptSource(SECURITY, "bookworm-security", ("main",)),
    )
    assert parse_oneline(ONE_LINE) == plain == parse_oneline(as_oneline(plain))
    assert "PGP" not in as_oneline(found)


def test_sources_are_read_from_every_file_and_of_mirrors_the_first(here: AptMachine) -> None:
    (here.etc / "sources.list").write_text(ONE_LINE)
    here.listing("same.list").write_text(ONE_LINE)
    here.listing("off.list.disabled").write_text("deb http://disabled.example.org bookworm main\n")
    (here.etc / "mirrors").write_text("# ours\nhttp://first.example.org\tpriority:1\nhttp://second.example.org\n")
    here.listing("cloud.list").write_text(f"deb mirror+file://{here.etc}/mirrors bookworm main\n")
    found = apt_sources()
    assert len(found) == 6  # bookworm main is in both files
    assert AptSource("http://first.example.org", "bookworm", ("main",)) in found
    assert not any("disabled" in s.uri for s in found)


def test_for_release_translates_the_archive_and_ignores_third_parties() -> None:
    others = (
        AptSource("http://vendor.example.org", "bookworm", ("stable",)),
        AptSource("http://vendor2.example.org", "bookworm", ("main",), "/etc/apt/keyrings/vendor2.gpg"),
        AptSource("http://vendor3.example.org", "bookworm-pgdg", ("main",)),
    )
    assert sources_for_release((*others, *parse_oneline(ONE_LINE)), "bookworm", "trixie") == (
        AptSource(MAIN, "trixie", ("main", "contrib"), APT_KEY),
        AptSource(SECURITY, "trixie-security", ("main",)),
    )
    # A key of the site that signs the updates, too, is that of the distribution's mirror.
    mirror = [AptSource(MAIN, s, ("main",), "/etc/inhouse.gpg") for s in ("bookworm", "bookworm-updates")]
    assert [s.suite for s in sources_for_release(mirror, "bookworm", "trixie")] == ["trixie", "trixie-updates"]


def test_debian_lines(here: AptMachine) -> None:
    assert as_oneline(debian_sources()).splitlines() == [
        f"deb [signed-by={APT_KEY}] {MAIN} trixie main",
        f"deb [signed-by={APT_KEY}] {MAIN} trixie-updates main",
        f"deb {SECURITY}/ trixie-security main",
    ]
    here.become("ubuntu", "24.04", "noble")
    assert debian_sources() == ()
    here.release.clear()
    assert debian_sources() == ()
