"""Define the errors that people meet: raised deep, shown once by `cli.app.main`, without a traceback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class ImagebuildError(Exception):
    """Describe a problem that the user can act on; `str(error)` says what is wrong and what to do."""

    exit_code = 1


class ConfigError(ImagebuildError):
    """Refuse a wrong input: matrix, component, lock, option or argument."""

    exit_code = 2


class NothingSelected(ImagebuildError):
    """Report that selectors match no target."""

    exit_code = 3


class CommandError(ImagebuildError):
    """Report that a program or server that we called failed, or is missing."""

    exit_code = 4


class Unreachable(CommandError):
    """Report that a server cannot be reached, or answered with something else than the file: a mirror may have it."""


class Absent(Unreachable):
    """Report that a server answered that it does not have the file."""


class ResultError(ImagebuildError):
    """Report a result or an answer that cannot be read."""

    exit_code = 5


@dataclass
class Mistakes:
    """Collect what is wrong, so that people see all of it at once."""

    texts: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        """Add what is wrong at a place: `file:line`, or an option."""
        self.texts.append(f"{where}: {what}")

    def add_once(self, where: str, what: str) -> None:
        """Add what is wrong at a place unless something is known to be wrong there already."""
        if not any(text.startswith(f"{where}: ") for text in self.texts):
            self.add(where, what)

    def stop_if_any(self) -> None:
        if self.texts:
            raise ConfigError("\n".join(dict.fromkeys(self.texts)))


MANY = 20
"""Most names that a message lists."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a name, None if none is similar."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for mistakes

    near = get_close_matches(name, list(known), n=1) or [other for other in known if other.startswith(f"{name}.")]
    return next(iter(near), None)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def suggestion(name: str, known: Mapping[str, Any] | list[str] | set[str]) -> str:
    """Return `; did you mean 'x'?`, or the known names if none is similar."""
    if near := nearest(name, known):
        return f"; did you mean {near!r}?"
    names = sorted(known)
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return f"; known: {', '.join(names[:MANY])}{more}" if known else ""
