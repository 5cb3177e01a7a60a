"""A bundle: a folder with all that builds of some targets fetch, for machines without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from imagebuild import config, images
from imagebuild.errors import ConfigError, ResultError
from imagebuild.fields import Commit, Model, Platform
from imagebuild.files import write_text
from imagebuild.gitstore import GitStore
from imagebuild.inputs import ArchiveFile, GitCommit, Needs
from imagebuild.lockfile import Digest
from imagebuild.shelf import Shelf, StoredFile

MANIFEST = "manifest.json"


class Manifest(Model):
    """The file `manifest.json` of a bundle."""

    format: Literal[1] = 1
    created: str
    """When it was complete, in UTC. Packages and security updates are those of that time."""
    targets: tuple[str, ...]
    stages: dict[str, tuple[Platform, ...]]
    """Key of a build stage → platforms for which it was built when the bundle was made."""
    files: dict[str, StoredFile]
    """Address → file: archives, keys, packages, wheels."""
    wheels: dict[str, str] = Field(default_factory=dict)
    """File name of a wheel → address."""
    images: dict[str, Digest] = Field(default_factory=dict)
    """Image as FROM names it → what stands in for it: itself, or a bootstrapped base."""
    git: dict[Commit, str] = Field(default_factory=dict)
    """Commit → address of its repository."""


@dataclass(frozen=True)
class Bundle:
    """A bundle that is complete."""

    folder: Path
    manifest: Manifest

    GIT: ClassVar[str] = "git"
    IMAGES: ClassVar[str] = "images"

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Raises ConfigError if the folder holds no complete bundle."""
        path = folder.absolute() / MANIFEST
        if not path.is_file():
            raise ConfigError(
                f"{folder}: no bundle is here ({MANIFEST} is missing); `imagebuild bundle create` makes one"
            )
        mistakes = config.Mistakes()
        document = config.load(path, Manifest, mistakes)
        mistakes.stop_if_any()
        assert document is not None
        return cls(folder.absolute(), document.model)

    @cached_property
    def shelf(self) -> Shelf:
        return Shelf(self.folder, dict(self.manifest.files))

    @cached_property
    def git(self) -> GitStore:
        return GitStore(self.folder / self.GIT)

    @property
    def layout(self) -> Path:
        return self.folder / self.IMAGES

    def contexts(self, wanted: Iterable[str]) -> dict[str, str]:
        """Image → context. Raises ConfigError for an image that the bundle lacks."""
        absent = sorted(set(wanted) - set(self.manifest.images))
        if absent:
            raise ConfigError(f"{self.folder}: the bundle has no {', '.join(absent)}")
        return {image: f"oci-layout://{self.layout}@{self.manifest.images[image]}" for image in wanted}

    def lacks(self, keys: Mapping[str, str], platforms: Iterable[Platform]) -> str:
        """Why a target cannot be built from the bundle; empty if it can. `keys` is stage → key.

        A stage with the same key fetches the same things.
        """
        for stage, key in keys.items():
            if key not in self.manifest.stages:
                return f"the stage {stage} is another than when the bundle was made"
            absent = set(platforms) - set(self.manifest.stages[key])
            if absent:
                return f"it was made without {', '.join(sorted(absent))}"
        return ""

    def damage(self, note: Callable[[str], None]) -> list[str]:
        """What is missing or has changed since the bundle was made."""
        checks: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        checks += [(self.shelf.check, (url,)) for url in self.manifest.files]
        checks += [(images.check, (self.layout, digest)) for digest in sorted(set(self.manifest.images.values()))]
        checks += [(self.git.check, (url, commit)) for commit, url in self.manifest.git.items()]
        note(f"checking {len(checks)} files, images and commits")
        found = []
        for check, arguments in checks:
            try:
                check(*arguments)
            except ResultError as error:
                found.append(str(error))
        return found

    def contradictions(self, need: Needs) -> list[str]:
        """Where the lock wants something else for a target than the bundle has."""
        found = []
        for item in need.stages.values():
            if isinstance(item, GitCommit):
                if item.commit not in self.manifest.git:
                    found.append(f"no commit {item.commit} of {item.url}")
            elif item.url not in self.manifest.files:
                found.append(f"no {item.url}")
            elif isinstance(item, ArchiveFile) and self.manifest.files[item.url].sha256 != item.sha256:
                found.append(f"another {item.url}")
        has = {self.manifest.files[url].sha256 for url in self.manifest.wheels.values()}
        found += [f"no wheel with sha256 {digest}" for digest in sorted(need.wheels - has)]
        found += [f"no image {image}" for image in sorted(need.images - set(self.manifest.images))]
        return found


@dataclass
class Recording:
    """A bundle that is being made."""

    folder: Path
    stages: dict[str, set[Platform]]
    """Key of a build stage → platforms."""
    images: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path, stages: dict[str, set[Platform]]) -> Recording:
        """Raises ConfigError for a folder that has something in it."""
        folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"{folder}: is not empty; remove it, or name another folder")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
        return cls(folder, stages)

    def add_image(self, image: str, where: str, note: Callable[[str], None]) -> str:
        """Pull an image into the bundle; returns its context."""
        note(f"pulling {image}")
        return self._named(image, images.pull(where, self.folder / Bundle.IMAGES))

    def add_base(self, image: str, context: str) -> str:
        """Copy a bootstrapped base into the bundle; returns its context."""
        layout, _, digest = context.removeprefix("oci-layout://").rpartition("@")
        images.copy(Path(layout), digest, self.folder / Bundle.IMAGES)
        return self._named(image, digest)

    def _named(self, image: str, digest: str) -> str:
        self.images[image] = digest
        return f"oci-layout://{self.folder / Bundle.IMAGES}@{digest}"

    def finish(self, files: Mapping[str, StoredFile], wheels: Mapping[str, str], needs: Mapping[str, Needs]) -> None:
        """Write the manifest: from now on it is a bundle."""
        commits = {i.commit: i.url for need in needs.values() for i in need.stages.values() if isinstance(i, GitCommit)}
        manifest = Manifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            targets=tuple(needs),
            stages={key: tuple(sorted(platforms)) for key, platforms in sorted(self.stages.items())},
            files=dict(sorted(files.items())),
            wheels=dict(sorted(wheels.items())),
            images=dict(sorted(self.images.items())),
            git=commits,
        )
        write_text(self.folder / MANIFEST, manifest.model_dump_json(indent=1, by_alias=True) + "\n")
