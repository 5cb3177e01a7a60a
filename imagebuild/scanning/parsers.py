"""What scanners print, read. Pure. Each parser raises ResultError for output that it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, get_args

from imagebuild.errors import ResultError
from imagebuild.locking.debian import compare, version_key
from imagebuild.records import Severity, Vulnerability


@dataclass(frozen=True)
class Reading:
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


Parser = Callable[[str, str], Reading]
"""Reads what the scan printed, and what was printed when asked for the version."""


def grype(output: str, about: str) -> Reading:  # noqa: ARG001 - the scan's output says all
    """`grype -o json`."""
    document = _json("grype", output, "matches", "descriptor")
    with _known_form("grype"):
        told = document["descriptor"]
        database = told.get("db") or {}
        state = database.get("status") or database  # grype 0.88 and later have a level more
        built = _time(state.get("built"))
        ignored = len(document.get("ignoredMatches") or ())
        return Reading(
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


def trivy(output: str, about: str) -> Reading:
    """`trivy image --format json`, and `trivy version --format json`."""
    document = _json("trivy", output, "SchemaVersion", "ArtifactName")
    program = _json("trivy version", about, "Version")
    with _known_form("trivy"):
        database = program.get("VulnerabilityDB") or {}
        system = (document.get("Metadata") or {}).get("OS") or {}
        results = document.get("Results") or ()
        return Reading(
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


def debsecan(output: str, about: str) -> Reading:
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
    return Reading(_once(found), about.strip(), "", None, "debian")


def _fixed(text: str, installed: str) -> str:
    """The least version without the vulnerability that is newer than what is installed.

    debsecan lists those of all suites, by source package or by binary package.
    """
    source = BUILT_FROM.search(text)
    newer = [
        found["version"]
        for found in FIXED.finditer(text)
        if compare(found["version"], source["version"] if source and found["kind"] == "source" else installed) > 0
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
