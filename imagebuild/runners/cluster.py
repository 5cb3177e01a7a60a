"""Several containers of an image that reach each other by ssh, as the pods of an MPI job do."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from docker import DockerClient
from docker.models.containers import Container
from docker.models.networks import Network

from imagebuild import docker
from imagebuild.errors import CommandError

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


class Unreachable(CommandError):
    """The nodes run, but the image's ssh does not connect them."""


def names(nodes: int) -> list[str]:
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
                docker.container(client, image, **{**options(number), **_wiring(client, network, name)})
            )
            for number, name in enumerate(names(nodes))
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
        with docker.explained(name):
            # Nothing here has business outside.
            made = client.networks.create(name, driver="bridge", internal=True, labels={docker.LABEL: "verify"})
        yield made
    finally:
        docker.removed(lambda: client.networks.get(name).remove())


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
    make = f"ssh-keygen -q -t ed25519 -N '' -C {names(1)[0]} -f ~/{KEY} && cat ~/{KEY}"
    _run(nodes[0], "for tool in ssh ssh-keygen /usr/sbin/sshd; do command -v $tool || { echo no $tool; exit 1; }; done")
    key = _run(nodes[0], make, user)
    # Not as an argument, which every process of the machine could read.
    for node in nodes:
        put = f'umask 077; printf "%s\\n" "$KEY" > ~/{KEY}; ssh-keygen -y -f ~/{KEY} | tee ~/.ssh/authorized_keys'
        _run(node, put, user, {"KEY": key})


def _introduce(nodes: tuple[Container, ...], users: list[str], timeout_s: float) -> None:
    """Tell each node the others' host keys, as they are in there, and wait until all answer."""
    deadline = time.monotonic() + timeout_s
    called = names(len(nodes))
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
                raise Unreachable(f"{name}: sshd does not let {user} in: {said.strip()}\n{log.strip()}")


def _run(node: Container, script: str, user: str = "root", environment: Mapping[str, str] | None = None) -> str:
    """What a script prints in a node. Raises Unreachable if it fails."""
    status, output = _execute(node, script, user, environment or {})
    if status:
        raise Unreachable(f"{node.name}: the node cannot be prepared (exit status {status}): {output.strip()}")
    return output.strip()


def _execute(node: Container, script: str, user: str, environment: Mapping[str, str]) -> tuple[int, str]:
    return docker.execute(node, script, user=user, timeout_s=STEP_TIMEOUT_S, environment=environment)
