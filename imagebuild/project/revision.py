"""The files of a project in a folder or in a revision of its git repository, and the origin of a build."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, run_program
from imagebuild.project.load import MATRIX


@contextmanager
def files_at_revision(reference: str, folder: Path, run: RunProgram = run_program) -> Iterator[Path]:
    """Yield a folder with another state of the project: a copy in a folder, or a git revision.

    For a revision, the whole tree with its submodules is checked out until the `with` block ends. Mistakes in files of
    the revision are shown as `REF:file:line`. Raises ConfigError if `reference` is neither a folder nor a revision."""
    copy = Path(reference)
    if (copy / MATRIX).is_file():
        yield copy
        return
    if copy.is_dir() and "/" in reference:
        raise ConfigError(f"{reference}: has no {MATRIX}; name a folder with a copy of the project, or a revision")
    place = folder.resolve()
    try:
        top = Path(run("git", "-C", str(place), "rev-parse", "--show-toplevel").strip())
    except CommandError as error:
        reason = "git does not run" if "No such file" in str(error) else f"{folder / MATRIX} is not in a git repository"
        raise ConfigError(f"{reference}: {reason}; name a folder instead") from None
    revision = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
    try:
        commit = run("git", "-C", str(top), *revision).strip()
    except CommandError:
        problem = f"is neither a folder with {MATRIX} nor a revision of {top}; name one of them"
        raise ConfigError(f"{reference}: {problem}") from None
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        _checkout(top, commit, Path(name), run)
        there = Path(name) / place.relative_to(top)
        if not (there / MATRIX).is_file():
            raise ConfigError(
                f"{reference}: has no {place.relative_to(top) / MATRIX}; name a revision that contains this file"
            )
        try:
            yield there
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{name}/", f"{reference}:")) from None


def _checkout(repository: Path, commit: str, folder: Path, run: RunProgram) -> None:
    """Write the files of a commit, and of those submodules that the repository contains, to a folder.

    git writes the files, because the tar module of Python 3.11.2 cannot unpack safely. A separate index leaves the
    repository's own index unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(folder / ".index")}
    run("git", "-C", str(repository), "checkout", "--quiet", commit, "--", ".", env=own)
    for line in run("git", "-C", str(repository), "ls-tree", "-r", "--full-tree", commit).splitlines():
        mode, _, revision, path = line.split(maxsplit=3)
        if mode == "160000" and (repository / path / ".git").exists():
            _checkout(repository / path, revision, folder / path, run)


def origin_of_build(folder: Path, environ: Mapping[str, str], run: RunProgram = run_program) -> dict[str, str]:
    """Return `source`, `run` and `workflow` of a `BuildResult`, from the variables of a GitHub job or git's remote."""
    if repository := environ.get("GITHUB_REPOSITORY"):
        server = environ.get("GITHUB_SERVER_URL", "https://github.com")
        number, attempt = environ.get("GITHUB_RUN_ID", ""), environ.get("GITHUB_RUN_ATTEMPT", "1")
        return {
            "source": f"{server}/{repository}",
            "run": f"{server}/{repository}/actions/runs/{number}/attempts/{attempt}" if number else "",
            "workflow": f"{server}/{environ['GITHUB_WORKFLOW_REF']}" if "GITHUB_WORKFLOW_REF" in environ else "",
        }
    try:
        remote = run("git", "-C", str(folder), "remote", "get-url", "origin").strip()
    except CommandError:
        return {}
    # `git@host:path` and `ssh://git@host/path` become `https://host/path`, and passwords are left out.
    match = re.match(r"(?!file:|/|\.)(?:\w+://)?(?:[^@/]*@)?([\w.-]+)(?::\d+)?[:/]+(.+?)(?:\.git)?/?$", remote)
    return {"source": f"https://{match[1]}/{match[2]}"} if match else {}


def current_revision(folder: Path, run: RunProgram = run_program) -> str | None:
    """Return the commit of a project, with `-dirty` if tracked files changed or inputs of builds are not tracked.

    Return None if the project is not in a git repository, if git ignores the project's files (as for an installed
    project), or if git does not run."""
    git, inputs = ("git", "-C", str(folder)), (MATRIX, "dockerfiles")
    try:
        commit = run(*git, "rev-parse", "HEAD").strip()
        changed = run(*git, "status", "--porcelain", "--untracked-files=no")
        tracked = run(*git, "ls-files", "--", MATRIX)
        untracked = run(*git, "ls-files", "--others", "--exclude-standard", "--", *inputs)
    except CommandError:
        return None
    if not (tracked or untracked):
        return None
    return f"{commit}-dirty" if changed or untracked else commit
