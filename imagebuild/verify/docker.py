"""Run commands in containers on an engine: one, or several that reach each other by ssh."""

from __future__ import annotations

import json
import re
import shlex
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from docker import DockerClient
from docker.errors import DockerException
from docker.models.containers import Container
from docker.types import DeviceRequest, Ulimit

from imagebuild.core.errors import CommandError
from imagebuild.core.run import Finished, OutputReader
from imagebuild.oci import engine
from imagebuild.oci.image import images_in
from imagebuild.oci.layout import index_json
from imagebuild.verify import runner
from imagebuild.verify.runner import CannotRun, Command, Execution, Host, Runner, Session

USERS = {"root": ("/root", 0), "mpiuser": ("/home/mpiuser", 1000)}
"""Users that log in to nodes → home and number. An image that was not built here may lack the second."""
KEY = ".ssh/id_ed25519"
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
STEP_TIMEOUT_S = 60
# A server that has just been started may not answer yet; one that refuses will go on refusing.
WAIT_FOR_SSH = """\
for _ in $(seq {tries}); do
  if answer=$(ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=2 {name} true 2>&1); then exit; fi
  case $answer in *'Permission denied'* | *'verification failed'*) break ;; esac
  sleep 0.5
done
echo "$answer"
exit 1
"""


class NodesUnreachable(CommandError):
    """Report that the nodes run, but the image's ssh does not connect them."""


def cluster_names(nodes: int) -> list[str]:
    """Return the host names of the nodes of a cluster."""
    return [f"node-{number}" for number in range(1, nodes + 1)]


@contextmanager
def cluster(
    client: DockerClient,
    image: str,
    nodes: int,
    *,
    options: Callable[[int], Mapping[str, Any]] = lambda _: {},
    timeout_s: float = 60,
) -> Iterator[tuple[Container, ...]]:
    """Start containers of the image in a network of their own, called `node-1`, `node-2`, …

    sshd runs in each, with host keys made there, and lets root and `mpiuser` in from every node by a key that was
    made for this cluster and lies in memory. All ends with the context. `options` returns further arguments of the
    SDK's `containers.run` for a node, counted from 0: for example its share of the GPUs, as NCCL takes none twice.
    Raises CommandError if the engine fails, NodesUnreachable if the nodes do not reach each other within `timeout_s`
    seconds or if the image has no ssh.
    """
    names = cluster_names(nodes)
    network = f"imagebuild-{uuid.uuid4().hex[:12]}"
    with ExitStack() as stack:
        stack.callback(engine.remove_patiently, lambda: client.networks.get(network).remove())
        with engine.sdk_errors_explained(network):
            # Nothing in it needs the world outside.
            client.networks.create(network, driver="bridge", internal=True, labels={engine.LABEL: "verify"})
        containers = tuple(
            stack.enter_context(
                engine.sleeping_container(
                    client, image,
                    **{
                        **options(number),
                        "hostname": name,
                        "network": network,
                        "networking_config": {network: client.api.create_endpoint_config(aliases=[name])},
                        # Keys are neither in a layer nor on a disk.
                        "tmpfs": {f"{home}/.ssh": f"mode=0700,uid={uid},gid={uid}" for home, uid in USERS.values()},
                    },
                )
            )
            for number, name in enumerate(names)
        )  # fmt: skip
        users = [user for user in USERS if _run(containers[0], f"id {user} > /dev/null 2>&1 && echo yes || true")]
        for user in users:
            _authorise(containers, user)
        for container in containers:
            _run(container, "mkdir -p -m 755 /run/sshd; (/usr/sbin/sshd -D -e > /run/sshd/log 2>&1 < /dev/null &)")
        _connect(containers, users, timeout_s)
        yield containers


def _authorise(nodes: tuple[Container, ...], user: str) -> None:
    """Let the user log in from every node to every other."""
    _run(nodes[0], "for tool in ssh ssh-keygen /usr/sbin/sshd; do command -v $tool || { echo no $tool; exit 1; }; done")
    key = _run(
        nodes[0], f"ssh-keygen -q -t ed25519 -N '' -C {cluster_names(1)[0]} -f ~/{KEY} && cat ~/{KEY}", user
    )  # fmt: skip
    for node in nodes:
        # The key is no argument, which every process of the machine could read.
        keep = f'umask 077; printf "%s\\n" "$KEY" > ~/{KEY}; ssh-keygen -y -f ~/{KEY} | tee ~/.ssh/authorized_keys'
        _run(node, keep, user, {"KEY": key})


def _connect(nodes: tuple[Container, ...], users: list[str], timeout_s: float) -> None:
    """Give each node the host keys of all, as they are in there, and wait until the first reaches all by ssh."""
    deadline = time.monotonic() + timeout_s
    named_nodes = dict(zip(cluster_names(len(nodes)), nodes, strict=True))
    host_key = f"for _ in $(seq 100); do [ -s {HOST_KEY} ] && break; sleep 0.1; done; cut -d' ' -f1,2 {HOST_KEY}"
    known_hosts = [f"{name} {_run(node, host_key)}" for name, node in named_nodes.items()]
    for node in nodes:
        for user in users:
            _run(node, f"printf '%s\\n' {shlex.join(known_hosts)} > ~/.ssh/known_hosts", user)
    for user in users:
        for name, node in named_nodes.items():
            wait = WAIT_FOR_SSH.format(name=name, tries=max(1, round(2 * (deadline - time.monotonic()))))
            status, output = _execute(nodes[0], wait, user)
            if status:
                _, log = _execute(node, "tail -n 5 /run/sshd/log")
                raise NodesUnreachable(f"{name}: sshd does not let {user} in: {output.strip()}\n{log.strip()}")


def _run(node: Container, script: str, user: str = "root", environment: Mapping[str, str] | None = None) -> str:
    """Return what a script prints in a node. Raises NodesUnreachable if it fails."""
    status, output = _execute(node, script, user, environment)
    if status:
        raise NodesUnreachable(f"{node.name}: the node cannot be prepared (exit status {status}): {output.strip()}")
    return output.strip()


def _execute(
    node: Container, script: str, user: str = "root", environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return the exit status of a script, TIMEOUT_STATUS if it did not end in time, and what it prints."""
    variables = {**(environment or {}), "HOME": USERS[user][0], "USER": user}
    argv = ["bash", "-euo", "pipefail", "-c", script]
    done = execute(node, argv, user, timeout_s=STEP_TIMEOUT_S, environment=variables)
    return runner.TIMEOUT_STATUS if done.status is None else done.status, done.output


@contextmanager
def loaded_layout(client: DockerClient, path: Path) -> Iterator[str]:
    """Load a layout, or an archive of one, into the engine's store. Yield its name there, which goes with the context.

    Names that the layout has for its images are not used: they may be those of other images there. Of several platforms
    the engine's is loaded, or the first. Raises ConfigError or ResultError if there is no image, CommandError if the
    engine fails.
    """
    name = f"docker.io/imagebuild-verify/{uuid.uuid4().hex[:12]}:1"
    with engine.sdk_errors_explained("docker version"):
        arch = client.version()["Arch"]
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder, tempfile.TemporaryFile() as file:
        image = min(images_in(path, Path(folder)), key=lambda image: image.architecture != arch)
        layout = image.as_layout(Path(folder, "layout"))
        blobs = [image.manifest.document["config"]["digest"], *(layer.digest or "" for layer in image.layers)]
        config, *layers = [layout.path(digest).relative_to(layout.folder).as_posix() for digest in blobs]
        names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": "1"}
        documents: dict[str, Any] = {
            "index.json": index_json([replace(image.descriptor, annotations=names)]),
            # Engines that keep images unpacked read this, and no index.
            "manifest.json": [{"Config": config, "RepoTags": [name], "Layers": layers}],
        }
        for file_name, document in documents.items():
            (layout.folder / file_name).write_text(json.dumps(document))
        try:
            # Layers are symbolic links in there.
            with tarfile.open(fileobj=file, mode="w", dereference=True) as archive:
                archive.add(layout.folder, "")
        except OSError as error:
            raise CommandError(
                f"{path}: cannot be packed for the engine: {error.strerror}; TMPDIR may name a folder with more room"
            ) from None
        file.seek(0)
        try:
            with engine.sdk_errors_explained(f"docker load {path}"):
                # Not by `client.images`, which then asks for the image by a name without its registry.
                for line in cast(Any, client.api).load_image(file):
                    if "error" in line:
                        raise CommandError(f"docker load {path}: {line['error']}")
            yield name
        finally:
            with suppress(DockerException, OSError):
                client.images.remove(name, force=True)


MAX_NODES = 8
"""Nodes that a check may ask for."""
ENGINE_S = 20
"""Seconds on top of a command's time limit, in which the engine starts and ends it."""
SSH = frozenset({"ssh", "ssh-keygen", "sshd"})
IDLE = 2
"""Processes of a container in which nothing runs: init and `sleep`."""
REAPED_S = 1.0
"""Seconds that init may take to collect processes that have just ended."""
REFUSED = re.compile(r"rlimit|not permitted|devices?\b|CDI|nvidia|capabilit", re.IGNORECASE)
"""Words by which an engine says that it may not, or cannot, start a container with the given options."""
GPU = DeviceRequest(count=-1, capabilities=[["gpu"]])
CDI = DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=all"])
Options = dict[str, Any]
"""Arguments of the SDK's `containers.run`."""


def initial_options(info: Mapping[str, Any]) -> list[Options]:
    """Return options to start a container with, in the order to try them. `info` is the engine's description of itself.

    Checks need room for shared memory, and for memory that is pinned for RDMA; not every engine may set limits.
    """
    modest: Options = {
        "hostname": "check",
        "shm_size": max(1 << 30, int(info.get("MemTotal") or 0) // 2),
        "cap_add": ["IPC_LOCK"],
    }
    ulimits = [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=1 << 26, hard=1 << 26)]
    gpus = [{"device_requests": [GPU]}] if "nvidia" in (info.get("Runtimes") or {}) else []
    return [{**options, **devices} for devices in [*gpus, {}] for options in ({**modest, "ulimits": ulimits}, modest)]


def better_options(options: Options, info: Mapping[str, Any], host: Host) -> list[Options]:
    """Return options to try if a container got less hardware than its host has; [] if it got all."""
    rdma: Options = {"devices": ["/dev/infiniband:/dev/infiniband:rwm"]}
    lacks_rdma = host.ports and not host.has_verbs
    lacks_gpus = "driver" in host.facts and not host.gpus
    requests = [CDI, GPU] if lacks_gpus and info.get("CDISpecDirs") else [GPU] if lacks_gpus else []
    with_gpus = [{**options, "device_requests": [request]} for request in requests]
    return [{**tried, **rdma} for tried in [*with_gpus, options]] + with_gpus if lacks_rdma else with_gpus


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


class DockerRunner(Runner):
    """Run commands in containers on an engine."""

    name = "docker"
    one_host = True

    def __init__(self, client: DockerClient) -> None:
        self.client = client

    @contextmanager
    def session(self, reference: str | None, layout: Path | None) -> Iterator[DockerSession]:
        """Start a container of the image, or of the layout. Raises CannotRun if the image lacks what that needs."""
        with ExitStack() as stack:
            if reference is None:
                assert layout, "an image has a reference or a layout"
                reference = stack.enter_context(loaded_layout(self.client, layout))
            with engine.sdk_errors_explained("docker info"):
                info = self.client.info()
            session = self._start(stack, reference, initial_options(info))
            if options := better_options(session.options, info, session.host):
                # If no container starts with these, the one that runs already is kept.
                with suppress(CannotRun):
                    session = self._start(stack, reference, options)
            yield session

    def archive(self, reference: str | None) -> Iterator[bytes] | None:
        """Return the image as the engine saves it; None for an image that is not in its store."""
        return engine.save_image(self.client, reference) if reference else None

    def discard(self, reference: str) -> None:
        """Remove an image that was pulled; one that something else uses stays."""
        with suppress(DockerException, OSError):
            self.client.images.remove(reference)

    def _start(self, stack: ExitStack, image: str, options_to_try: list[Options]) -> DockerSession:
        problem = ""
        for options in options_to_try:
            with ExitStack() as attempt:
                try:
                    container = attempt.enter_context(engine.sleeping_container(self.client, image, **options))
                except CommandError as error:
                    problem = str(error)
                    if not REFUSED.search(problem):
                        break
                    continue
                host = run_probe(container, image)
                stack.push(attempt.pop_all())
                return DockerSession(image, container, options, host, stack)
        raise CannotRun(problem)


def run_probe(container: Container, image: str) -> Host:
    """Return what there is in a container of the image. Raises CannotRun if the probe does not reach its end there."""
    printed = ""
    try:
        done = execute(container, ["sh", "-c", runner.PROBE], "root", timeout_s=runner.PROBE_TIMEOUT_S)
        printed, how = done.output, "did not end" if done.status is None else f"ended with {done.status}"
    except CommandError as error:  # the container has ended, because it has no `sleep`
        how = f"failed: {error}"
    host = runner.read_probe(printed)
    if host is None:
        with engine.sdk_errors_explained(image):
            output = printed.strip() or container.logs(tail=5).decode(errors="replace").strip()
        raise CannotRun(
            f"{image}: checks need a shell and `sleep` in the image, but the first command {how}: {output[-300:]}"
        )
    return host


def execute(
    container: Container, argv: list[str], user: str, *, timeout_s: float, log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:  # fmt: skip
    """Run a program in a container, and return how it ended. One that takes too long is left running.

    Raises CommandError if the engine fails, or the log cannot be written.
    """
    assert container.client, "a container that was started has the client that started it"
    api = container.client.api
    status: list[int] = []

    def output() -> Generator[bytes]:
        process = api.exec_create(container.id, argv, user=user, workdir="/", environment=dict(environment or {}))
        yield from engine.exec_output(api, process["Id"])
        status.append(api.exec_inspect(process["Id"])["ExitCode"])

    # An engine that stops cannot keep us: all that asks it is done by the thread.
    chunks = output()
    reader = OutputReader(chunks, chunks.close, log)
    reader.join(timeout_s)
    if reader.error:
        with engine.sdk_errors_explained(str(container.name)):
            raise reader.error
    return Finished(status[0] if status else None, reader.text, problem=reader.problem)


class DockerSession(Session):
    """Run commands in a container of the image, and in more of them where a check needs several nodes."""

    def __init__(self, image: str, container: Container, options: Options, host: Host, stack: ExitStack) -> None:
        self.image, self.container, self.options, self.host = image, container, options, host
        self._stack = stack
        self._clusters: dict[int, tuple[ExitStack, tuple[Container, ...]]] = {}
        why = {"slurm": "the docker runner does not use it", "nodes": "the image lacks ssh, ssh-keygen or sshd"}
        if "device_requests" not in options:
            why["gpu"] = "the engine gives the container no GPU"
        nodes = MAX_NODES if self.host.tools >= SSH else 1
        self.facilities = self.host.facilities(nodes=nodes, slurm=False, why=why)

    def run(self, command: Command) -> Execution:
        """Run a command in the container, or in a cluster if it needs several nodes. Raises CommandError."""
        if command.nodes == 1:
            execution = self._run_in(self.container, command)
            if execution.status is None or has_leftovers(self.container):
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
        limit_s = command.timeout_s + runner.GRACE_S + ENGINE_S

        def start(program: str, _: str) -> Finished:
            return execute(container, ["bash", "-c", program], command.user, timeout_s=limit_s, log=command.log)

        argv = ["docker", "exec", "--user", command.user, str(container.name)]
        return self.execution(command, start, argv, nodes=nodes)

    def _cluster(self, nodes: int) -> tuple[Container, ...]:
        """Return the containers of a cluster of this size; it is started once and used until a command is killed."""
        if nodes not in self._clusters:
            client = self.container.client
            assert client, "a container that was started has the client that started it"

            def options(number: int) -> Options:
                return with_share_of_gpus(self.options, number, nodes, self.facilities.gpus)

            with ExitStack() as attempt:
                containers = attempt.enter_context(cluster(client, self.image, nodes, options=options))
                self._clusters[nodes] = (self._stack.enter_context(attempt.pop_all()), containers)
        return self._clusters[nodes][1]


def has_leftovers(container: Container) -> bool:
    """Return whether a command left processes behind. The kernel counts them: the engine's list needs `ps` on its host.

    An engine without the kernel's counter cannot tell, and the answer is yes. Raises CommandError if the engine fails.
    """
    deadline = time.monotonic() + REAPED_S
    while True:
        with engine.sdk_errors_explained(str(container.name)):
            figures: Any = container.stats(stream=False, one_shot=True)
        if figures.get("pids_stats", {}).get("current", IDLE + 1) <= IDLE:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
