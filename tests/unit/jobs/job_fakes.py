"""Make a job from one line: with the facts and profiles of this repository, and an image that does not change."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from imagebuild.bench import load_profiles
from imagebuild.core import ConfigError
from imagebuild.jobs import (
    FABRICS,
    Job,
    JobFacts,
    JobHardware,
    JobRequest,
    Offer,
    Scheduler,
    job_hardware,
    job_text,
    load_facts,
    resolve_job,
)
from tests.conftest import ROOT

REFERENCE: dict[str, str] = yaml.safe_load((ROOT / "tests/data/jobs-reference.yaml").read_text())
"""File of the reference → arguments of `imagebuild job` that make the like."""
IMAGE = "registry.example.com/team/hpcx:cuda12.9.2-nccl2.28.3-hpcx2.51-ubuntu24.04-runtime"


@lru_cache
def facts() -> JobFacts:
    return load_facts(ROOT / "jobs")


@lru_cache
def hardware() -> dict[str, JobHardware]:
    """Name of a profile → what jobs know of it."""
    return {name: job_hardware(file.model) for name, file in load_profiles(ROOT / "profiles").items()}


def request(line: str) -> JobRequest:
    """The request of a command's arguments; without `--image`, it is for `IMAGE`."""
    scheduler, *words = shlex.split(line)
    options: dict[str, str] = {}
    settings = []
    while words:
        option = words.pop(0).removeprefix("--")
        if option == "collect":
            options["collect"] = "yes"
        elif option == "set":
            settings.append(words.pop(0))
        else:
            options[option] = words.pop(0)
    container = options.get("container", "pyxis")
    return JobRequest(
        scheduler=cast(Scheduler, scheduler),
        profile=options["profile"],
        fabric=options["fabric"],
        cluster=options.get("cluster", "generic"),
        nodes=int(options["nodes"]) if "nodes" in options else None,
        racks=int(options["racks"]) if "racks" in options else None,
        features=tuple(options["with"].split(",")) if "with" in options else (),
        container=container,
        image=options.get("image", None if container == "none" else IMAGE),
        nccl=options.get("nccl"),
        test=options.get("test", "all-reduce"),
        settings=tuple(settings),
        collect="collect" in options,
    )


def job(line: str) -> Job:
    job_request = request(line)
    return resolve_job(job_request, hardware()[job_request.profile], facts(), Offer())


def text(line: str) -> str:
    return job_text(job(line))


def messages(line: str) -> list[str]:
    return list(job(line).messages)


@lru_cache
def random_lines() -> list[str]:
    """Arguments of 150 jobs, the same in every run."""
    return list(combinations(150, seed=5))


def combinations(count: int, seed: int) -> Iterator[str]:
    """Random arguments that make a job; those that are refused are left out."""
    dice = random.Random(seed)
    profiles = sorted(name for name, machine in hardware().items() if machine.capability)
    while count:
        profile = dice.choice(profiles)
        own_fabric = FABRICS.get(hardware()[profile].network or "", "ethernet")
        words = [dice.choice(["mpijob", "jobset", "slurm"]), "--profile", profile]
        words += ["--fabric", dice.choice([own_fabric, dice.choice(sorted(facts().fabrics))])]
        words += ["--cluster", dice.choice(sorted(facts().clusters))]
        words += dice.choice([[], ["--nodes", str(dice.choice([1, 2, 3, 4, 8, 16, 18, 32, 36]))], ["--racks", "2"]])
        features = dice.sample(sorted(facts().features), dice.choice([0, 1, 1, 2, 3]))
        words += ["--with", ",".join(features)] if features else []
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


# Parts of a job's text


def objects(manifest: str) -> list[dict[str, Any]]:
    """The objects of Kubernetes."""
    return list(yaml.safe_load_all(manifest))


def pods(manifest: str) -> dict[str, dict[str, Any]]:
    """`launcher` and `worker` → the specification of their pods."""
    spec = objects(manifest)[-1]["spec"]
    if "mpiReplicaSpecs" in spec:
        return {role.lower(): replica["template"]["spec"] for role, replica in spec["mpiReplicaSpecs"].items()}
    return {j["name"]: j["template"]["spec"]["template"]["spec"] for j in spec["replicatedJobs"]}


def rank_script(job_text: str) -> str:
    """The script that ranks run."""
    script = re.search(r"rank <<'RANK' \|\| true\n(.*?)\n *RANK\n", job_text, re.DOTALL)
    assert script
    return script[1]


def exports(script: str) -> dict[str, list[str]]:
    """Variables that a script exports → the values, one for each `export`."""
    values: dict[str, list[str]] = {}
    for name, value in re.findall(r"(?m)^ *export ([A-Za-z_0-9]+)=(.*)$", script):
        values.setdefault(name, []).append(value)
    return values


def rank_exports(line: str) -> dict[str, list[str]]:
    """Variables that the ranks of a job export."""
    return exports(rank_script(text(line)))


def container_variables(manifest: str) -> dict[str, dict[str, list[str]]]:
    """`launcher` and `worker` → variables of the container, with all their values."""
    variables: dict[str, dict[str, list[str]]] = {}
    for role, spec in pods(manifest).items():
        values: dict[str, list[str]] = variables.setdefault(role, {})
        for entry in spec["containers"][0].get("env", []):
            values.setdefault(entry["name"], []).append(entry["value"])
    return variables


def variables_by_scope(job_text: str) -> dict[str, dict[str, list[str]]]:
    """Scope → variables that have a value there, with all their values."""
    ranks = exports(rank_script(job_text))
    if not job_text.startswith("#!"):
        of_role = container_variables(job_text)
        return {"rank": ranks, "container": of_role["worker"], "launcher": of_role["launcher"]}
    outside = exports(job_text.replace(rank_script(job_text), ""))
    options = re.findall(r"--container-env=(\S+)", job_text)
    names = set(options[0].split(",")) if options else set()
    return {
        "rank": ranks,
        "container": {name: values for name, values in outside.items() if name in names},
        "batch": {name: values for name, values in outside.items() if name not in names},
    }


def copy_of_facts(folder: Path) -> Path:
    """A copy of the folder `jobs/` that a test can change."""
    for file in (ROOT / "jobs").rglob("*.*"):
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    return folder / "jobs"
