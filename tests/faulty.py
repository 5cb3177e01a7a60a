"""A proxy in front of a registry that does wrong what networks and registries do wrong, by rule, and counts.

`in_front_of` runs it in this process; `python3 faulty.py REGISTRY` as a service, which tests use by `FaultyService`.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast
from urllib.request import Request as HTTPRequest
from urllib.request import urlopen

Fault = Literal["busy", "broken", "drop-before", "drop-after", "cut", "lose", "forget", "slow"]
"""What happens to a request:

- `busy`: 429 with Retry-After
- `broken`: 500
- `drop-before`: the connection ends before the registry hears of it
- `drop-after`: the registry does it, and the connection ends before the answer
- `cut`: the connection ends in the middle of what is sent, up or down
- `lose`: an upload, or a manifest, is answered with 201 and thrown away
- `forget`: the registry does not know the upload any more
- `slow`: it takes `seconds` longer
"""
FAULTS: tuple[Fault, ...] = ("busy", "broken", "drop-before", "drop-after", "cut", "lose", "forget", "slow")
KINDS = (
    ("upload", r"/blobs/uploads"), ("blob", r"/blobs/"), ("manifest", r"/manifests/"), ("tags", r"/tags/list"),
    ("referrers", r"/referrers/"),
)  # fmt: skip
CHUNK = 1 << 16
HOP = {"connection", "transfer-encoding", "keep-alive"}
CONTROL = "/faults"
"""Where a service is told its rules: GET gives them with the requests so far, POST adds one, PUT changes how often the one
of that number still applies, DELETE forgets all."""


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
    """In both directions, with the headers."""
    fault: Fault | None


class Requests:
    """Requests so far, counted."""

    @property
    def requests(self) -> list[Request]:
        """Return all so far, with those whose answer has just arrived."""
        raise NotImplementedError

    def count(self, method: str = "", kind: str = "") -> int:
        """Requests of a method and a kind; without either, of all."""
        return sum(method in ("", r.method) and kind in ("", r.kind) for r in self.requests)

    def bytes(self, kind: str = "") -> int:
        """What those requests and their answers were on the wire."""
        return sum(r.bytes for r in self.requests if kind in ("", r.kind))

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Method and kind → requests."""
        return Counter((r.method, r.kind) for r in self.requests)


@dataclass
class Faulty(Requests):
    """The proxy: `address` is what clients get, `rules` may change at any time."""

    upstream: str
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
        with self.lock:
            assert self.lock.wait_for(lambda: not self.working, timeout=30), "requests do not end"
            return list(self.noted)

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


@dataclass(frozen=True)
class FaultyService(Requests):
    """A proxy that runs as a service of its own, used as `Faulty` is."""

    upstream: str
    """Where this machine reaches the registry without the proxy."""
    address: str

    def ask(self, method: str = "GET", path: str = "", content: object = None) -> Any:
        """Return what the service answers, from JSON."""
        data = json.dumps(content).encode()
        with urlopen(HTTPRequest(f"http://{self.address}{CONTROL}{path}", data, method=method), timeout=60) as answer:
            return json.load(answer)

    def rule(
        self, fault: Fault, method: str = ".*", path: str = "", *, times: int = 1, seconds: float = 0
    ) -> ServiceRule:
        """From now on; of several rules that fit, the first counts."""
        made = Rule(fault, method, path, times, seconds)
        return ServiceRule(self, int(self.ask("POST", content=asdict(made))), made)

    @property
    def rules(self) -> list[Rule]:
        return [Rule(**rule) for rule in self.ask()["rules"]]

    @property
    def requests(self) -> list[Request]:
        return [Request(**request) for request in self.ask(path="/requests")]

    def clear(self) -> None:
        """Forget requests and rules."""
        self.ask("DELETE")


@dataclass
class ServiceRule:
    """A rule of a service."""

    service: FaultyService
    number: int
    given: Rule

    @property
    def times(self) -> int:
        """How often it still applies."""
        return self.service.rules[self.number].times

    @times.setter
    def times(self, times: int) -> None:
        self.service.ask("PUT", f"/{self.number}", times)


class Counted:
    """A file that counts what passes."""

    def __init__(self, file: Any) -> None:
        self.file, self.bytes = file, 0

    def _counted(self, data: bytes) -> bytes:
        self.bytes += len(data)
        return data

    def readline(self, limit: int = -1) -> bytes:
        return self._counted(self.file.readline(limit))

    def read(self, size: int = -1) -> bytes:
        return self._counted(self.file.read(size))

    def write(self, data: bytes) -> int:
        return int(self.file.write(self._counted(data)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class Dropped(Exception):
    """The connection is closed without more ado."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    default_request_version = "HTTP/1.1"
    """Of what is no request, such as TLS: engines see by the answer that they have to do without."""

    def setup(self) -> None:
        super().setup()
        self.rfile, self.wfile = cast(Any, Counted(self.rfile)), cast(Any, Counted(self.wfile))
        self.noted = 0

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
        if self.path.startswith(CONTROL):
            self._control()
            self.noted = self._passed()
            return
        self.answered: int | None = None
        with self.faulty.at_work():
            rule = self.faulty.take(self.command, self.path)
            try:
                self._serve(rule)
            except (Dropped, OSError):
                self.answered, self.close_connection = None, True
            finally:
                kind = next((name for name, path in KINDS if re.search(path, self.path)), "other")
                passed = self._passed() - self.noted
                self.noted += passed
                fault = rule.fault if rule else None
                self.faulty.note(Request(self.command, self.path, kind, self.answered, passed, fault))

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = relay  # noqa: N815 - names of the standard library

    def _control(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        answer: object = None
        match self.command, self.path.removeprefix(CONTROL).strip("/"):
            case "GET", "requests":
                answer = [asdict(request) for request in self.faulty.requests]
            case "GET", _:
                answer = {"rules": [asdict(rule) for rule in self.faulty.rules]}
            case "POST", _:
                self.faulty.rule(**given)
                answer = len(self.faulty.rules) - 1
            case "PUT", number:
                self.faulty.rules[int(number)].times = given
            case "DELETE", _:
                self.faulty.clear()
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _passed(self) -> int:
        return cast(Counted, self.rfile).bytes + cast(Counted, self.wfile).bytes

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
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
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
            yield data

    def _unchunked(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield from self._pieces(size)
            self.rfile.readline()
        self.rfile.readline()

    def _drain(self) -> None:
        for _ in self._body() or ():
            pass

    def _answer(self, status: int, code: str | None, headers: dict[str, str]) -> None:
        content = json.dumps({"errors": [{"code": code, "message": "injected"}]}).encode() if code else b""
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
            self.wfile.write(data if sized else b"%x\r\n%s\r\n" % (len(data), data))
        if not bodiless and not sized:
            self.wfile.write(b"0\r\n\r\n")
        self.answered = answer.status


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, faulty: Faulty, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
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


if __name__ == "__main__":
    Server(Faulty(sys.argv[1]), ("", 5000)).serve_forever()
