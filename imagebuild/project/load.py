"""Read a project: its matrix, components and lock, and those of the project that it extends.

An image takes the keys that it does not state from the image that it starts from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from imagebuild.core.errors import CommandError, ConfigError, Mistakes, suggestion
from imagebuild.core.fields import YamlFile
from imagebuild.core.files import cache_folder, read_inside, refuse_foreign, shipped_folder
from imagebuild.core.leftovers import temporary_folder
from imagebuild.core.run import RunProgram, run_program
from imagebuild.core.yaml import load_yaml, read_yaml
from imagebuild.project.component import Check, Component
from imagebuild.project.lockfile import Lock
from imagebuild.project.matrix import ComponentEdits, GitProject, Image, ImagePackages, Matrix
from imagebuild.project.project import Project

MATRIX, LOCK, DOCKERFILES = "matrix.yaml", "imagebuild.lock", "dockerfiles"
SHIPPED = "imagebuild"
"""Value of `extends` that names the project that comes with imagebuild."""


PARTS = ("component.yaml", "build.j2", "install.j2", "files", "checks")
"""Files and folders that a component's folder may contain."""
OF_STAGE = (
    "git", "archive", "wheels", "wheels-from", "python-environment", "images", "build-requires", "unpacked", "compiles",
    "portable", "build-only", "stage-only", "libraries",
)  # fmt: skip
"""Keys of a component that have no effect without a build stage."""


def load_project(folder: Path, extending: tuple[Path, ...] = ()) -> Project:
    """Read the matrix, components and lock of a folder. A missing lock file counts as an empty lock.

    `extending` lists the folders of the projects that extend this project. Raises ConfigError with all mistakes in the
    files."""
    mistakes = Mistakes()
    dockerfiles, lock = folder / DOCKERFILES, folder / LOCK
    document = load_yaml(folder / MATRIX, Matrix, mistakes)
    base = extended_project(document, extending) if document else None
    components = load_components(dockerfiles / "components", mistakes)
    has_components = any(dockerfiles.glob("components/*/component.yaml"))
    if document and not base and not (has_components and document.model.bases):
        lacking = "no bases" if has_components else f"no {dockerfiles}/components/*/component.yaml"
        remedy = "write `extends: imagebuild` to use the bases and components of imagebuild"
        problem = f"has {lacking} and extends no project; {remedy}"
        mistakes.add(f"{document.path}:1", problem)
    if document:
        images = complete_images(document, base.all_images if base else {}, mistakes)
        document = replace(document, model=document.model.model_copy(update={"images": images}))
    locked = load_yaml(lock, Lock, mistakes) if os.path.lexists(lock) else None
    mistakes.stop_if_any()
    assert document
    own_lock = locked.model if locked else Lock()
    own = Project(document, components, own_lock, (dockerfiles,), own_lock)
    project = layered(own, base) if base else own
    for name, file in components.items():
        for check in file.model.checks:
            if check.run is None and not (script := script_path(project, name, check)).is_file():
                problem = f"{script} is missing; write the script, or add `run`"
                mistakes.add(file.at("checks"), f"checks.{check.name}: {problem}")
        key = next((key for key in OF_STAGE if getattr(file.model, key.replace("-", "_"))), None)
        if key and not (template := file.path.parent / "build.j2").is_file():
            mistakes.add(file.at(key), f"{key}: needs a build stage; write {template}, or remove the key")
    mistakes.stop_if_any()
    return project


def with_lock_in(project: Project, folder: Path) -> Project:
    """Return a project that comes with imagebuild, with the locks of the user in a folder and in the current folder.
    Commands write the lock in the folder."""
    files = dict.fromkeys((folder / LOCK, Path(LOCK)))
    own = Lock()
    for file in files:
        # A link to a missing file is refused, because commands would write the lock to where it leads.
        if os.path.lexists(file):
            refuse_foreign(file)
            own = own.over(read_yaml(file, Lock).model)
    return project.with_own_lock(own, folder / LOCK)


def load_components(folder: Path, mistakes: Mistakes) -> dict[str, YamlFile[Component]]:
    """Read the components of a folder.
    Add a mistake for each folder without a `component.yaml`, and for each file that imagebuild does not read."""
    components = {}
    for place in sorted(place for place in folder.glob("[!.]*") if place.suffix != ".md"):
        if not (path := place / PARTS[0]).exists():
            mistakes.add(f"{path}:1", f"is missing; write this file, or remove the folder {place.name}")
        elif document := load_yaml(path, Component, mistakes):
            components[place.name] = document
        for other in sorted(place.glob("[!.]*")):
            if other.name not in PARTS and other.suffix != ".md":
                remedy = f"remove it (a component may contain {', '.join(PARTS)})"
                mistakes.add(f"{other}:1", f"is not a file of a component; {remedy}")
    return components


def extended_project(document: YamlFile[Matrix], extending: tuple[Path, ...]) -> Project | None:
    """Read the project that a matrix extends. Return None if the matrix does not extend a project.
    Raises CommandError if git cannot fetch the project."""
    extends, place = document.model.extends, document.path.parent
    if not extends:
        return None
    if isinstance(extends, GitProject):
        try:
            commit = fetched_project(extends)
        except CommandError as error:
            reason = str(error).partition("fatal: ")[2].partition("\n")[0].rstrip(".") or str(error)
            problem = f"{extends.git} at commit {extends.commit[:12]} cannot be fetched: {reason}"
            raise CommandError(f"{document.at('extends')}: extends: {problem}; check `git` and `commit`") from None
        folder = commit / extends.folder
        if not folder.resolve().is_relative_to(commit.resolve()):
            problem = f"{extends.folder} is outside the commit; write a folder of the repository"
            raise ConfigError(f"{document.at('extends', 'folder')}: extends.folder: {problem}")
    else:
        folder = shipped_folder() if extends == SHIPPED else place / extends
    if place.resolve() in extending:
        raise ConfigError(f"{document.at('extends')}: extends: circular dependency; name another project")
    if not (folder / MATRIX).is_file():
        problem = f"{folder} has no {MATRIX}; write `{SHIPPED}`, the folder of a project, or `git:` and `commit:`"
        raise ConfigError(f"{document.at('extends')}: extends: {problem}")
    return load_project(folder, (*extending, place.resolve()))


def layered(own: Project, base: Project) -> Project:
    """Return the project `own`, whose images are complete, with all else that it inherits from the project `base`.
    An entry of `own` replaces the entry of the same name in `base`."""
    over, under = own.matrix.model, base.matrix.model
    names = {rule.name for rule in over.rules}
    rules = tuple(rule for rule in under.rules if rule.name not in names)
    whole = {name for name in ("publish", "gpu_architectures") if name not in over.model_fields_set}
    update: dict[str, Any] = {name: {**getattr(under, name), **getattr(over, name)} for name in ("bases", "versions")}
    update |= {"rules": (*over.rules, *rules), **{name: getattr(under, name) for name in whole}}
    return Project(
        replace(own.matrix, model=over.model_copy(update=update)),
        {**base.components, **own.components},
        own.own_lock.over(base.lock),
        (*own.roots, *base.roots),
        own.own_lock,
        base=base,
    )


def fetched_project(source: GitProject, run: RunProgram = run_program) -> Path:
    """Return the cached folder of a project that is in a git repository.
    If the cache does not contain the commit, git fetches the commit through the mirrors in the user's settings."""
    # The address is part of the name, so that a wrong address is noticed although another project fetched the commit.
    address = hashlib.sha256(source.git.encode()).hexdigest()[:12]
    folder = cache_folder("projects") / f"{source.commit}-{address}"
    if not folder.is_dir():
        from imagebuild.core import settings  # noqa: PLC0415 - few projects extend one in git

        configured, ca = settings.load_settings(os.environ), settings.ca_bundle(None, os.environ)
        url = configured.mirrors.download(source.git)
        folder.parent.mkdir(parents=True, exist_ok=True)
        access = settings.git_environment(ca, configured.netrc_file)
        with access as environ, temporary_folder(folder.parent) as scratch:
            work = scratch / "work"
            run("git", "-C", str(scratch), "init", "--quiet", str(work))
            run("git", "-C", str(work), "fetch", "--quiet", "--depth=1", "--", url, source.commit, env=environ)
            run("git", "-C", str(work), "checkout", "--quiet", source.commit)
            try:
                work.rename(folder)
            except OSError as error:
                if not folder.is_dir():  # another process was faster
                    raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return folder


def script_of(project: Project, component: str, check: Check) -> str:
    """Return the shell commands of a check: `run`, or the content of the script.
    Raises ConfigError if the script cannot be read."""
    return check.run if check.run is not None else read_inside(project.folders, script_path(project, component, check))


def hash_of_check(check: Check, script: str) -> str:
    """Return the sha256 of everything that determines the result of a check: all keys except the description.
    `script` are the shell commands of the check."""
    document = check.model_dump(mode="json", exclude={"description"}) | {"script": script}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def script_path(project: Project, component: str, check: Check) -> Path:
    """Return the path of a check's script. Raises ConfigError if the check names an unknown component."""
    owner, _, script = (check.script or check.name).rpartition("/")
    return project.folder(owner or component) / "checks" / f"{script}.sh"


REQUIRED = ("description", "axes", "platforms", "components", "tags")
"""Keys that every image has, its own or from the image that it starts from."""
MOST_STEPS = 50
"""Maximum number of images that start one from the other."""


def complete_images(document: YamlFile[Matrix], extended: Mapping[str, Image], mistakes: Mistakes) -> dict[str, Image]:
    """Return the images of a matrix, with the keys of the images that they start from.

    `extended` are the complete images of the extended projects. Add a mistake for each image that does not exist, that
    starts from itself, or that lacks a key."""
    own, done = document.model.images, dict[str, Image]()

    def complete(name: str, trail: tuple[str, ...] = ()) -> Image:
        if name in done:
            return done[name]
        if name in trail:
            circle = " → ".join((*trail[trail.index(name) :], name))
            problem = f"circular dependency: {circle}; start one of them from another image"
            mistakes.add_once(f"{document.at('images', name, 'from')}: images.{name}.from", problem)
            return own[name]
        if len(trail) > MOST_STEPS:
            problem = f"starts from more than {MOST_STEPS} images, one from the other; start it from an earlier one"
            mistakes.add_once(f"{document.at('images', name)}: images.{name}", problem)
            return own[name]
        image = own[name]
        source = image.from_ if "from_" in image.model_fields_set else (name if name in extended else None)
        if source and source in own and source != name:
            image = _merged(complete(source, (*trail, name)), image)
        elif source and source in extended:
            image = _merged(extended[source], image)
        elif source:
            problem = f"no image {source!r}{suggestion(source, {*own, *extended} - {name})}"
            mistakes.add(document.at("images", name, "from"), f"images.{name}.from: {problem}")
            return image
        done[name] = _edited(name, image, own[name].components_, document, mistakes)
        return done[name]

    for name in own:
        complete(name)
    for name, key in product(done, REQUIRED) if not mistakes.texts else ():
        if not getattr(done[name], key):
            problem = f"is missing; add `{key}: …`, or `from: IMAGE` to start from another image"
            mistakes.add(document.at("images", name), f"images.{name}.{key}: {problem}")
    for name, image in own.items():
        if image.base in {*own, *extended}:
            problem = f"is an image of a project, not of a registry; write `from: {image.base}`"
            mistakes.add(document.at("images", name, "base"), f"images.{name}.base: {image.base} {problem}")
    return {name: done[name] for name in own if name in done}


def _merged(parent: Image, image: Image) -> Image:
    """Return an image with the keys of its parent. The entries of mappings are merged, packages are added, other values
    are replaced."""
    update: dict[str, Any] = {"from_": None} | {key: getattr(image, key) for key in image.model_fields_set}
    for key, value in update.items():
        before = getattr(parent, key)
        if isinstance(value, dict) and isinstance(before, dict):
            update[key] = _in_order(before, value) if key == "axes" else {**before, **value}
    if isinstance(image.components_, ComponentEdits):
        update["components_"] = parent.components
    if "packages" in update:
        own = {name.partition("=")[0] for name in image.packages.apt}
        kept = (name for name in parent.packages.apt if name.partition("=")[0] not in own)
        update["packages"] = ImagePackages(apt=(*kept, *image.packages.apt))
    return parent.model_copy(update=update)


def _in_order(before: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of an image. A new axis comes after the axis that it follows in `changed`, because the order of
    the axes determines the ids of targets."""
    order = list(before)
    previous = None
    for axis in changed:
        if axis not in before:
            order.insert(order.index(previous) + 1 if previous else 0, axis)
        previous = axis
    return {axis: changed.get(axis, before.get(axis)) for axis in order}


def _edited(name: str, image: Image, edits: object, document: YamlFile[Matrix], mistakes: Mistakes) -> Image:
    """Return an image with changes to its components."""
    if not isinstance(edits, ComponentEdits):
        return image
    components = list(image.components)
    rows: list[tuple[str, str | int, str, list[str]]]
    rows = [("replace", old, old, [new]) for old, new in edits.replace.items()]
    rows += [("remove", i, component, []) for i, component in enumerate(edits.remove)]
    for key, place, component, instead in rows:
        if component in components:
            at = components.index(component)
            components[at : at + 1] = instead
        else:
            where = document.at("images", name, "components", key, place)
            problem = f"{component} is not a component of the image to start from"
            remedy = suggestion(component, set(components)) or "; remove this entry"
            mistakes.add(where, f"images.{name}.components.{key}: {problem}{remedy}")
    components += edits.add
    if doubled := next((c for c in components if components.count(c) > 1), None):
        where = document.at("images", name, "components")
        mistakes.add(where, f"images.{name}.components: {doubled} is already a component; add it only once")
    return image.model_copy(update={"components_": tuple(components)})
