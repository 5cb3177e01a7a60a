"""What a registry has, as a catalogue: tags, platforms, and everything that refers to them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagebuild.core import CommandError, ConfigError
from imagebuild.oci import (
    BUNDLE_MEDIA,
    Attachment,
    Descriptor,
    Repository,
    digest_of,
    parse_reference,
)
from imagebuild.project import (
    Catalog,
    CheckResult,
    Project,
    PublishedImage,
    ScanResult,
    Surroundings,
    VerifyResult,
    Vulnerability,
    make_plan,
)
from imagebuild.publish import (
    Freshness,
    Signer,
    Trust,
    catalog_from_registry,
    image_tags,
    split_tags,
    with_signers,
    with_updates,
)
from tests import attached, registry_fake, report_samples
from tests.conftest import ROOT, Files
from tests.cosign_fake import FakeCosign
from tests.registry_fake import FakeRegistry

REPOSITORY = "acme/tiny"
TAG = "13.0-debian13-runtime-abc1234"
NOW = datetime(2026, 11, 21, 10, 45, tzinfo=UTC)


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def ours(tiny: Files) -> Project:
    tiny.replace("matrix.yaml", '"{repository}/{image}:{cuda}-{os}-{variant}"]', (
        '"{repository}/{image}:{cuda}-{os}-{variant}-{revision}"]\n'
        '    aliases: ["{repository}/{image}:{cuda}-{variant}"]'
    ))  # fmt: skip
    tiny.replace("matrix.yaml", "repository: example", "repository: registry.test/acme")
    tiny.component("library", (tiny.root / "dockerfiles/components/library/component.yaml").read_text() + (
        "provides: [nccl]\nredistribution: ask first\n"
    ))  # fmt: skip
    return tiny.load()


def put(registry: FakeRegistry, content: bytes, labels: dict[str, str], platform: str = "linux/amd64") -> Descriptor:
    """An image of one platform with labels."""
    return registry_fake.put_image(registry, REPOSITORY, content, platform=platform, Labels=labels)


LABELS = {
    "imagebuild.target": "tiny-cuda13.0-debian13-runtime",
    "imagebuild.axis.variant": "runtime",
    "imagebuild.axis.cuda": "13.0",
    "imagebuild.axis.os": "debian13",
    "imagebuild.component.library": "1.2",
    "imagebuild.component.tool": "3.4",
    "org.opencontainers.image.description": "A small image",
    "org.opencontainers.image.created": "2026-11-20T07:00:00Z",
}


def attach(registry: FakeRegistry, subject: Descriptor, kind: str, content: object) -> str:
    return attached.attach(registry, REPOSITORY, subject, kind, content)


def publish(registry: FakeRegistry) -> list[Descriptor]:
    found = [put(registry, name.encode() * 100, LABELS, name) for name in ("linux/amd64", "linux/arm64")]
    for tag in (TAG, "13.0-runtime"):
        registry_fake.index(registry, REPOSITORY, found, tag)
    return found


def catalog(registry: FakeRegistry, ours: Project) -> Catalog:
    return catalog_from_registry(ours, make_plan(ours), lambda _: registry, lambda: NOW)


def one(registry: FakeRegistry, ours: Project) -> PublishedImage:
    (found,) = catalog(registry, ours).images
    return found


def test_an_image(registry: FakeRegistry, ours: Project) -> None:
    children = publish(registry)
    image = one(registry, ours)
    assert (image.image, image.target) == ("tiny", LABELS["imagebuild.target"])
    assert image.axes == {"cuda": "13.0", "os": "debian13", "variant": "runtime"}
    assert list(image.axes) == ["cuda", "os", "variant"]
    assert image.versions == {"library": "1.2", "tool": "3.4"}
    assert image.stack == {"nccl": "1.2"}
    assert (image.tags, image.aliases, image.revision) == ((TAG,), ("13.0-runtime",), "abc1234")
    assert image.reference == f"registry.test/acme/tiny@{registry.at(REPOSITORY).digest(TAG)}"
    assert [(p.platform, p.digest, p.size_bytes, p.layers) for p in image.platforms] == [
        (child.platform, child.digest, 1100, 1) for child in children
    ]
    assert image.created == "2026-11-20T07:00:00Z"
    assert image.restricted == {"library": "ask first"}
    assert not image.signed


def test_what_refers_to_a_platform(registry: FakeRegistry, ours: Project) -> None:
    amd64, arm64 = publish(registry)
    packages = [{"SPDXID": f"SPDXRef-{n}"} for n in ("image", "a", "b")]
    document = {"spdxVersion": "SPDX-2.3", "packages": packages, "documentDescribes": ["SPDXRef-image"]}
    sbom = attach(registry, amd64, "sbom", document)
    scan = ScanResult(
        image="x", digest=amd64.digest, platform="linux/amd64", scanner="one 1", database="of today", started="2026",
        verdict="failed", reason="one is too much",
        findings=tuple(Vulnerability(id=f"CVE-{n}", severity=s, package="p", version="1", waived=w)
                       for n, (s, w) in enumerate([("high", None), ("low", "till then"), ("low", None)])),
    )  # fmt: skip
    attach(registry, amd64, "scan", scan.model_dump())
    attach(registry, amd64, "provenance", {"buildDefinition": {"resolvedDependencies": []}})
    verified = VerifyResult(
        image="x", digest=amd64.digest, target=None, platform="linux/amd64", started="2026-11-20T08:00:00Z",
        version="0.6", surroundings=Surroundings(runner="docker", gpus=8),
        checks=(CheckResult(component="a", check="b", outcome="passed"),
                CheckResult(component="a", check="c", outcome="failed"),
                CheckResult(component="a", check="d", outcome="skipped")),
    )  # fmt: skip
    attach(registry, amd64, "verification", verified.model_dump())
    first, second = one(registry, ours).platforms
    assert (first.sbom and first.sbom.packages, first.sbom and first.sbom.evidence) == (2, sbom)
    assert first.scan
    assert (first.scan.verdict, first.scan.counts, first.scan.waived) == ("failed", {"high": 1, "low": 2}, 1)
    (checks,) = first.checks
    assert (checks.passed, checks.failed, checks.skipped, checks.gpus) == (1, 1, 1, 8)
    assert (checks.failures, checks.runner, checks.started) == (("a/c",), "docker", "2026-11-20T08:00:00Z")
    assert {entry.kind for entry in first.evidence} == {"sbom", "scan", "provenance", "verification"}
    assert (second.sbom, second.scan, second.checks, second.evidence) == (None, None, (), ())
    assert arm64.digest == second.digest


def test_the_best_bandwidth_has_its_ceiling(registry: FakeRegistry, ours: Project) -> None:
    """As it was judged; of the same measurement twice, the one with a ceiling. What nobody judged has none."""
    amd64, arm64 = publish(registry)
    report = report_samples.GOOD
    for document in (report, report.model_copy(update={"judgements": ()})):
        attach(registry, amd64, "benchmark", document.model_dump())
    wrong = tuple(
        run.model_copy(update={"verdict": "wrong-data"}) for run in report.runs if run.collective == "all_reduce"
    )
    rest = tuple(run for run in report.runs if run.collective != "all_reduce")
    unjudged = report.model_copy(update={"judgements": (), "runs": (*wrong, *rest)})
    attach(registry, arm64, "benchmark", unjudged.model_dump())
    first, second = (platform.bandwidth for platform in one(registry, ours).platforms)
    rates = {run.collective: max(row.busbw_gb_s or 0 for row in run.rows) for run in report.runs}
    assert first
    assert second
    assert (first.collective, first.ranks, first.gb_s, first.ceiling_gb_s) == (
        "all_reduce",
        8,
        rates["all_reduce"],
        700.0,
    )
    assert (second.collective, second.gb_s, second.ceiling_gb_s) == ("all_gather", rates["all_gather"], None)


def test_results_of_real_gpus(registry: FakeRegistry, ours: Project) -> None:
    files = sorted((ROOT / "docs/evidence/gpu-results").glob("*.json"))
    for number, file in enumerate(files):
        child = put(registry, file.name.encode(), LABELS)
        attach(registry, child, "benchmark", json.loads(file.read_text()))
        registry_fake.index(registry, REPOSITORY, [child], f"results-{number}")
    found = catalog(registry, ours)
    assert not found.problems
    assert len(found.images) == len(files)
    assert all(image.platforms[0].bandwidth for image in found.images)


def test_signatures_by_tag_and_by_referrer(registry: FakeRegistry, ours: Project) -> None:
    amd64, arm64 = publish(registry)
    index = str(registry.at(REPOSITORY).digest(TAG))
    registry.repositories[REPOSITORY].tags[f"{index.replace(':', '-')}.sig"] = amd64.digest
    registry.at(REPOSITORY).attach(arm64, Attachment("s", BUNDLE_MEDIA, b"{}"))
    image = one(registry, ours)
    assert image.signed
    assert [platform.signed for platform in image.platforms] == [False, True]
    assert [entry.kind for entry in image.platforms[1].evidence] == ["signature"]


@pytest.mark.parametrize(("signer", "message"), [("ours", "ours.pub"), ("theirs", ""), ("", "")])
def test_whose_signature_it_is(
    registry: FakeRegistry, ours: Project, signer: str, message: str, tmp_path: Path
) -> None:
    amd64, _ = publish(registry)
    index, fake = str(registry.at(REPOSITORY).digest(TAG)), FakeCosign()
    if signer:
        registry.repositories[REPOSITORY].tags[f"{index.replace(':', '-')}.sig"] = amd64.digest
        Signer(f"{signer}.key", cosign=fake.cosign()).sign([parse_reference(f"{registry.host}/{REPOSITORY}@{index}")])
    (tmp_path / "ours.pub").touch()
    trust = Trust(str(tmp_path / "ours.pub"), cosign=fake.cosign())
    found = with_signers(catalog(registry, ours), trust)
    assert [image.verified_by for image in found.images] == [message]
    assert ["not that of ours.pub: no signatures found" in problem for problem in found.problems] == [True] * (
        signer == "theirs"
    )
    assert one(registry, ours).verified_by is None


def test_updates_that_an_image_lacks(registry: FakeRegistry, ours: Project) -> None:
    amd64, _ = publish(registry)
    fresh = Freshness(read="2026-11-22T04:17:00Z", pending={amd64.digest: 2}, updates=())
    (image,) = with_updates(catalog(registry, ours), fresh).images
    assert [p.updates and (p.updates.pending, p.updates.read) for p in image.platforms] == [(2, fresh.read), None]


def test_an_image_of_one_platform(registry: FakeRegistry, ours: Project) -> None:
    alone = put(registry, b"alone", LABELS)
    registry.at(REPOSITORY).put_manifest(registry.at(REPOSITORY).manifest(alone.digest), TAG)
    image = one(registry, ours)
    assert (image.digest, [p.platform for p in image.platforms]) == (alone.digest, ["linux/amd64"])


def test_what_cannot_be_read_is_told_and_hides_no_other(registry: FakeRegistry, ours: Project) -> None:
    amd64, _ = publish(registry)
    attach(registry, amd64, "verification", b"no JSON")
    attach(registry, amd64, "scan", {"verdict": "perhaps"})
    attach(registry, amd64, "sbom", [1])
    other = put(registry, b"other", {})
    registry_fake.index(registry, REPOSITORY, [other], "broken")
    del registry.repositories[REPOSITORY].manifests[other.digest]
    found = catalog(registry, ours)
    assert len(found.images) == 1
    assert found.images[0].platforms[0].checks == ()
    assert len(found.problems) == 4
    for word in (
        "cannot be read: JSONDecodeError",
        "should be an object",
        "was it written by another version",
        f"{other.digest}: is not there",
    ):
        assert any(word in problem for problem in found.problems), word


def test_attestations_of_buildkit_are_no_platform(registry: FakeRegistry, ours: Project) -> None:
    children = [put(registry, b"a", LABELS), put(registry, b"b", {}, "unknown/unknown")]
    registry_fake.index(registry, REPOSITORY, children, TAG)
    assert [platform.platform for platform in one(registry, ours).platforms] == ["linux/amd64"]


def test_a_registry_that_is_empty_or_fails(
    registry: FakeRegistry, ours: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = catalog(registry, ours)
    assert (found.images, found.problems) == ((), ())
    assert (found.repository, found.read) == ("registry.test/acme", "2026-11-21T10:45:00Z")

    def refuse(_: Repository) -> tuple[str, ...]:
        raise CommandError("registry.test: 503")

    monkeypatch.setattr(Repository, "tags", refuse)
    with pytest.raises(CommandError, match="503"):
        catalog(registry, ours)


def test_the_newest_comes_first(registry: FakeRegistry, ours: Project) -> None:
    created = "org.opencontainers.image.created"
    for day, content in (("2026-11-01", b"old"), ("2026-11-19", b"new"), ("2026-11-10", b"middle")):
        child = put(registry, content, {**LABELS, created: f"{day}T00:00:00Z"})
        registry_fake.index(registry, REPOSITORY, [child], f"13.0-debian13-runtime-{digest_of(content)[7:14]}")
    days = [image.created[:10] for image in catalog(registry, ours).images]
    assert days == ["2026-11-19", "2026-11-10", "2026-11-01"]


def test_tags() -> None:
    templates = ["r/x:cuda{cuda}-nccl{nccl.version}-{os}-{revision}", "r/x:{cuda}-{os}-nccl{nccl.version}-{revision}"]
    found = ("latest", "13.4", "13.4.2-u24-nccl2.32.3-0a1b2c3", "cuda13.4.2-nccl2.32.3-u24-0a1b2c3-dirty", "cuda13-u24")
    fixed, moving, revision = split_tags(found, templates, {"cuda": "13.4.2", "os": "u24"})
    assert fixed == ("cuda13.4.2-nccl2.32.3-u24-0a1b2c3-dirty", "13.4.2-u24-nccl2.32.3-0a1b2c3")
    assert moving == ("cuda13-u24", "latest", "13.4")
    assert revision in ("0a1b2c3", "0a1b2c3-dirty")
    assert split_tags(["cuda12-nccl1-u24-0a1b2c3"], templates, {"cuda": "13.4.2", "os": "u24"})[0] == ()
    assert image_tags(("a", f"sha256-{'0' * 64}", f"sha256-{'0' * 64}.sig")) == ("a",)


def test_a_registry_must_be_named(project: Project) -> None:
    with pytest.raises(ConfigError, match="names no registry; give --registry"):
        catalog_from_registry(project, make_plan(project))
