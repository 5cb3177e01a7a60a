"""Complete what syft found in an image by what no package manager knows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imagebuild import purl
from imagebuild.fields import Platform
from imagebuild.materials import Material
from imagebuild.sbom import spdx
from imagebuild.sbom.parts import Known, Part
from imagebuild.sbom.spdx import IMAGE, Document, Package

PURPOSE = {"archive": "ARCHIVE", "git": "SOURCE", "wheel": "ARCHIVE", "folder": "SOURCE"}
BASE = "SPDXRef-Base"
BOOTSTRAPPED = "bootstrapped with"
"""What the history of a base says that was made from the distribution's archive."""


@dataclass(frozen=True)
class About:
    """The image that a document is about."""

    digest: str
    """Of the manifest of its platform."""
    platform: Platform
    created: str
    """When, as SPDX writes times."""
    labels: Mapping[str, str] = field(default_factory=dict)
    history: str = ""
    """What the first entry of its history says."""

    @property
    def name(self) -> str:
        return self.labels.get("imagebuild.target") or self.labels.get("org.opencontainers.image.title") or "image"


def complete(found: Document, about: About, known: Known) -> Document:
    """The document of an image, from the one that syft wrote. Raises KeyError for what syft does not write."""
    document = spdx.without_files(found)
    root = next(
        r["relatedSpdxElement"]
        for r in document["relationships"]
        if r["relationshipType"] == "DESCRIBES" and r["spdxElementId"] == spdx.DOCUMENT
    )
    listed = [p for p in document["packages"] if p["SPDXID"] != root]
    own = _own(known)
    ids = {root: IMAGE, **_doubles(listed, known, own)}
    kept = [p for p in listed if p["SPDXID"] not in ids]
    base = list(_base(about, known))
    packages = [_image(about), *base, *own.values(), *(_from_repository(p, known) for p in kept)]
    relations = [
        *document["relationships"],
        *(spdx.relationship(IMAGE, "DESCENDANT_OF", b["SPDXID"]) for b in base),
        *(r for part in known.parts for r in _relations(part, kept)),
    ]
    licenses = [e for part in known.parts for e in _licenses(part)]
    result = {
        "packages": packages,
        "relationships": spdx.renamed(relations, ids),
        "hasExtractedLicensingInfos": [*document.get("hasExtractedLicensingInfos", ()), *licenses],
        "comment": known.reason,
    }
    return spdx.finished(result, f"{about.name} {about.platform}", about.created, _tools(found))


def _image(about: About) -> Package:
    arch = about.platform.removeprefix("linux/")
    last = about.labels.get("org.opencontainers.image.title") or "image"
    return spdx.package(
        IMAGE, about.name, about.digest, url=purl.purl("oci", last.lower(), about.digest, {"arch": arch}),
        sha256=about.digest.removeprefix("sha256:"), purpose="CONTAINER",
        summary=about.labels.get("org.opencontainers.image.description", ""),
    )  # fmt: skip


def _base(about: About, known: Known) -> Iterator[Package]:
    """The image it starts from: what its labels say, unless it was made from the distribution's archive instead."""
    name = about.labels.get("org.opencontainers.image.base.name", "")
    digest = about.labels.get("org.opencontainers.image.base.digest", "")
    if BOOTSTRAPPED in about.history:
        yield spdx.package(
            BASE, f"{name or 'base'} (bootstrapped)", purpose="OPERATING-SYSTEM",
            comment=f"{about.history}; in place of {name}@{digest}",
        )  # fmt: skip
    elif digest.startswith("sha256:"):
        hexadecimal, url = digest.removeprefix("sha256:"), purl.image(name, digest)
        if known.base and known.base.digest.get("sha256") == hexadecimal:
            url = known.base.uri
        yield spdx.package(
            BASE, name, digest, url=url, sha256=hexadecimal, purpose="CONTAINER",
            comment="As the label org.opencontainers.image.base.digest says.",
        )  # fmt: skip


def _own(known: Known) -> dict[str, Package]:
    """SPDX id → package, of every component and of what it was made from."""
    found = {_id(part): _component(part) for part in known.parts}
    for part in known.parts:
        for material in part.materials:
            if material.kind in PURPOSE:
                found.setdefault(_source_id(material), _source(part, material))
    return found


def _component(part: Part) -> Package:
    about = part.about
    repositories = [m for m in part.materials if m.kind == "repository"]
    own = [m for m in part.materials if m.kind in PURPOSE]
    signed = "; ".join(f"packages of {m.address}, signed by {m.annotations['fingerprint']}" for m in repositories)
    unknown = "" if about else "This checkout has no such component."
    return spdx.package(
        _id(part), part.name, part.version,
        # What only brings packages is a group: its packages have names of their own.
        url=purl.purl("generic", part.name, part.version) if own else "",
        license_=about.license if about else "", homepage=about.homepage if about else "",
        summary=f"{about.title}: {about.description}" if about else "", comment=signed or unknown,
    )  # fmt: skip


def _source(part: Part, material: Material) -> Package:
    license_ = part.about.license if part.about else ""
    note = "; ".join(f"{key} {value}" for key, value in material.annotations.items())
    return spdx.package(
        _source_id(material), material.name, material.version or part.version,
        url=material.uri if material.uri.startswith("pkg:") else "", download=material.address,
        sha256=material.digest.get("sha256", ""), license_=license_, purpose=PURPOSE[material.kind], comment=note,
    )  # fmt: skip


def _relations(part: Part, packages: Sequence[Package]) -> Iterator[dict[str, str]]:
    yield spdx.relationship(IMAGE, "CONTAINS", _id(part))
    for material in part.materials:
        if material.kind in PURPOSE:
            yield spdx.relationship(_id(part), "GENERATED_FROM", _source_id(material))
    for package in packages:
        brought = _is_deb(package) and package["name"] in part.packages
        if brought or (not _is_deb(package) and _inside(package, part)):
            yield spdx.relationship(_id(part), "CONTAINS", package["SPDXID"])


def _doubles(listed: Sequence[Package], known: Known, own: Mapping[str, Package]) -> dict[str, str]:
    """Package that syft found → ours that is the same thing."""
    named = {purl.identity(url): spdx_id for spdx_id, p in own.items() if (url := spdx.purl_of(p))}
    result = {}
    for package in listed:
        if (url := spdx.purl_of(package)) and purl.identity(url) in named:
            result[package["SPDXID"]] = named[purl.identity(url)]
        elif not _is_deb(package):
            for part in known.parts:
                if _inside(package, part) and str(package["name"]).lower().removeprefix("lib") in part.names:
                    result[package["SPDXID"]] = _id(part)
    return result


def _inside(package: Package, part: Part) -> bool:
    """Was it found in files of the component, and nowhere else?"""
    paths = str(package.get("sourceInfo", "")).rpartition(": ")[2].split(", ")
    return bool(part.folders) and all(any(p.startswith(f"{f}/") for f in part.folders) for p in paths)


def _is_deb(package: Package) -> bool:
    return (spdx.purl_of(package) or "").startswith("pkg:deb/")


def _from_repository(package: Package, known: Known) -> Package:
    """A package of a signed repository says which."""
    for part in known.parts:
        repositories = [m for m in part.materials if m.kind == "repository"]
        if repositories and _is_deb(package) and package["name"] in part.packages:
            return {**package, "downloadLocation": repositories[0].address}
    return package


def _licenses(part: Part) -> list[dict[str, str]]:
    if part.about is None:
        return []
    files = ", ".join(part.about.license_files)
    where = f"The text is in the image: {files}" if files else f"The text is at {part.about.homepage}"
    return spdx.extracted(part.about.license, where)


def _tools(found: Mapping[str, Any]) -> list[str]:
    creators = found["creationInfo"]["creators"]
    return [c.removeprefix("Tool: ") for c in creators if c.startswith("Tool: ")]


def _id(part: Part) -> str:
    return spdx.identifier("Component", part.name)


def _source_id(material: Material) -> str:
    pin = material.digest.get("sha256") or material.digest.get("gitCommit") or ""
    return spdx.identifier("Source", material.name, *([pin[:16]] if pin else []))
