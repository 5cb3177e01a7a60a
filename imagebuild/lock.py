"""Resolve wheels to versions and hashes. pip asks the index that this machine's pip is configured for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from imagebuild.config import Project
from imagebuild.errors import CommandError, ConfigError, ResultError
from imagebuild.files import write_text
from imagebuild.models import Arch, Lock, Pin, Target, Wheel
from imagebuild.versions import matches

CPUS: Mapping[Arch, str] = {"amd64": "x86_64", "arm64": "aarch64"}
GLIBC = ("manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(12, 36)))
"""Platform tags that the images' glibc satisfies; `fetch-wheels` accepts the same."""

Resolver = Callable[[tuple[str, ...], Arch], dict[str, tuple[str, str]]]


def wanted(project: Project, targets: Iterable[Target], versions: Mapping[str, Pin]) -> set[tuple[str, str]]:
    """Pairs of component and version whose wheels the targets need, build stages included."""
    pairs = set()
    for name, document in project.components.items():
        owner = document.model.wheels_from or name
        if not project.components[owner].model.wheels:
            continue
        if name in versions:
            pairs.add((owner, versions[name].version))
        pairs |= {(owner, t.components[name]) for t in targets if name in t.components}
    return pairs


def requirements(project: Project, component: str, version: str) -> tuple[str, ...]:
    """The component's requirements on the index, with the version and the facts of the first row that fits."""
    model = project.components[component].model
    values = {"version": version}
    for row in model.facts:
        if matches(row.when, {"version": version}):
            values |= {name: text.replace("{version}", version) for name, text in row.values.items()}
            break
    try:
        return tuple(template.format(**values) for template in model.wheels)
    except KeyError as error:
        where = project.components[component].at("wheels")
        raise ConfigError(f"{where}: wheels: no value for {{{error.args[0]}}}") from None


def resolve(
    project: Project,
    pairs: Iterable[tuple[str, str]],
    *,
    update: bool = False,
    resolver: Resolver | None = None,
) -> Lock:
    """The lock with an entry for every pair; entries that are there stay, unless `update`.

    Raises CommandError if pip fails, and ConfigError if an architecture lacks a wheel.
    """
    locked = {name: dict(entries) for name, entries in project.lock.wheels.items()}
    todo = [(c, v) for c, v in sorted(pairs) if update or v not in locked.get(c, {})]
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(lambda pair: _wheels(project, pair[0], pair[1], resolver or ask_pip), todo))
    for (component, version), wheels in zip(todo, found, strict=True):
        locked.setdefault(component, {})[version] = wheels
    return Lock(wheels=locked)


def write(path: Path, lock: Lock) -> None:
    """Write the lock, sorted, so that a diff shows what changed."""
    write_text(path, json.dumps(lock.model_dump(by_alias=True), indent=1, sort_keys=True) + "\n")


def _wheels(project: Project, component: str, version: str, resolver: Resolver) -> tuple[Wheel, ...]:
    asked = requirements(project, component, version)
    answers = {arch: resolver(asked, arch) for arch in get_args(Arch)}
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
