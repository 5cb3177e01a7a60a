"""p2pBandwidthLatencyTest: matrices by heading, and whether P2P does anything."""

from __future__ import annotations

from imagebuild.results import p2p
from imagebuild.results.models import BandwidthTest
from imagebuild.results.parsed import Parsed

from .results_fuzz import broken

START = """\
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
BANDWIDTH = """\
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
LATENCY = """\
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
WHOLE = START + BANDWIDTH + LATENCY


def parse(text: str) -> Parsed[BandwidthTest]:
    return p2p.parse("log", text.splitlines())


def test_a_whole_run() -> None:
    found = parse(WHOLE)
    assert [(test.name, test.unit) for test in found.items] == [
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
    assert {(test.status, test.tool) for test in found.items} == {("passed", "p2pBandwidthLatencyTest")}
    by_name = {test.name: test.matrix for test in found.items}
    assert by_name["p2p_connectivity"] == ((1.0, 1.0), (1.0, 1.0))
    assert by_name["unidirectional_p2p_enabled"] == ((1634.15, 256.62), (256.99, 1660.74))
    assert by_name["p2p_disabled_latency_cpu"] == ((2.21, 6.29), (6.20, 2.14))
    assert found.unread == ()


def test_older_headings_and_reads() -> None:
    old = BANDWIDTH.replace(" (P2P Writes)", "")
    assert [test.name for test in parse(old).items] == [test.name for test in parse(BANDWIDTH).items]
    reads = parse(WHOLE.replace("(P2P Writes)", "(P2P Reads)"))
    assert "unidirectional_p2p_enabled_reads" in [test.name for test in reads.items]
    assert "p2p_enabled_reads_latency_gpu" in [test.name for test in reads.items]


def test_copies_that_lost_blanks() -> None:
    copied = "\n".join("> " + " ".join(line.split()) for line in WHOLE.splitlines() if line.strip())
    assert parse(copied) == parse(WHOLE)
    assert parse(WHOLE.replace("\n", " \n")) == parse(WHOLE)


def test_lines_of_others_between_rows() -> None:
    noisy = BANDWIDTH.replace("     1  25.00", "2026-01-09 04:57:14 [Warning] unrelated\n     1  25.00")
    assert parse(noisy) == parse(BANDWIDTH)


def test_what_is_cut() -> None:
    found = parse(START + BANDWIDTH[: BANDWIDTH.index("     1  25.00")])
    assert [test.status for test in found.items] == ["passed", "truncated"]
    assert found.items[1].reason == "its matrix has 1 of 2 rows"
    half = parse(START + BANDWIDTH[: BANDWIDTH.index(" 1634.15")])
    assert half.unread == ("1  25.00",)
    nothing = parse("Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n")
    assert [(test.status, test.matrix) for test in nothing.items] == [("truncated", None)]


def test_a_number_that_is_cut_is_no_number() -> None:
    whole = {test.name: test.matrix for test in parse(WHOLE).items}
    for at in range(len(WHOLE)):
        for test in parse(WHOLE[:at]).items:
            assert test.status == "truncated" or test.matrix == whole[test.name], WHOLE[:at]


def test_a_failure_of_cuda() -> None:
    found = parse(
        START + "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\nCuda failure p2p.cu:190: 'out of memory'\n"
    )
    assert [(test.name, test.status) for test in found.items] == [
        ("p2p_connectivity", "passed"),
        ("unidirectional_p2p_disabled", "error"),
    ]
    assert "out of memory" in found.items[1].reason


def test_enabling_p2p_helps() -> None:
    assert p2p.enabling_changes_nothing(parse(WHOLE).items) is False


def test_p2p_is_off() -> None:
    off = (
        WHOLE.replace("256.62", "26.12")
        .replace("256.99", "25.01")
        .replace("  2.56", " 16.40")
        .replace("  2.52", " 16.61")
    )
    assert p2p.enabling_changes_nothing(parse(off).items) is True


def test_pcie_gains_in_latency_alone() -> None:
    pcie = WHOLE.replace("256.62", "26.32").replace("256.99", "26.32")
    assert p2p.enabling_changes_nothing(parse(pcie).items) is False
    assert p2p.enabling_changes_nothing(parse(pcie.partition("P2P=Disabled Latency")[0]).items) is True


def test_one_gpu_or_half_a_run_says_nothing() -> None:
    one = (
        "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n   D\\D     0 \n     0 144.46 \n"
        "Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\n   D\\D     0 \n     0 137.43 \n"
    )
    assert len(parse(one).items) == 2
    assert p2p.enabling_changes_nothing(parse(one).items) is None
    assert p2p.enabling_changes_nothing(parse(LATENCY).items) is None
    assert p2p.enabling_changes_nothing(()) is None


def test_foreign_lines_are_nothing() -> None:
    assert parse("   GPU     0      1 \n     0   2.34  16.59 \nBandwidth Matrix (GB/s)\nCuda failure x\n") == Parsed()


def test_fuzz() -> None:
    for text in broken(WHOLE):
        p2p.enabling_changes_nothing(parse(text).items)
