"""Downloads of this machine: its CA bundle, its proxies, and passwords from a netrc file."""

from __future__ import annotations

import base64
import hashlib
import netrc
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from imagebuild.errors import CommandError

CHUNK = 1 << 18
TIMEOUT_S = 60
ATTEMPTS = 4
AGENT = "imagebuild"


class NotThere(CommandError):
    """The server has no such file."""


class _Redirects(HTTPRedirectHandler):
    """A password is for the host it was given for, and for no other that this one points to."""

    def redirect_request(self, req: Request, *rest: Any) -> Request | None:
        following = super().redirect_request(req, *rest)
        if following and urlsplit(following.full_url).netloc != urlsplit(req.full_url).netloc:
            following.remove_header("Authorization")
        return following


@dataclass(frozen=True)
class Fetcher:
    """Opens addresses."""

    ca: Path | None = None
    netrc: Path | None = None
    logins: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Host, with its port if it has one → user and password; for other hosts `netrc` is asked."""
    pause: Callable[[float], None] = time.sleep

    def open(self, url: str, accept: str = "*/*") -> Any:
        """The answer, to be read with `parts` and closed. Raises NotThere, or CommandError if the server cannot be
        reached or fails again and again.
        """
        try:
            return self._answer(url, accept)
        except (HTTPException, OSError) as error:
            raise CommandError(f"{url}: {getattr(error, 'reason', None) or error}") from None

    def read(self, url: str, accept: str = "*/*") -> bytes:
        """The content of something small. Raises as `open` and `parts`."""
        with self.open(url, accept) as answer:
            return b"".join(parts(answer, url))

    def _answer(self, url: str, accept: str) -> Any:
        headers = {"Accept": accept, "User-Agent": AGENT, **self._password(url)}
        request = Request(url, headers=headers)  # noqa: S310 - the addresses are of http and https
        for attempt in range(ATTEMPTS):
            try:
                return self._opener().open(request, timeout=TIMEOUT_S)
            except HTTPError as error:
                error.close()
                if error.code in (404, 410):
                    raise NotThere(f"{url}: not found") from None
                if error.code < 500 and error.code != 429:
                    raise
                failure: OSError = error
            except URLError as error:
                failure = error
            if attempt + 1 < ATTEMPTS:
                self.pause(2**attempt)
        raise failure

    def _opener(self) -> OpenerDirector:
        context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        return build_opener(_Redirects, HTTPSHandler(context=context))

    def _password(self, url: str) -> dict[str, str]:
        address = urlsplit(url)
        login = self.logins.get(address.netloc)
        if not login and self.netrc and (found := netrc.netrc(self.netrc).authenticators(address.hostname or "")):
            login = (found[0], found[2])
        if not login:
            return {}
        return {"Authorization": "Basic " + base64.b64encode(":".join(login).encode()).decode()}


def parts(answer: Any, url: str) -> Iterator[bytes]:
    """What an answer holds, bit by bit. Raises CommandError if it ends before its announced length."""
    length, size = length_of(answer), 0
    try:
        while chunk := answer.read(CHUNK):
            size += len(chunk)
            yield chunk
    except (HTTPException, OSError) as error:
        raise CommandError(f"{url}: broke off after {size} bytes: {error}") from None
    if length not in (None, size):
        raise CommandError(f"{url}: broke off after {size} of {length} bytes")


def length_of(answer: Any) -> int | None:
    """Bytes that an answer announces."""
    length = answer.headers.get("Content-Length")
    return int(length) if length else None


def without_login(url: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """An address without its user and password, and those by host."""
    address = urlsplit(url)
    if not address.username:
        return url, {}
    host = address.netloc.rpartition("@")[2]
    login = (unquote(address.username), unquote(address.password or ""))
    return urlunsplit(address._replace(netloc=host)), {host: login}


@contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """A file to write to and rename, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".partial-", delete=False) as file:
        path = Path(file.name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
