"""What the runners decide, without starting anything."""

import pytest

from imagebuild.project import Facilities
from imagebuild.verify import (
    CDI,
    GPU,
    Host,
    as_user,
    better_options,
    command_line,
    initial_options,
    read_probe,
    with_ranks,
    with_share_of_gpus,
    with_user,
)

ACCOUNT = (1000, 1001, "/home/me")
PROBED = """\
Welcome to node 7
imagebuild-probe:uid=0
0: imagebuild-probe:user=root
imagebuild-probe:tool=bash
imagebuild-probe:tool=nvidia-smi
imagebuild-probe:account=root:x:0:0:root:/root:/bin/bash
imagebuild-probe:account=me:x:1000:1001::/home/me:/bin/sh
imagebuild-probe:account=broken
imagebuild-probe:gpus=8
imagebuild-probe:port=/sys/class/infiniband/mlx5_0/ports/1/state 4: ACTIVE
imagebuild-probe:port=/sys/class/infiniband/mlx5_1/ports/1/state 1: DOWN
imagebuild-probe:verbs=/dev/infiniband/uverbs0
imagebuild-probe:kernel=6.1
imagebuild-probe:os="Some Linux"
imagebuild-probe:end=.
"""


def read(text: str) -> Host:
    host = read_probe(text)
    assert host
    return host


def test_the_probe_is_read_between_other_lines() -> None:
    host = read(PROBED)
    assert (host.user, host.uid, host.tools) == ("root", 0, frozenset({"bash", "nvidia-smi"}))
    assert host.accounts == {"root": (0, 0, "/root"), "me": (1000, 1001, "/home/me")}
    assert host.facts == {"kernel": "6.1", "os": "Some Linux"}
    assert host.facilities(nodes=1, slurm=False, why={}) == Facilities(gpus=8, rdma=True)


def test_a_probe_that_was_cut_off_is_none() -> None:
    assert read_probe(PROBED.replace("end=", "")) is None
    assert read_probe("") is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("1/state 4: ACTIVE", "1/state 2: INIT", {"rdma": "no port is active"}),
        ("verbs=", "x=", {"rdma": "no /dev/infiniband/uverbs* in the container"}),
        ("port=", "x=", {"rdma": "no port in /sys/class/infiniband"}),
        ("gpus=8", "gpus=0", {"gpu": "nvidia-smi lists no GPU"}),
        ("tool=nvidia-smi\n", "\n", {}),
        ("tool=nvidia-smi\n", "gpus=0\n", {"gpu": "no nvidia-smi, which a driver brings"}),
    ],
)
def test_why_something_is_absent(old: str, new: str, why: dict[str, str]) -> None:
    have = read(PROBED.replace(old, new)).facilities(nodes=2, slurm=True, why={"nodes": "is not asked"})
    assert have.why == why
    assert (have.gpus, have.rdma) == (0 if "gpu" in why else 8, "rdma" not in why)


def test_arguments_are_quoted_once_for_each_shell_on_the_way() -> None:
    argv = ["bash", "-c", "echo 'a b'"]
    assert command_line(["kubectl", "exec", "pod", "--"], argv)[-3:] == argv
    assert command_line(["/usr/bin/ssh", "node"], argv) == [
        "/usr/bin/ssh", "node", """bash -c 'echo '"'"'a b'"'"''""",
    ]  # fmt: skip
    twice = command_line(["ssh", "jump", "ssh", "node"], argv)
    once = command_line(["ssh", "node"], argv)
    assert len(twice) == 5
    assert twice[-1] != once[-1]


@pytest.mark.parametrize(
    ("prefix", "changed"),
    [
        ("docker exec -i c1", "docker exec --user 1000:1001 -i c1"),
        ("sudo podman exec c1", "sudo podman exec --user 1000:1001 c1"),
        ("ssh node docker exec c1", "ssh node docker exec --user 1000:1001 c1"),
        ("/opt/crun exec c1", "/opt/crun exec --user 1000:1001 c1"),
        ("docker run image", None),
        ("kubectl exec pod --", None),
        ("", None),
    ],
)
def test_the_option_for_the_user_stands_after_exec(prefix: str, changed: str | None) -> None:
    assert with_user(prefix.split(), ACCOUNT) == (changed.split() if changed else None)


@pytest.mark.parametrize(
    ("prefix", "changed"),
    [
        ("srun --container-image=x", "srun --mpi=pmix --ntasks=4 --nodes=2 --container-image=x"),
        ("ssh login srun", "ssh login srun --mpi=pmix --ntasks=4 --nodes=2"),
        ("ssh node", None),
    ],
)
def test_srun_is_told_the_ranks(prefix: str, changed: str | None) -> None:
    assert with_ranks(prefix.split(), 4, 2) == (changed.split() if changed else None)


@pytest.mark.parametrize(
    ("tools", "program"), [({"setpriv", "runuser", "su"}, "setpriv"), ({"runuser", "su"}, "runuser"), ({"su"}, "su")]
)
def test_root_changes_the_user_with_what_there_is(tools: set[str], program: str) -> None:
    argv = as_user("me", ACCOUNT, frozenset(tools), "echo")
    assert argv
    assert (argv[0], argv[-1]) == (program, "echo")
    assert as_user("me", ACCOUNT, frozenset(), "echo") is None


def test_gpus_are_asked_for_where_the_engine_has_them() -> None:
    plain, modest = initial_options({"MemTotal": 64 << 30})
    assert "device_requests" not in plain
    assert plain["shm_size"] == 32 << 30
    assert {u["Name"]: u["Soft"] for u in plain["ulimits"]} == {"memlock": -1, "stack": 64 << 20}
    assert "ulimits" not in modest
    with_gpus = initial_options({"Runtimes": {"nvidia": {}}})
    assert ["device_requests" in options for options in with_gpus] == [True, True, False, False]


@pytest.mark.parametrize(
    ("info", "text", "wanted"),
    [
        ({}, PROBED, []),
        ({"CDISpecDirs": ["/etc/cdi"]}, PROBED.replace("gpus=8", "gpus=0"), []),
        ({"CDISpecDirs": ["/etc/cdi"]}, PROBED.replace("gpus=8", "gpus=0") + "imagebuild-probe:driver=580", ["cdi", ""]),
        ({}, PROBED.replace("gpus=8", "gpus=0") + "imagebuild-probe:driver=580", [""]),
        ({}, PROBED.replace("verbs=", "x="), ["devices"]),
        ({}, PROBED.replace("verbs=", "x=").replace("gpus=8", "gpus=0\nimagebuild-probe:driver=1"),
         ["+devices", "devices", ""]),
    ],
)  # fmt: skip
def test_a_second_container_gets_what_the_first_lacked(
    info: dict[str, list[str]], text: str, wanted: list[str]
) -> None:
    tries = better_options({"hostname": "check"}, info, read(text))
    assert all(options["hostname"] == "check" for options in tries)
    found = []
    for options in tries:
        requests = options.get("device_requests")
        name = "devices" if "devices" in options else requests[0].driver if requests else "?"
        found.append(f"+{name}" if requests and "devices" in options else name or "")
    assert found == wanted


def test_nodes_share_the_gpus() -> None:
    options = {"hostname": "check", "device_requests": [GPU]}
    second = with_share_of_gpus(options, 1, 2, 8)["device_requests"][0]
    assert second["DeviceIDs"] == ["4", "5", "6", "7"]
    cdi = with_share_of_gpus({"device_requests": [CDI]}, 0, 2, 2)["device_requests"][0]
    assert (cdi["Driver"], cdi["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=0"])
    assert with_share_of_gpus(options, 0, 4, 2) == options
    assert with_share_of_gpus({"hostname": "check"}, 0, 2, 8) == {"hostname": "check"}
