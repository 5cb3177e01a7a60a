"""Tags, aliases, attachments and signatures of published images; interruptions, other publishers, random evidence."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.verification import Outcome
from imagebuild.core.errors import CommandError, ConfigError, NothingSelected
from imagebuild.oci.attestation import encode_predicate
from imagebuild.oci.layout import INDEX, blobs_of, manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.project.records import Published
from imagebuild.publish.attest import attach, verify_attachments
from imagebuild.publish.evidence import NewAttachment
from imagebuild.publish.signatures import Signer
from tests.faulty import Answer
from tests.publish_fakes import AMD64, ARM64, COMMIT, HOST, NEW, OLD, Site, passing
from tests.registry_fake import FakeRegistry, Request, index, put_image
from tests.unit.publish.conftest import Signers

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
    stored = b"".join(site.fake.repositories["acme/tiny"].blobs.values())
    assert b'"kernel": "6.1"' in stored
    assert b"secret-" not in stored
    # Nothing is decided by when a machine says that it built.
    for path in site.evidence.rglob("result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "started": "2026-11-20T10:00:00+00:00"}))
    again = site.publish().only
    assert (again.state, again.digest) == ("unchanged", done.digest)


@pytest.fixture
def ready(site: Site) -> Site:
    site.ready(NEW)
    return site


def wrong(site: Site, signers: Signers) -> list[tuple[str, str]]:
    """What `attest verify` objects to in the image that is called latest."""
    required, name = ("verification", "provenance", "signature"), parse_reference(f"{HOST}/acme/tiny:latest")
    result = verify_attachments(name, site.fake, required, signers.trust())
    return [(finding.kind, finding.outcome) for finding in result.findings if finding.is_wrong]


@pytest.mark.parametrize("key", [None, "", "theirs"], ids=["new", "unsigned", "by-a-stranger"])
def test_what_nobody_trusted_signed_is_attached_and_signed_once(ready: Site, signers: Signers, key: str | None) -> None:
    """Provenance too, of which any other would do: it is of an earlier build, or of somebody who may push."""
    if key is not None:
        ready.publish(signer=signers.signer(key) if key else None)
        assert ("provenance", "missing") in wrong(ready, signers)
    done = ready.publish(signer=signers.signer()).only
    assert (done.state, done.attached, done.signed) == ("published", {"provenance": 4, "verification": 4}, 3)
    assert wrong(ready, signers) == []
    again = ready.publish(signer=signers.signer()).only
    assert (again.state, again.attached, again.signed) == ("unchanged", {}, 0)


def test_without_a_signature_nothing_is_sent(ready: Site, signers: Signers) -> None:
    signers.fake.down = "the log does not answer"
    ready.fake.calls.clear()
    failed = ready.publish(signer=signers.signer()).only
    reason = "nothing was pushed, because a trial signature failed: `cosign` failed (1): the log does not answer"
    assert (failed.state, failed.reasons) == ("failed", (reason,))
    assert not ready.fake.calls


def test_what_attest_verify_would_refuse_gets_no_tag(ready: Site, signers: Signers) -> None:
    """A trusted verification that says that a check failed was attached by `attest add`, and lies in no file here."""
    ready.publish(signer=signers.signer())
    digest = ready.fake.repositories["acme/tiny"].tags.pop("latest")
    (image, _) = manifests_of(ready.fake.at("acme/tiny").manifest(digest).document)
    failed = ready.verified(image.digest, file="x.json", outcomes={"library/works": "failed"})
    (ready.evidence / "x.json").unlink()
    content = encode_predicate(failed.model_dump(mode="json"))
    attach(ready.fake.at("acme/tiny"), image, NewAttachment("verification", content), signers.signer())
    refused = ready.publish(signer=signers.signer())
    assert refused.states == ["failed"]
    assert "is failed: failed: library/works; " in refused.reasons
    assert "latest" not in ready.tags()


def test_what_signs_without_a_key_must_be_named(ready: Site, signers: Signers) -> None:
    signer = Signer(cosign=signers.fake.cosign(), signs=True)
    with pytest.raises(ConfigError, match="no signer is named"):
        ready.publish(signer=signer)
    named = replace(signer, identities=("https://git.test/x@main",), issuer="https://issuer.test", source="acme/images")
    assert ready.publish(signer=named).states == ["published"]
    verified = [call for call in signers.fake.calls if call[0] == "verify"]
    assert all({"https://issuer.test", "acme/images"} < {*call} for call in verified)


def test_evidence_that_comes_later_is_attached_and_moves_no_tag(site: Site) -> None:
    site.ready(NEW)
    first = site.publish().only
    tags = site.tags()
    site.verified(str(first.digest), AMD64, file="gpu/verify.json", outcomes={"library/on-gpu": "passed"})
    done = site.publish().only
    assert (done.state, done.attached, done.given) == ("published", {"verification": 2}, ())
    assert site.tags() == tags


def test_a_local_build_does_not_take_the_place_of_the_one_that_was_pushed(site: Site) -> None:
    site.ready(NEW)
    for path in list(site.evidence.rglob("result.json")):
        local = {**json.loads(path.read_text()), "repository": None, "manifests": {}, "revision": None}
        path.with_name("local.json").write_text(json.dumps(local))
    assert site.publish().states == ["published"]


def test_a_tag_is_read_back(site: Site) -> None:
    """A registry whose HEAD names our index, and which sends something else."""
    site.ready(NEW)
    other, answer = index(site.fake, "acme/tiny", [put_image(site.fake, "acme/tiny")]), site.fake.answer

    def lies(request: Request) -> Answer:
        if request.method == "GET" and request.path.endswith("/manifests/cuda13.0") and TAG in site.tags():
            return answer(replace(request, path=request.path.replace("cuda13.0", other)))
        return answer(request)

    site.fake.answer = lies  # type: ignore[method-assign]
    done = site.publish()
    assert (done.states, done.only.given) == (["failed"], (f"{HOST}/acme/tiny:{TAG}",))
    assert f"cuda13.0: another publisher moved the tag to {other}" in done.reasons


def test_options_that_narrow_a_verification_are_shown(site: Site) -> None:
    site.ready(NEW)
    site.edit(options=["--only *", "--profile h100 sha256:0123"])
    assert [note.partition(": ")[2] for note in site.publish().result.notes] == [
        "verified with --only *, --profile h100 sha256:0123"
    ]
    stored = b"".join(site.fake.repositories["acme/tiny"].blobs.values())
    assert b'"--profile h100 sha256:0123"' in stored


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


def test_without_names_it_is_what_was_built(site: Site) -> None:
    with pytest.raises(NothingSelected, match="contains no result; run `imagebuild build` first"):
        site.publish()
    site.scanned(f"sha256:{'7' * 64}")
    with pytest.raises(NothingSelected, match="no result.json of a target"):
        site.publish()
    site.ready(OLD)
    assert [target.target for target in site.publish().result.targets] == [OLD]
    assert site.publish("tiny").states == ["unchanged", "refused"]


# Interruptions, other publishers, and random evidence


def incomplete(fake: FakeRegistry, repository: str = "acme/tiny") -> list[str]:
    """What the tags that people pull by name, directly or not, and the registry has not."""
    held = fake.repositories.get(repository)
    lacking = []
    for tag, digest in (dict(held.tags) if held else {}).items():
        assert held
        index = held.manifests.get(digest)
        lacking += [tag] if index is None else []
        for child in manifests_of(index.document) if index else ():
            manifest = held.manifests.get(child.digest)
            lacking += [child.digest] if manifest is None else []
            blobs = blobs_of(manifest.document) if manifest else ()
            lacking += [blob.digest for blob in blobs if blob.digest not in held.blobs]
    return lacking


class Interrupted:
    """Make write number `n` of a registry fail, before it is done or after."""

    def __init__(self, fake: FakeRegistry, n: int, *, done: bool) -> None:
        self.fake, self.n, self.done = fake, n, done
        self.writes = 0
        self.answer, self.lock = fake.answer, threading.Lock()
        fake.answer = self  # type: ignore[method-assign]

    def __call__(self, request: Request) -> Answer:
        if request.method in ("GET", "HEAD"):
            return self.answer(request)
        with self.lock:
            self.writes += 1
            fails = self.writes == self.n
        if fails and not self.done:
            raise CommandError("interrupted")
        answer = self.answer(request)
        assert not incomplete(self.fake), f"after {request.method} {request.path}, a tag names what is not all there"
        if fails:
            raise CommandError("interrupted")
        return answer


def state(fake: FakeRegistry) -> dict[str, Any]:
    return {
        name: (sorted(held.tags.items()), sorted(held.manifests), sorted(held.blobs))
        for name, held in fake.repositories.items()
    }


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_interrupted_at_any_write_and_run_again_it_ends_the_same(tmp_path: Path, done: bool) -> None:
    site = Site(tmp_path)
    site.ready(NEW)
    staged = deepcopy(site.fake.repositories)
    site.publish()
    wanted, given = state(site.fake), set[tuple[str, ...]]()
    for n in itertools.count(1):
        site.fake = FakeRegistry(HOST)
        site.fake.repositories = deepcopy(staged)
        interrupted = Interrupted(site.fake, n, done=done)
        first = site.publish().only
        if interrupted.writes < n:
            break
        assert first.state == "failed"
        given.add(first.given)
        assert site.publish().only.state in ("published", "unchanged")
        assert state(site.fake) == wanted, f"write {n}"
    assert n > 15  # so many there are to interrupt
    assert {(), (f"{HOST}/acme/tiny:{TAG}",)} < given  # says what was given before


def test_another_publisher_before_our_tag(tmp_path: Path) -> None:
    """While we copied, the tag was given to something else: it stays, and so do the aliases."""
    site = Site(tmp_path)
    site.ready(NEW)
    # Another machine with the same commit and registry, whose build came out different.
    other = Site(site.root / "other", fake=site.fake)
    other.ready(NEW, content=b"other")
    theirs: list[Published] = []

    def meanwhile(what: str, repository: str, name: str) -> None:
        if what == "mount" and not theirs:
            site.fake.before = None
            theirs.append(other.publish().only)

    site.fake.before = meanwhile
    done = site.publish()
    assert (done.states, theirs[0].state) == (["failed"], "published")
    assert str(theirs[0].digest) in done.reasons
    assert done.result.exit_status == 4
    assert site.tags() == dict.fromkeys((TAG, "cuda13.0", "latest"), theirs[0].digest)


def evidence_of(site: Site) -> Iterator[tuple[str, str, Outcome]]:
    """Digest, check and outcome, read from the files as they are."""
    for path in site.evidence.rglob("verify*.json"):
        document = json.loads(path.read_text())
        for check in document["checks"]:
            yield document["digest"], f"{check['component']}/{check['check']}", check["outcome"]


def at_random(site: Site, seed: int) -> None:
    """Leave builds and verifications of both targets, most of them good."""
    chance = random.Random(seed)
    pool = []
    for name in (NEW, OLD):
        for platform in (AMD64, ARM64):
            for i in range(chance.choice((1, 1, 1, 2))):
                digest = site.stage(name, platform, f"{name}{platform}{i}".encode())
                pool.append(digest)
                if chance.random() < 0.95 and (i == 0 or chance.random() < 0.2):
                    message = name if chance.random() < 0.95 else NEW
                    site.built(message, {platform: digest}, f"{digest[7:]}/result.json")
                for k in range(chance.choice((0, 1, 1, 1, 1, 2))):
                    about = digest if chance.random() < 0.95 else chance.choice(pool)
                    outcomes: dict[str, Outcome] = {
                        check: "failed" if chance.random() < 0.5 else "skipped"
                        for check in passing(name) if chance.random() < 0.004
                    }  # fmt: skip
                    site.verified(about, platform, f"{digest[7:]}/verify{k}.json", outcomes, name)


def test_whatever_the_evidence_tags_name_only_what_passed(tmp_path: Path) -> None:
    states: list[str] = []
    site = Site(tmp_path)
    for seed in range(40):
        site.fake, site.evidence = FakeRegistry(HOST), tmp_path / str(seed)
        site.evidence.mkdir()
        at_random(site, seed)
        done = site.publish("*")
        states += done.states
        passed: dict[str, set[str]] = {}
        failed: set[str] = set()
        for digest, check, outcome in evidence_of(site):
            passed.setdefault(digest, set()).update({check} if outcome == "passed" else ())
            failed |= {digest} if outcome == "failed" else set()
        for tag in site.tags():
            index = site.fake.at("acme/tiny").find(tag)
            assert index
            children = manifests_of(index.document)
            assert [child.platform for child in children] == [AMD64, ARM64]
            name = index.document["annotations"]["imagebuild.target"]
            # A rule may have found nothing to look at in an image that could be read.
            wanted = {c for c, o in passing(name).items() if o == "passed" and not c.startswith("image/")}
            for child in children:
                assert child.digest not in failed, f"{tag} names an image with a failed check"
                assert wanted | {"image/readable"} <= passed[child.digest], f"{tag} names what nobody verified"
        assert not incomplete(site.fake)
        assert all((target.state == "refused") == bool(target.reasons) for target in done.result.targets)
    # Were the evidence all good or all bad, this would prove little.
    assert 10 < states.count("published") < 70
    assert states.count("refused") == 80 - states.count("published")
