"""The package proxy: what it fetches once, it plays back later. Servers are threads of this process."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from imagebuild.build import (
    DownloadStore,
    FetchingIndex,
    FetchingStore,
    ProxyContent,
    StoredIndex,
    package_proxy,
    parse_index_page,
    stored_path,
)
from imagebuild.core import Absent, CommandError, ConfigError, Downloads, Mirrors, ResultError, without_login

WHEEL = b"a wheel"
SHA = hashlib.sha256(WHEEL).hexdigest()
NAME = "my_lib-1.0-py3-none-any.whl"


class Upstream:
    """A site whose files are a table; some answers are wrong on purpose."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.logins: list[str | None] = []
        self.failures = 0
        self.cut = 0
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                upstream.asked.append(self.path)
                upstream.logins.append(self.headers.get("Authorization"))
                if upstream.failures:
                    upstream.failures -= 1
                    self.send_error(503)
                elif self.path not in upstream.files:
                    self.send_error(404)
                else:
                    content = upstream.files[self.path]
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content) + upstream.cut))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Upstream()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Proxies:
    """Recording and replaying proxies for one folder."""

    def __init__(self, folder: Path, upstream: Upstream, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.log: list[str] = []
        mirrors = Mirrors(downloads={"https://far.example/": f"{upstream.url}/"})
        self.store = FetchingStore(folder, Downloads(mirrors.download, pause_s=0))
        self.index = FetchingIndex(self.store, f"{upstream.url}/simple/", frozenset({SHA}))

    def record(self) -> str:
        return self.stack.enter_context(
            package_proxy("127.0.0.1", ProxyContent(self.store, self.index, self.log.append))
        )

    def replay(self) -> str:
        store = DownloadStore(self.folder, self.store.files)
        content = ProxyContent(store, StoredIndex(store, self.index.wheels), self.log.append)
        return self.stack.enter_context(package_proxy("127.0.0.1", content))


@pytest.fixture
def proxies(tmp_path: Path, upstream: Upstream) -> Iterator[Proxies]:
    with ExitStack() as stack:
        yield Proxies(tmp_path, upstream, stack)


def ask(address: str, target: str) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)) as connection:
        connection.request("GET", target)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def test_a_proxy_records_and_plays_back(proxies: Proxies, upstream: Upstream) -> None:
    upstream.files["/pool/x_1.0+b~1.deb"] = b"deb" * 100_000
    target = "http://far.example:443/pool/x_1.0+b~1.deb"
    recording, replaying = proxies.record(), proxies.replay()
    assert ask(replaying, target)[0] == 404
    for address in (recording, recording, replaying):
        assert ask(address, target) == (200, b"deb" * 100_000)
    assert upstream.asked == ["/pool/x_1.0+b~1.deb"]
    assert list(proxies.store.files) == ["https://far.example/pool/x_1.0+b~1.deb"]
    assert ask(recording, "http://far.example/gone")[0] == 404


def test_a_site_that_fails_a_few_times(proxies: Proxies, upstream: Upstream) -> None:
    upstream.files["/x"] = b"x"
    upstream.failures = 3
    assert ask(proxies.record(), "http://far.example/x") == (200, b"x")
    upstream.failures = 9
    assert ask(proxies.record(), "http://far.example/y")[0] == 502


def test_half_a_download_is_not_kept(proxies: Proxies, upstream: Upstream) -> None:
    upstream.files["/x"] = b"x"
    upstream.cut = 5
    with pytest.raises(CommandError, match="ended after 1 of 6 bytes"):
        proxies.store.get("https://far.example/x")
    with pytest.raises(http.client.IncompleteRead):
        ask(proxies.record(), "http://far.example/x")
    assert not proxies.store.files
    assert not [p for p in proxies.folder.rglob("*") if p.is_file()]


@pytest.mark.parametrize("form", ["html", "json"])
def test_the_index_offers_what_the_lock_has(proxies: Proxies, upstream: Upstream, form: str) -> None:
    links = {f"../../files/{NAME}": SHA, "../../files/my_lib-2.0-py3-none-any.whl": "0" * 64}
    page = "".join(f'<a href="{url}#sha256={digest}">x</a>' for url, digest in links.items())
    entries = [{"url": url, "hashes": {"sha256": digest}} for url, digest in links.items()]
    upstream.files["/simple/my-lib/"] = (page if form == "html" else json.dumps({"files": entries})).encode()
    upstream.files[f"/files/{NAME}"] = WHEEL
    recording, replaying = proxies.record(), proxies.replay()
    status, text = ask(recording, "/simple/my-lib/")
    assert (status, text.count(b"<a ")) == (200, 1)
    assert ask(recording, f"/wheels/{NAME}") == (200, WHEEL)
    upstream.files.clear()
    assert ask(replaying, "/simple/my-lib/") == (200, text)
    assert ask(replaying, "/simple/My.Lib/") == (200, text)
    assert ask(replaying, f"/wheels/{NAME}") == (200, WHEEL)
    assert ask(replaying, "/wheels/other-1-py3-none-any.whl")[0] == 404
    assert parse_index_page(text.decode(), "http://d/simple/my-lib/") == {NAME: (f"http://d/wheels/{NAME}", SHA)}


def test_a_wheel_that_is_not_what_the_index_says(proxies: Proxies, upstream: Upstream) -> None:
    upstream.files["/simple/my-lib/"] = f'<a href="/files/{NAME}#sha256={SHA}">x</a>'.encode()
    upstream.files[f"/files/{NAME}"] = b"another"
    proxies.index.page("my-lib")
    with pytest.raises(ResultError, match="its sha256 is not"):
        proxies.index.wheel(NAME, lambda _: lambda _: None)
    assert not proxies.index.wheels


def test_a_changed_file_is_found(proxies: Proxies, upstream: Upstream) -> None:
    upstream.files["/x"] = b"x"
    path = proxies.store.get("https://far.example/x")
    proxies.store.check("https://far.example/x")
    path.write_bytes(b"y")
    with pytest.raises(ResultError, match="has changed"):
        proxies.store.check("https://far.example/x")
    path.write_bytes(b"xy")
    with pytest.raises(ResultError, match="is missing or cut off"):
        proxies.store.check("https://far.example/x")


def test_passwords_go_to_their_host_only(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password geheim\n")
    upstream.files["/x"] = b"x"
    Downloads(netrc=tmp_path / "netrc").read(f"{upstream.url}/x")
    Downloads().read(f"{upstream.url}/x")
    assert upstream.logins == ["Basic bWU6Z2VoZWlt", None]


def test_a_password_in_an_address_is_taken_out() -> None:
    assert without_login("https://me:a%40b@i.example:1/s/") == (
        "https://i.example:1/s/",
        {"i.example:1": ("me", "a@b")},
    )
    assert without_login("https://i.example/s/") == ("https://i.example/s/", {})


def test_what_is_absent_is_said_once(upstream: Upstream) -> None:
    with pytest.raises(Absent):
        Downloads().read(f"{upstream.url}/gone")
    assert len(upstream.asked) == 1


@pytest.mark.parametrize("url", ["https://a.b/", "https://a.b/x/", "https://a.b/../../etc/passwd", "https:///x"])
def test_addresses_that_are_no_files(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a file"):
        stored_path(url)


def test_names_of_files() -> None:
    assert stored_path("https://a.b:8/c/d_1%3a2.deb?x=1") == "files/https/a.b:8/c/d_1%3a2.deb%3Fx=1"
