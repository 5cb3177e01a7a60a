"""The command `imagebuild job`, and the images that it offers. Refusals are in tests/data/refused/jobs.yaml."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from imagebuild.cli import job as module
from imagebuild.cli.job import project_plan
from imagebuild.cli.options import ProjectFiles
from tests import catalog_samples
from tests.conftest import ROOT, data
from tests.unit.conftest import Call

CASES = data("cases/cli/job")


def test_the_command_writes_what_it_would_print(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    line = "job slurm --profile h100 --param NCCL_FOO=1 --feature debug --registry ghcr.io/acme --param minutes=45"
    words = line.split(" ")
    status, printed, warnings = command(*words)
    assert (status, "does not read NCCL_FOO" in warnings) == (0, True)
    assert printed.startswith(f"#!/bin/bash\n# imagebuild {line}\n")
    assert "#SBATCH --time=45\n" in printed
    assert command(*words, "-o", tmp_path / "job.sh") == (0, "", warnings)
    assert (tmp_path / "job.sh").read_text() == printed.replace(f"{line}\n", f"{line} -o {tmp_path}/job.sh\n", 1)


def test_without_a_project_the_images_that_come_with_imagebuild_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = project_plan(ProjectFiles(root=ROOT), ())
    monkeypatch.chdir(tmp_path)
    assert project_plan(ProjectFiles(), ()) == planned


def test_a_plan_in_a_file_is_as_good_as_the_project(
    tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["job", "mpijob", "--profile", "h100", "--fabric", "ib", "--registry", "ghcr.io/acme"]
    monkeypatch.chdir(ROOT)
    (tmp_path / "plan.json").write_text(project_plan(ProjectFiles(), ()))
    of_project = [text.splitlines()[1:] for text in command(*words)[1:]]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "project_plan", pytest.fail)
    _, *of_file = command(*words, "--plan", "plan.json")
    assert [text.splitlines()[1:] for text in of_file] == of_project
    assert "image: ghcr.io/acme/hpcx:cuda13.4.2-" in of_file[0]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "plan.json").read_bytes())))
    _, *of_stream = command(*words, "--plan", "-")
    assert [text.splitlines()[1:] for text in of_stream] == of_project


@pytest.mark.parametrize(("verified_by", "is_noted"), [(None, True), ("release.pub", False), ("", False)])
def test_nobody_knows_who_verified_the_images_of_a_catalogue_without_a_signer(
    verified_by: str | None, is_noted: bool, tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sample = catalog_samples.catalog(20)
    images = [image.model_copy(update={"verified_by": verified_by}) for image in sample.images]
    file = tmp_path / "images.json"
    file.write_text(sample.model_copy(update={"images": tuple(images)}).model_dump_json())
    said = command("choose", "--profile", "h100", "--catalog", file)[2]
    assert ("nobody knows who says that checks passed" in " ".join(said.split())) == is_noted


@pytest.mark.parametrize(("options", "is_read"), CASES["the-plan-is-made-only-for-images-that-it-can-name"])
def test_the_plan_is_made_only_for_images_that_it_can_name(
    options: str, is_read: bool, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []

    def plan(_: ProjectFiles, components: tuple[str, ...]) -> str:
        made.append(components)
        return '{"targets": []}'

    monkeypatch.setattr(module, "project_plan", plan)
    Path("matrix.yaml").write_text(Path("matrix.yaml").read_text().replace("example", "registry.test/acme", 1))
    call("job", "slurm", "--profile", "h100", "--fabric", "ib", *options.split())
    assert bool(made) == is_read
