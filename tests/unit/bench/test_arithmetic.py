"""Collectives that fit the figures of nccl-tests, and figures that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from imagebuild.bench.arithmetic import contradiction, fitting_collectives
from imagebuild.bench.models import Half
from tests.conftest import data
from tests.unit.bench.nccl_tables import FACTORS, RELEASES, Table

CASES = data("cases/bench/arithmetic")


@pytest.mark.parametrize("peak", [0.04, 1.2, 45.0, 800.0, 20_000.0])
@pytest.mark.parametrize("collective", FACTORS)
@pytest.mark.parametrize(("release", "ranks"), [("2.10", 4), ("2.13.10", 16), ("2.19.6", 96)])
def test_a_slow_run_keeps_its_name(release: str, ranks: int, collective: str, peak: float) -> None:
    sizes = tuple(1 << power for power in range(20, 35, 2))
    table = Table(release, collective, ranks=ranks, sizes=sizes, speed=lambda size: peak * size / (size + 4e7))
    rows, labels = table.rows(), table.header()[1].split()
    assert fitting_collectives(rows, labels, ranks) == fitting_collectives(rows, labels, None) == (collective,)
    assert contradiction(rows, collective) == contradiction(rows, None) == ""


def test_what_fits_if_facts_are_missing_or_wrong() -> None:
    rows = Table("2.19.6", "sendrecv").rows()
    summed = [row.model_copy(update={"redop": "sum"}) for row in rows]
    # Two ranks of all_reduce have the same figures.
    assert fitting_collectives(summed, (), 8) == ("sendrecv",)
    assert fitting_collectives(summed, (), 2) == ("all_reduce",)
    # The list of ranks is cut.
    assert fitting_collectives(Table(ranks=16).rows(), (), 12) == ("all_reduce",)
    assert fitting_collectives(Table("2.13.10", "alltoall", validate=False).rows(), (), 8) == ("all_gather", "alltoall")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("row", "change", "reason"), CASES["figures-that-contradict-each-other"])
def test_figures_that_contradict_each_other(
    release: str, row: int | None, change: dict[str, float], reason: str
) -> None:
    def changed(half: Half | None) -> Half | None:
        return half and half.model_copy(update={name: getattr(half, name) * factor for name, factor in change.items()})

    rows = Table(release).rows()
    for at in range(len(rows)) if row is None else (row,):
        update = {"out_of_place": changed(rows[at].out_of_place), "in_place": changed(rows[at].in_place)}
        rows[at] = rows[at].model_copy(update=update)
    assert reason in contradiction(rows, "all_reduce")


@pytest.mark.parametrize(("update", "collective", "reason"), CASES["sizes-and-names-that-do-not-fit"])
def test_sizes_and_names_that_do_not_fit(update: dict[str, Any], collective: str | None, reason: str) -> None:
    assert reason in contradiction([row.model_copy(update=update) for row in Table().rows()], collective)
