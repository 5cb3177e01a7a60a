"""An image of two platforms in a registry in memory, with what publishing attaches to it; keys, and who signs with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imagebuild.oci.attestation import DEFAULT_KINDS
from imagebuild.oci.layout import INDEX, Descriptor, Manifest, encode_json
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Repository
from imagebuild.project.project import Project
from imagebuild.publish.attest import AttestFinding, AttestResult, verify_attachments
from imagebuild.publish.signatures import Signer
from tests import attached
from tests.conftest import Files, data
from tests.cosign_fake import FakeCosign
from tests.registry_fake import FakeRegistry, put_image

AMD64, ARM64 = PLATFORMS = ("linux/amd64", "linux/arm64")
REPOSITORY, COMMIT = "acme/tiny", "abc1234" + "0" * 33
TAG = "13.0-debian13-runtime-abc1234"
LABELS: dict[str, str] = data("publish/labels")


@dataclass
class Published:
    """The image and its registry. `attach_all` attaches what publishing does."""

    registry: FakeRegistry
    platforms: dict[str, Descriptor]
    digest: str
    """Of the index."""
    reference: ImageReference

    @property
    def place(self) -> Repository:
        return self.registry.at(REPOSITORY)

    @property
    def amd64(self) -> str:
        return self.platforms[AMD64].digest

    def attach(self, kind: str, content: object, platform: str = AMD64, signer: Signer | None = None) -> str:
        return attached.attach(self.registry, REPOSITORY, self.platforms[platform], kind, content, signer)

    def attach_all(self, signer: Signer | None = None) -> None:
        for platform, image in self.platforms.items():
            documents = {
                "sbom": attached.spdx(image.digest, ucx="1.22.0"),
                "provenance": attached.provenance(platform),
                "verification": attached.verification(image.digest, platform, started="2026-11-20T08:00:00Z"),
            }
            for kind, document in documents.items():
                self.attach(kind, document, platform, signer)

    def verify(self, *required: str, trust: Signer | None = None) -> AttestResult:
        return verify_attachments(self.reference, self.registry, required or DEFAULT_KINDS, trust)

    def wrong(self, *required: str, trust: Signer | None = None) -> list[AttestFinding]:
        """What is objected to."""
        result = self.verify(*required, trust=trust)
        found = [finding for finding in result.findings if finding.is_wrong]
        assert (result.verdict == "failed") == bool(found)
        return found


def put_index(registry: FakeRegistry, children: list[Descriptor], *tags: str, **more: str) -> str:
    """Put an index of images as publishing makes it; its digest."""
    notes = {"org.opencontainers.image.revision": COMMIT, **more}
    listed = [child.to_json() for child in children]
    content = encode_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed, "annotations": notes})
    digests = [registry.at(REPOSITORY).put_manifest(Manifest(content, INDEX), tag) for tag in tags]
    return digests[0]


@pytest.fixture
def published() -> Published:
    registry = FakeRegistry()
    children = [put_image(registry, REPOSITORY, p.encode() * 100, platform=p, Labels=LABELS) for p in PLATFORMS]
    digest = put_index(registry, children, TAG, "13.0-runtime")
    reference = parse_reference(f"registry.test/{REPOSITORY}:{TAG}")
    return Published(registry, dict(zip(PLATFORMS, children, strict=True)), digest, reference)


@pytest.fixture
def ours(tiny: Files) -> Project:
    """The project of that image."""
    tiny.replace("matrix.yaml", '"{repository}/{image}:{cuda}-{os}-{variant}"]', (
        '"{repository}/{image}:{cuda}-{os}-{variant}-{revision}"]\n'
        '    aliases: ["{repository}/{image}:{cuda}-{variant}"]'
    ))  # fmt: skip
    tiny.replace("matrix.yaml", "repository: example", "repository: registry.test/acme")
    tiny.component("library", (tiny.root / "dockerfiles/components/library/component.yaml").read_text() + (
        "provides: [nccl]\nredistribution: ask first\n"
    ))  # fmt: skip
    return tiny.load()


@dataclass
class Signers:
    """Keys in files, and a cosign that knows them."""

    fake: FakeCosign
    folder: Path

    def signer(self, name: str = "ours", **more: Any) -> Signer:
        return Signer(str(self.folder / f"{name}.key"), cosign=self.fake.cosign(), signs=True, **more)

    def trust(self, name: str = "ours", **more: Any) -> Signer:
        return Signer(str(self.folder / f"{name}.pub"), cosign=self.fake.cosign(), **more)


@pytest.fixture(params=[2, 3], ids=["cosign2", "cosign3"])
def signers(request: pytest.FixtureRequest, tmp_path: Path) -> Signers:
    for name in ("ours.key", "ours.pub", "theirs.key", "theirs.pub"):
        (tmp_path / name).touch()
    return Signers(FakeCosign(request.param), tmp_path)
