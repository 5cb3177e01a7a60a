"""Real nodes of BuildKit on the loopback, with TLS: `--buildkit FOLDER` names the folder of buildkitd and runc."""

from __future__ import annotations

import os
import pwd
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from tests.conftest import ROOT, ran
from tests.docker.conftest import install
from tests.upstream.registry import free_port

COMMON = ("--oci-worker-net", "host", "--containerd-worker=false", "--cdi-disabled")


@dataclass
class Node:
    """A running buildkitd."""

    address: str
    process: subprocess.Popen[bytes]
    argv: tuple[str, ...]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to buildkitd and all its programs."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.process = subprocess.Popen(self.argv, start_new_session=True)


@dataclass
class Farm:
    """Nodes and builders of buildx, all removed by `close`."""

    buildkit: Path
    folder: Path
    environ: Mapping[str, str]
    nodes: list[Node] = field(default_factory=list)
    builders: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    """Users that were made for rootless nodes."""
    network: str = field(default_factory=lambda: f"198.18.{random.randrange(256)}")
    """The network of the node with another clock."""

    def __post_init__(self) -> None:
        """Make a certificate authority, and certificates for the nodes and for buildx, valid from 2020 for two more days."""
        install({"faketime": "faketime"})
        days = (datetime.now(UTC) - datetime(2020, 1, 1, tzinfo=UTC)).days + 2
        made = ("faketime", "2020-01-01", "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", days)
        self.folder.chmod(0o755)
        for name in ("ca", "node", "client"):
            own = () if name == "ca" else ("-CA", self.file("ca.pem"), "-CAkey", self.file("ca.key"))
            names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:127.0.0.1,IP:{self.network}.2")
            ran(*made, *own, *names, "-keyout", self.file(f"{name}.key"), "-out", self.file(f"{name}.pem"), check=True)
            self.file(f"{name}.key").chmod(0o644)  # a rootless node reads it

    def file(self, name: str) -> Path:
        return self.folder / name

    def node(self, *options: str, root: Path | None = None, user: str = "", days: int | None = None) -> Node:
        """Start a node with options of buildkitd, in a root folder of its own, and rootless if a user is named.
        One node of a farm can have another clock, which is `days` ahead."""
        root = root or self.folder / uuid4().hex[:8]
        address = f"{'127.0.0.1' if days is None else self.network + '.2'}:{free_port()}"
        root.mkdir(exist_ok=True)
        own = {"cacert": "ca.pem", "cert": "node.pem", "key": "node.key"}
        tls = [f"--tls{option}={self.file(name)}" for option, name in own.items()]
        argv = [
            self.buildkit / "buildkitd", "--addr", f"tcp://{address}", "--root", root / "state", *tls, *COMMON,
            "--otel-socket-path", root / "otel.sock", *options,
        ]  # fmt: skip
        if user:
            os.chown(root, pwd.getpwnam(user).pw_uid, -1)
            home = ("env", f"HOME={root}", f"XDG_RUNTIME_DIR={root}")
            switch = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *home)
            rootless = ("--rootless", "--oci-worker-no-process-sandbox")
            argv = [*switch, "rootlesskit", "--net=host", "--copy-up=/etc", "--copy-up=/run", *argv, *rootless]
        if days is not None:
            argv = [
                *self.other_kernel(root),
                days * 86400,
                self.network,
                root,
                *argv,
                "--oci-worker-snapshotter",
                "native",
            ]
        command = tuple(map(str, argv))
        self.nodes.append(Node(address, subprocess.Popen(command, start_new_session=True), command))
        return self.nodes[-1]

    def builder(self, *nodes: Node, wait: bool = True) -> str:
        """Create a builder of these nodes, the second for arm64, wait until all run, and return its name."""
        name = f"imagebuild-test-{uuid4().hex[:8]}"
        self.builders.append(name)
        tls = ",".join(f"{key}={self.file(file)}" for key, file in
                       {"cacert": "ca.pem", "cert": "client.pem", "key": "client.key"}.items())  # fmt: skip
        for number, node in enumerate(nodes):
            more = ("--append", "--platform", "linux/arm64") if number else ()
            create = ("docker", "buildx", "create", *more, "--name", name, "--driver", "remote", "--driver-opt", tls)
            ran(*create, f"tcp://{node.address}", env=self.environ, check=True)
        deadline = time.monotonic() + 60
        while wait and ran("docker", "buildx", "inspect", name, env=self.environ).stdout.count("running") < len(nodes):
            assert time.monotonic() < deadline, "the nodes do not start"
        return name

    def other_kernel(self, root: Path) -> tuple[str | Path, ...]:
        """Return the command that starts a kernel with its own clock, as Linux has no other way to have two clocks."""
        install({"linux.uml": "user-mode-linux"})
        device = self.network.replace(".", "-")
        ran("ip", "tuntap", "add", device, "mode", "tap", check=True)
        ran("ip", "address", "add", f"{self.network}.1/30", "dev", device, check=True)
        ran("ip", "link", "set", device, "up", check=True)
        disk = ("root=none", "rootfstype=hostfs", "rootflags=/", "ro", "mem=3G", f"uml_dir={root}")
        console = ("con=null", "con0=null,fd:1", "quiet", f"eth0=tuntap,{device}")
        return ("linux.uml", *disk, *console, f"init={ROOT}/tests/docker/clock.sh", "--")

    def rootless_user(self) -> str:
        """Return a user that has a range of user ids for rootless nodes. Make this user if there is none."""
        install({"rootlesskit": "rootlesskit", "newuidmap": "uidmap"})
        names = [line.partition(":")[0] for line in Path("/etc/subuid").read_text().splitlines()]
        if not names:
            ran("useradd", "--create-home", "imagebuild-test", check=True)
            names = self.users = ["imagebuild-test"]
        return names[0]

    def close(self) -> None:
        for name in self.builders:
            ran("docker", "buildx", "rm", name, env=self.environ)
        for node in self.nodes:
            node.stop()
        ran("ip", "link", "delete", self.network.replace(".", "-"))
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted(path for path in mounted if Path(path).is_relative_to(self.folder)):
            ran("umount", "--recursive", mount)
        for user in self.users:
            ran("userdel", "--remove", user)
