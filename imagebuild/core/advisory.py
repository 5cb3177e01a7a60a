"""Versions of components that are known to hang, crash or return wrong data. The YAML files are the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from imagebuild.core.fields import Arch, Model, one_or_more, satisfies
from imagebuild.core.patterns import data_of

Several = Annotated[tuple[str, ...], BeforeValidator(one_or_more)]


COMPONENTS: Mapping[str, Mapping[str, str]] = data_of(__file__, "advisories/components")
"""Maps each component of the advisories to where it is: components of images, roles of libraries, and programs and
drivers of nodes. The value says how the component was built there; empty if that is not known."""


@dataclass(frozen=True)
class Place:
    """What is known about the place in which a version is used. Each empty field is not known."""

    archs: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """Compute capabilities, such as `9.0`."""
    fabrics: tuple[str, ...] = ()
    """Kinds of networks, as in profiles, and `nvlink` if NVLink joins nodes."""
    gcc: tuple[str, ...] = ()
    """Version of GCC, or the name of another compiler."""
    build: str = ""
    """How the component was built: `wheel`, `package` (of its authors), `source` or `distribution`."""


class Advisory(Model):
    """A version range of a component that is known to be bad."""

    id: str
    affected: Several
    """Version specifiers, such as `>=2.26.2,<2.27.3`, of which one must fit. Without a lower limit, the first bad
    version is not known."""
    seen: str
    """A version that is affected."""
    fixed: str
    summary: str
    """What happens."""
    workaround: str = ""
    arch: Arch | None = None
    """The only affected architecture; None if all are affected."""
    gpu: Several = ()
    """Specifiers of the affected compute capabilities."""
    fabric: Several = ()
    """The affected networks."""
    gcc: Several = ()
    """Specifiers of the versions of GCC whose results are affected."""
    build: Several = ()
    """The affected builds. `upstream`: all but packages of distributions, which get fixes without a new version."""
    severity: Literal["warn", "refuse"] = "warn"
    source: str
    date: str
    """When the source was published."""
    component: str = ""
    only_if: str = ""
    """Conditions that the place may fulfil; empty if the advisory applies."""

    def at(self, version: str, place: Place = Place()) -> Advisory | None:
        """Return the advisory, with the conditions that are not known to hold; None if it does not apply."""
        match = re.match(r"(?:\d+:)?v?(\d+(?:\.\d+)*)", version)
        if not match or not any(satisfies(match[1], each) for each in self.affected):
            return None
        build = "distribution" if is_packaged(version) else place.build
        builds = (build, "upstream") if build and build != "distribution" else (build,) if build else ()
        conditions = {
            f"the CPUs are {self.arch}": ((self.arch or "",), place.archs),
            f"the compute capability is {' or '.join(self.gpu)}": (self.gpu, place.gpus),
            f"the network is {' or '.join(self.fabric)}": (self.fabric, place.fabrics),
            f"GCC {' or '.join(self.gcc)} compiled it": (self.gcc, place.gcc),
            f"it was built as {' or '.join(self.build)}": (self.build, builds),
        }
        unknown = []
        for words, (wanted, known) in conditions.items():
            if any(wanted) and not known:
                unknown.append(words)
            elif any(wanted) and not any(satisfies(value, each) for value in known for each in wanted):
                return None
        return self.model_copy(update={"only_if": " and ".join(unknown)})

    @property
    def name(self) -> str:
        """The id, with the conditions that are not known to hold."""
        return f"{self.id} (if {self.only_if})" if self.only_if else self.id

    def __str__(self) -> str:
        advice = f"; or {self.workaround}" if self.workaround else ""
        return f"{self.name}: {self.summary}; use {self.component} {self.fixed} or later{advice} ({self.source})"


def is_packaged(version: str) -> bool:
    """Return whether a version is that of a distribution's package, such as `5.0.7-1`."""
    return bool(re.search(r"-\d|\+|ubuntu|deb", version))


def driver_version(text: str) -> str:
    """Return the version in the line of `/proc/driver/nvidia/version`; empty if there is none."""
    match = re.search(r"  (\d+\.\d[\d.]*)(?: |$)", text, re.MULTILINE)
    return match[1] if match else ""


@cache
def advisories() -> tuple[Advisory, ...]:
    """Return all advisories."""
    return tuple(
        Advisory(**row, component=name) for name in COMPONENTS for row in data_of(__file__, f"advisories/{name}")
    )


@cache
def _known_bad(component: str, version: str, place: Place) -> Mapping[str, Advisory]:
    """Map the ids of the advisories for a version of a component to the advisories."""
    found = (each.at(version, place) for each in advisories() if each.component == component)
    return {advisory.id: advisory for advisory in found if advisory}


def known_bad(versions: Mapping[str, str | None], place: Place = Place()) -> Iterator[Advisory]:
    """Yield the advisories for components of an image, libraries by their role, or drivers. A version may be None."""
    for component, builds in COMPONENTS.items():
        places = {name: replace(place, build=place.build or build) for name, build in builds.items()}
        found = [_known_bad(component, version, places[name]) for name in builds if (version := versions.get(name))]
        for name in dict.fromkeys(chain.from_iterable(found)):
            yield min((each[name] for each in found if name in each), key=lambda advisory: advisory.only_if)


def shortened(found: Iterable[Advisory], most: int = 3) -> str:
    """Return the names of the newest advisories and the number of the others; empty if there are none. Advisories with
    conditions come last."""
    names = [advisory.name for advisory in sorted(found, key=lambda each: not each.only_if)]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(reversed(names[-most:])) + more


def osv(advisory: Advisory) -> dict[str, Any]:
    """Return an advisory in the format of OSV (ossf.github.io/osv-schema)."""
    limits = [re.search(r"[>=]=([\d.]+)", text) for text in advisory.affected]
    ends = [re.search(r"<([\d.]+)", text) for text in advisory.affected]
    events = [
        [{"introduced": limit[1] if limit else "0"}, {"fixed": end[1] if end else advisory.fixed}]
        for limit, end in zip(limits, ends, strict=True)
    ]
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
                "ranges": [{"type": "ECOSYSTEM", "events": each} for each in events],
                "versions": [advisory.seen],
            }
        ],
        "references": [{"type": "WEB", "url": advisory.source}],
        "database_specific": advisory.model_dump(include={"arch", "build", "fabric", "gcc", "gpu", "severity"}),
    }
