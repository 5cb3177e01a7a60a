"""Which image an SPDX document is about. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HEX = re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True)
class Document:
    """An SPDX document in JSON."""

    digests: frozenset[str]
    """What the packages that it describes are called by: version, checksums, references."""


def read(document: Mapping[str, Any]) -> Document:
    """Find the digests of what a document describes; none if it does not say that."""
    described = set(_described(document))
    packages = [p for p in _rows(document, "packages") if p.get("SPDXID") in described]
    texts = [text for package in packages for text in _names(package)]
    return Document(frozenset(f"sha256:{found}" for text in texts for found in HEX.findall(text)))


def _described(document: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(name) for name in document.get("documentDescribes") or ())
    for relation in _rows(document, "relationships"):
        if relation.get("relationshipType") == "DESCRIBES":
            yield str(relation.get("relatedSpdxElement"))


def _names(package: Mapping[str, Any]) -> Iterator[str]:
    yield str(package.get("versionInfo", ""))
    yield from (
        str(row.get("checksumValue")) for row in _rows(package, "checksums") if row.get("algorithm") == "SHA256"
    )
    yield from (str(row.get("referenceLocator")) for row in _rows(package, "externalRefs"))


def _rows(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = document.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
