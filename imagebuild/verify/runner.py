"""Define what a runner is, how it learns what a place has, and the program that commands run under."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from imagebuild.core.errors import CommandError
from imagebuild.project.component import Facilities


class Unusable(CommandError):
    """Nothing can be run in this image, by this runner: for example, it has no shell."""


@dataclass(frozen=True)
class Command:
    """What is to run in the image."""

    script: str
    """For `bash -euo pipefail -c`."""
    user: str = "root"
    timeout_s: float = 60
    """After this, the command and its children are killed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    """How many nodes it uses: it runs on the first, and finds all names in `IMAGEBUILD_NODES`, separated by blanks;
    the others answer ssh to `user` without a password."""
    ranks: int = 1
    """How many times it is started together, by srun."""
    log: Path | None = None
    """File that gets the whole output; by default only its end is kept."""


@dataclass(frozen=True)
class Execution:
    """What came of a command."""

    argv: tuple[str, ...]
    """What was started, to be kept as evidence."""
    status: int | None
    """Exit status; `None` if it was killed for its time."""
    output: str
    """The end of standard output and error together, also of a command that was killed."""
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the command was given, with secrets blanked."""
    problem: str = ""
    """Why there is no status, if it was not killed for its time: it printed too much, or the nodes did not come up."""

    @property
    def timed_out(self) -> bool:
        """Was it killed for its time?"""
        return self.status is None and not self.problem


@dataclass(frozen=True)
class HostFacts:
    """What is there where commands run."""

    user: str = "root"
    uid: int = 0
    tools: frozenset[str] = frozenset()
    """Of the programs that matter here, those on the PATH."""
    accounts: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """User → uid, gid, home."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """`kernel`, `machine`, `cpus`, `memory`, `host`, `os`."""


class Session(Protocol):
    """An image that is ready to run commands."""

    @property
    def facilities(self) -> Facilities: ...

    @property
    def place(self) -> HostFacts: ...

    def obstacle(self, command: Command) -> str:
        """Why this command cannot be run here at all: no bash, no such user. Empty if it can."""

    def run(self, command: Command) -> Execution:
        """Run a command. A non-zero status is a result; raises CommandError if the runner itself fails."""


class Runner(Protocol):
    """A way to run commands in an image."""

    @property
    def name(self) -> str:
        """As `--runner` names it."""

    def session(self, image: str) -> AbstractContextManager[Session]:
        """Make the image ready; what was started for it ends with the context. Raises Unusable."""


@dataclass(frozen=True)
class NoRunner:
    """Runs nothing, and says why."""

    reason: str
    name: str = "none"

    @contextmanager
    def session(self, image: str) -> Iterator[Session]:
        """Raises Unusable."""
        raise Unusable(f"{image}: {self.reason}" if image else self.reason)
        yield  # what makes it a context


TOOLS = ("bash", "nvidia-smi", "runuser", "scontrol", "setpriv", "srun", "ssh", "ssh-keygen", "sshd", "su", "timeout")
TIMEOUT_S = 60
_PREFIX = "imagebuild-probe:"

PROGRAM = f"""\
PATH="$PATH:/usr/sbin:/sbin"
tell() {{ echo "{_PREFIX}$1=$2"; }}
tell uid "$(id -u 2>/dev/null)"
tell user "$(id -un 2>/dev/null)"
for tool in {" ".join(TOOLS)}; do
  command -v "$tool" > /dev/null 2>&1 && tell tool "$tool"
done
while IFS= read -r line; do
  tell account "$line"
done < /etc/passwd
limit=
command -v timeout > /dev/null 2>&1 && limit="timeout 40"
tell gpus "$($limit nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
for state in /sys/class/infiniband/*/ports/*/state; do
  [ -r "$state" ] && tell port "$state $(cat "$state")"
done
for device in /dev/infiniband/uverbs*; do
  [ -e "$device" ] && tell verbs "$device"
done
tell memlock "$(ulimit -l 2>/dev/null)"
tell job "$SLURM_JOB_ID"
tell hostlist "$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | tr '\\n' ' ')"
tell host "$(uname -n 2>/dev/null)"
tell kernel "$(uname -r 2>/dev/null)"
tell machine "$(uname -m 2>/dev/null)"
tell cpus "$(nproc 2>/dev/null)"
tell memory "$(sed -n 's/^MemTotal: *//p' /proc/meminfo 2>/dev/null)"
tell driver "$(sed -n 's/^NVRM version: *//p' /proc/driver/nvidia/version 2>/dev/null)"
tell os "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null)"
tell end .
"""
_FACTS = ("host", "kernel", "machine", "cpus", "memory", "memlock", "driver", "os", "job", "hostlist")


def read(output: str) -> dict[str, list[str]] | None:
    """What the program told, whatever else was printed between; `None` if it did not reach its end."""
    told = defaultdict(list)
    for line in output.splitlines():
        _, found, rest = line.partition(_PREFIX)
        if found:
            name, _, value = rest.partition("=")
            told[name].append(value.strip())
    return dict(told) if "end" in told else None


def place(told: Mapping[str, list[str]]) -> HostFacts:
    """User, programs, accounts and facts."""
    uid = _number(told, "uid")
    accounts = {}
    for line in told.get("account", ()):
        name, _, user, group, _, home, *_ = [*line.split(":"), *[""] * 6]
        if name and user.isdigit() and group.isdigit():
            accounts[name] = (int(user), int(group), home or "/")
    known = {number: name for name, (number, _, _) in accounts.items()}
    facts = {name: told[name][0].strip('"') for name in _FACTS if told.get(name, [""])[0]}
    return HostFacts(
        user=(told.get("user") or [""])[0] or known.get(uid, str(uid)),
        uid=uid,
        tools=frozenset(told.get("tool", ())),
        accounts=accounts,
        facts=facts,
    )


def facilities(told: Mapping[str, list[str]], *, nodes: int, slurm: bool, why: dict[str, str]) -> Facilities:
    """GPUs and RDMA as found; the runner knows the rest. `why` says why something is absent."""
    gpus = _number(told, "gpus")
    tools = told.get("tool", ())
    active = [p for p in told.get("port", ()) if "ACTIVE" in p]
    absent = {"nodes": nodes < 2, "slurm": not slurm, "gpu": not gpus}
    reasons = {name: reason for name, reason in why.items() if absent[name]}
    if not gpus and not reasons.get("gpu"):
        reasons["gpu"] = "nvidia-smi finds none" if "nvidia-smi" in tools else "no nvidia-smi, which a driver brings"
    rdma = bool(active and told.get("verbs"))
    if not rdma:
        reasons["rdma"] = (
            "no port in /sys/class/infiniband" if not told.get("port")
            else "no port is active" if not active
            else "no /dev/infiniband/uverbs* in the container"
        )  # fmt: skip
    return Facilities(gpus, rdma, nodes, slurm, reasons)


def _number(told: Mapping[str, list[str]], name: str) -> int:
    text = (told.get(name) or ["0"])[0]
    return int(text) if text.isdigit() else 0


GRACE_S = 5
"""Between SIGTERM and SIGKILL."""
LATE = 124
"""Exit status of a command that was ended for its time."""
MARK = "IMAGEBUILD_RUN"

# NUL bytes are dropped by `read`, so the variable is looked for between others: the token is long enough.
_FUNCTIONS = """\
members() {
  local folder text
  for folder in /proc/[0-9]*; do
    text=
    IFS= read -r -N 1000000 text < "$folder/environ"
    case $text in *"$mark"*) echo "${folder#/proc/}" ;; esac
  done
}
finish() {
  local pids
  pids=$(members)
  [ -z "$pids" ] || kill -"$1" $pids
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
  finish TERM
  nap {grace}
  finish KILL
) &
watch=$!
{name}="${{mark#*=}}" {start}bash -euo pipefail -c {script} < /dev/null >&3 2>&3 3>&-
status=$?
kill "$watch"
finish KILL
[ -z "$late" ] || exit {late}
exit "$status"
"""
_SWEEP = """\
exec 2>/dev/null
mark={mark}
{functions}finish TERM
nap 2
finish KILL
"""


def mark(token: str) -> str:
    """What processes of the command with this token have in their environment."""
    return f"{MARK}={token}"


def wrapped(
    script: str, *, token: str, timeout_s: float, environment: Mapping[str, str], start: tuple[str, ...] = ()
) -> str:
    """A program for bash that runs the script; `start` is what starts it several times: srun and its options."""
    return _WRAPPER.format(
        mark=mark(token),
        name=MARK,
        functions=_FUNCTIONS,
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()),
        seconds=f"{timeout_s:g}",
        grace=GRACE_S,
        late=LATE,
        start="".join(f"{shlex.quote(word)} " for word in start),
        script=shlex.quote(script),
    )


def sweep(token: str) -> str:
    """A program for bash that ends what is left of a command, after the connection to it is gone."""
    return _SWEEP.format(mark=mark(token), functions=_FUNCTIONS)


def as_user(user: str, account: tuple[int, int, str], tools: frozenset[str], program: str) -> tuple[str, ...] | None:
    """How root starts a program for bash as another user; `None` if the image has nothing for that."""
    uid, gid, _ = account
    bash = ("bash", "-c", program)
    if "setpriv" in tools:
        return ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", *bash)
    if "runuser" in tools:
        return ("runuser", "-u", user, "--", *bash)
    if "su" in tools:
        return ("su", user, "-s", "/bin/bash", "-c", program)
    return None
