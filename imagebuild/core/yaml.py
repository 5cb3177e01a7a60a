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

from imagebuild.core.errors import ConfigError, Mistakes, ResultError, suggestion
from imagebuild.core.fields import Loc, M, YamlFile, line_of
from imagebuild.core.files import cache_folder, write_bytes

KINDS: Mapping[type, str] = {dict: "a mapping", list: "a list"}
"""Types of values in files, as messages call them."""


def load_yaml(path: Path, model: type[M], mistakes: Mistakes) -> YamlFile[M] | None:
    """Read a YAML or JSON file. Return None if anything is wrong, and add it to `mistakes`."""
    lines: dict[Loc, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        # JSON is YAML, but its own reader is a hundred times faster, and a lock is long and generated.
        data, lines = (json.loads(text), {}) if text.startswith("{") else _parsed(text, path, mistakes)
        return YamlFile(path, model.model_validate(data), lines)
    except OSError as error:
        mistakes.add(str(path), f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        mistakes.add(str(path), f"cannot be read: not UTF-8 text, at byte {error.start}")
    except SyntaxError as error:
        mistakes.add(f"{path}:{error.lineno}", f"not YAML: {error.msg}")
    except ValidationError as error:
        for detail in error.errors():
            loc = tuple(part for part in detail["loc"] if part != "[key]")
            mistakes.add(f"{path}:{line_of(lines, loc)}", f"{dotted_key(loc)}: {_explain(detail, model, loc)}")
    except ValueError as error:
        mistakes.add(str(path), f"not JSON: {error}")
    return None


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


@cache
def _reader() -> bytes:
    """Return what tells apart this module and Python from others, which may read a text in another way."""
    return sha256(Path(__file__).read_bytes() + sys.version.encode()).digest()


def _parsed(text: str, path: Path, mistakes: Mistakes) -> tuple[Any, dict[Loc, int]]:
    """Return what a YAML text says, and the line of each value. A text without mistakes is parsed once, then cached.

    Raises SyntaxError for what is not YAML.
    """
    key = sha256(_reader() + text.encode()).hexdigest()
    with suppress(OSError, ConfigError, ValueError, EOFError, TypeError):
        data, lines = marshal.loads((cache_folder("yaml") / key).read_bytes())  # noqa: S302 - as trusted as our modules
        return data, lines
    import yaml  # noqa: PLC0415 - what the cache has needs it not

    lines, before = {}, len(mistakes.texts)
    try:
        node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SyntaxError(error.problem or error.context or "", (str(path), line, None, None)) from None
    data = _value(node, (), lines, path, mistakes)
    if len(mistakes.texts) == before:
        with suppress(ConfigError):  # without a folder to write to, texts are parsed each time
            write_bytes(cache_folder("yaml") / key, marshal.dumps((data, lines)))
    return data, lines


def _value(node: Any, loc: Loc, lines: dict[Loc, int], path: Path, mistakes: Mistakes) -> Any:
    """Return the value of a YAML node, and note the lines. Scalars stay text, so that 3.10 does not become 3.1."""
    if node is None:
        return {}
    lines.setdefault(loc, node.start_mark.line + 1)
    if node.id == "mapping":
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            key = str(key_node.value)
            inner = (*loc, key)
            lines[inner] = key_node.start_mark.line + 1
            if key in result:
                mistakes.add(f"{path}:{lines[inner]}", f"{dotted_key(inner)}: the key is there twice; remove one")
            result[key] = _value(child, inner, lines, path, mistakes)
        return result
    if node.id == "sequence":
        return [_value(child, (*loc, i), lines, path, mistakes) for i, child in enumerate(node.value)]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _explain(detail: Any, model: type[BaseModel], loc: Loc) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key{suggestion(str(loc[-1]), _fields(model, loc[:-1]))}"
    if detail["type"] == "missing":
        return "is missing"
    got = detail.get("input")
    shown = repr(got) if isinstance(got, str | int | float) else KINDS.get(type(got), "nothing")
    problem = re.sub("valid dictionary( or instance of .*)?", "mapping", detail["msg"].removeprefix("Value error, "))
    return f"{problem.replace('tuple', 'list')} (got {shown})"


def _fields(model: Any, loc: Loc) -> list[str]:
    """Return the names that the model allows at `loc`."""
    annotations = [model]
    for part in loc:
        annotations = [inner for annotation in annotations for inner in _inside(annotation, part)]
    return [info.alias or name for kind in annotations for m in _models(kind) for name, info in m.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for argument in get_args(annotation):
            yield from _models(argument)


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """Yield the annotations of the value at key or index `part` of a value that is annotated so."""
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
