"""Scan an image or an SBOM for known vulnerabilities, and judge them by `scan-policy.yaml`."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from imagebuild.core import run as programs
from imagebuild.core.console import out
from imagebuild.core.debian import compare_versions, dpkg_status_text, packages_of_sbom, version_key
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Condition, Model, axis_facts, matches
from imagebuild.core.run import RunProgram, run_program
from imagebuild.core.yaml import Mistakes, YamlFile, load_yaml, suggestion
from imagebuild.oci.image import DISTRIBUTION, PlatformImage, dpkg_status
from imagebuild.project.matrix import Plan, combination_id
from imagebuild.project.records import ScanResult, Severity, Vulnerability
from imagebuild.verify.checks import axes_of

SCALE: tuple[Severity, ...] = get_args(Severity)
"""From the least to the worst; `unknown` is no place on it."""


class Fail(Model):
    """What fails an image."""

    severity: Literal["negligible", "low", "medium", "high", "critical"] = "critical"
    """This severity, and worse ones. A scanner whose scale ends below it fails by its worst."""
    only_fixed: bool = False
    """Only vulnerabilities for which there is a version that has them no more."""
    unknown_severity: bool = False
    """Also those of which nobody says how severe they are."""


class IgnoreRule(Model):
    """A vulnerability that may stay for a while."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:-]+$")]
    """As the scanner prints it: `CVE-2025-1234`, `GHSA-…`."""
    package: str | None = None
    """Name of the package, or a shell pattern of names; by default all that have it."""
    when: Condition = Field(default_factory=dict)
    """Images that it is for: axes, `image`, `arch`."""
    until: date
    """Last day on which it waives, in UTC."""
    reason: Annotated[str, Field(min_length=10)]
    """Why it does no harm here."""


class Policy(Model):
    """The file `scan-policy.yaml`."""

    fail: Fail = Fail()
    maximum_database_age_days: Annotated[int, Field(ge=0)] | None = None
    """A database that is older, or does not say how old it is, proves nothing."""
    old_database: Literal["fail", "warn"] = "fail"
    waivers: tuple[IgnoreRule, ...] = ()


@dataclass(frozen=True)
class Judged:
    """Findings as the policy sees them."""

    findings: tuple[Vulnerability, ...]
    """The worst first."""
    reason: str
    """Why the image fails; empty if it does not."""
    notes: tuple[str, ...]


def load_policy(path: Path, axes: Mapping[str, Iterable[str]] | None = None) -> YamlFile[Policy]:
    """The policy; `axes` has what conditions may name. Raises ConfigError with every mistake, by file and line."""
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
    found: Iterable[Vulnerability],
    policy: YamlFile[Policy],
    image: Mapping[str, str],
    *,
    worst: Severity,
    database: datetime | None,
    now: datetime,
) -> Judged:
    """Say of each finding whether it fails the image or is waived.

    `image` has its axes, name and architecture; `worst` is the end of the scanner's scale; `database` is the time of
    what it compared with, where it is known.
    """
    rules = policy.model
    limit = min(SCALE.index(rules.fail.severity), SCALE.index(worst))
    notes = []
    if SCALE[limit] != rules.fail.severity:
        notes.append(f"this scanner knows nothing worse than {worst!r}, so that fails instead of {rules.fail.severity}")
    known = axis_facts(image)
    active = [(i, w) for i, w in enumerate(rules.waivers) if matches(w.when, known)]
    valid = [(i, w) for i, w in active if now.astimezone(UTC).date() <= w.until]
    used: Counter[int] = Counter()
    judged = []
    for finding in found:
        fits = [(i, w) for i, w in valid if _fits(w, finding)]
        used.update(i for i, _ in fits)
        waived = f"until {fits[0][1].until}: {fits[0][1].reason}" if fits else None
        fails = not waived and _fails(rules.fail, finding, limit)
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    for i, waiver in active:
        what = f"{policy.at('waivers', i)}: the waiver of {waiver.id}"
        if (i, waiver) not in valid:
            notes.append(f"{what} ended on {waiver.until}; remove it, or say anew why it may stay")
        elif not used[i]:
            notes.append(f"{what} matches nothing in this image")
    faults = []
    if count := sum(finding.fails for finding in judged):
        faults.append(f"{count} finding{'s' * (count != 1)} that the policy does not allow")
    if old := _too_old(rules.maximum_database_age_days, database, now):
        (faults if rules.old_database == "fail" else notes).append(old)
    return Judged(tuple(in_order(judged)), "; ".join(faults), tuple(notes))


def in_order(findings: Iterable[Vulnerability]) -> Sequence[Vulnerability]:
    """What fails first, then by severity, worst first."""
    return sorted(findings, key=lambda f: (not f.fails, -SCALE.index(f.severity), f.id, f.package, f.version))


def by_severity(findings: Iterable[Vulnerability]) -> Iterator[tuple[Severity, int]]:
    """How many there are, the worst first."""
    counted = Counter(finding.severity for finding in findings)
    return ((severity, counted[severity]) for severity in reversed(SCALE) if counted[severity])


def _fits(waiver: IgnoreRule, finding: Vulnerability) -> bool:
    return waiver.id == finding.id and (waiver.package is None or fnmatchcase(finding.package, waiver.package))


def _fails(rules: Fail, finding: Vulnerability, limit: int) -> bool:
    if rules.only_fixed and finding.fixed_in is None:
        return False
    if finding.severity == "unknown":
        return rules.unknown_severity
    return SCALE.index(finding.severity) >= limit


def _too_old(limit: int | None, database: datetime | None, now: datetime) -> str:
    if limit is None:
        return ""
    if database is None:
        return f"the database does not say how old it is; at most {limit} days are allowed"
    age = (now - database).total_seconds() / 86400
    return f"the database is {age:.1f} days old; at most {limit} are allowed" if age > limit else ""


DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DISTRIBUTION_PURL = re.compile(r"pkg:deb/(?P<id>[a-z]+)/.*[?&]distro=(?P<distro>[^&#]+)")
RELEASES = {"12": "bookworm", "13": "trixie", "14": "forky"}
"""Release of Debian → its code name, which SBOMs leave out."""


@dataclass(frozen=True)
class SbomImage:
    """The image that an SBOM describes."""

    name: str
    digest: str | None
    platform: str | None
    distribution: str | None
    """`debian`, `ubuntu`, …; None if no package of dpkg says it."""
    suite: str | None
    """Code name of a release of Debian."""


def image_of(document: Mapping[str, Any]) -> SbomImage:
    """Read an SPDX document. Raises ValueError if it is none."""
    if "spdxVersion" not in document:
        raise ValueError("is no SPDX document: it has no spdxVersion")
    roots = set(document.get("documentDescribes") or ()) | {
        relation.get("relatedSpdxElement")
        for relation in document.get("relationships") or ()
        if relation.get("relationshipType") == "DESCRIBES"
    }
    packages = document.get("packages") or ()
    root: Mapping[str, Any] = next((package for package in packages if package.get("SPDXID") in roots), {})
    locators = list(_locators(root))
    texts = [root.get("versionInfo", ""), *locators, document.get("name", ""), root.get("name", "")]
    sums = [f"sha256:{s['checksumValue']}" for s in root.get("checksums") or () if s.get("algorithm") == "SHA256"]
    digests = [*sums, *(found[0] for text in texts if (found := DIGEST.search(unquote(str(text)))))]
    arch = next((found[1] for text in locators if (found := re.search(r"[?&]arch=([a-z0-9]+)", text))), None)
    every = (text for package in packages for text in _locators(package))
    system = next((found for text in every if (found := DISTRIBUTION_PURL.match(text))), None)
    distro = system["distro"].rpartition("-")[2] if system else ""
    return SbomImage(
        name=str(root.get("name") or document.get("name") or ""),
        digest=digests[0] if digests else None,
        platform=f"linux/{arch}" if arch else None,
        distribution=system["id"] if system else None,
        suite=RELEASES.get(distro.partition(".")[0], distro or None),
    )


def _locators(package: Mapping[str, Any]) -> Iterator[str]:
    return (
        str(reference.get("referenceLocator", ""))
        for reference in package.get("externalRefs") or ()
        if reference.get("referenceType") == "purl"
    )


@dataclass(frozen=True)
class ScannerOutput:
    """What a scanner said."""

    findings: tuple[Vulnerability, ...]
    version: str
    """Of the scanner."""
    database: str
    """What it compared with; empty if it does not say it."""
    built: datetime | None
    """When that was made."""
    distribution: str | None
    """What it took the image for; None if it recognised none."""
    notes: tuple[str, ...] = ()


Parser = Callable[[str, str], ScannerOutput]
"""Reads what the scan printed, and what was printed when asked for the version."""


def grype(output: str, about: str) -> ScannerOutput:  # noqa: ARG001 - the scan's output says all
    """`grype -o json`."""
    document = _json("grype", output, "matches", "descriptor")
    with _known_form("grype"):
        told = document["descriptor"]
        database = told.get("db") or {}
        state = database.get("status") or database  # since version 6 of the database there is a level more
        built = _time(state.get("built"))
        ignored = len(document.get("ignoredMatches") or ())
        return ScannerOutput(
            findings=_once(_of_match(match) for match in document["matches"]),
            version=str(told.get("version", "")),
            database=f"schema {state['schemaVersion']}" if state.get("schemaVersion") else "",
            built=built,
            distribution=_joined(document.get("distro") or {}, "name", "version"),
            notes=(f"grype itself left out {ignored} matches",) if ignored else (),
        )


def _of_match(match: Mapping[str, Any]) -> Vulnerability:
    about, artifact = match["vulnerability"], match["artifact"]
    fix = about.get("fix") or {}
    return Vulnerability(
        id=about["id"],
        severity=_severity(about.get("severity")),
        package=artifact["name"],
        version=artifact.get("version", ""),
        fixed_in=", ".join(fix.get("versions") or ()) or None if fix.get("state") == "fixed" else None,
        link=about.get("dataSource") or None,
    )


def trivy(output: str, about: str) -> ScannerOutput:
    """`trivy image --format json`, and `trivy version --format json`."""
    document = _json("trivy", output, "SchemaVersion", "ArtifactName")
    program = _json("trivy version", about, "Version")
    with _known_form("trivy"):
        database = program.get("VulnerabilityDB") or {}
        system = (document.get("Metadata") or {}).get("OS") or {}
        results = document.get("Results") or ()
        return ScannerOutput(
            findings=_once(_of_trivy(item) for result in results for item in result.get("Vulnerabilities") or ()),
            version=str(program["Version"]),
            database=f"version {database['Version']}" if database else "",
            built=_time(database.get("UpdatedAt")),
            distribution=_joined(system, "Family", "Name"),
        )


def _of_trivy(item: Mapping[str, Any]) -> Vulnerability:
    return Vulnerability(
        id=item["VulnerabilityID"],
        severity=_severity(item.get("Severity")),
        package=item["PkgName"],
        version=item.get("InstalledVersion", ""),
        fixed_in=item.get("FixedVersion") or None,
        link=item.get("PrimaryURL") or None,
    )


HEAD = re.compile(r"^(?P<id>[A-Z][\w.:-]+)(?: \((?P<notes>[^()]*)\))?$")
INSTALLED = re.compile(r"^  installed: (?P<package>\S+) (?P<version>\S+)$", re.MULTILINE)
FIXED = re.compile(
    r"^  fixed (?:in unstable:|on branch:  ) \S+ (?P<version>\S+) \((?P<kind>binary|source) package\)$", re.M
)
BUILT_FROM = re.compile(r"^ +\(built from \S+ (?P<version>\S+)\)$", re.MULTILINE)
URGENCY = re.compile(r"\b(low|medium|high) urgency\b")
AVAILABLE = "  fix is available for the selected suite"


def debsecan(output: str, about: str) -> ScannerOutput:
    """`debsecan --format detail`, and the version of its package."""
    found = []
    for paragraph in output.split("\n\n"):
        text = paragraph.strip("\n")
        if not text:
            continue
        first, _, rest = text.partition("\n")
        head, installed = HEAD.match(first), INSTALLED.search(rest)
        if not head or not installed:
            raise ResultError(f"debsecan: cannot be read: {first[:80]!r}")
        urgency = URGENCY.search(head["notes"] or "")
        found.append(
            Vulnerability(
                id=head["id"],
                severity=_severity(urgency[1] if urgency else None),
                package=installed["package"],
                version=installed["version"],
                fixed_in=_fixed(rest, installed["version"]) if AVAILABLE in rest else None,
            )
        )
    return ScannerOutput(_once(found), about.strip(), "", None, "debian")


def _fixed(text: str, installed: str) -> str:
    """The least version without the vulnerability that is newer than what is installed.

    debsecan lists those of all suites, by source package or by binary package.
    """
    source = BUILT_FROM.search(text)
    newer = [
        found["version"]
        for found in FIXED.finditer(text)
        if compare_versions(found["version"], source["version"] if source and found["kind"] == "source" else installed)
        > 0
    ]
    return min(newer, key=version_key, default="a newer version")


def _json(what: str, text: str, *keys: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ResultError(f"{what}: its output is not JSON: {error}") from None
    if not isinstance(document, dict) or (absent := [key for key in keys if key not in document]):
        raise ResultError(f"{what}: its output has no {absent[0] if isinstance(document, dict) else 'object'}")
    return document


class _known_form:  # noqa: N801 - reads as a statement
    """Turns what goes wrong with a document of another form into ResultError."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, LookupError | TypeError | AttributeError | ValueError):
            why = f"{type(error).__name__}: {error}"
            raise ResultError(f"{self.what}: its output has a form that is not known: {why}") from None


def _time(text: object) -> datetime | None:
    """A time as Go writes it, with up to nine digits of a second."""
    if not isinstance(text, str) or text.startswith("0001-"):
        return None
    found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _severity(word: object) -> Severity:
    known: tuple[Severity, ...] = get_args(Severity)
    return next((severity for severity in known if severity == str(word).lower()), "unknown")


def _joined(about: Mapping[str, Any], *keys: str) -> str | None:
    return " ".join(str(about[key]) for key in keys if about.get(key)) or None


def _once(findings: Iterable[Vulnerability]) -> tuple[Vulnerability, ...]:
    """A package that lies at two places is one finding."""
    return tuple(dict.fromkeys(findings))


FORM = b"VERSION 1\n"


def prepared(given: Path, suite: str, folder: Path) -> tuple[Path, str, datetime]:
    """A folder as debsecan wants it, what is in the database, and of when it is.

    `given` is a file, or a folder with a file for each release. The format holds no date, so the file's is taken.
    Raises ConfigError if there is none for the release, ResultError if it is no database.
    """
    path = given / suite if given.is_dir() else given
    try:
        content, changed = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        what = f"{path}: cannot be read: {error.strerror}"
        raise ConfigError(f"--database {what}; give the tracker's file for {suite}, or a folder with it") from None
    try:
        text = zlib.decompress(content)
    except zlib.error as error:
        raise ResultError(f"{path}: is no database of debsecan: {error}") from None
    if not text.startswith(FORM):
        raise ResultError(f"{path}: is no database of debsecan, or of another form: {text[:20]!r}")
    target = folder / "database"
    target.mkdir()
    (target / suite).symlink_to(path.resolve())
    digest = hashlib.sha256(content).hexdigest()
    built = datetime.fromtimestamp(changed, UTC).replace(microsecond=0)
    return target, f"{path.name}, sha256:{digest[:12]}", built


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
class ScanSubject:
    """What is scanned."""

    name: str
    digest: str
    platform: str
    read: Callable[[], System]
    """Reads the layers, which takes seconds, and which not every scanner needs."""
    image: PlatformImage | None = None
    sbom: Path | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """Axes, name and architecture of the image, for conditions of waivers."""

    @cached_property
    def system(self) -> System:
        """Raises ResultError if a layer cannot be read."""
        return self.read()


def scan_subject_of_image(image: PlatformImage) -> ScanSubject:
    """An image. Raises ConfigError if it has no manifest."""
    if image.digest is None:
        raise ConfigError(f"{image.name}: an archive without manifest: there is no digest that the result could name")
    axes = axes_of(image.labels)
    known = {**axes, "arch": image.architecture}
    if target := image.labels.get("imagebuild.target"):
        known["image"] = target.removesuffix(combination_id("", axes))
    return ScanSubject(image.name, image.digest, image.platform, lambda: _system(image), image=image, facts=known)


def _system(image: PlatformImage) -> System:
    found = image.files(DISTRIBUTION)
    told = found.get("usr/lib/os-release") or found.get("etc/os-release") or b""
    names = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', told.decode("utf-8", "replace")))
    return System(names.get("ID"), names.get("VERSION_CODENAME"), dpkg_status(found))


def scan_subject_of_sbom(path: Path, plan: Plan | None = None) -> ScanSubject:
    """What an SBOM in SPDX describes; `plan` has the axes of targets.

    Raises ConfigError if it does not say of which image it is, ResultError if it is no SBOM.
    """
    try:
        document = json.loads(files.read_text(path))
        about, packages = image_of(document), packages_of_sbom(document)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ResultError(f"{path}: is no SBOM in SPDX's JSON: {error}") from None
    if about.digest is None:
        raise ConfigError(f"{path}: names no digest of an image; make the SBOM with `imagebuild sbom`")
    system = System(about.distribution, about.suite, dpkg_status_text(packages) if packages else None)
    known = {"arch": about.platform.split("/")[1]} if about.platform else {}
    if target := next((t for t in plan.targets if t.id == about.name), None) if plan else None:
        known |= {**target.axes, "image": target.image}
    return ScanSubject(about.name, about.digest, about.platform or "unknown", lambda: system, sbom=path, facts=known)


@dataclass(frozen=True)
class ScanInput:
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
    scan: Callable[[ScanInput], tuple[str, ...]]
    about: Callable[[ScanInput], tuple[str, ...] | None]
    """What prints its version, where the scan does not."""
    environment: Callable[[ScanInput], Mapping[str, str]]
    parse: Parser
    worst: Severity
    """The end of its scale."""
    install: str
    limits: str = ""
    """What it cannot see."""
    limit_s: int = 1800
    """Seconds it may take, with the download of its database: who has no network shall not wait for ever."""


def _grype(job: ScanInput) -> tuple[str, ...]:
    what = f"sbom:{job.sbom}" if job.sbom else f"oci-dir:{job.layout}"
    # Its own settings could leave findings out.
    return ("grype", "--config", str(job.folder / "settings.yaml"), "--output", "json", what)


def _grype_environment(job: ScanInput) -> dict[str, str]:
    # Our policy judges the age, and what has no fix.
    values = dict.fromkeys(
        ("GRYPE_CHECK_FOR_APP_UPDATE", "GRYPE_DB_VALIDATE_AGE", "GRYPE_ONLY_FIXED", "GRYPE_ONLY_NOTFIXED"), "false"
    )
    if job.offline:
        values["GRYPE_DB_AUTO_UPDATE"] = "false"
    return values | ({"GRYPE_DB_CACHE_DIR": str(job.database)} if job.database else {})


def _trivy(job: ScanInput) -> tuple[str, ...]:
    settings = ("--config", str(job.folder / "settings.yaml"), "--ignorefile", str(job.folder / "ignore"))
    everything = ("--severity", "UNKNOWN,LOW,MEDIUM,HIGH,CRITICAL", "--ignore-unfixed=false")
    what = ("sbom", str(job.sbom)) if job.sbom else ("image", "--input", str(job.layout), "--scanners", "vuln")
    network = ("--offline-scan", "--skip-db-update", "--skip-java-db-update") if job.offline else ()
    return ("trivy", *what, "--quiet", "--format", "json", *settings, *everything, *network, *_trivy_cache(job))


def _trivy_cache(job: ScanInput) -> tuple[str, ...]:
    return ("--cache-dir", str(job.database)) if job.database else ()


def _debsecan(job: ScanInput) -> tuple[str, ...]:
    source = ("--source", f"{job.database.as_uri()}/") if job.database else ()
    # This machine's settings and its list of exceptions are not about the image.
    settings = ("--config", str(job.folder / "settings.yaml"), "--whitelist", "")
    return (
        "debsecan", *settings, "--suite", job.suite, "--status", str(job.status), "--format", "detail", *source,
    )  # fmt: skip


SCANNERS = (
    Scanner(
        "grype", "image", _grype, lambda _: None, _grype_environment, grype, "critical",
        "install grype from https://github.com/anchore/grype/releases",
    ),
    Scanner(
        "trivy", "image", _trivy, lambda job: ("trivy", "version", "--format", "json", *_trivy_cache(job)),
        lambda _: {}, trivy, "critical",
        "install trivy from https://github.com/aquasecurity/trivy/releases",
    ),
    Scanner(
        "debsecan", "dpkg", _debsecan, lambda _: ("dpkg-query", "--show", "--showformat", "${Version}", "debsecan"),
        lambda _: {}, debsecan, "high",
        "install debsecan, for images of Debian: apt-get install debsecan",
        "debsecan knows packages of Debian only; wheels, CUDA, HPC-X and what was compiled were not looked at",
        limit_s=180,
    ),
)  # fmt: skip
"""In the order in which `auto` takes the first that is installed and can read the image."""

BY_NAME = {scanner.name: scanner for scanner in SCANNERS}


COLOURS: dict[Severity, str] = {"critical": "red", "high": "red", "medium": "yellow"}
LISTED = ("critical", "high")
MOST_NAMES = 4


def print_scan(result: ScanResult, *, every: bool) -> None:
    """Print it. Without `every`, what fails nothing and is less than high is only counted."""
    listed = [f for f in result.findings if every or f.fails or f.waived or f.severity in LISTED]
    rows = [_row(group) for group in grouped(listed)]
    if rows:
        console.print_table(("severity", "vulnerability", "packages", "installed", "fixed in", "policy"), rows)
    rest = [finding for finding in result.findings if finding not in set(listed)]
    if rest:
        out.print(f"and {len(rest)} more that fail nothing ({_counts(rest)}); --all lists them", markup=False)
    for note in result.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    out.print(f"{result.scanner}; database: {result.database}", markup=False)
    found = _counts(result.findings) or "nothing known"
    mark = console.MARKS[result.verdict]
    out.print(f"{escape(result.image)}, {result.platform}: {found}: {mark}" + _because(result))


def grouped(findings: Iterable[Vulnerability]) -> list[list[Vulnerability]]:
    """Findings of one vulnerability that differ in nothing but the package, together; in the order given."""
    groups: dict[tuple[object, ...], list[Vulnerability]] = {}
    for finding in findings:
        key = (finding.id, finding.severity, finding.version, finding.fixed_in, finding.waived, finding.fails)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _row(group: list[Vulnerability]) -> tuple[str, ...]:
    first = group[0]
    colour = COLOURS.get(first.severity)
    severity = f"[{colour}]{first.severity}[/]" if colour else first.severity
    names = sorted({finding.package for finding in group})
    shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    said = "[red]fails[/]" if first.fails else escape(f"waived {first.waived}") if first.waived else ""
    return severity, escape(first.id), escape(shown), escape(first.version), escape(first.fixed_in or ""), said


def _counts(findings: Iterable[Vulnerability]) -> str:
    return ", ".join(f"{number} {severity}" for severity, number in by_severity(findings))


def _because(result: ScanResult) -> str:
    return f" ({escape(result.reason)})" if result.reason else ""


AUTO = "auto"
OFFLINE_BY_DATABASE = "debsecan keeps no database; with --offline give one with --database"


@dataclass(frozen=True)
class ScanRequest:
    """How to scan."""

    scanner: str = AUTO
    database: Path | None = None
    offline: bool = False


@dataclass(frozen=True)
class ScanHost:
    """What this machine has."""

    run: RunProgram = run_program
    which: Callable[[str], str | None] = programs.which
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


def unfit(scanner: Scanner, subject: ScanSubject) -> str:
    """Why a scanner can say nothing about the image; empty if it can."""
    system = subject.system
    if scanner.wants != "dpkg":
        return ""
    if system.status is None:
        return f"{scanner.name} reads dpkg's list of packages, and {subject.name} has none"
    if system.id != "debian" or not system.suite:
        return f"{scanner.name} knows Debian only, and {subject.name} is {system.id or 'of an unknown distribution'}"
    return ""


def choose(wanted: str, subject: ScanSubject, machine: ScanHost) -> Scanner:
    """The scanner to use.

    Raises CommandError if it, or with `auto` any that can read the image, is missing; ConfigError if it is not known
    or cannot read the image.
    """
    if wanted == AUTO:
        installed = (scanner for scanner in SCANNERS if machine.which(scanner.name))
        if found := next((scanner for scanner in installed if not unfit(scanner, subject)), None):
            return found
        ways = "; or ".join(scanner.install for scanner in SCANNERS if not unfit(scanner, subject))
        raise CommandError(f"{subject.name}: not scanned, as no scanner that can read it is installed: {ways}")
    if wanted not in BY_NAME:
        raise ConfigError(f"--scanner {wanted}: use {AUTO}, {', '.join(BY_NAME)}")
    scanner = BY_NAME[wanted]
    if not machine.which(scanner.name):
        raise CommandError(f"{subject.name}: not scanned, as {wanted} is not installed: {scanner.install}")
    if why := unfit(scanner, subject):
        raise ConfigError(f"--scanner {wanted}: {why}; use another scanner")
    return scanner


def scan_image(
    subject: ScanSubject, rules: YamlFile[Policy], wish: ScanRequest, machine: ScanHost | None = None
) -> ScanResult:
    """Scan and judge.

    Raises CommandError if the scanner is missing or fails, ConfigError if it does not fit or its database is not
    there, ResultError if its output cannot be read.
    """
    machine = machine or ScanHost()
    scanner = choose(wish.scanner, subject, machine)
    if scanner.wants == "dpkg" and wish.offline and wish.database is None:
        raise ConfigError(OFFLINE_BY_DATABASE)
    started = machine.now()
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        job, what, built = _prepared(scanner, subject, wish, Path(folder), started)
        environment = scanner.environment(job)
        output = machine.run(*scanner.scan(job), env=environment, timeout=scanner.limit_s)
        about = scanner.about(job)
        reading = scanner.parse(output, machine.run(*about, env=environment, timeout=60) if about else "")
    built = reading.built or built
    judged = judge_vulnerabilities(
        reading.findings, rules, subject.facts, worst=scanner.worst, database=built, now=started
    )
    notes = [*reading.notes, *([scanner.limits] if scanner.limits else []), *judged.notes]
    if not rules.path.exists():
        notes.append(f"{rules.path}: does not exist, so {rules.model.fail.severity} fails and nothing is waived")
    if reading.distribution is None:
        notes.append(f"{scanner.name} recognised no distribution, so packages of one were not looked at")
    described = ", ".join(filter(None, (reading.database or what, f"of {_text(built)}" if built else "of unknown age")))
    return ScanResult(
        image=subject.name,
        digest=subject.digest,
        platform=subject.platform,
        scanner=f"{scanner.name} {reading.version}".strip(),
        database=described,
        started=_text(started),
        findings=judged.findings,
        verdict="failed" if judged.reason else "passed",
        reason=judged.reason,
        notes=tuple(notes),
    )


def _prepared(
    scanner: Scanner, subject: ScanSubject, wish: ScanRequest, folder: Path, now: datetime
) -> tuple[ScanInput, str, datetime | None]:
    """What the scanner is given; its database, as far as it is known before; and of when that is."""
    for name in ("settings.yaml", "ignore"):
        (folder / name).touch()
    given = wish.database.resolve() if wish.database else None
    if given and not given.exists():
        raise ConfigError(f"--database {wish.database}: does not exist")
    job = ScanInput(folder=folder, database=given, offline=wish.offline)
    if scanner.wants == "dpkg":
        status, suite = folder / "status", subject.system.suite or ""
        status.write_text(subject.system.status or "")
        job = replace(job, status=status, suite=suite)
        if given is None:
            return job, f"the tracker's data for {suite}", now
        place, what, built = prepared(given, suite, folder)
        return replace(job, database=place), what, built
    if subject.sbom:
        return replace(job, sbom=subject.sbom.resolve()), "", None
    assert subject.image is not None
    return replace(job, layout=subject.image.as_layout(folder / "layout")), "", None


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds")
