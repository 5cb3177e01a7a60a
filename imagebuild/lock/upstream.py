"""Ask upstream about sources: git repositories, registries, the Python package index, repositories of packages."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, get_args

from imagebuild.core.errors import Absent, CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.fields import ARCHS, Arch, Platform
from imagebuild.core.http import Advance, Downloads, Patience
from imagebuild.core.run import RunProgram, end_children, os_errors_as_command_errors, run_program
from imagebuild.core.settings import Mirrors, git_environment, pip_environment
from imagebuild.lock import repositories
from imagebuild.lock.facts import image_facts, tree_facts, unpack
from imagebuild.oci.layout import Manifest, platform_of
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, Repository, connect_registry
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    ImageFacts,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Wheel,
    WheelSet,
)
from imagebuild.render.recipe import pip_platforms

GIT_TIMEOUT_S = 60
PIP_TIMEOUT_S = 300
GIT_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
"""Git and ssh ask for no password: nobody is there to type it."""
PATIENCE = Patience(10)
GIT_REFERENCE = re.compile(r"^([0-9a-f]{40})\trefs/tags/(\S+?)(\^\{\})?$")
OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Failed to establish|ProxyError|SSLError|ReadTimeout|ConnectTimeout|"
    r"Connection (?:refused|reset|aborted)|Temporary failure in name resolution|timed out|HTTP error 5"
)
"""Messages of pip when the index cannot be reached; it then also prints that it found nothing."""


@dataclass
class Upstream:
    """Ask servers about sources: their versions, commits, digests and hashes.

    Methods raise Unreachable if nobody answers, Absent if a server does not have it, CommandError or ConfigError for
    a wrong answer, ResultError for one that cannot be read.
    """

    mirrors: Mirrors = field(default_factory=Mirrors)
    """Mirrors that are asked instead of public addresses."""
    ca: Path | None = None
    netrc: Path | None = None
    """File with passwords for downloads, git and pip."""
    run: RunProgram = run_program
    patience: Patience = PATIENCE
    """How long what fails is tried again."""

    def __post_init__(self) -> None:
        self.web = Downloads(self.mirrors.download, self.ca, self.netrc, patience=self.patience)
        self._registries: list[Registry] = []
        self._unpacking = threading.Lock()

    @property
    def stopped(self) -> bool:
        """Return whether requests were told to end."""
        return self.web.client.stopped.is_set()

    def stop(self) -> None:
        """End all requests that are under way."""
        self.web.client.stopped.set()
        for registry in self._registries:
            registry.stop()
        end_children()

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        """Return a source's pin as it is upstream.

        `known` is what the lock has: the hash of an archive that is read again, the key of a repository, and the
        versions in it that stay.
        """
        match source:
            case Archive():
                return self.archive(source, known, advance)
            case GitRef(url, tag, _):
                return self.commit(url, tag)
            case BaseImage(reference, facts):
                return self.image(reference, facts=facts, known=known if isinstance(known, LockedImage) else None)
            case WheelSet():
                return self.wheels(source)
            case PackageSource():
                before = known if isinstance(known, LockedRepository) else None
                return repositories.locked_repository(source, self.index(source, source.packages), before)

    def archive(self, source: Archive, known: Entry | None, advance: Advance) -> Entry:
        """Return the hash of an archive, with facts if its component asks for them."""
        if source.tree is None:
            return self.web.download(source.url, None, advance)
        with TemporaryDirectory(prefix="imagebuild-") as name, os_errors_as_command_errors():
            folder = Path(name)
            # Where the script runs as nobody, it must find its folder.
            folder.chmod(0o755)
            path = folder / "archive"
            sha256 = self.web.download(source.url, path, advance)
            before = known.sha256 if isinstance(known, LockedArchive) else known
            if before not in (None, UNRESOLVED, sha256):
                raise CommandError(
                    f"{source.url}: has the sha256 {sha256}, but the lock says {before}; if its owner announced the "
                    f"change, `imagebuild lock --update {source.url}` takes it"
                )
            # One at a time: what is unpacked is several times as large.
            with self._unpacking:
                top = unpack(path, folder / "tree")
                facts = tree_facts(self.run, top, source.tree)
            return LockedArchive(sha256=sha256, size=path.stat().st_size, facts=facts)

    def index(self, source: PackageSource, packages: tuple[str, ...]) -> repositories.PackageIndex:
        """Return the versions of packages in a signed repository."""
        return repositories.read_index(self.run, self.web, source, packages)

    def commit(self, address: str, tag: str) -> str:
        """Return the commit of a tag."""
        commits = self.tags(address, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
        if tag not in commits:
            raise Absent(f"{self.mirrors.download(address)}: has no tag {tag}")
        return commits[tag]

    def tags(self, address: str, *patterns: str) -> dict[str, str]:
        """Return the tags of a git repository with their commits: all of them, or those of `patterns`."""
        address, patterns = self.mirrors.download(address), patterns or ("refs/tags/*",)
        command = ("git", "ls-remote", "--", address, *patterns)
        try:
            with git_environment(self.ca, self.netrc) as environ:
                text = self.run(*command, env={**GIT_ENVIRONMENT, **environ}, timeout=GIT_TIMEOUT_S)
        except CommandError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            problems = [line for line in lines if "fatal:" in line or "error:" in line]
            raise Unreachable(f"{address}: {(problems or lines)[0].rpartition('fatal: ')[2]}") from None
        commits: dict[str, str] = {}
        for line in text.splitlines():
            match = GIT_REFERENCE.match(line)
            if not match:
                raise ResultError(f"{address}: expected tags from git, found {line!r}; is it git that answers?")
            commit, tag, peeled = match.groups()
            if peeled or tag not in commits:  # the commit of an annotated tag comes as tag^{}
                commits[tag] = commit
        return commits

    def image(self, reference: str, *, facts: bool = False, known: LockedImage | None = None) -> LockedImage:
        """Return the digests and facts of the image that a tag names, or of the known digest.

        Without `facts`, an image whose configuration sets nothing but PATH has none.
        """
        reference = self.mirrors.image(reference)
        manifest = self._manifest(reference, known.digest if known else "")
        if manifest is None:
            raise Absent(f"{reference}: the registry does not have {known.digest if known else 'it'}")
        if known and "config" in manifest.document:
            raise CommandError(f"{reference}: the pinned {known.digest} is for one platform; `lock --update` takes all")
        try:
            # Attestations have the platform unknown/unknown.
            named = {
                platform_of(entry["platform"]): entry["digest"] for entry in manifest.document.get("manifests", ())
            }
            platforms = {p: named[p] for p in get_args(Platform) if p in named}
            of_platforms: dict[Platform, ImageFacts] = {}
            single = (manifest.digest,) if "config" in manifest.document else ()
            for digest in platforms.values() or single:
                config = self._config(reference, digest)
                found = image_facts(config)
                # The image of a distribution sets nothing but PATH: it needs no facts.
                if facts or found.held or found.environment.keys() - {"PATH"}:
                    of_platforms[cast(Platform, platform_of(config))] = found
            return LockedImage(digest=manifest.digest, platforms=platforms, facts=of_platforms or None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultError(f"{reference}: expected a manifest, found {error!r}; is it a registry?") from None

    def _config(self, reference: str, digest: str) -> dict[str, Any]:
        """Return the configuration of an image for one platform."""
        where, manifest = parse_reference(reference), self._manifest(reference, digest)
        if manifest is None:
            raise Absent(f"{reference}: the registry does not have the {digest} that it names")
        try:
            content = self._repository(where).blob(manifest.document["config"]["digest"])
        except CommandError as error:
            raise Unreachable(f"{reference}: {error}") from None
        return dict(json.loads(content))

    def has_image(self, reference: str, digest: str) -> bool:
        """Return whether the registry still has a pinned digest."""
        return self._manifest(self.mirrors.image(reference), digest) is not None

    def _manifest(self, text: str, digest: str) -> Manifest | None:
        """Return the manifest of a digest, or if that is empty, of the tag."""
        reference = parse_reference(text)
        reference = reference.at(digest) if digest else reference
        try:
            return self._repository(reference).find(reference.wanted)
        except CommandError as error:  # also when it wants a login: elsewhere, or later, there may be one
            raise Unreachable(f"{reference}: {error}") from None

    def _repository(self, reference: ImageReference) -> Repository:
        self._registries.append(connect_registry(reference.host, patience=self.patience))
        return self._registries[-1].at(reference.repository)

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        """Return the newest wheels that fit, each in one version for all architectures."""
        answers = {arch: self._fitting_wheels(wanted.requirements, arch) for arch in ARCHS}
        first, *others = ARCHS
        wheels = []
        for name, (version, _) in sorted(answers[first].items()):
            for arch in others:
                other = answers[arch].get(name)
                if other is None or other[0] != version:
                    instead = other[0] if other else "missing"
                    raise ConfigError(
                        f"{wanted.component} {wanted.version}: {name} is {version} for {first} "
                        f"but {instead} for {arch}; pin a version that all have"
                    )
            digests = {arch: answers[arch][name][1] for arch in ARCHS}
            wheels.append(Wheel(name=name, version=version, sha256=digests))
        return tuple(wheels)

    def _fitting_wheels(self, requirements: tuple[str, ...], arch: Arch) -> dict[str, tuple[str, str]]:
        """Return name → version and sha256 of the newest wheels that fit requirements, for an architecture."""
        text = self._pip(
            arch, "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--target", "unused",
            "--report", "-", *requirements,
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
            raise ResultError(f"pip's report cannot be read: {error!r}; is it older than 23.0?") from None

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        """Return every version of a wheel that is there for all architectures, pre-releases too."""
        versions = []
        for arch in ARCHS:
            text = self._pip(arch, "index", "versions", "--pre", name, failing=f"pip finds no {name}")
            match = re.search(r"^Available versions: (.+)$", text, re.MULTILINE)
            if not match:
                raise ResultError(
                    f"expected pip's list of versions of {name}, found {text[:200]!r}; is it older than 23.0?"
                )
            versions.append(match[1].split(", "))
        return tuple(version for version in versions[0] if all(version in others for others in versions[1:]))

    def _pip(self, arch: Arch, *words: str, failing: str) -> str:
        """Ask pip about wheels for an architecture: in the user's mirror, or the index that pip is configured for."""
        index = ("--index-url", self.mirrors.python_index) if self.mirrors.python_index else ()
        options = ("--retries", "2", "--disable-pip-version-check", *index, *pip_platforms(arch))
        environ = pip_environment(self.ca, self.netrc)
        try:
            return self.run(sys.executable, "-m", "pip", *words, *options, env=environ, timeout=PIP_TIMEOUT_S)
        except CommandError as error:
            output = str(error).partition(": ")[2]
            if OFFLINE.search(output):
                raise Unreachable(f"{failing}: its index does not answer") from None
            if known := re.search(r"from versions: ([^)]*)\)", output):
                raise CommandError(f"{failing}; pin one of {known[1]}") from None
            lines = [line for line in output.splitlines() if not line.startswith("WARNING: Location")]
            raise CommandError("\n".join([f"{failing}:", *lines[-4:]])) from None


def _wheel_sha256(archive: dict[str, Any]) -> str:
    """Return the sha256 of a wheel in pip's report. Raises KeyError if it has none.

    Before 23.1, pip wrote one `hash` (`sha256=…`) instead of `hashes`.
    """
    if "hashes" in archive:
        return str(archive["hashes"]["sha256"])
    return str(dict([archive["hash"].split("=", 1)])["sha256"])
