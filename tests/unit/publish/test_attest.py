"""What refers to an image in a registry: right, wrong, damaged, of another image, unsigned, missing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.oci import registry as registry_module
from imagebuild.oci.attestation import (
    BUNDLE_MEDIA,
    DEFAULT_KINDS,
    KINDS,
    STATEMENT_MEDIA,
    list_attestations,
    read_attestations,
)
from imagebuild.oci.layout import Attachment, Descriptor
from imagebuild.oci.registry import Repository
from imagebuild.publish import evidence
from imagebuild.publish.attest import AttestResult, add_attachment, verify_attachments
from imagebuild.publish.evidence import PUBLICATION
from imagebuild.publish.signatures import Signer
from tests.attached import RECENT, provenance, scan, spdx, verification
from tests.conftest import data
from tests.registry_fake import FakeRegistry
from tests.report_samples import GOOD
from tests.unit.conftest import Call
from tests.unit.publish.conftest import (
    AMD64,
    ARM64,
    PLATFORMS,
    REPOSITORY,
    TAG,
    Published,
    Signers,
    put_index,
)

CASES = data("cases/publish/attest")
OTHER = f"sha256:{'9' * 64}"
SUBJECT = f"sha256:{'1' * 64}"


def day(number: int) -> str:
    """Return the time so many days after now."""
    return (datetime.now(UTC) + timedelta(days=number)).isoformat(timespec="seconds")


MADE: dict[str, Callable[..., dict[str, Any]]] = {"sbom": spdx, "verification": verification, "scan": scan}
BENCHMARK = GOOD.model_copy(update={"verifications": ()})


# How it is stored


def test_what_is_signed_lies_in_a_bundle_as_cosign_stores_it(published: Published, signers: Signers) -> None:
    document = scan(published.amd64)
    published.attach("scan", document)
    published.attach("scan", document, signer=signers.signer())
    (item,) = list_attestations(published.place, published.amd64)  # the bare one says the same
    assert item.artifact_type == BUNDLE_MEDIA
    (read,) = read_attestations(published.place, published.amd64)
    assert (json.loads(read.content), bool(read.bundle)) == (document, True)


def test_what_is_listed_without_its_type_is_looked_at(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """cosign and some registries leave type and annotations out of their lists."""
    published.attach("scan", scan(published.amd64))
    plain = [replace(item, artifact_type="application/vnd.oci.empty.v1+json", annotations={})
             for item in published.place.referrers(published.amd64)]  # fmt: skip
    monkeypatch.setattr(Repository, "referrers", lambda *_: plain)
    assert [item.kind for item in read_attestations(published.place, published.amd64)] == ["scan"]


# Verifying


def test_all_is_well(published: Published) -> None:
    published.attach_all()
    result = published.verify()
    assert result.digest == published.digest
    assert published.wrong() == []
    seen = {(f.subject, f.kind) for f in result.findings if f.outcome == "passed"}
    assert seen == {(platform, kind) for platform in PLATFORMS for kind in DEFAULT_KINDS}
    # A platform alone has no index.
    published.reference = published.reference.at(published.amd64)
    assert {finding.subject for finding in published.verify().findings} == {AMD64}
    missing = [(f.subject, f.kind, f.outcome) for f in published.wrong("sbom", "scan")]
    assert missing == [(AMD64, "scan", "missing")]


def test_by_default_what_publish_attaches_is_required(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> set[str]:
        result = verify_attachments(published.reference, published.registry)
        return {finding.kind for finding in result.findings if finding.outcome == "missing"}

    assert missing() == {"sbom", "provenance", "verification"}
    monkeypatch.setattr(evidence, "publication_of", lambda _: evidence.Publication(names=()))
    assert missing() == {"provenance", "verification"}
    monkeypatch.setattr(evidence, "publication_of", lambda _: evidence.Publication(names=(), attachments=("sbom",)))
    assert missing() == {"sbom", "provenance", "verification"}


def test_damage_is_wrong_though_nobody_asked_for_it(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the registry lists refers to another image; then it is gone."""
    published.attach_all()
    listed = published.place.referrers(published.platforms[ARM64].digest)
    monkeypatch.setattr(Repository, "referrers", lambda _, subject: listed if subject == published.amd64 else ())
    for message in ("refers to another image", "is listed by the registry, but does not exist"):
        for required in (DEFAULT_KINDS, ("scan",)):
            (finding,) = [f for f in published.wrong(*required) if (f.subject, f.kind) == (AMD64, "sbom")]
            assert (finding.outcome, message in finding.detail) == ("broken", True)
        for item in listed:
            published.registry.repositories[REPOSITORY].manifests.pop(item.digest, None)


@pytest.mark.parametrize("row", CASES["statements"], ids=str)
def test_statements_about_another_image_or_nothing(row: dict[str, Any]) -> None:
    registry, media_type = FakeRegistry(), BUNDLE_MEDIA if "bundle" in row else STATEMENT_MEDIA
    text = json.dumps({
        "_type": "https://in-toto.io/Statement/v1", "predicateType": KINDS["scan"], "predicate": {},
        "subject": [{"name": "open", "digest": {"sha256": SUBJECT.removeprefix("sha256:")}}], **row.get("change", {}),
    })  # fmt: skip
    if "bundle" in row:
        payload = base64.b64encode(text.encode()).decode()
        text = json.dumps({"dsseEnvelope": {"payloadType": row.get("type", STATEMENT_MEDIA), "payload": payload}})
    text = row.get("text", text) * row.get("times", 1)
    name = "dev.sigstore.bundle.predicateType" if "bundle" in row else "in-toto.io/predicate-type"
    attachment = Attachment("f", media_type, text.encode(), {name: KINDS["scan"]})
    registry.at(REPOSITORY).attach(Descriptor("m", SUBJECT, 1), attachment)
    (read,) = read_attestations(registry.at(REPOSITORY), SUBJECT)
    assert read.kind == "scan"
    assert row["says"] in read.problem
    assert bool(row["says"]) == bool(read.problem)


@pytest.mark.parametrize("row", CASES["attachments"], ids=str)
def test_what_an_attachment_says(published: Published, row: dict[str, Any]) -> None:
    given = {**row.get("given", {}), **({"started": day(-row["age"])} if "age" in row else {})}
    if row["kind"] == "benchmark":
        document = BENCHMARK.model_dump(mode="json", include={"about"} if "without" in row else None)
    elif row["kind"] == "provenance":
        document = provenance(given.get("platform", AMD64), *filter(None, [row.get("source")]))
    else:
        document = MADE[row["kind"]](published.amd64, **given)
    attachment = published.attach(row["kind"], row.get("content", document))
    (finding,) = [f for f in published.verify().findings if f.attachment == attachment]
    says = row["says"].replace("RECENT", RECENT[:10])
    assert (finding.outcome, says in finding.detail) == (row["outcome"], True), finding.detail


def test_of_a_verification_of_the_index_the_platform_counts(published: Published) -> None:
    for platform in (AMD64, ARM64):
        published.attach("verification", verification(published.digest, platform))
    assert sorted(f.outcome for f in published.verify().findings if f.attachment) == ["broken", "passed"]


def test_what_failed_counts_where_it_is_required(published: Published) -> None:
    """A failed scan, and a failed and a passed verification."""
    published.attach_all()
    for platform, image in published.platforms.items():
        published.attach("scan", scan(image.digest, "failed", platform), platform)
    assert published.wrong() == []
    findings = published.wrong(*DEFAULT_KINDS, "scan")
    assert [(f.kind, f.outcome) for f in findings] == [("scan", "failed")] * 2
    published.attach("verification", verification(published.amd64, outcome="failed"))
    assert [f.outcome for f in published.wrong()] == ["failed"]


def test_of_scans_the_newest_of_each_scanner_counts(published: Published) -> None:
    """One is attached each week; what it found once is no reason for ever, and another scanner does not undo it."""
    published.reference = published.reference.at(published.amd64)
    published.attach("scan", scan(published.amd64, "failed", started=day(-9)))
    published.attach("scan", scan(published.amd64, started=day(-5), scanner="trivy"))
    assert [f.detail for f in published.wrong("scan")] == [f"CVE-1 is critical; grype 0.1, 0 findings, {day(-9)[:10]}"]
    published.attach("scan", scan(published.amd64, started=day(-5), scanner="grype 0.2"))
    assert published.wrong("scan") == []
    published.attach("scan", scan(published.amd64, "failed", started=day(-1), scanner="grype 0.2"))
    assert [f.outcome for f in published.wrong("scan")] == ["failed"]
    published.attach("scan", scan(OTHER, started=day(-9)))
    assert sorted(f.outcome for f in published.wrong("scan")) == ["broken", "failed"], "damage counts, however old"


def state(published: Published, **changed: object) -> None:
    """Let the index state what publishing does, and let the tag name this index."""
    names = [f"registry.test/{REPOSITORY}:{TAG}", f"registry.test/{REPOSITORY}:latest"]
    stated = json.dumps({"names": names, "attachments": ["scan"], "checks": {AMD64: ["ucx/version"]}} | changed)
    published.digest = put_index(published.registry, [*published.platforms.values()], TAG, **{PUBLICATION: stated})


def test_a_tag_is_bound_by_the_signed_index(published: Published, signers: Signers) -> None:
    signer, trust, place = signers.signer(), signers.trust(), published.registry.repositories[REPOSITORY]

    def judged(digest: str, tag: str = TAG, by: Signer | None = trust) -> tuple[str, str]:
        place.tags[tag] = digest
        published.reference = replace(published.reference, tag=tag, digest=None)
        (found,) = [finding for finding in published.verify(trust=by).findings if finding.kind == "tag"]
        assert found.is_wrong == (found.outcome == "failed")
        return found.outcome, found.detail

    bare = published.digest
    state(published)
    ours = published.digest
    signer.sign(published.reference.at(digest) for digest in (bare, ours, published.amd64))
    assert [judged(ours, tag)[0] for tag in (TAG, "latest")] == ["passed", "passed"]
    for digest, tag, says in (
        (ours, "stable", f"was published as registry.test/{REPOSITORY}:{TAG}, "),  # an alias of another image
        (ours, f"{TAG}0", "was published as "), (bare, TAG, "does not state its tags"),
        (published.amd64, TAG, "does not state its tags"),
    ):  # fmt: skip
        outcome, detail = judged(digest, tag)
        assert (outcome, says in detail) == ("failed", True), detail
        assert judged(digest, tag, None)[0] == "skipped"
    state(published, names="all")
    with pytest.raises(ResultError, match="names: must be"):
        judged(published.digest)
    published.reference = published.reference.at(bare)
    assert "tag" not in {finding.kind for finding in published.verify(trust=trust).findings}


def test_what_publishing_required_is_required(published: Published) -> None:
    """A scan, and a check of one platform, which some verification must have passed in the image itself."""
    published.attach_all()
    state(published)
    assert [(f.subject, f.kind, f.outcome) for f in published.wrong()] == [
        (AMD64, "scan", "missing"), (ARM64, "scan", "missing")
    ]  # fmt: skip
    for platform, image in published.platforms.items():
        published.attach("scan", scan(image.digest, platform=platform), platform)
    assert published.wrong() == []
    state(published, attachments=[], checks={AMD64: ["ucx/version", "ucx/gpu", "image/size"]})
    (lacking,) = published.wrong()
    assert (lacking.outcome, lacking.detail.endswith(": ucx/gpu, image/size")) == ("failed", True)
    more = [
        {"component": c, "check": k, "outcome": o}
        for c, k, o in (("ucx", "gpu", "passed"), ("image", "size", "skipped"))
    ]
    published.attach("verification", verification(published.amd64, checks=more, options=["--env FIXED=1"]))
    assert [f.detail.endswith(": ucx/gpu") for f in published.wrong()] == [True]
    published.attach("verification", verification(published.amd64, checks=more))
    assert published.wrong() == []


@pytest.mark.parametrize(
    "more", [{"options": ["--env FIXED=1"]}, {"options": ["--gpus 1"]}, {"surroundings": {"runner": "exec:ssh node"}}]
)
def test_checks_that_may_have_run_in_another_image_are_no_pass(published: Published, more: dict[str, Any]) -> None:
    for platform, image in published.platforms.items():
        published.attach("verification", verification(image.digest, platform, **more), platform)
    assert [(f.subject, f.outcome) for f in published.wrong("verification")] == [(AMD64, "missing"), (ARM64, "missing")]
    own = [{"component": "image", "check": "size", "outcome": "passed"}]
    published.attach("verification", verification(published.amd64, checks=own, **more))
    assert [(f.subject, f.outcome) for f in published.wrong("verification")] == [(ARM64, "missing")]


# Adding


def add(published: Published, kind: str, content: object, **more: Any) -> tuple[str, ...]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    named = published.reference.at(published.digest)
    return add_attachment(named, published.registry, kind, text, file=Path("file.json"), **more)


def test_add_results_that_were_measured_later(published: Published, signers: Signers) -> None:
    """The image that they are about gets them, and the index, whoever is named; nobody gets them twice."""
    content = verification(published.amd64)
    assert len(add(published, "verification", content)) == 2
    calls = len(published.registry.calls)
    assert add(published, "verification", content, platform=AMD64) == ()
    assert len(published.registry.calls) == calls
    for subject in (published.amd64, published.digest):
        (read,) = read_attestations(published.place, subject)
        stated = json.loads(read.content)
        assert (stated["digest"], [check["outcome"] for check in stated["checks"]]) == (
            published.amd64, ["passed", "skipped"],
        )  # fmt: skip
    assert published.place.referrers(published.platforms[ARM64].digest) == ()
    assert len(add(published, "verification", content, signer=signers.signer())) == 2
    assert add(published, "verification", content, signer=signers.signer()) == ()
    found = [f for f in published.verify(trust=signers.trust()).findings if f.attachment]
    assert [(f.subject, f.outcome) for f in found] == [("index", "passed"), (AMD64, "passed")]
    with pytest.raises(ConfigError, match="choose one platform with --platform"):
        add(published, "benchmark", json.loads(BENCHMARK.model_dump_json()))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("verification", verification(OTHER), "cannot be attached to sha256:.*about another image"),
        ("benchmark", {}, "file.json: about: is missing"),
        ("sbom", b"no", "file.json: .*Invalid JSON"),
    ],
)
def test_add_refuses_what_is_not_about_the_image(
    published: Published, kind: str, content: object, message: str
) -> None:
    with pytest.raises((ConfigError, ResultError), match=message):
        add(published, kind, content)
    assert published.place.referrers(published.amd64) == ()
    with pytest.raises(ConfigError, match=f"name the image by its digest, which is {published.digest} now"):
        add_attachment(published.reference, published.registry, "sbom", b"{}", file=Path("f"))


def test_no_table_may_replace_the_layers(published: Published) -> None:
    """soci-snapshotter takes names, modes and places of files from any table that refers to the image."""
    published.attach_all()
    table = Attachment("soci", "application/vnd.amazon.soci.index.v1+json", b"{}", {"in-toto.io/predicate-type": "x"})
    published.place.attach(published.platforms[ARM64], table)
    (wrong,) = published.wrong()
    assert (wrong.subject, wrong.outcome, "soci-snapshotter" in wrong.detail) == (ARM64, "broken", True)


# Commands


def test_commands(published: Published, command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry_module, "connect_registry", lambda _: published.registry)
    published.attach_all()
    # What others wrote does not act on the terminal.
    published.attach("scan", scan(published.amd64, scanner="\x1b]0;owned\x07[red]9[/red]\x1b[2J"))
    status, text, _ = command("attest", "verify", published.reference, "--json", tmp_path / "result.json")
    assert status == 0, text
    assert ("no signature was checked" in text, "[red]9" in text, "\x1b" in text) == (True, True, False)
    assert AttestResult.model_validate_json((tmp_path / "result.json").read_text()).verdict == "passed"
    status, text, _ = command("attest", "verify", published.reference, "--require", "sbom,scan")
    assert (status, "1 wrong or missing" in text) == (1, True)
    (tmp_path / "sbom.json").write_text(json.dumps(spdx(published.amd64, ucx="1.22.0")))
    add = ("attest", "add", published.reference.at(published.digest), tmp_path / "sbom.json", "--kind", "sbom")
    assert command(*add)[1].startswith(f"registry.test/{REPOSITORY}@sha256:")
    status, _, text = command(*add, "--key", "k")
    assert (status, "--certificate-identity and --no-tlog: need --sign" in text) == (2, True)
    for kind, message in (
        ("sboom", "unknown kind; use one of sbom, provenance"),
        ("signature", "the signer is not named; add --key"),
    ):
        status, _, text = command("attest", "verify", published.reference, "--require", kind)
        assert (status, message in text) == (2, True)
