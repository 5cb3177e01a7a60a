"""What programs in containers print, as it comes from the engine."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from docker import APIClient
from docker.errors import APIError

from imagebuild.core import CommandError
from imagebuild.oci import ExecProcess, output_frames, sdk_errors_explained

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"


def frame(text: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(text).to_bytes(4) + text


@pytest.fixture
def engine() -> Iterator[Callable[..., ExecProcess]]:
    """A stand-in for an engine: it answers one request with these pieces, each sent by itself, and hangs up."""
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

        def start(*pieces: bytes) -> ExecProcess:
            threads.append(threading.Thread(target=answer, args=(pieces,)))
            threads[-1].start()
            return ExecProcess(APIClient(f"tcp://127.0.0.1:{server.getsockname()[1]}", version="1.44"), "1")

        yield start
        for thread in threads:
            thread.join(10)


def test_output_that_comes_with_the_head_of_the_reply(engine: Callable[..., ExecProcess]) -> None:
    assert list(engine(HEAD + frame(b"out\n") + frame(b"err\n", 2)).output()) == [b"out\n", b"err\n"]


def test_frames_that_come_in_pieces(engine: Callable[..., ExecProcess]) -> None:
    whole = frame(b"x" * 100_000) + frame(b"") + frame(b"y")
    assert (
        b"".join(engine(HEAD, *(whole[n : n + 7777] for n in range(0, len(whole), 7777))).output())
        == b"x" * 100_000 + b"y"
    )


def test_an_engine_that_refuses(engine: Callable[..., ExecProcess]) -> None:
    body = b'{"message": "container is paused"}'
    refused = engine(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    with pytest.raises(APIError, match="container is paused"):
        list(refused.output())


def test_an_engine_that_stops_in_the_middle(engine: Callable[..., ExecProcess]) -> None:
    with pytest.raises(CommandError, match="stopped in the middle"), sdk_errors_explained("check"):
        list(engine(HEAD + frame(b"whole")[:-1]).output())


@pytest.mark.parametrize("missing", range(1, 12))
def test_a_stream_that_is_cut_off(missing: int) -> None:
    cut = frame(b"abc") + frame(b"abcd")[:-missing]
    with pytest.raises(ConnectionError):
        list(output_frames(io.BytesIO(cut)))
