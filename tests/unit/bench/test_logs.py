"""Lines of logs: prefixes, debug output, encodings, and the time and memory for a large log."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path

import pytest

from imagebuild.bench.logs import log_from_text, read_log
from imagebuild.bench.read import read_files
from tests.conftest import data
from tests.unit.bench.nccl_tables import Table, noise, same


def texts(text: str) -> list[str]:
    return [line.text for line in log_from_text("log", text).lines]


LINES = data("bench/lines")


@pytest.mark.parametrize(
    ("line", "process", "rest"), [*LINES["prefixes"], *((line, "", line) for line in LINES["plain"])]
)
def test_prefixes(line: str, process: str, rest: str) -> None:
    assert [(clean.process, clean.text) for clean in log_from_text("log", line).lines] == [(process, rest)]


@pytest.mark.parametrize("line", LINES["debug"])
def test_debug_output_is_left_out(line: str) -> None:
    log = log_from_text("log", f"first\n{line}\n{line}\nlast\n")
    assert ([clean.text for clean in log.lines], log.line_count) == (["first", "last"], 4)
    assert len(log.warnings) == (2 if "WARN" in line else 0)


@pytest.mark.parametrize(("line", "kept"), LINES["before-debug"])
def test_text_before_debug_output_is_kept(line: str, kept: str) -> None:
    assert texts(line) == [kept]
    assert texts(f"node1:1:1 [0] NCCL INFO\n{line}") == [kept]


def test_what_is_no_row_is_not_joined_with_the_next_line() -> None:
    """pdsh writes its prefix before debug output, too."""
    assert texts("x: node1:12:34 [0] NCCL INFO a\n# size\n12:07:33 node1:12:34 [0] NCCL INFO b\nlast") == [
        "x: ",
        "# size",
        "12:07:33 ",
        "last",
    ]


def test_encodings(tmp_path: Path) -> None:
    text = "a\r\nbß\n\x1b[1;32mc\x1b[0m\x1b]0;title\x07\nd\0e\n10%\r20%\rlast\n```text\n"
    for content in (
        text.encode(),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        b"\xfe\xff" + text.encode("utf-16-be"),
    ):
        (tmp_path / "log").write_bytes(content)
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


def test_megabytes_of_debug_output(tmp_path: Path) -> None:
    """The limit of the time allows for a busy machine. The memory does not depend on the size of the log."""
    source = random.Random(1)
    sample = [noise(source) for _ in range(500)]
    table = Table()
    with (tmp_path / "log").open("w") as file:
        for line in table.lines():
            for _ in range(3):
                file.write("\n".join(sample) + "\n")
            file.write(line + "\n")
    assert (tmp_path / "log").stat().st_size > 4_000_000
    begin = time.process_time()
    results = read_files([tmp_path / "log"])
    assert time.process_time() - begin < 3
    same(results.runs[0], table)
    tracemalloc.start()
    assert len(read_log(tmp_path / "log").lines) == len(table.lines())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
