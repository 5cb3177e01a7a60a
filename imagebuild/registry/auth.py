"""Logging in to a registry: the credentials of `docker login`, and tokens that they are exchanged for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import requests
from docker import auth as docker_auth
from docker.errors import DockerException
from requests.auth import HTTPBasicAuth
from requests.utils import parse_dict_header

from imagebuild.errors import CommandError
from imagebuild.registry.reference import is_loopback

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
