"""Find the image that is meant by a tag, a digest, a target's id, a layout or an archive."""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from docker import DockerClient
from docker.errors import ImageNotFound
from pydantic import ValidationError

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.files import read_text
from imagebuild.oci import engine, image
from imagebuild.oci.image import FoundImage
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry, connect_registry
from imagebuild.project.matrix import Plan, Target, axes_of, components_of
from imagebuild.project.plan import select_one
from imagebuild.project.records import BuildResult, CheckResult, Outcome
from imagebuild.verify.checks import IMAGE, SAME_FILES
from imagebuild.verify.files import FileEntry
from imagebuild.verify.runner import Command, Session

if TYPE_CHECKING:
    from imagebuild.verify.rules import Inspection


@dataclass(frozen=True)
class Subject:
    """Describe an image to verify, as far as it is known."""

    name: str
    """Name that was asked for, or the tag of a target."""
    platform: str = ""
    digest: str | None = None
    reference: str | None = None
    """Name in the engine's store; None for an image that is not there."""
    layout: Path | None = None
    """Path at which its files can be read without an engine."""
    labels: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None
    pulled: bool = False
    """Whether the engine has it for this verification only."""

    @property
    def components(self) -> dict[str, str]:
        """Return component → version by the labels, or by the target of an image whose labels cannot be read.

        It is empty for an image that was not built here.
        """
        by_target = self.target.components if self.target and not self.reference else {}
        return components_of(self.labels) or dict(by_target)

    @property
    def axes(self) -> dict[str, str]:
        """Return axis → value, from where the components come."""
        by_target = self.target.axes if self.target and not self.reference else {}
        return axes_of(self.labels) or dict(by_target)


def path_of_image(name: str) -> Path | None:
    """Return the path of a layout or an archive if the name is `oci:PATH`, or a path that can be no image's name."""
    if name.startswith("oci:"):
        return Path(name.removeprefix("oci:"))
    path = Path(name)
    is_path = name.startswith(("/", "./", "../")) or (path / "oci-layout").is_file() or path.is_file()
    return path if is_path else None


def target_with_id(plan: Plan, name: str) -> Target | None:
    """Return the target of the plan that has this id, or the only one of an image or a glob.

    Raises ConfigError for an image or a glob of several, NothingSelected for a glob of none.
    """
    is_of_plan = any(name in (target.id, target.image) for target in plan.targets) or re.search("[*?]", name)
    return select_one(plan, name) if is_of_plan else None


def in_files(name: str, path: Path, folder: Path) -> FoundImage:
    """Return the image of a layout or an archive, which is unpacked into `folder`. Raises as `images_in` does."""
    return FoundImage.of(name, str(path), image.images_in(path, folder))


def subject_in_files(path: Path) -> Subject:
    """Describe the image in a layout or an archive.

    Raises ConfigError if the path holds no image, ResultError if it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        images = image.images_in(path, Path(folder))
    platforms = ", ".join(item.platform for item in images)
    return Subject(str(path), platforms, images[0].digest, layout=path, labels=images[0].labels)


def subject_in_engine(client: DockerClient, plan: Plan, name: str, *, pull: bool) -> Subject:
    """Describe an image in the engine's store; with `pull`, an image of another name than a target's is pulled.

    Raises ConfigError if it is not there or has other versions than the plan, CommandError if the engine fails.
    """
    target = target_with_id(plan, name)
    reference, pulled = target.name if target else name, False
    if pull and not target:
        with engine.sdk_errors_explained(f"docker pull {reference}"):
            try:
                client.images.get(reference)
            except ImageNotFound:
                client.images.pull(reference)
                pulled = True
    info = engine.inspect_image(client, reference)
    digest = reference.partition("@")[2] or info.digest
    subject = Subject(
        reference, info.platform, digest, info.reference, labels=info.labels, target=target, pulled=pulled
    )
    if target and subject.components != target.components:
        raise ConfigError(f"{name}: the image in the engine's store has other versions than the plan; build it again")
    return subject


def subject_elsewhere(
    finder: ImageFinder, name: str | None, layout: Path | None, folder: Path, platform: Callable[[], str]
) -> Subject:
    """Describe an image that a command prefix leads to, with its files below `folder` if they can be found.

    They are looked for in the layout; for a target, where its build left them; for a digest, in its registry. A tag is
    not looked up: it may have moved since the place was started. `platform` returns that of the place, if the image has
    several. Raises ConfigError, CommandError or ResultError if the files should be there and cannot be read.
    """
    target = target_with_id(finder.plan, name) if name else None
    found = None
    if layout:
        found = in_files(name or str(layout), layout, folder)
    elif target:
        found = next(finder.results_of_build(target, folder), None)
    elif name and "@" in name:
        found = finder.find_in_registry(name, folder)
    if not found:
        return Subject(name or "(unnamed)", target=target)
    read = found.image(found.platforms[0] if len(found.platforms) == 1 else platform())
    path = read.as_layout(folder / "layout").folder
    return Subject(found.name, read.platform, read.digest, layout=path, labels=read.labels, target=target)


COMPARED = 96
"""Files that are compared, beside the package database: some of every layer."""
MOST_NAMED = 3
COMPARE_S = 300
"""Seconds for the comparison; the files may lie behind a network."""


def recognisable_files(inspection: Inspection) -> dict[str, str]:
    """Return path → hash of files by which an image is recognised: the package database, and some of each layer."""
    by_layer: dict[int, list[FileEntry]] = defaultdict(list)
    for entry in inspection.tree:
        if entry.sha256 and "\\" not in entry.path and "\n" not in entry.path:
            by_layer[-1 if entry.path.startswith("var/") else entry.layer].append(entry)
    databases = by_layer.pop(-1, [])
    chosen = []
    for entries in by_layer.values():
        # Sorted by content, they are from anywhere in the layer.
        chosen += sorted(entries, key=lambda entry: entry.sha256)[: max(4, COMPARED // len(by_layer))]
    return {f"/{entry.path}": entry.sha256 for entry in (*databases[:COMPARED], *chosen)}


def compare_files(
    session: Session, inspection: Inspection, variables: Collection[str] | None, log: Path
) -> CheckResult:
    """Return whether the image that was read runs where a session leads, by the hashes of files there.

    `variables` are the names in the environment there, for a place that has those of its image; None elsewhere.
    """
    began = time.monotonic()
    expected = recognisable_files(inspection)
    script = f"sha256sum -- {shlex.join(expected)} 2> /dev/null || command -v sha256sum"
    execution = session.run(Command(script, user=session.host.user, timeout_s=COMPARE_S, log=log))
    lines = re.findall(r"^([0-9a-f]{64}) [ *](/.*)$", log.read_text(errors="replace"), re.MULTILINE)
    there = {path: sha256 for sha256, path in lines}
    other = [
        f"{path} {'differs' if path in there else 'is absent'}"
        for path in expected
        if there.get(path) != expected[path]
    ]
    absent = (
        [] if variables is None else [f"{name} is not set" for name in inspection.image.env if name not in variables]
    )
    outcome: Outcome = "failed" if other or absent else "passed"
    reason = ""
    if not expected or execution.status:
        outcome, reason = (
            "skipped",
            "the image has no files to compare" if not expected else "sha256sum could not be run there",
        )
    elif differing := [*other, *absent]:
        more = f" and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
        reason = (
            f"{len(other)} of {len(expected)} files differ: {', '.join(differing[:MOST_NAMED])}{more}; "
            f"another image than {inspection.image.digest} runs there; start this one"
        )
    return CheckResult(
        component=IMAGE, check=SAME_FILES, outcome=outcome, reason=reason, command=execution.argv,
        output="\n".join((*other, *absent)) or f"{len(expected)} files are the same",
        seconds=round(time.monotonic() - began, 3), status=execution.status,
    )  # fmt: skip


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
    def find(self, name: str) -> Iterator[FoundImage | Target]:
        """Find the image that is meant, or the target if it is not built; what is unpacked goes with the context.

        Raises ConfigError if there is no such image, CommandError if the engine or a registry fails, ResultError if
        the image cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            try:
                yield self._find(name, Path(folder))
            except OSError as error:
                why = f"{error.strerror or error}; TMPDIR may name a folder with more room"
                raise ResultError(f"{name}: cannot be unpacked to be read: {why}") from None

    @contextmanager
    def built(self, name: str) -> Iterator[FoundImage]:
        """Find an image that exists. Raises as `find` does, and ConfigError for a target that is not built."""
        with self.find(name) as image_or_target:
            if isinstance(image_or_target, Target):
                raise ConfigError(f"{name}: is not built, or has other versions than the plan; build it first")
            yield image_or_target

    def _find(self, name: str, folder: Path) -> FoundImage | Target:
        if path := path_of_image(name):
            return in_files(name, path, folder)
        if target := target_with_id(self.plan, name):
            in_engine = image.image_in_engine(target.id, target.name, folder)
            candidates = chain([in_engine] if in_engine else (), self.results_of_build(target, folder))
            return next((candidate for candidate in candidates if _has_versions_of(candidate, target)), target)
        bare = name.removeprefix(ENGINE).removeprefix(REGISTRY)
        if not name.startswith(REGISTRY) and (found := image.image_in_engine(name, bare, folder)):
            return found
        if name.startswith(ENGINE):
            raise ConfigError(f"{name}: the engine's store has no such image; build it or pull it")
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
        try:
            result = BuildResult.model_validate_json(read_text(path))
        except ValidationError as error:
            why = f"{error.errors()[0]['msg']}; was it written by another version of imagebuild? build again"
            raise ResultError(f"{path}: {why}") from None
        if result.repository is not None and result.digest is not None and not self.offline:
            pushed = parse_reference(result.repository).at(result.digest)
            yield image.image_in_registry(target.id, pushed, self.connect(pushed.host), folder)


def _has_versions_of(candidate: FoundImage, target: Target) -> bool:
    labels = (candidate.image(platform).labels for platform in candidate.platforms)
    return all(components_of(labels_of_platform) == target.components for labels_of_platform in labels)
