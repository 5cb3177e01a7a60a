"""Give builds their inputs from mirrors, from a bundle that is being made, or from one that is used.

BuildKit gets what imagebuild fetched as named contexts in place of stages and images, and steps that install get
secrets. Neither is in the Dockerfile, and steps compare inputs by content: whoever uses no mirror shares the cache.
"""

from __future__ import annotations

import netrc
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from imagebuild.build import bundle, inputs
from imagebuild.build.bundle import (
    Bundle,
    DownloadStore,
    GitStore,
    Recording,
    RecordingIndex,
    RecordingStore,
    Sink,
    Start,
    StoredIndex,
    WheelIndex,
)
from imagebuild.build.inputs import ArchiveFile, Fetched, GitCommit, KeyFile, NeededInputs, Trees
from imagebuild.core import run, settings
from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.files import read_text
from imagebuild.core.http import Fetcher, MissingFile, file_sha256, without_login
from imagebuild.core.settings import Settings, configured_index, default_index, pip_conf_text
from imagebuild.oci.engine import Endpoint

Log = Callable[[str], None]


@dataclass(frozen=True)
class ProxyContent:
    """Where a depot gets things from."""

    shelf: DownloadStore
    index: WheelIndex
    log: Log
    """Told what could not be had."""

    def file(self, url: str, start: Start) -> Path:
        """A download. Raises NotThere, or CommandError while recording."""
        if isinstance(self.shelf, RecordingStore):
            return self.shelf.get(url, start)
        found = self.shelf.find(url)
        if found is None:
            raise MissingFile(f"the bundle has no {url}")
        return found


def gateway(engine: Endpoint) -> str:
    """The address of this machine that the steps of builds reach. Raises ConfigError for an engine elsewhere."""
    if not engine.host.startswith("unix://"):
        raise ConfigError(f"bundles need an engine on this machine, and {engine.host} may be elsewhere")
    template = "{{(index .IPAM.Config 0).Gateway}}"
    command = ("docker", "network", "inspect", "bridge", "--format", template)
    return run.run_program(*command, env=engine.environment, timeout=20).strip()


@contextmanager
def serving(address: str, content: ProxyContent) -> Iterator[str]:
    """A running depot: `http://host:port`. Raises CommandError if the address is not this machine's."""

    class Handler(_Handler):
        pass

    Handler.content = content
    try:
        server = ThreadingHTTPServer((address, 0), Handler)
    except OSError as error:
        raise CommandError(f"{address}: no server can run there ({error.strerror}); is the engine local?") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="depot", daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def url_of(target: str) -> str:
    """The address that a request to a proxy means: port 443 stands for https (see `aptget`)."""
    parts = urlsplit(target)
    if parts.port == 443:
        parts = parts._replace(scheme="https", netloc=parts.hostname or "")
    return urlunsplit(parts)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    content: ProxyContent

    def do_GET(self) -> None:
        self.started = False
        try:
            self._answer()
        except MissingFile as error:
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
            url = url_of(self.path)
            self._send(self.content.file(url, self._start))
        elif kind == "simple" and name:
            page = self.content.index.page(name).encode()
            self._begin(len(page), "text/html; charset=utf-8")
            self.wfile.write(page)
        elif kind == "wheels" and name:
            self._send(self.content.index.wheel(unquote(name), self._start))
        else:
            raise MissingFile(f"{self.path}: a depot has no such page")

    def _start(self, length: int | None) -> Sink:
        if length is None or self.command == "HEAD":
            return lambda _: None  # it is sent when it is here
        self._begin(length, "application/octet-stream")
        return self.wfile.write

    def _send(self, path: Path) -> None:
        if self.started:  # as it came
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
        """Nothing: what goes wrong is told by `content.log`."""


@dataclass(frozen=True)
class InputsRequest:
    """What is needed."""

    needs: Mapping[str, NeededInputs]
    """By target."""
    bases: Mapping[str, str]
    """Image → context of what was bootstrapped in its place."""
    engine: Endpoint
    settings: Settings
    ca: Path | None
    trees: Trees
    secrets: Path
    """Folder for secrets; nobody else may read it."""
    note: Callable[[str], None]

    @property
    def images(self) -> frozenset[str]:
        """Images that no base replaces."""
        return frozenset(image for need in self.needs.values() for image in need.images) - frozenset(self.bases)

    def secret(self, name: str, text: str) -> Path:
        path = self.secrets / name
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def depot_secrets(self, address: str, *, recording: bool) -> dict[str, Path]:
        return {
            "apt-get": self.secret("apt-get", inputs.for_depot(address, recording=recording)),
            "pip.conf": self.secret("pip.conf", pip_conf_text(f"{address}/simple/")),
        }


@dataclass(frozen=True)
class BuildInputs:
    """What bake is told."""

    images: Mapping[str, str]
    """Image → context."""
    stages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Target → stage → context."""
    secrets: Mapping[str, Path] = field(default_factory=dict)


@dataclass
class ContextBuilder:
    """Turns what was fetched into contexts."""

    trees: Trees
    file: Callable[[str], Path]
    """Address → a file on this machine."""
    git: GitStore
    note: Callable[[str], None]

    def context(self, item: Fetched) -> str:
        """Raises ResultError for a file that is not what the lock says, and as `file` and the git store."""
        match item:
            case ArchiveFile(url, sha256):
                return self.trees.find(f"archive {url} {sha256}") or self._file(url, f"archive {url} {sha256}", sha256)
            case KeyFile(url):
                path = self.file(url)
                key = f"key {url} {file_sha256(path)}"
                return self.trees.find(key) or self.trees.add_file(key, name_of(url), path)
            case GitCommit(url, commit):
                return self.trees.find(f"git {commit}") or self._commit(url, commit)

    def _file(self, url: str, key: str, sha256: str) -> str:
        self.note(f"fetching {url}")
        path = self.file(url)
        if (found := file_sha256(path)) != sha256:
            raise ResultError(f"{url}: its sha256 is {found}, but imagebuild.lock has {sha256}")
        return self.trees.add_file(key, name_of(url), path)

    def _commit(self, url: str, commit: str) -> str:
        if not self.git.has(commit):
            self.note(f"fetching {url} {commit}")
            self.git.fetch(url, commit)
        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self.trees.folder) as folder:
            self.git.checkout(url, commit, Path(folder))
            return self.trees.add_folder(f"git {commit}", Path(folder))


def name_of(url: str) -> str:
    """The file name that ADD gives what it downloads."""
    return urlsplit(url).path.rpartition("/")[2]


@contextmanager
def inputs_from_mirrors(order: InputsRequest) -> Iterator[BuildInputs]:
    """Inputs that have a mirror come from there, the others from where the Dockerfile says."""
    mirrors, settings = order.settings.mirrors, order.settings
    images = {image: f"docker-image://{m}" for image in order.images if (m := mirrors.image(image)) != image}
    wanted = {
        target: {stage: item for stage, item in need.stages.items() if mirrors.download(item.url) != item.url}
        for target, need in order.needs.items()
    }
    order.trees.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="imagebuild-", dir=order.trees.folder) as scratch,
        bundle.environment(order.ca, settings.netrc_file) as environ,
    ):
        shelf = RecordingStore(Path(scratch), Fetcher(order.ca, settings.netrc_file), mirrors)
        git = GitStore(Path(scratch) / "git", mirrors.download, environ)
        stages = _contexts(ContextBuilder(order.trees, shelf.get, git, order.note), wanted)
    yield BuildInputs({**order.bases, **images}, stages, _mirror_secrets(order))


def _mirror_secrets(order: InputsRequest) -> dict[str, Path]:
    mirrors, file = order.settings.mirrors, order.settings.netrc_file
    result = {}
    if mirrors.downloads:
        text = inputs.for_mirrors(mirrors.downloads, read_text(file) if file else "")
        result["apt-get"] = order.secret("apt-get", text)
    if mirrors.python_index:
        found = netrc.netrc(file).authenticators(urlsplit(mirrors.python_index).hostname or "") if file else None
        login = (found[0], found[2]) if found else None
        result["pip.conf"] = order.secret("pip.conf", settings.pip_conf_text(mirrors.python_index, login))
    return result


@contextmanager
def inputs_into_bundle(order: InputsRequest, into: Recording) -> Iterator[BuildInputs]:
    """All inputs are fetched, through mirrors where there are any, and kept in a bundle."""
    settings, mirrors = order.settings, order.settings.mirrors
    index, logins = without_login(mirrors.python_index or configured_index() or default_index())
    shelf = RecordingStore(into.folder, Fetcher(order.ca, settings.netrc_file, logins), mirrors)
    with bundle.environment(order.ca, settings.netrc_file) as environ:
        git = GitStore(into.folder / Bundle.GIT, mirrors.download, environ)
        for item in dict.fromkeys(item for need in order.needs.values() for item in need.stages.values()):
            order.note(f"fetching {item.url}")
            if isinstance(item, GitCommit):
                git.fetch(item.url, item.commit)
            else:
                shelf.get(item.url)
        materials = ContextBuilder(order.trees, shelf.get, git, order.note)
        stages = _contexts(materials, {target: need.stages for target, need in order.needs.items()})
    images = {image: into.add_image(image, mirrors.image(image), order.note) for image in sorted(order.images)}
    images |= {image: into.add_base(image, context) for image, context in order.bases.items()}
    wanted = frozenset(digest for need in order.needs.values() for digest in need.wheels)
    wheels = RecordingIndex(shelf, index.rstrip("/") + "/", wanted)
    content = ProxyContent(shelf, wheels, order.note)
    with serving(gateway(order.engine), content) as address:
        yield BuildInputs(images, stages, order.depot_secrets(address, recording=True))
    into.finish(shelf.files, wheels.wheels, order.needs)


@contextmanager
def inputs_from_bundle(order: InputsRequest, bundle: Bundle) -> Iterator[BuildInputs]:
    """All inputs come from a bundle."""
    shelf = bundle.shelf

    def file(url: str) -> Path:
        if not shelf.find(url):
            raise ResultError(f"{bundle.folder}: has no {url}; make the bundle again")
        shelf.check(url)
        return shelf.folder / shelf.files[url].path

    materials = ContextBuilder(order.trees, file, bundle.git, order.note)
    stages = _contexts(materials, {target: need.stages for target, need in order.needs.items()})
    content = ProxyContent(shelf, StoredIndex(shelf, bundle.manifest.wheels), order.note)
    with serving(gateway(order.engine), content) as address:
        yield BuildInputs(bundle.contexts(order.images), stages, order.depot_secrets(address, recording=False))


def _contexts(materials: ContextBuilder, wanted: Mapping[str, Mapping[str, Fetched]]) -> dict[str, dict[str, str]]:
    unique = dict.fromkeys(item for stages in wanted.values() for item in stages.values())
    made = {item: materials.context(item) for item in unique}
    return {target: {stage: made[item] for stage, item in stages.items()} for target, stages in wanted.items()}
