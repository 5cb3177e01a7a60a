"""Talk to registries by the OCI distribution specification: log in, read, push, copy, attach."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests
from requests.cookies import RequestsCookieJar
from requests.utils import parse_dict_header

from imagebuild.core import settings
from imagebuild.core.errors import CommandError, ResultError
from imagebuild.core.files import temporary_file
from imagebuild.core.http import AGENT, PATIENCE, Client, Patience, TryAgain, describe_answer, errors_in, json_of
from imagebuild.core.run import for_each
from imagebuild.oci.layout import (
    EMPTY,
    INDEX,
    MANIFEST_TYPES,
    MOST_BYTES,
    Attachment,
    BlobStream,
    Descriptor,
    Layout,
    Manifest,
    blobs_of,
    digest_of,
    index_document,
    manifests_of,
    referrers_tag,
)
from imagebuild.oci.reference import api_address, is_loopback, parse_reference

T = TypeVar("T")
P = ParamSpec("P")

ACCEPT = {"Accept": ", ".join(MANIFEST_TYPES)}
TAGS_PER_REQUEST = 1000
JOBS = 4
"""Blobs that are copied at a time: more are not faster, and registries limit requests."""
STORE_TIMEOUT_S = 600
"""How long to wait for the answer to a whole blob, which some registries copy before they answer."""
SETTLED_S, MOST_LISTINGS = 0.5, 30
"""How long after writing the index of referrers we read it again, or twice the time between reading and writing it if
that is more: a publisher who read it before our write has written by then, unless its requests are far slower than
ours. And how often we write it while others overwrite it."""
UPLOAD_LOST = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})
"""Answers that mean that the registry does not know the upload any more, or another part of it than we sent."""
NO_SUCH_API = frozenset({400, 404, 405, 501})
GARBLED = frozenset({"DIGEST_INVALID", "BLOB_UPLOAD_INVALID", "SIZE_INVALID"})
BLOB_UNKNOWN = frozenset({"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"})


class DeletionDisabled(CommandError):
    """Report that the registry does not allow deletions."""


def _error_codes(answer: requests.Response) -> set[str]:
    """Return the codes of the errors that a registry lists, such as `BLOB_UNKNOWN`."""
    return {str(item.get("code", "")) for item in errors_in(answer)}


# Login


def stored_credentials(host: str) -> Mapping[str, str]:
    """Return what `docker login` has stored for a registry: `username` and `password`, or `identitytoken`.

    It is in docker's configuration or its credential helper; empty if there is nothing. Raises CommandError if these do
    not work.
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
    found = {name.lower(): value for name, value in entry.items() if value}
    return found if {"password", "identitytoken"} & found.keys() else {}


# The registry


@dataclass(eq=False, repr=False)
class Registry:
    """Reach one registry, from several threads."""

    host: str
    base: str
    """Address that the paths of requests are relative to."""
    ca: Path | None = None
    patience: Patience = PATIENCE
    lacks_referrers: bool = False
    """Whether the registry is known to lack the referrers API."""

    def __post_init__(self) -> None:
        self.client = Client(self.ca, self.patience)
        # A session's cookies would be changed by several threads.
        self.client.session.cookies = RequestsCookieJar(DefaultCookiePolicy(allowed_domains=[]))
        # Docker does not look for registries of this machine behind a proxy either.
        self.client.session.trust_env = not is_loopback(self.host)
        self.client.session.auth = lambda request: request  # or the password of a netrc file replaces what we send
        self._logins: dict[tuple[str, ...], str] = {}
        """Scopes → `Authorization` header, which is sent until the registry refuses it."""
        self._lock = threading.Lock()

    def at(self, repository: str) -> Repository:
        """Return one of its repositories: `gpu/open`."""
        return Repository(self, repository)

    def stop(self) -> None:
        """End what other threads are doing with it, each with CommandError, for Ctrl-C."""
        self.client.stopped.set()

    def request(self, method: str, url: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """Send one request and return its answer, which may be a refusal. Raises TryAgain or CommandError."""
        there, here = urlsplit(url), urlsplit(self.base)
        if there.netloc != here.netloc:
            # Uploads may go to another server, which authenticates them in its own way.
            return self._send(method, url, **options)
        if there.scheme != here.scheme:
            raise CommandError(
                f"{self.host}: says that uploads go to {there.scheme}://{there.netloc}; if a proxy is in front of the "
                "registry, it has to set X-Forwarded-Proto"
            )
        shown = self._logins.get(scopes, "")
        answer = self._send(method, url, authorization=shown, **options)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            answer.close()
            with self._lock:
                # Another thread may have logged in since this request was sent.
                if self._logins.get(scopes, "") == shown:
                    self._logins[scopes] = self._log_in(answer, scopes)
                better = self._logins[scopes]
            if better not in ("", shown):
                answer = self._send(method, url, authorization=better, **options)
        return answer

    @cached_property
    def credentials(self) -> Mapping[str, str]:
        """Return what `docker login` has stored; it is looked up when the registry first wants it."""
        return stored_credentials(self.host)

    def _log_in(self, refusal: requests.Response, scopes: tuple[str, ...]) -> str:
        """Return the `Authorization` header that a refusal asks for; "" if we have none. Raises CommandError."""
        own = self.credentials
        pair = f"{own.get('username', '')}:{own.get('password', '')}"
        basic = f"Basic {base64.b64encode(pair.encode()).decode()}" if own else ""
        parts = (header.partition(" ") for header in refusal.raw.headers.getlist("WWW-Authenticate"))
        challenges = {
            scheme.lower(): {n: value or "" for n, value in parse_dict_header(rest).items()}  # type: ignore[no-untyped-call]
            for scheme, _, rest in parts
        }
        if not (challenge := challenges.get("bearer")):
            return basic if "basic" in challenges else ""
        realm, service = challenge.get("realm", ""), challenge.get("service", "")
        server, is_plain = urlsplit(realm), self.base.startswith("http:")  # as the user wants it
        if own and server.scheme != "https" and not is_plain and not is_loopback(server.netloc):
            raise CommandError(f"{self.host}: wants the password sent to {realm} without TLS; not done")
        wanted = tuple(dict.fromkeys((*scopes, *challenge.get("scope", "").split())))
        if own.get("identitytoken"):
            form = {
                "grant_type": "refresh_token", "service": service, "client_id": AGENT, "scope": " ".join(wanted),
                "refresh_token": own["identitytoken"],
            }  # fmt: skip
            answer = self._send("POST", realm, data=form)
        else:
            parameters = [("service", service), *(("scope", scope) for scope in wanted)]
            answer = self._send("GET", realm, params=parameters, authorization=basic)
        document = json_of(answer)
        token = document.get("token") or document.get("access_token")
        if answer.status_code != HTTPStatus.OK or not isinstance(token, str):
            with_what = "with the credentials of `docker login`" if own else "without login; try `docker login`"
            raise CommandError(f"{self.host}: gives no token for {' '.join(wanted)} ({answer.status_code}) {with_what}")
        return f"Bearer {token}"

    def _send(self, method: str, url: str, authorization: str = "", **options: Any) -> requests.Response:
        headers = {**options.pop("headers", {}), **({"Authorization": authorization} if authorization else {})}
        # The query is not shown: registries put secrets into it.
        what = f"{self.host}: {method} {urlsplit(url).path.removeprefix('/v2/')}"
        return self.client.send(method, url, what, headers=headers, **options)


def connect_registry(host: str, *, patience: Patience = PATIENCE, environ: Mapping[str, str] = os.environ) -> Registry:
    """Return the registry of a host, which is not asked anything yet. Raises ConfigError for unusable settings."""
    address = api_address(host, settings.load_settings(environ).insecure_registries)
    return Registry(host, address, settings.ca_bundle(None, environ), patience)


def retried(method: Callable[Concatenate[Repository, P], T]) -> Callable[Concatenate[Repository, P], T]:
    """Repeat a method of a repository as `Client.retried` does."""

    @functools.wraps(method)
    def repeated(self: Repository, /, *args: P.args, **options: P.kwargs) -> T:
        named = (argument for argument in args if isinstance(argument, str | Manifest | Descriptor))
        names = [argument if isinstance(argument, str) else argument.digest for argument in named]
        what = " ".join([f"{self}:", method.__name__.strip("_").replace("_", " "), *names])
        return self.registry.client.retried(what, lambda: method(self, *args, **options))

    return repeated


@dataclass(frozen=True)
class Repository:
    """Read and write one repository. All methods raise CommandError; Unreachable, if our patience ends."""

    registry: Registry
    name: str

    def __str__(self) -> str:
        return f"{self.registry.host}/{self.name}"

    def _request(self, method: str, path: str, source: str = "", **options: Any) -> requests.Response:
        """Send a request. `path` is below the repository, or a whole address. Repository `source` is readable, too."""
        actions = {"GET": "pull", "HEAD": "pull", "DELETE": "delete,pull,push"}.get(method, "pull,push")
        scopes = (f"repository:{self.name}:{actions}", *([f"repository:{source}:pull"] if source else []))
        return self.registry.request(method, urljoin(f"{self.registry.base}{self.name}/", path), scopes, **options)

    def _expect(self, answer: requests.Response, what: str, *statuses: int) -> None:
        if answer.status_code not in statuses:
            hint = "; log in with `docker login` as someone who may do this" if answer.status_code in (401, 403) else ""
            raise CommandError(f"{self}: {what}: the server answered {describe_answer(answer)}{hint}")

    def _pages(self, path: str, **options: Any) -> Iterator[requests.Response]:
        """Yield the answers of a list that comes in pages."""
        while path:
            answer = self._request("GET", path, **options)
            yield answer
            link = answer.links.get("next")
            path = urljoin(answer.url, link["url"]) if link else ""

    def check_writable(self) -> None:
        """Raise CommandError if not even a blob of two bytes can be written here."""
        self.put_blob(EMPTY, digest_of(EMPTY))

    # Manifests

    @retried
    def digest(self, reference: str) -> str | None:
        """Return the digest of what a tag names now, or None if there is nothing."""
        answer = self._request("HEAD", f"manifests/{reference}", headers=ACCEPT)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        self._expect(answer, reference, HTTPStatus.OK)
        if digest := answer.headers.get("Docker-Content-Digest"):
            return digest
        manifest = self.find(reference)
        return manifest.digest if manifest else None

    def has(self, digest: str) -> bool:
        """Return whether there is a manifest, and so all that it names."""
        return self.digest(digest) is not None

    @retried
    def find(self, reference: str) -> Manifest | None:
        """Return a manifest by tag or digest, or None if there is none."""
        answer = self._request("GET", f"manifests/{reference}", headers=ACCEPT)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        self._expect(answer, f"manifest {reference}", HTTPStatus.OK)
        manifest = Manifest(answer.content, answer.headers.get("Content-Type", "").partition(";")[0])
        expected = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", manifest.digest)
        if expected != manifest.digest:
            raise TryAgain(f"{self}: the registry sent a manifest of digest {manifest.digest} as {expected}")
        return manifest

    def manifest(self, digest: str) -> Manifest:
        """Return a manifest by its digest. Raises CommandError if it is not there."""
        if manifest := self.find(digest):
            return manifest
        raise CommandError(f"{self}@{digest}: is not there; build and verify it first, or say which registry has it")

    @retried
    def put_manifest(self, manifest: Manifest, tag: str = "") -> str:
        """Store a manifest by its digest or by a tag, read back what the registry has, and return its digest.

        Another digest than the manifest's means that somebody else moved the tag since. What is there already is not
        sent.
        """
        reference = tag or manifest.digest
        what, before = f"manifest {reference}", self.digest(reference)
        if before == manifest.digest:
            return before
        headers = {"Content-Type": manifest.media_type}
        answer = self._request("PUT", f"manifests/{reference}", data=manifest.content, headers=headers)
        if BLOB_UNKNOWN & _error_codes(answer):
            raise TryAgain(f"{self}: {what}: the registry lacks what it names: {describe_answer(answer)}")
        self._expect(answer, what, HTTPStatus.CREATED, HTTPStatus.ACCEPTED, HTTPStatus.OK)
        after = self.digest(reference)
        if after is None or after == before:
            raise TryAgain(f"{self}: {what}: the registry took it, but does not have it")
        return after

    @retried
    def tags(self) -> tuple[str, ...]:
        """Return all tags; none if there is no such repository."""
        tags: list[str] = []
        for answer in self._pages(f"tags/list?n={TAGS_PER_REQUEST}"):
            if answer.status_code == HTTPStatus.NOT_FOUND:
                break
            self._expect(answer, "tags", HTTPStatus.OK)
            document = json_of(answer)
            if not document:
                raise CommandError(f"{self}: tags: not the answer of a registry; is {self.registry.host} one?")
            tags += document.get("tags") or ()
        return tuple(dict.fromkeys(tags))

    @retried
    def delete(self, digest: str) -> None:
        """Delete a manifest, with the tags that name it, if it is there. Raises DeletionDisabled."""
        answer = self._request("DELETE", f"manifests/{digest}")
        if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise DeletionDisabled(
                f"{self.registry.host}: does not let images be deleted (405); the distribution's registry does with "
                "`storage: {delete: {enabled: true}}` in its configuration, or REGISTRY_STORAGE_DELETE_ENABLED=true"
            )
        deleted = (HTTPStatus.ACCEPTED, HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND)
        self._expect(answer, f"deletion of {digest}", *deleted)

    # Blobs

    @retried
    def has_blob(self, digest: str) -> bool:
        answer = self._request("HEAD", f"blobs/{digest}")
        if answer.status_code != HTTPStatus.NOT_FOUND:
            self._expect(answer, f"blob {digest}", HTTPStatus.OK)
        return answer.status_code == HTTPStatus.OK

    def chunks(self, digest: str) -> Iterator[bytes]:
        """Yield a blob in pieces, compared with its digest at its end. Raises TryAgain for what may pass."""
        answer = self._request("GET", f"blobs/{digest}", stream=True)
        self._expect(answer, f"blob {digest}", HTTPStatus.OK)
        content = hashlib.sha256()
        for chunk in self.registry.client.chunks(answer, f"{self}: blob {digest}"):
            content.update(chunk)
            yield chunk
        if f"sha256:{content.hexdigest()}" != digest:
            raise TryAgain(f"{self}: the registry sent something else as blob {digest}")

    def content(self, blob: Descriptor) -> BlobStream:
        """Return a blob, to be read when it is needed."""
        return BlobStream(blob.size, lambda: self.chunks(blob.digest))

    @retried
    def blob(self, digest: str) -> bytes:
        """Return a blob that is a document. Raises CommandError for one that is too large."""
        content = bytearray()
        for chunk in self.chunks(digest):
            content += chunk
            if len(content) > MOST_BYTES:
                raise CommandError(f"{self}: blob {digest}: has more than the {MOST_BYTES} bytes that are read")
        return bytes(content)

    @retried
    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Write a blob to a file, if it is not there; it appears when it is whole. Raises ResultError if it cannot."""
        if path.exists():
            return
        try:
            with temporary_file(path.parent) as temporary:
                if shutil.disk_usage(path.parent).free < blob.size:
                    size = f"{blob.size / 1e9:.1f} GB"
                    raise ResultError(f"{size} do not fit in {path.parent}; TMPDIR may name another folder")
                with temporary.open("wb") as file:
                    file.writelines(self.chunks(blob.digest))
                temporary.rename(path)
        except OSError as error:
            raise ResultError(f"{path}: cannot be written: {error.strerror}; TMPDIR may name another folder") from None

    def take(self, blob: Descriptor, source: Repository | Layout) -> Counter[str]:
        """Get a blob from another place: mounted if it is of the same registry. Return what `put_blob` returns."""
        is_near = isinstance(source, Repository) and source.registry.host == self.registry.host
        near = source.name if isinstance(source, Repository) and is_near else ""
        return self.put_blob(source.content(blob), blob.digest, near)

    @retried
    def put_blob(self, content: bytes | BlobStream, digest: str, source: str = "") -> Counter[str]:
        """Store a blob: mount it from repository `source` of the same registry, or upload it.

        Return `Counter(mounted=1)`, or how many `blobs` and `bytes` were sent: none if it was there.
        """
        what, uploads = f"upload of {digest}", "blobs/uploads/"
        if self.has_blob(digest):
            return Counter()
        mount = f"?{urlencode({'mount': digest, 'from': source})}" if source else ""
        opened = self._request("POST", uploads + mount, source)
        if opened.status_code == HTTPStatus.CREATED and self.has_blob(digest):
            return Counter(mounted=1)
        # A registry that would rather have the bytes has opened an upload for them.
        if source and opened.status_code != HTTPStatus.ACCEPTED:
            opened = self._request("POST", uploads)
        self._expect(opened, what, HTTPStatus.ACCEPTED)
        if not (location := opened.headers.get("Location")):
            raise CommandError(f"{self}: the server does not say where uploads go; it is no registry of images")
        answer = self._request(
            "PUT", urljoin(opened.url, location), source, params={"digest": digest},
            data=content if len(content) else b"", timeout_s=STORE_TIMEOUT_S,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        if answer.status_code in UPLOAD_LOST or GARBLED & _error_codes(answer):
            raise TryAgain(f"{self}: {what}: the registry lost it: {describe_answer(answer)}")
        self._expect(answer, what, HTTPStatus.CREATED)
        if not self.has_blob(digest):
            raise TryAgain(f"{self}: {what}: the registry took it, but does not have it")
        return Counter(blobs=1, bytes=len(content))

    # Attachments

    @retried
    def referrers(self, digest: str) -> tuple[Descriptor, ...]:
        """Return what refers to a manifest, from the referrers API or, where there is none, the tag schema."""
        items = None if self.registry.lacks_referrers else self._referrers_by_api(digest)
        return self._referrers_by_tag(digest) if items is None else items

    def _referrers_by_api(self, digest: str) -> tuple[Descriptor, ...] | None:
        """Return None if the registry has no such API, and remember that it is not to be asked again."""
        items: list[Descriptor] = []
        for answer in self._pages(f"referrers/{digest}", headers={"Accept": INDEX}):
            self._expect(answer, f"what refers to {digest}", HTTPStatus.OK, *NO_SUCH_API)
            if answer.status_code in NO_SUCH_API or not answer.headers.get("Content-Type", "").startswith(INDEX):
                # A registry with the API lists errors of its own, such as a repository that it does not know.
                self.registry.lacks_referrers = not errors_in(answer)
                return None
            items += manifests_of(answer.json())
        return tuple({item.digest: item for item in items}.values())

    def _referrers_by_tag(self, digest: str) -> tuple[Descriptor, ...]:
        index = self.find(referrers_tag(digest))
        return manifests_of(index.document) if index else ()

    def attach(self, subject: Descriptor, attachment: Attachment) -> str:
        """Store a file that refers to a manifest, unless it is there already. Return the digest of its own manifest."""
        manifest = attachment.manifest(subject)
        own = manifest.as_referrer
        for data in (EMPTY, attachment.content):
            self.put_blob(data, digest_of(data))
        self.put_manifest(manifest)
        for _ in range(MOST_LISTINGS):
            start = time.monotonic()
            by_registry = self.referrers(subject.digest)
            by_tag = self._referrers_by_tag(subject.digest)
            if own.digest in {item.digest for item in (*by_registry, *by_tag)}:
                return own.digest
            # Sorted, so that it does not depend on who came first. Another publisher may overwrite it at the same time.
            index = index_document(sorted((*by_tag, own), key=lambda item: item.digest))
            self.put_manifest(Manifest(index, INDEX), referrers_tag(subject.digest))
            pause = max(SETTLED_S, 2 * (time.monotonic() - start)) * (1 + random.random())  # noqa: S311
            self.registry.client.stopped.wait(pause)
        raise CommandError(f"{self}: other publishers write the list of attachments all the time")


# Copies


def copy_image(digest: str, source: Repository | Layout, target: Repository | Layout) -> Counter[str]:
    """Make a manifest, or an index with all that it names, available in another place by the same digest.

    What is there is left alone; blobs are mounted where that can be, else they stream through this machine. Return the
    number of `manifests` and `blobs` that were sent, their `bytes`, and how many blobs were `mounted`. Raises
    CommandError if the source does not have it or a registry fails, and ResultError if a layout is not whole.
    """
    if target.has(digest):
        return Counter()
    manifest = source.manifest(digest)
    moved = sum((copy_image(child.digest, source, target) for child in manifests_of(manifest.document)), Counter[str]())
    registries = [place.registry for place in (source, target) if isinstance(place, Repository)]
    parts = blobs_of(manifest.document)
    moved += sum(for_each(lambda blob: target.take(blob, source), parts, *registries, jobs=JOBS), Counter())
    target.put_manifest(manifest)
    return moved + Counter(manifests=1, bytes=len(manifest.content))


def push_image(layout: Layout, digest: str, target: Repository, tag: str = "") -> Counter[str]:
    """Push a manifest, or an index with all that it names, from a layout; what is there already is not sent.

    A tag is given last. Raises ResultError if the layout does not have it all, CommandError if the registry fails.
    """
    moved = copy_image(digest, layout, target)
    if tag:
        target.put_manifest(layout.manifest(digest), tag)
    return moved


def pull_image(reference: str, layout: Layout) -> str:
    """Copy `image:tag@digest`, all its platforms, from its registry into a layout. Return the digest."""
    name = parse_reference(reference)
    layout.start()
    copy_image(name.wanted, connect_registry(name.host).at(name.repository), layout)
    return name.wanted
