"""The display of a running build on a terminal. tests/unit/build/test_buildx.py tests the plain output."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.docker.conftest import TINY_TARGET, Tiny

pytestmark = pytest.mark.docker


def test_a_terminal_sees_running_steps(tiny: Tiny) -> None:
    tiny.step("mkdir -p /out/runtime && echo working && sleep 3")
    command = shlex.join([sys.executable, "-m", "imagebuild", "build", TINY_TARGET, "--platform", "local"])
    done = subprocess.run(
        ["script", "--quiet", "--return", "--command", command, "/dev/null"], cwd=tiny.root, check=False,
        env={**tiny.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    output = done.stdout.decode()
    assert done.returncode == 0, output
    assert "Traceback" not in output
    assert "\x1b[2K" in output  # redrawn
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert re.search(rf"\d+/\d+ +{re.escape(TINY_TARGET)}", text), "a bar for each target"
    assert re.search(r"library 1/.: RUN mkdir.* \| working", text), "the running step, with its last line"
    assert re.search(r"\r +\d+\.\d  library 1/.: RUN mkdir.* → \d+\.\d s", text)
    assert re.search(r"\d+ steps run, \d+ cached", text)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is shown again
