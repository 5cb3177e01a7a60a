"""Run commands by a prefix: `exec:'srun …'`, `exec:'ssh node'`, `exec:env`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from imagebuild.core import console, run
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import Finished
from imagebuild.verify import runner
from imagebuild.verify.runner import Command, Execution, Host, Runner, Session

JOINING = frozenset({"dbclient", "rsh", "slogin", "ssh"})
"""Launchers that join their arguments with blanks and give the line to a shell on the other side."""
SELF_CLEANING = frozenset({"srun"})
"""Launchers that end what they started when they are ended. A second call of them would lead to another place."""
ENTERING = frozenset({"crun", "docker", "nerdctl", "podman", "runc"})
"""Launchers whose `exec` has the option `--user UID:GID`."""

KEEPING = frozenset({"docker", "kubectl", "nerdctl", "podman"})
"""Launchers whose `exec` hands on the environment of the image."""


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


def with_user(prefix: Sequence[str], account: tuple[int, int, str]) -> list[str] | None:
    """Return the prefix with the option that sets user and group; None if no launcher in it has one.

    The launcher can be anywhere behind ssh: `ssh node docker exec c1`.
    """
    names = program_names(prefix)
    for position, name in enumerate(names):
        if name in ENTERING and "exec" in names[position:]:
            after = names.index("exec", position) + 1
            return [*prefix[:after], "--user", f"{account[0]}:{account[1]}", *prefix[after:]]
    return None


def with_ranks(prefix: Sequence[str], ranks: int, nodes: int) -> list[str] | None:
    """Return the prefix with srun's options for ranks that find each other by PMIx; None if there is no srun in it."""
    names = program_names(prefix)
    if "srun" not in names:
        return None
    after = names.index("srun") + 1
    options = ["--mpi=pmix", f"--ntasks={ranks}", *([f"--nodes={nodes}"] if nodes > 1 else [])]
    return [*prefix[:after], *options, *prefix[after:]]


def as_user(user: str, account: tuple[int, int, str], tools: frozenset[str], program: str) -> tuple[str, ...] | None:
    """Return how root starts a program for bash as another user; None if the image has no tool for that."""
    uid, gid, _ = account
    bash = ("bash", "-c", program)
    ways = {
        "setpriv": ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", *bash),
        "runuser": ("runuser", "-u", user, "--", *bash),
        "su": ("su", user, "-s", "/bin/bash", "-c", program),
    }
    return next((argv for tool, argv in ways.items() if tool in tools), None)


CONNECT_S = 30
"""Seconds on top of a command's time limit, in which the launcher starts it: a connection, a container, a queue."""
SWEEP_S = 20


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
        names = program_names(self.prefix)
        self.has_image_environment = "exec" in names and bool(KEEPING & set(names))
        self.name = f"exec:{shlex.join(console.redacted_arguments(self.prefix))}"

    @contextmanager
    def session(self, reference: str | None = None, layout: Path | None = None) -> Iterator[ExecSession]:  # noqa: ARG002 - the prefix leads to the image
        """Find out what is where the prefix leads. Raises CommandError if nothing can be run there."""
        argv = command_line(self.prefix, ["sh", "-c", runner.PROBE])
        done = run.execute(argv, timeout_s=runner.PROBE_TIMEOUT_S + CONNECT_S)
        host = runner.read_probe(done.output)
        if host is None:
            output = done.output.strip()[-500:] or "nothing"
            how = "did not end" if done.status is None else f"ended with {done.status}"
            raise CommandError(f"--runner {self.name}: the first command {how} and printed: {output}")
        yield ExecSession(self, host)


class ExecSession(Session):
    """Run commands where a prefix leads."""

    def __init__(self, exec_runner: ExecRunner, host: Host) -> None:
        self.prefix: Sequence[str] = exec_runner.prefix
        self.host = host
        inside = "srun" in host.tools and "job" in host.facts
        slurm = inside or "srun" in program_names(self.prefix)
        why = {"slurm": "neither an srun in an allocation nor one in the prefix", "nodes": "--hosts names no nodes"}
        self.nodes = exec_runner.hosts or tuple(self.host.facts.get("hostlist", "").split()) or ("localhost",)
        self.facilities = host.facilities(nodes=len(self.nodes), slurm=slurm, why=why)

    def obstacle(self, command: Command) -> str:
        """Return why this command cannot run here at all; empty if it can."""
        if problem := super().obstacle(command):
            return problem
        if self._argv(command, "") is None:
            if self.host.uid:
                return f"needs the user {command.user}; commands run as {self.host.user} here"
            return "the image has no setpriv, runuser or su to change the user with"
        return ""

    def run(self, command: Command) -> Execution:
        """Run a command. Raises CommandError if it cannot be started."""
        # Where the prefix does not start ranks, srun does so from inside.
        inside = command.ranks > 1 and "srun" not in program_names(self.prefix)
        launcher = (with_ranks(["srun"], command.ranks, command.nodes) if inside else None) or ()

        def start(program: str, token: str) -> Finished:
            argv, sweep = self._argv(command, program), self._argv(command, runner.sweep_script(token))
            assert argv, self.obstacle(command)
            assert sweep
            done = None
            try:
                done = run.execute(argv, timeout_s=command.timeout_s + runner.GRACE_S + CONNECT_S, log=command.log)
            finally:
                if (done is None or done.status is None) and not SELF_CLEANING & set(program_names(self.prefix)):
                    # The end of the launcher may have left the command running on the other side.
                    run.execute(sweep, timeout_s=SWEEP_S)
            return done

        nodes = self.nodes[: command.nodes] if command.nodes > 1 else ()
        return self.execution(command, start, self.prefix, nodes=nodes, launcher=launcher)

    def _argv(self, command: Command, program: str) -> list[str] | None:
        """Return what starts a program for bash as the command's user; None if nothing can."""
        prefix = self.prefix
        if command.ranks > 1:
            prefix = with_ranks(prefix, command.ranks, command.nodes) or prefix
        plain = ("bash", "-c", program)
        if command.user == self.host.user:
            return command_line(prefix, plain)
        account = self.host.accounts.get(command.user)
        if account and (changed := with_user(prefix, account)) is not None:
            return command_line(changed, plain)
        if account and self.host.uid == 0:
            argv = as_user(command.user, account, self.host.tools, program)
            return command_line(prefix, argv) if argv else None
        return None
