"""Containers and images, through the docker SDK."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import docker
from docker.context import ContextAPI
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.utils import parse_repository_tag

from imagebuild.engine import Endpoint
from imagebuild.errors import CommandError, ConfigError

TIMEOUT_S = 600

LABEL = "imagebuild.process"
"""Marks containers that we started, so that leftovers can be found."""


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
        status, output = running.exec_run(
            command, user=user, workdir="/", environment={**environment, "HOME": home, "USER": user}
        )
    assert isinstance(output, bytes)
    return status or 0, output.decode("utf-8", "replace")


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
