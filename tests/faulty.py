"""A proxy in front of a registry that does wrong what networks and registries do wrong, by rule, and counts."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, cast

Fault = Literal["busy", "broken", "drop-before", "drop-after", "cut", "lose", "forget", "slow", "expired", "denied"]
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
- `denied`: 401 without a way to get one
"""
KINDS = (
    ("upload", r"/blobs/uploads"), ("blob", r"/blobs/"), ("manifest", r"/manifests/"), ("tags", r"/tags/list"),
    ("referrers", r"/referrers/"),
)  # fmt: skip
CHUNK = 1 << 16
HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Rule:
    """What goes wrong, and how often."""

    fault: Fault
    method: str = ".*"
    """Regular expression, that fits the whole; that of `path` fits somewhere."""
    path: str = ""
    times: int = 1
    seconds: float = 0
    """Of `slow`, and Retry-After of `busy`."""


@dataclass(frozen=True)
class Request:
    """A request as it was on the wire."""

    method: str
    path: str
    kind: str
    status: int | None
    """None if the connection was dropped instead."""
    bytes: int
    """Of the bodies, in both directions."""
    fault: Fault | None


@dataclass
class Faulty:
    """The proxy: `address` is what clients get, `rules` may change at any time."""

    upstream: str
    """Where the registry is reached without the proxy."""
    address: str = ""
    rules: list[Rule] = field(default_factory=list)
    noted: list[Request] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)
    working: int = 0

    def rule(self, fault: Fault, method: str = ".*", path: str = "", *, times: int = 1, seconds: float = 0) -> Rule:
        """From now on; of several rules that fit, the first counts."""
        made = Rule(fault, method, path, times, seconds)
        self.rules.append(made)
        return made

    def take(self, method: str, path: str) -> Rule | None:
        with self.lock:
            for rule in self.rules:
                if rule.times > 0 and re.fullmatch(rule.method, method) and re.search(rule.path, path):
                    rule.times -= 1
                    return rule
        return None

    def note(self, request: Request) -> None:
        with self.lock:
            self.noted.append(request)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self.lock:
            self.working += 1
        try:
            yield
        finally:
            with self.lock:
                self.working -= 1
                self.lock.notify_all()

    @property
    def requests(self) -> list[Request]:
        """All so far, with those whose answer has just arrived."""
        with self.lock:
            assert self.lock.wait_for(lambda: not self.working, timeout=30), "requests do not end"
            return list(self.noted)

    def count(self, method: str = "", kind: str = "") -> int:
        """Requests of a method and a kind; without either, of all."""
        return sum(method in ("", r.method) and kind in ("", r.kind) for r in self.requests)

    def bytes(self, kind: str = "") -> int:
        """What those requests and their answers carried."""
        return sum(r.bytes for r in self.requests if kind in ("", r.kind))

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Method and kind → requests."""
        return Counter((r.method, r.kind) for r in self.requests)

    def clear(self) -> None:
        """Forget rules, and requests when those under way have ended; a slow one waits no longer."""
        with self.lock:
            self.rules.clear()
            self.lock.notify_all()
        _ = self.requests
        self.noted.clear()

    def delay(self, rule: Rule) -> None:
        """Wait as long as the rule says, while it is there."""
        with self.lock:
            self.lock.wait_for(lambda: not any(other is rule for other in self.rules), timeout=rule.seconds)


class Dropped(Exception):
    """The connection is closed without more ado."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    default_request_version = "HTTP/1.1"
    """Of what is no request, such as TLS: engines see by the answer that they have to do without."""

    def handle(self) -> None:
        # Who tries TLS first, as docker does, needs an answer that is HTTP to try again without.
        if self.connection.recv(1, socket.MSG_PEEK) == b"\x16":
            self.connection.recv(CHUNK)
            self.connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            return
        super().handle()

    def log_message(self, *_: object) -> None:
        pass

    @property
    def faulty(self) -> Faulty:
        return cast(Server, self.server).faulty

    def relay(self) -> None:
        self.answered: int | None = None
        self.passed = 0
        with self.faulty.at_work():
            rule = self.faulty.take(self.command, self.path)
            try:
                self._serve(rule)
            except (Dropped, OSError):
                self.answered, self.close_connection = None, True
            finally:
                kind = next((name for name, path in KINDS if re.search(path, self.path)), "other")
                fault = rule.fault if rule else None
                self.faulty.note(Request(self.command, self.path, kind, self.answered, self.passed, fault))

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = relay  # noqa: N815 - names of the standard library

    def _serve(self, rule: Rule | None) -> None:
        fault = rule.fault if rule else None
        assert rule or not fault
        if fault == "drop-before":
            raise Dropped
        if rule and fault == "slow":
            self.faulty.delay(rule)
        if rule and fault in ("busy", "broken"):
            self._drain()
            codes = {"busy": (429, "TOOMANYREQUESTS"), "broken": (500, "UNKNOWN")}
            headers = {"Retry-After": f"{rule.seconds:.0f}"} if fault == "busy" else {}
            self._answer(*codes[fault], headers)
            return
        if fault in ("expired", "denied"):
            self._drain()
            realm = f'Bearer realm="http://{self.faulty.address}/token",service="test"'
            self._answer(401, "UNAUTHORIZED", {"WWW-Authenticate": realm} if fault == "expired" else {})
            return
        if self.path.startswith("/token?"):
            self._answer(200, None, {}, b'{"token": "another"}')
            return
        if fault == "lose":
            self._drain()
            self._answer(201, None, {"Location": self.path.partition("?")[0]})
            return
        if fault == "forget":
            self._upstream("DELETE", self.path.partition("?")[0]).close()
        if fault == "cut" and "Content-Length" in self.headers:
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            raise Dropped
        connection = self._upstream(self.command, self.path, self._body())
        try:
            answer = connection.getresponse()
            if fault == "drop-after":
                answer.read()
                raise Dropped
            self._hand_on(answer, half=fault == "cut")
        finally:
            connection.close()

    def _upstream(self, method: str, path: str, body: Iterator[bytes] | None = None) -> HTTPConnection:
        connection = HTTPConnection(self.faulty.upstream, timeout=60)
        # Some clients send a header several times, such as Accept.
        headers = {n: ", ".join(self.headers.get_all(n, ())) for n in self.headers if n.lower() not in HOP}
        if body is None:
            headers.pop("Content-Length", None)
        chunked = body is not None and "Content-Length" not in self.headers
        if chunked:
            headers["Transfer-Encoding"] = "chunked"
        try:
            connection.request(method, path, body, headers, encode_chunked=chunked)
        except BaseException:
            connection.close()
            raise
        return connection

    def _body(self) -> Iterator[bytes] | None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self._unchunked()
        if "Content-Length" in self.headers:
            return self._pieces(int(self.headers["Content-Length"]))
        return None

    def _pieces(self, left: int) -> Iterator[bytes]:
        while left:
            if not (data := self.rfile.read(min(left, CHUNK))):
                raise Dropped  # by the client
            left -= len(data)
            self.passed += len(data)
            yield data

    def _unchunked(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield from self._pieces(size)
            self.rfile.readline()
        self.rfile.readline()

    def _drain(self) -> None:
        for _ in self._body() or ():
            pass

    def _answer(self, status: int, code: str | None, headers: dict[str, str], content: bytes = b"") -> None:
        content = json.dumps({"errors": [{"code": code, "message": "injected"}]}).encode() if code else content
        self.send_response(status)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.answered = status

    def _hand_on(self, answer: HTTPResponse, *, half: bool) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        bodiless = self.command == "HEAD" or answer.status in (204, 304)
        sized = "Content-Length" in answer.headers
        if not bodiless and not sized:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if half:
            self.wfile.write(answer.read(int(answer.headers.get("Content-Length", 0)) // 2))
            raise Dropped
        while not bodiless and (data := answer.read(CHUNK)):
            self.passed += len(data)
            self.wfile.write(data if sized else b"%x\r\n%s\r\n" % (len(data), data))
        if not bodiless and not sized:
            self.wfile.write(b"0\r\n\r\n")
        self.answered = answer.status


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, faulty: Faulty) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faulty = faulty


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """A server that answers in a thread, and its address."""
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
    """The proxy of a registry at `host:port`, on a free port of the loopback."""
    faulty = Faulty(upstream)
    with answering(Server(faulty)) as faulty.address:
        yield faulty
