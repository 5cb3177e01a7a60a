"""Jobs in one line: facts and profiles of this repository, read once, and an image that does not change."""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from typing import cast

from imagebuild.jobs import load, resolve, write
from imagebuild.jobs.image import Offer
from imagebuild.jobs.inputs import Facts, Machine, Request
from imagebuild.jobs.machine import machine
from imagebuild.jobs.models import Scheduler
from imagebuild.profiles import load_profiles
from tests.conftest import ROOT

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
