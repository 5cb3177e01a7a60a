"""What pip installs has all that the commands read: each runs in an empty folder, far from a clone."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from imagebuild.cli.app import COMMANDS
from tests.conftest import ROOT, data, ran

pytestmark = pytest.mark.programs
CALLS = data("installed")


def build(source: Path, output: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(output)]
    ran(*command, cwd=source, check=True)
    return next(output.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def test_a_wheel_of_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    ran("tar", "-xf", build(ROOT, tmp_path, "sdist"), "-C", tmp_path, check=True)
    again = build(next(tmp_path.glob("imagebuild-*/")), tmp_path / "again", "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as other:
        assert sorted(first.namelist()) == sorted(other.namelist())


def test_every_command_runs_far_from_a_clone(wheel: Path, tmp_path: Path) -> None:
    assert {call.split()[0] for call, _, _ in CALLS} >= {name for section in COMMANDS.values() for name in section}
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    (empty / "empty.log").touch()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    ran(*pip, wheel, check=True)
    environ = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
    wrong = []
    for call, status, text in CALLS:
        done = ran(sys.executable, "-m", "imagebuild", *call.split(), cwd=empty, env=environ)
        printed = done.stdout + done.stderr
        if (
            status not in (None, done.returncode)
            or text not in printed
            or "Traceback" in printed
            or str(ROOT / "imagebuild") in printed
        ):
            wrong.append(f"{call}: {done.returncode}\n{printed[-2000:]}")
    assert not wrong, "\n".join(wrong)
