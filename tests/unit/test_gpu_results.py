"""The results measured on GPUs, and what the profiles say of them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from imagebuild import profiles
from imagebuild.report.document import Report
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "gpu-results"


def reports() -> list[Report]:
    return [Report.model_validate_json(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


def bests() -> dict[tuple[str, int], list[float]]:
    """Collective and ranks → the best bus bandwidth at 1 GiB or more, of each run."""
    found = defaultdict(list)
    for report in reports():
        for run in report.runs:
            rows = [row for row in run.rows if row.size_bytes >= 1 << 30]
            halves = [half for row in rows for half in (row.out_of_place, row.in_place) if half]
            assert run.collective
            assert run.ranks
            found[run.collective, run.ranks].append(max(half.busbw_gb_s or 0 for half in halves))
    return found


def test_all_data_were_right() -> None:
    assert len(reports()) == 4
    assert {run.verdict for report in reports() for run in report.runs} == {"ok"}
    assert not sum(source.unread for report in reports() for source in report.sources)


def test_references_are_the_least_of_the_runs() -> None:
    found = bests()
    known = profiles.find(profiles.load_profiles(Path(ROOT / "profiles")), "h200").model
    ours = [reference for reference in known.references if "gpu-results" in reference.source]
    assert len(ours) == 18
    for reference in ours:
        values = found[reference.collective, reference.ranks]
        assert len(values) == 4
        assert reference.rate == pytest.approx(min(values), abs=0.06)
