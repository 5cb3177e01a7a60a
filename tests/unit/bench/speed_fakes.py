"""Results like those of the parsers, for tests of claims about speed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from imagebuild.bench.models import BandwidthTest, PerftestTable, Run, TableRow
from imagebuild.bench.profiles import Profile, Profiles, load_profiles
from tests.conftest import ROOT
from tests.report_samples import row

GIB = 2**30


@cache
def every_shipped() -> Profiles:
    return load_profiles(ROOT / "profiles")


def shipped(name: str) -> Profile:
    return every_shipped()[name].model


def run(*values: tuple[int, float, float | None], **changes: object) -> Run:
    """Return a run with 8 ranks of H200 on one node, with `changes`. Values are size, out of place and in place."""
    ranks = changes.get("ranks") or 8
    assert isinstance(ranks, int)
    factor = 1.0
    if changes.get("collective", "all_reduce") in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
        factor = max(1, ranks - 1) / ranks * (2 if changes.get("collective", "all_reduce") == "all_reduce" else 1)
    rows = tuple(row(size, out, inside, factor) for size, out, inside in values)
    base = Run(source="a.log", collective="all_reduce", ranks=8, nodes=1, devices=("NVIDIA H200",), rows=rows,
               avg_busbw_gb_s=1.0, verdict="ok", reason="complete")  # fmt: skip
    return base.model_copy(update=changes)


def matrix(name: str, *rows: tuple[float | None, ...], **changes: object) -> BandwidthTest:
    base = BandwidthTest(source="b.log", name=name, unit="GB/s", matrix=rows, sum=None)
    return base.model_copy(update=changes)


def table(average: float, unit: str | None, test: str = "RDMA_Write BW", **changes: object) -> PerftestTable:
    rows = (TableRow(size_bytes=2, bw_average=0.01), TableRow(size_bytes=2**23, bw_peak=0.0, bw_average=average))
    return PerftestTable(source="c.log", test=test, unit=unit, rows=rows).model_copy(update=changes)


BOX = (ROOT / "tests/data/bench/box.yaml").read_text()


def folder(root: Path, **files: str) -> Path:
    """Write the profile `box` and others to a folder, and return the folder."""
    for name, text in {"box": BOX, **files}.items():
        (root / f"{name}.yaml").write_text(text)
    return root
