"""Run commands by a prefix: `exec:'srun …'`, `exec:'ssh node'`, `exec:''`."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath

from imagebuild.core import console, run
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import OutputSink, run_with_deadline
from imagebuild.project.component import Facilities
from imagebuild.verify import runner as verify_runner
from imagebuild.verify.runner import GRACE_S, Command, Execution, HostFacts, as_user, facilities, place, sweep, wrapped

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


CONNECT_S = 30
"""On top of a command's time, for the launcher to start it: a connection, a container, a place in a queue."""
SWEEP_S = 20


@dataclass(frozen=True)
class ExecRunner:
    """Commands are started by a prefix: `exec:'srun --container-image=…'`, `exec:'ssh node'`, `exec:''`."""

    prefix: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    """Nodes of checks that use several; the first is where the prefix leads."""

    @classmethod
    def parse(cls, text: str, hosts: Sequence[str] = ()) -> ExecRunner:
        """Read what follows `exec:`. Raises ConfigError if its quotes do not match."""
        try:
            return cls(tuple(shlex.split(text)), tuple(hosts))
        except ValueError as error:
            raise ConfigError(f"--runner exec:{text}: {error}") from None

    @property
    def name(self) -> str:
        return f"exec:{shlex.join(console.redacted_arguments(self.prefix))}"

    @contextmanager
    def session(self, image: str) -> Iterator[ExecSession]:  # noqa: ARG002 - the prefix says where the image is
        """Find out what is there. Raises CommandError if nothing can be run."""
        argv = command_line(self.prefix, ["sh", "-c", verify_runner.PROGRAM])
        with OutputSink(None) as sink:
            status = run.run_with_deadline(argv, sink, verify_runner.TIMEOUT_S + CONNECT_S)
        told = verify_runner.read(sink.text)
        if told is None:
            said = sink.text.strip()[-500:] or "nothing"
            how = "did not end" if status is None else f"ended with {status}"
            raise CommandError(f"--runner {self.name}: a first command {how} and printed: {said}")
        yield ExecSession(self, told)


class ExecSession:
    """A place that the prefix leads to."""

    def __init__(self, runner: ExecRunner, told: dict[str, list[str]]) -> None:
        self.runner = runner
        self.place: HostFacts = place(told)
        by_srun = with_ranks(runner.prefix, 1, 1) is not None
        slurm = by_srun or bool("srun" in self.place.tools and self.place.facts.get("job"))
        why = {"slurm": "no srun in an allocation, and the prefix has none", "nodes": "--hosts names none"}
        self.nodes = runner.hosts or tuple(self.place.facts.get("hostlist", "").split()) or ("localhost",)
        self.facilities: Facilities = facilities(told, nodes=len(self.nodes), slurm=slurm, why=why)

    def obstacle(self, command: Command) -> str:
        """Why this command cannot be run here at all."""
        if "bash" not in self.place.tools:
            return "the image has no bash"
        if command.user not in self.place.accounts and command.user != self.place.user:
            return f"the image has no user {command.user}"
        if self._line(command, "") is None:
            if self.place.uid:
                return f"needs the user {command.user}; commands run as {self.place.user} here"
            return "the image has no setpriv, runuser or su to change the user with"
        return ""

    def run(self, command: Command) -> Execution:
        """Run a command. Raises CommandError if it cannot be started."""
        token = uuid.uuid4().hex
        given = self._environment(command)
        program = wrapped(
            command.script, token=token, timeout_s=command.timeout_s, environment=given, start=self._inner(command)
        )
        argv = self._line(command, program)
        assert argv, self.obstacle(command)
        began = time.monotonic()
        status: int | None = None
        with OutputSink(command.log) as sink:
            try:
                status = run_with_deadline(argv, sink, command.timeout_s + GRACE_S + CONNECT_S)
            finally:
                if status is None:
                    self._sweep(command, token)
        seconds = time.monotonic() - began
        late = status == verify_runner.LATE and seconds >= command.timeout_s
        return Execution(
            argv=self._evidence(command),
            status=None if late else status,
            output=sink.text,
            seconds=seconds,
            environment=console.redacted_environment(given),
            problem=sink.reason,
        )

    def _line(self, command: Command, program: str) -> list[str] | None:
        """What starts a program for bash as the command's user; `None` if nothing can."""
        prefix: Sequence[str] = self.runner.prefix
        if command.ranks > 1:
            prefix = with_ranks(prefix, command.ranks, command.nodes) or prefix
        plain = ("bash", "-c", program)
        if command.user == self.place.user:
            return command_line(prefix, plain)
        account = self.place.accounts.get(command.user)
        if account and (changed := with_user(prefix, command.user, account)) is not None:
            return command_line(changed, plain)
        if account and self.place.uid == 0:
            argv = as_user(command.user, account, self.place.tools, program)
            return command_line(prefix, argv) if argv else None
        return None

    def _inner(self, command: Command) -> tuple[str, ...]:
        """What starts ranks from inside the place, where the prefix does not."""
        if command.ranks == 1 or with_ranks(self.runner.prefix, command.ranks, command.nodes):
            return ()
        return ("srun", *srun_options(command.ranks, command.nodes))

    def _environment(self, command: Command) -> Mapping[str, str]:
        _, _, home = self.place.accounts.get(command.user, (0, 0, "/root"))
        given = {"LC_ALL": "C.UTF-8", "HOME": home, "USER": command.user, **command.environment}
        if command.nodes > 1:
            given["IMAGEBUILD_NODES"] = " ".join(self.nodes[: command.nodes])
        return given

    def _evidence(self, command: Command) -> tuple[str, ...]:
        words = [*self.runner.prefix, *self._inner(command), "bash", "-euo", "pipefail", "-c", command.script]
        return console.redacted_arguments(words)

    def _sweep(self, command: Command, token: str) -> None:
        """End on the other side what the end of the launcher may have left there."""
        if cleans_up(self.runner.prefix):
            return
        argv = self._line(command, sweep(token))
        assert argv
        with OutputSink(None) as sink:
            run_with_deadline(argv, sink, SWEEP_S)
