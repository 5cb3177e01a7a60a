"""Reading files: published logs with known numbers, the output of all tools in one file, and input that is spoiled."""

from __future__ import annotations

import gzip
import json
import random
import time
from itertools import permutations
from pathlib import Path

import pytest

from imagebuild.bench import Results, read_files, read_text
from imagebuild.core import ConfigError
from tests.unit.bench.fuzz import broken, spoiled
from tests.unit.bench.nccl_tables import Table, broken_lines
from tests.unit.bench.test_dcgm import new_document
from tests.unit.bench.test_nccl_json import document as nccl_document
from tests.unit.bench.test_nvbandwidth import BOTH_WAYS, DOCUMENT, HOST, PAIRS
from tests.unit.bench.test_perftest import LEVELS, OLD
from tests.unit.bench.test_perftest import document as perftest_document
from tests.unit.bench.test_perftest import run as perftest_run

LOGS = Path(__file__).parents[2] / "data" / "nccl-logs"
INDEX = json.loads((LOGS / "index.json").read_text())["logs"]


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_published_logs(entry: dict[str, object]) -> None:
    results = read_files([LOGS / str(entry["file"])])
    assert len(results.runs) == 1
    run = results.runs[0]
    last = run.rows[-1]
    assert last.in_place is not None
    assert {
        "collective": run.collective, "rows": len(run.rows), "first_size": run.rows[0].size_bytes, "last_size": last.size_bytes,
        "busbw_out_of_place": last.out_of_place.busbw_gb_s, "busbw_in_place": last.in_place.busbw_gb_s, "wrong": run.wrong_total,
        "average": run.avg_busbw_gb_s, "out_of_bounds": run.out_of_bounds, "ranks": run.ranks, "verdict": run.verdict,
    } == {key: value for key, value in entry.items() if key not in ("file", "origin", "shows")}  # fmt: skip
    assert run.partial_rows == 0
    assert (results.sources[0].tools, results.sources[0].unread) == (("nccl-tests",), 0)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such-file: cannot be read: No such file"):
        read_files([tmp_path / "no-such-file"])
    packed = gzip.compress(Table().text().encode())
    damages = {
        "are damaged (CRC check failed": packed[:-8] + bytes(8),
        "are damaged (Error -3": packed[:30] + b"\xff" * 200,
    }
    for problem, data in {**damages, "break off": packed[:9]}.items():
        (tmp_path / "bad.gz").write_bytes(data)
        (source,) = read_files([tmp_path / "bad.gz"]).sources
        assert source.damage.startswith(f"its compressed data {problem}")
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "b.txt").write_text(Table().text())
    results = read_files(sorted(tmp_path.glob("*.txt")))
    assert [(Path(source.path).name, source.tools, source.lines) for source in results.sources] == [
        ("a.txt", (), 1), ("b.txt", ("nccl-tests",), len(Table().lines())),
    ]  # fmt: skip


P2P = "P2P Connectivity Matrix\n     D\\D     0     1\n     0       1     1\n     1       1     1\n"
CSV = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n1,2,3,4,5,6,7,8\n"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (P2P, "the output of p2pBandwidthLatencyTest is not read; use nvbandwidth, which measures the same"),
        (CSV, "the CSV of ucx_perftest is not read; run it without -v"),
        ("| Diagnostic     | Result        |\n", "the table of dcgmi diag is not read; use dcgmi diag -j"),
    ],
)
def test_outputs_that_are_named_as_not_read(text: str, advice: str) -> None:
    for other in ("", Table().text()):
        results = read_text("log", text + other)
        assert (results.sources[0].examples, len(results.runs)) == ((advice,), bool(other))


@pytest.mark.parametrize(
    "text",
    [
        "Running tests\n# SUM 3\n 0 1 2\nError: no\nWaived\nmemcpy failed\n",
        " 8388608    20000            24056.74            24056.72\t\t   0.003007\nFailed to do it\n# bytes\n",
        "Finally: 1 2 3 4\n| Test | x |\n[thread 0] 1 2 3\n",
        "hello\n1 2 3 4 5 6 7\n[1,0]<stdout>: # size 5\nGPU 0: NVIDIA H100\n",
        "srun: error: node1: task 0: Exited with exit code 1\n", "", "\udc80\ud800 x",
        "{", "[", "{}", "[]", "{ x }", '{"a": 1}', "[0] x", '{"results": {}}', '{"version": 1', "{" * 5000,
        '{"results":[' * 5000, '{"results": [{"size": 1}]}', '{"results": {"size": 1}}', '{"results": {"x": 1}}',
        '{"test_info": {}}', '{"nvbandwidth": 1}', '{"results": []}', '{"iterations": 20}', '{"iterations": [1]}',
        '{"test_categories": []}',
    ],
)  # fmt: skip
def test_what_others_print_is_nothing(text: str) -> None:
    results = read_text("log", text)
    assert (*counts(results), *results.runs, *unread(results), *results.sources[0].tools) == (0, 0, 0, 0)


UCX = (Path(__file__).parents[2] / "data" / "ucx-logs" / "latency.txt").read_text()
SWEEP = perftest_run((2, "5.30"), (65536, "190.11"))
ALL = {
    "nvbandwidth": HOST + PAIRS + BOTH_WAYS,
    "perftest": SWEEP,
    "ucx_perftest": UCX,
}


def counts(results: Results) -> tuple[int, int, int, int]:
    return len(results.tests), len(results.tables), len(results.ucx), len(results.diagnostics)


def unread(results: Results) -> list[str]:
    return [example for source in results.sources for example in source.examples]


def test_everything_in_one_file() -> None:
    results = read_text("log", "".join(ALL.values()))
    assert counts(results) == (3 + 1 + 3, 1, 1, 0)
    assert set(results.sources[0].tools) == set(ALL)
    assert unread(results) == []


@pytest.mark.parametrize(("first", "second"), list(permutations(ALL, 2)))
def test_a_tool_after_another_that_was_cut(first: str, second: str) -> None:
    """The second reads the same as alone, wherever the first ends."""
    alone, text = read_text("log", ALL[second]), ALL[first]
    for at in range(0, len(text), max(1, len(text) // 12)):
        before, both = read_text("log", text[:at]), read_text("log", f"{text[:at]}\n\n{ALL[second]}")
        assert tuple(map(sum, zip(counts(before), counts(alone), strict=True))) == counts(both), text[:at][-200:]


def test_json_between_warnings_with_braces() -> None:
    text = json.dumps(DOCUMENT, indent="\t").replace(": ", " : ")
    results = read_text(
        "log",
        f"WARNING: file is in use {{\nWARNING: {{{{}}}}}}}}\n{text}\nWARNING: }} {{\n{json.dumps(new_document())}\n",
    )
    assert counts(results) == (3, 0, 0, 4)
    assert unread(results) == []


def test_json_of_before_2024_beside_sound_json() -> None:
    for text in (OLD + LEVELS, LEVELS + OLD):
        assert sorted(table.rows[0].bw_average or 0 for table in read_text("log", text).tables) == [9.0, 190.11]


def test_json_without_its_end_is_counted() -> None:
    text = json.dumps(new_document(), indent=1)
    results = read_text("log", text[: text.index('"info"')])
    assert "line 1: a JSON document of dcgmi without its end" in unread(results)
    assert [result.status for result in results.diagnostics][:1] == ["pass"]


UCX_LOGS = [path.read_text() for path in sorted((Path(__file__).parents[2] / "data" / "ucx-logs").glob("*.txt"))]
FUZZED = [
    "".join(ALL.values()), json.dumps(DOCUMENT, indent=1) + LEVELS + OLD, "".join(UCX_LOGS), Table().text(),
    Table("2.0", "broadcast").text(), "\n".join(broken_lines(Table(per_iteration=True).lines(), random.Random(1), 0.5)),
    *(path.read_text() for path in sorted(LOGS.glob("*.txt"))), random.Random(1).randbytes(20_000).decode("latin-1"),
]  # fmt: skip
DOCUMENTS = [
    nccl_document(),
    DOCUMENT,
    new_document(),
    {"iterations": [new_document()]},
    perftest_document(MsgSize=65536, BW_peak=1.0, t_avg=1.5),
]


def assert_finite(results: Results) -> None:
    json.dumps(results.model_dump(), allow_nan=False)


@pytest.mark.parametrize("text", FUZZED, ids=range(len(FUZZED)))
def test_broken_text_is_no_error(text: str) -> None:
    for changed in broken(text, count=40):
        results = read_text("log", changed)
        assert_finite(results)
        assert all(run.reason for run in results.runs)


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_spoiled_documents_are_no_error(document: object) -> None:
    for changed in spoiled(document):
        assert_finite(read_text("log", json.dumps(changed)))


HARD = [
    "1 ", "8 2 float sum -1 ", "{", '["', "[1,0]<stdout>:", "a:1:1 [0] NCCL INFO ", "x: a:1:1 [0] NCCL INFO\n", "12 a:1:1 [0] NCCL INFO\n", "Rank 0 ", "1.1e+", "\x1b[", "...", "1\n", "{\n",
    '{"results":\n', '{"results":[1,2],\n', "# Rank 0 Pid 1 on a device 0 [0x00] x\n", "# Out of bounds values : 0 OK\n",
    "# nThread 1 nGpus 1 minBytes 1 maxBytes 2\nTest NCCL failure\n", "+ all_reduce_perf -b\n",
]  # fmt: skip


@pytest.mark.parametrize("piece", HARD, ids=range(len(HARD)))
def test_time_grows_with_size_only(piece: str) -> None:
    """Eight times the input may take about that, not sixty-four times, with room for other work of the machine."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        begin = time.process_time()
        read_text("log", text)
        return time.process_time() - begin

    seconds(2_000)
    small, large = min(seconds(40_000) for _ in range(2)), seconds(320_000)
    assert large < 24 * small + 0.5
