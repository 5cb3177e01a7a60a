"""The downloads in a bundle: files named after their addresses, each listed with its sha256."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

from pydantic import Field

from imagebuild.errors import ConfigError, ResultError
from imagebuild.fetch import Fetcher, length_of, parts, sha256_of, temporary
from imagebuild.fields import Model
from imagebuild.lockfile import Sha256
from imagebuild.mirrors import Mirrors

FILES = "files"
Sink = Callable[[bytes], object]
Start = Callable[[int | None], Sink]
"""Told the length of what comes, if known; returns what takes it."""


class StoredFile(Model):
    """A file that was downloaded."""

    path: str
    """In the bundle's folder."""
    sha256: Sha256
    size: int = Field(ge=0)
    """Bytes."""


def path_of(url: str) -> str:
    """Where a download is kept in the bundle. Raises ConfigError for an address that leaves the folder."""
    address = urlsplit(url)
    name = address.path.lstrip("/") + (f"?{address.query}" if address.query else "")
    path = f"{FILES}/{address.scheme}/{address.netloc}/{quote(name, safe='/+~%=,@:!-._()')}"
    if ".." in path.split("/") or not address.netloc or name.endswith("/") or not name:
        raise ConfigError(f"{url}: is not the address of a file")
    return path


class Shelf:
    """Keeps downloads; may be used by several threads."""

    def __init__(self, folder: Path, files: dict[str, StoredFile]) -> None:
        self.folder = folder
        self.files = files
        """Address → file."""

    def find(self, url: str) -> Path | None:
        """The file of an address, if it is here in full."""
        entry = self.files.get(url)
        if not entry:
            return None
        path = self.folder / entry.path
        return path if path.is_file() and path.stat().st_size == entry.size else None

    def check(self, url: str) -> None:
        """Raise ResultError if a file is missing or has changed."""
        entry, path = self.files[url], self.find(url)
        if path is None or sha256_of(path) != entry.sha256:
            what = "has changed" if path else "is missing or cut off"
            raise ResultError(f"{self.folder / entry.path}: {what}; make the bundle again")


class RecordingShelf(Shelf):
    """Fetches what it does not have yet, and keeps it."""

    def __init__(self, folder: Path, fetcher: Fetcher, mirrors: Mirrors) -> None:
        super().__init__(folder, {})
        self.fetcher = fetcher
        self.mirrors = mirrors
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def get(self, url: str, start: Start = lambda _: lambda _: None) -> Path:
        """The file of an address. While it is fetched, `start`'s sink is given each part; of one that is here
        already it is given nothing. Raises NotThere and CommandError as the fetcher, OSError as the sink.
        """
        with self._locks[url]:
            return self.find(url) or self._fetch(url, start)

    def _fetch(self, url: str, start: Start) -> Path:
        path = self.folder / path_of(url)
        content, size = hashlib.sha256(), 0
        where = self.mirrors.download(url)
        with temporary(self.folder / FILES) as partial:
            with self.fetcher.open(where) as answer, partial.open("wb") as file:
                sink = start(length_of(answer))
                held = b""
                for chunk in parts(answer, where):
                    file.write(chunk)
                    content.update(chunk)
                    size += len(chunk)
                    sink(held)
                    held = chunk
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.chmod(0o644)
            partial.replace(path)
        self.files[url] = StoredFile(path=path_of(url), sha256=content.hexdigest(), size=size)
        sink(held)  # the end comes last: whoever has all of it may rely on it being kept
        return path
