"""The contents of a report: results, the claims about them, and an assertion for each thing that can fail.

All output formats (terminal, JSON, Markdown, JUnit, HTML) show this model. Only `gather_files` and the functions that
it calls read files."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Literal, NamedTuple, Self, get_args

from pydantic import model_validator

from imagebuild import __version__
from imagebuild.bench.datapath import describe
from imagebuild.bench.hints import place_of
from imagebuild.bench.judge import best_row, judge_results, judge_sources
from imagebuild.bench.logs import open_log
from imagebuild.bench.models import (
    STATES,
    BandwidthTest,
    DataPath,
    Hint,
    Judgement,
    Measurement,
    Openness,
    Results,
    Run,
    Source,
    State,
)
from imagebuild.bench.paired import judge_sides
from imagebuild.bench.read import read_files
from imagebuild.bench.verification import SPEED, VerifyResult
from imagebuild.core.advisory import Place, known_bad, shortened
from imagebuild.core.console import visible
from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_written
from imagebuild.report.sweeps import Sweep, find_sweeps

ClaimKind = Literal["data", "participation", "speed"]
Kind = Literal["sweep", "data", "participation", "speed", "path", "check", "reading"]
Overall = Literal["ok", "limited", "open", "failed", "nothing-read"]
"""The verdict of a report.

`ok`: all three claims hold for every result. `limited`: nothing failed and every requested claim holds, but some claims
were not requested, or the user accepted them with `--allow`. `open`: the output does not prove a requested claim."""

CLAIMS: tuple[ClaimKind, ...] = get_args(ClaimKind)
SHOWN_STATES: tuple[State, ...] = ("passed", "failed", "open", "skipped")
NONE = "\u2013"
"""The text for an unknown or absent value."""


class Entry(NamedTuple):
    """A result, its name, and the claims about it."""

    result: Measurement
    judgement: Judgement
    name: str
    """The subject of the result. If several results have the same subject, the name includes the file and a number."""
    sweep: Sweep | None
    """The sweep (the same benchmark on several groups of hosts) that contains the result, if any."""


class ReportRow(NamedTuple):
    """A row in the table of results: a result, a sweep, a diagnosis or a comparison with the baseline."""

    state: State
    """The state of the worst of the three claims."""
    name: str
    words: tuple[str, ...]
    """The claims about data, participation and speed; a dash if a claim is not applicable."""
    best: str
    """The best value, with its unit."""
    reason: str = ""
    """The reason for the claim about speed."""
    source: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells that all formats of the report show."""
        return self.name, *self.words, self.best


class Assertion(NamedTuple):
    """A statement that should hold, and whether it does."""

    kind: Kind
    source: str
    """The file with the result, or the image of a check."""
    subject: str
    state: State
    word: str
    """The outcome, as the claim or check names it: `wrong`, `too slow`, `skipped`, …"""
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    """The output of a failed check."""


class ReportOrigin(Model):
    """The origin of a report."""

    title: str
    created: str
    """Date and time in ISO 8601, UTC."""
    imagebuild: str
    """Version of imagebuild that wrote the report."""
    files: tuple[str, ...]
    """Files and folders, as named on the command line."""
    profile: str | None = None
    gpu: str | None = None
    """Compute capability of the GPUs of the profile."""
    baseline: str | None = None
    """The earlier report that the results were compared with."""
    allowed: tuple[Openness, ...] = ()
    allowed_loss: float = 0
    """By how many per cent a side of a paired comparison may be slower."""
    verdict: Overall | None = None
    """The verdict, for programs that read the JSON."""


class Report(Results):
    """A report. `imagebuild report --json` writes it."""

    about: ReportOrigin
    judgements: tuple[Judgement, ...] = ()
    """One judgement for each measured result, in the order of the results, then one for each run of dcgmi diag."""
    comparisons: tuple[Judgement, ...] = ()
    """The claims about each comparison with the baseline."""
    verifications: tuple[VerifyResult, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    nothing_in: tuple[str, ...] = ()
    """Files without a result that should have one: the user named them, or they look like the other logs in their
    folder."""

    @model_validator(mode="after")
    def _has_a_judgement_on_each_result(self) -> Self:
        others = len(self.judgements) - len(self.measured)
        if others < 0 or bool(others) != bool(self.diagnostics):
            raise ValueError("judgements: there must be one for each result")
        return self

    @property
    def sides(self) -> tuple[Judgement, ...]:
        """The claims about each side of each paired comparison."""
        return tuple(judged for pair in self.paired for judged in judge_sides(pair, self.about.allowed_loss))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The measured results: collectives, matrices and tables."""
        sweeps = [next((s for s in self.sweeps if s.holds(result)), None) for result in self.measured]
        names = unique_names([(result.subject, result.source) for result in self.measured])
        logs = {pair.source for pair in self.paired}  # their runs have one name
        pairs = zip(names, self.measured, strict=True)
        names = [re.sub(r" #\d+$", "", name) if result.source in logs else name for name, result in pairs]
        return tuple(map(Entry, self.measured, self.judgements, names, sweeps))

    @property
    def assertions(self) -> tuple[Assertion, ...]:
        """All assertions: failed ones first, then open ones, then the others in the order of the files."""
        return tuple(sorted(_assert_all(self), key=lambda assertion: min(STATES.index(assertion.state), 2)))

    @property
    def problems(self) -> tuple[Assertion, ...]:
        """The failed assertions, then the open ones."""
        return tuple(assertion for assertion in self.assertions if assertion.state in ("failed", "open"))

    @property
    def skips(self) -> tuple[Assertion, ...]:
        return tuple(assertion for assertion in self.assertions if assertion.state == "skipped")

    @property
    def notes(self) -> list[tuple[str, tuple[str, ...]]]:
        """What carried the data, causes of low speed, and other facts about results that did not fail, such as a
        warning of NCCL, each with its results."""
        noted: defaultdict[str, list[str]] = defaultdict(list)
        gpus = (self.about.gpu,) if self.about.gpu else ()
        for name, path in self.paths:
            if way := describe(path):
                noted[f"data path: {way}"].append(name)
            plugins = {path.plugin: path.plugin_version} if path.plugin else {}
            for software, version in ({"NCCL": path.version} | plugins).items():
                if faults := shortened(known_bad({software: version}, place_of(path, self.about.gpu))):
                    noted[f"known faults of {software} {version}: {faults}"].append(name)
        for verified in self.verifications:
            drivers = verified.surroundings.drivers if verified.surroundings else {}
            for software, version in drivers.items():
                if faults := shortened(known_bad({software: version}, Place(gpus=gpus))):
                    noted[f"known faults of {software} {version}: {faults}"].append(verified.image)
        for entry in self.entries:
            for hint in entry.judgement.hints:
                if not hint.is_fallback:
                    noted[f"look at: {hint}"].append(entry.name)
            if entry.result.verdict == "ok" and entry.judgement.speed.state != "too slow":
                for note in entry.result.notes:
                    noted[note].append(entry.name)
        return [(note, tuple(dict.fromkeys(names))) for note, names in noted.items()]

    @property
    def paths(self) -> list[tuple[str, DataPath]]:
        """What carried the data of each result, and of each file without results."""
        named = [(entry.name, entry.result.carried) for entry in self.entries]
        named += [(source.path, source.carried) for source in self.sources]
        return [(name, path) for name, path in named if path]

    @property
    def overall(self) -> Overall:
        if not (self.measured or self.diagnostics or self.verifications):
            return "nothing-read"
        assertions = self.assertions
        states = {assertion.state for assertion in assertions}
        if "failed" in states:
            return "failed"
        is_measured = "passed" in states or any(best_value(result) != NONE for result in self.measured)
        if "open" in states or not is_measured:
            return "open"
        return "limited" if any(a.state == "skipped" and a.kind in (*CLAIMS, "path") for a in assertions) else "ok"

    @property
    def state(self) -> State:
        """The state for the verdict: `skipped` for a limited report."""
        states: dict[Overall, State] = {"ok": "passed", "limited": "skipped", "open": "open"}
        return states.get(self.overall, "failed")

    @property
    def exit_status(self) -> int:
        """The exit status: 5 if nothing could be read, 1 if an assertion failed or is open, else 0."""
        return 5 if self.overall == "nothing-read" else int(self.state in ("failed", "open"))

    @property
    def counts(self) -> str:
        numbers = Counter(assertion.state for assertion in self.assertions)
        return ", ".join(f"{numbers[state]} {state}" for state in SHOWN_STATES)

    @property
    def headline(self) -> str:
        """The verdict, with the worst result, in one sentence."""
        assertions = self.assertions
        match self.overall:
            case "nothing-read":
                return "No result could be read"
            case "failed":
                failed = sum(assertion.state == "failed" for assertion in assertions)
                first = f"{one_line(assertions[0].subject)}: {assertions[0].word.replace('-', ' ')}"
                return first if failed == 1 else f"{failed} of {len(assertions)} failed: {first}"
            case "ok":
                speeds = {judgement.speed.words.partition(" as ")[0] for judgement in self.judgements}
                speed = " or ".join(word for word in ("fast enough", "above the floor") if word in speeds)
                return "All is well" + (f": data right, all took part, {speed}" if speed else "")
            case "open":
                return f"Not a pass: {_known_claims(assertions)}"
        known = _known_claims(assertions)
        accepted = f" (accepted: {', '.join(self.about.allowed)})" if self.about.allowed else ""
        return known[:1].upper() + known[1:] + accepted

    @property
    def unread_lines(self) -> int:
        """The number of lines in all files that look like results but could not be read."""
        return sum(source.unread for source in self.sources)


def _assert_all(report: Report) -> Iterator[Assertion]:
    """Yield an assertion for each thing that can fail. The three claims about a result are separate assertions."""
    for sweep in report.sweeps:
        for outlier in sweep.outliers:
            yield Assertion("sweep", sweep.subject, outlier.label, "failed", "slow", sweep.reason(outlier))
        if not sweep.outliers:
            reason = f"no run is below {sweep.limit_gb_s:.4g} GB/s"
            if sweep.word == "uneven":
                many = "no host stands out: many may be slow, or the network between them"
                reason = f"{sweep.subject}: {sweep.range}; {many}"
            yield Assertion("sweep", sweep.subject, sweep.scope, sweep.state, sweep.word, reason)
    allowed = report.about.allowed
    for judgement in (*report.judgements, *report.comparisons, *report.sides):
        claims = list(zip(CLAIMS, judgement.claims, strict=True))
        applicable = [(kind, claim) for kind, claim in claims if claim.standing()]
        for kind, claim in applicable or claims[:1]:
            state = claim.standing(allowed) or "skipped"
            yield Assertion(kind, judgement.source, judgement.subject, state, claim.state, claim.text(allowed))
        yield from _assert_path(judgement.source, judgement.subject, judgement.hints)
    for verification in report.verifications:
        # If a check measured something, `judgements` already has the claims of the check that judges its speed.
        measured = {(check.component, f"{check.check}{SPEED}") for check in verification.checks if check.results}
        for check in verification.checks:
            if not check.judgements or (check.component, check.check) not in measured:
                subject, state = f"{check.component} {check.check}", check.outcome
                facts = check.reason, check.seconds, check.output if state == "failed" else ""
                yield Assertion("check", verification.image, subject, state, state, *facts)
    for file in report.nothing_in:
        reason = "the file has no output of a known benchmark, no result of verify and no report"
        reason = next((f"{reason}; {s.note}" for s in report.sources if s.path == file and s.note), reason)
        yield Assertion("reading", file, file, "failed", "no-result", reason)
    for source in report.sources:
        yield from _assert_path(source.path, source.path, source.hints)
        if not source.tools and source.path not in report.nothing_in:
            note = source.note or "the file does not look like the logs in this folder"
            yield Assertion("reading", source.path, source.path, "skipped", "no-result", note)


def _assert_path(source: str, subject: str, hints: Iterable[Hint]) -> Iterator[Assertion]:
    """Yield an assertion for each fallback."""
    for hint in hints:
        if hint.is_fallback:
            yield Assertion("path", source, subject, "failed" if hint.is_wrong else "skipped", hint.kind, str(hint))


def rows_of(report: Report) -> list[ReportRow]:
    """Return the rows of the table of results.
    The order is: sweeps, results outside of sweeps, diagnoses, comparisons with the baseline."""
    entries, allowed = report.entries, report.about.allowed

    def state_of(judgement: Judgement) -> State:
        return judgement.worst(allowed).standing(allowed) or "skipped"

    rows = []
    for sweep in report.sweeps:
        own = [entry.judgement for entry in entries if entry.sweep is sweep]
        # The number of runs with each claim, such as `134 right, 2 wrong`.
        counts = [Counter(words).most_common() for words in zip(*map(words_of, own), strict=True)]
        words = [", ".join(word if n == len(own) else f"{n} {word}" for word, n in count) for count in counts]
        words[-1] += f"; {len(sweep.outliers) or ''} {sweep.word}".replace("  ", " ")
        state = min(sweep.state, *map(state_of, own), key=STATES.index)
        rows.append(ReportRow(state, f"{sweep.subject}: {sweep.scope}", tuple(words), sweep.range))
    logs = {pair.source for pair in report.paired}  # their runs are in the rows of their sides
    shown = [e for e in entries if not e.sweep and (e.result.source not in logs or e.result.verdict != "ok")]
    named = [(entry.judgement, entry.name, best_value(entry.result)) for entry in shown]
    named += [(judgement, judgement.subject, NONE) for judgement in report.judgements[len(entries) :]]
    for judgement in report.comparisons:
        speed = judgement.speed.measured
        now = NONE if speed is None else f"{format_number(speed)} GB/s"
        named.append((judgement, f"{judgement.subject}, compared with the baseline", now))
    for judgement in report.sides:
        change = judgement.speed.reason.rpartition(": ")[2].partition(";")[0]
        named.append((judgement, judgement.subject, NONE if judgement.speed.state == "not judged" else change))
    for judgement, name, best in named:
        facts = words_of(judgement), best, judgement.speed.reason, judgement.source
        rows.append(ReportRow(state_of(judgement), name, *facts))
    return rows


def words_of(judgement: Judgement) -> tuple[str, ...]:
    """Return the claims about data, participation and speed without reasons; a dash for one that is not applicable."""
    words = (judgement.data.state, judgement.participation.state, judgement.speed.words)
    return tuple(word if claim.standing() else NONE for claim, word in zip(judgement.claims, words, strict=True))


def _known_claims(assertions: Sequence[Assertion]) -> str:
    """Summarise the claims about data, participation and speed: `data right, speed not judged for 3 of 8`."""
    parts = []
    for kind in ("sweep", *CLAIMS, "path"):
        words = Counter((a.state, a.word) for a in assertions if a.kind == kind and a.word != "not applicable")
        weak = {word: count for (state, word), count in words.items() if state != "passed"}
        total = words.total()
        parts += [f"{kind} {word}" + (f" for {n} of {total}" if n < total else "") for word, n in weak.items()]
        if words and not weak and kind in CLAIMS:
            parts.append(f"{kind} {next(iter(words))[1]}")
    return ", ".join(parts) or "no claim says whether the results are right and fast enough"


def group_alike(assertions: Iterable[Assertion]) -> list[tuple[Assertion, tuple[str, ...]]]:
    """Group assertions with the same word and reason. Return the first assertion and all subjects of each group.
    A subject that occurs several times becomes `name (3 times)`."""
    groups: defaultdict[tuple[str, str], list[Assertion]] = defaultdict(list)
    for assertion in assertions:
        # The same cause may be in different lines of several logs.
        groups[assertion.word, re.sub(r"\bline \d+: ", "", assertion.reason)].append(assertion)
    result = []
    for group in groups.values():
        times = Counter(assertion.subject for assertion in group)
        subjects = tuple(name if count == 1 else f"{name} ({count} times)" for name, count in times.items())
        result.append((group[0], subjects))
    return result


# Files


def gather_files(named: Iterable[Path]) -> tuple[Report, list[Path], set[Path]]:
    """Return the report on files and folders, the log files, and the absolute paths of all files in the report.

    Results without claims in the files are judged without a profile. In a folder, files whose names begin with a dot
    are left out.

    A report in a folder that also has logs or results of verify is left out, because it may contain the same results.
    Raises ConfigError if a file cannot be opened, ResultError if compressed data or a file that imagebuild wrote cannot
    be read."""
    named = tuple(dict.fromkeys(named))
    contents = {file: read_own_file(file) for path in named for file in _files_in(path)}
    verified = {file: content for file, content in contents.items() if isinstance(content, VerifyResult)}
    others = [file for file, content in contents.items() if content is None]

    # Maps each file that verify wrote beside its result to whether the file is a log of a benchmark. Such logs are not
    # read again, because the result contains their values.
    kept: dict[Path, bool] = {}
    for file, verification in verified.items():
        folder = file.parent.resolve()
        kept |= {folder / check.log: check.results is not None for check in verification.checks if check.log}
        if verification.surroundings:
            kept |= {folder / name: False for name in verification.surroundings.reports.values()}
    unread = [file for file in others if file.resolve() not in kept]
    results = read_files(unread)
    reports = {file: content for file, content in contents.items() if isinstance(content, Report)}
    has_results = bool(verified) or any(source.tools for source in results.sources)
    left_out = [file for file in reports if has_results and file not in named]
    earlier = [report for file, report in reports.items() if file not in left_out]
    parts: list[tuple[Results, Sequence[Judgement]]] = [(results, judge_results(results))]
    parts += [part for verification in verified.values() for part in _judged_checks(verification)]
    parts += [(report, report.judgements) for report in earlier]
    merged = Results(**{kind: [r for part, _ in parts for r in getattr(part, kind)] for kind in Results.model_fields})
    # `Report` expects claims in the order of the results: runs, matrices, tables, then diagnoses.
    judged = [pair for part, claims in parts for pair in zip(part.measured, claims, strict=False)]
    judged.sort(key=lambda pair: get_args(Measurement).index(type(pair[0])))
    diagnoses = [claim for part, claims in parts for claim in claims[len(part.measured) :]]
    note = "a report beside logs may contain the same results; name the report to read it"
    notes = (Source(path=str(file), tools=(), lines=0, unread=0, note=note) for file in left_out)
    known = set(contents) - set(unread) | {Path(source.path) for source in results.sources if source.tools}
    empty = [str(path) for path in named if path not in known and not any(path in file.parents for file in known)]
    first, *more = named
    title = visible(first.resolve().name or str(first))
    written_by: list[ReportOrigin | VerifyResult] = [*(report.about for report in earlier), *verified.values()]
    about = ReportOrigin(
        title=f"{title} and {len(more)} more" if more else title, imagebuild=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"), files=tuple(map(str, named)),
        profile=next((written.profile for written in written_by if written.profile), None),
        gpu=next((written.about.gpu for written in earlier if written.about.gpu), None),
        baseline=earlier[0].about.baseline if earlier else None,
        allowed=tuple(dict.fromkeys(kind for written in written_by for kind in written.allowed)),
    )  # fmt: skip
    report = Report(
        **(dict(merged) | {"sources": judge_sources((*merged.sources, *notes))}),
        about=about,
        judgements=(*(judgement for _, judgement in judged), *diagnoses),
        sweeps=find_sweeps(merged.runs),
        comparisons=tuple(comparison for written in earlier for comparison in written.comparisons),
        verifications=(*verified.values(), *(result for written in earlier for result in written.verifications)),
        nothing_in=tuple(dict.fromkeys((*empty, *_lost_logs(results.sources)))),
    )
    logs = [file for file in others if kept.get(file.resolve(), True)]
    return report, logs, {file.resolve() for file in contents.keys() - left_out}


def _judged_checks(verification: VerifyResult) -> Iterator[tuple[Results, Sequence[Judgement]]]:
    """Yield the benchmark results of checks, with the claims of the check that judges their speed, if any.
    Raises ResultError if the number of claims is not the number of results."""
    judged = {(check.component, check.check): check.judgements for check in verification.checks if check.judgements}
    for check in verification.checks:
        if check.results:
            own = judge_results(check.results)
            judgements = judged.get((check.component, f"{check.check}{SPEED}"), own)
            if len(judgements) != len(own):
                problem = "the number of `judgements` does not match the number of results"
                raise ResultError(f"{check.component} {check.check}: {problem}")
            yield check.results, judgements


def _lost_logs(sources: Iterable[Source]) -> list[str]:
    """Return the files without a result that are probably logs of failed runs: they have the name of a log except for
    numbers, or contain only errors and lie beside several logs. An empty `job.err` beside `job.out` does not count."""

    def kind(path: PurePath) -> str:
        return re.sub(r"\d+", "0", path.name.removesuffix(".gz"))

    paths = {PurePath(source.path): source for source in sources}
    logs = [path for path, source in paths.items() if source.tools]
    kinds, stems = {kind(path) for path in logs}, {path.with_suffix("") for path in logs if path.suffix}
    lost = []
    for path, source in paths.items():
        is_beside = not source.lines and path.with_suffix("") in stems
        has_failed = source.is_lost and len(logs) > 1 and not is_beside
        if not source.tools and (kind(path) in kinds or has_failed):
            lost.append(source.path)
    return lost


def _files_in(path: Path) -> list[Path]:
    """Return the file, or all files in the folder except HTML pages.
    Raises ConfigError if a name is not UTF-8, or if a link leads outside the folder: the page contains the logs."""
    files = [path]
    if path.is_dir():
        inner = (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix != ".html")
        files = [file for file in inner if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        folder = path.resolve()
        if outside := next((file for file in files if not file.resolve().is_relative_to(folder)), None):
            problem = f"leads to {outside.resolve()}, which is outside {path}; remove the link, or name that file"
            raise ConfigError(f"{outside}: {problem}")
    for file in files:
        if re.search("[\ud800-\udfff]", str(file)):  # how Python represents bytes that are not UTF-8
            raise ConfigError(f"{visible(str(file))}: cannot be read: the file name is not UTF-8; rename the file")
    return files


def read_own_file(file: Path) -> VerifyResult | Report | None:
    """Return the contents of a file that imagebuild wrote, or None for another file.
    Raises ResultError if imagebuild wrote the file, but the contents are not valid."""
    try:
        with open_log(file) as opened:
            head = opened.read(4096)
            # Files of imagebuild begin with one of these keys. Other files may be large, so do not parse them here.
            if not head.lstrip().startswith(b"{") or not (b'"image"' in head or b'"runs"' in head):
                return None
            opened.seek(0)
            data = json.loads(opened.read())
    except (OSError, ValueError, RecursionError):
        return None
    if {"about", "runs", "sources"} <= data.keys():
        return read_written(Report, data, str(file))
    if {"image", "platform", "checks"} <= data.keys():
        return read_written(VerifyResult, data, str(file))
    return None


# Results in words


def unique_names(subjects: Sequence[tuple[str, str]]) -> list[str]:
    """Return a name for each pair of subject and file. Equal subjects get the file name and, if needed, a number."""
    times = Counter(subject for subject, _ in subjects)
    names = [f"{subject}, {PurePath(file).name}" if times[subject] > 1 else subject for subject, file in subjects]
    times, numbers, unique = Counter(names), Counter[str](), []
    for name in names:
        numbers[name] += 1
        unique.append(f"{name} #{numbers[name]}" if times[name] > 1 else name)
    return unique


def best_value(result: Measurement) -> str:
    """Return the best value of a result with its unit.

    * For a run of nccl-tests: the bus bandwidth that is judged, such as `482.3 GB/s at 8 GiB`.
    * For a matrix: the lowest and the highest value, such as `374.0 to 395.2 GB/s`.
    * For a table: the highest average bandwidth, or the lowest typical (else average) latency, such as `1.92 µs at 2
      B`."""
    value, size = None, None
    unit: str | None = "GB/s"
    if isinstance(result, BandwidthTest):
        least, most = (format_number(choose(result.pairs, default=None)) for choose in (min, max))
        shown = least if least == most else f"{least} to {most}"
        return f"{shown} {result.unit or '(unit unknown)'}" if result.pairs else NONE
    if isinstance(result, Run):
        value, size = best_row(result)
    elif result.best:
        value, size, unit = result.best.bw_average, result.best.size_bytes, result.unit
    else:
        for row in result.rows:
            known = row.latency_us or {}
            time = next((known[name] for name in ("typical", "average", *known) if name in known), None)
            if time is not None and (value is None or time < value):
                value, size, unit = time, row.size_bytes, "µs"
    if value is None:
        return NONE
    return f"{format_number(value)} {unit or '(unit unknown)'}" + ("" if size is None else f" at {format_bytes(size)}")


def format_bytes(size: int) -> str:
    """Return a size in binary units with up to two decimals, such as `512 B`, `1 GiB` or `1.5 MiB`."""
    power = min(max(0, size.bit_length() - 1) // 10, 4)
    return f"{round(size / 1024**power, 2):g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_number(value: float | None) -> str:
    """Return a number with four significant digits, or as an integer from 1000 on; a dash for None."""
    if value is None:
        return NONE
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def one_line(text: str, limit: int = 300) -> str:
    """Return the text on one line, shortened to `limit` characters."""
    text = " ".join(visible(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
