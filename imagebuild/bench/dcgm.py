"""Read what `dcgmi diag` prints: tables and JSON of DCGM 2, 3 and 4."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench.logs import JsonDocument, excerpt, json_list, json_object, json_text
from imagebuild.bench.models import Diagnostic, DiagnosticStatus, ParsedOutput

WHOLE_RUN = "diag"
"""The test that stands for the run as a whole: it fails where dcgmi itself printed an error."""
_LONGEST_LINE = 1000
_LONGEST_MESSAGE = 10_000


def parse_dcgm_text(source: str, lines: Sequence[str]) -> ParsedOutput[Diagnostic]:
    """Read the results in cleaned lines."""
    if not any(_MARK.match(line) or _RUN_ERROR.match(line) for line in lines):
        return ParsedOutput()
    reader = _DcgmReader(source)
    for line in lines:
        if len(line) <= _LONGEST_LINE and (text := line.strip()):
            reader.read(text)
    if reader.in_table:
        reader.unread.append("the table of dcgmi diag has no end")
    results = (
        result.model_copy(update={"messages": tuple(" ".join(message.split()) for message in result.messages)})
        for result in reader.results
    )
    return ParsedOutput(tuple(results), tuple(reader.unread))


def parse_dcgm_json(source: str, document: JsonDocument) -> ParsedOutput[Diagnostic] | None:
    """Read the results of a JSON document; None if it is not of dcgmi diag."""
    if not _is_dcgm(document.value):
        return None
    runs = json_list(json_object(document.value).get("iterations"))
    return ParsedOutput.joined(_parse_json_run(source, run) for run in (document.value, *runs))


def _status_of(printed: object) -> DiagnosticStatus:
    """Return the status that was printed, `unknown` for every other text. `Pass - All` is the pass of all GPUs."""
    match = _STATUS.fullmatch(printed.strip()) if isinstance(printed, str) else None
    return _STATUSES.get(match[1].lower(), "not-run") if match else "unknown"


_STATUS = re.compile(r"(pass|fail|warn|skip|not[ _-]?run)(?:p?ed)?(?: - .*)?", re.IGNORECASE)
_STATUSES: dict[str, DiagnosticStatus] = {"pass": "pass", "fail": "fail", "warn": "warn", "skip": "skip"}

# Tables

_MARK = re.compile(
    r"[\s>]{0,40}(?:\|\s{0,3}Diagnostic\s{1,40}\|.*"
    r"|[|+]-----  (?:Deployment|Hardware|Integration|Stress|Metadata|Host) )"
)
"""A line that only dcgmi prints."""
_RUN_ERROR = re.compile(
    r"Error: .{0,200}?\b(?:[Dd]iagnostic|embedded host engine|unable to establish a connection)\b.*"
    r"|Multi-node diagnostic failed.*"
)
_SECTION = re.compile(r"[|+]-----  (?P<name>[A-Za-z][A-Za-z -]{0,40}?)  ?-+[+|].*")
_RULE = re.compile(r"\+[-=]+\+[-=]+\+")
_CELLS = re.compile(r"\|(?P<name>[^|]*)\|(?P<value>.*)\|")
_STATUS_CELL = re.compile(
    r"(?P<status>Pass|Fail|Warn|Skip|Not Run)(?: - (?:All|(?P<kind>[A-Z]\w{0,20}?)s?: (?P<ids>[\d, ]{1,200})))?",
    re.IGNORECASE,
)
_ENTITY_CELL = re.compile(r"(?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}): (?P<status>Pass|Fail|Warn|Skip|Not Run)?")
_MESSAGE_LABEL = re.compile(r"(?:Warning|Info|Error)(?:: (?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}))?")
_HOST_GPUS = re.compile(r"GPUs?:? (?P<ids>\d[\d, ]{0,200})")
_CELL_WIDTH, _PIECE_WIDTH = 48, 45
"""Characters between the bars of the second column, and those of a piece of a message in it."""


@dataclass
class _DcgmReader:
    """Read a table line by line: sections, tests with a status, statuses of entities, messages over several rows."""

    source: str
    category: str | None = None
    in_table: bool = False
    test: str | None = None
    message: int | None = None
    """Index of the result whose message may go on in the next row."""
    after_error: bool = False
    """Whether the last line was an error of the run: another one that follows at once explains it."""
    results: list[Diagnostic] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        after_error, self.after_error = self.after_error, False
        if section := _SECTION.fullmatch(text):
            self.begin_section(section["name"].strip())
        elif _RULE.fullmatch(text):
            self.in_table = self.in_table and "=" in text
        elif cells := _CELLS.fullmatch(text):
            self.read_cells(cells["name"].strip(), cells["value"])
        elif _RUN_ERROR.fullmatch(text):
            self.after_error = True
            self.results.append(_whole_run_failure(self.source, text))
        elif after_error and text.startswith(("Error:", "Return:")):
            self.after_error = True
            self.add_message(len(self.results) - 1, excerpt(text))
        elif self.in_table and text.startswith("|"):
            self.unread.append(excerpt(text))

    def begin_section(self, category: str | None) -> None:
        self.category, self.in_table, self.test, self.message = category, True, None, None

    def read_cells(self, name: str, cell: str) -> None:
        value = cell.strip()
        # A piece of a message as it was cut; with a blank after it if the table lost its widths.
        piece = cell[1 : 1 + _PIECE_WIDTH] if len(cell) == _CELL_WIDTH else f"{value} "
        if name == "Diagnostic" and value == "Result":
            self.begin_section(None)
        elif not name:
            self.read_unnamed(value, piece)
        elif self.test and (label := _MESSAGE_LABEL.fullmatch(name)):
            entity = f"{label['group']} {label['id']}" if label["group"] else None
            self.message = self.message_index(self.test, entity)
            self.add_message(self.message, piece)
        elif self.category == "Host Details" and (gpus := _HOST_GPUS.fullmatch(name)) and self.test:
            for gpu in re.findall(r"\d+", gpus["ids"]):
                self.add(value, f"GPU {gpu}")
            self.message = len(self.results) - 1
        elif _STATUS_CELL.fullmatch(value) or (not value and self.category != "Metadata"):
            self.test = name
            self.read_status(value)
        elif self.category not in (None, "Metadata", "Host Details", "Error Summary"):
            self.unread.append(excerpt(f"{name}: {value}"))

    def read_unnamed(self, value: str, piece: str) -> None:
        """Read a row without a name, which goes on with the test above it."""
        if not value or self.test is None:
            return
        if entity := _ENTITY_CELL.fullmatch(value + " " if value.endswith(":") else value):
            self.add(entity["status"], f"{entity['group']} {entity['id']}")
            self.message = None
        elif self.message is None and _STATUS_CELL.fullmatch(value):
            self.read_status(value)
        elif self.message is not None:
            messages = self.results[self.message].messages
            self.replace_messages(self.message, (*messages[:-1], "".join(messages[-1:]) + piece))
        elif self.results:
            self.message = len(self.results) - 1
            self.add_message(self.message, piece)

    def read_status(self, value: str) -> None:
        """Read the status of the test, or of the GPUs that it names."""
        status = _STATUS_CELL.fullmatch(value)
        ids = re.findall(r"\d+", status["ids"] or "") if status else []
        for entity in [f"{status['kind']} {number}" for number in ids] if status and ids else [None]:
            self.add(value, entity)
        self.message = None

    def add(self, status: str | None, entity: str | None) -> None:
        assert self.test is not None
        self.results.append(
            Diagnostic(
                source=self.source, category=self.category, test=self.test, entity=entity, status=_status_of(status)
            )
        )

    def message_index(self, test: str, entity: str | None) -> int:
        """Return the index of the last result of the test, or of one entity in it; else that of the last result."""
        last = len(self.results) - 1
        for index in range(last, -1, -1):
            if self.results[index].test == test and entity in (None, self.results[index].entity):
                return index
        return last

    def add_message(self, index: int, text: str) -> None:
        self.replace_messages(index, (*self.results[index].messages, text))

    def replace_messages(self, index: int, messages: tuple[str, ...]) -> None:
        messages = (*messages[:-1], messages[-1][:_LONGEST_MESSAGE])
        self.results[index] = self.results[index].model_copy(update={"messages": messages})


def _whole_run_failure(source: str, message: str) -> Diagnostic:
    return Diagnostic(source=source, category=None, test=WHOLE_RUN, status="fail", messages=(excerpt(message),))


# JSON

_JSON_TITLES = ("DCGM Diagnostic", "DCGM GPU Diagnostic", "DCGM Multi-Node Diagnostic")


def _is_dcgm(value: object) -> bool:
    top = json_object(value)
    return any(title in top for title in _JSON_TITLES) or any(map(_is_dcgm, json_list(top.get("iterations"))))


def _parse_json_run(source: str, value: object) -> ParsedOutput[Diagnostic]:
    if not isinstance(value, dict):
        return ParsedOutput((), (excerpt(f"iterations: {value!r}"),))
    results: list[Diagnostic] = []
    unread: list[str] = []
    # A diagnostic of several nodes has its tests beside the title, others have them under it.
    titled = [value[title] for title in _JSON_TITLES if isinstance(value.get(title), dict)]
    for part in (value, *titled[:1]):
        errors = (json_text(part.get(key)) for key in ("runtime_error", "Warning"))
        results.extend(_whole_run_failure(source, error) for error in errors if error)
        categories = part.get("test_categories", [])
        for entry in categories if isinstance(categories, list) else [categories]:
            category = json_object(entry)
            tests = category.get("tests")
            if not isinstance(tests, list):
                unread.append(excerpt(f"test_categories: {entry!r}"))
                continue
            for test in tests:
                if isinstance(test, dict) and isinstance(test.get("name"), str):
                    results.extend(_json_results(source, json_text(category.get("category")), test))
                elif test is not None:
                    unread.append(excerpt(f"tests: {test!r}"))
    if not results and not unread and "iterations" not in value:
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
        host = f"host {entry['host_id']} " if isinstance(entry.get("host_id"), int | str) else ""
        gpus = entry.get("gpu_id", entry.get("gpu_ids"))
        if isinstance(identity := entry.get("entity_id"), int | str):
            entities: list[str | None] = [f"{host}{json_text(entry.get('entity_group')) or 'entity'} {identity}"]
        else:
            numbers = re.findall(r"\d{1,6}", str(gpus)[:1000]) if isinstance(gpus, int | str) else []
            entities = [f"{host}GPU {number}" for number in numbers]
        entries.extend((entity, entry) for entity in entities or [None])
    name = str(test["name"])
    for entity, entry in entries:
        messages = []
        for value in (entry.get("warnings"), entry.get("info")):
            for message in value if isinstance(value, list) else [value]:
                text = json_text(message.get("warning") if isinstance(message, dict) else message)
                messages += [text.strip()] if text and text.strip() else []
        yield Diagnostic(
            source=source,
            category=category,
            test=name,
            entity=entity,
            status=_status_of(entry.get("status")),
            messages=tuple(messages),
        )
    if not entries:
        # A test that was not run has no results.
        yield Diagnostic(source=source, category=category, test=name, status="not-run")
