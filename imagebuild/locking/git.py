"""Tags of git repositories, asked without cloning."""

from __future__ import annotations

import re

from imagebuild.apt import Run
from imagebuild.errors import Absent, CommandError, ResultError, Unreachable

TIMEOUT_S = 60
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
"""Nobody is there to type a password."""
REFERENCE = re.compile(r"^([0-9a-f]{40})\trefs/tags/(\S+?)(\^\{\})?$")


def commit_of(run: Run, address: str, tag: str) -> str:
    """The commit of a tag. Raises Absent if the repository has no such tag, and as `tags` does."""
    found = _list(run, address, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
    if tag not in found:
        raise Absent(f"{address}: has no tag {tag}")
    return found[tag]


def tags(run: Run, address: str) -> dict[str, str]:
    """Every tag with its commit. Raises Unreachable if the repository cannot be read."""
    return _list(run, address, "refs/tags/*")


def _list(run: Run, address: str, *patterns: str) -> dict[str, str]:
    try:
        text = run("git", "ls-remote", "--", address, *patterns, env=ENVIRONMENT, timeout=TIMEOUT_S)
    except CommandError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "fatal:" in line or "error:" in line]
        raise Unreachable(f"{address}: {(told or lines)[0].rpartition('fatal: ')[2]}") from None
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = REFERENCE.match(line)
        if not match:
            raise ResultError(f"{address}: git ls-remote says what is no tag: {line!r}")
        commit, tag, peeled = match.groups()
        if peeled or tag not in found:  # the commit of an annotated tag comes as tag^{}
            found[tag] = commit
    return found
