"""The registry client with the distribution's docker-registry and every kind of fault."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagebuild.core.http import Patience
from imagebuild.oci.layout import Attachment, Layout
from imagebuild.oci.registry import Registry, Repository, connect_registry, copy_image, pull_image, push_image
from imagebuild.project.plan import staged_tag
from tests import layouts
from tests.docker.conftest import Tiny, own_registry
from tests.faulty import Fault, Faulty

pytestmark = pytest.mark.docker

STAGING, FINAL = "example/tiny-staging", "example/tiny"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> layouts.Made:
    return layouts.make(tmp_path_factory.mktemp("layout"), os.urandom(4_000_000))


def connect(address: str) -> Registry:
    return connect_registry(address, patience=Patience(30, backoff_s=0.01), environ={"IMAGEBUILD_CONFIG": ""})


def same(place: Repository | Layout, layout: layouts.Made) -> bool:
    """Return whether a repository or layout has all blobs and manifests of the layout, byte for byte."""
    named = {layout.digest, *(manifest.digest for manifest in layout.manifests)}
    for digest, _ in layout.layout.named(layout.digest):
        content = place.manifest(digest).content if digest in named else place.blob(digest)
        if content != layout.layout.path(digest).read_bytes():
            return False
    return True


ANY: tuple[Fault, ...] = ("busy", "broken", "drop-before", "drop-after", "cut")
FAULTS: dict[str, list[tuple[str, str, tuple[Fault, ...]]]] = {
    "push": [
        ("PUT", "/blobs/uploads/", (*ANY, "lose", "forget", "slow")), ("PUT", "/manifests/", (*ANY, "lose")),
        ("POST", "/uploads/$", ANY[:4]), ("HEAD", "", ANY[:4]),
    ],
    "publish": [("POST", "mount=", ANY[:4])],
    "copy": [("GET", "/manifests/", ANY), ("GET", "/blobs/", ANY)],
    "pull": [("GET", "/manifests/", ANY), ("GET", "/blobs/", ANY)],
    "attach": [("GET", "/manifests/", ANY), ("HEAD", "/manifests/", ANY[:4]), ("PUT", "/manifests/", (*ANY, "lose"))],
}  # fmt: skip
"""Maps each action to the method and path of requests, and to the faults that are injected into these requests."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_registry(tmp_path_factory.mktemp("other")) as address:
        yield address


@pytest.mark.parametrize("action", FAULTS)
def test_everything_gets_through_each_fault(
    registry: str, faulty: Faulty, other: str, layout: layouts.Made, tmp_path: Path, action: str
) -> None:
    staging = connect(registry).at(STAGING)
    push_image(layout.layout, layout.digest, staging)
    cases = [(fault, method, path) for method, path, faults in FAULTS[action] for fault in faults]
    for number, (fault, method, path) in enumerate(cases):
        near, name = connect(faulty.address), f"{action}/r{number}"
        rule = faulty.rule(fault, method, path, times=2, seconds=0.1)
        place: Repository | Layout = connect(registry).at(name)
        match action:
            case "push":
                push_image(layout.layout, layout.digest, near.at(name), "t")
                assert connect(registry).at(name).digest("t") == layout.digest
            case "publish":
                copy_image(layout.digest, near.at(STAGING), near.at(name))
                assert not [r for r in faulty.requests if (r.method, r.kind) == ("PUT", "upload")], "all is mounted"
            case "copy":
                place = connect(other).at(name)
                assert copy_image(layout.digest, near.at(STAGING), place)["blobs"] == 3
            case "pull":
                place = Layout(tmp_path / str(number))
                pull_image(f"{faulty.address}/{STAGING}@{layout.digest}", place)
            case "attach":
                subject = replace(layout.manifests[0], platform=None)
                own = near.at(STAGING).attach(subject, Attachment("f", "a/b", str(number).encode()))
                assert own in {item.digest for item in staging.referrers(subject.digest)}
                place = staging
        assert rule.times == 0, rule
        assert [r.fault for r in faulty.requests if r.fault] == [fault] * 2
        assert same(place, layout), rule
        faulty.clear()


def test_a_registry_is_left_alone_as_long_as_it_says(faulty: Faulty) -> None:
    faulty.rule("busy", seconds=1)
    began = time.monotonic()
    assert connect(faulty.address).at("a").tags() == ()
    assert time.monotonic() - began >= 1


def test_a_registry_that_dies_is_reported_while_it_is_tried_and_ends_the_command_soon(
    faulty: Faulty, layout: layouts.Made, tiny: Tiny
) -> None:
    faulty.rule("broken", times=10_000)
    began = time.monotonic()
    done = tiny.imagebuild("prune", "--registry", f"{faulty.address}/example", expect=4)
    assert time.monotonic() - began < 60
    answered = r"GET example/tiny-staging/tags/list: the server answered 500 \(UNKNOWN: injected\)"
    assert re.search(rf"for [2-9]\.\d s; .*{answered}; trying again", done.err)
    assert re.search(rf"{answered}; gave up after \d+ attempts in [12]\d s", done.err)


def test_prune(registry: str, tiny: Tiny, tmp_path: Path) -> None:
    staging, final = connect(registry).at(STAGING), connect(registry).at(FINAL)
    now = datetime.now(UTC)
    old, signed, young = pushed = [layouts.make(tmp_path / name, os.urandom(1000)) for name in "abc"]
    for made, days in ((old, 30), (signed, 30), (young, 1)):
        push_image(made.layout, made.digest, staging, staged_tag(made.digest, now - timedelta(days=days)))
    # A published image is a copy in another repository, so it stays.
    copy_image(old.digest, staging, final)
    subject = replace(signed.manifests[0], platform=None)
    staging.attach(subject, Attachment("f", "application/vnd.dev.sigstore.bundle.v0.3+json", b"{}"))

    arguments = ("prune", "--registry", f"{registry}/example")
    done = tiny.imagebuild(*arguments)
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("sha256:")}
    verdicts = ((old, "delete"), (signed, "needed"), (young, "too young"))
    assert all(rows[made.digest[:19]].endswith(verdict) for made, verdict in verdicts)
    assert all(same(staging, made) for made in pushed)

    assert "Deleted 1 image, 3 manifests" in tiny.imagebuild(*arguments, "--yes").out
    assert [staging.digest(digest) for digest in (old.digest, *(m.digest for m in old.manifests))] == [None] * 3
    assert all(same(staging, made) for made in (signed, young))
    assert same(final, old)
    assert all(old.digest[7:19] not in tag for tag in staging.tags())
    assert "Nothing to delete." in tiny.imagebuild(*arguments, "--yes").out


def test_prune_where_nothing_may_be_deleted(tiny: Tiny, layout: layouts.Made, tmp_path: Path) -> None:
    with own_registry(tmp_path / "frozen", deletes=False) as address:
        tag = staged_tag(layout.digest, datetime.now(UTC) - timedelta(days=30))
        push_image(layout.layout, layout.digest, connect(address).at(STAGING), tag)
        done = tiny.imagebuild("prune", "--registry", f"{address}/example", "--yes", expect=4)
        assert "does not allow deletions (405)" in done.err
        assert same(connect(address).at(STAGING), layout)
