"""Files are written whole."""

import os
import stat
import threading
from pathlib import Path

import pytest

from imagebuild.core import ConfigError, write_text


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for text in ("one", "two"):
        write_text(path, text)
        assert path.read_text() == text
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(5)
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_no_place_for_a_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_text(tmp_path, "text")
