"""Read the JSON that `dcgmi diag -j` of DCGM 2, 3 and 4 prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from imagebuild.bench.logs import JsonDocument, Parsed, excerpt, json_list, json_object, json_text
from imagebuild.bench.models import Diagnostic
from imagebuild.core.patterns import data_of

_DATA = data_of(__file__)


def parse_dcgm_json(source: str, document: JsonDocument) -> Parsed[Diagnostic] | None:
    """Return the results in a JSON document; None if dcgmi diag did not write the document."""
    top = json_object(document.value)
    runs = [top, *map(json_object, json_list(top.get("iterations")))]
    if not any(title in run for run in runs for title in _DATA["titles"]):
        return None
    parsed: Parsed[Diagnostic] = []
    for run in runs:
        titled = [json_object(run[title]) for title in _DATA["titles"] if isinstance(run.get(title), dict)]
        # An error of dcgmi itself becomes the result of a test `diag`, which stands for the whole run.
        about = {"source": source, "category": None, "test": "diag", "verdict": "failed"}
        errors = (json_text(part.get(key)) for part in (run, *titled) for key in ("runtime_error", "Warning"))
        parsed += [Diagnostic(**about, reason=excerpt(error)) for error in errors if error]
        # The top of a document with several runs has no tests of its own, but may have an error.
        if not titled and (run is not top or len(runs) == 1):
            parsed.append(excerpt(f"dcgmi diag: {run!r}"))
        for category in (category for part in titled for category in json_list(part.get("test_categories"))):
            tests, name = json_object(category).get("tests"), json_text(json_object(category).get("category"))
            if not isinstance(tests, list):
                parsed.append(excerpt(f"test_categories: {category!r}"))
            for test in filter(None, json_list(tests)):
                if isinstance(test, dict) and isinstance(test.get("name"), str):
                    parsed += _json_results(source, name, test)
                else:
                    parsed.append(excerpt(f"tests: {test!r}"))
    return parsed or ["dcgmi diag: no test in the document"]


def _json_results(source: str, category: str | None, test: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Yield the result of the whole test, if any, then the result of each tested part, such as a GPU."""
    entries: list[tuple[str | None, Mapping[str, Any]]] = []
    if isinstance(summary := test.get("test_summary"), dict):
        entries.append((None, summary))
    for entry in map(json_object, json_list(test.get("results"))):
        gpus = entry.get("gpu_id", entry.get("gpu_ids"))
        entities: list[str | None] = [f"GPU {number}" for number in re.findall(r"\d{1,6}", str(gpus)[:1000])]
        if isinstance(identity := entry.get("entity_id"), int | str):
            entities = [f"{json_text(entry.get('entity_group')) or 'entity'} {identity}"]
        entries += [(entity, entry) for entity in entities or [None]]
    # A test that was not run has no results.
    for entity, entry in entries or [(None, {"status": "Not Run"})]:
        messages = []
        for value in (entry.get("warnings"), entry.get("info")):
            for message in value if isinstance(value, list) else [value]:
                text = json_text(message.get("warning") if isinstance(message, dict) else message) or ""
                messages += [text.strip()] if text.strip() else []
        printed = str(entry.get("status")).strip().lower()
        unknown = ("failed", f"the status of the test is {excerpt(printed)}")
        verdict, word = _DATA["verdicts"].get(re.sub("[ _-]", "", printed), unknown)
        if verdict == "ok" and entry.get("warnings"):
            verdict = "warned"
        yield Diagnostic(
            source=source, category=category, test=test["name"], entity=entity, verdict=verdict,
            reason="; ".join(messages) or word,
        )  # fmt: skip
