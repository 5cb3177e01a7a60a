"""An HTTP server for a folder and its Git repositories, with faults that tests switch on."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tests import faulty
from tests.faulty import Answer, Dropped, Handler

GIT = "github.com"
"""The folder whose `*.git` folders are served by Git."""


class Request(NamedTuple):
    """A request, and the status of its answer."""

    method: str
    path: str
    status: int


@dataclass
class Server:
    """The served folder and the faults. Paths and prefixes begin with the host: `/linux.mellanox.com/…`."""

    root: Path
    port: int = 0
    login: str = ""
    """Required login as `user:password`. Empty: no login."""
    requests: list[Request] = field(default_factory=list)
    """All answered requests in order. Tests may clear the list."""
    truncated: list[str] = field(default_factory=list)
    """Prefixes of files that are truncated after the first half."""
    cut: threading.Event = field(default_factory=threading.Event)
    """If set, connections of truncated files are closed at once. Otherwise clients wait until the event is set."""
    replaced: dict[str, bytes] = field(default_factory=dict)
    """Maps prefixes of paths to the content that is sent instead. The longest matching prefix is used."""
    moved: bool = False
    """Whether files are answered with a redirect to the same path on another host, `localhost`."""
    failing: dict[str, list[int]] = field(default_factory=dict)
    """Maps prefixes of paths to the statuses of the next answers, the last status first."""

    def __post_init__(self) -> None:
        self.cut.set()

    @contextmanager
    def running(self) -> Iterator[Server]:
        """Listen on all addresses at `port`. Port 0 selects a free port."""
        server = faulty.Server(self.serve, "0.0.0.0", self.port)
        self.port = server.server_port
        with faulty.answering(server):
            yield self

    def serve(self, handler: Handler) -> None:
        address = urlsplit(handler.path)
        path = unquote(address.path).replace("/./", "/")  # apt requests such paths if the suite is `./`
        answer = self.answer(handler, path, address.query)
        self.requests.append(Request(handler.command, unquote(handler.path), answer.status))
        if answer.status == 200 and path.startswith(tuple(self.truncated)):
            answer = Answer(200, answer.content[: len(answer.content) // 2], answer.headers, len(answer.content))
        try:
            handler.send(answer)
        except Dropped:
            self.cut.wait(60)
            raise

    def answer(self, handler: Handler, path: str, query: str) -> Answer:
        body = handler.content()
        if self.moved and handler.headers["Host"].startswith("127."):
            return Answer(302, headers={"Location": f"http://localhost:{self.port}{handler.path}"})
        login = base64.b64encode(self.login.encode()).decode()
        if login and handler.headers.get("Authorization") != f"Basic {login}":
            return Answer(401, headers={"WWW-Authenticate": 'Basic realm="site"'})
        for prefix, statuses in self.failing.items():
            if statuses and path.startswith(prefix):
                return Answer(statuses.pop())
        if replaced := [prefix for prefix in self.replaced if path.startswith(prefix)]:
            return Answer(200, self.replaced[max(replaced, key=len)])
        if path.startswith(f"/{GIT}/") and ".git/" in path:
            return self._git(handler, path, query, body)
        file = (self.root / path.lstrip("/")).resolve()
        inside = file.is_relative_to(self.root.resolve().parent) and ".." not in path.split("/")
        return Answer(200, file.read_bytes()) if inside and file.is_file() else Answer(404)

    def _git(self, handler: Handler, path: str, query: str, body: bytes) -> Answer:
        """Answer with the CGI program `git http-backend`, as described in its manual."""
        environ = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.root / GIT), "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": handler.headers.get("Git-Protocol", ""),
            "PATH_INFO": path.removeprefix(f"/{GIT}"), "QUERY_STRING": query, "REQUEST_METHOD": handler.command,
            "CONTENT_TYPE": handler.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""),
            "REMOTE_ADDR": handler.client_address[0],
            # Git must accept any owner of the cache folder.
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], env=environ, input=body, capture_output=True, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        return Answer(int(fields.pop("Status", "200").split()[0]), content, fields)
