"""The JSON of `dcgmi diag`, of DCGM 2, 3 and 4, of one node and of several, of one run and of several."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from imagebuild.results.models import Diagnostic
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import shown

Status = Literal["pass", "fail", "warn", "skip", "not-run", "unknown"]

RUN = "diag"
"""The name of the run as a whole, for what went wrong outside of every test."""
_STATUS = re.compile(r"(pass|fail|warn|skip|not[ _-]?run)(?:p?ed)?(?: - .*)?", re.IGNORECASE)
_STATUSES: dict[str, Status] = {"pass": "pass", "fail": "fail", "warn": "warn", "skip": "skip"}
_ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic", "DCGM Multi-Node Diagnostic")
_CATEGORIES = "test_categories"


def status(printed: object) -> Status:
    """A printed status: `Pass - All` is the pass of all GPUs, and so on; whatever is no status is unknown."""
    found = _STATUS.fullmatch(printed.strip()) if isinstance(printed, str) else None
    return _STATUSES.get(found[1].lower(), "not-run") if found else "unknown"


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
        errors = (place.get(key) for key in ("runtime_error", "Warning"))
        results.extend(
            Diagnostic(source=source, category=None, test=RUN, status="fail", messages=(shown(text),))
            for text in errors
            if isinstance(text, str) and text
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
                elif test is not None:
                    unread.append(shown(f"tests: {test!r}"))
    if not results and not unread and "iterations" not in document:
        unread.append("dcgmi diag: no test in the document")
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
            status=status(entry.get("status")),
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
