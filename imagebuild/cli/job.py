"""Run `imagebuild job`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.errors import ConfigError

if TYPE_CHECKING:
    from imagebuild.jobs.choose import Offer


MOST_NODES = 9999
"""Names of pods have room for four digits."""


@options.example(
    "imagebuild job mpijob --profile h100 --fabric ib --nodes 8 --registry ghcr.io/acme | kubectl create -f -",
    "imagebuild job slurm --profile gb300-nvl72 --fabric roce --racks 2 --catalog site/images.json -o job.sh",
)
def job(
    project: options.ProjectFiles,
    scheduler: Literal["mpijob", "jobset", "slurm"] = argument("mpijob|jobset|slurm", "What runs the job."),
    profile: str = option("--profile NAME", "Hardware to run on, a file of profiles/.", completes="profiles"),
    fabric: str | None = option(
        "--fabric NAME", "Network, of jobs/fabrics/; by default the profile's.", None, completes="jobs/fabrics"
    ),
    cluster: str = option("--cluster NAME", "Cluster, a file of jobs/clusters/.", "generic", completes="jobs/clusters"),
    nodes: int | None = option(
        "--nodes NUMBER", "Number of nodes; by default 8, or a whole rack.", None, min=1, max=MOST_NODES
    ),
    racks: int | None = option(
        "--racks NUMBER", "Number of whole NVLink racks, instead of --nodes.", None, min=1, max=MOST_NODES
    ),
    feature: list[str] | None = option(
        "--feature NAME,…", "Features, files of jobs/features/.", None, completes="jobs/features"
    ),
    with_: list[str] | None = option("--with COMPONENT", "A component that was added to the image.", None),
    container: Literal["pyxis", "none"] | None = option(
        "--container pyxis|none", "With Slurm: run the image by pyxis, or none.", None
    ),
    image: str | None = option("--image IMAGE", "Image to run; by default the newest that fits.", None),
    registry: options.RegistryOption = None,
    catalog: Path | None = option("--catalog FILE", "Choose from the published images of this images.json.", None),
    nccl: str | None = option("--nccl VERSION", "NCCL's version, for an image that does not say it.", None),
    test: str = option("--test NAME", "What to measure, a file of jobs/tests/.", "all-reduce", completes="jobs/tests"),
    settings: list[str] | None = option("--param NAME=VALUE", "A parameter, or a variable of all ranks.", None),
    collect: bool = option("--collect", "Say in the header how to run the job and get its result.", False),
    output: options.OutputOption = None,
    facts: Path | None = option(
        "--facts DIR", "Read the facts about jobs from this folder alone.", None, exists=True, file_okay=False
    ),
    profiles: options.ProfilesOption = None,
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
        features=tuple(name for text in feature or () for name in text.split(",")),
        components=tuple(with_ or ()),
        container=container,
        image=image,
        nccl=nccl,
        test=test,
        settings=tuple(settings or ()),
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
