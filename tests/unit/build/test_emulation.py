from pathlib import Path

import pytest

from imagebuild.build import ensure_emulation, private
from imagebuild.core import ConfigError, RunProgram
from tests.unit.conftest import Runner

CONF = r":qemu-aarch64:M::\x7f\x45:\xff\xff:/usr/libexec/qemu-binfmt/aarch64-binfmt-P:"


@pytest.fixture
def binfmt(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    folder = machine / "binfmt"
    folder.mkdir()
    (folder / "register").touch()
    return folder


def test_native_and_already_emulated_need_nothing(binfmt: Path) -> None:
    assert ensure_emulation("amd64", Runner({}), binfmt=binfmt) is False
    (binfmt / "qemu-aarch64").write_text("enabled\ninterpreter /x\nflags: POF\n")
    assert ensure_emulation("arm64", Runner({}), binfmt=binfmt) is True


@pytest.mark.parametrize("flags", ["OP", "OPF"])
def test_emulation_is_registered_with_a_held_interpreter(machine: Path, binfmt: Path, flags: str) -> None:
    (machine / "qemu-aarch64.conf").write_text(f"# qemu\n{CONF}{flags}\n")
    assert ensure_emulation("arm64", Runner({}), binfmt=binfmt) is True
    assert (binfmt / "register").read_text() == f"{CONF}OPF"


def test_emulation_installs_the_emulator(machine: Path, binfmt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(packages: list[str], run: RunProgram) -> None:
        assert packages == ["qemu-user-static"]
        (machine / "qemu-aarch64.conf").write_text(f"{CONF}OPF\n")

    monkeypatch.setattr(private, "install", install)
    (binfmt / "qemu-aarch64").write_text("enabled\nflags: PO\n")
    assert ensure_emulation("arm64", Runner({}), binfmt=binfmt) is True
    assert (binfmt / "qemu-aarch64").read_text() == "-1"


def test_emulation_refusals(binfmt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'riscv64' is unknown"):
        ensure_emulation("riscv64", Runner({}), binfmt=binfmt)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="emulation of arm64 needs root"):
        ensure_emulation("arm64", Runner({}), binfmt=binfmt)
