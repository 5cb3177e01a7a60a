"""The images on offer: read from a plan and a catalogue, renamed for a registry, addressed for enroot."""

from __future__ import annotations

from imagebuild.jobs.offer import enroot_reference
from tests import catalog_samples


def test_enroot_separates_the_registry_and_takes_a_digest_where_a_tag_stands() -> None:
    digest = catalog_samples.digest(1)
    for reference, address in {
        "ghcr.io/team/image:1": "ghcr.io#team/image:1", "localhost:5000/image:1": "localhost:5000#image:1",
        "team/image:1": "team/image:1", f"localhost:5000/a:1.2@{digest}": f"localhost:5000#a:{digest}",
    }.items():  # fmt: skip
        assert enroot_reference(reference) == f"docker://{address}"
