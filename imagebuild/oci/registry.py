"""Talk to registries by the OCI distribution specification: log in, read, push, copy, attach, and try again."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.cookies import RequestsCookieJar
from requests.exceptions import RequestException
from requests.utils import parse_dict_header
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from imagebuild.core import settings
from imagebuild.core.console import err, format_size
from imagebuild.core.errors import CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.files import temporary_file, write_bytes
from imagebuild.core.http import innermost_reason
from imagebuild.core.run import for_each
from imagebuild.oci.layout import (
    EMPTY,
    INDEX,
    MANIFEST_TYPES,
    MOST_BYTES,
    Attachment,
    Blob,
    BlobStream,
    Descriptor,
    Manifest,
    attachment_manifest,
    blob_path,
    blobs_of,
    digest_of,
    index_document,
    manifests_of,
    media_type_of,
    referrer_descriptor,
    referrers_tag,
    start_layout,
)
from imagebuild.oci.reference import api_address, is_loopback, parse_reference

T = TypeVar("T")
P = ParamSpec("P")

CLIENT = "imagebuild"
CHUNK = 1 << 20
ACCEPT = {"Accept": ", ".join(MANIFEST_TYPES)}
TAGS_PER_REQUEST = 1000
CONNECTIONS = 32
JOBS = 4
"""Blobs that are copied at a time: more are not faster, and registries limit requests."""

PATIENCE_S = 25.0
"""How long a registry may fail before we give up."""
BUSY_FACTOR = 5
"""Factor for the patience with a registry that says when to ask again: it is busy, not broken."""
UNREACHABLE_PATIENCE_S = 15.0
"""How long nobody may answer at all: most often the name is wrong."""
LEAST_ATTEMPTS = 3
"""Attempts that are made even if each takes longer than the patience: an upload may take an hour."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 20
FIRST_STATUS_S, NEXT_STATUS_S, IDLE_S, WATCH_S = 2.0, 10.0, 1.0, 0.2
"""Seconds before the first status line, between later ones, without requests until it ends, and between checks."""
STORE_TIMEOUT_S = 600
"""How long to wait for the answer to a whole blob, which some registries copy before they answer."""
SETTLED_S, MOST_LISTINGS = 0.5, 30
"""How long after writing the index of referrers we read it again, or twice the time between reading and writing it if
that is more: a publisher who read it before our write has written by then, unless its requests are far slower than
ours. And how often we write it while others overwrite it."""

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
FINAL = (
    requests.exceptions.SSLError, requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema, requests.exceptions.InvalidHeader, requests.TooManyRedirects,
)  # fmt: skip
"""Errors that a second attempt would meet again."""
UNANSWERED = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")
UPLOAD_LOST = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})
"""Answers that mean that the registry does not know the upload any more, or another part of it than we sent."""
GARBLED = frozenset({"DIGEST_INVALID", "BLOB_UPLOAD_INVALID", "SIZE_INVALID"})
GARBLED_ATTEMPTS = 3
"""Times that something is sent again that arrived as something else, or that the registry cannot find."""
BLOB_UNKNOWN = frozenset({"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"})
CHANGED = "the registry sent something else as blob"
HINTS = {401: "; log in with `docker login`", 403: "; log in with `docker login` as someone who may do this"}
SHOWN_LENGTH = 300
"""Characters of a registry's answer that are shown."""


class DeletionDisabled(CommandError):
    """Report that the registry does not allow deletions."""


class TryAgain(CommandError):
    """Ask for another attempt; outside a retried method it is an error like any other."""

    def __init__(self, reason: str, pause_s: float = 0.0, *, unanswered: bool = False, at_most: int = 0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        """How long the registry wants us to wait; 0 if it does not say."""
        self.unanswered = unanswered
        """Whether nothing answered."""
        self.at_most = at_most
        """Most attempts, however much patience is left; 0 for no limit."""


# Answers


def _json_of(answer: requests.Response) -> dict[str, Any]:
    """Return the document of an answer; an empty one if it is something else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _errors(answer: requests.Response) -> list[dict[str, Any]]:
    items = _json_of(answer).get("errors")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _error_codes(answer: requests.Response) -> set[str]:
    """Return the codes of the errors that a registry lists, such as `BLOB_UNKNOWN`."""
    return {str(item.get("code", "")) for item in _errors(answer)}


def describe_answer(answer: requests.Response) -> str:
    """Return `403 (DENIED: requested access to the resource is denied)`."""
    texts = []
    for item in _errors(answer):
        detail = item.get("detail")
        if isinstance(detail, dict):
            detail = detail.get("digest") or detail.get("Digest")
        parts = (item.get("code"), item.get("message"), detail if isinstance(detail, str) else "")
        texts.append(": ".join(str(part) for part in parts if part))
    text = "; ".join(dict.fromkeys(texts)) or str(answer.reason or "")
    return f"{answer.status_code} ({text[:SHOWN_LENGTH]})"


# Login


@dataclass(frozen=True, repr=False)
class Credentials:
    """Hold what `docker login` has stored for a registry. Its repr does not show it."""

    user: str = ""
    password: str = ""
    identity_token: str = ""


def stored_credentials(host: str) -> Credentials | None:
    """Return the credentials of a registry from docker's configuration or its credential helper, if there are any.

    Raises CommandError if the configuration or the helper does not work.
    """
    from docker import auth  # noqa: PLC0415 - slow to import
    from docker.errors import DockerException  # noqa: PLC0415

    try:
        entry = auth.load_config().resolve_authconfig(host) or {}
    except DockerException as error:
        # The message may quote what the helper printed.
        raise CommandError(
            f"{host}: the credentials of `docker login` cannot be read ({type(error).__name__}); log in again"
        ) from None
    values = {name.lower(): value or "" for name, value in entry.items()}
    result = Credentials(values.get("username", ""), values.get("password", ""), values.get("identitytoken", ""))
    return result if result.password or result.identity_token else None


def parse_challenge(headers: list[str]) -> dict[str, str] | None:
    """Return the first of the `WWW-Authenticate` headers that can be met, as its `scheme` and fields.

    It is `basic` or, preferred, `bearer`: with a token of the server at `realm`.
    """
    challenges = {}
    for header in headers:
        scheme, _, rest = header.partition(" ")
        fields: dict[str, str | None] = parse_dict_header(rest)  # type: ignore[no-untyped-call]
        challenges[scheme.lower()] = {"scheme": scheme.lower()} | {n: value or "" for n, value in fields.items()}
    return challenges.get("bearer") or challenges.get("basic")


@dataclass
class Login:
    """Provide the `Authorization` header of requests to one registry, for several threads."""

    host: str
    ask: Callable[..., requests.Response]
    """Sends a request to the server of tokens: method, address and options as `requests` has them."""
    plain: bool = False
    """The registry is reached without TLS, as its user wants: its tokens may be too."""
    _challenge: Mapping[str, str] | None = None
    _tokens: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Scopes → token, which is used until the registry refuses it."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @functools.cached_property
    def credentials(self) -> Credentials | None:
        """Return what `docker login` has stored; it is looked up when the registry first wants it."""
        return stored_credentials(self.host)

    @property
    def _basic(self) -> str:
        user = self.credentials
        return f"Basic {base64.b64encode(f'{user.user}:{user.password}'.encode()).decode()}" if user else ""

    def header(self, scopes: tuple[str, ...]) -> str:
        """Return the header for these scopes; "" before a challenge. Raises CommandError if there is no token."""
        with self._lock:
            if self._challenge is None:
                return ""
            if self._challenge["scheme"] == "basic":
                return self._basic
            if scopes not in self._tokens:
                self._tokens[scopes] = self._fetch_token(scopes)
            return f"Bearer {self._tokens[scopes]}"

    def learn(self, answer: requests.Response, scopes: tuple[str, ...], shown: str) -> str:
        """Learn from a 401 how to log in. Return the header to send instead, "" if none. Raises as `header` does."""
        challenge = parse_challenge(answer.raw.headers.getlist("WWW-Authenticate"))
        if challenge is None:
            return ""
        with self._lock:
            self._challenge = challenge
            # Another thread may have fetched a new token since this request was sent.
            if f"Bearer {self._tokens.get(scopes)}" == shown:
                del self._tokens[scopes]
            better = self.header(scopes)
        return better if better != shown else ""

    def _fetch_token(self, scopes: tuple[str, ...]) -> str:
        assert self._challenge
        own, challenge = self.credentials, self._challenge
        realm, service = challenge.get("realm", ""), challenge.get("service", "")
        server = urlsplit(realm)
        if own and server.scheme != "https" and not self.plain and not is_loopback(server.netloc):
            raise CommandError(f"{self.host}: wants the password sent to {realm} without TLS; not done")
        wanted = tuple(dict.fromkeys(scope for scope in (*scopes, challenge.get("scope")) if scope))
        if own and own.identity_token:
            form = {
                "grant_type": "refresh_token", "service": service, "client_id": CLIENT, "scope": " ".join(wanted),
                "refresh_token": own.identity_token,
            }  # fmt: skip
            answer = self.ask("POST", realm, data=form)
        else:
            parameters = [("service", service), *(("scope", scope) for scope in wanted)]
            answer = self.ask("GET", realm, params=parameters, authorization=self._basic)
        document = _json_of(answer)
        token = document.get("token") or document.get("access_token")
        if answer.status_code != HTTPStatus.OK or not isinstance(token, str):
            with_what = "with the credentials of `docker login`" if own else "without login; try `docker login`"
            raise CommandError(f"{self.host}: gives no token for {' '.join(wanted)} ({answer.status_code}) {with_what}")
        return token


# The registry


def retried(method: Callable[Concatenate[Registry, P], T]) -> Callable[Concatenate[Registry, P], T]:
    """Repeat a method of a registry while it raises TryAgain and our patience lasts, then raise CommandError.

    A retried method that it calls is repeated together with it, not by itself.
    """

    @functools.wraps(method)
    def repeated(registry: Registry, /, *args: P.args, **options: P.kwargs) -> T:
        thread = threading.get_ident()
        if thread in registry.repeating:
            return method(registry, *args, **options)
        policy = Retry(total=None, backoff_factor=registry.backoff_s, backoff_max=15, backoff_jitter=registry.backoff_s)
        attempts, first = 0, 0.0
        registry.repeating[thread] = ""
        try:
            while True:
                registry.check_stopped()
                try:
                    return method(registry, *args, **options)
                except TryAgain as again:
                    now, registry.repeating[thread] = time.monotonic(), str(again)
                    attempts, first = attempts + 1, first or now
                    policy = policy.increment()
                    pause = max(policy.get_backoff_time(), again.pause_s)
                    patience = registry.patience_s * (BUSY_FACTOR if again.pause_s else 1)
                    patience = min(patience, UNREACHABLE_PATIENCE_S) if again.unanswered else patience
                    spent = now - first + pause
                    is_late = pause > patience or (spent > patience and attempts >= LEAST_ATTEMPTS)
                    if not patience or is_late or attempts == again.at_most:
                        kind = Unreachable if again.unanswered else CommandError
                        demand = f", and asks for a pause of {pause:.0f} s" if again.pause_s else ""
                        tries = f"after {attempts} attempts in {now - first:.0f} s" if attempts > 1 else "at once"
                        raise kind(f"{registry.host}: {again}{demand}; gave up {tries}") from None
                    registry.stopped.wait(pause)
        finally:
            del registry.repeating[thread]

    return repeated


@dataclass(eq=False)
class Registry:
    """Reach the repositories of one registry, from several threads. `repository` is its name there: `gpu/open`.

    Every method raises CommandError if the registry refuses, or fails for longer than we are patient.
    """

    host: str
    """Name of the registry, with the port if it has one."""
    base: str
    """Address that the paths of requests are relative to."""
    ca: Path | None = None
    """Bundle of certificate authorities; None: those of the HTTP library."""
    patience_s: float = PATIENCE_S
    backoff_s: float = 0.5
    """Base of the pauses, which double and vary at random; the first retry is immediate."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by method (`GET`, …), and the bytes of bodies `sent` and `received`."""
    lacks_referrers: bool = False
    """Whether the registry is known to lack the referrers API."""

    def __post_init__(self) -> None:
        self.session = requests.Session()
        self.session.headers.update({"User-Agent": CLIENT, "Accept-Encoding": "identity"})
        self.session.verify = str(self.ca) if self.ca else True
        # Docker does not look for registries of this machine behind a proxy either.
        self.session.trust_env = not is_loopback(self.host)
        self.session.auth = lambda request: request  # or the password of a netrc file replaces what we send
        # A session's cookies would be changed by several threads.
        self.session.cookies = RequestsCookieJar(DefaultCookiePolicy(allowed_domains=[]))
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS))
        self.login = Login(self.host, self._send, plain=self.base.startswith("http:"))
        self.stopped = threading.Event()
        self.repeating: dict[int, str] = {}
        """Threads that are in a retried method, and why they repeat it; empty in the first attempt."""
        self._lock = threading.Lock()
        self._requests: dict[object, tuple[float, str]] = {}
        """Requests under way: when they began, and what they ask for."""
        self._last_end = 0.0
        self._is_watched = False

    def at(self, repository: str) -> RepositoryAt:
        """Return a repository of it."""
        return RepositoryAt(self, repository)

    def stop(self) -> None:
        """End what other threads are doing with it, each with CommandError, for Ctrl-C."""
        self.stopped.set()

    def status(self) -> str:
        """Return `ghcr.io: 12 requests, 34.0 MB sent, 0.1 MB received; PUT acme/tiny/manifests/latest for 14 s`."""
        number = sum(number for name, number in self.counts.items() if name.isupper())
        sent, received = format_size(self.counts["sent"]), format_size(self.counts["received"])
        text = f"{self.host}: {number} requests, {sent} sent, {received} received"
        began, what = min(self._requests.copy().values(), default=(time.monotonic(), ""))
        if (seconds := time.monotonic() - began) >= 1:
            text += f"; {what} for {seconds:.0f} s"
        trouble = next(filter(None, self.repeating.copy().values()), "")
        return f"{text}; {trouble}; trying again" if trouble else text

    @contextmanager
    def _under_way(self, what: str) -> Iterator[None]:
        """Count a request among those under way, for the status."""
        key = object()
        self._requests[key] = time.monotonic(), what
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._watch, daemon=True).start()
        try:
            yield
        finally:
            del self._requests[key]
            self._last_end = time.monotonic()

    def _watch(self) -> None:
        """Print the status to stderr now and then while there are requests, so that nobody takes a command for dead."""
        shown_at = time.monotonic() + FIRST_STATUS_S
        while self._requests or any(self.repeating.copy().values()) or time.monotonic() < self._last_end + IDLE_S:
            if time.monotonic() >= shown_at:
                err.print(self.status(), markup=False)
                shown_at = time.monotonic() + NEXT_STATUS_S
            time.sleep(WATCH_S)
        self._is_watched = False

    def check_stopped(self) -> None:
        """Raise CommandError if the work was told to end."""
        if self.stopped.is_set():
            raise CommandError(f"{self.host}: interrupted")

    def count(self, what: str, number: int) -> None:
        """Add to the counts."""
        with self._lock:
            self.counts[what] += number

    def request(self, method: str, repository: str, path: str, source: str = "", **options: Any) -> requests.Response:
        """Send one request and return its answer, which may be a refusal.

        `path` is below the repository, or a whole address. Repository `source` has to be readable, too.
        Raises TryAgain for what may pass, CommandError for what stays wrong.
        """
        url = urljoin(f"{self.base}{repository}/", path)
        there, here = urlsplit(url), urlsplit(self.base)
        if there.netloc != here.netloc:
            # Uploads may go to another server, which authenticates them in its own way.
            return self._send(method, url, **options)
        if there.scheme != here.scheme:
            raise CommandError(
                f"{self.host}: says that uploads go to {there.scheme}://{there.netloc}; if a proxy is in front of the "
                "registry, it has to set X-Forwarded-Proto"
            )
        actions = {"GET": "pull", "HEAD": "pull", "DELETE": "delete,pull,push"}.get(method, "pull,push")
        scopes = (f"repository:{repository}:{actions}", *([f"repository:{source}:pull"] if source else []))
        shown = self.login.header(scopes)
        answer = self._send(method, url, authorization=shown, **options)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            answer.close()
            if better := self.login.learn(answer, scopes, shown):
                answer = self._send(method, url, authorization=better, **options)
        return answer

    def _send(self, method: str, url: str, authorization: str = "", **options: Any) -> requests.Response:
        self.check_stopped()
        self.count(method, 1)
        if isinstance(data := options.get("data"), bytes):
            self.count("sent", len(data))
        elif isinstance(data, BlobStream):
            options["data"] = replace(data, chunks=lambda: self._counted(data.chunks()))
        timeout = options.pop("timeout", READ_TIMEOUT_S)
        headers = {**options.pop("headers", {}), **({"Authorization": authorization} if authorization else {})}
        # The query is not shown: registries put secrets into it.
        what = f"{method} {urlsplit(url).path.removeprefix('/v2/')}"
        try:
            with self._under_way(what):
                answer = self.session.request(
                    method, url, headers=headers, timeout=(CONNECT_TIMEOUT_S, timeout), **options
                )
                if not options.get("stream"):
                    self.count("received", len(answer.content))
        except FINAL as error:
            raise CommandError(f"{self.host}: {method}: {innermost_reason(error)}") from None
        except (RequestException, HTTPError, OSError) as error:
            unanswered = any(mark in repr(error) for mark in UNANSWERED)
            raise TryAgain(f"{what}: {innermost_reason(error)}", unanswered=unanswered) from None
        if answer.status_code in RETRIED:
            with answer:
                try:
                    pause_s = Retry().get_retry_after(answer.raw) or 0.0
                except HTTPError:
                    pause_s = 0.0
                raise TryAgain(f"{what}: the registry answered {describe_answer(answer)}", pause_s)
        return answer

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.check_stopped()
            self.count("sent", len(chunk))
            yield chunk

    def _expect(self, answer: requests.Response, what: str, *statuses: int) -> None:
        """Raise CommandError for another status."""
        if answer.status_code not in statuses:
            hint = HINTS.get(answer.status_code, "")
            raise CommandError(f"{self.host}/{what}: the registry answered {describe_answer(answer)}{hint}")

    def _pages(self, repository: str, path: str, **options: Any) -> Iterator[requests.Response]:
        """Yield the answers of a list that comes in pages."""
        while path:
            answer = self.request("GET", repository, path, **options)
            yield answer
            path = answer.links.get("next", {}).get("url", "")
            path = urljoin(answer.url, path) if path else ""

    @retried
    def digest(self, repository: str, reference: str) -> str | None:
        """Return the digest of what a tag names now, or None if there is nothing."""
        answer = self.request("HEAD", repository, f"manifests/{reference}", headers=ACCEPT)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        self._expect(answer, f"{repository}: {reference}", HTTPStatus.OK)
        if digest := answer.headers.get("Docker-Content-Digest"):
            return digest
        manifest = self.manifest(repository, reference)
        return manifest.digest if manifest else None

    @retried
    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest by tag or digest, or None if there is none."""
        answer = self.request("GET", repository, f"manifests/{reference}", headers=ACCEPT)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        self._expect(answer, f"{repository}: manifest {reference}", HTTPStatus.OK)
        digest = digest_of(answer.content)
        expected = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", digest)
        if expected != digest:
            raise TryAgain(f"{repository}: the registry sent a manifest of digest {digest} as {expected}")
        return Manifest(answer.content, answer.headers.get("Content-Type", "").partition(";")[0], digest)

    @retried
    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest by tag or digest, read back what the registry has, and return its digest.

        Another digest than the content's means that somebody else moved the tag since. What is there already is not
        sent.
        """
        what = f"{repository}: manifest {reference}"
        own, before = digest_of(content), self.digest(repository, reference)
        if before == own:
            return own
        headers = {"Content-Type": media_type}
        answer = self.request("PUT", repository, f"manifests/{reference}", data=content, headers=headers)
        if BLOB_UNKNOWN & _error_codes(answer):
            lacking = f"{what}: the registry lacks what it names: {describe_answer(answer)}"
            raise TryAgain(lacking, at_most=GARBLED_ATTEMPTS)
        self._expect(answer, what, HTTPStatus.CREATED, HTTPStatus.ACCEPTED, HTTPStatus.OK)
        after = self.digest(repository, reference)
        if after is None or after == before:
            raise TryAgain(f"{what}: the registry took it, but does not have it")
        return after

    @retried
    def tags(self, repository: str) -> tuple[str, ...]:
        """Return all tags of a repository; none if there is no such repository."""
        tags: list[str] = []
        for answer in self._pages(repository, f"tags/list?n={TAGS_PER_REQUEST}"):
            if answer.status_code == HTTPStatus.NOT_FOUND:
                break
            self._expect(answer, f"{repository}: tags", HTTPStatus.OK)
            document = _json_of(answer)
            if not document:
                where = f"{self.host}/{repository}: tags"
                raise CommandError(f"{where}: this is not the answer of a registry; is {self.host} one?")
            tags += document.get("tags") or ()
        return tuple(dict.fromkeys(tags))

    @retried
    def has_blob(self, repository: str, digest: str) -> bool:
        """Return whether the repository has a blob."""
        answer = self.request("HEAD", repository, f"blobs/{digest}")
        if answer.status_code != HTTPStatus.NOT_FOUND:
            self._expect(answer, f"{repository}: blob {digest}", HTTPStatus.OK)
        return answer.status_code == HTTPStatus.OK

    @retried
    def blob(self, repository: str, digest: str) -> bytes:
        """Return a blob that is a document, compared with its digest. Raises CommandError for one that is too large."""
        content = bytearray()
        for chunk in self.open_blob(repository, digest):
            content += chunk
            if len(content) > MOST_BYTES:
                raise CommandError(f"{repository}: blob {digest}: has more than the {MOST_BYTES} bytes that are read")
        if digest_of(bytes(content)) != digest:
            raise TryAgain(f"{repository}: {CHANGED} {digest}", at_most=GARBLED_ATTEMPTS)
        return bytes(content)

    @retried
    def fetch(self, repository: str, digest: str, path: Path, size: int) -> None:
        """Write a blob of any size to a file, if it is not there yet; it appears under its name when it is whole.

        Raises ResultError if the disk is too small.
        """
        if path.exists():
            return
        content = hashlib.sha256()
        try:
            if shutil.disk_usage(path.parent).free < size:
                raise ResultError(f"{size / 1e9:.1f} GB do not fit in {path.parent}; TMPDIR may name another folder")
            with temporary_file(path.parent) as temporary:
                with temporary.open("wb") as file:
                    for chunk in self.open_blob(repository, digest):
                        content.update(chunk)
                        file.write(chunk)
                if f"sha256:{content.hexdigest()}" != digest:
                    raise TryAgain(f"{repository}: {CHANGED} {digest}", at_most=GARBLED_ATTEMPTS)
                temporary.rename(path)
        except OSError as error:
            raise ResultError(f"{path}: cannot be written: {error.strerror}; TMPDIR may name another folder") from None

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """Yield a blob of any size in pieces. The caller compares it with its digest. Raises TryAgain if the connection
        breaks midway.
        """
        try:
            with self._open_blob(repository, digest) as answer, self._under_way(f"GET {repository}/blobs/{digest}"):
                for chunk in answer.iter_content(CHUNK):
                    self.check_stopped()
                    self.count("received", len(chunk))
                    yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise TryAgain(f"{repository}: blob {digest}: {innermost_reason(error)}") from None

    @retried
    def _open_blob(self, repository: str, digest: str) -> requests.Response:
        answer = self.request("GET", repository, f"blobs/{digest}", stream=True)
        self._expect(answer, f"{repository}: blob {digest}", HTTPStatus.OK)
        return answer

    @retried
    def put_blob(self, repository: str, content: bytes | BlobStream, digest: str, source: str = "") -> Counter[str]:
        """Store a blob in a repository: mount it from repository `source` of the same registry, or upload it.

        Return `Counter(mounted=1)`, or how many `blobs` and `bytes` were sent: none if it was there.
        """
        what, uploads = f"{repository}: upload of {digest}", "blobs/uploads/"
        if self.has_blob(repository, digest):
            return Counter()
        opened = None
        if source:
            path = f"{uploads}?{urlencode({'mount': digest, 'from': source})}"
            opened = self.request("POST", repository, path, source)
            if opened.status_code == HTTPStatus.CREATED and self.has_blob(repository, digest):
                return Counter(mounted=1)
        # A registry that would rather have the bytes has opened an upload for them.
        if opened is None or opened.status_code != HTTPStatus.ACCEPTED:
            opened = self.request("POST", repository, uploads)
            self._expect(opened, what, HTTPStatus.ACCEPTED)
        if not (location := opened.headers.get("Location")):
            raise CommandError(f"{self.host}: does not say where uploads go; it is no registry of images")
        url = urljoin(opened.url, location)
        url = f"{url}{'&' if urlsplit(url).query else '?'}{urlencode({'digest': digest})}"
        answer = self.request(
            "PUT", repository, url, data=content if len(content) else b"", timeout=STORE_TIMEOUT_S,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        if answer.status_code in UPLOAD_LOST:
            raise TryAgain(f"{what}: the registry lost it ({answer.status_code})")
        if GARBLED & _error_codes(answer):
            garbled = f"{what}: what arrived was not what was sent: {describe_answer(answer)}"
            raise TryAgain(garbled, at_most=GARBLED_ATTEMPTS)
        self._expect(answer, what, HTTPStatus.CREATED)
        if not self.has_blob(repository, digest):
            # Some only take a moment: they are asked once more before it is sent again.
            self.stopped.wait(self.backoff_s)
            raise TryAgain(f"{what}: the registry took it, but does not have it")
        return Counter(blobs=1, bytes=len(content))

    @retried
    def referrers(self, repository: str, digest: str) -> tuple[Descriptor, ...]:
        """Return what refers to a manifest, from the referrers API or, where there is none, the tag schema."""
        items = None if self.lacks_referrers else self._referrers_by_api(repository, digest)
        return self._referrers_by_tag(repository, digest) if items is None else items

    def _referrers_by_api(self, repository: str, digest: str) -> tuple[Descriptor, ...] | None:
        """Return None if the registry has no such API, and remember that it is not to be asked again."""
        items: list[Descriptor] = []
        for answer in self._pages(repository, f"referrers/{digest}", headers={"Accept": INDEX}):
            media_type = answer.headers.get("Content-Type", "").partition(";")[0]
            if answer.status_code != HTTPStatus.OK or media_type != INDEX:
                self._expect(
                    answer, f"{repository}: what refers to {digest}", HTTPStatus.OK, HTTPStatus.BAD_REQUEST,
                    HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED,
                )  # fmt: skip
                # A registry with the API lists errors of its own, such as a repository that it does not know.
                self.lacks_referrers = not _errors(answer)
                return None
            items += manifests_of(answer.json())
        return tuple({item.digest: item for item in items}.values())

    def _referrers_by_tag(self, repository: str, digest: str) -> tuple[Descriptor, ...]:
        index = self.manifest(repository, referrers_tag(digest))
        return manifests_of(index.document) if index else ()

    def attach(self, repository: str, subject: Descriptor, attachment: Attachment) -> str:
        """Store a file that refers to a manifest, and return the digest of its own manifest.

        The same file and annotations again change nothing.
        """
        content = attachment_manifest(subject, attachment)
        own = referrer_descriptor(content)
        for data in (EMPTY, attachment.content):
            self.put_blob(repository, data, digest_of(data))
        self.put_manifest(repository, own.digest, content, own.media_type)
        for _ in range(MOST_LISTINGS):
            start = time.monotonic()
            by_registry = self.referrers(repository, subject.digest)
            by_tag = self._referrers_by_tag(repository, subject.digest)
            if own.digest in {item.digest for item in (*by_registry, *by_tag)}:
                return own.digest
            # Sorted, so that it does not depend on who came first. Another publisher may overwrite it at the same time.
            index = index_document(sorted((*by_tag, own), key=lambda item: item.digest))
            self.put_manifest(repository, referrers_tag(subject.digest), index, INDEX)
            self.stopped.wait(max(SETTLED_S, 2 * (time.monotonic() - start)) * (1 + random.random()))  # noqa: S311
        raise CommandError(f"{self.host}/{repository}: other publishers write the list of attachments all the time")

    @retried
    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it, if it is there. Raises DeletionDisabled."""
        answer = self.request("DELETE", repository, f"manifests/{digest}")
        if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise DeletionDisabled(
                f"{self.host}: does not let images be deleted (405); the distribution's registry does with "
                "`storage: {delete: {enabled: true}}` in its configuration, or REGISTRY_STORAGE_DELETE_ENABLED=true"
            )
        deleted = (HTTPStatus.ACCEPTED, HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND)
        self._expect(answer, f"{repository}: deletion of {digest}", *deleted)


def connect_registry(
    host: str, *, patience_s: float | None = None, environ: Mapping[str, str] | None = None
) -> Registry:
    """Return the registry of a host, which is not asked anything yet. Raises ConfigError for unusable settings.

    It may fail for as many seconds as IMAGEBUILD_REGISTRY_PATIENCE says, else PATIENCE_S.
    """
    environ = os.environ if environ is None else environ
    if patience_s is None:
        text = environ.get("IMAGEBUILD_REGISTRY_PATIENCE", "")
        try:
            patience_s = float(text or PATIENCE_S)
        except ValueError:
            patience_s = -1.0
        if not 0 <= patience_s < float("inf"):
            raise ConfigError(f"IMAGEBUILD_REGISTRY_PATIENCE={text}: not a number of seconds; use 0 or more")
    address = api_address(host, _insecure_registries(environ))
    return Registry(host, address, settings.ca_bundle(None, environ), patience_s)


def is_plain(host: str, environ: Mapping[str, str]) -> bool:
    """Return whether a registry is asked without TLS. Raises ConfigError for unusable settings."""
    return api_address(host, _insecure_registries(environ)).startswith("http://")


def _insecure_registries(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = environ.get("IMAGEBUILD_INSECURE_REGISTRIES", "").replace(",", " ").split()
    return (*settings.load_settings(environ).insecure_registries, *names)


# Copies


@dataclass(frozen=True)
class Layout:
    """Read and write the images of a layout, with the same methods as `RepositoryAt`."""

    folder: Path

    def manifest(self, digest: str) -> Manifest:
        """Return a manifest or an index. Raises ResultError if it is missing or damaged."""
        path = blob_path(self.folder, digest)
        if not path.is_file():
            raise ResultError(f"{self.folder}: has no manifest {digest}")
        content = Blob(path, 0, path.stat().st_size, digest).read()
        return Manifest(content, media_type_of(json.loads(content)), digest)

    def content(self, blob: Descriptor) -> BlobStream:
        """Return a blob, to be read when it is needed. Raises ResultError if the layout does not have all of it."""
        path = blob_path(self.folder, blob.digest)
        if not path.is_file() or path.stat().st_size != blob.size:
            raise ResultError(f"{self.folder}: does not have all of blob {blob.digest}; build it again")

        def chunks() -> Iterator[bytes]:
            try:
                with path.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        yield chunk
            except OSError as error:
                # An OSError that ends an upload is taken for one of the connection.
                raise CommandError(f"{path}: cannot be read: {error.strerror}") from None

        return BlobStream(blob.size, chunks)

    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Copy a blob to a file, if that is not there yet; it appears under its name when it is whole."""
        if not path.exists():
            with temporary_file(path.parent) as temporary:
                shutil.copyfile(blob_path(self.folder, blob.digest), temporary)
                temporary.rename(path)

    def has(self, digest: str) -> bool:
        """Return whether there is a manifest. It is written after all that it names."""
        return blob_path(self.folder, digest).is_file()

    def take(self, blob: Descriptor, source: RepositoryAt | Layout) -> Counter[str]:
        """Get a blob from another place, if it is not there yet. Return how many `blobs` and `bytes` that are."""
        if self.has(blob.digest):
            return Counter()
        source.fetch(blob, blob_path(self.folder, blob.digest))
        return Counter(blobs=1, bytes=blob.size)

    def put_manifest(self, manifest: Manifest) -> None:
        """Store a manifest by its digest; it appears when it is whole, as it says that all it names is there."""
        write_bytes(blob_path(self.folder, manifest.digest), manifest.content)


@dataclass(frozen=True)
class RepositoryAt:
    """Read and write the images of one repository of a registry, with the same methods as `Layout`."""

    registry: Registry
    repository: str

    def __str__(self) -> str:
        return f"{self.registry.host}/{self.repository}"

    def check_writable(self) -> None:
        """Raise CommandError if nothing can be written here, which a blob of two bytes shows."""
        self.registry.put_blob(self.repository, EMPTY, digest_of(EMPTY))

    def manifest(self, digest: str) -> Manifest:
        """Return a manifest. Raises CommandError if it is not there."""
        if manifest := self.registry.manifest(self.repository, digest):
            return manifest
        raise CommandError(f"{self}@{digest}: is not there; build and verify it first, or say which registry has it")

    def content(self, blob: Descriptor) -> BlobStream:
        """Return a blob, to be read when it is needed."""
        return BlobStream(blob.size, lambda: self.registry.open_blob(self.repository, blob.digest))

    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Write a blob to a file, if that is not there yet. Raises what `Registry.fetch` raises."""
        self.registry.fetch(self.repository, blob.digest, path, blob.size)

    def has(self, digest: str) -> bool:
        """Return whether there is a manifest, and so all that it names."""
        return self.registry.digest(self.repository, digest) is not None

    def take(self, blob: Descriptor, source: RepositoryAt | Layout) -> Counter[str]:
        """Get a blob from another place: mounted if it is of the same registry. Return what `put_blob` returns."""
        is_near = isinstance(source, RepositoryAt) and source.registry.host == self.registry.host
        near = source.repository if isinstance(source, RepositoryAt) and is_near else ""
        return self.registry.put_blob(self.repository, source.content(blob), blob.digest, near)

    def put_manifest(self, manifest: Manifest) -> None:
        """Store a manifest by its digest."""
        self.registry.put_manifest(self.repository, manifest.digest, manifest.content, manifest.media_type)


def copy_image(digest: str, source: RepositoryAt | Layout, target: RepositoryAt | Layout) -> Counter[str]:
    """Make a manifest, or an index with all that it names, available in another place by the same digest.

    What is there is left alone; blobs are mounted where that can be, else they stream through this machine. Return the
    number of `manifests` and `blobs` that were sent, their `bytes`, and how many blobs were `mounted`. Raises
    CommandError if the source does not have it or a registry fails, and ResultError if a layout is not whole.
    """
    if target.has(digest):
        return Counter()
    manifest = source.manifest(digest)
    moved = sum((copy_image(child.digest, source, target) for child in manifests_of(manifest.document)), Counter[str]())
    registries = [place.registry for place in (source, target) if isinstance(place, RepositoryAt)]
    parts = blobs_of(manifest.document)
    moved += sum(for_each(lambda blob: target.take(blob, source), parts, *registries, jobs=JOBS), Counter())
    target.put_manifest(manifest)
    return moved + Counter(manifests=1, bytes=len(manifest.content))


def push_image(layout: Path, digest: str, registry: Registry, repository: str, tag: str | None = None) -> Counter[str]:
    """Push a manifest, or an index with all that it names, from a layout; what is there already is not sent.

    A tag is given last. Raises ResultError if the layout does not have it all, CommandError if the registry fails.
    """
    moved = copy_image(digest, Layout(layout), RepositoryAt(registry, repository))
    if tag and registry.digest(repository, tag) != digest:
        manifest = Layout(layout).manifest(digest)
        registry.put_manifest(repository, tag, manifest.content, manifest.media_type)
        moved += Counter(manifests=1, bytes=len(manifest.content))
    return moved


def pull_image(reference: str, layout: Path) -> str:
    """Copy `image:tag@digest`, all its platforms, from its registry into a layout. Return the digest.

    Raises CommandError if the registry fails or does not have it, ResultError if it cannot be stored.
    """
    name = parse_reference(reference)
    start_layout(layout)
    copy_image(name.wanted, connect_registry(name.host).at(name.repository), Layout(layout))
    return name.wanted
