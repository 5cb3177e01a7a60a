"""Only images whose checks passed get tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.verification import CheckResult
from imagebuild.core.errors import ConfigError, NothingSelected, ResultError
from imagebuild.oci.attestation import encode_predicate
from imagebuild.oci.layout import INDEX, manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.publish.attest import attach, verify_attachments
from imagebuild.publish.evidence import NewAttachment
from imagebuild.publish.signatures import Signer
from tests.conftest import LIBRARY, data
from tests.cosign_fake import FakeCosign
from tests.publish_fakes import AMD64, ARM64, CHECKS, COMMIT, HOST, NEW, OLD, Done, Site

TAG = f"cuda13.0-tool3.4-{COMMIT[:7]}"
OTHER = "sha256:" + "7" * 64


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_verified_target_gets_its_tags_and_aliases(site: Site) -> None:
    site.ready(NEW)
    done = site.publish().only
    assert done.state == "published"
    assert done.given == tuple(f"{HOST}/acme/tiny:{name}" for name in (TAG, "cuda13.0", "latest"))
    assert site.tags() == dict.fromkeys((TAG, "cuda13.0", "latest"), done.digest)
    index = site.fake.at("acme/tiny").find(TAG)
    assert index
    assert index.media_type == INDEX
    assert [child.platform for child in manifests_of(index.document)] == [AMD64, ARM64]
    assert {child.digest for child in manifests_of(index.document)} == set(done.platforms.values())
    annotations = index.document["annotations"]
    assert annotations["imagebuild.component.tool"] == "3.4"
    assert annotations["org.opencontainers.image.revision"] == COMMIT
    assert annotations["org.opencontainers.image.source"] == "https://git.example/acme/images"
    stored = b"".join(site.fake.repositories["acme/tiny"].blobs.values())
    assert b'"kernel": "6.1"' in stored
    assert b"secret-" not in stored
    # Nothing is decided by when a machine says that it built.
    for path in site.evidence.rglob("result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": "2026-11-20T10:00:00+00:00"}))
    again = site.publish().only
    assert (again.state, again.digest) == ("unchanged", done.digest)


def arrange(site: Site, changed: Mapping[str, Any]) -> dict[str, str]:
    """Build, stage, verify and perhaps scan both platforms, as tests/data/publish/refused.yaml says."""
    image = {"name": NEW, "platform": AMD64, "content": AMD64.encode(), **changed.get("image", {})}
    digests = {ARM64: site.stage(NEW, ARM64, ARM64.encode()), AMD64: site.stage(**image)}
    site.built(NEW, {ARM64: digests[ARM64]})
    if "unbuilt" not in changed:
        site.built(NEW, {AMD64: digests[AMD64]}, **changed.get("build", {}))
    site.verified(digests[ARM64], ARM64)
    verify = dict(changed.get("verify", {}))
    if "checks" in verify:
        verify["checks"] = [CheckResult.model_validate(check) for check in verify["checks"]]
    site.verified(digests[AMD64], **verify)
    if later := changed.get("later"):
        site.verified(digests[AMD64], file="later/verify.json", outcomes=later)
    if verdict := changed.get("scan"):
        site.scanned(digests[AMD64], verdict)
    if act := changed.get("act"):
        ACTS[act](site)
    return digests


def edit(site: Site, **changed: object) -> dict[str, Any]:
    """Change the verification of amd64; what it was."""
    path = next(path for path in site.evidence.rglob("verify.json") if AMD64 in path.read_text())
    document: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps(document | changed))
    return document


def built_twice(site: Site) -> None:
    other = site.stage(NEW, AMD64, b"another")
    site.built(NEW, {AMD64: other}, file="again/result.json", started="2026-11-22T10:00:00Z")
    site.verified(other)


def of_other_checks(site: Site) -> None:
    """Since it was verified, the script of a check has changed; the other platform's result is of the new one."""
    site.files.component("library", LIBRARY + CHECKS.replace('It works, run: "true"', 'It works, run: "exit 0"'))
    site.read()
    site.verified(site.stage(NEW, ARM64, ARM64.encode()), ARM64)


ACTS: Mapping[str, Callable[[Site], object]] = {
    "built_twice": built_twice,
    "of_other_checks": of_other_checks,
    "of_another_digest": lambda site: edit(site, digest=OTHER),
    "of_no_digest": lambda site: edit(site, digest=None),
    "of_several_platforms": lambda site: edit(site, platform=f"{AMD64}, {ARM64}"),
    "pruned": lambda site: site.fake.at("acme/tiny-staging").delete(edit(site)["digest"]),
}
REFUSED = data("publish/refused")


@pytest.mark.parametrize("changed", REFUSED["evidence"].values(), ids=REFUSED["evidence"])
def test_faults_are_refused_with_their_reason(changed: Mapping[str, Any], site: Site) -> None:
    arrange(site, changed)
    site.fake.calls.clear()
    done = site.publish(NEW)
    assert done.states == ["refused"]
    assert done.result.exit_status == 1
    assert changed["reason"] in done.reasons
    assert not site.fake.calls, "something was changed for a target that is refused"


def test_the_arranged_site_is_published_where_nothing_is_wrong(site: Site) -> None:
    """What the faults above are added to; the same image built twice is one, and a place that was proven counts."""
    digests = arrange(site, {"verify": {"runner": "exec:ssh node", "outcomes": {"image/same-files": "passed"}}})
    site.built(NEW, {AMD64: digests[AMD64]}, file="again/result.json")
    assert site.publish().states == ["published"]


def test_every_reason_is_said_at_once_and_other_targets_are_published(site: Site) -> None:
    site.ready(OLD)
    digests = arrange(site, {"verify": {"outcomes": {"library/works": "failed", "library/newest": "skipped"}}})
    site.scanned(digests[ARM64], "failed")
    done = site.publish()
    assert (done.states, done.result.exit_status) == (["published", "refused"], 1)
    assert "linux/amd64: library/works failed" in done.reasons
    assert "linux/amd64: library/newest was skipped" in done.reasons
    assert "linux/arm64: scan failed" in done.reasons
    assert set(site.tags()) == {f"cuda12.9-tool3.4-{COMMIT[:7]}", "cuda12.9"}


def test_checks_that_do_not_apply_may_be_skipped(site: Site) -> None:
    """By the condition of a check, and by a rule that has nothing to look at in an image that could be read."""
    site.ready(OLD, outcomes={"image/size": "skipped"})
    assert site.publish().states == ["published"]


def test_a_verification_of_an_index_counts_for_its_platform(site: Site) -> None:
    digests = {platform: site.stage(NEW, platform, platform.encode()) for platform in (AMD64, ARM64)}
    site.built(NEW, digests, digest=OTHER)
    site.verified(OTHER, AMD64, file="amd64/verify.json")
    assert "linux/arm64: not verified" in site.publish().reasons
    site.verified(OTHER, ARM64, file="arm64/verify.json")
    assert site.publish().states == ["published"]


def test_what_the_policy_asks_for_may_be_in_other_files(tmp_path: Path) -> None:
    """A row asks nothing of other platforms and targets."""
    rows = '{when: {arch: amd64, cuda: ">=13"}, checks: [library]}, {when: {cuda: "12.9"}, checks: [library/newest]}'
    site = Site(tmp_path, policy=f"publish: {{require: [{rows}], require-attachments: [sbom, scan]}}\n")
    digests = site.ready(NEW)
    gpu = "library/on-gpu was skipped: it was skipped; publish.require contains library/*"
    lacking = [f"no {kind} for this digest; publish.require-attachments requires it" for kind in ("sbom", "scan")]
    asked = [(AMD64, gpu), *product((AMD64, ARM64), lacking)]
    assert site.publish().only.reasons == tuple(f"{platform}: {reason}" for platform, reason in asked)
    for (_, platform), digest in digests.items():
        site.verified(digest, platform, file=f"gpu/{platform}/verify.json", outcomes={"library/on-gpu": "passed"})
        site.listed(digest)
        site.scanned(digest, platform=platform)
    done = site.publish().only
    assert done.state == "published"
    assert done.attached == {"provenance": 4, "sbom": 4, "scan": 4, "verification": 8}
    site.ready(OLD)
    assert "publish.require contains library/newest, but this target has no such check" in site.publish(OLD).reasons


@dataclass
class Signing:
    """A site whose images are signed by `cosign.key`; what anybody can trust there is looked at with `cosign.pub`."""

    site: Site
    fake: FakeCosign

    def signer(self, key: str = "cosign") -> Signer:
        (self.site.root / f"{key}.key").touch()
        return Signer(str(self.site.root / f"{key}.key"), cosign=self.fake.cosign(), signs=True)

    def publish(self, key: str = "cosign") -> Done:
        return self.site.publish(signer=self.signer(key))

    def wrong(self) -> list[tuple[str, str]]:
        """What `attest verify` objects to in the image that is called latest."""
        required, name = ("verification", "provenance", "signature"), parse_reference(f"{HOST}/acme/tiny:latest")
        result = verify_attachments(name, self.site.fake, required, self.signer())
        return [(finding.kind, finding.outcome) for finding in result.findings if finding.is_wrong]


@pytest.fixture(params=[2, 3], ids=["cosign2", "cosign3"])
def signing(site: Site, request: pytest.FixtureRequest) -> Signing:
    site.ready(NEW)
    return Signing(site, FakeCosign(request.param))


@pytest.mark.parametrize("key", [None, "", "stranger"], ids=["new", "unsigned", "by-a-stranger"])
def test_what_nobody_trusted_signed_is_attached_and_signed_once(signing: Signing, key: str | None) -> None:
    """Provenance too, of which any other would do: it is of an earlier build, or of somebody who may push."""
    if key is not None:
        _ = signing.publish(key) if key else signing.site.publish()
        assert ("provenance", "missing") in signing.wrong()
    done = signing.publish().only
    assert (done.state, done.attached, done.signed) == ("published", {"provenance": 4, "verification": 4}, 3)
    assert signing.wrong() == []
    again = signing.publish().only
    assert (again.state, again.attached, again.signed) == ("unchanged", {}, 0)


def test_without_a_signature_nothing_is_sent(signing: Signing) -> None:
    signing.fake.down = "the log does not answer"
    signing.site.fake.calls.clear()
    failed = signing.publish().only
    reason = "nothing was sent, because signing fails: `cosign` failed (1): the log does not answer"
    assert (failed.state, failed.reasons) == ("failed", (reason,))
    assert not signing.site.fake.calls


def test_what_attest_verify_would_refuse_gets_no_tag(signing: Signing) -> None:
    """A trusted verification that says that a check failed was attached by `attest add`, and lies in no file here."""
    site = signing.site
    signing.publish()
    digest = site.fake.repositories["acme/tiny"].tags.pop("latest")
    (image, _) = manifests_of(site.fake.at("acme/tiny").manifest(digest).document)
    failed = site.verified(image.digest, file="x.json", outcomes={"library/works": "failed"})
    (site.evidence / "x.json").unlink()
    content = encode_predicate(failed.model_dump(mode="json"))
    attach(site.fake.at("acme/tiny"), image, NewAttachment("verification", content), signing.signer())
    refused = signing.publish()
    assert refused.states == ["failed"]
    assert "is failed: failed: library/works; " in refused.reasons
    assert "latest" not in site.tags()


def test_what_signs_without_a_key_must_be_named(signing: Signing) -> None:
    signer = Signer(cosign=signing.fake.cosign(), signs=True)
    with pytest.raises(ConfigError, match="no signer is named"):
        signing.site.publish(signer=signer)
    named = replace(signer, identity="https://github.com/acme/images/x@main", issuer="https://issuer.test")
    assert signing.site.publish(signer=named).states == ["published"]
    assert any("https://issuer.test" in call for call in signing.fake.calls if call[0] == "verify")


def test_evidence_that_comes_later_is_attached_and_moves_no_tag(site: Site) -> None:
    site.ready(NEW)
    first = site.publish().only
    tags = site.tags()
    site.verified(str(first.digest), AMD64, file="gpu/verify.json", outcomes={"library/on-gpu": "passed"})
    done = site.publish().only
    assert (done.state, done.attached, done.given) == ("published", {"verification": 2}, ())
    assert site.tags() == tags


def newer(site: Site, **build: Any) -> None:
    """Leave builds of another content, verified, and no others."""
    for old in list(site.evidence.rglob("result.json")):
        old.unlink()
    site.ready(NEW, content=b"newer", **build)


def test_a_rebuild_has_a_tag_of_its_day_and_takes_the_aliases(site: Site) -> None:
    site.ready(NEW)
    first = site.publish().only.digest
    newer(site, rebuilt="2026-11-26")
    done = site.publish().only
    assert done.moved == {f"{HOST}/acme/tiny:{name}": first for name in ("cuda13.0", "latest")}
    assert site.tags() == {TAG: first, **dict.fromkeys((f"{TAG}-20261126", "cuda13.0", "latest"), done.digest)}


def test_an_immutable_tag_never_moves(site: Site) -> None:
    site.ready(NEW)
    first, tags = site.publish().only.digest, site.tags()
    newer(site)
    site.ready(OLD)
    done = site.publish()
    assert (done.states, done.result.exit_status) == (["published", "refused"], 1)
    second = done.result.targets[1]
    assert f"{HOST}/acme/tiny:{TAG} names {first} and must not move to {second.digest}" in done.reasons
    assert tags.items() <= site.tags().items(), "an alias was moved to a target that was refused"


def test_a_build_of_no_commit_gets_no_tag_that_names_one(site: Site) -> None:
    site.ready(NEW, revision=None)
    assert "a build does not name its commit" in site.publish().reasons
    site.files.replace("matrix.yaml", "-{revision}", "")
    site.read()
    site.ready(NEW, revision=None)
    assert site.publish().states == ["published"]


def test_without_names_it_is_what_was_built(site: Site) -> None:
    with pytest.raises(NothingSelected, match="no result.json of a target"):
        site.publish()
    site.ready(OLD)
    assert [target.target for target in site.publish().result.targets] == [OLD]
    assert site.publish("tiny").states == ["unchanged", "refused"]


def test_cut_off_results_are_not_ignored(site: Site) -> None:
    """A check that failed might be in the part that is missing."""
    site.ready(NEW)
    path = site.leave("more/verify.json", (next(site.evidence.rglob("verify.json"))).read_text()[:500])
    with pytest.raises(ResultError, match=rf"{path}: is not valid JSON"):
        site.publish()
    path.write_text('{"image": "x", "digest": null, "target": null, "platform": "linux/amd64", "checks": 5}')
    with pytest.raises(ResultError, match=rf"{path}: checks: .* another version"):
        site.publish()


def test_results_of_no_image_in_particular_are_named(site: Site) -> None:
    arrange(site, {"act": "of_no_digest"})
    (path, why) = site.publish().result.unused[0].split(": ")
    assert (json.loads(Path(path).read_text())["digest"], why.partition(";")[0]) == (None, "does not name a digest")
    edit(site, platform=f"{AMD64}, {ARM64}")
    (problem,) = site.publish().result.unused
    assert "is about linux/amd64, linux/arm64; verify each platform separately" in problem
    # What is no result of ours is left alone.
    for name, text in {"index.json": '{"schemaVersion": 2}', "list.json": "[1, 2]", ".hidden.json": "{"}.items():
        site.leave(name, text)
    assert len(site.publish().result.unused) == 1


@pytest.mark.parametrize(("policy", "mistake"), REFUSED["policies"].items())
def test_mistakes_in_the_policy(tmp_path: Path, policy: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as error:
        Site(tmp_path, policy=f"publish: {policy}\n")
    assert mistake in str(error.value)
    assert re.match(rf"{tmp_path}/project/matrix.yaml:\d+: ", str(error.value))
