"""The options of containers. Sessions in containers are tested with an engine, in tests/docker."""

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from docker import DockerClient

from imagebuild.verify import docker
from imagebuild.verify.docker import CDI, GPU, container_options, weaker_options, with_share_of_gpus
from tests.conftest import data


def test_an_option_that_the_engine_refuses_is_left_out() -> None:
    options = container_options({"MemTotal": 64 << 30, "Runtimes": {"nvidia": {}}})
    assert {u["Name"]: u["Soft"] for u in options["ulimits"]} == {"memlock": -1, "stack": 64 << 20}
    assert (options["shm_size"], options["device_requests"]) == (32 << 30, [GPU])
    for refusal, name, value in (
        ("runc: error setting rlimit type 8: operation not permitted", "ulimits", None),
        ("nvidia-container-cli: initialization error: driver not loaded", "device_requests", [CDI]),
        ("unresolvable CDI devices nvidia.com/gpu=all: not permitted", "device_requests", None),
        ('error gathering device information while adding "/dev/infiniband": no such file', "devices", None),
    ):
        assert weaker_options(options, "no such image") is None
        before, options = options, weaker_options(options, refusal) or {}
        assert options.get(name) == value
        assert options == {key: options.get(key, value) for key in before if key != name or value}
    assert options.keys() == {"hostname", "shm_size", "cap_add"}
    assert weaker_options(options, "operation not permitted") is None
    assert container_options({"CDISpecDirs": ["/etc/cdi"]})["device_requests"] == [CDI]
    assert container_options({"Runtimes": {"nvidia": {}}}, bare=True).keys() == {"hostname", "shm_size", "cap_add"}


@pytest.mark.parametrize(("url", "name", "present", "bare"), data("cases/verify/docker"))
def test_only_the_own_machine_is_known_to_lack_hardware(
    url: str, name: str, present: str, bare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "HARDWARE", (str(tmp_path / "module"),))
    (tmp_path / "cdi").mkdir()
    if present:
        (tmp_path / present).touch()
    client = cast(DockerClient, SimpleNamespace(api=SimpleNamespace(base_url=url)))
    info = {"Name": name or platform.node(), "CDISpecDirs": [str(tmp_path / "cdi"), str(tmp_path / "none")]}
    assert docker.lacks_hardware(client, info) is bare


def test_nodes_share_the_gpus() -> None:
    options = {"hostname": "check", "device_requests": [GPU]}
    second = with_share_of_gpus(options, 1, 2, 8)["device_requests"][0]
    assert second["DeviceIDs"] == ["4", "5", "6", "7"]
    cdi = with_share_of_gpus({"device_requests": [CDI]}, 0, 2, 2)["device_requests"][0]
    assert (cdi["Driver"], cdi["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=0"])
    assert with_share_of_gpus(options, 0, 4, 2) == options
    assert with_share_of_gpus({"hostname": "check"}, 0, 2, 8) == {"hostname": "check"}
