"""The claims of a report, and its exit status."""

from __future__ import annotations

import json
import re

import pytest

from imagebuild.bench.models import BandwidthTest, DataPath, Diagnostic, TableRow
from imagebuild.bench.verification import Surroundings, VerifyResult
from imagebuild.core.console import visible
from imagebuild.report.document import Report, format_bytes, format_number, one_line, rows_of
from tests.conftest import data
from tests.report_samples import BAD, GIB, report, row, run

CASES = data("cases/report/document")

WAIVED = BandwidthTest(source="n", name="x", unit=None, verdict="waived", matrix=None, sum=None)
DAMAGED = WAIVED.model_copy(update={"verdict": "damaged"})
SKIPPED = Diagnostic(source="d.json", category="Stress", test="sm_stress", verdict="waived")


@pytest.mark.parametrize(
    ("content", "overall", "status", "failed"),
    [
        ({"runs": (run(),)}, "limited", 0, []),
        ({"tests": (DAMAGED,)}, "failed", 1, ["unfinished"]),
        ({"tests": (WAIVED,)}, "open", 1, []),
        ({"runs": (run(),), "tests": (WAIVED,)}, "limited", 0, []),
        ({"runs": (run(),), "diagnostics": (SKIPPED,)}, "open", 1, ["not compared"]),
        ({"tables": BAD.tables[-1:]}, "limited", 0, []),
    ],
)  # fmt: skip
def test_the_verdict_on_everything(content: dict[str, object], overall: str, status: int, failed: list[str]) -> None:
    made = report(**content)
    assert (made.overall, made.exit_status, [item.word for item in made.problems]) == (overall, status, failed)


def test_json_is_read_back_and_has_null_for_unknown() -> None:
    data = json.loads(BAD.model_dump_json())
    assert data["runs"][0]["avg_busbw_gb_s"] is None
    assert Report.model_validate(data) == BAD
    with pytest.raises(ValueError, match="there must be one for each result"):
        Report.model_validate(data | {"judgements": []})


def test_names_tell_runs_apart() -> None:
    runs = (run(), run(source="b/mpi.log"), run(source="c/mpi.log"), run("sendrecv", ranks=16, nodes=2))
    assert [entry.name for entry in report(runs=runs).entries] == [
        "all_reduce, 8 ranks, 1 node, all_reduce.log",
        "all_reduce, 8 ranks, 1 node, mpi.log #1",
        "all_reduce, 8 ranks, 1 node, mpi.log #2",
        "sendrecv, 16 ranks, 2 nodes",
    ]


def test_the_best_value_is_of_either_placement_or_the_least_time() -> None:
    runs = (run("a", rows=(row(GIB, 300.0, 301.25), row(2 * GIB, 300.5))), run("b", rows=(row(GIB, None),)))
    assert [row.best for row in rows_of(report(runs=runs))] == ["301.2 GB/s at 1 GiB", "–"]
    times = [TableRow(size_bytes=size, latency_us={"min": 1.0, "average": 3.9}) for size in (2, None)]
    (timed,) = rows_of(report(tables=(BAD.tables[1].model_copy(update={"rows": times}),)))
    assert timed.best == "3.9 µs at 2 B"


def test_numbers() -> None:
    sizes = [format_bytes(size) for size in (0, 1000, 1024, 3 << 19, 8 * GIB, 26549638485)]
    assert sizes == ["0 B", "1000 B", "1 KiB", "1.5 MiB", "8 GiB", "24.73 GiB"]
    numbers = [format_number(value) for value in (None, 0.0, 482.27, 12.345, 0.000457)]
    assert numbers == ["–", "0", "482.3", "12.35", "0.000457"]


def test_text_that_acts_on_terminals_is_harmless() -> None:
    text = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x00\r\nnext\rlast\u202e\ud800"
    assert visible(text) == "red\ufffd\nnext\nlast\ufffd\ufffd"
    assert one_line("a\n\n  b" + "c" * 400).startswith("a bccc")
    assert len(one_line("c" * 400)) == 300


@pytest.mark.parametrize(("path", "gpu", "named"), CASES["a-report-names-known-faults"])
def test_a_report_names_known_faults(path: dict[str, str], gpu: str | None, named: str) -> None:
    made = report(runs=(run().model_copy(update={"carried": DataPath.model_validate(path)}),))
    made = made.model_copy(update={"about": made.about.model_copy(update={"gpu": gpu})})
    notes = [note for note, _ in made.notes if "known faults" in note]
    assert [bool(re.match(f"known faults of {named}", note)) for note in notes] == [True] * bool(named), notes


def test_a_report_names_known_faults_of_the_drivers() -> None:
    facts = {
        "driver": "NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023",
        "ofed": "24.10-1.1.4",
    }
    seen = Surroundings(runner="docker", facts=facts)
    verified = VerifyResult(image="a", digest=None, target=None, platform="linux/amd64", checks=(), surroundings=seen)
    notes = dict(report(verifications=(verified,)).notes)
    assert "known faults of driver 535.54.03: driver-535.104.05-bitwise-and" in " ".join(notes)
    assert any(note.startswith("known faults of ofed 24.10.1.1.4: ofed-24.10") for note in notes)
