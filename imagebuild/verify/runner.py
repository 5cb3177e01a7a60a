"""Run commands in an image that is ready for them, or by a prefix: `exec:'srun …'`, `exec:'ssh node'`, `exec:env`."""

from __future__ import annotations

import shlex
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from imagebuild.bench.verification import Surroundings
from imagebuild.core import console, run
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import Finished

EXEC = "exec:"
"""Beginning of the names of runners that a prefix leads to."""


class CannotRun(CommandError):
    """Report that this runner can run nothing in this image: for example, it has no shell."""


@dataclass(frozen=True)
class Command:
    """Describe what `bash -euo pipefail -c` runs in the image."""

    script: str
    user: str = "root"
    timeout_s: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    """It runs on the first and finds all names in `IMAGEBUILD_NODES`, separated by blanks; the others answer ssh to
    `user` without a password."""
    ranks: int = 1
    """Number of processes that srun starts together."""
    log: Path | None = None
    """File for the whole output; without it, only the end is kept."""


@dataclass(frozen=True)
class Execution:
    """Hold the outcome of a command."""

    argv: tuple[str, ...]
    """Command line as someone would type it, without secrets."""
    status: int | None
    """None if the command was killed or could not be started."""
    output: str
    """End of standard output and standard error together, also of a command that was killed."""
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command was given, without secrets."""
    problem: str = ""
    """What went wrong, other than the time limit: no such user, or nodes that did not start."""

    @property
    def timed_out(self) -> bool:
        """Return whether the command was killed for exceeding its time limit."""
        return self.status is None and not self.problem


# What a host has

PROBE_TIMEOUT_S = 60
FACTS = ("host", "kernel", "machine", "cpus", "memory", "memlock", "driver", "os", "job", "hostlist")
"""Names of the probe's facts that are kept as they are."""
Probe = Mapping[str, Sequence[str]]
"""Name of a fact → its values."""
Start = Callable[[Sequence[str], float, Path | None], Finished]
"""Runs a program for at most so many seconds, with a log of its output, and returns how it ended."""


def shell_script(name: str) -> str:
    """Return the text of a script that is run in images."""
    return (Path(__file__).with_name("templates") / f"{name}.sh").read_text(encoding="utf-8")


def read_probe(output: str) -> Probe | None:
    """Read what the probe printed, whatever else was printed between. Return None if it did not reach its end."""
    probe: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        name, _, value = line.partition("imagebuild-probe:")[2].partition("=")
        if value.strip():
            probe[name].append(value.strip())
    return probe if "end" in probe else None


def run_probe(start: Start, name: str) -> Probe:
    """Find out what there is. Raises CommandError, with the runner's or the image's name, if nothing can be run."""
    done = start(("sh", "-c", shell_script("probe")), PROBE_TIMEOUT_S, None)
    probe = read_probe(done.output)
    if probe is None:
        how = "did not end" if done.status is None else f"ended with {done.status}"
        raise CommandError(f"{name}: the first command {how} and printed: {done.output.strip()[-500:] or 'nothing'}")
    return probe


def surroundings_of(probe: Probe, runner: str, *, nodes: int, slurm: bool, why: Mapping[str, str]) -> Surroundings:
    """Return what checks may need, with the nodes and Slurm that the runner knows of.

    `why` gives the runner's reasons for what may be absent: `gpu`, `nodes`, `slurm`.
    """
    first = {name: values[0] for name, values in probe.items() if values}
    # What a launcher prints between may have cut a line in two.
    gpus = int(first["gpus"]) if first.get("gpus", "").isdigit() else 0
    no_gpu = "nvidia-smi lists no GPU" if "nvidia-smi" in probe["tool"] else "no nvidia-smi, which a driver brings"
    absent = {"nodes": nodes < 2, "slurm": not slurm, "gpu": not gpus}
    reasons = {name: reason for name, reason in {"gpu": no_gpu, **why}.items() if absent[name]}
    if not probe["port"]:
        reasons["rdma"] = "no port in /sys/class/infiniband"
    elif not any("ACTIVE" in port for port in probe["port"]):
        reasons["rdma"] = "no port is active"
    elif not probe["verbs"]:
        reasons["rdma"] = "no /dev/infiniband/uverbs* in the container"
    return Surroundings(
        runner=runner, gpus=gpus, rdma="rdma" not in reasons, nodes=nodes, slurm=slurm, why=reasons,
        user=first.get("user") or first.get("uid", ""),
        facts={name: first[name].strip('"') for name in FACTS if name in first},
    )  # fmt: skip


# How commands run

GRACE_S = 5
"""Seconds between SIGTERM and SIGKILL."""
LATE = (124, 137)
"""Exit statuses of `timeout` for a command that exceeded its time limit: ended by SIGTERM, or by SIGKILL."""
# `timeout` makes a group of processes, which ends with the command: what it started in the background, too.
# The exit status is the script's, or one of LATE.
_WRAPPER = """\
exec 2> /dev/null
{account}cd /
{exports}timeout -k {grace} {seconds:g} {start}bash -euo pipefail -c {script} < /dev/null 2>&1 &
trap 'kill $!; wait $!' TERM HUP INT
wait $!
status=$?
kill -KILL -- -$!
exit "$status"
"""


class Session(ABC):
    """Run commands in an image that is ready for them."""

    starts_image = True
    """Whether the image that was named runs itself; if not, that has to be proven."""

    def __init__(self, probe: Probe, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.tools = frozenset(probe["tool"])
        self.is_root = "0" in probe["uid"]

    def obstacle(self, command: Command) -> str:
        """Return why this command cannot run here at all; empty if it can."""
        changes_user = command.user != self.surroundings.user
        if changes_user and not self.is_root:
            return f"needs the user {command.user}; commands run as {self.surroundings.user} here"
        needed = ("bash", "timeout", *(["setpriv"] if changes_user else []))
        return next((f"the image has no {tool}" for tool in needed if tool not in self.tools), "")

    @abstractmethod
    def run(self, command: Command) -> Execution:
        """Run a command. A non-zero status is a result; raises CommandError if the runner itself fails."""

    def execution(self, command: Command, start: Start, argv: Iterable[str], nodes: Sequence[str]) -> Execution:
        """Run a command's script under its time limit by `start`; `argv` is what people type before bash."""
        environment = {"LC_ALL": "C.UTF-8", **command.environment}
        if command.nodes > 1:
            environment["IMAGEBUILD_NODES"] = " ".join(nodes[: command.nodes])
        user, no_user = shlex.quote(command.user), f"the image has no user {command.user!r}"
        as_other: tuple[str, ...] = ()
        account = "" if command.user.isdigit() else f"export USER={user} HOME=~{user}\n"
        if command.user != self.surroundings.user:
            as_other = ("setpriv", f"--reuid={user}", f"--regid=$(id -g {user})", "--init-groups")
            account = f"id -u {user} > /dev/null || {{ echo {shlex.quote(no_user)}; exit 1; }}\n{account}"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        program = _WRAPPER.format(
            account=account, exports=exports, grace=GRACE_S, seconds=command.timeout_s,
            start="".join(f"{word} " for word in as_other), script=shlex.quote(command.script),
        )  # fmt: skip
        began = time.monotonic()
        done = start(("bash", "-c", program), command.timeout_s + GRACE_S, command.log)
        seconds = time.monotonic() - began
        late = done.status in LATE and seconds >= command.timeout_s
        return Execution(
            argv=console.redacted_arguments([*argv, *as_other, "bash", "-euo", "pipefail", "-c", command.script]),
            status=None if late else done.status,
            output=done.output,
            seconds=seconds,
            environment={name: console.redacted_text(value) for name, value in environment.items()},
            problem=no_user if done.output.strip() == no_user else "",
        )


# Prefixes

JOINING = frozenset({"dbclient", "rsh", "slogin", "ssh"})
"""Launchers that join their arguments with blanks and give the line to a shell on the other side."""
CONNECT_S = 30
"""Seconds on top of a command's time limit, in which the launcher starts it: a connection, a container, a queue."""
STOP_S = 20


def read_prefix(text: str) -> list[str]:
    """Return the words of what follows `exec:`. Raises ConfigError if there are none, or if quotes do not match."""
    try:
        prefix = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--runner exec:{text}: {error}; quote the prefix as a shell does") from None
    if not prefix:
        raise ConfigError("--runner exec: needs a prefix; `exec:env` runs checks here, inside a container already")
    return prefix


def command_line(prefix: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the command line that makes `argv` arrive unchanged: quoted once for every shell on the way."""
    words = list(argv)
    for word in prefix:
        if PurePath(word).name in JOINING:
            words = [shlex.join(words)]
    return [*prefix, *words]


def with_ranks(prefix: Sequence[str], ranks: int, nodes: int) -> list[str]:
    """Return a prefix that has an srun with the options for ranks that find each other by PMIx."""
    after = [PurePath(word).name for word in prefix].index("srun") + 1
    options = ["--mpi=pmix", f"--ntasks={ranks}", *([f"--nodes={nodes}"] if nodes > 1 else [])]
    return [*prefix[:after], *options, *prefix[after:]]


class ExecSession(Session):
    """Run commands where a prefix leads."""

    starts_image = False

    def __init__(self, prefix: Sequence[str], hosts: Sequence[str] = ()) -> None:
        """Find out what is there. `hosts` are nodes of checks that use several; the prefix leads to the first.

        Raises CommandError if nothing can be run there.
        """
        self.prefix = prefix
        self.starts_ranks = any(PurePath(word).name == "srun" for word in prefix)
        name = f"{EXEC}{shlex.join(console.redacted_arguments(prefix))}"
        probe = run_probe(self._start, f"--runner {name}")
        why = {"slurm": "no srun in the prefix", "nodes": "--hosts names no nodes"}
        self.nodes = tuple(hosts or " ".join(probe["hostlist"]).split() or ["localhost"])
        super().__init__(probe, surroundings_of(probe, name, nodes=len(self.nodes), slurm=self.starts_ranks, why=why))

    def run(self, command: Command) -> Execution:
        """Run a command. Raises CommandError if it cannot be started."""
        prefix = with_ranks(self.prefix, command.ranks, command.nodes) if command.ranks > 1 else self.prefix
        token = uuid.uuid4().hex

        def start(argv: Sequence[str], timeout_s: float, log: Path | None) -> Finished:
            *bash, program = argv
            status = None
            try:
                done = self._start([*bash, f": {token}\n{program}"], timeout_s, log, prefix)
                status = done.status
                return done
            finally:
                # The end of the launcher may have left the command running on the other side; srun's ends it, and
                # another srun would lead to another place.
                if status is None and not self.starts_ranks:
                    self._start(["bash", "-c", shell_script("stop"), "stop", token[:16], token[16:]], STOP_S, None)

        return self.execution(command, start, self.prefix, self.nodes)

    def _start(self, argv: Sequence[str], timeout_s: float, log: Path | None, prefix: Sequence[str] = ()) -> Finished:
        return run.execute(command_line(prefix or self.prefix, argv), timeout_s=timeout_s + CONNECT_S, log=log)
