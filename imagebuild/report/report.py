"""Make a report: read files, judge what is in them, write the forms that were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import __version__
from imagebuild.bench.baseline import compare_with_baseline
from imagebuild.bench.judge import RunContext, judge_results
from imagebuild.bench.models import Results
from imagebuild.bench.profiles import Profile, find_profile, load_profiles
from imagebuild.core import console, files
from imagebuild.core.console import err
from imagebuild.core.errors import ConfigError
from imagebuild.report import page, text
from imagebuild.report.document import Gathered, Report, ReportOrigin, gather_files


@dataclass(frozen=True)
class ReportRequest:
    """Hold the arguments of `imagebuild report`."""

    files: tuple[Path, ...]
    """Files and folders to read."""
    profile: str | None = None
    profiles: Path = Path("profiles")
    baseline: Path | None = None
    context: RunContext | None = None
    """Ranks, nodes and algorithm of runs whose output does not tell them."""
    junit: Path | None = None
    html: Path | None = None


def make_report(request: ReportRequest) -> Report:
    """Make the report, and write it as JUnit XML and as a page if that was asked for.

    Raises ConfigError if an argument is wrong, or if plotly is missing for a page.
    """
    if request.html:
        page.plotly_js()  # raises before anything is read or written
    profile = find_profile(load_profiles(request.profiles), request.profile).model if request.profile else None
    baseline = read_baseline(request.baseline) if request.baseline else None
    gathered = gather_files(request.files)
    report = assemble(request, gathered, profile, baseline)
    if request.junit:
        _write(request.junit, text.report_junit(report))
    if request.html:
        _write(request.html, page.report_html(report, page.read_logs(gathered.logs)))
    return report


def read_baseline(path: Path) -> Results:
    """Return the results of an earlier report or log. Raises ConfigError if there are none."""
    gathered = gather_files([path])
    if gathered.nothing_in:
        problem = "contains no result; name a file that `imagebuild report --json` wrote, or a log"
        raise ConfigError(f"--baseline {path}: {problem}")
    return gathered.results


def assemble(request: ReportRequest, gathered: Gathered, profile: Profile | None, baseline: Results | None) -> Report:
    """Return the report on what was gathered: its speed is judged by the profile, if there is one, and the baseline."""
    results, verdicts = gathered.results, gathered.judgements
    if profile is not None:
        verdicts = judge_results(results, profile, request.context)
    if baseline is not None:
        verdicts += compare_with_baseline(results, baseline)
    first, *others = request.files
    title = first.resolve().name or str(first)
    earlier = gathered.earlier[0].about if gathered.earlier else None
    origin = ReportOrigin(
        title=f"{title} and {len(others)} more" if others else title,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        imagebuild=__version__,
        files=tuple(map(str, request.files)),
        profile=request.profile or (earlier.profile if earlier else None),
        baseline=str(request.baseline) if request.baseline else earlier.baseline if earlier else None,
    )
    report = Report(
        about=origin,
        **dict(results),
        judgements=verdicts,
        verifications=gathered.verifications,
        nothing_in=gathered.nothing_in,
    )
    return report.model_copy(update={"about": origin.model_copy(update={"verdict": report.overall})})


def _write(path: Path, content: str) -> None:
    files.write_text(path, content)
    err.print(f"{path}: {console.format_size(path.stat().st_size)}", markup=False)
