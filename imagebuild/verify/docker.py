"""Run commands in containers of an engine: in one container, or in several that connect to each other by ssh."""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, cast

from docker import DockerClient
from docker.errors import DockerException, ImageNotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Ulimit

from imagebuild.core.console import doing
from imagebuild.core.errors import CommandError
from imagebuild.core.leftovers import owner
from imagebuild.core.run import Finished, OutputReader
from imagebuild.oci import engine
from imagebuild.oci.image import FoundImage
from imagebuild.verify import runner
from imagebuild.verify.runner import CannotRun, Command, Execution, Probe, Session
from imagebuild.verify.subject import room_explained

ENGINE_S = 20
"""Seconds for the engine to start and end a command, in addition to the command's own time limit."""


def execute(
    container: Container, argv: Sequence[str], timeout_s: float, log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:  # fmt: skip
    """Run a program in a container as root, and return how the program ended.

    A program that exceeds the time limit is left running. Raises CommandError if the engine fails or the log cannot be
    written."""
    assert container.client, "a started container has a client"
    api = container.client.api
    status: list[int] = []

    def output() -> Generator[bytes]:
        options: dict[str, Any] = {"user": "root", "workdir": "/", "environment": dict(environment or {})}
        process = api.exec_create(container.id, list(argv), **options)
        yield from engine.exec_output(api, process["Id"])
        status.append(api.exec_inspect(process["Id"])["ExitCode"])

    # A thread makes all requests to the engine, so that an engine that hangs does not block this function.
    chunks = output()
    reader = OutputReader(chunks, chunks.close, log)
    reader.start()
    reader.join(timeout_s + ENGINE_S)
    if reader.error:
        with engine.sdk_errors_explained(str(container.name)):
            raise reader.error
    return Finished(status[0] if status else None, reader.text)


# Several nodes

HOMES = {"/root": 0, "/home/mpiuser": 1000}
"""Maps the home folders of the users who log in to nodes to their user ids. Other images may lack the second user."""
NODES_TIMEOUT_S = 60


class NodesUnreachable(CommandError):
    """The error if nodes run, but cannot connect to each other by ssh."""


def cluster_names(nodes: int) -> list[str]:
    """Return the host names of a cluster's nodes: `node-1`, `node-2` and so on."""
    return [f"node-{number}" for number in range(1, nodes + 1)]


@contextmanager
def cluster(
    client: DockerClient, image: str, nodes: int, options: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> Iterator[tuple[Container, ...]]:
    """Start containers of the image in their own network, with the host names `node-1`, `node-2` and so on.

    Each node runs sshd. The users root and `mpiuser` can log in from every node to every other with a key that is made
    for this cluster and is only in memory. `options` returns additional arguments of the SDK's `containers.run` for
    the node with this number, counted from 0. Raises CommandError if the engine fails, NodesUnreachable if the image
    lacks ssh or the nodes cannot connect to each other."""
    network, names = f"imagebuild-{uuid.uuid4().hex[:12]}", cluster_names(nodes)
    # Keys are on a tmpfs, and so neither in a layer nor on a disk.
    keys = {f"{home}/.ssh": f"mode=0700,uid={uid},gid={uid}" for home, uid in HOMES.items()}
    with ExitStack() as stack:
        stack.callback(engine.remove_patiently, lambda: client.networks.get(network).remove())
        with engine.sdk_errors_explained(network):
            # Internal, as the nodes need no other network.
            client.networks.create(network, driver="bridge", internal=True, labels=engine.labels())
        containers = []
        for number, name in enumerate(names):
            endpoint = {network: client.api.create_endpoint_config(aliases=[name])}
            own = {"hostname": name, "network": network, "networking_config": endpoint, "tmpfs": keys}
            started = engine.sleeping_container(client, image, **{**options(number), **own})
            containers.append(stack.enter_context(started))
        key = _run(containers[0], "key")
        for node in containers:
            # If the key were an argument, every process of the machine could read it.
            _run(node, "server", KEY=key)
        _run(containers[0], "reach", NODES=" ".join(names), TIMEOUT=str(NODES_TIMEOUT_S))
        yield tuple(containers)


def _run(node: Container, script: str, **environment: str) -> str:
    """Run the script with this name in a node and return its output. Raises NodesUnreachable if the script fails."""
    argv = ("bash", "-euo", "pipefail", "-c", runner.shell_script(script))
    done = execute(node, argv, 2 * NODES_TIMEOUT_S, environment=environment)
    if done.status != 0:
        raise NodesUnreachable(f"{node.name}: ssh between the nodes cannot be set up: {done.output.strip()}")
    return done.output.strip()


# Images that were not in the engine's store


@contextmanager
def pulled(client: DockerClient, reference: str) -> Iterator[None]:
    """Pull an image if the engine does not have it.

    At the end of the context, remove the pulled image unless it is in use. An image that the engine had before is not
    removed. Raises CommandError if the engine fails."""
    with engine.sdk_errors_explained(f"docker pull {reference}"), ExitStack() as stack:
        if record := engine.remember_pulled(client, reference):
            stack.callback(engine.forget_pulled, client, record)
        try:
            client.images.get(reference)
        except ImageNotFound:
            with doing(f"docker pull {reference}"):
                client.images.pull(reference)
        own = stack.pop_all()
    with own:
        yield


@contextmanager
def loaded(client: DockerClient, found: FoundImage) -> Iterator[str]:
    """Load an image from files into the engine's store. Yield its unique name there.

    The image is removed at the end of the context. Only the engine's platform is loaded. If the image lacks this
    platform, its first platform is loaded. Raises ResultError if the image cannot be read, CommandError if the engine
    fails."""
    name = f"docker.io/{engine.LOADED}/{uuid.uuid4().hex[:12]}:{owner()}"
    with engine.sdk_errors_explained("docker version"):
        native = f"linux/{client.version()['Arch']}"
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder, tempfile.TemporaryFile() as file:
        image = found.image(native if native in found.platforms else found.platforms[0])
        layout = image.as_layout(Path(folder, "layout"))
        digests = [image.manifest.document["config"]["digest"], *(layer.digest or "" for layer in image.layers)]
        config, *layers = [layout.path(digest).relative_to(layout.folder).as_posix() for digest in digests]
        # All engines can load this old format of `docker save`; not all can load an OCI index.
        listed = json.dumps([{"Config": config, "RepoTags": [name], "Layers": layers}])
        (layout.folder / "manifest.json").write_text(listed)
        # Layers are symbolic links in the layout.
        with room_explained(found.name), tarfile.open(fileobj=file, mode="w", dereference=True) as archive:
            for part in ("manifest.json", "blobs"):
                archive.add(layout.folder / part, part)
        file.seek(0)
        try:
            with engine.sdk_errors_explained(f"docker load {found.name}"):
                # `client.images.load` would look for the loaded image by a name without its registry.
                for line in cast(Any, client.api).load_image(file):
                    if "error" in line:
                        raise CommandError(f"docker load {found.name}: {line['error']}")
            yield name
        finally:
            with suppress(DockerException, OSError):
                client.images.remove(name, force=True)


# Sessions

MAX_NODES = 8
"""Maximum number of nodes (containers) that are started for a check."""
REFUSED = re.compile(r"rlimit|not permitted|devices?\b|CDI|nvidia|infiniband|capabilit", re.IGNORECASE)
"""Matches the error message of an engine that cannot start a container with certain options, such as devices."""
GPU = DeviceRequest(count=-1, capabilities=[["gpu"]])
CDI = DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=all"])
Options = dict[str, Any]
"""Arguments of the SDK's `containers.run`."""


def container_options(info: Mapping[str, Any]) -> list[Options]:
    """Return sets of options for a container, in the order in which to try them. `info` is the output of `docker info`.

    The first set that the engine accepts is used: some engines must not set limits, and it is not known in advance
    whether the host has GPUs and RDMA devices."""
    shared_memory = max(1 << 30, int(info.get("MemTotal") or 0) // 2)
    common: Options = {"hostname": "check", "shm_size": shared_memory, "cap_add": ["IPC_LOCK"]}
    limits = [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=1 << 26, hard=1 << 26)]
    gpus = [GPU] if "nvidia" in (info.get("Runtimes") or {}) else []
    gpus += [CDI] if info.get("CDISpecDirs") else []
    return [
        {**common, **limited, **with_gpus, **with_nics}
        for limited, with_gpus, with_nics in product(
            ({"ulimits": limits}, {}),
            (*({"device_requests": [request]} for request in gpus), {}),
            ({"devices": ["/dev/infiniband:/dev/infiniband:rwm"]}, {}),
        )
    ]


def with_share_of_gpus(options: Options, number: int, nodes: int, gpus: int) -> Options:
    """Return the options of a node, counted from 0, with GPUs that no other node uses.
    NCCL refuses to use a GPU twice. Without GPUs, or with fewer GPUs than nodes, the options stay unchanged."""
    share = gpus // nodes
    if not share or not options.get("device_requests"):
        return options
    (request,) = options["device_requests"]
    before = "nvidia.com/gpu=" if request.driver == "cdi" else ""
    own = [f"{before}{gpu}" for gpu in range(number * share, (number + 1) * share)]
    return {**options, "device_requests": [DeviceRequest(**{**request, "Count": 0, "DeviceIDs": own})]}


class DockerSession(Session):
    """A session in containers of the image, and in additional containers for checks that need several nodes.

    Commands that run at the same time run in different containers, each with its own files, processes and network."""

    lanes = 4  # many checks only wait, for example for sshd

    def __init__(self, image: str, container: Container, options: Options, probe: Probe, stack: ExitStack) -> None:
        self.image, self.container, self.options = image, container, options
        self._stack = stack
        self._idle = [container]
        self._starting = Lock()
        self._closed = False
        self._clusters: dict[int, tuple[ExitStack, Sequence[Container]]] = {}
        why = {"slurm": "the docker runner does not use Slurm", "nodes": "the image lacks ssh, ssh-keygen or sshd"}
        if "device_requests" not in options:
            why["gpu"] = "the engine does not give the container a GPU"
        nodes = MAX_NODES if {"ssh", "ssh-keygen", "sshd"} <= set(probe["tool"]) else 1
        super().__init__(probe, runner.surroundings_of(probe, "docker", nodes=nodes, slurm=False, why=why))

    def run(self, command: Command) -> Execution:
        """Run a command in an idle container, or in a cluster of containers if the command needs several nodes.
        Raises CommandError if the engine fails."""
        if command.nodes > 1:
            try:
                container = self._cluster(command.nodes)[0]
            except CommandError as error:
                problem = "the containers of the nodes did not start"
                return Execution(("docker", "run", self.image), None, str(error), 0.0, problem=problem)
            execution = self._execute(command, container)
            if execution.status is None:
                self._clusters.pop(command.nodes)[0].close()
            return execution
        container = self._idle_container()
        try:
            execution = self._execute(command, container)
            if execution.status is None:
                # A restart ends all processes in the container, including those that left the process group.
                with engine.sdk_errors_explained(f"docker restart {container.name}"):
                    container.restart(timeout=0)
            return execution
        finally:
            self._idle.append(container)

    def _idle_container(self) -> Container:
        with self._starting:
            if self._closed:
                raise CommandError(f"{self.image}: the verification has ended")
            if self._idle:
                return self._idle.pop()
            started = engine.sleeping_container(self._client, self.image, **self.options)
            return self._stack.enter_context(started)

    def close(self) -> None:
        """Let no thread start another container, so that the caller can remove all containers."""
        with self._starting:
            self._closed = True

    def _execute(self, command: Command, container: Container) -> Execution:
        argv = ["docker", "exec", str(container.name)]
        return self.execution(command, partial(execute, container), argv, cluster_names(command.nodes))

    @property
    def _client(self) -> DockerClient:
        assert self.container.client, "a started container has a client"
        return self.container.client

    def _cluster(self, nodes: int) -> Sequence[Container]:
        """Return the containers of a cluster with this number of nodes.
        The cluster is started once, and reused until a command is killed for exceeding its time limit."""
        if nodes not in self._clusters:
            options = partial(with_share_of_gpus, self.options, nodes=nodes, gpus=self.surroundings.gpus)
            own = self._stack.enter_context(ExitStack())
            self._clusters[nodes] = (own, own.enter_context(cluster(self._client, self.image, nodes, options)))
        return self._clusters[nodes][1]


@contextmanager
def docker_session(
    client: DockerClient | None, reference: str | None, found: FoundImage | None
) -> Iterator[DockerSession]:
    """Start a container of an image, and yield a session that runs commands in the container.

    The image is in the client's engine (`reference`) or in files (`found`). Raises CannotRun if there is no engine or
    the image lacks a shell or `sleep`, CommandError if the engine fails."""
    if client is None:
        try:
            client = engine.connect_engine(engine.find_engine())
        except CommandError as error:
            raise CannotRun(str(error)) from None
        engine.remove_leftovers(client)
    with ExitStack() as stack:
        if reference is None:
            assert found, "an image that is not in the engine's store is in files"
            reference = stack.enter_context(loaded(client, found))
        with engine.sdk_errors_explained("docker info"):
            possible = container_options(client.info())
        for options in possible:
            try:
                container = stack.enter_context(engine.sleeping_container(client, reference, **options))
                break
            except CommandError as error:
                if not REFUSED.search(str(error)) or options is possible[-1]:
                    raise CannotRun(str(error)) from None
        try:
            probe = runner.run_probe(partial(execute, container), reference)
        except CommandError as error:  # for example, the container ended because the image has no `sleep`
            raise CannotRun(f"the container did not start; the image needs a shell and `sleep`: {error}") from None
        session = DockerSession(reference, container, options, probe, stack)
        with closing(session):
            yield session
