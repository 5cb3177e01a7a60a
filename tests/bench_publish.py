"""What publishing 20 targets moves: a real registry behind a proxy that counts."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from imagebuild.oci import connect_registry
from imagebuild.publish import PublishTools
from tests import registries
from tests.faulty import Faulty, in_front_of
from tests.publish_fakes import AMD64, ARM64, HOST, MATRIX, Done, Site

TARGETS = 20
SHARED, OWN = (30_000_000, 20_000_000, 5_000_000), 1_000_000
"""Bytes of the layers that all images of a platform share, and of each one's own."""


def measure_publish() -> list[tuple[str, str, str]]:
    """Rows of docs/evidence/benchmarks.md."""
    with (
        tempfile.TemporaryDirectory() as name,
        registries.distribution(Path(name) / "registry") as address,
        in_front_of(address) as faulty,
    ):
        site = site_of(Path(name) / "site", faulty.address)
        began = time.perf_counter()
        digests = staged(site, address)
        rows = [("20 targets × 2 platforms pushed to staging, seconds", f"{time.perf_counter() - began:.1f} s", "")]
        client = cache(connect_registry)

        def publish() -> Done:
            return site.publish(tools=PublishTools(client))

        rows += _measured("first publish: blobs are in staging", publish, faulty)
        for old in list(site.evidence.rglob("result.json")):
            old.unlink()
        for (target, platform), digest in digests.items():
            site.built(target, {platform: digest}, revision="f" * 40)
        rows += _measured("publish of the next commit, all images unchanged", publish, faulty)
        rows += _measured("run once more", publish, faulty)
    return rows


def site_of(folder: Path, host: str) -> Site:
    """A project of 20 targets in a registry."""
    site = Site(folder, host=host)
    versions = ", ".join([*(f'"12.{n}"' for n in range(TARGETS - 1)), '"13.0"'])
    matrix = MATRIX.replace(HOST, host).replace('["12.9", "13.0"]', f"[{versions}]")
    site.files.write("matrix.yaml", matrix)
    site.read()
    return site


def staged(
    site: Site, address: str, shared_sizes: Sequence[int] = SHARED, own: int = OWN
) -> dict[tuple[str, str], str]:
    """Stage, build and verify all targets with random layers of these sizes: target and platform → digest."""
    registry, chance = connect_registry(address), random.Random(1)
    shared = {platform: [chance.randbytes(size) for size in shared_sizes] for platform in (AMD64, ARM64)}
    digests = {}
    for target in site.plan.targets:
        for platform in (AMD64, ARM64):
            layer = chance.randbytes(own)
            digest = site.stage(target.id, platform, layer, registry, shared=shared[platform])
            site.built(target.id, {platform: digest})
            site.verified(digest, platform, name=target.id)
            digests[target.id, platform] = digest
    return digests


def _measured(what: str, publish: Callable[[], Done], faulty: Faulty) -> list[tuple[str, str, str]]:
    faulty.clear()
    began = time.perf_counter()
    done = publish()
    took = time.perf_counter() - began
    assert len(done.states) == TARGETS
    assert set(done.states) <= {"published", "unchanged"}, done.reasons
    writes = sum(faulty.count(method) for method in ("PUT", "POST", "PATCH"))
    kinds = {kind: faulty.carried(kind) / 1e3 for kind in ("manifest", "upload", "blob", "referrers")}
    listed = ", ".join(f"{kind} {size:.0f} kB" for kind, size in kinds.items())
    return [
        (f"{what}: bytes of requests and answers", f"{faulty.carried() / 1e3:.0f} kB ({listed})", ""),
        (f"{what}: requests, of which write", f"{faulty.count()}, {writes}", ""),
        (f"{what}: seconds", f"{took:.1f} s", ""),
    ]
