"""The nodes of the builders of buildx: which machines build, and what keeps them from it."""

from __future__ import annotations

import json
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, os_errors_as_command_errors, run_program
from imagebuild.oci.engine import Endpoint

BUILDKIT_MIN = (0, 13)
"""The first BuildKit that rewrites timestamps in layers as imagebuild needs it."""
BUILDX = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_GIT_INFO": "0", "BUILDX_GIT_LABELS": "0"}
"""Variables of buildx: an image index contains no attestations, and buildx does not run git in the build context or the
project, where a repository's configuration could name programs."""
REMEDIES = {  # a node also says "expired" if the certificate is not yet valid
    "(?i)certificate .*(expired|not yet)|expired cert": "set the clock of the node or this machine, renew certificates",
    "(?i)tls|is missing": "make the builder again with the right cacert, cert and key in `--driver-opt`",
    "": "start it",
}
"""Maps patterns of reasons why a node does not answer to what to do."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The beginning of a connection without TLS, which BuildKit answers."""
INSPECT_S, CONNECT_S, FARTHEST_S = 60, 5, 10**9
"""Times in seconds for all nodes to answer, and for a node to accept a connection, and by which a clock can differ."""


@dataclass(frozen=True)
class BuilderNode:
    """A machine of a builder, as `docker buildx inspect` describes it."""

    name: str
    endpoint: str = ""
    status: str = ""
    error: str = ""
    buildkit: str = ""
    """Version, such as `v0.32.0`; empty if the node does not answer."""
    platforms: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """The options of buildx's driver, such as `cacert`."""
    builds: tuple[str, ...] = ()
    """The platforms that buildx sends to this node."""
    ahead: float = 0.0
    """By how many seconds the clock of the node is ahead of the clock of this machine."""

    def __str__(self) -> str:
        return f"node {self.name} ({self.endpoint})"

    @property
    def silence(self) -> str:
        """The reason why the node does not answer; empty if it answers."""
        if self.status == "running" and not self.error:
            return ""
        return self.error or connection_flaw(self.endpoint, self.options) or self.status or "no status"

    @property
    def clock(self) -> str:
        """What the clock of the node shows, for a message."""
        now = datetime.now(UTC)
        there = now + timedelta(seconds=self.ahead)
        return f"the clock of {self} shows {there:%Y-%m-%d %H:%M} UTC, and that of this machine {now:%Y-%m-%d %H:%M}"

    def problem(self) -> str | None:
        """Return why the node cannot build; None if it can."""
        if why := self.silence:
            remedy = next(remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, why))
            return f"does not answer ({why}); {remedy}, or remove it from the builder"
        match = re.match(r"v?(\d+)\.(\d+)", self.buildkit)
        if match and BUILDKIT_MIN > (int(match[1]), int(match[2])) > (0, 0):  # builds of a distribution say 0.0.0
            return f"has BuildKit {self.buildkit}; {'.'.join(map(str, BUILDKIT_MIN))} or later is needed"
        return None


def connection_flaw(endpoint: str, options: Mapping[str, str]) -> str:
    """Return why no connection to a node with an address such as `tcp://host:port` is possible; buildx does not say it.
    Return an empty text if the connection works, or if the node has no such address."""
    if not endpoint.startswith("tcp://"):
        return ""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S) as plain:
            if "cacert" in options:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.set_alpn_protocols(["h2"])
                context.load_verify_locations(options["cacert"])
                if "cert" in options:
                    context.load_cert_chain(options["cert"], options.get("key"))
                with context.wrap_socket(plain, server_hostname=options.get("servername", host)) as secure:
                    secure.recv(1)  # with TLS 1.3, a node refuses the client's certificate only after the handshake
            else:
                plain.sendall(HTTP2)
                if plain.recv(1) != b"\0":
                    raise ConnectionResetError
    except ssl.SSLCertVerificationError as error:
        return f"TLS, certificate of the node: {error.verify_message}"
    except ssl.SSLError as error:
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    except ConnectionResetError:
        return "it needs TLS, or is not BuildKit"
    except (OSError, ValueError) as error:
        files = [options[name] for name in ("cacert", "cert", "key") if not Path(options.get(name, "/")).exists()]
        reason = getattr(error, "strerror", None) or str(error).rpartition("_ssl.c:")[2].lstrip("0123456789: ")
        return f"{files[0]} is missing" if files else reason
    return ""


def read_nodes(text: str) -> Iterator[BuilderNode]:
    """Yield the nodes in the output of `docker buildx inspect`."""
    for part in re.split(r"^Name:", text.partition("\nNodes:\n")[2], flags=re.MULTILINE)[1:]:
        names = "Endpoint|Error|Status|BuildKit version|Platforms|Driver Options"
        pairs = dict(re.findall(rf"^({names}):[ \t]*(.*)$", part, re.MULTILINE))
        yield BuilderNode(
            part.partition("\n")[0].strip(), pairs.get("Endpoint", ""), pairs.get("Status", "").strip(),
            pairs.get("Error", "").strip(), pairs.get("BuildKit version", "").strip(),
            tuple(word.strip(" *") for word in pairs.get("Platforms", "").split(",") if word.strip()),
            dict(re.findall(r'(\S+?)="(.*?)"', pairs.get("Driver Options", ""))),
        )  # fmt: skip


def nodes_of(builder: str, endpoint: Endpoint, run: RunProgram = run_program) -> list[BuilderNode]:
    """Start the nodes of a builder that are not running, and return all of them. Raises ConfigError if there is no such
    builder."""
    try:
        return _inspect(endpoint, run, "--bootstrap", builder)
    except CommandError as error:
        if re.search("no builder .* found", str(error)):
            problem = "there is no such builder; `docker buildx ls` lists the builders"
            raise ConfigError(f"--builder {builder}: {problem}") from None
    return _inspect(endpoint, run, builder)  # a node did not start


def current_nodes(endpoint: Endpoint, run: RunProgram = run_program) -> list[BuilderNode]:
    """Return the nodes of the current builder; empty if docker does not describe them."""
    with suppress(CommandError):
        return _inspect(endpoint, run)
    return []


def _inspect(endpoint: Endpoint, run: RunProgram, *words: str) -> list[BuilderNode]:
    return list(read_nodes(run("docker", "buildx", "inspect", *words, env=endpoint.environment, timeout=INSPECT_S)))


def lost_nodes(builder: str, endpoint: Endpoint, run: RunProgram = run_program) -> list[str]:
    """Return a message for each node that does not answer during a build, or after it failed."""
    try:
        nodes = _inspect(endpoint, run, builder)
    except CommandError as error:
        return [str(error)]
    remedy = "start it, and run the same command again: it goes on from the steps that ended"
    return [f"{node} no longer answers ({why}); {remedy}" for node in nodes if (why := node.silence)]


def check_nodes(builder: str, nodes: Sequence[BuilderNode], platforms: Sequence[str]) -> None:
    """Raise ConfigError if a node cannot build, or if no node builds one of the platforms."""
    problems = [f"{node} {problem}" for node in nodes if (problem := node.problem())]
    known = {platform for node in nodes for platform in node.platforms}
    problems += [
        f"no node builds {platform}; add a node of this platform, or register QEMU on a node"
        for platform in platforms
        if known and platform not in known
    ]
    if problems:
        raise ConfigError("\n".join(f"--builder {builder}: {problem}" for problem in problems))


def probe(
    builder: str, platform: str, engine: Endpoint, lines: str = "", run: RunProgram = run_program
) -> tuple[str, float]:
    """Build lines of a Dockerfile. Return the name of the node that builds this platform, and by how many seconds its
    clock is ahead of the clock of this machine. Raises CommandError if the node cannot build the lines."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder, os_errors_as_command_errors():
        Path(folder, "Dockerfile").write_text(f"FROM scratch\n{lines}WORKDIR /clock\n")
        command = ["docker", "buildx", "build", "--builder", builder, "--platform", platform, "--no-cache", folder]
        # buildx replaces the times of events, but not those of files.
        command += ["--output", f"type=local,dest={folder}/out", "--metadata-file", f"{folder}/metadata.json"]
        run(*command, env={**engine.environment, **BUILDX}, timeout=INSPECT_S)
        about = json.loads(Path(folder, "metadata.json").read_text())
        _, name, *_ = f"{about.get('buildx.build.ref')}//".split("/")
        ahead = Path(folder, "out", "clock").lstat().st_mtime - time.time()
        return name, min(max(ahead, -FARTHEST_S), FARTHEST_S)


def with_clocks(
    builder: str, nodes: Sequence[BuilderNode], platforms: Sequence[str], engine: Endpoint
) -> list[BuilderNode]:
    """Return all nodes, with the platforms that they build, and with their clocks. Raises CommandError if a platform
    cannot be built."""
    found = {node.name: node for node in nodes}
    for platform in platforms:
        try:
            name, ahead = probe(builder, platform, engine)
        except CommandError as error:
            prune = f"if a disk is full, `docker buildx prune --builder {builder}` removes all cached steps"
            raise CommandError(f"--builder {builder}: builds nothing for {platform}: {error}; {prune}") from None
        node = found.get(name, nodes[0])
        found[node.name] = replace(node, ahead=ahead, builds=(*node.builds, platform))
    return [*found.values()]


def unreached(builder: str, nodes: Sequence[BuilderNode], mirrors: Iterable[str], engine: Endpoint) -> Iterator[str]:
    """Yield a message for each node that does not reach a mirror."""
    for node, address in product([node for node in nodes if node.builds], sorted(mirrors)):
        try:
            probe(builder, node.builds[0], engine, f"ADD {address.rstrip('/')}/imagebuild /answer\n")
        except CommandError as error:
            # Other errors come from the mirror, or from its CA, which only steps know.
            if reason := re.search("dial tcp.*", str(error)):
                problem = f"{node} does not reach the mirror {address}: {reason[0]}"
                yield f"--builder {builder}: {problem}; steps that use the mirror fail"


def check_clocks(builders: Mapping[str, Sequence[BuilderNode]], newest: int) -> None:
    """Raise ConfigError if it is so early on a node that new files would keep their times. `newest` is the latest time
    of files in images, in seconds since 1970: BuildKit replaces only later times."""
    day = datetime.fromtimestamp(newest, UTC).date()
    if problems := [
        f"--builder {name}: {node.clock}, but files of the images are of {day}, so digests would differ; set the clock"
        for name, nodes in builders.items()
        for node in nodes
        if time.time() + node.ahead < newest
    ]:
        raise ConfigError("\n".join(problems))
