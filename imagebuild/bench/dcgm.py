"""Read what `dcgmi diag` prints: the table of DCGM 4, and the JSON of DCGM 2, 3 and 4."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench.logs import JsonDocument, LineReader, excerpt, json_list, json_object, json_text
from imagebuild.bench.models import Diagnostic, DiagnosticStatus, ParsedOutput

WHOLE_RUN = "diag"
"""The test that stands for the run as a whole: it fails where dcgmi itself printed an error."""
_LONGEST_MESSAGE = 10_000


def parse_dcgm_text(source: str, lines: Sequence[str]) -> ParsedOutput[Diagnostic]:
    """Read the results in cleaned lines."""
    return _DcgmReader(source).read_all(lines, _MARK, longest=1000)


def _status_of(printed: object) -> DiagnosticStatus:
    """Return the status that was printed, `unknown` for every other text."""
    match = _STATUS.fullmatch(printed.strip()) if isinstance(printed, str) else None
    return _STATUSES.get(match[1].lower(), "not-run") if match else "unknown"


_STATUS = re.compile(r"(pass|fail|warn|skip|not[ _-]?run)(?:p?ed)?", re.IGNORECASE)
_STATUSES: dict[str, DiagnosticStatus] = {"pass": "pass", "fail": "fail", "warn": "warn", "skip": "skip"}

# The table

_RUN_ERROR = re.compile(
    r"Error: .{0,200}?\b(?:[Dd]iagnostic|embedded host engine|unable to establish a connection)\b.*"
)
_MARK = re.compile(
    r"[\s>]{0,40}(?:\|\s{0,3}Diagnostic\s{1,40}\|.*|[|+]-----  (?:Deployment|Hardware|Metadata|Stress) )|"
    + _RUN_ERROR.pattern
)
"""A line that only dcgmi prints."""
_SECTION = re.compile(r"[|+]-----  (?P<name>[A-Za-z][A-Za-z -]{0,40}?)  ?-+[+|].*")
_RULE = re.compile(r"\+[-=]+\+[-=]+\+")
_CELLS = re.compile(r"\|(?P<name>[^|]*)\|(?P<value>.*)\|")
_ENTITY_CELL = re.compile(
    r"(?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}): ?(?P<status>Pass|Fail|Warn|Skip|Not Run)?"
)
_MESSAGE_LABEL = re.compile(r"(?:Warning|Info|Error)(?:: (?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}))?")
_CELL_WIDTH, _PIECE_WIDTH = 48, 45
"""Characters between the bars of the second column, and those of a piece of a message in it."""


@dataclass
class _DcgmReader(LineReader[Diagnostic]):
    """Read a table line by line: sections, tests with a status, statuses of entities, messages over several rows."""

    category: str | None = None
    in_table: bool = False
    is_old: bool = False
    """Whether the table is of DCGM 2 or 3, which is not read."""
    test: str = ""
    """The test that rows without a name are about; empty if its row could not be read."""
    messages: list[str] | None = None
    """Messages of a result, of which the last may go on in the next row."""
    results: list[tuple[str | None, str, str | None, str | None, list[str]]] = field(default_factory=list)
    """Category, test, entity, status as printed, and messages."""

    def end(self) -> None:
        if self.in_table:
            self.unread.append("the table of dcgmi diag has no end")
        for category, test, entity, status, messages in self.results:
            said = tuple(" ".join(message[:_LONGEST_MESSAGE].split()) for message in messages)
            facts = {"category": category, "test": test, "entity": entity, "status": _status_of(status)}
            self.items.append(Diagnostic.model_validate({"source": self.source, "messages": said, **facts}))

    def read(self, text: str) -> None:
        if section := _SECTION.fullmatch(text):
            self.category, self.in_table, self.test = section["name"].strip(), True, ""
        elif _RULE.fullmatch(text):
            self.in_table = self.in_table and "=" in text
        elif cells := _CELLS.fullmatch(text):
            self.read_cells(cells["name"].strip(), cells["value"])
        elif _RUN_ERROR.fullmatch(text):
            self.is_error = True
            self.results.append((None, WHOLE_RUN, None, "fail", [excerpt(text)]))
        elif self.after_error and text.startswith(("Error:", "Return:")):
            self.is_error = True
            self.results[-1][-1].append(excerpt(text))
        elif self.in_table and text.startswith("|"):
            self.unread.append(excerpt(text))

    def read_cells(self, name: str, cell: str) -> None:
        value = cell.strip()
        # A piece of a message as it was cut; with a blank after it if the table lost its widths.
        piece = cell[1 : 1 + _PIECE_WIDTH] if len(cell) == _CELL_WIDTH else f"{value} "
        if name == "Diagnostic" and value == "Result":
            self.category, self.in_table, self.is_old, self.test = None, True, False, ""
        elif self.category == "Metadata" or self.is_old:
            if name == "DCGM Version" and value.startswith(("1.", "2.", "3.")):
                self.is_old = True
                self.unread.append(f"the table of DCGM {value} is not read: use dcgmi diag -j")
        elif self.test and (label := _MESSAGE_LABEL.fullmatch(name)):
            entity = f"{label['group']} {label['id']}" if label["group"] else None
            fitting = [result for result in self.results if result[1] == self.test and entity in (None, result[2])]
            self.messages = (fitting or self.results)[-1][-1]
            self.messages.append(piece)
        elif self.test and not name and (found := _ENTITY_CELL.fullmatch(value)):
            self.add(f"{found['group']} {found['id']}", found["status"])
        elif self.test and not name and value and self.messages:
            self.messages[-1] += piece
        elif name and (_STATUS.fullmatch(value) or not value):
            self.test = name
            self.add(None, value)
        elif name and self.category not in (None, "Error Summary"):
            self.test = ""
            self.unread.append(excerpt(f"{name}: {value}"))

    def add(self, entity: str | None, status: str | None) -> None:
        self.results.append((self.category, self.test, entity, status, []))
        self.messages = None


# JSON

_JSON_TITLES = ("DCGM Diagnostic", "DCGM GPU Diagnostic")


def parse_dcgm_json(source: str, document: JsonDocument) -> ParsedOutput[Diagnostic] | None:
    """Read the results of a JSON document; None if it is not of dcgmi diag."""
    top = json_object(document.value)
    runs = [top, *json_list(top.get("iterations"))]
    if not any(title in json_object(run) for run in runs for title in _JSON_TITLES):
        return None
    results: list[Diagnostic] = []
    unread: list[str] = []
    for run in runs:
        titled = [part for title in _JSON_TITLES if isinstance(part := json_object(run).get(title), dict)]
        for part in (json_object(run), *titled):
            errors = filter(None, (json_text(part.get(key)) for key in ("runtime_error", "Warning")))
            results.extend(
                Diagnostic(source=source, category=None, test=WHOLE_RUN, status="fail", messages=(excerpt(error),))
                for error in errors
            )
        if not titled and (run is not top or "iterations" not in top):
            unread.append(excerpt(f"dcgmi diag: {run!r}"))
        for category in (category for part in titled for category in json_list(part.get("test_categories"))):
            tests = json_object(category).get("tests")
            if not isinstance(tests, list):
                unread.append(excerpt(f"test_categories: {category!r}"))
                continue
            for test in tests:
                if isinstance(test, dict) and isinstance(test.get("name"), str):
                    results.extend(_json_results(source, json_text(json_object(category).get("category")), test))
                elif test is not None:
                    unread.append(excerpt(f"tests: {test!r}"))
    if not results and not unread:
        unread.append("dcgmi diag: no test in the document")
    return ParsedOutput(tuple(results), tuple(unread))


def _json_results(source: str, category: str | None, test: Mapping[str, object]) -> Iterator[Diagnostic]:
    """Yield the result of a test as a whole, if there is one, and those of its entities."""
    entries: list[tuple[str | None, Mapping[str, object]]] = []
    if isinstance(summary := test.get("test_summary"), dict):
        entries.append((None, summary))
    for entry in json_list(test.get("results")):
        if not isinstance(entry, dict):
            continue
        gpus = entry.get("gpu_id", entry.get("gpu_ids"))
        numbers = re.findall(r"\d{1,6}", str(gpus)[:1000]) if isinstance(gpus, int | str) else []
        entities: list[str | None] = [f"GPU {number}" for number in numbers]
        if isinstance(identity := entry.get("entity_id"), int | str):
            entities = [f"{json_text(entry.get('entity_group')) or 'entity'} {identity}"]
        entries.extend((entity, entry) for entity in entities or [None])
    # A test that was not run has no results.
    for entity, entry in entries or [(None, {"status": "Not Run"})]:
        messages = []
        for value in (entry.get("warnings"), entry.get("info")):
            for message in value if isinstance(value, list) else [value]:
                text = json_text(message.get("warning") if isinstance(message, dict) else message)
                messages += [text.strip()] if text and text.strip() else []
        yield Diagnostic(
            source=source,
            category=category,
            test=str(test["name"]),
            entity=entity,
            status=_status_of(entry.get("status")),
            messages=tuple(messages),
        )
