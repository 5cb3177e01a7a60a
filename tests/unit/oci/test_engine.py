from pathlib import Path

import pytest

from imagebuild.core import CommandError
from imagebuild.oci import Endpoint, EnginePaths, buildx_version, find_engine
from tests.unit.conftest import BUILDX, Runner


def context(host: str) -> dict[str, str]:
    return {"docker context inspect": f"{host}\n"}


def test_paths_by_default_and_in_another_place() -> None:
    usual = EnginePaths.of({})
    assert usual.host == "unix:///run/imagebuild/docker.sock"
    assert usual.bridge == "imagebuild0"
    assert usual.data == Path("/var/lib/imagebuild/engine/data")
    other = EnginePaths.of({"IMAGEBUILD_STATE": "/tmp/" + "long/" * 40})
    assert other.bridge != EnginePaths.of({"IMAGEBUILD_STATE": "/tmp/x"}).bridge
    assert len(other.bridge) <= 15
    assert len(str(other.socket)) <= 107
    assert EnginePaths.of({"IMAGEBUILD_STATE": "here"}).state == Path.cwd() / "here"


def test_find_prefers_docker_host() -> None:
    run = Runner({**BUILDX, "docker --host tcp://192.0.2.1:1 version": "26.1.5+dfsg1\n"})
    found = find_engine({"DOCKER_HOST": "tcp://192.0.2.1:1"}, run)
    assert (found.host, found.origin) == ("tcp://192.0.2.1:1", "DOCKER_HOST")
    assert not run.of("docker context")


def test_find_does_not_fall_back_from_docker_host() -> None:
    run = Runner({**BUILDX, **context("tcp://192.0.2.2:1"), "docker version": "28.0.0"})
    with pytest.raises(CommandError, match=r"DOCKER_HOST=tcp://192\.0\.2\.1:1: .*Cannot connect; .*unset DOCKER_HOST"):
        find_engine({"DOCKER_HOST": "tcp://192.0.2.1:1"}, run)


def test_find_uses_the_context_with_its_keys() -> None:
    run = Runner({**BUILDX, **context("tcp://192.0.2.2:1"), "docker version": "28.0.0"})
    found = find_engine({}, run)
    assert (found.host, found.origin) == ("tcp://192.0.2.2:1", "context")
    assert not run.of("docker --host")


def test_find_ends_at_the_private_engine(private: EnginePaths) -> None:
    private.run.mkdir()
    private.socket.touch()
    answer = {f"docker --host {private.host} version": "26.1.5"}
    run = Runner({**BUILDX, **context("tcp://192.0.2.2:1"), "docker version": "25.0.3", **answer})
    assert find_engine({}, run) == Endpoint(private.host, "private")


def test_find_says_what_was_tried(private: EnginePaths) -> None:
    run = Runner({**BUILDX, **context("tcp://192.0.2.2:1"), "docker version": "25.0.3\n"})
    with pytest.raises(CommandError) as caught:
        find_engine({}, run)
    first, *tried = str(caught.value).splitlines()
    assert "`imagebuild engine up`" in first
    assert "25.0.3 is too old" in tried[0]
    assert "no socket there" in tried[1]


def test_find_without_buildx() -> None:
    with pytest.raises(CommandError, match=r"`docker buildx` cannot be used.*imagebuild engine up"):
        find_engine({"DOCKER_HOST": "tcp://192.0.2.1:1"}, Runner({}))


def test_podmans_buildx_is_not_docker_buildx() -> None:
    assert buildx_version(Runner({"docker buildx version": "buildah 1.33.0"})) == ()


def test_the_cli_is_led_to_the_engine_but_not_past_a_context() -> None:
    assert Endpoint("unix:///x", "private").environment == {"DOCKER_HOST": "unix:///x"}
    assert Endpoint("unix:///x", "DOCKER_HOST").environment == {"DOCKER_HOST": "unix:///x"}
    assert Endpoint("tcp://192.0.2.2:1", "context").environment == {}
