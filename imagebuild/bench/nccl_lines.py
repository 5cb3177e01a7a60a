"""Read single lines that nccl-tests and rccl-tests print, in every release since 2.10.

Logs often lack the header of a table. A row is therefore read by its shape. The header is used only if the shape is
ambiguous."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from imagebuild.bench import logs
from imagebuild.bench.arithmetic import TYPE_BYTES
from imagebuild.bench.logs import LogLine, parse_number
from imagebuild.bench.models import Collective, Half, NcclRow

# Lines other than rows

COLLECTIVES = frozenset(get_args(Collective))
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("version", r"(?P<tool>[nr]ccl-tests):? [Vv]ersion:? (?P<version>[^\s(]{1,80})"),
        ("library", r"(?P<library>RCCL) version ?:"),
        ("starting", r"Collective test starting: (?P<program>\S{1,300})"),
        (
            "parameters",
            r"nThreads? \d{1,5} nGpus \d{1,5} minBytes (?P<min>\d{1,20}) maxBytes (?P<max>\d{1,20})"
            r"(?: step: (?:(?P<factor>\d{1,20})\(factor\)|(?P<bytes>\d{1,20})\(bytes\)))?"
            r"(?:.{0,200}? validation: (?P<validation>\d{1,3}))?",
        ),
        ("devices", r"Using devices"),
        (
            "rank",
            r"Rank\s{1,12}(?P<rank>\d{1,7})(?:\s{1,12}Group\s{1,12}(?P<group>-?\d{1,10}))?(?:\s{1,12}Pid\s{1,12}\d{1,10})?"
            r"\s{1,12}on\s{1,20}(?P<host>\S{1,300})\s{1,12}device\s{1,12}(?P<device>\d{1,5})\s{1,12}\[(?P<bus>[^\]]{0,40})\](?P<name>.{0,200})",
        ),
        ("reduced", r"Reducing maxBytes to (?P<reduced>\d{1,20})"),
        ("header", r"size\s{1,40}count\s{1,40}type\b(?P<labels>.{0,400})"),
        ("bounds", r"Out of bounds values\s{0,20}: ?(?P<bounds>\d{1,15})\s{1,8}(?P<bounds_state>OK|FAILED)"),
        ("average", r"Avg bus bandwidth\s{0,20}: ?(?P<average>\S{1,30})(?:\s{1,8}(?P<average_state>OK|FAILED))?"),
        ("concluded", r"Collective test concluded: (?P<program>\S{1,300})"),
    )
)
"""The pattern of each kind of line. The named groups of a pattern are the values to read from the line."""
_ELISION = re.compile(r"[\s#|]{0,200}(?:\.{3,10}|…|\[(?:\.{3}|…)\]|<(?:snip|\.\.\.)>)\s{0,200}")
"""Dots that someone wrote in place of removed lines when copying the output."""
_COMMAND = re.compile(
    rf"\b(?P<command>(?:{'|'.join(sorted(COLLECTIVES, reverse=True))})_perf)(?:_mpi)?"
    r"['\"\\]{0,2}\s{1,20}-{1,2}[a-zA-Z]"
)


_SEPARATED = {
    name: re.sub("_|(?<=all)(?=to)|(?<=to)(?=all)|(?<=send)(?=recv)", "[-_ .]?", name) for name in COLLECTIVES
}
_NAMES = {
    name: re.compile(
        # Names of several words may be a part of a longer word: `AllReduceTest`.
        rf"(?<![a-z]){text}(?:(?![a-z])|(?=perf))" if name in (text, "alltoallv") else text, re.IGNORECASE
    ) for name, text in sorted(_SEPARATED.items(), key=lambda item: -len(item[1]))
}  # fmt: skip
"""The pattern of each collective's name, the longest first."""
_PROGRAM = re.compile(rf"(?<![a-z_])({'|'.join(sorted(COLLECTIVES, reverse=True))})_perf")
_WORDS = re.compile("reduce|gather|scatter|send|all|broadcast|hyper", re.IGNORECASE)
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
    if programs := {match[1] for match in _PROGRAM.finditer(text)} if "_perf" in text else set():
        return programs.pop() if len(programs) == 1 else None
    words = len(text.split())
    found = _named_in(text) if words <= 6 and len(text) <= _LONGEST_HEADING and _WORDS.search(text) else set()
    # In a longer line, `reduce` may be an ordinary word.
    return found.pop() if len(found) == 1 and (words <= 3 or not found <= {*_SEPARATED.values()}) else None


def collective_in_path(path: str) -> str | None:
    """Return the collective in the name of a file or else of its folder, if there is exactly one."""
    for part in reversed(path.split("/")[-2:]):
        if found := _named_in(part):
            return found.pop() if len(found) == 1 else None
    return None


def read_facts(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the kind of a line, and the values in the line by name.

    The kind is one of `_PATTERNS`, `elision` or `command`. The kind is empty for a row, a failure and any other output.
    """
    bare = text.lstrip("# \t*>|\\")
    # If the line begins with an unknown prefix, the program's own text starts at the first #. Prose quotes it: `# Avg`.
    for candidate in (bare, text.partition("#")[2].lstrip("# \t")) if "#" in bare and "`#" not in bare else (bare,):
        for kind, pattern in _PATTERNS:
            if match := pattern.match(candidate):
                return kind, {name: value.strip() for name, value in match.groupdict().items() if value is not None}
    if _ELISION.fullmatch(text):
        return "elision", {}
    if "_perf" in text and not text.lstrip().startswith("#") and (match := _COMMAND.search(text)):
        return "command", {**match.groupdict(), **logs.settings_in(text)}
    return "", {}


# Rows: size, count, type, operation and root; then time, algbw, busbw and wrong, first out of place, then in place

_BLANKS, _WORD_END, _NUMBER = r"[\s|]+", r"(?![^\s|])", r"\d+(?:\.\d+)?(?:e[+-]\d\d+)?"
_VALUE = rf"{_BLANKS}(?:{_NUMBER}|-?nan|-?inf|N/A|-1){_WORD_END}"
_FIGURE = rf"{_BLANKS}({_NUMBER}|-?nan|-?inf){_WORD_END}"
_HALF = rf"{_FIGURE * 3}{_BLANKS}(N/A|\d+(?:\.\d+)?e[+-]\d\d+|\d+|-?nan){_WORD_END}"
_HALVES = rf"{_HALF}(?P<iterations>(?:{_VALUE}){{4}})?{_HALF}(?(iterations)(?:{_VALUE}){{4}})"
"""Both halves of a row. With option `-I`, each half has four more columns about single iterations."""
_LEAD = re.compile(
    r"(?<![^\s|#])(?P<size>\d{1,20})[\s|]{1,40}(?P<count>\d{1,20})[\s|]{1,40}(?P<dtype>[a-z]\w{2,11})(?![^\s|])"
    rf"(?:{_BLANKS}(?P<redop>sum|prod|max|min|avg|mulsum|none){_WORD_END})?"
)
"""The first columns of a row: size, count, type and operation."""
_FIGURES = re.compile(
    rf"(?:{_BLANKS}(?P<root>-1|\d{{1,7}}){_WORD_END})??{_HALVES}(?!{_VALUE}|{_BLANKS}(?:{'|'.join(TYPE_BYTES)}){_WORD_END})"
)
"""The other columns of a row: root and both halves. A type must not follow: then, the last two figures would be the
size and count of the next row."""
_ERROR = re.compile(r"\de[+-]\d\d")
_END_OF_ROW = re.compile(rf"(?:{_HALVES}|\A{_HALF})(?:{_BLANKS}(?:\d{{4}}-\d\d-\d\d|\d\d:\d\d:\d\d)){{0,2}}[\s|]*\Z")
"""The last columns of a row, or a line that contains only the last half."""


def read_row(line: LogLine, labels: Sequence[str]) -> NcclRow | str | None:
    """Return the row in a line, the text of a broken row, or None if the line is not a row.
    `labels` are the column names in the header."""
    lead = _LEAD.search(line.text)
    if lead is None:
        return None
    size, count, element = int(lead["size"]), int(lead["count"]), TYPE_BYTES.get(lead["dtype"], 0)
    figures = _FIGURES.match(line.text, lead.end())
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
        is_error = "error" in labels or ("#wrong" not in labels and _ERROR.fullmatch(half[3]) is not None)
        wrong, error = (None, last) if is_error else (None if last is None else round(last), None)
        halves.append(Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=busbw, wrong=wrong, error=error))
    return NcclRow(
        size_bytes=size,
        count=count,
        dtype=lead["dtype"],
        redop=lead["redop"],
        root=int(figures["root"]) if figures["root"] else None,
        out_of_place=halves[0],
        in_place=halves[1],
    )


def _is_consistent(size: int, data: int, halves: Iterable[Sequence[str]]) -> bool:
    """Return whether the size is a multiple of `data`, the bytes of `count` elements, and algbw is size / time."""
    for time, algbw in (map(parse_number, half[:2]) for half in halves):
        if not time or algbw is None or abs(algbw - size / time / 1e3) > 0.1 * size / time / 1e3 + 0.011:
            return False
    return size % data == 0 if data else size == 0


def ends_like_row(text: str) -> bool:
    """Return whether the last columns of a line are those of a row, whatever the line begins with."""
    end = _END_OF_ROW.search(" " + text[-400:])
    return bool(end and "." in end[0])
