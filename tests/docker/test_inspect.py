"""The image checks on real images: our images pass, planted faults are found, and `ldd` finds the same libraries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.bench.verification import VerifyResult
from imagebuild.oci.image import images_in
from imagebuild.project.plan import Plan
from imagebuild.render.renderer import Renderer
from imagebuild.verify.inspection import Inspection
from imagebuild.verify.layers import scan_all
from tests.docker.conftest import REPOSITORY, Built, Imagebuild, until
from tests.docker.test_quickstart import docker_build

pytestmark = pytest.mark.docker

KEY = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\\n" + "b3BlbnNzaC1rZXkt" * 4
TOKEN = "ghp" + "_" + "a1B2c3D4e5F6g7H8i9" * 2
FAULTS = {
    f"printf '%b' '{KEY}' > /opt/deploy": {"image/no-keys"},
    "rm /opt/deploy": set(),
    f"echo 'token: {TOKEN}' > /etc/deploy.yaml": {"image/no-tokens"},
    "rm /etc/deploy.yaml": set(),
    "mkdir -m 777 /opt/everybody": {"image/not-world-writable"},
    "cp /usr/bin/id /opt/id && chmod 4755 /opt/id": {"image/setuid"},
    "echo Package: x > /var/lib/apt/lists/example_Packages": {"image/no-leftovers"},
    "rm /var/lib/apt/lists/*_Packages": set(),
    "mkdir -p /usr/local/share/ca-certificates && echo > /usr/local/share/ca-certificates/site.crt": {"image/no-site-ca"},
    "echo 'mpiuser:secret' | chpasswd": {"image/user"},
    "rm /opt/nccl/LICENSE": {"image/licenses"},
    "rm /opt/nccl/lib/libnccl.so.2 && ldconfig": {"nccl-wheel/loads", "nccl-wheel/version"},
    "ssh-keygen -q -A": {"image/no-keys", "sshd/no-host-keys", "sshd/host-keys"},
    "echo PasswordAuthentication yes > /etc/ssh/sshd_config.d/00-mine.conf":
        {"sshd/settings", "sshd/refuses-root", "sshd/refuses-user"},
}  # fmt: skip
"""Maps each damaging step to the checks that must fail. No other checks of these components may fail."""


def test_planted_faults_are_found_and_nothing_else(
    quickstart: Built, imagebuild: Imagebuild, client: DockerClient, tmp_path: Path
) -> None:
    """Verify a saved image, whose files are read and which is also started. The engine must not keep it."""
    tag = f"{REPOSITORY}/planted:1"
    steps = "\n".join(f"RUN {damage}" for damage in FAULTS)
    docker_build(f"FROM {quickstart.tag}\nENV MPI_HOME=/opt/nowhere\n{steps}\n", "--provenance=false", "--tag", tag)
    planted = client.images.get(tag)
    with (tmp_path / "image.tar").open("wb") as file:
        file.writelines(planted.save(named=True))
    only = ("--only", "image", "--only", "nccl-wheel", "--only", "sshd")
    done = imagebuild("verify", tmp_path / "image.tar", *only, "--json", tmp_path / "verify.json", expect=1)
    result = VerifyResult.model_validate_json((tmp_path / "verify.json").read_text())
    assert (result.target, result.digest) == (quickstart.result.target, planted.id)
    found = {f"{c.component}/{c.check}": c.output for c in result.checks if c.outcome == "failed"}
    assert found.keys() == {"image/environment"}.union(*FAULTS.values())
    assert f"{len(found)} failed" in done.out
    assert "/opt/deploy: contains a private key, in layer" in found["image/no-keys"]
    assert TOKEN not in done.out + (tmp_path / "verify.json").read_text()
    # The test of another client may temporarily give another name to the same image.
    assert until(lambda: client.images.get(tag).tags == planted.tags)


def test_the_loader_in_the_image_agrees(
    quickstart: Built, client: DockerClient, renderer: Renderer, full_plan: Plan, tmp_path: Path
) -> None:
    """For every program and library, `ldd` finds and misses the same libraries as our loader."""
    with (tmp_path / "image.tar").open("wb") as file:
        file.writelines(client.images.get(quickstart.tag).save())
    (image,) = images_in(tmp_path / "image.tar", tmp_path)
    about = Inspection(image, scan_all(image.layers), renderer.project, full_plan)
    paths = [path for path, found in about.objects.items() if found.machine == about.machine and found.loadable]
    assert len(paths) > 500
    script = 'while read -r file; do echo "@@$file"; ldd "$file" 2>&1; done'
    command = ["docker", "run", "--rm", "-i", quickstart.tag, "bash", "-c", script]
    lines = "".join(f"/{path}\n" for path in paths)
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
    seen = 0
    for block in done.stdout.split("@@/")[1:]:
        path, _, text = block.partition("\n")
        closure = about.loader.closure(path)
        theirs = dict(re.findall(r"^\s*(\S+) => (/\S+|not found)", text, re.MULTILINE))
        ours = {name: found for name, found in closure.libraries.items() if not name.startswith("ld-linux")}
        assert {name: about.tree.resolve(where) for name, where in theirs.items()} == {
            name: about.tree.resolve(where) if where else None for name, where in ours.items()
        }, path
        seen += 1
    assert seen == len(paths), done.stderr
