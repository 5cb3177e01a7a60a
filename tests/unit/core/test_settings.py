"""The configuration file, and the URLs of mirrors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imagebuild.core import settings
from imagebuild.core.errors import ConfigError
from imagebuild.core.settings import Mirrors, Settings, ca_bundle, load_settings, pip_conf_text
from tests.conftest import Files, data

ROWS = data("mirrors")
MIRRORS = Mirrors(**ROWS["mirrors"])


@pytest.mark.parametrize(("reference", "expected"), ROWS["images"].items())
def test_images(reference: str, expected: str) -> None:
    assert MIRRORS.image(reference) == expected
    assert Mirrors().image(reference) == reference


@pytest.mark.parametrize(("url", "expected"), ROWS["downloads"].items())
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


@pytest.mark.parametrize(("text", "message"), ROWS["mistakes"])
def test_mistakes_have_lines(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "netrc").write_text("machine x login y\npasswrd geheim\n")
    (tmp_path / "all").write_text("default login y password geheim\n")
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
    monkeypatch.chdir(tmp_path)
    Files(tmp_path).write("~/.config/imagebuild/config.yaml", "insecure-registries: [planted]\n")
    assert load_settings({}) == load_settings({"XDG_CONFIG_HOME": "./~/.config"}) == Settings()
    settings.configured_index()


def test_the_ca_bundle_is_the_one_given_or_the_one_the_machine_uses(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    assert ca_bundle(bundle, {"PIP_CERT": "/gone"}) == bundle
    assert ca_bundle(None, {"SSL_CERT_FILE": "", "PIP_CERT": str(bundle), "CURL_CA_BUNDLE": "/gone"}) == bundle
    with pytest.raises(ConfigError, match="PIP_CERT: /gone: cannot be read: No such file"):
        ca_bundle(None, {"PIP_CERT": "/gone", "CURL_CA_BUNDLE": str(bundle)})
    source, sink = os.pipe()
    os.write(sink, bundle.read_bytes())
    os.close(sink)
    copy = ca_bundle(Path(f"/dev/fd/{source}"), {})
    assert copy and copy.read_text() == bundle.read_text()  # noqa: PT018 - one statement
    assert ca_bundle(Path(f"/dev/fd/{source}"), {})  # a stream is read once, and asked for twice
    bundle.write_text("# A title\n")
    with pytest.raises(ConfigError, match=f"--ca {bundle}: contains no certificate; use a file"):
        ca_bundle(bundle, {})


def test_pip_is_told_the_index() -> None:
    assert pip_conf_text("https://i.example/s/") == "[global]\nindex-url = https://i.example/s/\n"
    assert pip_conf_text("http://10.0.0.1:80/s/").splitlines()[-1] == "trusted-host = 10.0.0.1"
    assert "https://me:a%40b@i.example/s/" in pip_conf_text("https://i.example/s/", ("me", "a@b"))
