"""The types of `imagebuild diff --json`. In all of them, A is the first image and B the second."""

from __future__ import annotations

from typing import Literal

from imagebuild.fields import Model

Title = Literal["components", "packages", "environment", "settings", "licences", "labels", "platforms", "checks"]


class Change(Model):
    """Something that is not the same in both."""

    name: str
    a: str | None
    """None where A does not have it."""
    b: str | None


class Section(Model):
    """Things of one kind."""

    title: Title
    changes: tuple[Change, ...]
    same: int
    """How many are the same in both."""


class LayerChange(Model):
    """A layer that only one of them has, or both."""

    digest: str
    size_bytes: int
    where: Literal["a", "b", "both"]
    made_by: str = ""
    """The instruction that made it, as the image's history says."""


class Sizes(Model):
    """Bytes, compressed as a registry keeps them, unless `note` says otherwise."""

    a: int
    b: int
    shared: int
    """Of layers that both have: whoever has A fetches them not again."""
    layers: tuple[LayerChange, ...]
    """Those of B in their order, then those that only A has."""
    note: str = ""


class Speed(Model):
    """One benchmark at sizes of a class, in both."""

    name: str
    sizes: str
    """Class of message sizes: `1 MiB to 1 GiB`."""
    unit: str
    a: float
    """Median over the sizes that both have."""
    b: float
    ratio: float
    """B to A: the median of the ratios of single sizes; above 1, B is faster (of a time, slower)."""
    points: int
    """Sizes that both have."""


class Side(Model):
    """One of the two."""

    name: str
    origin: str
    """Where it was found."""
    digest: str | None
    platform: str | None
    """None for a target that is not built."""


class Comparison(Model):
    """What `imagebuild diff --json` writes."""

    a: Side
    b: Side
    sections: tuple[Section, ...]
    sizes: Sizes | None
    speeds: tuple[Speed, ...]
    not_compared: tuple[str, ...]
    """What was not compared, and why."""
    notes: tuple[str, ...] = ()
    """How something was found out."""

    @property
    def differs(self) -> bool:
        """Whether anything is not the same. Speeds differ from run to run, and do not count."""
        layers = self.sizes is not None and any(layer.where != "both" for layer in self.sizes.layers)
        return layers or any(section.changes for section in self.sections)
