"""The command `imagebuild job`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError
from imagebuild.jobs.request import JobRequest, Scheduler, SlurmContainer

if TYPE_CHECKING:
    from imagebuild.jobs.offer import Offer

COUNT = options.IntRange(min=1, max=9999)
"""The type of a number of nodes or racks. Pod names have room for four digits."""


@options.command(
    "imagebuild job mpijob --profile h100 --fabric ib --nodes 8 --registry ghcr.io/acme | kubectl create -f -",
    "imagebuild job slurm --profile gb300-nvl72 --fabric roce --racks 2 --catalog site/images.json -o job.sh",
)
@click.argument("scheduler", type=click.Choice(get_args(Scheduler)), help="Scheduler that runs the job.")
@click.option(
    "--profile",
    metavar="NAME",
    required=True,
    help="Hardware profile of the nodes: the name of a file in profiles/.",
    shell_complete=options.names_of("profiles"),
)
@click.option(
    "--fabric",
    metavar="NAME",
    help="Network between the nodes: the name of a file in jobs/fabrics/. Default: the network of the profile.",
    shell_complete=options.names_of("jobs/fabrics"),
)
@click.option(
    "--cluster",
    metavar="NAME",
    default="generic",
    help="Settings of the cluster: the name of a file in jobs/clusters/.",
    shell_complete=options.names_of("jobs/clusters"),
)
@click.option(
    "--nodes", metavar="NUMBER", type=COUNT, help="Number of nodes. Default: 8, or all nodes of an NVLink rack."
)
@click.option("--racks", metavar="NUMBER", type=COUNT, help="Number of whole NVLink racks, instead of --nodes.")
@options.gpus
@click.option(
    "--feature",
    "features",
    metavar="NAME,…",
    multiple=True,
    help="Options of the job, such as sharp: names of files in jobs/features/. Can be repeated.",
    shell_complete=options.names_of("jobs/features"),
)
@click.option(
    "--with",
    "components",
    metavar="COMPONENT",
    multiple=True,
    help="Component that was added to the image with `build --with`. Can be repeated.",
)
@click.option(
    "--container",
    type=click.Choice(get_args(SlurmContainer)),
    help="With slurm: run the job in a pyxis container, or without a container.",
)
@click.option("--image", metavar="IMAGE", help="Image to run. Default: the newest image that fits.")
@options.registry
@click.option("--plan", metavar="FILE|-", help="Choose the image from this output of `imagebuild plan --json`.")
@click.option(
    "--catalog",
    metavar="FILE",
    type=options.PATH,
    help="Choose the image from the images.json that `imagebuild catalog` wrote.",
)
@click.option(
    "--nccl",
    metavar="VERSION",
    help="NCCL version of the image. Default: the version in the plan, the catalogue or the image's tag.",
)
@click.option(
    "--test",
    metavar="NAME",
    default="all-reduce",
    help="Benchmark to run: the name of a file in jobs/tests/.",
    shell_complete=options.names_of("jobs/tests"),
)
@click.option(
    "--param",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a parameter of the job (minutes=30), or an environment variable of all ranks (NCCL_IB_TC=41). "
    "Can be repeated.",
)
@click.option(
    "--collect", is_flag=True, help="Explain in the header of the output how to run the job and get the result."
)
@options.output
@click.option(
    "--facts",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read fabrics, clusters, features and tests only from this folder, not from the folders named jobs.",
)
@options.profiles
@options.project
def job(
    project: options.ProjectFiles,
    scheduler: Scheduler,
    profile: str,
    fabric: str | None,
    cluster: str,
    nodes: int | None,
    racks: int | None,
    gpus: int | None,
    features: tuple[str, ...],
    components: tuple[str, ...],
    container: SlurmContainer | None,
    image: str | None,
    registry: str | None,
    plan: str | None,
    catalog: Path | None,
    nccl: str | None,
    test: str,
    settings: tuple[str, ...],
    collect: bool,
    output: str | None,
    facts: Path | None,
    profiles: Path | None,
) -> None:
    """Print a benchmark as an MPIJob, a JobSet or a Slurm script."""
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.core.console import err
    from imagebuild.jobs.facts import REGISTRY, default_fabric, find_facts
    from imagebuild.jobs.job import resolve_job
    from imagebuild.jobs.load import load_facts
    from imagebuild.jobs.manifest import job_text

    folders = options.data_folders(profiles, "profiles", project.root)
    hardware = find_profile(load_profiles(*folders), profile).model
    known = load_facts(*options.data_folders(facts, "jobs", project.root))
    request = JobRequest(
        words=tuple(sys.argv[1:]),
        scheduler=scheduler,
        profile=profile,
        fabric=fabric or default_fabric(hardware, known.fabrics),
        cluster=cluster,
        nodes=nodes,
        racks=racks,
        gpus=gpus,
        features=tuple(name for text in features for name in text.split(",")),
        components=components,
        container=container,
        image=image,
        nccl=nccl,
        test=test,
        settings=settings,
        collect=collect,
        profiles=str(profiles) if profiles else None,
    )
    if registry is None:
        registry = find_facts(known.clusters, "cluster", cluster).registry
    if registry is not None and not REGISTRY.fits(registry):
        raise ConfigError(f"--registry {registry!r}: must be {REGISTRY.words}")
    resolved = resolve_job(request, hardware, known, read_offer(project, request, registry, plan, catalog))
    for message in resolved.messages:
        err.print(message)
    options.print_or_write(job_text(resolved), output)


def read_offer(
    project: options.ProjectFiles, request: JobRequest, registry: str | None, plan: str | None, catalog: Path | None
) -> Offer:
    """Return the images among which a job can choose, from the files of --plan and --catalog, or from the project.

    The plan of the project is computed only if the job needs a plan, because a machine that only runs benchmarks may
    not have the modules that compute plans."""
    from imagebuild.core.files import read_text
    from imagebuild.jobs.offer import Offer, planned_offer, published_offer, read_catalog, read_plan

    offer = Offer()
    if plan is not None:
        text = read_text(Path(plan))
        offer = planned_offer(read_plan(text, plan), registry)
    elif not catalog and request.container != "none":
        if request.image is not None and not is_own_image(request.image, project, registry):
            return offer
        offer = planned_offer(read_plan(project_plan(project, request.components), "-"), registry)
    if catalog:
        offer = published_offer(read_catalog(read_text(catalog), str(catalog)), offer)
    return offer


def is_own_image(reference: str, project: options.ProjectFiles, registry: str | None) -> bool:
    """Return whether the plan of the project may contain an image with this name."""
    from imagebuild.core.fields import Model, full_reference
    from imagebuild.core.yaml import read_yaml

    class NamedProject(Model, extra="ignore"):
        repository: str

    if full_reference(reference) != reference:  # the id of a target, or a name in the engine
        return True
    if registry is None and not project.is_shipped:
        registry = read_yaml(project.folder / options.MATRIX, NamedProject).model.repository
    return registry is not None and reference.startswith(f"{registry}/")


def project_plan(project: options.ProjectFiles, components: tuple[str, ...]) -> str:
    """Return the plan of the project as JSON, with additional components in every image."""
    return project.open(options.PlanChanges(with_=components).parse()).plan.model_dump_json()
