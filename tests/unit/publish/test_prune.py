"""What of the staged images is deleted, and what never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from imagebuild.core.errors import CommandError
from imagebuild.oci.layout import INDEX, Attachment, Descriptor, Manifest, referrers_tag
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Repository
from imagebuild.project.plan import staged_tag
from imagebuild.publish.prune import PruneVerdict, delete_staged, judge_staged
from tests import attached
from tests.registry_fake import FakeRegistry, index, put_image
from tests.unit.publish.conftest import Signers

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
LIMIT = timedelta(days=14)
STAGING = "example/tiny-staging"


@dataclass
class Site:
    """A staging repository in the fake."""

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
        self.tag(digest, staged_tag(digest, NOW - timedelta(days=days)))
        return digest, parts

    def tag(self, digest: str, name: str) -> None:
        self.registry.repositories[STAGING].tags[name] = digest

    @property
    def place(self) -> Repository:
        return self.registry.at(STAGING)

    def verdicts(self) -> dict[str, PruneVerdict]:
        return {verdict.digest: verdict for verdict in judge_staged(self.place, NOW, LIMIT)}

    def prune(self) -> int:
        return delete_staged(self.place, self.verdicts().values())

    def left(self) -> set[str]:
        return set(self.registry.repositories[STAGING].manifests)


@pytest.fixture
def site() -> Site:
    return Site()


def test_an_old_push_goes_and_a_young_one_stays(site: Site) -> None:
    old, parts = site.push(30)
    young, young_parts = site.push(1)
    verdicts = site.verdicts()
    assert (verdicts[young].verdict, verdicts[old].verdict) == ("too young", "delete")
    assert verdicts[old].parts == tuple(part.digest for part in parts)
    assert site.prune() == 3
    assert site.left() == {young, *(part.digest for part in young_parts)}
    assert site.registry.changed("delete")[-1] == (STAGING, old)  # its tag stays until all else is gone
    assert site.prune() == 0


def by_tag(suffix: str) -> Callable[[Site, str, list[Descriptor]], None]:
    """As registries without an API list what refers to an image, and as cosign did before version 3."""
    return lambda site, _, parts: site.tag(parts[0].digest, referrers_tag(parts[1].digest) + suffix)


@pytest.mark.parametrize(
    ("arrange", "verdict"),
    [
        (lambda site, digest, _: site.tag(digest, staged_tag(digest, NOW - timedelta(days=2))), "too young"),
        (lambda site, digest, _: site.tag(digest, "keep-this"), "needed"),
        (lambda site, _, parts: site.tag(parts[1].digest, "keep-this"), "needed"),
        (lambda site, _, parts: index(site.registry, STAGING, [parts[1]], tag="x"), "needed"),
        *((by_tag(suffix), "needed") for suffix in ("", ".sig", ".att")),
        (lambda site, _, parts: site.place.attach(parts[0], Attachment("f", "a/b", b"")), "needed"),
    ],
)  # fmt: skip
def test_what_keeps_an_image(
    site: Site, arrange: Callable[[Site, str, list[Descriptor]], object], verdict: str
) -> None:
    """A younger push; another tag for it, for a part, or for an index with a part; what refers to a part."""
    digest, parts = site.push(30)
    assert site.verdicts()[digest].verdict == "delete"
    arrange(site, digest, parts)
    assert site.verdicts()[digest].verdict == verdict
    assert site.prune() == 0


def test_only_what_the_signer_signed_keeps_an_image(site: Site, signers: Signers) -> None:
    """Everybody who may push can attach a file, and could so keep every image for ever."""
    trust, kept = signers.trust(), dict[str, str]()
    for name in ("signature", "statement", "forged", "theirs"):
        digest, parts = site.push(30)
        reference = parse_reference(f"registry.test/{STAGING}@{digest}")
        kept[name] = digest
        if name == "statement":
            attached.attach(site.registry, STAGING, parts[0], "scan", attached.scan(parts[0].digest), signers.signer())
        elif name == "forged":
            attached.attach(site.registry, STAGING, parts[0], "scan", attached.scan(parts[0].digest))
        else:
            site.tag(parts[1].digest, f"{referrers_tag(digest)}.sig")
            signers.signer("ours" if name == "signature" else "theirs").sign([reference])
    verdicts = {v.digest: v.verdict for v in judge_staged(site.place, NOW, LIMIT, trust)}
    assert {name: verdicts[digest] for name, digest in kept.items()} == {
        "signature": "needed", "statement": "needed", "forged": "delete", "theirs": "delete"
    }  # fmt: skip
    assert {v.verdict for v in site.verdicts().values()} == {"needed"}


def test_shared_parts_stay_with_the_young(site: Site) -> None:
    old, parts = site.push(30)
    young, _ = site.push(1, [parts[0], put_image(site.registry, STAGING, b"new", platform="linux/arm64")])
    site.tag(parts[0].digest, staged_tag(parts[0].digest, NOW - timedelta(days=40)))
    verdicts = site.verdicts()
    assert (verdicts[old].verdict, verdicts[old].parts) == ("delete", (parts[1].digest,))
    assert verdicts[parts[0].digest].verdict == "needed"
    assert site.prune() == 2
    assert {young, parts[0].digest} <= site.left()


def test_parts_of_an_index_in_an_index_stay_with_it(site: Site) -> None:
    _, parts = site.push(30)
    inner = index(site.registry, STAGING, parts[:1])
    site.push(1, [site.registry.repositories[STAGING].manifests[inner].descriptor])
    site.prune()
    assert {part.digest for part in parts} & site.left() == {parts[0].digest}


@pytest.mark.parametrize("text", ['{"manifests": [{"digest": "@"}]}', '["@"]', '{"manifests": 5, "x": "@"}', "@"])
def test_what_is_not_a_manifest_keeps_the_images_that_it_names(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(FakeRegistry(referrers_api=False))
    (old, _), (named, parts) = site.push(30), site.push(30)
    sent = Manifest(text.replace("@", parts[0].digest).encode(), INDEX)
    site.registry.repositories[STAGING].manifests[sent.digest] = sent
    site.tag(sent.digest, staged_tag(sent.digest, NOW - timedelta(days=30)))
    verdicts = {digest: verdict.verdict for digest, verdict in site.verdicts().items()}
    assert verdicts == {old: "delete", named: "needed", sent.digest: "needed"}
    assert "is not a manifest or index" in capsys.readouterr().err
    site.tag(sent.digest, referrers_tag(old))  # the list of the attachments of the other image
    assert site.prune() == 0


def test_a_registry_that_deletes_no_part_of_an_index(site: Site) -> None:
    old, parts = site.push(30)
    site.tag(parts[0].digest, staged_tag(parts[0].digest, NOW - timedelta(days=31)))

    def before(what: str, repository: str, name: str) -> None:
        if what == "delete" and name != old and old in site.left():
            raise CommandError("is part of an index")

    site.registry.before = before
    assert (site.prune(), site.left()) == (3, set())


def test_other_tags_are_no_pushes(site: Site) -> None:
    digest, _ = site.push(30)
    site.registry.repositories[STAGING].tags.clear()
    for time in ("20269901T000000Z", "2026101T000000Z"):
        site.tag(digest, f"staged-{time}-{digest[7:19]}")
    site.tag(digest, "staged-20260101T000000Z-000000000000")
    assert site.verdicts() == {}
