"""Containers and images, through the docker SDK."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import docker
import requests
import urllib3
from docker import APIClient
from docker.context import ContextAPI
from docker.errors import (
    APIError,
    DockerException,
    ImageNotFound,
    NotFound,
    create_api_error_from_http_exception,
)
from docker.models.containers import Container
from docker.utils import parse_repository_tag

from imagebuild.engine import Endpoint
from imagebuild.errors import CommandError, ConfigError

TIMEOUT_S = 600

LABEL = "imagebuild.process"
"""Marks containers that we started, so that leftovers can be found."""
HEAD_SIZE = 8
"""Bytes before each piece of a program's output: one for the stream, three without meaning, four for the length."""


class Readable(Protocol):
    """What bytes are read from."""

    def read(self, amount: int, /) -> bytes: ...


@dataclass(frozen=True)
class ImageInfo:
    """What the engine says about an image."""

    id: str
    reference: str
    """A name for exactly this image: repository and digest, or the id where the engine knows no digest."""
    digest: str | None
    platform: str
    labels: Mapping[str, str]


def connect(engine: Endpoint) -> docker.DockerClient:
    """A client of the engine, with the TLS keys of the context or environment that chose it.

    Raises CommandError if it does not answer.
    """
    options: dict[str, Any] = {"base_url": engine.host}
    try:
        if engine.origin == "DOCKER_HOST":
            return docker.DockerClient.from_env(timeout=TIMEOUT_S)
        if engine.origin == "context" and (context := ContextAPI.get_current_context()) and context.TLSConfig:
            options["tls"] = context.TLSConfig
        return docker.DockerClient(timeout=TIMEOUT_S, use_ssh_client=engine.host.startswith("ssh://"), **options)
    except DockerException as error:
        raise CommandError(f"{engine.host}: the engine does not answer: {error}") from None


def inspect(client: docker.DockerClient, image: str) -> ImageInfo:
    """Labels and digest of an image in the engine's store. Raises ConfigError if it is not there."""
    try:
        found = client.images.get(image)
    except ImageNotFound:
        raise ConfigError(
            f"{image}: not in the engine's image store; build it, or pull it: verify has --pull"
        ) from None
    except APIError as error:
        raise CommandError(f"{image}: {error.explanation or error}") from None
    digests = found.attrs.get("RepoDigests") or []
    repository, _ = parse_repository_tag(image)
    own = [name for name in digests if name.partition("@")[0] == repository]
    return ImageInfo(
        id=str(found.id),
        reference=own[0] if own else str(found.id),
        digest=[*own, *digests][0].rpartition("@")[2] if digests else None,
        platform=f"{found.attrs.get('Os')}/{found.attrs.get('Architecture')}",
        labels=found.labels,
    )


def removed(remove: Callable[[], object], within_s: float = 60) -> None:
    """Remove something that may never have been made, and try again while the engine refuses.

    It refuses for a moment to remove a network whose last container is still leaving it, or a container that it is
    stopping. Raises CommandError if it still refuses after `within_s` seconds, so that nothing is left in silence.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            remove()
        except APIError as error:
            if isinstance(error, NotFound):
                return
            if time.monotonic() > deadline:
                raise CommandError(f"the engine does not remove what was started: {error.explanation}") from None
            time.sleep(0.2)
        except (DockerException, OSError):
            return  # the engine is gone, and the error that comes from inside says so
        else:
            return


@contextmanager
def container(client: docker.DockerClient, image: str, **options: Any) -> Iterator[Container]:
    """A container of the image that sleeps; it is removed at the end, whatever happens."""
    name = f"imagebuild-{uuid.uuid4().hex[:12]}"
    try:
        with explained(image):
            started = client.containers.run(
                image, ["infinity"], entrypoint="sleep", name=name, detach=True, init=True, labels={LABEL: "verify"},
                **options,
            )  # fmt: skip
        yield started
    finally:
        removed(lambda: client.containers.get(name).remove(force=True))


def execute(
    running: Container, script: str, *, user: str, timeout_s: int, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a script by bash in the container: its status and output. 124 is a timeout.

    The time limit is kept inside the container by coreutils, which every image here has.
    """
    command = ["timeout", "--kill-after=5", str(timeout_s), "bash", "-euo", "pipefail", "-c", script]
    home = "/root" if user == "root" else f"/home/{user}"
    with explained(shlex.join(command[:3])):
        started = Exec.create(running, command, user=user, environment={**environment, "HOME": home, "USER": user})
        output = b"".join(started.output())
        return started.status() or 0, output.decode("utf-8", "replace")


@dataclass(frozen=True)
class Exec:
    """A program in a container that runs. All methods raise what the SDK raises.

    The SDK's own `exec_start` asks for the bare connection and reads from it past what the HTTP client has already
    taken in with the head of the reply: what a program prints at once is lost now and then. So the reply is read as
    any other is.
    """

    client: APIClient
    id: str

    @classmethod
    def create(
        cls, running: Container, argv: Sequence[str], *, user: str, environment: Mapping[str, str] | None = None
    ) -> Exec:
        """Prepare a program; it starts when its output is read."""
        assert running.client
        client = running.client.api
        made = client.exec_create(running.id, list(argv), user=user, workdir="/", environment=dict(environment or {}))
        return cls(client, made["Id"])

    def output(self) -> Iterator[bytes]:
        """Start it: what it prints to standard output and error, as it comes, until it ends."""
        url = f"{self.client.base_url}/v{self.client.api_version}/exec/{self.id}/start"
        with self.client.post(url, json={"Detach": False, "Tty": False}, stream=True, timeout=None) as reply:
            try:
                reply.raise_for_status()
                yield from frames(reply.raw)
            except requests.HTTPError as error:
                create_api_error_from_http_exception(error)
            except urllib3.exceptions.HTTPError as error:
                raise ConnectionError(f"the connection to the engine broke: {error}") from None

    def status(self) -> int | None:
        """Its exit status; `None` while it runs."""
        status: int | None = self.client.exec_inspect(self.id)["ExitCode"]
        return status


def frames(stream: Readable) -> Iterator[bytes]:
    """The contents of the engine's frames, which say from which of the two outputs they are and how long they are.

    Raises ConnectionError if the stream ends within one.
    """
    while head := stream.read(HEAD_SIZE):
        size = int.from_bytes(head[4:])
        data = stream.read(size) if len(head) == HEAD_SIZE else b""
        if len(head) < HEAD_SIZE or len(data) < size:
            raise ConnectionError("the engine stopped in the middle of what a program prints")
        yield data


def saved(client: docker.DockerClient, image: str) -> Iterator[bytes]:
    """The image as an archive, in chunks. Raises CommandError if the engine fails."""
    with explained(image):
        yield from client.images.get(image).save()


def compressed_size(client: docker.DockerClient, image: str) -> int | None:
    """Bytes of the image as a registry keeps it; None if the engine does not know, because it keeps it unpacked only.

    Raises CommandError if the engine fails.
    """
    with explained(image):
        if not any("containerd.snapshotter" in value for _, value in client.info().get("DriverStatus") or ()):
            return None
        try:
            return int(client.images.get(image).attrs["Size"])
        except ImageNotFound:
            return None  # built by another builder, and not loaded


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the SDK raises into CommandError."""
    try:
        yield
    except (DockerException, OSError) as error:
        text = getattr(error, "explanation", None) or str(error)
        raise CommandError(f"{what}: the engine refused or stopped: {text}") from None
