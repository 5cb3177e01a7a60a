"""Install and run a private Docker engine on a machine without an engine: packages, network, emulation, daemon."""

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

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.fields import CPUS
from imagebuild.core.patterns import data_of
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
DATA = data_of(__file__)
NO_SERVICES: str = DATA["policy"]
NET = Path("/sys/class/net")
BINFMT = Path("/proc/sys/fs/binfmt_misc")
BINFMT_D = Path("/usr/lib/binfmt.d")

PROGRAMS = {"dockerd": "docker.io", "docker": "docker-cli", "iptables": "iptables", "ip": "iproute2", "git": "git"}
"""Maps the programs that the engine needs to their packages. BuildKit calls git to fetch sources."""
# The engine in Debian 12 is too old, but packages of the next release can be installed there.
NEXT_RELEASE = {"bookworm": "trixie"}
FROM_NEXT = frozenset({"docker.io", "docker-cli", "docker-buildx", "docker-compose", "qemu-user-static", "cosign"})


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder. Wait if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add_next_release(release: str, codename: str) -> None:
    """Add a release to apt's sources. Its priority is low: apt installs only packages for which the release is named.
    `codename` is the machine's own release. Raises CommandError if apt has no source for that release."""
    from imagebuild.core import debian

    known = debian.apt_sources()
    listing = debian.ETC / "sources.list.d" / f"imagebuild-{release}.list"
    if not listing.exists() and any(source.suite == release for source in known):
        return  # the administrator has already added the release, and chooses the priority
    wanted = debian.sources_for_release(known, codename, release)
    if not wanted:
        raise CommandError(
            f"{debian.ETC}: no apt source is an archive of {codename}; add the distribution's archive to the sources"
        )
    preferences = debian.ETC / "preferences.d" / f"imagebuild-{release}"
    preferences.write_text(f"Package: *\nPin: release n={release}*\nPin-Priority: 50\n")
    listing.write_text(debian.as_oneline(wanted))
    for path in (preferences, listing):
        path.chmod(0o644)  # other users run apt's tools, too, and root's umask may forbid reading


def install(packages: Sequence[str], run: RunProgram) -> None:
    """Install packages. No service is started, and no package is removed.
    Raises CommandError if the installation fails."""
    from imagebuild.core import debian

    here = debian.os_release()
    if here.get("ID") not in ("debian", "ubuntu"):
        raise CommandError(
            "imagebuild can install packages only on Debian and Ubuntu; "
            f"install the equivalents of these packages yourself: {' '.join(packages)}"
        )
    later = NEXT_RELEASE.get(here.get("VERSION_CODENAME", "")) if FROM_NEXT.intersection(packages) else None
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    wanted = [f"{package}/{later}" if later and package in FROM_NEXT else package for package in packages]
    # Let only one process run apt. apt does not wait for another apt, and each process removes the policy at its end.
    with alone(POLICY.parent):
        # The policy prevents the start of the packages' docker service, which would be a second engine. An existing
        # policy, as in container images, is kept.
        ours = not POLICY.exists() or POLICY.read_text(errors="replace") == NO_SERVICES
        try:
            if ours:
                POLICY.write_text(NO_SERVICES)
                POLICY.chmod(0o755)
            if later:
                _add_next_release(later, here["VERSION_CODENAME"])
            run("apt-get", "update")
            run("apt-get", "install", "--yes", "--no-remove", "--no-install-recommends", *wanted, env=quiet)
        finally:
            if ours:
                POLICY.unlink(missing_ok=True)


def missing_packages(run: RunProgram = run_program) -> list[str]:
    """Return the names of packages that a private engine needs and that are not installed on this machine."""
    from imagebuild.core import debian

    packages = [package for program, package in PROGRAMS.items() if not which(program)]
    if "docker-cli" in packages and debian.os_release().get("ID") == "ubuntu":  # docker.io contains the client
        packages.remove("docker-cli")
    return packages if buildx_version(run) else [*packages, "docker-buildx"]


BRIDGE_ADDRESS = "02:42:ac:1e:00:01"
"""MAC address of the bridge. Without a fixed address, a bridge uses the address of its lowest port. This address would
change when the port's container ends, and other containers would use the old address for half a minute."""
BLOCKS = (IPv4Network("172.30.0.0/16"), IPv4Network("10.213.0.0/16"), IPv4Network("192.168.192.0/18"))


def choose_pool(taken: Iterable[IPv4Network]) -> IPv4Network:
    """Return an address range for the private engine's networks that does not overlap with a route of this machine.
    Raises CommandError if all candidates overlap."""
    # Very large networks are ignored, such as the two halves of the address space that some VPNs route.
    routes = [network for network in taken if network.prefixlen >= 8]
    for pool in (pool for block in BLOCKS for pool in block.subnets(new_prefix=19)):
        if not any(map(pool.overlaps, routes)):
            return pool
    tried = ", ".join(map(str, BLOCKS))
    raise CommandError(
        f"no addresses are free for the private engine's bridge: routes use all of {tried}; "
        "remove routes to one of these networks (`ip route` lists them)"
    )


def firewall_rules(pool: IPv4Network) -> list[tuple[str, str, list[str]]]:
    """Return the rules that let containers of the pool connect to other networks, as tuples (table, chain, rule)."""
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
    """Return the smallest MTU of the default routes, at most 1500. Tunnels and clouds may use a smaller MTU."""
    devices = [device for network, device in routes if network.prefixlen == 0 and device]
    return min([1500, *(int((NET / device / "mtu").read_text()) for device in devices)])


def add_network(bridge: str, pool: IPv4Network, run: RunProgram) -> None:
    """Add the engine's firewall rules and its bridge. The bridge gets the first half of the address range `pool`."""
    inside = next(pool.subnets())
    run("ip", "link", "add", bridge, "address", BRIDGE_ADDRESS, "type", "bridge")
    run("ip", "address", "add", f"{inside[1]}/{inside.prefixlen}", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    for table, chain, rule in firewall_rules(pool):
        run("iptables", "--wait", "--table", table, "--insert", chain, *rule)


def remove_network(bridge: str, run: RunProgram) -> None:
    """Remove the firewall rules and all bridges of the pool, also those of networks that users made.
    The engine's own bridge is removed last, as its addresses are needed to find the pool."""
    if not (NET / bridge).exists():
        return
    routes = [(network, device) for network, device in network_routes(run) if network.prefixlen < 32]
    for pool in {network.supernet() for network, device in routes if device == bridge}:
        for table, chain, rule in firewall_rules(pool):
            with suppress(CommandError):  # the rule may not exist
                run("iptables", "--wait", "--table", table, "--delete", chain, *rule)
        for device in {device for network, device in routes if network.subnet_of(pool)} - {bridge}:
            run("ip", "link", "delete", device, "type", "bridge")
    run("ip", "link", "delete", bridge)


def ensure_emulation(arch: str, run: RunProgram = run_program) -> None:
    """Register an emulator for programs of `arch` (amd64 or arm64) with the kernel, unless this machine can run them.

    The emulator is registered for the whole machine. Raises ConfigError if root is needed, CommandError if a step
    fails."""
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
    if registered():  # the package registers the emulator if systemd runs
        return
    with os_errors_as_command_errors():
        text = next((path for path in described if path.exists()), described[0]).read_text()
        line = next(line for line in text.splitlines() if line.startswith(":")).strip()
        # With the flag F, the kernel opens the emulator now, so that it also works in other root file systems.
        (BINFMT / "register").write_text(line if "F" in line.rpartition(":")[2] else f"{line}F")


NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Start of a command that runs a program in its own mount and PID namespaces. If `unshare` ends, all processes in these
namespaces end."""
DAEMON: str = DATA["daemon"]
"""The script that starts dockerd, the first process of the namespaces."""

START_S = 60
"""Maximum time in seconds until the engine answers."""


def engine_processes(paths: EnginePaths) -> dict[int, str]:
    """Map the ids of the engine's main processes to their programs: `unshare`, `sh` and `dockerd`.
    All other processes of the engine end when `sh` ends."""
    programs = {pid: Path(argv[0]).name for pid, (_, argv) in process_table().items() if str(paths.config) in argv}
    return {pid: program for pid, program in programs.items() if program in ("unshare", "sh", "dockerd")}


def _clear(paths: EnginePaths, run: RunProgram) -> None:
    """Stop the engine, and remove its network and runtime files, also those that are left after a crash."""
    # dockerd stops its containers first. All processes end with the shell, and `unshare` waits for the last one.
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
    """Start the private engine if it does not run yet, and return its paths. Missing packages are installed first.

    Other engines on this machine are not changed. Raises ConfigError without root, CommandError if a step fails; the
    engine's processes and network are then removed again."""
    paths = EnginePaths.of(environ)
    require_root("`imagebuild engine up`")
    with os_errors_as_command_errors():
        paths.data.mkdir(parents=True, exist_ok=True)
        kept = paths.state.stat()
        if kept.st_uid != os.geteuid() or kept.st_mode & 0o002:
            # The user could replace files by links, through which root writes.
            raise ConfigError(f"{paths.state}: another user may write to it; name a folder of root in IMAGEBUILD_STATE")
        with alone(paths.state):  # a simultaneous `engine up` or `engine down` would remove this engine
            if flaw := engine_flaw(Endpoint(paths.host, "private"), run):
                if engine_processes(paths):
                    raise CommandError(f"the private engine runs, but {flaw}; stop it with `imagebuild engine down`")
                if missing := missing_packages(run):
                    install(missing, run)
                _launch(paths, run)
    return paths


def _launch(paths: EnginePaths, run: RunProgram) -> None:
    """Write the configuration, make the network, start dockerd, and wait until it answers. Clean up if that fails."""
    _clear(paths, run)
    try:
        paths.run.mkdir(parents=True)
        paths.run.chmod(0o755)  # users of the socket must enter the folder, and root's umask may forbid that
        # Without this file, dockerd does not reuse the bridge's previous address, which another network may have now.
        (paths.data / "network/files/local-kv.db").unlink(missing_ok=True)
        routes = network_routes(run)
        pool, largest = choose_pool(network for network, _ in routes), mtu(routes)
        config = {
            **DATA["configuration"],
            "hosts": [paths.host],
            "data-root": str(paths.data),
            "exec-root": str(paths.run / "exec"),
            "pidfile": str(paths.run / "docker.pid"),
            "bridge": paths.bridge,
            # The first half of the pool is for the bridge.
            "default-address-pools": [{"base": str(list(pool.subnets())[1]), "size": 24}],
            "mtu": largest,
            "default-network-opts": {"bridge": {"com.docker.network.driver.mtu": str(largest)}},
            "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}} if which("nvidia-container-runtime") else {},
        }
        paths.config.write_text(json.dumps(config, indent=2) + "\n")
        add_network(paths.bridge, pool, run)
        command = (*NAMESPACES, "--propagation", "slave", "sh", "-c", DAEMON, str(paths.config))
        with paths.log.open("wb") as log:
            process = start_program(command, output=log.fileno(), survives=True)
        # Reap the engine's process when it ends. This program may run much longer.
        threading.Thread(target=process.wait, daemon=True).start()
        deadline = time.monotonic() + START_S
        while flaw := engine_flaw(Endpoint(paths.host, "private"), run):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                lines = "\n  ".join(paths.log.read_text(errors="replace").splitlines()[-10:])
                problem = "ended" if ended else f"was not ready after {START_S} s ({flaw})"
                raise CommandError(f"the private engine {problem}; the end of {paths.log}:\n  {lines}")
            time.sleep(0.2)
    except BaseException:
        _clear(paths, run)
        raise


def stop_engine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program, *, purge: bool = False) -> None:
    """Stop the private engine and remove its network; with `purge`, also delete its data.
    Raises ConfigError without root, CommandError if a step fails."""
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
