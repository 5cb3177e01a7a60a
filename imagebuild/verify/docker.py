"""Run commands in containers on an engine: one, or several that reach each other by ssh."""

from __future__ import annotations

import re
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from docker import DockerClient
from docker.errors import DockerException
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import DeviceRequest, Ulimit

from imagebuild.core import console
from imagebuild.core.errors import CommandError
from imagebuild.core.run import OutputSink
from imagebuild.oci import engine
from imagebuild.project.component import Facilities
from imagebuild.verify import runner
from imagebuild.verify.runner import Command, Execution, HostFacts, Unusable

USERS = {"root": ("/root", 0), "mpiuser": ("/home/mpiuser", 1000)}
"""Who may log in: home and number. An image that was not built here may lack the second."""
KEY = ".ssh/id_ed25519"
STEP_TIMEOUT_S = 60
# A server that has just been started may not answer yet; one that refuses will go on to.
GREET = """\
for _ in $(seq {tries}); do
  if said=$(ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=2 {name} true 2>&1); then exit; fi
  case $said in *'Permission denied'* | *'verification failed'*) break ;; esac
  sleep 0.5
done
echo "$said"
exit 1
"""


class NodesUnreachable(CommandError):
    """The nodes run, but the image's ssh does not connect them."""


def cluster_names(nodes: int) -> list[str]:
    """What the nodes call each other."""
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
    made for this cluster and lies in memory. All ends with the context. `options` are further arguments of the SDK's
    `containers.run` for a node, counted from 0: for example its share of the GPUs, since NCCL takes none twice.
    Raises CommandError if the engine fails, and Unreachable, which is one, if the nodes do not reach each other
    within `timeout_s` seconds or if the image has no ssh.
    """
    with ExitStack() as stack:
        network = stack.enter_context(_network(client))
        running = tuple(
            stack.enter_context(
                engine.sleeping_container(client, image, **{**options(number), **_wiring(client, network, name)})
            )
            for number, name in enumerate(cluster_names(nodes))
        )
        users = [user for user in USERS if _run(running[0], f"id {user} > /dev/null 2>&1 && echo yes || true")]
        for user in users:
            _authorise(running, user)
        for node in running:
            _run(node, "mkdir -p -m 755 /run/sshd; (/usr/sbin/sshd -D -e > /run/sshd/log 2>&1 < /dev/null &)")
        _introduce(running, users, timeout_s)
        yield running


@contextmanager
def _network(client: DockerClient) -> Iterator[Network]:
    name = f"imagebuild-{uuid.uuid4().hex[:12]}"
    try:
        with engine.sdk_errors_explained(name):
            # Nothing here has business outside.
            made = client.networks.create(name, driver="bridge", internal=True, labels={engine.LABEL: "verify"})
        yield made
    finally:
        engine.remove_patiently(lambda: client.networks.get(name).remove())


def _wiring(client: DockerClient, network: Network, name: str) -> dict[str, Any]:
    return {
        "hostname": name,
        "network": network.name,
        "networking_config": {network.name: client.api.create_endpoint_config(aliases=[name])},
        # Keys are neither in a layer nor on a disk.
        "tmpfs": {f"{home}/.ssh": f"mode=0700,uid={uid},gid={uid}" for home, uid in USERS.values()},
    }


def _authorise(nodes: tuple[Container, ...], user: str) -> None:
    """Let the user log in from every node to every other."""
    make = f"ssh-keygen -q -t ed25519 -N '' -C {cluster_names(1)[0]} -f ~/{KEY} && cat ~/{KEY}"
    _run(nodes[0], "for tool in ssh ssh-keygen /usr/sbin/sshd; do command -v $tool || { echo no $tool; exit 1; }; done")
    key = _run(nodes[0], make, user)
    # Not as an argument, which every process of the machine could read.
    for node in nodes:
        put = f'umask 077; printf "%s\\n" "$KEY" > ~/{KEY}; ssh-keygen -y -f ~/{KEY} | tee ~/.ssh/authorized_keys'
        _run(node, put, user, {"KEY": key})


def _introduce(nodes: tuple[Container, ...], users: list[str], timeout_s: float) -> None:
    """Tell each node the others' host keys, as they are in there, and wait until all answer."""
    deadline = time.monotonic() + timeout_s
    called = cluster_names(len(nodes))
    key = "/etc/ssh/ssh_host_ed25519_key.pub"
    wait = f"for _ in $(seq 100); do [ -s {key} ] && break; sleep 0.1; done; cut -d' ' -f1,2 {key}"
    known = [f"{name} {_run(node, wait)}" for name, node in zip(called, nodes, strict=True)]
    for node in nodes:
        for user in users:
            _run(node, f"printf '%s\\n' {shlex.join(known)} > ~/.ssh/known_hosts", user)
    for user in users:
        for name, node in zip(called, nodes, strict=True):
            greet = GREET.format(name=name, tries=max(1, round(2 * (deadline - time.monotonic()))))
            status, said = _execute(nodes[0], greet, user, {})
            if status:
                _, log = _execute(node, "tail -n 5 /run/sshd/log", "root", {})
                raise NodesUnreachable(f"{name}: sshd does not let {user} in: {said.strip()}\n{log.strip()}")


def _run(node: Container, script: str, user: str = "root", environment: Mapping[str, str] | None = None) -> str:
    """What a script prints in a node. Raises Unreachable if it fails."""
    status, output = _execute(node, script, user, environment or {})
    if status:
        raise NodesUnreachable(f"{node.name}: the node cannot be prepared (exit status {status}): {output.strip()}")
    return output.strip()


def _execute(node: Container, script: str, user: str, environment: Mapping[str, str]) -> tuple[int, str]:
    return engine.execute_script(node, script, user=user, timeout_s=STEP_TIMEOUT_S, environment=environment)


MAX_NODES = 8
"""Containers that a check may ask for."""
HANG_S = 20
"""On top of a command's time: what the engine may take to start it and to end it."""
RESTART_S = 60
SSH = frozenset({"ssh", "ssh-keygen", "sshd"})
IDLE = 2
"""Processes of a container in which nothing runs: init and `sleep`."""
REAPED_S = 1.0
"""How long init may take to collect processes that have just ended."""
REFUSED = re.compile(r"rlimit|not permitted|devices?\b|CDI|nvidia|capabilit", re.IGNORECASE)
"""What the engine says when it may not, or cannot, give a container what was asked for."""
GPU = DeviceRequest(count=-1, capabilities=[["gpu"]])
CDI = DeviceRequest(driver="cdi", device_ids=["nvidia.com/gpu=all"])
Options = dict[str, Any]


def usual(info: Mapping[str, Any]) -> Options:
    """How containers of checks are started: room for shared memory and for memory that is pinned for RDMA."""
    return {
        "hostname": "check",
        "shm_size": max(1 << 30, int(info.get("MemTotal") or 0) // 2),
        "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1), Ulimit(name="stack", soft=1 << 26, hard=1 << 26)],
        "cap_add": ["IPC_LOCK"],
    }


def first(info: Mapping[str, Any]) -> list[Options]:
    """What to start a container with, in the order to be tried: not every engine may set limits."""
    options = usual(info)
    modest = {name: value for name, value in options.items() if name != "ulimits"}
    gpu = [{"device_requests": [GPU]}] if "nvidia" in (info.get("Runtimes") or {}) else []
    return [{**most, **devices} for devices in [*gpu, {}] for most in (options, modest)]


def second(options: Options, info: Mapping[str, Any], told: Mapping[str, list[str]]) -> list[Options]:
    """What to try where the first container shows that the host has more than it got. Nothing if it has not."""
    rdma: Options = {"devices": ["/dev/infiniband:/dev/infiniband:rwm"]}
    wants_rdma = bool(told.get("port")) and not told.get("verbs")
    wants_gpu = bool(told.get("driver", [""])[0]) and told.get("gpus") == ["0"]
    requests = [CDI, GPU] if wants_gpu and info.get("CDISpecDirs") else [GPU] if wants_gpu else []
    tries = [{**options, "device_requests": [request]} for request in requests]
    return [{**most, **rdma} for most in [*tries, options]] + tries if wants_rdma else tries


@dataclass(frozen=True)
class Started:
    """A container that runs, what it was started with, and what the probe told about it."""

    running: Container
    options: Options
    told: Mapping[str, list[str]]


@dataclass(frozen=True)
class DockerRunner:
    """Containers on an engine."""

    client: DockerClient
    name: str = "docker"

    @contextmanager
    def session(self, image: str) -> Iterator[DockerSession]:
        """Start a container and find out what is in it. Raises Unusable if the image cannot do that."""
        with engine.sdk_errors_explained("docker info"):
            info = self.client.info()
        with ExitStack() as stack:
            started = self._start(stack, image, first(info))
            if better := second(started.options, info, started.told):
                # If none of these starts, the one that runs already is as good as it gets here.
                with suppress(Unusable):
                    started = self._start(stack, image, better)
            yield DockerSession(self.client, image, started, stack)

    def _start(self, stack: ExitStack, image: str, tries: list[Options]) -> Started:
        problem = "nothing to try"
        for options in tries:
            with ExitStack() as attempt:
                try:
                    running = attempt.enter_context(engine.sleeping_container(self.client, image, **options))
                except CommandError as error:
                    problem = str(error)
                    if not REFUSED.search(problem):
                        break
                    continue
                started = Started(running, options, examined(running, image))
                stack.push(attempt.pop_all())
                return started
        raise Unusable(problem)


def examined(running: Container, image: str) -> dict[str, list[str]]:
    """What the probe tells about a container. Raises Unusable if it cannot run."""
    with OutputSink(None) as sink:
        try:
            status = execute(running, ["sh", "-c", runner.PROGRAM], "root", sink=sink, timeout_s=runner.TIMEOUT_S)
            how = "did not end" if status is None else f"ended with {status}"
        except CommandError as error:  # the container has ended, because there is no `sleep`
            how = str(error)
    told = runner.read(sink.text)
    if told is None:
        with engine.sdk_errors_explained(image):
            said = sink.text.strip() or running.logs(tail=5).decode(errors="replace").strip()
        raise Unusable(
            f"{image}: no checks can run in it, for which it needs a shell and `sleep`: {how}: {said[-300:]}"
        )
    return told


def execute(running: Container, argv: list[str], user: str, *, sink: OutputSink, timeout_s: float) -> int | None:
    """Run a program in a container: its status, or `None` if it must be ended for its time or its output.

    Raises CommandError if the engine fails.
    """
    problems: list[BaseException] = []

    def drain() -> None:
        try:
            started = engine.ExecProcess.create(running, argv, user=user)
            sink.drain(started.output())
            status.append(started.status())
        except (DockerException, OSError) as error:
            problems.append(error)

    status: list[int | None] = []
    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout_s
    while reader.is_alive() and time.monotonic() < deadline and not sink.full.is_set():
        reader.join(min(0.5, max(0.0, deadline - time.monotonic())))
    if problems:
        with engine.sdk_errors_explained(str(running.name)):
            raise problems[0]
    return None if reader.is_alive() or sink.full.is_set() else status[0]


def share(options: Options, number: int, nodes: int, gpus: int) -> Options:
    """The options of one of several nodes: with its own GPUs, since NCCL takes none twice."""
    own = range(number * (gpus // nodes), (number + 1) * (gpus // nodes))
    if not options.get("device_requests") or not own:
        return options
    if options["device_requests"][0].driver == "cdi":
        request = DeviceRequest(driver="cdi", device_ids=[f"nvidia.com/gpu={gpu}" for gpu in own])
    else:
        request = DeviceRequest(device_ids=[str(gpu) for gpu in own], capabilities=[["gpu"]])
    return {**options, "device_requests": [request]}


class DockerSession:
    """A container of the image."""

    def __init__(self, client: DockerClient, image: str, started: Started, stack: ExitStack) -> None:
        self.client, self.image, self.started = client, image, started
        self._stack = stack
        self._clusters: dict[int, tuple[ExitStack, tuple[Container, ...]]] = {}
        self.place: HostFacts = runner.place(started.told)
        why = {"slurm": "the engine has none", "nodes": "the image lacks ssh, ssh-keygen or sshd"}
        if "device_requests" not in started.options:
            why["gpu"] = "the engine gives the container none"
        nodes = MAX_NODES if self.place.tools >= SSH else 1
        self.facilities: Facilities = runner.facilities(started.told, nodes=nodes, slurm=False, why=why)

    def obstacle(self, command: Command) -> str:
        """Why this command cannot be run here at all."""
        if "bash" not in self.place.tools:
            return "the image has no bash"
        if command.user not in self.place.accounts:
            return f"the image has no user {command.user}"
        return ""

    def run(self, command: Command) -> Execution:
        """Run a command in the container, or in new ones if it needs several. Raises CommandError."""
        if command.nodes == 1:
            done = run_in(self.started.running, command, self.place)
            if done.status is None or _busy(self.started.running):
                restart(self.started.running)
            return done

        try:
            nodes = self._nodes(command.nodes)
        except CommandError as error:
            return Execution(("docker", "run", self.image), None, str(error), 0.0, problem="the nodes did not come up")
        names = {"IMAGEBUILD_NODES": " ".join(cluster_names(command.nodes))}
        environment = {**command.environment, **names}
        done = run_in(nodes[0], replace(command, environment=environment), self.place)
        if done.status is None:
            self._clusters.pop(command.nodes)[0].close()
        return done

    def _nodes(self, number: int) -> tuple[Container, ...]:
        """So many nodes: those that a check before had, unless it was killed. Raises CommandError."""
        if number not in self._clusters:

            def options(node: int) -> Options:
                return share(self.started.options, node, number, self.facilities.gpus)

            with ExitStack() as attempt:
                nodes = attempt.enter_context(cluster(self.client, self.image, number, options=options))
                self._clusters[number] = (self._stack.enter_context(attempt.pop_all()), nodes)
        return self._clusters[number][1]


def run_in(running: Container, command: Command, place: HostFacts) -> Execution:
    """Run a command in a container. Raises CommandError if the engine fails."""
    _, _, home = place.accounts[command.user]
    given = {"LC_ALL": "C.UTF-8", "HOME": home, "USER": command.user, **command.environment}
    program = runner.wrapped(command.script, token=uuid.uuid4().hex, timeout_s=command.timeout_s, environment=given)
    began = time.monotonic()
    limit = command.timeout_s + runner.GRACE_S + HANG_S
    with OutputSink(command.log) as sink:
        argv = ["bash", "-c", program]
        status = execute(running, argv, command.user, sink=sink, timeout_s=limit)
    seconds = time.monotonic() - began
    late = status == runner.LATE and seconds >= command.timeout_s
    words = ["docker", "exec", "--user", command.user, str(running.name), "bash", "-euo", "pipefail", "-c"]
    return Execution(
        argv=console.redacted_arguments([*words, command.script]),
        status=None if late else status,
        output=sink.text,
        seconds=seconds,
        environment=console.redacted_environment(given),
        problem=sink.reason,
    )


def _busy(running: Container) -> bool:
    """Return whether a command left processes behind. The kernel counts them: the engine's list needs `ps` on its host.

    An engine without the kernel's counter cannot tell, and the answer is yes. Raises CommandError if the engine fails.
    """
    deadline = time.monotonic() + REAPED_S
    while True:
        with engine.sdk_errors_explained(str(running.name)):
            figures: Any = running.stats(stream=False, one_shot=True)
        if figures.get("pids_stats", {}).get("current", IDLE + 1) <= IDLE:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)


def restart(running: Container) -> None:
    """End everything that runs in a container, wherever it has hidden. Raises CommandError if the engine cannot."""
    _within(RESTART_S, f"{running.name}: its processes cannot be ended", lambda: running.restart(timeout=0))


def _within(seconds: float, what: str, call: Callable[[], object]) -> None:
    problems: list[BaseException] = []

    def attempt() -> None:
        try:
            call()
        except (DockerException, OSError) as error:
            problems.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CommandError(f"{what}: the engine did not answer within {seconds:.0f} s")
    if problems:
        raise CommandError(f"{what}: {problems[0]}")
