"""A registry of images over HTTP, in this process: what registries may do that the distribution's does not."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from imagebuild.core import CommandError
from imagebuild.oci import INDEX, MissingBlobs, digest_of, index_document
from tests.registry_fake import FakeRegistry

USER, PASSWORD, IDENTITY = "someone", "pass:word", "an-identity-token"


@dataclass
class Behaviour:
    """What this registry does and wants; all may change while it runs."""

    store: FakeRegistry = field(default_factory=FakeRegistry)
    address: str = ""
    referrers_api: bool = False
    login: str = ""
    """`basic` or `bearer`, with USER and PASSWORD, or IDENTITY for tokens."""
    open_to_read: bool = False
    """Tokens for reading are given to anyone."""
    lifetime_s: int = 300
    """Of tokens, as told."""
    tells_digests: bool = True
    page: int = 0
    """Tags that are listed at once; 0: all."""
    deletes: bool = True
    tokens: dict[str, set[str]] = field(default_factory=dict)
    """Token → scopes."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of all requests."""
    sessions: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, method: str, path: str) -> int:
        """Requests whose path fits a regular expression."""
        return sum(m == method and bool(re.search(path, p)) for m, p in self.asked)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def it(self) -> Behaviour:
        return cast(Server, self.server).behaviour

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        split = urlsplit(self.path)
        self.query = parse_qs(split.query)
        self.content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.it.lock:
            self.it.asked.append((self.command, self.path))
        if split.path == "/token":
            self.token()
            return
        found = re.fullmatch(r"/v2/(.+)/(manifests|blobs/uploads|blobs|tags|referrers)/(.*)", split.path)
        assert found, self.path
        self.repository, what, name = found.groups()
        if not self.allowed():
            return
        try:
            getattr(self, what.replace("/", "_"))(name)
        except MissingBlobs as error:
            self.refuse(400, "MANIFEST_BLOB_UNKNOWN", str(error))
        except CommandError as error:
            self.refuse(404, "BLOB_UNKNOWN", str(error))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - names of the standard library

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str, message: str = "", **headers: str) -> None:
        self.answer(status, json.dumps({"errors": [{"code": code, "message": message}]}).encode(), **headers)

    def basic(self) -> bool:
        wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return self.headers.get("Authorization") == f"Basic {wanted}"

    def needed(self) -> set[str]:
        action = "pull" if self.command in ("GET", "HEAD") else "delete" if self.command == "DELETE" else "push"
        scopes = {f"repository:{self.repository}:{action}"}
        return scopes | {f"repository:{source}:pull" for source in self.query.get("from", ())}

    def allowed(self) -> bool:
        if not self.it.login:
            return True
        if self.it.login == "basic":
            if self.basic():
                return True
            self.refuse(401, "UNAUTHORIZED", WWW_Authenticate='Basic realm="a registry"')
            return False
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.needed() <= self.it.tokens.get(shown, set()):
            return True
        scope = " ".join(sorted(self.needed()))
        realm = f'Bearer realm="http://{self.it.address}/token",service="here, this one",scope="{scope}"'
        self.refuse(401, "UNAUTHORIZED", WWW_Authenticate=realm)
        return False

    def token(self) -> None:
        form = {name: values[0] for name, values in parse_qs(self.content.decode()).items()}
        known = self.basic() or form.get("refresh_token") == IDENTITY
        scopes: set[str] = set()
        for text in (*self.query.get("scope", ()), *form.get("scope", "").split()):
            kind, name, actions = text.split(":")
            scopes |= {f"{kind}:{name}:{action}" for action in actions.split(",")}
        if not known:
            reading = {scope for scope in scopes if scope.endswith(":pull")}
            if not self.it.open_to_read:
                self.refuse(401, "UNAUTHORIZED")
                return
            scopes = reading
        assert self.query.get("service", [form.get("service")]) == ["here, this one"]
        with self.it.lock:
            token = f"token-{len(self.it.tokens)}"
            self.it.tokens[token] = scopes
        name = "access_token" if form else "token"
        self.answer(200, json.dumps({name: token, "expires_in": self.it.lifetime_s}).encode())

    def manifests(self, reference: str) -> None:
        store = self.it.store
        if self.command == "PUT":
            kind = self.headers["Content-Type"]
            digest = store.put_manifest(self.repository, reference, self.content, kind)
            extra = {}
            subject = (json.loads(self.content).get("subject") or {}).get("digest")
            if subject and self.it.referrers_api:
                extra["OCI_Subject"] = subject
            self.answer(201, Docker_Content_Digest=digest, **extra)
            return
        found = store.manifest(self.repository, reference)
        if self.command == "DELETE" and not self.it.deletes:
            self.refuse(405, "UNSUPPORTED")
        elif found is None:
            self.refuse(404, "MANIFEST_UNKNOWN")
        elif self.command == "DELETE":
            store.delete(self.repository, found.digest)
            self.answer(202)
        else:
            told = {"Docker_Content_Digest": found.digest} if self.it.tells_digests else {}
            self.answer(200, found.content, Content_Type=found.media_type, **told)

    def blobs(self, digest: str) -> None:
        self.answer(200, self.it.store.blob(self.repository, digest), Content_Type="application/octet-stream")

    def blobs_uploads(self, session: str) -> None:
        if self.command == "POST":
            digest, source = self.query.get("mount", [""])[0], self.query.get("from", [""])[0]
            if digest and self.it.store.mount_blob(self.repository, digest, source):
                self.answer(201, Location=f"/v2/{self.repository}/blobs/{digest}")
                return
            with self.it.lock:
                session = f"s{len(self.it.sessions)}"
                self.it.sessions[session] = self.repository
            self.answer(202, Location=f"/v2/{self.repository}/blobs/uploads/{session}?state=secret")
        elif self.it.sessions.pop(session, None) is None:
            self.refuse(404, "BLOB_UPLOAD_UNKNOWN")
        elif self.command == "DELETE":
            self.answer(204)
        elif digest_of(self.content) != self.query["digest"][0]:
            self.refuse(400, "DIGEST_INVALID")
        else:
            self.it.store.put_blob(self.repository, self.content, self.query["digest"][0])
            self.answer(201, Location="/")

    def tags(self, _: str) -> None:
        listed = self.it.store.tags(self.repository)
        if self.repository not in self.it.store.repositories:
            self.refuse(404, "NAME_UNKNOWN")
            return
        last = self.query.get("last", [""])[0]
        rest = [tag for tag in listed if tag > last]
        shown = rest[: self.it.page or None]
        link = {"Link": f'</v2/{self.repository}/tags/list?last={shown[-1]}>; rel="next"'} if shown != rest else {}
        self.answer(200, json.dumps({"name": self.repository, "tags": shown or None}).encode(), **link)

    def referrers(self, digest: str) -> None:
        if not self.it.referrers_api:
            self.answer(404, b"404 page not found\n", Content_Type="text/plain")
            return
        listed = self.it.store.referrers(self.repository, digest)
        self.answer(200, index_document(listed), Content_Type=INDEX)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = behaviour


@contextmanager
def serve(**settings: Any) -> Iterator[Behaviour]:
    """Such a registry, on a free port of the loopback."""
    behaviour = Behaviour(**settings)
    with Server(behaviour) as server:
        behaviour.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield behaviour
        finally:
            server.shutdown()
            thread.join()
