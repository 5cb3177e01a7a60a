"""Reads `jobs/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from imagebuild.config import Document, Mistakes, dotted, load, suggestion
from imagebuild.fields import Model
from imagebuild.jobs.inputs import Facts
from imagebuild.jobs.models import (
    COLLECTIVES,
    CONDITIONS,
    Cluster,
    Fabric,
    Feature,
    JobTest,
    NodeFacts,
    Parameters,
    SchedulerFacts,
    Stack,
)
from imagebuild.versions import satisfies

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
    for test in tests.values():
        for name in set(test.model.collectives) - set(COLLECTIVES):
            there = suggestion(name, set(COLLECTIVES))
            mistakes.add(test.at("collectives"), f"collectives: nccl-tests has no {name!r}{there}")
    documents = [d for kind in (stacks, fabrics, features, clusters, schedulers) for d in kind.values()]
    for document in (*documents, *([node] if node else [])):
        _conditions(document, {*CONDITIONS, *COLLECTIVES, *features}, mistakes)
    mistakes.stop_if_any()
    assert node is not None
    assert parameters is not None
    return Facts(stacks, fabrics, features, clusters, tests, schedulers, node, parameters.model)


def _conditions(document: Document[Any], known: set[str], mistakes: Mistakes) -> None:
    """A condition on something that there is not would never hold, and nobody would see."""
    sites = getattr(document.model, "fabrics", {})
    layers = [((), document.model), *((("fabrics", name), site) for name, site in sites.items())]
    rows = [
        ((*path, name, i), row)
        for path, layer in layers
        for name in ("env", "expect", "supports", "excludes")
        for i, row in enumerate(getattr(layer, name, ()))
    ]
    for path, row in rows:
        for name, wanted in row.when.items():
            here = (*path, "when", name)
            if name not in known:
                mistakes.add(document.at(*here), f"{dotted(here)}: no such fact{suggestion(name, known)}")
            for value in wanted:
                try:
                    satisfies("1", value)
                except ValueError as error:
                    mistakes.add(document.at(*here), f"{dotted(here)}: {error}")


def _all(folder: Path, model: type[M], mistakes: Mistakes) -> Mapping[str, Document[M]]:
    files = sorted(folder.glob("*.yaml"))
    if not files:
        mistakes.add(str(folder), "no *.yaml here; give the folder of the facts with --facts")
    read = {file.stem: load(file, model, mistakes) for file in files}
    return {name: document for name, document in read.items() if document}
