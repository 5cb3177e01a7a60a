"""Compute the environment of a job from layers of facts and from `--param`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import Form, YamlFile, matches
from imagebuild.jobs.facts import (
    CPUS,
    GPUS,
    QUALIFIED,
    QUANTITY,
    SLURM_FORMS,
    VALUE,
    VALUE_FORM,
    Container,
    Env,
    FactLayer,
    NcclVariables,
    Scope,
)

OVERRIDABLE = ("NCCL_NET_PLUGIN", "LD_LIBRARY_PATH", "UCX_NET_DEVICES", "NCCL_IB_HCA")
"""Variables that a higher layer may set to another value. For all others, two values are an error."""

SCOPES: Mapping[Container, tuple[Scope, ...]] = {
    "kubernetes": ("rank", "container", "launcher"),
    "pyxis": ("rank", "container", "batch"),
    "none": ("rank", "batch"),
}
"""What runs the ranks → the scopes that its jobs have."""


class Variable(Env):
    """Describe a variable of the job's environment, and the layer that set it."""

    layer: str
    """Name of the layer, for messages: `fabric ib`, `--param`."""
    where: str
    """Place of the entry, for messages: file and line, or the option."""
    replaces: bool = False
    """It was set by `--param NAME:=VALUE`."""


@dataclass(frozen=True)
class FactSource:
    """Name a layer of facts and the file that it comes from."""

    name: str
    file: YamlFile[Any]
    layer: FactLayer
    path: tuple[str, ...] = ()
    """Keys that lead to the layer in its file."""


def layered_variables(
    sources: Iterable[FactSource], conditions: Mapping[str, str], placeholders: Mapping[str, str]
) -> list[Variable]:
    """Return the variables whose condition holds, lowest layer first. Raises ConfigError for an unknown placeholder."""
    variables = []
    for source in sources:
        for i, entry in enumerate(source.layer.env):
            if matches(entry.when, conditions):
                where = source.file.at(*source.path, "env", i)
                value = None if entry.value is None else fill_placeholders(entry.value, placeholders, where)
                own = {**dict(entry), "value": value, "layer": source.name, "where": where}
                variables.append(Variable.model_construct(**own))
    return variables


def fill_placeholders(text: str, placeholders: Mapping[str, str], where: str) -> str:
    """Replace `{name}` by its value. Raises ConfigError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in placeholders:
            known = ", ".join(sorted(placeholders))
            raise ConfigError(f"{where}: unknown placeholder {{{match[1]}}}; known: {known}")
        return placeholders[match[1]]

    return re.sub(r"(?<!\$){([a-z][a-z0-9-]*)}", value, text)


def merge(variables: Iterable[Variable], container: Container) -> tuple[Variable, ...]:
    """Return each variable once, as the highest layer sets it. Raises ConfigError where two layers disagree."""
    merged: dict[str, Variable] = {}
    for variable in variables:
        name, scope = variable.name, variable.scope
        if scope not in SCOPES[container]:
            has = f"a job of {container} has the scopes {', '.join(SCOPES[container])}"
            raise ConfigError(f"{variable.where}: {name}: scope {scope}: {has}; use one of them")
        earlier = merged.get(name)
        if earlier is None or variable.replaces or name in OVERRIDABLE:
            merged[name] = variable
        elif (earlier.value, earlier.scope) != (variable.value, scope):
            first, second = (f"{v.value!r} in scope {v.scope} from {v.layer} ({v.why})" for v in (earlier, variable))
            advice = "remove one of them"
            if variable.layer == "--param":
                advice = f"to replace the first, write --param {name}:={variable.value}"
            raise ConfigError(f"{variable.where}: {name} has two values: {first}, and {second}; {advice}")
    return tuple(merged.values())


# `--param`

_ALL: tuple[Container, ...] = get_args(Container)
_SLURM: tuple[Container, ...] = ("pyxis", "none")
_KUBERNETES: tuple[Container, ...] = ("kubernetes",)
_COUNT = Form("[1-9][0-9]{0,3}", "a number from 1 to 9999")
_IMAGES = Form("[/$][A-Za-z0-9_./${}:-]+", "a path that begins with / or with a variable such as $HOME")
_RESOURCE = Form(f"(?!{GPUS}:){QUALIFIED}:[1-9][0-9]{{0,3}}", "a resource of cards and a number such as rdma/ib:8")
PARAMETERS: Mapping[str, tuple[Form, tuple[Container, ...]]] = {
    **{name: (form, _SLURM) for name, form in SLURM_FORMS.items()},
    "cpu": (CPUS, _KUBERNETES),
    "cpus-per-task": (_COUNT, _SLURM),
    "driver": (Form(r"[0-9]+(\.[0-9]+)*", "a version such as 580.65"), ("kubernetes", "pyxis")),
    "hca": (Form("[A-Za-z0-9_:,=^-]+", "names of cards such as mlx5 or =mlx5_0,mlx5_1"), _ALL),
    "images": (_IMAGES, ("pyxis",)),
    "interface": (Form("[A-Za-z0-9_.,=^-]+", "names of network interfaces such as eth0"), _ALL),
    "json": (Form("yes|no", "yes or no"), _ALL),
    "memory": (QUANTITY, _KUBERNETES),
    "min-bw": (Form(r"(?!0+(\.0*)?$)[0-9]{1,6}(\.[0-9]+)?", "a bus bandwidth in GB/s such as 350"), _ALL),
    "minutes": (_COUNT, _ALL),
    "name": (Form("[a-z]([-a-z0-9]*[a-z0-9])?", "a name of Kubernetes: a-z, 0-9 and -, first a letter"), _ALL),
    "plugin": (Form("[A-Za-z0-9_.-]+", "the name of a plug-in such as none or spcx"), _ALL),
    "programs": (Form("/[A-Za-z0-9_./-]+", "a folder that begins with /"), _ALL),
    "rack-nodes": (_COUNT, _ALL),
    "racks": (Form(f"{VALUE}(,{VALUE})*", "values of a label, with commas between them"), _KUBERNETES),
    "resource": (_RESOURCE, _KUBERNETES),
    "suffix": (Form("[A-Za-z0-9_-]*", "the end of a program's name: letters, digits, - and _"), _ALL),
}
"""Name → the form of its values, and what runs the ranks of jobs that have it."""
VARIABLE = re.compile(r"(?:(?P<scope>[a-z]+):)?(?P<name>[A-Z_][A-Z0-9_a-z]*)(?P<equals>:?=)(?P<value>.*)", re.DOTALL)


def parse_settings(settings: Iterable[str], container: Container) -> tuple[Mapping[str, str], tuple[Variable, ...]]:
    """Return the parameters and the variables in the texts of `--param`.

    Raises ConfigError for parameters that are unknown, repeated or of other jobs, and for values that cannot be used.
    """
    parameters: dict[str, str] = {}
    variables: dict[str, Variable] = {}
    for setting in settings:
        match = VARIABLE.fullmatch(setting)
        name, equals, value = match.group("name", "equals", "value") if match else setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {setting}: write NAME=VALUE, such as minutes=30 or NCCL_IB_TC=41")
        if name in parameters or name in variables:
            raise ConfigError(f"--param {name}: given twice; leave one out")
        if match:
            scope = match["scope"] or "rank"
            if scope not in get_args(Scope):
                near = suggestion(scope, list(get_args(Scope)))
                raise ConfigError(f"--param {setting}: unknown scope {scope!r}{near}")
            if "$" in value or not VALUE_FORM.fits(value):
                raise ConfigError(f"--param {name}={value!r}: must be {VALUE_FORM.words}, and without $")
            own = {"name": name, "value": value, "scope": scope, "replaces": equals == ":="}
            origin = {"layer": "--param", "where": f"--param {name}", "why": "set on the command line"}
            variables[name] = Variable.model_validate({**own, **origin})
            continue
        if name not in PARAMETERS:
            raise ConfigError(f"--param {name}: unknown parameter{suggestion(name, PARAMETERS)}")
        form, containers = PARAMETERS[name]
        if container not in containers:
            where = " or ".join(containers)
            raise ConfigError(f"--param {name}: is for {where} only, and this job has {container}; leave it out")
        if not form.fits(value):
            raise ConfigError(f"--param {name}={value!r}: must be {form.words}")
        parameters[name] = value
    return parameters, tuple(variables.values())


# What NCCL reads

NOT_OF_NCCL = ("NCCL_TESTS_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_IBEXT_", "NCCL_OFI_")
"""Beginnings of variables that nccl-tests or plug-ins read, and NCCL does not."""


def lint(variables: Iterable[Variable], known: NcclVariables) -> list[str]:
    """Return `warning: …` for variables that NCCL does not read."""
    messages = []
    for variable in variables:
        name = variable.name
        if name.startswith("NCCL_") and not name.startswith(NOT_OF_NCCL) and name not in known.names:
            near = get_close_matches(name, known.names, n=1, cutoff=0.85)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            messages.append(f"warning: {variable.where}: NCCL {known.release} does not read {name}{hint}")
    return messages
