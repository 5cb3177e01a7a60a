"""What the final stage of a target holds besides files of other stages: packages, environment, labels. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from imagebuild.errors import ConfigError
from imagebuild.fields import Arch
from imagebuild.lockfile import UNRESOLVED, Lock
from imagebuild.recipe import Recipe
from imagebuild.sources import pinned, repository_of

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LISTS = ("CPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PATH", "PKG_CONFIG_PATH")
"""Variables that are lists of folders: components prepend to them instead of setting them."""


def lock_hash(recipe: Recipe, lock: Lock) -> str:
    """Digest of all versions and pins that the target's Dockerfile contains, 12 hex digits."""
    names = dict.fromkeys((*recipe.target.components, *recipe.stages))
    versions = [f"{name} {recipe.version(name)}" for name in names]
    pins = [pinned(lock, source) for source in dict.fromkeys(recipe.sources())]
    return hashlib.sha256("\n".join([*versions, *pins]).encode()).hexdigest()[:12]


def packages(recipe: Recipe, lock: Lock) -> list[str]:
    """Packages to install, as apt-get takes them. Raises ConfigError if the lock lacks a version."""
    chosen: set[str] = set()
    for name in recipe.target.components:
        own = recipe.of(name).packages_from or recipe.of(name).repository
        for package in recipe.packages(name):
            if "=" not in package:
                chosen.add(f"{package}={_exact(recipe, name, package, lock, stage=False)}" if own else package)
            else:
                # The archive keeps one version; what may change is a stable update's or a rebuild's suffix.
                chosen.add(package if own else f"'{package}*'")
    return sorted(chosen, key=lambda p: p.strip("'"))


def repository(recipe: Recipe, name: str, lock: Lock, *, stage: bool = False) -> dict[str, Any] | None:
    """What templates need to know of a component's own repository of packages."""
    urls = _urls(recipe, name, stage=stage)
    if not urls or not recipe.of(name).repository:
        return None
    arch, url = next(iter(urls.items()))
    first = recipe.repository(name, arch, stage=stage)
    assert first
    entry = repository_of(lock, url)
    about = {"name": first.name, "suite": first.suite, "key": first.key, "urls": urls, "stage": name}
    if first.configured:
        return about
    every = [f"{p}={_exact(recipe, name, p, lock, stage=stage)}" for p in recipe.packages(name, every=True)]
    return {**about, "fingerprint": entry if isinstance(entry, str) else entry.fingerprint, "packages": every}


def environment(recipe: Recipe) -> dict[str, str]:
    """Variables of the image. Raises ConfigError if two components contradict each other."""
    env: dict[str, str] = {"PATH": SYSTEM_PATH}
    for name in recipe.target.components:
        for variable, value in recipe.env(name).items():
            if variable in LISTS:
                env[variable] = f"{value}:{env[variable]}" if variable in env else value
            elif env.setdefault(variable, value) != value:
                where = recipe.project.components[name].at("env", variable)
                raise ConfigError(f"{where}: env.{variable}: {value!r}, but another component says {env[variable]!r}")
    return env


def labels(recipe: Recipe, digest: str, base: str) -> dict[str, str]:
    """Labels of the image; `digest` is the lock's hash, `base` the image it starts from."""
    target = recipe.target
    base_name, _, base_digest = base.partition("@")
    result = {
        "org.opencontainers.image.title": target.image,
        "org.opencontainers.image.description": recipe.image.description,
        "org.opencontainers.image.version": target.name.rpartition(":")[2],
        "org.opencontainers.image.base.name": base_name,
        "org.opencontainers.image.base.digest": base_digest,
        "org.opencontainers.image.licenses": " AND ".join(
            sorted({f"({recipe.of(c).license})" for c in target.components})
        ),
        "imagebuild.target": target.id,
        "imagebuild.lock": digest,
    }
    result |= {f"imagebuild.axis.{axis}": value for axis, value in target.axes.items()}
    result |= {f"imagebuild.component.{c}": version for c, version in target.components.items()}
    for name in target.components:
        values = recipe.values(name)
        result |= {f"imagebuild.{k}": recipe.fill(name, v, values, "labels") for k, v in recipe.of(name).labels.items()}
    return {label: value for label, value in result.items() if value}


def _exact(recipe: Recipe, name: str, package: str, lock: Lock, *, stage: bool) -> str:
    """Version of a package of a repository; all architectures must agree, as one Dockerfile is for all."""
    urls = _urls(recipe, name, stage=stage)
    found = set()
    for url in urls.values():
        entry = repository_of(lock, url)
        found.add(UNRESOLVED if isinstance(entry, str) else entry.packages.get(package, "none"))
    if len(found) > 1 or "none" in found:
        raise ConfigError(
            f"imagebuild.lock: {package} has the versions {', '.join(sorted(found))} in {', '.join(urls.values())}; "
            f"`imagebuild lock --update {name}` reads them anew"
        )
    return str(found.pop())


def _urls(recipe: Recipe, name: str, *, stage: bool) -> dict[Arch, str]:
    """Architecture → address of a component's repository, for the target's platforms."""
    found = {arch: recipe.repository(name, arch, stage=stage) for arch in recipe.archs}
    return {arch: repository.url for arch, repository in found.items() if repository}
