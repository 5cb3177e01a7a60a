"""Requests to servers over HTTP, with retries after temporary errors, and complete downloads."""

import hashlib
import io
import netrc
import random
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, IncompleteRead
from urllib3.util import Retry

from imagebuild.core.console import doing
from imagebuild.core.errors import Absent, CommandError, Unreachable
from imagebuild.core.fields import is_loopback

AGENT = "imagebuild"
CHUNK = 1 << 18
CONNECTIONS = 32
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 20
LEAST_ATTEMPTS = 3
"""Minimum number of attempts of a request, even if they take longer than `Patience.seconds`: a single upload may take
an hour."""
BUSY_FACTOR = 5
"""`Patience.seconds` is multiplied by this factor if the server asks for a pause: such a server is busy, not broken."""
LONGEST_PAUSE_S = 15.0
"""Longest pause between attempts, in seconds, unless the server asks for a longer pause."""
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of temporary errors."""
FINAL = (requests.exceptions.SSLError, requests.TooManyRedirects, ValueError)
"""Errors that are not retried. requests raises a ValueError for an invalid URL."""
SHOWN_LENGTH = 300
"""Maximum length of a server's answer in a message, in characters."""
MOST_REDIRECTS = 5
MOST_ASKED, SHOWN_CONTENT = 2000, 4000
"""Maximum number of requests that a client remembers, and of bytes of a small file that it remembers."""
TOLD_HEADERS = ("Content-Length", "Content-Type", "Location", "Server")
"""Headers of answers that a client remembers."""
MOST_ANSWER, MOST_HEADERS = 16 << 20, 1 << 20
"""Maximum size of an answer that is kept in memory, and of the headers of an answer, in bytes."""
GRACE_S, LEAST_SPEED = 30.0, 8192
"""Limit of the time that imagebuild waits for all parts of an answer together: the timeout of the request, these
seconds, and one second for each of these bytes that have arrived."""

T = TypeVar("T")
DOWNLOAD_TIMEOUT_S = 60
DOWN_S = 30
"""Seconds for which a server that did not answer is skipped, so that imagebuild does not wait again for each of its
URLs."""
LARGEST_INDEX, LARGEST_FILE = 256 << 20, 64 << 30
"""Maximum size of a key or an index of a package repository, and of other downloads, in bytes."""
Advance = Callable[[int, int | None], object]
"""A callback for progress, called with the number of bytes so far and the total number. The total number is None if it
is unknown."""


@dataclass(frozen=True)
class Patience:
    """How long a failed request is retried."""

    seconds: float = 25.0
    """Seconds after the first failure during which the request is retried. 0: the request is not retried."""
    backoff_s: float = 0.5
    """Length of the first pause, in seconds. Each further pause is twice as long. The lengths vary at random. If the
    server asks for a longer pause, the pause is as long as the server asks for."""


PATIENCE = Patience()


class TryAgain(Unreachable):
    """A temporary error: `Client.retried` makes another attempt."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        """Seconds that the server asks the client to wait. 0 if the server does not say."""

    @property
    def factor(self) -> int:
        """The factor by which `Patience.seconds` is multiplied."""
        return BUSY_FACTOR if self.pause_s else 1


class NoAnswer(TryAgain):
    """The server did not answer at all."""


class UnknownHost(NoAnswer):
    """No server has this name. Other than a server that does not answer, it is not asked again."""

    factor = 0


class _Timed(io.RawIOBase):
    """The bytes of an answer. Reading fails if the server sends them too slowly, or sends endless headers.
    The timeout of a socket limits only the wait for the next byte. A server could send one byte a minute."""

    def __init__(self, raw: io.RawIOBase, timeout_s: float) -> None:
        self.raw, self.left_s, self.done, self.has_headers = raw, timeout_s + GRACE_S, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        start = time.monotonic()
        count = self.raw.readinto(buffer)
        self.done += count or 0
        self.left_s += (count or 0) / LEAST_SPEED - (time.monotonic() - start)
        if self.left_s < 0:
            raise OSError(f"the server sends less than {LEAST_SPEED} bytes per second")
        if self.done > MOST_HEADERS and not self.has_headers:
            raise OSError(f"the server sends headers of more than {MOST_HEADERS >> 20} MiB")
        return count

    def close(self) -> None:
        self.raw.close()
        super().close()


class _TimedResponse(HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._timed = _Timed(self.fp.detach(), sock.gettimeout() or 0.0)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        super().begin()
        self._timed.has_headers = True


POOLS: dict[str, Any] = {
    scheme: type(
        "Pool", (pool,), {"ConnectionCls": type("C", (pool.ConnectionCls,), {"response_class": _TimedResponse})}
    )
    for scheme, pool in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool))
}


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = POOLS
        return manager


def join(base: str, url: str) -> str:
    """Return the URL that a server names, which may be relative to the URL `base`.
    Raises CommandError if it is not a URL."""
    try:
        _ = urlsplit(result := urljoin(base, url)).port
    except ValueError as error:
        problem = f"the server names the address {url[:SHOWN_LENGTH]!r}, which is not valid: {error}"
        raise CommandError(f"{urlsplit(base).netloc}: {problem}") from None
    return result


class Client:
    """An HTTP client that several threads may use."""

    def __init__(self, ca: Path | None = None, patience: Patience = PATIENCE, **headers: str) -> None:
        """Make a client. `ca` is a file of CA certificates. Default: the certificates of the HTTP library."""
        self.patience = patience
        self.session = requests.Session()
        # No compression: digests are computed over the bytes of the file.
        self.session.headers.update({"User-Agent": AGENT, "Accept-Encoding": "identity", **headers})
        self.session.auth = lambda request: request  # the HTTP library would send logins of ~/.netrc to every port
        self.session.verify = str(ca) if ca else True
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Adapter(pool_connections=4, pool_maxsize=CONNECTIONS))
        self.stopped = threading.Event()
        """Set after Ctrl-C, to end the requests of other threads."""
        self.asked: deque[str] = deque(maxlen=MOST_ASKED)
        """The last requests, each with the answer or the error."""
        self._repeating: set[int] = set()
        """Ids of the threads that are inside `retried`."""

    def retried(self, what: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it returns, and return its result.

        TryAgain causes another attempt after a pause, until `Patience.seconds` have passed. Then Unreachable is raised.
        A nested call of `retried` makes one attempt only: the outer call repeats it."""
        thread = threading.get_ident()
        if thread in self._repeating:
            return attempt()
        self._repeating.add(thread)
        attempts, first = 0, 0.0
        try:
            with doing(what) as activity:
                while True:
                    self.check_stopped(what)
                    try:
                        return attempt()
                    except TryAgain as again:
                        attempts, now = attempts + 1, time.monotonic()
                        first = first or now
                        backoff = self.patience.backoff_s * 2 ** (attempts - 1) * random.uniform(0.5, 1.5)  # noqa: S311
                        pause = max(min(backoff, LONGEST_PAUSE_S), again.pause_s)
                        limit = self.patience.seconds * again.factor
                        if pause > limit or (now - first + pause > limit and attempts >= LEAST_ATTEMPTS):
                            demand = f", and asks for a pause of {pause:.0f} s" if again.pause_s else ""
                            tries = f"after {attempts} attempts in {now - first:.0f} s" if attempts > 1 else "at once"
                            raise Unreachable(f"{again}{demand}; gave up {tries}") from again
                        activity.detail = f"{again}; trying again"
                        self.stopped.wait(pause)
        finally:
            self._repeating.remove(thread)

    def check_stopped(self, what: str) -> None:
        """Raise CommandError if the user has pressed Ctrl-C."""
        if self.stopped.is_set():
            raise CommandError(f"{what}: interrupted")

    def send(
        self, method: str, url: str, what: str, *, timeout_s: float = READ_TIMEOUT_S, stream: bool = False,
        **options: Any,
    ) -> requests.Response:  # fmt: skip
        """Send a request, and return the answer, which may be an error such as 404.

        `what` names the request in messages. With `stream`, the content of a successful answer is not read yet. The
        login is sent only to the host in `url`, not to a host that this host redirects to. Raises TryAgain for a
        temporary error and CommandError for a permanent one."""
        for _ in range(MOST_REDIRECTS + 1):
            self.check_stopped(what)
            if "\\" in (named := urlsplit(url).netloc):  # A\@B: to A, with the login of B
                raise CommandError(f"{what}: the host in {named!r} is unclear; remove the backslash")
            try:
                answer = self.session.request(
                    method, url, timeout=(CONNECT_TIMEOUT_S, timeout_s), stream=True, allow_redirects=False,
                    verify=self.session.verify,  # otherwise REQUESTS_CA_BUNDLE would replace the given certificates
                    **options,
                )  # fmt: skip
            except FINAL as error:
                self.asked.append(f"{method} {url}: {innermost_reason(error)}")
                raise CommandError(f"{what}: {innermost_reason(error)}") from None
            except (RequestException, HTTPError, OSError) as error:
                self.asked.append(f"{method} {url}: {innermost_reason(error)}")
                raise kind_of(error)(f"{what}: {innermost_reason(error)}") from None
            told = ", ".join(answer.headers[name] for name in TOLD_HEADERS if name in answer.headers)
            self.asked.append(f"{method} {url}: {answer.status_code} {answer.reason}; {told}")
            place = self.session.get_redirect_target(answer) if answer.is_redirect else None
            if not place or (method not in ("GET", "HEAD") and answer.status_code not in (307, 308)):
                break
            answer.close()
            there, options = join(url, place), {name: options[name] for name in options if name != "params"}
            if self.session.should_strip_auth(url, there):  # type: ignore[no-untyped-call]
                if isinstance(options.get("data"), Mapping):
                    raise CommandError(f"{what}: redirects the login to {urlsplit(there).netloc}; use another server")
                options |= {"auth": None, "headers": {**options.get("headers", {}), "Authorization": None}}
            url = there
        else:
            raise CommandError(f"{what}: the server redirects more than {MOST_REDIRECTS} times")
        if not (stream and answer.ok):
            # The HTTP library would read and decompress an answer without a limit.
            answer._content = b"".join(self.chunks(answer, what, MOST_ANSWER))
            answer._content_consumed = True  # type: ignore[attr-defined]
        if answer.status_code in RETRIED:
            try:
                pause_s = Retry().get_retry_after(answer.raw) or 0.0
            except (HTTPError, ValueError, OverflowError):
                pause_s = 0.0
            raise TryAgain(f"{what}: the server answered {describe_answer(answer)}", pause_s)
        return answer

    def chunks(self, answer: requests.Response, what: str, limit: int) -> Iterator[bytes]:
        """Yield the bytes of an answer as they arrive, without decompression.

        Raises TryAgain if the connection breaks before the end of the answer, and CommandError if the answer is larger
        than `limit` bytes."""
        done = 0
        try:
            with answer:
                for chunk in answer.raw.stream(CHUNK, decode_content=False):
                    self.check_stopped(what)
                    done += len(chunk)
                    if done > limit:
                        raise CommandError(f"{what}: is larger than the maximum of {limit} bytes; check the address")
                    yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise TryAgain(f"{what}: {innermost_reason(error)}") from None


def json_of(answer: requests.Response) -> dict[str, Any]:
    """Return the JSON object in an answer. An empty mapping if the answer is not a JSON object."""
    try:
        document = answer.json()
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def errors_in(answer: requests.Response) -> list[dict[str, Any]]:
    items = json_of(answer).get("errors")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def describe_answer(answer: requests.Response) -> str:
    """Return the status of an answer for messages: `403 (DENIED: access to the resource is denied)`."""
    texts = [": ".join(str(item[key]) for key in ("code", "message") if item.get(key)) for item in errors_in(answer)]
    text = "; ".join(dict.fromkeys(texts)) or str(answer.reason or "")
    return f"{answer.status_code} ({text[:SHOWN_LENGTH]})"


def innermost(error: Exception) -> Exception:
    """Return the innermost of the errors that the HTTP library put into each other."""
    while causes := [c for c in (getattr(error, "reason", None), *error.args) if isinstance(c, Exception)]:
        error = causes[0]
    return error


def kind_of(error: Exception) -> type[TryAgain]:
    """Return the kind of a failure without an answer."""
    cause = innermost(error).__cause__
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return UnknownHost
    return NoAnswer if isinstance(error, requests.ConnectionError) else TryAgain


def innermost_reason(error: Exception) -> str:
    """Return the text of the innermost cause of an error. The HTTP library wraps the cause in long texts."""
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    inner = innermost(error)
    if isinstance(inner, IncompleteRead):
        return f"the transfer ended after {inner.partial} of {int(inner.partial or 0) + int(inner.expected or 0)} bytes"
    text = re.sub(r"^(C|HTTPS?Connection(Pool)?)\(.*?\): ", "", str(inner).rpartition(">: ")[2])
    return text or type(inner).__name__


def login_for(url: str, netrc_file: Path | None) -> tuple[str, str] | None:
    """Return the user and the password in a URL, or for it in a netrc file. None if there are none.

    An entry `machine HOST` is only for TLS and this machine: another server could pretend to be the host. As for apt,
    `machine http://HOST` is for servers without TLS. The entry `default` is not used: a project chooses the hosts."""
    address, hosts = urlsplit(url), netrc.netrc(netrc_file).hosts if netrc_file else {}
    if address.password is not None:
        return unquote(address.username or ""), unquote(address.password)
    safe = address.scheme == "https" or is_loopback(address.netloc)
    names = [f"{address.scheme}://{address.netloc}", f"{address.scheme}://{address.hostname}"]
    entry = next((hosts[name] for name in (*names, *[address.hostname] * safe) if name in hosts), None)
    return (entry[0], entry[2]) if entry else None


class Downloads:
    """A downloader of files that several threads may use.

    Its methods raise Absent if the server does not have the file, Unreachable if the file cannot be fetched, and
    CommandError if the server sends a web page instead."""

    def __init__(
        self, rewrite: Callable[[str], str] = str, ca: Path | None = None, netrc_file: Path | None = None, *,
        patience: Patience = PATIENCE, headers: Mapping[str, str] | None = None, trusted: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """Make a downloader. `rewrite` turns a URL into the URL of its mirror.

        `netrc_file` contains passwords of hosts. `trusted` are the hosts, with ports, to which passwords are sent, and
        the only ones on this machine that are asked. Default: all hosts."""
        self.client = Client(ca, patience, **(headers or {}))
        self._rewrite, self._netrc, self._trusted = rewrite, netrc_file, trusted
        self._down: dict[str, tuple[float, str]] = {}
        """Maps each server that did not answer to the time of the failed request and the reason."""

    def download(self, url: str, target: Path | None = None, advance: Advance = lambda _done, _total: None) -> str:
        """Download a file to `target`, and return its sha256. Without `target`, the content is not stored.
        Raises CommandError if the server does not announce the length of the file."""

        def read(answer: requests.Response) -> str:
            if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
                unnoticed = "the server does not say how long the file is, so a truncated file would not be noticed"
                raise CommandError(f"{url}: {unnoticed}; download the file from another server")
            digest, done = hashlib.sha256(), 0
            with target.open("wb") if target else nullcontext() as file:
                for chunk in self.client.chunks(answer, url, LARGEST_FILE):
                    digest.update(chunk)
                    if file:
                        file.write(chunk)
                    done += len(chunk)
                    advance(done, announced_length(answer))
            return digest.hexdigest()

        return self._ask("GET", url, read)

    def length(self, url: str) -> int | None:
        """Return the size of a file in bytes without downloading it. None if the server does not say."""
        return self._ask("HEAD", url, announced_length)

    def read(self, url: str) -> bytes:
        """Download a small file, and return it. Raises CommandError if it is larger than LARGEST_INDEX."""
        content = self._ask("GET", url, lambda answer: b"".join(self.client.chunks(answer, url, LARGEST_INDEX)))
        begin = content[:SHOWN_CONTENT].decode(errors="replace") if b"\0" not in content[:SHOWN_CONTENT] else ""
        self.client.asked.append(f"{url} contains {len(content)} bytes\n{begin}")
        return content

    def _ask(self, method: str, url: str, read: Callable[[requests.Response], T]) -> T:
        address = self._rewrite(url)
        where = url if address == url else f"{url} (as {address})"
        try:
            host = urlsplit(address).netloc
        except ValueError as error:  # such as https://[::1
            raise CommandError(f"{where}: is not an address: {error}; correct it") from None
        trusted = self._trusted is None or host in self._trusted
        if not trusted and is_loopback(host):
            raise CommandError(f"{where}: a build step may not ask this machine; name the server in the matrix")
        since, reason = self._down.get(host, (0.0, ""))
        if reason and time.monotonic() - since < DOWN_S:
            raise Unreachable(f"{where}: {reason}")

        def attempt() -> T:
            answer = self.client.send(
                method, address, where, timeout_s=DOWNLOAD_TIMEOUT_S, stream=True,
                auth=login_for(address, self._netrc) if trusted else None,
            )  # fmt: skip
            with answer:
                if answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                    raise Absent(f"{where}: the server does not have the file ({answer.status_code})")
                if answer.status_code != HTTPStatus.OK:
                    raise Unreachable(f"{where}: the server answered {describe_answer(answer)}")
                if answer.headers.get("Content-Type", "").startswith("text/html"):
                    remedy = "if the server needs a login, add them to the netrc file in your configuration"
                    raise CommandError(f"{url}: is a web page, not a file; {remedy}")
                return read(answer)

        try:
            return self.client.retried(f"download of {where}", attempt)
        except Unreachable as error:
            if isinstance(error.__cause__, NoAnswer):
                self._down[host] = time.monotonic(), str(error.__cause__).removeprefix(f"{where}: ")
            raise


def announced_length(answer: requests.Response) -> int | None:
    """Return the length of the content in bytes, from the header of an answer.
    None if the header does not contain a length."""
    length = answer.headers.get("Content-Length", "")
    return int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
