import json
from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from imagebuild.build import (
    HIDDEN,
    LAUNCH,
    daemon_config,
    engine_status,
    family,
    missing_packages,
    pid_of,
    start_engine,
    stop_engine,
)
from imagebuild.core import CommandError, ConfigError
from imagebuild.oci import EnginePaths
from tests.unit.conftest import BUILDX, Runner

ROUTES = [
    {"dst": "default", "dev": "eth0"},
    {"dst": "172.30.0.0/24", "dev": "docker7"},
    {"dst": "192.0.2.2", "dev": "eth0", "type": "local"},
]


def process(machine: Path, pid: int, parent: int, *argv: str) -> None:
    folder = machine / "proc" / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_text("\0".join(argv) + "\0")
    (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")


@pytest.mark.parametrize(
    ("answers", "there", "missing"),
    [
        ({}, (), ["docker.io", "docker-cli", "docker-buildx", "iptables", "iproute2", "git"]),
        (
            {**BUILDX, "docker --version": "Docker version 28.2.2", "dockerd": "Docker version 26.1.5+dfsg1"},
            ("git", "ip", "iptables"),
            [],
        ),
        # The old package contains the old client, and loses it.
        (
            {"docker --version": "Docker version 20.10.24", "dockerd": "Docker version 20.10.24"},
            ("git", "ip", "iptables"),
            ["docker.io", "docker-cli", "docker-buildx"],
        ),
        ({**BUILDX, "docker --version": "Docker version 28.2.2"}, ("git", "ip", "iptables"), ["docker.io"]),
    ],
)
def test_only_missing_pieces_are_installed(answers: dict[str, str], there: tuple[str, ...], missing: list[str]) -> None:
    found = missing_packages(Runner(answers), lambda program: program if program in there else None)
    assert found == missing


def test_daemon_config_keeps_to_itself(paths: EnginePaths) -> None:
    pool = IPv4Network("172.30.0.0/19")
    config = daemon_config(paths, pool, 1400)
    assert config["features"]["containerd-snapshotter"] is True
    assert config["iptables"] is False
    assert "bip" not in config  # dockerd refuses it together with a bridge
    assert "runtimes" not in config
    (later,) = config["default-address-pools"]
    assert IPv4Network(later["base"]) == IPv4Network("172.30.16.0/20")
    assert "nvidia" in daemon_config(paths, pool, 1400, nvidia=True)["runtimes"]


def test_family_is_this_engine_and_its_descendants(paths: EnginePaths) -> None:
    socket = f"{paths.exec_root}/containerd/containerd.sock"
    table = {
        1: (0, ["init"]),
        10: (1, ["/usr/sbin/dockerd", "--config-file", str(paths.config)]),
        11: (1, ["containerd-shim-runc-v2", "-address", socket]),
        12: (11, ["sleep", "1000"]),
        13: (12, []),
        14: (1, ["sh", "-c", LAUNCH, str(paths.config), str(paths.log), HIDDEN]),
        20: (1, ["dockerd", "--config-file", "/etc/docker/daemon.json"]),
        21: (20, ["containerd", "--config", "/run/docker/containerd/containerd.toml"]),
        22: (1, ["vi", str(paths.config)]),
        23: (1, ["tail", "-f", f"{paths.exec_root}/log"]),
    }
    assert family(table, paths) == {10, 11, 12, 13, 14}


def test_a_pid_counts_only_while_it_is_this_dockerd(machine: Path, paths: EnginePaths) -> None:
    assert pid_of(paths) is None
    paths.run.mkdir()
    paths.pidfile.write_text("42")
    assert pid_of(paths) is None  # nobody has that pid
    process(machine, 42, 1, "dockerd", "--config-file", "/etc/docker/daemon.json")
    assert pid_of(paths) is None  # somebody else's engine has it
    process(machine, 43, 1, "dockerd", "--config-file", str(paths.config))
    paths.pidfile.write_text("43\n")
    assert pid_of(paths) == 43
    paths.pidfile.write_text("garbage")
    assert pid_of(paths) is None


def installed(machine: Path, paths: EnginePaths, **more: str | Callable[[], str]) -> Runner:
    """Everything is installed; launching makes a dockerd that answers at once."""

    def launch() -> str:
        paths.pidfile.write_text("50")
        paths.socket.touch()
        process(machine, 50, 1, "dockerd", "--config-file", str(paths.config))
        return ""

    def no_such_rule() -> str:
        raise CommandError("`iptables` failed (1): Bad rule")

    return Runner(
        {
            **BUILDX,
            "docker --version": "Docker version 28.2.2",
            "dockerd --version": "Docker version 26.1.5",
            "ip -4 -j route": json.dumps(ROUTES),
            "ip link": "",
            "ip address": "",
            "iptables --wait --table nat --delete": no_such_rule,
            "iptables --wait --table filter --delete": no_such_rule,
            "iptables": "",
            "setsid": more.pop("setsid", launch),
            f"docker --host {paths.host} version": "26.1.5",
            f"docker --host {paths.host} info": "26.1.5 overlayfs\n",
            "du": f"2048\t{paths.data}\n",
            **more,
        }
    )


@pytest.fixture
def _all_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"git", "ip", "iptables"}
    monkeypatch.setattr("shutil.which", lambda program, path=None: program if program in tools else None)


@pytest.mark.usefixtures("_all_tools")
def test_up_starts_and_a_second_up_does_nothing(machine: Path, private: EnginePaths) -> None:
    run = installed(machine, private)
    found = start_engine({}, run)
    assert (found.running, found.pid, found.version, found.storage_driver) == (True, 50, "26.1.5", "overlayfs")
    assert found.disk_used == 2048 * 1024
    assert json.loads(private.config.read_text())["mtu"] == 1400
    assert run.of("ip address") == ["ip address add 172.30.32.1/20 dev ib-test"]
    assert len([call for call in run.of("iptables") if "--insert" in call]) == 3
    again = installed(machine, private)
    assert start_engine({}, again).pid == 50
    assert not again.of("ip link")


@pytest.mark.usefixtures("_all_tools")
@pytest.mark.parametrize(("before", "kept"), [("172.30.32.0/19", True), ("172.30.0.0/19", False)])
def test_networks_with_addresses_that_are_taken_now_are_forgotten(
    machine: Path, private: EnginePaths, before: str, kept: bool
) -> None:
    """dockerd gives the bridge the address that its database has, whatever the configuration says."""
    database = private.data / "network/files/local-kv.db"
    database.parent.mkdir(parents=True)
    database.touch()
    private.config.write_text(json.dumps(daemon_config(private, IPv4Network(before), 1500)))
    run = installed(machine, private)
    start_engine({}, run)
    assert run.of("ip address") == ["ip address add 172.30.32.1/20 dev ib-test"]
    assert database.exists() == kept


@pytest.mark.usefixtures("_all_tools")
def test_an_engine_that_ends_at_once_shows_its_log_and_leaves_nothing(machine: Path, private: EnginePaths) -> None:
    def die() -> str:
        private.log.write_text("starting\nfailed to start daemon: no cgroups\n")
        return ""

    run = installed(machine, private, setsid=die)
    with pytest.raises(CommandError, match=r"ended; the end of .*dockerd\.log:\n.*starting\n.*no cgroups"):
        start_engine({}, run)
    assert not private.run.exists()


@pytest.mark.usefixtures("_all_tools")
def test_ctrl_c_leaves_nothing(machine: Path, private: EnginePaths) -> None:
    def interrupt() -> str:
        (machine / "net" / "ib-test").mkdir()
        raise KeyboardInterrupt

    run = installed(machine, private, **{"ip address": interrupt})
    with pytest.raises(KeyboardInterrupt):
        start_engine({}, run)
    assert "ip link delete ib-test" in run.calls
    assert not private.run.exists()


@pytest.mark.usefixtures("_all_tools")
def test_a_full_disk_is_no_bug(machine: Path, private: EnginePaths) -> None:
    private.config.mkdir(parents=True)
    with pytest.raises(CommandError, match=r"daemon\.json: Is a directory"):
        start_engine({}, installed(machine, private))


def test_up_and_down_need_root(machine: Path, private: EnginePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        start_engine({}, Runner({}))
    stop_engine({}, Runner({}))  # nothing to do
    private.run.mkdir()
    with pytest.raises(ConfigError, match="needs root"):
        stop_engine({}, Runner({}))


def test_up_does_not_upgrade_an_engine_that_runs(machine: Path, private: EnginePaths) -> None:
    process(machine, 7, 1, "/usr/bin/dockerd", "-H", "fd://")
    run = Runner({"dockerd --version": "Docker version 20.10.24"})
    with pytest.raises(CommandError, match=r"pid 7\) is too old"):
        start_engine({}, run)
    assert not run.of("apt")


def test_down_removes_rules_bridges_and_what_belongs_to_them(machine: Path, private: EnginePaths) -> None:
    private.run.mkdir()
    private.data.mkdir(parents=True)
    pool = IPv4Network("172.30.0.0/19")
    private.config.write_text(json.dumps(daemon_config(private, pool, 1500)))
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": "172.30.0.0/20", "dev": "ib-test"},
        {"dst": "172.30.16.0/24", "dev": "br-users"},
        {"dst": "172.30.0.1", "dev": "ib-test", "type": "local"},
        {"dst": "172.31.0.0/24", "dev": "docker0"},
    ]
    run = installed(machine, private, **{"ip -4 -j route": json.dumps(routes)})
    stop_engine({}, run)
    deleted = {call.split()[3] for call in run.of("ip link delete")}
    assert deleted == {"ib-test", "br-users"}
    assert len([call for call in run.of("iptables") if "--delete" in call]) == 3
    assert not private.run.exists()
    assert private.data.exists()
    stop_engine({}, run, purge=True)
    assert not private.state.exists()


def test_purge_keeps_what_others_put_into_the_folder(private: EnginePaths) -> None:
    private.data.mkdir(parents=True)
    (private.state / "thesis.txt").touch()
    stop_engine({}, Runner({"ip -4 -j route": "[]"}), purge=True)
    assert [path.name for path in private.state.iterdir()] == ["thesis.txt"]


def test_status_of_nothing(private: EnginePaths) -> None:
    found = engine_status({}, Runner({}))
    assert (found.running, found.version, found.bridge, found.disk_used) == (False, None, None, None)
