"""What doctor says of machines that differ in one thing from a good one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagebuild.build.doctor import DoctorFinding, examine_machine
from imagebuild.oci import engine
from tests.conftest import data
from tests.unit.conftest import BUILDX, Runner

CASES = data("cases/build/doctor")

HOST = "tcp://192.0.2.1:1"
INSPECTED = "Name: default\n\nNodes:\nName: default\nPlatforms:        linux/amd64, linux/amd64/v2, linux/arm64\n"
INFO = CASES["info"]


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, **_: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))  # doctor looks for syft in this folder
    monkeypatch.setattr(engine, "STATE", tmp_path / "state")


def findings(
    info: object = INFO, builder: str = INSPECTED, host: str = HOST, **answers: str
) -> dict[str, DoctorFinding]:
    info = info if isinstance(info, str) else json.dumps(info)
    asked = {f"docker --host {host} version": "28.0.0", "docker info": info, "docker buildx inspect": builder}
    run = Runner({**BUILDX, **asked, **answers})
    return {finding.name: finding for finding in examine_machine({"DOCKER_HOST": host}, run)}


def test_a_good_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, **_: f"/usr/bin/{program}")
    found = findings()
    assert {n for n, f in found.items() if not f.ok} == {"disk", "GPU runtime"}
    assert found["engine"].detail == f"Docker Engine 28.0.0 at {HOST} (DOCKER_HOST)"
    assert found["platforms"].detail == "linux/amd64, linux/arm64 (emulated)"
    assert found["mmdebstrap"].detail == "/usr/bin/mmdebstrap"


def test_a_bare_machine_gets_a_fix_for_every_line() -> None:
    found = {finding.name: finding for finding in examine_machine({"IMAGEBUILD_STATE": "/nowhere"}, Runner({}))}
    assert all(finding.ok is not True and finding.fix for finding in found.values())
    assert "imagebuild engine up" in found["engine"].fix
    assert found["mmdebstrap"].fix == "as root: apt-get install mmdebstrap"


@pytest.mark.parametrize(("changed", "name", "ok", "detail"), CASES["one-thing-is-different"])
def test_one_thing_is_different(changed: dict[str, Any], name: str, ok: bool | None, detail: str) -> None:
    finding = findings(**changed)[name]
    assert (finding.ok, finding.detail[: len(detail)]) == (ok, detail)
    assert bool(finding.fix) is (ok is False or (name != "disk" and ok is None))


@pytest.mark.parametrize(("free", "ok"), [(3, False), (50, True)])
def test_an_engine_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, ok: bool) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free * 2**30))
    (tmp_path / "nvidia.yaml").touch()
    info = {**INFO, "DockerRootDir": str(tmp_path / "hidden"), "CDISpecDirs": [str(tmp_path)]}
    found = findings(info, host=f"unix://{tmp_path}")
    assert (found["disk"].ok, found["disk"].detail.partition(" at ")[0]) == (ok, f"{free} GiB free")
    assert found["GPU runtime"].ok
