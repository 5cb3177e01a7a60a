"""The settings of `--param`: parameters and environment variables of a job. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import get_args

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import Form
from imagebuild.jobs.facts import CPUS, GPUS, QUALIFIED, QUANTITY, SLURM_FORMS, VALUE, VALUE_FORM, Container, Env, Scope


class Variable(Env):
    """An environment variable of a job, and where the variable was set: in a facts file or by `--param`."""

    layer: str
    """Name of the facts that set the variable, for messages: such as `fabric ib`, or `--param`."""
    where: str
    """Place where the variable was set, for messages: file and line, or the option."""
    replaces: bool = False
    """True if `--param NAME:=VALUE` set the variable, so the value replaces the value of any layer."""


PLACES: Mapping[Container, str] = {
    "kubernetes": "Kubernetes", "pyxis": "Slurm with pyxis", "none": "Slurm without a container",
}  # fmt: skip
"""Maps each way to run ranks to its words in messages."""
_ALL: tuple[Container, ...] = get_args(Container)
_SLURM: tuple[Container, ...] = ("pyxis", "none")
_KUBERNETES: tuple[Container, ...] = ("kubernetes",)
_COUNT = Form("[1-9][0-9]{0,3}", "a number from 1 to 9999")
_IMAGES = Form("[/$][A-Za-z0-9_./${}:-]+", "a path that begins with / or with a variable such as $HOME")
_RESOURCE = Form(f"(?!{GPUS}:){QUALIFIED}:[1-9][0-9]{{0,3}}", "a resource of NICs and a number such as rdma/ib:8")
PARAMETERS: Mapping[str, tuple[Form, tuple[Container, ...]]] = {
    **{name: (form, _SLURM) for name, form in SLURM_FORMS.items()},
    "cpu": (CPUS, _KUBERNETES),
    "cpus-per-task": (_COUNT, _SLURM),
    "driver": (Form(r"[0-9]+(\.[0-9]+)*", "a version such as 580.65"), ("kubernetes", "pyxis")),
    "hca": (Form("[A-Za-z0-9_:,=^-]+", "names of RDMA devices such as mlx5 or =mlx5_0,mlx5_1"), _ALL),
    "images": (_IMAGES, ("pyxis",)),
    "interface": (Form("[A-Za-z0-9_.,=^-]+", "names of network interfaces such as eth0"), _ALL),
    "json": (Form("yes|no", "yes or no"), _ALL),
    "memory": (QUANTITY, _KUBERNETES),
    "min-bw": (Form(r"(?!0+(\.0*)?$)[0-9]{1,6}(\.[0-9]+)?", "a bus bandwidth in GB/s such as 350"), _ALL),
    "minutes": (_COUNT, _ALL),
    "name": (Form("[a-z]([-a-z0-9]*[a-z0-9])?", "a Kubernetes name: a-z, 0-9 and -, beginning with a letter"), _ALL),
    "plugin": (Form("[A-Za-z0-9_.-]+", "a plug-in such as none or spcx"), _ALL),
    "programs": (Form("/[A-Za-z0-9_./-]+", "a folder that begins with /"), _ALL),
    "rack-nodes": (_COUNT, _ALL),
    "racks": (Form(f"{VALUE}(,{VALUE})*", "label values, separated by commas"), _KUBERNETES),
    "resource": (_RESOURCE, _KUBERNETES),
    "suffix": (Form("[A-Za-z0-9_-]*", "the end of a program's name: letters, digits, - and _"), _ALL),
}
"""Maps each parameter to the form of its value, and to the ways to run ranks (`Container`) that support it."""
VARIABLE = re.compile(r"(?:(?P<scope>[a-z]+):)?(?P<name>[A-Z_][A-Z0-9_a-z]*)(?P<equals>:?=)(?P<value>.*)", re.DOTALL)


def parse_settings(settings: Iterable[str], container: Container) -> tuple[Mapping[str, str], tuple[Variable, ...]]:
    """Return the parameters and variables that `--param` sets.

    Raises ConfigError for a parameter that is unknown, repeated or not supported by this job, and for an invalid value.
    """
    parameters: dict[str, str] = {}
    variables: dict[str, Variable] = {}
    for setting in settings:
        match = VARIABLE.fullmatch(setting)
        name, equals, value = match.group("name", "equals", "value") if match else setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {setting}: write NAME=VALUE, such as minutes=30 or NCCL_IB_TC=41")
        if name in parameters or name in variables:
            raise ConfigError(f"--param {name}: given twice; remove one of the two")
        if match:
            scope = match["scope"] or "rank"
            if scope not in get_args(Scope):
                near = suggestion(scope, list(get_args(Scope)))
                raise ConfigError(f"--param {setting}: unknown scope {scope!r}{near}")
            if "$" in value or not VALUE_FORM.fits(value):
                raise ConfigError(f"--param {name}={value!r}: must be {VALUE_FORM.words}, and must not contain $")
            own = {"name": name, "value": value, "scope": scope, "replaces": equals == ":="}
            origin = {"layer": "--param", "where": f"--param {name}", "why": "set on the command line"}
            variables[name] = Variable.model_validate({**own, **origin})
            continue
        if name not in PARAMETERS:
            raise ConfigError(f"--param {name}: unknown parameter{suggestion(name, PARAMETERS)}")
        form, containers = PARAMETERS[name]
        if container not in containers:
            where = " and ".join(PLACES[one] for one in containers)
            problem = f"works only on {where}, but this job runs on {PLACES[container]}"
            raise ConfigError(f"--param {name}: {problem}; leave out --param {name}")
        if not form.fits(value):
            raise ConfigError(f"--param {name}={value!r}: must be {form.words}")
        parameters[name] = value
    return parameters, tuple(variables.values())
