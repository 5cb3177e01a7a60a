"""Requests to one registry, repeated while it has a bad moment, and counted."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.cookies import RequestsCookieJar
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from imagebuild.errors import CommandError, ConfigError, Unreachable
from imagebuild.locking.web import reason
from imagebuild.registry import answers
from imagebuild.registry.auth import Login

PATIENCE_S = 120.0
"""How long a registry may fail before we give up."""
UNREACHABLE_PATIENCE_S = 15.0
"""The same, while nobody answers at all: most often the name is wrong."""
ATTEMPTS = 3
"""So many are made even if each takes longer than the patience: an upload may take an hour."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
STORE_TIMEOUT_S = 600
"""For the answer to a whole blob, which some registries copy before they answer."""
CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")
CHUNK = 1 << 20
CONNECTIONS = 32
BAD_MOMENTS = frozenset({408, 429, 500, 502, 503, 504})
FINAL = (
    requests.exceptions.SSLError, requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema, requests.exceptions.InvalidHeader, requests.TooManyRedirects,
)  # fmt: skip
"""Errors that a second attempt would meet again."""
NOBODY = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")

T = TypeVar("T")


class Again(Exception):
    """Worth another attempt."""

    def __init__(self, why: str, pause_s: float | None = None, *, nobody: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.pause_s = pause_s
        """What the registry wants us to wait."""
        self.nobody = nobody
        """Nothing answered."""


class Body:
    """What an upload sends: read from the start each time it is sent, counted, and ended by `stop`."""

    def __init__(self, wire: Wire, size: int, chunks: Callable[[], Iterator[bytes]]) -> None:
        self.wire, self.size, self.chunks = wire, size, chunks

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks():
            self.wire.check()
            self.wire.count("sent", len(chunk))
            yield chunk


@dataclass(eq=False)
class Wire:
    """The connection to one registry, for several threads."""

    host: str
    base: str
    """Address that the paths of requests are relative to."""
    ca: Path | None = None
    """Bundle of certificate authorities; None: those of the HTTP library."""
    patience_s: float = PATIENCE_S
    backoff_s: float = 0.5
    """The second pause is twice as long; the first retry is immediate."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by method (`GET`, …), and the bytes of bodies `sent` and `received`."""
    lacks_referrers: bool = False
    """The registry is known not to list what refers to a manifest."""

    def __post_init__(self) -> None:
        self.session = requests.Session()
        self.session.headers.update({"User-Agent": "imagebuild", "Accept-Encoding": "identity"})
        self.session.verify = str(self.ca) if self.ca else True
        # Cookies are all in a session that several threads would change.
        self.session.cookies = RequestsCookieJar(DefaultCookiePolicy(allowed_domains=[]))
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS))
        self.stopped = threading.Event()
        self.login = Login(self.host, self._token, plain=self.base.startswith("http:"))
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Make what other threads are doing end with an error."""
        self.stopped.set()

    def check(self) -> None:
        if self.stopped.is_set():
            raise CommandError(f"{self.host}: interrupted")

    def count(self, what: str, number: int) -> None:
        with self._lock:
            self.counts[what] += number

    def patiently(self, what: str, action: Callable[[], T]) -> T:
        """Do something until it does not raise `Again`. Raises CommandError when patience is at its end."""
        policy = Retry(total=None, backoff_factor=self.backoff_s, backoff_max=15, backoff_jitter=self.backoff_s)
        attempts, first = 0, 0.0
        while True:
            self.check()
            try:
                return action()
            except Again as again:
                now = time.monotonic()
                attempts, first = attempts + 1, first or now
                policy = policy.increment()
                pause = max(policy.get_backoff_time(), again.pause_s or 0.0)
                patience = min(self.patience_s, UNREACHABLE_PATIENCE_S) if again.nobody else self.patience_s
                spent = now - first + pause
                if not patience or pause > patience or (spent > patience and attempts >= ATTEMPTS):
                    kind = Unreachable if again.nobody else CommandError
                    wish = f", and wants to be left alone for {pause:.0f} s" if again.pause_s else ""
                    tries = f"after {attempts} attempts in {now - first:.0f} s" if attempts > 1 else "at once"
                    raise kind(f"{self.host}: {what}: {again.why}{wish}; gave up {tries}") from None
                self.stopped.wait(pause)

    def request(self, method: str, path: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """`once`, repeated while the registry has a bad moment: for what may be done twice."""
        return self.patiently(f"{method} {_shown(path)}", lambda: self.once(method, path, scopes, **options))

    def once(self, method: str, path: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """One request with its answer, which may be a refusal.

        Raises Again for bad moments, CommandError for what stays wrong.
        """
        url = urljoin(self.base, path)
        own = urlsplit(url).netloc == urlsplit(self.base).netloc
        # Uploads may go to another server, which has its own way to know them.
        shown = self.login.header(scopes) if own else None
        answer = self._send(method, url, auth=shown or _nothing, **options)
        if own and shown and answer.status_code == HTTPStatus.UNAUTHORIZED:
            answer.close()
            if self.login.refused(answer, scopes, shown):
                answer = self._send(method, url, auth=self.login.header(scopes), **options)
        return answer

    def _token(self, method: str, url: str, **options: Any) -> requests.Response:
        return self._send(method, url, **options)

    def _send(self, method: str, url: str, **options: Any) -> requests.Response:
        self.check()
        self.count(method, 1)
        if isinstance(options.get("data"), bytes):
            self.count("sent", len(options["data"]))
        timeout = options.pop("timeout", READ_TIMEOUT_S)
        try:
            answer = self.session.request(method, url, timeout=(CONNECT_TIMEOUT_S, timeout), **options)
            if not options.get("stream"):
                self.count("received", len(answer.content))
        except FINAL as error:
            raise CommandError(f"{self.host}: {method}: {reason(error)}") from None
        except (RequestException, HTTPError, OSError) as error:
            raise Again(reason(error), nobody=any(mark in repr(error) for mark in NOBODY)) from None
        if answer.status_code in BAD_MOMENTS:
            with answer:
                raise Again(f"the registry answered {answers.said(answer)}", _wished(answer))
        return answer

    def chunks(self, answer: requests.Response) -> Iterator[bytes]:
        """The body of an answer that was asked for with `stream`. Raises Again if the connection breaks."""
        try:
            with answer:
                for chunk in answer.iter_content(CHUNK):
                    self.check()
                    self.count("received", len(chunk))
                    yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise Again(reason(error)) from None


def _nothing(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Shows no credentials, those of a netrc file neither."""
    return request


def _wished(answer: requests.Response) -> float | None:
    try:
        return Retry().get_retry_after(answer.raw)
    except HTTPError:
        return None


def _shown(path: str) -> str:
    """A path without the query, in which registries put secrets."""
    return urlsplit(path).path


def ca_bundle(environ: Mapping[str, str]) -> Path | None:
    """The machine's certificate authorities, which may include those of its site; None: the HTTP library's."""
    found = [Path(environ[name]) for name in CA_VARIABLES if environ.get(name)]
    return next((path for path in (*found, SYSTEM_CA) if path.is_file()), None)


def patience(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds that a registry may fail: `IMAGEBUILD_REGISTRY_PATIENCE`, else two minutes. Raises ConfigError."""
    text = environ.get("IMAGEBUILD_REGISTRY_PATIENCE", "")
    try:
        seconds = float(text or PATIENCE_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"IMAGEBUILD_REGISTRY_PATIENCE={text}: is no number of seconds")
    return seconds
