"""The runner `docker`: a container of the image on the engine, with the GPUs and RDMA devices that it can give."""

from __future__ import annotations

import re
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
from docker.types import DeviceRequest, Ulimit

from imagebuild import docker, redact
from imagebuild.errors import CommandError
from imagebuild.needs import Facilities
from imagebuild.runners import probe, script
from imagebuild.runners.base import Command, Execution, Place, Unusable
from imagebuild.runners.cluster import cluster
from imagebuild.runners.cluster import names as cluster_names
from imagebuild.runners.sink import Sink

MAX_NODES = 8
"""Containers that a check may ask for."""
HANG_S = 20
"""On top of a command's time: what the engine may take to start it and to end it."""
RESTART_S = 60
SSH = frozenset({"ssh", "ssh-keygen", "sshd"})
IDLE = 2
"""Processes of a container in which nothing runs: init and `sleep`."""
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
        with docker.explained("docker info"):
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
                    running = attempt.enter_context(docker.container(self.client, image, **options))
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
    with Sink(None) as sink:
        try:
            status = execute(running, ["sh", "-c", probe.PROGRAM], "root", sink=sink, timeout_s=probe.TIMEOUT_S)
            how = "did not end" if status is None else f"ended with {status}"
        except CommandError as error:  # the container has ended, because there is no `sleep`
            how = str(error)
    told = probe.read(sink.text)
    if told is None:
        with docker.explained(image):
            said = sink.text.strip() or running.logs(tail=5).decode(errors="replace").strip()
        raise Unusable(
            f"{image}: no checks can run in it, for which it needs a shell and `sleep`: {how}: {said[-300:]}"
        )
    return told


def execute(running: Container, argv: list[str], user: str, *, sink: Sink, timeout_s: float) -> int | None:
    """Run a program in a container: its status, or `None` if it must be ended for its time or its output.

    Raises CommandError if the engine fails.
    """
    problems: list[BaseException] = []

    def drain() -> None:
        try:
            started = docker.Exec.create(running, argv, user=user)
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
        with docker.explained(str(running.name)):
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
        self.place: Place = probe.place(started.told)
        why = {"slurm": "the engine has none", "nodes": "the image lacks ssh, ssh-keygen or sshd"}
        if "device_requests" not in started.options:
            why["gpu"] = "the engine gives the container none"
        nodes = MAX_NODES if self.place.tools >= SSH else 1
        self.facilities: Facilities = probe.facilities(started.told, nodes=nodes, slurm=False, why=why)

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


def run_in(running: Container, command: Command, place: Place) -> Execution:
    """Run a command in a container. Raises CommandError if the engine fails."""
    _, _, home = place.accounts[command.user]
    given = {"LC_ALL": "C.UTF-8", "HOME": home, "USER": command.user, **command.environment}
    program = script.wrapped(command.script, token=uuid.uuid4().hex, timeout_s=command.timeout_s, environment=given)
    began = time.monotonic()
    limit = command.timeout_s + script.GRACE_S + HANG_S
    with Sink(command.log) as sink:
        argv = ["bash", "-c", program]
        status = execute(running, argv, command.user, sink=sink, timeout_s=limit)
    seconds = time.monotonic() - began
    late = status == script.LATE and seconds >= command.timeout_s
    words = ["docker", "exec", "--user", command.user, str(running.name), "bash", "-euo", "pipefail", "-c"]
    return Execution(
        argv=redact.arguments([*words, command.script]),
        status=None if late else status,
        output=sink.text,
        seconds=seconds,
        environment=redact.environment(given),
        problem=sink.reason,
    )


def _busy(running: Container) -> bool:
    with docker.explained(str(running.name)):
        return len(running.top()["Processes"]) > IDLE


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
