"""What every parser hands back: what it read, and what it saw but could not read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item_co = TypeVar("Item_co", covariant=True)


@dataclass(frozen=True)
class Parsed(Generic[Item_co]):
    """Items of one tool read from one source; empty where the source holds nothing of that tool."""

    items: tuple[Item_co, ...] = ()
    unread: tuple[str, ...] = ()
    """Lines (or JSON pieces, shortened) that look like results of this tool and could not be read."""

    @property
    def found(self) -> bool:
        """Whether anything in the source belongs to this tool."""
        return bool(self.items or self.unread)

    @classmethod
    def joined(cls, parts: Iterable[Parsed[Item_co]]) -> Parsed[Item_co]:
        """Several parts of a source as one, in order."""
        kept = tuple(parts)
        return cls(
            items=tuple(item for part in kept for item in part.items),
            unread=tuple(line for part in kept for line in part.unread),
        )
