"""What people see: tables, and the progress of a build. Nothing here decides anything."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from imagebuild.events import Vertex

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

MARKS = {"passed": "[green]✓ passed[/]", "failed": "[red]✗ failed[/]", "skipped": "[yellow]- skipped[/]"}


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table; on something narrower than its content, cells wrap."""
    result = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        result.add_row(*row)
    if out.is_terminal:
        out.print(result)
        return
    # In a file or a log, cells have room and lines end where their text ends.
    plain = Console(highlight=False, width=200, file=io.StringIO())
    with plain.capture() as captured:
        plain.print(result)
    out.print("\n".join(line.rstrip() for line in captured.get().splitlines()), markup=False)


def duration(seconds: float) -> str:
    """`7.2 s`, `3 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def size(number: int | None) -> str:
    """Bytes in decimal units, as registries count: `273.4 MB`."""
    if number is None:
        return "unknown"
    return f"{number / 1e6:.1f} MB" if number < 1e9 else f"{number / 1e9:.2f} GB"


class Progress(Protocol):
    """Shows a build while it runs."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def note(self, text: str) -> None:
        """Something that happens before or after BuildKit's steps."""

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        """An event of `events.Stream.feed`."""


class Plain:
    """One line for each step as it ends, for logs; foldable groups with the output under GitHub Actions."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.groups = os.environ.get("GITHUB_ACTIONS") == "true"
        self.began = time.monotonic()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        self._line(text)

    def update(self, kind: str, vertex: Vertex, line: str) -> None:
        if kind == "log" and self.verbose and not self.groups:
            self._line(f"{vertex.stage or 'build'} | {line}")
        if kind != "completed" or not vertex.parts:
            return
        if vertex.error:
            state = "cancelled" if vertex.cancelled else "failed"
        else:
            state = "cached" if vertex.cached else duration(vertex.seconds)
        if self.groups and vertex.log:
            sys.stderr.write("\n".join([f"::group::{vertex.title} ({state})", *vertex.log, "::endgroup::\n"]))
        else:
            self._line(f"{vertex.title} ({state})")

    def _line(self, text: str) -> None:
        err.print(f"{time.monotonic() - self.began:7.1f}  {escape(text)}")


class Screen:
    """A display that is redrawn: running steps with their last line, and counts."""

    def __init__(self, targets: Iterable[str]) -> None:
        self.targets = tuple(targets)
        self.began = time.monotonic()
        self.running: dict[str, Vertex] = {}
        self.done: dict[str, Vertex] = {}
        self.phase = ""
        self.live = Live(get_renderable=self._draw, console=err, refresh_per_second=8, transient=True)

    def __enter__(self) -> Screen:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        self.phase = text

    def update(self, kind: str, vertex: Vertex, line: str) -> None:  # noqa: ARG002 - part of the protocol
        if kind == "started":
            self.running[vertex.digest] = vertex
        elif kind == "completed":
            self.running.pop(vertex.digest, None)
            if vertex.parts:
                self.done[vertex.digest] = vertex
                if not vertex.cached and not vertex.error:
                    self.live.console.print(_line(f"{duration(vertex.seconds):>10}  {vertex.title}", "green"))

    def _draw(self) -> Group:
        cached = sum(v.cached for v in self.done.values())
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(f"{duration(time.monotonic() - self.began):>10}  ", "bold")
        head.append(f"{len(self.done) - cached} steps run, {cached} cached  ")
        head.append(", ".join(self.targets), "dim")
        lines = [head]
        if self.phase and not self.done:
            lines.append(_line(self.phase, "dim"))
        now = time.time()
        for vertex in [v for v in self.running.values() if v.name][-8:]:
            lines.append(_line(f"{duration(max(0.0, now - (vertex.started or now))):>10}  {vertex.title}", "cyan"))
            if vertex.log:
                lines.append(_line(f"{'':>10}  {vertex.log[-1]}", "dim"))
        return Group(*lines)


def _line(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def progress(targets: Iterable[str], *, verbose: bool) -> Progress:
    """A redrawn display on a terminal, plain lines elsewhere or when full output is wanted."""
    return Screen(targets) if err.is_terminal and not verbose else Plain(verbose=verbose)
