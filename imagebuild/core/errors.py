"""The errors that users see. `cli.app.main` catches them and prints their message without a traceback."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MANY = 20
"""Maximum number of names that a message lists."""


class ImagebuildError(Exception):
    """A problem that the user can solve. `str(error)` says what is wrong and what to do."""

    exit_code = 1


class ConfigError(ImagebuildError):
    """Wrong input: a file of the project, an option or an argument."""

    exit_code = 2


class NothingSelected(ImagebuildError):
    """No target of the matrix matches the selectors, such as `train-*`."""

    exit_code = 3


class CommandError(ImagebuildError):
    """A program or a server that imagebuild called failed, or the program is not installed."""

    exit_code = 4


class Unreachable(CommandError):
    """A server cannot be reached, or did not send the file. Another server may have the file."""


class Absent(Unreachable):
    """A server answered that it does not have the file."""


class ResultError(ImagebuildError):
    """A result file, or the answer of a program or a server, cannot be read."""

    exit_code = 5


@dataclass
class Mistakes:
    """A list of mistakes, so that users see all of them at once."""

    texts: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        """Add a mistake. `where` is `file:line` or an option, `what` the problem and its remedy."""
        self.texts.append(f"{where}: {what}")

    def add_once(self, where: str, what: str) -> None:
        """Add a mistake, unless the list already contains a mistake for the same `where`."""
        if not any(text.startswith(f"{where}: ") for text in self.texts):
            self.add(where, what)

    def stop_if_any(self) -> None:
        """Raise ConfigError with all mistakes. If no mistake was added, do nothing."""
        if self.texts:
            raise ConfigError("\n".join(dict.fromkeys(self.texts)))


OTHER_NAMES = {"x86_64": "amd64", "x86-64": "amd64", "x64": "amd64", "aarch64": "arm64", "arm64/v8": "arm64"}
"""Maps other names of CPU architectures to the names in platforms."""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that means the same as `name` or is most similar. None if no name is similar.
    `likeness` is the lowest similarity, from 0 to 1."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for mistakes

    names = list(known)
    name = next((name.replace(other, ours) for other, ours in OTHER_NAMES.items() if other in name), name)
    # Names of different platforms are similar.
    cutoff = max(likeness, 0.85) if name.startswith("linux/") else likeness
    near = [close for text in (name, name.lower()) for close in get_close_matches(text, names, n=1, cutoff=cutoff)]
    return next(iter(near or (other for other in names if other.startswith(f"{name}."))), None)


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: `1 target` or `2 targets`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def suggestion(name: str, known: Mapping[str, Any] | list[str] | set[str]) -> str:
    """Return the end of a message about an unknown name.
    If a known name is similar, `; did you mean 'x'?`. Otherwise, a list of the known names."""
    longer = sorted(other for other in known if other.startswith(f"{name}-"))
    best = nearest(name, known, 0.85 if longer else 0.6)
    if near := [best] if best else longer:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    names = sorted(known)
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return f"; known: {', '.join(names[:MANY])}{more}" if known else ""
