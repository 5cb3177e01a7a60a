"""The commands `imagebuild plan` and `imagebuild render`."""

from __future__ import annotations

import shlex

from imagebuild import __version__
from tests.conftest import Files
from tests.unit.conftest import Call


def test_plan_says_why_and_how_many_sources_have_no_pin(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'tool: "3.4"', 'tool: "3.44"')
    status, printed, shown = call("plan", "--why")
    assert (status, shown) == (0, "sources without a pin: 1; `imagebuild lock tiny` completes the lock\n")
    for words in ("tiny-cuda13.0-debian13-runtime", "no-old-devel", "nobody asked for it"):
        assert words in printed


def test_the_header_has_the_command_that_makes_the_same_file_again(call: Call, tiny: Files) -> None:
    tiny.write("my more", "RUN mine")
    arguments = ["render", "tiny-cuda13.0-debian13-runtime", "--set", "library=1.3", "--append", "my more"]
    _, text, _ = call(*arguments, "--for", "standalone")
    written = next(line for line in text.splitlines() if line.startswith("# Written by"))
    assert written.startswith(f"# Written by imagebuild {__version__}, lock ")
    again = shlex.split(written.partition(":  ")[2])
    assert again == ["imagebuild", *arguments, "--for", "standalone"]
    assert call(*again[1:])[1] == text
    assert ("type=secret" in text, "type=secret" in call(*arguments)[1]) == (False, True)
    assert text.endswith("\nRUN mine\n")


def test_unresolved_prints_what_the_lock_lacks(call: Call, tiny: Files) -> None:
    tiny.lock({})
    status, _, complaint = call("render", "tiny-cuda13.0-debian13-runtime")
    assert (status, "or print the Dockerfile with --unresolved" in complaint) == (2, True)
    status, text, _ = call("render", "tiny-cuda13.0-debian13-runtime", "--unresolved")
    assert (status, "debian:13-slim@sha256:unresolved" in text) == (0, True)
    assert text.startswith("# This cannot be built yet. imagebuild.lock: 2 of 2 sources have no pin, so they cannot")


def test_another_base_of_the_same_release(call: Call) -> None:
    _, text, _ = call("render", "tiny-cuda13.0-debian13-runtime", "--base-image", "debian:13.7-slim")
    assert "FROM debian:13.7-slim AS image\n" in text
    status, _, complaint = call("render", "tiny-cuda13.0-debian13-runtime", "--base-image", "x\nRUN y")
    assert (status, "not an image" in complaint) == (2, True)
