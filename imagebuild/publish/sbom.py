"""Make the SBOM of an image: what syft finds, completed by what the project knows. SPDX 2.3 as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packageurl import PackageURL

from imagebuild import __version__
from imagebuild.core import debian
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Platform
from imagebuild.core.run import INSTALL_SYFT, RunProgram, run_program, syft_program
from imagebuild.oci.attestation import encode_predicate
from imagebuild.oci.image import PlatformImage
from imagebuild.project.component import Component
from imagebuild.project.matrix import Plan
from imagebuild.publish.provenance import Dependency, image_purl, package_url, resolved_dependencies
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer, hash_of_lock
from imagebuild.verify.checks import components_of

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
PURPOSE = {"archive": "ARCHIVE", "git": "SOURCE", "wheel": "ARCHIVE", "folder": "SOURCE"}
"""Kind of a dependency → SPDX's purpose of the package that stands for it."""
BOOTSTRAPPED = "bootstrapped with"
"""Words in the history of a base image that was made from the distribution's archive."""
OWN_ROOTS = ("/opt/", "/usr/local/")
"""Folders in which a component has a folder of its own."""
EPOCH = "SOURCE_DATE_EPOCH"


@dataclass(frozen=True)
class SbomSubject:
    """Describe the image that a document is about, by what the image says itself."""

    digest: str
    """Digest of the manifest of its platform."""
    platform: Platform
    created: str
    """Time in the notation of SPDX."""
    labels: Mapping[str, str] = field(default_factory=dict)
    history: str = ""
    """Command in the first entry of its history."""

    @property
    def name(self) -> str:
        """Return the id of its target; without one, its title."""
        return self.labels.get("imagebuild.target") or self.labels.get("org.opencontainers.image.title") or "image"


def make_sbom(
    image: PlatformImage, plan: Plan, renderer: Renderer | None, environ: Mapping[str, str] | None = None
) -> Document:
    """Return the SPDX document of an image: always the same for the same image and lock.

    Raises ConfigError for an image without a manifest, CommandError if syft is missing or fails, and ResultError if
    syft writes something else than a document.
    """
    subject = sbom_subject(image, os.environ if environ is None else environ)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        folder = Path(name)
        document = run_syft(image.as_layout(folder / "layout"), folder)
    parts = image_parts(subject.labels, subject.platform, plan, renderer)
    try:
        return complete_document(document, subject, parts)
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ResultError(f"syft wrote a document that cannot be read: {type(error).__name__}: {error}") from None


def sbom_subject(image: PlatformImage, environ: Mapping[str, str]) -> SbomSubject:
    """Return what an image says about itself; the time is SOURCE_DATE_EPOCH or, without it, that of the image.

    Raises ConfigError for an image of another platform, or with a time that is none.
    """
    platform: Platform = "linux/arm64" if image.architecture == "arm64" else "linux/amd64"
    if image.platform != platform:
        raise ConfigError(f"{image.name}: is for {image.platform}; images are for linux/amd64 and linux/arm64")
    epoch = environ.get(EPOCH)
    try:
        if epoch:
            time = datetime.fromtimestamp(int(epoch), UTC)
        else:
            time = datetime.fromisoformat(str(image.config.get("created") or "1970-01-01T00:00:00+00:00"))
    except (ValueError, OverflowError) as error:
        source = f"{EPOCH}={epoch}" if epoch else f"{image.name}: its creation time"
        raise ConfigError(f"{source}: not a time: {error}") from None
    created = time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    history = image.config.get("history") or [{}]
    return SbomSubject(image.digest, platform, created, image.labels, str(history[0].get("created_by", "")))


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
    def folders(self) -> tuple[str, ...]:
        """Return the folders that hold only its files: `/opt/ucx`, `/usr/local/cuda`."""
        if not self.component:
            return ()
        folders = []
        for path in (*self.component.libraries, *self.component.license_files):
            if path.startswith(OWN_ROOTS):
                depth = 3 if path.startswith("/usr/local/") else 2
                folders.append("/".join(path.split("/")[: depth + 1]))
        return tuple(dict.fromkeys(folders))

    @property
    def names(self) -> frozenset[str]:
        """Return the names that a scanner of its files may give it, in lower case."""
        provided = self.component.provides if self.component else ()
        return frozenset(n.lower() for n in (self.name, *provided, *(d.name for d in self.dependencies)))

    @property
    def spdx_id(self) -> str:
        """Return its id in the document."""
        return identifier("Component", self.name)

    @property
    def sources(self) -> tuple[Dependency, ...]:
        """Return the dependencies that are packages of the document: all but repositories and images."""
        return tuple(dependency for dependency in self.dependencies if dependency.kind in PURPOSE)

    @property
    def repositories(self) -> tuple[Dependency, ...]:
        """Return the package repositories among its dependencies."""
        return tuple(dependency for dependency in self.dependencies if dependency.kind == "repository")


@dataclass(frozen=True)
class ImageParts:
    """Hold what the project knows of an image."""

    parts: tuple[ComponentPart, ...]
    base: Dependency | None = None
    """The base image, by this checkout's lock."""
    reason: str = ""
    """Why sources are unknown; empty if they are known."""


def image_parts(labels: Mapping[str, str], platform: Platform, plan: Plan, renderer: Renderer | None) -> ImageParts:
    """Return the components that an image's labels name.

    Their sources are known only if this checkout has the target with the same versions and pins: then the image's
    label has the same hash of the lock.
    """
    versions = components_of(labels)
    if not versions:
        return ImageParts((), reason="the image has no labels of imagebuild: only what package managers know is listed")
    if renderer is None:
        return ImageParts(
            tuple(ComponentPart(name, version) for name, version in versions.items()),
            reason="made without the project: licences and sources of its components are not listed",
        )
    recipe, reason = _recipe_of(labels, platform, plan, renderer)
    dependencies = resolved_dependencies(recipe, renderer.project.lock, platform) if recipe else ()
    parts = []
    for name, version in versions.items():
        document = renderer.project.components.get(name)
        component = document.model if document else None
        if recipe:
            packages = recipe.packages(name)
        else:  # names that depend on axes are unknown then
            listed = (*component.packages.runtime, *component.packages.devel) if component else ()
            packages = tuple(package for package in listed if "{" not in package.partition("=")[0])
        parts.append(
            ComponentPart(
                name, version, component,
                packages=tuple(package.partition("=")[0] for package in packages),
                dependencies=tuple(d for d in dependencies if d.owner == name and d.kind != "image"),
            )
        )  # fmt: skip
    return ImageParts(tuple(parts), next((d for d in dependencies if d.kind == "image"), None), reason)


def _recipe_of(
    labels: Mapping[str, str], platform: Platform, plan: Plan, renderer: Renderer
) -> tuple[Recipe | None, str]:
    """Return the recipe that an image was built by, or None and the reason why this checkout does not have it."""
    name = labels.get("imagebuild.target", "")
    target = next((t for t in plan.targets if t.id == name), None)
    unknown = "what its components were made from is not listed"
    if target is None:
        return None, f"this checkout has no target {name}: {unknown}"
    if platform not in target.platforms:
        return None, f"{name} is not for {platform}: {unknown}"
    recipe = renderer.recipe(target)
    try:
        locked = hash_of_lock(recipe, renderer.project.lock)
    except ConfigError as error:
        return None, f"{error}: {unknown}"
    if labels.get("imagebuild.lock") != locked or components_of(labels) != target.components:
        return None, f"the lock of this checkout is not the one that {name} was built with: {unknown}"
    return recipe, ""


# The document


def complete_document(syft: Document, subject: SbomSubject, known: ImageParts) -> Document:
    """Return the document of an image, made from the one that syft wrote.

    Raises KeyError, TypeError or StopIteration if syft's document lacks what it always has.
    """
    document = _without_files(syft)
    root = next(
        relation["relatedSpdxElement"]
        for relation in document["relationships"]
        if relation["relationshipType"] == "DESCRIBES" and relation["spdxElementId"] == DOCUMENT
    )
    found = [package for package in document["packages"] if package["SPDXID"] != root]
    own = _own_packages(known)
    ids = {root: IMAGE, **_duplicates(found, known, own)}
    kept = [package for package in found if package["SPDXID"] not in ids]
    base = list(_base_package(subject, known))
    relations = [
        *document["relationships"],
        *(relationship(IMAGE, "DESCENDANT_OF", package["SPDXID"]) for package in base),
        *(relation for part in known.parts for relation in _relationships(part, kept)),
    ]
    completed = {
        "packages": [
            _image_package(subject), *base, *own.values(), *(_with_repository(package, known) for package in kept)
        ],
        "relationships": _replace_ids(relations, ids),
        "hasExtractedLicensingInfos": [*document.get("hasExtractedLicensingInfos", ()), *_licenses(known)],
        "comment": known.reason,
    }  # fmt: skip
    creators = [creator for creator in syft["creationInfo"]["creators"] if creator.startswith("Tool: ")]
    tools = [creator.removeprefix("Tool: ") for creator in creators]
    return finish_document(completed, f"{subject.name} {subject.platform}", subject.created, tools)


def _without_files(document: Document) -> Document:
    """Leave out files: the image's package database has them, and they are ten times as long as all else."""
    files = {item["SPDXID"] for item in document.get("files", ())}
    kept = [r for r in document["relationships"] if not files & {r["spdxElementId"], r["relatedSpdxElement"]}]
    packages = [
        {k: v for k, v in p.items() if k != "packageVerificationCode"} | {"filesAnalyzed": False}
        for p in document["packages"]
    ]
    return {k: v for k, v in document.items() if k != "files"} | {"packages": packages, "relationships": kept}


def _image_package(subject: SbomSubject) -> Package:
    arch = subject.platform.removeprefix("linux/")
    title = subject.labels.get("org.opencontainers.image.title") or "image"
    return package(
        IMAGE, subject.name, subject.digest, url=package_url("oci", title.lower(), subject.digest, arch=arch),
        sha256=subject.digest.removeprefix("sha256:"), purpose="CONTAINER",
        summary=subject.labels.get("org.opencontainers.image.description", ""),
    )  # fmt: skip


def _base_package(subject: SbomSubject, known: ImageParts) -> Iterator[Package]:
    """Yield the base image that the labels name, or a bootstrapped one in its place; nothing without labels."""
    name = subject.labels.get("org.opencontainers.image.base.name", "")
    digest = subject.labels.get("org.opencontainers.image.base.digest", "")
    if BOOTSTRAPPED in subject.history:
        yield package(
            BASE, f"{name or 'base'} (bootstrapped)", purpose="OPERATING-SYSTEM",
            comment=f"{subject.history}; in place of {name}@{digest}",
        )  # fmt: skip
    elif digest.startswith("sha256:"):
        sha256, url = digest.removeprefix("sha256:"), image_purl(name, digest)
        if known.base and known.base.digest.get("sha256") == sha256:
            url = known.base.uri
        yield package(
            BASE, name, digest, url=url, sha256=sha256, purpose="CONTAINER",
            comment="As the label org.opencontainers.image.base.digest says.",
        )  # fmt: skip


def _own_packages(known: ImageParts) -> dict[str, Package]:
    """Return SPDX id → package, for every component and what it was made from."""
    packages = {part.spdx_id: _component_package(part) for part in known.parts}
    for part in known.parts:
        for source in part.sources:
            packages.setdefault(_source_id(source), _source_package(part, source))
    return packages


def _component_package(part: ComponentPart) -> Package:
    component = part.component
    signed = "; ".join(f"packages of {r.address}, signed by {r.annotations['fingerprint']}" for r in part.repositories)
    return package(
        part.spdx_id, part.name, part.version,
        # A component without sources only brings packages of a repository, which have URLs of their own.
        url=package_url("generic", part.name, part.version) if part.sources else "",
        license_=component.license if component else "",
        homepage=component.homepage if component else "",
        summary=f"{component.title}: {component.description}" if component else "",
        comment=signed or ("" if component else "This checkout has no such component."),
    )  # fmt: skip


def _source_package(part: ComponentPart, source: Dependency) -> Package:
    return package(
        _source_id(source), source.name, source.version or part.version,
        url=source.uri if source.uri.startswith("pkg:") else "", download=source.address,
        sha256=source.digest.get("sha256", ""), license_=part.component.license if part.component else "",
        purpose=PURPOSE[source.kind], comment="; ".join(f"{key} {value}" for key, value in source.annotations.items()),
    )  # fmt: skip


def _source_id(source: Dependency) -> str:
    pin = source.digest.get("sha256") or source.digest.get("gitCommit") or ""
    return identifier("Source", source.name, *([pin[:16]] if pin else []))


def _relationships(part: ComponentPart, packages: Sequence[Package]) -> Iterator[dict[str, str]]:
    yield relationship(IMAGE, "CONTAINS", part.spdx_id)
    for source in part.sources:
        yield relationship(part.spdx_id, "GENERATED_FROM", _source_id(source))
    for package in packages:
        belongs = package["name"] in part.packages if _is_deb(package) else _is_inside(package, part)
        if belongs:
            yield relationship(part.spdx_id, "CONTAINS", package["SPDXID"])


def _duplicates(found: Sequence[Package], known: ImageParts, own: Mapping[str, Package]) -> dict[str, str]:
    """Return id of a package that syft found → id of our package for the same thing."""
    by_identity = {_identity(url): spdx_id for spdx_id, p in own.items() if (url := purl_of(p))}
    ids = {}
    for package in found:
        if (url := purl_of(package)) and _identity(url) in by_identity:
            ids[package["SPDXID"]] = by_identity[_identity(url)]
        elif not _is_deb(package):
            for part in known.parts:
                if _is_inside(package, part) and str(package["name"]).lower().removeprefix("lib") in part.names:
                    ids[package["SPDXID"]] = part.spdx_id
    return ids


def _identity(url: str) -> str:
    """Return type, name and version of a package URL, without qualifiers and without percent-encoding."""
    return unquote(url.partition("?")[0].partition("#")[0])


def _is_inside(package: Package, part: ComponentPart) -> bool:
    """Return whether a package was found in files of the component and nowhere else."""
    paths = str(package.get("sourceInfo", "")).rpartition(": ")[2].split(", ")
    return bool(part.folders) and all(any(p.startswith(f"{f}/") for f in part.folders) for p in paths)


def _is_deb(package: Package) -> bool:
    return (purl_of(package) or "").startswith("pkg:deb/")


def _with_repository(package: Package, known: ImageParts) -> Package:
    """Name the signed repository that a package came from."""
    for part in known.parts:
        if part.repositories and _is_deb(package) and package["name"] in part.packages:
            return {**package, "downloadLocation": part.repositories[0].address}
    return package


def _licenses(known: ImageParts) -> Iterator[dict[str, str]]:
    """Yield an entry for each licence of a component that is not in the list of SPDX."""
    for part in known.parts:
        if part.component:
            files = ", ".join(part.component.license_files)
            text = f"The text is in the image: {files}" if files else f"The text is at {part.component.homepage}"
            for reference in LICENSE_REF.findall(part.component.license):
                yield {"licenseId": reference, "name": reference, "extractedText": text}


def _replace_ids(relationships: Iterable[Mapping[str, Any]], ids: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rename elements in relationships; leave out duplicates, and relationships of an element with itself."""
    result: dict[tuple[str, ...], dict[str, Any]] = {}
    for relation in relationships:
        a, b = (ids.get(relation[key], relation[key]) for key in ("spdxElementId", "relatedSpdxElement"))
        if a != b:
            result[a, str(relation["relationshipType"]), b] = {
                **relation, "spdxElementId": a, "relatedSpdxElement": b
            }  # fmt: skip
    return list(result.values())


# SPDX


def identifier(*words: str) -> str:
    """Return an SPDX id, always the same for the same words."""
    return "SPDXRef-" + "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words)


def package(
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


def finish_document(document: Document, name: str, created: str, tools: Iterable[str]) -> Document:
    """Return a document in a fixed order, with a namespace that depends on nothing but its content."""
    licenses = {item["licenseId"]: item for item in document.get("hasExtractedLicensingInfos", ())}

    def order(relation: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(relation[key]) for key in ("spdxElementId", "relationshipType", "relatedSpdxElement"))

    content: Document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": name,
        "creationInfo": {
            "created": created,
            "creators": [f"Tool: imagebuild-{__version__}", *(f"Tool: {tool}" for tool in sorted(tools))],
        },
        "packages": sorted(document["packages"], key=lambda package: str(package["SPDXID"])),
        "relationships": sorted(document["relationships"], key=order),
        "hasExtractedLicensingInfos": [licenses[key] for key in sorted(licenses)],
    }
    if comment := document.get("comment"):
        content["comment"] = comment
    image = next(package for package in content["packages"] if package["SPDXID"] == IMAGE)
    digest = hashlib.sha256(encode_predicate(content)).hexdigest()[:16]
    return {**content, "documentNamespace": f"{NAMESPACE}{image['versionInfo']}:{digest}"}


# Reading a document, also one of another tool. These functions raise LookupError, TypeError or AttributeError for
# what is no SPDX as JSON.


def purl_of(package: Package) -> str | None:
    """Return the package URL of a package."""
    references = package.get("externalRefs") or ()
    return next((str(r["referenceLocator"]) for r in references if r.get("referenceType") == "purl"), None)


def image_digests(document: Mapping[str, Any]) -> frozenset[str]:
    """Return the digests of the images that a document describes."""
    described = _described(document)
    return frozenset(
        f"sha256:{checksum['checksumValue']}"
        for package in document["packages"]
        if package["SPDXID"] in described
        for checksum in package.get("checksums", ())
        if checksum["algorithm"] == "SHA256"
    )


def listed_packages(document: Mapping[str, Any]) -> tuple[Package, ...]:
    """Return what the described image consists of."""
    described = _described(document)
    return tuple(package for package in document["packages"] if package.get("SPDXID") not in described)


def debian_packages(document: Mapping[str, Any]) -> tuple[debian.Package, ...]:
    """Return the packages of dpkg that a document lists."""
    packages = []
    for url in filter(None, map(purl_of, listed_packages(document))):
        if url.startswith("pkg:deb/"):
            read = PackageURL.from_string(url)
            qualifiers = dict(read.qualifiers)
            source, _, version = qualifiers.get("upstream", "").partition("@")
            source = f"{source} ({version})" if version else source
            packages.append(debian.Package(read.name, read.version or "", qualifiers.get("arch", ""), source))
    return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))


def _described(document: Mapping[str, Any]) -> set[str]:
    if "spdxVersion" not in document:
        raise LookupError("is no SPDX document: it has no spdxVersion")
    related = document.get("relationships") or ()
    return set(document.get("documentDescribes") or ()) | {
        relation["relatedSpdxElement"]
        for relation in related
        if relation["relationshipType"] == "DESCRIBES" and relation["spdxElementId"] == DOCUMENT
    }
