"""Output of all tools in one file, through `read`: with prefixes, JSON between text, and documents that are cut."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from imagebuild.results.models import Results
from imagebuild.results.read import read_text

from .results_fuzz import broken
from .test_results_dcgm import NEW as DIAG
from .test_results_dcgm import new_document
from .test_results_nvbandwidth import BOTH_WAYS, DOCUMENT, HOST, PAIRS
from .test_results_p2p import WHOLE as P2P
from .test_results_perftest import OLD, run

UCX = (Path(__file__).parent.parent / "data" / "ucx-logs" / "latency.txt").read_text()
SWEEP = run((2, "5.30"), (65536, "190.11"))
ALL = {
    "nvbandwidth": HOST + PAIRS + BOTH_WAYS,
    "p2pBandwidthLatencyTest": P2P,
    "perftest": SWEEP,
    "ucx_perftest": UCX,
    "dcgmi": DIAG,
}
LEVELS = """{
"test_info": {
"test": "Send_BW_Test",
"Device": "mlx5_0"
},
"results": {
"MsgSize": 64,
sl: 3,
"n_iterations": 1000,
"BW_peak": 9.10,
"BW_average": 9.00,
 "MsgRate": 0.017578
}
}
"""


def counts(results: Results) -> tuple[int, int, int, int]:
    return len(results.tests), len(results.tables), len(results.ucx), len(results.diagnostics)


def unread(results: Results) -> list[str]:
    return [example for source in results.sources for example in source.examples]


def test_everything_in_one_file() -> None:
    results = read_text("log", "".join(ALL.values()))
    assert counts(results) == (3 + 1 + 3 + 9, 1, 1, 7)
    assert set(results.sources[0].tools) == set(ALL)
    assert unread(results) == []


@pytest.mark.parametrize(("first", "second"), list(permutations(ALL, 2)))
def test_a_tool_after_another_that_was_cut(first: str, second: str) -> None:
    """The second reads the same as alone, wherever the first ends."""
    alone, text = read_text("log", ALL[second]), ALL[first]
    for at in range(0, len(text), max(1, len(text) // 12)):
        before, both = read_text("log", text[:at]), read_text("log", f"{text[:at]}\n\n{ALL[second]}")
        assert tuple(map(sum, zip(counts(before), counts(alone), strict=True))) == counts(both), text[:at][-200:]


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "0: ", "[0] ", "2026-01-02T03:04:05.678901234Z "])
def test_prefixes_of_launchers(prefix: str) -> None:
    for text in ALL.values():
        prefixed = "".join(prefix + line for line in text.splitlines(keepends=True))
        assert counts(read_text("log", prefixed)) == counts(read_text("log", text))


def test_json_between_warnings_with_braces() -> None:
    text = json.dumps(DOCUMENT, indent="\t").replace(": ", " : ")
    results = read_text(
        "log",
        f"WARNING: file is in use {{\nWARNING: {{{{}}}}}}}}\n{text}\nWARNING: }} {{\n{json.dumps(new_document())}\n",
    )
    assert counts(results) == (3, 0, 0, 4)
    assert unread(results) == []


def test_json_with_one_key_without_quotes() -> None:
    results = read_text("log", LEVELS + LEVELS)
    assert [table.rows[0].bw_average for table in results.tables] == [9.0, 9.0]
    assert [table.verdict for table in results.tables] == ["ok", "ok"]


def test_json_of_before_2024_beside_sound_json() -> None:
    for text in (OLD + LEVELS, LEVELS + OLD):
        assert sorted(table.rows[0].bw_average or 0 for table in read_text("log", text).tables) == [9.0, 190.11]


def test_json_without_its_end_is_counted() -> None:
    text = json.dumps(new_document(), indent=1)
    results = read_text("log", text[: text.index('"info"')])
    assert "line 1: a JSON document of dcgmi without its end" in unread(results)
    assert [result.status for result in results.diagnostics][:1] == ["pass"]


def test_fuzz() -> None:
    for text in (
        *broken("".join(ALL.values()), count=60),
        *broken(json.dumps(DOCUMENT, indent=1) + LEVELS + OLD, count=60),
    ):
        read_text("log", text)
