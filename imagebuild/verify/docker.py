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
    reader.join(timeout_s + ENGINE_S)
    if reader.error:
        with engine.sdk_errors_explained(str(container.name)):
            raise reader.error
    return Finished(status[0] if status else None, reader.text)


# Several nodes

HOMES = {"/root": 0, "/home/mpiuser": 1000}
"""Homes of the users that log in to nodes → their number. An image that was not built here may lack the second."""
NODES_TIMEOUT_S = 60
_MAKE_KEY = """\
for tool in ssh ssh-keygen /usr/sbin/sshd; do
  command -v $tool > /dev/null || { echo "no $tool"; exit 1; }
done
ssh-keygen -q -t ed25519 -N '' -f ~root/.ssh/id_ed25519
cat ~root/.ssh/id_ed25519
"""
_START_SERVER = """\
for user in root mpiuser; do
  id -u $user > /dev/null 2>&1 || continue
  eval "cd ~$user/.ssh"
  (
    umask 077
    echo "$KEY" > id_ed25519
    ssh-keygen -y -f id_ed25519 > authorized_keys
    printf 'Host *\\n  StrictHostKeyChecking accept-new\\n' > config
    chown $user -- *
  )
done
mkdir -p /run/sshd
/usr/sbin/sshd -D -e > /run/sshd/log 2>&1 < /dev/null &
"""
# A server that has just been started may not answer yet; one that refuses will go on refusing.
_REACH_ALL = f"""\
for user in root mpiuser; do
  id -u $user > /dev/null 2>&1 || continue
  for node in $NODES; do
    until answer=$({" ".join(runner.as_user("$user"))} ssh -o BatchMode=yes -o ConnectTimeout=2 $node true 2>&1); do
      if ((SECONDS > {NODES_TIMEOUT_S})) || [[ $answer == *'Permission denied'* ]]; then
        echo "$node: sshd does not let $user in: $answer"
        exit 1
      fi
      sleep 0.5
    done
  done
done
"""


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

    sshd runs in each, with host keys made there, and lets root and `mpiuser` in from every node by a key that was
    made for this cluster and lies in memory. All ends with the context. `options` returns further arguments of the
    SDK's `containers.run` for a node, counted from 0: for example its share of the GPUs, as NCCL takes none twice.
    Raises CommandError if the engine fails, NodesUnreachable if the nodes do not reach each other or have no ssh.
    """
    network = f"imagebuild-{uuid.uuid4().hex[:12]}"
    containers: list[Container] = []
    with ExitStack() as stack:
        stack.callback(engine.remove_patiently, lambda: client.networks.get(network).remove())
        with engine.sdk_errors_explained(network):
            # Nothing in it needs the world outside.
            client.networks.create(network, driver="bridge", internal=True, labels={engine.LABEL: "verify"})
        for number, name in enumerate(cluster_names(nodes)):
            own = {
                "hostname": name,
                "network": network,
                "networking_config": {network: client.api.create_endpoint_config(aliases=[name])},
                # Keys are neither in a layer nor on a disk.
                "tmpfs": {f"{home}/.ssh": f"mode=0700,uid={uid},gid={uid}" for home, uid in HOMES.items()},
            }
            started = engine.sleeping_container(client, image, **{**options(number), **own})
            containers.append(stack.enter_context(started))
        key = _run(containers[0], _MAKE_KEY)
        for node in containers:
            # As an argument, every process of the machine could read the key.
            _run(node, _START_SERVER, KEY=key)
        _run(containers[0], _REACH_ALL, NODES=" ".join(cluster_names(nodes)))
        yield tuple(containers)


def _run(node: Container, script: str, **environment: str) -> str:
    """Return what a script prints in a node. Raises NodesUnreachable if it fails."""
    argv = ("bash", "-euo", "pipefail", "-c", script)
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
    """Load an image from files into the engine's store. Yield its name there, which goes with the context.

    Names that files have for their images are not used: they may be those of other images there. Of several platforms
    the engine's is loaded, or the first. Raises ResultError if the image cannot be read, CommandError if the engine
    fails.
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
        (layout.folder / "manifest.json").write_text(
            json.dumps([{"Config": config, "RepoTags": [name], "Layers": layers}])
        )
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

    Checks need room for shared memory, and for memory that is pinned for RDMA; not every engine may set limits. It is
    not known before whether there are GPUs and cards.
    """
    common: Options = {
        "hostname": "check",
        "shm_size": max(1 << 30, int(info.get("MemTotal") or 0) // 2),
        "cap_add": ["IPC_LOCK"],
    }
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
    own = range(number * (gpus // nodes), (number + 1) * (gpus // nodes))
    if not options.get("device_requests") or not own:
        return options
    if options["device_requests"][0].driver == "cdi":
        request = DeviceRequest(driver="cdi", device_ids=[f"nvidia.com/gpu={gpu}" for gpu in own])
    else:
        request = DeviceRequest(device_ids=[str(gpu) for gpu in own], capabilities=[["gpu"]])
    return {**options, "device_requests": [request]}


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
        if command.nodes == 1:
            execution = self._run_in(self.container, command)
            if execution.status is None:
                # A restart ends everything that runs in the container, wherever it hides.
                with engine.sdk_errors_explained(f"docker restart {self.container.name}"):
                    self.container.restart(timeout=0)
            return execution
        try:
            nodes = self._cluster(command.nodes)
        except CommandError as error:
            return Execution(("docker", "run", self.image), None, str(error), 0.0, problem="the nodes did not start")
        execution = self._run_in(nodes[0], command, cluster_names(command.nodes))
        if execution.status is None:
            self._clusters.pop(command.nodes)[0].close()
        return execution

    def _run_in(self, container: Container, command: Command, nodes: Sequence[str] = ()) -> Execution:
        argv = ["docker", "exec", str(container.name)]
        return self.execution(command, partial(execute, container), argv, nodes=nodes)

    def _cluster(self, nodes: int) -> Sequence[Container]:
        """Return the containers of a cluster of this size; it is started once and used until a command is killed."""
        if nodes not in self._clusters:
            client = self.container.client
            assert client, "a container that was started has the client that started it"

            def options(number: int) -> Options:
                return with_share_of_gpus(self.options, number, nodes, self.surroundings.gpus)

            own = self._stack.enter_context(ExitStack())
            self._clusters[nodes] = (own, own.enter_context(cluster(client, self.image, nodes, options)))
        return self._clusters[nodes][1]


@contextmanager
def docker_session(
    connect: Callable[[], DockerClient], reference: str | None, found: FoundImage | None
) -> Iterator[DockerSession]:
    """Start a container of the image with this reference, or of the image that was found in files.

    What was started for it ends with the context. Raises CannotRun without an engine, or if the image lacks what a
    container needs, CommandError if the engine fails.
    """
    try:
        client = connect()
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
