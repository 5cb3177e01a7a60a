"""Downloads from servers on this machine, with faults."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from imagebuild.core.errors import Absent, CommandError, Unreachable
from imagebuild.core.http import Downloads, Patience
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


@pytest.mark.parametrize(
    ("answer", "kind", "reason", "again"),
    [
        (Answer(404), Absent, r"a.tar: the server does not have the file \(404\)", False),
        (Answer(403), Unreachable, r"the server answered 403 \(Forbidden\)", False),
        (Answer(503), Unreachable, r"the server answered 503 .*; gave up after", True),
        (HALF, Unreachable, f"ended after 4096 of {len(DATA)} bytes; gave up", True),
        (Answer(200, DATA, length=-1), CommandError, "does not say how long the file is", False),
        (Answer(200, DATA, {"Content-Type": "text/html; charset=utf-8"}), CommandError, "is a web page", False),
    ],
)
def test_what_is_no_file(serve: Serve, answer: Answer, kind: type[CommandError], reason: str, again: bool) -> None:
    site = serve(answer)
    with pytest.raises(kind, match=reason) as caught:
        Downloads(patience=SOON).download(site.address)
    assert isinstance(caught.value, Absent) == (kind is Absent)
    assert len(site.asked) > 2 if again else len(site.asked) == 1


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
    assert (site.asked, elsewhere.asked) == ([LOGIN], [None])
    refusing = serve(Answer(401))
    with pytest.raises(Unreachable, match="the server answered 401") as caught:
        Downloads(netrc_file=tmp_path / "netrc").read(refusing.address)
    assert "secret" not in str(caught.value)
