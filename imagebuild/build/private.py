"""Install and run a private engine on a machine that has none: packages, network, emulation, daemon."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import (
    RunProgram,
    os_errors_as_command_errors,
    process_arguments,
    process_table,
    program_version,
    require_root,
    run_program,
    version_numbers,
    which,
)
from imagebuild.oci.engine import BUILDX_MIN, ENGINE_MIN, MINIMUM, EnginePaths, buildx_version, engine_flaw

POLICY = Path("/usr/sbin/policy-rc.d")
UNITS = [Path("/usr/lib/systemd/system") / n for n in ("docker.service", "docker.socket", "containerd.service")]

# Debian 12 is the one release whose own engine is too old while the next release's packages install on it.
NEXT_RELEASE = {"bookworm": "trixie"}
FROM_NEXT = frozenset({"docker.io", "docker-cli", "docker-buildx", "docker-compose", "qemu-user-static", "cosign"})

# 101 means "not allowed" and 104 "allowed" to both invoke-rc.d and deb-systemd-invoke.
HOLD_SERVICES = '#!/bin/sh\ncase "$1" in docker*|containerd*) exit 101 ;; esac\nexit 104\n'


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for others who install packages this way: apt does not wait, and a policy is there for one of them only."""
    folder = os.open(POLICY.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def _services_held(run: RunProgram) -> Iterator[None]:
    """Keep a container service that a package brings from starting, now (by policy) and at the next boot.

    It would be a second engine, on docker0. A service that was there before stays as it is, and a machine that has a
    policy of its own, as container images do, keeps it.
    """
    policy_is_ours = not POLICY.exists()
    before = {unit for unit in UNITS if unit.exists()}
    if policy_is_ours:
        POLICY.write_text(HOLD_SERVICES)
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if policy_is_ours:
            POLICY.unlink(missing_ok=True)
        for unit in UNITS:
            if unit.exists() and unit not in before and shutil.which("systemctl"):
                run("systemctl", "disable", "--quiet", unit.name)


def _add_next_release(release: str, codename: str, run: RunProgram) -> None:
    """Make `release` known to apt, at a priority so low that only packages that are named come from it."""
    from imagebuild.core import debian

    known = debian.apt_sources()
    wanted = debian.sources_for_release(known, codename, release)
    if not wanted:
        raise CommandError(
            f"no archive of {codename} is among apt's sources in {debian.ETC}; add the distribution's own"
        )
    listing = debian.ETC / "sources.list.d" / f"imagebuild-{release}.sources"
    if not listing.exists() and any(s.suite == release for s in known):
        return _refresh(("docker.io",), run)  # the machine's owner added it, and decides on priorities
    pin = f"Package: *\nPin: release n={release}*\nPin-Priority: 50\n"
    for path, text in (
        (debian.ETC / "preferences.d" / f"imagebuild-{release}", pin),
        (listing, debian.as_deb822(wanted)),
    ):
        path.write_text(text)
        path.chmod(0o644)  # apt's tools also run for users, whatever root's umask is
    if not debian.apt_candidate("iptables", run):  # no index was ever fetched here, and dependencies come from it
        return _refresh(("iptables",), run)
    only = (f"Dir::Etc::SourceList={listing}", "Dir::Etc::SourceParts=-", "APT::Get::List-Cleanup=0")
    run("apt-get", "update", *(word for option in only for word in ("-o", option)))
    return None


def _refresh(packages: Iterable[str], run: RunProgram) -> None:
    """Fetch every index; ignore the error of one that is broken if `packages` are known."""
    from imagebuild.core import debian

    try:
        run("apt-get", "update")
    except CommandError:
        if not all(debian.apt_candidate(package, run) for package in packages):
            raise


def _available(packages: Sequence[str], run: RunProgram) -> list[str]:
    """Return those of `packages` that the machine's own release has. Raises CommandError if one is too old."""
    from imagebuild.core import debian

    _refresh(packages, run)
    version = {package: debian.apt_candidate(package, run) for package in packages}
    for package, least in MINIMUM.items():
        if package in version and version_numbers(version[package]) < least:
            offer = version[package] or "missing"
            raise CommandError(
                f"{package} is {offer} in this distribution, {'.'.join(map(str, least))} or newer is needed; "
                "install Docker with its buildx plug-in from another source, and imagebuild will use it"
            )
    # Where there is no docker-cli, as on Ubuntu, docker.io contains the client.
    return [package for package in packages if version[package] or package != "docker-cli"]


def install(packages: Sequence[str], run: RunProgram) -> None:
    """Install `packages` without starting a service, removing a package or changing the version of another one.

    Raises CommandError if the distribution is not Debian 12+ or Ubuntu, has them too old, or apt fails.
    """
    from imagebuild.core import debian

    here = debian.distribution()
    old = here.id == "debian" and here.version.isdigit() and int(here.version) < 12
    if here.id not in ("debian", "ubuntu") or old:
        names = " ".join(packages)
        raise CommandError(f"packages are installed on Debian 12+ and Ubuntu only; install by hand: {names}")
    later = NEXT_RELEASE.get(here.codename) if here.id == "debian" and FROM_NEXT.intersection(packages) else None
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    with _one_at_a_time():
        if later:
            _add_next_release(later, here.codename, run)
            wanted = [f"{package}/{later}" if package in FROM_NEXT else package for package in packages]
        else:
            wanted = _available(packages, run)
        with _services_held(run):
            run("apt-get", "install", "--yes", "--no-remove", "--no-install-recommends", *wanted, env=quiet)


NET = Path("/sys/class/net")


def choose_pool(taken: Iterable[IPv4Network], before: IPv4Network | None = None) -> IPv4Network:
    """Choose addresses for the private engine's networks that overlap no route; those of `before` if possible.

    Raises CommandError if every candidate is taken.
    """
    # A VPN that routes everything in two halves does not count as taking these.
    routes = [network for network in taken if network.prefixlen >= 8]
    blocks = [IPv4Network("172.30.0.0/16"), IPv4Network("10.213.0.0/16"), IPv4Network("192.168.192.0/18")]
    candidates = [pool for block in blocks for pool in block.subnets(new_prefix=19)]
    for pool in [before, *candidates] if before else candidates:
        if not any(pool.overlaps(route) for route in routes):
            return pool
    tried = ", ".join(map(str, blocks))
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


def exists(bridge: str) -> bool:
    """Return whether a network interface exists."""
    return (NET / bridge).exists()


def network_routes(run: RunProgram) -> Iterator[tuple[IPv4Network, dict[str, Any]]]:
    """Yield each IPv4 route with what `ip` prints about it."""
    for route in json.loads(run("ip", "-4", "-j", "route", "show", "table", "all") or "[]"):
        yield IPv4Network("0.0.0.0/0" if route["dst"] == "default" else route["dst"]), route


def mtu(routes: Iterable[tuple[IPv4Network, dict[str, Any]]]) -> int:
    """Return the largest packet that the default routes take: those of tunnels and clouds may take less than 1500."""
    devices = [route["dev"] for network, route in routes if network.prefixlen == 0 and "dev" in route]
    return min([1500, *(int((NET / device / "mtu").read_text()) for device in devices)])


def mac(address: IPv4Address) -> str:
    """Return the hardware address that dockerd would give an interface with this IP address."""
    return ":".join(f"{byte:02x}" for byte in (0x02, 0x42, *address.packed))


def add_network(bridge: str, pool: IPv4Network, run: RunProgram) -> None:
    """Make the bridge, with the first half of the pool, and the firewall rules."""
    inside = next(pool.subnets())
    # Without an address of its own a bridge takes that of its lowest port. It would change whenever a container ends,
    # and others would send to the old one until they ask again, half a minute later.
    run("ip", "link", "add", bridge, "address", mac(inside[1]), "type", "bridge")
    run("ip", "address", "add", f"{inside[1]}/{inside.prefixlen}", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    for table, chain, rule in firewall_rules(pool):
        run("iptables", "--wait", "--table", table, "--insert", chain, *rule)


def remove_network(bridge: str, before: IPv4Network | None, run: RunProgram) -> None:
    """Remove the rules and every bridge of the pool, as dockerd leaves those of networks that users made.

    `before` is the pool, if the caller knows it.
    """
    try:
        devices = [(network, route.get("dev")) for network, route in network_routes(run) if network.prefixlen < 32]
    except CommandError:
        if exists(bridge):
            raise
        return  # no `ip`, so there was never a bridge
    # The bridge shows the pool, too, if the caller does not know it.
    pools = {network.supernet() for network, device in devices if device == bridge}
    # Another private engine may have taken the pool since: then its bridge has the first half.
    if before and not any(network == next(before.subnets()) for network, _ in devices):
        pools.add(before)
    for pool in pools:
        for table, chain, rule in firewall_rules(pool):
            with suppress(CommandError):  # until there is none left
                while True:
                    run("iptables", "--wait", "--table", table, "--delete", chain, *rule)
        for device in {device for network, device in devices if device and network.subnet_of(pool)}:
            run("ip", "link", "delete", device, "type", "bridge")
    if exists(bridge):  # without an address yet
        run("ip", "link", "delete", bridge)


BINFMT = Path("/proc/sys/fs/binfmt_misc")
BINFMT_D = Path("/usr/lib/binfmt.d")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def _registered(machine: str, binfmt: Path) -> bool:
    """Return whether the kernel runs `machine`'s programs in every root file system, as flag F of an emulator means."""
    entries = [binfmt / f"qemu-{machine}{suffix}" for suffix in ("", "-static")]
    texts = [entry.read_text() for entry in entries if entry.exists()]
    return any(text.startswith("enabled") and re.search(r"^flags: \w*F", text, re.M) for text in texts)


def registration(text: str) -> str:
    """Return a binfmt.d file's line as the kernel takes it, with flag F."""
    line = next(line for line in text.splitlines() if line.startswith(":")).strip()
    head, flags = line.rsplit(":", 1)
    return f"{head}:{flags}" if "F" in flags else f"{head}:{flags}F"


def ensure_emulation(arch: str, run: RunProgram = run_program, *, binfmt: Path = BINFMT) -> bool:
    """Make programs of `arch` (amd64 or arm64) run here; return True if they are emulated, False if native.

    The whole machine has one table of emulators; an entry that works is kept. Raises ConfigError for an unknown
    architecture or if root is needed, CommandError if a step fails.
    """
    if arch not in MACHINES:
        raise ConfigError(f"architecture {arch!r} is unknown; known are {', '.join(MACHINES)}")
    machine = MACHINES[arch]
    if machine == platform.machine():
        return False
    if _registered(machine, binfmt):
        return True
    require_root(f"setting up the emulation of {arch}")
    if not (binfmt / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", str(binfmt))
    if not _emulator(machine):
        install(["qemu-user-static"], run)
    if _registered(machine, binfmt):  # by the package, where systemd runs
        return True
    if not (conf := _emulator(machine)):
        raise CommandError(f"qemu-user-static has no emulator of {arch}: there is no file for it in {BINFMT_D}")
    with os_errors_as_command_errors():
        if (entry := binfmt / f"qemu-{machine}").exists():
            entry.write_text("-1")
        (binfmt / "register").write_text(registration(conf.read_text()))
    return True


def _emulator(machine: str) -> Path | None:
    """Return the binfmt.d file of an emulator that is installed."""
    names = (f"qemu-{machine}.conf", f"qemu-{machine}-static.conf")
    return next((path for name in names if (path := BINFMT_D / name).exists()), None)


# The log comes first, so that it also has the errors of what follows. Then a system-wide containerd is hidden.
LAUNCH = 'cd /; exec >"$1" 2>&1; exec unshare --mount --propagation slave sh -c "$2" "$0"'
HIDDEN = 'mkdir -p /run/containerd && mount -t tmpfs imagebuild /run/containerd && exec dockerd --config-file "$0"'


ABSENT_POLLS = 8
"""Polls in a row, 0.2 s apart, that must find no process of the engine before it counts as ended."""
Table = Mapping[int, tuple[int, list[str]]]
"""Processes: pid → parent and argv."""


@dataclass(frozen=True)
class EngineStatus:
    """Describe the private engine. What only a running engine, or for `disk_used` only root, can tell is None."""

    running: bool
    host: str
    data_root: str
    pid: int | None = None
    version: str | None = None
    storage_driver: str | None = None
    bridge: str | None = None
    disk_used: int | None = None


def missing_packages(run: RunProgram = run_program, which: Callable[[str], str | None] = which) -> list[str]:
    """List the packages that a private engine needs and this machine lacks or has too old."""
    docker, buildx = program_version(run, "docker", "--version"), buildx_version(run)
    old_engine = program_version(run, "dockerd", "--version") < ENGINE_MIN
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


def daemon_config(paths: EnginePaths, pool: IPv4Network, mtu: int, *, nvidia: bool = False) -> dict[str, Any]:
    """Return the content of daemon.json. Half of the pool is for the bridge, the other half for networks made later."""
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


def family(table: Table, paths: EnginePaths) -> set[int]:
    """Return the processes of this engine and their descendants."""

    def is_ours(argv: list[str]) -> bool:
        program = _program(argv)
        if str(paths.config) in argv:
            return program == "dockerd" or HIDDEN in argv  # the shell that is about to become dockerd
        helper = program in ("containerd", "containerd-shim-runc-v2", "runc")
        return helper and any(f"{paths.exec_root}/" in word for word in argv)

    pids = {pid for pid, (_, argv) in table.items() if is_ours(argv)}
    while children := {pid for pid, (parent, _) in table.items() if parent in pids} - pids:
        pids |= children
    return pids


def pid_of(paths: EnginePaths) -> int | None:
    """Return the pid of this engine's dockerd. A stale pidfile, whose pid another program may have, does not count."""
    with suppress(OSError, ValueError):
        pid = int(paths.pidfile.read_text())
        argv = process_arguments(pid)
        return pid if _program(argv) == "dockerd" and str(paths.config) in argv else None
    return None


def _pool_before(paths: EnginePaths) -> IPv4Network | None:
    """Return the pool of the last daemon.json."""
    with suppress(OSError, ValueError, LookupError):
        config = json.loads(paths.config.read_text())
        return IPv4Network(config["default-address-pools"][0]["base"]).supernet()
    return None


def _await(paths: EnginePaths, run: RunProgram, seconds: float = 60) -> None:
    """Wait until the engine answers. Raises CommandError with the end of its log if it ends or is too slow."""
    deadline = time.monotonic() + seconds
    absent = 0
    while flaw := engine_flaw(paths.host, run):
        # The engine is launched by a chain of programs, and a process that starts the next one has no argv at first.
        there = any(str(paths.config) in argv for _, argv in process_table().values())
        absent = 0 if there else absent + 1
        ended = absent >= ABSENT_POLLS
        if ended or time.monotonic() > deadline:
            log = paths.log.read_text(errors="replace") if paths.log.exists() else ""
            lines = "\n  ".join(log.splitlines()[-10:])
            problem = "ended" if ended else f"gave no usable answer in {seconds:.0f} s ({flaw})"
            raise CommandError(f"the private engine {problem}; the end of {paths.log}:\n  {lines}")
        time.sleep(0.2)


@contextmanager
def _locked(paths: EnginePaths) -> Iterator[None]:
    """Let only one `up` or `down` run at a time: a second one would remove the first one's half-made engine."""
    paths.state.mkdir(parents=True, exist_ok=True)
    with (paths.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with os_errors_as_command_errors():
            yield


def _clear(paths: EnginePaths, run: RunProgram, seconds: float = 20) -> None:
    """End the engine, and remove all that it made except its data, also what a crash or a `kill -9` left."""
    deadline = time.monotonic() + seconds
    known: dict[int, list[str]] = {}

    def processes_left() -> set[int]:
        """Return the engine's processes, and of those seen before what is left: build steps outlive their parents."""
        table = process_table()
        pids = family(table, paths) | {pid for pid, argv in known.items() if table.get(pid, (0, []))[1] == argv}
        known.update({pid: table[pid][1] for pid in pids})
        return pids

    processes_left()
    if pid := pid_of(paths):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # it stops its containers first
    while pid_of(paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    while (left := processes_left()) and time.monotonic() < deadline + 10:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    remove_network(paths.bridge, _pool_before(paths), run)
    shutil.rmtree(paths.run, ignore_errors=True)


def start_engine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> EngineStatus:
    """Start the private engine unless it runs; install the packages that it lacks first.

    Packages come from the distribution's own archive, on Debian 12 also from the next release's. The engine service
    that they bring is neither started nor enabled; no engine that is already there is stopped, configured or upgraded.
    Raises ConfigError if not root, CommandError if a step fails; what was started is removed again.
    """
    paths = EnginePaths.of(environ)
    if pid_of(paths) is None:
        require_root("`imagebuild engine up`")
        with _locked(paths):
            if pid_of(paths) is None:
                _install_missing(run)
                _launch(paths, run)
    _await(paths, run)
    return engine_status(environ, run)


def _install_missing(run: RunProgram) -> None:
    """Install what the engine lacks. Raises CommandError if that would upgrade an engine that runs here."""
    missing = missing_packages(run)
    running = [pid for pid, (_, argv) in process_table().items() if _program(argv) == "dockerd"]
    if "docker.io" in missing and running and program_version(run, "dockerd", "--version"):
        raise CommandError(
            f"the engine that runs here (pid {running[0]}) is too old, and imagebuild upgrades none but its own; "
            "upgrade it to Docker Engine 26+, or stop it and run `imagebuild engine up` again"
        )
    if missing:
        install(missing, run)


def _launch(paths: EnginePaths, run: RunProgram) -> None:
    """Write the configuration, make the network, and run dockerd until it answers; remove all that if it fails."""
    _clear(paths, run)
    try:
        paths.run.mkdir(parents=True)
        paths.run.chmod(0o755)  # users of the socket must get there, whatever root's umask is
        routes = list(network_routes(run))
        before = _pool_before(paths)
        pool = choose_pool((network for network, _ in routes), before)
        if pool != before:
            # It would give the bridge the address of the old pool, which another engine may have by now.
            (paths.data / "network/files/local-kv.db").unlink(missing_ok=True)
        config = daemon_config(paths, pool, mtu(routes), nvidia=bool(which("nvidia-container-runtime")))
        paths.config.write_text(json.dumps(config, indent=2) + "\n")
        add_network(paths.bridge, pool, run)
        run("setsid", "--fork", "sh", "-c", LAUNCH, str(paths.config), str(paths.log), HIDDEN)
        _await(paths, run)
    except BaseException:
        _clear(paths, run)
        raise


def stop_engine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program, *, purge: bool = False) -> None:
    """Stop the private engine, if there is one, and remove its network; `purge` also deletes its images and caches.

    Raises ConfigError if not root.
    """
    paths = EnginePaths.of(environ)
    folders = (paths.run, *([paths.state] if purge else []))
    if not exists(paths.bridge) and not any(path.exists() for path in folders) and not family(process_table(), paths):
        return
    require_root("`imagebuild engine down`")
    with _locked(paths):
        _clear(paths, run)
        if purge:
            if paths.data.exists():
                shutil.rmtree(paths.data)
            for file in (paths.config, paths.log, paths.state / "lock"):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # IMAGEBUILD_STATE may name a folder that has other things in it
                paths.state.rmdir()


def engine_status(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> EngineStatus:
    """Return the state of the private engine, whether or not there is one."""
    paths = EnginePaths.of(environ)
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
        bridge=paths.bridge if exists(paths.bridge) else None,
        disk_used=disk,
    )
