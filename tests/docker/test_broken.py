"""Injected failures: each ends with its exit status and a clear message, and leaves no incomplete files.

The fixture `environ` and `Tiny.build` look for leftovers after every test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from docker import DockerClient

from tests.docker.conftest import (
    TARGET,
    TINY_TARGET,
    Imagebuild,
    SecondEngine,
    Tiny,
    containers,
    copy_of_project,
    finish,
    half_written,
    processes,
    sleeping,
    until,
)

pytestmark = pytest.mark.docker


def test_a_step_that_fails(tiny: Tiny) -> None:
    tiny.build(TINY_TARGET)
    assert tiny.result().digest
    tiny.step("for i in $(seq 99); do echo line $i; done; echo last words; exit 7")
    done = tiny.build(TINY_TARGET, expect=4)
    assert f"error: {TINY_TARGET}: component library: a step failed" in done.err
    assert "exit code: 7" in done.err
    assert "    line 99\n    last words\n" in done.err
    assert "    line 9\n" not in done.err
    again = re.search(rf"again +imagebuild build ({TINY_TARGET} --platform local --stage library -v)", done.err)
    assert again
    rerun = tiny.build(*again[1].split(), expect=4)
    assert "library | last words" in rerun.err
    assert "tool" not in rerun.err


def test_a_wheel_with_another_hash(tmp_path: Path, environ: dict[str, str]) -> None:
    lock = copy_of_project(tmp_path) / "imagebuild.lock"
    text = lock.read_text()
    hashes = re.search(r'"nccl-wheel .*', text, re.DOTALL)
    assert hashes
    lock.write_text(text.replace(hashes[0], re.sub("[0-9a-f]{64}", "0" * 64, hashes[0])))
    imagebuild = Imagebuild(tmp_path, environ)
    done = imagebuild("build", TARGET, "--platform", "local", "--stage", "nccl-wheel", expect=4)
    assert f"{TARGET}: component nccl-wheel: a step failed" in done.err
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.err
    assert f"Expected sha256 {'0' * 64}" in done.err
    assert not half_written(tmp_path / "build")


def test_a_full_disk(tiny: Tiny, second_engine: SecondEngine) -> None:
    tiny.step("mkdir -p /out/runtime && head -c 1G /dev/urandom > /out/runtime/big")
    done = tiny.build(TINY_TARGET, expect=4, DOCKER_HOST=second_engine.host)
    assert "no space left on device" in done.err.lower()
    assert TINY_TARGET in done.err


def start_sleeping(tiny: Tiny, *args: str, **environ: str) -> subprocess.Popen[str]:
    """Start a build, and wait until it runs a step that does not end."""
    tiny.step(f"exec sleep {tiny.forever}")
    building = tiny.imagebuild.start("build", TINY_TARGET, "--platform", "local", *args, **environ)
    assert until(lambda: sleeping(tiny.forever) or building.poll() is not None), "the step does not start"
    assert building.poll() is None, building.communicate()
    return building


def nothing_left(tiny: Tiny) -> None:
    assert until(lambda: not sleeping(tiny.forever)), "the step still runs"
    assert not half_written(tiny.root / "build")
    assert not list(tiny.root.glob("build/*/result.json"))


def test_an_engine_that_stops(tiny: Tiny, second_engine: SecondEngine) -> None:
    building = start_sleeping(tiny, DOCKER_HOST=second_engine.host)
    second_engine.stop()
    done = finish(building)
    assert (done.status, "Traceback" in done.err) == (4, False), done.err
    assert f"error: the engine at {second_engine.host} stopped during the build (its socket does not exist)" in done.err
    nothing_left(tiny)


@pytest.mark.parametrize(
    ("arguments", "program", "number", "status"),
    [
        ([], "", signal.SIGINT, 130), (["-v"], "", signal.SIGTERM, 143),
        ([], "docker", signal.SIGKILL, 4), ([], "docker-buildx", signal.SIGKILL, 4),
    ],
)  # fmt: skip
def test_a_build_or_what_it_started_is_told_to_end(
    tiny: Tiny, arguments: list[str], program: str, number: signal.Signals, status: int
) -> None:
    building = start_sleeping(tiny, *arguments)
    started = processes(environ=tiny.environ["IMAGEBUILD_TEST"])
    os.kill(next((pid for pid, words in started.items() if Path(words[0]).name == program), building.pid), number)
    done = finish(building)
    assert (done.status, "Traceback" in done.err) == (status, False)
    found = re.search("error: docker buildx bake .*killed" if program else "error", done.err, re.DOTALL)
    assert bool(found) == bool(program), done.err
    nothing_left(tiny)


def start_verifying(tiny: Tiny, host: str) -> subprocess.Popen[str]:
    """Start a verification, and wait until it runs a check that does not end."""
    check = f"{{name: slow, description: for a test, run: sleep {tiny.forever}}}"
    tiny.append("dockerfiles/components/library/component.yaml", f"checks: [{check}]\n")
    tiny.build(TINY_TARGET, DOCKER_HOST=host)
    verifying = tiny.imagebuild.start("verify", TINY_TARGET, "--json", "verify.json", DOCKER_HOST=host)
    assert until(lambda: sleeping(tiny.forever))
    return verifying


def test_an_engine_that_stops_while_verify_runs(tiny: Tiny, second_engine: SecondEngine) -> None:
    verifying = start_verifying(tiny, second_engine.host)
    second_engine.stop()
    done = finish(verifying)
    assert (done.status, "Traceback" in done.err) == (4, False), done.err
    assert "the engine refused or stopped" in done.err
    assert not (tiny.root / "verify.json").exists()


def test_ctrl_c_in_verify_removes_the_container(tiny: Tiny, client: DockerClient, host: str) -> None:
    verifying = start_verifying(tiny, host)
    assert containers(client)
    verifying.send_signal(signal.SIGINT)
    done = finish(verifying)
    assert (done.status, "Traceback" in done.err, "error" in done.err) == (130, False, False)
    assert not containers(client)
    assert not (tiny.root / "verify.json").exists()
