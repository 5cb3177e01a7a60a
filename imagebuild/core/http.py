"""Download files over HTTP: CA bundle, proxies, passwords from a netrc file, retries.

A download is whole, or it is an error.
"""

from __future__ import annotations

import hashlib
import netrc
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, IncompleteRead
from urllib3.util import Retry

from imagebuild.core.errors import Absent, CommandError, Unreachable

AGENT = "imagebuild"
CHUNK = 1 << 18
ATTEMPTS = 5
PAUSE_S = 0.5
"""Base of the pauses between attempts: each is twice as long as the last, or as long as the server asks for."""
LONGEST_PAUSE_S = 60.0
FAILING = frozenset({429, 500, 502, 503, 504})
"""Statuses that are worth another attempt."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
DOWN_S = 30
"""How long a server that could not be connected to is not asked again, so that not each of its URLs waits."""
LARGEST_INDEX = 256 << 20
"""More bytes than any key or index of a repository has."""

T = TypeVar("T")
Login = tuple[str, str]
"""User and password."""
Advance = Callable[[int, int | None], None]
"""Called with the bytes that are there and the bytes there will be, if the server says so."""


class _CutOff(Unreachable):
    """Report that a file ended too early."""


class _Patience(Retry):
    """Retry, but wait at most LONGEST_PAUSE_S when the server asks for a pause."""

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        seconds = super().get_retry_after(response)
        return None if seconds is None else min(seconds, LONGEST_PAUSE_S)


def login_for(url: str, netrc_file: Path | None) -> Login | None:
    """Return the user and password that a netrc file has for the host of an address."""
    entry = netrc.netrc(netrc_file).authenticators(urlsplit(url).hostname or "") if netrc_file else None
    return (entry[0], entry[2]) if entry else None


@dataclass
class Downloads:
    """Download files; several threads may use it."""

    rewrite: Callable[[str], str] = str
    """Address → where to get it, for sites with mirrors."""
    ca: Path | None = None
    """Bundle of certificate authorities; None: those of the HTTP library."""
    netrc: Path | None = None
    """File of passwords, for the hosts it names; None: the one that the HTTP library finds."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each request, beside our own."""
    pause_s: float = PAUSE_S
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set to make running downloads end."""
    _down: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Server → when it could not be connected to, and why."""

    def sha256(self, url: str, advance: Advance = lambda _done, _total: None, target: Path | None = None) -> str:
        """Return the sha256 of a file whose length the server tells, and write it to `target` if that is given.

        Raises Unreachable or Absent if it cannot be fetched, CommandError if it is a web page or of unknown length.
        """

        def read(answer: requests.Response) -> str:
            refuse_page(url, answer)
            if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
                raise CommandError(
                    f"{url}: the server does not say how long the file is, so that it might be cut off unseen"
                )
            digest, done = hashlib.sha256(), 0
            with target.open("wb") if target else nullcontext() as file:
                for chunk in self.chunks(answer):
                    digest.update(chunk)
                    if file:
                        file.write(chunk)
                    done += len(chunk)
                    advance(done, announced_length(answer))
            return digest.hexdigest()

        return self._whole(url, "*/*", read)

    def length(self, url: str) -> int | None:
        """Return how many bytes a file has, without downloading it; None if the server does not tell.

        Raises Unreachable or Absent if it cannot be fetched, CommandError if it is a web page.
        """
        with self.open(url, method="HEAD") as answer:
            refuse_page(url, answer)
            return announced_length(answer)

    def read(self, url: str, accept: str = "*/*") -> bytes:
        """Return a small file. Raises Unreachable or Absent if it cannot be fetched, CommandError if it is too long."""

        def read(answer: requests.Response) -> bytes:
            content = bytearray()
            for chunk in self.chunks(answer):
                content += chunk
                if len(content) > LARGEST_INDEX:
                    raise CommandError(f"{url}: is longer than {LARGEST_INDEX >> 20} MiB, so that it is no index")
            return bytes(content)

        return self._whole(url, accept, read)

    def _whole(self, url: str, accept: str, read: Callable[[requests.Response], T]) -> T:
        """Return what `read` makes of an answer; ask again if it was cut off."""
        for attempt in range(ATTEMPTS):
            if attempt and self.stopped.wait(self.pause_s * 2 ** (attempt - 1)):
                break
            try:
                with self.open(url, accept) as answer:
                    return read(answer)
            except _CutOff as error:
                reason = error
        raise reason

    @contextmanager
    def open(self, url: str, accept: str = "*/*", method: str = "GET") -> Iterator[requests.Response]:
        """Yield a server's answer, to be read with `chunks`; the server is asked several times if it fails.

        Raises Absent if the server does not have the file, Unreachable if it cannot be fetched, also while it is read.
        """
        address = self.rewrite(url)
        where = url if address == url else f"{url} (as {address})"
        host = "{0.scheme}://{0.netloc}".format(urlsplit(address))
        since, reason = self._down.get(host, (0.0, ""))
        if reason and time.monotonic() - since < DOWN_S:
            raise Unreachable(f"{where}: {reason}")
        policy = _Patience(
            ATTEMPTS - 1, connect=0, backoff_factor=self.pause_s, status_forcelist=FAILING, raise_on_status=False
        )
        try:
            with requests.Session() as session:
                for scheme in ("http://", "https://"):
                    session.mount(scheme, HTTPAdapter(max_retries=policy))
                with session.request(
                    method,
                    address,
                    stream=True,
                    timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
                    verify=str(self.ca) if self.ca else True,
                    # The HTTP library does not hand a password on to another host.
                    auth=login_for(address, self.netrc),
                    headers={"Accept": accept, "Accept-Encoding": "identity", "User-Agent": AGENT, **self.headers},
                ) as answer:
                    status = f"{answer.status_code} {answer.reason}"
                    if answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                        raise Absent(f"{where}: the server does not have it ({answer.status_code})")
                    if answer.status_code != HTTPStatus.OK:
                        raise Unreachable(f"{where}: the server answered {status}")
                    yield answer
        except (RequestException, HTTPError) as error:
            reason = innermost_reason(error)
            if isinstance(error, requests.ConnectionError):
                self._down[host] = time.monotonic(), reason
            raise Unreachable(f"{where}: {reason}") from None
        except _CutOff as error:
            raise _CutOff(f"{where}: {error}") from None

    def chunks(self, answer: requests.Response) -> Iterator[bytes]:
        """Yield the bytes as they are transferred: what is hashed must be what a builder gets."""
        try:
            for chunk in answer.raw.stream(CHUNK, decode_content=False):
                if self.stopped.is_set():
                    raise Unreachable("interrupted")
                yield chunk
        except HTTPError as error:  # also if the server announced more bytes
            raise _CutOff(innermost_reason(error)) from None


def refuse_page(url: str, answer: requests.Response) -> None:
    """Raise CommandError if the answer is a web page where a file should be."""
    if answer.headers.get("Content-Type", "").startswith("text/html"):
        raise CommandError(f"{url}: is a web page, not a file; does it want a login?")


def announced_length(answer: requests.Response) -> int | None:
    """Return the length that an answer announces; None if it announces none."""
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def innermost_reason(error: Exception) -> str:
    """Return the text of the innermost cause: requests wraps it in many words."""
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    inner: object = error
    while True:
        deeper = getattr(inner, "reason", None) or next(
            (argument for argument in getattr(inner, "args", ()) if isinstance(argument, Exception)), None
        )
        if not isinstance(deeper, Exception) or deeper is inner:
            break
        inner = deeper
    if isinstance(inner, IncompleteRead):
        return f"ended after {inner.partial} of {int(inner.partial or 0) + int(inner.expected or 0)} bytes"
    text = re.sub(r"^HTTPS?Connection(Pool)?\(.*?\): ", "", str(inner).rpartition(">: ")[2])
    return text or type(inner).__name__


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
