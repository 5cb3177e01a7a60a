"""Damaged output does not pass, through reader and judge: logs of failed programs and modified logs of all tools."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

from imagebuild.bench.judge import judge_results
from imagebuild.bench.models import State
from imagebuild.bench.read import read_text
from tests.conftest import ROOT, data
from tests.unit.bench.nccl_tables import Table, document, interleaved, substituted
from tests.unit.bench.speed_fakes import shipped

PEAKS = {"all_reduce": 482.0, "all_gather": 365.0, "reduce_scatter": 365.0, "alltoall": 348.0, "sendrecv": 367.0}


def healthy(collective: str = "all_reduce", ranks: int = 8, peak: float = 0.0, **options: Any) -> Table:
    """Return a run with the speeds of a healthy node. `peak` is another highest speed."""
    peak, sizes = peak or PEAKS[collective], tuple(1 << power for power in range(20, 35))
    return Table(
        collective=collective, ranks=ranks, sizes=sizes, step=2, speed=lambda size: peak * size / (size + 6e7), **options
    )  # fmt: skip


def log(*arguments: Any, **options: Any) -> str:
    return healthy(*arguments, **options).text()


def standing(text: str, profile: str | None = "h100") -> tuple[State | None, str]:
    """Return the state and the words of the worst claim about the results in a text."""
    judged = judge_results(read_text("log", text), shipped(profile) if profile else None)
    claim = min((j.worst() for j in judged), key=lambda claim: (*get_args(State), None).index(claim.standing()))
    return claim.standing(), f"{claim.state}: {claim.reason}"


BENCH = ROOT / "tests/data/bench"
PERFTEST = (BENCH / "perftest.txt").read_text()
MATRIX, MATRIX_DOCUMENT, DIAGNOSIS, WIRES = (
    (BENCH / "healthy" / name).read_text() for name in ("matrix.txt", "matrix.json", "diagnosis.json", "wires.txt")
)
"""Outputs of nvbandwidth 0.8 on eight H100, of dcgmi diag, and of ib_write_bw on a NIC of 400 Gb/s."""


@pytest.mark.parametrize("crash", data("bench/cases")["what-crashes-after-its-results-does-not-pass"])
@pytest.mark.parametrize("whole", [MATRIX, PERFTEST, log()], ids=["nvbandwidth", "perftest", "nccl-tests"])
def test_what_crashes_after_its_results_does_not_pass(whole: str, crash: str) -> None:
    assert {result.verdict for result in read_text("log", whole).measured} == {"ok"}
    assert standing(f"{whole}\n{crash}\n", None)[0] == "failed"


def test_a_failure_belongs_to_what_began_before_it() -> None:
    """Also with several tools: a run of nccl-tests does not get the failures of other tools."""
    results = read_text("log", f"{log()}\n{MATRIX}\nsrun: error: Exited with exit code 124\n{PERFTEST}")
    assert [result.verdict for result in results.measured] == ["ok", "timeout", "ok"]
    # A failure before the first result belongs to that result, except for runs of nccl-tests, whose begin is known.
    for whole, verdict in ((MATRIX, "failed"), (PERFTEST, "failed"), (log(), "ok")):
        assert read_text("log", f"Segmentation fault\n{whole}").measured[0].verdict == verdict
    assert read_text("log", f"other: CUDA error\n{log()}").measured[0].verdict == "ok"


@pytest.mark.parametrize(
    "row", data("bench/cases")["worst-claims"], ids=lambda row: f"{row['state']}-{row['text']}"[:80]
)
def test_what_counts_as_what(row: dict[str, Any]) -> None:
    text = ""
    for piece in row["text"]:
        options = {} if isinstance(piece, str) else piece
        own = piece if isinstance(piece, str) else MATRIX if "matrix" in options else log(**options.get("log", {}))
        text += substituted(own, options.get("sub", ()))
    found, why = standing(text, row.get("profile", "h100"))
    assert (found, row["reason"] in why) == (row["state"], True), why


BYTE_STEPS = "".join(
    f"{size // 128 * 128:12d} {size // 128:12d}     float    none      -1"
    + f"   20.00   {size / 2e4:.2f}   {size / 2e4:.2f}      0" * 2
    + "\n"
    for size in range(8, (1 << 14) + 1, 1024)
)
TRACE = "+ srun -l all_reduce_perf -b 1M -e 16G -f 2\n"


@pytest.mark.parametrize(
    "text",
    [
        # Open MPI tags each piece of a row that is written separately.
        "".join(f"[1,0]<stdout>:{line}\n" for line in re.sub("(-1|  0)(?=  )", r"\1[1,0]<stdout>:", log()).splitlines()),
        "".join(f"<unheard-of@7> {line}\n" for line in log().splitlines()),
        json.dumps({"plays": [{"tasks": [{"hosts": {"n1": {"stdout": log()}}}]}]}),
        'n1 | CHANGED => {\n  "stdout_lines": [\n' + "".join(f'    "{line}",\n' for line in log().splitlines()) + "  ]\n}\n",
        TRACE + "".join(f"0: {line}\n" for line in log().splitlines()),
        log("all_gather").split("# nThread")[0] + "# nThread 1 nGpus 1 minBytes 8 maxBytes 16384 step: 1024(bytes) warmup iters: 1 "
        "iters: 1 agg iters: 1 validation: 1 graph: 0\n" + "\n".join(Table().header()) + "\n" + BYTE_STEPS + "# Out of bounds values : 0 OK\n# Avg bus bandwidth : 0.38438\n",
    ],
    ids=["pieces", "unknown", "ansible", "ansible-lines", "trace", "byte-steps"],
)  # fmt: skip
def test_healthy_logs_are_read_whole(text: str) -> None:
    (run,) = read_text("log", text).runs
    assert (run.verdict, run.partial_rows) == ("ok", 0), run.reason
    assert len(run.rows) == (16 if "1024(bytes)" in text else 15)


# Kinds of damage in tests/data/bench/damages.yaml, on every shape of output


def passes(text: str) -> bool:
    """Return whether there are results, and none failed or is open: the condition for exit status 0."""
    judged = judge_results(read_text("log", text), shipped("h100"))
    return bool(judged) and not {"failed", "open"} & {j.worst().standing() for j in judged}


HALVES = r" +(?P<time{0}>\S+) +(?P<algbw{0}>\S+) +(?P<busbw{0}>\S+) +(?P<wrong{0}>\S+)"
OBJECTS = r'": {{"time": (?P<time{0}>\S+), "alg_bw": (?P<algbw{0}>\S+), "bus_bw": (?P<busbw{0}>\S+), "nwrong": (?P<wrong{0}>\S+)}}'
FIGURES = re.compile(
    r"(?m)^(?:\[1,0\]<stdout>:)? *(?P<size>\d+) +(?P<count>\d+) +(?P<type>float)(?: +(?P<redop>[a-z]+))?(?: +-?\d+)?"
    + HALVES.format("") + HALVES.format(2) + r" *(?:\n|$)"
    r'|(?:, )?{"size": (?P<size_>\d+), "count": (?P<count_>\d+), "type": "(?P<type_>float)", "redop": "(?P<redop_>\w+)", "root": "-1", "out_of_place'
    + OBJECTS.format("_").replace("}}", "}") + r', "in_place' + OBJECTS.format("2_").replace("}}", "}") + "}"
    r'|(?<= )(?P<cell>\d{3}\.\d\d)(?=\s)|"(?P<cell_>\d+\.\d\d)"'
    r"|(?m:^) (?P<size__>\d+) +5000 +(?P<peak>\S+) +(?P<average>\S+) +(?P<rate>\S+)\n"
)  # fmt: skip
"""A row of a table, of a JSON document or of perftest, or a cell of a matrix. Groups with the same name but for `_` are
the same figure."""
TOTALS = re.compile(r'(?P<mean>Avg bus bandwidth +: |"bandwidth": )[-\w.]+|(?P<sum>SUM \S+ |"sum": )[\d.]+')


TAG = "[1,0]<stdout>:"
SHAPES = {
    "table": log(), "old table": log(release="2.10"), "without name": log("all_gather", release="2.13.10"),
    "two nodes": "".join(f"{TAG}{line}\n" for line in log(ranks=16, hosts=2, peak=478.0).splitlines()),
    "document": document(healthy()), "matrix": MATRIX, "matrix document": MATRIX_DOCUMENT,
    "perftest": WIRES, "diagnosis": DIAGNOSIS,
}  # fmt: skip


def chosen(text: str, rows: str) -> list[re.Match[str]]:
    """Return the rows of a text that a word such as `last` names."""
    found = list(FIGURES.finditer(text))
    half = len(found) // 2
    parts = {"first": slice(1), "middle": slice(half, half + 1), "last": slice(-1, None), "second half": slice(half, None), "all": slice(None)}  # fmt: skip
    return found[parts[rows]]


def rewritten(text: str, rows: str, change: Callable[[str, str], str]) -> str:
    """Change figures in some rows. `change` gets the name and the text of a figure."""
    for row in reversed(chosen(text, rows)):
        for name in sorted(row.groupdict(), key=row.start, reverse=True):
            if row[name] is not None:
                text = text[: row.start(name)] + change(name.rstrip("_"), row[name]) + text[row.end(name) :]
    return text


def scaled(figure: str, factor: float) -> str:
    value = float(figure) * factor
    return f"{value:.{len(figure.partition('.')[2])}f}" if "." in figure else f"{round(value)}"


def harmed(text: str, kind: dict[str, Any]) -> str:
    """Return the text with the damage. Averages and sums follow, unless they are damaged themselves."""
    before, factor = text, kind.get("times", 1.0)
    if names := kind.get("figures"):
        text = rewritten(
            text, kind["rows"], lambda name, old: (kind.get("put") or scaled(old, factor)) if name in names else old
        )
    if slow := kind.get("slow"):
        marks = ("2",) if len(slow) > 2 else ("", "2")
        powers = {f"{name}{mark}": power for mark in marks for power, names in ((-1, ["time"]), (1, ["algbw", "busbw", "peak", "average", "rate"])) for name in names}  # fmt: skip
        text = rewritten(
            text, slow[0], lambda name, old: scaled(old, slow[1] ** powers[name]) if name in powers else old
        )
    spans = [row.span(key) for rows, name in kind.get("swap", ()) for row in chosen(text, rows)[:1] for key in row.groupdict() if key.rstrip("_") == name and row[key]]  # fmt: skip
    if len(spans) == 2:
        (begin, end), (other, last) = sorted(spans)
        text = text[:begin] + text[other:last] + text[end:other] + text[begin:end] + text[last:]
    for way, times in (("repeat", 2), ("cut", 0)):
        for row in reversed(chosen(text, kind[way])) if way in kind else ():
            text = text[: row.start()] + row[0] * times + text[row.end() :]
    if "drop" in kind:
        text = re.sub(rf"(?m)^.*(?:{kind['drop']}).*\n", "", text, count=0 if kind.get("all") else 1)
    if "replace" in kind:
        text = re.sub(kind["replace"], kind["with"], text, count=0 if kind.get("all") else 1)
    if kind.get("groups"):
        text = re.sub(r"(Rank +(\d+) Group +)0", r"\g<1>\2", text)
    text = text[int(len(text) * kind.get("lose", 0)) : int(len(text) * kind.get("keep", 1)) or None]
    if text != before and not re.search("Avg|SUM", kind.get("replace", "") + kind.get("drop", "")):
        numbers = {name: [float(row[key]) for row in FIGURES.finditer(text) for key in row.groupdict() if key.rstrip("_") in name and row[key] and re.fullmatch(r"[\d.]+", row[key])]
                   for name in (("busbw", "busbw2"), ("cell",))}  # fmt: skip
        mean = sum(numbers["busbw", "busbw2"]) / max(1, len(numbers["busbw", "busbw2"]))
        total = sum(numbers["cell",])
        text = TOTALS.sub(lambda m: f"{m['mean']}{mean:.6g}" if m["mean"] else f"{m['sum']}{total:.2f}", text)
    if "mix" in kind and "float" in text and not text.startswith("{"):
        bare = text.replace(TAG, "").splitlines()
        orders = {"labels": [f"{n}: {line}" for line in bare for n in (0, 1)], "labels in order": [f"{n}: {line}" for n in (0, 1) for line in bare],
                  "lines": [line for line in bare for _ in (0, 1)], "random": interleaved([bare, bare], random.Random(1)).split("\n"),
                  "another run": interleaved([bare, log("all_gather").splitlines()], random.Random(1)).split("\n")}  # fmt: skip
        text = "\n".join(orders[kind["mix"]])
    return f"{text}\n{kind['append']}\n" if "append" in kind else text


@pytest.mark.parametrize("kind", data("bench/damages"), ids=lambda kind: kind["name"])
def test_no_kind_of_damage_passes_in_any_shape(kind: dict[str, Any]) -> None:
    texts = {shape: harmed(text, kind) for shape, text in SHAPES.items()}
    changed = {shape: text for shape, text in texts.items() if text != SHAPES[shape]}
    assert changed, "the damage changes no shape"
    assert {shape for shape, text in changed.items() if passes(text)} == set(kind.get("shapes", ()))


def test_shapes_pass_without_damage() -> None:
    assert {shape for shape, text in SHAPES.items() if not passes(text)} == set()
