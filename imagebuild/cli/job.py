"""Run `imagebuild job`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    DOCKERFILES,
    MATRIX,
    PROFILES,
    DockerfilesOption,
    LockOption,
    MatrixOption,
    OutputOption,
    ProfilesOption,
    example,
    open_workspace,
    print_or_write,
)
from imagebuild.core.errors import ConfigError

if TYPE_CHECKING:
    from imagebuild.jobs.choose import Offer


@example(
    "imagebuild job mpijob --profile h100 --fabric ib --nodes 8 --with sharp | kubectl apply -f -",
    "imagebuild job slurm --profile gb300-nvl72 --fabric roce --racks 2 --cluster coreweave -o job.sh",
)
def job(
    scheduler: Annotated[str, typer.Argument(metavar="mpijob|jobset|slurm", help="What runs the job.")],
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="Hardware that the job runs on, a file of profiles/.")
    ],
    fabric: Annotated[
        str | None,
        typer.Option("--fabric", metavar="NAME", help="Network, a file of jobs/fabrics/; by default the profile's."),
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="NAME", help="Site, a file of jobs/clusters/.")
    ] = "generic",
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="NUMBER", help="Number of nodes; by default 8, or a whole rack.")
    ] = None,
    racks: Annotated[
        int | None,
        typer.Option("--racks", metavar="NUMBER", help="Number of whole racks that NVLink joins, instead of --nodes."),
    ] = None,
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME,…", help="Features to use, files of jobs/features/.")
    ] = None,
    container: Annotated[
        str, typer.Option("--container", metavar="pyxis|none", help="How Slurm runs the image, or that it does not.")
    ] = "pyxis",
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Image to run; by default the newest that fits.")
    ] = None,
    catalog: Annotated[
        Path | None,
        typer.Option("--catalog", metavar="FILE", help="Choose from the published images of this images.json."),
    ] = None,
    nccl: Annotated[
        str | None, typer.Option("--nccl", metavar="VERSION", help="NCCL in an image that does not say which it has.")
    ] = None,
    test: Annotated[
        str, typer.Option("--test", metavar="NAME", help="What to measure, a file of jobs/tests/.")
    ] = "all-reduce",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of the job, or a variable of all ranks."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Say in the header how the result comes back from the cluster.")
    ] = False,
    output: OutputOption = None,
    facts: Annotated[Path, typer.Option("--facts", metavar="DIR", help="Folder of the facts about jobs.")] = Path(
        "jobs"
    ),
    profiles: ProfilesOption = PROFILES,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Print a benchmark as an MPIJob, a JobSet or a Slurm script."""
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.core.console import err
    from imagebuild.core.errors import suggestion
    from imagebuild.jobs.choose import published_offer
    from imagebuild.jobs.facts import JobRequest, Scheduler, default_fabric, load_facts
    from imagebuild.jobs.job import resolve_job
    from imagebuild.jobs.manifest import job_text

    if scheduler not in get_args(Scheduler):
        raise ConfigError(f"job {scheduler}: unknown scheduler{suggestion(scheduler, list(get_args(Scheduler)))}")
    if container not in ("pyxis", "none"):
        raise ConfigError(f"--container {container}: use pyxis or none")
    hardware = find_profile(load_profiles(profiles), profile).model
    request = JobRequest(
        scheduler=cast(Literal["mpijob", "jobset", "slurm"], scheduler),
        profile=profile,
        fabric=fabric or default_fabric(hardware),
        cluster=cluster,
        nodes=nodes,
        racks=racks,
        features=tuple(name for text in with_ or () for name in text.split(",") if name),
        container=container,
        image=image,
        nccl=nccl,
        test=test,
        settings=tuple(settings or ()),
        collect=collect,
    )
    offer = offer_of_plan(matrix, dockerfiles, lock)
    if catalog:
        from imagebuild.publish.catalog import read_catalog

        offer = published_offer(offer, read_catalog(catalog))
    resolved = resolve_job(request, hardware, load_facts(facts), offer)
    for message in resolved.messages:
        err.print(message, markup=False)
    print_or_write(job_text(resolved), output)


def offer_of_plan(matrix: Path, dockerfiles: Path, lock: Path) -> Offer:
    """Return the images of the plan for a job to choose from; none where there is no matrix."""
    from imagebuild.jobs.choose import Offer

    if not matrix.exists():
        return Offer()
    workspace = open_workspace(matrix, dockerfiles, lock)
    provides = {name: document.model.provides for name, document in workspace.project.components.items()}
    return Offer(workspace.plan.targets, provides, workspace.project.matrix.model.gpu_architectures)
