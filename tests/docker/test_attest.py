"""A real image in a real registry: its SBOM by syft, provenance, verification and signatures, and what is wrong then."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    AttachmentFile,
    Descriptor,
    FoundImage,
    ImageReference,
    Registry,
    connect_registry,
    digest_of,
    index_document,
    push_image,
)
from imagebuild.project import Changes, load_project, make_plan, select_one, versions_with
from imagebuild.publish import (
    AttestFinding,
    AttestResult,
    Cosign,
    Signer,
    encode_statement,
    image_digests,
    provenance_statement,
    replaced_dependencies,
    sign_digest,
)
from imagebuild.render import Renderer
from imagebuild.verify import ImageFinder
from tests.docker.conftest import TARGET, Built, Imagebuild, Services, install

pytestmark = pytest.mark.docker
REPOSITORY = "gpu/quickstart"


@pytest.fixture
def cosign(tmp_path: Path) -> Cosign:
    """cosign, and a key pair of this test in its folder."""
    if not shutil.which("cosign"):
        try:
            install("cosign")
        except CommandError as error:
            pytest.skip(f"the distribution's archive has no cosign: {error}")
    environ = {"COSIGN_PASSWORD": "a password of a test"}
    for name in ("ours", "theirs"):
        argv = ["cosign", "generate-key-pair", "--output-key-prefix", str(tmp_path / name)]
        subprocess.run(argv, env={"PATH": "/usr/bin:/bin", **environ}, check=True, capture_output=True)
    return Cosign(environ)


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

    def attach(self, kind: str, content: bytes) -> str:
        about = KINDS[kind]
        file = AttachmentFile(about.file, about.media_type, content)
        return self.registry.attach(REPOSITORY, self.manifest, about.artifact_type, (file,), {})


@pytest.fixture
def published(quickstart: Built, registry: str, services: Services, tmp_path: Path) -> Iterator[Published]:
    client = connect_registry(registry)
    with ImageFinder().find(f"engine:{quickstart.tag}") as found:
        assert isinstance(found, FoundImage)
        image = found.image(None)
        layout = image.as_layout(tmp_path / "layout")
        assert image.digest
        push_image(layout, image.digest, client, REPOSITORY)
        stored = client.manifest(REPOSITORY, image.digest)
        assert stored
        about = Descriptor(stored.media_type, stored.digest, len(stored.content), image.platform)
        platform: Platform = "linux/arm64" if image.architecture == "arm64" else "linux/amd64"
        index = client.put_manifest(REPOSITORY, "13.5", index_document([about]), INDEX)
        yield Published(client, layout, platform, about, index, services.storage)


def wrong(imagebuild: Imagebuild, published: Published, *args: str | Path, status: int = 0) -> list[AttestFinding]:
    """What `attest verify` says is wrong."""
    file = imagebuild.folder / "attest.json"
    imagebuild("attest", "verify", published.tag, "--json", file, *args, expect=status)
    return [f for f in AttestResult.model_validate_json(file.read_text()).findings if f.is_wrong]


def statement(imagebuild: Imagebuild, quickstart: Built, published: Published) -> Mapping[str, Any]:
    folder = imagebuild.folder
    project = load_project(folder / "matrix.yaml", folder / "dockerfiles", folder / "imagebuild.lock")
    renderer = Renderer(project, versions_with(project, Changes()))
    target = select_one(make_plan(project), TARGET)
    manifests = {published.platform: published.manifest.digest}
    result = quickstart.result.model_copy(update={"manifests": manifests})
    text = renderer.dockerfile(target).text
    return provenance_statement(result, published.platform, renderer.recipe(target), project.lock, text)


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
    assert image_digests(document) == {digest}
    packages = {p["name"]: p for p in document["packages"]}
    assert {"libc6", "openmpi-bin", "nccl-wheel", "nvidia-nccl-cu13", "sshd"} <= packages.keys()
    assert packages["nvidia-nccl-cu13"]["checksums"]
    assert "comment" not in document, "the checkout has the lock that the image was built with"

    imagebuild("verify", quickstart.tag, "--only", "pmix/*", "--json", verified)
    published.attach("sbom", first.read_bytes())
    made = encode_statement(statement(imagebuild, quickstart, published))
    published.attach("provenance", made)
    assert json.loads(verified.read_text())["digest"] == digest
    assert [(f.kind, f.outcome) for f in wrong(imagebuild, published, status=1)] == [("verification", "missing")]
    imagebuild("attest", "add", str(published.named(digest)), verified, "--kind", "verification")
    assert wrong(imagebuild, published) == []

    # The base was bootstrapped, and so it is said; its digest is not that of the official image.
    (base,) = replaced_dependencies(json.loads(made))
    assert base.startswith("pkg:oci/debian@sha256:")

    # Signatures: none, ours, twice the same, somebody else's key.
    key = ("--key", tmp_path / "ours.pub", "--no-tlog")
    attached = {"sbom", "provenance", "verification"}
    assert {f.kind for f in wrong(imagebuild, published, *key, status=1)} == {"signature", *attached}
    signer = Signer(str(tmp_path / "ours.key"), log=False)
    sign_digest([published.named(d) for d in (published.index, digest)], signer, cosign)
    assert {f.kind for f in wrong(imagebuild, published, *key, status=1)} == attached, "nobody signed those"
    referring = [item.digest for item in published.registry.referrers(REPOSITORY, digest)]
    images = [published.named(d) for d in (published.index, digest, *referring)]
    sign_digest(images, signer, cosign)
    assert wrong(imagebuild, published, *key) == []
    tags = [tag for tag in published.registry.tags(REPOSITORY) if tag.endswith(".sig")]
    before = [published.registry.digest(REPOSITORY, tag) for tag in tags]
    sign_digest(images, signer, cosign)
    assert [published.registry.digest(REPOSITORY, tag) for tag in tags] == before
    findings = wrong(imagebuild, published, "--key", tmp_path / "theirs.pub", "--no-tlog", status=1)
    assert {(f.subject, f.kind) for f in findings} == {
        ("index", "signature"), *((published.platform, kind) for kind in ("signature", *attached))
    }  # fmt: skip

    # What is downloaded is what was attached.
    shown = tmp_path / "shown.json"
    imagebuild("attest", "show", published.tag, "--kind", "sbom", "-o", shown)
    assert shown.read_bytes() == first.read_bytes()

    # Somebody with access to the registry's disk changes the SBOM.
    hexadecimal = digest_of(first.read_bytes()).removeprefix("sha256:")
    find = ["find", "/data", "-path", f"*/{hexadecimal}/data", "-exec", "sed", "-i", "s/2.32.3/2.32.9/g", "{}", "+"]
    assert published.storage.exec_run(find) == (0, b"")
    (finding,) = wrong(imagebuild, published, status=1)
    assert (finding.kind, finding.outcome) == ("sbom", "broken")
    assert "was changed" in finding.detail
