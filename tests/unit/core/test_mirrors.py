"""Mirrors and the configuration file: what is asked for becomes where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.core import ConfigError, Mirrors, Settings, load_settings, settings

MIRRORS = Mirrors(
    images={
        "docker.io": "10.0.0.1:5000", "docker.io/library": "10.0.0.1:5000/official",
        "docker.io/library/fedora": "10.0.0.1:5000/base", "nvcr.io/nvidia": "m.example/n",
    },
    downloads={
        "https://example.org/": "http://10.0.0.1/all/", "https://example.org/deep/": "http://10.0.0.1/deep/",
        "http://example.org/deep/": "http://10.0.0.1/plain/",
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("debian:13", "10.0.0.1:5000/official/debian:13"),
        ("docker.io/library/debian:13", "10.0.0.1:5000/official/debian:13"),
        ("fedora:41", "10.0.0.1:5000/base:41"),
        ("fedora-slim:41", "10.0.0.1:5000/official/fedora-slim:41"),
        (f"nvidia/cuda:13.0@sha256:{'a' * 64}", f"10.0.0.1:5000/nvidia/cuda:13.0@sha256:{'a' * 64}"),
        ("nvcr.io/nvidia/x:1", "m.example/n/x:1"),
        *((name, name) for name in ("nvcr.io/nvidia2/x:1", "localhost/x:1", "quay.io/x:1")),
    ],
)
def test_images(reference: str, expected: str) -> None:
    assert MIRRORS.image(reference) == expected
    assert Mirrors().image(reference) == reference


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.org/a/b.tar", "http://10.0.0.1/all/a/b.tar"),
        ("https://example.org/deep/x", "http://10.0.0.1/deep/x"),
        ("http://example.org/deep/x", "http://10.0.0.1/plain/x"),
        *((url, url) for url in ("http://example.org/a", "https://example.org.evil/x", "https://elsewhere.org/x")),
    ],
)
def test_downloads(url: str, expected: str) -> None:
    assert MIRRORS.download(url) == expected
    assert Mirrors().download(url) == url


def environ(tmp_path: Path, text: str) -> dict[str, str]:
    (tmp_path / "config.yaml").write_text(text)
    return {"IMAGEBUILD_CONFIG": str(tmp_path / "config.yaml")}


def test_the_configuration_is_read(tmp_path: Path) -> None:
    text = "mirrors:\n  images: {docker.io: 127.0.0.1:5000}\n  python-index: https://example.org/simple/\n"
    found = load_settings(environ(tmp_path, text))
    assert found.mirrors.image("debian:13") == "127.0.0.1:5000/library/debian:13"
    assert found.mirrors.python_index == "https://example.org/simple/"


MISTAKES = [
    ("mirrors:\n  imges: {}\n", ":2: mirrors.imges: unknown key; did you mean 'images'?"),
    ("mirrors:\n  downloads:\n    https://a.b: http://c.d/\n", ":3: mirrors.downloads.https://a.b: "),
    ("mirrors:\n  downloads:\n    https://a.b/: http://me:secret@c.d/\n", ":3: mirrors.downloads.https://a.b/: "),
    ("netrc: /nowhere/netrc\n", ":1: netrc: /nowhere/netrc cannot be read: No such file or directory"),
    ("netrc: {}/netrc\n", "line 2 is not in netrc's format"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_have_lines(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "netrc").write_text("machine x login y\npasswrd geheim\n")
    with pytest.raises(ConfigError, match="config.yaml") as raised:
        load_settings(environ(tmp_path, text.replace("{}/", f"{tmp_path}/")))
    assert message in str(raised.value)
    assert "geheim" not in str(raised.value)


def test_without_a_file_there_are_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}) == Settings()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({"IMAGEBUILD_CONFIG": str(tmp_path / "absent.yaml")})
    monkeypatch.delenv("HOME", raising=False)  # nor has the user a home
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert load_settings({}) == Settings()
    settings.configured_index()
