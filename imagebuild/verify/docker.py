"""Run commands in containers on an engine: one, or several that reach each other by ssh."""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

from docker import DockerClient
from docker.errors import DockerException, ImageNotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Ulimit

from imagebuild.core.console import doing
from imagebuild.core.errors import CommandError
from imagebuild.core.run import Finished, OutputReader
from imagebuild.oci import engine
from imagebuild.oci.image import FoundImage
from imagebuild.verify import runner
from imagebuild.verify.runner import CannotRun, Command, Execution, Probe, Session
from imagebuild.verify.subject import room_explained

ENGINE_S = 20
"""Seconds on top of a command's time limit, in which the engine starts and ends it."""


def execute(
    container: Container, argv: Sequence[str], timeout_s: float, log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:  # fmt: skip
    """Run a program in a container, as root, and return how it ended. One that takes too long is left running.

    Raises CommandError if the engine fails, or the log cannot be written.
    """
    assert container.client, "a container that was started has the client that started it"
    api = container.client.api
    status: list[int] = []

    def output() -> Generator[bytes]:
        options: dict[str, Any] = {"user": "root", "workdir": "/", "environment": dict(environment or {})}
        process = api.exec_create(container.id, list(argv), **options)
        yield from engine.exec_output(api, process["Id"])
        status.append(api.exec_inspect(process["Id"])["ExitCode"])

    # An engine that stops cannot keep us: all that asks it is done by the thread.
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
"""Homes of the users that log in to nodes → their number. An image that was not built here may lack the second."""
NODES_TIMEOUT_S = 60


class NodesUnreachable(CommandError):
    """Report that the nodes run, but the image's ssh does not connect them."""


def cluster_names(nodes: int) -> list[str]:
    """Return the host names of the nodes of a cluster."""
    return [f"node-{number}" for number in range(1, nodes + 1)]


@contextmanager
def cluster(
    client: DockerClient, image: str, nodes: int, options: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> Iterator[tuple[Container, ...]]:
    """Start containers of the image in a network of their own, called `node-1`, `node-2`, …

    sshd in each lets root and `mpiuser` in from every node, by a key that was made for this cluster and lies in memory.
    `options` returns further arguments of the SDK's `containers.run` for a node, counted from 0. Raises CommandError if
    the engine fails, NodesUnreachable if the nodes do not reach each other or have no ssh.
    """
    network, names = f"imagebuild-{uuid.uuid4().hex[:12]}", cluster_names(nodes)
    # Keys are neither in a layer nor on a disk.
    keys = {f"{home}/.ssh": f"mode=0700,uid={uid},gid={uid}" for home, uid in HOMES.items()}
    with ExitStack() as stack:
        stack.callback(engine.remove_patiently, lambda: client.networks.get(network).remove())
        with engine.sdk_errors_explained(network):
            # Nothing in it needs the world outside.
            client.networks.create(network, driver="bridge", internal=True, labels={engine.LABEL: "verify"})
        containers = []
        for number, name in enumerate(names):
            endpoint = {network: client.api.create_endpoint_config(aliases=[name])}
            own = {"hostname": name, "network": network, "networking_config": endpoint, "tmpfs": keys}
            started = engine.sleeping_container(client, image, **{**options(number), **own})
            containers.append(stack.enter_context(started))
        key = _run(containers[0], "key")
        for node in containers:
            # As an argument, every process of the machine could read the key.
            _run(node, "server", KEY=key)
        _run(containers[0], "reach", NODES=" ".join(names), TIMEOUT=str(NODES_TIMEOUT_S))
        yield tuple(containers)


def _run(node: Container, script: str, **environment: str) -> str:
    """Return what the script of this name prints in a node. Raises NodesUnreachable if it fails."""
    argv = ("bash", "-euo", "pipefail", "-c", runner.shell_script(script))
    done = execute(node, argv, 2 * NODES_TIMEOUT_S, environment=environment)
    if done.status != 0:
        raise NodesUnreachable(f"{node.name}: the nodes cannot be prepared: {done.output.strip()}")
    return done.output.strip()


# Images that were not in the engine's store


@contextmanager
def pulled(client: DockerClient, reference: str) -> Iterator[None]:
    """Pull an image that the engine does not have; what was pulled goes with the context, if nothing else uses it.

    Raises CommandError if the engine fails.
    """
    is_new = False
    with engine.sdk_errors_explained(f"docker pull {reference}"):
        try:
            client.images.get(reference)
        except ImageNotFound:
            with doing(f"docker pull {reference}"):
                client.images.pull(reference)
            is_new = True
    try:
        yield
    finally:
        if is_new:
            with suppress(DockerException, OSError):
                client.images.remove(reference)


@contextmanager
def loaded(client: DockerClient, found: FoundImage) -> Iterator[str]:
    """Load an image from files into the engine's store. Yield a name of its own there, which goes with the context.

    Of several platforms the engine's is loaded, or the first. Raises ResultError if the image cannot be read,
    CommandError if the engine fails.
    """
    name = f"docker.io/imagebuild-verify/{uuid.uuid4().hex[:12]}:1"
    with engine.sdk_errors_explained("docker version"):
        native = f"linux/{client.version()['Arch']}"
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder, tempfile.TemporaryFile() as file:
        image = found.image(native if native in found.platforms else found.platforms[0])
        layout = image.as_layout(Path(folder, "layout"))
        digests = [image.manifest.document["config"]["digest"], *(layer.digest or "" for layer in image.layers)]
        config, *layers = [layout.path(digest).relative_to(layout.folder).as_posix() for digest in digests]
        # All engines read this, as `docker save` wrote it before it wrote layouts; not all read an index.
        listed = json.dumps([{"Config": config, "RepoTags": [name], "Layers": layers}])
        (layout.folder / "manifest.json").write_text(listed)
        # Layers are symbolic links in there.
        with room_explained(found.name), tarfile.open(fileobj=file, mode="w", dereference=True) as archive:
            for part in ("manifest.json", "blobs"):
                archive.add(layout.folder / part, part)
        file.seek(0)
        try:
            with engine.sdk_errors_explained(f"docker load {found.name}"):
                # Not by `client.images`, which then asks for the image by a name without its registry.
                for line in cast(Any, client.api).load_image(file):
                    if "error" in line:
                        raise CommandError(f"docker load {found.name}: {line['error']}")
            yield name
        finally:
            with suppress(DockerException, OSError):
                client.images.remove(name, force=True)


# Sessions

MAX_NODES = 8
"""Nodes that a check may ask for."""
REFUSED = re.compile(r"rlimit|not permitted|devices?\b|CDI|nvidia|infiniband|capabilit", re.IGNORECASE)
"""Words by which an engine says that it may not, or cannot, start a container with the given options."""
GPU = DeviceRequest(count=-1, capabilities=[["gpu"]])
CDI = DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=all"])
Options = dict[str, Any]
"""Arguments of the SDK's `containers.run`."""


def container_options(info: Mapping[str, Any]) -> list[Options]:
    """Return options to start a container with, in the order to try them. `info` is the engine's description of itself.

    Not every engine may set limits, and it is not known before whether there are GPUs and cards.
    """
    shared_memory = max(1 << 30, int(info.get("MemTotal") or 0) // 2)
    common: Options = {"hostname": "check", "shm_size": shared_memory, "cap_add": ["IPC_LOCK"]}
    limits = [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=1 << 26, hard=1 << 26)]
    gpus = [GPU] if "nvidia" in (info.get("Runtimes") or {}) else []
    gpus += [CDI] if info.get("CDISpecDirs") else []
    return [
        {**common, **limited, **with_gpus, **with_cards}
        for limited, with_gpus, with_cards in product(
            ({"ulimits": limits}, {}),
            (*({"device_requests": [request]} for request in gpus), {}),
            ({"devices": ["/dev/infiniband:/dev/infiniband:rwm"]}, {}),
        )
    ]


def with_share_of_gpus(options: Options, number: int, nodes: int, gpus: int) -> Options:
    """Return the options of a node, counted from 0, with GPUs of its own: NCCL takes none twice."""
    share = gpus // nodes
    if not share or not options.get("device_requests"):
        return options
    (request,) = options["device_requests"]
    before = "nvidia.com/gpu=" if request.driver == "cdi" else ""
    own = [f"{before}{gpu}" for gpu in range(number * share, (number + 1) * share)]
    return {**options, "device_requests": [DeviceRequest(**{**request, "Count": 0, "DeviceIDs": own})]}


class DockerSession(Session):
    """Run commands in a container of the image, and in more of them where a check needs several nodes."""

    def __init__(self, image: str, container: Container, options: Options, probe: Probe, stack: ExitStack) -> None:
        self.image, self.container, self.options = image, container, options
        self._stack = stack
        self._clusters: dict[int, tuple[ExitStack, Sequence[Container]]] = {}
        why = {"slurm": "the docker runner does not use it", "nodes": "the image lacks ssh, ssh-keygen or sshd"}
        if "device_requests" not in options:
            why["gpu"] = "the engine gives the container no GPU"
        nodes = MAX_NODES if {"ssh", "ssh-keygen", "sshd"} <= set(probe["tool"]) else 1
        super().__init__(probe, runner.surroundings_of(probe, "docker", nodes=nodes, slurm=False, why=why))

    def run(self, command: Command) -> Execution:
        """Run a command in the container, or in a cluster if it needs several nodes. Raises CommandError."""
        container = self.container
        if command.nodes > 1:
            try:
                container = self._cluster(command.nodes)[0]
            except CommandError as error:
                problem = "the nodes did not start"
                return Execution(("docker", "run", self.image), None, str(error), 0.0, problem=problem)
        argv = ["docker", "exec", str(container.name)]
        execution = self.execution(command, partial(execute, container), argv, cluster_names(command.nodes))
        if execution.status is None and command.nodes > 1:
            self._clusters.pop(command.nodes)[0].close()
        elif execution.status is None:
            # A restart ends everything that runs in the container, wherever it hides.
            with engine.sdk_errors_explained(f"docker restart {container.name}"):
                container.restart(timeout=0)
        return execution

    def _cluster(self, nodes: int) -> Sequence[Container]:
        """Return the containers of a cluster of this size; it is started once and used until a command is killed."""
        if nodes not in self._clusters:
            client = self.container.client
            assert client, "a container that was started has the client that started it"
            options = partial(with_share_of_gpus, self.options, nodes=nodes, gpus=self.surroundings.gpus)
            own = self._stack.enter_context(ExitStack())
            self._clusters[nodes] = (own, own.enter_context(cluster(client, self.image, nodes, options)))
        return self._clusters[nodes][1]


@contextmanager
def docker_session(
    client: DockerClient | None, reference: str | None, found: FoundImage | None
) -> Iterator[DockerSession]:
    """Start a container of the image with this reference in the client's engine, or of the one that was found in files.

    Raises CannotRun without an engine, or if the image lacks what a container needs, CommandError if the engine fails.
    """
    try:
        client = client or engine.connect_engine(engine.find_engine())
    except CommandError as error:
        raise CannotRun(str(error)) from None
    with ExitStack() as stack:
        if reference is None:
            assert found, "an image is in the engine's store, or its files are found"
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
        except CommandError as error:  # such as: the container has ended, because it has no `sleep`
            raise CannotRun(f"checks need a shell and `sleep` in the image: {error}") from None
        yield DockerSession(reference, container, options, probe, stack)
