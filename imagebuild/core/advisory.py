"""Versions of components that are known to hang, crash or return wrong data. The YAML files are the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from imagebuild.core.fields import Arch, Model, satisfies


def _read(name: str) -> Any:
    return yaml.safe_load((Path(__file__).with_name("advisories") / f"{name}.yaml").read_text(encoding="utf-8"))


COMPONENTS: Mapping[str, list[str]] = _read("components")
"""Maps each component of the advisories to the components of images and the roles of libraries that contain it."""


class Advisory(Model):
    """A version range of a component that is known to be bad."""

    id: str
    affected: str
    """Version specifier, such as `>=2.26.2,<2.27.3`. Without a lower limit, the first bad version is not known."""
    seen: str
    """A version that is affected."""
    fixed: str
    summary: str
    """What happens."""
    workaround: str = ""
    arch: Arch | None = None
    """The only affected architecture; None if all are affected."""
    build: Literal["upstream"] | None = None
    """`upstream`: packages of distributions, which get fixes without a new version, are not affected."""
    severity: Literal["warn", "refuse"] = "warn"
    source: str
    date: str
    """When the source was published."""
    component: str = ""

    def applies(self, version: str, archs: Iterable[str] = ()) -> bool:
        """Return whether a version is affected on one of the architectures; default: on any architecture."""
        match = re.match(r"(?:\d+:)?v?(\d+(?:\.\d+)*)", version)
        known = [*archs]
        return bool(
            match
            and satisfies(match[1], self.affected)
            and not (self.build and is_packaged(version))
            and (not self.arch or not known or self.arch in known)
        )

    def __str__(self) -> str:
        advice = f"; or {self.workaround}" if self.workaround else ""
        return f"{self.id}: {self.summary}; use {self.component} {self.fixed} or later{advice} ({self.source})"


def is_packaged(version: str) -> bool:
    """Return whether a version is that of a distribution's package, such as `5.0.7-1`."""
    return bool(re.search(r"-\d|\+|ubuntu|deb", version))


@cache
def advisories() -> tuple[Advisory, ...]:
    """Return all advisories."""
    return tuple(Advisory(**row, component=name) for name in COMPONENTS for row in _read(name))


def known_bad(versions: Mapping[str, str | None], archs: Iterable[str] = ()) -> Iterator[Advisory]:
    """Yield the advisories for components of an image, or for libraries by their role. A version may be None."""
    listed = [*archs]
    for advisory in advisories():
        found = (versions.get(name) for name in COMPONENTS[advisory.component])
        if any(version and advisory.applies(version, listed) for version in found):
            yield advisory


def osv(advisory: Advisory) -> dict[str, Any]:
    """Return an advisory in the format of OSV (ossf.github.io/osv-schema)."""
    lower = re.search(r"[>=]=([\d.]+)", advisory.affected)
    events = [{"introduced": lower[1] if lower else "0"}, {"fixed": advisory.fixed}]
    return {
        "schema_version": "1.6.0",
        "id": f"IMAGEBUILD-{advisory.id}",
        "modified": f"{advisory.date}T00:00:00Z",
        "published": f"{advisory.date}T00:00:00Z",
        "summary": advisory.summary,
        "details": advisory.workaround,
        "affected": [
            {
                "package": {"ecosystem": "imagebuild", "name": advisory.component},
                "ranges": [{"type": "ECOSYSTEM", "events": events}],
                "versions": [advisory.seen],
            }
        ],
        "references": [{"type": "WEB", "url": advisory.source}],
        "database_specific": {"arch": advisory.arch, "severity": advisory.severity},
    }
