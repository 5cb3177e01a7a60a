"""Define the type of `component.yaml`: how one piece is obtained, built, installed and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from imagebuild.core.fields import (
    Condition,
    EnvironmentValue,
    Folder,
    Form,
    GitUrl,
    Model,
    Name,
    PackageText,
    Url,
    Variable,
    matches,
)
from imagebuild.project.lockfile import Unpacked
from imagebuild.project.matrix import CheckWaiver

Variant = Literal["runtime", "devel"]
"""Kinds of images of one target: to run programs, and to compile them as well."""


def parse_need(text: str) -> tuple[str, int]:
    """Return facility (`gpus`, `rdma`, `nodes`, `slurm`) and number of a need."""
    what, _, least = text.partition(">=")
    return "gpus" if what == "gpu" else what, int(least or 1)


def nodes_needed(needs: Iterable[str]) -> int:
    return max((least for what, least in map(parse_need, needs) if what == "nodes"), default=1)


def _rows(value: Any) -> Any:
    return [{"values": value}] if isinstance(value, dict) else value


NeedText = Annotated[
    str, Form("gpu|rdma|slurm|(gpus|nodes)>=[1-9][0-9]*", "a need: gpu, rdma, slurm, gpus>=N or nodes>=N")
]
ScriptName = Annotated[str, Form("([a-z0-9-]+/)?[a-z0-9][a-z0-9-]*", "NAME or COMPONENT/NAME, in lower case")]


class Check(Model):
    """Describe a statement about an image that can be run."""

    name: Name
    description: str
    """What passing proves, in one line."""
    run: str | None = None
    """Shell commands, run by bash inside the image; status 0 passes."""
    script: ScriptName | None = None
    """Instead of `run`: the file `checks/<script>.sh`, or another component's as `<component>/<script>`. Without both
    it is `checks/<name>.sh`."""
    expect: str | None = None
    """Regular expression that must occur in the output; `{version}` stands for the component's version."""
    needs: tuple[NeedText, ...] = ()
    """What the place must have; elsewhere the check is skipped."""
    environment: dict[Variable, str] = Field(default_factory=dict)
    """Variables for the commands, for checks that share a script."""
    ranks: Annotated[int, Field(gt=0)] = 1
    """Number of ranks that srun starts; more than one needs `slurm`."""
    results: Literal["nccl-tests", "nvbandwidth", "perftest", "ucx_perftest", "nvshmem", "dcgmi"] | None = None
    """The benchmark whose output is read; it passes only if what was read is good."""
    when: Condition = Field(default_factory=dict)
    """Targets the check is about; elsewhere it is skipped."""
    user: str = "root"
    """User the commands run as."""
    timeout_s: Annotated[int, Field(gt=0)] = 60
    attempts: Annotated[int, Field(gt=0, le=5)] = 1
    """How often it is started as long as it does not end in time, for programs that are known to hang now and then. The
    result says so."""

    @model_validator(mode="after")
    def _consistent(self) -> Check:
        try:
            re.compile(self.expect or "")
        except re.error as error:
            problem = f"{self.expect!r} is no regular expression: {error}"
            raise ValueError(f"expect: {problem}; put \\ before a sign meant as it is") from None
        if self.ranks > 1 and "slurm" not in self.needs:
            raise ValueError("ranks: srun starts them; write needs: [slurm]")
        return self


class Support(Model):
    """Hold what a component can, or cannot, be combined with: conditions on axes and its own `version`, and why."""

    when: Condition
    reason: str


class ConditionalRow(Model):
    """Hold values that vary by axis, version or arch."""

    when: Condition = Field(default_factory=dict)
    values: dict[str, str]


class EnvironmentRow(ConditionalRow):
    """Hold variables that vary by axis or version."""

    values: dict[Variable, EnvironmentValue]


class Repository(Model):
    """Describe a signed repository of packages, beside the distribution's own. Templates as in `archive`."""

    name: Name
    url: Url
    suite: str = "/"
    key: str
    """Address of the key that signs it; the lock has the fingerprint. If the base image trusts it, `package:NAME` is
    enough: the package of the repository that holds its key."""
    configured: bool = False
    """The base image already trusts it."""

    @model_validator(mode="after")
    def _image_needs_key(self) -> Repository:
        if self.key.startswith("package:") and not self.configured:
            raise ValueError("key: an image that does not trust the repository yet needs the address of its key")
        return self


class Packages(Model):
    """Name packages of the distribution, or of the component's `repository`.

    `name={version}` pins a package; other packages of a `repository` get their exact version from the lock.
    """

    runtime: tuple[PackageText, ...] = ()
    devel: tuple[PackageText, ...] = ()
    """Installed in addition in the `devel` variant."""
    before_install: str = ""
    """Shell lines that run in the same step, before the installation."""
    after_install: str = ""
    """Shell lines that run in the same step, so that what they remove is in no layer."""


class Component(Model):
    """Describe the file `component.yaml` of a component."""

    title: str
    description: str
    homepage: str
    license: str
    """SPDX expression, or `LicenseRef-…` for one that SPDX does not list."""
    license_files: tuple[str, ...] = ()
    """Paths or shell patterns of the licence texts in the image; the image check `licenses` looks for them."""
    redistribution: str | None = None
    """What whoever publishes an image with it must accept, where the licence restricts that."""
    version_axis: Name | None = None
    """Axis whose value is the version."""
    pin: Name | None = None
    """Name of the pin in `matrix.yaml` that is the version; by default the component's own name."""
    provides: tuple[Name, ...] = ()
    """Other names under which components may require this one."""
    requires: tuple[Name, ...] = ()
    """Components (or what they provide) that must be in the image too."""
    build_requires: tuple[Name, ...] = ()
    """Components whose build stages this one's stage uses; they need not be in the image."""
    variants: tuple[Variant, ...] = ("runtime", "devel")
    """Variants of an image that have the component; in others it is left out."""
    supports: tuple[Support, ...] = ()
    """Targets where one of these does not hold are excluded."""
    excludes: tuple[Support, ...] = ()
    """Targets where one of these holds are excluded."""
    key: tuple[Name, ...] = ()
    """What `build.j2` may mention besides the own version: axes, `<axis>-major`, `gpu`, other components' names."""
    compiles: bool = False
    """The build stage compiles, which takes long: `imagebuild build --cache` keeps what it makes."""
    portable: bool = False
    """Built on the `build-on` of the image or the base: the result runs on all later releases too."""
    build_only: bool = False
    """The build stage is a tool of others' stages; an image cannot have the component."""
    stage_only: bool = False
    """The build stage serves other stages; nothing of it is copied into the image."""
    git: GitUrl | None = None
    """Address of the git repository."""
    tag: str = "{version}"
    """Tag of a version in the git repository; the lock has the commit."""
    archive: Url | None = None
    """Address of an archive: version, axes, `<axis>-major`, `arch`, `cpu` and facts are filled in."""
    unpacked: Unpacked | None = None
    """What `imagebuild lock` reads from the archive, to make the image's environment from it."""
    images: dict[Name, str] = Field(default_factory=dict)
    """Images that build stages start from or take files from; templates as in `archive`."""
    wheels: tuple[str, ...] = ()
    """Requirements on the Python package index, with `{version}` and facts filled in; hashes are in the lock."""
    wheels_from: Name | None = None
    """Take the wheels of this component, in the own version, instead."""
    facts: tuple[ConditionalRow, ...] = ()
    """Of each value, the first row that has it and whose condition holds counts."""
    repository: Repository | None = None
    packages_from: Name | None = None
    """Component whose `repository` the packages come from."""
    packages: Packages = Packages()
    libraries: tuple[Folder, ...] = ()
    """Folders below `/out/<variant>` of the build stage where the loader shall look, in this order."""
    env: Annotated[tuple[EnvironmentRow, ...], BeforeValidator(_rows)] = ()
    """Environment of the image: values, or rows of values. Lists of folders (`PATH`, …) are prepended to. Of a variable
    that the unpacked archive sets too, this is the value."""
    env_of_base: tuple[str, ...] = ()
    """Variables that the image takes from the image that it starts from, so that logins have them too."""
    labels: dict[Name, str] = Field(default_factory=dict)
    """What else the image declares, as `imagebuild.<name>`; templates as in `archive`. `plugin` is the network plug-in
    of the unpacked archive that NCCL finds first."""
    checks: tuple[Check, ...] = ()
    gpu_code: tuple[str, ...] = ()
    """Shell patterns of files in the image that hold code for exactly the GPUs that the matrix lists."""
    waivers: tuple[CheckWaiver, ...] = ()
    """Objections of the image checks that do not count here."""

    @model_validator(mode="after")
    def _checks_have_names_of_their_own(self) -> Component:
        names = [check.name for check in self.checks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"checks: two are called {twice!r}; rename one")
        return self


def first_values(rows: Iterable[ConditionalRow], axes: Mapping[str, str]) -> dict[str, str]:
    """Return each value from the first row that has it and whose condition holds."""
    result: dict[str, str] = {}
    for row in rows:
        if matches(row.when, axes):
            result |= {name: text for name, text in row.values.items() if name not in result}
    return result
