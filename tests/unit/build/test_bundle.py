"""Bundles: their completeness, the package proxy that fills and serves them, and their wheels."""

from __future__ import annotations

import http.client
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from imagebuild.build.bundle import HOSTS, Bundle, BundleManifest, fetch_wheels, finish_bundle, package_proxy
from imagebuild.build.inputs import Download, DownloadStore, Needs
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.files import file_sha256
from imagebuild.core.settings import Settings
from imagebuild.project.lockfile import Lock
from tests.faulty import Answer
from tests.unit.conftest import LOGIN, Call, Serve
from tests.upstream.server import Server
from tests.upstream.wheels import make_wheel

MANIFEST = BundleManifest(
    created="2026-01-01T00:00:00+00:00",
    targets=("x",),
    stages={"key1": ("linux/amd64",), "key2": ("linux/amd64", "linux/arm64")},
)


def test_what_a_bundle_serves_and_how_damage_is_found(tmp_path: Path) -> None:
    for name in ("files/a", "git/x/.git/HEAD", "gone"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    finish_bundle(tmp_path, MANIFEST)
    bundle = Bundle.read(tmp_path)
    assert (bundle.manifest, bundle.find_damage()) == (MANIFEST, [])
    assert bundle.problem({"s": "key2"}, ["linux/amd64", "linux/arm64"]) == ""
    assert bundle.problem({"s": "key1"}, ["linux/arm64"]) == "the bundle was made without linux/arm64"
    assert bundle.problem({"s": "key1", "t": "key9"}, ["linux/amd64"]).startswith(
        "the stage t has changed since the bundle was made"
    )
    (tmp_path / "files/a").write_text("another")
    (tmp_path / "gone").unlink()
    (tmp_path / "more").write_text("")
    assert bundle.find_damage() == [
        f"{tmp_path}/{name}; make the bundle again"
        for name in ("files/a: has changed", "gone: is missing", "more: is not in SHA256SUMS")
    ]


def test_a_bundle_for_all_offline_builds(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEBUILD_CONFIG", str(tmp_path / "new" / "config.yaml"))
    for name in ("first", "second"):
        finish_bundle(tmp_path / name, MANIFEST)
        assert command("bundle", "use", tmp_path / name)[0] == 0
        assert (tmp_path / "new" / "offline-bundle").resolve() == tmp_path / name


NAME = "my_lib-1.0+x-py3-none-any.whl"


def ask(address: str, target: str, method: str = "GET") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(method, target)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def test_a_proxy_records_and_plays_back(store: DownloadStore, site: Server) -> None:
    target = "http://far.example:443/host/x_1.0+b~1.deb"
    log: list[str] = []
    (store.folder / "wheels").mkdir(parents=True)
    (store.folder / "wheels" / NAME).write_bytes(b"a wheel")
    with (
        package_proxy("127.0.0.1", store, log.append) as recording,
        package_proxy("127.0.0.1", DownloadStore(store.folder), log.append) as replaying,
    ):
        assert ask(replaying, target)[0] == 404
        for address in (recording, recording, replaying):
            assert ask(address, target) == (200, b"deb" * 100_000)
        assert ask(replaying, target, "HEAD") == (200, b"")
        assert [r.path for r in site.requests] == ["/host/x_1.0+b~1.deb"]
        assert (store.folder / "files/https/far.example/host/x_1.0+b~1.deb").is_file()
        assert ask(recording, "http://far.example/host/gone")[0] == 404
        site.failing["/host/"] = [503] * 9999
        assert ask(recording, "http://far.example/host/x_1.0+b~1.deb")[0] == 502
        assert f'<a href="{NAME.replace("+", "%2B")}">'.encode() in ask(replaying, "/wheels/")[1]
        assert ask(replaying, f"/wheels/{NAME.replace('+', '%2B')}") == (200, b"a wheel")
        refused = [ask(recording, path)[0] for path in ("/", "/simple/", "/../etc/passwd", "/wheels/../../a.whl")]
        assert refused == [502, 502, 502, 404]
    assert len(log) == 6
    assert "503" in log[2]


def test_links_do_not_lead_out_of_a_bundle(tmp_path: Path) -> None:
    """Build steps could read files of this machine through a bundle that another made."""
    (secret := tmp_path / "netrc").write_text("password")
    store = DownloadStore(tmp_path / "bundle")
    links = {"wheels/x": secret, "files/https/host/x": secret, "files/http/all": tmp_path, "git/c": tmp_path}
    for name, target in links.items():
        (link := store.folder / name).parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    with package_proxy("127.0.0.1", store, lambda _: None) as address:
        for asked in ("/wheels/x", "http://host:443/x", "http://all/netrc"):
            assert ask(address, asked)[0] == 502
    with pytest.raises(ConfigError, match="git/c: leads to .*, which is outside"):
        store.clone(Download("https://host/x", commit="c"))


def test_a_bundle_replaces_no_image_but_a_bootstrapped_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock has the hash of every other image."""
    locked = {name: f"{name}@sha256:{'a' * 64}" for name in ("debian:13", "cuda:13")}
    monkeypatch.setattr("imagebuild.build.bundle.needs_of_targets", lambda _: {})
    monkeypatch.setattr("imagebuild.build.bundle.missing_images", lambda _, needs: locked.values())
    monkeypatch.setattr("imagebuild.build.bundle.gateway_address", lambda _: "127.0.0.1")
    bases = {name: SimpleNamespace(image=name, release=name == "debian:13") for name in locked}
    lock = Lock(images={name: {"digest": image.partition("@")[2]} for name, image in locked.items()})
    matrix = SimpleNamespace(model=SimpleNamespace(bases=bases))
    run: Any = SimpleNamespace(project=SimpleNamespace(lock=lock, matrix=matrix), engine=None)

    def notes_about(changed: str) -> list[str]:
        digests = {image: f"sha256:{('b' if name == changed else 'a') * 64}" for name, image in locked.items()}
        finish_bundle(tmp_path, MANIFEST.model_copy(update={"images": digests}))
        notes: list[str] = []
        with Bundle.read(tmp_path).provide(run, notes.append):
            return notes

    assert notes_about("") == []
    assert "bootstrapped by the maker of the bundle" in notes_about("debian:13")[0]
    with pytest.raises(ConfigError, match="the bundle has sha256:b{64} instead of cuda:13@"):
        notes_about("cuda:13")


def test_build_steps_get_no_login_for_hosts_of_their_choice(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    settings, log = Settings(netrc=str(tmp_path / "netrc")), list[str]()
    site, other = serve(Answer(200, b"deb")), serve(Answer(200, b"deb"))
    steps = DownloadStore(tmp_path).for_steps(HOSTS.findall(f"ADD {site.address} /"), settings, None)
    with package_proxy("127.0.0.1", steps, log.append) as proxy:
        assert [ask(proxy, server.address)[0] for server in (site, other)] == [200, 502]
    assert (site.asked, other.asked) == ([LOGIN], [])
    assert "a build step may not ask this machine" in log[0]


@pytest.mark.programs
def test_wheels_are_fetched_for_both_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    made = [make_wheel(tmp_path, "my-lib", "1.0", f"manylinux2014_{cpu}") for cpu in ("x86_64", "aarch64")]

    def fetch(*hashes: str) -> None:
        wheel = " \\\n  ".join(["my-lib==1.0", *(f"--hash=sha256:{sha256}" for sha256 in hashes)])
        needs = Needs(("linux/amd64", "linux/arm64"), {}, frozenset(), frozenset({("", (wheel,))}))
        fetch_wheels(tmp_path / "wheels", {"target": needs}, Settings(), None, lambda _: None)

    fetch(*map(file_sha256, made))
    assert {path.name: file_sha256(path) for path in (tmp_path / "wheels").iterdir()} == {
        path.name: file_sha256(path) for path in made
    }
    shutil.rmtree(tmp_path / "wheels")
    match = r"pip cannot download my-lib==1.0 for amd64: (.|\n)*DO NOT MATCH THE HASHES"
    with pytest.raises(CommandError, match=match):
        fetch("0" * 64)
