"""Read single lines that nccl-tests and rccl-tests print, in every release since 2.10.

Logs often lack the header of a table. A row is therefore read by its shape. The header is used only if the shape is
ambiguous."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from imagebuild.bench import logs
from imagebuild.bench.arithmetic import TYPE_BYTES
from imagebuild.bench.logs import LogLine, parse_number
from imagebuild.bench.models import Collective, Half, NcclRow
from imagebuild.core.patterns import DataFile

COLLECTIVES = frozenset(get_args(Collective))
_ALTERNATIVES = "|".join(sorted(COLLECTIVES, reverse=True))
_DATA = DataFile(__file__, collectives=_ALTERNATIVES, types="|".join(TYPE_BYTES))
_RE = _DATA.patterns
_KINDS = [(kind, _DATA.pattern(text)) for kind, text in _DATA["kinds"].items()]

_NAMES = {name: _DATA.pattern(text) for name, text in _DATA["names"].items()}
"""The pattern of each collective's name, the longest first."""
_LONGEST_HEADING = 80


def _named_in(text: str) -> set[str]:
    """Return the collectives that a text names. A name within a longer name does not count."""
    found = set()
    for name, pattern in _NAMES.items():
        if pattern.search(text):
            found.add(name)
            text = pattern.sub(" ", text)
    return found


def mentioned_collective(text: str) -> str | None:
    """Return the collective of the program that a line names, or the only collective in a short line."""
    if programs := {match[1] for match in _RE["program"].finditer(text)} if "_perf" in text else set():
        return programs.pop() if len(programs) == 1 else None
    words = len(text.split())
    found = _named_in(text) if words <= 6 and len(text) <= _LONGEST_HEADING and _RE["words"].search(text) else set()
    # In a longer line, `reduce` may be an ordinary word.
    return found.pop() if len(found) == 1 and (words <= 3 or found.isdisjoint(_DATA["words"])) else None


def collective_in_path(path: str) -> str | None:
    """Return the collective in the name of a file or else of its folder, if there is exactly one."""
    for part in reversed(path.split("/")[-2:]):
        if found := _named_in(part):
            return found.pop() if len(found) == 1 else None
    return None


def read_facts(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the kind of a line, and the values in the line by name.

    The kind is one of `kinds` in the YAML file, `elision` or `command`, or empty for any other line."""
    bare = text.lstrip("# \t*>|\\")
    # If the line begins with an unknown prefix, the program's own text starts at the first #. Prose quotes it: `# Avg`.
    for candidate in (bare, text.partition("#")[2].lstrip("# \t")) if "#" in bare and "`#" not in bare else (bare,):
        for kind, pattern in _KINDS:
            if match := pattern.match(candidate):
                return kind, {name: value.strip() for name, value in match.groupdict().items() if value is not None}
    if _RE["elision"].fullmatch(text):
        return "elision", {}
    if "_perf" in text and not text.lstrip().startswith("#") and (match := _RE["command"].search(text)):
        return "command", {**match.groupdict(), **logs.settings_in(text)}
    return "", {}


# Rows: size, count, type, operation and root; then time, algbw, busbw and wrong, first out of place, then in place


def read_row(line: LogLine, labels: Sequence[str]) -> NcclRow | str | None:
    """Return the row in a line, the text of a broken row, or None if the line is not a row.
    `labels` are the column names in the header."""
    lead = _RE["lead"].search(line.text)
    if lead is None:
        return None
    size, count, element = int(lead["size"]), int(lead["count"]), TYPE_BYTES.get(lead["dtype"], 0)
    figures = _RE["figures"].match(line.text, lead.end())
    words = [word for word in figures.groups()[1:] if word != figures["iterations"]] if figures else []
    printed = (words[:4], words[4:])
    # A size smaller than `count` elements lost its first digits.
    is_cut = figures is None or size < count * element or ("i_min" in labels and not figures["iterations"])
    if figures is None or is_cut or (line.is_joined and not _is_consistent(size, count * element, printed)):
        return line.text.strip() if element else None
    halves = []
    for half in printed:
        time, algbw, busbw, last = map(parse_number, half)
        # Without a header, only the form shows that the last column is the largest error: `3e+02`.
        is_error = "error" in labels or ("#wrong" not in labels and _RE["error"].fullmatch(half[3]) is not None)
        wrong, error = (None, last) if is_error else (None if last is None else round(last), None)
        halves.append(Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=busbw, wrong=wrong, error=error))
    return NcclRow(
        size_bytes=size, count=count, dtype=lead["dtype"], redop=lead["redop"],
        root=int(figures["root"]) if figures["root"] else None, out_of_place=halves[0], in_place=halves[1],
    )  # fmt: skip


def _is_consistent(size: int, data: int, halves: Iterable[Sequence[str]]) -> bool:
    """Return whether the size is a multiple of `data`, the bytes of `count` elements, and algbw is size / time."""
    for time, algbw in (map(parse_number, half[:2]) for half in halves):
        if not time or algbw is None or abs(algbw - size / time / 1e3) > 0.1 * size / time / 1e3 + 0.011:
            return False
    return size % data == 0 if data else size == 0


def ends_like_row(text: str) -> bool:
    """Return whether the last columns of a line are those of a row, whatever the line begins with."""
    end = _RE["end_of_row"].search(" " + text[-400:])
    return bool(end and "." in end[0])
