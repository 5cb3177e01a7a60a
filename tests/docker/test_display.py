"""What a build shows on a terminal while it runs; plain lines elsewhere: unit/build/test_buildx."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from tests.docker.conftest import TINY_TARGET, Tiny

pytestmark = pytest.mark.docker


def test_a_terminal_sees_running_steps(tiny: Tiny) -> None:
    tiny.step("mkdir -p /out/runtime && echo working && sleep 3")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "imagebuild", "build", TINY_TARGET, "--platform", "local"], cwd=tiny.root,
        env={**tiny.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    status, output = process.wait(), shown.decode()
    assert status == 0, output
    assert "Traceback" not in output
    assert "\x1b[2K" in output  # redrawn
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert re.search(r"^ +\d\.\d  library 1/.: RUN mkdir.*\r\n +working", text, re.M)
    assert re.search(r"\r +\d+\.\d  library 1/.: RUN mkdir.* → \d+\.\d s", text)
    assert re.search(r"\d+ steps run, \d+ cached", text)
    assert output.rstrip().endswith("s")
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is back
