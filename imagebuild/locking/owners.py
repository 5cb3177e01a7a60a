"""Which entries of the lock a name on the command line means. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from imagebuild.config import suggestion
from imagebuild.errors import ConfigError
from imagebuild.locking.entries import Key, key_of
from imagebuild.recipe import Recipe
from imagebuild.sources import BaseImage


def owners(recipes: Iterable[Recipe]) -> dict[str, set[Key]]:
    """Component, pin, base or image of the matrix → its entries; packages of a repository as further keys.

    An image's name means the image it starts from, unless a component has the same name.
    """
    found: dict[str, set[Key]] = {}
    bases: dict[str, set[Key]] = {}
    for recipe in recipes:
        for name, source in recipe.owned_sources():
            key = key_of(source)
            keys = {key, *((*key, package) for package in getattr(source, "packages", ()))}
            if isinstance(source, BaseImage) and name == recipe.target.image:
                for meant in (name, source.reference):
                    bases.setdefault(meant, set()).update(keys)
                continue
            found.setdefault(name, set()).update(keys)
            if name in recipe.project.components and (pin := recipe.of(name).pin):
                found.setdefault(pin, set()).update(keys)
    return {**bases, **found}


def keys_of(names: Iterable[str], known: Mapping[str, set[Key]]) -> frozenset[Key]:
    """The entries that names mean: a name of `owners`, or a glob of addresses and references.

    Raises ConfigError for a name that means nothing.
    """
    result: set[Key] = set()
    every = set().union(*known.values())
    for name in names:
        keys = known.get(name) or {key for key in every if fnmatchcase(key[1], name)}
        if not keys:
            near = suggestion(name, [*known, *(key[1] for key in every)] if "/" in name else dict(known))
            raise ConfigError(f"--update {name}: no component, pin, base, image or address of a source{near}")
        result |= keys
    return frozenset(result)
