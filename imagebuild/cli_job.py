"""`imagebuild job`: a benchmark as a manifest of Kubernetes or a script of Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from imagebuild import cli, files, profiles
from imagebuild.catalog.file import read_catalog
from imagebuild.config import suggestion
from imagebuild.console import err
from imagebuild.errors import ConfigError
from imagebuild.jobs import load, resolve, write
from imagebuild.jobs.image import Offer
from imagebuild.jobs.inputs import Request
from imagebuild.jobs.machine import FABRICS, machine
from imagebuild.jobs.models import Scheduler
from imagebuild.jobs.published import published


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("job")(job_command)


def job_command(
    scheduler: Annotated[str, typer.Argument(metavar="mpijob|jobset|slurm", help="What runs it.")],
    profile: Annotated[str, typer.Option("--profile", metavar="NAME", help="Hardware, a file of profiles/.")],
    fabric: Annotated[
        str | None, typer.Option("--fabric", metavar="NAME", help="Network, of jobs/fabrics/; else the profile's.")
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", metavar="NAME", help="Site, of jobs/clusters/.")] = "generic",
    nodes: Annotated[int | None, typer.Option("--nodes", help="How many; by default 8, or a rack.")] = None,
    racks: Annotated[int | None, typer.Option("--racks", help="Instead: full racks of rack-wide NVLink.")] = None,
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="NAME,…", help="Features, of jobs/features/.")
    ] = None,
    container: Annotated[str, typer.Option("--container", metavar="pyxis|none", help="For Slurm.")] = "pyxis",
    image: Annotated[
        str | None, typer.Option("--image", metavar="REF", help="By default the newest of the plan that fits.")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", metavar="FILE", help="The newest published image of an images.json.")
    ] = None,
    nccl: Annotated[str | None, typer.Option("--nccl", metavar="VERSION", help="Where the image does not say.")] = None,
    test: Annotated[str, typer.Option("--test", metavar="NAME", help="What, of jobs/tests/.")] = "all-reduce",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter, or a variable of the ranks.")
    ] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Say in the header how the result comes back.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file.")] = None,
    facts: Annotated[Path, typer.Option("--facts", help="Folder of the facts.")] = Path("jobs"),
    profile_folder: Annotated[Path, typer.Option("--profiles", help="Folder of the profiles.")] = Path("profiles"),
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Print a benchmark as an MPIJob, a JobSet or a Slurm script."""
    if scheduler not in get_args(Scheduler):
        raise ConfigError(f"job {scheduler}: there is none{suggestion(scheduler, list(get_args(Scheduler)))}")
    if container not in ("pyxis", "none"):
        raise ConfigError(f"--container {container}: it is pyxis or none")
    hardware = machine(profiles.find(profiles.load_profiles(profile_folder), profile).model)
    request = Request(
        scheduler=cast(Literal["mpijob", "jobset", "slurm"], scheduler),
        profile=profile,
        fabric=fabric or FABRICS.get(hardware.network or "ethernet", "ethernet"),
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
    offered = offer(matrix, dockerfiles, lock)
    if catalog:
        offered = published(offered, read_catalog(catalog))
    job = resolve.resolve(request, hardware, load.load_facts(facts), offered)
    for message in job.messages:
        err.print(message, markup=False)
    text = write.text(job)
    if output:
        files.write_text(output, text)
    else:
        sys.stdout.write(text)


def offer(matrix: Path, dockerfiles: Path, lock: Path) -> Offer:
    """The images of the plan; none where there is no matrix."""
    if not matrix.exists():
        return Offer()
    work = cli.prepare(matrix, dockerfiles, lock)
    provides = {name: document.model.provides for name, document in work.project.components.items()}
    return Offer(work.plan.targets, provides, work.project.matrix.model.gpu_architectures)
