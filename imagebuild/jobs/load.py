"""The reader of the facts, which are the YAML files in the folder `jobs/`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TypeVar

from imagebuild.core.errors import Mistakes, suggestion
from imagebuild.core.fields import Loc, Model, YamlFile
from imagebuild.core.yaml import dotted_key, load_yaml
from imagebuild.jobs.facts import (
    COLLECTIVES,
    CONDITIONS,
    Cluster,
    ClusterFabric,
    Fabric,
    Feature,
    JobFacts,
    JobTest,
    NcclVariables,
    NodeFacts,
    SchedulerFacts,
    Stack,
    Volume,
)

M = TypeVar("M", bound=Model)
KINDS: Mapping[str, type[Model]] = {
    "stacks": Stack, "fabrics": Fabric, "features": Feature, "clusters": Cluster, "tests": JobTest,
    "schedulers": SchedulerFacts,
}  # fmt: skip
"""Maps each folder in `jobs/` to the type of the YAML files in the folder."""


def load_facts(*folders: Path) -> JobFacts:
    """Return the facts in all folders. A file replaces files with the same name in earlier folders.
    Raises ConfigError with all mistakes, each with its file and line."""
    mistakes = Mistakes()
    paths = {path.relative_to(folder).as_posix(): path for folder in folders for path in sorted(folder.rglob("*.*"))}

    def load(name: str, model: type[M]) -> YamlFile[M] | None:
        return load_yaml(paths.get(name, folders[-1] / name), model, mistakes)

    kinds: dict[str, Mapping[str, YamlFile[Any]]] = {}
    for kind, model in KINDS.items():
        files = {PurePath(name).stem: load(name, model) for name in paths if PurePath(name).match(f"{kind}/*.yaml")}
        if not files:
            where = str(folders[-1] / kind)
            mistakes.add(
                where, "this folder contains no *.yaml file; name a complete copy of the folder `jobs` with --facts"
            )
        kinds[kind] = {name: file for name, file in files.items() if file}
    node, nccl_variables = load("node.yaml", NodeFacts), load("nccl-params.json", NcclVariables)
    fabrics = kinds["fabrics"]
    for cluster in kinds["clusters"].values():
        for name in set(cluster.model.fabrics) - set(fabrics):
            mistakes.add(cluster.at("fabrics", name), f"fabrics.{name}: unknown fabric{suggestion(name, set(fabrics))}")
        _check_volumes(cluster, fabrics, mistakes)
    # Without this check, a condition (`when`) with a misspelled name would never be true, without any message.
    known = {*CONDITIONS, *COLLECTIVES, *kinds["features"]}
    for file in chain(filter(None, [node]), *(files.values() for files in kinds.values())):
        for loc in file.lines:
            if loc[-2:-1] == ("when",) and loc[-1] not in known:
                mistakes.add(
                    file.at(*loc), f"{dotted_key(loc)}: unknown name in a condition{suggestion(str(loc[-1]), known)}"
                )
    mistakes.stop_if_any()
    assert node
    assert nccl_variables
    return JobFacts(**kinds, node=node, nccl_variables=nccl_variables.model)


def _check_volumes(cluster: YamlFile[Cluster], fabrics: Mapping[str, YamlFile[Fabric]], mistakes: Mistakes) -> None:
    """Add a mistake for each volume of a cluster that has the name or path of another volume in the same pod."""
    for name, fabric in fabrics.items():
        pod, site = fabric.model.pod, cluster.model.fabrics.get(name, ClusterFabric()).pod
        taken = {"dshm", "/dev/shm", *(volume.name for sidecar in pod.sidecars for volume in sidecar.volumes)}  # noqa: S108
        taken |= {text for volume in pod.volumes for text in (volume.name, volume.mount)}
        own: dict[Loc, Volume] = {
            ("kubernetes", "volumes", i): v for i, v in enumerate(cluster.model.kubernetes.volumes)
        }
        own |= {("fabrics", name, "pod", "volumes", i): v for i, v in enumerate(site.volumes)}
        for key, volume in own.items():
            if taken & {volume.name, volume.mount}:
                mistakes.add(
                    cluster.at(*key),
                    f"{dotted_key(key)}: another volume of the pod has this name or path; change `name` or `mount`",
                )
            taken |= {volume.name, volume.mount}
