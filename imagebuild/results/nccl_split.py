"""Which events belong to which run: several runs follow each other in a log, or print into it at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from imagebuild.results.nccl_events import OPENINGS, Event, Kind
from imagebuild.results.nccl_rows import Cells

_FOOTERS: frozenset[Kind] = frozenset(("oob", "average", "concluded"))
_BODY: frozenset[Kind] = frozenset(("row", "partial", *_FOOTERS))
_ONCE: tuple[Kind, ...] = ("starting", "parameters", "header", "oob", "average")
_MOST = 1000
"""Tables that are told apart."""

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

    Runs that follow each other begin with an opening and end with a footer. Footers or devices alone, after an opening
    that had none yet, show that the lines of several are mixed.
    """
    done: list[Piece] = []
    unfinished: list[Piece] = []
    counts: Counter[Kind] = Counter()
    for at, piece in enumerate(pieces):
        unfinished.append(piece)
        counts.update(event.kind for event in piece)
        following = pieces[at + 1] if at + 1 < len(pieces) else None
        if following is not None and (_is_torn(following) or not _is_finished(counts)):
            continue
        done += _apart(unfinished) if _is_mixed(unfinished) else unfinished
        unfinished, counts = [], Counter()
    return done


def _is_torn(piece: Piece) -> bool:
    """Whether the piece begins with what never comes first."""
    return piece[0].kind in ("rank", "devices", *_FOOTERS)


def _is_finished(counts: Counter[Kind]) -> bool:
    tables = max(counts[kind] for kind in _ONCE)
    return max(counts["oob"], counts["average"]) >= tables and (tables > 0 or not OPENINGS & set(counts))


def _is_mixed(pieces: Sequence[Piece]) -> bool:
    opened = [piece for piece in pieces if _kinds(piece) & OPENINGS]
    if len(opened) < 2:
        return False
    torn = [piece for piece in pieces[1:] if _is_torn(piece)]
    if len(torn) > 1 or any(_kinds(piece) & _FOOTERS for piece in torn):
        return True
    # Openings without a row between them, after which a size comes as often as there are tables.
    tables = _tables(pieces)
    rows = [event.payload for piece in pieces for event in piece if event.kind == "row"][:tables]
    keys = {(cells.size, cells.dtype, cells.redop, cells.root) for cells in rows if isinstance(cells, Cells)}
    silent = not any(_kinds(piece) & _BODY for piece in opened[:-1])
    return silent and len(rows) == tables and len(keys) == 1


def _tables(pieces: Sequence[Piece]) -> int:
    counts = Counter(event.kind for piece in pieces for event in piece)
    return max(counts[kind] for kind in _ONCE)


def _apart(pieces: Sequence[Piece]) -> list[Piece]:
    """Events of tables that were printed at the same time: the n-th of a kind belongs to the n-th table."""
    tables: list[Piece] = [[] for _ in range(min(max(1, _tables(pieces)), _MOST))]
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
