"""Things broken on purpose: each gives its exit code and a clear message, and leaves nothing half-written.

What is left behind is looked for after every test by the fixture `environ` and by `Tiny.build`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from docker import DockerClient

from tests.docker.conftest import (
    TARGET,
    Imagebuild,
    SecondEngine,
    Tiny,
    containers,
    copy_of_project,
    finish,
    half_written,
    processes,
    until,
)

pytestmark = pytest.mark.docker

TINY_TARGET = "tiny-cuda13.0-debian13-runtime"


def test_a_step_that_fails(tiny: Tiny) -> None:
    tiny.build(TINY_TARGET)
    assert tiny.result().digest
    tiny.step(f"echo {tiny.nonce}; for i in $(seq 99); do echo line $i; done; echo last words >&2; exit 7")
    done = tiny.build(TINY_TARGET, expect=4)
    assert f"error: {TINY_TARGET}: component library: a step failed" in done.err
    assert "exit code: 7" in done.err
    assert "    line 99\n    last words\n" in done.err
    assert "    line 9\n" not in done.err
    again = re.search(r"again +imagebuild (.*)", done.err)
    assert again
    assert again[1] == f"build {TINY_TARGET} --stage library -v"
    rerun = tiny.build(*again[1].split()[1:], expect=4)
    assert "library | last words" in rerun.err
    assert "tool" not in rerun.err


def test_a_template_with_an_undefined_variable(tiny: Tiny) -> None:
    tiny.write("dockerfiles/components/library/build.j2", "FROM {{ base }} AS library\nRUN echo {{ nothing }}\n")
    done = tiny.build(expect=2)
    assert "components/library/build.j2:2: 'nothing' is undefined" in done.err
    assert not (tiny.root / "build").exists()


def test_a_source_that_cannot_be_reached(tiny: Tiny) -> None:
    tiny.from_git("https://nowhere.invalid/tool.git")
    done = tiny.build(TINY_TARGET, expect=4)
    assert done.seconds < 60
    assert f"{TINY_TARGET}: component tool: a step failed" in done.err
    assert "nowhere.invalid" in done.err
    assert f"imagebuild build {TINY_TARGET} --stage tool-source -v" in done.err


def test_a_wheel_with_another_hash(tmp_path: Path, environ: dict[str, str]) -> None:
    lock = copy_of_project(tmp_path) / "imagebuild.lock"
    text = lock.read_text()
    hashes = re.search(r'"nccl": \{.*', text, re.DOTALL)
    assert hashes
    lock.write_text(text.replace(hashes[0], re.sub("[0-9a-f]{64}", "0" * 64, hashes[0])))
    imagebuild = Imagebuild(tmp_path, environ)
    done = imagebuild("build", TARGET, "--platform", "local", "--stage", "nccl", expect=4)
    assert f"{TARGET}: component nccl: a step failed" in done.err
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.err
    assert f"Expected sha256 {'0' * 64}" in done.err
    assert not half_written(tmp_path)
    assert not list(tmp_path.rglob("result.json"))


def test_a_full_disk(tiny: Tiny, second_engine: SecondEngine) -> None:
    tiny.step("mkdir -p /out/runtime && head -c 1G /dev/urandom > /out/runtime/big")
    done = tiny.build(TINY_TARGET, expect=4, DOCKER_HOST=second_engine.host)
    assert "no space left on device" in done.err.lower()
    assert TINY_TARGET in done.err


def test_an_engine_that_stops(tiny: Tiny, second_engine: SecondEngine) -> None:
    building = start_sleeping(tiny, DOCKER_HOST=second_engine.host)
    second_engine.stop()
    done = finish(building)
    assert done.status == 4, done.err
    assert "Traceback" not in done.err
    assert "engine" in done.err
    nothing_left(tiny)
    assert "does not answer" in tiny.build(TINY_TARGET, expect=4, DOCKER_HOST=second_engine.host).err


def start_sleeping(tiny: Tiny, *args: str, **environ: str) -> subprocess.Popen[str]:
    """A build that has come to a step that takes forever."""
    tiny.step(f"exec sleep 1000{int(tiny.nonce, 16)}")
    building = tiny.imagebuild.start("build", TINY_TARGET, "--platform", "local", *args, **environ)
    assert until(lambda: sleeps(tiny) or building.poll() is not None), "the step does not start"
    assert building.poll() is None, building.communicate()
    return building


def sleeps(tiny: Tiny) -> bool:
    """Whether the step of `start_sleeping` runs, in a container of BuildKit's."""
    return bool(processes(argv=f"1000{int(tiny.nonce, 16)}"))


def nothing_left(tiny: Tiny) -> None:
    assert until(lambda: not sleeps(tiny)), "BuildKit still runs the step"
    assert not half_written(tiny.root)
    assert not list(tiny.root.rglob("result.json"))


@pytest.mark.parametrize("display", ["plain", "verbose"])
def test_ctrl_c_ends_the_build(tiny: Tiny, display: str) -> None:
    building = start_sleeping(tiny, *(["-v"] if display == "verbose" else []))
    building.send_signal(signal.SIGINT)
    done = finish(building, 15)
    assert done.status == 130
    assert done.err.endswith("interrupted\n")
    assert "Traceback" not in done.err
    nothing_left(tiny)


@pytest.mark.parametrize("program", ["docker", "docker-buildx"])
def test_buildx_is_killed(tiny: Tiny, program: str) -> None:
    building = start_sleeping(tiny)
    started = processes(environ=tiny.environ["IMAGEBUILD_TEST"])
    (pid,) = [pid for pid, words in started.items() if Path(words[0]).name == program]
    os.kill(pid, signal.SIGKILL)
    done = finish(building)
    assert done.status == 4
    assert "docker buildx" in done.err
    assert "killed" in done.err.lower()
    assert "Traceback" not in done.err
    nothing_left(tiny)


def test_ctrl_c_in_verify_removes_the_container(tiny: Tiny, client: DockerClient) -> None:
    path = "dockerfiles/components/library/component.yaml"
    tiny.write(path, (tiny.root / path).read_text() + "checks: [{name: slow, description: x, run: sleep 600}]\n")
    tiny.build(TINY_TARGET)
    verifying = tiny.imagebuild.start("verify", TINY_TARGET, "--json", "verify.json")
    assert until(lambda: bool(containers(client)))
    time.sleep(1)  # into the check
    verifying.send_signal(signal.SIGINT)
    done = finish(verifying, 20)
    assert (done.status, done.err) == (130, "interrupted\n")
    assert not containers(client)
    assert not (tiny.root / "verify.json").exists()


def test_no_engine(tiny: Tiny) -> None:
    done = tiny.build(expect=4, DOCKER_HOST="unix:///nowhere.sock")
    assert "DOCKER_HOST=unix:///nowhere.sock: no socket there" in done.err
