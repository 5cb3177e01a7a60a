"""A server of packages with a store that fetches from it, and a project with a copy as the earlier state."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.build.inputs import DownloadStore
from imagebuild.core.http import Downloads, Patience
from imagebuild.core.settings import Mirrors
from tests.conftest import LIBRARY, Files
from tests.unit.conftest import Call
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


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Commands on a project, with a copy of it in the folder `before` that tests do not change."""
    monkeypatch.chdir(tiny.root)
    tiny.write("dockerfiles/components/library/checks/loads.sh", "true\n")
    tiny.component("library", LIBRARY + "checks: [{name: loads, description: it loads}]\n")
    shutil.copytree(tiny.root, tiny.root / "before", ignore=shutil.ignore_patterns("before"))
    return command
