"""The container engine: finding a usable one, and a private one for machines that have none.

The private engine shares nothing with an engine that is already there. Its socket, folders and bridge are its own,
and so are two things that are easily overlooked:

* Firewall: a starting dockerd empties the DOCKER chains of iptables, which takes published ports and isolation
  from an engine that already runs. Ours has `iptables: false`; `up` adds three rules for its own addresses instead.
* containerd: dockerd uses a system-wide one if it sees its socket. Ours runs in a mount namespace that hides it.
  The namespace also makes every mount disappear with the last process, even after a `kill -9`.
"""

import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal

from imagebuild import apt
from imagebuild.apt import Run, numbers
from imagebuild.errors import CommandError, ConfigError

STATE = Path("/var/lib/imagebuild/engine")
PROC = Path("/proc")
NET = Path("/sys/class/net")
BINFMT = PROC / "sys/fs/binfmt_misc"
BINFMT_D = Path("/usr/lib/binfmt.d")

# A distribution's build reports its BuildKit as "v0.0.0+unknown", but the engine's version tells: Docker Engine 26.0
# is the first with BuildKit 0.13, 25.0 has 0.12.
ENGINE_MIN, BUILDX_MIN = apt.MINIMUM["docker.io"], apt.MINIMUM["docker-buildx"]

NO_ENGINE = "run `imagebuild engine up` as root, or install Docker Engine 26+ with its buildx plug-in"


@dataclass(frozen=True)
class Endpoint:
    """A usable engine. `host` is what DOCKER_HOST would hold; `origin` says who chose it."""

    host: str
    origin: Literal["DOCKER_HOST", "context", "private"]


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


@dataclass(frozen=True)
class Paths:
    """Where a private engine keeps its things; IMAGEBUILD_STATE names another one, independent of the first."""

    state: Path
    run: Path
    bridge: str
    data: Path
    config: Path
    log: Path
    exec_root: Path
    pidfile: Path
    socket: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Paths":
        state, key, bridge = STATE, "", "imagebuild0"
        if other := environ.get("IMAGEBUILD_STATE"):
            state = Path(other).absolute()
            # Short, because names of sockets (107 bytes) and of network devices (15) are limited.
            digest = sha256(bytes(state)).hexdigest()[:8]
            key, bridge = f"-{digest}", f"ib-{digest}"
        run = Path(f"/run/imagebuild{key}")
        ours = (state / "data", state / "daemon.json", state / "dockerd.log")
        return cls(state, run, bridge, *ours, run / "exec", run / "docker.pid", run / "docker.sock")

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"


# Programs


def _environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    # What we read must not be translated, and sbin is not on everyone's path.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8", **(extra or {})}


def run(*argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """What a program prints. Raises CommandError with its last lines if it fails, is missing or is too slow.

    Ctrl-C reaches the program as one SIGINT, and is raised here after the program has ended: apt, for one,
    finishes the package that it is setting up.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            argv, env=_environment(env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"`{argv[0]}` cannot be run: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise CommandError(f"`{' '.join(argv)}` did not answer within {timeout:.0f} s") from error
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if process.returncode:
        lines = "\n".join((err.strip() or out.strip()).splitlines()[-10:])
        raise CommandError(f"`{' '.join(argv)}` failed ({process.returncode}): {lines}")
    return out


def _which(program: str) -> str | None:
    return shutil.which(program, path=_environment()["PATH"])


def _version(run: Run, *argv: str) -> tuple[int, ...]:
    """The version that a program reports, () if it cannot be run."""
    with suppress(CommandError):
        return numbers(run(*argv, timeout=10))
    return ()


# Finding an engine


def buildx_version(run: Run = run) -> tuple[int, ...]:
    """The version of `docker buildx`, () if there is none."""
    with suppress(CommandError):
        text = run("docker", "buildx", "version", timeout=10)
        # Podman's `docker` has a `buildx` too, and it is another program.
        return numbers(text) if "docker/buildx" in text else ()
    return ()


def _reason(error: CommandError) -> str:
    """What the program said, on one line and without how it was called."""
    said = str(error).partition("): ")[2].splitlines() or [str(error)]
    return next((line for line in said if not line.startswith("WARNING")), said[0])


def flaw(host: str, run: Run = run, *, flags: tuple[str, ...] | None = None) -> str | None:
    """Why the engine at `host` cannot be used, or None; `flags` is how the CLI gets there, if not by address."""
    with suppress(PermissionError):  # the CLI says it better
        if host.startswith("unix://") and not Path(host.removeprefix("unix://")).exists():
            return "no socket there"
    try:
        flags = ("--host", host) if flags is None else flags
        answer = run("docker", *flags, "version", "--format", "{{.Server.Version}}", timeout=20)
    except CommandError as error:
        return f"does not answer: {_reason(error)}"
    if numbers(answer) < ENGINE_MIN:
        return f"Docker Engine {answer.strip()} is too old; 26.0 is the first with BuildKit 0.13"
    return None


def find(environ: Mapping[str, str] = os.environ, run: Run = run) -> Endpoint:
    """The first usable engine of DOCKER_HOST, the current docker context and the private engine.

    Raises CommandError, saying what was tried and what to do, if there is none, or if DOCKER_HOST is set and
    its engine cannot be used: whoever sets it does not want another.
    """
    private = Paths.of(environ)
    try:
        run("docker", "buildx", "version", timeout=10)
    except CommandError as error:
        raise CommandError(f"`docker buildx` cannot be used ({_reason(error)}); {NO_ENGINE}") from error
    if explicit := environ.get("DOCKER_HOST"):
        if why := flaw(explicit, run):
            raise CommandError(f"DOCKER_HOST={explicit}: {why}; start or upgrade that engine, or unset DOCKER_HOST")
        return Endpoint(explicit, "DOCKER_HOST")
    tried = []
    try:
        current = run("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}", timeout=10).strip()
        # Without --host, because a context also holds the keys for reaching its engine.
        if not (why := flaw(current, run, flags=())):
            return Endpoint(current, "context")
        tried.append(f"docker context ({current}): {why}")
    except CommandError as error:
        tried.append(f"docker context: {_reason(error)}")
    if not (why := flaw(private.host, run)):
        return Endpoint(private.host, "private")
    tried.append(f"private engine ({private.host}): {why}")
    raise CommandError("\n  ".join([f"no usable container engine; {NO_ENGINE}", *tried]))


# The private engine: what it is made of


# Our log first, so that it also tells why the rest failed. Then hide a system-wide containerd; see the top.
LAUNCH = 'cd /; exec >"$1" 2>&1; exec unshare --mount --propagation slave sh -c "$2" "$0"'
HIDDEN = 'mkdir -p /run/containerd && mount -t tmpfs imagebuild /run/containerd && exec dockerd --config-file "$0"'


def missing_packages(run: Run = run, which: Callable[[str], str | None] = _which) -> list[str]:
    """The packages without which no private engine runs here; a piece that is there and new enough is kept."""
    docker, buildx = _version(run, "docker", "--version"), buildx_version(run)
    old_engine = _version(run, "dockerd", "--version") < ENGINE_MIN
    need = {
        "docker.io": old_engine,
        # An old docker.io contains the client, and loses it when it is upgraded.
        "docker-cli": not docker or (old_engine and docker < ENGINE_MIN),
        "docker-buildx": buildx < BUILDX_MIN,
        "iptables": not which("iptables"),
        "iproute2": not which("ip"),
    }
    return [package for package, wanted in need.items() if wanted]


def choose_pool(taken: Iterable[IPv4Network], before: IPv4Network | None = None) -> IPv4Network:
    """Addresses for the private engine's networks that overlap no route; the same ones as `before` if possible.

    Raises CommandError if every candidate is taken.
    """
    # A VPN that routes everything in two halves takes nothing from us.
    routes = [network for network in taken if network.prefixlen >= 8]
    blocks = [IPv4Network("172.30.0.0/16"), IPv4Network("10.213.0.0/16"), IPv4Network("192.168.192.0/18")]
    candidates = [pool for block in blocks for pool in block.subnets(new_prefix=19)]
    for pool in [before, *candidates] if before else candidates:
        if not any(pool.overlaps(route) for route in routes):
            return pool
    tried = ", ".join(map(str, blocks))
    raise CommandError(f"no addresses are left for a bridge: routes use all of {tried} (see `ip route`)")


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


def firewall_rules(pool: IPv4Network) -> list[tuple[str, str, list[str]]]:
    """(table, chain, rule): what lets containers of the pool reach the world, and its answers reach them."""
    ours = str(pool)
    answers = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
    return [
        ("nat", "POSTROUTING", ["-s", ours, "!", "-d", ours, "-j", "MASQUERADE"]),
        ("filter", "FORWARD", ["-s", ours, "-j", "ACCEPT"]),
        ("filter", "FORWARD", ["-d", ours, *answers, "-j", "ACCEPT"]),
    ]


def _is_ours(argv: list[str], paths: Paths) -> bool:
    program = Path(argv[0]).name if argv else ""
    if str(paths.config) in argv:
        return program == "dockerd" or HIDDEN in argv  # which is about to become dockerd
    helper = program in ("containerd", "containerd-shim-runc-v2", "runc")
    return helper and any(f"{paths.exec_root}/" in word for word in argv)


def family(table: Mapping[int, tuple[int, list[str]]], paths: Paths) -> set[int]:
    """The processes of this engine and their descendants, from `table`: pid → (parent, argv)."""
    found = {pid for pid, (_, argv) in table.items() if _is_ours(argv, paths)}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found


# The private engine: edges


def _argv(pid: int | str) -> list[str]:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    return []


def _processes() -> dict[int, tuple[int, list[str]]]:
    table = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            table[int(folder.name)] = (parent, _argv(folder.name))
    return table


def pid_of(paths: Paths) -> int | None:
    """The pid of this engine's dockerd. A stale pidfile, whose pid may now be another's, is no engine."""
    with suppress(OSError, ValueError):
        pid = int(paths.pidfile.read_text())
        argv = _argv(pid)
        return pid if Path(argv[0]).name == "dockerd" and str(paths.config) in argv else None
    return None


def _pool_before(paths: Paths) -> IPv4Network | None:
    with suppress(OSError, ValueError, LookupError):
        config = json.loads(paths.config.read_text())
        return IPv4Network(config["default-address-pools"][0]["base"]).supernet()
    return None


def _routes(run: Run) -> Iterator[tuple[IPv4Network, dict[str, Any]]]:
    for route in json.loads(run("ip", "-4", "-j", "route", "show", "table", "all") or "[]"):
        yield IPv4Network("0.0.0.0/0" if route["dst"] == "default" else route["dst"]), route


def _mtu(routes: Iterable[tuple[IPv4Network, dict[str, Any]]]) -> int:
    """A packet must fit through the way out; a tunnel's or a cloud's may be smaller than Ethernet's 1500."""
    devices = [route["dev"] for network, route in routes if network.prefixlen == 0 and "dev" in route]
    return min([1500, *(int((NET / device / "mtu").read_text()) for device in devices)])


def _add_network(paths: Paths, run: Run) -> None:
    """Choose addresses, write daemon.json, and make the bridge and the firewall rules."""
    routes = list(_routes(run))
    pool = choose_pool((network for network, _ in routes), _pool_before(paths))
    config = daemon_config(paths, pool, _mtu(routes), nvidia=bool(_which("nvidia-container-runtime")))
    paths.config.write_text(json.dumps(config, indent=2) + "\n")
    inside = next(pool.subnets())
    run("ip", "link", "add", paths.bridge, "type", "bridge")
    run("ip", "address", "add", f"{inside[1]}/{inside.prefixlen}", "dev", paths.bridge)
    run("ip", "link", "set", paths.bridge, "up")
    for table, chain, rule in firewall_rules(pool):
        run("iptables", "--wait", "--table", table, "--insert", chain, *rule)


def _remove_network(paths: Paths, run: Run) -> None:
    """Remove the rules and every bridge of the pool: dockerd leaves those of networks that users made."""
    try:
        devices = [(network, route.get("dev")) for network, route in _routes(run) if network.prefixlen < 32]
    except CommandError:
        if (NET / paths.bridge).exists():
            raise
        return  # no `ip`, so there was never a bridge
    # The bridge knows the pool too, should the state folder be gone.
    pools = {network.supernet() for network, device in devices if device == paths.bridge}
    for pool in pools | {pool for pool in [_pool_before(paths)] if pool}:
        for table, chain, rule in firewall_rules(pool):
            with suppress(CommandError):  # it is not there
                while True:
                    run("iptables", "--wait", "--table", table, "--delete", chain, *rule)
        for device in {device for network, device in devices if device and network.subnet_of(pool)}:
            run("ip", "link", "delete", device, "type", "bridge")
    if (NET / paths.bridge).exists():  # without an address yet
        run("ip", "link", "delete", paths.bridge)


def _await(paths: Paths, run: Run, seconds: float = 60) -> None:
    """Wait until the engine answers. Raises CommandError with the end of its log if it ends or is too slow."""
    deadline = time.monotonic() + seconds
    while why := flaw(paths.host, run):
        ended = not any(str(paths.config) in argv for _, argv in _processes().values())
        if ended or time.monotonic() > deadline:
            log = paths.log.read_text(errors="replace") if paths.log.exists() else ""
            lines = "\n  ".join(log.splitlines()[-10:])
            what = "ended" if ended else f"gave no usable answer in {seconds:.0f} s ({why})"
            raise CommandError(f"the private engine {what}; the end of {paths.log}:\n  {lines}")
        time.sleep(0.2)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """A full disk or a read-only folder is the machine's problem, not a bug."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or 'writing'}: {error.strerror}") from error


@contextmanager
def _locked(paths: Paths) -> Iterator[None]:
    """One `up` or `down` at a time: the second would take the first one's half-made engine for leftovers."""
    paths.state.mkdir(parents=True, exist_ok=True)
    with (paths.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _plain_errors():
            yield


def _require_root(what: str) -> None:
    if os.geteuid():
        raise ConfigError(f"{what} needs root: use sudo, or set DOCKER_HOST to an engine that you may use")


def _install(run: Run) -> None:
    missing = missing_packages(run)
    running = [pid for pid, (_, argv) in _processes().items() if argv and Path(argv[0]).name == "dockerd"]
    if "docker.io" in missing and running and _version(run, "dockerd", "--version"):
        raise CommandError(
            f"the engine that runs here (pid {running[0]}) is too old, and imagebuild upgrades none but its own; "
            "upgrade it to Docker Engine 26+, or stop it and run `imagebuild engine up` again"
        )
    if missing:
        apt.install(missing, run)


def _clear(paths: Paths, run: Run, seconds: float = 20) -> None:
    """End the engine and remove all it made but its data. Also removes what a crash or a `kill -9` left."""
    deadline = time.monotonic() + seconds
    if pid := pid_of(paths):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # it stops its containers first
    while pid_of(paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    while (left := family(_processes(), paths)) and time.monotonic() < deadline + 10:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    _remove_network(paths, run)
    shutil.rmtree(paths.run, ignore_errors=True)


def up(environ: Mapping[str, str] = os.environ, run: Run = run) -> EngineStatus:
    """Start the private engine, after installing what it lacks; nothing happens if it runs already.

    Packages come from the distribution's own archive, on Debian 12 from the next release's. The engine service
    that they bring is neither started nor enabled; no engine that is already there is stopped, configured or
    upgraded. Raises ConfigError if not root, CommandError if a step fails; what was started is removed again.
    """
    paths = Paths.of(environ)
    if pid_of(paths) is None:
        _require_root("`imagebuild engine up`")
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
        _add_network(paths, run)
        run("setsid", "--fork", "sh", "-c", LAUNCH, str(paths.config), str(paths.log), HIDDEN)
        _await(paths, run)
    except BaseException:
        _clear(paths, run)
        raise


def down(environ: Mapping[str, str] = os.environ, run: Run = run, *, purge: bool = False) -> None:
    """Stop the private engine and remove its network; `purge` also deletes its images and build cache.

    Nothing happens if there is nothing to do. Raises ConfigError if not root.
    """
    paths = Paths.of(environ)
    leftovers = (paths.run, NET / paths.bridge, *([paths.state] if purge else []))
    if not any(path.exists() for path in leftovers) and not family(_processes(), paths):
        return
    _require_root("`imagebuild engine down`")
    with _locked(paths):
        _clear(paths, run)
        if purge:
            if paths.data.exists():
                shutil.rmtree(paths.data)
            for file in (paths.config, paths.log, paths.state / "lock"):
                file.unlink(missing_ok=True)
            with suppress(OSError):  # IMAGEBUILD_STATE may be a folder that has other things in it
                paths.state.rmdir()


def status(environ: Mapping[str, str] = os.environ, run: Run = run) -> EngineStatus:
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
        bridge=paths.bridge if (NET / paths.bridge).exists() else None,
        disk_used=disk,
    )


# Emulation of the other architecture


MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def _registered(machine: str, binfmt: Path) -> bool:
    """Whether the kernel runs `machine`'s programs in every root file system: flag F holds the emulator open."""
    entries = [binfmt / f"qemu-{machine}{suffix}" for suffix in ("", "-static")]
    texts = [entry.read_text() for entry in entries if entry.exists()]
    return any(text.startswith("enabled") and re.search(r"^flags: \w*F", text, re.M) for text in texts)


def registration(text: str) -> str:
    """A binfmt.d line as the kernel takes it, with flag F."""
    line = next(line for line in text.splitlines() if line.startswith(":")).strip()
    head, flags = line.rsplit(":", 1)
    return f"{head}:{flags}" if "F" in flags else f"{head}:{flags}F"


def ensure_emulation(arch: str, run: Run = run, *, binfmt: Path = BINFMT) -> bool:
    """Make programs of `arch` (amd64 or arm64) run here; False if they do so natively, True if emulated.

    The kernel's table of emulators is one for the whole machine; an entry that works is kept. Raises ConfigError
    for an unknown architecture or if root is needed, CommandError if a step fails.
    """
    if arch not in MACHINES:
        raise ConfigError(f"architecture {arch!r} is unknown; known are {', '.join(MACHINES)}")
    machine = MACHINES[arch]
    if machine == platform.machine():
        return False
    if _registered(machine, binfmt):
        return True
    _require_root(f"setting up the emulation of {arch}")
    if not (binfmt / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", str(binfmt))
    if not _emulator(machine):
        apt.install(["qemu-user-static"], run)
    if _registered(machine, binfmt):  # by the package, where systemd runs
        return True
    if not (conf := _emulator(machine)):
        raise CommandError(f"qemu-user-static brought no emulator of {arch}: nothing in {BINFMT_D} is for it")
    with _plain_errors():
        if (entry := binfmt / f"qemu-{machine}").exists():
            entry.write_text("-1")
        (binfmt / "register").write_text(registration(conf.read_text()))
    return True


def _emulator(machine: str) -> Path | None:
    names = (f"qemu-{machine}.conf", f"qemu-{machine}-static.conf")
    return next((path for name in names if (path := BINFMT_D / name).exists()), None)
