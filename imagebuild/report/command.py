"""`imagebuild report`: files in, a report made, files out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import __version__, console, files
from imagebuild.baseline import compare
from imagebuild.console import err
from imagebuild.errors import ConfigError
from imagebuild.judge import Known, judge
from imagebuild.judgement import Judgement
from imagebuild.profiles import Profile, find, load_profiles
from imagebuild.report import html as pages
from imagebuild.report import junit, markdown, raw, terminal
from imagebuild.report.document import About, Report
from imagebuild.report.gather import Gathered, gather
from imagebuild.results.models import Results
from imagebuild.results.read import read


@dataclass(frozen=True)
class Wish:
    """What was asked for."""

    named: tuple[Path, ...]
    profile: str | None = None
    profiles: Path = Path("profiles")
    baseline: Path | None = None
    known: Known | None = None
    json: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    markdown: bool = False


def run(wish: Wish) -> Report:
    """Make the report, write what was asked for, and print it.

    Raises ConfigError if an argument is wrong, or if plotly is missing for a page.
    """
    if wish.html:
        # Said before anything is read or written.
        pages.plotly_js()
    profile = find(load_profiles(wish.profiles), wish.profile).model if wish.profile else None
    gathered = gather(wish.named, read)
    report = assembled(wish, gathered, profile, _now())
    if wish.json:
        _write(wish.json, report.model_dump_json(indent=1) + "\n")
    if wish.junit:
        _write(wish.junit, junit.xml(report))
    if wish.html:
        _write(wish.html, pages.html(report, raw.read(gathered.logs)))
    if wish.markdown:
        console.out.file.write(markdown.text(report))
    else:
        terminal.show(report)
    return report


def assembled(wish: Wish, gathered: Gathered, profile: Profile | None, created: str) -> Report:
    """The report on what was gathered. Raises ConfigError if the baseline cannot be read."""
    earlier = gathered.judgements
    judgements: tuple[Judgement, ...] = judge(gathered.results, profile, wish.known) if profile else earlier
    if wish.baseline:
        judgements += compare(gathered.results, _baseline(wish.baseline))
    before = next((report.about for report in gathered.earlier), None)
    about = About(
        title=_title(wish.named),
        created=created,
        imagebuild=__version__,
        files=tuple(map(str, wish.named)),
        profile=wish.profile or (before.profile if before else None),
        baseline=str(wish.baseline) if wish.baseline else before.baseline if before else None,
    )
    parts = {name: getattr(gathered.results, name) for name in type(gathered.results).model_fields}
    report = Report(
        **parts,
        about=about,
        judgements=judgements,
        verifications=gathered.verifications,
        nothing_in=gathered.nothing_in,
    )
    return report.model_copy(update={"about": about.model_copy(update={"verdict": report.overall})})


def _baseline(path: Path) -> Results:
    found = gather([path], read)
    if found.nothing_in:
        raise ConfigError(f"--baseline {path}: has no results; give what `imagebuild report --json` wrote, or a log")
    return found.results


def _title(named: tuple[Path, ...]) -> str:
    first = named[0].resolve().name or str(named[0])
    return first if len(named) == 1 else f"{first} and {len(named) - 1} more"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(path: Path, text: str) -> None:
    files.write_text(path, text)
    err.print(f"{path}: {console.size(path.stat().st_size)}", markup=False)
