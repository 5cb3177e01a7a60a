"""The types of `component.yaml`: how a component is obtained, built, installed and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from imagebuild.core import fields
from imagebuild.project.lockfile import Unpacked
from imagebuild.project.matrix import CheckWaiver

Variant = Literal["runtime", "devel"]
"""Variants of an image: `runtime` images run programs, `devel` images also compile programs."""
NeedText = Annotated[
    str, fields.Form("gpu|rdma|slurm|(gpus|nodes)>=[1-9][0-9]*", "a need: gpu, rdma, slurm, gpus>=N or nodes>=N")
]
ScriptName = Annotated[
    str, fields.Form("([a-z0-9-]+/)?[a-z0-9][a-z0-9-]*", "a script: NAME or COMPONENT/NAME, in lower case")
]


def parse_need(text: str) -> tuple[str, int]:
    """Split a need of a check, such as `gpus>=2`, into the facility and the minimum number.
    The facility is `gpus`, `rdma`, `nodes` or `slurm`. Default number: 1."""
    what, _, least = text.partition(">=")
    return "gpus" if what == "gpu" else what, int(least or 1)


def nodes_needed(needs: Iterable[str]) -> int:
    return max((least for what, least in map(parse_need, needs) if what == "nodes"), default=1)


class Check(fields.Model):
    """A check: a statement about an image, and the commands that prove the statement."""

    name: fields.Name
    description: str
    """What the check proves, in one line."""
    run: str | None = None
    """Shell commands that bash runs in the image. The check passes if their exit status is 0."""
    script: ScriptName | None = None
    """Name of a script to run instead of `run`: `checks/<script>.sh`, or `<component>/<script>` for a script of another
    component. Default without `run`: `checks/<name>.sh`."""
    expect: str | None = None
    """Regular expression that must match somewhere in the output of the commands. `{version}` stands for the version of
    the component."""
    needs: tuple[NeedText, ...] = ()
    """Hardware and services that the check needs, such as `gpus>=2` or `slurm`. If one of them is missing, the check is
    skipped."""
    environment: dict[fields.Variable, str] = Field(default_factory=dict)
    """Environment variables for the commands. Several checks can share a script by setting different variables."""
    ranks: Annotated[int, Field(gt=0)] = 1
    """Number of ranks that srun starts. If the number is above 1, `needs` must contain `slurm`."""
    results: Literal["nccl-tests", "nvbandwidth", "perftest", "ucx_perftest", "nvshmem", "dcgmi"] | None = None
    """Benchmark that the commands run. imagebuild reads the output of the benchmark. The check fails if the output
    contains wrong data or no result."""
    when: fields.Condition = Field(default_factory=dict)
    """Condition on the axes of a target. If a target does not fulfil the condition, the check is skipped."""
    user: str = "root"
    """User that runs the commands."""
    timeout_s: Annotated[int, Field(gt=0)] = 60
    attempts: Annotated[int, Field(gt=0, le=5)] = 1
    """Maximum number of attempts. A check that exceeds its time limit is started again, because some programs hang at
    times. The result records the number of attempts."""

    @model_validator(mode="after")
    def _consistent(self) -> Check:
        try:
            re.compile(self.expect or "")
        except re.error as error:
            problem = f"{self.expect!r} is not a regular expression: {error}"
            raise ValueError(f"expect: {problem}; write \\ before a character to match literally") from None
        if self.ranks > 1 and "slurm" not in self.needs:
            raise ValueError("ranks: more than one rank needs srun; write needs: [slurm]")
        if self.run is not None and self.script is not None:
            raise ValueError("script: the check also has `run`, so the script would not run; remove one of the two")
        return self


class ConditionalRow(fields.Model):
    """Values that apply if a condition on axes, version or architecture holds."""

    when: fields.Condition = Field(default_factory=dict)
    values: dict[str, str]


class EnvironmentRow(ConditionalRow):
    """Environment variables that apply if a condition on axes or version holds."""

    values: fields.Environment


EnvironmentRows = Annotated[
    tuple[EnvironmentRow, ...], BeforeValidator(lambda given: [{"values": given}] if isinstance(given, dict) else given)
]


class PackageRepository(fields.Model):
    """A signed package repository other than the distribution's own.
    `url` and `key` may contain the placeholders of a component's `archive`, such as `{version}`."""

    name: fields.Name
    url: fields.Url
    suite: fields.Line = "/"
    key: fields.Line
    """Address of the key that signs the repository. The lock contains the fingerprint of the key. If the base image
    already trusts the key, write `package:NAME` instead. NAME is the package that contains the key."""
    configured: bool = False
    """Whether the base image already trusts the repository."""

    @model_validator(mode="after")
    def _image_needs_key(self) -> PackageRepository:
        if self.key.startswith("package:") and not self.configured:
            raise ValueError("key: package:NAME needs `configured: true`; write the address of the key instead")
        return self


class Packages(fields.Model):
    """Packages to install, from the component's `repository` or, if there is none, from the distribution.

    Write `name={version}` to request an exact version. Other packages from a `repository` get an exact version from the
    lock."""

    runtime: tuple[fields.PackageText, ...] = ()
    devel: tuple[fields.PackageText, ...] = ()
    """Packages that `devel` images install in addition to those in `runtime`."""
    before_install: str = ""
    """Shell lines that run before the installation, in the same step."""
    after_install: str = ""
    """Shell lines that run after the installation, in the same step. No layer contains the files that these lines
    remove."""


class Component(fields.Model):
    """The file `component.yaml` of a component."""

    title: fields.Line
    description: fields.Line
    homepage: fields.Line
    license: fields.Line
    """SPDX expression, or `LicenseRef-…` for a licence that SPDX does not list."""
    license_files: tuple[str, ...] = ()
    """Paths or shell patterns of the licence texts in the image. The image check `licenses` fails if a text is
    missing."""
    redistribution: str | None = None
    """Terms to accept before an image with the component is published, if the licence restricts redistribution."""
    version_axis: fields.Name | None = None
    """Axis (such as `cuda`) whose value is the version of the component."""
    pin: fields.Name | None = None
    """Entry of `versions` in `matrix.yaml` that sets the component's version. Default: the component's name."""
    provides: tuple[fields.Name, ...] = ()
    """Other names under which components may require this component, such as `mpi`."""
    requires: tuple[fields.Name, ...] = ()
    """Names of components, or names from the `provides` of components. For each name, the image must also contain a
    component."""
    conflicts: dict[fields.Name, str] = Field(default_factory=dict)
    """Maps names of components, or names from the `provides` of components, to the reason why no image can contain such
    a component together with this one."""
    build_requires: tuple[fields.Name, ...] = ()
    """Names of components, or names from the `provides` of components, whose build stages this component's build stage
    uses. The image need not contain these components."""
    variants: tuple[Variant, ...] = ("runtime", "devel")
    """Variants of an image that contain the component. Other variants are built without the component."""
    supports: tuple[fields.Support, ...] = ()
    """Conditions that a target must fulfil. A target that violates a condition is excluded."""
    excludes: tuple[fields.Support, ...] = ()
    """Conditions that exclude a target. A target that fulfils at least one condition is excluded."""
    key: tuple[fields.Name, ...] = ()
    """Names that `build.j2` may use in addition to the component's own version: axes, `<axis>-major`, `gpu`, other
    components. Targets share the build stage if all of these names have the same values."""
    compiles: bool = False
    """Whether the build stage compiles for a long time. `imagebuild build --cache` stores the result of such a
    stage."""
    portable: bool = False
    """Whether the compiled files also run on later releases of the distribution. If true, the component is compiled on
    the release that `build-on` of the image or of the base names."""
    build_only: bool = False
    """Whether the component is only a tool for other build stages. An image cannot list such a component."""
    updates: Annotated[int, Field(ge=0)] = 1
    """Number of updates a year, about, that change the files of the build stage. Count those of the components that it
    is compiled with. In images, files that change more often come later, because a new layer also makes Docker download
    the layers after it."""
    stage_only: bool = False
    """Whether only other build stages use the files of this component's build stage. If true, the files are not copied
    into the image."""
    git: fields.GitUrl | None = None
    """Address of the git repository that contains the source code."""
    tag: str = "{version}"
    """Template of the git tag for a version. The lock contains the commit of the tag."""
    archive: fields.Url | None = None
    """Template of the address of an archive. Placeholders are `{version}`, axes, `{<axis>-major}`, `{arch}`, `{cpu}`
    and the names in `facts`."""
    unpacked: Unpacked | None = None
    """How `imagebuild lock` unpacks the archive and reads its content. Images get environment variables that a script
    in the archive sets."""
    images: dict[fields.Name, str] = Field(default_factory=dict)
    """Maps names for `build.j2` to images. The build stage starts from these images or copies files from them. An image
    may contain the placeholders of `archive`."""
    wheels: tuple[str, ...] = ()
    """Requirements for pip, which may contain `{version}` and the names in `facts` as placeholders. The lock contains
    the hashes of the wheels."""
    wheels_from: fields.Name | None = None
    """Name of another component, whose `wheels` this component uses instead of its own. `{version}` in these wheels
    stands for the version of this component."""
    python: tuple[str, ...] = ()
    """Requirements for Python packages, such as `torch=={version}`, that images with this component install."""
    python_environment: bool = False
    """Whether the build stage installs all Python packages: those of the image and of its components, and the packages
    that these need."""
    instead_of_python: tuple[fields.Name, ...] = ()
    """Python packages that images with this component do not install, because the component brings the same files."""
    facts: tuple[ConditionalRow, ...] = ()
    """Rows of values that templates may use as placeholders. For each name, the first row that sets the name and whose
    condition holds is used."""
    repository: PackageRepository | None = None
    packages_from: fields.Name | None = None
    """Name of another component, whose `repository` contains the packages of this component."""
    packages: Packages = Packages()
    libraries: tuple[fields.Folder, ...] = ()
    """Folders of the image in which the loader looks for libraries, in this order. In the build stage, these folders
    are below `/out/<variant>`."""
    env: EnvironmentRows = ()
    """Environment variables of the image: values, or rows of values with conditions. These values replace the values
    from the unpacked archive. Lists of folders (`PATH`, …) are prepended to the list that the image already has."""
    env_of_base: tuple[str, ...] = ()
    """Names of environment variables that the image copies from the base image, so that login shells also have these
    variables."""
    labels: dict[fields.Name, str] = Field(default_factory=dict)
    """Additional labels of the image, named `imagebuild.<name>`. The values may contain the placeholders of `archive`,
    and `{plugin}`: the first network plug-in that NCCL finds in the unpacked archive."""
    checks: tuple[Check, ...] = ()
    gpu_code: tuple[str, ...] = ()
    """Shell patterns of files in the image that must contain code for exactly the GPUs that the matrix lists."""
    waivers: tuple[CheckWaiver, ...] = ()
    """Findings of the image checks that are accepted for this component."""

    @model_validator(mode="after")
    def _checks_have_names_of_their_own(self) -> Component:
        names = [check.name for check in self.checks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"checks: two checks are called {twice!r}; rename one")
        return self


def first_values(rows: Iterable[ConditionalRow], axes: Mapping[str, str]) -> dict[str, str]:
    """Map each name to its value in the first row that sets the name and whose condition holds for `axes`."""
    result: dict[str, str] = {}
    for row in rows:
        if fields.matches(row.when, axes):
            result |= {name: text for name, text in row.values.items() if name not in result}
    return result
