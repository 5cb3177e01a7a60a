"""Make a report: read files, judge the results in them, and write the requested formats."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from imagebuild.bench.baseline import compare_with_baseline
from imagebuild.bench.judge import Expected, accepted_kinds, judge_results, judge_sources
from imagebuild.bench.profiles import find_profile, load_profiles
from imagebuild.core import console, files
from imagebuild.core.console import err
from imagebuild.core.errors import ConfigError
from imagebuild.report import page, text
from imagebuild.report.document import Report, gather_files

STDOUT = Path("-")


def make_report(
    named: Sequence[Path],
    *,
    profile: str | None,
    profiles: Sequence[Path],
    baseline: Path | None,
    expected: Expected,
    allowed: Sequence[str],
    outputs: Mapping[str, Path | None],
    allowed_loss: float | None = None,
) -> Report:
    """Make the report on files and folders, and write it as JUnit XML and as an HTML page if requested.

    Speed is compared with the profile and the baseline. `profiles` are the folders with profiles; a later folder
    replaces profiles with the same name. `outputs` maps `--json`, `--junit` and `--html` to files; the caller writes
    the JSON. `-` is the standard output. `allowed_loss` is for paired comparisons, in per cent. Raises ConfigError if
    an argument is wrong, an output would overwrite an input, or the page needs plotly and it is not installed."""
    accepted = accepted_kinds(allowed)
    if outputs["--html"]:
        page.plotly_js()  # raises before anything is read or written
    before = gather_files([baseline])[0] if baseline else None
    if before and before.overall == "nothing-read":
        problem = "contains no result; name a file that `imagebuild report --json` wrote, or a log"
        raise ConfigError(f"--baseline {baseline}: {problem}")
    report, logs, read = gather_files(named)
    check_outputs(outputs, read)
    about: dict[str, object] = {"allowed": tuple(dict.fromkeys((*report.about.allowed, *accepted)))}
    if allowed_loss is not None:
        if not report.paired:
            raise ConfigError("--allow-loss: no file is the log of a comparison; write one with `imagebuild compare`")
        about["allowed_loss"] = allowed_loss
    claims: dict[str, object] = {}
    if profile is not None or expected != Expected():
        name = about["profile"] = profile if profile is not None else report.about.profile
        if name is None and expected.algorithms:
            raise ConfigError("--algorithm: has no effect without a profile; name a profile with --profile")
        known = None if name is None else find_profile(load_profiles(*profiles), name).model
        about["gpu"] = known.gpu.compute_capability if known else None
        claims |= {
            "judgements": judge_results(report, known, expected), "sources": judge_sources(report.sources, known),
        }  # fmt: skip
    if before is not None:
        about["baseline"] = str(baseline)
        claims["comparisons"] = compare_with_baseline(report, before)
    report = report.model_copy(update=claims | {"about": report.about.model_copy(update=about)})
    about["verdict"] = report.overall
    report = report.model_copy(update={"about": report.about.model_copy(update=about)})
    if junit := outputs["--junit"]:
        _write(junit, text.report_junit(report))
    if html := outputs["--html"]:
        failed = {failure.source for failure in report.problems}
        logs = sorted(logs, key=lambda log: str(log) not in failed)
        _write(html, page.report_html(report, page.read_logs(logs), len(logs)))
    return report


def check_outputs(outputs: Mapping[str, Path | None], read: Collection[Path]) -> None:
    """Raise ConfigError if an output is a folder, an input, or the same file as another output."""
    places: dict[Path, str] = {}
    for option, path in outputs.items():
        if path and path.is_dir():
            raise ConfigError(f"{option} {path}: is a folder; name a file")
        if path is None or (path.exists() and not path.is_file()):
            continue  # a device can be the output of several options
        place = path.resolve()
        if path != STDOUT and place in read:
            raise ConfigError(f"{option} {path}: would replace a file that is read; name another file")
        if place in places:
            raise ConfigError(f"{option} {path}: {places[place]} writes this file, too; name another file")
        places[place] = option


def _write(path: Path, content: str) -> None:
    if path == STDOUT:
        sys.stdout.write(content)
    else:
        files.write_text(path, content, named=True)
        err.print(f"{path}: {console.format_size(path.stat().st_size)}")
