"""Reports written by hand, for tests of their text, page and JUnit file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import yaml

from imagebuild.bench.judge import judge_results
from imagebuild.bench.models import Claim, Half, Judgement, Limit, NcclRow, Results, Run, Source, SpeedClaim
from imagebuild.report.document import Report, ReportOrigin
from imagebuild.report.sweeps import find_sweeps
from tests.conftest import ROOT
from tests.unit.bench.nccl_tables import Table

HOSTILE = (
    '<script>document.title="owned"</script><img src=x onerror=alert(1)>\x1b[31m red\x00 \u202e ]]> {{ 7*7 }} | `@all`'
)
GIB = 1 << 30


def half(busbw: float | None, size: int, factor: float) -> Half:
    algbw = None if busbw is None else busbw / factor
    return Half(time_us=size / algbw / 1e3 if algbw else None, algbw_gb_s=algbw, busbw_gb_s=busbw, wrong=0)


def row(
    size: int, busbw: float | None, in_place: float | None = None, factor: float = 1.75, **values: object
) -> NcclRow:
    known = {"count": size // 4, "dtype": "float", "redop": "sum", "root": -1} | values
    inner = None if in_place is None else half(in_place, size, factor)
    return NcclRow(size_bytes=size, out_of_place=half(busbw, size, factor), in_place=inner, **known)


def curve(peak: float, factor: float) -> tuple[NcclRow, ...]:
    """Return rows from 1 KiB to 8 GiB that approach a peak. `factor` is bus bandwidth / bandwidth."""
    sizes = [1 << power for power in range(10, 34)]
    return tuple(row(s, round(peak * s / (s + 6e7), 3), round(peak * s / (s + 6.3e7), 3), factor) for s in sizes)


def run(collective: str | None = "all_reduce", peak: float = 480.0, **values: object) -> Run:
    known: dict[str, object] = {
        "source": f"logs/{collective}.log", "tool_version": "2.19.6", "ranks": 8, "nodes": 1,
        "devices": ("NVIDIA H100 80GB HBM3",), "verdict": "ok", "reason": "complete",
    }  # fmt: skip
    return Run(
        collective=collective,
        **({"rows": curve(peak, {"all_reduce": 1.75, "sendrecv": 1}.get(str(collective), 0.875))} | known | values),
    )


def pairs(slow: Mapping[tuple[str, ...], float], hosts: int = 6, speed: float = 13.5) -> tuple[Run, ...]:
    """Return a run for each pair of hosts. `slow` maps groups of hosts to the bandwidth of the pairs that include them."""
    runs = []
    for number, pair in enumerate(combinations([f"n{number}" for number in range(1, hosts + 1)], 2)):
        peak = next((value for key, value in slow.items() if set(key) <= set(pair)), speed + number % 5 / 50)
        rows = (row(GIB, peak * 0.9), row(8 * GIB, peak))
        runs.append(run("sendrecv", source=f"{'_'.join(pair)}.log", ranks=2, nodes=2, hosts=pair, rows=rows))
    return tuple(runs)


def judgement(
    collective: str, measured: float, ceiling: float, rate: float, state: str = "fast enough", subject: str = "",
    source: str = "", **speed: object,
) -> Judgement:  # fmt: skip
    known = {
        "state": state,
        "measured": measured,
        "size_bytes": 8 * GIB,
        "ceiling": Limit(value=ceiling, what=f"{collective} ceiling: link * 1"),
        "reference": Limit(value=rate, what="8x H100, measured somewhere, 2026-05"),
        "tolerance": 0.9,
        "reason": f"{measured / rate:.0%} of the reference",
    }
    return Judgement(
        source=source or f"logs/{collective}.log",
        subject=subject or f"{collective}, 8 ranks, 1 node",
        data=Claim(state="right", reason="complete"),
        participation=Claim(state="complete", reason="8 ranks, 1 node"),
        speed=SpeedClaim.model_validate(known | speed),
    )


ABOUT = ReportOrigin(
    title="8 x H100", created="2026-11-21T08:00:00+00:00", imagebuild="0.4.0", files=("logs",), profile="h100-sxm"
)


def report(**content: Any) -> Report:
    """Return a report. A result without a given judgement for its file and subject is judged without a profile."""
    results = Results.model_validate({kind: content.get(kind, ()) for kind in Results.model_fields})
    given, judgements = list(content.get("judgements", ())), []
    for own in judge_results(results):
        found = next((j for j in given if (j.source, j.subject) == (own.source, own.subject)), own)
        given = [judgement for judgement in given if judgement is not found]
        judgements.append(found)
    sweeps = find_sweeps(results.runs)
    return Report.model_validate({"about": ABOUT, "sweeps": sweeps} | content | {"judgements": judgements})


GOOD = report(
    runs=(run(), run("all_gather", 362.0)),
    judgements=(judgement("all_reduce", 477.1, 700.0, 482.0), judgement("all_gather", 361.2, 450.0, 364.0)),
    sources=(Source(path="logs/all_reduce.log", tools=("nccl-tests",), lines=60, unread=0),),
)


def bad() -> Report:
    """Return a report with every kind of result, from tests/data/report-bad.yaml."""
    text = (ROOT / "tests/data/report-bad.yaml").read_text()
    content = yaml.safe_load(text.replace("HOSTILE", json.dumps(HOSTILE)[1:-1]))
    content["runs"] = [run(**values) for values in content["runs"]]
    content["judgements"] = [judgement(**values) for values in content["judgements"]]
    sizes = tuple(1 << power for power in range(1, 24))
    content["tables"][0]["rows"] = [
        {"size_bytes": size, "bw_average": 392 * size / (size + 4000), "bw_peak": 0.0, "msg_rate": 2.5}
        for size in sizes
    ]
    about = ABOUT.model_copy(update={"title": "Everything at once", "baseline": "old.json"})
    return report(about=about, **content)


BAD = bad()
(VERIFICATION,) = BAD.verifications


def nccl_log(busbw: float, *, ranks: int = 8, wrong: int = 0, collective: str = "all_reduce") -> str:
    """Generate output of nccl-tests 2.19 for sizes from 256 MiB to 8 GiB, each at a fraction of `busbw`."""
    sizes = tuple(1 << power for power in range(28, 34))
    return Table(
        collective=collective, ranks=ranks, sizes=sizes, step=2, wrong={0: wrong} if wrong else {},
        speed=lambda size: busbw * (1 - 0.04 * (34 - size.bit_length())),
    ).text()  # fmt: skip
