"""A real image in a real registry: its SBOM by syft, provenance and verification, signed by a real cosign."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagebuild.core.errors import CommandError
from imagebuild.core.run import run_program
from imagebuild.oci.attestation import BUNDLE_MEDIA, KINDS, STATEMENT, STATEMENT_MEDIA, read_attestations
from imagebuild.oci.layout import INDEX, Descriptor, Manifest, digest_of, index_document
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Registry, connect_registry, push_image
from imagebuild.project.load import load_project
from imagebuild.project.plan import make_plan
from imagebuild.project.select import select_one
from imagebuild.publish.attest import AttestFinding, AttestResult
from imagebuild.publish.provenance import Provenance, provenance_of
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.publish.signatures import Cosign, Signer
from imagebuild.render.renderer import Renderer
from imagebuild.verify.subject import ImageFinder
from tests.attached import attach
from tests.conftest import MATRIX, Files, data
from tests.docker.conftest import TARGET, Built, Imagebuild, Services, need, own_registry
from tests.forged import TRUST, Claims, Victim
from tests.registry_fake import put_image

pytestmark = pytest.mark.docker
REPOSITORY = "gpu/quickstart"


@pytest.fixture
def cosign(tmp_path: Path) -> Cosign:
    """Return cosign, and write two key pairs to the test's folder."""
    need("cosign")
    cosign = Cosign({"COSIGN_PASSWORD": "a password of a test"})
    for name in ("ours", "theirs"):
        cosign("generate-key-pair", "--output-key-prefix", tmp_path / name)
    return cosign


@dataclass(frozen=True)
class Published:
    """The image of `make image` in a registry: a tagged index with one platform."""

    registry: Registry
    layout: Path
    manifest: Descriptor
    index: str

    @property
    def tag(self) -> str:
        return f"{self.registry.host}/{REPOSITORY}:13.5"

    @property
    def named(self) -> ImageReference:
        return ImageReference(self.registry.host, REPOSITORY, digest=self.manifest.digest)

    def attach(self, kind: str, document: object, signer: Signer | None = None) -> None:
        attach(self.registry, REPOSITORY, self.manifest, kind, document, signer)


@pytest.fixture
def published(quickstart: Built, registry: str, tmp_path: Path) -> Iterator[Published]:
    client = connect_registry(registry)
    with ImageFinder().find(f"engine:{quickstart.tag}") as found:
        image = found.image(None)
        layout = image.as_layout(tmp_path / "layout")
        push_image(layout, image.digest, client.at(REPOSITORY))
        index = client.at(REPOSITORY).put_manifest(Manifest(index_document([image.descriptor]), INDEX), "13.5")
        yield Published(client, layout.folder, image.descriptor, index)


def wrong(imagebuild: Imagebuild, published: Published, *args: str | Path, status: int = 0) -> list[AttestFinding]:
    """Run `attest verify`; return its findings."""
    file = imagebuild.folder / "attest.json"
    imagebuild("attest", "verify", str(published.named.at(published.index)), "--json", file, *args, expect=status)
    return [f for f in AttestResult.model_validate_json(file.read_text()).findings if f.is_wrong]


def provenance(imagebuild: Imagebuild, quickstart: Built) -> Mapping[str, Any]:
    folder = imagebuild.folder
    project = load_project(folder)
    renderer = Renderer(project)
    target = select_one(make_plan(project), TARGET)
    text = hashlib.sha256(renderer.dockerfile(target).text.encode()).hexdigest()
    platform = quickstart.result.platforms[0]
    return provenance_of(quickstart.result, platform, renderer.recipe(target), project.lock, text, origin={})


def test_published_and_verified(
    imagebuild: Imagebuild, quickstart: Built, published: Published, services: Services, cosign: Cosign, tmp_path: Path
) -> None:
    digest = published.manifest.digest
    first, second, verified = (tmp_path / name for name in ("layout.spdx.json", "registry.spdx.json", "verify.json"))

    # The SBOM is the same for an image in a layout and in a registry.
    imagebuild("sbom", published.layout, "-o", first)
    imagebuild("sbom", str(published.named), "-o", second)
    assert first.read_bytes() == second.read_bytes()
    assert validate_full_spdx_document(parse_file(str(first))) == []
    document = json.loads(first.read_text())
    assert SpdxDocument.model_validate(document).digests == {digest}
    assert {"libc6", "openmpi-bin", "nccl-wheel", "sshd"} <= {package["name"] for package in document["packages"]}

    imagebuild("verify", quickstart.tag, "--only", "pmix/*", "--json", verified)
    assert json.loads(verified.read_text())["digest"] == digest
    made = provenance(imagebuild, quickstart)
    # The bootstrapped base has another digest than the official image, so the provenance lists it as replaced.
    (base,) = Provenance.model_validate(made).replaced
    assert base.startswith("docker://docker.io/library/debian:13")
    published.attach("sbom", document)
    published.attach("provenance", made)
    assert [(f.kind, f.outcome) for f in wrong(imagebuild, published, status=1)] == [("verification", "missing")]
    add = ("attest", "add", str(published.named), verified, "--kind", "verification")
    imagebuild(*add)
    assert wrong(imagebuild, published) == []

    # Nothing is signed yet. Then all is signed by our key, and verified with another key.
    ours = ("--key", tmp_path / "ours.pub", "--no-tlog")
    everything = {"signature", "sbom", "provenance", "verification"}
    assert {f.kind for f in wrong(imagebuild, published, *ours, status=1)} == everything
    signer = Signer(str(tmp_path / "ours.key"), log=False, cosign=cosign, signs=True)
    signer.sign(published.named.at(d) for d in (published.index, digest))
    key = ("--sign", "--key", tmp_path / "ours.key", "--no-tlog")
    imagebuild(*add, *key, COSIGN_PASSWORD=cosign.environ["COSIGN_PASSWORD"])
    for kind, predicate in (("sbom", document), ("provenance", made)):
        published.attach(kind, predicate, signer)
        # `cosign verify-attestation` finds the same statements.
        (found,) = verify_attestation(cosign, str(published.named), kind, tmp_path / "ours.pub")
        assert found["predicate"] == json.loads(json.dumps(predicate))
        assert found["subject"][0]["digest"] == {"sha256": digest.removeprefix("sha256:")}
    assert wrong(imagebuild, published, *ours) == []
    # `publish` did not give this tag, so somebody may have moved it here.
    assert "somebody may have moved this tag" in imagebuild("attest", "verify", published.tag, *ours, expect=1).out
    theirs = ("--key", tmp_path / "theirs.pub", "--no-tlog")
    assert {f.kind for f in wrong(imagebuild, published, *theirs, status=1)} == everything
    with pytest.raises(
        CommandError, match="could not verify envelope|no matching attestations|none of the attestations matched"
    ):
        verify_attestation(cosign, str(published.named), "provenance", tmp_path / "theirs.pub")

    # The provenance is changed on the registry's disk.
    (item,) = read_attestations(published.registry.at(REPOSITORY), digest, "provenance")
    manifest = published.registry.at(REPOSITORY).manifest(item.digest)
    hexadecimal = manifest.document["layers"][0]["digest"].removeprefix("sha256:")
    find = f"find /data -path */{hexadecimal}/data -exec sed -i s/mediaType/mediaTipe/ {{}} +".split()
    assert services.storage.exec_run(find) == (0, b"")
    (finding,) = wrong(imagebuild, published, status=1)
    assert (finding.kind, finding.outcome) == ("provenance", "broken")
    assert "sent wrong content" in finding.detail


@dataclass(frozen=True)
class Authority:
    """A certificate authority like Fulcio, with certificates of the same form, and the real cosign that trusts it.

    The public Fulcio certifies only jobs of real CI systems."""

    folder: Path
    cosign: Cosign

    @classmethod
    def make(cls, folder: Path) -> Authority:
        cls._openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", folder / "ca.key")
        subject = ("-subj", "/O=acme/CN=ca", "-addext", "keyUsage=critical,keyCertSign")
        cls._openssl("req", "-x509", "-new", "-key", folder / "ca.key", *subject, "-out", folder / "ca.pem")
        der = base64.b64encode(cls._openssl("x509", "-in", folder / "ca.pem", "-outform", "DER")).decode()
        valid = {"certChain": {"certificates": [{"rawBytes": der}]}, "validFor": {"start": "2020-01-01T00:00:00Z"}}
        kind = "application/vnd.dev.sigstore.trustedroot+json;version=0.1"
        (folder / "roots.json").write_text(json.dumps({"mediaType": kind, "certificateAuthorities": [valid]}))
        offline = ("--insecure-ignore-sct=true", "--insecure-ignore-tlog=true")

        def run(program: str, command: str, *arguments: str, env: Mapping[str, str]) -> str:
            roots = {
                "verify": ("--ca-roots", folder / "ca.pem"),
                "verify-blob-attestation": ("--trusted-root", folder / "roots.json"),
            }
            more = (*map(str, roots[command]), *offline) if command in roots else ()
            return run_program(program, command, *more, *arguments, env=env)

        return cls(folder, Cosign(run=run))

    def sign(self, claims: Claims, kind: str, content: bytes, manifest: bytes) -> bytes:
        """Return the bundle that a workflow with these claims would get."""
        identity, issuer, repository, ref = claims
        key, request, certificate, extensions = (self.folder / name for name in ("key", "csr", "crt", "ext"))
        self._openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", key)
        self._openssl("req", "-new", "-key", key, "-subj", "/", "-out", request)
        raw = {1: issuer, 5: repository, 6: ref}  # https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md
        fields = [f"1.3.6.1.4.1.57264.1.{number}=DER:{text.encode().hex(':')}" for number, text in raw.items()]
        uses = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=codeSigning", "basicConstraints=CA:FALSE"]
        extensions.write_text("\n".join([*uses, f"subjectAltName=critical,URI:{identity}", *fields]))
        authority = ("-CA", self.folder / "ca.pem", "-CAkey", self.folder / "ca.key", "-extfile", extensions)
        self._openssl("x509", "-req", "-in", request, *authority, "-out", certificate)
        subject = {"name": "x", "digest": {"sha256": digest_of(manifest).removeprefix("sha256:")}}
        statement = {"_type": STATEMENT, "subject": [subject], "predicateType": KINDS[kind]}
        payload = json.dumps({**statement, "predicate": json.loads(content)}).encode()
        signed = f"DSSEv1 {len(STATEMENT_MEDIA)} {STATEMENT_MEDIA} {len(payload)} ".encode() + payload
        parts = (payload, self._openssl("dgst", "-sha256", "-sign", key, stdin=signed),
                 self._openssl("x509", "-in", certificate, "-outform", "DER"))  # fmt: skip
        text, signature, der = (base64.b64encode(part).decode() for part in parts)
        envelope = {"payloadType": STATEMENT_MEDIA, "payload": text, "signatures": [{"sig": signature}]}
        material = {"certificate": {"rawBytes": der}, "tlogEntries": []}
        document = {"mediaType": BUNDLE_MEDIA, "verificationMaterial": material, "dsseEnvelope": envelope}
        return json.dumps(document).encode()

    @staticmethod
    def _openssl(*arguments: str | Path, stdin: bytes = b"") -> bytes:
        return subprocess.run(["openssl", *map(str, arguments)], input=stdin, check=True, capture_output=True).stdout


def test_forged_attachments_do_not_deceive_the_real_cosign(tmp_path: Path) -> None:
    """One row for each signer, envelope, subject and end, because cosign needs up to a second for each attachment.
    tests/unit/publish/test_evidence.py tries all rows with a fake cosign and a fake registry."""
    need("cosign")
    authority, project = Authority.make(tmp_path), Files(tmp_path / "project")
    forged, kinds = data("publish/forged"), ("by", "about", "tamper", "json", "ends")
    rows = {str([row.get(key) for key in kinds]): row for row in forged.values() if row["ends"] != "trusted"}.values()
    trust = replace(TRUST, cosign=authority.cosign)
    with own_registry(tmp_path) as address:
        project.write("matrix.yaml", MATRIX.replace("repository: example", f"repository: {address}/acme"))
        place = connect_registry(address).at("acme/tiny")
        image = put_image(place.registry, place.name, b"layer", Labels=data("publish/labels"))
        place.put_manifest(place.manifest(image.digest), "latest")
        victim = Victim(place, image, project.load(), trust, authority.sign)
        victim.attach_ours()
        victim.withstands(*rows)
        victim.withstands(forged["ours, by the other workflow"])  # only one, because only the newest scan counts


def verify_attestation(cosign: Cosign, name: str, kind: str, key: Path) -> list[dict[str, Any]]:
    """Return the statements that `cosign verify-attestation` prints."""
    options = ["--key", str(key), "--insecure-ignore-tlog=true", "--allow-http-registry", "--type", KINDS[kind]]
    if cosign.is_before_3:
        roots = key.with_name("roots.json")
        roots.write_text('{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}')
        options += ["--new-bundle-format", "--trusted-root", str(roots)]
    printed = cosign("verify-attestation", *options, name)
    return [json.loads(base64.b64decode(json.loads(line)["payload"])) for line in printed.splitlines()]
