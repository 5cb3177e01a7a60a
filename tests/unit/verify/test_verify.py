"""The order in which checks run. Sessions with an engine are tested in tests/docker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from imagebuild.bench.verification import Surroundings
from imagebuild.core.errors import CommandError
from imagebuild.project.component import Check
from imagebuild.verify.checks import ImageCheck
from imagebuild.verify.runner import Command, Execution, Session
from imagebuild.verify.subject import Subject
from imagebuild.verify.verify import ResultFolder, VerifyRequest, run_commands

NEEDS = {"a": (), "b": (), "nodes": ("nodes>=2",), "four": ("nodes>=4",), "gpu": ("gpu",), "slow": ("nodes>=2", "gpu")}


class Recorder(Session):
    """A session whose commands wait, and that records which commands run at the same time."""

    def __init__(self, lanes: int, fault: Callable[[str], None] = lambda _: None) -> None:
        place = Surroundings(runner="docker", gpus=8, rdma=True, nodes=8, slurm=False, user="root")
        super().__init__({"tool": ["bash", "timeout"], "uid": ["0"]}, place)
        self.lanes, self.node_lanes, self.fault = lanes, min(lanes, 2), fault
        self.running: set[str] = set()
        self.together: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def read_files(self) -> None:
        self.running.add("files")
        time.sleep(0.5)
        self.running.discard("files")

    def run(self, command: Command) -> Execution:
        name = command.script.split()[-1]
        if name not in NEEDS:
            return Execution(("env",), 0, "", 0.0)
        with self._lock:
            self.running.add(name)
            for other in self.running:
                self.together.setdefault(other, set()).update(self.running)
                self.together.setdefault(name, set()).add(other)
        self.fault(name)
        time.sleep(0.05)
        self.running.discard(name)
        return Execution(("bash",), 0, "", 0.05)


def ran(session: Recorder, folder: Path) -> list[str]:
    checks = {name: Check(name=name, run=name, needs=needs, description="It runs.") for name, needs in NEEDS.items()}
    planned = [ImageCheck(f"of-{name}", name, "", check, name) for name, check in checks.items()]
    request = VerifyRequest(None, "docker", (), (), False, folder, None, {}, None)
    order = {check.component: number for number, check in enumerate(planned)}
    evidence = ResultFolder(Subject("image"), folder, kept=False, revision=None, order=order)
    with ThreadPoolExecutor() as pool:
        other_work = pool.submit(session.read_files)
        run_commands(lambda: nullcontext(session), planned, request, evidence, (), other_work=other_work)
    return [result.check for result in evidence.result().checks]


def test_checks_without_devices_run_at_the_same_time_and_benchmarks_alone(tmp_path: Path) -> None:
    session = Recorder(lanes=4)
    assert ran(session, tmp_path) == list(NEEDS)  # results keep the order of the checks
    assert all(session.together[name] == {name} for name in ("gpu", "slow"))
    assert len(session.together["a"]) > 2
    assert "nodes" in session.together["four"]
    assert session.most_nodes == 4


def test_a_prefix_runs_one_command_at_a_time(tmp_path: Path) -> None:
    session = Recorder(lanes=1)
    assert ran(session, tmp_path) == list(NEEDS)
    assert all(others == {name} for name, others in session.together.items())


def test_a_failed_runner_starts_no_more_checks(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name in ("a", "nodes"):
            raise CommandError("the engine stopped")

    session = Recorder(2, fail)
    with pytest.raises(CommandError, match="the engine stopped"):
        ran(session, tmp_path)
    assert "gpu" not in session.together
