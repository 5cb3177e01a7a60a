"""Causes of failures: each known line, the choice among several, and where the answer contains the cause."""

from importlib import resources

import pytest
import yaml

from imagebuild.bench.causes import find_causes
from imagebuild.bench.logs import LogLine
from imagebuild.bench.read import read_text
from tests.conftest import data
from tests.unit.bench.nccl_tables import Table

CAUSES: list[list[str]] = data("bench/causes")
HEAD = Table().text().partition("# Out of bounds")[0]


@pytest.mark.parametrize(("line", "means"), CAUSES)
def test_a_failure_quotes_its_cause(line: str, means: str) -> None:
    """After rows of a table, before the table, and alone."""
    for text in (f"{HEAD}{line}\n", f"{line}\n{HEAD}"):
        results = read_text("a.log", text).measured
        assert results[0].verdict != "ok"
        assert means in "; ".join(result.reason for result in results)
    alone = read_text("a.log", f"starting\n{line}\nmpirun noticed that a process exited with code 1\n")
    # A failure of nccl-tests itself is a result without rows.
    assert means in "; ".join(result.reason for result in alone.measured) + alone.sources[0].note


def test_each_known_cause_has_a_line() -> None:
    rows = yaml.safe_load(resources.files("imagebuild.bench").joinpath("causes.yaml").read_text())
    found = {cause.place for line, _ in CAUSES for cause in find_causes([LogLine(line, "", 1)])}
    assert found == set(range(len(rows)))


def test_the_cause_nearest_to_the_root_counts() -> None:
    text = (
        f"{HEAD}box: Test NCCL failure common.cu:99 'unhandled cuda error'\nsrun: error: task 3 exited with code 1\n"
        "kernel: NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off the bus\n"
    )
    (run,) = read_text("a.log", text).runs
    assert run.reason.count("cause: line ") == 1
    assert "a GPU fell off its bus" in run.reason


def test_lines_of_a_good_run_are_no_cause() -> None:
    (run,) = read_text("a.log", f"ssh: connect to host w-1 port 22: Connection refused\n{Table().text()}").runs
    assert (run.verdict, "cause" in run.reason) == ("ok", False)
    (run,) = read_text(
        "a.log", f"{HEAD}cache_evictions   2  1  0.0\nsrun: error: n1: task 0: Exited with exit code 1\n"
    ).runs
    assert "cause" not in run.reason
    (run,) = read_text("a.log", "box:7:7 [0] NCCL WARN Call to ibv_reg_mr failed\n" + Table().text()).runs
    assert run.verdict == "ok"
