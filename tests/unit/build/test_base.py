import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from imagebuild.build import base, private
from imagebuild.core import debian
from imagebuild.core.debian import AptSource
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.run import Finished
from imagebuild.oci.image import images_in
from imagebuild.oci.layout import Layout
from tests.unit.image_files import layer

AMD64, ARM64 = "linux/amd64", "linux/arm64"
SOURCE = AptSource("http://archive.example/debian", "trixie", ("main",), base.KEYRING)


@dataclass
class Machine:
    """A substitute for the programs that make a base image, which can also change the age of files in the cache."""

    cache: Path
    version: str = "13.1"
    """Debian version of the next base; empty for an incomplete base."""
    failure: BaseException | None = None
    commands: list[Sequence[str]] = field(default_factory=list)
    emulated: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def execute(self, command: Sequence[str], *, each_line: Callable[[str], object], env: object) -> Finished:
        self.commands.append(command)
        each_line("I: running")
        tar = Path(next(word for word in command if word.endswith("root.tar")))
        (tar.parent / "mmdebstrap.1234").mkdir(exist_ok=True)
        if self.failure:
            raise self.failure
        tar.write_bytes(layer({base.VERSION: f"{self.version}\n".encode()} if self.version else {}))
        return Finished(0, "")

    def bootstrap(self, *platforms: str, release: str = "trixie") -> str:
        return base.bootstrap(platforms, self.cache, release=release, log=self.lines.append)

    def age(self, days: int) -> None:
        """Make everything in the cache older."""
        for path in self.cache.glob("*/*"):
            then = path.stat().st_mtime - days * base.DAY
            os.utime(path, (then, then))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "cache")
    monkeypatch.setattr(base, "ensure_mmdebstrap", lambda log: None)
    monkeypatch.setattr(base, "execute", made.execute)
    monkeypatch.setattr(base, "run_program", lambda *command: "")
    monkeypatch.setattr(debian, "debian_sources", lambda release: (SOURCE,))
    monkeypatch.setattr(private, "ensure_emulation", made.emulated.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return made


def test_one_image_of_all_platforms(machine: Machine, tmp_path: Path) -> None:
    machine.bootstrap(ARM64, AMD64)
    (layout,) = machine.cache.glob("*/*")
    assert [item.platform for item in images_in(layout, tmp_path)] == [AMD64, ARM64]
    assert machine.emulated == ["amd64", "arm64"]  # does nothing for the native architecture
    assert machine.lines[:2] == ["bootstrapping trixie for linux/amd64", "I: running"]


def test_a_base_is_used_for_a_week_and_the_same_packages_make_the_same(machine: Machine, tmp_path: Path) -> None:
    first = machine.bootstrap(AMD64)
    assert machine.bootstrap(AMD64) == first
    assert len(machine.commands) == 1
    machine.age(8)
    assert machine.bootstrap(AMD64) == first
    assert len(machine.commands) == 2
    (layout,) = machine.cache.glob("*/*")
    Layout(layout).path(images_in(layout, tmp_path)[0].digest).write_bytes(b"")  # a damaged base
    assert machine.bootstrap(AMD64) == first
    assert len(machine.commands) == 3
    # Bases that were not used for a month are deleted.
    machine.bootstrap(AMD64, release="bookworm")
    machine.age(31)
    machine.version = "13.2"
    last = machine.bootstrap(AMD64)
    assert [f"oci-layout://{path}@sha256:{path.name}" for path in machine.cache.glob("*/*")] == [last]


@pytest.mark.parametrize("failure", [CommandError("mmdebstrap failed"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(machine: Machine, tmp_path: Path, failure: BaseException) -> None:
    machine.failure = failure
    with pytest.raises(type(failure)):
        machine.bootstrap(AMD64)
    assert list((tmp_path / "cache").glob("*/*")) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_cannot_be_made_is_reported(machine: Machine, tmp_path: Path) -> None:
    machine.version = ""
    with pytest.raises(ResultError, match="check that the disk is not full"):
        machine.bootstrap(AMD64)
    machine.cache = tmp_path / "file"
    machine.cache.write_text("")
    with pytest.raises(ConfigError, match=r"file.*: cannot be written"):
        machine.bootstrap(AMD64)


SITE_KEY = "/etc/apt/keyrings/site.gpg"


def test_the_file_system_is_minimal_but_for_certificates_and_the_archives_key() -> None:
    command = base.rootfs_command("trixie", "amd64", [SOURCE], "root", "x.tar")
    line = f"deb [signed-by={base.KEYRING}] http://archive.example/debian trixie main"
    assert command[-3:] == ("trixie", "x.tar", line)
    assert {"--mode=root", "--variant=minbase", "--architectures=amd64"} <= set(command)
    source = replace(SOURCE, uri="https://archive.example/debian", signed_by=SITE_KEY)
    more = set(base.rootfs_command("trixie", "amd64", [source], "root", "x.tar")) - set(command)
    hook = f'--setup-hook=install -D -m 644 {SITE_KEY} "$1"{SITE_KEY}'
    assert more == {"--include=ca-certificates", hook, f"deb [signed-by={SITE_KEY}] {source.uri} trixie main"}


def test_every_source_names_a_key_that_the_image_has_and_no_password() -> None:
    for key, signed_by in {
        None: base.KEYRING, base.KEYRING.replace("keyring.gpg", "trixie-automatic.pgp"): base.KEYRING,
        "-----BEGIN PGP PUBLIC KEY BLOCK-----\n abc": base.KEYRING, SITE_KEY: SITE_KEY,
    }.items():  # fmt: skip
        assert base.signed_source(replace(SOURCE, signed_by=key)) == replace(SOURCE, signed_by=signed_by)
    with pytest.raises(ConfigError, match="contains a password, which everyone could read in the image") as error:
        base.signed_source(replace(SOURCE, uri="http://user:geheim@archive.example/debian"))
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(("uid", "began"), [(0, "unshare"), (1000, "mmdebstrap")])
def test_root_is_contained(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, began: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    base.make_rootfs("trixie", "amd64", [SOURCE], tmp_path / "root.tar", print)
    assert machine.commands[0][:4] == (*base.DIE_WITH_US, began)
    assert f"--mode={'unshare' if uid else 'root'}" in machine.commands[0]


def test_a_missing_mmdebstrap_is_installed_by_root(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Sequence[str]] = []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(private, "install", lambda packages, run: installed.append(packages))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    base.ensure_mmdebstrap(print)
    assert installed == [base.PACKAGES]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandError, match="as root: apt-get install mmdebstrap"):
        base.ensure_mmdebstrap(print)
