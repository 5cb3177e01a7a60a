"""What launchers and copyists put in front of a line: taken off, with the name of the process it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_CTIME = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"

_KINDS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    # Open MPI: `[1,0]<stdout>:`; PMIx writes a blank after it, may add `[host:pid]`, drop the job, and stamp the time.
    (
        re.compile(
            rf"[ \t]*(?:\[?{_CTIME}\]?)?(?:\[(?P<rank>[\w@.-]*,?\d+)\](?:\[[^\]\s]{{1,300}}\])?)?"
            r"<std(?:out|err|diag)>: ?"
        ),
        lambda found: (found["rank"] or "").rpartition("@")[2],
    ),
    # The same as XML.
    (
        re.compile(r'[ \t]*<std(?:out|err|diag)(?P<tags>(?: \w+="[^"<>]*"){1,4})>'),
        lambda found: ",".join(re.findall(r'(?:jobid|nspace|rank)="([^"]*)"', found["tags"])),
    ),
    # kubectl logs --prefix
    (re.compile(r"[ \t]*\[(?P<pod>pod/[^\]\s]{1,500})\] ?"), lambda found: found["pod"]),
    # kubectl and docker --timestamps, files of a container runtime, workflow logs
    (re.compile(rf"[ \t]*\[?{_STAMP}\]?(?:[ \t]+std(?:out|err) [FP])?(?:[ \t]|$)"), lambda _: ""),
    # srun --label
    (re.compile(r"[ \t]*(?P<task>\d{1,7}):(?: |$)"), lambda found: found["task"]),
    # Intel MPI and MPICH -prepend-rank, torchrun
    (re.compile(r"[ \t]*\[(?:rank|default)?(?P<rank>\d{1,7})\](?:: ?|[ \t]|$)"), lambda found: found["rank"]),
    # Markdown quotations
    (re.compile(r"[ \t]{0,3}>(?=[ \t#]|$) ?"), lambda _: ""),
)

_HOST = re.compile(
    r"(?P<host>[A-Za-z][\w.-]{0,200}): (?=[ \t]*(?:#|\d+[ \t]+\d+[ \t]+[a-z]|nThread |Out of bounds |Avg bus ))"
)
"""pdsh and clush. `host: ` begins messages of nccl-tests too, so only in front of what cannot be such a message."""

_FIRST = frozenset(" \t[<>0123456789") | frozenset("MTWFS")
"""What a prefix can begin with; most lines need no closer look."""
_MOST = 4
"""Prefixes in front of one line."""


def split(text: str) -> tuple[str, str]:
    """The name of the process that wrote the line (empty if nothing says it), and the line without prefixes."""
    names: list[str] = []
    for _ in range(_MOST):
        if not text or text[0] not in _FIRST:
            break
        for pattern, name in _KINDS:
            if found := pattern.match(text):
                names.append(name(found))
                text = text[found.end() :]
                break
        else:
            break
    if found := _HOST.match(text):
        names.append(found["host"])
        text = text[found.end() :]
    return " ".join(name for name in names if name), text
