"""Terminal output: tables, progress, durations and sizes, and text without secrets and control characters.

Everything that imagebuild prints passes through `Output`, because names and messages may come from untrusted files."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from imagebuild.core.patterns import data_of

if TYPE_CHECKING:
    from rich.live import Live

TERMINAL_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences that colour text, move the cursor or set the title of a terminal."""
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufffe\uffff"
    "\U000e0000-\U000e007f]"
)
"""Control characters, characters that change the direction of text or hide text, and characters that XML forbids."""
WORKFLOW_COMMAND = re.compile(r"^([^\S\n]*:)(?=:)|(#)(?=#\[)", re.MULTILINE)
"""Matches the first character of a command to a GitHub job, such as `::error::` at the beginning of a line."""
Part = str | Text | tuple[str, str]
"""A part of a line: a text, or a text and its style, such as `("failed", "red")`."""
SHOWN_ITEMS = 8
"""Maximum number of running items, such as builds, that `Progress` shows in a terminal."""
LONGEST_LINE = 1 << 16
"""Width in characters of a table in a file or a pipe: so large that no line is wrapped."""
DISPENSABLE = (
    "source", "of ceiling", "attachment", "contains", "time", "formula", "digest", "steps", "algorithm", "platforms",
    "measured GB/s", "rule", "pushed", "characters", "found by", "origin",
)  # fmt: skip
"""Titles of the columns that a narrow terminal does without, the first one first. Then the last columns are left out,
because each table begins with the columns for which users call the command."""
LONGEST_WORD = 24
"""Length in characters up to which a table keeps a word on one line. Longer words, such as digests, may be broken."""
UNSIGNED = (("no signature was checked", "yellow"), ": anyone who can push can have written this; see --key")
"""The message of a command that reads attachments without a trusted signer."""
MARKS = {"passed": ("✓ passed", "green"), "failed": ("✗ failed", "red"), "skipped": ("- skipped", "yellow")}
FIRST_S, NEXT_S, IDLE_S, POLL_S = 2.0, 10.0, 1.0, 0.2
"""Timing of `Heartbeat`, in seconds: the delay of the first message, the interval between messages, the time without
any task after which the delay of the first message applies again, and the interval between two checks of the running
tasks."""
BLANK = "(redacted)"


def visible(text: str) -> str:
    """Return the text without terminal sequences, with Unix line ends, and with a � for each invisible character."""
    text = TERMINAL_SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return INVISIBLE.sub("\ufffd", text)


def escaped_json(text: str) -> str:
    """Return a JSON text with the same value, in which invisible characters are written as escapes."""
    return INVISIBLE.sub(lambda match: json.dumps(match[0])[1:-1], text)


def printable(text: str) -> str:
    """Return an untrusted text for a terminal or the log of a GitHub job: visible, and without secrets or commands."""
    return WORKFLOW_COMMAND.sub(r"\1\2 ", redacted_text(visible(text)))


class Output(Console):
    """A console that prints every `str` unchanged except for `printable`. Only `styled` texts have colours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, as other output does. rich would exit with status 1: a check failed."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False})


out = Output(soft_wrap=True)
err = Output(stderr=True, soft_wrap=True)


def styled(*parts: Part) -> Text:
    """Return a text of several parts."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(pair[0]), pair[1]) if isinstance(pair, tuple) else pair for pair in pairs))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Part]], *, whole: Collection[str] = ()) -> None:
    """Print a table.

    In a terminal, the first column and the columns in `whole` are not wrapped, because people copy their values. Other
    cells wrap between words. If the terminal is too narrow, columns are left out in the order of DISPENSABLE, then the
    last columns; a column in `whole` is wrapped before it is left out. If even that is too wide, each cell has its own
    line. In a file or a pipe, no line is wrapped."""
    cells = [tuple(map(styled, row)) for row in rows]
    titles = list(columns)
    texts = [[*titles], *([cell.plain for cell in row] for row in cells)]
    widest = [max(cell_len(row[i]) for row in texts) for i in range(len(titles))]
    words = [max((cell_len(word) for row in texts for word in row[i].split()), default=0) for i in range(len(titles))]
    least = {0: widest[0]}
    first_out = {title: place for place, title in enumerate(DISPENSABLE)}
    for i in sorted(range(1, len(titles)), key=lambda i: first_out.get(titles[i], len(first_out)), reverse=True):
        folded = min(words[i], LONGEST_WORD)
        for width in (widest[i] if titles[i] in whole else folded, folded):
            if i not in least and (not out.is_terminal or sum(least.values()) + len(least) + width < out.width):
                least[i] = width
        if i not in least and titles[i] in first_out:
            break  # do not show a column that matters even less
    shown = sorted(least)
    if {*whole} & {title for i, title in enumerate(titles) if i not in least}:
        for row in cells:
            out.print(row[0], soft_wrap=True)
            for title, cell in zip(titles[1:], row[1:], strict=True):
                out.print(styled((f"  {title}  ", "bold"), cell), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i in shown:
        table.add_column(titles[i], overflow="fold", min_width=min(least[i], out.width))
    for row in cells:
        table.add_row(*(row[i] for i in shown))
    if out.is_terminal:
        out.print(table)
        if left_out := [title for i, title in enumerate(titles) if i not in shown]:
            note = f"columns left out because the terminal is too narrow: {', '.join(left_out)}"
            out.print(styled((note, "dim")), soft_wrap=True)
    else:
        wide = Output(width=LONGEST_LINE)
        with wide.capture() as captured:
            wide.print(table)
        out.print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@dataclass(eq=False)
class Activity:
    """A task that may take a long time: its name and state for progress messages."""

    text: str
    detail: str = ""
    """How much of the task is done, or why the task is tried again."""
    began: float = field(default_factory=time.monotonic)
    quiet_s: float = 0.0
    """Seconds without a message."""


class Heartbeat(threading.Thread):
    """A thread that prints to standard error what a slow command is doing, so that it does not seem to hang."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.running: list[Activity] = []
        """The running tasks, oldest first. Several threads add and remove them."""
        self.next_at = 0.0
        self._lock = threading.Lock()

    def begin(self, activity: Activity) -> None:
        with self._lock:
            self.running.append(activity)
            if self.ident is None:
                self.next_at = activity.began + FIRST_S
                self.start()

    def end(self, activity: Activity) -> None:
        with suppress(ValueError):
            self.running.remove(activity)

    def run(self) -> None:
        busy_at = 0.0
        tick = threading.Event()
        while not tick.wait(POLL_S):
            now = time.monotonic()
            if not self.running and now - busy_at > IDLE_S:
                self.next_at = now + FIRST_S
            for oldest in [task for task in self.running if now - task.began >= task.quiet_s][:1]:
                busy_at = now
                if now >= self.next_at:
                    detail = f"; {oldest.detail}" if oldest.detail else ""
                    err.print(f"{oldest.text} for {format_duration(now - oldest.began)}{detail}")
                    self.next_at = now + NEXT_S


heartbeat = Heartbeat()


@contextmanager
def doing(text: str, quiet_s: float = 0.0) -> Iterator[Activity]:
    """Yield a new task.

    `heartbeat` prints messages about the task until the context ends, but not in the first `quiet_s` seconds. The
    caller may change the `detail` of the task."""
    activity = Activity(text, quiet_s=quiet_s)
    heartbeat.begin(activity)
    try:
        yield activity
    finally:
        heartbeat.end(activity)


class Progress:
    """Progress display of items that several threads process: one line for each finished item, then the running items.

    A terminal redraws the running items. In a log, or with `live=False`, `heartbeat` prints messages about the running
    items instead."""

    def __init__(self, *, live: bool = True) -> None:
        self.headline = ""
        """Text above the running items. Only a terminal shows it."""
        self.running: dict[str, Activity] = {}
        self.live: Live | None = None
        """The display that redraws the terminal. None for a log."""
        self._began = time.monotonic()
        if live and err.is_terminal:
            from rich.live import Live  # noqa: PLC0415 - few commands show progress, and fewer on a terminal

            self.live = Live(get_renderable=self._draw, console=err, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        for activity in self.running.values():
            heartbeat.end(activity)
        if self.live:
            self.live.stop()

    def note(self, text: str) -> None:
        """Show a text above the running items. In a log, print it with the seconds since the start."""
        self.headline = text
        if not self.live:
            self._print(text)

    def begin(self, key: str, title: str) -> None:
        self.running[key] = Activity(title)
        if not self.live:
            heartbeat.begin(self.running[key])

    def advance(self, key: str, text: str) -> None:
        """Show the progress or the latest output of a running item."""
        # Programs overwrite a line after a carriage return.
        self.running[key].detail = text.strip().rpartition("\r")[2]

    def end(self, key: str, text: str, *, good: bool = True) -> None:
        """Remove a running item, and print a line about it unless `text` is empty."""
        activity = self.running.pop(key)
        heartbeat.end(activity)
        if text:
            self._print(f"{activity.text} {'→' if good else '✗'} {text}")

    def _print(self, text: str) -> None:
        heartbeat.next_at = time.monotonic() + NEXT_S
        err.print(f"{time.monotonic() - self._began:7.1f}  {text}")

    def _draw(self, hidden: Collection[str] = ()) -> Group:
        """Return the headline and the running items, except the items with the keys in `hidden`."""
        now = time.monotonic()
        lines = [_one_line(f"{now - self._began:7.1f}", self.headline, "bold")]
        for activity in [item for key, item in list(self.running.items()) if key not in hidden][-SHOWN_ITEMS:]:
            lines.append(_one_line(f"{now - activity.began:7.1f}", activity.text, "cyan"))
            if activity.detail:
                lines.append(_one_line("", activity.detail, "dim"))
        return Group(*lines)


def _one_line(seconds: str, text: str, style: str) -> Text:
    return Text(f"{seconds:7}  {printable(text)}", style, no_wrap=True, overflow="ellipsis")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a newline at its end.

    The cells may contain Markdown. Only characters that would end a cell are changed: a backslash is put before each
    `|` that has none, and newlines become spaces."""

    def cell(text: str) -> str:
        return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", " ".join(text.splitlines()))

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def format_duration(seconds: float) -> str:
    """Return a duration such as `7.2 s` or `3 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def format_size(number: int | None) -> str:
    """Return a number of bytes in decimal units: `273.4 MB`. Return `unknown` for None."""
    if number is None:
        return "unknown"
    return f"{number / 1e6:.1f} MB" if number < 1e9 else f"{number / 1e9:.2f} GB"


@cache
def _patterns() -> Mapping[str, Sequence[re.Pattern[str]]]:
    return {kind: [*map(re.compile, patterns)] for kind, patterns in data_of(__file__, "secrets").items()}


def _names_secret(name: str) -> bool:
    """Return whether the value of an option or environment variable with this name is a secret."""
    return bool(_patterns()["secret-name"][0].search(name))


@cache
def _secret_variables() -> tuple[str, ...]:
    named = {value.strip() for name, value in os.environ.items() if _names_secret(name) and "AUTHOR" not in name}
    return tuple(value for value in named if not _patterns()["harmless"][0].fullmatch(value))


def redacted_text(value: str) -> str:
    """Return a text with everything that looks like a secret or is in a secret variable replaced by `(redacted)`."""
    for pattern in _patterns()["value"]:
        value = pattern.sub(BLANK, value)
    for secret in _secret_variables():
        value = value.replace(secret, BLANK)
    for pattern in _patterns()["assigned"]:
        value = pattern.sub(rf"\1{BLANK}", value)
    return value


def kept_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may explain a measurement, sorted and without secrets."""
    kept = {name: value for name, value in variables.items() if _patterns()["kept-name"][0].match(name)}
    return {name: redacted_text(value) for name, value in sorted(kept.items()) if not _names_secret(name)}


def redacted_arguments(argv: Iterable[str]) -> tuple[str, ...]:
    """Return a command line without secrets, also without the values of options such as `--token`."""
    result: list[str] = []
    hide = False
    for word in argv:
        option, equals, _ = word.partition("=")
        secret = option.startswith("-") and _names_secret(option) and " " not in option
        if hide:
            result.append(BLANK)
        elif secret and equals:
            result.append(f"{option}={BLANK}")
        else:
            result.append(redacted_text(word))
        hide = secret and not equals and not hide
    return tuple(result)


def own_command() -> str:
    """Return the command line of this process, without secrets."""
    return shlex.join(["imagebuild", *redacted_arguments(sys.argv[1:])])
