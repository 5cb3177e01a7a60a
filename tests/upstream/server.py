"""An HTTP server of a folder and of the git repositories in it, with faults that tests switch on."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 20
GIT = "github.com"
"""The folder whose `*.git` folders are served by git."""


@dataclass(frozen=True)
class Request:
    """What was asked, and the status that was answered."""

    method: str
    path: str
    status: int


@dataclass
class _Failure:
    prefix: str
    status: int
    times: int


@dataclass
class Server:
    """What is served and what goes wrong. Paths and prefixes are those of addresses: `/linux.mellanox.com/…`."""

    root: Path
    port: int = 0
    login: str = ""
    """`user:password` that every request must have."""
    requests: list[Request] = field(default_factory=list)
    """All that was answered since the start or the last `forget`, in order."""
    _failures: list[_Failure] = field(default_factory=list)
    _truncated: list[str] = field(default_factory=list)
    _replaced: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, path_prefix: str, status: int = 500, times: int = 2) -> None:
        """Answer the next `times` requests for such paths with an error."""
        self._failures.append(_Failure(path_prefix, status, times))

    def truncate(self, path_prefix: str) -> None:
        """Announce the whole length, send half of it, and close the connection."""
        self._truncated.append(path_prefix)

    def replace(self, path_prefix: str, content: bytes) -> None:
        """Send this instead; of several prefixes the longest counts."""
        self._replaced[path_prefix] = content

    def forget(self) -> None:
        self.requests.clear()

    def failure(self, path: str) -> int | None:
        """The status of a failure that is due now, which is then used up."""
        with self._lock:
            for item in self._failures:
                if path.startswith(item.prefix) and item.times > 0:
                    item.times -= 1
                    return item.status
        return None

    def is_truncated(self, path: str) -> bool:
        return any(path.startswith(prefix) for prefix in self._truncated)

    def replacement(self, path: str) -> bytes | None:
        found = [prefix for prefix in self._replaced if path.startswith(prefix)]
        return self._replaced[max(found, key=len)] if found else None

    @contextmanager
    def running(self) -> Iterator[Server]:
        """Listens on every address, at `port`, which is chosen if it is 0."""
        handler = type("Handler", (_Handler,), {"owner": self})
        with ThreadingHTTPServer(("0.0.0.0", self.port), handler) as server:
            self.port = server.server_address[1]
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: Server
    protocol_version = "HTTP/1.1"
    timeout = 60
    """Seconds that a connection may be idle."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path).replace("/./", "/")  # as apt asks where the suite is `./`
        if status := self.owner.failure(path):
            return self._error(status)
        login = base64.b64encode(self.owner.login.encode()).decode()
        if login and self.headers.get("Authorization") != f"Basic {login}":
            return self._error(HTTPStatus.UNAUTHORIZED)
        if (content := self.owner.replacement(path)) is not None:
            return self._content(path, content)
        if path.startswith(f"/{GIT}/") and ".git/" in path:
            return self._git(path, address.query)
        file = (self.owner.root / path.lstrip("/")).resolve()
        inside = file.is_relative_to(self.owner.root.resolve().parent) and ".." not in path.split("/")
        if not inside or not file.is_file():
            return self._error(HTTPStatus.NOT_FOUND)
        return self._file(path, file)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _file(self, path: str, file: Path) -> None:
        state = file.stat()
        tag = f'"{state.st_mtime_ns:x}-{state.st_size:x}"'
        if self.headers.get("If-None-Match") == tag:
            self._start(HTTPStatus.NOT_MODIFIED, 0, tag)
            return
        self._start(HTTPStatus.OK, state.st_size, tag)
        left = state.st_size // 2 if self.owner.is_truncated(path) else state.st_size
        with file.open("rb") as source:
            while self.command != "HEAD" and left and (data := source.read(min(CHUNK, left))):
                self.wfile.write(data)
                left -= len(data)
        self.close_connection |= self.owner.is_truncated(path)

    def _content(self, path: str, content: bytes, status: int = HTTPStatus.OK, **fields: str) -> None:
        self._start(status, len(content), **fields)
        cut = self.owner.is_truncated(path)
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection |= cut

    def _git(self, path: str, query: str) -> None:
        """As git's manual describes: `git http-backend` is a CGI program."""
        environ = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.owner.root / GIT),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "PATH_INFO": path.removeprefix(f"/{GIT}"),
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "REMOTE_ADDR": self.client_address[0],
            # Whoever owns the cache folder, it was made for this.
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        body = self._body()
        done = subprocess.run(
            ["git", "http-backend"], env={**environ, "CONTENT_LENGTH": str(len(body))}, input=body,
            capture_output=True, check=False,
        )  # fmt: skip
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        status = int(fields.pop("Status", "200").split()[0])
        self._content(path, content, status, **fields)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _start(self, status: int, length: int, tag: str = "", **fields: str) -> None:
        self.owner.requests.append(Request(self.command, unquote(self.path), int(status)))
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="site"')
        if tag:
            self.send_header("ETag", tag)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def _error(self, status: int) -> None:
        text = f"stand-in: {HTTPStatus(status).phrase}\n".encode()
        self._body()
        self._start(status, len(text))
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Requests are kept, not printed."""
