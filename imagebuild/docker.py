"""Containers and images, through the docker SDK."""

from __future__ import annotations

import json
import shlex
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container

from imagebuild.errors import CommandError, ConfigError

LABEL = "imagebuild.process"
"""Marks containers that we started, so that leftovers can be found."""


@dataclass(frozen=True)
class ImageInfo:
    """What the engine says about an image."""

    id: str
    digest: str | None
    platform: str
    labels: Mapping[str, str]


def connect(host: str) -> docker.DockerClient:
    """A client of the engine at `host`. Raises CommandError if it does not answer."""
    try:
        return docker.DockerClient(base_url=host, timeout=600)
    except DockerException as error:
        raise CommandError(f"{host}: the engine does not answer: {error}") from None


def inspect(client: docker.DockerClient, image: str) -> ImageInfo:
    """Labels and digest of an image in the engine's store. Raises ConfigError if it is not there."""
    try:
        found = client.images.get(image)
    except ImageNotFound:
        raise ConfigError(f"{image}: not in the engine's image store; build it, or `docker pull {image}`") from None
    except APIError as error:
        raise CommandError(f"{image}: {error.explanation or error}") from None
    digests = found.attrs.get("RepoDigests") or []
    return ImageInfo(
        id=str(found.id),
        digest=digests[0].rpartition("@")[2] if digests else None,
        platform=f"{found.attrs.get('Os')}/{found.attrs.get('Architecture')}",
        labels=found.labels,
    )


@contextmanager
def container(client: docker.DockerClient, image: str, **options: Any) -> Iterator[Container]:
    """A container of the image that sleeps; it is removed at the end, whatever happens."""
    name = f"imagebuild-{uuid.uuid4().hex[:12]}"
    try:
        with _explained(image):
            started = client.containers.run(
                image, ["infinity"], entrypoint="sleep", name=name, detach=True, init=True, labels={LABEL: "verify"},
                **options,
            )  # fmt: skip
        yield started
    finally:
        with suppress(NotFound, APIError):
            client.containers.get(name).remove(force=True)


def execute(
    running: Container, script: str, *, user: str, timeout_s: int, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a script by bash in the container: its status and output. 124 is a timeout.

    The time limit is kept inside the container by coreutils, which every image here has.
    """
    command = ["timeout", "--kill-after=5", str(timeout_s), "bash", "-euo", "pipefail", "-c", script]
    home = "/root" if user == "root" else f"/home/{user}"
    with _explained(shlex.join(command[:3])):
        status, output = running.exec_run(
            command, user=user, workdir="/", environment={**environment, "HOME": home, "USER": user}
        )
    assert isinstance(output, bytes)
    return status or 0, output.decode("utf-8", "replace")


def compressed_size(client: docker.DockerClient, image: str) -> int | None:
    """Bytes of the layers as a registry keeps them; None where the engine stores them uncompressed."""
    with _explained(image), _stream(client, image) as tar:
        sizes = {member.name.rpartition("/")[2]: member.size for member in tar if member.name.startswith("blobs/")}
    return sum(sizes.values()) if sizes else None


def _stream(client: docker.DockerClient, image: str) -> tarfile.TarFile:
    reader: Any = _Reader(client.images.get(image).save(named=False))
    return tarfile.open(mode="r|", fileobj=reader)


class _Reader:
    """An iterator of bytes as something with `read`."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = iter(chunks)
        self.rest = b""

    def read(self, number: int) -> bytes:
        while len(self.rest) < number:
            chunk = next(self.chunks, b"")
            if not chunk:
                break
            self.rest += chunk
        result, self.rest = self.rest[:number], self.rest[number:]
        return result


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (APIError, DockerException, OSError, json.JSONDecodeError) as error:
        text = getattr(error, "explanation", None) or str(error)
        raise CommandError(f"{what}: the engine refused or stopped: {text}") from None
