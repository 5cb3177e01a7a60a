"""Run commands in an image: the base class of the sessions of all runners, and the runner `exec:PREFIX`.

This runner puts a prefix before each command. The prefix is a command that starts or enters the image, such as `srun
--container-image=…`, `ssh node` or `env`."""

from __future__ import annotations

import re
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
from imagebuild.core.patterns import data_of
from imagebuild.core.run import Finished

EXEC = "exec:"
"""Start of the value of `--runner exec:PREFIX`. This runner runs each command as `PREFIX COMMAND`."""


class CannotRun(CommandError):
    """The error if a runner cannot run any command in an image, for example because the image has no shell."""


@dataclass(frozen=True)
class Command:
    """A script that `bash -euo pipefail -c` runs in the image, and the conditions under which it runs."""

    script: str
    user: str = "root"
    timeout_s: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    """Number of nodes. The script runs on the first one. `IMAGEBUILD_NODES` contains the names of all nodes, separated
    by blanks, and `user` can log in to each node by ssh without a password."""
    ranks: int = 1
    """Number of processes (MPI ranks) of the command, which srun starts together."""
    log: Path | None = None
    """File for the complete output. None: only the end of the output is kept."""


@dataclass(frozen=True)
class Execution:
    """The outcome of a command."""

    argv: tuple[str, ...]
    """Command line as a person would type it, without secrets."""
    status: int | None
    """Exit status; None if the command was killed or could not be started."""
    output: str
    """The end of standard output and standard error together, also if the command was killed."""
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command, without secrets."""
    problem: str = ""
    """Reason why the command could not be started, such as a missing user; empty if the command was started."""

    @property
    def timed_out(self) -> bool:
        """Return whether the command was killed for exceeding its time limit."""
        return self.status is None and not self.problem


# Facts about the host

PROBE_TIMEOUT_S = 60
FACTS = ("host", "kernel", "machine", "cpus", "memory", "memlock", "driver", "ofed", "os", "job", "hostlist")
"""Names of the facts about the host that are copied unchanged into the results. The script `probe.sh` prints the
facts."""
Probe = Mapping[str, Sequence[str]]
"""Output of the script `probe.sh`: maps the name of each printed fact about the host or image to its values."""
Start = Callable[[Sequence[str], float, Path | None], Finished]
"""Function that runs a program with a time limit in seconds and a log file for the output, and returns how the program
ended."""


def shell_script(name: str) -> str:
    """Return the text of the script `templates/NAME.sh`, which runs in images."""
    return (Path(__file__).with_name("templates") / f"{name}.sh").read_text(encoding="utf-8")


def read_probe(output: str) -> Probe | None:
    """Return the facts in the output of `probe.sh`; None if the output is incomplete. All other lines are skipped."""
    probe: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        name, _, value = line.partition("imagebuild-probe:")[2].partition("=")
        if value.strip():
            probe[name].append(value.strip())
    return probe if "end" in probe else None


def run_probe(start: Start, name: str) -> Probe:
    """Run the script `probe.sh`, and return the facts that it prints about the host and the image.
    Raises CommandError if no command can be run. `name` is the runner or the image that the error message names."""
    done = start(("sh", "-c", shell_script("probe")), PROBE_TIMEOUT_S, None)
    probe = read_probe(done.output)
    if probe is None:
        how = "did not end" if done.status is None else f"ended with exit status {done.status}"
        raise CommandError(f"{name}: the first command {how} and printed: {done.output.strip()[-500:] or 'nothing'}")
    return probe


def surroundings_of(probe: Probe, runner: str, *, nodes: int, slurm: bool, why: Mapping[str, str]) -> Surroundings:
    """Return the surroundings of checks: GPUs, RDMA, nodes and Slurm, with the reason for each that is absent.

    The runner provides `nodes` and `slurm`. `why` contains the runner's reasons for the absence of `gpu`, `nodes` or
    `slurm`."""
    first = {name: values[0] for name, values in probe.items() if values}
    # Output of a launcher may have split a line of the probe.
    gpus = int(first["gpus"]) if re.fullmatch("[0-9]{1,6}", first.get("gpus", "")) else 0
    no_smi = "nvidia-smi, a part of the driver, was not found"
    no_gpu = "nvidia-smi lists no GPU" if "nvidia-smi" in probe["tool"] else no_smi
    absent = {"nodes": nodes < 2, "slurm": not slurm, "gpu": not gpus}
    reasons = {name: reason for name, reason in {"gpu": no_gpu, **why}.items() if absent[name]}
    if not probe["port"]:
        reasons["rdma"] = "no RDMA port in /sys/class/infiniband"
    elif not any("ACTIVE" in port for port in probe["port"]):
        reasons["rdma"] = "no RDMA port is active"
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
"""Exit statuses of `timeout` if the command exceeded its time limit and was ended by SIGTERM or SIGKILL."""
WRAPPER: str = data_of(__file__)["wrapper"]
"""The script that runs a command."""


class Session(ABC):
    """A connection to an image in which commands run, such as a container. Each runner has its own kind of session."""

    lanes = 1
    """Number of commands for one node that can run at the same time without influence on each other, except on their
    speed."""
    node_lanes = 1
    """Number of commands for several nodes that can run at the same time as well."""
    most_nodes = 1
    """Maximum number of nodes of the commands that run at the same time as others."""
    starts_image = True
    """Whether the session itself starts the named image. If not, a check must prove that commands run in the named
    image."""

    def __init__(self, probe: Probe, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.tools = frozenset(probe["tool"])
        self.is_root = "0" in probe["uid"]

    def obstacle(self, command: Command) -> str:
        """Return why this command cannot run in this session; empty if the command can run."""
        changes_user = command.user != self.surroundings.user
        if changes_user and not self.is_root:
            return f"needs the user {command.user}; commands run as {self.surroundings.user} here"
        needed = ("bash", "timeout", *(["setpriv"] if changes_user else []))
        return next((f"the image has no {tool}" for tool in needed if tool not in self.tools), "")

    @abstractmethod
    def run(self, command: Command) -> Execution:
        """Run a command and return its outcome, also if its exit status is not 0.
        Raises CommandError if the runner itself fails."""

    def execution(self, command: Command, start: Start, argv: Iterable[str], nodes: Sequence[str]) -> Execution:
        """Run a command's script with the function `start` and the command's time limit.
        `argv` is the beginning of the command line that the outcome shows: the words before `bash`."""
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
        program = WRAPPER.format(
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
"""Launchers that join their arguments with blanks, and pass the line to a shell on the remote host."""
CONNECT_S = 30
"""Additional seconds for a launcher to start a command: to connect, to start a container, or to wait in a queue."""
STOP_S = 20


def read_prefix(text: str) -> list[str]:
    """Split the prefix of `exec:PREFIX` into words.
    Raises ConfigError if the prefix is empty or a quote is not closed."""
    try:
        prefix = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--runner exec:{text}: {error}; quote the prefix as in a shell") from None
    if not prefix:
        raise ConfigError(
            "--runner exec: the prefix is missing; use `exec:env` if you run imagebuild inside a container of the image"
        )
    return prefix


def command_line(prefix: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the command line of the prefix and `argv`. `argv` is quoted once for each shell that the prefix starts."""
    words = list(argv)
    for word in prefix:
        if PurePath(word).name in JOINING:
            words = [shlex.join(words)]
    return [*prefix, *words]


def run_behind(runner: str, argv: Sequence[str], each_line: Callable[[str], object]) -> None:
    """Run a command with the runner `exec:PREFIX`, without a time limit, and pass on each line that it prints.
    Raises ConfigError for another runner."""
    if not runner.startswith(EXEC):
        raise ConfigError(f"--runner {runner}: unknown runner; use exec:PREFIX")
    run.execute(command_line(read_prefix(runner.removeprefix(EXEC)), argv), each_line=each_line)


def with_ranks(prefix: Sequence[str], ranks: int, nodes: int) -> list[str]:
    """Return the prefix with additional options for srun, to start this number of ranks with PMIx."""
    after = [PurePath(word).name for word in prefix].index("srun") + 1
    options = ["--mpi=pmix", f"--ntasks={ranks}", *([f"--nodes={nodes}"] if nodes > 1 else [])]
    return [*prefix[:after], *options, *prefix[after:]]


class ExecSession(Session):
    """A session of the runner `exec:PREFIX`, which runs each command behind a prefix such as `ssh node`."""

    starts_image = False

    def __init__(self, prefix: Sequence[str], hosts: Sequence[str] = ()) -> None:
        """Run the script `probe.sh` behind the prefix, and keep the facts that it prints.

        `hosts` are the nodes for checks that need several nodes. Commands run on the first node. Raises CommandError if
        no command can be run behind the prefix."""
        self.prefix = prefix
        self.starts_ranks = any(PurePath(word).name == "srun" for word in prefix)
        name = f"{EXEC}{shlex.join(console.redacted_arguments(prefix))}"
        probe = run_probe(self._start, f"--runner {name}")
        why = {"slurm": "the prefix contains no srun", "nodes": "--hosts does not name several nodes"}
        self.nodes = tuple(hosts or " ".join(probe["hostlist"]).split() or ["localhost"])
        super().__init__(probe, surroundings_of(probe, name, nodes=len(self.nodes), slurm=self.starts_ranks, why=why))

    def run(self, command: Command) -> Execution:
        """Run a command and return its outcome. Raises CommandError if the command cannot be started."""
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
                # Stop the command on the remote host, where it may continue after the launcher ends. srun stops its
                # command itself, and a second srun could run on another host.
                if status is None and not self.starts_ranks:
                    self._start(["bash", "-c", shell_script("stop"), "stop", token[:16], token[16:]], STOP_S, None)

        return self.execution(command, start, self.prefix, self.nodes)

    def _start(self, argv: Sequence[str], timeout_s: float, log: Path | None, prefix: Sequence[str] = ()) -> Finished:
        return run.execute(command_line(prefix or self.prefix, argv), timeout_s=timeout_s + CONNECT_S, log=log)
