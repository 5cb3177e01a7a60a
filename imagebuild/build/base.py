"""Bootstrap a base image from the distribution's signed archive, for builds without a registry."""

import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from imagebuild.build import private
from imagebuild.core import debian, files
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.run import RunProgram, run_program
from imagebuild.oci import layout
from imagebuild.oci.layout import EPOCH

Log = Callable[[str], None]
Stream = Callable[[Sequence[str], Mapping[str, str], Log], None]
"""Runs a program, handing on its lines; raises CommandError if it fails or is missing."""

ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("mmdebstrap", "debian-archive-keyring", "gpg")
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
class RootfsRecipe:
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


def ensure_mmdebstrap(run: RunProgram, log: Log) -> None:
    """Install mmdebstrap and Debian's keys if they are missing.

    Raises CommandError where that takes another user or distribution, saying what to install.
    """
    if shutil.which("mmdebstrap") and Path(KEYRING).exists():
        return
    if os.geteuid() != 0:
        raise CommandError(f"mmdebstrap is not installed; as root: apt-get install {' '.join(PACKAGES)} uidmap")
    log(f"installing {' '.join(PACKAGES)}")
    private.install(PACKAGES, run)


def make_rootfs(recipe: RootfsRecipe, tar: Path, run: RunProgram, stream: Stream, log: Log) -> None:
    """Write the file system to `tar`; raises CommandError with mmdebstrap's last lines if that fails.

    Scratch space is taken beside `tar`, and apt's own user must be able to get there.
    """
    root = os.geteuid() == 0
    command = recipe.command("root" if root else "unshare", str(tar))
    prefix = (*DIE_WITH_US, *(NAMESPACES if root and _works(run, *NAMESPACES) else ()))
    stream((*prefix, *command), {**ENV, "TMPDIR": str(tar.parent)}, log)


def _works(run: RunProgram, *prefix: str) -> bool:
    """A root that may not make namespaces may not mount either, so then there is nothing to contain."""
    try:
        run(*prefix, "true")
    except CommandError:
        return False
    return True


def stream_rootfs(command: Sequence[str], env: Mapping[str, str], log: Log) -> None:
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


LAYOUT = "layout"
DAY = 86400
KEEP_DAYS = 30
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STATUS, VERSION = "./var/lib/dpkg/status", "./etc/debian_version"


@dataclass(frozen=True)
class BootstrappedBase:
    """An image of one or more platforms; `packages` is platform → name → version of what is installed."""

    layout: Path
    digest: str
    packages: Mapping[str, Mapping[str, str]]

    @property
    def context(self) -> str:
        """What BuildKit takes as a named context."""
        return f"oci-layout://{self.layout}@{self.digest}"


@dataclass(frozen=True)
class BootstrapTools:
    """What touches the machine."""

    sources: Callable[[str], list[str]] = debian.debian_source_lines
    emulate: Callable[[str], object] = private.ensure_emulation
    run: RunProgram = run_program
    stream: Stream = stream_rootfs
    now: Callable[[], float] = time.time


@dataclass(frozen=True)
class _Made:
    """What the cache remembers of a file system."""

    created: float
    manifest: layout.Descriptor
    packages: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        return {"created": self.created, "manifest": self.manifest.to_json(), "packages": dict(self.packages)}

    @classmethod
    def read(cls, path: Path) -> "_Made | None":
        """None when there is no such file, or it is damaged: it is only a cache."""
        try:
            data = json.loads(path.read_bytes())
            manifest = layout.Descriptor.from_json(data["manifest"])
            return cls(float(data["created"]), manifest, dict(data["packages"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None


def bootstrap(
    platforms: Sequence[str],
    cache: Path,
    *,
    release: str = "trixie",
    refresh: bool = False,
    max_age_days: float = 7,
    log: Log = quiet,
    tools: BootstrapTools = BootstrapTools(),
) -> BootstrappedBase:
    """One image of `platforms`; what the cache lacks, or is too old in it, or all with `refresh`, is made.

    Raises ConfigError for a platform it cannot make or a cache it cannot write, CommandError when a program
    fails or is missing.
    """
    sources = tuple(map(signed, tools.sources(release)))
    recipes = [_recipe(release, name, sources) for name in platforms]
    cache = cache.absolute()
    oldest = math.inf if refresh else tools.now() - max_age_days * DAY
    try:
        with _locked(cache, log):
            made = {r.platform: _cached(cache, r, oldest) or _make(cache, r, tools, log) for r in recipes}
            digest = layout.write_index(cache / LAYOUT, [item.manifest for item in made.values()])
            _forget(cache, min(oldest, tools.now() - KEEP_DAYS * DAY))
    except OSError as error:
        raise ConfigError(f"{error.filename or cache}: cannot be written: {error.strerror}") from error
    return BootstrappedBase(cache / LAYOUT, digest, {name: item.packages for name, item in made.items()})


def load(image: BootstrappedBase, environ: Mapping[str, str], run: RunProgram = run_program) -> str:
    """Import the image into an engine with the classic image store; returns what BuildKit takes as a named context.

    Such an engine builds for one platform, its own. Raises ConfigError for more, CommandError if docker fails.
    """
    if len(image.packages) > 1:
        raise ConfigError(
            f"this engine's image store holds one platform at a time, not {' and '.join(image.packages)}; "
            "use --platform local, or enable the containerd image store"
        )
    (platform,) = image.packages
    name = f"imagebuild/base:{image.digest.removeprefix('sha256:')[:16]}"
    try:
        run("docker", "image", "inspect", name, env=environ, timeout=20)
    except CommandError:
        layer = layout.layer_of(image.layout, platform)
        run("docker", "import", "--platform", platform, "--change", f"ENV {PATH}", str(layer), name, env=environ)
    return f"docker-image://{name}"


def _recipe(release: str, name: str, sources: tuple[str, ...]) -> RootfsRecipe:
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"no base can be bootstrapped for platform {name!r}; possible: {known}")
    return RootfsRecipe(release, name, sources)


def _cached(cache: Path, recipe: RootfsRecipe, oldest: float) -> _Made | None:
    made = _Made.read(_record(cache, recipe))
    if not made or made.created < oldest or not layout.is_complete(cache / LAYOUT, made.manifest):
        return None
    return made


def _record(cache: Path, recipe: RootfsRecipe) -> Path:
    """Named after all that decides what is made, so another option or archive is another file."""
    key = repr((recipe.command("", ""), sorted(ENV.items()), settings("", "")))
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _make(cache: Path, recipe: RootfsRecipe, tools: BootstrapTools, log: Log) -> _Made:
    log(f"bootstrapping {recipe.release} for {recipe.platform}")
    ensure_mmdebstrap(tools.run, log)
    tools.emulate(recipe.arch)
    with _scratch(cache) as folder:
        tar = folder / "root.tar"
        make_rootfs(recipe, tar, tools.run, tools.stream, log)
        status, version = _read(tar, STATUS, VERSION)
        about = settings(recipe.release, version.strip())
        manifest = layout.add_image(cache / LAYOUT, tar, recipe.platform, about)
    made = _Made(tools.now(), manifest, installed(status))
    files.write_text(_record(cache, recipe), json.dumps(made.to_json(), indent=2))
    return made


def settings(release: str, version: str) -> layout.ImageSettings:
    """What the image says about itself; no times and places, so that its digest depends on content alone."""
    about = f"Debian {release} (minbase), bootstrapped with mmdebstrap from the signed archive"
    name = "org.opencontainers.image."
    labels = {f"{name}title": f"debian-{release}", f"{name}description": about, f"{name}version": version}
    return layout.ImageSettings(layout.CREATED, (PATH,), ("bash",), labels, about)


def _read(tar: Path, *names: str) -> list[str]:
    """Files of the tar; raises ResultError if one is not there."""
    try:
        with tarfile.open(tar) as archive:
            return [file.read().decode() for name in names if (file := archive.extractfile(name))]
    except (KeyError, OSError, tarfile.TarError) as error:
        raise ResultError(f"mmdebstrap's result could not be read: {error}; is the disk full?") from error


def _forget(cache: Path, before: float) -> None:
    """Drop what was made long ago, and blobs that nothing names; a running build may read those of today."""
    records = {path: made for path in cache.glob("*.json") if (made := _Made.read(path))}
    for path in [path for path, made in records.items() if made.created < before]:
        path.unlink()
        del records[path]
    layout.prune_blobs(cache / LAYOUT, [made.manifest for made in records.values()], older_than=time.time() - DAY)


@contextmanager
def _locked(cache: Path, log: Log) -> Iterator[None]:
    """Only one process at a time makes or removes something in the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another imagebuild that uses the same cache of base images")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """A folder for as long as it takes. Not in the cache, where apt's own user may not be able to get to.

    Those of processes that were killed go too: they used the same cache, and we hold its lock.
    """
    prefix = f"imagebuild-base-{hashlib.sha256(bytes(cache)).hexdigest()[:12]}-"
    for stale in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
