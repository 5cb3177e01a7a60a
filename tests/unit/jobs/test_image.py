"""What a request leaves open: the image and its plug-in. More is in tests/data/jobs-have.yaml."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.jobs.image import choose_image
from imagebuild.jobs.job import Job, resolve_job
from imagebuild.jobs.offer import CatalogFile, Offer, PlanFile, planned_offer, published_offer
from imagebuild.project.plan import Plan
from imagebuild.project.records import Catalog, Checks
from tests import catalog_samples
from tests.unit.jobs.job_fakes import facts, profiles, request

IB = "mpijob --profile h100 --fabric ib"


@pytest.fixture
def planned(full_plan: Plan) -> Offer:
    return planned_offer(PlanFile.model_validate_json(full_plan.model_dump_json()), "ghcr.io/acme")


@pytest.fixture
def published() -> Catalog:
    """A catalogue whose images have the components of the stacks."""
    sample = catalog_samples.catalog(200)
    images = [
        image.model_copy(update={"versions": {**image.versions, "hpcx": "2.51"}}) if image.image == "hpcx" else image
        for image in sample.images
    ]
    return sample.model_copy(update={"images": tuple(images)})


def offer_of(catalog: Catalog, planned: Offer | None = None) -> Offer:
    return published_offer(CatalogFile.model_validate_json(catalog.model_dump_json()), planned or Offer())


def job_of(line: str, offer: Offer, image: str | None = None) -> Job:
    job_request = replace(request(line), image=image)
    return resolve_job(job_request, profiles()[job_request.profile], facts(), offer)


def test_without_image_the_newest_that_fits(planned: Offer, full_plan: Plan, project: Any) -> None:
    newest = job_of(IB, planned)
    names = {image.reference: image.id for image in planned.images}
    assert names[newest.image.reference] == "hpcx-cuda13.4.2-ubuntu26.04-runtime"
    assert newest.image.nccl == project.matrix.model.versions["nccl"][-1].version
    assert newest.image.arches == ("amd64", "arm64")
    planned_note, note, assumed = newest.messages[::-1]
    assert planned_note == (
        f"note: {newest.image.reference} comes from a plan, so nobody is known to have built, pushed and verified the "
        "image; to choose among verified images, use --catalog with a file from `imagebuild catalog`"
    )
    assert assumed.startswith("note: without --cluster, the job assumes NCCL_SOCKET_IFNAME=eth0 and NCCL_IB_HCA=mlx5;")
    bare = planned_offer(PlanFile.model_validate_json(full_plan.model_dump_json()))
    for image in (None, bare.images[0].id, bare.images[0].aliases[0]):
        with pytest.raises(ConfigError, match="the name contains no registry, so nodes cannot pull the image"):
            job_of(IB, bare, image)
    assert note.endswith("driver 580 or later; if the nodes have an older driver, set --param driver=VERSION")
    assert job_of(f"{IB} --param driver=580.65", planned).messages == (assumed, planned_note)
    assert "cuda12.9.1" in job_of(f"{IB} --param driver=570", planned).image.reference


def test_no_image_fits(planned: Offer, published: Catalog) -> None:
    amd64 = [image.model_copy(update={"platforms": image.platforms[:1]}) for image in published.images]
    only_amd64 = offer_of(published.model_copy(update={"images": tuple(amd64)}))
    for line, offer, problem in (
        (f"{IB} --param driver=500", planned, r"driver 500 rules out \d+.*; name an image with --image"),
        ("mpijob --profile p5 --fabric efa", planned, r"no image of the plan fits: the plug-in 'ofi' rules out \d+.*; "
         "build open with --with aws-ofi-nccl and add --with aws-ofi-nccl here, or name an"),
        (IB, Offer(), "^--image: no image of the plan contains nccl-tests; add it to the components of an image, or name one"),
        ("mpijob --profile gb200-nvl72 --fabric ib --racks 1", only_amd64, r"no published image fits: arm64 rules out \d+"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            job_of(line, offer)


def test_the_cuda_of_an_image_can_compile_for_the_gpu(planned: Offer, published: Catalog) -> None:
    old = tuple(image for image in planned.images if image.axes["cuda"].startswith("12.6"))
    older = tuple(image for image in published.images if image.axes["cuda"].startswith("12.6"))
    catalog = published.model_copy(update={"images": older})
    itself = offer_of(catalog.model_copy(update={"gpu_architectures": dict(planned.gpu_architectures)}))
    for offer in (replace(planned, images=old), offer_of(catalog, planned), itself):
        versions = {image.reference: image.axes["cuda"] for image in offer.images}
        assert versions[job_of(IB, offer).image.reference] == "12.6.3"
        with pytest.raises(ConfigError, match=r"fits: compute capability 10.3 rules out \d+; name an"):
            job_of("mpijob --profile b300 --fabric ib", offer)
    job_of("mpijob --profile b300 --fabric ib", offer_of(catalog))
    without = tuple(replace(image, axes={"os": "debian13", "variant": "runtime"}) for image in old)  # the axis cuda
    best = job_of("mpijob --profile b300 --fabric ib", replace(planned, images=without)).image
    assert best == job_of(f"{IB} --param driver=500", replace(planned, images=without), best.reference).image


def test_an_optional_plug_in_is_one_that_the_image_was_built_with(planned: Offer, published: Catalog) -> None:
    efa, target = "mpijob --profile p5 --nodes 2", "open-cuda13.5-debian13-runtime"
    with_plugin = [replace(image, components={**image.components, "aws-ofi-nccl": ""}) for image in planned.images]
    job = job_of(efa, replace(planned, images=tuple(image for image in with_plugin if image.image != "hpcx")))
    assert job.image.reference == "ghcr.io/acme/open:cuda13.5-debian13-runtime"  # of four releases of distributions
    values = {v.name: v.value for v in job.environment.variables if v.scope == "rank"}
    assert (job.image.stack, values["NCCL_NET_PLUGIN"], values["NCCL_NET"]) == ("open", "ofi", "Libfabric")
    for image in (target, "example.com/open:mine"):
        with pytest.raises(ConfigError, match="the image has no plug-in 'ofi'; build open with --with aws-ofi-nccl"):
            job_of(efa, planned, image)
    more = {"openmpi-git": "1", "nccl-tests": "1", "aws-ofi-nccl": "1"}
    images = [i.model_copy(update={"versions": {"nccl": "2.32.3", **more}}) for i in published.images]
    known = offer_of(published.model_copy(update={"images": tuple(images)}), planned)
    assert job_of(efa, known).image.stack == "open"


def test_images_of_the_plan_are_known_by_id_and_tag(planned: Offer) -> None:
    target = next(image for image in planned.images if image.id == "open-cuda13.5-debian13-runtime")
    by_id, by_tag = job_of(IB, planned, target.id), job_of(IB, planned, target.aliases[0])
    assert (by_id.image.reference, by_tag.image.reference) == (target.reference, target.aliases[0])
    assert by_tag.image.nccl == by_id.image.nccl
    assert {"OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_plm_ssh_args"} <= {v.name for v in by_id.environment.scopes["launcher"]}
    (note,) = job_of(f"{IB} --param interface=ib0 --param hca=mlx5", planned, "example.com/x:1").messages
    assert note == "note: the NCCL version of the image is not known; the job assumes 2.30.7; set it with --nccl"
    with pytest.raises(ConfigError, match=f"{target.reference}: the image has no plug-in 'ibext'"):
        job_of(f"{IB} --feature sharp", planned, target.id)


def test_published_images_the_newest_by_digest_others_by_tag_or_target(published: Catalog, planned: Offer) -> None:
    offer = offer_of(published, planned)
    newest = ("hpcx", "runtime", "13.4.2", "ubuntu26.04")
    fits = [i for i in published.images if (i.image, *map(i.axes.get, ("variant", "cuda", "os"))) == newest]
    fits = [image for image in fits if not image.platforms[0].checks[0].failed]
    assert len(fits) > 1
    assert fits[0].created == max(image.created for image in fits)
    chosen = job_of(IB, offer).image
    assert (chosen.reference, chosen.nccl, chosen.is_planned) == (fits[0].reference, "2.32.3", False)
    unchecked = fits[0].model_copy(
        update={"platforms": tuple(p.model_copy(update={"checks": ()}) for p in fits[0].platforms)}
    )
    others = tuple(unchecked if image is fits[0] else image for image in published.images)
    without = offer_of(published.model_copy(update={"images": others}), planned)
    assert job_of(IB, without).image.reference == fits[1].reference
    assert job_of(IB, without, unchecked.reference).image.arches == chosen.arches
    image = next(i for i in published.images if (i.axes["cuda"], i.axes["variant"]) == ("12.9.1", "runtime"))
    by_tag = job_of(IB, offer, f"{image.repository}:{image.tag}").image
    assert (by_tag.reference, by_tag.nccl) == (f"{image.repository}:{image.tag}", "2.32.3")
    assert job_of(IB, offer, image.target).image.reference == image.reference


def test_the_image_that_fits_and_why_newer_ones_do_not(planned: Offer, published: Catalog) -> None:
    def choice(line: str, offer: Offer, *names: str) -> tuple[str | None, dict[str, str], str]:
        images = tuple(image for image in offer.images if not names or image.image in names)
        wanted = request(line)
        arguments = wanted, profiles()[wanted.profile], facts(), replace(offer, images=images)
        chosen, newer, problem = choose_image(*arguments)
        return chosen.reference if chosen else None, {ranked.id: ranked.reason for ranked in newer}, problem

    ids = {image.reference: image.id for image in planned.images}
    for driver in ("535", "570.86"):
        best, newer, problem = choice(f"{IB} --param driver={driver}", planned)
        assert (ids[best or ""], problem) == ("hpcx-cuda12.9.1-ubuntu24.04-runtime", "")
        assert newer["hpcx-cuda13.4.2-ubuntu26.04-runtime"] == "CUDA 13.4.2 needs driver 580 or later"
        assert {ids[name].split("-")[1][:6] for name in ids if ids[name] in newer} == {"cuda13"}
    best, newer, _ = choice(f"{IB} --param driver=580", planned, "quickstart", "slim")  # without the benchmarks
    assert (ids[best or ""], newer) == ("slim-cuda13.0-gpu90-debian13-runtime", {})
    assert ids[choice(IB, planned, "quickstart")[0] or ""] == "quickstart-cuda13.5-debian13-runtime"
    best, newer, problem = choice("mpijob --profile b300 --fabric ib", planned, "slim")
    reason = "compiled with CUDA 13.0 for other compute capabilities than 10.3"
    assert (best, *newer.values()) == (None, reason, reason)
    assert problem == "no image of the plan fits: compute capability 10.3 rules out 2; "
    assert choice(IB, Offer(is_published=True))[2].startswith("no published image fits: there is no image of another")
    with pytest.raises(ConfigError, match="--fabric efa: the profile's NICs are not EFA"):
        choice("mpijob --profile h100 --fabric efa", planned)
    unchecked, failing = (
        [
            image.model_copy(update={"platforms": tuple(p.model_copy(update={"checks": c}) for p in image.platforms)})
            if image.axes["cuda"].startswith("13") else image for image in published.images
        ]
        for c in ((), (Checks(passed=9, failed=0, skipped=0), Checks(passed=9, failed=1, skipped=0)))
    )  # fmt: skip
    unsigned = [
        image.model_copy(update={"verified_by": ""}) if image.axes["cuda"].startswith("13") else image
        for image in published.images
    ]
    for images in (unchecked, failing, unsigned):
        offer = offer_of(published.model_copy(update={"images": tuple(images)}), planned)
        best, newer, _ = choice(IB, offer)
        assert best == job_of(IB, offer).image.reference
        assert newer["hpcx-cuda13.4.2-ubuntu26.04-runtime"] == "checks not known to have passed on amd64"
