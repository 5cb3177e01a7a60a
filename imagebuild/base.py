"""A base image bootstrapped from the distribution's signed archive, for builds without a registry.

BuildKit takes it in place of an official image, as a named context: `debian:13-slim@sha256:…=oci-layout://…@sha256:…`,
where the left side is spelled exactly as in `FROM`, but for a leading `docker.io/library/`.

What was made is kept in a cache folder, and made anew after a week so that security updates come in. If they
changed nothing, the digest is the same again, and what was built on it stays cached.
"""

import fcntl
import hashlib
import json
import math
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagebuild import apt, emulation, files, oci, programs, rootfs
from imagebuild.errors import CommandError, ConfigError, ResultError
from imagebuild.rootfs import Log, Recipe

LAYOUT = "layout"
DAY = 86400
KEEP_DAYS = 30
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STATUS, VERSION = "./var/lib/dpkg/status", "./etc/debian_version"


@dataclass(frozen=True)
class BaseImage:
    """An image of one or more platforms; `packages` is platform → name → version of what is installed."""

    layout: Path
    digest: str
    packages: Mapping[str, Mapping[str, str]]

    @property
    def context(self) -> str:
        """What BuildKit takes as a named context."""
        return f"oci-layout://{self.layout}@{self.digest}"


@dataclass(frozen=True)
class Tools:
    """What touches the machine."""

    sources: Callable[[str], list[str]] = apt.debian_lines
    emulate: Callable[[str], object] = emulation.ensure_emulation
    run: apt.Run = programs.run
    stream: rootfs.Stream = rootfs.stream
    now: Callable[[], float] = time.time


@dataclass(frozen=True)
class _Made:
    """What the cache remembers of a file system."""

    created: float
    manifest: oci.Descriptor
    packages: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        return {"created": self.created, "manifest": self.manifest.to_json(), "packages": dict(self.packages)}

    @classmethod
    def read(cls, path: Path) -> "_Made | None":
        """None when there is no such file, or it is damaged: it is only a cache."""
        try:
            data = json.loads(path.read_bytes())
            manifest = oci.Descriptor.from_json(data["manifest"])
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
    log: Log = rootfs.quiet,
    tools: Tools = Tools(),
) -> BaseImage:
    """One image of `platforms`; what the cache lacks, or is too old in it, or all with `refresh`, is made.

    Raises ConfigError for a platform it cannot make or a cache it cannot write, CommandError when a program
    fails or is missing.
    """
    sources = tuple(map(rootfs.signed, tools.sources(release)))
    recipes = [_recipe(release, name, sources) for name in platforms]
    cache = cache.absolute()
    oldest = math.inf if refresh else tools.now() - max_age_days * DAY
    try:
        with _locked(cache, log):
            made = {r.platform: _cached(cache, r, oldest) or _make(cache, r, tools, log) for r in recipes}
            digest = oci.write_index(cache / LAYOUT, [item.manifest for item in made.values()])
            _forget(cache, min(oldest, tools.now() - KEEP_DAYS * DAY))
    except OSError as error:
        raise ConfigError(f"{error.filename or cache}: cannot be written: {error.strerror}") from error
    return BaseImage(cache / LAYOUT, digest, {name: item.packages for name, item in made.items()})


def load(image: BaseImage, environ: Mapping[str, str], run: apt.Run = programs.run) -> str:
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
        layer = oci.layer_of(image.layout, platform)
        run("docker", "import", "--platform", platform, "--change", f"ENV {PATH}", str(layer), name, env=environ)
    return f"docker-image://{name}"


def _recipe(release: str, name: str, sources: tuple[str, ...]) -> Recipe:
    if name not in rootfs.ARCHITECTURES:
        known = ", ".join(rootfs.ARCHITECTURES)
        raise ConfigError(f"no base can be bootstrapped for platform {name!r}; possible: {known}")
    return Recipe(release, name, sources)


def _cached(cache: Path, recipe: Recipe, oldest: float) -> _Made | None:
    made = _Made.read(_record(cache, recipe))
    if not made or made.created < oldest or not oci.is_complete(cache / LAYOUT, made.manifest):
        return None
    return made


def _record(cache: Path, recipe: Recipe) -> Path:
    """Named after all that decides what is made, so another option or archive is another file."""
    key = repr((recipe.command("", ""), sorted(rootfs.ENV.items()), settings("", "")))
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _make(cache: Path, recipe: Recipe, tools: Tools, log: Log) -> _Made:
    log(f"bootstrapping {recipe.release} for {recipe.platform}")
    rootfs.ensure_mmdebstrap(tools.run, log)
    tools.emulate(recipe.arch)
    with _scratch(cache) as folder:
        tar = folder / "root.tar"
        rootfs.make(recipe, tar, tools.run, tools.stream, log)
        status, version = _read(tar, STATUS, VERSION)
        about = settings(recipe.release, version.strip())
        manifest = oci.add_image(cache / LAYOUT, tar, recipe.platform, about)
    made = _Made(tools.now(), manifest, rootfs.installed(status))
    files.write_text(_record(cache, recipe), json.dumps(made.to_json(), indent=2))
    return made


def settings(release: str, version: str) -> oci.Settings:
    """What the image says about itself; no times and places, so that its digest depends on content alone."""
    about = f"Debian {release} (minbase), bootstrapped with mmdebstrap from the signed archive"
    name = "org.opencontainers.image."
    labels = {f"{name}title": f"debian-{release}", f"{name}description": about, f"{name}version": version}
    return oci.Settings(rootfs.CREATED, (PATH,), ("bash",), labels, about)


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
    oci.prune(cache / LAYOUT, [made.manifest for made in records.values()], older_than=time.time() - DAY)


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
