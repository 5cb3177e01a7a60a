"""What programs that start commands elsewhere do with their arguments. Rows of a table; unknown ones are plain."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

JOINING = frozenset({"dbclient", "rsh", "slogin", "ssh"})
"""They join their arguments with blanks and give the line to a shell on the other side."""
OWN_CLEANING = frozenset({"srun"})
"""They end what they started when they are ended, and a second call of them would be another place."""


@dataclass(frozen=True)
class UserOption:
    """How a launcher is told the user of a command: an option after a word of its own."""

    after: str
    option: str
    numeric: bool = False
    """Whether it wants `UID:GID` instead of a name."""


USER_OPTIONS = {
    "crun": UserOption("exec", "--user", numeric=True),
    "docker": UserOption("exec", "--user"),
    "nerdctl": UserOption("exec", "--user"),
    "podman": UserOption("exec", "--user"),
    "runc": UserOption("exec", "--user", numeric=True),
}


def names(prefix: Sequence[str]) -> list[str]:
    """Names of the words that may be programs: `/usr/bin/ssh` is ssh."""
    return [PurePath(word).name for word in prefix]


def command_line(prefix: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The arguments to start, so that `argv` arrives as it is: quoted once for every shell on the way."""
    words = list(argv)
    for _ in [name for name in names(prefix) if name in JOINING]:
        words = [shlex.join(words)]
    return [*prefix, *words]


def with_user(prefix: Sequence[str], user: str, account: tuple[int, int, str]) -> list[str] | None:
    """The prefix with the option that sets the user; `None` if it has no launcher that can.

    Behind ssh it can be anywhere: `ssh node docker exec c1`.
    """
    found = names(prefix)
    for at, name in enumerate(found):
        option = USER_OPTIONS.get(name)
        if option and option.after in found[at:]:
            after = found.index(option.after, at) + 1
            value = f"{account[0]}:{account[1]}" if option.numeric else user
            return [*prefix[:after], option.option, value, *prefix[after:]]
    return None


def with_ranks(prefix: Sequence[str], ranks: int, nodes: int) -> list[str] | None:
    """The prefix with srun's options for several ranks; `None` if there is no srun in it."""
    found = names(prefix)
    if "srun" not in found:
        return None
    after = found.index("srun") + 1
    return [*prefix[:after], *srun_options(ranks, nodes), *prefix[after:]]


def srun_options(ranks: int, nodes: int) -> list[str]:
    """Options that start ranks which find each other through PMIx."""
    return ["--mpi=pmix", f"--ntasks={ranks}", *([f"--nodes={nodes}"] if nodes > 1 else [])]


def cleans_up(prefix: Sequence[str]) -> bool:
    """Whether ending the launcher ends what it started."""
    return bool(OWN_CLEANING & set(names(prefix)))
