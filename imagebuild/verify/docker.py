"""Run commands in containers of an engine: in one container, or in several that connect to each other by ssh."""

from __future__ import annotations

import json
import platform
import re
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition, Lock
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
from imagebuild.verify.runner import CannotRun, Command, Execution, Session
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
def node_containers(
    client: DockerClient, image: str, nodes: int, options: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> Iterator[Sequence[Container]]:
    """Start containers of the image in their own network, with the host names `node-1`, `node-2` and so on.

    `options` returns additional arguments of the SDK's `containers.run` for the node with this number, counted from 0.
    Raises CommandError if the engine fails."""
    network = f"imagebuild-{uuid.uuid4().hex[:12]}"
    # Keys are on a tmpfs, and so neither in a layer nor on a disk.
    keys = {f"{home}/.ssh": f"mode=0700,uid={uid},gid={uid}" for home, uid in HOMES.items()}
    with ExitStack() as stack:
        stack.callback(engine.remove_patiently, lambda: client.networks.get(network).remove())
        with engine.sdk_errors_explained(network):
            # Internal, as the nodes need no other network.
            client.networks.create(network, driver="bridge", internal=True, labels=engine.labels())
        own = []
        for number, name in enumerate(cluster_names(nodes)):
            endpoint = {network: client.api.create_endpoint_config(aliases=[name])}
            fixed = {"hostname": name, "network": network, "networking_config": endpoint, "tmpfs": keys}
            own.append({**options(number), **fixed})
        yield stack.enter_context(engine.sleeping_containers(client, image, own))


def connect_nodes(nodes: Mapping[str, Container], key: str = "") -> str:
    """Start sshd on nodes, so that root and `mpiuser` can log in from every node to every other. Return the SSH key.

    `nodes` maps host names to containers. Default: the key is new. It is only in memory. Raises CommandError if the
    engine fails, NodesUnreachable if the image lacks ssh or the nodes cannot connect to each other."""
    first, *_ = nodes.values()
    key = key or _run(first, "key")
    with ThreadPoolExecutor(len(nodes)) as pool:
        # If the key were an argument, every process of the machine could read it.
        list(pool.map(lambda node: _run(node, "server", KEY=key), nodes.values()))
    _run(first, "reach", NODES=" ".join(nodes), TIMEOUT=str(NODES_TIMEOUT_S))
    return key


def _run(node: Container, script: str, **environment: str) -> str:
    """Run the script with this name in a node and return its output. Raises NodesUnreachable if the script fails."""
    argv = ("bash", "-euo", "pipefail", "-c", runner.shell_script(script))
    done = execute(node, argv, 2 * NODES_TIMEOUT_S, environment=environment)
    if done.status != 0:
        raise NodesUnreachable(f"{node.name}: ssh between the nodes cannot be set up: {done.output.strip()}")
    return done.output.strip()


class ContainerCluster:
    """Nodes that connect to each other by ssh. Commands run at the same time on different nodes."""

    def __init__(self, nodes: Sequence[Container]) -> None:
        self._nodes = dict(zip(cluster_names(len(nodes)), nodes, strict=True))
        self.key = connect_nodes(self._nodes)
        self._idle = list(self._nodes)
        self._changed = Condition()

    @contextmanager
    def idle_nodes(self, number: int) -> Iterator[Mapping[str, Container]]:
        """Wait until this number of nodes is idle, and yield their host names and containers."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._idle) >= number)
            names, self._idle = self._idle[:number], self._idle[number:]
        try:
            yield {name: self._nodes[name] for name in names}
        finally:
            with self._changed:
                self._idle = sorted([*self._idle, *names])
                self._changed.notify_all()


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
REFUSED = {
    "device_requests": r"CDI|nvidia|gpu|device driver", "devices": r"devices?\b|infiniband",
    "ulimits": r"rlimit|not permitted|capabilit",
}  # fmt: skip
"""Maps options of a container to patterns of the messages with which engines refuse them."""
GPU = DeviceRequest(count=-1, capabilities=[["gpu"]])
CDI = DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=all"])
HARDWARE = ("/sys/class/infiniband", "/sys/module/nvidia", "/dev/dxg")
"""Paths by which Linux shows RDMA devices and GPUs, also in containers."""
Options = dict[str, Any]
"""Arguments of the SDK's `containers.run`."""


def lacks_hardware(client: DockerClient, info: Mapping[str, Any]) -> bool:
    """Return whether the engine runs on this machine, and the machine has neither RDMA devices nor GPUs."""
    is_here = client.api.base_url == "http+docker://localhost" and info.get("Name") == platform.node()
    specs = (path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*"))
    return is_here and not any(path.exists() for path in (*map(Path, HARDWARE), *specs))


def container_options(info: Mapping[str, Any], *, bare: bool = False) -> Options:
    """Return the options of a container that gets GPUs, RDMA devices and the limits that they need.

    `info` is the output of `docker info`. `bare`: there is no such hardware. The engine may refuse options: see
    `weaker_options`. It takes up to a second to refuse one."""
    shared_memory = max(1 << 30, int(info.get("MemTotal") or 0) // 2)
    options: Options = {"hostname": "check", "shm_size": shared_memory, "cap_add": ["IPC_LOCK"]}
    if bare:
        return options
    limits = [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=1 << 26, hard=1 << 26)]
    gpus = [GPU] if "nvidia" in (info.get("Runtimes") or {}) else [CDI] if info.get("CDISpecDirs") else []
    options |= {"ulimits": limits, "devices": ["/dev/infiniband:/dev/infiniband:rwm"]}
    return {**options, "device_requests": gpus} if gpus else options


def weaker_options(options: Options, refusal: str) -> Options | None:
    """Return the options without the one that the engine refuses with this message. None if there is no such option.

    Some engines must not set limits, and it is not known in advance whether the host has GPUs and RDMA devices."""
    named = [name for name, pattern in REFUSED.items() if re.search(pattern, refusal, re.IGNORECASE)]
    refused = next((name for name in (*named, *REFUSED) if name in options), None)
    if not named or not refused:
        return None
    if options[refused] == [GPU]:
        return {**options, refused: [CDI]}
    return {name: value for name, value in options.items() if name != refused}


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

    lanes = node_lanes = 2

    def __init__(
        self, client: DockerClient, image: str, container: Container, options: Options, opened: ExitStack
    ) -> None:
        """Run the script `probe.sh` in the container. Raises CannotRun if the image lacks a shell or `sleep`.

        `opened` removes the container. The session closes it, together with the containers that it starts."""
        try:
            probe = runner.run_probe(partial(execute, container), image)
        except CommandError as error:  # for example, the container ended because the image has no `sleep`
            raise CannotRun(f"the container did not start; the image needs a shell and `sleep`: {error}") from None
        self._client, self.image, self.options = client, image, options
        self._opened = [opened]
        self._closed = False
        self._starting = Lock()
        self._idle = [container]
        self._clusters: dict[int, ContainerCluster | CommandError] = {}
        self._connecting = Lock()
        why = {"slurm": "the docker runner does not use Slurm", "nodes": "the image lacks ssh, ssh-keygen or sshd"}
        if "device_requests" not in options:
            why["gpu"] = "the engine does not give the container a GPU"
        nodes = MAX_NODES if {"ssh", "ssh-keygen", "sshd"} <= set(probe["tool"]) else 1
        super().__init__(probe, runner.surroundings_of(probe, "docker", nodes=nodes, slurm=False, why=why))

    def run(self, command: Command) -> Execution:
        """Run a command in an idle container, or on idle nodes of a cluster if the command needs several nodes.
        Raises CommandError if the engine fails."""
        if command.nodes > 1:
            cluster = self._cluster(command.nodes)
            if isinstance(cluster, CommandError):
                problem = "the containers of the nodes did not start"
                return Execution(("docker", "run", self.image), None, str(cluster), 0.0, problem=problem)
            with cluster.idle_nodes(command.nodes) as nodes:
                return self._execute(command, nodes, cluster.key)
        try:
            container = self._idle.pop()
        except IndexError:
            (container,) = self._start(engine.sleeping_containers(self._client, self.image, [self.options]))
        try:
            return self._execute(command, {"check": container})
        finally:
            self._idle.append(container)

    def _start(self, containers: AbstractContextManager[Sequence[Container]]) -> Sequence[Container]:
        """Enter a context that starts containers. Raises CommandError if the session is closed."""
        with self._starting:
            if self._closed:
                raise CommandError(f"{self.image}: the verification has ended")
            self._opened.append(opened := ExitStack())
            return opened.enter_context(containers)

    def close(self) -> None:
        """Let no thread start another container, and remove all containers."""
        with self._starting:
            self._closed = True
        with ThreadPoolExecutor(len(self._opened)) as pool:
            list(pool.map(ExitStack.close, self._opened))

    def _execute(self, command: Command, nodes: Mapping[str, Container], key: str = "") -> Execution:
        first, *_ = nodes.values()
        argv = ["docker", "exec", str(first.name)]
        execution = self.execution(command, partial(execute, first), argv, list(nodes))
        if execution.status is None:
            # A restart ends all processes in the containers, including those that left the process group.
            for node in nodes.values():
                with engine.sdk_errors_explained(f"docker restart {node.name}"):
                    node.restart(timeout=0)
            if key:
                connect_nodes(nodes, key)
        return execution

    def _cluster(self, nodes: int) -> ContainerCluster | CommandError:
        """Return a cluster with at least this number of nodes, or why it did not start. It is started once.
        A cluster with GPUs has exactly this number of nodes, because the nodes share the GPUs."""
        size = nodes if self.surroundings.gpus else max(nodes, self.most_nodes)
        options = partial(with_share_of_gpus, self.options, nodes=size, gpus=self.surroundings.gpus)
        with self._connecting:
            if size not in self._clusters:
                try:
                    started = self._start(node_containers(self._client, self.image, size, options))
                    self._clusters[size] = ContainerCluster(started)
                except CommandError as error:
                    self._clusters[size] = error
            return self._clusters[size]


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
            info = client.info()
        options = container_options(info, bare=lacks_hardware(client, info))
        opened = stack.enter_context(ExitStack())
        while True:
            try:
                (container,) = opened.enter_context(engine.sleeping_containers(client, reference, [options]))
                break
            except CommandError as error:
                if not (weaker := weaker_options(options, str(error))):
                    raise CannotRun(str(error)) from None
                options = weaker
        with closing(DockerSession(client, reference, container, options, opened)) as session:
            yield session
