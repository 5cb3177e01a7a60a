"""Install and run a private engine on a machine that has none: packages, network, emulation, daemon."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network
from pathlib import Path

from imagebuild.core.errors import CommandError
from imagebuild.core.fields import CPUS
from imagebuild.core.run import (
    RunProgram,
    os_errors_as_command_errors,
    process_table,
    require_root,
    run_program,
    start_program,
    which,
)
from imagebuild.oci.engine import Endpoint, EnginePaths, buildx_version, engine_flaw

POLICY = Path("/usr/sbin/policy-rc.d")
NET = Path("/sys/class/net")
BINFMT = Path("/proc/sys/fs/binfmt_misc")
BINFMT_D = Path("/usr/lib/binfmt.d")

PROGRAMS = {"dockerd": "docker.io", "docker": "docker-cli", "iptables": "iptables", "ip": "iproute2", "git": "git"}
"""Program that the engine needs → its package. BuildKit calls git for sources in git."""
# Debian 12 is the one release whose own engine is too old while the next release's packages install on it.
NEXT_RELEASE = {"bookworm": "trixie"}
FROM_NEXT = frozenset({"docker.io", "docker-cli", "docker-buildx", "docker-compose", "qemu-user-static", "cosign"})


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder; wait while another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add_next_release(release: str, codename: str) -> None:
    """Make `release` known to apt, at a priority so low that only packages that are named come from it."""
    from imagebuild.core import debian

    known = debian.apt_sources()
    listing = debian.ETC / "sources.list.d" / f"imagebuild-{release}.list"
    if not listing.exists() and any(source.suite == release for source in known):
        return  # the machine's owner added it, and decides on priorities
    wanted = debian.sources_for_release(known, codename, release)
    if not wanted:
        raise CommandError(f"apt's sources in {debian.ETC} have no archive of {codename}; add the distribution's own")
    preferences = debian.ETC / "preferences.d" / f"imagebuild-{release}"
    preferences.write_text(f"Package: *\nPin: release n={release}*\nPin-Priority: 50\n")
    listing.write_text(debian.as_oneline(wanted))
    for path in (preferences, listing):
        path.chmod(0o644)  # apt's tools also run for users, whatever root's umask is


def install(packages: Sequence[str], run: RunProgram) -> None:
    """Install packages without starting a service or removing a package. Raises CommandError if that fails."""
    from imagebuild.core import debian

    here = debian.os_release()
    if here.get("ID") not in ("debian", "ubuntu"):
        raise CommandError(f"packages are installed on Debian and Ubuntu only; install by hand: {' '.join(packages)}")
    later = NEXT_RELEASE.get(here.get("VERSION_CODENAME", "")) if FROM_NEXT.intersection(packages) else None
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    wanted = [f"{package}/{later}" if later and package in FROM_NEXT else package for package in packages]
    # One at a time: apt does not wait for another apt, and the first of two to end would remove the policy.
    with alone(POLICY.parent):
        # A container service that a package brings would be a second engine, on docker0. A machine that has a policy of
        # its own, as container images do, keeps it.
        ours = not POLICY.exists()
        try:
            if ours:
                POLICY.write_text("#!/bin/sh\nexit 101\n")  # nothing may start
                POLICY.chmod(0o755)
            if later:
                _add_next_release(later, here["VERSION_CODENAME"])
            run("apt-get", "update")
            run("apt-get", "install", "--yes", "--no-remove", "--no-install-recommends", *wanted, env=quiet)
        finally:
            if ours:
                POLICY.unlink(missing_ok=True)


def missing_packages(run: RunProgram = run_program) -> list[str]:
    """List the packages that a private engine needs and this machine lacks."""
    from imagebuild.core import debian

    packages = [package for program, package in PROGRAMS.items() if not which(program)]
    if "docker-cli" in packages and debian.os_release().get("ID") == "ubuntu":  # where docker.io has the client
        packages.remove("docker-cli")
    return packages if buildx_version(run) else [*packages, "docker-buildx"]


BRIDGE_ADDRESS = "02:42:ac:1e:00:01"
"""Hardware address of the bridge. Without one of its own a bridge takes that of its lowest port. It would change when a
container ends, and others would send to the old one until they ask again, half a minute later."""
BLOCKS = (IPv4Network("172.30.0.0/16"), IPv4Network("10.213.0.0/16"), IPv4Network("192.168.192.0/18"))


def choose_pool(taken: Iterable[IPv4Network]) -> IPv4Network:
    """Choose addresses for the private engine's networks that overlap no route. Raises CommandError if none is left."""
    # A VPN that routes everything in two halves does not count as taking these.
    routes = [network for network in taken if network.prefixlen >= 8]
    for pool in (pool for block in BLOCKS for pool in block.subnets(new_prefix=19)):
        if not any(map(pool.overlaps, routes)):
            return pool
    tried = ", ".join(map(str, BLOCKS))
    raise CommandError(f"no addresses are left for a bridge: routes use all of {tried} (see `ip route`)")


def firewall_rules(pool: IPv4Network) -> list[tuple[str, str, list[str]]]:
    """Return (table, chain, rule) of the rules that let containers of the pool connect to other networks."""
    ours = str(pool)
    answers = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
    return [
        ("nat", "POSTROUTING", ["-s", ours, "!", "-d", ours, "-j", "MASQUERADE"]),
        ("filter", "FORWARD", ["-s", ours, "-j", "ACCEPT"]),
        ("filter", "FORWARD", ["-d", ours, *answers, "-j", "ACCEPT"]),
    ]


def network_routes(run: RunProgram) -> list[tuple[IPv4Network, str]]:
    routes = json.loads(run("ip", "-4", "-j", "route", "show", "table", "all") or "[]")
    return [(IPv4Network(r["dst"].replace("default", "0.0.0.0/0")), r.get("dev", "")) for r in routes]


def mtu(routes: Iterable[tuple[IPv4Network, str]]) -> int:
    """Return the largest packet that the default routes take: those of tunnels and clouds may take less than 1500."""
    devices = [device for network, device in routes if network.prefixlen == 0 and device]
    return min([1500, *(int((NET / device / "mtu").read_text()) for device in devices)])


def add_network(bridge: str, pool: IPv4Network, run: RunProgram) -> None:
    """Make the bridge, with the first half of the pool, and the firewall rules."""
    inside = next(pool.subnets())
    run("ip", "link", "add", bridge, "address", BRIDGE_ADDRESS, "type", "bridge")
    run("ip", "address", "add", f"{inside[1]}/{inside.prefixlen}", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    for table, chain, rule in firewall_rules(pool):
        run("iptables", "--wait", "--table", table, "--insert", chain, *rule)


def remove_network(bridge: str, run: RunProgram) -> None:
    """Remove the rules and every bridge of the pool: dockerd leaves those of networks that users made.

    Our bridge goes last, as it tells the pool.
    """
    if not (NET / bridge).exists():
        return
    routes = [(network, device) for network, device in network_routes(run) if network.prefixlen < 32]
    for pool in {network.supernet() for network, device in routes if device == bridge}:
        for table, chain, rule in firewall_rules(pool):
            with suppress(CommandError):  # it may be gone
                run("iptables", "--wait", "--table", table, "--delete", chain, *rule)
        for device in {device for network, device in routes if network.subnet_of(pool)} - {bridge}:
            run("ip", "link", "delete", device, "type", "bridge")
    run("ip", "link", "delete", bridge)


def ensure_emulation(arch: str, run: RunProgram = run_program) -> None:
    """Make programs of `arch` (amd64 or arm64) run here: register an emulator with the kernel if it has none.

    The whole machine has one table of emulators. Raises ConfigError if root is needed, CommandError if a step fails.
    """
    names = [f"qemu-{CPUS[arch]}{end}" for end in ("", "-static")]  # not qemu-aarch64_be

    def registered() -> bool:
        return any((BINFMT / name).exists() for name in names)

    if CPUS[arch] == platform.machine() or registered():
        return
    require_root(f"setting up the emulation of {arch}")
    if not (BINFMT / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT))
    described = [BINFMT_D / f"{name}.conf" for name in names]
    if not registered() and not any(path.exists() for path in described):
        install(["qemu-user-static"], run)
    if registered():  # the package did it, as it does where systemd runs
        return
    with os_errors_as_command_errors():
        text = next((path for path in described if path.exists()), described[0]).read_text()
        line = next(line for line in text.splitlines() if line.startswith(":")).strip()
        # Flag F makes the kernel hold the emulator, so that it is there in every root file system.
        (BINFMT / "register").write_text(line if "F" in line.rpartition(":")[2] else f"{line}F")


NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Starts a program with mounts and processes of its own; they end with its first process, and that with `unshare`."""
# A system-wide containerd is hidden: it is another engine's. The shell is the first process, which has to reap others.
DAEMON = """cd /
mkdir -p /run/containerd && mount -t tmpfs imagebuild /run/containerd && dockerd --config-file "$0"
exit
"""


START_S = 60
"""How long the engine may take until it answers."""


def engine_processes(paths: EnginePaths) -> dict[int, str]:
    """Return the processes that run this engine: process id → program. All others that it has end with its shell."""
    programs = {pid: Path(argv[0]).name for pid, (_, argv) in process_table().items() if str(paths.config) in argv}
    return {pid: program for pid, program in programs.items() if program in ("unshare", "sh", "dockerd")}


def _clear(paths: EnginePaths, run: RunProgram) -> None:
    """End the engine, and remove all that it made except its data, also what a crash or a `kill -9` left."""
    # dockerd stops its containers first. With the shell all processes end, and `unshare` waits for the last one.
    for program, number, patience in (("dockerd", signal.SIGTERM, 20), ("sh", signal.SIGKILL, 10)):
        for pid, name in engine_processes(paths).items():
            if name == program:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + patience
        while engine_processes(paths) and time.monotonic() < deadline:
            time.sleep(0.1)
    remove_network(paths.bridge, run)
    shutil.rmtree(paths.run, ignore_errors=True)


def start_engine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> EnginePaths:
    """Start the private engine unless it answers, and return where it is; install the packages that it lacks first.

    No engine that is already there is stopped, configured or upgraded. Raises ConfigError if not root, CommandError if
    a step fails; what was started is removed again.
    """
    paths = EnginePaths.of(environ)
    require_root("`imagebuild engine up`")
    with os_errors_as_command_errors():
        paths.data.mkdir(parents=True, exist_ok=True)
        with alone(paths.state):  # a second `up` or `down` would remove a half-made engine
            if flaw := engine_flaw(Endpoint(paths.host, "private"), run):
                if engine_processes(paths):
                    raise CommandError(f"the private engine runs, but {flaw}; end it with `imagebuild engine down`")
                if missing := missing_packages(run):
                    install(missing, run)
                _launch(paths, run)
    return paths


def _launch(paths: EnginePaths, run: RunProgram) -> None:
    """Write the configuration, make the network, and run dockerd until it answers; remove all that if it fails."""
    _clear(paths, run)
    try:
        paths.run.mkdir(parents=True)
        paths.run.chmod(0o755)  # users of the socket must get there, whatever root's umask is
        # dockerd would give the bridge the address that it had before, which another engine may have by now.
        (paths.data / "network/files/local-kv.db").unlink(missing_ok=True)
        routes = network_routes(run)
        pool, largest = choose_pool(network for network, _ in routes), mtu(routes)
        config = {
            "features": {"containerd-snapshotter": True, "cdi": True},
            "hosts": [paths.host],
            "data-root": str(paths.data),
            "exec-root": str(paths.run / "exec"),
            "pidfile": str(paths.run / "docker.pid"),
            "bridge": paths.bridge,
            # The other half of the pool is the bridge's.
            "default-address-pools": [{"base": str(list(pool.subnets())[1]), "size": 24}],
            "iptables": False,
            "mtu": largest,
            "default-network-opts": {"bridge": {"com.docker.network.driver.mtu": str(largest)}},
            "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}} if which("nvidia-container-runtime") else {},
        }
        paths.config.write_text(json.dumps(config, indent=2) + "\n")
        add_network(paths.bridge, pool, run)
        command = (*NAMESPACES, "--propagation", "slave", "sh", "-c", DAEMON, str(paths.config))
        with paths.log.open("wb") as log:
            process = start_program(command, output=log.fileno())
        # It may end long before this process, which then has to take its status.
        threading.Thread(target=process.wait, daemon=True).start()
        deadline = time.monotonic() + START_S
        while flaw := engine_flaw(Endpoint(paths.host, "private"), run):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                lines = "\n  ".join(paths.log.read_text(errors="replace").splitlines()[-10:])
                problem = "ended" if ended else f"gave no usable answer in {START_S} s ({flaw})"
                raise CommandError(f"the private engine {problem}; the end of {paths.log}:\n  {lines}")
            time.sleep(0.2)
    except BaseException:
        _clear(paths, run)
        raise


def stop_engine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program, *, purge: bool = False) -> None:
    """Stop the private engine and remove its network; `purge` also deletes its data. Raises ConfigError if not root."""
    paths = EnginePaths.of(environ)
    if not paths.state.exists():
        return
    require_root("`imagebuild engine down`")
    with os_errors_as_command_errors(), alone(paths.state):
        _clear(paths, run)
        if purge and paths.data.exists():
            shutil.rmtree(paths.data)
            paths.config.unlink(missing_ok=True)
            paths.log.unlink(missing_ok=True)
