"""The Python package index that a depot offers: only the wheels that the lock names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from imagebuild import wheelpages
from imagebuild.errors import ResultError
from imagebuild.fetch import NotThere
from imagebuild.shelf import RecordingShelf, Shelf, Start


class Index(Protocol):
    """What pip asks."""

    def page(self, project: str) -> str:
        """The page of a project. Raises NotThere."""

    def wheel(self, name: str, start: Start) -> Path:
        """The file of a wheel. Raises NotThere."""


@dataclass(frozen=True)
class StoredIndex:
    """Wheels of a bundle: file name → address."""

    shelf: Shelf
    wheels: Mapping[str, str]

    def page(self, project: str) -> str:
        names = [n for n in self.wheels if wheelpages.project_of(n) == wheelpages.normalized(project)]
        if not names:
            raise NotThere(f"the bundle has no wheel of {project}")
        return wheelpages.write({n: self.shelf.files[self.wheels[n]].sha256 for n in names}, names)

    def wheel(self, name: str, start: Start) -> Path:  # noqa: ARG002 - nothing is fetched
        path = self.shelf.find(self.wheels.get(name, ""))
        if path is None:
            raise NotThere(f"the bundle has no wheel {name}")
        return path


@dataclass
class RecordingIndex:
    """Fetches wheels from a site's index and keeps them."""

    shelf: RecordingShelf
    address: str
    """Of the index: its pages are `<address><project>/`."""
    wanted: frozenset[str]
    """Hashes in the lock."""
    wheels: dict[str, str] = field(default_factory=dict)
    """File name → address, of those that were fetched."""
    _offered: dict[str, tuple[str, str]] = field(default_factory=dict)

    def page(self, project: str) -> str:
        url = f"{self.address}{wheelpages.normalized(project)}/"
        text = self.shelf.fetcher.read(url, wheelpages.ACCEPT).decode("utf-8", "replace")
        found = {name: entry for name, entry in wheelpages.read(text, url).items() if entry[1] in self.wanted}
        self._offered.update(found)
        return wheelpages.write({name: digest for name, (_, digest) in found.items()}, found)

    def wheel(self, name: str, start: Start) -> Path:
        if name not in self._offered:
            raise NotThere(f"no page offered {name}")
        url, digest = self._offered[name]
        self.wheels[name] = url  # before pip has all of it, for the build may end then
        try:
            path = self.shelf.get(url, start)
            if self.shelf.files[url].sha256 != digest:
                raise ResultError(f"{url}: its sha256 is not {digest}, as the index says")
        except BaseException:
            del self.wheels[name]
            raise
        return path
