"""What a request leaves open: nodes and racks, the image, the plug-in, and whether speed is judged."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from imagebuild.core import ConfigError
from imagebuild.jobs import Job, Offer, published_offer, resolve_job
from imagebuild.project import Catalog, GpuArchitecture, Plan
from tests import catalog_samples
from tests.unit.jobs.job_fakes import containers, facts, messages, profiles, rank_exports, rank_script, request, text

NEW = [
    "slurm --profile h200 --fabric ib",
    "mpijob --profile h200 --fabric ib --with sharp",
    "mpijob --profile gb200-nvl72 --fabric ib --racks 1 --with dra",
    "mpijob --profile gb200-nvl72 --fabric ib --racks 2 --with dra",
    "slurm --profile gb300-nvl72 --fabric ib --racks 2 --with sharp",
    "slurm --profile gb200-nvl72 --fabric ib --nodes 16 --container none",
    "mpijob --profile h100 --fabric roce --with gdrcopy",
    "slurm --profile a100-sxm --fabric ib --with sharp",
    "slurm --profile a40 --fabric ethernet",
    "mpijob --profile a3-mega --fabric tcpxo",
    "slurm --profile a4 --fabric gib",
    "mpijob --profile gh200 --fabric ethernet",
    "mpijob --profile gb300-nvl72 --fabric roce --racks 1 --with nics --image example.com/hpcx:nccl2.29.2",
    "mpijob --profile gb300-nvl72 --fabric roce --racks 2 --with tuning --image example.com/hpcx:nccl2.29.2",
]  # fmt: skip


@pytest.mark.parametrize("line", NEW)
def test_combinations_that_the_reference_lacks(line: str) -> None:
    assert text(line)


@pytest.mark.parametrize(
    ("arguments", "nodes", "segment"),
    [
        ("gb200-nvl72 --racks 2", 36, 18),
        ("gb200-nvl72 --nodes 32", 32, 16),
        ("gb200-nvl72 --nodes 4", 4, 4),
        ("gb200-nvl72 --racks 1 --set rack-nodes=16", 16, 16),
        ("h100", 8, None),
    ],
)
def test_nodes_and_racks(arguments: str, nodes: int, segment: int | None) -> None:
    made = text(f"slurm --fabric ib --profile {arguments}")
    assert f"#SBATCH --nodes={nodes}\n" in made
    assert re.findall("#SBATCH --segment=(.*)", made) == ([str(segment)] if segment else [])


# Plug-ins


def test_efa_asks_for_as_many_cards_as_the_node_has() -> None:
    line = "mpijob --profile p5 --fabric efa --image example.com/efa:1"
    assert containers(text(line))["worker"]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert rank_exports(line)["NCCL_NET_PLUGIN"] == "ofi"


def test_the_host_chooses_the_plug_in_and_sets_its_variables_first() -> None:
    line = "jobset --profile a4 --fabric gib"
    assert rank_script(text(line)).splitlines()[1] == ". /usr/local/gib/scripts/set_nccl_env.sh"
    assert "NCCL_NET_PLUGIN" not in rank_exports(line)


def test_the_library_path_reaches_ranks_under_all_schedulers() -> None:
    for scheduler in ("mpijob", "jobset", "slurm"):
        line = f"{scheduler} --profile h100 --fabric roce --set plugin=spcx"
        path = rank_exports(line)["LD_LIBRARY_PATH"]
        assert path == "/opt/hpcx/nccl_spectrum-x_plugin/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        assert ("-x LD_LIBRARY_PATH" in text(line)) == (scheduler != "slurm")


# Images


def plan_offer(plan: Plan, project: Any) -> Offer:
    provides = {name: file.model.provides for name, file in project.components.items()}
    return Offer(plan.targets, provides, project.matrix.model.gpu_architectures)


def job_of(line: str, offer: Offer, image: str | None = None) -> Job:
    job_request = replace(request(line), image=image)
    return resolve_job(job_request, profiles()[job_request.profile], facts(), offer)


def test_without_image_the_newest_that_fits(full_plan: Plan, project: Any) -> None:
    offer = plan_offer(full_plan, project)
    job = job_of("mpijob --profile h100 --fabric ib", offer)
    newest = next(t for t in full_plan.targets if t.id == "hpcx-cuda13.4.2-ubuntu26.04-runtime")
    assert job.image.reference == newest.name
    assert job.image.nccl == project.matrix.model.versions["nccl"][0].version
    assert job.image.arches == ("amd64", "arm64")
    (note,) = job.messages
    assert note.endswith("driver 580 or later; if the nodes have an older one, name it with --set driver=VERSION")
    assert job_of("mpijob --profile h100 --fabric ib --set driver=580.65", offer).messages == ()
    older = job_of("mpijob --profile h100 --fabric ib --set driver=570", offer).image
    assert "cuda12.9.2" in older.reference
    with pytest.raises(ConfigError, match="also runs on driver 500; name an image with --image"):
        job_of("mpijob --profile h100 --fabric ib --set driver=500", offer)
    problem = "no image of the plan that has nccl-tests and runs on amd64 also has the plug-in 'ofi'; name an image"
    with pytest.raises(ConfigError, match=problem):
        job_of("mpijob --profile p5 --fabric efa", offer)


def test_without_any_image() -> None:
    with pytest.raises(ConfigError, match="^no image of the plan has nccl-tests; name an image with --image"):
        job_of("mpijob --profile h100 --fabric ib", Offer())


def test_images_of_the_plan_are_known_by_id_and_tag(full_plan: Plan, project: Any) -> None:
    offer = plan_offer(full_plan, project)
    target = next(t for t in full_plan.targets if t.id == "open-cuda13.5-debian13-runtime")
    by_id = job_of("mpijob --profile h100 --fabric ib", offer, target.id)
    assert by_id.image.reference == target.name
    launcher = {variable.name for variable in by_id.variables if variable.scope == "launcher"}
    assert {"OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_plm_ssh_args"} <= launcher
    by_tag = job_of("mpijob --profile h100 --fabric ib", offer, target.aliases[0])
    assert by_tag.image.reference == target.aliases[0]
    assert by_tag.image.nccl == by_id.image.nccl
    with pytest.raises(ConfigError, match=f"{target.name}: the image has no plug-in 'ibext'"):
        job_of("mpijob --profile h100 --fabric ib --with sharp", offer, target.id)


def catalog() -> Catalog:
    """A catalogue whose images have the components of the stacks."""
    sample = catalog_samples.catalog(200)
    images = tuple(
        image.model_copy(update={"versions": {**image.versions, "hpcx": "2.51"}}) if image.image == "hpcx" else image
        for image in sample.images
    )
    return sample.model_copy(update={"images": images})


def catalog_offer(images: Catalog) -> Offer:
    return published_offer(
        Offer(
            architectures={
                "90": GpuArchitecture(gpus="H100", cuda=">=11.8"),
                "103": GpuArchitecture(gpus="B300", cuda=">=12.9"),
            }
        ),
        images,
    )


def test_the_newest_published_image_by_digest() -> None:
    published = catalog()
    job = job_of("mpijob --profile h100 --fabric ib", catalog_offer(published))
    fits = [
        image
        for image in published.images
        if image.image == "hpcx"
        and (image.axes["variant"], image.axes["cuda"], image.axes["os"]) == ("runtime", "13.4.2", "ubuntu26.04")
    ]
    assert len(fits) > 1
    assert job.image.reference == fits[0].reference
    assert fits[0].created == max(image.created for image in fits)
    assert job.image.nccl == "2.32.3"


def test_a_published_image_is_found_by_its_tag_or_target() -> None:
    published = catalog()
    offer, line = catalog_offer(published), "mpijob --profile h100 --fabric ib"
    image = next(i for i in published.images if (i.axes["cuda"], i.axes["variant"]) == ("12.9.2", "runtime"))
    by_tag = job_of(line, offer, f"{image.repository}:{image.tag}")
    assert by_tag.image.reference == f"{image.repository}:{image.tag}"
    assert by_tag.image.nccl == "2.32.3"
    assert job_of(line, offer, image.target).image.reference == image.reference


def test_arm64_needs_an_image_for_it() -> None:
    published = catalog()
    amd64 = tuple(image.model_copy(update={"platforms": image.platforms[:1]}) for image in published.images)
    offer = catalog_offer(published.model_copy(update={"images": amd64}))
    with pytest.raises(ConfigError, match="no published image that has nccl-tests also runs on arm64"):
        job_of("mpijob --profile gb200-nvl72 --fabric ib --racks 1", offer)


def test_an_unknown_version_of_nccl_is_assumed() -> None:
    assert messages("mpijob --profile h100 --fabric ib --image example.com/x:1") == [
        "note: the version of NCCL is not known, so 2.30.7 is assumed; name it with --nccl"
    ]


# Speed


@pytest.mark.parametrize(
    ("arguments", "judged", "floor"),
    [
        ("gb300-nvl72 --fabric ib --nodes 16", True, True),
        ("gb300-nvl72 --fabric ib --nodes 16 --with debug", True, True),
        ("gb300-nvl72 --fabric ib --nodes 17", True, False),
        ("gb300-nvl72 --fabric ib --nodes 16 --test latency", True, False),
        ("gb300-nvl72 --fabric ib --nodes 16 --with nics", False, False),
        ("gb300-nvl72 --fabric roce --nodes 16", False, False),
        ("h100 --fabric ethernet", False, False),
        ("a4 --fabric gib", True, False),
        ("a40 --fabric ethernet", True, False),
    ],
)
def test_speed_is_judged_only_by_numbers_about_the_job(arguments: str, judged: bool, floor: bool) -> None:
    line = f"slurm --profile {arguments}"
    assert ("--profile " in text(line).split("set -uo pipefail")[1]) == judged
    assert ("NCCL_TESTS_MIN_BW" in rank_exports(line)) == floor


def test_the_least_bandwidth_is_the_profiles_threshold_or_the_users() -> None:
    line = "mpijob --profile gb300-nvl72 --fabric ib --nodes 16"
    measured = profiles()["gb300-nvl72"].references
    (known,) = (r for r in measured if (r.collective, r.ranks, r.nodes) == ("all_reduce", 64, 16))
    assert rank_exports(line)["NCCL_TESTS_MIN_BW"] == f"{known.rate * known.tolerance:.1f}"
    assert rank_exports(f"{line} --set min-bw=500")["NCCL_TESTS_MIN_BW"] == "500"
