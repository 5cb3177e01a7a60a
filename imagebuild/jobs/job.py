"""Make a job: facts and a request in, the text of a manifest or of a batch script out. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.jobs import kubernetes, slurm
from imagebuild.jobs.choose import Choices, Job, Offer, choose
from imagebuild.jobs.environment import (
    FactSource,
    JobSettings,
    Variable,
    expected_lines,
    fill_placeholders,
    layered_variables,
    lint,
    merge,
    parse_settings,
)
from imagebuild.jobs.facts import JobFacts, JobHardware, JobRequest, Pod

NAME_LENGTH = {"mpijob": 51, "jobset": 43, "slurm": 200}
"""Longest name of a job. Names of pods have at most 63 characters, of which the MPI operator adds up to 12
(`-worker-9999`) and JobSet up to 20 (`-worker-0-9999-abcde`)."""


def resolve_job(request: JobRequest, hardware: JobHardware, facts: JobFacts, offer: Offer) -> Job:
    """Return the job that the request asks for. Raises ConfigError with the reason if it is impossible."""
    settings = parse_settings(request.settings)
    choices = choose(request, hardware, facts, offer, settings)
    placeholders = {
        "interface": settings.parameters.get("interface") or choices.cluster.interface,
        "hca": settings.parameters.get("hca") or choices.cluster.hca,
        "cards": str(hardware.cards),
        "gpus": str(hardware.gpus),
    }
    sources = _fact_sources(choices, facts)
    variables = merge(
        [
            *layered_variables(sources, choices.conditions, placeholders),
            *_plugin_variables(choices),
            *_least_bandwidth(settings, choices),
            *settings.variables,
        ],
        request.scheduler,
        choices.container,
    )

    features = [name for name, feature in choices.features.items() if feature.in_name]
    nodes, ranks = choices.scale.nodes, choices.scale.nodes * hardware.gpus
    parts = [request.test, str(ranks), hardware.gpu, choices.fabric.short, *features, f"{nodes}n"]
    name = settings.parameters.get("name") or "-".join(parts)
    longest = NAME_LENGTH[request.scheduler]
    if len(name) > longest:
        raise ConfigError(f"the job's name {name!r} is longer than {longest} characters; set another: --set name=…")

    messages = lint(variables, facts.nccl_variables, choices.nccl)
    image, driver = choices.image, settings.parameters.get("driver") or choices.cluster.driver
    if image.driver and not (request.image or driver):
        advice = "if the nodes have an older one, name it with --set driver=VERSION"
        messages.append(f"note: {image.reference} needs driver {image.driver} or later; {advice}")
    if image.nccl is None:
        messages.append(f"note: the version of NCCL is not known, so {choices.nccl} is assumed; name it with --nccl")

    return Job(
        choices=choices,
        name=name,
        variables=variables,
        expected_lines=expected_lines(sources, choices.conditions),
        pod=_pod(choices, settings, placeholders),
        parameters=settings.parameters,
        messages=tuple(messages),
    )


def job_text(job: Job) -> str:
    """Return the job as a batch script of Slurm, or as objects of Kubernetes in YAML. Equal jobs give equal text."""
    match job.request.scheduler:
        case "mpijob":
            return kubernetes.mpijob(job)
        case "jobset":
            return kubernetes.jobset(job)
        case "slurm":
            return slurm.batch_script(job)


def _fact_sources(choices: Choices, facts: JobFacts) -> list[FactSource]:
    """Return the layers of facts, lowest first: stack < fabric < node < cluster < feature < scheduler."""
    request, stack = choices.request, choices.image.stack
    cluster = facts.clusters[request.cluster]
    fabric = facts.fabrics[request.fabric]
    scheduler = facts.schedulers[request.scheduler]
    features = {name: facts.features[name] for name in choices.features}
    site = f"fabric {request.fabric} of cluster {request.cluster}"
    return [
        FactSource(f"stack {stack}", facts.stacks[stack].model, facts.stacks[stack].at),
        FactSource(f"fabric {request.fabric}", fabric.model, fabric.at),
        FactSource(site, choices.site, cluster.at, ("fabrics", request.fabric)),
        FactSource("node", facts.node.model, facts.node.at),
        FactSource(f"cluster {request.cluster}", cluster.model, cluster.at),
        *(FactSource(f"feature {name}", file.model, file.at) for name, file in features.items()),
        FactSource(f"scheduler {request.scheduler}", scheduler.model, scheduler.at),
    ]


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


def _least_bandwidth(settings: JobSettings, choices: Choices) -> list[Variable]:
    """Return the variable that makes nccl-tests itself fail if it is slow: nothing else may judge the speed."""
    value, origin = settings.parameters.get("min-bw"), "--set min-bw"
    test, hardware, nodes = choices.test, choices.hardware, choices.scale.nodes
    if value and len(test.collectives) > 1:
        raise ConfigError("--set min-bw: the collectives of the test reach different rates; use a test of one")
    if value is None and choices.comparable and test.large:
        threshold = hardware.thresholds.get((test.collectives[0], nodes * hardware.gpus, nodes))
        if threshold:
            value, origin = f"{threshold:.1f}", f"profile {hardware.profile}"
    if value is None:
        return []
    why = "GB/s that the profile asks of the best size; nccl-tests fails where the average is below 90 % of it"
    return [Variable("NCCL_TESTS_MIN_BW", value, why, origin, origin)]


def _pod(choices: Choices, settings: JobSettings, placeholders: Mapping[str, str]) -> Pod:
    """Return what worker pods need: what the fabric needs, and what the cluster adds to it."""
    fabric, site = choices.fabric.pod, choices.site.pod
    if any(feature.without_fabric for feature in choices.features.values()):
        return Pod(select=site.select)
    resources = {**fabric.resources, **site.resources}
    if resource := settings.parameters.get("resource"):
        name, _, count = resource.rpartition(":")
        resources = {name: count}
    return Pod(
        resources={name: fill_placeholders(count, placeholders, name) for name, count in sorted(resources.items())},
        annotations={**fabric.annotations, **site.annotations},
        networks=site.networks or fabric.networks,
        select={**fabric.select, **site.select},
        volumes=(*fabric.volumes, *site.volumes),
        sidecars=(*fabric.sidecars, *site.sidecars),
    )
