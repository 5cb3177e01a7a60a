"""Talk to a registry by the OCI distribution specification: log in, read, push, copy, attach."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests
from docker import auth as docker_auth
from docker.errors import DockerException
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
from imagebuild.oci import layout
from imagebuild.oci.layout import blob_path
from imagebuild.oci.reference import api_address, is_loopback


@dataclass(frozen=True)
class BlobDescriptor:
    """What names a blob or a manifest of a registry."""

    media_type: str
    digest: str
    size: int
    platform: str | None = None
    """`linux/arm64`, of an image in an index."""
    artifact_type: str | None = None
    """Of something that refers to an image: what it is."""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index, byte for byte as the registry has it."""

    content: bytes
    media_type: str
    digest: str
    """Of the content; whoever read it compared."""

    @property
    def document(self) -> dict[str, Any]:
        """The content, read. Raises ValueError for what is not JSON."""
        return dict(json.loads(self.content))


@dataclass(frozen=True)
class AttachmentFile:
    """A file of something that refers to an image."""

    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True)
class Streamed:
    """A blob that comes from elsewhere while it is uploaded."""

    size: int
    chunks: Callable[[], Iterator[bytes]]
    """Reads it from its start; called again for each attempt."""


@dataclass(frozen=True)
class Traffic:
    """What was moved to a registry."""

    manifests: int = 0
    blobs: int = 0
    """That were uploaded; those that were there, or mounted, do not count."""
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


class MissingBlobs(CommandError):
    """A registry refused a manifest, since it does not have what that names."""


class DeletionDisabled(CommandError):
    """A registry lets nothing be deleted."""


class Registry(Protocol):
    """Repositories of one registry. `repository` is its name without the registry: `gpu/open`.

    Every method raises CommandError if the registry refuses, or fails more often than is patient.
    """

    @property
    def host(self) -> str:
        """Its name, with the port if it has one."""

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """A manifest by tag or digest; None if there is none."""

    def digest(self, repository: str, reference: str) -> str | None:
        """The digest of what a tag names now; None if there is none."""

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest by tag or digest, read back what the registry says it has, and return its digest.

        Another digest than the content's means that somebody else moved the tag since. What is there already is not
        sent. Raises MissingBlobs if the registry lacks what the manifest names.
        """

    def tags(self, repository: str) -> tuple[str, ...]:
        """All tags of a repository; none if there is no such repository."""

    def has_blob(self, repository: str, digest: str) -> bool: ...

    def blob(self, repository: str, digest: str) -> bytes:
        """A small blob, compared with its digest."""

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """A blob of any size, piece by piece. Whoever takes it compares it with its digest, as `put_blob` does."""

    def put_blob(self, repository: str, content: bytes | Path | Streamed, digest: str) -> bool:
        """Upload a blob, unless the repository has it: whether anything was sent."""

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one, without sending it: whether the registry could."""

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[BlobDescriptor, ...]:
        """What refers to a manifest, from the referrers API or, where there is none, the tag schema."""

    def attach(
        self,
        repository: str,
        subject: BlobDescriptor,
        artifact_type: str,
        files: tuple[AttachmentFile, ...],
        annotations: Mapping[str, str],
    ) -> str:
        """Store files that refer to a manifest; returns the digest of their manifest. The same files and annotations
        again change nothing.
        """

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it; one that is not there is deleted already.

        Raises DeletionDisabled where nothing may be deleted.
        """

    def stop(self) -> None:
        """Make what other threads are doing with it end with CommandError, for Ctrl-C."""


INDEX = layout.INDEX
MANIFEST = layout.MANIFEST
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
MANIFEST_TYPES = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)
INDEX_TYPES = (INDEX, DOCKER_INDEX)

EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
"""Annotation of a layer: the name of its file."""


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encode_json(document: Mapping[str, Any]) -> bytes:
    """The same document gives the same bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def descriptor_json(descriptor: BlobDescriptor) -> dict[str, Any]:
    document: dict[str, Any] = {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
    }
    if descriptor.platform:
        document["platform"] = layout.platform_json(descriptor.platform)
    if descriptor.artifact_type:
        document["artifactType"] = descriptor.artifact_type
    if descriptor.annotations:
        document["annotations"] = dict(sorted(descriptor.annotations.items()))
    return document


def read_descriptor(document: Mapping[str, Any]) -> BlobDescriptor:
    """Raises LookupError or TypeError for something else."""
    platform = document.get("platform") or {}
    return BlobDescriptor(
        media_type=document["mediaType"],
        digest=document["digest"],
        size=document["size"],
        platform="/".join(platform[k] for k in ("os", "architecture", "variant") if platform.get(k)) or None,
        artifact_type=document.get("artifactType"),
        annotations=document.get("annotations") or {},
    )


def blobs_of(document: Mapping[str, Any]) -> tuple[BlobDescriptor, ...]:
    """Config and layers that a manifest names, each once; an index names none."""
    named = [*([document["config"]] if document.get("config") else []), *document.get("layers", ())]
    return tuple({item["digest"]: read_descriptor(item) for item in named}.values())


def manifests_of(document: Mapping[str, Any]) -> tuple[BlobDescriptor, ...]:
    """Manifests that an index names; a manifest names none."""
    return tuple(read_descriptor(item) for item in document.get("manifests", ()))


def media_type(document: Mapping[str, Any]) -> str:
    """Of a manifest or an index, which need not say what it is."""
    return str(document.get("mediaType") or (INDEX if "manifests" in document else MANIFEST))


def index_document(manifests: Iterable[BlobDescriptor]) -> bytes:
    """An index of these, in this order."""
    items = [descriptor_json(item) for item in manifests]
    return encode_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": items})


def attachment_manifest(
    subject: BlobDescriptor, artifact_type: str, files: Iterable[AttachmentFile], annotations: Mapping[str, str]
) -> bytes:
    """The manifest of files that refer to another manifest. It holds no time but what annotations say."""
    layers = [
        BlobDescriptor(file.media_type, digest_of(file.content), len(file.content), annotations={TITLE: file.name})
        for file in files
    ]
    empty = BlobDescriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY))
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": artifact_type,
        "config": descriptor_json(empty),
        # The specification wants one layer at least: without files it is the empty one.
        "layers": [descriptor_json(layer) for layer in layers or [empty]],
        "subject": descriptor_json(BlobDescriptor(subject.media_type, subject.digest, subject.size)),
    }
    return encode_json(document | ({"annotations": dict(annotations)} if annotations else {}))


def as_referrer(content: bytes) -> BlobDescriptor:
    """How an index of referrers lists a manifest that refers to another one."""
    document = json.loads(content)
    return BlobDescriptor(
        media_type=document.get("mediaType", MANIFEST),
        digest=digest_of(content),
        size=len(content),
        artifact_type=document.get("artifactType") or (document.get("config") or {}).get("mediaType"),
        annotations=document.get("annotations") or {},
    )


def referrers_tag(digest: str) -> str:
    """The tag that lists what refers to a manifest, where the registry has no API for it."""
    return digest.replace(":", "-", 1)


HINTS = {
    HTTPStatus.UNAUTHORIZED: "log in with `docker login`",
    HTTPStatus.FORBIDDEN: "log in with `docker login` as someone who may do this",
}
TEXT = 300
"""Characters of an answer that are shown."""


def pull_error(repository: str) -> tuple[str, ...]:
    """What a token for reading a repository is asked for."""
    return (f"repository:{repository}:pull",)


def push_error(repository: str) -> tuple[str, ...]:
    """What a token for reading and writing a repository is asked for."""
    return (f"repository:{repository}:pull,push",)


def delete_error(repository: str) -> tuple[str, ...]:
    """What a token for deleting in a repository is asked for."""
    return (f"repository:{repository}:delete,pull,push",)


def problems(answer: requests.Response) -> list[dict[str, Any]]:
    """The errors that a registry lists; none if the answer is something else."""
    try:
        found = answer.json()
    except ValueError:
        return []
    listed = found.get("errors") if isinstance(found, dict) else None
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def codes(answer: requests.Response) -> tuple[str, ...]:
    """`BLOB_UNKNOWN`, …"""
    return tuple(str(item.get("code", "")) for item in problems(answer))


def said(answer: requests.Response) -> str:
    """`403 (DENIED: requested access to the resource is denied)`."""
    listed = [
        ": ".join(filter(None, (str(item.get("code", "")), str(item.get("message") or ""), _detail(item))))
        for item in problems(answer)
    ]
    text = "; ".join(dict.fromkeys(listed)) or str(answer.reason or "")
    return f"{answer.status_code} ({text[:TEXT]})"


def document(answer: requests.Response, what: str) -> dict[str, Any]:
    """The answer as JSON. Raises CommandError if it is none."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CommandError(f"{what}: the answer is not what a registry answers with; is it one?")
    return found


def _detail(problem: dict[str, Any]) -> str:
    detail = problem.get("detail")
    if isinstance(detail, dict):
        detail = detail.get("digest") or detail.get("Digest") or ""
    return detail if isinstance(detail, str) else ""


def expect(answer: requests.Response, what: str, *statuses: int) -> None:
    """Raises CommandError for another status."""
    if answer.status_code in statuses:
        return
    hint = HINTS.get(HTTPStatus(answer.status_code)) if answer.status_code in set(HTTPStatus) else None
    raise CommandError(f"{what}: the registry answered {said(answer)}" + (f"; {hint}" if hint else ""))


LIFETIME_S = 60
"""Of a token whose server does not say how long it is valid."""
MARGIN_S = 10
"""A token is not used any more so long before its end: a request takes time too."""
CLIENT = "imagebuild"


@dataclass(frozen=True, repr=False)
class Credentials:
    """What `docker login` has stored for a registry. It has no text, so that it cannot be printed."""

    user: str = ""
    password: str = ""
    identity_token: str = ""


def stored(host: str) -> Credentials | None:
    """The credentials of a registry, from docker's configuration or its credential helper; None if there are none.

    Raises CommandError if the configuration or the helper does not work.
    """
    try:
        found = docker_auth.load_config().resolve_authconfig(host) or {}
    except DockerException as error:
        # The message may quote what the helper printed.
        raise CommandError(
            f"{host}: the credentials of `docker login` cannot be read ({type(error).__name__}); log in again"
        ) from None
    by_name = {name.lower(): value for name, value in found.items()}
    made = Credentials(by_name.get("username") or "", by_name.get("password") or "", by_name.get("identitytoken") or "")
    return made if made.password or made.identity_token else None


@dataclass(frozen=True)
class Challenge:
    """How a registry wants to be asked: `Basic`, or `Bearer` with a token of the server at `realm`."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""


def challenge(headers: list[str]) -> Challenge | None:
    """The first of the `WWW-Authenticate` headers that can be met; tokens are preferred."""
    found = {}
    for header in headers:
        scheme, _, rest = header.partition(" ")
        values: dict[str, str | None] = parse_dict_header(rest)  # type: ignore[no-untyped-call]
        fields = {name: values.get(name) or "" for name in ("realm", "service", "scope")}
        found[scheme.lower()] = Challenge(scheme.lower(), **fields)
    return found.get("bearer") or found.get("basic")


class _Header(requests.auth.AuthBase):
    """Sends this, and nothing that a netrc file says."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request


@dataclass
class Login:
    """What one registry is shown with each request; for several threads."""

    host: str
    ask: Callable[..., requests.Response]
    """Sends a request to the server of tokens: method, address and options as `requests` has them."""
    find: Callable[[str], Credentials | None] = stored
    plain: bool = False
    """The registry is reached without TLS, as its user wants: its tokens may be too."""
    _known: Challenge | None = None
    _tokens: dict[tuple[str, ...], tuple[str, float]] = field(default_factory=dict)
    """Scopes → token, and until when it is used."""
    _credentials: list[Credentials | None] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def header(self, scopes: tuple[str, ...]) -> requests.auth.AuthBase:
        """What to send with a request that needs these scopes, as far as is known. Raises CommandError."""
        with self._lock:
            if self._known is None:
                return _Header("")
            if self._known.scheme == "basic":
                found = self._own()
                return HTTPBasicAuth(found.user, found.password) if found else _Header("")
            token, until = self._tokens.get(scopes, ("", 0.0))
            if time.monotonic() >= until:
                token = self._token(self._known, scopes)
            return _Header(f"Bearer {token}")

    def refused(self, answer: requests.Response, scopes: tuple[str, ...], shown: requests.auth.AuthBase) -> bool:
        """Learn from a 401 how to ask: whether it is worth asking again. Raises CommandError."""
        wanted = challenge(answer.raw.headers.getlist("WWW-Authenticate"))
        if wanted is None:
            return False
        with self._lock:
            if wanted.scheme == "basic":
                again = not isinstance(shown, HTTPBasicAuth) and self._own() is not None
                self._known = wanted
                return again
            self._known = wanted
            held = self._tokens.get(scopes)
            # Another thread may have fetched a new token since this request was sent.
            if held is None or f"Bearer {held[0]}" == getattr(shown, "value", ""):
                self._token(wanted, scopes)
            return True

    def _own(self) -> Credentials | None:
        if not self._credentials:
            self._credentials.append(self.find(self.host))
        return self._credentials[0]

    def _token(self, asked: Challenge, scopes: tuple[str, ...]) -> str:
        own = self._own()
        server = urlsplit(asked.realm)
        if own and server.scheme != "https" and not self.plain and not is_loopback(server.netloc):
            raise CommandError(f"{self.host}: wants the password sent to {asked.realm} without TLS; not done")
        wanted = tuple(dict.fromkeys(scope for scope in (*scopes, asked.scope) if scope))
        if own and own.identity_token:
            form = {
                "grant_type": "refresh_token",
                "service": asked.service,
                "client_id": CLIENT,
                "scope": " ".join(wanted),
                "refresh_token": own.identity_token,
            }
            answer = self.ask("POST", asked.realm, data=form, auth=_Header(""))
        else:
            basic = HTTPBasicAuth(own.user, own.password) if own else _Header("")
            parameters = [("service", asked.service), *(("scope", scope) for scope in wanted)]
            answer = self.ask("GET", asked.realm, params=parameters, auth=basic)
        document = _document(answer)
        token = document.get("token") or document.get("access_token")
        if answer.status_code != requests.codes.ok or not isinstance(token, str):
            with_what = (
                "with the credentials of `docker login`" if own else f"without login; try `docker login {self.host}`"
            )
            raise CommandError(f"{self.host}: gives no token for {' '.join(wanted)} ({answer.status_code}) {with_what}")
        lifetime = document.get("expires_in")
        seconds = lifetime if isinstance(lifetime, int) else LIFETIME_S
        self._tokens[scopes] = (token, time.monotonic() + max(seconds - MARGIN_S, 1))
        return token


def _document(answer: requests.Response) -> dict[str, object]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


PATIENCE_S = 120.0
"""How long a registry may fail before we give up."""
UNREACHABLE_PATIENCE_S = 15.0
"""The same, while nobody answers at all: most often the name is wrong."""
WIRE_ATTEMPTS = 3
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

Answer = TypeVar("Answer")


class TryAgain(Exception):
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

    def __init__(self, wire: RegistryConnection, size: int, chunks: Callable[[], Iterator[bytes]]) -> None:
        self.wire, self.size, self.chunks = wire, size, chunks

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks():
            self.wire.check()
            self.wire.count("sent", len(chunk))
            yield chunk


@dataclass(eq=False)
class RegistryConnection:
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
        # Docker does not look for registries of this machine behind a proxy either.
        self.session.trust_env = not is_loopback(self.host)
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

    def patiently(self, what: str, action: Callable[[], Answer]) -> Answer:
        """Do something until it does not raise `Again`. Raises CommandError when patience is at its end."""
        policy = Retry(total=None, backoff_factor=self.backoff_s, backoff_max=15, backoff_jitter=self.backoff_s)
        attempts, first = 0, 0.0
        while True:
            self.check()
            try:
                return action()
            except TryAgain as again:
                now = time.monotonic()
                attempts, first = attempts + 1, first or now
                policy = policy.increment()
                pause = max(policy.get_backoff_time(), again.pause_s or 0.0)
                patience = min(self.patience_s, UNREACHABLE_PATIENCE_S) if again.nobody else self.patience_s
                spent = now - first + pause
                if not patience or pause > patience or (spent > patience and attempts >= WIRE_ATTEMPTS):
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
        there, here = urlsplit(url), urlsplit(self.base)
        own = there.netloc == here.netloc
        if own and there.scheme != here.scheme:
            raise CommandError(
                f"{self.host}: says that uploads go to {there.scheme}://{there.netloc}; if a proxy is in front of the "
                "registry, it has to tell it X-Forwarded-Proto"
            )
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
            raise CommandError(f"{self.host}: {method}: {innermost_reason(error)}") from None
        except (RequestException, HTTPError, OSError) as error:
            raise TryAgain(innermost_reason(error), nobody=any(mark in repr(error) for mark in NOBODY)) from None
        if answer.status_code in BAD_MOMENTS:
            with answer:
                raise TryAgain(f"the registry answered {said(answer)}", _wished(answer))
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
            raise TryAgain(innermost_reason(error)) from None


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


def registry_ca_bundle(environ: Mapping[str, str]) -> Path | None:
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


T = TypeVar("T")
R = TypeVar("R")

JOBS = 4
"""Blobs at a time: more fill no line that is worth it, and registries count requests."""


def for_each(function: Callable[[T], R], items: Iterable[T], *registries: Registry, jobs: int = JOBS) -> list[R]:
    """Results in the order of the items. After the first error nothing new is begun, and that error is raised.

    Ctrl-C ends it at once: what waits in the registries that are named is told to stop, and nobody waits for an answer
    that is under way.
    """
    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                results[number] = function(item)
            except BaseException as error:  # it is raised where `each` was called
                errors.append(error)

    # An executor's threads would keep the program from ending until the last answer has come.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(todo)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        for registry in registries:
            registry.stop()
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


ACCEPT = {"Accept": ", ".join(MANIFEST_TYPES)}
UNKNOWN = frozenset({"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"})


def manifest_digest(wire: RegistryConnection, repository: str, reference: str) -> str | None:
    """The digest of what a tag or digest names; None if there is nothing. Raises Again, CommandError."""
    answer = wire.once("HEAD", f"{repository}/manifests/{reference}", pull_error(repository), headers=ACCEPT)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    expect(answer, f"{wire.host}/{repository}: {reference}", HTTPStatus.OK)
    if told := answer.headers.get("Docker-Content-Digest"):
        return told
    found = read_manifest(wire, repository, reference)
    return found.digest if found else None


def read_manifest(wire: RegistryConnection, repository: str, reference: str) -> Manifest | None:
    """One question for a manifest. Raises Again, also if it is not what its digest says, and CommandError."""
    answer = wire.once("GET", f"{repository}/manifests/{reference}", pull_error(repository), headers=ACCEPT)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    expect(answer, f"{wire.host}/{repository}: manifest {reference}", HTTPStatus.OK)
    digest = digest_of(answer.content)
    told = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", digest)
    if told != digest:
        raise TryAgain(f"the registry sent a manifest of digest {digest} as {told}")
    media_type = answer.headers.get("Content-Type", "").partition(";")[0]
    return Manifest(answer.content, media_type, digest)


def store_manifest(
    wire: RegistryConnection, repository: str, reference: str, content: bytes, media_type: str
) -> requests.Response:
    """Send a manifest once. Raises MissingBlobs, Again, CommandError."""
    answer = wire.once(
        "PUT", f"{repository}/manifests/{reference}", push_error(repository), data=content,
        headers={"Content-Type": media_type},
    )  # fmt: skip
    where = f"{wire.host}/{repository}: manifest {reference}"
    if UNKNOWN & set(codes(answer)):
        raise MissingBlobs(f"{where}: the registry lacks what it names: {said(answer)}")
    expect(answer, where, HTTPStatus.CREATED, HTTPStatus.ACCEPTED, HTTPStatus.OK)
    return answer


LOST = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})
"""Answers that mean that the registry does not know the upload any more, or another part of it than we sent."""
GARBLED = frozenset({"DIGEST_INVALID", "BLOB_UPLOAD_INVALID", "SIZE_INVALID"})
GARBLED_ATTEMPTS = 3


def put_blob(wire: RegistryConnection, repository: str, content: bytes | Path | Streamed, digest: str) -> bool:
    """Upload a blob, unless the repository has it: whether anything was sent. Raises CommandError."""
    body = _body(wire, content)
    sent = garbled = 0

    def attempt() -> bool:
        nonlocal sent, garbled
        if has_blob(wire, repository, digest):
            return sent > 0
        path = f"{repository}/blobs/uploads/"
        opened = wire.once("POST", path, push_error(repository))
        expect(opened, f"{wire.host}/{repository}: upload of {digest}", HTTPStatus.ACCEPTED)
        sent += 1
        done = wire.once(
            "PUT", _closing(wire, opened, digest), push_error(repository), data=body, timeout=STORE_TIMEOUT_S,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        if done.status_code in LOST:
            raise TryAgain(f"the registry lost the upload ({done.status_code})")
        if GARBLED & set(codes(done)) and (garbled := garbled + 1) < GARBLED_ATTEMPTS:
            raise TryAgain("what arrived was not what was sent")
        expect(done, f"{wire.host}/{repository}: upload of {digest}", HTTPStatus.CREATED)
        if not has_blob(wire, repository, digest):
            # Some only take a moment: they are asked once more before it is sent again.
            raise TryAgain("the registry took the upload, but does not have it", wire.backoff_s)
        return True

    return wire.patiently(f"{repository}: upload of {digest}", attempt)


def has_blob(wire: RegistryConnection, repository: str, digest: str) -> bool:
    """One question whether the repository has a blob. Raises Again, CommandError."""
    answer = wire.once("HEAD", f"{repository}/blobs/{digest}", pull_error(repository))
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return False
    expect(answer, f"{wire.host}/{repository}: blob {digest}", HTTPStatus.OK)
    return True


def mount_blob(wire: RegistryConnection, repository: str, digest: str, source: str) -> bool:
    """Ask the registry to take a blob from another repository: whether it did. Raises Again, CommandError."""
    path = f"{repository}/blobs/uploads/?{urlencode({'mount': digest, 'from': source})}"
    scopes = (*push_error(repository), *pull_error(source))
    answer = wire.once("POST", path, scopes)
    if answer.status_code == HTTPStatus.ACCEPTED and "Location" in answer.headers:
        # It would rather have the bytes; the upload that it opened for them is not used.
        wire.once("DELETE", urljoin(answer.url, answer.headers["Location"]), push_error(repository))
    return answer.status_code == HTTPStatus.CREATED


def _body(wire: RegistryConnection, content: bytes | Path | Streamed) -> bytes | Body:
    if isinstance(content, bytes):
        return content
    if isinstance(content, Streamed):
        return Body(wire, content.size, content.chunks)
    try:
        size = content.stat().st_size
    except OSError as error:
        raise ConfigError(f"{content}: cannot be read: {error.strerror}") from None
    return Body(wire, size, lambda: _pieces(content)) if size else b""


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise CommandError(f"{path}: cannot be read: {error.strerror}") from None


def _closing(wire: RegistryConnection, opened: requests.Response, digest: str) -> str:
    """Where the content goes: what the registry said, with the digest added."""
    location = opened.headers.get("Location")
    if not location:
        raise CommandError(f"{wire.host}: does not say where uploads go; it is no registry of images")
    url = urljoin(opened.url, location)
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode({'digest': digest})}"


SUBJECT = "OCI-Subject"
"""Header of a registry that lists by itself what refers to a manifest."""
SETTLED_S = 0.5
"""How long after writing the index it is looked at again, or twice the time between reading and writing it if that is
more: who read it before we wrote has written by then, unless its requests take far longer than ours."""

_own: defaultdict[tuple[str, str, str], threading.Lock] = defaultdict(threading.Lock)
"""Our own threads take turns."""


def list_referrers(wire: RegistryConnection, repository: str, digest: str) -> tuple[BlobDescriptor, ...]:
    """All that refers to a manifest. Raises CommandError."""
    found = _from_api(wire, repository, digest)
    if found is not None:
        return found
    tag = referrers_tag(digest)
    return wire.patiently(f"{repository}: {tag}", lambda: _under_tag(wire, repository, tag))


def add_referrer(wire: RegistryConnection, repository: str, subject: str, content: bytes) -> None:
    """Store a manifest that refers to another one, and have it listed. Raises MissingBlobs, CommandError."""
    own = as_referrer(content)
    if any(item.digest == own.digest for item in list_referrers(wire, repository, subject)):
        return

    def attempt() -> bool:
        answer = store_manifest(wire, repository, own.digest, content, own.media_type)
        if manifest_digest(wire, repository, own.digest) is None:
            raise TryAgain("the registry took the manifest, but does not have it")
        return SUBJECT in answer.headers

    if wire.patiently(f"{repository}: attachment {own.digest}", attempt):
        return
    with _own[wire.host, repository, subject]:
        _list_under_tag(wire, repository, subject, own)


def _from_api(wire: RegistryConnection, repository: str, digest: str) -> tuple[BlobDescriptor, ...] | None:
    """None if the registry has no such API, which it need not be asked twice."""
    if wire.lacks_referrers:
        return None
    found: list[BlobDescriptor] = []
    path: str | None = f"{repository}/referrers/{digest}"
    while path:
        answer = wire.request("GET", path, pull_error(repository), headers={"Accept": INDEX})
        kind = answer.headers.get("Content-Type", "").partition(";")[0]
        if answer.status_code != HTTPStatus.OK or kind != INDEX:
            expect(
                answer, f"{wire.host}/{repository}: what refers to {digest}", HTTPStatus.OK, HTTPStatus.BAD_REQUEST,
                HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED,
            )  # fmt: skip
            # One that has it lists errors of its own, for example that it does not know the repository.
            wire.lacks_referrers = not codes(answer)
            return None
        found += manifests_of(answer.json())
        following = answer.links.get("next", {}).get("url")
        path = urljoin(answer.url, following) if following else None
    return tuple({item.digest: item for item in found}.values())


def _under_tag(wire: RegistryConnection, repository: str, tag: str) -> tuple[BlobDescriptor, ...]:
    found = read_manifest(wire, repository, tag)
    return manifests_of(json.loads(found.content)) if found else ()


def _list_under_tag(wire: RegistryConnection, repository: str, subject: str, own: BlobDescriptor) -> None:
    tag = referrers_tag(subject)
    tried = False

    def is_listed(there: tuple[BlobDescriptor, ...]) -> bool:
        return any(item.digest == own.digest for item in there)

    def attempt() -> None:
        nonlocal tried
        began = time.monotonic()
        there = _under_tag(wire, repository, tag)
        if is_listed(there) and not tried:
            return
        if not is_listed(there):
            tried = True
            # Sorted, so that it does not depend on who came first.
            content = index_document(sorted((*there, own), key=lambda item: item.digest))
            store_manifest(wire, repository, tag, content, INDEX)
        wire.stopped.wait(max(SETTLED_S, 2 * (time.monotonic() - began)))
        if not is_listed(_under_tag(wire, repository, tag)):
            raise TryAgain("another publisher wrote the list of attachments at the same time")

    wire.patiently(f"{repository}: list of attachments", attempt)


LISTED = 1000
"""Tags asked for at once."""


def connect_registry(
    host: str, *, patience_s: float | None = None, environ: Mapping[str, str] | None = None
) -> RegistryClient:
    """The registry of a host, which is not asked anything yet. Raises ConfigError for unusable settings."""
    environ = os.environ if environ is None else environ
    seconds = patience(environ) if patience_s is None else patience_s
    return RegistryClient(
        RegistryConnection(host, api_address(host, _insecure(environ)), registry_ca_bundle(environ), seconds)
    )


def is_plain(host: str, environ: Mapping[str, str]) -> bool:
    """Whether a registry is asked without TLS. Raises ConfigError for unusable settings."""
    return api_address(host, _insecure(environ)).startswith("http://")


def _insecure(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("IMAGEBUILD_INSECURE_REGISTRIES", "").replace(",", " ").split()
    return (*settings.load_settings(environ).insecure_registries, *named)


@dataclass(eq=False)
class RegistryClient:
    """Satisfies `base.Registry`, for several threads."""

    wire: RegistryConnection

    @property
    def host(self) -> str:
        return self.wire.host

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """A manifest by tag or digest; None if there is none. Raises CommandError if it has another digest."""
        what = f"{repository}: manifest {reference}"
        return self.wire.patiently(what, lambda: read_manifest(self.wire, repository, reference))

    def digest(self, repository: str, reference: str) -> str | None:
        """The digest of what a tag names now; None if there is none."""
        return self.wire.patiently(
            f"{repository}: {reference}", lambda: manifest_digest(self.wire, repository, reference)
        )

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest, and read back which one the registry has; see `base.Registry`."""
        own = digest_of(content)
        before = self.digest(repository, reference)
        if before == own:
            return own

        def attempt() -> str:
            store_manifest(self.wire, repository, reference, content, media_type)
            found = manifest_digest(self.wire, repository, reference)
            if found in (None, before):
                raise TryAgain("the registry took the manifest, but does not have it")
            return str(found)

        return self.wire.patiently(f"{repository}: manifest {reference}", attempt)

    def tags(self, repository: str) -> tuple[str, ...]:
        """All tags of a repository; none if there is no such repository."""
        found: list[str] = []
        path: str | None = f"{repository}/tags/list?n={LISTED}"
        while path:
            answer = self.wire.request("GET", path, pull_error(repository))
            if answer.status_code == HTTPStatus.NOT_FOUND:
                break
            expect(answer, f"{self.host}/{repository}: tags", HTTPStatus.OK)
            found += document(answer, f"{self.host}/{repository}: tags").get("tags") or ()
            following = answer.links.get("next", {}).get("url")
            path = urljoin(answer.url, following) if following else None
        return tuple(dict.fromkeys(found))

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository has a blob."""
        return self.wire.patiently(f"{repository}: blob {digest}", lambda: has_blob(self.wire, repository, digest))

    def blob(self, repository: str, digest: str) -> bytes:
        """A small blob, compared with its digest."""

        def attempt() -> bytes:
            content = b"".join(self.open_blob(repository, digest))
            if digest_of(content) != digest:
                raise TryAgain("the registry sent something else")
            return content

        return self.wire.patiently(f"{repository}: blob {digest}", attempt)

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """A blob piece by piece, not compared with its digest. Raises Again if the connection breaks midway."""
        answer = self.wire.request("GET", f"{repository}/blobs/{digest}", pull_error(repository), stream=True)
        expect(answer, f"{self.host}/{repository}: blob {digest}", HTTPStatus.OK)
        yield from self.wire.chunks(answer)

    def put_blob(self, repository: str, content: bytes | Path | Streamed, digest: str) -> bool:
        """Upload a blob, unless the repository has it: whether anything was sent."""
        return put_blob(self.wire, repository, content, digest)

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one: whether the registry could."""
        what = f"{repository}: blob {digest} of {source}"
        return self.wire.patiently(what, lambda: mount_blob(self.wire, repository, digest, source))

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[BlobDescriptor, ...]:
        """What refers to a manifest, from the referrers API or, where there is none, the tag schema."""
        found = list_referrers(self.wire, repository, digest)
        return tuple(item for item in found if artifact_type in (None, item.artifact_type))

    def attach(
        self,
        repository: str,
        subject: BlobDescriptor,
        artifact_type: str,
        files: tuple[AttachmentFile, ...],
        annotations: Mapping[str, str],
    ) -> str:
        """Store files that refer to a manifest; returns the digest of their manifest."""
        content = attachment_manifest(subject, artifact_type, files, annotations)
        for data in {EMPTY, *(file.content for file in files)}:
            self.put_blob(repository, data, digest_of(data))
        add_referrer(self.wire, repository, subject.digest, content)
        return digest_of(content)

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it; one that is not there is deleted already."""
        answer = self.wire.request("DELETE", f"{repository}/manifests/{digest}", delete_error(repository))
        if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise DeletionDisabled(
                f"{self.host}: does not let images be deleted (405); the distribution's registry does with "
                "`storage: {delete: {enabled: true}}` in its configuration, or REGISTRY_STORAGE_DELETE_ENABLED=true"
            )
        done = (HTTPStatus.ACCEPTED, HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND)
        expect(answer, f"{self.host}/{repository}: deletion of {digest}", *done)

    def stop(self) -> None:
        """Make what other threads are doing with it end with CommandError, for Ctrl-C."""
        self.wire.stop()


COPY_ATTEMPTS = 3
"""Times that blobs are copied again because the registry refuses a manifest for lack of one."""


@dataclass(frozen=True)
class RepositoryAt:
    """A repository of a registry."""

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
    found = source.registry.manifest(source.repository, digest)
    if found is None:
        raise CommandError(f"{source}@{digest}: is not there; build and verify it first, or say which registry has it")
    moved = Traffic()
    for child in manifests_of(found.document):
        moved += copy_image(child.digest, source, target)
    return moved + _copy_one(found, source, target)


def _copy_one(found: Manifest, source: RepositoryAt, target: RepositoryAt) -> Traffic:
    same = source.registry.host == target.registry.host
    may_mount = same and source.repository != target.repository

    def move(blob: BlobDescriptor) -> Traffic:
        if target.registry.has_blob(target.repository, blob.digest):
            return Traffic()
        if may_mount and target.registry.mount_blob(target.repository, blob.digest, source.repository):
            return Traffic(mounted=1)
        stream = Streamed(blob.size, lambda: source.registry.open_blob(source.repository, blob.digest))
        sent = target.registry.put_blob(target.repository, stream, blob.digest)
        return Traffic(blobs=1, bytes=blob.size) if sent else Traffic()

    moved = Traffic()
    for attempt in range(COPY_ATTEMPTS):
        moved += sum(for_each(move, blobs_of(found.document), source.registry, target.registry), Traffic())
        try:
            target.registry.put_manifest(target.repository, found.digest, found.content, found.media_type)
        except MissingBlobs:
            if attempt == COPY_ATTEMPTS - 1:
                raise
            may_mount = False  # a mount that left nothing behind would do so again
        else:
            break
    return moved + Traffic(manifests=1, bytes=len(found.content))


PUSH_ATTEMPTS = 3
"""Times that blobs are sent again because the registry refuses a manifest for lack of one."""


def push_image(layout: Path, digest: str, registry: Registry, repository: str, tag: str | None = None) -> Traffic:
    """Push a manifest, or an index with all that it names; what is there already is not sent.

    A tag is given last. Raises ResultError if the layout does not have it all, CommandError if the registry fails.
    """
    found = _read(layout, digest)
    moved = Traffic()
    for child in manifests_of(found.document):
        moved += push_image(layout, child.digest, registry, repository)
    if registry.digest(repository, digest) is None:
        moved += _push_one(layout, found, registry, repository)
    if tag and registry.digest(repository, tag) != digest:
        registry.put_manifest(repository, tag, found.content, found.media_type)
        moved += Traffic(manifests=1, bytes=len(found.content))
    return moved


def _push_one(layout: Path, found: Manifest, registry: Registry, repository: str) -> Traffic:
    def upload(blob: BlobDescriptor) -> Traffic:
        path = blob_path(layout, blob.digest)
        if not path.is_file() or path.stat().st_size != blob.size:
            raise ResultError(f"{layout}: does not have all of blob {blob.digest}; build it again")
        sent = registry.put_blob(repository, path, blob.digest)
        return Traffic(blobs=1, bytes=blob.size) if sent else Traffic()

    moved = Traffic()
    for attempt in range(PUSH_ATTEMPTS):
        moved += sum(for_each(upload, blobs_of(found.document), registry), Traffic())
        try:
            registry.put_manifest(repository, found.digest, found.content, found.media_type)
        except MissingBlobs:
            if attempt == PUSH_ATTEMPTS - 1:
                raise
        else:
            break
    return moved + Traffic(manifests=1, bytes=len(found.content))


def _read(layout: Path, digest: str) -> Manifest:
    try:
        content = blob_path(layout, digest).read_bytes()
    except OSError as error:
        raise ResultError(f"{layout}: has no manifest {digest}: {error.strerror}") from None
    if digest_of(content) != digest:
        raise ResultError(f"{layout}: manifest {digest} was changed; build it again")
    try:
        document = Manifest(content, "", digest).document
    except ValueError as error:
        raise ResultError(f"{layout}: {digest} is no manifest: {error}") from None
    return Manifest(content, media_type(document), digest)


@dataclass(frozen=True)
class Kind:
    """A kind of attachment."""

    artifact_type: str
    media_type: str
    file: str
    """Name of the file in the artefact, and where steps of CI leave it: `<file>` or `*.<file>`."""


KINDS = {
    "sbom": Kind("application/spdx+json", "application/spdx+json", "sbom.spdx.json"),
    "provenance": Kind("application/vnd.in-toto+json", "application/vnd.in-toto+json", "provenance.json"),
    "verification": Kind(
        "application/vnd.imagebuild.verification.v1+json",
        "application/vnd.imagebuild.verification.v1+json",
        "verify.json",
    ),
    "benchmark": Kind(
        "application/vnd.imagebuild.benchmark.v1+json",
        "application/vnd.imagebuild.benchmark.v1+json",
        "benchmark.json",
    ),
    "scan": Kind("application/vnd.imagebuild.scan.v1+json", "application/vnd.imagebuild.scan.v1+json", "scan.json"),
}
"""Name → kind."""
