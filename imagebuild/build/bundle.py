"""Keep all that builds of some targets fetch in one folder, and build from it without a network."""

from __future__ import annotations

import functools
import io
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.utils import canonicalize_name
from pydantic import Field

from imagebuild.build.bake import BuildInputs
from imagebuild.build.inputs import (
    DownloadStore,
    GitStore,
    InputsRequest,
    NeededInputs,
    StoredFile,
    apt_get_for_proxy,
    contexts_of,
)
from imagebuild.core import yaml
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.fields import Commit, Digest, Model, Platform
from imagebuild.core.files import write_text
from imagebuild.core.http import Downloads
from imagebuild.core.run import run_program
from imagebuild.core.settings import git_environment, pip_conf_text, pip_environment
from imagebuild.oci.engine import Endpoint
from imagebuild.oci.layout import Layout
from imagebuild.oci.registry import copy_image, pull_image
from imagebuild.render.recipe import pip_platforms

MANIFEST = "manifest.json"


class BundleManifest(Model):
    """Describe the file `manifest.json` of a bundle."""

    format: Literal[2] = 2
    created: str
    """Time at which it was complete, in UTC. Packages and security updates are as they were then."""
    targets: tuple[str, ...]
    stages: dict[str, tuple[Platform, ...]]
    """Key of a build stage → platforms for which it was built when the bundle was made."""
    files: dict[str, StoredFile]
    """Address → file: archives, keys, packages; of wheels `/wheels/` and the file's name."""
    images: dict[str, Digest] = Field(default_factory=dict)
    """Image as FROM names it → image in the bundle: the same, or a bootstrapped base that replaces it."""
    git: dict[Commit, str] = Field(default_factory=dict)
    """Commit → address of its repository."""


@dataclass(frozen=True)
class Bundle:
    """Use a bundle that is complete."""

    folder: Path
    manifest: BundleManifest

    GIT: ClassVar[str] = "git"
    IMAGES: ClassVar[str] = "images"

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Read the manifest. Raises ConfigError if the folder holds no complete bundle."""
        path = folder.absolute() / MANIFEST
        if not path.is_file():
            raise ConfigError(
                f"{folder}: no bundle is here ({MANIFEST} is missing); make one with `imagebuild bundle create`"
            )
        return cls(folder.absolute(), yaml.read_yaml(path, BundleManifest).model)

    @cached_property
    def store(self) -> DownloadStore:
        """Return the downloaded files."""
        return DownloadStore(self.folder, dict(self.manifest.files))

    @cached_property
    def git(self) -> GitStore:
        """Return the commits."""
        return GitStore(self.folder / self.GIT)

    @property
    def layout(self) -> Path:
        """Return the folder of the OCI layout that has the images."""
        return self.folder / self.IMAGES

    @contextmanager
    def provide(self, request: InputsRequest) -> Iterator[BuildInputs]:
        """Provide all inputs of a build. Raises ConfigError for an image that the bundle lacks."""
        if absent := [image for image in request.images if image not in self.manifest.images]:
            raise ConfigError(f"{self.folder}: the bundle has no {', '.join(absent)}")
        images = {image: f"oci-layout://{self.layout}@{self.manifest.images[image]}" for image in request.images}
        stages = contexts_of(request, self.store.checked, self.git)
        with package_proxy(gateway_address(request.engine), self.store, request.note) as proxy:
            yield request.provide(images, stages, _proxy_secrets(proxy, recording=False))

    def problem(self, keys: Mapping[str, str], platforms: Iterable[Platform]) -> str:
        """Say why a target cannot be built from the bundle; return an empty text if it can.

        `keys` is stage → key. Stages with the same key fetch the same things.
        """
        for stage, key in keys.items():
            if key not in self.manifest.stages:
                return f"the stage {stage} differs from the one that the bundle was made for"
            absent = set(platforms) - set(self.manifest.stages[key])
            if absent:
                return f"the bundle was made without {', '.join(sorted(absent))}"
        return ""

    def find_damage(self, note: Callable[[str], None]) -> list[str]:
        """List what is missing or has changed since the bundle was made."""
        checks: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        checks += [(self.store.checked, (url,)) for url in self.manifest.files]
        checks += [(Layout(self.layout).check, (digest,)) for digest in sorted(set(self.manifest.images.values()))]
        checks += [(self.git.check, (url, commit)) for commit, url in self.manifest.git.items()]
        note(f"checking {len(checks)} files, images and commits")
        damage = []
        for check, arguments in checks:
            try:
                check(*arguments)
            except ResultError as error:
                damage.append(str(error))
        return damage

    def missing_inputs(self, need: NeededInputs) -> list[str]:
        """List what a target needs by the lock, but the bundle does not have."""
        missing = []
        for item in need.stages.values():
            if item.kind == "git":
                if item.pin not in self.manifest.git:
                    missing.append(f"no commit {item.pin} of {item.url}")
            elif item.url not in self.manifest.files:
                missing.append(f"no {item.url}")
            elif item.pin not in ("", self.manifest.files[item.url].sha256):
                missing.append(f"another {item.url}")
        here = {file.sha256 for file in self.manifest.files.values()}
        lines = sorted({line for wheels in need.wheels for line in wheels.requirements})
        missing += [f"no wheel {line}" for line in lines if line.rpartition(":")[2] not in here]
        missing += [f"no image {image}" for image in sorted(need.images - set(self.manifest.images))]
        return missing


@dataclass
class Recording:
    """Make a bundle."""

    folder: Path
    stages: dict[str, set[Platform]]
    """Key of a build stage → platforms."""
    images: dict[str, str] = field(default_factory=dict)
    """Image as FROM names it → digest in the bundle."""

    @classmethod
    def start(cls, folder: Path, stages: dict[str, set[Platform]]) -> Recording:
        """Make the folder. Raises ConfigError if it has something in it or cannot be written."""
        folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"{folder}: is not empty; remove it, or name another folder")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
        return cls(folder, stages)

    @contextmanager
    def provide(self, request: InputsRequest) -> Iterator[BuildInputs]:
        """Fetch all inputs, through mirrors where there are any, and keep them; finish the bundle after the build."""
        mirrors, netrc_file = request.settings.mirrors, request.settings.netrc_file
        store = DownloadStore(self.folder, {}, Downloads(mirrors.download, request.ca, netrc_file))
        fetch_wheels(request, store)
        with git_environment(request.ca, netrc_file) as environ:
            git = GitStore(self.folder / Bundle.GIT, mirrors.download, environ)
            for item in dict.fromkeys(item for need in request.needs.values() for item in need.stages.values()):
                request.note(f"fetching {item.url}")
                if item.kind == "git":
                    git.fetch(item.url, item.pin)
                else:
                    store.get(item.url)
            stages = contexts_of(request, store.get, git)
        layout = Layout(self.folder / Bundle.IMAGES)
        for image in request.images:
            request.note(f"pulling {image}")
            self.images[image] = pull_image(mirrors.image(image), layout)
        layout.start()
        for image, context in request.given.images.items():
            base, _, self.images[image] = context.removeprefix("oci-layout://").rpartition("@")
            copy_image(self.images[image], Layout(Path(base)), layout)
        images = {image: f"oci-layout://{layout.folder}@{digest}" for image, digest in self.images.items()}
        with package_proxy(gateway_address(request.engine), store, request.note) as proxy:
            yield request.provide(images, stages, _proxy_secrets(proxy, recording=True))
        self.finish(store.files, request.needs)

    def finish(self, files: Mapping[str, StoredFile], needs: Mapping[str, NeededInputs]) -> None:
        """Write the manifest, which makes the folder a bundle."""
        commits = {i.pin: i.url for need in needs.values() for i in need.stages.values() if i.kind == "git"}
        manifest = BundleManifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            targets=tuple(needs),
            stages={key: tuple(sorted(platforms)) for key, platforms in sorted(self.stages.items())},
            files=dict(sorted(files.items())),
            images=dict(sorted(self.images.items())),
            git=commits,
        )
        write_text(self.folder / MANIFEST, manifest.model_dump_json(indent=1, by_alias=True) + "\n")


WHEELS = "/wheels/"
"""Beginning of the addresses of wheels in the manifest, and at the package proxy."""


def fetch_wheels(request: InputsRequest, store: DownloadStore) -> None:
    """Fetch the wheels that a build needs with pip, from the index that it is configured for or a mirror of it.

    Raises CommandError if pip cannot get one of them with the hash of the lock.
    """
    settings, folder = request.settings, store.folder / "wheels"
    index = ("--index-url", settings.mirrors.python_index) if settings.mirrors.python_index else ()
    environ = pip_environment(request.ca, settings.netrc_file)
    wanted = {wheels for need in request.needs.values() for wheels in need.wheels if wheels.requirements}
    for wheels in sorted(wanted, key=lambda wheels: (wheels.arch, wheels.requirements)):
        names = ", ".join(line.partition(" ")[0] for line in wheels.requirements)
        request.note(f"fetching {names} for {wheels.arch}")
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as scratch:
            (requirements := Path(scratch) / "requirements").write_text("\n".join(wheels.requirements))
            try:
                run_program(
                    sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--no-cache-dir", "--require-hashes", "--dest", str(folder), *index, *pip_platforms(wheels.arch),
                    "--requirement", str(requirements), env=environ,
                )  # fmt: skip
            except CommandError as error:
                reason = str(error).partition("): ")[2] or str(error)
                raise CommandError(f"pip cannot download {names} for {wheels.arch}: {reason}") from None
    for path in folder.glob("*.whl"):
        store.add(f"{WHEELS}{path.name}", path)


def index_page(store: DownloadStore, project: str) -> str:
    """Return a page of a package index with links to the wheels of a project. Raises Absent if there are none."""
    links = [
        f'<a href="{escape(address)}#sha256={store.files[address].sha256}">{escape(address)}</a><br>\n'
        for address in sorted(store.files)
        if address.startswith(WHEELS)
        and canonicalize_name(address.removeprefix(WHEELS).partition("-")[0]) == canonicalize_name(project)
    ]
    if not links:
        raise Absent(f"the bundle has no wheel of {project}")
    return f"<!DOCTYPE html><html><body>\n{''.join(links)}</body></html>\n"


def gateway_address(engine: Endpoint) -> str:
    """Return the address at which build steps reach this machine. Raises ConfigError for an engine elsewhere."""
    if not engine.host.startswith("unix://"):
        raise ConfigError(f"bundles need an engine on this machine, and {engine.host} may be on another one")
    template = "{{(index .IPAM.Config 0).Gateway}}"
    command = ("docker", "network", "inspect", "bridge", "--format", template)
    return run_program(*command, env=engine.environment, timeout=20).strip()


@contextmanager
def package_proxy(address: str, store: DownloadStore, log: Callable[[str], None]) -> Iterator[str]:
    """Run the proxy that apt and pip of builds use: `http://host:port`.

    `log` gets a line for each request that failed. Raises CommandError if the address is not this machine's.
    """
    try:
        server = ThreadingHTTPServer((address, 0), functools.partial(_Handler, store, log))
    except OSError as error:
        raise CommandError(
            f"{address}: this machine cannot serve at that address ({error.strerror}); is the engine local?"
        ) from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="package proxy", daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answer the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = 120

    def __init__(self, store: DownloadStore, log: Callable[[str], None], *connection: Any) -> None:
        self.store, self.log = store, log
        super().__init__(*connection)

    def do_GET(self) -> None:
        try:
            self._answer()
        except ImagebuildError as error:
            self.log(str(error))
            self.send_error(404 if isinstance(error, Absent) else 502)
        except OSError:  # the client went away
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - the server looks for this name

    def _answer(self) -> None:
        kind, _, name = unquote(self.path).strip("/").partition("/")
        if kind == "simple" and name:
            page = index_page(self.store, name).encode()
            self._send(io.BytesIO(page), len(page), "text/html; charset=utf-8")
            return
        url = urlsplit(self.path)
        if url.port == 443:  # so `apt_get_for_proxy` writes the addresses of https
            url = url._replace(scheme="https", netloc=url.hostname or "")
        path = self.store.get(urlunsplit(url) if url.scheme else unquote(self.path))
        with path.open("rb") as file:
            self._send(file, path.stat().st_size, "application/octet-stream")

    def _send(self, content: BinaryIO, length: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            shutil.copyfileobj(content, self.wfile)

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Print nothing: `log` gets a line for each request that failed."""


def _proxy_secrets(proxy: str, *, recording: bool) -> dict[str, str]:
    """Return the secrets that lead apt and pip of a build to the proxy."""
    return {"apt-get": apt_get_for_proxy(proxy, recording=recording), "pip.conf": pip_conf_text(f"{proxy}/simple/")}
