"""The table of `dcgmi diag`, of DCGM 2, 3 and 4.

DCGM 4 prints a result for the whole test and one for each entity; before, a test had `Pass - All`, or a row for the
GPUs of each status. A message is cut into pieces of 45 characters, wherever a word ends, a row each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from imagebuild.results.dcgm_json import RUN, Status, looks_like, parse_json, status
from imagebuild.results.models import Diagnostic
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import shown

__all__ = ["looks_like", "parse", "parse_json"]

_MARK = re.compile(
    r"[\s>]{0,40}(?:\|\s{0,3}Diagnostic\s{1,40}\|.*"
    r"|[|+]-----  (?:Deployment|Hardware|Integration|Stress|Metadata|Host) )"
)
_RUN_ERROR = re.compile(
    r"Error: .{0,200}?\b(?:[Dd]iagnostic|embedded host engine|unable to establish a connection)\b.*"
    r"|Multi-node diagnostic failed.*"
)
_SECTION = re.compile(r"[|+]-----  (?P<name>[A-Za-z][A-Za-z -]{0,40}?)  ?-+[+|].*")
_RULE = re.compile(r"\+[-=]+\+[-=]+\+")
_CELLS = re.compile(r"\|(?P<name>[^|]*)\|(?P<value>.*)\|")
_VALUE = re.compile(
    r"(?P<status>Pass|Fail|Warn|Skip|Not Run)(?: - (?:All|(?P<kind>[A-Z]\w{0,20}?)s?: (?P<ids>[\d, ]{1,200})))?",
    re.IGNORECASE,
)
_ENTITY = re.compile(r"(?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}): (?P<status>Pass|Fail|Warn|Skip|Not Run)?")
_MESSAGE = re.compile(r"(?:Warning|Info|Error)(?:: (?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}))?")
_HOST_GPU = re.compile(r"(?P<group>GPU)s?:? (?P<ids>\d[\d, ]{0,200})")
_WIDTH, _PIECE = 48, 45
"""Characters between the bars of the second column, and those of a message among them."""
_LONGEST = 1000


@dataclass
class _Reader:
    source: str
    category: str | None = None
    table: bool = False
    test: str | None = None
    message: int | None = None
    """The place of the result whose message may go on in the next row."""
    failing: bool = False
    results: list[Diagnostic] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def line(self, text: str) -> None:
        failing, self.failing = self.failing, False
        if section := _SECTION.fullmatch(text):
            self.category, self.table, self.test, self.message = section["name"].strip(), True, None, None
        elif _RULE.fullmatch(text):
            self.table = self.table and "=" in text
        elif cells := _CELLS.fullmatch(text):
            self.cells(cells["name"], cells["value"])
        elif _RUN_ERROR.fullmatch(text):
            self.failing = True
            self.add(RUN, "fail", messages=(shown(text),), category=None)
        elif failing and text.startswith(("Error:", "Return:")):
            self.failing = True
            self.extend(len(self.results) - 1, shown(text), new=True)
        elif self.table and text.startswith("|"):
            self.unread.append(shown(text))

    def add(
        self,
        test: str,
        result: Status,
        entity: str | None = None,
        messages: tuple[str, ...] = (),
        category: str | None = "",
    ) -> None:
        category = self.category if category == "" else category
        found = Diagnostic(source=self.source, category=category, test=test, entity=entity, status=result)
        self.results.append(found.model_copy(update={"messages": messages}))

    def extend(self, at: int, text: str, *, new: bool) -> None:
        result = self.results[at]
        kept, last = result.messages, ""
        if kept and not new:
            *before, last = kept
            kept = tuple(before)
        messages = (*kept, (last + text)[:10_000])
        self.results[at] = result.model_copy(update={"messages": messages})

    def cells(self, left: str, right: str) -> None:
        name, value = left.strip(), right.strip()
        if name == "Diagnostic" and value == "Result":
            self.category, self.table, self.test, self.message = None, True, None, None
        elif not name:
            self.below(value, _piece(right))
        elif self.test and (found := _MESSAGE.fullmatch(name)):
            self.begin_message(found, _piece(right))
        elif self.category == "Host Details" and (gpus := _HOST_GPU.fullmatch(name)) and self.test:
            for identity in re.findall(r"\d+", gpus["ids"]):
                self.add(self.test, status(value), f"GPU {identity}")
            self.message = len(self.results) - 1
        elif _VALUE.fullmatch(value) or (not value and self.category != "Metadata"):
            self.test, self.message = name, None
            self.statuses(value)
        elif self.category not in (None, "Metadata", "Host Details", "Error Summary"):
            self.unread.append(shown(f"{name}: {value}"))

    def statuses(self, value: str) -> None:
        """A row of a test: its status, or that of some GPUs."""
        assert self.test is not None
        found = _VALUE.fullmatch(value)
        ids = re.findall(r"\d+", found["ids"] or "") if found else []
        for entity in [f"{found['kind']} {identity}" for identity in ids] if found and ids else [None]:
            self.add(self.test, status(value), entity)
        self.message = None

    def below(self, value: str, piece: str) -> None:
        """A row without a name goes on with the test above it."""
        if not value or self.test is None:
            return
        if entity := _ENTITY.fullmatch(value + " " if value.endswith(":") else value):
            self.add(self.test, status(entity["status"]), f"{entity['group']} {entity['id']}")
            self.message = None
        elif self.message is None and _VALUE.fullmatch(value):
            self.statuses(value)
        elif self.message is not None:
            self.extend(self.message, piece, new=False)
        elif self.results:
            self.message = len(self.results) - 1
            self.extend(self.message, piece, new=True)

    def begin_message(self, found: re.Match[str], piece: str) -> None:
        """A warning or information about a test or one of its entities."""
        entity = f"{found['group']} {found['id']}" if found["group"] else None
        last = len(self.results) - 1
        of_entity = (at for at in range(last, -1, -1) if entity in (None, self.results[at].entity))
        self.message = next((at for at in of_entity if self.results[at].test == self.test), last)
        self.extend(self.message, piece, new=True)


def _piece(cell: str) -> str:
    """A piece of a message as it was cut; with a blank around it where the table lost its widths."""
    return cell[1 : 1 + _PIECE] if len(cell) == _WIDTH else f"{cell.strip()} "


def _whole(result: Diagnostic) -> Diagnostic:
    return result.model_copy(update={"messages": tuple(" ".join(text.split()) for text in result.messages)})


def parse(source: str, lines: Sequence[str]) -> Parsed[Diagnostic]:
    """The results in cleaned lines; empty where nothing of dcgmi is in them."""
    if not any(_MARK.match(line) or _RUN_ERROR.match(line) for line in lines):
        return Parsed()
    reader = _Reader(source)
    for line in lines:
        if len(line) <= _LONGEST and (text := line.strip()):
            reader.line(text)
    if reader.table:
        reader.unread.append("the table of dcgmi diag has no end")
    return Parsed(tuple(map(_whole, reader.results)), tuple(reader.unread))
