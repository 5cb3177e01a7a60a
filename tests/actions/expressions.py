"""The expressions of GitHub Actions that our workflows use. Whatever is not known here is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<op>==|!=|&&|\|\||!|\(|\)|\[|\]|,|\.)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_-]*))"
)
WHOLE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
STATUS = re.compile(r"\b(success|failure|cancelled|always)\(")


class Unknown(Exception):
    """An expression says something that is not known here."""


@dataclass(frozen=True)
class Scope:
    """What an expression may name."""

    contexts: Mapping[str, Any]
    ok: bool = True
    """What `success()` says."""
    optional: frozenset[str] = field(default=frozenset({"vars", "secrets", "inputs"}))
    """Contexts whose values may be absent; of others, and of `github.event`, that is a slip of the pen."""


def truth(value: Any) -> bool:
    return value not in (None, False, 0, "")


def text(value: Any) -> str:
    """As GitHub puts a value into a string."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        raise Unknown(f"an object in a string: {value!r}")
    return str(value)


def evaluate(source: str, scope: Scope) -> Any:
    """The value of an expression, without `${{ }}`."""
    parser = _Parser(source, scope)
    value = parser.either()
    if parser.tokens:
        raise Unknown(f"{source!r}: at {parser.tokens[0][1]!r}")
    return value


def filled(template: Any, scope: Scope) -> Any:
    """A value of a workflow with its expressions filled in; one that is an expression alone keeps its type."""
    if isinstance(template, dict):
        return {key: filled(value, scope) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(value, scope) for value in template]
    if not isinstance(template, str):
        return template
    if alone := re.fullmatch(r"\s*\$\{\{((?:(?!\}\}).)*)\}\}\s*", template, re.DOTALL):
        return evaluate(alone[1], scope)
    return WHOLE.sub(lambda m: text(evaluate(m[1], scope)), template)


def condition(source: str | None, scope: Scope) -> bool:
    """An `if`: without a function that asks for the status, everything before must have succeeded."""
    if source is None:
        return scope.ok
    inner = WHOLE.sub(lambda m: m[1], str(source))
    return (scope.ok or bool(STATUS.search(inner))) and truth(evaluate(inner, scope))


class _Parser:
    """Recursive descent. Both sides of `&&` and `||` are read, so that a name that is wrong is always found."""

    def __init__(self, source: str, scope: Scope) -> None:
        self.source, self.scope = source, scope
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while source[at:].strip():
            found = TOKEN.match(source, at)
            if not found or found.lastgroup is None:
                raise Unknown(f"{source!r}: at {source[at:]!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()

    def take(self, *ops: str) -> str | None:
        if self.tokens and self.tokens[0][0] == "op" and self.tokens[0][1] in ops:
            return self.tokens.pop(0)[1]
        return None

    def need(self, op: str) -> None:
        if not self.take(op):
            raise Unknown(f"{self.source!r}: {op!r} is missing")

    def either(self) -> Any:
        value = self.both()
        while self.take("||"):
            other = self.both()
            value = value if truth(value) else other
        return value

    def both(self) -> Any:
        value = self.equal()
        while self.take("&&"):
            other = self.equal()
            value = other if truth(value) else value
        return value

    def equal(self) -> Any:
        value = self.negated()
        while op := self.take("==", "!="):
            value = _same(value, self.negated()) is (op == "==")
        return value

    def negated(self) -> Any:
        return not truth(self.negated()) if self.take("!") else self.value()

    def value(self) -> Any:
        if self.take("("):
            value = self.either()
            self.need(")")
            return value
        if not self.tokens:
            raise Unknown(f"{self.source!r}: ends too early")
        kind, word = self.tokens.pop(0)
        if kind == "text":
            return word[1:-1].replace("''", "'")
        if kind == "number":
            return float(word)
        if kind != "name":
            raise Unknown(f"{self.source!r}: at {word!r}")
        if word in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[word]
        return self.members(self.call(word) if self.take("(") else self.context(word), word)

    def call(self, name: str) -> Any:
        arguments = []
        while not self.take(")"):
            arguments.append(self.either())
            self.take(",")
        if name not in FUNCTIONS:
            raise Unknown(f"{self.source!r}: function {name}")
        return FUNCTIONS[name](self.scope, *arguments)

    def context(self, name: str) -> Any:
        if name not in self.scope.contexts:
            raise Unknown(f"{self.source!r}: context {name}")
        return self.scope.contexts[name]

    def members(self, value: Any, path: str) -> Any:
        while op := self.take(".", "["):
            if op == ".":
                key: Any = self.tokens.pop(0)[1]
            else:
                key = self.either()
                self.need("]")
            value = self.member(value, key, path)
            path = f"{path}.{key}"
        return value

    def member(self, value: Any, key: Any, path: str) -> Any:
        if isinstance(value, list):
            return value[int(key)] if int(key) < len(value) else None
        if isinstance(value, dict) and key in value:
            return value[key]
        if path.partition(".")[0] in self.scope.optional or path.startswith("github.event"):
            return None
        raise Unknown(f"{self.source!r}: no {key!r} in {path}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.lower() == other.lower()
    if type(one) is type(other):
        return bool(one == other)
    return _number(one) == _number(other)


def _number(value: Any) -> float:
    """As GitHub compares what is of two types."""
    if value is None or value == "":
        return 0
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "always": lambda scope: True,
    "cancelled": lambda scope: False,
    "failure": lambda scope: not scope.ok,
    "format": lambda scope, template, *values: re.sub(r"\{(\d+)\}", lambda m: text(values[int(m[1])]), template),
    "fromJSON": lambda scope, value: json.loads(value),
    "success": lambda scope: scope.ok,
}
