"""Publishing to the distribution's docker-registry with faults of registries, and the amount of transferred data.

Images and results are generated; nothing is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from imagebuild.core.errors import CommandError
from imagebuild.oci.attestation import KINDS, read_attestations
from imagebuild.oci.registry import connect_registry
from imagebuild.project.records import Published
from imagebuild.publish.signatures import Cosign, Signer
from tests.conftest import data, ran
from tests.docker.conftest import need, own_registry
from tests.docker.test_attest import verify_attestation
from tests.faulty import Faulty, in_front_of
from tests.publish_fakes import AMD64, ARM64, COMMIT, NEW, Site

pytestmark = pytest.mark.docker
WRITES = ("PUT", "POST", "PATCH", "DELETE")


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    """Run a registry that refuses deletion, behind a proxy."""
    with own_registry(tmp_path / "registry", deletes=False) as address, in_front_of(address) as proxy:
        yield proxy


@pytest.fixture
def site(faulty: Faulty, tmp_path: Path) -> Site:
    """Return a site with a staged and verified target for two platforms."""
    made = Site(tmp_path / "site", host=faulty.address)
    made.ready(NEW, registry=connect_registry(faulty.address))
    faulty.clear()
    return made


def publish(site: Site, signer: Signer | None = None) -> Published:
    """Publish with new registry clients, like a new process."""
    return site.publish(connect=cache(connect_registry), signer=signer).only


def tags(site: Site) -> set[str]:
    """Return the tags of images. This registry also stores attestations under tags; they are left out."""
    found = connect_registry(site.host).at("acme/tiny").tags()
    return {tag for tag in found if not tag.startswith("sha256-")}


TAGS = {f"cuda13.0-tool3.4-{COMMIT[:7]}", "cuda13.0", "latest"}


@pytest.mark.parametrize("path", ["mount=", "/blobs/", "/manifests/sha256:", "/manifests/cuda"])
def test_a_token_that_expires_in_the_middle(site: Site, faulty: Faulty, path: str) -> None:
    expired = faulty.rule("expired", "PUT|POST|HEAD", path)
    assert publish(site).state == "published"
    assert expired.times == 0
    assert faulty.count("GET", "other") > 0, "another token was asked for"
    assert tags(site) == TAGS


@pytest.mark.parametrize("command", ["attest-blob", "sign"])
def test_signing_that_fails_between_copy_and_tag_is_made_up_for(site: Site, tmp_path: Path, command: str) -> None:
    """A real cosign, of which calls of this command fail after the second."""
    need("cosign")
    cosign = Cosign({"COSIGN_PASSWORD": ""})
    cosign("generate-key-pair", "--output-key-prefix", tmp_path / "cosign")
    calls: list[str] = []

    def fails(program: str, *arguments: str, env: dict[str, str]) -> str:
        calls.extend(arguments[:1] if "--help" not in arguments else ())
        if arguments[0] == command and calls.count(command) > 2:
            raise CommandError("the log does not answer")
        return cosign.run(program, *arguments, env=env)

    good = Signer(str(tmp_path / "cosign.key"), log=False, cosign=cosign, signs=True)
    done = publish(site, replace(good, cosign=replace(cosign, run=fails)))
    assert (done.state, done.reasons, tags(site)) == ("failed", ("the log does not answer",), set())
    done = publish(site, good)
    assert (done.state, tags(site)) == ("published", TAGS)
    assert publish(site, good).state == "unchanged"

    # The attestations of the platforms are also attached to the index, so cosign finds them by the tag.
    place = connect_registry(site.host).at("acme/tiny")
    listed = [item.kind for item in read_attestations(place, str(done.digest))]
    assert listed.count("verification") == 2
    key = tmp_path / "cosign.pub"
    statements = verify_attestation(cosign, f"{place}:latest", "verification", key)
    assert {s["subject"][0]["digest"]["sha256"] for s in statements} == {str(done.digest).removeprefix("sha256:")}
    assert {s["predicate"]["platform"] for s in statements} == {AMD64, ARM64}


def test_oras_finds_by_tag_what_is_attached(site: Site) -> None:
    need("oras")
    done = publish(site)
    for platform, subject in (("", str(done.digest)), *done.platforms.items()):
        more = ("--platform", platform) if platform else ()
        discover = ("oras", "discover", "--plain-http", "--format", "json", *more, f"{site.host}/acme/tiny:latest")
        printed = ran(*discover, check=True).stdout
        found = {item["digest"]: item["annotations"] for item in json.loads(printed)["manifests"]}
        assert found.keys() == {item.digest for item in connect_registry(site.host).at("acme/tiny").referrers(subject)}
        kinds = [notes["in-toto.io/predicate-type"] for notes in found.values()]
        assert sorted(kinds) == sorted([KINDS["provenance"], KINDS["verification"]] * (1 if platform else 2))


def test_edited_results_are_refused(tmp_path: Path) -> None:
    with own_registry(tmp_path / "registry", deletes=False) as address:
        for number, (name, row) in enumerate(data("publish/edited").items()):
            site = Site(tmp_path / str(number), host=address)
            assert row["said"] in site.refusal(row, cache(connect_registry)), name
            assert not tags(site), name
        good = Site(tmp_path / "good", host=address)
        good.ready(NEW, registry=connect_registry(address))
        assert publish(good).state == "published"


TARGETS = 8


def test_unchanged_targets_move_no_blob(tmp_path: Path, faulty: Faulty) -> None:
    site = Site(tmp_path / "site", host=faulty.address)
    versions = ", ".join([*(f'"12.{n}"' for n in range(TARGETS - 1)), '"13.0"'])
    site.files.replace("matrix.yaml", '["12.9", "13.0"]', f"[{versions}]")
    site.read()
    digests = site.ready(*(target.id for target in site.plan.targets), registry=connect_registry(faulty.upstream))

    def publish_all(revision: str = COMMIT) -> list[str]:
        faulty.clear()
        return site.publish(connect=cache(connect_registry), origin={"revision": revision}).states

    assert publish_all() == ["published"] * TARGETS
    assert faulty.count("DELETE") == 0
    assert publish_all() == ["unchanged"] * TARGETS
    assert [r for r in faulty.requests if r.method in WRITES] == []
    assert faulty.count(kind="blob") == 2 * TARGETS, "configurations are read, whose labels are compared"
    for old in list(site.evidence.rglob("result.json")):
        old.unlink()
    for (target, platform), digest in digests.items():
        site.built(target, {platform: digest}, revision="f" * 40)
    assert publish_all("f" * 40) == ["published"] * TARGETS
    assert faulty.count("PUT", "upload") == 2 * 2 * TARGETS, "statements about the new indexes, and no part of an image"
    assert not [r for r in faulty.requests if "mount=" in r.path]
