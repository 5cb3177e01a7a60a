"""Bootstrap a base image from the distribution's signed archive, for builds without a registry."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast, get_args
from urllib.parse import urlsplit

from imagebuild import oci
from imagebuild.build import private
from imagebuild.core import debian, files
from imagebuild.core.debian import AptSource
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Model, Platform
from imagebuild.core.run import Finished, RunProgram, execute, run_program
from imagebuild.oci import layout
from imagebuild.oci.layout import EPOCH

Log = Callable[[str], None]
Execute = Callable[..., Finished]
"""Function that runs a program as `core.run.execute` does."""
LAST_LINES = 15
"""Lines of mmdebstrap's output that are shown if it fails."""

PLATFORMS: tuple[Platform, ...] = get_args(Platform)
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("mmdebstrap", "debian-archive-keyring", "gpg")
# apt makes these folders by itself; made here, they would belong to the user that the host's apt runs as.
TAR_OPTIONS = "--exclude=./var/lib/apt/lists/partial --exclude=./var/cache/apt/archives/partial"
ENV = {"SOURCE_DATE_EPOCH": EPOCH, "TAR_OPTIONS": TAR_OPTIONS, "LC_ALL": "C.UTF-8"}

# As in official slim images: documentation is left out, licences stay.
DPKG_OPTIONS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
)
# As in official images, downloads are not kept. The configuration must not name a command: the host's apt reads it,
# too, and would run the command on the host.
CUSTOMIZE_COMMANDS = (
    'cd "$1" && rm -f etc/resolv.conf etc/hostname etc/*- var/cache/debconf/*-old var/lib/dpkg/*-old',
    ': > "$1"/etc/machine-id && find "$1"/var/log -type f -delete',
    """echo 'Acquire::Languages "none";' > "$1"/etc/apt/apt.conf.d/docker-no-languages""",
    """echo 'APT::Keep-Downloaded-Packages "false";' > "$1"/etc/apt/apt.conf.d/docker-clean""",
)
# Mounts and processes are in namespaces that end with their first process, which ends with this one.
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class RootfsRecipe:
    """Hold all that decides what a root file system has, besides the state of the archive."""

    release: str
    platform: str
    sources: tuple[AptSource, ...]
    """As `signed_source` returns them; if empty, mmdebstrap's default for the release."""

    @property
    def arch(self) -> str:
        """Return Debian's name of the architecture."""
        return self.platform.rpartition("/")[2]

    def command(self, mode: str, tar: str) -> tuple[str, ...]:
        """Return the command line of mmdebstrap."""
        https = any(source.uri.startswith("https:") for source in self.sources)
        keys = sorted({source.signed_by or KEYRING for source in self.sources} - {KEYRING})
        return (
            "mmdebstrap",
            f"--mode={mode}",
            "--variant=minbase",
            f"--architectures={self.arch}",
            # The container runtime makes device nodes; emulation is set up already, without the arch-test package.
            "--skip=output/dev,check/qemu",
            *(("--include=ca-certificates",) if https else ()),
            *(f"--dpkgopt={option}" for option in DPKG_OPTIONS),
            # A key of the site's own is put where its sources expect it.
            *(f'--setup-hook=install -D -m 644 {shlex.quote(key)} "$1"{shlex.quote(key)}' for key in keys),
            *(f"--customize-hook={command}" for command in CUSTOMIZE_COMMANDS),
            self.release,
            tar,
            *debian.as_oneline(self.sources).splitlines(),
        )


def signed_source(source: AptSource) -> AptSource:
    """Return a source whose key exists in the image, too.

    Raises ConfigError if its address holds a password, which would be published with the image.
    """
    if "@" in urlsplit(source.uri).netloc:
        raise ConfigError("an apt source of this machine has a password in its address; use an archive that needs none")
    key = source.signed_by or KEYRING
    own = "\n" not in key and not Path(key).name.startswith("debian-archive-")  # not the text of a key
    return replace(source, signed_by=key if own else KEYRING)


def ensure_mmdebstrap(run: RunProgram, log: Log) -> None:
    """Install mmdebstrap and Debian's keys if they are missing.

    Raises CommandError, which says what to install, if this user or distribution cannot install packages.
    """
    if shutil.which("mmdebstrap") and Path(KEYRING).exists():
        return
    if os.geteuid() != 0:
        raise CommandError(f"mmdebstrap is not installed; as root: apt-get install {' '.join(PACKAGES)} uidmap")
    log(f"installing {' '.join(PACKAGES)}")
    private.install(PACKAGES, run)


def make_rootfs(recipe: RootfsRecipe, tar: Path, run: RunProgram, execute: Execute, log: Log) -> None:
    """Write the file system to `tar`; raise CommandError with mmdebstrap's last lines if that fails.

    Scratch space is taken beside `tar`, and apt's own user must be able to get there.
    """
    root = os.geteuid() == 0
    prefix: tuple[str, ...] = DIE_WITH_US
    if root:
        with suppress(CommandError):  # a root that may not make namespaces may not mount either: nothing to contain
            run(*NAMESPACES, "true")
            prefix = (*DIE_WITH_US, *NAMESPACES)
    command = recipe.command("root" if root else "unshare", str(tar))
    done = execute((*prefix, *command), each_line=log, env={**ENV, "TMPDIR": str(tar.parent)})
    if done.status != 0:
        lines = done.output.splitlines()[-LAST_LINES:]
        raise CommandError("\n  ".join([f"mmdebstrap failed ({done.problem or done.status}):", *lines]))


LAYOUT = "layout"
DAY = 86400
"""Seconds."""
RENEW_DAYS = 7
KEEP_DAYS = 30
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VERSION = "./etc/debian_version"


@dataclass(frozen=True)
class BootstrappedBase:
    """Identify a bootstrapped image for one or more platforms."""

    layout: Path
    digest: str
    platforms: tuple[str, ...]

    @property
    def context(self) -> str:
        """Return what BuildKit takes as a named context."""
        return f"oci-layout://{self.layout}@{self.digest}"


@dataclass(frozen=True)
class BootstrapTools:
    """Hold the functions that touch the machine, so that tests can replace them."""

    sources: Callable[[str], tuple[AptSource, ...]] = debian.debian_sources
    emulate: Callable[[str], object] = private.ensure_emulation
    run: RunProgram = run_program
    execute: Execute = execute
    now: Callable[[], float] = time.time


class CachedRootfs(Model):
    """Describe a file system in the cache."""

    created: float
    """Seconds since 1970."""
    manifest: layout.Descriptor

    @classmethod
    def read(cls, path: Path) -> CachedRootfs | None:
        """Read a record; None if there is no such file, or it is damaged: it is only a cache."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None


def bootstrap(
    platforms: Sequence[str],
    cache: Path,
    *,
    release: str = "trixie",
    log: Log = lambda _line: None,
    tools: BootstrapTools = BootstrapTools(),
) -> BootstrappedBase:
    """Return one image of `platforms`; bootstrap those that the cache lacks, or has from more than RENEW_DAYS ago.

    Raises ConfigError for a platform that cannot be made or a cache that cannot be written, CommandError when a program
    fails or is missing.
    """
    sources = tuple(map(signed_source, tools.sources(release)))
    if unknown := [name for name in platforms if name not in PLATFORMS]:
        known = ", ".join(PLATFORMS)
        raise ConfigError(f"no base can be bootstrapped for platform {unknown[0]!r}; possible: {known}")
    recipes = [RootfsRecipe(release, name, sources) for name in platforms]
    cache = cache.absolute()
    oldest = tools.now() - RENEW_DAYS * DAY
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Only one process at a time adds to the cache or removes from it.
        with private.alone(cache, lambda: log("waiting for another imagebuild that uses the same cache of bases")):
            manifests = [_cached(cache, recipe, oldest) or _make(cache, recipe, tools, log) for recipe in recipes]
            digest = layout.Layout(cache / LAYOUT).write_index(manifests)
            _forget(cache, tools.now() - KEEP_DAYS * DAY)
    except OSError as error:
        raise ConfigError(f"{error.filename or cache}: cannot be written: {error.strerror}") from error
    return BootstrappedBase(cache / LAYOUT, digest, tuple(platforms))


def load_into_engine(image: BootstrappedBase, environ: Mapping[str, str], run: RunProgram = run_program) -> str:
    """Import the image into an engine with the classic image store; return what BuildKit takes as a named context.

    Such an engine builds for its own platform only. Raises ConfigError for more, CommandError if docker fails.
    """
    if len(image.platforms) > 1:
        raise ConfigError(
            f"this engine's image store holds one platform at a time, not {' and '.join(image.platforms)}; "
            "use --platform local, or enable the containerd image store"
        )
    (platform,) = image.platforms
    name = f"imagebuild/base:{image.digest.removeprefix('sha256:')[:16]}"
    try:
        run("docker", "image", "inspect", name, env=environ, timeout=20)
    except CommandError:
        (layer,) = (i.layers[0].file for i in oci.images_in(image.layout, image.layout) if i.platform == platform)
        run("docker", "import", "--platform", platform, "--change", f"ENV {PATH}", str(layer), name, env=environ)
    return f"docker-image://{name}"


def _cached(cache: Path, recipe: RootfsRecipe, oldest: float) -> layout.Descriptor | None:
    """Return the image of a file system that is complete and not older than `oldest`."""
    record = CachedRootfs.read(_record_path(cache, recipe))
    if not record or record.created < oldest:
        return None
    manifest = record.manifest
    return manifest if layout.Layout(cache / LAYOUT).has(manifest.digest, manifest.size) else None


def _record_path(cache: Path, recipe: RootfsRecipe) -> Path:
    """Return a path whose name depends on all that decides what is made, such as options and the archive."""
    key = repr((recipe.command("", ""), sorted(ENV.items()), image_settings("", "")))
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _make(cache: Path, recipe: RootfsRecipe, tools: BootstrapTools, log: Log) -> layout.Descriptor:
    """Bootstrap a file system, and add it to the cache as an image."""
    log(f"bootstrapping {recipe.release} for {recipe.platform}")
    ensure_mmdebstrap(tools.run, log)
    tools.emulate(recipe.arch)
    with _scratch(cache) as folder:
        tar = folder / "root.tar"
        make_rootfs(recipe, tar, tools.run, tools.execute, log)
        try:
            with tarfile.open(tar) as archive, cast(IO[bytes], archive.extractfile(VERSION)) as file:
                version = file.read().decode().strip()
        except (KeyError, ValueError, OSError, tarfile.TarError) as error:
            raise ResultError(f"mmdebstrap's result could not be read: {error}; is the disk full?") from error
        image = image_settings(recipe.release, version)
        manifest = layout.Layout(cache / LAYOUT).add_image(tar, recipe.platform, image)
    record = CachedRootfs(created=tools.now(), manifest=manifest)
    files.write_text(_record_path(cache, recipe), record.model_dump_json(indent=1))
    return manifest


def image_settings(release: str, version: str) -> layout.ImageSettings:
    """Return the image's configuration, without times and places, so that its digest depends on content alone."""
    description = f"Debian {release} (minbase), bootstrapped with mmdebstrap from the signed archive"
    name = "org.opencontainers.image."
    labels = {f"{name}title": f"debian-{release}", f"{name}description": description, f"{name}version": version}
    return layout.ImageSettings(layout.CREATED, (PATH,), ("bash",), labels, description)


def _forget(cache: Path, before: float) -> None:
    """Remove records older than `before`, and blobs that no record names, unless a running build may read them."""
    records = {path: record for path in cache.glob("*.json") if (record := CachedRootfs.read(path))}
    for path in [path for path, record in records.items() if record.created < before]:
        path.unlink()
        del records[path]
    manifests = [record.manifest for record in records.values()]
    layout.Layout(cache / LAYOUT).prune(manifests, older_than=time.time() - DAY)


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """Provide a temporary folder; not in the cache, as apt's own user may not be able to get there.

    Folders of processes that were killed are removed, too: they used the same cache, and we hold its lock.
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
