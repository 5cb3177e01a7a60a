import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from imagebuild.build import private
from imagebuild.core import debian
from imagebuild.core.debian import parse_oneline
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram
from imagebuild.oci.engine import EnginePaths
from tests.conftest import data
from tests.unit.conftest import APT_KEY, BUILDX, AptMachine, Runner

CASES = data("cases/build/private")

POOL = IPv4Network("172.30.0.0/19")
ROUTES = CASES["routes"]


def process(machine: Path, pid: int, *argv: str) -> None:
    folder = machine / "proc" / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_text("\0".join(argv) + "\0")
    (folder / "stat").write_text(f"{pid} (a (b) c) S 1 1 1")


def test_only_missing_pieces_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["git", "ip", "iptables"]
    monkeypatch.setattr("shutil.which", lambda program, path=None: program if program in there else None)
    monkeypatch.setattr(debian, "os_release", lambda: {"ID": "debian"})
    assert private.missing_packages(Runner({})) == ["docker.io", "docker-cli", "docker-buildx"]
    there += ["docker", "dockerd"]
    assert private.missing_packages(Runner(BUILDX)) == []


def test_processes_of_this_engine_and_no_others(machine: Path, paths: EnginePaths) -> None:
    config = str(paths.config)
    process(machine, 10, "unshare", "--pid", "sh", "-c", "…", config)
    process(machine, 11, "sh", "-c", "…", config)
    process(machine, 12, "/usr/sbin/dockerd", "--config-file", config)
    process(machine, 20, "dockerd", "--config-file", "/etc/docker/daemon.json")
    process(machine, 22, "vi", config)
    assert private.engine_processes(paths) == {10: "unshare", 11: "sh", 12: "dockerd"}


@pytest.fixture(autouse=True)
def started(machine: Path, paths: EnginePaths, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that launched an engine. All packages are installed, and a launched engine answers immediately."""
    commands: list[Sequence[str]] = []

    def launch(command: Sequence[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        paths.socket.touch()
        return SimpleNamespace(poll=lambda: None, wait=lambda: None)

    monkeypatch.setattr(private, "start_program", launch)
    tools = {"docker", "dockerd", "git", "ip", "iptables"}
    monkeypatch.setattr("shutil.which", lambda program, path=None: program if program in tools else None)
    return commands


def installed(paths: EnginePaths, routes: object = ROUTES, **more: str | Callable[[], str]) -> Runner:
    answers: dict[str, str | Callable[[], str]] = {
        **BUILDX, f"docker --host {paths.host}": "26.1.5\n", "ip -4 -j route": json.dumps(routes), "ip link": "",
        "ip address": "", "iptables --wait --table nat --insert": "", "iptables --wait --table filter": "", **more,
    }  # fmt: skip
    return Runner(answers)


@pytest.mark.usefixtures("private")
def test_up_starts_and_a_second_up_does_nothing(paths: EnginePaths, started: list[Sequence[str]]) -> None:
    # dockerd ignores the configured address if its database contains an address of the bridge.
    database = paths.data / "network/files/local-kv.db"
    database.parent.mkdir(parents=True)
    database.touch()
    run = installed(paths)
    paths.state.chmod(0o777)
    with pytest.raises(ConfigError, match="another user may write to it"):
        private.start_engine({}, run)
    paths.state.chmod(0o755)
    assert private.start_engine({}, run) == paths
    assert json.loads(paths.config.read_text())["mtu"] == 1400
    assert run.of("ip address") == ["ip address add 172.30.32.1/20 dev ib-test"]
    assert len([call for call in run.of("iptables") if "--insert" in call]) == 3
    assert not database.exists()
    private.start_engine({}, installed(paths))
    assert len(started) == 1


@pytest.mark.usefixtures("private")
def test_what_fails_on_the_way_leaves_nothing(
    machine: Path, paths: EnginePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: object, output: int, survives: bool) -> SimpleNamespace:
        assert survives
        os.write(output, b"starting\nfailed to start daemon: no cgroups\n")
        return SimpleNamespace(poll=lambda: 1, wait=lambda: 1)

    monkeypatch.setattr(private, "start_program", die)
    with pytest.raises(CommandError, match=r"ended; the end of .*dockerd\.log:\n.*starting\n.*no cgroups"):
        private.start_engine({}, installed(paths))
    assert not paths.run.exists()
    (machine / "net" / paths.bridge).mkdir()
    run = installed(paths, **{"ip address": Mock(side_effect=KeyboardInterrupt)})
    with pytest.raises(KeyboardInterrupt):
        private.start_engine({}, run)
    assert run.calls.count("ip link delete ib-test") == 2, "before and after"
    assert not paths.run.exists()
    paths.config.unlink()
    paths.config.mkdir()
    with pytest.raises(CommandError, match=r"daemon\.json: Is a directory"):
        private.start_engine({}, installed(paths))
    process(machine, 12, "dockerd", "--config-file", str(paths.config))
    with pytest.raises(CommandError, match="the private engine runs, but its socket does not exist; stop it with"):
        private.start_engine({}, installed(paths))


@pytest.mark.usefixtures("private")
def test_up_and_down_need_root(paths: EnginePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        private.start_engine({}, Runner({}))
    private.stop_engine({}, Runner({}))  # nothing to do
    paths.state.mkdir()
    with pytest.raises(ConfigError, match="needs root"):
        private.stop_engine({}, Runner({}))


@pytest.mark.usefixtures("private")
def test_down_removes_rules_and_bridges_of_its_pool(machine: Path, paths: EnginePaths) -> None:
    paths.run.mkdir()
    paths.data.mkdir(parents=True)
    (machine / "net" / paths.bridge).mkdir()
    (paths.state / "thesis.txt").touch()
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "172.30.0.0/20", "dev": "ib-test"},
        {"dst": "172.30.16.0/24", "dev": "br-users"},
        {"dst": "172.30.0.1", "dev": "ib-test", "type": "local"},
        {"dst": "172.31.0.0/24", "dev": "docker0"},
    ]
    run = installed(paths, routes)
    private.stop_engine({}, run)
    assert [call.split()[3] for call in run.of("ip link delete")] == ["br-users", "ib-test"]
    assert len([call for call in run.of("iptables") if "--delete" in call]) == len(private.firewall_rules(POOL))
    assert not paths.run.exists()
    assert paths.data.exists()
    private.stop_engine({}, run, purge=True)
    assert [path.name for path in paths.state.iterdir()] == ["thesis.txt"]  # the file of someone else is kept


def test_the_pool_overlaps_no_route() -> None:
    everything = [IPv4Network("0.0.0.0/1"), IPv4Network("128.0.0.0/1")]
    assert private.choose_pool(everything) == POOL
    assert private.choose_pool([IPv4Network("172.30.5.0/24")]) == IPv4Network("172.30.32.0/19")
    assert private.choose_pool([IPv4Network("172.16.0.0/12")]) == IPv4Network("10.213.0.0/19")
    with pytest.raises(CommandError, match="no addresses are free"):
        private.choose_pool([IPv4Network("172.16.0.0/12"), IPv4Network("10.0.0.0/8"), IPv4Network("192.168.0.0/16")])


def test_the_mtu_is_the_smallest_of_the_ways_out(machine: Path) -> None:
    (machine / "net/tun0").mkdir()
    (machine / "net/tun0/mtu").write_text("1280\n")
    out = [(IPv4Network("0.0.0.0/0"), "eth0"), (IPv4Network("0.0.0.0/0"), "")]
    assert private.mtu([]) == 1500
    assert private.mtu([*out, (IPv4Network("172.30.0.0/24"), "tun0")]) == 1400
    assert private.mtu([*out, (IPv4Network("0.0.0.0/0"), "tun0")]) == 1280


CONF = r":qemu-aarch64:M::\x7f\x45:\xff\xff:/usr/libexec/qemu-binfmt/aarch64-binfmt-P:"


@pytest.fixture
def binfmt(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    folder = machine / "binfmt"
    folder.mkdir()
    (folder / "register").touch()
    return folder


@pytest.mark.parametrize(("flags", "installed"), [("OP", True), ("OPF", False)])
def test_emulation_is_registered_with_a_held_interpreter(
    machine: Path, binfmt: Path, monkeypatch: pytest.MonkeyPatch, flags: str, installed: bool
) -> None:
    def install(packages: list[str], run: RunProgram) -> None:
        assert packages == ["qemu-user-static"]
        (machine / "qemu-aarch64.conf").write_text(f"# qemu\n{CONF}{flags}\n")

    if installed:
        install(["qemu-user-static"], Runner({}))
    monkeypatch.setattr(private, "install", install)
    private.ensure_emulation("arm64", Runner({}))
    assert (binfmt / "register").read_text() == f"{CONF}OPF"


def test_emulation_needs_root_unless_it_is_there(binfmt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    private.ensure_emulation("amd64", Runner({}))  # native
    with pytest.raises(ConfigError, match="emulation of arm64 needs root"):
        private.ensure_emulation("arm64", Runner({}))
    (binfmt / "qemu-aarch64").touch()
    private.ensure_emulation("arm64", Runner({}))


@pytest.mark.parametrize("configured", [False, True])
def test_debian_12_takes_the_engine_from_the_next_release_and_nothing_else(here: AptMachine, configured: bool) -> None:
    if configured:
        here.listing("next.list").write_text(
            f"deb [signed-by={APT_KEY}] http://archive.example.org/debian trixie main\n"
        )
    run = Runner({"apt-get": ""})
    private.install(["docker.io", "iptables"], run)
    (installed,) = run.of("apt-get install")
    assert installed.endswith(" --no-remove --no-install-recommends docker.io/trixie iptables")
    own = here.listing("imagebuild-trixie.list")
    assert own.exists() is not configured, "a second entry"
    if not configured:
        suites = [source.suite for source in parse_oneline(own.read_text())]
        assert suites == ["trixie", "trixie-updates", "trixie-security"]
        assert "Pin-Priority: 50" in (here.etc / "preferences.d" / "imagebuild-trixie").read_text()


@pytest.mark.parametrize(("distribution", "message"), CASES["what-cannot-be-installed"])
def test_what_cannot_be_installed(here: AptMachine, distribution: tuple[str, str, str], message: str) -> None:
    here.become(*distribution)
    here.listing("debian.sources").unlink()
    run = Runner({"apt-get": ""})
    with pytest.raises(CommandError, match=message):
        private.install(["docker.io"], run)
    assert not run.calls


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_services_are_held_during_the_installation_by_us_or_the_machines_own_policy(
    here: AptMachine, own: bool, fails: bool
) -> None:
    here.become("debian", "13", "trixie")
    if own:
        private.POLICY.write_text("exit 104\n")
    held: list[str] = []

    def work() -> str:
        held.append(private.POLICY.read_text())
        if fails:
            raise CommandError("broken")
        return ""

    with suppress(CommandError):
        private.install(["iproute2"], Runner({"apt-get": work}))
    assert held[-1].endswith("exit 104\n" if own else "exit 101\n")
    assert private.POLICY.exists() == own
