"""Registries of the OCI distribution specification: log in, read, push, copy, attach."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import random
import re
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
from imagebuild.core.fields import DIGEST, is_loopback
from imagebuild.core.files import temporary_file
from imagebuild.core.http import AGENT, PATIENCE, Client, Patience, TryAgain, describe_answer, errors_in, join, json_of
from imagebuild.core.run import for_each
from imagebuild.oci import layout
from imagebuild.oci.layout import MOST_BYTES
from imagebuild.oci.reference import api_address, parse_reference

T = TypeVar("T")
P = ParamSpec("P")

ACCEPT = {"Accept": ", ".join(layout.MANIFEST_TYPES)}
TAGS_PER_REQUEST = 1000
JOBS = 4
"""Number of blobs that are copied in parallel. More parallel copies are not faster, and registries limit requests."""
STORE_TIMEOUT_S = 600
"""Seconds to wait for the answer to an uploaded blob. Some registries copy the blob before they answer."""
SETTLED_S, MOST_LISTINGS = 0.5, 30
"""Seconds after which the referrers index (the list of attachments) is read again to detect concurrent writers, and
maximum number of times that the index is written.

The delay is longer if requests are slow: twice the time between reading and writing the index. By then, another
publisher that read the old index has written its own index, unless that publisher's requests are much slower."""
MOST_PAGES, LIST_S = 1000, 600
"""Maximum number of pages of a list, and maximum time in seconds to read the list."""
UPLOAD_LOST = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})
"""HTTP statuses that mean: the registry has lost an upload, or a part of an upload."""
NO_SUCH_API = frozenset({400, 404, 405, 501})
"""HTTP statuses that mean: the registry does not have the referrers API."""
GARBLED = frozenset({"DIGEST_INVALID", "BLOB_UPLOAD_INVALID", "SIZE_INVALID"})
"""Error codes for an upload that arrived damaged."""
BLOB_UNKNOWN = frozenset({"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"})
"""Error codes for a manifest with parts that the registry does not have."""


class DeletionDisabled(CommandError):
    """The registry does not allow deletions."""


def _error_codes(answer: requests.Response) -> set[str]:
    return {str(item.get("code", "")) for item in errors_in(answer)}


def stored_credentials(host: str) -> Mapping[str, str]:
    """Return the credentials that `docker login` has stored for a registry.

    They are `username` and `password`, or `identitytoken`, from docker's configuration or its credential helper. An
    empty mapping if no credentials are stored. Raises CommandError if the credential helper fails."""
    from docker import auth  # noqa: PLC0415 - slow to import
    from docker.errors import DockerException  # noqa: PLC0415

    try:
        entry = auth.load_config().resolve_authconfig(host) or {}
    except DockerException as error:
        # The text of the error may quote the output of the credential helper.
        problem = f"the credentials of `docker login` cannot be read ({type(error).__name__})"
        raise CommandError(f"{host}: {problem}; log in again") from None
    found = {name.lower(): value for name, value in entry.items() if value}
    return found if {"password", "identitytoken"} & found.keys() else {}


@dataclass(eq=False, repr=False)
class Registry:
    """A connection to a registry that several threads may use."""

    host: str
    base: str
    """URL of the API, such as `https://registry.example/v2/`."""
    ca: Path | None = None
    patience: Patience = PATIENCE
    lacks_referrers: bool = False
    """Whether the registry is known to lack the referrers API."""

    def __post_init__(self) -> None:
        self.client = Client(self.ca, self.patience)
        # No cookies, because the cookie jar of a session is not safe for several threads.
        self.client.session.cookies = RequestsCookieJar(DefaultCookiePolicy(allowed_domains=[]))
        # As in docker, registries on this machine are reached without a proxy.
        self.client.session.trust_env = not is_loopback(self.host)
        self._logins: dict[tuple[str, ...], str] = {}
        """Maps the scopes of requests (repositories and permissions) to the `Authorization` header. A header is sent
        until the registry refuses it."""
        self._lock = threading.Lock()

    def at(self, repository: str) -> Repository:
        """Return a repository of this registry, such as `gpu/open`."""
        return Repository(self, repository)

    def stop(self) -> None:
        """After Ctrl-C, make the requests of other threads raise CommandError."""
        self.client.stopped.set()

    def request(self, method: str, url: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """Send a request, and log in if needed. Return the answer, which may be an error such as 404.
        Raises TryAgain for a temporary error and CommandError for a permanent one."""
        there, here = urlsplit(url), urlsplit(self.base)
        if there.netloc != here.netloc:
            # Uploads may go to another server, with its own authentication.
            return self._send(method, url, **options)
        if there.scheme != here.scheme:
            remedy = "if the registry is behind a proxy, make the proxy set X-Forwarded-Proto"
            raise CommandError(f"{self.host}: sends uploads to {there.scheme}://{there.netloc}; {remedy}")
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
        """The credentials of `docker login`, read when the registry first asks for a login."""
        return stored_credentials(self.host)

    def _log_in(self, refusal: requests.Response, scopes: tuple[str, ...]) -> str:
        """Log in after a refused request, and return the `Authorization` header.

        Empty if the registry asks for an unknown kind of login, or for a password that `docker login` has not stored.
        Raises CommandError if the registry does not issue a token, or asks for the password over an insecure
        connection."""
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
        realm, service = join(self.base, challenge.get("realm", "")), challenge.get("service", "")
        server, is_plain = urlsplit(realm), self.base.startswith("http:")  # the user configured a registry without TLS
        if own and server.scheme != "https" and not is_plain and not is_loopback(server.netloc):
            raise CommandError(f"{self.host}: asks for the password at {realm} without TLS; use a registry with TLS")
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
            with_what = "with the credentials of `docker login`" if own else "without login; run `docker login`"
            problem = f"did not issue a token for {' '.join(wanted)} ({answer.status_code})"
            raise CommandError(f"{self.host}: {problem} {with_what}")
        return f"Bearer {token}"

    def _send(self, method: str, url: str, authorization: str = "", **options: Any) -> requests.Response:
        headers = {**options.pop("headers", {}), **({"Authorization": authorization} if authorization else {})}
        # Messages leave out the query, because registries put secrets into it.
        what = f"{self.host}: {method} {urlsplit(url).path.removeprefix('/v2/')}"
        return self.client.send(method, url, what, headers=headers, **options)


def connect_registry(host: str, *, patience: Patience = PATIENCE, environ: Mapping[str, str] = os.environ) -> Registry:
    """Return the registry of a host. No request is sent yet. Raises ConfigError if the settings are wrong."""
    address = api_address(host, settings.load_settings(environ).insecure_registries)
    return Registry(host, address, settings.ca_bundle(None, environ), patience)


def retried(method: Callable[Concatenate[Repository, P], T]) -> Callable[Concatenate[Repository, P], T]:
    """Decorate a method of `Repository`, so that it is repeated after temporary errors as in `Client.retried`."""

    @functools.wraps(method)
    def repeated(self: Repository, /, *args: P.args, **options: P.kwargs) -> T:
        named = (argument for argument in args if isinstance(argument, str | layout.Manifest | layout.Descriptor))
        names = [argument if isinstance(argument, str) else argument.digest for argument in named]
        what = " ".join([f"{self}:", method.__name__.strip("_").replace("_", " "), *names])
        return self.registry.client.retried(what, lambda: method(self, *args, **options))

    return repeated


@dataclass(frozen=True)
class Repository:
    """A repository in a registry.
    All methods raise CommandError if the registry refuses, and Unreachable if temporary errors last too long."""

    registry: Registry
    name: str

    def __str__(self) -> str:
        return f"{self.registry.host}/{self.name}"

    def _request(self, method: str, path: str, source: str = "", **options: Any) -> requests.Response:
        """Send a request. `path` is relative to the repository, or a URL.
        The login also covers reading the repository `source`."""
        actions = {"GET": "pull", "HEAD": "pull", "DELETE": "delete,pull,push"}.get(method, "pull,push")
        scopes = (f"repository:{self.name}:{actions}", *([f"repository:{source}:pull"] if source else []))
        return self.registry.request(method, urljoin(f"{self.registry.base}{self.name}/", path), scopes, **options)

    def _expect(self, answer: requests.Response, what: str, *statuses: int) -> None:
        if answer.status_code not in statuses:
            hint = "; run `docker login` as a user with this permission" if answer.status_code in (401, 403) else ""
            raise CommandError(f"{self}: {what}: the server answered {describe_answer(answer)}{hint}")

    def _pages(self, path: str, **options: Any) -> Iterator[requests.Response]:
        """Yield the answers to a request for a list that is split into pages.
        Raises CommandError if the list does not end."""
        deadline = time.monotonic() + LIST_S
        for _ in range(MOST_PAGES):
            answer = self._request("GET", path, **options)
            yield answer
            link = answer.links.get("next", {}).get("url")
            if not link:
                return
            if time.monotonic() > deadline or (path := join(answer.url, link)) == answer.url:
                break
        raise CommandError(f"{self}: the registry sends a list that does not end; check that this is a registry")

    def check_writable(self) -> None:
        """Raise CommandError if imagebuild cannot write to this repository. To find out, upload a blob of two bytes."""
        self.put_blob(layout.EMPTY, layout.digest_of(layout.EMPTY))

    @retried
    def digest(self, reference: str) -> str | None:
        """Return the digest of a tag. None if the tag does not exist."""
        answer = self._request("HEAD", f"manifests/{reference}", headers=ACCEPT)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        self._expect(answer, reference, HTTPStatus.OK)
        if re.fullmatch(DIGEST, digest := answer.headers.get("Docker-Content-Digest", "")):
            return digest
        manifest = self.find(reference)
        return manifest.digest if manifest else None

    def has(self, digest: str) -> bool:
        """Return whether the registry has a manifest. A registry that has a manifest also has all its parts."""
        return self.digest(digest) is not None

    @retried
    def find(self, reference: str, *, checked: bool = True) -> layout.Manifest | None:
        """Return the manifest of a tag or digest. None if the manifest does not exist.
        Raises ResultError if it is not a manifest or index, unless `checked` is False."""
        answer = self._request("GET", f"manifests/{reference}", headers=ACCEPT)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        self._expect(answer, f"manifest {reference}", HTTPStatus.OK)
        manifest = layout.Manifest(answer.content, answer.headers.get("Content-Type", "").partition(";")[0])
        expected = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", manifest.digest)
        if expected != manifest.digest:
            raise TryAgain(f"{self}: the registry sent a manifest with the digest {manifest.digest}, not {expected}")
        if checked:
            self.listed(reference, manifest)
        return manifest

    def listed(self, what: str, found: layout.Manifest | Mapping[str, Any]) -> tuple[layout.Descriptor, ...]:
        """Return the manifests in an index. `what` names it in messages.
        Raises ResultError if it is not a manifest or index."""
        try:
            document = found.document if isinstance(found, layout.Manifest) else found
            layout.annotations_of(document)
            return layout.manifests_of(document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ResultError(f"{self}: {what} is not a manifest or index: {problem}; delete it there") from None

    def manifest(self, digest: str) -> layout.Manifest:
        """Return the manifest of a digest. Raises CommandError if the manifest does not exist."""
        if manifest := self.find(digest):
            return manifest
        remedy = "build and verify the image, or name another registry"
        raise CommandError(f"{self}@{digest}: does not exist in the registry; {remedy}")

    @retried
    def put_manifest(self, manifest: layout.Manifest, tag: str = "") -> str:
        """Store a manifest by its digest or by a tag, unless it is stored already.

        Return the digest that the registry has stored. If this is not the digest of the manifest, another client has
        moved the tag in the meantime."""
        reference = tag or manifest.digest
        what, before = f"manifest {reference}", self.digest(reference)
        if before == manifest.digest:
            return before
        headers = {"Content-Type": manifest.media_type}
        answer = self._request("PUT", f"manifests/{reference}", data=manifest.content, headers=headers)
        if BLOB_UNKNOWN & _error_codes(answer):
            raise TryAgain(f"{self}: {what}: the registry lacks a part of the manifest: {describe_answer(answer)}")
        self._expect(answer, what, HTTPStatus.CREATED, HTTPStatus.ACCEPTED, HTTPStatus.OK)
        # Read the content: the header of a registry that is out of date or broken proves nothing.
        after = self.find(reference)
        if after is None or after.digest == before:
            raise TryAgain(f"{self}: {what}: the registry accepted the manifest, but did not store it")
        return after.digest

    @retried
    def tags(self) -> tuple[str, ...]:
        """Return all tags. Return an empty tuple if the repository does not exist."""
        tags: list[str] = []
        for answer in self._pages(f"tags/list?n={TAGS_PER_REQUEST}"):
            if answer.status_code == HTTPStatus.NOT_FOUND:
                break
            self._expect(answer, "tags", HTTPStatus.OK)
            document = json_of(answer)
            listed = document.get("tags") or []
            if not document or not isinstance(listed, list) or not all(isinstance(tag, str) for tag in listed):
                remedy = "check the name of the registry"
                raise CommandError(f"{self}: tags: {self.registry.host} does not answer as a registry; {remedy}")
            tags += listed
        return tuple(dict.fromkeys(tags))

    @retried
    def delete(self, digest: str) -> None:
        """Delete a manifest and its tags, if it exists. Raises DeletionDisabled if the registry forbids deletions."""
        answer = self._request("DELETE", f"manifests/{digest}")
        if answer.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            raise DeletionDisabled(
                f"{self.registry.host}: does not allow deletions (405); in the distribution project's registry, set "
                "`storage.delete.enabled` in its configuration, or REGISTRY_STORAGE_DELETE_ENABLED=true"
            )
        deleted = (HTTPStatus.ACCEPTED, HTTPStatus.OK, HTTPStatus.NO_CONTENT, HTTPStatus.NOT_FOUND)
        self._expect(answer, f"deletion of {digest}", *deleted)

    @retried
    def has_blob(self, digest: str) -> bool:
        answer = self._request("HEAD", f"blobs/{digest}")
        if answer.status_code != HTTPStatus.NOT_FOUND:
            self._expect(answer, f"blob {digest}", HTTPStatus.OK)
        return answer.status_code == HTTPStatus.OK

    def chunks(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the content of a blob in pieces. Raises CommandError if it is larger than `size` bytes, and TryAgain
        after a temporary error or if the digest of the content is wrong."""
        answer = self._request("GET", f"blobs/{digest}", stream=True)
        self._expect(answer, f"blob {digest}", HTTPStatus.OK)
        content = hashlib.sha256()
        for chunk in self.registry.client.chunks(answer, f"{self}: blob {digest}", size):
            content.update(chunk)
            yield chunk
        if f"sha256:{content.hexdigest()}" != digest:
            raise TryAgain(f"{self}: the registry sent wrong content for blob {digest}")

    def content(self, blob: layout.Descriptor) -> layout.BlobStream:
        """Return a stream of a blob."""
        return layout.BlobStream(blob.size, lambda: self.chunks(blob.digest, blob.size))

    @retried
    def blob(self, digest: str) -> bytes:
        """Return the content of a small blob. Raises CommandError if the blob is larger than MOST_BYTES."""
        return b"".join(self.chunks(digest, MOST_BYTES))

    @retried
    def fetch(self, blob: layout.Descriptor, path: Path) -> None:
        """Write a blob to a file, unless the file exists. The file appears only when it is complete.
        Raises ResultError if the file cannot be written."""
        if path.exists():
            return
        try:
            with temporary_file(path.parent) as temporary:
                if shutil.disk_usage(path.parent).free < blob.size:
                    size = f"{blob.size / 1e9:.1f} GB"
                    raise ResultError(f"{size} do not fit in {path.parent}; set TMPDIR to a folder with more space")
                with temporary.open("wb") as file:
                    file.writelines(self.chunks(blob.digest, blob.size))
                temporary.rename(path)
        except OSError as error:
            raise ResultError(f"{path}: cannot be written: {error.strerror}; set TMPDIR to another folder") from None

    def take(self, blob: layout.Descriptor, source: Repository | layout.Layout) -> Counter[str]:
        """Copy a blob from a layout or another repository.
        A blob in the same registry is mounted (no bytes are sent). Return the same numbers as `put_blob`."""
        is_near = isinstance(source, Repository) and source.registry.host == self.registry.host
        near = source.name if isinstance(source, Repository) and is_near else ""
        return self.put_blob(source.content(blob), blob.digest, near)

    @retried
    def put_blob(self, content: bytes | layout.BlobStream, digest: str, source: str = "") -> Counter[str]:
        """Store a blob, unless it is stored already: mount it from the repository `source`, or upload it.
        `source` is in the same registry. Return `Counter(mounted=1)`, or the number of `blobs` and `bytes` uploaded."""
        what, uploads = f"upload of {digest}", "blobs/uploads/"
        if self.has_blob(digest):
            return Counter()
        mount = f"?{urlencode({'mount': digest, 'from': source})}" if source else ""
        opened = self._request("POST", uploads + mount, source)
        if opened.status_code == HTTPStatus.CREATED and self.has_blob(digest):
            return Counter(mounted=1)
        # A registry that does not mount the blob has opened an upload instead.
        if source and opened.status_code != HTTPStatus.ACCEPTED:
            opened = self._request("POST", uploads)
        self._expect(opened, what, HTTPStatus.ACCEPTED)
        if not (location := opened.headers.get("Location")):
            remedy = "check that this is a container registry"
            raise CommandError(f"{self}: the server does not say where to upload; {remedy}")
        answer = self._request(
            "PUT", join(opened.url, location), source, params={"digest": digest},
            data=content if len(content) else b"", timeout_s=STORE_TIMEOUT_S,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        if answer.status_code in UPLOAD_LOST or GARBLED & _error_codes(answer):
            raise TryAgain(f"{self}: {what}: the registry lost the upload: {describe_answer(answer)}")
        self._expect(answer, what, HTTPStatus.CREATED)
        if not self.has_blob(digest):
            raise TryAgain(f"{self}: {what}: the registry accepted the blob, but did not store it")
        return Counter(blobs=1, bytes=len(content))

    @retried
    def referrers(self, digest: str) -> tuple[layout.Descriptor, ...]:
        """Return the attachments of a manifest.
        They are read from the referrers API, or from the referrers tag if the registry lacks this API."""
        items = None if self.registry.lacks_referrers else self._referrers_by_api(digest)
        return self._referrers_by_tag(digest) if items is None else items

    def _referrers_by_api(self, digest: str) -> tuple[layout.Descriptor, ...] | None:
        """Return the attachments of a manifest from the referrers API.
        None if the registry lacks this API; this is stored in `lacks_referrers`."""
        items: list[layout.Descriptor] = []
        for answer in self._pages(f"referrers/{digest}", headers={"Accept": layout.INDEX}):
            self._expect(answer, f"attachments of {digest}", HTTPStatus.OK, *NO_SUCH_API)
            if answer.status_code in NO_SUCH_API or not answer.headers.get("Content-Type", "").startswith(layout.INDEX):
                # A registry with the API answers with an OCI error, for example for an unknown repository.
                self.registry.lacks_referrers = not errors_in(answer)
                return None
            items += self.listed(f"the list of attachments of {digest}", json_of(answer))
        if len(items) > layout.MOST_MANIFESTS:
            remedy = "delete those that you do not know"
            raise ResultError(f"{self}: {digest} has more than {layout.MOST_MANIFESTS} attachments; {remedy}")
        return tuple({item.digest: item for item in items}.values())

    def _referrers_by_tag(self, digest: str) -> tuple[layout.Descriptor, ...]:
        index = self.find(layout.referrers_tag(digest))
        return layout.manifests_of(index.document) if index else ()

    def attach(self, subject: layout.Descriptor, attachment: layout.Attachment) -> str:
        """Store an attachment of a manifest, unless it is stored already. Return the digest of the attachment."""
        manifest = attachment.manifest(subject)
        own = manifest.as_referrer
        for data in (layout.EMPTY, attachment.content):
            self.put_blob(data, layout.digest_of(data))
        self.put_manifest(manifest)
        for _ in range(MOST_LISTINGS):
            start = time.monotonic()
            by_registry = self.referrers(subject.digest)
            by_tag = self._referrers_by_tag(subject.digest)
            if own.digest in {item.digest for item in (*by_registry, *by_tag)}:
                return own.digest
            # Sorted, so that concurrent publishers write the same index. Another publisher may overwrite this index.
            index = layout.index_document(sorted((*by_tag, own), key=lambda item: item.digest))
            self.put_manifest(layout.Manifest(index, layout.INDEX), layout.referrers_tag(subject.digest))
            pause = max(SETTLED_S, 2 * (time.monotonic() - start)) * (1 + random.random())  # noqa: S311
            self.registry.client.stopped.wait(pause)
        raise CommandError(f"{self}: other publishers keep changing the list of attachments; try again later")


def copy_image(digest: str, source: Repository | layout.Layout, target: Repository | layout.Layout) -> Counter[str]:
    """Copy an image or an index with all its images to another place, with the same digest.

    Existing blobs are not copied. Blobs are mounted if possible, and otherwise streamed through this machine. Return
    the number of `manifests` and `blobs` that were sent, their `bytes`, and the number of `mounted` blobs. Raises
    CommandError if the source does not have the image or a registry fails, and ResultError if a layout is incomplete.
    """
    if target.has(digest):
        return Counter()
    manifest = source.manifest(digest)
    moved = sum(
        (copy_image(child.digest, source, target) for child in layout.manifests_of(manifest.document)), Counter[str]()
    )
    registries = [place.registry for place in (source, target) if isinstance(place, Repository)]
    parts = layout.blobs_of(manifest.document)
    moved += sum(for_each(lambda blob: target.take(blob, source), parts, *registries, jobs=JOBS), Counter())
    target.put_manifest(manifest)
    return moved + Counter(manifests=1, bytes=len(manifest.content))


def push_image(source: layout.Layout, digest: str, target: Repository, tag: str = "") -> Counter[str]:
    """Push an image, or an index with all its images, from a layout. Existing blobs are not sent.
    The tag is set last. Raises ResultError if the layout is incomplete, and CommandError if the registry fails."""
    moved = copy_image(digest, source, target)
    if tag:
        target.put_manifest(source.manifest(digest), tag)
    return moved


def pull_image(reference: str, target: layout.Layout) -> str:
    """Pull `image:tag@digest` with all its platforms into a layout. Return the digest."""
    name = parse_reference(reference)
    target.start()
    copy_image(name.wanted, connect_registry(name.host).at(name.repository), target)
    return name.wanted
