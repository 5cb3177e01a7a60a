"""The distribution's docker-registry, on a free port of the loopback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

START_S = 30


@contextmanager
def distribution(folder: Path, *, deletes: bool = True, memory: bool = False) -> Iterator[str]:
    """Its address, `127.0.0.1:…`; what it stores is in memory or below the folder, and gone when it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    store: dict[str, dict[str, str]] = {"filesystem": {"rootdirectory": str(folder / "data")}}
    if memory:
        store = {"inmemory": {}}
    config = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {**store, "delete": {"enabled": deletes}},
        "http": {"addr": address},
    }
    (folder / "registry.yml").write_text(json.dumps(config))
    with (folder / "registry.log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", folder / "registry.yml"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(address):
            assert time.monotonic() < deadline, (folder / "registry.log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder / "data", ignore_errors=True)


def _answers(address: str) -> bool:
    try:
        with urlopen(f"http://{address}/v2/", timeout=1):
            return True
    except OSError:
        return False
