"""Downloads that are whole: retried while a server has a bad moment, never a part of a file."""

from __future__ import annotations

import hashlib
import netrc
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import requests
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError, IncompleteRead

from imagebuild.errors import Absent, CommandError, Unreachable

CHUNK = 1 << 20
ATTEMPTS = 5
PAUSE_S = 1.0
"""Before the second attempt; each further pause is twice as long."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
LARGEST_INDEX = 256 << 20
"""More than any key or index of a repository has, in bytes."""
FINAL = (
    requests.ConnectTimeout, requests.exceptions.SSLError, requests.exceptions.ProxyError,
    requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, requests.exceptions.MissingSchema,
    requests.TooManyRedirects,
)  # fmt: skip
"""Errors that a second attempt would meet again."""
REFUSED = ("NewConnectionError", "NameResolutionError", "Connection refused", "Failed to resolve")

T = TypeVar("T")
Advance = Callable[[int, int | None], None]
"""Called with the bytes that are there and the bytes there will be, if the server says so."""


class _Again(Exception):
    """Worth another attempt."""


def _quiet(done: int, total: int | None) -> None:
    pass


@dataclass
class Web:
    """Downloads for one run, from several threads."""

    rewrite: Callable[[str], str] = lambda url: url
    """Address → where to get it, for sites with mirrors."""
    ca: Path | None = None
    """Bundle of certificate authorities; None: those of the Python library."""
    netrc: Path | None = None
    """File of passwords, for the hosts it names; None: the one that the HTTP library finds."""
    pause_s: float = PAUSE_S
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set to make running downloads end."""
    _down: dict[str, str] = field(default_factory=dict)
    """Host → why it cannot be connected to, so that not every address of it waits."""

    def sha256(self, url: str, advance: Advance = _quiet) -> str:
        """The sha256 of a file that a server says the length of.

        Raises Unreachable or Absent if it cannot be had, CommandError if what comes is a web page.
        """

        def read(answer: requests.Response) -> str:
            if answer.headers.get("Content-Type", "").startswith("text/html"):
                raise CommandError(f"{url}: is a web page, not a file; does it want a login?")
            if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
                raise CommandError(f"{url}: the server does not say how long the file is, so it might come cut")
            digest = hashlib.sha256()
            for chunk in self._chunks(answer, advance):
                digest.update(chunk)
            return digest.hexdigest()

        return self._get(url, read)

    def read(self, url: str) -> bytes:
        """A small file. Raises as `sha256` does."""

        def whole(answer: requests.Response) -> bytes:
            content = bytearray()
            for chunk in self._chunks(answer, _quiet):
                content += chunk
                if len(content) > LARGEST_INDEX:
                    raise CommandError(f"{url}: is longer than {LARGEST_INDEX >> 20} MiB, so it is no index")
            return bytes(content)

        return self._get(url, whole)

    def _get(self, url: str, read: Callable[[requests.Response], T]) -> T:
        address = self.rewrite(url)
        where = url if address == url else f"{url} (as {address})"
        host = "{0.scheme}://{0.netloc}".format(urlsplit(address))
        why = ""
        for attempt in range(ATTEMPTS):
            if host in self._down:
                raise Unreachable(f"{where}: {self._down[host]}")
            if attempt and self.stopped.wait(self.pause_s * 2 ** (attempt - 1)):
                raise Unreachable(f"{where}: interrupted")
            try:
                return self._attempt(address, where, read)
            except (_Again, RequestException, HTTPError) as error:
                why = reason(error)
                if isinstance(error, RequestException) and _is_final(error):
                    if any(mark in str(error) for mark in REFUSED) or isinstance(error, requests.ConnectTimeout):
                        self._down[host] = why
                    break
        raise Unreachable(f"{where}: {why}")

    def _attempt(self, address: str, where: str, read: Callable[[requests.Response], T]) -> T:
        with requests.get(
            address,
            stream=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
            verify=str(self.ca) if self.ca else True,
            auth=self._password(address),
            headers={"Accept-Encoding": "identity", "User-Agent": "imagebuild"},
        ) as answer:
            status = answer.status_code
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
                raise _Again(f"the server answered {status} {answer.reason}")
            if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                raise Absent(f"{where}: the server does not have it ({status})")
            if status != HTTPStatus.OK:
                raise Unreachable(f"{where}: the server answered {status} {answer.reason}")
            return read(answer)

    def _password(self, address: str) -> tuple[str, str] | None:
        """User and password, which the HTTP library does not hand on to another host."""
        found = netrc.netrc(self.netrc).authenticators(urlsplit(address).hostname or "") if self.netrc else None
        return (found[0], found[2]) if found else None

    def _chunks(self, answer: requests.Response, advance: Advance) -> Iterator[bytes]:
        """The bytes as they are transferred: what is hashed must be what a builder gets."""
        length = answer.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        done = 0
        for chunk in answer.raw.stream(CHUNK, decode_content=False):
            if self.stopped.is_set():
                raise Unreachable("interrupted")
            done += len(chunk)
            advance(done, total)
            yield chunk
        if total is not None and done != total:
            raise _Again(f"ended after {done} of {total} bytes")


def _is_final(error: RequestException) -> bool:
    return isinstance(error, FINAL) or any(mark in str(error) for mark in REFUSED)


def reason(error: Exception) -> str:
    """The innermost cause, which says in few words what requests wraps in many."""
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
    text = re.sub(r"^HTTPS?Connection\(.*?\): ", "", str(inner).rpartition(">: ")[2])
    return text or type(inner).__name__
