"""Resolve a job: facts and a request in; its name, environment and pods out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imagebuild.bench.ceilings import NotComparable, class_ceilings, rank_layout
from imagebuild.bench.judge import floor_of
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import matches
from imagebuild.core.yaml import YamlFile
from imagebuild.jobs.choose import Choices, Offer, choose, container_of
from imagebuild.jobs.environment import (
    FactSource,
    Variable,
    layered_variables,
    lint,
    merge,
    parse_settings,
)
from imagebuild.jobs.facts import Expect, JobFacts, JobRequest, Pod, Scope, SlurmOptions
from imagebuild.jobs.kubernetes import Placement, choose_placement, worker_pod

NAME_LENGTH = {"mpijob": 51, "jobset": 43, "slurm": 200}
"""Longest name of a job. Names of pods have at most 63 characters, of which the MPI operator adds up to 12
(`-worker-9999`) and JobSet up to 20 (`-worker-0-9999-abcde`)."""


@dataclass(frozen=True)
class Least:
    """Hold the bus bandwidth below which a job fails, and why."""

    rate: str
    why: str


@dataclass(frozen=True)
class Job(Choices):
    """Describe a job with nothing left to decide: all that the templates show."""

    name: str
    variables: tuple[Variable, ...]
    expected_lines: tuple[Expect, ...]
    """Lines that the output must contain."""
    pod: Pod
    """What worker pods need: of the fabric, of the cluster, and of the nodes."""
    least: Mapping[str, Least]
    """Collective → the bus bandwidth that its best size must reach."""
    placement: Placement
    """How worker pods come onto racks."""
    messages: tuple[str, ...]
    """Warnings and notes for the user."""

    @property
    def slurm_options(self) -> Mapping[str, str]:
        """Return what `--set`, the GPU's nodes or the cluster say of sbatch's options; the first of them counts."""
        parameters, nodes, slurm = self.parameters, self.nodes, self.cluster.slurm
        values = {
            name: parameters.get(name) or getattr(nodes, name) or getattr(slurm, name)
            for name in SlurmOptions.model_fields
        }
        return {name: value for name, value in values.items() if value}

    def in_scope(self, scope: Scope) -> list[Variable]:
        """Return the variables of a scope, in their order."""
        return [variable for variable in self.variables if variable.scope == scope]


def resolve_job(request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer) -> Job:
    """Return the job that the request asks for. Raises ConfigError with the reason if it is impossible."""
    settings = parse_settings(request.settings, container_of(request))
    choices = choose(request, profile, facts, offer, settings)
    parameters = choices.parameters
    placeholders = {
        "interface": parameters.get("interface") or choices.cluster.interface,
        "hca": parameters.get("hca") or choices.cluster.hca,
        "cards": str(profile.network.count if profile.network else 0),
        "gpus": str(profile.node.gpus),
    }
    sources = _fact_sources(choices, facts)
    variables = merge(
        [
            *layered_variables(sources, choices.conditions, placeholders),
            *_plugin_variables(choices),
            *settings.variables,
        ],
        choices.container,
    )

    if "hca" in parameters and all(variable.value != parameters["hca"] for variable in variables):
        raise ConfigError(f"--set hca: a job with --fabric {request.fabric} names no RDMA devices; leave it out")

    features = [name for name, feature in choices.features.items() if feature.in_name]
    parts = [request.test, str(choices.ranks), choices.gpu, choices.fabric.short, *features, f"{choices.scale.nodes}n"]
    name = parameters.get("name") or "-".join(parts)
    longest = NAME_LENGTH[request.scheduler]
    if len(name) > longest:
        raise ConfigError(f"the job's name {name!r} is longer than {longest} characters; set another: --set name=…")

    messages = lint(variables, facts.nccl_variables, choices.nccl)
    image, driver = choices.image, parameters.get("driver") or choices.cluster.driver
    if image.driver and not (request.image or driver):
        advice = "if the nodes have an older one, name it with --set driver=VERSION"
        messages.append(f"note: {image.reference} needs driver {image.driver} or later; {advice}")
    if image.nccl is None:
        messages.append(f"note: the version of NCCL is not known, so {choices.nccl} is assumed; name it with --nccl")

    expected = (line for source in sources for line in source.layer.expect)
    return Job(
        **vars(choices),
        name=name,
        variables=variables,
        expected_lines=tuple(line for line in expected if matches(line.when, choices.conditions)),
        pod=worker_pod(choices, placeholders),
        placement="anywhere" if request.scheduler == "slurm" else choose_placement(choices),
        least=_least_bandwidths(choices),
        messages=tuple(messages),
    )


def _fact_sources(choices: Choices, facts: JobFacts) -> list[FactSource]:
    """Return the layers of facts, lowest first: stack < fabric < node < cluster < feature < scheduler."""
    request, cluster = choices.request, facts.clusters[choices.request.cluster]
    files: list[tuple[str, YamlFile[Any]]] = [
        (f"stack {choices.image.stack}", facts.stacks[choices.image.stack]),
        (f"fabric {request.fabric}", facts.fabrics[request.fabric]),
        ("node", facts.node),
        (f"cluster {request.cluster}", cluster),
        *((f"feature {name}", facts.features[name]) for name in choices.features),
        (f"scheduler {request.scheduler}", facts.schedulers[request.scheduler]),
    ]
    sources = [FactSource(name, file, file.model) for name, file in files]
    site = f"fabric {request.fabric} of cluster {request.cluster}"
    sources.insert(2, FactSource(site, cluster, choices.site, ("fabrics", request.fabric)))
    return sources


def _plugin_variables(choices: Choices) -> list[Variable]:
    """Return the variables that name the network plug-in and its folder; `host` leaves both to the node."""
    plugin, plugins = choices.plugin, choices.stack.plugins
    if plugin == "host":
        return []
    if plugins is not None and plugin not in plugins:
        image = choices.image.reference
        raise ConfigError(f"{image}: the image has no plug-in {plugin!r}{suggestion(plugin, plugins)}")
    why = "what NCCL has built in, whatever else is installed" if plugin == "none" else "this plug-in and no other"
    variables = [Variable("NCCL_NET_PLUGIN", plugin, why, "plug-in", "plug-in")]
    if folder := (plugins or {}).get(plugin):
        why = "where the plug-in is; it must be found first"
        variables.append(Variable("LD_LIBRARY_PATH", folder, why, "plug-in", "plug-in", prepend=True))
    return variables


def _least_bandwidths(choices: Choices) -> dict[str, Least]:
    """Return what the best size of each collective must reach: what is asked for, or what the profile says."""
    value, profile = choices.parameters.get("min-bw"), choices.profile
    if value and len(choices.test.collectives) > 1:
        raise ConfigError("--set min-bw: the collectives of the test reach different rates; use a test of one")
    if value:
        return {choices.test.collectives[0]: Least(value, "GB/s, by --set min-bw")}
    if not (choices.comparable and choices.test.max_bytes.endswith("G")):  # smaller messages show latency
        return {}
    ranks, nodes = choices.run_ranks, choices.run_nodes
    try:
        layout = rank_layout(profile, ranks, nodes)
    except NotComparable:
        return {}
    least = {}
    for collective in choices.test.collectives:
        known = [
            reference
            for reference in profile.references
            if (reference.collective, reference.ranks, reference.nodes) == (collective, ranks, nodes)
            and not reference.forced
        ]
        ceilings = class_ceilings(collective, ranks, layout.domains, layout.hardware)
        if known:
            rate = known[-1].rate * known[-1].tolerance
            least[collective] = Least(f"{rate:.1f}", f"GB/s that {profile.name} asks of the best size")
        elif floor := floor_of(profile, layout, ceilings):
            least[collective] = Least(f"{floor.value:.1f}", f"GB/s: {floor.what}")
    return least
