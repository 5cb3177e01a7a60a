"""Find the image that a tag, a digest, a target's id, a layout or an archive refers to."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from docker import DockerClient

from imagebuild.core.errors import CommandError, ConfigError, ResultError, nearest
from imagebuild.core.fields import full_reference
from imagebuild.core.files import cache_folder, read_text
from imagebuild.core.settings import load_settings
from imagebuild.core.yaml import read_written
from imagebuild.oci import engine, image
from imagebuild.oci.image import FoundImage, PlatformImage
from imagebuild.oci.layout import layouts_in
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry, connect_registry
from imagebuild.project.plan import Plan, Target, axes_of, components_of
from imagebuild.project.records import BuildResult
from imagebuild.project.select import select_one


@dataclass(frozen=True)
class Subject:
    """An image to verify: its name, files, components and axes, as far as they are known."""

    name: str
    """The requested name; for a target, its tag."""
    digest: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None
    found: FoundImage | None = None
    """The image with its files; None if its files were not found."""
    reference: str | None = None
    """The image's name in the engine's store; None if the image is not in the store."""

    @property
    def components(self) -> dict[str, str]:
        """Maps components to versions: from the labels, or from the target if the image was not found."""
        return components_of(self.labels) or (dict(self.target.components) if self.target and not self.found else {})

    @property
    def axes(self) -> dict[str, str]:
        """Maps axes (such as `cuda`) to values: from the labels, or from the target if the image was not found."""
        return axes_of(self.labels) or (dict(self.target.axes) if self.target and not self.found else {})


@contextmanager
def room_explained(name: str) -> Iterator[None]:
    """Turn an OSError, such as that of a full disk, into a ResultError that proposes to set TMPDIR."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}; if the disk is full, set TMPDIR to a folder with more space"
        raise ResultError(f"{name}: the image cannot be unpacked: {why}") from None


def path_of_image(name: str) -> Path | None:
    """Return the path of a layout or an archive if the name is this path or `oci:PATH`; otherwise None.

    A name with a tag or a digest is never a path: files of a project must not take the place of an image in a registry.
    Raises ConfigError if a name without them is a path, but also that of an image in a registry."""
    if name.startswith("oci:"):
        return Path(name.removeprefix("oci:"))
    path = Path(name)
    if name.startswith(("/", "./", "../")):
        return path
    if re.search("[:@]", name) or not ((path / "oci-layout").is_file() or path.is_file()):
        return None
    if "/" in name and full_reference(name) == name:
        raise ConfigError(f"{name}: is a path, and also the name of an image; write ./{name}, or add a tag or a digest")
    return path


def target_with_id(plan: Plan, name: str) -> Target | None:
    """Return the target with this id, or the only target that matches the name of an image, a glob or AXIS=VALUE.
    Return None if the name is none of them. Raises the same errors as `select_one`."""
    is_of_plan = any(name in (target.id, target.image) for target in plan.targets) or re.search("[*?=]", name)
    return select_one(plan, name) if is_of_plan else None


def refuse_misspelled(plan: Plan, name: str) -> None:
    """Raise NothingSelected, with a suggestion, if a name without registry and tag resembles the name of a target."""
    known = {known for target in plan.targets for known in (target.id, target.image)}
    if not re.search("[/:@]", name) and nearest(name, known):
        select_one(plan, name)


def in_files(name: str, path: Path, folder: Path) -> FoundImage:
    """Return the image in a layout or an archive. An archive is unpacked into `folder`.
    Raises the errors of `images_in`."""
    return FoundImage.of(name, str(path), image.images_in(path, folder))


def subject_in_engine(client: DockerClient, plan: Plan, name: str, folder: Path) -> Subject:
    """Return what is known about an image in the engine's store.

    The engine saves the image to `folder` when the files of the image are read. Raises ConfigError if the image is not
    in the store, or if its components have other versions than in the plan."""
    target = target_with_id(plan, name)
    tag = target.name if target else name
    try:
        info = engine.inspect_image(client, tag)
    except ConfigError:
        refuse_misspelled(plan, tag)
        if target:
            remedy = (
                f"build it without -o and --push, or name its layout (DIR/{target.id}) or REPOSITORY@DIGEST with --pull"
            )
            raise ConfigError(f"{tag}: not in the engine's image store; {remedy}") from None
        raise
    digest = tag.partition("@")[2] or info.digest

    def read(platform: str) -> PlatformImage:
        if not (saved := image.image_of_client(client, tag, info.reference, folder)):
            raise CommandError(f"{tag}: the image is no longer in the engine's store; build or pull it again")
        return saved.image(platform)

    found = FoundImage(tag, "the engine's store", (info.platform,), read, digest)
    subject = Subject(tag, digest, info.labels, target, found, info.reference)
    if target and subject.components != target.components:
        raise ConfigError(
            f"{name}: the components of the image in the engine's store have other versions than in the plan; "
            "build the image again"
        )
    return subject


def subject_elsewhere(
    finder: ImageFinder, name: str | None, folder: Path, platform: Callable[[], str] | None = None
) -> Subject:
    """Return what is known about an image that is not in the engine's store, with its files if they can be found.

    The files are searched in a layout or an archive; for a target, in the results of its build; for a digest, in its
    registry. Tags are not resolved: a tag may have moved since the container started. Files that must be fetched are
    written below `folder`. `platform` returns the platform of the place where the image runs, and only this platform is
    kept; None: all platforms of the image. Raises ConfigError, CommandError or ResultError if the files exist but
    cannot be read."""
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
"""Prefixes of names that are searched in only one place. Names without a prefix are searched first in the engine's
store, then in the registry."""


@dataclass(frozen=True)
class ImageFinder:
    """Finds images in files, in the engine's store, in the build folder and in registries."""

    plan: Plan = NO_PLAN
    folder: Path = Path("build")
    """Build folder, which contains the layouts and results of targets."""
    offline: bool = False
    """True: do not search for images in registries."""
    connect: Callable[[str], Registry] = field(default=connect_registry)

    @contextmanager
    def find(self, name: str) -> Iterator[FoundImage]:
        """Find the image with this name. Unpacked files are deleted at the end of the context.

        Raises ConfigError if the image does not exist or the target is not built, CommandError if the engine or a
        registry fails, ResultError if the image cannot be read."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder, room_explained(name):
            yield self._find(name, Path(folder))

    def _find(self, name: str, folder: Path) -> FoundImage:
        if not name:
            raise ConfigError("IMAGE: the name is empty; name a tag, a digest, a target's id or an OCI layout")
        if path := path_of_image(name):
            return in_files(name, path, folder)
        if target := target_with_id(self.plan, name):
            in_engine = image.image_in_engine(target.id, target.name, folder)
            for found in chain([in_engine] if in_engine else (), self.results_of_build(target, folder)):
                if all(components_of(found.image(p).labels) == target.components for p in found.platforms):
                    return found
            raise ConfigError(
                f"{name}: the target is not built, or its components have other versions than in the plan; "
                "build the target first"
            )
        bare = name.removeprefix(ENGINE).removeprefix(REGISTRY)
        if not name.startswith(REGISTRY) and (found_there := image.image_in_engine(name, bare, folder)):
            return found_there
        if name.startswith(ENGINE):
            raise ConfigError(f"{name}: the image is not in the engine's store; build or pull it")
        refuse_misspelled(self.plan, name)
        if self.offline:
            raise ConfigError(
                f"{name}: the image is not in the engine's store, and --offline forbids the registry; "
                "name an OCI layout, or leave --offline out"
            )
        parse_reference(bare)
        if not re.search("[/:@]", name):  # such as a misspelled target
            raise ConfigError(
                f"{name}: neither a target, a file, nor an image in the engine's store; "
                f"write {full_reference(name)} for an image of Docker Hub"
            )
        return self.find_in_registry(bare, folder, name)

    def find_in_registry(self, reference: str, folder: Path, name: str = "") -> FoundImage:
        """Return an image in a registry. `name` is the image's name in messages; default: the reference.
        Raises the same errors as `find`."""
        parsed = parse_reference(reference)
        return image.image_in_registry(name or reference, parsed, self.connect(parsed.host), folder)

    def find_base(self, reference: str, release: str | None = None, layers: Sequence[str] = ()) -> FoundImage:
        """Return the base image of a target, whose image has layers with these diff ids.

        It is found in the cache if this machine bootstrapped it for this release, else in its registry or in the user's
        mirror of the registry. Raises the same errors as `find`, and ConfigError if the user's configuration is
        wrong."""
        with suppress(OSError):
            places = cache_folder().glob(f"{release}-*") if release else ()
            for folder in (path for place in places for path in layouts_in(place)):
                own = in_files(reference, folder, Path())
                diff_ids = [[layer.diff_id for layer in own.image(p).layers] for p in own.platforms]
                if any(ids == [*layers[: len(ids)]] for ids in diff_ids):
                    return own
        return self.find_in_registry(load_settings(os.environ).mirrors.image(reference), Path())

    def results_of_build(self, target: Target, folder: Path) -> Iterator[FoundImage]:
        """Yield the images of a target's last build: from its layout, and from the registry if the build pushed.
        Raises the same errors as `find`."""
        layout = self.folder / target.id / "layout"
        if layout.is_dir():
            yield in_files(target.id, layout, folder)
        path = self.folder / target.id / "result.json"
        if not path.exists():
            return
        result = read_written(BuildResult, read_text(path), str(path))
        if result.repository is not None and result.digest is not None and not self.offline:
            yield self.find_in_registry(f"{result.repository}@{result.digest}", folder, target.id)
