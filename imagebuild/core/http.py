"""Ask servers over HTTP. What may pass is tried again; a download is whole, or it is an error."""

from __future__ import annotations

import hashlib
import netrc
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError, IncompleteRead
from urllib3.util import Retry

from imagebuild.core.console import doing
from imagebuild.core.errors import Absent, CommandError, Unreachable

AGENT = "imagebuild"
CHUNK = 1 << 18
CONNECTIONS = 32
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 20
LEAST_ATTEMPTS = 3
"""Attempts that are made even if each takes longer than the patience: an upload may take an hour."""
BUSY_FACTOR = 5
"""Factor for the patience with a server that says when to ask again: it is busy, not broken."""
LONGEST_PAUSE_S = 15.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
FINAL = (requests.exceptions.SSLError, requests.TooManyRedirects, ValueError)
"""Errors that a second attempt would meet again; requests raises a ValueError for an address that is none."""
SHOWN_LENGTH = 300
"""Characters of a server's answer that are shown."""

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Say how long what fails is tried again."""

    seconds: float = 25.0
    """Since the first failure; 0: not at all."""
    backoff_s: float = 0.5
    """The first pause. Each is twice as long, with a random part, or as long as the server asks for."""


PATIENCE = Patience()


class TryAgain(Unreachable):
    """Ask for another attempt."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        """How long the server wants us to wait; 0 if it does not say."""


class NoAnswer(TryAgain):
    """Report that nothing answered."""


class Client:
    """Send requests, from several threads."""

    def __init__(self, ca: Path | None = None, patience: Patience = PATIENCE, **headers: str) -> None:
        """`ca` is a bundle of certificate authorities, by default that of the HTTP library."""
        self.patience = patience
        self.session = requests.Session()
        # What is hashed must be what was sent.
        self.session.headers.update({"User-Agent": AGENT, "Accept-Encoding": "identity", **headers})
        self.session.verify = str(ca) if ca else True
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS))
        self.stopped = threading.Event()
        """Set to end what other threads are doing with it, for Ctrl-C."""
        self._repeating: set[int] = set()
        """Threads that are in `retried`."""

    def retried(self, what: str, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns. It is made again while it raises TryAgain and our patience lasts.

        What is retried inside it is repeated together with it, not by itself. Raises Unreachable in the end.
        """
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
                        limit = self.patience.seconds * (BUSY_FACTOR if again.pause_s else 1)
                        if pause > limit or (now - first + pause > limit and attempts >= LEAST_ATTEMPTS):
                            demand = f", and asks for a pause of {pause:.0f} s" if again.pause_s else ""
                            tries = f"after {attempts} attempts in {now - first:.0f} s" if attempts > 1 else "at once"
                            raise Unreachable(f"{again}{demand}; gave up {tries}") from again
                        activity.detail = f"{again}; trying again"
                        self.stopped.wait(pause)
        finally:
            self._repeating.remove(thread)

    def check_stopped(self, what: str) -> None:
        if self.stopped.is_set():
            raise CommandError(f"{what}: interrupted")

    def send(
        self, method: str, url: str, what: str, *, timeout_s: float = READ_TIMEOUT_S, **options: Any
    ) -> requests.Response:
        """Return the answer to a request (`what` in errors), perhaps a refusal. Raises TryAgain or CommandError."""
        self.check_stopped(what)
        try:
            answer = self.session.request(method, url, timeout=(CONNECT_TIMEOUT_S, timeout_s), **options)
        except FINAL as error:
            raise CommandError(f"{what}: {innermost_reason(error)}") from None
        except (RequestException, HTTPError, OSError) as error:
            kind = NoAnswer if isinstance(error, requests.ConnectionError) else TryAgain
            raise kind(f"{what}: {innermost_reason(error)}") from None
        if answer.status_code in RETRIED:
            with answer:
                try:
                    pause_s = Retry().get_retry_after(answer.raw) or 0.0
                except HTTPError:
                    pause_s = 0.0
                raise TryAgain(f"{what}: the server answered {describe_answer(answer)}", pause_s)
        return answer

    def chunks(self, answer: requests.Response, what: str) -> Iterator[bytes]:
        """Yield an answer's bytes as they are transferred. Raises TryAgain if there are fewer than were announced."""
        try:
            with answer:
                for chunk in answer.raw.stream(CHUNK, decode_content=False):
                    self.check_stopped(what)
                    yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise TryAgain(f"{what}: {innermost_reason(error)}") from None


# Answers


def json_of(answer: requests.Response) -> dict[str, Any]:
    """Return the document of an answer; an empty one if it is something else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def errors_in(answer: requests.Response) -> list[dict[str, Any]]:
    items = json_of(answer).get("errors")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def describe_answer(answer: requests.Response) -> str:
    """Return `403 (DENIED: requested access to the resource is denied)`, or `403 (Forbidden)`."""
    texts = [": ".join(str(item[key]) for key in ("code", "message") if item.get(key)) for item in errors_in(answer)]
    text = "; ".join(dict.fromkeys(texts)) or str(answer.reason or "")
    return f"{answer.status_code} ({text[:SHOWN_LENGTH]})"


def innermost_reason(error: Exception) -> str:
    """Return the text of the innermost cause: requests wraps it in many words."""
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    inner = error
    while causes := [c for c in (getattr(inner, "reason", None), *inner.args) if isinstance(c, Exception)]:
        inner = causes[0]
    if isinstance(inner, IncompleteRead):
        return f"ended after {inner.partial} of {int(inner.partial or 0) + int(inner.expected or 0)} bytes"
    text = re.sub(r"^HTTPS?Connection(Pool)?\(.*?\): ", "", str(inner).rpartition(">: ")[2])
    return text or type(inner).__name__


# Downloads

DOWNLOAD_TIMEOUT_S = 60
DOWN_S = 30
"""How long a server that did not answer is not asked again, so that not each of its URLs waits."""
LARGEST_INDEX = 256 << 20
"""More bytes than any key or index of a repository has."""
Advance = Callable[[int, int | None], object]
"""Called with the bytes that are there and the bytes there will be, if the server says so."""


def login_for(url: str, netrc_file: Path | None) -> tuple[str, str] | None:
    """Return the user and password that a netrc file has for the host of an address."""
    entry = netrc.netrc(netrc_file).authenticators(urlsplit(url).hostname or "") if netrc_file else None
    return (entry[0], entry[2]) if entry else None


class Downloads:
    """Download files; several threads may use it.

    Its methods raise Absent if a server does not have a file, Unreachable if it cannot be fetched, CommandError if it
    is a web page.
    """

    def __init__(
        self, rewrite: Callable[[str], str] = str, ca: Path | None = None, netrc_file: Path | None = None, *,
        patience: Patience = PATIENCE, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Prepare. `rewrite` turns an address into where to get it, for sites with mirrors.

        `netrc_file` has passwords for hosts; without it, the one that the HTTP library finds.
        """
        self.client = Client(ca, patience, **(headers or {}))
        self._rewrite, self._netrc = rewrite, netrc_file
        self._down: dict[str, tuple[float, str]] = {}
        """Server → when it did not answer, and why."""

    def download(self, url: str, target: Path | None = None, advance: Advance = lambda _done, _total: None) -> str:
        """Write a file to `target`, or nowhere, and return its sha256. The server has to tell its length."""

        def read(answer: requests.Response) -> str:
            if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
                raise CommandError(f"{url}: the server does not say how long the file is; it might be cut off unseen")
            digest, done = hashlib.sha256(), 0
            with target.open("wb") if target else nullcontext() as file:
                for chunk in self.client.chunks(answer, url):
                    digest.update(chunk)
                    if file:
                        file.write(chunk)
                    done += len(chunk)
                    advance(done, announced_length(answer))
            return digest.hexdigest()

        return self._ask("GET", url, read)

    def length(self, url: str) -> int | None:
        """Return how many bytes a file has, without downloading it; None if the server does not tell."""
        return self._ask("HEAD", url, announced_length)

    def read(self, url: str) -> bytes:
        """Return a small file. Raises CommandError if it is too long."""

        def read(answer: requests.Response) -> bytes:
            content = bytearray()
            for chunk in self.client.chunks(answer, url):
                content += chunk
                if len(content) > LARGEST_INDEX:
                    raise CommandError(f"{url}: is longer than {LARGEST_INDEX >> 20} MiB, so that it is no index")
            return bytes(content)

        return self._ask("GET", url, read)

    def _ask(self, method: str, url: str, read: Callable[[requests.Response], T]) -> T:
        """Return what `read` makes of the answer to a request."""
        address = self._rewrite(url)
        where = url if address == url else f"{url} (as {address})"
        host = urlsplit(address).netloc
        since, reason = self._down.get(host, (0.0, ""))
        if reason and time.monotonic() - since < DOWN_S:
            raise Unreachable(f"{where}: {reason}")

        def attempt() -> T:
            answer = self.client.send(
                method, address, where, timeout_s=DOWNLOAD_TIMEOUT_S, stream=True,
                # The HTTP library does not hand a password on to another host.
                auth=login_for(address, self._netrc),
            )  # fmt: skip
            with answer:
                if answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                    raise Absent(f"{where}: the server does not have it ({answer.status_code})")
                if answer.status_code != HTTPStatus.OK:
                    raise Unreachable(f"{where}: the server answered {describe_answer(answer)}")
                if answer.headers.get("Content-Type", "").startswith("text/html"):
                    raise CommandError(f"{url}: is a web page, not a file; does it want a login?")
                return read(answer)

        try:
            return self.client.retried(f"download of {where}", attempt)
        except Unreachable as error:
            if isinstance(error.__cause__, NoAnswer):
                self._down[host] = time.monotonic(), str(error.__cause__).removeprefix(f"{where}: ")
            raise


def announced_length(answer: requests.Response) -> int | None:
    """Return the length that an answer announces; None if it announces none."""
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None
