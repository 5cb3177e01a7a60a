"""What cosign is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from imagebuild.core import CommandError, ConfigError
from imagebuild.oci import parse_reference
from imagebuild.publish import Cosign, Signer, Trust, provenance, sign_digest, signature_tag, verify_signature

IMAGE = parse_reference(f"registry.example/gpu/open:13@sha256:{'1' * 64}")
LOCAL = parse_reference(f"127.0.0.1:5000/gpu/open@sha256:{'2' * 64}")
BY_DIGEST = f"registry.example/gpu/open@sha256:{'1' * 64}"


def cosign(*, fails: str | None = None, environ: dict[str, str] | None = None) -> tuple[Cosign, list[tuple[str, ...]]]:
    calls: list[tuple[str, ...]] = []

    def run(*argv: str, env: Mapping[str, str]) -> str:
        assert set(env) <= {"COSIGN_PASSWORD"}
        calls.append(argv)
        if fails:
            raise CommandError(fails)
        return ""

    return Cosign({"COSIGN_PASSWORD": "", "HOME": "/"} if environ is None else environ, run, "cosign"), calls


def test_images_are_signed_by_digest_and_not_by_tag() -> None:
    program, calls = cosign()
    sign_digest([IMAGE, LOCAL], Signer("cosign.key"), program)
    assert calls == [
        ("cosign", "sign", "--yes", "--key", "cosign.key", BY_DIGEST),
        ("cosign", "sign", "--yes", "--key", "cosign.key", "--allow-http-registry", str(LOCAL)),
    ]


def test_the_log_is_left_out_only_when_asked() -> None:
    program, calls = cosign()
    sign_digest([IMAGE], Signer("awskms:///alias/images", log=False), program)
    assert calls == [("cosign", "sign", "--yes", "--key", "awskms:///alias/images", "--tlog-upload=false", BY_DIGEST)]


def test_without_key_it_is_the_identity_of_the_ci() -> None:
    program, calls = cosign(environ={})
    sign_digest([IMAGE], Signer(), program)
    assert calls == [("cosign", "sign", "--yes", BY_DIGEST)]


def test_a_key_needs_its_password() -> None:
    program, calls = cosign(environ={})
    with pytest.raises(ConfigError, match=r"cosign\.key: set COSIGN_PASSWORD"):
        sign_digest([IMAGE], Signer("cosign.key"), program)
    sign_digest([IMAGE], Signer("gcpkms://projects/x"), program)
    assert len(calls) == 1


def test_a_tag_is_not_signed() -> None:
    program, calls = cosign()
    with pytest.raises(ConfigError, match="only an image named by digest"):
        sign_digest([parse_reference("registry.example/gpu/open:13")], Signer(), program)
    assert calls == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: sign_digest([IMAGE], Signer()),
        lambda: verify_signature(IMAGE, Trust(identity="me", issuer="https://issuer.example")),
    ],
)
def test_a_missing_cosign_is_no_silent_skip(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    monkeypatch.setattr(provenance, "which", lambda _: None)
    with pytest.raises(CommandError, match=r"`cosign` is missing.*apt-get install cosign"):
        call()


def test_verified_with_a_key(tmp_path: Path) -> None:
    key = tmp_path / "cosign.pub"
    key.touch()
    program, calls = cosign()
    assert verify_signature(IMAGE, Trust(str(key)), program) is None
    assert verify_signature(LOCAL, Trust(str(key), log=False), program) is None
    assert calls == [
        ("cosign", "verify", "--key", str(key), "--output", "json", BY_DIGEST),
        ("cosign", "verify", "--key", str(key), "--private-infrastructure", "--allow-http-registry", "--output", "json",
         str(LOCAL)),
    ]  # fmt: skip


def test_verified_by_identity() -> None:
    program, calls = cosign()
    trust = Trust(identity="https://forge.example/o/r/w.yml@refs/heads/main", issuer="https://issuer.example")
    assert verify_signature(IMAGE, trust, program) is None
    assert calls[0][2:6] == (
        "--certificate-identity", trust.identity, "--certificate-oidc-issuer", "https://issuer.example"
    )  # fmt: skip


def test_a_refusal_is_told_in_cosigns_words() -> None:
    program, _ = cosign(
        fails="`cosign verify` failed (10): Error: x\nerror during command execution: no signatures found"
    )
    assert verify_signature(IMAGE, Trust("awskms:///k"), program) == "no signatures found"


@pytest.mark.parametrize(
    ("trust", "said"),
    [
        (Trust(), "whose signature"),
        (Trust("/nowhere/cosign.pub"), "no such file"),
        (Trust("awskms:///k", "me", "issuer"), "whose signature"),
        (Trust(identity="me"), "--certificate-oidc-issuer"),
        (Trust(identity="me", issuer="issuer", log=False), "--no-tlog"),
    ],
)
def test_nobodys_signature_is_not_verified(trust: Trust, said: str) -> None:
    program, calls = cosign()
    with pytest.raises(ConfigError, match=said):
        verify_signature(IMAGE, trust, program)
    assert calls == []


def test_a_signature_has_the_tag_that_cosign_gives_it() -> None:
    assert signature_tag(f"sha256:{'1' * 64}") == f"sha256-{'1' * 64}.sig"
