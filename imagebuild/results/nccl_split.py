"""Which events belong to which run: several runs follow each other in a log, or print into it at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from imagebuild.results.nccl_events import OPENINGS, Event, Kind
from imagebuild.results.nccl_rows import Cells

_FOOTERS: frozenset[Kind] = frozenset(("oob", "average", "concluded"))
_BODY: frozenset[Kind] = frozenset(("row", "partial", *_FOOTERS))

Piece = list[Event]


def runs(events: Iterable[Event]) -> list[Piece]:
    """The events of one process, a list for each run."""
    return _parallel(_successive(events))


def _successive(events: Iterable[Event]) -> list[Piece]:
    """Cut where something is said again that a run says once, or where a table begins after a footer."""
    pieces: list[Piece] = []
    piece: Piece = []
    seen: set[Kind] = set()
    ranks: set[str] = set()
    for event in events:
        if _is_next(event, seen, ranks):
            pieces.append(piece)
            piece, seen, ranks = [], set(), set()
        piece.append(event)
        seen.add(event.kind)
        if event.kind == "rank":
            ranks.add(event.values["rank"])
    return [found for found in (*pieces, piece) if found]


def _is_next(event: Event, seen: set[Kind], ranks: set[str]) -> bool:
    kind = event.kind
    if kind in OPENINGS:
        return kind in seen or bool(seen & _BODY)
    if kind == "rank":
        return event.values["rank"] in ranks or bool(seen & _BODY)
    if kind == "command":
        return bool(seen & _BODY)
    if kind in ("row", "partial"):
        return bool(seen & _FOOTERS)
    return kind in _FOOTERS and (kind in seen or ("concluded" in seen))


def _kinds(piece: Piece) -> set[Kind]:
    return {event.kind for event in piece}


def _parallel(pieces: Sequence[Piece]) -> list[Piece]:
    """Tables that were printed at the same time, as by a program without MPI under mpirun, told apart again.

    Two things show it: more footers than the last table can have, while tables before it have none; or several openings
    without a row between them, after which each size comes that many times.
    """
    done: list[Piece] = []
    open_: list[Piece] = []
    for at, piece in enumerate(pieces):
        kinds = _kinds(piece)
        if kinds <= _FOOTERS and len(open_) > 1:
            open_.append(piece)
            continue
        if open_ and not _mixed(open_) and _kinds(open_[-1]) & _FOOTERS:
            done += open_
            open_ = []
        if _mixed(open_) and not _goes_on(pieces[at:]):
            done += _apart(open_)
            open_ = []
        open_.append(piece)
    return done + (_apart(open_) if _mixed(open_) else open_)


def _goes_on(pieces: Sequence[Piece]) -> bool:
    return _kinds(pieces[0]) <= {"rank", "row", "partial", *_FOOTERS}


def _mixed(pieces: Sequence[Piece]) -> bool:
    """Whether pieces that follow each other were printed at the same time."""
    openings = [piece for piece in pieces if _kinds(piece) & OPENINGS]
    if len(openings) < 2:
        return False
    if any(_kinds(piece) <= _FOOTERS for piece in pieces):
        return True
    first = [event.payload for piece in pieces for event in piece if event.kind == "row"][: _tables(pieces)]
    keys = {(cells.size, cells.dtype, cells.redop, cells.root) for cells in first if isinstance(cells, Cells)}
    silent = not any(event.kind in _BODY for piece in openings[:-1] for event in piece)
    return silent and len(first) > 1 and len(first) == _tables(pieces) and len(keys) == 1


def _tables(pieces: Sequence[Piece]) -> int:
    counts = Counter(event.kind for piece in pieces for event in piece)
    return max(counts[kind] for kind in ("parameters", "header", "oob"))


def _apart(pieces: Sequence[Piece]) -> list[Piece]:
    """Events of tables that were printed at the same time: the n-th of a kind belongs to the n-th table."""
    tables: list[Piece] = [[] for _ in range(_tables(pieces))]
    said: Counter[tuple[Kind, str]] = Counter()
    last: list[int | None] = [None] * len(tables)
    for event in sorted((event for piece in pieces for event in piece), key=lambda event: event.number):
        if event.kind == "row" and isinstance(event.payload, Cells):
            place = _next_table(last, event.payload.size)
            last[place] = event.payload.size
        else:
            key = (event.kind, event.values.get("rank", ""))
            place = min(said[key], len(tables) - 1)
            said[key] += 1
        tables[place].append(event)
    return [table for table in tables if table]


def _next_table(last: Sequence[int | None], size: int) -> int:
    """Where a row of this size comes next: where the size before it is the nearest smaller one."""
    smaller = [(value, -place) for place, value in enumerate(last) if value is not None and value < size]
    if smaller:
        return -max(smaller)[1]
    if None in last:
        return last.index(None)
    return last.index(size) if size in last else 0
