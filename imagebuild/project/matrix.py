"""The types of `matrix.yaml`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from imagebuild.core import fields

FIELD = re.compile(r"{([^{}]*)}")
"""Pattern of a placeholder in a template: `{name}`."""
IMAGE = fields.Form("[A-Za-z0-9][A-Za-z0-9._:/{}@-]*", "an image such as debian:13-slim")
PACKAGE = fields.Form(
    r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?", "a package in lower case: name or name=version"
)
PlainPackage = Annotated[str, PACKAGE]
LabelName = Annotated[
    str, fields.Form(r"[a-z0-9]+([._-][a-z0-9]+)*", "the name of a label: lower case, with dots, such as com.acme.team")
]
User = Annotated[
    str, fields.Form("[a-z0-9_][a-z0-9_-]*(:[a-z0-9_][a-z0-9_-]*)?", "user or user:group, names or numbers")
]
VariantName = Annotated[str, fields.Form("runtime|devel", "runtime or devel")]
GpuCapability = Annotated[str, fields.Form("[0-9]{2,3}[a-z]?", "a compute capability without its dot, such as 90")]
Attachment = Literal["sbom", "provenance", "verification", "benchmark", "scan"]
NO_VERSION = "is not a version; write a version such as 2.32.3, or see `imagebuild bump` for the newest"
RuleName = Literal[
    "plan", "licenses", "environment", "user", "command", "size", "no-keys", "no-tokens", "no-backdoors", "no-site-ca",
    "no-leftovers", "not-world-writable", "setuid", "rootless", "base-kept", "for-every-user", "startable",
    "architecture", "closure", "symbol-versions", "one-provider", "no-stubs", "gpu-code",
    "plugins", "executable-stack", "one-of-each", "wheels",
]  # fmt: skip
"""Names of the image checks, in the order in which they run."""


class Requirement(fields.Model):
    """Checks that must have passed for the image on at least one machine. A skipped check does not count as passed."""

    when: fields.Condition = Field(default_factory=dict)
    """Condition on the targets that must fulfil the requirement. The condition may contain axes, `image` and `arch`."""
    checks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Checks as `component/check` or shell patterns. The name of a component stands for all checks of the component."""


class Publish(fields.Model):
    """The conditions for giving an image a tag.

    Two conditions always apply: no check failed on any platform, and every check that needs no special hardware passed.
    """

    staging: str = "{repository}/{image}-staging"
    """Template of the staging repository. `build --push` pushes images to this repository by digest, before
    verification."""
    require: tuple[Requirement, ...] = ()
    """Additional checks that must have passed, for example on GPUs."""
    require_attachments: tuple[Attachment, ...] = ()
    """Attachments that must exist for the image of every platform."""


def _pins(value: Any) -> Any:
    rows = value if isinstance(value, list | tuple) else [value]
    return [{"version": row} if isinstance(row, str) else row for row in rows]


class Pin(fields.Model):
    """A version of a component. If the conditions of several versions hold, the first of these versions applies."""

    when: fields.Condition = Field(default_factory=dict)
    """Condition on axes. The key `component` selects one of the components that share the pin, such as `nccl-git`."""
    version: fields.VersionText
    commit: fields.Commit | None = None
    """Commit of a git source whose version does not have a tag. For a version with a tag, the lock contains the
    commit."""

    @model_validator(mode="after")
    def _names_a_version(self) -> Pin:
        if not self.commit and not re.search("[0-9]", self.version):
            raise ValueError(f"{self.version!r} {NO_VERSION}")
        return self


class Base(fields.Model):
    """A release of a distribution: a value of the axis `os`."""

    image: Annotated[str, IMAGE]
    """Official image of the release in a registry, with a tag. The lock contains its digest."""
    release: fields.Name | None = None
    """Code name of the release in the Debian archive. If set, builds can create the base from packages of this archive
    instead of using the official image."""
    build_on: fields.Release | None = None
    """Older release on which portable components are compiled, so that the compiled files run on both releases.
    Default: this release."""


class GpuArchitecture(fields.Model):
    """A compute capability to compile for."""

    gpus: str
    """Names of the GPUs with this compute capability."""
    cuda: str
    """Version specifier of the CUDA toolkits that can compile for this compute capability, such as `>=12.8`."""
    arch: tuple[fields.Arch, ...] = ("amd64", "arm64")
    """CPU architectures of the machines that have such GPUs."""


class ExclusionRule(fields.Model):
    """A rule that excludes combinations of axes, with the reason."""

    name: fields.Release
    when: fields.Condition
    reason: str


class CheckWaiver(fields.Model):
    """An accepted finding of an image check. The check does not fail because of this finding."""

    rule: RuleName
    """Name of the image check, as `imagebuild verify` prints it."""
    subject: str
    """What the finding is about: the path or name that `imagebuild verify` prints before the colon, or a shell
    pattern."""
    when: fields.Condition = Field(default_factory=dict)
    """Condition on the targets that the waiver applies to. The condition may contain axes, `arch` and `image`."""
    reason: str


class Alias(fields.Model):
    """A tag that `imagebuild publish` moves.
    If several targets have the same alias, the last target in the matrix gets the tag."""

    tag: str
    """Template of the tag, with the placeholders of `tags` except `{revision}`. Additional placeholders are
    `{<axis>-major}` and `{<axis>-minor}`: `13` and `13.2` for `13.2.1`."""
    when: fields.Condition = Field(default_factory=dict)
    """Condition on the targets that may get the tag."""


AliasOrTag = Annotated[Alias, BeforeValidator(lambda given: {"tag": given} if isinstance(given, str) else given)]


PYTHON = "python"
"""Component with the Python packages of an image. An image that states `python` contains this component."""
PythonPackage = Annotated[
    str,
    fields.Form(
        r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9,._-]+\])?",
        "a package of the Python package index: name or name[extra]",
    ),
]


def _python_version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion:
        raise ValueError("must be the version of a Python package, such as 2.9.0") from None
    return text


def package_name(package: str) -> str:
    """Return the name of a Python package without extras, in the form in which equal names are equal."""
    return canonicalize_name(package.partition("[")[0])


PythonVersion = Annotated[fields.VersionText, AfterValidator(_python_version)]


class ImagePackages(fields.Model):
    """Packages of an image in addition to those of its components."""

    apt: tuple[PlainPackage, ...] = ()
    """Packages from the distribution: `name` or `name=version`. The signed index of the distribution verifies them."""


ComponentList = Annotated[tuple[fields.Name, ...], Field(min_length=1), AfterValidator(fields.distinct)]
AxisValues = Annotated[tuple[fields.VersionText, ...], Field(min_length=1), BeforeValidator(fields.one_or_more)]


class ComponentEdits(fields.Model):
    """Changes to the components of the image to start from."""

    add: Annotated[tuple[fields.Name, ...], AfterValidator(fields.distinct)] = ()
    remove: Annotated[tuple[fields.Name, ...], AfterValidator(fields.distinct)] = ()
    replace: dict[fields.Name, fields.Name] = Field(default_factory=dict)
    """Maps components to the components that take their places."""


class Image(fields.Model):
    """An image: its axes, components, platforms and tags. An image that starts from another image needs only the keys
    that differ."""

    from_: Annotated[fields.Name | None, Field(alias="from")] = None
    """Image to start from, in this file or in the extended project. The keys below replace its keys; the entries of a
    mapping, such as an axis, replace only these entries, and packages are added. Default: the image of the same name in
    the extended project, if there is one. `null`: no image."""
    description: fields.Line = ""
    base: Annotated[str, IMAGE] | None = None
    """Template of the image to start from. Axes are placeholders: `nvidia/cuda:{cuda}-base-{os}`. Default: the image in
    `bases` for the value of the axis `os`."""
    axes: dict[fields.Name, AxisValues] = Field(default_factory=dict)
    """Maps each axis to its values. Each combination of values is a target. The values of `os` are names of `bases`.
    The values of `variant` are `runtime` and `devel`."""
    platforms: Annotated[tuple[fields.Platform, ...], Field(min_length=1), AfterValidator(fields.distinct)] = ()
    components_: Annotated[ComponentList | ComponentEdits, Field(alias="components")] = ()
    """Components of the image, or changes to the components of the image to start from. Components that one of the
    listed components requires are added automatically."""
    build_with: dict[fields.Name, fields.Name] = Field(default_factory=dict)
    """Maps a name in the `build-requires` of components to the component whose build stage is used for this name.
    Needed, for example, if the image contains no component that provides the name."""
    build_on: fields.Release | None = None
    """Release on which portable components are compiled, whatever release the image is based on. Default: the
    `build-on` of each base."""
    tags: Annotated[tuple[str, ...], Field(min_length=1)] = ()
    """Templates of tags that `imagebuild publish` creates and never moves, such as
    `{repository}/{image}:{cuda}-{os}-{revision}`. Placeholders are axes, `image`, `repository`, `revision` (the first
    seven digits of the commit), and `<name>.version`, where the name is a component or a name that a component
    provides."""
    aliases: tuple[AliasOrTag, ...] = ()
    """Tags that `imagebuild publish` moves to the newest image."""
    size_limit_mb: Annotated[int, Field(gt=0)] | dict[VariantName, Annotated[int, Field(gt=0)]] | None = None
    """Maximum size of the compressed layers in megabytes (10^6 bytes), for all variants or for each variant."""
    waivers: tuple[CheckWaiver, ...] = ()
    """Findings of the image checks that are accepted for this image."""
    packages: ImagePackages = ImagePackages()
    """Packages that do not belong to a component."""
    python: dict[PythonPackage, PythonVersion] = Field(default_factory=dict)
    """Maps packages of the Python package index to their versions. The image gets these packages and the packages that
    they need, in the folder `/opt/venv`. The lock contains their hashes. Packages whose files a component brings, such
    as NCCL, are not installed a second time."""
    env: fields.Environment = Field(default_factory=dict)
    """Environment variables of the image. These values replace the values from components. Lists of folders (`PATH`, …)
    are prepended to the existing list."""
    labels: dict[LabelName, fields.Line] = Field(default_factory=dict)
    """Additional labels, such as `com.acme.team`. These labels replace labels of the same name that imagebuild sets."""
    user: User | None = None
    """User that containers run as. Default: root."""
    cmd: Annotated[tuple[fields.Line, ...], Field(min_length=1)] = ("bash",)
    """Command of containers, with its arguments."""
    append: str = ""
    """Dockerfile instructions at the end of the image, such as `RUN …`. There is no build context to copy from."""

    @model_validator(mode="before")
    @classmethod
    def _starts_from_an_image(cls, value: Any) -> Any:
        if isinstance(value, dict) and "extends" in value:
            raise ValueError("only a file extends a project; write `from: IMAGE`, not `extends`")
        return value

    @property
    def components(self) -> tuple[str, ...]:
        """Components of a complete image."""
        own = self.components_ if isinstance(self.components_, tuple) else ()
        return (*own, PYTHON) if own and self.python and PYTHON not in own else own


ImageOrNothing = Annotated[Image, BeforeValidator(lambda given: {} if given is None else given)]


class GitProject(fields.Model):
    """A project in a git repository, at a commit."""

    git: Annotated[
        str, fields.Form(r"([a-z+]+://|/|[A-Za-z0-9_.-]+@)\S+", "the address of a git repository, or an absolute path")
    ]
    """Address of the git repository."""
    commit: fields.Commit
    folder: str = "."
    """Folder in the repository that contains the project's `matrix.yaml`."""


class Matrix(fields.Model):
    """The file `matrix.yaml`."""

    extends: str | GitProject | None = None
    """A project to extend: `imagebuild` for the project that comes with imagebuild, a folder relative to this file, or
    a commit of a git repository. This project inherits bases, versions, rules, components, profiles and job facts
    (descriptions of fabrics and clusters). Entries of this project replace inherited entries of the same name. Images
    are not inherited, but the images of this project may start from them."""
    repository: fields.Repository
    """Registry and path of all images, such as `ghcr.io/acme` or `imagebuild`: lower case, without a tag."""
    bases: dict[fields.Release, Base] = Field(default_factory=dict)
    """Maps each value of the axis `os` to the release that images start from."""
    versions: dict[fields.Name, Annotated[tuple[Pin, ...], BeforeValidator(_pins)]] = Field(default_factory=dict)
    """Maps each pin (usually the name of a component) to a version, or to rows of versions with conditions on axes."""
    gpu_architectures: dict[GpuCapability, GpuArchitecture] = Field(default_factory=dict)
    """Compute capabilities to compile for, in ascending order."""
    images: dict[fields.Name, ImageOrNothing]
    """Maps the name of each image to its definition. `imagebuild plan` lists the targets."""
    rules: tuple[ExclusionRule, ...] = ()
    """Combinations of axes that are not built. Rules of the extended project also apply, unless a rule here has the
    same name."""
    publish: Publish = Publish()
    """Conditions for giving an image a tag."""
