"""How an image was made, as an in-toto statement with SLSA's provenance. Pure.

The build says about itself what is written here; no SLSA level is claimed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from imagebuild import __version__, purl
from imagebuild.errors import ResultError
from imagebuild.fields import Platform
from imagebuild.lockfile import Lock
from imagebuild.materials import FOLDER_URI, INSTEAD_OF, Material, materials
from imagebuild.recipe import Recipe
from imagebuild.records import BuildResult

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:imagebuild:build-type:v1"
"""What the parameters mean is in docs/supply-chain.md."""
BUILDER = "urn:imagebuild:builder:"
LEVEL = "none claimed: the builder describes its own work, and whoever may start it may change what it writes"
DIRTY = "-dirty"


def statement(
    result: BuildResult, platform: Platform, recipe: Recipe, lock: Lock, dockerfile: str | None = None
) -> dict[str, Any]:
    """How the manifest of a platform was made.

    `dockerfile` is the text that this checkout renders for the target; with it, a build of another text is refused,
    as the sources named would not be those it had. Raises ResultError for that, and for a result without digest of
    the platform; ConfigError if the lock lacks a source.
    """
    digest = result.manifests.get(platform)
    if not digest:
        raise ResultError(f"{result.target}: the result of the build has no digest for {platform}; build with --push")
    if dockerfile is not None and result.dockerfile != hashlib.sha256(dockerfile.encode()).hexdigest():
        raise ResultError(
            f"{result.target}: was built from another Dockerfile than this checkout renders; take the checkout of the "
            f"build ({result.revision or 'its commit is unknown'}), with the same options"
        )
    target = recipe.target
    arch = platform.removeprefix("linux/")
    made_from = _descriptors(materials(recipe, lock, platform, result.replaced))
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": purl.purl("oci", target.image, digest, {"arch": arch}), "digest": _sha256(digest)},
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "target": target.id,
                    "platform": platform,
                    "axes": target.axes,
                    "components": target.components,
                },
                "internalParameters": {"imagebuild": __version__, "slsaLevel": LEVEL},
                "resolvedDependencies": [*_own(result), *made_from],
            },
            "runDetails": {
                "builder": {"id": _builder(result.builder)},
                "metadata": _times(result),
                "byproducts": [{"name": "index", "digest": _sha256(result.digest)}] if result.digest else [],
            },
        },
    }


def encode(document: Mapping[str, Any]) -> bytes:
    """The same statement gives the same bytes."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def dependencies(document: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Address and digest of every source that a statement names, but of what a build had in place of one.

    Raises KeyError or TypeError for what is no provenance; so do the functions below.
    """
    return frozenset(_pair(item) for item in _sources(document) if INSTEAD_OF not in item.get("annotations", {}))


def replaced(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Addresses of what the lock names and the build had something else for."""
    notes = (item.get("annotations", {}) for item in _sources(document))
    return tuple(str(note[INSTEAD_OF]) for note in notes if INSTEAD_OF in note)


def unpinned(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Sources that were folders of the machine that built: nobody can tell what was in them."""
    return tuple(str(item["name"]) for item in _sources(document) if str(item["uri"]).startswith(FOLDER_URI))


def expected(recipe: Recipe, lock: Lock, platform: Platform) -> frozenset[tuple[str, str]]:
    """What `dependencies` is for a build from this lock in which nothing was replaced."""
    return frozenset(_pair(item) for item in _descriptors(materials(recipe, lock, platform)))


def _sources(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    return [item for item in found if "uri" in item]


def _pair(item: Mapping[str, Any]) -> tuple[str, str]:
    digest = item.get("digest") or {"fingerprint": (item.get("annotations") or {}).get("fingerprint", "")}
    return str(item["uri"]), ",".join(f"{name}:{value}" for name, value in sorted(digest.items()))


def _descriptors(found: Iterable[Material]) -> list[dict[str, Any]]:
    """Each source once, with all components that are made from it."""
    groups: dict[str, list[Material]] = {}
    for material in found:
        groups.setdefault(material.uri, []).append(material)
    return [_descriptor(same[0], [m.owner for m in same]) for same in groups.values()]


def _descriptor(material: Material, owners: Iterable[str]) -> dict[str, Any]:
    """in-toto's ResourceDescriptor."""
    about = {"for": ", ".join(owners), **material.annotations}
    result: dict[str, Any] = {"name": material.name, "uri": material.uri, "annotations": about}
    if material.digest:
        result["digest"] = dict(material.digest)
    if material.kind == "archive":
        result["downloadLocation"] = material.address
    return result


def _own(result: BuildResult) -> list[dict[str, Any]]:
    """The project itself: its commit, and the Dockerfile, which has all that counts of it."""
    found: list[dict[str, Any]] = []
    if result.revision:
        commit = result.revision.removesuffix(DIRTY)
        changed = {"annotations": {"changed": "files differed from the commit"}} if commit != result.revision else {}
        found.append({"name": "project", "digest": {"gitCommit": commit}, **changed})
    if result.dockerfile:
        found.append({"name": "Dockerfile", "digest": {"sha256": result.dockerfile}})
    return found


def _builder(name: str) -> str:
    """A type URI: the builder's own if its name is one, as CI systems have them."""
    return name if name.startswith("https://") else BUILDER + quote(name or "unknown", safe="")


def _times(result: BuildResult) -> dict[str, str]:
    if not result.started:
        return {}
    began = datetime.fromisoformat(result.started)
    ended = began + timedelta(seconds=round(result.seconds))
    started, finished = (time.isoformat(timespec="seconds").replace("+00:00", "Z") for time in (began, ended))
    return {
        "invocationId": f"{result.target}/{started}",
        "startedOn": started,
        "finishedOn": finished,
    }


def _sha256(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}
