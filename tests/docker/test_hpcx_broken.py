"""What can be wrong with the vendor's servers and files: each fault is found by the rule or check that is for it.

The servers are the stand-in of tests/upstream/README.md. Each test has one of its own, whose faults nobody else meets,
and an empty cache of sources.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from imagebuild.core import cache_folder
from tests.docker.conftest import REPOSITORY, Done, Imagebuild
from tests.docker.standin import ARM
from tests.unit.image_files import elf
from tests.upstream import hpcx, packages
from tests.upstream.keys import CUDA, DOCA, STRANGER
from tests.upstream.server import Server
from tests.upstream.standin import Upstream

pytestmark = pytest.mark.docker

TARGET = "hpcx-cuda13.2.1-ubuntu24.04-runtime"
ARCHIVE = hpcx.Distribution("ubuntu24.04", 13)
DOCA_FOLDER = f"/{packages.DOCA_FOLDERS[0]}/"
"""Of the release that stages are built on."""
DOCA_URL = f"https:/{DOCA_FOLDER}"
Change = Callable[[hpcx.Tree], hpcx.Tree]
SMALL = "    components: [cuda-image, doca-ofed, hpcx]\n"


def path_of(archive: hpcx.Distribution) -> str:
    return f"/content.mellanox.com/{archive.path}"


def url_of(archive: hpcx.Distribution) -> str:
    return f"https:/{path_of(archive)}"


@dataclass
class Project:
    """A copy of the project, with everything in the lock, and the servers that it reaches."""

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

    def pin(self, sha256: str | None) -> None:
        """Give the archive this hash in the lock, or none and no facts."""
        lock = self.lock
        known = lock["archives"].pop(url_of(ARCHIVE))
        lock["archives"] |= {url_of(ARCHIVE): {**known, "sha256": sha256}} if sha256 else {}
        self.lock = lock

    def sha256(self, archive: hpcx.Distribution) -> str:
        """Of the archive that the stand-in has."""
        return hashlib.sha256((self.upstream.root / path_of(archive)[1:]).read_bytes()).hexdigest()

    def offer(self, *, cuda: int = 13, change: Change = lambda tree: tree) -> None:
        """Serve an archive that is changed, or holds the libraries of another CUDA major than it says, and trust it."""
        packed = self.folder / "packed.tbz"
        inside = replace(ARCHIVE, cuda=cuda)
        known = hpcx.release(ARCHIVE.version)
        tree = hpcx.content(hpcx.files(known, inside), self.upstream.content, None, inside, known)
        hpcx.pack(change(tree), ARCHIVE, packed)
        content = packed.read_bytes()
        self.server.replace(path_of(ARCHIVE), content)
        self.pin(None)
        self.run("lock", TARGET)

    def resign(self, key: str, *, published: bool) -> None:
        """Let another key sign DOCA, and let the vendor's file of keys be that key's if it is `published`."""
        for path, content in self.upstream.resigned(DOCA_FOLDER, key).items():
            self.server.replace(path, content)
        if published:
            public = (self.upstream.keys.public / f"{key}.gpg").read_bytes()
            self.server.replace(f"{DOCA_FOLDER}doca_keyring.gpg", public)

    def stage(self, name: str, *options: str, expect: int) -> Done:
        return self.run("build", TARGET, "--stage", name, *options, expect=expect)

    def failed_checks(self, variant: str) -> dict[str, str]:
        """HPC-X's checks that fail in an image that has little more than HPC-X, with what they print."""
        file = self.folder / "matrix.yaml"
        head, _, image = file.read_text().partition("  hpcx:\n    description")
        start, end = image.index("    components:"), image.index("    build-with:")
        small = image[:start] + SMALL + image[end:]
        small = small.replace("-nccl{nccl.version}", "")
        file.write_text(f"{head}  hpcx:\n    description{small}")
        repository = f"{REPOSITORY}/{self.folder.parent.name}".lower()
        self.run("build", TARGET.replace("runtime", variant), "--registry", repository)
        image, results = f"{repository}/hpcx:cuda13.2.1-ubuntu24.04-{variant}", self.folder / "checks.json"
        self.run("verify", image, "--only", "hpcx", "--json", results, expect=1)
        checks = json.loads(results.read_text())["checks"]
        return {c["check"]: c["output"] for c in checks if c["outcome"] == "failed"}


@pytest.fixture
def project(locked: Path, upstream: Upstream, environ: dict[str, str], tmp_path: Path) -> Iterator[Project]:
    folder, cache = tmp_path / "project", tmp_path / "cache" / "imagebuild"
    shutil.copytree(locked, folder, ignore=shutil.ignore_patterns("build"))
    cache.mkdir(parents=True)
    (cache / "base").symlink_to(cache_folder())
    places = {"IMAGEBUILD_CONFIG": str(folder / "config.yaml"), "XDG_CACHE_HOME": str(cache.parent)}
    # Under an address that apt has never seen it has no older index to fall back on.
    with Server(upstream.root).running() as server:
        here = replace(upstream, ports={**upstream.ports, "server": server.port})
        (folder / "config.yaml").write_text(here.configuration)
        yield Project(Imagebuild(folder, {**environ, **places}), here, server)


def test_a_repository_signed_by_a_key_that_nobody_published(project: Project) -> None:
    project.resign(STRANGER, published=False)
    stranger = project.upstream.keys.fingerprint(STRANGER)
    # What installs runs again, and nothing else.
    template = project.folder / "dockerfiles/components/doca-ofed/build.j2"
    template.write_text(template.read_text().replace("mkdir -p /run/keyrings", f"mkdir -p /run/keyrings # {uuid4()}"))
    failed = project.stage("doca-ofed", expect=4)
    assert "component doca-ofed: a step failed" in failed.err
    assert f"Missing key {stranger}" in failed.err
    assert "is not signed" in failed.err


def test_a_repository_signed_by_another_key_that_was_published(project: Project) -> None:
    project.resign(CUDA, published=True)
    trusted, other = (project.upstream.keys.fingerprint(key) for key in (DOCA, CUDA))
    failed = project.stage("doca-ofed", expect=4)
    assert f"expected the key {trusted} of imagebuild.lock in {DOCA_URL}doca_keyring.gpg, found:" in failed.err
    assert other in failed.err


def test_an_archive_that_is_cut_short(project: Project) -> None:
    project.server.truncate(path_of(ARCHIVE))
    failed = project.stage("hpcx", expect=4)
    size = (project.upstream.root / path_of(ARCHIVE)[1:]).stat().st_size
    assert f"{path_of(ARCHIVE)}): ended after {size // 2} of {size} bytes" in failed.err
    project.pin(None)
    done = project.run("lock", TARGET, expect=4)
    assert f"ended after {size // 2} of {size} bytes" in done.err
    assert url_of(ARCHIVE) not in project.lock["archives"]


def test_an_archive_for_another_cuda_with_the_place_of_another_build(project: Project) -> None:
    """A file that only names a third CUDA may open it, and does not link it."""
    files = {
        "ucx/lib/libucs.la": hpcx.File(b"libdir='/build-result/other/ucx/lib'\n"),
        "ucx/lib/libopens.so": hpcx.File(elf(machine=62) + b"libcudart.so.11", 0o755),
    }
    project.offer(cuda=12, change=lambda tree: {**tree, **files})
    outputs = project.failed_checks("devel")
    assert outputs.keys() >= {"prefix", "cuda-major"}
    assert "/opt/hpcx/ucx/lib/libucs.la" in outputs["prefix"]
    assert re.findall(r"libcudart\.so\.\d+", outputs["cuda-major"]) == ["libcudart.so.12"] * 2, "listed, and refused"


def test_an_older_release_with_other_orders(project: Project) -> None:
    older = ("--set", "hpcx=2.25.1")
    project.run("lock", TARGET, *older)
    project.run("build", TARGET, "--stage", "hpcx", *older)
    text = project.run("render", TARGET, *older).out
    first = "/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/ucx/lib"
    assert f'LD_LIBRARY_PATH="{first}:' in text
    assert 'imagebuild.nccl-net="ibext"' in text
    assert not re.search(r"PMIX_INSTALL_PREFIX|MANPATH|OLD_PATH|/build-result", text.partition(" AS image\n")[2])


def test_the_other_architecture(project: Project, request: pytest.FixtureRequest) -> None:
    """Sources for arm64 are locked, and the archive unpacked, without running a program that is for arm64.

    With `--whole-hpcx arm64`, stages that need no CUDA are built too, in emulation.
    """
    file, arm = project.folder / "matrix.yaml", ("--platform", "linux/arm64")
    head, mark, image = file.read_text().partition("  hpcx:\n    description")
    file.write_text(head + mark + image.replace("[linux/amd64]", "[linux/amd64, linux/arm64]", 1))
    aarch64 = replace(ARCHIVE, cpu="aarch64")
    before = set(project.lock["archives"])
    project.server.requests.clear()
    project.run("lock", TARGET, *arm)
    assert set(project.lock["archives"]) - before == {url_of(aarch64)}
    assert not [request for request in project.server.requests if "x86_64" in request.path]
    emulated = ("doca-ofed", "mpi-abi") if request.config.getoption("--whole-hpcx") == ARM else ()
    project.run = replace(project.run, limit=3600)
    for stage in ("hpcx", *emulated):
        project.stage(stage, *arm, expect=0)
    text = project.run("render", TARGET).out
    assert f"FROM scratch AS hpcx-source-arm64\nADD --checksum=sha256:{project.sha256(aarch64)}" in text


def test_the_servers_of_a_target(project: Project) -> None:
    """`doctor --upstream` finds what would stop a build, by asking for little."""
    report = project.folder / "report.json"

    def ask(expect: int) -> dict[str, str]:
        project.server.requests.clear()
        project.run("doctor", "--upstream", TARGET, "--json", report, expect=expect)
        assert not [r for r in project.server.requests if r.path.endswith(".tbz") and r.method != "HEAD"]
        answers = json.loads(report.read_text())["sources"]
        return {answer["source"]: f"{answer['state']}: {answer['found']}" for answer in answers}

    assert all(text.startswith("as locked: ") for text in ask(0).values())
    project.server.replace(path_of(ARCHIVE), b"another archive")
    project.server.fail("/github.com/NVIDIA/gdrcopy.git", status=404, times=9)
    project.resign(CUDA, published=True)
    found = ask(1)
    assert found[f"archive {url_of(ARCHIVE)}"].startswith("changed: has 15 bytes, but the lock says ")
    assert "but imagebuild.lock trusts" in found[f"packages {DOCA_URL}"]
    nowhere = replace(project.upstream, ports={"server": 9, "registry": 9})
    (project.folder / "config.yaml").write_text(nowhere.configuration)
    assert found.keys() == ask(4).keys()


def test_sources_that_are_not_resolved(project: Project) -> None:
    lock = project.lock
    base = "nvidia/cuda:13.2.1-runtime-ubuntu24.04"
    lock["archives"][url_of(ARCHIVE)] = lock["images"][base] = lock["repositories"][DOCA_URL] = "unresolved"
    project.lock = lock
    # No engine is asked, either.
    done = project.run("build", TARGET, expect=2, DOCKER_HOST="unix:///nowhere.sock")
    assert "imagebuild.lock:1: 3 of " in done.err
    assert f"run `imagebuild lock {TARGET}` where they can be reached; it downloads 1 of them (" in done.err
    listed = [line.strip() for line in done.err.splitlines() if line.startswith("  ")]
    assert sorted(listed) == [f"archive {url_of(ARCHIVE)}", f"image {base}", f"packages {DOCA_URL}"]
    assert {request.path for request in project.server.requests} == {path_of(ARCHIVE)}, "its size"
    assert not (project.folder / "build").exists()
