"""An image whose files were read: what the rules about files know."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from imagebuild.core.errors import ImagebuildError
from imagebuild.core.fields import SYSTEM_PATH
from imagebuild.oci.image import FoundImage, PlatformImage
from imagebuild.oci.layout import WHITEOUT
from imagebuild.project.component import Component
from imagebuild.project.plan import Plan, Target, components_of
from imagebuild.project.project import Project
from imagebuild.verify.elf import MACHINES, Closure, Loader
from imagebuild.verify.files import Elf, FileEntry, Finding, Layer, Tree, lines_of


def merged(path: str) -> str:
    """Return a path without `usr/`. Packages may still name the folders that the distribution merged into /usr."""
    return path.strip().removeprefix("usr/")


class NotApplicable(Exception):
    """The error if a rule cannot judge an image; its text is the reason."""


COPIED = re.compile(r"COPY (--\S+ )*/out/\w+/ / # buildkit")
"""The step of a layer that contains one component. BuildKit leaves out the name of the component's stage."""

LABELLED = re.compile(r"LABEL .*\bimagebuild\.target=")
"""The last step but one of our Dockerfiles; only settings follow it."""


@dataclass(frozen=True)
class Inspection:
    """An image whose files were read, with the project and the plan to which the image should belong."""

    image: PlatformImage
    layers: tuple[Layer, ...]
    project: Project
    plan: Plan
    seconds: float = 0.0
    """Duration of reading the image, in seconds."""
    read: int = 0
    """Number of layers that were read. The facts about the others are from the cache."""
    base_of: Callable[[Target], str] = field(default=lambda _: "")
    """A function that returns the base image of a target in the lock."""
    copied_of: Callable[[Target], Sequence[str]] = field(default=lambda _: ())
    """A function that returns the components that a target copies, each in a layer of its own, in order."""
    find_base: Callable[[str, str | None, Sequence[str]], FoundImage] | None = None
    """A function that finds this base image. Its arguments are the reference, the release for which a machine may have
    bootstrapped it, and the diff ids of the image's layers."""

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.layers)

    @cached_property
    def objects(self) -> dict[str, Elf]:
        """Maps the path of each ELF file that a container sees to the fields that were read from the file."""
        return {entry.path: entry.elf for entry in self.tree if entry.elf}

    @cached_property
    def loader(self) -> Loader:
        return Loader(self.tree, self.image.env)

    @cached_property
    def closures(self) -> list[tuple[Elf, Closure]]:
        """The programs and libraries for the image's machine, each with the libraries that it loads."""
        files = [(path, elf) for path, elf in self.objects.items() if elf.machine == self.machine and elf.loadable]
        return [(elf, self.loader.closure(path)) for path, elf in files]

    @cached_property
    def on_path(self) -> list[tuple[str, str]]:
        """Each file in the folders that the dynamic loader searches, as a pair of folder and file name."""
        return [(folder, name) for folder in self.loader.folders(self.machine) for name in self.tree.names(folder)]

    @property
    def searched(self) -> list[str]:
        """The folders in which programs and libraries are found: those of PATH, and those of the dynamic loader."""
        paths = map(self.tree.resolve, self.image.env.get("PATH", SYSTEM_PATH).split(":"))
        return list(
            dict.fromkeys(
                [*filter(None, paths), *filter(None, self.loader.folders(MACHINES.get(self.image.architecture, 0)))]
            )
        )

    @cached_property
    def contents(self) -> list[FileEntry]:
        """The files in all layers, without whiteouts, also if a later layer removes them."""
        entries = (entry for layer in self.layers for entry in layer.entries)
        is_whiteout = re.compile(rf"(^|/){re.escape(WHITEOUT)}[^/]*$").search
        return [entry for entry in entries if entry.kind in ("file", "hardlink") and not is_whiteout(entry.path)]

    @cached_property
    def packaged(self) -> set[tuple[str, str]]:
        """The files of the distribution's packages, each as its path without `usr/` and its MD5."""
        packaged: set[tuple[str, str]] = set()
        for entry in self.tree:
            if entry.text and entry.path.startswith("var/lib/dpkg/") and entry.path.endswith("md5sums"):
                lines = (line.split(None, 1) for line in lines_of(entry))
                packaged |= {(merged(path), md5) for md5, path in (line for line in lines if len(line) == 2)}
        return packaged

    @cached_property
    def base(self) -> tuple[int | None, str]:
        """The number of layers that the image shares with the base image in the lock, and why it is 0 or unknown.

        None: the base image cannot be read, so it may be any layer but the last. What the image says about its own base
        is not used, as anybody can write it."""
        try:
            reference = self.base_of(self.target)
            if not self.find_base:
                return 0, "the base image is not searched"
        except (NotApplicable, ImagebuildError) as error:
            return 0, str(error)
        try:
            diff_ids = [layer.diff_id or "" for layer in self.image.layers]
            entry = self.project.matrix.model.bases[self.target.axes["os"]]
            release = entry.release if reference.startswith(f"{entry.image}@") else None
            found = self.find_base(reference, release, diff_ids)
            if self.image.platform not in found.platforms:  # which the image chose itself
                return 0, f"{reference} is not for {self.image.platform}"
            base = found.image(self.image.platform)
        except ImagebuildError as error:
            return None, str(error)
        layers = [layer.diff_id for layer in base.layers]
        if "@" in reference and layers == diff_ids[: len(layers)]:
            return len(layers), ""
        return 0, f"the image does not begin with the layers of {reference}"

    @cached_property
    def components_of_layers(self) -> dict[int | None, str]:
        """Maps the number of a layer to the component that it was copied from; empty if the plan does not tell."""
        steps = [step for step in self.image.config.get("history") or () if not step.get("empty_layer")]
        copied = [number for number, step in enumerate(steps) if COPIED.fullmatch(str(step.get("created_by")))]
        try:
            names = self.copied_of(self.target)
        except (NotApplicable, ImagebuildError):
            return {}
        # An image that this image starts from has copied files before.
        complete = len(steps) == len(self.layers) and len(copied) >= len(names)
        return dict(zip(copied[len(copied) - len(names) :], names, strict=True)) if complete else {}

    @cached_property
    def added_layers(self) -> int:
        """The number of layers that somebody has added to an image of imagebuild, as a Dockerfile `FROM` it does.
        Only for rules about what imagebuild has made, since anybody can write a history."""
        steps = self.image.config.get("history") or ()
        ours = [number for number, step in enumerate(steps) if LABELLED.match(str(step.get("created_by")))]
        return sum(not step.get("empty_layer") for step in steps[ours[-1] :]) if ours else 0

    def is_of_base(self, finding: Finding) -> bool:
        """Return whether a finding is, or may be, about a file of the base image."""
        number, layer = self.base[0], self.layer_of(finding)
        return layer is not None and layer < (len(self.layers) - 1 if number is None else number)

    def layer_of(self, finding: Finding) -> int | None:
        """Return the number of the layer that a finding is about; None if it is not about a layer."""
        entry = self.tree.get(finding.subject[1:]) if finding.subject.startswith("/") else None
        return entry.layer if finding.layer is None and entry else finding.layer

    @property
    def machine(self) -> int:
        """The `e_machine` of the image's ELF files. Raises NotApplicable if it is unknown."""
        if machine := MACHINES.get(self.image.architecture):
            return machine
        raise NotApplicable(f"imagebuild does not know the ELF machine of {self.image.platform}")

    def components(self) -> list[tuple[str, Component]]:
        """Return the project's components that the image's labels name.
        Raises NotApplicable if the image has no labels of components."""
        names = components_of(self.image.labels)
        if not names:
            raise NotApplicable("the image has no label imagebuild.component.*: it was not built by imagebuild")
        known = self.project.components
        return [(name, known[name].model) for name in names if name in known]

    @property
    def target(self) -> Target:
        """The target that the labels name. Raises NotApplicable if no label names a target, or if the plan lacks it."""
        name = self.image.labels.get("imagebuild.target")
        for target in self.plan.targets:
            if target.id == name:
                return target
        unknown = "the image has no label imagebuild.target: it was not built by imagebuild"
        raise NotApplicable(f"the plan has no target {name}" if name else unknown)
