"""What the stages of a target fetch, and which of its stages hold nothing else. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from imagebuild import final
from imagebuild.fields import Commit
from imagebuild.lockfile import Lock
from imagebuild.recipe import ARCHS, Recipe
from imagebuild.sources import BaseImage, WheelSet, commit_of, digest_of, hash_of, wheels_of


@dataclass(frozen=True)
class ArchiveFile:
    """An archive, pinned by its sha256."""

    url: str
    sha256: str


@dataclass(frozen=True)
class GitCommit:
    """A commit of a git repository."""

    url: str
    commit: Commit


@dataclass(frozen=True)
class KeyFile:
    """The key of a repository of packages. What the build trusts is its fingerprint, which the build checks."""

    url: str


Fetched = ArchiveFile | GitCommit | KeyFile


@dataclass(frozen=True)
class Needs:
    """What one target needs from elsewhere, besides packages."""

    stages: dict[str, Fetched]
    """Stage that holds nothing else → what it holds."""
    images: frozenset[str]
    """As FROM names them, with digest."""
    wheels: frozenset[str]
    """Hashes."""


def needs(recipe: Recipe, lock: Lock, stages: Iterable[str], platforms: Iterable[str]) -> Needs:
    """What a target's Dockerfile, which has these stages, fetches for the platforms. Raises ConfigError."""
    present = frozenset(stages)
    archs = [arch for arch in ARCHS if f"linux/{arch}" in set(platforms)]
    fetched = {stage: found for name in recipe.stages for stage, found in _fetched(recipe, name, lock)}
    unwanted = {f"{name}-source-{arch}" for name in recipe.stages for arch in ARCHS if arch not in archs}
    sources = tuple(recipe.sources())
    wheels = (w for s in sources if isinstance(s, WheelSet) for w in wheels_of(lock, s))
    return Needs(
        {stage: found for stage, found in fetched.items() if stage in present - unwanted},
        frozenset(digest_of(lock, s.reference) for s in sources if isinstance(s, BaseImage)),
        frozenset(digest for wheel in wheels for arch, digest in wheel.sha256.items() if arch in archs),
    )


def _fetched(recipe: Recipe, name: str, lock: Lock) -> Iterator[tuple[str, Fetched]]:
    """Stage → what it fetches, of a component; the names are those that `macros.j2` gives them."""
    for arch, url in recipe.archives(name).items():
        if f"linux/{arch}" in recipe.target.platforms:
            yield f"{name}-source-{arch}", ArchiveFile(url, hash_of(lock, name, url))
    if git := recipe.git(name):
        yield f"{name}-source", GitCommit(git.url, commit_of(lock, git))
    if repository := final.repository(recipe, name, lock, stage=True):
        yield f"{name}-key", KeyFile(repository["key"])
