"""perftest: tables of one and of several processes, errors before and after a table, and JSON of old versions."""

from __future__ import annotations

from functools import partial

import pytest

from imagebuild.bench import PerftestTable, TableRow
from tests.unit.bench.outputs import facts, read_json, read_part

RULE = "-" * 87 + "\n"
WAITING = "*" * 36 + "\n* Waiting for client to connect... *\n" + "*" * 36 + "\n"
BLOCK = (
    RULE + "                    RDMA_Write BW Test\n Dual-port       : OFF\t\tDevice         : mlx5_0\n"
    " Number of qps   : 1\t\tTransport type : IB\n Link type       : IB\n Max inline data : 0[B]\n" + RULE
)
ADDRESSES = (
    " local address: LID 0x0d QPN 0x0930 PSN 0x3ff1bc RKey 0x080329 VAddr 0x007fc97ff50000\n"
    " remote address: LID 0x0e QPN 0x0931 PSN 0x3eb82d RKey 0x080228 VAddr 0x007f19adcbf000\n" + RULE
)
HEADER = " #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]\n"
ROW = " {size:<7}    5000             {peak:<7}            {mean:<7}\t\t   0.009999\n"
LATENCY = (
    " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]"
    "   99% percentile[usec]   99.9% percentile[usec] \n"
)


def run(*rows: tuple[int, str], unit: str = "Gb/sec", test: str = "RDMA_Write BW") -> str:
    table = "".join(ROW.format(size=size, peak=mean, mean=mean) for size, mean in rows)
    return BLOCK.replace("RDMA_Write BW", test) + ADDRESSES + HEADER.format(unit=unit) + table + RULE


parse = partial(read_part, "tables")
parse_json = partial(read_json, "tables")


def only(text: str) -> PerftestTable:
    (table,) = parse(text).items
    assert isinstance(table, PerftestTable)
    return table


def sizes(table: PerftestTable) -> list[int]:
    return [row.size_bytes for row in table.rows]


@pytest.mark.parametrize("unit", ["MB/sec", "MiB/sec", "Gb/sec"])
def test_a_sweep(unit: str) -> None:
    table = only(run((2, "5.30"), (65536, "190.11"), (8388608, "196.60"), unit=unit))
    assert (table.test, table.unit, table.verdict, table.reason) == ("RDMA_Write BW", unit, "ok", "")
    assert table.rows[1] == TableRow(size_bytes=65536, bw_peak=190.11, bw_average=190.11, msg_rate=0.009999)
    assert sizes(table) == [2, 65536, 8388608]


@pytest.mark.parametrize(
    "test",
    ["Send BW", "RDMA_Write Bidirectional BW", "RDMA_Read Post List BW", "Atomic FETCH_AND_ADD BW", "RDMA_Write_imm BW", "Send Bidirectional BW forwarding"],
)  # fmt: skip
def test_names_of_tests(test: str) -> None:
    assert only(run((2, "5.30"), test=test)).test == test


def test_cpu_frequency_between_header_and_row() -> None:
    noise = "Conflicting CPU frequency values detected: 2200.000000 != 1040.353000. CPU Frequency is not max.\n"
    text = run((65536, "190.11"))
    assert only(text.replace("Mpps]\n", "Mpps]\n" + noise + noise)).rows == only(text).rows


def test_client_and_server_in_one_file() -> None:
    output = parse(run((8388608, "196.60")).replace(RULE, "", 1) + WAITING + run((8388608, "23440.10"), unit="MiB/sec"))
    assert [(table.test, table.unit, sizes(table), table.verdict) for table in output.items] == [
        ("RDMA_Write BW", "Gb/sec", [8388608], "ok"),
        ("RDMA_Write BW", "MiB/sec", [8388608], "ok"),
    ]


def test_processes_line_by_line() -> None:
    """Both headers come first; then the rows of one process, or both row by row."""
    head = "".join(line + line for line in (BLOCK + ADDRESSES + HEADER.format(unit="MB/sec")).splitlines(keepends=True))
    rows = [ROW.format(size=size, peak="9.00", mean="8.00") for size in (2, 4, 8)]
    after_each_other = head + "".join(rows) + RULE + rows[2] + RULE
    output = parse(after_each_other)
    assert [sizes(table) for table in output.items] == [[2, 4, 8], [8]]
    assert {table.test for table in output.items} == {"RDMA_Write BW"}
    output = parse(head + rows[0] + rows[0] + rows[1] + rows[1] + rows[2] + RULE + rows[2] + RULE)
    assert [sizes(table) for table in output.items] == [[2, 4, 8], [2, 4, 8]]
    assert output.unread == ()


def test_blanks_may_be_lost() -> None:
    text = run((2, "5.30"), (4, "10.60"))
    assert only("\n".join(" ".join(line.split()) for line in text.splitlines())) == only(text)
    assert only(text.replace("#bytes", "bytes")) == only(text)


DURATION = " WARNING: BW peak won't be measured in this run.\n" + BLOCK + HEADER.format(unit="Gb/sec")
PORTS = "   BW Port1[Gb/sec]   MsgRate Port1[Mpps]   BW Port2[Gb/sec]   MsgRate Port2[Mpps]\n"
CPU = HEADER.format(unit="Gb/sec").rstrip("\n") + "    CPU_Util[%]\n 65536  1000  0.00  190.00  0.362396"
LONG_ROW = " 2  1000  1.76  6.12  1.79  \t  1.80  \t0.06  \t\t1.88  \t\t6.13\n"
LATENCIES = {"min": 1.76, "max": 6.12, "typical": 1.79, "average": 1.80, "stdev": 0.06, "p99": 1.88, "p99.9": 6.13}


@pytest.mark.parametrize(("text", "row"), [
    (DURATION + " 65536  403504  0.00  42.31  0.080701\n" + RULE, {"bw_peak": 0.0, "bw_average": 42.31}),
    (BLOCK + HEADER.format(unit="Gb/sec") + " 2  5000  0.042350  0.042185  2.636533\n", {"bw_average": 0.042185}),
    (BLOCK.replace("BW", "Latency") + ADDRESSES + LATENCY + LONG_ROW + RULE, {"latency_us": LATENCIES, "bw_average": None}),
    (BLOCK + " #bytes  #iterations  t_avg[usec]  tps average\n 2  560000  1.71  584795.32\n", {"latency_us": {"average": 1.71}}),
    (BLOCK + " #bytes #iterations  t_min[usec]  t_max[usec]  t_typical[usec]\n 2  1000  1.21  9.80  1.30\n",
     {"latency_us": {"min": 1.21, "max": 9.8, "typical": 1.3}}),
    (BLOCK + " #bytes  #sl  #iterations  BW peak[Gb/sec]  BW average[Gb/sec]  MsgRate[Mpps]\n 64  3  1000  9.10  9.00  0.017578\n",
     {"size_bytes": 64, "bw_average": 9.0}),
    (BLOCK + HEADER.format(unit="Gb/sec").rstrip("\n") + PORTS + " 65536  1000  0.00  190.00  0.362396  95.00  0.181198  95.00  0.181198\n",
     {"bw_average": 190.0, "msg_rate": 0.362396}),
    (BLOCK + CPU + "\t    1.25\n", {"bw_average": 190.0}),
    (BLOCK + CPU + "\n", {"bw_average": 190.0}),
    (BLOCK + ADDRESSES + ROW.format(size=65536, peak="190.20", mean="190.11"), {"bw_average": 190.11}),
])  # fmt: skip
def test_columns(text: str, row: dict[str, object]) -> None:
    table = only(text)
    assert (table.verdict, {name: getattr(table.rows[0], name) for name in row}) == ("ok", row)


def test_rows_of_the_same_size_and_a_row_without_unit() -> None:
    assert (
        sizes(only(DURATION + " 65536  403504  0.00  42.31  0.080701\n 65536  403100  0.00  42.20  0.080651\n"))
        == [65536] * 2
    )
    assert only(BLOCK + ADDRESSES + ROW.format(size=65536, peak="190.20", mean="190.11")).unit is None
    assert only(BLOCK.replace("BW", "Latency") + ADDRESSES + LATENCY + LONG_ROW + RULE).unit == "usec"


def test_a_number_that_is_cut_is_no_number() -> None:
    text = run((2, "5.30"), (65536, "190.11"))
    rows = only(text).rows
    for at in range(text.index("#bytes"), len(text)):
        for table in parse(text[:at]).items:
            assert table.verdict != "ok" or table.rows in (rows, rows[:1]), text[:at]


OPEN = BLOCK + ADDRESSES + HEADER.format(unit="Gb/sec")
SOCKET = "Unable to open file descriptor for socket connection\n Unable to init the socket connection\n"
REFUSED = "Couldn't connect to 10.0.0.1:18515\n" + SOCKET
SWEEP = run((2, "5.30"), (4, "10.60")).removesuffix(RULE)


@pytest.mark.parametrize(("text", "expected"), [
    (run((2, "-5.30")), [("failed", "negative", [2])]),
    (run((2, "5.30"), (65536, "nan")), [("failed", "a figure with 65536 bytes is no number", [2, 65536])]),
    # Errors that only perftest prints, before a table, in it and after it.
    *((f"{error}\n", [("failed", error.strip(), [])]) for error in (
        "Couldn't connect to 10.0.0.1:18515", "IB device mlx5_9 not found", " Unable to find the Infiniband/RoCE device",
        " Completion with error at client", " Failed status 12: wr_id 0 syndrom 0x81", " Couldn't get context for the device",
    )),
    (REFUSED, [("failed", "init the socket", [])]),
    (run((2, "5.30")) + REFUSED, [("ok", "", [2]), ("failed", "init the socket", [])]),
    (REFUSED + run((2, "5.30")), [("failed", "init the socket", []), ("ok", "", [2])]),
    (SWEEP + " Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\nscnt=128, ccnt=0\n",
     [("failed", "Failed status 12", [2, 4])]),
    (BLOCK + " Failed to modify QP 2355 to RTR\n Unable to Connect the HCA's through the link\n", [("failed", "modify QP", [])]),
    (run((2, "5.30")) + "Error: BW result is below bw limit\n", [("failed", "Error: BW result is below bw limit", [2])]),
    # Output that is cut.
    (OPEN, [("truncated", "the output ends before the first row", [])]),
    (OPEN + ROW.format(size=2, peak="1.00", mean="1.00") + " 4          5000             1.9", [("truncated", "a row", [2])]),
    (OPEN + " 65536      5000   Conflicting CPU frequency values detected: 1.0 != 2.0. CPU Frequency is not max.\n",
     [("truncated", "a row could not be read", [])]),
    (BLOCK, [("no-data", "no result was printed", [])]),
    (WAITING, [("no-data", "the server waits for its client", [])]),
])  # fmt: skip
def test_verdicts(text: str, expected: list[tuple[str, str, list[int]]]) -> None:
    output = parse(text)
    assert [(table.verdict, sizes(table)) for table in output.items] == [
        (verdict, rows) for verdict, _, rows in expected
    ]
    for table, (_, reason, _) in zip(output.items, expected, strict=True):
        assert reason in table.reason
    assert len(output.unread) == sum("row could not be read" in table.reason for table in output.items)


def test_a_matrix_after_a_table_is_no_row() -> None:
    matrix = "Running a_b.\n           0         1         2         3\n 0     1.00      2.00      3.00      4.00\n"
    assert [sizes(table) for table in parse(run((2, "5.30")) + matrix).items] == [[2]]


def document(**results: float | str) -> dict[str, object]:
    return {
        "test_info": {"test": "RDMA_Write_Bidirectional_BW_Test", "Device": "mlx5_0", "Mtu": 4096},
        "results": results,
    }


LATENCY_KEYS = ("t_min", "t_max", "t_typical", "t_avg", "t_stdev", "percentile_99", "percentile_99.9")


def test_json() -> None:
    output = document(MsgSize=65536, n_iterations=5000, BW_peak=0.0, BW_average=380.25, MsgRate=0.725)
    table = parse_json(output).items[0]
    assert (table.test, table.unit, table.verdict) == ("RDMA_Write Bidirectional BW", None, "ok")
    assert table.rows == (TableRow(size_bytes=65536, bw_peak=0.0, bw_average=380.25, msg_rate=0.725),)
    latency = parse_json(document(MsgSize=2, **dict(zip(LATENCY_KEYS, LATENCIES.values(), strict=True)))).items[0]
    assert (latency.unit, latency.rows[0].latency_us) == ("usec", LATENCIES)


def test_a_figure_of_the_json_that_is_no_number_fails() -> None:
    for wrong in ("BW_peak", "BW_average"):
        figures: dict[str, float | str] = {"BW_peak": 381.0, "BW_average": 380.25, wrong: "nan"}
        (table,) = parse_json(document(MsgSize=65536, **figures)).items
        assert (table.verdict, table.reason) == ("failed", "a figure with 65536 bytes is no number")


def test_json_without_a_size_is_counted() -> None:
    output = parse_json(document(bw_avg=96.5))
    assert (output.items, output.unread) == ((), ("results without a message size: bw_avg: 96.5",))


OLD = """{
test_info: {
test: RDMA_Write_BW_Test,
Dual_port: OFF,
Device: "mlx5_0",
WARNING1: "CPU is not PCIe relaxed ordering compliant",
TX_depth : 128,
Data_ex_method: Ethernet,
},
results: {
"MsgSize": 65536,
"n_iterations": 5000,
"BW_peak": 190.20,
"BW_average": 190.11,
"MsgRate": 0.362610
},
}
"""


def test_json_of_before_2024_has_no_quotes() -> None:
    output = parse(OLD + OLD.replace("RDMA_Write", "Send").replace("190.11", "95.00"))
    assert [(table.test, table.rows[0].bw_average) for table in output.items] == [
        ("RDMA_Write BW", 190.11),
        ("Send BW", 95.0),
    ]


LEVELS = """{
"test_info": {
"test": "Send_BW_Test",
"Device": "mlx5_0"
},
"results": {
"MsgSize": 64,
sl: 3,
"BW_peak": 9.10,
"BW_average": 9.00,
 "MsgRate": 0.017578
}
}
"""


def test_json_with_a_service_level_has_one_key_without_quotes() -> None:
    tables = parse(LEVELS + LEVELS).items
    assert facts(tables, "test", "verdict") == [("Send BW", "ok")] * 2
    assert tables[0].rows == (TableRow(size_bytes=64, bw_peak=9.1, bw_average=9.0, msg_rate=0.017578),)


def test_json_that_was_cut() -> None:
    output = parse(OLD[: OLD.index('"BW_average"')])
    assert [table.verdict for table in output.items] == ["truncated"]
    nothing = parse(OLD[: OLD.index('"MsgSize"')])
    assert nothing.items == ()
    assert "line 1: a JSON document of perftest without its end" in nothing.unread
