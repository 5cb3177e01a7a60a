"""The command `imagebuild hang`, with a socket that answers as NCCL's RAS socket does."""

import json
import socket
from threading import Thread
from typing import Any

import pytest

from tests.conftest import data
from tests.unit.bench.test_hang import answer
from tests.unit.conftest import Call

CASES = data("cases/cli/running")
pytestmark = pytest.mark.programs


def _bytes_of(said: Any) -> bytes:
    """Return an answer: a text, or the numbers of AllReduce of each rank and the missing ranks."""
    if isinstance(said, str):
        return said.encode("latin-1") * (1 << 20 if said == "huge" else 1)
    *counts, missing = said
    return answer([{"AllReduce": count} for count in counts], missing).encode()


@pytest.mark.parametrize("case", CASES["hang"], ids=lambda case: case["name"])
def test_hang(command: Call, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    def serve() -> None:
        for said in case["answers"]:
            with server.accept()[0] as connection:
                asked = b""
                while b"STATUS" not in asked:
                    asked += connection.recv(1024)
                connection.sendall(_bytes_of(said))

    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"localhost:{server.getsockname()[1]}")
        Thread(target=serve, daemon=True).start()
        status, out, err = command("hang", "--wait", case.get("wait", "0"), "--json", "-")
    assert (status, case.get("error", "") in err) == (case["status"], True), err
    if "error" not in case:
        hung = json.loads(out)["hung"]
        assert len(hung) == case["status"]
        assert all(text in "".join(hung) for text in case.get("says", ()))
