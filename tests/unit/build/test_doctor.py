import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.build import DoctorFinding, MachineFacts, collect_facts, doctor, examine_machine, judge_machine
from imagebuild.oci import Endpoint, engine
from tests.unit.conftest import BUILDX, Runner

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
    programs={name: f"/usr/bin/{name}" for name in ("mmdebstrap", "Debian archive keyring", "syft", "cosign")},
)
NONE = MachineFacts(problem="no usable container engine; start one\n  docker context: silent\n  private engine: silent")


def findings(facts: MachineFacts) -> dict[str, DoctorFinding]:
    return {finding.name: finding for finding in judge_machine(facts)}


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
    assert set(found) == set(findings(GOOD))
    assert found["engine"].detail.splitlines()[1:] == ["  docker context: silent", "  private engine: silent"]
    assert found["engine"].fix == found["image store"].fix == "start one"
    assert "mmdebstrap" in found["mmdebstrap"].fix


@pytest.mark.parametrize(
    ("changed", "name", "ok", "detail"),
    [
        ({"builder": "BuildKit version: v0.21.1\n"}, "BuildKit", True, "0.21.1"),
        ({"builder": "BuildKit version: v0.12.5\n"}, "BuildKit", False, "0.12.5 is older than 0.13"),
        ({"buildx": (0, 12, 1)}, "buildx", False, "0.12.1 is older than 0.13"),
        ({"info": {**INFO, "DriverStatus": []}}, "image store", False, "overlayfs: it keeps one platform"),
        ({"info": {**INFO, "Architecture": "aarch64"}}, "platforms", True, "linux/arm64, linux/amd64 (emulated)"),
        ({"builder": "Platforms: linux/amd64, linux/386\n"}, "platforms", None, "linux/amd64 only"),
        ({"builder": "Status: inactive\n"}, "platforms", False, "the current builder does not list them"),
        ({"free": 3 * 2**30}, "disk", False, "3 GiB free at /data, 20 GiB are recommended"),
        ({"free": None}, "disk", None, "unknown"),
        ({"info": {**INFO, "Runtimes": {"nvidia": {}}}}, "GPU runtime", True, "nvidia runtime"),
        ({"gpu_spec": True}, "GPU runtime", True, "NVIDIA devices through CDI"),
    ],
)
def test_one_thing_is_different(changed: dict[str, Any], name: str, ok: bool | None, detail: str) -> None:
    finding = findings(replace(GOOD, **changed))[name]
    assert finding.ok is ok
    assert finding.detail.startswith(detail)
    assert finding.fix if ok is False else finding.fix == "" or name == "platforms"


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, **_: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))  # syft lies beside it
    monkeypatch.setattr(doctor, "KEYRING", tmp_path / "keyring.gpg")
    monkeypatch.setattr(engine, "STATE", tmp_path / "state")


@pytest.mark.parametrize("info", ["not json", "null", "[]"])
def test_neither_a_bare_machine_nor_an_engine_that_talks_nonsense_is_a_bug(info: str) -> None:
    bare = examine_machine({"IMAGEBUILD_STATE": "/nowhere"}, Runner({}))
    assert all(finding.ok is not True for finding in bare)
    answers = {"docker --host tcp://192.0.2.1:1 version": "28.0.0", "docker info": info}
    found = {f.name: f.ok for f in examine_machine({"DOCKER_HOST": "tcp://192.0.2.1:1"}, Runner({**BUILDX, **answers}))}
    assert (found["engine"], found["image store"]) == (True, False)


def test_the_engine_that_was_found_is_asked(tmp_path: Path) -> None:
    devices = tmp_path / "cdi"
    devices.mkdir()
    (devices / "nvidia.yaml").touch()
    info = {**INFO, "DockerRootDir": str(tmp_path / "hidden" / "data"), "CDISpecDirs": [str(devices)]}
    host = f"unix://{tmp_path}"
    answers = {f"docker --host {host} version": "28.0.0", "docker info": json.dumps(info)}
    run = Runner({**BUILDX, **answers, "docker buildx inspect": INSPECTED})
    facts = collect_facts({"DOCKER_HOST": host}, run)
    assert facts.gpu_spec
    assert facts.free
    assert facts.buildx == (0, 13, 1)
