"""dcgmi diag: the documents of DCGM 3 and 4."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.unit.bench.outputs import Output, read_json

parse_json = partial(read_json, "diagnostics")


def brief(output: Output) -> list[tuple[str | None, str, str | None, str]]:
    return [(result.category, result.test, result.entity, result.status) for result in output.items]


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


@pytest.mark.parametrize("error", ["runtime_error", "Warning"])
def test_a_run_that_failed(error: str) -> None:
    output = parse_json({"DCGM Diagnostic": {error: "could not be run while DCGM is paused"}})
    assert [(result.test, result.status) for result in output.items] == [("diag", "fail")]
