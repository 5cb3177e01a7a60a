"""Manifests and batch scripts: the 32 jobs of the reference as golden files, and properties of random jobs."""

from __future__ import annotations

import shlex
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.jobs.facts import load_facts
from imagebuild.jobs.manifest import job_text
from imagebuild.jobs.offer import enroot_reference
from tests import catalog_samples
from tests.conftest import ROOT, data, ran
from tests.unit.jobs.job_fakes import (
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
    rank_script,
    text,
    variables_by_scope,
)
from tests.unit.jobs.kubernetes_fields import mistakes

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

HOSTILE = [
    "", "yes", "1.5", "1:30", "-c", "a: b", "a #b", "*a", "{a}", "é", "a'b", "a\\b", "$(echo > x)", "{{ name }}",
    "a\u2028kind: Pod", "\ufeffa", "'; echo > x; '", '"; echo > x; "',
]  # fmt: skip
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
        env, errors = {"PATH": "/nowhere", "SLURM_SUBMIT_DIR": "."}, ""
        for script in (outer_script(made), rank_script(made)):
            errors += ran("/bin/bash", "-c", script, "rank", "all_reduce", env=env, cwd=tmp_path).stderr
        assert f"/p/{words}/all_reduce_perf: No such file" in errors
        assert [path.name for path in tmp_path.iterdir()] == ["jobs"]


# Slurm


def test_enroot_separates_the_registry_and_takes_a_digest_where_a_tag_stands() -> None:
    digest = catalog_samples.digest(1)
    for reference, address in {
        "ghcr.io/team/image:1": "ghcr.io#team/image:1", "localhost:5000/image:1": "localhost:5000#image:1",
        "team/image:1": "team/image:1", f"localhost:5000/a:1.2@{digest}": f"localhost:5000#a:{digest}",
    }.items():  # fmt: skip
        assert enroot_reference(reference) == f"docker://{address}"


def test_every_finding_is_in_the_documentation() -> None:
    page = (ROOT / "tests/data/jobs-findings.md").read_text()
    findings = (ROOT / "tests/data/jobs-findings.txt").read_text().split()
    assert len(findings) == 50
    assert [page.count(f"| {finding} |") for finding in findings] == [1] * 50


# Scripts


@pytest.mark.programs
def test_scripts_pass_bash_and_shellcheck(tmp_path: Path) -> None:
    """The batch script or those of containers, and what ranks run."""
    files: list[Path] = []
    for made in map(text, (*REFERENCE.values(), *random_lines())):
        is_batch = made.startswith("#!")
        scripts = [made] if is_batch else [c["args"][0] for c in containers(made).values() if "args" in c]
        for script in (*scripts, rank_script(made)):
            files.append(tmp_path / f"{len(files)}.sh")
            files[-1].write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
    assert len(files) > 100
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
