"""Finding engines, output of containers, engines that fail, and the nodes of builders, as `docker buildx inspect` of buildx 0.24
and later describes them."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from docker import APIClient
from docker.errors import APIError, NotFound

from imagebuild.core.errors import CommandError
from imagebuild.core.leftovers import owner
from imagebuild.oci import engine as engines
from tests.conftest import data
from tests.unit.conftest import BUILDX, Runner

CASES = data("cases/oci/engine")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"
HOST = "tcp://192.0.2.1:1"
CONTEXT = {"docker context inspect": "tcp://192.0.2.2:1\n"}


def test_paths_by_default_and_in_another_place() -> None:
    assert engines.EnginePaths.of({}).host == "unix:///run/imagebuild/docker.sock"
    other = engines.EnginePaths.of({"IMAGEBUILD_STATE": "/tmp/" + "long/" * 40})
    assert other.bridge != engines.EnginePaths.of({"IMAGEBUILD_STATE": "/tmp/x"}).bridge
    assert len(other.bridge) <= 15
    assert len(str(other.socket)) <= 107
    assert engines.EnginePaths.of({"IMAGEBUILD_STATE": "here"}).state == Path.cwd() / "here"


@pytest.mark.parametrize(("environ", "answers", "found", "not_asked"), CASES["an-engine-is-found"])
def test_an_engine_is_found(environ: dict[str, str], answers: dict[str, str], found: list[str], not_asked: str) -> None:
    run = Runner({**BUILDX, **answers})
    endpoint = engines.find_engine(environ, run)
    assert [endpoint.host, endpoint.origin] == found
    assert not run.of(not_asked)
    assert endpoint.environment == ({} if endpoint.origin == "context" else {"DOCKER_HOST": endpoint.host})


def test_find_ends_at_the_private_engine(private: engines.EnginePaths) -> None:
    run = Runner({**BUILDX, **CONTEXT, "docker version": "25.0.3\n", f"docker --host {private.host} version": "26.1.5"})
    with pytest.raises(CommandError) as caught:
        engines.find_engine({}, run)
    first, *tried = str(caught.value).splitlines()
    assert "`imagebuild engine up`" in first
    assert "25.0.3 is too old" in tried[0]
    assert "its socket does not exist" in tried[1]
    private.run.mkdir()
    private.socket.touch()
    assert engines.find_engine({}, run) == engines.Endpoint(private.host, "private")


def test_find_does_not_fall_back_from_docker_host() -> None:
    run = Runner({**BUILDX, **CONTEXT, "docker version": "28.0.0"})
    with pytest.raises(CommandError, match=rf"unset DOCKER_HOST\n  DOCKER_HOST \({HOST}\): .*Cannot connect"):
        engines.find_engine({"DOCKER_HOST": HOST}, run)
    with pytest.raises(CommandError, match=r"`docker buildx` cannot be used.*imagebuild engine up"):
        engines.find_engine({"DOCKER_HOST": HOST}, Runner({}))
    assert (
        engines.buildx_version(Runner({"docker buildx version": "buildah 1.33.0"})) == ()
    )  # podman's is another program


# What programs in containers print


def frame(text: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(text).to_bytes(4) + text


@pytest.fixture
def engine() -> Iterator[Callable[..., Iterator[bytes]]]:
    """Return the output of a program on a fake engine that sends these pieces separately and then hangs up."""
    threads = []
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer(pieces: tuple[bytes, ...]) -> None:
            connection, _ = server.accept()
            with connection:
                request = b""
                while not request.endswith(b"}"):
                    request += connection.recv(1 << 16)
                for piece in pieces:
                    connection.sendall(piece)

        def start(*pieces: bytes) -> Iterator[bytes]:
            threads.append(threading.Thread(target=answer, args=(pieces,)))
            threads[-1].start()
            client = APIClient(f"tcp://127.0.0.1:{server.getsockname()[1]}", version="1.44")
            return engines.exec_output(client, "1")

        yield start
        for thread in threads:
            thread.join(60)


def test_output_in_frames(engine: Callable[..., Iterator[bytes]]) -> None:
    # Also what comes together with the head of the reply, which the SDK loses now and then.
    assert list(engine(HEAD + frame(b"out\n") + frame(b"err\n", 2))) == [b"out\n", b"err\n"]
    whole = frame(b"x" * 100_000) + frame(b"") + frame(b"y")
    pieces = (whole[n : n + 7777] for n in range(0, len(whole), 7777))
    assert b"".join(engine(HEAD, *pieces)) == b"x" * 100_000 + b"y"


def test_an_engine_that_refuses_or_stops(engine: Callable[..., Iterator[bytes]]) -> None:
    body = b'{"message": "container is paused"}'
    with pytest.raises(APIError, match="container is paused"):
        list(engine(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n" % len(body) + body))
    with pytest.raises(CommandError, match="stopped in the middle"), engines.sdk_errors_explained("check"):
        list(engine(HEAD + frame(b"whole")[:-1]))
    for missing in range(1, 12):
        with pytest.raises(ConnectionError):
            list(engines.output_frames(io.BytesIO(frame(b"abc") + frame(b"abcd")[:-missing])))


@pytest.mark.parametrize(
    ("errors", "left"),
    [
        ([APIError("has active endpoints")] * 3, 0),  # a container is still leaving the network
        ([NotFound("no such network")] * 2, 1),
        ([ConnectionError("refused")] * 2, 1),  # the engine is gone, and not asked again
    ],
)
def test_what_was_started_is_removed(errors: list[Exception], left: int) -> None:
    still = list(errors)

    def remove() -> None:
        if still:
            raise still.pop(0)

    engines.remove_patiently(remove)
    assert len(still) == left
    if not left:
        still += [APIError("403", explanation="network imagebuild-1 has active endpoints")]
        with pytest.raises(
            CommandError,
            match="could not remove a container or network that imagebuild made: network imagebuild-1 has active",
        ):
            engines.remove_patiently(remove, within_s=-1)


def test_what_killed_processes_left_in_the_engine_is_removed() -> None:
    machine, pid, _ = owner().split("-")
    left, used = f"{machine}-{pid}-1", owner()
    containers = [Mock(labels={engines.OWNER: name}) for name in (left, used, f"00000000-{pid}-1")]
    networks = [Mock(attrs={"Labels": {engines.OWNER: name}}) for name in (left, used)]
    images = [Mock(tags=[f"imagebuild-verify/x:{name}"]) for name in (left, used)]
    volumes = [Mock(attrs={"Labels": {engines.OWNER: name, engines.PULLED: "x"}}) for name in (left, used)]
    client = Mock()
    for kind, found in ((client.containers, containers), (client.networks, networks), (client.images, images)):
        kind.list.return_value = found
    client.volumes.list.side_effect = lambda filters: [] if filters["label"] == f"{engines.PULLED}=x" else volumes
    engines.remove_leftovers(client)
    assert [volume.remove.called for volume in volumes] == [True, False]
    assert [bool(each.remove.called) for each in (*containers, *networks)] == [True, False, False, True, False]
    assert client.images.remove.mock_calls == [call(f"imagebuild-verify/x:{left}", force=True), call("x")]
