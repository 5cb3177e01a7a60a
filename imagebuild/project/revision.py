"""Read the files of a project as they are in a folder, or were in a revision of its git repository."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, run_program
from imagebuild.project.load import ProjectPaths


@contextmanager
def files_at_revision(reference: str, places: ProjectPaths, run: RunProgram = run_program) -> Iterator[ProjectPaths]:
    """Yield where the files are in a folder with a copy of them, or, unpacked until the end, of a git revision.

    `reference` is a folder if that has a file of the matrix's name. Files outside the repository are taken as they
    are. Raises ConfigError for what is neither; mistakes in files of a revision are shown as `REF:file:line`.
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
    """Write the files of a revision to a folder, and return where they are. Raises ConfigError."""
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
    paths = {role: path.resolve() for role, path in vars(places).items()}
    tracked = {role: path.relative_to(top) for role, path in paths.items() if path.is_relative_to(top)}
    listed = run(*git, "ls-tree", "--name-only", commit, "--", *map(str, tracked.values())).splitlines()
    if str(tracked["matrix"]) not in listed:
        raise ConfigError(f"{reference}: has no {tracked['matrix']}")
    # git writes the files itself, from an index of its own: the tar module of Python 3.11.2 has no safe way to unpack.
    # With an index of its own, so that the repository's stays as it is.
    own = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(folder / ".index")}
    run(*git, "checkout", "--quiet", commit, "--", *listed, env=own)
    return ProjectPaths(**{role: folder / tracked[role] if role in tracked else path for role, path in paths.items()})


def current_revision(matrix: Path, dockerfiles: Path, run: RunProgram = run_program) -> str | None:
    """Return the commit of the project, with `-dirty` if tracked files changed, or inputs of builds are not tracked.

    Returns None if the project is in no git repository, or git does not run.
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
