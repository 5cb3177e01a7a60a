"""The registry client with the distribution's docker-registry, through every fault, and docker as the one who pulls."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.oci import (
    MANIFEST,
    Attachment,
    DeletionDisabled,
    Descriptor,
    Registry,
    RepositoryAt,
    blob_path,
    blobs_named,
    connect_registry,
    copy_image,
    push_image,
)
from imagebuild.project import staged_tag
from imagebuild.publish import short_digest
from tests import layouts
from tests.docker.conftest import MARK, Tiny, finish, own_registry, until
from tests.faulty import Fault, Faulty

pytestmark = pytest.mark.docker

STAGING, FINAL = "example/tiny-staging", "example/tiny"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> layouts.Layout:
    return layouts.make(tmp_path_factory.mktemp("layout"), os.urandom(4_000_000))


def connect(address: str, backoff_s: float = 0.01) -> Registry:
    made = connect_registry(address, patience_s=30, environ={"IMAGEBUILD_CONFIG": ""})
    made.backoff_s = backoff_s
    return made


def same(registry: Registry, repository: str, layout: layouts.Layout) -> bool:
    """Whether the registry gives back all of the layout, digest by digest."""
    named = {layout.digest, *(manifest.digest for manifest in layout.manifests)}
    for digest, _ in blobs_named(layout.folder, layout.digest):
        manifest = registry.manifest(repository, digest) if digest in named else None
        content = manifest.content if manifest else registry.blob(repository, digest)
        if content != blob_path(layout.folder, digest).read_bytes():
            return False
    return True


COPIED: tuple[Fault, ...] = ("busy", "broken", "drop-before", "drop-after", "cut")
FAULTS: list[tuple[Fault, str, str]] = [
    *[(fault, "PUT", "/blobs/uploads/") for fault in
      ("busy", "broken", "drop-before", "drop-after", "cut", "lose", "forget", "slow")],
    *[(fault, "PUT", "/manifests/") for fault in ("busy", "broken", "drop-before", "drop-after", "cut", "lose")],
    *[(fault, "POST", "/uploads/$") for fault in ("busy", "broken", "drop-before", "drop-after")],
    *[(fault, "HEAD", "") for fault in ("busy", "broken", "drop-before", "drop-after")],
]  # fmt: skip


def test_push_through_each_fault(registry: str, faulty: Faulty, layout: layouts.Layout) -> None:
    for number, (fault, method, path) in enumerate(FAULTS):
        repository = f"push/r{number}"
        rule = faulty.rule(fault, method, path, times=3, seconds=0.1)
        push_image(layout.folder, layout.digest, connect(faulty.address), repository, "t")
        assert rule.times == 0, rule
        assert [r.fault for r in faulty.requests if r.fault] == [fault] * 3
        direct = connect(registry)
        assert direct.digest(repository, "t") == layout.digest
        assert same(direct, repository, layout), rule
        faulty.clear()


def test_copy_through_each_fault(registry: str, faulty: Faulty, layout: layouts.Layout, tmp_path: Path) -> None:
    push_image(layout.folder, layout.digest, connect(registry), STAGING)
    with own_registry(tmp_path / "other") as other:
        for number, fault in enumerate(COPIED):
            for place in ("/manifests/", "/blobs/"):
                source, target = (
                    RepositoryAt(connect(faulty.address), STAGING),
                    RepositoryAt(connect(other), f"copy/{place[1]}{number}"),
                )
                rule = faulty.rule(fault, "GET", place, times=2)
                moved = copy_image(layout.digest, source, target)
                assert (rule.times, moved["blobs"]) == (0, 3)
                assert same(connect(other), target.repository, layout)
                faulty.clear()


def test_docker_pulls_what_was_pushed(faulty: Faulty, client: DockerClient, tmp_path: Path) -> None:
    for fault in ("busy", "broken", "drop-after", "lose", "forget"):
        faulty.rule(fault, "PUT", "/blobs/uploads/")
    made = layouts.make(tmp_path, b"content", ("linux/amd64",))
    push_image(made.folder, made.digest, connect(faulty.address), f"{MARK}/pulled")
    assert len([r for r in faulty.requests if r.fault]) == 5
    name = f"{faulty.address}/{MARK}/pulled@{made.digest}"
    client.images.pull(name)
    try:
        assert client.images.get(name).attrs["Architecture"] == "amd64"
    finally:
        client.images.remove(name, force=True)


def test_prune(registry: str, tiny: Tiny, tmp_path: Path) -> None:
    direct = connect(registry)
    now = datetime.now(UTC)
    pushed = [layouts.make(tmp_path / str(i), os.urandom(1000)) for i in range(3)]
    old, signed, young = pushed
    for made in pushed:
        tag = staged_tag(made.digest, now - timedelta(days=1 if made is young else 30))
        push_image(made.folder, made.digest, direct, STAGING, tag)
    # What is published is a copy, which stays.
    copy_image(old.digest, RepositoryAt(direct, STAGING), RepositoryAt(direct, FINAL))
    subject = Descriptor(MANIFEST, signed.manifests[0].digest, signed.manifests[0].size)
    direct.attach(STAGING, subject, Attachment("f", "application/vnd.dev.sigstore.bundle.v0.3+json", b"{}"))

    arguments = ("prune", "--registry", f"{registry}/example")
    done = tiny.imagebuild(*arguments)
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("sha256:")}
    assert rows[short_digest(old.digest)].endswith("delete")
    assert " has sha256-" in rows[short_digest(signed.digest)]
    assert "too young" in rows[short_digest(young.digest)]
    assert "1 would be deleted; add --yes to delete them." in done.out
    assert all(same(direct, STAGING, made) for made in pushed)

    done = tiny.imagebuild(*arguments, "--yes")
    assert "Deleted 1 image, 3 manifests" in done.out
    assert [direct.digest(STAGING, digest) for digest in (old.digest, *(m.digest for m in old.manifests))] == [None] * 3
    assert all(same(direct, STAGING, made) for made in (signed, young))
    assert same(direct, FINAL, old)
    assert all(old.digest[7:19] not in tag for tag in direct.tags(STAGING))
    assert "Nothing to delete." in tiny.imagebuild(*arguments, "--yes").out


def test_prune_where_nothing_may_be_deleted(tiny: Tiny, layout: layouts.Layout, tmp_path: Path) -> None:
    with own_registry(tmp_path / "frozen", deletes=False) as address:
        tag = staged_tag(layout.digest, datetime.now(UTC) - timedelta(days=30))
        push_image(layout.folder, layout.digest, connect(address), STAGING, tag)
        done = tiny.imagebuild("prune", "--registry", f"{address}/example", "--yes", expect=4)
        assert "does not let images be deleted (405)" in done.err
        assert same(connect(address), STAGING, layout)
        with pytest.raises(DeletionDisabled):
            connect(address).delete(STAGING, layout.digest)


def test_ctrl_c(faulty: Faulty, tiny: Tiny, layout: layouts.Layout) -> None:
    """It ends at once, though the registry does not answer."""
    push_image(
        layout.folder,
        layout.digest,
        connect(faulty.address),
        STAGING,
        staged_tag(layout.digest, datetime.now(UTC)),
    )
    rule = faulty.rule("slow", "GET", "/manifests/staged", seconds=600)
    process = tiny.imagebuild.start("prune", "--registry", f"{faulty.address}/example")
    assert until(lambda: rule.times == 0)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.status == 130
    assert "Traceback" not in done.err
