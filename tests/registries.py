"""The distribution's docker-registry, on a free port of the loopback, for one test."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.upstream import registry


@contextmanager
def distribution(folder: Path, *, deletes: bool = True) -> Iterator[str]:
    """Its address, `127.0.0.1:…`; what it stores is below the folder, and gone when it ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    try:
        with registry.running(folder / "data", port, {"delete": {"enabled": deletes}}) as address:
            yield address
    finally:
        shutil.rmtree(folder / "data", ignore_errors=True)
