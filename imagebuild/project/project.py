"""A project: its matrix, components and lock, with the changes of the command line. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from imagebuild.core.errors import ConfigError, Mistakes, suggestion
from imagebuild.core.fields import YamlFile, matches
from imagebuild.project.changes import Changes
from imagebuild.project.component import Component
from imagebuild.project.lockfile import Lock, LockedImage
from imagebuild.project.matrix import Base, Matrix, Pin


@dataclass(frozen=True)
class Project:
    """A project: its matrix, components and lock, combined with those of the project that it extends."""

    matrix: YamlFile[Matrix]
    components: Mapping[str, YamlFile[Component]]
    lock: Lock
    roots: tuple[Path, ...]
    """Folders with templates and components: the project's own, then those of the extended projects."""
    own_lock: Lock
    """The content of the project's own lock file."""
    changes: Changes = field(default_factory=Changes)
    """Changes by the command line. `matrix` already contains the changed pins, repository, base and appended
    instructions."""

    @property
    def root(self) -> Path:
        return self.matrix.path.parent

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders in `roots` that are not links. Templates, files and scripts are read only from these folders."""
        return tuple(root for root in self.roots if root.resolve() == root.parent.resolve() / root.name)

    def is_own(self, *place: str | int) -> bool:
        """Return whether a value is from the project's own matrix, not from the matrix of an extended project.
        `place` are the keys that lead to the value. Always True if the own matrix is a JSON file."""
        return not self.matrix.lines or place in self.matrix.lines

    def changed(self, changes: Changes) -> Project:
        """Return the project with these changes.
        Raises ConfigError for a name or a value that `--set` does not accept."""
        matrix, bases, pins = self.matrix.model, self.matrix.model.bases, self.lock.images
        name, _, digest = (changes.base_image or "").partition("@")
        if name:
            bases = dict.fromkeys(bases, Base(image=name))
            pins = {**pins, name: LockedImage.model_construct(digest=digest)}
        images = {}
        for label, image in matrix.images.items():
            appended = "\n".join(filter(None, (image.append.strip(), changes.appended.strip())))
            images[label] = image.model_copy(update={"append": appended, "base": image.base and (name or image.base)})
        model = matrix.model_copy(
            update={
                "repository": changes.repository or matrix.repository,
                "bases": bases,
                "images": images,
                "versions": {**matrix.versions, **self._pins_set(changes.values)},
            }
        )
        lock = self.lock.model_copy(update={"images": pins})
        return replace(self, matrix=replace(self.matrix, model=model), lock=lock, changes=changes)

    def _pins_set(self, values: Mapping[str, str]) -> dict[str, tuple[Pin, ...]]:
        """Return the values of `--set` that replace pins (versions of components). Other values replace values of axes.
        Raises ConfigError for an unknown name, and for a value that is not a version."""
        mistakes, versions = Mistakes(), self.matrix.model.versions
        pins: dict[str, tuple[Pin, ...]] = {}
        axes = {axis for image in self.matrix.model.images.values() for axis in image.axes}
        for name, value in values.items():
            version, at, commit = value.partition("@")
            if name in axes:
                continue
            if name not in {*versions, *self.components}:
                problem = f"is neither an axis nor an entry of `versions`{suggestion(name, {*axes, *versions})}"
                mistakes.add(f"--set {name}={value}", problem)
                continue
            try:
                pins[name] = (Pin(version=version, commit=commit if at else None),)
            except ValidationError as error:
                mistakes.add(f"--set {name}={value}", error.errors()[0]["msg"].removeprefix("Value error, "))
        mistakes.stop_if_any()
        return pins

    def folder(self, component: str) -> Path:
        """Return the folder of a component. Raises ConfigError if there is no such component."""
        if component not in self.components:
            raise ConfigError(f"{self.roots[0]}: no component {component!r}{suggestion(component, self.components)}")
        return self.components[component].path.parent

    def template(self, name: str) -> Path:
        """Return the path of a template.

        `name` is `components/COMPONENT/FILE`, or the name of a shared file. The first folder in `roots` that contains
        the shared file is used."""
        if name.startswith("components/"):
            component, _, file = name.removeprefix("components/").partition("/")
            return self.folder(component) / file
        return next((path for root in self.roots if (path := root / name).exists()), self.roots[0] / name)

    def pin(self, component: str, facts: Mapping[str, str]) -> Pin | None:
        """Return the row of `versions` that sets the version of a component. Return None if no condition holds.
        If several conditions hold, the first row is returned. `facts` are the axes of the target."""
        rows = self.matrix.model.versions.get(self.components[component].model.pin or component, ())
        return next((pin for pin in rows if matches(pin.when, facts)), None)

    def version(self, component: str, facts: Mapping[str, str]) -> str | None:
        """Return the version of a component in a target with the axes `facts`. Return None if no version applies."""
        if axis := self.components[component].model.version_axis:
            return facts[axis]
        pin = self.pin(component, facts)
        return pin.version if pin else None

    def provider(self, wanted: str, present: Collection[str], preferred: Mapping[str, str] | None = None) -> str | None:
        """Return the component that fulfils a requirement. Return None if no component does.

        The first of these is returned: the component in `preferred`, a component in `present`, the component that has
        the name `wanted`."""
        if preferred and wanted in preferred:
            return preferred[wanted]
        if wanted in present:
            return wanted
        provider = next((name for name in present if wanted in self.components[name].model.provides), None)
        return provider or (wanted if wanted in self.components else None)
