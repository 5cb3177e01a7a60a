"""References of images, and the URLs of registries."""

from __future__ import annotations

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import is_loopback
from imagebuild.oci.reference import ImageReference, api_address, parse_reference
from tests.conftest import data

CASES = data("cases/oci/reference")

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(("text", "parts"), CASES["parse"])
def test_parse(text: str, parts: list[str]) -> None:
    expected = ImageReference(*parts)
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "Debian", "a/", "ghcr.io/", "a:b:c", "a@sha256:12", f"a@{DIGEST}:x", "a b", "http://x/y"]
)
def test_no_name(text: str) -> None:
    with pytest.raises(ConfigError, match="not the name of an image"):
        parse_reference(text)


def test_parts() -> None:
    tagged = parse_reference(f"ghcr.io/a/b:1@{DIGEST}")
    assert tagged.name == "ghcr.io/a/b"
    assert tagged.wanted == DIGEST
    assert (parse_reference("a").wanted, parse_reference("a:1").wanted) == ("latest", "1")
    assert str(tagged.at(DIGEST)) == f"ghcr.io/a/b@{DIGEST}"


def test_only_this_machine_and_named_registries_are_reached_without_tls() -> None:
    assert api_address("127.0.0.1:5000") == "http://127.0.0.1:5000/v2/"
    assert api_address("docker.io") == "https://registry-1.docker.io/v2/"
    assert api_address("box:5000", ("box:5000",)) == "http://box:5000/v2/"
    assert api_address("box:5001", ("box:5000",)) == "https://box:5001/v2/"
    hosts = ("localhost", "127.8.1.2:1", "[::1]:80", "10.0.0.1", "127.0.0.1.nip.example")
    assert [is_loopback(host) for host in hosts] == [True, True, True, False, False]
