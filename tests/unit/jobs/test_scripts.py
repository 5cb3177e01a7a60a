"""Scripts of jobs, run; examples and the documentation, read."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from imagebuild.jobs.facts import load_facts
from imagebuild.jobs.manifest import job_text
from tests.conftest import ROOT, ran
from tests.unit.jobs.job_fakes import (
    IMAGE,
    copy_of_facts,
    facts_of_cluster,
    job,
    outer_script,
    pods,
    rank_exports,
    text,
)
from tests.unit.jobs.kubernetes_fields import mistakes


def write_programs(beside: Path, programs: dict[str, str]) -> Path:
    """The folder with them. A program is a text, or the name of a file of tests/data/standins with a dot before it."""
    folder = beside / "bin"
    folder.mkdir()
    for name, script in programs.items():
        known = (ROOT / "tests/data/standins" / script[1:]).read_text() if script.startswith(".") else ""
        (folder / name).write_text(known or f"#!/bin/bash\n{script}")
        (folder / name).chmod(0o755)
    return folder


JSON = {"HELP": "[-J,--output_file <file>]"}


@pytest.mark.programs
@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        (JSON, ""),
        ({}, ""),
        ({"MNNVL": ""}, "no line with MNNVL 1: NCCL goes on without"),
        ({"STATUS": "3"}, "ended with status 3"),
        ({"TABLES": " "}, "no result: nothing was measured"),
        ({"TABLES": "1 2"}, "2 results instead of one: the ranks were not joined, as without MPI"),
        ({"RANKS": "7"}, "7 ranks took part instead of 8"),
        ({"WRONG": "7"}, "wrong data in 2 of 2 sizes"),
        ({"WRONG": "N/A"}, "the data were not compared"),
        ({"BUSBW": "nan"}, "1 of 2 sizes have no bus bandwidth"),
        ({"BUSBW": "12.5"}, "12.5 GB/s at best, less than the "),
    ],
    ids=str,
)
def test_a_job_passes_only_by_a_result(behaviour: dict[str, str], problem: str, tmp_path: Path) -> None:
    """The script of a launcher, with a stand-in for mpirun and for the benchmark."""
    mpirun = 'while [ "$1" != /bin/bash ]; do shift; done\nexec "$@"\n'
    programs = write_programs(
        tmp_path, {"mpirun": mpirun, "ssh": "", "sshd": "", "all_reduce_perf": ".all_reduce_perf"}
    )
    secrets = ["PASSWORD=hunter2", 'QUOTED="],"nccl_version":1', "END=\\\\", "TAB=\t", ""]
    document = {"version": 1, "args": ["all_reduce_perf", "env"], "env": secrets, "nccl_version": 22803}
    (tmp_path / "json").write_text(json.dumps(document, separators=(",", ":")))
    manifest = text(f"mpijob --profile gb200-nvl72 --fabric ib --nodes 2 --param programs={programs}")
    env = {"PATH": f"{programs}:/usr/bin:/bin", "MNNVL": "MNNVL 1", "OMPI_COMM_WORLD_RANK": "0", **behaviour}
    done = ran("/bin/bash", "-c", outer_script(manifest), env=env, stderr=subprocess.STDOUT, cwd=programs)
    assert (done.returncode, f"imagebuild: {'FAILED' if problem else 'passed'}" in done.stdout) == (bool(problem), True)
    assert (
        f"imagebuild: all_reduce: {problem}" in done.stdout if problem else "imagebuild: all_reduce" not in done.stdout
    )
    printed = re.search(
        "=== imagebuild: json of all_reduce\n(.*?)\n+=== imagebuild: end of json", done.stdout, re.DOTALL
    )
    assert (printed is not None) == (behaviour is JSON)
    if printed:
        assert json.loads(printed[1]) == {**document, "env": []}


@pytest.mark.programs
@pytest.mark.parametrize(("job", "nodes"), [*(("mpijob", n) for n in (2, 3, 4, 7, 8)), ("slurm --container none", 4)])
def test_every_pair_is_measured_once_and_no_node_twice_in_a_round(job: str, nodes: int, tmp_path: Path) -> None:
    """Node n2 is slow, and named. Where a round takes as long as a measurement, its pairs were side by side."""
    hosts = "".join(f"n{i} slots=8\\n" for i in range(nodes))
    programs = write_programs(
        tmp_path,
        {
            **dict.fromkeys(("mpirun", "srun"), ".pair"), **dict.fromkeys(("ssh", "sshd", "imagebuild"), "exit 7"),
            "cut": f"printf '{hosts}' | /usr/bin/cut \"${{@:1:4}}\"\n", "all_reduce_perf": ".all_reduce_perf",
            "scontrol": f"printf '{hosts}' | /usr/bin/cut -d ' ' -f 1\n",
        },
    )  # fmt: skip
    line = f"{job} --profile h100 --fabric ib --nodes {nodes} --test pairs --param min-bw=9 --param programs={programs}"
    env = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "CALLS": f"{tmp_path}/calls",
        "RANKS": "16",
        "OMPI_COMM_WORLD_RANK": "0",
    }
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "all"}
    done = ran("/bin/bash", "-c", outer_script(text(line)), env=env, stderr=subprocess.STDOUT)
    rounds: dict[str, list[str]] = {}
    for element, other, number in re.findall(r"=== imagebuild: all_reduce of (n\d),(n\d), round (\d+) of", done.stdout):
        rounds.setdefault(number, []).extend((element, other))
    assert len(rounds) == nodes - 1 + nodes % 2, done.stdout
    assert all(len(members) == len(set(members)) == nodes - nodes % 2 for members in rounds.values())
    pairs = [frozenset(members[i : i + 2]) for members in rounds.values() for i in range(0, len(members), 2)]
    assert len(set(pairs)) == nodes * (nodes - 1) // 2
    calls = [sorted(re.findall(r"n\d", call)) for call in (tmp_path / "calls").read_text().split()]
    assert sorted(calls) == sorted(map(sorted, pairs))
    slow = set(map(frozenset, re.findall(r"all_reduce of (n\d),(n\d): 1 GB/s at best", done.stdout)))
    assert (slow, done.returncode) == ({pair for pair in pairs if "n2" in pair}, int(nodes > 2))


@pytest.mark.programs
@pytest.mark.parametrize("role", ["launcher", "worker"])
@pytest.mark.parametrize(
    "lacking",
    [
        *("", "mpirun", "ssh-keygen", "perl"),
        pytest.param("sshd", marks=pytest.mark.skipif(Path("/usr/sbin/sshd").exists(), reason="this machine has it")),
    ],
)
def test_pods_do_not_wait_for_others_without_end(role: str, lacking: str, tmp_path: Path) -> None:
    """The scripts of a JobSet, half an hour after their start, with nobody else there, or without a program."""
    needed = {"mpirun": "", "ssh": "", "ssh-keygen": 'echo key > "${@: -1}.pub"\n', "perl": "exit\n", "sshd": ""}
    programs = write_programs(tmp_path, {name: text for name, text in needed.items() if name != lacking})
    for name in ("bash", "cat", "mkdir", "sleep", "timeout"):
        (programs / name).symlink_to(f"/bin/{name}")
    script = outer_script(text("jobset --profile h100 --fabric ib"), role)
    env = {"PATH": str(programs), "HOME": str(tmp_path), "SECONDS": "1801"}
    done = ran("/bin/bash", "-c", script, env=env)
    if lacking == "sshd" or (lacking and role == "launcher"):
        assert (done.returncode, f"the image has no {lacking}, " in done.stderr) == (1, True)
        return
    other = {"launcher": "worker-0-0", "worker": "launcher-0-0"}[role]
    assert done.returncode == 1
    assert f"imagebuild: all-reduce-64-h100-ib-8n-{other}.all-reduce-64-h100-ib-8n did not start within" in done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(
    ("scheduler", "end"),
    [("mpijob", "Succeeded"), ("jobset", "Completed"), ("jobset", "Failed"), ("jobset", "refused")],
)
def test_what_collect_says_ends_with_the_job_and_reads_all_logs(scheduler: str, end: str, tmp_path: Path) -> None:
    """The commands of the header, with a stand-in for kubectl whose job ends at the third look."""
    report = 'cat "$2"/*; echo "$*"; exit 3\n'
    programs = write_programs(tmp_path, {"kubectl": ".kubectl", "sleep": "", "imagebuild": report})
    made = text(f"{scheduler} --profile h100 --fabric ib --param name=it --collect")
    script = "".join(re.findall(r"^#  ( .*\n)", made, re.MULTILINE))
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SCHEDULER": scheduler, "END": end}
    done = ran("/bin/bash", "-c", script, env=env, cwd=tmp_path)
    assert (tmp_path / "calls").read_text().split() == ["delete", "create", "delete"]
    if end == "refused":
        assert (done.returncode, done.stdout) == (1, "")
        return
    assert done.stdout.splitlines() == [
        "the result", "sshd of pod/w-0", "sshd of pod/w-1", "report it --profile h100 --ranks 64 --nodes 8",
    ]  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.programs
def test_images_for_pyxis_are_imported_once_and_never_seen_half(tmp_path: Path) -> None:
    """The part of a Slurm script that imports the image, with stand-ins for srun and enroot."""
    srun = 'while [ "$1" != test ]; do shift; done\n[ -z "$APART" ] && exec "$@"\n'
    programs = write_programs(tmp_path, {"srun": srun, "enroot": ".enroot"})
    batch = text("slurm --profile h100 --fabric ib --param images=$HOME/images")
    part = re.search(r"(?ms)^images=.*^flock -u 9$", batch)
    assert part
    script = f'set -uo pipefail\n{part[0]}\ncat "$image"'
    calls = tmp_path / "calls"

    def start(number: int, **env: str) -> subprocess.Popen[str]:
        env |= {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(calls)}
        env |= {"SLURM_JOB_ID": str(number), "SLURM_NNODES": "2"}
        command = ["/bin/bash", "-c", script]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    _, errors = start(1, APART="yes").communicate(timeout=300)
    assert f"not all nodes see {tmp_path}/images; name a folder that they share" in errors
    _, errors = start(2, BREAK="yes").communicate(timeout=300)
    assert "could not be imported" in errors
    assert not [file for file in (tmp_path / "images").iterdir() if file.suffix != ".lock"]
    several = [start(number) for number in (3, 4, 5)]
    assert [process.communicate(timeout=300) for process in several] == [("whole\n", "")] * 3
    assert calls.read_text().splitlines() == [f"docker://registry.example.com#{IMAGE.partition('/')[2]}"] * 2


@pytest.mark.programs
@pytest.mark.parametrize(
    ("slurm", "problem"),
    [
        *(({"before": before}, "") for before in ("exit 0", "exit 3", "false", "(")),
        ({"module": "cuda"}, "modules/init/bash: No such file"),
        (
            {"before": "module() { echo loads $2; [ $2 != mpi/5 ]; }", "module": "cuda/12 mpi/5"},
            "the module mpi/5 could not be loaded",
        ),
    ],
)
def test_a_command_of_the_site_ends_no_job_as_passed(slurm: dict[str, str], problem: str, tmp_path: Path) -> None:
    known = facts_of_cluster(tmp_path, slurm=slurm)
    made = job_text(job("slurm --profile h100 --fabric ib --container none --cluster ours", known))
    done = ran("/bin/bash", "-c", made, env={"PATH": "/nowhere"})
    assert done.returncode == 1
    assert problem in done.stderr
    assert "SLURM_SUBMIT_DIR" not in done.stderr  # of the lines that follow


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
    arguments = command.removeprefix("#   imagebuild job ").removesuffix(" --registry ghcr.io/acme -o job.yaml")
    assert job(arguments).workers.name == "all-reduce-16-h100-ib-2n"
    assert "-p job=all-reduce-16-h100-ib-2n" in "\n".join(head)


FILES = re.findall(
    r"```yaml\n# jobs/clusters/(\w+)\.yaml\n(.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize(("name", "content"), FILES)
def test_clusters_of_the_documentation(name: str, content: str, tmp_path: Path) -> None:
    """Each is read, and the commands beside it make a job that says what the file does."""
    folder = copy_of_facts(tmp_path)
    (folder / f"clusters/{name}.yaml").write_text(content)
    facts, cluster = load_facts(folder), yaml.safe_load(content)
    page = (ROOT / "docs/clusters.md").read_text()
    lines = re.findall(rf"`imagebuild job ([^`]*--cluster {name})\b", page)
    assert lines
    for line in lines:
        image = "a.io/a:1" if name == "eks" else "example.com/hpcx:nccl2.28.3"
        made = job_text(job(f"{line} --image {image}", facts))
        if "slurm" in cluster:
            for option, value in {**cluster["slurm"], **cluster["nodes"]["h100"]}.items():
                assert value in made, option
            continue
        for document in yaml.safe_load_all(made):
            assert not mistakes(document, document["kind"])
            assert document["metadata"]["namespace"] == cluster["kubernetes"]["namespace"]
        for secret in cluster["kubernetes"].get("image-pull-secrets", []):
            assert {"name": secret} in pods(made)["launcher"]["imagePullSecrets"]
