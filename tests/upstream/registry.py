"""A temporary process of the distribution's docker-registry."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imagebuild.build.base import DIE_WITH_US

SECONDS = 30
"""Maximum time until the registry answers, in seconds."""


@contextmanager
def running(storage: Path, port: int = 0, *, deletes: bool = True) -> Iterator[str]:
    """Run a registry; yield its `host:port`. Port 0 selects a free port. `deletes` permits deletion of images."""
    address = f"127.0.0.1:{port or free_port()}"
    storage.mkdir(parents=True, exist_ok=True)
    config, log = storage.with_suffix(".yml"), storage.with_suffix(".log")
    config.write_text(json.dumps({
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(storage)}, "delete": {"enabled": deletes}},
        "http": {"addr": address},
    }))  # fmt: skip
    command = [*DIE_WITH_US, "docker-registry", "serve", str(config)]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not answers(address):
                assert process.poll() is None, log.read_text()[-1000:]
                assert time.monotonic() < deadline, log.read_text()[-1000:]
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def answers(address: str) -> bool:
    """Return whether a registry answers at `host:port`."""
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=1):
            return True
    except OSError:
        return False


def free_port(wanted: int = 0) -> int:
    """Return the wanted port if it is free, or else any free port."""
    with socket.socket() as trial:
        # A port that was just released counts as free.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", wanted))
        except OSError:
            trial.bind(("", 0))
        return int(trial.getsockname()[1])
