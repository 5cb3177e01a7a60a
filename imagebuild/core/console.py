"""Print tables, durations, sizes and signs of life; blank what may be a secret."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

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


FIRST_S, NEXT_S, IDLE_S, POLL_S = 2.0, 10.0, 1.0, 0.2
"""Seconds before the first sign of life, between later ones, without any work until it ends, and between looks."""


@dataclass(eq=False)
class Activity:
    """Describe something that may take long."""

    text: str
    detail: str = ""
    """How far it is, or why it is tried again."""
    began: float = field(default_factory=time.monotonic)


class SignOfLife(threading.Thread):
    """Say on standard error what is being done while it takes long, so that nobody takes a command for dead."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.running: list[Activity] = []
        """The oldest first; several threads begin and end them."""
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
            for oldest in self.running[:1]:
                busy_at = now
                if now >= self.next_at:
                    detail = f"; {oldest.detail}" if oldest.detail else ""
                    err.print(f"{oldest.text} for {format_duration(now - oldest.began)}{detail}", markup=False)
                    self.next_at = now + NEXT_S


life = SignOfLife()


@contextmanager
def doing(text: str) -> Iterator[Activity]:
    """Tell `life` what is being done until the end of the context; its `detail` may change meanwhile."""
    activity = Activity(text)
    life.begin(activity)
    try:
        yield activity
    finally:
        life.end(activity)


class Progress:
    """Show work that several threads do: a line for each that has ended, and what is under way.

    A terminal shows that as it changes, a log has signs of life. `live=False` makes a terminal a log.
    """

    def __init__(self, *, live: bool = True) -> None:
        self.headline = ""
        """Text above the running items, on a terminal only."""
        self.running: dict[str, Activity] = {}
        self.live: Live | None = None
        """What redraws a terminal; None for a log."""
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
            life.end(activity)
        if self.live:
            self.live.stop()

    def note(self, text: str) -> None:
        """Show what is being done: above the running items, or as a line with the seconds since the start."""
        self.headline = text
        if not self.live:
            self._print(text)

    def begin(self, key: str, title: str) -> None:
        self.running[key] = Activity(title)
        if not self.live:
            life.begin(self.running[key])

    def advance(self, key: str, text: str) -> None:
        """Show how far a running item is, or its latest output."""
        self.running[key].detail = text

    def end(self, key: str, text: str, *, good: bool = True) -> None:
        """Remove a running item and print a line about it; print nothing if `text` is empty."""
        activity = self.running.pop(key)
        life.end(activity)
        if text:
            self._print(f"{activity.text} {'→' if good else '✗'} {text}")

    def _print(self, text: str) -> None:
        life.next_at = time.monotonic() + NEXT_S
        err.print(f"{time.monotonic() - self._began:7.1f}  {escape(text)}")

    def _draw(self) -> Group:
        now = time.monotonic()
        lines = [_one_line(f"{now - self._began:7.1f}", self.headline, "bold")]
        for activity in list(self.running.values())[-SHOWN_ITEMS:]:
            lines.append(_one_line(f"{now - activity.began:7.1f}", activity.text, "cyan"))
            if activity.detail:
                lines.append(_one_line("", activity.detail, "dim"))
        return Group(*lines)


def _one_line(seconds: str, text: str, style: str) -> Text:
    return Text(f"{seconds:7}  {text}", style, no_wrap=True, overflow="ellipsis")


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
"""Names of options and variables that have secrets."""
KEPT_NAMES = re.compile(
    r"(CUDA|DCGM|FI|GDRCOPY|HPCX|IMAGEBUILD|LC|LD|MELLANOX|MPI|NCCL|NVIDIA|NVSHMEM|OMPI|OPAL|PMIX|PRTE|SHARP|SLURM|UCC|UCX)_"
    r"|(HOME|HOSTNAME|LANG|PATH|USER)$"
)
"""Names of variables that explain a measurement."""
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


def redacted_text(value: str) -> str:
    """Return a text in which everything that looks like a secret is blanked."""
    for pattern in SECRET_VALUES:
        value = pattern.sub(BLANK, value)
    return ASSIGNED.sub(rf"\1{BLANK}", value)


def kept_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that explain a measurement; what looks like a secret is blanked in them."""
    kept = {name: value for name, value in variables.items() if KEPT_NAMES.match(name)}
    return {name: redacted_text(value) for name, value in sorted(kept.items()) if not SECRET_NAMES.search(name)}


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
