"""Images are refused with every reason, or may be published."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.profiles import find_profile, load_profiles
from imagebuild.bench.verification import CheckResult
from imagebuild.core.errors import ConfigError
from imagebuild.core.files import shipped_folder
from imagebuild.oci.layout import MANIFEST, Descriptor
from imagebuild.verify.rules import UNJUDGED
from tests.conftest import LIBRARY, data
from tests.publish_fakes import AMD64, ARM64, CHECKS, COMMIT, NEW, OLD, Site
from tests.registry_fake import index

TAG = f"cuda13.0-tool3.4-{COMMIT[:7]}"
OTHER = "sha256:" + "7" * 64


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


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
    "of_another_digest": lambda site: site.edit(digest=OTHER),
    "of_no_digest": lambda site: site.edit(digest=None),
    "of_several_platforms": lambda site: site.edit(platform=f"{AMD64}, {ARM64}"),
    "pruned": lambda site: site.fake.at("acme/tiny-staging").delete(site.edit()["digest"]),
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
    for path in site.evidence.rglob("verify.json"):
        path.write_text(path.read_text().replace("it was skipped", f"{UNJUDGED}no network"))
    assert f"image/size was skipped: {UNJUDGED}no network" in site.publish().reasons


def test_a_verification_of_an_index_counts_for_its_platform(site: Site) -> None:
    digests = {platform: site.stage(NEW, platform, platform.encode()) for platform in (AMD64, ARM64)}
    listed = [Descriptor(MANIFEST, digest, 1, platform) for platform, digest in digests.items()]
    both = index(site.fake, "acme/tiny-staging", listed)
    site.built(NEW, digests, digest=both)
    site.verified(both, AMD64, file="amd64/verify.json")
    assert "linux/arm64: not verified" in site.publish().reasons
    site.verified(both, ARM64, file="arm64/verify.json")
    assert site.publish().states == ["published"]


def test_what_the_policy_asks_for_may_be_in_other_files(tmp_path: Path) -> None:
    """A row asks nothing of other platforms and targets."""
    rows = '{when: {arch: amd64, cuda: ">=13"}, checks: [library]}, {when: {cuda: "12.9"}, checks: [library/newest]}'
    site = Site(tmp_path, policy=f"publish: {{require: [{rows}], require-attachments: [sbom, scan]}}\n")
    digests = site.ready(NEW)
    gpu = (
        "library/on-gpu was skipped: it was skipped; the check is required, because publish.require contains library/*"
    )
    lacking = [
        f"no result of kind {kind} for this image, but publish.require-attachments contains {kind}"
        for kind in ("sbom", "scan")
    ]
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


def test_a_speed_counts_only_by_a_profile_of_this_checkout(tmp_path: Path) -> None:
    site = Site(tmp_path, policy="publish: {require: [{when: {arch: amd64}, checks: [library/on-gpu-speed]}]}\n")
    site.files.component("library", LIBRARY + CHECKS.replace("needs: [gpu]", "needs: [gpu], results: nccl-tests"))
    site.read()
    site.ready(NEW, outcomes={"library/on-gpu": "passed", "library/on-gpu-speed": "passed"})
    stamp = find_profile(load_profiles(shipped_folder() / "profiles"), "h100").model.stamp
    for option, state in (("h200", "refused"), (stamp[:-1] + "x", "refused"), (stamp, "published")):
        site.edit(options=[f"--profile {option}"])
        done = site.publish()
        assert done.states == [state]
        assert ("judged by a profile that differs from those of this checkout" in done.reasons) == (state == "refused")


def test_a_build_of_no_commit_gets_no_tag_that_names_one(site: Site) -> None:
    site.ready(NEW, revision=None)
    assert "a build result does not name the git commit" in site.publish(origin={}).reasons
    site.files.replace("matrix.yaml", "-{revision}", "")
    site.read()
    site.ready(NEW, revision=None)
    assert "built from commit unknown, but this checkout is of commit 0123456789ab" in site.publish().reasons
    assert site.publish(origin={}).states == ["published"]


EDITED = data("publish/edited")


@pytest.mark.parametrize("row", EDITED.values(), ids=EDITED)
def test_edited_results_are_refused(row: Mapping[str, Any], site: Site) -> None:
    """tests/docker/test_publish_faults.py does the same with a real registry."""
    assert row["said"] in site.refusal(row, lambda _: site.fake)
    assert not site.tags()


@pytest.mark.parametrize(("policy", "mistake"), REFUSED["policies"].items())
def test_mistakes_in_the_policy(tmp_path: Path, policy: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as error:
        Site(tmp_path, policy=f"publish: {policy}\n")
    assert mistake in str(error.value)
    assert re.match(rf"{tmp_path}/\w+/matrix.yaml:\d+: ", str(error.value))
