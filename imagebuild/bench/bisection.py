"""Bisection: the first bad version among several, from the comparisons in a log. Pure.

A version is bad if it fails (a run ends with an error, after its time limit or with wrong data), or if it is slower
than the first version by more than a limit. The limit is half of the loss of the last version, unless the user sets it.
Bisection assumes one change from good to bad: if a later version is good again, the result is one of several changes.

Each comparison is looked at after 10, 20 and 40 blocks, and ends as soon as its interval lies on one side of the limit.
Looking several times would raise the rate of false verdicts. So the error rate of the whole bisection is divided among
all looks of all comparisons: the smallest case of alpha spending (Lan and DeMets, Discrete sequential boundaries for
clinical trials, Biometrika 70, 1983), with equal shares. By the inequality of Bonferroni, the shares add up for any
dependence between the looks. A failure is not a matter of statistics: a version is good if no run of ten fails, so a
failure in one of ten runs is overlooked in 35 % of cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from imagebuild.bench.models import Difference, PairedComparison
from imagebuild.core.fields import Model

LOOKS = (10, 20, 40)
"""Numbers of blocks after which a comparison is looked at."""
ERROR_RATE = 0.05
"""Probability that at least one verdict of a bisection is false."""
State = Literal["good", "bad", "open"]
"""What a comparison says about a version."""


class Judged(Model):
    """A version and its verdict."""

    side: str
    state: State
    reason: str
    differences: tuple[Difference, ...] = ()
    """The differences to the first version, for each size."""


class Bisection(Model):
    """The result of a bisection, or what is known until now."""

    sides: tuple[str, ...]
    judged: tuple[Judged, ...] = ()
    """The verdicts in the order in which they were reached. The first two are about the first and the last version."""
    criterion: str = ""
    """What makes a version bad."""
    last_good: str = ""
    first_bad: str = ""
    """The first version that is known to be bad. It follows `last_good` if the bisection is complete."""
    problem: str = ""
    """Reason why the bisection cannot end."""

    @property
    def is_complete(self) -> bool:
        """Whether no version between the last good and the first bad one is left."""
        named = bool(self.first_bad) and not self.problem
        return named and self.sides.index(self.first_bad) - self.sides.index(self.last_good) == 1


@dataclass(frozen=True)
class Measurement:
    """Blocks to measure."""

    sides: tuple[str, ...]
    first: int
    blocks: int
    """Number of the last block."""


@dataclass(frozen=True)
class _Criterion:
    """What makes a version bad: a failure, or a loss at a size of a collective."""

    words: str
    place: tuple[str, int] | None = None
    limit: float = 0
    """Per cent, negative. The loss of a bad version is greater."""


def error_rate(sides: Sequence[str]) -> float:
    """Return the share of the error rate for each look of each comparison in a bisection."""
    return ERROR_RATE / len(LOOKS) / (1 + (len(sides) - 2).bit_length())


def next_step(
    sides: tuple[str, ...], comparisons: Iterable[PairedComparison], loss: float | None = None
) -> tuple[Bisection, Measurement | None]:
    """Return what comparisons say about the sides, and what to measure next, if anything. The first side is good.

    A comparison in which the good side failed, or in which a run does not prove its side, does not count. `loss` is the
    loss in per cent that makes a version bad."""
    good, bad = sides[0], sides[-1]
    known = {found.sides: found for found in comparisons if found.is_proven and good not in found.failed}
    state = Bisection(sides=sides)
    ends = (good, good, bad)
    if (found := known.get(ends)) is None:
        return state, Measurement(ends, 1, LOOKS[0])
    criterion = _criterion(found, loss)
    if criterion is None and not _is_fast(found, loss or 0) and (more := _next_look(found)):
        return state, more
    if criterion is None:
        return state.model_copy(update={"problem": _not_bad(found)}), None
    judged = [_judge(found, good, criterion, good=True), _judge(found, bad, criterion)]
    low, high, problem, more = 0, len(sides) - 1, "", None
    while high - low > 1 and not (problem or more):
        middle = (low + high) // 2
        pair = good, sides[middle]
        if (found := known.get(pair)) is None:
            more = Measurement(pair, 1, LOOKS[0])
            break
        verdict = _judge(found, sides[middle], criterion)
        if verdict.state == "open" and (more := _next_look(found)):
            break
        judged.append(verdict)
        if verdict.state == "open":
            problem = f"{verdict.side} is neither good nor bad: {verdict.reason}; set the limit with --loss"
        elif verdict.state == "bad":
            high = middle
        else:
            low = middle
    found_so_far = {"last_good": sides[low], "first_bad": sides[high], "problem": problem, "judged": tuple(judged)}
    return state.model_copy(update={**found_so_far, "criterion": criterion.words}), more


def _next_look(found: PairedComparison) -> Measurement | None:
    """Return the blocks up to the next look at a comparison, or None after the last look."""
    look = next((look for look in LOOKS if look > found.blocks), None)
    return None if look is None else Measurement(found.sides, found.blocks + 1, look)


def _criterion(found: PairedComparison, loss: float | None) -> _Criterion | None:
    """Return what distinguishes the last side from the first one. None if the runs do not show a difference, or if the
    first side differs from itself as much.

    If several sizes do, the one with the clearest difference is taken: the smallest interval, in relation to it."""
    good, _, bad = found.sides
    if bad in found.failed:
        return _Criterion("a run that fails")
    again = {(item.collective, item.size_bytes): item for item in found.differences if item.side == good}
    slower = [item for item in found.differences if item.side == bad and item.is_headline and item.high < 0]
    for item in sorted(slower, key=lambda item: (item.high - item.low) / -item.percent):
        limit = -loss if loss is not None else item.percent / 2
        place = item.collective, item.size_bytes
        if found.blocks in LOOKS and item.high < limit < again[place].low:
            words = f"a run that fails, or a loss of more than {-limit:.2f} % in {place[0]}, {place[1]} bytes"
            return _Criterion(words, place, limit)
    return None


def _is_fast(found: PairedComparison, loss: float) -> bool:
    """Return whether the last side is certainly not slower by more than a loss in per cent."""
    shown = [item for item in found.differences if item.is_headline and item.side == found.sides[-1]]
    return found.blocks in LOOKS and bool(shown) and all(item.low > -loss for item in shown)


def _judge(found: PairedComparison, side: str, criterion: _Criterion, *, good: bool = False) -> Judged:
    """Return the verdict on a side of a comparison. `good`: the side is the first one, compared with itself."""
    own = tuple(item for item in found.differences if item.side == side)
    if not good and side in found.failed:
        return Judged(side=side, state="bad", reason=f"a run {found.failed[side]}", differences=own)
    if criterion.place is None:
        passed = good or found.blocks >= LOOKS[0]
        return Judged(side=side, state="good" if passed else "open", reason="no run failed", differences=own)
    item = next((item for item in own if (item.collective, item.size_bytes) == criterion.place), None)
    if item is None:
        return Judged(side=side, state="open", reason=f"no run has a result for {criterion.place[0]}", differences=own)
    state: State = "open"
    if found.blocks in LOOKS:
        state = "bad" if item.high < criterion.limit else "good" if item.low > criterion.limit else "open"
    return Judged(side=side, state=state, reason=item.interval, differences=own)


def _not_bad(found: PairedComparison) -> str:
    """Return why the last side does not count as bad."""
    good, _, bad = found.sides
    shown = [item for item in found.differences if item.is_headline]
    if noisy := next((item for item in shown if item.side == good and (item.high < 0 or item.low > 0)), None):
        return f"{good} differs from itself, {noisy.words}; let nothing else run on these machines"
    words = "; ".join(f"{item.collective}, {item.size_bytes} bytes: {item.words}" for item in shown if item.side == bad)
    words = words or "no run printed a table"
    return f"{bad} is not slower than {good}: {words}; name a command whose smallest or largest size shows the loss"
