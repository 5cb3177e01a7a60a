"""Only images whose checks passed get tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import ConfigError, NothingSelected, ResultError
from imagebuild.oci import INDEX, encode_predicate, manifests_of, parse_reference
from imagebuild.project import CheckResult, Outcome
from imagebuild.publish import AttestRequest, PublishTools, Signer, attach, read_evidence, verify_attachments
from tests.conftest import LIBRARY
from tests.cosign_fake import FakeCosign
from tests.publish_fakes import AMD64, ARM64, CHECKS, COMMIT, HOST, NEW, OLD, Done, Site

TAG = f"cuda13.0-tool3.4-{COMMIT[:7]}"


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
    assert annotations["org.opencontainers.image.vendor"] == "acme"
    origin = {name: text for name, text in annotations.items() if re.search(r"(source|url|vendor|revision)$", name)}
    for listed in index.document["manifests"]:
        assert len(origin) == 4
        assert origin.items() <= listed["annotations"].items()


def test_a_dry_run_changes_nothing_and_says_what_it_would_do(site: Site) -> None:
    site.ready(NEW)
    site.fake.calls.clear()
    done = site.publish(dry_run=True).only
    assert done.state == "possible"
    assert len(done.given) == 3
    assert done.attached == {"verification": 4}
    assert not site.fake.calls
    assert site.publish().only.digest == done.digest


def arrange(site: Site, verify: Mapping[str, Any] | None = None, **staged: Any) -> dict[str, str]:
    """Build, stage and verify both platforms; `verify` changes amd64's verification (None: there is none), `staged` its
    image."""
    digests = {ARM64: site.stage(NEW, ARM64, ARM64.encode())}
    digests[AMD64] = site.stage(**{"name": NEW, "platform": AMD64, "content": AMD64.encode(), **staged})
    for platform, digest in digests.items():
        site.built(NEW, {platform: digest})
    site.verified(digests[ARM64], ARM64)
    if verify is not None:
        site.verified(digests[AMD64], **verify)
    return digests


def of_no_digest(site: Site) -> None:
    result = site.verified(arrange(site)[AMD64])
    path = site.evidence / f"{str(result.digest)[7:19]}/verify.json"
    path.write_text(result.model_copy(update={"digest": None}).model_dump_json())


def built_twice(site: Site) -> None:
    arrange(site, {})
    other = site.stage(NEW, AMD64, b"another")
    site.built(NEW, {AMD64: other}, file="again/result.json", started="2026-11-22T10:00:00Z")
    site.verified(other)


def built_again(site: Site, **changed: Any) -> None:
    """The build of amd64 says something else."""
    site.built(NEW, {AMD64: arrange(site, {})[AMD64]}, **changed)


def not_built(site: Site) -> None:
    digest = site.stage(NEW, ARM64)
    site.built(NEW, {ARM64: digest})
    site.verified(digest, ARM64)


def of_other_checks(site: Site) -> None:
    """Since it was verified, the script of a check has changed; the other platform's result is of the new one."""
    digest = arrange(site, {})[AMD64]
    old = site.verified(digest)
    site.files.component("library", LIBRARY + CHECKS.replace('It works, run: "true"', 'It works, run: "exit 0"'))
    site.read()
    for platform in (ARM64, AMD64):
        site.verified(site.stage(NEW, platform, platform.encode()), platform)
    site.verified(digest, checks=old.checks)


def by_prefix(outcome: Outcome | None) -> Callable[[Site], object]:
    return lambda site: arrange(
        site, {"runner": "exec:ssh node", "outcomes": {"image/same-files": outcome} if outcome else {}}
    )


READABLE_ONLY = [CheckResult(component="image", check="readable", outcome="passed")]
FAULTS: dict[str, tuple[Callable[[Site], object], str]] = {
    "failed": (
        lambda site: arrange(site, {"outcomes": {"library/works": "failed"}}), "linux/amd64: library/works failed",
    ),
    "failed at speed": (
        lambda site: arrange(site, {"outcomes": {"library/on-gpu-speed": "failed"}}), "library/on-gpu-speed failed",
    ),
    "failed elsewhere": (
        lambda site: site.verified(
            arrange(site, {})[AMD64], file="gpu/verify.json", outcomes={"library/on-gpu": "failed"}
        ), "library/on-gpu failed",
    ),
    "failed, then passed": (
        lambda site: site.verified(arrange(site, {"file": "a/verify.json", "outcomes": {"library/works": "failed"}})[AMD64]),
        "a/verify.json): it was failed",
    ),
    "skipped": (
        lambda site: arrange(site, {"outcomes": {"library/works": "skipped"}}), "library/works was skipped: it was skipped",
    ),
    "not run": (lambda site: arrange(site, {"checks": READABLE_ONLY}), "library/works was not run"),
    "unreadable": (
        lambda site: arrange(site, {"outcomes": dict.fromkeys(("image/readable", "image/labels"), "skipped")}),
        "image/labels was skipped",
    ),
    "skipped between two": (
        lambda site: arrange(site, {"outcomes": {"library/on-two": "skipped"}}), "library/on-two was skipped",
    ),
    "of other checks": (
        of_other_checks, "library/works was skipped: the result is of another version of this check",
    ),
    "elsewhere": (
        by_prefix(None), "library/works was skipped: it ran through exec:ssh node, but image/same-files was not run",
    ),
    "elsewhere, unproven": (by_prefix("skipped"), "but image/same-files was skipped: it was skipped"),
    "elsewhere, in another image": (by_prefix("failed"), "image/same-files failed"),
    "of another digest": (
        lambda site: (arrange(site), site.verified("sha256:" + "7" * 64)),
        "linux/amd64: not verified: no result names this digest",
    ),
    "of no digest": (of_no_digest, "not verified"),
    "not built": (not_built, "linux/amd64: no build result"),
    "not pushed": (lambda site: built_again(site, repository=None), "linux/amd64: built, but not pushed"),
    "built twice": (built_twice, "linux/amd64: several builds: sha256:"),
    "another target": (lambda site: arrange(site, {}, name=OLD), f"the image is labelled as target {OLD}"),
    "another version": (
        lambda site: arrange(site, {}, labels={"imagebuild.component.tool": "3.3", "imagebuild.component.more": "1"}),
        "component more: the image has 1, the plan none\nlinux/amd64: component tool: the image has 3.3, the plan 3.4",
    ),
    "another axis": (
        lambda site: arrange(site, {}, labels={"imagebuild.axis.os": "ubuntu24.04"}),
        "axis os: the image has ubuntu24.04, the plan debian13",
    ),
    "another platform": (
        lambda site: arrange(site, {}, platform=ARM64, content=b"other"), "linux/amd64: the image is for linux/arm64",
    ),
    "scan failed": (
        lambda site: site.scanned(arrange(site, {})[AMD64], "failed"), "scan.json): CVE-2026-1 in libc6 1",
    ),
    "pruned": (
        lambda site: site.fake.at("acme/tiny-staging").delete(arrange(site, {})[AMD64]),
        f"{HOST}/acme/tiny-staging does not have it any more",
    ),
    "dirty": (
        lambda site: built_again(site, revision=f"{COMMIT}-dirty"),
        f"built from files that differ from commit {COMMIT[:12]}",
    ),
    "of several commits": (
        lambda site: built_again(site, revision="f" * 40),
        "its builds are of different commits: linux/amd64 from ffffffffffff, linux/arm64 from 0123456789ab",
    ),
    "of different days": (
        lambda site: built_again(site, rebuilt="2026-11-22"),
        "its builds are of different days: without --rebuild, 20261122; build all platforms on one day",
    ),
    "of no commit": (lambda site: built_again(site, revision=None), "a build does not name its commit"),
}  # fmt: skip


@pytest.mark.parametrize(("arranged", "reason"), FAULTS.values(), ids=FAULTS)
def test_faults_are_refused_with_their_reason(arranged: Callable[[Site], object], reason: str, site: Site) -> None:
    arranged(site)
    site.fake.calls.clear()
    done = site.publish(NEW)
    assert done.states == ["refused"]
    assert done.result.exit_status == 1
    assert reason in done.reasons
    assert not site.fake.calls, "something was changed for a target that is refused"


def test_the_arranged_site_is_published_where_nothing_is_wrong(site: Site) -> None:
    """What the faults above are added to; the same image built twice is one, and a place that was proven counts."""
    digests = arrange(site, {"runner": "exec:ssh node", "outcomes": {"image/same-files": "passed"}})
    site.built(NEW, {AMD64: digests[AMD64]}, file="again/result.json")
    assert site.publish().states == ["published"]


def test_every_reason_is_said_at_once(site: Site) -> None:
    digests = arrange(site, {"outcomes": {"library/works": "failed", "library/newest": "skipped"}})
    site.scanned(digests[ARM64], "failed")
    message = site.publish().reasons
    assert "linux/amd64: library/works failed" in message
    assert "linux/amd64: library/newest was skipped" in message
    assert "linux/arm64: scan failed" in message


def test_one_refused_target_does_not_stop_another(site: Site) -> None:
    site.ready(OLD)
    FAULTS["failed"][0](site)
    done = site.publish()
    assert done.states == ["published", "refused"]
    assert done.result.exit_status == 1
    assert set(site.tags()) == {f"cuda12.9-tool3.4-{COMMIT[:7]}", "cuda12.9"}


def test_checks_that_do_not_apply_may_be_skipped(site: Site) -> None:
    """By the condition of a check, and by a rule that has nothing to look at in an image that could be read."""
    digests = {platform: site.stage(OLD, platform, platform.encode()) for platform in (AMD64, ARM64)}
    for platform, digest in digests.items():
        site.built(OLD, {platform: digest})
        site.verified(digest, platform, name=OLD, outcomes={"image/size": "skipped"})
    assert site.publish().states == ["published"]


def test_a_verification_of_an_index_counts_for_its_platform(site: Site) -> None:
    digests = {platform: site.stage(NEW, platform, platform.encode()) for platform in (AMD64, ARM64)}
    index = "sha256:" + "1" * 64
    site.built(NEW, digests, digest=index)
    site.verified(index, AMD64, file="amd64/verify.json")
    assert "linux/arm64: not verified" in site.publish().reasons
    site.verified(index, ARM64, file="arm64/verify.json")
    assert site.publish().states == ["published"]


def test_results_about_several_platforms_count_for_each(site: Site) -> None:
    digests = {platform: site.stage(NEW, platform, platform.encode()) for platform in (AMD64, ARM64)}
    index = "sha256:" + "1" * 64
    site.built(NEW, digests, digest=index)
    for platform, digest in digests.items():
        site.verified(digest, platform)
    result = CheckResult(component="library", check=f"works {ARM64}", outcome="failed")
    site.verified(index, f"{AMD64}, {ARM64}", file="both.json", checks=[result])
    assert "linux/arm64: library/works failed" in site.publish().reasons
    assert "linux/amd64" not in site.publish().reasons
    # Of which platform it is about is not said, so it counts against both.
    site.verified(index, f"{AMD64}, {ARM64}", file="both.json", checks=[result.model_copy(update={"check": "works"})])
    assert site.publish().reasons.count("library/works failed") == 2


REQUIRE = """\
publish:
  require: [{when: {image: tiny, cuda: ">=13"}, checks: [library/on-gpu]}]
"""


def test_required_checks_must_have_passed_somewhere(tmp_path: Path) -> None:
    site = Site(tmp_path, policy=REQUIRE)
    site.ready(NEW, OLD)
    done = site.publish()
    assert done.states == ["published", "refused"]
    assert "library/on-gpu was skipped: it was skipped; publish.require has library/on-gpu" in done.reasons
    for platform in (AMD64, ARM64):
        digest = site.stage(NEW, platform, b"layer" + platform.encode() + NEW.encode())
        site.verified(digest, platform, file=f"gpu/{platform}/verify.json", outcomes={"library/on-gpu": "passed"})
    assert site.publish().states == ["unchanged", "published"]


@pytest.mark.parametrize(
    ("rule", "name", "message", "not_said"),
    [
        ("{when: {arch: amd64}, checks: [library]}", NEW, "linux/amd64: library/on-gpu was skipped", "linux/arm64"),
        (
            "{when: {cuda: '12.9'}, checks: [library/newest]}",
            OLD,
            "publish.require has library/newest, but this target has no such check",
            "on-gpu",
        ),
    ],
)
def test_required_checks_of_some_images(tmp_path: Path, rule: str, name: str, message: str, not_said: str) -> None:
    site = Site(tmp_path, policy=f"publish: {{require: [{rule}]}}\n")
    site.ready(name)
    reasons = site.publish().reasons
    assert message in reasons
    assert not_said not in reasons


def test_required_attachments_must_be_there(tmp_path: Path) -> None:
    site = Site(tmp_path, policy="publish: {require-attachments: [sbom, scan]}\n")
    site.ready(NEW)
    message = site.publish().reasons
    assert "linux/arm64: no sbom of this digest" in message
    assert "linux/amd64: no scan of this digest" in message
    for platform in (AMD64, ARM64):
        digest = site.stage(NEW, platform, b"layer" + platform.encode() + NEW.encode())
        site.listed(digest)
        site.scanned(digest)
    done = site.publish().only
    assert done.state == "published"
    assert done.attached == {"sbom": 4, "scan": 4, "verification": 4}


@dataclass
class Signing:
    """A site whose images are signed by `cosign.key`; what anybody can trust there is looked at with `cosign.pub`."""

    site: Site
    fake: FakeCosign

    def tools(self, key: str = "cosign") -> PublishTools:
        (self.site.root / f"{key}.key").touch()
        signer = Signer(str(self.site.root / f"{key}.key"), cosign=self.fake.cosign())
        return PublishTools(lambda _: self.site.fake, lambda *_: encode_predicate(PROVENANCE), signer)

    def publish(self, key: str = "cosign") -> Done:
        return self.site.publish(tools=self.tools(key))

    def wrong(self) -> list[tuple[str, str]]:
        """What `attest verify` objects to in the image that is called latest."""
        trust = self.tools().signer
        assert trust
        request = AttestRequest(("verification", "provenance", "signature"), trust.trust)
        result = verify_attachments(parse_reference(f"{HOST}/acme/tiny:latest"), self.site.fake, request)
        return [(finding.kind, finding.outcome) for finding in result.findings if finding.is_wrong]


# That of both platforms is the same here, so the index gets it once.
PROVENANCE = {"buildDefinition": {"externalParameters": {}, "resolvedDependencies": [{"name": "project"}]}}


@pytest.fixture(params=[2, 3], ids=["cosign2", "cosign3"])
def signing(site: Site, request: pytest.FixtureRequest) -> Signing:
    site.ready(NEW)
    return Signing(site, FakeCosign(request.param))


def test_what_is_published_signed_is_trusted_and_signed_once(signing: Signing) -> None:
    done = signing.publish().only
    assert (done.state, done.attached, done.signed) == ("published", {"provenance": 3, "verification": 4}, 3)
    assert signing.wrong() == []
    again = signing.publish().only
    assert (again.state, again.attached, again.signed) == ("unchanged", {}, 0)


@pytest.mark.parametrize("key", ["", "stranger"], ids=["unsigned", "by-a-stranger"])
def test_what_nobody_trusted_signed_is_attached_again_and_signed(signing: Signing, key: str) -> None:
    """Provenance too, of which any other would do: it is of an earlier build, or of somebody who may push."""
    if key:
        signing.publish(key)
    else:
        signing.site.publish(tools=replace(signing.tools(), signer=None))
    assert ("provenance", "missing") in signing.wrong()
    done = signing.publish().only
    assert (done.state, done.attached, done.signed) == ("published", {"provenance": 3, "verification": 4}, 3)
    assert signing.wrong() == []


def test_without_a_signature_nothing_is_sent(signing: Signing) -> None:
    signing.fake.down = "the log does not answer"
    signing.site.fake.calls.clear()
    failed = signing.publish().only
    reason = "nothing was sent, as it could not be signed: `cosign` failed (1): the log does not answer"
    assert (failed.state, failed.reasons) == ("failed", (reason,))
    assert not signing.site.fake.calls


def test_what_attest_verify_would_refuse_gets_no_tag(signing: Signing) -> None:
    """A trusted verification that says that a check failed was attached by `attest add`, and lies in no file here."""
    site, tools = signing.site, signing.tools()
    signing.publish()
    digest = site.fake.repositories["acme/tiny"].tags.pop("latest")
    (amd64, _) = manifests_of(site.fake.at("acme/tiny").find(digest).document)  # type: ignore[union-attr]
    failed = site.verified(amd64.digest, file="x.json", outcomes={"library/works": "failed"})
    (site.evidence / "x.json").unlink()
    content = encode_predicate(failed.model_dump(mode="json"))
    attach(site.fake.at("acme/tiny"), amd64, "verification", content, signer=tools.signer)
    refused = site.publish(tools=tools)
    assert refused.states == ["failed"]
    assert "is failed: failed: library/works; " in refused.reasons
    assert "latest" not in site.tags()


def test_what_signs_without_a_key_must_be_named(signing: Signing) -> None:
    signer = Signer(cosign=signing.fake.cosign())
    with pytest.raises(ConfigError, match="no signer is named"):
        signing.site.publish(tools=replace(signing.tools(), signer=signer))
    named = replace(signer, identity="https://github.com/acme/images/x@main", issuer="https://issuer.test")
    assert signing.site.publish(tools=replace(signing.tools(), signer=named)).states == ["published"]
    assert any("https://issuer.test" in call for call in signing.fake.calls if call[0] == "verify")


def test_evidence_that_comes_later_is_attached_and_moves_no_tag(site: Site) -> None:
    site.ready(NEW)
    first = site.publish().only
    tags = site.tags()
    site.verified(str(first.digest), AMD64, file="gpu/verify.json", outcomes={"library/on-gpu": "passed"})
    done = site.publish().only
    assert (done.state, done.attached, done.given) == ("published", {"verification": 2}, ())
    assert site.tags() == tags


def newer(site: Site, *platforms: str, **more: Any) -> None:
    """Leave builds of another content, verified, for these platforms or for both, and no others."""
    for old in list(site.evidence.rglob("result.json")):
        old.unlink()
    for platform in platforms or (AMD64, ARM64):
        digest = site.stage(NEW, platform, b"newer" + platform.encode())
        site.built(NEW, {platform: digest}, **more)
        site.verified(digest, platform)


def test_a_rebuild_has_a_tag_of_its_day_and_takes_the_aliases(site: Site) -> None:
    site.ready(NEW)
    first = site.publish().only.digest
    newer(site, rebuilt="2026-11-26")
    second = site.publish().only.digest
    assert site.tags() == {TAG: first, **dict.fromkeys((f"{TAG}-20261126", "cuda13.0", "latest"), second)}


def test_an_immutable_tag_never_moves(site: Site) -> None:
    site.ready(NEW)
    first, tags = site.publish().only.digest, site.tags()
    newer(site)
    site.ready(OLD)
    done = site.publish()
    assert (done.states, done.result.exit_status) == (["published", "refused"], 1)
    second = done.result.targets[1]
    assert f"{HOST}/acme/tiny:{TAG} names {first} and never moves; this is {second.digest}" in done.reasons
    assert tags.items() <= site.tags().items(), "an alias was moved to a target that was refused"


def test_aliases_move_and_say_from_where(site: Site) -> None:
    site.ready(NEW)
    first = site.publish().only
    newer(site, revision="f" * 40)
    done = site.publish().only
    assert done.moved == {f"{HOST}/acme/tiny:{name}": first.digest for name in ("cuda13.0", "latest")}
    assert site.tags()[TAG] == first.digest
    assert site.tags()["latest"] == done.digest


def test_tags_admit_what_was_built(site: Site) -> None:
    """Of uncommitted files, when allowed; of no commit, only if the tag names none."""
    FAULTS["dirty"][0](site)
    assert site.publish(allow_dirty=True).only.given[0].endswith(f"-{COMMIT[:7]}-dirty")
    of_no_commit = Site(site.root / "none")
    FAULTS["of no commit"][0](of_no_commit)
    assert of_no_commit.publish(allow_dirty=True).states == ["refused"]
    of_no_commit.files.replace("matrix.yaml", "-{revision}", "")
    of_no_commit.read()
    assert of_no_commit.publish().states == ["published"]


def test_a_platform_alone_is_published_only_on_purpose(site: Site) -> None:
    newer(site, AMD64)
    assert site.publish().states == ["refused"]
    done = site.publish(platforms=(AMD64,)).only
    assert (done.state, list(done.platforms)) == ("published", [AMD64])


def test_a_platform_alone_takes_none_from_an_alias(site: Site) -> None:
    site.ready(NEW)
    site.publish()
    tags = site.tags()
    newer(site, AMD64, revision="f" * 40)
    assert f"{HOST}/acme/tiny:latest would lose linux/arm64" in site.publish(platforms=(AMD64,)).reasons
    assert site.tags() == tags


def test_without_names_it_is_what_was_built(site: Site) -> None:
    site.ready(OLD)
    assert [target.target for target in site.publish().result.targets] == [OLD]
    assert site.publish("tiny").states == ["unchanged", "refused"]


def test_what_cannot_begin(site: Site) -> None:
    with pytest.raises(NothingSelected, match="no result.json of a target"):
        site.publish()
    with pytest.raises(ConfigError, match="no such folder"):
        read_evidence([site.root / "nowhere"])
    site.files.replace("matrix.yaml", "[linux/amd64, linux/arm64]", "[linux/amd64]")
    site.read()
    with pytest.raises(ConfigError, match="--platform linux/arm64: .* is for linux/amd64"):
        site.publish(NEW, platforms=(ARM64,))


def test_cut_off_results_are_not_ignored(site: Site) -> None:
    """A check that failed might be in the part that is missing."""
    site.ready(NEW)
    path = site.leave("more/verify.json", (next(site.evidence.rglob("verify.json"))).read_text()[:500])
    with pytest.raises(ResultError, match=rf"{path}: not valid JSON"):
        site.publish()
    path.write_text('{"image": "x", "digest": null, "target": null, "platform": "linux/amd64", "checks": 5}')
    with pytest.raises(ResultError, match=rf"{path}: checks: .* another version"):
        site.publish()


def test_verifications_of_no_digest_are_named(site: Site) -> None:
    of_no_digest(site)
    (path,) = site.publish().result.unnamed
    assert json.loads(Path(path).read_text())["digest"] is None


def test_other_files_are_counted(site: Site) -> None:
    site.ready(NEW)
    site.leave("index.json", '{"schemaVersion": 2}')
    site.leave("list.json", "[1, 2]")
    site.leave(".hidden.json", "{")
    assert site.publish().result.ignored == 2


@pytest.mark.parametrize(
    ("policy", "mistake"),
    [
        ("{staging: '{repository}/{name}'}", "publish.staging: no value for {name}; known: image, repository"),
        ("{staging: '{repository}/{image}'}", "registry.test/acme/tiny is where people pull tiny from"),
        ("{staging: 'Staging/{image}_'}", "publish.staging: 'Staging/tiny_' is not a valid name of a repository"),
        ("{require: [{checks: [library/on-cpu]}]}", "no check library/on-cpu; did you mean 'library/on-gpu'?"),
        ("{require: [{checks: [other]}]}", "no check other; see `imagebuild verify --list`"),
        ("{require: [{when: {cud: '13'}, checks: [library]}]}", "unknown axis 'cud'; did you mean 'cuda'?"),
        (
            "{require: [{when: {cuda: '>=x'}, checks: [library]}]}",
            "publish.require.0.when.cuda: '>=x' is not a version specifier",
        ),
        ("{require: [{checks: []}]}", "publish.require.0.checks: "),
        ("{require-attachments: [bom]}", "publish.require-attachments.0: "),
    ],
)
def test_mistakes_in_the_policy(tmp_path: Path, policy: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as error:
        Site(tmp_path, policy=f"publish: {policy}\n")
    assert mistake in str(error.value)
    assert re.match(rf"{tmp_path}/project/matrix.yaml:\d+: ", str(error.value))
