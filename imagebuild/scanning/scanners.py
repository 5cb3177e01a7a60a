"""The scanners that can be used: how each is started, what it can see, and how it is had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.records import Severity
from imagebuild.scanning import parsers
from imagebuild.scanning.parsers import Parser


@dataclass(frozen=True)
class Job:
    """What is scanned, and with what."""

    folder: Path
    """Where files for the scanner lie: `settings.yaml` and `ignore`, both empty."""
    layout: Path | None = None
    """OCI layout of one platform."""
    sbom: Path | None = None
    status: Path | None = None
    """List of packages in dpkg's form."""
    suite: str = ""
    """Code name of the distribution's release."""
    database: Path | None = None
    """Where the scanner's database lies, in the form that it wants."""
    offline: bool = False


@dataclass(frozen=True)
class Scanner:
    """A program that finds known vulnerabilities."""

    name: str
    wants: str
    """What it reads: `image`, which is a layout or an SBOM, or `dpkg`."""
    scan: Callable[[Job], tuple[str, ...]]
    about: Callable[[Job], tuple[str, ...] | None]
    """What prints its version, where the scan does not."""
    environment: Callable[[Job], Mapping[str, str]]
    parse: Parser
    worst: Severity
    """The end of its scale."""
    install: str
    limits: str = ""
    """What it cannot see."""


def _grype(job: Job) -> tuple[str, ...]:
    what = f"sbom:{job.sbom}" if job.sbom else f"oci-dir:{job.layout}"
    # Its own settings could leave findings out.
    return ("grype", "--config", str(job.folder / "settings.yaml"), "--output", "json", what)


def _grype_environment(job: Job) -> dict[str, str]:
    values = {"GRYPE_CHECK_FOR_APP_UPDATE": "false", "GRYPE_DB_VALIDATE_AGE": "false"}  # our policy judges the age
    if job.offline:
        values["GRYPE_DB_AUTO_UPDATE"] = "false"
    return values | ({"GRYPE_DB_CACHE_DIR": str(job.database)} if job.database else {})


def _trivy(job: Job) -> tuple[str, ...]:
    settings = ("--config", str(job.folder / "settings.yaml"), "--ignorefile", str(job.folder / "ignore"))
    what = ("sbom", str(job.sbom)) if job.sbom else ("image", "--input", str(job.layout), "--scanners", "vuln")
    network = ("--offline-scan", "--skip-db-update", "--skip-java-db-update") if job.offline else ()
    return ("trivy", *what, "--quiet", "--format", "json", *settings, *network, *_trivy_cache(job))


def _trivy_cache(job: Job) -> tuple[str, ...]:
    return ("--cache-dir", str(job.database)) if job.database else ()


def _debsecan(job: Job) -> tuple[str, ...]:
    source = ("--source", f"{job.database.as_uri()}/") if job.database else ()
    # This machine's settings and its list of exceptions are not about the image.
    settings = ("--config", str(job.folder / "settings.yaml"), "--whitelist", "")
    return (
        "debsecan", *settings, "--suite", job.suite, "--status", str(job.status), "--format", "detail", *source,
    )  # fmt: skip


SCANNERS = (
    Scanner(
        "grype", "image", _grype, lambda _: None, _grype_environment, parsers.grype, "critical",
        "install grype from https://github.com/anchore/grype/releases",
    ),
    Scanner(
        "trivy", "image", _trivy, lambda job: ("trivy", "version", "--format", "json", *_trivy_cache(job)),
        lambda _: {}, parsers.trivy, "critical",
        "install trivy from https://github.com/aquasecurity/trivy/releases",
    ),
    Scanner(
        "debsecan", "dpkg", _debsecan, lambda _: ("dpkg-query", "--show", "--showformat", "${Version}", "debsecan"),
        lambda _: {}, parsers.debsecan, "high",
        "install debsecan, for images of Debian: apt-get install debsecan",
        "debsecan knows packages of Debian only; wheels, CUDA, HPC-X and what was compiled were not looked at",
    ),
)  # fmt: skip
"""In the order in which `auto` takes the first that is installed and can read the image."""

BY_NAME = {scanner.name: scanner for scanner in SCANNERS}
