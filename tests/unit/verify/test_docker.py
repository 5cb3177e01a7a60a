"""The options of containers. Sessions in containers are tested with an engine, in tests/docker."""

from imagebuild.verify.docker import CDI, GPU, container_options, with_share_of_gpus


def test_containers_are_started_with_what_the_engine_may_have() -> None:
    """The engine gets the first options that it accepts. The last ones are without limits, GPUs and NICs."""
    best, *_, least = container_options({"MemTotal": 64 << 30, "Runtimes": {"nvidia": {}}, "CDISpecDirs": ["/etc/cdi"]})
    assert {u["Name"]: u["Soft"] for u in best["ulimits"]} == {"memlock": -1, "stack": 64 << 20}
    assert (best["shm_size"], best["device_requests"], "devices" in best) == (32 << 30, [GPU], True)
    assert least.keys() == {"hostname", "shm_size", "cap_add"}
    found = [
        ("ulimits" in o, [r.driver for r in o.get("device_requests", ())], "devices" in o)
        for o in container_options({"CDISpecDirs": ["/etc/cdi"]})
    ]
    with_limits = [(True, ["cdi"], True), (True, ["cdi"], False), (True, [], True), (True, [], False)]
    assert found == with_limits + [(False, *rest) for _, *rest in with_limits]


def test_nodes_share_the_gpus() -> None:
    options = {"hostname": "check", "device_requests": [GPU]}
    second = with_share_of_gpus(options, 1, 2, 8)["device_requests"][0]
    assert second["DeviceIDs"] == ["4", "5", "6", "7"]
    cdi = with_share_of_gpus({"device_requests": [CDI]}, 0, 2, 2)["device_requests"][0]
    assert (cdi["Driver"], cdi["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=0"])
    assert with_share_of_gpus(options, 0, 4, 2) == options
    assert with_share_of_gpus({"hostname": "check"}, 0, 2, 8) == {"hostname": "check"}
