"""Are objects what the API references say? Only names and types; the references are `tests/data/kubernetes-fields.yaml`."""

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
    found: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "tests/data/kubernetes-fields.yaml").read_text())
    return found


def mistakes(value: Any, kind: str, where: str = "") -> list[str]:
    """What is not as the reference says, each with its path."""
    if kind.startswith(("[", "{")):
        wanted = list if kind.startswith("[") else dict
        if not isinstance(value, wanted):
            return [f"{where}: is not a {wanted.__name__}"]
        items = enumerate(value) if isinstance(value, list) else value.items()
        return [m for key, item in items for m in mistakes(item, kind[1:-1], f"{where}.{key}")]
    if kind in fields():
        return _object(value, fields()[kind], where)
    if "|" in kind:
        return [] if value in kind.split("|") else [f"{where}: {value!r} is not one of {kind}"]
    types: dict[str, type] = {"int": int, "bool": bool, "string": str, "quantity": str, "label": str}
    if not isinstance(value, types[kind]) or (kind == "int" and isinstance(value, bool)):
        return [f"{where}: {value!r} is no {kind}"]
    pattern = {"quantity": QUANTITY, "label": LABEL}.get(kind)
    if pattern and not (re.fullmatch(pattern, str(value)) and len(str(value)) <= 63):
        return [f"{where}: {value!r} is no {kind}"]
    return []


def _object(value: Any, known: dict[str, str], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: is no object"]
    names = {name.rstrip("!"): kind for name, kind in known.items()}
    found = [f"{where}.{name[:-1]}: is missing" for name in known if name.endswith("!") and name[:-1] not in value]
    for name, item in value.items():
        found += mistakes(item, names[name], f"{where}.{name}") if name in names else [f"{where}.{name}: is unknown"]
    return found
