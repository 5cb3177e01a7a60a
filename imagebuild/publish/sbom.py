"""Make the SBOM of an image: what syft finds, completed by what the project knows. SPDX 2.3 as JSON."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

from packageurl import PackageURL
from pydantic import BaseModel, ConfigDict

from imagebuild import __version__
from imagebuild.core import debian
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Form, Platform
from imagebuild.core.run import INSTALL_SYFT, RunProgram, run_program, syft_program
from imagebuild.oci.attestation import encode_predicate
from imagebuild.oci.image import PlatformImage
from imagebuild.project.component import Component
from imagebuild.project.matrix import Plan, components_of
from imagebuild.publish.provenance import Dependency, image_purl, package_url, resolved_dependencies
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer, hash_of_lock

Document = dict[str, Any]
"""An SPDX document."""
Package = dict[str, Any]
"""A package of an SPDX document."""

DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE = "SPDXRef-Image"
BASE = "SPDXRef-Base"
NAMESPACE = "urn:imagebuild:sbom:"
UNKNOWN = "NOASSERTION"
LICENSE_REF = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")
BOOTSTRAPPED = "bootstrapped with"
"""Words in the history of a base image that was made from the distribution's archive."""
OWN_ROOTS = ("/opt/", "/usr/local/")
"""Folders in which a component has a folder of its own."""


def make_sbom(image: PlatformImage, plan: Plan, renderer: Renderer | None) -> Document:
    """Return the SPDX document of an image: always the same for the same image and lock.

    Raises CommandError if syft is missing or fails, and ResultError if it writes something else than a document, or if
    the image's creation time cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        document = run_syft(image.as_layout(Path(name, "layout")).folder, Path(name))
    return complete_document(document, image, *image_parts(image, plan, renderer))


def creation_time(image: PlatformImage) -> str:
    """Return when an image was created, in the notation of SPDX. Raises ResultError if that cannot be read."""
    created = str(image.config.get("created") or "1970-01-01T00:00:00Z")
    try:
        return datetime.fromisoformat(created).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except ValueError as error:
        raise ResultError(f"{image.name}: its creation time cannot be read: {error}") from None


SYFT_FORMAT = "spdx-json@2.3"
SYFT_SETTINGS = {
    "SYFT_CHECK_FOR_APP_UPDATE": "false",
    # Files are left out of our documents, so their digests need not be computed.
    "SYFT_FILE_METADATA_SELECTION": "none",
}


def run_syft(layout: Path, folder: Path, run: RunProgram = run_program, program: str | None = None) -> Document:
    """Return the SPDX document that syft writes about the only image of an OCI layout. Uses no network.

    `folder` is for files that syft needs. Raises CommandError if syft is missing or fails, ResultError if it writes
    something else.
    """
    syft = program or syft_program()
    if not syft:
        raise CommandError(f"`syft` is missing, which finds the packages in an image; {INSTALL_SYFT}")
    # An empty file of settings: those in somebody's home directory would change what is found.
    settings = folder / "syft.yaml"
    settings.touch()
    arguments = ("scan", "--quiet", "--config", str(settings), f"oci-dir:{layout}", "--output", SYFT_FORMAT)
    output = run(syft, *arguments, env={**SYFT_SETTINGS, "SYFT_CACHE_DIR": str(folder / "cache")})
    try:
        document = json.loads(output)
    except ValueError as error:
        raise ResultError(f"syft wrote something that is not JSON: {error}") from None
    if not isinstance(document, Mapping) or document.get("spdxVersion") != "SPDX-2.3":
        raise ResultError(f"syft wrote something that is not SPDX 2.3; {INSTALL_SYFT}")
    return dict(document)


# What the project knows of an image


@dataclass(frozen=True)
class ComponentPart:
    """Describe a component of an image, as far as this checkout knows it."""

    name: str
    version: str
    component: Component | None = None
    """None for a component that this checkout does not have."""
    packages: tuple[str, ...] = ()
    """Names of the distribution's packages that it brings."""
    dependencies: tuple[Dependency, ...] = ()
    """What it was made from."""

    @property
    def spdx_id(self) -> str:
        """Return its id in the document."""
        return identifier("Component", self.name)

    @property
    def sources(self) -> tuple[Dependency, ...]:
        """Return what it was made from, besides packages of repositories."""
        return tuple(dependency for dependency in self.dependencies if dependency.kind != "repository")

    @property
    def repositories(self) -> tuple[Dependency, ...]:
        """Return the package repositories among its dependencies."""
        return tuple(dependency for dependency in self.dependencies if dependency.kind == "repository")

    def has(self, package: Package) -> bool:
        """Return whether it brings a package: by name, or as what was found in its own folders and nowhere else."""
        if _is_deb(package):
            return package["name"] in self.packages
        paths = str(package.get("sourceInfo", "")).rpartition(": ")[2].split(", ")
        folders = []
        for path in (*self.component.libraries, *self.component.license_files) if self.component else ():
            if path.startswith(OWN_ROOTS):  # of /opt/ucx/lib, /opt/ucx
                depth = 3 if path.startswith("/usr/local/") else 2
                folders.append("/".join(path.split("/")[: depth + 1]) + "/")
        return bool(folders) and all(path.startswith(tuple(folders)) for path in paths)

    def is_called(self, name: str) -> bool:
        """Return whether a scanner of its files may give it this name."""
        provided = self.component.provides if self.component else ()
        names = {known.lower() for known in (self.name, *provided, *(d.name for d in self.dependencies))}
        return name.lower().removeprefix("lib") in names


def image_parts(image: PlatformImage, plan: Plan, renderer: Renderer | None) -> tuple[tuple[ComponentPart, ...], str]:
    """Return the components that an image's labels name, and why their sources are unknown; empty if they are known.

    They are known only if this checkout has the target with the same versions and pins: then the image's label has the
    same hash of the lock.
    """
    recipe, reason = _recipe_of(image, plan, renderer)
    platform: Platform = "linux/arm64" if image.architecture == "arm64" else "linux/amd64"
    dependencies = resolved_dependencies(recipe, recipe.project.lock, platform) if recipe else ()
    known = renderer.project.components if renderer else {}
    parts = tuple(
        ComponentPart(
            name, version, known[name].model if name in known else None,
            packages=tuple(package.partition("=")[0] for package in recipe.packages(name)) if recipe else (),
            dependencies=tuple(d for d in dependencies if d.owner == name and d.kind != "image"),
        )
        for name, version in components_of(image.labels).items()
    )  # fmt: skip
    return parts, reason


def _recipe_of(image: PlatformImage, plan: Plan, renderer: Renderer | None) -> tuple[Recipe | None, str]:
    """Return the recipe that an image was built by, or None and the reason why this checkout does not have it."""
    versions = components_of(image.labels)
    if not versions:
        return None, "the image has no labels of imagebuild: only what package managers know is listed"
    if renderer is None:
        return None, "made without the project: licences and sources of its components are not listed"
    name = image.labels.get("imagebuild.target", "")
    target = next((t for t in plan.targets if t.id == name and image.platform in t.platforms), None)
    unknown = "what its components were made from is not listed"
    if target is None:
        return None, f"this checkout has no target {name} for {image.platform}: {unknown}"
    recipe = renderer.recipe(target)
    try:
        locked = hash_of_lock(recipe, renderer.project.lock)
    except ConfigError as error:
        return None, f"{error}: {unknown}"
    if image.labels.get("imagebuild.lock") != locked or versions != target.components:
        return None, f"the lock of this checkout is not the one that {name} was built with: {unknown}"
    return recipe, ""


# The document


def complete_document(syft: Document, image: PlatformImage, parts: Sequence[ComponentPart], reason: str) -> Document:
    """Return the document of an image, made from the one that syft wrote, in a fixed order.

    Its namespace depends on nothing but its content.
    """
    # Files are left out: the image's package database has them, and they are ten times as long as all else.
    files = {item["SPDXID"] for item in syft.get("files", ())}
    relations = [r for r in syft["relationships"] if not files & {r["spdxElementId"], r["relatedSpdxElement"]}]
    (root,) = (r["relatedSpdxElement"] for r in relations if r["relationshipType"] == "DESCRIBES")
    listed = [
        {key: value for key, value in package.items() if key != "packageVerificationCode"} | {"filesAnalyzed": False}
        for package in syft["packages"]
        if package["SPDXID"] != root
    ]
    packages = {IMAGE: _image_package(image)}
    if base := _base_package(image):
        packages[BASE] = base
        relations.append(relationship(IMAGE, "DESCENDANT_OF", BASE))
    for part in parts:
        packages[part.spdx_id] = _component_package(part)
        relations.append(relationship(IMAGE, "CONTAINS", part.spdx_id))
    ids = {root: IMAGE, **_duplicates(listed, parts, packages)}
    for package in (package for package in listed if package["SPDXID"] not in ids):
        packages[package["SPDXID"]] = package
        for part in parts:
            if part.has(package):
                relations.append(relationship(part.spdx_id, "CONTAINS", package["SPDXID"]))
                if part.repositories and _is_deb(package):
                    package["downloadLocation"] = part.repositories[0].address

    licenses = {item["licenseId"]: item for item in (*syft.get("hasExtractedLicensingInfos", ()), *_licenses(parts))}
    tools = sorted(creator for creator in syft["creationInfo"]["creators"] if creator.startswith("Tool: "))
    document: Document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": f"{_name(image)} {image.platform}",
        "creationInfo": {"created": creation_time(image), "creators": [f"Tool: imagebuild-{__version__}", *tools]},
        "packages": [packages[key] for key in sorted(packages)],
        "relationships": _renamed(relations, ids),
        "hasExtractedLicensingInfos": [licenses[key] for key in sorted(licenses)],
        **({"comment": reason} if reason else {}),
    }
    digest = hashlib.sha256(encode_predicate(document)).hexdigest()[:16]
    return {**document, "documentNamespace": f"{NAMESPACE}{image.digest}:{digest}"}


def _name(image: PlatformImage) -> str:
    """Return the id of an image's target; without one, its title."""
    return image.labels.get("imagebuild.target") or image.labels.get("org.opencontainers.image.title") or "image"


def _image_package(image: PlatformImage) -> Package:
    digest = image.digest
    title = image.labels.get("org.opencontainers.image.title") or "image"
    return spdx_package(
        IMAGE, _name(image), digest, url=package_url("oci", title.lower(), digest, arch=image.architecture),
        sha256=digest.removeprefix("sha256:"), purpose="CONTAINER",
        summary=image.labels.get("org.opencontainers.image.description", ""),
    )  # fmt: skip


def _base_package(image: PlatformImage) -> Package | None:
    """Return the base image that the labels name, or a bootstrapped one in its place; None without labels."""
    name = image.labels.get("org.opencontainers.image.base.name", "")
    digest = image.labels.get("org.opencontainers.image.base.digest", "")
    history = str((image.config.get("history") or [{}])[0].get("created_by", ""))
    if BOOTSTRAPPED in history:
        return spdx_package(
            BASE, f"{name or 'base'} (bootstrapped)", purpose="OPERATING-SYSTEM",
            comment=f"{history}; in place of {name}",
        )  # fmt: skip
    if digest.startswith("sha256:"):
        return spdx_package(
            BASE, name, digest, url=image_purl(name, digest), sha256=digest.removeprefix("sha256:"),
            purpose="CONTAINER", comment="As the label org.opencontainers.image.base.digest says.",
        )  # fmt: skip
    comment = "As the label org.opencontainers.image.base.name says; provenance has its digest."
    return spdx_package(BASE, name, purpose="CONTAINER", comment=comment) if name else None


def _component_package(part: ComponentPart) -> Package:
    component = part.component
    signed = "; ".join(f"packages of {r.address}, signed by {r.annotations['fingerprint']}" for r in part.repositories)
    # A component with one source has the URL of that source: scanners know it by that name.
    url, download = package_url("generic", part.name, part.version), ""
    if len(part.sources) == 1:
        (source,) = part.sources
        url, download = source.uri if source.uri.startswith("pkg:") else url, source.address
    return spdx_package(
        part.spdx_id, part.name, part.version,
        # A component without sources only brings packages of a repository, which have URLs of their own.
        url=url if part.sources else "",
        download=download,
        license_=component.license if component else "",
        homepage=component.homepage if component else "",
        summary=f"{component.title}: {component.description}" if component else "",
        comment=signed or ("" if component else "This checkout has no such component."),
    )  # fmt: skip


def _duplicates(found: Iterable[Package], parts: Sequence[ComponentPart], own: Mapping[str, Package]) -> dict[str, str]:
    """Return id of a package that syft found → id of our package for the same thing."""

    def identity(package: Package) -> str:
        """Return type, name and version of the package URL, without qualifiers and without percent-encoding."""
        return unquote(purl_of(package.get("externalRefs", ())).partition("?")[0].partition("#")[0])

    by_identity = {identity(p): spdx_id for spdx_id, p in own.items() if identity(p)}
    ids = {}
    for package in found:
        if identity(package) in by_identity:
            ids[package["SPDXID"]] = by_identity[identity(package)]
        elif not _is_deb(package):
            for part in parts:
                if part.has(package) and part.is_called(str(package["name"])):
                    ids[package["SPDXID"]] = part.spdx_id
    return ids


def _is_deb(package: Package) -> bool:
    return purl_of(package.get("externalRefs", ())).startswith("pkg:deb/")


def _licenses(parts: Sequence[ComponentPart]) -> Iterator[dict[str, str]]:
    """Yield an entry for each licence of a component that is not in the list of SPDX."""
    for component in filter(None, (part.component for part in parts)):
        files = ", ".join(component.license_files)
        text = f"The text is in the image: {files}" if files else f"The text is at {component.homepage}"
        for reference in LICENSE_REF.findall(component.license):
            yield {"licenseId": reference, "name": reference, "extractedText": text}


def _renamed(relationships: Iterable[Mapping[str, Any]], ids: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rename elements in relationships and sort these; leave out duplicates, and those of an element with itself."""
    result: dict[tuple[str, ...], dict[str, Any]] = {}
    for relation in relationships:
        a, b = (ids.get(relation[key], relation[key]) for key in ("spdxElementId", "relatedSpdxElement"))
        if a != b:
            kind = str(relation["relationshipType"])
            result[a, kind, b] = {**relation, **relationship(a, kind, b)}
    return [result[key] for key in sorted(result)]


# SPDX


def identifier(*words: str) -> str:
    """Return an SPDX id, always the same for the same words."""
    return "SPDXRef-" + "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)


def spdx_package(
    spdx_id: str, name: str, version: str = "", *, url: str = "", download: str = "", sha256: str = "",
    license_: str = "", homepage: str = "", purpose: str = "", summary: str = "", comment: str = "",
) -> Package:  # fmt: skip
    """Return a package; `url` is its package URL. What is empty is left out, or NOASSERTION where SPDX needs it."""
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}
    values: Package = {
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
        "externalRefs": [reference] if url else [],
        "primaryPackagePurpose": purpose,
    }
    return {key: value for key, value in values.items() if value not in ("", [])}


def relationship(subject: str, kind: str, related: str) -> dict[str, str]:
    """Return a relationship between two ids, as in `image CONTAINS package`."""
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": related}


def purl_of(references: Iterable[Mapping[str, str]]) -> str:
    """Return the package URL among the references of a package; empty if there is none."""
    return next((r["referenceLocator"] for r in references if r.get("referenceType") == "purl"), "")


class SpdxPackage(BaseModel):
    """Hold what is read of a package."""

    SPDXID: str
    checksums: tuple[dict[str, str], ...] = ()
    externalRefs: tuple[dict[str, str], ...] = ()  # noqa: N815 - a name of SPDX


class SpdxDocument(BaseModel):
    """Hold what is read of an SPDX document, also of one that another tool wrote."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    spdxVersion: Annotated[str, Form(r"SPDX-2\..*", "a version of SPDX 2")]  # noqa: N815 - names of SPDX
    packages: tuple[SpdxPackage, ...]
    relationships: tuple[dict[str, Any], ...] = ()
    documentDescribes: frozenset[str] = frozenset()  # noqa: N815

    @cached_property
    def described(self) -> frozenset[str]:
        """Return the ids of what the document is about."""
        subject = (DOCUMENT, "DESCRIBES")
        related = [r for r in self.relationships if (r.get("spdxElementId"), r.get("relationshipType")) == subject]
        return self.documentDescribes | {str(relation.get("relatedSpdxElement")) for relation in related}

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of the images that it describes."""
        sums = (sum_ for package in self.packages if package.SPDXID in self.described for sum_ in package.checksums)
        return frozenset(f"sha256:{s.get('checksumValue')}" for s in sums if s.get("algorithm") == "SHA256")

    @property
    def contents(self) -> tuple[SpdxPackage, ...]:
        """Return what the described image consists of."""
        return tuple(package for package in self.packages if package.SPDXID not in self.described)

    @property
    def debian_packages(self) -> tuple[debian.Package, ...]:
        """Return the packages of dpkg that it lists."""
        packages = []
        for url in (purl_of(package.externalRefs) for package in self.contents):
            if url.startswith("pkg:deb/"):
                read = PackageURL.from_string(url)
                qualifiers = dict(read.qualifiers)
                source, _, version = qualifiers.get("upstream", "").partition("@")
                source = f"{source} ({version})" if version else source
                packages.append(debian.Package(read.name, read.version or "", qualifiers.get("arch", ""), source))
        return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))
