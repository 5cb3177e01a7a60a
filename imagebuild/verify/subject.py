"""Find the image that is meant by a tag, a digest, a target's id, a layout or an archive."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from docker import DockerClient

from imagebuild.core.errors import CommandError, ConfigError, ResultError, nearest
from imagebuild.core.files import read_text
from imagebuild.core.yaml import read_written
from imagebuild.oci import engine, image
from imagebuild.oci.image import FoundImage, PlatformImage
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry, connect_registry
from imagebuild.project.matrix import Plan, Target, axes_of, components_of
from imagebuild.project.plan import select_one
from imagebuild.project.records import BuildResult


@dataclass(frozen=True)
class Subject:
    """Describe an image to verify, as far as it is known."""

    name: str
    """Name that was asked for, or the tag of a target."""
    digest: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None
    found: FoundImage | None = None
    """The image, for those who read its files; None if it was not found."""
    reference: str | None = None
    """Name in the engine's store; None for an image that is not there."""

    @property
    def components(self) -> dict[str, str]:
        """Return component → version by the labels, or by the target of an image that was not found."""
        return components_of(self.labels) or (dict(self.target.components) if self.target and not self.found else {})

    @property
    def axes(self) -> dict[str, str]:
        """Return axis → value, from where the components come."""
        return axes_of(self.labels) or (dict(self.target.axes) if self.target and not self.found else {})


@contextmanager
def room_explained(name: str) -> Iterator[None]:
    """Turn the error of a full disk into ResultError."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}; TMPDIR may name a folder with more room"
        raise ResultError(f"{name}: cannot be unpacked to be read: {why}") from None


def path_of_image(name: str) -> Path | None:
    """Return the path of a layout or an archive if the name is `oci:PATH`, or a path that can be no image's name."""
    if name.startswith("oci:"):
        return Path(name.removeprefix("oci:"))
    path = Path(name)
    is_path = name.startswith(("/", "./", "../")) or (path / "oci-layout").is_file() or path.is_file()
    return path if is_path else None


def target_with_id(plan: Plan, name: str) -> Target | None:
    """Return the target of this id, or the only one of an image or a glob. Raises as `select_one` does."""
    is_of_plan = any(name in (target.id, target.image) for target in plan.targets) or re.search("[*?]", name)
    return select_one(plan, name) if is_of_plan else None


def refuse_misspelled(plan: Plan, name: str) -> None:
    """Raise NothingSelected, which proposes the right name, for a name without registry and tag like a target's."""
    known = {known for target in plan.targets for known in (target.id, target.image)}
    if not re.search("[/:@]", name) and nearest(name, known):
        select_one(plan, name)


def in_files(name: str, path: Path, folder: Path) -> FoundImage:
    """Return the image of a layout or an archive, which is unpacked into `folder`. Raises as `images_in` does."""
    return FoundImage.of(name, str(path), image.images_in(path, folder))


def subject_in_engine(client: DockerClient, plan: Plan, name: str, folder: Path) -> Subject:
    """Describe an image in the engine's store, which is saved into `folder` when it is read.

    Raises ConfigError if it is not there or has other versions than the plan.
    """
    target = target_with_id(plan, name)
    tag = target.name if target else name
    try:
        info = engine.inspect_image(client, tag)
    except ConfigError:
        refuse_misspelled(plan, tag)
        raise
    digest = tag.partition("@")[2] or info.digest

    def read(platform: str) -> PlatformImage:
        if not (saved := image.image_in_engine(tag, info.reference, folder)):
            raise CommandError(f"{tag}: the engine does not have it any more")
        return saved.image(platform)

    found = FoundImage(tag, "the engine's store", (info.platform,), read, digest)
    subject = Subject(tag, digest, info.labels, target, found, info.reference)
    if target and subject.components != target.components:
        raise ConfigError(f"{name}: the image in the engine's store has other versions than the plan; build it again")
    return subject


def subject_elsewhere(
    finder: ImageFinder, name: str | None, folder: Path, platform: Callable[[], str] | None = None
) -> Subject:
    """Describe an image that is not in the engine, with its files below `folder` if they can be found.

    They are looked for in a layout or an archive; for a target, where its build left them; for a digest, in its
    registry. A tag is not looked up: it may have moved since the place was started that a prefix leads to, of which
    `platform` returns the platform. Without it, the image is for all of its own. Raises ConfigError, CommandError or
    ResultError if the files should be there and cannot be read.
    """
    if not name:
        return Subject("(unnamed)")
    path, found = path_of_image(name), None
    target = None if path else target_with_id(finder.plan, name)
    with room_explained(name):
        if path:
            found = in_files(str(path), path, folder)
        elif target:
            found = next(finder.results_of_build(target, folder), None)
        elif "@" in name:
            found = finder.find_in_registry(name, folder)
    if not found:
        return Subject(name, target=target)
    read = found.image(platform() if platform and len(found.platforms) > 1 else found.platforms[0])
    if platform:
        found = replace(found, platforms=(read.platform,))
    return Subject(found.name, read.digest, read.labels, target, found)


NO_PLAN = Plan(targets=(), excluded=())
ENGINE, REGISTRY = "engine:", "registry:"
"""Prefixes of names that are looked for in one place; without one, the engine comes before the registry."""


@dataclass(frozen=True)
class ImageFinder:
    """Find images in files, in the engine's store, in the folder of builds and in registries."""

    plan: Plan = NO_PLAN
    folder: Path = Path("build")
    """Folder in which builds leave layouts and results of targets."""
    offline: bool = False
    """Ask no registry."""
    connect: Callable[[str], Registry] = field(default=connect_registry)

    @contextmanager
    def find(self, name: str) -> Iterator[FoundImage]:
        """Find the image that is meant; what is unpacked goes with the context.

        Raises ConfigError if there is no such image, or the target is not built, CommandError if the engine or a
        registry fails, ResultError if the image cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder, room_explained(name):
            yield self._find(name, Path(folder))

    def _find(self, name: str, folder: Path) -> FoundImage:
        if not name:
            raise ConfigError("IMAGE: is empty; name a tag, a digest, a target's id or an OCI layout")
        if path := path_of_image(name):
            return in_files(name, path, folder)
        if target := target_with_id(self.plan, name):
            in_engine = image.image_in_engine(target.id, target.name, folder)
            for found in chain([in_engine] if in_engine else (), self.results_of_build(target, folder)):
                if all(components_of(found.image(p).labels) == target.components for p in found.platforms):
                    return found
            raise ConfigError(f"{name}: is not built, or has other versions than the plan; build it first")
        bare = name.removeprefix(ENGINE).removeprefix(REGISTRY)
        if not name.startswith(REGISTRY) and (found_there := image.image_in_engine(name, bare, folder)):
            return found_there
        if name.startswith(ENGINE):
            raise ConfigError(f"{name}: the engine's store has no such image; build it or pull it")
        refuse_misspelled(self.plan, name)
        if self.offline:
            raise ConfigError(f"{name}: is not in the engine's store, and --offline asks no registry; give a layout")
        return self.find_in_registry(bare, folder, name)

    def find_in_registry(self, reference: str, folder: Path, name: str = "") -> FoundImage:
        """Return an image of a registry; `name` is what it is called in messages. Raises as `find` does."""
        parsed = parse_reference(reference)
        return image.image_in_registry(name or reference, parsed, self.connect(parsed.host), folder)

    def results_of_build(self, target: Target, folder: Path) -> Iterator[FoundImage]:
        """Yield the images that the last build of a target left: its layout, and where it was pushed to.

        Raises as `find` does.
        """
        layout = self.folder / target.id / "layout"
        if layout.is_dir():
            yield in_files(target.id, layout, folder)
        path = self.folder / target.id / "result.json"
        if not path.exists():
            return
        result = read_written(BuildResult, read_text(path), str(path))
        if result.repository is not None and result.digest is not None and not self.offline:
            yield self.find_in_registry(f"{result.repository}@{result.digest}", folder, target.id)
