"""What the project knows of an image's components: licences, packages, and what each was made from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imagebuild import checks, final
from imagebuild.component import Component
from imagebuild.errors import ConfigError
from imagebuild.fields import Platform
from imagebuild.materials import Material, materials
from imagebuild.models import Plan
from imagebuild.recipe import Recipe
from imagebuild.render import Renderer

OWN_ROOTS = ("/opt/", "/usr/local/")
"""Folders below which what is two levels deep belongs to one component."""


@dataclass(frozen=True)
class Part:
    """A component of an image."""

    name: str
    version: str
    about: Component | None = None
    """None for a component that this checkout does not have."""
    packages: tuple[str, ...] = ()
    """Names of the distribution's packages that it brings."""
    materials: tuple[Material, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        """Where its files are, and nobody else's."""
        paths = (*self.about.libraries, *self.about.license_files) if self.about else ()
        return tuple(dict.fromkeys(_root(path) for path in paths if path.startswith(OWN_ROOTS)))

    @property
    def names(self) -> frozenset[str]:
        """What a tool may call it that finds its files."""
        provided = self.about.provides if self.about else ()
        return frozenset(n.lower() for n in (self.name, *provided, *(m.name for m in self.materials)))


@dataclass(frozen=True)
class Known:
    """What the project knows of an image."""

    parts: tuple[Part, ...]
    base: Material | None = None
    """What it starts from, by this checkout's lock."""
    reason: str = ""
    """Why sources are unknown, if they are."""


def known(labels: Mapping[str, str], platform: Platform, plan: Plan, renderer: Renderer | None) -> Known:
    """The components that an image's labels name.

    What they were made from is told only if this checkout has the target with the same versions and pins: then the
    image's label says the same hash of the lock.
    """
    components = checks.components_of(labels)
    if not components:
        return Known((), reason="the image has no labels of imagebuild: only what package managers know is listed")
    if renderer is None:
        parts = tuple(Part(name, version) for name, version in components.items())
        return Known(parts, reason="made without the project: licences and sources of its components are not listed")
    recipe, reason = _recipe(labels, platform, plan, renderer)
    found = materials(recipe, renderer.project.lock, platform) if recipe else ()
    parts = tuple(
        Part(
            name,
            version,
            about := _component(renderer, name),
            _bare(recipe.packages(name)) if recipe else _named(about),
            tuple(m for m in found if m.owner == name and m.kind != "image"),
        )
        for name, version in components.items()
    )
    return Known(parts, next((m for m in found if m.kind == "image"), None), reason)


def _recipe(labels: Mapping[str, str], platform: Platform, plan: Plan, renderer: Renderer) -> tuple[Recipe | None, str]:
    name = labels.get("imagebuild.target", "")
    target = next((t for t in plan.targets if t.id == name), None)
    unknown = "what its components were made from is not listed"
    if target is None:
        return None, f"this checkout has no target {name}: {unknown}"
    if platform not in target.platforms:
        return None, f"{name} is not for {platform}: {unknown}"
    recipe = renderer.recipe(target)
    try:
        locked = final.lock_hash(recipe, renderer.project.lock)
    except ConfigError as error:
        return None, f"{error}: {unknown}"
    if labels.get("imagebuild.lock") != locked or checks.components_of(labels) != target.components:
        return None, f"the lock of this checkout is not the one that {name} was built with: {unknown}"
    return recipe, ""


def _component(renderer: Renderer, name: str) -> Component | None:
    document = renderer.project.components.get(name)
    return document.model if document else None


def _named(about: Component | None) -> tuple[str, ...]:
    packages = (*about.packages.runtime, *about.packages.devel) if about else ()
    return tuple(p for p in _bare(packages) if "{" not in p)


def _bare(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(p.partition("=")[0] for p in packages)


def _root(path: str) -> str:
    """`/opt/ucx` of `/opt/ucx/lib/ucx`; `/usr/local/cuda` of `/usr/local/cuda/lib`."""
    depth = 3 if path.startswith("/usr/local/") else 2
    return "/".join(path.split("/")[: depth + 1])
