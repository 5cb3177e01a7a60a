"""Decisions of a bisection, with comparisons of simulated speeds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from imagebuild.bench.bisection import LOOKS, Bisection, error_rate, next_step
from imagebuild.bench.read import read_files
from imagebuild.jobs.compare import block_order
from tests.unit.bench.test_paired import log_of

VERSIONS = tuple(f"2.{minor}.7" for minor in range(20, 32))
SIDES = tuple(f"nccl={version}" for version in VERSIONS)


def _rate(rates: Sequence[float], side: int, _: int) -> float:
    return rates[side]


def bisect(log: Path, rates: Sequence[float], noise: float, loss: float | None = None, seed: int = 1) -> Bisection:
    """Write the log of a bisection, in which each version has a rate, as the command does. Continue an earlier log."""
    for _ in range(30):
        state, more = next_step(SIDES, read_files([log]).paired if log.exists() else (), loss)
        if not more:
            return state
        names = [side.removeprefix("nccl=") for side in more.sides]
        own = [rates[VERSIONS.index(name)] for name in names]
        order = block_order(len(names), more.blocks, 1)
        noise_seed = random.Random(f"{seed} {names}").randrange(1 << 30)
        text = log_of(partial(_rate, own), order, names, noise=noise, seed=noise_seed)
        head, *runs = text.split("\n# imagebuild-compare begin ")
        head = head.replace(
            "# imagebuild-compare order",
            f"# imagebuild-compare error {error_rate(SIDES):.6f}\n# imagebuild-compare order",
        )
        first = sum(map(len, order[: more.first]))
        wanted = [run for number, run in enumerate(runs) if number < len(names) or number >= first]
        with log.open("a") as file:
            file.write("\n" + "\n# imagebuild-compare begin ".join([head, *wanted]))
    raise AssertionError("the bisection does not end")


@pytest.mark.parametrize("first", [1, 6, 11])
def test_the_first_version_with_a_small_loss(first: int, tmp_path: Path) -> None:
    rates = [350.0] * first + [350 * 0.985] * (12 - first)
    found = bisect(tmp_path / "a.log", rates, 0.003, seed=first)
    assert (found.is_complete, found.first_bad, found.problem) == (True, SIDES[first], "")
    assert len(found.judged) <= 6


def test_a_log_that_is_cut_anywhere_gives_the_same_answer(tmp_path: Path) -> None:
    rates = [350.0] * 5 + [340] * 7
    whole = bisect(tmp_path / "a.log", rates, 0.001)
    text = (tmp_path / "a.log").read_text()
    draw = random.Random(3)
    for end in (
        *(draw.randrange(len(text)) for _ in range(5)),
        text.index("order") + 9,
        text.index("compare sides") + 20,
    ):
        (tmp_path / "b.log").write_text(text[:end])
        until, more = next_step(SIDES, read_files([tmp_path / "b.log"]).paired)
        assert more or until == whole, end
        assert until.judged == whole.judged[: len(until.judged)], "what is known until there"
        again = bisect(tmp_path / "b.log", rates, 0.001)
        assert (again.first_bad, again.is_complete) == (SIDES[5], True), end


@pytest.mark.parametrize(
    ("rates", "loss", "says"),
    [
        ([350.0] * 12, None, "nccl=2.31.7 is not slower than nccl=2.20.7: "),
        ([350.0] * 11 + [347], 2, "nccl=2.31.7 is not slower than nccl=2.20.7: "),
        ([350.0] * 5 + [343.0] + [336.0] * 6, None, "nccl=2.25.7 is neither good nor bad: -2."),
    ],
)
def test_what_cannot_be_decided(rates: list[float], loss: float | None, says: str, tmp_path: Path) -> None:
    found = bisect(tmp_path / "a.log", rates, 0.003, loss)
    assert found.problem.startswith(says)
    assert not found.is_complete
    text = (tmp_path / "a.log").read_text()
    assert (f"begin {3 * (LOOKS[0] + 1)}\n" in text) == (loss is None), "with a limit, the first look is enough"
