"""The stand-in for the vendor's servers is sound: apt, BuildKit and git take what it serves, and refuse its faults."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.docker.conftest import install
from tests.upstream import hpcx, packages
from tests.upstream.__main__ import CACHE
from tests.upstream.keys import EXPIRED, STRANGER
from tests.upstream.server import Server
from tests.upstream.standin import Upstream, missing

pytestmark = pytest.mark.docker

NVIDIA = f"/{packages.NVIDIA_UBUNTU}/"
DOCA = f"/{packages.DOCA_FOLDERS[1]}/"
BASE = "nvidia/cuda:13.2.1-devel-ubuntu24.04"


@pytest.fixture(scope="module")
def upstream(host: str) -> Upstream:
    if lacking := missing():
        install(*lacking)
    return Upstream.make(CACHE)


@pytest.fixture(scope="module")
def serving(upstream: Upstream) -> Iterator[Server]:
    with upstream.serve() as server:
        yield server


@pytest.fixture
def server(serving: Server) -> Iterator[Server]:
    serving.forget()
    yield serving
    serving.heal()


def build(text: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What buildx says about a Dockerfile; no step comes from a cache."""
    (folder / "Dockerfile").write_text(text)
    command = ["docker", "buildx", "build", "--progress=plain", "--no-cache", *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def with_apt(upstream: Upstream, base: str, *commands: str) -> str:
    """A Dockerfile whose step has the vendor's repositories, by the stand-in's address."""
    host = f"https://{packages.NVIDIA}/"
    steps = [
        f"sed -i 's,{host},{upstream.address}/{packages.NVIDIA}/,' /etc/apt/sources.list.d/*.list",
        "find /etc/apt -name '*.list' -not -name 'cuda-*' -delete",
        *commands,
    ]
    return f"FROM {upstream.registry}/{base}\nRUN " + " && \\\n    ".join(steps) + "\n"


def test_newer_nccl_replaces_the_held_one(upstream: Upstream, server: Server, tmp_path: Path) -> None:
    wanted = "libnccl2=2.32.3-1+cuda13.4 libnccl-dev=2.32.3-1+cuda13.4"
    program = (
        r"#include <nccl.h>\nint main() { int v; ncclGetVersion(&v); return v != 23203 || NCCL_VERSION_CODE != v; }"
    )
    done = build(with_apt(
        upstream, BASE,
        "apt-get update",
        f"! apt-get install -y --no-install-recommends {wanted}",
        f"apt-get install -y --no-install-recommends --allow-change-held-packages {wanted}",
        "grep -a -o 'NCCL version 2.32.3+cuda13.4' /usr/lib/x86_64-linux-gnu/libnccl.so.2",
        f"printf '{program}' > /tmp/version.cc",
        "g++ -I/usr/local/cuda/include /tmp/version.cc -o /tmp/version -lnccl && /tmp/version",
    ), tmp_path, "--output=type=cacheonly")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{NVIDIA}InRelease" in [r.path for r in server.requests if r.status == 200]


@pytest.mark.parametrize("key", [STRANGER, EXPIRED])
def test_apt_refuses_other_signatures(upstream: Upstream, server: Server, tmp_path: Path, key: str) -> None:
    for path, content in upstream.resigned(NVIDIA, key).items():
        server.replace(path, content)
    done = build(with_apt(upstream, BASE, "apt-get update"), tmp_path, "--output=type=cacheonly")
    assert done.returncode != 0
    assert "is not signed" in done.stderr


def test_every_package_of_a_real_list_installs(upstream: Upstream, server: Server, tmp_path: Path) -> None:
    """The distribution's archive is there too, and what both have comes from DOCA; the decoys stay out."""
    keyring, doca = "/usr/share/keyrings/doca.asc", f"{upstream.address}{DOCA}"
    key = f"{upstream.address}/{packages.DOCA_FOLDER}/GPG-KEY-Mellanox.pub"
    verbs = "libibverbs-dev ibverbs-providers ibverbs-utils librdmacm-dev rdmacm-utils libibumad-dev infiniband-diags"
    manager = " ".join(f"datacenter-gpu-manager-4-{p}=1:4.6.1-1" for p in ("core", "cuda13", "proprietary-cuda13"))
    cudnn = " ".join(f"libcudnn9-{part}cuda-13=9.20.0.48-1" for part in ("", "dev-", "headers-"))
    text = with_apt(
        upstream, BASE,
        f"echo 'deb [signed-by={keyring}] {doca} ./' > /etc/apt/sources.list.d/doca.list",
        "apt-get update",
        f"apt-get install -y --no-install-recommends {verbs} {manager} {cudnn}",
        "dpkg-query -W libibverbs1 librdmacm1 | grep -c -F 2607mlnx60-1.2607050 | grep -x 2",
        "! dpkg-query -W openmpi ucx",
        "dcgmi --version | grep -F 4.6.1",
    ).replace("find /etc/apt -name '*.list' -not -name 'cuda-*' -delete && \\\n    ", "")  # fmt: skip
    done = build(text.replace("\nRUN", f"\nADD {key} {keyring}\nRUN chmod 644 {keyring}\nRUN"), tmp_path,
                 "--output=type=cacheonly")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_archive_by_checksum(upstream: Upstream, server: Server, tmp_path: Path) -> None:
    archive = hpcx.Distribution("ubuntu24.04", 13)
    content = (upstream.root / "content.mellanox.com" / archive.path).read_bytes()
    done = build(add(upstream, archive, content), tmp_path, f"--output=type=local,dest={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / f"{archive.name}.tbz").read_bytes() == content


def test_changed_archive_is_refused(upstream: Upstream, server: Server, tmp_path: Path) -> None:
    # BuildKit takes what it has by its checksum, without asking the server: this one it never had.
    archive, wanted = hpcx.Distribution("ubuntu22.04", 12, "aarch64"), uuid4().bytes
    server.replace(f"/content.mellanox.com/{archive.path}", wanted[:-1])
    done = build(add(upstream, archive, wanted), tmp_path, "--output=type=cacheonly")
    assert "digest mismatch" in done.stderr
    server.replace(f"/content.mellanox.com/{archive.path}", wanted)
    server.truncate("/content.mellanox.com/")
    done = build(add(upstream, archive, wanted), tmp_path, "--output=type=cacheonly")
    assert "unexpected EOF" in done.stderr
    server.heal()
    server.replace(f"/content.mellanox.com/{archive.path}", wanted)
    assert build(add(upstream, archive, wanted), tmp_path, "--output=type=cacheonly").returncode == 0


def add(upstream: Upstream, archive: hpcx.Distribution, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return f"FROM scratch\nADD --checksum=sha256:{digest} {upstream.address}/content.mellanox.com/{archive.path} /\n"


def test_git_by_commit(upstream: Upstream, server: Server, tmp_path: Path) -> None:
    for address, commit in upstream.commits.items():
        local = address.replace("https://", f"{upstream.address}/")
        out = tmp_path / Path(address).stem
        done = build(f"FROM scratch\nADD {local}#{commit} /\n", tmp_path, f"--output=type=local,dest={out}")
        assert done.returncode == 0, done.stderr
        assert any("STAND-IN" in path.read_text() for path in out.rglob("*") if path.is_file())


def test_cuda_12_programs_ask_for_its_runtime(upstream: Upstream, server: Server, tmp_path: Path) -> None:
    base = f"{upstream.registry}/nvidia/cuda:12.9.2-devel-ubuntu22.04"
    codes = " ".join(f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 89, 90, 100, 103, 120))
    text = (
        f"FROM {base}\nRUN printf '__global__ void k() {{}}\\nint main() {{ k<<<1, 1>>>(); }}' > /tmp/k.cu && "
        f"nvcc {codes} -cudart shared /tmp/k.cu -o /tmp/k && readelf -d /tmp/k | grep -F 'libcudart.so.12' && "
        "ldd /tmp/k && ! ldd /tmp/k | grep 'not found' && apt-mark showhold | grep -x libnccl2\n"
    )
    done = build(text, tmp_path, "--output=type=cacheonly")
    assert done.returncode == 0, done.stderr


def test_addresses_are_those_of_the_configuration(upstream: Upstream, server: Server) -> None:
    assert upstream.configuration.splitlines()[:4] == [
        "mirrors:", "  images:", f"    docker.io: {upstream.registry}", "  downloads:",
    ]  # fmt: skip
    assert f"    http://linux.mellanox.com/: {upstream.address}/linux.mellanox.com/" in upstream.configuration
    assert all(len(digits) == 40 for digits in upstream.fingerprints.values())
    assert len(set(upstream.fingerprints.values())) == 2
