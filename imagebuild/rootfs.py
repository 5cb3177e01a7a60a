"""Make a root file system of Debian with mmdebstrap, from packages whose signatures apt checked.

The same packages give the same tar, on whichever machine. What is run is computed; `stream` is the edge.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from imagebuild import apt
from imagebuild.errors import CommandError, ConfigError

Log = Callable[[str], None]
Stream = Callable[[Sequence[str], Mapping[str, str], Log], None]
"""Runs a program, handing on its lines; raises CommandError if it fails or is missing."""

ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("mmdebstrap", "debian-archive-keyring", "gpg")

# No file is younger than this, so that times do not differ from run to run: the day Debian 13 came out.
EPOCH, CREATED = "1754697600", "2025-08-09T00:00:00Z"
# apt makes these by itself; made here, they would belong to whichever user the host's apt runs as.
OMITTED = "--exclude=./var/lib/apt/lists/partial --exclude=./var/cache/apt/archives/partial"
ENV = {"SOURCE_DATE_EPOCH": EPOCH, "TAR_OPTIONS": OMITTED, "LC_ALL": "C.UTF-8"}

# As in official slim images: licences stay.
LEFT_OUT = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
)
# As in official images, downloads are not kept. apt's configuration must name no command here, because the host's
# apt still reads it, and would run that command on the host.
FINISH = (
    'cd "$1" && rm -f etc/resolv.conf etc/hostname etc/*- var/cache/debconf/*-old var/lib/dpkg/*-old',
    ': > "$1"/etc/machine-id && find "$1"/var/log -type f -delete',
    """echo 'Acquire::Languages "none";' > "$1"/etc/apt/apt.conf.d/docker-no-languages""",
    """echo 'APT::Keep-Downloaded-Packages "false";' > "$1"/etc/apt/apt.conf.d/docker-clean""",
)
# However we end, nothing lives on: mounts and processes are in namespaces that go with the first process.
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def quiet(_line: str) -> None:
    """The `Log` of those who do not want to know."""


@dataclass(frozen=True)
class Recipe:
    """All that decides what a file system holds, besides the state of the archive."""

    release: str
    platform: str
    sources: tuple[str, ...]
    """apt's one-line sources, those of `signed`; without any, mmdebstrap's default for the release."""

    @property
    def arch(self) -> str:
        return ARCHITECTURES[self.platform]

    def command(self, mode: str, tar: str) -> tuple[str, ...]:
        """The command line of mmdebstrap."""
        https = any("https://" in line for line in self.sources)
        keys = sorted(set(re.findall(r"signed-by=([^]\s]+)", " ".join(self.sources))) - {KEYRING})
        return (
            "mmdebstrap",
            f"--mode={mode}",
            "--variant=minbase",
            f"--architectures={self.arch}",
            # Device nodes are the container runtime's; emulation was seen to, without the arch-test package.
            "--skip=output/dev,check/qemu",
            *(("--include=ca-certificates",) if https else ()),
            *(f"--dpkgopt={option}" for option in LEFT_OUT),
            # A site's own key goes where its sources expect it.
            *(f'--setup-hook=install -D -m 644 {shlex.quote(key)} "$1"{shlex.quote(key)}' for key in keys),
            *(f"--customize-hook={step}" for step in FINISH),
            self.release,
            tar,
            *self.sources,
        )


def signed(line: str) -> str:
    """A one-line source with its key, by a path that exists in the image too, and no other option.

    Raises ConfigError if its address holds a password, which would be published with the image.
    """
    if re.search(r"://[^/\s]*@", line):
        raise ConfigError("an apt source of this machine holds a password; use an archive that needs none")
    key = re.search(r"signed-by=([^]\s]+)", line)
    own = key and not Path(key[1]).name.startswith("debian-archive-")
    address = re.sub(r"^deb\s+(\[[^]]*\]\s*)?", "", line)  # among the options may be trusted=yes
    return f"deb [signed-by={key[1] if key and own else KEYRING}] {address}"


def installed(status: str) -> dict[str, str]:
    """Name → version of what dpkg's status file lists as installed."""
    entries = [dict(re.findall(r"^(Package|Version|Status): (.*)$", e, re.M)) for e in status.split("\n\n")]
    return {e["Package"]: e["Version"] for e in entries if e.get("Status", "").endswith(" installed")}


def ensure_mmdebstrap(run: apt.Run, log: Log) -> None:
    """Install mmdebstrap and Debian's keys if they are missing.

    Raises CommandError where that takes another user or distribution, saying what to install.
    """
    if shutil.which("mmdebstrap") and Path(KEYRING).exists():
        return
    if os.geteuid() != 0:
        raise CommandError(f"mmdebstrap is not installed; as root: apt-get install {' '.join(PACKAGES)} uidmap")
    log(f"installing {' '.join(PACKAGES)}")
    apt.install(PACKAGES, run)


def make(recipe: Recipe, tar: Path, run: apt.Run, stream: Stream, log: Log) -> None:
    """Write the file system to `tar`; raises CommandError with mmdebstrap's last lines if that fails.

    Scratch space is taken beside `tar`, and apt's own user must be able to get there.
    """
    root = os.geteuid() == 0
    command = recipe.command("root" if root else "unshare", str(tar))
    prefix = (*DIE_WITH_US, *(NAMESPACES if root and _works(run, *NAMESPACES) else ()))
    stream((*prefix, *command), {**ENV, "TMPDIR": str(tar.parent)}, log)


def _works(run: apt.Run, *prefix: str) -> bool:
    """A root that may not make namespaces may not mount either, so then there is nothing to contain."""
    try:
        run(*prefix, "true")
    except CommandError:
        return False
    return True


def stream(command: Sequence[str], env: Mapping[str, str], log: Log) -> None:
    """The `Stream` of this machine. When interrupted, it ends the program and all that it started."""
    program = next(word for word in command if word not in (*DIE_WITH_US, *NAMESPACES))
    try:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"`{command[0]}` cannot be run: {error.strerror}") from error
    last: deque[str] = deque(maxlen=15)
    try:
        assert process.stdout
        for line in process.stdout:
            last.append(line.rstrip())
            log(last[-1])
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    if code:
        raise CommandError("\n  ".join([f"{program} failed ({code}):", *last]))


def _end(process: "subprocess.Popen[str]") -> None:
    """Let a program tidy up, but not for long."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, order)
            process.communicate(timeout=15)
            return
