"""Fixtures for all tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from imagebuild.project.load import load_project
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Project
from imagebuild.render import sandbox
from imagebuild.render.renderer import Renderer
from imagebuild.verify import facts

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", action="store_true", help="also run the proofs that `make docker` leaves out")
    parser.addoption("--hpcx", default="hpcx-cuda13.2.1-ubuntu24.04", help="beginning of the targets of hpcx to build")
    parser.addoption("--whole-hpcx", action="store_true", help="build hpcx with Open MPI, too")
    parser.addoption("--buildkit", help="folder of buildkitd: also build on nodes that the tests start")
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing")


@pytest.fixture(autouse=True)
def no_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a unit test that starts a program, unless it has the mark `programs` or the program fills templates."""
    if "docker" not in request.keywords and "programs" not in request.keywords:
        start = subprocess.Popen

        def refuse(argv: Any, *more: Any, **options: Any) -> object:
            if Path(sandbox.__file__ or "") in map(Path, argv):
                return start(argv, *more, **options)
            return pytest.fail(f"a unit test started {argv}")

        monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture(autouse=True)
def own_facts(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let no test read or write the user's cache of facts about layers."""
    folder = tmp_path_factory.getbasetemp() / "facts" / uuid4().hex
    monkeypatch.setattr(facts, "cache_folder", folder.joinpath)


def ran(*argv: object, check: bool = False, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return its exit status and both output streams as text.

    `more` are further arguments of `subprocess.run`.
    """
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 600}
    return subprocess.run(list(map(str, argv)), check=check, text=True, **usual | more)


def git(folder: Path, *words: str) -> str:
    """Run git in a folder with an invented user; return its output."""
    given = ("user.name=x", "user.email=x@example.org", "protocol.file.allow=always")
    options = [word for setting in given for word in ("-c", setting)]
    return ran("git", "-C", folder, *options, *words, check=True, stderr=None).stdout.strip()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def compare(name: str, text: str) -> None:
        path = ROOT / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{name} is stale; run `make golden` and review the diff"

    return compare


@pytest.fixture(scope="session")
def project() -> Project:
    return load_project(ROOT)


@pytest.fixture(scope="session")
def full_plan(project: Project) -> Plan:
    return make_plan(project)


@pytest.fixture(scope="module")
def renderer(project: Project) -> Renderer:
    return Renderer(project)


TINY = ROOT / "tests/data/tiny"
"""A small project: two components, one image with two axes, and a rule."""
MATRIX = (TINY / "matrix.yaml").read_text()
LIBRARY, TOOL = ((TINY / f"dockerfiles/components/{name}/component.yaml").read_text() for name in ("library", "tool"))
LOCK: dict[str, dict[str, Any]] = json.loads((TINY / "imagebuild.lock").read_text())


def data(name: str) -> Any:
    """Read a YAML file in tests/data."""
    return yaml.safe_load((ROOT / f"tests/data/{name}.yaml").read_text())


class Files:
    """A copy of the small project that a test can change before it is read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(TINY, root, dirs_exist_ok=True)
        for name in ("Dockerfile.j2", "macros.j2"):
            self.write(f"dockerfiles/{name}", (ROOT / "dockerfiles" / name).read_text())

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def append(self, name: str, text: str) -> None:
        self.write(name, (self.root / name).read_text() + text)

    def lock(self, content: object) -> None:
        self.write("imagebuild.lock", json.dumps(content))

    def component(self, name: str, text: str, build: str | None = None) -> None:
        self.write(f"dockerfiles/components/{name}/component.yaml", text)
        if build is not None:
            self.write(f"dockerfiles/components/{name}/build.j2", build)

    def load(self) -> Project:
        return load_project(self.root)


@pytest.fixture
def tiny(tmp_path: Path) -> Files:
    return Files(tmp_path)
