"""State how an image was made, as the predicate of SLSA provenance. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from urllib.parse import quote

from packageurl import PackageURL
from packaging.utils import canonicalize_name
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from imagebuild import __version__
from imagebuild.core.errors import ResultError
from imagebuild.core.fields import Arch, Platform, full_reference
from imagebuild.project.lockfile import (
    Archive,
    BaseImage,
    GitRef,
    Lock,
    PackageSource,
    Source,
    WheelSet,
    check_pinned,
    commit_of,
    digest_of,
    hash_of,
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

    `replaced` is the field of `BuildResult` with what the build used instead. Raises ConfigError if a source has no
    pin.
    """
    owned = tuple(recipe.for_platform(platform).owned_sources())
    check_pinned(lock, (source for _, source in owned))
    every = (d for owner, source in owned for d in _dependencies(lock, owner, source, platform, replaced or {}))
    return tuple({(dependency.owner, dependency.uri): dependency for dependency in every}.values())


def _dependencies(
    lock: Lock, owner: str, source: Source, platform: Platform, replaced: Mapping[str, str]
) -> Iterator[Dependency]:
    arch: Arch = "arm64" if platform == "linux/arm64" else "amd64"
    match source:
        case BaseImage(reference):
            yield _base_image(lock, owner, reference, replaced.get(digest_of(lock, reference)))
        case Archive(url=url):
            sha256 = hash_of(lock, url)
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
            repository = lock.repositories[url]
            notes = {"suite": suite, "key": key, "fingerprint": repository.fingerprint}
            notes |= {f"package:{name}": version for name, version in sorted(repository.packages.items())}
            yield Dependency(owner, "repository", url, "", url, url, {}, notes)


def _base_image(lock: Lock, owner: str, reference: str, replacement: str | None) -> Dependency:
    """Return a base image; `replacement` is the digest of a bootstrapped one, or the name of a folder."""
    image = lock.images[reference]
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
PROJECT = "project"


class Resource(BaseModel):
    """Describe a resource as in-toto does, by its address, its digest or both."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str = ""
    uri: str = ""
    digest: dict[str, str] = {}
    annotations: dict[str, str] = {}
    downloadLocation: str = ""  # noqa: N815 - in-toto's name


class Provenance(BaseModel):
    """Hold what we read of an SLSA provenance, which may be another builder's."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    platform: str | None = Field(None, validation_alias=AliasPath("buildDefinition", "externalParameters", "platform"))
    dependencies: tuple[Resource, ...] = Field(validation_alias=AliasPath("buildDefinition", "resolvedDependencies"))

    @property
    def replaced(self) -> tuple[str, ...]:
        """Return the URIs of the lock's dependencies for which the build used something else."""
        return tuple(item.annotations[INSTEAD_OF] for item in self.dependencies if INSTEAD_OF in item.annotations)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the names of dependencies that were folders of the building machine."""
        return tuple(item.name for item in self.dependencies if item.uri.startswith(FOLDER_URI))

    @property
    def sources(self) -> str:
        """Say how many sources there are, and which commit of the project."""
        project = next((item for item in self.dependencies if item.name == PROJECT), Resource())
        commit = project.digest.get("gitCommit", "")[:12]
        changed = " and files that differ from it" if project.annotations else ""
        return f"{len(self.dependencies)} sources, {f'commit {commit}{changed}' if commit else 'an unknown commit'}"


def provenance_of(
    result: BuildResult, platform: Platform, recipe: Recipe, lock: Lock, dockerfile: str | None = None, *,
    workflow: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the provenance of the image of a platform.

    `dockerfile` is the text that this checkout renders for the target; `workflow` is the address of the workflow that
    signs this and built the image, which others may have called. Raises ResultError if the build was of another text,
    as the provenance would then name other sources than the build had. Raises ConfigError if the lock lacks a source.
    """
    if dockerfile is not None and result.dockerfile != hashlib.sha256(dockerfile.encode()).hexdigest():
        raise ResultError(
            f"{result.target}: was built from another Dockerfile than this checkout renders; take the checkout of the "
            f"build ({result.revision or 'its commit is unknown'}), with the same options"
        )
    by_uri: dict[str, list[Dependency]] = {}
    for dependency in resolved_dependencies(recipe, lock, platform, result.replaced):
        by_uri.setdefault(dependency.uri, []).append(dependency)
    # On GitHub the workflow is what vouches for a build; other CI systems name their builders by an https address.
    builder = workflow or result.workflow or result.builder
    if not builder.startswith("https://"):
        builder = BUILDER + quote(builder or "unknown", safe="")
    resources = (*_own_resources(result), *map(_resource, by_uri.values()))
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "target": recipe.target.id,
                "platform": platform,
                "axes": recipe.target.axes,
                "components": recipe.target.components,
                **({"workflow": result.workflow} if result.workflow else {}),
                **({"rebuilt": str(result.rebuilt)} if result.rebuilt else {}),
            },
            "internalParameters": {"imagebuild": __version__, "slsaLevel": LEVEL},
            "resolvedDependencies": [resource.model_dump(exclude_defaults=True) for resource in resources],
        },
        "runDetails": {
            "builder": {"id": builder},
            "metadata": _metadata(result),
            "byproducts": [{"name": "index", "digest": _digest_set(result.digest)}] if result.digest else [],
        },
    }


def _resource(same: Sequence[Dependency]) -> Resource:
    """Return the description of a dependency that stands for all of its owners."""
    first = same[0]
    return Resource(
        name=first.name, uri=first.uri, digest=dict(first.digest),
        annotations={"for": ", ".join(dependency.owner for dependency in same), **first.annotations},
        downloadLocation=first.address if first.kind == "archive" else "",
    )  # fmt: skip


def _own_resources(result: BuildResult) -> Iterator[Resource]:
    """Yield the project's commit and the Dockerfile, which holds all that the build read."""
    if result.revision:
        commit = result.revision.removesuffix(DIRTY)
        changed = {} if commit == result.revision else {"changed": "files differed from the commit"}
        uri = f"git+{result.source}@{commit}" if result.source else ""
        yield Resource(name=PROJECT, uri=uri, digest={"gitCommit": commit}, annotations=changed)
    if result.dockerfile:
        yield Resource(name="Dockerfile", digest={"sha256": result.dockerfile})


def _metadata(result: BuildResult) -> dict[str, str]:
    if not result.started:
        return {}
    start = datetime.fromisoformat(result.started)
    end = start + timedelta(seconds=round(result.seconds))
    started, finished = (time.isoformat(timespec="seconds").replace("+00:00", "Z") for time in (start, end))
    return {"invocationId": result.run or f"{result.target}/{started}", "startedOn": started, "finishedOn": finished}


def _digest_set(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}
