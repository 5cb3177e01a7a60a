"""Manifests and batch scripts: golden files, properties of random jobs, and their scripts, run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.bench.models import Half
from imagebuild.bench.read import read_text
from imagebuild.core.scripts import shared_script
from imagebuild.jobs.facts import load_facts
from imagebuild.jobs.manifest import job_text
from tests.conftest import ROOT, data, ran
from tests.unit.bench.nccl_tables import FACTORS, RELEASES, Table
from tests.unit.jobs.job_fakes import (
    IMAGE,
    MPIRUN,
    REFERENCE,
    container_variables,
    containers,
    copy_of_facts,
    facts,
    facts_of_cluster,
    job,
    objects,
    outer_script,
    pods,
    random_lines,
    rank_exports,
    rank_script,
    text,
    variables_by_scope,
    write_programs,
)
from tests.unit.jobs.kubernetes_fields import mistakes

CASES = data("cases/jobs/manifest")

# The text


@pytest.mark.parametrize("name", REFERENCE)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    line = REFERENCE[name]
    golden(f"tests/golden/jobs/{name}", text(line))
    assert_holds(line)


def test_random_jobs() -> None:
    """They reach everything, so that the properties prove something."""
    words = {word for line in random_lines() for part in shlex.split(line) for word in part.split(",")}
    known = facts()
    assert {*known.fabrics, *known.clusters, *known.tests, *known.features, *known.schedulers, "none"} <= words
    for line in random_lines():
        assert_holds(line)


def assert_holds(line: str) -> None:
    """For every job: the header makes it again, NCCL knows its variables, and each lands in its scope, once."""
    resolved = job(line)
    made = job_text(resolved)
    command = next(row for row in made.splitlines() if row.startswith("# imagebuild job "))
    assert text(command.removeprefix("# imagebuild job ")) == made, line
    assert not [message for message in resolved.messages if message.startswith("warning")]
    expected: dict[str, dict[str, str]] = {scope: {} for scope in ("rank", "container", "launcher", "batch")}
    for variable in resolved.environment.variables:
        if variable.value is not None:
            expected[variable.scope][variable.name] = variable.value
    written = variables_by_scope(made)
    for scope, values in written.items():
        values.pop("NCCL_DEBUG_FILE", None)  # a file of the rank itself
        assert set(values) == set(expected[scope]), line
        for name, value in values.items():
            plain = value.partition("${")[0] if name == "LD_LIBRARY_PATH" else value
            assert expected[scope][name] in (plain, shlex.split(plain)[0] if plain else ""), line
    assert not any(expected[scope] for scope in set(expected) - set(written)), line
    if not line.startswith("slurm"):
        assert_objects(line, made)


def assert_objects(line: str, manifest: str) -> None:
    """Objects of Kubernetes have the fields of the references, ask for what they are limited to, mean no other job's
    pods, and start as many ranks as there are GPUs when all workers answer, once.
    """
    name = objects(manifest)[-1]["metadata"]["name"]
    for document in objects(manifest):
        assert not mistakes(document, document["kind"])
        assert "namespace" not in document["metadata"]
    for container in containers(manifest).values():
        assert container["resources"]["requests"] == container["resources"]["limits"]
    if (spec := objects(manifest)[-1]["spec"]).get("mpiReplicaSpecs"):
        ranks = spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
        measured = 2 * spec["slotsPerWorker"] if "--test pairs" in line else ranks
        measured = 1 if re.search("--test (copies|links|wires)", line) else measured
        assert f"-np {measured} " in containers(manifest)["launcher"]["args"][0]
        assert spec["launcherCreationPolicy"] == "AtStartup"
        assert spec["runPolicy"]["backoffLimit"] == 0
    worker = pods(manifest)["worker"]
    selectors = [c["labelSelector"] for c in worker.get("topologySpreadConstraints", [])]
    terms = worker["affinity"].get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    for selector in [*selectors, *(term["labelSelector"] for term in terms)]:
        assert name in selector["matchLabels"].values()
    # In arguments, Kubernetes takes `$$` for `$`, and `$(NAME)` for the value of a variable of the container.
    assert "$$" not in manifest
    for names in container_variables(manifest).values():
        assert not [name for name in names if f"$({name})" in manifest]


def test_the_order_of_features_is_nothing() -> None:
    entry = text("jobset --profile gb300-nvl72 --fabric ib --racks 2 --feature debug,dra --param name=it")
    other = text("jobset --profile gb300-nvl72 --fabric ib --racks 2 --feature dra,debug --param name=it")
    assert entry.splitlines()[1:] == other.splitlines()[1:]


# What others wrote

HOSTILE = CASES["hostile"]
SEVERAL_LINES = [
    "a\n\n  more\n", "\n#SBATCH --uid=0\necho > x\n", " first\nis indented", "ends\n\n", "tab\tin\nlines\n",
]  # fmt: skip


def test_texts_of_a_cluster_are_read_back_from_yaml(tmp_path: Path) -> None:
    """Those that YAML could read as something else, as key, as value, in a list, and with several lines."""
    annotations = {f"note-{i}": value for i, value in enumerate([*HOSTILE, *SEVERAL_LINES])}
    fabrics = {"ib": {"pod": {"annotations": annotations}}}
    manifest = on_cluster("mpijob --profile h100 --fabric ib", {"annotations": annotations}, tmp_path, fabrics=fabrics)
    (document,) = objects(manifest)
    assert document["metadata"]["annotations"] == annotations
    assert document["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["metadata"]["annotations"] == annotations


@pytest.mark.programs
@pytest.mark.parametrize("hostile", [text for text in [*HOSTILE, *SEVERAL_LINES] if text.strip()])
def test_texts_of_facts_are_words_to_a_shell(hostile: str, tmp_path: Path) -> None:
    """As titles, reasons, folders and programs. Nothing of them runs; there are only commands that bash itself has."""
    folder = copy_of_facts(tmp_path)
    words = "".join(c for c in hostile if c.isprintable())
    changes = {
        "clusters/coreweave.yaml": {"title": hostile, "slurm": {"images": f"{tmp_path}/{words}"}},
        "fabrics/ib.yaml": {"title": hostile},
        "tests/latency.yaml": {"title": hostile, "iterations": words},
        "stacks/other.yaml": {"programs": f"/p/{words}", "env": [{"name": "X", "value": "1", "why": words}]},
    }
    for name, values in changes.items():
        known = yaml.safe_load((folder / name).read_text())
        (folder / name).write_text(yaml.safe_dump(known | values))
    known_facts = load_facts(folder)
    for arguments in ("mpijob --image a.io/it:1", "slurm --image a.io/it:1", "slurm --container none"):
        line = f"{arguments} --profile h100 --fabric ib --cluster coreweave --test latency --param json=no"
        made = job_text(job(line, known_facts))
        timeout = {"BASH_FUNC_timeout%%": '() { shift 3; "$@"; }'}
        env, errors = {"PATH": "/nowhere", "SLURM_SUBMIT_DIR": ".", **timeout}, ""
        for script in (outer_script(made), rank_script(made)):
            errors += ran("/bin/bash", "-c", script, "rank", "all_reduce", env=env, cwd=tmp_path).stderr
        assert f"/p/{words}/all_reduce_perf: No such file" in errors
        assert [path.name for path in tmp_path.iterdir()] == ["jobs"]


def test_every_finding_is_in_the_documentation() -> None:
    page = (ROOT / "tests/data/jobs-findings.md").read_text()
    findings = (ROOT / "tests/data/jobs-findings.txt").read_text().split()
    assert len(findings) == 50
    assert [page.count(f"| {finding} |") for finding in findings] == [1] * 50


# Scripts


@pytest.mark.programs
def test_scripts_pass_bash_and_shellcheck(tmp_path: Path) -> None:
    """The batch script or those of containers, and what ranks run, if two of its lines follow each other nowhere else."""
    scripts = set()
    compared = [row["job"] for row in data("jobs-have") if "--compare" in row["job"]]
    for made in map(text, (*REFERENCE.values(), *random_lines(), *compared)):
        is_batch = made.startswith("#!")
        scripts |= {made} if is_batch else {c["args"][0] for c in containers(made).values() if "args" in c}
        scripts.add(rank_script(made))
    files: list[Path] = []
    seen: set[tuple[str, str]] = set()
    for script in sorted(scripts, key=len, reverse=True):
        pairs = {*pairwise(re.sub("[0-9]+", "0", script).splitlines())}
        if not pairs <= seen:
            files.append(tmp_path / f"{len(files)}.sh")
            files[-1].write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        seen |= pairs
    assert len(files) > 50
    for file in files:
        done = ran("bash", "-n", file)
        assert (done.returncode, done.stderr) == (0, "")
    # SC1091: files of the container or the node are not here.
    assert not ran(Path(sysconfig.get_path("scripts"), "shellcheck"), "--exclude=SC1091", *files).stdout


# Clusters


def on_cluster(line: str, kubernetes: dict[str, Any], folder: Path, **more: Any) -> str:
    """The text of a job on a cluster that says this of Kubernetes, and more."""
    return job_text(job(f"{line} --cluster ours", facts_of_cluster(folder, kubernetes=kubernetes, **more)))


@pytest.mark.parametrize("row", data("jobs-have"), ids=str)
def test_what_a_job_has(row: dict[str, Any], tmp_path: Path) -> None:
    says = row.get("kubernetes", {})
    made = on_cluster(row["job"], says, tmp_path) if says else text(row["job"])
    for document in () if made.startswith("#!") else objects(made):
        assert not mistakes(document, document["kind"])
        assert document["metadata"].get("namespace") == says.get("namespace")
    assert [words for words in row["has"] if words not in made] == []
    assert [words for words in row.get("lacks", ()) if words in made] == []


# Scripts, run


@pytest.mark.programs
@pytest.mark.parametrize(("behaviour", "problem"), CASES["a-job-passes-only-by-a-result"], ids=str)
def test_a_job_passes_only_by_a_result(behaviour: dict[str, str], problem: str, tmp_path: Path) -> None:
    """The script of a launcher, with a stand-in for mpirun and for the benchmark."""
    needed = {"mpirun": MPIRUN, "ssh": "", "sshd": "", "all_reduce_perf": ".all_reduce_perf"}
    programs = write_programs(tmp_path, needed)
    secrets = ["PASSWORD=hunter2", 'QUOTED="],"nccl_version":1', "END=\\\\", "TAB=\t", ""]
    document = {"version": 1, "args": ["all_reduce_perf", "env"], "env": secrets, "nccl_version": 22803}
    (tmp_path / "json").write_text(json.dumps(document, separators=(",", ":")))
    profile = "h100" if "NET" in behaviour else "gb200-nvl72"
    manifest = text(f"mpijob --profile {profile} --fabric ib --nodes 2 --param programs={programs}")
    env = {"PATH": f"{programs}:/usr/bin:/bin", "MNNVL": "MNNVL 1", "OMPI_COMM_WORLD_RANK": "0", **behaviour}
    done = ran("/bin/bash", "-c", outer_script(manifest), env=env, stderr=subprocess.STDOUT, cwd=programs)
    assert (done.returncode, f"imagebuild: {'FAILED' if problem else 'passed'}" in done.stdout) == (bool(problem), True)
    assert (
        f"imagebuild: all_reduce: {problem}" in done.stdout if problem else "imagebuild: all_reduce" not in done.stdout
    )
    printed = re.search(
        "=== imagebuild: json of all_reduce\n(.*?)\n+=== imagebuild: end of json", done.stdout, re.DOTALL
    )
    assert (printed is not None) == ("HELP" in behaviour)
    if printed:
        assert json.loads(printed[1]) == {**document, "env": []}


@pytest.mark.programs
@pytest.mark.parametrize("more", [0, 1000])
def test_messages_of_ranks_are_printed_once_and_none_is_lost(more: int, tmp_path: Path) -> None:
    """Also those of a rank that is killed, and of a rank that is told to stop."""
    start = 'while [ "$1" != /bin/bash ]; do shift; done\n'
    start += 'for r in 0 1 2 3; do OMPI_COMM_WORLD_RANK=$r "$@" & done; wait; exit 3'
    programs = write_programs(
        tmp_path, {"mpirun": start, **dict.fromkeys(("ssh", "sshd"), ""), "all_reduce_perf": ".chatty_rank"}
    )
    script = outer_script(text(f"mpijob --profile h100 --nodes 1 --gpus 4 --param programs={programs}"))
    env = {"PATH": f"{programs}:/usr/bin:/bin", "LINES_OF_RANK": str(more), "TMPDIR": str(tmp_path)}
    done = ran("/bin/bash", "-c", script, env=env, stderr=subprocess.STDOUT)
    printed = done.stdout.splitlines()
    first = printed.index("NCCL version 2.30.7+cuda13.0")
    assert first > printed.index("# nThread 1 nGpus 1")
    assert sum(line.endswith((" INFO Using network IB", " INFO cut")) for line in printed) == 2
    assert "(rank 3) n1:13:2 [3] NCCL INFO Channel 00-03,07/0 : 3[3] -> 0[1] via P2P/CUMEM" in printed
    assert [line.partition(" n1:")[0] for line in printed if "WARN" in line] == ["(ranks 2-3)"]
    assert sum(" INFO message " in line for line in printed) == more // 2 + 4 * (more // 2)
    assert not [*tmp_path.glob("nccl.*")]
    (path,) = (each.carried for each in read_text("log", done.stdout).sources)
    assert path
    assert (path.carriers, path.version, path.ranks) == ({"P2P/CUMEM": 20}, "2.30.7", 4)


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
@pytest.mark.parametrize(
    ("job", "program", "problems"),
    [
        ("mpijob", "echo SUM host_to_device_memcpy_ce 9.1", []),
        ("slurm --container none", "echo SUM host_to_device_memcpy_ce 9.1", []),
        ("mpijob", 'echo SUM host_to_device_memcpy_ce 9.1; [ "$HOST" != n1 ]', ["copies of n1: ended with status 1"]),
        ("mpijob", "echo waived", [f"copies of n{i}: no line with SUM" for i in range(3)]),
    ],
)
def test_what_each_node_measures_alone(job: str, program: str, problems: list[str], tmp_path: Path) -> None:
    hosts = "".join(f"n{i} slots=8\\n" for i in range(3))
    start = 'export HOST=$(printf %s "$*" | grep -o "n[0-9]" | head -1); while [ "$1" != /bin/bash ]; do shift; done\n"$@"\n'
    programs = write_programs(
        tmp_path,
        {
            **dict.fromkeys(("mpirun", "srun"), start), **dict.fromkeys(("ssh", "sshd"), ""), "nvbandwidth": program,
            "cut": f"printf '{hosts}' | /usr/bin/cut \"${{@:1:4}}\"\n",
            "scontrol": f"printf '{hosts}' | /usr/bin/cut -d ' ' -f 1\n",
        },
    )  # fmt: skip
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1"}
    script = outer_script(text(f"{job} --profile h100 --fabric ib --nodes 3 --test copies"))
    done = ran("/bin/bash", "-c", script, env=env | {"SLURM_JOB_NODELIST": "all"}, stderr=subprocess.STDOUT)
    assert re.findall(r"=== imagebuild: copies of (n\d)", done.stdout) == ["n0", "n1", "n2"], done.stdout
    assert (
        re.findall(r"imagebuild: (copies of n\d: (?:ended with status \d|no line with SUM))", done.stdout) == problems
    )
    assert done.returncode == bool(problems)


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
@pytest.mark.parametrize(("scheduler", "end"), CASES["what-collect-says-ends-with-the-job-and-reads-all-logs"])
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


APPTAINER = 'exec enroot import --output "$2" "$3"\n'
"""A stand-in for `apptainer pull FILE IMAGE`."""


@pytest.mark.programs
@pytest.mark.parametrize(("container", "between"), [("pyxis", "#"), ("apptainer", "/")])
def test_images_are_imported_once_and_never_seen_half(container: str, between: str, tmp_path: Path) -> None:
    """The part of a Slurm script that imports the image, with stand-ins for srun, enroot and Apptainer."""
    srun = 'while [ "$1" != test ]; do shift; done\n[ -z "$APART" ] && exec "$@"\n'
    programs = write_programs(tmp_path, {"srun": srun, "enroot": ".enroot", "apptainer": APPTAINER})
    batch = text(f"slurm --profile h100 --fabric ib --container {container} --param images=$HOME/images")
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
    assert calls.read_text().splitlines() == [f"docker://registry.example.com{between}{IMAGE.partition('/')[2]}"] * 2


@pytest.mark.programs
def test_each_rank_starts_apptainer_with_its_folder_of_pmix(tmp_path: Path) -> None:
    programs = write_programs(tmp_path, {"apptainer": 'printf "%s|" "$@"\n'})
    batch = text("slurm --profile h200 --fabric gib --container apptainer --image /images/x.sif")
    assert "enroot" not in batch
    part = re.search(r"(?ms)^inside=.*?\)$", batch)
    assert part
    script = f'image=/images/x.sif\n{part[0]}\n"${{inside[@]}}" "$image" /bin/bash -c "a b"'
    done = ran("/bin/bash", "-c", script, env={"PATH": f"{programs}:/usr/bin:/bin", "PMIX_SERVER_TMPDIR": "/p q"})
    mounts = "/usr/local/gib:/usr/local/gib"
    words = ["--nv", "--no-home", "--pwd", "/", "--bind", "/p q", "--bind", mounts, "/images/x.sif", "/bin/bash", "-c"]
    assert done.stdout.split("|") == ["exec", *words, "a b", ""]


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


# The rows of nccl-tests, which the judge of a job and `imagebuild report` both read

PUBLISHED = sorted((ROOT / "tests/data/nccl-logs").glob("*.txt"))
LABEL = re.compile(r"(?m)^ *(\[\d+,\d+\]<stdout>: ?|\d+: )")
"""What mpirun and srun put before each line if they are asked to; a job asks neither."""
AWKS = [name for name in ("mawk", "gawk", "busybox awk", "original-awk") if shutil.which(name.split()[0])] or ["awk"]


def judged_rows(log: str, awk: str, folder: Path) -> list[tuple[object, ...]]:
    """The rows that the awk program of a job reads: size, and for both halves bus bandwidth and wrong elements."""
    program = re.search(
        r"problem=\$\(awk .*? '\n(.*?)' \"\$1\"\)", outer_script(text("mpijob --profile h100 --fabric ib")), re.DOTALL
    )
    assert program
    assert program[1].count("rows++\n") == 1
    printing = program[1].replace("rows++\n", 'rows++; print "row", $1, $8, $9, $12, $13\n')
    (folder / "log").write_text(log)
    variables = [word for name in ("ranks=8", "compared=1", "least=0") for word in ("-v", name)]
    printed = ran(*awk.split(), *variables, printing, folder / "log", check=True).stdout
    rows = (line.split()[1:] for line in printed.splitlines() if line.startswith("row "))
    return [(int(size), *map(number, figures)) for size, *figures in rows]


def reported_rows(log: str) -> list[tuple[object, ...]]:
    """The same of the rows that `imagebuild report` reads."""

    def figures(half: Half | None) -> tuple[object, object]:
        return (half.busbw_gb_s, half.wrong) if half else (None, None)

    rows = (row for run in read_text("log", log).runs for row in run.rows)
    return [(row.size_bytes, *figures(row.out_of_place), *figures(row.in_place)) for row in rows]


def number(word: str) -> float | None:
    return None if word == "N/A" else float(word)


@pytest.mark.programs
@pytest.mark.parametrize("awk", AWKS)
@pytest.mark.parametrize("log", PUBLISHED, ids=lambda path: path.name)
def test_published_tables_have_the_same_rows_for_the_judge_as_for_report(log: Path, awk: str, tmp_path: Path) -> None:
    content = LABEL.sub("", log.read_text())
    rows = reported_rows(content)
    assert rows
    # Programs before 2.13 have no column for the operation or the root. A job with one fails, as nothing was measured.
    is_old = "error" in content
    assert judged_rows(content, awk, tmp_path) == ([] if is_old else rows)


@pytest.mark.programs
@pytest.mark.parametrize("awk", AWKS)
@pytest.mark.parametrize("release", RELEASES)
def test_tables_of_every_release_have_the_same_rows_for_the_judge_as_for_report(
    release: str, awk: str, tmp_path: Path
) -> None:
    changes: list[dict[str, Any]] = [{}, {"wrong": {0: 3, 4: 1}}, {"validate": False}, {"ranks": 1}]
    changes += [{"timestamps": True}] if Table(release).modern else []
    for collective in FACTORS:
        for change in changes:
            table = Table(release, collective, seed=3, **change)
            rows, judged = reported_rows(table.text()), judged_rows(table.text(), awk, tmp_path)
            assert len(rows) == len(table.sizes)
            # Before 2.13, only reduce has both columns, operation and root, and the column `error` is no count.
            if not table.modern:
                judged = [(size, busbw, None, in_place, None) for size, busbw, _, in_place, _ in judged]
            assert judged == (rows if table.modern or collective == "reduce" else []), (collective, change)


# Examples and documentation


def test_examples() -> None:
    deepspeed = yaml.safe_load((ROOT / "examples/deepspeed.yaml").read_text())
    assert not mistakes(deepspeed, "MPIJob")
    script = deepspeed["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    lines = re.search(r"<<'ENVIRONMENT'\n(.*?)\nENVIRONMENT\n", script, re.DOTALL)
    assert lines
    example = dict(line.split("=", 1) for line in lines[1].splitlines())
    ours = rank_exports("mpijob --profile h100 --fabric ib --nodes 2")
    assert example == {name: ours[name] for name in example}
    assert set(ours) - set(example) <= {"OMPI_MCA_coll_hcoll_enable", "LD_LIBRARY_PATH", "NCCL_DEBUG_FILE"}
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
    """Each cluster file in docs/clusters.md is valid, and the page's commands make jobs with its settings."""
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


@pytest.mark.programs
def test_messages_of_a_rank_that_hangs_are_printed_by_a_rank_of_its_node_that_fails(tmp_path: Path) -> None:
    """With a launcher that drops what ranks print when it stops them, as mpirun of Open MPI 5 does."""
    start = (
        'while [ "$1" != /bin/bash ]; do shift; done\nfor r in 0 1; do OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$r '
    )
    start += 'setsid "$@" & pids[r]=$!; done; wait -n; kill -KILL -- "-${pids[0]}" "-${pids[1]}"; exit 3'
    rank = 'echo "n:1:1 [0] NCCL INFO rank $OMPI_COMM_WORLD_RANK" > "${NCCL_DEBUG_FILE%/*}/n.1"\n'
    rank += "if [ $OMPI_COMM_WORLD_RANK = 0 ]; then sleep 1; exit 3; fi; sleep 60"
    programs = write_programs(
        tmp_path, {"mpirun": start, **dict.fromkeys(("ssh", "sshd"), ""), "all_reduce_perf": rank}
    )
    line = f"mpijob --profile h100 --nodes 1 --gpus 2 --param programs={programs} --param json=no"
    env = {"PATH": f"{programs}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = ran("/bin/bash", "-c", outer_script(text(line)), env=env, stderr=subprocess.STDOUT)
    printed = [line for line in done.stdout.splitlines() if "NCCL INFO" in line]
    assert printed == ["(rank 0) n:1:1 [0] NCCL INFO rank 0", "(rank 1) n:1:1 [0] NCCL INFO rank 1"], done.stdout
    assert not [*tmp_path.glob("nccl.*")]


UBUNTU_AWK = r"""#!/bin/bash
# A stand-in for mawk 1.3.4-20240123: with `-W interactive`, it reads 4096 bytes of a longer line, and then nothing more.
if [ "$1" != -W ]; then exec "$REAL_AWK" "$@"; fi
shift 2
sed '/.\{4097\}/ { s/^\(.\{4096\}\).*/\1/; q }' | "$REAL_AWK" "$@"
"""


@pytest.mark.programs
@pytest.mark.parametrize("ubuntu", [False, True])
def test_a_long_line_hides_no_message_of_nccl(tmp_path: Path, ubuntu: bool) -> None:
    if ubuntu:
        (tmp_path / "awk").write_text(UBUNTU_AWK)
        (tmp_path / "awk").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REAL_AWK": shutil.which("awk") or ""}
    lines = ["=== json", "x" * 70_000, "=== end", *(f"(rank {rank}) host:1:1 [0] NCCL INFO a" for rank in (0, 1))]
    script = shared_script("merged") + "merged"
    done = ran("/bin/bash", "-c", script, env=env, input="\n".join([*lines, ""]))
    assert done.stdout.splitlines() == [*lines[:3], "host:1:1 [0] NCCL INFO a"]
