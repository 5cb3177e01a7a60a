"""Result files are read completely, and those that are about no particular image are named."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.verification import VerifyResult
from imagebuild.core.errors import ConfigError, NothingSelected, ResultError
from imagebuild.project.project import Project
from imagebuild.publish.evidence import attachment_of, latest_time, read_evidence
from tests.attached import verification
from tests.conftest import data
from tests.cosign_fake import FakeCosign
from tests.forged import TRUST, Claims, Victim
from tests.publish_fakes import AMD64, ARM64, NEW, Site
from tests.registry_fake import FakeRegistry, put_image
from tests.unit.publish.conftest import LABELS, REPOSITORY, TAG


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_cut_off_results_are_not_ignored(site: Site) -> None:
    """A check that failed might be in the part that is missing."""
    site.ready(NEW)
    path = site.leave("more/verify.json", (next(site.evidence.rglob("verify.json"))).read_text()[:500])
    with pytest.raises(ResultError, match=rf"{path}: is not valid JSON"):
        site.publish()
    for unreadable in ("NaN", "-Infinity", '"\\ud800"'):
        path.write_text(f'{{"image": "x", "digest": null, "platform": "", "checks": [{unreadable}]}}')
        with pytest.raises(ResultError, match=rf"{path}: is not valid JSON"):
            site.publish()
    path.write_text('{"image": "x", "digest": null, "target": null, "platform": "linux/amd64", "checks": 5}')
    with pytest.raises(ResultError, match=rf"{path}: checks: .* the version"):
        site.publish()


def test_what_is_attached_contains_no_secret_that_a_check_printed() -> None:
    document = verification(f"sha256:{'a' * 64}")
    document["checks"] = [row | {"output": f"HF_TOKEN=hf_{'q' * 34}"} for row in document["checks"]]
    result = VerifyResult.model_validate(document)
    content = attachment_of(result, document, f"sha256:{'a' * 64}", "linux/amd64").content
    assert (b"(redacted)" in content, b"hf_" in content) == (True, False)


def test_results_of_no_image_in_particular_are_named(site: Site) -> None:
    site.ready(NEW)
    site.edit(digest=None)
    (path, why) = site.publish().result.unused[0].split(": ")
    assert (json.loads(Path(path).read_text())["digest"], why.partition(";")[0]) == (
        None,
        "does not name the digest of an image",
    )
    site.edit(platform=f"{AMD64}, {ARM64}")
    (problem,) = site.publish().result.unused
    assert "is about several platforms: linux/amd64, linux/arm64; verify each platform separately" in problem
    # What a build leaves beside its results is left alone.
    for name, text in {"metadata.json": "{}", "bake.json": "{}", ".hidden.json": "{", "a/index.json": "{}"}.items():
        site.leave(name, text)
    site.leave("a/oci-layout", "{}")
    assert len(site.publish().result.unused) == 1


@pytest.mark.parametrize("text", ['{"schemaVersion": 2}', "[1, 2]", "{}", "null", '{"image": "x", "checks": []}'])
def test_files_that_nobody_can_read_are_refused(site: Site, text: str) -> None:
    site.ready(NEW)
    path = site.leave("more/verify.json", text)
    with pytest.raises(ResultError, match=f"{path}: is not a result of build, verify, sbom, scan or report; move"):
        site.publish()
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(ConfigError, match=f"{path}: is not a file; remove it"):
        site.publish()
    path.unlink()
    with pytest.raises(NothingSelected, match=f"{path.parent}: contains no result"):
        read_evidence([site.evidence, path.parent])


# Attachments


FORGED = data("publish/forged")


@pytest.mark.parametrize("row", FORGED.values(), ids=FORGED)
def test_forged_attachments_change_nothing_that_is_read(ours: Project, row: dict[str, Any]) -> None:
    """The same rows with the real cosign and a real registry: tests/docker/test_attest.py."""
    fake, registry = FakeCosign(), FakeRegistry()

    def sign(by: Claims, kind: str, content: bytes, manifest: bytes) -> bytes:
        return replace(TRUST, cosign=fake.cosign(IDENTITY="|".join(by)), signs=True).attest(
            kind, content, "x", manifest
        )

    image = put_image(registry, REPOSITORY, b"layer", Labels=LABELS)
    registry.at(REPOSITORY).put_manifest(registry.at(REPOSITORY).manifest(image.digest), TAG)
    victim = Victim(registry.at(REPOSITORY), image, ours, replace(TRUST, cosign=fake.cosign()), sign)
    victim.attach_ours()
    victim.withstands(row)


def test_clocks_may_differ_a_little() -> None:
    now = datetime.now(UTC)
    assert [(now + timedelta(minutes=m)).isoformat() < latest_time() for m in (0, 5, 15)] == [True, True, False]
