"""Paired comparisons: intervals against a second computation, and logs that are cut or prove nothing."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from math import factorial, prod, sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest

from imagebuild.bench.alternation import ERROR_RATE
from imagebuild.bench.models import PairedComparison
from imagebuild.bench.paired import bootstrap_interval, judge_sides
from imagebuild.bench.read import read_files
from tests.conftest import data
from tests.unit.bench.nccl_tables import Table

CASES = data("cases/bench/paired")

ORDER = ((0, 1), *((0, 1), (1, 0), (1, 0), (0, 1)) * 3)
STUDENT = {5: 4.032, 7: 3.499, 11: 3.106}
"""Quantiles of Student's t for 99 %, by degrees of freedom; from the tables of Fisher and Yates."""


def code_of(version: str) -> int:
    first, second, third = map(int, version.split("."))
    return first * 10000 + second * 100 + third


def log_of(
    speeds: Callable[[int, int], float], order: Sequence[Sequence[int]] = ORDER, versions: Sequence[str] = ("2.30.7", "2.32.3"),
    loaded: Sequence[str] = (), noise: float = 0.0005, seed: int = 1,
) -> str:  # fmt: skip
    """Return the log of a comparison. `speeds` maps a side and a size to the bus bandwidth in GB/s."""
    draw = random.Random(seed)
    text = f"# imagebuild-compare sides {' | '.join(f'nccl={version}' for version in versions)}\n"
    text += f"# imagebuild-compare order {' '.join(''.join(map(str, row)) for row in order)}\n"
    for number, side in enumerate(side for row in order for side in row):
        drift = 1 - 0.0002 * number  # the hardware gets warmer
        factor = drift * (1 + draw.gauss(0, noise))

        def speed(size: int, factor: float = factor, side: int = side) -> float:
            return factor * speeds(side, size)

        table = Table(sizes=(1 << 20, 1 << 30), step=1024, ranks=4, speed=speed)
        library = f"nccl-library={code_of((loaded or versions)[side])}"
        body = table.text().replace("nccl-library=23007", library).strip()
        text += f"\n# imagebuild-compare begin {number}\n{body}\n\n# imagebuild-compare end 0\n"
    return text


@pytest.fixture
def compared(tmp_path: Path) -> Callable[[str], PairedComparison]:
    def read(text: str) -> PairedComparison:
        (tmp_path / "a.log").write_text(text)
        (found,) = read_files([tmp_path / "a.log"]).paired
        return found

    return read


def slower(percent: float) -> Callable[[int, int], float]:
    return lambda side, size: (356 if size == 1 << 30 else 40) * (1 - side * percent / 100)


@pytest.mark.parametrize("count", [6, 8, 12])
def test_intervals_agree_with_students_distribution(count: int) -> None:
    draw = random.Random(count)
    ratios = []
    for _ in range(40):
        values = tuple(draw.gauss(3, 2) for _ in range(count))
        low, high = bootstrap_interval(values, 0.01)
        width = STUDENT[count - 1] * stdev(values) / sqrt(count)
        ratios.append((high - low) / 2 / width)
    assert 0.85 < sorted(ratios)[20] < 1.6, "not narrower, and for few values somewhat wider"
    assert bootstrap_interval((2.0,) * 6, 0.01) == (2.0, 2.0)


def test_intervals_agree_with_all_resamples() -> None:
    """The second computation draws nothing: it weighs each of the 462 different resamples of six values."""
    values = (1.3, -0.2, 0.9, 2.6, 0.1, 1.7)
    weights: dict[float, float] = defaultdict(float)
    for sample in combinations_with_replacement(values, len(values)):
        if len(set(sample)) > 1:
            distance = (fmean(sample) - fmean(values)) / (stdev(sample) / sqrt(len(sample)))
            weights[distance] += 1 / prod(factorial(sample.count(value)) for value in set(sample))
    error, limits = stdev(values) / sqrt(len(values)), []
    for share in (0.9, 0.1):
        left = share * sum(weights.values())
        distance = next(d for d in sorted(weights) if (left := left - weights[d]) <= 0)
        limits.append(fmean(values) - distance * error)
    assert bootstrap_interval(values, 0.2) == pytest.approx(limits, abs=0.08)


def test_equal_sides_are_called_different_as_rarely_as_promised() -> None:
    draw, wrong = random.Random(7), 0
    for _ in range(150):
        low, high = bootstrap_interval(tuple(draw.gauss(0, 1) for _ in range(10)), 0.01)
        wrong += not low <= 0 <= high
    assert wrong <= 5, "expected: 1.5"


def test_measured_comparisons() -> None:
    """No difference between equal sides on GPUs; a planted loss of 1 % or more is named, except in one of twelve cases."""
    measured = data("bench/measured-blocks")
    found = {kind: [bootstrap_interval(tuple(row), ERROR_RATE) for row in measured[kind]] for kind in measured}
    assert [low <= 0 <= high for low, high in found["equal"]] == [True] * 16
    assert sum(high < 0 for _, high in found["slower"]) == 11


@pytest.mark.parametrize(("percent", "verdict"), [(1, "slower"), (-1, "faster"), (0, "no difference")])
def test_planted_differences_despite_drift(
    compared: Callable[[str], PairedComparison], percent: float, verdict: str
) -> None:
    found = compared(log_of(slower(percent)))
    assert (found.problems, found.faults) == ((), ())
    assert found.loaded == {"nccl=2.30.7": ("2.30.7",), "nccl=2.32.3": ("2.32.3",)}
    assert [(item.size_bytes, item.verdict, item.is_headline) for item in found.differences] == [
        (1 << 20, verdict, True), (1 << 30, verdict, True),
    ]  # fmt: skip
    assert all(item.low <= -percent <= item.high for item in found.differences)
    assert {judged.speed.state for judged in judge_sides(found)} == {verdict}
    assert {judged.speed.standing() for judged in judge_sides(found)} == {"failed" if percent > 0 else "passed"}
    assert {judged.speed.standing() for judged in judge_sides(found, 2)} == {"passed"}
    assert {judged.speed.standing(["unjudged"]) for judged in judge_sides(found)} == {
        "failed" if percent > 0 else "passed"
    }


def test_a_loss_near_the_limit_is_not_judged(compared: Callable[[str], PairedComparison]) -> None:
    found = compared(log_of(slower(1), noise=0.003))
    states = {judged.speed.state for judged in judge_sides(found, allowed_loss=1)}
    assert states == {"not judged"}


def test_three_sides(compared: Callable[[str], PairedComparison]) -> None:
    order = ((0, 1, 2), *((2, 0, 1), (1, 0, 2)) * 5)
    text = log_of(lambda side, _: (350, 350, 340)[side], order, ("2.28.9", "2.30.7", "2.32.3"))
    found = [item for item in compared(text).differences if item.size_bytes == 1 << 30]
    assert [(item.side, item.verdict) for item in found] == [
        ("nccl=2.30.7", "no difference"), ("nccl=2.32.3", "slower"),
    ]  # fmt: skip


def test_a_log_that_is_cut_stays_open(compared: Callable[[str], PairedComparison]) -> None:
    text = log_of(slower(1))
    head = text.index("# imagebuild-compare begin")
    assert text.endswith(" end 0\n")
    for end in (*range(head + 40, len(text) - 40, 997), *range(len(text) - 40, len(text) - 2)):
        found = compared(text[:end])
        assert found.problems, f"cut at {end}"
        assert {item.verdict for item in found.differences} <= {"open"}
        assert {judged.speed.state for judged in judge_sides(found)} == {"not judged"}
    found = compared(text[text.index("# imagebuild-compare order") + 40 :])
    assert "are missing; name the whole log" in found.problems[0]
    assert [judged.speed.state for judged in judge_sides(found)] == ["not judged"]


def test_a_failure_counts_for_the_run_that_printed_it(compared: Callable[[str], PairedComparison]) -> None:
    text = log_of(slower(1)) + f"\n# imagebuild-compare begin ²\n# imagebuild-compare begin {'1' * 5000}\n"
    begin, end = text.index("begin 5\n") + 8, text.index("\n# imagebuild-compare end 0", text.index("begin 5\n"))
    found = compared(
        f"{text[:begin]}a: Test NCCL failure common.cu:958 'remote process exited'\n{text[end:]}".replace(
            "end 0", "end 3", 6
        ).replace("end 3", "end 0", 5)
    )
    assert list(found.failed) == ["nccl=2.30.7"]
    assert len(found.faults) == 1


def test_a_comparison_that_went_on(compared: Callable[[str], PairedComparison]) -> None:
    """Blocks are added to a comparison that was decided too early, or that was cut."""
    text = log_of(slower(1))
    head, body = text[: text.index("\n# imagebuild-compare begin")], text[text.index("\n# imagebuild-compare begin") :]
    short = head.replace(head.split("order ")[1], " ".join(head.split("order ")[1].split()[:11]) + "\n")
    middle, cut = body.index("\n# imagebuild-compare begin 22\n"), body.index("\n# imagebuild-compare begin 24\n") + 300
    found = compared(short + body[:middle] + head + body[middle:cut])
    assert (found.blocks, found.problems) == (11, ("24 of 26 runs are in the log",))
    found = compared(short + body[:middle] + head + body[middle:cut] + "\n" + head + body[cut - 300 :])
    assert (found.blocks, found.problems, found.faults) == (12, (), ())
    assert found.differences == compared(text).differences


def test_a_log_may_state_its_error_rate(compared: Callable[[str], PairedComparison]) -> None:
    text = log_of(slower(1))
    widths = []
    for rate in ("", "# imagebuild-compare error 0.001\n", "# imagebuild-compare error 0.9\n"):
        item = compared(text.replace("# imagebuild-compare order", f"{rate}# imagebuild-compare order")).differences[0]
        widths.append(item.high - item.low)
    assert widths[2] < widths[0] < widths[1]
    assert widths[2] > 0.4 * widths[0], "a log cannot ask for an interval that is always narrow"


@pytest.mark.parametrize(("old", "new", "says"), CASES["what-spoils-a-comparison"])
def test_what_spoils_a_comparison(compared: Callable[[str], PairedComparison], old: str, new: str, says: str) -> None:
    text = log_of(slower(1))
    assert old in text
    found = compared(text.replace(old, new))
    assert found.faults[0].startswith(says), found.faults
    assert {judged.speed.state for judged in judge_sides(found)} == {"not judged"}
    assert {judged.participation.state for judged in judge_sides(found)} == {"incomplete"}


@pytest.mark.parametrize(("old", "new", "says"), CASES["other-gpus"])
def test_both_sides_ran_on_the_same_gpus(
    compared: Callable[[str], PairedComparison], old: str, new: str, says: str
) -> None:
    head, *runs = log_of(slower(1)).split("# imagebuild-compare begin ")
    runs[6] = re.sub(old, new, runs[6])
    found = compared("# imagebuild-compare begin ".join([head, *runs]))
    side = found.sides[[side for row in ORDER for side in row][6]]
    fault = f"{side}: run 6 used other GPUs than the first side in its block: "
    assert [text[: len(fault)] for text in found.faults] == ([fault] if says else [])
    assert says in "".join(found.faults)
    assert {item.verdict for item in found.differences} == {"open" if says else "slower"}
    assert found.is_proven is not bool(says)


def test_where_a_block_runs_does_not_matter(compared: Callable[[str], PairedComparison]) -> None:
    """A comparison may go on in another allocation, and each run may have its own container."""
    head, *runs = log_of(slower(1)).split("# imagebuild-compare begin ")
    moved = [run.replace("node1", "node9") if number > 9 else run for number, run in enumerate(runs)]
    boxed = [run.replace("node1", f"{number:012x}") for number, run in enumerate(runs)]
    for changed in (moved, boxed):
        found = compared("# imagebuild-compare begin ".join([head, *changed]))
        assert (found.problems, found.faults) == ((), ())
    found = compared(re.sub("#  Rank .*\n", "", log_of(slower(1))))
    assert found.problems == ("no run lists its GPUs, so the sides may have used different ones",)
    assert {judged.speed.state for judged in judge_sides(found)} == {"not judged"}


def test_variables_are_proven_by_what_nccl_says(compared: Callable[[str], PairedComparison]) -> None:
    text = log_of(slower(1)).replace("nccl=2.30.7", "env:NCCL_ALGO=Ring").replace("nccl=2.32.3", "env:NCCL_ALGO=Tree")
    assert "run 0 does not say that it used NCCL_ALGO; set NCCL_DEBUG=INFO" in compared(text).faults[0]
    said = "a:1:1 [0] NCCL INFO NCCL_ALGO set by environment to "
    for number, side in enumerate(side for row in ORDER for side in row):
        text = text.replace(f"begin {number}\n", f"begin {number}\n{said}{('Ring', 'Tree')[side]}\n")
    assert compared(text).faults == ()
    both = compared(text.replace("begin 0\n", f"begin 0\n{said}Tree\n")).faults
    assert both == ("env:NCCL_ALGO=Ring: run 0 used NCCL_ALGO=Tree",)
    unset = compared(text.replace("env:NCCL_ALGO=Ring", "env:NCCL_ALGO=")).faults
    assert unset[0].startswith("env:NCCL_ALGO=: run 0 used NCCL_ALGO=Ring, and ")


@pytest.mark.parametrize("order", ["00 11 00 11 00 11 00 11 00 11 00", "01 1 " * 11, "012 " * 12, "01 " * 3000])
def test_an_order_without_every_side_in_each_block_is_no_order(
    compared: Callable[[str], PairedComparison], order: str
) -> None:
    text = re.sub("(# imagebuild-compare order).*", rf"\1 {order}", log_of(slower(1)))
    assert compared(text).problems[0].startswith("the lines `# imagebuild-compare sides`")


def test_an_interval_that_excludes_nothing_is_no_verdict(compared: Callable[[str], PairedComparison]) -> None:
    found = compared(log_of(slower(0), noise=0.5))
    assert found.problems == ()
    assert {item.verdict for item in found.differences} == {"open"}
    assert {judged.speed.state for judged in judge_sides(found)} == {"not judged"}


def test_fewer_blocks_than_an_interval_needs(compared: Callable[[str], PairedComparison]) -> None:
    found = compared(log_of(slower(1), ORDER[:4]))
    assert found.problems == ("3 blocks; an interval needs 10",)


def test_the_median_run_has_the_rate(compared: Callable[[str], PairedComparison]) -> None:
    item = compared(log_of(slower(0), noise=0)).differences[-1]
    assert fmean([item.rate / 356, 1]) == pytest.approx(1, abs=0.01)
