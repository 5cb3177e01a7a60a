"""The registry client with a fake registry: copies, refusals, logins. tests/docker tests real registries."""

from __future__ import annotations

import base64
import json
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPHeaderDict, HTTPResponse

from imagebuild.core.errors import CommandError, ResultError, Unreachable
from imagebuild.core.http import Patience
from imagebuild.oci import registry
from imagebuild.oci.layout import (
    CONFIG,
    INDEX,
    MANIFEST,
    Attachment,
    BlobStream,
    Descriptor,
    Manifest,
    digest_of,
    encode_json,
    referrers_tag,
)
from imagebuild.oci.registry import Registry, connect_registry, copy_image, push_image, stored_credentials
from tests import layouts
from tests.conftest import data
from tests.faulty import Answer, refusal
from tests.registry_fake import IDENTITY, PASSWORD, USER, FakeRegistry, put_image

STAGING, FINAL = "gpu/open-staging", "gpu/open"
SBOM = Attachment("sbom.spdx.json", "application/spdx+json", b'{"spdx": 1}', {"of": "it"})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays, and ignore the user's configuration."""
    monkeypatch.setattr(registry, "SETTLED_S", 0.05)
    monkeypatch.setenv("IMAGEBUILD_CONFIG", "")


@pytest.fixture
def made(tmp_path: Path) -> layouts.Made:
    return layouts.make(tmp_path / "build", b"x" * 300_000)


def connect(address: str, seconds: float = 20) -> Registry:
    return connect_registry(address, patience=Patience(seconds, backoff_s=0.01))


def test_what_cannot_be_mounted_is_copied(server: FakeRegistry, made: layouts.Made) -> None:
    near = connect(server.address)
    push_image(made.layout, made.digest, near.at(STAGING))
    server.mounts = False
    moved = copy_image(made.digest, near.at(STAGING), near.at(FINAL))
    assert (moved["blobs"], moved["mounted"]) == (3, 0)
    assert moved["bytes"] == sum(path.stat().st_size for path in (made.layout.folder / "blobs/sha256").iterdir())
    held = server.repositories[FINAL]
    there = {**held.blobs, **{digest: manifest.content for digest, manifest in held.manifests.items()}}
    assert all(there.get(d) == made.layout.path(d).read_bytes() for d, _ in made.layout.named(made.digest))
    assert not server.sessions  # none is left open
    with pytest.raises(CommandError, match=f"{STAGING}@sha256:0{{64}}: does not exist"):
        copy_image(f"sha256:{'0' * 64}", near.at(STAGING), near.at(FINAL))


def failing(times: int) -> Callable[..., None]:
    """Return a hook that makes the next changes fail."""
    left = [refusal(503, "UNAVAILABLE", "injected")] * times

    def before(*_: str) -> None:
        if left:
            raise left.pop()

    return before


def test_what_may_pass_is_tried_again_as_long_as_our_patience_lasts(server: FakeRegistry) -> None:
    server.before = failing(4)
    assert connect(server.address).at("a").put_blob(b"x", digest_of(b"x")) == Counter(blobs=1, bytes=1)
    server.before = failing(10_000)
    answered = r"PUT a/blobs/uploads/s\d+: the server answered 503 \(UNAVAILABLE: injected\)"
    with pytest.raises(Unreachable, match=rf"{answered}; gave up after \d+ attempts in \d+ s"):
        connect(server.address, 0.2).at("a").put_blob(b"y", digest_of(b"y"))


def test_a_pause_that_is_longer_than_our_patience_is_not_made(server: FakeRegistry) -> None:
    def before(*_: str) -> None:
        raise refusal(429, "TOOMANYREQUESTS", **{"Retry-After": "300"})

    server.before = before
    with pytest.raises(Unreachable, match="asks for a pause of 300 s; gave up at once"):
        connect(server.address).at("a").put_blob(b"x", digest_of(b"x"))


def test_stop_ends_what_waits(server: FakeRegistry) -> None:
    server.before = failing(10_000)
    waiting = connect_registry(server.address, patience=Patience(6000, backoff_s=1000))
    threading.Timer(0.3, waiting.stop).start()
    began = time.monotonic()
    with pytest.raises(CommandError, match="interrupted"):
        waiting.at("a").put_blob(b"x", digest_of(b"x"))
    assert time.monotonic() - began < 100


def test_refusals(server: FakeRegistry) -> None:
    place = connect(server.address, 0.2).at("a")
    with pytest.raises(CommandError, match=r"blob sha256:00: the server answered 404 \(BLOB_UNKNOWN"):
        place.blob("sha256:00")
    assert server.asked_for("GET", "blobs") == 1  # and is not asked again
    lacking = f"sha256:{'0' * 64}"
    config = Descriptor(CONFIG, lacking, 3).to_json()
    content = encode_json({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": []})
    with pytest.raises(CommandError, match=f"a: manifest t: the registry lacks a part of the manifest: .*{lacking}"):
        place.put_manifest(Manifest(content, MANIFEST), "t")


BAD = [
    *(Answer(200, f'{{"tags": {tags}}}'.encode()) for tags in ("1", '"t"', '{"t": 1}', '["t", 1]')),
    *(Answer(307, b"", {"Location": url}) for url in ("http://[::1/", "//x:99999/")),
    *(Answer(200, b'{"tags": []}', {"Link": f'<{url}>; rel="next"'}) for url in ("http://[::1/", "//x:99999/")),
    *(Answer(401, b"", {"WWW-Authenticate": f'Bearer realm="{url}"'}) for url in ("http://[::1/", "http://x:99999/")),
]


@pytest.mark.parametrize("answer", BAD, ids=str)
def test_an_odd_list_of_tags(server: FakeRegistry, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr(server, "_answer_tags", lambda *_: answer)
    problem = "which is not valid: |Invalid IPv6 URL" if answer.headers else "does not answer as a registry"
    with pytest.raises(CommandError, match=problem):
        connect(server.address).at("a").tags()


@pytest.mark.parametrize("row", (rows := data("publish/manifests")).values(), ids=rows)
def test_documents_that_are_no_manifests(row: dict[str, Any]) -> None:
    registry = FakeRegistry(referrers_api=False)
    image = put_image(registry, "a")
    entries = ",".join([json.dumps(image.to_json())] * row.get("repeat", 1))
    content = (row["text"] * row.get("times", 1)).replace("{entry}", entries).encode()
    held, sent = registry.repositories["a"], Manifest(content, INDEX)
    held.manifests[sent.digest] = sent
    held.tags |= dict.fromkeys(("t", referrers_tag(image.digest)), sent.digest)
    for read, name in ((registry.at("a").find, "t"), (registry.at("a").referrers, image.digest)):
        with pytest.raises(ResultError, match=f"a: (t|sha256-.*) is not a manifest or index: .*{row['says']}"):
            read(name)


def test_another_publisher_moves_the_tag_meanwhile(server: FakeRegistry) -> None:
    own, other = (put_image(server, "a", content) for content in (b"own", b"other"))
    taken = server.take_manifest

    def then_moved(*request: Any) -> Any:
        answer = taken(*request)
        server.repositories["a"].tags["t"] = other.digest
        return answer

    server.take_manifest = then_moved  # type: ignore[assignment,method-assign]
    manifest = server.repositories["a"].manifests[own.digest]
    assert connect(server.address).at("a").put_manifest(manifest, "t") == other.digest
    assert server.asked_for("PUT", "manifests") == 1  # it is not taken back


def test_uploads_of_all_kinds(server: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    place = connect(server.address, 0).at("a")
    contents: dict[bytes, bytes | BlobStream] = {
        b"bytes": b"bytes", b"": BlobStream(0, lambda: iter(())),
        b"abcdef": BlobStream(6, lambda: iter([b"abc", b"def"])),
    }  # fmt: skip
    for raw, content in contents.items():
        assert place.put_blob(content, digest_of(raw)) == Counter(blobs=1, bytes=len(raw))
        assert place.put_blob(content, digest_of(raw)) == Counter()
        assert server.repositories["a"].blobs[digest_of(raw)] == place.blob(digest_of(raw)) == raw
    monkeypatch.setattr("imagebuild.oci.registry.MOST_BYTES", 5)
    with pytest.raises(CommandError, match=f"a: blob {digest_of(b'abcdef')}: is larger than the maximum of 5 bytes"):
        place.blob(digest_of(b"abcdef"))
    with pytest.raises(CommandError, match="DIGEST_INVALID"):
        place.put_blob(b"changed meanwhile", digest_of(b"something else"))
    server.repositories["a"].blobs[digest_of(b"x")] = b"y"
    with pytest.raises(CommandError, match="sent wrong content for blob"):
        place.blob(digest_of(b"x"))


def test_a_layout_that_is_not_whole(server: FakeRegistry, made: layouts.Made) -> None:
    place = connect(server.address).at(STAGING)
    layer = json.loads(made.layout.path(made.manifests[0].digest).read_bytes())["layers"][0]["digest"]
    made.layout.path(layer).write_bytes(b"short")
    with pytest.raises(ResultError, match=f"blob {layer} is missing or truncated"):
        push_image(made.layout, made.digest, place)
    with pytest.raises(ResultError, match="sha256:0{64}: cannot be read: No such file"):
        push_image(made.layout, f"sha256:{'0' * 64}", place)
    assert server.at(STAGING).find(made.digest) is None


@pytest.mark.parametrize("list_path", ["/v2/%s/tags/list", "%.0s"], ids=["whole", "relative"])
def test_registries_that_answer_in_their_own_way(server: FakeRegistry, list_path: str) -> None:
    described = put_image(server, "a")
    held = server.repositories["a"]
    held.tags = {f"t{i:02}": described.digest for i in range(10)}
    server.page, server.tells_digests, server.list_path = 3, False, list_path
    near = connect(server.address, 0)
    assert near.at("a").tags() == tuple(f"t{i:02}" for i in range(10))
    assert near.at("no/such").tags() == ()
    assert near.at("a").digest(described.digest) == described.digest
    assert near.at("a").digest("none") is None
    held.manifests[described.digest] = Manifest(b"{}", MANIFEST)
    with pytest.raises(CommandError, match="sent a manifest with the digest"):
        near.at("a").find(described.digest)


@pytest.mark.parametrize("api", [True, False])
def test_attachments(server: FakeRegistry, api: bool) -> None:
    server.referrers_api = api
    place = connect(server.address).at(FINAL)
    subject = put_image(server, FINAL)
    assert place.referrers(subject.digest) == ()
    first = place.attach(subject, SBOM)
    second = place.attach(subject, Attachment("scan.json", "a/scan", b"{}"))
    found = {item.digest: item for item in place.referrers(subject.digest)}
    assert set(found) == {first, second}
    assert found[second].artifact_type == "a/scan"
    assert (found[first].artifact_type, dict(found[first].annotations)) == (SBOM.media_type, SBOM.annotations)
    assert (referrers_tag(subject.digest) in place.tags()) is not api

    manifest = place.manifest(first).document
    assert manifest["subject"] == Descriptor(subject.media_type, subject.digest, subject.size).to_json()
    [layer] = manifest["layers"]
    assert place.blob(layer["digest"]) == SBOM.content
    assert layer["annotations"] == {"org.opencontainers.image.title": "sbom.spdx.json"}

    changes = len(server.calls)
    assert place.attach(subject, SBOM) == first
    assert len(server.calls) == changes


def test_many_publishers_attach_at_once(server: FakeRegistry) -> None:
    subject = put_image(server, FINAL)
    barrier = threading.Barrier(6)

    def publish(number: int) -> str:
        place = connect(server.address).at(FINAL)
        barrier.wait()
        return place.attach(subject, Attachment("f", "a/b", str(number).encode()))

    with ThreadPoolExecutor(6) as pool:
        attached = list(pool.map(publish, range(6)))
    found = connect(server.address).at(FINAL).referrers(subject.digest)
    assert sorted(item.digest for item in found) == sorted(attached)


def test_settings(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("insecure-registries: [box:5000]\n")
    environ = {"IMAGEBUILD_CONFIG": str(config)}
    for host, scheme in (("box:5000", "http"), ("c", "https")):
        assert connect_registry(host, environ=environ).base == f"{scheme}://{host}/v2/"
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\n")
    assert connect_registry("c", environ={**environ, "SSL_CERT_FILE": str(ca)}).ca == ca


def test_uploads_do_not_lose_tls(server: FakeRegistry) -> None:
    near = connect(server.address)
    near.base = near.base.replace("http:", "https:")
    with pytest.raises(CommandError, match=r"sends uploads to http://.*X-Forwarded-Proto"):
        near.request("PUT", f"http://{server.address}/v2/a/blobs/uploads/1", ())
    assert not server.asked


def test_registries_of_this_machine_are_not_behind_a_proxy(
    server: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert connect(server.address, 0).at("a").tags() == ()


# Logins


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for docker's configuration, without a login."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def log_in(folder: Path, host: str, **entry: str) -> None:
    entry = entry or {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
def test_someone_who_is_logged_in(folder: Path, server: FakeRegistry, scheme: str) -> None:
    server.wants = scheme
    log_in(folder, server.address)
    registry = connect(server.address, 0)
    assert registry.at("a/b").put_blob(b"x", digest_of(b"x"))
    described = put_image(server, "a/b")
    assert registry.at("a/b").digest(described.digest) == described.digest
    registry.at("a/b").delete(described.digest)
    assert server.changed("delete")
    # Each kind of access takes one refusal, and then perhaps a token.
    assert len(server.tokens) == (3 if scheme == "bearer" else 0)
    assert server.asked_for("GET", "^/token") == len(server.tokens)
    assert len(server.asked) == 3 + 2 + 1 + 3 + len(server.tokens)


@pytest.mark.parametrize("mounts", [True, False])
def test_a_copy_takes_a_token_for_both_repositories(folder: Path, server: FakeRegistry, mounts: bool) -> None:
    """What cannot be mounted is sent once."""
    described = put_image(server, "a-staging")
    server.wants, server.mounts = "bearer", mounts
    log_in(folder, server.address)
    registry = connect(server.address, 0)
    moved = copy_image(described.digest, registry.at("a-staging"), registry.at("a"))
    assert (moved["mounted"], moved["blobs"]) == ((2, 0) if mounts else (0, 2))
    assert server.asked_for("PUT", "/uploads/") == moved["blobs"]
    assert {"repository:a:push", "repository:a:pull", "repository:a-staging:pull"} in server.tokens.values()


def test_identity_token(folder: Path, server: FakeRegistry) -> None:
    server.wants = "bearer"
    log_in(folder, server.address, auth="", identitytoken=IDENTITY)
    assert connect(server.address, 0).at("a").put_blob(b"x", digest_of(b"x"))
    assert server.asked_for("POST", "^/token$") == len(server.tokens) > 0


def test_reading_without_a_login(folder: Path, server: FakeRegistry) -> None:
    server.wants, server.open_to_read = "bearer", True
    described = put_image(server, "a")
    registry = connect(server.address, 0)
    assert registry.at("a").digest(described.digest) == described.digest
    with pytest.raises(CommandError, match=r"a: upload of sha256.*401 \(UNAUTHORIZED\); run `docker login`"):
        registry.at("a").put_blob(b"x", digest_of(b"x"))


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
def test_wrong_password(folder: Path, server: FakeRegistry, scheme: str, capfd: pytest.CaptureFixture[str]) -> None:
    server.wants = scheme
    log_in(folder, server.address, auth=base64.b64encode(b"someone:not-the-secret").decode())
    with pytest.raises(CommandError) as caught:
        connect(server.address, 0).at("a").tags()
    assert "docker login" in str(caught.value)
    assert "401" in str(caught.value)
    assert "not-the-secret" not in str(caught.value) + repr(caught.value) + "".join(capfd.readouterr())


def test_threads_share_a_token_and_one_that_ends_is_replaced(folder: Path, server: FakeRegistry) -> None:
    server.wants = "bearer"
    log_in(folder, server.address)
    registry = connect(server.address, 0)
    for number in (1, 2):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: registry.at("a").tags(), range(32))) == [()] * 32
        assert len(server.tokens) == number
        server.tokens = {"another": set()}  # the registry forgets it before its time


class Evil(HTTPAdapter):
    """A registry that refers to a token server without TLS."""

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        assert str(request.url).startswith("https://registry.example/v2/"), "nothing else is asked"
        offered = ('Basic realm="x"', 'Bearer realm="http://evil.example/token",service="s, t"')
        headers = HTTPHeaderDict(("WWW-Authenticate", challenge) for challenge in offered)
        return self.build_response(request, HTTPResponse(BytesIO(), headers, 401, preload_content=False))


def test_another_server_that_takes_uploads_gets_no_token(folder: Path, server: FakeRegistry) -> None:
    server.wants = "bearer"
    log_in(folder, server.address)
    registry, seen = connect(server.address, 0), []

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
