import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.build import (
    JUDGES,
    DoctorFinding,
    MachineFacts,
    collect_facts,
    doctor,
    examine_machine,
    judge_buildkit,
    judge_buildx,
    judge_disk,
    judge_gpu,
    judge_platforms,
    judge_store,
)
from imagebuild.core import CommandError
from imagebuild.oci import Endpoint, engine

INSPECTED = """\
Name:          default
Driver:        docker

Nodes:
BuildKit version: v0.0.0+unknown
Platforms:        linux/amd64, linux/amd64/v2, linux/arm64
"""
INFO = {
    "ServerVersion": "26.1.5+dfsg1",
    "Driver": "overlayfs",
    "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
    "DockerRootDir": "/data",
    "Architecture": "x86_64",
    "Runtimes": {"runc": {}},
}
GOOD = MachineFacts(
    endpoint=Endpoint("unix:///run/x.sock", "private"),
    info=INFO,
    builder=INSPECTED,
    buildx=(0, 13, 1),
    free=50 * 2**30,
    mmdebstrap="/usr/bin/mmdebstrap",
    keyring=True,
    syft="/usr/bin/syft",
    cosign="/usr/bin/cosign",
)
NONE = MachineFacts(problem="no usable container engine; start one\n  docker context: silent\n  private engine: silent")


def findings(facts: MachineFacts) -> dict[str, DoctorFinding]:
    return {finding.name: finding for finding in (judge(facts) for judge in JUDGES)}


def test_a_good_machine() -> None:
    found = findings(GOOD)
    assert {name for name, finding in found.items() if finding.ok is not True} == {"GPU runtime"}
    assert found["engine"].detail == "Docker Engine 26.1.5+dfsg1 at unix:///run/x.sock (private engine)"
    assert found["BuildKit"].detail.startswith("0.13 or newer")
    assert found["platforms"].detail == "linux/amd64, linux/arm64 (emulated)"
    assert found["disk"].detail == "50 GiB free at /data"
    assert found["GPU runtime"].ok is None
    assert "GPU checks will be skipped" in found["GPU runtime"].detail


def test_a_bare_machine_gets_a_fix_for_every_line() -> None:
    found = findings(NONE)
    assert all(finding.ok is not True and finding.fix for finding in found.values())
    assert found["engine"].detail.splitlines()[1:] == ["  docker context: silent", "  private engine: silent"]
    assert found["engine"].fix == found["image store"].fix == "start one"
    assert "mmdebstrap" in found["mmdebstrap"].fix


@pytest.mark.parametrize(
    ("version", "ok", "detail"),
    [
        ("v0.21.1", True, "0.21.1"),
        ("v0.12.5", False, "0.12.5 is older than 0.13"),
        ("v0.0.0+unknown", True, "0.13 or newer (by the engine's version)"),
    ],
)
def test_buildkit(version: str, ok: bool, detail: str) -> None:
    finding = judge_buildkit(replace(GOOD, builder=f"BuildKit version: {version}\n"))
    assert (finding.ok, finding.detail) == (ok, detail)


def test_buildx_too_old() -> None:
    finding = judge_buildx(replace(GOOD, buildx=(0, 12, 1)))
    assert (finding.ok, finding.detail) == (False, "0.12.1 is older than 0.13")
    assert finding.fix


def test_the_old_image_store() -> None:
    info = {**INFO, "Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}
    finding = judge_store(replace(GOOD, info=info))
    assert finding.ok is False
    assert "containerd-snapshotter" in finding.fix


def test_platforms_of_an_arm_machine_and_without_emulation() -> None:
    arm = replace(GOOD, info={**INFO, "Architecture": "aarch64"})
    assert judge_platforms(arm).detail == "linux/arm64, linux/amd64 (emulated)"
    alone = judge_platforms(replace(GOOD, builder="Platforms: linux/amd64, linux/386\n"))
    assert (alone.ok, alone.detail) == (None, "linux/amd64 only")
    assert "arm64" in alone.fix
    assert judge_platforms(replace(GOOD, builder="Status: inactive\n")).ok is False


def test_disk() -> None:
    full = judge_disk(replace(GOOD, free=3 * 2**30))
    assert (full.ok, bool(full.fix)) == (False, True)
    assert judge_disk(replace(GOOD, free=None)).ok is None


def test_gpu_runtime_and_devices() -> None:
    assert judge_gpu(replace(GOOD, info={**INFO, "Runtimes": {"nvidia": {}}})).ok is True
    assert judge_gpu(replace(GOOD, gpu_spec=True)).ok is True


class Runner:
    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = answers
        self.environments: list[Mapping[str, str] | None] = []

    def __call__(self, *argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
        line = " ".join(argv)
        self.environments.append(env)
        for start, answer in self.answers.items():
            if line.startswith(start):
                return answer
        raise CommandError(f"`{line}` failed (1): no")


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, **_: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))  # syft lies beside it
    monkeypatch.setattr(doctor, "KEYRING", tmp_path / "keyring.gpg")
    monkeypatch.setattr(engine, "STATE", tmp_path / "state")


def test_examine_never_raises() -> None:
    found = examine_machine({"IMAGEBUILD_STATE": "/nowhere"}, Runner({}))
    assert len(found) == len(JUDGES)
    assert all(finding.ok is not True for finding in found)


@pytest.mark.parametrize("info", ["not json", "null", "[]"])
def test_an_engine_that_talks_nonsense(info: str) -> None:
    answers = {
        "docker buildx version": "github.com/docker/buildx v0.24.0",
        "docker --host tcp://192.0.2.1:1 version": "28.0.0",
        "docker info": info,
    }
    found = examine_machine({"DOCKER_HOST": "tcp://192.0.2.1:1"}, Runner(answers))
    assert found[0].ok is True
    assert found[3].ok is False


def test_the_engine_that_was_found_is_asked(tmp_path: Path) -> None:
    devices = tmp_path / "cdi"
    devices.mkdir()
    (devices / "nvidia.yaml").touch()
    info = {**INFO, "DockerRootDir": str(tmp_path / "hidden" / "data"), "CDISpecDirs": [str(devices)]}
    host = f"unix://{tmp_path}"
    run = Runner(
        {
            "docker buildx version": "github.com/docker/buildx v0.24.0",
            f"docker --host {host} version": "28.0.0",
            "docker info": json.dumps(info),
            "docker buildx inspect": INSPECTED,
        }
    )
    facts = collect_facts({"DOCKER_HOST": host}, run)
    assert {"DOCKER_HOST": host} in run.environments
    assert facts.gpu_spec
    assert facts.free
    assert facts.buildx == (0, 24, 0)
