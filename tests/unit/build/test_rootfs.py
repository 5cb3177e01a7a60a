import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.build import (
    DIE_WITH_US,
    KEYRING,
    PACKAGES,
    RootfsRecipe,
    ensure_mmdebstrap,
    log_nothing,
    make_rootfs,
    private,
    signed_source,
)
from imagebuild.core import AptSource, CommandError, ConfigError, RunProgram
from imagebuild.oci import EPOCH

AMD64 = "linux/amd64"
SOURCE = AptSource("http://archive.example/debian", "trixie", ("main",), KEYRING)
SITE_KEY = "/etc/apt/keyrings/site.gpg"


def _make(run: RunProgram) -> tuple[Sequence[str], Mapping[str, str]]:
    started: list[tuple[Sequence[str], Mapping[str, str]]] = []
    make_rootfs(
        RootfsRecipe("trixie", AMD64, (SOURCE,)), Path("/tmp/x/root.tar"), run,
        lambda command, log, name, env: started.append((command, env)), log_nothing,
    )  # fmt: skip
    return started[0]


def test_the_file_system_is_minimal_and_reproducible() -> None:
    command, env = _make(lambda *command: "")
    line = f"deb [signed-by={KEYRING}] http://archive.example/debian trixie main"
    assert command[-3:] == ("trixie", "/tmp/x/root.tar", line)
    assert {"--variant=minbase", "--architectures=amd64"} <= set(command)
    assert not [word for word in command if word.startswith("--include")]
    assert "--dpkgopt=path-include=/usr/share/doc/*/copyright" in command
    assert (env["SOURCE_DATE_EPOCH"], env["TMPDIR"]) == (EPOCH, "/tmp/x")


def test_the_host_does_not_show() -> None:
    steps = " ".join(RootfsRecipe("trixie", AMD64, (SOURCE,)).command("root", "x.tar"))
    assert "rm -f etc/resolv.conf etc/hostname" in steps
    assert "Invoke" not in steps  # a command in apt's configuration would run on the host


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
    ensure_mmdebstrap(lambda *command: "", log_nothing)
    assert installed == [PACKAGES]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandError, match="as root: apt-get install mmdebstrap"):
        ensure_mmdebstrap(lambda *command: "", log_nothing)
