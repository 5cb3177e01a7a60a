"""Scripts of jobs, run; examples and the documentation, read."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from imagebuild.jobs import jobset, load, resolve, slurm, write
from imagebuild.jobs.image import Offer
from imagebuild.jobs.yamlout import Noted, dump
from tests.conftest import ROOT
from tests.unit.job_fakes import (
    IMAGE,
    copy_of_facts,
    exports,
    job,
    machines,
    rank_script,
    request,
    text,
)
from tests.unit.kubernetes import mistakes


@pytest.mark.programs
def test_the_verdict_of_a_script_is_its_status(tmp_path: Path) -> None:
    """The script of a launcher, with a stand-in for mpirun and for the benchmark."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mpirun").write_text('#!/bin/bash\nwhile [ "$1" != /bin/bash ]; do shift; done\nexec "$@"\n')
    (programs / "all_reduce_perf").write_text(
        '#!/bin/bash\nwhile [ "$1" != -J ]; do shift; done\n'
        '[ -n "$QUIET" ] || echo "comm 0x1 rank 0 nRanks 8 MNNVL 1"\n'
        'echo "# Avg bus bandwidth    : 800"\ncat ../json > "$2"\nexit "${STATUS:-0}"\n'
    )
    secrets = ["PASSWORD=hunter2", 'QUOTED="],"nccl_version":1', "END=\\\\", "TAB=\t", ""]
    document = {"version": 1, "args": ["all_reduce_perf", "env"], "env": secrets, "nccl_version": 22803}
    (tmp_path / "json").write_text(json.dumps(document, separators=(",", ":")))
    for file in programs.iterdir():
        file.chmod(0o755)
    made = yaml.safe_load(text(f"mpijob --profile gb200-nvl72 --fabric ib --nodes 2 --set programs={programs}"))
    script = made["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]

    def run(**env: str) -> tuple[int, str]:
        path = f"{programs}:/usr/bin:/bin"
        command = ["/bin/bash", "-c", script]
        done = subprocess.run(
            command, env={"PATH": path, **env}, capture_output=True, text=True, check=False, cwd=programs
        )
        return done.returncode, done.stdout + done.stderr

    status, output = run()
    assert status == 0, output
    assert "imagebuild: passed" in output
    shown = re.search("=== imagebuild: json of all_reduce\n(.*?)\n+=== imagebuild: end of json", output, re.DOTALL)
    assert shown
    assert json.loads(shown[1]) == {**document, "env": []}
    status, output = run(QUIET="1")
    assert status == 1
    assert "imagebuild: no line with 'MNNVL 1': NCCL goes on without" in output
    status, output = run(STATUS="3")
    assert status == 1
    assert "imagebuild: FAILED" in output


@pytest.mark.programs
def test_a_jobset_gives_its_key_to_its_workers(tmp_path: Path) -> None:
    """The launcher's server for its public key, and the worker's way to fetch it, on loopback."""
    made = job("jobset --profile h100 --fabric ib")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = next(one for one in jobset.reach(made) if one.startswith("perl")).replace(str(jobset.KEY_PORT), str(port))
    fetch = jobset.serve(made).replace(str(jobset.KEY_PORT), str(port))
    fetch = re.sub("(?m)^launcher=.*", "launcher=127.0.0.1", fetch)
    fetch = re.sub("(?m)^exec .*", "", fetch)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519.pub").write_text("ssh-ed25519 AAAA launcher\n")
    worker = tmp_path / "worker"
    worker.mkdir()
    command = ["/bin/bash", "-c", f'{serve}\nkeys=$!\nHOME={worker} /bin/bash -c "$1"\nkill $keys', "x", fetch]
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    keys = worker / ".ssh/authorized_keys"
    assert keys.read_text() == "ssh-ed25519 AAAA launcher\n"
    assert keys.stat().st_mode & 0o077 == 0


def test_examples() -> None:
    deepspeed = yaml.safe_load((ROOT / "examples/deepspeed.yaml").read_text())
    assert not mistakes(deepspeed, "MPIJob")
    script = deepspeed["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    lines = re.search(r"<<'ENVIRONMENT'\n(.*?)\nENVIRONMENT\n", script, re.DOTALL)
    assert lines
    given = dict(line.split("=", 1) for line in lines[1].splitlines())
    ours = exports(rank_script(text("mpijob --profile h100 --fabric ib --nodes 2")))
    assert given == {name: ours[name][0] for name in given}
    assert set(ours) - set(given) <= {"OMPI_MCA_coll_hcoll_enable", "LD_LIBRARY_PATH"}
    assert "--hostfile /etc/mpi/hostfile" in script

    workflow = yaml.safe_load((ROOT / "examples/argo-workflow.yaml").read_text())
    templates = {t["name"]: t for t in workflow["spec"]["templates"]}
    assert workflow["spec"]["entrypoint"] in templates
    for group in templates["measure"]["steps"]:
        assert {step["template"] for step in group} <= set(templates)
    head = (ROOT / "examples/argo-workflow.yaml").read_text().splitlines()
    command = next(line for line in head if "imagebuild job" in line)
    assert (
        job(command.removeprefix("#   imagebuild job ").removesuffix(" -o job.yaml")).name == "all-reduce-16-h100-ib-2n"
    )
    assert "-p job=all-reduce-16-h100-ib-2n" in "\n".join(head)


def test_the_clusters_page_reads_as_a_cluster(tmp_path: Path) -> None:
    page = (ROOT / "docs/jobs.md").read_text()
    shown = re.search(r"```yaml\n(title: Our cluster.*?)```", page, re.DOTALL)
    assert shown
    folder = copy_of_facts(tmp_path)
    (folder / "clusters/ours.yaml").write_text(shown[1])
    wanted = request("slurm --profile gb200-nvl72 --fabric ib --cluster ours --racks 1")
    made = resolve.resolve(wanted, machines()["gb200-nvl72"], load.load_facts(folder), Offer())
    assert made.scale.nodes == 16
    assert "export NCCL_IB_SL=1" in write.text(made)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "yes",
        "No",
        "null",
        "1",
        "1.5",
        "0x1",
        "1:30",
        "-c",
        "a: b",
        "a #b",
        "*a",
        "&a",
        "{a}",
        "é",
        "a'b",
        'a"b',
        "a\\b",
    ],
)
def test_yaml_reads_back(value: str) -> None:
    block = f"{value}\n\n  more\n" if value else "x\n"
    node = {"plain": value, "list": [value, {"a": value, "b": [1, True]}, Noted("why", {"c": value})], "text": block}
    wanted = {"plain": value, "list": [value, {"a": value, "b": [1, True]}, {"c": value}], "text": block}
    assert yaml.safe_load(dump(node)) == wanted  # type: ignore[arg-type]


@pytest.mark.programs
def test_images_for_pyxis_are_imported_once_and_never_seen_half(tmp_path: Path) -> None:
    """The part of a Slurm script that fetches the image, with stand-ins for srun and enroot."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        '#!/bin/bash\nwhile [ "$1" != test ]; do shift; done\n[ -z "$APART" ] && exec "$@"\n'
    )
    (programs / "enroot").write_text(
        '#!/bin/bash\n[ "$1 $2" = "import --output" ] || exit 2\necho "$4" >> "$CALLS"\necho half > "$3"\nsleep 0.3\n'
        '[ -z "$BREAK" ] || exit 1\necho whole > "$3"\n'
    )
    for file in programs.iterdir():
        file.chmod(0o755)
    made = job("slurm --profile h100 --fabric ib --set images=$HOME/images")
    script = "\n".join(["set -uo pipefail", *slurm.fetch(made), 'cat "$image"'])
    calls = tmp_path / "calls"

    def start(number: int, **env: str) -> subprocess.Popen[str]:
        given = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(calls), **env}
        given |= {"SLURM_JOB_ID": str(number), "SLURM_NNODES": "2"}
        command = ["/bin/bash", "-c", script]
        return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    _, errors = start(1, APART="yes").communicate(timeout=30)
    assert f"not all nodes see {tmp_path}/images; name a folder that they share" in errors
    _, errors = start(2, BREAK="yes").communicate(timeout=30)
    assert "could not be imported" in errors
    assert not [file for file in (tmp_path / "images").iterdir() if file.suffix != ".lock"]
    several = [start(number) for number in (3, 4, 5)]
    assert [one.communicate(timeout=30) for one in several] == [("whole\n", "")] * 3
    assert calls.read_text().splitlines() == [f"docker://registry.example.com#{IMAGE.partition('/')[2]}"] * 2
