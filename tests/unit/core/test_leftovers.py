"""What a process leaves: nothing if it can clean up, otherwise what the next process removes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imagebuild.core.leftovers import is_gone, owner, remove_leftovers
from imagebuild.core.run import process_table
from tests.conftest import Files
from tests.unit.conftest import gone

pytestmark = pytest.mark.programs


def test_whose_process_has_ended(tmp_path: Path) -> None:
    machine, pid, start = owner().split("-")
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {
        f"imagebuild-{owner()}-x": False, f".partial-{owner()}-x": False, "imagebuild-thesis": False,
        f"imagebuild-00000000-{pid}-1-x": False, f"notes-{machine}-{ended.pid}-1-x": False,
        f"imagebuild-{machine}-{ended.pid}-{start}-x": True, f"imagebuild-{machine}-{pid}-1-x": True,
        f".partial-{machine}-{pid}-1-x": True,
    }  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (tmp_path / f"imagebuild-{machine}-{pid}-2-link").symlink_to(outside)
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "outside",
        *(n for n, removed in names.items() if not removed),
    }
    assert (outside / "kept").exists()
    assert is_gone(f"imagebuild-verify/x:{machine}-{ended.pid}-1")
    remove_leftovers(tmp_path / "missing")


@pytest.mark.parametrize(
    ("how", "ignored"),
    [(signal.SIGHUP, False), (signal.SIGHUP, True), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_a_command_that_is_ended_leaves_no_process_and_no_folder(
    tiny: Files, tmp_path: Path, forever: str, how: signal.Signals, ignored: bool
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "imagebuild", "verify", "--project", str(tiny.root), "--runner"]
    waiting = [*command, f"exec:bash -c 'sleep {forever} & sleep {forever}'", "--only", "library/*"]
    tiny.component("library", (tiny.root / "dockerfiles/components/library/component.yaml").read_text() + CHECK)
    if ignored:
        waiting = ["nohup", *waiting]
    process = subprocess.Popen(waiting, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not any(forever in argv for _, argv in process_table().values()) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(how)
    if ignored:
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        how = signal.SIGTERM
    else:
        process.send_signal(how)  # a second signal does not interrupt the cleaning
    process.communicate()
    assert process.returncode == (-9 if how == signal.SIGKILL else 128 + how)
    if how == signal.SIGKILL:
        assert any(temporary.iterdir())
        subprocess.run([*command, "docker", "--list", "tiny-cuda13.0-debian13-runtime"], env=environ, check=True)
    assert gone(forever)
    assert not any(temporary.iterdir())


CHECK = "checks: [{name: slow, description: it waits, run: 'true'}]\n"
