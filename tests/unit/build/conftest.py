"""A server of packages, and a store that fetches from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.build.inputs import DownloadStore
from imagebuild.core.http import Downloads, Patience
from imagebuild.core.settings import Mirrors
from tests.upstream.server import Server


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "site" / "host").mkdir(parents=True)
    (tmp_path / "site" / "host" / "x_1.0+b~1.deb").write_bytes(b"deb" * 100_000)
    with Server(tmp_path / "site").running() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, site: Server) -> DownloadStore:
    """A store that fetches."""
    near = f"http://127.0.0.1:{site.port}/"
    mirrors = Mirrors(downloads={"http://far.example/": near, "https://far.example/": near})
    return DownloadStore(tmp_path / "store", Downloads(mirrors.download, patience=Patience(0.1, 0.001)))
