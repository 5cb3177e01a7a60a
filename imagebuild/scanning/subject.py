"""What is scanned: an image or an SBOM, and how each scanner gets it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild import files
from imagebuild.checks import axes_of
from imagebuild.errors import ConfigError, ResultError
from imagebuild.inspection.lookup import DISTRIBUTION, dpkg_status
from imagebuild.locating.located import Located
from imagebuild.packages import of_sbom, status_of
from imagebuild.scanning import sbom


@dataclass(frozen=True)
class System:
    """The distribution in an image."""

    id: str | None
    """`debian`, `ubuntu`, …; None if it does not say."""
    suite: str | None
    """Code name of the release."""
    status: str | None
    """What is installed, in dpkg's form; None without dpkg."""


@dataclass(frozen=True)
class Subject:
    """What is scanned."""

    name: str
    digest: str
    platform: str
    system: System
    image: Located | None = None
    sbom: Path | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Axes, name and architecture of the image, for conditions of waivers."""


def of_image(image: Located) -> Subject:
    """An image. Raises ConfigError if it has no manifest, ResultError if it cannot be read."""
    if image.digest is None:
        raise ConfigError(f"{image.name}: an archive without manifest: there is no digest that the result could name")
    found = image.files(DISTRIBUTION)
    told = found.get("usr/lib/os-release") or found.get("etc/os-release") or b""
    names = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', told.decode("utf-8", "replace")))
    system = System(names.get("ID"), names.get("VERSION_CODENAME"), dpkg_status(found))
    target = image.labels.get("imagebuild.target", "")
    known = {**axes_of(image.labels), "arch": image.architecture}
    if target:
        known["image"] = target.partition("-")[0]
    return Subject(image.name, image.digest, image.platform, system, image=image, facts=known)


def of_sbom_file(path: Path) -> Subject:
    """What an SBOM in SPDX describes. Raises ConfigError if it does not say of which image it is, ResultError if it is
    no SBOM.
    """
    try:
        document = json.loads(files.read_text(path))
        about, packages = sbom.about(document), of_sbom(document)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ResultError(f"{path}: is no SBOM in SPDX's JSON: {error}") from None
    if about.digest is None:
        raise ConfigError(f"{path}: names no digest of an image; make the SBOM with `imagebuild sbom`")
    system = System(about.distribution, about.suite, status_of(packages) if packages else None)
    known = {"arch": about.platform.split("/")[1]} if about.platform else {}
    return Subject(about.name, about.digest, about.platform or "unknown", system, sbom=path, facts=known)
