"""What says that a run of nccl-tests did not end well: its messages, NCCL's, and those of launchers and schedulers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Cause = Literal["cuda", "timeout", "remote", "comm", "trace", "stopped"]


@dataclass(frozen=True)
class Failure:
    """A line that tells of a failure."""

    cause: Cause
    text: str
    number: int
    stream: str


_PHRASES: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    # A message names the cause after who reports it, `Test NCCL failure … 'unhandled cuda error'`: the first counts.
    (
        "cuda",
        ("unhandled cuda error", "Test CUDA failure", r"\b[Cc]uda failure\b", r"CUDA failure \S", r"\bCUDA error\b"),
    ),
    (
        "timeout",
        (
            r"Test timeout \(",
            r"DUE TO (?:\w+ )?TIME LIMIT",
            "time limit for job execution has been",
            "APPLICATION TIMED OUT",
            "DeadlineExceeded",
            "timeout: (?:sending signal|the monitored command)",
            r"[Ee]xit(?:ed)?(?: with)?(?: exit)? (?:code|status):? 124\b",
            r"[Ww]alltime \S{1,20} exceeded",
            "[Cc]ommand timed out",
        ),
    ),
    ("remote", ("remote process exited or there was a network error",)),
    (
        "comm",
        (
            "Test NCCL failure",
            r"\bNCCL failure\b",
            "unhandled system error",
            "nccl(?:System|Internal|Remote)Error",
            r"\bNCCL error\b",
        ),
    ),
    ("trace", (r"\bTest failure\b",)),
    (
        "stopped",
        (
            "non-zero (?:exit )?(?:status|code)",
            "exited on signal",
            "[Ee]xited with (?:exit )?(?:code|status):? [1-9]",
            "terminated with exit code [1-9]",
            "BAD TERMINATION OF",
            "Segmentation fault",
            "Process received signal",
            "CANCELLED AT",
            r"\boom[-_ ]?kill",
            "OOMKilled",
            "MPI_ABORT was invoked",
            "error while loading shared libraries",
            "Invalid number of GPUs",
            "not enough slots available",
            "was unable to (?:launch|find|start)",
            "driver version is insufficient",
            r"is not supported by this test",
            r"\bKilled\s{0,4}$",
        ),
    ),
)
_PATTERNS: tuple[tuple[Cause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile("|".join(phrases))) for cause, phrases in _PHRASES
)
_HINTS = (
    "uda error", "CUDA ", "failure", "TIME", "time limit", "timeout", "DeadlineExceeded", "xit", "alltime", "timed out",
    "network error", "system error", "nccl", "NCCL error", "non-zero", "signal", "TERMINATION", "egmentation fault",
    "CANCELLED", "oom", "OOMKilled", "MPI_ABORT", "shared libraries", "Invalid number", "slots", "was unable to",
    "insufficient", "supported by this", "Killed",
)  # fmt: skip
"""One of these is in every message: most lines need no closer look."""


def failure(text: str, number: int, stream: str) -> Failure | None:
    """What a line says about why a run did not end well.

    MPICH ends every output with "0 network timeouts", so nothing as short as `timeout` is looked for. `# error:` is the
    last message of the library, which a run that ends well may have too.
    """
    if not any(hint in text for hint in _HINTS) or text.lstrip("# ").startswith("error:"):
        return None
    for cause, pattern in _PATTERNS:
        if pattern.search(text[:2000]):
            return Failure(cause, " ".join(text[:2000].split())[:240], number, stream)
    return None


def root(failures: Iterable[Failure]) -> Failure | None:
    """The failure that explains the others.

    A CUDA error is nobody's consequence; of communication errors and timeouts the first leads to the others; "remote
    process exited" is what every other rank says; traces and launchers tell only that something happened.
    """
    ordered = sorted(failures, key=lambda item: item.number)
    for causes in (("cuda",), ("timeout", "comm"), ("remote",), ("stopped",), ("trace",)):
        if found := next((item for item in ordered if item.cause in causes), None):
            return found
    return None
