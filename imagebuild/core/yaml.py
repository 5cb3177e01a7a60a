"""Read YAML files into models. Every mistake is reported with its line, all of them at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from imagebuild.core.errors import Mistakes, suggestion

M = TypeVar("M", bound=BaseModel)
Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class YamlFile(Generic[M]):
    """A YAML file, read: its model, and where in the file each value stands."""

    path: Path
    model: M
    lines: Mapping[Loc, int]

    def at(self, *loc: str | int) -> str:
        """`file:line` of the deepest part of `loc` that the file has."""
        return f"{self.path}:{line_of(self.lines, loc)}"


def line_of(lines: Mapping[Loc, int], loc: Loc) -> int:
    while loc and loc not in lines:
        loc = loc[:-1]
    return lines.get(loc, 1)


def load_yaml(path: Path, model: type[M], mistakes: Mistakes) -> YamlFile[M] | None:
    """Read a YAML file. What is wrong is added to `mistakes`, and then there is no document."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        mistakes.add(str(path), f"cannot be read: {error}")
        return None
    lines: dict[Loc, int] = {}
    try:
        # JSON is YAML, but its own reader is a hundred times faster, and a lock is long and generated.
        data = json.loads(text) if text.startswith("{") else _value(_compose(text), (), lines, path, mistakes)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        mistakes.add(f"{path}:{line}", f"not YAML: {error.problem}")
        return None
    except ValueError as error:
        mistakes.add(str(path), f"not JSON: {error}")
        return None
    try:
        return YamlFile(path, model.model_validate(data), lines)
    except ValidationError as error:
        for detail in error.errors():
            loc = tuple(part for part in detail["loc"] if part != "[key]")
            mistakes.add(f"{path}:{line_of(lines, loc)}", f"{dotted_key(loc)}: {_explain(detail, model, loc)}")
        return None


def dotted_key(loc: Loc) -> str:
    return ".".join(map(str, loc)) or "the file"


def _compose(text: str) -> yaml.Node | None:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.compose(text, Loader=loader)


def _value(node: yaml.Node | None, loc: Loc, lines: dict[Loc, int], path: Path, mistakes: Mistakes) -> Any:
    """Python value of a node. Scalars stay text, so that the version 3.10 does not become 3.1."""
    if node is None:
        return {}
    lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, child in node.value:
            key = str(key_node.value)
            here = (*loc, key)
            lines[here] = key_node.start_mark.line + 1
            if key in result:
                mistakes.add(f"{path}:{lines[here]}", f"{dotted_key(here)}: the key is there twice")
            result[key] = _value(child, here, lines, path, mistakes)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, (*loc, i), lines, path, mistakes) for i, child in enumerate(node.value)]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _explain(detail: Any, model: type[BaseModel], loc: Loc) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key{suggestion(str(loc[-1]), _fields(model, loc[:-1]))}"
    if detail["type"] == "missing":
        return "is missing"
    got = detail.get("input")
    shown = f" (got {got!r})" if isinstance(got, str | int | float) else f" (got a {type(got).__name__})"
    return f"{detail['msg'].removeprefix('Value error, ')}{shown}"


def _fields(model: Any, loc: Loc) -> list[str]:
    """Names that the model allows at `loc`."""
    here = [model]
    for part in loc:
        here = [inner for annotation in here for inner in _inside(annotation, part)]
    return [info.alias or name for kind in here for m in _models(kind) for name, info in m.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for argument in get_args(annotation):
            yield from _models(argument)


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """Annotations of the value at key or index `part` of a value annotated so."""
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
