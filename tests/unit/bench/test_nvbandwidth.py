"""nvbandwidth and p2pBandwidthLatencyTest: what each version prints, and what a log can lose."""

from __future__ import annotations

import math

import pytest

from imagebuild.bench import BandwidthTest, Results, judge_results
from tests.unit.bench.fuzz import broken, spoiled
from tests.unit.bench.outputs import NOTHING, Output, read_json, read_part
from tests.unit.bench.speed_fakes import shipped

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


P2P_START = """\
[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Device: 0, NVIDIA H100 PCIe, pciBusID: c2, pciDeviceID: 0, pciDomainID:0
Device: 1, NVIDIA H100 PCIe, pciBusID: d5, pciDeviceID: 0, pciDomainID:0
Device=0 CAN Access Peer Device=1
Device=1 CAN Access Peer Device=0

***NOTE: In case a device doesn't have P2P access to other one, it falls back to normal memcopy procedure.
So you can see lesser Bandwidth (GB/s) and unstable Latency (us) in those cases.

P2P Connectivity Matrix
     D\\D     0     1
     0\t     1     1
     1\t     1     1
"""
P2P_BANDWIDTH = """\
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 1622.17  26.10
     1  25.00 1634.15
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 1634.15 256.62
     1 256.99 1660.74
Bidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 1669.42  35.17
     1  35.23 1671.85
Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 1667.81 509.35
     1 509.15 1669.81
"""
P2P_LATENCY = """\
P2P=Disabled Latency Matrix (us)
   GPU     0      1
     0   2.34  16.59
     1  16.48   2.31

   CPU     0      1
     0   2.21   6.29
     1   6.20   2.14
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   2.35   2.56
     1   2.52   2.31

   CPU     0      1
     0   2.24   1.72
     1   1.75   2.18

NOTE: The CUDA Samples are not meant for performance measurements. Results may vary when GPU Boost is enabled.
"""
P2P = P2P_START + P2P_BANDWIDTH + P2P_LATENCY


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


def test_without_header_row_or_blanks() -> None:
    collapsed = "\n".join(" ".join(line.split()) for line in PAIRS.splitlines() if line.strip())
    assert only(collapsed).matrix == only(PAIRS).matrix
    headless = PAIRS.replace("           0         1\n", "")
    assert only(headless).matrix == only(PAIRS).matrix
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


def test_p2p() -> None:
    output = parse(P2P)
    assert [(test.name, test.unit) for test in output.items] == [
        ("p2p_connectivity", None),
        ("unidirectional_p2p_disabled", "GB/s"),
        ("unidirectional_p2p_enabled", "GB/s"),
        ("bidirectional_p2p_disabled", "GB/s"),
        ("bidirectional_p2p_enabled", "GB/s"),
        ("p2p_disabled_latency_gpu", "us"),
        ("p2p_disabled_latency_cpu", "us"),
        ("p2p_enabled_latency_gpu", "us"),
        ("p2p_enabled_latency_cpu", "us"),
    ]
    assert {(test.status, test.tool) for test in output.items} == {("passed", "p2pBandwidthLatencyTest")}
    by_name = {test.name: test.matrix for test in output.items}
    assert by_name["p2p_connectivity"] == ((1.0, 1.0), (1.0, 1.0))
    assert by_name["unidirectional_p2p_enabled"] == ((1634.15, 256.62), (256.99, 1660.74))
    assert by_name["p2p_disabled_latency_cpu"] == ((2.21, 6.29), (6.20, 2.14))
    assert output.unread == ()


def test_p2p_older_headings_and_reads() -> None:
    old = P2P_BANDWIDTH.replace(" (P2P Writes)", "")
    assert [test.name for test in parse(old).items] == [test.name for test in parse(P2P_BANDWIDTH).items]
    reads = parse(P2P.replace("(P2P Writes)", "(P2P Reads)"))
    assert "unidirectional_p2p_enabled_reads" in [test.name for test in reads.items]
    assert "p2p_enabled_reads_latency_gpu" in [test.name for test in reads.items]


def test_p2p_copies_that_lost_blanks() -> None:
    copied = "\n".join("> " + " ".join(line.split()) for line in P2P.splitlines() if line.strip())
    assert parse(copied) == parse(P2P)
    assert parse(P2P.replace("\n", " \n")) == parse(P2P)


def test_p2p_lines_of_others_between_rows() -> None:
    noisy = P2P_BANDWIDTH.replace("     1  25.00", "2026-01-09 04:57:14 [Warning] unrelated\n     1  25.00")
    assert parse(noisy) == parse(P2P_BANDWIDTH)


def test_p2p_that_is_cut() -> None:
    output = parse(P2P_START + P2P_BANDWIDTH[: P2P_BANDWIDTH.index("     1  25.00")])
    assert [test.status for test in output.items] == ["passed", "truncated"]
    assert output.items[1].reason == "its matrix has 1 of 2 rows"
    half = parse(P2P_START + P2P_BANDWIDTH[: P2P_BANDWIDTH.index(" 1634.15")])
    assert half.unread == ("1  25.00",)
    nothing = parse("Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n")
    assert [(test.status, test.matrix) for test in nothing.items] == [("truncated", None)]


def test_p2p_a_number_that_is_cut_is_no_number() -> None:
    whole = {test.name: test.matrix for test in parse(P2P).items}
    for at in range(len(P2P)):
        for test in parse(P2P[:at]).items:
            assert test.status == "truncated" or test.matrix == whole[test.name], P2P[:at]


def test_p2p_a_failure_of_cuda() -> None:
    output = parse(
        P2P_START + "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\nCuda failure p2p.cu:190: 'out of memory'\n"
    )
    assert [(test.name, test.status) for test in output.items] == [
        ("p2p_connectivity", "passed"),
        ("unidirectional_p2p_disabled", "error"),
    ]
    assert "out of memory" in output.items[1].reason


def gains_nothing(output: Output) -> bool:
    verdicts = judge_results(Results(tests=output.items), shipped("h100"))
    return any(verdict.reason.startswith("no pair gains by P2P") for verdict in verdicts)


def test_enabling_p2p_helps() -> None:
    assert not gains_nothing(parse(P2P))


def test_p2p_is_off() -> None:
    off = (
        P2P.replace("256.62", "26.12")
        .replace("256.99", "25.01")
        .replace("  2.56", " 16.40")
        .replace("  2.52", " 16.61")
    )
    assert gains_nothing(parse(off))


def test_pcie_gains_in_latency_alone() -> None:
    pcie = P2P.replace("256.62", "26.32").replace("256.99", "26.32")
    assert not gains_nothing(parse(pcie))
    assert gains_nothing(parse(pcie.partition("P2P=Disabled Latency")[0]))


def test_one_gpu_or_half_a_run_says_nothing() -> None:
    one = (
        "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n   D\\D     0 \n     0 144.46 \n"
        "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\n   D\\D     0 \n     0 137.43 \n"
    )
    assert len(parse(one).items) == 2
    assert not gains_nothing(parse(one))
    assert not gains_nothing(parse(P2P_LATENCY))


def test_p2p_foreign_lines_are_nothing() -> None:
    assert parse("   GPU     0      1 \n     0   2.34  16.59 \nBandwidth Matrix (GB/s)\nCuda failure x\n") == NOTHING


def finite(tests: tuple[BandwidthTest, ...]) -> bool:
    cells = [cell for test in tests for row in test.matrix or () for cell in row]
    return all(value is None or math.isfinite(value) for value in (*cells, *(test.sum for test in tests)))


def test_fuzz() -> None:
    for text in (*broken(HOST + PAIRS + BOTH_WAYS), *broken(P2P)):
        assert finite(parse(text).items)
    for document in spoiled(DOCUMENT):
        assert finite(parse_json(document).items)
