"""What nccl-tests and those who start it print around the table, as events with their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "command", "version", "starting", "parameters", "devices", "rank", "header", "reduced", "row", "partial",
    "elision", "oob", "average", "concluded", "failure",
]  # fmt: skip

COLLECTIVES = frozenset((
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv", "broadcast", "reduce", "sendrecv",
    "gather", "scatter", "hypercube",
))  # fmt: skip

OPENINGS: frozenset[Kind] = frozenset(("version", "starting", "parameters", "devices", "header"))
"""Each is printed once, before the rows: a second one belongs to another run."""


@dataclass(frozen=True)
class Event:
    """Something a line said."""

    kind: Kind
    number: int
    values: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    payload: object = None


_HEADER = re.compile(r"(?:size|bytes)\s{1,40}(?:count|N)\s{1,40}type\b(?P<rest>[^\n]{0,400})")

_GAP = r"\s{1,12}"
_PRINTED: Mapping[str, tuple[tuple[Kind, str], ...]] = {
    "n": (
        ("version", r"(?P<tool>nccl-tests) version (?P<version>[^\s(]{1,40})"),
        (
            "parameters",
            r"nThreads? (?P<threads>\d{1,5}) nGpus (?P<gpus>\d{1,5})"
            r" minBytes (?P<min>\d{1,20}) maxBytes (?P<max>\d{1,20})"
            r"(?: step: (?P<step>\d{1,20})\((?P<by>factor|bytes)\))?"
            r"(?:.{0,200}? validation: (?P<validation>\d{1,3}))?",
        ),
    ),
    "r": (("version", r"(?P<tool>rccl-tests): Version (?P<version>\S{1,80})"),),
    "N": (("version", r"NCCL Tests compiled with NCCL (?P<library>\S{1,20})"),),
    "C": (
        ("starting", r"Collective test starting: (?P<program>\S{1,300})"),
        ("concluded", r"Collective test concluded: (?P<program>\S{1,300})"),
    ),
    "U": (("devices", r"Using devices"),),
    "R": (
        (
            "rank",
            rf"Rank{_GAP}(?P<rank>\d{{1,7}})(?:{_GAP}Group{_GAP}(?P<group>-?\d{{1,7}}))?"
            rf"(?:{_GAP}Pid{_GAP}(?P<pid>\d{{1,10}}))?{_GAP}on\s{{1,20}}(?P<host>\S{{1,300}})"
            rf"{_GAP}device{_GAP}(?P<device>\d{{1,5}}){_GAP}\[(?P<bus>[^\]]{{0,40}})\](?P<name>[^\n]{{0,200}})",
        ),
        ("reduced", r"Reducing maxBytes to (?P<max>\d{1,20})"),
    ),
    "O": (("oob", r"Out of bounds values\s{0,20}: ?(?P<count>\d{1,15})\s{1,8}(?P<state>OK|FAILED)"),),
    "A": (("average", r"Avg bus bandwidth\s{0,20}: ?(?P<value>\S{1,30})(?:\s{1,8}(?P<state>OK|FAILED))?"),),
}
"""By the first letter that is not a mark of a comment."""
_MARKED = {letter: tuple((kind, re.compile(pattern)) for kind, pattern in rows) for letter, rows in _PRINTED.items()}
_ELISION = re.compile(r"[\s#|]{0,200}(?:\.{3,10}|…|\[(?:\.{3}|…)\]|<(?:snip|\.\.\.)>)\s{0,200}")
_NAMES = "|".join(sorted(COLLECTIVES, reverse=True))
_COMMAND = re.compile(rf"\b(?P<collective>{_NAMES})_perf(?:_mpi)?['\"\\]{{0,2}}\s{{1,20}}-{{1,2}}[a-zA-Z]")


def event(text: str, number: int) -> Event | None:
    """What a line says that is neither a row nor a failure."""
    bare = text.lstrip("# \t*>|\\")
    for kind, pattern in _MARKED.get(bare[:1], ()):
        if found := pattern.match(bare):
            values = {name: value.strip() for name, value in found.groupdict().items() if value is not None}
            return Event(kind, number, values, text)
    if bare.startswith(("size", "bytes")) and (found := _HEADER.match(bare)):
        return Event("header", number, {}, text, Header.of(found["rest"]))
    if _ELISION.fullmatch(text):
        return Event("elision", number)
    if "_perf" in text and (found := _COMMAND.search(text)):
        return Event("command", number, {"program": found["collective"] + "_perf"}, text)
    return None


@dataclass(frozen=True)
class Header:
    """What the line with the names of the columns says."""

    redop: bool
    root: bool
    halves: int
    counts_wrong: bool
    """`#wrong`, a count; before 2.13 it was the largest error."""
    per_iteration: bool
    milliseconds: bool

    @classmethod
    def of(cls, labels: str) -> Header:
        words = labels.replace("# wrong", "#wrong").replace("|", " ").split()
        return cls(
            redop="redop" in words or "op" in words,
            root="root" in words,
            halves=1 if words.count("time") + words.count("cputime") == 1 else 2,
            counts_wrong="#wrong" in words or "wrong" in words,
            per_iteration="i_min" in words,
            milliseconds="res" in words,
        )


def collective(program: str) -> str | None:
    """`all_reduce` from `./build/all_reduce_perf_mpi`; None for a program that is not of nccl-tests."""
    name = program.rpartition("/")[2].strip("'\"")
    for suffix in ("_mpi", ".exe"):
        name = name.removesuffix(suffix)
    name = name.removesuffix("_perf")
    return name if name in COLLECTIVES else None
