"""The files of a project in another state: a revision of its git repository, or a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, run_program


@dataclass(frozen=True)
class ProjectPaths:
    """Where a project's files are."""

    matrix: Path
    dockerfiles: Path
    lock: Path


@contextmanager
def files_at_revision(reference: str, places: ProjectPaths, run: RunProgram = run_program) -> Iterator[ProjectPaths]:
    """Where the files are in a folder that has a copy of them, or as they were in a git revision.

    A folder that holds a file of the matrix's name is taken as such. Of a revision, what the repository does not hold
    is taken as it is, and the files are gone after the context. Raises ConfigError for what is neither, and shows
    mistakes in files of a revision as `REF:file:line`.
    """
    folder = Path(reference)
    if (folder / places.matrix.name).is_file():
        yield ProjectPaths(folder / places.matrix.name, folder / places.dockerfiles.name, folder / places.lock.name)
        return
    if folder.is_dir() and "/" in reference:
        raise ConfigError(f"{reference}: has no {places.matrix.name}; name a folder with a copy of it, or a revision")
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        temporary = Path(name)
        try:
            yield _unpack(reference, places, temporary, run)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{temporary}/", f"{reference}:")) from None


def _unpack(reference: str, places: ProjectPaths, folder: Path, run: RunProgram) -> ProjectPaths:
    where = str(places.matrix.resolve().parent)
    try:
        top = Path(run("git", "-C", where, "rev-parse", "--show-toplevel").strip())
    except CommandError:
        raise ConfigError(f"{reference}: {places.matrix} is in no git repository; name a folder instead") from None
    git = ("git", "-C", str(top))
    try:
        commit = run(*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}").strip()
    except CommandError:
        raise ConfigError(f"{reference}: neither a folder with {places.matrix.name} nor a revision of {top}") from None
    within = {role: path.resolve() for role, path in vars(places).items()}
    found = {role: path.relative_to(top) for role, path in within.items() if path.is_relative_to(top)}
    listed = run(*git, "ls-tree", "--name-only", commit, "--", *map(str, found.values())).splitlines()
    if str(found["matrix"]) not in listed:
        raise ConfigError(f"{reference}: has no {found['matrix']}")
    # git writes the files itself, from an index of its own: the tar module of Python 3.11.2 has no safe way to unpack.
    # With an index of its own, so that the repository's stays as it is.
    own = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(folder / ".index")}
    run(*git, "checkout", "--quiet", commit, "--", *listed, env=own)
    return ProjectPaths(**{role: folder / found[role] if role in found else path for role, path in within.items()})


def current_revision(matrix: Path, dockerfiles: Path, run: RunProgram = run_program) -> str | None:
    """The commit of the project, with `-dirty` if what is tracked has changed, or what is built from is not tracked.

    None if it is in no git repository, or git cannot be asked.
    """
    git = ("git", "-C", str(matrix.resolve().parent))
    try:
        commit = run(*git, "rev-parse", "HEAD").strip()
        changed = run(*git, "status", "--porcelain", "--untracked-files=no")
        inputs = (str(matrix.resolve()), str(dockerfiles.resolve()))
        untracked = run(*git, "ls-files", "--others", "--exclude-standard", "--", *inputs)
    except CommandError:
        return None
    return f"{commit}-dirty" if changed or untracked else commit
