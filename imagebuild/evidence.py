"""What a verification leaves behind: the results, the whole output of every check, and what the place was like."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagebuild import files, redact
from imagebuild.needs import Need
from imagebuild.records import CheckResult, Surroundings, VerifyResult
from imagebuild.runners.base import Command, Session

RESULTS = "verify.json"
REPORT_TIMEOUT_S = 60
GPU, RDMA = Need("gpus"), Need("rdma")
REPORTS: dict[str, tuple[str, Need | None]] = {
    "os-release": ("cat /etc/os-release", None),
    "processors": ("lscpu", None),
    "gpus": ("nvidia-smi -q", GPU),
    "topology": ("nvidia-smi topo -m", GPU),
    "nvlink": ("nvidia-smi nvlink --status", GPU),
    "rdma": ("ibv_devinfo -v || rdma link show", RDMA),
}
"""File in the evidence folder → what prints it, and what must be there for it."""
ENVIRONMENT = "cat /proc/self/environ"


@dataclass(frozen=True)
class Evidence:
    """A folder for logs and results."""

    folder: Path
    kept: bool
    """Whether anybody will look into it afterwards."""

    def log(self, component: str, check: str) -> Path:
        # Checks of images for several platforms are called `labels linux/arm64`.
        name = re.sub(r"[^\w.-]+", "-", check)
        return self.folder / f"{component}.{name}.log"

    def settled(self, result: CheckResult) -> CheckResult:
        """The result with the name of its log, which is deleted if nobody wants it."""
        path = self.log(result.component, result.check)
        if not self.kept:
            path.unlink(missing_ok=True)
            return result
        if not path.exists() and result.output:
            files.write_text(path, result.output)
        return result.model_copy(update={"log": path.name}) if path.exists() else result

    def write(self, result: VerifyResult) -> None:
        if self.kept:
            files.write_text(self.folder / RESULTS, result.model_dump_json(indent=1) + "\n")


@contextmanager
def evidence(folder: Path | None) -> Iterator[Evidence]:
    """Evidence in a folder, or in a temporary one that goes with the context."""
    if folder:
        yield Evidence(folder, kept=True)
        return
    with tempfile.TemporaryDirectory(prefix="imagebuild-verify-") as temporary:
        yield Evidence(Path(temporary), kept=False)


def surroundings(session: Session, runner: str, kept: Evidence) -> Surroundings:
    """What the place is like; with a folder to keep it, also what programs say about it."""
    place, have = session.place, session.facilities
    made = Surroundings(
        runner=runner, gpus=have.gpus, rdma=have.rdma, nodes=have.nodes, slurm=have.slurm, why=dict(have.why),
        user=place.user, facts=dict(place.facts),
    )  # fmt: skip
    asked = Command(ENVIRONMENT, user=place.user, timeout_s=REPORT_TIMEOUT_S)
    if session.obstacle(asked):
        return made
    variables = dict(v.split("=", 1) for v in session.run(asked).output.split("\0") if "=" in v)
    variables = {name: value for name, value in variables.items() if re.match(r"\w+$", name)}
    variables.pop("IMAGEBUILD_RUN", None)
    reports = {}
    for name, (script, need) in REPORTS.items() if kept.kept else ():
        if need and need.missing(have):
            continue
        path = kept.folder / f"{name}.txt"
        if session.run(Command(script, user=place.user, timeout_s=REPORT_TIMEOUT_S, log=path)).status == 0:
            reports[script] = path.name
        else:
            path.unlink(missing_ok=True)
    return made.model_copy(update={"environment": redact.environment(variables), "reports": reports})
