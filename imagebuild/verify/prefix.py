"""Run commands by a prefix: `exec:'srun …'`, `exec:'ssh node'`, `exec:''`."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

from imagebuild.core import console, run
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import OutputSink
from imagebuild.project.component import Facilities
from imagebuild.verify import runner
from imagebuild.verify.runner import Command, Execution, HostFacts, Probe

JOINING = frozenset({"dbclient", "rsh", "slogin", "ssh"})
"""Launchers that join their arguments with blanks and give the line to a shell on the other side."""
SELF_CLEANING = frozenset({"srun"})
"""Launchers that end what they started when they are ended. A second call of them would lead to another place."""


TAKES_NUMBERS = {"crun": True, "docker": False, "nerdctl": False, "podman": False, "runc": True}
"""Launcher with `exec --user` → whether it takes `UID:GID` instead of a name."""


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


def with_user(prefix: Sequence[str], user: str, account: tuple[int, int, str]) -> list[str] | None:
    """Return the prefix with the option that sets the user; None if no launcher in it has one.

    The launcher can be anywhere behind ssh: `ssh node docker exec c1`.
    """
    names = program_names(prefix)
    for position, name in enumerate(names):
        if name in TAKES_NUMBERS and "exec" in names[position:]:
            after = names.index("exec", position) + 1
            value = f"{account[0]}:{account[1]}" if TAKES_NUMBERS[name] else user
            return [*prefix[:after], "--user", value, *prefix[after:]]
    return None


def with_ranks(prefix: Sequence[str], ranks: int, nodes: int) -> list[str] | None:
    """Return the prefix with srun's options for several ranks; None if there is no srun in it."""
    names = program_names(prefix)
    if "srun" not in names:
        return None
    after = names.index("srun") + 1
    return [*prefix[:after], *srun_options(ranks, nodes), *prefix[after:]]


def srun_options(ranks: int, nodes: int) -> list[str]:
    """Return options that start ranks which find each other through PMIx."""
    return ["--mpi=pmix", f"--ntasks={ranks}", *([f"--nodes={nodes}"] if nodes > 1 else [])]


CONNECT_S = 30
"""Seconds on top of a command's time limit, in which the launcher starts it: a connection, a container, a queue."""
SWEEP_S = 20


@dataclass(frozen=True)
class ExecRunner:
    """Start commands by a prefix: `exec:'srun --container-image=…'`, `exec:'ssh node'`, `exec:''`."""

    prefix: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    """Nodes of checks that use several; the prefix leads to the first."""
    one_host: bool = False

    @classmethod
    def parse(cls, text: str, hosts: Sequence[str] = ()) -> ExecRunner:
        """Read what follows `exec:`. Raises ConfigError if its quotes do not match."""
        try:
            return cls(tuple(shlex.split(text)), tuple(hosts))
        except ValueError as error:
            raise ConfigError(f"--runner exec:{text}: {error}; quote the prefix as a shell does") from None

    @property
    def name(self) -> str:
        """Return the runner as `--runner` names it; secrets are blanked."""
        return f"exec:{shlex.join(console.redacted_arguments(self.prefix))}"

    @contextmanager
    def session(self, reference: str | None = None, layout: Path | None = None) -> Iterator[ExecSession]:  # noqa: ARG002 - the prefix leads to the image
        """Find out what is where the prefix leads. Raises CommandError if nothing can be run there."""
        argv = command_line(self.prefix, ["sh", "-c", runner.PROBE])
        with OutputSink(None) as sink:
            status = run.run_with_deadline(argv, sink, runner.PROBE_TIMEOUT_S + CONNECT_S)
        probe = runner.read_probe(sink.text)
        if probe is None:
            output = sink.text.strip()[-500:] or "nothing"
            how = "did not end" if status is None else f"ended with {status}"
            raise CommandError(f"--runner {self.name}: the first command {how} and printed: {output}")
        yield ExecSession(self, probe)

    def archive(self, reference: str | None) -> None:
        """Return None: a prefix starts commands and reads no images."""


class ExecSession:
    """Run commands where a prefix leads."""

    def __init__(self, exec_runner: ExecRunner, probe: Probe) -> None:
        self.prefix: Sequence[str] = exec_runner.prefix
        self.host: HostFacts = runner.host_facts(probe)
        prefix_has_srun = with_ranks(self.prefix, 1, 1) is not None
        slurm = prefix_has_srun or bool("srun" in self.host.tools and self.host.facts.get("job"))
        why = {"slurm": "no srun in an allocation, and the prefix has none", "nodes": "--hosts names none"}
        self.nodes = exec_runner.hosts or tuple(self.host.facts.get("hostlist", "").split()) or ("localhost",)
        self.facilities: Facilities = runner.probed_facilities(probe, nodes=len(self.nodes), slurm=slurm, why=why)

    def obstacle(self, command: Command) -> str:
        """Return why this command cannot run here at all; empty if it can."""
        if "bash" not in self.host.tools:
            return "the image has no bash"
        if command.user not in self.host.accounts and command.user != self.host.user:
            return f"the image has no user {command.user}"
        if self._argv(command, "") is None:
            if self.host.uid:
                return f"needs the user {command.user}; commands run as {self.host.user} here"
            return "the image has no setpriv, runuser or su to change the user with"
        return ""

    def run(self, command: Command) -> Execution:
        """Run a command. Raises CommandError if it cannot be started."""
        _, _, home = self.host.accounts.get(command.user, (0, 0, "/root"))
        environment = runner.command_environment(command, home)
        if command.nodes > 1:
            environment["IMAGEBUILD_NODES"] = " ".join(self.nodes[: command.nodes])
        # Where the prefix does not start ranks, srun does so from inside.
        launcher: list[str] = []
        if command.ranks > 1 and with_ranks(self.prefix, command.ranks, command.nodes) is None:
            launcher = ["srun", *srun_options(command.ranks, command.nodes)]
        token = uuid.uuid4().hex
        program = runner.wrapped_script(
            command.script, token=token, timeout_s=command.timeout_s, environment=environment, launcher=launcher
        )
        argv = self._argv(command, program)
        assert argv, self.obstacle(command)
        began = time.monotonic()
        status: int | None = None
        with OutputSink(command.log) as sink:
            try:
                status = run.run_with_deadline(argv, sink, command.timeout_s + runner.GRACE_S + CONNECT_S)
            finally:
                if status is None and not SELF_CLEANING & set(program_names(self.prefix)):
                    # The end of the launcher may have left the command running on the other side.
                    sweep = self._argv(command, runner.sweep_script(token))
                    assert sweep
                    with OutputSink(None) as ignored:
                        run.run_with_deadline(sweep, ignored, SWEEP_S)
        evidence = [*self.prefix, *launcher, "bash", "-euo", "pipefail", "-c", command.script]
        return runner.finished_execution(
            command, evidence, environment, status=status, sink=sink, seconds=time.monotonic() - began
        )

    def _argv(self, command: Command, program: str) -> list[str] | None:
        """Return what starts a program for bash as the command's user; None if nothing can."""
        prefix = self.prefix
        if command.ranks > 1:
            prefix = with_ranks(prefix, command.ranks, command.nodes) or prefix
        plain = ("bash", "-c", program)
        if command.user == self.host.user:
            return command_line(prefix, plain)
        account = self.host.accounts.get(command.user)
        if account and (changed := with_user(prefix, command.user, account)) is not None:
            return command_line(changed, plain)
        if account and self.host.uid == 0:
            argv = runner.as_user(command.user, account, self.host.tools, program)
            return command_line(prefix, argv) if argv else None
        return None
