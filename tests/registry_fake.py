"""An in-memory image registry for tests of registry clients, over sockets or without them."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPResponse

from imagebuild.core.http import Patience
from imagebuild.oci.layout import (
    CONFIG,
    INDEX,
    MANIFEST,
    Descriptor,
    Manifest,
    blobs_of,
    digest_of,
    encode_json,
    index_document,
    manifests_of,
)
from imagebuild.oci.registry import Registry
from tests.faulty import Answer, Handler, Server, answering, refusal
from tests.unit import image_files

USER, PASSWORD, IDENTITY = "someone", "pass:word", "an-identity-token"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass
class Held:
    """The content of a repository."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    content: bytes


class FakeRegistry(Registry):
    """A client and its in-memory registry, which refuses the same requests as the distribution's registry.

    Tests may change the attributes at any time. `calls` records every requested change as (what, repository, name).
    `before` is called with these values before each change, to raise an error or to act as another publisher.
    """

    mounts = True
    """Whether the registry can mount blobs from other repositories."""
    referrers_api = True
    wants: str = ""
    """The required login: `basic` or `bearer`, with USER and PASSWORD, or IDENTITY for tokens. Empty: no login."""
    open_to_read = False
    """Whether anyone gets tokens for reading."""
    tells_digests = True
    page = 0
    """Maximum number of tags in an answer. 0: all."""
    list_path = "/v2/%s/tags/list"
    """The path in the link to the next page of tags. Empty: the link is only `?last=…`."""
    address = ""
    """`host:port` if `serve` runs the registry. Empty otherwise."""

    def __init__(self, host: str = "registry.test", **behaviour: Any) -> None:
        super().__init__(host, f"http://{host}/v2/", patience=Patience(0))
        self.client.session.mount("http://", Transport(self))
        self.client.session.trust_env = False  # reading the environment takes a third of the time of a request
        self.repositories: dict[str, Held] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.before: Callable[[str, str, str], None] | None = None
        self.asked: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.tokens: dict[str, set[str]] = {}
        """Maps each issued token to its scopes."""
        self.sessions: dict[str, str] = {}
        self.numbers = itertools.count()
        self.lock = threading.RLock()
        for name, value in behaviour.items():
            setattr(self, name, value)

    def changed(self, what: str) -> list[tuple[str, str]]:
        """Return repository and name of all changes of one kind: `manifest`, `blob`, `mount` or `delete`."""
        return [(repository, name) for kind, repository, name in self.calls if kind == what]

    def asked_for(self, method: str, path: str) -> int:
        """Return the number of requests with this method whose path matches a regular expression."""
        return sum(m == method and bool(re.search(path, p)) for m, p in self.asked)

    def answer(self, request: Request) -> Answer:
        """Answer a request. If the registry is served, requests from the test itself need no login."""
        is_own = bool(self.address) and "Host" not in request.headers
        if not is_own:
            with self.lock:
                self.asked.append((request.method, request.path))
        try:
            if request.path == "/token":
                return self._token(request)
            found = re.fullmatch(r"/v2/(.+)/(manifests|blobs/uploads|blobs|tags|referrers)/(.*)", request.path)
            assert found, request.path
            repository, what, name = found.groups()
            if not is_own:
                self._check_login(request, repository)
            answered: Answer = getattr(self, f"_answer_{what.replace('/', '_')}")(request, repository, name)
        except Answer as refused:
            return refused
        return answered

    def _change(self, what: str, repository: str, name: str) -> Held:
        if self.before:
            self.before(what, repository, name)
        with self.lock:
            self.calls.append((what, repository, name))
            return self.repositories.setdefault(repository, Held())

    def _look(self, repository: str) -> Held:
        return self.repositories.get(repository) or Held()

    def _answer_manifests(self, request: Request, repository: str, reference: str) -> Answer:
        if request.method == "PUT":
            return self.take_manifest(request, repository, reference)
        held = self._look(repository)
        found = held.manifests.get(held.tags.get(reference, reference))
        if found is None:
            raise refusal(404, "MANIFEST_UNKNOWN")
        if request.method == "DELETE":
            held = self._change("delete", repository, found.digest)
            held.manifests.pop(found.digest, None)
            held.tags = {tag: named for tag, named in held.tags.items() if named != found.digest}
            return Answer(202)
        stated = {"Docker-Content-Digest": found.digest} if self.tells_digests else {}
        return Answer(200, found.content, {"Content-Type": found.media_type, **stated})

    def take_manifest(self, request: Request, repository: str, reference: str) -> Answer:
        document, digest = json.loads(request.content), digest_of(request.content)
        held = self._change("manifest", repository, reference)
        if ":" in reference and reference != digest:
            raise refusal(400, "DIGEST_INVALID")
        with self.lock:
            missing = [b.digest for b in blobs_of(document) if b.digest not in held.blobs]
            missing += [m.digest for m in manifests_of(document) if m.digest not in held.manifests]
            if missing:
                raise refusal(400, "MANIFEST_BLOB_UNKNOWN", ", ".join(missing))
            held.manifests[digest] = Manifest(request.content, request.headers["Content-Type"])
            if ":" not in reference:
                held.tags[reference] = digest
        return Answer(201, headers={"Docker-Content-Digest": digest})

    def _answer_blobs(self, _: Request, repository: str, digest: str) -> Answer:
        content = self._look(repository).blobs.get(digest)
        if content is None:
            raise refusal(404, "BLOB_UNKNOWN", digest)
        return Answer(200, content, {"Content-Type": "application/octet-stream"})

    def _answer_blobs_uploads(self, request: Request, repository: str, session: str) -> Answer:
        if request.method == "POST":
            digest, source = request.query.get("mount", [""])[0], request.query.get("from", [""])[0]
            found = self._look(source).blobs.get(digest)
            if self.mounts and found is not None:
                self._change("mount", repository, digest).blobs[digest] = found
                return Answer(201, headers={"Location": f"/v2/{repository}/blobs/{digest}"})
            with self.lock:
                session = f"s{next(self.numbers)}"
                self.sessions[session] = repository
            return Answer(202, headers={"Location": f"/v2/{repository}/blobs/uploads/{session}?state=secret"})
        if self.sessions.pop(session, None) is None:
            raise refusal(404, "BLOB_UPLOAD_UNKNOWN")
        digest = request.query["digest"][0]
        if digest_of(request.content) != digest:
            raise refusal(400, "DIGEST_INVALID")
        self._change("blob", repository, digest).blobs[digest] = request.content
        return Answer(201, headers={"Location": "/"})

    def _answer_tags(self, request: Request, repository: str, _: str) -> Answer:
        if repository not in self.repositories:
            raise refusal(404, "NAME_UNKNOWN")
        last = request.query.get("last", [""])[0]
        rest = [tag for tag in sorted(self._look(repository).tags) if tag > last]
        shown = rest[: self.page or None]
        link = {"Link": f'<{self.list_path % repository}?last={shown[-1]}>; rel="next"'} if shown != rest else {}
        return Answer(200, json.dumps({"name": repository, "tags": shown or None}).encode(), link)

    def _answer_referrers(self, _: Request, repository: str, digest: str) -> Answer:
        if not self.referrers_api:
            return Answer(404, b"404 page not found\n", {"Content-Type": "text/plain"})
        manifests = list(self._look(repository).manifests.values())
        listed = [m for m in manifests if (m.document.get("subject") or {}).get("digest") == digest]
        index = index_document(manifest.as_referrer for manifest in listed)
        return Answer(200, index, {"Content-Type": INDEX})

    def _knows(self, request: Request) -> bool:
        wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return request.headers.get("Authorization") == f"Basic {wanted}"

    def _check_login(self, request: Request, repository: str) -> None:
        if self.wants == "basic" and not self._knows(request):
            raise refusal(401, "UNAUTHORIZED", **{"WWW-Authenticate": 'Basic realm="a registry"'})
        if self.wants == "bearer":
            action = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}.get(request.method, "push")
            needed = {f"repository:{repository}:{action}"}
            needed |= {f"repository:{source}:pull" for source in request.query.get("from", ())}
            shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not needed <= self.tokens.get(shown, set()):
                realm = f'realm="http://{self.address}/token",service="here, this one"'
                challenge = f'Bearer {realm},scope="{" ".join(sorted(needed))}"'
                raise refusal(401, "UNAUTHORIZED", **{"WWW-Authenticate": challenge})

    def _token(self, request: Request) -> Answer:
        form = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        scopes: set[str] = set()
        for text in (*request.query.get("scope", ()), *form.get("scope", "").split()):
            kind, name, actions = text.split(":")
            scopes |= {f"{kind}:{name}:{action}" for action in actions.split(",")}
        if not self._knows(request) and form.get("refresh_token") != IDENTITY:
            if not self.open_to_read:
                raise refusal(401, "UNAUTHORIZED")
            scopes = {scope for scope in scopes if scope.endswith(":pull")}
        assert request.query.get("service", [form.get("service")]) == ["here, this one"]
        with self.lock:
            token = f"token-{len(self.tokens)}"
            self.tokens[token] = scopes
        name = "access_token" if form else "token"
        return Answer(200, json.dumps({name: token}).encode())


class Transport(HTTPAdapter):
    """An adapter that passes a client's requests to the registry without sockets."""

    def __init__(self, registry: FakeRegistry) -> None:
        super().__init__()
        self.registry = registry

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        body: Any = request.body
        content = body if isinstance(body, bytes) else b"".join(body or ())
        url = urlsplit(str(request.url))
        answer = self.registry.answer(
            Request(str(request.method), url.path, parse_qs(url.query), request.headers, content)
        )
        raw = HTTPResponse(
            BytesIO(b"" if request.method == "HEAD" else answer.content),
            headers=dict(answer.headers), status=answer.status, preload_content=False,
        )  # fmt: skip
        return self.build_response(request, raw)


@contextmanager
def serve(**behaviour: Any) -> Iterator[FakeRegistry]:
    """Serve a registry on a free port of the loopback interface. Default: without the referrers API."""
    registry = FakeRegistry(**{"referrers_api": False, **behaviour})

    def answer(handler: Handler) -> None:
        url, headers = urlsplit(handler.path), cast(Any, handler.headers)
        handler.send(
            registry.answer(Request(handler.command, url.path, parse_qs(url.query), headers, handler.content()))
        )

    with answering(Server(answer)) as registry.address:
        yield registry


def put_image(
    registry: Registry, repository: str, *layers: bytes | image_files.Files, platform: str = "linux/amd64",
    **settings: Any,
) -> Descriptor:  # fmt: skip
    """Push an image by digest; return its descriptor for an index.

    `layers` are stored bytes, or the files of a layer. `settings` are keys of the image configuration, such as Env.
    """
    os, architecture = platform.split("/")
    packed = [
        data if isinstance(data, bytes) else gzip.compress(image_files.layer(data), 1, mtime=0) for data in layers
    ]
    packed = packed or [b"layer"]
    root = {"type": "layers", "diff_ids": list(map(image_files.diff_id, packed))}
    config = encode_json({"os": os, "architecture": architecture, "config": settings, "rootfs": root})
    stored = [(CONFIG, config), *((LAYER, layer) for layer in packed)]
    for _, data in stored:
        registry.at(repository).put_blob(data, digest_of(data))
    first, *rest = [Descriptor(kind, digest_of(data), len(data)).to_json() for kind, data in stored]
    manifest = Manifest(
        encode_json({"schemaVersion": 2, "mediaType": MANIFEST, "config": first, "layers": rest}), MANIFEST
    )
    return Descriptor(MANIFEST, registry.at(repository).put_manifest(manifest), len(manifest.content), platform)


def index(registry: Registry, repository: str, manifests: Iterable[Descriptor], tag: str = "") -> str:
    """Push an index of images; return its digest. If `tag` is empty, push by digest."""
    return registry.at(repository).put_manifest(Manifest(index_document(manifests), INDEX), tag)
