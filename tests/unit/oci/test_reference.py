"""References of images, and the URLs of registries."""

from __future__ import annotations

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.oci.reference import ImageReference, api_address, is_loopback, parse_reference

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian", ImageReference("docker.io", "library/debian")),
        ("debian:13", ImageReference("docker.io", "library/debian", "13")),
        ("acme/tool", ImageReference("docker.io", "acme/tool")),
        ("ghcr.io/acme/gpu/open:13.2-x", ImageReference("ghcr.io", "acme/gpu/open", "13.2-x")),
        ("localhost/a", ImageReference("localhost", "a")),
        (f"localhost:5000/a__b/c-d@{DIGEST}", ImageReference("localhost:5000", "a__b/c-d", None, DIGEST)),
        (f"127.0.0.1:5000/a:b@{DIGEST}", ImageReference("127.0.0.1:5000", "a", "b", DIGEST)),
        ("[::1]:5000/a", ImageReference("[::1]:5000", "a")),
    ],
)
def test_parse(text: str, expected: ImageReference) -> None:
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
