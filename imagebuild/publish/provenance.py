"""Say how an image was made, as an in-toto statement with SLSA's provenance, and sign digests with cosign."""

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
from imagebuild.core import fields, run
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
"""Annotation of what a build had in place of something that the lock names: the URI of that."""
FOLDER_URI = "urn:imagebuild:folder:"
"""Of a replacement without content that anybody could compare: a folder of the machine that built."""


@dataclass(frozen=True)
class Dependency:
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


def dependencies(
    recipe: Recipe, lock: Lock, platform: Platform, replaced: Mapping[str, str] | None = None
) -> tuple[Dependency, ...]:
    """Every source of one platform of a target, in a fixed order, each once for everything that is made from it.

    `replaced` is what `BuildResult.replaced` says that the build had instead. Raises ConfigError if the lock lacks
    a source or has it as unresolved.
    """
    narrow = recipe.on(platform)
    owned = tuple(narrow.owned_sources())
    check_resolved(lock, (source for _, source in owned))
    found = (m for owner, source in owned for m in _of(lock, owner, source, platform, replaced or {}))
    return tuple({(m.owner, m.uri): m for m in found}.values())


def _of(
    lock: Lock, owner: str, source: Source, platform: Platform, replaced: Mapping[str, str]
) -> Iterator[Dependency]:
    arch: Arch = "arm64" if platform == "linux/arm64" else "amd64"
    match source:
        case BaseImage(reference):
            yield _image(lock, owner, reference, replaced.get(digest_of(lock, reference)))
        case Archive(component, url):
            content = hash_of(lock, component, url)
            name = url.rpartition("/")[2]
            yield Dependency(
                owner, "archive", name, "", fields.archive_purl(name, "", url, content), url, {"sha256": content}
            )  # fmt: skip
        case GitRef(url, tag, _) if f"{owner}-source" in replaced:
            commit = commit_of(lock, source)
            why = {INSTEAD_OF: fields.git_purl(_repository(url), url, commit), "tag": tag}
            yield Dependency(owner, "folder", f"{owner}-source", "", FOLDER_URI + owner, "", {}, why)
        case GitRef(url, tag, _):
            commit = commit_of(lock, source)
            name = _repository(url)
            address = f"git+{url}@{commit}"
            yield Dependency(
                owner,
                "git",
                name,
                commit,
                fields.git_purl(name, url, commit),
                address,
                {"gitCommit": commit},
                {"tag": tag},
            )
        case WheelSet():
            for wheel in wheels_of(lock, source):
                if sha256 := wheel.sha256.get(arch):
                    uri = fields.wheel_purl(wheel.name, wheel.version)
                    yield Dependency(owner, "wheel", wheel.name, wheel.version, uri, "", {"sha256": sha256})
        case PackageSource(url, suite, key, _):
            found = repository_of(lock, url)
            assert isinstance(found, LockedRepository), "checked before"
            about = {"suite": suite, "key": key, "fingerprint": found.fingerprint}
            about |= {f"package:{name}": version for name, version in sorted(found.packages.items())}
            yield Dependency(owner, "repository", url, "", url, url, {}, about)


def _image(lock: Lock, owner: str, reference: str, instead: str | None) -> Dependency:
    found = locked_image(lock, reference)
    assert isinstance(found, LockedImage), "checked before"
    name, _, tag = reference.rpartition(":")
    uri = fields.image_purl(reference, found.digest)
    if instead in (None, found.digest):
        digest = {"sha256": found.digest.removeprefix("sha256:")}
        return Dependency(owner, "image", name, tag, uri, f"{reference}@{found.digest}", digest, {"image": reference})
    if instead.startswith("sha256:"):
        digest, own = {"sha256": instead.removeprefix("sha256:")}, f"urn:imagebuild:bootstrapped:{owner}"
        return Dependency(owner, "image", f"{owner}-bootstrapped", "", own, "", digest, {INSTEAD_OF: uri})
    return Dependency(owner, "folder", instead, "", FOLDER_URI + owner, "", {}, {INSTEAD_OF: uri})


def _repository(url: str) -> str:
    return url.removesuffix(".git").rpartition("/")[2]


STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:imagebuild:build-type:v1"
"""What the parameters mean is in docs/supply-chain.md."""
BUILDER = "urn:imagebuild:builder:"
LEVEL = "none claimed: the builder describes its own work, and whoever may start it may change what it writes"
DIRTY = "-dirty"


def provenance_statement(
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
    made_from = _descriptors(dependencies(recipe, lock, platform, result.replaced))
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": fields.purl("oci", target.image, digest, {"arch": arch}), "digest": _sha256(digest)},
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


def encode_statement(document: Mapping[str, Any]) -> bytes:
    """The same statement gives the same bytes."""
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def dependencies_in(document: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
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
    return frozenset(_pair(item) for item in _descriptors(dependencies(recipe, lock, platform)))


def _sources(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    return [item for item in found if "uri" in item]


def _pair(item: Mapping[str, Any]) -> tuple[str, str]:
    digest = item.get("digest") or {"fingerprint": (item.get("annotations") or {}).get("fingerprint", "")}
    return str(item["uri"]), ",".join(f"{name}:{value}" for name, value in sorted(digest.items()))


def _descriptors(found: Iterable[Dependency]) -> list[dict[str, Any]]:
    """Each source once, with all components that are made from it."""
    groups: dict[str, list[Dependency]] = {}
    for material in found:
        groups.setdefault(material.uri, []).append(material)
    return [_descriptor(same[0], [m.owner for m in same]) for same in groups.values()]


def _descriptor(material: Dependency, owners: Iterable[str]) -> dict[str, Any]:
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


PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - a variable's name
TAG_SUFFIX = ".sig"

Run = Callable[..., str]


@dataclass(frozen=True)
class Signer:
    """Who signs."""

    key: str | None = None
    """File, or what cosign takes as the address of a key; None is keyless, as CI's own identity."""
    log: bool = True
    """Whether the signature is written to a public transparency log."""


@dataclass(frozen=True)
class Trust:
    """Whose signature is wanted. Either a key, or an identity and who vouches for it."""

    key: str | None = None
    identity: str | None = None
    issuer: str | None = None
    log: bool = True
    """Whether the signature has to be in the transparency log."""

    def check(self) -> None:
        """Raise ConfigError unless it says exactly one signer, whose key is there."""
        if bool(self.key) == bool(self.identity):
            raise ConfigError("whose signature? give --key FILE, or --certificate-identity with its issuer")
        if self.key and "://" not in self.key and not Path(self.key).is_file():
            raise ConfigError(f"--key {self.key}: no such file")
        if self.identity and not self.issuer:
            raise ConfigError("--certificate-identity: anybody could vouch for it; give --certificate-oidc-issuer too")
        if self.identity and not self.log:
            raise ConfigError(
                "--no-tlog: certificates live for minutes, only the log says when one was used; use --key"
            )


@dataclass(frozen=True)
class Cosign:
    """The program, and the machine it runs on."""

    environ: Mapping[str, str]
    run: Run = run_program
    program: str | None = None

    def __call__(self, *arguments: str) -> str:
        """What it prints. Raises CommandError if it is missing or fails."""
        program = self.program or which("cosign")
        if not program:
            raise CommandError(f"`cosign` is missing, which signs images; install it: {INSTALL_COSIGN}")
        return self.run(program, *arguments, env={k: v for k, v in self.environ.items() if k.startswith("COSIGN_")})


def sign_digest(images: Iterable[ImageReference], signer: Signer, cosign: Cosign | None = None) -> None:
    """Sign images, each by its digest. One that this key has signed is not signed again.

    Raises ConfigError for an image without digest or a key without password, CommandError if cosign is missing or
    fails.
    """
    cosign = cosign or Cosign(os.environ)
    if signer.key and _is_file(signer.key) and PASSWORD not in cosign.environ:
        raise ConfigError(f"{signer.key}: set {PASSWORD} to the key's password, which may be empty")
    key = ["--key", signer.key] if signer.key else []
    log = [] if signer.log else ["--tlog-upload=false"]
    for image in images:
        cosign("sign", "--yes", *key, *log, *_connection(image, cosign.environ), _by_digest(image))


def verify_signature(image: ImageReference, trust: Trust, cosign: Cosign | None = None) -> str | None:
    """Why an image has no signature that is trusted; None if it has one.

    Raises ConfigError if it is not said whose signature is wanted, CommandError if cosign is missing.
    """
    cosign = cosign or Cosign(os.environ)
    trust.check()
    if trust.key:
        who = ["--key", trust.key]
    else:
        who = ["--certificate-identity", str(trust.identity), "--certificate-oidc-issuer", str(trust.issuer)]
    # With a key and without a log there is nothing to ask the network.
    log = [] if trust.log else ["--private-infrastructure"]
    if not (cosign.program or run.which("cosign")):
        raise CommandError(f"`cosign` is missing, which verifies signatures; install it: {INSTALL_COSIGN}")
    try:
        cosign("verify", *who, *log, *_connection(image, cosign.environ), "--output", "json", _by_digest(image))
    except CommandError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1].removeprefix("Error: ").removeprefix("error during command execution: ")
    return None


def is_signature(tag: str) -> bool:
    """Whether a tag of a repository is cosign's, and no image's."""
    return tag.startswith("sha256-") and tag.endswith(TAG_SUFFIX)


def signature_tag(digest: str) -> str:
    """Return the tag under which cosign keeps the signature of an image."""
    return f"{digest.replace(':', '-')}{TAG_SUFFIX}"


def _by_digest(image: ImageReference) -> str:
    """A tag may move between looking and signing."""
    if not image.digest:
        raise ConfigError(f"{image}: only what has a digest can be signed and verified")
    return f"{image.name}@{image.digest}"


def _connection(image: ImageReference, environ: Mapping[str, str]) -> list[str]:
    return ["--allow-http-registry"] if is_plain(image.host, environ) else []


def _is_file(key: str) -> bool:
    """Whether a password is needed: not for keys in key management services."""
    return "://" not in key or key.startswith("env://")
