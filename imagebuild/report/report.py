"""Make a report: read files, judge what is in them, write the forms that were asked for."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from imagebuild.bench.baseline import compare_with_baseline
from imagebuild.bench.judge import Expected, judge_results
from imagebuild.bench.models import Openness
from imagebuild.bench.profiles import find_profile, load_profiles
from imagebuild.core import console, files
from imagebuild.core.console import err
from imagebuild.core.errors import ConfigError
from imagebuild.report import page, text
from imagebuild.report.document import Report, ReportOrigin, gather_files

STDOUT = Path("-")
"""As the name of a file: the standard output."""


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
    json_file: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    """Files to write; `-` is the standard output. The JSON is written by the caller."""


def make_report(request: ReportRequest) -> Report:
    """Make the report, and write it as JUnit XML and as a page if that was asked for.

    Speed is judged by the profile and by the baseline, if there are any. Raises ConfigError if an argument is wrong, a
    file to write is one that was read, or plotly is missing for a page.
    """
    for kind in set(request.allowed) - set(get_args(Openness)):
        raise ConfigError(f"--allow {kind}: unknown kind; use one of {', '.join(get_args(Openness))}")
    if request.html:
        page.plotly_js()  # raises before anything is read or written
    baseline = gather_files([request.baseline]).report if request.baseline else None
    if baseline and (damaged := [source for source in baseline.sources if source.damage]):
        raise ConfigError(f"--baseline {damaged[0].path}: {damaged[0].damage}; name a file that is whole")
    if baseline and baseline.overall == "nothing-read":
        problem = "contains no result; name a file that `imagebuild report --json` wrote, or a log"
        raise ConfigError(f"--baseline {request.baseline}: {problem}")
    gathered = gather_files(request.files)
    check_outputs({"--json": request.json_file, "--junit": request.junit, "--html": request.html}, gathered.read)
    report = gathered.report
    judgements, about = report.judgements, report.about.model_dump()
    if request.profile is not None or request.expected != Expected():
        name = request.profile if request.profile is not None else report.about.profile
        if name is None and request.expected.algorithms:
            raise ConfigError("--algorithm: has no effect without a profile; name a profile with --profile")
        profile = None if name is None else find_profile(load_profiles(*request.profiles), name).model
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
        logs = sorted(gathered.logs, key=lambda log: str(log) not in failed)
        _write(request.html, page.report_html(report, page.read_logs(logs), len(logs)))
    return report


def check_outputs(outputs: Mapping[str, Path | None], read: Collection[Path]) -> None:
    """Raise ConfigError if two options name the same file, or one a folder or a file that was read."""
    places: dict[Path, str] = {}
    for option, path in outputs.items():
        if path and path.is_dir():
            raise ConfigError(f"{option} {path}: is a folder; name a file")
        if path is None or (path.exists() and not path.is_file()):
            continue  # a device takes everything
        place = path.resolve()
        if path != STDOUT and place in read:
            raise ConfigError(f"{option} {path}: would replace a file that is read; name another one")
        if place in places:
            raise ConfigError(f"{option} {path}: {places[place]} writes this file, too; name another one")
        places[place] = option


def _write(path: Path, content: str) -> None:
    if path == STDOUT:
        sys.stdout.write(content)
    else:
        files.write_text(path, content)
        err.print(f"{path}: {console.format_size(path.stat().st_size)}", markup=False)
