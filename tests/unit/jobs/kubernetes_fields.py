"""Compare objects of Kubernetes with the API references in `tests/data/kubernetes-fields.yaml`: names and types only."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

from tests.conftest import ROOT

QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


@lru_cache
def fields() -> dict[str, dict[str, str]]:
    """Kind of object → its fields and their types; `!` marks a required field."""
    references: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "tests/data/kubernetes-fields.yaml").read_text())
    return references


def mistakes(value: Any, kind: str, where: str = "") -> list[str]:
    """Every difference from the reference, with its path."""
    if kind.startswith(("[", "{")):
        container = list if kind.startswith("[") else dict
        if not isinstance(value, container):
            return [f"{where}: is not a {container.__name__}"]
        items = enumerate(value) if isinstance(value, list) else value.items()
        return [m for key, item in items for m in mistakes(item, kind[1:-1], f"{where}.{key}")]
    if kind in fields():
        if not isinstance(value, dict):
            return [f"{where}: is not an object"]
        known = {name.rstrip("!"): type_ for name, type_ in fields()[kind].items()}
        required = [name[:-1] for name in fields()[kind] if name.endswith("!")]
        found = [f"{where}.{name}: is missing" for name in required if name not in value]
        for name, item in value.items():
            here = f"{where}.{name}"
            found += mistakes(item, known[name], here) if name in known else [f"{here}: is unknown"]
        return found
    if "|" in kind:
        return [] if value in kind.split("|") else [f"{where}: {value!r} is not one of {kind}"]
    types: dict[str, type] = {"int": int, "bool": bool, "string": str, "quantity": str, "label": str}
    pattern = {"quantity": QUANTITY, "label": LABEL}.get(kind)
    fits = isinstance(value, types[kind]) and not (kind == "int" and isinstance(value, bool))
    if fits and pattern:
        fits = bool(re.fullmatch(pattern, str(value))) and len(str(value)) <= 63
    return [] if fits else [f"{where}: {value!r} is not of type {kind}"]
