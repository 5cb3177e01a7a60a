"""The command `imagebuild job`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from imagebuild.cli import options
from imagebuild.core.errors import ConfigError

if TYPE_CHECKING:
    from imagebuild.jobs.choose import Offer


COUNT = options.IntRange(min=1, max=9999)
"""The type of a number of nodes or racks. Pod names have room for four digits."""


@options.command(
    "imagebuild job mpijob --profile h100 --fabric ib --nodes 8 --registry ghcr.io/acme | kubectl create -f -",
    "imagebuild job slurm --profile gb300-nvl72 --fabric roce --racks 2 --catalog site/images.json -o job.sh",
)
@click.argument("scheduler", type=click.Choice(["mpijob", "jobset", "slurm"]), help="What runs the job.")
@click.option(
    "--profile",
    metavar="NAME",
    required=True,
    help="Hardware to run on, a file in profiles/.",
    shell_complete=options.names_of("profiles"),
)
@click.option(
    "--fabric",
    metavar="NAME",
    help="Network, a file in jobs/fabrics/. Default: the network of the profile.",
    shell_complete=options.names_of("jobs/fabrics"),
)
@click.option(
    "--cluster",
    metavar="NAME",
    default="generic",
    help="Cluster, a file in jobs/clusters/.",
    shell_complete=options.names_of("jobs/clusters"),
)
@click.option("--nodes", metavar="NUMBER", type=COUNT, help="Number of nodes. Default: 8, or a whole rack.")
@click.option("--racks", metavar="NUMBER", type=COUNT, help="Number of whole NVLink racks, instead of --nodes.")
@click.option(
    "--feature",
    "features",
    metavar="NAME,…",
    multiple=True,
    help="Features, files in jobs/features/. Can be repeated.",
    shell_complete=options.names_of("jobs/features"),
)
@click.option(
    "--with", "components", metavar="COMPONENT", multiple=True, help="A component that was added to the image."
)
@click.option(
    "--container",
    type=click.Choice(["pyxis", "none"]),
    help="With slurm: run the job in a pyxis container, or without a container.",
)
@click.option("--image", metavar="IMAGE", help="Image to run. Default: the newest image that fits.")
@options.registry
@click.option(
    "--catalog", metavar="FILE", type=options.PATH, help="Choose from the published images in this images.json."
)
@click.option("--nccl", metavar="VERSION", help="NCCL version of the image, if its labels do not contain it.")
@click.option(
    "--test",
    metavar="NAME",
    default="all-reduce",
    help="What to measure, a file in jobs/tests/.",
    shell_complete=options.names_of("jobs/tests"),
)
@click.option(
    "--param",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a parameter of the job, or an environment variable of all ranks. Can be repeated.",
)
@click.option("--collect", is_flag=True, help="Explain in the header how to run the job and get its result.")
@options.output
@click.option(
    "--facts",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read the facts about jobs only from this folder.",
)
@options.profiles
@options.project
def job(
    project: options.ProjectFiles,
    scheduler: Literal["mpijob", "jobset", "slurm"],
    profile: str,
    fabric: str | None,
    cluster: str,
    nodes: int | None,
    racks: int | None,
    features: tuple[str, ...],
    components: tuple[str, ...],
    container: Literal["pyxis", "none"] | None,
    image: str | None,
    registry: str | None,
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
    from imagebuild.core.errors import ResultError
    from imagebuild.jobs.choose import published_offer
    from imagebuild.jobs.facts import JobRequest, default_fabric, find_facts, load_facts
    from imagebuild.jobs.job import resolve_job
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
    offer = offer_of_plan(project, registry, request.components)
    if catalog:
        from imagebuild.publish.catalog import read_catalog

        try:
            offer = published_offer(offer, read_catalog(catalog))
        except ResultError:
            problem = "not a list of images from `imagebuild catalog`; make it anew, or name another file"
            raise ConfigError(f"--catalog {catalog}: {problem}") from None
    resolved = resolve_job(request, hardware, known, offer)
    for message in resolved.messages:
        err.print(message, markup=False)
    options.print_or_write(job_text(resolved), output)


def offer_of_plan(
    project: options.ProjectFiles, registry: str | None = None, components: tuple[str, ...] = ()
) -> Offer:
    """Return the images of the plan, with more components and in that registry, for a job to choose from."""
    from imagebuild.core.fields import full_reference
    from imagebuild.jobs.choose import Offer
    from imagebuild.jobs.facts import REGISTRY

    if registry is not None and not REGISTRY.fits(registry):
        raise ConfigError(f"--registry {registry!r}: must be {REGISTRY.words}")
    workspace = project.open(options.PlanChanges(with_=list(components)).parse(registry))
    provides = {name: document.model.provides for name, document in workspace.project.components.items()}
    matrix = workspace.project.matrix.model
    unnamed = any(full_reference(target.name) != target.name for target in workspace.plan.targets)
    return Offer(workspace.plan.targets, provides, matrix.gpu_architectures, unnamed=unnamed)
