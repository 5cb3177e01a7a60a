"""Collect the messages of NCCL, UCX, libfabric and perftest about the way of the data. Pure but for the YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from imagebuild.core.patterns import DataFile

_DATA = DataFile(__file__)
_MESSAGES = [(row["mark"], _DATA.pattern(row["match"])) for row in _DATA["messages"]]
_MARKS: Sequence[str] = _DATA["marks"]
_HOST = re.compile(r"([A-Za-z\d][\w.-]*):\d+:\d+ \[(-?\d+)\]")
_RUN_ENDS = "Avg bus bandwidth"
_LONGEST = 4000


class Message(NamedTuple):
    """The facts in one message."""

    number: int
    """Number of the line."""
    host: str
    """The host in the prefix of the message; empty if there is none."""
    device: str
    """The number of the GPU in the prefix."""
    text: str
    """The message as a report quotes it; empty if an earlier one says the same of other ranks."""
    form: int
    """Index of the form in `_MESSAGES`."""
    values: tuple[str | None, ...]

    @property
    def facts(self) -> Mapping[str, str]:
        names = _MESSAGES[self.form][1].groupindex
        return {name: value for name, value in zip(names, self.values, strict=True) if value is not None}


class MessageReader:
    """Collects the messages of a log, each only once for each run."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._known: set[object] = set()

    def read(self, row: str, number: int) -> None:
        """Add the messages in a line about the way of the data."""
        if not any(mark in row for mark in _MARKS):
            return
        if _RUN_ENDS in row:
            self._known.clear()  # the next run prints its messages again
        row = row[:_LONGEST]
        for form, (mark, pattern) in enumerate(_MESSAGES):
            if mark in row and (match := pattern.search(row)):
                found = _HOST.search(row[: match.start()])
                (host, device), values = found.groups() if found else ("", ""), match.groups()
                if (key := hash((form, host, device, values))) not in self._known:
                    words = (form, *(value for value in values if value and not value.isdigit()))
                    text = "" if words in self._known else match[0].strip()[:160]
                    self._known |= {key, words}
                    self.messages.append(Message(number, host, device, text, form, values))
