"""Compute the environment of a job from layers of facts and from `--param`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, cast, get_args

from packaging.version import Version

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import Form, YamlFile, matches
from imagebuild.jobs.facts import (
    CPUS,
    GPUS,
    QUALIFIED,
    QUANTITY,
    SLURM_FORMS,
    VALUE,
    Container,
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
NO_SUCH_SCOPE: Mapping[Scope, str] = {
    "container": "with --container none there is no container; use rank or batch",
    "launcher": "Slurm starts ranks without a launcher; use rank or batch",
    "batch": "Kubernetes has no batch script; use rank, container or launcher",
}
"""Why a job does not have a scope, and what to use instead."""


@dataclass(frozen=True)
class Variable:
    """Describe a variable of the job's environment, and the layer that set it."""

    name: str
    value: str | None
    """None if ranks get the value that the launcher has."""
    why: str
    layer: str
    """Name of the layer, for messages: `fabric ib`, `--param`."""
    where: str
    """Place of the entry, for messages: file and line, or the option."""
    scope: Scope = "rank"
    prepend: bool = False
    """The value is a folder that is put before the folders that the rank's variable has already."""
    replaces: bool = False
    """The value was set by `--param NAME:=VALUE` and replaces the value of any layer."""


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
                variables.append(Variable(entry.name, value, entry.why, source.name, where, entry.scope, entry.prepend))
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
    """Return each variable once, as the highest layer sets it.

    Raises ConfigError if two layers disagree about a value, or if the job does not have the scope of a variable.
    """
    merged: dict[str, Variable] = {}
    for variable in variables:
        name, scope = variable.name, variable.scope
        if scope not in SCOPES[container]:
            raise ConfigError(f"{variable.where}: {name}: scope {scope}: {NO_SUCH_SCOPE[scope]}")
        earlier = merged.get(name)
        if earlier is None or variable.replaces or name in OVERRIDABLE:
            merged[name] = variable
        elif (earlier.value, earlier.scope) != (variable.value, scope):
            first, second = (f"{v.value!r} in scope {v.scope} from {v.layer} ({v.why})" for v in (earlier, variable))
            by_user = variable.layer == "--param"
            advice = (
                f"to replace the first, write --param {name}:={variable.value}" if by_user else "remove one of them"
            )
            raise ConfigError(f"{variable.where}: {name} has two values: {first}, and {second}; {advice}")
    return tuple(merged.values())


# `--param`


class Parameter(NamedTuple):
    """Describe a parameter of `--param`."""

    form: Form
    containers: tuple[Container, ...] = get_args(Container)
    """What runs the ranks of jobs that have it."""
    whose: str = ""
    """Who has it, where not all jobs do."""


_SLURM: tuple[tuple[Container, ...], str] = (("pyxis", "none"), "only jobs of Slurm have it")
_KUBERNETES: tuple[tuple[Container, ...], str] = (("kubernetes",), "only jobs of Kubernetes have it")
_COUNT = Form("[1-9][0-9]{0,3}", "a number from 1 to 9999")
_IMAGES = Form("[/$][A-Za-z0-9_./${}:-]+", "a path that begins with / or with a variable such as $HOME")
_VERSION = Form(r"[0-9]+(\.[0-9]+)*", "a version such as 580.65")
PARAMETERS: Mapping[str, Parameter] = {
    **{name: Parameter(form, *_SLURM) for name, form in SLURM_FORMS.items()},
    "cpu": Parameter(CPUS, *_KUBERNETES),
    "cpus-per-task": Parameter(_COUNT, *_SLURM),
    "driver": Parameter(_VERSION, ("kubernetes", "pyxis"), "it chooses an image, and this job has none"),
    "hca": Parameter(Form("[A-Za-z0-9_:,=^-]+", "names of cards such as mlx5 or =mlx5_0,mlx5_1")),
    "images": Parameter(_IMAGES, ("pyxis",), "only pyxis keeps images in a folder"),
    "interface": Parameter(Form("[A-Za-z0-9_.,=^-]+", "names of network interfaces such as eth0")),
    "json": Parameter(Form("yes|no", "yes or no")),
    "memory": Parameter(QUANTITY, *_KUBERNETES),
    "min-bw": Parameter(Form(r"(?!0+(\.0*)?$)[0-9]{1,6}(\.[0-9]+)?", "a bus bandwidth in GB/s such as 350")),
    "minutes": Parameter(_COUNT),
    "name": Parameter(Form("[a-z]([-a-z0-9]*[a-z0-9])?", "a name of Kubernetes: a-z, 0-9 and -, first a letter")),
    "plugin": Parameter(Form("[A-Za-z0-9_.-]+", "the name of a plug-in such as none or spcx")),
    "programs": Parameter(Form("/[A-Za-z0-9_./-]+", "a folder that begins with /")),
    "rack-nodes": Parameter(_COUNT),
    "racks": Parameter(Form(f"{VALUE}(,{VALUE})*", "values of a label, with commas between them"), *_KUBERNETES),
    "resource": Parameter(
        Form(f"(?!{GPUS}:){QUALIFIED}:[1-9][0-9]{{0,3}}", "a resource of cards and a number such as rdma/ib:8"),
        *_KUBERNETES,
    ),
    "suffix": Parameter(Form("[A-Za-z0-9_-]*", "the end of a program's name: letters, digits, - and _")),
}
VARIABLE = re.compile(r"(?:(?P<scope>[a-z]+):)?(?P<name>[A-Z_][A-Z0-9_a-z]*)(?P<replace>:?)=(?P<value>.*)", re.DOTALL)


def parse_settings(settings: Iterable[str], container: Container) -> tuple[Mapping[str, str], tuple[Variable, ...]]:
    """Return the parameters and the variables in the texts of `--param`, for a job whose ranks `container` runs.

    Raises ConfigError for parameters that are unknown, repeated or of other jobs, and for values that cannot be used.
    """
    parameters: dict[str, str] = {}
    variables: list[Variable] = []
    for setting in settings:
        if match := VARIABLE.fullmatch(setting):
            name, value, scope = match["name"], match["value"], match["scope"] or "rank"
            if scope not in get_args(Scope):
                raise ConfigError(
                    f"--param {setting}: unknown scope {scope!r}{suggestion(scope, list(get_args(Scope)))}"
                )
            if any(variable.name == name for variable in variables):
                raise ConfigError(f"--param {name}: given twice; leave one out")
            if bad := next((c for c in value if c in "'\"\\`" or not c.isprintable()), None):
                raise ConfigError(
                    f"--param {name}: the value contains {bad!r}, which shells or files on its way would interpret; "
                    "leave it out"
                )
            if "$" in value:
                raise ConfigError(f"--param {name}: the value contains '$'; write the text that it stands for")
            why, replaces = "set on the command line", bool(match["replace"])
            variables.append(
                Variable(name, value, why, "--param", f"--param {name}", cast(Scope, scope), replaces=replaces)
            )
            continue
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {setting}: write NAME=VALUE, such as minutes=30 or NCCL_IB_TC=41")
        if name not in PARAMETERS:
            raise ConfigError(f"--param {name}: unknown parameter{suggestion(name, PARAMETERS)}")
        parameter = PARAMETERS[name]
        if container not in parameter.containers:
            raise ConfigError(f"--param {name}: {parameter.whose}; leave it out")
        if name in parameters:
            raise ConfigError(f"--param {name}: given twice; leave one out")
        if not parameter.form.fits(value):
            raise ConfigError(f"--param {name}={value!r}: must be {parameter.form.words}")
        parameters[name] = value
    return parameters, tuple(variables)


# What NCCL reads

NOT_OF_NCCL = ("NCCL_TESTS_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_IBEXT_", "NCCL_OFI_")
"""Beginnings of variables that nccl-tests or plug-ins read, and NCCL does not."""


def lint(variables: Iterable[Variable], table: NcclVariables, nccl: str) -> list[str]:
    """Return `warning: …` for variables that NCCL does not read."""
    older = [release for release in table.releases if Version(release) <= Version(nccl)]
    release = older[-1] if older else table.releases[0]
    position = table.releases.index
    messages = []
    for variable in variables:
        name = variable.name
        if not name.startswith("NCCL_") or name.startswith(NOT_OF_NCCL):
            continue
        row = table.names.get(name)
        if row is None:
            near = get_close_matches(name, table.names, n=1, cutoff=0.85)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            messages.append(f"warning: {variable.where}: NCCL {release} does not read {name}{hint}")
        elif release in row.absent or not position(row.since) <= position(release) <= position(row.until):
            readers = f"releases {row.since} to {row.until} do"
            messages.append(f"warning: {variable.where}: NCCL {release} does not read {name}; {readers}")
    if messages and release != nccl:
        where = "the nearest release in the table of NCCL's variables"
        messages.append(f"note: the image has NCCL {nccl}; its variables were looked up for {release}, {where}")
    return messages
