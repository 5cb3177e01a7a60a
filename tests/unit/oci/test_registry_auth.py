"""Logging in: what `docker login` stored, Basic, tokens with scopes, and what is never shown."""

from __future__ import annotations

import base64
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPHeaderDict, HTTPResponse

from imagebuild.core.errors import CommandError
from imagebuild.core.http import Patience
from imagebuild.oci.layout import digest_of
from imagebuild.oci.registry import Registry, connect_registry, copy_image, stored_credentials
from tests.registry_fake import IDENTITY, PASSWORD, USER, FakeRegistry, put_image


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's configuration, of somebody who is not logged in."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def log_in(folder: Path, host: str, **entry: str) -> None:
    entry = entry or {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))


def connect(server: FakeRegistry) -> Registry:
    return connect_registry(server.address, patience=Patience(0), environ={"IMAGEBUILD_CONFIG": ""})


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
def test_someone_who_is_logged_in(folder: Path, server: FakeRegistry, scheme: str) -> None:
    server.wants = scheme
    log_in(folder, server.address)
    registry = connect(server)
    assert registry.at("a/b").put_blob(b"x", digest_of(b"x"))
    described = put_image(server, "a/b")
    assert registry.at("a/b").digest(described.digest) == described.digest
    registry.at("a/b").delete(described.digest)
    assert server.changed("delete")
    # Each kind of access takes one refusal, and then perhaps a token.
    assert len(server.tokens) == (3 if scheme == "bearer" else 0)
    assert server.asked_for("GET", "^/token") == len(server.tokens)
    assert len(server.asked) == 3 + 2 + 1 + 3 + len(server.tokens)


def test_mounting_takes_a_token_for_both_repositories(folder: Path, server: FakeRegistry) -> None:
    described = put_image(server, "a-staging")
    server.wants = "bearer"
    log_in(folder, server.address)
    registry = connect(server)
    moved = copy_image(described.digest, registry.at("a-staging"), registry.at("a"))
    assert (moved["mounted"], moved["blobs"]) == (2, 0)
    assert {"repository:a:push", "repository:a:pull", "repository:a-staging:pull"} in server.tokens.values()


def test_an_upload_that_cannot_be_mounted_is_sent_once_with_its_token(folder: Path, server: FakeRegistry) -> None:
    described = put_image(server, "a-staging")
    server.wants, server.mounts = "bearer", False
    log_in(folder, server.address)
    registry = connect(server)
    assert copy_image(described.digest, registry.at("a-staging"), registry.at("a"))["blobs"] == 2
    assert server.asked_for("PUT", "/uploads/") == 2


def test_identity_token(folder: Path, server: FakeRegistry) -> None:
    server.wants = "bearer"
    log_in(folder, server.address, auth="", identitytoken=IDENTITY)
    assert connect(server).at("a").put_blob(b"x", digest_of(b"x"))
    assert server.asked_for("POST", "^/token$") == len(server.tokens) > 0


def test_reading_without_a_login(folder: Path, server: FakeRegistry) -> None:
    server.wants, server.open_to_read = "bearer", True
    described = put_image(server, "a")
    registry = connect(server)
    assert registry.at("a").digest(described.digest) == described.digest
    with pytest.raises(CommandError, match=r"a: upload of sha256.*401 \(UNAUTHORIZED\); run `docker login`"):
        registry.at("a").put_blob(b"x", digest_of(b"x"))


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
def test_wrong_password(folder: Path, server: FakeRegistry, scheme: str, capfd: pytest.CaptureFixture[str]) -> None:
    server.wants = scheme
    log_in(folder, server.address, auth=base64.b64encode(b"someone:not-the-secret").decode())
    with pytest.raises(CommandError) as caught:
        connect(server).at("a").tags()
    assert "docker login" in str(caught.value)
    assert "401" in str(caught.value)
    assert "not-the-secret" not in str(caught.value) + repr(caught.value) + "".join(capfd.readouterr())


def test_threads_share_a_token_and_one_that_ends_is_replaced(folder: Path, server: FakeRegistry) -> None:
    server.wants = "bearer"
    log_in(folder, server.address)
    registry = connect(server)
    for number in (1, 2):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: registry.at("a").tags(), range(32))) == [()] * 32
        assert len(server.tokens) == number
        server.tokens = {"another": set()}  # the registry forgets it before its time


def test_netrc_is_not_for_registries(folder: Path, server: FakeRegistry) -> None:
    (folder / "home").mkdir()
    (folder / "home" / ".netrc").write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}\n")
    server.wants = "basic"
    with pytest.raises(CommandError, match="401"):
        connect(server).at("a").tags()


class Evil(HTTPAdapter):
    """A registry that names a server of tokens without TLS."""

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        assert str(request.url).startswith("https://registry.example/v2/"), "nothing else is asked"
        offered = ('Basic realm="x"', 'Bearer realm="http://evil.example/token",service="s, t"')
        headers = HTTPHeaderDict(("WWW-Authenticate", challenge) for challenge in offered)
        return self.build_response(request, HTTPResponse(BytesIO(), headers, 401, preload_content=False))


def test_another_server_that_takes_uploads_gets_no_token(folder: Path, server: FakeRegistry) -> None:
    server.wants = "bearer"
    log_in(folder, server.address)
    registry, seen = connect(server), []

    class Elsewhere(HTTPAdapter):
        def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
            seen.append(request.headers)
            return self.build_response(request, HTTPResponse(BytesIO(), {}, 201, preload_content=False))

    registry.client.session.mount("http://elsewhere.example", Elsewhere())
    assert registry.at("a").tags() == ()
    assert server.tokens
    assert registry.request("PUT", "http://elsewhere.example/x", ("repository:a:pull",)).status_code == 201
    assert ["Authorization" in headers for headers in seen] == [False]


def test_a_password_is_not_sent_to_a_token_server_without_tls() -> None:
    registry = Registry("registry.example", "https://registry.example/v2/")
    registry.credentials = {"username": "someone", "password": "secret"}
    for scheme in ("http://", "https://"):
        registry.client.session.mount(scheme, Evil())
    with pytest.raises(CommandError, match="asks for the password at http://evil.example/token without TLS"):
        registry.at("a").tags()


@pytest.mark.programs
def test_credential_helper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = folder / "docker-credential-test"
    helper.write_text('#!/bin/sh\nread host\n[ "$host" = box:5000 ] || { echo credentials not found in native keychain; exit 1; }\n'
                      'echo \'{"Username": "<token>", "Secret": "identity"}\'\n')  # fmt: skip
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    (folder / "config.json").write_text('{"credsStore": "test"}')
    assert stored_credentials("box:5000")["identitytoken"] == "identity"
    assert stored_credentials("elsewhere:5000") == {}

    helper.write_text("#!/bin/sh\necho the secret is 1234; exit 3\n")
    with pytest.raises(CommandError, match="credentials of `docker login` cannot be read") as caught:
        stored_credentials("box:5000")
    assert "1234" not in str(caught.value)
    (folder / "config.json").write_text('{"auths": {"a": "nonsense"}}')
    with pytest.raises(CommandError, match="a: the credentials of `docker login` cannot be read"):
        stored_credentials("a")
