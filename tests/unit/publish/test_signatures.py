"""Signatures with cosign: its options, what it needs, and the identity of a CI job."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.publish import signatures
from imagebuild.publish.signatures import Cosign, Signer, job_workflow
from tests.attached import scan
from tests.faulty import Answer
from tests.unit.conftest import Serve
from tests.unit.publish.conftest import Published, Signers

OTHER = f"sha256:{'9' * 64}"


def test_the_log_is_left_out_only_when_asked(signers: Signers, published: Published) -> None:
    option = "--tlog-upload=false" if signers.fake.version == 2 else "--signing-config"
    for log in (True, False):
        signers.fake.calls.clear()
        published.attach("scan", scan(OTHER), signer=signers.signer(log=log))
        (call,) = [call for call in signers.fake.calls if call[0] == "attest-blob" and call[1:] != ("--help",)]
        assert (option in call) != log
        assert ("--new-bundle-format" in call) == (signers.fake.version == 2)


@pytest.mark.parametrize("name", ["predicate.json", "bundle.json", "signing-config", "open"])
def test_an_image_may_have_the_name_of_a_file_of_cosign(signers: Signers, name: str) -> None:
    bundle = signers.signer(log=False).attest("scan", b"{}", name, b"manifest")
    payload = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    assert payload["subject"] == [{"name": name, "digest": {"sha256": hashlib.sha256(b"manifest").hexdigest()}}]


def test_what_signing_needs_is_looked_at_first(signers: Signers, monkeypatch: pytest.MonkeyPatch) -> None:
    without_password = Cosign({"HOME": "/"}, signers.fake.run, "cosign")
    with pytest.raises(ConfigError, match=r"ours\.key: COSIGN_PASSWORD is not set; set it to"):
        Signer(str(signers.folder / "ours.key"), cosign=without_password, signs=True).check()
    for key in (None, "gcpkms://projects/x"):
        Signer(key, cosign=without_password, signs=True).check()
    monkeypatch.setattr(signatures, "which", lambda _: None)
    with pytest.raises(CommandError, match=r"`cosign` is missing.*apt-get install cosign"):
        Signer(identities=("me",), issuer="https://issuer.example").check()


def test_a_job_signs_as_the_workflow_that_it_is_in_and_not_as_the_one_that_called_it(serve: Serve) -> None:
    ours, callers = (f"acme/images/.github/workflows/{name}.yml@refs/heads/main" for name in ("build", "fresh"))
    claims = base64.urlsafe_b64encode(json.dumps({"job_workflow_ref": ours}).encode()).decode().rstrip("=")
    assert job_workflow({"GITHUB_WORKFLOW_REF": callers}) == callers
    assert job_workflow({}) == ""
    github = serve(Answer(502), Answer(200, json.dumps({"value": f"e30.{claims}.x"}).encode()))
    token = {"ACTIONS_ID_TOKEN_REQUEST_TOKEN": "t"}
    address = {"ACTIONS_ID_TOKEN_REQUEST_URL": f"{github.address}?api-version=2"}
    assert job_workflow({"GITHUB_WORKFLOW_REF": callers, **address, **token}) == ours
    assert github.asked == ["bearer t"] * 2
    for status, content in ((200, b"{}"), (403, b"")):
        with pytest.raises(CommandError, match="cannot read the identity of this GitHub job"):
            job_workflow({"ACTIONS_ID_TOKEN_REQUEST_URL": f"{serve(Answer(status, content)).address}?x"})


def test_nobodys_signature_is_not_verified() -> None:
    for signer in (Signer("awskms:///k", ("me",), "issuer"), Signer(identities=("me",))):
        with pytest.raises(ConfigError, match="the signer is ambiguous"):
            signer.check()
