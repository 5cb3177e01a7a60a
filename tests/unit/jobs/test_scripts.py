"""Scripts of jobs, run; examples and the documentation, read."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from imagebuild.jobs import job_text, load_facts
from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import IMAGE, containers, copy_of_facts, job, rank_exports, text
from tests.unit.jobs.kubernetes_fields import mistakes


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    folder.mkdir()
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}")
        (folder / name).chmod(0o755)


@pytest.mark.programs
def test_the_verdict_of_a_script_is_its_status(tmp_path: Path) -> None:
    """The script of a launcher, with a stand-in for mpirun and for the benchmark."""
    programs = tmp_path / "bin"
    write_programs(
        programs,
        {
            "mpirun": 'while [ "$1" != /bin/bash ]; do shift; done\nexec "$@"\n',
            "all_reduce_perf": 'while [ "$1" != -J ]; do shift; done\n'
            '[ -n "$QUIET" ] || echo "comm 0x1 rank 0 nRanks 8 MNNVL 1"\n'
            'echo "# Avg bus bandwidth    : 800"\ncat ../json > "$2"\nexit "${STATUS:-0}"\n',
        },
    )
    secrets = ["PASSWORD=hunter2", 'QUOTED="],"nccl_version":1', "END=\\\\", "TAB=\t", ""]
    document = {"version": 1, "args": ["all_reduce_perf", "env"], "env": secrets, "nccl_version": 22803}
    (tmp_path / "json").write_text(json.dumps(document, separators=(",", ":")))
    manifest = text(f"mpijob --profile gb200-nvl72 --fabric ib --nodes 2 --set programs={programs}")
    script = containers(manifest)["launcher"]["args"][0]

    def run(**env: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/bash", "-c", script], env={"PATH": f"{programs}:/usr/bin:/bin", **env},
            capture_output=True, text=True, check=False, cwd=programs,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    status, output = run()
    assert status == 0, output
    assert "imagebuild: passed" in output
    printed = re.search("=== imagebuild: json of all_reduce\n(.*?)\n+=== imagebuild: end of json", output, re.DOTALL)
    assert printed
    assert json.loads(printed[1]) == {**document, "env": []}
    status, output = run(QUIET="1")
    assert status == 1
    assert "imagebuild: no line with 'MNNVL 1': NCCL goes on without" in output
    status, output = run(STATUS="3")
    assert status == 1
    assert "imagebuild: FAILED" in output


@pytest.mark.programs
def test_images_for_pyxis_are_imported_once_and_never_seen_half(tmp_path: Path) -> None:
    """The part of a Slurm script that imports the image, with stand-ins for srun and enroot."""
    programs = tmp_path / "bin"
    write_programs(
        programs,
        {
            "srun": 'while [ "$1" != test ]; do shift; done\n[ -z "$APART" ] && exec "$@"\n',
            "enroot": '[ "$1 $2" = "import --output" ] || exit 2\n'
            'echo "$4" >> "$CALLS"\necho half > "$3"\nsleep 0.3\n'
            '[ -z "$BREAK" ] || exit 1\necho whole > "$3"\n',
        },
    )
    batch = text("slurm --profile h100 --fabric ib --set images=$HOME/images")
    part = re.search(r"(?ms)^images=.*^flock -u 9$", batch)
    assert part
    script = f'set -uo pipefail\n{part[0]}\ncat "$image"'
    calls = tmp_path / "calls"

    def start(number: int, **env: str) -> subprocess.Popen[str]:
        env |= {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(calls)}
        env |= {"SLURM_JOB_ID": str(number), "SLURM_NNODES": "2"}
        command = ["/bin/bash", "-c", script]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    _, errors = start(1, APART="yes").communicate(timeout=30)
    assert f"not all nodes see {tmp_path}/images; name a folder that they share" in errors
    _, errors = start(2, BREAK="yes").communicate(timeout=30)
    assert "could not be imported" in errors
    assert not [file for file in (tmp_path / "images").iterdir() if file.suffix != ".lock"]
    several = [start(number) for number in (3, 4, 5)]
    assert [process.communicate(timeout=30) for process in several] == [("whole\n", "")] * 3
    assert calls.read_text().splitlines() == [f"docker://registry.example.com#{IMAGE.partition('/')[2]}"] * 2


def test_examples() -> None:
    deepspeed = yaml.safe_load((ROOT / "examples/deepspeed.yaml").read_text())
    assert not mistakes(deepspeed, "MPIJob")
    script = deepspeed["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    lines = re.search(r"<<'ENVIRONMENT'\n(.*?)\nENVIRONMENT\n", script, re.DOTALL)
    assert lines
    example = dict(line.split("=", 1) for line in lines[1].splitlines())
    ours = rank_exports("mpijob --profile h100 --fabric ib --nodes 2")
    assert example == {name: ours[name] for name in example}
    assert set(ours) - set(example) <= {"OMPI_MCA_coll_hcoll_enable", "LD_LIBRARY_PATH"}
    assert "--hostfile /etc/mpi/hostfile" in script

    workflow = yaml.safe_load((ROOT / "examples/argo-workflow.yaml").read_text())
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    assert workflow["spec"]["entrypoint"] in templates
    for group in templates["measure"]["steps"]:
        assert {step["template"] for step in group} <= set(templates)
    head = (ROOT / "examples/argo-workflow.yaml").read_text().splitlines()
    command = next(line for line in head if "imagebuild job" in line)
    arguments = command.removeprefix("#   imagebuild job ").removesuffix(" -o job.yaml")
    assert job(arguments).name == "all-reduce-16-h100-ib-2n"
    assert "-p job=all-reduce-16-h100-ib-2n" in "\n".join(head)


def test_the_cluster_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs/jobs.md").read_text()
    cluster = re.search(r"```yaml\n(title: Our cluster.*?)```", page, re.DOTALL)
    assert cluster
    folder = copy_of_facts(tmp_path)
    (folder / "clusters/ours.yaml").write_text(cluster[1])
    ours = job("slurm --profile gb200-nvl72 --fabric ib --cluster ours --racks 1", load_facts(folder))
    assert ours.scale.nodes == 16
    assert "export NCCL_IB_SL=1" in job_text(ours)
