"""Reading of YAML and JSON files into models. All mistakes in a file are reported together, with their lines."""

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ValidationError

from imagebuild.core.errors import ConfigError, Mistakes, ResultError, nearest, suggestion
from imagebuild.core.fields import Loc, M, YamlFile, line_of
from imagebuild.core.files import read_text
from imagebuild.core.patterns import data_of

MOST_NESTED = 8
"""Maximum depth at which keys are looked for, because a model may contain itself."""
MOST_VALUES, MOST_LEVELS = 1_000_000, 100
"""Maximum number of values in a YAML text, after each alias is replaced by its value, and how deep they are nested."""
KINDS: Mapping[type, str] = {dict: "a mapping", list: "a list", str: "a text"}
"""Maps types of values to their names in messages."""


@cache
def foreign(kind: str) -> Mapping[str, str]:
    """Return words of other tools, and the words to use instead: a part of foreign.yaml, such as `keys`."""
    words: Mapping[str, str] = data_of(__file__, "foreign")[kind]
    return words


def load_yaml(path: Path, model: type[M], mistakes: Mistakes) -> YamlFile[M] | None:
    """Return the contents of a YAML or JSON file as a model.
    If the file contains mistakes, add the mistakes to `mistakes`, and return None."""
    found = Mistakes()
    reader = _Reader(path, found)
    try:
        text = read_text(path, reviewed=True)
        # A JSON file is also YAML, but a JSON parser is a hundred times faster, and locks are long.
        is_json = text.startswith("{") and path.suffix not in (".yaml", ".yml")
        data = json.loads(text, object_pairs_hook=distinct_keys) if is_json else reader.read(text)
        if not found.texts:
            return YamlFile(path, model.model_validate(data), reader.lines)
    except ConfigError as error:
        found.texts.append(str(error))
    except RecursionError:
        found.add(f"{path}:1", "lists or mappings are nested too deeply; restore the file from git")
    except json.JSONDecodeError as error:
        found.add(f"{path}:{error.lineno}", f"not JSON: {error.msg} in column {error.colno}; restore the file from git")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        problem = getattr(error, "problem", None) or getattr(error, "reason", error)
        remedy = "correct the line, or quote the text"
        if problem == "exceeded maximum nesting depth":
            problem = f"there are more than {MOST_LEVELS} levels, so lists or mappings are nested too deeply"
        elif re.match(r" *-? *\t", "".join(text.split("\n")[line : line + 1])):
            problem, remedy = "a tab in the indentation", "indent the line with spaces"
        found.add(f"{path}:{line + 1}", f"not YAML: {problem}; {remedy}")
    except ValidationError as error:
        if not reader.lines:  # the JSON parser does not record lines
            with suppress(yaml.YAMLError, RecursionError):  # JSON that is not YAML
                reader.read(text)
        for loc, problem in _problems(error, data, model):
            found.add(f"{path}:{line_of(reader.lines, loc)}", f"{dotted_key(loc)}: {problem}")
    except ValueError as error:
        found.add(f"{path}:1", f"not JSON: {error}; restore the file from git")
    mistakes.texts += found.texts
    return None


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a key appears twice, as people may read another value than Python."""
    result = dict(pairs)
    if len(result) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} appears twice")
    return result


def read_yaml(path: Path, model: type[M]) -> YamlFile[M]:
    """Return the contents of a YAML or JSON file as a model. Raises ConfigError with all mistakes in the file."""
    mistakes = Mistakes()
    document = load_yaml(path, model, mistakes)
    mistakes.stop_if_any()
    assert document
    return document


def read_written(model: type[M], content: str | bytes | Mapping[str, Any], name: str) -> M:
    """Read a document that imagebuild wrote, from JSON or from parsed JSON.
    Raises ResultError if the document cannot be read. The message begins with `name`."""
    try:
        return model.model_validate(content) if isinstance(content, Mapping) else model.model_validate_json(content)
    except ValidationError as error:
        loc: Loc = ()
        problem = error.errors()[0]["msg"]
        if not problem.startswith("Invalid JSON"):
            data = content if isinstance(content, Mapping) else json.loads(content)
            loc, problem = next(_problems(error, data, model))
        remedy = "write the document again, or use the version of imagebuild that wrote it"
        raise ResultError(f"{name}: {dotted_key(loc)}: {problem}; {remedy}") from None


def dotted_key(loc: Loc) -> str:
    """Return the path of a value for messages: `checks.0.name`, or `the file` for the top level."""
    return ".".join(map(str, loc)) or "the file"


def _refuse(event: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Reader:
    """A YAML parser that records the line of each value. Scalars stay text, so that 3.10 does not become 3.1.
    The value of an alias is parsed once, at its anchor, so that nested aliases cannot take exponential time."""

    def __init__(self, path: Path, mistakes: Mistakes) -> None:
        self.path = path
        self.mistakes = mistakes
        self.lines: dict[Loc, int] = {}
        self.anchors: dict[str, tuple[Any, int]] = {}
        """Maps each anchor to its value, and to the number of values inside this value."""
        self.count = 0
        """Number of values so far."""
        self.events: Iterator[Any] = iter(())

    def read(self, text: str) -> Any:
        """Return the values in a YAML text. Raises YAMLError, or RecursionError if they are nested too deeply."""
        # libyaml crashes if it builds nodes for deeply nested values, but not if it yields events.
        self.events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        documents: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if documents:
                    _refuse(event, "another document begins")
                documents.append(self.value(next(self.events), ()))
        return documents[0] if documents else {}

    def value(self, event: Any, loc: Loc) -> Any:
        """Return the value that begins with the event `event` of the YAML parser."""
        self.lines.setdefault(loc, event.start_mark.line + 1)
        before, value = self.count, None
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                _refuse(event, f"*{event.anchor} is not defined before this line")
            value, size = self.anchors[event.anchor]
            self.count += size
        self.count += 1
        if self.count > MOST_VALUES or len(loc) > MOST_LEVELS:
            _refuse(event, f"there are more than {MOST_VALUES} values, or more than {MOST_LEVELS} levels")
        if isinstance(event, yaml.AliasEvent):
            return value
        if isinstance(event, yaml.MappingStartEvent):
            value = self.mapping(loc)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                value.append(self.value(item, (*loc, len(value))))
        else:
            is_null = event.implicit[0] and event.value in ("", "~", "null", "Null", "NULL")
            value = None if is_null else event.value
        if event.anchor:
            self.anchors[event.anchor] = value, self.count - before
        return value

    def mapping(self, loc: Loc) -> dict[str, Any]:
        """Return a mapping whose start event was already read."""
        result: dict[str, Any] = {}
        while not isinstance(key := next(self.events), yaml.MappingEndEvent):
            if isinstance(key, yaml.CollectionStartEvent | yaml.AliasEvent):
                _refuse(key, "a key must be a text, not a list or mapping")
            inner = (*loc, key.value)
            self.lines[inner] = line = key.start_mark.line + 1
            if key.value in result:
                self.mistakes.add(f"{self.path}:{line}", f"{dotted_key(inner)}: the key appears twice; remove one")
            result[key.value] = self.value(next(self.events), inner)
        return result


def _problems(error: ValidationError, data: Any, model: type[BaseModel]) -> Iterator[tuple[Loc, str]]:
    """Yield the path of each wrong value in the file, and a message that says what is wrong.

    Each path appears once. If a list or a mapping contains wrong values, no message says that the list or mapping
    itself has the wrong type."""
    details: dict[Loc, list[Any]] = {}
    for detail in error.errors():
        details.setdefault(_place(detail, data), []).append(detail)
    for loc, found in details.items():
        if any(len(other) > len(loc) and other[: len(loc)] == loc for other in details) and all(
            detail["type"] == "too_short" or detail["type"].endswith("_type") for detail in found
        ):
            continue
        # If a field accepts several types, pydantic reports a mistake for each type. Prefer a mistake that is not about
        # the type.
        best = min(found, key=lambda detail: detail["type"].endswith("_type") or detail["type"] == "literal_error")
        yield loc, _explain(best, model, loc)


def _place(detail: Any, data: Any) -> Loc:
    """Return the path of a mistake, without the names that pydantic adds for the members of a union."""
    loc: list[str | int] = []
    for part in (part for part in detail["loc"] if part != "[key]"):
        if (isinstance(data, list) and isinstance(part, int) and part < len(data)) or (
            isinstance(data, dict) and part in data
        ):
            data = data[part]
        elif not (detail["type"] == "missing" and part == detail["loc"][-1]):
            continue
        loc.append(part)
    return tuple(loc)


def _explain(detail: Any, model: type[BaseModel], loc: Loc) -> str:
    from imagebuild.core.console import redacted_text  # noqa: PLC0415 - only for mistakes

    kind, got = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        words = foreign("keys") if model.__name__ == "Matrix" else {}
        instead = words.get(re.sub("[-_]", "", str(loc[-1])), "")
        places = places_of_keys(model)
        if not instead and (found := [place for place, keys in places.items() if loc[-1] in keys]):
            place = f"below `{found[0]}`" if found[0] else "at the top level of the file"
            return f"unknown key here; it belongs {place}"
        # A list of one entry may be written as this entry.
        above = (loc[:-1], (*loc[:-1], 0))
        here = {key for place, keys in places.items() if any(_fits(each, place) for each in above) for key in keys}
        return f"unknown key; {instead or suggestion(str(loc[-1]), here)[2:] or 'remove it, or correct its name'}"
    if kind == "missing":
        return f"is missing; add `{loc[-1]}: …`"
    # A whole file that is one text is not shown, because a link may lead to a file with passwords.
    is_scalar = isinstance(got, str | int | float) and bool(loc)
    shown = redacted_text(repr(got))[:200] if is_scalar else KINDS.get(type(got), "nothing")
    shown += "".join(text for key, text in foreign("values-of").items() if re.match(key, f"{dotted_key(loc)}={got}"))
    if kind == "value_error":
        problem = detail["msg"].removeprefix("Value error, ")
        ending = f", not {shown}" if problem.startswith("must be ") else f" (got {shown})"
        return f"{problem}{ending}" if is_scalar else problem
    message = detail["msg"]
    problem = message.partition(", ")[0] if " valid " in message else message
    for theirs, ours in foreign("pydantic").items():
        problem = re.sub(theirs, ours, problem)
    if kind in ("dict_type", "model_type") and loc and isinstance(loc[-1], str):
        keys = [key for place, known in places_of_keys(model).items() if _fits(loc, place) for key in sorted(known)]
        shown += f"; write `{loc[-1]}: {{{(keys or [ANY])[0]}: …}}`"
    choices = str(detail.get("ctx", {}).get("expected", "")).split("'")[1::2]
    if is_scalar and (near := nearest(str(got), choices)):
        return f"{problem}, not {shown}; did you mean {near!r}?"
    return problem if kind == "too_short" else f"{problem}, not {shown}"


ANY = "NAME"
"""Stands for any key or number of an entry in the paths of `places_of_keys`."""


def _fits(loc: Loc, place: str) -> bool:
    words = place.split(".") if place else []
    return len(words) == len(loc) and all(word in (ANY, str(part)) for word, part in zip(words, loc, strict=True))


@cache
def places_of_keys(model: type[BaseModel]) -> dict[str, frozenset[str]]:
    """Map the path of each mapping with fixed keys in a file, such as `images.NAME`, to these keys. The path of the
    file itself is empty, and comes first."""
    schema = model.model_json_schema()
    places: dict[str, set[str]] = defaultdict(set)
    todo: deque[tuple[tuple[str, ...], Any]] = deque([((), schema)])
    while todo:
        path, part = todo.popleft()
        if "$ref" in part and len(path) < MOST_NESTED:
            todo.append((path, schema["$defs"][part["$ref"].rpartition("/")[2]]))
        todo.extend((path, each) for each in (*part.get("anyOf", ()), *part.get("allOf", ())))
        for key, value in part.get("properties", {}).items():
            places[".".join(path)].add(key)
            todo.append(((*path, key), value))
        entries = [part.get("additionalProperties"), part.get("items"), *part.get("patternProperties", {}).values()]
        todo.extend(((*path, ANY), entry) for entry in entries if isinstance(entry, dict))
    return {path: frozenset(keys) for path, keys in places.items()}
