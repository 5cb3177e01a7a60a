"""Define what a runner is, how it learns what a host has, and the bash program that commands run under."""

from __future__ import annotations

import shlex
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.core import console
from imagebuild.core.errors import CommandError, suggestion
from imagebuild.core.run import Finished
from imagebuild.project.component import Facilities

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
    """Why there is no status, other than the time limit: too much output, or nodes that did not start."""

    @property
    def timed_out(self) -> bool:
        """Return whether the command was killed for exceeding its time limit."""
        return self.status is None and not self.problem


@dataclass(frozen=True)
class Host:
    """Describe the place where commands run."""

    user: str = "root"
    uid: int = 0
    tools: frozenset[str] = frozenset()
    """The TOOLS that are on the PATH."""
    accounts: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """User → uid, gid, home."""
    gpus: int = 0
    ports: tuple[str, ...] = ()
    """Ports of RDMA devices with their states."""
    has_verbs: bool = False
    """Whether there is a device file for RDMA."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """`kernel`, `machine`, `cpus`, `memory`, `host`, `os`, …"""

    def facilities(self, *, nodes: int, slurm: bool, why: Mapping[str, str]) -> Facilities:
        """Return what checks may need, with the nodes and Slurm that the runner knows of.

        `why` gives the runner's reasons for what may be absent: `gpu`, `nodes`, `slurm`.
        """
        absent = {"nodes": nodes < 2, "slurm": not slurm, "gpu": not self.gpus}
        reasons = {name: reason for name, reason in why.items() if absent[name]}
        if not self.gpus and "gpu" not in reasons:
            has_program = "nvidia-smi" in self.tools
            reasons["gpu"] = "nvidia-smi lists no GPU" if has_program else "no nvidia-smi, which a driver brings"
        has_active_port = any("ACTIVE" in port for port in self.ports)
        if not self.ports:
            reasons["rdma"] = "no port in /sys/class/infiniband"
        elif not has_active_port:
            reasons["rdma"] = "no port is active"
        elif not self.has_verbs:
            reasons["rdma"] = "no /dev/infiniband/uverbs* in the container"
        return Facilities(self.gpus, "rdma" not in reasons, nodes, slurm, reasons)


TOOLS = ("bash", "nvidia-smi", "runuser", "scontrol", "setpriv", "srun", "ssh", "ssh-keygen", "sshd", "su", "timeout")
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
while IFS= read -r line; do
  fact account "$line"
done < /etc/passwd
limit=
command -v timeout > /dev/null 2>&1 && limit="timeout 40"
fact gpus "$($limit nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
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


def read_probe(output: str) -> Host | None:
    """Read what the probe printed, whatever else was printed between. Return None if it did not reach its end."""
    probe: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        _, prefix, rest = line.partition(PROBE_PREFIX)
        if prefix:
            name, _, value = rest.partition("=")
            probe[name] += [value.strip()] if value.strip() else []
    if "end" not in probe:
        return None
    first = {name: values[0] for name, values in probe.items() if values}
    accounts = {}
    for line in probe["account"]:
        name, _, user, group, _, home, *_ = [*line.split(":"), *[""] * 6]
        if name and user.isdigit() and group.isdigit():
            accounts[name] = (int(user), int(group), home or "/")
    # What a launcher prints between may have cut a line in two.
    uid, gpus = (int(first[name]) if first.get(name, "").isdigit() else 0 for name in ("uid", "gpus"))
    names = {number: name for name, (number, _, _) in accounts.items()}
    return Host(
        user=first.get("user") or names.get(uid, str(uid)),
        uid=uid,
        tools=frozenset(probe["tool"]),
        accounts=accounts,
        gpus=gpus,
        ports=tuple(probe["port"]),
        has_verbs=bool(probe["verbs"]),
        facts={name: first[name].strip('"') for name in FACTS if name in first},
    )


GRACE_S = 5
"""Seconds between SIGTERM and SIGKILL."""
TIMEOUT_STATUS = 124
"""Exit status of the wrapper of a command that exceeded its time limit."""
MARK = "IMAGEBUILD_RUN"
"""Variable by which all processes of a command are found, in whatever session they hide."""

# `read` drops NUL bytes, so the mark is looked for in the middle of all variables: its token is long enough for that.
# While a process starts another program, the kernel shows no variables of it: it may be one of ours, and is looked at
# again. Kernel threads and zombies never have any, and no `exe` either.
_FUNCTIONS = """\
members() {
  local folder variables
  for folder in /proc/[0-9]*; do
    variables=
    IFS= read -r -N 1000000 variables < "$folder/environ"
    case $variables in
      *"$mark"*) echo "${folder#/proc/}" ;;
      '') [ "${folder#/proc/}" -lt "$$" ] || [ ! -e "$folder/exe" ] || echo unknown ;;
    esac
  done
}
signal_members() {
  local round pids
  for ((round = 0; round < $2; round++)); do
    pids=$(members)
    [ -n "$pids" ] || break
    pids=${pids//unknown/}
    [ -z "${pids//[[:space:]]/}" ] || kill -"$1" $pids
    nap 0.05
  done
}
nap() { read -r -t "$1" <> <(:); }
"""
_WRAPPER = """\
exec 3>&1 2>/dev/null
mark={mark}${{SLURM_PROCID:+.$SLURM_PROCID.}}
{functions}cd /
{exports}late=
trap 'late=1' USR1
parent=$$
(
  exec 3>&- > /dev/null < /dev/null
  nap {seconds}
  kill -USR1 "$parent"
  signal_members TERM 1
  nap {grace}
  signal_members KILL 20
) &
watch=$!
{name}="${{mark#*=}}" {start}bash -euo pipefail -c {script} < /dev/null >&3 2>&3 3>&-
status=$?
kill "$watch"
signal_members KILL 20
[ -z "$late" ] || exit {late}
exit "$status"
"""
_SWEEP = """\
exec 2>/dev/null
mark={mark}
{functions}signal_members TERM 1
nap 2
signal_members KILL 20
"""


def wrapped_script(
    script: str, *, token: str, timeout_s: float, environment: Mapping[str, str], launcher: Iterable[str] = ()
) -> str:
    """Return a program for bash that runs a script under a time limit and ends everything that the script started.

    Its exit status is the script's, or TIMEOUT_STATUS. `token` is unique to this run. `launcher` starts the script
    several times: srun and its options.
    """
    return _WRAPPER.format(
        mark=f"{MARK}={token}",
        name=MARK,
        functions=_FUNCTIONS,
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()),
        seconds=f"{timeout_s:g}",
        grace=GRACE_S,
        late=TIMEOUT_STATUS,
        start="".join(f"{shlex.quote(word)} " for word in launcher),
        script=shlex.quote(script),
    )


def sweep_script(token: str) -> str:
    """Return a program for bash that ends what is left of a wrapped script whose connection was lost."""
    return _SWEEP.format(mark=f"{MARK}={token}", functions=_FUNCTIONS)


class Session(ABC):
    """Run commands in an image that is ready for them."""

    host: Host
    facilities: Facilities
    """GPUs, nodes and other facilities that checks may need."""

    def obstacle(self, command: Command) -> str:
        """Return why this command cannot run here at all: no bash, no such user. Empty if it can."""
        return "the image has no bash" if "bash" not in self.host.tools else self.unknown_user(command.user)

    def unknown_user(self, user: str) -> str:
        """Return that the image has no such user, and the nearest that it has; empty if it has it."""
        known = {*self.host.accounts, self.host.user}
        return "" if user in known else f"the image has no user {user!r}{suggestion(user, known)}"

    @abstractmethod
    def run(self, command: Command) -> Execution:
        """Run a command. A non-zero status is a result; raises CommandError if the runner itself fails."""

    def execution(
        self,
        command: Command,
        start: Callable[[str, str], Finished],
        argv: Iterable[str],
        *,
        nodes: Sequence[str] = (),
        launcher: Sequence[str] = (),
    ) -> Execution:
        """Wrap a command's script, run it, and return the outcome; `nodes` are those that it uses, if several.

        `start` runs the wrapped script with its token. `argv` and `launcher` are what people type before bash.
        """
        _, _, home = self.host.accounts.get(command.user, (0, 0, "/root"))
        environment = {"LC_ALL": "C.UTF-8", "HOME": home, "USER": command.user, **command.environment}
        if nodes:
            environment["IMAGEBUILD_NODES"] = " ".join(nodes)
        token = uuid.uuid4().hex
        program = wrapped_script(
            command.script, token=token, timeout_s=command.timeout_s, environment=environment, launcher=launcher
        )
        began = time.monotonic()
        done = start(program, token)
        seconds = time.monotonic() - began
        late = done.status == TIMEOUT_STATUS and seconds >= command.timeout_s
        return Execution(
            argv=console.redacted_arguments([*argv, *launcher, "bash", "-euo", "pipefail", "-c", command.script]),
            status=None if late else done.status,
            output=done.output,
            seconds=seconds,
            environment={name: console.redacted_text(value) for name, value in environment.items()},
            problem=done.problem,
        )


class Runner(ABC):
    """Run commands in an image, and read it if that is possible from here."""

    name: str
    """The text of `--runner`; secrets are blanked."""
    starts_image = True
    """Whether it starts the image that was named itself; if not, that has to be proven."""
    has_image_environment = False
    """Whether commands get the image's variables from a container that something else started of it."""
    one_host = False
    """Whether several nodes are containers of one host, between which no network is measured."""

    @abstractmethod
    def session(self, reference: str | None, layout: Path | None) -> AbstractContextManager[Session]:
        """Make an image ready; what was started for it ends with the context.

        A runner with an engine takes the image of this reference, or loads the layout if there is no reference; others
        need neither. Raises CannotRun if nothing can be run in the image, CommandError if the runner fails.
        """

    def archive(self, reference: str | None) -> Iterable[bytes] | None:  # noqa: ARG002 - few runners can read
        """Return the image as an archive in chunks; None if this runner cannot read images."""
        return None

    def discard(self, reference: str) -> None:  # noqa: B027 - few runners keep any
        """Remove an image that was pulled for this runner."""


@dataclass(frozen=True)
class NoRunner(Runner):
    """Run nothing, and say why."""

    reason: str
    name: str = "none"

    def session(self, reference: str | None, layout: Path | None) -> AbstractContextManager[Session]:  # noqa: ARG002
        """Raise CannotRun."""
        raise CannotRun(self.reason)
