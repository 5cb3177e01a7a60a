"""The 32 jobs of the reference, made from facts: golden files, and what was wrong with them."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.jobs import header
from tests.conftest import ROOT
from tests.unit.job_fakes import exports, job, rank_script, request, text

REFERENCE: dict[str, str] = yaml.safe_load((ROOT / "tests/data/jobs-reference.yaml").read_text())
MPIJOBS = [line for line in REFERENCE.values() if line.startswith("mpijob")]
SLURM = [line for line in REFERENCE.values() if line.startswith("slurm")]


def objects(line: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text(line)))


def spec(line: str, role: str) -> dict[str, Any]:
    found = objects(line)[-1]["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def test_there_are_18_mpijobs_and_14_scripts() -> None:
    assert (len(MPIJOBS), len(SLURM)) == (18, 14)


@pytest.mark.parametrize("name", REFERENCE)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"tests/golden/jobs/{name}", text(REFERENCE[name]))


@pytest.mark.parametrize("name", REFERENCE)
def test_the_documentation_has_the_command(name: str) -> None:
    shown = (ROOT / "docs/jobs.md").read_text()
    assert f"| `{name}` | `{REFERENCE[name]}` |" in shown


@pytest.mark.parametrize("line", REFERENCE.values())
def test_the_header_has_the_command(line: str) -> None:
    head = next(one for one in text(line).splitlines() if one.startswith("# imagebuild job "))
    again = request(shlex.join(shlex.split(head.removeprefix("# imagebuild job "))))
    assert again == request(line)
    assert head == f"# {header.command(again)}"


def test_names_are_unique_and_say_what_runs() -> None:
    names = [job(line).name for line in REFERENCE.values()]
    kubernetes = names[:18]
    assert len(set(kubernetes)) == 18
    assert "all-reduce-72-gb300-roce-dra-18n" in names
    for line, name in zip(REFERENCE.values(), names, strict=True):
        made = job(line)
        assert {str(made.ranks), made.machine.gpu, made.fabric.short, f"{made.scale.nodes}n"} <= set(name.split("-"))


@pytest.mark.parametrize("line", MPIJOBS)
def test_nothing_of_other_jobs_or_namespaces(line: str) -> None:
    for found in objects(line):
        assert "namespace" not in found["metadata"]
    worker = spec(line, "Worker")
    name = objects(line)[-1]["metadata"]["name"]
    selectors = [c["labelSelector"] for c in worker.get("topologySpreadConstraints", [])]
    terms = worker["affinity"].get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    for selector in [*selectors, *(t["labelSelector"] for t in terms)]:
        assert selector["matchLabels"]["training.kubeflow.org/job-name"] == name


@pytest.mark.parametrize("line", MPIJOBS)
def test_the_launcher_waits_and_knows_the_ranks(line: str) -> None:
    found = objects(line)[-1]["spec"]
    assert found["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert found["runPolicy"]["backoffLimit"] == 0
    worker = found["mpiReplicaSpecs"]["Worker"]
    ranks = worker["replicas"] * found["slotsPerWorker"]
    script = spec(line, "Launcher")["containers"][0]["args"][0]
    assert f"-np {ranks} " in script


@pytest.mark.parametrize("line", MPIJOBS)
def test_requests_are_limits_everywhere(line: str) -> None:
    for role in ("Launcher", "Worker"):
        for container in spec(line, role)["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert all(isinstance(value, str) for value in container["resources"]["limits"].values())


@pytest.mark.parametrize("line", REFERENCE.values())
def test_one_policy_for_mpi_everywhere(line: str) -> None:
    found = exports(rank_script(text(line)))
    assert found["UCX_TLS"] == ["tcp"]
    assert found["UCX_NET_DEVICES"] == ["eth0"]
    assert found["OMPI_MCA_coll_hcoll_enable"] == ["0"]
    assert ("PMIX_MCA_gds" in found) == line.startswith("slurm")


@pytest.mark.parametrize("line", REFERENCE.values())
def test_sharp_is_required_where_it_is_asked_for(line: str) -> None:
    found = exports(rank_script(text(line)))
    asked = "sharp" in line
    assert found["NCCL_NET_PLUGIN"] == ["ibext" if asked else "none"]
    assert ("NCCL_COLLNET_ENABLE" in found) == asked
    assert ("SHARP_COLL_ENABLE_PCI_RELAXED_ORDERING" in found) == asked
    algorithms = found.get("NCCL_ALGO", [""])[0]
    assert bool(algorithms) == asked
    assert "ring" not in algorithms
    assert ("nvls" in algorithms) == (asked and "a100" not in line)


def test_no_network_where_none_is_asked_for() -> None:
    for name in ("a100-64-noib-mpijob.yaml", "a40-64-mpijob.yaml"):
        found = exports(rank_script(text(REFERENCE[name])))
        assert found["NCCL_IB_DISABLE"] == ["1"]
        assert "NCCL_IB_HCA" not in found
        assert "rdma/ib" not in spec(REFERENCE[name], "Worker")["containers"][0]["resources"]["limits"]


def test_a_feature_only_adds() -> None:
    plain = text(REFERENCE["a100-64-mpijob.yaml"])
    other = text(REFERENCE["a100-64-gdrcopy-mpijob.yaml"])
    less = exports(rank_script(plain))
    more = exports(rank_script(other))
    assert set(less) - {"NCCL_DEBUG"} <= set(more)
    assert set(more) - set(less) == {"NCCL_GDRCOPY_ENABLE", "NCCL_DEBUG_SUBSYS"}
    worker = [spec(REFERENCE[n], "Worker") for n in ("a100-64-mpijob.yaml", "a100-64-gdrcopy-mpijob.yaml")]
    env = worker[1]["containers"][0].pop("env")
    assert env == [{"name": "NVIDIA_GDRCOPY", "value": "enabled"}]
    assert worker[0] == worker[1]


@pytest.mark.parametrize("line", [line for line in REFERENCE.values() if "gb" in line])
def test_nvlink_across_nodes_is_proven_and_its_channel_is_the_containers(line: str) -> None:
    made = text(line)
    assert "must_show 'MNNVL 1'" in made
    found = exports(rank_script(made))
    assert "NVIDIA_IMEX_CHANNELS" not in found
    assert not {"NCCL_SHM_DISABLE", "NCCL_NET_GDR_C2C", "NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE"} & set(found)
    assert found["NCCL_DEBUG"] == ["INFO"]
    if line.startswith("mpijob"):
        env = {e["name"] for e in spec(line, "Worker")["containers"][0].get("env", [])}
        assert ("NVIDIA_IMEX_CHANNELS" in env) == ("dra" not in line)


def test_fabrics_have_nodes_of_their_own() -> None:
    def flavor(name: str) -> list[str]:
        terms = spec(REFERENCE[name], "Worker")["affinity"]["nodeAffinity"]
        expressions = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0][
            "matchExpressions"
        ]
        return next(list(e["values"]) for e in expressions if e["key"] == "backend.coreweave.cloud/flavor")

    assert flavor("gb300-nvl72-mpijob.yaml") == ["infiniband"]
    assert flavor("gb300-roce-nvl72-mpijob.yaml") == flavor("gb300-roce-nvl72-mpijob-dra.yaml") == ["roce"]


@pytest.mark.parametrize("line", SLURM)
def test_scripts_ask_for_the_same_of_slurm(line: str) -> None:
    lines = [one for one in text(line).splitlines() if one.startswith("#SBATCH ")]
    options = {one.removeprefix("#SBATCH --").partition("=")[0] for one in lines}
    base = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "exclusive"}
    base |= {"distribution", "time", "output"}
    assert options == base | ({"segment"} if "gb" in line else set())
    assert "#SBATCH --mem=0" in lines
    assert "  --cpus-per-task=8" in text(line).splitlines()


def test_sweeps_are_the_same_under_all_schedulers() -> None:
    for line in REFERENCE.values():
        assert '_perf" -b 512M -e 8G -f 2 -g 1 -c 1' in text(line)


def test_every_finding_is_in_the_documentation() -> None:
    shown = (ROOT / "docs/jobs-findings.md").read_text()
    ids = Path(ROOT / "tests/data/jobs-findings.txt").read_text().split()
    assert len(ids) == 50
    for one in ids:
        assert shown.count(f"| {one} |") == 1
