"""nvbandwidth: what each version prints, and what a log can lose."""

from __future__ import annotations

import pytest

from imagebuild.bench import BandwidthTest
from tests.unit.bench.outputs import NOTHING, Output, read_json, read_part

HOST = """\
nvbandwidth Version: v0.8
Built from Git version: v0.8

CUDA Runtime Version: 12080
CUDA Driver Version: 12080
Driver Version: 570.86.15

node17
Device 0: NVIDIA H100 80GB HBM3 (00000000:19:00)
Device 1: NVIDIA H100 80GB HBM3 (00000000:3b:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.31     55.40

SUM host_to_device_memcpy_ce 110.71

Waived:
Running host_device_latency_sm.
memory latency SM CPU(row) <-> GPU(column) (ns)
           0         1
 0    812.40    815.02

SUM host_device_latency_sm 1627.42

NOTE: The reported results may not reflect the full capabilities of the platform.
"""
PAIRS = """\
Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    395.10
 1    394.90       N/A

SUM device_to_device_memcpy_read_ce 790.00
"""
BOTH_WAYS = """\
Running device_to_device_bidirectional_memcpy_read_ce.
memcpy CE GPU(row) <-> GPU(column) Read1 bandwidth (GB/s)
           0         1
 0       N/A    380.00
 1    381.00       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_read1 761.00

memcpy CE GPU(row) <-> GPU(column) Read2 bandwidth (GB/s)
           0         1
 0       N/A    382.00
 1    383.00       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_read2 765.00

memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)
           0         1
 0       N/A    762.00
 1    764.00       N/A

SUM device_to_device_bidirectional_memcpy_read_ce_total 1526.00
COEFFICIENT_OF_VARIATION device_to_device_bidirectional_memcpy_read_ce_total 0.00
"""
DOCUMENT = {
    "nvbandwidth": {
        "CUDA Runtime Version": 12080,
        "Driver Version": "570.86.15",
        "GPU Device list": ["0: NVIDIA H100 80GB HBM3 (00000000:19:00): (node17)"],
        "git_version": "v0.8",
        "version": "v0.8",
        "testcases": [
            {
                "name": "device_to_device_bidirectional_memcpy_read_ce",
                "status": "Passed",
                "bandwidth_description": "memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)",
                "bandwidth_matrix": [["N/A", "380"], ["381", "N/A"], ["N/A", "382"], ["383", "N/A"], ["N/A", "762"], ["764", "N/A"]],
                "sum": 1526.0,
                "min": 0.0,
            },
            {"name": "device_to_device_latency_sm", "status": "Waived"},
            {"name": "no_such_test", "status": "Not Found"},
        ],
    }
}  # fmt: skip


def parse(text: str) -> Output:
    return read_part("tests", text)


def parse_json(document: object) -> Output:
    return read_json("tests", document)


def only(text: str) -> BandwidthTest:
    (test,) = parse(text).items
    assert isinstance(test, BandwidthTest)
    return test


def test_banner_tests_and_units() -> None:
    output = parse(HOST)
    assert [(test.name, test.unit, test.status, test.sum) for test in output.items] == [
        ("host_to_device_memcpy_ce", "GB/s", "passed", 110.71),
        (None, None, "waived", None),
        ("host_device_latency_sm", "ns", "passed", 1627.42),
    ]
    assert {test.tool_version for test in output.items} == {"v0.8"}
    assert output.items[0].matrix == ((55.31, 55.40),)
    assert output.unread == ()
    assert parse(HOST.replace("Waived:", "Waived: ")) == output


def test_a_waived_test_keeps_a_name_that_was_printed() -> None:
    assert only("Waiving device_to_device_memcpy_read_ce.\n").name == "device_to_device_memcpy_read_ce"
    result = only("Running device_to_device_memcpy_read_ce.\nWaived: \n")
    assert (result.name, result.status) == ("device_to_device_memcpy_read_ce", "waived")


def test_the_version_of_each_run_in_a_file() -> None:
    output = parse(HOST + HOST.replace("v0.8", "v0.10.0").replace("12080", "13.2 (13020)"))
    assert [test.tool_version for test in output.items] == ["v0.8"] * 3 + ["v0.10.0"] * 3


def test_diagonal_is_not_available_or_zero() -> None:
    assert only(PAIRS).matrix == ((None, 395.10), (394.90, None))
    assert only(PAIRS.replace("N/A", "0.00")).matrix == ((0.0, 395.10), (394.90, 0.0))


def test_three_matrices_of_a_bidirectional_test() -> None:
    output = parse(BOTH_WAYS)
    name = "device_to_device_bidirectional_memcpy_read_ce"
    assert [(test.name, test.sum) for test in output.items] == [
        (f"{name}_read1", 761.0),
        (f"{name}_read2", 765.0),
        (f"{name}_total", 1526.0),
    ]
    assert output.items[2].matrix == ((None, 762.0), (764.0, None))
    without = "\n".join(line for line in BOTH_WAYS.splitlines() if not line.startswith("SUM"))
    assert [test.name for test in parse(without).items] == [test.name for test in output.items]
    assert {test.sum for test in parse(without).items} == {None}


def test_without_blanks() -> None:
    collapsed = "\n".join(" ".join(line.split()) for line in PAIRS.splitlines() if line.strip())
    assert only(collapsed).matrix == only(PAIRS).matrix
    assert only("> " + PAIRS).name == "device_to_device_memcpy_read_ce"


def test_lines_of_others_between_rows_do_no_harm() -> None:
    result = only(PAIRS.replace(" 1    394", "node1:77:91 [0] unrelated 3 words\n 1    394"))
    assert result.matrix == ((None, 395.10), (394.90, None))


def test_sums_alone_are_results() -> None:
    output = parse(
        "SUM host_to_device_memcpy_ce 802.86\nSUM device_local_copy 9000.12\n&&&& PERF all_to_host_memcpy_sm 12.50 +GB/s\n"
    )
    assert [(test.sum, test.unit, test.matrix) for test in output.items] == [
        (802.86, None, None),
        (9000.12, None, None),
        (12.5, "GB/s", None),
    ]
    assert parse("SUM all_to_host_memcpy_ce 12.5 0.02\n").items[0].sum == 12.5


def test_what_is_cut_is_truncated() -> None:
    lines = PAIRS.splitlines(keepends=True)
    assert only("".join(lines[:1])).status == "truncated"
    assert only("".join(lines[:2])).status == "truncated"
    assert only("".join(lines[:4])).reason == "its matrix has 1 of 2 rows"
    cut = parse("".join(lines[:4]) + " 1    394.90\n")
    assert (cut.items[0].status, cut.unread) == ("truncated", ("1    394.90",))
    assert cut.items[0].matrix == ((None, 395.10),)
    whole = only("".join(lines[:5]))
    assert (whole.status, whole.sum) == ("passed", None)


def test_a_number_that_is_cut_is_no_number() -> None:
    """Each beginning of the output either says that it is cut, or has whole numbers only."""
    whole = {395.10, 394.90, None}
    for at in range(len(PAIRS)):
        for test in parse(PAIRS[:at]).items:
            cells = {cell for row in test.matrix or () for cell in row}
            assert test.status == "truncated" or (cells == whole and test.sum in (None, 790.0)), PAIRS[:at]
    assert parse("SUM host_to_device_memcpy_ce 802.8\n").items[0].status == "truncated"


def test_a_missing_row_is_not_filled_by_the_next() -> None:
    output = parse(PAIRS.replace(" 0       N/A    395.10\n", ""))
    assert output.items[0].matrix is None
    assert output.unread == ("1    394.90       N/A",)


@pytest.mark.parametrize(
    ("text", "name", "status"),
    [
        ("nvbandwidth Version: v0.8\nERROR: Testcase nonsense_ce not found!\n", "nonsense_ce", "not-found"),
        ("nvbandwidth Version: v0.8\nERROR: Testcase index 99 out of bound!\n", "99", "not-found"),
        ("Running all_to_one_write_ce.\nError: something\n", "all_to_one_write_ce", "error"),
        ("Running device_local_copy.\n[CUDA_ERROR_OUT_OF_MEMORY] out of memory in expression cuMemAlloc(&p, s) in f() : memcpy.cpp:64\n", "device_local_copy", "error"),
        ("nvbandwidth Version: v0.8\nERROR: Invalid Arguments \n./nvbandwidth -x :\n", None, "error"),
    ],
)  # fmt: skip
def test_errors(text: str, name: str | None, status: str) -> None:
    result = only(text)
    assert (result.name, result.status) == (name, status)
    assert result.reason


def test_an_assertion_keeps_the_line_that_explains_it() -> None:
    result = only(
        "Running device_to_device_memcpy_read_ce.\n Invalid value when checking the pattern at 0x70a640000000\n"
        " Current offset : 11136 \nASSERT in expression h_errorFlag == 0 in void helper() : /src/memcpy.cpp:165\n"
    )
    assert result.status == "error"
    assert "pattern at 0x70a640000000" in result.reason
    assert "memcpy.cpp:165" in result.reason


def test_the_next_test_after_an_error() -> None:
    output = parse("Running all_to_one_write_ce.\nError: something\n" + PAIRS)
    assert [test.status for test in output.items] == ["error", "passed"]


def test_several_nodes() -> None:
    output = parse(
        "nvbandwidth Version: v0.7\nMPI version: Open MPI v5\nProcess  0 (node1): device 0: NVIDIA GB200 (00000008:01:00)\n"
        "Running multinode_bisect_write_ce.\nBisect benchmarking, simultaneous write CE BW\n"
        "               0\n 0-> 2    700.10\n 1-> 3    701.20\n\nSUM multinode_bisect_write_ce 1401.30\n"
    )
    assert output.items[0].matrix == ((700.10,), (701.20,))
    assert (output.items[0].unit, output.items[0].sum) == (None, 1401.30)


def test_json() -> None:
    both, waived, missing = parse_json(DOCUMENT).items
    assert both.matrix is not None
    assert (len(both.matrix), both.matrix[0], both.sum, both.unit, both.tool_version) == (
        6,
        (None, 380.0),
        1526.0,
        "GB/s",
        "v0.8",
    )
    assert (waived.name, waived.status, waived.matrix) == ("device_to_device_latency_sm", "waived", None)
    assert missing.status == "not-found"


def test_json_of_a_test_that_failed_is_one_result() -> None:
    """The program adds an entry with the error, and the one that says the test runs stays."""
    cases = [{"name": "all_to_one_write_ce", "status": "Running"}, {"name": "all_to_one_write_ce", "status": "Error"}]
    output = parse_json({"nvbandwidth": {"testcases": cases, "error": "[CUDA_ERROR] no in expression f()"}})
    assert [(test.name, test.status) for test in output.items] == [("all_to_one_write_ce", "error"), (None, "error")]
    assert output.items[1].reason == "[CUDA_ERROR] no in expression f()"


def test_json_that_cannot_be_read_is_counted() -> None:
    cases = [
        {"name": "a_b", "status": "Passed", "bandwidth_matrix": [["12.5", "fast"]]},
        {"name": "c_d", "status": "Maybe"},
        7,
    ]
    output = parse_json({"nvbandwidth": {"testcases": cases}})
    assert [(test.name, test.status, test.matrix) for test in output.items] == [("a_b", "truncated", None)]
    assert len(output.unread) == 3


def test_foreign_lines_are_nothing() -> None:
    foreign = (
        "Running tests\n# SUM 3\n 0 1 2\nError: no\nWaived\nmemcpy failed\n  8  2  float  sum  -1  5.1  0.0  0.0  0\n"
    )
    assert parse(foreign).items == ()
    assert parse_json({"nvbandwidth": 1}) == parse_json({"results": []}) == NOTHING
