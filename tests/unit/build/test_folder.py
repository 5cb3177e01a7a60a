"""Locks of build folders, and links and damaged layouts in them."""

import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from imagebuild.build import folder
from imagebuild.build.folder import check_layout, held_folders
from imagebuild.core.errors import CommandError, ConfigError
from tests.conftest import data

CASES = data("cases/build/folder")


@pytest.mark.parametrize("removed", [False, True])
def test_a_second_build_waits_and_says_for_whom(tmp_path: Path, removed: bool) -> None:
    place, waits, entered = tmp_path / "build", threading.Event(), threading.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        waits.set()

    def second() -> None:
        with held_folders([place, tmp_path, place], note):
            entered.set()

    thread = threading.Thread(target=second)
    with held_folders([place], notes.append):
        assert not notes
        thread.start()
        assert waits.wait(60)
        if removed:
            shutil.rmtree(place)
        assert not entered.wait(0.05)
    assert entered.wait(60)
    thread.join()
    held = rf"process {os.getpid()} on \S+, since \d{{4}}-\d\d-\d\d [\d:]+ UTC: imagebuild"
    assert re.match(f"{place}: waiting until another build has ended: {held}", notes[0])
    assert (place / ".lock").is_file()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(ConfigError, match=r"\.lock: cannot be locked: .*; choose another folder"):
        held_folders([tmp_path], print).__enter__()
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_log_is_limited_has_no_secrets_and_ends_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LARGEST_LOG", 4000)
    monkeypatch.setattr(folder, "KEPT_LINES", 5)
    key = ("-----BEGIN RSA PRIVATE KEY-----", "c2VjcmV0a2V5", "-----END RSA PRIVATE KEY-----")
    with pytest.raises(CommandError, match=f"^a step failed\nthe whole log: {tmp_path}/x/build.log$"):  # noqa: PT012, SIM117
        with folder.BuildLog(tmp_path / "x" / "build.log") as log:
            for line in ("token=hunter2hunter2", *key[:2]):
                log.write(line, "ucx")
            log.write("configure: error\x1b[31m: red", "ompi")
            log.write("\n".join([*key[1:], "after the key", "x" * 9000]), "ucx")
            log.write("\n".join(map("line {}".format, range(1000))), "make")
            raise CommandError("a step failed")
    text = (tmp_path / "x" / "build.log").read_text()
    lines = [line.partition("  ")[2].lstrip("0123456789. ") for line in text.splitlines()]
    assert lines[1:7] == [
        "ucx | token=(redacted)",
        *["ucx | (redacted)"] * 2,
        "ompi | configure: error: red",
        *["ucx | (redacted)"] * 2,
    ]
    assert (lines[7], len(text) < 6000, "left out" in text) == ("ucx | after the key", True, True)
    assert [line.rpartition("| ")[2] for line in lines[-3:]] == ["line 998", "line 999", "a step failed"]
    (tmp_path / "y").symlink_to(tmp_path / "x")
    with pytest.raises(ConfigError, match="y: is a link to .*; remove the link"):
        folder.BuildLog(tmp_path / "y" / "build.log")


@pytest.mark.parametrize(("names", "accepted"), CASES["a-layout-that-a-killed-build-left-is-replaced"])
def test_a_layout_that_a_killed_build_left_is_replaced(tmp_path: Path, names: list[str], accepted: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    if accepted:
        check_layout(tmp_path)
    else:
        with pytest.raises(ConfigError, match="is not an OCI layout"):
            check_layout(tmp_path)
    check_layout(tmp_path / "missing")
