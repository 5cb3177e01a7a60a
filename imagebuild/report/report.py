"""Make a report: read files, judge what is in them, write the forms that were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from imagebuild.bench.baseline import compare_with_baseline
from imagebuild.bench.judge import Expected, judge_results
from imagebuild.bench.models import Openness, Results
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
    profiles: tuple[Path, ...] = (Path("profiles"),)
    """Folders of profiles; of one name, the last one's counts."""
    baseline: Path | None = None
    expected: Expected = field(default_factory=Expected)
    """Ranks, nodes and classes of algorithms that runs should have."""
    allowed: tuple[str, ...] = ()
    """Kinds of claims that are accepted though they are open."""
    junit: Path | None = None
    html: Path | None = None


def make_report(request: ReportRequest) -> Report:
    """Make the report, and write it as JUnit XML and as a page if that was asked for.

    Its speed is judged by the profile, if there is one, and the baseline. Raises ConfigError if an argument is wrong,
    or if plotly is missing for a page.
    """
    for kind in set(request.allowed) - set(get_args(Openness)):
        raise ConfigError(f"--allow {kind}: unknown kind; use one of {', '.join(get_args(Openness))}")
    if request.html:
        page.plotly_js()  # raises before anything is read or written
    baseline = read_baseline(request.baseline) if request.baseline else None
    report, logs = gather_files(request.files)
    judgements, about = report.judgements, report.about.model_dump()
    name = request.profile
    if name is None and request.expected != Expected():
        name = about["profile"]
    if name is None and request.expected.algorithms:
        raise ConfigError("--algorithm: says nothing without a profile; name one with --profile")
    if name is not None or request.expected != Expected():
        profile = find_profile(load_profiles(*request.profiles), name).model if name is not None else None
        judgements, about["profile"] = judge_results(report, profile, request.expected), name
    if baseline is not None:
        judgements, about["baseline"] = judgements + compare_with_baseline(report, baseline), str(request.baseline)
    about["allowed"] = tuple(dict.fromkeys((*about["allowed"], *request.allowed)))
    report = report.model_copy(update={"judgements": judgements, "about": ReportOrigin(**about)})
    report = report.model_copy(update={"about": ReportOrigin(**about | {"verdict": report.overall})})
    if request.junit:
        _write(request.junit, text.report_junit(report))
    if request.html:
        failed = {failure.source for failure in report.problems}
        logs = tuple(sorted(logs, key=lambda log: str(log) not in failed))
        _write(request.html, page.report_html(report, page.read_logs(logs), len(logs)))
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
