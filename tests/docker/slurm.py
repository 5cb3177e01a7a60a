"""A Slurm of two nodes on the loopback of this machine: the distribution's daemons, with a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.core import which
from tests.docker.conftest import install, until

NODES = ("n1", "n2")
CONFIGURATION = """\
ClusterName=imagebuild
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=1000 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES
GresTypes=gpu
"""
# slurmd would have the nodes share PMIx's folder, since they share the machine. Each sees one of its own.
SLURMD = 'mount -t tmpfs -o mode=755 imagebuild-test "$1/pmix" && exec slurmd -D -N "$2"'
ENTER = """\
#!/bin/bash
# Run a command in an unpacked image, as root: enter ROOTFS COMMAND...
# Ranks share processes, memory and PMIx's folders with the machine, as they do in Slurm's usual containers.
set -eu
export ROOTFS=$1
shift
exec unshare --mount bash -euc '
  for place in /proc /dev /sys /tmp {folder}; do mount --rbind "$place" "$ROOTFS$place"; done
  exec chroot "$ROOTFS" env {environment} "$@"
' enter "$@"
"""


@dataclass(frozen=True)
class Slurm:
    """One that runs."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        # srun hands its own on to the ranks, and PMIx wants a home.
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        temporary = str(self.folder / "tmp")
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "HOME": temporary, "TMPDIR": temporary,
        }  # fmt: skip

    def unpack(self, client: DockerClient, image: str) -> list[str]:
        """Unpack an image; what to put before a command so that it runs in there."""
        rootfs = self.folder / "rootfs"
        rootfs.mkdir()
        made = client.containers.create(image)
        try:
            with subprocess.Popen(["tar", "-x", "-C", rootfs], stdin=subprocess.PIPE) as tar:
                assert tar.stdin
                tar.stdin.writelines(made.export())  # type: ignore[arg-type]  # its stubs say str
            assert tar.returncode == 0
        finally:
            made.remove()
        (rootfs / self.folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
        environment = " ".join(f"'{entry}'" for entry in client.images.get(image).attrs["Config"]["Env"])
        enter = self.folder / "enter"
        enter.write_text(ENTER.format(folder=self.folder, environment=environment))
        enter.chmod(0o755)
        return [str(enter), str(rootfs)]


@contextmanager
def running() -> Iterator[Slurm]:
    """munged, slurmctld and two slurmd; they have ended at the end. The nodes claim what this machine may lack."""
    if os.geteuid():
        pytest.skip("Slurm's daemons, and installing them, need root")
    needed = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
    missing = [package for program, package in needed.items() if not which(program)]
    # Slurm's plug-in opens the library by a name that only the development package has.
    if not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
        missing.append("libpmix-dev")
    if missing:
        install(*missing)
    with ExitStack() as stack:
        # Not in pytest's folder, which other users cannot enter.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="imagebuild-test-")))
        folder.chmod(0o755)
        slurm = Slurm(folder)
        _configure(folder)
        log = stack.enter_context((folder / "log").open("a"))
        munge = [
            f"--{name}={folder}/munge/{name}" for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")
        ]
        daemons = [
            ["munged", "--foreground", *munge],
            ["slurmctld", "-D"],
            *(["unshare", "--mount", "sh", "-c", SLURMD, "slurmd", str(folder), node] for node in NODES),
        ]
        for daemon in daemons:
            stack.enter_context(_daemon(daemon, slurm.environ, log.fileno()))
            if daemon[0] == "munged":
                assert until((folder / "munge" / "socket").exists)

        def idle() -> bool:
            words = ["sinfo", "--noheader", "--Node", "--format=%T"]
            done = subprocess.run(words, env=slurm.environ, capture_output=True, text=True, check=False)
            return done.stdout.split() == ["idle"] * len(NODES)

        assert until(idle), (folder / "log").read_text()[-5000:]
        yield slurm


def _configure(folder: Path) -> None:
    for name in ("munge", "pmix", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    key = folder / "munge" / "key-file"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in ("controller", *NODES)]
        ports = [server.getsockname()[1] for server in servers]
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=folder, ports=ports))
    for i in range(8):
        (folder / f"gpu{i}").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
    (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/pmix\n")


@contextmanager
def _daemon(argv: Sequence[str], environ: dict[str, str], log: int) -> Iterator[None]:
    program = shutil.which(argv[0], path=environ["PATH"])
    assert program
    process = subprocess.Popen(
        [program, *argv[1:]], env=environ, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
