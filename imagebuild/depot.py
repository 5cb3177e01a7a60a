"""A server on the engine's bridge from which the steps of a build fetch packages and wheels.

For apt it is a proxy, so that addresses, and what apt's preferences say about them, stay as they are. For pip it is an
index. It records what it hands on, or plays back what was recorded. BuildKit itself asks it nothing.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from imagebuild import programs
from imagebuild.engine import Endpoint
from imagebuild.errors import CommandError, ConfigError, ImagebuildError
from imagebuild.fetch import NotThere
from imagebuild.shelf import RecordingShelf, Shelf, Sink, Start
from imagebuild.wheelindex import Index

Log = Callable[[str], None]


@dataclass(frozen=True)
class Content:
    """Where a depot gets things from."""

    shelf: Shelf
    index: Index
    log: Log
    """Told what could not be had."""

    def file(self, url: str, start: Start) -> Path:
        """A download. Raises NotThere, or CommandError while recording."""
        if isinstance(self.shelf, RecordingShelf):
            return self.shelf.get(url, start)
        found = self.shelf.find(url)
        if found is None:
            raise NotThere(f"the bundle has no {url}")
        return found


def gateway(engine: Endpoint) -> str:
    """The address of this machine that the steps of builds reach. Raises ConfigError for an engine elsewhere."""
    if not engine.host.startswith("unix://"):
        raise ConfigError(f"bundles need an engine on this machine, and {engine.host} may be elsewhere")
    template = "{{(index .IPAM.Config 0).Gateway}}"
    command = ("docker", "network", "inspect", "bridge", "--format", template)
    return programs.run(*command, env=engine.environment, timeout=20).strip()


@contextmanager
def serving(address: str, content: Content) -> Iterator[str]:
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
    content: Content

    def do_GET(self) -> None:
        self.started = False
        try:
            self._answer()
        except NotThere as error:
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
            raise NotThere(f"{self.path}: a depot has no such page")

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
