"""A proxy in front of a registry that injects faults of networks and registries by rules, and records requests."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, cast

Fault = Literal["busy", "broken", "drop-before", "drop-after", "cut", "lose", "forget", "slow", "expired"]
"""A fault that the proxy injects into a request:

- `busy`: answer 429 with Retry-After
- `broken`: answer 500
- `drop-before`: close the connection before the registry gets the request
- `drop-after`: close the connection after the registry has executed the request
- `cut`: close the connection in the middle of the content, in either direction
- `lose`: answer an upload or a manifest with 201, and discard the content
- `forget`: cancel the upload, so that the registry does not know it any more
- `slow`: wait `seconds` before the answer
- `expired`: answer 401, as for an expired token; the proxy issues a new token
"""
KINDS = (
    ("upload", r"/blobs/uploads"), ("blob", r"/blobs/"), ("manifest", r"/manifests/"), ("tags", r"/tags/list"),
    ("referrers", r"/referrers/"),
)  # fmt: skip
HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Dropped(Exception):
    """Raised to close the connection without an answer."""


@dataclass
class Answer(Exception):
    """An answer of a server. Refusals are raised.

    `length` is the Content-Length header if it differs from the content's length. -1: no header, and the connection
    is closed after the content.
    """

    status: int
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


def refusal(status: int, code: str, message: str = "", **headers: str) -> Answer:
    return Answer(status, json.dumps({"errors": [{"code": code, "message": message}]}).encode(), headers)


class Handler(BaseHTTPRequestHandler):
    """A handler that reads complete requests and sends complete answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    default_request_version = "HTTP/1.1"
    """The HTTP version of answers to invalid requests. The default of the library has no status line."""

    def handle(self) -> None:
        # docker tries TLS first. It repeats the request without TLS only after an HTTP answer.
        if self.connection.recv(1, socket.MSG_PEEK) == b"\x16":
            self.connection.recv(1 << 16)
            self.connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            return
        super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def relay(self) -> None:
        try:
            cast(Server, self.server).serve(self)
        except (Dropped, OSError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = relay  # noqa: N815 - names of the standard library

    def content(self, *, half: bool = False) -> bytes:
        """Return the complete content of the request. If `half`, read only half of it and raise Dropped."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = b""
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        length = int(self.headers.get("Content-Length", 0))
        if half and length:
            self.rfile.read(length // 2)
            raise Dropped
        content = self.rfile.read(length)
        if len(content) < length:
            raise Dropped  # the client closed the connection
        return content

    def send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        length = len(answer.content) if answer.length is None else answer.length
        stated = {"Content-Length": str(length)} if length >= 0 else {}
        for name, value in {**answer.headers, **stated}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)
            if len(answer.content) != length:
                raise Dropped


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, serve: Callable[[Handler], None], host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), Handler)
        self.serve = serve


@dataclass
class Rule:
    """A fault, the requests that it applies to, and how often it happens."""

    fault: Fault
    method: str = ".*"
    """Regular expression for the complete method."""
    path: str = ""
    """Regular expression for any part of the path."""
    times: int = 1
    seconds: float = 0
    """The delay of `slow`, or Retry-After of `busy`."""


@dataclass(frozen=True)
class Request:
    """A recorded request."""

    method: str
    path: str
    kind: str
    status: int | None
    """The status of the answer. None: the connection was closed without an answer."""
    bytes: int
    """The size of the bodies in both directions."""
    fault: Fault | None


@dataclass
class Faulty:
    """The proxy. Clients connect to `address`; `rules` may change at any time."""

    upstream: str
    """`host:port` of the registry itself."""
    address: str = ""
    rules: list[Rule] = field(default_factory=list)
    noted: list[Request] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)
    working: int = 0

    def rule(self, fault: Fault, method: str = ".*", path: str = "", *, times: int = 1, seconds: float = 0) -> Rule:
        """Add a rule. If several rules match a request, the first is used."""
        made = Rule(fault, method, path, times, seconds)
        self.rules.append(made)
        return made

    @property
    def requests(self) -> list[Request]:
        """Wait until no request is running; return all recorded requests."""
        with self.lock:
            assert self.lock.wait_for(lambda: not self.working, timeout=30), "requests do not end"
            return list(self.noted)

    def count(self, method: str = "", kind: str = "") -> int:
        """Return the number of requests with this method and this kind. Default: any method, any kind."""
        return sum(method in ("", r.method) and kind in ("", r.kind) for r in self.requests)

    def clear(self) -> None:
        """Remove all rules, wait until running requests have ended, and remove all recorded requests."""
        with self.lock:
            self.rules.clear()
            self.lock.notify_all()
        _ = self.requests
        self.noted.clear()

    def serve(self, handler: Handler) -> None:
        """Answer a request from the registry, or with the fault of the first matching rule."""
        status, passed, method, path = None, 0, handler.command, handler.path
        with self.lock:
            self.working += 1
            fitting = (r for r in self.rules if re.fullmatch(r.method, method) and re.search(r.path, path))
            if rule := next((r for r in fitting if r.times > 0), None):
                rule.times -= 1
        try:
            content = handler.content(half=bool(rule and rule.fault == "cut"))
            answer = self.answer(handler, rule, content)
            passed = len(content) + len(answer.content)
            handler.send(answer)
            status = answer.status
        finally:
            kind = next((name for name, expression in KINDS if re.search(expression, path)), "other")
            with self.lock:
                self.noted.append(Request(method, path, kind, status, passed, rule.fault if rule else None))
                self.working -= 1
                self.lock.notify_all()

    def answer(self, handler: Handler, rule: Rule | None, content: bytes) -> Answer:
        path = handler.path.partition("?")[0]
        if path == "/token":
            return Answer(200, b'{"token": "another"}')
        match rule:
            case Rule("drop-before"):
                raise Dropped
            case Rule("slow"):
                with self.lock:  # wait only while the rule exists
                    self.lock.wait_for(lambda: not any(other is rule for other in self.rules), timeout=rule.seconds)
            case Rule("busy"):
                return refusal(429, "TOOMANYREQUESTS", "injected", **{"Retry-After": f"{rule.seconds:.0f}"})
            case Rule("broken"):
                return refusal(500, "UNKNOWN", "injected")
            case Rule("expired"):
                realm = f'Bearer realm="http://{self.address}/token",service="test"'
                return refusal(401, "UNAUTHORIZED", "injected", **{"WWW-Authenticate": realm})
            case Rule("lose"):
                return Answer(201, headers={"Location": path})
            case Rule("forget"):
                self.ask(handler, "DELETE", path)
        answer = self.ask(handler, handler.command, handler.path, content)
        if rule and rule.fault == "drop-after":
            raise Dropped
        if rule and rule.fault == "cut":
            answer.content = answer.content[: len(answer.content) // 2]
        return answer

    def ask(self, handler: Handler, method: str, path: str, content: bytes = b"") -> Answer:
        """Send a request to the registry; return its answer."""
        with closing(HTTPConnection(self.upstream, timeout=60)) as connection:
            # Some clients repeat a header, such as Accept.
            names = [name for name in handler.headers if name.lower() not in HOP]
            headers = {name: ", ".join(handler.headers.get_all(name, ())) for name in names}
            connection.request(method, path, content, headers | {"Content-Length": str(len(content))})
            found = connection.getresponse()
            whole = found.read()
            length = int(found.headers.get("Content-Length", len(whole)))
            return Answer(found.status, whole, {n: v for n, v in found.getheaders() if n.lower() not in HOP}, length)


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread; yield its address."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def in_front_of(upstream: str) -> Iterator[Faulty]:
    """Run a proxy for the registry at `host:port`, on a free port of the loopback interface."""
    faulty = Faulty(upstream)
    with answering(Server(faulty.serve)) as faulty.address:
        yield faulty
