"""Read a project: the matrix, all components and the lock, on top of the project that the matrix extends."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from imagebuild.core.errors import ConfigError, Mistakes
from imagebuild.core.files import cache_folder, shipped_folder
from imagebuild.core.run import RunProgram, run_program
from imagebuild.core.yaml import load_yaml
from imagebuild.project.component import Check, Component
from imagebuild.project.lockfile import KINDS, Lock
from imagebuild.project.matrix import GitProject, Matrix
from imagebuild.project.plan import Project

MATRIX, LOCK = "matrix.yaml", "imagebuild.lock"
SHIPPED = "imagebuild"
"""Name by which a matrix extends the project that comes with imagebuild."""


def load_project(folder: Path, extending: tuple[Path, ...] = ()) -> Project:
    """Read a folder's matrix, components and lock; a missing lock is empty. Raises ConfigError with every mistake.

    `extending` are the folders that lead to this one by `extends`.
    """
    mistakes = Mistakes()
    matrix, dockerfiles, lock = folder / MATRIX, folder / "dockerfiles", folder / LOCK
    document = load_yaml(matrix, Matrix, mistakes)
    base = None
    if document and (extended := base_folder(document.model.extends, folder)):
        if folder.resolve() in extending:
            raise ConfigError(f"{document.at('extends')}: extends: goes in a circle; name another project")
        if not (extended / MATRIX).is_file():
            problem = f"{extended} has no {MATRIX}; write {SHIPPED}, the folder of a project, or git: and commit:"
            raise ConfigError(f"{document.at('extends')}: extends: {problem}")
        base = load_project(extended, (*extending, folder.resolve()))
    files = sorted(dockerfiles.glob("components/*/component.yaml"))
    if document and not base and not (files and document.model.bases):
        lacking = "no bases" if files else f"no {dockerfiles}/components/*/component.yaml"
        what = f"has {lacking} and extends nothing; write `extends: imagebuild` to have what comes with it"
        mistakes.add(f"{matrix}:1", what)
    check_folders(dockerfiles / "components", mistakes)
    components = {path.parent.name: load_yaml(path, Component, mistakes) for path in files}
    locked = load_yaml(lock, Lock, mistakes) if lock.exists() else None
    mistakes.stop_if_any()
    assert document
    known = {name: file for name, file in components.items() if file}
    own_lock = locked.model if locked else Lock()
    own = Project(document, known, own_lock, (dockerfiles,), own_lock)
    project = layered(own, base) if base else own
    for name, file in own.components.items():
        for check in file.model.checks:
            if check.run is None and not (script := script_path(project, name, check)).is_file():
                mistakes.add(file.at("checks"), f"checks.{check.name}: {script} is missing; add it, or `run`")
        key = next((key for key in OF_STAGE if getattr(file.model, key.replace("-", "_"))), None)
        if key and not (template := file.path.parent / "build.j2").is_file():
            mistakes.add(file.at(key), f"{key}: is for a build stage; write {template}, or remove the key")
    mistakes.stop_if_any()
    return project


PARTS = ("component.yaml", "build.j2", "install.j2", "files", "checks")
"""What a component's folder has."""


OF_STAGE = (
    "git", "archive", "wheels", "wheels-from", "images", "build-requires", "unpacked", "compiles", "portable",
    "build-only", "stage-only", "libraries",
)  # fmt: skip
"""Keys of a component that mean nothing without a build stage."""


def check_folders(components: Path, mistakes: Mistakes) -> None:
    """Note folders of components without a `component.yaml`, and what is in them under a name that is not read."""
    for path in sorted(components.glob("*/*")):
        if path.name not in PARTS and not path.name.startswith(".") and path.suffix != ".md":
            mistakes.add(f"{path}:1", f"is not read; a component has {', '.join(PARTS)}")
    for folder in sorted(components.glob("[!.]*")):
        if folder.suffix != ".md" and not (folder / PARTS[0]).exists():
            mistakes.add(f"{folder / PARTS[0]}:1", f"is missing; write it, or remove {folder.name}")


def layered(own: Project, base: Project) -> Project:
    """Return a project with what it has from the one that it extends."""
    over, under = own.matrix.model, base.matrix.model
    names = {rule.name for rule in over.rules}
    rules = tuple(rule for rule in under.rules if rule.name not in names)
    whole = {name for name in ("publish", "gpu_architectures", "github_runners") if name not in over.model_fields_set}
    model = over.model_copy(
        update={
            "bases": {**under.bases, **over.bases},
            "versions": {**under.versions, **over.versions},
            "rules": (*over.rules, *rules),
            **{name: getattr(under, name) for name in whole},
        }
    )
    entries = {kind: {**getattr(base.lock, kind), **getattr(own.own_lock, kind)} for kind in KINDS}
    return Project(
        replace(own.matrix, model=model),
        {**base.components, **own.components},
        own.own_lock.model_copy(update={**entries, "date": own.own_lock.date or base.lock.date}),
        (*own.roots, *base.roots),
        own.own_lock,
    )


def base_folder(extends: str | GitProject | None, place: Path) -> Path | None:
    """Return the folder of the project that a matrix in the folder `place` extends; None if it extends none.

    Raises CommandError if git cannot fetch it.
    """
    if isinstance(extends, GitProject):
        return fetched_project(extends) / extends.folder
    return shipped_folder() if extends == SHIPPED else place / extends if extends else None


def fetched_project(source: GitProject, run: RunProgram = run_program) -> Path:
    """Return a cached folder with the files of a commit; fetch it through the user's mirrors if it is not there."""
    folder = cache_folder("projects") / source.commit
    if not folder.is_dir():
        from imagebuild.core import settings  # noqa: PLC0415 - few projects extend one in git

        configured, ca = settings.load_settings(os.environ), settings.ca_bundle(None, os.environ)
        url = configured.mirrors.download(source.git)
        folder.parent.mkdir(parents=True, exist_ok=True)
        access = settings.git_environment(ca, configured.netrc_file)
        with access as environ, TemporaryDirectory(dir=folder.parent) as name:
            work = Path(name) / "work"
            run("git", "init", "--quiet", str(work))
            run("git", "-C", str(work), "fetch", "--quiet", "--depth=1", "--", url, source.commit, env=environ)
            run("git", "-C", str(work), "checkout", "--quiet", source.commit)
            try:
                work.rename(folder)
            except OSError as error:
                if not folder.is_dir():  # another process was faster
                    raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return folder


def layers(folder: Path, kind: str) -> tuple[Path, ...]:
    """Return the folders of one kind of facts (`profiles`, `jobs`) that a project uses, its own last.

    What comes with imagebuild is always there. A matrix that extends nothing is not read. Raises ConfigError with the
    mistakes of a project that extends another one.
    """
    matrix = folder / MATRIX
    extends = matrix.is_file() and b"extends:" in matrix.read_bytes()
    chain = [root.parent for root in reversed(load_project(folder).roots)] if extends else [folder]
    folders = [path for layer in (shipped_folder(), *chain) if (path := layer / kind).is_dir()]
    return tuple({path.resolve(): path for path in folders}.values())


def script_of(project: Project, component: str, check: Check) -> str:
    """Return the shell commands of a check. Raises ConfigError if its script cannot be read."""
    if check.run is not None:
        return check.run
    path = script_path(project, component, check)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        where = project.components[component].at("checks")
        raise ConfigError(f"{where}: checks.{check.name}: {path}: {error.strerror}") from None


def hash_of_check(check: Check, script: str) -> str:
    """Return the hash of all that decides whether a check passes."""
    document = check.model_dump(mode="json", exclude={"description"}) | {"script": script}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def script_path(project: Project, component: str, check: Check) -> Path:
    """Return the file with the commands of a check. Raises ConfigError if it names an unknown component."""
    owner, _, script = (check.script or check.name).rpartition("/")
    return project.folder(owner or component) / "checks" / f"{script}.sh"
