"""The types of `matrix.yaml`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from imagebuild.core.fields import (
    Arch,
    Commit,
    Condition,
    EnvironmentValue,
    Form,
    Line,
    Model,
    Name,
    OneOrMore,
    Platform,
    Release,
    Variable,
    VersionText,
    distinct,
)

REPOSITORY = Form(
    r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*", "lower case as ghcr.io/acme, without a tag"
)
FIELD = re.compile(r"{([^{}]*)}")
"""Pattern of a placeholder in a template: `{name}`."""
IMAGE = Form("[A-Za-z0-9][A-Za-z0-9._:/{}@-]*", "an image such as debian:13-slim")
PlainPackage = Annotated[
    str,
    Form(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?", "a package in lower case: name or name=version"),
]
LabelName = Annotated[
    str, Form(r"[a-z0-9]+([._-][a-z0-9]+)*", "the name of a label: lower case, with dots, such as com.acme.team")
]
User = Annotated[str, Form("[a-z0-9_][a-z0-9_-]*(:[a-z0-9_][a-z0-9_-]*)?", "user or user:group, names or numbers")]
VariantName = Annotated[str, Form("runtime|devel", "runtime or devel")]
GpuCapability = Annotated[str, Form("[0-9]{2,3}[a-z]?", "a compute capability without its dot, such as 90")]
Attachment = Literal["sbom", "provenance", "verification", "benchmark", "scan"]


class Requirement(Model):
    """Checks that must have passed on the image, on any machine. A skipped check is not enough."""

    when: Condition = Field(default_factory=dict)
    """Condition on the targets that the requirement is for. It may name axes, `image` and `arch`."""
    checks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Checks as `component/check` or shell patterns. The name of a component stands for all checks of the component."""


class Publish(Model):
    """The conditions for giving an image a tag.

    Two conditions always apply: no check failed on any platform, and every check that needs no special hardware passed.
    """

    staging: str = "{repository}/{image}-staging"
    """Repository that builds are pushed to by digest, before they are verified."""
    require: tuple[Requirement, ...] = ()
    """Additional checks that must have passed, for example on GPUs."""
    require_attachments: tuple[Attachment, ...] = ()
    """Attachments that must exist for the image of every platform."""


NO_VERSION = "is not a version; write a version such as 2.32.3, or see `imagebuild bump` for the newest"


def _pins(value: Any) -> Any:
    rows = value if isinstance(value, list | tuple) else [value]
    return [{"version": row} if isinstance(row, str) else row for row in rows]


class Pin(Model):
    """A version of a component. The first version whose condition holds applies."""

    when: Condition = Field(default_factory=dict)
    version: VersionText
    commit: Commit | None = None
    """Commit of a git source whose version does not have a tag. For a version with a tag, the lock contains the
    commit."""

    @model_validator(mode="after")
    def _names_a_version(self) -> Pin:
        if not self.commit and not re.search("[0-9]", self.version):
            raise ValueError(f"{self.version!r} {NO_VERSION}")
        return self


class Base(Model):
    """A release of a distribution: a value of the axis `os`."""

    image: Annotated[str, IMAGE]
    """Official image of the release in a registry, with a tag. The lock contains its digest."""
    release: Name | None = None
    """Code name of the release in the Debian archive. Builds can bootstrap the base from that archive instead of the
    official image."""
    build_on: Release | None = None
    """Older release on which portable components are compiled, so that they run on both releases. Default: this
    release."""


class GpuArchitecture(Model):
    """A compute capability to compile for."""

    gpus: str
    """GPUs with this compute capability."""
    cuda: str
    """Version specifier of the CUDA toolkits that can compile for it, such as `>=12.8`."""
    arch: tuple[Arch, ...] = ("amd64", "arm64")
    """CPU architectures of the machines that have such GPUs."""


class ExclusionRule(Model):
    """A rule that excludes combinations of axes, with the reason."""

    name: Release
    when: Condition
    reason: str


RuleName = Literal[
    "plan", "licenses", "environment", "user", "command", "size", "no-keys", "no-tokens", "no-site-ca",
    "no-leftovers", "not-world-writable", "setuid", "rootless", "architecture", "closure", "symbol-versions",
    "one-provider", "no-stubs", "gpu-code",
]  # fmt: skip
"""Names of the image checks, in the order in which they run."""


class CheckWaiver(Model):
    """A finding of an image check that is accepted."""

    rule: RuleName
    """Name of the image check, as `imagebuild verify` prints it."""
    subject: str
    """Subject of the finding, as printed before the colon: a path or a name, or a shell pattern."""
    when: Condition = Field(default_factory=dict)
    """Condition on the targets that the waiver is for. It may name axes, `arch` and `image`."""
    reason: str


def _alias(value: Any) -> Any:
    return {"tag": value} if isinstance(value, str) else value


class Alias(Model):
    """A tag that publishing moves. If several targets have the same alias, the last target in the matrix gets it."""

    tag: str
    """Template as in `tags`. It may also contain `{<axis>-major}` and `{<axis>-minor}`: `13` and `13.2` for
    `13.2.1`."""
    when: Condition = Field(default_factory=dict)
    """Condition on the targets that may get the tag."""


class ImagePackages(Model):
    """Packages of an image in addition to those of its components."""

    apt: tuple[PlainPackage, ...] = ()
    """Packages from the distribution: `name` or `name=version`. The signed index of the distribution verifies them."""


class Image(Model):
    """An image: its axes, components, platforms and tags."""

    description: Line
    base: Annotated[str, IMAGE] | None = None
    """Template of the image to start from, which may contain axes: `nvidia/cuda:{cuda}-base-{os}`. Default: the base of
    the axis `os`."""
    axes: dict[Name, Annotated[tuple[VersionText, ...], Field(min_length=1)]]
    """Maps each axis to its values. Each combination of values is a target. The values of `os` are names of `bases`.
    The values of `variant` are `runtime` and `devel`."""
    platforms: Annotated[tuple[Platform, ...], Field(min_length=1), AfterValidator(distinct)]
    components: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(distinct)]
    """Components of the image. Components that they require are added automatically."""
    build_with: dict[Name, Name] = Field(default_factory=dict)
    """Maps a name in `build-requires` to the component whose build stage fulfils the requirement, for example if the
    image does not contain such a component."""
    build_on: Release | None = None
    """Release on which portable components are compiled for all releases. Default: the `build-on` of each base."""
    tags: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tags that publishing gives once and never moves, as templates such as
    `{repository}/{image}:{cuda}-{os}-{revision}`. Placeholders are axes, `image`, `repository`, `revision` (the first
    seven digits of the commit), and `<name>.version` for a component or a name that it provides."""
    aliases: tuple[Annotated[Alias, BeforeValidator(_alias)], ...] = ()
    """Tags that publishing moves to the newest image."""
    size_limit_mb: Annotated[int, Field(gt=0)] | dict[VariantName, Annotated[int, Field(gt=0)]] | None = None
    """Maximum size of the compressed layers in megabytes (10^6 bytes), for all variants or for each variant."""
    waivers: tuple[CheckWaiver, ...] = ()
    """Findings of the image checks that are accepted for this image."""
    packages: ImagePackages = ImagePackages()
    """Packages that do not belong to a component."""
    env: dict[Variable, EnvironmentValue] = Field(default_factory=dict)
    """Environment variables. They replace variables of components. Lists of folders (`PATH`, …) are prepended to the
    existing list."""
    labels: dict[LabelName, Line] = Field(default_factory=dict)
    """Additional labels, such as `com.acme.team`. They replace labels that imagebuild sets."""
    user: User | None = None
    """User that containers run as. Default: root."""
    cmd: Annotated[tuple[Line, ...], Field(min_length=1)] = ("bash",)
    """Command of containers, with its arguments."""
    append: str = ""
    """Dockerfile instructions at the end of the image, such as `RUN …`. There is no build context to copy from."""


class GitProject(Model):
    """A project in a git repository, at a commit."""

    git: Annotated[str, Form(r"([a-z+]+://|/|[A-Za-z0-9_.-]+@)\S+", "the address of a git repository, or a path")]
    """Address of the git repository."""
    commit: Commit
    folder: str = "."
    """Folder of the project's matrix in the repository."""


class Matrix(Model):
    """The file `matrix.yaml`."""

    extends: str | GitProject | None = None
    """A project to extend: `imagebuild` for the project that comes with imagebuild, a folder relative to this file, or
    a commit of a git repository. This project gets the bases, versions, rules, components, profiles and job facts of
    that project, but not its images. Own entries replace entries of the same name."""
    repository: Annotated[str, REPOSITORY]
    """Registry and path of all images, such as `ghcr.io/acme` or `imagebuild`: lower case, without a tag."""
    bases: dict[Release, Base] = Field(default_factory=dict)
    """Maps each value of the axis `os` to the release that images start from."""
    versions: dict[Name, Annotated[tuple[Pin, ...], BeforeValidator(_pins)]] = Field(default_factory=dict)
    """Maps each pin (usually the name of a component) to a version, or to rows of versions with conditions on axes."""
    gpu_architectures: dict[GpuCapability, GpuArchitecture] = Field(default_factory=dict)
    """Compute capabilities to compile for, in ascending order."""
    images: dict[Name, Image]
    """Maps the name of each image to its definition. `imagebuild plan` lists the targets."""
    rules: tuple[ExclusionRule, ...] = ()
    """Combinations of axes that are not built. Rules of the extended project also apply, unless a rule here has the
    same name."""
    publish: Publish = Publish()
    """Conditions for giving an image a tag."""
    github_runners: dict[Platform, OneOrMore] = Field(default_factory=dict)
    """Maps each platform to the label or labels of the GitHub Actions runners with that CPU architecture."""
