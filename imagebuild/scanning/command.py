"""`imagebuild scan`: choose a scanner, start it, judge what it finds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import programs
from imagebuild.apt import Run
from imagebuild.config import Document
from imagebuild.errors import CommandError, ConfigError
from imagebuild.records import ScanResult
from imagebuild.scanning import database, policy
from imagebuild.scanning.policy import Policy
from imagebuild.scanning.scanners import BY_NAME, SCANNERS, Job, Scanner
from imagebuild.scanning.subject import Subject

AUTO = "auto"
OFFLINE_BY_DATABASE = "debsecan keeps no database; with --offline give one with --database"


@dataclass(frozen=True)
class Wish:
    """How to scan."""

    scanner: str = AUTO
    database: Path | None = None
    offline: bool = False


@dataclass(frozen=True)
class Machine:
    """What this machine has."""

    run: Run = programs.run
    which: Callable[[str], str | None] = programs.which
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))


def unfit(scanner: Scanner, subject: Subject) -> str:
    """Why a scanner can say nothing about the image; empty if it can."""
    system = subject.system
    if scanner.wants != "dpkg":
        return ""
    if system.status is None:
        return f"{scanner.name} reads dpkg's list of packages, and {subject.name} has none"
    if system.id != "debian" or not system.suite:
        return f"{scanner.name} knows Debian only, and {subject.name} is {system.id or 'of an unknown distribution'}"
    return ""


def choose(wanted: str, subject: Subject, machine: Machine) -> Scanner:
    """The scanner to use.

    Raises CommandError if it, or with `auto` any that can read the image, is missing; ConfigError if it is not known
    or cannot read the image.
    """
    if wanted == AUTO:
        fitting = [scanner for scanner in SCANNERS if not unfit(scanner, subject)]
        if found := next((scanner for scanner in fitting if machine.which(scanner.name)), None):
            return found
        ways = "; or ".join(scanner.install for scanner in fitting)
        raise CommandError(f"{subject.name}: not scanned, as no scanner that can read it is installed: {ways}")
    if wanted not in BY_NAME:
        raise ConfigError(f"--scanner {wanted}: use {AUTO}, {', '.join(BY_NAME)}")
    scanner = BY_NAME[wanted]
    if not machine.which(scanner.name):
        raise CommandError(f"{subject.name}: not scanned, as {wanted} is not installed: {scanner.install}")
    if why := unfit(scanner, subject):
        raise ConfigError(f"--scanner {wanted}: {why}; use another scanner")
    return scanner


def scan(subject: Subject, rules: Document[Policy], wish: Wish, machine: Machine | None = None) -> ScanResult:
    """Scan and judge.

    Raises CommandError if the scanner is missing or fails, ConfigError if it does not fit or its database is not
    there, ResultError if its output cannot be read.
    """
    machine = machine or Machine()
    scanner = choose(wish.scanner, subject, machine)
    if scanner.wants == "dpkg" and wish.offline and wish.database is None:
        raise ConfigError(OFFLINE_BY_DATABASE)
    started = machine.now()
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        job, what, built = _prepared(scanner, subject, wish, Path(folder), started)
        environment = scanner.environment(job)
        output = machine.run(*scanner.scan(job), env=environment)
        about = scanner.about(job)
        reading = scanner.parse(output, machine.run(*about, env=environment) if about else "")
    built = reading.built or built
    judged = policy.judge(reading.findings, rules, subject.facts, worst=scanner.worst, database=built, now=started)
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
    scanner: Scanner, subject: Subject, wish: Wish, folder: Path, now: datetime
) -> tuple[Job, str, datetime | None]:
    """What the scanner is given; its database, as far as it is known before; and of when that is."""
    for name in ("settings.yaml", "ignore"):
        (folder / name).touch()
    given = wish.database.resolve() if wish.database else None
    if given and not given.exists():
        raise ConfigError(f"--database {wish.database}: does not exist")
    job = Job(folder=folder, database=given, offline=wish.offline)
    if scanner.wants == "dpkg":
        status, suite = folder / "status", subject.system.suite or ""
        status.write_text(subject.system.status or "")
        job = replace(job, status=status, suite=suite)
        if given is None:
            return job, f"the tracker's data for {suite}", now
        place, what, built = database.prepared(given, suite, folder)
        return replace(job, database=place), what, built
    if subject.sbom:
        return replace(job, sbom=subject.sbom.resolve()), "", None
    assert subject.image is not None
    return replace(job, layout=subject.image.as_layout(folder / "layout")), "", None


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds")
