"""Every type that is read from a file or written to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Platform = Literal["linux/amd64", "linux/arm64"]
Arch = Literal["amd64", "arm64"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class Model(BaseModel):
    """Unknown keys are mistakes, values do not change, field docstrings are the JSON Schema's text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, alias_generator=lambda n: n.replace("_", "-"),
        populate_by_name=True,
    )  # fmt: skip


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _pin(value: Any) -> Any:
    return {"version": value} if isinstance(value, str) else value


Condition = dict[str, Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]]
"""Axis → what its value must be: a value, a version specifier such as `>=13,<13.4`, or a list of those (any).

Every axis named must match. Besides the axes there is `image`, the name of the image.
"""


class Pin(Model):
    """The version of a component, and for sources in git the commit that is that version."""

    version: str
    commit: Commit | None = None


class Base(Model):
    """A distribution release an image starts from: a value of the axis `os`."""

    image: str
    """Official image of the release in a registry, with a tag."""
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    """Index digest of that image."""
    release: Name
    """Code name of the release in the distribution's archive, from which the base is bootstrapped."""


class GpuRow(Model):
    """Compute capabilities to compile for; the first row whose condition holds counts."""

    when: Condition = Field(default_factory=dict)
    """Conditions on `cuda` (the toolkit that compiles)."""
    amd64: tuple[str, ...]
    arm64: tuple[str, ...]


class Rule(Model):
    """Combinations that are not built, and why."""

    name: Name
    when: Condition
    reason: str


class Image(Model):
    """An image: its axes, components, platforms and tags."""

    description: str
    axes: dict[Name, Annotated[tuple[str, ...], Field(min_length=1)]]
    platforms: Annotated[tuple[Platform, ...], Field(min_length=1)]
    components: Annotated[tuple[Name, ...], Field(min_length=1)]
    tags: Annotated[tuple[str, ...], Field(min_length=1)]
    """Templates such as `{repository}/{image}:{cuda}-{os}`: axes, `image`, `repository`, `<component>.version`."""


class Matrix(Model):
    """The file `matrix.yaml`."""

    repository: str
    """Where images are named and pushed, for example `ghcr.io/acme` or `imagebuild`."""
    bases: dict[Name, Base]
    versions: dict[Name, Annotated[Pin, BeforeValidator(_pin)]]
    """Component → version. A component whose version is an axis (such as `cuda`) is not listed."""
    gpu_architectures: tuple[GpuRow, ...] = ()
    images: dict[Name, Image]
    rules: tuple[Rule, ...] = ()


class Check(Model):
    """A statement about an image that can be run."""

    name: Name
    description: str
    """What passing proves, in one line."""
    run: str | None = None
    """Shell commands, run by bash inside the image; status 0 passes."""
    script: Name | None = None
    """Instead of `run`: the file `checks/<script>.sh`. Without both it is `checks/<name>.sh`."""
    expect: str | None = None
    """Regular expression that must occur in the output; `{version}` stands for the component's version."""
    needs: tuple[Literal["gpu", "rdma"], ...] = ()
    """What the host must have; elsewhere the check is skipped."""
    when: Condition = Field(default_factory=dict)
    """Targets the check is about; elsewhere it is skipped."""
    user: str = "root"
    """User the commands run as."""
    timeout_s: Annotated[int, Field(gt=0)] = 60


class Support(Model):
    """What a component can be combined with; other targets are excluded with the reason."""

    when: Condition
    reason: str


class Row(Model):
    """Facts that vary by axis; the first row whose condition holds counts."""

    when: Condition = Field(default_factory=dict)
    values: dict[str, str]


class Packages(Model):
    """Packages of the distribution. `name={version}` pins a package to the component's version."""

    runtime: tuple[str, ...] = ()
    devel: tuple[str, ...] = ()
    """Installed in addition in the `devel` variant."""
    after_install: str = ""
    """Shell lines that run in the same step, so that what they remove is in no layer."""


class Component(Model):
    """The file `component.yaml` of a component."""

    title: str
    description: str
    homepage: str
    license: str
    """SPDX expression, or `LicenseRef-…` for one that SPDX does not list."""
    version_axis: Name | None = None
    """Axis whose value is the version; without it the version is pinned in `matrix.yaml`."""
    provides: tuple[Name, ...] = ()
    """Other names under which components may require this one."""
    requires: tuple[Name, ...] = ()
    """Components (or what they provide) that must be in the image too."""
    build_requires: tuple[Name, ...] = ()
    """Components whose build stages this one's stage uses; they need not be in the image."""
    variants: tuple[str, ...] = ("runtime", "devel")
    """Variants of an image that have the component; in others it is left out."""
    supports: tuple[Support, ...] = ()
    key: tuple[Name, ...] = ()
    """What `build.j2` may mention besides the own version: axes, `<axis>-major`, `gpu`, other components' names."""
    git: str | None = None
    """Address of the git repository; the commit is pinned beside the version in `matrix.yaml`."""
    wheels: tuple[str, ...] = ()
    """Requirements on the Python package index, with `{version}` and facts filled in; hashes are in the lock."""
    wheels_from: Name | None = None
    """Take the wheels of this component, in the own version, instead."""
    facts: tuple[Row, ...] = ()
    packages: Packages = Packages()
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the image. `PATH` is prepended to."""
    checks: tuple[Check, ...] = ()
    compiles: bool = False
    """Does the last `RUN` of the build stage run a compiler on upstream source?"""
    link_ignores: tuple[Name, ...] = ()
    """Components that the build stage uses but what it leaves in `/out/link` does not depend on."""


class Wheel(Model):
    """A wheel of the Python package index, pinned by content for each architecture."""

    name: str
    version: str
    sha256: dict[Arch, Sha256]


class Lock(Model):
    """The file `imagebuild.lock`: sources pinned by content."""

    wheels: dict[Name, dict[str, tuple[Wheel, ...]]] = Field(default_factory=dict)
    """Component → version → wheels."""


def combination_id(image: str, axes: Mapping[str, str]) -> str:
    """`<image>-cuda<V>-<os>-<variant>`: of the values, only the one of `cuda` does not say by itself what it is."""
    values = [f"{axis}{value}" if axis == "cuda" else value for axis, value in axes.items()]
    return "-".join([image, *values])


class Target(Model):
    """One point of an image's axes: what one tag names."""

    id: str
    image: Name
    axes: dict[Name, str]
    platforms: tuple[Platform, ...]
    components: dict[Name, str]
    """Component → version, requirements first."""
    tags: tuple[str, ...]
    stages: dict[str, str] = Field(default_factory=dict)
    """Build stage → key: a digest of everything its result depends on. Equal keys are built once."""

    @property
    def bake_name(self) -> str:
        """The id as a bake target; bake allows no dots in names."""
        return self.id.replace(".", "_")


class Excluded(Model):
    """A combination that is not built."""

    image: Name
    axes: dict[Name, str]
    rule: str
    reason: str

    @property
    def id(self) -> str:
        """The id that the target would have."""
        return combination_id(self.image, self.axes)


class Plan(Model):
    """What `imagebuild plan --json` prints."""

    targets: tuple[Target, ...]
    excluded: tuple[Excluded, ...]


class Step(Model):
    """A step that BuildKit executed or took from its cache."""

    name: str
    target: str
    stage: str
    component: str | None
    cached: bool
    seconds: float
    error: str | None = None


class BuildResult(Model):
    """The file `result.json` of a target."""

    target: str
    digest: str | None
    """Digest of what was built: an index or a manifest."""
    tags: tuple[str, ...]
    platforms: tuple[Platform, ...]
    size_bytes: int | None
    """Size of the compressed layers of one platform, where the result is in the engine's image store."""
    seconds: float
    steps: tuple[Step, ...]


Outcome = Literal["passed", "failed", "skipped"]


class CheckResult(Model):
    """What a check said about an image."""

    component: str
    check: str
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or failed."""
    output: str = ""
    seconds: float = 0.0


class VerifyResult(Model):
    """What `imagebuild verify --json` writes."""

    image: str
    digest: str | None
    target: str | None
    platform: str
    checks: tuple[CheckResult, ...]
