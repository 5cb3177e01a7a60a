"""Jobs of GitHub Actions: targets in groups that share what is compiled. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from imagebuild.errors import ConfigError
from imagebuild.fields import Platform

MOST_JOBS = 256
"""Entries that a matrix of GitHub Actions may have."""

Compiled = frozenset[str]
"""Keys of the steps that compile."""


@dataclass(frozen=True)
class Build:
    """A target on one platform."""

    target: str
    platform: Platform

    @property
    def arch(self) -> str:
        return self.platform.removeprefix("linux/")


Group = Sequence[Build]
"""Builds of one platform, one after the other on one runner."""


def grouped(builds: Sequence[Build], jobs: int, compiled: Callable[[Build], Compiled]) -> list[Group]:
    """At most `jobs` groups: one for each build if that is enough, else as even as may be.

    What compiles the same is kept together, so that few runners compile it too; `compiled` is asked only if there
    are more builds than jobs. Raises ConfigError if there are more platforms than jobs.
    """
    if len(builds) <= jobs:
        return [(build,) for build in builds]
    platforms = {build.platform: [b for b in builds if b.platform == build.platform] for build in builds}
    if len(platforms) > jobs:
        raise ConfigError(f"--github-jobs {jobs}: a job is for one platform, and there are {len(platforms)}")
    clusters = [list(_clusters(of_platform, compiled)) for of_platform in platforms.values()]
    size = 1
    while len(groups := [g for each in clusters for g in _filled(each, size)]) > jobs:
        size += 1
    place = {build: i for i, build in enumerate(builds)}
    return sorted((sorted(group, key=place.__getitem__) for group in groups), key=lambda group: place[group[0]])


def _clusters(builds: Sequence[Build], compiled: Callable[[Build], Compiled]) -> Iterator[Group]:
    """Builds that compile the same; neighbours share as much as they can."""
    keys = {build: compiled(build) for build in builds}
    shared = Counter(key for of_build in keys.values() for key in of_build)
    # What most builds share comes first, so that sorting makes a tree of it.
    paths = {build: sorted(of_build, key=lambda key: (-shared[key], key)) for build, of_build in keys.items()}
    for _, cluster in groupby(sorted(builds, key=paths.__getitem__), key=paths.__getitem__):
        yield list(cluster)


def _filled(clusters: Iterable[Group], size: int) -> list[list[Build]]:
    """Groups of at most `size`; a cluster is cut only if it is larger than that."""
    groups: list[list[Build]] = []
    for cluster in clusters:
        if groups and len(groups[-1]) + len(cluster) <= size:
            groups[-1] += cluster
            continue
        pieces = -(-len(cluster) // size)
        groups += [list(cluster[i * len(cluster) // pieces : (i + 1) * len(cluster) // pieces]) for i in range(pieces)]
    return groups


def matrix(groups: Sequence[Group], runners: Mapping[Platform, Sequence[str]]) -> dict[str, list[dict[str, Any]]]:
    """The `matrix` of a job. Raises ConfigError for a platform without runner."""
    if unknown := {group[0].platform for group in groups} - set(runners):
        raise ConfigError(f"github-runners: no runner for {', '.join(sorted(unknown))}; name its label there")
    entries = []
    for number, group in enumerate(groups, 1):
        first, arch = group[0], group[0].arch
        alone = len(group) == 1
        labels = list(runners[first.platform])
        entries.append(
            {
                "name": f"{first.target} {arch}" if alone else f"{first.target} and {len(group) - 1} more {arch}",
                "id": f"{first.target}-{arch}" if alone else f"group{number:03}-{arch}",
                "targets": " ".join(build.target for build in group),
                "platform": first.platform,
                "runner": labels[0] if len(labels) == 1 else labels,
            }
        )
    return {"include": entries}
