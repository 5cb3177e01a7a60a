"""SPDX 2.3 documents as JSON: what we write into them, and how one becomes the same bytes every time. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from imagebuild import __version__, purl

DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE = "SPDXRef-Image"
NAMESPACE = "urn:imagebuild:sbom:"
UNKNOWN = "NOASSERTION"
LICENSE_REF = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")

Document = dict[str, Any]
Package = dict[str, Any]


def identifier(*words: str) -> str:
    """An SPDX id; the same words give the same one."""
    return "SPDXRef-" + "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)


def package(
    spdx_id: str, name: str, version: str = "", *, url: str = "", download: str = "", sha256: str = "",
    license_: str = "", homepage: str = "", purpose: str = "", summary: str = "", comment: str = "",
) -> Package:  # fmt: skip
    """A package; `url` is its package URL."""
    found: Package = {
        "name": name,
        "SPDXID": spdx_id,
        "versionInfo": version,
        "supplier": UNKNOWN,
        "downloadLocation": download or UNKNOWN,
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": sha256}] if sha256 else [],
        "homepage": homepage,
        "summary": summary,
        "comment": comment,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": license_ or UNKNOWN,
        "copyrightText": UNKNOWN,
        "externalRefs": [_purl(url)] if url else [],
        "primaryPackagePurpose": purpose,
    }
    return {key: value for key, value in found.items() if value not in ("", [])}


def relationship(one: str, kind: str, other: str) -> dict[str, str]:
    """`one` … `other`: `image CONTAINS package`."""
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def purl_of(found: Package) -> str | None:
    """The package URL of a package."""
    refs = found.get("externalRefs") or ()
    return next((str(r["referenceLocator"]) for r in refs if r.get("referenceType") == "purl"), None)


def digests(document: Mapping[str, Any]) -> frozenset[str]:
    """Digests of the images that a document is about: of what it says that it describes. Raises as `KeyError` does."""
    about = {
        r["relatedSpdxElement"]
        for r in document["relationships"]
        if r["relationshipType"] == "DESCRIBES" and r["spdxElementId"] == DOCUMENT
    }
    return frozenset(
        f"sha256:{checksum['checksumValue']}"
        for found in document["packages"]
        if found["SPDXID"] in about
        for checksum in found.get("checksums", ())
        if checksum["algorithm"] == "SHA256"
    )


def renamed(relationships: Iterable[Mapping[str, Any]], ids: Mapping[str, str]) -> list[dict[str, Any]]:
    """Relationships with other ids for elements; what would relate a thing to itself goes, and doubles do."""
    result: dict[tuple[str, ...], dict[str, Any]] = {}
    for relation in relationships:
        one, other = (ids.get(relation[k], relation[k]) for k in ("spdxElementId", "relatedSpdxElement"))
        if one != other:
            changed = {**relation, "spdxElementId": one, "relatedSpdxElement": other}
            result[one, str(relation["relationshipType"]), other] = changed
    return list(result.values())


def without_files(document: Document) -> Document:
    """The document of packages alone. Which file belongs to which package is in the image's package database, ten
    times as long as all else.
    """
    files = {item["SPDXID"] for item in document.get("files", ())}
    kept = [r for r in document["relationships"] if not files & {r["spdxElementId"], r["relatedSpdxElement"]}]
    packages = [
        {k: v for k, v in p.items() if k != "packageVerificationCode"} | {"filesAnalyzed": False}
        for p in document["packages"]
    ]
    return {k: v for k, v in document.items() if k != "files"} | {"packages": packages, "relationships": kept}


def finished(document: Document, name: str, created: str, tools: Iterable[str]) -> Document:
    """The document with everything in a fixed order, and a name and time of its own that depend on content alone."""
    licenses = {item["licenseId"]: item for item in document.get("hasExtractedLicensingInfos", ())}
    content: Document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": name,
        "creationInfo": {
            "created": created,
            "creators": [f"Tool: imagebuild-{__version__}", *(f"Tool: {tool}" for tool in sorted(tools))],
        },
        "packages": sorted(document["packages"], key=lambda p: str(p["SPDXID"])),
        "relationships": sorted(document["relationships"], key=_order),
        "hasExtractedLicensingInfos": [licenses[key] for key in sorted(licenses)],
    }
    if comment := document.get("comment"):
        content["comment"] = comment
    image = next(p for p in content["packages"] if p["SPDXID"] == IMAGE)
    digest = hashlib.sha256(encode(content)).hexdigest()[:16]
    return {**content, "documentNamespace": f"{NAMESPACE}{image['versionInfo']}:{digest}"}


def encode(document: Mapping[str, Any]) -> bytes:
    """The same document gives the same bytes."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def extracted(license_: str, text: str) -> list[dict[str, str]]:
    """What a document has to say of licences that SPDX does not list."""
    return [{"licenseId": ref, "name": ref, "extractedText": text} for ref in LICENSE_REF.findall(license_)]


def same(one: str, other: str) -> bool:
    """Do two package URLs name the same thing?"""
    return purl.identity(one) == purl.identity(other)


def _purl(url: str) -> dict[str, str]:
    return {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}


def _order(relation: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(relation[k]) for k in ("spdxElementId", "relationshipType", "relatedSpdxElement"))
