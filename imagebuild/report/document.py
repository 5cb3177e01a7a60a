"""Define what a report says: what was read, the verdicts on it, and an assertion for each thing that can fail.

The terminal, JSON, Markdown, JUnit and the page show this model. Pure, except that `gather_files` reads files.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any, Literal, Self, get_args

from imagebuild import __version__
from imagebuild.bench.judge import best_row, device_pairs, judge_results
from imagebuild.bench.logs import DAMAGED, open_log
from imagebuild.bench.models import (
    STANDINGS,
    BandwidthTest,
    Claim,
    Diagnostic,
    Judgement,
    Openness,
    PerftestTable,
    Results,
    Run,
    Source,
    SpeedClaim,
    UcxResult,
)
from imagebuild.bench.read import read_files
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_written
from imagebuild.project.records import VerifyResult
from imagebuild.report.sweeps import Sweep, find_sweeps, host_label

Result = Run | BandwidthTest | PerftestTable | UcxResult
ClaimKind = Literal["data", "participation", "speed"]
Kind = Literal["sweep", "data", "participation", "speed", "check", "diagnostic", "reading"]
State = Literal["passed", "failed", "open", "skipped"]
"""`open` is what was asked for and is not known: no success."""
Overall = Literal["ok", "limited", "open", "failed", "nothing-read"]
"""`ok`: all three claims hold for every result. `limited`: nothing failed and nothing that was asked for is open, but
something was not asked for, or was accepted by name."""

CLAIMS: tuple[ClaimKind, ...] = get_args(ClaimKind)
STATES: tuple[State, ...] = get_args(State)
OUTCOMES: tuple[State, ...] = ("passed", "failed", "skipped")
"""States that checks of images can have."""
EXIT_STATUS: dict[Overall, int] = {"ok": 0, "limited": 0, "open": 1, "failed": 1, "nothing-read": 5}

DIAGNOSTIC_STATES: dict[str, State] = {"pass": "passed", **dict.fromkeys(("warn", "skip", "not-run"), "skipped")}
"""Words of dcgmi. Every other word is a failure; what was skipped is judged with all of the file's tests."""


@dataclass(frozen=True)
class Entry:
    """Hold a result in words, with the claims about it."""

    result: Result
    name: str
    """The subject, with file (in a sweep: hosts) and number where several results of a kind have the same."""
    best: str
    judgements: tuple[Judgement, ...]
    """That of the result itself, then comparisons with a baseline."""
    state: State
    """What the worst claim counts as."""
    sweep: Sweep | None = None
    """The sweep that it belongs to."""

    @property
    def data(self) -> Claim:
        """Return the claim about its data."""
        return self.judgements[0].data

    @property
    def participation(self) -> Claim:
        """Return the claim about who took part."""
        return self.judgements[0].participation

    @property
    def speed(self) -> tuple[SpeedClaim, ...]:
        """Return the claims about its speed."""
        return tuple(judgement.speed for judgement in self.judgements)

    @property
    def words(self) -> tuple[str, str, str]:
        """Return what is claimed about data, participation and speed, without reasons; a dash for nothing."""
        speeds = dict.fromkeys(claim.words for claim in self.speed if not_void(claim))
        data, participation = (claim.state if not_void(claim) else NONE for claim in self.judgements[0].claims[:2])
        return data, participation, "; ".join(speeds) or NONE

    @property
    def judged(self) -> SpeedClaim | None:
        """Return the first claim that compares it with a ceiling."""
        return next((v for v in self.speed if v.ceiling and v.measured is not None), None)

    @property
    def share_of_ceiling(self) -> float | None:
        """Return the measured part of the ceiling, None without one."""
        verdict = self.judged
        return verdict.measured / verdict.ceiling.value if verdict and verdict.ceiling and verdict.measured else None


@dataclass(frozen=True)
class Assertion:
    """State something that should hold, and whether it does."""

    kind: Kind
    source: str
    """The file, or for a check the image."""
    subject: str
    state: State
    word: str
    """The result as the benchmark, judge or check words it: `wrong`, `too slow`, `skip`."""
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    """Output of a check that failed."""


class ReportOrigin(Model):
    """Say where a report comes from."""

    title: str
    created: str
    """Time of the report, ISO 8601, UTC."""
    imagebuild: str
    """Version of imagebuild that wrote the report."""
    files: tuple[str, ...]
    """Files and folders that were read, as they were named."""
    profile: str | None = None
    """Profile of the hardware that results were compared with."""
    baseline: str | None = None
    """Earlier report that results were compared with."""
    allowed: tuple[Openness, ...] = ()
    """Kinds of claims that were accepted by name."""
    verdict: Overall | None = None
    """Verdict on everything, for programs that read the file."""


class Report(Results):
    """Hold the results that were read and the verdicts on them; the file that `imagebuild report --json` writes."""

    about: ReportOrigin
    judgements: tuple[Judgement, ...] = ()
    """Claims about each result, and about each comparison with a baseline."""
    verifications: tuple[VerifyResult, ...] = ()
    """Results of `imagebuild verify`."""
    sweeps: tuple[Sweep, ...] = ()
    """What runs on many groups of hosts say about single hosts."""
    nothing_in: tuple[str, ...] = ()
    """Files without a result that were named, or that look like logs of the folder that they are in."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with these fields changed, which computes everything anew."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy

    @property
    def measured(self) -> tuple[Result, ...]:
        """Return all results that have bandwidths or times."""
        return (*self.runs, *self.tests, *self.tables, *self.ucx)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Return everything that was measured: collectives, matrices, tables of perftest, results of ucx_perftest."""
        judgements, allowed, entries = _judgements_of(self), self.about.allowed, []
        sweeps = [next((s for s in self.sweeps if s.holds(result)), None) for result in self.measured]
        places = [
            host_label(result.hosts) if sweep and isinstance(result, Run) else result.source
            for result, sweep in zip(self.measured, sweeps, strict=True)
        ]
        names = unique_names([(result.subject, place) for result, place in zip(self.measured, places, strict=True)])
        for result, name, sweep in zip(self.measured, names, sweeps, strict=True):
            own = tuple(judgements[id(result)])
            claims = (judgement.worst(allowed) for judgement in own)
            worst = min(claims, key=lambda claim: STANDINGS.index(claim.standing(allowed)))
            entries.append(Entry(result, name, best_value(result), own, claim_state(worst, allowed), sweep))
        return tuple(entries)

    @cached_property
    def assertions(self) -> tuple[Assertion, ...]:
        """Return all assertions, failed and open ones first, otherwise in the order of the files.

        The three claims about a result are separate assertions.
        """
        assertions = [*assertions_on_sweeps(self.sweeps), *assertions_on_diagnostics(self.diagnostics)]
        for judgement in self.judgements:
            assertions += assertions_on_claims(judgement, self.about.allowed)
        for verification in self.verifications:
            assertions += assertions_of_checks(verification)
        reason = "it has no output of a known benchmark, no result of verify and no report"
        assertions += [Assertion("reading", file, file, "failed", "no-result", reason) for file in self.nothing_in]
        for source in self.sources:
            if source.damage:
                assertions.append(Assertion("reading", source.path, source.path, "failed", "damaged", source.damage))
            elif not source.tools and source.path not in self.nothing_in:
                note = "it does not look like a log of this folder"
                assertions.append(Assertion("reading", source.path, source.path, "skipped", "no-result", note))
        order = {"failed": 0, "open": 1}
        return tuple(sorted(assertions, key=lambda assertion: order.get(assertion.state, 2)))

    @cached_property
    def problems(self) -> tuple[Assertion, ...]:
        """Return the assertions that do not hold, then those that are open."""
        return tuple(assertion for assertion in self.assertions if assertion.state in ("failed", "open"))

    @property
    def skips(self) -> tuple[Assertion, ...]:
        """Return the assertions that were skipped."""
        return tuple(assertion for assertion in self.assertions if assertion.state == "skipped")

    @cached_property
    def overall(self) -> Overall:
        """Return the verdict on everything."""
        if not (self.measured or self.diagnostics or self.verifications):
            return "nothing-read"
        states = {assertion.state for assertion in self.assertions}
        if "failed" in states:
            return "failed"
        is_measured = "passed" in states or any(entry.best != NONE for entry in self.entries)
        if "open" in states or not is_measured:
            return "open"
        return "limited" if any(skip.kind in CLAIMS for skip in self.skips) else "ok"

    @property
    def exit_status(self) -> int:
        """Return 5 if nothing could be read or a file is damaged, 1 if something failed or is open, else 0."""
        return EXIT_STATUS["nothing-read" if any(source.damage for source in self.sources) else self.overall]

    @property
    def counts(self) -> str:
        """Return the numbers of assertions: `12 passed, 1 failed, 3 skipped`."""
        numbers = Counter(assertion.state for assertion in self.assertions)
        return ", ".join(f"{numbers[state]} {state}" for state in STATES)

    @property
    def headline(self) -> str:
        """Return the worst result, in one sentence."""
        overall, assertions = self.overall, self.assertions
        if overall == "nothing-read":
            return "No result could be read"
        if overall == "ok":
            speeds = {judgement.speed.words.partition(" as ")[0] for judgement in self.judgements}
            speed = " or ".join(word for word in ("fast enough", "above the floor") if word in speeds) or "fast enough"
            return "All is well" + (f": data right, all took part, {speed}" if self.judgements else "")
        if overall != "failed":
            known = _headline_of_claims(assertions)
            accepted = f" (accepted: {', '.join(self.about.allowed)})" if self.about.allowed else ""
            return {"open": f"Not a pass: {known}", "limited": known[:1].upper() + known[1:] + accepted}[overall]
        failures = [assertion for assertion in assertions if assertion.state == "failed"]
        first = f"{one_line(failures[0].subject)}: {failures[0].word.replace('-', ' ')}"
        if len(failures) == 1:
            return first
        if failures[0].kind == "sweep":
            return f"{first}, and {len(failures) - 1} more of {len(assertions)} assertions failed"
        words = Counter(failure.word.replace("-", " ") for failure in failures)
        numbers = ", ".join(f"{count} {word}" for word, count in words.most_common(4))
        return f"{len(failures)} of {len(assertions)} assertions failed: {numbers}{' …' if len(words) > 4 else ''}"

    @property
    def unread_lines(self) -> int:
        """Return the number of lines, in all files, that look like a result and could not be read."""
        return sum(source.unread for source in self.sources)


# Assertions


def assertions_on_sweeps(sweeps: Sequence[Sweep]) -> list[Assertion]:
    """Assert that no host, pair or larger group is slow; slow hosts come first, then what is farthest off."""
    slow = [(sweep, outlier) for sweep in sweeps for outlier in sweep.outliers]
    slow.sort(key=lambda item: (len(item[1].hosts), -item[0].shortfall(item[1])))
    found = [Assertion("sweep", s.subject, outlier.label, "failed", "slow", s.reason(outlier)) for s, outlier in slow]
    for sweep in sweeps:
        if sweep.is_even:
            reason = f"no run is below {sweep.limit_gb_s:.4g} GB/s"
            found.append(Assertion("sweep", sweep.subject, sweep.scope, "passed", "even", reason))
        elif not sweep.outliers:
            reason = (
                f"{sweep.subject}: {sweep.range}; no host stands out: many may be slow, or the network between them"
            )
            found.append(Assertion("sweep", sweep.subject, sweep.scope, "open", "uneven", reason))
    return found


def summary_of(sweep: Sweep, entries: Sequence[Entry]) -> tuple[State, tuple[str, ...]]:
    """Return the state of a sweep, and how many of its runs have each claim: `134 right, 2 wrong`."""
    members = [entry for entry in entries if entry.sweep is sweep]
    counts = [Counter(entry.words[place] for entry in members) for place in range(len(CLAIMS))]
    words = [", ".join(w if n == len(members) else f"{n} {w}" for w, n in c.most_common()) for c in counts]
    words[-1] += f"; {len(sweep.outliers)} slow" if sweep.outliers else "; even" if sweep.is_even else "; uneven"
    own: State = "failed" if sweep.outliers else "passed" if sweep.is_even else "open"
    states = {own, *(entry.state for entry in members)}
    order: tuple[State, ...] = ("failed", "open", "skipped")
    return next((state for state in order if state in states), "passed"), tuple(words)


def assertions_on_claims(judgement: Judgement, allowed: Sequence[Openness]) -> list[Assertion]:
    """Assert each claim that is applicable; if none is, skip the one about data."""
    claims = [(kind, claim) for kind, claim in zip(CLAIMS, judgement.claims, strict=True) if not_void(claim)]
    assertions = []
    for kind, claim in claims or [("data", judgement.data)]:
        state, reason = claim_state(claim, allowed), claim.reason
        if claim.allow:
            hint = "accepted by" if claim.allow in allowed else "to accept it:"
            reason += f" ({hint} --allow {claim.allow})"
        # Each diagnosis has an assertion of its own, which says whether it passed.
        if judgement.subject != DIAGNOSIS or kind != "data" or state == "open":
            assertions.append(Assertion(kind, judgement.source, judgement.subject, state, claim.state, reason))
    return assertions


DIAGNOSIS = "dcgmi diag"
"""Subject of judgements on all diagnostics of a file."""


def not_void(claim: Claim) -> bool:
    """Return whether a claim says anything."""
    return claim.state != "not applicable"


def claim_state(claim: Claim, allowed: Sequence[Openness] = ()) -> State:
    """Return what a claim counts as."""
    standing = claim.standing(allowed)
    return standing if standing in ("passed", "failed", "open") else "skipped"


def _headline_of_claims(assertions: Sequence[Assertion]) -> str:
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


def assertions_on_diagnostics(diagnostics: Sequence[Diagnostic]) -> list[Assertion]:
    """Assert that the hardware passes its tests; a subject names what the test was about, if not everything."""
    assertions = []
    for diagnostic in diagnostics:
        subject = f"{diagnostic.test}, {diagnostic.entity}" if diagnostic.entity else diagnostic.test
        state = DIAGNOSTIC_STATES.get(diagnostic.status, "failed")
        reason = "; ".join(diagnostic.messages)
        assertions.append(Assertion("diagnostic", diagnostic.source, subject, state, diagnostic.status, reason))
    return assertions


def assertions_of_checks(verification: VerifyResult) -> list[Assertion]:
    """Assert that the checks of an image pass, except checks of speed: their verdicts are in `judgements`."""
    assertions = []
    for check in verification.checks:
        if not check.judgements:
            subject, state = f"{check.component} {check.check}", check.outcome
            output = check.output if state == "failed" else ""
            facts = check.reason, check.seconds, output
            assertions.append(Assertion("check", verification.image, subject, state, state, *facts))
    return assertions


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

HEAD_BYTES = 4096
"""Bytes at the beginning of a file that show whether imagebuild may have written it; only then is all of it read."""


@dataclass(frozen=True)
class Gathered:
    """Hold what some files contain."""

    report: Report
    """With the verdicts on speed that the files have."""
    logs: tuple[Path, ...]
    """Files with output of benchmarks, including those that verify kept."""
    read: frozenset[Path]
    """Files that the report is made from, as absolute paths: what is written must not replace them."""


def gather_files(named: Iterable[Path]) -> Gathered:
    """Read files, and all files of folders whose names do not begin with a dot.

    A report in a folder is left out if it says only what files beside it say. Raises ConfigError if a file cannot be
    opened, ResultError if a file that imagebuild wrote cannot be read.
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
    checks = [check for verification in verified.values() for check in verification.checks]
    parts = [results, *(check.results for check in checks if check.results)]
    fresh = Counter(_texts_of(*parts, *verified.values()))
    reports = {file: content for file, content in contents.items() if isinstance(content, Report)}
    beside = [file for file in reports if file not in named]
    repeated = {f for f in beside if Counter(_texts_of(reports[f], *reports[f].verifications)) <= fresh}
    earlier = [report for file, report in reports.items() if file not in repeated]
    parts += earlier
    read = {Path(source.path) for source in results.sources if source.tools or source.damage}
    known = set(contents) - set(unread) | read
    empty = [path for path in named if path not in known and not any(path in file.parents for file in known)]
    lost = _lost_logs(results.sources) if read else []
    verdicts = [verdict for check in checks for verdict in check.judgements]
    merged: dict[str, Any] = {
        kind: tuple(result for part in parts for result in getattr(part, kind)) for kind in Results.model_fields
    }
    first, *more = named
    title = visible(first.resolve().name or str(first))
    report = Report(
        about=ReportOrigin(
            title=f"{title} and {len(more)} more" if more else title,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            imagebuild=__version__,
            files=tuple(map(str, named)),
            **(earlier[0].about.model_dump(include={"profile", "baseline", "allowed"}) if earlier else {}),
        ),
        **merged,
        sweeps=find_sweeps(merged["runs"]),
        judgements=(*verdicts, *(verdict for written in earlier for verdict in written.judgements)),
        verifications=(*verified.values(), *(result for written in earlier for result in written.verifications)),
        nothing_in=tuple(dict.fromkeys(map(str, (*empty, *lost)))),
    )
    logs = tuple(file for file in others if kept.get(file.resolve(), True))
    return Gathered(judge_rest(report), logs, frozenset(file.resolve() for file in contents.keys() - repeated))


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

    def is_lost(path: PurePath, source: Source) -> bool:
        is_beside = not source.lines and path.with_suffix("") in stems
        return kind(path) in kinds or (source.is_lost and len(logs) > 1 and not is_beside)

    silent = [(path, source) for path, source in paths.items() if not (source.tools or source.damage)]
    return [source.path for path, source in silent if is_lost(path, source)]


def _texts_of(*parts: Results | VerifyResult) -> Iterator[str]:
    """Yield each result without the name of its file, and each result of verify, as text."""
    for part in parts:
        if isinstance(part, VerifyResult):
            yield part.model_dump_json()
        else:
            for result in (*part.runs, *part.tests, *part.tables, *part.ucx, *part.diagnostics):
                yield result.model_dump_json(exclude={"source"})


def _files_in(path: Path) -> list[Path]:
    """Return the file, or all files of the folder. Raises ConfigError if one cannot be named in JSON."""
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{visible(str(file))}: cannot be read: its name is not UTF-8; rename it") from None
    return files


def read_own_file(file: Path) -> VerifyResult | Report | None:
    """Return what imagebuild wrote into a file, None for a file of others. Raises ResultError if it is invalid."""
    try:
        with open_log(file) as opened:
            head = opened.read(HEAD_BYTES)
            # Files of imagebuild begin with one of these keys; files of benchmarks are not read twice.
            if not head.lstrip().startswith(b"{") or not (b'"image"' in head or b'"runs"' in head):
                return None
            opened.seek(0)
            data = json.loads(opened.read())
    except (OSError, *DAMAGED, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if {"about", "runs", "sources"} <= data.keys():
        return read_written(Report, data, str(file))
    if {"image", "platform", "checks"} <= data.keys():
        return read_written(VerifyResult, data, str(file))
    return None


# Results in words

GIB = 1 << 30
NONE = "\u2013"
"""Shown for a value that is unknown or absent."""


def judge_rest(report: Report) -> Report:
    """Return the report with a judgement on every result: those without one are judged without a profile."""
    judged = _judgements_of(report)
    diagnosed = {judgement.source for judgement in report.judgements if judgement.subject == DIAGNOSIS}
    rest = {
        kind: tuple(result for result in getattr(report, kind) if id(result) not in judged)
        for kind in ("runs", "tests", "tables", "ucx")
    }
    rest["diagnostics"] = tuple(diagnostic for diagnostic in report.diagnostics if diagnostic.source not in diagnosed)
    return report.model_copy(update={"judgements": (*report.judgements, *judge_results(Results(**rest)))})


def _judgements_of(report: Report) -> dict[int, list[Judgement]]:
    """Return id of a result → its judgements: of the same file, with a subject that is or begins with the result's.

    A judgement's subject may go on after the result's, with ranks that were asserted or the type that was compared.
    Results with equal subjects get their judgements in order, since judges keep it.
    """
    equal: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for result in report.measured:
        equal[result.source, result.subject].append(id(result))
    judgements: dict[int, list[Judgement]] = {}
    given: Counter[tuple[str, str]] = Counter()
    for judgement in report.judgements:
        subjects = accumulate(judgement.subject.split(", "), lambda head, part: f"{head}, {part}")
        keys = [key for subject in subjects if (key := (judgement.source, subject)) in equal]
        if keys:
            fitting = equal[keys[-1]]
            judgements.setdefault(fitting[given[keys[-1]] % len(fitting)], []).append(judgement)
            given[keys[-1]] += 1
    return judgements


def unique_names(subjects: Sequence[tuple[str, str]]) -> list[str]:
    """Return names for pairs of subject and file: equal subjects also have the file and, if needed, a number."""
    times = Counter(subject for subject, _ in subjects)
    names = [f"{subject}, {PurePath(file).name}" if times[subject] > 1 else subject for subject, file in subjects]
    times, numbers, unique = Counter(names), Counter[str](), []
    for name in names:
        numbers[name] += 1
        unique.append(f"{name} #{numbers[name]}" if times[name] > 1 else name)
    return unique


def best_value(result: Result) -> str:
    """Return the best value of a result.

    * a run of nccl-tests: the bus bandwidth that is judged, `482.3 GB/s at 8 GiB`
    * a matrix: the least and the highest value of its pairs, `374.0 to 395.2 GB/s`
    * a table of perftest: the highest average bandwidth, or the least latency, `1.92 µs at 2 B`
    * ucx_perftest: `10531.2 MiB/s, 0.09 µs, 11.00 million messages/s at 1 MiB`, average bandwidth and typical latency
    """
    match result:
        case Run():
            value, size = best_row(result)
            if value is not None and size is not None:
                return f"{format_number(value)} GB/s at {format_bytes(size)}"
        case BandwidthTest():
            if pairs := device_pairs(result):
                least, most = format_number(min(pairs)), format_number(max(pairs))
                return f"{least if least == most else f'{least} to {most}'} {result.unit or '(unit unknown)'}"
        case PerftestTable():
            averages = [(row.bw_average, row.size_bytes) for row in result.rows if row.bw_average is not None]
            if averages:
                value, size = max(averages)
                return f"{format_number(value)} {result.unit or '(unit unknown)'} at {format_bytes(size)}"
            times = [(time, row.size_bytes) for row in result.rows if (time := latency(row.latency_us)) is not None]
            if times:
                value, size = min(times)
                return f"{format_number(value)} µs at {format_bytes(size)}"
        case UcxResult():
            speed, time = result.bandwidth_mib_s.get("average"), latency(result.latency_us)
            parts = [f"{format_number(speed)} MiB/s"] if speed is not None else []
            parts += [f"{format_number(time)} µs"] if time is not None else []
            rate = result.rate_msg_s.get("average")
            parts += [f"{format_number(rate / 1e6)} million messages/s"] if rate is not None else []
            size_text = f" at {format_bytes(result.size_bytes)}" if result.size_bytes is not None else ""
            return (", ".join(parts) or NONE) + size_text
    return NONE


def latency(values: Mapping[str, float | None] | None) -> float | None:
    """Return the typical latency, else the average, in µs."""
    known = values or {}
    return next((known[name] for name in ("typical", "average") if known.get(name) is not None), None)


# Numbers and texts


def format_bytes(size: int) -> str:
    """Return a size in binary units with up to two decimals: `512 B`, `1 GiB`, `1.5 MiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def format_number(value: float | None, digits: int = 2) -> str:
    """Return a measurement with fewer decimals the larger it is, a dash if it is unknown."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.1f}" if value < 1e6 else f"{value:.3g}"
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.3g}"


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
