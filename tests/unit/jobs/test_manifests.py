"""Manifests and batch scripts: the 32 jobs of the reference as golden files, and properties of random jobs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.jobs import Offer, enroot_reference, job_text, load_facts, resolve_job
from tests import catalog_samples
from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import (
    REFERENCE,
    container_variables,
    copy_of_facts,
    facts,
    hardware,
    job,
    objects,
    pods,
    random_lines,
    rank_exports,
    rank_script,
    request,
    text,
)
from tests.unit.jobs.kubernetes_fields import mistakes

SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"
EVERY = [*random_lines(), *REFERENCE.values()]
KUBERNETES = [line for line in EVERY if not line.startswith("slurm")]
MPIJOBS = [line for line in REFERENCE.values() if line.startswith("mpijob")]
SLURM = [line for line in REFERENCE.values() if line.startswith("slurm")]


def test_there_are_18_mpijobs_and_14_scripts() -> None:
    assert (len(MPIJOBS), len(SLURM)) == (18, 14)


def test_random_jobs_reach_everything() -> None:
    """The properties would prove little if whole kinds of jobs were always refused."""
    words = {word for line in random_lines() for part in shlex.split(line) for word in part.split(",")}
    assert set(facts().fabrics) | set(facts().clusters) | set(facts().tests) <= words
    assert set(facts().features) <= words
    assert {"mpijob", "jobset", "slurm", "none"} <= words


# The text


@pytest.mark.parametrize("name", REFERENCE)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"tests/golden/jobs/{name}", text(REFERENCE[name]))


@pytest.mark.parametrize("name", REFERENCE)
def test_the_documentation_has_the_command(name: str) -> None:
    assert f"| `{name}` | `{REFERENCE[name]}` |" in (ROOT / "docs/jobs.md").read_text()


@pytest.mark.parametrize("line", REFERENCE.values())
def test_the_command_in_the_header_makes_the_job_again(line: str) -> None:
    command = next(row for row in text(line).splitlines() if row.startswith("# imagebuild job "))
    again = command.removeprefix("# imagebuild job ")
    assert request(again) == request(line)
    assert text(again) == text(line)


def test_names_are_unique_and_tell_what_runs() -> None:
    jobs = [job(line) for line in REFERENCE.values()]
    assert len({j.name for j in jobs[:18]}) == 18
    assert "all-reduce-72-gb300-roce-dra-18n" in {j.name for j in jobs}
    for j in jobs:
        assert {str(j.ranks), j.hardware.gpu, j.fabric.short, f"{j.scale.nodes}n"} <= set(j.name.split("-"))


def test_equal_arguments_give_equal_text_and_the_order_of_features_is_nothing() -> None:
    one = text("mpijob --profile gb300-nvl72 --fabric ib --racks 2 --with debug,dra --set name=it")
    other = text("mpijob --profile gb300-nvl72 --fabric ib --racks 2 --with dra,debug --set name=it")
    assert one.splitlines()[1:] == other.splitlines()[1:]
    assert one == text("mpijob --profile gb300-nvl72 --fabric ib --racks 2 --with debug,dra --set name=it")


def test_collect_adds_comments_that_tell_how_to_get_the_result() -> None:
    for scheduler in ("mpijob", "jobset", "slurm"):
        plain = text(f"{scheduler} --profile h100 --fabric ib")
        with_collect = text(f"{scheduler} --profile h100 --fabric ib --collect")
        added = set(with_collect.splitlines()) - set(plain.splitlines())
        assert any("imagebuild report all-reduce-64-h100-ib-8n" in line for line in added)
        assert all(line.startswith("# ") for line in added)


def test_a_thousand_jobs_take_seconds() -> None:
    lines = list(REFERENCE.values()) * 32
    job(lines[0])
    start = time.perf_counter()
    for line in lines[:1000]:
        text(line)
    assert time.perf_counter() - start < 8  # a quarter of this on a machine that does nothing else


# Objects of Kubernetes


@pytest.mark.parametrize("line", KUBERNETES)
def test_objects_have_the_fields_of_the_references(line: str) -> None:
    for document in objects(text(line)):
        assert not mistakes(document, document["kind"])


def test_the_references_refuse_what_they_do_not_have() -> None:
    document = objects(text(REFERENCE["h100-64-mpijob.yaml"]))[0]
    document["spec"]["slotsPerWorkers"] = 8
    document["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = "8"
    document["spec"]["launcherCreationPolicy"] = "Later"
    assert mistakes(document, "MPIJob") == [
        ".spec.launcherCreationPolicy: 'Later' is not one of AtStartup|WaitForWorkersReady",
        ".spec.mpiReplicaSpecs.Worker.replicas: '8' is not of type int",
        ".spec.slotsPerWorkers: is unknown",
    ]


@pytest.mark.parametrize("line", KUBERNETES)
def test_kubernetes_expands_nothing_in_scripts(line: str) -> None:
    """In arguments, Kubernetes takes `$$` for `$`, and `$(NAME)` for the value of a variable of the container."""
    manifest = text(line)
    assert "$$" not in manifest
    for names in container_variables(manifest).values():
        assert not [name for name in names if f"$({name})" in manifest]


@pytest.mark.parametrize("line", MPIJOBS)
def test_nothing_of_other_jobs_or_namespaces(line: str) -> None:
    manifest = text(line)
    for document in objects(manifest):
        assert "namespace" not in document["metadata"]
    name = objects(manifest)[-1]["metadata"]["name"]
    worker = pods(manifest)["worker"]
    selectors = [c["labelSelector"] for c in worker.get("topologySpreadConstraints", [])]
    terms = worker["affinity"].get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    for selector in [*selectors, *(term["labelSelector"] for term in terms)]:
        assert selector["matchLabels"]["training.kubeflow.org/job-name"] == name


@pytest.mark.parametrize("line", MPIJOBS)
def test_the_launcher_waits_and_knows_the_ranks(line: str) -> None:
    spec = objects(text(line))[-1]["spec"]
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert spec["runPolicy"]["backoffLimit"] == 0
    ranks = spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert f"-np {ranks} " in pods(text(line))["launcher"]["containers"][0]["args"][0]


@pytest.mark.parametrize("line", MPIJOBS)
def test_requests_are_limits_everywhere(line: str) -> None:
    for pod in pods(text(line)).values():
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert all(isinstance(value, str) for value in container["resources"]["limits"].values())


def test_fabrics_have_nodes_of_their_own() -> None:
    def flavor(name: str) -> list[str]:
        terms = pods(text(REFERENCE[name]))["worker"]["affinity"]["nodeAffinity"]
        selector = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]["matchExpressions"]
        return next(list(e["values"]) for e in selector if e["key"] == "backend.coreweave.cloud/flavor")

    assert flavor("gb300-nvl72-mpijob.yaml") == ["infiniband"]
    assert flavor("gb300-roce-nvl72-mpijob.yaml") == flavor("gb300-roce-nvl72-mpijob-dra.yaml") == ["roce"]


def test_values_of_a_cluster_are_read_back_from_yaml(tmp_path: Path) -> None:
    """Texts that YAML could read as something else, as value, in a list, and with several lines."""
    values = ["", "yes", "No", "null", "1", "1.5", "0x1", "1:30", "-c", "a: b", "a #b", "*a", "&a", "{a}", "é", "a'b",
              'a"b', "a\\b", "a\n\n  more\n", "two\nlines"]  # fmt: skip
    annotations = {f"note-{i}": value for i, value in enumerate(values)}
    one_line = [value for value in values if "\n" not in value]
    folder = copy_of_facts(tmp_path)
    cluster = {
        "title": "Ours",
        "fabrics": {"ib": {"pod": {"annotations": annotations}}},
        "nodes": {"h100": {"select": {"kind": one_line}}},
    }
    (folder / "clusters/ours.yaml").write_text(yaml.safe_dump(cluster))
    job_request = request("mpijob --profile h100 --fabric ib --cluster ours")
    manifest = job_text(resolve_job(job_request, hardware()["h100"], load_facts(folder), Offer()))
    worker = objects(manifest)[0]["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    assert worker["metadata"]["annotations"] == annotations
    selector = worker["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert selector["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == one_line


# Slurm


@pytest.mark.parametrize("line", SLURM)
def test_scripts_ask_for_the_same_of_slurm(line: str) -> None:
    lines = text(line).splitlines()
    options = {row.removeprefix("#SBATCH --").partition("=")[0] for row in lines if row.startswith("#SBATCH ")}
    base = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "exclusive"}
    base |= {"distribution", "time", "output"}
    assert options == base | ({"segment"} if "gb" in line else set())
    assert "#SBATCH --mem=0" in lines
    assert "  --cpus-per-task=8" in lines


def test_enroot_separates_the_registry_and_takes_a_digest_where_a_tag_stands() -> None:
    assert enroot_reference("ghcr.io/team/image:1") == "docker://ghcr.io#team/image:1"
    assert enroot_reference("localhost:5000/image:1") == "docker://localhost:5000#image:1"
    assert enroot_reference("team/image:1") == "docker://team/image:1"
    digest = catalog_samples.digest(1)
    assert enroot_reference(f"ghcr.io/team/image@{digest}") == f"docker://ghcr.io#team/image:{digest}"
    assert enroot_reference(f"localhost:5000/team/image:1.2@{digest}") == f"docker://localhost:5000#team/image:{digest}"


# What ranks get


@pytest.mark.parametrize("line", REFERENCE.values())
def test_one_policy_for_mpi_everywhere(line: str) -> None:
    variables = rank_exports(line)
    assert variables["UCX_TLS"] == ["tcp"]
    assert variables["UCX_NET_DEVICES"] == ["eth0"]
    assert variables["OMPI_MCA_coll_hcoll_enable"] == ["0"]
    assert ("PMIX_MCA_gds" in variables) == line.startswith("slurm")


@pytest.mark.parametrize("line", REFERENCE.values())
def test_sharp_is_required_where_it_is_asked_for(line: str) -> None:
    variables = rank_exports(line)
    asked = "sharp" in line
    assert variables["NCCL_NET_PLUGIN"] == ["ibext" if asked else "none"]
    assert ("NCCL_COLLNET_ENABLE" in variables) == asked
    assert ("SHARP_COLL_ENABLE_PCI_RELAXED_ORDERING" in variables) == asked
    algorithms = variables.get("NCCL_ALGO", [""])[0]
    assert bool(algorithms) == asked
    assert "ring" not in algorithms
    assert ("nvls" in algorithms) == (asked and "a100" not in line)


def test_no_network_where_none_is_asked_for() -> None:
    for name in ("a100-64-noib-mpijob.yaml", "a40-64-mpijob.yaml"):
        variables = rank_exports(REFERENCE[name])
        assert variables["NCCL_IB_DISABLE"] == ["1"]
        assert "NCCL_IB_HCA" not in variables
        worker = pods(text(REFERENCE[name]))["worker"]
        assert "rdma/ib" not in worker["containers"][0]["resources"]["limits"]


def test_a_feature_only_adds() -> None:
    plain, gdrcopy = REFERENCE["a100-64-mpijob.yaml"], REFERENCE["a100-64-gdrcopy-mpijob.yaml"]
    less, more = set(rank_exports(plain)), set(rank_exports(gdrcopy))
    assert less - {"NCCL_DEBUG"} <= more
    assert more - less == {"NCCL_GDRCOPY_ENABLE", "NCCL_DEBUG_SUBSYS"}
    worker, changed = (pods(text(line))["worker"] for line in (plain, gdrcopy))
    assert changed["containers"][0].pop("env") == [{"name": "NVIDIA_GDRCOPY", "value": "enabled"}]
    assert worker == changed


@pytest.mark.parametrize("line", [line for line in REFERENCE.values() if "gb" in line])
def test_nvlink_across_nodes_is_proven_and_its_channel_is_the_containers(line: str) -> None:
    variables = rank_exports(line)
    assert "must_show 'MNNVL 1'" in text(line)
    assert "NVIDIA_IMEX_CHANNELS" not in variables
    assert not {"NCCL_SHM_DISABLE", "NCCL_NET_GDR_C2C", "NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE"} & set(variables)
    assert variables["NCCL_DEBUG"] == ["INFO"]
    if line.startswith("mpijob"):
        assert ("NVIDIA_IMEX_CHANNELS" in container_variables(text(line))["worker"]) == ("dra" not in line)


def test_sweeps_are_the_same_under_all_schedulers() -> None:
    for line in REFERENCE.values():
        assert '_perf" -b 512M -e 8G -f 2 -g 1 -c 1' in text(line)


def test_every_finding_is_in_the_documentation() -> None:
    page = (ROOT / "docs/jobs-findings.md").read_text()
    findings = (ROOT / "tests/data/jobs-findings.txt").read_text().split()
    assert len(findings) == 50
    for finding in findings:
        assert page.count(f"| {finding} |") == 1


# Scripts


def script_files(line: str, folder: Path) -> list[Path]:
    """Every script of a job, as files: the batch script or those of containers, and what ranks run."""
    job_text = text(line)
    scripts = [job_text] if job_text.startswith("#!") else []
    nodes: list[Any] = [] if scripts else list(objects(job_text))
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if node.get("command") == ["/bin/bash", "-c"] and "args" in node:
                scripts += node["args"]
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    files = []
    for i, script in enumerate([*scripts, re.sub("(?m)^ *", "", rank_script(job_text))]):
        files.append(folder / f"{abs(hash(line))}-{i}.sh")
        files[-1].write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
    return files


@pytest.mark.programs
def test_scripts_pass_bash_and_shellcheck(tmp_path: Path) -> None:
    lines = (*REFERENCE.values(), *random_lines()[:60])
    files = [file for line in lines for file in script_files(line, tmp_path)]
    assert len(files) > 100
    for file in files:
        done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    # SC1091: files of the container or the node are not here.
    command = [str(SHELLCHECK), "--exclude=SC1091", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stdout
