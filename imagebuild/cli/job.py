"""The commands `imagebuild job` and `imagebuild choose`."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.cli import options
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError, NothingSelected, suggestion
from imagebuild.jobs.request import JobRequest, Scheduler, SlurmContainer

if TYPE_CHECKING:
    from imagebuild.jobs.facts import JobFacts
    from imagebuild.jobs.offer import Offer


@options.command()
def job(
    project: options.ProjectFiles, scheduler: Scheduler, profile: str, fabric: str | None, cluster: str,
    nodes: int | None, racks: int | None, gpus: int | None, features: tuple[str, ...], components: tuple[str, ...],
    container: SlurmContainer | None, image: str | None, registry: str | None, plan: str | None, catalog: Path | None,
    nccl: str | None, test: str, settings: tuple[str, ...], compare: str | None, libraries: str | None, blocks: int,
    seed: int, allowed_loss: float | None, collect: bool, output: str | None, facts: Path | None, profiles: Path | None,
) -> None:  # fmt: skip
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.jobs.facts import default_fabric, load_facts
    from imagebuild.jobs.job import resolve_job
    from imagebuild.jobs.manifest import job_text
    from imagebuild.jobs.size import refuse_unknown_gpus

    folders = options.data_folders(profiles, "profiles", project.root)
    described = load_profiles(*folders)
    hardware = find_profile(described, profile).model
    known = load_facts(*options.data_folders(facts, "jobs", project.root))
    request = JobRequest(
        words=tuple(sys.argv[1:]), scheduler=scheduler, profile=profile,
        fabric=fabric or default_fabric(hardware, known.fabrics), cluster=cluster, nodes=nodes, racks=racks, gpus=gpus,
        features=options.names_in(features), components=options.names_in(components),
        container=container, image=image, nccl=nccl, test=test, settings=settings, collect=collect,
        compare=compare, libraries=libraries or "", blocks=blocks, seed=seed, allowed_loss=allowed_loss,
        profiles=str(profiles) if profiles else None,
    )  # fmt: skip
    if cluster in known.clusters:
        refuse_unknown_gpus(known.clusters[cluster], (file.model for file in described.values()))
    resolved = resolve_job(request, hardware, known, read_offer(project, request, known, registry, plan, catalog))
    for message in resolved.messages:
        err.print(message)
    options.print_or_write(job_text(resolved), output)


@options.command()
def choose(
    project: options.ProjectFiles, images: tuple[str, ...], profile: str, driver: str | None, fabric: str | None,
    cluster: str, components: tuple[str, ...], registry: str | None, plan: str | None, catalog: Path | None,
    json_file: str | None,
) -> None:  # fmt: skip
    from imagebuild.bench.profiles import find_profile, load_profiles
    from imagebuild.jobs.facts import FORMS, default_fabric, load_facts
    from imagebuild.jobs.image import PLANNED, choose_image

    hardware = find_profile(load_profiles(*options.data_folders(None, "profiles", project.root)), profile).model
    known = load_facts(*options.data_folders(None, "jobs", project.root))
    if driver is not None and not FORMS["version"].fits(driver):
        raise ConfigError(f"--driver {driver!r}: must be {FORMS['version'].words}")
    # The image that runs is the image of a job that runs, whatever the scheduler is.
    request = JobRequest(
        words=(), scheduler="mpijob", profile=profile, fabric=fabric or default_fabric(hardware, known.fabrics),
        cluster=cluster, components=options.names_in(components), settings=(f"driver={driver}",) if driver else (),
    )  # fmt: skip
    offer = read_offer(project, request, known, registry, plan, catalog)
    names = {image.image for image in offer.images}
    for name in set(images) - names:
        lacking = f" with {', '.join(components)}; leave out --with, or add it to the image" if components else ""
        raise NothingSelected(f"{name}: no such image{lacking or suggestion(name, names)}")
    offer = replace(offer, images=tuple(each for each in offer.images if not images or each.image in images))
    chosen, newer, problem = choose_image(request, hardware, known, offer)

    def show() -> None:
        for reason, group in groupby(newer, key=lambda ranked: ranked.reason):
            err.print(f"{reason}: {', '.join(ranked.id for ranked in group)}")
        if chosen and chosen.is_planned:
            err.print(f"note: {chosen.reference} {PLANNED}")
        if chosen:
            out.print(chosen.reference)

    result = {"image": chosen, "newer": [{"id": ranked.id, "reason": ranked.reason} for ranked in newer]}
    options.print_result(json_file, result, show)
    if chosen is None:
        raise NothingSelected(f"{problem}build another image")


def read_offer(
    project: options.ProjectFiles, request: JobRequest, known: JobFacts, registry: str | None, plan: str | None,
    catalog: Path | None,
) -> Offer:  # fmt: skip
    """Return the images among which a job can choose, from the files of --plan and --catalog, or from the project.

    The plan of the project is computed only if the job needs a plan, because a machine that only runs benchmarks may
    not have the modules that compute plans."""
    from imagebuild.core.files import read_text
    from imagebuild.jobs.facts import FORMS, find_facts
    from imagebuild.jobs.offer import CatalogFile, Offer, PlanFile, planned_offer, published_offer, read_images

    if registry is None:
        registry = find_facts(known.clusters, "cluster", request.cluster).registry
    if registry is not None and not FORMS["registry"].fits(registry):
        raise ConfigError(f"--registry {registry!r}: must be {FORMS['registry'].words}")
    offer = Offer()
    if plan is not None:
        text = read_text(Path(plan))
        offer = planned_offer(read_images(PlanFile, text, plan), registry)
    elif not catalog and request.container != "none":
        if not any(name is None or is_own_image(name, project, registry) for name in request.images):
            return offer
        offer = planned_offer(read_images(PlanFile, project_plan(project, request.components), "-"), registry)
    if catalog:
        published = read_images(CatalogFile, read_text(catalog), str(catalog))
        if any(image.verified_by is None for image in published.images):
            made = "was made without --key or --certificate-identity, so nobody knows who says that checks passed"
            err.print(f"note: {catalog}: {made}")
        offer = published_offer(published, offer)
    return offer


def is_own_image(reference: str, project: options.ProjectFiles, registry: str | None) -> bool:
    """Return whether the plan of the project may contain an image with this name."""
    from imagebuild.core.fields import Model, full_reference
    from imagebuild.core.yaml import read_yaml

    class NamedProject(Model, extra="ignore"):
        repository: str

    if reference.startswith("/"):  # a file
        return False
    if full_reference(reference) != reference:  # the id of a target, or a name in the engine
        return True
    if registry is None and not project.is_shipped:
        registry = read_yaml(project.folder / options.MATRIX, NamedProject).model.repository
    return registry is not None and reference.startswith(f"{registry}/")


def project_plan(project: options.ProjectFiles, components: tuple[str, ...]) -> str:
    """Return the plan of the project as JSON, with additional components in every image."""
    select = () if components else None
    return project.open(options.PlanChanges(with_=components).parse(), select=select).plan.model_dump_json()
