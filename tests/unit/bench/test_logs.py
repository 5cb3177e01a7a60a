"""Lines of logs: prefixes, debug output, encodings, and the time and memory that a large log takes."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import pytest

from imagebuild.bench import log_from_text, read_files, read_log
from tests.unit.bench.nccl_tables import Table, noise, same


def texts(text: str) -> list[str]:
    return [line.text for line in log_from_text("log", text).lines]


@pytest.mark.parametrize(("line", "process", "rest"), [
    ("[1,0]<stdout>:  8  2", "1,0", " 8  2"),
    ("[prterun-node1-123@1,7][node1:55]<stdout>: x", "1,7", "x"),
    ("[Sat Nov 21 07:26:50 2026][1,2]<stdout>: x", "1,2", "x"),
    ("Sat Nov 21 07:26:50 2026[1,2]<stdout>:x", "1,2", "x"),
    (" 12: x", "12", "x"),
    ("[4] x", "4", "x"),
    ("[default2]:x", "2", "x"),
    ("[pod/a-b/mpi] x", "pod/a-b/mpi", "x"),
    ("[pod/a-b/mpi] 2026-11-21T07:26:50.123456789Z [1,2]<stdout>:x", "pod/a-b/mpi 1,2", "x"),
    ("2026-11-21T07:26:50.1+01:00 stderr F x", "", "x"),
    ("> # x", "", "# x"),
    ("node7: #  size", "node7", "#  size"),
    ("[1,0]<stdout>: 8 2 float sum -1[1,0]<stdout>:    85.14", "1,0", "8 2 float sum -1     85.14"),
    ("[0]  8 2 float sum -1[0]  85.14    0.01", "0", " 8 2 float sum -1   85.14    0.01"),
    ("nccl-launcher-x7 mpi #  size", "nccl-launcher-x7 mpi", "#  size"),
    ("worker-0  | #  size", "worker-0", "#  size"),
    ("Nov 21 07:26:50 node7 nccl[812]:   8  2", "node7 nccl", "  8  2"),
    ('        "#  size  count",', "", "#  size  count"),
])  # fmt: skip
def test_prefixes(line: str, process: str, rest: str) -> None:
    assert [(clean.process, clean.text) for clean in log_from_text("log", line).lines] == [(process, rest)]


@pytest.mark.parametrize("line", [
    "node7: Test NCCL failure common.cu:1 'x'", "0.00      0", "10:20:30 x", "Device 0: NVIDIA H100", "GPU0: Pass", "  0.5: x",
    "[thread 0]  100  0.5", "[1734.1] [node1:77:0] ucp.c:1 UCX  WARN x", "<table>", "Mo: x", "  1024  256  float",
])  # fmt: skip
def test_lines_without_a_prefix(line: str) -> None:
    assert [(clean.process, clean.text) for clean in log_from_text("log", line).lines] == [("", line)]


@pytest.mark.parametrize("line", [
    "node1:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P", "[1,0]<stdout>:node1:12:34 [0] NCCL INFO x",
    "0: node1:12:34 [0] NCCL INFO x", "[2026-11-21 07:12:33] node1:12:34 [0] transport/net.cc:12 NCCL WARN x",
    "node1:12:34 [0] init.cc:12 (ncclInit) NCCL WARN x", "node1:12:34 [0] 12.5 ncclInit:77 NCCL TRACE x", "node1:12:34 NCCL CALL x",
    "10.0.0.1:12:34 [0] NCCL INFO x", "a.b-c.example:12:34 [-1] NCCL INFO x",
    "[1734567.123456] [node1:77:0]     ucp_context.c:2119 UCX  INFO  Version 1.17.0",
    "2026-11-21T07:26:50.12Z node1:12:34 [0] NCCL INFO x",
])  # fmt: skip
def test_debug_output_is_left_out(line: str) -> None:
    log = log_from_text("log", f"first\n{line}\n{line}\nlast\n")
    assert ([clean.text for clean in log.lines], log.line_count) == (["first", "last"], 4)
    assert len(log.warnings) == (2 if "WARN" in line else 0)


@pytest.mark.parametrize(("line", "kept"), [
    ("     1024   256   float    sum      -1node1:12:34 [0] NCCL INFO x", "     1024   256   float    sum      -1"),
    ("  0.02    N/Anode1:12:34 [0] NCCL INFO x", "  0.02    N/A"),
    ("  0.02      0[1,3]<stderr>:node1:12:34 [0] NCCL INFO x", "  0.02      0"),
    ("[1,0]<stdout>:  0.02      0node1:12:34 [0] NCCL INFO x", " 0.02      0"),
    ("  10737node1:12:34 [0] NCCL INFO x", "  10737"),
    ('{"a": "node1:12:34 [0] NCCL INFO x"}', '{"a": "node1:12:34 [0] NCCL INFO x"}'),
    ("about NCCL INFO lines", "about NCCL INFO lines"),
    ("[1734567.123456] [node1:77:0]     ucp_context.c:2119 UCX  ERROR no device", None),
])  # fmt: skip
def test_text_before_debug_output_is_kept(line: str, kept: str | None) -> None:
    assert texts(line) == [kept or line]
    assert texts(f"node1:1:1 [0] NCCL INFO\n{line}") == [kept or line]


def test_what_is_no_row_is_not_joined_with_the_next_line() -> None:
    """As pdsh writes it: its prefix stands before debug output, too."""
    assert texts("x: node1:12:34 [0] NCCL INFO a\n# size\n12:07:33 node1:12:34 [0] NCCL INFO b\nlast") == [
        "x: ",
        "# size",
        "12:07:33 ",
        "last",
    ]


def test_encodings(tmp_path: Path) -> None:
    text = "a\r\nbß\n\x1b[1;32mc\x1b[0m\x1b]0;title\x07\nd\0e\n10%\r20%\rlast\n```text\n"
    for data in (
        text.encode(),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        b"\xfe\xff" + text.encode("utf-16-be"),
    ):
        (tmp_path / "log").write_bytes(data)
        log = read_log(tmp_path / "log")
        assert [line.text for line in log.lines] == ["a", "bß", "c", "de", "10%", "20%", "last"]
        assert [line.number for line in log.lines] == [1, 2, 3, 4, 5, 5, 5]
        assert log.line_count == 6
    (tmp_path / "log").write_bytes(b"\xff\xff\xfe\n\x80 x")
    assert len(read_log(tmp_path / "log").lines) == 2
    (tmp_path / "log").write_bytes(b"")
    assert read_log(tmp_path / "log").line_count == 0


def test_lines_that_docker_wrapped() -> None:
    assert texts('{"log":"  8  2\\n","stream":"stdout","time":"2026-11-21T07:26:50.1Z"}\n{"log":5}\n{"log":"') == [
        "  8  2",
        '{"log":5}',
        '{"log":"',
    ]


def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a" * 70_000_000)
    assert [len(line.text) for line in read_log(tmp_path / "log").lines] == [64 << 20, 70_000_000 - (64 << 20)]


def test_twenty_megabytes_of_debug_output(tmp_path: Path) -> None:
    """Takes 0.5 s on an idle machine; the limit is for one that does much else."""
    source = random.Random(1)
    sample = [noise(source) for _ in range(500)]
    table = Table()
    with (tmp_path / "log").open("w") as file:
        for line in table.lines():
            for _ in range(15):
                file.write("\n".join(sample) + "\n")
            file.write(line + "\n")
    size = (tmp_path / "log").stat().st_size
    assert size > 15_000_000
    begin = time.process_time()
    results = read_files([tmp_path / "log"])
    assert time.process_time() - begin < 9
    same(results.runs[0], table)
    tracemalloc.start()
    assert len(read_log(tmp_path / "log").lines) == len(table.lines())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
