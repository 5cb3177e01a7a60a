"""Git repositories that may come from others, read as data.

The configuration and the hooks of a repository can name programs, which git would run. So git reads the objects and
references of a repository through a temporary folder that has neither."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from imagebuild.core.errors import CommandError
from imagebuild.core.files import read_bytes
from imagebuild.core.run import RunProgram, run_program

KEPT_SETTINGS = re.compile(
    r"(core)()\.(autocrlf|eol|filemode|ignorecase|symlinks)\n(.*)|(extensions)()\.(objectformat|refstorage)\n(.*)"
    r"|(branch)\.(.+)\.(remote|merge)\n(.*)|(remote)\.(.+)\.(fetch)\n(.*)"
)
"""Matches the name and the value of a setting that is kept: how files are written, and what `@{upstream}` means.
These settings cannot name a program."""
OPTIONS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")
ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",  # a reference in refs/replace would put other files behind a commit
}  # fmt: skip
ONLY_OWN = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.attributesFile", "GIT_CONFIG_VALUE_0": "/dev/null",
}  # fmt: skip
"""Variables that leave out settings of the user and the machine. `core.autocrlf` would change the files of a commit."""
NO_INPUTS = [f"--exclude={name}" for name in ("__pycache__", ".DS_Store", "*~", ".*.sw?")]
"""Options that leave out files that programs write beside the files of a project."""
MOST_BYTES = 1 << 20
"""Maximum size in bytes of a file of a repository that imagebuild itself reads."""


def work_tree_of(folder: Path) -> Path | None:
    """Return the top folder of the git repository that contains a folder. None if there is no repository."""
    place = folder.resolve()
    return next((top for top in (place, *place.parents) if os.path.lexists(top / ".git")), None)


def _text(file: Path) -> str:
    return read_bytes(file, MOST_BYTES).decode(errors="replace")


def git_folders(top: Path, within: Path | None = None) -> tuple[Path, Path]:
    """Return the folders with the HEAD and with the objects of a repository. They differ for a linked work tree.
    Raises CommandError if a folder is outside of `within`."""
    own = top / ".git"
    if own.is_file():
        own = top / _text(own).removeprefix("gitdir:").strip()
    common = own / _text(own / "commondir").strip() if (own / "commondir").is_file() else own
    for place in (own, common, common / "objects", common / "refs", common / "packed-refs", own / "HEAD"):
        if within and not place.resolve().is_relative_to(within.resolve()):
            raise CommandError(f"{top}: its git repository leads to {place.resolve()}, outside of {within}")
    return own, common


@contextmanager
def opened(top: Path, run: RunProgram = run_program, within: Path | None = None) -> Iterator[Callable[..., str]]:
    """Yield a function that runs git in the work tree `top`, as `run_program` does.
    With `within`, no setting changes the files of a commit. Raises CommandError if the folders of the repository are
    outside of `within`."""
    own, common = git_folders(top, within)
    with TemporaryDirectory(prefix="imagebuild-") as name:
        view, given = Path(name), Path(name, "given")
        given.write_text(_text(common / "config") if (common / "config").exists() else "")
        listed = run("git", "-C", "/", "config", "--file", str(given), "--no-includes", "--null", "--list")
        lines = ["[core]\n\trepositoryformatversion = 1\n"]
        for kept in filter(None, map(KEPT_SETTINGS.fullmatch, listed.split("\0"))):
            section, of, key, value = (text for text in kept.groups() if text is not None)
            if within and section == "core":
                continue
            inner, text = (json.dumps(word, ensure_ascii=False) for word in (of, value))  # quoted as git does
            lines.append(f"[{section}{of and f' {inner}'}]\n\t{key} = {text}\n")
        (view / "config").write_text("".join(lines))
        (view / "HEAD").write_text(_text(own / "HEAD"))  # git does not accept a link
        shared = [common / part for part in ("objects", "refs", "packed-refs", "logs", "shallow", "reftable")]
        for place in (*shared, own / "index", *own.glob("sharedindex.*")):
            if place.exists():
                (view / place.name).symlink_to(place.resolve())
        there = {**ENVIRONMENT, "GIT_DIR": name, "GIT_WORK_TREE": str(top.resolve()), **(ONLY_OWN if within else {})}

        def git(*words: str, folder: Path = top, env: Mapping[str, str] | None = None) -> str:
            return run("git", "-C", str(folder), *OPTIONS, *words, env={**there, **(env or {})})

        yield git


def check_out(top: Path, commit: str, folder: Path, run: RunProgram = run_program, within: Path | None = None) -> None:
    """Write the files of a commit, and of its submodules, to a folder. The repository itself is not changed.
    With `within`, all objects are verified, and a submodule that the repository lacks is an error."""
    folder.mkdir(parents=True, exist_ok=True)
    with opened(top, run, within) as git, TemporaryDirectory(prefix="imagebuild-") as scratch:
        if within:
            git("fsck", "--full", "--no-dangling", "--no-progress")
        places = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": f"{scratch}/index"}
        git("checkout", "--quiet", commit, "--", ".", env=places)
        entries = git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")
    for mode, _, revision, path in (entry.split(maxsplit=3) for entry in entries if entry):
        if mode == "160000" and (within or os.path.lexists(top / path / ".git")):
            check_out(top / path, revision, folder / path, run, within)


def is_changed(top: Path, inputs: Collection[Path] = (), run: RunProgram = run_program) -> bool:
    """Return whether a tracked file differs from the commit, or a file of `inputs` is not tracked, also in a submodule.
    `inputs` are resolved files and folders. Neither flags in the index nor rules of .gitignore hide a change."""
    named = {str(max(path, top)) for path in inputs if path.is_relative_to(top) or top.is_relative_to(path)}
    with opened(top, run) as git:
        if git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty"):
            return True
        literal = {"GIT_LITERAL_PATHSPECS": "1"}
        if named and git("ls-files", "--others", *NO_INPUTS, "--", *sorted(named), env=literal):
            return True
        entries = [entry.partition("\t") for entry in git("ls-files", "--stage", "-v", "-z").split("\0") if entry]
    # With another letter than H, git does not look at the file.
    if any(facts[0] != "H" and os.path.lexists(top / path) for facts, _, path in entries):
        return True
    modules = [top / path for facts, _, path in entries if facts[2:].startswith("160000 ")]
    return any(
        is_changed(module, inputs, run) if os.path.lexists(module / ".git") else any(module.iterdir())
        for module in modules
        if module.is_dir()
    )
