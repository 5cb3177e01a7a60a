"""What people see while sources are asked for: bars on a terminal, a line for each elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from imagebuild import console


class Display(Protocol):
    """Is told about every source; `advance` from several threads."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def begin(self, name: str) -> None: ...
    def advance(self, name: str, done: int, total: int | None) -> None: ...
    def end(self, name: str, text: str, *, good: bool) -> None: ...


class Plain:
    """A line for each source as it is known, for logs."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, name: str) -> None:
        pass

    def advance(self, name: str, done: int, total: int | None) -> None:
        pass

    def end(self, name: str, text: str, *, good: bool) -> None:
        console.err.print(f"{time.monotonic() - self.began:7.1f}  {escape(name)} {'→' if good else '✗'} {escape(text)}")


class Bars:
    """A bar for each source under way; what is known scrolls up above them."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console.err, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, name: str) -> None:
        self.tasks[name] = self.progress.add_task(escape(name), total=None)

    def advance(self, name: str, done: int, total: int | None) -> None:
        self.progress.update(self.tasks[name], completed=done, total=total)

    def end(self, name: str, text: str, *, good: bool) -> None:
        if name in self.tasks:
            self.progress.remove_task(self.tasks.pop(name))
        mark = "[green]✓[/]" if good else "[red]✗[/]"
        self.progress.console.print(f"{mark} {escape(name)} [dim]{escape(text)}[/]")


def display() -> Display:
    """Bars on a terminal, lines elsewhere."""
    return Bars() if console.err.is_terminal else Plain()
