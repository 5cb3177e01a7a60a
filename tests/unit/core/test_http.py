"""Downloads from servers on this machine, which have bad days."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from imagebuild.core import ATTEMPTS, Absent, CommandError, Downloads, Unreachable
from tests.unit.conftest import LOGIN, Answer, Site

DATA = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(DATA).hexdigest()
LENGTH = {"Content-Length": str(len(DATA))}


GOOD: Answer = (200, LENGTH, DATA)
HALF: Answer = (200, LENGTH, DATA[:4096])


@pytest.mark.parametrize(
    "answers",
    [[GOOD], [(500, {}, b""), (429, {"Retry-After": "0"}, b""), GOOD], [HALF, GOOD]],
    ids=["whole", "bad moments", "half once"],
)
def test_a_download_is_hashed_when_it_is_whole(serve: type[Site], answers: list[Answer]) -> None:
    site, seen = serve(*answers), []
    digest = Downloads(pause_s=0).sha256(site.address, lambda *progress: seen.append(progress))
    assert (digest, len(site.asked)) == (SHA256, len(answers))
    assert seen[-1] == (len(DATA), len(DATA))


@pytest.mark.parametrize(
    ("answer", "kind", "reason", "times"),
    [
        ((404, {}, b""), Absent, r"a.tar: the server does not have it \(404\)", 1),
        ((403, {}, b""), Unreachable, "the server answered 403 Forbidden", 1),
        ((503, {}, b""), Unreachable, "the server answered 503", ATTEMPTS),
        (HALF, Unreachable, f"ended after 4096 of {len(DATA)} bytes", ATTEMPTS),
        ((200, {}, DATA), CommandError, "does not say how long the file is", 1),
        ((200, {**LENGTH, "Content-Type": "text/html; charset=utf-8"}, DATA), CommandError, "is a web page", 1),
    ],
)
def test_what_is_no_file(serve: type[Site], answer: Answer, kind: type[CommandError], reason: str, times: int) -> None:
    site = serve(answer)
    with pytest.raises(kind, match=reason) as caught:
        Downloads(pause_s=0).sha256(site.address)
    assert isinstance(caught.value, Absent) == (kind is Absent)
    assert len(site.asked) == times


def test_who_is_not_there_is_not_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    web = Downloads()
    for name in ("one", "two"):
        with pytest.raises(Unreachable, match=f"{name}: .*Connection refused"):
            web.sha256(f"http://127.0.0.1:{port}/{name}")
    with pytest.raises(Unreachable, match="Failed to resolve 'host.invalid'"):
        web.sha256("https://host.invalid/a.tar")


def test_a_password_of_a_netrc_file_goes_to_its_host_and_no_further(serve: type[Site], tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    elsewhere = serve(GOOD)
    site = serve((302, {"Location": elsewhere.address.replace("127.0.0.1", "localhost"), "Content-Length": "0"}, b""))
    assert Downloads(netrc=tmp_path / "netrc").read(site.address) == DATA
    assert (site.asked, elsewhere.asked) == ([LOGIN], [None])
    refusing = serve((401, {}, b""))
    with pytest.raises(Unreachable, match="the server answered 401") as caught:
        Downloads(netrc=tmp_path / "netrc").read(refusing.address)
    assert "secret" not in str(caught.value)
