"""What carried the data: messages of the libraries, the line that describes the way, and the assignment to results."""

from typing import Any

import pytest

from imagebuild.bench.datapath import describe, rows_of
from imagebuild.bench.hints import find_hints
from imagebuild.bench.read import read_text
from tests.conftest import data
from tests.unit.bench.nccl_tables import Table

CASES: list[dict[str, Any]] = data("bench/datapath")


def text_of(case: dict[str, Any]) -> str:
    log: str = case["log"]
    return log + "".join(f"{line.replace('{}', str(n))}\n" for line in case.get("repeat", ()) for n in range(4))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["about"])
def test_messages_say_what_carried_the_data(case: dict[str, Any]) -> None:
    """Alone, and with launcher prefixes."""
    for prefix in ("", "[1,0]<stdout>:", "2026-11-27T10:00:00.123Z "):
        lines = "".join(f"{prefix}{line}\n" for line in text_of(case).splitlines())
        path = read_text("a.log", lines).sources[0].carried
        assert (path and describe(path)) == case["says"]
        assert path is None or rows_of(path)
        for name, value in case.get("facts", {}).items():
            assert getattr(path, name) == value
        hints = find_hints(path)
        assert [hint.kind for hint in hints if hint.is_fallback] == case["fallbacks"]
        assert case.get("means", "") in "".join(map(str, hints))
        assert all(hint.evidence.startswith("line ") for hint in hints)


def test_each_run_has_its_own_way() -> None:
    """Also if the messages follow the table, because each rank wrote its own file."""
    table = Table(ranks=4, hosts=2)
    socket, rdma = ("".join(f"n{r // 2 + 1}:1:{r} [0] NCCL INFO Channel 00/0 : {r}[0] -> {(r + 2) % 4}[0] [send] via NET/{net}\n"
                            for r in range(4)) for net in ("Socket/0", "IB/0/GDRDMA"))  # fmt: skip
    for text in (socket + table.text() + rdma + table.text(), table.text() + socket + table.text() + rdma):
        runs = read_text("a.log", text).runs
        assert runs[0].carried
        assert runs[0].carried.network == "TCP sockets"
    assert [run.carried and run.carried.network for run in runs] == ["TCP sockets", "InfiniBand"]
    assert all(run.verdict == "ok" for run in runs)
