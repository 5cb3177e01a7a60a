"""The files of a project in a folder or in a revision of its git repository, and the origin of a build."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from imagebuild.core import git
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import RunProgram, run_program
from imagebuild.project.load import DOCKERFILES, LOCK, MATRIX


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
    if not (top := git.work_tree_of(place)):
        raise ConfigError(f"{reference}: {folder / MATRIX} is not in a git repository; name a folder instead")
    try:
        with git.opened(top, run) as read:
            commit = read("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}").strip()
    except CommandError as error:
        if "cannot be run" in str(error):
            raise ConfigError(f"{reference}: git does not run; name a folder instead") from None
        problem = f"is neither a folder with {MATRIX} nor a revision of {top}; name one of them"
        raise ConfigError(f"{reference}: {problem}") from None
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        git.check_out(top, commit, Path(name), run)
        there = Path(name) / place.relative_to(top)
        if not (there / MATRIX).is_file():
            remedy = "name a revision that contains this file"
            raise ConfigError(f"{reference}: has no {place.relative_to(top) / MATRIX}; {remedy}")
        try:
            yield there
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{name}/", f"{reference}:")) from None


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
        config = git.git_folders(git.work_tree_of(folder) or folder)[1] / "config"
        remote = run("git", "-C", "/", "config", "--file", str(config.resolve()), "remote.origin.url").strip()
    except (CommandError, ConfigError):
        return {}
    # `git@host:path` and `ssh://git@host/path` become `https://host/path`, and passwords are left out.
    match = re.match(r"(?!file:|/|\.)(?:\w+://)?(?:[^@/]*@)?([\w.-]+)(?::\d+)?[:/]+(.+?)(?:\.git)?/?$", remote)
    return {"source": f"https://{match[1]}/{match[2]}"} if match else {}


def current_revision(folder: Path, run: RunProgram = run_program) -> str | None:
    """Return the commit of a project, with `-dirty` if tracked files changed or inputs of builds are not tracked.

    Return None if the project is not in a git repository, if git ignores the project's files (as for an installed
    project), or if git does not run."""
    if not (top := git.work_tree_of(folder)):
        return None
    try:
        with git.opened(top, run) as read:
            commit = read("rev-parse", "HEAD").strip()
            tracked = read("ls-files", "--", MATRIX, folder=folder)
            others = ("ls-files", "--others", "--exclude-standard", "--", MATRIX, DOCKERFILES)
            if not (tracked or read(*others, folder=folder)):
                return None
        inputs = [(folder / name).resolve() for name in (MATRIX, LOCK, DOCKERFILES)]
        return f"{commit}-dirty" if git.is_changed(top, inputs, run) else commit
    except (CommandError, ConfigError):
        return None
