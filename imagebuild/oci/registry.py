"""Talk to a registry by the OCI distribution specification: log in, read, push, copy, attach."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth
from requests.cookies import RequestsCookieJar
from requests.exceptions import RequestException
from requests.utils import parse_dict_header
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from imagebuild.core import settings
from imagebuild.core.errors import CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.http import innermost_reason
from imagebuild.core.run import for_each
from imagebuild.oci.layout import (
    EMPTY,
    INDEX,
    MANIFEST_TYPES,
    AttachmentFile,
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
)
from imagebuild.oci.reference import api_address, is_loopback

T = TypeVar("T")
R = TypeVar("R")

CLIENT = "imagebuild"
CHUNK = 1 << 20
ACCEPT = {"Accept": ", ".join(MANIFEST_TYPES)}
TAGS_PER_REQUEST = 1000
CONNECTIONS = 32
JOBS = 4
"""Blobs at a time: more fill no line that is worth it, and registries count requests."""
COPY_ATTEMPTS = 3
"""Times that blobs are sent again because the registry refuses a manifest for lack of one."""

PATIENCE_S = 120.0
"""How long a registry may fail before we give up."""
UNREACHABLE_PATIENCE_S = 15.0
"""How long nobody may answer at all: most often the name is wrong."""
LEAST_ATTEMPTS = 3
"""Attempts that are made even if each takes longer than the patience: an upload may take an hour."""
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60
STORE_TIMEOUT_S = 600
"""For the answer to a whole blob, which some registries copy before they answer."""
SETTLED_S = 0.5
"""How long after writing the index of referrers it is looked at again, or twice the time between reading and writing it
if that is more: who read it before we wrote has written by then, unless its requests take far longer than ours."""
TOKEN_LIFETIME_S = 60
"""Of a token whose server does not say how long it is valid."""
TOKEN_MARGIN_S = 10
"""A token is not used in its last seconds: a request takes time too."""

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
BLOB_UNKNOWN = frozenset({"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"})
LISTED_BY_REGISTRY = "OCI-Subject"
"""Header of a registry that lists by itself what refers to a manifest."""
HINTS = {
    HTTPStatus.UNAUTHORIZED: "log in with `docker login`",
    HTTPStatus.FORBIDDEN: "log in with `docker login` as someone who may do this",
}
SHOWN_LENGTH = 300
"""Characters of a registry's answer that are shown."""


class MissingBlobs(CommandError):
    """Refuse a manifest, since the registry does not have what it names."""


class DeletionDisabled(CommandError):
    """Refuse to delete: the registry lets nothing be deleted."""


class TryAgain(CommandError):
    """Ask for another attempt. What nobody repeats has failed."""

    def __init__(self, reason: str, pause_s: float | None = None, *, unanswered: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.pause_s = pause_s
        """How long the registry wants us to wait."""
        self.unanswered = unanswered
        """Nothing answered."""


@dataclass(frozen=True)
class BlobStream:
    """Describe a blob that comes from elsewhere while it is uploaded."""

    size: int
    chunks: Callable[[], Iterator[bytes]]
    """Reads the blob from its start; called again for each attempt."""


@dataclass(frozen=True)
class Traffic:
    """Count what was moved to a registry."""

    manifests: int = 0
    blobs: int = 0
    """Blobs that were uploaded; those that were there, or mounted, do not count."""
    bytes: int = 0
    """Of those manifests and blobs."""
    mounted: int = 0
    """Blobs that the registry took from another repository."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.manifests + other.manifests,
            self.blobs + other.blobs,
            self.bytes + other.bytes,
            self.mounted + other.mounted,
        )


class Registry(Protocol):
    """Offer the repositories of one registry. `repository` is its name without the registry: `gpu/open`.

    Every method raises CommandError if the registry refuses, or fails for longer than we are patient.
    """

    @property
    def host(self) -> str:
        """Return the name of the registry, with the port if it has one."""

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest by tag or digest, or None if there is none."""

    def digest(self, repository: str, reference: str) -> str | None:
        """Return the digest of what a tag names now, or None if there is nothing."""

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest by tag or digest, read back what the registry has, and return its digest.

        Another digest than the content's means that somebody else moved the tag since. What is there already is not
        sent. Raises MissingBlobs if the registry lacks what the manifest names.
        """

    def tags(self, repository: str) -> tuple[str, ...]:
        """Return all tags of a repository; none if there is no such repository."""

    def has_blob(self, repository: str, digest: str) -> bool:
        """Return whether the repository has a blob."""

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob, compared with its digest."""

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """Yield a blob of any size in pieces. The caller compares it with its digest. Raises TryAgain if the connection
        breaks midway.
        """

    def put_blob(self, repository: str, content: bytes | Path | BlobStream, digest: str) -> bool:
        """Upload a blob, unless the repository has it. Return whether anything was sent."""

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one, without sending it. Return whether the registry could."""

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """Return what refers to a manifest, from the referrers API or, where there is none, the tag schema."""

    def attach(
        self,
        repository: str,
        subject: Descriptor,
        artifact_type: str,
        files: tuple[AttachmentFile, ...],
        annotations: Mapping[str, str],
    ) -> str:
        """Store files that refer to a manifest, and return the digest of their manifest.

        The same files and annotations again change nothing.
        """

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it, if it is there. Raises DeletionDisabled."""

    def stop(self) -> None:
        """End what other threads are doing with it, each with CommandError, for Ctrl-C."""


# Answers


def error_codes(answer: requests.Response) -> tuple[str, ...]:
    """Return the codes of the errors that a registry lists, such as `BLOB_UNKNOWN`."""
    return tuple(str(item.get("code", "")) for item in _errors(answer))


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


def expect_status(answer: requests.Response, what: str, *statuses: int) -> None:
    """Raise CommandError for another status."""
    if answer.status_code in statuses:
        return
    hint = HINTS.get(HTTPStatus(answer.status_code)) if answer.status_code in set(HTTPStatus) else None
    raise CommandError(f"{what}: the registry answered {describe_answer(answer)}" + (f"; {hint}" if hint else ""))


def _errors(answer: requests.Response) -> list[dict[str, Any]]:
    items = _json_of(answer).get("errors")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _json_of(answer: requests.Response) -> dict[str, Any]:
    """Return the document of an answer; an empty one if it is something else."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _next_page(answer: requests.Response) -> str | None:
    following = answer.links.get("next", {}).get("url")
    return urljoin(answer.url, following) if following else None


# Login


def pull_scope(repository: str) -> tuple[str, ...]:
    """Return the scope of a token for reading a repository."""
    return (f"repository:{repository}:pull",)


def push_scope(repository: str) -> tuple[str, ...]:
    """Return the scope of a token for reading and writing a repository."""
    return (f"repository:{repository}:pull,push",)


@dataclass(frozen=True, repr=False)
class Credentials:
    """Hold what `docker login` has stored for a registry. It has no text, so that it cannot be printed."""

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


@dataclass(frozen=True)
class Challenge:
    """Say how a registry wants to be asked: `Basic`, or `Bearer` with a token of the server at `realm`."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""


def parse_challenge(headers: list[str]) -> Challenge | None:
    """Return the first of the `WWW-Authenticate` headers that can be met; tokens are preferred."""
    challenges = {}
    for header in headers:
        scheme, _, rest = header.partition(" ")
        values: dict[str, str | None] = parse_dict_header(rest)  # type: ignore[no-untyped-call]
        fields = {name: values.get(name) or "" for name in ("realm", "service", "scope")}
        challenges[scheme.lower()] = Challenge(scheme.lower(), **fields)
    return challenges.get("bearer") or challenges.get("basic")


class HeaderAuth(requests.auth.AuthBase):
    """Send this header, and nothing that a netrc file says; without a value, no header."""

    def __init__(self, value: str = "") -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request


@dataclass
class Login:
    """Choose what one registry is shown with each request; for several threads."""

    host: str
    ask: Callable[..., requests.Response]
    """Sends a request to the server of tokens: method, address and options as `requests` has them."""
    find: Callable[[str], Credentials | None] = stored_credentials
    plain: bool = False
    """The registry is reached without TLS, as its user wants: its tokens may be too."""
    _challenge: Challenge | None = None
    _tokens: dict[tuple[str, ...], tuple[str, float]] = field(default_factory=dict)
    """Scopes → token, and the time until which it is used."""
    _credentials: list[Credentials | None] = field(default_factory=list)
    """Empty until they are looked up."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def header(self, scopes: tuple[str, ...]) -> requests.auth.AuthBase:
        """Return what to send with a request that needs these scopes, as far as is known. Raises CommandError."""
        with self._lock:
            if self._challenge is None:
                return HeaderAuth()
            if self._challenge.scheme == "basic":
                return self._basic()
            token, until = self._tokens.get(scopes, ("", 0.0))
            if time.monotonic() >= until:
                token = self._fetch_token(self._challenge, scopes)
            return HeaderAuth(f"Bearer {token}")

    def learn(self, answer: requests.Response, scopes: tuple[str, ...], shown: requests.auth.AuthBase) -> bool:
        """Learn from a 401 how to ask. Return whether it is worth asking again. Raises CommandError."""
        challenge = parse_challenge(answer.raw.headers.getlist("WWW-Authenticate"))
        if challenge is None:
            return False
        with self._lock:
            if challenge.scheme == "basic":
                again = not isinstance(shown, HTTPBasicAuth) and isinstance(self._basic(), HTTPBasicAuth)
                self._challenge = challenge
                return again
            self._challenge = challenge
            held = self._tokens.get(scopes)
            # Another thread may have fetched a new token since this request was sent.
            if held is None or f"Bearer {held[0]}" == getattr(shown, "value", ""):
                self._fetch_token(challenge, scopes)
            return True

    def _own(self) -> Credentials | None:
        if not self._credentials:
            self._credentials.append(self.find(self.host))
        return self._credentials[0]

    def _basic(self) -> requests.auth.AuthBase:
        own = self._own()
        return HTTPBasicAuth(own.user, own.password) if own else HeaderAuth()

    def _fetch_token(self, challenge: Challenge, scopes: tuple[str, ...]) -> str:
        own = self._own()
        server = urlsplit(challenge.realm)
        if own and server.scheme != "https" and not self.plain and not is_loopback(server.netloc):
            raise CommandError(f"{self.host}: wants the password sent to {challenge.realm} without TLS; not done")
        wanted = tuple(dict.fromkeys(scope for scope in (*scopes, challenge.scope) if scope))
        if own and own.identity_token:
            form = {
                "grant_type": "refresh_token",
                "service": challenge.service,
                "client_id": CLIENT,
                "scope": " ".join(wanted),
                "refresh_token": own.identity_token,
            }
            answer = self.ask("POST", challenge.realm, data=form, auth=HeaderAuth())
        else:
            parameters = [("service", challenge.service), *(("scope", scope) for scope in wanted)]
            answer = self.ask("GET", challenge.realm, params=parameters, auth=self._basic())
        document = _json_of(answer)
        token = document.get("token") or document.get("access_token")
        if answer.status_code != HTTPStatus.OK or not isinstance(token, str):
            manner = (
                "with the credentials of `docker login`" if own else f"without login; try `docker login {self.host}`"
            )
            raise CommandError(f"{self.host}: gives no token for {' '.join(wanted)} ({answer.status_code}) {manner}")
        lifetime = document.get("expires_in")
        seconds = lifetime if isinstance(lifetime, int) else TOKEN_LIFETIME_S
        self._tokens[scopes] = (token, time.monotonic() + max(seconds - TOKEN_MARGIN_S, 1))
        return token


# Connection


@dataclass(eq=False)
class RegistryConnection:
    """Send requests to one registry, for several threads."""

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
        self.session.headers.update({"User-Agent": CLIENT, "Accept-Encoding": "identity"})
        self.session.verify = str(self.ca) if self.ca else True
        # Docker does not look for registries of this machine behind a proxy either.
        self.session.trust_env = not is_loopback(self.host)
        # A session's cookies would be changed by several threads.
        self.session.cookies = RequestsCookieJar(DefaultCookiePolicy(allowed_domains=[]))
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS))
        self.stopped = threading.Event()
        self.login = Login(self.host, self._send, plain=self.base.startswith("http:"))
        self._lock = threading.Lock()

    def check_stopped(self) -> None:
        """Raise CommandError if the work was told to end."""
        if self.stopped.is_set():
            raise CommandError(f"{self.host}: interrupted")

    def count(self, what: str, number: int) -> None:
        """Add to the counts."""
        with self._lock:
            self.counts[what] += number

    def retry(self, what: str, action: Callable[[], T]) -> T:
        """Do something until it does not raise TryAgain. Raises CommandError when our patience ends."""
        policy = Retry(total=None, backoff_factor=self.backoff_s, backoff_max=15, backoff_jitter=self.backoff_s)
        attempts, first = 0, 0.0
        while True:
            self.check_stopped()
            try:
                return action()
            except TryAgain as again:
                now = time.monotonic()
                attempts, first = attempts + 1, first or now
                policy = policy.increment()
                pause = max(policy.get_backoff_time(), again.pause_s or 0.0)
                patience = min(self.patience_s, UNREACHABLE_PATIENCE_S) if again.unanswered else self.patience_s
                spent = now - first + pause
                if not patience or pause > patience or (spent > patience and attempts >= LEAST_ATTEMPTS):
                    kind = Unreachable if again.unanswered else CommandError
                    demand = f", and wants to be left alone for {pause:.0f} s" if again.pause_s else ""
                    tries = f"after {attempts} attempts in {now - first:.0f} s" if attempts > 1 else "at once"
                    raise kind(f"{self.host}: {what}: {again.reason}{demand}; gave up {tries}") from None
                self.stopped.wait(pause)

    def request(self, method: str, path: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """Send a request that may be sent twice, and retry it. Raises CommandError."""
        # The query is not shown: registries put secrets into it.
        what = f"{method} {urlsplit(path).path}"
        return self.retry(what, lambda: self.request_once(method, path, scopes, **options))

    def request_once(self, method: str, path: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """Send one request and return its answer, which may be a refusal.

        Raises TryAgain for what may pass, CommandError for what stays wrong.
        """
        url = urljoin(self.base, path)
        there, here = urlsplit(url), urlsplit(self.base)
        if there.netloc != here.netloc:
            # Uploads may go to another server, which has its own way to know them.
            return self._send(method, url, auth=HeaderAuth(), **options)
        if there.scheme != here.scheme:
            raise CommandError(
                f"{self.host}: says that uploads go to {there.scheme}://{there.netloc}; if a proxy is in front of the "
                "registry, it has to tell it X-Forwarded-Proto"
            )
        shown = self.login.header(scopes)
        answer = self._send(method, url, auth=shown, **options)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            answer.close()
            if self.login.learn(answer, scopes, shown):
                answer = self._send(method, url, auth=self.login.header(scopes), **options)
        return answer

    def _send(self, method: str, url: str, **options: Any) -> requests.Response:
        self.check_stopped()
        self.count(method, 1)
        if isinstance(options.get("data"), bytes):
            self.count("sent", len(options["data"]))
        timeout = options.pop("timeout", READ_TIMEOUT_S)
        try:
            answer = self.session.request(method, url, timeout=(CONNECT_TIMEOUT_S, timeout), **options)
            if not options.get("stream"):
                self.count("received", len(answer.content))
        except FINAL as error:
            raise CommandError(f"{self.host}: {method}: {innermost_reason(error)}") from None
        except (RequestException, HTTPError, OSError) as error:
            unanswered = any(mark in repr(error) for mark in UNANSWERED)
            raise TryAgain(innermost_reason(error), unanswered=unanswered) from None
        if answer.status_code in RETRIED:
            with answer:
                try:
                    pause_s = Retry().get_retry_after(answer.raw)
                except HTTPError:
                    pause_s = None
                raise TryAgain(f"the registry answered {describe_answer(answer)}", pause_s)
        return answer

    def chunks(self, answer: requests.Response) -> Iterator[bytes]:
        """Yield the body of an answer that was asked for with `stream`. Raises TryAgain if the connection breaks."""
        try:
            with answer:
                for chunk in answer.iter_content(CHUNK):
                    self.check_stopped()
                    self.count("received", len(chunk))
                    yield chunk
        except (RequestException, HTTPError, OSError) as error:
            raise TryAgain(innermost_reason(error)) from None


class UploadBody:
    """Give an upload its bytes: read from the start each time they are sent, counted, and ended with the connection."""

    def __init__(self, connection: RegistryConnection, size: int, chunks: Callable[[], Iterator[bytes]]) -> None:
        self.connection, self.size, self.chunks = connection, size, chunks

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks():
            self.connection.check_stopped()
            self.connection.count("sent", len(chunk))
            yield chunk


# Requests, each once: they raise TryAgain for what may pass, CommandError for what stays wrong.


def manifest_digest(connection: RegistryConnection, repository: str, reference: str) -> str | None:
    """Ask for the digest of what a tag or digest names; None if there is nothing."""
    path = f"{repository}/manifests/{reference}"
    answer = connection.request_once("HEAD", path, pull_scope(repository), headers=ACCEPT)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    expect_status(answer, f"{connection.host}/{repository}: {reference}", HTTPStatus.OK)
    if digest := answer.headers.get("Docker-Content-Digest"):
        return digest
    manifest = read_manifest(connection, repository, reference)
    return manifest.digest if manifest else None


def read_manifest(connection: RegistryConnection, repository: str, reference: str) -> Manifest | None:
    """Ask for a manifest; None if there is none. Raises TryAgain also if it is not what its digest says."""
    path = f"{repository}/manifests/{reference}"
    answer = connection.request_once("GET", path, pull_scope(repository), headers=ACCEPT)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    expect_status(answer, f"{connection.host}/{repository}: manifest {reference}", HTTPStatus.OK)
    digest = digest_of(answer.content)
    expected = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", digest)
    if expected != digest:
        raise TryAgain(f"the registry sent a manifest of digest {digest} as {expected}")
    return Manifest(answer.content, answer.headers.get("Content-Type", "").partition(";")[0], digest)


def store_manifest(
    connection: RegistryConnection, repository: str, reference: str, content: bytes, media_type: str
) -> requests.Response:
    """Send a manifest. Raises MissingBlobs if the registry lacks what it names."""
    path = f"{repository}/manifests/{reference}"
    headers = {"Content-Type": media_type}
    answer = connection.request_once("PUT", path, push_scope(repository), data=content, headers=headers)
    where = f"{connection.host}/{repository}: manifest {reference}"
    if BLOB_UNKNOWN & set(error_codes(answer)):
        raise MissingBlobs(f"{where}: the registry lacks what it names: {describe_answer(answer)}")
    expect_status(answer, where, HTTPStatus.CREATED, HTTPStatus.ACCEPTED, HTTPStatus.OK)
    return answer


def has_blob(connection: RegistryConnection, repository: str, digest: str) -> bool:
    """Ask whether the repository has a blob."""
    answer = connection.request_once("HEAD", f"{repository}/blobs/{digest}", pull_scope(repository))
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return False
    expect_status(answer, f"{connection.host}/{repository}: blob {digest}", HTTPStatus.OK)
    return True


# The registry


@dataclass(eq=False)
class RegistryClient:
    """Be a `Registry` behind a connection, for several threads."""

    connection: RegistryConnection

    @property
    def host(self) -> str:
        """Return the name of the registry, with the port if it has one."""
        return self.connection.host

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest by tag or digest, or None. Raises CommandError if it has another digest."""
        what = f"{repository}: manifest {reference}"
        return self.connection.retry(what, lambda: read_manifest(self.connection, repository, reference))

    def digest(self, repository: str, reference: str) -> str | None:
        """Return the digest of what a tag names now, or None."""
        what = f"{repository}: {reference}"
        return self.connection.retry(what, lambda: manifest_digest(self.connection, repository, reference))

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest, and return the digest of the one that the registry has then; see `Registry`."""
        own = digest_of(content)
        before = self.digest(repository, reference)
        if before == own:
            return own

        def attempt() -> str:
            store_manifest(self.connection, repository, reference, content, media_type)
            digest = manifest_digest(self.connection, repository, reference)
            if digest is None or digest == before:
                raise TryAgain("the registry took the manifest, but does not have it")
            return digest

        return self.connection.retry(f"{repository}: manifest {reference}", attempt)

    def tags(self, repository: str) -> tuple[str, ...]:
        """Return all tags of a repository; none if there is no such repository."""
        where = f"{self.host}/{repository}: tags"
        tags: list[str] = []
        path: str | None = f"{repository}/tags/list?n={TAGS_PER_REQUEST}"
        while path:
            answer = self.connection.request("GET", path, pull_scope(repository))
            if answer.status_code == HTTPStatus.NOT_FOUND:
                break
            expect_status(answer, where, HTTPStatus.OK)
            document = _json_of(answer)
            if not document:
                raise CommandError(f"{where}: the answer is not what a registry answers with; is it one?")
            tags += document.get("tags") or ()
            path = _next_page(answer)
        return tuple(dict.fromkeys(tags))

    def has_blob(self, repository: str, digest: str) -> bool:
        """Return whether the repository has a blob."""
        what = f"{repository}: blob {digest}"
        return self.connection.retry(what, lambda: has_blob(self.connection, repository, digest))

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob, compared with its digest."""

        def attempt() -> bytes:
            content = b"".join(self.open_blob(repository, digest))
            if digest_of(content) != digest:
                raise TryAgain("the registry sent something else")
            return content

        return self.connection.retry(f"{repository}: blob {digest}", attempt)

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """Yield a blob in pieces, not compared with its digest. Raises TryAgain if the connection breaks midway."""
        path = f"{repository}/blobs/{digest}"
        answer = self.connection.request("GET", path, pull_scope(repository), stream=True)
        expect_status(answer, f"{self.host}/{repository}: blob {digest}", HTTPStatus.OK)
        yield from self.connection.chunks(answer)

    def put_blob(self, repository: str, content: bytes | Path | BlobStream, digest: str) -> bool:
        """Upload a blob, unless the repository has it. Return whether anything was sent."""
        where = f"{self.host}/{repository}: upload of {digest}"
        scopes = push_scope(repository)
        body = self._upload_body(content)
        sent = garbled = 0

        def attempt() -> bool:
            nonlocal sent, garbled
            if has_blob(self.connection, repository, digest):
                return sent > 0
            opened = self.connection.request_once("POST", f"{repository}/blobs/uploads/", scopes)
            expect_status(opened, where, HTTPStatus.ACCEPTED)
            if not (location := opened.headers.get("Location")):
                raise CommandError(f"{self.host}: does not say where uploads go; it is no registry of images")
            url = urljoin(opened.url, location)
            url = f"{url}{'&' if urlsplit(url).query else '?'}{urlencode({'digest': digest})}"
            sent += 1
            headers = {"Content-Type": "application/octet-stream"}
            answer = self.connection.request_once(
                "PUT", url, scopes, data=body, timeout=STORE_TIMEOUT_S, headers=headers
            )
            if answer.status_code in UPLOAD_LOST:
                raise TryAgain(f"the registry lost the upload ({answer.status_code})")
            if GARBLED & set(error_codes(answer)) and (garbled := garbled + 1) < GARBLED_ATTEMPTS:
                raise TryAgain("what arrived was not what was sent")
            expect_status(answer, where, HTTPStatus.CREATED)
            if not has_blob(self.connection, repository, digest):
                # Some only take a moment: they are asked once more before it is sent again.
                raise TryAgain("the registry took the upload, but does not have it", self.connection.backoff_s)
            return True

        return self.connection.retry(f"{repository}: upload of {digest}", attempt)

    def _upload_body(self, content: bytes | Path | BlobStream) -> bytes | UploadBody:
        if isinstance(content, bytes):
            return content
        if isinstance(content, BlobStream):
            return UploadBody(self.connection, content.size, content.chunks)

        def chunks() -> Iterator[bytes]:
            try:
                with content.open("rb") as file:
                    while chunk := file.read(CHUNK):
                        yield chunk
            except OSError as error:
                raise CommandError(f"{content}: cannot be read: {error.strerror}") from None

        try:
            size = content.stat().st_size
        except OSError as error:
            raise ConfigError(f"{content}: cannot be read: {error.strerror}") from None
        return UploadBody(self.connection, size, chunks) if size else b""

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one. Return whether the registry could."""

        def attempt() -> bool:
            path = f"{repository}/blobs/uploads/?{urlencode({'mount': digest, 'from': source})}"
            answer = self.connection.request_once("POST", path, (*push_scope(repository), *pull_scope(source)))
            if answer.status_code == HTTPStatus.ACCEPTED and "Location" in answer.headers:
                # It would rather have the bytes; the upload that it opened for them is not used.
                upload = urljoin(answer.url, answer.headers["Location"])
                self.connection.request_once("DELETE", upload, push_scope(repository))
            return answer.status_code == HTTPStatus.CREATED

        return self.connection.retry(f"{repository}: blob {digest} of {source}", attempt)

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """Return what refers to a manifest, from the referrers API or, where there is none, the tag schema."""
        items = None if self.connection.lacks_referrers else self._referrers_by_api(repository, digest)
        if items is None:
            tag = referrers_tag(digest)
            items = self.connection.retry(f"{repository}: {tag}", lambda: self._referrers_by_tag(repository, tag))
        return tuple(item for item in items if artifact_type in (None, item.artifact_type))

    def _referrers_by_api(self, repository: str, digest: str) -> tuple[Descriptor, ...] | None:
        """Return None if the registry has no such API, and remember that it is not to be asked again."""
        items: list[Descriptor] = []
        path: str | None = f"{repository}/referrers/{digest}"
        while path:
            answer = self.connection.request("GET", path, pull_scope(repository), headers={"Accept": INDEX})
            media_type = answer.headers.get("Content-Type", "").partition(";")[0]
            if answer.status_code != HTTPStatus.OK or media_type != INDEX:
                expect_status(
                    answer, f"{self.host}/{repository}: what refers to {digest}", HTTPStatus.OK, HTTPStatus.BAD_REQUEST,
                    HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED,
                )  # fmt: skip
                # One that has it lists errors of its own, for example that it does not know the repository.
                self.connection.lacks_referrers = not error_codes(answer)
                return None
            items += manifests_of(answer.json())
            path = _next_page(answer)
        return tuple({item.digest: item for item in items}.values())

    def _referrers_by_tag(self, repository: str, tag: str) -> tuple[Descriptor, ...]:
        index = read_manifest(self.connection, repository, tag)
        return manifests_of(json.loads(index.content)) if index else ()

    def attach(
        self,
        repository: str,
        subject: Descriptor,
        artifact_type: str,
        files: tuple[AttachmentFile, ...],
        annotations: Mapping[str, str],
    ) -> str:
        """Store files that refer to a manifest, and return the digest of their manifest."""
        content = attachment_manifest(subject, artifact_type, files, annotations)
        own = referrer_descriptor(content)
        for data in {EMPTY, *(file.content for file in files)}:
            self.put_blob(repository, data, digest_of(data))
        if any(item.digest == own.digest for item in self.referrers(repository, subject.digest)):
            return own.digest

        def attempt() -> bool:
            answer = store_manifest(self.connection, repository, own.digest, content, own.media_type)
            if manifest_digest(self.connection, repository, own.digest) is None:
                raise TryAgain("the registry took the manifest, but does not have it")
            return LISTED_BY_REGISTRY in answer.headers

        if not self.connection.retry(f"{repository}: attachment {own.digest}", attempt):
            with _referrer_locks[self.host, repository, subject.digest]:
                self._list_under_tag(repository, subject.digest, own)
        return own.digest

    def _list_under_tag(self, repository: str, subject: str, own: Descriptor) -> None:
        """Add an attachment to the index under the tag, and look whether another publisher has overwritten it."""
        tag = referrers_tag(subject)
        written = False

        def attempt() -> None:
            nonlocal written
            start = time.monotonic()
            items = self._referrers_by_tag(repository, tag)
            is_listed = any(item.digest == own.digest for item in items)
            if is_listed and not written:
                return
            if not is_listed:
                written = True
                # Sorted, so that it does not depend on who came first.
                content = index_document(sorted((*items, own), key=lambda item: item.digest))
                store_manifest(self.connection, repository, tag, content, INDEX)
            self.connection.stopped.wait(max(SETTLED_S, 2 * (time.monotonic() - start)))
            if all(item.digest != own.digest for item in self._referrers_by_tag(repository, tag)):
                raise TryAgain("another publisher wrote the list of attachments at the same time")

        self.connection.retry(f"{repository}: list of attachments", attempt)

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it, if it is there. Raises DeletionDisabled."""
        scopes = (f"repository:{repository}:delete,pull,push",)
        answer = self.connection.request("DELETE", f"{repository}/manifests/{digest}", scopes)
        if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise DeletionDisabled(
                f"{self.host}: does not let images be deleted (405); the distribution's registry does with "
                "`storage: {delete: {enabled: true}}` in its configuration, or REGISTRY_STORAGE_DELETE_ENABLED=true"
            )
        deleted = (HTTPStatus.ACCEPTED, HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND)
        expect_status(answer, f"{self.host}/{repository}: deletion of {digest}", *deleted)

    def stop(self) -> None:
        """End what other threads are doing with it, each with CommandError, for Ctrl-C."""
        self.connection.stopped.set()


_referrer_locks: defaultdict[tuple[str, str, str], threading.Lock] = defaultdict(threading.Lock)
"""Registry, repository and subject → a lock by which our own threads take turns."""


def connect_registry(
    host: str, *, patience_s: float | None = None, environ: Mapping[str, str] | None = None
) -> RegistryClient:
    """Return the registry of a host, which is not asked anything yet. Raises ConfigError for unusable settings.

    It may fail for as many seconds as IMAGEBUILD_REGISTRY_PATIENCE says, else two minutes.
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
    return RegistryClient(RegistryConnection(host, address, settings.ca_bundle(None, environ), patience_s))


def is_plain(host: str, environ: Mapping[str, str]) -> bool:
    """Return whether a registry is asked without TLS. Raises ConfigError for unusable settings."""
    return api_address(host, _insecure_registries(environ)).startswith("http://")


def _insecure_registries(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = environ.get("IMAGEBUILD_INSECURE_REGISTRIES", "").replace(",", " ").split()
    return (*settings.load_settings(environ).insecure_registries, *names)


# Copy and push


@dataclass(frozen=True)
class RepositoryAt:
    """Name a repository of a registry."""

    registry: Registry
    repository: str

    def __str__(self) -> str:
        return f"{self.registry.host}/{self.repository}"


def copy_image(digest: str, source: RepositoryAt, target: RepositoryAt) -> Traffic:
    """Make a manifest, or an index with all that it names, available elsewhere by the same digest.

    What is there is left alone; blobs are mounted where that can be, else they stream through this machine. Raises
    CommandError if the source does not have it, or a registry fails.
    """
    if target.registry.digest(target.repository, digest) is not None:
        return Traffic()
    manifest = source.registry.manifest(source.repository, digest)
    if manifest is None:
        raise CommandError(f"{source}@{digest}: is not there; build and verify it first, or say which registry has it")
    moved = Traffic()
    for child in manifests_of(manifest.document):
        moved += copy_image(child.digest, source, target)
    same_registry = source.registry.host == target.registry.host

    def copy_blob(blob: Descriptor, attempt: int) -> Traffic:
        if target.registry.has_blob(target.repository, blob.digest):
            return Traffic()
        # A mount that left nothing behind would do so again.
        may_mount = same_registry and source.repository != target.repository and attempt == 0
        if may_mount and target.registry.mount_blob(target.repository, blob.digest, source.repository):
            return Traffic(mounted=1)
        stream = BlobStream(blob.size, lambda: source.registry.open_blob(source.repository, blob.digest))
        sent = target.registry.put_blob(target.repository, stream, blob.digest)
        return Traffic(blobs=1, bytes=blob.size) if sent else Traffic()

    return moved + _put_with_blobs(manifest, copy_blob, target, source.registry)


def push_image(layout: Path, digest: str, registry: Registry, repository: str, tag: str | None = None) -> Traffic:
    """Push a manifest, or an index with all that it names, from a layout; what is there already is not sent.

    A tag is given last. Raises ResultError if the layout does not have it all, CommandError if the registry fails.
    """
    manifest = _manifest_in_layout(layout, digest)
    moved = Traffic()
    for child in manifests_of(manifest.document):
        moved += push_image(layout, child.digest, registry, repository)

    def push_blob(blob: Descriptor, _attempt: int) -> Traffic:
        path = blob_path(layout, blob.digest)
        if not path.is_file() or path.stat().st_size != blob.size:
            raise ResultError(f"{layout}: does not have all of blob {blob.digest}; build it again")
        sent = registry.put_blob(repository, path, blob.digest)
        return Traffic(blobs=1, bytes=blob.size) if sent else Traffic()

    if registry.digest(repository, digest) is None:
        moved += _put_with_blobs(manifest, push_blob, RepositoryAt(registry, repository))
    if tag and registry.digest(repository, tag) != digest:
        registry.put_manifest(repository, tag, manifest.content, manifest.media_type)
        moved += Traffic(manifests=1, bytes=len(manifest.content))
    return moved


def _put_with_blobs(
    manifest: Manifest, move: Callable[[Descriptor, int], Traffic], target: RepositoryAt, *others: Registry
) -> Traffic:
    """Move the blobs of a manifest, and store it. `move` is given a blob and the number of the attempt."""
    moved = Traffic()
    for attempt in range(COPY_ATTEMPTS):
        blobs = blobs_of(manifest.document)
        parts = for_each(lambda blob: move(blob, attempt), blobs, target.registry, *others, jobs=JOBS)  # noqa: B023
        moved += sum(parts, Traffic())
        try:
            target.registry.put_manifest(target.repository, manifest.digest, manifest.content, manifest.media_type)
        except MissingBlobs:
            if attempt == COPY_ATTEMPTS - 1:
                raise
        else:
            break
    return moved + Traffic(manifests=1, bytes=len(manifest.content))


def _manifest_in_layout(layout: Path, digest: str) -> Manifest:
    try:
        content = blob_path(layout, digest).read_bytes()
    except OSError as error:
        raise ResultError(f"{layout}: has no manifest {digest}: {error.strerror}") from None
    if digest_of(content) != digest:
        raise ResultError(f"{layout}: manifest {digest} was changed; build it again")
    try:
        return Manifest(content, media_type_of(dict(json.loads(content))), digest)
    except ValueError as error:
        raise ResultError(f"{layout}: {digest} is no manifest: {error}") from None
