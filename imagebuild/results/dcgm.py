"""`dcgmi diag`: its table and its JSON, of DCGM 2, 3 and 4.

DCGM 4 prints a result for the whole test and one for each entity; before, a test had `Pass - All`, or a row for the GPUs of
each status. A message is cut into pieces of 45 characters, a row each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from imagebuild.results.models import Diagnostic
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import shown

Status = Literal["pass", "fail", "warn", "skip", "not-run", "unknown"]

_STATUSES: dict[str, Status] = {"pass": "pass", "fail": "fail", "warn": "warn", "skip": "skip", "not run": "not-run"}
_ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic", "DCGM Multi-Node Diagnostic")
_CATEGORIES = "test_categories"
_RUN = "diag"
"""The name of the run as a whole, for what went wrong outside of every test."""
_MARK = re.compile(
    r"[\s>]{0,40}(?:\| Diagnostic  .*\||[|+]-----  (?:Deployment|Hardware|Integration|Stress|Metadata|Host) )"
)
_RUN_ERROR = re.compile(
    r"Error: (?:Diagnostic c|[Uu]nable to (?:complete diagnostic|start an embedded|establish a conn)).*|Multi-node diagnostic fail.*"
)
_SECTION = re.compile(r"[|+]-----  (?P<name>[A-Za-z][A-Za-z -]{0,40}?)  ?-+[+|].*")
_RULE = re.compile(r"\+[-=]+\+[-=]+\+")
_CELLS = re.compile(r"\|(?P<name>[^|]*)\|(?P<value>.*)\|")
_VALUE = re.compile(
    r"(?P<status>Pass|Fail|Warn|Skip|Not Run)(?: - (?:(?P<all>All)|(?P<kind>GPU|CPU|[A-Z]\w{0,20}?)s?: (?P<ids>[\d, ]{1,200})))?",
    re.IGNORECASE,
)
_ENTITY = re.compile(r"(?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}): (?P<status>Pass|Fail|Warn|Skip|Not Run)?")
_MESSAGE = re.compile(r"(?:Warning|Info|Error)(?:: (?P<group>[A-Z][A-Za-z]{0,20}?) ?(?P<id>\d{1,4}))?")
_HOST_GPU = re.compile(r"(?P<group>GPU)s?:? (?P<ids>\d[\d, ]{0,200})")
_PIECE = 45
_LONGEST = 1000


def _status(text: object) -> Status:
    """`Pass - All` is the pass of all GPUs, and so on; whatever is no status is unknown."""
    found = _VALUE.fullmatch(text.strip()) if isinstance(text, str) else None
    return _STATUSES[found["status"].lower()] if found else "unknown"


@dataclass
class _Reader:
    source: str
    category: str | None = None
    table: bool = False
    test: str | None = None
    message: int | None = None
    """The place of the result whose message may go on in the next row."""
    full: bool = False
    """The last piece of the message filled its row, so a word may go on in the next."""
    failing: bool = False
    results: list[Diagnostic] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def line(self, text: str) -> None:
        failing, self.failing = self.failing, False
        if section := _SECTION.fullmatch(text):
            self.category, self.table, self.test, self.message = section["name"].strip(), True, None, None
        elif _RULE.fullmatch(text):
            self.table = self.table and not self.test
        elif cells := _CELLS.fullmatch(text):
            self.cells(cells["name"], cells["value"])
        elif _RUN_ERROR.fullmatch(text):
            self.failing = True
            self.add(_RUN, "fail", messages=(shown(text),), category=None)
        elif failing and text.startswith(("Error:", "Return:")):
            self.failing = True
            self.extend(len(self.results) - 1, shown(text), new=True)
        elif self.table and text.startswith("|"):
            self.unread.append(shown(text))

    def add(
        self,
        test: str,
        status: Status,
        entity: str | None = None,
        messages: tuple[str, ...] = (),
        category: str | None = "",
    ) -> None:
        category = self.category if category == "" else category
        found = Diagnostic(source=self.source, category=category, test=test, entity=entity, status=status)
        self.results.append(found.model_copy(update={"messages": messages}))

    def extend(self, at: int, text: str, *, new: bool) -> None:
        result = self.results[at]
        messages = result.messages
        if new or not messages:
            messages = (*messages, text)
        else:
            joined = messages[-1] + ("" if self.full else " ") + text
            messages = (*messages[:-1], joined[:10_000])
        self.results[at] = result.model_copy(update={"messages": messages})

    def cells(self, left: str, right: str) -> None:
        name, value = left.strip(), right.strip()
        if name == "Diagnostic" and value == "Result":
            self.category, self.table, self.test, self.message = None, True, None, None
        elif not name:
            self.below(value)
        elif self.test and (found := _MESSAGE.fullmatch(name)):
            self.begin_message(found, value)
        elif self.category == "Host Details" and (gpus := _HOST_GPU.fullmatch(name)) and self.test:
            for identity in re.findall(r"\d+", gpus["ids"]):
                self.add(self.test, _status(value), f"GPU {identity}")
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
            self.add(self.test, _status(value), entity)
        self.message = None

    def below(self, value: str) -> None:
        """A row without a name goes on with the test above it."""
        if not value or self.test is None:
            return
        if entity := _ENTITY.fullmatch(value + " " if value.endswith(":") else value):
            self.add(self.test, _status(entity["status"]), f"{entity['group']} {entity['id']}")
            self.message = None
        elif self.message is None and _VALUE.fullmatch(value):
            self.statuses(value)
        elif self.message is not None:
            self.extend(self.message, value, new=False)
            self.full = len(value) == _PIECE
        elif self.results:
            self.message, self.full = len(self.results) - 1, len(value) == _PIECE
            self.extend(self.message, value, new=True)

    def begin_message(self, found: re.Match[str], value: str) -> None:
        """A warning or information about a test or one of its entities."""
        entity = f"{found['group']} {found['id']}" if found["group"] else None
        own = [at for at, result in enumerate(self.results) if result.test == self.test]
        self.message = next((at for at in reversed(own) if result_is(self.results[at], entity)), own[-1])
        self.full = len(value) == _PIECE
        self.extend(self.message, value, new=True)


def result_is(result: Diagnostic, entity: str | None) -> bool:
    return entity is None or result.entity == entity


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
    return Parsed(tuple(reader.results), tuple(reader.unread))


def looks_like(document: object) -> bool:
    """Whether a JSON document is one of `dcgmi diag`."""
    if not isinstance(document, Mapping):
        return False
    return any(root in document for root in _ROOTS) or (
        isinstance(runs := document.get("iterations"), list)
        and any(isinstance(run, Mapping) and looks_like(run) for run in runs)
    )


def parse_json(source: str, document: object) -> Parsed[Diagnostic]:
    """The results of a JSON document that `looks_like` accepted; empty for any other."""
    if not isinstance(document, Mapping) or not looks_like(document):
        return Parsed()
    runs = document.get("iterations")
    parts = [_run(source, run) for run in (document, *(runs if isinstance(runs, list) else ()))]
    return Parsed.joined(parts)


def _run(source: str, document: object) -> Parsed[Diagnostic]:
    if not isinstance(document, Mapping):
        return Parsed((), (shown(f"iterations: {document!r}"),))
    results: list[Diagnostic] = []
    unread: list[str] = []
    # The multi-node diagnostic has a title under the key, and its tests beside it.
    inner = next((document[root] for root in _ROOTS if isinstance(document.get(root), Mapping)), None)
    for place in (document, inner):
        if not isinstance(place, Mapping):
            continue
        for key in ("runtime_error", "Warning"):
            if isinstance(text := place.get(key), str) and text:
                results.append(
                    Diagnostic(source=source, category=None, test=_RUN, status="fail", messages=(shown(text),))
                )
        categories = place.get(_CATEGORIES, [])
        for category in categories if isinstance(categories, list) else [categories]:
            tests = category.get("tests") if isinstance(category, Mapping) else None
            if not isinstance(category, Mapping) or not isinstance(tests, list):
                unread.append(shown(f"{_CATEGORIES}: {category!r}"))
                continue
            for test in tests:
                if isinstance(test, Mapping) and isinstance(test.get("name"), str):
                    results.extend(_test(source, _text(category.get("category")), test))
                else:
                    unread.append(shown(f"tests: {test!r}"))
    return Parsed(tuple(results), tuple(unread))


def _test(source: str, category: str | None, test: Mapping[str, object]) -> Iterator[Diagnostic]:
    found: list[tuple[str | None, Mapping[str, object]]] = []
    if isinstance(summary := test.get("test_summary"), Mapping):
        found.append((None, summary))
    entries = test.get("results")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping):
            found.extend((entity, entry) for entity in _entities(entry))
    for entity, entry in found:
        yield Diagnostic(
            source=source,
            category=category,
            test=str(test["name"]),
            entity=entity,
            status=_status(entry.get("status")),
            messages=tuple(_messages(entry)),
        )
    if not found:
        # Results of what was not run are left out.
        yield Diagnostic(source=source, category=category, test=str(test["name"]), status="not-run")


def _entities(entry: Mapping[str, object]) -> list[str | None]:
    host = f"host {entry['host_id']} " if isinstance(entry.get("host_id"), int | str) else ""
    if isinstance(identity := entry.get("entity_id"), int | str):
        return [f"{host}{_text(entry.get('entity_group')) or 'entity'} {identity}"]
    ids = entry.get("gpu_id", entry.get("gpu_ids"))
    if isinstance(ids, int | str) and (listed := re.findall(r"\d{1,6}", str(ids)[:1000])):
        return [f"{host}GPU {identity}" for identity in listed]
    return [None]


def _messages(entry: Mapping[str, object]) -> Iterator[str]:
    for key in ("warnings", "info"):
        value = entry.get(key)
        for one in value if isinstance(value, list) else [value]:
            text = one.get("warning") if isinstance(one, Mapping) else one
            if isinstance(text, str) and text.strip():
                yield text.strip()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
