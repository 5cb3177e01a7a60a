"""Make a report: read files, judge what is in them, write the forms that were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imagebuild.bench.baseline import compare_with_baseline
from imagebuild.bench.judge import Expected, judge_results
from imagebuild.bench.models import Results
from imagebuild.bench.profiles import find_profile, load_profiles
from imagebuild.core import console, files
from imagebuild.core.console import err
from imagebuild.core.errors import ConfigError
from imagebuild.report import page, text
from imagebuild.report.document import Report, ReportOrigin, gather_files


@dataclass(frozen=True)
class ReportRequest:
    """Hold the arguments of `imagebuild report`."""

    files: tuple[Path, ...]
    """Files and folders to read."""
    profile: str | None = None
    profiles: Path = Path("profiles")
    baseline: Path | None = None
    expected: Expected | None = None
    """Ranks, nodes and classes of algorithms that runs should have."""
    junit: Path | None = None
    html: Path | None = None


def make_report(request: ReportRequest) -> Report:
    """Make the report, and write it as JUnit XML and as a page if that was asked for.

    Its speed is judged by the profile, if there is one, and the baseline. Raises ConfigError if an argument is wrong,
    or if plotly is missing for a page.
    """
    if request.html:
        page.plotly_js()  # raises before anything is read or written
    profile = find_profile(load_profiles(request.profiles), request.profile).model if request.profile else None
    baseline = read_baseline(request.baseline) if request.baseline else None
    report, logs = gather_files(request.files)
    verdicts, about = report.judgements, report.about.model_dump()
    if profile is not None:
        verdicts, about["profile"] = judge_results(report, profile, request.expected), request.profile
    if baseline is not None:
        verdicts, about["baseline"] = verdicts + compare_with_baseline(report, baseline), str(request.baseline)
    report = report.model_copy(update={"judgements": verdicts})
    report = report.model_copy(update={"about": ReportOrigin(**about | {"verdict": report.overall})})
    if request.junit:
        _write(request.junit, text.report_junit(report))
    if request.html:
        _write(request.html, page.report_html(report, page.read_logs(logs)))
    return report


def read_baseline(path: Path) -> Results:
    """Return the results of an earlier report or log. Raises ConfigError if there are none."""
    report, _ = gather_files([path])
    if report.nothing_in:
        problem = "contains no result; name a file that `imagebuild report --json` wrote, or a log"
        raise ConfigError(f"--baseline {path}: {problem}")
    return report


def _write(path: Path, content: str) -> None:
    files.write_text(path, content)
    err.print(f"{path}: {console.format_size(path.stat().st_size)}", markup=False)
