"""Publishing that is interrupted anywhere, another publisher meanwhile, and random evidence."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.verification import Outcome
from imagebuild.core.errors import CommandError
from imagebuild.oci.layout import blobs_of, manifests_of
from imagebuild.project.records import Published
from tests.faulty import Answer
from tests.publish_fakes import AMD64, ARM64, COMMIT, HOST, NEW, OLD, Site, passing
from tests.registry_fake import FakeRegistry, Request

TAG = f"cuda13.0-tool3.4-{COMMIT[:7]}"


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
