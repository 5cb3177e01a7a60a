"""Faults of NVIDIA's servers and files. The rule or check that is responsible for a fault finds it.

The servers are the stand-in of tests/upstream/README.md. Each test has its own server, so that its faults do not affect
other tests, and an empty cache of sources.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.docker.conftest import REPOSITORY, Imagebuild, edited_matrix, own_cache
from tests.docker.standin import lock
from tests.unit.image_files import elf
from tests.upstream import hpcx, packages
from tests.upstream.keys import CUDA, DOCA, STRANGER
from tests.upstream.server import Server
from tests.upstream.standin import Upstream

pytestmark = pytest.mark.docker

TARGET = "hpcx-cuda13.2.1-ubuntu24.04-runtime"
ARCHIVE = hpcx.Distribution("ubuntu24.04", 13)
DOCA_FOLDER = f"/{packages.DOCA_FOLDERS[0]}/"
"""The path of the DOCA repository for the distribution of the build stages."""
DOCA_URL = f"https:/{DOCA_FOLDER}"
PATH = f"/content.mellanox.com/{ARCHIVE.path}"
URL = f"https:/{PATH}"


@dataclass
class Project:
    """A copy of the project with a complete lock, and its servers."""

    run: Imagebuild
    upstream: Upstream
    server: Server

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def lock(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "imagebuild.lock").read_text()))

    @lock.setter
    def lock(self, content: dict[str, Any]) -> None:
        (self.folder / "imagebuild.lock").write_text(json.dumps(content))

    def unpin(self) -> None:
        """Remove the archive from the lock."""
        self.lock = {**self.lock, "archives": {}}

    def offer(self, cuda: int, files: hpcx.Tree) -> None:
        """Serve and lock an archive with these files, whose libraries are for another CUDA major than its name says."""
        packed = self.folder / "packed.tbz"
        inside = replace(ARCHIVE, cuda=cuda)
        known = hpcx.release(ARCHIVE.version)
        tree = hpcx.content(hpcx.files(known, inside), self.upstream.content, None, inside, known)
        hpcx.pack(tree | files, ARCHIVE, packed)
        self.server.replaced[PATH] = packed.read_bytes()
        self.unpin()
        lock(self.run, TARGET)

    def resign(self, key: str, *, published: bool) -> None:
        """Sign the DOCA repository with another key. If `published`, also serve this key as the vendor's key file."""
        self.server.replaced |= self.upstream.resigned(DOCA_FOLDER, key)
        if published:
            public = (self.upstream.keys.public / f"{key}.gpg").read_bytes()
            self.server.replaced[f"{DOCA_FOLDER}doca_keyring.gpg"] = public

    def failed_stage(self, name: str) -> str:
        """Build a stage, which must fail; return the error output."""
        return self.run("build", TARGET, "--stage", name, expect=4).err

    def failed_checks(self, variant: str) -> dict[str, str]:
        """Build a small image with HPC-X; map the names of HPC-X's failed checks to their output."""
        with edited_matrix(self.folder) as matrix:
            small = matrix["images"]["hpcx"]
            small["components"] = ["cuda-image", "doca-ofed", "hpcx"]
            small["tags"] = [tag.replace("-nccl{nccl.version}", "") for tag in small["tags"]]
        repository = f"{REPOSITORY}/{self.folder.parent.name}".lower()
        self.run("build", TARGET.replace("runtime", variant), "--registry", repository)
        image, results = f"{repository}/hpcx:cuda13.2.1-ubuntu24.04-{variant}", self.folder / "checks.json"
        self.run("verify", image, "--only", "hpcx", "--json", results, expect=1)
        checks = json.loads(results.read_text())["checks"]
        return {c["check"]: c["output"] for c in checks if c["outcome"] == "failed"}

    def check_report(self, *causes: str) -> None:
        """Check that the file that a user sends after a failure contains its causes."""
        self.run("bug-report")
        with tarfile.open(self.folder / "imagebuild-bug-report.tar.gz") as sent:
            files = [file.read().decode() for member in sent if (file := sent.extractfile(member))]
        assert not [cause for cause in causes if not any(cause in text for text in files)]


@pytest.fixture
def project(locked: Path, upstream: Upstream, environ: dict[str, str], tmp_path: Path) -> Iterator[Project]:
    folder = tmp_path / "project"
    shutil.copytree(locked, folder, ignore=shutil.ignore_patterns("build"))
    places = {"IMAGEBUILD_CONFIG": str(folder / "config.yaml"), **own_cache(tmp_path)}
    # apt has no older index for this new address.
    with Server(upstream.root).running() as server:
        here = replace(upstream, ports={**upstream.ports, "server": server.port})
        (folder / "config.yaml").write_text(here.configuration)
        yield Project(Imagebuild(folder, {**environ, **places}), here, server)


def test_a_repository_signed_by_a_key_that_nobody_published(project: Project) -> None:
    project.resign(STRANGER, published=False)
    stranger = project.upstream.keys.fingerprint(STRANGER)
    # Only the step that installs packages runs again.
    template = project.folder / "dockerfiles/components/doca-ofed/build.j2"
    template.write_text(template.read_text().replace("mkdir -p /run/keyrings", f"mkdir -p /run/keyrings # {uuid4()}"))
    failed = project.failed_stage("doca-ofed")
    assert "component doca-ofed: a step failed" in failed
    assert f"Missing key {stranger}" in failed


def test_a_repository_signed_by_another_key_that_was_published(project: Project) -> None:
    project.resign(CUDA, published=True)
    trusted, other = (project.upstream.keys.fingerprint(key) for key in (DOCA, CUDA))
    failed = project.failed_stage("doca-ofed")
    assert f"expected the key {trusted} of imagebuild.lock in {DOCA_URL}doca_keyring.gpg, found:" in failed
    assert other in failed
    project.check_report(f"expected the key {trusted} of imagebuild.lock in {DOCA_URL}doca_keyring.gpg, found:", other)


def test_an_archive_that_is_cut_short(project: Project) -> None:
    project.server.truncated.append(PATH)
    size = (project.upstream.root / PATH[1:]).stat().st_size
    problem = f"{PATH}: the transfer ended after {size // 2} of {size} bytes"
    assert problem in project.failed_stage("hpcx")
    project.unpin()
    assert problem.removeprefix(PATH) in project.run("lock", TARGET, expect=4).err
    assert URL not in project.lock["archives"]
    project.check_report(f"the transfer ended after {size // 2} of {size} bytes")


def test_an_archive_for_another_cuda_with_the_place_of_another_build(project: Project) -> None:
    """A file that only contains the name of a third CUDA's library does not link it, so it is not a fault."""
    files = {
        "ucx/lib/libucs.la": hpcx.File(b"libdir='/build-result/other/ucx/lib'\n"),
        "ucx/lib/libopens.so": hpcx.File(elf(machine=62) + b"libcudart.so.11", 0o755),
    }
    project.offer(12, files)
    outputs = project.failed_checks("devel")
    assert outputs.keys() >= {"prefix", "cuda-major"}
    assert "/opt/hpcx/ucx/lib/libucs.la" in outputs["prefix"]
    assert re.findall(r"libcudart\.so\.\d+", outputs["cuda-major"]) == ["libcudart.so.12"] * 2, "listed, and refused"
    project.check_report(*(json.dumps(output, ensure_ascii=False)[1:-1] for output in outputs.values()))


def test_sources_that_have_no_pin(project: Project) -> None:
    lock = project.lock
    base = "nvidia/cuda:13.2.1-runtime-ubuntu24.04"
    for kind, name in (("archives", URL), ("images", base), ("repositories", DOCA_URL)):
        del lock[kind][name]
    project.lock = lock
    # The command does not connect to an engine, either.
    done = project.run("build", TARGET, expect=2, DOCKER_HOST="unix:///nowhere.sock")
    assert f"run `imagebuild lock {TARGET}` on a machine that can reach them:" in done.err
    listed = [line.strip() for line in done.err.splitlines() if line.startswith("  ")]
    kinds = {"archive": URL, "image": base, "packages": DOCA_URL}
    assert sorted(listed) == [f"{kind} {name}: not in the lock" for kind, name in kinds.items()]
    assert project.server.requests == []
    assert not (project.folder / "build").exists()
