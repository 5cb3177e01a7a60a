"""The nodes of a buildx builder, and what keeps them from building."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, run_program
from imagebuild.oci.engine import Endpoint

BUILDKIT_MIN = (0, 13)
"""The first BuildKit that rewrites timestamps in layers as imagebuild needs it."""
INSPECT_S = 60
"""Time in seconds for the nodes to answer."""


@dataclass(frozen=True)
class Node:
    """A machine of a builder, as `docker buildx inspect` describes it."""

    name: str
    endpoint: str = ""
    status: str = ""
    error: str = ""
    buildkit: str = ""
    """Version, such as `v0.32.0`; empty if the node does not answer."""
    platforms: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Return why the node cannot build; None if it can."""
        if self.error or self.status != "running":
            return (
                f"does not answer ({self.error or self.status or 'no status'}); start it, or remove it from the builder"
            )
        match = re.match(r"v?(\d+)\.(\d+)", self.buildkit)
        if match and BUILDKIT_MIN > (int(match[1]), int(match[2])) > (0, 0):  # builds of a distribution say 0.0.0
            return f"has BuildKit {self.buildkit}; {'.'.join(map(str, BUILDKIT_MIN))} or later is needed"
        return None


def read_nodes(text: str) -> Iterator[Node]:
    """Yield the nodes in the output of `docker buildx inspect`."""
    for part in re.split(r"^Name:", text.partition("\nNodes:\n")[2], flags=re.MULTILINE)[1:]:
        pairs = dict(re.findall(r"^(Endpoint|Error|Status|BuildKit version|Platforms):[ \t]*(.*)$", part, re.MULTILINE))
        yield Node(
            part.partition("\n")[0].strip(), pairs.get("Endpoint", ""), pairs.get("Status", "").strip(),
            pairs.get("Error", "").strip(), pairs.get("BuildKit version", "").strip(),
            tuple(word.strip(" *") for word in pairs.get("Platforms", "").split(",") if word.strip()),
        )  # fmt: skip


def nodes_of(builder: str, endpoint: Endpoint, run: RunProgram = run_program) -> list[Node]:
    """Start the nodes of a builder that are not running, and return all of them. Raises ConfigError if there is no such
    builder."""

    def inspected(*options: str) -> str:
        command = ("docker", "buildx", "inspect", *options, builder)
        return run(*command, env=endpoint.environment, timeout=INSPECT_S)

    try:
        return list(read_nodes(inspected("--bootstrap")))
    except CommandError as error:
        if re.search("no builder .* found", str(error)):
            problem = "there is no such builder; `docker buildx ls` lists the builders"
            raise ConfigError(f"--builder {builder}: {problem}") from None
    return list(read_nodes(inspected()))  # a node did not start


def check_nodes(builder: str, nodes: Sequence[Node], platforms: Sequence[str]) -> None:
    """Raise ConfigError if a node cannot build, or if no node builds one of the platforms."""
    problems = [f"node {node.name} ({node.endpoint}) {problem}" for node in nodes if (problem := node.problem())]
    known = {platform for node in nodes for platform in node.platforms}
    problems += [
        f"no node builds {platform}; add a node of this platform, or register QEMU on a node"
        for platform in platforms
        if known and platform not in known
    ]
    if problems:
        raise ConfigError("\n".join(f"--builder {builder}: {problem}" for problem in problems))
