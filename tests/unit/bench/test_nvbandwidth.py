"""nvbandwidth: what each version prints, and what a log can lose."""

from __future__ import annotations

from functools import partial

import pytest

from tests.unit.bench.outputs import facts, read_json, read_part

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


parse = partial(read_part, "tests")
parse_json = partial(read_json, "tests")


READ = "device_to_device_memcpy_read_ce"
MATRIX = ((None, 395.10), (394.90, None))
LINES = PAIRS.splitlines(keepends=True)
COLLAPSED = "\n".join(" ".join(line.split()) for line in LINES if line.strip())
NODES = (
    "nvbandwidth Version: v0.7\nMPI version: Open MPI v5\nProcess  0 (node1): device 0: NVIDIA GB200 (00000008:01:00)\n"
    "Running multinode_bisect_write_ce.\nBisect benchmarking, simultaneous write CE BW\n"
    "               0\n 0-> 2    700.10\n 1-> 3    701.20\n\nSUM multinode_bisect_write_ce 1401.30\n"
)


@pytest.mark.parametrize(("text", "expected"), [
    (HOST, [("host_to_device_memcpy_ce", "GB/s", 110.71, ((55.31, 55.40),)), (None, None, None, None),
            ("host_device_latency_sm", "ns", 1627.42, ((812.40, 815.02),))]),
    (PAIRS, [(READ, "GB/s", 790.0, MATRIX)]),
    (PAIRS.replace("N/A", "0.00"), [(READ, "GB/s", 790.0, ((0.0, 395.10), (394.90, 0.0)))]),
    (COLLAPSED, [(READ, "GB/s", 790.0, MATRIX)]),
    ("> " + PAIRS, [(READ, "GB/s", 790.0, MATRIX)]),
    (PAIRS.replace(" 1    394", "node1:77:91 [0] unrelated 3 words\n 1    394"), [(READ, "GB/s", 790.0, MATRIX)]),
    ("".join(LINES[:5]), [(READ, "GB/s", None, MATRIX)]),
    (NODES, [("multinode_bisect_write_ce", None, 1401.30, ((700.10,), (701.20,)))]),
    # Sums alone are results.
    ("SUM device_local_copy 9000.12\n&&&& PERF all_to_host_memcpy_sm 12.50 +GB/s\n",
     [("device_local_copy", None, 9000.12, None), ("all_to_host_memcpy_sm", "GB/s", 12.5, None)]),
    ("SUM all_to_host_memcpy_ce 12.5 0.02\n", [("all_to_host_memcpy_ce", None, 12.5, None)]),
])  # fmt: skip
def test_text(text: str, expected: list[object]) -> None:
    output = parse(text)
    assert facts(output.items, "name", "unit", "sum", "matrix") == expected
    assert {test.status for test in output.items} <= {"passed", "waived"}
    assert output.unread == ()


def test_the_version_of_each_run_in_a_file() -> None:
    output = parse(HOST + HOST.replace("v0.8", "v0.10.0").replace("12080", "13.2 (13020)"))
    assert facts(output.items, "tool_version") == ["v0.8"] * 3 + ["v0.10.0"] * 3


def test_three_matrices_of_a_bidirectional_test() -> None:
    output = parse(BOTH_WAYS)
    name = "device_to_device_bidirectional_memcpy_read_ce"
    assert facts(output.items, "name", "sum") == [
        (f"{name}_read1", 761.0),
        (f"{name}_read2", 765.0),
        (f"{name}_total", 1526.0),
    ]
    assert output.items[2].matrix == ((None, 762.0), (764.0, None))
    without = parse("\n".join(line for line in BOTH_WAYS.splitlines() if not line.startswith("SUM"))).items
    assert facts(without, "name", "sum") == [(test.name, None) for test in output.items]


@pytest.mark.parametrize(("text", "name", "status", "reason"), [
    ("Waiving device_to_device_memcpy_read_ce.\n", READ, "waived", ""),
    (f"Running {READ}.\nWaived: \n", READ, "waived", ""),
    ("nvbandwidth Version: v0.8\nERROR: Testcase nonsense_ce not found!\n", "nonsense_ce", "not-found", "nonsense_ce not found"),
    ("nvbandwidth Version: v0.8\nERROR: Testcase index 99 out of bound!\n", "99", "not-found", "index 99"),
    ("Running all_to_one_write_ce.\nError: something\n", "all_to_one_write_ce", "error", "something"),
    ("Running device_local_copy.\n[CUDA_ERROR_OUT_OF_MEMORY] out of memory in expression cuMemAlloc(&p, s) in f() : memcpy.cpp:64\n",
     "device_local_copy", "error", "out of memory"),
    ("nvbandwidth Version: v0.8\nERROR: Invalid Arguments \n./nvbandwidth -x :\n", None, "error", "Invalid Arguments"),
    (f"Running {READ}.\n Invalid value when checking the pattern at 0x70\n Current offset : 11136 \n"
     "ASSERT in expression h_errorFlag == 0 in void helper() : /src/memcpy.cpp:165\n", READ, "error",
     "pattern at 0x70; Current offset : 11136; ASSERT"),
    ("".join(LINES[:1]), READ, "truncated", "the output ends before its first result"),
    ("".join(LINES[:2]), READ, "truncated", "the output ends before the first row"),
    ("".join(LINES[:4]), READ, "truncated", "its matrix has 1 of 2 rows"),
    ("SUM host_to_device_memcpy_ce 802.8\n", "host_to_device_memcpy_ce", "truncated", "its sum is cut"),
    (PAIRS.replace("395.10", "39.51"), READ, "truncated", "its cells do not add up to the sum that it prints"),
    (PAIRS.replace("394.90", "N/A"), READ, "truncated", "its cells do not add up to the sum that it prints"),
])  # fmt: skip
def test_tests_without_a_result(text: str, name: str | None, status: str, reason: str) -> None:
    (test,) = parse(text).items
    assert (test.name, test.status) == (name, status)
    assert reason in test.reason
    assert facts(parse(text + PAIRS).items, "status") == [status, "passed"]


@pytest.mark.parametrize(("text", "matrix", "unread"), [
    ("".join(LINES[:4]) + " 1    394.90\n", ((None, 395.10),), "1    394.90"),
    (PAIRS.replace(" 0       N/A    395.10\n", ""), None, "1    394.90       N/A"),
    (PAIRS.replace("           0         1\n", ""), None, "0       N/A    395.10"),
])  # fmt: skip
def test_rows_that_cannot_be_read_are_counted(text: str, matrix: object, unread: str) -> None:
    output = parse(text)
    assert facts(output.items, "status", "matrix") == [("truncated", matrix)]
    assert output.unread[0] == unread


def test_a_number_that_is_cut_is_no_number() -> None:
    """Each beginning of the output either says that it is cut, or has whole numbers only."""
    for at in range(len(PAIRS)):
        for test in parse(PAIRS[:at]).items:
            assert test.status == "truncated" or (test.matrix == MATRIX and test.sum in (None, 790.0)), PAIRS[:at]


def test_json() -> None:
    both, waived, missing = parse_json(DOCUMENT).items
    assert (len(both.matrix), both.matrix[0]) == (6, (None, 380.0))
    assert (both.sum, both.unit, both.tool_version) == (1526.0, "GB/s", "v0.8")
    assert (waived.name, waived.status, waived.matrix) == ("device_to_device_latency_sm", "waived", None)
    assert missing.status == "not-found"


def test_json_of_a_test_that_failed_is_one_result() -> None:
    """The program adds an entry with the error, and the one that says the test runs stays."""
    cases = [{"name": "all_to_one_write_ce", "status": "Running"}, {"name": "all_to_one_write_ce", "status": "Error"}]
    output = parse_json({"nvbandwidth": {"testcases": cases, "error": "[CUDA_ERROR] no in expression f()"}})
    assert facts(output.items, "name", "status") == [("all_to_one_write_ce", "error"), (None, "error")]
    assert output.items[1].reason == "[CUDA_ERROR] no in expression f()"


def test_json_that_cannot_be_read_is_counted() -> None:
    spoiled = {"name": "a_b", "status": "Passed", "bandwidth_matrix": [["12.5", "NaN"]]}
    output = parse_json({"nvbandwidth": {"testcases": [spoiled, {"name": "c_d", "status": "Maybe"}, 7]}})
    assert facts(output.items, "name", "status", "matrix") == [("a_b", "truncated", None)]
    assert len(output.unread) == 3


def test_the_names_of_devices_are_read() -> None:
    assert facts(read_part("tests", HOST).items, "devices")[0] == ("NVIDIA H100 80GB HBM3",) * 2
    remote = HOST.replace("Device 0: ", "Process 0 (node17): device 0: ")
    assert facts(read_part("tests", remote).items, "devices")[0] == ("NVIDIA H100 80GB HBM3",) * 2
    assert facts(read_json("tests", DOCUMENT).items, "devices")[0] == ("NVIDIA H100 80GB HBM3",)
