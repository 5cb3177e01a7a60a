"""Jobs that run a published image."""

from __future__ import annotations

import pytest

from imagebuild.catalog.models import Catalog
from imagebuild.errors import ConfigError
from imagebuild.jobs import resolve
from imagebuild.jobs.image import Offer
from imagebuild.jobs.published import published
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.slurm import enroot
from imagebuild.models import Gpu
from tests import catalog_samples
from tests.unit.job_fakes import facts, machines, request

ARCHITECTURES = {"90": Gpu(gpus="H100", cuda=">=11.8"), "103": Gpu(gpus="B300", cuda=">=12.9")}


def catalog() -> Catalog:
    """Images as a job needs them: with the components of the stacks."""
    made = catalog_samples.catalog(200)
    images = tuple(
        one.model_copy(update={"versions": {**one.versions, "hpcx": "2.51"}}) if one.image == "hpcx" else one
        for one in made.images
    )
    return made.model_copy(update={"images": images})


def job(line: str, found: Catalog, image: str | None = None) -> Job:
    wanted = request(line).__class__(**{**vars(request(line)), "image": image})
    offer = published(Offer(architectures=ARCHITECTURES), found)
    return resolve.resolve(wanted, machines()[wanted.profile], facts(), offer)


def test_the_newest_that_fits_by_digest() -> None:
    found = catalog()
    made = job("mpijob --profile h100 --fabric ib", found)
    fits = [one for one in found.images if one.image == "hpcx" and one.axes["variant"] == "runtime"]
    fits = [one for one in fits if (one.axes["cuda"], one.axes["os"]) == ("13.4.2", "ubuntu26.04")]
    assert len(fits) > 1
    assert made.image.reference == fits[0].reference
    assert fits[0].created == max(one.created for one in fits)
    assert made.image.nccl == "2.32.3"


def test_an_image_is_found_by_its_tag_or_target() -> None:
    found = catalog()
    one = next(image for image in found.images if image.axes["cuda"] == "12.9.2" and image.axes["variant"] == "runtime")
    by_tag = job("mpijob --profile h100 --fabric ib", found, f"{one.repository}:{one.tag}")
    assert by_tag.image.reference == f"{one.repository}:{one.tag}"
    assert by_tag.image.nccl == "2.32.3"
    assert job("mpijob --profile h100 --fabric ib", found, one.target).image.reference == one.reference


def test_arm64_needs_an_image_for_it() -> None:
    found = catalog()
    only = tuple(one.model_copy(update={"platforms": one.platforms[:1]}) for one in found.images)
    with pytest.raises(ConfigError, match="no published image that fits so far runs on arm64"):
        job("mpijob --profile gb200-nvl72 --fabric ib --racks 1", found.model_copy(update={"images": only}))


def test_enroot_takes_a_digest_where_a_tag_stands() -> None:
    digest = catalog_samples.digest(1)
    assert enroot(f"ghcr.io/team/image@{digest}") == f"docker://ghcr.io#team/image:{digest}"
    assert enroot(f"localhost:5000/team/image:1.2@{digest}") == f"docker://localhost:5000#team/image:{digest}"
