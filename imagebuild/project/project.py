"""A project: its matrix, components and lock, with the changes of the command line. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from imagebuild.core.errors import ConfigError, Mistakes, suggestion
from imagebuild.core.fields import REPOSITORY, YamlFile, matches
from imagebuild.project.component import Component
from imagebuild.project.lockfile import Lock, LockedImage
from imagebuild.project.matrix import Base, Image, Matrix, Pin


@dataclass(frozen=True)
class Changes:
    """Changes that the command line makes to a project."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Values of `--set`. Maps an axis (such as `cuda`) to its values, separated by commas, or a pin (an entry of
    `versions` in `matrix.yaml`) to a version. `version@commit` names a commit that has no git tag."""
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    repository: str | None = None
    """Repository that replaces the `repository` of the matrix."""
    base_image: str | None = None
    """Image that every target starts from, instead of the base in the matrix. Must contain a digest, except for
    `imagebuild render`."""
    append: str | None = None
    """Path of a file with Dockerfile instructions to append to every image."""
    appended: str = ""
    """Content of the file `append`. Empty without such a file."""
    project: tuple[str, ...] = ()
    """The option `--project` as words of a command line; empty if it was not used."""

    @property
    def options_of_plan(self) -> tuple[str, ...]:
        """The options that change the plan (`--set`, `--with`, `--without`), as words of a command line.
        Only these options change which downloads the lock must contain."""
        pairs = [("--set", f"{name}={value}") for name, value in self.values.items()]
        pairs += [("--with", name) for name in self.with_] + [("--without", name) for name in self.without]
        return tuple(word for pair in pairs for word in pair)

    @property
    def options(self) -> tuple[str, ...]:
        """All options that make these changes, except `--registry`, as words of a command line."""
        base = ("--base-image", self.base_image) if self.base_image else ()
        return (*self.options_of_plan, *base, *(("--append", self.append) if self.append else ()))

    def lock_command(self, *words: str) -> str:
        """Return the `imagebuild lock` command that records the hashes of all downloads for these changes.
        `words` are additional arguments of the command."""
        return shlex.join(["imagebuild", "lock", *words, *self.project, *self.options_of_plan])


def check_repository(option: str, name: str | None) -> None:
    """Raise ConfigError if `name`, the value of an option, is not a valid repository. None is accepted."""
    if name is not None and not REPOSITORY.fits(name):
        raise ConfigError(f"{option} {name}: must be {REPOSITORY.words}")


def parse_changes(
    settings: Iterable[str], with_: Iterable[str] = (), without: Iterable[str] = (), *, repository: str | None = None,
) -> Changes:  # fmt: skip
    """Return the changes that options such as `--set cuda=13.1` make.
    Raises ConfigError if a setting is not `name=value`, if a name is set twice, or if `repository` is not valid."""
    check_repository("--registry", repository)
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {setting}: must be NAME=VALUE, such as --set cuda=13.1")
        if name in values:
            raise ConfigError(f"--set {setting}: {name} is set twice; give an axis several values as {name}=A,B")
        values[name] = value
    return Changes(values, tuple(with_), tuple(without), repository)


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
    lock_file: Path | None = None
    """The lock file that commands write. None: the file in `root`."""
    base: Project | None = None
    """The project that this project extends."""

    @property
    def root(self) -> Path:
        return self.matrix.path.parent

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders in `roots` that are not links. Templates, files and scripts are read only from these folders."""
        return tuple(root for root in self.roots if root.resolve() == root.parent.resolve() / root.name)

    @property
    def all_images(self) -> Mapping[str, Image]:
        """The images of this project and of the projects that it extends, from which other projects start images."""
        return {**(self.base.all_images if self.base else {}), **self.matrix.model.images}

    def with_own_lock(self, own: Lock, file: Path | None = None) -> Project:
        """Return the project with another own lock, whose entries replace those of the project's lock."""
        return replace(self, lock=own.over(self.lock), own_lock=own, lock_file=file or self.lock_file)

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
        versions = {**matrix.versions, **self._pins_set(changes.values)}
        repository = changes.repository or matrix.repository
        update = {"repository": repository, "bases": bases, "images": images, "versions": versions}
        model, lock = matrix.model_copy(update=update), self.lock.model_copy(update={"images": pins})
        return replace(self, matrix=replace(self.matrix, model=model), lock=lock, changes=changes)

    def _pins_set(self, values: Mapping[str, str]) -> dict[str, tuple[Pin, ...]]:
        """Return the values of `--set` that replace pins (versions of components), not values of axes."""
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

    def setting(self, component: str) -> str:
        """Return the axis or the entry of `versions` that sets the version of a component."""
        model = self.components[component].model
        return model.version_axis or model.pin or component

    def pin(self, component: str, facts: Mapping[str, str]) -> Pin | None:
        """Return the row of `versions` that sets the version of a component. Return None if no condition holds.
        If several conditions hold, the first row is returned. `facts` are the axes of the target."""
        rows = self.matrix.model.versions.get(self.setting(component), ())
        return next((pin for pin in rows if matches(pin.when, {**facts, "component": component})), None)

    def version(self, component: str, facts: Mapping[str, str]) -> str | None:
        """Return the version of a component in a target with the axes `facts`. Return None if no version applies."""
        if axis := self.components[component].model.version_axis:
            return facts.get(axis)
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
