"""What one platform of a target is made from, each source by its content. Pure.

Packages of the distribution's own archive are no sources of the lock: its signed index pins them, and what a build
installed is in the image, where an SBOM finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from imagebuild import purl
from imagebuild.fields import Arch, Platform
from imagebuild.lockfile import Lock, LockedImage, LockedRepository
from imagebuild.recipe import Recipe
from imagebuild.sources import (
    Archive,
    BaseImage,
    GitRef,
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

INSTEAD_OF = "instead-of"
"""Annotation of what a build had in place of something that the lock names: the URI of that."""
FOLDER_URI = "urn:imagebuild:folder:"
"""Of a replacement without content that anybody could compare: a folder of the machine that built."""


@dataclass(frozen=True)
class Material:
    """A source, pinned by content."""

    owner: str
    """The component, or for a base the value of `os` or the image."""
    kind: Literal["image", "archive", "git", "wheel", "repository", "folder"]
    name: str
    version: str
    uri: str
    """Package URL; of a repository its address."""
    address: str
    """Where it is fetched from, as SPDX writes that; empty for a wheel, which any index may have."""
    digest: Mapping[str, str] = field(default_factory=dict)
    """`sha256` or `gitCommit`; none of a repository, which has a key, and of a folder."""
    annotations: Mapping[str, str] = field(default_factory=dict)


def materials(
    recipe: Recipe, lock: Lock, platform: Platform, replaced: Mapping[str, str] | None = None
) -> tuple[Material, ...]:
    """Every source of one platform of a target, in a fixed order, each once for everything that is made from it.

    `replaced` is what `BuildResult.replaced` says that the build had instead. Raises ConfigError if the lock lacks
    a source or has it as unresolved.
    """
    narrow = recipe.on(platform)
    owned = tuple(narrow.owned_sources())
    check_resolved(lock, (source for _, source in owned))
    found = (m for owner, source in owned for m in _of(lock, owner, source, platform, replaced or {}))
    return tuple({(m.owner, m.uri): m for m in found}.values())


def _of(lock: Lock, owner: str, source: Source, platform: Platform, replaced: Mapping[str, str]) -> Iterator[Material]:
    arch: Arch = "arm64" if platform == "linux/arm64" else "amd64"
    match source:
        case BaseImage(reference):
            yield _image(lock, owner, reference, replaced.get(digest_of(lock, reference)))
        case Archive(component, url):
            content = hash_of(lock, component, url)
            name = url.rpartition("/")[2]
            yield Material(
                owner, "archive", name, "", purl.archive(name, "", url, content), url, {"sha256": content}
            )  # fmt: skip
        case GitRef(url, tag, _) if f"{owner}-source" in replaced:
            commit = commit_of(lock, source)
            why = {INSTEAD_OF: purl.git(_repository(url), url, commit), "tag": tag}
            yield Material(owner, "folder", f"{owner}-source", "", FOLDER_URI + owner, "", {}, why)
        case GitRef(url, tag, _):
            commit = commit_of(lock, source)
            name = _repository(url)
            address = f"git+{url}@{commit}"
            yield Material(
                owner, "git", name, commit, purl.git(name, url, commit), address, {"gitCommit": commit}, {"tag": tag}
            )
        case WheelSet():
            for wheel in wheels_of(lock, source):
                if sha256 := wheel.sha256.get(arch):
                    uri = purl.wheel(wheel.name, wheel.version)
                    yield Material(owner, "wheel", wheel.name, wheel.version, uri, "", {"sha256": sha256})
        case PackageSource(url, suite, key, _):
            found = repository_of(lock, url)
            assert isinstance(found, LockedRepository), "checked before"
            about = {"suite": suite, "key": key, "fingerprint": found.fingerprint}
            about |= {f"package:{name}": version for name, version in sorted(found.packages.items())}
            yield Material(owner, "repository", url, "", url, url, {}, about)


def _image(lock: Lock, owner: str, reference: str, instead: str | None) -> Material:
    found = locked_image(lock, reference)
    assert isinstance(found, LockedImage), "checked before"
    name, _, tag = reference.rpartition(":")
    uri = purl.image(reference, found.digest)
    if instead in (None, found.digest):
        digest = {"sha256": found.digest.removeprefix("sha256:")}
        return Material(owner, "image", name, tag, uri, f"{reference}@{found.digest}", digest, {"image": reference})
    if instead.startswith("sha256:"):
        digest, own = {"sha256": instead.removeprefix("sha256:")}, f"urn:imagebuild:bootstrapped:{owner}"
        return Material(owner, "image", f"{owner}-bootstrapped", "", own, "", digest, {INSTEAD_OF: uri})
    return Material(owner, "folder", instead, "", FOLDER_URI + owner, "", {}, {INSTEAD_OF: uri})


def _repository(url: str) -> str:
    return url.removesuffix(".git").rpartition("/")[2]
