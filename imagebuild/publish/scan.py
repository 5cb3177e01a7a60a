"""Scan an image or an SBOM for known vulnerabilities, and judge them by `scan-policy.yaml`."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import unquote

from pydantic import Field
from rich.markup import escape

from imagebuild.core import console, files
from imagebuild.core.console import out
from imagebuild.core.debian import dpkg_status_text, packages_of_sbom, version_key
from imagebuild.core.errors import CommandError, ConfigError, Mistakes, ResultError, suggestion
from imagebuild.core.fields import Condition, Model, axis_facts, matches
from imagebuild.core.run import RunProgram, run_program, which
from imagebuild.core.yaml import YamlFile, load_yaml
from imagebuild.oci.image import DISTRIBUTION, PlatformImage, dpkg_status
from imagebuild.project.matrix import Plan, combination_id
from imagebuild.project.records import ScanResult, Severity, Vulnerability
from imagebuild.verify.checks import axes_of

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities from the least to the worst; `unknown` comes first."""
AUTO = "auto"


@dataclass(frozen=True)
class ScanRequest:
    """Say how to scan."""

    scanner: str = AUTO
    database: Path | None = None
    offline: bool = False


@dataclass(frozen=True)
class ScanHost:
    """Reach the programs and the clock of this machine."""

    run: RunProgram = run_program
    which: Callable[[str], str | None] = which
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


def scan_image(
    subject: ScanSubject, policy: YamlFile[Policy], request: ScanRequest, host: ScanHost | None = None
) -> ScanResult:
    """Scan an image or an SBOM, and judge the findings by a policy.

    Raises CommandError if the scanner is missing or fails, ConfigError if it cannot read the image or its database
    does not exist, and ResultError if its output cannot be read.
    """
    host = host or ScanHost()
    scanner = choose_scanner(request.scanner, subject, host)
    if scanner.reads == "dpkg" and request.offline and request.database is None:
        raise ConfigError(f"--offline: {scanner.name} keeps no database on this machine; give one with --database")
    started = host.now()
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        given, database, built = _prepare_input(scanner, subject, request, Path(folder), started)
        environment = scanner.environment(given)
        output = host.run(*scanner.command(given), env=environment, timeout=scanner.timeout_s)
        version_command = scanner.version_command(given)
        version = host.run(*version_command, env=environment, timeout=60) if version_command else ""
        parsed = scanner.parse(output, version)
    built = parsed.built or built
    verdict = judge_vulnerabilities(
        parsed.findings, policy, subject.facts, worst=scanner.worst, database=built, now=started
    )

    notes = [*parsed.notes, *([scanner.limits] if scanner.limits else []), *verdict.notes]
    if not policy.path.exists():
        notes.append(f"{policy.path}: does not exist, so {policy.model.fail.severity} fails and nothing is waived")
    if parsed.distribution is None:
        notes.append(f"{scanner.name} recognised no distribution, so it did not scan the packages of one")
    age = f"of {_format_time(built)}" if built else "of unknown age"
    return ScanResult(
        image=subject.name,
        digest=subject.digest,
        platform=subject.platform,
        scanner=f"{scanner.name} {parsed.version}".strip(),
        database=", ".join(filter(None, (parsed.database or database, age))),
        started=_format_time(started),
        findings=verdict.findings,
        verdict="failed" if verdict.reason else "passed",
        reason=verdict.reason,
        notes=tuple(notes),
    )


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds")


# What is scanned


@dataclass(frozen=True)
class System:
    """Describe the distribution in an image."""

    id: str | None
    """`debian`, `ubuntu`, …; None if the image does not name it."""
    suite: str | None
    """Code name of the release."""
    status: str | None
    """Installed packages in the format of dpkg's status file; None without dpkg."""


@dataclass(frozen=True)
class ScanSubject:
    """Name an image or an SBOM to scan, and read the distribution in it when that is needed."""

    name: str
    digest: str
    platform: str
    read_system: Callable[[], System]
    """Read the layers, which takes seconds; not every scanner needs it."""
    image: PlatformImage | None = None
    sbom: Path | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Axes, name and architecture of the image, for the conditions of waivers."""

    @cached_property
    def system(self) -> System:
        """Return the distribution. Raises ResultError if a layer cannot be read."""
        return self.read_system()


def scan_subject_of_image(image: PlatformImage) -> ScanSubject:
    """Return an image as a subject. Raises ConfigError if it has no manifest."""
    if image.digest is None:
        raise ConfigError(f"{image.name}: an archive without manifest has no digest; push the image, or save it as OCI")

    def read_system() -> System:
        files = image.files(DISTRIBUTION)
        release = files.get("usr/lib/os-release") or files.get("etc/os-release") or b""
        values = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', release.decode("utf-8", "replace")))
        return System(values.get("ID"), values.get("VERSION_CODENAME"), dpkg_status(files))

    axes = axes_of(image.labels)
    facts = {**axes, "arch": image.architecture}
    if target := image.labels.get("imagebuild.target"):
        facts["image"] = target.removesuffix(combination_id("", axes))
    return ScanSubject(image.name, image.digest, image.platform, read_system, image=image, facts=facts)


def scan_subject_of_sbom(path: Path, plan: Plan | None = None) -> ScanSubject:
    """Return the image that an SPDX document describes, with its axes if it is a target of the plan.

    Raises ConfigError if the document names no image, ResultError if it is not SPDX.
    """
    try:
        document = json.loads(files.read_text(path))
        image, packages = read_sbom_image(document), packages_of_sbom(document)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ResultError(f"{path}: not an SBOM in SPDX's JSON: {error}") from None
    if image.digest is None:
        raise ConfigError(f"{path}: names no digest of an image; make the SBOM with `imagebuild sbom`")
    system = System(image.distribution, image.suite, dpkg_status_text(packages) if packages else None)
    facts = {"arch": image.platform.split("/")[1]} if image.platform else {}
    if target := next((t for t in plan.targets if t.id == image.name), None) if plan else None:
        facts |= {**target.axes, "image": target.image}
    return ScanSubject(image.name, image.digest, image.platform or "unknown", lambda: system, sbom=path, facts=facts)


DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DISTRIBUTION_PURL = re.compile(r"pkg:deb/(?P<id>[a-z]+)/.*[?&]distro=(?P<distro>[^&#]+)")
DEBIAN_SUITES = {"12": "bookworm", "13": "trixie", "14": "forky"}
"""Release of Debian → code name, which SBOMs leave out."""


@dataclass(frozen=True)
class SbomImage:
    """Describe the image that an SBOM is about."""

    name: str
    digest: str | None
    platform: str | None
    distribution: str | None
    """`debian`, `ubuntu`, …; None if no Debian package names it."""
    suite: str | None
    """Code name of the release, for a distribution whose code name is known."""


def read_sbom_image(document: Mapping[str, Any]) -> SbomImage:
    """Return the image that an SPDX document of any tool describes. Raises ValueError if the document is not SPDX."""
    if "spdxVersion" not in document:
        raise ValueError("it has no spdxVersion")
    described = set(document.get("documentDescribes") or ()) | {
        relation.get("relatedSpdxElement")
        for relation in document.get("relationships") or ()
        if relation.get("relationshipType") == "DESCRIBES"
    }
    packages = document.get("packages") or ()
    root: Mapping[str, Any] = next((package for package in packages if package.get("SPDXID") in described), {})
    purls = list(_purls(root))
    # Tools name the digest in different places; a checksum is the most certain one.
    digests = [f"sha256:{s['checksumValue']}" for s in root.get("checksums") or () if s.get("algorithm") == "SHA256"]
    texts = (root.get("versionInfo", ""), *purls, document.get("name", ""), root.get("name", ""))
    digests += [match[0] for text in texts if (match := DIGEST.search(unquote(str(text))))]
    arch = next((match[1] for purl in purls if (match := re.search(r"[?&]arch=([a-z0-9]+)", purl))), None)
    every_purl = (purl for package in packages for purl in _purls(package))
    system = next((match for purl in every_purl if (match := DISTRIBUTION_PURL.match(purl))), None)
    distro = system["distro"].rpartition("-")[2] if system else ""
    return SbomImage(
        name=str(root.get("name") or document.get("name") or ""),
        digest=digests[0] if digests else None,
        platform=f"linux/{arch}" if arch else None,
        distribution=system["id"] if system else None,
        suite=DEBIAN_SUITES.get(distro.partition(".")[0], distro or None),
    )


def _purls(package: Mapping[str, Any]) -> Iterator[str]:
    return (
        str(reference.get("referenceLocator", ""))
        for reference in package.get("externalRefs") or ()
        if reference.get("referenceType") == "purl"
    )


# What the scanner is given


@dataclass(frozen=True)
class ScanInput:
    """Name the files that a scanner reads."""

    folder: Path
    """Folder with two empty files: `settings.yaml` and `ignore`."""
    layout: Path | None = None
    """OCI layout with the image of one platform."""
    sbom: Path | None = None
    status: Path | None = None
    """Installed packages in the format of dpkg's status file."""
    suite: str = ""
    """Code name of the distribution's release."""
    database: Path | None = None
    """The scanner's database, in the scanner's own format."""
    offline: bool = False


def _prepare_input(
    scanner: Scanner, subject: ScanSubject, request: ScanRequest, folder: Path, now: datetime
) -> tuple[ScanInput, str, datetime | None]:
    """Write what the scanner reads; return it with the name and time of the database, if these are known already."""
    for name in ("settings.yaml", "ignore"):
        (folder / name).touch()
    database = request.database.resolve() if request.database else None
    if database and not database.exists():
        raise ConfigError(f"--database {request.database}: does not exist")
    given = ScanInput(folder=folder, database=database, offline=request.offline)
    if scanner.reads == "dpkg":
        status, suite = folder / "status", subject.system.suite or ""
        status.write_text(subject.system.status or "")
        given = replace(given, status=status, suite=suite)
        if database is None:
            return given, f"the tracker's data for {suite}", now
        linked, name, built = link_debsecan_database(database, suite, folder)
        return replace(given, database=linked), name, built
    if subject.sbom:
        return replace(given, sbom=subject.sbom.resolve()), "", None
    assert subject.image is not None
    return replace(given, layout=subject.image.as_layout(folder / "layout")), "", None


DEBSECAN_HEADER = b"VERSION 1\n"


def link_debsecan_database(path: Path, suite: str, folder: Path) -> tuple[Path, str, datetime]:
    """Make a folder with the database as debsecan wants it; return it with the database's name and time.

    `path` is a file, or a folder with a file for each release. The time is that of the file, as the format has none.
    Raises ConfigError if there is no file for the release, ResultError if it is not a database.
    """
    path = path / suite if path.is_dir() else path
    try:
        content, changed = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
        raise ConfigError(f"--database {problem}; give the tracker's file for {suite}, or a folder with it") from None
    try:
        text = zlib.decompress(content)
    except zlib.error as error:
        raise ResultError(f"{path}: not a database of debsecan: {error}") from None
    if not text.startswith(DEBSECAN_HEADER):
        raise ResultError(f"{path}: not a database of debsecan, or in an unknown format: {text[:20]!r}")
    linked = folder / "database"
    linked.mkdir()
    (linked / suite).symlink_to(path.resolve())
    digest = hashlib.sha256(content).hexdigest()
    built = datetime.fromtimestamp(changed, UTC).replace(microsecond=0)
    return linked, f"{path.name}, sha256:{digest[:12]}", built


# Scanners


@dataclass(frozen=True)
class Scanner:
    """Describe a program that finds known vulnerabilities."""

    name: str
    reads: Literal["image", "dpkg"]
    """`image`: a layout or an SBOM. `dpkg`: a list of installed packages."""
    command: Callable[[ScanInput], tuple[str, ...]]
    version_command: Callable[[ScanInput], tuple[str, ...] | None]
    """Command that prints the version; None if the scan prints it."""
    environment: Callable[[ScanInput], Mapping[str, str]]
    parse: Callable[[str, str], ScannerOutput]
    """Parse what the two commands printed. Raises ResultError."""
    worst: Severity
    """The worst severity that it can report."""
    install: str
    """How to install it."""
    limits: str = ""
    """What it cannot find."""
    timeout_s: int = 1800
    """Limit for a scan with the download of the database, so that it ends on a machine without a network."""


def _grype_command(given: ScanInput) -> tuple[str, ...]:
    source = f"sbom:{given.sbom}" if given.sbom else f"oci-dir:{given.layout}"
    # Empty settings, as those of the user could leave findings out.
    return ("grype", "--config", str(given.folder / "settings.yaml"), "--output", "json", source)


def _grype_environment(given: ScanInput) -> dict[str, str]:
    # The age of the database, and vulnerabilities without a fix, are judged by our policy.
    values = dict.fromkeys(
        ("GRYPE_CHECK_FOR_APP_UPDATE", "GRYPE_DB_VALIDATE_AGE", "GRYPE_ONLY_FIXED", "GRYPE_ONLY_NOTFIXED"), "false"
    )
    if given.offline:
        values["GRYPE_DB_AUTO_UPDATE"] = "false"
    if given.database:
        values["GRYPE_DB_CACHE_DIR"] = str(given.database)
    return values


def _trivy_command(given: ScanInput) -> tuple[str, ...]:
    source = ("sbom", str(given.sbom)) if given.sbom else ("image", "--input", str(given.layout), "--scanners", "vuln")
    settings = ("--config", str(given.folder / "settings.yaml"), "--ignorefile", str(given.folder / "ignore"))
    everything = ("--severity", "UNKNOWN,LOW,MEDIUM,HIGH,CRITICAL", "--ignore-unfixed=false")
    network = ("--offline-scan", "--skip-db-update", "--skip-java-db-update") if given.offline else ()
    return ("trivy", *source, "--quiet", "--format", "json", *settings, *everything, *network, *_trivy_cache(given))


def _trivy_cache(given: ScanInput) -> tuple[str, ...]:
    return ("--cache-dir", str(given.database)) if given.database else ()


def _debsecan_command(given: ScanInput) -> tuple[str, ...]:
    source = ("--source", f"{given.database.as_uri()}/") if given.database else ()
    # Empty settings and no list of exceptions: those of this machine are not about the image.
    settings = ("--config", str(given.folder / "settings.yaml"), "--whitelist", "")
    return (
        "debsecan", *settings, "--suite", given.suite, "--status", str(given.status), "--format", "detail", *source,
    )  # fmt: skip


def choose_scanner(name: str, subject: ScanSubject, host: ScanHost) -> Scanner:
    """Return the scanner with this name; for `auto`, the first that is installed and can read the image.

    Raises CommandError if none is installed, ConfigError if the name is unknown or the scanner cannot read the image.
    """
    if name == AUTO:
        able = [scanner for scanner in SCANNERS if not _unfit(scanner, subject)]
        for scanner in able:
            if host.which(scanner.name):
                return scanner
        ways = "; or ".join(scanner.install for scanner in able)
        raise CommandError(f"{subject.name}: not scanned, as no scanner that can read it is installed: {ways}")
    if name not in SCANNERS_BY_NAME:
        raise ConfigError(f"--scanner {name}: unknown scanner; use {AUTO}, {', '.join(SCANNERS_BY_NAME)}")
    scanner = SCANNERS_BY_NAME[name]
    if not host.which(scanner.name):
        raise CommandError(f"{subject.name}: not scanned, as {name} is not installed: {scanner.install}")
    if reason := _unfit(scanner, subject):
        raise ConfigError(f"--scanner {name}: {reason}; use another scanner")
    return scanner


def _unfit(scanner: Scanner, subject: ScanSubject) -> str:
    """Return why a scanner cannot scan the image; empty if it can."""
    if scanner.reads != "dpkg":
        return ""
    system = subject.system
    if system.status is None:
        return f"{scanner.name} reads dpkg's list of packages, and {subject.name} has none"
    if system.id != "debian" or not system.suite:
        return f"{scanner.name} knows Debian only, and {subject.name} is {system.id or 'of an unknown distribution'}"
    return ""


# What scanners print


@dataclass(frozen=True)
class ScannerOutput:
    """Hold what a scanner printed."""

    findings: tuple[Vulnerability, ...]
    version: str
    """Version of the scanner."""
    database: str
    """Version of its database; empty if it does not print one."""
    built: datetime | None
    """Time of its database; None if it does not print it."""
    distribution: str | None
    """Distribution that it recognised in the image."""
    notes: tuple[str, ...] = ()


def parse_grype(output: str, version: str) -> ScannerOutput:  # noqa: ARG001 - the scan prints the version, too
    """Parse the output of `grype --output json`. Raises ResultError."""
    document = _parse_json("grype", output, "matches", "descriptor")
    with _unknown_format("grype"):
        findings = []
        for match in document["matches"]:
            vulnerability, artifact = match["vulnerability"], match["artifact"]
            fix = vulnerability.get("fix") or {}
            findings.append(
                Vulnerability(
                    id=vulnerability["id"],
                    severity=_severity(vulnerability.get("severity")),
                    package=artifact["name"],
                    version=artifact.get("version", ""),
                    fixed_in=", ".join(fix.get("versions") or ()) or None if fix.get("state") == "fixed" else None,
                    link=vulnerability.get("dataSource") or None,
                )
            )
        descriptor = document["descriptor"]
        database = descriptor.get("db") or {}
        status = database.get("status") or database  # one level deeper since version 6 of the database
        ignored = len(document.get("ignoredMatches") or ())
        return ScannerOutput(
            findings=_distinct(findings),
            version=str(descriptor.get("version", "")),
            database=f"schema {status['schemaVersion']}" if status.get("schemaVersion") else "",
            built=_parse_time(status.get("built")),
            distribution=_join(document.get("distro") or {}, "name", "version"),
            notes=(f"grype left out {ignored} matches by rules of its own",) if ignored else (),
        )


def parse_trivy(output: str, version: str) -> ScannerOutput:
    """Parse the output of `trivy image --format json` and `trivy version --format json`. Raises ResultError."""
    document = _parse_json("trivy", output, "SchemaVersion", "ArtifactName")
    program = _parse_json("trivy version", version, "Version")
    with _unknown_format("trivy"):
        findings = [
            Vulnerability(
                id=item["VulnerabilityID"],
                severity=_severity(item.get("Severity")),
                package=item["PkgName"],
                version=item.get("InstalledVersion", ""),
                fixed_in=item.get("FixedVersion") or None,
                link=item.get("PrimaryURL") or None,
            )
            for result in document.get("Results") or ()
            for item in result.get("Vulnerabilities") or ()
        ]
        database = program.get("VulnerabilityDB") or {}
        return ScannerOutput(
            findings=_distinct(findings),
            version=str(program["Version"]),
            database=f"version {database['Version']}" if database else "",
            built=_parse_time(database.get("UpdatedAt")),
            distribution=_join((document.get("Metadata") or {}).get("OS") or {}, "Family", "Name"),
        )


_DEBSECAN_HEAD = re.compile(r"^(?P<id>[A-Z][\w.:-]+)(?: \((?P<notes>[^()]*)\))?$")
_DEBSECAN_INSTALLED = re.compile(r"^  installed: (?P<package>\S+) (?P<version>\S+)$", re.MULTILINE)
_DEBSECAN_FIXED = re.compile(
    r"^  fixed (?:in unstable:|on branch:  ) \S+ (?P<version>\S+) \((?P<kind>binary|source) package\)$", re.M
)
_DEBSECAN_SOURCE = re.compile(r"^ +\(built from \S+ (?P<version>\S+)\)$", re.MULTILINE)
_DEBSECAN_URGENCY = re.compile(r"\b(low|medium|high) urgency\b")
_DEBSECAN_AVAILABLE = "  fix is available for the selected suite"


def parse_debsecan(output: str, version: str) -> ScannerOutput:
    """Parse the output of `debsecan --format detail`, and the version of its package. Raises ResultError."""
    findings = []
    for paragraph in output.split("\n\n"):
        text = paragraph.strip("\n")
        if not text:
            continue
        first, _, rest = text.partition("\n")
        head, installed = _DEBSECAN_HEAD.match(first), _DEBSECAN_INSTALLED.search(rest)
        if not head or not installed:
            raise ResultError(f"debsecan: cannot be read: {first[:80]!r}")
        urgency = _DEBSECAN_URGENCY.search(head["notes"] or "")
        findings.append(
            Vulnerability(
                id=head["id"],
                severity=_severity(urgency[1] if urgency else None),
                package=installed["package"],
                version=installed["version"],
                fixed_in=_debsecan_fix(rest, installed["version"]) if _DEBSECAN_AVAILABLE in rest else None,
            )
        )
    return ScannerOutput(_distinct(findings), version.strip(), "", None, "debian")


def _debsecan_fix(text: str, installed: str) -> str:
    """Return the least version without the vulnerability that is newer than the installed one.

    debsecan lists the fixed versions of all suites, some of the source package, some of the binary package.
    """
    source = _DEBSECAN_SOURCE.search(text)
    newer = []
    for fixed in _DEBSECAN_FIXED.finditer(text):
        current = source["version"] if source and fixed["kind"] == "source" else installed
        if version_key(fixed["version"]) > version_key(current):
            newer.append(fixed["version"])
    return min(newer, key=version_key, default="a newer version")


def _parse_json(program: str, text: str, *keys: str) -> dict[str, Any]:
    """Parse a JSON object with these keys. Raises ResultError."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ResultError(f"{program}: its output is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ResultError(f"{program}: its output is not a JSON object")
    if absent := [key for key in keys if key not in document]:
        raise ResultError(f"{program}: its output has no {absent[0]}")
    return document


@contextmanager
def _unknown_format(program: str) -> Iterator[None]:
    """Raise ResultError for the errors that a document of an unknown format causes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResultError(f"{program}: its output is in an unknown format: {reason}") from None


def _parse_time(text: object) -> datetime | None:
    """Parse a time as Go prints it, with up to nine decimals of a second; None for Go's zero time."""
    if not isinstance(text, str) or text.startswith("0001-"):
        return None
    time = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _severity(word: object) -> Severity:
    return next((severity for severity in SEVERITIES if severity == str(word).lower()), "unknown")


def _join(values: Mapping[str, Any], *keys: str) -> str | None:
    return " ".join(str(values[key]) for key in keys if values.get(key)) or None


def _distinct(findings: Iterable[Vulnerability]) -> tuple[Vulnerability, ...]:
    """Return each finding once: a package that lies in two places is reported twice."""
    return tuple(dict.fromkeys(findings))


SCANNERS = (
    Scanner(
        "grype", "image", _grype_command, lambda _: None, _grype_environment, parse_grype, "critical",
        "install grype from https://github.com/anchore/grype/releases",
    ),
    Scanner(
        "trivy", "image", _trivy_command, lambda given: ("trivy", "version", "--format", "json", *_trivy_cache(given)),
        lambda _: {}, parse_trivy, "critical",
        "install trivy from https://github.com/aquasecurity/trivy/releases",
    ),
    Scanner(
        "debsecan", "dpkg", _debsecan_command,
        lambda _: ("dpkg-query", "--show", "--showformat", "${Version}", "debsecan"),
        lambda _: {}, parse_debsecan, "high",
        "install debsecan, for images of Debian: apt-get install debsecan",
        "debsecan knows only packages of Debian; wheels, CUDA, HPC-X and what was compiled were not scanned",
        timeout_s=180,
    ),
)  # fmt: skip
"""Known scanners; `auto` tries them in this order."""
SCANNERS_BY_NAME = {scanner.name: scanner for scanner in SCANNERS}


# The policy


class Fail(Model):
    """Say which vulnerabilities fail an image."""

    severity: Literal["negligible", "low", "medium", "high", "critical"] = "critical"
    """This severity and worse ones. With a scanner that cannot report it, the worst that the scanner can report."""
    only_fixed: bool = False
    """Only vulnerabilities that a newer version of the package does not have."""
    unknown_severity: bool = False
    """Also vulnerabilities of unknown severity."""


class Waiver(Model):
    """Accept a vulnerability until a date."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:-]+$")]
    """As the scanner prints it: `CVE-2025-1234`, `GHSA-…`."""
    package: str | None = None
    """Name of the package, or a shell pattern of names; by default all packages that have the vulnerability."""
    when: Condition = Field(default_factory=dict)
    """Images that it is for: axes, `image`, `arch`."""
    until: date
    """Last day, in UTC, on which the vulnerability is accepted."""
    reason: Annotated[str, Field(min_length=10)]
    """Why it does no harm here."""


class Policy(Model):
    """Hold the content of `scan-policy.yaml`."""

    fail: Fail = Fail()
    maximum_database_age_days: Annotated[int, Field(ge=0)] | None = None
    """A database that is older, or of unknown age, proves nothing."""
    old_database: Literal["fail", "warn"] = "fail"
    waivers: tuple[Waiver, ...] = ()


@dataclass(frozen=True)
class PolicyVerdict:
    """Say which findings fail the image."""

    findings: tuple[Vulnerability, ...]
    """All findings; those that fail the image come first, then the worst."""
    reason: str
    """Why the image fails; empty if it does not."""
    notes: tuple[str, ...]


def load_policy(path: Path, axes: Mapping[str, Iterable[str]] | None = None) -> YamlFile[Policy]:
    """Load a policy. With `axes`, conditions may name only these axes, `image` and `arch`.

    Raises ConfigError with all mistakes, each with file and line.
    """
    mistakes = Mistakes()
    document = load_yaml(path, Policy, mistakes)
    mistakes.stop_if_any()
    assert document is not None
    known = {*axis_facts(dict.fromkeys(axes, "")), "image", "arch"} if axes is not None else None
    for i, waiver in enumerate(document.model.waivers):
        for axis, alternatives in waiver.when.items():
            where = document.at("waivers", i, "when", axis)
            if known is not None and axis not in known:
                mistakes.add(where, f"waivers.{i}.when: unknown axis {axis!r}{suggestion(axis, known)}")
            try:
                matches({axis: alternatives}, {axis: "0"})
            except ValueError as error:
                mistakes.add(where, f"waivers.{i}.when.{axis}: {error}")
    mistakes.stop_if_any()
    return document


def judge_vulnerabilities(
    findings: Iterable[Vulnerability],
    policy: YamlFile[Policy],
    facts: Mapping[str, str],
    *,
    worst: Severity,
    database: datetime | None,
    now: datetime,
) -> PolicyVerdict:
    """Judge each finding and the age of the database.

    `facts` are the image's axes, name and architecture; `worst` is the worst severity that the scanner can report;
    `database` is the time of its database, None if it is unknown.
    """
    rules = policy.model
    limit = min(SEVERITIES.index(rules.fail.severity), SEVERITIES.index(worst))
    notes = []
    if SEVERITIES[limit] != rules.fail.severity:
        notes.append(f"this scanner reports nothing worse than {worst}, so that fails instead of {rules.fail.severity}")
    known = axis_facts(facts)
    waivers = [(i, waiver) for i, waiver in enumerate(rules.waivers) if matches(waiver.when, known)]
    valid = [(i, waiver) for i, waiver in waivers if now.astimezone(UTC).date() <= waiver.until]
    used: Counter[int] = Counter()
    judged = []
    for finding in findings:
        fitting = [(i, waiver) for i, waiver in valid if _waives(waiver, finding)]
        used.update(i for i, _ in fitting)
        waived = f"until {fitting[0][1].until}: {fitting[0][1].reason}" if fitting else None
        fails = not waived and _fails(rules.fail, finding, limit)
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    for i, waiver in waivers:
        name = f"{policy.at('waivers', i)}: the waiver of {waiver.id}"
        if (i, waiver) not in valid:
            notes.append(f"{name} ended on {waiver.until}; remove it, or give a new date and reason")
        elif not used[i]:
            notes.append(f"{name} matches nothing in this image")

    faults = []
    if count := sum(finding.fails for finding in judged):
        faults.append(f"{count} finding{'s' * (count != 1)} that the policy does not allow")
    if old := _database_age_fault(rules.maximum_database_age_days, database, now):
        (faults if rules.old_database == "fail" else notes).append(old)
    judged.sort(key=lambda f: (not f.fails, -SEVERITIES.index(f.severity), f.id, f.package, f.version))
    return PolicyVerdict(tuple(judged), "; ".join(faults), tuple(notes))


def _waives(waiver: Waiver, finding: Vulnerability) -> bool:
    return waiver.id == finding.id and (waiver.package is None or fnmatchcase(finding.package, waiver.package))


def _fails(rules: Fail, finding: Vulnerability, limit: int) -> bool:
    if rules.only_fixed and finding.fixed_in is None:
        return False
    if finding.severity == "unknown":
        return rules.unknown_severity
    return SEVERITIES.index(finding.severity) >= limit


def _database_age_fault(limit_days: int | None, database: datetime | None, now: datetime) -> str:
    """Return that the database is too old, or may be; empty if it is not."""
    if limit_days is None:
        return ""
    if database is None:
        return f"the database does not say how old it is; at most {limit_days} days are allowed"
    age = (now - database).total_seconds() / 86400
    return f"the database is {age:.1f} days old; at most {limit_days} are allowed" if age > limit_days else ""


# Print


COLOURS: dict[Severity, str] = {"critical": "red", "high": "red", "medium": "yellow"}
LISTED: tuple[Severity, ...] = ("critical", "high")
"""Severities that are listed even if they do not fail the image."""
MOST_NAMES = 4
"""Packages that a row names."""


def print_scan(result: ScanResult, *, every: bool) -> None:
    """Print the findings as a table; without `every`, only count those that are less than high and fail nothing."""
    listed = [f for f in result.findings if every or f.fails or f.waived or f.severity in LISTED]
    groups: dict[tuple[object, ...], list[Vulnerability]] = {}
    for finding in listed:  # one row for all packages with the same vulnerability and versions
        key = (finding.id, finding.severity, finding.version, finding.fixed_in, finding.waived, finding.fails)
        groups.setdefault(key, []).append(finding)
    if groups:
        columns = ("severity", "vulnerability", "packages", "installed", "fixed in", "policy")
        console.print_table(columns, [_row(group) for group in groups.values()])
    rest = [finding for finding in result.findings if finding not in set(listed)]
    if rest:
        out.print(f"and {len(rest)} more that fail nothing ({_counts(rest)}); --all lists them", markup=False)
    for note in result.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    out.print(f"{result.scanner}; database: {result.database}", markup=False)
    counts = _counts(result.findings) or "nothing known"
    reason = f" ({escape(result.reason)})" if result.reason else ""
    out.print(f"{escape(result.image)}, {result.platform}: {counts}: {console.MARKS[result.verdict]}{reason}")


def _row(group: Sequence[Vulnerability]) -> tuple[str, ...]:
    first = group[0]
    colour = COLOURS.get(first.severity)
    severity = f"[{colour}]{first.severity}[/]" if colour else first.severity
    names = sorted({finding.package for finding in group})
    packages = ", ".join(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        packages += f" and {len(names) - MOST_NAMES} more"
    policy = "[red]fails[/]" if first.fails else escape(f"waived {first.waived}") if first.waived else ""
    return severity, escape(first.id), escape(packages), escape(first.version), escape(first.fixed_in or ""), policy


def _counts(findings: Iterable[Vulnerability]) -> str:
    """Return the number of findings of each severity, the worst first: `2 high, 1 medium`."""
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts[severity])
