"""Read what NCCL states about its ranks at its RAS socket, and say which ranks are missing, behind or elsewhere.

NCCL 2.28 and later answers in JSON, NCCL 2.24 to 2.27 in text. The text lists only ranks that differ from most."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from imagebuild.core.patterns import DataFile

PREFIX = "(imagebuild-ras) "
"""Start of each line of an answer in a log."""
SHOWN = 4
"""Maximum number of ranks that are named for one state of a communicator."""
NO_ERRORS = (0, 7)
"""Values of `ncclResult_t` that are no errors: 7 says that a function has not ended."""
_DATA = DataFile(__file__)
_RE = _DATA.patterns


@dataclass
class Rank:
    """A rank of a communicator, and the number of its collectives by their kind."""

    rank: int | str
    host: str = ""
    gpu: str = ""
    pid: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    error: int = 0
    """The error of the communicator on this rank: of an operation, or of the initialization."""

    def __str__(self) -> str:
        gpu = f"GPU {self.gpu}, " if self.gpu else ""
        where = f" on host {self.host}, {gpu}process {self.pid}" if self.host else ""
        return f"rank {self.rank}{where}"


@dataclass
class Communicator:
    """A communicator as NCCL states it."""

    name: str
    size: int = 0
    ranks: list[Rank] = field(default_factory=list)
    missing: list[Rank] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    """The number of collectives of most ranks, by kind of collective."""
    faults: list[str] = field(default_factory=list)
    """Lines of a text that state an error, or missing ranks that NCCL does not name if they are many."""
    silent: int = 0
    """The number of ranks about which NCCL states nothing."""
    asked: int | None = None
    """When NCCL was asked, in seconds since 1970."""
    quiet: int = 0
    """How long the job had printed nothing then, in seconds."""

    @property
    def counts(self) -> dict[tuple[str, int | str, str], int]:
        """The numbers of collectives: of each rank, or of most ranks if the answer is a text."""
        most = {} if self.size else self.most
        found = {(self.name, rank.rank, kind): n for rank in self.ranks for kind, n in rank.counts.items()}
        return found | {(self.name, "most", kind): n for kind, n in most.items()}


def answers(lines: Iterable[str]) -> list[list[Communicator]]:
    """Return the communicators in each answer in a log. In text, these are only communicators with faults.
    Answers that cannot be read are left out."""
    texts: list[tuple[re.Match[str] | None, list[str]]] = []
    asked: re.Match[str] | None = None
    for line in lines:
        if PREFIX in line:
            text = line.partition(PREFIX)[2]
            asked = _RE["asked"].match(text) or asked
            if text.startswith(("SERVER PROTOCOL", "stopped ")):
                texts.append((asked, []))
                asked = None
            if texts:
                texts[-1][1].append(text)
    known = []
    for asked, answer in texts:
        if (found := read_answer("\n".join(answer))) is not None:
            if asked:
                found = [replace(each, asked=int(asked["time"]), quiet=int(asked["quiet"] or 0)) for each in found]
            known.append(found)
    return known


def read_answer(text: str) -> list[Communicator] | None:
    """Return the communicators in an answer. None if the answer was cut off or says nothing about communicators."""
    if text.startswith("stopped "):
        stopped = [Rank(rank or "?", host, "", pid) for rank, pid, host in _RE["stopped"].findall(text)]
        return [Communicator("", missing=stopped)] if stopped else None
    start = text.find("{")
    if '"communicators"' in text and start >= 0:
        try:
            content, _ = json.JSONDecoder().raw_decode(_RE["no_comma"].sub(",", text[start:]))
            return [_from_json(each) for each in content["communicators"]] or None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
    groups, explained = _RE["group"].findall(text), set(_RE["section"].findall(text))
    stated = {(number, kind) for number, kinds in groups for kind in kinds.split(",") if kind != "OK"}
    is_whole = bool(groups) and _RE["end"].search(text) is not None
    return None if stated - explained else _from_text(text) or ([] if is_whole else None)


def _from_json(content: Mapping[str, Any]) -> Communicator:
    def error(states: Mapping[str, Any]) -> int:
        codes = (int(states.get(key, 0)) for key in ("async_error", "init_state"))
        return next((code for code in codes if code not in NO_ERRORS), 0)

    def ranks(key: str) -> list[Rank]:
        rows = content.get(key) or ()
        return [
            Rank(
                row["rank"],
                row["host"],
                str(row["nvml_dev"]),
                str(row["pid"]),
                {kind: int(count) for kind, count in row.get("collective_counts", {}).items()},
                error(row.get("status", {})),
            )
            for row in rows
        ]

    found = Communicator(str(content["hash"]), int(content["size"]), ranks("ranks"), ranks("missing_ranks"))
    if found.size < 1:
        raise ValueError("the communicator has no rank")
    found.silent = max(0, found.size - len({rank.rank for rank in (*found.ranks, *found.missing)}))
    for kind in {kind for rank in found.ranks for kind in rank.counts}:
        frequent = Counter(rank.counts.get(kind, 0) for rank in found.ranks)
        found.most[kind] = max(frequent, key=lambda count: (frequent[count], count))
    return found


def _from_text(text: str) -> list[Communicator]:
    found: dict[str, Communicator] = {}
    current = job = Communicator("")
    kind, counted, is_missing = "", 0, False
    for line in text.splitlines():
        if match := _RE["communicator"].match(line):
            current = found.setdefault(match[1], Communicator(f"0x{match[1]}"))
            current.faults += [match[2]] * (match[2] != "MISMATCH")
            kind, is_missing = "", False
        elif match := _RE["differs"].search(line):
            kind, is_missing = match[1], False
        elif match := _RE["fault"].search(line):
            current.faults.append(match[0])
            is_missing = match[0].startswith("Missing")
        elif match := _RE["most"].search(line):
            counted = int(match[2] or 0)
            current.most.setdefault(kind, counted)  # the largest group comes first
        elif match := _RE["rank"].search(line):
            rank = Rank(int(match["rank"]), match["host"] or "", match["gpu"] or "", match["pid"] or "")
            if is_missing:
                current.missing.append(rank)
            elif kind:
                launched = 0 if "not launched" in line else int(match["count"] or counted)
                if launched != current.most.get(kind):
                    known = next((each for each in current.ranks if each.rank == rank.rank), rank)
                    current.ranks += [known] if known is rank else []
                    known.counts[kind] = launched
    if job.faults and not any(each.faults for each in found.values()):
        found[""] = job
    return list(found.values())


def hung(now: Iterable[Communicator], before: Iterable[Communicator] = ()) -> Iterator[str]:
    """Yield a sentence for the ranks that keep a communicator waiting.

    A communicator that has moved since `before`, or is not in it, may not wait: its ranks differ because they are never
    asked at the same moment. Missing ranks need no second answer."""
    earlier = {each.name: each for each in before}
    for communicator in now:
        of = f"communicator {communicator.name}" if communicator.name else "the job"
        of += f" of {communicator.size} ranks" if communicator.size else ""
        if communicator.missing:
            lost = "no sign of life; the process has ended, is stopped or hangs"
            yield f"hung: {_named(communicator.missing)} of {of}: {lost}"
        elif communicator.faults:
            yield f"hung: {of}: NCCL states {', '.join(communicator.faults[:SHOWN])}"
        for code in sorted({rank.error for rank in communicator.ranks}.difference(NO_ERRORS)):
            failed = [rank for rank in communicator.ranks if rank.error == code]
            error = _DATA["errors"].get(code, f"error {code}")
            yield f"hung: {_named(failed)} of {of}: NCCL has {error}; NCCL's messages say more"
        known = earlier.get(communicator.name)
        if known is None or _progress(known) != _progress(communicator):
            continue
        states: dict[str, list[Rank]] = {}
        for rank in communicator.ranks:
            differs = {kind: count - communicator.most.get(kind, count) for kind, count in rank.counts.items()}
            if any(differs.values()):
                states.setdefault(_state(differs), []).append(rank)
        for state, ranks in states.items():
            yield f"hung: {_named(ranks)} of {of}: {state}"


def hung_in_log(taken: Sequence[Sequence[Communicator]]) -> list[str]:
    """Return the sentences for the last hang in successive answers, with the last signs of life; empty if the last
    answer is that of a sound job.

    The first answer that names the hang counts: later ones also name ranks that ended because of it."""
    sentences: list[str] = []
    for number, (now, before) in reversed([*enumerate(zip(taken, ((), *taken), strict=False))]):
        if not (found := [*hung(now, before)]):
            break
        sentences = ["; ".join([text, *_last_seen(now, taken[:number]), *_stillness(taken)]) for text in found]
    return sentences


def _last_seen(now: Sequence[Communicator], before: Sequence[Sequence[Communicator]]) -> Iterator[str]:
    """Yield when missing ranks last answered, and how many collectives they had started then."""
    for lost in [(each.name, rank.rank) for each in now for rank in each.missing][:SHOWN]:
        for earlier in reversed([each for answer in before for each in answer if now[0].asked and each.asked]):
            counts = [n for (name, rank, _), n in earlier.counts.items() if (name, rank) == lost]
            if counts:
                ago = (now[0].asked or 0) - (earlier.asked or 0)
                yield f"rank {lost[1]} answered {ago} s earlier, after {sum(counts)} collectives"
                break


def _stillness(taken: Sequence[Sequence[Communicator]]) -> Iterator[str]:
    """Yield how long no collective has started, and how long nothing was printed, according to the last answers."""
    last, states = taken[-1][0], [{key: n for each in answer for key, n in each.counts.items()} for answer in taken]
    still = None
    for answer, state in reversed([*zip(taken[:-1], states, strict=False)]):
        common = state.keys() & states[-1].keys()
        if any(state[key] != states[-1][key] for key in common):
            if not still:
                yield "collectives still start"
            break
        still = answer[0] if common else still
    if still:
        known = last.asked is not None and still.asked is not None
        how_long = f"for at least {(last.asked or 0) - (still.asked or 0)} s" if known else "between two answers"
        yield f"no collective started {how_long}"
    if last.quiet:
        yield f"no output for {last.quiet} s"


def _progress(communicator: Communicator) -> tuple[Mapping[str, int], list[Mapping[str, int]]]:
    """Return what changes while a communicator works."""
    return communicator.most, [rank.counts for rank in communicator.ranks]


def _state(differs: Mapping[str, int]) -> str:
    """Return how a rank differs from most ranks."""
    less = {kind: -n for kind, n in differs.items() if n < 0}
    more = {kind: n for kind, n in differs.items() if n > 0}
    behind, ahead = (" and ".join(f"{n} {kind}" for kind, n in part.items()) for part in (less, more))
    if less and more:
        return f"in another operation: launched {ahead} more and {behind} fewer than most ranks"
    if less:
        return f"{sum(less.values())} collectives behind most ranks ({behind})"
    return f"{sum(more.values())} collectives ahead ({ahead}), so all other ranks are behind"


def _named(ranks: list[Rank]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return "; ".join(map(str, ranks[:SHOWN])) + more
