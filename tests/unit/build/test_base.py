import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from imagebuild.build import (
    DAY,
    DIE_WITH_US,
    KEYRING,
    PACKAGES,
    VERSION,
    BootstrappedBase,
    BootstrapTools,
    Log,
    RootfsRecipe,
    base,
    bootstrap,
    ensure_mmdebstrap,
    image_settings,
    load_into_engine,
    make_rootfs,
    private,
    signed_source,
)
from imagebuild.core import AptSource, CommandError, ConfigError, Finished, ResultError, RunProgram
from imagebuild.oci import EPOCH, Layout, images_in
from tests.unit.image_files import layer

AMD64, ARM64 = "linux/amd64", "linux/arm64"
SOURCE = AptSource("http://archive.example/debian", "trixie", ("main",), KEYRING)


@dataclass
class Machine:
    """Stands in for every program and for the clock."""

    time: float = 1_000_000_000.0
    version: str = "13.1"
    whole: bool = True
    failure: BaseException | None = None
    commands: list[Sequence[str]] = field(default_factory=list)
    emulated: list[str] = field(default_factory=list)

    def execute(self, command: Sequence[str], *, each_line: Log, env: Mapping[str, str]) -> Finished:
        self.commands.append(command)
        each_line("I: running")
        tar = Path(next(word for word in command if word.endswith("root.tar")))
        (tar.parent / "mmdebstrap.1234").mkdir()
        if self.failure:
            raise self.failure
        tar.write_bytes(layer({VERSION: f"{self.version}\n".encode()} if self.whole else {}))
        return Finished(0, "")

    @property
    def tools(self) -> BootstrapTools:
        return BootstrapTools(
            sources=lambda release: (SOURCE,),
            emulate=self.emulated.append,
            run=lambda *command, **options: "",
            execute=self.execute,
            now=lambda: self.time,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setattr(base, "ensure_mmdebstrap", lambda run, log: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return Machine()


def test_one_image_of_all_platforms(machine: Machine, tmp_path: Path) -> None:
    lines: list[str] = []
    made = bootstrap([AMD64, ARM64], tmp_path / "cache", tools=machine.tools, log=lines.append)
    assert [item.platform for item in images_in(made.layout, tmp_path)] == [AMD64, ARM64]
    assert made.context == f"oci-layout://{tmp_path}/cache/layout@{made.digest}"
    assert machine.emulated == ["amd64", "arm64"]  # where it is native, that does nothing
    assert lines[:2] == ["bootstrapping trixie for linux/amd64", "I: running"]


@pytest.mark.parametrize("version", ["13.1", "13.2"])
def test_what_is_too_old_is_made_anew_and_the_same_packages_make_the_same(
    machine: Machine, tmp_path: Path, version: str
) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    machine.time += 8 * DAY
    machine.version = version
    assert (bootstrap([AMD64], tmp_path, tools=machine.tools) == first) is (version == "13.1")
    assert len(machine.commands) == 2


def test_what_was_made_is_used_again(machine: Machine, tmp_path: Path) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    both = bootstrap([AMD64, ARM64], tmp_path, tools=machine.tools)
    assert bootstrap([AMD64], tmp_path, tools=machine.tools) == first
    assert bootstrap([ARM64, AMD64], tmp_path, tools=machine.tools).digest == both.digest
    assert len(machine.commands) == 2
    bootstrap([AMD64], tmp_path, tools=machine.tools, release="bookworm")
    assert len(machine.commands) == 3


@pytest.mark.parametrize("damage", ["record", "blob"])
def test_a_damaged_cache_is_repaired(machine: Machine, tmp_path: Path, damage: str) -> None:
    first = bootstrap([AMD64], tmp_path, tools=machine.tools)
    if damage == "record":
        next(tmp_path.glob("*.json")).write_text("{")
    else:
        Layout(first.layout).path(images_in(first.layout, tmp_path)[0].digest).write_bytes(b"")
    assert bootstrap([AMD64], tmp_path, tools=machine.tools) == first
    assert len(machine.commands) == 2


def test_what_was_made_long_ago_is_forgotten(machine: Machine, tmp_path: Path) -> None:
    made = bootstrap([AMD64], tmp_path, tools=machine.tools, release="bookworm")
    (old,) = images_in(made.layout, tmp_path)
    os.utime(Layout(made.layout).path(old.digest), (1, 1))
    machine.time += 31 * DAY
    machine.version = "13.2"
    bootstrap([AMD64], tmp_path, tools=machine.tools)
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert not Layout(made.layout).path(old.digest).exists()


@pytest.mark.parametrize("failure", [CommandError("mmdebstrap failed"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(machine: Machine, tmp_path: Path, failure: BaseException) -> None:
    machine.failure = failure
    with pytest.raises(type(failure)):
        bootstrap([AMD64], tmp_path / "cache", tools=machine.tools)
    assert list((tmp_path / "cache").iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed(machine: Machine, tmp_path: Path) -> None:
    with base._scratch(tmp_path / "cache") as folder:
        stale = folder.with_name(f"{folder.name}stale")
    (stale / "mmdebstrap.1").mkdir(parents=True)
    other = tmp_path / "tmp" / "imagebuild-base-of-another-cache"
    other.mkdir()
    bootstrap([AMD64], tmp_path / "cache", tools=machine.tools)
    assert list((tmp_path / "tmp").iterdir()) == [other]


def test_another_process_with_the_same_cache_is_waited_for(tmp_path: Path) -> None:
    def wait() -> None:
        raise TimeoutError

    with private.alone(tmp_path, wait), pytest.raises(TimeoutError), private.alone(tmp_path, wait):
        pytest.fail("both are in it")


def test_a_result_without_a_system_is_reported(machine: Machine, tmp_path: Path) -> None:
    machine.whole = False
    with pytest.raises(ResultError, match="is the disk full"):
        bootstrap([AMD64], tmp_path / "cache", tools=machine.tools)


def test_what_cannot_be_made_is_refused(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'linux/s390x'; possible: linux/amd64, linux/arm64"):
        bootstrap(["linux/s390x"], tmp_path, tools=machine.tools)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: cannot be written"):
        bootstrap([AMD64], tmp_path / "file", tools=machine.tools)


def test_a_classic_image_store_gets_the_layer_of_its_one_platform(tmp_path: Path) -> None:
    called: list[tuple[str, ...]] = []

    def run(*argv: str, **_: object) -> str:
        called.append(argv)
        if "inspect" in argv:
            raise CommandError("no such image")
        return ""

    tar = tmp_path / "root.tar"
    tar.write_bytes(layer({}))
    manifest = Layout(tmp_path / "layout").add_image(tar, "linux/amd64", image_settings("trixie", "13.0"))
    digest = Layout(tmp_path / "layout").write_index([manifest])
    image = BootstrappedBase(tmp_path / "layout", digest, (AMD64,))
    assert load_into_engine(image, {}, run) == f"docker-image://{called[1][-1]}"
    assert called[1][:2] == ("docker", "import")
    assert Path(called[1][-2]).is_file()
    two = BootstrappedBase(tmp_path / "layout", digest, (AMD64, ARM64))
    with pytest.raises(ConfigError, match="one platform at a time"):
        load_into_engine(two, {}, run)


SITE_KEY = "/etc/apt/keyrings/site.gpg"


def _make(run: RunProgram) -> tuple[Sequence[str], Mapping[str, str]]:
    started: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def execute(command: Sequence[str], *, env: Mapping[str, str], **_: object) -> Finished:
        started.append((command, env))
        return Finished(0, "")

    make_rootfs(RootfsRecipe("trixie", AMD64, (SOURCE,)), Path("/tmp/x/root.tar"), run, execute, lambda _: None)
    return started[0]


def test_the_file_system_is_minimal_and_reproducible() -> None:
    command, env = _make(lambda *command: "")
    line = f"deb [signed-by={KEYRING}] http://archive.example/debian trixie main"
    assert command[-3:] == ("trixie", "/tmp/x/root.tar", line)
    assert {"--variant=minbase", "--architectures=amd64"} <= set(command)
    assert not [word for word in command if word.startswith("--include")]
    assert "--dpkgopt=path-include=/usr/share/doc/*/copyright" in command
    assert (env["SOURCE_DATE_EPOCH"], env["TMPDIR"]) == (EPOCH, "/tmp/x")


def test_an_archive_behind_https_needs_certificates_and_a_private_one_its_key() -> None:
    source = replace(SOURCE, uri="https://archive.example/debian", signed_by=SITE_KEY)
    command = RootfsRecipe("trixie", AMD64, (source,)).command("root", "x.tar")
    assert "--include=ca-certificates" in command
    assert f'--setup-hook=install -D -m 644 {SITE_KEY} "$1"{SITE_KEY}' in command


@pytest.mark.parametrize(
    ("key", "signed_by"),
    [
        (None, KEYRING),
        (KEYRING.replace("keyring.gpg", "trixie-automatic.pgp"), KEYRING),
        ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n abc", KEYRING),
        (SITE_KEY, SITE_KEY),
    ],
)
def test_every_source_names_a_key_that_the_image_has(key: str | None, signed_by: str) -> None:
    assert signed_source(replace(SOURCE, signed_by=key)) == replace(SOURCE, signed_by=signed_by)


def test_a_password_does_not_get_into_an_image() -> None:
    with pytest.raises(ConfigError, match="has a password in its address") as error:
        signed_source(replace(SOURCE, uri="http://user:geheim@archive.example/debian"))
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(("uid", "mode", "contained"), [(0, "root", True), (1000, "unshare", False)])
def test_who_runs_it_decides_on_the_mode(monkeypatch: pytest.MonkeyPatch, uid: int, mode: str, contained: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    command = _make(lambda *command: "")[0]
    assert f"--mode={mode}" in command
    assert command[:3] == DIE_WITH_US
    assert ("--kill-child" in command) == contained


def test_a_root_without_namespaces_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str, **options: object) -> str:
        raise CommandError("Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert _make(run)[0][:4] == (*DIE_WITH_US, "mmdebstrap")


def test_a_missing_mmdebstrap_is_installed_by_root(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Sequence[str]] = []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(private, "install", lambda packages, run: installed.append(packages))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ensure_mmdebstrap(lambda *command: "", lambda _: None)
    assert installed == [PACKAGES]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandError, match="as root: apt-get install mmdebstrap"):
        ensure_mmdebstrap(lambda *command: "", lambda _: None)
