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
"""A name in a template."""
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
    """Name checks that must have passed on the image, wherever they ran, and not only been skipped."""

    when: Condition = Field(default_factory=dict)
    """Targets that it is for; besides axes there are `image` and `arch`."""
    checks: Annotated[tuple[str, ...], Field(min_length=1)]
    """`component/check` or shell patterns of that; a component alone means all of its checks."""


class Publish(Model):
    """Hold the conditions for giving an image a tag.

    In any case no check may have failed on any platform, and every check that needs no special hardware must have
    passed.
    """

    staging: str = "{repository}/{image}-staging"
    """Where builds are pushed by digest, until they are verified."""
    require: tuple[Requirement, ...] = ()
    """What must have passed besides, for example on GPUs."""
    require_attachments: tuple[Attachment, ...] = ()
    """What must be there to be attached to every platform's image."""


NO_VERSION = "is no version; write the one you mean; `imagebuild bump` says which is the newest"


def _pins(value: Any) -> Any:
    rows = value if isinstance(value, list | tuple) else [value]
    return [{"version": row} if isinstance(row, str) else row for row in rows]


class Pin(Model):
    """Hold the version of a component; of several, the first whose condition holds counts."""

    when: Condition = Field(default_factory=dict)
    version: VersionText
    commit: Commit | None = None
    """For a source in git whose version is no tag: the commit. Commits of tags are in the lock."""

    @model_validator(mode="after")
    def _names_a_version(self) -> Pin:
        if not self.commit and not re.search("[0-9]", self.version):
            raise ValueError(f"{self.version!r} {NO_VERSION}")
        return self


class Base(Model):
    """Describe a distribution release: a value of the axis `os`."""

    image: Annotated[str, IMAGE]
    """Official image of the release in a registry, with a tag; the lock has its digest."""
    release: Name | None = None
    """Code name in the Debian archive, from which the base can be bootstrapped instead."""
    build_on: Release | None = None
    """The older base on which programs are compiled that run on both; by default this one."""


class GpuArchitecture(Model):
    """Describe a compute capability to compile for."""

    gpus: str
    """Products that have it."""
    cuda: str
    """Versions of the toolkit that can compile for it."""
    arch: tuple[Arch, ...] = ("amd64", "arm64")
    """CPU architectures of machines that have such a GPU."""


class ExclusionRule(Model):
    """Name combinations that are not built, and why."""

    name: Release
    when: Condition
    reason: str


RuleName = Literal[
    "plan", "licenses", "environment", "user", "command", "size", "no-keys", "no-tokens", "no-site-ca",
    "no-leftovers", "not-world-writable", "setuid", "rootless", "architecture", "closure", "symbol-versions",
    "one-provider", "no-stubs", "gpu-code",
]  # fmt: skip
"""Rules of the image checks, in the order in which they judge."""


class CheckWaiver(Model):
    """Describe something that a rule of the image checks objects to, and that is right here."""

    rule: RuleName
    """Name of the rule, as `imagebuild verify` prints it."""
    subject: str
    """What it objects to, as printed before the colon: a path, a name, or a shell pattern of those."""
    when: Condition = Field(default_factory=dict)
    """Targets that it is for; besides axes there are `arch` and `image`."""
    reason: str


def _alias(value: Any) -> Any:
    return {"tag": value} if isinstance(value, str) else value


class Alias(Model):
    """Describe a tag that publishing moves; of several targets with the same one, the last in the matrix gets it."""

    tag: str
    """Template as of `tags`; also `<axis>-major` and `<axis>-minor`: `13` and `13.2` of `13.2.1`."""
    when: Condition = Field(default_factory=dict)
    """Targets that may have it."""


class ImagePackages(Model):
    """Name packages that an image has besides those of its components."""

    apt: tuple[PlainPackage, ...] = ()
    """Of the distribution: `name` or `name=version`; its signed index verifies them."""


class Image(Model):
    """Describe an image: its axes, components, platforms and tags."""

    description: Line
    base: Annotated[str, IMAGE] | None = None
    """Image it starts from, with axes filled in; by default the one of the axis `os`."""
    axes: dict[Name, Annotated[tuple[VersionText, ...], Field(min_length=1)]]
    """Axis → its values; each combination is a target. `os` names a base; `variant` is runtime or devel."""
    platforms: Annotated[tuple[Platform, ...], Field(min_length=1), AfterValidator(distinct)]
    components: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(distinct)]
    """What is in it; what these require comes along."""
    build_with: dict[Name, Name] = Field(default_factory=dict)
    """Requirement of build stages → the component whose stage fulfils it, where the image has no such component."""
    build_on: Release | None = None
    """The base on which portable components are compiled for all releases; without it, what each base says."""
    tags: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tags that publishing gives once and never moves. Templates such as `{repository}/{image}:{cuda}-{os}-{revision}`:
    axes, `image`, `repository`, `<name>.version` of a component or of what it provides, and `revision`, the first seven
    digits of the commit."""
    aliases: tuple[Annotated[Alias, BeforeValidator(_alias)], ...] = ()
    """Tags that publishing moves to the newest image."""
    size_limit_mb: Annotated[int, Field(gt=0)] | dict[VariantName, Annotated[int, Field(gt=0)]] | None = None
    """Most megabytes (10^6 bytes) that the compressed layers may have; or for each variant its own."""
    waivers: tuple[CheckWaiver, ...] = ()
    """Objections of the image checks that do not count here."""
    packages: ImagePackages = ImagePackages()
    """Packages that need no component."""
    env: dict[Variable, EnvironmentValue] = Field(default_factory=dict)
    """Variables; they win over those of components. Lists of folders (`PATH`, …) are prepended to."""
    labels: dict[LabelName, Line] = Field(default_factory=dict)
    """Labels of its own, such as `com.acme.team`; they win over those that every image has."""
    user: User | None = None
    """User that containers run as; by default root."""
    cmd: Annotated[tuple[Line, ...], Field(min_length=1)] = ("bash",)
    """Command of containers, and its arguments."""
    append: str = ""
    """Dockerfile instructions at the very end, such as `RUN …`; there is no build context to copy from."""


class GitProject(Model):
    """Name a project in a git repository, at a commit."""

    git: Annotated[str, Form(r"([a-z+]+://|/|[A-Za-z0-9_.-]+@)\S+", "the address of a git repository, or a path")]
    """Address of the repository."""
    commit: Commit
    folder: str = "."
    """Folder of the project's matrix in it."""


class Matrix(Model):
    """Describe the file `matrix.yaml`."""

    extends: str | GitProject | None = None
    """A project whose bases, versions, rules, components, profiles and facts of jobs this one has too: `imagebuild` for
    the one that comes with it, a folder, relative to this file, or a commit of a git repository. What this project has
    of the same name counts instead. Only its own images are built."""
    repository: Annotated[str, REPOSITORY]
    """Where images are named and pushed, for example `ghcr.io/acme` or `imagebuild`: lower case, without a tag."""
    bases: dict[Release, Base] = Field(default_factory=dict)
    """Value of the axis `os` → where such images start from."""
    versions: dict[Name, Annotated[tuple[Pin, ...], BeforeValidator(_pins)]] = Field(default_factory=dict)
    """Pin → version, or rows of versions with conditions on axes."""
    gpu_architectures: dict[GpuCapability, GpuArchitecture] = Field(default_factory=dict)
    """Compute capability → what it is for, in ascending order."""
    images: dict[Name, Image]
    """Name → what it is made of; `imagebuild plan` lists the targets."""
    rules: tuple[ExclusionRule, ...] = ()
    """Combinations that are not built. Rules of the extended project count too, unless one here has the same name."""
    publish: Publish = Publish()
    """Conditions for giving an image a tag."""
    github_runners: dict[Platform, OneOrMore] = Field(default_factory=dict)
    """Platform → label, or labels, of the GitHub Actions runners whose own architecture it is."""
