"""Make the SBOM of an image: what syft finds, completed by what the project knows. SPDX 2.3 as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagebuild import __version__
from imagebuild.core import fields, run
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Platform
from imagebuild.core.run import INSTALL_SYFT, syft_program
from imagebuild.oci.image import PlatformImage
from imagebuild.project.component import Component
from imagebuild.project.matrix import Plan
from imagebuild.publish.provenance import Dependency, resolved_dependencies
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer, hash_of_lock
from imagebuild.verify import checks

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
    digest = hashlib.sha256(encode_document(content)).hexdigest()[:16]
    return {**content, "documentNamespace": f"{NAMESPACE}{image['versionInfo']}:{digest}"}


def encode_document(document: Mapping[str, Any]) -> bytes:
    """The same document gives the same bytes."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def extracted(license_: str, text: str) -> list[dict[str, str]]:
    """What a document has to say of licences that SPDX does not list."""
    return [{"licenseId": ref, "name": ref, "extractedText": text} for ref in LICENSE_REF.findall(license_)]


def same(one: str, other: str) -> bool:
    """Do two package URLs name the same thing?"""
    return fields.purl_identity(one) == fields.purl_identity(other)


def _purl(url: str) -> dict[str, str]:
    return {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}


def _order(relation: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(relation[k]) for k in ("spdxElementId", "relationshipType", "relatedSpdxElement"))


FORMAT = "spdx-json@2.3"
SETTINGS = {
    "SYFT_CHECK_FOR_APP_UPDATE": "false",
    # Files are left out of our documents, so their digests need not be computed.
    "SYFT_FILE_METADATA_SELECTION": "none",
}

Read = Callable[..., bytes]


def run_syft(layout: Path, folder: Path, read: Read = run.run_for_bytes, found: str | None = None) -> dict[str, Any]:
    """The SPDX document that syft writes about the only image of an OCI layout; no network is used.

    `folder` is for files that syft needs. Raises CommandError if it is missing or fails, ResultError if what it writes
    is no document.
    """
    syft = found or syft_program()
    if not syft:
        raise CommandError(f"`syft` is missing, which finds the packages in an image; {INSTALL_SYFT}")
    # Settings that someone has in a home directory would change what is found.
    settings = folder / "syft.yaml"
    settings.touch()
    arguments = ("scan", "--quiet", "--config", str(settings), f"oci-dir:{layout}", "--output", FORMAT)
    output = read(syft, *arguments, env={**SETTINGS, "SYFT_CACHE_DIR": str(folder / "cache")})
    return _document(output)


def _document(output: bytes) -> dict[str, Any]:
    try:
        document = json.loads(output)
    except ValueError as error:
        raise ResultError(f"syft wrote what is not JSON: {error}") from None
    if not isinstance(document, Mapping) or document.get("spdxVersion") != "SPDX-2.3":
        raise ResultError("syft wrote what is no SPDX 2.3; another version of it is needed")
    return dict(document)


OWN_ROOTS = ("/opt/", "/usr/local/")
"""Folders below which what is two levels deep belongs to one component."""


@dataclass(frozen=True)
class ComponentPart:
    """A component of an image."""

    name: str
    version: str
    about: Component | None = None
    """None for a component that this checkout does not have."""
    packages: tuple[str, ...] = ()
    """Names of the distribution's packages that it brings."""
    materials: tuple[Dependency, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        """Where its files are, and nobody else's."""
        paths = (*self.about.libraries, *self.about.license_files) if self.about else ()
        return tuple(dict.fromkeys(_root(path) for path in paths if path.startswith(OWN_ROOTS)))

    @property
    def names(self) -> frozenset[str]:
        """What a tool may call it that finds its files."""
        provided = self.about.provides if self.about else ()
        return frozenset(n.lower() for n in (self.name, *provided, *(m.name for m in self.materials)))


@dataclass(frozen=True)
class ImageParts:
    """What the project knows of an image."""

    parts: tuple[ComponentPart, ...]
    base: Dependency | None = None
    """What it starts from, by this checkout's lock."""
    reason: str = ""
    """Why sources are unknown, if they are."""


def image_parts(labels: Mapping[str, str], platform: Platform, plan: Plan, renderer: Renderer | None) -> ImageParts:
    """The components that an image's labels name.

    What they were made from is told only if this checkout has the target with the same versions and pins: then the
    image's label says the same hash of the lock.
    """
    components = checks.components_of(labels)
    if not components:
        return ImageParts((), reason="the image has no labels of imagebuild: only what package managers know is listed")
    if renderer is None:
        parts = tuple(ComponentPart(name, version) for name, version in components.items())
        return ImageParts(
            parts, reason="made without the project: licences and sources of its components are not listed"
        )
    recipe, reason = _recipe(labels, platform, plan, renderer)
    found = resolved_dependencies(recipe, renderer.project.lock, platform) if recipe else ()
    parts = tuple(
        ComponentPart(
            name,
            version,
            about := _component_part(renderer, name),
            _bare(recipe.packages(name)) if recipe else _named(about),
            tuple(m for m in found if m.owner == name and m.kind != "image"),
        )
        for name, version in components.items()
    )
    return ImageParts(parts, next((m for m in found if m.kind == "image"), None), reason)


def _recipe(labels: Mapping[str, str], platform: Platform, plan: Plan, renderer: Renderer) -> tuple[Recipe | None, str]:
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
    if labels.get("imagebuild.lock") != locked or checks.components_of(labels) != target.components:
        return None, f"the lock of this checkout is not the one that {name} was built with: {unknown}"
    return recipe, ""


def _component_part(renderer: Renderer, name: str) -> Component | None:
    document = renderer.project.components.get(name)
    return document.model if document else None


def _named(about: Component | None) -> tuple[str, ...]:
    packages = (*about.packages.runtime, *about.packages.devel) if about else ()
    return tuple(p for p in _bare(packages) if "{" not in p)


def _bare(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(p.partition("=")[0] for p in packages)


def _root(path: str) -> str:
    """`/opt/ucx` of `/opt/ucx/lib/ucx`; `/usr/local/cuda` of `/usr/local/cuda/lib`."""
    depth = 3 if path.startswith("/usr/local/") else 2
    return "/".join(path.split("/")[: depth + 1])


PURPOSE = {"archive": "ARCHIVE", "git": "SOURCE", "wheel": "ARCHIVE", "folder": "SOURCE"}
BASE = "SPDXRef-Base"
BOOTSTRAPPED = "bootstrapped with"
"""What the history of a base says that was made from the distribution's archive."""


@dataclass(frozen=True)
class SbomSubject:
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


def complete(found: Document, about: SbomSubject, known: ImageParts) -> Document:
    """The document of an image, from the one that syft wrote. Raises KeyError for what syft does not write."""
    document = without_files(found)
    root = next(
        r["relatedSpdxElement"]
        for r in document["relationships"]
        if r["relationshipType"] == "DESCRIBES" and r["spdxElementId"] == DOCUMENT
    )
    listed = [p for p in document["packages"] if p["SPDXID"] != root]
    own = _own(known)
    ids = {root: IMAGE, **_doubles(listed, known, own)}
    kept = [p for p in listed if p["SPDXID"] not in ids]
    base = list(_base(about, known))
    packages = [_image(about), *base, *own.values(), *(_from_repository(p, known) for p in kept)]
    relations = [
        *document["relationships"],
        *(relationship(IMAGE, "DESCENDANT_OF", b["SPDXID"]) for b in base),
        *(r for part in known.parts for r in _relations(part, kept)),
    ]
    licenses = [e for part in known.parts for e in _licenses(part)]
    result = {
        "packages": packages,
        "relationships": renamed(relations, ids),
        "hasExtractedLicensingInfos": [*document.get("hasExtractedLicensingInfos", ()), *licenses],
        "comment": known.reason,
    }
    return finished(result, f"{about.name} {about.platform}", about.created, _tools(found))


def _image(about: SbomSubject) -> Package:
    arch = about.platform.removeprefix("linux/")
    last = about.labels.get("org.opencontainers.image.title") or "image"
    return package(
        IMAGE, about.name, about.digest, url=fields.purl("oci", last.lower(), about.digest, {"arch": arch}),
        sha256=about.digest.removeprefix("sha256:"), purpose="CONTAINER",
        summary=about.labels.get("org.opencontainers.image.description", ""),
    )  # fmt: skip


def _base(about: SbomSubject, known: ImageParts) -> Iterator[Package]:
    """The image it starts from: what its labels say, unless it was made from the distribution's archive instead."""
    name = about.labels.get("org.opencontainers.image.base.name", "")
    digest = about.labels.get("org.opencontainers.image.base.digest", "")
    if BOOTSTRAPPED in about.history:
        yield package(
            BASE, f"{name or 'base'} (bootstrapped)", purpose="OPERATING-SYSTEM",
            comment=f"{about.history}; in place of {name}@{digest}",
        )  # fmt: skip
    elif digest.startswith("sha256:"):
        hexadecimal, url = digest.removeprefix("sha256:"), fields.image_purl(name, digest)
        if known.base and known.base.digest.get("sha256") == hexadecimal:
            url = known.base.uri
        yield package(
            BASE, name, digest, url=url, sha256=hexadecimal, purpose="CONTAINER",
            comment="As the label org.opencontainers.image.base.digest says.",
        )  # fmt: skip


def _own(known: ImageParts) -> dict[str, Package]:
    """SPDX id → package, of every component and of what it was made from."""
    found = {_id(part): _component(part) for part in known.parts}
    for part in known.parts:
        for material in part.materials:
            if material.kind in PURPOSE:
                found.setdefault(_source_id(material), _source(part, material))
    return found


def _component(part: ComponentPart) -> Package:
    about = part.about
    repositories = [m for m in part.materials if m.kind == "repository"]
    own = [m for m in part.materials if m.kind in PURPOSE]
    signed = "; ".join(f"packages of {m.address}, signed by {m.annotations['fingerprint']}" for m in repositories)
    unknown = "" if about else "This checkout has no such component."
    return package(
        _id(part), part.name, part.version,
        # What only brings packages is a group: its packages have names of their own.
        url=fields.purl("generic", part.name, part.version) if own else "",
        license_=about.license if about else "", homepage=about.homepage if about else "",
        summary=f"{about.title}: {about.description}" if about else "", comment=signed or unknown,
    )  # fmt: skip


def _source(part: ComponentPart, material: Dependency) -> Package:
    license_ = part.about.license if part.about else ""
    note = "; ".join(f"{key} {value}" for key, value in material.annotations.items())
    return package(
        _source_id(material), material.name, material.version or part.version,
        url=material.uri if material.uri.startswith("pkg:") else "", download=material.address,
        sha256=material.digest.get("sha256", ""), license_=license_, purpose=PURPOSE[material.kind], comment=note,
    )  # fmt: skip


def _relations(part: ComponentPart, packages: Sequence[Package]) -> Iterator[dict[str, str]]:
    yield relationship(IMAGE, "CONTAINS", _id(part))
    for material in part.materials:
        if material.kind in PURPOSE:
            yield relationship(_id(part), "GENERATED_FROM", _source_id(material))
    for package in packages:
        brought = _is_deb(package) and package["name"] in part.packages
        if brought or (not _is_deb(package) and _inside(package, part)):
            yield relationship(_id(part), "CONTAINS", package["SPDXID"])


def _doubles(listed: Sequence[Package], known: ImageParts, own: Mapping[str, Package]) -> dict[str, str]:
    """Package that syft found → ours that is the same thing."""
    named = {fields.purl_identity(url): spdx_id for spdx_id, p in own.items() if (url := purl_of(p))}
    result = {}
    for package in listed:
        if (url := purl_of(package)) and fields.purl_identity(url) in named:
            result[package["SPDXID"]] = named[fields.purl_identity(url)]
        elif not _is_deb(package):
            for part in known.parts:
                if _inside(package, part) and str(package["name"]).lower().removeprefix("lib") in part.names:
                    result[package["SPDXID"]] = _id(part)
    return result


def _inside(package: Package, part: ComponentPart) -> bool:
    """Was it found in files of the component, and nowhere else?"""
    paths = str(package.get("sourceInfo", "")).rpartition(": ")[2].split(", ")
    return bool(part.folders) and all(any(p.startswith(f"{f}/") for f in part.folders) for p in paths)


def _is_deb(package: Package) -> bool:
    return (purl_of(package) or "").startswith("pkg:deb/")


def _from_repository(package: Package, known: ImageParts) -> Package:
    """A package of a signed repository says which."""
    for part in known.parts:
        repositories = [m for m in part.materials if m.kind == "repository"]
        if repositories and _is_deb(package) and package["name"] in part.packages:
            return {**package, "downloadLocation": repositories[0].address}
    return package


def _licenses(part: ComponentPart) -> list[dict[str, str]]:
    if part.about is None:
        return []
    files = ", ".join(part.about.license_files)
    where = f"The text is in the image: {files}" if files else f"The text is at {part.about.homepage}"
    return extracted(part.about.license, where)


def _tools(found: Mapping[str, Any]) -> list[str]:
    creators = found["creationInfo"]["creators"]
    return [c.removeprefix("Tool: ") for c in creators if c.startswith("Tool: ")]


def _id(part: ComponentPart) -> str:
    return identifier("Component", part.name)


def _source_id(material: Dependency) -> str:
    pin = material.digest.get("sha256") or material.digest.get("gitCommit") or ""
    return identifier("Source", material.name, *([pin[:16]] if pin else []))


EPOCH = "SOURCE_DATE_EPOCH"


def make_sbom(
    image: PlatformImage, plan: Plan, renderer: Renderer | None, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The SPDX document of an image, the same for the same image and lock.

    Raises ConfigError for an image without manifest, CommandError if syft is missing or fails, ResultError if it wrote
    something else.
    """
    subject = about(image, os.environ if environ is None else environ)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        folder = Path(name)
        found = run_syft(image.as_layout(folder / "layout"), folder)
    known = image_parts(subject.labels, subject.platform, plan, renderer)
    try:
        return complete(found, subject, known)
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ResultError(f"syft wrote a document that cannot be read: {type(error).__name__}: {error}") from None


def about(image: PlatformImage, environ: Mapping[str, str]) -> SbomSubject:
    """What an image says about itself. Raises ConfigError for one without a manifest, whose digest nothing can name."""
    if not image.digest:
        raise ConfigError(f"{image.name}: an archive without manifest has no digest; push the image, or save it as OCI")
    history = image.config.get("history") or [{}]
    platform: Platform = "linux/arm64" if image.architecture == "arm64" else "linux/amd64"
    if image.platform != platform:
        raise ConfigError(f"{image.name}: is for {image.platform}; images are for linux/amd64 and linux/arm64")
    return SbomSubject(
        image.digest, platform, _created(image, environ), image.labels, str(history[0].get("created_by", ""))
    )  # fmt: skip


def _created(image: PlatformImage, environ: Mapping[str, str]) -> str:
    """SOURCE_DATE_EPOCH, or when the image was made: either is the same next time."""
    try:
        if given := environ.get(EPOCH):
            time = datetime.fromtimestamp(int(given), UTC)
        else:
            time = datetime.fromisoformat(str(image.config.get("created") or "1970-01-01T00:00:00+00:00"))
    except (ValueError, OverflowError) as error:
        what = f"{EPOCH}={environ[EPOCH]}" if environ.get(EPOCH) else f"{image.name}: its creation time"
        raise ConfigError(f"{what}: is no time: {error}") from None
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
