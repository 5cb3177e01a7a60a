"""The package proxy: what it fetches once, it plays back later. Servers are threads of this process."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from imagebuild.build import (
    BuildInputs,
    DownloadStore,
    InputsRequest,
    NeededInputs,
    Trees,
    WheelFiles,
    fetch_wheels,
    index_page,
    package_proxy,
    stored_path,
)
from imagebuild.core import (
    CommandError,
    ConfigError,
    Downloads,
    Mirrors,
    Patience,
    ResultError,
    Settings,
    Unreachable,
    file_sha256,
)
from imagebuild.oci import Endpoint
from tests.upstream.server import Server
from tests.upstream.wheels import make_wheel

NAME = "my_lib-1.0+x-py3-none-any.whl"
URL = "https://far.example/host/x_1.0+b~1.deb"


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
    return DownloadStore(tmp_path / "store", {}, Downloads(mirrors.download, patience=Patience(0.1, 0.001)))


def ask(address: str, target: str, method: str = "GET") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(method, target)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def test_a_proxy_records_and_plays_back(store: DownloadStore, site: Server) -> None:
    target = "http://far.example:443/host/x_1.0+b~1.deb"
    log: list[str] = []
    with ExitStack() as stack:
        replayed = DownloadStore(store.folder, store.files)
        recording = stack.enter_context(package_proxy("127.0.0.1", store, log.append))
        replaying = stack.enter_context(package_proxy("127.0.0.1", replayed, log.append))
        assert ask(replaying, target)[0] == 404
        for address in (recording, recording, replaying):
            assert ask(address, target) == (200, b"deb" * 100_000)
        assert ask(replaying, target, "HEAD") == (200, b"")
        assert [r.path for r in site.requests] == ["/host/x_1.0+b~1.deb"]
        assert list(store.files) == [URL]
        assert ask(recording, "http://far.example/host/gone")[0] == 404
        site.fail("/host/", status=503, times=9999)
        assert ask(recording, "http://far.example/host/x_1.0+b~1.deb")[0] == 502
        assert [ask(recording, path)[0] for path in ("/", "/simple/", "/../etc/passwd", "/wheels/gone.whl")] == [
            502
        ] * 4
    assert len(log) == 7
    assert "503" in log[2]


def test_half_a_download_is_not_kept(store: DownloadStore, site: Server) -> None:
    site.truncate("/host/")
    with pytest.raises(Unreachable, match="ended after"):
        store.get(URL)
    assert not store.files
    assert not [path for path in store.folder.rglob("*") if path.is_file()]


def test_a_package_index_of_the_wheels_that_are_here(store: DownloadStore) -> None:
    (store.folder / "wheels").mkdir(parents=True)
    (store.folder / "wheels" / NAME).write_bytes(b"a wheel")
    store.add(f"/wheels/{NAME}", store.folder / "wheels" / NAME)
    with package_proxy("127.0.0.1", store, lambda _: None) as proxy:
        status, page = ask(proxy, "/simple/My.Lib/")
        assert (status, page.decode()) == (200, index_page(store, "my-lib"))
        assert f'href="/wheels/{NAME}#sha256={store.files[f"/wheels/{NAME}"].sha256}"' in page.decode()
        assert ask(proxy, f"/wheels/{NAME.replace('+', '%2B')}") == (200, b"a wheel")
        assert ask(proxy, "/simple/other/")[0] == 404


@pytest.mark.programs
def test_wheels_are_fetched_for_both_architectures(
    store: DownloadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    made = {
        arch: make_wheel(tmp_path, "my-lib", "1.0", f"manylinux2014_{cpu}")
        for arch, cpu in (("amd64", "x86_64"), ("arm64", "aarch64"))
    }
    wheels = {WheelFiles(arch, (f"my-lib==1.0 --hash=sha256:{file_sha256(p)}",)) for arch, p in made.items()}  # type: ignore[arg-type]
    needs = {"target": NeededInputs({}, frozenset(), frozenset(wheels))}
    request = InputsRequest(
        needs,
        BuildInputs(),
        Endpoint("unix:///x", "private"),
        Settings(),
        None,
        Trees(tmp_path),
        tmp_path,
        lambda _: None,
    )
    fetch_wheels(request, store)
    assert {path: file.sha256 for path, file in store.files.items()} == {
        f"/wheels/{path.name}": file_sha256(path) for path in made.values()
    }
    wrong = NeededInputs({}, frozenset(), frozenset({WheelFiles("amd64", (f"my-lib==1.0 --hash=sha256:{'0' * 64}",))}))
    with pytest.raises(
        CommandError, match=r"pip cannot download my-lib==1.0 for amd64: (.|\n)*DO NOT MATCH THE HASHES"
    ):
        fetch_wheels(replace(request, needs={"target": wrong}), store)


def test_a_changed_file_is_found(store: DownloadStore) -> None:
    path = store.get(URL)
    assert store.checked(URL) == path
    bundle = DownloadStore(store.folder, store.files)
    path.write_bytes(b"X" * path.stat().st_size)
    with pytest.raises(ResultError, match="has changed"):
        bundle.checked(URL)
    path.write_bytes(b"x")
    with pytest.raises(ResultError, match="has no https://far.example/host/x_1.0"):
        bundle.checked(URL)
    shutil.rmtree(store.folder)


@pytest.mark.parametrize("url", ["https://a.b/", "https://a.b/x/", "https://a.b/../../etc/passwd", "https:///x"])
def test_addresses_that_are_no_files(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a file"):
        stored_path(url)


def test_names_of_files() -> None:
    assert stored_path("https://a.b:8/c/d_1%3a2.deb?x=1") == "files/https/a.b:8/c/d_1%3a2.deb%3Fx=1"
