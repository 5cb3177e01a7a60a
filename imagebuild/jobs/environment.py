"""Third of the four steps that decide a job: the environment of the ranks, from the files in `jobs/` and `--param`.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import YamlFile, matches
from imagebuild.jobs.facts import (
    DATA,
    Container,
    Expect,
    FactLayer,
    JobFacts,
    NcclVariables,
    Scope,
    Stack,
    fill_placeholders,
)
from imagebuild.jobs.image import JobImage, conditions_of_image, plugin_remedy
from imagebuild.jobs.request import JobRequest
from imagebuild.jobs.size import Size, Variable, conditions_of_size


@dataclass(frozen=True)
class FactSource:
    """A layer: the variables and expected lines of one facts file, or of one key in the file."""

    name: str
    file: YamlFile[Any]
    layer: FactLayer
    path: tuple[str, ...] = ()
    """Keys under which the file contains the layer. Empty if the layer is the whole file."""


@dataclass(frozen=True)
class Environment:
    """The environment of a job's ranks, and the lines that the output of the job must contain."""

    stack: Stack
    """The programs and plug-ins of the image, after the changes that `--param` makes."""
    placeholders: Mapping[str, str]
    """Maps each placeholder in facts, such as `hca` for `{hca}`, to the text that replaces the placeholder."""
    variables: tuple[Variable, ...]
    expected_lines: tuple[Expect, ...]
    """Lines that the output of the job must contain."""

    @property
    def scopes(self) -> Mapping[Scope, tuple[Variable, ...]]:
        """Maps each scope (the place where variables are set) to the variables that are set there."""
        return {scope: tuple(v for v in self.variables if v.scope == scope) for scope in get_args(Scope)}


def resolve_environment(
    request: JobRequest, profile: Profile, facts: JobFacts, size: Size, image: JobImage
) -> Environment:
    """Return the environment of a job.
    Raises ConfigError if two layers give a variable different values, or if the image does not contain the plug-in."""
    parameters, cluster = size.parameters, size.cluster
    own = {name: parameters[name] for name in ("programs", "suffix") if name in parameters}
    stack = facts.stacks[image.stack].model.model_copy(update=own)
    conditions = conditions_of_image(conditions_of_size(request, profile, facts, size), image, facts)
    placeholders = {
        "interface": parameters.get("interface") or cluster.interface,
        "hca": parameters.get("hca") or cluster.hca,
        "cards": str(profile.network.count if profile.network else 0),
        "gpus": str(size.gpus),
    }
    sources = _fact_sources(request, facts, size, image)
    known = layered_variables(sources, conditions, placeholders)
    chosen = _plugin_variables(facts, size, image, stack)
    lines = (line for source in sources for line in source.layer.expect)
    variables = merge([*known, *chosen, *size.variables], size.container)
    return Environment(stack, placeholders, variables, tuple(li for li in lines if matches(li.when, conditions)))


def _fact_sources(request: JobRequest, facts: JobFacts, size: Size, image: JobImage) -> list[FactSource]:
    """Return the layers of facts, from the lowest to the highest. `merge` says when a higher layer replaces a value."""
    cluster = facts.clusters[request.cluster]

    def source(name: str, file: YamlFile[Any]) -> FactSource:
        return FactSource(name, file, file.model)

    site = f"fabric {request.fabric} of cluster {request.cluster}"
    return [
        source(f"stack {image.stack}", facts.stacks[image.stack]),
        source(f"fabric {request.fabric}", facts.fabrics[request.fabric]),
        FactSource(site, cluster, size.site, ("fabrics", request.fabric)),
        source("node", facts.node),
        source(f"cluster {request.cluster}", cluster),
        *(source(f"feature {name}", facts.features[name]) for name in size.features),
        source(f"scheduler {request.scheduler}", facts.schedulers[request.scheduler]),
    ]


def _plugin_variables(facts: JobFacts, size: Size, image: JobImage, stack: Stack) -> list[Variable]:
    """Return the variables that name the network plug-in of NCCL and the folder of the plug-in.
    Return an empty list for the plug-in `host`, because the node sets these variables."""
    plugin, plugins = size.plugin, stack.plugins
    if plugin == "host":
        return []
    if stack.lacks_plugin(plugin, image.components):
        remedy = plugin_remedy(plugin, facts.stacks)
        advice = f"; {remedy}choose another plug-in" if remedy else suggestion(plugin, plugins or {})
        raise ConfigError(f"{image.reference}: the image has no plug-in {plugin!r}{advice}")
    why = "the transport built into NCCL, even if a plug-in is installed" if plugin == "none" else "only this plug-in"
    place = {"layer": "plug-in", "where": "plug-in"}
    variables = [Variable(name="NCCL_NET_PLUGIN", value=plugin, why=why, **place)]
    if folder := (plugins or {}).get(plugin):
        why = "the folder of the plug-in, before all other folders"
        variables.append(Variable(name="LD_LIBRARY_PATH", value=folder, why=why, prepend=True, **place))
    return variables


def layered_variables(
    sources: Iterable[FactSource], conditions: Mapping[str, str], placeholders: Mapping[str, str]
) -> list[Variable]:
    """Return the variables whose condition (`when`) is true, those of the lowest layer first.
    Raises ConfigError for an unknown placeholder."""
    variables = []
    for source in sources:
        for i, entry in enumerate(source.layer.env):
            if matches(entry.when, conditions):
                where = source.file.at(*source.path, "env", i)
                value = None if entry.value is None else fill_placeholders(entry.value, placeholders, where)
                own = {**dict(entry), "value": value, "layer": source.name, "where": where}
                variables.append(Variable.model_construct(**own))
    return variables


def merge(variables: Iterable[Variable], container: Container) -> tuple[Variable, ...]:
    """Merge variables that are ordered by layer, so that each variable occurs once.

    The last layer wins for the variables in `overridable` of facts.yaml. Raises ConfigError if layers give another
    variable different values, or if a variable has a scope (the place where it is set) that this kind of job lacks."""
    merged: dict[str, Variable] = {}
    for variable in variables:
        name, scope = variable.name, variable.scope
        if scope not in DATA["scopes"][container]:
            place, scopes = DATA["places"][container], ", ".join(DATA["scopes"][container])
            raise ConfigError(f"{variable.where}: {name}: jobs on {place} have no scope {scope}; use {scopes}")
        earlier = merged.get(name)
        if earlier is None or variable.replaces or name in DATA["overridable"]:
            merged[name] = variable
        elif (earlier.value, earlier.scope) != (variable.value, scope):
            first, second = (f"{v.value!r} in scope {v.scope} from {v.layer} ({v.why})" for v in (earlier, variable))
            advice = "remove one of the two values"
            if variable.layer == "--param":
                advice = f"to replace the first value, write --param {name}:={variable.value}"
            raise ConfigError(f"{variable.where}: {name} has two values: {first}, and {second}; {advice}")
    return tuple(merged.values())


def lint(variables: Iterable[Variable], known: NcclVariables) -> list[str]:
    """Return a warning for each variable whose name looks like a setting of NCCL, but which NCCL does not read."""
    messages = []
    for variable in variables:
        name = variable.name
        if name.startswith("NCCL_") and not name.startswith(tuple(DATA["not_of_nccl"])) and name not in known.names:
            near = get_close_matches(name, known.names, n=1, cutoff=0.85)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            messages.append(f"warning: {variable.where}: NCCL {known.release} does not read {name}{hint}")
    return messages
