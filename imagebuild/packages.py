"""Packages of the distribution in an image: from dpkg's list, or from an SBOM in SPDX. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Package:
    """An installed package."""

    name: str
    version: str
    architecture: str = ""
    source: str = ""
    """Source package; with its version in brackets where that differs, as dpkg writes it."""


def installed(status: str) -> tuple[Package, ...]:
    """What dpkg's list says is installed."""
    found = []
    for paragraph in re.split(r"\n{2,}", status):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        # Images without dpkg have no status in their files.
        if "Package" in fields and fields.get("Status", "ok installed").endswith(" installed"):
            found.append(
                Package(
                    fields["Package"],
                    fields.get("Version", ""),
                    fields.get("Architecture", ""),
                    fields.get("Source", ""),
                )
            )
    return tuple(found)


def of_sbom(document: Mapping[str, Any]) -> tuple[Package, ...]:
    """The packages of dpkg that an SPDX document lists. Raises ValueError if it is no SPDX document."""
    if "spdxVersion" not in document:
        raise ValueError("is no SPDX document: it has no spdxVersion")
    return tuple(sorted(_of_purls(document), key=lambda package: (package.name, package.architecture)))


def _of_purls(document: Mapping[str, Any]) -> Iterator[Package]:
    for item in document.get("packages") or ():
        for reference in item.get("externalRefs") or ():
            locator = str(reference.get("referenceLocator", ""))
            if reference.get("referenceType") == "purl" and locator.startswith("pkg:deb/"):
                yield _of_purl(locator)
                break


def _of_purl(locator: str) -> Package:
    """Of `pkg:deb/debian/libc6@2.41-12?arch=amd64&upstream=glibc`."""
    place, _, qualifiers = locator.partition("#")[0].partition("?")
    name, _, version = place.rpartition("/")[2].partition("@")
    # Not by `parse_qs`, for which a plus is a space; versions have some.
    known = {key: unquote(value) for key, _, value in (part.partition("=") for part in qualifiers.split("&"))}
    source, _, source_version = known.get("upstream", "").partition("@")
    return Package(
        unquote(name),
        unquote(version),
        known.get("arch", ""),
        f"{source} ({source_version})" if source_version else source,
    )


def status_of(packages: Iterable[Package]) -> str:
    """A list as dpkg's, with what scanners read of it."""
    return "\n".join(
        f"Package: {package.name}\nStatus: install ok installed\nArchitecture: {package.architecture}\n"
        + (f"Source: {package.source}\n" if package.source else "")
        + f"Version: {package.version}\n"
        for package in packages
    )


def versions(packages: Iterable[Package], architecture: str) -> dict[str, str]:
    """Name → version; of another architecture than the image's, `name:architecture`."""
    own = {"", "all", architecture}
    return {p.name if p.architecture in own else f"{p.name}:{p.architecture}": p.version for p in packages}
