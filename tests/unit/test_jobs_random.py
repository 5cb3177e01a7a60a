"""Random legal jobs: every variable once in its scope, fields of the API references, scripts without mistakes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.job_fakes import (
    REFERENCE,
    combinations,
    containers,
    facts,
    job,
    messages,
    places,
    rank_script,
    text,
)
from tests.unit.kubernetes import mistakes

SHELLCHECK = Path(sysconfig.get_path("scripts")) / "shellcheck"


RANDOM = list(combinations(150, seed=5))


def test_random_combinations_reach_everything() -> None:
    """The property tests below would prove little if whole kinds were always refused."""
    words = {word for line in RANDOM for part in shlex.split(line) for word in part.split(",")}
    assert set(facts().fabrics) | set(facts().clusters) | set(facts().tests) <= words
    assert set(facts().features) <= words
    assert {"mpijob", "jobset", "slurm", "none"} <= words


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


@pytest.mark.parametrize("line", [line for line in (*RANDOM, *REFERENCE.values()) if not line.startswith("slurm")])
def test_kubernetes_fills_nothing_into_scripts(line: str) -> None:
    """In arguments it takes `$$` for `$`, and `$(NAME)` for the value of a variable of the container."""
    made = text(line)
    assert "$$" not in made
    for names in containers(made).values():
        assert not [name for name in names if f"$({name})" in made]


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


def test_no_fact_of_ours_is_unknown_to_nccl() -> None:
    for line in (*REFERENCE.values(), *RANDOM):
        assert [m for m in messages(line) if m.startswith("warning")] == []
