"""Download files over HTTP: CA bundle, proxies, passwords from a netrc file, retries.

A download is whole, or it is an error.
"""

from __future__ import annotations

import base64
import hashlib
import netrc
import re
import ssl
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import requests
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError, IncompleteRead

from imagebuild.core.errors import Absent, CommandError, Unreachable

AGENT = "imagebuild"
CHUNK = 1 << 18
TIMEOUT_S = 60
ATTEMPTS = 4
DOWNLOAD_CHUNK = 1 << 20
DOWNLOAD_ATTEMPTS = 5
PAUSE_S = 1.0
"""Before the second attempt; each further pause is twice as long."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
LARGEST_INDEX = 256 << 20
"""More bytes than any key or index of a repository has."""
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


class MissingFile(CommandError):
    """Report that the server has no such file."""


class _Redirects(HTTPRedirectHandler):
    """Send a password to the host that it was given for, and to no other that this one points to."""

    def redirect_request(self, req: Request, *rest: Any) -> Request | None:
        following = super().redirect_request(req, *rest)
        if following and urlsplit(following.full_url).netloc != urlsplit(req.full_url).netloc:
            following.remove_header("Authorization")
        return following


@dataclass(frozen=True)
class Fetcher:
    """Open addresses for builds; several times if the server fails."""

    ca: Path | None = None
    netrc: Path | None = None
    logins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Host, with its port if it has one → user and password; for other hosts `netrc` is asked."""
    pause: Callable[[float], None] = time.sleep

    def open(self, url: str, accept: str = "*/*") -> Any:
        """Return the answer, to be read with `read_chunks` and closed.

        Raises MissingFile, or CommandError if the server cannot be reached or fails again and again.
        """
        try:
            return self._answer(url, accept)
        except (HTTPException, OSError) as error:
            raise CommandError(f"{url}: {getattr(error, 'reason', None) or error}") from None

    def read(self, url: str, accept: str = "*/*") -> bytes:
        """Return the content of something small. Raises what `open` and `read_chunks` raise."""
        with self.open(url, accept) as answer:
            return b"".join(read_chunks(answer, url))

    def _answer(self, url: str, accept: str) -> Any:
        address = urlsplit(url)
        login = self.logins.get(address.netloc)
        if not login and self.netrc and (entry := netrc.netrc(self.netrc).authenticators(address.hostname or "")):
            login = (entry[0], entry[2])
        headers = {"Accept": accept, "User-Agent": AGENT}
        if login:
            headers["Authorization"] = "Basic " + base64.b64encode(":".join(login).encode()).decode()
        request = Request(url, headers=headers)  # noqa: S310 - the addresses are of http and https
        context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        opener = build_opener(_Redirects, HTTPSHandler(context=context))
        for attempt in range(ATTEMPTS):
            try:
                return opener.open(request, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (404, 410):
                    raise MissingFile(f"{url}: not found") from None
                if error.code < 500 and error.code != 429:
                    raise
                failure: OSError = error
            except URLError as error:
                failure = error
            if attempt + 1 < ATTEMPTS:
                self.pause(2**attempt)
        raise failure


def read_chunks(answer: Any, url: str) -> Iterator[bytes]:
    """Yield the body of an answer. Raises CommandError if it ends before its announced length."""
    length, size = announced_length(answer), 0
    try:
        while chunk := answer.read(CHUNK):
            size += len(chunk)
            yield chunk
    except (HTTPException, OSError) as error:
        raise CommandError(f"{url}: broke off after {size} bytes: {error}") from None
    if length not in (None, size):
        raise CommandError(f"{url}: broke off after {size} of {length} bytes")


def announced_length(answer: Any) -> int | None:
    """Return how many bytes an answer announces, if it does."""
    length = answer.headers.get("Content-Length")
    return int(length) if length else None


def without_login(url: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return an address without its user and password, and these by host."""
    address = urlsplit(url)
    if not address.username:
        return url, {}
    host = address.netloc.rpartition("@")[2]
    login = (unquote(address.username), unquote(address.password or ""))
    return urlunsplit(address._replace(netloc=host)), {host: login}


@contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """Give a file to write to and rename, in a folder that is made if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".partial-", delete=False) as file:
        path = Path(file.name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _TryAgain(Exception):
    """Ask for another attempt."""


def _quiet(done: int, total: int | None) -> None:
    pass


@dataclass
class Downloads:
    """Download files for the lock, from several threads."""

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
    """Server → why it cannot be connected to, so that not every address of it waits."""

    def sha256(self, url: str, advance: Advance = _quiet) -> str:
        """Return the sha256 of a file whose length the server tells.

        Raises Unreachable or Absent if it cannot be had, CommandError if it is a web page or its length is unknown.
        """

        def read(answer: requests.Response) -> str:
            if answer.headers.get("Content-Type", "").startswith("text/html"):
                raise CommandError(f"{url}: is a web page, not a file; does it want a login?")
            if "Content-Length" not in answer.headers and "chunked" not in answer.headers.get("Transfer-Encoding", ""):
                raise CommandError(
                    f"{url}: the server does not say how long the file is, so that it might be cut off unseen"
                )
            digest = hashlib.sha256()
            for chunk in self._chunks(answer, advance):
                digest.update(chunk)
            return digest.hexdigest()

        return self._get(url, read)

    def read(self, url: str) -> bytes:
        """Return a small file. Raises what `sha256` raises."""

        def whole(answer: requests.Response) -> bytes:
            content = bytearray()
            for chunk in self._chunks(answer, _quiet):
                content += chunk
                if len(content) > LARGEST_INDEX:
                    raise CommandError(f"{url}: is longer than {LARGEST_INDEX >> 20} MiB, so that it is no index")
            return bytes(content)

        return self._get(url, whole)

    def _get(self, url: str, read: Callable[[requests.Response], T]) -> T:
        address = self.rewrite(url)
        where = url if address == url else f"{url} (as {address})"
        host = "{0.scheme}://{0.netloc}".format(urlsplit(address))
        reason = ""
        for attempt in range(DOWNLOAD_ATTEMPTS):
            if host in self._down:
                raise Unreachable(f"{where}: {self._down[host]}")
            if attempt and self.stopped.wait(self.pause_s * 2 ** (attempt - 1)):
                raise Unreachable(f"{where}: interrupted")
            try:
                return self._attempt(address, where, read)
            except (_TryAgain, RequestException, HTTPError) as error:
                reason = innermost_reason(error)
                refused = isinstance(error, RequestException) and any(mark in str(error) for mark in REFUSED)
                if refused or isinstance(error, requests.ConnectTimeout):
                    self._down[host] = reason
                if refused or isinstance(error, FINAL):
                    break
        raise Unreachable(f"{where}: {reason}")

    def _attempt(self, address: str, where: str, read: Callable[[requests.Response], T]) -> T:
        entry = netrc.netrc(self.netrc).authenticators(urlsplit(address).hostname or "") if self.netrc else None
        with requests.get(
            address,
            stream=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
            verify=str(self.ca) if self.ca else True,
            # The HTTP library does not hand a password on to another host.
            auth=(entry[0], entry[2]) if entry else None,
            headers={"Accept-Encoding": "identity", "User-Agent": AGENT},
        ) as answer:
            status = answer.status_code
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
                raise _TryAgain(f"the server answered {status} {answer.reason}")
            if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                raise Absent(f"{where}: the server does not have it ({status})")
            if status != HTTPStatus.OK:
                raise Unreachable(f"{where}: the server answered {status} {answer.reason}")
            return read(answer)

    def _chunks(self, answer: requests.Response, advance: Advance) -> Iterator[bytes]:
        """Yield the bytes as they are transferred: what is hashed must be what a builder gets."""
        length = answer.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        done = 0
        for chunk in answer.raw.stream(DOWNLOAD_CHUNK, decode_content=False):
            if self.stopped.is_set():
                raise Unreachable("interrupted")
            done += len(chunk)
            advance(done, total)
            yield chunk
        if total is not None and done != total:
            raise _TryAgain(f"ended after {done} of {total} bytes")


def innermost_reason(error: Exception) -> str:
    """Return the innermost cause, which says in few words what requests wraps in many."""
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
