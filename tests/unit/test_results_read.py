"""Reading files: published logs with known numbers, several tools, and input that is none."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from imagebuild.errors import ResultError
from imagebuild.results.read import read, read_text
from tests.unit.nccl_tables import Table, broken, same

LOGS = Path(__file__).parent.parent / "data" / "nccl-logs"
INDEX = json.loads((LOGS / "index.json").read_text())["logs"]


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_published_logs(entry: dict[str, object]) -> None:
    results = read([LOGS / str(entry["file"])])
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


def test_all_logs_of_a_directory() -> None:
    results = read([LOGS])
    assert len(results.runs) == len(INDEX)
    assert [source.tools for source in results.sources if source.path.endswith(".txt")] == [("nccl-tests",)] * len(
        INDEX
    )


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"no-such-file: No such file"):
        read([tmp_path / "no-such-file"])
    with pytest.raises(ResultError, match="no output of a known benchmark"):
        read([tmp_path])
    (tmp_path / "a.txt").write_text("hello\n")
    with pytest.raises(ResultError, match=r"a\.txt: no output of a known benchmark"):
        read([tmp_path / "a.txt"])
    (tmp_path / "b.txt").write_text(Table().text())
    results = read([tmp_path])
    assert [(Path(source.path).name, source.tools, source.lines) for source in results.sources] == [
        ("a.txt", (), 1), ("b.txt", ("nccl-tests",), len(Table().lines())),
    ]  # fmt: skip


def test_a_text_in_memory() -> None:
    table = Table()
    same(read_text("check", table.text()).runs[0], table)
    assert read_text("check", "").sources[0].tools == ()
    assert read_text("check", "\udc80\ud800 x").runs == ()


def test_what_could_not_be_read_is_shown() -> None:
    table = Table()
    text = "\n".join([*table.head(), table.body()[0][:60], *table.body()[1:], *table.foot()])
    source = read_text("log", text).sources[0]
    assert (source.unread, source.examples) == (1, (table.body()[0][:60].strip(),))


def test_several_tools_in_one_file() -> None:
    nvbandwidth = "nvbandwidth Version: v0.8\nRunning device_to_device_memcpy_read_ce.\nmemcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)\n           0         1\n 0       N/A    396.12\n 1    396.21       N/A\n\nSUM device_to_device_memcpy_read_ce 792.33\n"
    results = read_text("log", Table().text() + nvbandwidth + Table("2.10").text())
    assert results.sources[0].tools == ("nvbandwidth", "nccl-tests")
    assert [run.verdict for run in results.runs] == ["ok", "ok"]
    assert results.tests[0].sum == 792.33


SEEDS = [path.read_text() for path in sorted(LOGS.glob("*.txt"))] + [
    Table().text(), Table("1.0", "broadcast").text(), "\n".join(broken(Table(per_iteration=True).lines(), random.Random(1), 0.5)),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_spoiled_input_is_no_error(seed: int) -> None:
    source = random.Random(seed)
    for text in SEEDS:
        cut = text[: source.randrange(len(text))]
        shuffled = text.splitlines()
        source.shuffle(shuffled)
        mutated = list(text)
        for _ in range(source.randrange(1, 200)):
            at = source.randrange(len(mutated))
            mutated[at : at + source.randrange(3)] = source.choice(
                ["\n", " ", "\0", "\x1b[", "9" * 40, "é", "{", "[", '"', "-", "e+99", "N/A", "nan", ""]
            )
        for spoiled in (cut, "\n".join(shuffled), "".join(mutated), text[source.randrange(len(text)) :]):
            for run in read_text("log", spoiled).runs:
                assert run.reason


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_no_error(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    (tmp_path / "log").write_bytes(source.randbytes(20_000))
    with pytest.raises(ResultError):
        read([tmp_path / "log"])
    alphabet = " \n\t0123456789.,:;#-+{}[]()<>\"'/|eEfloatsumNACINFO\x1b\r\0"
    read_text("log", "".join(source.choices(alphabet, k=20_000)))


HARD = [
    "1 ", "1" * 40, " " * 50, "1 1 float ", "8 2 float sum -1 ", "[", "{", '{"results":', '["', "a" * 50, "[1,0]<stdout>:", "0: ",
    "a:1:1 [0] NCCL INFO ", "Rank 0 ", "# ", "> ", "1.1e+", "-", "N/A ", "1 1 float 1 1 1 1\n", "\x1b[", "_perf ", "...", "|", "a.",
    "8 2 float sum -1 1 1 1\n", "node: ", "1\n", "{\n", "[{\n", '{"results":\n', '{"results":[1,2],\n', "# Rank 0 Pid 1 on a device 0 [0x00] x\n", "# nThread 1 nGpus 1 minBytes 1 maxBytes 2\n",
    "# Out of bounds values : 0 OK\n", "# size count type redop root time algbw busbw #wrong\n", "Test NCCL failure\n", "# nThread 1 nGpus 1 minBytes 1 maxBytes 2\nTest NCCL failure\n", "+ all_reduce_perf -b\n",
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
    small, large = min(seconds(40_000) for _ in range(3)), min(seconds(320_000) for _ in range(2))
    assert large < 24 * small + 0.5
