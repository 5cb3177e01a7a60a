"""What perftest's programs write with `--out_json`: one size a file, and no unit.

The file is written anew for each size, so only the last one of a run over all sizes is left. Before 2024 its keys and
some values had no quotes, and for RawEth QoS one still has none: such a file is no JSON, but it has a key a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from imagebuild.results.models import Table, TableRow
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import json_number, shown

_LATENCY = {
    "t_min": "min",
    "t_max": "max",
    "t_typical": "typical",
    "t_avg": "average",
    "t_stdev": "stdev",
    "percentile_99": "p99",
    "percentile_99.9": "p99.9",
}
_RESULTS = frozenset(("MsgSize", "BW_average", "MsgRate", "bw_avg", "msgRate_avg", "avg_lat", "t_avg"))
_PHRASE = re.compile(
    r"_(?=(?:Bidirectional|Post_List|BW|Latency|forwarding|Multicast|CMP_AND_SWAP|FETCH_AND_ADD)(?:_|$))"
)
_BROKEN = re.compile(r"""["']?results["']?\s{0,8}:\s{0,8}\{""")
_TEST = re.compile(r"""(?:^|[\s{,])["']?test["']?\s{0,8}:\s{0,8}["']?(\w{1,80})""", re.ASCII)
_PAIR = re.compile(r"""(?:^|[\s{,])["']?([\w.]{1,40})["']?\s{0,8}:\s{0,8}([^\s,}]{1,40})""", re.ASCII)
_WINDOW = 2000


def looks_like(document: object) -> bool:
    """Whether a JSON document is one of perftest."""
    if not isinstance(document, Mapping) or not isinstance(results := document.get("results"), Mapping):
        return False
    return "test_info" in document or not _RESULTS.isdisjoint(results)


def parse_json(source: str, document: object) -> Parsed[Table]:
    """The table of a JSON document that `looks_like` accepted; empty for any other."""
    if not isinstance(document, Mapping) or not looks_like(document):
        return Parsed()
    info = document.get("test_info")
    name = info.get("test") if isinstance(info, Mapping) else None
    results = {str(key): value for key, value in document["results"].items()}
    return _table(source, name if isinstance(name, str) else None, results)


def parse_broken_json(source: str, text: str) -> Parsed[Table]:
    """The tables of text that was meant as JSON; empty where it is not perftest's."""
    parts = []
    end = 0
    for found in _BROKEN.finditer(text):
        named = _TEST.findall(text[max(end, found.start() - _WINDOW) : found.start()])
        body = text[found.end() : found.end() + _WINDOW].partition("}")[0]
        end = found.end()
        results: dict[str, object] = dict(_PAIR.findall(body))
        if not _RESULTS.isdisjoint(results):
            parts.append(_table(source, named[-1] if named else None, results))
    return Parsed.joined(parts)


def _table(source: str, name: str | None, results: Mapping[str, object]) -> Parsed[Table]:
    values = {key: json_number(value) for key, value in results.items()}
    size = values.get("MsgSize")
    if size is None or size < 0:
        found = ", ".join(f"{key}: {value}" for key, value in results.items())
        return Parsed((), (shown(f"results without a message size: {found}"),))
    latency = {ours: value for key, ours in _LATENCY.items() if (value := values.get(key)) is not None}
    row = TableRow(
        size_bytes=int(size),
        bw_peak=values.get("BW_peak"),
        bw_average=values.get("BW_average"),
        msg_rate=values.get("MsgRate"),
        latency_us=latency or None,
    )
    measured = (row.bw_average, row.msg_rate, *latency.values())
    return Parsed(
        (
            Table(
                source=source,
                test=_as_in_text(name) if name else None,
                unit="usec" if latency else None,
                rows=(row,),
                verdict="ok" if any(value is not None for value in measured) else "truncated",
                reason="" if any(value is not None for value in measured) else "a row without a measurement",
            ),
        )
    )


def _as_in_text(name: str) -> str:
    """`RDMA_Write_BW_Test` as a program's text has it: `RDMA_Write BW`."""
    return _PHRASE.sub(" ", name.removesuffix("_Test").removesuffix("_")).replace("Post_List", "Post List")
