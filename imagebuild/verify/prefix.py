"""Run commands by a prefix: `exec:'srun …'`, `exec:'ssh node'`, `exec:env`."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from imagebuild.core import console, run
from imagebuild.core.errors import ConfigError
from imagebuild.core.run import Finished
from imagebuild.oci.image import FoundImage
from imagebuild.verify.runner import Command, Execution, Runner, Session, run_probe, surroundings_of

JOINING = frozenset({"dbclient", "rsh", "slogin", "ssh"})
"""Launchers that join their arguments with blanks and give the line to a shell on the other side."""


def program_names(prefix: Sequence[str]) -> list[str]:
    """Return the words of a prefix without folders: `/usr/bin/ssh` is ssh."""
    return [PurePath(word).name for word in prefix]


def command_line(prefix: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the command line that makes `argv` arrive unchanged: quoted once for every shell on the way."""
    words = list(argv)
    for name in program_names(prefix):
        if name in JOINING:
            words = [shlex.join(words)]
    return [*prefix, *words]


def with_ranks(prefix: Sequence[str], ranks: int, nodes: int) -> list[str]:
    """Return a prefix that has an srun with the options for ranks that find each other by PMIx."""
    after = program_names(prefix).index("srun") + 1
    options = ["--mpi=pmix", f"--ntasks={ranks}", *([f"--nodes={nodes}"] if nodes > 1 else [])]
    return [*prefix[:after], *options, *prefix[after:]]


CONNECT_S = 30
"""Seconds on top of a command's time limit, in which the launcher starts it: a connection, a container, a queue."""
STOP_S = 20
# The quotes keep this program from finding itself.
_STOP = """\
for line in /proc/[0-9]*/cmdline; do
  ! grep -qs '{0}''{1}' "$line" || kill "${{line//[!0-9]/}}"
done
"""


class ExecRunner(Runner):
    """Start commands by a prefix."""

    starts_image = False

    def __init__(self, text: str, hosts: Sequence[str] = ()) -> None:
        """Read what follows `exec:`. `hosts` are nodes of checks that use several; the prefix leads to the first.

        Raises ConfigError if the text is empty, or if quotes do not match.
        """
        try:
            self.prefix = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"--runner exec:{text}: {error}; quote the prefix as a shell does") from None
        if not self.prefix:
            raise ConfigError("--runner exec: needs a prefix; `exec:env` runs checks here, inside a container already")
        self.hosts = tuple(hosts)
        self.name = f"exec:{shlex.join(console.redacted_arguments(self.prefix))}"

    @contextmanager
    def session(self, reference: str | None = None, found: FoundImage | None = None) -> Iterator[ExecSession]:  # noqa: ARG002 - the prefix leads to the image
        """Find out what is where the prefix leads. Raises CommandError if nothing can be run there."""
        yield ExecSession(self)


class ExecSession(Session):
    """Run commands where a prefix leads."""

    def __init__(self, runner: ExecRunner) -> None:
        self.prefix: Sequence[str] = runner.prefix
        self.starts_ranks = "srun" in program_names(self.prefix)
        probe = run_probe(self._start, f"--runner {runner.name}")
        why = {"slurm": "no srun in the prefix", "nodes": "--hosts names no nodes"}
        self.nodes = runner.hosts or tuple(" ".join(probe["hostlist"]).split()) or ("localhost",)
        super().__init__(
            probe, surroundings_of(probe, runner.name, nodes=len(self.nodes), slurm=self.starts_ranks, why=why)
        )

    def run(self, command: Command) -> Execution:
        """Run a command. Raises CommandError if it cannot be started."""
        prefix = with_ranks(self.prefix, command.ranks, command.nodes) if command.ranks > 1 else self.prefix
        token = uuid.uuid4().hex

        def start(argv: Sequence[str], timeout_s: float, log: Path | None) -> Finished:
            *bash, program = argv
            done = None
            try:
                done = self._start([*bash, f": {token}\n{program}"], timeout_s, log, prefix)
            finally:
                # The end of the launcher may have left the command running on the other side; srun's ends it, and
                # another srun would lead to another place.
                if (done is None or done.status is None) and not self.starts_ranks:
                    self._start(["bash", "-c", _STOP.format(token[:16], token[16:])], STOP_S, None)
            return done

        nodes = self.nodes[: command.nodes] if command.nodes > 1 else ()
        return self.execution(command, start, self.prefix, nodes=nodes)

    def _start(self, argv: Sequence[str], timeout_s: float, log: Path | None, prefix: Sequence[str] = ()) -> Finished:
        return run.execute(command_line(prefix or self.prefix, argv), timeout_s=timeout_s + CONNECT_S, log=log)
