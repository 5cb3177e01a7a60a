"""Publishing that is interrupted anywhere, random evidence, and several publishers at once."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import CommandError
from imagebuild.oci import blobs_of, manifests_of
from imagebuild.project import Outcome, Published
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
    wanted = Site(tmp_path / "wanted")
    wanted.ready(NEW)
    wanted.publish()
    for n in itertools.count(1):
        site = Site(tmp_path / str(n))
        site.ready(NEW)
        interrupted = Interrupted(site.fake, n, done=done)
        first = site.publish().only
        if interrupted.writes < n:
            break
        assert first.state == "failed"
        assert site.publish().only.state in ("published", "unchanged")
        assert state(site.fake) == state(wanted.fake), f"write {n}"
    assert n > 15  # so many there are to interrupt


def test_a_failing_registry_is_told_with_its_own_exit_status(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.ready(NEW, OLD)
    site.verified("sha256:" + "0" * 64)

    def refuse(what: str, repository: str, name: str) -> None:
        if name == TAG:
            raise CommandError(f"{HOST}: {repository}:{name}: 503")

    site.fake.before = refuse
    done = site.publish()
    assert done.states == ["published", "failed"]
    assert done.result.exit_status == 4
    assert "503" in done.reasons
    assert "latest" not in site.tags(), "an alias was moved though the tag could not be given"


def test_what_is_lost_on_the_way_gets_no_tag(tmp_path: Path) -> None:
    """A registry that took a blob, and has it no more."""
    site = Site(tmp_path)
    site.ready(NEW)

    def lose(what: str, repository: str, name: str) -> None:
        held = site.fake.repositories.get("acme/tiny")
        if what == "manifest" and held and len(held.manifests) == 3 and held.blobs:
            layer = next(b.digest for m in held.manifests.values() for b in blobs_of(m.document))
            held.blobs.pop(layer, None)

    site.fake.before = lose
    done = site.publish().only
    assert done.state == "failed"
    assert not site.tags()


def other_publisher(site: Site, name: str = NEW) -> Site:
    """Another machine with the same commit and registry, whose build came out different."""
    other = Site(site.root / "other", fake=site.fake)
    other.ready(name, content=b"other")
    return other


def test_another_publisher_before_our_tag(tmp_path: Path) -> None:
    """While we copied, the tag was given to something else: it stays, and so do the aliases."""
    site = Site(tmp_path)
    site.ready(NEW)
    other = other_publisher(site)
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


@pytest.mark.parametrize(("while_given", "taken"), [("latest", TAG), (TAG, "latest")])
def test_another_publisher_that_does_not_look(tmp_path: Path, while_given: str, taken: str) -> None:
    """Nobody can keep it from moving our tag or alias, but it is seen and told."""
    site = Site(tmp_path)
    site.ready(NEW, OLD)
    site.publish(OLD)
    theirs = site.tags()["cuda12.9"]

    def meanwhile(what: str, repository: str, name: str) -> None:
        if what == "manifest" and name == while_given:
            site.fake.repositories["acme/tiny"].tags[taken] = theirs

    site.fake.before = meanwhile
    done = site.publish(NEW)
    assert (done.states, done.result.exit_status) == (["failed"], 4)
    assert f"{taken}: another publisher moved it to {theirs} while this one moved it to" in done.reasons
    assert str(done.only.digest) in done.reasons
    assert site.tags()[taken] == theirs


@pytest.mark.parametrize("seed", range(8))
def test_two_publishers_of_the_same_target_never_mix(tmp_path: Path, seed: int) -> None:
    site = Site(tmp_path)
    site.ready(NEW)
    publishers = [site, other_publisher(site)]
    digests = {publisher.publish(dry_run=True).only.digest for publisher in publishers}
    chance = random.Random(seed)
    # Their calls follow each other in a random order.
    site.fake.before = lambda *_: time.sleep(chance.random() / 200)
    with ThreadPoolExecutor(2) as pool:
        done = [future.result().only for future in [pool.submit(publisher.publish) for publisher in publishers]]
    assert len(digests) == 2
    assert not incomplete(site.fake)
    assert set(site.tags().values()) <= digests
    assert "published" in [entry.state for entry in done] or all(entry.state == "failed" for entry in done)
    for entry in done:
        assert entry.state in ("published", "refused", "failed")
        assert entry.state == "published" or all(digest in "".join(entry.reasons) for digest in digests if digest)


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
    for seed in range(60):
        site = Site(tmp_path / str(seed))
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
    assert 15 < states.count("published") < 105
    assert states.count("refused") == 120 - states.count("published")
