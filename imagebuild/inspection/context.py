"""What a rule is given: an image that was read, and what is known of what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from imagebuild.checks import axes_of, components_of
from imagebuild.component import Component
from imagebuild.config import Project
from imagebuild.inspection.closure import Closure, Loader
from imagebuild.inspection.facts import Elf, Entry, Layer
from imagebuild.inspection.layout import Image
from imagebuild.inspection.tree import Tree
from imagebuild.models import Plan, Target
from imagebuild.plan import Changes, Pins, versions_with
from imagebuild.render import Renderer

MACHINES = {"amd64": 62, "arm64": 183, "386": 3, "arm": 40, "ppc64le": 21, "s390x": 22, "riscv64": 243}
"""Architecture of an image → `e_machine` of its ELF files."""


class NotApplicable(Exception):
    """The rule says nothing about this image; the text says why."""


@dataclass(frozen=True)
class Inspection:
    """An image, read."""

    image: Image
    layers: tuple[Layer, ...]
    project: Project | None = None
    plan: Plan | None = None
    versions: Pins | None = None
    """The pins that the plan was made with; by default the matrix's."""

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.layers)

    @property
    def arch(self) -> str:
        return self.image.platform.split("/")[1]

    @cached_property
    def machine(self) -> int:
        """Raises NotApplicable for an architecture that is not in the table."""
        if self.arch not in MACHINES:
            raise NotApplicable(f"what ELF files of {self.image.platform} say is not known here")
        return MACHINES[self.arch]

    @cached_property
    def components(self) -> dict[str, str]:
        """Component → version, as the labels say. Raises NotApplicable if they name none."""
        found = components_of(self.image.labels)
        if not found:
            raise NotApplicable("the image has no labels imagebuild.component.*: it was not built here")
        return found

    @property
    def axes(self) -> dict[str, str]:
        return axes_of(self.image.labels)

    def known(self) -> Iterator[tuple[str, Component]]:
        """The image's components that the project has. Raises NotApplicable without a project or labels."""
        if self.project is None:
            raise NotApplicable("there is no matrix to compare with")
        for name in self.components:
            if name in self.project.components:
                yield name, self.project.components[name].model

    @property
    def target(self) -> Target:
        """The target that the labels name, as the plan has it. Raises NotApplicable."""
        name = self.image.labels.get("imagebuild.target")
        if not name:
            raise NotApplicable("the image has no label imagebuild.target: it was not built here")
        if self.plan is None or self.project is None:
            raise NotApplicable("there is no plan to compare with")
        found = next((target for target in self.plan.targets if target.id == name), None)
        if found is None:
            raise NotApplicable(f"the plan has no target {name}")
        return found

    def files(self) -> Iterator[Entry]:
        """Everything in any layer, also what a later one hides."""
        for layer in self.layers:
            yield from layer.entries

    @cached_property
    def loader(self) -> Loader:
        return Loader(self.tree, self.image.env)

    @cached_property
    def renderer(self) -> Renderer:
        """Raises NotApplicable without a project."""
        if self.project is None:
            raise NotApplicable("there is no matrix to compare with")
        return Renderer(self.project, self.versions or versions_with(self.project, Changes()))

    def closure(self, path: str) -> Closure:
        """What the loader loads for a program or library."""
        if path not in self._closures:
            self._closures[path] = self.loader.closure(path, self.objects[path])
        return self._closures[path]

    @cached_property
    def _closures(self) -> dict[str, Closure]:
        return {}

    @cached_property
    def objects(self) -> dict[str, Elf]:
        """Path → what is in it, of all ELF files that a container sees."""
        return {entry.path: entry.elf for entry in self.tree if entry.elf}
