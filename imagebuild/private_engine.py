"""A private engine, for machines that have none: installing what it lacks, starting it, stopping it.

It shares nothing with an engine that is already there. Its socket, folders, bridge and firewall rules are its own
(see `bridge`), and so is its containerd: dockerd uses a system-wide one if it sees its socket, so ours runs in a mount
namespace that hides it. The namespace also makes every mount disappear with the last process, even after a `kill -9`.
"""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from imagebuild import apt, bridge, programs
from imagebuild.apt import Run
from imagebuild.engine import BUILDX_MIN, ENGINE_MIN, Paths, buildx_version, flaw
from imagebuild.errors import CommandError

# Our log first, so that it also tells why the rest failed. Then hide a system-wide containerd; see the top.
LAUNCH = 'cd /; exec >"$1" 2>&1; exec unshare --mount --propagation slave sh -c "$2" "$0"'
HIDDEN = 'mkdir -p /run/containerd && mount -t tmpfs imagebuild /run/containerd && exec dockerd --config-file "$0"'


ABSENT_POLLS = 8
"""How often in a row, 0.2 s apart, no process of the engine must be seen before it counts as ended."""
Table = Mapping[int, tuple[int, list[str]]]
"""Processes: pid → parent and argv."""


@dataclass(frozen=True)
class EngineStatus:
    """The private engine. What only a running engine (or, for `disk_used`, only root) can tell is None."""

    running: bool
    host: str
    data_root: str
    pid: int | None = None
    version: str | None = None
    storage_driver: str | None = None
    bridge: str | None = None
    disk_used: int | None = None


def missing_packages(run: Run = programs.run, which: Callable[[str], str | None] = programs.which) -> list[str]:
    """The packages without which no private engine runs here; a piece that is there and new enough is kept."""
    docker, buildx = programs.version(run, "docker", "--version"), buildx_version(run)
    old_engine = programs.version(run, "dockerd", "--version") < ENGINE_MIN
    need = {
        "docker.io": old_engine,
        # An old docker.io contains the client, and loses it when it is upgraded.
        "docker-cli": not docker or (old_engine and docker < ENGINE_MIN),
        "docker-buildx": buildx < BUILDX_MIN,
        "iptables": not which("iptables"),
        "iproute2": not which("ip"),
        "git": not which("git"),  # BuildKit calls it for sources in git
    }
    return [package for package, wanted in need.items() if wanted]


def daemon_config(paths: Paths, pool: IPv4Network, mtu: int, *, nvidia: bool = False) -> dict[str, Any]:
    """The content of daemon.json. Half of the pool is for the bridge, the other half for networks made later."""
    config: dict[str, Any] = {
        "features": {"containerd-snapshotter": True, "cdi": True},
        "hosts": [paths.host],
        "data-root": str(paths.data),
        "exec-root": str(paths.exec_root),
        "pidfile": str(paths.pidfile),
        "bridge": paths.bridge,
        "default-address-pools": [{"base": str(list(pool.subnets())[1]), "size": 24}],
        "iptables": False,
        "mtu": mtu,
        "default-network-opts": {"bridge": {"com.docker.network.driver.mtu": str(mtu)}},
    }
    if nvidia:
        config["runtimes"] = {"nvidia": {"path": "nvidia-container-runtime"}}
    return config


def _program(argv: list[str]) -> str:
    return Path(argv[0]).name if argv else ""


def _is_ours(argv: list[str], paths: Paths) -> bool:
    program = _program(argv)
    if str(paths.config) in argv:
        return program == "dockerd" or HIDDEN in argv  # which is about to become dockerd
    helper = program in ("containerd", "containerd-shim-runc-v2", "runc")
    return helper and any(f"{paths.exec_root}/" in word for word in argv)


def family(table: Table, paths: Paths) -> set[int]:
    """The processes of this engine and their descendants, from `table`: pid → (parent, argv)."""
    found = {pid for pid, (_, argv) in table.items() if _is_ours(argv, paths)}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found


def pid_of(paths: Paths) -> int | None:
    """The pid of this engine's dockerd. A stale pidfile, whose pid may now be another's, is no engine."""
    with suppress(OSError, ValueError):
        pid = int(paths.pidfile.read_text())
        argv = programs.argv(pid)
        return pid if _program(argv) == "dockerd" and str(paths.config) in argv else None
    return None


def _pool_before(paths: Paths) -> IPv4Network | None:
    with suppress(OSError, ValueError, LookupError):
        config = json.loads(paths.config.read_text())
        return IPv4Network(config["default-address-pools"][0]["base"]).supernet()
    return None


def _await(paths: Paths, run: Run, seconds: float = 60) -> None:
    """Wait until the engine answers. Raises CommandError with the end of its log if it ends or is too slow."""
    deadline = time.monotonic() + seconds
    absent = 0
    while why := flaw(paths.host, run):
        # Its launch is a chain of programs, and a process that starts the next one has no argv for a moment.
        there = any(str(paths.config) in argv for _, argv in programs.processes().values())
        absent = 0 if there else absent + 1
        ended = absent >= ABSENT_POLLS
        if ended or time.monotonic() > deadline:
            log = paths.log.read_text(errors="replace") if paths.log.exists() else ""
            lines = "\n  ".join(log.splitlines()[-10:])
            what = "ended" if ended else f"gave no usable answer in {seconds:.0f} s ({why})"
            raise CommandError(f"the private engine {what}; the end of {paths.log}:\n  {lines}")
        time.sleep(0.2)


@contextmanager
def _locked(paths: Paths) -> Iterator[None]:
    """One `up` or `down` at a time: the second would take the first one's half-made engine for leftovers."""
    paths.state.mkdir(parents=True, exist_ok=True)
    with (paths.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with programs.plain_errors():
            yield


def _install(run: Run) -> None:
    missing = missing_packages(run)
    running = [pid for pid, (_, argv) in programs.processes().items() if _program(argv) == "dockerd"]
    if "docker.io" in missing and running and programs.version(run, "dockerd", "--version"):
        raise CommandError(
            f"the engine that runs here (pid {running[0]}) is too old, and imagebuild upgrades none but its own; "
            "upgrade it to Docker Engine 26+, or stop it and run `imagebuild engine up` again"
        )
    if missing:
        apt.install(missing, run)


def _clear(paths: Paths, run: Run, seconds: float = 20) -> None:
    """End the engine and remove all it made but its data. Also removes what a crash or a `kill -9` left."""
    deadline = time.monotonic() + seconds
    before = _known(programs.processes(), paths, {})
    if pid := pid_of(paths):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # it stops its containers first
    while pid_of(paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    while (left := _known(programs.processes(), paths, before)) and time.monotonic() < deadline + 10:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    bridge.remove_network(paths.bridge, _pool_before(paths), run)
    shutil.rmtree(paths.run, ignore_errors=True)


def _known(table: Table, paths: Paths, before: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """Processes of the engine by pid, and what is left of those `before`: steps of builds outlive their parents."""
    found = family(table, paths) | {pid for pid, argv in before.items() if table.get(pid, (0, []))[1] == argv}
    return {pid: table[pid][1] for pid in found}


def up(environ: Mapping[str, str] = os.environ, run: Run = programs.run) -> EngineStatus:
    """Start the private engine, after installing what it lacks; nothing happens if it runs already.

    Packages come from the distribution's own archive, on Debian 12 from the next release's. The engine service
    that they bring is neither started nor enabled; no engine that is already there is stopped, configured or
    upgraded. Raises ConfigError if not root, CommandError if a step fails; what was started is removed again.
    """
    paths = Paths.of(environ)
    if pid_of(paths) is None:
        programs.require_root("`imagebuild engine up`")
        with _locked(paths):
            if pid_of(paths) is None:
                _install(run)
                _start(paths, run)
    _await(paths, run)
    return status(environ, run)


def _start(paths: Paths, run: Run) -> None:
    _clear(paths, run)
    try:
        paths.run.mkdir(parents=True)
        paths.run.chmod(0o755)  # whoever may use the socket must get there, whatever root's umask is
        routes = list(bridge.routes(run))
        pool = bridge.choose_pool((network for network, _ in routes), _pool_before(paths))
        config = daemon_config(paths, pool, bridge.mtu(routes), nvidia=bool(programs.which("nvidia-container-runtime")))
        paths.config.write_text(json.dumps(config, indent=2) + "\n")
        bridge.add_network(paths.bridge, pool, run)
        run("setsid", "--fork", "sh", "-c", LAUNCH, str(paths.config), str(paths.log), HIDDEN)
        _await(paths, run)
    except BaseException:
        _clear(paths, run)
        raise


def down(environ: Mapping[str, str] = os.environ, run: Run = programs.run, *, purge: bool = False) -> None:
    """Stop the private engine and remove its network; `purge` also deletes its images and build cache.

    Nothing happens if there is nothing to do. Raises ConfigError if not root.
    """
    paths = Paths.of(environ)
    leftovers = (paths.run, *([paths.state] if purge else []))
    there = bridge.exists(paths.bridge) or any(path.exists() for path in leftovers)
    if not there and not family(programs.processes(), paths):
        return
    programs.require_root("`imagebuild engine down`")
    with _locked(paths):
        _clear(paths, run)
        if purge:
            if paths.data.exists():
                shutil.rmtree(paths.data)
            for file in (paths.config, paths.log, paths.state / "lock"):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # IMAGEBUILD_STATE may be a folder that has other things in it
                paths.state.rmdir()


def status(environ: Mapping[str, str] = os.environ, run: Run = programs.run) -> EngineStatus:
    """What can be told about the private engine; never raises because it is not there."""
    paths = Paths.of(environ)
    version = driver = disk = None
    if pid := pid_of(paths):
        with suppress(CommandError, ValueError):
            answer = run(
                "docker", "--host", paths.host, "info", "--format", "{{.ServerVersion}} {{.Driver}}", timeout=20
            )
            version, driver = answer.split()
    with suppress(CommandError, ValueError):
        disk = int(run("du", "-skx", str(paths.data)).split()[0]) * 1024
    return EngineStatus(
        running=pid is not None,
        host=paths.host,
        data_root=str(paths.data),
        pid=pid,
        version=version,
        storage_driver=driver,
        bridge=paths.bridge if bridge.exists(paths.bridge) else None,
        disk_used=disk,
    )
