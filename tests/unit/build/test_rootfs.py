import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagebuild.build import (
    DIE_WITH_US,
    KEYRING,
    NAMESPACES,
    PACKAGES,
    RootfsRecipe,
    ensure_mmdebstrap,
    log_nothing,
    make_rootfs,
    private,
    run_logged,
    signed_source,
)
from imagebuild.core import CommandError, ConfigError, RunProgram
from imagebuild.oci import EPOCH

AMD64 = "linux/amd64"
LINE = f"deb [signed-by={KEYRING}] http://archive.example/debian trixie main"


@dataclass(frozen=True)
class Started:
    command: Sequence[str]
    env: Mapping[str, str]


def _make(run: RunProgram) -> Started:
    started: list[Started] = []
    recipe = RootfsRecipe("trixie", AMD64, (LINE,))
    make_rootfs(recipe, Path("/tmp/x/root.tar"), run, lambda *args: started.append(Started(*args[:2])), log_nothing)
    return started[0]


# The command line


def test_the_file_system_is_minimal_and_reproducible() -> None:
    program = _make(lambda *command: "")
    command = program.command
    assert command[-3:] == ("trixie", "/tmp/x/root.tar", LINE)
    assert {"--variant=minbase", "--architectures=amd64"} <= set(command)
    assert not [word for word in command if word.startswith("--include")]
    assert "--dpkgopt=path-include=/usr/share/doc/*/copyright" in command
    assert program.env["SOURCE_DATE_EPOCH"] == EPOCH
    assert program.env["TMPDIR"] == "/tmp/x"


def test_the_host_does_not_show() -> None:
    steps = " ".join(RootfsRecipe("trixie", AMD64, (LINE,)).command("root", "x.tar"))
    assert "rm -f etc/resolv.conf etc/hostname" in steps
    assert "Invoke" not in steps  # a command in apt's configuration would run on the host


def test_an_archive_behind_https_needs_certificates_and_a_private_one_its_key() -> None:
    line = "deb [signed-by=/etc/apt/keyrings/site.gpg] https://archive.example/debian trixie main"
    command = RootfsRecipe("trixie", AMD64, (line,)).command("root", "x.tar")
    assert "--include=ca-certificates" in command
    key = "/etc/apt/keyrings/site.gpg"
    assert f'--setup-hook=install -D -m 644 {key} "$1"{key}' in command


@pytest.mark.parametrize(
    "line",
    [
        "deb http://archive.example/debian trixie main",
        LINE,
        LINE.replace("keyring.gpg", "trixie-automatic.pgp"),
    ],
)
def test_every_source_names_a_key_that_the_image_has(line: str) -> None:
    assert signed_source(line) == LINE


def test_no_source_is_trusted_without_a_signature() -> None:
    assert signed_source(LINE.replace("[", "[trusted=yes ")) == LINE


def test_a_site_keeps_its_own_key() -> None:
    line = LINE.replace(KEYRING, "/etc/apt/keyrings/site.gpg")
    assert signed_source(line) == line


def test_a_password_does_not_get_into_an_image() -> None:
    with pytest.raises(ConfigError, match="has a password in its address") as error:
        signed_source("deb http://user:geheim@archive.example/debian trixie main")
    assert "geheim" not in str(error.value)


# The program


@pytest.mark.parametrize(("uid", "mode", "contained"), [(0, "root", True), (1000, "unshare", False)])
def test_who_runs_it_decides_on_the_mode(monkeypatch: pytest.MonkeyPatch, uid: int, mode: str, contained: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    command = _make(lambda *command: "").command
    assert f"--mode={mode}" in command
    assert command[:3] == DIE_WITH_US
    assert ("--kill-child" in command) == contained


def test_a_root_without_namespaces_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str, **options: object) -> str:
        raise CommandError("Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert _make(run).command[:4] == (*DIE_WITH_US, "mmdebstrap")


def test_a_missing_mmdebstrap_is_installed_by_root(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Sequence[str]] = []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(private, "install", lambda packages, run: installed.append(packages))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ensure_mmdebstrap(lambda *command: "", log_nothing)
    assert installed == [PACKAGES]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandError, match="as root: apt-get install mmdebstrap"):
        ensure_mmdebstrap(lambda *command: "", log_nothing)


class Process:
    """A program that prints `lines` and ends with `code`."""

    pid = 4711

    def __init__(self, lines: Sequence[str], code: int) -> None:
        self.stdout, self.code, self.waits = iter(lines), code, 0

    def wait(self) -> int:
        return self.code

    def communicate(self, timeout: float) -> None:
        self.waits += 1
        if self.waits == 1:
            raise subprocess.TimeoutExpired("mmdebstrap", timeout)


def _start(monkeypatch: pytest.MonkeyPatch, lines: Sequence[str], code: int) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: Process(lines, code))


def test_a_failure_shows_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _start(monkeypatch, [f"line {n}\n" for n in range(100)], 1)
    with pytest.raises(CommandError) as error:
        run_logged([*DIE_WITH_US, *NAMESPACES, "mmdebstrap", "--mode=root"], {}, log_nothing)
    assert str(error.value).splitlines()[0] == "mmdebstrap failed (1):"
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [f"line {n}" for n in range(85, 100)]


def test_an_interrupted_program_is_ended_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, order: sent.append((group, order)))
    _start(monkeypatch, ["I: extracting archives...\n"], 0)

    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_logged(["mmdebstrap"], {}, interrupt)
    assert sent == [(4711, signal.SIGTERM), (4711, signal.SIGKILL)]


def test_a_program_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_command: object, **_options: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess, "Popen", missing)
    with pytest.raises(CommandError, match="`setpriv` cannot be run: No such file"):
        run_logged([*DIE_WITH_US, "mmdebstrap"], {}, log_nothing)
