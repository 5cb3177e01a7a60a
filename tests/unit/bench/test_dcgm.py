"""dcgmi diag: the tables and documents of DCGM 3 and 4."""

from __future__ import annotations

from typing import Any

import pytest

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
OLD = TOP.replace("4.2.3", "3.3.9") + DEPLOYMENT + row("Denylist", "Pass") + row("GPU Memory", "Fail - GPU: 1   ") + END


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


def test_the_table_of_dcgm_3_is_not_read() -> None:
    assert parse(OLD) == Output((), ("the table of DCGM 3.3.9 is not read: use dcgmi diag -j",))
    assert parse(OLD + NEW).items == parse(NEW).items


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
    assert len(odd.items) == 4  # the GPUs below it are of no other test


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
    assert len(parse(NEW + OLD + NEW).items) == 7 + 7


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
    assert {parse_json(other) for other in others} == {NOTHING}


def test_foreign_lines_are_nothing() -> None:
    assert parse("| Result | Pass |\n|                           | GPU0: Pass |\nError: no\n+-----+-----+\n") == NOTHING
