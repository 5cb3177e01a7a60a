"""Define what a report says: what was read, the claims about it, and an assertion for each thing that can fail.

The terminal, JSON, Markdown, JUnit and the page show this model. Pure, except that `gather_files` reads files.
"""

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
from imagebuild.bench.judge import best_row, judge_results
from imagebuild.bench.logs import open_log
from imagebuild.bench.models import (
    STATES,
    BandwidthTest,
    Judgement,
    Measurement,
    Openness,
    Results,
    Run,
    Source,
    State,
)
from imagebuild.bench.read import read_files
from imagebuild.bench.verification import SPEED, VerifyResult
from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_written
from imagebuild.report.sweeps import Sweep, find_sweeps

ClaimKind = Literal["data", "participation", "speed"]
Kind = Literal["sweep", "data", "participation", "speed", "check", "reading"]
Overall = Literal["ok", "limited", "open", "failed", "nothing-read"]
"""`ok`: all three claims hold for every result. `limited`: nothing failed and nothing that was asked for is open, but
something was not asked for, or was accepted by name."""

CLAIMS: tuple[ClaimKind, ...] = get_args(ClaimKind)
SHOWN_STATES: tuple[State, ...] = ("passed", "failed", "open", "skipped")
NONE = "\u2013"
"""Shown for a value that is unknown or absent."""


class Entry(NamedTuple):
    """Hold a result in words, with the claims about it."""

    result: Measurement
    judgement: Judgement
    name: str
    """The subject, with file and number where several results of a kind have the same."""
    sweep: Sweep | None


class ReportRow(NamedTuple):
    """Hold a row of the table of results: a result, a sweep, a diagnosis or a comparison with the baseline."""

    state: State
    """What the worst claim counts as."""
    name: str
    words: tuple[str, ...]
    """What is claimed about data, participation and speed; a dash for nothing."""
    best: str
    reason: str = ""
    """Of the claim about speed."""
    source: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return what all forms of the report show of it."""
        return self.name, *self.words, self.best


class Assertion(NamedTuple):
    """State something that should hold, and whether it does."""

    kind: Kind
    source: str
    """The file, or for a check the image."""
    subject: str
    state: State
    word: str
    """The result as the judge or check words it: `wrong`, `too slow`, `skipped`."""
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    """Of a check that failed."""


class ReportOrigin(Model):
    """Say where a report comes from."""

    title: str
    created: str
    """ISO 8601, UTC."""
    imagebuild: str
    """Version of imagebuild that wrote the report."""
    files: tuple[str, ...]
    """Files and folders, as they were named."""
    profile: str | None = None
    baseline: str | None = None
    """Earlier report that results were compared with."""
    allowed: tuple[Openness, ...] = ()
    verdict: Overall | None = None
    """For programs that read the file."""


class Report(Results):
    """Hold the results that were read and the claims about them; the file that `imagebuild report --json` writes."""

    about: ReportOrigin
    judgements: tuple[Judgement, ...] = ()
    """Claims about each result that was measured, in their order, then about each dcgmi diag."""
    comparisons: tuple[Judgement, ...] = ()
    """Claims about each comparison with a baseline."""
    verifications: tuple[VerifyResult, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    nothing_in: tuple[str, ...] = ()
    """Files without a result that were named, or that look like logs of the folder that they are in."""

    @model_validator(mode="after")
    def _has_a_judgement_on_each_result(self) -> Self:
        others = len(self.judgements) - len(self.measured)
        if others < 0 or bool(others) != bool(self.diagnostics):
            raise ValueError("judgements: there must be one for each result")
        return self

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return everything that was measured: collectives, matrices, tables."""
        sweeps = [next((s for s in self.sweeps if s.holds(result)), None) for result in self.measured]
        names = unique_names([(result.subject, result.source) for result in self.measured])
        return tuple(map(Entry, self.measured, self.judgements, names, sweeps))

    @property
    def assertions(self) -> tuple[Assertion, ...]:
        """Return all assertions, failed and open ones first, otherwise in the order of the files."""
        return tuple(sorted(_assert_all(self), key=lambda assertion: min(STATES.index(assertion.state), 2)))

    @property
    def problems(self) -> tuple[Assertion, ...]:
        """Return the assertions that do not hold, then those that are open."""
        return tuple(assertion for assertion in self.assertions if assertion.state in ("failed", "open"))

    @property
    def skips(self) -> tuple[Assertion, ...]:
        return tuple(assertion for assertion in self.assertions if assertion.state == "skipped")

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
        return "limited" if any(a.state == "skipped" and a.kind in CLAIMS for a in assertions) else "ok"

    @property
    def state(self) -> State:
        """Return what the verdict counts as; `skipped` if it is limited."""
        states: dict[Overall, State] = {"ok": "passed", "limited": "skipped", "open": "open"}
        return states.get(self.overall, "failed")

    @property
    def exit_status(self) -> int:
        """Return 5 if nothing could be read, 1 if something failed or is open, else 0."""
        return 5 if self.overall == "nothing-read" else int(self.state in ("failed", "open"))

    @property
    def counts(self) -> str:
        numbers = Counter(assertion.state for assertion in self.assertions)
        return ", ".join(f"{numbers[state]} {state}" for state in SHOWN_STATES)

    @property
    def headline(self) -> str:
        """Return the worst result, in one sentence."""
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
        """Return the number of lines, in all files, that look like a result and could not be read."""
        return sum(source.unread for source in self.sources)


def _assert_all(report: Report) -> Iterator[Assertion]:
    """Yield an assertion for each thing that can fail; the three claims about a result are separate ones."""
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
    for judgement in (*report.judgements, *report.comparisons):
        claims = list(zip(CLAIMS, judgement.claims, strict=True))
        applicable = [(kind, claim) for kind, claim in claims if claim.standing()]
        for kind, claim in applicable or claims[:1]:
            reason, state = claim.reason, claim.standing(allowed) or "skipped"
            if claim.allow:
                hint = "accepted by" if claim.allow in allowed else "to accept it:"
                reason += f" ({hint} --allow {claim.allow})"
            yield Assertion(kind, judgement.source, judgement.subject, state, claim.state, reason)
    for verification in report.verifications:
        # The claims about the speed of what other checks measured are among `judgements`.
        measured = {(check.component, f"{check.check}{SPEED}") for check in verification.checks if check.results}
        for check in verification.checks:
            if not check.judgements or (check.component, check.check) not in measured:
                subject, state = f"{check.component} {check.check}", check.outcome
                facts = check.reason, check.seconds, check.output if state == "failed" else ""
                yield Assertion("check", verification.image, subject, state, state, *facts)
    for file in report.nothing_in:
        reason = "it has no output of a known benchmark, no result of verify and no report"
        yield Assertion("reading", file, file, "failed", "no-result", reason)
    for source in report.sources:
        if not source.tools and source.path not in report.nothing_in:
            note = source.note or "it does not look like a log of this folder"
            yield Assertion("reading", source.path, source.path, "skipped", "no-result", note)


def rows_of(report: Report) -> list[ReportRow]:
    """Return the table of results: sweeps, results that are part of none, diagnoses, comparisons with the baseline."""
    entries, allowed = report.entries, report.about.allowed

    def state_of(judgement: Judgement) -> State:
        return judgement.worst(allowed).standing(allowed) or "skipped"

    rows = []
    for sweep in report.sweeps:
        own = [entry.judgement for entry in entries if entry.sweep is sweep]
        # How many of its runs have each claim: `134 right, 2 wrong`.
        counts = [Counter(words).most_common() for words in zip(*map(words_of, own), strict=True)]
        words = [", ".join(word if n == len(own) else f"{n} {word}" for word, n in count) for count in counts]
        words[-1] += f"; {len(sweep.outliers) or ''} {sweep.word}".replace("  ", " ")
        state = min(sweep.state, *map(state_of, own), key=STATES.index)
        rows.append(ReportRow(state, f"{sweep.subject}: {sweep.scope}", tuple(words), sweep.range))
    named = [(entry.judgement, entry.name, best_value(entry.result)) for entry in entries if not entry.sweep]
    named += [(judgement, judgement.subject, NONE) for judgement in report.judgements[len(entries) :]]
    for judgement in report.comparisons:
        speed = judgement.speed.measured
        now = NONE if speed is None else f"{format_number(speed)} GB/s"
        named.append((judgement, f"{judgement.subject}, since the baseline", now))
    for judgement, name, best in named:
        facts = words_of(judgement), best, judgement.speed.reason, judgement.source
        rows.append(ReportRow(state_of(judgement), name, *facts))
    return rows


def words_of(judgement: Judgement) -> tuple[str, ...]:
    """Return what is claimed about data, participation and speed, without reasons; a dash for nothing."""
    words = (judgement.data.state, judgement.participation.state, judgement.speed.words)
    return tuple(word if claim.standing() else NONE for claim, word in zip(judgement.claims, words, strict=True))


def _known_claims(assertions: Sequence[Assertion]) -> str:
    """Return what is known of data, participation and speed: `data right, speed not judged for 3 of 8`."""
    parts = []
    for kind in ("sweep", *CLAIMS):
        words = Counter((a.state, a.word) for a in assertions if a.kind == kind and a.word != "not applicable")
        weak = {word: count for (state, word), count in words.items() if state != "passed"}
        total = words.total()
        parts += [f"{kind} {word}" + (f" for {n} of {total}" if n < total else "") for word, n in weak.items()]
        if words and not weak and kind != "sweep":
            parts.append(f"{kind} {next(iter(words))[1]}")
    return ", ".join(parts) or "nothing says whether it is right and fast enough"


def group_alike(assertions: Iterable[Assertion]) -> list[tuple[Assertion, tuple[str, ...]]]:
    """Return the first assertion of those with the same word and reason, and the subjects of all.

    A subject that occurs several times is `name (3 times)`.
    """
    groups: defaultdict[tuple[str, str], list[Assertion]] = defaultdict(list)
    for assertion in assertions:
        groups[assertion.word, assertion.reason].append(assertion)
    result = []
    for group in groups.values():
        times = Counter(assertion.subject for assertion in group)
        subjects = tuple(name if count == 1 else f"{name} ({count} times)" for name, count in times.items())
        result.append((group[0], subjects))
    return result


# What files contain


def gather_files(named: Iterable[Path]) -> tuple[Report, list[Path], set[Path]]:
    """Read files, and all files of folders whose names do not begin with a dot.

    Return a report with the claims that the files have (results without any are judged without a profile), the files
    with output of benchmarks, and what the report is made from, as absolute paths. A report in a folder with logs or
    results of verify is left out, as it may say the same. Raises ConfigError if a file cannot be opened, ResultError if
    a file that imagebuild wrote, or compressed data, cannot be read.
    """
    named = tuple(dict.fromkeys(named))
    contents = {file: read_own_file(file) for path in named for file in _files_in(path)}
    verified = {file: content for file, content in contents.items() if isinstance(content, VerifyResult)}
    others = [file for file, content in contents.items() if content is None]

    # Files that verify kept beside its result → whether they are output of a benchmark, which was read at that time.
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
    # The claims in the order of the results: of all runs, all matrices, all tables, then of the diagnoses.
    judged = [pair for part, claims in parts for pair in zip(part.measured, claims, strict=False)]
    judged.sort(key=lambda pair: get_args(Measurement).index(type(pair[0])))
    diagnoses = [claim for part, claims in parts for claim in claims[len(part.measured) :]]
    note = "a report beside logs, which may say the same; name it to read it"
    notes = (Source(path=str(file), tools=(), lines=0, unread=0, note=note) for file in left_out)
    known = set(contents) - set(unread) | {Path(source.path) for source in results.sources if source.tools}
    empty = [str(path) for path in named if path not in known and not any(path in file.parents for file in known)]
    first, *more = named
    title = visible(first.resolve().name or str(first))
    about = ReportOrigin(
        title=f"{title} and {len(more)} more" if more else title,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        imagebuild=__version__,
        files=tuple(map(str, named)),
        **(earlier[0].about.model_dump(include={"profile", "baseline", "allowed"}) if earlier else {}),
    )
    report = Report(
        **(dict(merged) | {"sources": (*merged.sources, *notes)}),
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
    """Yield the results of checks with their claims: those of the check of their speed, if there is one.

    Raises ResultError if these are not about the results.
    """
    judged = {(check.component, check.check): check.judgements for check in verification.checks if check.judgements}
    for check in verification.checks:
        if check.results:
            own = judge_results(check.results)
            judgements = judged.get((check.component, f"{check.check}{SPEED}"), own)
            if len(judgements) != len(own):
                raise ResultError(f"{check.component} {check.check}: its judgements are not about its results")
            yield check.results, judgements


def _lost_logs(sources: Iterable[Source]) -> list[str]:
    """Return the files without a result that may be logs of runs that left none.

    Such a file is named like a log but for numbers, or holds nothing but errors and lies beside several logs. Beside a
    single log, errors may be what workers of the job wrote. An empty `job.err` beside `job.out` is no log.
    """

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
    """Return the file, or all of the folder but pages, as `--html` writes. Raises ConfigError for a name JSON lacks."""
    files = [path]
    if path.is_dir():
        inner = (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix != ".html")
        files = [file for file in inner if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    for file in files:
        if re.search("[\ud800-\udfff]", str(file)):  # what Python makes of other bytes
            raise ConfigError(f"{visible(str(file))}: cannot be read: its name is not UTF-8; rename it")
    return files


def read_own_file(file: Path) -> VerifyResult | Report | None:
    """Return what imagebuild wrote into a file, None for a file of others. Raises ResultError if it is invalid."""
    try:
        with open_log(file) as opened:
            head = opened.read(4096)
            # Files of imagebuild begin with one of these keys; files of benchmarks, which may be large, are read once.
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
    """Return names for pairs of subject and file: equal subjects also have the file and, if needed, a number."""
    times = Counter(subject for subject, _ in subjects)
    names = [f"{subject}, {PurePath(file).name}" if times[subject] > 1 else subject for subject, file in subjects]
    times, numbers, unique = Counter(names), Counter[str](), []
    for name in names:
        numbers[name] += 1
        unique.append(f"{name} #{numbers[name]}" if times[name] > 1 else name)
    return unique


def best_value(result: Measurement) -> str:
    """Return the best value of a result.

    * a run of nccl-tests: the bus bandwidth that is judged, `482.3 GB/s at 8 GiB`
    * a matrix: the least and the highest value of its pairs, `374.0 to 395.2 GB/s`
    * a table: the highest average bandwidth, or the least typical (else average) latency, `1.92 µs at 2 B`
    """
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


# Numbers and texts


def format_bytes(size: int) -> str:
    """Return a size in binary units with up to two decimals: `512 B`, `1 GiB`, `1.5 MiB`."""
    power = min(max(0, size.bit_length() - 1) // 10, 4)
    return f"{round(size / 1024**power, 2):g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_number(value: float | None) -> str:
    """Return a measurement with four digits, or all before the point; a dash if it is unknown."""
    if value is None:
        return NONE
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


TERMINAL_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Sequences that colour text, move the cursor or set the title of a terminal."""
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters, characters that change the direction of text, and characters that XML forbids."""


def visible(text: str) -> str:
    """Return the text without anything that acts on the program that shows it, and with line ends of Unix."""
    text = TERMINAL_SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return INVISIBLE.sub("\ufffd", text)


def one_line(text: str, limit: int = 300) -> str:
    """Return the text for a cell of a table: without line ends, and at most `limit` characters long."""
    text = " ".join(visible(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
