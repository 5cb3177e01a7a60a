"""Downloads from servers on this machine, with faults."""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import requests

from imagebuild.core import errors, http
from imagebuild.core.errors import Absent, CommandError, Unreachable
from imagebuild.core.http import Client, Downloads, Patience, login_for
from tests.conftest import data
from tests.faulty import Answer
from tests.unit.conftest import LOGIN, Serve

DATA = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(DATA).hexdigest()
SOON = Patience(0.1, 0.001)
GOOD = Answer(200, DATA)
HALF = Answer(200, DATA[:4096], length=len(DATA))


@pytest.mark.parametrize(
    "answers",
    [[GOOD], [Answer(500), Answer(429, headers={"Retry-After": "0"}), GOOD], [HALF, GOOD]],
    ids=["whole", "bad moments", "half once"],
)
def test_a_download_is_hashed_when_it_is_whole(serve: Serve, answers: list[Answer]) -> None:
    site, seen = serve(*answers), []
    digest = Downloads(patience=SOON).download(site.address, None, lambda *progress: seen.append(progress))
    assert (digest, len(site.asked)) == (SHA256, len(answers))
    assert seen[-1] == (len(DATA), len(DATA))


@pytest.mark.parametrize(("answer", "kind", "reason", "again"), data("cases/core/downloads"))
def test_what_is_no_file(serve: Serve, answer: dict[str, Any], kind: str, reason: str, again: bool) -> None:
    site = serve(HALF if "half" in answer else Answer(**{"content": DATA, **answer}))
    with pytest.raises(getattr(errors, kind), match=reason) as caught:
        Downloads(patience=SOON).download(site.address)
    assert isinstance(caught.value, Absent) == (kind == "Absent")
    assert len(site.asked) > 2 if again else len(site.asked) == 1


def test_what_is_no_address() -> None:
    with pytest.raises(CommandError, match=r"https://\[::1/x: is not an address"):
        Downloads().read("https://[::1/x")


def test_who_is_not_there_is_not_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    web = Downloads(patience=Patience(0))
    for name in ("one", "two"):
        with pytest.raises(Unreachable, match=f"{name}: .*Connection refused"):
            web.download(f"http://127.0.0.1:{port}/{name}")
    with pytest.raises(Unreachable, match="Failed to resolve 'host.invalid'"):
        web.download("https://host.invalid/a.tar")


def test_a_password_of_a_netrc_file_goes_to_its_host_and_no_further(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    elsewhere = serve(GOOD)
    site = serve(Answer(302, headers={"Location": elsewhere.address.replace("127.0.0.1", "localhost")}))
    assert Downloads(netrc_file=tmp_path / "netrc").read(site.address) == DATA
    # For the HTTP library, A\\@B is the host A with a path; for others, the host B with a user.
    with pytest.raises(CommandError, match=r"the host in '127\.0\.0\.1:\d+\\\\@127\.0\.0\.1' is unclear"):
        Downloads(netrc_file=tmp_path / "netrc").read(elsewhere.address.rpartition("/")[0] + "\\@127.0.0.1/x")
    assert (site.asked, elsewhere.asked) == ([LOGIN], [None])
    refusing = serve(Answer(401))
    with pytest.raises(Unreachable, match="the server answered 401") as caught:
        Downloads(netrc_file=tmp_path / "netrc").read(refusing.address)
    assert "secret" not in str(caught.value)


LOGINS: dict[str, Any] = data("cases/core/logins")


@pytest.mark.parametrize(("url", "user"), LOGINS["users"].items())
def test_logins_need_tls_and_a_named_host(url: str, user: str | None, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(LOGINS["netrc"])
    assert (login_for(url, tmp_path / "netrc") or (None,))[0] == user


def test_the_users_own_netrc_file_is_not_read(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    elsewhere = serve(GOOD)
    site = serve(Answer(302, headers={"Location": elsewhere.address}))
    assert Downloads().read(site.address) == DATA
    assert site.asked + elsewhere.asked == [None, None]


def test_given_certificates_are_not_replaced_by_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[object] = []

    def send(_: object, **options: object) -> None:
        used.append(options["verify"])
        raise requests.exceptions.SSLError("stopped")

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/hostname")
    for ca in (tmp_path / "ca.pem", None):
        client = Client(ca)
        monkeypatch.setattr(client.session, "send", send)
        with pytest.raises(CommandError, match="stopped"):
            client.send("GET", "https://site.example/", "x")
    assert used == [str(tmp_path / "ca.pem"), "/etc/hostname"]


BOMB = gzip.compress(bytes(64 << 20))
HOSTILE: dict[str, dict[str, Any]] = data("cases/core/http")


def streaming(begin: bytes, again: bytes, pause_s: float) -> str:
    """Start a server that sends `begin`, and then `again` without end, to each client, and return its URL."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        try:
            with client:
                client.recv(1 << 16)
                client.sendall(begin)
                while again:
                    client.sendall(again)
                    time.sleep(pause_s)
        except OSError:
            pass

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{server.getsockname()[1]}/a"


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("stream", [False, True])
def test_a_hostile_answer_ends_soon_and_stays_small(monkeypatch: pytest.MonkeyPatch, name: str, stream: bool) -> None:
    monkeypatch.setattr(http, "GRACE_S", 1.0)
    monkeypatch.setattr(http, "MOST_ANSWER", 1 << 20)
    row = HOSTILE[name]
    again = (row.get("again", "") * row.get("times", 1)).encode()
    url = streaming(row.get("begin", "").encode(), again, 0.05 if "drip" in name else 0)
    client = Client(patience=Patience(0))
    began = time.monotonic()

    def read() -> bytes:
        answer = client.send("GET", url, "request", timeout_s=1, stream=stream)
        return b"".join(client.chunks(answer, "request", 1 << 20))

    with pytest.raises(CommandError, match=row["says"]):
        read()
    assert time.monotonic() - began < 60


def test_an_answer_is_not_decompressed(serve: Serve) -> None:
    answer = Client().send("GET", serve(Answer(200, BOMB, {"Content-Encoding": "gzip"})).address, "request")
    assert answer.content == BOMB
    assert http.json_of(answer) == {}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_login_goes_to_its_host_and_no_further(serve: Serve, status: int) -> None:
    elsewhere = serve(GOOD)
    there = elsewhere.address.replace("127.0.0.1", "localhost")
    calls: dict[str, dict[str, Any]] = {"GET": {}, "PUT": {"data": b"x"}, "POST": {"data": {"refresh_token": "secret"}}}
    for method, options in calls.items():
        site = serve(Answer(status, headers={"Location": there}))
        refused = method == "POST" and status in (307, 308)
        logins: tuple[dict[str, Any], ...] = ({}, {"headers": {"Authorization": "Bearer secret"}})
        for given in logins:
            client = Client(Authorization="bearer session")  # the server does not read the content on its connection
            with pytest.raises(CommandError, match="redirects the login to localhost") if refused else nullcontext():
                client.send(method, site.address, "request", **options, **given)
        assert None not in site.asked
    assert set(elsewhere.asked) == {None}
    near = serve(Answer(status, headers={"Location": "/other"}), GOOD)
    Client().send("GET", near.address, "request", headers={"Authorization": "Bearer secret"})
    assert near.asked == ["Bearer secret"] * 2


def test_a_host_that_does_not_exist_is_asked_once() -> None:
    began = time.monotonic()
    with pytest.raises(Unreachable, match="gave up at once"):
        Client().retried("x", lambda: Client().send("GET", "http://no-such-host.invalid/x", "x"))
    assert time.monotonic() - began < 5
