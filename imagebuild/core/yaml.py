"""Read YAML and JSON into models. Every mistake in a file of the project is reported with its line, all at once."""

from __future__ import annotations

import json
import marshal
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from imagebuild.core.errors import MANY, ConfigError, Mistakes, ResultError, nearest, suggestion
from imagebuild.core.fields import PATTERN_WORDS, Loc, M, YamlFile, line_of
from imagebuild.core.files import cache_folder, read_text, trimmed, write_bytes

KINDS: Mapping[type, str] = {dict: "a mapping", list: "a list"}
"""Types of values in files, as messages call them."""


def load_yaml(path: Path, model: type[M], mistakes: Mistakes) -> YamlFile[M] | None:
    """Read a YAML or JSON file. Return None if anything is wrong, and add it to `mistakes`."""
    found = Mistakes()
    reader = _Reader(path, found)
    try:
        text = read_text(path)
        data = reader.data(text)
        if not found.texts:
            return YamlFile(path, model.model_validate(data), reader.lines)
    except ConfigError as error:
        found.texts.append(str(error))
    except SyntaxError as error:
        found.add(f"{path}:{error.lineno}", f"not YAML: {error.msg}")
    except json.JSONDecodeError as error:
        found.add(f"{path}:{error.lineno}", f"not JSON: {error.msg} in column {error.colno}; restore the file from git")
    except ValidationError as error:
        if not reader.lines:  # JSON was read without them
            reader.nodes(text)
        for loc, problem in _problems(error, data, model):
            found.add(f"{path}:{line_of(reader.lines, loc)}", f"{dotted_key(loc)}: {problem}")
    mistakes.texts += found.texts
    return None


def read_yaml(path: Path, model: type[M]) -> YamlFile[M]:
    """Read a YAML or JSON file that is needed by itself. Raises ConfigError with every mistake in it."""
    mistakes = Mistakes()
    document = load_yaml(path, model, mistakes)
    mistakes.stop_if_any()
    assert document
    return document


def read_written(model: type[M], content: str | bytes | Mapping[str, Any], name: str) -> M:
    """Read what imagebuild wrote, as JSON or already parsed. Raises ResultError, which begins with the name."""
    try:
        return model.model_validate(content) if isinstance(content, Mapping) else model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{name}: {dotted_key(first['loc'])}: {first['msg']}"
        raise ResultError(f"{problem}; was it written by another version of imagebuild?") from None


def dotted_key(loc: Loc) -> str:
    """Return `checks.0.name`, or `the file` for its top."""
    return ".".join(map(str, loc)) or "the file"


MOST_VALUES = 200_000
"""More than any file of a project has; aliases can stand for more."""
MOST_LEVELS = 100
FEW = 3
"""Choices that need no suggestion beside them."""


@cache
def _code() -> bytes:
    """Return a digest of this module and of Python's version: others may read a text differently."""
    return sha256(Path(__file__).read_bytes() + sys.version.encode()).digest()


class _Reader:
    """Turn a text into values, and note the line of each. Scalars stay text, so that 3.10 does not become 3.1."""

    def __init__(self, path: Path, mistakes: Mistakes) -> None:
        self.path = path
        self.mistakes = mistakes
        self.lines: dict[Loc, int] = {}
        self.count = 0
        self.has_twins = False

    def data(self, text: str) -> Any:
        """Return the values of a text: JSON or YAML. YAML without mistakes is parsed once, then cached.

        Raises JSONDecodeError or SyntaxError for what is neither.
        """
        # JSON is YAML, but its own reader is a hundred times faster, and a lock is long.
        if text.startswith("{"):
            try:
                data = json.loads(text, object_pairs_hook=self.pairs)
                return self.nodes(text) if self.has_twins else data
            except RecursionError:
                return self.refuse_depth()
        key = sha256(_code() + text.encode()).hexdigest()
        with suppress(OSError, ConfigError, ValueError, EOFError, TypeError):
            data, self.lines = marshal.loads((cache_folder("yaml") / key).read_bytes())  # noqa: S302 - as our modules
            return data
        data = self.nodes(text)
        if not self.mistakes.texts:
            with suppress(ConfigError):  # without a folder to write to, texts are parsed each time
                write_bytes(trimmed(cache_folder("yaml")) / key, marshal.dumps((data, self.lines)))
        return data

    def refuse_depth(self) -> None:
        """Add the mistake that values are nested deeper than recursive parsers can bear."""
        self.mistakes.add(f"{self.path}:1", f"has more than {MOST_LEVELS} levels; restore the file from git")

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object of JSON; note that it has a key twice, whose line the reader of YAML knows."""
        result = dict(pairs)
        self.has_twins |= len(result) < len(pairs)
        return result

    def nodes(self, text: str) -> Any:
        """Return the values of a YAML text. Raises SyntaxError for what is not YAML."""
        import yaml  # noqa: PLC0415 - not needed for a file in the cache

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        problem, line, level = "", 1, 0
        try:
            # libyaml crashes on what is too deep, but not when it only yields events.
            for event in yaml.parse(text, Loader=loader):
                level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if level > MOST_LEVELS:
                    return self.refuse_depth()
            return self.value(yaml.compose(text, Loader=loader), (), ())
        except yaml.MarkedYAMLError as error:
            problem = f"{error.problem or error.context}; correct the line, or quote the text"
            # A quote without an end is wrong where it begins.
            mark = (error.context_mark if "end of stream" in problem else None) or error.problem_mark
            line = mark.line + 1 if mark else 1
            if "start any token" in problem and "\t" in text.splitlines()[line - 1]:
                problem = "a tab, where only spaces may be; replace it by spaces"
        except yaml.reader.ReaderError as error:
            problem = f"the character {error.character!r} may not be in a file; remove it"
            line = text.count("\n", 0, error.position) + 1
        raise SyntaxError(problem, (str(self.path), line, None, None))

    def value(self, node: Any, loc: Loc, outer: tuple[Any, ...]) -> Any:
        """Return the value of a node, which is inside the `outer` ones."""
        if node is None:
            return {}
        line = node.start_mark.line + 1
        self.count += 1
        if node in outer or self.count > MOST_VALUES:
            problem = "an alias of itself" if node in outer else f"aliases make more than {MOST_VALUES} values of this"
            if not self.mistakes.texts:
                self.mistakes.add(f"{self.path}:{line}", f"{dotted_key(loc)}: {problem}; write the value instead")
            return None
        self.lines.setdefault(loc, line)
        if node.id == "sequence":
            return [self.value(child, (*loc, i), (*outer, node)) for i, child in enumerate(node.value)]
        if node.id != "mapping":
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, child in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                value = self.value(child, loc, (*outer, node))
                for mapping in value if isinstance(value, list) else [value]:
                    merged = {**mapping, **merged} if isinstance(mapping, dict) else merged
                continue
            key = str(key_node.value)
            inner = (*loc, key)
            self.lines[inner] = key_node.start_mark.line + 1
            if key in result:
                self.mistakes.add(
                    f"{self.path}:{self.lines[inner]}", f"{dotted_key(inner)}: the key is there twice; remove one"
                )
            result[key] = self.value(child, inner, (*outer, node))
        return merged | result


def _problems(error: ValidationError, data: Any, model: type[BaseModel]) -> Iterator[tuple[Loc, str]]:
    """Yield the place and text of each mistake: one for a place, and none for a wrong type that has others inside."""
    details: dict[Loc, list[Any]] = {}
    for detail in error.errors():
        details.setdefault(_place(detail, data), []).append(detail)
    for loc, found in details.items():
        if any(len(other) > len(loc) and other[: len(loc)] == loc for other in details) and all(
            detail["type"] == "too_short" or detail["type"].endswith("_type") for detail in found
        ):
            continue
        # Where a value may have several types, prefer a mistake that says more than "wrong type".
        best = min(found, key=lambda detail: detail["type"].endswith("_type") or detail["type"] == "literal_error")
        yield loc, _explain(best, model, loc)


def _place(detail: Any, data: Any) -> Loc:
    """Return the place of a mistake, without the names that pydantic adds for the members of a union."""
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


MAPPINGS = ("dict_type", "model_type", "model_attributes_type")
MUST_BE = {
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    **dict.fromkeys(MAPPINGS, "must be a mapping of keys and values"),
    "string_type": "must be a text",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "date_from_datetime_parsing": "must be a date as YYYY-MM-DD",
    "date_parsing": "must be a date as YYYY-MM-DD",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must not be empty",
    "literal_error": "must be {expected}",
}
"""Pydantic's type of an error → what the value must be, in our words."""


def _explain(detail: Any, model: type[BaseModel], loc: Loc) -> str:
    kind, got = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        return f"unknown key{suggestion(str(loc[-1]), _fields(model, loc[:-1]))}"
    if kind == "missing":
        return f"is missing; add `{loc[-1]}: …`"
    shown = repr(got) if isinstance(got, str | int | float) else KINDS.get(type(got), "nothing")
    context = detail.get("ctx", {})
    if kind == "string_pattern_mismatch":
        words = PATTERN_WORDS.get(context["pattern"])
        problem = f"must be {words}" if words else f"must match the pattern {context['pattern']}"
    elif kind in MUST_BE:
        problem = MUST_BE[kind].format(**context)
    else:
        problem = detail["msg"].removeprefix("Value error, ").replace("tuple", "list")
        return f"{problem} (got {shown})" if isinstance(got, str | int | float) else problem
    if kind == "too_short":
        return problem
    choices = str(context.get("expected", "")).split("'")[1::2]
    if len(choices) > FEW and (near := nearest(str(got), choices)):
        problem = "must be another word" if len(choices) > MANY else problem
        return f"{problem}, not {shown}; did you mean {near!r}?"
    form = _right_form(kind, got, [*_inside_all(model, loc)])
    return f"{problem}, not {shown}" + (f"; write {form}" if form else "")


def _right_form(kind: str, got: Any, annotations: list[Any]) -> str:
    """Return `got`, a text or list of texts, in the form that these types have; empty if there is none."""
    texts = got if isinstance(got, list) else re.split("[, ]+", got) if isinstance(got, str) else []
    if not all(isinstance(text, str) for text in texts):
        return ""
    if kind in ("list_type", "tuple_type") and texts:
        return f"[{', '.join(texts)}]"
    if kind in MAPPINGS and texts and all("=" in text for text in texts):
        return f"{{{', '.join(text.replace('=', ': ', 1) for text in texts)}}}"
    for found in (found for annotation in annotations for found in _models(annotation)):
        name, first = next(iter(found.model_fields.items()))
        if kind in MAPPINGS and texts and get_origin(first.annotation) is tuple:
            return f"{{{name}: [{', '.join(texts)}]}}"
    return ""


def _fields(model: Any, loc: Loc) -> list[str]:
    """Return the names that the model allows at `loc`."""
    kinds = _inside_all(model, loc)
    return [info.alias or name for kind in kinds for m in _models(kind) for name, info in m.model_fields.items()]


def _inside_all(model: Any, loc: Loc) -> list[Any]:
    """Return the annotations of the value at `loc` of the model."""
    annotations = [model]
    for part in loc:
        annotations = [inner for annotation in annotations for inner in _inside(annotation, part)]
    return annotations


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for argument in get_args(annotation):
            yield from _models(argument)


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """Yield the annotations of what is at key or index `part` of a value with this annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _inside(get_args(annotation)[0], part)
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _inside(argument, part)
    elif origin is dict:
        yield get_args(annotation)[1]
    elif origin is tuple:
        yield get_args(annotation)[0]
    else:
        for model in _models(annotation):
            yield from (i.annotation for n, i in model.model_fields.items() if part in (n, i.alias))
