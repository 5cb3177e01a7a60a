"""The packages that images install from the archive of a distribution, on a server of this machine."""

import hashlib
import lzma
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core.errors import ImagebuildError
from imagebuild.core.http import Patience
from imagebuild.lock import distribution
from imagebuild.lock.distribution import (
    Distribution,
    ReleasePackages,
    archive_of,
    installed_packages,
    package_name,
)
from imagebuild.lock.resolve import release_packages
from imagebuild.lock.upstream import Upstream
from imagebuild.project.matrix import Base
from imagebuild.project.plan import Plan
from imagebuild.project.project import Project
from imagebuild.render.renderer import Renderer
from tests.conftest import data
from tests.upstream import packages
from tests.upstream.keys import Keys
from tests.upstream.server import Server

CASES = data("cases/lock/distribution")

OFFERED = CASES["offered"]
"""Maps each suite and component to its packages: name, version, provided package."""


def publish(root: Path, keys: Keys, row: dict[str, Any]) -> None:
    """Write the files of an archive, which is signed by the key of a row."""
    by = row.get("signed", "cuda")
    keyring = packages.package_with({"usr/share/keyrings/distro.gpg": (keys.public / f"{by}.gpg").read_bytes()})
    (root / "pool").mkdir(parents=True)
    (root / "pool/keyring.deb").write_bytes(keyring)
    for suite, components in OFFERED.items():
        folder, files = root / "dists" / suite, dict[str, bytes]()
        for component, offered in components.items():
            index = ""
            for name, version, provided in (text.split(" ", 2) for text in offered.split(", ") if text):
                index += f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nProvides: {provided}\n"
                index += f"Filename: pool/keyring.deb\nSHA256: {hashlib.sha256(keyring).hexdigest()}\n\n"
            content = files[f"{component}/binary-amd64/Packages.xz"] = lzma.compress(index.encode())
            by_hash = folder / component / "binary-amd64/by-hash/SHA256"
            by_hash.mkdir(parents=True)
            (by_hash / hashlib.sha256(content).hexdigest()).write_bytes(content)
        keys.publish(folder, files, by, f"Acquire-By-Hash: yes\n{row.get('more', '')}".strip())
    for gone in row.get("gone", ()):
        for path in root.rglob(f"dists/**/{gone}"):
            path.unlink()


@pytest.mark.programs
@pytest.mark.parametrize("row", data("worlds/distributions"), ids=lambda row: row["says"])
def test_what_becomes_of_each_archive(
    row: dict[str, Any], keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "host", keys, row)
    with Server(tmp_path).running() as server:
        known = Distribution(
            releases={"26.04": "release"},
            keyring="distro-keyring",
            keys=(keys.fingerprint("cuda"),),
            components=("main", "universe"),
            suites={"amd64": tuple(f"http://127.0.0.1:{server.port}/host/dists/{suite}/" for suite in OFFERED)},
        )
        monkeypatch.setattr(distribution, "known_distributions", lambda: {"ubuntu": known})
        archive = archive_of(Base(image="ubuntu:26.04"), "amd64")
        assert archive
        owners = tuple((package, "pmix") for package in row["wants"])
        wanted = ReleasePackages("u", "ubuntu26.04", "", tuple(row["wants"]), ("amd64",), (), archive, owners)
        upstream = Upstream(patience=Patience(0.1, 0.001))
        if "stops" in row:
            with pytest.raises(ImagebuildError, match=row["stops"]):
                upstream.unavailable(wanted)
        else:
            assert upstream.unavailable(wanted) == ([row["lacks"]] if "lacks" in row else [])
            if remedy := re.search(
                r"request (\d\S*)|provides it: (\S+?)(,|$)|did you mean '(.*)'", row.get("lacks", "")
            ):
                name = package_name(row["wants"][0])
                other = f"{name}={remedy[1]}" if remedy[1] else remedy[2] or remedy[4]
                again = replace(wanted, packages=(other,), owners=((other, "pmix"),))
                assert upstream.unavailable(again) == []
        asked = [request.path.split("/")[-2] for request in server.requests if request.path.endswith("InRelease")]
        assert asked == row.get("asked", asked)


@pytest.mark.parametrize(("image", "suite"), CASES["the-archive-of-a-base"])
def test_the_archive_of_a_base(image: str, suite: str | None) -> None:
    archive = archive_of(Base(image=image), "amd64")
    assert (archive.suites[0] if archive else None) == suite


def test_the_packages_of_all_targets(project: Project, full_plan: Plan, renderer: Renderer) -> None:
    """Packages from a component's own repository are left out. They are in the lock."""
    bases = project.matrix.model.bases
    found = {(p.suite, *p.archs): p for p in release_packages(renderer, full_plan.targets, ())}
    assert set(found) == {(os, arch) for os in bases for arch in ("amd64", "arm64")}
    assert {("libopenmpi-dev", "mpi-abi"), ("zstd", "unpack")} <= {*found["ubuntu22.04", "arm64"].owners}
    assert {"libpmix2t64=6.0.0+really5.0.9", "libhwloc15"} <= set(found["ubuntu26.04", "amd64"].packages)
    assert not [
        p for wanted in found.values() for p in wanted.packages if p.startswith(("libnccl", "libcudnn", "datacenter"))
    ]
    assert ("libpmix2t64=6.0.0+really5.0.9", "pmix") in found["ubuntu26.04", "arm64"].owners
    hpcx = [target for target in full_plan.targets if target.id == "hpcx-cuda13.4.2-ubuntu26.04-runtime"]
    arm64 = {(p.suite, *p.archs) for p in release_packages(renderer, hpcx, ["linux/arm64"])}
    assert arm64 == {("ubuntu26.04", "arm64"), ("ubuntu22.04", "arm64")}, "portable components are compiled on 22.04"


@pytest.mark.parametrize(("text", "found"), CASES["packages-that-a-dockerfile-installs"])
def test_packages_that_a_dockerfile_installs(text: str, found: str) -> None:
    assert " ".join(installed_packages(text)) == found
