"""What is there where commands run, found by a program for any POSIX shell, and read here. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from imagebuild.needs import Facilities
from imagebuild.runners.base import Place

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


def place(told: Mapping[str, list[str]]) -> Place:
    """User, programs, accounts and facts."""
    uid = _number(told, "uid")
    accounts = {}
    for line in told.get("account", ()):
        name, _, user, group, _, home, *_ = [*line.split(":"), *[""] * 6]
        if name and user.isdigit() and group.isdigit():
            accounts[name] = (int(user), int(group), home or "/")
    known = {number: name for name, (number, _, _) in accounts.items()}
    facts = {name: told[name][0].strip('"') for name in _FACTS if told.get(name, [""])[0]}
    return Place(
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
