"""The same for many things at a time, ended as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from imagebuild.registry.base import Registry

T = TypeVar("T")
R = TypeVar("R")

JOBS = 4
"""Blobs at a time: more fill no line that is worth it, and registries count requests."""


def each(function: Callable[[T], R], items: Iterable[T], *registries: Registry, jobs: int = JOBS) -> list[R]:
    """Results in the order of the items. The first error ends it, and nothing new is begun after it.

    Ctrl-C also ends what runs, in the registries that are named.
    """
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            for registry in registries:
                registry.stop()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    failed = next((f for f in futures if not f.cancelled() and f.exception()), None)
    if failed:
        failed.result()
    return [future.result() for future in futures]
