"""A proxy in front of a registry that injects faults of networks and registries by rules, and counts requests."""

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
"""What happens to a request:

- `busy`: 429 with Retry-After
- `broken`: 500
- `drop-before`: the connection ends before the registry hears of it
- `drop-after`: the registry does it, and the connection ends before the answer
- `cut`: the connection ends in the middle of what is sent, up or down
- `lose`: an upload, or a manifest, is answered with 201 and thrown away
- `forget`: the registry does not know the upload any more
- `slow`: it takes `seconds` longer
- `expired`: 401, as the token has ended; the proxy gives another one
"""
KINDS = (
    ("upload", r"/blobs/uploads"), ("blob", r"/blobs/"), ("manifest", r"/manifests/"), ("tags", r"/tags/list"),
    ("referrers", r"/referrers/"),
)  # fmt: skip
HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Dropped(Exception):
    """The connection is closed without an answer."""


@dataclass
class Answer(Exception):
    """What a server answers; raised where it refuses.

    `length` is what the header says, of what is cut off; -1: there is none, and the connection ends.
    """

    status: int
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


def refusal(status: int, code: str, message: str = "", **headers: str) -> Answer:
    return Answer(status, json.dumps({"errors": [{"code": code, "message": message}]}).encode(), headers)


class Handler(BaseHTTPRequestHandler):
    """An HTTP handler that reads complete requests and sends complete answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    default_request_version = "HTTP/1.1"
    """The version for invalid requests, such as TLS. From the answer, engines learn that the registry has no TLS."""

    def handle(self) -> None:
        # Who tries TLS first, as docker does, needs an answer that is HTTP to try again without.
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
        """What is sent, whole; or half of it is read, and the connection ends."""
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
            raise Dropped  # by the client
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
    """A fault, and how often it happens."""

    fault: Fault
    method: str = ".*"
    """Regular expression that matches the whole method. `path` matches anywhere in the path."""
    path: str = ""
    times: int = 1
    seconds: float = 0
    """The delay of `slow`, or the Retry-After of `busy`."""


@dataclass(frozen=True)
class Request:
    """A request and its answer, as transferred."""

    method: str
    path: str
    kind: str
    status: int | None
    """None if the connection was dropped."""
    bytes: int
    """Size of both bodies."""
    fault: Fault | None


@dataclass
class Faulty:
    """The proxy. Clients use its `address`. Its rules may change at any time."""

    upstream: str
    """Address of the registry without the proxy."""
    address: str = ""
    rules: list[Rule] = field(default_factory=list)
    noted: list[Request] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)
    working: int = 0

    def rule(self, fault: Fault, method: str = ".*", path: str = "", *, times: int = 1, seconds: float = 0) -> Rule:
        """Add a rule. If several rules match, the first one is used."""
        made = Rule(fault, method, path, times, seconds)
        self.rules.append(made)
        return made

    @property
    def requests(self) -> list[Request]:
        """All requests so far, including those whose answer has just arrived."""
        with self.lock:
            assert self.lock.wait_for(lambda: not self.working, timeout=30), "requests do not end"
            return list(self.noted)

    def count(self, method: str = "", kind: str = "") -> int:
        """Return the number of requests with a method and of a kind. Default: all requests."""
        return sum(method in ("", r.method) and kind in ("", r.kind) for r in self.requests)

    def clear(self) -> None:
        """Remove all rules. Then wait for the running requests, and forget all requests."""
        with self.lock:
            self.rules.clear()
            self.lock.notify_all()
        _ = self.requests
        self.noted.clear()

    def serve(self, handler: Handler) -> None:
        """Answer a request with a fault if a rule matches, or else with the answer of the registry."""
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
                with self.lock:  # as long as the rule is there
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
        """Send a request to the registry."""
        with closing(HTTPConnection(self.upstream, timeout=60)) as connection:
            # Some clients send a header several times, such as Accept.
            names = [name for name in handler.headers if name.lower() not in HOP]
            headers = {name: ", ".join(handler.headers.get_all(name, ())) for name in names}
            connection.request(method, path, content, headers | {"Content-Length": str(len(content))})
            found = connection.getresponse()
            whole = found.read()
            length = int(found.headers.get("Content-Length", len(whole)))
            return Answer(found.status, whole, {n: v for n, v in found.getheaders() if n.lower() not in HOP}, length)


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread, and yield its address."""
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
    """Run a proxy for the registry at `host:port`, on a free port of this machine."""
    faulty = Faulty(upstream)
    with answering(Server(faulty.serve)) as faulty.address:
        yield faulty
