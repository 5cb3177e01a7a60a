"""Read the files of a project as they are in a folder, or were in a revision of its git repository."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, run_program
from imagebuild.project.load import ProjectPaths, extended_folder


@contextmanager
def files_at_revision(reference: str, places: ProjectPaths, run: RunProgram = run_program) -> Iterator[ProjectPaths]:
    """Yield the project's paths at `reference`: in a folder that holds a copy of the project, or in a git revision.

    A revision is unpacked into a temporary folder while the `with` lasts; files outside the repository come from the
    working tree, so that a change of them is not seen. Raises ConfigError for what is neither; mistakes in files of a
    revision are shown as `REF:file:line`.
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
    """Write the files of a revision to a folder, and return where they are. Raises ConfigError.

    They include files that links in the project lead to, submodules, and the folder that the matrix extends.
    """
    where = str(places.matrix.resolve().parent)
    try:
        top = Path(run("git", "-C", where, "rev-parse", "--show-toplevel").strip())
    except CommandError as error:
        reason = "git does not run" if "No such file" in str(error) else f"{places.matrix} is in no git repository"
        raise ConfigError(f"{reference}: {reason}; name a folder instead") from None
    git = ("git", "-C", str(top))
    try:
        commit = run(*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}").strip()
    except CommandError:
        raise ConfigError(f"{reference}: neither a folder with {places.matrix.name} nor a revision of {top}") from None
    paths = {role: path.resolve() for role, path in vars(places).items()}
    tracked = {role: path.relative_to(top) for role, path in paths.items() if path.is_relative_to(top)}
    entries = [line.split(maxsplit=3) for line in run(*git, "ls-tree", "-r", "--full-tree", commit).splitlines()]
    modules = {Path(path): revision for mode, _, revision, path in entries if mode == "160000"}
    names = [Path(path) for _, _, _, path in entries]
    todo, written = list(tracked.values()), set[Path]()
    while todo:
        path = todo.pop()
        inside = [name for name in names if name.is_relative_to(path)]
        inside += [module for module in modules if path.is_relative_to(module)]
        for name in {name for name in inside if name in modules} - written:
            _checkout(top / name, modules[name], folder / name, (".",), run)
            written.add(name)
        if path not in written and (plain := [str(name) for name in inside if name not in modules]):
            _checkout(top, commit, folder, (str(path),) if len(plain) > 1 else plain, run)
        written.add(path)
        todo += [more for more in _linked_or_extended(folder, path, places.matrix.name) if more not in written]
    if not (folder / tracked["matrix"]).is_file():
        raise ConfigError(f"{reference}: has no {tracked['matrix']}")
    return ProjectPaths(**{role: folder / tracked[role] if role in tracked else path for role, path in paths.items()})


def _checkout(repository: Path, commit: str, folder: Path, names: Sequence[str], run: RunProgram) -> None:
    """Write files of a commit to a folder.

    git writes them itself: the tar module of Python 3.11.2 has no safe way to unpack. An index of its own leaves the
    repository's as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(folder / ".index")}
    run("git", "-C", str(repository), "checkout", "--quiet", commit, "--", *names, env=own)


def _linked_or_extended(folder: Path, path: Path, matrix: str) -> Iterator[Path]:
    """Yield what the files at a path lead to, relative to the folder: targets of links, and what a matrix extends."""
    for file in (folder / path, *(folder / path).rglob("*")):
        target = file.parent / file.readlink() if file.is_symlink() else None
        if file.name == matrix and file.is_file() and (base := extended_folder(file)):
            target = base
        if target and (inner := Path(os.path.normpath(target))).is_relative_to(folder):
            yield inner.relative_to(folder)


def origin_of_build(matrix: Path, environ: Mapping[str, str], run: RunProgram = run_program) -> dict[str, str]:
    """Return `source`, `run` and `workflow` of a `BuildResult`, by variables of GitHub's jobs or git's remote."""
    if repository := environ.get("GITHUB_REPOSITORY"):
        server = environ.get("GITHUB_SERVER_URL", "https://github.com")
        number, attempt = environ.get("GITHUB_RUN_ID", ""), environ.get("GITHUB_RUN_ATTEMPT", "1")
        return {
            "source": f"{server}/{repository}",
            "run": f"{server}/{repository}/actions/runs/{number}/attempts/{attempt}" if number else "",
            "workflow": f"{server}/{environ['GITHUB_WORKFLOW_REF']}" if "GITHUB_WORKFLOW_REF" in environ else "",
        }
    try:
        remote = run("git", "-C", str(matrix.resolve().parent), "remote", "get-url", "origin").strip()
    except CommandError:
        return {}
    # `git@host:path` and `ssh://git@host/path` become `https://host/path`, and passwords are left out.
    match = re.match(r"(?!file:|/|\.)(?:\w+://)?(?:[^@/]*@)?([\w.-]+)(?::\d+)?[:/]+(.+?)(?:\.git)?/?$", remote)
    return {"source": f"https://{match[1]}/{match[2]}"} if match else {}


def current_revision(matrix: Path, dockerfiles: Path, run: RunProgram = run_program) -> str | None:
    """Return the commit of the project, with `-dirty` if tracked files changed, or inputs of builds are not tracked.

    Returns None if the project is in no git repository or ignored by it, as an installed one is, or git does not run.
    """
    git = ("git", "-C", str(matrix.resolve().parent))
    inputs = (str(matrix.resolve()), str(dockerfiles.resolve()))
    try:
        commit = run(*git, "rev-parse", "HEAD").strip()
        changed = run(*git, "status", "--porcelain", "--untracked-files=no")
        tracked = run(*git, "ls-files", "--", inputs[0])
        untracked = run(*git, "ls-files", "--others", "--exclude-standard", "--", *inputs)
    except CommandError:
        return None
    if not (tracked or untracked):
        return None
    return f"{commit}-dirty" if changed or untracked else commit
