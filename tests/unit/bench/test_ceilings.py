"""Formulas against the figures of public measurements, their limits, and their own texts."""

from dataclasses import replace
from typing import get_args

import pytest

from imagebuild.bench.ceilings import RankLayout, class_ceilings
from imagebuild.bench.models import Collective
from tests.conftest import data

HGX = RankLayout(1, 450, 400, nvls=True, sharp=True)


def value(collective: str, ranks: int, nodes: int, hardware: RankLayout, algorithm: str | None = None) -> float:
    """The ceiling of the class, else of the loosest one."""
    known = class_ceilings(collective, ranks, replace(hardware, domains=nodes))
    return max((ceiling.value for ceiling in known if algorithm in (None, ceiling.algorithm)), default=0.0)


MEASURED = data("bench/measured")


@pytest.mark.parametrize(
    ("measured", "ranks", "nodes", "network", "of_flat", "of_hierarchical"), MEASURED.values(), ids=MEASURED
)
def test_public_measurements(
    measured: float, ranks: int, nodes: int, network: float, of_flat: float, of_hierarchical: float
) -> None:
    endless = RankLayout(1, 1e9, network)  # so that the network alone limits
    assert 100 * measured / value("all_reduce", ranks, nodes, endless, "ring") == pytest.approx(of_flat, abs=0.51)
    share = 100 * measured / value("all_reduce", ranks, nodes, endless, "hierarchical")
    assert share == pytest.approx(of_hierarchical, abs=0.51)


ENDLESS, PLAIN = RankLayout(1, 1e9, 100), RankLayout(1, 450, 400)
WIDE = RankLayout(1, 1e9, 400, nvls=True, sharp=True)


@pytest.mark.parametrize(
    ("collective", "ranks", "nodes", "hardware", "algorithm", "expected"),
    [
        # NVLS exceeds the link for all_reduce alone, and not with two GPUs.
        *(("all_reduce", ranks, 1, HGX, None, 450 * f) for ranks, f in ((4, 1.2), (8, 14 / 9), (36, 70 / 37), (72, 142 / 73))),
        *((name, n, 1, HGX, None, 450) for name in ("all_gather", "reduce_scatter") for n in (4, 72)),
        *((name, n, 1, HGX, "nvls", 450 * (n - 1) / n) for name in ("all_gather", "reduce_scatter") for n in (4, 72)),
        ("all_reduce", 2, 1, HGX, "nvls", 300),
        ("all_reduce", 2, 1, HGX, None, 450),
        *(
            (name, n, k, ENDLESS, "hierarchical", 100 * f)
            for name in ("all_reduce", "all_gather", "reduce_scatter")
            for n, k, f in ((16, 2, 1.875), (32, 4, 31 / 24), (96, 12, 95 / 88), (8, 2, 1.75))
        ),
        # Two nodes of H100 are bound by the network with NVLS, else by links: 488 GB/s on two nodes prove NVLS.
        ("all_reduce", 16, 2, HGX, None, 750),
        ("all_reduce", 16, 2, PLAIN, None, 450 * 15 / 14),
        ("all_reduce", 16, 2, HGX, "ring", 400),
        # SHARP sends the size once.
        *(("all_reduce", 128, 16, WIDE, name, 2 * 127 / 128 * 400) for name in ("sharp", "nvls-sharp")),
        ("all_gather", 128, 16, WIDE, "sharp", 0.0),
        ("all_reduce", 128, 16, PLAIN, "sharp", 0.0),
        # alltoall by what leaves the node; with one rank a node, all cards are its own.
        ("alltoall", 16, 2, HGX, None, 50 * 15 / 8),
        ("alltoall", 8, 1, HGX, None, 450),
        ("alltoall", 4, 4, HGX, None, 400),
    ],
)  # fmt: skip
def test_ceilings_of_classes(
    collective: str, ranks: int, nodes: int, hardware: RankLayout, algorithm: str | None, expected: float
) -> None:
    assert value(collective, ranks, nodes, hardware, algorithm) == pytest.approx(expected)


def test_one_rank_and_unknown_things_have_no_ceiling() -> None:
    for collective in get_args(Collective):
        assert class_ceilings(collective, 1, HGX) == ()
        assert class_ceilings(collective, 16, RankLayout(2, 450)) == ()
        assert class_ceilings(collective, 7, replace(HGX, domains=2)) == ()
    assert class_ceilings("unheard-of", 8, HGX) == ()
