"""BuildKit's event stream (`--progress=rawjson`) to steps. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from imagebuild.records import Step

NAME = re.compile(
    r"^\[(?:(?P<target>(?!linux/)\S+) )?(?:(?P<platform>linux/\S+) )?(?P<stage>[\w.-]+) +(?P<n>\d+/\d+)\] "
    r"(?P<text>(?!LINK ).*)",  # the second half of COPY --link, which is no step of the Dockerfile
    re.DOTALL,
)
FINAL_STAGE = "image"
BLOB = re.compile(r"^(extracting )?sha256:")
"""What is in progress when a layer comes from a registry. Steps that run have no progress, only output."""
LOOKED_UP_S = 0.001
"""A step that took less did not run: BuildKit looked it up, and then took what an equal step of another target made. It
says nothing of that. The shortest step that ran in hundreds of builds took 4 ms."""
LOG_LINES = 400
"""Lines of output kept per step."""


@dataclass
class Vertex:
    """A node of BuildKit's graph, as far as the stream has told."""

    digest: str
    name: str = ""
    started: float | None = None
    completed: float | None = None
    cached: bool = False
    pulled: bool = False
    """Did layers of it come from a registry? BuildKit then reports a step as if it had run."""
    error: str = ""
    inputs: tuple[str, ...] = ()
    """Digests of the vertices that it starts from; a source has none."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    partial: str = ""

    @property
    def parts(self) -> re.Match[str] | None:
        return NAME.match(self.name)

    @property
    def target(self) -> str:
        return (self.parts["target"] or "") if self.parts else ""

    @property
    def stage(self) -> str:
        return self.parts["stage"] if self.parts else ""

    @property
    def seconds(self) -> float:
        return max(0.0, (self.completed or 0) - (self.started or 0)) if self.completed and self.started else 0.0

    @property
    def identified(self) -> bool:
        """Is it the source of an `ADD`? It is looked up in every build; the step is the vertex that copies from it."""
        return not self.inputs and bool(self.parts) and self.name.partition("] ")[2].startswith("ADD ")

    @property
    def looked_up(self) -> bool:
        """Did it end before anything could have run?"""
        return not self.error and not self.identified and bool(self.parts) and self.seconds < LOOKED_UP_S

    @property
    def cancelled(self) -> bool:
        """Did it end because the build or the target that wanted it did?"""
        return "context canceled" in self.error

    @property
    def title(self) -> str:
        """One line: the stage, its platform, and the start of the command."""
        if not self.parts:
            return self.name.splitlines()[0][:100] if self.name else self.digest
        # Targets share all stages but the last; only there does it matter whose it is.
        whose = self.target if self.stage == FINAL_STAGE else ""
        words = [whose, self.stage, f"({self.parts['platform']})" if self.parts["platform"] else ""]
        where = " ".join(word for word in words if word)
        return f"{where} {self.parts['n']}: {summary(self.parts['text'])}"


def summary(command: str) -> str:
    """The command without its mounts, shortened to one line."""
    text = re.sub(r"--mount=\S+\s*", "", command.replace("\\\n", " "))
    return " ".join(text.split())[:80]


class Stream:
    """Reads the stream as it comes. Newer versions of buildx write one object a line, older ones indent."""

    def __init__(self) -> None:
        self.vertices: dict[str, Vertex] = {}
        self.messages: list[str] = []
        """Lines that are no events, such as buildx's own errors."""
        self._buffer = ""
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> Iterator[tuple[str, Vertex, str]]:
        """Take more text; yield (`started` | `completed` | `log`, vertex, line of log)."""
        self._buffer += text
        while True:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return
            if self._buffer.startswith("{"):
                try:
                    event, end = self._decoder.raw_decode(self._buffer)
                except ValueError:
                    return
                self._buffer = self._buffer[end:]
                yield from self._event(event)
            else:
                line, newline, rest = self._buffer.partition("\n")
                if not newline:
                    return
                self.messages.append(line)
                self._buffer = rest

    def close(self) -> None:
        """The stream has ended; what is left is a message."""
        self.messages += [line for line in self._buffer.splitlines() if line.strip()]
        self._buffer = ""

    def steps(self, component_of: dict[str, str]) -> tuple[Step, ...]:
        """Steps of stages that ran or were cached, each once, in the order they started.

        The time of an `ADD` includes the time in which its source was fetched.
        """
        sources = {v.digest: v.seconds for v in self.vertices.values() if v.identified}
        done = [v for v in self.vertices.values() if v.parts and (v.completed or v.cached) and v.digest not in sources]
        return tuple(
            Step(
                name=" ".join(v.name.split())[:200],
                target=v.target,
                stage=v.stage,
                component=component_of.get(v.stage),
                cached=v.cached,
                seconds=round(v.seconds + sum(sources.get(i, 0) for i in v.inputs if not v.cached), 3),
                error=v.error or None,
            )
            for v in sorted(done, key=lambda v: v.started or 0)
        )

    def failed(self) -> list[Vertex]:
        """Steps that failed by themselves, not because others did."""
        return [v for v in self.vertices.values() if v.error and not v.cancelled]

    def said(self) -> list[str]:
        """What failed outside steps, and lines that are no events."""
        return [v.error for v in self.failed() if not v.parts] + [m for m in self.messages if m.strip()]

    def forget_failures(self) -> None:
        """Before the same build is tried again: what ran stays known as having run."""
        self.vertices = {digest: v for digest, v in self.vertices.items() if not v.error}
        self.messages.clear()

    def _event(self, event: dict[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        for raw in event.get("statuses") or ():
            if BLOB.match(raw.get("id") or ""):
                self.vertices.setdefault(raw["vertex"], Vertex(raw["vertex"])).pulled = True
        for raw in event.get("vertexes") or ():
            yield from self._vertex(raw)
        for raw in event.get("logs") or ():
            vertex = self.vertices.setdefault(raw["vertex"], Vertex(raw["vertex"]))
            try:
                text = base64.b64decode(raw.get("data") or "").decode("utf-8", "replace")
            except binascii.Error:
                continue
            *lines, vertex.partial = (vertex.partial + text).split("\n")
            for line in lines:
                vertex.log.append(line)
                yield "log", vertex, line

    def _vertex(self, raw: dict[str, Any]) -> Iterator[tuple[str, Vertex, str]]:
        vertex = self.vertices.setdefault(raw["digest"], Vertex(raw["digest"]))
        vertex.name = raw.get("name") or vertex.name
        vertex.inputs = tuple(raw.get("inputs") or vertex.inputs)
        # Two targets that share a step each report it; it was cached only if it never ran.
        ran_before = vertex.completed is not None and not vertex.cached and not vertex.error
        started, completed = _time(raw.get("started")), _time(raw.get("completed"))
        if started and vertex.started is None:
            vertex.started = started
            yield "started", vertex, ""
        # A source is completed once when it is identified, and may fail when it is fetched.
        if completed and (not ran_before or raw.get("error")):
            # A step that was looked up, or cancelled for one target, may then run for another that wants it.
            vertex.started = started or vertex.started
            vertex.completed, vertex.error = completed, raw.get("error") or ""
            vertex.cached = bool(raw.get("cached") or vertex.pulled or vertex.looked_up)
            if vertex.partial:
                vertex.log.append(vertex.partial)
                vertex.partial = ""
            yield "completed", vertex, ""
        elif completed and started and vertex.identified and completed - started > vertex.seconds:
            vertex.started, vertex.completed = started, completed  # now it was fetched


def _time(text: str | None) -> float | None:
    """Seconds since the epoch; BuildKit writes nanoseconds, of which Python reads six digits."""
    if not text or text.startswith("0001"):
        return None
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")).timestamp()
