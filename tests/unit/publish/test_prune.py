"""What of the staged images is deleted, and what never is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from imagebuild.cli import app
from imagebuild.core import CommandError, ConfigError
from imagebuild.oci import (
    Attachment,
    Descriptor,
    connect_registry,
    copy_image,
    referrers_tag,
)
from imagebuild.project import staged_tag
from imagebuild.publish import PruneVerdict, Pruning, decide_pruning, parse_age, prune
from tests.conftest import Files
from tests.registry_fake import FakeRegistry, index, put_image, serve

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
LIMIT = timedelta(days=14)
STAGING, FINAL = "example/tiny-staging", "example/tiny"
STATEMENT = "application/vnd.in-toto+json"


@dataclass
class Site:
    """A staging repository and a published one, in the fake."""

    registry: FakeRegistry = field(default_factory=FakeRegistry)
    pushed: int = 0

    def push(self, days: float, parts: list[Descriptor] | None = None) -> tuple[str, list[Descriptor]]:
        """An index of two platforms, pushed so many days ago, and what it names."""
        self.pushed += 1
        parts = parts or [
            put_image(self.registry, STAGING, f"{self.pushed}-{platform}".encode(), platform=f"linux/{platform}")
            for platform in ("amd64", "arm64")
        ]
        digest = index(self.registry, STAGING, parts)
        self.tag(digest, days)
        return digest, parts

    def tag(self, digest: str, days: float) -> str:
        tag = staged_tag(digest, NOW - timedelta(days=days))
        self.registry.repositories[STAGING].tags[tag] = digest
        return tag

    def attach(self, subject: Descriptor, kind: str = STATEMENT, repository: str = STAGING) -> str:
        return self.registry.at(repository).attach(subject, Attachment("f", kind, b"{}"))

    @property
    def pruning(self) -> Pruning:
        return Pruning(self.registry.at(STAGING), (self.registry.at(FINAL),), LIMIT, NOW)

    def verdicts(self) -> dict[str, PruneVerdict]:
        return {v.staged.digest: v for v in decide_pruning(self.pruning.survey(), NOW, LIMIT)}

    def why(self, digest: str) -> str | None:
        return self.verdicts()[digest].kept

    def left(self) -> set[str]:
        return set(self.registry.repositories[STAGING].manifests)


@pytest.fixture
def site() -> Site:
    return Site()


def test_an_old_push_goes_with_all_that_is_its_own(site: Site) -> None:
    old, parts = site.push(30)
    sbom = site.attach(parts[0])
    young, young_parts = site.push(1)
    verdicts = site.verdicts()
    assert verdicts[young].kept == "pushed 24 h ago, younger than 14 d"
    assert verdicts[old].kept is None
    assert verdicts[old].parts == tuple(p.digest for p in parts)
    assert verdicts[old].attachments == (sbom,)
    gone, spared = site.pruning.delete(verdicts.values())
    assert (gone, spared) == (4, ())
    assert site.left() == {young, *(p.digest for p in young_parts)}
    assert site.registry.changed("delete")[-1] == (STAGING, old)  # its tag stays until all else is gone


def test_the_last_push_counts(site: Site) -> None:
    digest, _ = site.push(30)
    site.tag(digest, 2)
    assert "younger than 14 d" in str(site.why(digest))
    assert [s.pushed for s in site.pruning.survey().staged] == [NOW - timedelta(days=2)]


def tag(site: Site, name: str, digest: str) -> None:
    site.registry.repositories[STAGING].tags[name] = digest


def copy(site: Site, parts: list[Descriptor]) -> None:
    for part in parts:
        copy_image(part.digest, site.registry.at(STAGING), site.registry.at(FINAL))


def tag_attachment(site: Site, _: str, parts: list[Descriptor]) -> None:
    tag(site, "the-sbom", site.attach(parts[0]))


def attach_twice(site: Site, _: str, parts: list[Descriptor]) -> None:
    sbom = site.attach(parts[0])
    site.attach(Descriptor(site.registry.repositories[STAGING].manifests[sbom].media_type, sbom, 1), "a/signature")


def publish(site: Site, _: str, parts: list[Descriptor]) -> None:
    copy(site, parts)
    assert all(verdict.kept is None for verdict in site.verdicts().values()), "it is there, but nothing names it"
    index(site.registry, FINAL, parts[:1], tag="13.0-abc")


def attach_to_copy(site: Site, _: str, parts: list[Descriptor]) -> None:
    copy(site, parts)
    site.attach(parts[0], repository=FINAL)


def sign_by_tag(suffix: str) -> Callable[[Site, str, list[Descriptor]], None]:
    """What cosign did before version 3."""

    def arrange(site: Site, _: str, parts: list[Descriptor]) -> None:
        tag(site, f"{referrers_tag(parts[1].digest)}{suffix}", put_image(site.registry, STAGING, b"signature").digest)

    return arrange


STAGED, PUBLISHED = f"registry.test/{STAGING}", f"registry.test/{FINAL}"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (lambda site, digest, _: tag(site, "keep-this", digest), f"is tagged keep-this in {STAGED}"),
        (lambda site, _, parts: tag(site, "keep-this", parts[1].digest), f" is tagged keep-this in {STAGED}"),
        (lambda site, _, parts: index(site.registry, STAGING, [parts[1]], tag="x"), f" is part of {STAGED}:x"),
        *((sign_by_tag(suffix), f"{suffix} in {STAGED}") for suffix in (".sig", ".att", ".sbom")),
        (publish, f" is part of {PUBLISHED}:13.0-abc"),
        (lambda site, _, parts: site.attach(parts[0], BUNDLE), f" is referred to by {BUNDLE} in {STAGED}"),
        (attach_to_copy, f" is referred to by {STATEMENT} in {PUBLISHED}"),
        (tag_attachment, "which is tagged the-sbom"),
        (attach_twice, "which something else refers to"),
    ],
)
def test_what_keeps_an_image(site: Site, arrange: Callable[[Site, str, list[Descriptor]], object], reason: str) -> None:
    """Other tags for it, for a part or for an index with a part; what refers to it and is not only ours; publishing."""
    digest, parts = site.push(30)
    site.attach(parts[0])
    assert site.why(digest) is None
    arrange(site, digest, parts)
    assert reason in str(site.why(digest))


def test_shared_parts_stay_with_the_young(site: Site) -> None:
    old, parts = site.push(30)
    young, _ = site.push(1, [parts[0], put_image(site.registry, STAGING, b"new", platform="linux/arm64")])
    verdict = site.verdicts()[old]
    assert (verdict.kept, verdict.parts) == (None, (parts[1].digest,))
    site.pruning.delete([verdict])
    assert parts[0].digest in site.left()
    assert {old, parts[1].digest}.isdisjoint(site.left())
    assert young in site.left()


def test_a_push_that_is_part_of_a_younger_one_stays(site: Site) -> None:
    _, parts = site.push(1)
    site.tag(parts[0].digest, 30)
    assert "is part of" in str(site.why(parts[0].digest))


def test_an_index_and_a_push_that_is_part_of_it_both_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "BATCH", 1)
    digest, parts = site.push(30)
    site.tag(parts[0].digest, 31)
    gone, spared = site.pruning.delete(site.verdicts().values())
    assert (gone, spared, site.left()) == (3, (), set())
    assert digest


@pytest.mark.parametrize("name", ["keep-this", "staged", "published"])
def test_what_is_needed_after_all_is_not_deleted(site: Site, name: str) -> None:
    old, parts = site.push(30)
    other, _ = site.push(31)
    pruning = site.pruning
    verdicts = decide_pruning(pruning.survey(), NOW, LIMIT)
    assert [v.kept for v in verdicts] == [None, None]
    if name == "staged":
        site.tag(old, 0)
    elif name == "published":
        publish(site, old, parts)
    else:
        tag(site, name, old)
    gone, [spared] = pruning.delete(verdicts)
    assert gone == 3
    assert (spared.staged.digest, old in site.left(), other in site.left()) == (old, True, False)


def test_batches(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "BATCH", 2)
    shared = put_image(site.registry, STAGING, b"shared")
    for days in range(20, 27):
        site.push(days, [shared, put_image(site.registry, STAGING, str(days).encode(), platform="linux/arm64")])
    pruning = site.pruning
    gone, spared = pruning.delete(decide_pruning(pruning.survey(), NOW, LIMIT))
    assert (gone, spared, site.left()) == (15, (), set())


def test_a_registry_that_deletes_no_part_of_an_index(site: Site) -> None:
    old, _ = site.push(30)

    def before(what: str, repository: str, name: str) -> None:
        if what == "delete" and name != old and old in site.left():
            raise CommandError("is part of an index")

    site.registry.before = before
    pruning = site.pruning
    assert pruning.delete(decide_pruning(pruning.survey(), NOW, LIMIT))[0] == 3
    assert not site.left()


def test_other_tags_are_no_pushes(site: Site) -> None:
    digest, _ = site.push(30)
    tags = site.registry.repositories[STAGING].tags
    tags.clear()
    tags |= {"staged-20260101T000000Z-000000000000": digest, "staged-20269901T000000Z-" + digest[7:19]: digest}
    assert site.pruning.survey().staged == ()


def test_ages() -> None:
    assert [parse_age(t) for t in ("36h", "14d", "2w", "0d")] == [
        timedelta(hours=36), timedelta(days=14), timedelta(days=14), timedelta()
    ]  # fmt: skip
    for text in ("14", "d", "-1d", "1.5d", "14 d", ""):
        with pytest.raises(ConfigError, match="--older-than"):
            parse_age(text)


@pytest.fixture
def server() -> Iterator[FakeRegistry]:
    with serve() as behaviour:
        yield behaviour


def run(tiny: Files, server: FakeRegistry, *args: str) -> tuple[int, str]:
    matrix = ["--matrix", str(tiny.root / "matrix.yaml"), "--dockerfiles", str(tiny.root / "dockerfiles")]
    done = CliRunner().invoke(app, ["prune", *args, *matrix, "--registry", f"{server.address}/example"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_mistakes(tiny: Files, server: FakeRegistry) -> None:
    with pytest.raises(ConfigError, match=r"tinny: no such image.*did you mean"):
        run(tiny, server, "tinny")
    assert "nothing was pushed" in run(tiny, server)[1]


@pytest.mark.parametrize("api", [True, False])
def test_few_questions(server: FakeRegistry, api: bool) -> None:
    server.referrers_api, server.page = api, 100
    site = Site(server)
    for _ in range(20):
        site.push(30)
    many = put_image(server, FINAL, b"published")
    server.repositories[FINAL].tags = {f"t{i}": many.digest for i in range(200)}
    registry = connect_registry(server.address)
    pruning = Pruning(registry.at(STAGING), (registry.at(FINAL),), LIMIT, NOW)
    assert all(not v.kept for v in decide_pruning(pruning.survey(), NOW, LIMIT))
    # A few questions for each image, none for each published tag: nothing staged is there.
    assert len(server.asked) <= 20 * (2 + 3 * 2) + (1 if api else 10)
