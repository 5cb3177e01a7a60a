"""The installed package contains all files that commands read: each command runs in an empty folder outside a clone."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from imagebuild.cli.app import COMMANDS
from imagebuild.project.plan import Plan
from tests import catalog_samples
from tests.conftest import ROOT, data, ran
from tests.report_samples import VERIFICATION, nccl_log

CASES = data("cases/install")

pytestmark = pytest.mark.programs
CALLS = data("installed")

WITHOUT_IMAGES: str = CASES["without-images"]
"""A script that runs `imagebuild`, and fails if the command imports Docker's SDK or a package that makes images."""
MEASURING = CASES["measuring"]
"""Arguments, exit status, and a part of the output. Some commands read files that earlier commands write."""


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


@pytest.fixture(scope="module")
def environ(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the wheel to a folder; return environment variables with which Python imports imagebuild from there."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    ran(*pip, wheel, check=True)
    return {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}


def test_every_command_runs_far_from_a_clone(environ: dict[str, str], tmp_path: Path) -> None:
    assert {call.split()[0] for call, _, _ in CALLS} >= {name for section in COMMANDS.values() for name in section}
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "empty.log").touch()
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


def test_clusters_are_measured_without_code_for_images(
    environ: dict[str, str], full_plan: Plan, tmp_path: Path
) -> None:
    (tmp_path / "nccl.log").write_text(nccl_log(480))
    (tmp_path / "verify.json").write_text(VERIFICATION.model_dump_json(by_alias=True))
    (tmp_path / "plan.json").write_text(full_plan.model_dump_json())
    published = catalog_samples.catalog().model_dump_json().replace('"nccl-tests":', '"hpcx":"2.51","nccl-tests":')
    (tmp_path / "images.json").write_text(published)
    for call, status, text in MEASURING:
        done = ran(sys.executable, "-c", WITHOUT_IMAGES, *call.split(), cwd=tmp_path, env=environ)
        assert (done.returncode, text in done.stdout) == (status, True), (call, done.stdout, done.stderr)


def test_code_for_images_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    """Without this, the test above could pass although nothing is refused."""
    for call, module in (("plan", "imagebuild.project"), ("engine up", "imagebuild.build")):
        done = ran(sys.executable, "-c", WITHOUT_IMAGES, *call.split(), cwd=tmp_path, env=environ)
        assert done.returncode == 1, call
        assert f"{module} was imported" in done.stderr, done.stderr
