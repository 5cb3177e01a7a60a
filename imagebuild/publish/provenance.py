"""State how an image was made, as an in-toto statement with SLSA provenance; sign digests and verify signatures."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from imagebuild import __version__
from imagebuild.core import fields
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Arch, Platform
from imagebuild.core.run import INSTALL_COSIGN, run_program, which
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import is_plain
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
            uri = fields.archive_purl(name, "", url, sha256)
            yield Dependency(owner, "archive", name, "", uri, url, {"sha256": sha256})
        case GitRef(url, tag, _):
            commit = commit_of(lock, source)
            name = url.removesuffix(".git").rpartition("/")[2]
            uri = fields.git_purl(name, url, commit)
            if (folder := f"{owner}-source") in replaced:
                notes = {INSTEAD_OF: uri, "tag": tag}
                yield Dependency(owner, "folder", folder, "", FOLDER_URI + owner, "", {}, notes)
            else:
                address = f"git+{url}@{commit}"
                yield Dependency(owner, "git", name, commit, uri, address, {"gitCommit": commit}, {"tag": tag})
        case WheelSet():
            for wheel in wheels_of(lock, source):
                if sha256 := wheel.sha256.get(arch, ""):
                    uri = fields.wheel_purl(wheel.name, wheel.version)
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
    uri = fields.image_purl(reference, image.digest)
    if replacement in (None, image.digest):
        address = f"{reference}@{image.digest}"
        return Dependency(owner, "image", name, tag, uri, address, _digest_set(image.digest), {"image": reference})
    if replacement.startswith("sha256:"):
        own, digest = f"urn:imagebuild:bootstrapped:{owner}", _digest_set(replacement)
        return Dependency(owner, "image", f"{owner}-bootstrapped", "", own, "", digest, {INSTEAD_OF: uri})
    return Dependency(owner, "folder", replacement, "", FOLDER_URI + owner, "", {}, {INSTEAD_OF: uri})


# The statement


STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:imagebuild:build-type:v1"
"""docs/supply-chain.md says what the parameters of a build of this type mean."""
BUILDER = "urn:imagebuild:builder:"
LEVEL = "none claimed: the builder describes its own work, and whoever may start it may change what it writes"
DIRTY = "-dirty"
"""Suffix of a revision that stands for a commit with uncommitted changes."""


def provenance_statement(
    result: BuildResult, platform: Platform, recipe: Recipe, lock: Lock, dockerfile: str | None = None
) -> dict[str, Any]:
    """Return the statement about the manifest of a platform.

    `dockerfile` is the text that this checkout renders for the target. Raises ResultError if the build was of another
    text, as the statement would then name other sources than the build had, and if the result has no digest for the
    platform. Raises ConfigError if the lock lacks a source.
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
    name = fields.purl("oci", target.image, digest, {"arch": platform.removeprefix("linux/")})
    dependencies = resolved_dependencies(recipe, lock, platform, result.replaced)
    # CI systems name their builders by an https address.
    is_address = result.builder.startswith("https://")
    builder = result.builder if is_address else BUILDER + quote(result.builder or "unknown", safe="")
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": _digest_set(digest)}],
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
                "resolvedDependencies": [*_project_descriptors(result), *_descriptors(dependencies)],
            },
            "runDetails": {
                "builder": {"id": builder},
                "metadata": _metadata(result),
                "byproducts": [{"name": "index", "digest": _digest_set(result.digest)}] if result.digest else [],
            },
        },
    }


def encode_statement(document: Mapping[str, Any]) -> bytes:
    """Return a statement as JSON, always with the same bytes."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


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


# What a statement says. These functions raise KeyError or TypeError for a document that is not a statement.


def statement_dependencies(document: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return URI and digest of every dependency, except for those that replaced one of the lock."""
    return frozenset(
        _uri_and_digest(item) for item in _resolved(document) if INSTEAD_OF not in item.get("annotations", {})
    )


def replaced_dependencies(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the URIs of the lock's dependencies for which the build used something else."""
    annotations = (item.get("annotations", {}) for item in _resolved(document))
    return tuple(str(notes[INSTEAD_OF]) for notes in annotations if INSTEAD_OF in notes)


def unpinned_dependencies(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of dependencies that were folders of the building machine."""
    return tuple(str(item["name"]) for item in _resolved(document) if str(item["uri"]).startswith(FOLDER_URI))


def expected_dependencies(recipe: Recipe, lock: Lock, platform: Platform) -> frozenset[tuple[str, str]]:
    """Return what `statement_dependencies` gives for a build from this lock in which nothing was replaced."""
    return frozenset(_uri_and_digest(item) for item in _descriptors(resolved_dependencies(recipe, lock, platform)))


def _resolved(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dependencies with a URI: all but the project and the Dockerfile."""
    return [item for item in document["predicate"]["buildDefinition"]["resolvedDependencies"] if "uri" in item]


def _uri_and_digest(item: Mapping[str, Any]) -> tuple[str, str]:
    digest = item.get("digest") or {"fingerprint": (item.get("annotations") or {}).get("fingerprint", "")}
    return str(item["uri"]), ",".join(f"{name}:{value}" for name, value in sorted(digest.items()))


# Signatures


PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - a variable's name


@dataclass(frozen=True)
class Signer:
    """Say who signs."""

    key: str | None = None
    """File, or the address of a key in a form that cosign knows; None signs without a key, as the identity of CI."""
    log: bool = True
    """Whether to write the signature to a public transparency log."""


@dataclass(frozen=True)
class Trust:
    """Say whose signature is trusted: either a key's, or that of an identity that an issuer vouches for."""

    key: str | None = None
    identity: str | None = None
    issuer: str | None = None
    log: bool = True
    """Whether the signature has to be in the transparency log."""

    def check(self) -> None:
        """Raise ConfigError unless exactly one signer is named and its key exists."""
        if bool(self.key) == bool(self.identity):
            raise ConfigError("whose signature? give --key FILE, or --certificate-identity with its issuer")
        if self.key and "://" not in self.key and not Path(self.key).is_file():
            raise ConfigError(f"--key {self.key}: no such file")
        if self.identity and not self.issuer:
            raise ConfigError("--certificate-identity: needs --certificate-oidc-issuer, or anybody could vouch for it")
        if self.identity and not self.log:
            raise ConfigError(
                "--no-tlog: needs --key; a certificate is valid for minutes, and only the log says when it was used"
            )


@dataclass(frozen=True)
class Cosign:
    """Call cosign. `environ` is the environment of which it gets the variables of its own."""

    environ: Mapping[str, str]
    run: Callable[..., str] = run_program
    program: str | None = None
    """None: search for it."""

    def find(self) -> str:
        """Return the path of the program. Raises CommandError if it is missing."""
        program = self.program or which("cosign")
        if not program:
            raise CommandError(
                f"`cosign` is missing, which signs images and verifies signatures; install it: {INSTALL_COSIGN}"
            )
        return program

    def __call__(self, *arguments: str) -> str:
        """Return what the program prints. Raises CommandError if it is missing or fails."""
        environ = {name: value for name, value in self.environ.items() if name.startswith("COSIGN_")}
        return self.run(self.find(), *arguments, env=environ)


def sign_digest(images: Iterable[ImageReference], signer: Signer, cosign: Cosign | None = None) -> None:
    """Sign images by their digests.

    Raises ConfigError for an image without a digest or a key without a password. Raises CommandError if cosign is
    missing or fails.
    """
    cosign = cosign or Cosign(os.environ)
    # Only a key outside of key management services has a password.
    encrypted = signer.key is not None and ("://" not in signer.key or signer.key.startswith("env://"))
    if encrypted and PASSWORD not in cosign.environ:
        raise ConfigError(f"{signer.key}: set {PASSWORD} to the key's password, which may be empty")
    key = ["--key", signer.key] if signer.key else []
    log = [] if signer.log else ["--tlog-upload=false"]
    for image in images:
        cosign("sign", "--yes", *key, *log, *_connection(image, cosign.environ), _by_digest(image))


def verify_signature(image: ImageReference, trust: Trust, cosign: Cosign | None = None) -> str | None:
    """Return why an image has no trusted signature, in cosign's words; None if it has one.

    Raises ConfigError if `trust` names no signer, CommandError if cosign is missing.
    """
    cosign = cosign or Cosign(os.environ)
    trust.check()
    if trust.key:
        signer = ["--key", trust.key]
    else:
        signer = ["--certificate-identity", str(trust.identity), "--certificate-oidc-issuer", str(trust.issuer)]
    # With a key and without a log, cosign needs no network.
    log = [] if trust.log else ["--private-infrastructure"]
    cosign.find()
    try:
        cosign("verify", *signer, *log, *_connection(image, cosign.environ), "--output", "json", _by_digest(image))
    except CommandError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1].removeprefix("Error: ").removeprefix("error during command execution: ")
    return None


def signature_tag(digest: str) -> str:
    """Return the tag under which cosign keeps the signature of an image."""
    return f"{digest.replace(':', '-')}.sig"


def _by_digest(image: ImageReference) -> str:
    """Return the name of an image without its tag, which may move meanwhile. Raises ConfigError without a digest."""
    if not image.digest:
        raise ConfigError(f"{image}: only an image named by digest can be signed or verified; write NAME@DIGEST")
    return f"{image.name}@{image.digest}"


def _connection(image: ImageReference, environ: Mapping[str, str]) -> list[str]:
    return ["--allow-http-registry"] if is_plain(image.host, environ) else []
