"""The client against a registry over HTTP, alone and behind a proxy that injects faults."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import CommandError, ConfigError, ResultError, Unreachable
from imagebuild.oci import (
    CONFIG,
    MANIFEST,
    Attachment,
    BlobStream,
    DeletionDisabled,
    Descriptor,
    Registry,
    TryAgain,
    blob_path,
    blobs_named,
    check_image,
    connect_registry,
    copy_image,
    digest_of,
    encode_json,
    has_image,
    pull_image,
    push_image,
    referrers_tag,
    registry,
)
from tests import layouts
from tests.faulty import Fault, Faulty, in_front_of
from tests.registry_fake import FakeRegistry, image, serve

STAGING, FINAL = "gpu/open-staging", "gpu/open"
SBOM = Attachment("sbom.spdx.json", "application/spdx+json", b'{"spdx": 1}', {"of": "it"})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes long here, and nobody has settings."""
    monkeypatch.setattr(registry, "SETTLED_S", 0.05)
    monkeypatch.setenv("IMAGEBUILD_CONFIG", "")


@pytest.fixture
def server() -> Iterator[FakeRegistry]:
    with serve() as behaviour:
        yield behaviour


@pytest.fixture
def faulty(server: FakeRegistry) -> Iterator[Faulty]:
    with in_front_of(server.address) as proxy:
        yield proxy


@pytest.fixture
def layout(tmp_path: Path) -> layouts.Layout:
    return layouts.make(tmp_path / "build", b"x" * 300_000)


def connect(address: str, patience_s: float = 20) -> Registry:
    made = connect_registry(address, patience_s=patience_s)
    made.backoff_s = 0.01
    return made


def publish(registry: Registry, layout: layouts.Layout) -> Counter[str]:
    """Copy the layout's image from one repository to the other."""
    return copy_image(layout.digest, registry.at(STAGING), registry.at(FINAL))


def complete(store: FakeRegistry, repository: str, layout: layouts.Layout) -> bool:
    """Whether the registry has all of the layout, byte for byte."""
    held = store.repositories[repository]
    there = {**held.blobs, **{digest: manifest.content for digest, manifest in held.manifests.items()}}
    wanted = [digest for digest, _ in blobs_named(layout.folder, layout.digest)]
    return all(there.get(digest) == blob_path(layout.folder, digest).read_bytes() for digest in wanted)


def test_push_then_copy(server: FakeRegistry, layout: layouts.Layout) -> None:
    registry = connect(server.address)
    moved = push_image(layout.folder, layout.digest, registry, STAGING, "staged-1")
    assert moved == Counter(manifests=4, blobs=3, bytes=moved["bytes"])  # the index twice: by digest and by tag
    assert complete(server, STAGING, layout)
    assert registry.digest(STAGING, "staged-1") == layout.digest
    server.asked.clear()
    assert push_image(layout.folder, layout.digest, registry, STAGING, "staged-1") == Counter()
    assert {method for method, _ in server.asked} == {"HEAD"}

    moved = publish(registry, layout)
    assert moved == Counter(manifests=3, mounted=3, bytes=moved["bytes"])
    assert complete(server, FINAL, layout)
    assert publish(registry, layout) == Counter()


def test_what_cannot_be_mounted_is_copied(server: FakeRegistry, layout: layouts.Layout) -> None:
    registry = connect(server.address)
    push_image(layout.folder, layout.digest, registry, STAGING)
    server.mounts = False
    moved = publish(registry, layout)
    assert (moved["blobs"], moved["mounted"]) == (3, 0)
    assert moved["bytes"] == sum(path.stat().st_size for path in (layout.folder / "blobs/sha256").iterdir())
    assert complete(server, FINAL, layout)
    assert not server.sessions  # none is left open
    with pytest.raises(CommandError, match=f"{STAGING}@sha256:0{{64}}: is not there"):
        copy_image(f"sha256:{'0' * 64}", registry.at(STAGING), registry.at(FINAL))


ANY: tuple[Fault, ...] = ("busy", "broken", "drop-before", "drop-after", "cut")
FAULTS: dict[str, list[tuple[str, str, tuple[Fault, ...]]]] = {
    "publish": [("POST", "mount=", (*ANY, "lose"))],
    "pull": [("GET", "manifests", ANY), ("GET", "/blobs/", ANY)],
    "attach": [("GET", "/manifests/", ANY), ("HEAD", "/manifests/", ANY[:4]), ("PUT", "/manifests/", (*ANY, "lose"))],
}
"""Action → requests, and what happens to them. The docker suite pushes and copies through faults to a real registry."""


@pytest.mark.parametrize(
    ("action", "method", "path", "fault"),
    [(action, method, path, fault) for action, rows in FAULTS.items() for method, path, faults in rows for fault in faults],
)  # fmt: skip
def test_everything_gets_through_faults(
    faulty: Faulty, server: FakeRegistry, layout: layouts.Layout, action: str, method: str, path: str, fault: Fault,
) -> None:  # fmt: skip
    subject = image(server, FINAL)
    push_image(layout.folder, layout.digest, connect(server.address), STAGING)
    registry, pulled = connect(faulty.address), layout.folder.parent / "pulled"
    actions: dict[str, Callable[[], object]] = {
        "publish": lambda: publish(registry, layout),
        "pull": lambda: pull_image(f"{faulty.address}/{STAGING}@{layout.digest}", pulled),
        "attach": lambda: registry.attach(FINAL, subject, SBOM),
    }
    rule = faulty.rule(fault, method, path, times=2)
    made = actions[action]()
    assert rule.times == 0
    if action == "publish":
        assert complete(server, FINAL, layout)
    elif action == "pull":
        assert has_image(pulled, layout.digest)
        check_image(pulled, layout.digest)
    else:
        assert [item.digest for item in registry.referrers(FINAL, subject.digest)] == [made]


def test_a_registry_is_left_alone_as_long_as_it_says(faulty: Faulty) -> None:
    faulty.rule("busy", seconds=1)
    began = time.monotonic()
    assert connect(faulty.address).tags("a") == ()
    assert time.monotonic() - began >= 1
    faulty.rule("busy", seconds=300)
    with pytest.raises(CommandError, match=r"429 .*asks for a pause of 300 s; gave up at once"):
        connect(faulty.address, patience_s=5).tags("a")


def test_a_registry_that_dies_is_reported_at_once_and_ends_the_command_soon(
    faulty: Faulty, server: FakeRegistry, capfd: pytest.CaptureFixture[str]
) -> None:
    faulty.rule("broken", times=10_000)
    registry = connect_registry(faulty.address)
    assert registry.patience_s <= 30
    registry.patience_s = 4
    answered = r"GET a/tags/list: the registry answered 500 \(UNKNOWN: injected\)"
    with pytest.raises(CommandError, match=rf"{answered}; gave up after \d+ attempts"):
        registry.tags("a")
    assert re.search(f"{answered}; trying again", capfd.readouterr().err)
    assert not server.asked
    faulty.clear()
    faulty.rule("broken")
    with pytest.raises(CommandError, match="gave up at once"):
        connect(faulty.address, patience_s=0).tags("a")


def test_what_takes_long_shows_that_it_is_alive(faulty: Faulty, capfd: pytest.CaptureFixture[str]) -> None:
    faulty.rule("slow", seconds=60)
    asking = threading.Thread(target=connect(faulty.address).tags, args=("a",))
    asking.start()
    message, deadline = "", time.monotonic() + 30
    while "for" not in message and time.monotonic() < deadline:
        time.sleep(0.05)
        message += capfd.readouterr().err
    faulty.clear()
    asking.join()
    assert re.search(rf"{faulty.address}: 1 requests, .*; GET a/tags/list for \d+ s", message)


def test_stop_ends_what_waits(faulty: Faulty) -> None:
    faulty.rule("broken", times=10_000)
    registry = connect(faulty.address, patience_s=6000)
    registry.backoff_s = 1000
    threading.Timer(0.3, registry.stop).start()
    began = time.monotonic()
    with pytest.raises(CommandError, match="interrupted"):
        registry.tags("a")
    assert time.monotonic() - began < 100


def test_nobody_answers() -> None:
    with pytest.raises(Unreachable, match=r"127.0.0.1:1: .*Connection refused; gave up"):
        connect("127.0.0.1:1", patience_s=0.2).digest("a", "b")


def test_refusals(server: FakeRegistry) -> None:
    registry = connect(server.address)
    with pytest.raises(CommandError, match=r"blob sha256:00: the registry answered 404 \(BLOB_UNKNOWN"):
        registry.blob("a", "sha256:00")
    assert server.asked_for("GET", "blobs") == 1  # and is not asked again
    lacking = f"sha256:{'0' * 64}"
    config = Descriptor(CONFIG, lacking, 3).to_json()
    content = encode_json({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": []})
    with pytest.raises(
        CommandError, match=f"a: manifest t: the registry lacks what it names: .*{lacking}.* 3 attempts"
    ):
        registry.put_manifest("a", "t", content, MANIFEST)


def test_another_publisher_moves_the_tag_meanwhile(server: FakeRegistry) -> None:
    own, other = (image(server, "a", content) for content in (b"own", b"other"))
    content = server.repositories["a"].manifests[own.digest].content
    taken = server.take_manifest

    def then_moved(*request: Any) -> Any:
        answer = taken(*request)
        server.repositories["a"].tags["t"] = other.digest
        return answer

    server.take_manifest = then_moved  # type: ignore[assignment,method-assign]
    assert connect(server.address).put_manifest("a", "t", content, MANIFEST) == other.digest
    assert server.asked_for("PUT", "manifests") == 1  # it is not taken back


def test_uploads_of_all_kinds(server: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = connect(server.address)
    contents: dict[bytes, bytes | BlobStream] = {
        b"bytes": b"bytes", b"": BlobStream(0, lambda: iter(())),
        b"abcdef": BlobStream(6, lambda: iter([b"abc", b"def"])),
    }  # fmt: skip
    for data, content in contents.items():
        assert registry.put_blob("a", content, digest_of(data)) == Counter(blobs=1, bytes=len(data))
        assert registry.put_blob("a", content, digest_of(data)) == Counter()
        assert server.repositories["a"].blobs[digest_of(data)] == registry.blob("a", digest_of(data)) == data
    monkeypatch.setattr("imagebuild.oci.registry.MOST_BYTES", 5)
    with pytest.raises(CommandError, match=f"a: blob {digest_of(b'abcdef')}: has more than the 5 bytes that are read"):
        registry.blob("a", digest_of(b"abcdef"))
    with pytest.raises(CommandError, match="DIGEST_INVALID"):
        registry.put_blob("a", b"changed meanwhile", digest_of(b"something else"))
    assert registry.counts["sent"] == 5 + 6 + 3 * len(b"changed meanwhile")


def test_a_layout_that_is_not_whole(server: FakeRegistry, layout: layouts.Layout) -> None:
    registry = connect(server.address)
    layer = json.loads(blob_path(layout.folder, layout.manifests[0].digest).read_bytes())["layers"][0]["digest"]
    blob_path(layout.folder, layer).write_bytes(b"short")
    with pytest.raises(ResultError, match=f"does not have all of blob {layer}"):
        push_image(layout.folder, layout.digest, registry, STAGING)
    with pytest.raises(ResultError, match="has no manifest"):
        push_image(layout.folder, f"sha256:{'0' * 64}", registry, STAGING)
    assert server.manifest(STAGING, layout.digest) is None


def test_registries_that_answer_in_their_own_way(server: FakeRegistry) -> None:
    described = image(server, "a")
    held = server.repositories["a"]
    held.tags = {f"t{i:02}": described.digest for i in range(10)}
    server.page, server.tells_digests = 3, False
    registry = connect(server.address, patience_s=0)
    assert registry.tags("a") == tuple(f"t{i:02}" for i in range(10))
    assert registry.tags("no/such") == ()
    assert registry.digest("a", described.digest) == described.digest
    assert registry.digest("a", "none") is None
    held.manifests[described.digest] = type(held.manifests[described.digest])(b"{}", MANIFEST, described.digest)
    with pytest.raises(CommandError, match="sent a manifest of digest"):
        registry.manifest("a", described.digest)


@pytest.mark.parametrize("api", [True, False])
def test_attachments(server: FakeRegistry, api: bool) -> None:
    server.referrers_api = api
    registry = connect(server.address)
    subject = image(server, FINAL)
    assert registry.referrers(FINAL, subject.digest) == ()
    first = registry.attach(FINAL, subject, SBOM)
    second = registry.attach(FINAL, subject, Attachment("scan.json", "a/scan", b"{}"))
    found = {item.digest: item for item in registry.referrers(FINAL, subject.digest)}
    assert set(found) == {first, second}
    assert found[second].artifact_type == "a/scan"
    assert (found[first].artifact_type, dict(found[first].annotations)) == (SBOM.media_type, SBOM.annotations)
    assert (referrers_tag(subject.digest) in registry.tags(FINAL)) is not api

    manifest = registry.at(FINAL).manifest(first).document
    assert manifest["subject"] == Descriptor(subject.media_type, subject.digest, subject.size).to_json()
    [layer] = manifest["layers"]
    assert registry.blob(FINAL, layer["digest"]) == SBOM.content
    assert layer["annotations"] == {"org.opencontainers.image.title": "sbom.spdx.json"}

    changes = len(server.calls)
    assert registry.attach(FINAL, subject, SBOM) == first
    assert len(server.calls) == changes


def test_many_publishers_attach_at_once(server: FakeRegistry) -> None:
    subject = image(server, FINAL)
    barrier = threading.Barrier(6)
    attached: list[str] = []

    def publisher(number: int) -> None:
        registry = connect(server.address)
        barrier.wait()
        attached.append(registry.attach(FINAL, subject, Attachment("f", "a/b", str(number).encode())))

    threads = [threading.Thread(target=publisher, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = connect(server.address).referrers(FINAL, subject.digest)
    assert len(attached) == 6
    assert sorted(item.digest for item in found) == sorted(attached)


def test_deletion(server: FakeRegistry) -> None:
    registry = connect(server.address)
    digest = image(server, "a").digest
    server.repositories["a"].tags["t"] = digest
    registry.delete("a", digest)
    registry.delete("a", digest)
    assert registry.tags("a") == ()
    server.deletes = False
    with pytest.raises(DeletionDisabled, match=r"does not let images be deleted \(405\).*delete: {enabled: true}"):
        registry.delete("a", image(server, "a").digest)


def test_a_download_that_breaks_off(faulty: Faulty, server: FakeRegistry) -> None:
    data = b"z" * 200_000
    server.put_blob("a", data, digest_of(data))
    faulty.rule("cut", "GET", "/blobs/")
    with pytest.raises(TryAgain):
        b"".join(connect(faulty.address).open_blob("a", digest_of(data)))


def test_settings(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("insecure-registries: [box:5000]\n")
    environ = {"IMAGEBUILD_CONFIG": str(config), "IMAGEBUILD_INSECURE_REGISTRIES": "a:1, b:2"}
    for host, scheme in (("box:5000", "http"), ("a:1", "http"), ("b:2", "http"), ("c", "https")):
        assert connect_registry(host, environ=environ).base == f"{scheme}://{host}/v2/"
    ca = tmp_path / "ca.pem"
    ca.write_text("-----BEGIN CERTIFICATE-----\n")
    assert connect_registry("c", environ={**environ, "SSL_CERT_FILE": str(ca)}).ca == ca
    assert connect_registry("c", environ={**environ, "IMAGEBUILD_REGISTRY_PATIENCE": "7"}).patience_s == 7
    for wrong in ("soon", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match="IMAGEBUILD_REGISTRY_PATIENCE"):
            connect_registry("c", environ={**environ, "IMAGEBUILD_REGISTRY_PATIENCE": wrong})


def test_uploads_do_not_lose_tls(server: FakeRegistry) -> None:
    registry = connect(server.address)
    registry.base = registry.base.replace("http:", "https:")
    with pytest.raises(CommandError, match=r"says that uploads go to http://.*X-Forwarded-Proto"):
        registry.request("PUT", "a", f"http://{server.address}/v2/a/blobs/uploads/1")
    assert not server.asked


def test_registries_of_this_machine_are_not_behind_a_proxy(
    server: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert connect(server.address, patience_s=0).tags("a") == ()
