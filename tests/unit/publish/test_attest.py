"""What refers to an image in a registry: right, wrong, damaged, of another image, missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from imagebuild.cli import app, evidence
from imagebuild.core import CommandError, ConfigError, ImagebuildError, Platform, ResultError
from imagebuild.oci import KINDS, AttachmentFile, Descriptor, ImageReference, Manifest, digest_of, parse_reference
from imagebuild.project import BuildResult, Lock, Plan, Project, select_one
from imagebuild.publish import (
    CREATED,
    DEFAULT_KINDS,
    DOCUMENT,
    IMAGE,
    AttestFinding,
    AttestRequest,
    AttestResult,
    Checkout,
    add_attachment,
    find_image,
    finish_document,
    package,
    provenance_statement,
    relationship,
    show_attachment,
    verify_attachments,
)
from imagebuild.render import Recipe, Renderer
from tests.registry_fake import FakeRegistry, image, index

REPOSITORY = "gpu/open"
TARGET = "open-cuda13.0-debian13-runtime"
AMD64: Platform = "linux/amd64"
ARM64: Platform = "linux/arm64"
PLATFORMS: tuple[Platform, ...] = (AMD64, ARM64)
OTHER = f"sha256:{'9' * 64}"


def sbom(digest: str) -> dict[str, Any]:
    about = package(IMAGE, "open", digest, sha256=digest.removeprefix("sha256:"))
    document = {
        "packages": [about, package("SPDXRef-Component-ucx", "ucx", "1.22.0")],
        "relationships": [relationship(DOCUMENT, "DESCRIBES", IMAGE)],
    }
    return finish_document(document, "open", "2026-01-01T00:00:00Z", [])


def verification(digest: str, platform: str = AMD64, outcome: str = "passed") -> dict[str, Any]:
    checks = [
        {"component": "ucx", "check": "version", "outcome": outcome},
        {"component": "ucx", "check": "gpu", "outcome": "skipped"},
    ]
    return {"image": "open", "digest": digest, "target": TARGET, "platform": platform, "checks": checks}


def scan(digest: str, verdict: str = "passed") -> dict[str, Any]:
    return {
        "image": "open", "digest": digest, "platform": AMD64, "scanner": "grype 0.1", "database": "of today",
        "started": "2026-01-01T00:00:00+00:00", "findings": [], "verdict": verdict, "reason": "CVE-1 is critical",
    }  # fmt: skip


def benchmark() -> dict[str, Any]:
    return {"tests": [], "ucx": [], "runs": [], "tables": [], "diagnostics": [
        {"tool": "dcgmi", "test": "software", "outcome": "pass"}]}  # fmt: skip


@dataclass
class Published:
    """An image of two platforms in a registry, with what publishing attaches to it."""

    registry: FakeRegistry
    recipe: Recipe
    lock: Lock
    platforms: dict[Platform, Descriptor]
    digest: str
    reference: ImageReference

    def statement(self, platform: Platform, **more: Any) -> dict[str, Any]:
        result = BuildResult(
            target=TARGET, digest=self.digest, tags=(), platforms=PLATFORMS, size_bytes=None, seconds=1.0, steps=(),
            manifests={p: d.digest for p, d in self.platforms.items()}, revision="c" * 40, dockerfile="d" * 64,
            started="2026-01-01T00:00:00Z", **more,
        )  # fmt: skip
        return provenance_statement(result, platform, self.recipe, self.lock)

    def attach(self, kind: str, document: object, platform: Platform = AMD64) -> str:
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        about = KINDS[kind]
        files = (AttachmentFile(about.file, about.media_type, content),)
        return self.registry.attach(REPOSITORY, self.platforms[platform], about.artifact_type, files, {})

    def attach_all(self, *kinds: str) -> None:
        for platform in PLATFORMS:
            digest = self.platforms[platform].digest
            documents = {
                "sbom": sbom(digest), "provenance": self.statement(platform),
                "verification": verification(digest, platform),
            }  # fmt: skip
            for kind in kinds or DEFAULT_KINDS:
                self.attach(kind, documents[kind], platform)

    def verify(self, *required: str, **more: Any) -> AttestResult:
        request = AttestRequest(required or DEFAULT_KINDS, checkout=self.checkout(), **more)
        return verify_attachments(self.reference, self.registry, request)

    def checkout(self) -> Checkout:
        return Checkout(lambda name: self.recipe if name == TARGET else None)


@pytest.fixture
def published(renderer: Renderer, full_plan: Plan, project: Project) -> Published:
    registry = FakeRegistry()
    platforms = {p: image(registry, REPOSITORY, p.encode(), p) for p in PLATFORMS}
    digest = index(registry, REPOSITORY, platforms.values(), "13.0")
    recipe = renderer.recipe(select_one(full_plan, TARGET))
    return Published(
        registry, recipe, project.lock, dict(platforms), digest, parse_reference(f"registry.test/{REPOSITORY}:13.0")
    )  # fmt: skip


def wrong(result: AttestResult) -> list[AttestFinding]:
    assert (result.verdict == "failed") == any(f.is_wrong for f in result.findings)
    return [f for f in result.findings if f.is_wrong]


def test_all_is_well(published: Published) -> None:
    published.attach_all()
    result = published.verify()
    assert result.digest == published.digest
    assert wrong(result) == []
    seen = {(f.subject, f.kind) for f in result.findings if f.outcome == "passed"}
    assert seen == {(p, k) for p in PLATFORMS for k in DEFAULT_KINDS}
    (first, *_) = [f for f in result.findings if f.kind == "provenance"]
    assert "as in this checkout's lock" in first.detail
    assert "cccccccccccc" in first.detail


def test_a_platform_alone(published: Published) -> None:
    published.attach_all()
    published.reference = published.reference.at(published.platforms[AMD64].digest)
    result = published.verify()
    assert wrong(result) == []
    assert {f.subject for f in result.findings} == {AMD64}


@pytest.mark.parametrize("kind", DEFAULT_KINDS)
def test_what_is_missing(published: Published, kind: str) -> None:
    published.attach_all(*(k for k in DEFAULT_KINDS if k != kind))
    assert [(f.subject, f.kind, f.outcome) for f in wrong(published.verify())] == [
        (p, kind, "missing") for p in PLATFORMS
    ]
    assert wrong(published.verify(*(k for k in DEFAULT_KINDS if k != kind))) == []


def test_one_platform_without(published: Published) -> None:
    published.attach_all("sbom", "provenance")
    published.attach("verification", verification(published.platforms[AMD64].digest))
    assert [(f.subject, f.kind) for f in wrong(published.verify())] == [(ARM64, "verification")]


def test_a_tampered_sbom(published: Published) -> None:
    published.attach_all()
    blobs = published.registry.repositories[REPOSITORY].blobs
    digest = published.platforms[AMD64].digest
    (name,) = [d for d, data in blobs.items() if b"SPDXRef-Image" in data and digest.encode() in data]
    blobs[name] = blobs[name].replace(b"1.22.0", b"1.99.0")
    (finding,) = wrong(published.verify())
    assert (finding.kind, finding.outcome) == ("sbom", "broken")
    assert "was changed" in finding.detail
    # Nobody has to ask for it.
    assert [f.kind for f in wrong(published.verify("provenance"))] == ["sbom"]


def test_more_bytes_than_said(published: Published) -> None:
    published.attach_all()
    blobs = published.registry.repositories[REPOSITORY].blobs
    for name in [d for d, data in blobs.items() if b"SPDXRef-Image" in data]:
        blobs[name] += b" " * 100
    assert {(f.kind, f.outcome) for f in wrong(published.verify())} == {("sbom", "broken")}


def test_a_referrer_that_is_listed_and_not_there(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    published.attach_all()
    digest = published.attach("scan", scan(published.platforms[AMD64].digest))
    held = published.registry.repositories[REPOSITORY]
    listed = published.registry.referrers
    everything = {p.digest: listed(REPOSITORY, p.digest) for p in published.platforms.values()}
    held.manifests.pop(digest)
    monkeypatch.setattr(published.registry, "referrers", lambda _, subject: everything[subject])
    (finding,) = wrong(published.verify())
    assert (finding.kind, finding.detail) == ("scan", "is listed, but the registry does not have it")


def test_a_referrer_of_another_digest(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    published.attach_all()
    amd64, arm64 = (published.platforms[p].digest for p in PLATFORMS)
    listed = published.registry.referrers
    swapped = {amd64: listed(REPOSITORY, arm64), arm64: listed(REPOSITORY, amd64)}
    monkeypatch.setattr(published.registry, "referrers", lambda _, subject: swapped[subject])
    findings = wrong(published.verify())
    assert len(findings) == 2 * len(DEFAULT_KINDS)
    assert all(f.outcome == "broken" and "refers to another image" in f.detail for f in findings)


@pytest.mark.parametrize(
    ("kind", "document", "said"),
    [
        ("sbom", sbom(OTHER), "is about another image"),
        ("verification", verification(OTHER), "is about another image"),
        ("scan", scan(OTHER), "is about another image"),
        ("sbom", b"{", "cannot be read"),
        ("sbom", b"[]", "is not a JSON object"),
        ("sbom", b"[" * 100_000, "nested too deeply"),
        ("sbom", {"spdxVersion": "SPDX-3.0"}, "not SPDX 2"),
        ("verification", {"digest": 5}, "cannot be read"),
        ("provenance", {"_type": "x", "predicateType": "y"}, "not SLSA's provenance v1"),
        ("provenance", {}, "cannot be read"),
        ("provenance", b"\xff\xfe\x00", "cannot be read"),
        ("benchmark", {"runs": []}, "has no result"),
        ("benchmark", {"unknown": 1}, "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_about_another_image_or_nothing(published: Published, kind: str, document: object, said: str) -> None:
    published.attach_all(*(k for k in DEFAULT_KINDS if k != kind))
    for platform in PLATFORMS:
        published.attach(kind, document, platform)
    findings = wrong(published.verify())
    assert {(f.subject, f.kind, f.outcome) for f in findings} == {(p, kind, "broken") for p in PLATFORMS}
    assert all(said in f.detail for f in findings)


def test_a_failed_check(published: Published) -> None:
    published.attach_all("sbom", "provenance")
    for platform, outcome in zip(PLATFORMS, ("passed", "failed"), strict=True):
        published.attach(
            "verification", verification(published.platforms[platform].digest, platform, outcome), platform
        )
    (finding,) = wrong(published.verify())
    assert (finding.subject, finding.outcome) == (ARM64, "failed")
    assert "failed: ucx/version" in finding.detail


def test_one_good_verification_does_not_hide_a_failed_one(published: Published) -> None:
    published.attach_all()
    digest = published.platforms[AMD64].digest
    published.attach("verification", verification(digest, AMD64, "failed"))
    assert [f.outcome for f in wrong(published.verify())] == ["failed"]


def test_checks_that_were_all_skipped_passed_nothing(published: Published) -> None:
    published.attach_all("sbom", "provenance")
    for platform in PLATFORMS:
        found = verification(published.platforms[platform].digest, platform, "skipped")
        published.attach("verification", found, platform)
    assert [f.detail for f in wrong(published.verify())] == ["0 checks passed, 2 skipped"] * 2


def test_a_verification_of_the_index(published: Published) -> None:
    published.attach_all("sbom", "provenance")
    for platform in PLATFORMS:
        published.attach("verification", verification(published.digest, "linux/amd64, linux/arm64"), platform)
    assert wrong(published.verify()) == []


def test_a_verification_of_the_other_platform(published: Published) -> None:
    published.attach_all("sbom", "provenance")
    for platform in PLATFORMS:
        published.attach("verification", verification(published.digest, AMD64), platform)
    assert [(f.subject, f.detail) for f in wrong(published.verify())] == [(ARM64, "is about linux/amd64")]


def test_a_failed_scan_counts_where_it_is_required(published: Published) -> None:
    published.attach_all()
    for platform in PLATFORMS:
        published.attach("scan", scan(published.platforms[platform].digest, "failed"), platform)
    assert wrong(published.verify()) == []
    findings = wrong(published.verify(*DEFAULT_KINDS, "scan"))
    assert [(f.kind, f.outcome) for f in findings] == [("scan", "failed")] * 2
    assert "CVE-1 is critical" in findings[0].detail


def test_sources_of_another_lock(published: Published) -> None:
    published.attach_all()
    entries = published.lock.model_dump(by_alias=True)
    entries["git"]["https://github.com/openucx/ucx.git"]["v1.22.0"] = "e" * 40
    project = replace(published.recipe.project, lock=Lock.model_validate(entries))
    published.recipe = Recipe(project, published.recipe._versions, published.recipe.target, published.recipe._stages)
    findings = wrong(published.verify())
    assert {f.kind for f in findings} == {"provenance"}
    assert "not those of this checkout's lock: pkg:github/openucx/ucx@" in findings[0].detail
    assert wrong(verify_attachments(published.reference, published.registry, AttestRequest())) == []


def test_a_bootstrapped_base_is_said_and_right(published: Published) -> None:
    published.attach_all("sbom", "verification")
    official = f"debian:13.7-slim@{published.lock.images['debian:13.7-slim'].digest}"  # type: ignore[union-attr]
    for platform in PLATFORMS:
        published.attach("provenance", published.statement(platform, replaced={official: OTHER}), platform)
    result = published.verify()
    assert wrong(result) == []
    assert all("of which 1 stood in for others (pkg:oci/debian@" in f.detail
               for f in result.findings if f.kind == "provenance")  # fmt: skip


def test_a_folder_in_place_of_a_commit_is_wrong(published: Published) -> None:
    published.attach_all("sbom", "verification")
    for platform in PLATFORMS:
        published.attach("provenance", published.statement(platform, replaced={"ucx-source": "folder"}), platform)
    assert [f.detail for f in wrong(published.verify())] == [
        "built from folders that nobody can compare: ucx-source"
    ] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["subject"][0]["digest"].update(sha256="9" * 64),
        lambda d: d["subject"].append({"name": "also", "digest": {"sha256": "9" * 64}}),
        lambda d: d["predicate"]["buildDefinition"]["externalParameters"].update(platform="linux/riscv64"),
        lambda d: d["predicate"].pop("buildDefinition"),
        lambda d: d.update(predicateType="https://slsa.dev/provenance/v0.2"),
    ],
)
def test_statements_about_something_else(published: Published, change: Callable[[dict[str, Any]], object]) -> None:
    published.attach_all("sbom", "verification")
    for platform in PLATFORMS:
        document = published.statement(platform)
        change(document)
        published.attach("provenance", document, platform)
    assert [(f.kind, f.outcome) for f in wrong(published.verify())] == [("provenance", "broken")] * 2


def test_a_source_more_than_the_lock_has(published: Published) -> None:
    published.attach_all("sbom", "verification")
    for platform in PLATFORMS:
        document = published.statement(platform)
        extra = {"name": "evil", "uri": "pkg:generic/evil@1", "digest": {"sha256": "9" * 64}}
        document["predicate"]["buildDefinition"]["resolvedDependencies"].append(extra)
        published.attach("provenance", document, platform)
    assert all("pkg:generic/evil@1" in f.detail for f in wrong(published.verify()))
    assert len(wrong(published.verify())) == 2


def test_signatures_of_index_and_platforms(published: Published) -> None:
    published.attach_all()
    asked: list[str] = []

    def signed(named: ImageReference) -> str | None:
        asked.append(str(named))
        return "no signatures found" if named.digest == published.platforms[ARM64].digest else None

    result = published.verify(signed=signed)
    images = [published.digest, *(d.digest for d in published.platforms.values())]
    attached = [item.digest for d in images for item in published.registry.referrers(REPOSITORY, d)]
    assert sorted(asked) == sorted(f"registry.test/{REPOSITORY}@{d}" for d in (*images, *attached))
    assert [(f.subject, f.kind, f.detail) for f in wrong(result)] == [(ARM64, "signature", "no signatures found")]


def test_what_nobody_signed_is_not_believed(published: Published) -> None:
    published.attach_all()
    images = {published.digest, *(d.digest for d in published.platforms.values())}
    result = published.verify(signed=lambda named: None if named.digest in images else "no signatures found")
    assert {(f.subject, f.kind, f.outcome) for f in wrong(result)} == {
        (platform, kind, "missing") for platform in PLATFORMS for kind in ("sbom", "provenance", "verification")
    }
    ignored = [f for f in result.findings if f.attachment]
    assert ignored
    assert {(f.outcome, f.detail) for f in ignored} == {("skipped", "not believed: no signatures found")}


@pytest.mark.parametrize(
    ("required", "said"), [(("sboom",), "did you mean 'sbom'"), (("signature",), "whose\\? give --key")]
)
def test_requests_that_make_no_sense(published: Published, required: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        published.verify(*required)


def test_no_such_image(published: Published) -> None:
    with pytest.raises(ConfigError, match="registry.test has no such image"):
        find_image(parse_reference("registry.test/gpu/open:14"), published.registry)


@pytest.mark.parametrize("document", [{"manifests": []}, {"layers": []}, {"manifests": [{"digest": 1}]}])
def test_what_is_no_image(published: Published, document: object) -> None:
    content = json.dumps(document).encode()
    digest = digest_of(content)
    manifest = Manifest(content, "application/vnd.oci.image.index.v1+json", digest)
    published.registry.repositories[REPOSITORY].manifests[digest] = manifest
    with pytest.raises(ResultError):
        find_image(parse_reference(f"registry.test/{REPOSITORY}@{digest}"), published.registry)


def test_show_gives_the_bytes(published: Published) -> None:
    published.attach_all()
    digest = published.platforms[ARM64].digest
    content = show_attachment(published.reference, published.registry, "sbom", ARM64)
    assert json.loads(content) == sbom(digest)
    with pytest.raises(ConfigError, match="choose with --platform"):
        show_attachment(published.reference, published.registry, "sbom", None)
    with pytest.raises(ConfigError, match="has no scan; it has provenance, sbom, verification"):
        show_attachment(published.reference, published.registry, "scan", ARM64)


def test_show_gives_the_newest(published: Published) -> None:
    digest = published.platforms[AMD64].digest
    about = KINDS["verification"]
    for day in (3, 9, 5):
        content = json.dumps({**verification(digest), "started": f"2026-01-0{day}"}).encode()
        files = (AttachmentFile(about.file, about.media_type, content),)
        note = {CREATED: f"2026-01-0{day}"}
        published.registry.attach(REPOSITORY, published.platforms[AMD64], about.artifact_type, files, note)
    shown = json.loads(show_attachment(published.reference, published.registry, "verification", AMD64))
    assert shown["started"] == "2026-01-09"


def test_show_gives_nothing_that_was_changed(published: Published) -> None:
    published.attach_all()
    blobs = published.registry.repositories[REPOSITORY].blobs
    for name in [d for d, data in blobs.items() if b"SPDXRef-Image" in data]:
        blobs[name] = blobs[name].replace(b"ucx", b"xcu")
    with pytest.raises(ConfigError, match="cannot be trusted: was changed"):
        show_attachment(published.reference, published.registry, "sbom", AMD64)


def test_add_results_that_were_measured_later(published: Published) -> None:
    named = published.reference.at(published.digest)
    content = json.dumps(verification(published.platforms[AMD64].digest)).encode()
    first = add_attachment(named, published.registry, "verification", AttachmentFile("v.json", "", content), AMD64)
    calls = len(published.registry.calls)
    assert (
        add_attachment(named, published.registry, "verification", AttachmentFile("v.json", "", content), AMD64) == first
    )
    assert len(published.registry.calls) == calls
    assert show_attachment(published.reference, published.registry, "verification", AMD64) == content


@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        ("verification", json.dumps(verification(OTHER)), "is no verification of sha256:.*about another image"),
        ("benchmark", "{}", "has no result"),
        ("sbom", "no", "cannot be read"),
    ],
)
def test_add_refuses_what_is_not_about_the_image(published: Published, kind: str, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        add_attachment(
            published.reference.at(published.digest),
            published.registry,
            kind,
            AttachmentFile("f", "", content.encode()),
            AMD64,
        )
    assert published.registry.referrers(REPOSITORY, published.platforms[AMD64].digest) == ()


def test_add_wants_a_digest(published: Published) -> None:
    with pytest.raises(ConfigError, match="name the image by digest"):
        add_attachment(published.reference, published.registry, "sbom", AttachmentFile("f", "", b"{}"), AMD64)


@pytest.fixture
def run(published: Published, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr(evidence, "_connect", lambda _: published.registry)

    def call(*args: str | Path) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["attest", *map(str, args)])
        if isinstance(done.exception, ImagebuildError):
            raise done.exception
        return done.exit_code, done.output

    return call


def test_command_verify(published: Published, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    published.attach_all()
    result = tmp_path / "result.json"
    status, text = run("verify", published.reference, "--json", result)
    assert status == 0, text
    assert f"is {published.digest}" in text
    assert "all that is required is there and right" in text
    assert AttestResult.model_validate_json(result.read_text()).verdict == "passed"
    status, text = run("verify", published.reference, "--require", "sbom,scan")
    assert status == 1
    assert "missing" in text
    assert "2 wrong or missing" in text


def test_what_others_wrote_does_not_act_on_the_terminal(
    published: Published, run: Callable[..., tuple[int, str]]
) -> None:
    evil = {"spdxVersion": "\x1b]0;owned\x07[red]SPDX-9[/red]\x1b[2J"}
    published.attach("sbom", evil)
    _, text = run("verify", published.reference)
    assert "\x1b" not in text
    assert "[red]SPDX-9" in text


def test_command_show_and_add(published: Published, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    published.attach_all()
    shown = tmp_path / "sbom.spdx.json"
    assert run("show", published.reference, "--kind", "sbom", "--platform", AMD64, "-o", shown)[0] == 0
    assert json.loads(shown.read_text()) == sbom(published.platforms[AMD64].digest)
    named = published.reference.at(published.digest)
    status, text = run("add", named, shown, "--kind", "sbom", "--platform", AMD64)
    assert status == 0
    assert text.startswith(f"registry.test/{REPOSITORY}@sha256:")
    with pytest.raises(ConfigError, match="did you mean 'sbom'"):
        run("show", published.reference, "--kind", "sbon")


def test_a_registry_that_fails_is_no_verdict(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> tuple[Descriptor, ...]:
        raise CommandError("registry.test: 500")

    monkeypatch.setattr(published.registry, "referrers", broken)
    with pytest.raises(CommandError, match="500"):
        published.verify()
