"""Ask upstream about sources: tags of git repositories, digests of images, wheels of the Python package index."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, get_args

from imagebuild.core.errors import Absent, CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.fields import Arch, Platform
from imagebuild.core.http import Advance, Downloads
from imagebuild.core.run import RunProgram, end_children, run_for_bytes, run_program
from imagebuild.lock import repositories
from imagebuild.project.lockfile import (
    Archive,
    BaseImage,
    Entry,
    GitRef,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Wheel,
    WheelSet,
)
from imagebuild.render.recipe import ARCHS, CPUS

GIT_TIMEOUT_S = 60
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
"""Git and ssh ask for no password: nobody is there to type it."""
REFERENCE = re.compile(r"^([0-9a-f]{40})\trefs/tags/(\S+?)(\^\{\})?$")


def commit_of(run: RunProgram, address: str, tag: str) -> str:
    """Return the commit of a tag. Raises Absent if the repository has no such tag, and as `git_tags` does."""
    commits = git_tags(run, address, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
    if tag not in commits:
        raise Absent(f"{address}: has no tag {tag}")
    return commits[tag]


def git_tags(run: RunProgram, address: str, *patterns: str) -> dict[str, str]:
    """Return the tags of a repository with their commits: all of them, or those of `patterns`.

    Raises Unreachable if the repository cannot be read, ResultError for a list that cannot be.
    """
    patterns = patterns or ("refs/tags/*",)
    try:
        text = run("git", "ls-remote", "--", address, *patterns, env=ENVIRONMENT, timeout=GIT_TIMEOUT_S)
    except CommandError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        problems = [line for line in lines if "fatal:" in line or "error:" in line]
        raise Unreachable(f"{address}: {(problems or lines)[0].rpartition('fatal: ')[2]}") from None
    commits: dict[str, str] = {}
    for line in text.splitlines():
        match = REFERENCE.match(line)
        if not match:
            raise ResultError(f"{address}: git ls-remote printed a line that is not a tag: {line!r}")
        commit, tag, peeled = match.groups()
        if peeled or tag not in commits:  # the commit of an annotated tag comes as tag^{}
            commits[tag] = commit
    return commits


IMAGE_TIMEOUT_S = 60
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")

Read = Callable[..., bytes]
"""Run a program and return the bytes that it printed. Raises CommandError if it fails."""


def resolve_image(read: Read, reference: str) -> LockedImage:
    """Return the digests that a tag names.

    Raises Absent if the registry does not have it, Unreachable if the registry does not answer, ResultError if the
    answer is not a manifest.
    """
    content = _manifest(read, reference)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    try:
        data: dict[str, Any] = json.loads(content)
        if data.get("mediaType") not in INDEXES and "manifests" not in data:
            return LockedImage(digest=digest)
        # Attestations have the platform unknown/unknown.
        digests = {
            f"{entry['platform']['os']}/{entry['platform']['architecture']}": entry["digest"]
            for entry in data["manifests"]
        }
        platforms: tuple[Platform, ...] = get_args(Platform)
        return LockedImage(digest=digest, platforms={p: digests[p] for p in platforms if p in digests})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{reference}: the registry's answer is not a manifest: {error!r}") from None


def image_exists(read: Read, reference: str, digest: str) -> bool:
    """Return whether the registry still has a pinned digest. Raises Unreachable."""
    repository = reference if ":" not in reference.rpartition("/")[2] else reference.rpartition(":")[0]
    try:
        _manifest(read, f"{repository}@{digest}")
    except Absent:
        return False
    return True


def _manifest(read: Read, reference: str) -> bytes:
    try:
        return read("docker", "buildx", "imagetools", "inspect", "--raw", reference, timeout=IMAGE_TIMEOUT_S)
    except CommandError as error:
        problem = str(error).splitlines()[-1].rpartition("ERROR: ")[2]
        problem = re.sub(r'^failed to do request: \w+ "[^"]*": ', "", problem)
        if problem.endswith("not found"):
            raise Absent(f"{reference}: the registry does not have it") from None
        raise Unreachable(f"{reference}: {problem}") from None


GLIBC = ("manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(12, 36)))
"""Platform tags of wheels that run with the images' glibc; `fetch-wheels` accepts the same."""
PIP_TIMEOUT_S = 300
OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish|ProxyError|SSLError|ReadTimeout|ConnectTimeout|"
    r"Connection (?:refused|reset|aborted)|Temporary failure in name resolution|timed out|HTTP error 5"
)
"""Messages of pip when the index cannot be reached; it then also prints that it found nothing."""

Ask = Callable[[tuple[str, ...], Arch], dict[str, tuple[str, str]]]
"""Return name → version and sha256 of the wheels that fit requirements, for an architecture."""


def resolve_wheels(ask: Ask, wanted: WheelSet) -> tuple[Wheel, ...]:
    """Return the newest wheels that fit, each in one version for all architectures.

    Raises ConfigError if an architecture lacks a wheel, and as `ask` does.
    """
    answers = {arch: ask(wanted.requirements, arch) for arch in ARCHS}
    first, *others = ARCHS
    wheels = []
    for name, (version, _) in sorted(answers[first].items()):
        for arch in others:
            other = answers[arch].get(name)
            if other is None or other[0] != version:
                instead = other[0] if other else "missing"
                raise ConfigError(
                    f"{wanted.component} {wanted.version}: {name} is {version} for {first} but {instead} for {arch}"
                )
        digests = {arch: answers[arch][name][1] for arch in ARCHS}
        wheels.append(Wheel(name=name, version=version, sha256=digests))
    return tuple(wheels)


def ask_pip(run: RunProgram, index: str | None = None) -> Ask:
    """Return a function that asks pip, of the Python package index `index` or the one that pip is configured for.

    The function raises Unreachable if the index does not answer, CommandError if it has no such wheel, and
    ResultError if pip's report cannot be read.
    """

    def ask(requirements: tuple[str, ...], arch: Arch) -> dict[str, tuple[str, str]]:
        tags = [option for glibc in GLIBC for option in ("--platform", f"{glibc}_{CPUS[arch]}")]
        text = _pip(
            run, "install", *_index(index), "--dry-run", "--quiet", "--ignore-installed", "--no-deps",
            "--only-binary", ":all:", "--target", "unused", "--report", "-", *tags, *requirements,
            failing=f"pip finds no {' '.join(requirements)} for {arch}",
        )  # fmt: skip
        try:
            report: dict[str, Any] = json.loads(text)
            return {
                item["metadata"]["name"]: (
                    item["metadata"]["version"],
                    _wheel_sha256(item["download_info"]["archive_info"]),
                )
                for item in report["install"]
            }
        except (ValueError, KeyError) as error:
            raise ResultError(f"pip's report cannot be read: {error!r}") from None

    return ask


def _wheel_sha256(archive: dict[str, Any]) -> str:
    """Return the sha256 of a wheel in pip's report. Raises KeyError if it has none.

    Before 23.1, pip wrote one `hash` (`sha256=…`) instead of `hashes`.
    """
    if "hashes" in archive:
        return str(archive["hashes"]["sha256"])
    return str(dict([archive["hash"].split("=", 1)])["sha256"])


def wheel_versions(run: RunProgram, name: str, index: str | None = None) -> tuple[str, ...]:
    """Return every version of a wheel that is there for all architectures, pre-releases too.

    Raises Unreachable or CommandError, as `ask_pip`, and ResultError if pip's answer cannot be read.
    """
    versions = []
    for arch in ARCHS:
        tags = [option for glibc in GLIBC for option in ("--platform", f"{glibc}_{CPUS[arch]}")]
        text = _pip(
            run, "index", "versions", *_index(index), "--pre", "--only-binary", ":all:", *tags, name,
            failing=f"pip finds no {name}",
        )  # fmt: skip
        match = re.search(r"^Available versions: (.+)$", text, re.MULTILINE)
        if not match:
            raise ResultError(f"pip's list of versions of {name} cannot be read: {text[:200]!r}")
        versions.append(match[1].split(", "))
    return tuple(version for version in versions[0] if all(version in others for others in versions[1:]))


def _index(index: str | None) -> tuple[str, ...]:
    return ("--index-url", index) if index else ()


def _pip(run: RunProgram, *words: str, failing: str) -> str:
    command, *rest = words
    try:
        return run(
            sys.executable, "-m", "pip", command, "--retries", "2", "--disable-pip-version-check", *rest,
            timeout=PIP_TIMEOUT_S,
        )  # fmt: skip
    except CommandError as error:
        output = str(error).partition(": ")[2]
        if OFFLINE.search(output):
            raise Unreachable(f"{failing}: its index does not answer") from None
        lines = [line for line in output.splitlines() if not line.startswith("WARNING: Location")]
        raise CommandError("\n".join([f"{failing}:", *lines[-4:]])) from None


@dataclass(frozen=True)
class Addresses:
    """Where to ask for what has a public address; by default, there."""

    image: Callable[[str], str] = str
    """Image reference → the reference to ask for."""
    download: Callable[[str], str] = str
    """Address of an archive, a key, a repository of packages or of git → the address to ask."""
    python_index: str | None = None
    """Python package index, instead of the one that pip is configured for."""


class Upstream(Protocol):
    """Say what sources are upstream; tests have tables instead of the network."""

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        """Return the source's pin as it is upstream. Raises Unreachable, or another ImagebuildError for a wrong answer.

        `known` is what the lock has: the key of a repository, and the versions in it that stay.
        """

    def has_image(self, reference: str, digest: str) -> bool:
        """Return whether the registry still has this digest. Raises Unreachable."""

    def index(self, source: PackageSource, names: tuple[str, ...]) -> repositories.PackageIndex:
        """Return the versions of packages in a repository. Raises as `resolve`."""

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        """Return the newest wheels that fit. Raises as `resolve`."""

    def tags(self, address: str) -> dict[str, str]:
        """Return the tags of a git repository with their commits. Raises Unreachable."""

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        """Return the versions of a wheel on the package index. Raises as `resolve`."""

    def stop(self) -> None:
        """End all requests that are under way."""


@dataclass(frozen=True)
class NetworkUpstream:
    """Ask servers on the network."""

    addresses: Addresses = Addresses()
    ca: Path | None = None
    netrc: Path | None = None
    """File with passwords for downloads."""
    run: RunProgram = run_program
    read: Read = run_for_bytes
    web: Downloads = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "web", Downloads(self.addresses.download, self.ca, self.netrc))

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        match source:
            case Archive(_, url):
                return self.web.sha256(url, advance)
            case GitRef(url, tag, _):
                return commit_of(self.run, self.addresses.download(url), tag)
            case BaseImage(reference):
                return resolve_image(self.read, self.addresses.image(reference))
            case WheelSet():
                return self.wheels(source)
            case PackageSource():
                before = known if isinstance(known, LockedRepository) else None
                return repositories.resolve_repository(self.run, self.web, source, before)

    def has_image(self, reference: str, digest: str) -> bool:
        return image_exists(self.read, self.addresses.image(reference), digest)

    def index(self, source: PackageSource, names: tuple[str, ...]) -> repositories.PackageIndex:
        return repositories.read(self.run, self.web, source, names)

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        return resolve_wheels(ask_pip(self.run, self.addresses.python_index), wanted)

    def tags(self, address: str) -> dict[str, str]:
        return git_tags(self.run, self.addresses.download(address))

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        return wheel_versions(self.run, name, self.addresses.python_index)

    def stop(self) -> None:
        self.web.stopped.set()
        end_children()
