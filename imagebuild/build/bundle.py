"""Keep all that builds of some targets fetch in one folder, and build from it without a network."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Literal, Protocol
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from pydantic import Field

from imagebuild.build.bake import BuildInputs
from imagebuild.build.inputs import (
    ArchiveFile,
    DownloadStore,
    FetchingStore,
    GitCommit,
    GitStore,
    InputsRequest,
    NeededInputs,
    Sink,
    Start,
    StoredFile,
    apt_get_for_proxy,
    contexts_of,
    git_environment,
)
from imagebuild.core import yaml
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, Mistakes, ResultError
from imagebuild.core.fields import Commit, Model, Platform
from imagebuild.core.files import write_text
from imagebuild.core.http import Downloads, without_login
from imagebuild.core.run import run_program
from imagebuild.core.settings import configured_index, default_index, pip_conf_text
from imagebuild.oci.engine import Endpoint
from imagebuild.oci.layout import check_image, copy_to_layout
from imagebuild.oci.registry import pull_image
from imagebuild.project.lockfile import Digest

MANIFEST = "manifest.json"


class BundleManifest(Model):
    """Describe the file `manifest.json` of a bundle."""

    format: Literal[1] = 1
    created: str
    """Time at which it was complete, in UTC. Packages and security updates are as they were then."""
    targets: tuple[str, ...]
    stages: dict[str, tuple[Platform, ...]]
    """Key of a build stage → platforms for which it was built when the bundle was made."""
    files: dict[str, StoredFile]
    """Address → file: archives, keys, packages, wheels."""
    wheels: dict[str, str] = Field(default_factory=dict)
    """File name of a wheel → address."""
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
        mistakes = Mistakes()
        document = yaml.load_yaml(path, BundleManifest, mistakes)
        mistakes.stop_if_any()
        assert document is not None
        return cls(folder.absolute(), document.model)

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

    def contexts(self, wanted: Iterable[str]) -> dict[str, str]:
        """Return image → context. Raises ConfigError for an image that the bundle lacks."""
        absent = sorted(set(wanted) - set(self.manifest.images))
        if absent:
            raise ConfigError(f"{self.folder}: the bundle has no {', '.join(absent)}")
        return {image: f"oci-layout://{self.layout}@{self.manifest.images[image]}" for image in wanted}

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
        checks: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        checks += [(self.store.check, (url,)) for url in self.manifest.files]
        checks += [(check_image, (self.layout, digest)) for digest in sorted(set(self.manifest.images.values()))]
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
        """List what a target needs by the lock and the bundle does not have."""
        missing = []
        for item in need.stages.values():
            if isinstance(item, GitCommit):
                if item.commit not in self.manifest.git:
                    missing.append(f"no commit {item.commit} of {item.url}")
            elif item.url not in self.manifest.files:
                missing.append(f"no {item.url}")
            elif isinstance(item, ArchiveFile) and self.manifest.files[item.url].sha256 != item.sha256:
                missing.append(f"another {item.url}")
        wheels = {self.manifest.files[url].sha256 for url in self.manifest.wheels.values()}
        missing += [f"no wheel with sha256 {digest}" for digest in sorted(need.wheels - wheels)]
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

    def add_image(self, image: str, address: str, note: Callable[[str], None]) -> str:
        """Pull an image from an address, such as a mirror's, into the bundle; return its context."""
        note(f"pulling {image}")
        return self._add(image, pull_image(address, self.folder / Bundle.IMAGES))

    def add_base(self, image: str, context: str) -> str:
        """Copy a bootstrapped base into the bundle; return its context."""
        layout, _, digest = context.removeprefix("oci-layout://").rpartition("@")
        copy_to_layout(Path(layout), digest, self.folder / Bundle.IMAGES)
        return self._add(image, digest)

    def _add(self, image: str, digest: str) -> str:
        self.images[image] = digest
        return f"oci-layout://{self.folder / Bundle.IMAGES}@{digest}"

    def finish(
        self, files: Mapping[str, StoredFile], wheels: Mapping[str, str], needs: Mapping[str, NeededInputs]
    ) -> None:
        """Write the manifest, which makes the folder a bundle."""
        commits = {i.commit: i.url for need in needs.values() for i in need.stages.values() if isinstance(i, GitCommit)}
        manifest = BundleManifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            targets=tuple(needs),
            stages={key: tuple(sorted(platforms)) for key, platforms in sorted(self.stages.items())},
            files=dict(sorted(files.items())),
            wheels=dict(sorted(wheels.items())),
            images=dict(sorted(self.images.items())),
            git=commits,
        )
        write_text(self.folder / MANIFEST, manifest.model_dump_json(indent=1, by_alias=True) + "\n")


PAGE_TYPES = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class _Links(HTMLParser):
    """Collect the addresses that a page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if tag == "a" and name == "href" and value]


def parse_index_page(text: str, page: str) -> dict[str, tuple[str, str]]:
    """Return file name → address and sha256 from a project's page, whose address is `page`.

    Files without sha256 are left out, as the lock has the sha256 of each.
    """
    if text.lstrip().startswith("{"):
        entries = [(f["url"], f.get("hashes", {}).get("sha256", "")) for f in json.loads(text).get("files", ())]
    else:
        links = _Links()
        links.feed(text)
        entries = []
        for href in links.addresses:
            url, fragment = urldefrag(href)
            entries.append((url, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""))
    full = [(urljoin(page, url), digest) for url, digest in entries if digest]
    return {unquote(urlsplit(url).path.rpartition("/")[2]): (url, digest) for url, digest in full}


def normalized_name(project: str) -> str:
    """Return the name of a Python project as addresses of its pages have it."""
    return re.sub(r"[-_.]+", "-", project).lower()


def write_index_page(files: Mapping[str, str]) -> str:
    """Return a page with links to wheels; `files` is file name → sha256."""
    links = "".join(f'<a href="/wheels/{escape(n)}#sha256={files[n]}">{escape(n)}</a><br>\n' for n in sorted(files))
    return f"<!DOCTYPE html><html><body>\n{links}</body></html>\n"


class WheelIndex(Protocol):
    """Answer the requests of pip. Both methods raise Absent."""

    def page(self, project: str) -> str:
        """Return the page of a project."""

    def wheel(self, name: str, start: Start) -> Path:
        """Return the file of a wheel."""


@dataclass(frozen=True)
class StoredIndex:
    """Offer the wheels of a bundle."""

    store: DownloadStore
    wheels: Mapping[str, str]
    """File name → address."""

    def page(self, project: str) -> str:
        """Return a page with the bundle's wheels of a project."""
        files = {
            name: self.store.files[url].sha256
            for name, url in self.wheels.items()
            if normalized_name(name.partition("-")[0]) == normalized_name(project)
        }
        if not files:
            raise Absent(f"the bundle has no wheel of {project}")
        return write_index_page(files)

    def wheel(self, name: str, start: Start) -> Path:  # noqa: ARG002 - nothing is fetched
        """Return a file of the bundle."""
        path = self.store.find(self.wheels.get(name, ""))
        if path is None:
            raise Absent(f"the bundle has no wheel {name}")
        return path


@dataclass
class FetchingIndex:
    """Fetch wheels from a package index and keep them."""

    store: FetchingStore
    address: str
    """Address of the index: its pages are `<address><project>/`."""
    wanted: frozenset[str]
    """Hashes in the lock."""
    wheels: dict[str, str] = field(default_factory=dict)
    """File name → address of the wheels that were fetched."""
    _offered: dict[str, tuple[str, str]] = field(default_factory=dict)

    def page(self, project: str) -> str:
        """Return a page with those wheels of a project that the lock has."""
        url = f"{self.address}{normalized_name(project)}/"
        text = self.store.web.read(url, PAGE_TYPES).decode("utf-8", "replace")
        offered = {name: entry for name, entry in parse_index_page(text, url).items() if entry[1] in self.wanted}
        self._offered.update(offered)
        return write_index_page({name: digest for name, (_, digest) in offered.items()})

    def wheel(self, name: str, start: Start) -> Path:
        """Fetch a wheel. Raises ResultError if it is not what the index says."""
        if name not in self._offered:
            raise Absent(f"no page offered {name}")
        url, digest = self._offered[name]
        self.wheels[name] = url  # before pip has all of it, for the build may end then
        try:
            path = self.store.get(url, start)
            if self.store.files[url].sha256 != digest:
                raise ResultError(f"{url}: its sha256 is not {digest}, as the index says")
        except BaseException:
            del self.wheels[name]
            raise
        return path


@dataclass(frozen=True)
class ProxyContent:
    """Say where the proxy gets packages from."""

    store: DownloadStore
    index: WheelIndex
    log: Callable[[str], None]
    """Function that is told what could not be provided."""


def gateway_address(engine: Endpoint) -> str:
    """Return the address at which build steps reach this machine. Raises ConfigError for an engine elsewhere."""
    if not engine.host.startswith("unix://"):
        raise ConfigError(f"bundles need an engine on this machine, and {engine.host} may be on another one")
    template = "{{(index .IPAM.Config 0).Gateway}}"
    command = ("docker", "network", "inspect", "bridge", "--format", template)
    return run_program(*command, env=engine.environment, timeout=20).strip()


@contextmanager
def package_proxy(address: str, content: ProxyContent) -> Iterator[str]:
    """Run the proxy that apt and pip of builds use: `http://host:port`.

    Raises CommandError if the address is not this machine's.
    """

    class Handler(_Handler):
        pass

    Handler.content = content
    try:
        server = ThreadingHTTPServer((address, 0), Handler)
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
    """Answer one request."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    content: ProxyContent

    def do_GET(self) -> None:
        self.started = False
        try:
            self._answer()
        except Absent as error:
            self.content.log(str(error))
            self._refuse(404)
        except ImagebuildError as error:
            self.content.log(str(error))
            self._refuse(502)
        except OSError:  # the client went away
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - the server looks for this name

    def _answer(self) -> None:
        kind, _, name = self.path.strip("/").partition("/")
        if self.path.startswith("http://"):
            url = urlsplit(self.path)
            if url.port == 443:  # so `apt_get_for_proxy` writes the addresses of https
                url = url._replace(scheme="https", netloc=url.hostname or "")
            self._send(self.content.store.get(urlunsplit(url), self._start))
        elif kind == "simple" and name:
            page = self.content.index.page(name).encode()
            self._begin(len(page), "text/html; charset=utf-8")
            self.wfile.write(page)
        elif kind == "wheels" and name:
            self._send(self.content.index.wheel(unquote(name), self._start))
        else:
            raise Absent(f"{self.path}: the package proxy has no such page")

    def _start(self, length: int | None) -> Sink:
        if length is None or self.command == "HEAD":
            return lambda _: None  # it is sent once it is complete
        self._begin(length, "application/octet-stream")
        return self.wfile.write

    def _send(self, path: Path) -> None:
        if self.started:  # it was sent while it was fetched
            return
        self._begin(path.stat().st_size, "application/octet-stream")
        if self.command != "HEAD":
            with path.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)

    def _begin(self, length: int, kind: str) -> None:
        self.started = True
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _refuse(self, status: int) -> None:
        self.close_connection = True
        if not self.started:
            with suppress(OSError):
                self.send_error(status)

    def finish(self) -> None:
        with suppress(OSError, socket.timeout):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Print nothing: `content.log` is told what goes wrong."""


@contextmanager
def inputs_into_bundle(request: InputsRequest, recording: Recording) -> Iterator[BuildInputs]:
    """Fetch all inputs, through mirrors where there are any, and keep them in a bundle; finish it after the build."""
    mirrors, netrc_file = request.settings.mirrors, request.settings.netrc_file
    address, logins = without_login(mirrors.python_index or configured_index() or default_index())
    store = FetchingStore(recording.folder, Downloads(mirrors.download, request.ca, netrc_file, logins))
    with git_environment(request.ca, netrc_file) as environ:
        git = GitStore(recording.folder / Bundle.GIT, mirrors.download, environ)
        for item in dict.fromkeys(item for need in request.needs.values() for item in need.stages.values()):
            request.note(f"fetching {item.url}")
            if isinstance(item, GitCommit):
                git.fetch(item.url, item.commit)
            else:
                store.get(item.url)
        downloads = {target: need.stages for target, need in request.needs.items()}
        stages = contexts_of(downloads, request, store.get, git)
    images = {image: recording.add_image(image, mirrors.image(image), request.note) for image in sorted(request.images)}
    images |= {image: recording.add_base(image, context) for image, context in request.bases.items()}
    wanted = frozenset(digest for need in request.needs.values() for digest in need.wheels)
    index = FetchingIndex(store, address.rstrip("/") + "/", wanted)
    with package_proxy(gateway_address(request.engine), ProxyContent(store, index, request.note)) as proxy:
        yield BuildInputs(images, stages, _proxy_secrets(request, proxy, recording=True))
    recording.finish(store.files, index.wheels, request.needs)


@contextmanager
def inputs_from_bundle(request: InputsRequest, bundle: Bundle) -> Iterator[BuildInputs]:
    """Provide all inputs from a bundle."""
    store = bundle.store

    def file(url: str) -> Path:
        if not store.find(url):
            raise ResultError(f"{bundle.folder}: has no {url}; make the bundle again")
        store.check(url)
        return store.folder / store.files[url].path

    stages = contexts_of({target: need.stages for target, need in request.needs.items()}, request, file, bundle.git)
    content = ProxyContent(store, StoredIndex(store, bundle.manifest.wheels), request.note)
    with package_proxy(gateway_address(request.engine), content) as proxy:
        yield BuildInputs(bundle.contexts(request.images), stages, _proxy_secrets(request, proxy, recording=False))


def _proxy_secrets(request: InputsRequest, proxy: str, *, recording: bool) -> dict[str, Path]:
    """Write the secrets that lead apt and pip of a build to the proxy."""
    return {
        "apt-get": request.secret("apt-get", apt_get_for_proxy(proxy, recording=recording)),
        "pip.conf": request.secret("pip.conf", pip_conf_text(f"{proxy}/simple/")),
    }
