"""Bootstrap base images: make them with mmdebstrap from the distribution's signed archive, without a registry."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from imagebuild.build import private
from imagebuild.core import debian
from imagebuild.core.debian import AptSource
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.patterns import data_of
from imagebuild.core.run import execute, run_program
from imagebuild.oci import layout
from imagebuild.oci.layout import EPOCH

Log = Callable[[str], None]

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("mmdebstrap", "debian-archive-keyring", "gpg")
DATA = data_of(__file__)
ENV = {"SOURCE_DATE_EPOCH": EPOCH, "TAR_OPTIONS": DATA["tar-options"], "LC_ALL": "C.UTF-8"}
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VERSION = "./etc/debian_version"
DAY, RENEW_DAYS, KEEP_DAYS = 86400, 7, 30
"""Seconds in a day; age in days at which a cached base image is made again; age in days at which it is deleted."""
DIE_WITH_US: tuple[str, ...] = ("setpriv", "--pdeathsig", "KILL")


def rootfs_command(
    release: str, arch: str, sources: Sequence[AptSource], mode: str = "", tar: str = ""
) -> tuple[str, ...]:
    """Return the mmdebstrap command that writes a root file system to `tar`.

    `mode` is `root` or `unshare`, which uses a user namespace. `sources` are the apt sources, as `signed_source`
    returns them; if they are empty, mmdebstrap uses its default sources for the release."""
    https = any(source.uri.startswith("https:") for source in sources)
    keys = sorted({source.signed_by or KEYRING for source in sources} - {KEYRING})
    return (
        "mmdebstrap",
        f"--mode={mode}",
        "--variant=minbase",
        f"--architectures={arch}",
        # Skip device nodes, which the container runtime makes, and the check of emulation, which needs arch-test.
        "--skip=output/dev,check/qemu",
        *(("--include=ca-certificates",) if https else ()),
        *(f"--dpkgopt={option}" for option in DATA["dpkg-options"]),
        # Copy keys other than Debian's to the path that the apt sources name.
        *(f'--setup-hook=install -D -m 644 {shlex.quote(key)} "$1"{shlex.quote(key)}' for key in keys),
        *(f"--customize-hook={command}" for command in DATA["customize"]),
        release,
        tar,
        *debian.as_oneline(sources).splitlines(),
    )


def signed_source(source: AptSource) -> AptSource:
    """Return the apt source with the path of a key that also exists in the image.
    Raises ConfigError if the address of the source contains a password, because the password would be in the image."""
    if "@" in urlsplit(source.uri).netloc:
        raise ConfigError(
            "an apt source of this machine contains a password, which everyone could read in the image; "
            "use an archive that needs no password"
        )
    key = source.signed_by or KEYRING
    own = "\n" not in key and not Path(key).name.startswith("debian-archive-")  # `key` can also be the text of a key
    return replace(source, signed_by=key if own else KEYRING)


def ensure_mmdebstrap(log: Log) -> None:
    """Install mmdebstrap and Debian's keys if they are missing. Raises CommandError if apt fails or root is needed."""
    if shutil.which("mmdebstrap") and Path(KEYRING).exists():
        return
    if os.geteuid() != 0:
        raise CommandError(f"mmdebstrap is not installed; run as root: apt-get install {' '.join(PACKAGES)} uidmap")
    log(f"installing {' '.join(PACKAGES)}")
    private.install(PACKAGES, run_program)


def make_rootfs(release: str, arch: str, sources: Sequence[AptSource], tar: Path, log: Log) -> None:
    """Write a root file system to the file `tar`.

    If mmdebstrap fails, raises CommandError with the end of its output. Temporary files are written to the folder of
    `tar`, which the user `_apt` must be able to enter."""
    mode, prefix = "unshare", DIE_WITH_US
    if os.geteuid() == 0:
        mode = "root"
        with suppress(CommandError):  # if root cannot make namespaces, root cannot mount anything either
            run_program(*private.NAMESPACES, "true")
            prefix += private.NAMESPACES
    command = (*prefix, *rootfs_command(release, arch, sources, mode, str(tar)))
    done = execute(command, each_line=log, env={**ENV, "TMPDIR": str(tar.parent)})
    if done.status != 0:
        raise CommandError(
            "\n  ".join([f"mmdebstrap failed with exit status {done.status}:", *done.output.splitlines()[-15:]])
        )


def bootstrap(platforms: Sequence[str], cache: Path, *, release: str = "trixie", log: Log = lambda _line: None) -> str:
    """Return a base image for all `platforms`, as an address for BuildKit: `oci-layout://FOLDER@DIGEST`.

    The image is taken from the cache if it is less than a week old; otherwise the image is bootstrapped. Raises
    ConfigError if the cache cannot be written, CommandError if a program fails or is missing."""
    sources = tuple(map(signed_source, debian.debian_sources(release)))
    archs = sorted(platform.removeprefix("linux/") for platform in platforms)
    # The cache key contains everything that the base image depends on, such as options and the archive.
    commands = [rootfs_command(release, arch, sources) for arch in archs]
    key = repr((commands, sorted(ENV.items()), image_config("", "", "")))
    place = cache.absolute() / f"{release}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        # If several processes want the image at the same time, only one bootstraps it.
        with private.alone(place):
            # The name of a layout's folder is the digest of the image. Damaged layouts are not used.
            whole = layout.layouts_in(place)
            made = max(whole, key=lambda path: path.stat().st_mtime, default=None)
            if not made or made.stat().st_mtime < time.time() - RENEW_DAYS * DAY:
                made = _make(place, archs, release, sources, log)
        for path in cache.glob("*/*"):
            if path.stat().st_mtime < time.time() - KEEP_DAYS * DAY:
                shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{error.filename or cache}: cannot be written: {error.strerror}") from error
    return f"oci-layout://{made}@sha256:{made.name}"


def _make(place: Path, archs: Sequence[str], release: str, sources: Sequence[AptSource], log: Log) -> Path:
    """Bootstrap a root file system for each architecture.
    Return the folder of an OCI layout with the multi-platform image."""
    ensure_mmdebstrap(log)
    # A temporary folder, because the user `_apt` may not be able to enter the cache folder.
    with tempfile.TemporaryDirectory(prefix="imagebuild-base-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        image, manifests = layout.Layout(folder / "layout"), []
        for arch in archs:
            log(f"bootstrapping {release} for linux/{arch}")
            private.ensure_emulation(arch)
            make_rootfs(release, arch, sources, tar := folder / "root.tar", log)
            try:
                with tarfile.open(tar) as archive, cast(IO[bytes], archive.extractfile(VERSION)) as file:
                    config = image_config(release, arch, file.read().decode().strip())
            except (KeyError, ValueError, OSError, tarfile.TarError) as error:
                raise ResultError(
                    f"{VERSION} cannot be read from mmdebstrap's output: {error}; check that the disk is not full"
                ) from error
            manifests.append(image.add_image(tar, config))
        digest = image.write_index(manifests)
        made = place / digest.removeprefix("sha256:")
        shutil.copytree(image.folder, made, dirs_exist_ok=True)
    os.utime(made)  # so that an identical layout from an earlier week also counts as new
    return made


def image_config(release: str, arch: str, version: str) -> dict[str, Any]:
    """Return the image's configuration, without build times and paths, so that its digest depends only on content."""
    description = f"Debian {release} (minbase), bootstrapped with mmdebstrap from the signed archive"
    name = "org.opencontainers.image."
    labels = {f"{name}description": description, f"{name}title": f"debian-{release}", f"{name}version": version}
    return {
        "created": layout.CREATED,
        "os": "linux",
        "architecture": arch,
        "config": {"Env": [PATH], "Cmd": ["bash"], "Labels": labels},
        "history": [{"created": layout.CREATED, "created_by": description}],
    }
