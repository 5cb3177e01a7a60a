"""The runner `exec:PREFIX`: any words that start a command in an image, or none, inside a container already."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from imagebuild import redact
from imagebuild.errors import CommandError, ConfigError
from imagebuild.needs import Facilities
from imagebuild.runners import launchers, probe, process, script
from imagebuild.runners.base import Command, Execution, Place
from imagebuild.runners.sink import Sink

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
        return f"exec:{shlex.join(redact.arguments(self.prefix))}"

    @contextmanager
    def session(self, image: str) -> Iterator[ExecSession]:  # noqa: ARG002 - the prefix says where the image is
        """Find out what is there. Raises CommandError if nothing can be run."""
        argv = launchers.command_line(self.prefix, ["sh", "-c", probe.PROGRAM])
        with Sink(None) as sink:
            status = process.run(argv, sink, probe.TIMEOUT_S + CONNECT_S)
        told = probe.read(sink.text)
        if told is None:
            said = sink.text.strip()[-500:] or "nothing"
            how = "did not end" if status is None else f"ended with {status}"
            raise CommandError(f"--runner {self.name}: a first command {how} and printed: {said}")
        yield ExecSession(self, told)


class ExecSession:
    """A place that the prefix leads to."""

    def __init__(self, runner: ExecRunner, told: dict[str, list[str]]) -> None:
        self.runner = runner
        self.place: Place = probe.place(told)
        by_srun = launchers.with_ranks(runner.prefix, 1, 1) is not None
        slurm = by_srun or bool("srun" in self.place.tools and self.place.facts.get("job"))
        why = {"slurm": "no srun in an allocation, and the prefix has none", "nodes": "--hosts names none"}
        self.nodes = runner.hosts or tuple(self.place.facts.get("hostlist", "").split()) or ("localhost",)
        self.facilities: Facilities = probe.facilities(told, nodes=len(self.nodes), slurm=slurm, why=why)

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
        program = script.wrapped(
            command.script, token=token, timeout_s=command.timeout_s, environment=given, start=self._inner(command)
        )
        argv = self._line(command, program)
        assert argv, self.obstacle(command)
        began = time.monotonic()
        status: int | None = None
        with Sink(command.log) as sink:
            try:
                status = process.run(argv, sink, command.timeout_s + script.GRACE_S + CONNECT_S)
            finally:
                if status is None:
                    self._sweep(command, token)
        seconds = time.monotonic() - began
        late = status == script.LATE and seconds >= command.timeout_s
        return Execution(
            argv=self._evidence(command),
            status=None if late else status,
            output=sink.text,
            seconds=seconds,
            environment=redact.environment(given),
            problem=sink.reason,
        )

    def _line(self, command: Command, program: str) -> list[str] | None:
        """What starts a program for bash as the command's user; `None` if nothing can."""
        prefix: Sequence[str] = self.runner.prefix
        if command.ranks > 1:
            prefix = launchers.with_ranks(prefix, command.ranks, command.nodes) or prefix
        plain = ("bash", "-c", program)
        if command.user == self.place.user:
            return launchers.command_line(prefix, plain)
        account = self.place.accounts.get(command.user)
        if account and (changed := launchers.with_user(prefix, command.user, account)) is not None:
            return launchers.command_line(changed, plain)
        if account and self.place.uid == 0:
            argv = script.as_user(command.user, account, self.place.tools, program)
            return launchers.command_line(prefix, argv) if argv else None
        return None

    def _inner(self, command: Command) -> tuple[str, ...]:
        """What starts ranks from inside the place, where the prefix does not."""
        if command.ranks == 1 or launchers.with_ranks(self.runner.prefix, command.ranks, command.nodes):
            return ()
        return ("srun", *launchers.srun_options(command.ranks, command.nodes))

    def _environment(self, command: Command) -> Mapping[str, str]:
        _, _, home = self.place.accounts.get(command.user, (0, 0, "/root"))
        given = {"LC_ALL": "C.UTF-8", "HOME": home, "USER": command.user, **command.environment}
        if command.nodes > 1:
            given["IMAGEBUILD_NODES"] = " ".join(self.nodes[: command.nodes])
        return given

    def _evidence(self, command: Command) -> tuple[str, ...]:
        words = [*self.runner.prefix, *self._inner(command), "bash", "-euo", "pipefail", "-c", command.script]
        return redact.arguments(words)

    def _sweep(self, command: Command, token: str) -> None:
        """End on the other side what the end of the launcher may have left there."""
        if launchers.cleans_up(self.runner.prefix):
            return
        argv = self._line(command, script.sweep(token))
        assert argv
        with Sink(None) as sink:
            process.run(argv, sink, SWEEP_S)
