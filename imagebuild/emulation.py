"""Running programs of the other architecture, by QEMU's emulators and the kernel's table of them."""

import platform
import re
from pathlib import Path

from imagebuild import apt, programs
from imagebuild.apt import Run
from imagebuild.errors import CommandError, ConfigError

BINFMT = Path("/proc/sys/fs/binfmt_misc")
BINFMT_D = Path("/usr/lib/binfmt.d")
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


def ensure_emulation(arch: str, run: Run = programs.run, *, binfmt: Path = BINFMT) -> bool:
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
    programs.require_root(f"setting up the emulation of {arch}")
    if not (binfmt / "register").exists():
        run("mount", "-t", "binfmt_misc", "binfmt_misc", str(binfmt))
    if not _emulator(machine):
        apt.install(["qemu-user-static"], run)
    if _registered(machine, binfmt):  # by the package, where systemd runs
        return True
    if not (conf := _emulator(machine)):
        raise CommandError(f"qemu-user-static brought no emulator of {arch}: nothing in {BINFMT_D} is for it")
    with programs.plain_errors():
        if (entry := binfmt / f"qemu-{machine}").exists():
            entry.write_text("-1")
        (binfmt / "register").write_text(registration(conf.read_text()))
    return True


def _emulator(machine: str) -> Path | None:
    names = (f"qemu-{machine}.conf", f"qemu-{machine}-static.conf")
    return next((path for name in names if (path := BINFMT_D / name).exists()), None)
