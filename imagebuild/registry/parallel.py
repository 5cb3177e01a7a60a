"""The same for many things at a time, ended as one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from imagebuild.registry.base import Registry

T = TypeVar("T")
R = TypeVar("R")

JOBS = 4
"""Blobs at a time: more fill no line that is worth it, and registries count requests."""


def each(function: Callable[[T], R], items: Iterable[T], *registries: Registry, jobs: int = JOBS) -> list[R]:
    """Results in the order of the items. After the first error nothing new is begun, and that error is raised.

    Ctrl-C ends it at once: what waits in the registries that are named is told to stop, and nobody waits for an answer
    that is under way.
    """
    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                results[number] = function(item)
            except BaseException as error:  # it is raised where `each` was called
                errors.append(error)

    # An executor's threads would keep the program from ending until the last answer has come.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(todo)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        for registry in registries:
            registry.stop()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
