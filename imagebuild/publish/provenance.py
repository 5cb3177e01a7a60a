"""State how an image was made, as the predicate of SLSA provenance. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from urllib.parse import quote

from packageurl import PackageURL
from packaging.utils import canonicalize_name

from imagebuild import __version__
from imagebuild.core.errors import ResultError
from imagebuild.core.fields import Arch, Platform, full_reference
from imagebuild.project.lockfile import (
    Archive,
    BaseImage,
    GitRef,
    Lock,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    WheelSet,
    check_resolved,
    commit_of,
    digest_of,
    hash_of,
    locked_image,
    repository_of,
    wheels_of,
)
from imagebuild.project.records import BuildResult
from imagebuild.render.recipe import Recipe

INSTEAD_OF = "instead-of"
"""Annotation of a dependency that replaced one of the lock: the URI of the one in the lock."""
FOLDER_URI = "urn:imagebuild:folder:"
"""Beginning of the URI of a dependency that was a folder of the building machine; nobody can tell what was in it."""

GITHUB = "https://github.com/"


def package_url(kind: str, name: str, version: str = "", **qualifiers: str) -> str:
    """Return `pkg:kind/name@version?…`; slashes in the name separate a namespace."""
    namespace, _, last = name.rpartition("/")
    present = {key: value for key, value in qualifiers.items() if value}
    return PackageURL(kind, namespace or None, last, version or None, present).to_string()


def image_purl(reference: str, digest: str) -> str:
    """Return the package URL of an image in a registry; `reference` has no digest."""
    repository, colon, tag = full_reference(reference).rpartition(":")
    if not colon or "/" in tag:
        repository, tag = full_reference(reference), ""
    return package_url("oci", repository.rpartition("/")[2].lower(), digest, repository_url=repository, tag=tag)


@dataclass(frozen=True)
class Dependency:
    """Describe a source of an image, pinned by content."""

    owner: str
    """The component; for a base image, the value of `os` or the name of the image."""
    kind: Literal["image", "archive", "git", "wheel", "repository", "folder"]
    name: str
    version: str
    uri: str
    """Package URL; for a repository, its address."""
    address: str
    """Where it is fetched from, in the notation of SPDX; empty for a wheel, which any index may have."""
    digest: Mapping[str, str] = field(default_factory=dict)
    """`sha256` or `gitCommit`; empty for a repository, which has a key, and for a folder."""
    annotations: Mapping[str, str] = field(default_factory=dict)


def resolved_dependencies(
    recipe: Recipe, lock: Lock, platform: Platform, replaced: Mapping[str, str] | None = None
) -> tuple[Dependency, ...]:
    """Return the sources of a target for one platform, in a fixed order, each once for each of its owners.

    `replaced` is the field of `BuildResult` with what the build used instead. Raises ConfigError if the lock lacks a
    source or could not resolve it.
    """
    owned = tuple(recipe.for_platform(platform).owned_sources())
    check_resolved(lock, (source for _, source in owned))
    found = (d for owner, source in owned for d in _dependencies(lock, owner, source, platform, replaced or {}))
    return tuple({(dependency.owner, dependency.uri): dependency for dependency in found}.values())


def _dependencies(
    lock: Lock, owner: str, source: Source, platform: Platform, replaced: Mapping[str, str]
) -> Iterator[Dependency]:
    arch: Arch = "arm64" if platform == "linux/arm64" else "amd64"
    match source:
        case BaseImage(reference):
            yield _base_image(lock, owner, reference, replaced.get(digest_of(lock, reference)))
        case Archive(component, url):
            sha256 = hash_of(lock, component, url)
            name = url.rpartition("/")[2]
            uri = package_url("generic", name, download_url=url, checksum=f"sha256:{sha256}")
            yield Dependency(owner, "archive", name, "", uri, url, {"sha256": sha256})
        case GitRef(url, tag, _):
            commit = commit_of(lock, source)
            name = url.removesuffix(".git").rpartition("/")[2]
            if url.startswith(GITHUB):
                uri = package_url("github", url.removeprefix(GITHUB).removesuffix(".git"), commit)
            else:
                uri = package_url("generic", name, commit, vcs_url=f"git+{url}@{commit}")
            if (folder := f"{owner}-source") in replaced:
                notes = {INSTEAD_OF: uri, "tag": tag}
                yield Dependency(owner, "folder", folder, "", FOLDER_URI + owner, "", {}, notes)
            else:
                address = f"git+{url}@{commit}"
                yield Dependency(owner, "git", name, commit, uri, address, {"gitCommit": commit}, {"tag": tag})
        case WheelSet():
            for wheel in wheels_of(lock, source):
                if sha256 := wheel.sha256.get(arch, ""):
                    uri = package_url("pypi", canonicalize_name(wheel.name), wheel.version)
                    yield Dependency(owner, "wheel", wheel.name, wheel.version, uri, "", {"sha256": sha256})
        case PackageSource(url, suite, key, _):
            repository = repository_of(lock, url)
            assert isinstance(repository, LockedRepository), "check_resolved has raised otherwise"
            notes = {"suite": suite, "key": key, "fingerprint": repository.fingerprint}
            notes |= {f"package:{name}": version for name, version in sorted(repository.packages.items())}
            yield Dependency(owner, "repository", url, "", url, url, {}, notes)


def _base_image(lock: Lock, owner: str, reference: str, replacement: str | None) -> Dependency:
    """Return a base image; `replacement` is the digest of a bootstrapped one, or the name of a folder."""
    image = locked_image(lock, reference)
    assert isinstance(image, LockedImage), "check_resolved has raised otherwise"
    name, _, tag = reference.rpartition(":")
    uri = image_purl(reference, image.digest)
    if replacement in (None, image.digest):
        address = f"{reference}@{image.digest}"
        return Dependency(owner, "image", name, tag, uri, address, _digest_set(image.digest), {"image": reference})
    if replacement.startswith("sha256:"):
        own, digest = f"urn:imagebuild:bootstrapped:{owner}", _digest_set(replacement)
        return Dependency(owner, "image", f"{owner}-bootstrapped", "", own, "", digest, {INSTEAD_OF: uri})
    return Dependency(owner, "folder", replacement, "", FOLDER_URI + owner, "", {}, {INSTEAD_OF: uri})


# The predicate


BUILD_TYPE = "urn:imagebuild:build-type:v1"
"""docs/supply-chain.md says what the parameters of a build of this type mean."""
BUILDER = "urn:imagebuild:builder:"
LEVEL = "none claimed: the builder describes its own work, and whoever may start it may change what it writes"
DIRTY = "-dirty"
"""Suffix of a revision that stands for a commit with uncommitted changes."""


def provenance_of(
    result: BuildResult, platform: Platform, recipe: Recipe, lock: Lock, dockerfile: str | None = None
) -> dict[str, Any]:
    """Return the provenance of the image of a platform.

    `dockerfile` is the text that this checkout renders for the target. Raises ResultError if the build was of another
    text, as the provenance would then name other sources than the build had. Raises ConfigError if the lock lacks a
    source.
    """
    if dockerfile is not None and result.dockerfile != hashlib.sha256(dockerfile.encode()).hexdigest():
        raise ResultError(
            f"{result.target}: was built from another Dockerfile than this checkout renders; take the checkout of the "
            f"build ({result.revision or 'its commit is unknown'}), with the same options"
        )
    dependencies = resolved_dependencies(recipe, lock, platform, result.replaced)
    # CI systems name their builders by an https address.
    is_address = result.builder.startswith("https://")
    builder = result.builder if is_address else BUILDER + quote(result.builder or "unknown", safe="")
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "target": recipe.target.id,
                "platform": platform,
                "axes": recipe.target.axes,
                "components": recipe.target.components,
            },
            "internalParameters": {"imagebuild": __version__, "slsaLevel": LEVEL},
            "resolvedDependencies": [*_project_descriptors(result), *_descriptors(dependencies)],
        },
        "runDetails": {
            "builder": {"id": builder},
            "metadata": _metadata(result),
            "byproducts": [{"name": "index", "digest": _digest_set(result.digest)}] if result.digest else [],
        },
    }


def _descriptors(dependencies: Iterable[Dependency]) -> list[dict[str, Any]]:
    """Return in-toto's ResourceDescriptor of each dependency, once for all of its owners."""
    by_uri: dict[str, list[Dependency]] = {}
    for dependency in dependencies:
        by_uri.setdefault(dependency.uri, []).append(dependency)
    descriptors = []
    for uri, same in by_uri.items():
        first = same[0]
        annotations = {"for": ", ".join(dependency.owner for dependency in same), **first.annotations}
        descriptor: dict[str, Any] = {"name": first.name, "uri": uri, "annotations": annotations}
        if first.digest:
            descriptor["digest"] = dict(first.digest)
        if first.kind == "archive":
            descriptor["downloadLocation"] = first.address
        descriptors.append(descriptor)
    return descriptors


def _project_descriptors(result: BuildResult) -> list[dict[str, Any]]:
    """Return the descriptors of the project's commit and of the Dockerfile, which holds all that the build read."""
    descriptors: list[dict[str, Any]] = []
    if result.revision:
        commit = result.revision.removesuffix(DIRTY)
        descriptors.append({"name": "project", "digest": {"gitCommit": commit}})
        if commit != result.revision:
            descriptors[-1]["annotations"] = {"changed": "files differed from the commit"}
    if result.dockerfile:
        descriptors.append({"name": "Dockerfile", "digest": {"sha256": result.dockerfile}})
    return descriptors


def _metadata(result: BuildResult) -> dict[str, str]:
    if not result.started:
        return {}
    start = datetime.fromisoformat(result.started)
    end = start + timedelta(seconds=round(result.seconds))
    started, finished = (time.isoformat(timespec="seconds").replace("+00:00", "Z") for time in (start, end))
    return {"invocationId": f"{result.target}/{started}", "startedOn": started, "finishedOn": finished}


def _digest_set(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


# What a provenance says. These functions raise KeyError or TypeError for a document that is none.


def replaced_dependencies(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the URIs of the lock's dependencies for which the build used something else."""
    annotations = (item.get("annotations", {}) for item in _resolved(document))
    return tuple(str(notes[INSTEAD_OF]) for notes in annotations if INSTEAD_OF in notes)


def unpinned_dependencies(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of dependencies that were folders of the building machine."""
    return tuple(str(item["name"]) for item in _resolved(document) if str(item["uri"]).startswith(FOLDER_URI))


def _resolved(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dependencies with a URI: all but the project and the Dockerfile."""
    return [item for item in document["buildDefinition"]["resolvedDependencies"] if "uri" in item]
