"""A real image in a real registry: its SBOM by syft, provenance and verification, signed by a real cosign."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagebuild.core import CommandError, Platform
from imagebuild.oci import (
    INDEX,
    KINDS,
    Descriptor,
    FoundImage,
    ImageReference,
    Manifest,
    Registry,
    connect_registry,
    encode_predicate,
    index_document,
    push_image,
    read_attestations,
)
from imagebuild.project import Changes, load_project, make_plan, select_one, versions_with
from imagebuild.publish import (
    AttestFinding,
    AttestResult,
    Cosign,
    Provenance,
    Signer,
    SpdxDocument,
    attach,
    provenance_of,
)
from imagebuild.render import Renderer
from imagebuild.verify import ImageFinder
from tests.docker.conftest import TARGET, Built, Imagebuild, Services, install

pytestmark = pytest.mark.docker
REPOSITORY = "gpu/quickstart"


@pytest.fixture
def cosign(tmp_path: Path) -> Cosign:
    """cosign, and two key pairs of this test in its folder."""
    if not shutil.which("cosign"):
        try:
            install("cosign")
        except CommandError as error:
            pytest.skip(f"the distribution's archive has no cosign: {error}")
    cosign = Cosign({"COSIGN_PASSWORD": "a password of a test"})
    for name in ("ours", "theirs"):
        cosign("generate-key-pair", "--output-key-prefix", tmp_path / name)
    return cosign


@dataclass(frozen=True)
class Published:
    """The image of `make image` in a registry, as an index of one platform with a tag."""

    registry: Registry
    layout: Path
    platform: Platform
    manifest: Descriptor
    index: str
    storage: Container
    """Has the registry's files."""

    @property
    def tag(self) -> str:
        return f"{self.registry.host}/{REPOSITORY}:13.5"

    def named(self, digest: str) -> ImageReference:
        return ImageReference(self.registry.host, REPOSITORY, digest=digest)

    def attach(self, kind: str, document: object, signer: Signer | None = None) -> str:
        place = self.registry.at(REPOSITORY)
        return attach(place, self.manifest, kind, encode_predicate(document), signer=signer)


@pytest.fixture
def published(quickstart: Built, registry: str, services: Services, tmp_path: Path) -> Iterator[Published]:
    client = connect_registry(registry)
    with ImageFinder().find(f"engine:{quickstart.tag}") as found:
        assert isinstance(found, FoundImage)
        image = found.image(None)
        layout = image.as_layout(tmp_path / "layout")
        push_image(layout, image.digest, client.at(REPOSITORY))
        stored = client.at(REPOSITORY).find(image.digest)
        assert stored
        about = replace(stored.descriptor, platform=image.platform)
        platform: Platform = "linux/arm64" if image.architecture == "arm64" else "linux/amd64"
        index = client.at(REPOSITORY).put_manifest(Manifest(index_document([about]), INDEX), "13.5")
        yield Published(client, layout.folder, platform, about, index, services.storage)


def wrong(imagebuild: Imagebuild, published: Published, *args: str | Path, status: int = 0) -> list[AttestFinding]:
    """What `attest verify` says is wrong."""
    file = imagebuild.folder / "attest.json"
    imagebuild("attest", "verify", published.tag, "--json", file, *args, expect=status)
    return [f for f in AttestResult.model_validate_json(file.read_text()).findings if f.is_wrong]


def provenance(imagebuild: Imagebuild, quickstart: Built, published: Published) -> Mapping[str, Any]:
    folder = imagebuild.folder
    project = load_project(folder / "matrix.yaml", folder / "dockerfiles", folder / "imagebuild.lock")
    renderer = Renderer(project, versions_with(project, Changes()))
    target = select_one(make_plan(project), TARGET)
    text = renderer.dockerfile(target).text
    return provenance_of(quickstart.result, published.platform, renderer.recipe(target), project.lock, text)


def test_published_and_verified(
    imagebuild: Imagebuild, quickstart: Built, published: Published, cosign: Cosign, tmp_path: Path
) -> None:
    digest = published.manifest.digest
    first, second, verified = (tmp_path / name for name in ("layout.spdx.json", "registry.spdx.json", "verify.json"))

    # The same document, wherever the image is.
    imagebuild("sbom", published.layout, "-o", first)
    imagebuild("sbom", str(published.named(digest)), "-o", second)
    assert first.read_bytes() == second.read_bytes()
    assert validate_full_spdx_document(parse_file(str(first))) == []
    document = json.loads(first.read_text())
    assert SpdxDocument.model_validate(document).digests == {digest}
    packages = {p["name"]: p for p in document["packages"]}
    assert {"libc6", "openmpi-bin", "nccl-wheel", "sshd"} <= packages.keys()
    (reference,) = packages["nccl-wheel"]["externalRefs"]
    assert reference["referenceLocator"].startswith("pkg:pypi/nvidia-nccl-cu13@"), "what scanners know it by"
    assert "comment" not in document, "the checkout has the lock that the image was built with"

    imagebuild("verify", quickstart.tag, "--only", "pmix/*", "--json", verified)
    assert json.loads(verified.read_text())["digest"] == digest
    made = provenance(imagebuild, quickstart, published)
    # The base was bootstrapped, and so it is said; its digest is not that of the official image.
    (base,) = Provenance.model_validate(made).replaced
    assert base.startswith("pkg:oci/debian@sha256:")
    published.attach("sbom", document)
    published.attach("provenance", made)
    assert [(f.kind, f.outcome) for f in wrong(imagebuild, published, status=1)] == [("verification", "missing")]
    add = ("attest", "add", str(published.named(digest)), verified, "--kind", "verification")
    imagebuild(*add)
    assert wrong(imagebuild, published) == []
    shown = tmp_path / "shown.json"
    imagebuild("attest", "show", published.tag, "--kind", "sbom", "-o", shown)
    assert shown.read_bytes() == first.read_bytes()

    # Nobody signed anything; then the images; then the attachments, by somebody else; then by us.
    ours = ("--key", tmp_path / "ours.pub", "--no-tlog")
    attached = {"sbom", "provenance", "verification"}
    assert {f.kind for f in wrong(imagebuild, published, *ours, status=1)} == {"signature", *attached}
    signer, stranger = (Signer(str(tmp_path / f"{name}.key"), False, cosign) for name in ("ours", "theirs"))
    signer.sign(published.named(d) for d in (published.index, digest))
    published.attach("sbom", document, stranger)
    assert {f.kind for f in wrong(imagebuild, published, *ours, status=1)} == attached
    key = ("--sign", "--key", tmp_path / "ours.key", "--no-tlog")
    imagebuild(*add, *key, COSIGN_PASSWORD=cosign.environ["COSIGN_PASSWORD"])
    for kind, predicate in (("sbom", document), ("provenance", made)):
        published.attach(kind, predicate, signer)
    assert wrong(imagebuild, published, *ours) == []

    # What others use finds the same, and gives it to nobody who has another key.
    for kind, predicate in (("sbom", document), ("provenance", made)):
        found = verify_attestation(cosign, published, kind, tmp_path / "ours.pub")
        assert found["predicate"] == json.loads(json.dumps(predicate))
        assert found["subject"][0]["digest"] == {"sha256": digest.removeprefix("sha256:")}
    with pytest.raises(
        CommandError, match="could not verify envelope|no matching attestations|none of the attestations matched"
    ):
        verify_attestation(cosign, published, "provenance", tmp_path / "theirs.pub")
    for item in read_attestations(published.registry.at(REPOSITORY), digest, "provenance"):
        assert openssl_verifies(json.loads(item.bundle)["dsseEnvelope"], tmp_path / "ours.pub", tmp_path)
        assert not openssl_verifies(json.loads(item.bundle)["dsseEnvelope"], tmp_path / "theirs.pub", tmp_path)

    # Somebody with access to the registry's disk changes the provenance.
    (item,) = read_attestations(published.registry.at(REPOSITORY), digest, "provenance")
    manifest = published.registry.at(REPOSITORY).find(item.digest)
    assert manifest
    hexadecimal = manifest.document["layers"][0]["digest"].removeprefix("sha256:")
    find = f"find /data -path */{hexadecimal}/data -exec sed -i s/mediaType/mediaTipe/ {{}} +".split()
    assert published.storage.exec_run(find) == (0, b"")
    (finding,) = wrong(imagebuild, published, status=1)
    assert (finding.kind, finding.outcome) == ("provenance", "broken")
    assert "sent something else" in finding.detail


def verify_attestation(cosign: Cosign, published: Published, kind: str, key: Path) -> dict[str, Any]:
    """The statement that `cosign verify-attestation` prints."""
    options = ["--key", str(key), "--insecure-ignore-tlog=true", "--type", KINDS[kind]]
    if cosign.is_before_3:
        roots = key.with_name("roots.json")
        roots.write_text('{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}')
        options += ["--new-bundle-format", "--trusted-root", str(roots)]
    printed = cosign("verify-attestation", *options, str(published.named(published.manifest.digest)))
    statement: dict[str, Any] = json.loads(base64.b64decode(json.loads(printed.splitlines()[0])["payload"]))
    return statement


def openssl_verifies(envelope: Mapping[str, Any], key: Path, folder: Path) -> bool:
    """Whether a key signed an envelope, by the specification of DSSE and a program that knows nothing of it."""
    kind, payload = envelope["payloadType"].encode(), base64.b64decode(envelope["payload"])
    (folder / "signed").write_bytes(b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload))
    (folder / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    files = [str(file) for file in (key, "-signature", folder / "signature", folder / "signed")]
    return (
        subprocess.run(["openssl", "dgst", "-sha256", "-verify", *files], capture_output=True, check=False).returncode
        == 0
    )
