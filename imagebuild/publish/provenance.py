"""SLSA provenance: a statement of how an image was made. This module makes no network requests and reads no files."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from packageurl import PackageURL
from packaging.utils import canonicalize_name
from pydantic import AliasPath, BaseModel, ConfigDict, Field

from imagebuild import __version__
from imagebuild.core.errors import ResultError
from imagebuild.core.fields import Arch, Platform, full_reference
from imagebuild.project import lockfile
from imagebuild.project.records import BuildResult
from imagebuild.render.recipe import Recipe

INSTEAD_OF = "instead-of"
"""Annotation of a dependency that the build used instead of a dependency in the lock. The value is the URI of the
dependency in the lock."""
FOLDER_URI = "urn:imagebuild:folder:"
"""Prefix of the URI of a dependency that was a local folder on the build machine. The content of such a folder is
unknown."""
BUILD_TYPE = "urn:imagebuild:build-type:v1"
"""The build type that imagebuild writes into provenance. docs/supply-chain.md describes the parameters of the build
type."""
BUILDER = "urn:imagebuild:builder:"
LEVEL = "none claimed: the builder writes the provenance itself, and everybody who starts a build can change the output"
PROJECT = "project"


class Resource(BaseModel):
    """A resource descriptor of in-toto: a source with its address, its digest or both."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str = ""
    uri: str = ""
    digest: dict[str, str] = {}
    """Maps the algorithm, `sha256` or `gitCommit`, to the digest. Empty for a local folder. Also empty for a package
    repository, because a signing key protects the content of the repository."""
    annotations: dict[str, str] = {}


def _resources(
    lock: lockfile.Lock, owner: str, source: lockfile.Source, platform: Platform, replaced: Mapping[str, str]
) -> Iterator[Resource]:
    """Yield the resource descriptors for one source of an image. Wheels for other platforms are left out.

    `owner` is the name of the component, base or image that uses the source. `replaced` maps each source that the build
    replaced to the digest of the replacement, or to `folder` for a local folder."""
    match source:
        case lockfile.BaseImage(reference):
            digest = lock.images[reference].digest
            instead = replaced.get(lockfile.digest_of(lock, reference))
            uri = f"docker://{full_reference(reference)}@{digest}"
            if instead in (None, digest):
                yield Resource(name=reference, uri=uri, digest=_digest_set(digest))
            elif instead.startswith("sha256:"):
                made, notes = f"{owner}-bootstrapped", {INSTEAD_OF: uri}
                yield Resource(name=made, uri=f"urn:imagebuild:{made}", digest=_digest_set(instead), annotations=notes)
            else:
                yield Resource(name=instead, uri=FOLDER_URI + owner, annotations={INSTEAD_OF: uri})
        case lockfile.Archive(url=url):
            yield Resource(name=url.rpartition("/")[2], uri=url, digest={"sha256": lockfile.hash_of(lock, url)})
        case lockfile.GitRef(url, tag, _):
            commit = lockfile.commit_of(lock, source)
            uri, notes = f"git+{url}@{commit}", {"tag": tag}
            if (folder := f"{owner}-source") in replaced:
                yield Resource(name=folder, uri=FOLDER_URI + owner, annotations={INSTEAD_OF: uri, **notes})
            else:
                name = url.removesuffix(".git").rpartition("/")[2]
                yield Resource(name=name, uri=uri, digest={"gitCommit": commit}, annotations=notes)
        case lockfile.WheelSet():
            arch: Arch = "arm64" if platform == "linux/arm64" else "amd64"
            for wheel in lockfile.wheels_of(lock, source):
                if sha256 := wheel.sha256.get(arch, ""):
                    uri = PackageURL("pypi", None, canonicalize_name(wheel.name), wheel.version).to_string()
                    yield Resource(name=wheel.name, uri=uri, digest={"sha256": sha256})
        case lockfile.PackageSource(url, suite, key, _):
            repository = lock.repositories[url]
            notes = {"suite": suite, "key": key, "fingerprint": repository.fingerprint}
            notes |= {f"package:{name}": version for name, version in sorted(repository.packages.items())}
            yield Resource(name=url, uri=url, annotations=notes)


class Provenance(BaseModel):
    """The part of an SLSA provenance that imagebuild reads. The provenance may come from another builder."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    platform: str | None = Field(None, validation_alias=AliasPath("buildDefinition", "externalParameters", "platform"))
    dependencies: tuple[Resource, ...] = Field(validation_alias=AliasPath("buildDefinition", "resolvedDependencies"))

    @property
    def replaced(self) -> tuple[str, ...]:
        """The URIs of the dependencies in the lock that the build replaced with something else."""
        return tuple(item.annotations[INSTEAD_OF] for item in self.dependencies if INSTEAD_OF in item.annotations)

    @property
    def folders(self) -> tuple[str, ...]:
        """The names of the dependencies that were local folders on the build machine."""
        return tuple(item.name for item in self.dependencies if item.uri.startswith(FOLDER_URI))

    @property
    def sources(self) -> str:
        """The number of sources and the commit of the project, as text such as `10 sources, commit ae6ea052619d`."""
        project = next((item for item in self.dependencies if item.name == PROJECT), Resource())
        commit = project.digest.get("gitCommit", "")[:12]
        return f"{len(self.dependencies)} sources, {f'commit {commit}' if commit else 'an unknown commit'}"


def provenance_of(
    result: BuildResult, platform: Platform, recipe: Recipe, lock: lockfile.Lock, dockerfile: str, *,
    origin: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Return the SLSA provenance of the image of one platform, as a JSON document.

    `dockerfile` is the sha256 of the Dockerfile that this checkout renders for the target. `origin` contains the values
    that the signing environment knows itself: `builder`, `source`, `revision`, `run` and `workflow`. The result only
    states times, replaced sources and the name of the builder, because anybody could have written it. Raises
    ResultError if the image was built from another Dockerfile, because the provenance would then name the wrong
    sources. Raises ConfigError if the lock contains no pin (hash, digest or commit) for a source."""
    if result.dockerfile != dockerfile:
        raise ResultError(
            f"{result.target}: was built from another Dockerfile than this checkout renders; check out the commit of "
            f"the build ({result.revision or 'unknown'}), and use the same options as the build"
        )
    builder, revision = origin.get("builder") or "unknown", origin.get("revision")
    if not builder.startswith("https://"):
        builder = BUILDER + quote(builder, safe="")
    metadata = {}
    if result.started:
        start = datetime.fromisoformat(result.started)
        times = (start, start + timedelta(seconds=round(result.seconds)))
        started, finished = (time.isoformat(timespec="seconds").replace("+00:00", "Z") for time in times)
        metadata = {"invocationId": origin.get("run") or f"{result.target}/{started}"}
        metadata |= {"startedOn": started, "finishedOn": finished}
    resources = [Resource(name="Dockerfile", digest={"sha256": result.dockerfile})]
    if revision:
        uri = f"git+{origin['source']}@{revision}" if origin.get("source") else ""
        resources.insert(0, Resource(name=PROJECT, uri=uri, digest={"gitCommit": revision}))
    needed = recipe.sources_for([platform])
    lockfile.check_pinned(lock, (owned.source for owned in needed))
    sources = (r for s in needed for r in _resources(lock, s.owner, s.source, platform, result.replaced))
    resources += {resource.uri: resource for resource in sources}.values()
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "target": recipe.target.id, "platform": platform,
                "axes": recipe.target.axes, "components": recipe.target.components,
                **({"workflow": origin["workflow"]} if origin.get("workflow") else {}),
                **({"compression": result.compression} if result.compression else {}),
                **({"rebuilt": str(result.rebuilt)} if result.rebuilt else {}),
            },
            "internalParameters": {"imagebuild": __version__, "slsaLevel": LEVEL, "statedBuilder": result.builder},
            "resolvedDependencies": [resource.model_dump(exclude_defaults=True) for resource in resources],
        },
        "runDetails": {"builder": {"id": builder}, "metadata": metadata},
    }  # fmt: skip


def _digest_set(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}
