"""dcgmi diag: the tables and documents of DCGM 3 and 4."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.bench.fuzz import broken, spoiled
from tests.unit.bench.outputs import NOTHING, Output, read_json, read_part

TOP = """\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Metadata  ----------+------------------------------------------------|
| DCGM Version              | 4.2.3                                          |
| Driver Version Detected   | 570.124.06                                     |
| GPU Device IDs Detected   | 2330, 2330                                     |
"""
END = "+---------------------------+------------------------------------------------+\n"


def row(name: str, value: str) -> str:
    return f"| {name:<25} | {value:<46} |\n"


DEPLOYMENT = "|-----  Deployment  --------+------------------------------------------------|\n"
HARDWARE = "+-----  Hardware  ----------+------------------------------------------------+\n"
STRESS = "+-----  Stress  ------------+------------------------------------------------+\n"
NEW = (
    TOP
    + DEPLOYMENT
    + row("software", "Fail")
    + row("", "GPU0: Pass")
    + row("", "GPU1: Fail")
    + row("Warning: GPU1", "Persistence mode for GPU 1 is currently disab")
    + row("", "led. Enable persistence mode by running \"nvid")
    + row("", "ia-smi -i 1 -pm 1 \" as root.")
    + HARDWARE
    + row("memory", "Skip")
    + row("", "GPU0: Skip")
    + row("", "GPU1: Skip")
    + STRESS
    + row("targeted_power", "Not Run")
    + END
)  # fmt: skip
OLD = (
    TOP.replace("4.2.3", "3.3.9")
    + DEPLOYMENT
    + row("Denylist", "Pass")
    + row("Persistence Mode", "Fail")
    + row("Error", "Persistence mode for GPU 0 is currently")
    + row("", " disabled. Enable it.")
    + HARDWARE
    + row("GPU Memory", "Pass - GPUs: 0, 2   ")
    + row("", "Fail - GPU: 1   ")
    + row("", "Warn - GPU: 3   ")
    + row("Warning", "A DBE was found")
    + row("Diagnostic", "Skip - All")
    + row("Pulse Test", "Pass - All")
    + END
)


def parse(text: str) -> Output:
    return read_part("diagnostics", text)


def parse_json(document: object) -> Output:
    return read_json("diagnostics", document)


def brief(output: Output) -> list[tuple[str | None, str, str | None, str]]:
    return [(result.category, result.test, result.entity, result.status) for result in output.items]


def test_dcgm_4() -> None:
    output = parse(NEW)
    assert brief(output) == [
        ("Deployment", "software", None, "fail"),
        ("Deployment", "software", "GPU 0", "pass"),
        ("Deployment", "software", "GPU 1", "fail"),
        ("Hardware", "memory", None, "skip"),
        ("Hardware", "memory", "GPU 0", "skip"),
        ("Hardware", "memory", "GPU 1", "skip"),
        ("Stress", "targeted_power", None, "not-run"),
    ]
    assert output.items[2].messages == (
        'Persistence mode for GPU 1 is currently disabled. Enable persistence mode by running "nvidia-smi -i 1 -pm 1 " as root.',
    )
    assert output.items[0].messages == ()
    assert output.unread == ()


def test_dcgm_3() -> None:
    output = parse(OLD)
    assert brief(output) == [
        ("Deployment", "Denylist", None, "pass"),
        ("Deployment", "Persistence Mode", None, "fail"),
        ("Hardware", "GPU Memory", "GPU 0", "pass"),
        ("Hardware", "GPU Memory", "GPU 2", "pass"),
        ("Hardware", "GPU Memory", "GPU 1", "fail"),
        ("Hardware", "GPU Memory", "GPU 3", "warn"),
        ("Hardware", "Diagnostic", None, "skip"),
        ("Hardware", "Pulse Test", None, "pass"),
    ]
    assert output.items[1].messages == ("Persistence mode for GPU 0 is currently disabled. Enable it.",)
    assert output.items[5].messages == ("A DBE was found",)


def test_copies_that_lost_blanks() -> None:
    copied = "\n".join(
        " ".join(line.split()) for line in NEW.replace("-----  ", "-----  ").splitlines() if "-----" not in line
    )
    output = parse(copied)
    assert [result[1:] for result in brief(output)] == [result[1:] for result in brief(parse(NEW))]
    assert output.items[2].messages[0].startswith("Persistence mode for GPU 1")


def test_a_status_of_no_version_is_not_a_pass() -> None:
    assert brief(parse(NEW.replace("| Skip ", "|      ")))[3] == ("Hardware", "memory", None, "unknown")
    odd = parse(NEW.replace("| Skip ", "| Fine "))
    assert ("memory: Fine" in odd.unread, "memory" in [result.test for result in odd.items]) == (True, False)


def test_a_table_that_is_cut() -> None:
    output = parse(NEW[: NEW.index("| memory")])
    assert [result.test for result in output.items] == ["software"] * 3
    assert output.unread == ("the table of dcgmi diag has no end",)
    half = parse(NEW[: NEW.index("| memory") + 20])
    assert half.unread[0] == "| memory"


@pytest.mark.parametrize(
    "error",
    [
        "Error: Diagnostic could not be run while DCGM is paused.",
        "Error: Unable to complete diagnostic for group 2147483647. Return: (-21) Timeout",
        "Error: Unable to run diagnostic on unsupported GPU 0.",
        "Error: unable to establish a connection to the specified host: localhost",
    ],
)
def test_a_run_that_failed(error: str) -> None:
    output = parse(error + "\n")
    assert [(result.test, result.status, result.messages) for result in output.items] == [("diag", "fail", (error,))]


def test_runs_after_each_other() -> None:
    assert len(parse(NEW + OLD + NEW).items) == 7 + 8 + 7


def test_several_nodes_in_text() -> None:
    text = (
        TOP.replace("Successfully ran diagnostic for group.", "Multi-node diagnostic failed.")
        + row("MNUBERGEMM Test", "Fail")
        + row("Hosts Found", "2")
        + "|-----  Host Details  ------+------------------------------------------------|\n"
        + row("Host 0", "Pass")
        + row("  GPUs: 0, 1", "Pass")
        + row("Host 1", "Fail")
        + row("  GPU 0", "Fail")
        + row("", "Error: no communication")
        + END
    )
    output = parse(text)
    assert brief(output) == [
        (None, "diag", None, "fail"),
        ("Metadata", "MNUBERGEMM Test", None, "fail"),
        ("Host Details", "Host 0", None, "pass"),
        ("Host Details", "Host 0", "GPU 0", "pass"),
        ("Host Details", "Host 0", "GPU 1", "pass"),
        ("Host Details", "Host 1", None, "fail"),
        ("Host Details", "Host 1", "GPU 0", "fail"),
    ]
    assert output.items[-1].messages == ("Error: no communication",)


def new_document() -> dict[str, Any]:
    warning = {"error_category": 7, "error_id": 40, "error_severity": 2, "warning": "Persistence mode is disabled."}
    return {
        "DCGM Diagnostic": {
            "test_categories": [
                {
                    "category": "Deployment",
                    "tests": [
                        {
                            "name": "software",
                            "results": [
                                {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass"},
                                {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 1, "status": "Fail", "warnings": [warning], "info": ["seen"]},
                            ],
                            "test_summary": {"status": "Fail", "warnings": [warning]},
                        },
                        {"name": "targeted_power"},
                    ],
                }
            ]
        },
        "entity_groups": [],
        "metadata": {"version": "4.2.3", "Driver Version Detected": "570.124.06"},
    }  # fmt: skip


def test_json_of_dcgm_4() -> None:
    output = parse_json(new_document())
    assert brief(output) == [
        ("Deployment", "software", None, "fail"),
        ("Deployment", "software", "GPU 0", "pass"),
        ("Deployment", "software", "GPU 1", "fail"),
        ("Deployment", "targeted_power", None, "not-run"),
    ]
    assert output.items[2].messages == ("Persistence mode is disabled.", "seen")


def test_json_of_dcgm_3() -> None:
    tests = [
        {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]},
        None,
        {"name": "NVML Library", "results": [{"status": "Pass"}]},
        {"name": "PCIe", "results": [{"gpu_id": "0", "status": "Skip", "info": "not supported"}, {"gpu_id": "1", "status": "Warn", "warnings": "slow"}]},
    ]  # fmt: skip
    document = {
        "DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": tests}], "version": "3.3.9"}
    }
    output = parse_json(document)
    assert [result[1:] for result in brief(output)] == [
        ("Denylist", "GPU 0", "pass"),
        ("Denylist", "GPU 1", "pass"),
        ("NVML Library", None, "pass"),
        ("PCIe", "GPU 0", "skip"),
        ("PCIe", "GPU 1", "warn"),
    ]
    assert [result.messages for result in output.items[-2:]] == [("not supported",), ("slow",)]
    assert output.unread == ()


def test_json_of_several_nodes() -> None:
    result = {
        "host_id": 1,
        "entity_group": "GPU",
        "entity_group_id": 1,
        "entity_id": 3,
        "status": "Fail",
        "warnings": [{"warning": "no"}],
    }
    test = {"name": "mnubergemm", "status": "Fail", "test_summary": {"status": "Fail"}, "results": [result]}
    document = {
        "DCGM Diagnostic": "DCGM Multi-Node Diagnostic",
        "runtime_error": "mpirun failed",
        "test_categories": [{"category": "Multi-Node Tests", "tests": [test]}],
    }
    assert brief(parse_json(document)) == [
        (None, "diag", None, "fail"),
        ("Multi-Node Tests", "mnubergemm", None, "fail"),
        ("Multi-Node Tests", "mnubergemm", "host 1 GPU 3", "fail"),
    ]
    other = {"DCGM Multi-Node Diagnostic": {"test_categories": document["test_categories"]}}
    assert len(parse_json(other).items) == 2


def test_json_of_several_runs() -> None:
    document = {"iterations": [new_document(), new_document()], "Overall Result": "Fail", "Warning": "stopped"}
    output = parse_json(document)
    assert brief(output)[0] == (None, "diag", None, "fail")
    assert len(output.items) == 1 + 4 + 4


def test_json_without_tests_is_counted() -> None:
    output = parse_json({"DCGM GPU Diagnostic": {"version": "4.2.3"}})
    assert (output.items, output.unread) == ((), ("dcgmi diag: no test in the document",))


def test_json_of_others() -> None:
    others: tuple[object, ...] = ([], {}, {"iterations": 20}, {"iterations": [1]}, {"test_categories": []})
    for other in others:
        assert parse_json(other) == NOTHING


def test_foreign_lines_are_nothing() -> None:
    assert parse("| Result | Pass |\n|                           | GPU0: Pass |\nError: no\n+-----+-----+\n") == NOTHING


def test_fuzz() -> None:
    for text in (*broken(NEW), *broken(OLD)):
        parse(text)
    for document in (*spoiled(new_document()), *spoiled({"iterations": [new_document()]})):
        parse_json(document)
