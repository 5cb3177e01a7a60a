"""Errors that people meet: raised deep, shown once by `cli.main`, without a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any


class ImagebuildError(Exception):
    """A problem the user can act on; `str(error)` says what is wrong and what to do."""

    exit_code = 1


class ConfigError(ImagebuildError):
    """The input is wrong: matrix, component, lock, option or argument."""

    exit_code = 2


class NothingSelected(ImagebuildError):
    """The selectors match no target."""

    exit_code = 3


class CommandError(ImagebuildError):
    """A program we called failed, or is missing."""

    exit_code = 4


class Unreachable(CommandError):
    """Nobody answered, or not as a server does that has it: another machine or another time may have more luck."""


class Absent(Unreachable):
    """The server answered that it does not have what was asked for."""


class ResultError(ImagebuildError):
    """A program answered, but its answer could not be read."""

    exit_code = 5


@dataclass
class Mistakes:
    """Collect what is wrong, so that people see all of it at once."""

    texts: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        """Note a mistake; `where` is a file and line, or an option."""
        self.texts.append(f"{where}: {what}")

    def stop_if_any(self) -> None:
        """Raise ConfigError if anything was added."""
        if self.texts:
            raise ConfigError("\n".join(dict.fromkeys(self.texts)))


def suggestion(name: str, known: Mapping[str, Any] | list[str] | set[str]) -> str:
    """`; did you mean 'x'?`, or the names there are when none is near."""
    if near := get_close_matches(name, list(known), n=1):
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""
