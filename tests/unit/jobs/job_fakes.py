"""Make a job from one line: with the facts and profiles of this repository, and an image that does not change."""

from __future__ import annotations

import random
import re
import shlex
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from shutil import copytree
from typing import Any

import yaml

from imagebuild.bench.profiles import Profile, load_profiles
from imagebuild.core.errors import ConfigError
from imagebuild.jobs.facts import JobFacts, default_fabric, load_facts
from imagebuild.jobs.job import Job, resolve_job
from imagebuild.jobs.manifest import job_text
from imagebuild.jobs.offer import Offer
from imagebuild.jobs.request import JobRequest
from tests.conftest import ROOT, data

REFERENCE: dict[str, str] = data("jobs-reference")
"""File of the reference → arguments of `imagebuild job` that make the like."""
NUMBERS: dict[str, type] = {"nodes": int, "racks": int, "gpus": int, "blocks": int, "allow-loss": float}
IMAGE = "registry.example.com/team/hpcx:cuda12.9.2-nccl2.28.3-hpcx2.51-ubuntu24.04-runtime"


@lru_cache
def facts() -> JobFacts:
    return load_facts(ROOT / "jobs")


@lru_cache
def profiles() -> dict[str, Profile]:
    return {name: file.model for name, file in load_profiles(ROOT / "profiles").items()}


def request(line: str) -> JobRequest:
    """The request of a command's arguments; without an image, it is for `IMAGE`."""
    scheduler, *words = shlex.split(line)
    if not re.search("--image|--container none|--compare image", line):
        words += ["--image", IMAGE]
    options: dict[str, Any] = {"scheduler": scheduler, "settings": (), "words": ("job", scheduler, *words)}
    while words:
        option = words.pop(0).removeprefix("--")
        if option == "collect":
            options["collect"] = True
        elif option == "param":
            options["settings"] += (words.pop(0),)
        elif option == "feature":
            options["features"] = tuple(words.pop(0).split(","))
        else:
            kind = NUMBERS.get(option, str)
            options[option.replace("allow-", "allowed_")] = kind(words.pop(0))
    options.setdefault("fabric", default_fabric(profiles()[options["profile"]], facts().fabrics))
    return JobRequest(**options)


def job(line: str, facts_: JobFacts | None = None) -> Job:
    job_request = request(line)
    return resolve_job(job_request, profiles()[job_request.profile], facts_ or facts(), Offer())


def text(line: str) -> str:
    return job_text(job(line))


@lru_cache
def random_lines() -> list[str]:
    """Arguments of 60 jobs, the same in every run; those that are refused are left out."""
    dice, known, lines = random.Random(5), facts(), list[str]()
    of_nvidia = sorted(name for name, profile in profiles().items() if profile.gpu.compute_capability)
    while len(lines) < 60:
        profile = dice.choice(of_nvidia)
        words = [dice.choice(["mpijob", "jobset", "slurm"]), "--profile", profile]
        fabrics = [default_fabric(profiles()[profile], known.fabrics), dice.choice(sorted(known.fabrics))]
        words += ["--fabric", dice.choice(fabrics), "--cluster", dice.choice(sorted(known.clusters))]
        words += dice.choice([[], ["--nodes", str(dice.choice([1, 2, 3, 4, 8, 16, 18, 32, 36]))], ["--racks", "2"]])
        features = dice.sample(sorted(known.features), dice.choice([0, 1, 1, 2, 3]))
        words += ["--feature", ",".join(features)] if features else []
        words += ["--container", "none"] if words[0] == "slurm" and dice.random() < 0.3 else []
        words += ["--test", dice.choice(sorted(known.tests)), "--param", "name=it"]
        more = ["NCCL_IB_TIMEOUT=22", "NCCL_NET_PLUGIN=other"]
        words += dice.choice([[], ["--collect"], *(["--param", setting] for setting in more)])
        if "--container" not in words:
            words += ["--image", dice.choice([IMAGE, "example.com/other:1", "example.com/open:nccl2.30.7"])]
        with suppress(ConfigError):
            job(shlex.join(words))
            lines.append(shlex.join(words))
    return lines


# Parts of a job's text


def objects(manifest: str) -> list[dict[str, Any]]:
    """The objects of Kubernetes."""
    return list(yaml.load_all(manifest, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def pods(manifest: str) -> dict[str, dict[str, Any]]:
    """`launcher` and `worker` → the specification of their pods."""
    spec = objects(manifest)[-1]["spec"]
    if "mpiReplicaSpecs" in spec:
        return {role.lower(): replica["template"]["spec"] for role, replica in spec["mpiReplicaSpecs"].items()}
    return {j["name"]: j["template"]["spec"]["template"]["spec"] for j in spec["replicatedJobs"]}


def containers(manifest: str) -> dict[str, dict[str, Any]]:
    """`launcher` and `worker` → the container of the benchmark."""
    return {role: pod["containers"][0] for role, pod in pods(manifest).items()}


def outer_script(job_text: str, role: str = "launcher") -> str:
    """The batch script, or that of a container."""
    return job_text if job_text.startswith("#!") else str(containers(job_text)[role]["args"][0])


def rank_script(job_text: str) -> str:
    """The script that ranks run."""
    script = re.search(r"rank <<'RANK' \|\| true\n(.*?)\nRANK\n", outer_script(job_text), re.DOTALL)
    assert script
    return script[1]


def once(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Name → value. No name is there twice."""
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def exports(script: str) -> dict[str, str]:
    """Variables that a script exports, as they are written there."""
    return once(re.findall(r"(?m)^ *export ([A-Za-z_0-9]+)=(.*)$", script))


def rank_exports(line: str) -> dict[str, str]:
    """Variables that the ranks of a job export."""
    return exports(rank_script(text(line)))


def container_variables(manifest: str) -> dict[str, dict[str, str]]:
    """`launcher` and `worker` → variables of the container."""
    return {
        role: once([(entry["name"], entry["value"]) for entry in container.get("env", [])])
        for role, container in containers(manifest).items()
    }


def variables_by_scope(job_text: str) -> dict[str, dict[str, str]]:
    """Scope → variables that have a value there."""
    ranks = exports(rank_script(job_text))
    if not job_text.startswith("#!"):
        of_role = container_variables(job_text)
        return {"rank": ranks, "container": of_role["worker"], "launcher": of_role["launcher"]}
    outside = exports(job_text.replace(rank_script(job_text), ""))
    names = {name for options in re.findall(r"--container-env=(\S+)", job_text) for name in options.split(",")}
    inside = {name: outside.pop(name) for name in names}
    return {"rank": ranks, "container": inside, "batch": outside}


def copy_of_facts(folder: Path) -> Path:
    """A copy of the folder `jobs/` that a test can change."""
    return copytree(ROOT / "jobs", folder / "jobs")


def facts_of_cluster(folder: Path, **cluster: Any) -> JobFacts:
    """The facts of this repository, and a cluster `ours` that says this."""
    copied = copy_of_facts(folder)
    (copied / "clusters/ours.yaml").write_text(yaml.safe_dump({"title": "Ours", **cluster}))
    return load_facts(copied)


MPIRUN = 'while [ "$1" != /bin/bash ]; do shift; done\nexec "$@"\n'
"""A program that runs a command as `mpirun` does, once."""


def write_programs(beside: Path, programs: dict[str, str]) -> Path:
    """Write programs to a new folder; return it. A program is a text, or `.NAME` for a file in tests/data/standins."""
    folder = beside / "bin"
    folder.mkdir()
    for name, script in programs.items():
        known = (ROOT / "tests/data/standins" / script[1:]).read_text() if script.startswith(".") else ""
        (folder / name).write_text(known or f"#!/bin/bash\n{script}")
        (folder / name).chmod(0o755)
    return folder
