"""Several questions at a time, which Ctrl-C ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

from imagebuild.errors import ImagebuildError

WORKERS = 8
PATIENCE_S = 3.0
"""For what is under way to end and to remove its temporary files, when the whole is interrupted."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def asked(
    items: Iterable[T], ask: Callable[[T], R], stop: Callable[[], None]
) -> Iterator[Iterator[tuple[T, R | ImagebuildError]]]:
    """Every item with its answer or the ImagebuildError that `ask` raised, in the order in which they come.

    If the block is left early, nothing more is asked, and `stop` is called so that what is under way ends. The threads
    are daemons: a server that never answers cannot keep the process alive.
    """
    waiting: SimpleQueue[T] = SimpleQueue()
    done: SimpleQueue[tuple[T, R | BaseException]] = SimpleQueue()
    count = 0
    for item in items:
        waiting.put(item)
        count += 1
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                item = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put((item, ask(item)))
            except BaseException as error:  # raised again where it can be seen
                done.put((item, error))

    def answers() -> Iterator[tuple[T, R | ImagebuildError]]:
        for _ in range(count):
            item, answer = done.get()
            if isinstance(answer, BaseException) and not isinstance(answer, ImagebuildError):
                raise answer
            yield item, answer

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(WORKERS, count))]
    for thread in threads:
        thread.start()
    try:
        yield answers()
    except BaseException:
        stopped.set()
        stop()
        deadline = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
