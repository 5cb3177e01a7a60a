"""Collectives that fit the figures of nccl-tests, and figures that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from imagebuild.bench.arithmetic import contradiction, fitting_collectives
from imagebuild.bench.models import Half
from tests.unit.bench.nccl_tables import FACTORS, RELEASES, Table


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
@pytest.mark.parametrize(
    ("row", "change", "reason"),
    [
        (5, {"time_us": 1.1}, "time and algbw of the row"), (9, {"time_us": 0.9}, "time and algbw of the row"),
        (7, {"busbw_gb_s": 1.05}, "algbw and busbw of the row"), (9, {"algbw_gb_s": 1.05, "time_us": 1 / 1.05}, "algbw and busbw of the row"),
        (None, {"algbw_gb_s": 1.2, "busbw_gb_s": 1.2}, "time and algbw"), (None, {"busbw_gb_s": 0.9}, "busbw is 1.57 * algbw: these are not the figures of all_reduce"),
        (7, {"busbw_gb_s": 0.0}, "algbw and busbw of the row"), (7, {"time_us": 0.0}, "time and algbw of the row"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("update", "collective", "reason"),
    [
        ({"count": 3}, None, "size and count of the row of"),
        ({"dtype": "half"}, "all_reduce", "size is 2 * count, busbw is 1.75 * algbw: these are not the figures of all_reduce"),
        ({"dtype": "half"}, None, "these are not the figures of a collective"),
        ({}, "reduce", "size is that of `count` elements, busbw is 1.75 * algbw: these are not the figures of reduce"),
        ({"size_bytes": 1 << 20, "count": 1 << 18}, None, "time and algbw"),
    ],
)  # fmt: skip
def test_sizes_and_names_that_do_not_fit(update: dict[str, Any], collective: str | None, reason: str) -> None:
    assert reason in contradiction([row.model_copy(update=update) for row in Table().rows()], collective)
