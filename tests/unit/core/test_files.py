import os
from pathlib import Path

from imagebuild.core import write_text


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Root may give /dev/null as an output, and the machine must keep it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text\n")
        assert os.read(reader, 100) == b"text\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
