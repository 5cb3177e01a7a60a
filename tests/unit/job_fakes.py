"""Jobs in one line: facts and profiles of this repository, read once, and an image that does not change."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import cast

import yaml

from imagebuild.errors import ConfigError
from imagebuild.jobs import load, resolve, write
from imagebuild.jobs.image import Offer
from imagebuild.jobs.inputs import Facts, Machine, Request
from imagebuild.jobs.machine import FABRICS, machine
from imagebuild.jobs.models import Scheduler
from imagebuild.profiles import load_profiles
from tests.conftest import ROOT

REFERENCE: dict[str, str] = yaml.safe_load((ROOT / "tests/data/jobs-reference.yaml").read_text())
IMAGE = "registry.example.com/team/hpcx:cuda12.9.2-nccl2.28.3-hpcx2.51-ubuntu24.04-runtime"


@lru_cache
def facts() -> Facts:
    return load.load_facts(ROOT / "jobs")


@lru_cache
def machines() -> dict[str, Machine]:
    return {name: machine(document.model) for name, document in load_profiles(ROOT / "profiles").items()}


def request(line: str) -> Request:
    """The request of a command's arguments; `--image` is `IMAGE` where none is named and one is needed."""
    scheduler, *words = shlex.split(line)
    given: dict[str, str] = {}
    settings = []
    while words:
        option = words.pop(0).removeprefix("--")
        if option == "collect":
            given["collect"] = "yes"
        elif option == "set":
            settings.append(words.pop(0))
        else:
            given[option] = words.pop(0)
    container = given.get("container", "pyxis")
    return Request(
        scheduler=cast(Scheduler, scheduler),
        profile=given["profile"],
        fabric=given["fabric"],
        cluster=given.get("cluster", "generic"),
        nodes=int(given["nodes"]) if "nodes" in given else None,
        racks=int(given["racks"]) if "racks" in given else None,
        features=tuple(given["with"].split(",")) if "with" in given else (),
        container=container,
        image=given.get("image", None if container == "none" else IMAGE),
        nccl=given.get("nccl"),
        test=given.get("test", "all-reduce"),
        settings=tuple(settings),
        collect="collect" in given,
    )


def job(line: str, offer: Offer | None = None) -> resolve.Job:
    wanted = request(line)
    return resolve.resolve(wanted, machines()[wanted.profile], facts(), offer or Offer())


def text(line: str) -> str:
    return write.text(job(line))


def rank_script(made: str) -> str:
    """What ranks run, of a job's text."""
    found = re.search(r"rank <<'RANK' \|\| true\n(.*?)\n *RANK\n", made, re.DOTALL)
    assert found
    return found[1]


def exports(script: str) -> dict[str, list[str]]:
    """Variables that a script exports → the values, one for each time."""
    values: dict[str, list[str]] = {}
    for name, value in re.findall(r"(?m)^ *export ([A-Za-z_0-9]+)=(.*)$", script):
        values.setdefault(name, []).append(value)
    return values


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


def copy_of_facts(folder: Path) -> Path:
    for file in (ROOT / "jobs").rglob("*.*"):
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    return folder / "jobs"


def messages(line: str) -> list[str]:
    return list(job(line).messages)
