"""Judge what a scanner found by `scan-policy.yaml`; say which packages the distribution has fixed since."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from rich.markup import escape

from imagebuild.core import console, files
from imagebuild.core.console import out
from imagebuild.core.debian import Package, version_key
from imagebuild.core.errors import ConfigError, ResultError, plural
from imagebuild.core.fields import DIGEST, Form, Model, YamlFile
from imagebuild.core.run import for_each
from imagebuild.oci.image import PlatformImage
from imagebuild.oci.layout import manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry
from imagebuild.project.matrix import Target, axes_of
from imagebuild.project.records import ScanResult, Severity, Vulnerability
from imagebuild.publish.evidence import attached_packages

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities from the least to the worst; `unknown` comes first."""


def scan_result(
    image: PlatformImage, report: ScanReport, file: Path, policy: YamlFile[Policy], today: date | None = None
) -> ScanResult:
    """Judge what a scanner wrote about an image, by a policy; `file` is where it wrote it.

    Raises ConfigError if the report is about another image, or by a scanner that does not know the image's
    distribution.
    """
    if report.digests and image.digest not in report.digests:
        named = ", ".join(sorted(report.digests))
        raise ConfigError(f"{file}: is about {named}, not about {image.digest}; scan the image as NAME@{image.digest}")
    if report.scanner == DEBSECAN:
        if not axes_of(image.labels).get("os", "debian").startswith("debian"):
            raise ConfigError(f"{file}: is by debsecan, which knows packages of Debian only; use grype or trivy")
    elif not report.digests:
        raise ConfigError(f"{file}: names no digest of an image; let {report.scanner} scan NAME@{image.digest}")
    findings, notes = judge_vulnerabilities(report, policy, today or datetime.now(UTC).date())
    if not policy.path.exists():
        notes.append(f"{policy.path}: does not exist, so {policy.model.fail.severity} fails and nothing is ignored")
    failing = sum(finding.fails for finding in findings)
    written = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return ScanResult(
        image=image.name, digest=image.digest, platform=image.platform, scanner=report.scanner,
        database=report.database or "not named", started=report.started or written, findings=findings,
        verdict="failed" if failing else "passed", notes=(*report.notes, *notes),
        reason=f"{plural(failing, 'finding')} that the policy does not allow" if failing else "",
    )  # fmt: skip


# What scanners write


DEBSECAN = "debsecan"


@dataclass(frozen=True)
class ScanReport:
    """Hold what a scanner found."""

    scanner: str
    """Name and, where the report has it, version."""
    findings: tuple[Vulnerability, ...]
    digests: frozenset[str] = frozenset()
    """Digests of the image, of its manifest and of its index, as far as the report names them."""
    database: str = ""
    started: str = ""
    worst: Severity = "critical"
    """The worst severity that the scanner can report."""
    notes: tuple[str, ...] = ()


def load_report(file: Path) -> ScanReport:
    """Read what `grype -o json`, `trivy image --format json` or `debsecan --format detail` printed into a file.

    Raises ConfigError if there is no such file, ResultError if it has something else.
    """
    text = files.read_text(file)
    try:
        if not text.lstrip().startswith("{"):
            return _read_debsecan(text)
        document = json.loads(text)
        return _read_grype(document) if "matches" in document else _read_trivy(document)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ResultError(f"{file}: cannot be read as a report of grype, trivy or debsecan ({why})") from None


def _read_grype(document: Mapping[str, Any]) -> ScanReport:
    findings = []
    for match in document["matches"]:
        vulnerability, artifact = match["vulnerability"], match["artifact"]
        fix = vulnerability.get("fix") or {}
        findings.append(
            Vulnerability(
                id=vulnerability["id"], severity=_severity(vulnerability.get("severity")), package=artifact["name"],
                version=artifact.get("version", ""),
                fixed_in=", ".join(fix.get("versions") or ()) or None if fix.get("state") == "fixed" else None,
            )
        )  # fmt: skip
    descriptor = document["descriptor"]
    built = ((descriptor.get("db") or {}).get("status") or {}).get("built")
    ignored = len(document.get("ignoredMatches") or ())
    notes = [f"grype left out {ignored} matches by rules of its own"] if ignored else []
    if not (document.get("distro") or {}).get("name"):
        notes.append("grype recognised no distribution, so it did not scan the packages of one")
    target = (document.get("source") or {}).get("target") or {}
    return ScanReport(
        f"grype {descriptor.get('version', '')}".strip(), tuple(findings),
        _digests(target.get("manifestDigest"), *(target.get("repoDigests") or ())),
        f"of {built}" if built else "", str(descriptor.get("timestamp") or ""), notes=tuple(notes),
    )  # fmt: skip


def _read_trivy(document: Mapping[str, Any]) -> ScanReport:
    metadata = document["Metadata"]
    findings = [
        Vulnerability(
            id=item["VulnerabilityID"], severity=_severity(item.get("Severity")), package=item["PkgName"],
            version=item.get("InstalledVersion", ""), fixed_in=item.get("FixedVersion") or None,
        )
        for result in document.get("Results") or ()
        for item in result.get("Vulnerabilities") or ()
    ]  # fmt: skip
    unknown = not (metadata.get("OS") or {}).get("Family")
    return ScanReport(
        "trivy", tuple(findings), _digests(*(metadata.get("RepoDigests") or ())),
        started=str(document.get("CreatedAt") or ""),
        notes=("trivy recognised no distribution, so it did not scan the packages of one",) if unknown else (),
    )  # fmt: skip


_HEAD = re.compile(r"^(?P<id>[A-Z][\w.:-]+)(?: \((?P<notes>[^()]*)\))?$")
_INSTALLED = re.compile(r"^  installed: (?P<package>\S+) (?P<version>\S+)$", re.MULTILINE)
_URGENCY = re.compile(r"\b(low|medium|high) urgency\b")
_AVAILABLE = "  fix is available for the selected suite"


def _read_debsecan(text: str) -> ScanReport:
    findings = []
    for paragraph in filter(None, (paragraph.strip("\n") for paragraph in text.split("\n\n"))):
        first, _, rest = paragraph.partition("\n")
        head, installed = _HEAD.match(first), _INSTALLED.search(rest)
        if not head or not installed:
            raise ValueError(f"{first[:80]!r} is not of `debsecan --format detail`, nor JSON of grype or trivy")
        urgency = _URGENCY.search(head["notes"] or "")
        findings.append(
            Vulnerability(
                id=head["id"], severity=_severity(urgency[1] if urgency else None), package=installed["package"],
                version=installed["version"], fixed_in="a newer version" if _AVAILABLE in rest else None,
            )
        )  # fmt: skip
    notes = (
        "debsecan names no image; that its report is about this one is taken on trust",
        "debsecan knows only packages of Debian; wheels, CUDA, HPC-X and what was compiled were not scanned",
    )
    return ScanReport(DEBSECAN, tuple(findings), worst="high", notes=notes)


def _severity(word: object) -> Severity:
    return next((severity for severity in SEVERITIES if severity == str(word).lower()), "unknown")


def _digests(*names: object) -> frozenset[str]:
    return frozenset(match[0] for name in names if (match := re.search(DIGEST, str(name))))


# The policy


class Fail(Model):
    """Say which vulnerabilities fail an image."""

    severity: Literal["negligible", "low", "medium", "high", "critical"] = "critical"
    """This severity and worse ones. With a scanner that cannot report it, the worst that the scanner can report."""
    only_fixed: bool = False
    """Only vulnerabilities that a newer version of the package does not have."""
    unknown_severity: bool = False
    """Also vulnerabilities of unknown severity."""


class Ignore(Model):
    """Accept a vulnerability until a date."""

    id: Annotated[str, Form(r"[A-Za-z0-9][\w.:-]+", "the id of a vulnerability such as CVE-2026-1234")]
    """As the scanner prints it: `CVE-2025-1234`, `GHSA-…`."""
    package: str | None = None
    """Name of the package, or a shell pattern of names; by default all packages that have the vulnerability."""
    until: date
    """Last day, in UTC, on which the vulnerability is accepted."""
    reason: Annotated[str, Field(min_length=10)]
    """Why it does no harm here."""


class Policy(Model):
    """Hold the content of `scan-policy.yaml`."""

    fail: Fail = Fail()
    ignore: tuple[Ignore, ...] = ()


def judge_vulnerabilities(
    report: ScanReport, policy: YamlFile[Policy], today: date
) -> tuple[tuple[Vulnerability, ...], list[str]]:
    """Judge each finding; those that fail come first, then the worst. Return them, and notes on the policy.

    A rule whose last day has passed ignores nothing; a note names it.
    """
    fail = policy.model.fail
    limit = min(SEVERITIES.index(fail.severity), SEVERITIES.index(report.worst))
    notes = []
    if SEVERITIES[limit] != fail.severity:
        notes.append(f"{report.scanner} reports nothing worse than {report.worst}, so that fails, not {fail.severity}")
    rules = [rule for rule in policy.model.ignore if today <= rule.until]
    judged = []
    for finding in dict.fromkeys(report.findings):  # a package that lies in two places is reported twice
        fitting = (rule for rule in rules if rule.id == finding.id)
        valid = next((rule for rule in fitting if fnmatchcase(finding.package, rule.package or "*")), None)
        severe = SEVERITIES.index(finding.severity) >= limit if finding.severity != "unknown" else fail.unknown_severity
        fails = severe and not valid and (finding.fixed_in is not None or not fail.only_fixed)
        waived = f"until {valid.until}: {valid.reason}" if valid else None
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    notes += [
        f"{policy.at('ignore', i)}: the rule for {rule.id} ended on {rule.until}; remove it, or give a new date"
        for i, rule in enumerate(policy.model.ignore)
        if rule not in rules
    ]
    judged.sort(key=lambda f: (not f.fails, -SEVERITIES.index(f.severity), f.id, f.package, f.version))
    return tuple(judged), notes


# Print


def print_scan(result: ScanResult) -> None:
    """Print the findings that fail the image or are ignored as a table; the others are only counted."""
    listed = [finding for finding in result.findings if finding.fails or finding.waived]
    rows = [
        (f.severity, f.id, f.package, f.version, f.fixed_in or "", f"ignored {f.waived}" if f.waived else "fails")
        for f in listed
    ]
    if rows:
        columns = ("severity", "vulnerability", "package", "installed", "fixed in", "policy")
        console.print_table(columns, [map(escape, row) for row in rows])
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"{result.scanner}; database: {result.database}", markup=False)
    found = Counter(finding.severity for finding in result.findings)
    counts = ", ".join(f"{found[severity]} {severity}" for severity in reversed(SEVERITIES) if found[severity])
    reason = f" ({escape(result.reason)})" if result.reason else ""
    summary = f"{counts or 'nothing known'}: {console.MARKS[result.verdict]}{reason}"
    out.print(f"{escape(result.image)}, {result.platform}: {summary}")


# Packages that the distribution has fixed since


class NewestImage(Model):
    """Name the image of a platform that the first alias of a target leads to, and what the distribution has mended."""

    target: str
    platform: str = ""
    digest: str = ""
    index: str = ""
    """Name and digest of the index."""
    updates: dict[str, str] = Field(default_factory=dict)
    """Package → its version and the newer one."""
    problem: str = ""
    """Why nothing is known of it."""


class Freshness(Model):
    """Hold what `imagebuild freshness --json` writes."""

    read: str
    """When it was looked, in UTC."""
    images: tuple[NewestImage, ...]
    rebuild: tuple[str, ...] = ()
    """Targets that need a new build: for an update, or since a scan failed on a package that has a fix now."""


WORKERS = 8


def published_images(targets: Sequence[Target], connect: Callable[[str], Registry]) -> list[NewestImage]:
    """Return what the first alias of each target names, for each platform. Raises CommandError if a registry fails."""

    def find(target: Target) -> list[NewestImage]:
        if not target.aliases:
            return [NewestImage(target=target.id, problem="has no alias that says which image is the newest")]
        name = parse_reference(target.aliases[0])
        index = connect(name.host).at(name.repository).find(name.wanted)
        if index is None:
            return [NewestImage(target=target.id, problem=f"{name}: is not published")]
        named = {"target": target.id, "index": str(name.at(index.digest))}
        return [NewestImage(platform=i.platform or "", digest=i.digest, **named) for i in manifests_of(index.document)]

    registries = {connect(parse_reference(target.aliases[0]).host) for target in targets if target.aliases}
    return [image for found in for_each(find, targets, *registries, jobs=WORKERS) for image in found]


def security_updates(
    targets: Sequence[Target],
    connect: Callable[[str], Registry],
    newest: Callable[[str, Iterable[str]], Mapping[str, list[str]]],
    scans: Iterable[ScanResult] = (),
) -> Freshness:
    """Compare the packages in the SBOMs of the images that aliases name with a distribution's versions.

    `newest` returns the versions of packages for an architecture; it is called once for each. `scans` are newer than
    what is attached. Signatures of SBOMs are not checked. Raises CommandError if a registry fails.
    """

    def read(image: NewestImage) -> tuple[Package, ...]:
        place = parse_reference(image.index)
        return attached_packages(connect(place.host).at(place.repository), image.digest)

    images = published_images(targets, connect)
    known = [image for image in images if not image.problem]
    registries = {connect(parse_reference(image.index).host) for image in known}
    packages = dict(zip((i.digest for i in known), for_each(read, known, *registries, jobs=WORKERS), strict=True))
    names: dict[str, set[str]] = {}
    for image in known:
        names.setdefault(image.platform, set()).update(package.name for package in packages[image.digest])
    available = {p: newest(p.removeprefix("linux/"), sorted(found)) for p, found in names.items() if found}
    # A new build mends what fails in a package of the distribution.
    failed = {(scan.digest, f.package) for scan in scans for f in scan.findings if f.fails and f.fixed_in}
    judged, stale = list[NewestImage](), set[str]()
    for image in images:
        problem, updates = image.problem, dict[str, str]()
        for package in packages.get(image.digest, ()):
            newer = available[image.platform].get(package.name)
            if newer and version_key(newer[-1]) > version_key(package.version):
                updates[package.name] = f"{package.version} → {newer[-1]}"
            if package.name in updates or (image.digest, package.name) in failed:
                stale.add(image.target)
        if not (problem or packages[image.digest]):
            problem = "has no SBOM that can be read and lists packages of the distribution"
        judged.append(image.model_copy(update={"updates": updates, "problem": problem}))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Freshness(read=now, images=tuple(judged), rebuild=tuple(t.id for t in targets if t.id in stale))


def print_freshness(result: Freshness) -> None:
    """Print the updates and what could not be judged."""
    rows = [(i.target, i.platform, package, change) for i in result.images for package, change in i.updates.items()]
    if rows:
        console.print_table(("target", "platform", "package", "update"), rows)
    unknown = [image for image in result.images if image.problem]
    for image in unknown:
        out.print(f"not judged: {image.target} {image.platform}: {image.problem}", markup=False)
    stale, judged = sum(bool(image.updates) for image in result.images), len(result.images) - len(unknown)
    out.print(f"{stale} of {judged} images have packages with updates, {len(unknown)} were not judged")
    if result.rebuild:
        out.print(f"to be built again: {', '.join(result.rebuild)}", markup=False)
