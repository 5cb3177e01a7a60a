"""The bash program that a command runs under, wherever it runs: it keeps the time and ends what the command leaves.

It needs nothing but bash, so that it works in images without coreutils. Processes of a command are known by a
variable in their environment: they inherit it also when they leave the process group or the session. Where srun starts
the program several times, each ends what is its own: a rank that is done first must not end the others. It runs as the
command's own user, because root in a container may neither read nor end the processes of others everywhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

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
