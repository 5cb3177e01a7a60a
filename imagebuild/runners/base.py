"""What a runner is: anything that can run a command in an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from imagebuild.errors import CommandError
from imagebuild.needs import Facilities


class Unusable(CommandError):
    """Nothing can be run in this image, by this runner: for example, it has no shell."""


@dataclass(frozen=True)
class Command:
    """What is to run in the image."""

    script: str
    """For `bash -euo pipefail -c`."""
    user: str = "root"
    timeout_s: float = 60
    """After this, the command and its children are killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    """How many nodes it uses: it runs on the first, and finds all names in `IMAGEBUILD_NODES`, separated by blanks;
    the others answer ssh to `user` without a password."""
    ranks: int = 1
    """How many times it is started together, by srun."""
    log: Path | None = None
    """File that gets the whole output; by default only its end is kept."""


@dataclass(frozen=True)
class Execution:
    """What came of a command."""

    argv: tuple[str, ...]
    """What was started, to be kept as evidence."""
    status: int | None
    """Exit status; `None` if it was killed for its time."""
    output: str
    """The end of standard output and error together, also of a command that was killed."""
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the command was given, with secrets blanked."""
    problem: str = ""
    """Why there is no status, if it was not killed for its time: it printed too much, or the nodes did not come up."""


@dataclass(frozen=True)
class Place:
    """What is there where commands run."""

    user: str = "root"
    uid: int = 0
    tools: frozenset[str] = frozenset()
    """Of the programs that matter here, those on the PATH."""
    accounts: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """User → uid, gid, home."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """`kernel`, `machine`, `cpus`, `memory`, `host`, `os`."""


class Session(Protocol):
    """An image that is ready to run commands."""

    @property
    def facilities(self) -> Facilities: ...

    @property
    def place(self) -> Place: ...

    def obstacle(self, command: Command) -> str:
        """Why this command cannot be run here at all: no bash, no such user. Empty if it can."""

    def run(self, command: Command) -> Execution:
        """Run a command. A non-zero status is a result; raises CommandError if the runner itself fails."""


class Runner(Protocol):
    """A way to run commands in an image."""

    @property
    def name(self) -> str:
        """As `--runner` names it."""

    def session(self, image: str) -> AbstractContextManager[Session]:
        """Make the image ready; what was started for it ends with the context. Raises Unusable."""


@dataclass(frozen=True)
class NoRunner:
    """Runs nothing, and says why."""

    reason: str
    name: str = "none"

    @contextmanager
    def session(self, image: str) -> Iterator[Session]:
        """Raises Unusable."""
        raise Unusable(f"{image}: {self.reason}" if image else self.reason)
        yield  # what makes it a context
