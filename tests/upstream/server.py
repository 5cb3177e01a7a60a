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
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

GIT = "github.com"
"""The folder whose `*.git` folders are served by git."""


class Request(NamedTuple):
    """What was asked, and the status that was answered."""

    method: str
    path: str
    status: int


@dataclass
class Server:
    """What is served and what goes wrong. Paths and prefixes are those of addresses: `/linux.mellanox.com/…`."""

    root: Path
    port: int = 0
    login: str = ""
    """`user:password` that every request must have."""
    requests: list[Request] = field(default_factory=list)
    """All that was answered since the start or the last `clear`, in order."""
    truncated: list[str] = field(default_factory=list)
    """Prefixes of what is announced whole, sent by half, and then cut off."""
    cut: threading.Event = field(default_factory=threading.Event)
    """Set: what is truncated is cut off at once; else the client waits until it is set."""
    replaced: dict[str, bytes] = field(default_factory=dict)
    """Prefix → what is sent instead; the longest counts."""
    failing: dict[str, list[int]] = field(default_factory=dict)
    """Prefix → the statuses of the next requests."""

    def __post_init__(self) -> None:
        self.cut.set()

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
        login = base64.b64encode(self.owner.login.encode()).decode()
        if login and self.headers.get("Authorization") != f"Basic {login}":
            return self._error(HTTPStatus.UNAUTHORIZED)
        replaced = sorted((prefix for prefix in self.owner.replaced if path.startswith(prefix)), key=len)
        for prefix, statuses in self.owner.failing.items():
            if statuses and path.startswith(prefix):
                return self._error(statuses.pop())
        if replaced:
            return self._send(path, self.owner.replaced[replaced[-1]])
        if path.startswith(f"/{GIT}/") and ".git/" in path:
            return self._git(path, address.query)
        file = (self.owner.root / path.lstrip("/")).resolve()
        inside = file.is_relative_to(self.owner.root.resolve().parent) and ".." not in path.split("/")
        return self._send(path, file.read_bytes()) if inside and file.is_file() else self._error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _git(self, path: str, query: str) -> None:
        """As git's manual describes: `git http-backend` is a CGI program."""
        body = self._body()
        environ = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.owner.root / GIT), "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "PATH_INFO": path.removeprefix(f"/{GIT}"), "QUERY_STRING": query, "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""), "REMOTE_ADDR": self.client_address[0],
            # Whoever owns the cache folder, it was made for this.
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], env=environ, input=body, capture_output=True, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self._send(path, content, int(fields.pop("Status", "200").split()[0]), **fields)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _error(self, status: int) -> None:
        self._body()
        self._send("", f"stand-in: {HTTPStatus(status).phrase}\n".encode(), status)

    def _send(self, path: str, content: bytes, status: int = HTTPStatus.OK, **fields: str) -> None:
        self.owner.requests.append(Request(self.command, unquote(self.path), int(status)))
        self.send_response(status)
        if status == HTTPStatus.UNAUTHORIZED:
            fields["WWW-Authenticate"] = 'Basic realm="site"'
        for name, value in {"Content-Length": str(len(content)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if any(path.startswith(prefix) for prefix in self.owner.truncated):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.owner.cut.wait(self.timeout)
            self.close_connection = True
        else:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Requests are kept, not printed."""
