"""Finding a container engine: whether one can be used, which one is, and where the private one would be."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from imagebuild import apt, programs
from imagebuild.apt import Run, numbers
from imagebuild.errors import CommandError

STATE = Path("/var/lib/imagebuild/engine")

# A distribution's build reports its BuildKit as "v0.0.0+unknown", but the engine's version tells: Docker Engine 26.0
# is the first with BuildKit 0.13, 25.0 has 0.12.
ENGINE_MIN, BUILDX_MIN = apt.MINIMUM["docker.io"], apt.MINIMUM["docker-buildx"]

NO_ENGINE = "run `imagebuild engine up` as root, or install Docker Engine 26+ with its buildx plug-in"


@dataclass(frozen=True)
class Endpoint:
    """A usable engine. `host` is what DOCKER_HOST would hold; `origin` says who chose it."""

    host: str
    origin: Literal["DOCKER_HOST", "context", "private"]

    @property
    def environment(self) -> dict[str, str]:
        """What leads the docker CLI there: nothing for a context, which it knows and which also holds TLS keys."""
        return {} if self.origin == "context" else {"DOCKER_HOST": self.host}


@dataclass(frozen=True)
class Paths:
    """Where a private engine keeps its things; IMAGEBUILD_STATE names another one, independent of the first."""

    state: Path
    run: Path
    bridge: str
    data: Path
    config: Path
    log: Path
    exec_root: Path
    pidfile: Path
    socket: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Paths":
        state, key, bridge = STATE, "", "imagebuild0"
        if other := environ.get("IMAGEBUILD_STATE"):
            state = Path(other).absolute()
            # Short, because names of sockets (107 bytes) and of network devices (15) are limited.
            digest = sha256(bytes(state)).hexdigest()[:8]
            key, bridge = f"-{digest}", f"ib-{digest}"
        run = Path(f"/run/imagebuild{key}")
        ours = (state / "data", state / "daemon.json", state / "dockerd.log")
        return cls(state, run, bridge, *ours, run / "exec", run / "docker.pid", run / "docker.sock")

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"


def buildx_version(run: Run = programs.run) -> tuple[int, ...]:
    """The version of `docker buildx`, () if there is none."""
    with suppress(CommandError):
        text = run("docker", "buildx", "version", timeout=10)
        # Podman's `docker` has a `buildx` too, and it is another program.
        return numbers(text) if "docker/buildx" in text else ()
    return ()


def _reason(error: CommandError) -> str:
    """What the program said, on one line and without how it was called."""
    said = str(error).partition("): ")[2].splitlines() or [str(error)]
    return next((line for line in said if not line.startswith("WARNING")), said[0])


def flaw(host: str, run: Run = programs.run, *, flags: tuple[str, ...] | None = None) -> str | None:
    """Why the engine at `host` cannot be used, or None; `flags` is how the CLI gets there, if not by address."""
    with suppress(PermissionError):  # the CLI says it better
        if host.startswith("unix://") and not Path(host.removeprefix("unix://")).exists():
            return "no socket there"
    try:
        flags = ("--host", host) if flags is None else flags
        answer = run("docker", *flags, "version", "--format", "{{.Server.Version}}", timeout=20)
    except CommandError as error:
        return f"does not answer: {_reason(error)}"
    if numbers(answer) < ENGINE_MIN:
        return f"Docker Engine {answer.strip()} is too old; 26.0 is the first with BuildKit 0.13"
    return None


def find(environ: Mapping[str, str] = os.environ, run: Run = programs.run) -> Endpoint:
    """The first usable engine of DOCKER_HOST, the current docker context and the private engine.

    Raises CommandError, saying what was tried and what to do, if there is none, or if DOCKER_HOST is set and
    its engine cannot be used: whoever sets it does not want another.
    """
    private = Paths.of(environ)
    try:
        run("docker", "buildx", "version", timeout=10)
    except CommandError as error:
        raise CommandError(f"`docker buildx` cannot be used ({_reason(error)}); {NO_ENGINE}") from error
    if explicit := environ.get("DOCKER_HOST"):
        if why := flaw(explicit, run):
            raise CommandError(f"DOCKER_HOST={explicit}: {why}; start or upgrade that engine, or unset DOCKER_HOST")
        return Endpoint(explicit, "DOCKER_HOST")
    tried = []
    try:
        current = run("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}", timeout=10).strip()
        # Without --host, because a context also holds the keys for reaching its engine.
        if not (why := flaw(current, run, flags=())):
            return Endpoint(current, "context")
        tried.append(f"docker context ({current}): {why}")
    except CommandError as error:
        tried.append(f"docker context: {_reason(error)}")
    if not (why := flaw(private.host, run)):
        return Endpoint(private.host, "private")
    tried.append(f"private engine ({private.host}): {why}")
    raise CommandError("\n  ".join([f"no usable container engine; {NO_ENGINE}", *tried]))
