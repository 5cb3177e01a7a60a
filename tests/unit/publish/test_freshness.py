"""Published images with outdated packages: a registry in memory, and a signed archive over HTTP."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imagebuild.oci import registry
from imagebuild.oci.layout import manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.publish.freshness import Freshness, published_images
from imagebuild.publish.signatures import Signer
from tests.attached import scan
from tests.publish_fakes import AMD64, ARM64, HOST, NEW, OLD, Site
from tests.registry_fake import FakeRegistry, index
from tests.unit.conftest import Call
from tests.unit.publish.conftest import Signers
from tests.upstream.keys import CUDA, STRANGER, Keys
from tests.upstream.server import Server

pytestmark = pytest.mark.programs
SUITE = "trixie-security"
ARCHIVE = "https://archive.invalid/"
HAS = "3.5.7-1~deb13u3"
"""Version of libssl3t64 in the SBOM of every image here."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A target is published with an SBOM for each platform; the other target is not."""
    site = Site(tmp_path, fake=FakeRegistry())
    site.files.replace("matrix.yaml", '{image: "debian:13-slim"}', '{image: "debian:13-slim", release: trixie}')
    site.read()
    for digest in site.ready(NEW).values():
        site.listed(digest)
    assert site.publish().only.attached["sbom"] == 4  # of the platforms, and of the index
    monkeypatch.chdir(site.files.root)
    monkeypatch.setattr(registry, "connect_registry", lambda _: site.fake)
    return site


Look = Callable[..., tuple[int, Freshness | None, str]]


@pytest.fixture
def look(site: Site, keys: Keys, command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Look]:
    """Publish a version of the package in the archive, which has a mirror, and ask; the status, the result, and what is said."""

    def ask(version: str, *select: str, by: str = CUDA) -> tuple[int, Freshness | None, str]:
        index = f"Package: libssl3t64\nVersion: {version}\n\n".encode()
        indexes = {f"main/binary-{arch}/Packages.gz": gzip.compress(index) for arch in ("amd64", "arm64")}
        keys.publish(tmp_path / "server/dists" / SUITE, indexes, by)
        result = tmp_path / "freshness.json"
        result.unlink(missing_ok=True)
        where = ("--archive", ARCHIVE, "--suite", SUITE)
        keyring = ("--keyring", str(keys.public / f"{CUDA}.gpg"))
        status, out, err = command("freshness", *select, *where, *keyring, "--json", str(result))
        found = Freshness.model_validate_json(result.read_text()) if result.exists() else None
        return status, found, out + err

    with Server(tmp_path / "server").running() as server:
        mirror = {"mirrors": {"downloads": {ARCHIVE: f"http://127.0.0.1:{server.port}/"}}}
        (tmp_path / "config.yaml").write_text(json.dumps(mirror))
        monkeypatch.setenv("IMAGEBUILD_CONFIG", str(tmp_path / "config.yaml"))
        yield ask


def test_a_package_with_a_newer_version(look: Look, site: Site) -> None:
    site.fake.asked.clear()
    status, found, out = look("3.5.7-1~deb13u10", NEW)  # later than u3, though not by its letters
    assert status == 1
    assert found
    updates = {"libssl3t64": f"{HAS} → 3.5.7-1~deb13u10"}
    published = published_images([site.target(NEW)], lambda _: site.fake)
    assert [image.platform for image in published] == [AMD64, ARM64]
    assert list(found.images) == [image.model_copy(update={"updates": updates}) for image in published]
    assert "2 of 2 images have packages with updates; updates are unknown for 0 images" in out
    # The index of the target; of each platform, what refers to it, and the manifest and the content of its SBOM.
    assert len(site.fake.asked) == 1 + 2 * 3 + 1


def test_what_is_not_known_is_said_and_is_no_pass(look: Look, site: Site) -> None:
    assert look("3.5.7-1~deb13u2", NEW)[0] == 0
    status, _, out = look(HAS, NEW, OLD)
    assert (status, "cuda12.9: is not published" in out) == (1, True)
    held = site.fake.repositories["acme/tiny"]
    held.manifests = {digest: m for digest, m in held.manifests.items() if "spdx.dev" not in json.dumps(m.document)}
    status, _, out = look(HAS, NEW)
    assert status == 1
    assert f"updates unknown: {NEW} {AMD64}: the image has no readable SBOM" in out


def test_only_an_index_that_the_signer_signed_under_its_alias_counts(site: Site, signers: Signers) -> None:
    """Who can push could else put an alias on the images of another target, which need no update."""
    place, trust, (alias, *_) = site.fake.at("acme/tiny"), signers.trust(), site.target(NEW).aliases
    tag = alias.rpartition(":")[2]

    def problems(by: Signer | None = trust) -> list[str]:
        return [image.problem for image in published_images([site.target(NEW)], lambda _: site.fake, by)]

    assert ["no signatures found" in problem for problem in problems()] == [True]
    good = place.manifest(str(place.digest(tag)))
    signers.signer().sign([parse_reference(f"{alias}@{good.digest}")])
    assert problems() == ["", ""]
    first, *_ = manifests_of(good.document)
    signers.signer().sign([parse_reference(f"{alias}@{index(site.fake, 'acme/tiny', [first], tag)}")])
    assert ["does not state its tags" in problem for problem in problems()] == [True]
    assert problems(None) == ["", f"{alias}: is not published for {ARM64}"]


def test_an_archive_that_cannot_be_believed(look: Look) -> None:
    status, result, out = look(HAS, NEW, by=STRANGER)
    assert (status, result, "gpg says ERRSIG" in out) == (4, None, True)


@pytest.mark.parametrize(
    ("package", "fixed", "status"), [("libssl3t64", "2", 1), ("libssl3t64", None, 0), ("a-wheel", "2", 0)]
)
def test_a_failed_scan_that_a_rebuild_fixes(
    look: Look, site: Site, tmp_path: Path, package: str, fixed: str | None, status: int
) -> None:
    """A rebuild installs the newer packages of the distribution, if there are any, and nothing else."""
    finding = {"id": "CVE-1", "severity": "high", "package": package, "version": "1", "fixed_in": fixed, "fails": True}
    digest = published_images([site.target(NEW)], lambda _: site.fake)[0].digest
    (tmp_path / "scan.json").write_text(json.dumps(scan(digest, "failed", findings=[finding])))
    found = look(HAS, NEW, "--scans", str(tmp_path))
    assert (found[0], found[1] and found[1].rebuild) == (status, (NEW,) if status else ())
    missing = look(HAS, NEW, "--scans", str(tmp_path / "none"))
    assert (missing[0], "does not exist; name a folder" in missing[2]) == (2, True)


def test_a_command_for_each_published_image(
    site: Site, command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; open(sys.argv[2] + '/name', 'w').write(sys.argv[1])"
    words = (sys.executable, "-c", script, "{image} {index} {target} {arch}", "{folder}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("IMAGEBUILD_PROJECT", str(site.files.root))
    status, _, err = command("each", tmp_path / "each", "--published", f"{HOST}/acme", "--", *words)
    assert (status, f"{OLD}: {HOST}/acme/tiny:cuda12.9: is not published" in err) == (0, True)
    for image in published_images([site.target(NEW)], lambda _: site.fake):
        arch = image.platform.removeprefix("linux/")
        text = (tmp_path / f"each/{NEW}-{arch}/name").read_text()
        index = site.fake.at("acme/tiny").digest("latest")
        assert text == f"{HOST}/acme/tiny@{image.digest} {HOST}/acme/tiny@{index} {NEW} {arch}"
    assert command("each", tmp_path / "each", "--published", f"{HOST}/nobody", "--", "true")[0] == 3


def test_an_alias_that_names_the_image_of_another_target(site: Site) -> None:
    tags = site.fake.repositories["acme/tiny"].tags
    (alias,) = (name for name in site.target(OLD).aliases if name not in site.target(NEW).aliases)
    tags[alias.rpartition(":")[2]] = tags["latest"]
    (found,) = published_images([site.target(OLD)], lambda _: site.fake)
    assert f"{HOST}/acme/tiny:cuda12.9: the index was published as {HOST}/acme/tiny:cuda13.0" in found.problem
