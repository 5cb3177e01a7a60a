"""Jobs from facts: every variable once in its scope, legal objects and scripts, and clear words for what cannot be."""

from __future__ import annotations

import json
import random
import re
import shlex
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild import cli, cli_job
from imagebuild.errors import ConfigError
from imagebuild.jobs import jobset, load, resolve, write
from imagebuild.jobs.image import Offer
from imagebuild.jobs.lint import default, nearest
from imagebuild.jobs.machine import FABRICS
from imagebuild.jobs.merge import of
from imagebuild.jobs.models import OVERRIDABLE, Cluster, Fabric, Feature, JobTest, NodeFacts, SchedulerFacts, Stack
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.slurm import enroot
from imagebuild.jobs.yamlout import Noted, dump
from imagebuild.models import Model, Plan
from tests.conftest import ROOT
from tests.unit.job_fakes import IMAGE, exports, facts, job, machines, rank_script, request, text
from tests.unit.kubernetes import mistakes

SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"
REFERENCE: dict[str, str] = yaml.safe_load((ROOT / "tests/data/jobs-reference.yaml").read_text())


def combinations(count: int, seed: int) -> Iterator[str]:
    """Random arguments that make a job; those that are refused are left out."""
    dice = random.Random(seed)
    profiles = sorted(name for name, machine in machines().items() if machine.capability)
    while count:
        profile = dice.choice(profiles)
        own = FABRICS.get(machines()[profile].network or "", "ethernet")
        words = [dice.choice(["mpijob", "jobset", "slurm"]), "--profile", profile]
        words += ["--fabric", dice.choice([own, dice.choice(sorted(facts().fabrics))])]
        words += ["--cluster", dice.choice(sorted(facts().clusters))]
        words += dice.choice([[], ["--nodes", str(dice.choice([1, 2, 3, 4, 8, 16, 18, 32, 36]))], ["--racks", "2"]])
        chosen = dice.sample(sorted(facts().features), dice.choice([0, 1, 1, 2, 3]))
        words += ["--with", ",".join(chosen)] if chosen else []
        words += ["--container", "none"] if words[0] == "slurm" and dice.random() < 0.3 else []
        words += ["--test", dice.choice(sorted(facts().tests))]
        words += ["--set", "name=it"]
        words += dice.choice([[], ["--set", "NCCL_IB_TIMEOUT=22"], ["--set", "NCCL_NET_PLUGIN=other"], ["--collect"]])
        if "--container" not in words:
            words += ["--image", dice.choice([IMAGE, "example.com/other:1", "example.com/open:nccl2.30.7"])]
        line = shlex.join(words)
        try:
            job(line)
        except ConfigError:
            continue
        count -= 1
        yield line


RANDOM = list(combinations(150, seed=5))


def test_random_combinations_reach_everything() -> None:
    """The property tests below would prove little if whole kinds were always refused."""
    words = {word for line in RANDOM for part in shlex.split(line) for word in part.split(",")}
    assert set(facts().fabrics) | set(facts().clusters) | set(facts().tests) <= words
    assert set(facts().features) <= words
    assert {"mpijob", "jobset", "slurm", "none"} <= words


def containers(made: str) -> dict[str, dict[str, list[str]]]:
    """Role → variables of the container's environment, of the objects of Kubernetes."""
    found: dict[str, dict[str, list[str]]] = {"launcher": {}, "worker": {}}
    for document in yaml.safe_load_all(made):
        if document["kind"] == "MPIJob":
            roles = {k.lower(): v["template"] for k, v in document["spec"]["mpiReplicaSpecs"].items()}
        elif document["kind"] == "JobSet":
            roles = {j["name"]: j["template"]["spec"]["template"] for j in document["spec"]["replicatedJobs"]}
        else:
            continue
        for role, template in roles.items():
            for entry in template["spec"]["containers"][0].get("env", []):
                found[role].setdefault(entry["name"], []).append(entry["value"])
    return found


def places(made: str) -> dict[str, dict[str, list[str]]]:
    """Scope → variables that have a value there, with each value they get."""
    ranks = exports(rank_script(made))
    if not made.startswith("#!"):
        env = containers(made)
        return {"rank": ranks, "container": env["worker"], "launcher": env["launcher"]}
    outside = exports(made.replace(rank_script(made), ""))
    listed = re.findall(r"--container-env=(\S+)", made)
    names = set(listed[0].split(",")) if listed else set()
    return {
        "rank": ranks,
        "container": {n: v for n, v in outside.items() if n in names},
        "batch": {n: v for n, v in outside.items() if n not in names},
    }


@pytest.mark.parametrize("line", RANDOM)
def test_every_variable_lands_once_in_its_scope(line: str) -> None:
    made, found = job(line), places(text(line))
    wanted: dict[str, dict[str, str]] = {scope: {} for scope in ("rank", "container", "launcher", "batch")}
    for one in made.env:
        if one.value is not None:
            wanted[one.entry.scope][one.entry.name] = one.value
    for scope, variables in found.items():
        assert set(variables) == set(wanted[scope])
        for name, values in variables.items():
            assert len(values) == 1
            plain = values[0].partition("${")[0] if name == "LD_LIBRARY_PATH" else values[0]
            assert wanted[scope][name] in (plain, shlex.split(plain)[0] if plain else "")
    assert not any(wanted[scope] for scope in set(wanted) - set(found))


@pytest.mark.parametrize("line", [line for line in (*RANDOM, *REFERENCE.values()) if not line.startswith("slurm")])
def test_objects_have_the_fields_of_the_references(line: str) -> None:
    for document in yaml.safe_load_all(text(line)):
        assert not mistakes(document, document["kind"])


def test_the_references_refuse_what_they_do_not_have() -> None:
    document = next(yaml.safe_load_all(text(REFERENCE["h100-64-mpijob.yaml"])))
    document["spec"]["slotsPerWorkers"] = 8
    document["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = "8"
    document["spec"]["launcherCreationPolicy"] = "Later"
    assert mistakes(document, "MPIJob") == [
        ".spec.launcherCreationPolicy: 'Later' is not one of AtStartup|WaitForWorkersReady",
        ".spec.mpiReplicaSpecs.Worker.replicas: '8' is no int",
        ".spec.slotsPerWorkers: is unknown",
    ]


def scripts(line: str, folder: Path) -> list[Path]:
    """Every script of a job, as files: the batch script or those of containers, and what ranks run."""
    made = text(line)
    found = [made] if made.startswith("#!") else []
    for document in [] if found else yaml.safe_load_all(made):
        stack: list[Any] = [document]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                if node.get("command") == ["/bin/bash", "-c"] and "args" in node:
                    found += node["args"]
                stack += node.values()
            elif isinstance(node, list):
                stack += node
    ranks = re.sub("(?m)^ *", "", rank_script(made))
    files = []
    for i, script in enumerate([*found, ranks]):
        files.append(folder / f"{abs(hash(line))}-{i}.sh")
        files[-1].write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
    return files


@pytest.mark.programs
def test_scripts_pass_bash_and_shellcheck(tmp_path: Path) -> None:
    files = [file for line in (*REFERENCE.values(), *RANDOM[:60]) for file in scripts(line, tmp_path)]
    assert len(files) > 100
    for file in files:
        done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    # SC1091: files of the container or the node are not here.
    command = [str(SHELLCHECK), "--exclude=SC1091", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stdout


def test_equal_arguments_give_equal_text_and_the_order_of_features_is_nothing() -> None:
    one = text("mpijob --profile gb300-nvl72 --fabric ib --racks 2 --with debug,dra --set name=it")
    other = text("mpijob --profile gb300-nvl72 --fabric ib --racks 2 --with dra,debug --set name=it")
    assert one.splitlines()[1:] == other.splitlines()[1:]
    assert one == text("mpijob --profile gb300-nvl72 --fabric ib --racks 2 --with debug,dra --set name=it")


def test_a_thousand_jobs_take_seconds() -> None:
    lines = list(REFERENCE.values()) * 32
    job(lines[0])
    start = time.perf_counter()
    for line in lines[:1000]:
        text(line)
    assert time.perf_counter() - start < 8  # a quarter of this on a machine that does nothing else


NEW = [
    "slurm --profile h200 --fabric ib",
    "mpijob --profile h200 --fabric ib --with sharp",
    "mpijob --profile gb200-nvl72 --fabric ib --racks 1 --with dra",
    "mpijob --profile gb200-nvl72 --fabric ib --racks 2 --with dra",
    "slurm --profile gb200-nvl72 --fabric ib --racks 2",
    "slurm --profile gb300-nvl72 --fabric ib --racks 2 --with sharp",
    "slurm --profile gb200-nvl72 --fabric ib --nodes 16 --container none",
    "jobset --profile h100 --fabric roce",
    "mpijob --profile h100 --fabric roce --with gdrcopy",
    "slurm --profile a100-sxm --fabric ib --with sharp",
    "slurm --profile a40 --fabric ethernet",
    "mpijob --profile p5 --fabric efa --image example.com/efa:1",
    "mpijob --profile a3-mega --fabric tcpxo",
    "jobset --profile a4 --fabric gib",
    "slurm --profile a4 --fabric gib",
    "mpijob --profile gh200 --fabric ethernet",
    "mpijob --profile gb300-nvl72 --fabric roce --racks 1 --with nics --image example.com/hpcx:nccl2.29.2",
    "mpijob --profile gb300-nvl72 --fabric roce --racks 2 --with tuning --image example.com/hpcx:nccl2.29.2",
]  # fmt: skip


@pytest.mark.parametrize("line", NEW)
def test_combinations_that_the_reference_lacks(line: str) -> None:
    assert text(line)


def test_segments_and_racks() -> None:
    two = text("slurm --profile gb200-nvl72 --fabric ib --racks 2")
    assert "#SBATCH --nodes=36\n" in two
    assert "#SBATCH --segment=18\n" in two
    uneven = text("slurm --profile gb200-nvl72 --fabric ib --nodes 32")
    assert "#SBATCH --segment=16\n" in uneven
    assert "#SBATCH --segment=4\n" in text("slurm --profile gb200-nvl72 --fabric ib --nodes 4")
    spare = text("slurm --profile gb200-nvl72 --fabric ib --racks 1 --set rack-nodes=16")
    assert "#SBATCH --nodes=16\n" in spare
    assert "#SBATCH --segment" not in text("slurm --profile h100 --fabric ib")


def test_efa_asks_for_as_many_cards_as_the_node_has() -> None:
    document = yaml.safe_load(text("mpijob --profile p5 --fabric efa --image example.com/efa:1"))
    container = document["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "32"
    assert "export NCCL_NET_PLUGIN=ofi" in rank_script(
        text("mpijob --profile p5 --fabric efa --image example.com/efa:1")
    )


def test_the_host_chooses_the_plug_in_and_says_what_it_wants_first() -> None:
    script = re.sub("(?m)^ *", "", rank_script(text("jobset --profile a4 --fabric gib")))
    assert script.splitlines()[1] == ". /usr/local/gib/scripts/set_nccl_env.sh"
    assert "NCCL_NET_PLUGIN" not in exports(script)


def test_the_library_path_reaches_ranks_under_all_schedulers() -> None:
    for scheduler in ("mpijob", "jobset", "slurm"):
        made = text(f"{scheduler} --profile h100 --fabric roce --set plugin=spcx")
        value = exports(rank_script(made))["LD_LIBRARY_PATH"]
        assert value == ["/opt/hpcx/nccl_spectrum-x_plugin/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"]
        assert ("-x LD_LIBRARY_PATH" in made) == (scheduler != "slurm")


def test_user_variables_land_in_the_scope_they_name() -> None:
    made = text("slurm --profile h100 --fabric ib --set container:NVIDIA_GDRCOPY=enabled --set batch:TMPDIR=/scratch")
    found = places(made)
    assert found["container"] == {"NVIDIA_GDRCOPY": ["enabled"]}
    assert found["batch"] == {"TMPDIR": ["/scratch"]}


def test_names_that_may_be_set_anew_are_four() -> None:
    assert len(OVERRIDABLE) == 4
    made = job("mpijob --profile h100 --fabric ib --set NCCL_IB_HCA==mlx5_0,mlx5_3")
    assert next(one.value for one in made.env if one.entry.name == "NCCL_IB_HCA") == "=mlx5_0,mlx5_3"


def test_another_value_stops_and_says_how_to_insist() -> None:
    line = "mpijob --profile h100 --fabric ib --set UCX_TLS{}=rc"
    with pytest.raises(ConfigError, match=r"UCX_TLS has two values: 'tcp' .*'rc'.* write --set UCX_TLS:=rc"):
        job(line.format(""))
    assert [one.value for one in job(line.format(":")).env if one.entry.name == "UCX_TLS"] == ["rc"]


def copy_of_facts(folder: Path) -> Path:
    for file in (ROOT / "jobs").rglob("*.*"):
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    return folder / "jobs"


def refused(folder: Path, line: str) -> str:
    wanted = request(line)
    with pytest.raises(ConfigError) as caught:
        resolve.resolve(wanted, machines()[wanted.profile], load.load_facts(folder), Offer())
    return str(caught.value)


def test_layers_that_disagree_stop_with_both_places(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    with (folder / "features/strict.yaml").open("a") as file:
        file.write("  - {name: UCX_TLS, value: rc, why: because}\n")
    said = refused(folder, "mpijob --profile h100 --fabric ib --with strict")
    assert re.match(r".*/features/strict\.yaml:8: UCX_TLS has two values: 'tcp' .* and 'rc' .*feature strict", said)


@pytest.mark.parametrize(
    ("line", "scope", "said"),
    [
        ("slurm --profile h100 --fabric ib --with strict", "launcher", "Slurm starts ranks without one"),
        ("slurm --profile h100 --fabric ib --with strict --container none", "container", "there is no container"),
        ("mpijob --profile h100 --fabric ib --with strict", "batch", "mpijob has no batch script"),
    ],
)
def test_a_scope_without_a_place_stops(tmp_path: Path, line: str, scope: str, said: str) -> None:
    folder = copy_of_facts(tmp_path)
    with (folder / "features/strict.yaml").open("a") as file:
        file.write(f"  - {{name: SOMETHING, value: x, scope: {scope}, why: because}}\n")
    found = refused(folder, line)
    assert ".yaml:8: SOMETHING: scope" in found
    assert said in found


def test_mistakes_in_facts_have_their_line(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    (folder / "clusters/mine.yaml").write_text("title: Mine\nintreface: eth0\nfabrics:\n  ip: {}\n")
    (folder / "features/bad.yaml").write_text('title: Bad\nenv:\n  - {name: A B, value: "it\'s", why: x}\n')
    with pytest.raises(ConfigError) as caught:
        load.load_facts(folder)
    lines = str(caught.value).splitlines()
    assert any(re.search(r"mine\.yaml:2: intreface: unknown key; did you mean 'interface'\?", one) for one in lines)
    assert any(re.search(r"bad\.yaml:3: env\.0\.name", one) for one in lines)
    assert any(re.search(r"bad\.yaml:3: env\.0\.value", one) for one in lines)
    (folder / "features/bad.yaml").unlink()
    (folder / "clusters/mine.yaml").write_text("title: Mine\nfabrics:\n  ip: {}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: fabrics\.ip: there is no such fabric"):
        load.load_facts(folder)


def messages(line: str) -> list[str]:
    return list(job(line).messages)


def test_lint_knows_names_and_defaults() -> None:
    base = "mpijob --profile h100 --fabric ib"
    assert messages(base) == []
    assert messages(f"{base} --set NCCL_IB_NET_LATENCY=50") == [
        "warning: --set NCCL_IB_NET_LATENCY: NCCL 2.28.3 does not read NCCL_IB_NET_LATENCY"
    ]
    assert "did you mean 'NCCL_IB_TIMEOUT'" in messages(f"{base} --set NCCL_IB_TIMOUT=22")[0]
    assert messages(f"{base} --set NCCL_SHM_DISABLE=0") == [
        "note: --set NCCL_SHM_DISABLE: NCCL_SHM_DISABLE=0 is the default of NCCL 2.28.3"
    ]
    assert messages(f"{base} --set NCCL_TESTS_SPLIT=AND7 --set NCCL_OFI_X=1") == []


def test_lint_knows_releases() -> None:
    old, new = "example.com/hpcx:nccl2.26.2", "example.com/hpcx:nccl2.28.3"
    line = "mpijob --profile h100 --fabric ib --set NCCL_NET_GDR_C2C=1 --image "
    assert messages(line + old) == []
    assert messages(line + new) == ["note: --set NCCL_NET_GDR_C2C: NCCL_NET_GDR_C2C=1 is the default of NCCL 2.28.3"]
    gone = messages(f"mpijob --profile h100 --fabric ib --set NCCL_PROXY_PROFILE=x --image {new}")
    assert "releases 2.21.5 to 2.22.3 do" in gone[0]
    assert messages("mpijob --profile h100 --fabric ib --image example.com/x:1") == [
        "note: which NCCL runs is not known, so 2.30.7 is assumed; say it with --nccl"
    ]


def test_the_table_of_parameters() -> None:
    table = facts().parameters
    assert nearest(table, "2.99.1") == "2.30.7"
    assert nearest(table, "2.28.5") == "2.28.3"
    assert nearest(table, "2.1.0") == "2.21.5"
    assert default(table, "NCCL_NET_GDR_C2C", "2.26.2") == "0"
    assert default(table, "NCCL_P2P_NET_CHUNKSIZE", "2.30.7") == "131072"
    assert default(table, "NCCL_ALGO", "2.30.7") is None
    assert table.names["NCCL_IB_HCA"].documented
    assert not table.names["NCCL_GDRCOPY_ENABLE"].documented
    assert len(table.names) > 250


def test_no_fact_of_ours_is_unknown_to_nccl() -> None:
    for line in (*REFERENCE.values(), *RANDOM):
        assert [m for m in messages(line) if m.startswith("warning")] == []


def offer(plan: Plan, project: Any) -> Offer:
    provides = {name: document.model.provides for name, document in project.components.items()}
    return Offer(plan.targets, provides, project.matrix.model.gpu_architectures)


def chosen(line: str, offer: Offer) -> Job:
    wanted = request(line)
    plain = type(wanted)(**{**wanted.__dict__, "image": None if wanted.image == IMAGE else wanted.image})
    return resolve.resolve(plain, machines()[plain.profile], facts(), offer)


def test_without_image_the_newest_that_fits(full_plan: Plan, project: Any) -> None:
    have = offer(full_plan, project)
    found = chosen("mpijob --profile h100 --fabric ib", have).image
    assert (
        found.reference == next(t for t in full_plan.targets if t.id == "hpcx-cuda13.4.2-ubuntu26.04-runtime").tags[-1]
    )
    assert found.nccl == project.matrix.model.versions["nccl"][0].version
    assert found.arches == ("amd64", "arm64")
    older = chosen("mpijob --profile h100 --fabric ib --set driver=570", have).image
    assert "cuda12.9.2" in older.reference
    with pytest.raises(ConfigError, match="runs on driver 500; give one with --image"):
        chosen("mpijob --profile h100 --fabric ib --set driver=500", have)
    with pytest.raises(ConfigError, match="has the plug-in 'ofi'; give one with --image"):
        chosen("mpijob --profile p5 --fabric efa", have)


def test_images_of_the_plan_are_known_by_id_and_tag(full_plan: Plan, project: Any) -> None:
    have = offer(full_plan, project)
    by_id = chosen("mpijob --profile h100 --fabric ib --image open-cuda13.5-debian13-runtime", have)
    target = next(t for t in full_plan.targets if t.id == "open-cuda13.5-debian13-runtime")
    assert by_id.image.reference == target.tags[-1]
    assert {"OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_plm_ssh_args"} <= {e.entry.name for e in of(by_id.env, "launcher")}
    by_tag = chosen(f"mpijob --profile h100 --fabric ib --image {target.tags[0]}", have)
    assert by_tag.image.reference == target.tags[0]
    assert by_tag.image.nccl == by_id.image.nccl
    with pytest.raises(ConfigError, match="no plug-in 'ibext' in it; known: none|no plug-in 'ibext' in it"):
        chosen("mpijob --profile h100 --fabric ib --with sharp --image open-cuda13.5-debian13-runtime", have)


def test_enroot_sets_the_registry_off() -> None:
    assert enroot("ghcr.io/team/image:1") == "docker://ghcr.io#team/image:1"
    assert enroot("localhost:5000/image:1") == "docker://localhost:5000#image:1"
    assert enroot("team/image:1") == "docker://team/image:1"


BAD = [
    ("mpijob --profile h101", "no profile 'h101'; did you mean 'h100'?"),
    ("mpiob --profile h100", "job mpiob: there is none; did you mean 'mpijob'?"),
    ("mpijob --profile mi300x", "nccl-tests runs on NVIDIA GPUs only"),
    ("mpijob --profile h100 --fabric rocee", "--fabric rocee: there is none; did you mean 'roce'?"),
    ("mpijob --profile h100 --cluster corewave", "did you mean 'coreweave'?"),
    ("mpijob --profile h100 --test allreduce", "did you mean 'all-reduce'?"),
    ("mpijob --profile h100 --with shrap", "--with shrap: there is none; did you mean 'sharp'?"),
    ("slurm --profile h100 --container docker", "--container docker: it is pyxis or none"),
    ("slurm --profile gb200-nvl72 --nodes 19", "take 18 (1 * 18) or 20 (2 * 10)"),
    ("slurm --profile gb200-nvl72 --nodes 2 --racks 1", "--nodes and --racks exclude each other"),
    ("slurm --profile h100 --nodes 0", "--nodes 0: at least 1"),
    ("slurm --profile h100 --racks 2", "--racks 2: NVLink of h100 ends at the node; take --nodes"),
    ("mpijob --profile h100 --fabric roce --with sharp", "--with sharp: only InfiniBand switches reduce"),
    ("mpijob --profile h100 --with sharp,gdrcopy", "the SHARP plug-in does not use GDRCopy"),
    ("mpijob --profile h100 --with sharp,noib", "SHARP is in the InfiniBand switches that noib does not use"),
    ("mpijob --profile h100 --with sharp --nodes 1", "nothing of one node passes a switch"),
    ("mpijob --profile gb200-nvl72 --with sharp", "takes a rack with NVLink across nodes for one node"),
    ("mpijob --profile h100 --with sharp --test collectives", "SHARP serves all_reduce, all_gather and reduce_scatter"),
    ("mpijob --profile h100 --with sharp --image x/hpcx:nccl2.21.5", "NCCL before 2.24 goes back to rings"),
    ("mpijob --profile gb300-nvl72 --with tuning", "NCCL has a tuner of its own from 2.30.3 on"),
    ("mpijob --profile h100 --with dra", "so there is no channel to allocate"),
    ("slurm --profile gb200-nvl72 --with dra", "it is a part of Kubernetes"),
    ("mpijob --profile gb200-nvl72 --nodes 4 --with multirack", "fit one rack; take --racks 2"),
    ("mpijob --profile h100 --fabric ethernet --with gdrcopy", "NCCL uses GDRCopy with its InfiniBand"),
    ("mpijob --profile a40 --fabric ib", "the profile's cards do neither"),
    ("mpijob --profile h100 --fabric efa", "p4d, p4de, p5, p5en"),
    ("slurm --profile a3-mega --fabric tcpxo", "its receive daemon runs beside the benchmark"),
    ("mpijob --profile h100 --fabric gib", "only A3 Ultra (H200), A4 (B200)"),
    ("mpijob --profile gb200-nvl72 --image x/y:1-amd64", "is for amd64, but gb200-nvl72 is arm64"),
    ("mpijob --profile h100 --image x_space_y", "not the name of an image"),
    ("slurm --profile h100 --container none --image x/y:1", "the programs of the nodes run, and no image"),
    ("mpijob --profile h100 --set NCCL_X=it's", 'NCCL_X: "\'" in a value'),
    ("mpijob --profile h100 --set NCCL_X=a\nb", "NCCL_X: '\\n' in a value"),
    ("mpijob --profile h100 --set NCCL_X=a\"b", "NCCL_X: '\"' in a value"),
    ("mpijob --profile h100 --set NCCL_X=$HOME", "NCCL_X: '$' in a value"),
    ("mpijob --profile h100 --set nonsense", "write it as name=value"),
    ("mpijob --profile h100 --set minuts=3", "--set minuts: no such parameter; did you mean 'minutes'?"),
    ("mpijob --profile h100 --set minutes=long", "--set minutes='long': must match"),
    ("mpijob --profile h100 --set rnak:X=1", "no scope 'rnak'; did you mean 'rank'?"),
    ("slurm --profile h100 --container none --set container:X=1", "there is no container"),
    ("slurm --profile h100 --set launcher:X=1", "Slurm starts ranks without one"),
    ("mpijob --profile h100 --set batch:X=1", "mpijob has no batch script"),
    ("mpijob --profile h100 --set NCCL_NET_PLUGIN=none --set plugin=ofi --image x/hpcx:1", "no plug-in 'ofi' in it"),
    ("mpijob --profile h100 --test collectives --set min-bw=100", "reach different rates"),
    ("mpijob --profile gb300-nvl72 --with dra,debug,nics --test reduce-scatter-and-more", "there is none"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), BAD)
def test_bad_input_is_one_line_and_status_2(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("_space_", " ") for word in line.split(" ")]  # quotes and line ends are part of words
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["imagebuild", "job", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    errors = [one for one in output.err.splitlines() if one.startswith("error: ")]
    assert len(errors) == 1
    assert said in output.err


def test_the_command_writes_what_it_would_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["imagebuild", "job", "slurm", "--profile", "h100", "--set", "NCCL_FOO=1", "--with", "debug"]
    for extra in ([], ["-o", str(tmp_path / "job.sh")]):
        monkeypatch.setattr("sys.argv", [*words, *extra])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 0
    output = capsys.readouterr()
    assert (tmp_path / "job.sh").read_text() == output.out
    assert output.out.startswith("#!/bin/bash\n# imagebuild job slurm --profile h100 --fabric ib --with debug")
    assert output.err.count("does not read NCCL_FOO") == 2


def test_collect_says_how_the_result_comes_back() -> None:
    for scheduler in ("mpijob", "jobset", "slurm"):
        plain = text(f"{scheduler} --profile h100 --fabric ib")
        asked = text(f"{scheduler} --profile h100 --fabric ib --collect")
        extra = set(asked.splitlines()) - set(plain.splitlines())
        assert any("imagebuild report all-reduce-64-h100-ib-8n" in one for one in extra)
        assert all(one.startswith("# ") for one in extra)


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


MODELS = [Stack, Fabric, Feature, Cluster, JobTest, SchedulerFacts, NodeFacts]


@pytest.mark.parametrize("model", MODELS)
def test_schemas(model: type[Model], golden: Callable[[str, str], None]) -> None:
    name = model.__name__.removesuffix("Facts").removeprefix("Job").lower()
    golden(f"schemas/job-{name}.json", json.dumps(model.model_json_schema(by_alias=True), indent=1) + "\n")


def test_files_of_facts_name_their_schema() -> None:
    for file in (ROOT / "jobs").rglob("*.yaml"):
        line = file.read_text().splitlines()[0]
        found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", line)
        assert found, file
        assert (file.parent / found[1]).resolve().is_file(), file


def test_offer_without_a_matrix_is_empty(tmp_path: Path) -> None:
    assert cli_job.offer(tmp_path / "matrix.yaml", tmp_path, tmp_path / "lock") == Offer()
