"""Docker Engines: find a usable engine, and use it through the Docker SDK, which is imported only if needed."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.leftovers import is_gone, owner
from imagebuild.core.run import RunProgram, run_program, version_numbers
from imagebuild.oci.layout import platform_of
from imagebuild.oci.reference import NO_REFERENCE

if TYPE_CHECKING:
    from docker import APIClient, DockerClient
    from docker.models.containers import Container
    from docker.models.volumes import Volume

ENGINE_MIN, BUILDX_MIN = (26, 0), (0, 13)
"""Oldest supported versions of Docker Engine and buildx. imagebuild needs BuildKit 0.13, but engines from distributions
report the version of BuildKit as "v0.0.0+unknown". So the version of the engine is checked: Docker Engine 26.0 is the
first with BuildKit 0.13."""
STATE = Path("/var/lib/imagebuild/engine")
"""Folder of the private engine: a Docker Engine that `imagebuild engine up` starts."""
NO_ENGINE = "run `imagebuild engine up` as root, or install Docker Engine 26+ with its buildx plug-in"
TIMEOUT_S = 600
"""Seconds to wait for the answer of an engine."""
LABEL, OWNER = "imagebuild.process", "imagebuild.owner"
"""Labels of the containers that imagebuild starts, so that leftover containers can be found."""
PULLED = "imagebuild.pulled"
"""Label with the name of an image that imagebuild pulled. The label is on an empty volume, because an image cannot get
labels. Each process that uses the image has such a volume."""
LOADED = "imagebuild-verify"
"""Beginning of the names of images that are loaded for a verification."""
HEAD_SIZE = 8
"""Size in bytes of the header before each piece of a program's output: 1 byte for the stream (stdout or stderr), 3
unused bytes, 4 bytes for the length."""
CONTENT = "containerd/daemon/io.containerd.content.v1.content"
"""Folder of all blobs, below the root folder of an engine with containerd's image store. Like an OCI layout, it has a
subfolder `blobs/sha256`."""


@dataclass(frozen=True)
class Endpoint:
    """A container engine. `host` is a value for DOCKER_HOST; `origin` is the setting that names the engine."""

    host: str
    origin: Literal["DOCKER_HOST", "context", "private"]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make the docker CLI use this engine.
        Empty for the engine of the current docker context, which the CLI uses by default."""
        return {} if self.origin == "context" else {"DOCKER_HOST": self.host}


@dataclass(frozen=True)
class EnginePaths:
    """Paths of the private engine.
    The engines of different values of the environment variable IMAGEBUILD_STATE are independent."""

    state: Path
    run: Path = Path("/run/imagebuild")
    bridge: str = "imagebuild0"

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> EnginePaths:
        if not (other := environ.get("IMAGEBUILD_STATE")):
            return cls(STATE)
        state = Path(other).absolute()
        # Short names, because a socket path is limited to 107 bytes and the name of a network device to 15.
        digest = sha256(bytes(state)).hexdigest()[:8]
        return cls(state, Path(f"/run/imagebuild-{digest}"), f"ib-{digest}")

    @property
    def data(self) -> Path:
        return self.state / "data"

    @property
    def config(self) -> Path:
        return self.state / "daemon.json"

    @property
    def log(self) -> Path:
        return self.state / "dockerd.log"

    @property
    def socket(self) -> Path:
        return self.run / "docker.sock"

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"


def buildx_version(run: RunProgram = run_program) -> tuple[int, ...]:
    """Return the version of `docker buildx`. An empty tuple if buildx is not installed."""
    with suppress(CommandError):
        text = run("docker", "buildx", "version", timeout=10)
        # The `docker` of Podman has a `buildx` too, but it is a different program.
        return version_numbers(text) if "docker/buildx" in text else ()
    return ()


def _reason(error: CommandError) -> str:
    """Return the first line that a failed program printed, without its command line and without warnings."""
    lines = str(error).partition("): ")[2].splitlines() or [str(error)]
    return next((line for line in lines if not line.startswith("WARNING")), lines[0])


def engine_flaw(engine: Endpoint, run: RunProgram = run_program) -> str | None:
    """Return the reason why an engine cannot be used. None if the engine can be used."""
    with suppress(PermissionError):  # the docker CLI explains this error better
        if engine.host.startswith("unix://") and not Path(engine.host.removeprefix("unix://")).exists():
            return "its socket does not exist"
    # For a context, --host is left out: the context also contains the keys of its engine.
    flags = () if engine.origin == "context" else ("--host", engine.host)
    try:
        answer = run("docker", *flags, "version", "--format", "{{.Server.Version}}", timeout=20)
    except CommandError as error:
        return f"does not answer: {_reason(error)}"
    if version_numbers(answer) < ENGINE_MIN:
        return f"Docker Engine {answer.strip()} is too old; 26.0 is the first with BuildKit 0.13"
    return None


def find_engine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> Endpoint:
    """Return the first usable engine of: DOCKER_HOST, the current docker context, the private engine.

    If DOCKER_HOST is set, the other engines are not tried. Raises CommandError if there is no usable engine. The
    message lists the engines that were tried and says what to do."""
    try:
        run("docker", "buildx", "version", timeout=10)
    except CommandError as error:
        raise CommandError(f"`docker buildx` cannot be used ({_reason(error)}); {NO_ENGINE}") from error
    if explicit := environ.get("DOCKER_HOST"):
        remedy = "start or upgrade the engine in DOCKER_HOST, or unset DOCKER_HOST"
        candidates = [Endpoint(explicit, "DOCKER_HOST")]
    else:
        remedy, candidates = NO_ENGINE, [Endpoint(EnginePaths.of(environ).host, "private")]
        with suppress(CommandError):  # this docker has no contexts
            host = run("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}", timeout=10)
            candidates.insert(0, Endpoint(host.strip(), "context"))
    tried = []
    for engine in candidates:
        if not (why := engine_flaw(engine, run)):
            return engine
        tried.append(f"{engine.origin} ({engine.host}): {why}")
    raise CommandError("\n  ".join([f"no usable container engine; {remedy}", *tried]))


@dataclass(frozen=True)
class ImageInfo:
    """An image in the store of an engine: its name, digest, platform and labels."""

    reference: str
    """Unique name of this image: repository and digest, or the image id if the engine does not know a digest."""
    digest: str | None
    platform: str
    labels: Mapping[str, str]


def connect_engine(engine: Endpoint) -> DockerClient:
    """Return an SDK client for an engine. Raises CommandError if the engine does not answer."""
    import docker
    from docker.context import ContextAPI

    options: dict[str, Any] = {"base_url": engine.host}
    try:
        if engine.origin == "DOCKER_HOST":
            return docker.DockerClient.from_env(timeout=TIMEOUT_S)
        if engine.origin == "context" and (context := ContextAPI.get_current_context()) and context.TLSConfig:
            options["tls"] = context.TLSConfig
        return docker.DockerClient(timeout=TIMEOUT_S, use_ssh_client=engine.host.startswith("ssh://"), **options)
    except docker.errors.DockerException as error:
        raise CommandError(f"{engine.host}: the engine does not answer: {error}") from None


def inspect_image(client: DockerClient, image: str) -> ImageInfo:
    """Return the name, digest, platform and labels of an image in the store of an engine.
    Raises ConfigError if the image is not in the engine's store, and CommandError if the engine fails."""
    from docker.errors import APIError, ImageNotFound
    from docker.utils import parse_repository_tag

    try:
        stored = client.images.get(image)
    except ImageNotFound:
        raise ConfigError(f"{image}: not in the engine's image store; build it, or use `verify --pull`") from None
    except APIError as error:
        if error.status_code == HTTPStatus.BAD_REQUEST:  # the engine cannot parse the name
            raise ConfigError(f"{image}: {NO_REFERENCE}") from None
        raise CommandError(f"{image}: {error.explanation or error}") from None
    digests = stored.attrs.get("RepoDigests") or []
    repository, _ = parse_repository_tag(image)
    own = [name for name in digests if name.partition("@")[0] == repository]
    return ImageInfo(
        reference=own[0] if own else str(stored.id), digest=[*own, *digests][0].rpartition("@")[2] if digests else None,
        platform=platform_of({name.lower(): stored.attrs.get(name) for name in ("Os", "Architecture", "Variant")}),
        labels=stored.labels,
    )  # fmt: skip


def remove_patiently(remove: Callable[[], object], within_s: float = 60) -> None:
    """Call `remove`, which removes a container or network, and repeat the call while the engine refuses.

    An object that does not exist is not an error. An engine refuses to remove a container that is still stopping, or
    the network of such a container. Raises CommandError if the engine still refuses after `within_s` seconds."""
    from docker.errors import APIError, DockerException, NotFound

    deadline = time.monotonic() + within_s
    while True:
        try:
            remove()
        except APIError as error:
            if isinstance(error, NotFound):
                return
            if time.monotonic() > deadline:
                problem = "the engine could not remove a container or network that imagebuild made"
                remedy = "remove it with `docker rm -f` or `docker network rm`"
                raise CommandError(f"{problem}: {error.explanation}; {remedy}") from None
            time.sleep(0.2)
        except (DockerException, OSError):
            return  # the engine has stopped; the caller already has an error that says so
        else:
            return


def labels() -> dict[str, str]:
    """Return the labels of a container or network that this process makes."""
    return {LABEL: "verify", OWNER: owner()}


def remove_leftovers(client: DockerClient) -> None:
    """Remove containers, networks, and loaded or pulled images, of processes of this machine that were killed."""
    from docker.errors import DockerException

    with suppress(DockerException, OSError):
        filters: dict[str, Any] = {"label": OWNER}
        for container in client.containers.list(all=True, filters=filters, ignore_removed=True):
            if is_gone(container.labels[OWNER]):
                remove_patiently(partial(container.remove, force=True))
        for network in client.networks.list(filters=filters):
            if is_gone(network.attrs["Labels"][OWNER]):
                remove_patiently(network.remove)
        for name in (tag for image in client.images.list(f"{LOADED}/*") for tag in image.tags):
            if is_gone(name):
                client.images.remove(name, force=True)
        for volume in client.volumes.list(filters={"label": PULLED}):
            if is_gone(volume.attrs["Labels"][OWNER]):
                forget_pulled(client, volume)


def remember_pulled(client: DockerClient, image: str) -> Volume | None:
    """Record that this process pulls or uses an image. None if the engine had the image before imagebuild."""
    from docker.errors import ImageNotFound

    with suppress(ImageNotFound):
        client.images.get(image)
        if not client.volumes.list(filters={"label": f"{PULLED}={image}"}):
            return None
    return client.volumes.create(f"imagebuild-{uuid.uuid4().hex[:12]}", labels={**labels(), PULLED: image})


def forget_pulled(client: DockerClient, record: Volume) -> None:
    """Remove a record, and the pulled image if no other process uses it. The engine keeps an image of a container."""
    from docker.errors import DockerException

    with suppress(DockerException, OSError):
        image = record.attrs["Labels"][PULLED]
        record.remove()
        if not client.volumes.list(filters={"label": f"{PULLED}={image}"}):
            client.images.remove(image)


@contextmanager
def sleeping_containers(
    client: DockerClient, image: str, options: Sequence[Mapping[str, Any]] = ({},)
) -> Iterator[Sequence[Container]]:
    """Start containers of an image that only run `sleep`, at the same time, and yield them.

    `options` contains the arguments of the SDK's `containers.run` for each container. At the end, always remove all
    containers."""
    names = [f"imagebuild-{uuid.uuid4().hex[:12]}" for _ in options]

    def start(name: str, own: Mapping[str, Any]) -> Container:
        with sdk_errors_explained(image):
            return client.containers.run(
                image, ["infinity"], entrypoint="sleep", name=name, detach=True, init=True, labels=labels(), **own,
            )  # fmt: skip

    def remove(name: str) -> None:
        remove_patiently(partial(client.api.remove_container, name, force=True))

    with ThreadPoolExecutor(len(names)) as pool:
        starting = [pool.submit(start, *arguments) for arguments in zip(names, options, strict=True)]
        try:
            yield [container.result() for container in starting]
        finally:
            wait(starting)  # a container that is being created cannot be removed
            list(pool.map(remove, names))


def exec_output(client: APIClient, process: str) -> Iterator[bytes]:
    """Start a prepared exec process in a container, and yield its output until it ends. Raises errors of the SDK.

    The SDK's own `exec_start` sometimes loses early output: `exec_start` reads from the socket, but the HTTP client may
    have buffered output together with the header of the reply. So this function reads the reply through the HTTP
    client."""
    import requests
    import urllib3
    from docker.errors import create_api_error_from_http_exception

    url = f"{client.base_url}/v{client.api_version}/exec/{process}/start"
    with client.post(url, json={"Detach": False, "Tty": False}, stream=True, timeout=None) as reply:
        try:
            reply.raise_for_status()
            yield from output_frames(cast(IO[bytes], reply.raw))
        except requests.HTTPError as error:
            create_api_error_from_http_exception(error)
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(f"the connection to the engine broke: {error}") from None


def output_frames(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the pieces of output in a stream. Raises ConnectionError if the last piece is incomplete."""
    while head := stream.read(HEAD_SIZE):
        size = int.from_bytes(head[4:])
        data = stream.read(size) if len(head) == HEAD_SIZE else b""
        if len(head) < HEAD_SIZE or len(data) < size:
            raise ConnectionError("the engine stopped in the middle of a program's output")
        yield data


def blobs_of_engine(client: DockerClient) -> Path:
    """Return the folder in which the engine stores blobs. The folder may not exist on this machine."""
    with sdk_errors_explained("docker info"):
        return Path(client.info().get("DockerRootDir") or "/var/lib/docker", CONTENT)


def save_image(client: DockerClient, image: str) -> Iterator[bytes]:
    """Yield an image as an archive, in chunks. Raises CommandError if the engine fails."""
    with sdk_errors_explained(image):
        yield from client.images.get(image).save()


@contextmanager
def sdk_errors_explained(what: str) -> Iterator[None]:
    """Turn errors of the SDK into CommandError. `what` is the image or container, for the message."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError) as error:
        text = getattr(error, "explanation", None) or str(error)
        raise CommandError(f"{what}: the engine refused or stopped: {text}") from None


def has_containerd_store(engine: Endpoint) -> bool:
    """Return whether the engine stores images in containerd. Docker's classic image store cannot load OCI layouts."""
    status = run_program("docker", "info", "--format", "{{.DriverStatus}}", env=engine.environment, timeout=20)
    return "io.containerd.snapshotter" in status
