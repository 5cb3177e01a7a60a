"""A benchmark job as one value, decided in four steps: size, image, environment and workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from imagebuild.bench.ceilings import NotComparable, class_ceilings, rank_layout
from imagebuild.bench.judge import floor_of
from imagebuild.bench.profiles import Profile
from imagebuild.core.advisory import COMPONENTS, known_bad, shortened
from imagebuild.core.errors import ConfigError
from imagebuild.jobs.compare import comparison_of, parse_sides
from imagebuild.jobs.environment import Environment, lint, resolve_environment
from imagebuild.jobs.facts import JobFacts
from imagebuild.jobs.image import PLANNED, JobImage, resolve_images
from imagebuild.jobs.offer import Offer
from imagebuild.jobs.request import JobRequest
from imagebuild.jobs.size import Size, resolve_size
from imagebuild.jobs.workers import Workers, resolve_workers

GENERIC = "generic"
"""Name of the cluster without --cluster: its settings are assumptions."""


@dataclass(frozen=True)
class Job:
    """A benchmark job: the results of the four steps that decide it, and the speed that it must reach."""

    request: JobRequest
    profile: Profile
    size: Size
    images: tuple[JobImage, ...]
    """The images of a comparison, or the one image of the job."""
    environment: Environment
    comparable: bool
    """True if the limits and measured results of the profile are valid for this job."""
    least: Mapping[str, tuple[str, str]]
    """Maps each collective to the bus bandwidth in GB/s that its best message size must reach, and to the reason."""
    workers: Workers
    messages: tuple[str, ...]
    """Notes and warnings for the user."""
    comparison: Mapping[str, Any]
    """The sides and runs of a paired comparison. Empty if the job does not compare anything."""

    @property
    def image(self) -> JobImage:
        """The first image, whose kind the other images share."""
        return self.images[0]


def resolve_job(request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer) -> Job:
    """Return the requested job. Raises ConfigError with the reason if the job is impossible."""
    size = resolve_size(request, profile, facts)
    images = resolve_images(request, profile, facts, size, offer)
    environment = resolve_environment(request, profile, facts, size, images[0])
    network = profile.network.kind if profile.network else "none"
    comparable = network in size.fabric.measures and all(feature.comparable for feature in size.features.values())
    sides = parse_sides(request.compare) if request.compare else ()
    comparison: Mapping[str, Any] = {}
    if sides:
        if request.libraries and not request.libraries.startswith("/"):
            problem = "ranks start in other folders; write the whole path that the nodes see"
            raise ConfigError(f"--libraries {request.libraries}: {problem}, such as /shared/libs")
        comparison = comparison_of(sides, libraries=request.libraries, blocks=request.blocks, seed=request.seed)
    least = {} if sides else _least_bandwidths(profile, size, comparable=comparable)
    workers = resolve_workers(request, profile, size, environment.placeholders)
    messages = [*lint(environment.variables, facts.nccl_variables)]
    for image in images:
        messages += [*_notes(request, facts, size, image, environment), *_known_faults(profile, size, image)]
    told = tuple(dict.fromkeys(messages))
    return Job(request, profile, size, images, environment, comparable, least, workers, told, comparison)


def _least_bandwidths(profile: Profile, size: Size, *, comparable: bool) -> Mapping[str, tuple[str, str]]:
    """Return for each collective the bus bandwidth in GB/s that the best message size must reach, and the reason.
    The bandwidth is the value of `--param min-bw`, or else comes from the profile."""
    value, collectives = size.parameters.get("min-bw"), size.test.collectives
    if value and len(collectives) != 1:
        problem = "this test has no single bus bandwidth; choose a test with one collective"
        raise ConfigError(f"--param min-bw: {problem}")
    if value:
        return {collectives[0]: (value, "GB/s, by --param min-bw")}
    if not (comparable and size.test.max_bytes.endswith("G")):  # smaller messages measure latency
        return {}
    try:
        layout = rank_layout(profile, size.run_ranks, size.run_nodes)
    except NotComparable:
        return {}
    least: dict[str, tuple[str, str]] = {}
    for collective in collectives:
        references = profile.references_at(collective, size.run_ranks, size.run_nodes)
        known = [reference.rate * reference.tolerance for reference in references if not reference.forced]
        if known:
            least[collective] = f"{known[-1]:.1f}", f"GB/s that {profile.name} asks of the best size"
        elif floor := floor_of(profile, layout, class_ceilings(collective, size.run_ranks, layout)):
            least[collective] = f"{floor.value:.1f}", f"GB/s: {floor.what}"
    return least


def _known_faults(profile: Profile, size: Size, image: JobImage) -> Iterator[str]:
    """Yield a note about the advisories that apply to the image and to the machines of the job."""
    nvlink = ("nvlink",) if size.mnnvl and size.nodes > 1 else ()
    fabrics = size.fabric.measures if size.run_nodes > 1 else ("none",)
    place = replace(profile.place, fabrics=(*fabrics, *nvlink))
    nccl = image.components.keys() & COMPONENTS["nccl"].keys() or ["NCCL"]
    driver = size.parameters.get("driver") or size.cluster.driver
    versions = {**image.components, **dict.fromkeys(nccl, image.nccl), "driver": driver}
    if faults := shortened(known_bad(versions, place), most=5):
        yield f"note: known faults of these versions: {faults}; `imagebuild plan --osv -` explains them"


def _notes(request: JobRequest, facts: JobFacts, size: Size, image: JobImage, environment: Environment) -> list[str]:
    notes = []
    if request.cluster == GENERIC:
        chosen = {"NCCL_SOCKET_IFNAME": "interface", "NCCL_IB_HCA": "hca"}
        used = {v.name: v.value for v in environment.variables if v.layer != "--param"}
        own = [name for name, option in chosen.items() if name in used and option not in size.parameters]
        if own:
            values = " and ".join(f"{name}={used[name]}" for name in own)
            options = " and ".join(f"--param {chosen[name]}=VALUE" for name in own)
            remedy = f"check the nodes, and set {options}, or describe the cluster in jobs/clusters/NAME.yaml"
            notes.append(f"note: without --cluster, the job assumes {values}; {remedy}")
    if image.driver and not (request.image or size.parameters.get("driver") or size.cluster.driver):
        advice = "if the nodes have an older driver, set --param driver=VERSION"
        notes.append(f"note: {image.reference} needs driver {image.driver} or later; {advice}")
    if image.is_planned:
        notes.append(f"note: {image.reference} {PLANNED}")
    if image.nccl is None:
        place = "image" if image.reference else "nodes"
        assumed = f"the job assumes {facts.nccl_variables.release}; set it with --nccl"
        notes.append(f"note: the NCCL version of the {place} is not known; {assumed}")
    return notes
