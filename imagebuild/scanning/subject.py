"""What is scanned: an image or an SBOM, and how each scanner gets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from imagebuild import files
from imagebuild.checks import axes_of
from imagebuild.errors import ConfigError, ResultError
from imagebuild.inspection.lookup import DISTRIBUTION, dpkg_status
from imagebuild.locating.located import Located
from imagebuild.models import Plan, combination_id
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
    read: Callable[[], System]
    """Reads the layers, which takes seconds, and which not every scanner needs."""
    image: Located | None = None
    sbom: Path | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Axes, name and architecture of the image, for conditions of waivers."""

    @cached_property
    def system(self) -> System:
        """Raises ResultError if a layer cannot be read."""
        return self.read()


def of_image(image: Located) -> Subject:
    """An image. Raises ConfigError if it has no manifest."""
    if image.digest is None:
        raise ConfigError(f"{image.name}: an archive without manifest: there is no digest that the result could name")
    axes = axes_of(image.labels)
    known = {**axes, "arch": image.architecture}
    if target := image.labels.get("imagebuild.target"):
        known["image"] = target.removesuffix(combination_id("", axes))
    return Subject(image.name, image.digest, image.platform, lambda: _system(image), image=image, facts=known)


def _system(image: Located) -> System:
    found = image.files(DISTRIBUTION)
    told = found.get("usr/lib/os-release") or found.get("etc/os-release") or b""
    names = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', told.decode("utf-8", "replace")))
    return System(names.get("ID"), names.get("VERSION_CODENAME"), dpkg_status(found))


def of_sbom_file(path: Path, plan: Plan | None = None) -> Subject:
    """What an SBOM in SPDX describes; `plan` has the axes of targets.

    Raises ConfigError if it does not say of which image it is, ResultError if it is no SBOM.
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
    if target := next((t for t in plan.targets if t.id == about.name), None) if plan else None:
        known |= {**target.axes, "image": target.image}
    return Subject(about.name, about.digest, about.platform or "unknown", lambda: system, sbom=path, facts=known)
