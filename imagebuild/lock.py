"""Resolve wheels to versions and hashes. pip asks the index that this machine's pip is configured for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from imagebuild.errors import CommandError, ConfigError, ResultError
from imagebuild.files import write_text
from imagebuild.lockfile import Lock, Wheel
from imagebuild.models import Arch
from imagebuild.recipe import CPUS
from imagebuild.sources import Source, WheelSet

GLIBC = ("manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(12, 36)))
"""Platform tags that the images' glibc satisfies; `fetch-wheels` accepts the same."""

Resolver = Callable[[tuple[str, ...], Arch], dict[str, tuple[str, str]]]


def resolve(lock: Lock, sources: Iterable[Source], *, update: bool = False, resolver: Resolver | None = None) -> Lock:
    """The lock with an entry for every wheel; entries that are there stay, unless `update`.

    Raises CommandError if pip fails, and ConfigError if an architecture lacks a wheel.
    """
    locked = {name: dict(entries) for name, entries in lock.wheels.items()}
    wanted = dict.fromkeys(source for source in sources if isinstance(source, WheelSet))
    todo = [w for w in wanted if update or w.version not in locked.get(w.component, {})]
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(lambda wheels: _wheels(wheels, resolver or ask_pip), todo))
    for wheels, answer in zip(todo, found, strict=True):
        locked.setdefault(wheels.component, {})[wheels.version] = answer
    return lock.model_copy(update={"wheels": locked})


def write(path: Path, lock: Lock) -> None:
    """Write the lock, sorted, so that a diff shows what changed."""
    write_text(path, json.dumps(lock.model_dump(by_alias=True), indent=1, sort_keys=True) + "\n")


def _wheels(wanted: WheelSet, resolver: Resolver) -> tuple[Wheel, ...]:
    component, version = wanted.component, wanted.version
    answers = {arch: resolver(wanted.requirements, arch) for arch in get_args(Arch)}
    wheels = []
    for name, (found, digest) in sorted(answers["amd64"].items()):
        other = answers["arm64"].get(name)
        if other is None or other[0] != found:
            raise ConfigError(f"{component} {version}: {name} is {found} for amd64 but {other and other[0]} for arm64")
        wheels.append(Wheel(name=name, version=found, sha256={"amd64": digest, "arm64": other[1]}))
    return tuple(wheels)


def ask_pip(asked: tuple[str, ...], arch: Arch) -> dict[str, tuple[str, str]]:
    """Name → version and sha256 of the newest wheels that fit; nothing is downloaded but metadata."""
    tags = [option for glibc in GLIBC for option in ("--platform", f"{glibc}_{CPUS[arch]}")]
    command = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"),
        *("--only-binary", ":all:", "--target", "unused", "--report", "-", *tags, *asked),
    ]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise CommandError(f"pip finds no {' '.join(asked)} for {arch}:\n{done.stderr.strip()[-2000:]}")
    try:
        report: dict[str, Any] = json.loads(done.stdout)
        return {
            item["metadata"]["name"]: (
                item["metadata"]["version"],
                item["download_info"]["archive_info"]["hashes"]["sha256"],
            )
            for item in report["install"]
        }
    except (ValueError, KeyError) as error:
        raise ResultError(f"pip's report cannot be read: {error!r}") from None
