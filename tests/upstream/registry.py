"""The distribution's docker-registry, started for as long as it is needed."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from imagebuild.build import DIE_WITH_US
from imagebuild.core import CommandError

SECONDS = 30
"""It answers after a moment, or something is wrong."""


@contextmanager
def running(storage: Path, port: int = 0, settings: Mapping[str, object] | None = None) -> Iterator[str]:
    """Its `host:port`, of a free port if it is 0; `settings` are added to how it stores.

    Raises CommandError, with what it said, if it does not start.
    """
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    address = f"127.0.0.1:{port}"
    storage.mkdir(parents=True, exist_ok=True)
    config, log = storage.with_suffix(".yml"), storage.with_suffix(".log")
    config.write_text(json.dumps({
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(storage)}, **(settings or {})},
        "http": {"addr": address},
    }))  # fmt: skip
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                [*DIE_WITH_US, "docker-registry", "serve", str(config)], stdout=file, stderr=file
            )
        except OSError as error:
            raise CommandError(f"`{DIE_WITH_US[0]}` cannot be run: {error.strerror}") from error
    try:
        deadline = time.monotonic() + SECONDS
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CommandError(f"docker-registry does not answer at {address}: {log.read_text()[-1000:]}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=1):
            return True
    except OSError:
        return False
