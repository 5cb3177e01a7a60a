"""Locks of build folders, and links and damaged layouts in them."""

import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from imagebuild.build.folder import check_layout, held_folders, refuse_links
from imagebuild.core.errors import ConfigError


@pytest.mark.parametrize("removed", [False, True])
def test_a_second_build_waits_and_says_for_whom(tmp_path: Path, removed: bool) -> None:
    folder, waits, entered = tmp_path / "build", threading.Event(), threading.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        waits.set()

    def second() -> None:
        with held_folders([folder, tmp_path, folder], note):
            entered.set()

    thread = threading.Thread(target=second)
    with held_folders([folder], notes.append):
        assert not notes
        thread.start()
        assert waits.wait(60)
        if removed:
            shutil.rmtree(folder)
        assert not entered.wait(0.05)
    assert entered.wait(60)
    thread.join()
    held = rf"process {os.getpid()} on \S+, since \d{{4}}-\d\d-\d\d [\d:]+ UTC: imagebuild"
    assert re.match(f"{folder}: waiting until another build has ended: {held}", notes[0])
    assert (folder / ".lock").is_file()


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(ConfigError, match=r"\.lock: cannot be locked: .*; choose another folder"):
        held_folders([tmp_path], print).__enter__()
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize(
    ("names", "accepted"),
    [
        ([], True), (["blobs"], True), (["oci-layout", "index.json", "blobs"], True), (["ingest", "blobs"], True),
        (["thesis.txt"], False), (["blobs", "thesis.txt"], False),
    ],
)  # fmt: skip
def test_a_layout_that_a_killed_build_left_is_replaced(tmp_path: Path, names: list[str], accepted: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    if accepted:
        check_layout(tmp_path)
    else:
        with pytest.raises(ConfigError, match="is not an OCI layout"):
            check_layout(tmp_path)
    check_layout(tmp_path / "missing")


def test_a_link_is_refused_even_if_it_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link: is a link to nowhere; remove the link"):
        refuse_links([tmp_path, tmp_path / "link"])
