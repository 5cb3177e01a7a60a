"""Read a project: the matrix, all components and the lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from imagebuild.core.errors import ConfigError, Mistakes
from imagebuild.core.settings import shipped_folder
from imagebuild.core.yaml import YamlFile, load_yaml
from imagebuild.project.component import Check, Component
from imagebuild.project.lockfile import Lock
from imagebuild.project.matrix import Matrix


@dataclass(frozen=True)
class ProjectPaths:
    """Describe where a project's files are."""

    matrix: Path
    dockerfiles: Path
    lock: Path

    @classmethod
    def beside(cls, matrix: Path) -> ProjectPaths:
        """Return where the files of a project are by default: beside its matrix."""
        return cls(matrix, matrix.parent / "dockerfiles", matrix.parent / "imagebuild.lock")


@dataclass(frozen=True)
class Project:
    """Hold the files of a project: the matrix, the components and the lock."""

    matrix: YamlFile[Matrix]
    components: Mapping[str, YamlFile[Component]]
    lock: Lock
    root: Path
    """Folder of templates and components."""

    def in_repository(self, repository: str) -> Project:
        """Return the project with images named and pushed elsewhere."""
        model = self.matrix.model.model_copy(update={"repository": repository})
        return replace(self, matrix=replace(self.matrix, model=model))


def load_project(matrix: Path, dockerfiles: Path, lock: Path) -> Project:
    """Read the matrix, all components and the lock; a missing lock is empty. Raises ConfigError with every mistake."""
    mistakes = Mistakes()
    document = load_yaml(matrix, Matrix, mistakes)
    paths = sorted(dockerfiles.glob("components/*/component.yaml"))
    if not paths:
        mistakes.add(str(dockerfiles), "no components/*/component.yaml here; give the folder with --dockerfiles")
    components = {path.parent.name: load_yaml(path, Component, mistakes) for path in paths}
    locked = load_yaml(lock, Lock, mistakes) if lock.exists() else None
    mistakes.stop_if_any()
    assert document
    known = {name: file for name, file in components.items() if file}
    return Project(document, known, locked.model if locked else Lock(), dockerfiles)


def layers(folder: Path, kind: str) -> tuple[Path, ...]:
    """Return the folders of one kind of facts (`profiles`, `jobs`) that a project uses, its own last.

    What comes with imagebuild is always there. Raises ConfigError if the matrix of the folder cannot be read.
    """
    found = [path for layer in (shipped_folder(), folder) if (path := layer / kind).is_dir()]
    return tuple({path.resolve(): path for path in found}.values())


def script_of(project: Project, component: str, check: Check) -> str:
    """Return the shell commands of a check. Raises ConfigError if its script cannot be read."""
    if check.run is not None:
        return check.run
    owner, _, script = (check.script or check.name).rpartition("/")
    path: Path = project.root / "components" / (owner or component) / "checks" / f"{script}.sh"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        where = project.components[component].at("checks")
        raise ConfigError(f"{where}: checks.{check.name}: {path}: {error.strerror}") from None
