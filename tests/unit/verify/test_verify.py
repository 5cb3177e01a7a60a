"""The order in which checks run. Sessions with an engine are tested in tests/docker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.models import Launch
from imagebuild.bench.verification import Surroundings, VerifyResult
from imagebuild.core.errors import CommandError
from imagebuild.project.component import Check
from imagebuild.verify.checks import ImageCheck
from imagebuild.verify.runner import Command, Execution, Session
from imagebuild.verify.subject import Subject
from imagebuild.verify.verify import ResultFolder, VerifyRequest, options_of, run_commands

NEEDS = {"a": (), "b": (), "nodes": ("nodes>=2",), "four": ("nodes>=4",), "gpu": ("gpu",), "slow": ("nodes>=2", "gpu")}


DIGEST = f"sha256:{'a' * 64}"


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


def result_of(
    session: Recorder, folder: Path, earlier: VerifyResult | None = None, revision: str | None = "c" * 40
) -> VerifyResult:
    checks = {name: Check(name=name, run=name, needs=needs, description="It runs.") for name, needs in NEEDS.items()}
    planned = [ImageCheck(f"of-{name}", name, "", check, name) for name, check in checks.items()]
    request = VerifyRequest(None, "docker", (), (), False, folder, None, {}, None, earlier=earlier)
    order = {check.component: number for number, check in enumerate(planned)}
    image = Subject("image", digest=DIGEST)
    evidence = ResultFolder(image, folder, kept=False, revision=revision, order=order)
    with ThreadPoolExecutor() as pool:
        other_work = pool.submit(session.read_files)
        run_commands(lambda: nullcontext(session), planned, request, evidence, (), other_work=other_work)
    return evidence.result()


def ran(session: Recorder, folder: Path) -> list[str]:
    return [result.check for result in result_of(session, folder).checks]


OLD = "2026-01-01T00:00:00+00:00"
OTHERWISE: dict[str, dict[str, Any]] = {
    "another image": {"digest": f"sha256:{'e' * 64}"}, "an image without digest": {"digest": None},
    "another commit": {"revision": "d" * 40}, "modified files": {"revision": f"{'c' * 40}-dirty"},
    "another version": {"version": "9"}, "no machine": {"surroundings": None},
    "a variable": {"options": ("--env A=(redacted)",)}, "a profile": {"options": ("--profile h100",)},
    "fewer GPUs": {"options": ("--gpus 4",)}, "other nodes": {"options": ("--hosts (redacted)",)},
}  # fmt: skip


def test_a_check_that_passed_is_repeated_only_if_something_changed(tmp_path: Path) -> None:
    first = result_of(Recorder(lanes=4), tmp_path)
    again = result_of(session := Recorder(lanes=4), tmp_path, first)
    assert not {*session.together} - {"files"}
    assert {result.reason for result in again.checks} == {f"passed at {r.started}; not repeated" for r in first.checks}
    assert (first.options, again.options) == ((), ("--reuse",))
    assert result_of(session := Recorder(lanes=4), tmp_path, again).options == ("--reuse",)
    anywhere = first.model_copy(update={"revision": None})
    assert result_of(Recorder(lanes=4), tmp_path, anywhere, revision=None).options == ()
    for changed in OTHERWISE.values():
        assert result_of(Recorder(lanes=4), tmp_path, first.model_copy(update=changed)).options == ()
    for changed in ({"started": OLD}, {"started": "9" + OLD[1:]}, {"outcome": "failed"}, {"sha256": "0" * 64}):
        one, *others = first.checks
        earlier = first.model_copy(update={"checks": (one.model_copy(update=changed), *others)})
        result_of(session := Recorder(lanes=4), tmp_path, earlier)
        assert {*session.together} - {"files"} == {one.check}


def test_what_the_user_says_about_the_hardware_is_an_option_of_the_result(tmp_path: Path) -> None:
    told = Launch(nodes=4, gpus=2, domains=1)
    request = VerifyRequest("x", "exec:env", (), ("a", "b"), False, tmp_path, None, {}, None, told)
    assert options_of(request) == ("--nodes 4", "--gpus 2", "--domains 1", "--hosts (redacted)")


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
