"""The SBOM of an image, as SPDX 2.3 JSON: packages, as dpkg or syft lists them, and the components of the project."""

import hashlib
import json
import re
import tempfile
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from packageurl import PackageURL
from pydantic import BaseModel, ConfigDict

from imagebuild import __version__
from imagebuild.core import debian
from imagebuild.core.errors import CommandError, ResultError
from imagebuild.core.fields import Form
from imagebuild.core.run import INSTALL_SYFT, RunProgram, run_program, syft_program
from imagebuild.oci.attestation import encode_predicate
from imagebuild.oci.image import PlatformImage
from imagebuild.oci.layout import KEPT_SIZE
from imagebuild.project.component import Component
from imagebuild.project.plan import components_of
from imagebuild.verify.files import Tree
from imagebuild.verify.layers import read_layers

Document = dict[str, Any]
"""An SPDX document, as decoded JSON."""

DOCUMENT = "SPDXRef-DOCUMENT"
IMAGE = "SPDXRef-Image"
NAMESPACE = "urn:imagebuild:sbom:"
UNKNOWN = "NOASSERTION"
DPKG, OS_RELEASE = "var/lib/dpkg/status", "usr/lib/os-release"
"""Files in an image: dpkg's database of packages, and the name of the distribution."""
LICENSE_REF = re.compile(r"LicenseRef-[A-Za-z0-9.-]+")


def make_sbom(image: PlatformImage, components: Mapping[str, Component]) -> Document:
    """Run syft on an image, and return the SPDX document of the image.

    Equal images and components give equal documents. Raises CommandError if syft is missing or fails, and ResultError
    if the output of syft is not JSON or the creation time of the image cannot be read."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        document = run_syft(image.as_layout(Path(name, "layout")).folder, Path(name))
    status = files_of_distribution(image)[DPKG]
    removed = debian.package_names(status) - {package.name for package in debian.installed_packages(status)}
    return complete_document(without_packages(document, removed), image, components)


def without_packages(document: Document, names: Collection[str]) -> Document:
    """Return an SPDX document without these packages. syft also lists those of which only the configuration is left."""
    ids = {package["SPDXID"] for package in document["packages"] if package["name"] in names}
    kept = [r for r in document["relationships"] if ids.isdisjoint((r["spdxElementId"], r["relatedSpdxElement"]))]
    packages = [package for package in document["packages"] if package["SPDXID"] not in ids]
    return {**document, "packages": packages, "relationships": kept}


def known_sbom(image: PlatformImage, components: Mapping[str, Component]) -> bytes:
    """Return the SPDX document of an image, without syft: the packages in dpkg's database, and the components.

    The packages are those that syft finds; only syft reads their licences. Raises ResultError if a layer or the
    database cannot be read."""
    files = files_of_distribution(image)
    system = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)', files[OS_RELEASE], re.MULTILINE))
    distribution = system.get("ID", "linux")
    root: dict[str, Any] = {"SPDXID": "SPDXRef-root", "downloadLocation": UNKNOWN, "licenseDeclared": UNKNOWN}
    packages, ids = [root], set[str]()
    for package in debian.installed_packages(files[DPKG]):
        name, _, version = package.source.partition(" ")
        upstream = "@".join(filter(None, (name, version.strip("()"))))
        qualifiers = {"arch": package.architecture, "upstream": upstream}
        qualifiers["distro"] = f"{distribution}-{system['VERSION_ID']}" if "VERSION_ID" in system else ""
        id_ = "SPDXRef-Package-deb-" + re.sub(r"[^A-Za-z0-9.]+", "-", f"{package.name}-{package.architecture}")
        while id_ in ids:  # memtest86 and memtest86+
            id_ += f"-{len(ids)}"
        ids.add(id_)
        urls = _purl("deb", package.name, package.version, distribution, **qualifiers)
        packages.append(_package(id_, package.name, package.version, urls))
    relations = [_relation("SPDXRef-root", "CONTAINS", package["SPDXID"]) for package in packages[1:]]
    relations.insert(0, _relation(DOCUMENT, "DESCRIBES", "SPDXRef-root"))
    document = {"packages": packages, "relationships": relations, "creationInfo": {"creators": []}}
    return encode_predicate(complete_document(document, image, components))


def files_of_distribution(image: PlatformImage) -> dict[str, str]:
    """Map DPKG and OS_RELEASE to the content of the file in an image; empty if the image lacks the file.

    Only layers that no earlier command has read are read. Raises CommandError if a layer cannot be fetched, ResultError
    if a layer cannot be read, or if a file is too large, not regular, or in a folder that is a link."""
    tree, texts = Tree(read_layers(image)[0]), {}
    for path in (DPKG, OS_RELEASE):
        trail = tree.trail(path)
        if wrong := [entry.path for entry in trail if entry.kind not in ("file", "folder")]:
            problem = f"/{wrong[0]} is not a regular file or folder, so /{path} is not read"
            raise ResultError(f"{image.name}: {problem}; copy the file to its place")
        entry = tree.get(path)
        if entry and entry.sha256 and entry.text is None:
            raise ResultError(f"{image.name}: /{path} is larger than {KEPT_SIZE >> 20} MiB, or not a text")
        texts[path] = ((entry and entry.text) or b"").decode(errors="replace")
    return texts


def run_syft(layout: Path, folder: Path, run: RunProgram = run_program, program: str | None = None) -> Document:
    """Run syft on the only image in an OCI layout, and return the SPDX document that syft writes.

    syft uses no network. `folder` is for temporary files of syft. `program` is the path of syft. Default: the path that
    `syft_program` finds. Raises CommandError if syft is missing or fails, ResultError if the output of syft is not
    JSON."""
    syft = program or syft_program()
    if not syft:
        raise CommandError(f"`syft` is missing; it finds the packages in an image; {INSTALL_SYFT}")
    # Use an empty settings file, because settings in the user's home directory would change the findings.
    settings = folder / "syft.yaml"
    settings.touch()
    variables = {
        "SYFT_CHECK_FOR_APP_UPDATE": "false", "SYFT_CACHE_DIR": str(folder / "cache"),
        # The SPDX documents of imagebuild do not list files, so syft does not have to compute digests of files.
        "SYFT_FILE_METADATA_SELECTION": "none",
    }  # fmt: skip
    arguments = ("--quiet", "--config", str(settings), f"oci-dir:{layout}", "--output", "spdx-json@2.3")
    output = run(syft, "scan", *arguments, env=variables)
    try:
        document: Document = json.loads(output)
    except ValueError as error:
        raise ResultError(f"the output of syft is not JSON: {error}") from None
    return document


def complete_document(syft: Document, image: PlatformImage, components: Mapping[str, Component]) -> Document:
    """Return the SPDX document of an image: the document that syft wrote, plus the components in the image.

    The order of the entries is fixed. Each component in the labels of the image becomes a package. `components`
    provides the licences and homepages of the components. The namespace of the document depends only on the content.
    Raises ResultError if the creation time of the image cannot be read."""
    try:
        created = datetime.fromisoformat(str(image.config.get("created") or "1970-01-01T00:00:00Z")).astimezone(UTC)
    except ValueError as error:
        raise ResultError(f"{image.name}: the creation time of the image cannot be read: {error}") from None
    title = image.labels.get("org.opencontainers.image.title") or "image"
    target = image.labels.get("imagebuild.target") or title
    own = {
        "SPDXID": IMAGE, "name": target, "versionInfo": image.digest,
        "checksums": [{"algorithm": "SHA256", "checksumValue": image.digest.removeprefix("sha256:")}],
        "externalRefs": _purl("oci", title.lower(), image.digest, arch=image.architecture),
    }  # fmt: skip
    # Files are left out, because the image's package database lists the files. With files, the document would be ten
    # times larger.
    files = {item["SPDXID"] for item in syft.get("files", ())}
    (root,) = (r["relatedSpdxElement"] for r in syft["relationships"] if r["relationshipType"] == "DESCRIBES")
    packages = [{**p, "filesAnalyzed": False, **(own if p["SPDXID"] == root else {})} for p in syft["packages"]]
    for package in packages:
        package.pop("packageVerificationCode", None)
    relations = [
        {key: IMAGE if value == root else value for key, value in relation.items()}
        for relation in syft["relationships"]
        if files.isdisjoint((relation["spdxElementId"], relation["relatedSpdxElement"]))
    ]
    licenses = {item["licenseId"]: item for item in syft.get("hasExtractedLicensingInfos", ())}
    for name, version in components_of(image.labels).items():
        component = components.get(name)
        known = {"homepage": component.homepage, "summary": component.title} if component else {}
        known |= {"licenseDeclared": component.license} if component else {}
        id_ = "SPDXRef-Component-" + re.sub(r"[^A-Za-z0-9.]+", "-", name)
        packages.append(_package(id_, name, version, _purl("generic", name, version), **known))
        relations.append(_relation(IMAGE, "CONTAINS", id_))
        licenses |= _licenses(component) if component else {}
    tools = sorted(creator for creator in syft["creationInfo"]["creators"] if creator.startswith("Tool: "))
    creators = [f"Tool: imagebuild-{__version__}", *tools]
    document: Document = {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": DOCUMENT, "name": f"{target} {image.platform}",
        "creationInfo": {"created": f"{created:%Y-%m-%dT%H:%M:%SZ}", "creators": creators},
        "packages": sorted(packages, key=lambda package: package["SPDXID"]),
        "relationships": sorted(relations, key=encode_predicate),
        "hasExtractedLicensingInfos": [licenses[key] for key in sorted(licenses)],
    }  # fmt: skip
    digest = hashlib.sha256(encode_predicate(document)).hexdigest()[:16]
    return {**document, "documentNamespace": f"{NAMESPACE}{image.digest}:{digest}"}


def _package(id_: str, name: str, version: str, urls: list[dict[str, str]], **more: str) -> dict[str, Any]:
    unknown = ("supplier", "downloadLocation", "licenseConcluded", "licenseDeclared", "copyrightText")
    own = {"SPDXID": id_, "name": name, "versionInfo": version, "externalRefs": urls, "filesAnalyzed": False}
    return {**own, **dict.fromkeys(unknown, UNKNOWN), **more}


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def _purl(kind: str, name: str, version: str, namespace: str | None = None, **qualifiers: str) -> list[dict[str, str]]:
    try:
        url = PackageURL(kind, namespace, name, version, qualifiers).to_string()
    except (TypeError, ValueError) as error:
        raise ResultError(f"the image names a package {name!r}, which has no package URL: {error}") from None
    return [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}]


def _licenses(component: Component) -> dict[str, dict[str, str]]:
    """Return an SPDX entry for each licence of a component, but only for licences with an id `LicenseRef-…`.
    The SPDX licence list does not contain these licences."""
    files = ", ".join(component.license_files)
    text = f"The text is {f'in the image: {files}' if files else f'at {component.homepage}'}"
    found = LICENSE_REF.findall(component.license)
    return {name: {"licenseId": name, "name": name, "extractedText": text} for name in found}


class SpdxPackage(BaseModel):
    """The part of an SPDX package that imagebuild reads."""

    SPDXID: str
    checksums: tuple[dict[str, str], ...] = ()
    externalRefs: tuple[dict[str, str], ...] = ()  # noqa: N815 - a name of SPDX


class SpdxDocument(BaseModel):
    """The part of an SPDX document that imagebuild reads. The document may come from another tool."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    spdxVersion: Annotated[str, Form(r"SPDX-2\..*", "a version of SPDX 2")]  # noqa: N815 - names of SPDX
    packages: tuple[SpdxPackage, ...]
    relationships: tuple[dict[str, Any], ...] = ()
    documentDescribes: frozenset[str] = frozenset()  # noqa: N815

    @cached_property
    def described(self) -> frozenset[str]:
        """The ids of the elements, such as the image, that the document describes."""
        subject = (DOCUMENT, "DESCRIBES")
        related = [r for r in self.relationships if (r.get("spdxElementId"), r.get("relationshipType")) == subject]
        return self.documentDescribes | {str(relation.get("relatedSpdxElement")) for relation in related}

    @property
    def digests(self) -> frozenset[str]:
        """The SHA-256 digests of the images that the document describes."""
        sums = (sum_ for package in self.packages if package.SPDXID in self.described for sum_ in package.checksums)
        return frozenset(f"sha256:{s.get('checksumValue')}" for s in sums if s.get("algorithm") == "SHA256")

    @property
    def contents(self) -> tuple[SpdxPackage, ...]:
        """The packages in the image that the document describes."""
        return tuple(package for package in self.packages if package.SPDXID not in self.described)

    @property
    def debian_packages(self) -> tuple[debian.Package, ...]:
        """The dpkg packages in the image that the document describes. Raises ResultError if a package URL is broken."""
        packages = []
        urls = (str(ref.get("referenceLocator")) for package in self.contents for ref in package.externalRefs)
        for text in (url for url in urls if url.startswith("pkg:deb/")):
            try:
                url = PackageURL.from_string(text)
            except ValueError as error:
                raise ResultError(f"the SBOM names the package {text!r}, which is not a package URL: {error}") from None
            qualifiers = dict(url.qualifiers)
            source, _, version = qualifiers.get("upstream", "").partition("@")
            source = f"{source} ({version})" if version else source
            packages.append(debian.Package(url.name, url.version or "", qualifiers.get("arch", ""), source))
        return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))
