"""What pip installs has all that the commands read: each runs in an empty folder, far from a clone."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from imagebuild.cli import COMMANDS
from tests.conftest import ROOT, ran

pytestmark = pytest.mark.programs

TARGET = "quickstart-cuda13.5-debian13-runtime"
CALLS = [
    ("init own --workflow acme/imagebuild@v1", 0, "own/matrix.yaml: written"),
    ("plan --project own", 0, "train-cuda13.5-debian13-runtime"),
    ("render --project own train", 0, "htop"),
    ("lock --project own --check --offline", 0, "as locked: 3"),
    ("plan --why", 0, TARGET),
    (f"render {TARGET}", 0, "AS image"),
    ("build nothing", 3, "no target fits nothing"),
    ("lock --check", 2, "`imagebuild init` makes a project"),
    ("bump", 2, "`imagebuild init` makes a project"),
    ("bundle create --help", 0, "bundle"),
    (f"verify {TARGET} --list", 0, "image/no-tokens"),
    ("verify ./gone", 2, "gone"),
    ("job mpijob --profile h100 --nodes 2 --registry r.test/x", 0, "kind: MPIJob"),
    ("job slurm --profile h100 --fabric ib --registry r.test/x", 0, "#SBATCH"),
    ("report empty.log --profile h100", 5, "empty.log"),
    ("limits h100 --nodes 4", 0, "ceiling"),
    ("publish --help", 0, "--registry"),
    ("each gone -- true", 3, "gone: no image for this"),
    ("sbom ./gone", 2, "gone"),
    ("scan ./gone --report gone.json", 2, "gone"),
    ("attest verify r.test/x --key", 2, "--key"),
    ("diff ./gone ./gone", 2, "gone"),
    ("catalog --registry r.test/x", 2, "catalog"),
    ("prune --registry r.test/x --state", 2, "--state"),
    ("freshness --archive https://r.test/debian --suite s --keyring gone.gpg --registry r.test/x", 2, "gone.gpg"),
    ("doctor", None, "buildx"),
    ("engine --help", 0, "up"),
]


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
