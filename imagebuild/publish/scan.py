"""Judge what a scanner found by `scan-policy.yaml`; say which packages the distribution has fixed since."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field
from rich.markup import escape

from imagebuild.core import console, files
from imagebuild.core.console import out
from imagebuild.core.debian import Package, version_key
from imagebuild.core.errors import ConfigError, Mistakes, ResultError
from imagebuild.core.fields import DIGEST, Form, Model, YamlFile
from imagebuild.core.run import for_each
from imagebuild.core.yaml import load_yaml
from imagebuild.oci.image import PlatformImage
from imagebuild.oci.layout import manifests_of
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry
from imagebuild.project.matrix import Target, axes_of
from imagebuild.project.records import (
    Catalog,
    PublishedPlatform,
    ScanResult,
    SecurityUpdates,
    Severity,
    Vulnerability,
)
from imagebuild.publish.evidence import attached_packages

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities from the least to the worst; `unknown` comes first."""


def load_report(file: Path) -> ScanReport:
    """Return what a scanner wrote into a file. Raises ConfigError or ResultError if it cannot be read."""
    text = files.read_text(file)
    try:
        return read_report(text)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ResultError(f"{file}: cannot be read as a report: {type(error).__name__}: {error}") from None


def scan_result(
    image: PlatformImage, report: ScanReport, file: Path, policy: YamlFile[Policy], today: date | None = None
) -> ScanResult:
    """Judge what a scanner wrote about an image, by a policy; `file` is where it wrote it.

    Raises ConfigError if the report is about another image, or by a scanner that does not know the image's
    distribution.
    """
    notes = list(report.notes)
    if report.digests and image.digest not in report.digests:
        named = ", ".join(sorted(report.digests))
        raise ConfigError(f"{file}: is about {named}, not about {image.digest}; scan the image as NAME@{image.digest}")
    if report.scanner == DEBSECAN:
        if not axes_of(image.labels).get("os", "debian").startswith("debian"):
            raise ConfigError(f"{file}: is by debsecan, which knows packages of Debian only; use grype or trivy")
    elif not report.digests:
        raise ConfigError(f"{file}: names no digest of an image; let {report.scanner} scan NAME@{image.digest}")
    findings, more = judge_vulnerabilities(report, policy, today or datetime.now(UTC).date())
    notes += more
    if not policy.path.exists():
        notes.append(f"{policy.path}: does not exist, so {policy.model.fail.severity} fails and nothing is ignored")
    count = sum(finding.fails for finding in findings)
    written = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return ScanResult(
        image=image.name, digest=image.digest, platform=image.platform, scanner=report.scanner,
        database=report.database or "not named", started=report.started or written, findings=findings,
        verdict="failed" if count else "passed", notes=tuple(notes),
        reason=f"{count} finding{'s' * (count != 1)} that the policy does not allow" if count else "",
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


def read_report(text: str) -> ScanReport:
    """Read what `grype -o json`, `trivy image --format json` or `debsecan --format detail` printed.

    Raises ValueError, LookupError, TypeError or AttributeError if it is something else.
    """
    if not text.lstrip().startswith("{"):
        return _read_debsecan(text)
    document = json.loads(text)
    return _read_grype(document) if "matches" in document else _read_trivy(document)


def _read_grype(document: Mapping[str, Any]) -> ScanReport:
    findings = []
    for match in document["matches"]:
        vulnerability, artifact = match["vulnerability"], match["artifact"]
        fix = vulnerability.get("fix") or {}
        findings.append(
            Vulnerability(
                id=vulnerability["id"], severity=_severity(vulnerability.get("severity")), package=artifact["name"],
                version=artifact.get("version", ""), link=vulnerability.get("dataSource") or None,
                fixed_in=", ".join(fix.get("versions") or ()) or None if fix.get("state") == "fixed" else None,
            )
        )  # fmt: skip
    descriptor = document["descriptor"]
    database = descriptor.get("db") or {}
    built = (database.get("status") or database).get("built")  # one level deeper since version 6 of the database
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
            version=item.get("InstalledVersion", ""), link=item.get("PrimaryURL") or None,
            fixed_in=item.get("FixedVersion") or None,
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


def load_policy(path: Path) -> YamlFile[Policy]:
    """Load a policy. Raises ConfigError with all mistakes, each with file and line."""
    mistakes = Mistakes()
    document = load_yaml(path, Policy, mistakes)
    mistakes.stop_if_any()
    assert document is not None
    return document


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
    used: set[Ignore] = set()
    judged = []
    for finding in dict.fromkeys(report.findings):  # a package that lies in two places is reported twice
        ignored = [
            rule for rule in policy.model.ignore
            if rule.id == finding.id and fnmatchcase(finding.package, rule.package or "*")
        ]  # fmt: skip
        used.update(ignored)
        valid = next((rule for rule in ignored if today <= rule.until), None)
        severe = SEVERITIES.index(finding.severity) >= limit if finding.severity != "unknown" else fail.unknown_severity
        fails = severe and not valid and (finding.fixed_in is not None or not fail.only_fixed)
        waived = f"until {valid.until}: {valid.reason}" if valid else None
        judged.append(finding.model_copy(update={"waived": waived, "fails": fails}))
    for i, rule in enumerate(policy.model.ignore):
        name = f"{policy.at('ignore', i)}: the rule for {rule.id}"
        if today > rule.until:
            notes.append(f"{name} ended on {rule.until}; remove it, or give a new date and reason")
        elif rule not in used:
            notes.append(f"{name} matches nothing in this image")
    judged.sort(key=lambda f: (not f.fails, -SEVERITIES.index(f.severity), f.id, f.package, f.version))
    return tuple(judged), notes


# Print


COLOURS: dict[Severity, str] = {"critical": "red", "high": "red", "medium": "yellow"}
LISTED: tuple[Severity, ...] = ("critical", "high")
"""Severities that are listed even if they do not fail the image."""


def print_scan(result: ScanResult) -> None:
    """Print the findings as a table; those below high that fail nothing are only counted."""
    listed = [f for f in result.findings if f.fails or f.waived or f.severity in LISTED]
    rows = []
    for finding in listed:
        colour = COLOURS.get(finding.severity)
        severity = f"[{colour}]{finding.severity}[/]" if colour else finding.severity
        policy = "[red]fails[/]" if finding.fails else escape(f"ignored {finding.waived}") if finding.waived else ""
        texts = map(escape, (finding.id, finding.package, finding.version, finding.fixed_in or ""))
        rows.append((severity, *texts, policy))
    if rows:
        console.print_table(("severity", "vulnerability", "package", "installed", "fixed in", "policy"), rows)
    rest = [finding for finding in result.findings if finding not in set(listed)]
    if rest:
        out.print(f"and {len(rest)} more that fail nothing ({_counts(rest)}); --json has them", markup=False)
    for note in result.notes:
        out.print(f"[yellow]note:[/] {escape(note)}")
    out.print(f"{result.scanner}; database: {result.database}", markup=False)
    counts = _counts(result.findings) or "nothing known"
    reason = f" ({escape(result.reason)})" if result.reason else ""
    out.print(f"{escape(result.image)}, {result.platform}: {counts}: {console.MARKS[result.verdict]}{reason}")


def _counts(findings: Iterable[Vulnerability]) -> str:
    """Return the number of findings of each severity, the worst first: `2 high, 1 medium`."""
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts[severity])


# Packages that the distribution has fixed since


class Update(Model):
    """Describe a package of a published image that the distribution has a newer version of."""

    target: str
    image: str
    """Name and digest of the index."""
    platform: str
    package: str
    installed: str
    available: str


class Freshness(Model):
    """Hold what `imagebuild freshness --json` writes."""

    read: str
    """When it was looked, in UTC."""
    pending: dict[str, int]
    """Digest of each image that was judged, one for each platform → packages that have updates."""
    updates: tuple[Update, ...]
    problems: tuple[str, ...] = ()
    """Images that nothing is known of, and why."""
    rebuild: tuple[str, ...] = ()
    """Targets that need a new build: for an update, or since a scan failed on a package that has a fix now."""


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
    published = published_images(targets, connect)
    registries = {connect(parse_reference(image.name).host) for image in published if image.name}
    images = for_each(lambda image: _listed_packages(image, connect), published, *registries, jobs=WORKERS)
    names: dict[str, set[str]] = {}
    for image in (image for image in images if image.packages):
        names.setdefault(image.platform.removeprefix("linux/"), set()).update(p.name for p in image.packages)
    available = {arch: newest(arch, sorted(packages)) for arch, packages in sorted(names.items())}
    updates: list[Update] = []
    pending: dict[str, int] = {}
    for image in (image for image in images if not image.problem):
        newer = available[image.platform.removeprefix("linux/")]
        mended = {
            package.name: Update(
                target=image.target, image=image.name, platform=image.platform, package=package.name,
                installed=package.version, available=newer[package.name][-1],
            )
            for package in image.packages
            if newer.get(package.name) and version_key(newer[package.name][-1]) > version_key(package.version)
        }  # fmt: skip
        updates += mended.values()
        pending[image.digest] = len(mended)
    failed = {(scan.digest, f.package) for scan in scans for f in scan.findings if f.fails and f.fixed_in}
    stale = {image.target for image in images if any((image.digest, p.name) in failed for p in image.packages)}
    stale |= {update.target for update in updates}
    return Freshness(
        read=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), pending=pending, updates=tuple(updates),
        problems=tuple(f"{i.target} {i.platform}: {i.problem}".replace(" :", ":") for i in images if i.problem),
        rebuild=tuple(target.id for target in targets if target.id in stale),
    )  # fmt: skip


def with_updates(catalog: Catalog, freshness: Freshness) -> Catalog:
    """Return a catalogue that says how many packages of images have updates, of those that were looked at."""

    def known(platform: PublishedPlatform) -> PublishedPlatform:
        pending = freshness.pending.get(platform.digest)
        updates = None if pending is None else SecurityUpdates(pending=pending, read=freshness.read)
        return platform.model_copy(update={"updates": updates})

    images = (i.model_copy(update={"platforms": tuple(map(known, i.platforms))}) for i in catalog.images)
    return catalog.model_copy(update={"images": tuple(images)})


WORKERS = 8


@dataclass(frozen=True)
class NewestImage:
    """Name the image of a platform that the first alias of a target leads to, or say why there is none."""

    target: str
    name: str = ""
    """Name and digest of the index; empty if there is none."""
    platform: str = ""
    digest: str = ""
    packages: tuple[Package, ...] = ()
    problem: str = ""


def published_images(targets: Sequence[Target], connect: Callable[[str], Registry]) -> list[NewestImage]:
    """Return what the first alias of each target names, for each platform. Raises CommandError if a registry fails."""

    def find(target: Target) -> list[NewestImage]:
        if not target.aliases:
            return [NewestImage(target.id, problem="has no alias that says which image is the newest")]
        name = parse_reference(target.aliases[0])
        index = connect(name.host).at(name.repository).find(name.wanted)
        if index is None:
            return [NewestImage(target.id, problem=f"{name}: is not published")]
        named = str(name.at(index.digest))
        return [NewestImage(target.id, named, i.platform or "", i.digest) for i in manifests_of(index.document)]

    registries = {connect(parse_reference(target.aliases[0]).host) for target in targets if target.aliases}
    return [image for found in for_each(find, targets, *registries, jobs=WORKERS) for image in found]


def _listed_packages(image: NewestImage, connect: Callable[[str], Registry]) -> NewestImage:
    """Return an image with the packages of its SBOM, or with the problem that it has none."""
    if image.problem:
        return image
    place = parse_reference(image.name)
    packages, problem = attached_packages(connect(place.host).at(place.repository), image.digest)
    return replace(image, packages=packages, problem=problem)


def print_freshness(result: Freshness) -> None:
    """Print the updates and what could not be judged."""
    rows = [(u.target, u.platform, u.package, u.installed, u.available) for u in result.updates]
    if rows:
        console.print_table(("target", "platform", "package", "installed", "fixed in"), rows)
    for problem in result.problems:
        out.print(f"not judged: {problem}", markup=False)
    stale, judged = sum(map(bool, result.pending.values())), len(result.pending)
    out.print(f"{stale} of {judged} images have packages with updates, {len(result.problems)} were not judged")
    if result.rebuild:
        out.print(f"to be built again: {', '.join(result.rebuild)}", markup=False)
