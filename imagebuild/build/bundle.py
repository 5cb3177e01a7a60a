"""Bundles: folders with all files that the builds of some targets fetch, for building without a network."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field

from imagebuild.build.bake import BuildRun
from imagebuild.build.inputs import (
    DownloadStore,
    Needs,
    Provided,
    apt_get_for_proxy,
    fetch_all,
    missing_images,
    needs_of_targets,
)
from imagebuild.core import yaml
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError
from imagebuild.core.fields import ARCHS, Digest, Model, Platform
from imagebuild.core.files import file_sha256, refuse_outside, write_text
from imagebuild.core.run import MODULE, NEUTRAL, run_program
from imagebuild.core.settings import Settings, ca_bundle, load_settings, pip_environment
from imagebuild.oci.engine import Endpoint
from imagebuild.oci.layout import Layout
from imagebuild.oci.registry import copy_image, pull_image
from imagebuild.project.lockfile import digest_of, pip_platforms

MANIFEST = "manifest.json"
IMAGES = "images"
"""Name of the folder with the OCI layout that contains the images."""
SUMS = "SHA256SUMS"
"""Name of the file with the hashes of all other files of a bundle. This file is written last."""
WHEELS = "/wheels/"
"""Path of the package proxy's page that lists the wheels, and the start of the path of each wheel."""

HOSTS = re.compile(r"https?://([^/\s\"'|\\]+)")
"""Matches the hosts in Dockerfiles."""


class BundleManifest(Model):
    """The content of a bundle's `manifest.json`."""

    format: Literal[3] = 3
    created: str
    """Time in UTC at which the bundle was complete. Packages and security updates are from this time."""
    targets: tuple[str, ...]
    stages: dict[str, tuple[Platform, ...]]
    """Maps the key of each build stage, which is a hash, to the platforms for which the bundle has inputs of the
    stage."""
    images: dict[str, Digest] = Field(default_factory=dict)
    """Maps the name of each image in FROM to the digest of its replacement in the bundle. The replacement is the same
    image or a bootstrapped base."""


@dataclass(frozen=True)
class Bundle:
    """A complete bundle."""

    folder: Path
    manifest: BundleManifest

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Read the bundle's manifest. Raises ConfigError if the folder does not contain a complete bundle."""
        folder = folder.absolute()
        if not (folder / SUMS).is_file():
            raise ConfigError(
                f"{folder}: is not a complete bundle ({SUMS} is missing); make one with `imagebuild bundle create`"
            )
        return cls(folder, yaml.read_yaml(folder / MANIFEST, BundleManifest).model)

    @contextmanager
    def provide(self, run: BuildRun, note: Callable[[str], None]) -> Iterator[Provided]:
        """Yield all inputs of a build from the bundle. Raises ConfigError if the bundle lacks an image."""
        needs = needs_of_targets(run)
        images = missing_images(run, needs)
        if absent := [image for image in images if image not in self.manifest.images]:
            raise ConfigError(f"{self.folder}: the bundle does not contain {', '.join(absent)}; make the bundle again")
        lock, bases = run.project.lock, run.project.matrix.model.bases.values()
        made = {digest_of(lock, base.image) for base in bases if base.release}
        for image in images:
            if (digest := self.manifest.images[image]) == image.rpartition("@")[2]:
                continue
            if image not in made:
                raise ConfigError(f"{self.folder}: the bundle has {digest} instead of {image}; make the bundle again")
            note(f"{image} is {digest}, bootstrapped by the maker of the bundle: the lock has no hash of it")
        contexts = {image: f"oci-layout://{self.folder / IMAGES}@{self.manifest.images[image]}" for image in images}
        store = DownloadStore(self.folder)
        stages = fetch_all(needs, store, note)
        with package_proxy(gateway_address(run.engine), store, note) as proxy:
            yield contexts, stages, _proxy_secrets(proxy, recording=False)

    def problem(self, keys: Mapping[str, str], platforms: Iterable[Platform]) -> str:
        """Return why a target cannot be built from the bundle; empty if the target can be built.
        `keys` maps the name of each stage of the target to the stage's key."""
        for stage, key in keys.items():
            if key not in self.manifest.stages:
                return f"the stage {stage} has changed since the bundle was made, or is not in the bundle"
            if absent := set(platforms) - set(self.manifest.stages[key]):
                return f"the bundle was made without {', '.join(sorted(absent))}"
        return ""

    def find_damage(self) -> list[str]:
        """Return a message for each file that is missing, was added or has changed since the bundle was made."""
        damage, added = [], {*_files(self.folder)} - {self.folder / SUMS}
        for line in (self.folder / SUMS).read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n"):
            sha256, _, name = line.partition("  ")
            path = self.folder / name
            added.discard(path)
            if not path.is_file() or file_sha256(path) != sha256:
                damage.append(f"{path}: {'has changed' if path.exists() else 'is missing'}; make the bundle again")
        return damage + [f"{path}: is not in {SUMS}; make the bundle again" for path in sorted(added)]


def new_bundle_folder(folder: Path) -> Path:
    """Make the folder of a bundle, and return its absolute path.
    Raises ConfigError if the folder is not empty or cannot be made."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: the folder is not empty; remove it, or name another folder")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return folder


@contextmanager
def record_bundle(folder: Path, run: BuildRun, note: Callable[[str], None]) -> Iterator[Provided]:
    """Fetch all inputs of a build into a bundle, and yield the inputs. After the build, complete the bundle.
    Inputs with a mirror are fetched from the mirror."""
    needs = needs_of_targets(run)
    configured, ca = load_settings(os.environ), ca_bundle(run.request.ca, os.environ)
    fetch_wheels(folder / "wheels", needs, configured, ca, note)
    with DownloadStore.fetching(folder, configured, ca) as store:
        for item in dict.fromkeys(item for need in needs.values() for item in need.stages.values()):
            note(f"fetching {item.url}")
            if item.commit:
                store.clone(item)
            else:
                store.get(item.url)
        stages = fetch_all(needs, store, note)
        images, layout = {}, Layout(folder / IMAGES)
        for image in missing_images(run, needs):
            note(f"pulling {image}")
            images[image] = pull_image(configured.mirrors.image(image), layout)
        layout.start()
        for image, context in run.inputs.images.items():
            base, _, images[image] = context.removeprefix("oci-layout://").rpartition("@")
            copy_image(images[image], Layout(Path(base)), layout)
        contexts = {image: f"oci-layout://{folder / IMAGES}@{digest}" for image, digest in images.items()}
        texts = (*configured.mirrors.downloads.values(), *(run.dockerfiles[target].text for target in needs))
        steps = store.for_steps(frozenset(HOSTS.findall("\n".join(texts))), configured, ca)
        with package_proxy(gateway_address(run.engine), steps, note) as proxy:
            yield contexts, stages, _proxy_secrets(proxy, recording=True)
    keys: defaultdict[str, set[Platform]] = defaultdict(set)
    for target, need in needs.items():
        for key in run.dockerfiles[target].stages.values():
            keys[key].update(need.platforms)
    stages_of = {key: tuple(sorted(platforms)) for key, platforms in sorted(keys.items())}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    finish_bundle(folder, BundleManifest(created=created, targets=tuple(needs), stages=stages_of, images=images))


def finish_bundle(folder: Path, manifest: BundleManifest) -> None:
    """Complete a bundle: write its manifest, and then the hashes of all files."""
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1, by_alias=True) + "\n")
    sums = [f"{file_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder)]
    write_text(folder / SUMS, "".join(sums))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def fetch_wheels(
    folder: Path, needs: Mapping[str, Needs], settings: Settings, ca: Path | None, note: Callable[[str], None]
) -> None:
    """Fetch the wheels that a build needs. Raises CommandError if pip finds no wheel with the hash in the lock."""
    index = ("--index-url", settings.mirrors.python_index) if settings.mirrors.python_index else ()
    environ = pip_environment(ca, settings.netrc_file)
    wanted = {(a, w) for need in needs.values() for a in ARCHS if f"linux/{a}" in need.platforms for w in need.wheels}
    for arch, (python, wheels) in sorted(wanted):
        names = ", ".join(line.partition(" ")[0] for line in wheels)
        note(f"fetching {names} for {arch}")
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as scratch:
            (requirements := Path(scratch) / "requirements").write_text("\n".join(wheels))
            try:
                run_program(
                    *MODULE, "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--no-cache-dir", "--require-hashes", "--dest", str(folder.absolute()),
                    *index, *pip_platforms(arch, python),
                    "--requirement", str(requirements), env=environ, folder=NEUTRAL,
                )  # fmt: skip
            except CommandError as error:
                reason = str(error).partition("): ")[2] or str(error)
                raise CommandError(f"pip cannot download {names} for {arch}: {reason}") from None


def gateway_address(engine: Endpoint) -> str:
    """Return the address at which build steps reach this machine.
    Raises ConfigError if the engine is on another machine."""
    if not engine.host.startswith("unix://"):
        raise ConfigError(
            f"bundles need an engine on this machine, but {engine.host} may be on another one; use a local engine"
        )
    template = "{{(index .IPAM.Config 0).Gateway}}"
    command = ("docker", "network", "inspect", "bridge", "--format", template)
    return run_program(*command, env=engine.environment, timeout=20).strip()


@contextmanager
def package_proxy(address: str, store: DownloadStore, log: Callable[[str], None]) -> Iterator[str]:
    """Run the HTTP proxy that apt and pip in build steps use. Yield the proxy's address, such as `http://host:port`.
    `log` gets a line for each failed request. Raises CommandError if `address` is not an address of this machine."""
    try:
        server = ThreadingHTTPServer((address, 0), functools.partial(_Handler, store, log))
    except OSError as error:
        problem = f"the package proxy cannot use this address ({error.strerror}); use an engine on this machine"
        raise CommandError(f"{address}: {problem}") from None
    server.daemon_threads = True
    with server:
        threading.Thread(target=server.serve_forever, name="package proxy", daemon=True).start()
        try:
            yield f"http://{address}:{server.server_address[1]}"
        finally:
            server.shutdown()


def _proxy_secrets(proxy: str, *, recording: bool) -> dict[str, str]:
    """Return the build secrets that make apt and pip use the proxy. pip verifies wheels by their hashes in the lock."""
    pip = f"[global]\nno-index = true\nfind-links = {proxy}{WHEELS}\ntrusted-host = {urlsplit(proxy).hostname}\n"
    return {"apt-get": apt_get_for_proxy(proxy, recording=recording), "pip.conf": pip}


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120

    def __init__(self, store: DownloadStore, log: Callable[[str], None], *connection: Any) -> None:
        self.store, self.log = store, log
        super().__init__(*connection, directory=str(store.folder))

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the client closed the connection
            super().handle()

    def send_head(self) -> Any:
        try:
            return super().send_head()
        except (ImagebuildError, OSError) as error:
            self.log(str(error))
            self.send_error(404 if isinstance(error, Absent) else 502)

    def translate_path(self, path: str) -> str:
        """Return the local path of the file that a client requests. Fetch the file if the store lacks it."""
        if path.startswith(WHEELS):
            folder = self.store.folder
            return str(refuse_outside([folder], Path(super().translate_path(path)), str(folder)))
        url = urlsplit(path)
        if url.port == 443:  # `apt_get_for_proxy` writes https://host as http://host:443
            url = url._replace(scheme="https", netloc=url.hostname or "")
        return str(self.store.get(urlunsplit(url)))

    def log_message(self, *_: object) -> None:
        """Print nothing: `log` already gets a line for each failed request."""
