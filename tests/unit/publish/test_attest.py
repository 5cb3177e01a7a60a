"""What refers to an image in a registry: right, wrong, damaged, of another image, unsigned, missing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from imagebuild.cli import app
from imagebuild.core import CommandError, ConfigError, ImagebuildError, Platform, ResultError
from imagebuild.oci import (
    BUNDLE_MEDIA,
    KINDS,
    STATEMENT_MEDIA,
    Attachment,
    Attestation,
    Descriptor,
    ImageReference,
    Manifest,
    Repository,
    attestation_of,
    digest_of,
    encode_predicate,
    list_attestations,
    parse_reference,
    read_attestations,
)
from imagebuild.oci import registry as registry_module
from imagebuild.project import BuildResult, Plan, select_one
from imagebuild.publish import (
    DEFAULT_KINDS,
    AttestFinding,
    AttestRequest,
    AttestResult,
    Cosign,
    ManifestSubject,
    Signer,
    Trust,
    add_attachment,
    attach,
    job_workflow,
    judge_predicate,
    provenance_of,
    read_predicate,
    show_attachment,
    verify_attachments,
)
from imagebuild.publish import attest as attest_module
from imagebuild.render import Renderer
from tests.attached import spdx
from tests.cosign_fake import FakeCosign
from tests.registry_fake import FakeRegistry, index, put_image
from tests.report_samples import GOOD
from tests.unit.conftest import Site

REPOSITORY = "gpu/open"
TARGET = "open-cuda13.0-debian13-runtime"
AMD64: Platform = "linux/amd64"
ARM64: Platform = "linux/arm64"
PLATFORMS: tuple[Platform, ...] = (AMD64, ARM64)
OTHER = f"sha256:{'9' * 64}"
SUBJECT = ManifestSubject(f"sha256:{'1' * 64}", AMD64, f"sha256:{'2' * 64}")


def sbom(digest: str) -> dict[str, Any]:
    return spdx(digest, ucx="1.22.0")


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


@dataclass
class Published:
    """An image of two platforms in a registry, with what publishing attaches to it."""

    registry: FakeRegistry
    provenance: Callable[..., dict[str, Any]]
    platforms: dict[Platform, Descriptor]
    digest: str
    reference: ImageReference

    @property
    def place(self) -> Repository:
        return self.registry.at(REPOSITORY)

    def attach(self, kind: str, document: object, platform: Platform = AMD64, signer: Signer | None = None) -> str:
        return attach(self.place, self.platforms[platform], kind, encode_predicate(document), signer=signer)

    def attach_all(self, *kinds: str, signer: Signer | None = None) -> None:
        for platform in PLATFORMS:
            digest = self.platforms[platform].digest
            documents = {
                "sbom": sbom(digest), "provenance": self.provenance(platform),
                "verification": verification(digest, platform),
            }  # fmt: skip
            for kind in kinds or DEFAULT_KINDS:
                self.attach(kind, documents[kind], platform, signer)

    def verify(self, *required: str, trust: Trust | None = None) -> AttestResult:
        return verify_attachments(self.reference, self.registry, AttestRequest(required or DEFAULT_KINDS, trust))


@pytest.fixture
def published(renderer: Renderer, full_plan: Plan) -> Published:
    registry = FakeRegistry()
    platforms = {p: put_image(registry, REPOSITORY, p.encode(), platform=p) for p in PLATFORMS}
    digest = index(registry, REPOSITORY, platforms.values(), "13.0")
    recipe = renderer.recipe(select_one(full_plan, TARGET))

    def provenance(platform: Platform = AMD64, **more: Any) -> dict[str, Any]:
        result = BuildResult(
            target=TARGET, digest=digest, tags=(), platforms=PLATFORMS, size_bytes=None, seconds=1.0, steps=(),
            revision="c" * 40, dockerfile="d" * 64, started="2026-01-01T00:00:00Z", **more,
        )  # fmt: skip
        return provenance_of(result, platform, recipe, recipe.project.lock)

    reference = parse_reference(f"registry.test/{REPOSITORY}:13.0")
    return Published(registry, provenance, dict(platforms), digest, reference)


@dataclass
class Keys:
    """Keys in files, and a cosign that knows them."""

    fake: FakeCosign
    folder: Path

    def signer(self, name: str = "ours", **more: Any) -> Signer:
        return Signer(str(self.folder / f"{name}.key"), cosign=self.fake.cosign(), **more)

    def trust(self, name: str = "ours", **more: Any) -> Trust:
        return Trust(str(self.folder / f"{name}.pub"), cosign=self.fake.cosign(), **more)


@pytest.fixture(params=[2, 3], ids=["cosign2", "cosign3"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Keys:
    for name in ("ours.key", "ours.pub", "theirs.key", "theirs.pub"):
        (tmp_path / name).touch()
    return Keys(FakeCosign(request.param), tmp_path)


def wrong(result: AttestResult) -> list[AttestFinding]:
    assert (result.verdict == "failed") == any(f.is_wrong for f in result.findings)
    return [f for f in result.findings if f.is_wrong]


# How it is stored


def test_a_statement_names_the_image_and_its_kind(published: Published) -> None:
    subject = published.platforms[AMD64]
    published.attach("sbom", sbom(subject.digest))
    (item,) = published.registry.at(REPOSITORY).referrers(subject.digest)
    assert item.artifact_type == STATEMENT_MEDIA
    assert item.annotations["in-toto.io/predicate-type"] == "https://spdx.dev/Document"
    content = encode_predicate(sbom(subject.digest))
    made = attestation_of("sbom", content, subject, "open", created="2026-01-01")
    # A publisher sees by this annotation that the same is attached already.
    assert made.annotations["imagebuild.predicate"] == digest_of(content)
    statement = json.loads(made.content)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "open", "digest": {"sha256": subject.digest.removeprefix("sha256:")}}]
    assert statement["predicate"] == sbom(subject.digest)


def test_what_is_signed_lies_in_a_bundle_as_cosign_stores_it(published: Published, keys: Keys) -> None:
    digest = published.platforms[AMD64].digest
    published.attach("scan", scan(digest))
    published.attach("scan", scan(digest), signer=keys.signer())
    (item,) = list_attestations(published.registry.at(REPOSITORY), digest)  # the bare one says the same
    assert item.artifact_type == BUNDLE_MEDIA
    assert item.annotations["dev.sigstore.bundle.predicateType"] == KINDS["scan"]
    assert item.annotations["dev.sigstore.bundle.content"] == "dsse-envelope"
    (read,) = read_attestations(published.registry.at(REPOSITORY), digest)
    assert json.loads(read.content) == scan(digest)
    assert json.loads(read.bundle)["dsseEnvelope"]["payloadType"] == "application/vnd.in-toto+json"


def test_what_is_listed_without_its_type_is_looked_at(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """cosign and some registries leave type and annotations out of their lists."""
    digest = published.platforms[AMD64].digest
    published.attach("scan", scan(digest))
    plain = [replace(item, artifact_type="application/vnd.oci.empty.v1+json", annotations={})
             for item in published.registry.at(REPOSITORY).referrers(digest)]  # fmt: skip
    monkeypatch.setattr(Repository, "referrers", lambda *_: plain)
    assert [item.kind for item in read_attestations(published.registry.at(REPOSITORY), digest)] == ["scan"]


# Signing


def test_images_are_signed_by_digest_and_not_by_tag(keys: Keys) -> None:
    remote = parse_reference(f"registry.example/gpu/open:13@sha256:{'1' * 64}")
    local = parse_reference(f"127.0.0.1:5000/gpu/open@sha256:{'2' * 64}")
    keys.signer().sign([remote, local])
    key = ("--yes", "--key", str(keys.folder / "ours.key"))
    assert [call for call in keys.fake.calls if call[0] == "sign"] == [
        ("sign", *key, f"registry.example/gpu/open@sha256:{'1' * 64}"),
        ("sign", *key, "--allow-http-registry", str(local)),
    ]
    with pytest.raises(ConfigError, match="only an image named by digest"):
        keys.signer().sign([parse_reference("registry.example/gpu/open:13")])


def test_the_log_is_left_out_only_when_asked(keys: Keys, published: Published) -> None:
    option = "--tlog-upload=false" if keys.fake.version == 2 else "--signing-config"
    for log in (True, False):
        keys.fake.calls.clear()
        published.attach("scan", scan(OTHER), signer=keys.signer(log=log))
        (call,) = [call for call in keys.fake.calls if call[0] == "attest-blob" and call[1:] != ("--help",)]
        assert (option in call) != log
        assert ("--new-bundle-format" in call) == (keys.fake.version == 2)


def test_what_signing_needs_is_looked_at_first(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file; `cosign generate-key-pair`"):
        Signer("/nowhere/cosign.key", cosign=keys.fake.cosign()).check()
    without_password = Cosign({"HOME": "/"}, keys.fake.run, "cosign")
    with pytest.raises(ConfigError, match=r"ours\.key: set COSIGN_PASSWORD"):
        Signer(str(keys.folder / "ours.key"), cosign=without_password).check()
    Signer("gcpkms://projects/x", cosign=without_password).check()
    Signer(cosign=without_password).check()
    assert keys.fake.environ == {}, "cosign got variables that are not its own"
    monkeypatch.setattr(attest_module, "which", lambda _: None)
    for check in (Signer().check, Trust(identity="me", issuer="https://issuer.example").check):
        with pytest.raises(CommandError, match=r"`cosign` is missing.*apt-get install cosign"):
            check()


def test_a_job_signs_as_the_workflow_that_it_is_in_and_not_as_the_one_that_called_it(serve: type[Site]) -> None:
    ours, callers = (f"acme/images/.github/workflows/{name}.yml@refs/heads/main" for name in ("build", "fresh"))
    claims = base64.urlsafe_b64encode(json.dumps({"job_workflow_ref": ours}).encode()).decode().rstrip("=")
    assert job_workflow({"GITHUB_WORKFLOW_REF": callers}) == callers
    assert job_workflow({}) == ""
    github = serve((502, {}, b""), (200, {}, json.dumps({"value": f"e30.{claims}.x"}).encode()))
    token = {"ACTIONS_ID_TOKEN_REQUEST_TOKEN": "t"}
    address = {"ACTIONS_ID_TOKEN_REQUEST_URL": f"{github.address}?api-version=2"}
    assert job_workflow({"GITHUB_WORKFLOW_REF": callers, **address, **token}) == ours
    assert github.asked == ["bearer t"] * 2
    for status, content in ((200, b"{}"), (403, b"")):
        with pytest.raises(CommandError, match="GitHub does not say who signs"):
            job_workflow({"ACTIONS_ID_TOKEN_REQUEST_URL": f"{serve((status, {}, content)).address}?x"})


@pytest.mark.parametrize(
    ("trust", "message"),
    [
        (Trust(), "whose signature"),
        (Trust("/nowhere/cosign.pub"), "no such file"),
        (Trust("awskms:///k", "me", "issuer"), "whose signature"),
        (Trust(identity="me"), "--certificate-oidc-issuer"),
        (Trust(identity="me", issuer="issuer", log=False), "--no-tlog"),
    ],
)
def test_nobodys_signature_is_not_verified(trust: Trust, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trust.check()


# Verifying


def test_all_is_well(published: Published) -> None:
    published.attach_all()
    result = published.verify()
    assert result.digest == published.digest
    assert wrong(result) == []
    seen = {(f.subject, f.kind) for f in result.findings if f.outcome == "passed"}
    assert seen == {(p, k) for p in PLATFORMS for k in DEFAULT_KINDS}
    (first, *_) = [f for f in result.findings if f.kind == "provenance"]
    assert "commit cccccccccccc" in first.detail
    # A platform alone has no index.
    published.reference = published.reference.at(published.platforms[AMD64].digest)
    assert {f.subject for f in published.verify().findings} == {AMD64}


@pytest.mark.parametrize("kind", DEFAULT_KINDS)
def test_what_is_missing(published: Published, kind: str) -> None:
    published.attach_all(*(k for k in DEFAULT_KINDS if k != kind))
    assert [(f.subject, f.kind, f.outcome) for f in wrong(published.verify())] == [
        (p, kind, "missing") for p in PLATFORMS
    ]
    assert wrong(published.verify(*(k for k in DEFAULT_KINDS if k != kind))) == []


def change_one(published: Published, change: Callable[[bytes], bytes]) -> None:
    blobs = published.registry.repositories[REPOSITORY].blobs
    digest = published.platforms[AMD64].digest
    (name,) = [d for d, data in blobs.items() if b"SPDXRef-Image" in data and digest.encode() in data]
    blobs[name] = change(blobs[name])


@pytest.mark.parametrize("change", [lambda data: data.replace(b"1.22.0", b"1.99.0"), lambda data: data + b" " * 100])
def test_a_changed_sbom_is_wrong_though_nobody_asked_for_it(
    published: Published, change: Callable[[bytes], bytes]
) -> None:
    published.attach_all()
    change_one(published, change)
    for required in (DEFAULT_KINDS, ("provenance",)):
        (finding,) = wrong(published.verify(*required))
        assert (finding.kind, finding.outcome) == ("sbom", "broken")
        assert "sent something else" in finding.detail
    with pytest.raises(ConfigError, match="cannot be trusted: .*sent something else"):
        show_attachment(published.reference, published.registry, "sbom", AMD64)


def test_a_referrer_that_is_listed_and_not_there(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    published.attach_all()
    digest = published.attach("scan", scan(published.platforms[AMD64].digest))
    everything = {p.digest: published.registry.at(REPOSITORY).referrers(p.digest) for p in published.platforms.values()}
    published.registry.repositories[REPOSITORY].manifests.pop(digest)
    monkeypatch.setattr(Repository, "referrers", lambda _, subject: everything.get(subject, ()))
    (finding,) = wrong(published.verify())
    assert (finding.kind, finding.detail) == ("scan", "is listed, but the registry does not have it")


def test_a_referrer_of_another_digest(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    published.attach_all()
    amd64, arm64 = (published.platforms[p].digest for p in PLATFORMS)
    listed = published.place.referrers
    swapped = {amd64: listed(arm64), arm64: listed(amd64)}
    monkeypatch.setattr(Repository, "referrers", lambda _, subject: swapped.get(subject, ()))
    findings = wrong(published.verify())
    assert len(findings) == 2 * len(DEFAULT_KINDS)
    assert all(f.outcome == "broken" and "refers to another image" in f.detail for f in findings)


def statement(**changed: object) -> bytes:
    digest = {"sha256": SUBJECT.digest.removeprefix("sha256:")}
    document: dict[str, object] = {
        "_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "open", "digest": digest}],
        "predicateType": KINDS["scan"], "predicate": {},
    }  # fmt: skip
    return json.dumps(document | changed).encode()


def envelope(payload: bytes, kind: str = STATEMENT_MEDIA) -> bytes:
    return json.dumps({"dsseEnvelope": {"payloadType": kind, "payload": base64.b64encode(payload).decode()}}).encode()


@pytest.mark.parametrize(
    ("media_type", "content", "message"),
    [
        (STATEMENT_MEDIA, statement(), ""),
        (BUNDLE_MEDIA, envelope(statement()), ""),
        (STATEMENT_MEDIA, statement(_type="https://in-toto.io/Statement/v9"), "Statement/v9"),
        (STATEMENT_MEDIA, statement(predicateType="https://spdx.dev/Document"), "not urn:imagebuild:scan:v1"),
        (STATEMENT_MEDIA, statement(subject=[]), "is about another image: none"),
        (STATEMENT_MEDIA, statement(subject=[{"digest": {"sha256": "9" * 64}}]), "is about another image: sha256:9999"),
        (BUNDLE_MEDIA, envelope(statement(), "text/plain"), "is a text/plain, not an in-toto statement"),
        (BUNDLE_MEDIA, envelope(b"no"), "cannot be read"),
        (BUNDLE_MEDIA, b"{}", "cannot be read"),
        (STATEMENT_MEDIA, b"[]", "cannot be read"),
        (STATEMENT_MEDIA, b"[" * 100_000, "cannot be read: RecursionError"),
        (STATEMENT_MEDIA, b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_statements_about_another_image_or_nothing(media_type: str, content: bytes, message: str) -> None:
    registry = FakeRegistry()
    name = "dev.sigstore.bundle.predicateType" if media_type == BUNDLE_MEDIA else "in-toto.io/predicate-type"
    attachment = Attachment("f", media_type, content, {name: KINDS["scan"]})
    registry.at(REPOSITORY).attach(Descriptor("m", SUBJECT.digest, 1), attachment)
    (read,) = read_attestations(registry.at(REPOSITORY), SUBJECT.digest)
    assert read.kind == "scan"
    assert message in read.problem
    assert bool(message) == bool(read.problem)


BENCHMARK = GOOD.model_copy(update={"verifications": ()})


def judge(kind: str, document: object, subject: ManifestSubject = SUBJECT) -> tuple[str, str]:
    try:
        return judge_predicate(read_predicate(Attestation(kind, OTHER, json.dumps(document).encode())), subject)
    except ResultError as error:
        return "broken", str(error)


@pytest.mark.parametrize(
    ("kind", "document", "outcome", "message"),
    [
        ("sbom", sbom(SUBJECT.digest), "passed", "1 packages and components"),
        ("sbom", sbom(OTHER), "broken", "is about another image"),
        ("sbom", {"spdxVersion": "SPDX-3.0", "packages": []}, "broken", "spdxVersion: "),
        ("sbom", [], "broken", "should be an object"),
        ("verification", verification(SUBJECT.digest), "passed", "1 checks passed, 1 skipped"),
        ("verification", verification(SUBJECT.index, "linux/amd64, linux/arm64"), "passed", "1 checks passed"),
        ("verification", verification(SUBJECT.index, ARM64), "broken", "is about linux/arm64"),
        ("verification", verification(SUBJECT.digest, outcome="failed"), "failed", "failed: ucx/version"),
        ("verification", verification(SUBJECT.digest, outcome="skipped"), "failed", "0 checks passed, 2 skipped"),
        ("verification", verification(OTHER), "broken", "is about another image"),
        ("verification", {"digest": 5}, "broken", "was it written by another version"),
        ("scan", scan(SUBJECT.digest), "passed", "grype 0.1, 0 findings, 2026-01-01"),
        ("scan", scan(SUBJECT.digest, "failed"), "failed", "CVE-1 is critical"),
        ("scan", scan(OTHER), "broken", "is about another image"),
        ("benchmark", BENCHMARK.model_dump(mode="json"), "passed", " results"),
        ("benchmark", {"about": BENCHMARK.about.model_dump()}, "broken", "has no result"),
        ("benchmark", {"unknown": 1}, "broken", "was it written by another version"),
        ("provenance", {}, "broken", "was it written by another version"),
    ],
)
def test_what_an_attachment_says(kind: str, document: object, outcome: str, message: str) -> None:
    found, detail = judge(kind, document)
    assert found == outcome
    assert message in detail


@pytest.mark.parametrize(
    ("replaced", "outcome", "message"),
    [
        ({}, "passed", "commit cccccccccccc"),
        ({"debian:13.7-slim": OTHER}, "passed", "of which 1 stood in for others (pkg:oci/debian@"),
        ({"ucx-source": "folder"}, "failed", "built from folders that nobody can compare: ucx-source"),
    ],
)
def test_what_a_provenance_says(
    published: Published, renderer: Renderer, replaced: dict[str, str], outcome: str, message: str
) -> None:
    images = renderer.project.lock.images
    named = {f"{k}@{images[k].digest}" if k in images else k: v for k, v in replaced.items()}  # type: ignore[union-attr]
    document = published.provenance(AMD64, replaced=named)
    found, detail = judge("provenance", document)
    assert found == outcome
    assert message in detail
    assert judge("provenance", document, replace(SUBJECT, platform=ARM64)) == ("broken", "is about linux/amd64")


def test_what_failed_counts_where_it_is_required(published: Published) -> None:
    """A failed scan, and one failed verification beside a good one."""
    published.attach_all()
    for platform in PLATFORMS:
        published.attach("scan", scan(published.platforms[platform].digest, "failed"), platform)
    assert wrong(published.verify()) == []
    findings = wrong(published.verify(*DEFAULT_KINDS, "scan"))
    assert [(f.kind, f.outcome) for f in findings if f.kind == "scan"] == [("scan", "failed")] * 2
    published.attach("verification", verification(published.platforms[AMD64].digest, AMD64, "failed"))
    assert [f.outcome for f in wrong(published.verify())] == ["failed"]


@pytest.mark.parametrize(
    ("required", "message"), [(("sboom",), "did you mean 'sbom'"), (("signature",), "whose\\? give --key")]
)
def test_requests_that_make_no_sense(published: Published, required: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        published.verify(*required)


@pytest.mark.parametrize("document", [{"manifests": []}, {"layers": []}, {"manifests": [{"digest": 1}]}])
def test_what_is_no_image(published: Published, document: object) -> None:
    content = json.dumps(document).encode()
    digest = digest_of(content)
    manifest = Manifest(content, "application/vnd.oci.image.index.v1+json")
    published.registry.repositories[REPOSITORY].manifests[digest] = manifest
    for name, message in ((f"{REPOSITORY}@{digest}", "image"), (f"{REPOSITORY}:14", "registry.test has no such image")):
        with pytest.raises((ConfigError, ResultError), match=message):
            verify_attachments(parse_reference(f"registry.test/{name}"), published.registry, AttestRequest())


# Showing and adding


def test_show_gives_the_newest(published: Published) -> None:
    digest = published.platforms[AMD64].digest
    for day in (3, 9, 5):
        content = encode_predicate({**verification(digest), "started": f"2026-01-0{day}"})
        attach(published.place, published.platforms[AMD64], "verification", content, created=f"2026-01-0{day}")
    shown = show_attachment(published.reference, published.registry, "verification", AMD64)
    assert json.loads(shown)["started"] == "2026-01-09"
    with pytest.raises(ConfigError, match="choose with --platform"):
        show_attachment(published.reference, published.registry, "verification", None)
    with pytest.raises(ConfigError, match="has no scan; it has verification"):
        show_attachment(published.reference, published.registry, "scan", AMD64)


def add(published: Published, kind: str, content: str, **more: Any) -> tuple[str, ...]:
    named = published.reference.at(published.digest)
    return add_attachment(named, published.registry, kind, content.encode(), file=Path("file.json"), **more)


def test_add_results_that_were_measured_later(published: Published, keys: Keys) -> None:
    """The image that they are about gets them, and the index, whoever is named."""
    amd64 = published.platforms[AMD64].digest
    content = json.dumps(verification(amd64))
    first = add(published, "verification", content)
    calls = len(published.registry.calls)
    assert add(published, "verification", content, platform=AMD64) == first
    assert len(published.registry.calls) == calls
    for subject in (amd64, published.digest):
        assert [json.loads(a.content) for a in read_attestations(published.registry.at(REPOSITORY), subject)] == [
            json.loads(content)
        ]
    assert published.registry.at(REPOSITORY).referrers(published.platforms[ARM64].digest) == ()
    add(published, "verification", content, signer=keys.signer())
    found = [f for f in published.verify(trust=keys.trust()).findings if f.attachment]
    assert [(f.subject, f.outcome) for f in found] == [("index", "passed"), (AMD64, "passed")]
    # Of a platform alone, the index is not known.
    published.reference = published.reference.at(amd64)
    alone = add_attachment(published.reference, published.registry, "verification", content.encode(), file=Path("f"))
    assert alone == first[:1]


def test_add_to_several_platforms_at_once(published: Published) -> None:
    both = verification(published.digest, f"{AMD64}, {ARM64}")
    both["checks"] = [{**check, "check": f"{check['check']} {p}"} for check in both["checks"] for p in PLATFORMS]
    assert len(add(published, "verification", json.dumps(both))) == 4
    assert wrong(published.verify("verification")) == []
    with pytest.raises(ConfigError, match="choose with --platform"):
        add(published, "benchmark", BENCHMARK.model_dump_json())


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("verification", json.dumps(verification(OTHER)), "is no verification of sha256:.*about another image"),
        ("benchmark", "{}", "file.json: about: Field required"),
        ("sbom", "no", "file.json: .*Invalid JSON"),
    ],
)
def test_add_refuses_what_is_not_about_the_image(published: Published, kind: str, content: str, message: str) -> None:
    with pytest.raises((ConfigError, ResultError), match=message):
        add(published, kind, content)
    assert published.registry.at(REPOSITORY).referrers(published.platforms[AMD64].digest) == ()
    with pytest.raises(ConfigError, match=f"name the image by digest: .* now it names {published.digest}"):
        add_attachment(published.reference, published.registry, "sbom", b"{}", file=Path("f"))


# Commands


@pytest.fixture
def run(published: Published, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr(registry_module, "connect_registry", lambda _: published.registry)

    def call(*args: str | Path) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["attest", *map(str, args)])
        if isinstance(done.exception, ImagebuildError):
            raise done.exception
        return done.exit_code, done.output

    return call


def test_commands(published: Published, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    published.attach_all()
    result, shown = tmp_path / "result.json", tmp_path / "sbom.spdx.json"
    status, text = run("verify", published.reference, "--json", result)
    assert status == 0, text
    assert f"is {published.digest}" in text
    assert "no signature was checked" in text
    assert AttestResult.model_validate_json(result.read_text()).verdict == "passed"
    status, text = run("verify", published.reference, "--require", "sbom,scan")
    assert (status, "2 wrong or missing" in text) == (1, True)

    assert run("show", published.reference, "--kind", "sbom", "--platform", AMD64, "-o", shown)[0] == 0
    assert json.loads(shown.read_text()) == sbom(published.platforms[AMD64].digest)
    add = ("add", published.reference.at(published.digest), shown, "--kind", "sbom", "--platform", AMD64)
    status, text = run(*add)
    assert (status, text.startswith(f"registry.test/{REPOSITORY}@sha256:")) == (0, True)
    with pytest.raises(ConfigError, match="--kind sbon: must be one of 'sbom'"):
        run("show", published.reference, "--kind", "sbon")
    with pytest.raises(ConfigError, match="--certificate-identity and --no-tlog: need --sign"):
        run(*add, "--key", "k")


def test_what_others_wrote_does_not_act_on_the_terminal(
    published: Published, run: Callable[..., tuple[int, str]]
) -> None:
    published.attach(
        "scan", scan(published.platforms[AMD64].digest) | {"scanner": "\x1b]0;owned\x07[red]9[/red]\x1b[2J"}
    )
    _, text = run("verify", published.reference)
    assert "\x1b" not in text
    assert "[red]9" in text
