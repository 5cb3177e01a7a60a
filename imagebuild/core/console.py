"""Print tables, durations and sizes; blank what may be a secret."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.live import Live

out = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

SHOWN_ITEMS = 8
LONGEST_LINE = 1 << 16
LONGEST_WORD = 24
"""Characters of a word that a column of a table does not break if the terminal has room; digests are longer."""
MARKS = {"passed": "[green]✓ passed[/]", "failed": "[red]✗ failed[/]", "skipped": "[yellow]- skipped[/]"}


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, whole: Collection[str] = ()) -> None:
    """Print a table. Elsewhere than in a terminal, lines are as long as they need.

    In a terminal the first column and those in `whole`, which people copy, are never cut; other cells wrap between
    words. The last columns are left out where there is too little room for them.
    """
    cells = [tuple(row) for row in rows]
    titles = list(columns)
    texts = [[Text.from_markup(cell).plain for cell in row] for row in (titles, *cells)]
    least = [
        max(cell_len(row[i]) for row in texts)
        if i == 0 or title in whole
        else min(max((cell_len(word) for row in texts for word in row[i].split()), default=0), LONGEST_WORD)
        for i, title in enumerate(titles)
    ]
    while out.is_terminal and len(titles) > 1 and sum(least[: len(titles)]) + len(titles) > out.width:
        titles.pop()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, overflow="fold", min_width=min(least[i], out.width))
    for row in cells:
        table.add_row(*row[: len(titles)])
    if out.is_terminal:
        out.print(table)
        if left_out := texts[0][len(titles) :]:
            out.print(f"[dim]too narrow to show: {', '.join(left_out)}[/]", soft_wrap=True)
    else:
        wide = Console(width=LONGEST_LINE, highlight=False, emoji=False)
        with wide.capture() as captured:
            wide.print(table)
        out.print("\n".join(line.rstrip() for line in captured.get().splitlines()), markup=False)


QUIET_S = 30
"""Seconds without a line after which a log says what still runs."""


class Progress:
    """Show work that several threads do: on a terminal what is under way, elsewhere a line for each that has ended.

    The terminal keeps a line of each that has ended too; a log also says what still runs when nothing else was said for
    QUIET_S. `live=False` prints plain lines on a terminal as well.
    """

    def __init__(self, *, live: bool = True) -> None:
        self.headline = ""
        """Text above the running items, on a terminal only."""
        self._began = time.monotonic()
        self._running: dict[str, tuple[float, str, str]] = {}
        """Key of an item → when it began, its title, and how far it is."""
        self._lock = threading.Lock()
        self._last_line = self._began
        self._over = threading.Event()
        self._live: Live | None = None
        if live and err.is_terminal:
            from rich.live import Live  # noqa: PLC0415 - few commands show progress, and fewer on a terminal

            self._live = Live(get_renderable=self._draw, console=err, refresh_per_second=8, transient=True)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.__enter__()
        else:
            threading.Thread(target=self._show_life, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live:
            self._live.__exit__(kind, error, trace)

    def _show_life(self) -> None:
        while not self._over.wait(1):
            with self._lock:
                running = [(began, title) for began, title, _ in self._running.values()]
            now = time.monotonic()
            if running and now - self._last_line >= QUIET_S:
                titles = ", ".join(
                    f"{title} for {format_duration(now - began)}" for began, title in running[:SHOWN_ITEMS]
                )
                self.note(f"still running: {titles}")

    @property
    def live(self) -> bool:
        """Return whether this is redrawn on a terminal."""
        return self._live is not None

    def note(self, text: str) -> None:
        """Show what is being done: above the running items, or as a line with the seconds since the start."""
        self.headline = text
        if not self._live:
            self._last_line = time.monotonic()
            err.print(f"{time.monotonic() - self._began:7.1f}  {escape(text)}")

    def begin(self, key: str, title: str) -> None:
        """Show an item as running."""
        with self._lock:
            self._running[key] = (time.monotonic(), title, "")

    def advance(self, key: str, text: str) -> None:
        """Show how far a running item is, or its latest output."""
        with self._lock:
            began, title, _ = self._running[key]
            self._running[key] = (began, title, text)

    def end(self, key: str, text: str, *, good: bool = True) -> None:
        """Remove a running item and print a line about it; print nothing if `text` is empty."""
        with self._lock:
            began, title, _ = self._running.pop(key)
        if not text:
            return
        if self._live:
            mark = "[green]✓[/]" if good else "[red]✗[/]"
            err.print(f"{format_duration(time.monotonic() - began):>10}  {mark} {escape(title)} [dim]{escape(text)}[/]")
        else:
            self.note(f"{title} {'→' if good else '✗'} {text}")

    def _draw(self) -> Group:
        now = time.monotonic()
        lines: list[tuple[float | None, str, str]] = [(now - self._began, self.headline, "bold")]
        with self._lock:
            running = list(self._running.values())[-SHOWN_ITEMS:]
        for began, title, text in running:
            lines.append((now - began, title, "cyan"))
            if text:
                lines.append((None, text, "dim"))
        return Group(*(_one_line(*line) for line in lines))


def _one_line(seconds: float | None, text: str, style: str) -> Text:
    duration = "" if seconds is None else format_duration(seconds)
    return Text(f"{duration:>10}  {text}", style, no_wrap=True, overflow="ellipsis")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without a line end after its last line.

    Cells are Markdown themselves: of their text, only what would end a cell is changed. A `|` gets a backslash unless
    it has one, and line ends become spaces.
    """

    def cell(text: str) -> str:
        return re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", " ".join(text.splitlines()))

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def format_duration(seconds: float) -> str:
    """Return `7.2 s` or `3 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def format_size(number: int | None) -> str:
    """Return bytes in decimal units, as registries count: `273.4 MB`."""
    if number is None:
        return "unknown"
    return f"{number / 1e6:.1f} MB" if number < 1e9 else f"{number / 1e9:.2f} GB"


BLANK = "(redacted)"
SECRET_NAMES = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|SIGNATURE|(^|_)(PWD|PAT|JWT|PIN)$",
    re.IGNORECASE,
)
"""Names of variables and options whose values are blanked; `PWD` alone is a folder."""
HARMLESS_NAMES = frozenset({"PWD", "OLDPWD", "XDG_SESSION_TYPE", "SSH_AUTH_SOCK"})
SECRET_VALUES = (
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),  # user and password of an address
    re.compile(r"\b(?:gh[pousr]|github_pat|glpat|hf|nvapi|xox[abp]|npm|pypi)[-_][A-Za-z0-9_-]{16,}"),
    re.compile(r"\bsk-(?:[a-z]+-)?[A-Za-z0-9]{20,}"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),  # JSON web token
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
)
ASSIGNED = re.compile(r"""(?i)\b(\w*(?:password|passwd|secret|token|api_?key|sig)=)(?!\()[^&\s,;'"$]+""")
OPAQUE = re.compile(r"^(?=[^\s]*[0-9])(?=[^\s]*[A-Z])(?=[^\s]*[a-z])[A-Za-z0-9+=_]{32,}$")
"""A value that is nothing but a long mixture of letters and digits."""


def redacted_text(value: str) -> str:
    """Return a text in which everything that looks like a secret is blanked."""
    for pattern in SECRET_VALUES:
        value = pattern.sub(BLANK, value)
    return ASSIGNED.sub(rf"\1{BLANK}", value)


def redacted_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with each value blanked that may be a secret, judged by its name or its form."""
    result = {}
    for name, value in sorted(variables.items()):
        if name in HARMLESS_NAMES or not value:
            result[name] = value
        elif SECRET_NAMES.search(name) or OPAQUE.match(value):
            result[name] = BLANK
        else:
            result[name] = redacted_text(value)
    return result


def redacted_arguments(argv: Iterable[str]) -> tuple[str, ...]:
    """Return a command line with secrets blanked, also those after `--token` or `--password=`."""
    result: list[str] = []
    hide = False
    for word in argv:
        option, equals, _ = word.partition("=")
        secret = option.startswith("-") and bool(SECRET_NAMES.search(option)) and " " not in option
        if hide:
            result.append(BLANK)
        elif secret and equals:
            result.append(f"{option}={BLANK}")
        else:
            result.append(redacted_text(word))
        hide = secret and not equals and not hide
    return tuple(result)
