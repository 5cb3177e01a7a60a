"""What stands in for GitHub: its actions, `gh`, root, and the builder that a runner would make.

Nothing here is GitHub's code. What it cannot show: runners, permissions, environments, tokens, Pages, cosign without a
key, and whether an action does what is assumed of it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.actions.runner import ActionFailed
from tests.conftest import ROOT

PROGRAMS = {
    # `docker login` goes nowhere; the builder is the engine itself, as there may be no image of BuildKit here.
    "docker": """\
case "$1 $2" in
  "login "*) cat > /dev/null; echo "$*" >> "$STANDIN_LOG" ;;
  "buildx create") echo "$*" >> "$STANDIN_LOG" ;;
  *) words=() last=
    for word; do
      if [[ "$last $word" == "--builder imagebuild" ]]; then word=default; fi
      words+=("$word") last=$word
    done
    exec "$REAL_DOCKER" "${words[@]}" ;;
esac
""",
    "gh": """\
printf '%q ' gh "$@" >> "$STANDIN_LOG"; echo >> "$STANDIN_LOG"
case "$1 $2" in
  "run list") echo "$STANDIN_LAST" ;;
  "pr list") echo "${STANDIN_OPEN:-0}" ;;
  "auth setup-git" | "pr create" | "pr edit") ;;
  *) echo "gh $*: not known here" >&2; exit 1 ;;
esac
""",
    "sudo": 'echo "sudo $*" >> "$STANDIN_LOG"\n',
    # Without a key it asks GitHub who signs; signatures with a key are tested elsewhere.
    "cosign": 'echo "cosign $*" >> "$STANDIN_LOG"\n',
    # It would ask the security tracker of Debian.
    "debsecan": 'echo "debsecan $*" >> "$STANDIN_LOG"\n',
    # The checkout's own code, without installing its dependencies again.
    "make": """\
[[ $* == .venv/installed-ci ]] || { echo "make $*: not known here" >&2; exit 1; }
mkdir -p .venv/bin
printf '#!/bin/sh\\nexec "%s" -m imagebuild "$@"\\n' "$STANDIN_PYTHON" > .venv/bin/imagebuild
chmod +x .venv/bin/imagebuild
""",
}
"""Program → what is run instead."""


@dataclass
class World:
    """Stand-ins of actions, and a folder for what they leave."""

    root: Path
    origin: Path
    """The repository that `checkout` clones."""
    environ: Mapping[str, str]
    artifacts: Path = field(init=False)
    pages: Path = field(init=False)

    def __post_init__(self) -> None:
        self.artifacts, self.pages = self.root / "artifacts", self.root / "pages"
        self.artifacts.mkdir(parents=True)
        programs = self.root / "programs"
        programs.mkdir()
        for name, script in PROGRAMS.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\nset -e\n{script}")
            (programs / name).chmod(0o755)
        docker = shutil.which("docker")
        self.environ = {
            **self.environ, "PATH": f"{programs}:{self.environ['PATH']}", "REAL_DOCKER": docker or "",
            "STANDIN_LOG": str(self.root / "calls"), "STANDIN_PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
            "DOCKER_CONFIG": str(self.root / "docker"),
        }  # fmt: skip

    @property
    def calls(self) -> str:
        """What stand-ins of programs were called with."""
        log = self.root / "calls"
        return log.read_text() if log.exists() else ""

    def call(self, name: str, options: Mapping[str, Any], workspace: Path) -> dict[str, str]:
        """An action. Options that the stand-in does not know are an error."""
        action = getattr(self, "_" + name.rpartition("/")[2].replace("-", "_"))
        return action(workspace, **{key.replace("-", "_"): value for key, value in options.items()}) or {}

    def _checkout(self, workspace: Path, persist_credentials: str, fetch_depth: str = "1", ref: str = "main") -> None:
        assert persist_credentials == "false"
        depth = ["--depth", fetch_depth] if fetch_depth != "0" else []
        subprocess.run(
            ["git", "clone", "--quiet", "--branch", ref, *depth, f"file://{self.origin}", workspace], check=True
        )

    def _upload_artifact(self, workspace: Path, name: str, path: str, if_no_files_found: str = "warn") -> None:
        patterns = path.split()
        # GitHub keeps paths below what all patterns begin with, up to the first wildcard.
        top = {pattern.partition("*")[0] for pattern in patterns}
        assert len(top) == 1, f"{path}: what the paths in the artifact would be is not known here"
        base = workspace / top.pop()
        found = [file for pattern in patterns for file in workspace.glob(pattern)]
        if not found and if_no_files_found == "error":
            raise ActionFailed(f"{path}: no files")
        assert not (self.artifacts / name).exists(), f"artifact {name} is there already"
        for file in found:
            target = self.artifacts / name / file.relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)

    def _download_artifact(self, workspace: Path, pattern: str, path: str) -> None:
        for folder in self.artifacts.glob(pattern):
            shutil.copytree(folder, workspace / path / folder.name)

    def _upload_pages_artifact(self, workspace: Path, path: str) -> None:
        shutil.copytree(workspace / path, self.artifacts / "github-pages")

    def _deploy_pages(self, workspace: Path) -> dict[str, str]:
        shutil.copytree(self.artifacts / "github-pages", self.pages)
        return {"page_url": "https://acme.example/images"}

    def _cosign_installer(self, workspace: Path) -> None:
        """`cosign` is a stand-in too."""
