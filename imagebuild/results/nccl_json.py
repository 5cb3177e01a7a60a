"""What nccl-tests writes with `-J` since 2.17.3, and two other JSON layouts that forks write.

The first releases misspell two keys; truth values are strings; a number may be the string `nan`; the document of a run
that failed may have no end. The environment that it holds is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from imagebuild.results import nccl_events, nccl_infer, nccl_verdict
from imagebuild.results.documents import Document
from imagebuild.results.models import Half, Row, Run
from imagebuild.results.nccl_failures import Failure, failure
from imagebuild.results.nccl_verdict import Facts
from imagebuild.results.parsed import Parsed

_AVERAGES = (("average_bus_bandwidth", "bandwidth"), ("average_bus_bandwidith", "bandwidith"))
_WRONG = ("nwrong", "wrong", "#wrong", "wrongElts", "numWrong", "errors")

Json = Mapping[str, object]


def looks_like(value: object) -> bool:
    """Whether a JSON document is one of nccl-tests or of a fork of it."""
    return _layout(value) is not None


def parse_json(source: str, document: Document) -> Parsed[Run]:
    """The run of a document that `looks_like` accepted; empty for any other."""
    layout = _layout(document.value)
    return layout(source, document) if layout else Parsed()


def _layout(value: object) -> Callable[[str, Document], Parsed[Run]] | None:
    if isinstance(value, Mapping):
        if "nccl_version" in value or (isinstance(value.get("config"), Mapping) and "minimum_bytes" in value["config"]):
            return _official
        if str(value.get("identifier", "")).startswith("nccl-tests") and isinstance(value.get("benchmark"), list):
            return _by_size
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and {"busBw", "inPlace"} <= set(value[0]):
        return _flat
    return None


def _official(source: str, document: Document) -> Parsed[Run]:
    top = _mapping(document.value)
    config = _mapping(top.get("config"))
    written = _list(top.get("results"))
    rows, partial, cut = [], [], False
    for entry in written:
        row = _row(_mapping(entry))
        cut = row is None
        if row:
            rows.append(row)
        else:
            partial.append(f"results: {entry!r}"[:200])
    bounds = _mapping(top.get("out_of_bounds"))
    average = next((_mapping(top[key]) for key, _ in _AVERAGES if key in top), {})
    errors = [str(error) for error in _list(top.get("errors")) if str(error).strip()]
    count = _integer(bounds.get("count"))
    devices = [_mapping(device) for device in _list(config.get("devices"))]
    name = _name(top) or nccl_infer.collective(rows, None)
    facts = Facts(
        rows=rows,
        partial_rows=len(partial),
        out_of_bounds=count,
        out_of_bounds_failed=str(bounds.get("okay", "")).lower() == "false",
        average_failed=str(average.get("okay", "")).lower() == "false",
        concluded=bool(average),
        failures=() if count is not None else _failures(errors, document.number),
        cut=cut,
        missing_size=None if name == "alltoallv" else _missing(config, rows),
        validated=_integer(config.get("validation")) != 0,
    )
    verdict, reason = nccl_verdict.judge(facts)
    if not document.whole:
        reason += "; the document has no end"
    names = {str(device["device_info"]) for device in devices if device.get("device_info")}
    return Parsed(
        (
            Run(
                source=source,
                collective=name,
                ranks=_ranks(config, devices),
                nodes=len({device.get("hostname") for device in devices}) or None,
                device=names.pop() if len(names) == 1 else None,
                rows=tuple(rows),
                partial_rows=len(partial),
                avg_busbw_gb_s=next((_number(average[key]) for _, key in _AVERAGES if key in average), None),
                out_of_bounds=count,
                wrong_total=nccl_verdict.wrong_total(rows),
                verdict=verdict,
                reason=reason,
            ),
        ),
        tuple(partial),
    )


def _name(top: Json) -> str | None:
    arguments = _list(top.get("args"))
    return nccl_events.collective(str(arguments[0])) if arguments else None


def _ranks(config: Json, devices: Sequence[Json]) -> int | None:
    """The list has one device of each process."""
    threads, gpus = _integer(config.get("nthreads")), _integer(config.get("ngpus"))
    return len(devices) * threads * gpus if devices and threads and gpus else None


def _missing(config: Json, rows: Sequence[Row]) -> int | None:
    largest, factor = _integer(config.get("maximum_bytes")), _integer(config.get("step_factor"))
    step = _integer(config.get("step_bytes"))
    if not rows or largest is None or not (factor or step):
        return None
    last = rows[-1].size_bytes
    following = last * factor if factor else last + (step or 0)
    return following if last < following <= largest else None


def _failures(errors: Iterable[str], number: int) -> Sequence[Failure]:
    """The library's last errors: the cause, where the run did not come to its end."""
    return [failure(error, number, "") or Failure("comm", error[:240], number, "") for error in errors]


def _row(entry: Json) -> Row | None:
    """A row, or None if it was not written to its end."""
    size, count = _integer(entry.get("size")), _integer(entry.get("count"))
    if size is None or count is None or not {"out_of_place", "in_place"} <= set(entry):
        return None
    out_of_place, in_place = entry["out_of_place"], entry["in_place"]
    if any(isinstance(half, Mapping) and not {"bus_bw", "nwrong"} <= set(half) for half in (out_of_place, in_place)):
        return None
    return Row(
        size_bytes=size,
        count=count,
        dtype=str(entry.get("type", "")),
        redop=str(entry.get("redop") or "").strip() or None,
        root=_integer(entry.get("root")),
        out_of_place=_half(_mapping(out_of_place), ("time", "cpu_time"), "alg_bw", "bus_bw", _WRONG),
        in_place=_half(_mapping(in_place), ("time", "cpu_time"), "alg_bw", "bus_bw", _WRONG) if in_place else None,
    )


def _half(values: Json, times: Sequence[str], algbw: str, busbw: str, wrong: Sequence[str]) -> Half:
    return Half(
        time_us=next((_number(values[key]) for key in times if key in values), None),
        algbw_gb_s=_number(values.get(algbw)),
        busbw_gb_s=_number(values.get(busbw)),
        wrong=next((_integer(values[key]) for key in wrong if key in values), None),
    )


def _by_size(source: str, document: Document) -> Parsed[Run]:
    """A list of one mapping: size to a flat mapping with `oop_` and `ip_` in front of the names."""
    rows, partial = [], []
    for group in _list(_mapping(document.value).get("benchmark")):
        for size, entry in _mapping(group).items():
            values = _mapping(entry)
            count = _integer(values.get("count"))
            if not size.isdecimal() or count is None or "ip_busbw" not in values:
                if size.isdecimal():
                    partial.append(f"benchmark: {size}: {entry!r}"[:200])
                continue
            out_of_place, in_place = (
                _half(values, (f"{side}_time",), f"{side}_algbw", f"{side}_busbw", (f"{side}_error",))
                for side in ("oop", "ip")
            )
            rows.append(
                Row(size_bytes=int(size[:20]), count=count, dtype=str(values.get("type", "")),
                    redop=str(values.get("redop") or "") or None, root=_integer(values.get("root")),
                    out_of_place=out_of_place, in_place=in_place)
            )  # fmt: skip
    return _simple(source, document, rows, partial, tool="nccl-tests")


def _flat(source: str, document: Document) -> Parsed[Run]:
    """rccl-tests: one entry for each size and placement."""
    rows: list[Row] = []
    partial = []
    name = None
    for item in _list(document.value):
        entry = _mapping(item)
        size = _integer(entry.get("size"))
        if size is None or "busBw" not in entry:
            partial.append(f"{item!r}"[:200])
            continue
        name = name or nccl_events.collective(str(entry.get("name", "")))
        half = _half(entry, ("time", "timeUsec"), "algBw", "busBw", _WRONG)
        row = Row(size_bytes=size, count=_integer(entry.get("count")) or 0, dtype=str(entry.get("type", "")),
                  redop=str(entry.get("redop") or "") or None, root=_integer(entry.get("root")), out_of_place=half,
                  in_place=None)  # fmt: skip
        in_place = str(entry.get("inPlace")).lower() in ("1", "true")
        if in_place and rows and rows[-1].in_place is None and rows[-1].size_bytes == size:
            rows[-1] = rows[-1].model_copy(update={"in_place": half})
        else:
            rows.append(row)
    return _simple(source, document, rows, partial, tool="rccl-tests", name=name)


def _simple(
    source: str, document: Document, rows: Sequence[Row], partial: Sequence[str], *, tool: str, name: str | None = None
) -> Parsed[Run]:
    """A layout without footer: its end shows that the program came to it."""
    counted = nccl_verdict.wrong_total(rows) is not None
    facts = Facts(rows=rows, partial_rows=len(partial), concluded=document.whole, validated=counted)
    verdict, reason = nccl_verdict.judge(facts)
    run = Run(
        source=source,
        tool=tool,
        collective=name or nccl_infer.collective(rows, None),
        rows=tuple(rows),
        partial_rows=len(partial),
        wrong_total=nccl_verdict.wrong_total(rows),
        verdict=verdict,
        reason=reason,
    )
    return Parsed((run,), tuple(partial))


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _number(value: object) -> float | None:
    """A number, also one in a string; None for nan and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _integer(value: object) -> int | None:
    number = _number(value)
    return None if number is None else round(number)
