"""Define what a runner is, how it learns what a host has, and the bash program that commands run under."""

from __future__ import annotations

import shlex
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.core import console
from imagebuild.core.errors import CommandError
from imagebuild.core.run import Finished
from imagebuild.oci.image import FoundImage
from imagebuild.project.records import Surroundings

EXEC = "exec:"
"""Beginning of the names of runners that a prefix leads to."""


class CannotRun(CommandError):
    """Report that this runner can run nothing in this image: for example, it has no shell."""


@dataclass(frozen=True)
class Command:
    """Describe what to run in the image."""

    script: str
    """Script for `bash -euo pipefail -c`."""
    user: str = "root"
    timeout_s: float = 60
    """Seconds after which the command and its children are killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    """Number of nodes that it uses. It runs on the first and finds all names in `IMAGEBUILD_NODES`, separated by
    blanks; the others answer ssh to `user` without a password."""
    ranks: int = 1
    """Number of processes that srun starts together."""
    log: Path | None = None
    """File for the whole output; without it, only the end is kept."""


@dataclass(frozen=True)
class Execution:
    """Hold the outcome of a command."""

    argv: tuple[str, ...]
    """Command line as someone would type it, kept as evidence; secrets are blanked."""
    status: int | None
    """Exit status; None if the command was killed or could not be started."""
    output: str
    """End of standard output and standard error together, also of a command that was killed."""
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command was given; secrets are blanked."""
    problem: str = ""
    """What went wrong, other than the time limit: too much output, no such user, or nodes that did not start."""

    @property
    def timed_out(self) -> bool:
        """Return whether the command was killed for exceeding its time limit."""
        return self.status is None and not self.problem


# What a host has

TOOLS = ("bash", "nvidia-smi", "setpriv", "ssh", "ssh-keygen", "sshd", "timeout")
PROBE_TIMEOUT_S = 60
PROBE_PREFIX = "imagebuild-probe:"
PROBE = f"""\
PATH="$PATH:/usr/sbin:/sbin"
fact() {{ echo "{PROBE_PREFIX}$1=$2"; }}
fact uid "$(id -u 2>/dev/null)"
fact user "$(id -un 2>/dev/null)"
for tool in {" ".join(TOOLS)}; do
  command -v "$tool" > /dev/null 2>&1 && fact tool "$tool"
done
fact gpus "$(timeout 40 nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
for state in /sys/class/infiniband/*/ports/*/state; do
  [ -r "$state" ] && fact port "$state $(cat "$state")"
done
for device in /dev/infiniband/uverbs*; do
  [ -e "$device" ] && fact verbs "$device"
done
fact memlock "$(ulimit -l 2>/dev/null)"
fact job "$SLURM_JOB_ID"
fact hostlist "$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | tr '\\n' ' ')"
fact host "$(uname -n 2>/dev/null)"
fact kernel "$(uname -r 2>/dev/null)"
fact machine "$(uname -m 2>/dev/null)"
fact cpus "$(nproc 2>/dev/null)"
fact memory "$(sed -n 's/^MemTotal: *//p' /proc/meminfo 2>/dev/null)"
fact driver "$(sed -n 's/^NVRM version: *//p' /proc/driver/nvidia/version 2>/dev/null)"
fact os "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null)"
fact end .
"""
"""Program for sh that prints what a host has, a line `PROBE_PREFIX NAME=VALUE` for each fact."""
FACTS = ("host", "kernel", "machine", "cpus", "memory", "memlock", "driver", "os", "job", "hostlist")
"""Names of the probe's facts that are kept as they are."""
Probe = Mapping[str, Sequence[str]]
"""Name of a fact → its values."""
Start = Callable[[Sequence[str], float, Path | None], Finished]
"""Runs a program for at most so many seconds, with a log of its output, and returns how it ended."""


def read_probe(output: str) -> Probe | None:
    """Read what the probe printed, whatever else was printed between. Return None if it did not reach its end."""
    probe: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        name, _, value = line.partition(PROBE_PREFIX)[2].partition("=")
        if value.strip():
            probe[name].append(value.strip())
    return probe if "end" in probe else None


def run_probe(start: Start, name: str) -> Probe:
    """Find out what there is. Raises CommandError, with the runner's or the image's name, if nothing can be run."""
    done = start(("sh", "-c", PROBE), PROBE_TIMEOUT_S, None)
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
    absent = {"nodes": nodes < 2, "slurm": not slurm, "gpu": not gpus}
    reasons = {name: reason for name, reason in why.items() if absent[name]}
    if not gpus and "gpu" not in reasons:
        has_program = "nvidia-smi" in probe["tool"]
        reasons["gpu"] = "nvidia-smi lists no GPU" if has_program else "no nvidia-smi, which a driver brings"
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


def wrapped_script(command: Command, environment: Mapping[str, str], *, changes_user: bool) -> str:
    """Return a program for bash that runs a command's script as its user, under its time limit.

    Its exit status is the script's, or one of LATE.
    """
    user = shlex.quote(command.user)
    account = "" if command.user.isdigit() else f"export USER={user} HOME=~{user}\n"
    if changes_user:
        account = f"id -u {user} > /dev/null || {{ echo {shlex.quote(_no_user(command))}; exit 1; }}\n{account}"
    return _WRAPPER.format(
        account=account,
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()),
        grace=GRACE_S,
        seconds=command.timeout_s,
        start="".join(f"{word} " for word in as_user(user)) if changes_user else "",
        script=shlex.quote(command.script),
    )


def as_user(user: str) -> tuple[str, ...]:
    """Return the words, for a shell, by which root starts a program as another user."""
    return ("setpriv", f"--reuid={user}", f"--regid=$(id -g {user})", "--init-groups")


def _no_user(command: Command) -> str:
    return f"the image has no user {command.user!r}"


class Session(ABC):
    """Run commands in an image that is ready for them."""

    def __init__(self, probe: Probe, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        """What checks may need."""
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

    def execution(self, command: Command, start: Start, argv: Iterable[str], *, nodes: Sequence[str] = ()) -> Execution:
        """Run a command's script under its time limit, and return the outcome; `nodes` are those it uses, if several.

        `start` runs a program; `argv` is what people type before bash.
        """
        environment = {"LC_ALL": "C.UTF-8", **command.environment}
        if nodes:
            environment["IMAGEBUILD_NODES"] = " ".join(nodes)
        changes_user = command.user != self.surroundings.user
        program = wrapped_script(command, environment, changes_user=changes_user)
        began = time.monotonic()
        done = start(("bash", "-c", program), command.timeout_s + GRACE_S, command.log)
        seconds = time.monotonic() - began
        late = done.status in LATE and seconds >= command.timeout_s
        words = [*argv, *(as_user(command.user) if changes_user else ())]
        return Execution(
            argv=console.redacted_arguments([*words, "bash", "-euo", "pipefail", "-c", command.script]),
            status=None if late else done.status,
            output=done.output,
            seconds=seconds,
            environment={name: console.redacted_text(value) for name, value in environment.items()},
            problem=done.problem or (_no_user(command) if done.output.strip() == _no_user(command) else ""),
        )


class Runner(ABC):
    """Make images ready for commands."""

    name: str
    """The text of `--runner`; secrets are blanked."""
    starts_image = True
    """Whether it starts the image that was named itself; if not, that has to be proven."""
    one_host = False
    """Whether several nodes are containers of one host, between which no network is measured."""

    @abstractmethod
    def session(self, reference: str | None, found: FoundImage | None) -> AbstractContextManager[Session]:
        """Make an image ready; what was started for it ends with the context.

        A runner with an engine takes the image of this reference, or else loads what was found; others need neither.
        Raises CannotRun if nothing can be run in the image, CommandError if the runner fails.
        """
