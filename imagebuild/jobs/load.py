"""Reads `jobs/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from imagebuild.config import Document, Mistakes, load
from imagebuild.jobs.inputs import Facts
from imagebuild.jobs.models import Cluster, Fabric, Feature, JobTest, NodeFacts, Parameters, SchedulerFacts, Stack
from imagebuild.models import Model

M = TypeVar("M", bound=Model)


def load_facts(folder: Path) -> Facts:
    """All facts of the folder. Raises ConfigError with every mistake found, each with its file and line."""
    mistakes = Mistakes()
    stacks = _all(folder / "stacks", Stack, mistakes)
    fabrics = _all(folder / "fabrics", Fabric, mistakes)
    features = _all(folder / "features", Feature, mistakes)
    clusters = _all(folder / "clusters", Cluster, mistakes)
    tests = _all(folder / "tests", JobTest, mistakes)
    schedulers = _all(folder / "schedulers", SchedulerFacts, mistakes)
    node = load(folder / "node.yaml", NodeFacts, mistakes)
    parameters = load(folder / "nccl-params.json", Parameters, mistakes)
    for cluster in clusters.values():
        for name in set(cluster.model.fabrics) - set(fabrics):
            mistakes.add(cluster.at("fabrics", name), f"fabrics.{name}: there is no such fabric")
    mistakes.stop_if_any()
    assert node is not None
    assert parameters is not None
    return Facts(stacks, fabrics, features, clusters, tests, schedulers, node, parameters.model)


def _all(folder: Path, model: type[M], mistakes: Mistakes) -> Mapping[str, Document[M]]:
    files = sorted(folder.glob("*.yaml"))
    if not files:
        mistakes.add(str(folder), "no *.yaml here; give the folder of the facts with --facts")
    read = {file.stem: load(file, model, mistakes) for file in files}
    return {name: document for name, document in read.items() if document}
